"""Sends the journal to a tracking store from a thread of its own: in order, each point once, however often it fails."""

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from pipeline import file_systems
from pipeline.journal import Record, read

_log = logging.getLogger(__name__)

_MOST_POINTS = 500  # in one request; MLflow takes 1,000 entities
_SEND_EVERY = 1.0  # seconds; a request costs the training process about 30 ms of Python, whatever it holds
_LONGEST_PAUSE = 15.0  # seconds between two tries while the store does not answer
_WARN_EVERY = 600.0  # seconds; a server that comes and goes must not fill the screen
_DROPPED_BY_CLOSE = 0.5  # seconds between two tries once the run has ended


class Refused(Exception):
    """The store answers, and will never take this record."""


class FileRefused(Exception):
    """The store answers, but cannot store files now; the record may be tried again later."""


class Point(NamedTuple):
    """One value of one metric; `time` in ms since 1970."""

    key: str
    value: float
    time: int
    step: int


class Store(Protocol):
    """What the sender needs of a tracking store. Any exception but Refused and FileRefused means: not reachable."""

    def is_live(self, run_id: str) -> bool: ...
    def find_run(self, job: str) -> str | None: ...
    def create_run(self, start: Record, continues: str | None) -> str: ...
    def highest_steps(self, run_id: str) -> dict[str, int]: ...
    def begin(self, run_id: str, start: Record) -> None: ...
    def metrics(self, run_id: str, points: list[Point]) -> None: ...
    def tags(self, run_id: str, tags: dict[str, str]) -> None: ...
    def image(self, run_id: str, record: Record) -> None: ...
    def artifact(self, run_id: str, record: Record) -> None: ...
    def finish(self, run_id: str, status: str, time: int) -> None: ...


@dataclass
class Position:
    """How far the journal was sent, and to where: `tracking.json`, replaced after each request."""

    uri: str
    run_id: str | None = None
    begin: int = 0  # byte of the journal where this run's first record starts
    offset: int = 0  # byte up to which everything was sent
    attempt: int = 0  # of the last record sent
    sent: dict[str, int] | None = None  # highest step sent of each metric; None: the store must be asked
    sent_before: dict[str, int] = field(default_factory=dict)  # the same, of earlier attempts only
    put_off: list[int] = field(default_factory=list)  # starts of records whose file the store refused

    @classmethod
    def load(cls, path: Path) -> "Position | None":
        """The saved position; None when there is none or it cannot be read (then the run is found by its job)."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def save(self, path: Path) -> None:
        """Replace the file at once, so that a reader never sees a half."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, path)


