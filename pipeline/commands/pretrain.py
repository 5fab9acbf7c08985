"""`pretrain`: one worker of a run. Started by `launch`, by horovodrun, or alone."""

import argparse
from contextlib import nullcontext

from pipeline import config


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pretrain", description="Pretrain a backbone.")
    parser.add_argument("config", nargs="?", help="YAML file; its keys override configs/base.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override single keys")
    options = parser.parse_args(args)
    if options.config and "=" in options.config:
        options.overrides.insert(0, options.config)
        options.config = None
    return options


def run(args: list[str]) -> int:
    """Join the job and train; returns the exit code."""
    from pipeline import elastic, failures, pretraining, stopping, watchdog, workers

    options = parse(args)
    wishes = stopping.Wishes()
    # A newcomer to an elastic job may say nothing before the others listen, not even that its arguments are wrong
    alone = elastic.is_elastic()
    workers.join()
    world = workers.place()
    with failures.recorded(workers.last_rank):
        with nullcontext() if alone else workers.together():
            settings = config.load(options.config, options.overrides)
        failures.record_in(settings.output_path)
        watchdog.start(world.rank, settings.train.watchdog_seconds)
        if alone:
            verdict = elastic.pretrain(settings, wishes)
        else:
            with pretraining.owned(settings.output_path, world):
                verdict = pretraining.pretrain(settings, world._replace(hosts=workers.host_names()), wishes)
    # A launcher that sees one worker leave with a code sends SIGTERM to the others: leave together, and deaf
    wishes.ignore()
    code = stopping.EXIT_CODES[verdict]
    if workers.last_rank() == 0:
        failures.leave(settings.output_path, code)
    workers.barrier("leave")
    watchdog.stop()
    workers.stop()
    return code
