"""Memory and time of a training step against `train.micro_batches`, at one global batch."""

import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from dali.sources import open_source
from pipeline import config, pretraining, training, workers
from pipeline.peak_memory import peak_memory
from pipeline.plan import make_plan
from pipeline.samples import write_photographs


class Row(NamedTuple):
    """What a step held at most beyond weights, gradients and optimizer state (bytes), and took (seconds)."""

    micro_batches: int
    held: int
    seconds: float


def measure(backbone: str, size: int, batch: int, counts: Iterable[int], device: str) -> Iterator[Row]:
    """One row for each number of micro-batches; the first step of each is not counted."""
    world = workers.start()
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder) / "images", batch, 160, 120)
        for count in counts:
            made = config.load(
                None,
                [
                    f"data.path={folder}/images",
                    f"output={folder}/output",
                    f"device={device}",
                    f"views.size={size}",
                    f"model.backbone={backbone}",
                    "model.projector=[512, 512, 512]",
                    f"train.global_batch={batch}",
                    f"train.micro_batches={count}",
                ],
            )
            source = open_source(made.data, "train")
            place = workers.choose_device(made.device, world.local_rank, world.local_size)
            run = pretraining.build(made, world, place, source, make_plan(made, len(source)))
            with training.open_loader(run) as loader:
                y1, y2, _ = next(loader)
            training.train_step(run, y1, y2)
            with peak_memory(place) as peak:
                start = time.perf_counter()
                training.train_step(run, y1, y2)
                seconds = time.perf_counter() - start
            yield Row(count, peak.bytes, seconds)
