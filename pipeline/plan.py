"""What a config means for these images and workers: durations become steps, rates become effective, once."""

from typing import NamedTuple

from dali.order import Shard, steps_per_epoch, worker_positions
from pipeline.config import Config
from pipeline.loss import choose_combine
from pipeline.optim import effective_rates


class Plan(NamedTuple):
    """Whole steps for every duration. Equal for any number of workers."""

    num_samples: int
    num_excluded: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    stop_step: int  # this run ends here: total_steps, or earlier by train.stop_after_steps
    checkpoint_steps: int
    milestone_steps: int | None
    knn_steps: int | None
    image_steps: int

    def epoch(self, step: int) -> float:
        """Epochs completed after `step` steps."""
        return step / self.steps_per_epoch


def make_plan(config: Config, num_samples: int, num_excluded: int = 0) -> Plan:
    """Resolve all durations.

    Raises:
        InputError: fewer images than one global batch.
    """
    per_epoch = steps_per_epoch(num_samples, config.train.global_batch)
    total = max(1, round(config.train.epochs * per_epoch))
    every_epochs, every_steps = config.checkpoint.every_epochs * per_epoch, config.checkpoint.every_steps

    def steps(epochs: int | None) -> int | None:
        return None if epochs is None else epochs * per_epoch

    return Plan(
        num_samples=num_samples,
        num_excluded=num_excluded,
        steps_per_epoch=per_epoch,
        total_steps=total,
        warmup_steps=round(config.schedule.warmup_epochs * per_epoch),
        stop_step=min(total, config.train.stop_after_steps or total),
        checkpoint_steps=min(every_epochs, every_steps or every_epochs),
        milestone_steps=steps(config.checkpoint.milestone_epochs),
        knn_steps=steps(config.knn.every_epochs),
        image_steps=config.tracking.images_every_epochs * per_epoch,
    )


def describe_workers(size: int, device: str, threads: int | None) -> str:
    """`threads` of each worker; None: not known here, as it is their hosts' cores that they share."""
    each = "the cores of each host shared out" if threads is None else f"{threads} thread{'s' * (threads > 1)} each"
    return f"{size} on {device}, {each}"


def describe(config: Config, plan: Plan, size: int, device: str, threads: int | None) -> str:
    """The block printed at the start and by --dry-run: everything whose misreading makes a recipe another one."""
    train, rates = config.train, effective_rates(config.optimizer, config.train.global_batch)
    local = [
        sum(
            part.stop - part.start for part in worker_positions(train.global_batch, train.micro_batches, Shard(r, size))
        )
        for r in range(size)
    ]
    per = config.optimizer.reference_batch
    base = f"per {per} samples" if per else "as given"
    reference = min(local) if min(local) == max(local) else f"{min(local)}-{max(local)}"
    excluded = "" if config.data.exclude is None else f", {plan.num_excluded:,} excluded"
    rows = [
        ("images", f"{plan.num_samples:,} in {', '.join(config.data.paths)}{excluded}"),
        ("workers", describe_workers(size, device, threads)),
        ("batch", f"{train.global_batch} global, {reference} local, {train.micro_batches} micro-batches"),
        ("steps", f"{plan.total_steps:,} = {train.epochs:g} epochs x {plan.steps_per_epoch:,}"),
        ("warm-up", f"{plan.warmup_steps:,} steps, then cosine to {config.schedule.final_factor:g} of the rate"),
        (
            "rates",
            f"{config.optimizer.name}: weights {config.optimizer.lr_weights:g} -> {rates[0]:g}, "
            f"biases {config.optimizer.lr_biases:g} -> {rates[1]:g} ({base})",
        ),
        ("decay", f"{config.optimizer.weight_decay:g} on weights, none on biases and norms"),
        ("loss", f"lambd {config.loss.lambd:g}, scale {config.loss.scale:g}, D {config.model.projector[-1]}"),
        (
            "combine",
            "{}: {}".format(*choose_combine(config.loss.combine, config.model.projector[-1], train.global_batch)),
        ),
        ("model", f"{config.model.backbone}, {config.model.stem} stem, {config.data.channels} channel(s)"),
        ("views", f"{config.views.size} px, crop area {config.views.crop_area[0]:g}-{config.views.crop_area[1]:g}"),
        ("precision", f"{config.precision.dtype}, autocast {config.precision.autocast}"),
        ("output", str(config.output_path)),
    ]
    return "\n".join(f"  {key:<10} {value}" for key, value in rows)
