"""The results page, from a store that our own tracker wrote."""

import csv
import shutil
from types import SimpleNamespace

import pytest

from dali.errors import InputError
from pipeline import results, results_page
from pipeline.commands import results as command
from pipeline.config import Config, load
from pipeline.mlflow_store import flatten
from pipeline.tracking import Tracker

UNFINISHED = "Left out, as it is not finished: "


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, empty_store):
    """Folders of runs, all tracked in one store."""
    root = tmp_path_factory.mktemp("results")
    shutil.copyfile(empty_store, root / "shared.db")

    def record(name, facts, points=(), tags=None, status="FINISHED", seed=0, **sections):
        output = root / "outputs" / name
        output.mkdir(parents=True)
        tracking = {"system_metrics": False, "uri": f"sqlite:///{root}/shared.db"}
        base = "small" if facts.get("verb") == "pretrain" else f"small-{facts.get('verb')}"
        config = Config(
            name=base, seed=seed, train={"epochs": 4}, schedule={"warmup_epochs": 0}, tracking=tracking, **sections
        )
        tracker = Tracker.start(config, output, facts=facts)
        for step, values in points:
            tracker.log(step, values)
        for key, value in (tags or {}).items():
            tracker.tag(key, value)
        tracker.end(status)

    def pretrain(name, digest, seed, after, steps=20, handed_over=20, status="FINISHED", **sections):
        facts = {"verb": "pretrain", "images": "100", "world_size": "2", "data_digest": "da7a" * 4}
        points = [(0, {"knn_accuracy": 50.0 + seed})]
        points += [(s, {"epoch": s / 5, "step_seconds": s / 4}) for s in range(10, steps + 1, 5)]
        tags = {"digest": digest, "step": handed_over, "epoch": handed_over / 5, "finished": handed_over == 20}
        points.append((steps, {"knn_accuracy": after}))
        record(name, facts, points, {"backbone": tags}, status, seed, **sections)

    def judge(name, verb, digest, value, seed=0, weights="x/backbone.pth", finished=True, test="te57" * 4, **sections):
        facts = {"verb": verb, "weights": weights, "weights_digest": digest, "labels": "100", "test_digest": test}
        key = "knn_accuracy" if verb == "knn" else "top1"
        record(name, facts, [(1, {key: 1.0}), (7, {key: value})], {"finished": finished}, seed=seed, **sections)

    pretrain("p0", "d0", 0, 80.0)
    pretrain("p1", "d1", 1, 82.0)
    pretrain("again", "d0", 0, 80.0)
    pretrain("p2", "d2", 2, 70.0, steps=15, handed_over=15, status="KILLED")
    pretrain("p3", "d3", 3, 71.0, steps=15, handed_over=10)
    pretrain("wide", "d4", 0, 90.0, loss={"lambd": 0.01})
    judge("k0", "knn", "d0", 81.0)
    judge("k0-old", "knn", "d1", 11.0)
    judge("k1", "knn", "d1", 84.0)
    judge("k3", "knn", "d3", 72.0, weights="p3/backbone.pth")
    one = {"labels": "1%"}
    judge("f0", "finetune", "d0", 70.0, finetune=one)
    judge("f0-other", "finetune", "d0", 73.0, seed=1, finetune=one)
    judge("f-none", "finetune", "r0", 60.0, weights="none", finetune=one)
    judge("r0", "knn", "r0", 55.0, weights="none")
    judge("r1", "knn", "r1", 57.0, seed=1, weights="none")
    judge("c0", "probe", "d0", 85.0, probe={"cached": True, "cached_rates": [0.1]})
    judge("c0-rates", "probe", "d0", 86.0, probe={"cached": True, "cached_rates": [0.3]})
    judge("half", "probe", "d0", 33.0, finished=False)
    record("strange", {"verb": "else"})
    return root


@pytest.fixture(scope="module")
def page(recorded):
    return results.collect(results.of_folders([recorded / "outputs"]))


def row(page, name, **wanted):
    found = [r for r in page.rows if r.config == name and all(getattr(r, k) == v for k, v in wanted.items())]
    assert found, (name, [r.config for r in page.rows])
    return found[0]


