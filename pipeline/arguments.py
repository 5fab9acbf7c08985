"""What command lines share: lists of numbers and of names, and counts that must not be too small."""

import argparse
from collections.abc import Callable, Sequence

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
