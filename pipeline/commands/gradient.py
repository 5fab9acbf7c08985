"""`gradient`: what common ways of spreading the loss over workers do to its gradient; the tables of docs/gradient.md.

Float64, one process. Workers are simulated: each has its own copy of the network's parameters, so that autograd leaves
each worker's own contribution in its copy; batch norm inside the network sees all samples, as it does in all of these
programs. What differs is the loss, and how the contributions are put together.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dali.errors import InputError
from dali.order import split
from pipeline.config import OptimizerSection
from pipeline.loss import _ThroughC
from pipeline.optim import build_optimizer
from pipeline.workers import everyone

BATCH, WORKERS, WIDTHS, LAMBD = 256, 4, (24, 48, 32), 0.0051
REFERENCE_WORKERS = 16
Slices = list[Tensor]


class Way(NamedTuple):
    """A way to train on several workers: `loss` gives what all workers' contributions are the gradient of."""

    name: str
    loss: Callable[[Slices, Slices], Tensor]
    factor: float  # on the sum of the contributions


def run(args: list[str]) -> int:
    """Print both tables."""
    if args:
        raise InputError(f"gradient: {args[0]} is unknown; it takes no arguments")
    print("\n".join([*table_of_ways(), "", *table_of_optimizers()]))
    return 0


# --- The loss -------------------------------------------------------------------------------------------------------


