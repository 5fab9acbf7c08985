"""What came of runs, as MLflow has them: a row for each pretraining, with how its backbone was judged beside it.

A judgement is found by the digest of the weights it loaded, whatever file they came from. Judgements of
`model.weights=none` are rows of their own, to compare with: random features, and, fine-tuned, supervised training from
scratch.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dali.errors import InputError
from pipeline import mlflow_store, progress
from pipeline.mlflow_store import RecordedRun
from pipeline.resuming import NOT_SHAPING, NOT_SHAPING_KEYS
from pipeline.sender import Position
from pipeline.weights import RANDOM

COURSES = ("epoch", "step_seconds", "knn_accuracy")
TITLES = {"knn": "kNN", "cached": "probe, cached", "probe": "linear probe", "finetune": "fine-tuned"}
NETWORK = ("model.backbone", "model.stem", "model.zero_init_residual", "data.channels", "views.size", "precision.dtype")
# Keys of a judgement's section that do not change its outcome, or not that kind's
WITHOUT_EFFECT = {
    "knn": {"at_start", "every_epochs", "linear_probe", "batch"},
    "cached": {"cached", "labels", "lr_classifier", "crop_area", "evaluate_every_epochs"},
    "probe": {"cached", "labels", "cached_rates", "held_out", "evaluate_every_epochs"},
    "finetune": {"labels", "evaluate_every_epochs"},
}
# What is done to the images, and in which precision
PREPARING = [f"views.{key}" for key in ("size", "test_crop", "antialias", "mean", "std")]
PREPARING += ["precision.dtype", "precision.autocast"]
# Of judgements that train on crops
CROPPING = ["views.crop_area", "views.crop_ratio", "views.flip"]


# --- Where the runs are ---------------------------------------------------------------------------------------------


def of_folders(outputs: Sequence[Path]) -> list[RecordedRun]:
    """The run of each output folder, wherever it is tracked; of a folder of output folders, theirs.

    Raises:
        InputError: a folder holds no run, or its run is not in MLflow.
    """
    places: dict[tuple[str, str], None] = {}
    for output in outputs:
        own = output / "tracking.json"
        files = [own] if own.is_file() else sorted(output.glob("*/tracking.json"))
        if not files:
            raise InputError(
                f"{output}: no run was tracked here; give output folders of runs, or a folder of such folders"
            )
        places |= {_place(file.parent.absolute()): None for file in files}
    found: list[RecordedRun] = []
    for done, uri in enumerate(dict.fromkeys(uri for uri, _ in places), 1):
        run_ids = [run_id for where, run_id in places if where == uri]
        found += mlflow_store.read_runs(uri, COURSES, run_ids=run_ids)
        progress.report("stores read", done, len({uri for uri, _ in places}))
    return found


def _place(folder: Path) -> tuple[str, str]:
    """The store of a folder's run, and the run's id there."""
    position = Position.load(folder / "tracking.json")
    if position is None or position.run_id is None:
        raise InputError(f"{folder}: its run has not reached MLflow; send it with: ./run.sh sync-tracking {folder}")
    uri, own = position.uri, folder / "mlflow.db"
    moved = uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file() and own.is_file()
    return (f"sqlite:///{own}" if moved else uri), position.run_id


# --- Rows -----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One backbone.

    Attributes:
        kind: `pretrained` here, `random`, or `other`.
        config: the name; with it, where runs of one name differ, what they differ in.
        epochs, planned: done, and wanted by the config. None for weights that were not pretrained here.
        minutes: in the training loop, evaluations and checkpoints included, over all attempts.
        complete: whether the pretraining came to its end.
        digest: of the backbone that was handed over; empty without one, or if training has gone on since.
        before, after: kNN accuracy as the pretraining measured it, before its first step and last; per cent.
        judged: by column, then by the judgement's seed: per cent of the test images named rightly.
    """

    kind: str
    config: str
    seed: str
    epochs: float | None
    planned: float | None
    minutes: float | None
    images: str
    workers: str
    status: str
    complete: bool
    digest: str
    run_id: str
    before: float | None
    after: float | None
    judged: dict[str, dict[str, float]]


