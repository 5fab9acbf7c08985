"""Every format of docs/data.md: what training, evaluation and check-data make of it. Cases 2 and 15."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zoo
from PIL import Image

from dali import formats
from dali.errors import InputError
from dali.interface import EncodedSource
from dali.loader import CheckLoader, EvalLoader, TwoViewLoader
from dali.order import Shard
from dali.sources import FolderSource, exclude_line, open_source, read_exclude_list
from dali.spec import DataSpec, ViewsSpec
from dali.torchvision_reference import original
from pipeline.commands import check_data

ROOT = Path(__file__).parents[2]
ALONE = Shard(0, 1)
WHOLE = ViewsSpec(
    size=zoo.HEIGHT,
    test_crop=1,
    mean=(0, 0, 0),
    std=(1, 1, 1),
    jitter={"prob": 0},
    grey=0,
    blur=(0, 0),
    solarize=(0, 0),
)
EXACT = 1.01  # level of 255: decoders round, and normalising does a little


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    zoo.write(folder, {name: content for name, (content, _) in zoo.good().items()})
    return folder


@pytest.fixture(scope="module")
def shown(folder):
    """What evaluation shows of each file, by name: (32, 32, 3) levels."""
    source = FolderSource(folder)
    with EvalLoader(source, WHOLE, channels=3, batch=16, shard=ALONE) as loader:
        pixels = [image for batch in loader for image in batch.images.permute(0, 2, 3, 1).numpy() * 255]
    return {source.name(index): image for index, image in enumerate(pixels)}


@pytest.mark.parametrize("name", list(zoo.good()))
def test_a_format_is_decoded_as_documented(shown, name):
    """Upright, without alpha, 16 bits by their high byte: the middle of the picture, as PIL has it."""
    pixels = zoo.good()[name][1]
    height, width = pixels.shape[:2]
    assert min(height, width) == zoo.HEIGHT, "so that evaluation only cuts"
    top, left = (round((side - zoo.HEIGHT) / 2) for side in (height, width))
    expected = pixels[top : top + zoo.HEIGHT, left : left + zoo.HEIGHT]
    assert np.abs(shown[name] - expected).max() <= EXACT


def test_pil_reads_the_originals_as_documented(folder):
    """For torchvision's views of the same images."""
    source = FolderSource(folder)
    for index in range(len(source)):
        pixels = zoo.good()[source.name(index)][1]
        np.testing.assert_array_equal(original(source, index, 3), pixels, source.name(index))
        grey = np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
        assert np.abs(original(source, index, 1) - grey.astype(int)).max() <= 1, source.name(index)


def test_what_pil_cannot_read_is_named(tmp_path):
    zoo.write(tmp_path, {name: content for name, (content, _) in zoo.bad().items()})
    source = FolderSource(tmp_path)
    for name in ("text.jpg", "cut_at_60_per_cent.jpg", "cut_in_half.png"):
        index = next(index for index in range(len(source)) if source.name(index) == name)
        with pytest.raises(InputError, match=f"'{name}': PIL cannot read it"):
            original(source, index, 3)


def test_training_sees_the_pixels_that_evaluation_sees(folder, shown):
    """Case 15's other half: with the whole picture as crop, a view is the picture."""
    views = WHOLE.model_copy(update={"crop_area": (1, 1), "crop_ratio": (1.5, 1.5), "flip": 0, "size": zoo.HEIGHT})
    upright = [name for name, (_, pixels) in zoo.good().items() if pixels.shape[:2] == (zoo.HEIGHT, zoo.WIDTH)]
    source = FolderSource(folder)
    with TwoViewLoader(source, views, channels=3, seed=0, global_batch=len(source), shard=ALONE, stop_step=1) as loader:
        batch = next(loader)
    seen = {
        source.name(index): y.permute(1, 2, 0).numpy() * 255 for index, y in zip(batch.indices, batch.y1, strict=True)
    }
    for name in upright:
        whole = np.asarray(
            Image.fromarray(zoo.good()[name][1]).resize((zoo.HEIGHT, zoo.HEIGHT), Image.Resampling.BICUBIC)
        )
        assert np.abs(seen[name] - whole).mean() < 1.5, name


