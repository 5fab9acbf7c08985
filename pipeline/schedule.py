"""Learning rates as a pure function of the step: linear warm-up from zero, then a cosine."""

import math

import torch


def lr_factor(step: int, warmup_steps: int, total_steps: int, final_factor: float) -> float:
    """The share of the effective rate that update number `step` uses; it depends on nothing else.

    Rises linearly from 0 at step 0 to 1 at `warmup_steps`, then falls along half a cosine to `final_factor` at
    `total_steps` (facebookresearch/barlowtwins, `adjust_learning_rate`, where `final_factor` is 0.001). `step` counts
    completed updates, so the first update of a run with warm-up has rate 0, as in the reference.

    Args:
        step: in [0, total_steps].
        warmup_steps: in [0, total_steps]; 0 starts at the full rate.
    """
    assert 0 <= step <= total_steps and 0 <= warmup_steps <= total_steps, (step, warmup_steps, total_steps)
    if step < warmup_steps:
        return step / warmup_steps
    if warmup_steps == total_steps:
        return 1.0
    q = 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps)))
    return q + final_factor * (1 - q)


def set_lr(
    optimizer: torch.optim.Optimizer, step: int, warmup_steps: int, total_steps: int, final_factor: float
) -> dict[str, float]:
    """Give every group its rate for update number `step`: its `base_lr` times `lr_factor`.

    Returns:
        Rate by group name, for the log.
    """
    factor = lr_factor(step, warmup_steps, total_steps, final_factor)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return {group["name"]: group["lr"] for group in optimizer.param_groups}
