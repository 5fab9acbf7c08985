"""Evaluations on every worker: against plain torch on all samples in one process, and against themselves."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dali.errors import InputError
from dali.loader import LabelledLoader
from dali.order import Shard, epoch_order, split
from dali.sources import open_source
from pipeline import (
    checkpoint,
    classifier,
    evaluation,
    jobs,
    knn,
    linear_heads,
    pretraining,
    results,
    stopping,
    workers,
)
from pipeline.config import CONFIGS
from pipeline.features import Features, extract
from pipeline.samples import write_digits
from pipeline.scores import Scores

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    """A folder that all workers share, with the digits in it and a list of 150 test images' worth of them."""
    path = workers.from_rank_0(str(tmp_path_factory.mktemp("evaluation")) if world.rank == 0 else None, "folder")
    with workers.together():
        if world.rank == 0:
            write_digits(Path(path) / "digits")
    return Path(path)


@pytest.fixture
def settings(folder, request):
    """The quickstart's config for a verb, small; outputs below the shared folder, a new one each call."""
    count = iter(range(100))

    def make(verb, *words):
        return jobs.load_for(
            verb,
            str(CONFIGS / "quickstart.yaml"),
            [
                f"data.path={folder}/digits/train",
                f"data.test_path={folder}/digits/test",
                f"output={folder}/{request.node.name}-{next(count)}",
                "device=cpu",
                "views.size=12",
                "model.projector=[16]",
                "model.weights=none",
                "tracking.system_metrics=false",
                f"tracking.uri=sqlite:///{folder}/mlflow.db",  # making one takes seconds
                "precision.autocast='off'",
                "probe.batch=50",
                "probe.labels=25",
                "probe.epochs=3",
                "finetune.batch=10",
                "finetune.labels=10",
                "finetune.epochs=0.6",
                "knn.batch=199",
                "finetune.lr_backbone=0.05",
                *words,
            ],
        )

    return make


def summary(config):
    return json.loads((config.output_path / "summary.json").read_text())


