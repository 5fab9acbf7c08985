"""`./run.sh parity`: what it counts, which rows it has, and that it notices views that are not torchvision's."""

from pathlib import Path

import numpy as np
import pytest
import torchvision.transforms.functional as F
from images import crops, photo
from PIL import Image

from dali.errors import InputError
from dali.spec import ViewsSpec
from dali.views import LARGE
from pipeline import parity
from pipeline.commands import parity as command
from pipeline.differences import (
    OF_ANY_IMAGE,
    OF_PHOTOGRAPHS,
    PHOTOGRAPHS,
    Bound,
    Differences,
    Row,
    bound_of,
    bounds_of,
    table,
)

SIZE = 32
COLOURS = {"saturation", "hue", "grey", "jitter", "view without hue"}


def difference(levels):
    found = Differences()
    found.add(np.array(levels, float), np.zeros(len(levels)))
    return found


def test_differences_count_whole_levels():
    levels = np.abs(np.random.default_rng(0).normal(0, 9, 5000))
    found, whole = difference(levels), np.rint(levels)
    assert found.mean == pytest.approx(whole.mean()) and found.most == whole.max()
    for share in (95, 99):
        assert found.percentile(share) == np.percentile(whole, share, method="inverted_cdf")
    both = difference([3.2, 0])
    both.add(np.zeros((2, 1)), np.array([[250], [0.4]]))
    assert (both.mean, both.percentile(50), both.percentile(75), both.most) == (253 / 4, 0, 3, 250)


@pytest.mark.parametrize("limit", ["mean", "p95", "p99", "most"])
def test_every_limit_of_a_bound_counts(limit):
    found = difference([0] * 90 + [2] * 6 + [5] * 3 + [9])
    values = {"mean": 0.36, "p95": 2, "p99": 5, "most": 9}
    assert found.mean == values["mean"] and Bound(**values).holds(found)
    assert not Bound(**{limit: values[limit] - 0.1}).holds(found)


def test_own_images_have_the_bounds_that_hold_for_any():
    assert bound_of("flip", "8 images") == bound_of("flip", "dark") == Bound(most=0)
    assert bound_of("hue", "8 images") == Bound()
    assert bounds_of("hue", ["china", "dark", "flower"]) == "mean 4; flower: mean 13"
    text = table([Row("flip", {"dark": difference([0, 1]), "china": difference([0])})]).splitlines()
    assert text[-1] == "| flip | **0.50 / 1 / 1 / 1** | 0 / 0 / 0 / 0 | max 0 |"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, pixels in enumerate(crops(3, size=50)):
        Image.fromarray(pixels).save(folder / f"{number}.{('jpg', 'png')[number % 2]}")
    return folder


