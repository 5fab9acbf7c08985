"""`exactness`: how equal runs on 1, 2, 3, 4 workers are; exit 1 if a bound is exceeded."""

import argparse
import os
from pathlib import Path

from pipeline import exactness
from pipeline.launching import run_again_with_workers


def run(args: list[str]) -> int:
    """Start a job of as many workers as asked for; in it, measure and print the table."""
    parser = argparse.ArgumentParser(prog="./run.sh exactness", description=__doc__)
    defaults = exactness.Options()
    parser.add_argument("--workers", default=",".join(map(str, defaults.sizes)), metavar="1,2,...")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--dtypes", default=",".join(defaults.dtypes))
    parser.add_argument("--optimizers", default=",".join(defaults.optimizers))
    parser.add_argument("--combines", default=",".join(defaults.combines))
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table to a file")
    options = parser.parse_args(args)
    sizes = tuple(sorted({1, *map(int, options.workers.split(","))}))
    if "HOROVOD_RANK" not in os.environ and max(sizes) > 1:
        return run_again_with_workers(max(sizes), ["exactness", *args], exactness.ENVIRONMENT)
    rows = exactness.measure(
        exactness.Options(
            sizes,
            options.steps,
            tuple(options.dtypes.split(",")),
            tuple(options.optimizers.split(",")),
            tuple(options.combines.split(",")),
        )
    )
    if not rows:
        return 0
    text = exactness.table(rows)
    print(text, flush=True)
    if options.write:
        options.write.write_text(text + "\n")
    exceeded = sum(not row.kept for row in rows if row.measure != "control")
    print(f"{exceeded} bounds exceeded" if exceeded else "every bound kept", flush=True)
    return 1 if exceeded else 0
