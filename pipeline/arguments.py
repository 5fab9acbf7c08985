"""What command lines share: lists of numbers and of names, places to write to, counts that must not be too small."""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dali.errors import InputError


def numbers(text: str) -> list[int]:
    """`1,2,3`, for argparse, which refuses what is none."""
    return [int(word) for word in text.split(",")]


def some_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """`a,b`, for argparse: some of these names."""

    def chosen(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        for word in words:
            if word not in names:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(names)}")
        return words

    return chosen


def writable_file(text: str) -> Path:
    """For argparse: a file that can be written, known before hours of work and not after them.

    Raises:
        InputError: it cannot.
    """
    file = Path(text).expanduser()
    is_new = not file.exists()
    try:
        file.open("ab").close()
        if is_new:
            file.unlink(missing_ok=True)  # another worker may look at the same time
    except OSError as error:
        raise InputError(f"--write: {file} cannot be written ({error.strerror}); give another file") from None
    return file


def writable_folder(text: str) -> Path:
    """For argparse: the same for files in a folder, which is made if need be.

    Raises:
        InputError: it cannot be made, or nothing can be written there.
    """
    folder = Path(text).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"--write: {folder} cannot be written to ({error.strerror}); give another folder") from None
    return folder


def refuse_fewer(options: argparse.Namespace, **least: int) -> None:
    """Options by name, each with the smallest number it may have; also of each number of a list.

    Raises:
        InputError: naming the first that is smaller.
    """
    for name, limit in least.items():
        given = getattr(options, name, None)
        for value in given if isinstance(given, list | tuple) else [given]:
            if value is not None and value < limit:
                raise InputError(f"--{name.replace('_', '-')}: {value} is too few; at least {limit}")
