"""The loaders that a config means."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dali.interface import Source
from dali.loader import EvalLoader
from dali.order import Shard
from pipeline.config import Config


def settings(config: Config, device: torch.device, threads: int) -> dict[str, Any]:
    """What every loader is told: channels, device, DALI's threads and decoder, type and memory order of the pixels."""
    return {
        "channels": config.data.channels,
        "device": str(device),
        "threads": threads,
        "prefetch": config.data.prefetch,
        "decoder": config.data.decoder,
        "dtype": getattr(torch, config.precision.dtype),
        "channels_last": config.precision.channels_last,
    }


def evaluation_loader(
    source: Source,
    config: Config,
    shard: Shard,
    device: torch.device,
    threads: int,
    indices: NDArray[np.int64] | None = None,
    **other: Any,
) -> EvalLoader:
    """This worker's slice of the images (all, or those of `indices`), as evaluation sees them, `knn.batch` at once.

    `other` settings take the place of the config's.
    """
    how = settings(config, device, threads) | other
    return EvalLoader(source, config.views, batch=config.knn.batch, shard=shard, indices=indices, **how)
