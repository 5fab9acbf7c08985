import os

import numpy as np
import pytest

from dali.errors import InputError
from dali.sources import ArraySource, FolderSource
from dali.subset import Subset, choose, list_bytes, read_list
from tests.unit.images import write_images

CLASSES = ["a", "b", "c"]


def arrays(per_class=(100, 40, 10)):
    labels = np.random.default_rng(0).permutation(np.repeat(range(3), per_class))
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    return ArraySource(images, labels, CLASSES, origin="train")


@pytest.mark.parametrize(
    ("wanted", "counts"),
    [("10%", (10, 4, 1)), ("1%", (1, 1, 1)), ("100%", (100, 40, 10)), ("7", (7, 7, 7)), ("7 per class", (7, 7, 7))],
)
def test_a_share_or_a_number_is_taken_of_each_class(wanted, counts):
    source = arrays()
    chosen = choose(source, wanted, 3, "probe.labels")
    assert tuple(np.bincount(source.labels[chosen], minlength=3)) == counts
    assert len(set(chosen)) == len(chosen) and (np.diff(chosen) > 0).all()


def test_the_seed_decides_and_fewer_labels_are_part_of_more():
    source = arrays()
    few, again, many, other = (
        set(choose(source, wanted, seed, "k")) for wanted, seed in (("5%", 1), ("5%", 1), ("30%", 1), ("5%", 2))
    )
    assert few == again and few < many and few != other


def test_a_subset_is_a_source_of_those_images():
    source = arrays()
    chosen = np.array([3, 17, 140])
    subset = Subset(source, chosen)
    assert len(subset) == 3 and subset.name(2) == "train[140]"
    assert np.array_equal(subset.labels, source.labels[chosen])
    assert np.array_equal(subset.feed(np.array([2, 0])), source.feed(np.array([140, 3])))
    assert np.array_equal(subset.read(1), source.read(17))
    assert np.array_equal(subset.sizes(np.array([0])), [[8, 8]])
    assert subset.digest != Subset(source, np.array([3, 17, 141])).digest != source.digest


def test_the_list_that_was_written_is_read_back(tmp_path):
    source = arrays()
    chosen = choose(source, "10%", 0, "k")
    (tmp_path / "labels.txt").write_bytes(list_bytes(Subset(source, chosen)))
    assert np.array_equal(choose(source, str(tmp_path / "labels.txt"), 99, "k"), chosen)


def test_names_of_any_characters_are_read_back(tmp_path):
    odd = os.fsdecode(b"a/caf\xe9.png")  # Latin-1, as an old disk has it
    names = [odd, "a/two\nlines.png", " a blank.png", "# no comment.png", '"quoted.png', "plain.png"]
    images = np.zeros((len(names), 8, 8), np.uint8)
    source = ArraySource(images, np.zeros(len(names), int), ["a"], origin="train")
    source.name = lambda index: names[index]
    (tmp_path / "labels.txt").write_bytes(list_bytes(source))
    assert read_list(tmp_path / "labels.txt", source, "k").tolist() == list(range(len(names)))


def test_an_empty_class_has_nothing_to_draw():
    """Labels that begin with 1, or an empty folder."""
    labels = np.repeat([1, 2], 5)
    source = ArraySource(np.zeros((10, 8, 8), np.uint8), labels, ["none", "a", "b"], origin="train")
    chosen = choose(source, "3", 0, "k")
    assert np.bincount(labels[chosen], minlength=3).tolist() == [0, 3, 3]
    with pytest.raises(InputError, match="class a has 5 images; write 1 to 5"):
        choose(source, "6", 0, "k")


def test_a_list_may_name_files_without_their_folder(tmp_path):
    """As the lists of ImageNet's 1 % and 10 % do."""
    write_images(tmp_path / "images", ["a/1.png", "a/2.png", "b/3.png", "b/4.png"])
    source = FolderSource(tmp_path / "images")
    file = tmp_path / "list.txt"
    file.write_text("# chosen by hand\n4.png\n\na/1.png\n")
    assert [source.name(i) for i in read_list(file, source, "k")] == ["a/1.png", "b/4.png"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("0%", "k: 0% is no share"),
        ("101%", "k: 101% is no share"),
        ("x%", "k: x% is no share"),
        ("11", "class c has 10 images; write 1 to 10"),
        ("0", "write 1 to 10"),
        ("some", "some is no share .* and no file"),
    ],
)
def test_what_means_no_subset_is_refused(wanted, message):
    with pytest.raises(InputError, match=message):
        choose(arrays(), wanted, 0, "k")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train[0]\nnobody.png\n", "names nobody.png, which is not among the 150 images"),
        ("train[0]\ntrain[0]\n", "names an image twice"),
        ("\n# nothing\n", "lists no image"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(tmp_path, text, message):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        choose(arrays(), str(tmp_path / "list.txt"), 0, "k")
