"""The training step and the loop around it. One worker takes the same path as many."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dali.loader import Batch, TwoViewLoader
from dali.order import worker_positions
from dali.sources import Source
from pipeline import loading, schedule, stopping, watchdog, workers
from pipeline.bad_files import Readable
from pipeline.config import Config
from pipeline.guard import Buffers, Guard
from pipeline.loss import BarlowTwinsLoss, Terms
from pipeline.model import BarlowTwins
from pipeline.plan import Plan
from pipeline.progress import Progress
from pipeline.sync_bn import frozen_statistics


@dataclass
class Run:
    """Everything a step touches. `step` counts completed updates."""

    config: Config
    plan: Plan
    world: workers.World
    device: torch.device
    threads: int
    source: Source
    model: BarlowTwins
    loss: BarlowTwinsLoss
    optimizer: torch.optim.Optimizer
    gradients: workers.GradientSum
    scaler: torch.amp.GradScaler
    autocast: torch.dtype | None
    step: int = 0
    bad_files: dict[int, str] = field(default_factory=dict)  # images that cannot be read, by index, and why
    resumed_run_id: str | None = None
    vote: workers.Vote = field(default_factory=workers.Vote)

    def __post_init__(self) -> None:
        self.buffers = Buffers(self.model)


class Outcome(NamedTuple):
    """What a step leaves to look at: its terms, the embeddings z1, z2 (n, D) of this worker's slice, and whether it was
    left out because something was not finite (0 or 1, on the device).
    """

    terms: Terms
    z1: Tensor
    z2: Tensor
    left_out: Tensor


class Forward(NamedTuple):
    """The same before the update."""

    terms: Terms
    z1: Tensor
    z2: Tensor


def train_step(run: Run, y1: Tensor, y2: Tensor) -> Outcome:
    """One update from this worker's slices of the two views, each (n, C, S, S).

    The learning rate is a function of the step alone. A loss or a gradient that is not finite masks the update, running
    statistics included, on the device and on all workers alike, since all of them hold the same sums.
    """
    plan, optimizer = run.plan, run.optimizer
    schedule.set_lr(optimizer, run.step, plan.warmup_steps, plan.total_steps, run.config.schedule.final_factor)
    run.gradients.start()
    run.buffers.keep()
    terms, z1, z2 = backward(run, y1, y2)
    left_out = update(optimizer, run.gradients, run.scaler, terms.loss)
    run.buffers.restore(left_out)
    run.step += 1
    return Outcome(Terms(*(term.detach() for term in terms)), z1.detach(), z2.detach(), left_out)


def update(
    optimizer: torch.optim.Optimizer, gradients: workers.GradientSum, scaler: torch.amp.GradScaler, loss: Tensor
) -> Tensor:
    """Sum the gradients over the workers and take the step, unless they or the loss, equal on all, are not finite.

    Returns whether it was left out: 0 or 1, on the device.
    """
    gradients.wait()  # Horovod: the sums must be there before anything looks at the gradients
    scaler.unscale_(optimizer)
    left_out = gradients.not_finite(loss)
    if not scaler.is_enabled():
        optimizer.found_inf = left_out  # type: ignore[attr-defined]
    elif scaler.get_scale() >= 1:  # gradients that overflow are how the scale is found; below 1 it is not the scale
        left_out = (~torch.isfinite(loss.detach())).to(torch.float32)
    scaler.step(optimizer)
    scaler.update()
    return left_out


def backward(run: Run, y1: Tensor, y2: Tensor) -> Forward:
    """Terms of the global batch; this worker's contribution to the gradient is then in `.grad`, or on its way."""
    train = run.config.train
    if train.micro_batches > 1:
        return _backward_in_parts(run, y1, y2)
    with autocast(run):
        z1, z2 = _both(run.model, y1, y2)
    terms = run.loss(z1, z2, train.global_batch)
    run.scaler.scale(terms.loss).backward()
    return Forward(terms, z1, z2)


