"""Which weights a command takes, and what it knows of them."""

import json

import pytest
import torch

from dali.errors import InputError
from pipeline import checkpoint
from pipeline.config import dump, load
from pipeline.model import build_model
from pipeline.trained import open_trained

WORDS = ["model.backbone=convnet4", "model.projector=[8,4]", "views.size=16", "train.global_batch=10", "name=tiny"]


def make(run, step, fill, **changes):
    """A checkpoint of `step` whose tensors are all `fill`."""
    config = load(None, [*WORDS, f"output={run}"])
    model = build_model(config.model, 3, 16, seed=5)
    state = {
        "step": step,
        "model": {key: torch.full_like(tensor, fill) for key, tensor in model.state_dict().items()},
        "optimizer": {},
        "scaler": {},
        "config": config.model_dump(mode="json"),
        "run_id": "abc",
        "facts": {"digest": "d1", "shaping": {}, "num_samples": 45},
        **changes,
    }
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(dump(config).replace("weights: null", "weights: /nowhere/start.pth"))
    return checkpoint.save(run, state, keep=9, milestone=True)


@pytest.fixture
def run(tmp_path):
    make(tmp_path / "run", 8, 0.25)
    make(tmp_path / "run", 20, 0.5)
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"knn_accuracy": {"0": 10.0, "20": 77.5}}))
    return tmp_path / "run"


def value(trained):
    return float(next(trained.model.backbone.parameters()).detach().flatten()[0])


def test_a_run_gives_its_newest_checkpoint_not_what_it_started_from(run):
    trained = open_trained(str(run), [])
    assert value(trained) == 0.5 and trained.has_projector and not trained.model.training
    assert trained.model.projector[0].weight.detach()[0, 0].item() == 0.5
    assert trained.weights == str(checkpoint.path_of(run, 20)) and trained.folder == run
    training = trained.training
    assert (training.step, training.epochs, training.digest, training.num_samples) == (20, 5.0, "d1", 45)
    assert (training.verb, training.run_id, training.figures) == ("pretrain", "abc", {"knn_accuracy": 77.5})


def test_a_damaged_newest_checkpoint_is_passed_over_by_name(run, capsys):
    path = checkpoint.path_of(run, 20)
    path.write_bytes(path.read_bytes()[:-50])
    assert value(open_trained(str(run), [])) == 0.25
    assert f"warning: {path}" in capsys.readouterr().out


def test_a_milestone_may_be_named(run):
    path = run / "checkpoints" / "milestones" / "step_00000020.pt"
    trained = open_trained(str(run), [f"model.weights={path}"])
    assert trained.training.step == 20 and trained.training.figures == {"knn_accuracy": 77.5}


def test_other_weights_have_no_history_and_no_projector(run, tmp_path):
    model = build_model(load(None, WORDS).model, 3, 16, seed=9)
    torch.save(model.backbone.state_dict(), tmp_path / "other.pth")
    trained = open_trained(str(run), [f"model.weights={tmp_path / 'other.pth'}"])
    assert trained.training is None and not trained.has_projector and trained.report.matched == 24
    assert value(trained) == float(next(model.backbone.parameters()).detach().flatten()[0])


def test_a_classifier_s_checkpoint_gives_its_backbone_and_its_own_history(run, tmp_path):
    """Of `probe` and `finetune`: a head, and no projector; not taken for a pretraining."""
    facts = {"digest": "d2", "shaping": {"verb": "finetune", "weights": "w1"}, "num_samples": 512}
    path = make(tmp_path / "tuned", 6, 0.75, facts=facts)
    state = checkpoint.load(path)
    state["model"] = {key: t for key, t in state["model"].items() if not key.startswith("projector.")}
    state["model"] |= {"head.weight": torch.zeros(3, 256), "head.bias": torch.zeros(3)}
    checkpoint.save(tmp_path / "tuned", state, keep=9, milestone=False)
    for where, more in ((tmp_path / "tuned", []), (run, [f"model.weights={path}"])):
        trained = open_trained(str(where), more)
        assert value(trained) == 0.75 and not trained.has_projector
        training = trained.training
        assert (training.verb, training.step, training.epochs) == ("finetune", 6, 3.0)  # of two batches of 256
        assert (training.start_digest, training.digest, training.figures) == ("w1", "d2", {})
    for step, expected in ((6, {"finetune_top1": 80.0}), (7, {})):  # of this checkpoint, or of a later one
        (tmp_path / "tuned" / "summary.json").write_text(json.dumps({"verb": "finetune", "step": step, "top1": 80.0}))
        assert open_trained(str(tmp_path / "tuned"), []).training.figures == expected


def test_random_weights_come_by_name_and_follow_the_seed(run):
    trained, other = (open_trained(str(run), ["model.weights=none", f"seed={seed}"]) for seed in (5, 6))
    assert trained.report is None and trained.training is None and not trained.has_projector
    again = open_trained(str(run), ["model.weights=none", "seed=5"])
    assert value(trained) == value(again) != value(other)


def test_a_run_without_checkpoints_gives_its_backbone_or_is_refused(run):
    for file in (run / "checkpoints").glob("*.pt"):
        file.unlink()
    with pytest.raises(InputError, match="holds no checkpoint and no backbone.pth"):
        open_trained(str(run), [])
    model = build_model(load(None, WORDS).model, 3, 16, seed=9)
    torch.save(model.backbone.state_dict(), run / "backbone.pth")
    assert open_trained(str(run), []).weights == str(run / "backbone.pth")


def test_a_config_must_name_its_weights(run, tmp_path):
    with pytest.raises(InputError, match="model.weights: is not set"):
        open_trained(str(run / "config.yaml"), ["model.weights=null"])
    trained = open_trained(str(run / "config.yaml"), [f"model.weights={checkpoint.path_of(run, 8)}"])
    assert value(trained) == 0.25 and trained.folder == run
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: holds no config.yaml"):
        open_trained(str(tmp_path / "empty"), [])


def test_another_projector_or_backbone_is_refused(run):
    with pytest.raises(InputError, match=r"has a projector of \[8, 4\]; write model.projector=\[8, 4\]"):
        open_trained(str(run), ["model.projector=[8,5]"])
    with pytest.raises(InputError, match="check model.backbone"):
        open_trained(str(run), ["model.backbone=resnet18", "views.size=32"])
