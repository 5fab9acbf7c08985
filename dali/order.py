"""Which samples a step takes, and how each is augmented: pure functions of (seed, step), in NumPy.

Only the raw bits of the Philox generator are used: NumPy promises that they never change, which it does not for its
distributions.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dali.errors import InputError
from dali.spec import ViewsSpec

# Second word of the generator's key: keeps the uses of one seed apart.
_ORDER, _VIEWS, _SUBSET = 0, 1, 2

JITTER_OPS = ("brightness", "contrast", "saturation", "hue")
CROP_TRIES = 10

VIEW_PARAMS = np.dtype(
    [
        ("area", np.float64, (CROP_TRIES,)),  # share of the image's area, one for each try
        ("ratio", np.float64, (CROP_TRIES,)),  # width / height, one for each try
        ("top", np.float64),  # place of the window in the room there is, [0, 1)
        ("left", np.float64),
        ("flip", np.bool_),
        ("jitter", np.bool_),  # whether the four factors below apply
        ("brightness", np.float64),
        ("contrast", np.float64),
        ("saturation", np.float64),
        ("hue", np.float64),  # turns
        ("order", np.uint8, (4,)),  # the jitter's operators, first to last: places in JITTER_OPS
        ("grey", np.bool_),
        ("blur", np.bool_),
        ("sigma", np.float64),  # pixels of the view
        ("solarize", np.bool_),
    ]
)


@dataclass(frozen=True)
class Shard:
    """One worker among `count`; `index` counts from 0."""

    index: int
    count: int


def steps_per_epoch(num_samples: int, global_batch: int) -> int:
    """Full steps in an epoch; what is left over is left out, and differs from epoch to epoch.

    Raises:
        InputError: there are fewer samples than one step takes.
    """
    steps = num_samples // global_batch
    if steps == 0:
        raise InputError(
            f"train.global_batch: {global_batch} is more than the {num_samples} images found; "
            f"write train.global_batch={num_samples} or less, or add images"
        )
    return steps


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """A permutation of `num_samples` indices, keyed by (seed, epoch); read-only, as it is kept."""
    order = _permutation(seed, _ORDER, epoch, num_samples)
    order.flags.writeable = False
    return order


def some_of(seed: int, count: int, wanted: int) -> NDArray[np.int64]:
    """`wanted` of `count` samples, drawn from the seed; in order."""
    return np.sort(epoch_order(seed, 0, count)[:wanted])


def subset_order(seed: int, num_samples: int) -> NDArray[np.int64]:
    """A permutation of `num_samples` indices, keyed by seed, whose first ones are a random part of them."""
    return _permutation(seed, _SUBSET, 0, num_samples)


def _permutation(seed: int, use: int, number: int, num_samples: int) -> NDArray[np.int64]:
    bits = np.random.Philox(key=np.array([seed, use], np.uint64), counter=np.array([0, 0, number, 0], np.uint64))
    return np.argsort(np.asarray(bits.random_raw(num_samples)), kind="stable").astype(np.int64)


def step_indices(seed: int, step: int, num_samples: int, global_batch: int) -> NDArray[np.int64]:
    """The samples of the global batch that the update after `step` completed ones takes, in order."""
    epoch, position = divmod(step, steps_per_epoch(num_samples, global_batch))
    return epoch_order(seed, epoch, num_samples)[position * global_batch :][:global_batch]


def worker_indices(
    seed: int, step: int, num_samples: int, global_batch: int, positions: list[slice]
) -> NDArray[np.int64]:
    """A worker's part of `step_indices`, by its `worker_positions`."""
    whole = step_indices(seed, step, num_samples, global_batch)
    return np.concatenate([whole[position] for position in positions])


