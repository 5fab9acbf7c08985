"""The loaders: cases 7, 8 and 16 (data), overlap, ends and errors."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from images import crops, photo, write_images
from nvidia.dali import backend
from PIL import Image

from dali.errors import InputError
from dali.loader import EvalLoader, TwoViewLoader
from dali.order import Shard, step_indices
from dali.sources import ArraySource, FolderSource
from dali.spec import DecoderSpec, JitterSpec, ViewsSpec
from dali.views import LARGE

VIEWS = ViewsSpec(size=24)
BOTH = [VIEWS, ViewsSpec(size=LARGE)]  # by DALI's operators alone, and with steps of ours
ALONE = Shard(0, 1)


def load(source, *, views=VIEWS, channels=3, seed=1, global_batch=8, shard=ALONE, steps=3, **how):
    """All batches of `steps` steps, as [(y1, y2, indices)]."""
    start = how.get("start_step", 0)
    with TwoViewLoader(
        source,
        views,
        channels=channels,
        seed=seed,
        global_batch=global_batch,
        shard=shard,
        stop_step=start + steps,
        **how,
    ) as loader:
        return list(loader)


def joined(batches_of_workers):
    """The workers' slices of each step laid together, in bytes: [(y1, y2, indices)]."""
    return [
        tuple(
            b"".join(torch.as_tensor(worker[field]).contiguous().numpy().tobytes() for worker in step)
            for field in range(3)
        )
        for step in zip(*batches_of_workers, strict=True)
    ]


def test_no_two_views_are_equal_and_the_seed_decides(tmp_path):
    (tmp_path / "a").mkdir()
    picture = photo("china", 60, 50)
    for number in range(8):
        Image.fromarray(picture).save(tmp_path / f"a/{number}.png")
    source = FolderSource(tmp_path)
    views = ViewsSpec(size=32)

    def epochs(seed):
        return [load(source, views=views, seed=seed, shard=Shard(rank, 2), steps=2) for rank in (0, 1)]

    first = epochs(1)
    images = [image.numpy().tobytes() for rank in first for batch in rank for y in batch[:2] for image in y]
    assert len(images) == 8 * 2 * 2 and len(set(images)) == len(images)
    assert joined(first) == joined(epochs(1))
    assert [step[2] for step in joined(first)] != [step[2] for step in joined(epochs(2))]
    assert joined(first)[0][2] != joined(first)[1][2], "the order changes with the epoch"


@pytest.mark.parametrize("views", BOTH)
@pytest.mark.parametrize(("count", "threads"), [(1, 2), (2, 1), (3, 2), (8, 1), (9, 1)])
def test_views_are_the_same_bits_for_any_slicing_and_threads(count, threads, views):
    source = ArraySource(crops(10))
    alone = joined([load(source, views=views)])
    shards = [load(source, views=views, shard=Shard(rank, count), threads=threads) for rank in range(count)]
    assert joined(shards) == alone


@pytest.mark.parametrize("views", BOTH)
def test_views_do_not_depend_on_the_size_of_the_batch(views):
    source = ArraySource(crops(10))
    [whole] = load(source, views=views, global_batch=10, steps=1)
    expected = dict(zip(whole.indices.tolist(), zip(whole.y1, whole.y2, strict=True), strict=True))
    for global_batch, steps in ((3, 3), (5, 2), (1, 10)):  # all in epoch 0
        for part in load(source, views=views, global_batch=global_batch, steps=steps):
            for index, *pair in zip(part.indices.tolist(), part.y1, part.y2, strict=True):
                assert all(map(torch.equal, pair, expected[index]))


@pytest.mark.parametrize(
    ("count", "places"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, [[0, 2, 5], [1, 3, 4, 6, 7]]),
        (3, [[2, 5], [0, 3, 6], [1, 4, 7]]),
    ],
)
def test_micro_batches_are_cut_before_the_workers(count, places):
    source = ArraySource(crops(10))
    whole = step_indices(1, 0, 10, 8)  # cut into places 0-1, 2-4, 5-7
    for rank, mine in enumerate(places):
        [batch] = load(source, shard=Shard(rank, count), micro_batches=3, steps=1)
        np.testing.assert_array_equal(batch.indices, whole[mine])