def plain_steps(config, section, model, source, steps, sync):
    """`steps` updates of `model` by torch's own SGD, from whole batches in one process; returns each step's loss."""
    losses = []
    groups = [{"params": model.head.parameters(), "lr": section.lr_classifier}]
    if sync:
        groups.append({"params": model.backbone.parameters(), "lr": section.lr_backbone})
    optimizer = torch.optim.SGD(groups, momentum=section.momentum, weight_decay=section.weight_decay)
    plan = classifier.make_plan(config, section, len(source))
    epochs = plan.total_steps / plan.steps_per_epoch
    base = [group["lr"] for group in optimizer.param_groups]
    with LabelledLoader(
        source,
        classifier.training_views(config.views, section),
        channels=1,
        seed=config.seed,
        global_batch=section.batch,
        shard=Shard(0, 1),
        stop_step=steps,
        dtype=getattr(torch, config.precision.dtype),
        channels_last=config.precision.channels_last,
    ) as loader:
        for step, batch in enumerate(loader):
            cosine = (1 + np.cos(np.pi * (step // plan.steps_per_epoch) / epochs)) / 2
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * cosine
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch.images), batch.labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def plain_model(job, frozen):
    """The classifier at step 0, with torch's own batch norm."""
    config = job.config
    backbone = evaluation.build_seeded_backbone(config.model, 1, config.views.size, config.seed)
    model = classifier.Classifier(backbone, backbone.feature_dim, 10, frozen, config.seed)
    return model.to(dtype=getattr(torch, config.precision.dtype), memory_format=torch.channels_last).train()


@pytest.mark.parametrize("verb", ["probe", "finetune"])
def test_the_training_is_one_process_s(world, settings, verb):
    """Weights and running statistics after some steps, to 1e-10 in float64; more workers hold unequal slices."""
    words = ["precision.dtype=float64", f"{verb}.epochs=2", "train.stop_after_steps=7", "tracking.log_every_steps=1"]
    made = settings(verb, *words, f"{verb}.evaluate_every_epochs=99")
    training = classifier.build(evaluation.prepare(made, verb, world))
    told = []
    tracker = SimpleNamespace(log=lambda step, values: told.append(values["loss"])) if world.rank == 0 else None
    assert classifier.fit(training, tracker, None) == stopping.GO_ON and training.step == 7
    model = plain_model(training.job, verb == "probe")
    losses = plain_steps(made, training.section, model, training.job.source, 7, verb == "finetune")
    if world.rank == 0:
        assert told == pytest.approx(losses, rel=1e-9)
    wanted = model.state_dict()
    start = plain_model(training.job, True).state_dict()
    for name, tensor in training.model.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-9, atol=1e-10, msg=name)
        if verb == "probe" and name.startswith("backbone."):
            assert torch.equal(tensor, start[name]), name
    assert not torch.equal(wanted["head.weight"], start["head.weight"])
    if verb == "finetune":
        assert not torch.equal(wanted["backbone.blocks.0.0.weight"], start["backbone.blocks.0.0.weight"])


def test_a_probe_counts_every_test_image_once_and_agrees_with_plain_torch(world, settings):
    made = settings("probe")
    job = evaluation.prepare(made, "probe", world)
    training = classifier.build(job)
    classifier.fit(training, None, None)
    scores = classifier.count(training)
    model = plain_model(job, True)
    plain_steps(made, made.probe, model, job.source, training.step, False)
    test = extract(model.backbone, job.test, made, Shard(0, 1), CPU, 1)
    five = model.head(test.x).topk(5).indices == test.labels[:, None]  # sorted: the first is the one named
    assert int(scores.confusion.sum()) == len(job.test) == len(five)
    assert scores.top1 == pytest.approx(100 * five[:, 0].double().mean().item(), abs=0.05)
    assert scores.top5 == pytest.approx(100 * five.any(1).double().mean().item(), abs=0.05)


def test_a_frozen_backbone_that_moves_is_an_error(world, settings):
    training = classifier.build(evaluation.prepare(settings("probe"), "probe", world))
    classifier.check_untouched(training)
    training.model.backbone.get_buffer("blocks.1.1.running_mean")[3] += 1e-7
    with pytest.raises(RuntimeError, match="blocks.1.1.running_mean of the frozen backbone has changed"):
        classifier.save(training, None)


def test_a_resumed_training_has_the_bits_of_one_that_never_stopped(world, settings):
    """And the whole of what a run leaves: best and last, tables, the labels it used."""
    straight = settings("finetune")
    assert classifier.run(straight, "finetune", world) == stopping.GO_ON
    stopped = settings("finetune", "train.stop_after_steps=2", "checkpoint.every_steps=1")
    classifier.run(stopped, "finetune", world)
    resumed = stopped.model_copy(update={"train": straight.train})
    classifier.run(resumed, "finetune", world)
    a, b = (checkpoint.load(checkpoint.path_of(made.output_path, 6)) for made in (straight, resumed))
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)
    told = summary(resumed)
    assert told["finished"] and told["top1"] == summary(straight)["top1"] and told["labels"] == 100
    assert told["best_top1"] >= told["top1"] and (resumed.output_path / "classifier_best.pth").exists()
    state = torch.load(resumed.output_path / "classifier.pth", weights_only=True)
    assert torch.equal(state["fc.weight"], b["model"]["head.weight"])
    assert torch.equal(state["blocks.0.0.weight"], b["model"]["backbone.blocks.0.0.weight"])
    assert len((resumed.output_path / "labels.txt").read_text().splitlines()) == 100
    assert len((resumed.output_path / "per_class.csv").read_text().splitlines()) == 11
    assert len(list((resumed.output_path / "images" / "confusion").glob("*.png"))) >= 1
    with pytest.raises(InputError, match="is complete"):
        classifier.run(resumed, "finetune", world)
    other = stopped.model_copy(update={"seed": 5})
    with pytest.raises(InputError, match="belongs to another run: .*seed was 0, is 5"):
        classifier.run(other, "finetune", world)


def test_time_that_is_up_leaves_a_result_and_a_signal_leaves_none(world, settings):
    """Either way the next attempt goes on; an earlier one's result does not outlive it."""
    made = settings("finetune", "finetune.batch=25", "finetune.epochs=2", "finetune.evaluate_every_epochs=9")
    tired = made.model_copy(update={"train": made.train.model_copy(update={"max_minutes": 1e-6})})
    assert classifier.run(tired, "finetune", world) == stopping.TIME_IS_UP
    told = summary(made)
    assert not told["finished"] and told["stopped_by"] == "train.max_minutes" and told["total_steps"] == 8
    if world.rank == 0:
        page = results.collect(results.of_folders([made.output_path]))
        assert not page.rows and page.notes == ["Left out, as it is not finished: quickstart-finetune (FINISHED)."]
    assert told["step"] == 2 and told["epochs"] == 0.5 and told["test_images"] == 597 and 0 < told["top1"] < 100
    wishes = SimpleNamespace(wish=stopping.INTERRUPTED)
    assert classifier.run(made, "finetune", world, wishes) == stopping.INTERRUPTED
    assert not (made.output_path / "summary.json").exists() and checkpoint.path_of(made.output_path, 4).exists()
    assert classifier.run(made, "finetune", world) == stopping.GO_ON
    done = summary(made)
    assert done["finished"] and done["stopped_by"] is None and done["step"] == 8 and done["epochs"] == 2
    if world.rank == 0:
        (row,) = results.collect(results.of_folders([made.output_path])).rows
        assert row.kind == "random" and row.judged == {"fine-tuned, 10 a class": {"0": done["top1"]}}