def split(total: int, parts: int) -> list[slice]:
    """Cut `total` places into contiguous slices whose lengths differ by at most one."""
    edges = [part * total // parts for part in range(parts + 1)]
    return [slice(low, high) for low, high in zip(edges, edges[1:], strict=False)]


def substitutes(
    seed: int, epoch: int, num_samples: int, global_batch: int, places: NDArray[np.int64], bad: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The images that take the places of bad ones in an epoch, each place given by the bad image that has it.

    The epoch's n-th bad image is replaced by the n-th good one of those the epoch leaves out, and when these are used
    up, of those it began with. `bad` are all images known to be bad. The answer is the same whenever it is asked for,
    by whichever worker, as long as all bad images up to these places are among them.

    Raises:
        InputError: no image is good.
    """
    order = epoch_order(seed, epoch, num_samples)
    used = steps_per_epoch(num_samples, global_batch) * global_batch
    candidates = np.concatenate([order[used:], order[:used]])
    good = candidates[~np.isin(candidates, bad)]
    if not len(good):
        raise InputError(f"data.path: none of the {num_samples} images can be read")
    rank = np.cumsum(np.isin(order[:used], bad)) - 1
    where = np.empty(num_samples, np.int64)
    where[order] = np.arange(num_samples)
    return good[rank[where[places]] % len(good)]


def worker_positions(global_batch: int, micro_batches: int, shard: Shard) -> list[slice]:
    """This worker's places in the global batch, one slice for each micro-batch; some may be empty.

    The global batch is cut into micro-batches first and each of these over the workers: the other way round, a
    micro-batch's samples, hence its statistics, would depend on the number of workers.
    """
    positions = []
    for part in split(global_batch, micro_batches):
        mine = split(part.stop - part.start, shard.count)[shard.index]
        positions.append(slice(part.start + mine.start, part.start + mine.stop))
    return positions


def view_params(
    seed: int, epoch: int, indices: NDArray[np.int64], view: int, spec: ViewsSpec, channels: int
) -> NDArray[np.void]:
    """What view `view` (0 or 1) does to each sample: (n,) of VIEW_PARAMS, each row depending on its own index alone.

    The draws are those of torchvision's RandomResizedCrop, RandomHorizontalFlip, ColorJitter in RandomApply,
    RandomGrayscale, and of the reference's GaussianBlur and Solarization. One-channel data has no saturation, hue or
    grey.
    """
    draw = iter(_uniform(seed, epoch, indices, view).T)
    params = np.zeros(len(indices), VIEW_PARAMS)
    low, high = spec.crop_area
    params["area"] = np.stack([low + (high - low) * next(draw) for _ in range(CROP_TRIES)], axis=1)
    low, high = np.log(spec.crop_ratio)
    params["ratio"] = np.exp(np.stack([low + (high - low) * next(draw) for _ in range(CROP_TRIES)], axis=1))
    params["top"], params["left"] = next(draw), next(draw)
    params["flip"] = next(draw) < spec.flip
    params["jitter"] = next(draw) < spec.jitter.prob
    params["order"] = np.argsort(np.stack([next(draw) for _ in JITTER_OPS], axis=1), axis=1, kind="stable")
    for name in ("brightness", "contrast", "saturation"):
        params[name] = 1 + getattr(spec.jitter, name) * (2 * next(draw) - 1)
    params["hue"] = spec.jitter.hue * (2 * next(draw) - 1)
    params["grey"] = next(draw) < spec.grey
    params["blur"] = next(draw) < spec.blur[view]
    low, high = spec.blur_sigma
    params["sigma"] = low + (high - low) * next(draw)
    params["solarize"] = next(draw) < spec.solarize[view]
    if channels == 1:
        params["saturation"], params["hue"], params["grey"] = 1, 0, False
    return params


def _uniform(seed: int, epoch: int, indices: NDArray[np.int64], view: int) -> NDArray[np.float64]:
    """40 numbers in [0, 1) for each index, each half a word of the generator: (n, 40)."""
    counter = np.empty((4, len(indices), 5), np.uint64)
    counter[0] = np.arange(5)
    counter[1] = indices[:, None]
    counter[2], counter[3] = epoch, view
    words = np.moveaxis(philox(counter, (seed, _VIEWS)), 0, -1).reshape(len(indices), -1)
    return words.view(np.uint32) * np.float64(2.0**-32)


def philox(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x64-10 of many counters at once: (4, ...) words in, (4, ...) words out.

    One `np.random.Philox` object for each sample takes about ten times as long. Source: Salmon et al., "Parallel
    random numbers: as easy as 1, 2, 3" (SC11).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(0xD2E7470EE14C6C93, c0)
        high1, low1 = _multiply(0xCA5A826395121157, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % 2**64, (k1 + 0xBB67AE8584CAA73B) % 2**64
    return np.stack([c0, c1, c2, c3])


def _multiply(a: int, b: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """High and low word of a 64 x 64 bit product, from four 32 x 32 bit ones."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_high, a_low = np.uint64(a >> 32), np.uint64(a & 0xFFFFFFFF)
    b_high, b_low = b >> half, b & mask
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (other >> half), np.uint64(a) * b
