class InputError(Exception):
    """A user's mistake: one line that names the key or file, the value and the remedy. Exit code 2, no traceback."""
