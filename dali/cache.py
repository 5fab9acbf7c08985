"""Where what was found out about data is kept, so that the next start need not look again: arrays in one .npz file."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/barlow-horovod, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "barlow-horovod"


def load(file: Path, *names: str, **key: int) -> dict[str, NDArray[Any]] | None:
    """These arrays of a cache file, or None where there is none, it is damaged, or it was kept under another key."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as kept:
            if any(int(kept[name]) != value for name, value in key.items()):
                return None
            return {name: kept[name] for name in names}
    except Exception:  # zipfile and NumPy fail at damage in any way
        return None


def store(files: list[Path], arrays: dict[str, Any]) -> Path | None:
    """Keep arrays in the first of `files` that can be written, whole or not at all; says so where none can."""
    problem: OSError | None = None
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as stream:
                    np.savez(stream, **arrays)
                os.replace(temporary, file)
            except BaseException:
                os.unlink(temporary)
                raise
            return file
        except OSError as error:
            problem = error
    print(
        f"warning: {files[-1]} cannot be written ({problem and problem.strerror}); the data are listed anew at each "
        "start; set XDG_CACHE_HOME to a folder that can be written",
        file=sys.stderr,
        flush=True,
    )
    return None


def pack(names: list[bytes]) -> NDArray[np.uint8]:
    """Names without NUL as one array; `unpack` gives them back."""
    return np.frombuffer(b"\0".join(names), np.uint8)


def unpack(array: NDArray[np.uint8], count: int) -> list[bytes]:
    return array.tobytes().split(b"\0") if count else []
