"""Order, slices and draws: cases 8, 9 and 26."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop, transforms

from dali.errors import InputError
from dali.operands import crop_windows
from dali.order import (
    VIEW_PARAMS,
    Shard,
    epoch_order,
    philox,
    split,
    step_indices,
    steps_per_epoch,
    substitutes,
    view_params,
    worker_positions,
)
from dali.spec import ViewsSpec

MANY = np.arange(2000)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4), st.tuples(*[st.integers(0, 2**64 - 1)] * 2))
def test_philox_is_numpys(counter, key):
    # NumPy counts up before it draws.
    ours = philox(np.array(counter, np.uint64)[:, None], key)[:, 0]
    number = (sum(word << (64 * place) for place, word in enumerate(counter)) - 1) % 2**256
    before = np.array([number >> (64 * place) & (2**64 - 1) for place in range(4)], np.uint64)
    numpys = np.random.Philox(counter=before, key=np.array(key, np.uint64)).random_raw(4)
    np.testing.assert_array_equal(ours, numpys)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [9, 10, 26])
def test_every_epoch_has_only_full_steps_and_no_image_twice(num_samples, count):
    global_batch, steps = 4, num_samples // 4
    assert steps_per_epoch(num_samples, global_batch) == steps
    left_out = set()
    for epoch in range(12):
        taken = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            whole = step_indices(5, step, num_samples, global_batch)
            of_workers = [
                whole[position]
                for rank in range(count)
                for position in worker_positions(global_batch, 1, Shard(rank, count))
            ]
            assert sum(map(len, of_workers)) == global_batch
            np.testing.assert_array_equal(np.concatenate(of_workers), whole)
            taken += whole.tolist()
        assert len(set(taken)) == len(taken) == steps * global_batch
        assert set(taken) <= set(range(num_samples))
        left_out |= set(range(num_samples)) - set(taken)
    assert len(left_out) > num_samples % global_batch, "the left-out ones rotate"


def test_order_depends_on_seed_and_epoch_alone():
    first = epoch_order(1, 0, 100)
    assert sorted(first) == list(range(100))
    np.testing.assert_array_equal(first, epoch_order.__wrapped__(1, 0, 100))
    orders = {tuple(epoch_order(seed, epoch, 100)) for seed, epoch in itertools.product((1, 2, 2**62), (0, 1, 2))}
    assert len(orders) == 9


def test_order_is_uniform():
    places = np.array([epoch_order.__wrapped__(seed, 0, 6) for seed in range(3000)])
    counts = np.array([[np.sum(places[:, place] == sample) for sample in range(6)] for place in range(6)])
    assert abs(counts - 500).max() < 5 * math.sqrt(500)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_slices_cover_the_batch_and_differ_by_one(global_batch, count, micro_batches):
    shards = [worker_positions(global_batch, micro_batches, Shard(rank, count)) for rank in range(count)]
    for micro, whole in enumerate(split(global_batch, micro_batches)):
        slices = [positions[micro] for positions in shards]
        assert [slices[0].start, slices[-1].stop] == [whole.start, whole.stop]
        assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
        lengths = [part.stop - part.start for part in slices]
        assert max(lengths) - min(lengths) <= 1
    sizes = [part.stop - part.start for part in split(global_batch, micro_batches)]
    assert max(sizes) - min(sizes) <= 1


def test_fewer_images_than_the_global_batch_is_refused_with_the_numbers():
    with pytest.raises(InputError, match=r"train\.global_batch: 8 .* 3 images"):
        steps_per_epoch(3, 8)


def test_draws_are_each_samples_own():
    spec = ViewsSpec()
    whole = view_params(3, 1, MANY, 0, spec, 3)
    for part in (MANY[5:6], MANY[::-1], MANY[[7, 1999, 7]]):
        assert view_params(3, 1, part, 0, spec, 3).tobytes() == whole[part].tobytes()


def test_draws_differ_by_sample_view_epoch_and_seed():
    spec = ViewsSpec(blur=(1, 1), solarize=(0, 0))
    rows = [
        row.tobytes()
        for seed, epoch, view in itertools.product((0, 1, 2**62), (0, 1), (0, 1))
        for row in view_params(seed, epoch, MANY[:50], view, spec, 3)
    ]
    assert len(set(rows)) == len(rows) == 600


def test_draws_have_the_reference_recipes_statistics():
    # Means of 2,000 draws: within 4 standard errors.
    first, second = (view_params(0, 0, MANY, view, ViewsSpec(), 3) for view in (0, 1))

    def share(flags, expected):
        assert flags.mean() == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / len(MANY)))

    def uniform(values, low, high):
        assert low <= values.min() < low + 0.02 * (high - low) and high - 0.02 * (high - low) < values.max() <= high
        assert values.mean() == pytest.approx((low + high) / 2, abs=4 * (high - low) / math.sqrt(12 * values.size))

    for params in (first, second):
        share(params["flip"], 0.5)
        share(params["jitter"], 0.8)
        share(params["grey"], 0.2)
        uniform(params["area"], 0.08, 1)
        uniform(np.log(params["ratio"]), math.log(3 / 4), math.log(4 / 3))
        for place in ("top", "left"):
            uniform(params[place], 0, 1)
        uniform(params["brightness"], 0.6, 1.4)
        uniform(params["contrast"], 0.6, 1.4)
        uniform(params["saturation"], 0.8, 1.2)
        uniform(params["hue"], -0.1, 0.1)
        uniform(params["sigma"], 0.1, 2.0)
        orders, counts = np.unique(params["order"], axis=0, return_counts=True)
        assert len(orders) == 24 and counts.min() > 40 and (np.sort(orders, axis=1) == np.arange(4)).all()
    share(first["blur"], 1)
    share(second["blur"], 0.1)
    share(first["solarize"], 0)
    share(second["solarize"], 0.2)
    fields = [first[name].reshape(len(MANY), -1)[:, 0].astype(float) for name in ("area", "top", "brightness", "sigma")]
    fields += [second[name].astype(float) for name in ("top", "brightness", "sigma")]
    correlation = np.corrcoef(fields) - np.eye(len(fields))
    assert abs(correlation).max() < 5 / math.sqrt(len(MANY))


def test_one_channel_data_has_no_saturation_hue_or_grey():
    params = view_params(0, 0, MANY, 0, ViewsSpec(mean=(0.5,), std=(0.5,)), 1)
    assert (params["saturation"] == 1).all() and (params["hue"] == 0).all() and not params["grey"].any()


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (28, 28), (3, 300), (300, 3), (1, 1), (2, 3)])
def test_crops_are_distributed_as_torchvisions(height, width):
    spec = ViewsSpec()
    corner, extent = crop_windows(
        view_params(0, 0, MANY, 0, spec, 3), np.broadcast_to(np.array([height, width]), (2000, 2)), spec
    )
    assert (corner >= 0).all() and (extent >= 1).all() and (corner + extent <= [height, width]).all()
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    drawn = np.array([RandomResizedCrop.get_params(image, spec.crop_area, spec.crop_ratio) for _ in range(2000)])
    ours = np.concatenate([corner, extent], axis=1)
    error = 5 * np.sqrt((ours.var(axis=0) + drawn.var(axis=0)) / 2000)
    assert (abs(ours.mean(axis=0) - drawn.mean(axis=0)) <= error).all()
    assert (abs(ours.std(axis=0) - drawn.std(axis=0)) <= error).all()


class Drawn:
    """In torch's place in torchvision's transforms: gives one row's draws, in the order in which they are asked for."""

    def __init__(self, params):
        tries = zip(params["area"], np.log(params["ratio"]), strict=True)
        self.draws = iter([draw for both in tries for draw in both])
        self.places = iter([params["top"], params["left"]])
        self.tries = 0

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, count):
        return self

    def uniform_(self, low, high):
        self.tries += 0.5
        draw = next(self.draws)
        assert low - 1e-6 <= draw <= high + 1e-6
        return torch.tensor([draw])

    def randint(self, low, high, size):
        return torch.tensor([math.floor(low + next(self.places) * (high - low))])


