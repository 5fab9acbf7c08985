"""Checkpoints: one file a step that a bare `torch.load(weights_only=True)` reads, written so that a crash leaves the
previous one whole.

A file holds `format` (this version), `step`, `model`, `optimizer`, `scaler`, `config`, `run_id`, `facts`: tensors,
numbers, strings, lists and dicts only. Beside it lies NAME.sha256. Written by rank 0, in a thread beside training:
temporary name, fsync, rename, fsync of the folder; then `latest`. `milestones/` holds those that stay for good.
"""

import hashlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dali.errors import InputError

FORMAT = 1
FOLDER = "checkpoints"
_KEYS = {"format", "step", "model", "optimizer", "scaler", "config", "run_id", "facts"}


def path_of(output: Path, step: int) -> Path:
    return output / FOLDER / f"step_{step:08d}.pt"


class Writer:
    """Saves in a thread of its own, one checkpoint at a time, while training goes on. For rank 0's main thread.

    What the disk does (full, read-only, over quota) costs that checkpoint, not the run: it is named on the screen and
    in `failed`, and the ones before stay. Any other error of the thread is raised by the next call.

    Attributes:
        failed: by step, why its checkpoint could not be written.
    """

    def __init__(self, output: Path, keep: int) -> None:
        self.failed: dict[int, str] = {}
        self._output, self._keep = output, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last: int | None = None

    def save(self, state: dict[str, Any], milestone: bool, first: Callable[[], None] | None = None) -> None:
        """Copy `state` and return; the save before is waited for. A step that is saved already is not saved again.

        `first` is called in the thread, before it writes.
        """
        self.wait()
        if state["step"] == self._last and self._last not in self.failed:
            return
        self._last = state["step"]
        # Not a daemon: a process that ends by an error still finishes what it has begun to save
        self._thread = threading.Thread(target=self._write, args=(snapshot(state), milestone, first), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        self.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def join(self) -> None:
        """The same for a run that fails already: the thread's error stays untold."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, state: dict[str, Any], milestone: bool, first: Callable[[], None] | None) -> None:
        step = state["step"]
        try:
            if first is not None:
                first()
            save(self._output, state, self._keep, milestone)
            self.failed.pop(step, None)
        except OSError as error:
            self.failed[step] = error.strerror or str(error)
            print(
                f"warning: the checkpoint of step {step} could not be written to {self._output / FOLDER} "
                f"({self.failed[step]}); training goes on, earlier checkpoints stay",
                flush=True,
            )
        except BaseException as error:  # raised in the main thread
            self._error = error


def snapshot(value: Any) -> Any:
    """A copy in the CPU's memory that training does not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: snapshot(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(snapshot(inner) for inner in value)
    return value


def not_finite(value: Any, name: str = "") -> list[str]:
    """Names of the tensors in nested dicts and lists that hold NaN or infinities."""
    named = [(name, tensor) for name, tensor in _tensors(value, name) if tensor.is_floating_point() and tensor.numel()]
    if not named:
        return []
    # One pass for all; only where the sum of norms is not finite (it may overflow) each is looked at
    norms = torch.stack([norm.float() for norm in torch._foreach_norm([tensor for _, tensor in named])])
    if bool(torch.isfinite(norms.sum())):
        return []
    return [name for name, tensor in named if not bool(torch.isfinite(tensor).all())]


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))


def save(output: Path, state: dict[str, Any], keep: int, milestone: bool) -> Path:
    """Write `state` as the newest checkpoint of `output`; then only the newest `keep` and the milestones remain.

    Raises:
        OSError: of the disk; nothing of this checkpoint is left then, unless it is whole.
    """
    target = path_of(output, state["step"])
    note = target.with_suffix(".sha256")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target.parent)
    temporary = _temporary(target)
    try:
        _write(note, f"{_save_to(temporary, {'format': FORMAT, **state})}  {target.name}\n")
        temporary.rename(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)
    _write(target.parent / "latest", target.name + "\n")
    for old in sorted(target.parent.glob("step_*.pt"))[:-keep]:
        if old != target:  # after damaged ones the newest has not the highest step
            old.unlink()
            old.with_suffix(".sha256").unlink(missing_ok=True)
    if milestone:
        folder = target.parent / "milestones"
        folder.mkdir(exist_ok=True)
        for file in (target, note):
            (folder / file.name).unlink(missing_ok=True)
            os.link(file, folder / file.name)
    return target


