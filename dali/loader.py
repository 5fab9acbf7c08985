"""Iterators of batches: DALI runs in a thread of its own, some batches ahead of whoever takes them."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dali import formats
from dali.errors import InputError
from dali.graphs import Batch as Fed
from dali.graphs import decoded, labelled_eval, two_view
from dali.interface import Source
from dali.order import Shard, split, step_indices, steps_per_epoch, view_params, worker_positions
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


def describe_bad(bad: Mapping[str, str]) -> str:
    """One line on images that cannot be read, by name, and what to do."""
    first, reason = next(iter(bad.items()))
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return (
        f"{first!r} cannot be read: {reason}{more}; mend it, or find all such files with ./run.sh check-data and leave "
        "them out with data.exclude, or train on others in their place with data.on_bad_file=skip"
    )


class _Work:
    """A batch on its way through the graph: its images, which of them are bad, and what the graph is fed of others."""

    def __init__(self, indices: NDArray[np.int64], feed: Callable[[NDArray[np.int64]], Fed]) -> None:
        """`feed` makes the graph's inputs for some of the batch's rows."""
        self.indices = indices
        self.bad: dict[int, str] = {}  # rows that cannot be read, and why
        self.rows = np.arange(len(indices))  # those that were fed
        self._feed = feed

    def fed(self, source: Source) -> Fed | None:
        """The graph's inputs for all rows but bad ones; None if there are no others."""
        self.rows = np.array([row for row in range(len(self.indices)) if row not in self.bad], np.int64)
        try:
            return self._feed(self.rows) if len(self.rows) else None
        except OSError:  # a source that reads bytes itself; DALI reads files for others
            gone = {row: reason for row in self.rows.tolist() if (reason := _why_gone(source, self.indices[row]))}
            if not gone:
                raise
            self.bad |= gone
            return self.fed(source)

    def check(self, source: Source, facts: Any) -> None:
        """Find bad rows in what the graph says of those it decoded: lengths (m, 1), and shapes (m, 3) by headers."""
        lengths, shapes = (fact.as_array() for fact in facts)
        listed = source.lengths(self.indices[self.rows])
        assert listed is not None, "encoded images have lengths"
        for row, length, expected, shape in zip(self.rows.tolist(), lengths[:, 0], listed, shapes, strict=True):
            if length != expected:
                self.bad[row] = formats.other_length(length, expected)
                source.forget()
            elif shape[0] * shape[1] > source.max_pixels:
                self.bad[row] = formats.too_large(shape[0], shape[1], source.max_pixels)


def _why_gone(source: Source, index: int) -> str | None:
    try:
        source.read(index)
    except OSError as error:
        return error.strerror or str(error)
    return None


