"""Backbones by name, without their classification heads, and the Barlow Twins model around one."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.maxvit import MaxVit
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer
from torchvision.ops import StochasticDepth

from dali.errors import InputError
from pipeline.config import ModelSection

# Families whose time goes to depthwise or grouped convolutions, for which oneDNN's bf16 was slower than float32 on
# CPUs (seen for MobileNets and ShuffleNet; the others by kinship, to be measured with `bench_autocast`).
SLOWER_IN_BF16_ON_CPU = ("mobilenet", "shufflenet", "efficientnet", "mnasnet", "regnet", "convnext")


class Backbone(nn.Module):
    """Maps views (N, C, H, W) to features (N, feature_dim).

    torchvision's models are cast to this type, not wrapped: their state-dict keys stay torchvision's, less the head's.

    Attributes:
        feature_dim: width of the features.
        head_name: dotted name of the classification layer, now an identity ("fc" in a ResNet).
        first_conv_name: dotted name of the convolution that sees the image.
    """

    feature_dim: int
    head_name: str
    first_conv_name: str


class ConvNet4(Backbone):
    """Four 3x3 conv-BN-ReLU blocks of 32, 64, 128, 256 channels, stride 2 from the second, and global average pooling.

    For images up to 64 px, and for CPUs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(_conv_block(*sizes) for sizes in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2)))
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc: nn.Module = nn.Linear(256, 1000)

    def forward(self, y: Tensor) -> Tensor:
        return self.fc(self.avgpool(self.blocks(y)).flatten(1))


def _conv_block(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True))


