"""What is to be known of an exported backbone: `model.json` for programs, `MODEL_CARD.md` for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.export import Subject
from pipeline.trained import Trained

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


def facts(trained: Trained, subject: Subject, figures: Mapping[str, float]) -> dict[str, Any]:
    """Network, preprocessing, where the weights are from, how they were trained, and figures by name; all JSON."""
    known = dict(figures)
    if trained.training is not None and trained.training.knn_accuracy is not None:
        known["knn_accuracy"] = trained.training.knn_accuracy
    return {
        **subject.facts,
        "weights": "random" if trained.report is None else Path(trained.weights).name,
        "seed": trained.config.seed,
        "training": None if trained.training is None else _of_training(trained),
        "figures": known,
    }


def _of_training(trained: Trained) -> dict[str, Any]:
    training = trained.training
    assert training is not None
    values = training.config
    return {
        "method": "Barlow Twins (arXiv:2103.03230)",
        "epochs": round(training.epochs, 3),
        "step": training.step,
        "images": training.num_samples,
        "images_digest": training.digest,
        "mlflow_run": training.run_id,
        "recipe": {section: {key: values[section][key] for key in keys} for section, keys in _RECIPE.items()},
        "seed": values["seed"],
    }


def write(known: Mapping[str, Any], files: Mapping[str, str], config: Config, folder: Path) -> None:
    """`model.json` and `MODEL_CARD.md` into `folder`; `files` are those exported, by format."""
    (folder / "model.json").write_text(json.dumps(known, indent=2) + "\n")
    (folder / "MODEL_CARD.md").write_text(card(known, files, config.name))


def card(known: Mapping[str, Any], files: Mapping[str, str], name: str) -> str:
    """The card as Markdown."""
    lines = [f"# {name}", "", _summary(known), "", "## Input", "", *_input(known["preprocessing"])]
    lines += ["", "## Training", "", *_training(known["training"], known["weights"])]
    lines += ["", "## Figures", ""]
    lines += [f"- {key}: {value:g}" for key, value in known["figures"].items()] or ["None were given."]
    lines += ["", "## Files", "", *(f"- `{file}` ({form})" for form, file in files.items()), "- `model.json`", ""]
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
        f"images, seed {training['seed']}; weights from `{weights}`.",
        "",
        f"Digest of the list of images: `{training['images_digest']}`",
        "",
        "| key | value |",
        "|---|---|",
    ]
    for section, values in training["recipe"].items():
        lines += [f"| {section}.{key} | {json.dumps(value)} |" for key, value in values.items()]
    return lines
