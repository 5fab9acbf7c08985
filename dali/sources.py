"""The images that a config names: what kind of source each path is, joined, and less those that are to be left out."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dali.errors import InputError
from dali.folders import FolderSource, class_folders
from dali.interface import SUFFIXES, ArraySource, Part, Report, Source, renumbered, silent
from dali.lists import LIST_SUFFIXES, ListSource
from dali.packed import (
    ARRAY_SUFFIXES,
    FASHION_REMEDY,
    Split,
    cifar_folder,
    idx_file,
    read_arrays,
    read_cifar_split,
    read_idx_split,
)
from dali.shards import ShardSource, shards_in
from dali.spec import DataSpec

__all__ = [
    "ArraySource",
    "FolderSource",
    "ListSource",
    "ShardSource",
    "Source",
    "has_test_split",
    "open_source",
    "open_test",
    "without_labels",
]

WITH_TEST_SPLIT = ("idx", "cifar")
TEST = "test:"  # before the name of a test image in an exclude list


def open_source(spec: DataSpec, split: Split, report: Report = silent, classes: list[str] | None = None) -> Source:
    """The training or the test images that the config names, less those of `data.exclude`.

    Args:
        classes: of the training images, by which test images are numbered; None: look them up.

    Raises:
        InputError: nothing there, nothing readable there, no test images named, or test classes that training has not.
    """
    key, paths = "data.path", spec.paths
    if not paths:
        raise InputError("data.path: is not set; give the folder with the training images, data.path=FOLDER")
    if spec.test_path is not None and split == "test":
        key, paths = "data.test_path", spec.test_paths
    elif split == "test" and any(_kind(path, spec) not in WITH_TEST_SPLIT for path in paths):
        raise InputError("data.test_path: is not set; give the folder with the labelled test images")
    with _readable(key, paths):
        parts = [_open(path, _kind(path, spec, key), split, key, report) for path in paths]
    source: Source = parts[0] if len(parts) == 1 else Part(parts, [f"{path.rstrip('/')}/" for path in paths])
    if spec.exclude is not None:
        unwanted = read_exclude_list(Path(spec.exclude).expanduser())[split]
        keep = np.array([source.name(index) not in unwanted for index in range(len(source))])
        if not keep.any():
            raise InputError(f"data.exclude: {spec.exclude} names all {len(source)} images of {key}; none are left")
        source = Part([source], keep=keep)
    if key == "data.test_path" and source.labels is not None:
        _number_as_in_training(source, spec, classes, report)
    source.max_pixels, source.on_bad = spec.max_pixels, spec.on_bad_file
    return source


@contextmanager
def _readable(key: str, paths: Iterable[str]) -> Iterator[None]:
    """A block that looks into these paths.

    Raises:
        InputError: the system does not let us, as with another user's folder.
    """
    try:
        yield
    except OSError as error:
        where = error.filename or ", ".join(paths)
        raise InputError(f"{key}: {os.fsdecode(where)} cannot be read ({error.strerror}); see its rights") from None


def has_test_split(spec: DataSpec) -> bool:
    """Whether the config names test images, or its training source holds some."""
    with _readable("data.path", spec.paths):
        return (
            spec.test_path is not None
            or bool(spec.paths)
            and all(_kind(path, spec) in WITH_TEST_SPLIT for path in spec.paths)
        )


def open_test(spec: DataSpec, source: Source, report: Report = silent) -> Source | None:
    """The labelled test images beside these training images, or None where there are none.

    Raises:
        InputError: the training images have no labels, or other classes than the test images.
    """
    if not has_test_split(spec):
        return None
    if source.labels is None:
        raise InputError(f"{without_labels(spec, source)} to judge test images by; write data.test_path=null")
    test = open_source(spec, "test", report, classes=source.classes)
    if test.labels is None or test.classes != source.classes:
        raise InputError(
            f"data.test_path: {', '.join(spec.test_paths or spec.paths)} has other classes than the training images "
            f"({len(test.classes or [])} against {len(source.classes or [])}); give the same class folders"
        )
    return test


def without_labels(spec: DataSpec, source: Source) -> str:
    """How a message about training images without labels begins."""
    return f"data.path: {', '.join(spec.paths)} has no labels ({source.unlabelled()} has no class)"


def _open(path: str, kind: str, split: Split, key: str, report: Report) -> Source:
    root = Path(path).expanduser()
    in_folder = kind in ("folder", "idx", "cifar") or (kind == "shards" and root.suffix != ".tar")
    if not (root.is_dir() if in_folder else root.is_file()):
        remedy = FASHION_REMEDY if kind == "idx" or "fashion" in path.lower() else "give one that exists"
        what = "a folder" if in_folder else "a file"
        raise InputError(f"{key}: {path} is not {what}; {remedy}")
    if kind == "idx":
        return ArraySource(*read_idx_split(root, split, key), origin=split)
    if kind == "cifar":
        return ArraySource(*read_cifar_split(root, split, key), origin=split)
    if kind == "arrays":
        return ArraySource(*read_arrays(root, key), origin=root.name)
    if kind == "list":
        return ListSource(root, key, report)
    if kind == "shards":
        return ShardSource(root, key, report)
    return FolderSource(root, key, report)


def _kind(path: str, spec: DataSpec, key: str = "data.path") -> str:
    """The kind of source that a path is: as `data.kind` says, or by what lies there.

    Raises:
        InputError: it is a file of no known kind, or a folder with shards and images.
    """
    if spec.kind != "auto":
        return spec.kind
    root = Path(path).expanduser()
    if root.suffix.lower() in (".tar", *LIST_SUFFIXES, *ARRAY_SUFFIXES) and not root.is_dir():
        suffix = root.suffix.lower()
        return "shards" if suffix == ".tar" else "list" if suffix in LIST_SUFFIXES else "arrays"
    if root.is_file():
        known = ", ".join((".tar", *LIST_SUFFIXES, *ARRAY_SUFFIXES))
        raise InputError(
            f"{key}: {path} is not a folder and no file of a known kind ({known}); compressed shards are not read"
        )
    if any(idx_file(root, stem) for stem in ("train-images", "t10k-images")):
        return "idx"
    if cifar_folder(root):
        return "cifar"
    if root.is_dir() and shards_in(root):
        if class_folders(root) or any(_holds_images(root)):
            raise InputError(
                f"{key}: {path} holds shards (*.tar) and images or folders; write data.kind=shards or data.kind=folder"
            )
        return "shards"
    return "folder"


def _holds_images(root: Path) -> Iterator[bool]:
    """True for each image directly in a folder."""
    with os.scandir(root) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                yield True


def _number_as_in_training(source: Source, spec: DataSpec, classes: list[str] | None, report: Report) -> None:
    """Give test labels their classes' numbers in training."""
    if classes is None:
        classes = _training_classes(spec, report)
    if classes is None:
        return
    labels = renumbered(source, classes)
    if (labels < 0).any():
        assert source.labels is not None and source.classes is not None
        stray = source.classes[source.labels[int(np.argmax(labels < 0))]]
        where = ", ".join(spec.paths)
        raise InputError(f"data.test_path: the class {stray!r} is not in {where}; name the classes of both alike")
    source.labels, source.classes = labels, classes


