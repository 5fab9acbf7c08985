"""What an image's nearest neighbours in the training set say of its class: exact, for any number of workers.

Cosines are taken in float64, rounded to 2⁻³⁸ and, where they are equal, the image that comes first is the nearer one:
so neither the cut into blocks and slices nor the order of summation decides who votes.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dali.order import some_of
from pipeline import workers
from pipeline.config import Config
from pipeline.features import Features
from pipeline.scores import Scores

PLACE_BITS, COSINE_BITS = 24, 38
LAST_PLACE = 2**PLACE_BITS - 1
BLOCK_ROWS = 2**14  # bank images held at once, of all workers together
BLOCK_CELLS = 2**23  # of a block's cosines: 64 MB, and as much again for their ranks


def bank_indices(config: Config, num_samples: int) -> NDArray[np.int64] | None:
    """The training images that `knn.bank_size` leaves in the bank, in order; None: all of them."""
    size = config.knn.bank_size
    if size is None or size >= num_samples:
        return None
    return some_of(config.seed, num_samples, size)


def predict(
    bank: Features,
    queries: Tensor,
    k: int,
    temperature: float,
    num_classes: int,
    world: workers.World,
    device: torch.device,
) -> Tensor:
    """Class (M,) of each of this worker's queries: its k nearest in the bank vote with weight exp(cosine/temperature).

    The rule of arXiv:1805.01978, section 3.4. Each worker brings its slice of the bank; the
    slices go round in blocks, so that no worker ever holds the bank. All workers call this alike.

    Args:
        bank: this worker's slice, of unit length.
        queries: (M, F) of unit length; M may be 0.
    """
    labels = workers.gather(bank.labels, "knn.labels", world.process_set)
    assert len(labels) <= LAST_PLACE, f"{len(labels)} images in the bank; at most {LAST_PLACE}"
    lengths = workers.gather_objects(len(bank.x), "knn.lengths")
    start, longest = sum(lengths[: world.rank]), max(lengths)
    rows = max(1, BLOCK_ROWS // world.size)
    nearest = torch.empty(len(queries), 0, dtype=torch.int64)
    places = torch.arange(len(bank.x)) + start
    for begin in range(0, longest, rows):
        block = workers.gather(bank.x[begin : begin + rows].to(device), "knn.bank", world.process_set).double()
        where = workers.gather(places[begin : begin + rows].to(device), "knn.places", world.process_set)
        found = [
            _ranks(part.to(device).double() @ block.T, where, k).cpu()
            for part in queries.split(max(1, BLOCK_CELLS // len(block)))
        ]
        if len(queries):
            both = torch.cat([nearest, torch.cat(found)], dim=1)
            nearest = both.topk(min(k, both.shape[1]), dim=1).values
    return vote(nearest, labels, temperature, num_classes)


def _ranks(cosine: Tensor, where: Tensor, k: int) -> Tensor:
    """(M, k) the highest ranks of each row of cosines (M, N): one integer holds a cosine and, below it, a place."""
    rank = (cosine * 2**COSINE_BITS).round().to(torch.int64) * 2**PLACE_BITS + (LAST_PLACE - where)
    return rank.topk(min(k, len(where)), dim=1).values


def vote(nearest: Tensor, labels: Tensor, temperature: float, num_classes: int) -> Tensor:
    """Class (M,) from the ranks (M, k) of each query's neighbours; of equal votes the lowest class."""
    votes = torch.zeros(len(nearest), num_classes, dtype=torch.float64)
    if len(nearest):
        cosine = (nearest >> PLACE_BITS).double() / 2**COSINE_BITS
        # relative to the nearest: the same ranking, and exp stays in range for any temperature
        weights = ((cosine - cosine[:, :1]) / temperature).exp()
        votes.scatter_add_(1, labels[LAST_PLACE - (nearest & LAST_PLACE)], weights)
    return votes.argmax(1)


def judge(
    bank: Features,
    queries: Features,
    num_test: int | None,
    num_classes: int,
    config: Config,
    world: workers.World,
    device: torch.device,
) -> Scores:
    """How many test images their neighbours name rightly; from this worker's slices of both.

    `num_test`: as `scores.to_count` says.
    """
    named = predict(bank, queries.x, config.knn.k, config.knn.temperature, num_classes, world, device)
    scores = Scores(num_classes, top5=False)
    scores.add_named(named, queries.labels)
    return scores.sum(num_test)
