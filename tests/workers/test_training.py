"""The step and the run on every worker: against plain torch on the whole batch, and against themselves."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dali.errors import InputError
from dali.loader import TwoViewLoader
from dali.order import Shard, worker_positions
from dali.sources import open_source
from pipeline import checkpoint, config, diagnostics, pretraining, stopping, training, workers
from pipeline.model import build_model
from pipeline.samples import write_digits
from tests.workers.test_loss import reference


@pytest.fixture(scope="module")
def digits(world, tmp_path_factory):
    """A folder that all workers share, with the digits in it."""
    folder = workers.from_rank_0(str(tmp_path_factory.mktemp("digits")) if world.rank == 0 else None, "digits")
    with workers.together():
        if world.rank == 0:
            from pathlib import Path

            write_digits(Path(folder) / "digits")
    return folder


@pytest.fixture
def settings(digits, request):
    """The quickstart's config, small; outputs below the shared folder, a new one each call."""
    count = iter(range(100))

    def make(*words):
        return config.load(
            config.CONFIGS / "quickstart.yaml",
            [
                f"data.path={digits}/digits/train",
                "data.test_path=null",
                f"output={digits}/{request.node.name}-{next(count)}",
                "device=cpu",
                "model.projector=[32, 32]",
                "train.global_batch=25",
                "train.epochs=1",
                "train.stop_after_steps=6",
                "schedule.warmup_epochs=0",
                "knn.every_epochs=null",
                "knn.at_start=false",
                "tracking.system_metrics=false",
                f"tracking.uri=sqlite:///{digits}/mlflow.db",  # making one takes seconds
                "tracking.log_every_steps=1",
                *words,
            ],
        )

    return make


def whole_batch(made):
    """Both views of the first global batch, as one process sees them."""
    with TwoViewLoader(
        open_source(made.data, "train"),
        made.views,
        channels=1,
        seed=made.seed,
        global_batch=made.train.global_batch,
        micro_batches=made.train.micro_batches,
        shard=Shard(0, 1),
        stop_step=1,
        dtype=torch.float64,
        channels_last=made.precision.channels_last,
    ) as loader:
        return next(iter(loader))


def plain_step(model, made, batch):
    """The gradient in `model` (torch's own batch norm) of the whole batch's loss, in one graph."""
    sizes = [p.stop - p.start for p in worker_positions(made.train.global_batch, made.train.micro_batches, Shard(0, 1))]
    pairs = zip(batch.y1.split(sizes), batch.y2.split(sizes), strict=True)
    parts = [(model.backbone(part1), model.backbone(part2)) for part1, part2 in pairs]
    z = [model.projector(torch.cat(view)) for view in zip(*parts, strict=True)]
    loss, on_diag, off_diag = reference(*z, made.loss.lambd)
    (made.loss.scale * loss).backward()
    return loss * made.loss.scale, on_diag, off_diag


def assert_same_bits(a, b):
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("mode", ["allreduce", "gram"])
def test_loss_gradients_and_statistics_are_one_process_s(world, settings, micro_batches, mode):
    """25 samples on 2 or 3 workers: unequal slices, the same numbers to 1e-10, whole or in micro-batches."""
    made = settings(
        "precision.dtype=float64", f"train.micro_batches={micro_batches}", f"loss.combine={mode}", "loss.scale=0.5"
    )
    run = pretraining.prepare(made, world)
    plain = build_model(made.model, 1, made.views.size, seed=made.seed).double().to(memory_format=torch.channels_last)
    torch.testing.assert_close(dict(plain.state_dict()), dict(run.model.state_dict()), rtol=0, atol=0)
    wanted = plain_step(plain, made, whole_batch(made))
    with training.open_loader(run) as loader:
        batch = next(iter(loader))
    run.gradients.start()
    outcome = training.backward(run, batch.y1, batch.y2)
    run.gradients.wait()
    for found, expected in zip(outcome.terms, wanted, strict=True):
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    ours, theirs = dict(run.model.named_parameters()), dict(plain.named_parameters())
    difference = sum((ours[n].grad - p.grad).square().sum().item() for n, p in theirs.items()) ** 0.5
    size = sum(p.grad.square().sum().item() for p in theirs.values()) ** 0.5
    assert difference <= 1e-10 * size
    for name, p in theirs.items():  # each by itself: a small bias gradient must not hide behind large weights
        assert (ours[name].grad - p.grad).norm() <= 1e-10 * p.grad.norm() + 1e-13, name
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(run.model.get_buffer(name), buffer, rtol=1e-12, atol=1e-12, msg=name)


