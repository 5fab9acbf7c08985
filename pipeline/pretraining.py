"""A pretraining run from its config to its last file: what is built, what is due after a step, what remains."""

import json
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dali.errors import InputError
from dali.interface import Report, silent
from dali.loader import Batch
from dali.order import worker_indices, worker_positions
from dali.sources import Source, open_source, open_test
from pipeline import (
    checkpoint,
    diagnostics,
    failures,
    lease,
    online,
    pictures,
    progress,
    stopping,
    sync_bn,
    tracking,
    training,
    watchdog,
    workers,
)
from pipeline.bad_files import BadFiles
from pipeline.config import Config
from pipeline.cores import threads_per_worker
from pipeline.file_systems import check_output
from pipeline.loss import BarlowTwinsLoss
from pipeline.model import Backbone, BarlowTwins, autocast_dtype, build_model
from pipeline.optim import build_optimizer
from pipeline.plan import Plan, describe, make_plan
from pipeline.resuming import begin_attempt, find_state, restore, shaping
from pipeline.tracking import Tracker
from pipeline.training import Outcome, Run
from pipeline.views_sheet import views_sheet
from pipeline.weights import RANDOM, backbone_state, load_backbone_weights

Module = TypeVar("Module", bound=torch.nn.Module)


def check(config: Config, report: Report = silent) -> tuple[Source, Plan]:
    """Everything that can be refused before a worker starts: images, their number, backbone, output folder.

    Raises:
        InputError: one line.
    """
    source = open_source(config.data, "train", report)
    plan = make_plan(config, len(source), source.excluded)
    with torch.device("meta"):
        build_model(config.model, config.data.channels, config.views.size, config.seed)
    check_output(config.output_path)
    return source, plan


def check_output_is_shared(output: Path, rank: int) -> None:
    """Every worker must see what rank 0 writes there.

    Raises:
        InputError: on a host where the folder is another one.
    """
    token = workers.from_rank_0(uuid.uuid4().hex, "output.token")
    note = output / f".shared-{token}"
    with workers.together():
        if rank == 0:
            check_output(output)
            note.write_text("")
    with workers.together():
        if not note.exists():
            raise InputError(f"output: {output} is not the folder rank 0 writes to; it must be shared by all hosts")
    if rank == 0:
        note.unlink()


def take_lease(output: Path) -> tuple[lease.Lease, bool]:
    """The folder's lease, and whether an attempt that died there was marked KILLED. On rank 0.

    Raises:
        InputError: another job owns the folder.
    """
    held = lease.Lease.take(output)
    failures.forget(output)
    return held, held.is_new and tracking.mark_killed(output, "killed, or its machine went away")


@contextmanager
def owned(output: Path, world: workers.World) -> Iterator[None]:
    """A block in which this job, and no other, writes to the output folder. Entered by all workers.

    An attempt that died there without a word is marked KILLED in the tracking.

    Raises:
        InputError: another job owns the folder.
    """
    held, mourned = None, False
    with workers.together():
        if world.rank == 0:
            held, mourned = take_lease(output)
    try:
        yield
    except InputError:  # no attempt follows that would send it
        if mourned:
            tracking.sync(output, patience=10)
        raise
    finally:
        if held is not None:
            held.release()


def prepare(config: Config, world: workers.World) -> Run:
    """Build a run at step 0, or at the step of the checkpoint that `checkpoint.resume` means; equal on all workers.

    Raises:
        InputError: by all workers alike.
    """
    with workers.together():
        device = workers.choose_device(config.device, world.local_rank, world.local_size)
        source, plan = check(config)
        config.train.check_workers(world.size)
    check_same_list(source)
    check_output_is_shared(config.output_path, world.rank)
    with workers.together():
        run = build(config, world, device, source, plan)
    run.autocast = workers.from_rank_0(run.autocast, "autocast")  # CPUs may differ between hosts
    resume(run)
    workers.share_state(run.model, run.optimizer)
    return run


