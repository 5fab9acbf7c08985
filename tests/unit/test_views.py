"""The graph against torchvision, operator by operator, on the same draws: cases 15 and 26."""

import numpy as np
import pytest
from images import crops, photo, with_mean
from PIL import Image
from scipy.spatial.transform import Rotation

from dali.loader import EvalLoader, TwoViewLoader
from dali.operands import GREY, colour_maps
from dali.order import JITTER_OPS, Shard, view_params
from dali.sources import ArraySource, FolderSource
from dali.spec import JitterSpec, ViewsSpec
from dali.torchvision_reference import denormalise, reference_view

SEED, SIZE = 4, 96
PICTURES = {
    "china": photo("china"),
    "flower": photo("flower"),
    "dark": with_mean(photo("china"), 31),
    "bright": with_mean(photo("china"), 220),
}
NO_JITTER = JitterSpec(prob=0)
PLAIN = {"flip": 0, "grey": 0, "blur": (0, 0), "solarize": (0, 0), "crop_area": (1, 1), "crop_ratio": (1, 1)}


def jitter(**strengths):
    return JitterSpec(**{"prob": 1, "brightness": 0, "contrast": 0, "saturation": 0, "hue": 0, **strengths})


def errors(picture, spec, draws=6, channels=3):
    """Levels between DALI and torchvision: (views, S, S, C), for `draws` different rows of both views."""
    source = ArraySource([picture] * draws)
    with TwoViewLoader(
        source, spec, channels=channels, seed=SEED, global_batch=draws, shard=Shard(0, 1), stop_step=1
    ) as loader:
        batch = next(loader)
    found = []
    for view, tensors in enumerate((batch.y1, batch.y2)):
        for row, tensor in zip(view_params(SEED, 0, batch.indices, view, spec, channels), tensors.numpy(), strict=True):
            found.append(abs(denormalise(tensor, spec) - reference_view(picture, row, spec)))
    return np.array(found)


# (recipe, most levels of any pixel, most on average over a view). No resize in between: pictures of the view's size.
OPERATORS = {
    "nothing": ({"jitter": NO_JITTER}, 0.01, 0.001),
    "flip": ({"jitter": NO_JITTER, "flip": 1}, 0.01, 0.001),
    "brightness": ({"jitter": jitter(brightness=0.4)}, 1.01, 0.9),
    "contrast": ({"jitter": jitter(contrast=0.4)}, 1.01, 1.0),
    "saturation": ({"jitter": jitter(saturation=0.2)}, 1.01, 0.9),
    "grey": ({"jitter": NO_JITTER, "grey": 1}, 1.01, 0.1),
    "solarize": ({"jitter": NO_JITTER, "solarize": (1, 1)}, 0.01, 0.001),
}


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_agree_with_torchvision(operator, picture):
    recipe, most, average = OPERATORS[operator]
    spec = ViewsSpec(size=SIZE, **{**PLAIN, **recipe})
    square = np.ascontiguousarray(PICTURES[picture][40 : 40 + SIZE, 60 : 60 + SIZE])
    found = errors(square, spec)
    assert found.max() <= most
    assert found.mean(axis=(1, 2, 3)).max() <= average


@pytest.mark.parametrize("picture", PICTURES)
def test_extreme_factors_agree_with_torchvision(picture):
    # 0.6 and 1.4 exactly: draws seldom reach them.
    square = np.ascontiguousarray(PICTURES[picture][40 : 40 + SIZE, 60 : 60 + SIZE])
    spec = ViewsSpec(size=SIZE, **PLAIN, jitter=jitter(brightness=0.4, contrast=0.4, saturation=0.2))
    for name in ("brightness", "contrast", "saturation"):
        for factor in (0.6, 1.4):
            row = view_params(0, 0, np.arange(1), 0, spec, 3)
            row["brightness"], row["contrast"], row["saturation"] = 1, 1, 1
            row[name] = factor
            m, k = colour_maps(row, 3)
            mapped = square @ m[0].T.astype(float) + k[0].astype(float) @ square.mean(axis=(0, 1))
            error = abs(np.clip(np.round(mapped), 0, 255) - reference_view(square, row[0], spec))
            assert error.max() <= 2, (name, factor)


def test_one_map_holds_the_jitter_in_any_order():
    # Each operator on pixels, as its definition says, without rounding or clipping.
    pixels = photo("flower", 20, 15).reshape(-1, 3).astype(float)
    spec = ViewsSpec(jitter=JitterSpec(prob=1), grey=0.3)
    params = view_params(0, 0, np.arange(60), 0, spec, 3)
    assert len(np.unique(params["order"], axis=0)) > 15
    for row, m, k in zip(params, *colour_maps(params, 3), strict=True):
        stepwise = pixels
        for operator in row["order"]:
            name = JITTER_OPS[operator]
            factor = row[name]
            if name == "hue":  # red towards green
                stepwise = Rotation.from_rotvec(2 * np.pi * factor * np.full(3, 3**-0.5)).apply(stepwise)
                continue
            grey = stepwise @ GREY
            neutral = {"brightness": 0, "contrast": grey.mean(), "saturation": grey[:, None]}[name]
            stepwise = factor * stepwise + (1 - factor) * neutral
        if row["grey"]:
            stepwise = (stepwise @ GREY)[:, None]
        np.testing.assert_allclose(pixels @ m.T + k @ pixels.mean(axis=0), stepwise + 0 * pixels, atol=1e-3)


