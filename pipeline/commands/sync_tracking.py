"""sync-tracking OUT: send to MLflow what it missed while it did not answer."""

import sys
from pathlib import Path

from dali.errors import InputError
from pipeline import tracking


def run(words: list[str]) -> int:
    """0 when everything has been sent, 1 when something is left (a warning says why)."""
    if len(words) != 1 or words[0].startswith("-"):
        raise InputError("sync-tracking: give the output folder of one run, for example sync-tracking outputs/pretrain")
    output = Path(words[0]).absolute()
    if not tracking.sync(output):
        print(f"error: {output}: not everything could be sent; the same command goes on from there", file=sys.stderr)
        return 1
    print(f"{output}: everything is in MLflow")
    return 0
