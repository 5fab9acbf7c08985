"""Sources: case 18's folder trees, IDX and CIFAR files, and the messages for what is not there."""

import gzip
import os
import pickle
import shutil
import struct
import tarfile

import numpy as np
import pytest
from images import write_images
from PIL import Image

from dali.errors import InputError
from dali.sources import ArraySource, FolderSource, has_test_split, open_source, open_test
from dali.spec import DataSpec

ALL = np.zeros(0, np.int64)


def names(source):
    return [source.name(index) for index in range(len(source))]


def test_class_folders_give_labels_in_byte_order(tmp_path):
    write_images(tmp_path, ["b/2.jpg", "b/deep/er/1.png", "A/U.JPG", "a/x.jpeg", "ä/1.jpg"])
    (tmp_path / "empty").mkdir()
    source = FolderSource(tmp_path)
    assert names(source) == ["A/U.JPG", "a/x.jpeg", "b/2.jpg", "b/deep/er/1.png", "ä/1.jpg"]
    assert source.classes == ["A", "a", "b", "empty", "ä"]
    assert source.labels.tolist() == [0, 1, 2, 2, 4] and source.labels.dtype == np.int64
    assert source.encoded and source.sizes(ALL) is None


def test_flat_and_deep_trees(tmp_path):
    write_images(tmp_path / "flat", ["2.jpg", "10.jpg", "a.png"])
    write_images(tmp_path / "deep", ["x/y/z/1.jpg", "x/q/1.jpg"])
    write_images(tmp_path / "mixed", ["cat/1.jpg", "top.jpg"])
    flat, deep, mixed = (FolderSource(tmp_path / kind) for kind in ("flat", "deep", "mixed"))
    assert names(flat) == ["10.jpg", "2.jpg", "a.png"] and flat.labels is None and flat.classes is None
    assert names(deep) == ["x/q/1.jpg", "x/y/z/1.jpg"] and deep.classes == ["x"]
    assert len(mixed) == 2 and mixed.labels is None


def test_hidden_and_foreign_files_are_counted_and_passed_over(tmp_path):
    write_images(tmp_path, ["a/1.jpg", "a/._1.jpg", ".cache/2.jpg", "b/2.jpg"])
    for name in ("Thumbs.db", "a/notes.txt", "a/no_suffix"):
        (tmp_path / name).write_text("no image")
    source = FolderSource(tmp_path)
    assert names(source) == ["a/1.jpg", "b/2.jpg"]
    assert source.ignored == 5


def test_read_gives_the_files_bytes_and_feed_its_path(tmp_path):
    odd = "with blank/ünï\ncode.jpg"
    write_images(tmp_path, ["a/1.jpg", odd])
    os.rename(tmp_path / "a/1.jpg", os.fsencode(tmp_path) + b"/a/\xff.jpg")  # no valid UTF-8
    source = FolderSource(tmp_path)
    for index, path in enumerate(source.feed(np.arange(2))):
        with open(path.tobytes(), "rb") as file:
            assert file.read() == source.read(index).tobytes()
    assert source.name(1) == odd


