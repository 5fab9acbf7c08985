"""Backbone weights in, from the files people have, and out, with torchvision's own keys."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dali.errors import InputError
from pipeline import weight_files
from pipeline.model import Backbone, BarlowTwins

RANDOM = "none"  # model.weights: random weights, by name
CONTAINERS = ("model", "state_dict", "model_state_dict", "backbone")
HEADS = ("fc.", "classifier.", "head.", "heads.", "aux1.", "aux2.", "AuxLogits.")


class Report(NamedTuple):
    """What became of the tensors of a weights file; as a string, one line.

    Attributes:
        prefix: what stands before the backbone's own keys in the file, such as "module.backbone.".
        matched: number of backbone tensors read: every parameter and every running statistic.
        missing: norm layers' batch counters, which files of old torch versions lack.
        heads: keys of classification layers and auxiliary classifiers, left out.
        others: keys outside the backbone, such as a projector's, left out.
        summed: whether the first convolution was summed over its input channels, for a 1-channel model.
    """

    path: str
    prefix: str
    matched: int
    missing: tuple[str, ...]
    heads: tuple[str, ...]
    others: tuple[str, ...]
    summed: bool

    def __str__(self) -> str:
        line = (
            f"{self.path}: backbone tensors matched {self.matched}, missing {len(self.missing)}, unexpected 0; "
            f"left out {len(self.heads)} of heads, {len(self.others)} outside the backbone"
        )
        return f"{line}; first convolution summed to 1 channel" if self.summed else line


def named(weights: str | None) -> str:
    """`model.weights` where it must be set.

    Raises:
        InputError: it is not.
    """
    if weights is None:
        raise InputError(
            f"model.weights: is not set; write model.weights=FILE, or model.weights={RANDOM} for random features"
        )
    return weights


def load_named(backbone: Backbone, weights: str | None) -> Report | None:
    """Read what `model.weights` names, to judge a backbone or hand it over; `none` leaves it random, null is refused.

    Raises:
        InputError: nothing is named, or as `load_backbone_weights`.
    """
    weights = named(weights)
    return None if weights == RANDOM else load_backbone_weights(backbone, weights)


def load_backbone_weights(backbone: Backbone, path: str | Path) -> Report:
    """Read every tensor of the backbone from a file, in place.

    Understood are state dicts with torchvision's keys under any prefix, at the top of the file or in the usual
    containers: torchvision's files, our checkpoints, `backbone.pth` and exports, the reference's `resnet50.pth` and
    `checkpoint.pth`, solo-learn's checkpoints, and lightly's, which number the backbone's children; in every kind of
    file that `weight_files.read` knows. No code from the file is run.

    Raises:
        InputError: the file is unreadable or holds nothing of this backbone, or a tensor of the backbone is missing,
            has another shape, is not finite, or is there without a place in this backbone.
    """
    state = _find_state(weight_files.read(path), path)
    wanted = backbone.state_dict()
    prefix, sources = _locate(state, wanted, backbone)
    if not sources:
        some = ", ".join(list(state)[:3])
        raise InputError(f"{path}: nothing of this backbone is in it (it has {some}, ...); check model.backbone")
    found = {key: state[source] for key, source in sources.items()}
    summed = _sum_input_channels(found, wanted, f"{backbone.first_conv_name}.weight")

    rest = state.keys() - set(sources.values())
    heads = tuple(sorted(key for key in rest if key.startswith(prefix) and key.removeprefix(prefix).startswith(HEADS)))
    others = tuple(sorted(key for key in rest if not key.startswith(prefix)))
    missing = tuple(key for key in wanted if key not in found)
    _check(
        path,
        missing=[key for key in missing if not key.endswith(".num_batches_tracked")],
        extra=sorted(rest - set(heads) - set(others)),
        misshapen=[
            f"{key} {tuple(found[key].shape)} instead of {tuple(wanted[key].shape)}"
            for key in found
            if found[key].shape != wanted[key].shape
        ],
        num_matched=len(found),
    )
    spoilt = [key for key, tensor in found.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if spoilt:
        raise InputError(
            f"{path}: {len(spoilt)} tensors hold values that are not finite: {spoilt[0]}; take other weights"
        )
    backbone.load_state_dict(found, strict=False)
    return Report(str(path), prefix, len(found), missing, heads, others, summed)


def backbone_state(model: BarlowTwins) -> dict[str, Tensor]:
    """`backbone_tensors` of the model's backbone."""
    return backbone_tensors(model.backbone)


