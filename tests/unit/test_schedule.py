"""The learning rate against the reference's formula, and its promises at the ends."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.schedule import lr_factor, set_lr


def reference_rate(step: int, warmup: int, total: int, base: float) -> float:
    """What the reference computes, written out for its end rate of base / 1000."""
    if step < warmup:
        return base * step / warmup
    progress = (step - warmup) / (total - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return base * cosine + base * 0.001 * (1 - cosine)


@pytest.mark.parametrize("step", [0, 1, 99, 100, 101, 550, 999, 1000])
def test_equals_the_reference(step):
    assert 8.0 * lr_factor(step, 100, 1000, 0.001) == pytest.approx(reference_rate(step, 100, 1000, 8.0), rel=1e-12)


def test_known_points():
    assert lr_factor(0, 10, 110, 0.0) == 0
    assert lr_factor(5, 10, 110, 0.0) == 0.5
    assert lr_factor(10, 10, 110, 0.0) == 1
    assert lr_factor(60, 10, 110, 0.2) == pytest.approx(0.6)
    assert lr_factor(110, 10, 110, 0.25) == 0.25
    assert lr_factor(0, 0, 10, 0.1) == 1
    assert lr_factor(10, 10, 10, 0.1) == 1


@given(st.integers(0, 50), st.integers(1, 300), st.floats(0, 1))
def test_rises_then_falls(warmup, after, final_factor):
    total = warmup + after
    factors = [lr_factor(step, warmup, total, final_factor) for step in range(total + 1)]
    assert all(a < b for a, b in zip(factors[:warmup], factors[1 : warmup + 1], strict=True))
    assert all(a >= b - 1e-12 for a, b in zip(factors[warmup:], factors[warmup + 1 :], strict=False))
    assert factors[warmup] == pytest.approx(1) and factors[-1] == pytest.approx(final_factor)


def test_set_lr_starts_from_the_base_rate_each_time():
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)]
    groups = [
        {"params": parameters[:1], "name": "weights", "base_lr": 4.0},
        {"params": parameters[1:], "name": "biases", "base_lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=123.0)
    for _ in range(2):  # a rate that depended on the last one would differ the second time
        assert set_lr(optimizer, 5, 10, 110, 0.0) == {"weights": 2.0, "biases": 0.25}
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 0.25]
