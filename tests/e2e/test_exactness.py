"""`./run.sh exactness`, a reduced matrix: ResNet-18 on 1, 2 and 3 workers from the same states."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

from pipeline import exactness

ROOT = Path(__file__).parents[2]


def test_every_bound_is_kept_in_a_reduced_matrix():
    words = "--workers 1,2,3 --steps 1 --dtypes float64 --optimizers lars --combines allreduce,gram".split()
    done = subprocess.run(
        ["./run.sh", "exactness", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| same state")]
    assert len(rows) == 4 and all(row.endswith("| kept |") for row in rows)
    assert all("| equal | equal |" in row for row in rows)
    assert "every bound kept" in done.stdout


def test_nothing_is_computed_in_less_than_is_said(tmp_path):
    """On CPUs that have bf16, autocast's default would take it."""
    assert exactness.settings(tmp_path, "float32", "lars").precision.autocast == "off"


def test_a_row_beyond_its_bound_is_not_kept():
    """The bound is on every measure, and on samples and views."""
    made = SimpleNamespace(precision=SimpleNamespace(dtype="float64"), optimizer=SimpleNamespace(name="lars"))

    def row(same=(True, True), **found):
        worst = dict.fromkeys(("loss", "statistics", "gradient"), 1e-13) | found
        comparison = SimpleNamespace(made=made)
        return exactness._Comparison._row(comparison, "same state", "allreduce", 2, 20, worst, list(same), "")

    assert row().kept and "EXCEEDED" not in exactness.table([row()])
    beyond = [row(loss=2e-12), row(statistics=2e-12), row(gradient=2e-10), row((False, True)), row((True, False))]
    beyond += [row(**{name: exactness._larger(0.0, float("nan"))}) for name in ("loss", "statistics", "gradient")]
    for wrong in beyond:
        assert not wrong.kept and "EXCEEDED" in exactness.table([wrong])
    assert exactness.BOUNDS["float64"] == {"loss": 1e-12, "statistics": 1e-12, "gradient": 1e-10}
