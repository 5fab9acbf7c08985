import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, top_k_accuracy_score

from pipeline.pictures import confusion_map
from pipeline.scores import Scores


@pytest.fixture
def counted():
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 7, (200,), generator=draw)
    logits = torch.randn(200, 7, generator=draw) + 2 * torch.nn.functional.one_hot(labels, 7)
    scores = Scores(7)
    for part, names in zip(logits.split(64), labels.split(64), strict=True):
        scores.add(part, names)
    return scores, logits, labels


def test_counts_are_scikit_learns(counted):
    scores, logits, labels = counted
    assert np.array_equal(scores.confusion, confusion_matrix(labels, logits.argmax(1)))
    assert scores.top1 == pytest.approx(100 * (logits.argmax(1) == labels).double().mean().item())
    assert scores.top5 == pytest.approx(100 * top_k_accuracy_score(labels, logits, k=5))
    assert scores.metrics().keys() == {"top1", "top5"}


def test_the_table_names_what_a_class_is_taken_for():
    scores = Scores(3)
    scores.add_named(torch.tensor([0, 0, 2, 2, 2, 1]), torch.tensor([0, 0, 0, 1, 1, 1]))
    a, b, c = scores.rows(["a", "b", "c"])
    assert (a[0], a[1], a[3]) == ("a", 3, "c") and a[2] == pytest.approx(200 / 3)
    assert (b[1], b[3]) == (3, "c") and b[2] == pytest.approx(100 / 3)
    assert c[1] == 0 and np.isnan(c[2]) and c[3] == ""
    assert "mostly taken for" in scores.table(["a", "b", "c"])
    assert scores.metrics().keys() == {"top1"}, "the five likeliest of three classes say nothing"


def test_the_picture_is_dark_where_images_went():
    shares = np.array([[1, 0, 0], [0, 0, 1], [0.5, 0.5, 0]])
    picture = confusion_map(shares, ["one", "two", "three"])
    assert picture.dtype == np.uint8
    cell = -(-512 // 3)
    left = picture.shape[1] - 3 * cell
    red = np.array([[picture[28 + y * cell + 8, left + x * cell + 8, 0] for x in range(3)] for y in range(3)], int)
    assert (red[shares == 1] < 40).all() and (red[shares == 0] > 240).all()
    assert ((red[shares == 0.5] > 100) & (red[shares == 0.5] < 180)).all()
    assert (picture[28 : 28 + cell, :left] < 100).any() and (picture[28 + 3 * cell :, left : left + cell] < 100).any()


def test_the_picture_of_many_classes_is_of_bounded_size():
    picture = confusion_map(np.eye(1000), [str(number) for number in range(1000)])
    assert max(picture.shape) < 800
