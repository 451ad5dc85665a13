"""What is left of a phase when it has ended."""

import gc
import weakref

import pytest

from falconet.train import run
from falconet.train.build import BuiltPhase
from half_resolution import HALF
from tiny import TINY


@pytest.mark.parametrize("line", [TINY, f"{TINY} --profile", HALF], ids=["one phase", "profiled", "two phases"])
def test_nothing_refers_to_the_step_of_a_phase_that_has_ended(falconet, monkeypatch, line):
    """A step may hold graphs with messages to other processes, which part right after the last phase."""
    plain_step, plain_phase, steps, alive = BuiltPhase.step, run.train_phase, [], []

    def step(self, state, **more):
        made = plain_step(self, state, **more)
        steps.append(weakref.ref(made))
        return made

    def train_phase(*given, **more):
        handed = plain_phase(*given, **more)
        alive.append(steps[-1]() is not None)
        return handed

    monkeypatch.setattr(BuiltPhase, "step", step)
    monkeypatch.setattr(run, "train_phase", train_phase)
    gc.disable()  # which would free what only refers to itself, some time
    try:
        assert falconet(f"train {line} --run-dir r").code == 0
    finally:
        gc.enable()
    assert alive == [False] * (2 if line is HALF else 1)