def test_a_row_for_each_pretraining_with_what_its_backbone_was_worth(page):
    kinds = [r.kind for r in page.rows]
    assert kinds == ["pretrained"] * 6 + ["random"] * 2 + ["other"]
    first = row(page, "small (loss.lambd=0.0051)", seed="0")
    assert (first.epochs, first.planned, first.images, first.workers, first.complete) == (4, 4, "100", "2", True)
    assert (first.before, first.after) == (50.0, 80.0)
    assert first.minutes == pytest.approx((10 * 2.5 + 5 * 3.75 + 5 * 5) / 60)
    assert first.judged["kNN"] == {"0": 81.0}
    assert first.judged["fine-tuned, 1%"] == {"0": 70.0, "1": 73.0}
    assert row(page, "small (loss.lambd=0.0051)", seed="1").judged == {"kNN": {"0": 84.0}}, "the newest"
    assert row(page, "small (loss.lambd=0.01)").judged == {}


def test_weights_that_training_has_left_behind_are_not_the_run_s(page):
    gone_on = row(page, "small (loss.lambd=0.0051)", seed="3")
    assert gone_on.digest == "" and gone_on.judged == {} and gone_on.epochs == 3 and not gone_on.complete
    assert row(page, "p3/backbone.pth", kind="other").judged == {"kNN": {"0": 72.0}}
    killed = row(page, "small (loss.lambd=0.0051)", seed="2")
    assert killed.digest == "d2" and killed.status == "KILLED" and killed.epochs == 3


def test_random_weights_and_training_from_scratch_are_beside(page):
    baseline = row(page, "random weights, resnet50", seed="0")
    assert baseline.judged == {"kNN": {"0": 55.0}, "fine-tuned, 1%": {"0": 60.0}} and baseline.epochs is None


def test_recipes_that_differ_have_columns_of_their_own(page):
    cached = [f"probe, cached (cached_rates={rates})" for rates in ("[0.1]", "[0.3]")]
    assert page.columns == ["kNN", *cached, "fine-tuned, 1%"]
    judged = row(page, "small (loss.lambd=0.0051)", seed="0").judged
    assert [judged[title] for title in cached] == [{"0": 85.0}, {"0": 86.0}]


def test_lists_of_labels_are_told_apart_by_what_is_in_them():
    """Each subset is written as labels.txt."""

    def title(file, digest):
        tags = {"verb": "finetune", "data_digest": digest}
        params = {"finetune.labels": file}
        return results._title(SimpleNamespace(tags=tags, params=params))

    assert title("a/labels.txt", "aaaa1111bb") == "fine-tuned, labels.txt aaaa1111"
    assert title("a/labels.txt", "aaaa1111bb") == title("elsewhere/labels.txt", "aaaa1111bb")
    assert title("b/labels.txt", "cccc2222dd") != title("a/labels.txt", "aaaa1111bb")


@pytest.mark.parametrize(
    ("verb", "word", "differs"),
    [
        ("knn", "views.mean=[0.5,0.5,0.5]", True),
        ("knn", "views.test_crop=0.5", True),
        ("probe", "precision.autocast=bf16", True),
        ("finetune", "views.flip=0", True),
        ("finetune", "views.crop_area=[0.5,1]", True),
        ("probe", "probe.crop_area=[0.5,1]", True),
        ("knn", "views.flip=0", False),
        ("knn", "views.crop_area=[0.5,1]", False),
        ("knn", "probe.crop_area=[0.5,1]", False),
        ("finetune", "finetune.evaluate_every_epochs=7", False),
        ("finetune", "views.grey=0", False),
    ],
)
def test_judgements_of_images_prepared_otherwise_are_told_apart(verb, word, differs):
    def settings(*words):
        values = load(None, ["train.epochs=20", "probe.crop_area=null", "finetune.crop_area=null", *words])
        params = flatten(values.model_dump(mode="json"))
        return results._settings(SimpleNamespace(tags={"verb": verb}, params=params))

    assert (settings(word) != settings()) == differs


def test_what_is_left_out_is_said(page):
    assert page.notes == [f"{UNFINISHED}small-probe (FINISHED).", "Left out: runs of other kinds (1)."]