def build(config: Config, world: workers.World, device: torch.device, source: Source, plan: Plan) -> Run:
    """A run at step 0, without a word to other workers; equal on all of them by its seed.

    Raises:
        InputError: the weights file.
    """
    threads = set_up_torch(config, world, device)
    model = build_model(config.model, config.data.channels, config.views.size, seed=config.seed)
    load_weights(model.backbone, config, world.rank)
    sync_bn.convert(model, world.process_set, views=2)
    model = placed(model, config, device)
    loss = config.loss
    autocast = wanted_autocast(config, device)
    return Run(
        config=config,
        plan=plan,
        world=world,
        device=device,
        threads=threads,
        source=source,
        model=model,
        loss=BarlowTwinsLoss(
            config.model.projector[-1], loss.lambd, loss.scale, loss.combine, loss.eps, world.process_set
        ).to(device),
        optimizer=build_optimizer(config.optimizer, list(model.named_parameters()), config.train.global_batch),
        gradients=sum_gradients(config, model, world.process_set),
        scaler=torch.amp.GradScaler(device.type, enabled=autocast is torch.float16),
        autocast=autocast,
    )


def set_up_torch(config: Config, world: workers.World, device: torch.device) -> int:
    """Threads, GPU and TF32 of this process; returns the threads, for torch and for DALI."""
    threads = config.data.threads or threads_per_worker(world.local_size)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.precision.tf32
    return threads


def load_weights(backbone: Backbone, config: Config, rank: int) -> None:
    """The weights that `model.weights` names, if any.

    Raises:
        InputError: as `load_backbone_weights`.
    """
    weights = config.model.weights
    if weights is not None and weights != RANDOM:
        report = load_backbone_weights(backbone, weights)
        if rank == 0:
            print(f"weights: {report}", flush=True)


def placed(model: Module, config: Config, device: torch.device) -> Module:
    """The model on its device, in the type and memory order of `precision`."""
    memory_format = torch.channels_last if config.precision.channels_last else torch.contiguous_format
    return model.to(device=device, dtype=getattr(torch, config.precision.dtype)).to(memory_format=memory_format)


def wanted_autocast(config: Config, device: torch.device) -> torch.dtype | None:
    wanted = "off" if config.precision.dtype == "float64" else config.precision.autocast
    return autocast_dtype(wanted, config.model.backbone, device.type)


def sum_gradients(
    config: Config, model: BarlowTwins, process_set: workers.ProcessSet = workers.everyone
) -> workers.GradientSum:
    """With micro-batches the backbone takes part in one backward pass each, the projector in a single one."""
    passes = [(p, config.train.micro_batches) for p in model.backbone.parameters() if p.requires_grad]
    passes += [(p, 1) for p in model.projector.parameters() if p.requires_grad]
    return workers.GradientSum(passes, config.train.gradient_groups, process_set)


def check_same_list(source: Source) -> None:
    """All hosts must list the same images.

    Raises:
        InputError: with how many images each host sees.
    """
    seen = workers.gather_objects((source.digest, len(source)), "source.digest")
    strays = [rank for rank, row in enumerate(seen) if row != seen[0]]
    if strays:
        raise InputError(
            f"data.path: rank {strays[0]} lists other images than rank 0 ({seen[strays[0]][1]:,} against "
            f"{seen[0][1]:,}); every host needs the same files"
        )


def resume(run: Run) -> None:
    """Continue from the checkpoint that `checkpoint.resume` means, if there is one.

    Raises:
        InputError: as `resuming.find_state`.
    """
    state = find_state(run.config, run.world.rank, shaping(run.config), run.source.digest, run.plan.stop_step)
    if state is None:
        return
    restore(run, state)
    if run.config.precision.autocast == "auto" and run.config.precision.dtype != "float64":
        # Decided once, where the run began: on another kind of machine it would be another run
        begun = state["facts"].get("autocast", str(run.autocast))
        if begun != str(run.autocast) and run.world.rank == 0:
            print(f"autocast: {begun}, as this run began; alone, auto would be {run.autocast} here", flush=True)
        run.autocast = {"torch.bfloat16": torch.bfloat16, "None": None}[begun]


