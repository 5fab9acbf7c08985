"""Case 2 on every worker: a file that cannot be read is named by all, or replaced by the same image for any W."""

import json

import numpy as np
import pytest
import torch

from dali.loader import TwoViewLoader
from dali.order import Shard, epoch_order
from dali.sources import open_source
from pipeline import bad_files, checkpoint, pretraining, training, workers
from tests.workers.test_training import digits, settings  # noqa: F401  (fixtures)

SAMPLES, GLOBAL_BATCH = 60, 25  # two steps an epoch, ten images left out


@pytest.fixture
def broken(world, digits, settings):  # noqa: F811
    """Makes a config whose images lie in a folder of their own, with some of the first epoch's broken."""
    from pathlib import Path

    made = 0

    def make(places, *words):
        nonlocal made
        made += 1
        config = settings(*words)
        folder = config.output_path.with_name(config.output_path.name + f"-images-{made}")
        order = epoch_order(config.seed, 0, SAMPLES)
        with workers.together():
            if world.rank == 0:
                files = sorted(Path(digits).glob("digits/train/*/*.png"))[:: 1200 // SAMPLES][:SAMPLES]
                for number, file in enumerate(files):
                    target = folder / f"{number:02d}.png"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(file.read_bytes())
                for place in places:
                    (folder / f"{order[place]:02d}.png").write_bytes(b"no image")
        workers.barrier("images")
        data = config.data.model_copy(update={"path": str(folder)})
        return config.model_copy(update={"data": data}), order

    return make


def batches(run, steps):
    """What the workers train on in the next steps, laid together, in the order of the global batch."""
    seen = []
    with training.open_loader(run, report_bad=True) as loader:
        batches = bad_files.Readable(run, loader)
        for batch in batches:
            parts = workers.gather_objects((batch.indices, batch.y1.numpy(), batch.y2.numpy()), "batch")
            seen.append(tuple(np.concatenate(part) for part in zip(*parts, strict=True)))
            run.step += 1
            if len(seen) == steps:
                break
        batches.close()
    return seen


def test_another_image_takes_the_place_the_same_one_for_any_number_of_workers(world, broken):
    """Places of several workers, of both steps, two neighbours, and one in the tail, which is passed over."""
    config, order = broken([3, 4, 20, 31, 50], "data.on_bad_file=skip", "precision.channels_last=true")
    run = pretraining.prepare(config, world)
    assert run.plan.steps_per_epoch == 2 and run.plan.total_steps == 2
    seen = batches(run, 2)
    expected = order[:50].copy()
    expected[[3, 4, 20, 31]] = order[[51, 52, 53, 54]]  # 50 is bad, too
    np.testing.assert_array_equal(np.concatenate([indices for indices, _, _ in seen]), expected)
    assert set(run.bad_files) == {int(order[place]) for place in (3, 4, 20, 31, 50)}
    assert len(set(workers.gather_objects(json.dumps(sorted(run.bad_files)), "known"))) == 1
    # The others' views are what they were; the new images have the draws of those whose places they take.
    whole_config, _ = broken([])
    with TwoViewLoader(
        source := open_source(whole_config.data, "train"),
        config.views,
        channels=1,
        seed=config.seed,
        global_batch=GLOBAL_BATCH,
        shard=Shard(0, 1),
        stop_step=2,
        channels_last=True,
    ) as loader:
        for step, (_, y1, y2) in enumerate(seen):
            whole = next(loader)
            places = {place - 25 * step: int(expected[place]) for place in (3, 4, 20, 31) if place // 25 == step}
            replaced, still_bad = loader.replace(whole, places, step)
            assert not still_bad and len(source) == SAMPLES
            assert not np.array_equal(replaced.y1.numpy(), whole.y1.numpy())
            for ours, theirs in ((y1, replaced.y1), (y2, replaced.y2)):
                np.testing.assert_array_equal(ours, theirs.numpy())


def test_images_repeat_only_when_the_tail_is_used_up(world, broken):
    config, order = broken([*range(2, 14)], "data.on_bad_file=skip")  # twelve; the tail has ten
    run = pretraining.prepare(config, world)
    first, _ = batches(run, 2)
    assert first[0][2:12].tolist() == order[50:].tolist()
    assert first[0][12:14].tolist() == order[[0, 1]].tolist()


def test_a_resumed_run_replaces_as_one_that_never_stopped(world, broken):
    config, _ = broken([1, 7, 30, 33], "data.on_bad_file=skip", "train.epochs=3")
    pretraining.pretrain(config, world)
    stopped = config.model_copy(
        update={
            "output": f"{config.output}-stopped",
            "train": config.train.model_copy(update={"stop_after_steps": 1}),
        }
    )
    pretraining.pretrain(stopped, world)
    pretraining.pretrain(stopped.model_copy(update={"train": config.train}), world)
    a, b = (checkpoint.load(checkpoint.path_of(made.output_path, 6)) for made in (config, stopped))
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    assert a["bad_files"] == b["bad_files"] and len(a["bad_files"]) == 4
    if world.rank == 0:
        lines = [json.loads(line) for line in (config.output_path / "journal.jsonl").read_text().splitlines()]
        assert [v["metrics"]["bad_files"] for v in lines if "bad_files" in v.get("metrics", {})][-1] == 4


def test_failing_names_the_file_on_all_workers_after_a_checkpoint(world, broken):
    """In the last place of the second step: the last worker alone finds it."""
    config, order = broken([49], "train.epochs=3")
    with pytest.raises(bad_files.BadFiles, match=rf"^data\.path: '{order[49]:02d}\.png' cannot be read: is no image"):
        pretraining.pretrain(config, world)
    workers.barrier("saved")
    assert checkpoint.load(checkpoint.path_of(config.output_path, 1))["step"] == 1
    # The same run goes on by the other policy.
    skipping = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_file": "skip"})})
    pretraining.pretrain(skipping, world)
    assert checkpoint.load(checkpoint.path_of(config.output_path, 6))["bad_files"] == {str(order[49]): "is no image"}


def test_too_many_bad_files_end_the_run(world, broken):
    config, _ = broken([0, 10, 24], "data.on_bad_file=skip", "data.max_bad_files=2")
    with pytest.raises(bad_files.BadFiles, match=r"^data\.max_bad_files: 3 files cannot be read, more than 2"):
        pretraining.pretrain(config, world)
