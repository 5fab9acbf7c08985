"""`export` as typed, and its files as other tools read them: the same features, with what must be done to an image."""

import contextlib
import json
import pickle
import re
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch.nn.functional import batch_norm, conv2d, max_pool2d

from dali.errors import InputError
from dali.loader import EvalLoader
from dali.order import Shard
from dali.sources import FolderSource
from pipeline import export, mlflow_store
from pipeline.commands import export as command
from pipeline.config import load
from pipeline.model import build_backbone
from pipeline.weights import load_backbone_weights

ROOT = Path(__file__).parents[2]
SIZE = 32
STATISTICS = {1: ["views.mean=[0.4]", "views.std=[0.2]"], 3: ["views.mean=[0.5,0.4,0.3]", "views.std=[0.3,0.2,0.25]"]}


def words(name, channels):
    size = [f"views.size={SIZE}", "model.projector=[8]"]
    return [f"model.backbone={name}", f"data.channels={channels}", *size, *STATISTICS[channels]]


def lively(name, channels):
    """A backbone whose norm layers are no identities, and whose features vary; in evaluation mode."""
    torch.manual_seed(channels)
    backbone = build_backbone(name, in_channels=channels, image_size=SIZE).train()
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.4 * torch.rand(parameter.shape) - 0.1)
        for _ in range(10):  # running statistics between those of a fresh layer and those of the images
            backbone(torch.randn(8, channels, SIZE, SIZE))
    return backbone.eval()


