"""Training a classifier with labels: `probe` (the backbone is frozen) and `finetune` (it is not), one loop for both.

The recipe is facebookresearch/barlowtwins, evaluate.py: SGD, one cosine for both rates, which moves on with the epoch;
crop and flip; a frozen backbone stays in evaluation mode. The loss is a sum over a worker's samples divided by the
global count, so that gradients summed over the workers are those of one process (see workers.GradientSum).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dali.loader import LabelledLoader
from dali.order import steps_per_epoch
from dali.sources import Source
from dali.spec import JitterSpec, ViewsSpec
from pipeline import checkpoint, evaluation, loading, progress, schedule, stopping, sync_bn, watchdog, workers
from pipeline.bad_files import BadFiles, Readable
from pipeline.config import ClassifierSection, Config, FinetuneSection
from pipeline.evaluation import Evaluation
from pipeline.guard import Buffers, Guard
from pipeline.optim import SGD
from pipeline.plan import Plan
from pipeline.pretraining import checkpoints_failed, end_saving, mark_ended, whole_state
from pipeline.resuming import begin_attempt, find_state, flat, restore
from pipeline.scores import Scores, to_count
from pipeline.tracking import Tracker
from pipeline.training import autocast, update


class Classifier(nn.Module):
    """Images (N, C, H, W) to logits (N, K). A frozen backbone is run without a graph, in evaluation mode."""

    def __init__(self, backbone: nn.Module, feature_dim: int, num_classes: int, frozen: bool, seed: int) -> None:
        super().__init__()
        self.backbone, self.frozen = backbone, frozen
        self.head = nn.Linear(feature_dim, num_classes)
        draws = torch.randn(self.head.weight.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.head.weight.copy_(0.01 * draws)
            self.head.bias.zero_()
        backbone.requires_grad_(not frozen)

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        self.backbone.train(mode and not self.frozen)
        return self

    def forward(self, y: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            features = self.backbone(y)
        return self.head(features)


@dataclass
class Training:
    """Everything a step touches. `step` counts completed updates."""

    job: Evaluation
    section: ClassifierSection
    plan: Plan
    model: Classifier
    optimizer: torch.optim.Optimizer
    gradients: workers.GradientSum
    scaler: torch.amp.GradScaler
    untouched: dict[str, Tensor] | None  # a frozen backbone's tensors as they were loaded
    step: int = 0
    best: dict[str, float] = field(default_factory=dict)  # of the test counts so far, the one with the highest top1
    bad_files: dict[int, str] = field(default_factory=dict)  # images that cannot be read, by index, and why
    resumed_run_id: str | None = None
    writer: checkpoint.Writer | None = None  # on rank 0

    def __post_init__(self) -> None:
        self.buffers = Buffers(self.model)

    @property
    def config(self) -> Config:
        return self.job.config

    @property
    def world(self) -> workers.World:
        return self.job.world

    @property
    def source(self) -> Source:
        return self.job.source

    @property
    def autocast(self) -> torch.dtype | None:
        return self.job.autocast

    @property
    def device(self) -> torch.device:
        return self.job.device


def training_views(views: ViewsSpec, section: ClassifierSection) -> ViewsSpec:
    """Crop and flip alone."""
    off = {"jitter": JitterSpec(prob=0.0), "grey": 0.0, "blur": (0.0, 0.0), "solarize": (0.0, 0.0)}
    return views.model_copy(update={**off, "crop_area": section.crop_area or views.crop_area})


def make_plan(config: Config, section: ClassifierSection, num_samples: int) -> Plan:
    """Durations in steps; `knn_steps` is how often the test images are counted."""
    per_epoch = steps_per_epoch(num_samples, section.batch)
    total = max(1, round(section.epochs * per_epoch))
    every_epochs, every_steps = config.checkpoint.every_epochs * per_epoch, config.checkpoint.every_steps
    return Plan(
        num_samples=num_samples,
        num_excluded=0,  # the subset's own list says what was taken
        steps_per_epoch=per_epoch,
        total_steps=total,
        warmup_steps=0,
        stop_step=min(total, config.train.stop_after_steps or total),
        checkpoint_steps=min(every_epochs, every_steps or every_epochs),
        milestone_steps=None,
        knn_steps=section.evaluate_every_epochs * per_epoch,
        image_steps=total,
    )


def build(job: Evaluation) -> Training:
    """A training at step 0, equal on all workers by its seed."""
    config = job.config
    section = evaluation.section_of(config, job.verb)
    assert section is not None
    backbone = job.backbone
    frozen = not isinstance(section, FinetuneSection)
    model = Classifier(backbone, backbone.feature_dim, len(job.classes), frozen, config.seed)
    model = model.to(job.device, dtype=getattr(torch, config.precision.dtype)).train()
    if not frozen:
        sync_bn.convert(model.backbone, job.world.process_set)
    groups: list[dict[str, Any]] = [
        {"name": "classifier", "params": list(model.head.parameters()), "base_lr": section.lr_classifier}
    ]
    if isinstance(section, FinetuneSection):
        parameters = list(model.backbone.parameters())
        groups.append({"name": "backbone", "params": parameters, "base_lr": section.lr_backbone})
    for group in groups:
        group["lr"] = group["base_lr"]
    passes = [(p, 1) for p in model.parameters() if p.requires_grad]
    return Training(
        job=job,
        section=section,
        plan=make_plan(config, section, len(job.source)),
        model=model,
        optimizer=SGD(groups, momentum=section.momentum, weight_decay=section.weight_decay, fused=True),
        gradients=workers.GradientSum(passes, config.train.gradient_groups, job.world.process_set),
        scaler=torch.amp.GradScaler(job.device.type, enabled=job.autocast is torch.float16),
        untouched={k: v.clone() for k, v in model.backbone.state_dict().items()} if frozen else None,
    )


def shaping(training: Training) -> dict[str, Any]:
    """The values that shape what comes out, by dotted key."""
    config = training.job.config
    values = {key: getattr(config, key).model_dump(mode="json") for key in ("data", "views", "model", "precision")}
    del values["model"]["projector"]
    section = training.section.model_dump(mode="json", exclude={"labels", "evaluate_every_epochs"})
    return flat({**values, "seed": config.seed, "verb": training.job.verb, training.job.verb: section}) | {
        "weights": training.job.digest
    }


def resume(training: Training) -> None:
    """Continue from the checkpoint that `checkpoint.resume` means, if there is one.

    Raises:
        InputError: as `resuming.find_state`.
    """
    job = training.job
    digest, stop_step = job.source.digest, training.plan.stop_step
    state = find_state(job.config, job.world.rank, shaping(training), digest, stop_step, f"{job.verb}.epochs")
    if state is not None:
        restore(training, state)
        training.best = state["facts"]["best"]


def train_step(training: Training, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """One update from this worker's samples; returns its part of the loss, and whether the update was left out."""
    plan = training.plan
    epoch_begin = training.step // plan.steps_per_epoch * plan.steps_per_epoch
    schedule.set_lr(training.optimizer, epoch_begin, 0, plan.total_steps, 0.0)
    training.gradients.start()
    training.buffers.keep()
    with autocast(training):
        logits = training.model(images)
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = cross_entropy(logits.to(wide), labels, reduction="sum") / training.section.batch
    training.scaler.scale(loss).backward()
    # A worker's own loss must not decide. The summed gradients are equal on all, but in fp16 they may merely overflow
    whole = loss.detach().clone()
    whole = workers.sum_(whole, "classifier.whole_loss") if training.scaler.is_enabled() else whole.zero_()
    left_out = update(training.optimizer, training.gradients, training.scaler, whole)
    training.buffers.restore(left_out)
    training.step += 1
    return loss.detach(), left_out


