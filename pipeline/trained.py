"""A network to be judged or handed over: its config, its weights, and what is known of their training."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from dali.errors import InputError
from dali.order import steps_per_epoch
from pipeline import checkpoint
from pipeline.config import Config, load
from pipeline.model import BarlowTwins, build_model
from pipeline.weights import RANDOM, Report, load_named

PRETRAIN = "pretrain"


class Training(NamedTuple):
    """What a checkpoint says of the run that made it.

    Attributes:
        verb: pretrain, or of a classifier probe or finetune.
        digest: of the list of training images; of a classifier, of those whose labels it was given.
        start_digest: of the backbone that a classifier was given; None for a pretraining.
        figures: per cent, what the run measured at this step, by name.
    """

    verb: str
    step: int
    epochs: float
    digest: str
    num_samples: int
    run_id: str | None
    config: dict[str, Any]
    start_digest: str | None
    figures: dict[str, float]


class Trained(NamedTuple):
    """`model` is on the CPU, float32, in evaluation mode.

    Attributes:
        weights: the file, or `none`.
        report: of the file's tensors; None for random weights.
        training: None unless the weights are a checkpoint of ours.
        has_projector: whether the projector is trained too, or random, as with a classifier's checkpoint.
        folder: of the run, for what is made of it.
    """

    model: BarlowTwins
    config: Config
    weights: str
    report: Report | None
    training: Training | None
    has_projector: bool
    folder: Path


def open_trained(where: str, overrides: list[str]) -> Trained:
    """Build the network and read its weights.

    Args:
        where: the output folder of a run, whose config and newest good checkpoint are taken; or a config file, which
            then names `model.weights`.
        overrides: `key.path=value` words; `model.weights` takes another file, or `none` for random weights.

    Raises:
        InputError: no run, no weights named, or not of this network.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise InputError(f"{where}: holds no config.yaml; give the output folder of a run, or a config file")
        # the run's own model.weights is what it started from
        config = load(path / "config.yaml", ["model.weights=null", *overrides])
        weights: str | None = config.model.weights or _newest(path)
        folder = path.absolute()
    else:
        config = load(path, overrides)
        folder, weights = config.output_path, config.model.weights
    model = build_model(config.model, config.data.channels, config.views.size, config.seed)
    report = load_named(model.backbone, weights)
    assert weights is not None
    state = None if weights == RANDOM else _checkpoint(weights)
    has_projector = state is not None and _load_projector(model, state, weights)
    training = None if state is None else _training(state, Path(weights))
    return Trained(model.eval(), config, weights, report, training, has_projector, folder)


def _newest(run: Path) -> str:
    found = checkpoint.find(run, "auto")
    if found is not None:
        return str(found)
    if (run / "backbone.pth").is_file():
        return str(run / "backbone.pth")
    raise InputError(f"{run}: holds no checkpoint and no backbone.pth; write model.weights=FILE, or =none for random")


def _checkpoint(weights: str) -> dict[str, Any] | None:
    """The content of a checkpoint of ours, or None for any other file."""
    try:
        return checkpoint.load(Path(weights))
    except InputError:
        return None  # weights of somebody else's


def _load_projector(model: BarlowTwins, state: dict[str, Any], weights: str) -> bool:
    prefix = "projector."
    tensors = {k.removeprefix(prefix): t for k, t in state["model"].items() if k.startswith(prefix)}
    if not tensors:  # a classifier's
        return False
    try:
        model.projector.load_state_dict(tensors)
    except RuntimeError:
        there = state["config"]["model"]["projector"]
        raise InputError(f"{weights}: has a projector of {there}; write model.projector={there}") from None
    return True


def _training(state: dict[str, Any], path: Path) -> Training:
    facts, values = state["facts"], state["config"]
    verb = facts["shaping"].get("verb", PRETRAIN)  # which a pretraining does not say
    batch = values["train"]["global_batch"] if verb == PRETRAIN else values[verb]["batch"]
    per_epoch = steps_per_epoch(facts["num_samples"], batch)
    return Training(
        verb=verb,
        step=state["step"],
        epochs=state["step"] / per_epoch,
        digest=facts["digest"],
        num_samples=facts["num_samples"],
        run_id=state["run_id"],
        config=values,
        start_digest=None if verb == PRETRAIN else facts["shaping"]["weights"],
        figures=_figures(path, state["step"], verb),
    )


def _figures(path: Path, step: int, verb: str) -> dict[str, float]:
    """From the run's summary: the kNN accuracy of a pretraining, a classifier's own counts of the test images."""
    folder = path.absolute().parents[2 if path.parent.name == "milestones" else 1]
    if not (folder / "summary.json").is_file():
        return {}
    told = json.loads((folder / "summary.json").read_text())
    if verb == PRETRAIN:
        return {key: told[key][str(step)] for key in ("knn_accuracy",) if str(step) in told.get(key, {})}
    if (told.get("verb"), told["step"]) != (verb, step):
        return {}
    return {f"{verb}_{key}": told[key] for key in ("top1", "top5") if key in told}
