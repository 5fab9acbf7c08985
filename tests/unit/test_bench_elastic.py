"""When `bench elastic` calls a run the straight one."""

import numpy as np
import pytest
import torch

from pipeline.bench_elastic import STEPS, Comparison, Curve


def curve(loss=0.0, state=0.0):
    """Apart from the straight run by so much."""
    return Curve(np.full(STEPS, 2.0 * (1 + loss)), torch.full((3,), 4.0 * (1 + state), dtype=torch.float64))


BOTH = pytest.mark.parametrize("measure", ["loss", "state"])


@BOTH
@pytest.mark.parametrize(("apart", "kept"), [(0.0, True), (5e-10, True), (2e-9, False)])
def test_float64_may_differ_by_rounding(measure, apart, kept):
    assert Comparison("float64", curve(), curve(**{measure: apart}), [], {}).kept == kept


@BOTH
@pytest.mark.parametrize(("apart", "kept"), [(0.02, True), (0.2, False)])
def test_float32_may_differ_as_permuted_batches_do(measure, apart, kept):
    controls = [curve(0.001, 0.001), curve(-0.01, -0.01)]
    assert Comparison("float32", curve(), curve(**{measure: apart}), controls, {}).kept == kept
