"""How far the loaders' views are from torchvision's on the same draws, in levels of 0 to 255: operator by operator, for
whole views, and for what lies before them, decoding and resizing.

What is compared are the loaders that train, not single operators of DALI: every row is a recipe of views with only one
thing in it. The rows that say what a difference comes from are computed in NumPy, from the maps that the loaders use.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from numpy.typing import NDArray
from PIL import Image

from dali.interface import Report, Source, silent
from dali.loader import EvalLoader, TwoViewLoader
from dali.operands import blur_kernels, colour_maps, crop_windows
from dali.order import JITTER_OPS, Shard, some_of, view_params
from dali.sources import ArraySource, FolderSource
from dali.spec import JitterSpec, ViewsSpec
from dali.torchvision_reference import (
    as_picture,
    as_pixels,
    denormalise,
    in_channels,
    normalise,
    original,
    reference_centre,
    reference_view,
)
from dali.views import resizes_as_pil
from pipeline.differences import Differences, Row
from pipeline.pictures import contact_sheet
from pipeline.samples import photographs_to_compare

Pixels = NDArray[np.uint8]  # (H, W, C)
Pictures = Mapping[str, Sequence[Pixels]]  # groups of images, by name; each is a column of the table
Files = Mapping[str, tuple[Source, NDArray[np.int64]]]  # encoded images, by the same names

SEED = 4
ALONE = Shard(0, 1)


# --- Recipes with one thing in them ---------------------------------------------------------------------------------


def nothing_but(spec: ViewsSpec, **what: Any) -> ViewsSpec:
    """The recipe with `what`, and with nothing else that changes an image of the view's size."""
    none = {
        "crop_area": (1.0, 1.0),
        "crop_ratio": (1.0, 1.0),
        "flip": 0.0,
        "jitter": JitterSpec(prob=0),
        "grey": 0.0,
        "blur": (0.0, 0.0),
        "solarize": (0.0, 0.0),
    }
    return spec.model_copy(update=none | what)


def only_jitter(spec: ViewsSpec, *names: str) -> JitterSpec:
    """Always jitter, by these operators."""
    strengths = {name: getattr(spec.jitter, name) if name in names else 0.0 for name in JITTER_OPS}
    return JitterSpec(prob=1, **strengths)


def operators(spec: ViewsSpec, channels: int) -> dict[str, ViewsSpec]:
    """Recipes of one operator each, applied to every view, of those that this recipe has."""
    colours = JITTER_OPS if channels == 3 else JITTER_OPS[:2]
    used = [name for name in colours if spec.jitter.prob > 0 and getattr(spec.jitter, name) > 0]
    recipes = {}
    if spec.flip > 0:
        recipes["flip"] = nothing_but(spec, flip=1.0)
    recipes |= {name: nothing_but(spec, jitter=only_jitter(spec, name)) for name in used}
    plain = [name for name in used if name != "hue"]
    if len(plain) > 1:
        recipes["jitter without hue"] = nothing_but(spec, jitter=only_jitter(spec, *plain))
    if len(used) > len(plain) > 0:
        recipes["jitter"] = nothing_but(spec, jitter=only_jitter(spec, *used))
    if spec.grey > 0 and channels == 3:
        recipes["grey"] = nothing_but(spec, grey=1.0)
    if max(spec.blur) > 0:
        recipes["blur"] = nothing_but(spec, blur=(1.0, 1.0))
    if max(spec.solarize) > 0:
        recipes["solarize"] = nothing_but(spec, solarize=(1.0, 1.0))
    return recipes


# --- Views of both kinds --------------------------------------------------------------------------------------------


class View(NamedTuple):
    """One view as the loader gave it, in levels (S, S, C), with the image and the draws it was made from."""

    number: int  # of the image, among those of all groups
    group: str
    image: Pixels
    params: NDArray[np.void]  # one row
    pixels: NDArray[np.float64]


def drawn_views(pictures: Pictures, spec: ViewsSpec, channels: int, draws: int) -> Iterator[View]:
    """Both views of every image in `draws` epochs, each by other draws."""
    images = [(group, image) for group, those in pictures.items() for image in those]
    source = ArraySource([image for _, image in images])
    how: dict[str, Any] = {
        "channels": channels,
        "seed": SEED,
        "global_batch": len(images),
        "shard": ALONE,
        "stop_step": draws,
    }
    with TwoViewLoader(source, spec, **how) as loader:
        for epoch, batch in enumerate(loader):
            for view, tensors in enumerate((batch.y1, batch.y2)):
                rows = view_params(SEED, epoch, batch.indices, view, spec, channels)
                for number, params, tensor in zip(batch.indices.tolist(), rows, tensors.numpy(), strict=True):
                    group, image = images[number]
                    yield View(number, group, image, params, denormalise(tensor, spec))


def compare(
    whats: Sequence[str],
    pictures: Pictures,
    views: Iterator[View],
    pairs: Callable[[View], Mapping[str, tuple[Any, Any]]],
) -> list[Row]:
    """Rows by name, of the two sorts of pixels that `pairs` gives of each view for each row."""
    rows = [Row(what, {group: Differences() for group in pictures}) for what in whats]
    for view in views:
        found = pairs(view)
        for row in rows:
            row.found[view.group].add(*found[row.what])
    return rows


def _edge(shape: tuple[int, ...], reach: Sequence[int]) -> NDArray[np.bool_]:
    """Whether a pixel of an (S, S, C) view lies within `reach` rows or columns of its edge."""
    far = [
        np.minimum(np.arange(size), np.arange(size)[::-1]) >= some for size, some in zip(shape[:2], reach, strict=True)
    ]
    return ~(far[0][:, None] & far[1])


def _split_at_edge(what: str, ours: Any, theirs: Any, edge: NDArray[np.bool_]) -> dict[str, tuple[Any, Any]]:
    return {f"{what}, inside": (ours[~edge], theirs[~edge]), f"{what}, edge": (ours[edge], theirs[edge])}


# --- The rows -------------------------------------------------------------------------------------------------------


def measure(
    pictures: Pictures, files: Files, spec: ViewsSpec, channels: int, draws: int, report: Report = silent
) -> list[Row]:
    """All rows, in the order of the table.

    `files` are the same images' encoded bytes, for the row on decoding; none where there are only arrays.
    """
    parts = list(_parts(pictures, files, spec, channels, draws))
    rows = []
    for number, part in enumerate(parts):
        report("parity", number, len(parts))
        rows += part()
    report("parity", len(parts), len(parts))
    return rows


def _parts(
    pictures: Pictures, files: Files, spec: ViewsSpec, channels: int, draws: int
) -> Iterator[Callable[[], list[Row]]]:
    """What makes the rows, one after the other, of all that this recipe has."""
    square = {group: [_of_size(image, spec.size) for image in images] for group, images in pictures.items()}
    recipes = operators(spec, channels)
    if files:
        yield partial(decoding, files, spec, channels)
    yield partial(resizing, pictures, spec, channels, draws)
    for name, recipe in recipes.items():
        yield partial(operator, name, square, recipe, channels, draws)
    if "jitter without hue" in recipes:
        yield partial(steps, square, recipes["jitter without hue"], channels, draws)
    if "hue" in recipes:
        yield partial(hues, square, recipes["hue"], draws)
        without_hue = spec.model_copy(update={"jitter": spec.jitter.model_copy(update={"hue": 0.0})})
        yield partial(whole_views, "view without hue", pictures, without_hue, channels, draws)
    yield partial(whole_views, "view", pictures, spec, channels, draws)
    yield partial(evaluation, pictures, spec, channels)


def _of_size(image: Pixels, size: int) -> Pixels:
    """The whole image as an operator alone gets it: of the view's size."""
    return as_pixels(as_picture(image).resize((size, size), Image.Resampling.BICUBIC))


def decoding(files: Files, spec: ViewsSpec, channels: int) -> list[Row]:
    """DALI's decoder against PIL's: the middle of each image, its short side whole."""
    row = Row("decode", {group: Differences() for group in files})
    for group, (source, indices) in files.items():
        for index in indices.tolist():
            image = original(source, index, channels)
            short = min(image.shape[:2])
            whole = spec.model_copy(update={"size": short, "test_crop": 1.0})
            with EvalLoader(
                source, whole, channels=channels, batch=1, shard=ALONE, indices=np.array([index])
            ) as loader:
                ours = denormalise(next(loader).images[0].numpy(), whole)
            top, left = (round((side - short) / 2) for side in image.shape[:2])
            row.found[group].add(ours, image[top : top + short, left : left + short])
    return [row]


def resizing(pictures: Pictures, spec: ViewsSpec, channels: int, draws: int) -> list[Row]:
    """Crop and resize against PIL's; DALI's also against PIL's arithmetic on floats, rounded only at the end.

    PIL rounds and clips after resizing each row, before it resizes the columns. At the edge of the crop PIL cuts the
    kernel off, DALI repeats the last pixel.
    """
    floats_too = not resizes_as_pil(spec)
    recipe = nothing_but(spec, crop_area=spec.crop_area, crop_ratio=spec.crop_ratio)

    def pairs(view: View) -> dict[str, tuple[Any, Any]]:
        corner, extent = crop_windows(view.params[None], np.array([view.image.shape[:2]]), recipe)
        (top, left), (height, width) = corner[0], extent[0]
        window = view.image[top : top + height, left : left + width]
        # A cubic kernel reaches two pixels of whichever of the two, crop and view, is coarser.
        edge = _edge(view.pixels.shape, [math.ceil(2 * max(1, spec.size / side)) for side in (height, width)])
        found = _split_at_edge("resize", view.pixels, reference_view(view.image, view.params, recipe), edge)
        if floats_too:
            planes = [
                Image.fromarray(plane.astype(np.float32)).resize((spec.size, spec.size), Image.Resampling.BICUBIC)
                for plane in np.moveaxis(window, 2, 0)
            ]
            floats = np.rint(np.stack([np.asarray(plane) for plane in planes], axis=2).clip(0, 255))
            found |= _split_at_edge("resize before rounding", view.pixels, floats, edge)
        return found

    sorts = ["resize", "resize before rounding"] if floats_too else ["resize"]
    whats = [f"{what}, {where}" for what in sorts for where in ("inside", "edge")]
    return compare(whats, pictures, drawn_views(pictures, recipe, channels, draws), pairs)


def operator(name: str, pictures: Pictures, recipe: ViewsSpec, channels: int, draws: int) -> list[Row]:
    """One recipe of `operators` on images of the view's size."""

    def pairs(view: View) -> dict[str, tuple[Any, Any]]:
        expected = reference_view(view.image, view.params, recipe)
        if name != "blur":
            return {name: (view.pixels, expected)}
        (column,), _ = blur_kernels(view.params[None])
        edge = _edge(expected.shape, [len(column) // 2] * 2)
        return _split_at_edge(name, view.pixels, expected, edge)

    whats = [f"{name}, inside", f"{name}, edge"] if name == "blur" else [name]
    return compare(whats, pictures, drawn_views(pictures, recipe, channels, draws), pairs)


def whole_views(name: str, pictures: Pictures, spec: ViewsSpec, channels: int, draws: int) -> list[Row]:
    """Views by the whole recipe."""
    views = drawn_views(pictures, spec, channels, draws)
    return compare(
        [name],
        pictures,
        views,
        lambda view: {name: (view.pixels, reference_view(view.image, view.params, spec))},
    )


def evaluation(pictures: Pictures, spec: ViewsSpec, channels: int) -> list[Row]:
    """Short side to size / test_crop, and the centre of it."""
    images = [(group, image) for group, those in pictures.items() for image in those]
    row = Row("evaluation view", {group: Differences() for group in pictures})
    source = ArraySource([image for _, image in images])
    with EvalLoader(source, spec, channels=channels, batch=len(images), shard=ALONE) as loader:
        tensors = next(loader).images.numpy()
    for (group, image), tensor in zip(images, tensors, strict=True):
        row.found[group].add(denormalise(tensor, spec), reference_centre(image, spec))
    return [row]


# --- What a difference comes from, in NumPy -------------------------------------------------------------------------


def steps(pictures: Pictures, recipe: ViewsSpec, channels: int, draws: int) -> list[Row]:
    """One map for the whole jitter against its operators one by one, with what torchvision does after each."""
    ways: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
        "clipping after each step": lambda pixels: pixels.clip(0, 255),
        "whole levels after each step": np.floor,
        "both after each step": lambda pixels: np.floor(pixels.clip(0, 255)),
    }

    def pairs(view: View) -> dict[str, tuple[Any, Any]]:
        folded = to_bytes(one_by_one(view, channels, lambda pixels: pixels))
        return {way: (folded, to_bytes(one_by_one(view, channels, after))) for way, after in ways.items()}

    return compare(list(ways), pictures, _draws_alone(pictures, recipe, channels, draws), pairs)


def one_by_one(
    view: View, channels: int, after: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """The jitter's operators in their order, each by the map that `operands.colour_maps` has for it alone."""
    pixels = view.image.astype(np.float64)
    for turn in view.params["order"]:
        alone = view.params[None].copy()
        for name, neutral in zip(JITTER_OPS, (1, 1, 1, 0), strict=True):
            if name != JITTER_OPS[turn]:
                alone[name] = neutral
        (m,), (k,) = colour_maps(alone, channels)
        pixels = after(pixels @ m.T.astype(np.float64) + k @ pixels.mean(axis=(0, 1)))
    return pixels


def to_bytes(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """What bytes hold of them."""
    return np.rint(pixels.clip(0, 255))


def hues(pictures: Pictures, recipe: ViewsSpec, draws: int) -> list[Row]:
    """Other forms of the shift of hue than the loaders' rotation about the grey axis, against torchvision's."""
    forms = {"hue in YIQ, as DALI's own": hue_in_yiq, "hue in HSV, the exact form": hue_in_hsv}

    def pairs(view: View) -> dict[str, tuple[Any, Any]]:
        expected = reference_view(view.image, view.params, recipe)
        turns = float(view.params["hue"])
        return {what: (to_bytes(form(view.image, turns)), expected) for what, form in forms.items()}

    return compare(list(forms), pictures, _draws_alone(pictures, recipe, 3, draws), pairs)


def hue_in_hsv(image: Pixels, turns: float) -> NDArray[np.float64]:
    """torchvision's shift, in floats: it has bytes of hue, saturation and value in between."""
    hsv = rgb_to_hsv(image / 255)
    hsv[..., 0] = (hsv[..., 0] + turns) % 1
    return 255 * np.asarray(hsv_to_rgb(hsv), np.float64)


def hue_in_yiq(image: Pixels, turns: float) -> NDArray[np.float64]:
    """A rotation about the axis of luma, which `fn.hue` and `fn.color_twist` take."""
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])
    sine, cosine = math.sin(2 * math.pi * turns), math.cos(2 * math.pi * turns)
    turn = np.array([[1, 0, 0], [0, cosine, sine], [0, -sine, cosine]])
    return image @ (np.linalg.inv(to_yiq) @ turn @ to_yiq).T


def _draws_alone(pictures: Pictures, recipe: ViewsSpec, channels: int, draws: int) -> Iterator[View]:
    """The draws of `drawn_views` for images of the view's size, without the loader's views of them."""
    images = [(group, image) for group, those in pictures.items() for image in those]
    for epoch, view in itertools.product(range(draws), (0, 1)):
        rows = view_params(SEED, epoch, np.arange(len(images)), view, recipe, channels)
        for number, params in enumerate(rows):
            yield View(number, *images[number], params, np.zeros(0))


# --- Pictures --------------------------------------------------------------------------------------------


def sheet(pictures: Pictures, spec: ViewsSpec, channels: int, rows: int = 8) -> NDArray[np.uint8]:
    """The first images, a row each: both views, each beside torchvision's; (height, width, 3)."""
    views = list(drawn_views(pictures, spec, channels, 1))
    columns = {}
    for which in (1, 2):
        half = sorted(views[: len(views) // 2] if which == 1 else views[len(views) // 2 :], key=lambda v: v.number)
        theirs = [reference_view(view.image, view.params, spec) for view in half]
        columns[f"view {which}"] = np.stack([normalise(view.pixels, spec) for view in half])
        columns[f"torchvision's {which}"] = np.stack([normalise(pixels, spec) for pixels in theirs])
    return contact_sheet(columns, spec.mean, spec.std, rows)


# --- Images ---------------------------------------------------------------------------------------------------------


def photographs(folder: Path, channels: int) -> tuple[dict[str, list[Pixels]], dict[str, tuple[Source, Any]]]:
    """scikit-learn's photographs and variants of them, as pixels, and as JPEG files below a folder."""
    pictures = photographs_to_compare()
    for name, picture in pictures.items():
        (folder / name).mkdir(parents=True)
        picture.save(folder / name / "4:2:0.jpg", quality=90, subsampling="4:2:0")
        picture.save(folder / name / "4:4:4.jpg", quality=90, subsampling="4:4:4")
    files: dict[str, tuple[Source, Any]] = {name: (FolderSource(folder / name), np.arange(2)) for name in pictures}
    return {name: [in_channels(picture, channels)] for name, picture in pictures.items()}, files


def some_images(
    source: Source, count: int, seed: int, channels: int
) -> tuple[dict[str, list[Pixels]], dict[str, tuple[Source, Any]]]:
    """`count` images of a source, as one group.

    Raises:
        InputError: PIL cannot read one of them.
    """
    indices = some_of(seed, len(source), count)
    name = f"{len(indices)} images"
    pixels = [original(source, index, channels) for index in indices.tolist()]
    return {name: pixels}, {name: (source, indices)} if source.encoded else {}
