"""Where images come from: how many, their bytes or arrays by index, their labels, and a digest of the list."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dali.errors import InputError
from dali.packed import FASHION_REMEDY, Split, cifar_folder, idx_file, read_cifar_split, read_idx_split
from dali.spec import DataSpec

SUFFIXES = frozenset(".jpg .jpeg .png .bmp .tif .tiff .webp .ppm .pgm .pnm .jp2".split())


class Source(Protocol):
    """A list of images, the same on every host.

    Attributes:
        labels: (N,) class of each image, or None where there are none.
        classes: name of each class, or None. Test images have their training images' classes.
        digest: hex digest of the list: equal if and only if the images are taken to be the same.
        encoded: whether images are files to decode (JPEG, PNG, ...) or arrays.
        channels: of the arrays; files are decoded to as many as are wanted.
        ignored: hidden and foreign files that were passed over.
    """

    labels: NDArray[np.int64] | None
    classes: list[str] | None
    digest: str
    encoded: bool
    channels: int
    ignored: int

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call an image in a message."""

    def read(self, index: int) -> NDArray[np.uint8]:
        """The encoded bytes (length,) or the pixels (H, W, C) of an image."""

    def feed(self, indices: NDArray[np.int64]) -> Any:
        """What the graph takes for a batch: paths as bytes of files, or pixels (see `graphs`)."""

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """(n, 2) heights and widths, or None where only decoding tells."""


class ArraySource:
    """Images in memory: one (N, H, W) or (N, H, W, C) uint8 array, or a list of such images of unlike sizes."""

    encoded = False
    ignored = 0

    def __init__(
        self,
        images: NDArray[np.uint8] | Sequence[NDArray[np.uint8]],
        labels: NDArray[Any] | None = None,
        classes: list[str] | None = None,
        origin: str = "image",
    ) -> None:
        """`origin` names the images in messages: `origin[index]`."""
        arrays = [np.ascontiguousarray(image if image.ndim == 3 else image[..., None]) for image in images]
        assert all(image.dtype == np.uint8 for image in arrays), "images are uint8"
        assert len({image.shape[2] for image in arrays}) == 1, "all images have the same number of channels"
        self.channels = arrays[0].shape[2]
        self._images = images.reshape(*images.shape[:3], -1) if isinstance(images, np.ndarray) else arrays
        self._sizes = np.array([image.shape[:2] for image in arrays], np.int64)
        self.labels = None if labels is None else np.asarray(labels, np.int64)
        self.classes = classes
        self._origin = origin
        content = hashlib.sha256(self._sizes.tobytes() + bytes([self.channels]))
        for image in arrays:
            content.update(image.data)
        content.update(b"" if self.labels is None else self.labels.tobytes())
        self.digest = content.hexdigest()

    def __len__(self) -> int:
        return len(self._images)

    def name(self, index: int) -> str:
        return f"{self._origin}[{index}]"

    def read(self, index: int) -> NDArray[np.uint8]:
        return self._images[index]

    def feed(self, indices: NDArray[np.int64]) -> Any:
        if isinstance(self._images, np.ndarray):
            return self._images[indices]
        return [self._images[index] for index in indices]

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._sizes[indices]


