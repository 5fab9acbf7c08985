"""Checkpoints: one file a step that a bare `torch.load(weights_only=True)` reads, written so that a crash leaves the
previous one whole.

A file holds `format` (this version), `step`, `model`, `optimizer`, `scaler`, `config`, `run_id`, `facts`: tensors,
numbers, strings, lists and dicts only. Beside it lies NAME.sha256. Written by rank 0: temporary name, fsync, rename,
fsync of the folder; `latest` is moved last. `milestones/` holds those that stay for good.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from dali.errors import InputError

FORMAT = 1
FOLDER = "checkpoints"
_KEYS = {"format", "step", "model", "optimizer", "scaler", "config", "run_id", "facts"}


def path_of(output: Path, step: int) -> Path:
    return output / FOLDER / f"step_{step:08d}.pt"


def save(output: Path, state: dict[str, Any], keep: int, milestone: bool) -> Path:
    """Write `state` as the newest checkpoint of `output`; then only the newest `keep` and the milestones remain."""
    target = path_of(output, state["step"])
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(".*.tmp"):  # of a writer that was killed
        left.unlink()
    temporary = target.with_name(f".{target.name}.tmp")
    with temporary.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    _write(target.with_suffix(".sha256"), f"{_sha256(temporary)}  {target.name}\n")
    temporary.rename(target)
    _sync_folder(target.parent)
    if milestone:
        folder = target.parent / "milestones"
        folder.mkdir(exist_ok=True)
        for file_ in (target, target.with_suffix(".sha256")):
            (folder / file_.name).unlink(missing_ok=True)
            os.link(file_, folder / file_.name)
    _write(target.parent / "latest", target.name + "\n")
    for old in sorted(target.parent.glob("step_*.pt"))[:-keep]:
        old.unlink()
        old.with_suffix(".sha256").unlink(missing_ok=True)
    return target


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
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync_folder(path.parent)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
