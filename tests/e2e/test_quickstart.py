"""`./run.sh quickstart` as a newcomer types it, and everything it leaves."""

import json
import sqlite3
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dali.errors import InputError
from pipeline.commands import quickstart
from pipeline.model import build_backbone

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished quickstart: its folder, and what it showed."""
    output = tmp_path_factory.mktemp("quickstart") / "out"
    shown = subprocess.run(
        ["./run.sh", "quickstart", f"output={output}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stdout[-3000:] + shown.stderr[-3000:]
    return output, shown.stdout


@pytest.mark.parametrize("word", ["data.path=/data/photos", "data.path=", "data.test_path=null"])
def test_other_images_are_for_pretrain(word, monkeypatch):
    """It writes its digits beside the path of its config: not into a folder of the user's."""
    monkeypatch.setattr(quickstart, "write_digits", lambda folder: pytest.fail(f"wrote to {folder}"))
    with pytest.raises(InputError, match="brings its own images; for others: ./run.sh pretrain"):
        quickstart.run([word])


def test_an_interrupted_one_is_continued_and_a_complete_one_kept(tmp_path):
    for number, finished in ((1, True), (2, False)):
        folder = quickstart._next_output(tmp_path)
        assert folder.name == ("quickstart" if number == 1 else f"quickstart-{number}")
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"finished": finished}))
    assert quickstart._next_output(tmp_path).name == "quickstart-2"


def rows(output, query):
    with sqlite3.connect(output / "mlflow.db") as database:
        return database.execute(query).fetchall()


def test_features_are_better_than_random_ones(done):
    output, shown = done
    summary = json.loads((output / "summary.json").read_text())
    accuracy = {int(step): value for step, value in summary["knn_accuracy"].items()}
    assert summary["finished"] and accuracy[max(accuracy)] >= accuracy[0] + 3
    assert f"random features      {accuracy[0]:5.1f} %" in shown
    assert f"pretrained features  {accuracy[max(accuracy)]:5.1f} %" in shown
    assert "raw pixels" in shown and "./run.sh ui" in shown and str(output / "backbone.pth") in shown


def test_progress_lines_say_where_it_is(done):
    lines = [line for line in done[1].splitlines() if line.startswith("step ")]
    assert len(lines) >= 15
    for word in ("loss", "(on ", "off ", "images/s", "data wait", "ETA"):
        assert word in lines[-1]


def test_one_run_in_mlflow_with_everything(done):
    """Case 13: one run a job, on rank 0 alone, however many workers."""
    output, _ = done
    assert rows(output, "select name, status from runs") == [("quickstart", "FINISHED")]
    params = dict(rows(output, "select key, value from params"))
    assert params["loss.lambd"] == "0.0051" and params["model.backbone"] == "convnet4"
    tags = dict(rows(output, "select key, value from tags"))
    assert tags["world_size"] in ("1", "2") and "launch" not in tags["command"]
    assert {"version.torch", "version.horovod", "version.nvidia-dali-cuda130", "hosts", "data_digest"} <= tags.keys()
    metrics = dict(rows(output, "select key, count(distinct step) from metrics group by key"))
    wanted = ("loss", "on_diag", "off_diag", "lr_weights", "lr_biases", "images_per_second", "data_wait_percent")
    assert all(metrics[key] >= 15 for key in (*wanted, "step_seconds", "epoch"))
    signs = ("effective_rank", "c_diag_mean", "c_diag_min", "c_off_rms", "c_off_max")
    assert all(metrics[key] >= 2 for key in signs)
    ranks = [value for (value,) in rows(output, "select value from metrics where key = 'effective_rank' order by step")]
    assert all(1 < rank <= 255 for rank in ranks), "z has more than one direction, and no more than the batch has"
    assert metrics["knn_accuracy"] >= 3 and any(key.startswith("system/") for key in metrics)
    losses = [value for (value,) in rows(output, "select value from metrics where key = 'loss' order by step")]
    assert losses[-1] < 0.5 * losses[0]


def test_the_resolved_config_and_the_pictures_are_artifacts(done):
    output, _ = done
    (run,) = (output / "artifacts").glob("*/artifacts")
    assert "lr_weights: 0.002" in (run / "config.yaml").read_text()
    names = [file.name for file in (run / "images").glob("*.png")]
    assert any(name.startswith("views+step+0+") for name in names)
    for key in ("cross_correlation", "spectrum"):
        assert sum(name.startswith(f"{key}+step+") for name in names) >= 2


def test_the_contact_sheet_shows_two_different_views_of_each_image_and_torchvisions(done):
    sheet = np.asarray(Image.open(next((done[0] / "images" / "views").glob("*.png"))).convert("L"), float)
    width = (sheet.shape[1] - 4) // 4
    assert sheet.shape[0] >= 8 * 96 and width >= 4 + 96
    first, second, *theirs = (sheet[30:, 4 + column * width :][:, : width - 4] for column in range(4))
    assert first.std() > 20 and second.std() > 20 and np.abs(first - second).mean() > 5
    for ours, reference in zip((first, second), theirs, strict=True):
        assert np.abs(ours - reference).mean() < 2


def test_the_correlation_map_shows_its_diagonal(done):
    pictures = sorted((done[0] / "images" / "cross_correlation").glob("*.png"))
    picture = np.asarray(Image.open(pictures[-1]).convert("RGB"), float)
    red = picture[..., 0] - picture[..., 2]
    square = red[28 : 28 + 512, :512]
    diagonal, rest = np.diag(square).mean(), square[100:200, 300:400].mean()
    assert diagonal > 100 and abs(rest) < 30


def test_the_weights_are_torchvisions_and_load_alone(done):
    """Case 30: by a bare torch.load, into a backbone without any of our wrapping."""
    output, _ = done
    state = torch.load(output / "backbone.pth", weights_only=True)
    build_backbone("convnet4", in_channels=1, image_size=20).load_state_dict(state)
    newest = output / "checkpoints" / (output / "checkpoints" / "latest").read_text().strip()
    held = torch.load(newest, weights_only=True)
    assert held["format"] == 1 and held["step"] == json.loads((output / "summary.json").read_text())["step"]
    torch.testing.assert_close(
        {key: value for key, value in state.items()},
        {k.removeprefix("backbone."): v for k, v in held["model"].items() if k.startswith("backbone.")},
    )
    assert len(list((output / "checkpoints").glob("step_*.pt"))) == 3


def test_a_bare_interpreter_reads_a_checkpoint(done):
    newest = sorted((done[0] / "checkpoints").glob("step_*.pt"))[-1]
    code = f"import torch; print(torch.load({str(newest)!r}, weights_only=True)['step'])"
    python = ROOT / ".venv" / "bin" / "python"
    shown = subprocess.run([python, "-I", "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert int(shown.stdout) > 0