def test_linked_class_folders_are_followed_but_not_in_circles(tmp_path):
    write_images(tmp_path / "elsewhere", ["1.jpg"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/up").symlink_to(tmp_path / "data")
    assert names(FolderSource(tmp_path / "data")) == ["cat/1.jpg", "dog/1.jpg"]


def test_digest_is_of_relative_paths_and_sizes(tmp_path):
    write_images(tmp_path / "one", ["a/1.jpg", "b/2.jpg"])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = FolderSource(tmp_path / "one"), FolderSource(tmp_path / "two")
    assert one.digest == two.digest
    with (tmp_path / "two/a/1.jpg").open("ab") as file:
        file.write(b"x")
    longer = FolderSource(tmp_path / "two").digest
    os.rename(tmp_path / "one/a/1.jpg", tmp_path / "one/a/3.jpg")
    renamed = FolderSource(tmp_path / "one").digest
    os.remove(tmp_path / "one/a/3.jpg")
    assert len({one.digest, longer, renamed, FolderSource(tmp_path / "one").digest}) == 4


def test_arrays():
    pixels = np.arange(2 * 4 * 5, dtype=np.uint8).reshape(2, 4, 5)
    source = ArraySource(pixels, [1, 0], ["x", "y"], "train")
    assert len(source) == 2 and source.channels == 1 and not source.encoded
    assert source.name(1) == "train[1]" and source.read(1).shape == (4, 5, 1)
    np.testing.assert_array_equal(source.feed(np.array([1, 0, 1]))[..., 0], pixels[[1, 0, 1]])
    np.testing.assert_array_equal(source.sizes(np.array([0, 1])), [[4, 5], [4, 5]])
    changed = pixels.copy()
    changed[1, 3, 4] ^= 1
    digests = {ArraySource(a, b).digest for a, b in ((pixels, [1, 0]), (changed, [1, 0]), (pixels, [0, 0]))}
    assert len(digests) == 3 and source.digest in digests
    assert ArraySource(list(pixels), [1, 0]).digest == source.digest
    unlike = ArraySource([np.zeros((1, 1, 3), np.uint8), np.zeros((3, 300, 3), np.uint8)])
    np.testing.assert_array_equal(unlike.sizes(np.array([1, 0])), [[3, 300], [1, 1]])
    assert [image.shape for image in unlike.feed(np.array([1, 0]))] == [(3, 300, 3), (1, 1, 3)]


def write_idx(file, array):
    content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


@pytest.mark.parametrize(("dot", "end"), [("-", ".gz"), ("-", ""), (".", "")])
def test_idx(tmp_path, dot, end):
    rng = np.random.default_rng(0)
    pixels = {stem: rng.integers(0, 256, (count, 6, 5), np.uint8) for stem, count in (("train", 7), ("t10k", 3))}
    labels = {stem: rng.integers(0, 10, len(images)).astype(np.uint8) for stem, images in pixels.items()}
    for stem in pixels:
        write_idx(tmp_path / f"{stem}-images{dot}idx3-ubyte{end}", pixels[stem])
        write_idx(tmp_path / f"{stem}-labels{dot}idx1-ubyte{end}", labels[stem])
    spec = DataSpec(path=str(tmp_path), channels=1)
    assert has_test_split(spec)
    for split, stem in (("train", "train"), ("test", "t10k")):
        source = open_source(spec, split)
        np.testing.assert_array_equal(source.feed(np.arange(len(source)))[..., 0], pixels[stem])
        np.testing.assert_array_equal(source.labels, labels[stem])
        assert source.name(2) == f"{split}[2]"


def test_a_cut_idx_file_is_named(tmp_path):
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(2, np.uint8))
    whole = tmp_path / "train-images-idx3-ubyte"
    write_idx(whole, np.zeros((2, 4, 4), np.uint8))
    content = whole.read_bytes()
    for cut in (content[:-1], content[:9], b"", b"text"):
        whole.write_bytes(cut)
        with pytest.raises(InputError, match="train-images-idx3-ubyte: is no IDX file"):
            open_source(DataSpec(path=str(tmp_path)), "train")
    whole.unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content)[:-5])
    with pytest.raises(InputError, match=r"\.gz: cannot be read"):
        open_source(DataSpec(path=str(tmp_path)), "train")


def write_cifar(folder, hundred):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    files = ["train", "test"] if hundred else [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]
    label = b"fine_labels" if hundred else b"labels"
    written = []
    for name in files:
        batch = {b"data": rng.integers(0, 256, (4, 3072), np.uint8), label: rng.integers(0, 10, 4).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        written.append(batch)
    key = b"fine_label_names" if hundred else b"label_names"
    classes = {key: [f"class {n}".encode() for n in range(10)]}
    (folder / ("meta" if hundred else "batches.meta")).write_bytes(pickle.dumps(classes, protocol=2))
    return written


@pytest.mark.parametrize("hundred", [False, True])
@pytest.mark.parametrize("below", [False, True])
def test_cifar(tmp_path, hundred, below):
    folder = tmp_path / ("cifar-100-python" if hundred else "cifar-10-batches-py")
    written = write_cifar(folder, hundred)
    spec = DataSpec(path=str(tmp_path if below else folder))
    train, test = (open_source(spec, split) for split in ("train", "test"))
    assert len(train) == 4 * (len(written) - 1) and len(test) == 4
    label = b"fine_labels" if hundred else b"labels"
    assert test.labels.tolist() == written[-1][label] and train.classes[3] == "class 3"
    planes = written[0][b"data"][2].reshape(3, 32, 32)
    np.testing.assert_array_equal(train.read(2), planes.transpose(1, 2, 0))


def test_a_cifar_file_cannot_run_a_program(tmp_path):
    write_cifar(tmp_path / "c", False)

    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    (tmp_path / "c/data_batch_2").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(InputError, match="data_batch_2: is no readable CIFAR batch"):
        open_source(DataSpec(path=str(tmp_path / "c")), "train")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [{}, {b"data": "text", b"labels": [0]}, [1, 2], {"data": np.zeros((2, 3072), np.uint8)}]
)
def test_a_pickle_that_is_no_cifar_batch_is_named(tmp_path, content):
    write_cifar(tmp_path / "c", False)
    (tmp_path / "c/data_batch_2").write_bytes(pickle.dumps(content))
    with pytest.raises(InputError, match="c holds no CIFAR batches .*; unpack the archive again"):
        open_source(DataSpec(path=str(tmp_path / "c")), "train")


def damaged(whole):
    """With one byte changed: each near the start, some anywhere; and cut."""
    random = np.random.default_rng(0)
    for place in [*range(min(80, len(whole))), *random.integers(0, len(whole), 80)]:
        yield whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]
    for place in random.integers(0, len(whole), 20):
        yield whole[:place]


