"""`doctor` says of each part whether it works, and how to mend it."""

import os
import subprocess
from pathlib import Path

import pytest

from pipeline.commands import doctor

ROOT = Path(__file__).parents[2]


def test_every_part_works_here():
    shown = subprocess.run(["./run.sh", "doctor"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[-1] == "all parts work"
    for part in ("python", "pins", "torch", "horovod", "horovod job", "dali", "mlflow", "shared memory", "disk"):
        assert any(line[:4] in ("ok  ", "warn") and line[6:].startswith(part) for line in lines), part
    assert any("Gloo yes" in line for line in lines)


def test_a_horovod_that_is_an_empty_module_is_found(tmp_path):
    """Case 40."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(
        ["./run.sh", "doctor"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 1
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("FAIL  horovod  ")]
    assert "cannot be imported" in line and "fix: unset PYTHONPATH" in line


def test_little_shared_memory_is_a_warning(monkeypatch):
    """Case 45."""
    monkeypatch.setattr(doctor, "SHM_NEEDED", 1 << 60)
    with pytest.raises(doctor.Problem, match="NCCL between local workers wants 1 GB") as caught:
        doctor._shared_memory()
    assert not caught.value.fatal and "--shm-size" in caught.value.remedy