class FolderSource:
    """Image files below a folder, at any depth, in the byte order of their paths.

    Each folder of the first level is a class; where images lie in the top folder itself there are no labels. Hidden
    files and files without an image suffix are counted and passed over. The digest covers relative paths and sizes.
    """

    encoded = True
    channels = 3

    def __init__(self, path: str | Path, key: str = "data.path", like: str | Path | None = None) -> None:
        """`key` is the config key to name in errors; `like` a folder whose classes these are, by name.

        Raises:
            InputError: the folder cannot be read, holds no image, or holds a class that `like` does not.
        """
        self._root = Path(path).expanduser().absolute()
        files: list[tuple[bytes, int]] = []
        try:
            self.ignored = _list_images(os.fsencode(self._root), b"", files, ())
        except OSError as error:
            raise InputError(
                f"{key}: {os.fsdecode(error.filename)}: {error.strerror}; give a folder that can be read"
            ) from None
        if not files:
            raise InputError(
                f"{key}: {path} holds no images ({self.ignored} other files passed over); "
                f"put image files ({', '.join(sorted(SUFFIXES))}) below it, or give another folder"
            )
        files.sort()
        self._paths = [name for name, _ in files]
        self.digest = hashlib.sha256(b"".join(b"%s\0%d\n" % file for file in files)).hexdigest()
        self.labels: NDArray[np.int64] | None = None
        self.classes: list[str] | None = None
        if all(b"/" in name for name in self._paths):
            classes = _class_folders(self._root if like is None else Path(like).expanduser())
            self._set_labels(classes, key, like)

    def _set_labels(self, classes: list[bytes], key: str, like: str | Path | None) -> None:
        number = {name: place for place, name in enumerate(classes)}
        mine = [name.split(b"/", 1)[0] for name in self._paths]
        if unknown := sorted(set(mine) - set(number)):
            raise InputError(
                f"{key}: the class folder {os.fsdecode(unknown[0])!r} is not in {like}; "
                "name the class folders of both alike"
            )
        self.labels = np.array([number[name] for name in mine], np.int64)
        self.classes = [os.fsdecode(name) for name in classes]

    def __len__(self) -> int:
        return len(self._paths)

    def name(self, index: int) -> str:
        return os.fsdecode(self._paths[index])

    def path(self, index: int) -> Path:
        """The file, absolute."""
        return self._root / self.name(index)

    def read(self, index: int) -> NDArray[np.uint8]:
        return np.fromfile(self.path(index), np.uint8)

    def feed(self, indices: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        root = os.fsencode(self._root)
        return [np.frombuffer(os.path.join(root, self._paths[index]), np.uint8) for index in indices]

    def sizes(self, indices: NDArray[np.int64]) -> None:
        return None


def open_source(spec: DataSpec, split: Split) -> Source:
    """The training or the test images that the config names.

    Raises:
        InputError: nothing there, nothing readable there, or no test images named.
    """
    key, path = "data.path", spec.path
    if not path:
        raise InputError("data.path: is not set; give the folder with the training images, data.path=FOLDER")
    if spec.test_path is not None and split == "test":
        key, path = "data.test_path", spec.test_path
    root = Path(path).expanduser()
    kind = _look(root) if spec.kind == "auto" else spec.kind
    if not root.is_dir():
        remedy = FASHION_REMEDY if kind == "idx" or "fashion" in path.lower() else "give a folder that exists"
        raise InputError(f"{key}: {path} is not a folder; {remedy}")
    if kind == "idx":
        return ArraySource(*read_idx_split(root, split, key), origin=split)
    if kind == "cifar":
        return ArraySource(*read_cifar_split(root, split, key), origin=split)
    if split == "test" and spec.test_path is None:
        raise InputError("data.test_path: is not set; give the folder with the labelled test images")
    return FolderSource(path, key, like=spec.path if split == "test" else None)


def has_test_split(spec: DataSpec) -> bool:
    """Whether the config names test images, or its training source holds some."""
    kind = _look(Path(spec.path).expanduser()) if spec.kind == "auto" else spec.kind
    return spec.test_path is not None or kind in ("idx", "cifar")


def _look(root: Path) -> str:
    """The kind of source that a folder is, by what lies in it."""
    if any(idx_file(root, stem) for stem in ("train-images", "t10k-images")):
        return "idx"
    return "cifar" if cifar_folder(root) else "folder"


def _list_images(root: bytes, below: bytes, files: list[tuple[bytes, int]], above: tuple[tuple[int, int], ...]) -> int:
    """Append (relative path, bytes) of each image at or below `below`; return how many files were passed over.

    Links to folders are followed, as class folders often are links, but not into a folder that holds them.
    """
    ignored = 0
    folder = os.path.join(root, below)
    status = os.stat(folder)
    if (here := (status.st_dev, status.st_ino)) in above:
        return 0
    with os.scandir(folder) as entries:
        for entry in entries:
            name = os.path.join(below, entry.name)
            if entry.name.startswith(b"."):
                ignored += 1
            elif entry.is_dir():
                ignored += _list_images(root, name, files, (*above, here))
            elif entry.is_file() and os.fsdecode(os.path.splitext(entry.name)[1]).lower() in SUFFIXES:
                files.append((name, entry.stat().st_size))
            else:
                ignored += 1
    return ignored


def _class_folders(root: Path) -> list[bytes]:
    """The folders of the first level, in byte order: also empty ones, so that a second source can be numbered alike."""
    with os.scandir(os.fsencode(root)) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(b"."))