def cells(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_has_runs_and_means_over_seeds(page):
    text = results_page.markdown(page, "./run.sh results outputs")
    assert "Made by `./run.sh results outputs`" in text and UNFINISHED in text
    runs, several = text.split("## Several seeds")
    config = "small (loss.lambd=0.0051)"
    assert cells(runs, f"{config} | 1")[2:9] == ["4", "1.1", "100", "2", "51.00", "82.00", "84.00"]
    assert cells(runs, f"{config} | 2")[2] == "3 of 4 (KILLED)" and cells(runs, f"{config} | 3")[2] == "3 of 4"
    assert "| 71.50 ×2 |" in runs and "×n: mean of n" in runs
    found = cells(several, config)  # the run that was made twice counts once
    assert found[1:5] == ["2", "50.50 ± 0.71 (50.00–51.00)", "81.00 ± 1.41 (80.00–82.00)", "82.50 ± 2.12 (81.00–84.00)"]
    assert found[-1] == "71.50 n=1" and "0.01" not in several.replace(config, "")
    assert cells(several, "random weights, resnet50")[4] == "56.00 ± 1.41 (55.00–57.00)"


def test_the_table_for_programs_has_every_row(page, tmp_path):
    results_page.write_csv(page, tmp_path / "t.csv")
    with open(tmp_path / "t.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 9 and found[0]["config"] == "small (loss.lambd=0.0051)" and found[0]["kNN"] == "81.0"
    assert float(found[0]["minutes"]) > 1 and found[0]["run_id"] and found[-1]["kind"] == "other"


def test_the_command_reads_folders_or_an_experiment(recorded, tmp_path, monkeypatch, capsys):
    moved = tmp_path / "moved"  # with its store, whose old place is gone
    shutil.copytree(recorded / "outputs" / "k0", moved)
    shutil.copyfile(recorded / "shared.db", moved / "mlflow.db")
    text = (moved / "tracking.json").read_text()
    (moved / "tracking.json").write_text(text.replace(f"{recorded}/shared.db", "/gone/mlflow.db"))
    assert command.run([str(moved), str(recorded / "outputs" / "p0"), "--write", str(tmp_path / "page.md")]) == 0
    shown = capsys.readouterr().out
    assert cells(shown, "small | 0")[-1] == "81.00"
    assert (tmp_path / "page.md").read_text() in shown and (tmp_path / "page.csv").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{recorded}/shared.db")
    assert command.run(["--experiment", "barlow-twins"]) == 0
    assert len(cells(capsys.readouterr().out, "small (loss.lambd=0.0051) | 1")) == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "results: give output folders, or --experiment NAME"),
        (["{root}/outputs/p0", "--experiment", "e"], "results: give output folders, or --experiment NAME"),
        (["{root}/nowhere"], "{root}/nowhere: no run was tracked here"),
        (["{root}/outputs/p0/images"], "{root}/outputs/p0/images: no run was tracked here"),
        (["{root}/outputs/strange"], "results: of 1 runs found none is of pretrain, knn, probe or finetune"),
        (["{root}/unsent"], "{root}/unsent: its run has not reached MLflow; send it with: ./run.sh sync-tracking"),
        (["{root}/lost"], "sqlite:////gone/mlflow.db: there is no such file"),
        (["{root}/outputs/p0", "--write", "page.txt"], "--write: page.txt does not end in .md"),
        (["{root}/outputs/p0", "--write", "/nowhere/page.md"], "--write: /nowhere/page.md cannot be written"),
        (["--experiment", "e"], "--experiment: MLFLOW_TRACKING_URI says where, and is not set"),
        (["--experiment", "e", "at", "./mlruns"], "MLFLOW_TRACKING_URI: ./mlruns is a folder"),
        (
            ["--experiment", "e", "at", "sqlite:///{root}/shared.db"],
            "--experiment: e is not in MLflow; there are Default,",
        ),
        (["--experiment", "e", "at", "http://127.0.0.1:9"], "http://127.0.0.1:9: cannot be read (URLError"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_line(words, said, recorded, monkeypatch):
    for name, run_id in (("unsent", "null"), ("lost", '"x"')):
        (recorded / name).mkdir(exist_ok=True)
        (recorded / name / "tracking.json").write_text(f'{{"uri": "sqlite:////gone/mlflow.db", "run_id": {run_id}}}')
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    words = [word.replace("{root}", str(recorded)) for word in words]
    if "at" in words:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", words.pop())
        words.pop()
    with pytest.raises(InputError) as caught:
        command.run(words)
    assert str(caught.value).startswith(said.replace("{root}", str(recorded))) and "\n" not in str(caught.value)
