"""Iterators of batches: DALI runs in a thread of its own, some batches ahead of whoever takes them."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dali.graphs import Batch as Fed
from dali.graphs import labelled_eval, random_views
from dali.order import Shard, split, step_indices, steps_per_epoch, view_params, worker_positions
from dali.sources import Source
from dali.spec import ViewsSpec
from dali.views import view_operands


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


class _Loader:
    """What both loaders share: the thread that runs the graph, and the hand-over of its tensors.

    DALI's default executor never writes again into an output while a tensor made from it lives. On a GPU that does not
    cover kernels still to run, so there the views are copied on the current stream, and the output is kept until the
    copy is done.
    """

    def __init__(
        self, device: str, threads: int, prefetch: int, dtype: torch.dtype, channels_last: bool, shape: tuple[int, int]
    ) -> None:
        self.wait_seconds = 0.0  # spent in the last `next()` waiting for data
        self._device = torch.device(device)
        assert self._device.type == "cpu" or self._device.index is not None, "name the GPU: cuda:0"
        self._how = {"threads": threads, "device_id": self._device.index, "prefetch": prefetch}
        self._layout = "HWC" if channels_last else "CHW"
        self._dtype = dtype
        self._shape = shape  # channels, size
        self._stop = threading.Event()
        # One batch more than DALI's own queue holds, so that the thread can hand over and go on.
        self._made: queue.Queue[tuple[Any, Any] | BaseException] = queue.Queue(maxsize=1)
        self._lent: tuple[Any, torch.cuda.Event] | None = None
        self._thread: threading.Thread | None = None

    def _start(self, make: Callable[[Callable[[], Fed]], Any], batches: Iterator[tuple[Any, Fed]]) -> None:
        """Run the graph that `make` builds around a feed, over `batches` of (what to hand out beside it, feed)."""
        self._thread = threading.Thread(
            target=_produce, args=(make, batches, self._made, self._stop), name="dali", daemon=True
        )
        self._thread.start()

    def _take(self) -> tuple[Any, list[torch.Tensor]]:
        """The next batch's companion and tensors; StopIteration at the end; the thread's error if it had one."""
        start = time.perf_counter()
        made = self._made.get() if self._thread is not None else StopIteration()
        self.wait_seconds = time.perf_counter() - start
        if isinstance(made, BaseException):
            self.close()
            raise made
        companion, outputs = made
        return companion, self._own(outputs)

    def _own(self, outputs: Any) -> list[torch.Tensor]:
        tensors = [torch.from_dlpack(output.as_tensor()) for output in outputs]
        if self._device.type == "cuda":
            if self._lent is not None:
                self._lent[1].synchronize()
            tensors = [tensor.clone() for tensor in tensors]
            self._lent = (outputs, torch.cuda.current_stream(self._device).record_event())
        if self._layout == "HWC":
            tensors = [tensor.permute(0, 3, 1, 2) for tensor in tensors]
        return [tensor.to(self._dtype) for tensor in tensors]

    def _empty(self) -> torch.Tensor:
        channels, size = self._shape
        return torch.empty((0, channels, size, size), dtype=self._dtype, device=self._device)

    def close(self) -> None:
        """End the thread and free the graph; the loader gives no more batches. Harmless when called again."""
        self._stop.set()
        if self._thread is not None:
            while self._thread.is_alive():
                _drain(self._made)
                self._thread.join(timeout=0.05)
            self._thread = None
        if self._lent is not None:
            self._lent[1].synchronize()
            self._lent = None

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _drain(made: queue.Queue[Any]) -> None:
    try:
        made.get_nowait()
    except queue.Empty:
        pass


def _produce(
    make: Callable[[Callable[[], Fed]], Any],
    batches: Iterator[tuple[Any, Fed]],
    made: queue.Queue[Any],
    stop: threading.Event,
) -> None:
    """The thread: feed, run, hand over, until the batches end, `stop` is set, or something fails.

    A graph that failed is never run again: DALI may then hand out an earlier batch.
    """
    companions: deque[Any] = deque()

    def feed() -> Fed:
        if stop.is_set():
            raise StopIteration
        companion, fed = next(batches)
        companions.append(companion)
        return fed

    try:
        pipeline = make(feed)
        while not stop.is_set():
            outputs = pipeline.run()
            made.put((companions.popleft(), outputs))
    except BaseException as error:  # handed to whoever takes the batches, StopIteration included
        made.put(error)


class _TrainLoader(_Loader):
    """One item a step, of this worker's part of the global batch, from `start_step` until before `stop_step`.

    Without `stop_step` it is endless. What comes out is a pure function of (source, views, channels, seed,
    global_batch, micro_batches, step): slices of the workers laid together are the same bits for any number of workers
    and threads. The n samples are ordered by micro-batch (see `order.worker_positions`); n may be 0.
    """

    _views_of_each: int

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
    ) -> None:
        """`device` is "cpu" or "cuda:N"; `threads` DALI's own; `prefetch` batches are in the making at a time.

        Raises:
            InputError: the source has fewer images than the global batch.
        """
        super().__init__(device, threads, prefetch, dtype, channels_last, (channels, views.size))
        self._source, self._views, self._channels, self._seed = source, views, channels, seed
        self._global_batch = global_batch
        self._epoch_steps = steps_per_epoch(len(source), global_batch)
        self._positions = worker_positions(global_batch, micro_batches, shard)
        self._step, self._stop_step = start_step, stop_step
        self._local = sum(position.stop - position.start for position in self._positions)
        if self._local:
            self._start(self._graph, self._batches(start_step))

    def _next(self) -> tuple[NDArray[np.int64], list[torch.Tensor]]:
        """The images' indices, and their views."""
        if self._local:
            return self._take()
        if self._stop.is_set() or self._step == self._stop_step:
            raise StopIteration
        self._step += 1
        return np.zeros(0, np.int64), [self._empty() for _ in range(self._views_of_each)]

    def _graph(self, feed: Callable[[], Fed]) -> Any:
        how = {"count": self._views_of_each, "batch": self._local, **self._how}
        return random_views(self._source, self._views, self._channels, self._layout, feed, **how)

    def _batches(self, step: int) -> Iterator[tuple[NDArray[np.int64], Fed]]:
        while step != self._stop_step:
            whole = step_indices(self._seed, step, len(self._source), self._global_batch)
            indices = np.concatenate([whole[position] for position in self._positions])
            sizes = self._source.sizes(indices)
            operands: list[Any] = []
            for view in range(self._views_of_each):
                params = view_params(self._seed, step // self._epoch_steps, indices, view, self._views, self._channels)
                operands += view_operands(params, view, self._views, self._channels, sizes).values()
            yield indices, (self._source.feed(indices), *operands)
            step += 1


class TwoViewLoader(_TrainLoader):
    """Iterator of `Batch`es, for pretraining."""

    _views_of_each = 2

    def __iter__(self) -> "TwoViewLoader":
        return self

    def __next__(self) -> Batch:
        indices, (y1, y2) = self._next()
        return Batch(y1, y2, indices)


class LabelledLoader(_TrainLoader):
    """Iterator of `LabelledBatch`es, for supervised training: the first view of each image, which has a label."""

    _views_of_each = 1

    def __iter__(self) -> "LabelledLoader":
        return self

    def __next__(self) -> LabelledBatch:
        indices, (images,) = self._next()
        assert self._source.labels is not None, "a source without labels"
        return LabelledBatch(images, torch.from_numpy(self._source.labels[indices]).to(self._device), indices)


class EvalLoader(_Loader):
    """Iterator of `LabelledBatch`es over this worker's contiguous slice of `indices` (default: all), each image once.

    The last batch may be smaller. An image's pixels depend on nothing but the image.
    """

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
    ) -> None:
        """`batch`: images at a time; the rest as in `TwoViewLoader`."""
        super().__init__(device, threads, prefetch, dtype, channels_last, (channels, views.size))
        self._source = source
        every = np.arange(len(source), dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
        self._indices = every[split(len(every), shard.count)[shard.index]]
        self._batch = batch
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
        indices, (images,) = self._take()
        labels = None if self._source.labels is None else torch.from_numpy(self._source.labels[indices])
        return LabelledBatch(images, labels if labels is None else labels.to(self._device), indices)

    def _batches(self) -> Iterator[tuple[NDArray[np.int64], Fed]]:
        for start in range(0, len(self._indices), self._batch):
            indices = self._indices[start : start + self._batch]
            yield indices, (self._source.feed(indices),)
