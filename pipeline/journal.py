"""The journal: one JSON line for every event of a run, on the local disk before anything is sent anywhere."""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)

# A disk that stays full for days must not fill the memory too: about 100,000 records.
_MOST_UNWRITTEN_BYTES = 16 << 20


class Record(NamedTuple):
    """One line of the journal.

    `time` is in ms since 1970; `start` and `end` are the line's place in the file, in bytes. `kind` is `start`,
    `metrics`, `tags`, `image`, `artifact`, `end`, or `damaged` for a line that is not JSON.
    """

    kind: str
    attempt: int
    time: int
    body: dict[str, Any]
    start: int
    end: int


class Journal:
    """Appends records, each in one write, so that a kill loses none and a crash of the machine at most the tail.

    `attempt` counts the processes that have written to this file, from 1; it is in every record, so that after a
    rewind both versions of a step can be told apart. Safe to use from several threads.

    Raises:
        OSError: when the file cannot be opened. Later write errors (a full disk) are warned about once; what could
            not be written is kept in memory and written before the next record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempt = 1 + max((record.attempt for record in read(path)), default=0)
        self._lock = threading.Lock()
        self._unwritten = bytearray()
        self._warned = False
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _cut_torn_line(self._file)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file).st_size

    def append(self, kind: str, **body: Any) -> None:
        """Write one record, stamped with the present time. Numbers in `body` must be finite (see `number`)."""
        with self._lock:
            record = {"kind": kind, "attempt": self.attempt, "time": int(time.time() * 1000), **body}
            line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
            if len(self._unwritten) + len(line) <= _MOST_UNWRITTEN_BYTES:
                self._unwritten += line
            self._write()

    def sync(self) -> None:
        """Force what was written to the disk itself; for checkpoints."""
        with self._lock:
            self._write()
        try:
            os.fsync(self._file)  # not under the lock: a slow disk must not hold up those who append
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Sync and close; the journal cannot be used afterwards."""
        self.sync()
        os.close(self._file)

    def _write(self) -> None:
        try:
            while self._unwritten:
                # A partial write leaves a torn line only until the rest follows; readers stop before it.
                del self._unwritten[: os.write(self._file, self._unwritten)]
            self._warned = False
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _log.warning("%s: %s; training goes on, metrics wait in memory", self.path, error.strerror)
            self._warned = True


def number(value: float) -> float | str:
    """`value` as the journal holds it: a float, or `nan`, `inf`, `-inf` as text (JSON has no such numbers)."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def read(path: Path, start: int = 0) -> Iterator[Record]:
    """The complete records from byte `start`, which must be the start of a line. A missing file has none."""
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            end = start + len(line)
            yield _parse(line, start, end)
            start = end


def _parse(line: bytes, start: int, end: int) -> Record:
    try:
        body = json.loads(line)
        return Record(body.pop("kind"), body.pop("attempt"), body.pop("time"), body, start, end)
    except (ValueError, KeyError, TypeError, AttributeError):  # zeros after a power cut, a line joined to a torn one
        return Record("damaged", 0, 0, {}, start, end)


def _cut_torn_line(file: int) -> None:
    """Drop what follows the last newline: the half line that a crash of the machine left."""
    end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - 65536)
        newline = os.pread(file, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < os.fstat(file).st_size:
        os.ftruncate(file, end)
