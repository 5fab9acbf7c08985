"""A worker without progress says where it stands and ends itself, so that a stalled job does not wait for ever.

A process has one watchdog, as it has one Horovod; where none was started, all of this does nothing. Progress is: a
phase begins, a collective begins or ends, a step is completed, `beat`. Phases that may rightly take long have an
allowance. It lasts until the next step is completed: others meanwhile wait in that step for the slow one.
"""

import faulthandler
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline import failures

# Seconds at least, however small the limit: first batches and compilation; a slow disk; the last words to a server
ALLOWED = {"start": 900.0, "checkpoint": 900.0, "evaluate": 900.0, "end": 900.0}
# Who waits for another worker waits longer, so that the one that is waited for speaks first
WAITING_FACTOR = 1.25
LAST_WORDS_SECONDS = 30.0
SPARE_SECONDS = 5.0  # a look may be that late on a busy machine


class Watchdog:
    """A thread that looks at where the main thread is."""

    def __init__(self, rank: int, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds
        self.phase, self.step = "start", 0
        self.allowance = ALLOWED["start"]
        self.waiting: str | None = None
        self.since = time.monotonic()
        self.last_words: Callable[[str], None] | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        pause = min(self.seconds / 10, 5.0)
        looked = time.monotonic()
        while not self._stopped.wait(pause):
            now = time.monotonic()
            if now - looked > 5 * pause + SPARE_SECONDS:  # all of the process was stopped, or its machine
                self.since = now
            looked = now
            limit = max(self.seconds, self.allowance) * (WAITING_FACTOR if self.waiting else 1)
            if now - self.since > limit:
                self._end(now - self.since)

    def _end(self, seconds: float) -> None:
        where = f"waiting for the other workers ({self.waiting})" if self.waiting else f"phase {self.phase}"
        message = f"no progress for {seconds:.0f} s after step {self.step}: {where}"
        stacks = _stacks()
        print(
            f"stacks of rank {self.rank} on {socket.gethostname()}, which made {message}\n{stacks}"
            f"error: rank {self.rank} on {socket.gethostname()}: {message}",
            file=sys.stderr,
            flush=True,
        )
        speaker = threading.Thread(target=self._speak, args=(message, stacks), daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_SECONDS)  # files and servers may hang for the same reason
        os._exit(failures.STALLED)

    def _speak(self, message: str, stacks: str) -> None:
        failures.write(self.rank, message, failures.STALLED, stacks)
        if self.last_words is not None:
            self.last_words(message)


_dog: Watchdog | None = None


def start(rank: int, seconds: float | None) -> None:
    """Watch this process from now on; None: do not."""
    global _dog
    stop()
    _dog = None if seconds is None else Watchdog(rank, seconds)


def stop() -> None:
    global _dog
    if _dog is not None:
        _dog.stop()
    _dog = None


def at_stall(last_words: Callable[[str], None]) -> None:
    """Call this with the message before the process ends."""
    if _dog is not None:
        _dog.last_words = last_words


def beat() -> None:
    """There is progress within a phase."""
    if _dog is not None:
        _dog.since = time.monotonic()


def enter(phase: str) -> None:
    """A phase begins: start, data, step, checkpoint, evaluate, end."""
    if _dog is not None:
        _dog.phase, _dog.since = phase, time.monotonic()
        _dog.allowance = max(_dog.allowance, ALLOWED.get(phase, 0.0))


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase within another one."""
    before = _dog.phase if _dog is not None else name
    enter(name)
    try:
        yield
    finally:
        enter(before)


def stepped(step: int) -> None:
    """A step is completed, hence by all workers: no allowance is needed any more."""
    failures.reached(step)
    if _dog is not None:
        _dog.step, _dog.allowance, _dog.since = step, 0.0, time.monotonic()


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """A block that waits for other workers."""
    if _dog is None:
        yield
        return
    _dog.waiting, _dog.since = name, time.monotonic()
    try:
        yield
    finally:
        if _dog is not None:
            _dog.waiting, _dog.since = None, time.monotonic()


def _stacks() -> str:
    """Of all threads."""
    with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to a descriptor
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