def test_a_judgement_stands_beside_the_pretraining_of_its_weights(world, settings):
    """Real runs, read back from MLflow."""
    words = ["train.epochs=1", "train.global_batch=1000", "schedule.warmup_epochs=0", "data.test_path=null"]
    made = settings("pretrain", *words)
    pretraining.pretrain(made, world)
    few = ["knn.bank_size=200", "knn.batch=100"]
    near = settings("knn", *few, f"model.weights={made.output_path}/backbone.pth")
    random = settings("knn", *few)
    for config in (near, random):
        evaluation.run_knn(config, world)
    if world.rank == 0:
        page = results.collect(results.of_folders([config.output_path for config in (made, near, random)]))
        ours, baseline = page.rows
        found = (ours.kind, ours.config, ours.seed, ours.epochs, ours.complete, ours.images, ours.workers)
        assert found == ("pretrained", "quickstart", "0", 1, True, "1200", str(world.size))
        assert ours.judged == {"kNN": {"0": summary(near)["top1"]}} and ours.digest == summary(near)["weights_digest"]
        assert (baseline.config, baseline.kind) == ("random weights, convnet4", "random")
        assert baseline.judged == {"kNN": {"0": summary(random)["top1"]}} and baseline.digest != ours.digest
        assert page.columns == ["kNN"] and not page.notes


def whole(job, source):
    """Features of all images, in one process."""
    return extract(job.backbone, source, job.config, Shard(0, 1), CPU, 1)


def test_what_differs_between_hosts(world, settings, monkeypatch):
    """Weights: a file that is another one there. Autocast: a CPU that is another one; rank 0's counts."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: world.rank == 0)
    assert evaluation.prepare(settings("knn", "precision.autocast=auto"), "knn", world).autocast == torch.bfloat16
    if world.size > 1:
        other = settings("knn", f"seed={world.rank}")  # of random weights
        with pytest.raises(InputError, match=r"model\.weights: none differs between the hosts"):
            evaluation.prepare(other, "knn", world)


def test_knn_predictions_are_numpy_s(world, settings):
    """The features too: the same bits, however the images are spread."""
    made = settings("knn", "knn.k=7", "knn.batch=64")
    job = evaluation.prepare(made, "knn", world)
    mine, queries = (f.of_unit_length() for f in evaluation.embedded(job))
    named = knn.predict(mine, queries.x, 7, 0.07, 10, world, CPU)
    bank, test = whole(job, job.source).of_unit_length(), whole(job, job.test).of_unit_length()
    assert torch.equal(workers.gather(queries.x, "test.features"), test.x)
    found = workers.gather(named, "named").numpy()
    labels = bank.labels.numpy()
    cosine = np.round(test.x.double().numpy() @ bank.x.double().numpy().T, 11)
    wanted = []
    for row in cosine:
        nearest = np.lexsort((np.arange(len(row)), -row))[:7]
        wanted.append(np.bincount(labels[nearest], np.exp((row[nearest] - row[nearest[0]]) / 0.07), 10).argmax())
    assert np.array_equal(found, wanted)


def test_the_knn_command_leaves_its_figures(world, settings):
    made = settings("knn", "knn.bank_size=300")
    evaluation.run_knn(made, world)
    told = summary(made)
    assert told["verb"] == "knn" and told["test_images"] == 597 and 50 < told["top1"] < 100
    confusion = np.loadtxt(made.output_path / "confusion.csv", delimiter=",", skiprows=1)[:, 1:]
    assert confusion.sum() == 597 and told["top1"] == pytest.approx(100 * np.trace(confusion) / 597)
    with pytest.raises(InputError, match="holds a finished knn"):
        evaluation.run_knn(made, world)


def plain_head(x, labels, rate, section, seed):
    """One linear layer by torch's own SGD, from zero."""
    head = torch.nn.Linear(x.shape[1], 10).double()
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD(head.parameters(), rate, section.momentum, weight_decay=section.weight_decay)
    batch = min(section.batch, len(x))
    per_epoch = len(x) // batch
    steps = round(section.epochs * per_epoch)
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        optimizer.param_groups[0]["lr"] = rate * (1 + np.cos(np.pi * epoch * per_epoch / steps)) / 2
        chosen = torch.from_numpy(epoch_order(seed, epoch, len(x))[place * batch :][:batch].copy())
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(x[chosen]), labels[chosen]).backward()
        optimizer.step()
    return head


