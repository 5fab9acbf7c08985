"""Weights files of every layout people have: read whole, or refused in one line that says what is wrong."""

import argparse
import collections
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dali.errors import InputError
from pipeline.config import ModelSection
from pipeline.model import build_backbone, build_model
from pipeline.weight_files import from_detectron2, to_detectron2
from pipeline.weights import backbone_state, load_backbone_weights, load_named


def fresh(seed: int, name: str = "squeezenet1_1", **options):
    torch.manual_seed(seed)
    return build_backbone(name, image_size=64, **options)


@pytest.fixture(scope="module")
def source() -> dict[str, torch.Tensor]:
    """Tensors of a small backbone with norm layers, as torchvision would save them."""
    state = fresh(1, "convnet4").state_dict()
    return {key: t + torch.rand(t.shape) if t.is_floating_point() else t + 3 for key, t in state.items()}


def exclude_bias_and_norm(p):
    """The reference's checkpoint holds a function of this name in its optimizer's groups."""
    return p.ndim == 1


def under(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + key: tensor for key, tensor in state.items()}


PROJECTOR = {"projector.0.weight": torch.zeros(2, 2), "projector.1.weight": torch.zeros(2)}
HEAD = {"fc.weight": torch.zeros(10, 256), "fc.bias": torch.zeros(10)}


def layout(name: str, state: dict[str, torch.Tensor]) -> object:
    """The content of a weights file as the tool of that name writes it."""
    momentum = under("momentum_", under("backbone.", {k: t * 0 for k, t in state.items()}))
    groups = [{"params": [0], "weight_decay_filter": exclude_bias_and_norm}]
    children = {"blocks": "0", "avgpool": "1", "fc": "2"}
    numbered = {f"{children[key.split('.')[0]]}.{key.partition('.')[2]}": t for key, t in state.items()}
    return {
        "torchvision": state | HEAD,
        "resnet50.pth of the reference": collections.OrderedDict(state),
        "checkpoint.pth of the reference": {
            "epoch": 3,
            "model": under("module.backbone.", state) | under("module.", PROJECTOR),
            "optimizer": {"state": {}, "param_groups": groups},
        },
        "ours": {"step": 7, "format": 1, "model": under("backbone.", state) | PROJECTOR, "seed": torch.zeros(3)},
        "data parallel": {"state_dict": under("module.", state | HEAD)},
        "solo-learn": {
            "state_dict": momentum | under("backbone.", state) | PROJECTOR | {"classifier.weight": torch.zeros(3, 3)},
            "hyper_parameters": argparse.Namespace(lr=0.3, names=["a"]),
        },
        "lightly": {
            "state_dict": under("backbone.", numbered) | {"projection_head.layers.0.weight": torch.zeros(2, 2)}
        },
        "a container in a container": {"model": {"backbone": state}},
    }[name]


