"""`exactness`: how equal runs on 1, 2, 3, 4 workers are; exit 1 if a bound is exceeded."""

import argparse
import os
from typing import get_args

from pipeline import exactness
from pipeline.arguments import numbers, refuse_fewer, some_of, writable_file
from pipeline.config import LossSection, OptimizerSection
from pipeline.launching import run_again_with_workers


def run(args: list[str]) -> int:
    """Start a job of as many workers as asked for; in it, measure and print the table."""
    parser = argparse.ArgumentParser(prog="./run.sh exactness", description=__doc__)
    defaults = exactness.Options()
    parser.add_argument("--workers", type=numbers, default=defaults.sizes, metavar="1,2,...")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    known = {
        "dtypes": tuple(exactness.BOUNDS),
        "optimizers": get_args(OptimizerSection.model_fields["name"].annotation),
        "combines": get_args(LossSection.model_fields["combine"].annotation),
    }
    for name, names in known.items():
        parser.add_argument(f"--{name}", type=some_of(names), default=getattr(defaults, name), metavar="NAME,...")
    parser.add_argument("--write", type=writable_file, metavar="FILE", help="also write the table to a file")
    options = parser.parse_args(args)
    refuse_fewer(options, workers=1, steps=1)
    sizes = tuple(sorted({1, *options.workers}))
    if "HOROVOD_RANK" not in os.environ and max(sizes) > 1:
        return run_again_with_workers(max(sizes), ["exactness", *args], exactness.ENVIRONMENT)
    chosen = exactness.Options(sizes, options.steps, options.dtypes, options.optimizers, options.combines)
    rows = exactness.measure(chosen)
    if not rows:
        return 0
    text = f"{exactness.table(rows)}\n\n{exactness.summary(rows)}"
    print(text, flush=True)
    if options.write:
        options.write.write_text(text + "\n")
    exceeded = sum(not row.kept for row in rows if row.measure != "control")
    print(f"{exceeded} bounds exceeded" if exceeded else "every bound kept", flush=True)
    return 1 if exceeded else 0
