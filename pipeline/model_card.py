"""What is to be known of an exported backbone: `model.json` for programs, `MODEL_CARD.md` for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.export import CARD_FILE, FACTS_FILE, Subject
from pipeline.trained import PRETRAIN, Trained, Training
from pipeline.weights import RANDOM

_METHODS = {
    PRETRAIN: "Barlow Twins (arXiv:2103.03230)",
    "probe": "linear probe: a classifier trained with labels on the frozen backbone",
    "finetune": "fine-tuning: backbone and classifier trained with labels",
}
# The values that make a recipe, as far as they can be said in a line each.
_RECIPE = {
    "data": ("channels",),
    "views": ("size", "crop_area", "flip", "jitter", "grey", "blur", "solarize"),
    "model": ("backbone", "stem", "projector"),
    "loss": ("lambd", "scale"),
    "optimizer": ("name", "lr_weights", "lr_biases", "reference_batch", "weight_decay"),
    "schedule": ("warmup_epochs", "final_factor"),
    "train": ("epochs", "global_batch", "micro_batches"),
}
_CLASSIFIERS_RECIPE = {
    "data": ("channels",),
    "views": ("size", "crop_area", "flip"),
    "model": ("backbone", "stem"),
    "probe": ("epochs", "batch", "lr_classifier", "momentum", "weight_decay", "crop_area"),
    "finetune": ("epochs", "batch", "lr_classifier", "lr_backbone", "momentum", "weight_decay", "crop_area"),
}


def facts(trained: Trained, subject: Subject, figures: Mapping[str, float]) -> dict[str, Any]:
    """Network, preprocessing, where the weights are from, how they were trained, and figures by name; all JSON."""
    measured = {} if trained.training is None else trained.training.figures
    return {
        **subject.facts,
        "weights": "random" if trained.report is None else Path(trained.weights).name,
        "seed": trained.config.seed,
        "training": None if trained.training is None else _of_training(trained.training),
        "figures": {**figures, **measured},
    }


def _of_training(training: Training) -> dict[str, Any]:
    verb, values = training.verb, training.config
    pretrained = verb == PRETRAIN
    recipe = _RECIPE if pretrained else {k: v for k, v in _CLASSIFIERS_RECIPE.items() if k == verb or k not in _METHODS}
    start = {} if pretrained else {"start_weights": values["model"]["weights"], "start_digest": training.start_digest}
    return {
        "verb": verb,
        "method": _METHODS[verb],
        **start,
        "epochs": round(training.epochs, 3),
        "step": training.step,
        "images": training.num_samples,
        "images_digest": training.digest,
        "mlflow_run": training.run_id,
        "recipe": {section: {key: values[section][key] for key in keys} for section, keys in recipe.items()},
        "seed": values["seed"],
    }


def write(known: Mapping[str, Any], files: Mapping[str, str], config: Config, folder: Path) -> None:
    """`model.json` and `MODEL_CARD.md` into `folder`; `files` are those of these weights in it, by format."""
    (folder / FACTS_FILE).write_text(json.dumps(known, indent=2) + "\n")
    (folder / CARD_FILE).write_text(card(known, files, config.name))


def card(known: Mapping[str, Any], files: Mapping[str, str], name: str) -> str:
    """The card as Markdown."""
    lines = [f"# {name}", "", _summary(known), "", "## Input", "", *_input(known["preprocessing"])]
    lines += ["", "## Training", "", *_training(known["training"], known["weights"])]
    lines += ["", f"Digest of the weights: `{known['weights_digest']}`"]
    lines += ["", "## Figures", ""]
    lines += [f"- {key}: {value:g}" for key, value in known["figures"].items()] or ["None were given."]
    lines += ["", "## Files", "", *(f"- `{file}` ({form})" for form, file in files.items()), f"- `{FACTS_FILE}`", ""]
    return "\n".join(lines)


def _summary(known: Mapping[str, Any]) -> str:
    stem = "" if known["stem"] == "imagenet" else f" with the {known['stem']} stem"
    return f"A {known['backbone']}{stem}, without a head: images to {known['feature_dim']} features."


def _input(steps: Mapping[str, Any]) -> list[str]:
    size = steps["centre_crop"]
    return [
        f"(N, {steps['channels']}, {size}, {size}) float32, {steps['colour']}:",
        "",
        f"1. short side to {steps['resize_short_side']} pixels, {steps['interpolation']}, "
        f"{'with' if steps['antialias'] else 'without'} antialiasing",
        f"2. centre cut out, {size} x {size}",
        "3. divided by 255",
        f"4. less {steps['mean']}, divided by {steps['std']}, per channel",
    ]


def _training(training: Mapping[str, Any] | None, weights: str) -> list[str]:
    if training is None:
        return [f"Weights: {weights}. Nothing is known of how they were trained."]
    lines = [
        f"{training['method']}: {training['epochs']:g} epochs ({training['step']:,} steps) of {training['images']:,} "
        f"{'images' if training['verb'] == PRETRAIN else 'labelled images'}, seed {training['seed']}; "
        f"weights from `{weights}`.",
        "",
        *_start(training),
        f"Digest of the list of images: `{training['images_digest']}`",
        "",
        "| key | value |",
        "|---|---|",
    ]
    for section, values in training["recipe"].items():
        lines += [f"| {section}.{key} | {json.dumps(value)} |" for key, value in values.items()]
    return lines


def _start(training: Mapping[str, Any]) -> list[str]:
    """Of a classifier: what its backbone was before, and where its last layer is."""
    if training["verb"] == PRETRAIN:
        return []
    name = training["start_weights"]
    before = "random weights" if name == RANDOM else f"`{Path(name).name}`"
    begun = "The backbone is still, bit for bit," if training["verb"] == "probe" else "The backbone began as"
    layer = "The classification layer is not in these files, but in the run's `classifier.pth`."
    return [f"{begun} {before}, digest of the weights `{training['start_digest']}`. {layer}", ""]
