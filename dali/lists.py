"""List files: one image a line, with its path and perhaps its label, as JSON lines or CSV with a header."""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dali.errors import InputError
from dali.interface import FileSource, Report, number_labels, silent

LIST_SUFFIXES = (".jsonl", ".csv")
REPORT_EVERY = 5_000
Row = tuple[int, str, str | None]  # line number, path, label


class ListSource(FileSource):
    """The image files that a list names, in its order; paths are absolute, or relative to the list file.

    Labels are whole numbers or names; either every line has one, or none. The digest covers paths as written, sizes and
    labels.
    """

    def __init__(self, path: str | Path, key: str = "data.path", report: Report = silent) -> None:
        """`key` is the config key to name in errors.

        Raises:
            InputError: naming the line that cannot be understood, or whose file is not there.
        """
        file = Path(path).expanduser().absolute()
        self._root = file.parent
        rows = list(_rows(file, key))
        if not rows:
            raise InputError(f"{key}: {path} names no images; write one a line")
        self._lengths = np.zeros(len(rows), np.int64)
        for place, (line, name, _) in enumerate(rows):
            try:
                self._lengths[place] = os.stat(self._root / name).st_size
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise InputError(
                    f"{key}: {path}, line {line}: {name}: {reason}; paths are relative to the list's folder"
                ) from None
            if place % REPORT_EVERY == REPORT_EVERY - 1:
                report(f"looking up the files of {path}", place + 1, len(rows))
        self._names = [os.fsencode(name) for _, name, _ in rows]
        labels = [label for _, _, label in rows]
        if any(label is not None for label in labels):
            for line, name, label in rows:
                if label is None:
                    raise InputError(f"{key}: {path}, line {line}: {name} has no label; give all lines one, or none")
            self.labels, self.classes = number_labels([label for label in labels if label is not None])
        text = json.dumps([[name for _, name, _ in rows], self._lengths.tolist(), labels])
        self.digest = hashlib.sha256(text.encode()).hexdigest()


def _rows(file: Path, key: str) -> Iterator[Row]:
    try:
        text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise InputError(f"{key}: {file}: {error.strerror}; give a list that can be read") from None
    if file.suffix.lower() == ".csv":
        yield from _csv_rows(text, file, key)
    else:
        yield from _json_rows(text, file, key)


def _csv_rows(text: str, file: Path, key: str) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if "path" not in (reader.fieldnames or ()):
        raise InputError(f"{key}: {file}: has no column `path` in its first line; write path,label or path there")
    try:
        for row in reader:
            if not row["path"]:
                raise InputError(f"{key}: {file}, line {reader.line_num}: has no path")
            yield reader.line_num, row["path"], row.get("label") or None
    except csv.Error as error:
        raise InputError(f"{key}: {file}, line {reader.line_num}: is not CSV ({error})") from None


def _json_rows(text: str, file: Path, key: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{key}: {file}, line {number}: is not JSON ({error.msg})") from None
        path = row.get("path") if isinstance(row, dict) else None
        if not isinstance(path, str) or not path:
            raise InputError(f'{key}: {file}, line {number}: has no "path"; write {{"path": FILE, "label": CLASS}}')
        label = row.get("label")
        if isinstance(label, bool) or not isinstance(label, int | str | None):
            raise InputError(f"{key}: {file}, line {number}: the label {label!r} is no whole number and no name")
        yield number, path, None if label is None else str(label)
