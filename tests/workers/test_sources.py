"""The quickstart model trained for two epochs on the same images in every form: the same losses, bit for bit."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dali.errors import InputError
from dali.sources import FolderSource
from pipeline import pretraining, training, workers
from tests.workers.test_training import digits, settings  # noqa: F401  (fixtures)


def write_forms(folder, files):
    """The files as class folders, list, shards, and arrays, in the same order; what data.path is for each."""
    for file in files:
        target = folder / "tree" / file.parent.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    files = sorted((folder / "tree").glob("*/*.png"))
    rows = [{"path": str(file.relative_to(folder)), "label": file.parent.name} for file in files]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for number, part in enumerate((files[:20], files[20:])):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for file in part:
                for suffix, content in (("png", file.read_bytes()), ("cls", file.parent.name.encode())):
                    member = tarfile.TarInfo(f"{file.parent.name}-{file.stem}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    np.savez(folder / "arrays.npz", images=pixels, labels=[int(file.parent.name) for file in files])


def test_every_form_of_the_same_images_trains_alike(world, digits, settings):  # noqa: F811
    folder = Path(digits) / "forms"
    with workers.together():
        if world.rank == 0:
            write_forms(folder, sorted(Path(digits).glob("digits/train/*/*.png"))[::20])
    workers.barrier("forms")
    losses = {}
    for form in ("tree", "list.jsonl", ("0.tar", "1.tar"), "arrays.npz"):
        path = str([str(folder / part) for part in form]) if isinstance(form, tuple) else str(folder / form)
        made = settings("train.epochs=2", f"data.path={path}")
        run = pretraining.prepare(made, world)
        with training.open_loader(run) as loader:
            losses[form] = [training.train_step(run, batch.y1, batch.y2).terms.loss.item() for batch in loader]
    assert len(losses["tree"]) == 4
    assert all(found == losses["tree"] for found in losses.values()), losses


def test_a_worker_that_sees_one_file_less_is_named(world, tmp_path):
    """Case 18: hosts with unlike copies of the data. Each worker has a folder of its own here."""
    for number in range(4 - (world.rank == world.size - 1)):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    source = FolderSource(tmp_path)
    if world.size == 1:
        pretraining.check_same_list(source)
        return
    with pytest.raises(InputError, match=rf"rank {world.size - 1} lists other images than rank 0 \(3 against 4\)"):
        pretraining.check_same_list(source)
