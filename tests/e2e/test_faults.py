"""The rows of `./run.sh faults` that no other test does to real processes."""

import random

import pytest

from pipeline.fault_kinds import FAULTS
from pipeline.faults import Bench, NotHere, Outcome
from pipeline.watched_jobs import Launch


class OneRun(Bench):
    """All faults befall the same run: what starts it again after one is what the next one breaks."""

    def new_output(self):
        return self.folder / "run"

    def recover(self, output, at, since, what, *more):
        return Outcome(what, None, 0, 0)


class At(random.Random):
    """The place of a fault is not drawn, but given."""

    def __init__(self, place):
        super().__init__(1)
        self.place = place

    def randint(self, a, b):
        return self.place


IN_TURN = {  # with the step, or the number of the checkpoint, in their order in the run
    "SIGTERM at start-up": 0,
    "SIGTERM in a save": 8,
    "kill -9 of a rank": 13,
    "kill -9 of the launcher": 18,
    "SIGTERM in an evaluation": 25,
    "kill -9 in a save": 4,
    "the images vanish": 37,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return OneRun(tmp_path_factory.mktemp("faults"))


def test_a_run_broken_in_seven_ways_is_the_one_nothing_happened_to(bench):
    for name, place in IN_TURN.items():
        outcome = FAULTS[name](bench, At(place))
        assert outcome.wrong == 0, (name, outcome)
    last = Launch(bench.words(bench.new_output()))
    assert last.end() == 0 and "resuming at step" in last.text, last.text
    assert bench.differences(bench.new_output()) == 0


@pytest.mark.parametrize("name", ["the disk is full", "NaN on one rank"])
def test_a_run_that_goes_on_is_not_wrong(tmp_path, bench, name, monkeypatch):
    monkeypatch.setattr(bench, "new_output", lambda: tmp_path / "run")
    try:
        outcome = FAULTS[name](bench, random.Random(1))
    except NotHere as reason:
        pytest.skip(str(reason))
    assert outcome.wrong == 0, outcome
