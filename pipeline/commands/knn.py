"""`knn`: naming images by their nearest neighbours; one worker."""

from pipeline import jobs


def run(args: list[str]) -> int:
    """Join the job and do this worker's part; returns the exit code."""
    return jobs.work("knn", args)
