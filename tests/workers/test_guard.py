"""Case 10: what is not finite on one worker is seen by all, written down, and never saved."""

import json

import numpy as np
import pytest
import torch

from dali.order import step_indices
from pipeline import checkpoint, classifier, evaluation, pretraining, stopping, training
from pipeline.bad_files import Readable
from tests.workers.test_evaluation import folder  # noqa: F401
from tests.workers.test_evaluation import settings as evaluated  # noqa: F401
from tests.workers.test_training import digits, settings  # noqa: F401

SHORT = ("train.stop_after_steps=5", "model.projector=[8]", "tracking.log_every_steps=2")


def spoiled(*steps):
    """Batches of which those steps' have an infinite value: in a sample of the last rank, its second view if any."""

    class Spoiled(Readable):
        def __next__(self):
            batch = super().__next__()
            if self._run.step + 1 in steps and self._run.world.rank == self._run.world.size - 1:
                batch[-2 if hasattr(batch, "y2") else 0][1, 0, 3, 4] = torch.inf
            return batch

    return Spoiled


def train(run):
    logged = []
    training.train(run, lambda *_: None, lambda run, values: logged.append((run.step, values["skipped_steps"])))
    return logged


def test_the_sample_at_fault_is_named_and_the_run_goes_on(world, settings, monkeypatch, capfd):  # noqa: F811
    run = pretraining.prepare(settings(*SHORT), world)
    monkeypatch.setattr(training, "Readable", spoiled(3))
    logged = train(run)
    assert run.step == 5
    assert all(value.isfinite().all() for value in run.model.state_dict().values())
    if world.rank:
        assert not logged
        return
    assert logged == [(2, 0), (4, 1), (5, 1)]
    (note,) = (run.config.output_path / "non_finite").iterdir()
    found = json.loads(note.read_text())
    whole = step_indices(run.config.seed, 2, len(run.source), 25)
    assert note.name == "step_3.json" and found["global_batch"] == whole.tolist()
    first_of_last = np.array_split(whole, world.size)  # slices differ by at most one
    (sample,) = found["samples"]
    assert sample["index"] in first_of_last[-1] or sample["index"] in whole[-(25 // world.size + 1) :]
    assert (sample["not_finite"], sample["view"]) == ("pixels", 2)
    assert sample["name"] == run.source.name(sample["index"])
    assert found["terms"]["loss"] == "nan" and found["step"] == 3
    assert f"warning: the loss of step 3 is nan; the update was left out, see {note}" in capfd.readouterr().out


@pytest.mark.parametrize(("policy", "steps"), [("on_non_finite=stop", 1), ("non_finite_in_a_row=3", 3)])
def test_a_run_that_only_leaves_out_ends(world, settings, policy, steps):  # noqa: F811
    """A scale that overflows makes every loss infinite: no sample is at fault, and the largest are listed."""
    run = pretraining.prepare(settings(*SHORT, f"train.{policy}", "loss.scale=1e38"), world)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(RuntimeError, match=rf"the loss of step {steps} is inf, the {steps}\. in a row"):
        train(run)
    assert run.step == steps + 1  # it is read one step later
    torch.testing.assert_close(dict(run.model.state_dict()), before, rtol=0, atol=0)
    if world.rank == 0:
        notes = sorted((run.config.output_path / "non_finite").iterdir())
        assert [note.name for note in notes] == [f"step_{step}.json" for step in range(1, steps + 1)]
        samples = json.loads(notes[0].read_text())["samples"]
        norms = [sample["norm"] for sample in samples]
        assert len(samples) == 5 and norms == sorted(norms, reverse=True) and not samples[0]["not_finite"]


def test_one_good_step_starts_the_count_again(world, settings, monkeypatch):  # noqa: F811
    run = pretraining.prepare(settings(*SHORT, "train.non_finite_in_a_row=2"), world)
    monkeypatch.setattr(training, "Readable", spoiled(2))
    train(run)
    run.step = 0
    monkeypatch.setattr(training, "Readable", spoiled(5))  # the last one: judged after the loop
    logged = train(run)
    assert run.step == 5 and (world.rank or logged[-1] == (5, 0))
    assert (run.config.output_path / "non_finite" / "step_5.json").exists() or world.rank


def test_weights_that_are_not_finite_are_not_saved(world, settings):  # noqa: F811
    run = pretraining.prepare(settings(*SHORT), world)
    name, parameter = list(run.model.named_parameters())[2]
    with torch.no_grad():
        parameter.view(-1)[0] = torch.nan
    duties = pretraining.Duties(None, None, 0, {})
    with pytest.raises(RuntimeError, match=f"model.{name} is not finite after step 0: no checkpoint of it is written"):
        duties.save(run)


def notes(config):
    return sorted(file.name for file in (config.output_path / "non_finite").glob("*"))


@pytest.mark.parametrize(("verb", "autocast"), [("probe", "'off'"), ("finetune", "'off'"), ("finetune", "fp16")])
def test_a_classifier_leaves_the_step_out_and_names_the_sample(
    world, evaluated, verb, autocast, monkeypatch, capfd  # noqa: F811
):  # fmt: skip
    """All workers, in the same step: also where the others' own losses are finite."""
    words = [f"{verb}.batch=25", f"{verb}.epochs=1", "train.stop_after_steps=4", f"precision.autocast={autocast}"]
    config = evaluated(verb, *words)
    made = classifier.build(evaluation.prepare(config, verb, world))
    monkeypatch.setattr(classifier, "Readable", spoiled(2, 4))  # the last one is judged after the loop
    seen = []
    train_step = classifier.train_step

    def kept(*args):
        before = {name: value.clone() for name, value in made.model.state_dict().items()}
        _, left_out = train_step(*args)
        same = all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
        seen.append((int(left_out), same))
        return _, left_out

    monkeypatch.setattr(classifier, "train_step", kept)
    assert classifier.fit(made, None, None) == stopping.GO_ON and made.step == 4
    if autocast == "fp16":  # whose scale is still being found: steps may change nothing without being left out
        assert [left_out for left_out, _ in seen] == [0, 1, 0, 1]
    else:
        assert seen == [(0, False), (1, True), (0, False), (1, True)]
    assert not checkpoint.not_finite(made.model.state_dict())
    if world.rank == 0:
        assert notes(config) == ["step_2.json", "step_4.json"]
        found = json.loads((config.output_path / "non_finite" / "step_2.json").read_text())
        whole = step_indices(config.seed, 1, len(made.source), 25)
        (sample,) = found["samples"]
        assert found["global_batch"] == whole.tolist() and sample["index"] in whole[-(25 // world.size + 1) :]
        assert (sample["not_finite"], sample["view"]) == ("pixels", 1)
        assert sample["name"] == made.source.name(sample["index"])
        assert found["terms"] == {"loss": "nan"}, "the sum of all workers' parts"
        assert "the loss of step 2 is nan; the update was left out" in capfd.readouterr().out


@pytest.mark.parametrize(("policy", "last"), [("on_non_finite=stop", 1), ("non_finite_in_a_row=2", 2)])
def test_a_classifier_ends_by_the_same_policy(world, evaluated, policy, last, monkeypatch):  # noqa: F811
    config = evaluated("probe", f"train.{policy}", "probe.batch=25", "train.stop_after_steps=6")
    made = classifier.build(evaluation.prepare(config, "probe", world))
    monkeypatch.setattr(classifier, "Readable", spoiled(*range(1, 6)))
    with pytest.raises(RuntimeError, match=rf"the loss of step {last} is nan, the {last}\. in a row"):
        classifier.fit(made, None, None)
    assert made.step == last + 1 and (world.rank or len(notes(config)) == last)