def test_cached_heads_are_one_process_s_and_the_rate_is_chosen_without_the_test(world, settings):
    made = settings("probe", "probe.cached=true", "probe.cached_rates=[0.0001, 0.03]", "probe.epochs=6")
    job = evaluation.prepare(made, "probe", world)
    rows, labels = whole(job, job.source), job.source.labels
    shares = np.cumsum([0, *range(world.size, 0, -1)])  # uneven: some workers could not read some images
    mine = slice(*(len(labels) * shares[[world.rank, world.rank + 1]] // shares[-1]))
    train, (_, test) = Features(rows.x[mine], rows.labels[mine]), evaluation.embedded(job)
    outcome = linear_heads.fit_and_judge(train, test, 597, 10, made.probe, made.seed, world, CPU)
    assert outcome.rate == 0.03 and outcome.held_out[0.03] > outcome.held_out[0.0001]
    x = rows.x.double()
    mean, deviation = x.mean(0), x.std(0, unbiased=False)
    deviation[deviation == 0] = 1
    head = plain_head((x - mean) / deviation, torch.from_numpy(labels), 0.03, made.probe, made.seed)
    queries = whole(job, job.test)
    wanted = head((queries.x.double() - mean) / deviation)
    found = queries.x @ outcome.weight.T + outcome.bias
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3)
    right = 100 * (wanted.argmax(1) == queries.labels).double().mean().item()
    assert outcome.scores.top1 == pytest.approx(right, abs=0.05) and outcome.scores.top1 > 60
    # Other test images: the same choice, the same classifier
    wrong = Features(test.x, (test.labels + 1) % 10)
    again = linear_heads.fit_and_judge(train, wrong, 597, 10, made.probe, made.seed, world, CPU)
    assert again.rate == outcome.rate and torch.equal(again.weight, outcome.weight)
    assert again.scores.top1 < 20


def test_a_rate_that_diverges_is_not_chosen(world):
    draw = torch.Generator().manual_seed(0)
    labels = np.arange(90) % 3
    x = torch.randn(90, 5, generator=draw) + 3 * torch.nn.functional.one_hot(torch.from_numpy(labels), 5)
    mine = split(90, world.size)[world.rank]
    part = Features(x[mine], torch.from_numpy(labels[mine]))
    section = jobs.load_for("probe", None, ["probe.cached_rates=[1e38, 0.1]", "probe.batch=30", "probe.epochs=5"]).probe
    outcome = linear_heads.fit_and_judge(part, part, 90, 3, section, 0, world, CPU)
    assert outcome.rate == 0.1 and np.isnan(outcome.held_out[1e38]) and outcome.scores.top1 > 80
    for rates in ((1e38,), (1e38, 3e38)):
        only = section.model_copy(update={"cached_rates": rates})
        with pytest.raises(InputError, match="classifier is not finite with the rate 1e"):
            linear_heads.fit_and_judge(part, part, 90, 3, only, 0, world, CPU)


def test_the_cached_command_leaves_a_classifier(world, settings):
    made = settings("probe", "probe.cached=true", "probe.epochs=10")
    evaluation.run_cached_probe(made, world)
    told = summary(made)
    assert told["cached"] and told["test_images"] == 597 and told["top1"] > 60
    state = torch.load(made.output_path / "classifier.pth", weights_only=True)
    job = evaluation.prepare(made.model_copy(update={"output": f"{made.output}-again"}), "probe", world)
    test = whole(job, job.test)
    scores = Scores(10)
    scores.add(test.x @ state["fc.weight"].T + state["fc.bias"], test.labels)
    assert scores.top1 == pytest.approx(told["top1"], abs=0.05)


def test_online_evaluation_is_not_felt_by_pretraining(world, settings):
    """With and without, in the middle of a run: the same weights, statistics, optimizer state, and draws."""
    words = ["train.epochs=2", "train.global_batch=300", "schedule.warmup_epochs=0", "checkpoint.every_epochs=1"]
    watched = settings("pretrain", *words, "knn.every_epochs=1", "knn.at_start=true", "knn.linear_probe=true")
    alone = settings("pretrain", *words, "knn.every_epochs=null", "knn.at_start=false", "data.test_path=null")
    drawn = []
    for made in (watched, alone):
        torch.manual_seed(0)
        pretraining.pretrain(made, world)
        drawn.append(torch.rand(3))
    a, b = (checkpoint.load(checkpoint.path_of(made.output_path, 8)) for made in (watched, alone))
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)
    assert torch.equal(*drawn)
    lines = [json.loads(line) for line in (watched.output_path / "journal.jsonl").read_text().splitlines()]
    probes = {v["step"]: v["metrics"]["probe_accuracy"] for v in lines if "probe_accuracy" in v.get("metrics", {})}
    assert probes.keys() == {0, 4, 8} and all(50 < value < 100 for value in probes.values())


