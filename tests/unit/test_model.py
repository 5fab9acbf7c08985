"""Backbones by name: features, keys, options and errors; the Barlow Twins model around them."""

import itertools

import pytest
import torch
import torchvision
from torch import nn
from torch.overrides import TorchFunctionMode
from torchvision.models import resnet

from dali.errors import InputError
from pipeline.bench_autocast import measure_autocast
from pipeline.config import ModelSection
from pipeline.model import (
    BarlowTwins,
    autocast_dtype,
    backbone_names,
    build_backbone,
    build_model,
    build_projector,
    check_image_size,
)

# One of each family, the smallest, with a size of views that it takes.
FAMILIES = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "densenet121": 32,
    "efficientnet_b0": 32,
    "googlenet": 32,
    "inception_v3": 75,
    "maxvit_t": 224,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "regnet_x_400mf": 32,
    "regnet_y_400mf": 32,
    "resnet18": 32,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin_t": 32,
    "swin_v2_t": 32,
    "vgg11": 32,
    "vit_b_32": 64,
}
WITHOUT_SMALL_STEM = ("maxvit_t", "swin_t", "swin_v2_t", "vgg11", "vit_b_32", "convnet4")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors here are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class WithoutData(TorchFunctionMode):
    """Weights have a shape and no values (device "meta") or are zero, so that the largest model is built in a moment.

    Not `torch.device("meta")`: RegNet and Swin compute with the values of other tensors while they are built.
    """

    fills = {
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
        torch.Tensor.fill_,
        torch.Tensor.zero_,
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.constant_,
        nn.init.trunc_normal_,
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
    }

    def __init__(self, device="meta"):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in self.fills:
            return args[0] if args else kwargs["tensor"]
        if func in (torch.empty, torch.zeros, torch.ones):
            kwargs["device"] = kwargs.get("device") or self.device
            func = torch.zeros
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", backbone_names())
def test_every_torchvision_classifier_loses_its_head_and_nothing_else(name):
    with WithoutData():
        backbone = build_backbone(name)
    assert isinstance(backbone.get_submodule(backbone.head_name), nn.Identity)
    assert backbone.feature_dim >= 64 and backbone.feature_dim != 1000
    assert not any(key.startswith((f"{backbone.head_name}.", "aux", "Aux")) for key in backbone.state_dict())
    outputs = [m.out_features for m in backbone.modules() if isinstance(m, nn.Linear)]
    assert 1000 not in outputs, "a layer of class scores is still there"


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_are_torchvisions_without_the_head(name):
    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    with WithoutData():
        theirs = torchvision.models.get_model(name, **options).state_dict()
        backbone = build_backbone(name)
    ours = backbone.state_dict()
    head = {key: tensor for key, tensor in theirs.items() if key.startswith(f"{backbone.head_name}.")}
    assert {len(tensor) for tensor in head.values()} == {1000}
    assert {key: t.shape for key, t in ours.items()} == {k: t.shape for k, t in theirs.items() if k not in head}