@pytest.mark.parametrize("kind", ["cifar", "npz", "npy", "idx", "idx.gz", "tar", "tar index", "csv", "jsonl"])
def test_whatever_damage_makes_of_a_file_it_is_read_or_named(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pixels = np.arange(4 * 64, dtype=np.uint8).reshape(4, 8, 8)
    file = path = tmp_path / f"set.{kind.split()[0]}"
    match kind:
        case "cifar":
            write_cifar(path, False)
            file = path / "data_batch_1"
        case "npz":
            np.savez_compressed(file, images=pixels)
        case "npy":
            np.save(file, pixels)
        case "idx" | "idx.gz":
            path, end = tmp_path, kind.removeprefix("idx")
            file = tmp_path / f"train-images-idx3-ubyte{end}"
            write_idx(file, pixels)
            write_idx(tmp_path / f"train-labels-idx1-ubyte{end}", np.zeros(4, np.uint8))
        case "tar" | "tar index":
            with tarfile.open(file, "w") as tar:
                write_images(tmp_path, ["0.png", "1.png"])
                for name in ("0.png", "1.png"):
                    tar.add(tmp_path / name, name)
        case "csv" | "jsonl":
            write_images(tmp_path, ["0.png", "1.png"])
            rows = "path,label\n0.png,a\n1.png,b\n"
            lines = '{"path": "0.png", "label": "a"}\n{"path": "1.png", "label": "b"}\n'
            file.write_text(rows if kind == "csv" else lines)
    open_source(DataSpec(path=str(path)), "train")
    if kind == "tar index":
        (file,) = tmp_path.glob("*.tar?*")
    refused = 0
    for content in damaged(file.read_bytes()):
        file.write_bytes(content)
        try:
            open_source(DataSpec(path=str(path)), "train")
        except InputError as error:
            refused += 1
            assert str(tmp_path) in str(error) and "\n" not in str(error)
    assert refused > 10 or kind == "tar index"  # which is made anew


def test_what_is_not_there_is_named_with_the_remedy(tmp_path):
    def message(split="train", **values):
        with pytest.raises(InputError) as caught:
            open_source(DataSpec(**values), split)
        text = str(caught.value)
        assert "\n" not in text
        return text

    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("x")
    assert message().startswith("data.path: is not set")
    assert message(path=f"{tmp_path}/none").startswith(f"data.path: {tmp_path}/none is not a folder")
    assert f"data.path: {empty} holds no images (1 other files passed over)" in message(path=str(empty))
    assert "data.test_path: is not set" in message("test", path=str(empty))
    assert message("test", path=str(empty), test_path="/none").startswith("data.test_path: /none is not a folder")
    for values in ({"path": str(empty), "kind": "idx"}, {"path": f"{tmp_path}/fashion-mnist"}):
        text = message(**values)
        assert "apt-get install dataset-fashion-mnist" in text and "data.path=FOLDER" in text
    assert "cifar-10-python.tar.gz" in message(path=str(empty), kind="cifar")
    assert not has_test_split(DataSpec(path=str(empty)))
    assert has_test_split(DataSpec(path=str(empty), test_path="x"))


def test_test_images_of_folders(tmp_path):
    write_images(tmp_path, ["train/a/1.jpg", "train/b/1.jpg", "test/b/2.jpg"])
    spec = DataSpec(path=str(tmp_path / "train"), test_path=str(tmp_path / "test"))
    assert len(open_source(spec, "train")) == 2
    test = open_source(spec, "test")
    assert names(test) == ["b/2.jpg"]
    assert test.labels.tolist() == [1] and test.classes == ["a", "b"], "numbered as in training"
    assert Image.open(open_source(spec, "test").path(0)).size == (12, 12)
    write_images(tmp_path, ["test/c/2.jpg"])
    with pytest.raises(InputError, match=r"data\.test_path: the class 'c' is not in .*train"):
        open_source(spec, "test")


def test_test_images_need_labels_beside_them(tmp_path):
    """The image that takes the labels from all is named, of joined folders too."""
    write_images(tmp_path, ["a/x/1.jpg", "b/x/1.jpg", "b/stray.jpg", "test/x/2.jpg"])
    labelled, both = str(tmp_path / "a"), [str(tmp_path / "a"), str(tmp_path / "b")]
    found = {}
    for name, paths in (("labelled", labelled), ("both", both)):
        spec = DataSpec(path=paths, test_path=str(tmp_path / "test"))
        found[name] = spec, open_source(spec, "train")
    assert names(open_test(*found["labelled"])) == ["x/2.jpg"]
    with pytest.raises(InputError, match=r"data\.path: .* has no labels \(.*/b/stray\.jpg has no class\)"):
        open_test(*found["both"])
    assert open_test(DataSpec(path=both), found["both"][1]) is None