def test_start_step_continues_the_same_run_across_epochs():
    source = ArraySource(crops(10))
    straight = joined([load(source, global_batch=4, steps=7)])  # 2 steps an epoch
    for start in (1, 2, 5):
        assert joined([load(source, global_batch=4, start_step=start, steps=7 - start)]) == straight[start:]


def test_tensors_keep_their_pixels_while_the_loader_goes_on():
    source = ArraySource(crops(10))
    kept = load(source, steps=12, prefetch=3)
    again = load(source, steps=12)
    assert joined([kept]) == joined([again])


def test_shapes_types_and_memory_format():
    source = ArraySource(crops(10))
    [plain] = load(source, steps=1)
    [last] = load(source, steps=1, channels_last=True)
    [double] = load(source, steps=1, dtype=torch.float64)
    assert plain.y1.shape == (8, 3, 24, 24) and plain.y1.dtype == torch.float32 and plain.y1.is_contiguous()
    assert last.y1.is_contiguous(memory_format=torch.channels_last) and torch.equal(last.y1, plain.y1)
    assert double.y2.dtype == torch.float64 and torch.equal(double.y2, plain.y2.double())
    assert plain.indices.dtype == np.int64
    grey = ViewsSpec(size=24, mean=(0.5,), std=(0.5,))
    [one] = load(ArraySource(crops(10, channels=1)), views=grey, channels=1, steps=1)
    assert one.y1.shape == (8, 1, 24, 24)


def test_views_are_normalised():
    source = ArraySource([np.full((30, 30, 3), 255, np.uint8)] * 2)
    views = ViewsSpec(size=24, jitter={"prob": 0}, solarize=(0, 1), mean=(0.5, 0.25, 0), std=(0.5, 0.25, 2))
    [batch] = load(source, views=views, global_batch=2, steps=1)
    for y, expected in ((batch.y1, (1.0, 3.0, 0.5)), (batch.y2, (-1.0, -1.0, 0.0))):
        torch.testing.assert_close(y, torch.tensor(expected).view(1, 3, 1, 1).expand_as(y), atol=1e-5, rtol=0)


def test_an_empty_slice_gives_empty_tensors_for_every_step():
    batches = load(ArraySource(crops(10)), shard=Shard(0, 9), steps=4)
    assert len(batches) == 4
    assert all(batch.y1.shape == batch.y2.shape == (0, 3, 24, 24) and len(batch.indices) == 0 for batch in batches)


def test_data_smaller_than_the_global_batch_is_refused():
    with pytest.raises(InputError, match=r"train\.global_batch: 11 .* 10 images"):
        load(ArraySource(crops(10)), global_batch=11)


def test_close_ends_the_thread_at_any_time():
    before = threading.active_count()
    source = ArraySource(crops(10))
    for taken in (0, 1, 3):
        loader = TwoViewLoader(source, VIEWS, channels=3, seed=0, global_batch=8, shard=ALONE)  # endless
        for _ in range(taken):
            next(loader)
            assert loader.wait_seconds > 0
        loader.close()
        loader.close()
        with pytest.raises(StopIteration):
            next(loader)
    assert threading.active_count() == before


def test_a_gpus_decoder_takes_our_settings_and_our_defaults_are_its_own():
    schema = backend.TryGetSchema("decoders__Image")
    given = DecoderSpec().arguments()
    assert set(given) == set(DecoderSpec.model_fields)
    for name, value in given.items():
        assert schema.HasArgument(name), name
        assert float(schema.GetArgumentDefaultValueString(name)) == pytest.approx(value), name