class Page(NamedTuple):
    """`columns` are the kinds of judgement; `notes` say what is left out."""

    rows: list[Row]
    columns: list[str]
    notes: list[str]


def collect(runs: Iterable[RecordedRun]) -> Page:
    """Rows from runs: pretrainings, the random weights, then weights from elsewhere.

    Raises:
        InputError: there is neither a pretraining nor a judgement among them.
    """
    runs = sorted(runs, key=lambda run: run.began)
    ours = [run for run in runs if run.tags.get("verb") == "pretrain"]
    judgements = [run for run in runs if run.tags.get("verb") in ("knn", "probe", "finetune")]
    if not ours and not judgements:
        raise InputError(f"results: of {len(runs)} runs found none is of pretrain, knn, probe or finetune")
    good = [run for run in judgements if _score(run) is not None]
    columns = told_apart({run.run_id: (_title(run), _settings(run)) for run in good})
    by_digest: dict[str, dict[str, dict[str, float]]] = {}
    for run in good:  # the newest comes last
        of_weights = by_digest.setdefault(run.tags["weights_digest"], {})
        of_weights.setdefault(columns[run.run_id], {})[run.params["seed"]] = _score(run) or 0.0
    configs = told_apart({run.run_id: (run.params["name"], _shaping(run)) for run in ours})
    rows = [_pretrained(run, configs[run.run_id], by_digest) for run in ours]
    known = {row.digest for row in rows}
    strangers = {run.tags["weights_digest"]: run for run in good if run.tags["weights_digest"] not in known}
    networks = told_apart({digest: _weights(run) for digest, run in strangers.items()})
    others = [_unpretrained(run, networks[digest], by_digest[digest]) for digest, run in strangers.items()]
    notes = [f"Left out, as it is not finished: {run.name} ({run.status})." for run in judgements if run not in good]
    rest = len(runs) - len(ours) - len(judgements)
    if rest:
        notes.append(f"Left out: runs of other kinds ({rest}).")
    order = {columns[run.run_id]: (list(TITLES).index(_kind(run)), int(run.tags["labels"])) for run in good}
    rows.sort(key=lambda row: (row.config, int(row.seed)))
    others.sort(key=lambda row: (row.kind != "random", row.config, int(row.seed or 0)))
    return Page(rows + others, sorted(order, key=lambda title: (order[title], title)), notes)