def rows_of(text):
    return [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| ")][1:]


def run(folder, *words):
    return command.run([f"data.path={folder}", f"views.size={SIZE}", "--images", "2", "--draws", "2", *words])


def test_the_command_measures_own_images_and_writes_table_and_sheet(folder, tmp_path, capsys):
    assert run(folder, "--write", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "every bound kept" in shown and "2 images" in shown
    text = (tmp_path / "parity.md").read_text()
    assert text in shown and set(OF_PHOTOGRAPHS) <= set(rows_of(text))
    sheet = np.asarray(Image.open(tmp_path / "parity.png")).astype(int)
    first, theirs, second, theirs_2 = (sheet[28:, 4 + column * 100 :][:, :96] for column in range(4))
    assert sheet.shape == (28 + 2 * 100, 4 * 100 + 4, 3)
    assert abs(first - theirs).mean() < 15 < abs(first - second).mean()
    assert abs(second - theirs_2).mean() < 15


def test_large_views_are_resized_as_pil_does_it(folder, capsys):
    """So there is nothing to tell apart: neither before PIL's rounding nor, beyond a level, at the edge."""
    assert run(folder, f"views.size={LARGE}") == 0
    rows = rows_of(capsys.readouterr().out)
    assert "resize, inside" in rows and not any("before rounding" in row for row in rows)


@pytest.mark.parametrize("words", [[], ["views.size=63"]])
def test_photographs_keep_the_bounds_that_few_draws_can_keep(words, capsys):
    """The command itself: the default recipe, and the largest views that DALI resizes."""
    command.run(["--draws", "3", *words])
    shown = capsys.readouterr().out
    exceeded = {line.split(" | ")[0].strip("| ") for line in shown.splitlines() if "**" in line}
    assert {"decode", "resize, inside"} <= set(rows_of(shown)) and not exceeded & set(OF_ANY_IMAGE), shown


def test_views_that_are_not_torchvisions_end_with_1(folder, capsys):
    assert run(folder, "views.antialias=false", "views.jitter.prob=0") == 1
    shown = capsys.readouterr().out
    exceeded = {line.split(" | ")[0].strip("| ") for line in shown.splitlines() if "**" in line}
    assert {"resize, inside", "evaluation view"} <= exceeded and "flip" not in exceeded
    assert not {"hue", "brightness", "both after each step"} & set(rows_of(shown)), "the recipe has no jitter"


def test_one_channel_has_no_rows_of_colour(folder, tmp_path, capsys):
    config = tmp_path / "grey.yaml"
    config.write_text("data: {channels: 1}\nviews: {mean: [0.4], std: [0.3]}\n")
    assert run(folder, "--config", str(config)) == 0
    rows = set(rows_of(capsys.readouterr().out))
    assert not COLOURS & rows and {"decode", "contrast", "jitter without hue", "blur, inside", "view"} <= rows


def test_what_cannot_be_measured_is_refused(folder, tmp_path):
    (tmp_path / "no_images.yaml").write_text("views: {size: 32}\n")
    with pytest.raises(InputError, match="--draws 0"):
        run(folder, "--draws", "0")
    for words in ([f"data.path={folder}/nothing"], ["--config", f"{tmp_path}/no_images.yaml"]):
        with pytest.raises(InputError, match=r"data\.path"):
            command.run(words)


def test_forms_of_hue():
    image = photo("flower", 40, 30)
    for turns in (-0.1, 0.07):
        expected = np.asarray(F.adjust_hue(Image.fromarray(image), turns))
        exact, yiq = (abs(form(image, turns) - expected).mean() for form in (parity.hue_in_hsv, parity.hue_in_yiq))
        assert exact < 1 and 3 < yiq < 25
    np.testing.assert_allclose(parity.hue_in_yiq(image, 0), image, atol=1e-9)


def test_the_whole_map_is_its_steps_if_nothing_is_clipped_or_rounded():
    """What the rows on steps are measured from is what the loader does."""
    image = np.ascontiguousarray(photo("china")[:SIZE, :SIZE] // 4 + 90)
    recipe = parity.operators(ViewsSpec(size=SIZE), 3)["jitter"]
    for view in parity.drawn_views({"grey": [image]}, recipe, 3, 8):
        assert abs(parity.to_bytes(parity.one_by_one(view, 3, lambda pixels: pixels)) - view.pixels).max() <= 1.01
        floored = parity.one_by_one(view, 3, np.floor)
        assert (floored == np.floor(floored)).all() and abs(floored - view.pixels).max() > 1


def test_the_page_has_the_rows_of_the_command():
    page = (Path(__file__).parents[2] / "docs/parity.md").read_text()
    header = f"| mean / 95 % / 99 % / max | {' | '.join(PHOTOGRAPHS)} | bound |"
    assert header in page
    tables = page.split(header)[1:]  # of large views, and rows of small ones
    lines = [line for table in tables for line in table.split("\n\n")[0].splitlines()[2:]]
    assert set(OF_PHOTOGRAPHS) <= {line.split(" | ")[0].strip("| ") for line in lines}
    for line in lines:
        what, *_, bound = (cell.strip() for cell in line.strip("|").split("|"))
        assert bound == bounds_of(what, PHOTOGRAPHS), f"docs/parity.md is older than the bounds: {what}"
