"""Part of a source: stratified by class, the same for the same seed, or as a list file names it."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dali.errors import InputError
from dali.interface import Part, Source
from dali.order import subset_order
from dali.sources import exclude_line

Indices = NDArray[np.int64]


class Subset(Part):
    """The images of `source` at `indices`, which rise, numbered from 0; a `Source` itself."""

    def __init__(self, source: Source, indices: Indices) -> None:
        assert (np.diff(indices) > 0).all(), "indices rise"
        keep = np.zeros(len(source), bool)
        keep[indices] = True
        super().__init__([source], keep=keep)
        # What is left out here is not bad, nor unwanted
        self.excluded, self.max_pixels, self.on_bad = source.excluded, source.max_pixels, source.on_bad


def choose(source: Source, wanted: str, seed: int, key: str) -> Indices:
    """The images, in order of index, that `wanted` means: "10%", "25" or "25 per class", or a file that lists them.

    A share is taken of each class by itself, rounded, and at least one image. What fewer labels choose is part of what
    more labels choose, for the same seed. `key` is named in errors.

    Raises:
        InputError: not one of these, more than a class has, or a file that cannot be read or names other images.
    """
    assert source.labels is not None
    words = wanted.split()
    if len(words) == 1 and words[0].endswith("%"):
        return stratified(source.labels, _shares(source.labels, words[0], key), seed)
    if words and words[0].isdigit() and words[1:] in ([], ["per", "class"]):
        return stratified(source.labels, _counts(source, int(words[0]), key), seed)
    if not Path(wanted).expanduser().is_file():
        raise InputError(f"{key}: {wanted} is no share (10%), no number per class (25) and no file that lists images")
    return read_list(Path(wanted).expanduser(), source, key)


def _shares(labels: Indices, text: str, key: str) -> Indices:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise InputError(f"{key}: {text} is no share of the labels; write 1%, 10%, or another up to 100%")
    held = np.bincount(labels)
    return np.minimum(np.maximum(1, np.floor(held * percent / 100 + 0.5)), held).astype(np.int64)


def _counts(source: Source, count: int, key: str) -> Indices:
    held = np.bincount(source.labels, minlength=len(source.classes or []))  # type: ignore[arg-type]
    there = np.flatnonzero(held)  # an empty folder, or numbers that begin with 1, is no class to draw from
    if count < 1 or count > held[there].min():
        fewest = int(there[held[there].argmin()])
        name = source.classes[fewest] if source.classes else str(fewest)
        raise InputError(
            f"{key}: {count} per class, but class {name} has {held[fewest]} images; write 1 to {held[fewest]}"
        )
    return np.where(held > 0, count, 0)


def stratified(labels: Indices, counts: Indices, seed: int) -> Indices:
    """`counts[c]` images of each class c, drawn from `seed`; in order of index."""
    order = subset_order(seed, len(labels))
    return np.sort(np.concatenate([order[labels[order] == c][:count] for c, count in enumerate(counts)]))


def read_list(file: Path, source: Source, key: str) -> Indices:
    """The images that a text file names, one a line: by path below the data folder, or by file name alone; lines that
    start with # are comments, with a quote JSON strings.

    Raises:
        InputError: the file cannot be read, is empty, or a line names no image, several, or one for the second time.
    """
    try:
        lines = [line.strip() for line in file.read_bytes().decode(errors="surrogateescape").split("\n")]
        names = [
            json.loads(line) if line.startswith('"') else line for line in lines if line and not line.startswith("#")
        ]
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"{key}: {file} cannot be read ({error})") from None
    places = {source.name(index): index for index in range(len(source))}
    last_parts = Counter(name.rsplit("/", 1)[-1] for name in places)
    places |= {last: index for name, index in list(places.items()) if last_parts[last := name.rsplit("/", 1)[-1]] == 1}
    if unknown := [name for name in names if name not in places]:
        raise InputError(
            f"{key}: {file} names {unknown[0]}, which is not among the {len(source):,} images "
            f"({len(unknown)} such lines); list images of data.path"
        )
    indices = np.array(sorted(places[name] for name in names), np.int64)
    if len(indices) == 0 or len(np.unique(indices)) < len(indices):
        raise InputError(f"{key}: {file} {'names an image twice' if len(indices) else 'lists no image'}")
    return indices


def list_bytes(source: Source) -> bytes:
    """What `read_list` reads back, whatever characters the names have."""
    lines = (f"{exclude_line(source.name(index))}\n" for index in range(len(source)))
    return "".join(lines).encode(errors="surrogateescape")
