"""Images that cannot be read, found while training: all workers hear of them before the step that was to use them.

The decision is one for all: name them and end, or train on others in their place, the same ones for any number of
workers (see `order.substitutes`).
"""

from typing import Generic, Protocol, Self

import numpy as np

from dali.errors import InputError
from dali.loader import Item, TrainLoader
from dali.order import step_indices, substitutes
from dali.running import describe_bad
from dali.sources import Source
from pipeline import workers
from pipeline.config import Config
from pipeline.plan import Plan


class Job(Protocol):
    """What this needs to know of a training, and where it keeps what it learns."""

    step: int
    bad_files: dict[int, str]

    @property
    def config(self) -> Config: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def source(self) -> Source: ...

    @property
    def world(self) -> workers.World: ...


class BadFiles(InputError):
    """Raised by all workers after the same step, so that they can still save together."""


class Readable(Generic[Item]):
    """Iterator of the loader's batches, with another image wherever one could not be read.

    A batch is taken from the loader, and the workers ask each other whether theirs is whole, while the step before it
    is computed: nobody waits for the answer.
    """

    def __init__(self, run: Job, loader: TrainLoader[Item]) -> None:
        self.wait_seconds = 0.0  # spent in the last `next()` waiting for data
        self._run = run
        self._loader: TrainLoader[Item] = loader
        self._vote = workers.Vote("bad_files")
        loader.known_bad |= run.bad_files
        self._next: tuple[Item | None, dict[int, str]] = self._look_ahead()
        self._vote.cast(len(self._next[1]))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        """
        Raises:
            BadFiles: `data.on_bad_file` says so, or there are more than `data.max_bad_files`.
        """
        batch, bad = self._next
        if batch is None:
            raise StopIteration
        self._next = self._look_ahead()
        if self._vote.cast(len(self._next[1])):
            try:
                return _agree(self._run, self._loader, batch, bad)
            except BadFiles:
                self.close()
                raise
        return batch

    def _look_ahead(self) -> tuple[Item | None, dict[int, str]]:
        batch = next(self._loader, None)
        self.wait_seconds = self._loader.wait_seconds
        return batch, self._loader.bad if batch is not None else {}

    def close(self) -> None:
        """Take in the last answer, so that nothing is pending. Called by all workers after the same step."""
        self._vote.close()


def _agree(run: Job, loader: TrainLoader[Item], batch: Item, bad: dict[int, str]) -> Item:
    """Tell all workers which images of this step are bad, until all of them have good ones in their places."""
    seed, samples, global_batch = loader.seed, len(run.source), loader.global_batch
    epoch, mine = run.step // run.plan.steps_per_epoch, batch.indices
    whole = step_indices(seed, run.step, samples, global_batch)
    while True:
        found = workers.gather_objects({int(batch.indices[row]): bad[row] for row in bad}, "bad_files.found")
        new = {index: reason for part in found for index, reason in part.items()}
        _decide(run, new)
        run.bad_files |= new
        loader.known_bad |= run.bad_files
        if not new:
            return batch
        known = np.array(list(run.bad_files), np.int64)
        places = whole[np.isin(whole, known)]
        others = dict(
            zip(places.tolist(), substitutes(seed, epoch, samples, global_batch, places, known).tolist(), strict=True)
        )
        wanted = {row: others[index] for row, index in enumerate(mine.tolist()) if index in others}
        wanted = {row: index for row, index in wanted.items() if batch.indices[row] != index}
        batch, bad = loader.replace(batch, wanted, run.step) if wanted else (batch, {})


def _decide(run: Job, found: dict[int, str]) -> None:
    """Go on without these images, or end; all workers alike."""
    data = run.config.data
    if found and data.on_bad_file == "fail":
        raise BadFiles(f"data.path: {describe_bad(_named(run, found))}")
    new = _named(run, {index: reason for index, reason in found.items() if index not in run.bad_files})
    count = len(run.bad_files) + len(new)
    if new and count > data.max_bad_files:
        raise BadFiles(
            f"data.max_bad_files: {count} files cannot be read, more than {data.max_bad_files}; one of them: "
            f"{describe_bad(new)}"
        )
    if run.world.rank == 0:
        for number, (name, reason) in enumerate(new.items(), len(run.bad_files) + 1):
            print(
                f"warning: {name!r} cannot be read: {reason}; another image takes its place "
                f"(bad file {number}; at most {data.max_bad_files})",
                flush=True,
            )


def _named(run: Job, bad: dict[int, str]) -> dict[str, str]:
    return {run.source.name(index): reason for index, reason in sorted(bad.items())}