def test_the_same_images_for_any_slices(world, settings):
    """The labelled loader: what all workers hold together is what one would."""
    made = settings("probe")
    source = open_source(made.data, "train")
    batches = []
    for shard in (world.shard, Shard(0, 1)):
        with LabelledLoader(
            source, made.views, channels=1, seed=3, global_batch=25, shard=shard, start_step=47, stop_step=49
        ) as loader:
            batches.append(list(loader))
    for mine, all_of_them in zip(*batches, strict=True):
        assert torch.equal(workers.gather(mine.images, "images"), all_of_them.images)
        assert torch.equal(workers.gather(mine.labels, "labels"), all_of_them.labels)
        assert np.array_equal(all_of_them.labels, source.labels[all_of_them.indices])
    assert not np.array_equal(batches[1][0].indices, batches[1][1].indices)


@pytest.fixture(scope="module")
def broken(world, folder):
    """A quarter of the digits, two training images and a test image of which are broken, and a list of these."""
    with workers.together():
        if world.rank == 0:
            for part, bad in (("train", [0, 150]), ("test", [70])):
                for number, file in enumerate(sorted((folder / "digits" / part).glob("*/*.png"))[::4]):
                    target = folder / "broken" / part / file.parent.name / file.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(b"no image" if number in bad else file.read_bytes())
                    if number in bad:
                        with (folder / "exclude.txt").open("a") as listed:
                            listed.write(f"{'test:' * (part == 'test')}{file.parent.name}/{file.name}\n")
    skip = [f"data.path={folder}/broken/train", f"data.test_path={folder}/broken/test", "data.on_bad_file=skip"]
    return skip, [*skip, f"data.exclude={folder}/exclude.txt"]


def test_bad_images_are_left_out_of_features_as_if_they_were_excluded(world, settings, broken):
    made = [settings("knn", *words, "knn.batch=64") for words in broken]
    for config in made:
        evaluation.run_knn(config, world)
    skipped, excluded = ((config.output_path / "confusion.csv").read_text() for config in made)
    assert skipped == excluded and summary(made[0])["test_images"] == 149
    words = ["probe.cached=true", "probe.labels='100%'", "probe.epochs=6"]
    made = [settings("probe", *some, *words) for some in broken]
    for config in made:
        evaluation.run_cached_probe(config, world)
    skipped, excluded = map(summary, made)
    assert skipped["test_images"] == 149 and skipped["rate"] == excluded["rate"] and skipped["top1"] > 50
    assert skipped["top1"] == pytest.approx(excluded["top1"], abs=0.7)  # one image of rounding


def test_another_image_and_its_label_take_a_bad_one_s_place(world, settings, broken):
    words = ["probe.labels='100%'", "probe.batch=43", "probe.epochs=1"]  # six batches, and a tail to take others from
    made = settings("probe", *broken[0], *words)
    training = classifier.build(evaluation.prepare(made, "probe", world))
    seen = []
    train_step = classifier.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier, "train_step", lambda *args: (seen.append(args[1:]), train_step(*args))[1])
        assert classifier.fit(training, None, None) == stopping.GO_ON
    order = epoch_order(made.seed, 0, 300)[: 43 * 6]
    bad = {0, 150} & set(order.tolist())
    assert bad and set(training.bad_files) == bad
    assert classifier.count(training).counted == 149
    images, labels = (torch.cat([workers.gather(pair[k], "seen") for pair in seen]) for k in (0, 1))
    assert not (images == 0).flatten(1).all(1).any()
    right = torch.from_numpy(training.source.labels[order])
    kept = ~np.isin(order, list(bad))
    assert torch.equal(labels[kept], right[kept]) and len(labels) == 258
    fails = settings("probe", *broken[0], *words, "data.on_bad_file=fail")
    with pytest.raises(InputError, match="cannot be read"):
        classifier.run(fails, "probe", world)