def test_the_signs_of_collapse_are_those_of_all_workers_embeddings(world, settings):
    """c and the spectrum of one process that embeds the whole batch, and told once."""
    made = settings("precision.dtype=float64")
    run = pretraining.prepare(made, world)
    plain = build_model(made.model, 1, made.views.size, seed=made.seed).double().to(memory_format=torch.channels_last)
    whole = whole_batch(made)
    with torch.no_grad():
        z1, z2 = plain(whole.y1), plain(whole.y2)
    wanted = diagnostics.figures(diagnostics.correlation(z1, z2, made.loss.eps), diagnostics.spectrum(z1))
    with training.open_loader(run) as loader:
        batch = next(loader)
    told = []
    tracker = SimpleNamespace(log=lambda step, values: told.append(values), image=lambda *_: None)
    duties = pretraining.Duties(tracker if world.rank == 0 else None, None, 0, {})
    duties.diagnose(run, training.backward(run, batch.y1, batch.y2))
    run.gradients.wait()
    assert told == ([pytest.approx(wanted, rel=1e-5)] if world.rank == 0 else [])


def test_the_same_seed_gives_the_same_bits(world, settings):
    """Two runs on as many workers: equal losses in the journal, equal weights and optimizer state."""
    saved, losses = [], []
    for _ in range(2):
        made = settings()
        pretraining.pretrain(made, world)
        saved.append(checkpoint.load(checkpoint.path_of(made.output_path, 6)))
        lines = [json.loads(line) for line in (made.output_path / "journal.jsonl").read_text().splitlines()]
        losses.append([v["metrics"]["loss"] for v in lines if "loss" in v.get("metrics", {})])
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    assert_same_bits(*saved)