class Case:
    """A backbone and the folder to which the command exported it."""

    def __init__(self, folder, name, channels):
        self.name, self.channels, self.folder = name, channels, folder
        self.backbone = lively(name, channels)
        folder.mkdir(exist_ok=True)
        torch.save(self.backbone.state_dict(), folder / "weights.pth")
        self.words = [*words(name, channels), f"model.weights={folder / 'weights.pth'}"]
        code = command.run([str(ROOT / "configs/base.yaml"), *self.words, "--to", str(folder / "export")])
        assert code == 0
        self.files = folder / "export"
        self.subject = export.Subject(self.backbone, load(None, self.words), {})

    def images(self, count):
        return torch.randn(count, self.channels, SIZE, SIZE, generator=torch.Generator().manual_seed(7 + count))

    def check(self, run):
        """`run` gives the backbone's features for batches of 1, 3 and 8."""
        with torch.no_grad():
            for count in (1, 3, 8):
                images = self.images(count)
                wanted = self.backbone(images)
                assert wanted.std() > 0.01
                got = torch.as_tensor(run(images))
                torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * max(1, wanted.abs().max().item()))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The case of (name, channels), exported once."""
    return cache(lambda name, channels: Case(tmp_path_factory.mktemp("export"), name, channels))


@pytest.fixture(params=[("convnet4", 1), ("convnet4", 3), ("resnet18", 1), ("resnet18", 3)], ids=str)
def case(request, exported):
    return exported(*request.param)


@pytest.fixture
def resnet(exported):
    return exported("resnet18", 3)


def with_weights(case, state):
    backbone = build_backbone(case.name, in_channels=case.channels, image_size=SIZE).eval()
    backbone.load_state_dict(state)
    return backbone


def test_every_format_gives_the_same_features(case):
    import mlflow

    case.check(with_weights(case, torch.load(case.files / "backbone.pth", weights_only=True)))
    case.check(with_weights(case, safetensors.torch.load_file(case.files / "backbone.safetensors")))
    case.check(torch.export.load(case.files / "backbone.pt2").module())
    session = onnxruntime.InferenceSession(case.files / "backbone.onnx")
    case.check(lambda images: session.run(["features"], {"images": images.numpy()})[0])
    model = mlflow.pyfunc.load_model(str(case.files / "mlflow_model"))
    case.check(lambda images: model.predict(images.numpy()))
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, case.channels, SIZE, SIZE)
    assert model.metadata.signature.outputs.inputs[0].shape == (-1, case.backbone.feature_dim)
    with pytest.raises(mlflow.exceptions.MlflowException, match="shape"):
        model.predict(np.zeros((2, case.channels, SIZE, SIZE + 1), np.float32))
    if case.name == "resnet18":
        content = pickle.loads((case.files / "backbone_detectron2.pkl").read_bytes())
        case.check(lambda images: detectron2_resnet18(content["model"], images))
    else:
        assert not (case.files / "backbone_detectron2.pkl").exists()


def detectron2_resnet18(model, x):
    """detectron2's BasicStem and BasicBlocks (its modeling/backbone/resnet.py), from a file's names; then the mean."""
    tensors = {key: torch.from_numpy(value) for key, value in model.items()}
    used = set()

    def get(key):
        used.add(key)
        return tensors[key]

    def conv(x, name, stride, padding):
        x = conv2d(x, get(f"{name}.weight"), stride=stride, padding=padding)
        statistics = [get(f"{name}.norm.{part}") for part in ("running_mean", "running_var", "weight", "bias")]
        return batch_norm(x, *statistics, eps=1e-5)

    x = max_pool2d(conv(x, "stem.conv1", 2, 3).relu(), 3, 2, 1)
    for stage in (2, 3, 4, 5):
        for block in (0, 1):
            name = f"res{stage}.{block}"
            stride = 2 if stage > 2 and block == 0 else 1
            shortcut = conv(x, f"{name}.shortcut", stride, 0) if f"{name}.shortcut.weight" in tensors else x
            out = conv(conv(x, f"{name}.conv1", stride, 1).relu(), f"{name}.conv2", 1, 1)
            x = (out + shortcut).relu()
    assert used == tensors.keys()
    return x.mean(dim=(2, 3))


def test_the_preprocessing_travels_in_every_file(case):
    steps = json.loads((case.files / "model.json").read_text())["preprocessing"]
    config = load(None, case.words)
    assert (steps["mean"], steps["std"]) == (list(config.views.mean), list(config.views.std))
    assert (steps["channels"], steps["centre_crop"], steps["resize_short_side"]) == (case.channels, SIZE, 37)
    with safetensors.safe_open(case.files / "backbone.safetensors", "pt") as file:
        assert json.loads(file.metadata()["preprocessing"]) == steps
    properties = {item.key: item.value for item in onnx.load(case.files / "backbone.onnx").metadata_props}
    assert json.loads(properties["preprocessing"]) == steps and properties["backbone"] == case.name
    extra = {"model.json": ""}
    torch.export.load(case.files / "backbone.pt2", extra_files=extra)
    assert json.loads(extra["model.json"])["preprocessing"] == steps
    if case.name == "resnet18":
        content = pickle.loads((case.files / "backbone_detectron2.pkl").read_bytes())
        assert content["preprocessing"] == steps and content["matching_heuristics"] is True


def test_every_file_is_read_back_as_weights(case):
    for name in ("backbone.pth", "backbone.safetensors", "backbone.onnx", "backbone.pt2", "backbone_detectron2.pkl"):
        if (case.files / name).exists():
            other = build_backbone(case.name, in_channels=case.channels, image_size=SIZE)
            load_backbone_weights(other, case.files / name)
            wanted = case.backbone.state_dict()
            assert all(
                torch.equal(tensor, wanted[key])
                for key, tensor in other.state_dict().items()
                if not key.endswith("num_batches_tracked")
            ), name


def test_files_may_be_read_by_all_and_nothing_else_is_left(case):
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in case.files.iterdir())
    assert not [file for file in case.files.iterdir() if file.name.startswith(".")]


def test_the_snippets_of_the_page_work(resnet, monkeypatch):
    monkeypatch.chdir(resnet.files)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs/export.md").read_text(), re.DOTALL)
    assert len(snippets) == 6
    for snippet in snippets[:-1]:
        names = {"images": resnet.images(3)}
        exec(snippet, names)
        wanted = resnet.backbone(resnet.images(3)).detach()
        torch.testing.assert_close(names["features"].detach(), wanted, rtol=0, atol=1e-4, msg=snippet)
        about = names.get("preprocessing") or names.get("about")
        assert about is None or "centre_crop" in about
    check_images(snippets[-1], resnet)


def check_images(snippet, case):
    """torchvision by model.json sees what evaluation sees, to some levels of 255 (bicubic is not bit-equal)."""
    folder = case.folder / "photographs" / "a"
    folder.mkdir(parents=True, exist_ok=True)
    photo = Image.fromarray(load_sample_image("china.jpg")).resize((90, 60))
    for path in (folder / "photo.png", case.files / "photo.png"):
        photo.save(path)
    names = {}
    exec(snippet, names)
    config = load(None, case.words)
    with EvalLoader(FolderSource(folder), config.views, channels=3, batch=1, shard=Shard(0, 1)) as loader:
        [batch] = loader
    std = torch.tensor(config.views.std)[:, None, None]
    levels = 255 * (names["images"] - batch.images) * std
    assert levels.shape == (1, 3, SIZE, SIZE) and levels.abs().max() < 8 and levels.abs().mean() < 0.5


def drop(state):
    return {key: value for key, value in state.items() if not key.endswith("layer2.1.conv2.weight")}


def add(state):
    return state | {"layer2.7.conv2.weight": torch.zeros(2, 2, 3, 3)}


def double(state):
    key = "layer1.0.conv1.weight"
    return state | {key: 1.001 * state[key]}


@pytest.mark.parametrize("form", ["torch", "safetensors"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop, "1 missing: layer2.1.conv2.weight"),
        (add, "1 unexpected: layer2.7.conv2.weight"),
        (lambda state: state | {"fc.weight": torch.zeros(3)}, "1 tensors are not the backbone's: fc.weight"),
        (double, "features differ by"),
    ],
)
def test_a_file_that_is_not_the_backbone_is_refused_by_the_tensors_name(form, change, said, resnet, tmp_path):
    file = resnet.files / export.FORMATS[form].file
    reader, writer = {
        "torch": (torch.load, torch.save),
        "safetensors": (safetensors.torch.load_file, safetensors.torch.save_file),
    }[form]
    writer(change(reader(file)), tmp_path / file.name)
    with pytest.raises(InputError, match=said):
        export.check(resnet.subject, form, tmp_path / file.name)


def test_a_detectron2_file_that_lacks_a_tensor_or_has_one_more_is_refused(resnet, tmp_path):
    content = pickle.loads((resnet.files / "backbone_detectron2.pkl").read_bytes())
    key = "res3.1.conv2.norm.weight"
    for model, said in (
        ({k: v for k, v in content["model"].items() if k != key}, "1 missing: layer2.1.bn2.weight"),
        (content["model"] | {"res3.7.conv2.norm.weight": np.zeros(2)}, "1 unexpected: layer2.7.bn2.weight"),
    ):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps({**content, "model": model}))
        with pytest.raises(InputError, match=said):
            export.check(resnet.subject, "detectron2", tmp_path / "x.pkl")


def test_an_onnx_file_with_an_extra_tensor_is_refused(exported, tmp_path):
    case = exported("convnet4", 1)
    proto = onnx.load(case.files / "backbone.onnx")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(2, np.float32), "blocks.9.0.weight"))
    onnx.save(proto, tmp_path / "extra.onnx")
    with pytest.raises(InputError, match="1 unexpected: blocks.9.0.weight"):
        export.check(case.subject, "onnx", tmp_path / "extra.onnx")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "model.weights: is not set"),
        (["model.weights=none", "--format", "pth"], "--format: 'pth' is unknown; there are torch, safetensors"),
        (["model.weights=none", "--format", "detectron2"], "detectron2: convnet4 is no ResNet"),
        (["model.weights=none", "--format", "torch", "--register", "x"], "--register: registers the mlflow format"),
        (["model.weights=none", "--figure", "probe"], "--figure: 'probe' is not NAME=VALUE"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(more, said, tmp_path):
    given = [str(ROOT / "configs/base.yaml"), *words("convnet4", 3), *more, "--to", str(tmp_path)]
    with pytest.raises(InputError) as caught:
        command.run(given)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_small_stem_is_refused_for_detectron2_alone(tmp_path, capsys):
    given = [str(ROOT / "configs/base.yaml"), *words("resnet18", 3), "model.stem=small", "model.weights=none"]
    with pytest.raises(InputError, match="no small stem"):
        command.run([*given, "--format", "detectron2", "--to", str(tmp_path)])
    assert command.run([*given, "--format", "torch", "--to", str(tmp_path), "--figure", "probe=91.5"]) == 0
    assert "none: random features" in capsys.readouterr().out
    known = json.loads((tmp_path / "model.json").read_text())
    assert (known["weights"], known["training"], known["figures"]) == ("random", None, {"probe": 91.5})
    card = (tmp_path / "MODEL_CARD.md").read_text()
    assert "Weights: random." in card and "- probe: 91.5" in card and "short side to 37 pixels" in card


def test_the_model_is_registered_in_its_store(exported, tmp_path):
    import mlflow

    case = exported("convnet4", 1)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    given = [str(ROOT / "configs/base.yaml"), *case.words, f"tracking.uri={uri}", f"output={tmp_path}"]
    for version in (1, 2):
        code = command.run([*given, "--format", "mlflow", "--to", str(tmp_path / "again"), "--register", "tiny"])
        assert code == 0
        with tracking_at(uri):
            model = mlflow.pyfunc.load_model(f"models:/tiny/{version}")
            case.check(lambda images, model=model: model.predict(images.numpy()))
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert {run.info.status for run in runs} == {"FINISHED"} and len(runs) == 2


def test_an_earlier_version_keeps_its_own_weights(exported, tmp_path):
    """Both are of one run, which has gone on in between."""
    import mlflow

    one, other = exported("convnet4", 1), exported("convnet4", 3)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_id = None
    for version, case in ((1, one), (2, other)):
        given = [str(ROOT / "configs/base.yaml"), *case.words, f"output={tmp_path}"]
        assert command.run([*given, "--format", "mlflow", "--to", str(tmp_path / "export")]) == 0
        folder = tmp_path / "export" / "mlflow_model"
        assert mlflow_store.register_model(folder, "tiny", uri, tmp_path, "barlow-twins", run_id) == version
        run_id = mlflow.MlflowClient(uri).get_model_version("tiny", "1").run_id
    for version, case in ((1, one), (2, other)):
        with tracking_at(uri):
            model = mlflow.pyfunc.load_model(f"models:/tiny/{version}")
            case.check(lambda images, model=model: model.predict(images.numpy()))


@contextlib.contextmanager
def tracking_at(uri):
    with pytest.MonkeyPatch.context() as environment:  # mlflow.set_tracking_uri would leave it set for all later tests
        environment.setenv("MLFLOW_TRACKING_URI", uri)
        yield
