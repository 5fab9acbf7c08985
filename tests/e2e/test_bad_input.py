"""What a user gets wrong ends with one line (key or path, value, remedy), exit 2, and no run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from pipeline.__main__ import main

QUICKSTART = "configs/quickstart.yaml"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    """Three images in a class folder."""
    (tmp_path / "images" / "a").mkdir(parents=True)
    for number in range(3):
        Image.new("L", (8, 8), number * 100).save(tmp_path / "images" / "a" / f"{number}.png")
    return tmp_path


TESTED = ["model.weights=none", "data.test_path={tmp}/images"]
CASES = {
    "missing folder": (["data.path={tmp}/nowhere"], "data.path: {tmp}/nowhere is not a folder"),
    "empty folder": (["data.path={tmp}/empty"], "data.path: {tmp}/empty holds no images"),
    "no exclude list": (["data.exclude={tmp}/none.txt"], "data.exclude: {tmp}/none.txt: No such file"),
    "unknown kind of file": (["data.path={tmp}/images/a/0.png"], "is not a folder and no file of a known kind"),
    "no data": (["data.path=''"], "data.path: is not set"),
    "fewer images than the batch": (["train.global_batch=8"], "3 images"),
    "test images, but an image without a class": (
        ["data.path={tmp}/mixed", "data.test_path={tmp}/images"],
        "data.path: {tmp}/mixed has no labels (z.png has no class) to judge test images by; write",
    ),
    "unknown backbone": (["model.backbone=resnet51"], "resnet51"),
    "no GPU": (["device=cuda"], "device: cuda, but no GPU is usable"),
    "misspelt key": (["train.epoch=3"], "train.epoch: unknown key; did you mean epochs?"),
    "wrong type": (["train.epochs=soon"], "train.epochs: 'soon' is refused"),
    "negative": (["train.global_batch=-2"], "train.global_batch: -2 is refused"),
    "unwritable output": (["output=/proc/nowhere"], "output: /proc/nowhere cannot be written"),
    "more workers than samples": (["-np", "4"], "train.global_batch: 3 is fewer than the 4 workers"),
    "more workers than samples at a time": (
        ["-np", "2", "train.micro_batches=3"],
        "train.global_batch / train.micro_batches: 1 is fewer than the 2 workers",
    ),
    "no worker": (["-np", "0"], "-np 0: at least one worker is needed"),
    "more workers than slots": (["-np", "3", "-H", "a:1,b:1"], "-np 3: the hosts have 2 slots"),
    "odd hosts": (["-H", "a:x"], "a:x: is not host:slots"),
    "two configs": (["configs/base.yaml"], "a second config file"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_ends_with_one_line_and_2(case, folder, capfd, monkeypatch):
    words, expected = CASES[case]
    (folder / "empty").mkdir()
    shutil.copytree(folder / "images", folder / "mixed")
    shutil.copyfile(folder / "images/a/0.png", folder / "mixed/z.png")
    output = folder / "output"
    words = [word.replace("{tmp}", str(folder)) for word in words]
    common = [f"data.path={folder}/images", "data.test_path=null", f"output={output}", "train.global_batch=3"]
    code = main(["launch", QUICKSTART, *common, *words])
    shown = capfd.readouterr()
    assert code == 2, shown
    lines = shown.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), shown.err
    assert expected.replace("{tmp}", str(folder)) in lines[0]
    assert not (output / "mlflow.db").exists() and not (output / "journal.jsonl").exists()


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["-H", "localhost:2"]])
def test_test_images_are_looked_at_before_a_worker_starts(folder, words, capfd, monkeypatch):
    monkeypatch.setattr("pipeline.launching.run_filtered", lambda *job: pytest.fail("workers were started"))
    paths = [f"data.path={folder}/images", f"data.test_path={folder}/nowhere", f"output={folder}/output"]
    assert main(["launch", QUICKSTART, *paths, "train.global_batch=3", "device=cpu", "-np", "2", *words]) == 2
    assert f"error: data.test_path: {folder}/nowhere is not a folder" in capfd.readouterr().err


EVALUATIONS = {
    "no weights": ("probe", [], "model.weights: is not set; write model.weights=FILE"),
    "weights that are not there": ("knn", ["model.weights={tmp}/no.pth"], "model.weights: {tmp}/no.pth is not a file"),
    "no test images": ("knn", ["model.weights=none"], "data.test_path: is not set"),
    "no labels": (
        "finetune",
        ["model.weights=none", "data.path={tmp}/images/a"],
        "a has no labels (0.png has no class); finetune needs all training images labelled",
    ),
    "a batch of more than there is": (
        "probe",
        [*TESTED, "probe.batch=9"],
        "probe.batch: 9 is more than the 3 labelled",
    ),
    "a share of nothing": ("probe", [*TESTED, "--labels", "0%"], "probe.labels: 0% is no share of the labels"),
    "a list that is not there": ("finetune", [*TESTED, "--labels", "no.txt"], "finetune.labels: no.txt is no share"),
    "more workers than a batch": (
        "probe",
        [*TESTED, "probe.batch=2", "-np", "3"],
        "probe.batch: 2 is fewer than the 3",
    ),
    "workers that come and go": (
        "knn",
        [*TESTED, "-H", "localhost:2", "--min-np", "1"],
        "--min-np: only workers of pretrain may come and go; leave it out for knn",
    ),
    "one label, many rates": ("probe", [*TESTED, "probe.batch=1", "--cached", "--labels", "1"], "probe.held_out"),
}


@pytest.mark.parametrize("case", EVALUATIONS)
def test_a_mistake_in_an_evaluation_ends_the_same_way(case, folder, capfd):
    verb, words, expected = EVALUATIONS[case]
    words = [word.replace("{tmp}", str(folder)) for word in words]
    common = [f"data.path={folder}/images", "data.test_path=null", f"output={folder}/output", "device=cpu"]
    code = main(["launch", "--verb", verb, QUICKSTART, *common, *words])
    shown = capfd.readouterr()
    assert code == 2, shown
    lines = shown.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), shown.err
    assert expected.replace("{tmp}", str(folder)) in lines[0]
    assert not (folder / "output" / "journal.jsonl").exists()


def test_an_evaluation_has_a_name_and_a_folder_of_its_own(folder, capfd):
    words = [QUICKSTART, f"data.path={folder}/images", f"data.test_path={folder}/images", "--labels", "10 per class"]
    assert main(["launch", "--verb", "finetune", *words, "-np", "4", "--print", "device=cpu"]) == 0
    line = capfd.readouterr().out
    assert "-m pipeline finetune" in line and 'finetune.labels="10 per class"' in line
    tested = [word.replace("{tmp}", str(folder)) for word in TESTED]
    code = main(["launch", "--verb", "probe", *words[:2], *tested, "probe.batch=2", "--dry-run", "device=cpu"])
    shown = capfd.readouterr().out
    assert code == 0 and "name: quickstart-probe" in shown and "none: random features" in shown


def test_a_worker_started_by_hand_says_the_same(folder, capfd):
    """horovodrun can be used without our launcher; the checks are the worker's too."""
    code = main(["pretrain", QUICKSTART, f"data.path={folder}/nowhere", f"output={folder}/output"])
    shown = capfd.readouterr()
    assert code == 2 and shown.err.startswith("error: data.path:") and shown.err.count("\n") == 1
    assert not (folder / "output" / "journal.jsonl").exists()


