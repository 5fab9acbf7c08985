"""One case of each row of `./run.sh faults` that no other test does to real processes."""

import random

import pytest

from pipeline.fault_kinds import FAULTS
from pipeline.faults import Bench, NotHere

ROWS = [
    "kill -9 of a rank",
    "kill -9 of the launcher",
    "kill -9 in a save",
    "the disk is full",
    "SIGTERM at start-up",
    "SIGTERM in a save",
    "SIGTERM in an evaluation",
    "NaN on one rank",
    "the images vanish",
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", ROWS)
def test_no_result_is_wrong(bench, name):
    try:
        outcome = FAULTS[name](bench, random.Random(1))
    except NotHere as reason:
        pytest.skip(str(reason))
    assert outcome.wrong == 0, outcome