def backbone_tensors(backbone: Backbone) -> dict[str, Tensor]:
    """Copies of the backbone's tensors on the CPU, under torchvision's keys, in plain memory order."""
    state = backbone.state_dict()
    return {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in state.items()}


def _find_state(content: Any, path: str | Path) -> dict[str, Tensor]:
    """The state dict in a file's content, through any containers around it."""
    while isinstance(content, dict):
        inner = next((content[key] for key in CONTAINERS if isinstance(content.get(key), dict)), None)
        if inner is None:
            state = {key: value for key, value in content.items() if isinstance(value, Tensor)}
            if state:
                return state
        content = inner
    raise InputError(f"{path}: holds no state dict, at the top or under {', '.join(CONTAINERS)}; check model.weights")


def _locate(state: dict[str, Tensor], wanted: dict[str, Tensor], backbone: Backbone) -> tuple[str, dict[str, str]]:
    """The prefix under which most of the backbone's keys stand in the file, and each key's name there."""
    numbers = {name: str(number) for number, (name, _) in enumerate(backbone.named_children())}
    numbered = {}
    for key in wanted:
        child, _, tail = key.partition(".")
        numbered[f"{numbers.get(child, child)}.{tail}"] = key  # nn.Sequential(*backbone.children())
    prefix, found = _best_prefix(state, {key: key for key in wanted})
    numbered_prefix, numbered_found = _best_prefix(state, numbered)
    # Other networks' layers have numbers too, of which fewer than half are no match; and numbered blocks end in the
    # names of the root: `4.0.conv1.weight` in `conv1.weight`.
    if len(numbered_found) > len(found) and len(numbered_found) >= len(wanted) // 2:
        return numbered_prefix, numbered_found
    return prefix, found


def _best_prefix(state: dict[str, Tensor], names: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The prefix under which most of `names` stand in the file; for the key that each is of, the key there."""
    counts: Counter[str] = Counter()
    for key in state:
        parts = key.split(".")
        for cut in range(len(parts)):
            if ".".join(parts[cut:]) in names:
                counts["".join(f"{part}." for part in parts[:cut])] += 1
    # Of equals the shortest: `backbone.` before `momentum_backbone.`.
    prefix = min(counts, key=lambda p: (-counts[p], len(p)), default="")
    return prefix, {names[name]: prefix + name for name in names if prefix + name in state}


def _sum_input_channels(found: dict[str, Tensor], wanted: dict[str, Tensor], key: str) -> bool:
    """Fit a 3-channel first convolution to a 1-channel model, as if its image stood in all three channels."""
    if key not in found or wanted[key].shape[1] != 1 or found[key].ndim != 4 or found[key].shape[1] != 3:
        return False
    found[key] = found[key].sum(1, keepdim=True)
    return True


def _check(path: str | Path, missing: list[str], extra: list[str], misshapen: list[str], num_matched: int) -> None:
    faults = {"missing": missing, "of another shape": misshapen, "unexpected": extra}
    if any(faults.values()):
        told = "; ".join(
            f"{len(keys)} {fault}: {keys[0]}{', ...' if len(keys) > 1 else ''}"
            for fault, keys in faults.items()
            if keys
        )
        raise InputError(
            f"{path}: {num_matched - len(misshapen)} tensors match, {told}; "
            "check model.backbone, model.stem and, for a ViT, views.size"
        )
