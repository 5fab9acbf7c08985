"""Features of labelled images from a frozen backbone."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dali.order import Shard
from dali.sources import Source
from pipeline import watchdog
from pipeline.config import Config
from pipeline.loading import evaluation_loader
from pipeline.model import Backbone


class Features(NamedTuple):
    """`x` (N, F) float32, on the CPU; `labels` (N,) int64."""

    x: Tensor
    labels: Tensor

    def of_unit_length(self) -> "Features":
        return Features(torch.nn.functional.normalize(self.x, dim=1), self.labels)


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
    """This worker's slice of the images (all, or those of `indices`), embedded in evaluation mode.

    A smaller last batch is filled up: kernels differ between shapes, and an image's features would by its neighbours.
    """
    was_training = backbone.training
    backbone.eval()
    rows, labels = [], []
    with evaluation_loader(source, config, shard, device, threads, indices) as loader:
        for batch in loader:
            watchdog.beat()
            rows.append(backbone(_filled(batch.images, config.knn.batch)).float()[: len(batch.images)].cpu())
            assert batch.labels is not None, "a source without labels"
            labels.append(batch.labels.cpu())
    backbone.train(was_training)
    if not rows:
        return Features(torch.zeros(0, backbone.feature_dim), torch.zeros(0, dtype=torch.int64))
    return Features(torch.cat(rows), torch.cat(labels))


def _filled(images: Tensor, count: int) -> Tensor:
    """`images` (n, C, S, S), with the first one again until there are `count`, in the same memory order."""
    missing = count - len(images)
    return images if missing == 0 else torch.cat([images, images[:1].expand(missing, -1, -1, -1)])