@pytest.mark.parametrize("picture", PICTURES)
def test_blur_is_pils(picture):
    spec = ViewsSpec(size=SIZE, **{**PLAIN, "blur": (1, 1)}, jitter=NO_JITTER)
    square = np.ascontiguousarray(PICTURES[picture][40 : 40 + SIZE, 60 : 60 + SIZE])
    found = errors(square, spec, draws=12)
    # PIL rounds in each of its six passes, and repeats the edge in each: six pixels at the edge differ more.
    inside = found[:, 6:-6, 6:-6]
    assert inside.max() <= 3.01 and np.percentile(inside, 99.9) <= 2.01
    assert found.mean(axis=(1, 2, 3)).max() <= 0.7 and found.max() <= 20


@pytest.mark.parametrize("picture", PICTURES)
def test_crop_and_resize_are_pils(picture):
    found = errors(PICTURES[picture], ViewsSpec(size=SIZE, **{**PLAIN, "crop_area": (0.08, 1)}, jitter=NO_JITTER))
    # Edges differ more: PIL cuts the kernel off there and DALI repeats the edge.
    assert np.percentile(found, 99.9) <= 2.01 and found.max() <= 12
    assert found.mean(axis=(1, 2, 3)).max() <= 0.3


def test_without_antialias_the_views_differ():
    recipe = {**PLAIN, "crop_area": (0.9, 1)}
    found = errors(PICTURES["china"], ViewsSpec(size=SIZE, **recipe, jitter=NO_JITTER, antialias=False))
    assert found.mean() > 1


@pytest.mark.parametrize("picture", PICTURES)
def test_hue_has_its_own_bound(picture):
    # A rotation about the grey axis is not HSV's shift: saturated pictures differ most.
    spec = ViewsSpec(size=SIZE, **PLAIN, jitter=jitter(hue=0.1))
    square = np.ascontiguousarray(PICTURES[picture][40 : 40 + SIZE, 60 : 60 + SIZE])
    assert errors(square, spec).mean() <= {"flower": 13}.get(picture, 4)


@pytest.mark.parametrize("picture", PICTURES)
def test_whole_views_without_hue(picture):
    spec = ViewsSpec(size=SIZE, jitter=JitterSpec(hue=0))
    found = errors(PICTURES[picture], spec, draws=24)
    assert found.mean() <= 2
    assert np.percentile(found, 95) <= 4


def test_one_channel_views():
    grey = np.asarray(Image.fromarray(photo("china")).convert("L"))[..., None]
    spec = ViewsSpec(size=SIZE, mean=(0.4,), std=(0.3,), jitter=JitterSpec(saturation=0, hue=0))
    found = errors(np.ascontiguousarray(grey), spec, draws=16, channels=1)
    assert found.mean() <= 2 and np.percentile(found, 95) <= 4


@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (300, 3), (2, 2)])
def test_tiny_images_work(shape):
    picture = np.ascontiguousarray(np.resize(photo("china"), (*shape, 3)))
    spec = ViewsSpec(size=SIZE, jitter=JitterSpec(hue=0))
    assert errors(picture, spec, draws=8).mean() <= 3


def test_files_and_arrays_give_the_same_views(tmp_path):
    # PNG decodes to the same pixels; the window then is computed in the graph for files, on the host for arrays.
    pictures = [*crops(11), np.full((1, 1, 3), 77, np.uint8), photo("china", 300, 3), photo("flower", 3, 300)]
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"{number:02}.png")
    spec = ViewsSpec(size=32)
    how = dict(channels=3, seed=1, global_batch=14, shard=Shard(0, 1), stop_step=4)
    with (
        TwoViewLoader(FolderSource(tmp_path), spec, **how) as files,
        TwoViewLoader(ArraySource(pictures), spec, **how) as arrays,
    ):
        for ours, theirs in zip(files, arrays, strict=True):
            assert (ours.indices == theirs.indices).all()
            assert ours.y1.equal(theirs.y1) and ours.y2.equal(theirs.y2)


@pytest.mark.parametrize(("have", "want"), [(1, 3), (3, 1)])
def test_channels_are_converted(have, want):
    picture = photo("china")[..., :have]
    spec = ViewsSpec(size=64, test_crop=1, mean=(0.5,) * want, std=(0.2,) * want)
    square = np.ascontiguousarray(picture[:64, :64])
    with EvalLoader(ArraySource([square]), spec, channels=want, batch=1, shard=Shard(0, 1)) as loader:
        image = denormalise(next(loader).images[0].numpy(), spec)
    expected = np.asarray(Image.fromarray(square[..., 0] if have == 1 else square).convert("RGB" if want == 3 else "L"))
    assert abs(image - expected.reshape(64, 64, want)).max() <= 1.01


def test_the_evaluation_view_is_torchvisions():
    import torchvision.transforms.functional as F
    from torchvision.transforms import InterpolationMode

    spec = ViewsSpec(size=96)
    for picture in (photo("china", 251, 167), photo("flower", 120, 300), photo("china", 40, 50)):
        with EvalLoader(ArraySource([picture]), spec, channels=3, batch=1, shard=Shard(0, 1)) as loader:
            image = denormalise(next(loader).images[0].numpy(), spec)
        resized = F.resize(Image.fromarray(picture), 110, InterpolationMode.BICUBIC)
        found = abs(image - np.asarray(F.center_crop(resized, 96)))
        assert found.mean() <= 0.3 and found[3:-3, 3:-3].max() <= 3


def test_the_recipe_of_the_paper_is_the_default():
    spec = ViewsSpec()
    assert (spec.size, spec.crop_area, spec.flip, spec.grey) == (224, (0.08, 1.0), 0.5, 0.2)
    assert spec.crop_ratio == pytest.approx((3 / 4, 4 / 3))
    assert (spec.blur, spec.blur_sigma, spec.solarize) == ((1.0, 0.1), (0.1, 2.0), (0.0, 0.2))
    assert spec.jitter.model_dump() == {"prob": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
