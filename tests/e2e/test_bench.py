"""What `./run.sh bench` prints is what was measured."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dali.spec import ViewsSpec
from pipeline import bench_combine, bench_loader, bench_loader_memory, bench_resilience, reference_loader
from pipeline.bench_micro_batches import measure
from pipeline.samples import write_photographs

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


def test_the_loader_is_measured_with_its_stages_and_the_reference():
    rows = bench_loader.measure(torch.device("cpu"), threads=1, seconds=0.01, rounds=1, batch=4, images=4)
    rates = {row.what: row.rates[0] for row in rows}
    assert list(rates) == [
        bench_loader.DECODED,
        *bench_loader.STAGES,
        bench_loader.UNFILTERED,
        bench_loader.REFERENCE,
    ]
    assert all(rate > 0 for rate in rates.values())
    for row in rows:
        assert row.ratios == [row.rates[0] / rates[bench_loader.REFERENCE]]
    assert rows[-1].costs[0] > 0, "the cores of the reference's processes are counted"
    row = bench_loader.Row("it", [100.0, 300.0, 200.0], [1.0, 3.0, 2.0], [0.005, 0.004, 0.006])
    *_, line = bench_loader.table([row]).splitlines()
    assert line == "| it | 200 (100 to 300) | 2.00 (1.00 to 3.00) | 5.00 (4.00 to 6.00) |"


def test_the_reference_draws_two_views_of_the_recipe(tmp_path):
    write_photographs(tmp_path, 2, 60, 40)
    spec = ViewsSpec(size=32, flip=0, grey=1, blur=(0, 0), solarize=(0, 1), crop_area=(1, 1), crop_ratio=(1.5, 1.5))
    files = sorted(tmp_path.glob("*/*.jpg"))
    y1, y2 = reference_loader.TwoViews(files, spec)[3]
    assert y1.shape == y2.shape == (3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (spec.mean, spec.std))
    levels = [255 * (view * std + mean) for view in (y1, y2)]
    assert all((level - level[0]).abs().max() < 1e-3 for level in levels), "grey"
    assert levels[0].max() > 128 and levels[1].max() < 127.5, "the second is solarized"
    assert not torch.equal(y1, reference_loader.TwoViews(files, spec)[3][0]), "jitter is drawn"


def test_loading_for_long_holds_no_more():
    rows = list(
        bench_loader_memory.measure(torch.device("cpu"), 1, 20, images=16, batch=8, size=48, width=64, height=48)
    )
    assert len(rows) == 20 and rows[0].resident > 50e6
    assert bench_loader_memory.slope(rows) <= bench_loader_memory.BOUND
    assert {row.files for row in rows} == {rows[0].files} and {row.threads for row in rows} == {rows[0].threads}


def test_a_leak_is_a_slope():
    rows = [bench_loader_memory.Epoch(1000 + 3 * epoch, 5, 2) for epoch in range(20)]
    assert bench_loader_memory.slope(rows) == pytest.approx(3 / (1000 + 3 * 9.5))


def test_every_part_of_what_keeps_a_run_safe_is_timed():
    cost = bench_resilience.measure(["train.global_batch=8", "device=cpu", "model.projector=[16]"], steps=3)
    names = " ".join(row.what for row in cost.rows)
    assert all(word in names for word in ("hash", "copy", "written", "journal", "watchdog", "guard", "vote", "lease"))
    assert all(row.seconds > 0 and row.every_steps >= 1 for row in cost.rows) and cost.step_seconds > 0
    assert cost.share == pytest.approx(sum(row.seconds / row.every_steps for row in cost.rows) / cost.step_seconds)
    *_, last = bench_resilience.table(cost).splitlines()
    assert last.startswith("| all |") and last.endswith(f"| {100 * cost.share:.3f} % |")
