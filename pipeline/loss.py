"""The Barlow Twins loss over the global batch, and its exact gradient (arXiv:2103.03230, Alg. 1).

With B samples over all workers and z1, z2 normalised over all of them,

    c = z1ᵀ z2 / B,    loss = scale · [ Σ_i (c_ii − 1)² + lambd · Σ_{i≠j} c_ij² ]

c is a sum over samples, hence over workers, so `allreduce(op=Sum)` forms the c of the whole batch, and every worker
computes the same loss. A worker's backward gives dL/dθ *through its own samples*; the gradient is the sum of these
contributions, taken by the optimizer. So the backward sends nothing here and nothing is divided by the number of
workers. With G = ½ dL/dc the closed form is, for the worker's own rows,

    dL/dz1 = (2/B) z2 Gᵀ,    dL/dz2 = (2/B) z1 G,    G_ii = c_ii − 1,   G_ij = lambd · c_ij
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline import workers
from pipeline.sync_bn import SyncBatchNorm


class Terms(NamedTuple):
    """Scalars, equal on all workers. Only `loss` has a gradient; `on_diag` and `off_diag` have no lambd and no scale."""

    loss: Tensor
    on_diag: Tensor
    off_diag: Tensor


class BarlowTwinsLoss(torch.nn.Module):
    """Loss of two batches of embeddings, each this worker's slice of the global batch.

    Args:
        dim: D, the embeddings' width.
        lambd, scale: as above.
        combine: how c, or what the loss needs of it, is formed from the workers' slices: `allreduce`, `gather`, `gram`.
        eps: added to the variance in the normalisation.
        process_set: the workers that share the batch.
    """

    def __init__(
        self,
        dim: int,
        lambd: float,
        scale: float = 1.0,
        combine: str = "allreduce",
        eps: float = 1e-5,
        process_set: workers.ProcessSet = workers.everyone,
    ) -> None:
        super().__init__()
        self.lambd, self.scale, self.process_set = lambd, scale, process_set
        self.combine = _COMBINE[combine]
        self.normalise = SyncBatchNorm(
            dim, eps=eps, affine=False, track_running_stats=False, process_set=process_set, name="loss"
        )

    def forward(self, z1: Tensor, z2: Tensor, global_batch: int) -> Terms:
        """Terms for z1, z2 (n, D), n this worker's share (0 is allowed) of `global_batch`.

        Computed outside autocast, in float32 (float64 if z is); matrix products never use TF32.
        """
        with torch.autocast(z1.device.type, enabled=False):
            dtype = torch.promote_types(z1.dtype, torch.float32)
            z1, z2 = self.normalise(z1.to(dtype)), self.normalise(z2.to(dtype))
            on_diag, off_diag, loss = self.combine.apply(z1, z2, self.lambd, global_batch, self.process_set)
            return Terms(self.scale * loss, on_diag, off_diag)

    @torch.no_grad()
    def correlation(self, z1: Tensor, z2: Tensor, global_batch: int) -> Tensor:
        """c itself, (D, D), for a look at it."""
        with torch.autocast(z1.device.type, enabled=False):
            dtype = torch.promote_types(z1.dtype, torch.float32)
            z1, z2 = self.normalise(z1.to(dtype)), self.normalise(z2.to(dtype))
            return _correlation(z1, z2, global_batch, self.process_set)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Matrix products in float32 without TF32: c's entries are compared with 0 and 1."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _correlation(z1: Tensor, z2: Tensor, global_batch: int, process_set: workers.ProcessSet) -> Tensor:
    with _full_precision():
        return workers.sum_((z1.T @ z2).div_(global_batch), "loss.c", process_set)


def _terms_and_half_gradient(c: Tensor, lambd: float) -> tuple[Tensor, Tensor]:
    """on_diag and off_diag of c (D, D); c itself becomes G, so that no second D×D tensor is made."""
    surplus = c.diagonal() - 1
    c.fill_diagonal_(0)
    on_diag = surplus.square().sum()
    off_diag = torch.linalg.vector_norm(c, dim=1).square().sum()  # by rows: D² float32 terms in one sum lose digits
    c.mul_(lambd).diagonal().copy_(surplus)
    return on_diag, off_diag


class _Allreduce(torch.autograd.Function):
    """D×D floats are summed over the workers; for B ≥ D."""

    @staticmethod
    def forward(
        ctx: Any, z1: Tensor, z2: Tensor, lambd: float, batch: int, process_set: workers.ProcessSet
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = _correlation(z1, z2, batch, process_set)
        on_diag, off_diag = _terms_and_half_gradient(c, lambd)
        ctx.save_for_backward(z1, z2, c)
        ctx.batch = batch
        ctx.mark_non_differentiable(on_diag, off_diag)
        return on_diag, off_diag, on_diag + lambd * off_diag

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z1, z2, half_gradient = ctx.saved_tensors
        factor = grads[2] * (2 / ctx.batch)
        with _full_precision():
            return (z2 @ half_gradient.T) * factor, (z1 @ half_gradient) * factor, None, None, None


_COMBINE: dict[str, type[torch.autograd.Function]] = {"allreduce": _Allreduce}