def _backward_in_parts(run: Run, y1: Tensor, y2: Tensor) -> Forward:
    """The same for a batch whose activations do not fit: only one micro-batch's are held at a time.

    Pass 1 runs the backbone over all micro-batches without a graph. The projector and the loss see the whole batch and
    give dL/d(features). Pass 2 runs each micro-batch again and continues backward from its part. Exact for projector
    and loss; the backbone's batch norm has each micro-batch's own statistics, over all workers.
    """
    train, backbone = run.config.train, run.model.backbone
    parts = worker_positions(train.global_batch, train.micro_batches, run.world.shard)
    sizes = [part.stop - part.start for part in parts]
    with torch.no_grad(), autocast(run), frozen_statistics(backbone):
        firsts = [_both(backbone, *views) for views in zip(y1.split(sizes), y2.split(sizes), strict=True)]
    features = [torch.cat(view).requires_grad_() for view in zip(*firsts, strict=True)]
    with autocast(run):
        z1, z2 = _both(run.model.projector, *features)
    terms = run.loss(z1, z2, train.global_batch)
    run.scaler.scale(terms.loss).backward()
    gradients = [f.grad.split(sizes) for f in features if f.grad is not None]
    for part1, part2, gradient1, gradient2 in zip(y1.split(sizes), y2.split(sizes), *gradients, strict=True):
        with autocast(run):
            f1, f2 = _both(backbone, part1, part2)
        torch.autograd.backward([f1, f2], [gradient1.to(f1.dtype), gradient2.to(f2.dtype)])
    return Forward(terms, z1, z2)


def _both(module: torch.nn.Module, view1: Tensor, view2: Tensor) -> tuple[Tensor, Tensor]:
    """Both views through a module in one call; its batch norms keep their statistics apart."""
    out1, out2 = module(torch.cat([view1, view2])).chunk(2)
    return out1, out2


def autocast(run: Any) -> Any:
    """The block in which a run's model is called: its `device` and `autocast` say how."""
    return nullcontext() if run.autocast is None else torch.autocast(run.device.type, dtype=run.autocast)


def open_loader(run: Run, report_bad: bool = False) -> TwoViewLoader:
    """The batches from `run.step` on; `report_bad` as there."""
    config = run.config
    return TwoViewLoader(
        run.source,
        config.views,
        seed=config.seed,
        global_batch=config.train.global_batch,
        micro_batches=config.train.micro_batches,
        shard=run.world.shard,
        start_step=run.step,
        stop_step=run.plan.stop_step,
        report_bad=report_bad,
        **loading.settings(config, run.device, run.threads),
    )


def train(
    run: Run,
    after_step: Callable[[Run, Batch, Outcome], None],
    log: Callable[[Run, dict[str, float]], None],
    wishes: stopping.Wishes | None = None,
) -> int:
    """Train to `plan.stop_step`; returns stopping.GO_ON, or why all workers ended earlier, after the same step.

    `after_step` is called by all workers after every step, for what is due then (checkpoints, kNN, pictures); `log` on
    rank 0 every `tracking.log_every_steps`, with means since the last call.

    Raises:
        RuntimeError: by all workers alike, if losses or gradients are not finite (`train.on_non_finite`).
    """
    config, verdict = run.config, stopping.GO_ON
    progress = Progress(run.plan, config.train.global_batch, run.step)
    guard = Guard(
        config, run.source, run.model.backbone, run.world.rank, lambda: autocast(run), config.train.global_batch
    )
    started, time_limit = time.monotonic(), config.train.max_minutes
    with open_loader(run, report_bad=True) as loader:
        batches = Readable(run, loader)
        for batch in batches:
            watchdog.enter("step")
            result = train_step(run, batch.y1, batch.y2)
            watchdog.stepped(run.step)
            guard.after_step(run.step, batch, result.terms._asdict(), result.left_out)
            progress.add(batches.wait_seconds)
            if run.step % config.tracking.log_every_steps == 0 or run.step == run.plan.stop_step:
                values = progress.measure(run.step, result.terms._asdict(), run.optimizer)
                values["skipped_steps"] = guard.skipped
                if config.data.on_bad_file == "skip":
                    values["bad_files"] = len(run.bad_files)
                if run.world.rank == 0:
                    log(run, values)
            after_step(run, batch, result)
            late = time_limit is not None and time.monotonic() - started > 60 * time_limit
            wish = wishes.wish if wishes is not None else stopping.GO_ON
            verdict = run.vote.cast(max(wish, stopping.TIME_IS_UP if late else stopping.GO_ON))
            if verdict != stopping.GO_ON:
                break
            watchdog.enter("data")
        batches.close()
    guard.close()
    run.vote.close()
    # A wish that is heard only after the last step changes nothing: the run is complete
    return stopping.GO_ON if run.step == run.plan.stop_step else verdict
