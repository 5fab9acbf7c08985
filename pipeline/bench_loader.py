"""How many images a second the loader makes, how its time divides, and how many the reference's loader makes.

The reference's is torchvision and PIL in torch's DataLoader, with as many processes as ours has threads. All take turns
in one run, so that what else the machine does hits all alike; compare ratios, not figures of different runs. Time on
cores is counted too, which depends less on what else there is to do.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

from dali.folders import FolderSource
from dali.interface import Part
from dali.loader import GPU_DECODER, CheckLoader, TwoViewLoader
from dali.order import Shard
from dali.spec import DecoderSpec, JitterSpec, ViewsSpec
from pipeline import reference_loader
from pipeline.progress import report
from pipeline.samples import write_photographs

WIDTH, HEIGHT = 500, 375  # of the JPEGs: about ImageNet's
RECIPE = ViewsSpec()
RESIZED = ViewsSpec(jitter=JitterSpec(prob=0), grey=0, blur=(0, 0), solarize=(0, 0))
DECODED, WHOLE = "JPEG decoding alone", "the whole recipe: + solarize"
STAGES = {  # each with all of those before it
    "+ crop, resize, normalise": RESIZED,
    "+ blur": RESIZED.model_copy(update={"blur": RECIPE.blur}),
    "+ jitter, grey": RECIPE.model_copy(update={"solarize": (0.0, 0.0)}),
    WHOLE: RECIPE,
}
UNFILTERED = "the whole recipe without antialiasing"
REFERENCE = "torchvision and PIL in a DataLoader"


class Row(NamedTuple):
    """One figure a round: images a second, as multiples of the reference's of the same round, core seconds an image."""

    what: str
    rates: list[float]
    ratios: list[float]
    costs: list[float]


def measure(
    device: torch.device,
    threads: int,
    seconds: float,
    rounds: int,
    batch: int = 64,
    images: int = 256,
    decoder: DecoderSpec = GPU_DECODER,
) -> list[Row]:
    """All rows, in the order of the work: each is measured for so many seconds, once a round."""
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), images, WIDTH, HEIGHT)
        source = FolderSource(folder)
        how: dict[str, Any] = {"device": str(device), "threads": threads, "decoder": decoder}
        begin: dict[str, Callable[[], Iterator[Any]]] = {DECODED: partial(_decoded, source, batch, how)}
        for name, spec in (STAGES | {UNFILTERED: RECIPE.model_copy(update={"antialias": False})}).items():
            begin[name] = partial(_views, source, spec, batch, how)
        files = [source.path(index) for index in range(len(source))]
        begin[REFERENCE] = partial(reference_loader.batches, files, RECIPE, batch, threads, device)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in begin}
        for turn in range(rounds * len(begin)):
            name = list(begin)[turn % len(begin)]
            report(f"measuring {name}", turn, rounds * len(begin))
            with closing(begin[name]()) as batches:  # type: ignore[type-var]
                found[name].append(_measured(batches, batch, threads, device, seconds))
        report("measured", rounds * len(begin), rounds * len(begin))
    rows = []
    for name, turns in found.items():
        ratios = [own[0] / theirs[0] for own, theirs in zip(turns, found[REFERENCE], strict=True)]
        rows.append(Row(name, [rate for rate, _ in turns], ratios, [cost for _, cost in turns]))
    return rows


def _measured(
    batches: Iterator[Any], batch: int, threads: int, device: torch.device, seconds: float
) -> tuple[float, float]:
    """Images a second over at least so many seconds, and seconds of a core an image, all processes together.

    The first batches, one a process of the reference, are not counted: they bear the start. As nobody works on a
    batch, none lie ready when the clock starts.
    """
    for _ in range(threads + 1):
        next(batches)
    start, used, taken = time.perf_counter(), _core_seconds(), 0
    while taken == 0 or time.perf_counter() - start < seconds:
        next(batches)
        taken += batch
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return taken / (time.perf_counter() - start), (_core_seconds() - used) / taken


def _core_seconds() -> float:
    """Spent so far by this process and those it has started that still run."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(float(spent.user + spent.system) for spent in times)


def _decoded(source: FolderSource, batch: int, how: dict[str, Any]) -> Iterator[Any]:
    often = Part([source] * 100)  # a start every hundred epochs is not felt
    while True:
        with CheckLoader(often, channels=3, batch=batch, **how) as loader:
            yield from loader


def _views(source: FolderSource, spec: ViewsSpec, batch: int, how: dict[str, Any]) -> Iterator[Any]:
    alone = Shard(0, 1)
    with TwoViewLoader(
        source, spec, channels=3, seed=0, global_batch=batch, shard=alone, channels_last=True, **how
    ) as loader:
        yield from loader


def table(rows: list[Row]) -> str:
    """The rows in Markdown: medians, and in brackets the smallest and largest of the rounds."""
    lines = ["| two views of each image | images/s | times torchvision's | core ms an image |", "|---|---|---|---|"]
    for row in rows:
        rates, ratios = _spread(row.rates, ",.0f"), _spread(row.ratios, ".2f")
        lines.append(f"| {row.what} | {rates} | {ratios} | {_spread([1000 * cost for cost in row.costs], '.2f')} |")
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