@torch.no_grad()
def count(training: Training) -> Scores:
    """What the classifier makes of the test images, each counted once."""
    job, model = training.job, training.model
    scores = Scores(len(job.classes))
    model.eval()
    with loading.evaluation_loader(job.test, job.config, job.world.shard, job.device, job.threads) as loader:
        for batch in loader:
            watchdog.beat()
            assert batch.labels is not None
            scores.add(model(batch.images).float(), batch.labels)
    model.train()
    return scores.sum(to_count(job.test))


def check_untouched(training: Training) -> None:
    """Compare a frozen backbone, bit for bit, with what was loaded.

    Raises:
        RuntimeError: naming the first tensor that moved.
    """
    if training.untouched is None:
        return
    for name, tensor in training.model.backbone.state_dict().items():
        if not torch.equal(tensor, training.untouched[name]):
            raise RuntimeError(f"{name} of the frozen backbone has changed by step {training.step}")


def open_loader(training: Training) -> LabelledLoader:
    """The batches from `training.step` on."""
    job, config = training.job, training.job.config
    return LabelledLoader(
        job.source,
        training_views(config.views, training.section),
        seed=config.seed,
        global_batch=training.section.batch,
        shard=job.world.shard,
        start_step=training.step,
        stop_step=training.plan.stop_step,
        report_bad=True,
        **loading.settings(config, job.device, job.threads),
    )


