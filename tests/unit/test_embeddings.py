"""Embeddings of a split: the right image's, in files that others read; neighbours against NumPy; maps from the seed."""

import numpy as np
import pyarrow.parquet
import pytest
import torch
from images import crops
from PIL import Image
from torch import nn

from dali.folders import FolderSource
from dali.sources import ArraySource
from pipeline import embeddings
from pipeline.config import load
from pipeline.embeddings import Compute, Embeddings
from pipeline.pictures import neighbour_sheet

CPU = Compute(torch.device("cpu"), 1)
HEADER, GAP = 28, 4


@pytest.fixture(scope="module")
def config():
    return load(None, ["views.size=16", "views.test_crop=1.0", "knn.batch=4", "precision.channels_last=false"])


@pytest.fixture(scope="module")
def source():
    labels = np.array([2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
    return ArraySource(crops(10), labels, ["ant", "bee", "cow"], origin="crop")


class Mean(nn.Module):
    """(N, 3, S, S) to the mean of each channel, and their sum: features that tell which image it was."""

    def forward(self, y):
        means = y.mean(dim=(2, 3))
        return torch.cat([means, means.sum(dim=1, keepdim=True)], dim=1)


def test_each_row_is_of_the_image_that_its_name_says(source, config):
    every = embeddings.embed(Mean(), source, config, CPU, np.arange(10))
    assert every.x.shape == (10, 4) and every.x.dtype == np.float32
    assert len(np.unique(every.x.round(4), axis=0)) == 10
    some = embeddings.embed(Mean(), source, config, CPU, np.array([7, 1, 4]))
    np.testing.assert_array_equal(some.x, every.x[[7, 1, 4]])
    assert some.names == ["crop[7]", "crop[1]", "crop[4]"] and some.labels.tolist() == [0, 0, 0]
    images = embeddings.load_images(source, config, CPU, np.array([7, 7, 1]))
    np.testing.assert_allclose(Mean()(torch.from_numpy(images)), every.x[[7, 7, 1]], rtol=1e-6)


def test_a_bad_file_takes_no_other_s_name(tmp_path, config, capfd):
    """Left out, and said; views of it, too."""
    for number in range(8):
        (tmp_path / str(number % 2)).mkdir(exist_ok=True)
        Image.fromarray(crops(8)[number]).save(tmp_path / str(number % 2) / f"{number}.png")
    whole = embeddings.embed(Mean(), FolderSource(tmp_path), config, CPU, np.arange(8))
    bad = tmp_path / "0" / "4.png"
    bad.write_bytes(bad.read_bytes()[:50])
    source = FolderSource(tmp_path)
    source.on_bad = "skip"
    found = embeddings.embed(Mean(), source, config, CPU, np.arange(8))
    assert "1 images cannot be read and are left out" in capfd.readouterr().out
    left = [row for row, name in enumerate(whole.names) if name != "0/4.png"]
    assert found.names == [whole.names[row] for row in left] and len(found.names) == 7
    assert found.labels.tolist() == whole.labels[left].tolist() and found.indices.tolist() == left
    np.testing.assert_allclose(found.x, whole.x[left], rtol=1e-6)
    z1, z2 = embeddings.embed_views(Mean(), source, config, CPU, 8)
    assert len(z1) == len(z2) == 7


@pytest.mark.parametrize("value", [0.0, 3.0, np.nan, np.inf])
def test_no_map_is_drawn_of_embeddings_without_spread(value):
    """t-SNE would look for a difference for ever."""
    x = np.full((20, 4), value, np.float32)
    assert not embeddings.has_spread(x)
    assert embeddings.has_spread(np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))


def test_chosen_images_follow_from_the_seed():
    chosen = embeddings.choose_images(100, 10, seed=3)
    assert np.array_equal(chosen, embeddings.choose_images(100, 10, seed=3))
    assert not np.array_equal(chosen, embeddings.choose_images(100, 10, seed=4))
    assert len(set(chosen.tolist())) == 10 and (np.diff(chosen) > 0).all()
    for wanted in (None, 100, 200):
        assert np.array_equal(embeddings.choose_images(100, wanted, seed=3), np.arange(100))


@pytest.fixture
def made():
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    return Embeddings(x, np.array([1, 0, 1, 1, 0]), np.arange(5), [f"bird/ü{i}.jpg" for i in range(5)], ["a", "b"])


@pytest.mark.parametrize("labelled", [True, False])
def test_parquet_holds_it_all(made, labelled, tmp_path):
    if not labelled:
        made = made._replace(labels=None, classes=None)
    embeddings.write_parquet(made, tmp_path / "x.parquet", {"backbone": "resnet18", "weights": "none"})
    table = pyarrow.parquet.read_table(tmp_path / "x.parquet")
    assert table.column_names == ["name", "label", "class", "embedding"]
    np.testing.assert_array_equal(np.array(table["embedding"].to_pylist(), np.float32), made.x)
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[3]"
    assert table["name"].to_pylist() == made.names
    assert table["label"].to_pylist() == ([1, 0, 1, 1, 0] if labelled else [None] * 5)
    assert table["class"].to_pylist() == (["b", "a", "b", "b", "a"] if labelled else [None] * 5)
    assert table.schema.metadata[b"backbone"] == b"resnet18"


@pytest.mark.parametrize("labelled", [True, False])
def test_npz_holds_it_all_without_pickles(made, labelled, tmp_path):
    if not labelled:
        made = made._replace(labels=None, classes=None)
    embeddings.write_npz(made, tmp_path / "x.npz", {"backbone": "resnet18"})
    with np.load(tmp_path / "x.npz", allow_pickle=False) as held:
        np.testing.assert_array_equal(held["embeddings"], made.x)
        assert held["names"].tolist() == made.names and str(held["backbone"]) == "resnet18"
        assert ("labels" in held and "classes" in held) == labelled
        assert not labelled or (held["labels"].tolist(), held["classes"].tolist()) == ([1, 0, 1, 1, 0], ["a", "b"])


def test_neighbours_are_numpys_and_never_the_query():
    x = np.random.default_rng(1).standard_normal((30, 5)).astype(np.float32)
    x[7] = 3 * x[12]  # the same direction: nearest, whatever its length
    found = embeddings.find_neighbours(x, np.array([12, 0]), 8)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for row, query in enumerate((12, 0)):
        cosines = unit @ unit[query]
        others = [i for i in np.argsort(-cosines) if i != query][:8]
        assert set(found.nearest[row].tolist()) == set(others)
        np.testing.assert_allclose(found.cosines[row], cosines[others], rtol=1e-5)  # 7 and 12 are equals to all others
    assert found.nearest[0, 0] == 7 and found.cosines[0, 0] == pytest.approx(1)


def test_few_images_have_few_neighbours_and_equals_keep_their_order():
    found = embeddings.find_neighbours(np.ones((4, 2), np.float32), np.array([1]), 8)
    assert found.nearest.tolist() == [[0, 2, 3]]


def clusters(count=30):
    draws = np.random.default_rng(2)
    centres = np.eye(3, 8) * 10
    return np.concatenate([c + draws.standard_normal((count, 8)) for c in centres]).astype(np.float32)


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_a_map_keeps_clusters_apart_and_repeats(method):
    x = clusters()
    points = embeddings.map_points(x, method, seed=0)
    assert points.shape == (90, 2)
    assert np.array_equal(points, embeddings.map_points(x, method, seed=0))
    parts = points.reshape(3, 30, 2)
    centres, spread = parts.mean(axis=1), np.linalg.norm(parts - parts.mean(axis=1, keepdims=True), axis=2).mean()
    apart = [np.linalg.norm(centres[i] - centres[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert min(apart) > 3 * spread


def test_three_images_have_maps():
    for method in ("pca", "tsne"):
        assert np.isfinite(embeddings.map_points(clusters(1), method, seed=0)).all()


def test_views_are_those_of_pretraining_and_differ(source, config):
    z1, z2 = embeddings.embed_views(Mean(), source, config, CPU, 10)
    assert z1.shape == z2.shape == (8, 4), "whole batches of four"
    assert not torch.allclose(z1, z2)
    again = embeddings.embed_views(Mean(), source, config, CPU, 10)
    assert torch.equal(z1, again[0]) and torch.equal(z2, again[1])


def test_signs_of_collapse_are_of_both_networks(source, config):
    found = embeddings.embed(Mean(), source, config, CPU, np.arange(10))
    report = embeddings.signs_of_collapse(found.x, *embeddings.embed_views(Mean(), source, config, CPU, 8), 1e-5, "z")
    assert report.c.shape == (4, 4) and set(report.spectra) == {"features of the images", "z"}
    assert 1 <= report.figures["features_effective_rank"] < 3.01, "the fourth feature is the sum of the others"


def test_the_sheet_frames_classes_and_keeps_order():
    pixels = np.random.default_rng(3).integers(0, 256, (2, 3, 1, 96, 96))
    images = ((pixels / 255 - 0.3) / 0.2).astype(np.float32)
    same = np.array([[True, False], [False, True]])
    sheet = neighbour_sheet(images, np.array([[0.9, 0.8], [0.7, 0.6]]), same, (0.3,), (0.2,)).astype(int)
    step_x, step_y = 96 + 3 * GAP, 96 + 2 * GAP + HEADER
    for row in range(2):
        for column in range(3):
            left, top = 2 * GAP + column * step_x, HEADER + GAP + row * step_y
            cell = sheet[top : top + 96, left : left + 96]
            assert np.array_equal(cell, pixels[row, column, 0][..., None].repeat(3, -1))
            frame = sheet[top - 2, left + 40]
            if column == 0:
                assert frame.tolist() == [255] * 3
            else:
                assert (frame[2] > frame[0]) == same[row, column - 1], "blue for the same class, red for another"
                assert (sheet[top + 96 + GAP : top + 96 + HEADER, left : left + 60] < 100).any(), "its cosine"
    bare = neighbour_sheet(images, np.zeros((2, 2)), None, (0.3,), (0.2,))
    assert (bare[HEADER + GAP - 2, 2 * GAP + step_x + 40] == 255).all()