class Draws(TorchFunctionMode):
    """Counts calls that draw random numbers."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5) if func is nn.functional.dropout else 0
        attention = kwargs.get("dropout_p", 0)
        self.count += bool(probability or attention or func is torch.Tensor.bernoulli_)
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", [*FAMILIES, "convnet4"])
def test_training_mode_gives_features_alone_draws_nothing_and_reaches_every_parameter(name):
    """A random draw in the model would depend on how the batch is divided among the workers."""
    size = FAMILIES.get(name, 32)
    with WithoutData("cpu"):
        model = BarlowTwins(build_backbone(name, in_channels=1, image_size=size), (16, 8))
    with Draws() as draws:
        z = model(torch.zeros(2, 1, size, size))  # the projector's width is feature_dim
    assert z.shape == (2, 8) and draws.count == 0
    z.sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", ["convnet4", "squeezenet1_1"])
def test_a_real_step_is_finite(name):
    model = build_model(ModelSection(backbone=name, projector=(16, 8)), 3, 32, seed=0)
    z = model(torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    z.square().sum().backward()
    assert torch.isfinite(z).all() and z.std() > 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_convnet4_is_what_the_docs_say():
    backbone = build_backbone("convnet4", in_channels=1)
    convolutions = [m for m in backbone.modules() if isinstance(m, nn.Conv2d)]
    assert [(m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0]) for m in convolutions] == [
        (1, 32, 3, 1),
        (32, 64, 3, 2),
        (64, 128, 3, 2),
        (128, 256, 3, 2),
    ]
    assert backbone.feature_dim == 256
    assert sum(p.numel() for p in backbone.parameters()) == 9 * (32 + 32 * 64 + 64 * 128 + 128 * 256) + 2 * 480


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in WITHOUT_SMALL_STEM])
def test_small_stem_keeps_the_resolution(name):
    with WithoutData("cpu"):
        backbone = build_backbone(name, stem="small", image_size=32)
    with WithoutData():
        plain = build_backbone(name)
    conv = backbone.get_submodule(backbone.first_conv_name)
    assert (conv.kernel_size, conv.stride, conv.padding) == ((3, 3), (1, 1), (1, 1))
    pools = [sum(isinstance(m, nn.MaxPool2d) for m in net.modules()) for net in (backbone, plain)]
    assert pools[0] == max(pools[1] - 1, 0)
    assert backbone.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        assert backbone(torch.zeros(2, 3, 32, 32)).shape == (2, backbone.feature_dim)


def test_small_stem_of_resnet_sees_32_pixels_as_32():
    with WithoutData():
        backbone = build_backbone("resnet18", stem="small").to("meta")
    shapes = []
    backbone.layer1.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    backbone(torch.zeros(2, 3, 32, 32, device="meta"))
    assert shapes == [(2, 64, 32, 32)]


@pytest.mark.parametrize("name", WITHOUT_SMALL_STEM)
def test_small_stem_is_refused_where_there_is_none(name):
    with WithoutData(), pytest.raises(InputError, match=f"model.stem: small has no meaning for {name}"):
        build_backbone(name, stem="small", image_size=FAMILIES.get(name, 32))


@pytest.mark.parametrize("name", ["squeezenet1_1", "convnet4"])
def test_one_channel_equals_three_equal_channels(name):
    grey = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(1))
    features = []
    for channels in (1, 3):
        torch.manual_seed(5)
        backbone = build_backbone(name, in_channels=channels, image_size=64).eval()
        features.append(backbone(grey.expand(2, channels, 64, 64)))
    torch.testing.assert_close(features[0], features[1], rtol=1e-4, atol=1e-5)


def test_zero_init_residual():
    backbone = build_backbone("resnet50", zero_init_residual=True)
    ends = [m.bn3.weight for m in backbone.modules() if isinstance(m, resnet.Bottleneck)]
    assert len(ends) == 16 and not any(weight.any() for weight in ends)
    others = [m.bn2.weight for m in backbone.modules() if isinstance(m, resnet.Bottleneck)]
    assert all(weight.all() for weight in others)
    with WithoutData(), pytest.raises(InputError, match="model.zero_init_residual: true has no effect on densenet121"):
        build_backbone("densenet121", zero_init_residual=True)


@pytest.mark.parametrize(("name", "near"), [("resnet5O", "resnet50"), ("convnet", "convnet4"), ("xyz", "for example")])
def test_unknown_names_are_refused_with_near_ones(name, near):
    with pytest.raises(InputError, match=f"model.backbone: '{name}' is no .*{near}"):
        build_backbone(name)


def test_sizes_that_fit_pass_and_leave_the_model_as_it_was():
    model = build_model(ModelSection(backbone="convnet4", projector=(8,)), 3, 8, seed=0)  # it asks check_image_size
    assert model.backbone.training
    assert not any(int(count) for key, count in model.state_dict().items() if key.endswith("num_batches_tracked"))


@pytest.mark.parametrize(("name", "size"), [("vit_b_16", 100), ("maxvit_t", 96), ("inception_v3", 32), ("alexnet", 32)])
def test_sizes_that_do_not_fit_are_refused(name, size):
    with WithoutData(), pytest.raises(InputError, match=f"views.size: {size} px does not fit model.backbone={name}"):
        check_image_size(build_backbone(name, image_size=size), name, 3, size)


def test_weights_follow_from_the_seed_alone():
    section = ModelSection(backbone="convnet4", projector=(32, 16))
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = build_model(section, 1, 32, seed=7).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(12)
    second = build_model(section, 1, 32, seed=7).state_dict()
    other = build_model(section, 1, 32, seed=8).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["backbone.blocks.0.0.weight"], other["backbone.blocks.0.0.weight"])
    assert not torch.equal(first["projector.0.weight"], other["projector.0.weight"])


def test_training_mode_repeats_itself():
    backbone = build_backbone("squeezenet1_1").train()  # it has a dropout layer
    views = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(backbone(views), backbone(views))


@pytest.mark.parametrize(("widths", "kinds"), [((8,), "L"), ((16, 8), "LBRL"), ((16, 24, 8), "LBRLBRL")])
def test_projector_is_the_papers(widths, kinds):
    projector = build_projector(12, widths)
    assert "".join({nn.Linear: "L", nn.BatchNorm1d: "B", nn.ReLU: "R"}[type(m)] for m in projector) == kinds
    linears = [m for m in projector if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in linears] == list(itertools.pairwise((12, *widths)))
    assert all(m.bias is None for m in linears)


def test_model_is_the_projector_after_the_backbone():
    model = build_model(ModelSection(backbone="convnet4", projector=(32, 8)), 1, 28, seed=0).eval()
    y = torch.rand(5, 1, 28, 28)
    assert isinstance(model, BarlowTwins)
    assert torch.equal(model(y), model.projector(model.backbone(y)))


def test_autocast_choice(monkeypatch):
    assert autocast_dtype("off", "resnet50", "cpu") is None
    assert autocast_dtype("bf16", "mobilenet_v2", "cpu") is torch.bfloat16
    assert autocast_dtype("fp16", "resnet50", "cpu") is torch.float16
    assert autocast_dtype("auto", "mobilenet_v3_small", "cpu") is None
    for amx, auto in ((True, torch.bfloat16), (False, None)):  # AVX-512's bf16 alone is slower than float32
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
        assert autocast_dtype("auto", "resnet50", "cpu") is auto


def test_autocast_measurement_times_both_kinds():
    (row,) = measure_autocast(["convnet4"], image_size=16, batch=4, repeats=2)
    assert row.backbone == "convnet4" and row.auto in ("off", "bf16")
    assert row.float32 > 0 and row.bf16 > 0 and row.speedup == row.float32 / row.bf16
