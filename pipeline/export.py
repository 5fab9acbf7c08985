"""The backbone in the formats other tools read, each read back and compared before it counts as written.

What must be done to an image before the network sees it travels with the weights: as metadata where a format has a
place for it, and in `model.json` beside all of them.
"""

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.models import ResNet

from dali.errors import InputError
from pipeline import weight_files, workers
from pipeline.checkpoint import save_file
from pipeline.config import Config
from pipeline.model import Backbone, build_backbone
from pipeline.weights import backbone_tensors, load_backbone_weights

TOLERANCE = 1e-5  # of features, relative to the largest where that is above 1
INPUT, OUTPUT = "images", "features"
FACTS_FILE, CARD_FILE = "model.json", "MODEL_CARD.md"  # beside the formats' files; pipeline/model_card.py writes them
_CHECKED_BATCHES = (1, 3, 8)


@dataclass(frozen=True)
class Subject:
    """What is exported: the backbone (CPU, float32, evaluation mode), its config, and facts for the metadata."""

    backbone: Backbone
    config: Config
    facts: dict[str, Any]  # JSON: see `describe`

    def images(self, count: int) -> Tensor:
        """Random images (count, C, S, S), always the same."""
        size = self.config.views.size
        return torch.randn(count, self.config.data.channels, size, size, generator=torch.Generator().manual_seed(count))

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The backbone as a graph for any batch."""
        batch = torch.export.Dim("batch", min=1)
        with torch.no_grad():
            return torch.export.export(self.backbone, (self.images(2),), dynamic_shapes=({0: batch},))


Run = Callable[[Tensor], Tensor]  # images (N, C, S, S) to features (N, F)


class Format(NamedTuple):
    """`write` makes `file`; `open` gives the features that a reader of the file gets."""

    file: str
    write: Callable[[Subject, Path], None]
    open: Callable[[Subject, Path], Run]


def preprocessing(config: Config) -> dict[str, Any]:
    """What evaluation does to an image, in words of JSON; the resize is bicubic, on pixels of 0 to 255."""
    views = config.views
    return {
        "channels": config.data.channels,
        "colour": "RGB" if config.data.channels == 3 else "grey",
        "resize_short_side": round(views.size / views.test_crop),
        "interpolation": "bicubic",
        "antialias": views.antialias,
        "centre_crop": views.size,
        "scale": 1 / 255,
        "mean": list(views.mean),
        "std": list(views.std),
        "layout": "NCHW",
        "dtype": "float32",
    }


def describe(backbone: Backbone, config: Config) -> dict[str, Any]:
    """What a reader needs to know of the network, its weights (by the digest that judgements record), and its input."""
    return {
        "backbone": config.model.backbone,
        "stem": config.model.stem,
        "feature_dim": backbone.feature_dim,
        "weights_digest": workers.digest(backbone),
        "preprocessing": preprocessing(config),
    }


def make_way(subject: Subject, names: Collection[str], folder: Path) -> None:
    """Take away a `model.json` and a card that will not be true once the formats `names` are in `folder`.

    An export that is cut short then leaves files without facts, none beside facts of others.

    Raises:
        InputError: files of other formats would stay, and `model.json` does not say the same of them.
    """
    if _facts_in(folder, subject.facts) == subject.facts:
        return
    staying = [form.file for name, form in FORMATS.items() if name not in names and (folder / form.file).exists()]
    if staying:
        raise InputError(
            f"{folder}: {', '.join(staying)} in it, by {FACTS_FILE}, are not of these weights and preprocessing; "
            "export them again too, move them away, or give another folder with --to"
        )
    for file in (FACTS_FILE, CARD_FILE):
        (folder / file).unlink(missing_ok=True)


def _facts_in(folder: Path, keys: Iterable[str]) -> dict[str, Any]:
    """What `model.json` says under these keys; nothing where it is missing or damaged."""
    try:
        known = json.loads((folder / FACTS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {key: known.get(key) for key in keys} if isinstance(known, dict) else {}


def export(subject: Subject, name: str, folder: Path) -> Path:
    """Write one format, read it back, compare tensors and features, and only then put it into `folder`.

    Raises:
        InputError: the format cannot hold this backbone; or what was read back is another: the tensor, or by how much.
    """
    form = FORMATS[name]
    target = folder / form.file
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unchecked-") as staging:
        path = Path(staging) / form.file
        form.write(subject, path)
        check(subject, name, path)
        if (target / "MLmodel").is_file():
            shutil.rmtree(target)  # of an earlier export
        os.replace(path, target)
    return target


@torch.no_grad()
def check(subject: Subject, name: str, path: Path) -> None:
    """Compare an exported file with the backbone.

    Raises:
        InputError: a tensor is missing, extra or of another shape, or the features differ by more than 1e-5.
    """
    run = FORMATS[name].open(subject, path)
    for count in _CHECKED_BATCHES:
        images = subject.images(count)
        wanted, got = subject.backbone(images), run(images)
        limit = TOLERANCE * max(1.0, float(wanted.abs().max()))
        if got.shape != wanted.shape:
            raise InputError(f"{path}: gives features {tuple(got.shape)} instead of {tuple(wanted.shape)}")
        difference = float((got - wanted).abs().max())
        if not difference <= limit:
            raise InputError(f"{path}: features differ by {difference:.2g} for {count} images; at most {limit:.2g}")


def refusal(subject: Subject, name: str) -> str | None:
    """Why a format cannot hold this backbone, or None."""
    if name == "detectron2":
        if not isinstance(subject.backbone, ResNet):
            return f"detectron2: {subject.config.model.backbone} is no ResNet; detectron2 has names only for those"
        if subject.config.model.stem != "imagenet":
            return "detectron2: its ResNets have no small stem (model.stem)"
    return None


# --- Formats --------------------------------------------------------------------------------------------------------


def _write_torch(subject: Subject, path: Path) -> None:
    save_file(path, backbone_tensors(subject.backbone))


def _write_safetensors(subject: Subject, path: Path) -> None:
    from safetensors.torch import save

    # not its save_file, which lets nobody else read the file
    path.write_bytes(save(backbone_tensors(subject.backbone), _texts(subject.facts) | {"format": "pt"}))


def _write_detectron2(subject: Subject, path: Path) -> None:
    if reason := refusal(subject, "detectron2"):
        raise InputError(reason)
    model = {
        weight_files.to_detectron2(key): tensor.numpy()
        for key, tensor in backbone_tensors(subject.backbone).items()
        if not key.endswith(".num_batches_tracked")  # its norm layers have none
    }
    about = {"__author__": "barlow-horovod", "matching_heuristics": True, **subject.facts}
    path.write_bytes(pickle.dumps({"model": model, **about}))


def _write_program(subject: Subject, path: Path) -> None:
    torch.export.save(subject.program, path, extra_files={FACTS_FILE: json.dumps(subject.facts)})


def _write_onnx(subject: Subject, path: Path) -> None:
    import onnx

    # Not optimized: batch norms would be folded into convolutions, and tensors lose their names. Runtimes fold anyway.
    program = torch.onnx.export(
        subject.program,
        (subject.images(2),),
        dynamo=True,
        input_names=[INPUT],
        output_names=[OUTPUT],
        optimize=False,
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    symbols = {dim.dim_param for item in proto.graph.input for dim in item.type.tensor_type.shape.dim} - {""}
    assert len(symbols) == 1, symbols
    for item in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in item.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_param = "batch"
    onnx.helper.set_model_props(proto, _texts(subject.facts))
    onnx.checker.check_model(proto)
    onnx.save(proto, path)


def _write_mlflow(subject: Subject, path: Path) -> None:
    from pipeline import mlflow_store

    example = subject.images(2).numpy()
    with torch.no_grad():
        features = subject.backbone(torch.from_numpy(example)).numpy()
    mlflow_store.save_model(subject.backbone, path, example, features, subject.facts)


def _open_weights(subject: Subject, path: Path) -> Run:
    """A second backbone with the file's tensors.

    Raises:
        InputError: the file does not hold all of the backbone's tensors, and no other.
    """
    model, views = subject.config.model, subject.config.views
    backbone = build_backbone(model.backbone, model.stem, subject.config.data.channels, image_size=views.size)
    report = load_backbone_weights(backbone, path)
    if extra := (*report.heads, *report.others):
        raise InputError(f"{path}: {len(extra)} tensors are not the backbone's: {extra[0]}{', ...' * (len(extra) > 1)}")
    return backbone.eval()


def _open_program(subject: Subject, path: Path) -> Run:
    _open_weights(subject, path)  # every tensor is there, and no other
    return torch.export.load(path).module()


def _open_onnx(subject: Subject, path: Path) -> Run:
    import onnxruntime

    _open_weights(subject, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(np.asarray(session.run([OUTPUT], {INPUT: images.numpy()})[0]))


def _open_mlflow(subject: Subject, path: Path) -> Run:
    from pipeline import mlflow_store

    _open_weights(subject, path / mlflow_store.MODEL_FILE)
    predict = mlflow_store.load_model(path)
    return lambda images: torch.from_numpy(predict(images.numpy()))


def _texts(facts: dict[str, Any]) -> dict[str, str]:
    """As metadata: texts, or JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}


FORMATS: dict[str, Format] = {
    "torch": Format("backbone.pth", _write_torch, _open_weights),
    "safetensors": Format("backbone.safetensors", _write_safetensors, _open_weights),
    "onnx": Format("backbone.onnx", _write_onnx, _open_onnx),
    "torch_export": Format("backbone.pt2", _write_program, _open_program),
    "detectron2": Format("backbone_detectron2.pkl", _write_detectron2, _open_weights),
    "mlflow": Format("mlflow_model", _write_mlflow, _open_mlflow),
}
