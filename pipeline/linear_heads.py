"""Linear classifiers on features that are there already: all learning rates at once, in seconds.

Each worker keeps the features of its slice of the images, and of each batch takes the samples that lie in it: the
batches, hence the result up to rounding, are those of one worker, and no worker holds all features.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from dali.errors import InputError
from dali.order import epoch_order, steps_per_epoch
from dali.subset import stratified
from pipeline import workers
from pipeline.config import ProbeSection
from pipeline.features import Features
from pipeline.schedule import lr_factor
from pipeline.scores import Scores


class Rows(NamedTuple):
    """This worker's slice of the training features: `x` (n, F + 1), its last column 1; `labels` (n,); and where
    among all of them it starts."""

    x: Tensor
    labels: Tensor
    start: int


class Outcome(NamedTuple):
    """What `fit_and_judge` found.

    Attributes:
        scores: on the test images.
        rate: the learning rate that was chosen.
        held_out: per cent right on the held-out part of train, by rate; NaN where training diverged.
        weight, bias: (K, F), (K,) of the classifier, for features as the backbone gives them.
    """

    scores: Scores
    rate: float
    held_out: dict[float, float]
    weight: Tensor
    bias: Tensor


def fit_and_judge(
    train: Features,
    test: Features,
    num_test: int | None,
    num_classes: int,
    section: ProbeSection,
    seed: int,
    world: workers.World,
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Train one classifier a rate, choose by a held-out part of train, train again on all of it, and count on test.

    Args:
        train, test: this worker's slices, as `features.extract` cuts them.
        num_test: as `scores.to_count` says.
        say: shows progress, on rank 0.
    """
    # Not the source's: images that cannot be read may have been left out
    labels = workers.gather(train.labels, "heads.labels").numpy()
    start = sum(workers.gather_objects(len(train.x), "heads.lengths")[: world.rank])
    mean, deviation = _moments(train.x.to(device), len(labels))
    ones = torch.ones(len(train.x), 1, device=device)
    x = torch.cat([(train.x.to(device) - mean) / deviation, ones], dim=1)
    rows = Rows(x, train.labels.to(device), start)
    apart = _held_out(labels, section.held_out, seed)
    rest = np.setdiff1d(np.arange(len(labels)), apart)
    rates = section.cached_rates
    accuracy = [float("nan")] * len(rates)
    chosen = 0
    if len(rates) > 1:
        assert len(apart), "one label per class leaves none to choose a rate by"
        heads = fit(rows, rest, rates, num_classes, section, seed, say)
        accuracy = _accuracy(heads, rows, apart)
        chosen = int(np.argmax([-1.0 if np.isnan(value) else value for value in accuracy]))
        say(
            "held-out part of train: "
            + ", ".join(f"{rate:g} {value:.2f} %" for rate, value in zip(rates, accuracy, strict=True))
        )
    (head,) = fit(rows, np.arange(len(labels)), rates[chosen : chosen + 1], num_classes, section, seed, say)
    if not bool(head.isfinite().all()):  # on all workers alike: gradients are summed
        raise InputError(
            f"probe.cached_rates: the classifier is not finite with the rate {rates[chosen]:g}, "
            "which was the best; write lower ones, or check the weights"
        )
    # (x − mean) / deviation · w + b as one layer on x
    weight = (head[:-1] / deviation[:, None]).T
    bias = head[-1] - weight @ mean
    scores = Scores(num_classes)
    scores.add(test.x.to(device) @ weight.T + bias, test.labels)
    held_out = dict(zip(rates, accuracy, strict=True))
    return Outcome(scores.sum(num_test), rates[chosen], held_out, weight.cpu(), bias.cpu())


def _moments(x: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation (F,) of all workers' rows; a feature that never changes has deviation 1."""
    mean = workers.sum_(x.sum(0, dtype=torch.float64), "heads.mean") / total
    variance = workers.sum_((x.double() - mean).square().sum(0), "heads.variance") / total
    deviation = variance.sqrt()
    return mean.float(), torch.where(deviation > 0, deviation, torch.ones_like(deviation)).float()


def _held_out(labels: NDArray[np.int64], share: float, seed: int) -> NDArray[np.int64]:
    """A share of each class, rounded; of a class with a single label nothing, and of others never all."""
    held = np.bincount(labels)
    counts = np.minimum(np.maximum(np.floor(held * share + 0.5), held > 1), np.maximum(held - 1, 0))
    return stratified(labels, counts.astype(np.int64), seed + 1)


def fit(
    rows: Rows,
    chosen: NDArray[np.int64],
    rates: tuple[float, ...],
    num_classes: int,
    section: ProbeSection,
    seed: int,
    say: Callable[[str], None],
) -> Tensor:
    """Classifiers (L, F + 1, K), one a rate, from the training images `chosen`: SGD with momentum, from zero."""
    batch = min(section.batch, len(chosen))
    per_epoch = steps_per_epoch(len(chosen), batch)
    steps = max(1, round(section.epochs * per_epoch))
    x, labels, _ = rows
    w = torch.zeros(x.shape[1], len(rates) * num_classes, device=x.device)
    momentum = torch.zeros_like(w)
    lr = torch.tensor(rates, device=x.device).repeat_interleave(num_classes)
    for epoch in range(-(-steps // per_epoch)):
        order = chosen[epoch_order(seed, epoch, len(chosen))]
        factor = lr_factor(epoch * per_epoch, 0, steps, 0.0)
        for step in range(epoch * per_epoch, min(steps, (epoch + 1) * per_epoch)):
            places = _local(order[(step - epoch * per_epoch) * batch :][:batch], rows)
            part = x[places]
            logits = (part @ w).view(-1, len(rates), num_classes)
            # Probabilities below e^-40 would become subnormal numbers, with which CPUs reckon many times slower
            p = logits.maximum(logits.amax(2, keepdim=True) - 40).softmax(2)
            p -= one_hot(labels[places], num_classes)[:, None]  # of the cross-entropy: probability less truth
            gradient = workers.sum_(part.T @ p.flatten(1) / batch, "heads.gradient")
            momentum.mul_(section.momentum).add_(gradient).add_(w, alpha=section.weight_decay)
            w -= momentum * (lr * factor)
        if (epoch + 1) % max(1, round(section.epochs / 5)) == 0:
            say(f"classifiers: epoch {epoch + 1}/{section.epochs:g}")
    return w.view(-1, len(rates), num_classes).permute(1, 0, 2)


def _local(places: NDArray[np.int64], rows: Rows) -> Tensor:
    """Those of `places` among all training images that are this worker's, as its own rows."""
    mine = places - rows.start
    return torch.from_numpy(mine[(mine >= 0) & (mine < len(rows.x))]).to(rows.x.device)


def _accuracy(heads: Tensor, rows: Rows, places: NDArray[np.int64]) -> list[float]:
    """Per cent right of each head on these training images; NaN where its weights are not finite."""
    mine = _local(places, rows)
    named = torch.einsum("nf,lfk->nlk", rows.x[mine], heads).argmax(2)
    right = workers.sum_((named == rows.labels[mine, None]).sum(0), "heads.accuracy").tolist()
    finite = heads.flatten(1).isfinite().all(1).tolist()
    return [100 * count / len(places) if ok else float("nan") for count, ok in zip(right, finite, strict=True)]