class BarlowTwins(nn.Module):
    """Backbone and projector: views (N, C, H, W) to embeddings (N, D). The loss holds no parameters."""

    def __init__(self, backbone: Backbone, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = build_projector(backbone.feature_dim, widths)

    def forward(self, y: Tensor) -> Tensor:
        return self.projector(self.backbone(y))


def build_projector(feature_dim: int, widths: tuple[int, ...]) -> nn.Sequential:
    """Linear-BN-ReLU for each width but the last, which is a bare Linear; no biases (arXiv:2103.03230, section 2.2)."""
    layers: list[nn.Module] = []
    for width in widths[:-1]:
        layers += [nn.Linear(feature_dim, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(inplace=True)]
        feature_dim = width
    return nn.Sequential(*layers, nn.Linear(feature_dim, widths[-1], bias=False))


def build_model(section: ModelSection, in_channels: int, image_size: int, seed: int) -> BarlowTwins:
    """Make the model with weights that follow from `seed`, on the CPU in float32; the same on every worker.

    `section.weights` is not read here: see `weights.load_backbone_weights`.

    Raises:
        InputError: as `build_backbone`.
    """
    with _seeded(seed):
        return BarlowTwins(_checked_backbone(section, in_channels, image_size), section.projector)


def build_seeded_backbone(section: ModelSection, in_channels: int, image_size: int, seed: int) -> Backbone:
    """The backbone that `build_model` makes, alone."""
    with _seeded(seed):
        return _checked_backbone(section, in_channels, image_size)


def _checked_backbone(section: ModelSection, in_channels: int, image_size: int) -> Backbone:
    backbone = build_backbone(
        section.backbone, section.stem, in_channels, section.zero_init_residual, image_size=image_size
    )
    check_image_size(backbone, section.backbone, in_channels, image_size)
    return backbone


def check_image_size(backbone: Backbone, name: str, in_channels: int, image_size: int) -> None:
    """Refuse views too small for the backbone, by a forward pass on copies of its tensors without data.

    Raises:
        InputError: naming the size and torch's reason.
    """
    without_data = {key: tensor.to("meta") for key, tensor in backbone.state_dict(keep_vars=True).items()}
    views = torch.empty(2, in_channels, image_size, image_size, device="meta")
    try:
        with torch.no_grad():
            features = torch.func.functional_call(backbone, without_data, (views,))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise _wrong_size(name, image_size, error) from None
    assert features.shape == (2, backbone.feature_dim), (name, features.shape)


def backbone_names() -> list[str]:
    """All names that `model.backbone` takes."""
    return [*torchvision.models.list_models(module=torchvision.models), "convnet4"]


def build_backbone(
    name: str,
    stem: str = "imagenet",
    in_channels: int = 3,
    zero_init_residual: bool = False,
    image_size: int = 224,
) -> Backbone:
    """Make a backbone with random weights: the model of that name, its last layer replaced by the identity.

    Auxiliary classifiers are left out. Dropout and stochastic depth are off: their draws would depend on how the batch
    is divided among the workers. A model with one input channel equals the one with three on three equal channels.

    Args:
        stem: "small" makes the first convolution 3x3 without stride and drops the max-pool after it.
        image_size: height and width of the views, in pixels; ViT's and MaxViT's parameters depend on it.

    Raises:
        InputError: unknown name, an option without effect on this model, or a size that ViT or MaxViT cannot take.
    """
    model = _construct(name, image_size)
    if zero_init_residual:
        _zero_init_residual(model, name)
    model.first_conv_name = _last_name(model, first=True)
    if stem == "small":
        _make_stem_small(model, name)
    if in_channels != 3:
        _sum_input_channels(model, in_channels)
    for module in model.modules():
        if isinstance(module, nn.Dropout | StochasticDepth):
            module.p = 0.0
    model.head_name = _last_name(model)
    head = model.get_submodule(model.head_name)
    model.feature_dim = cast(int, head.in_channels if isinstance(head, nn.Conv2d) else head.in_features)
    model.set_submodule(model.head_name, nn.Identity())
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw weights from `seed`, and leave the process's own generators as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs' generators as well
        yield


def _construct(name: str, image_size: int) -> Backbone:
    """The classification model of that name, in training mode."""
    if name == "convnet4":
        return ConvNet4()
    if name not in backbone_names():
        near = difflib.get_close_matches(name, backbone_names(), n=3)
        remedy = f"did you mean {', '.join(near)}?" if near else "for example resnet18, resnet50, vit_b_16, convnet4"
        raise InputError(f"model.backbone: {name!r} is no torchvision classification model; {remedy}")
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": image_size}
    elif name.startswith("maxvit"):
        options = {"input_size": (image_size, image_size)}
    try:
        return cast(Backbone, torchvision.models.get_model(name, weights=None, **options))
    except (ValueError, AssertionError) as error:
        raise _wrong_size(name, image_size, error) from None


def _wrong_size(name: str, image_size: int, error: Exception) -> InputError:
    reason = " ".join(str(error).split()).split(". ")[0]
    return InputError(f"views.size: {image_size} px does not fit model.backbone={name} ({reason}); 224 does")


def _zero_init_residual(model: nn.Module, name: str) -> None:
    last_norms = [m.bn3 for m in model.modules() if isinstance(m, Bottleneck)]
    last_norms += [m.bn2 for m in model.modules() if isinstance(m, BasicBlock)]
    if not last_norms:
        raise InputError(f"model.zero_init_residual: true has no effect on {name}; remove it (ResNets have it)")
    for norm in last_norms:
        nn.init.zeros_(norm.weight)


def _last_name(model: nn.Module, first: bool = False) -> str:
    """Name of the last layer with a weight matrix, which makes the class scores, or of the first convolution."""
    kinds = nn.Conv2d if first else (nn.Conv2d, nn.Linear)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return names[0 if first else -1]


def _make_stem_small(model: Backbone, name: str) -> None:
    conv = cast(nn.Conv2d, model.get_submodule(model.first_conv_name))
    if isinstance(model, VisionTransformer | SwinTransformer | MaxVit) or conv.stride == (1, 1):
        raise InputError(
            f"model.stem: small has no meaning for {name}, which has no strided convolution to replace; write "
            "stem: imagenet (small exists for ResNets, DenseNets, ConvNeXt, RegNets, MobileNets, EfficientNets and "
            "others that start with one)"
        )
    small = nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding=1, bias=conv.bias is not None)
    nn.init.kaiming_normal_(small.weight, mode="fan_out", nonlinearity="relu")
    model.set_submodule(model.first_conv_name, small)
    for pool_name, module in model.named_modules():
        if isinstance(module, nn.MaxPool2d):
            model.set_submodule(pool_name, nn.Identity())
            return


def _sum_input_channels(model: Backbone, in_channels: int) -> None:
    assert in_channels == 1, in_channels
    conv = cast(nn.Conv2d, model.get_submodule(model.first_conv_name))
    conv.in_channels = 1
    conv.weight = nn.Parameter(conv.weight.detach().sum(1, keepdim=True))


def autocast_dtype(setting: str, backbone: str, device: torch.device | str) -> torch.dtype | None:
    """The type of autocast for `precision.autocast`, or None for off.

    `auto` is bf16 where it was measured to be faster (`./run.sh bench autocast`): on GPUs that have it, and on CPUs
    with AMX for backbones made of dense convolutions. CPUs differ between hosts, so one worker must decide for all.
    """
    if setting != "auto":
        return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[setting]
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    # AVX-512's bf16 alone is slower than float32 for every backbone measured; without it oneDNN converts back and forth
    if backbone.startswith(SLOWER_IN_BF16_ON_CPU) or not torch.cpu._is_amx_tile_supported():
        return None
    return torch.bfloat16