@watchdog.phase("checkpoint")
def save(training: Training, tracker: Tracker | None) -> None:
    """Begin to write a checkpoint on rank 0, once all workers are known to hold the same finite state.

    Raises:
        RuntimeError: by all workers alike; the checkpoints before stay as they are.
    """
    weights = whole_state(training.model, training.optimizer, training.step)
    check_untouched(training)
    if tracker is None or training.writer is None:
        return
    config = training.job.config
    state = {
        "step": training.step,
        **weights,
        "scaler": training.scaler.state_dict(),
        "config": config.model_dump(mode="json"),
        "run_id": tracker.run_id,
        "bad_files": {str(index): reason for index, reason in training.bad_files.items()},
        "facts": {
            "digest": training.job.source.digest,
            "shaping": shaping(training),
            "num_samples": len(training.job.source),
            "best": training.best,
        },
    }
    training.writer.save(state, milestone=False, first=tracker.sync)


@watchdog.phase("evaluate")
def judge(training: Training, tracker: Tracker | None) -> Scores:
    """Count the test images now; the classifier that did best so far is kept in `classifier_best.pth`."""
    scores = count(training)
    values = scores.metrics()
    if values["top1"] > training.best.get("top1", -1.0):
        training.best = {"step": training.step, **values}
        if tracker is not None:
            write(training, "classifier_best.pth")
    if tracker is not None:
        tracker.log(training.step, values)
        shown = ", ".join(f"{key.replace('top', 'top-')} {value:.2f} %" for key, value in values.items())
        print(f"test after epoch {training.plan.epoch(training.step):g}: {shown}", flush=True)
    return scores


def write(training: Training, name: str) -> None:
    backbone, head = training.job.backbone, training.model.head
    path = Path(training.job.config.output_path) / name
    evaluation.save_classifier(path, backbone, evaluation.head_state(backbone, head.weight, head.bias))