def test_a_program_that_ends_with_an_open_loader_ends_clean():
    """Not by abort, and with its own exit code: what runs in the graph calls Python."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from images import crops
from dali.loader import TwoViewLoader
from dali.order import Shard
from dali.sources import ArraySource
from dali.spec import ViewsSpec

how = dict(channels=3, seed=0, global_batch=8, shard=Shard(0, 1), threads=2)
loader = TwoViewLoader(ArraySource(crops(10)), ViewsSpec(size=200), **how)
next(loader)
sys.exit(7)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")


def test_an_error_in_a_step_of_ours_ends_the_loader_with_it():
    source = ArraySource([np.zeros((9, 9, 2), np.uint8)] * 2)  # and one mean
    views = ViewsSpec(size=LARGE, mean=(0,), std=(1,), jitter=JitterSpec(prob=0), grey=0)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="IndexError"):
        load(source, views=views, channels=2, global_batch=2, threads=2)
    assert threading.active_count() == before


def test_a_broken_file_ends_the_loader_with_its_error(tmp_path):
    write_images(tmp_path, [f"{number}.png" for number in range(8)])
    (tmp_path / "3.png").write_text("no image")
    with TwoViewLoader(FolderSource(tmp_path), VIEWS, channels=3, seed=0, global_batch=4, shard=ALONE) as loader:
        with pytest.raises(InputError, match=r"^'3\.png' cannot be read: is no image; .*check-data"):
            for _ in range(3):
                next(loader)
        with pytest.raises(StopIteration):
            next(loader)


def test_files_that_are_gone_cost_no_graph_each(tmp_path, monkeypatch):
    """A folder that is gone must be said at once, however large the batch: a graph takes a third of a second."""
    write_images(tmp_path, [f"{number}.png" for number in range(8)])
    source = FolderSource(tmp_path)
    made = []
    decoder = TwoViewLoader._decoder
    monkeypatch.setattr(TwoViewLoader, "_decoder", lambda loader: [made.append(1), decoder(loader)][1])
    for file in tmp_path.iterdir():
        file.unlink()
    with TwoViewLoader(source, VIEWS, channels=3, seed=0, global_batch=8, shard=ALONE) as loader:
        with pytest.raises(InputError, match=r"cannot be read: No such file or directory \(and 7 more\)"):
            next(loader)
    assert made == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 12])
def test_evaluation_takes_every_image_once(count):
    labels = np.arange(11) % 4
    source = ArraySource(crops(11), labels)
    alone = {}
    with EvalLoader(source, VIEWS, channels=3, batch=11, shard=ALONE) as loader:
        for image, index in zip(*next(loader)[::2], strict=True):
            alone[index] = image
    taken = []
    for rank in range(count):
        with EvalLoader(source, VIEWS, channels=3, batch=3, shard=Shard(rank, count), threads=2) as loader:
            batches = list(loader)
            assert len(batches) == len(loader) and all(len(batch.indices) == 3 for batch in batches[:-1])
        for batch in batches:
            np.testing.assert_array_equal(batch.labels.numpy(), labels[batch.indices])
            assert all(torch.equal(alone[i], image) for i, image in zip(batch.indices, batch.images, strict=True))
            taken += batch.indices.tolist()
    assert taken == list(range(11))


def test_evaluation_of_chosen_images_without_labels():
    with EvalLoader(
        ArraySource(crops(11)), VIEWS, channels=3, batch=2, shard=Shard(1, 2), indices=np.array([9, 4, 2, 7])
    ) as loader:
        [batch] = list(loader)
    assert batch.indices.tolist() == [2, 7] and batch.labels is None


def test_evaluation_at_full_size_changes_no_pixel():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    views = ViewsSpec(size=28, test_crop=1, mean=(0,), std=(1,))
    with EvalLoader(ArraySource(pixels), views, channels=1, batch=5, shard=ALONE) as loader:
        images = next(loader).images
    torch.testing.assert_close(images[:, 0] * 255, torch.from_numpy(pixels).float(), atol=1e-4, rtol=0)