@pytest.mark.parametrize("name", ["lars", "sgd"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(world, settings, name):
    rule = [f"optimizer.name={name}", "optimizer.weight_decay=0.01"]
    straight = settings(*rule)
    pretraining.pretrain(straight, world)
    stopped = settings(*rule, "train.stop_after_steps=3")
    pretraining.pretrain(stopped, world)
    resumed = stopped.model_copy(update={"train": straight.train})
    pretraining.pretrain(resumed, world)
    a, b = (checkpoint.load(checkpoint.path_of(made.output_path, 6)) for made in (straight, resumed))
    assert_same_bits(a, b)


def test_a_run_on_other_images_or_settings_is_refused_with_what_changed(world, settings):
    made = settings("train.stop_after_steps=2")
    pretraining.pretrain(made, world)
    other = made.model_copy(
        update={
            "loss": made.loss.model_copy(update={"lambd": 0.1}),
            "train": made.train.model_copy(update={"epochs": 2}),
        }
    )
    with pytest.raises(InputError, match=r"loss.lambd was 0.0051, is 0.1; train.epochs was 1.0, is 2"):
        pretraining.pretrain(other, world)
    with pytest.raises(InputError, match="is complete"):
        pretraining.pretrain(made, world)
    allowed = made.checkpoint.model_copy(update={"allow_change": ("train.epochs",)})
    longer = made.train.model_copy(update={"epochs": 2, "stop_after_steps": 3})
    pretraining.pretrain(made.model_copy(update={"train": longer, "checkpoint": allowed}), world)
    assert checkpoint.path_of(made.output_path, 3).exists() or world.rank


def test_an_end_that_was_not_reached_is_done_again(world, settings):
    """Killed after the last checkpoint: the same command judges and hands over; nothing is trained again."""
    made = settings("train.stop_after_steps=2")
    pretraining.pretrain(made, world)
    last, output = checkpoint.path_of(made.output_path, 2), made.output_path
    before = checkpoint.load(last)
    workers.barrier("test.read")
    if world.rank == 0:  # as the kill leaves it
        (output / "summary.json").unlink()
        (output / "backbone.pth").unlink()
    assert pretraining.pretrain(made, world) == 0
    assert_same_bits(before, checkpoint.load(last))
    summary = json.loads((output / "summary.json").read_text())
    assert summary["step"] == 2 and (output / "backbone.pth").exists()
    with pytest.raises(InputError, match="is complete"):
        pretraining.pretrain(made, world)


def test_auto_is_decided_once_where_the_run_began(world, settings):
    """On a machine of another kind it goes on in the precision it had."""
    made = settings("train.stop_after_steps=2")
    run = pretraining.prepare(made, world)
    other = None if run.autocast is torch.bfloat16 else torch.bfloat16
    pretraining.pretrain(made, world)
    path = checkpoint.path_of(made.output_path, 2)
    if world.rank == 0:
        state = checkpoint.load(path)
        assert state["facts"]["autocast"] == str(run.autocast)
        state["facts"]["autocast"] = str(other)
        checkpoint.save(made.output_path, state, keep=3, milestone=False)
    workers.barrier("test.saved")
    longer = made.model_copy(update={"train": made.train.model_copy(update={"stop_after_steps": 4})})
    assert pretraining.prepare(longer, world).autocast is other


def test_a_rewound_run_goes_on_from_its_new_branch(world, settings):
    made = settings("train.stop_after_steps=4", "checkpoint.every_steps=1")
    pretraining.pretrain(made, world)
    chosen = str(checkpoint.path_of(made.output_path, 2))
    keys = {"resume": chosen, "allow_change": ("optimizer.lr_weights",)}
    rate = {"optimizer": made.optimizer.model_copy(update={"lr_weights": 0.0})}
    shorter = {"train": made.train.model_copy(update={"stop_after_steps": 3})}
    rewound = made.model_copy(update={"checkpoint": made.checkpoint.model_copy(update=keys), **rate})
    pretraining.pretrain(rewound.model_copy(update=shorter), world)
    auto = made.model_copy(update={"checkpoint": made.checkpoint.model_copy(update={"resume": "auto"}), **rate})
    pretraining.pretrain(auto, world)
    three, four = (checkpoint.load(checkpoint.path_of(made.output_path, step)) for step in (3, 4))
    assert four["step"] == 4 and four["config"]["optimizer"]["lr_weights"] == 0.0
    weights = [state["model"]["backbone.blocks.0.0.weight"] for state in (three, four)]
    assert torch.equal(*weights)  # of the branch whose rate is 0


def test_starting_moves_no_weight_and_all_workers_hold_the_same(world, settings):
    """Case 3: with weight decay and a frozen parameter; a worker that differs is named, with the tensor."""
    made = settings("optimizer.weight_decay=0.5", "optimizer.name=sgd")
    run = pretraining.prepare(made, world)
    untouched = build_model(made.model, 1, made.views.size, seed=made.seed).state_dict()
    torch.testing.assert_close(dict(run.model.state_dict()), dict(untouched), rtol=0, atol=0)
    next(run.model.parameters()).requires_grad_(False)
    with torch.no_grad():
        list(run.model.parameters())[3].add_(world.rank)
    if world.size > 1:
        name = [name for name, _ in run.model.named_parameters()][3]
        with pytest.raises(RuntimeError, match=f"{name} differs between workers: rank 0 and rank 1"):
            workers.check_equal_state(run.model, run.optimizer)
    workers.share_state(run.model, run.optimizer)
    torch.testing.assert_close(dict(run.model.state_dict()), dict(untouched), rtol=0, atol=0)


def test_optimizer_state_travels_from_rank_0(world, settings):
    run = pretraining.prepare(settings(), world)
    with training.open_loader(run) as loader:
        batch = next(iter(loader))
    training.train_step(run, batch.y1, batch.y2)
    before = copy.deepcopy(run.optimizer.state_dict())
    for state in run.optimizer.state.values():
        state["exp_avg"].add_(world.rank)
    workers.share_state(run.model, run.optimizer)
    torch.testing.assert_close(run.optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_a_step_with_a_loss_that_is_not_finite_changes_nothing(world, settings, name):
    """Inf on the last rank alone reaches every worker's loss, and no worker's weights."""
    run = pretraining.prepare(settings(f"optimizer.name={name}"), world)
    with training.open_loader(run) as loader:
        batch = next(iter(loader))
    training.train_step(run, batch.y1, batch.y2)
    model = copy.deepcopy(dict(run.model.state_dict()))  # running statistics included: a NaN would stay there
    state = copy.deepcopy(run.optimizer.state_dict()["state"])
    if world.rank == world.size - 1:
        batch.y1[0] = torch.inf
    terms = training.train_step(run, batch.y1, batch.y2).terms
    assert not torch.isfinite(terms.loss)
    torch.testing.assert_close(dict(run.model.state_dict()), model, rtol=0, atol=0)
    torch.testing.assert_close(run.optimizer.state_dict()["state"], state, rtol=0, atol=0)
    workers.check_equal_state(run.model, run.optimizer)


def test_autocast_is_rank_0s_choice(world, settings, monkeypatch):
    """CPUs may differ between hosts."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: world.rank == 0)
    assert pretraining.prepare(settings(), world).autocast == torch.bfloat16


@pytest.mark.parametrize(("autocast", "micro_batches"), [("bf16", 1), ("bf16", 2), ("fp16", 2)])
def test_mixed_precision_trains(world, settings, autocast, micro_batches):
    made = settings(
        "views.size=12",  # a CPU takes seconds for a step in fp16
        "train.global_batch=10",
        f"precision.autocast={autocast}",
        f"train.micro_batches={micro_batches}",
        "optimizer.lr_weights=0.02",
    )
    run = pretraining.prepare(made, world)
    assert run.scaler.is_enabled() == (autocast == "fp16")
    losses = []
    with training.open_loader(run) as loader:
        batch = next(loader)
        for _ in range(16):  # fp16's scale starts too high, and the first steps are left out until it fits
            outcome = training.train_step(run, batch.y1, batch.y2)
            assert outcome.terms.loss.dtype == torch.float32
            losses.append(outcome.terms.loss.item())
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    workers.check_equal_state(run.model, run.optimizer)
    assert len(set(workers.gather_objects(run.scaler.get_scale(), "scale"))) == 1


def test_parameters_that_a_step_leaves_out_do_not_stop_it(world, settings):
    run = pretraining.prepare(settings(), world)
    for layer in run.model.backbone.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    run.gradients.close()
    run.gradients = pretraining.sum_gradients(run.config, run.model)
    with training.open_loader(run) as loader:
        for batch in loader:
            training.train_step(run, batch.y1, batch.y2)
    assert run.step == 6


def test_a_mistake_of_one_worker_is_raised_by_all(world):
    with pytest.raises(InputError, match=r"^rank 1 on .*: no such image$" if world.size > 1 else "no such image"):
        with workers.together():
            if world.rank == min(1, world.size - 1):
                raise InputError("no such image")


def test_a_vote_is_read_one_step_later_by_all(world):
    vote = workers.Vote()
    assert vote.cast(3 if world.rank == world.size - 1 else 0) == 0
    assert vote.cast(0) == 3
    assert vote.cast(0) == 0
    vote.close()


def test_time_that_is_up_ends_all_workers_after_the_same_step(world, settings):
    made = settings("train.max_minutes=0.000001")
    assert pretraining.pretrain(made, world) == stopping.TIME_IS_UP
    summary = json.loads((made.output_path / "summary.json").read_text())
    assert summary["stopped_by"] == "train.max_minutes" and summary["step"] < 6 and not summary["finished"]
    assert checkpoint.path_of(made.output_path, summary["step"]).exists()