def fit(training: Training, tracker: Tracker | None, wishes: stopping.Wishes | None) -> int:
    """Train to `plan.stop_step`; returns stopping.GO_ON, or why all workers ended earlier, after the same step.

    Raises:
        RuntimeError: by all workers alike, if gradients are not finite (`train.on_non_finite`).
    """
    job, plan, verdict = training.job, training.plan, stopping.GO_ON
    config, vote = job.config, workers.Vote()
    rates = progress.Progress(plan, training.section.batch, training.step)
    started, limit = time.monotonic(), config.train.max_minutes
    losses: list[Tensor] = []
    guard = Guard(
        config,
        job.source,
        training.model.backbone,
        job.world.rank,
        lambda: autocast(training),
        training.section.batch,
        add_up=True,
    )
    with open_loader(training) as loader:
        batches = Readable(training, loader)
        for batch in batches:
            watchdog.enter("step")
            assert batch.labels is not None
            loss, left_out = train_step(training, batch.images, batch.labels)
            losses.append(loss)
            step = training.step
            watchdog.stepped(step)
            guard.after_step(step, batch, {"loss": loss}, left_out)
            rates.add(batches.wait_seconds)
            if step % config.tracking.log_every_steps == 0 or step == plan.stop_step:
                loss = workers.sum_(torch.stack(losses).mean(), "classifier.loss")
                values = rates.measure(step, {"loss": loss, "skipped_steps": guard.skipped}, training.optimizer)
                if config.data.on_bad_file == "skip":
                    values["bad_files"] = len(training.bad_files)
                losses.clear()
                if tracker is not None:
                    progress.show(plan, step, values)
                    tracker.log(step, values)
            if step != plan.stop_step:
                if plan.knn_steps and step % plan.knn_steps == 0:
                    judge(training, tracker)
                if step % plan.checkpoint_steps == 0:
                    save(training, tracker)
            late = limit is not None and time.monotonic() - started > 60 * limit
            wish = wishes.wish if wishes is not None else stopping.GO_ON
            verdict = vote.cast(max(wish, stopping.TIME_IS_UP if late else stopping.GO_ON))
            if verdict != stopping.GO_ON:
                break
            watchdog.enter("data")
        batches.close()
    guard.close()
    vote.close()
    return stopping.GO_ON if training.step == plan.stop_step else verdict


@contextmanager
def recorded(training: Training, tracker: Tracker | None) -> Iterator[None]:
    """As `evaluation.recorded`; a checkpoint that is being written is finished first."""
    with evaluation.recorded(tracker, training.config):
        try:
            yield
        except BaseException:
            if training.writer is not None:
                training.writer.join()
            raise


def how_far(training: Training, verdict: int) -> dict[str, Any]:
    """For the summary: as that of a pretraining."""
    step, plan = training.step, training.plan
    return {
        "total_steps": plan.total_steps,
        "epochs": plan.epoch(step),
        "finished": step == plan.total_steps,
        "stopped_by": stopping.WORDS.get(verdict),
    }


def begin(training: Training) -> Tracker | None:
    """Begin this attempt's record, on rank 0; what an earlier one said of the outcome no longer holds."""
    config = training.job.config
    tracker = evaluation.start_tracker(training.job, training.resumed_run_id)
    if tracker is not None:
        training.writer = checkpoint.Writer(config.output_path, config.checkpoint.keep)
        begin_attempt(config.output_path)
    return tracker


def run(config: Config, verb: str, world: workers.World, wishes: stopping.Wishes | None = None) -> int:
    """The whole training, or its next part; returns stopping.GO_ON, or why it ended early.

    The test images are counted, and the summary written, at the end and when `train.max_minutes` is up; a training that
    was preempted or interrupted leaves its checkpoint, from which the next attempt goes on, and no summary.
    """
    training = build(evaluation.prepare(config, verb, world))
    resume(training)
    workers.share_state(training.model, training.optimizer)
    tracker = begin(training)
    began = time.monotonic()
    with recorded(training, tracker):
        try:
            verdict = fit(training, tracker, wishes)
        except BadFiles:
            save(training, tracker)
            raise
        scores = judge(training, tracker) if verdict in (stopping.GO_ON, stopping.TIME_IS_UP) else None
        save(training, tracker)
        end_saving(training.writer, tracker, training.step)
        if tracker is not None:
            write(training, "classifier.pth")
        if scores is not None:
            more = how_far(training, verdict) | {"checkpoints_failed": checkpoints_failed(training.writer)}
            more |= {f"best_{key}": value for key, value in training.best.items()}
            evaluation.finish(training.job, tracker, scores, training.step, more, time.monotonic() - began)
        if verdict != stopping.GO_ON:
            epochs = f"{training.plan.epoch(training.step):.4g} of {training.section.epochs:g} epochs"
            training.job.say(f"{verb}: stopped by {stopping.WORDS[verdict]} after {epochs}; start it again to go on")
    watchdog.enter("end")
    if tracker is not None:
        mark_ended(tracker, verdict)
    workers.barrier("end")
    return verdict