@pytest.mark.parametrize(("height", "width"), [(375, 500), (100, 230), (64, 64), (3, 8), (1, 1), (5, 2)])
def test_a_crop_is_the_one_that_torchvision_makes_of_the_same_draws(monkeypatch, height, width):
    spec = ViewsSpec(crop_area=(0.4, 1))  # so that many tries do not fit
    params = view_params(0, 0, MANY[:200], 0, spec, 3)
    corner, extent = crop_windows(params, np.full((200, 2), [height, width]), spec)
    image, tries = torch.empty(3, height, width), set()
    for row, window in zip(params, np.concatenate([corner, extent], axis=1).tolist(), strict=True):
        drawn = Drawn(row)
        monkeypatch.setattr(transforms, "torch", drawn)
        assert list(RandomResizedCrop.get_params(image, spec.crop_area, spec.crop_ratio)) == window
        fallen_back = next(drawn.places, None) is not None
        tries.add("fallback" if fallen_back else int(drawn.tries))
    if (height, width) == (100, 230):
        assert tries >= {1, 2, 3, 9, 10, "fallback"}


def test_a_crop_that_never_fits_falls_back_to_the_centre():
    # 3x300: torchvision's rule leaves the largest window of ratio 4/3.
    spec = ViewsSpec(crop_area=(1, 1))
    params = view_params(0, 0, MANY[:5], 0, spec, 3)
    corner, extent = crop_windows(params, np.full((5, 2), [3, 300]), spec)
    np.testing.assert_array_equal(extent, np.full((5, 2), [3, 4]))
    np.testing.assert_array_equal(corner, np.full((5, 2), [0, 148]))


def test_params_have_named_columns():
    assert set(VIEW_PARAMS.names) == {
        *("area", "ratio", "top", "left", "flip", "jitter", "brightness", "contrast", "saturation", "hue", "order"),
        *("grey", "blur", "sigma", "solarize"),
    }


@pytest.mark.parametrize("trial", range(20))
def test_substitutes_are_the_same_however_much_is_known(trial):
    """Told step by step, as a run finds out, or all at once, as a resumed one knows: against a plain loop."""
    rng, samples, batch, epoch = np.random.default_rng(trial), 23, 5, trial % 3
    whole = epoch_order(7, epoch, samples)
    bad = set(rng.choice(samples, size=int(rng.integers(1, 9)), replace=False).tolist())
    spare = [index for index in [*whole[20:], *whole[:20]] if index not in bad]
    expected = dict(zip([index for index in whole[:20].tolist() if index in bad], spare * 9, strict=False))
    known: set[int] = set()
    for step in range(4):
        part = whole[step * batch : (step + 1) * batch].tolist()
        known |= bad & set(part)
        places = np.array([index for index in part if index in bad], np.int64)
        while True:  # what it gives may be found to be bad in turn
            found = substitutes(7, epoch, samples, batch, places, np.array(sorted(known), np.int64)).tolist()
            if not (new := bad & set(found)):
                break
            known |= new
        assert found == [expected[index] for index in places.tolist()]
        assert found == substitutes(7, epoch, samples, batch, places, np.array(sorted(bad), np.int64)).tolist()


def test_where_no_image_is_good_there_is_no_substitute():
    with pytest.raises(InputError, match="none of the 6 images can be read"):
        substitutes(0, 0, 6, 3, np.arange(1), np.arange(6))