class _Loader:
    """What all loaders share: the thread that runs the graph, and the hand-over of its tensors.

    DALI's default executor never writes again into an output while a tensor made from it lives. On a GPU that does not
    cover kernels still to run, so there the views are copied on the current stream, and the output is kept until the
    copy is done.
    """

    _num_views = 2  # tensors of a batch

    def __init__(
        self,
        source: Source,
        device: str,
        threads: int,
        prefetch: int,
        dtype: torch.dtype,
        channels_last: bool,
        shape: tuple[int, int],
    ) -> None:
        self.wait_seconds = 0.0  # spent in the last `next()` waiting for data
        self.bad: dict[int, str] = {}  # rows of the last batch whose images are bad, and why; their pixels are zeros
        self.known_bad: dict[int, str] = {}  # bad images, by index: they are not tried again
        self._source = source
        self._device = torch.device(device)
        assert self._device.type == "cpu" or self._device.index is not None, "name the GPU: cuda:0"
        self._again: dict[str, Any] = {  # for another loader of the same sort
            "threads": threads,
            "prefetch": 1,
            "dtype": dtype,
            "channels_last": channels_last,
            "shape": shape,
        }
        self._how: dict[str, Any] = {"threads": threads, "device_id": self._device.index, "prefetch": prefetch}
        self._layout = "HWC" if channels_last else "CHW"
        self._dtype = dtype
        self._shape = shape  # channels, size
        self._stop = threading.Event()
        # One batch more than DALI's own queue holds, so that the thread can hand over and go on.
        self._made: queue.Queue[tuple[_Work, Any] | BaseException] = queue.Queue(maxsize=1)
        self._lent: tuple[Any, torch.cuda.Event] | None = None
        self._thread: threading.Thread | None = None

    def _start(self, make: Callable[[Callable[[], Fed]], Any], batches: Iterator[_Work]) -> None:
        """Run the graph that `make` builds around a feed, over `batches`."""
        self._thread = threading.Thread(target=self._produce, args=(make, batches), name="dali", daemon=True)
        self._thread.start()

    def _produce(self, make: Callable[[Callable[[], Fed]], Any], batches: Iterator[_Work]) -> None:
        """The thread: feed, run, hand over, until the batches end, `stop` is set, or something fails.

        A graph that failed is never run again: DALI may then hand out an earlier batch. If bad images are to blame, a
        new graph takes up the batches that the old one still held, less these images.
        """
        try:
            while (failed := self._run(make, batches)) is not None:
                error, held = failed
                if not any(self._find_bad(work) for work in held):
                    raise error
                batches = chain(held, batches)
        except BaseException as error:  # handed to whoever takes the batches, StopIteration included
            self._made.put(error)

    def _run(
        self, make: Callable[[Callable[[], Fed]], Any], batches: Iterator[_Work]
    ) -> tuple[RuntimeError, deque[_Work]] | None:
        """Until the end (None, or StopIteration), or a failure: the error, and the batches not handed over."""
        held: deque[_Work] = deque()

        def feed() -> Fed:
            while not self._stop.is_set():
                work = next(batches)
                held.append(work)
                work.bad |= {
                    row: self.known_bad[index]
                    for row, index in enumerate(work.indices.tolist())
                    if index in self.known_bad
                }
                if (fed := work.fed(self._source)) is not None:
                    return fed
            raise StopIteration

        try:
            pipeline = make(feed)
            while not self._stop.is_set():
                outputs = pipeline.run()
                self._hand_over_unfed(held)
                work = held.popleft()
                if self._source.encoded:
                    *outputs, lengths, shapes = outputs
                    work.check(self._source, (lengths, shapes))
                self._made.put((work, outputs))
        except StopIteration:
            self._hand_over_unfed(held)
            raise
        except RuntimeError as error:
            if self._source.encoded:
                return error, held
            raise
        return None

    def _hand_over_unfed(self, held: deque[_Work]) -> None:
        """Batches at the front of which every image is bad: the graph never saw them."""
        while held and not len(held[0].rows):
            self._made.put((held.popleft(), None))

    def _find_bad(self, work: _Work) -> bool:
        """Decode a batch in halves, and these in halves, on graphs of their own, until the bad images stand alone."""

        def search(rows: NDArray[np.int64]) -> list[int]:
            if not len(rows) or self._decodes(work.indices[rows]):
                return []
            if len(rows) == 1:
                return rows.tolist()
            return search(rows[: len(rows) // 2]) + search(rows[len(rows) // 2 :])

        found = search(work.rows)
        for row in found:
            index = int(work.indices[row])
            reason = _why_gone(self._source, index)
            work.bad[row] = reason or formats.why_unreadable(self._source.read(index).tobytes())
        return bool(found)

    def _decodes(self, indices: NDArray[np.int64]) -> bool:
        once = iter([(self._source.feed(indices),)])
        how = self._how | {"batch": len(indices), "prefetch": 1}
        try:
            decoded(self._source, self._shape[0], lambda: next(once), **how).run()
        except RuntimeError:
            return False
        return True

    def _plain_work(self, indices: NDArray[np.int64]) -> _Work:
        """Images and nothing else."""
        return _Work(indices, lambda rows: (self._source.feed(indices[rows]),))

    def _take(self) -> tuple[NDArray[np.int64], list[torch.Tensor]]:
        """The next batch's indices and tensors; `bad` is then its."""
        work, outputs = self._take_work()
        self.bad = work.bad
        tensors = [self._empty() for _ in range(self._num_views)] if outputs is None else self._own(outputs)
        return work.indices, [self._spread(tensor, work) for tensor in tensors] if work.bad else tensors

    def _take_work(self) -> tuple[_Work, Any]:
        """StopIteration at the end; the thread's error if it had one."""
        start = time.perf_counter()
        made = self._made.get() if self._thread is not None else StopIteration()
        self.wait_seconds = time.perf_counter() - start
        if isinstance(made, BaseException):
            self.close()
            raise made
        return made

    def _refuse(self, indices: NDArray[np.int64]) -> None:
        """End over bad images."""
        self.close()
        raise InputError(describe_bad({self._source.name(indices[row]): reason for row, reason in self.bad.items()}))

    def _spread(self, tensor: torch.Tensor, work: _Work) -> torch.Tensor:
        """Rows of the images that were fed, at their places in the whole batch; zeros where an image is bad."""
        order = torch.channels_last if self._layout == "HWC" else torch.contiguous_format
        whole = tensor.new_zeros((len(work.indices), *tensor.shape[1:])).contiguous(memory_format=order)
        good = [place for place, row in enumerate(work.rows.tolist()) if row not in work.bad]
        whole[work.rows[good]] = tensor[good]
        return whole

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


class TwoViewLoader(_Loader):
    """Iterator of this worker's `Batch`es, one a step, from `start_step` until before `stop_step` (None: endless).

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
        report_bad: bool = False,
    ) -> None:
        """`device` is "cpu" or "cuda:N"; `threads` DALI's own; `prefetch` batches are in the making at a time.

        With `report_bad`, a batch with images that cannot be read is given with zeros for them, named in `bad`: then
        call `replace`. Without, it ends the iteration with an InputError.

        Raises:
            InputError: the source has fewer images than the global batch.
        """
        super().__init__(source, device, threads, prefetch, dtype, channels_last, (channels, views.size))
        self._views, self._channels, self._seed, self._report_bad = views, channels, seed, report_bad
        self._global_batch = global_batch
        self._epoch_steps = steps_per_epoch(len(source), global_batch)
        self._positions = worker_positions(global_batch, micro_batches, shard)
        self._step, self._stop_step = start_step, stop_step
        self._local = sum(position.stop - position.start for position in self._positions)
        if self._local:
            self._start(self._graph, self._batches(start_step))

    def __iter__(self) -> "TwoViewLoader":
        return self

    def __next__(self) -> Batch:
        if self._local:
            indices, (y1, y2) = self._take()
            if self.bad and not self._report_bad:
                self._refuse(indices)
            return Batch(y1, y2, indices)
        if self._stop.is_set() or self._step == self._stop_step:
            raise StopIteration
        self._step += 1
        return Batch(self._empty(), self._empty(), np.zeros(0, np.int64))

    def _graph(self, feed: Callable[[], Fed]) -> Any:
        return two_view(self._source, self._views, self._channels, self._layout, feed, batch=self._local, **self._how)

    def _batches(self, step: int) -> Iterator[_Work]:
        while step != self._stop_step:
            whole = step_indices(self._seed, step, len(self._source), self._global_batch)
            indices = np.concatenate([whole[position] for position in self._positions])
            yield self._work(indices, indices, step // self._epoch_steps)
            step += 1

    def _work(self, indices: NDArray[np.int64], places: NDArray[np.int64], epoch: int) -> _Work:
        """Images by `indices`, each with the draws that the image of `places` has in this epoch."""

        def feed(rows: NDArray[np.int64]) -> Fed:
            sizes = self._source.sizes(indices[rows])
            operands: list[Any] = []
            for view in (0, 1):
                params = view_params(self._seed, epoch, places[rows], view, self._views, self._channels)
                operands += view_operands(params, view, self._views, self._channels, sizes).values()
            return self._source.feed(indices[rows]), *operands

        return _Work(indices, feed)

    def replace(self, batch: Batch, others: Mapping[int, int], step: int) -> tuple[Batch, dict[int, str]]:
        """A batch with other images, by index, in some of its rows: views by the draws of those they stand in for.

        Returns it with the rows whose new image is bad, too, and why. `batch` is the one of `step`, as it came or as
        this gave it back.
        """
        rows = np.array(list(others), np.int64)
        whole = step_indices(self._seed, step, len(self._source), self._global_batch)
        places = np.concatenate([whole[position] for position in self._positions])[rows]
        indices = np.array(list(others.values()), np.int64)
        one = _Loader(self._source, str(self._device), **self._again)
        one._start(self._graph, iter([self._work(indices, places, step // self._epoch_steps)]))
        with one:
            _, views = one._take()
        y1, y2, mixed = batch.y1.clone(), batch.y2.clone(), batch.indices.copy()
        for y, part in zip((y1, y2), views, strict=True):
            y[rows] = part
        mixed[rows] = indices
        return Batch(y1, y2, mixed), {int(rows[place]): reason for place, reason in one.bad.items()}


class EvalLoader(_Loader):
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
    ) -> None:
        """`batch`: images at a time; the rest as in `TwoViewLoader`."""
        super().__init__(source, device, threads, prefetch, dtype, channels_last, (channels, views.size))
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

    def _batches(self) -> Iterator[_Work]:
        for start in range(0, len(self._indices), self._batch):
            indices = self._indices[start : start + self._batch]
            yield self._plain_work(indices)


class CheckLoader(_Loader):
    """Decodes every image of an encoded source once, and gives no pixels: of each batch its indices, the images' (n, 2)
    heights and widths, and which rows are bad and why. A bad image has no size."""

    def __init__(self, source: Source, *, channels: int, batch: int, threads: int) -> None:
        super().__init__(source, "cpu", threads, 2, torch.int64, False, (channels, 0))
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

    def _batches(self) -> Iterator[_Work]:
        for start in range(0, len(self._source), self._batch):
            indices = np.arange(start, min(start + self._batch, len(self._source)), dtype=np.int64)
            yield self._plain_work(indices)
