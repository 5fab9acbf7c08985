"""The sheet of a run's first batch: its views beside torchvision's of the same draws."""

from types import SimpleNamespace

import numpy as np
import pytest
import zoo
from images import crops
from PIL import Image

from dali.loader import TwoViewLoader
from dali.order import Shard
from dali.sources import ArraySource, FolderSource
from dali.spec import JitterSpec, ViewsSpec
from pipeline import config, pretraining
from pipeline.views_sheet import ROWS, views_sheet

HEADER, GAP, SIZE = 28, 4, 96
SPEC = ViewsSpec(size=SIZE, jitter=JitterSpec(hue=0))
FILES = ("jpeg.jpg", "rotated.jpg", "cmyk.jpg", "palette.png", "alpha.png", "rgb16.png", "grey16.png", "rotated.webp")


def cells(sheet, rows):
    """(columns, rows, 96, 96, 3) levels."""
    assert sheet.shape == (HEADER + rows * (SIZE + GAP), 4 * (SIZE + GAP) + GAP, 3)
    body = sheet[HEADER:, GAP:].reshape(rows, SIZE + GAP, 4, SIZE + GAP, 3)
    return body[:, :SIZE, :, :SIZE].transpose(2, 0, 1, 3, 4).astype(float)


def apart(a, b):
    """Mean levels between rows of cells."""
    return np.abs(a - b).mean(axis=(1, 2, 3))


ALONE = Shard(0, 1)


def load(source, step=0, shard=ALONE, **how):
    how = {"channels": 3, "seed": 5, "global_batch": len(source), "shard": shard, **how}
    with TwoViewLoader(source, SPEC, start_step=step, stop_step=step + 1, **how) as loader:
        return next(loader)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    zoo.write(folder, {name: zoo.good()[name][0] for name in FILES})
    return FolderSource(folder)


def test_files_of_every_sort_are_beside_torchvisions_views(files):
    batch = load(files)
    view_1, view_2, theirs_1, theirs_2 = cells(views_sheet(files, SPEC, 3, 5, 0, batch, batch.indices), ROWS)
    assert apart(view_1, theirs_1).max() < 9 and apart(view_2, theirs_2).max() < 9
    assert apart(view_1, view_2).min() > 10 and apart(theirs_1, theirs_2).min() > 10


def test_an_image_that_stands_in_for_another_has_its_draws():
    source = ArraySource(crops(12, size=90))
    with TwoViewLoader(source, SPEC, channels=3, seed=5, global_batch=8, shard=ALONE) as loader:
        whole = next(loader)
        spare = sorted(set(range(12)) - set(whole.indices.tolist()))
        batch, _ = loader.replace(whole, {0: spare[0], 3: spare[1]}, 0)
    for places, close in ((whole.indices, True), (batch.indices, False)):
        view_1, _, theirs_1, _ = cells(views_sheet(source, SPEC, 3, 5, 0, batch, places), ROWS)
        found = apart(view_1, theirs_1)
        assert (found[[0, 3]].max() < 5) == close and np.delete(found, [0, 3]).max() < 5


def test_an_image_that_pil_cannot_read_is_named_and_the_others_are_shown(tmp_path, capsys):
    for number, pixels in enumerate(crops(3, size=90)):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    source = FolderSource(tmp_path)
    batch = load(source)
    (tmp_path / "1.png").write_bytes(b"no image any more")
    view_1, _, theirs_1, _ = cells(views_sheet(source, SPEC, 3, 5, 0, batch, batch.indices), 3)
    lost = batch.indices.tolist().index(1)
    assert theirs_1[lost].std(axis=(0, 1)).max() == 0 and np.delete(apart(view_1, theirs_1), lost).max() < 5
    assert "'1.png': PIL cannot read it" in capsys.readouterr().out


def test_a_run_shows_its_own_workers_views_of_the_step():
    source = ArraySource(crops(14, size=90))
    made = config.load(None, ["train.global_batch=7", "train.micro_batches=2", "seed=5", f"views.size={SIZE}"])
    made = made.model_copy(update={"views": SPEC})
    shard = Shard(1, 2)
    run = SimpleNamespace(
        config=made, source=source, plan=SimpleNamespace(steps_per_epoch=2), world=SimpleNamespace(shard=shard)
    )
    batch = load(source, 5, shard, global_batch=7, micro_batches=2)  # the second step of the third epoch
    view_1, view_2, theirs_1, theirs_2 = cells(pretraining.first_views(run, batch, 5), len(batch.indices))
    assert max(apart(view_1, theirs_1).max(), apart(view_2, theirs_2).max()) < 5
    assert apart(view_1, view_2).min() > 10
