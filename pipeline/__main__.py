"""python -m pipeline VERB ...: one verb, one file in pipeline/commands."""

import atexit
import os
import sys
from importlib import import_module
from typing import NoReturn

from dali.errors import InputError
from pipeline import stopping

VERBS = {
    "launch": "pretrain, probe, finetune or knn with several workers (what ./run.sh VERB calls)",
    "pretrain": "one worker of a run",
    "probe": "one worker of a linear classifier on a frozen backbone",
    "finetune": "one worker of a training with labels",
    "knn": "one worker of an evaluation by nearest neighbours",
    "quickstart": "pretrain on scikit-learn's handwritten digits",
    "check-data": "decode every image, name the bad ones, and write them into a list to exclude",
    "features": "embeddings of images as a file, pictures of them, signs of collapse",
    "export": "hand the backbone over in other tools' formats",
    "results": "a table of runs, with what their backbones were found to be worth",
    "doctor": "check every part of the installation",
    "exactness": "how equal runs on 1, 2, 3, 4 workers are",
    "parity": "how far views are from torchvision's on the same draws",
    "faults": "break runs in the ways clusters do, and compare what comes of it",
    "ui": "open MLflow on a run's output folder",
    "sync-tracking": "send what a tracking server missed",
    "gradient": "tables of what ways of spreading the loss over workers do to its gradient",
    "bench": "measurements: autocast, combine, elastic, loader, loader-memory, micro-batches, resilience",
    "reference": "write docs/configuration.md from the config sections",
}
WORKERS = {"pretrain", "probe", "finetune", "knn"}  # a thread of theirs takes the signals
# The longest that a step waits for a thread in Python, such as MLflow's, each time it comes back from a kernel. With
# Python's own 5 ms all workers' steps took half as long again while rank 0 opened its store.
SWITCH_SECONDS = 1e-4


def main(words: list[str]) -> int:
    if not words or words[0] not in VERBS:
        print("\n".join(f"  {verb:<14} {text}" for verb, text in VERBS.items()))
        return 0 if not words or words[0] in ("-h", "--help") else 2
    stopping.hear()
    if words[0] in WORKERS:
        stopping.block()
        sys.setswitchinterval(SWITCH_SECONDS)
    command = import_module(f"pipeline.commands.{words[0].replace('-', '_')}")
    try:
        return command.run(words[1:])
    except InputError as error:
        if os.environ.get("HOROVOD_RANK", "0") == "0":  # all workers have the same one; once is enough
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


def leave(code: int) -> NoReturn:
    """End a worker whose work is done and written: taking torch, DALI and MLflow apart would cost it seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    if WORKERS.intersection(sys.argv[1:2]):
        leave(ended)
    sys.exit(ended)
