"""`quickstart`: the whole pipeline on 1,797 real images that scikit-learn brings along, in a few minutes on a CPU."""

import json
import os
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from dali.errors import InputError
from pipeline import config, launching
from pipeline.cores import usable_cores
from pipeline.progress import duration
from pipeline.samples import write_digits

CONFIG = "configs/quickstart.yaml"


def run(args: list[str]) -> int:
    """Write the digits as PNG class folders, pretrain on them, and show what came out."""
    root = launching.ROOT
    os.chdir(root)
    for word in args:
        if word.startswith(("data.path=", "data.test_path=")):
            raise InputError(f"quickstart: brings its own images; for others: ./run.sh pretrain CONFIG {word}")
    words = [CONFIG, *args]
    if not any(word.startswith("output=") for word in args):
        words.append(f"output={_next_output(root / 'outputs')}")
    settings = config.load(CONFIG, words[1:])
    digits = Path(settings.data.paths[0]).parent
    write_digits(digits)
    started = time.monotonic()
    code = launching.launch(["-np", str(min(2, usable_cores())), *words])
    if code == 0:
        print(last_screen(settings.output_path, digits, time.monotonic() - started))
    return code


def _next_output(parent: Path) -> Path:
    """outputs/quickstart, or with a number if that one is complete; an interrupted one is continued."""
    number = 1
    while (summary := parent / _name(number) / "summary.json").exists() and json.loads(summary.read_text())["finished"]:
        number += 1
    return parent / _name(number)


def _name(number: int) -> str:
    return "quickstart" if number == 1 else f"quickstart-{number}"


def raw_pixel_accuracy(folder: Path) -> float:
    """Per cent right with a nearest neighbour on the 64 pixel values: what no features at all give."""

    def load(split: str) -> tuple[np.ndarray, list[str]]:
        files = sorted((folder / split).glob("*/*.png"))
        return np.stack([np.asarray(Image.open(f)).ravel() for f in files]), [f.parent.name for f in files]

    (x, y), (test_x, test_y) = load("train"), load("test")
    return 100 * KNeighborsClassifier(1).fit(x, y).score(test_x, test_y)


def last_screen(output: Path, digits: Path, seconds: float) -> str:
    """The figures, where everything lies, and how to look at it."""
    summary = json.loads((output / "summary.json").read_text())
    accuracy = {int(step): value for step, value in summary["knn_accuracy"].items()}
    before, after = accuracy.get(0), accuracy[max(accuracy)]
    rows = ["", f"Pretrained for {summary['step']} steps in {duration(seconds)}.", ""]
    rows.append("  nearest neighbours name the digit of a test image:")
    if before is not None:
        rows.append(f"    random features      {before:5.1f} %")
    rows.append(f"    pretrained features  {after:5.1f} %")
    rows.append(f"    raw pixels           {raw_pixel_accuracy(digits):5.1f} %")
    rows += [
        "",
        f"  weights      {output / 'backbone.pth'}",
        f"  checkpoints  {output / 'checkpoints'}",
        f"  pictures     {output / 'images'}",
        f"  to review the run in a browser:  ./run.sh ui {os.path.relpath(output)}",
    ]
    return "\n".join(rows)