def normalise(z: Tensor) -> Tensor:
    """Each feature of (N, D) with mean 0 and variance 1 over these N samples."""
    return (z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt()


def barlow_twins(c: Tensor) -> Tensor:
    """arXiv:2103.03230, Alg. 1, from c (D, D)."""
    diagonal = c.diagonal()
    return (diagonal - 1).square().sum() + LAMBD * (c.square().sum() - diagonal.square().sum())


def of_the_whole_batch(z1: Slices, z2: Slices) -> Tensor:
    """Normalised over all samples, c summed over the workers."""
    return barlow_twins(normalise(torch.cat(z1)).T @ normalise(torch.cat(z2)) / BATCH)


def with_own_statistics(z1: Slices, z2: Slices) -> Tensor:
    """Normalised by each worker over its own samples, c averaged over the workers."""
    return barlow_twins(
        torch.stack([normalise(a).T @ normalise(b) / len(a) for a, b in zip(z1, z2, strict=True)]).mean(0)
    )


def mean_of_losses(z1: Slices, z2: Slices) -> Tensor:
    """Each worker's loss of its own samples; no c is exchanged."""
    parts = [barlow_twins(normalise(a).T @ normalise(b) / len(a)) for a, b in zip(z1, z2, strict=True)]
    return torch.stack(parts).mean()


def as_here(z1: Slices, z2: Slices) -> Tensor:
    """The code that trains: each worker's loss and backward with c, the workers' sum, given.

    All workers hold the same loss, and each one's backward reaches its own rows only. Added up, for the one backward
    of this simulation, they are W losses whose gradients are the contributions.
    """
    rows1, rows2 = (normalise(torch.cat(z)).split([len(part) for part in z]) for z in (z1, z2))
    c = torch.stack([a.T @ b / BATCH for a, b in zip(rows1, rows2, strict=True)]).sum(0).detach()
    losses = [
        _ThroughC.apply(a, b, LAMBD, BATCH, everyone, lambda *_: c.clone())[2]
        for a, b in zip(rows1, rows2, strict=True)
    ]
    return torch.stack(losses).sum()


# Where c's backward sends nothing, the contributions sum to the loss's gradient, and an average is 1/W of it. A
# backward that sums over the workers makes each contribution W times as large, which the average puts right.
WAYS = [
    Way("contributions summed (this project)", as_here, 1.0),
    Way("c summed, backward sends nothing, gradients averaged", of_the_whole_batch, 1 / WORKERS),
    Way("own statistics, backward sends nothing, gradients averaged", with_own_statistics, 1 / WORKERS),
    Way("own statistics, backward sums, gradients averaged", with_own_statistics, 1.0),
    Way("losses of each worker's samples, gradients averaged", mean_of_losses, 1.0),
]


# --- The gradient ---------------------------------------------------------------------------------------------------


def views(unlike: bool) -> tuple[Tensor, Tensor]:
    """Two noisy views (B, F) of the same samples; `unlike`: drifting, so that no worker's slice is like another's."""
    generator = torch.Generator().manual_seed(0)
    samples, noise1, noise2 = (
        torch.randn(BATCH, WIDTHS[0], generator=generator, dtype=torch.float64) for _ in range(3)
    )
    if unlike:
        samples = samples + torch.linspace(-1, 1, BATCH, dtype=torch.float64)[:, None] * samples[:1]
    return samples + 0.3 * noise1, samples + 0.3 * noise2


def parameters() -> list[Tensor]:
    """Linear, batch norm, ReLU, linear: weights, biases, and the norm's weight and bias."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(WIDTHS[1], WIDTHS[0]), (WIDTHS[1],), (WIDTHS[1],), (WIDTHS[1],), (WIDTHS[2], WIDTHS[1]), (WIDTHS[2],)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes]
    made[2] = made[2] + 1
    return made


def embed(copies: list[list[Tensor]], x: Tensor) -> Slices:
    """z of each worker's slice of x, through that worker's own copy of the parameters; the norm sees all samples."""
    slices = [x[part] for part in split(len(x), len(copies))]
    hidden = [rows @ own[0].T + own[1] for rows, own in zip(slices, copies, strict=True)]
    normal = normalise(torch.cat(hidden)).split([len(rows) for rows in hidden])
    return [(rows * own[2] + own[3]).relu() @ own[4].T + own[5] for rows, own in zip(normal, copies, strict=True)]


def gradient(loss: Callable[[Slices, Slices], Tensor], num_workers: int, unlike: bool) -> Tensor:
    """The workers' contributions, added up and laid end to end."""
    copies = [[p.clone().requires_grad_() for p in parameters()] for _ in range(num_workers)]
    y1, y2 = views(unlike)
    leaves = [p for own in copies for p in own]
    contributions = torch.autograd.grad(loss(embed(copies, y1), embed(copies, y2)), leaves)
    flat = torch.cat([part.flatten() for part in contributions])
    return flat.view(num_workers, -1).sum(0)


class Comparison(NamedTuple):
    """g against the true gradient t: g = multiple · t + rest; `astray` is |rest| / |g|."""

    multiple: float
    astray: float


def compare(way: Way, unlike: bool) -> Comparison:
    true = gradient(of_the_whole_batch, 1, unlike)
    found = way.factor * gradient(way.loss, WORKERS, unlike)
    multiple = float(found @ true / (true @ true))
    return Comparison(multiple, float((found - multiple * true).norm() / found.norm()))


def table_of_ways() -> list[str]:
    """Each way's gradient against that of one process, in Markdown."""
    rows = [
        f"| {WORKERS} workers, {BATCH} samples | alike: multiple (astray) | unlike: multiple (astray) |",
        "|---|---|---|",
    ]
    for way in WAYS:
        cells = [_cell(compare(way, unlike)) for unlike in (False, True)]
        rows.append(f"| {way.name} | {' | '.join(cells)} |")
    return rows


def _cell(found: Comparison) -> str:
    astray = "< 1e-12" if found.astray < 1e-12 else f"{100 * found.astray:.0f} %"
    return f"{found.multiple:.3f} ({astray})"


# --- What an optimizer makes of a factor ----------------------------------------------------------------------------


def update(section: OptimizerSection, factor: float) -> dict[str, Tensor]:
    """How the first step moves weights and biases (laid end to end) when the gradient is multiplied by `factor`."""
    flat = gradient(of_the_whole_batch, 1, False)
    named = [(str(place), torch.nn.Parameter(p)) for place, p in enumerate(parameters())]
    before = [p.detach().clone() for _, p in named]
    for (_, p), part in zip(named, flat.split([p.numel() for p in before]), strict=True):
        p.grad = factor * part.view_as(p)
    build_optimizer(section, named, BATCH).step()
    moves = [p.detach() - was for (_, p), was in zip(named, before, strict=True)]
    return {
        "weights": torch.cat([move.flatten() for move in moves if move.ndim > 1]),
        "biases": torch.cat([move for move in moves if move.ndim == 1]),
    }


def table_of_optimizers() -> list[str]:
    """How long the first step is with 1/16 of the gradient, as a multiple of the step with all of it, in Markdown."""
    rows = [f"| first step with 1/{REFERENCE_WORKERS} of the gradient | weights | biases, norm |", "|---|---|---|"]
    for name in ("lars", "sgd", "adamw"):
        section = OptimizerSection(name=name, weight_decay=0)
        whole, part = update(section, 1.0), update(section, 1 / REFERENCE_WORKERS)
        cells = [f"{float(part[kind].norm() / whole[kind].norm()):.4f}" for kind in ("weights", "biases")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows
