"""The steps of a view that are ours on the CPU, each against PIL or its definition."""

import threading

import numpy as np
import pytest
from images import photo
from PIL import Image

from dali.pixels import Threads, finish, resize
from dali.spec import ViewsSpec

CHINA = photo("china").copy()
SPEC = ViewsSpec(size=20)


@pytest.mark.parametrize(
    "window", [(0, 0, 167, 250), (3, 11, 90, 60), (160, 240, 7, 10), (0, 0, 1, 250), (50, 50, 1, 1), (5, 5, 40, 40)]
)
@pytest.mark.parametrize("size", [(40, 40), (200, 30)])
@pytest.mark.parametrize("channels", [1, 3])
def test_resize_is_pils_edges_included(window, size, channels):
    top, left, height, width = window
    image = np.ascontiguousarray(CHINA[..., :channels])
    corner, extent = np.array([top, left], np.int32), np.array([height, width], np.int32)
    picture = Image.fromarray(image[..., 0] if channels == 1 else image)
    box = (left, top, left + width, top + height)
    expected = np.asarray(picture.crop(box).resize(size[::-1], Image.Resampling.BICUBIC)).reshape(*size, channels)
    for mirror in (1, -1):
        made = resize(image, np.array([size[0], mirror * size[1]], np.float32), corner, extent)
        assert made.dtype == np.uint8 and made.flags.c_contiguous
        assert abs(made[:, ::mirror].astype(int) - expected).max() <= 1


def test_rows_come_first_as_in_every_pillow_before_13():
    """Pillow 13 takes the columns first where the height shrinks much more than the width."""
    noise = 255 * np.random.default_rng(0).integers(0, 2, (120, 60, 3), np.uint8)
    picture, cubic = Image.fromarray(noise), Image.Resampling.BICUBIC
    rows_first = np.asarray(picture.resize((40, 120), cubic).resize((40, 40), cubic)).astype(int)
    assert abs(resize(noise, np.array([40, 40], np.float32)) - rows_first).max() <= 1
    assert abs(np.asarray(picture.resize((40, 40), cubic)) - rows_first).max() > 10


def test_without_a_window_the_whole_image_is_resized():
    made = resize(CHINA, np.array([30, 50], np.float32))
    expected = np.asarray(Image.fromarray(CHINA).resize((50, 30), Image.Resampling.BICUBIC))
    assert abs(made.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("solarized", [0, 255])
def test_finish_does_what_the_operands_say(layout, solarized):
    draws = np.random.default_rng(0)
    pixels = draws.integers(0, 256, (20, 30, 3), np.uint8)
    colour = (np.eye(3) + draws.normal(0, 0.3, (3, 3))).astype(np.float32)
    pivot = draws.normal(0, 0.1, (3, 3)).astype(np.float32)
    mapped = pixels @ colour.T.astype(float) + pivot.astype(float) @ pixels.mean(axis=(0, 1))
    assert mapped.min() < 0 and mapped.max() > 255, "some levels must need clipping"
    levels = np.clip(np.round(mapped), 0, 255)
    if solarized:
        levels = np.where(levels >= 128, 255 - levels, levels)
    given = {"colour": colour, "pivot": pivot, "solarize": np.array(solarized, np.uint8)}
    view = finish(pixels, given, SPEC, layout)
    assert view.dtype == np.float32
    found = 255 * ((view if layout == "HWC" else view.transpose(1, 2, 0)) * SPEC.std + SPEC.mean)
    differ = abs(found - levels) > 1e-3
    assert differ.mean() < 1e-3, "but where float32 rounds a half to the other side"
    assert abs(found - levels).max() < 1.001


def test_finish_without_operands_normalises():
    view = finish(CHINA, {}, SPEC, "HWC")
    np.testing.assert_allclose(view, (CHINA / 255 - SPEC.mean) / SPEC.std, atol=1e-5)


@pytest.mark.parametrize(("count", "samples"), [(1, 5), (3, 7), (4, 2), (2, 1)])
def test_each_keeps_the_order_and_shares_the_work(count, samples):
    seen = set()
    together = threading.Barrier(min(count, samples), timeout=20)

    def step(number, other):
        if number < together.parties:
            together.wait()  # only as many threads get past it
        seen.add(threading.get_ident())
        return 10 * number + other

    with Threads(count) as threads:
        found = threads.each(step)(range(samples), range(samples))
    assert found == [11 * number for number in range(samples)]
    assert len(seen) == min(count, samples)


def test_an_error_of_any_thread_is_everybodys():
    def step(number):
        if number == 3:
            raise ValueError("three")
        return number

    with Threads(3) as threads, pytest.raises(ValueError, match="three"):
        threads.each(step)(range(9))