@pytest.mark.parametrize(
    ("name", "prefix", "heads", "others"),
    [
        ("torchvision", "", 2, 0),
        ("resnet50.pth of the reference", "", 0, 0),
        ("checkpoint.pth of the reference", "module.backbone.", 0, 2),
        ("ours", "backbone.", 0, 2),
        ("data parallel", "module.", 2, 0),
        ("solo-learn", "backbone.", 0, 27),
        ("lightly", "backbone.", 0, 1),
        ("a container in a container", "", 0, 0),
    ],
)
def test_every_layout_gives_the_same_backbone(name, prefix, heads, others, source, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(layout(name, source), path)
    backbone = fresh(2, "convnet4")
    report = load_backbone_weights(backbone, path)
    assert all(torch.equal(tensor, source[key]) for key, tensor in backbone.state_dict().items())
    assert (report.prefix, report.matched, report.missing) == (prefix, 24, ())
    assert (len(report.heads), len(report.others)) == (heads, others)
    assert str(report) == (
        f"{path}: backbone tensors matched 24, missing 0, unexpected 0; "
        f"left out {heads} of heads, {others} outside the backbone"
    )


def test_a_full_resnet50_of_the_reference_is_read(tmp_path):
    source = fresh(1, "resnet50").state_dict()
    torch.save({"model": under("module.backbone.", source) | under("module.", PROJECTOR)}, tmp_path / "checkpoint.pth")
    backbone = fresh(2, "resnet50")
    assert load_backbone_weights(backbone, tmp_path / "checkpoint.pth").matched == len(source) == 318
    assert torch.equal(backbone.layer4[2].conv3.weight, source["layer4.2.conv3.weight"])


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg11_bn"])
def test_numbered_children_are_read_though_names_in_blocks_are_the_root_s(name, tmp_path):
    first, second = fresh(1, name), fresh(2, name)
    source = first.state_dict()
    numbers = {child: str(number) for number, (child, _) in enumerate(first.named_children())}
    numbered = {f"backbone.{numbers[key.split('.')[0]]}.{key.partition('.')[2]}": t for key, t in source.items()}
    torch.save({"state_dict": numbered | PROJECTOR}, tmp_path / "lightly.ckpt")
    report = load_backbone_weights(second, tmp_path / "lightly.ckpt")
    assert (report.prefix, report.matched, report.missing) == ("backbone.", len(source), ())
    assert all(torch.equal(tensor, source[key]) for key, tensor in second.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(value, source, tmp_path):
    spoilt = {key: tensor.clone() for key, tensor in source.items()}
    key = next(reversed([key for key, tensor in spoilt.items() if tensor.is_floating_point()]))
    spoilt[key].view(-1)[-1] = value
    torch.save(spoilt, tmp_path / "weights.pth")
    backbone = fresh(2, "convnet4")
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    with pytest.raises(InputError, match=f"1 tensors hold values that are not finite: {key}"):
        load_backbone_weights(backbone, tmp_path / "weights.pth")
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


def test_safetensors_are_read_under_any_prefix(source, tmp_path):
    save_file(under("backbone.", source) | HEAD, tmp_path / "weights.safetensors")
    backbone = fresh(2, "convnet4")
    report = load_backbone_weights(backbone, tmp_path / "weights.safetensors")
    assert all(torch.equal(tensor, source[key]) for key, tensor in backbone.state_dict().items())
    assert (report.prefix, report.matched, len(report.others)) == ("backbone.", 24, 2)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("conv1.weight", "stem.conv1.weight"),
        ("bn1.running_var", "stem.conv1.norm.running_var"),
        ("layer1.0.conv3.weight", "res2.0.conv3.weight"),
        ("layer4.2.bn2.bias", "res5.2.conv2.norm.bias"),
        ("layer3.0.downsample.0.weight", "res4.0.shortcut.weight"),
        ("layer2.0.downsample.1.running_mean", "res3.0.shortcut.norm.running_mean"),
    ],
)
def test_detectron2s_names_go_both_ways(ours, theirs):
    assert to_detectron2(ours) == theirs
    assert from_detectron2(theirs) == ours
    assert from_detectron2(f"backbone.bottom_up.{theirs}") == f"backbone.bottom_up.{ours}"


def test_detectron2s_pickles_are_read(tmp_path):
    source = {key: t for key, t in fresh(1, "resnet50").state_dict().items() if "num_batches" not in key}
    model = {f"backbone.bottom_up.{to_detectron2(key)}": tensor.numpy() for key, tensor in source.items()}
    content = {"model": model | {"proposal_generator.x.weight": np.zeros(3)}, "__author__": "somebody"}
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(content))
    backbone = fresh(2, "resnet50")
    report = load_backbone_weights(backbone, tmp_path / "model.pkl")
    assert (report.prefix, report.matched, len(report.missing)) == ("backbone.bottom_up.", 265, 53)
    assert all(torch.equal(backbone.state_dict()[key], tensor) for key, tensor in source.items())


def test_random_weights_come_by_name_alone(source, tmp_path):
    backbone = fresh(2, "convnet4")
    before = {key: tensor.clone() for key, tensor in backbone.state_dict().items()}
    with pytest.raises(InputError, match="model.weights: is not set; write .*model.weights=none for random features"):
        load_named(backbone, None)
    assert load_named(backbone, "none") is None
    assert all(torch.equal(tensor, before[key]) for key, tensor in backbone.state_dict().items())
    torch.save(source, tmp_path / "weights.pth")
    report = load_named(backbone, str(tmp_path / "weights.pth"))
    assert report is not None and report.matched == 24


def test_batch_counters_of_old_files_may_be_absent(source, tmp_path):
    old = {key: tensor for key, tensor in source.items() if not key.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "old.pth")
    report = load_backbone_weights(fresh(2, "convnet4"), tmp_path / "old.pth")
    assert (report.matched, len(report.missing)) == (20, 4)


def test_a_three_channel_file_is_summed_for_a_one_channel_model(source, tmp_path):
    torch.save(source, tmp_path / "rgb.pth")
    backbone = fresh(2, "convnet4", in_channels=1)
    report = load_backbone_weights(backbone, tmp_path / "rgb.pth")
    torch.testing.assert_close(backbone.blocks[0][0].weight, source["blocks.0.0.weight"].sum(1, keepdim=True))
    assert report.summed and str(report).endswith("first convolution summed to 1 channel")


