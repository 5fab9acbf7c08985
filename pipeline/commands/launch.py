"""`launch`: what `./run.sh pretrain` calls."""

from pipeline import launching


def run(args: list[str]) -> int:
    return launching.launch(args)
