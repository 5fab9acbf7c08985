"""Rows of results as a page in markdown, and as a table for other programs."""

import csv
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.results import Page, Row

NONE = "–"
HEAD = ("config", "seed", "epochs", "minutes", "images", "workers", "kNN before", "kNN after")


def markdown(page: Page, command: str) -> str:
    """Two tables: every backbone; and means over the seeds of a config, where there are several."""
    lines = ["# Results", "", f"Made by `{command}`. Per cent of the test images named rightly.", ""]
    lines += _table([*HEAD, *page.columns], [_cells(row, page.columns) for row in page.rows])
    kinds = Counter(row.kind for row in page.rows)
    if kinds["pretrained"]:
        lines += [
            "",
            "kNN before and after: as the pretraining measured it. The other columns: judgements of its backbone.",
        ]
    if kinds["random"]:
        lines += ["", "Random weights: random features, and where fine-tuned, supervised training from scratch."]
    if any(len(values) > 1 for row in page.rows for values in row.judged.values()):
        lines += ["", "×n: mean of n judgements with different seeds."]
    groups = seeds(page)
    if groups:
        lines += [
            "",
            "## Several seeds",
            "",
            "Mean ± standard deviation (smallest–largest) of n finished runs; equal weights count once.",
        ]
        titles = ["config", "n", "kNN before", "kNN after", *page.columns]
        lines += ["", *_table(titles, [_group_cells(*group, page.columns) for group in groups.items()])]
    return "\n".join([*lines, *(line for note in page.notes for line in ("", note))]) + "\n"


def seeds(page: Page) -> dict[str, list[Row]]:
    """By config, where there are several: the complete rows of differing weights."""
    groups: dict[str, dict[str, Row]] = {}
    for row in page.rows:
        if row.complete:
            groups.setdefault(row.config, {})[row.digest] = row
    return {config: list(rows.values()) for config, rows in groups.items() if len(rows) > 1}


def write_csv(page: Page, path: Path) -> None:
    """The first table, with unrounded values, and what else is known of a row."""
    known = [name for name in Row._fields if name != "judged"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*known, *page.columns])
        for row in page.rows:
            judged = [_mean(row.judged.get(title)) for title in page.columns]
            writer.writerow([*(getattr(row, name) for name in known), *judged])


def _cells(row: Row, columns: Sequence[str]) -> list[str]:
    minutes = NONE if row.minutes is None else f"{row.minutes:.1f}"
    known = [row.config, row.seed or NONE, _epochs(row), minutes, row.images or NONE, row.workers or NONE]
    judged = [row.judged.get(title, {}) for title in columns]
    return [
        *known,
        *(_percent(value) for value in (row.before, row.after)),
        *(_percent(_mean(values)) + (f" ×{len(values)}" if len(values) > 1 else "") for values in judged),
    ]


def _epochs(row: Row) -> str:
    if row.epochs is None:
        return NONE
    done = f"{row.epochs:.4g}"
    if row.complete:
        return done
    return f"{done} of {row.planned:g}" + ("" if row.status == "FINISHED" else f" ({row.status})")


def _group_cells(config: str, rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    values = [[row.before for row in rows], [row.after for row in rows]]
    values += [[_mean(row.judged.get(title)) for row in rows] for title in columns]
    cells = []
    for column in values:
        there = [value for value in column if value is not None]
        cells.append(_spread(there) + (f" n={len(there)}" if 0 < len(there) < len(rows) else ""))
    return [config, str(len(rows)), *cells]


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return _percent(values[0] if values else None)
    low, high = min(values), max(values)
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} ({low:.2f}–{high:.2f})"


def _mean(values: Mapping[str, float] | None) -> float | None:
    return statistics.mean(values.values()) if values else None


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]
