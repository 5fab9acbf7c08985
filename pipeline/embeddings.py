"""Embeddings of a whole split as a file, and pictures of them: map, nearest neighbours, signs of collapse."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dali.errors import InputError
from dali.loader import TwoViewLoader
from dali.order import Shard, some_of
from dali.sources import Source
from pipeline import diagnostics, loading
from pipeline.config import Config
from pipeline.progress import Counter

ALONE = Shard(0, 1)
_PARQUET_ROWS = 4096  # a row group: what a reader must hold at once


class Embeddings(NamedTuple):
    """Of images `indices` (N,) of a source: `x` (N, F) as the backbone gives them, `labels` (N,) if there are any."""

    x: NDArray[np.float32]
    labels: NDArray[np.int64] | None
    indices: NDArray[np.int64]
    names: list[str]
    classes: list[str] | None


class Compute(NamedTuple):
    """Where the network runs: its device, and DALI's threads."""

    device: torch.device
    threads: int


def choose_images(num_images: int, wanted: int | None, seed: int) -> NDArray[np.int64]:
    """All images, or `wanted` of them that follow from the seed; ascending."""
    if wanted is None or wanted >= num_images:
        return np.arange(num_images, dtype=np.int64)
    return some_of(seed, num_images, wanted)


@torch.no_grad()
def embed(
    backbone: nn.Module, source: Source, config: Config, compute: Compute, indices: NDArray[np.int64]
) -> Embeddings:
    """The images of `indices` through the backbone, as evaluation sees them, in order; without those that cannot be
    read, where `data.on_bad_file` leaves them out."""
    rows: list[NDArray[np.float32]] = []
    read: list[NDArray[np.int64]] = []
    count = Counter("embedded", len(indices))
    with loading.evaluation_loader(source, config, ALONE, *compute, indices, dtype=torch.float32) as loader:
        for batch in loader:
            rows.append(backbone(batch.images).float().cpu().numpy())
            read.append(batch.indices)
            count.add(len(batch.indices))
    if not rows:
        raise InputError("data.path: none of the images can be read; run ./run.sh check-data")
    if sum(map(len, read)) < len(indices):
        print(f"warning: {len(indices) - sum(map(len, read))} images cannot be read and are left out", flush=True)
    indices = np.concatenate(read)
    labels = None if source.labels is None else source.labels[indices]
    names = [source.name(int(index)) for index in indices]
    return Embeddings(np.concatenate(rows), labels, indices, names, source.classes)


# --- Files ----------------------------------------------------------------------------------------------------------


def write_npz(embeddings: Embeddings, path: Path, about: dict[str, str]) -> None:
    """Arrays `embeddings`, `names`, and `labels`, `classes` where there are labels; `about` as arrays of one text."""
    arrays: dict[str, NDArray] = {"embeddings": embeddings.x, "names": np.array(embeddings.names)}
    if embeddings.labels is not None:
        arrays["labels"] = embeddings.labels
    if embeddings.classes is not None:
        arrays["classes"] = np.array(embeddings.classes)
    np.savez(path, allow_pickle=False, **arrays, **{key: np.array(text) for key, text in about.items()})


def write_parquet(embeddings: Embeddings, path: Path, about: dict[str, str]) -> None:
    """Columns `name`, `label`, `class` (null where there are none), `embedding` (a list of fixed length).

    `about` goes into the schema's metadata.
    """
    import pyarrow
    import pyarrow.parquet

    count, width = embeddings.x.shape
    labels, classes = embeddings.labels, embeddings.classes
    named = None if labels is None or classes is None else [classes[label] for label in labels]
    flat = pyarrow.array(embeddings.x.ravel(), pyarrow.float32())
    table = pyarrow.table(
        {
            "name": pyarrow.array(embeddings.names, pyarrow.string()),
            "label": pyarrow.array([None] * count if labels is None else labels, pyarrow.int64()),
            "class": pyarrow.array([None] * count if named is None else named, pyarrow.string()),
            "embedding": pyarrow.FixedSizeListArray.from_arrays(flat, width),
        }
    ).replace_schema_metadata(about)
    pyarrow.parquet.write_table(table, path, row_group_size=_PARQUET_ROWS)


