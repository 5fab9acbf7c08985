"""The verbs that run on workers, seen from the launcher and from a worker: their config, their checks, their work."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING

from dali.errors import InputError
from dali.order import steps_per_epoch
from dali.sources import open_source, open_test
from pipeline.config import Config, load
from pipeline.file_systems import check_output
from pipeline.progress import report

if TYPE_CHECKING:  # the launcher must start, and say what is wrong, where torch or Horovod is broken
    from pipeline import stopping, workers

VERBS = ("pretrain", "probe", "finetune", "knn")
DESCRIPTIONS = {
    "pretrain": "Pretrain with one or several workers.",
    "probe": "Train a linear classifier on a frozen backbone, and count the test images it names rightly.",
    "finetune": "Train a backbone and a classifier on it with few or all labels, and count the test images.",
    "knn": "Name each test image by its nearest training images.",
}


def load_for(verb: str, file: str | None, overrides: list[str]) -> Config:
    """The config as a verb means it: an evaluation has a name and a folder of its own, beside the pretraining's.

    Raises:
        InputError: as `config.load`.
    """
    config = load(file, overrides)
    if verb == "pretrain":
        return config
    name = f"{config.name}-{verb}"
    return config.model_copy(update={"name": name, "output": config.output or f"outputs/{name}"})


def check_workers(verb: str, config: Config, count: int) -> None:
    """Each worker needs a sample of the batch that they share, if the verb has one.

    Raises:
        InputError: there are not enough of them.
    """
    if verb == "pretrain":
        config.train.check_workers(count)
    section = {"probe": config.probe, "finetune": config.finetune}.get(verb)
    if section is not None and section.batch < count:
        raise InputError(
            f"{verb}.batch: {section.batch} is fewer than the {count} workers; each needs at least one sample"
        )


def check_without_torch(config: Config) -> None:
    """Check what can be checked of a pretraining before torch is imported, which takes longer than all of this.

    Where the workers are on this machine, they say the rest as soon as their launcher could.

    Raises:
        InputError: one line.
    """
    source = open_source(config.data, "train", report)
    steps_per_epoch(len(source), config.train.global_batch)
    open_test(config.data, source, report)
    check_output(config.output_path)


def described(verb: str, config: Config, count: int, device: str, threads: int | None) -> str:
    """Check everything that needs no worker, and say what the config means.

    Raises:
        InputError: one line.
    """
    if verb == "pretrain":
        from pipeline.plan import describe
        from pipeline.pretraining import check

        source, plan = check(config, report)
        open_test(config.data, source, report)
        return describe(config, plan, count, device, threads)
    from pipeline import evaluation

    source, test = evaluation.check(config, verb, report)
    return evaluation.describe(config, verb, source, test, count, device, threads)


def parse(verb: str, args: list[str]) -> argparse.Namespace:
    """A worker's words: a config file, if any, and single keys."""
    parser = argparse.ArgumentParser(prog=verb, description=f"One worker of a {verb} job.")
    parser.add_argument("config", nargs="?", help="YAML file; its keys override configs/base.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override single keys")
    options = parser.parse_args(args)
    if options.config and "=" in options.config:
        options.overrides.insert(0, options.config)
        options.config = None
    return options


def work(verb: str, args: list[str]) -> int:
    """One worker of a job: join it, do its part; returns the exit code."""
    from pipeline import elastic, failures, pretraining, stopping, watchdog, workers

    options = parse(verb, args)
    wishes = stopping.Wishes()
    # A newcomer to an elastic job may say nothing before the others listen, not even that its arguments are wrong
    alone = elastic.is_elastic()
    if alone and verb != "pretrain":
        raise InputError(f"--min-np: only workers of pretrain may come and go; start {verb} without it")
    if alone:
        elastic.meet()
    else:
        workers.join()
    world = workers.place()
    with failures.recorded(workers.last_rank):
        with nullcontext() if alone else workers.together():
            config = load_for(verb, options.config, options.overrides)
        failures.record_in(config.output_path)
        watchdog.start(world.rank, config.train.watchdog_seconds)
        if alone:
            verdict = elastic.pretrain(config, wishes)
        else:
            with pretraining.owned(config.output_path, world):
                verdict = _do(verb, config, world._replace(hosts=workers.host_names()), wishes)
    # A launcher that sees one worker leave with a code sends SIGTERM to the others: leave together, and deaf
    wishes.ignore()
    code = stopping.EXIT_CODES[verdict]
    if workers.last_rank() == 0:
        failures.leave(config.output_path, code)
    workers.barrier("leave")
    watchdog.stop()
    workers.stop()
    return code


def _do(verb: str, config: Config, world: workers.World, wishes: stopping.Wishes) -> int:
    if verb == "pretrain":
        from pipeline.pretraining import pretrain

        return pretrain(config, world, wishes)
    from pipeline import classifier, evaluation, stopping

    if evaluation.resumable(config, verb):
        return classifier.run(config, verb, world, wishes)
    wishes.end_at_once()
    (evaluation.run_knn if verb == "knn" else evaluation.run_cached_probe)(config, world)
    return stopping.GO_ON
