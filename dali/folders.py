"""Image files below a folder. Large folders are listed with progress, and the list is kept for the next start."""

import hashlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dali import cache
from dali.errors import InputError
from dali.interface import SUFFIXES, FileSource, Report, silent

CACHE_FROM = 10_000  # files; a smaller folder is listed in less than a second
REPORT_EVERY = 5_000
RACY_SECONDS = 2  # a folder that changed this shortly before it was listed may change again unseen: clocks are coarse
VERSION = 1


class Listing(NamedTuple):
    """Relative paths in byte order, their bytes, and how many other files were passed over."""

    names: list[bytes]
    lengths: NDArray[np.int64]
    ignored: int


class FolderSource(FileSource):
    """Image files below a folder, at any depth, in the byte order of their paths.

    Each folder of the first level is a class; where images lie in the top folder itself there are no labels. Hidden
    files and files without an image suffix are counted and passed over. The digest covers relative paths and sizes.
    """

    def __init__(self, path: str | Path, key: str = "data.path", report: Report = silent) -> None:
        """`key` is the config key to name in errors.

        Raises:
            InputError: the folder cannot be read, or holds no image.
        """
        self._root = Path(path).expanduser().absolute()
        try:
            self._names, self._lengths, self.ignored = list_folder(self._root, report)
            folders = class_folders(self._root)
        except OSError as error:
            raise InputError(
                f"{key}: {os.fsdecode(error.filename)}: {error.strerror}; give a folder that can be read"
            ) from None
        if not self._names:
            raise InputError(
                f"{key}: {path} holds no images ({self.ignored} other files passed over); "
                f"put image files ({', '.join(sorted(SUFFIXES))}) below it, or give another folder"
            )
        pairs = zip(self._names, self._lengths.tolist(), strict=True)
        self.digest = hashlib.sha256(b"".join(b"%s\0%d\n" % pair for pair in pairs)).hexdigest()
        if all(b"/" in name for name in self._names):
            number = {name: place for place, name in enumerate(folders)}
            self.labels = np.array([number[name.split(b"/", 1)[0]] for name in self._names], np.int64)
            self.classes = [os.fsdecode(name) for name in folders]

    def unlabelled(self) -> str:
        return os.fsdecode(next(name for name in self._names if b"/" not in name))

    def forget(self) -> None:
        _kept_list(self._root).unlink(missing_ok=True)


def list_folder(root: Path, report: Report = silent) -> Listing:
    """The images below a folder: from the list kept of it, if no folder below changed since; else anew.

    What the kept list cannot know, a file rewritten in its place with another length, is found when the file is read
    (see `running`).

    Raises:
        OSError: a folder cannot be read.
    """
    file = _kept_list(root)
    kept = cache.load(file, "folders", "changed", "names", "lengths", "ignored", version=VERSION)
    if kept is not None:
        folders = cache.unpack(kept["folders"], len(kept["changed"]))
        if [_changed(os.path.join(os.fsencode(root), folder)) for folder in folders] == kept["changed"].tolist():
            return Listing(cache.unpack(kept["names"], len(kept["lengths"])), kept["lengths"], int(kept["ignored"]))
    walk = _Walk(os.fsencode(root), report)
    walk.into(b"", ())
    walk.files.sort()
    names = [name for name, _ in walk.files]
    listing = Listing(names, np.array([length for _, length in walk.files], np.int64), walk.ignored)
    if len(names) >= CACHE_FROM:
        report(f"listing {root}", len(names), len(names))
        if max(map(max, walk.folders.values())) < (walk.started - RACY_SECONDS) * 1e9:
            cache.store(
                [file],
                {
                    "version": VERSION,
                    "folders": cache.pack(list(walk.folders)),
                    "changed": np.array(list(walk.folders.values()), np.int64),
                    "names": cache.pack(names),
                    "lengths": listing.lengths,
                    "ignored": listing.ignored,
                },
            )
    return listing


def _kept_list(root: Path) -> Path:
    return cache.cache_folder() / f"folder-{hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}.npz"


def _changed(folder: bytes) -> list[int]:
    """When entries of a folder last came, went or were renamed, in ns; nothing if it is gone.

    Programs that copy trees set the first of the two times back; nothing sets the second.
    """
    try:
        status = os.stat(folder)
    except OSError:
        return []
    return [status.st_mtime_ns, status.st_ctime_ns]


class _Walk:
    """Links to folders are followed, as class folders often are links, but not into a folder that holds them."""

    def __init__(self, root: bytes, report: Report) -> None:
        self.root, self.report = root, report
        self.started = time.time()
        self.files: list[tuple[bytes, int]] = []
        self.folders: dict[bytes, list[int]] = {}
        self.ignored = 0

    def into(self, below: bytes, above: tuple[tuple[int, int], ...]) -> None:
        folder = os.path.join(self.root, below)
        status = os.stat(folder)
        if (here := (status.st_dev, status.st_ino)) in above:
            return
        self.folders[below] = [status.st_mtime_ns, status.st_ctime_ns]
        with os.scandir(folder) as entries:
            for entry in entries:
                name = os.path.join(below, entry.name)
                if entry.name.startswith(b"."):
                    self.ignored += 1
                elif entry.is_dir():
                    self.into(name, (*above, here))
                elif entry.is_file() and os.fsdecode(os.path.splitext(entry.name)[1]).lower() in SUFFIXES:
                    self.files.append((name, entry.stat().st_size))
                    if len(self.files) % REPORT_EVERY == 0:
                        self.report(f"listing {os.fsdecode(self.root)}", len(self.files), None)
                else:
                    self.ignored += 1


def class_folders(root: Path) -> list[bytes]:
    """The folders of the first level, in byte order: also empty ones, so that a second source can be numbered alike."""
    with os.scandir(os.fsencode(root)) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(b"."))
