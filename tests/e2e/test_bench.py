"""What `./run.sh bench` prints is what was measured."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline import bench_combine, bench_resilience
from pipeline.bench_micro_batches import measure

ROOT = Path(__file__).parents[2]


def test_bytes_sent_are_those_of_the_ring_and_the_figure_shows_every_line(tmp_path):
    """Counted by the kernel, so that nobody's arithmetic is believed; other traffic on the loopback adds little."""
    words = ["bench", "combine", "--dims", "512,1024", "--batches", "128", "--write", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| 128")]
    assert len(rows) == 6
    for _, dim, mode, sent, held, seconds in rows:
        width = int(dim.replace(",", ""))
        known = bench_combine.computed(mode.strip(), width, 128, 2)
        assert float(sent) == pytest.approx(known.sent / 2**20, rel=0.25), (mode, dim)
        assert float(held) > 0 and float(seconds) > 0
    picture = np.asarray(Image.open(tmp_path / "combine.png").convert("RGB"))
    assert picture.shape[0] > 400 and picture.shape[1] > 1000
    for colour in ((31, 119, 180), (44, 160, 44), (214, 39, 40)):  # tab:blue, tab:green, tab:red
        assert (np.abs(picture.astype(int) - colour).sum(axis=2) < 30).sum() > 200
    assert (tmp_path / "combine.md").read_text().startswith("| B | D | combine |")


def test_what_does_not_fit_is_computed_and_marked():
    row = bench_combine.computed("allreduce", 65536, 256, 2)
    assert row.sent == 4 * 65536**2 and row.held > 4 * 65536**2
    assert "| *16,384.0* | " in bench_combine.table([row])


def test_more_micro_batches_hold_less():
    one, four = measure("convnet4", 48, 96, [1, 4], "cpu")
    assert (one.micro_batches, four.micro_batches) == (1, 4)
    assert 0 < four.held < 0.6 * one.held


def test_every_part_of_what_keeps_a_run_safe_is_timed():
    cost = bench_resilience.measure(["train.global_batch=8", "device=cpu", "model.projector=[16]"], steps=3)
    names = " ".join(row.what for row in cost.rows)
    assert all(word in names for word in ("hash", "copy", "written", "journal", "watchdog", "guard", "vote", "lease"))
    assert all(row.seconds > 0 and row.every_steps >= 1 for row in cost.rows) and cost.step_seconds > 0
    assert cost.share == pytest.approx(sum(row.seconds / row.every_steps for row in cost.rows) / cost.step_seconds)
    *_, last = bench_resilience.table(cost).splitlines()
    assert last.startswith("| all |") and last.endswith(f"| {100 * cost.share:.3f} % |")