class Sender:
    """Delivers records after `position.offset` until closed.

    A rewound run logs some steps again. Points cannot be deleted from MLflow, so a metric's step that an earlier
    attempt has sent is not sent again. Within an attempt everything is sent; what a crash makes the sender repeat
    has the same key, value, time and step, which SQL stores keep once.

    Args:
        journal: the file to read.
        position: where to go on; owned by the sender from here on.
        output: folder of `tracking.json` and of the lock that keeps a second sender away.
        connect: makes a connected store, or raises. Called in the sender's thread, again after each failure.
    """

    def __init__(self, journal: Path, position: Position, output: Path, connect: Callable[[], Store]) -> None:
        self.position = position
        self._journal = journal
        self._path = output / "tracking.json"
        self._lock_path = output / "tracking.lock"
        self._connect = connect
        self._store: Store | None = None
        self._lock: int | None = None
        self._points = _MOST_POINTS
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._abandoned = False
        self._down_since: float | None = None
        self._warned_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="tracking-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def notify(self) -> None:
        """The journal has grown."""
        self._wake.set()

    def close(self, timeout: float) -> bool:
        """Send what is left for at most `timeout` seconds, then stop. True when nothing is left."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self.position.put_off

    def abandon(self) -> None:
        """Stop after the request in progress."""
        self._abandoned = True

    @property
    def finished(self) -> bool:
        """The thread has ended: closed, and all was tried."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = 1.0
        while not self._abandoned:
            closing = self._closing.is_set()  # before reading: the last record is written before this is set
            try:
                sent_some = self._send_next(closing)
            except Exception as error:  # whatever the store's libraries raise, training must not notice
                self._store = None
                self._points = max(1, self._points // 2)  # a slow server may answer a smaller request in time
                self._report_outage(error)
                self._nap(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause = 1.0
            self._report_answer()
            if sent_some:
                self._save()
            elif closing:
                break
            else:
                self._wake.wait()
                self._wake.clear()
                self._nap(_SEND_EVERY)
        if self._lock is not None:
            os.close(self._lock)

    def _nap(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            time.sleep(min(seconds, _DROPPED_BY_CLOSE))

    def _send_next(self, closing: bool) -> bool:
        """Send the next group of metrics, or the next other record. False: there was nothing to send."""
        if self._store is None:
            store = self._open()
            self._retry_files(store)
            self._store = store
        position = self.position
        record = next(read(self._journal, position.offset), None)
        if record is None:
            if closing:
                self._retry_files(self._store)
            return False
        if record.attempt > position.attempt:
            position.attempt = record.attempt
            position.sent_before = dict(position.sent or {})
        if record.kind == "metrics":
            position.offset = self._send_metrics(self._store, record.attempt)
        else:
            self._send_record(self._store, record)
            position.offset = record.end
        return True

    def _open(self) -> Store:
        """Connect, and make sure that `position.run_id` is a run that takes records."""
        self._take_lock()
        store = self._connect()
        position = self.position
        start = next(read(self._journal, position.begin))
        assert start.kind == "start", start
        if position.run_id is None or not store.is_live(position.run_id):
            # A request to create it may have been carried out though its answer was lost: look before creating.
            run_id = store.find_run(start.body["job"])
            is_new = run_id is None
            run_id = run_id or store.create_run(start, continues=position.run_id)
            # Whatever run it is, it is told the whole story from its first record.
            self.position = position = Position(position.uri, run_id, position.begin, offset=position.begin)
            position.sent = {} if is_new else None
        assert position.run_id is not None
        if position.sent is None:
            position.sent = store.highest_steps(position.run_id)
            position.sent_before = dict(position.sent)
        self._save()
        return store

    def _take_lock(self) -> None:
        if self._lock is None:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                missing = file_systems.lock(lock, wait=False)
            except BlockingIOError:
                os.close(lock)
                raise RuntimeError("another process is sending this journal") from None
            if missing is not None:
                _log.warning(
                    "tracking: %s has no file locks (%s): do not start sync-tracking while the job runs",
                    self._lock_path.parent,
                    missing.strerror,
                )
            self._lock = lock

    def _send_metrics(self, store: Store, attempt: int) -> int:
        """Send the metrics records ahead in one request; returns where they end."""
        group: list[Record] = []
        points: list[Point] = []
        for record in itertools.takewhile(lambda r: r.kind == "metrics", read(self._journal, self.position.offset)):
            wanted = self._points_of(record)
            if record.attempt != attempt or (group and len(points) + len(wanted) > self._points):
                break
            group.append(record)
            points += wanted
        run_id = self.position.run_id
        assert run_id is not None and self.position.sent is not None
        try:
            if points:
                store.metrics(run_id, points)
        except Refused as error:
            if len(group) > 1:  # find the one that is to blame
                self._points = 1
                return self.position.offset
            self._report_refused(group[0], error)
        else:
            self._points = min(2 * self._points, _MOST_POINTS)
            for point in points:
                self.position.sent[point.key] = max(point.step, self.position.sent.get(point.key, point.step))
            self._tag_non_finite(store, run_id, group)
        return group[-1].end

    def _points_of(self, record: Record) -> list[Point]:
        """Its values that no earlier attempt has sent. `non_finite` counts those that are not numbers: MLflow would
        store them as 0 or 1.8e308."""
        before, step = self.position.sent_before, record.body["step"]
        values = dict(record.body["metrics"])
        if bad := [key for key, value in values.items() if isinstance(value, str)]:
            values = {k: v for k, v in values.items() if k not in bad} | {"non_finite": float(len(bad))}
        return [Point(k, v, record.time, step) for k, v in values.items() if k not in before or step > before[k]]

    def _tag_non_finite(self, store: Store, run_id: str, group: list[Record]) -> None:
        for record in reversed(group):
            for key, value in record.body["metrics"].items():
                if isinstance(value, str):
                    store.tags(run_id, {"non_finite": f"{key} = {value} at step {record.body['step']}"})
                    return

    def _send_record(self, store: Store, record: Record) -> None:
        run_id = self.position.run_id
        assert run_id is not None
        body = record.body
        try:
            if record.kind == "start":
                if replaced := body.get("replaces"):
                    store.finish(replaced, "KILLED", record.time)
                store.begin(run_id, record)
            elif record.kind == "tags":
                store.tags(run_id, body["tags"])
            elif record.kind in ("image", "artifact"):
                self._send_file(store, record)
            elif record.kind == "end":
                if body["tags"]:
                    store.tags(run_id, body["tags"])
                store.finish(run_id, body["status"], record.time)
        except Refused as error:
            self._report_refused(record, error)

    def _send_file(self, store: Store, record: Record) -> None:
        position = self.position
        assert position.run_id is not None and position.sent is not None
        try:
            if record.kind == "artifact":
                store.artifact(position.run_id, record)
                return
            key, step = f"image:{record.body['key']}", record.body["step"]
            if step > position.sent_before.get(key, -1):
                store.image(position.run_id, record)
                position.sent[key] = max(step, position.sent.get(key, -1))
        except FileRefused as error:
            if not position.put_off:
                _log.warning("tracking: %s is not stored (%s); metrics go on, it is tried again", record.body, error)
            # Files wait on their own, so that a full artifact store does not hold up the metrics.
            position.put_off.append(record.start)

    def _retry_files(self, store: Store) -> None:
        waiting, self.position.put_off = self.position.put_off, []
        for count, start in enumerate(waiting):
            try:
                self._send_record(store, next(read(self._journal, start)))
            except Exception:
                self.position.put_off += waiting[count:]
                raise
        if waiting:
            self._save()

    def _save(self) -> None:
        try:
            self.position.save(self._path)
        except OSError as error:  # a full disk: at the next start some points are sent again, and stored once
            _log.debug("%s: %s", self._path, error)

    def _report_refused(self, record: Record, error: Refused) -> None:
        _log.warning("tracking: MLflow refuses a record (%s at byte %d): %s", record.kind, record.start, error)

    def _report_outage(self, error: Exception) -> None:
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at > _WARN_EVERY:
            self._warned_at = now
            self._down_since = self._down_since or now
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            _log.warning(
                "tracking: %s does not take metrics (%s); training goes on, %s keeps them until it does",
                without_password(self.position.uri),
                reason,
                self._journal,
            )

    def _report_answer(self) -> None:
        if self._down_since is not None:
            seconds = time.monotonic() - self._down_since
            _log.warning("tracking: MLflow answers again after %.0f s; sending what it missed", seconds)
            self._down_since = None


def without_password(uri: str) -> str:
    """`uri` as it may be shown and logged."""
    scheme, slashes, rest = uri.partition("://")
    return scheme + slashes + rest.rpartition("@")[2]
