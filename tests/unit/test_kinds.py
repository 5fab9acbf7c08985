"""The same images as folder, list, tar shards, arrays, or several joined: the same samples, views and labels."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from images import crops, write_images
from PIL import Image

from dali import cache, folders, shards
from dali.errors import InputError
from dali.loader import EvalLoader, TwoViewLoader
from dali.order import Shard
from dali.sources import exclude_line, open_source
from dali.spec import DataSpec, ViewsSpec

VIEWS = ViewsSpec(size=24)
COUNT = 8


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_tree(root, count=COUNT):
    """PNGs root/a|b/NUMBER.png of unlike sizes."""
    for number, pixels in enumerate(crops(count, size=20)):
        file = root / "ab"[number * 2 // count] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    return sorted(root.glob("*/*.png"))


def write_tar(tar_file, files, root, label="cls", suffix=".png"):
    with tarfile.open(tar_file, "w", errors="surrogateescape") as tar:
        for file in files:
            stem = f"{file.parent.name}/{file.stem}"
            content = {".cls": file.parent.name, ".json": json.dumps({"label": file.parent.name})}[f".{label}"]
            for name, data in ((f"{stem}{suffix}", file.read_bytes()), (f"{stem}.{label}", content.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def as_list(files, target):
    rows = [{"path": os.path.relpath(file, target.parent), "label": file.parent.name} for file in files]
    with target.open("w", newline="", errors="surrogateescape") as stream:
        if target.suffix == ".csv":
            writer = csv.DictWriter(stream, ["label", "path"])
            writer.writeheader()
            writer.writerows(rows)
        else:
            stream.write("\n".join(map(json.dumps, rows)) + "\n\n")


@pytest.fixture
def paths(tmp_path):
    """The same eight images in every form, in the same order: what data.path would be."""
    files = write_tree(tmp_path / "tree")
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "one.tar", files, tmp_path)
    write_tar(tmp_path / "shards/0.tar", files[:3], tmp_path, "json", ".PNG")
    write_tar(tmp_path / "shards/1.tar", files[3:], tmp_path, "json")
    as_list(files, tmp_path / "list.csv")
    as_list(files, tmp_path / "list.jsonl")
    for half, part in (("first", files[:3]), ("second", files[3:])):
        (tmp_path / half).mkdir()
        as_list(part, tmp_path / half / "list.jsonl")
        write_tar(tmp_path / f"{half}.tar", part, tmp_path)
    return {
        "tree": str(tmp_path / "tree"),
        "tar": str(tmp_path / "one.tar"),
        "shards": str(tmp_path / "shards"),
        "csv": str(tmp_path / "list.csv"),
        "jsonl": str(tmp_path / "list.jsonl"),
        "lists": (str(tmp_path / "first/list.jsonl"), str(tmp_path / "second/list.jsonl")),
        "list and tar": (str(tmp_path / "first/list.jsonl"), str(tmp_path / "second.tar")),
    }


def views_of(source, **how):
    with TwoViewLoader(
        source, VIEWS, channels=3, seed=1, global_batch=4, shard=Shard(0, 1), stop_step=3, **how
    ) as loader:
        return [tuple(np.asarray(part).tobytes() for part in batch) for batch in loader]


def test_every_form_gives_the_same_views_bit_for_bit(paths):
    tree = open_source(DataSpec(path=paths["tree"]), "train")
    expected = views_of(tree)
    assert len({batch[0] for batch in expected}) == 3
    for form, path in paths.items():
        source = open_source(DataSpec(path=path), "train")
        assert len(source) == COUNT and source.classes == ["a", "b"], form
        assert source.labels.tolist() == tree.labels.tolist(), form
        assert [source.read(i).tobytes() for i in range(COUNT)] == [tree.read(i).tobytes() for i in range(COUNT)], form
        assert views_of(source) == expected, form
    assert len({open_source(DataSpec(path=path), "train").digest for path in paths.values()}) >= 4


@pytest.mark.parametrize("form", ["shards", "list and tar"])
def test_evaluation_reads_every_form(paths, form):
    def images(path):
        with EvalLoader(
            open_source(DataSpec(path=path), "train"), VIEWS, channels=3, batch=3, shard=Shard(0, 1)
        ) as loader:
            return [(batch.images.numpy().tobytes(), batch.labels.tolist()) for batch in loader]

    assert images(paths[form]) == images(paths["tree"])


ODD_NAMES = ["with blank/x y.png", "ünï/文 .png", "line\nbreak/1\n.png", "quo'te\"d/,;#.png", "not/utf-8 \udcff.png"]


def test_odd_names_work_in_every_form(tmp_path):
    for name, pixels in zip(ODD_NAMES, crops(len(ODD_NAMES), size=20), strict=True):
        (tmp_path / "a tree" / name).parent.mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "a tree" / name)
    tree = open_source(DataSpec(path=str(tmp_path / "a tree")), "train")
    names = [tree.name(index) for index in range(len(tree))]
    assert sorted(names) == sorted(ODD_NAMES)
    files = [tmp_path / "a tree" / name for name in names]
    forms = {form: tmp_path / f"new\nline.{form}" for form in ("csv", "jsonl", "tar")}
    as_list(files, forms["csv"])
    as_list(files, forms["jsonl"])
    write_tar(forms["tar"], files, tmp_path)
    expected = views_of(tree)
    for form, path in forms.items():
        source = open_source(DataSpec(path=str(path)), "train")
        assert [source.name(index).split("/", 1)[1] for index in range(len(source))] == names, form
        assert views_of(source) == expected, form
        for name in (source.name(index) for index in range(len(source))):
            (tmp_path / "exclude").write_text(exclude_line(name) + "\n", errors="surrogateescape")
            left = open_source(DataSpec(path=str(path), exclude=str(tmp_path / "exclude")), "train")
            assert len(left) == len(names) - 1 and left.excluded == 1, (form, name)


def test_names_say_where_an_image_is_and_excluding_is_by_name(paths, tmp_path):
    for form, name in (
        ("tree", "a/2.png"),
        ("tar", "one.tar/a/2.png"),
        ("csv", "tree/a/2.png"),
        ("list and tar", f"{paths['list and tar'][0]}/../tree/a/2.png"),
    ):
        whole = open_source(DataSpec(path=paths[form]), "train")
        assert whole.name(2) == name
        (tmp_path / "exclude").write_text(f"# a comment\n{json.dumps(name)}\nnot/there.png\n")
        less = open_source(DataSpec(path=paths[form], exclude=str(tmp_path / "exclude")), "train")
        assert len(less) == COUNT - 1 and less.excluded == 1 and less.digest != whole.digest, form
        assert name not in [less.name(i) for i in range(len(less))]
        assert less.read(2).tobytes() == whole.read(3).tobytes() and less.labels[2] == whole.labels[3]
        assert less.lengths(np.arange(7)).tolist() == [len(less.read(i)) for i in range(7)]
    none = tmp_path / "none"
    none.write_text("nothing\n")
    same = open_source(DataSpec(path=paths["tree"], exclude=str(none)), "train")
    assert same.digest == open_source(DataSpec(path=paths["tree"]), "train").digest, "the same images"
    none.write_text("".join(f"{same.name(i)}\n" for i in range(COUNT)))
    with pytest.raises(InputError, match=r"data\.exclude: .* names all 8 images"):
        open_source(DataSpec(path=paths["tree"], exclude=str(none)), "train")
    with pytest.raises(InputError, match=r"data\.exclude: .*/gone: No such file"):
        open_source(DataSpec(path=paths["tree"], exclude=str(tmp_path / "gone")), "train")


def test_the_digest_tells_changed_images_and_labels(paths, tmp_path):
    def digest(path):
        return open_source(DataSpec(path=path), "train").digest

    before = {form: digest(path) for form, path in paths.items()}
    assert before == {form: digest(path) for form, path in paths.items()}
    rows = Path(paths["jsonl"]).read_text()
    Path(paths["jsonl"]).write_text(rows.replace('"label": "a"', '"label": "c"', 1))
    assert digest(paths["jsonl"]) != before["jsonl"]
    files = sorted((tmp_path / "tree").glob("*/*.png"))
    write_tar(tmp_path / "one.tar", [*files[1:], files[0]], tmp_path)
    assert digest(paths["tar"]) != before["tar"], "the order is another"
    assert digest(paths["lists"]) != digest(paths["lists"][::-1])
    named = json.loads(Path(paths["jsonl"]).read_text().splitlines()[0])["path"]
    changed = digest(paths["jsonl"])
    with (Path(paths["jsonl"]).parent / named).open("ab") as file:
        file.write(b" ")
    assert digest(paths["jsonl"]) != changed, "a file that a list names has another length"


def test_shards_are_indexed_once_and_anew_when_they_change(paths, tmp_path, monkeypatch):
    counted = []
    build = shards._members
    monkeypatch.setattr(shards, "_members", lambda *args: counted.append(args[0].name) or build(*args))
    spec = DataSpec(path=paths["shards"])
    first = open_source(spec, "train")
    assert counted == ["0.tar", "1.tar"]
    assert open_source(spec, "train").digest == first.digest and len(counted) == 2
    assert (tmp_path / "shards/.0.tar.index.npz").is_file()
    changed = (tmp_path / "shards/0.tar").stat().st_mtime_ns
    files = sorted((tmp_path / "tree").glob("*/*.png"))
    write_tar(tmp_path / "shards/0.tar", [*files[1:], *files], tmp_path, "json")
    os.utime(tmp_path / "shards/0.tar", ns=(changed, changed))
    assert len(open_source(spec, "train")) == 20, "another size"
    os.utime(tmp_path / "shards/0.tar", ns=(changed + 1, changed + 1))
    open_source(spec, "train")
    assert len(counted) == 4, "another time"
    (tmp_path / "shards/.0.tar.index.npz").write_bytes(b"damaged")
    assert len(open_source(spec, "train")) == 20


def test_an_index_goes_to_the_cache_where_the_shards_cannot_be_written(tmp_path):
    target = tmp_path / "cache/barlow-horovod/x.npz"
    written = cache.store([Path("/proc/nowhere/x.npz"), target], {"version": 1, "a": np.arange(3)})
    assert written == target
    assert cache.load(target, "a", version=2) is None and cache.load(target, "a", version=1)["a"].tolist() == [0, 1, 2]


def test_a_folder_without_any_place_for_its_list_says_so(tmp_path, capsys):
    assert cache.store([Path("/proc/nowhere/x.npz")], {}) is None
    assert "warning: /proc/nowhere/x.npz cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["v1.2", "v1.1"])
def test_dalis_own_index_is_read_and_must_belong_to_the_shard(paths, tmp_path, version, monkeypatch):
    shard, index = tmp_path / "one.tar", tmp_path / "one.idx"
    expected = open_source(DataSpec(path=str(shard)), "train")
    (tmp_path / ".one.tar.index.npz").unlink()
    wds2idx = Path(sys.executable).parent / "wds2idx"
    subprocess.run([wds2idx, shard, index], check=True, capture_output=True)
    if version == "v1.1":  # the same without names
        head, *lines = index.read_text().splitlines()
        without = [" ".join(w for k, w in enumerate(line.split(" ")) if k % 4 != 3) for line in lines]
        index.write_text("\n".join([head.replace("v1.2", "v1.1"), *without]) + "\n")
    monkeypatch.setattr(shards, "_members", lambda *args: pytest.fail("the tar was walked"))
    found = open_source(DataSpec(path=str(shard)), "train")
    assert found.digest == expected.digest
    (tmp_path / ".one.tar.index.npz").unlink()
    right = index.read_text()
    extension, offset, length, *name = right.split("\n")[1].split(" ")[: 4 if version == "v1.2" else 3]
    before = " ".join([extension, offset, length, *name])
    wrong = [
        right.replace(before, " ".join([extension, offset, str(int(length) - 1), *name]), 1),
        right.replace(before, " ".join([extension, str(int(offset) + 512), length, *name]), 1),
        right.replace(before, " ".join(["jpg", offset, length, *name]), 1),
        right.replace("v1.", "v9.", 1),
    ]
    if version == "v1.2":
        wrong.append(right.replace(name[0], "a/9.png", 1))
    for text in wrong:
        index.write_text(text)
        with pytest.raises(InputError, match=r"one\.idx: is not DALI's index of one\.tar; make it again"):
            open_source(DataSpec(path=str(shard)), "train")
    index.write_text(right)
    write_tar(shard, sorted((tmp_path / "tree").glob("*/*.png"))[1:], tmp_path)
    with pytest.raises(InputError, match=r"one\.idx: is not DALI's index"):
        open_source(DataSpec(path=str(shard)), "train")


def test_members_that_are_no_samples_are_counted_and_masks_are_no_images(tmp_path):
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "PNG")
    names = ["x/1.png", "x/1.mask.png", "x/1.txt", "._1.png", "y/1.jpg", "y/1.png", "lonely.cls"]
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(content.getvalue())
            tar.addfile(member, io.BytesIO(content.getvalue()))
    source = open_source(DataSpec(path=str(tmp_path)), "train")
    assert [source.name(i) for i in range(len(source))] == ["s.tar/x/1.png", "s.tar/y/1.jpg"]
    assert source.ignored == 5 and source.labels is None


def test_labels_that_are_numbers_stand_for_themselves(tmp_path):
    write_images(tmp_path, ["1.png", "2.png", "3.png"])
    (tmp_path / "n.jsonl").write_text("".join(f'{{"path": "{n}.png", "label": {n * 5}}}\n' for n in (2, 1, 3)))
    (tmp_path / "t.csv").write_text("path,label\n1.png,10\n")
    (tmp_path / "u.csv").write_text("path,label\n1.png,x\n")
    spec = DataSpec(path=str(tmp_path / "n.jsonl"), test_path=str(tmp_path / "t.csv"))
    source = open_source(spec, "train")
    assert source.labels.tolist() == [10, 5, 15] and source.classes[10] == "10" and len(source.classes) == 16
    test = open_source(spec, "test")
    assert test.labels.tolist() == [10] and test.classes == source.classes
    with pytest.raises(InputError, match=r"data\.test_path: the class 'x' is not in .*n\.jsonl"):
        open_source(DataSpec(path=str(tmp_path / "n.jsonl"), test_path=str(tmp_path / "u.csv")), "test")


def test_arrays_from_files(tmp_path):
    pixels = np.arange(5 * 6 * 7, dtype=np.uint8).reshape(5, 6, 7)
    np.savez(tmp_path / "both.npz", images=pixels, labels=np.array(["x", "y", "x", "y", "x"]))
    np.save(tmp_path / "train_images.npy", pixels)
    np.save(tmp_path / "train_labels.npy", np.arange(5))
    np.save(tmp_path / "alone.npy", np.repeat(pixels[..., None], 3, axis=3))
    both, npy, alone = (
        open_source(DataSpec(path=str(tmp_path / name)), "train")
        for name in ("both.npz", "train_images.npy", "alone.npy")
    )
    assert both.labels.tolist() == [0, 1, 0, 1, 0] and both.classes == ["x", "y"] and both.name(1) == "both.npz[1]"
    assert npy.labels.tolist() == [0, 1, 2, 3, 4] and alone.labels is None and alone.channels == 3
    np.testing.assert_array_equal(both.feed(np.arange(5))[..., 0], pixels)
    joined = open_source(DataSpec(path=(str(tmp_path / "both.npz"), str(tmp_path / "train_images.npy"))), "train")
    assert len(joined) == 10 and joined.classes == ["x", "y", "0", "1", "2", "3", "4"]
    np.testing.assert_array_equal(joined.feed(np.array([6]))[0][..., 0], pixels[1])
    np.testing.assert_array_equal(joined.sizes(np.array([1, 6])), [[6, 7], [6, 7]])
    with pytest.raises(InputError, match="cannot be joined"):
        open_source(DataSpec(path=(str(tmp_path / "both.npz"), str(tmp_path / "alone.npy"))), "train")


MISTAKES = {
    "no_path.csv": ("name,label\n1.png,a\n", r"no_path\.csv: has no column `path`"),
    "gone.csv": ("path\n1.png\nnone.png\n", r"gone\.csv, line 3: none\.png: No such file"),
    "some.csv": ("path,label\n1.png,a\n2.png,\n", r"some\.csv, line 3: 2\.png has no label"),
    "empty.jsonl": ("\n", r"empty\.jsonl names no images"),
    "broken.jsonl": ('{"path": "1.png"}\n{"path"\n', r"broken\.jsonl, line 2: is not JSON"),
    "nameless.jsonl": ('{"file": "1.png"}\n', r'nameless\.jsonl, line 1: has no "path"'),
    "float.jsonl": ('{"path": "1.png", "label": 0.5}\n', r"line 1: the label 0\.5 is no whole number"),
    "text.tar": ("this is no tar file" * 99, r"text\.tar: is no uncompressed tar file"),
    "text.npy": ("this is no array", r"text\.npy: cannot be read"),
    "photo.tar.gz": ("x", r"photo\.tar\.gz is not a folder and no file of a known kind"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_understood_is_named(tmp_path, name):
    content, expected = MISTAKES[name]
    write_images(tmp_path, ["1.png", "2.png"])
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=f"^data.path: .*{expected}") as caught:
        open_source(DataSpec(path=str(tmp_path / name)), "train")
    assert "\n" not in str(caught.value)


def test_a_folder_with_shards_and_images_wants_to_be_told(paths, tmp_path):
    shutil.copy(paths["tar"], tmp_path / "tree")
    with pytest.raises(InputError, match=r"holds shards .* and images or folders; write data\.kind"):
        open_source(DataSpec(path=paths["tree"]), "train")
    assert len(open_source(DataSpec(path=paths["tree"], kind="folder"), "train")) == COUNT
    assert open_source(DataSpec(path=paths["tree"], kind="shards"), "train").name(0) == "one.tar/a/0.png"


def test_a_cut_shard_is_named(paths, tmp_path):
    size = os.path.getsize(paths["tar"])
    os.truncate(paths["tar"], size // 2 + 100)
    with pytest.raises(InputError, match=r"one\.tar: is (no uncompressed tar file, or is )?cut"):
        open_source(DataSpec(path=paths["tar"]), "train")


def test_a_kept_list_of_a_folder_is_used_only_while_it_is_true(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "CACHE_FROM", 4)
    root = tmp_path / "data"
    write_images(root, ["a/1.png", "a/2.png", "b/1.png", "b/c/1.png"])
    walks, seen = [], []
    into = folders._Walk.into
    monkeypatch.setattr(folders._Walk, "into", lambda self, *args: walks.append(args[0]) or into(self, *args))

    def listed():
        walks.clear()
        source = open_source(DataSpec(path=str(root)), "train", lambda *args: seen.append(args))
        return [source.name(i) for i in range(len(source))], bool(walks)

    names = ["a/1.png", "a/2.png", "b/1.png", "b/c/1.png"]
    assert listed() == (names, True) and seen[-1][1:] == (4, 4)
    assert listed() == (names, True), "changed a moment ago: more changes could go unseen"
    monkeypatch.setattr(folders, "RACY_SECONDS", -3600)
    assert listed() == (names, True)
    assert listed() == (names, False)
    times = os.stat(root / "b/c")
    os.rename(root / "b/c/1.png", root / "b/c/2.png")
    os.utime(root / "b/c", ns=(times.st_atime_ns, times.st_mtime_ns))  # as rsync and tar do
    assert listed() == ([*names[:3], "b/c/2.png"], True)
    assert not listed()[1]
    # What no folder's time tells is found at reading, and the kept list is then given up.
    with (root / "a/1.png").open("ab") as file:
        file.write(b"x")
    source = open_source(DataSpec(path=str(root)), "train")
    with EvalLoader(source, VIEWS, channels=3, batch=4, shard=Shard(0, 1)) as loader:
        with pytest.raises(InputError, match=r"'a/1.png' .*when it was listed"):
            next(loader)
    assert listed()[1]