def rewind(output: Path, chosen: Path, state: dict[str, Any]) -> None:
    """Make `chosen`, which holds `state`, the newest checkpoint of `output`: the run goes on from there, also the next
    time. Later ones of `output` belong to what is given up; they are set aside in a folder, nothing is deleted."""
    target = path_of(output, state["step"])
    later = [file for file in sorted((output / FOLDER).glob("step_*.pt")) if file > target]
    if later:
        numbers = (number for number in itertools.count(1) if not (output / FOLDER / f"aside-{number}").exists())
        aside = output / FOLDER / f"aside-{next(numbers)}"
        aside.mkdir()
        for file in later:
            note = file.with_suffix(".sha256")
            if note.exists():
                note.rename(aside / note.name)
            file.rename(aside / file.name)
        _sync_folder(aside)
        print(f"checkpoints after step {state['step']} are set aside in {aside}: {len(later)}", flush=True)
    if not (target.exists() and target.samefile(chosen)):
        save(output, state, keep=sys.maxsize, milestone=False)


def _remove_leftovers(folder: Path) -> None:
    """What a writer that was killed left: halves, and checksums of files that never came."""
    for left in folder.glob(".*.tmp"):
        left.unlink()
    for note in folder.glob("step_*.sha256"):
        if not note.with_suffix(".pt").exists():
            note.unlink()


def find(output: Path, resume: str) -> Path | None:
    """The checkpoint that `checkpoint.resume` means: a file, or with `auto` the newest good one in `output`, or None.

    A damaged one is named on the screen and passed over.

    Raises:
        InputError: `resume` names a file that is missing or damaged; or `never`, but `output` holds checkpoints.
    """
    if resume not in ("auto", "never"):
        problem = defect(Path(resume))
        if problem:
            raise InputError(f"checkpoint.resume: {resume}: {problem}")
        return Path(resume)
    candidates = sorted((output / FOLDER).glob("step_*.pt"), reverse=True)
    if resume == "never":
        if candidates:
            raise InputError(
                f"checkpoint.resume: never, but {output} holds {candidates[0].name}; write another output, or auto"
            )
        return None
    for candidate in candidates:
        problem = defect(candidate)
        if problem is None:
            return candidate
        print(f"warning: {candidate}: {problem}; taking the one before", flush=True)
    if candidates:
        raise InputError(f"{output / FOLDER}: all {len(candidates)} checkpoints are damaged; write another output")
    return None


def defect(path: Path) -> str | None:
    """Why `path` cannot be used, or None if it is whole: its checksum is right, and it can be read."""
    if not path.is_file():
        return "there is no such file"
    note = path.with_suffix(".sha256")
    if note.is_file() and note.read_text().split()[:1] != [_sha256(path)]:
        return f"its checksum is not the one in {note.name}: the file is damaged"
    try:
        load(path)
    except InputError as error:
        return str(error).removeprefix(f"{path}: ")
    return None


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU.

    Raises:
        InputError: not one of ours, or of a later version.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch names a damaged file in half a dozen ways
        raise InputError(f"{path}: cannot be read: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(state, dict) or not _KEYS <= state.keys():
        raise InputError(f"{path}: is not a checkpoint of this program")
    if state["format"] > FORMAT:
        raise InputError(f"{path}: has format {state['format']}; this program reads up to {FORMAT}: update it")
    return state


def save_file(path: Path, value: Any) -> None:
    """Write any tensors-and-numbers value with torch, whole or not at all."""
    temporary = _temporary(path)
    try:
        _save_to(temporary, value)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


class _Hashed:
    """A file that torch writes to, in order: the digest of what went in, and the disk's own error.

    torch reports a full disk as a RuntimeError about positions.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _save_to(path: Path, value: Any) -> str:
    """Write `value` and force it to the disk; returns the SHA-256."""
    with path.open("wb", buffering=0) as file:
        hashed = _Hashed(file)
        try:
            torch.save(value, hashed)  # type: ignore[arg-type]  # it calls write and flush
        except Exception:
            if hashed.error is not None:
                raise hashed.error from None
            raise
        os.fsync(file.fileno())
    return hashed.digest.hexdigest()


def _write(path: Path, text: str) -> None:
    temporary = _temporary(path)
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