WRITERS: dict[str, Callable[[Embeddings, Path, dict[str, str]], None]] = {"parquet": write_parquet, "npz": write_npz}


# --- Map and neighbours ---------------------------------------------------------------------------------------------


def has_spread(x: NDArray[np.float32]) -> bool:
    """Whether a map of embeddings (N, F) can be drawn: they are finite, and differ beyond rounding."""
    return bool(np.isfinite(x).all() and (x.std(0) > 1e-6 * np.abs(x).max()).any())


def map_points(x: NDArray[np.float32], method: str, seed: int) -> NDArray[np.float32]:
    """(N, 2) coordinates of embeddings (N, F): `pca`, or `tsne` from up to 50 principal components."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    width = 2 if method == "pca" else min(50, *x.shape)
    reduced = PCA(width, svd_solver="full", random_state=seed).fit_transform(x)
    if method == "pca":
        return reduced
    perplexity = min(30.0, (len(x) - 1) / 3)
    return TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(reduced)


class Neighbours(NamedTuple):
    """`queries` (Q,) and, nearest first, their `nearest` (Q, k): positions in the embeddings; `cosines` (Q, k)."""

    queries: NDArray[np.int64]
    nearest: NDArray[np.int64]
    cosines: NDArray[np.float32]


def find_neighbours(x: NDArray[np.float32], queries: NDArray[np.int64], k: int) -> Neighbours:
    """The k nearest by cosine to each query, the query itself left out; of equals, the first."""
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    cosines = unit[queries] @ unit.T
    cosines[np.arange(len(queries)), queries] = -np.inf
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, : min(k, len(x) - 1)]
    return Neighbours(queries, nearest, np.take_along_axis(cosines, nearest, axis=1))


def load_images(source: Source, config: Config, compute: Compute, indices: NDArray[np.int64]) -> NDArray[np.float32]:
    """(N, C, S, S) of the images as the network sees them, in the order of `indices`."""
    with loading.evaluation_loader(source, config, ALONE, *compute, indices, dtype=torch.float32) as loader:
        return np.concatenate([batch.images.cpu().numpy() for batch in loader])


# --- Signs of collapse ----------------------------------------------------------------------------------------------


@torch.no_grad()
def embed_views(
    model: nn.Module, source: Source, config: Config, compute: Compute, num_images: int
) -> tuple[Tensor, Tensor]:
    """Embeddings (n, D) of two random views, as pretraining draws them, of the first n <= num_images of epoch 0."""
    batch = min(config.knn.batch, num_images)
    rows1, rows2 = [], []
    count = Counter("views", num_images // batch * batch)
    with TwoViewLoader(
        source,
        config.views,
        seed=config.seed,
        global_batch=batch,
        shard=ALONE,
        stop_step=num_images // batch,
        report_bad=source.on_bad == "skip",
        **(loading.settings(config, *compute) | {"dtype": torch.float32}),
    ) as loader:
        for views in loader:
            good = [row for row in range(batch) if row not in loader.bad]
            rows1.append(model(views.y1[good]).float())
            rows2.append(model(views.y2[good]).float())
            count.add(batch)
    return torch.cat(rows1), torch.cat(rows2)


class Collapse(NamedTuple):
    """What was found: c (D, D), spectra by name, figures by name."""

    c: Tensor
    spectra: dict[str, NDArray[np.float64]]
    figures: dict[str, float]


def signs_of_collapse(features: NDArray[np.float32], z1: Tensor, z2: Tensor, eps: float, name: str) -> Collapse:
    """Of the backbone's features (N, F), and of two views' embeddings (n, D), which are called `name`."""
    c = diagnostics.correlation(z1, z2, eps)
    of_features, of_z = diagnostics.spectrum(torch.from_numpy(features)), diagnostics.spectrum(z1)
    spectra = {"features of the images": of_features.numpy(), name: of_z.numpy()}
    figures = diagnostics.figures(c, of_z) | {"features_effective_rank": diagnostics.effective_rank(of_features)}
    return Collapse(c, spectra, figures)
