"""`check-data`: decode every image as training would, say what there is, and name every file that cannot be read."""

import argparse
import hashlib
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from dali import formats
from dali.interface import Source
from dali.loader import CheckLoader
from dali.packed import Split
from dali.sources import exclude_line, has_test_split, open_source
from dali.spec import DataSpec
from pipeline import config
from pipeline.arguments import writable_file
from pipeline.cores import usable_cores
from pipeline.progress import report

BATCH = 32
SHOWN = 10  # of copies and of classes; bad files are all shown
HEADER = "# Written by ./run.sh check-data, for data.exclude: one image a line, with the reason above it.\n"


class Findings:
    """What was seen of the images of one source."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.formats: Counter[str] = Counter()
        self.sizes = np.zeros((len(source), 2), np.int64)
        self.bytes = 0
        self.bad: dict[int, str] = {}
        self.first: dict[bytes, int] = {}  # content to the first image that has it
        self.copies: list[tuple[int, int]] = []

    def see(self, index: int) -> None:
        """Take in the content of an image."""
        try:
            data = self.source.read(index)
        except OSError:  # it is among the bad ones
            return
        self.bytes += data.nbytes
        digest = hashlib.blake2b(np.ascontiguousarray(data).data, digest_size=16).digest()
        if (first := self.first.setdefault(digest, index)) != index:
            self.copies.append((index, first))
        if self.source.encoded:
            self.formats[formats.format_of(data[:16].tobytes()) or "no image"] += 1

    def lines(self) -> list[tuple[str, str]]:
        """The summary, as rows of (what, text)."""
        source, count = self.source, len(self.source)
        passed_over = f"; {source.ignored:,} other files passed over" if source.ignored else ""
        excluded = f"; {source.excluded:,} excluded" if source.excluded else ""
        rows = [("images", f"{count:,}, {self.bytes / 1e6:,.1f} MB{excluded}{passed_over}")]
        if source.encoded:
            rows.append(("formats", ", ".join(f"{name} {number:,}" for name, number in self.formats.most_common())))
        good = np.flatnonzero(self.sizes[:, 0])
        if len(good):
            pixels = self.sizes[good].prod(axis=1)
            order = good[np.argsort(pixels, kind="stable")]
            middle = self._size(order[len(order) // 2])
            rows.append(("sizes", f"{self._size(order[0])} to {self._size(order[-1])}, middle {middle}"))
            rows.append(("largest", f"{source.name(int(order[-1]))!r}, {self._size(order[-1])}"))
        rows.append(("classes", self._classes()))
        pairs = [f"{source.name(copy)!r} = {source.name(first)!r}" for copy, first in self.copies[:SHOWN]]
        more = f", and {len(self.copies) - SHOWN:,} more" if len(self.copies) > SHOWN else ""
        rows.append(("copies", f"{len(self.copies):,}" + (f": {', '.join(pairs)}{more}" if pairs else "")))
        rows.append(("bad", f"{len(self.bad):,}"))
        return rows + [("", f"{source.name(index)!r}: {reason}") for index, reason in sorted(self.bad.items())]

    def _size(self, index: int) -> str:
        return f"{self.sizes[index, 1]} x {self.sizes[index, 0]}"

    def _classes(self) -> str:
        if self.source.labels is None or self.source.classes is None:
            return "none"
        counts = np.bincount(self.source.labels, minlength=len(self.source.classes))
        order = np.argsort(-counts, kind="stable")[:SHOWN]
        shown = ", ".join(f"{self.source.classes[k]!r} {counts[k]:,}" for k in order)
        return f"{len(counts):,}: {shown}" + (f", ..., fewest {counts.min():,}" if len(counts) > SHOWN else "")


def run(args: list[str]) -> int:
    """Check the training images, and the test images if there are any; returns 1 if one is bad."""
    parser = argparse.ArgumentParser(prog="./run.sh check-data", description=__doc__)
    parser.add_argument("target", metavar="PATH | CONFIG.yaml", help="what data.path may be, or a config that names it")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override single keys of the config")
    parser.add_argument(
        "--write", type=writable_file, default="exclude.txt", metavar="FILE", help="the list of bad files"
    )
    options = parser.parse_intermixed_args(args)
    if options.target.endswith((".yaml", ".yml")):
        data = config.load(options.target, options.overrides).data
    else:
        data = config.load(None, options.overrides).data.model_copy(update={"path": options.target})
    bad: list[tuple[str, str]] = []  # line, reason
    splits: tuple[Split, ...] = ("train", "test") if has_test_split(data) else ("train",)
    for split in splits:
        found = check(open_source(data, split, report), data)
        print(f"{split} images:")
        print("\n".join(f"  {key:<8} {text}" for key, text in found.lines()), flush=True)
        bad += [(exclude_line(found.source.name(index), split), why) for index, why in sorted(found.bad.items())]
    if not bad:
        return 0
    lines = "".join(f"# {reason}\n{line}\n" for line, reason in bad)
    options.write.write_bytes((HEADER + lines).encode(errors="surrogateescape"))
    print(f"wrote {options.write}; train without these: data.exclude={options.write}", flush=True)
    return 1


def check(source: Source, data: DataSpec) -> Findings:
    """Look at every image; encoded ones are decoded, by all cores."""
    found = Findings(source)
    if not source.encoded:
        found.sizes = _sizes(source)
        for index in range(len(source)):
            found.see(index)
        return found
    threads = data.threads or usable_cores()
    with CheckLoader(source, channels=data.channels, batch=min(BATCH, len(source)), threads=threads) as loader:
        for indices, sizes, bad in loader:
            found.sizes[indices] = sizes
            found.bad |= {int(indices[row]): reason for row, reason in bad.items()}
            for index in indices.tolist():
                found.see(index)
            report("decoding", int(indices[-1]) + 1, len(source))
    return found


def _sizes(source: Source) -> NDArray[np.int64]:
    sizes = source.sizes(np.arange(len(source)))
    assert sizes is not None, "arrays have sizes"
    return sizes
