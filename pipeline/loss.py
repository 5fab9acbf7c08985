"""The Barlow Twins loss over the global batch, and its exact gradient (arXiv:2103.03230, Alg. 1).

With B samples over all workers and z1, z2 normalised over all of them,

    c = z1ᵀ z2 / B,    loss = scale · [ Σ_i (c_ii − 1)² + lambd · Σ_{i≠j} c_ij² ]

c is a sum over samples, hence over workers, so `allreduce(op=Sum)` forms the c of the whole batch, and every worker
computes the same loss. (`gather` and `gram` come to the same loss by other ways.) A worker's backward gives dL/dθ
*through its own samples*; the gradient is the sum of these contributions, taken where gradients are summed
(workers.GradientSum). So the backward sends nothing here, and nothing is divided by the number of workers. With
G = ½ dL/dc the closed form is, for the worker's own rows,

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
    """Scalars, equal on all workers. Only `loss` has a gradient; `on_diag` and `off_diag` know no lambd, no scale."""

    loss: Tensor
    on_diag: Tensor
    off_diag: Tensor


class BarlowTwinsLoss(torch.nn.Module):
    """Loss of two batches of embeddings, each this worker's slice of the global batch.

    Args:
        dim: D, the embeddings' width.
        lambd, scale: as above.
        combine: how c, or what the loss needs of it, is formed from the workers' slices: `allreduce`, `gather`, `gram`,
            or `auto`.
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
        self.lambd, self.scale, self.combine, self.process_set = lambd, scale, combine, process_set
        self.normalise = SyncBatchNorm(
            dim, eps=eps, affine=False, track_running_stats=False, process_set=process_set, name="loss", views=2
        )

    def forward(self, z1: Tensor, z2: Tensor, global_batch: int) -> Terms:
        """Terms for z1, z2 (n, D), n this worker's share (0 is allowed) of `global_batch`.

        Computed outside autocast, in float32 (float64 if z is); matrix products never use TF32.
        """
        with torch.autocast(z1.device.type, enabled=False):
            z1, z2 = self._normalised(z1, z2)
            mode, _ = choose_combine(self.combine, z1.shape[1], global_batch)
            common = (z1, z2, self.lambd, global_batch, self.process_set)
            if mode == "gram":
                on_diag, off_diag, loss = _ThroughGram.apply(*common)
            else:
                on_diag, off_diag, loss = _ThroughC.apply(*common, {"allreduce": _summed, "gather": _gathered}[mode])
            return Terms(self.scale * loss, on_diag, off_diag)

    def _normalised(self, z1: Tensor, z2: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.cat([z1, z2])
        z1, z2 = self.normalise(z.to(torch.promote_types(z.dtype, torch.float32))).chunk(2)
        return z1, z2

    @torch.no_grad()
    def correlation(self, z1: Tensor, z2: Tensor, global_batch: int) -> Tensor:
        """c itself, (D, D), for a look at it."""
        with torch.autocast(z1.device.type, enabled=False):
            z1, z2 = self._normalised(z1, z2)
            return _summed(z1, z2, global_batch, self.process_set)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Matrix products in float32 without TF32: c's entries are compared with 0 and 1."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _summed(z1: Tensor, z2: Tensor, global_batch: int, process_set: workers.ProcessSet) -> Tensor:
    """c (D, D) from the workers' own sums: 2·D² numbers sent, n·D² multiplications. For B ≥ D."""
    with _full_precision():
        return workers.sum_((z1.T @ z2).div_(global_batch), "loss.c", process_set)


def _gathered(z1: Tensor, z2: Tensor, global_batch: int, process_set: workers.ProcessSet) -> Tensor:
    """c (D, D) from everybody's rows: 2·B·D numbers sent, B·D² multiplications. A check on the others."""
    rows1, rows2 = _rows_of_all(z1, z2, process_set)
    with _full_precision():
        return (rows1.T @ rows2).div_(global_batch)


def _rows_of_all(z1: Tensor, z2: Tensor, process_set: workers.ProcessSet) -> tuple[Tensor, Tensor]:
    """Both embeddings of the global batch, (B, D) each, in one collective."""
    if process_set.size() == 1:
        return z1, z2
    both = workers.gather(torch.cat([z1, z2], dim=1), "loss.rows", process_set)
    return both[:, : z1.shape[1]], both[:, z1.shape[1] :]


def _terms_and_half_gradient(c: Tensor, lambd: float) -> tuple[Tensor, Tensor]:
    """on_diag and off_diag of c (D, D); c itself becomes G, so that no second D×D tensor is made."""
    surplus = c.diagonal() - 1
    c.fill_diagonal_(0)
    on_diag = surplus.square().sum()
    off_diag = torch.linalg.vector_norm(c, dim=1).square().sum()  # by rows: D² float32 terms in one sum lose digits
    c.mul_(lambd).diagonal().copy_(surplus)
    return on_diag, off_diag


class _ThroughC(torch.autograd.Function):
    """The loss from c itself. `form` makes c; all workers then hold all of it, so backward sends nothing."""

    @staticmethod
    def forward(
        ctx: Any, z1: Tensor, z2: Tensor, lambd: float, batch: int, process_set: workers.ProcessSet, form: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = form(z1, z2, batch, process_set)
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
            return (z2 @ half_gradient.T) * factor, (z1 @ half_gradient) * factor, None, None, None, None


class _ThroughGram(torch.autograd.Function):
    """The loss from the B×B Gram matrices K1 = Z1 Z1ᵀ, K2 = Z2 Z2ᵀ; D×D is never formed. For B < D.

    Σ_ij c_ij² = ⟨K1, K2⟩ / B². Each worker holds its own rows of K: 2·B·D numbers sent, n·B·D multiplications. off_diag
    is the difference Σ_ij c_ij² − Σ_i c_ii²; c has rank < B, so the first is at least (Σ_i c_ii)²/B, and for B ≤ D/2
    the subtraction costs at most one bit where c_ii = 1 (test_loss.py measures the error against float64).
    """

    @staticmethod
    def forward(
        ctx: Any, z1: Tensor, z2: Tensor, lambd: float, batch: int, process_set: workers.ProcessSet
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows1, rows2 = _rows_of_all(z1, z2, process_set)
        with _full_precision():
            k1, k2 = z1 @ rows1.T, z2 @ rows2.T
        products = (k1 * k2).sum(dim=1).double().sum() / batch**2
        diagonal = (z1 * z2).sum(dim=0).double() / batch
        sums = workers.sum_(torch.cat([products[None], diagonal]), "loss.gram", process_set)
        squares, diagonal = sums[0], sums[1:]
        on_diag, off_diag = (diagonal - 1).square().sum(), squares - diagonal.square().sum()
        ctx.save_for_backward(z1, z2, rows1, rows2, k1, k2, (diagonal - 1 - lambd * diagonal).to(z1.dtype))
        ctx.batch, ctx.lambd = batch, lambd
        ctx.mark_non_differentiable(on_diag, off_diag)
        return on_diag.to(z1.dtype), off_diag.to(z1.dtype), (on_diag + lambd * off_diag).to(z1.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z1, z2, rows1, rows2, k1, k2, on_diagonal = ctx.saved_tensors
        factor = grads[2] * (2 / ctx.batch)  # into the small ones: each pass over n x D numbers takes its time
        on_diagonal, share = on_diagonal * factor, factor * (ctx.lambd / ctx.batch)
        with _full_precision():
            grad1 = (z2 * on_diagonal).addmm_(k2 * share, rows1)
            grad2 = (z1 * on_diagonal).addmm_(k1 * share, rows2)
        return grad1, grad2, None, None, None


def choose_combine(wanted: str, dim: int, global_batch: int) -> tuple[str, str]:
    """The mode that `wanted` means, and why. `auto`: the one that sends, computes and holds the least."""
    if wanted != "auto":
        return wanted, "as configured"
    if global_batch < dim:
        return "gram", f"B < D: rows (2 x {global_batch} x {dim}) are less than c (2 x {dim} x {dim})"
    return "allreduce", f"B >= D: c ({dim} x {dim}) is no more than the rows (2 x {global_batch} x {dim})"