@pytest.mark.parametrize(("mpi", "given"), [(None, "--gloo -np 4"), ("4.1.4", "-np 4")])
def test_print_shows_the_line_that_starts_the_workers(folder, capfd, monkeypatch, mpi, given):
    """Without MPI, horovodrun need not look for it."""
    (folder / "horovod-build.json").write_text(json.dumps({"mpi": mpi}))
    monkeypatch.setattr(sys, "prefix", str(folder))
    words = ["launch", QUICKSTART, "-np", "4", "-H", "a:2,b:2", "seed=3", "--print"]
    assert main(words) == 0
    line = capfd.readouterr().out
    assert f"horovodrun {given} --hosts a:2,b:2 " in line
    assert "-m pipeline pretrain configs/quickstart.yaml seed=3" in line


def test_horovodrun_with_gloo_does_not_import_torch_itself():
    """Only workers do: asking whether Gloo is there took as long as a worker's start."""
    horovodrun = Path(sys.executable).parent / "horovodrun"
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    command = [horovodrun, "--gloo", "-np", "1", "env", "-u", "PYTHONPROFILEIMPORTTIME", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "horovod.runner.launch" in modules and "torch" not in modules


def test_the_launcher_does_not_import_torch(folder):
    """Its checks that need torch are the workers' too: made first, they would double the time to the first step."""
    words = [QUICKSTART, f"data.path={folder}/images", "data.test_path=null", f"output={folder}/output", "-np", "2"]
    code = (
        "import sys; from pipeline import launching\n"
        "launching.run_filtered = lambda *job: 'torch' in sys.modules\n"
        f"sys.exit(launching.launch({[*words, 'train.global_batch=3', 'device=cpu']!r}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_dry_run_shows_what_the_config_means_and_starts_nothing(folder, capfd):
    """Case 20: the effective values are equal for any number of workers at the same global batch."""
    common = [f"data.path={folder}/images", "data.test_path=null", f"output={folder}/output", "train.global_batch=3"]
    shown = []
    for count in ("1", "2", "3"):
        assert main(["launch", QUICKSTART, *common, "-np", count, "--dry-run", "device=cpu"]) == 0
        shown.append(capfd.readouterr().out)
    assert "lr_weights: 0.002" in shown[0] and "weights 0.002 -> 2.34375e-05" in shown[0]
    assert "3 global, 1-2 local" in shown[1]
    for words, threads in (([], "the cores of each host shared out"), (["data.threads=3"], "3 threads each")):
        main(["launch", QUICKSTART, *common, *words, "-np", "3", "-H", "a:2,b:1", "--dry-run", "device=cpu"])
        assert f"3 on cpu, {threads}\n" in capfd.readouterr().out

    def without_workers(text):
        return [line for line in text.splitlines() if not line.strip().startswith(("workers", "batch"))]

    assert without_workers(shown[0]) == without_workers(shown[1]) == without_workers(shown[2])
    assert not (folder / "output" / "journal.jsonl").exists()