def refusal(path, backbone) -> str:
    before = {key: tensor.clone() for key, tensor in backbone.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_backbone_weights(backbone, path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert all(torch.equal(tensor, before[key]) for key, tensor in backbone.state_dict().items())
    return message.removeprefix(f"{path}: ")


def test_a_missing_tensor_is_named(source, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(under("module.", {key: t for key, t in source.items() if key != "blocks.2.0.weight"}), path)
    assert refusal(path, fresh(2, "convnet4")).startswith("23 tensors match, 1 missing: blocks.2.0.weight; check")


def test_a_wrong_shape_is_named(source, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(source | {"blocks.1.0.weight": torch.zeros(64, 32, 5, 5)}, path)
    message = refusal(path, fresh(2, "convnet4"))
    assert "1 of another shape: blocks.1.0.weight (64, 32, 5, 5) instead of (64, 32, 3, 3)" in message


def test_an_extra_tensor_is_named(source, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(under("backbone.", source | {"blocks.4.0.weight": torch.zeros(2)}), path)
    assert "24 tensors match, 1 unexpected: backbone.blocks.4.0.weight;" in refusal(path, fresh(2, "convnet4"))


def test_a_deeper_network_is_not_read_as_a_shallow_one(tmp_path):
    """All of ResNet-18's keys and shapes are in ResNet-34."""
    path = tmp_path / "resnet34.pth"
    torch.save(fresh(1, "resnet34").state_dict(), path)
    message = refusal(path, fresh(2, "resnet18"))
    assert message.startswith("120 tensors match, 96 unexpected: layer1.2.bn1.bias, ...; check model.backbone")


def test_another_architecture_is_refused(source, tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(under("backbone.", source), path)
    message = refusal(path, fresh(2))
    assert message.startswith("nothing of this backbone is in it (it has backbone.blocks.0.0.weight")


@pytest.mark.parametrize("content", ["text", "empty", "cut", "number", "no state", "pickle"])
def test_what_is_no_weights_file_is_refused(content, source, tmp_path):
    path = tmp_path / "weights.pth"
    if content == "text":
        path.write_text("weights\n" * 100)
    elif content == "empty":
        path.write_bytes(b"")
    elif content == "pickle":
        path.write_bytes(pickle.dumps(nn.Linear(2, 2), protocol=2))
    else:
        torch.save({"cut": source, "number": 3, "no state": {"epoch": 3, "model": {}}}[content], path)
    if content == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    expected = "holds no state dict" if content in ("number", "no state") else "is damaged or no PyTorch weights file"
    assert refusal(path, fresh(2)).startswith(expected)


@pytest.mark.parametrize("suffix", [".safetensors", ".onnx", ".pt2", ".pkl"])
def test_damaged_files_of_other_kinds_are_refused(suffix, tmp_path):
    path = tmp_path / f"weights{suffix}"
    path.write_text("weights\n" * 100)
    assert refusal(path, fresh(2)).startswith(f"is damaged or no {suffix} file of weights (")


@pytest.mark.parametrize("kind", ["absent", "folder"])
def test_what_cannot_be_read_is_refused(kind, tmp_path):
    path = tmp_path if kind == "folder" else tmp_path / "absent.pth"
    assert refusal(path, fresh(2)).startswith("cannot be read (")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("malicious-folder",)


@pytest.mark.parametrize("suffix", [".pth", ".pkl"])
def test_code_in_the_file_is_not_run(suffix, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"model": source, "x": Malicious()}, path)
    else:
        path.write_bytes(pickle.dumps({"model": {k: t.numpy() for k, t in source.items()}, "x": Malicious()}))
    backbone = fresh(2, "convnet4")
    try:
        load_backbone_weights(backbone, path)
    except InputError:
        pass
    assert not (tmp_path / "malicious-folder").exists()


def test_backbone_state_is_plain_and_reads_back(tmp_path):
    model = build_model(ModelSection(backbone="convnet4", projector=(8,)), 3, 32, seed=0)
    model.to(memory_format=torch.channels_last)
    state = backbone_state(model)
    assert state.keys() == build_backbone("convnet4").state_dict().keys()
    assert all(tensor.is_contiguous() for tensor in state.values())
    with torch.no_grad():
        model.backbone.blocks[0][0].weight.add_(1)
    assert not torch.equal(state["blocks.0.0.weight"], model.backbone.blocks[0][0].weight)
    torch.save(state, tmp_path / "backbone.pth")
    other = fresh(3, "convnet4")
    load_backbone_weights(other, tmp_path / "backbone.pth")
    assert all(torch.equal(tensor, state[key]) for key, tensor in other.state_dict().items())