# --- The run --------------------------------------------------------------------------------------------------------


@dataclass
class Duties:
    """What is due after which step. Called by all workers alike; only rank 0 has a tracker and a writer."""

    tracker: Tracker | None
    test: Source | None
    first_step: int
    knn: dict[int, float]
    writer: checkpoint.Writer | None = None

    def after_step(self, run: Run, batch: Batch, outcome: Outcome) -> None:
        plan, step = run.plan, run.step
        if step == self.first_step + 1 and self.tracker is not None:
            self.tracker.image(step - 1, "views", first_views(run, batch, step - 1))
        if step % plan.image_steps == 0 or step == plan.stop_step:
            self.diagnose(run, outcome)
        if plan.knn_steps is not None and step % plan.knn_steps == 0 and step != plan.stop_step:
            self.judge(run)
        if step % plan.checkpoint_steps == 0 and step != plan.stop_step:
            self.save(run)

    def diagnose(self, run: Run, outcome: Outcome) -> None:
        """Pictures and figures of how far this step's embeddings are from collapse; the spectrum is of view 1."""
        c = run.loss.correlation(outcome.z1, outcome.z2, run.config.train.global_batch)
        z1 = workers.gather(outcome.z1.float(), "diagnostics.z1")
        if self.tracker is None:
            return
        from pipeline import plots  # matplotlib, which a worker without a tracker need not wait for

        deviations = diagnostics.spectrum(z1)
        self.tracker.log(run.step, diagnostics.figures(c, deviations))
        self.tracker.image(run.step, "cross_correlation", pictures.correlation_map(c.cpu().numpy()))
        self.tracker.image(run.step, "spectrum", plots.spectrum_plot({"z of view 1": deviations.numpy()}))

    @watchdog.phase("checkpoint")
    def save(self, run: Run) -> None:
        """Begin to write a checkpoint on rank 0, once all workers are known to hold the same finite state.

        Raises:
            RuntimeError: by all workers alike; the checkpoints before stay as they are.
        """
        began = time.perf_counter()
        weights = whole_state(run.model, run.optimizer, run.step)
        if self.tracker is None or self.writer is None:
            return
        every = run.plan.milestone_steps
        kept = {"step": run.step, **weights, "scaler": run.scaler.state_dict(), "bad_files": run.bad_files}
        state = file_content(run, kept, self.tracker.run_id)
        milestone = every is not None and run.step % every == 0
        self.writer.save(state, milestone, first=self.tracker.sync)
        self.tracker.log(run.step, {"checkpoint_stall_seconds": time.perf_counter() - began})

    @watchdog.phase("evaluate")
    def judge(self, run: Run) -> None:
        """How good the features are now, if there is a labelled test split."""
        if self.test is None:
            return
        found = online.judge(run, self.test)
        self.knn[run.step] = found["knn_accuracy"]
        if self.tracker is not None:
            self.tracker.log(run.step, found)
            shown = ", ".join(f"{online.WORDS[key]} {value:.2f} %" for key, value in found.items())
            print(f"{shown} after step {run.step}", flush=True)

    def failed(self, run: Run, error: BaseException) -> None:
        """Say in the record what ended the run: the earliest failure of any worker, as far as it is known."""
        watchdog.enter("end")
        if self.writer is not None:
            self.writer.join()
        mark_failed(self.tracker, run.config, error)


def first_views(run: Run, batch: Batch, step: int) -> NDArray[np.uint8]:
    """This worker's views of the step after `step` completed ones, beside torchvision's."""
    config, samples = run.config, len(run.source)
    positions = worker_positions(config.train.global_batch, config.train.micro_batches, run.world.shard)
    places = worker_indices(config.seed, step, samples, config.train.global_batch, positions)
    epoch = step // run.plan.steps_per_epoch
    return views_sheet(run.source, config.views, config.data.channels, config.seed, epoch, batch, places)


