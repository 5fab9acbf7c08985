"""Batch norm over the global batch: the statistics, and the gradient through them, are those of all workers' samples.

One collective a layer and direction. Forward: each worker's [count, mean, M2] (2·C + 1 numbers) is gathered and merged
by Chan's formula in float64; E[x²] − mean² would cancel in float32. Backward: one sum of [Σ dy, Σ dy·(x − mean)].
Gradients of weight and bias are this worker's contribution, as all gradients are (see pipeline/loss.py).

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

    Samples may be spread unevenly, and a worker may have none. The collectives are called `name` and the parity of the
    call, so that the layer's two calls in a step, one a view, may come in another order on another worker.
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
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set, self.name = process_set, name
        self.calls = 0
        self.frozen_statistics = False

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2 and input.shape[1] == self.num_features, f"{tuple(input.shape)}: {self.num_features}"

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        name = f"{self.name}.{self.calls % 2}"
        self.calls += 1
        y, mean, var, count = _SyncBatchNormFunction.apply(
            input, self.weight, self.bias, self.eps, name, self.process_set
        )
        if self.training and self.running_mean is not None and not self.frozen_statistics:
            self._update_running_statistics(mean, var, count)
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
    """y = (x − mean) / sqrt(var + eps) · weight + bias; also mean and var (C,) and the count (1,), in float64."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        name: str,
        process_set: workers.ProcessSet,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        local_mean, local_var, local_count = _local_statistics(x)
        row = torch.cat([local_mean.new_full((1,), local_count), local_mean, local_var * local_count])
        rows = workers.gather(row[None], f"{name}.forward", process_set)
        mean, var, count = _merge(rows)
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean32, invstd = mean.to(dtype), (var + eps).rsqrt().to(dtype)
        if x.numel() == 0:
            y = torch.empty_like(x)
        elif x.is_cuda:
            y = torch.batch_norm_elemt(x, weight, bias, mean32, invstd, eps)
        else:
            y = batch_norm(x, mean32, var.to(dtype), weight, bias, eps=eps)
        ctx.save_for_backward(x, weight, mean32, invstd, count)
        ctx.name, ctx.process_set = name, process_set
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        dy = grads[0]
        if not x.is_contiguous(memory_format=torch.contiguous_format) and x.dim() == 4:
            dy = dy.contiguous(memory_format=torch.channels_last)
        else:
            dy = dy.contiguous()
        sum_dy, sum_dy_xmu = _local_sums(dy, x, mean, invstd)
        grad_weight = (sum_dy_xmu * invstd).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sum_dy.clone() if ctx.needs_input_grad[2] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = workers.sum_(torch.stack([sum_dy, sum_dy_xmu]), f"{ctx.name}.backward", ctx.process_set)
            grad_x = _input_gradient(dy, x, weight, mean, invstd, sums, count)
        return grad_x, grad_weight, grad_bias, None, None, None


def _local_statistics(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance (C,) of this worker's samples, in float32 or better, and the values a channel has."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        zero = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
        return zero, zero, 0
    if x.is_cuda:
        mean, invstd = torch.batch_norm_stats(x, 0.0)  # eps 0: the variance comes back exactly, 1/inf² = 0 included
        return mean, invstd.square().reciprocal(), x.numel() // x.shape[1]
    wide = x if x.dtype == dtype else x.to(dtype)
    # torch's CPU kernel: two passes, sums in double
    mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
    return mean, var, x.numel() // x.shape[1]


def _merge(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance (C,) and count (1,) of all samples from the workers' [count, mean, M2] (W, 2·C + 1)."""
    counts, means, m2 = rows.double().split([1, (rows.shape[1] - 1) // 2, (rows.shape[1] - 1) // 2], dim=1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return mean, (m2 + counts * (means - mean).square()).sum(0) / count, count


def _local_sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Σ dy and Σ dy·(x − mean) a channel (C,), over this worker's samples."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if x.is_cuda:
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, None, True, False, False)
        return sum_dy, sum_dy_xmu
    # torch's evaluation backward holds both sums: grad_bias = Σ dy, grad_weight = Σ dy·(x − mean)·invstd
    ones = torch.ones_like(mean)
    variance = invstd.square().reciprocal()
    _, scaled, sum_dy = torch.ops.aten.native_batch_norm_backward(
        dy, x, ones, mean, variance, None, None, False, 0.0, [False, True, True]
    )
    return sum_dy, scaled / invstd


def _input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, count: Tensor
) -> Tensor:
    """dx = weight·invstd · [dy − Σdy/N − (x − mean)·invstd²·Σdy(x − mean)/N], sums over all workers' samples."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    if x.is_cuda:
        return torch.batch_norm_backward_elemt(
            dy, x, mean, invstd, weight, sums[0], sums[1], count.to(torch.int32).expand(1)
        )
    slope = invstd if weight is None else invstd * weight
    shape = (1, -1) + (1,) * (x.dim() - 2)
    mean_dy, projection = (sums / count).to(sums.dtype)
    centred = (x - mean.view(shape)).mul_((-slope * invstd.square() * projection).view(shape))
    return centred.addcmul_(dy, slope.view(shape)).sub_((slope * mean_dy).view(shape)).to(x.dtype)


def convert(
    model: torch.nn.Module, process_set: workers.ProcessSet = workers.everyone, prefix: str = "sync_bn"
) -> torch.nn.Module:
    """Replace every torch BatchNorm in `model` by a SyncBatchNorm with the same tensors, named by its path.

    Returns the model (a new module only if `model` is itself a BatchNorm).
    """
    if isinstance(model, _BatchNorm) and not isinstance(model, SyncBatchNorm):
        new = SyncBatchNorm(
            model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats, process_set, prefix
        )
        new.weight, new.bias = model.weight, model.bias
        new.running_mean, new.running_var = model.running_mean, model.running_var
        new.num_batches_tracked = model.num_batches_tracked
        new.training = model.training
        return new
    for name, child in model.named_children():
        setattr(model, name, convert(child, process_set, f"{prefix}.{name}"))
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
