"""How many test images a classifier names rightly: in all, by class, and what it takes each class for."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dali.sources import Source
from pipeline import pictures, workers
from pipeline.tracking import Tracker

SHOWN_CLASSES = 30  # a longer table is only written


def to_count(test: Source) -> int | None:
    """How many test images must be counted; None where those that cannot be read are left out."""
    return None if test.on_bad == "skip" else len(test)


class Scores:
    """Counts over test images; after `sum`, over those of all workers.

    Attributes:
        confusion: (K, K) int64; row: true class, column: named class.
        in_top5: (K,) int64: images of each class among whose five most likely classes it was; None where not asked.
    """

    def __init__(self, num_classes: int, top5: bool = True) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.in_top5 = torch.zeros(num_classes, dtype=torch.int64) if top5 and num_classes > 5 else None

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits (n, K), labels (n,)."""
        logits, labels = logits.detach().cpu(), labels.cpu()
        self.add_named(logits.argmax(1), labels)
        if self.in_top5 is not None:
            hit = (logits.topk(5, dim=1).indices == labels[:, None]).any(1)
            self.in_top5 += torch.bincount(labels[hit], minlength=len(self.in_top5))

    def add_named(self, named: Tensor, labels: Tensor) -> None:
        """Count images (n,) by the class each was given."""
        num_classes = len(self.confusion)
        pairs = torch.bincount(labels * num_classes + named, minlength=num_classes**2)
        self.confusion += pairs.view(num_classes, num_classes)

    def sum(self, expected: int | None) -> "Scores":
        """Add up all workers' counts; `expected` images must have been counted, as `to_count` says."""
        workers.sum_(self.confusion, "scores.confusion")
        if self.in_top5 is not None:
            workers.sum_(self.in_top5, "scores.top5")
        assert expected in (None, self.counted), f"{self.counted} test images were counted, there are {expected}"
        return self

    @property
    def counted(self) -> int:
        """Images."""
        return int(self.confusion.sum())

    @property
    def top1(self) -> float:
        """Per cent named rightly."""
        return 100 * int(self.confusion.diagonal().sum()) / self.counted if self.counted else math.nan

    @property
    def top5(self) -> float | None:
        if self.in_top5 is None:
            return None
        return 100 * int(self.in_top5.sum()) / self.counted if self.counted else math.nan

    def metrics(self) -> dict[str, float]:
        """`top1` and, where there are more than five classes, `top5`; per cent."""
        return {"top1": self.top1} | ({} if self.top5 is None else {"top5": self.top5})

    def rows(self, classes: Sequence[str]) -> list[tuple[str, int, float, str]]:
        """Of each class: name, test images, per cent named rightly, the wrong class that it is taken for most."""
        rows = []
        for place, (name, counts) in enumerate(zip(classes, self.confusion, strict=True)):
            total, right = int(counts.sum()), int(counts[place])
            wrong = counts.clone()
            wrong[place] = 0
            taken_for = classes[int(wrong.argmax())] if int(wrong.sum()) else ""
            rows.append((name, total, 100 * right / total if total else float("nan"), taken_for))
        return rows

    def table(self, classes: Sequence[str]) -> str:
        """`rows` for the screen."""
        width = max(5, *(len(name) for name in classes))
        lines = [f"  {'class':<{width}}  images   top-1  mostly taken for"]
        lines += [f"  {name:<{width}}  {n:6}  {rate:5.1f} %  {other}" for name, n, rate, other in self.rows(classes)]
        return "\n".join(lines)

    def publish(self, step: int, classes: Sequence[str], output: Path, tracker: Tracker) -> None:
        """Show the table, write it and the confusion counts, and draw them."""
        if len(classes) <= SHOWN_CLASSES:
            print(self.table(classes), flush=True)
        with (output / "per_class.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("class", "images", "top1_percent", "mostly_taken_for"), *self.rows(classes)])
        with (output / "confusion.csv").open("w", newline="") as file:
            rows = zip(classes, self.confusion.tolist(), strict=True)
            csv.writer(file).writerows([("true / named", *classes), *((name, *counts) for name, counts in rows)])
        for name in ("per_class.csv", "confusion.csv"):
            tracker.artifact(output / name)
        shares = np.asarray(self.confusion, np.float64)
        shares /= np.maximum(shares.sum(1, keepdims=True), 1)
        tracker.image(step, "confusion", pictures.confusion_map(shares, classes))
