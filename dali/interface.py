"""What a source of images is, and the parts that kinds of sources share: arrays, encoded images, joined, less some."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dali.errors import InputError
from dali.spec import DataSpec

Report = Callable[[str, int, int | None], None]  # what is being done, how many are done, of how many (if known)
SUFFIXES = frozenset(".jpg .jpeg .png .bmp .tif .tiff .webp .ppm .pgm .pnm .jp2".split())
MAX_PIXELS: int = DataSpec.model_fields["max_pixels"].default
MOST_CLASSES = 100_000  # labels that are numbers stand for themselves up to here; above, they are names like others


def silent(text: str, done: int, total: int | None) -> None:
    """A report that nobody reads."""


class Source(Protocol):
    """A list of images, the same on every host.

    Attributes:
        labels: (N,) class of each image, or None where some have none.
        classes: name of each class, or None. Test images have their training images' classes.
        digest: hex digest of the list: equal if and only if the images are taken to be the same.
        encoded: whether images are files to decode (JPEG, PNG, ...) or arrays.
        in_files: of encoded images, whether `feed` gives the paths of their files, or their bytes.
        channels: of the arrays; files are decoded to as many as are wanted.
        ignored: hidden and foreign files that were passed over.
        excluded: images that were left out by the user's list.
        max_pixels: larger encoded images are bad ones; they are never decoded.
        on_bad: whether a bad image ends the run, or another takes its place.
    """

    labels: NDArray[np.int64] | None
    classes: list[str] | None
    digest: str
    encoded: bool
    in_files: bool
    channels: int
    ignored: int
    excluded: int
    max_pixels: int
    on_bad: Literal["fail", "skip"]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What to call an image in a message, and in a list of images to exclude."""

    def unlabelled(self) -> str:
        """The name of the first image without a label, if `labels` is None."""

    def read(self, index: int) -> NDArray[np.uint8]:
        """The encoded bytes (length,) or the pixels (H, W, C) of an image."""

    def feed(self, indices: NDArray[np.int64]) -> Any:
        """What the graph takes for a batch: paths as bytes, encoded bytes, or pixels (see `graphs`)."""

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """(n, 2) heights and widths, or None where only decoding tells."""

    def lengths(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """(n,) bytes that the list has for each encoded image, or None for arrays."""

    def forget(self) -> None:
        """Remove what was kept of the list for the next start: it has turned out to be wrong."""


class _Settings:
    """What every kind has from the start, and `open_source` sets."""

    in_files = False
    ignored = 0
    excluded = 0
    max_pixels = MAX_PIXELS
    on_bad: Literal["fail", "skip"] = "fail"

    def unlabelled(self: Source) -> str:
        return self.name(0)

    def forget(self) -> None:
        """Nothing is kept."""


class ArraySource(_Settings):
    """Images in memory: one (N, H, W) or (N, H, W, C) uint8 array, or a list of such images of unlike sizes."""

    encoded = False

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

    def lengths(self, indices: NDArray[np.int64]) -> None:
        return None


class EncodedSource(_Settings):
    """What lists of encoded images have in common. A kind fills in `_lengths`, labels and digest, and reads."""

    encoded = True
    channels = 3
    digest: str
    labels: NDArray[np.int64] | None = None
    classes: list[str] | None = None
    _lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, index: int) -> NDArray[np.uint8]:
        raise NotImplementedError

    def feed(self, indices: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        return [self.read(index) for index in indices]

    def sizes(self, indices: NDArray[np.int64]) -> None:
        return None

    def lengths(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._lengths[indices]


class FileSource(EncodedSource):
    """Encoded images in files of their own, which DALI reads itself. A kind fills in `_root` and `_names`."""

    in_files = True
    _root: Path
    _names: list[bytes]  # absolute, or relative to the root

    def name(self, index: int) -> str:
        return os.fsdecode(self._names[index])

    def path(self, index: int) -> Path:
        """The file, absolute."""
        return self._root / self.name(index)

    def read(self, index: int) -> NDArray[np.uint8]:
        return np.fromfile(self.path(index), np.uint8)

    def feed(self, indices: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        root = os.fsencode(self._root)
        return [np.frombuffer(os.path.join(root, self._names[index]), np.uint8) for index in indices]


class Part(_Settings):
    """Some images of one or several sources, in the order of `places`: joined sources, or one less what is excluded."""

    def __init__(
        self, parts: Sequence[Source], prefixes: Sequence[str] | None = None, keep: NDArray[np.bool_] | None = None
    ) -> None:
        """`prefixes` stand before the parts' names; `keep` (N,) says which images of all of them stay.

        Raises:
            InputError: encoded images with arrays, or arrays of unlike channels.
        """
        self._parts, self._prefixes = list(parts), list(prefixes or [""] * len(parts))
        first = parts[0]
        for part in parts:
            if (part.encoded, part.channels) != (first.encoded, first.channels):
                raise InputError(
                    "data.path: encoded images and arrays, or arrays of 1 and of 3 channels, cannot be joined; "
                    "give paths of one sort"
                )
        self.encoded, self.channels = first.encoded, first.channels
        self.in_files = first.encoded and all(part.in_files for part in parts)
        self.ignored = sum(part.ignored for part in parts)
        lengths = [len(part) for part in parts]
        owners = np.repeat(np.arange(len(parts)), lengths)
        places = np.concatenate([np.arange(length) for length in lengths]).astype(np.int64)
        keep = np.ones(len(owners), bool) if keep is None else keep
        self.excluded = int((~keep).sum())
        self._owners, self._places = owners[keep], places[keep]
        self.classes, self.labels = self._joined_labels(keep)
        self.digest = first.digest
        if len(parts) > 1 or self.excluded:
            all_digests = "\n".join(part.digest for part in parts)
            self.digest = hashlib.sha256(all_digests.encode() + np.packbits(keep).tobytes()).hexdigest()

    def _joined_labels(self, keep: NDArray[np.bool_]) -> tuple[list[str] | None, NDArray[np.int64] | None]:
        """Classes of the first part, then those that later ones add; none unless all parts have labels."""
        classes: dict[str, None] = {}
        for part in self._parts:
            if part.labels is None or part.classes is None:
                return None, None
            classes |= dict.fromkeys(part.classes)
        labels = np.concatenate([renumbered(part, list(classes)) for part in self._parts])
        return list(classes), labels[keep]

    def __len__(self) -> int:
        return len(self._owners)

    def name(self, index: int) -> str:
        owner = self._owners[index]
        return self._prefixes[owner] + self._parts[owner].name(self._places[index])

    def unlabelled(self) -> str:
        pairs = zip(self._prefixes, self._parts, strict=True)
        return next(prefix + part.unlabelled() for prefix, part in pairs if part.labels is None)

    def read(self, index: int) -> NDArray[np.uint8]:
        return self._parts[self._owners[index]].read(self._places[index])

    def feed(self, indices: NDArray[np.int64]) -> Any:
        if len(self._parts) == 1:
            return self._parts[0].feed(self._places[indices])
        if self.in_files:
            return [self._parts[self._owners[i]].feed(self._places[i : i + 1])[0] for i in indices]
        return [self.read(index) for index in indices]

    def sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self._of_each(indices, "sizes", (2,))

    def lengths(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self._of_each(indices, "lengths", ())

    def forget(self) -> None:
        for part in self._parts:
            part.forget()

    def _of_each(self, indices: NDArray[np.int64], ask: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        out = np.zeros((len(indices), *shape), np.int64)
        owners, places = self._owners[indices], self._places[indices]
        for number, part in enumerate(self._parts):
            found = getattr(part, ask)(places[owners == number])
            if found is None:
                return None
            out[owners == number] = found
        return out


def number_labels(names: Iterable[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Numbers for labels, and the classes' names: numbers stand for themselves, other names count in byte order."""
    names = list(names)
    distinct = set(names)
    if all(name.isascii() and name.isdigit() and str(int(name)) == name for name in distinct):
        values = [int(name) for name in names]
        if max(values) < MOST_CLASSES:
            return np.array(values, np.int64), [str(number) for number in range(max(values) + 1)]
    classes = sorted(distinct, key=lambda name: name.encode(errors="surrogateescape"))
    number = {name: place for place, name in enumerate(classes)}
    return np.array([number[name] for name in names], np.int64), classes


def renumbered(source: Source, classes: list[str]) -> NDArray[np.int64]:
    """The labels of a source by their names' places in `classes`; -1 where a name is not there."""
    assert source.labels is not None and source.classes is not None
    number = {name: place for place, name in enumerate(classes)}
    return np.array([number.get(name, -1) for name in source.classes], np.int64)[source.labels]
