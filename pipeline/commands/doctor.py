"""`doctor`: does each part of the installation work? One line each, with the remedy; exit 1 if one does not."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.launching import ROOT, starter

SHM_NEEDED = 1 << 30
SET_UP_AGAIN = "rm -r .venv && ./run.sh setup"
REBUILD = "rm -r .venv/.made-from && ./run.sh setup"


class Problem(Exception):
    """What is wrong, and the command that mends it."""

    def __init__(self, text: str, remedy: str, fatal: bool = True) -> None:
        super().__init__(text)
        self.remedy, self.fatal = remedy, fatal


def run(args: list[str]) -> int:
    """Run all checks; returns 1 if one found a fault (a warning is none)."""
    checks: list[Callable[[], str]] = [
        _python,
        _pins,
        _torch,
        _horovod,
        _horovod_job,
        _dali,
        _mlflow,
        _shared_memory,
        _disk,
    ]
    faults = 0
    for check in checks:
        name = check.__name__.removeprefix("_").replace("_", " ")
        try:
            print(f"ok    {name:<14} {check()}", flush=True)
        except Problem as problem:
            faults += problem.fatal
            print(f"{'FAIL' if problem.fatal else 'warn'}  {name:<14} {problem}; fix: {problem.remedy}", flush=True)
        except Exception as error:  # whatever a broken part throws is the finding
            faults += 1
            print(f"FAIL  {name:<14} {type(error).__name__}: {_one_line(error)}; fix: {SET_UP_AGAIN}", flush=True)
    print(f"{faults} fault{'s' * (faults != 1)}" if faults else "all parts work")
    return 1 if faults else 0


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]


def _python() -> str:
    if sys.version_info[:2] != (3, 11):
        raise Problem(f"Python {platform.python_version()}, not 3.11", f"PYTHON=/path/to/python3.11; {SET_UP_AGAIN}")
    return f"{platform.python_version()} in {os.path.relpath(sys.prefix, ROOT)}"


def pins() -> Iterator[tuple[str, str]]:
    """Package and version of each line of requirements.txt."""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        name, equals, pinned = line.split("#")[0].strip().partition("==")
        if equals:
            yield name, pinned.strip()


def _pins() -> str:
    wrong, count = [], 0
    for name, pinned in pins():
        count += 1
        try:
            found = version(name).split("+")[0]
        except PackageNotFoundError:
            found = "missing"
        if found != pinned:
            wrong.append(f"{name} {found}, pinned {pinned}")
    if wrong:
        raise Problem("; ".join(wrong[:5]) + ("; ..." if len(wrong) > 5 else ""), SET_UP_AGAIN)
    return f"all {count} pinned packages have their version"


def _torch() -> str:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return f"{torch.__version__}, GPUs: {names}"
    if shutil.which("nvidia-smi"):
        raise Problem(
            f"{torch.__version__} sees no GPU though nvidia-smi is there",
            f"update the driver to one for CUDA {torch.version.cuda}",
            fatal=False,
        )
    return f"{torch.__version__}, no GPU: CPU only"


def _horovod() -> str:
    # In another process: a wheel built against another torch may abort it
    code = "import json; from pipeline import workers; print(json.dumps(workers.built()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise Problem(f"cannot be imported: {last}", f"unset PYTHONPATH if it holds another horovod; else {REBUILD}")
    built = json.loads(done.stdout.strip().splitlines()[-1])
    import torch

    parts = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in built.items())
    if not built["Gloo"]:
        raise Problem(f"built without Gloo ({parts})", REBUILD)
    if torch.cuda.is_available() and not built["NCCL"]:
        raise Problem(f"built without NCCL, but there is a GPU ({parts})", f"HOROVOD_BUILD=nccl; {REBUILD}")
    return f"{version('horovod')}: {parts}"


def _horovod_job() -> str:
    code = (
        "import torch; from pipeline import workers; w = workers.start();"
        "t = workers.sum_(torch.tensor([float(w.rank + 1)]), 'doctor'); assert w.size == 2 and t.item() == 3, (w, t)"
    )
    command = [*starter(2), sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        words = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
        raise Problem(f"two workers cannot add 1 and 2: {_one_line(words[:1] or done.stderr[-300:])}", REBUILD)
    return "horovodrun starts two workers, and they add up"


def _dali() -> str:
    from dali.loader import EvalLoader
    from dali.order import Shard
    from dali.sources import open_source
    from dali.spec import DataSpec, ViewsSpec

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a").mkdir()
        ramp = np.linspace(0, 255, 64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8)
        Image.fromarray(ramp).save(Path(folder) / "a" / "ramp.jpg", quality=95)
        source = open_source(DataSpec(path=folder), "train")
        views = ViewsSpec(size=64, test_crop=1.0, mean=(0, 0, 0), std=(1, 1, 1))
        with EvalLoader(source, views, channels=3, batch=1, shard=Shard(0, 1), device="cpu", threads=1) as loader:
            image = next(iter(loader)).images[0]
    off = float(np.abs(image.permute(1, 2, 0).numpy() * 255 - ramp).max())
    if off > 24:
        raise Problem(f"a JPEG decoded wrongly: off by {off:.0f} of 255", SET_UP_AGAIN)
    return f"{version('nvidia-dali-cuda130')} decodes a JPEG"


def _mlflow() -> str:
    from pipeline.config import Config, TrackingSection
    from pipeline.tracking import Tracker

    with tempfile.TemporaryDirectory() as folder:
        # The environment's server, if any, is left alone: this is about the installation
        settings = Config(tracking=TrackingSection(uri=f"sqlite:///{folder}/doctor.db", system_metrics=False))
        tracker = Tracker.start(settings, Path(folder))
        tracker.log(1, {"doctor": 1.0})
        tracker.end("FINISHED", timeout=60)
        if tracker.run_id is None:
            raise Problem(f"{version('mlflow')} cannot write a run to a SQLite file", SET_UP_AGAIN)
    return f"{version('mlflow')} writes a run to SQLite"


def _shared_memory() -> str:
    free = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    if free < SHM_NEEDED:
        raise Problem(
            f"/dev/shm has {free >> 20} MB; NCCL between local workers wants 1 GB",
            "docker run --shm-size=8g",
            fatal=False,
        )
    return f"/dev/shm has {free / (1 << 30):.1f} GB"


def _disk() -> str:
    free = shutil.disk_usage(ROOT).free
    if free < 2 << 30:
        raise Problem(f"{free >> 20} MB free here", "free some space, or write output= elsewhere", fatal=False)
    return f"{free >> 30} GB free here"
