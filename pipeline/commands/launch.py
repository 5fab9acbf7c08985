"""`launch`: what `./run.sh pretrain`, `probe`, `finetune` and `knn` call."""

from pipeline import launching


def run(args: list[str]) -> int:
    return launching.launch(args)
