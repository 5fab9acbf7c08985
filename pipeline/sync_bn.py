"""Batch norm over the global batch: the statistics, and the gradient through them, are those of all workers' samples.

One collective a layer and direction, for both views together. Forward: each worker's [count, mean, M2] of each view is
gathered and merged by Chan's formula in float64; E[x²] − mean² would cancel in float32. Backward: one sum of
[Σ dy, Σ dy·(x − mean)]. Gradients of weight and bias are this worker's contribution, as all gradients are (loss.py).

`hvd.SyncBatchNorm` refuses CPU tensors and sends three collectives forward and two backward; its state dicts load here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline import workers


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d/2d/3d` of the joined batch, for inputs (N, C), (N, C, L), ... on CPU and CUDA.

    Samples may be spread unevenly over the workers, and a worker may have none.

    Args:
        views: in training, the input is this many batches of equal size one behind the other, each with statistics of
            its own, as if passed one after the other.
        name: of the collectives.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: workers.ProcessSet = workers.everyone,
        name: str = "sync_bn",
        views: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set, self.name, self.views = process_set, name, views
        self.frozen_statistics = False

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2 and input.shape[1] == self.num_features, f"{tuple(input.shape)}: {self.num_features}"
        assert not self.training or len(input) % self.views == 0, f"{len(input)} samples in {self.views} views"

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        y, mean, var, count = _SyncBatchNormFunction.apply(
            input, self.weight, self.bias, self.eps, self.name, self.process_set, self.views
        )
        if self.training and self.running_mean is not None and not self.frozen_statistics:
            for view in range(self.views):
                self._update_running_statistics(mean[view], var[view], count[view])
        return y

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor: Tensor | float
        factor = 1 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1))
        self.running_mean.copy_(self.running_mean + factor * (mean - self.running_mean))
        self.running_var.copy_(self.running_var + factor * (unbiased - self.running_var))


class _SyncBatchNormFunction(torch.autograd.Function):
    """y = (x − mean) / sqrt(var + eps) · weight + bias for each of V views; and mean, var (V, C), count (V, 1)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        name: str,
        process_set: workers.ProcessSet,
        views: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = x.chunk(views) if x.numel() else (x,) * views
        own = torch.stack([_local_row(part) for part in parts])
        rows = workers.gather(own.flatten()[None], f"{name}.forward", process_set)
        mean, var, count = _merge(rows.view(-1, *own.shape))
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean32, var32, invstd = mean.to(dtype), var.to(dtype), (var + eps).rsqrt().to(dtype)
        y = torch.empty_like(x)
        for view, (part, out) in enumerate(zip(parts, y.chunk(views), strict=False) if x.numel() else ()):
            if x.is_cuda:
                torch.batch_norm_elemt(part, weight, bias, mean32[view], invstd[view], eps, out=out)
            else:
                _normalise(part, mean32[view], var32[view], weight, bias, eps, out)
        ctx.save_for_backward(x, weight, mean32, invstd, count)
        ctx.name, ctx.process_set = name, process_set
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        views = len(mean)
        channels_last = x.dim() == 4 and not x.is_contiguous()
        dy = grads[0].contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        pairs = list(zip(dy.chunk(views), x.chunk(views), strict=True)) if x.numel() else [(dy, x)] * views
        own = [_local_sums(*pair, weight, mean[view], invstd[view]) for view, pair in enumerate(pairs)]
        sums = torch.stack([torch.stack(both) for *both, _ in own])  # (V, 2, C)
        grad_weight = (sums[:, 1] * invstd).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sums[:, 0].sum(0) if ctx.needs_input_grad[2] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = workers.sum_(sums, f"{ctx.name}.backward", ctx.process_set)
            grad_x = torch.empty_like(x)
            for view, (pair, out) in enumerate(zip(pairs, grad_x.chunk(views), strict=True) if x.numel() else ()):
                scaled = own[view][2]
                _input_gradient(*pair, scaled, weight, mean[view], invstd[view], sums[view], count[view], out)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _normalise(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """(x − mean) / sqrt(var + eps) · weight + bias into `out`, by torch's CPU kernel."""
    unused = (mean.new_empty(0), mean.new_empty(0))
    torch.ops.aten.native_batch_norm.out(
        x, weight, bias, mean, var, False, 0.0, eps, out=out, save_mean=unused[0], save_invstd=unused[1]
    )


def _local_row(x: Tensor) -> Tensor:
    """[count, mean, M2] (2·C + 1,) of this worker's samples of a view."""
    mean, var, count = _local_statistics(x)
    return torch.cat([mean.new_full((1,), count), mean, var * count])


def _local_statistics(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance (C,) of this worker's samples, in float32 or better, and the values a channel has."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        zero = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
        return zero, zero, 0
    if x.is_cuda:
        mean, invstd = torch.batch_norm_stats(x, 0.0)  # eps 0: the variance comes back exactly
        return mean, _variance(invstd), x.numel() // x.shape[1]
    # torch's CPU kernel: two passes. It answers in the type of running statistics, of which momentum 0 changes nothing
    zeros = torch.zeros(2, x.shape[1], dtype=dtype)
    mean, var = torch.batch_norm_update_stats(x, zeros[0], zeros[1], 0.0)
    return mean, var, x.numel() // x.shape[1]


def _variance(invstd: Tensor) -> Tensor:
    """The variance that torch's CUDA kernel turned into `invstd` with eps 0: of 0 it makes 0, not infinity."""
    return torch.where(invstd > 0, invstd.square().reciprocal(), 0.0)


def _merge(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance (V, C) and count (V, 1) of all samples, from [count, mean, M2] (W, V, 2·C + 1)."""
    channels = (rows.shape[2] - 1) // 2
    counts, means, m2 = rows.double().split([1, channels, channels], dim=2)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return mean, (m2 + counts * (means - mean).square()).sum(0) / count, count


def _local_sums(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Σ dy and Σ dy·(x − mean) a channel (C,), over this worker's samples; on a CPU also dy·weight·invstd."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean), None
    if x.is_cuda:
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, None, True, False, False)
        return sum_dy, sum_dy_xmu, None
    # torch's evaluation backward holds all three: grad_bias = Σ dy, grad_weight = Σ dy·(x − mean)·invstd
    variance = invstd.square().reciprocal()
    weight = torch.ones_like(mean) if weight is None else weight
    scaled, grad_weight, sum_dy = torch.ops.aten.native_batch_norm_backward(
        dy, x, weight, mean, variance, None, None, False, 0.0, [True, True, True]
    )
    return sum_dy, grad_weight / invstd, scaled


def _input_gradient(
    dy: Tensor,
    x: Tensor,
    scaled: Tensor | None,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
    out: Tensor,
) -> None:
    """dx = weight·invstd · [dy − Σdy/N − (x − mean)·invstd²·Σdy(x − mean)/N] into `out`; sums over all workers.

    `scaled`: the first of the three terms, from `_local_sums`. The other two are a batch norm of x, by its kernel.
    """
    if scaled is None:
        counts = count.to(torch.int32).expand(1)
        out.copy_(torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sums[0], sums[1], counts))
        return
    slope = invstd if weight is None else invstd * weight
    mean_dy, projection = (sums / count).to(sums.dtype)
    _normalise(x, mean, invstd.square().reciprocal(), -slope * invstd * projection, -slope * mean_dy, 0.0, out)
    out.add_(scaled)


def convert(
    model: torch.nn.Module,
    process_set: workers.ProcessSet = workers.everyone,
    views: int = 1,
    prefix: str = "sync_bn",
) -> torch.nn.Module:
    """Replace every torch BatchNorm in `model` by a SyncBatchNorm with the same tensors, named by its path.

    Returns the model (a new module only if `model` is itself a BatchNorm).
    """
    if isinstance(model, _BatchNorm) and not isinstance(model, SyncBatchNorm):
        new = SyncBatchNorm(
            model.num_features,
            model.eps,
            model.momentum,
            model.affine,
            model.track_running_stats,
            process_set,
            prefix,
            views,
        )
        new.weight, new.bias = model.weight, model.bias
        new.running_mean, new.running_var = model.running_mean, model.running_var
        new.num_batches_tracked = model.num_batches_tracked
        new.training = model.training
        return new
    for name, child in model.named_children():
        setattr(model, name, convert(child, process_set, views, f"{prefix}.{name}"))
    return model


@contextmanager
def frozen_statistics(model: torch.nn.Module) -> Iterator[None]:
    """A block in which running statistics stay as they are, though layers normalise by their batch."""
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    for layer in layers:
        layer.frozen_statistics = True
    try:
        yield
    finally:
        for layer in layers:
            layer.frozen_statistics = False