def told_apart(named: Mapping[str, tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    """A text for each (name, settings): the name, and the settings in which those of the same name differ."""
    texts = {}
    for key, (name, settings) in named.items():
        alike = [other for other_name, other in named.values() if other_name == name]
        differ = [
            k for k in sorted({k for other in alike for k in other}) if len({other.get(k) for other in alike}) > 1
        ]
        texts[key] = name + (f" ({', '.join(f'{k}={settings.get(k)}' for k in differ)})" if differ else "")
    return texts


def _kind(run: RecordedRun) -> str:
    cached = run.tags["verb"] == "probe" and run.params["probe.cached"] == "True"
    return "cached" if cached else run.tags["verb"]


def _title(run: RecordedRun) -> str:
    labels = run.params.get(f"{run.tags['verb']}.labels", "100%")
    if labels == "100%":
        return TITLES[_kind(run)]
    of = labels if labels.endswith("%") else f"{labels} a class" if labels.isdigit() else _list_named(labels, run)
    return f"{TITLES[_kind(run)]}, {of}"


def _list_named(file: str, run: RecordedRun) -> str:
    """A list of labels, by its digest too: each subset is written under the same name."""
    return f"{Path(file).name} {run.tags.get('data_digest', '')[:8]}"


def _settings(run: RecordedRun) -> dict[str, str]:
    """What makes two judgements comparable: recipe, how images are prepared, test images."""
    kind = _kind(run)
    prefix, without = f"{run.tags['verb']}.", WITHOUT_EFFECT[kind]
    shared = [*PREPARING, *(CROPPING if kind in ("probe", "finetune") else [])]
    values = {key.rpartition(".")[2]: run.params.get(key, "?") for key in shared}
    own = {key.removeprefix(prefix): value for key, value in run.params.items() if key.startswith(prefix)}
    values |= {key: value for key, value in own.items() if (key, value) != ("crop_area", "None")}
    where = run.params["data.test_path"] if run.params["data.test_path"] != "None" else run.params["data.path"]
    of = {"test": f"{'/'.join(Path(where).parts[-2:])} {run.tags.get('test_digest', '')[:8]}"}
    return {key: value for key, value in values.items() if key not in without} | of


def _score(run: RecordedRun) -> float | None:
    """Per cent, if the judgement came to its end."""
    if run.status != "FINISHED" or run.tags.get("finished") != "True":
        return None
    return run.metrics.get("knn_accuracy" if run.tags["verb"] == "knn" else "top1")


def _params(run: RecordedRun) -> dict[str, str]:
    """With what was changed on resume, which MLflow keeps beside them."""
    changed = {key.removeprefix("changed."): text for key, text in run.tags.items() if key.startswith("changed.")}
    return run.params | {key: text.rpartition(" -> ")[2] for key, text in changed.items()}


def _shaping(run: RecordedRun) -> dict[str, str]:
    params = _params(run)
    kept = {k: v for k, v in params.items() if k.split(".")[0] not in NOT_SHAPING and k not in NOT_SHAPING_KEYS}
    del kept["seed"]
    return kept | {"images": run.tags["data_digest"][:8]}


def _weights(run: RecordedRun) -> tuple[str, dict[str, str]]:
    if run.tags["weights"] != RANDOM:
        return run.tags["weights"], {"digest": run.tags["weights_digest"]}
    return f"random weights, {run.params['model.backbone']}", {key: run.params[key] for key in NETWORK}


def _pretrained(run: RecordedRun, config: str, judged: Mapping[str, dict[str, dict[str, float]]]) -> Row:
    epochs, tags = run.courses.get("epoch", []), run.tags
    handed_over = int(tags.get("backbone.step", -1)) >= (epochs[-1][0] if epochs else 0)
    accuracy = run.courses.get("knn_accuracy", [])
    digest = tags["backbone.digest"] if handed_over else ""
    return Row(
        kind="pretrained",
        config=config,
        seed=run.params["seed"],
        epochs=float(tags["backbone.epoch"]) if handed_over else epochs[-1][1] if epochs else 0.0,
        planned=float(_params(run)["train.epochs"]),
        minutes=_minutes(run.courses.get("step_seconds", [])),
        images=tags.get("images", ""),
        workers=tags["world_size"],
        status=run.status,
        complete=handed_over and tags["backbone.finished"] == "True" and run.status == "FINISHED",
        digest=digest,
        run_id=run.run_id,
        before=accuracy[0][1] if accuracy and accuracy[0][0] == 0 else None,
        after=accuracy[-1][1] if accuracy and accuracy[-1][0] > 0 else None,
        judged=judged.get(digest, {}),
    )


def _minutes(step_seconds: Sequence[tuple[int, float]]) -> float:
    """Each value is the mean over the steps since the one before."""
    before = [0, *(step for step, _ in step_seconds)]
    return sum((step - last) * value for last, (step, value) in zip(before, step_seconds, strict=False)) / 60


def _unpretrained(run: RecordedRun, text: str, judged: dict[str, dict[str, float]]) -> Row:
    random = run.tags["weights"] == RANDOM
    return Row(
        kind="random" if random else "other",
        config=text,
        seed=run.params["seed"] if random else "",
        epochs=None,
        planned=None,
        minutes=None,
        images="",
        workers="",
        status="",
        complete=random,
        digest=run.tags["weights_digest"],
        run_id="",
        before=None,
        after=None,
        judged=judged,
    )
