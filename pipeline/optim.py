"""LARS, SGD and AdamW with separate rates for weights and biases, and a mask for non-finite steps.

All three leave parameters and state as they were when the tensor in their attribute `found_inf` is above 0, and divide
gradients by the tensor in `grad_scale`, both on the device, without waiting for it. These are the attributes that
torch's GradScaler sets; a training loop may set `found_inf` itself. Each class can be built from parameter groups
alone, as `hvd.DistributedOptimizer` does with a subclass that it makes.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.config import OptimizerSection


class Rates(NamedTuple):
    """Effective rates at the top of the schedule."""

    weights: float
    biases: float


class LARS(torch.optim.Optimizer):
    """Momentum whose step is proportional to each tensor's own norm (facebookresearch/barlowtwins; arXiv:1708.03888).

    For gradient g of parameter p: `u = g + weight_decay * p`; in groups with `adapt`, u is multiplied by
    `trust_coefficient * |p| / |u|`, or by 1 where either norm is 0; `mu = momentum * mu + u`; `p -= lr * mu`.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        adapt: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "trust_coefficient": trust_coefficient,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scale is not None:
            grads = list(torch._foreach_div(grads, grad_scale.to(params[0].device)))
        updates = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        # 0-dim tensor or number, 1 or 0. A masked step becomes mu = 1 * mu + 0 and p = p + 0 * mu.
        keep: Any = 1.0
        if found_inf is not None:
            bad = found_inf.to(params[0].device) > 0
            keep = (~bad).to(params[0].dtype)
            for update in updates:
                update.masked_fill_(bad, 0)  # a product with 0 would leave NaN
        if group["adapt"]:
            _adapt(updates, params, group["trust_coefficient"])
        for p in params:
            if "mu" not in self.state[p]:
                self.state[p]["mu"] = torch.zeros_like(p)
        mus = [self.state[p]["mu"] for p in params]
        torch._foreach_mul_(mus, group["momentum"] * keep + (1 - keep))
        torch._foreach_add_(mus, updates)
        del updates  # as large as the model, and so is the next line's product
        torch._foreach_add_(params, torch._foreach_mul(mus, -group["lr"] * keep))


def _adapt(updates: list[Tensor], params: list[Tensor], trust_coefficient: float) -> None:
    """Scale each update in place to `trust_coefficient` times its parameter's norm."""
    param_norms = torch.stack(torch._foreach_norm(params))
    update_norms = torch.stack(torch._foreach_norm(updates))
    factors = torch.where(
        (param_norms > 0) & (update_norms > 0),
        trust_coefficient * param_norms / update_norms,
        torch.ones_like(param_norms),
    )
    torch._foreach_mul_(updates, list(factors.unbind()))


class SGD(torch.optim.SGD):
    """torch's fused SGD with momentum, safe to mask at its first step."""

    _step_supports_amp_scaling = True  # torch sets it in a constructor that Horovod's subclass calls without `fused`

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # torch allocates momentum uninitialised and fills it in the first step; a masked first step would leave it so.
        for group in self.param_groups:
            for p in group["params"]:
                if group["momentum"] and "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        _make_flag(self)
        return super().step(closure)


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW."""

    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        _make_flag(self)
        return super().step(closure)


def _make_flag(optimizer: torch.optim.Optimizer) -> None:
    """Turn `found_inf` into exactly 0 or 1: torch's kernels compare it with 1, and a sum over devices may be 2."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None:
        optimizer.found_inf = (found_inf > 0).to(torch.float32)  # type: ignore[attr-defined]


def effective_rates(section: OptimizerSection, global_batch: int) -> Rates:
    """The rates that the schedule starts from: linear in the global batch unless `reference_batch` is null."""
    share = 1.0 if section.reference_batch is None else global_batch / section.reference_batch
    return Rates(section.lr_weights * share, section.lr_biases * share)


def build_optimizer(
    section: OptimizerSection, named_parameters: Iterable[tuple[str, nn.Parameter]], global_batch: int
) -> torch.optim.Optimizer:
    """Make the optimizer over what is trainable, in two groups called "weights" and "biases".

    "biases" are the 1-dimensional parameters, norm parameters included: no decay, no LARS adaptation, `lr_biases`.
    Each group keeps its effective rate as `base_lr`; `schedule.set_lr` makes `lr` of it.

    Args:
        named_parameters: all workers must give the same parameters in the same order.
        global_batch: samples in a step, over all workers.
    """
    trainable = [p for _, p in named_parameters if p.requires_grad]
    assert trainable, "every parameter is frozen"
    rates = effective_rates(section, global_batch)
    weights: dict[str, Any] = {
        "name": "weights",
        "params": [p for p in trainable if p.ndim > 1],
        "base_lr": rates.weights,
        "lr": rates.weights,
        "weight_decay": section.weight_decay,
    }
    biases: dict[str, Any] = {
        "name": "biases",
        "params": [p for p in trainable if p.ndim <= 1],
        "base_lr": rates.biases,
        "lr": rates.biases,
        "weight_decay": 0.0,
    }
    momentum = 0.9 if section.momentum is None else section.momentum
    if section.name == "lars":
        weights["adapt"], biases["adapt"] = True, False
        trust = 0.001 if section.trust_coefficient is None else section.trust_coefficient
        return LARS([weights, biases], momentum=momentum, trust_coefficient=trust)
    if section.name == "sgd":
        return SGD([weights, biases], momentum=momentum, fused=True)
    return AdamW([weights, biases], betas=section.betas or (0.9, 0.999), fused=True)