def _training_classes(spec: DataSpec, report: Report) -> list[str] | None:
    """Without listing all images where class folders say it."""
    if len(spec.paths) == 1 and _kind(spec.paths[0], spec) == "folder":
        root = Path(spec.paths[0]).expanduser()
        if root.is_dir() and not any(_holds_images(root)):
            return [os.fsdecode(name) for name in class_folders(root)]
    return open_source(spec, "train", report).classes


def read_exclude_list(file: Path) -> dict[Split, set[str]]:
    """Names of images by split, one a line: both may use the same names, and those of the test split have `test:`
    before them. Lines that start with # are comments, with a quote JSON strings.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        found: dict[Split, set[str]] = {"train": set(), "test": set()}
        for line in file.read_bytes().decode(errors="surrogateescape").split("\n"):
            text = line.removeprefix(TEST)
            if text and not line.startswith("#"):
                name = json.loads(text) if text.startswith('"') else text.removesuffix("\r")
                found["train" if text == line else "test"].add(name)
        return found
    except OSError as error:
        raise InputError(
            f"data.exclude: {file}: {error.strerror}; give a file with a name of an image a line"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(f"data.exclude: {file}: {error.doc[:80]!r} is no JSON string; close its quote") from None


def exclude_line(name: str, split: Split = "train") -> str:
    """The line of an exclude list that names an image, whatever characters its name has."""
    odd = name != name.strip() or name.startswith(('"', "#", TEST)) or any(character in name for character in "\n\r")
    return (TEST if split == "test" else "") + (json.dumps(name) if odd else name)
