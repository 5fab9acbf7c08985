"""`features` as typed, on the digits: its files and pictures, for a run's checkpoint and for random weights."""

import json

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from dali.errors import InputError
from pipeline import checkpoint
from pipeline.commands import features as command
from pipeline.config import dump, load
from pipeline.diagnostics import effective_rank, spectrum
from pipeline.model import build_model
from pipeline.samples import write_digits


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose only checkpoint is of step 0, on the digits."""
    root = tmp_path_factory.mktemp("features")
    write_digits(root / "digits")
    output = root / "run"
    output.mkdir()
    data = [f"data.path={root}/digits/train", f"data.test_path={root}/digits/test", "knn.batch=100"]
    model = ["model.projector=[32,16]", "train.global_batch=300", "views.size=16", f"output={output}"]
    config = load("configs/quickstart.yaml", [*data, *model])
    (output / "config.yaml").write_text(dump(config))
    state = {
        "step": 0,
        "model": build_model(config.model, 1, 16, config.seed).state_dict(),
        "optimizer": {},
        "scaler": {},
        "config": config.model_dump(mode="json"),
        "run_id": None,
        "facts": {"digest": "d", "shaping": {}, "num_samples": 1200},
    }
    checkpoint.save(output, state, keep=1, milestone=False)
    return output


@pytest.fixture(scope="module")
def done(run):
    assert command.run([str(run), "--map-images", "120"]) == 0
    return run / "features"


def test_every_test_image_is_in_the_file_once(done, run):
    table = pyarrow.parquet.read_table(done / "embeddings_test.parquet")
    names = table["name"].to_pylist()
    assert len(names) == len(set(names)) == 597
    assert table["class"].to_pylist() == [name.split("/")[0] for name in names]
    x = np.array(table["embedding"].to_pylist(), np.float32)
    assert x.shape == (597, 256) and np.isfinite(x).all() and x.std(axis=0).mean() > 1e-4
    assert table.schema.metadata[b"weights"].endswith(b"step_00000000.pt")
    config = load(run / "config.yaml")
    backbone = build_model(config.model, 1, 16, config.seed).backbone.eval()
    mean, std = config.views.mean[0], config.views.std[0]
    picture = Image.open(run.parent / "digits" / "test" / names[5]).resize((16, 16), Image.Resampling.BICUBIC)
    y = (torch.from_numpy(np.asarray(picture, np.float32))[None, None] / 255 - mean) / std
    with torch.no_grad():
        alone = backbone(y)[0]
    assert torch.cosine_similarity(alone, torch.from_numpy(x[5]), dim=0) > 0.999


def test_the_figures_are_those_of_the_embeddings(done):
    known = json.loads((done / "diagnostics.json").read_text())
    assert known["of"] == "z, the projector's" and known["images"] == 300
    x = np.array(pyarrow.parquet.read_table(done / "embeddings_test.parquet")["embedding"].to_pylist(), np.float32)
    assert known["features_effective_rank"] == pytest.approx(effective_rank(spectrum(torch.from_numpy(x))))
    assert 0 < known["c_off_rms"] < known["c_off_max"] <= 1.001 and known["c_diag_min"] <= known["c_diag_mean"] < 1
    assert 1 <= known["effective_rank"] <= 16


@pytest.mark.parametrize("name", ["map_pca", "map_tsne", "neighbours", "spectrum", "cross_correlation"])
def test_pictures_show_something(name, done):
    with Image.open(done / f"{name}.png") as picture:
        assert min(picture.size) >= 400 and len(set(picture.convert("RGB").get_flattened_data())) > 8


def test_random_features_by_name_as_npz(run, tmp_path, capsys):
    words = [str(run), "model.weights=none", "--split", "train", "--images", "40", "--format", "npz"]
    assert command.run([*words, "--to", str(tmp_path), "--queries", "2"]) == 0
    assert "weights: none: random features" in capsys.readouterr().out
    with np.load(tmp_path / "embeddings_train.npz", allow_pickle=False) as held:
        assert held["embeddings"].shape == (40, 256) and len(set(held["names"].tolist())) == 40
        assert str(held["weights"]) == "none"
    assert json.loads((tmp_path / "diagnostics.json").read_text())["of"] == "features of views"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--images", "2"], "--images: 2 is too few"),
        (["-np", "2"], "features: one process embeds all images; leave out -np, -H"),
        (["--queries", "0"], "--queries: 0 is too few"),
        (["data.path=/nowhere"], "data.path: /nowhere is not a folder"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(words, said, run):
    with pytest.raises(InputError) as caught:
        command.run([str(run), "--split", "train", *words])
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