def pretrain(config: Config, world: workers.World, wishes: stopping.Wishes | None = None) -> int:
    """The whole run, or its next part; returns stopping.GO_ON, or why it ended early (see OUTPUT/summary.json)."""
    run = prepare(config, world)
    duties = take_up(run)
    try:
        verdict = go_on(run, duties, wishes)
    except BaseException as error:
        duties.failed(run, error)
        raise
    leave(run, duties, verdict)
    return verdict


def take_up(run: Run) -> Duties:
    """What is due besides training; rank 0 begins an attempt of the run's record."""
    config = run.config
    with workers.together():
        test = open_test(config.data, run.source)
    tracker = None
    if run.world.rank == 0:
        print(describe(config, run.plan, run.world.size, str(run.device), run.threads), flush=True)
        begin_attempt(config.output_path)
        tracker = Tracker.start(
            config,
            config.output_path,
            resume_run_id=run.resumed_run_id,
            new_run=config.checkpoint.resume == "never" and run.step == 0,
            facts=facts(run) | {"verb": "pretrain", "images": str(len(run.source))},
        )
        watchdog.at_stall(partial(tracker.end, "FAILED", rank=0))
    writer = checkpoint.Writer(config.output_path, config.checkpoint.keep) if run.world.rank == 0 else None
    return Duties(tracker, test, run.step, {}, writer)


def go_on(
    run: Run,
    duties: Duties,
    wishes: stopping.Wishes | None = None,
    after_step: Callable[[Run], None] = lambda run: None,
) -> int:
    """Train, save, judge; returns as `pretrain`. `after_step` comes after the duties of a step."""
    if run.config.knn.at_start and run.step == 0:
        duties.judge(run)

    def after(run: Run, batch: Batch, outcome: Outcome) -> None:
        duties.after_step(run, batch, outcome)
        after_step(run)

    try:
        verdict = training.train(run, after, lambda run, values: _log(run, values, duties.tracker), wishes)
    except BadFiles:
        duties.save(run)
        raise
    duties.save(run)
    if verdict == stopping.GO_ON:
        duties.judge(run)
    end_saving(duties.writer, duties.tracker, run.step)
    if duties.tracker is not None:
        checkpoint.save_file(run.config.output_path / "backbone.pth", backbone_state(run.model))
        # By which evaluations of these weights are found again, whatever file they came from
        done = {"step": run.step, "epoch": run.plan.epoch(run.step), "finished": run.step == run.plan.total_steps}
        duties.tracker.tag("backbone", {"digest": workers.digest(run.model.backbone), **done})
    return verdict


def file_content(run: Run, kept: dict[str, Any], run_id: str | None) -> dict[str, Any]:
    """What a checkpoint's file holds: `kept` has step, model, optimizer, scaler and bad_files."""
    return {
        **kept,
        "bad_files": {str(index): reason for index, reason in kept["bad_files"].items()},
        "config": run.config.model_dump(mode="json"),
        "run_id": run_id,
        "facts": {
            "digest": run.source.digest,
            "shaping": shaping(run.config),
            "num_samples": len(run.source),
            "autocast": str(run.autocast),
        },
    }


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """What a checkpoint holds of model and optimizer, once all workers are known to hold the same finite state.

    Raises:
        RuntimeError: by all workers alike.
    """
    weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if bad := checkpoint.not_finite(weights):
        raise RuntimeError(f"{bad[0]} is not finite after step {step}: no checkpoint of it is written")
    workers.check_equal_state(model, optimizer)
    return weights


