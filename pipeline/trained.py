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


class Training(NamedTuple):
    """What a checkpoint says of the run that made it. `digest` is of the list of training images."""

    step: int
    epochs: float
    digest: str
    num_samples: int
    run_id: str | None
    config: dict[str, Any]
    knn_accuracy: float | None  # per cent, if the run measured it at this step


class Trained(NamedTuple):
    """`model` is on the CPU, float32, in evaluation mode.

    Attributes:
        weights: the file, or `none`.
        report: of the file's tensors; None for random weights.
        training: None unless the weights are a checkpoint of a pretraining of ours.
        has_projector: whether the projector is trained too, or random.
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
    if state is not None and not any(key.startswith("projector.") for key in state["model"]):
        state = None  # of `probe` or `finetune`: a backbone, and not a pretraining's history
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
    try:
        model.projector.load_state_dict(tensors)
    except RuntimeError:
        there = state["config"]["model"]["projector"]
        raise InputError(f"{weights}: has a projector of {there}; write model.projector={there}") from None
    return True


def _training(state: dict[str, Any], path: Path) -> Training:
    facts, values = state["facts"], state["config"]
    per_epoch = steps_per_epoch(facts["num_samples"], values["train"]["global_batch"])
    return Training(
        step=state["step"],
        epochs=state["step"] / per_epoch,
        digest=facts["digest"],
        num_samples=facts["num_samples"],
        run_id=state["run_id"],
        config=values,
        knn_accuracy=_knn_accuracy(path, state["step"]),
    )


def _knn_accuracy(path: Path, step: int) -> float | None:
    for folder in path.absolute().parents[1:3]:  # RUN/checkpoints/step_X.pt, RUN/checkpoints/milestones/step_X.pt
        if (folder / "summary.json").is_file():
            return json.loads((folder / "summary.json").read_text())["knn_accuracy"].get(str(step))
    return None
