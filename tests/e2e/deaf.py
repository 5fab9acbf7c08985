"""A parent as job runners and shells can be: signals blocked, or ignored. What it starts inherits that."""

import signal

HEARD = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}


def deaf() -> None:
    """For `preexec_fn`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
