"""What happens when a loss or gradient is not finite: the step changes nothing, is written down, and ends the run if
the policy says so. All workers hold the same sums, hence the same flags: they agree without a word.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dali.loader import Batch, LabelledBatch
from dali.order import step_indices
from dali.sources import Source
from pipeline import workers
from pipeline.config import Config
from pipeline.journal import number

FOLDER = "non_finite"
IN_A_ROW = 10  # steps, where train.non_finite_in_a_row is null
MOST_FILES = 100  # a run may leave out a step now and then for weeks
LARGEST = 5  # samples to look at when none is at fault by itself


class Buffers:
    """Running statistics, to be put back after a step that changes nothing: a NaN would stay in them for good."""

    def __init__(self, model: torch.nn.Module) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        self._groups = list(by_type.values())
        self._kept: list[Tensor] = []

    def keep(self) -> None:
        self._kept = [torch.cat([buffer.flatten() for buffer in group]) for group in self._groups]

    def restore(self, where: Tensor) -> None:
        """Put back what was kept if `where`, a scalar on the device, is not 0; the host does not learn which."""
        for group, kept in zip(self._groups, self._kept, strict=True):
            now = torch.cat([buffer.flatten() for buffer in group])
            chosen = torch.where(where > 0, kept, now).split([buffer.numel() for buffer in group])
            torch._foreach_copy_(group, [part.view_as(b) for part, b in zip(chosen, group, strict=True)])
        self._kept = []


class Step(NamedTuple):
    """A step whose flag is on its way from the device."""

    step: int  # completed updates after it
    batch: Batch | LabelledBatch
    names: tuple[str, ...]
    values: Tensor  # the flag, then the terms of these names; on the CPU once `ready`
    ready: torch.cuda.Event | None


class Guard:
    """Reads each step's flag one step later, when the device has long got to it, so that no step waits.

    Attributes:
        skipped: steps left out so far.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        backbone: nn.Module,
        rank: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        global_batch: int,
        add_up: bool = False,
    ) -> None:
        """`add_up`: the terms of a step are this worker's parts of sums over the workers."""
        train = config.train
        self.limit = 1 if train.on_non_finite == "stop" else train.non_finite_in_a_row or IN_A_ROW
        self.skipped = 0
        self._in_a_row = 0
        self._config, self._source, self._backbone, self._rank = config, source, backbone, rank
        self._autocast, self._global_batch, self._add_up = autocast, global_batch, add_up
        self._last: Step | None = None

    def after_step(self, step: int, batch: Batch | LabelledBatch, terms: Mapping[str, Tensor], flag: Tensor) -> None:
        """Take in a step's flag (1: it was left out) and its terms, `loss` among them, and judge the step before.

        Raises:
            RuntimeError: by all workers alike, if too many in a row were left out.
        """
        on_device = torch.stack([flag.to(torch.float64), *(term.to(torch.float64) for term in terms.values())])
        ready = None
        if on_device.is_cuda:
            values = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            values.copy_(on_device, non_blocking=True)
            ready = torch.cuda.current_stream(on_device.device).record_event()
        else:
            values = on_device
        before, self._last = self._last, Step(step, batch, tuple(terms), values, ready)
        if before is not None:
            self._judge(before)

    def close(self) -> None:
        """Judge the last step.

        Raises:
            RuntimeError: as `after_step`.
        """
        before, self._last = self._last, None
        if before is not None:
            self._judge(before)

    def _judge(self, done: Step) -> None:
        if done.ready is not None:
            done.ready.synchronize()
        flag, *terms = done.values.tolist()
        if not flag:
            self._in_a_row = 0
            return
        self.skipped += 1
        self._in_a_row += 1
        if self.skipped > MOST_FILES and self._in_a_row < self.limit:
            return
        if self._add_up:
            terms = [sum(parts) for parts in zip(*workers.gather_objects(terms, "non_finite.terms"), strict=True)]
        named = dict(zip(done.names, terms, strict=True))
        what = f"the loss of step {done.step} is {named['loss']}"
        if math.isfinite(named["loss"]):
            what = f"the loss of step {done.step} is finite ({named['loss']:g}), its gradient is not"
        note = self._config.output_path / FOLDER / f"step_{done.step}.json"
        rows = self._look(done)
        if self._rank == 0:
            print(f"warning: {what}; the update was left out, see {note}", flush=True)
            self._write(note, done.step, named, rows)
        if self._in_a_row >= self.limit:
            raise RuntimeError(
                f"{what}, the {self._in_a_row}. in a row: train.on_non_finite ends the run; see {note}; "
                "the last checkpoint was saved before"
            )

    def _look(self, done: Step) -> list[dict[str, Any]]:
        """This worker's samples one by one, without batch statistics, which would spread one's fault over all; then
        those at fault of all workers, or the few with the largest features. The weights are of a step later.
        """
        rows: list[dict[str, Any]] = []
        batch, backbone = done.batch, self._backbone
        was_training = backbone.training
        backbone.eval()
        with torch.no_grad(), self._autocast():
            for view, images in enumerate((batch.y1, batch.y2) if isinstance(batch, Batch) else (batch.images,)):
                if not len(images):
                    continue
                pixels = images.flatten(1).isfinite().all(1).tolist()
                parts = images.split(self._config.knn.batch)
                sizes = torch.cat([backbone(part).float().norm(dim=1) for part in parts]).tolist()
                for index, whole, size in zip(batch.indices.tolist(), pixels, sizes, strict=True):
                    fault = None if whole and math.isfinite(size) else "features" if whole else "pixels"
                    name = self._source.name(index)
                    rows.append({"index": index, "name": name, "view": view + 1, "not_finite": fault, "norm": size})
        backbone.train(was_training)
        everyone = [row for part in workers.gather_objects(rows, "non_finite") for row in part]
        at_fault = [row for row in everyone if row["not_finite"]]
        return at_fault or sorted(everyone, key=lambda row: -row["norm"])[:LARGEST]

    def _write(self, note: Path, step: int, terms: dict[str, float], rows: list[dict[str, Any]]) -> None:
        config = self._config
        indices = step_indices(config.seed, step - 1, len(self._source), self._global_batch)
        text = {
            "step": step,
            "terms": {key: number(value) for key, value in terms.items()},
            "samples": [row | {"norm": number(row["norm"])} for row in rows],
            "global_batch": indices.tolist(),
        }
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            temporary = note.with_suffix(".tmp")
            temporary.write_text(json.dumps(text, indent=1, allow_nan=False) + "\n")
            os.replace(temporary, note)
        except OSError as error:
            print(f"warning: {note} could not be written ({error.strerror})", flush=True)
