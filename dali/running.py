"""What all loaders share: a graph runs in a thread of its own, some batches ahead of whoever takes them, and bad images
are set aside without stopping it.
"""

import atexit
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dali import formats
from dali.errors import InputError
from dali.graphs import Batch as Fed
from dali.graphs import decoded
from dali.interface import Source
from dali.pixels import Threads
from dali.spec import DecoderSpec


def describe_bad(bad: Mapping[str, str]) -> str:
    """One line on images that cannot be read, by name, and what to do."""
    first, reason = next(iter(bad.items()))
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return (
        f"{first!r} cannot be read: {reason}{more}; mend it, or find all such files with ./run.sh check-data and leave "
        "them out with data.exclude, or train on others in their place with data.on_bad_file=skip"
    )


class Work:
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


class Loader:
    """The thread that runs the graph, and the hand-over of its tensors.

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
        decoder: DecoderSpec,
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
            "decoder": decoder,
        }
        self._threads = Threads(threads)
        self._how: dict[str, Any] = {
            "threads": self._threads,
            "device_id": self._device.index,
            "prefetch": prefetch,
            "decoder": decoder,
        }
        self._layout = "HWC" if channels_last else "CHW"
        self._dtype = dtype
        self._shape = shape  # channels, size
        self._stop = threading.Event()
        # One batch more than DALI's own queue holds, so that the thread can hand over and go on.
        self._made: queue.Queue[tuple[Work, Any] | BaseException] = queue.Queue(maxsize=1)
        self._lent: tuple[Any, torch.cuda.Event] | None = None
        self._thread: threading.Thread | None = None

    def _start(self, make: Callable[[Callable[[], Fed]], Any], batches: Iterator[Work]) -> None:
        """Run the graph that `make` builds around a feed, over `batches`."""
        self._thread = threading.Thread(target=self._produce, args=(make, batches), name="dali", daemon=True)
        atexit.register(self.close)  # a graph that still runs when the interpreter ends would abort it
        self._thread.start()

    def _produce(self, make: Callable[[Callable[[], Fed]], Any], batches: Iterator[Work]) -> None:
        """The thread: feed, run, hand over, until the batches end, `stop` is set, or something fails.

        A graph that failed is never run again: DALI may then hand out an earlier batch. If bad images are to blame, a
        new graph takes up the batches that the old one still held, less these images.
        """
        try:
            while not self._stop.is_set():
                error, held = self._run(make, batches)
                if error is not None and not any(self._find_bad(work) for work in held):
                    raise error
                if held:
                    batches = chain(held, batches)
        except BaseException as error:  # handed to whoever takes the batches, StopIteration included
            self._made.put(error)

    def _run(
        self, make: Callable[[Callable[[], Fed]], Any], batches: Iterator[Work]
    ) -> tuple[RuntimeError | None, deque[Work]]:
        """One graph, until it has nothing more to do or fails: the error, and the batches not handed over.

        Raises:
            StopIteration: there are no more batches.
        """
        held: deque[Work] = deque()
        over = False

        def feed() -> Fed:
            nonlocal over
            while not self._stop.is_set():
                try:
                    work = next(batches)
                except StopIteration:
                    over = True
                    raise
                held.append(work)
                work.bad |= {
                    row: self.known_bad[index]
                    for row, index in enumerate(work.indices.tolist())
                    if index in self.known_bad
                }
                if (fed := work.fed(self._source)) is not None:
                    return fed
                if len(held) > 1:  # those before it are in the graph, which gives them when it is fed no more
                    raise StopIteration
                self._made.put((held.popleft(), None))
            raise StopIteration

        try:
            pipeline = make(feed)
            while not self._stop.is_set():
                outputs = pipeline.run()
                work = held.popleft()
                if self._source.encoded:
                    *outputs, lengths, shapes = outputs
                    work.check(self._source, (lengths, shapes))
                self._made.put((work, outputs))
        except StopIteration:
            if held and not len(held[0].rows):  # the graph never saw it
                self._made.put((held.popleft(), None))
            if over:
                raise
        except RuntimeError as error:
            if self._source.encoded:
                return error, held
            raise
        return None, held

    def _find_bad(self, work: Work) -> bool:
        """Decode a batch's images one by one; one that does not costs a new graph, as none is run again after an error.

        A file that is gone costs none: where a whole folder is, the run would otherwise take minutes to say so.
        """
        decode: Callable[[int], None] | None = None
        found = False
        for row in work.rows.tolist():
            index = int(work.indices[row])
            reason = _why_gone(self._source, index)
            if reason is None:
                decode = decode or self._decoder()
                try:
                    decode(index)
                    continue
                except (RuntimeError, OSError):
                    decode = None
                    reason = _why_gone(self._source, index)
            work.bad[row] = reason or formats.why_unreadable(self._source.read(index).tobytes())
            found = True
        return found

    def _decoder(self) -> Callable[[int], None]:
        """Decodes the image of an index; RuntimeError if that cannot be done, and then it is used up."""
        waiting: deque[Fed] = deque()
        how = self._how | {"batch": 1, "prefetch": 1}  # so that a run takes one, and fails over that one
        pipeline = decoded(self._source, self._shape[0], lambda: waiting.popleft(), **how)

        def decode(index: int) -> None:
            waiting.append((self._source.feed(np.array([index])),))
            pipeline.run()

        return decode

    def _plain_work(self, indices: NDArray[np.int64]) -> Work:
        """Images and nothing else."""
        return Work(indices, lambda rows: (self._source.feed(indices[rows]),))

    def _take(self) -> tuple[NDArray[np.int64], list[torch.Tensor]]:
        """The next batch's indices and tensors; `bad` is then its."""
        work, outputs = self._take_work()
        self.bad = work.bad
        tensors = [self._empty() for _ in range(self._num_views)] if outputs is None else self._own(outputs)
        return work.indices, [self._spread(tensor, work) for tensor in tensors] if work.bad else tensors

    def _take_work(self) -> tuple[Work, Any]:
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

    def _spread(self, tensor: torch.Tensor, work: Work) -> torch.Tensor:
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
        atexit.unregister(self.close)
        if self._thread is not None:
            while self._thread.is_alive():
                _drain(self._made)
                self._thread.join(timeout=0.05)
            self._thread = None
        self._threads.shutdown()
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
