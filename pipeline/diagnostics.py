"""How far embeddings are from collapse: spectrum, effective rank, the entries of c. docs/diagnostics.md reads them."""

import math

import torch
from torch import Tensor


@torch.no_grad()
def spectrum(x: Tensor) -> Tensor:
    """Standard deviations of embeddings (N, D) along their principal directions, largest first; float64, on the CPU.

    There are min(N - 1, D), N at least 2. All are NaN where an embedding is not finite.
    """
    directions = min(len(x) - 1, x.shape[1])
    x = x.double() - x.double().mean(dim=0)
    smaller = x @ x.T if len(x) <= x.shape[1] else x.T @ x
    if not torch.isfinite(smaller).all():
        return torch.full((directions,), math.nan, dtype=torch.float64)
    return torch.linalg.eigvalsh(smaller / (len(x) - 1)).clamp_min(0).sqrt().flip(0)[:directions].cpu()


def effective_rank(deviations: Tensor) -> float:
    """exp of the entropy of the spectrum, as shares of its sum: 1 when one direction holds all, D when all are equal.

    Roy and Vetterli, "The effective rank" (EUSIPCO 2007); as a sign of collapse: arXiv:2210.02885. 0 without spread.
    """
    total = deviations.sum()
    if total == 0:
        return 0.0
    shares = deviations / total
    return float(torch.special.entr(shares).sum().exp())


@torch.no_grad()
def correlation(z1: Tensor, z2: Tensor, eps: float) -> Tensor:
    """c (D, D) of two views' embeddings (N, D) that one process holds; `loss.correlation` is for many.

    A feature without spread has zeros in c.
    """
    z1, z2 = ((z - z.mean(dim=0)) / (z.var(dim=0, correction=0) + eps).sqrt() for z in (z1, z2))
    return z1.T @ z2 / len(z1)


@torch.no_grad()
def figures(c: Tensor, deviations: Tensor) -> dict[str, float]:
    """What c and a spectrum come to, in numbers that do not depend on lambd: metrics of a run.

    `c_off_rms` and `c_off_max` are of the absolute entries off the diagonal.
    """
    diagonal = c.diagonal().double()
    squares = torch.linalg.vector_norm(c, dim=1, dtype=torch.float64).square().sum() - diagonal.square().sum()
    without = c.abs().fill_diagonal_(0)
    off = max(1, c.numel() - len(c))
    return {
        "c_diag_mean": float(diagonal.mean()),
        "c_diag_min": float(diagonal.min()),
        "c_off_rms": float((squares.clamp_min(0) / off).sqrt()),
        "c_off_max": float(without.max()),
        "effective_rank": effective_rank(deviations),
    }
