"""`pretrain`: one worker of a run. Started by `launch`, by horovodrun, or alone."""

from pipeline import jobs


def run(args: list[str]) -> int:
    """Join the job and do this worker's part; returns the exit code."""
    return jobs.work("pretrain", args)