def test_grey_is_the_same_from_every_format(folder):
    grey = ViewsSpec(size=zoo.HEIGHT, test_crop=1, mean=(0,), std=(1,))
    source = FolderSource(folder)
    with EvalLoader(source, grey, channels=1, batch=16, shard=ALONE) as loader:
        images = [image[0].numpy() * 255 for batch in loader for image in batch.images]
    names = [source.name(index) for index in range(len(source))]
    plain = images[names.index("rgb.ppm")]
    for name in ("rgb.png", "lossless.webp", "rgb.bmp", "rgb.tif", "lzw.tif", "rgb16.png", "cmyk.tif"):
        assert np.abs(images[names.index(name)] - plain).max() <= EXACT, name


def test_check_data_names_every_bad_file_with_its_reason(tmp_path, monkeypatch, capsys):
    """Case 2, the list: good images between them are not blamed, copies are found, and training then goes through."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    good = {f"{'ab'[number % 2]}/{name}": content for number, (name, (content, _)) in enumerate(zoo.good().items())}
    bad = {f"a/{name}": content for name, (content, _) in zoo.bad().items()}
    odd = 'b/# with blank, "quote"\nand line.jpg'
    zoo.write(data, good | bad | {odd: b"no image", "b/copy.jpg": good["a/jpeg.jpg"], "b/notes.txt": b"x"})
    assert check_data.run([str(data)]) == 1
    out = capsys.readouterr().out
    for name, (_, reason) in zoo.bad().items():
        line = next(line for line in out.splitlines() if f"'a/{name}': " in line)
        assert reason in line, line
    assert f"bad      {len(bad) + 1}\n" in out and "1 other files passed over" in out
    assert "copies   2: " in out and "'b/copy.jpg' = 'a/jpeg.jpg'" in out and "= 'a/png_called.jpg'" in out
    assert "classes  2: 'a' " in out and "JPEG " in out and f"{zoo.WIDTH} x {zoo.HEIGHT}" in out
    spec = DataSpec(path=str(data), exclude=str(tmp_path / "exclude.txt"))
    source = open_source(spec, "train")
    assert {source.name(i) for i in range(len(source))} == {*good, "b/copy.jpg"}
    assert source.excluded == len(bad) + 1 and source.digest != FolderSource(data).digest
    assert check_data.run([str(data), f"data.exclude={tmp_path}/exclude.txt"]) == 0
    assert len(source.labels) == len(source) and set(source.labels.tolist()) == {0, 1}


def test_a_bad_image_takes_none_of_the_same_name_from_the_other_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture = next(iter(zoo.good().values()))[0]
    names = ["a/0.png", "a/1.png", "b/test:2.png"]
    for split, bad in (("train", "a/0.png"), ("test", "a/1.png")):
        zoo.write(tmp_path / split, {name: b"no image" if name == bad else picture for name in names})
    words = [f"data.path={tmp_path}/train", f"data.test_path={tmp_path}/test"]
    assert check_data.run([str(ROOT / "configs/base.yaml"), *words]) == 1
    spec = DataSpec(path=str(tmp_path / "train"), test_path=str(tmp_path / "test"), exclude="exclude.txt")
    for split, left in (("train", names[1:]), ("test", [names[0], names[2]])):
        source = open_source(spec, split)
        assert [source.name(index) for index in range(len(source))] == left and source.excluded == 1
    for name in ("test:a.png", '"b', "c d"):
        for split, other in (("train", "test"), ("test", "train")):
            Path("list.txt").write_text(exclude_line(name, split) + "\n")
            assert read_exclude_list(Path("list.txt")) == {split: {name}, other: set()}


def test_a_list_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(check_data, "check", lambda *words: pytest.fail("decoded"))
    zoo.write(tmp_path / "data", {"a/0.png": b"x"})
    with pytest.raises(InputError, match=r"--write: .*/nowhere/list cannot be written \(No such file"):
        check_data.run([str(tmp_path / "data"), "--write", str(tmp_path / "nowhere" / "list")])
    with pytest.raises(pytest.fail.Exception):
        check_data.run([str(tmp_path / "data"), "--write", str(tmp_path / "list")])
    assert not (tmp_path / "list").exists()


def test_a_folder_that_we_may_not_read_is_one_line(tmp_path):
    """As root everything may be read: in a process that is another user."""
    (tmp_path / "data").mkdir(mode=0o700)
    code = (
        "import os, sys\nfrom dali.errors import InputError\nfrom dali.sources import has_test_split, open_source\n"
        "from dali.spec import DataSpec\n"
        "if os.geteuid() == 0: os.setuid(65534)\nelse: os.chmod(sys.argv[1], 0)\n"
        "for look in (has_test_split, lambda spec: open_source(spec, 'train')):\n"
        "    try: look(DataSpec(path=sys.argv[1] + '/mine'))\n"
        "    except InputError as error: print(error)\n"
    )
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "data"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith("data.path: ") and "Permission denied" in line for line in lines)


def test_a_huge_image_is_refused_by_its_header(tmp_path, monkeypatch):
    """60,000 x 60,000 pixels of which not one is there: decoding would ask for 10 GB."""
    content = bytearray(zoo.good()["rgb.bmp"][0])
    content[18:26] = np.array([60_000, 60_000], "<i4").tobytes()
    zoo.write(tmp_path, {"a.png": zoo.good()["rgb.png"][0], "huge.bmp": bytes(content)})
    source = open_source(DataSpec(path=str(tmp_path)), "train")
    for make in (
        lambda: TwoViewLoader(source, WHOLE, channels=3, seed=0, global_batch=2, shard=ALONE),
        lambda: EvalLoader(source, WHOLE, channels=3, batch=2, shard=ALONE),
    ):
        with (
            make() as loader,
            pytest.raises(InputError, match=r"'huge.bmp' .*60000 x 60000 pixels by its header, .*max_p"),
        ):
            next(loader)
    small = open_source(DataSpec(path=str(tmp_path), max_pixels=zoo.WIDTH * zoo.HEIGHT - 1), "train")
    with CheckLoader(small, channels=3, batch=2, threads=1) as loader:
        _, sizes, bad = next(loader)
    assert sorted(bad) == [0, 1] and not sizes.any()
    exact = open_source(DataSpec(path=str(tmp_path), max_pixels=zoo.WIDTH * zoo.HEIGHT), "train")
    with CheckLoader(exact, channels=3, batch=2, threads=1) as loader:
        _, sizes, bad = next(loader)
    assert sorted(bad) == [1] and sizes[0].tolist() == [zoo.HEIGHT, zoo.WIDTH]


def test_evaluation_leaves_bad_images_out_only_if_asked_to(tmp_path):
    zoo.write(tmp_path, {f"a/{number}.png": zoo.good()["rgb.png"][0] for number in range(6)})
    for name in ("1", "2", "3"):
        (tmp_path / f"a/{name}.png").write_bytes(b"no image")
    os.truncate(tmp_path / "a/5.png", 100)
    source = open_source(DataSpec(path=str(tmp_path), on_bad_file="skip"), "train")
    with EvalLoader(source, WHOLE, channels=3, batch=2, shard=ALONE) as loader:
        batches = list(loader)
    assert [index for batch in batches for index in batch.indices] == [0, 4] and loader.left_out == 4
    assert all(len(batch.labels) == len(batch.images) == len(batch.indices) for batch in batches)


def test_a_file_that_changed_since_it_was_listed_is_found_when_it_is_read(tmp_path):
    zoo.write(tmp_path, {"a.png": zoo.good()["rgb.png"][0], "b.png": zoo.good()["grey.png"][0]})
    source = FolderSource(tmp_path)
    (tmp_path / "b.png").write_bytes(zoo.good()["rgb.png"][0] + b"more")
    with EvalLoader(source, WHOLE, channels=3, batch=2, shard=ALONE) as loader:
        with pytest.raises(InputError, match=r"'b.png' .*bytes, had .*when it was listed"):
            next(loader)


def test_formats_are_known_by_their_first_bytes():
    found = {name: formats.format_of(content[:16]) for name, (content, _) in zoo.good().items()}
    suffixes = {".jpg": "JPEG", ".png": "PNG", ".webp": "WebP", ".bmp": "BMP", ".tif": "TIFF", ".jp2": "JPEG 2000"}
    suffixes |= {".ppm": "PNM", ".pgm": "PNM"}
    for name, kind in found.items():
        assert kind == ("PNG" if name == "png_called.jpg" else suffixes[os.path.splitext(name)[1]]), name
    assert issubclass(FolderSource, EncodedSource)
