"""Features of labelled images from a frozen backbone, and what nearest neighbours say of them; exact for any W."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dali.loader import EvalLoader
from dali.order import Shard, epoch_order
from dali.sources import Source
from pipeline import watchdog, workers
from pipeline.config import Config
from pipeline.model import Backbone


class Features(NamedTuple):
    """`x` (N, F) of unit length, float32, on the CPU; `labels` (N,) int64."""

    x: Tensor
    labels: Tensor


@torch.no_grad()
def extract(
    backbone: Backbone,
    source: Source,
    config: Config,
    shard: Shard,
    device: torch.device,
    threads: int,
    indices: np.ndarray | None = None,
) -> Features:
    """This worker's slice of the images (all, or those of `indices`), embedded in evaluation mode."""
    was_training = backbone.training
    backbone.eval()
    rows, labels = [], []
    with EvalLoader(
        source,
        config.views,
        channels=config.data.channels,
        batch=config.knn.batch,
        shard=shard,
        indices=indices,
        device=str(device),
        threads=threads,
        dtype=getattr(torch, config.precision.dtype),
        channels_last=config.precision.channels_last,
    ) as loader:
        for batch in loader:
            watchdog.beat()
            x = backbone(batch.images).float()
            rows.append(torch.nn.functional.normalize(x, dim=1).cpu())
            assert batch.labels is not None, "a source without labels"
            labels.append(batch.labels.cpu())
    backbone.train(was_training)
    if not rows:
        return Features(torch.zeros(0, backbone.feature_dim), torch.zeros(0, dtype=torch.int64))
    return Features(torch.cat(rows), torch.cat(labels))


def knn_predict(bank: Features, queries: Tensor, k: int, temperature: float, num_classes: int) -> Tensor:
    """Class (M,) of each query: its k nearest in the bank vote with weight exp(cosine / temperature).

    The rule of arXiv:1805.01978, section 3.4. Memory is bounded: queries are taken in blocks.

    Args:
        queries: (M, F) of unit length.
    """
    k = min(k, len(bank.x))
    predictions = []
    block = max(1, 2**25 // max(1, len(bank.x)))
    for part in queries.split(block):
        similarity, index = (part @ bank.x.T).topk(k, dim=1)
        votes = torch.zeros(len(part), num_classes, dtype=torch.float64)
        # relative to the nearest: the same ranking, and exp stays in range for any temperature
        weights = ((similarity - similarity[:, :1]).double() / temperature).exp()
        votes.scatter_add_(1, bank.labels[index], weights)
        predictions.append(votes.argmax(1))
    return torch.cat(predictions) if predictions else torch.zeros(0, dtype=torch.int64)


def knn_accuracy(
    backbone: Backbone,
    bank_source: Source,
    test_source: Source,
    config: Config,
    world: workers.World,
    device: torch.device,
    threads: int,
) -> float:
    """Per cent of the test images whose class their nearest training images name; every test image counts once.

    Workers embed a slice each of bank and test set; the bank is gathered, and each classifies its own test slice.
    """
    indices = None
    if config.knn.bank_size is not None and config.knn.bank_size < len(bank_source):
        indices = np.sort(epoch_order(config.seed, 0, len(bank_source))[: config.knn.bank_size])
    mine = extract(backbone, bank_source, config, world.shard, device, threads, indices)
    bank = Features(workers.gather(mine.x, "knn.bank"), workers.gather(mine.labels, "knn.labels"))
    queries = extract(backbone, test_source, config, world.shard, device, threads)
    num_classes = int(max(bank.labels.max(), torch.as_tensor(test_source.labels).max())) + 1
    found = knn_predict(bank, queries.x, config.knn.k, config.knn.temperature, num_classes)
    counts = torch.tensor([int((found == queries.labels).sum()), len(queries.labels)], dtype=torch.int64)
    workers.sum_(counts, "knn.counts")
    right, total = counts.tolist()
    assert total == len(test_source) or config.data.on_bad_file == "skip", (total, len(test_source))
    return 100 * right / total if total else math.nan
