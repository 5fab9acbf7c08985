"""One owner an output folder: OUTPUT/.lease names the process that writes there, and its heartbeat says it still does.

The heartbeat is the file's time of change: it needs no room on a full disk, and on a network file system it is the
server's clock, so that hosts whose clocks differ agree. An owner on this machine needs none: its process is looked up.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dali.errors import InputError
from pipeline.file_systems import lock

FILE = ".lease"
JOB = "PRETRAIN_JOB"  # the launcher names the job in the environment, for all its workers
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0


class Owner(NamedTuple):
    """Who holds a folder. `place` is one boot of one machine, and one pid namespace: where `pid` means a process."""

    job: str
    host: str
    pid: int
    began: int  # of the process, in clock ticks since boot: a pid is used again
    place: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (job {self.job})"

    @property
    def is_here(self) -> bool:
        return self.place == _place()

    @property
    def is_alive(self) -> bool:
        """Of an owner that is here."""
        return self.began == _began(self.pid)


def job_id() -> str:
    """The same for all workers of a launch, those that join it later included."""
    rendezvous = [os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{key}") for key in ("ADDR", "PORT")]
    return os.environ.get(JOB) or (":".join(map(str, rendezvous)) if all(rendezvous) else uuid.uuid4().hex)


class Lease:
    """This process's hold on a folder; its heartbeat is a thread. Taken by rank 0 before anything is written.

    Attributes:
        is_new: no earlier process of the same job had it.
    """

    def __init__(self, path: Path, owner: Owner, is_new: bool) -> None:
        self.is_new = is_new
        self._path, self._owner = path, owner
        self._released = threading.Event()
        threading.Thread(target=self._keep_beating, name="lease", daemon=True).start()

    @classmethod
    def take(cls, output: Path, job: str | None = None) -> "Lease":
        """Take `output`, from a dead owner or from an earlier process of the same job too.

        Where only a heartbeat can tell, it is waited for, at most STALE_SECONDS.

        Raises:
            InputError: another job owns it, or it cannot be written.
        """
        path = output / FILE
        mine = Owner(job or job_id(), socket.gethostname(), os.getpid(), _began(os.getpid()), _place())
        try:
            output.mkdir(parents=True, exist_ok=True)
            while True:
                seen = _free(output, mine.job)
                with _one_at_a_time(output):
                    if _read(path) == seen:  # else another was quicker: look again
                        _write(path, mine)
                        break
        except OSError as error:
            raise InputError(f"output: {output} cannot be written ({error.strerror}); write output=FOLDER") from None
        if seen is not None and seen.job != mine.job:
            print(f"{output}: taken over from {seen}, which is dead", flush=True)
        return cls(path, mine, is_new=seen is None or seen.job != mine.job)

    def release(self) -> None:
        """Give the folder back."""
        self._released.set()
        if _read(self._path) == self._owner:
            self._path.unlink(missing_ok=True)

    def beat(self) -> bool:
        """Say that we are alive; False: a later process of our own job has the folder."""
        owner = _read(self._path)
        if owner is not None and owner.job != self._owner.job and not self._released.is_set():
            # We were taken for dead (a machine that was suspended): two must not write here
            print(f"error: {self._path.parent} now belongs to {owner}; ending", file=sys.stderr, flush=True)
            os._exit(1)
        if owner != self._owner:
            return False
        os.utime(self._path)
        return True

    def _keep_beating(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            try:
                if not self.beat():
                    return
            except OSError:  # the folder's server is away; nobody else sees the lease either
                continue


def refuse_if_owned(output: Path) -> None:
    """For the launcher, before it touches anything.

    Raises:
        InputError: naming the owner.
    """
    _free(output, job=None)


def _free(output: Path, job: str | None) -> Owner | None:
    """Return once `output` may be taken: the dead owner, or the one of the same job, or None.

    Raises:
        InputError: an owner lives.
    """
    path = output / FILE
    owner, first_beat, since, told = _read(path), _beat_of(path), time.monotonic(), False
    while owner is not None and owner.job != job:
        beat = _beat_of(path)
        age = _now_there(output) - beat if beat is not None else 0.0
        if owner.is_here and not owner.is_alive:
            break
        if beat is not None and (owner.is_here or beat != first_beat):
            raise InputError(
                f"output: {output} is in use by {owner}, last heartbeat {max(age, 0):.0f} s ago; "
                "wait for it, stop it, or write another output"
            )
        if age > STALE_SECONDS or time.monotonic() - since > STALE_SECONDS:
            break
        if not told:
            print(f"{output}: belongs to {owner}; waiting up to {STALE_SECONDS:.0f} s for its heartbeat", flush=True)
            told = True
        time.sleep(BEAT_SECONDS / 20)
        owner = _read(path)
    return owner


def _read(path: Path) -> Owner | None:
    """The owner a lease names; None without one. One that cannot be read names nobody: it is replaced as a whole."""
    try:
        return Owner(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _write(path: Path, owner: Owner) -> None:
    temporary = path.with_name(f"{FILE}-{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(json.dumps(owner._asdict()) + "\n")
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _beat_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _now_there(output: Path) -> float:
    """The time by the clock that stamps files in `output`."""
    probe = output / f"{FILE}-{uuid.uuid4().hex}.tmp"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


@contextmanager
def _one_at_a_time(output: Path) -> Iterator[None]:
    with open(output / f"{FILE}.lock", "w") as file:
        missing = lock(file.fileno(), wait=True)
        if missing is not None:
            print(
                f"warning: {output} has no file locks ({missing.strerror}): two jobs that start here in the same "
                "second are not kept apart",
                flush=True,
            )
        yield


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _began(pid: int) -> int:
    """When a process of this machine began, in clock ticks since boot; -1 if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
