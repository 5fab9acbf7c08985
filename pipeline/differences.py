"""Differences between pictures in levels of 0 to 255, the bounds that views are held to, and their table."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEVELS = 256


class Differences:
    """Absolute differences in whole levels: how many pixels' values there are of each, from 0 to 255."""

    def __init__(self) -> None:
        self.counts = np.zeros(_LEVELS, np.int64)

    def add(self, ours: NDArray[Any], theirs: NDArray[Any]) -> None:
        levels = np.rint(np.abs(np.subtract(ours, theirs, dtype=np.float64))).astype(np.int64)
        self.counts += np.bincount(levels.ravel(), minlength=_LEVELS)

    @property
    def mean(self) -> float:
        return float(self.counts @ np.arange(_LEVELS) / max(self.counts.sum(), 1))

    def percentile(self, share: float) -> int:
        """The fewest levels that `share` percent of all values do not exceed."""
        return int(np.searchsorted(self.counts.cumsum(), share / 100 * self.counts.sum()))

    @property
    def most(self) -> int:
        return int(self.counts.nonzero()[0].max(initial=0))

    def __str__(self) -> str:
        mean = "0" if self.mean == 0 else f"{self.mean:.2f}"
        return f"{mean} / {self.percentile(95)} / {self.percentile(99)} / {self.most}"


class Bound(NamedTuple):
    """The most that differences may be."""

    mean: float = math.inf
    p95: float = math.inf
    p99: float = math.inf
    most: float = math.inf

    def holds(self, found: Differences) -> bool:
        return (
            found.mean <= self.mean
            and found.percentile(95) <= self.p95
            and found.percentile(99) <= self.p99
            and found.most <= self.most
        )

    def __str__(self) -> str:
        names = ("mean", "95 %", "99 %", "max")
        return ", ".join(f"{name} {limit:g}" for name, limit in zip(names, self, strict=True) if limit < math.inf)


class Row(NamedTuple):
    what: str
    found: dict[str, Differences]  # by group of images

    def exceeded(self) -> list[str]:
        """The groups in which the bound does not hold."""
        return [group for group, found in self.found.items() if not bound_of(self.what, group).holds(found)]


# --- The bounds that `./run.sh parity` and tests/unit/test_views.py hold views to -----------------------------------

_EXACT, _ROUNDING = Bound(most=0), Bound(mean=0.7, most=1)
OF_ANY_IMAGE = {
    "decode": Bound(mean=0.1, most=2),
    "resize, inside": Bound(mean=0.3, p99=1),
    "resize, edge": Bound(mean=0.5, p99=4),
    "resize before rounding, inside": Bound(mean=0.02, most=1),
    "resize before rounding, edge": Bound(mean=0.5, p99=4),
    "flip": _EXACT,
    "brightness": _ROUNDING,
    "contrast": _ROUNDING,
    "saturation": _ROUNDING,
    "grey": Bound(mean=0.1, most=1),
    "blur, inside": Bound(mean=0.5, p99=2, most=3),
    "blur, edge": Bound(mean=0.7, p99=8),
    "solarize": _EXACT,
    "evaluation view": Bound(mean=0.3, p99=1),
}
# What depends on the image: how far it is from grey, and how much of it is nearly black or white.
OF_PHOTOGRAPHS = OF_ANY_IMAGE | {
    "decode": Bound(mean=0.1, most=1),
    "hue": Bound(mean=4),
    "jitter without hue": Bound(mean=4),
    "jitter": Bound(mean=6),
    "view without hue": Bound(mean=2, p95=6),
    "view": Bound(mean=4),
}
OF_GROUP = {  # of photographs that are far from grey
    "flower": {"hue": Bound(mean=13), "jitter": Bound(mean=13), "view": Bound(mean=13)},
    "saturated": {
        "hue": Bound(mean=20),
        "jitter": Bound(mean=20),
        "view without hue": Bound(mean=4),
        "view": Bound(mean=20),
    },
}
PHOTOGRAPHS = ("china", "flower", "dark", "bright", "saturated")


def bound_of(what: str, group: str) -> Bound:
    """What is stated of a row for a group of images: nothing, where the row only explains others."""
    bounds = OF_PHOTOGRAPHS | OF_GROUP.get(group, {}) if group in PHOTOGRAPHS else OF_ANY_IMAGE
    return bounds.get(what, Bound())


def bounds_of(what: str, groups: Sequence[str]) -> str:
    """The bound of the first group, and those of groups that have another."""
    first, *others = groups
    words = [f"{group}: {bound_of(what, group)}" for group in others if bound_of(what, group) != bound_of(what, first)]
    return "; ".join([str(bound_of(what, first)), *words])


def table(rows: Sequence[Row]) -> str:
    """Markdown: a row each, a column for each group of images, bold where a bound is exceeded, and the bounds."""
    groups = list(dict.fromkeys(group for row in rows for group in row.found))
    lines = [f"| mean / 95 % / 99 % / max | {' | '.join(groups)} | bound |", "|---|" + "---|" * (len(groups) + 1)]
    for row in rows:
        exceeded = row.exceeded()
        cells = [f"**{row.found[group]}**" if group in exceeded else str(row.found[group]) for group in groups]
        lines.append(f"| {row.what} | {' | '.join(cells)} | {bounds_of(row.what, groups)} |")
    return "\n".join(lines)
