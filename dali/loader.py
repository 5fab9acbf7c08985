"""Iterators of batches: for pretraining, for supervised training, for evaluation, and to see whether images decode."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dali.graphs import Batch as Fed
from dali.graphs import decoded, labelled_eval, random_views
from dali.interface import Source
from dali.order import Shard, split, steps_per_epoch, view_params, worker_indices, worker_positions
from dali.running import Loader, Work
from dali.spec import DecoderSpec, ViewsSpec
from dali.views import view_operands

GPU_DECODER = DecoderSpec()


class Batch(NamedTuple):
    """This worker's part of a global batch: two views (n, C, S, S) of each image, and the (n,) images' indices."""

    y1: torch.Tensor
    y2: torch.Tensor
    indices: NDArray[np.int64]


class LabelledBatch(NamedTuple):
    """Images (n, C, S, S), their (n,) classes (None where the source has none), and their (n,) indices."""

    images: torch.Tensor
    labels: torch.Tensor | None
    indices: NDArray[np.int64]


Item = TypeVar("Item", Batch, LabelledBatch)


class TrainLoader(Loader, Generic[Item]):
    """Iterator of this worker's batches, one a step, from `start_step` until before `stop_step` (None: endless).

    What comes out is a pure function of (source, views, channels, seed, global_batch, micro_batches, step): slices of
    the workers laid together are the same bits for any number of workers and threads. The n samples are ordered by
    micro-batch (see `order.worker_positions`); n may be 0.
    """

    def __init__(
        self,
        source: Source,
        views: ViewsSpec,
        *,
        channels: int,
        seed: int,
        global_batch: int,
        shard: Shard,
        micro_batches: int = 1,
        start_step: int = 0,
        stop_step: int | None = None,
        device: str = "cpu",
        threads: int = 1,
        prefetch: int = 2,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        decoder: DecoderSpec = GPU_DECODER,
        report_bad: bool = False,
    ) -> None:
        """`device` is "cpu" or "cuda:N"; `threads` DALI's own; `prefetch` batches are in the making at a time;
        `decoder` counts on a GPU alone.

        With `report_bad`, a batch with images that cannot be read is given with zeros for them, named in `bad`: then
        call `replace`. Without, it ends the iteration with an InputError.

        Raises:
            InputError: the source has fewer images than the global batch.
        """
        super().__init__(source, device, threads, prefetch, dtype, channels_last, (channels, views.size), decoder)
        self._views, self._channels, self._report_bad = views, channels, report_bad
        self.seed, self.global_batch = seed, global_batch
        self._epoch_steps = steps_per_epoch(len(source), global_batch)
        self._positions = worker_positions(global_batch, micro_batches, shard)
        self._step, self._stop_step = start_step, stop_step
        self._local = sum(position.stop - position.start for position in self._positions)
        if self._local:
            self._start(self._graph, self._batches(start_step))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if self._local:
            indices, views = self._take()
            if self.bad and not self._report_bad:
                self._refuse(indices)
            return self._item(views, indices)
        if self._stop.is_set() or self._step == self._stop_step:
            raise StopIteration
        self._step += 1
        return self._item([self._empty() for _ in range(self._num_views)], np.zeros(0, np.int64))

    def _item(self, views: list[torch.Tensor], indices: NDArray[np.int64]) -> Item:
        raise NotImplementedError

    def _graph(self, feed: Callable[[], Fed]) -> Any:
        how = {"count": self._num_views, "batch": self._local, **self._how}
        return random_views(self._source, self._views, self._channels, self._layout, feed, **how)

    def _batches(self, step: int) -> Iterator[Work]:
        while step != self._stop_step:
            indices = self._indices_of(step)
            yield self._work(indices, indices, step // self._epoch_steps)
            step += 1

    def _indices_of(self, step: int) -> NDArray[np.int64]:
        return worker_indices(self.seed, step, len(self._source), self.global_batch, self._positions)

    def _work(self, indices: NDArray[np.int64], places: NDArray[np.int64], epoch: int) -> Work:
        """Images by `indices`, each with the draws that the image of `places` has in this epoch."""

        def feed(rows: NDArray[np.int64]) -> Fed:
            sizes = self._source.sizes(indices[rows])
            operands: list[Any] = []
            for view in range(self._num_views):
                params = view_params(self.seed, epoch, places[rows], view, self._views, self._channels)
                operands += view_operands(params, view, self._views, self._channels, sizes).values()
            return self._source.feed(indices[rows]), *operands

        return Work(indices, feed)

    def replace(self, batch: Item, others: Mapping[int, int], step: int) -> tuple[Item, dict[int, str]]:
        """A batch with other images, by index, in some of its rows: views by the draws of those they stand in for.

        Returns it with the rows whose new image is bad, too, and why. `batch` is the one of `step`, as it came or as
        this gave it back.
        """
        rows = np.array(list(others), np.int64)
        places = self._indices_of(step)[rows]
        indices = np.array(list(others.values()), np.int64)
        one = Loader(self._source, str(self._device), **self._again)
        one._num_views = self._num_views
        one._start(self._graph, iter([self._work(indices, places, step // self._epoch_steps)]))
        with one:
            _, parts = one._take()
        given: tuple[Any, ...] = batch[: self._num_views]
        views, mixed = [view.clone() for view in given], batch.indices.copy()
        for view, part in zip(views, parts, strict=True):
            view[rows] = part
        mixed[rows] = indices
        return self._item(views, mixed), {int(rows[place]): reason for place, reason in one.bad.items()}


class TwoViewLoader(TrainLoader[Batch]):
    """For pretraining: two random views of each image."""

    def _item(self, views: list[torch.Tensor], indices: NDArray[np.int64]) -> Batch:
        y1, y2 = views
        return Batch(y1, y2, indices)


class LabelledLoader(TrainLoader[LabelledBatch]):
    """For training with labels, which the source has: the first of the two views that `TwoViewLoader` gives."""

    _num_views = 1

    def _item(self, views: list[torch.Tensor], indices: NDArray[np.int64]) -> LabelledBatch:
        assert self._source.labels is not None, "a source without labels"
        return LabelledBatch(views[0], torch.from_numpy(self._source.labels[indices]).to(self._device), indices)


class EvalLoader(Loader):
    """Iterator of `LabelledBatch`es over this worker's contiguous slice of `indices` (default: all), each image once.

    The last batch may be smaller. An image's pixels depend on nothing but the image. One that cannot be read ends the
    iteration with an InputError, or is left out and counted in `left_out`, as the source says.
    """

    _num_views = 1

    def __init__(
        self,
        source: Source,
        views: ViewsSpec,
        *,
        channels: int,
        batch: int,
        shard: Shard,
        indices: NDArray[np.int64] | None = None,
        device: str = "cpu",
        threads: int = 1,
        prefetch: int = 2,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        decoder: DecoderSpec = GPU_DECODER,
    ) -> None:
        """`batch`: images at a time; the rest as in `TwoViewLoader`."""
        super().__init__(source, device, threads, prefetch, dtype, channels_last, (channels, views.size), decoder)
        every = np.arange(len(source), dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
        self._indices = every[split(len(every), shard.count)[shard.index]]
        self._batch = batch
        self.left_out = 0
        if len(self._indices):
            self._start(
                lambda feed: labelled_eval(source, views, channels, self._layout, feed, batch=batch, **self._how),
                self._batches(),
            )

    def __len__(self) -> int:
        """Batches in all."""
        return -(-len(self._indices) // self._batch)

    def __iter__(self) -> "EvalLoader":
        return self

    def __next__(self) -> LabelledBatch:
        good: list[int] = []
        while not good:
            indices, (images,) = self._take()
            if self.bad and self._source.on_bad == "fail":
                self._refuse(indices)
            self.left_out += len(self.bad)
            good = [row for row in range(len(indices)) if row not in self.bad]
        if self.bad:
            indices, images = indices[good], images[good]
        labels = None if self._source.labels is None else torch.from_numpy(self._source.labels[indices])
        return LabelledBatch(images, labels if labels is None else labels.to(self._device), indices)

    def _batches(self) -> Iterator[Work]:
        for start in range(0, len(self._indices), self._batch):
            indices = self._indices[start : start + self._batch]
            yield self._plain_work(indices)


class CheckLoader(Loader):
    """Decodes every image of an encoded source once, and gives no pixels: of each batch its indices, the images' (n, 2)
    heights and widths, and which rows are bad and why. A bad image has no size."""

    def __init__(
        self,
        source: Source,
        *,
        channels: int,
        batch: int,
        threads: int,
        device: str = "cpu",
        decoder: DecoderSpec = GPU_DECODER,
    ) -> None:
        super().__init__(source, device, threads, 2, torch.int64, False, (channels, 0), decoder)
        self._batch = batch
        self._start(lambda feed: decoded(source, channels, feed, batch=batch, **self._how), self._batches())

    def __iter__(self) -> "CheckLoader":
        return self

    def __next__(self) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, str]]:
        work, outputs = self._take_work()
        sizes = np.zeros((len(work.indices), 2), np.int64)
        if outputs is not None:
            sizes[work.rows] = outputs[0].as_array()[:, :2]
        sizes[list(work.bad)] = 0
        return work.indices, sizes, work.bad

    def _batches(self) -> Iterator[Work]:
        for start in range(0, len(self._source), self._batch):
            indices = np.arange(start, min(start + self._batch, len(self._source)), dtype=np.int64)
            yield self._plain_work(indices)