@watchdog.phase("checkpoint")
def end_saving(writer: checkpoint.Writer | None, tracker: Tracker | None, last_step: int) -> None:
    """Wait for the last checkpoint, and say which ones could not be written. Called by all workers alike.

    Raises:
        RuntimeError: by all workers alike, if it is the one of `last_step`.
    """
    failed: dict[int, str] = {}
    if writer is not None and tracker is not None:
        writer.wait()
        failed = writer.failed
        if failed:
            told = ", ".join(f"{step} ({why})" for step, why in failed.items())
            print(f"warning: these checkpoints could not be written, by step: {told}", flush=True)
            tracker.tag("checkpoints_failed", told)
    if problem := workers.from_rank_0(failed.get(last_step), "last checkpoint"):
        raise RuntimeError(
            f"the last checkpoint, of step {last_step}, could not be written ({problem}); "
            "make room and start the run again: it goes on from the newest one there"
        )


def leave(run: Run, duties: Duties, verdict: int) -> None:
    """End the record, and write what the run hands over."""
    watchdog.enter("end")
    if duties.tracker is not None:
        mark_ended(duties.tracker, verdict)
        _finish(run, duties, duties.tracker, verdict)
    workers.barrier("end")


def mark_ended(tracker: Tracker, verdict: int) -> None:
    """Say in the record of a run that ended in order whether it is done, or why it was stopped."""
    reason = stopping.WORDS.get(verdict)
    tracker.end("KILLED" if stopping.EXIT_CODES[verdict] else "FINISHED", reason and f"stopped by {reason}")


def mark_failed(tracker: Tracker | None, config: Config, error: BaseException) -> None:
    """Say in the run's record what ended it: the earliest failure of any worker, as far as it is known."""
    if tracker is None:
        return
    causes = failures.found(config.output_path)  # of other ranks; ours is only now on its way out
    if causes and not causes[0].consequence:
        tracker.end("FAILED", causes[0].message, rank=causes[0].rank)
    elif failures.is_consequence(error):  # a worker that was killed says nothing: which one, only the launcher hears
        tracker.end("FAILED", f"another worker was lost, without a word: {error!r}")
    else:
        tracker.end("FAILED", repr(error), rank=0)


def facts(run: Any) -> dict[str, str]:
    """What a reader of the experiment wants to know beyond the config.

    `run` has `world`, `device`, `threads`, `source` and `autocast`.
    """
    names = ("torch", "torchvision", "nvidia-dali-cuda130", "horovod", "mlflow")
    known = {
        "command": " ".join(sys.argv),
        "world_size": str(run.world.size),
        "hosts": ",".join(dict.fromkeys(run.world.hosts)),
        "device": torch.cuda.get_device_name(run.device)
        if run.device.type == "cuda"
        else platform.processor() or "cpu",
        "threads": str(run.threads),
        "python": platform.python_version(),
        "data_digest": run.source.digest,
        "autocast": str(run.autocast),
    } | {f"version.{name}": version(name) for name in names}
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git here: a container
        return known
    if commit.returncode == 0:
        known["git_commit"] = commit.stdout.strip()
    return known


def _log(run: Run, values: dict[str, float], tracker: Tracker | None) -> None:
    progress.show(run.plan, run.step, values)
    if tracker is not None:
        tracker.log(run.step, values)


def _finish(run: Run, duties: Duties, tracker: Tracker, verdict: int) -> None:
    """What came out, for people and other programs."""
    output = run.config.output_path
    summary = {
        "step": run.step,
        "total_steps": run.plan.total_steps,
        "finished": run.step == run.plan.total_steps,
        "stopped_by": stopping.WORDS.get(verdict),
        "knn_accuracy": {str(step): value for step, value in duties.knn.items()},
        "checkpoints_failed": checkpoints_failed(duties.writer),
        "run_id": tracker.run_id,
        "output": str(output),
    }
    write_summary(output, summary)


def checkpoints_failed(writer: checkpoint.Writer | None) -> dict[str, str]:
    """By step, for a summary."""
    return {str(step): why for step, why in (writer.failed if writer is not None else {}).items()}


def write_summary(output: Path, summary: dict[str, Any]) -> None:
    """OUTPUT/summary.json, whole or not at all."""
    temporary = output / ".summary.json.tmp"
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(temporary, output / "summary.json")
