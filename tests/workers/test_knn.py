"""Nearest neighbours on every worker: the same as NumPy on all features at once, ties and duplicates included."""

import numpy as np
import pytest
import torch

from dali.order import split
from pipeline import knn, workers
from pipeline.features import Features

CPU = torch.device("cpu")


def made(count, seed):
    """Unit rows of which every fifth is the copy of another, some with another label."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 16)).astype(np.float32)
    x[::5] = x[(np.arange(count)[::5] * 7 + 1) % count]
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x, draw.integers(0, 4, count)


def reference(bank, labels, queries, k, temperature):
    """By sorting all cosines, the earlier image first where they are equal."""
    cosine = np.round(queries.astype(np.float64) @ bank.astype(np.float64).T, 11)
    named = []
    for row in cosine:
        nearest = np.lexsort((np.arange(len(row)), -row))[:k]
        weights = np.exp((row[nearest] - row[nearest[0]]) / temperature)
        named.append(np.bincount(labels[nearest], weights, 4).argmax())
    return np.array(named)


@pytest.mark.parametrize("block_rows", [7, 64, 2**14])
@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (8, 0.07), (9, 1e-4), (500, 1.0)])
def test_predictions_are_numpy_s_for_any_blocks_and_workers(world, monkeypatch, block_rows, k, temperature):
    monkeypatch.setattr(knn, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(knn, "BLOCK_CELLS", 50)
    bank, labels = made(101, 0)
    queries, _ = made(30, 1)
    queries[3:6] = bank[10:13]
    mine, own = split(101, world.size)[world.rank], split(30, world.size)[world.rank]
    slices = Features(torch.from_numpy(bank[mine]), torch.from_numpy(labels[mine]))
    named = knn.predict(slices, torch.from_numpy(queries[own]), k, temperature, 4, world, CPU)
    found = workers.gather(named, "named").numpy()
    assert np.array_equal(found, reference(bank, labels, queries, k, temperature))


def test_a_worker_without_queries_takes_part(world):
    bank, labels = made(11, 0)
    mine = split(11, world.size)[world.rank]
    slices = Features(torch.from_numpy(bank[mine]), torch.from_numpy(labels[mine]))
    queries = torch.from_numpy(bank[:1] if world.rank == 0 else bank[:0])
    named = knn.predict(slices, queries, 1, 0.07, 4, world, CPU)
    assert named.tolist() == ([labels[np.flatnonzero((bank == bank[0]).all(1))[0]]] if world.rank == 0 else [])
