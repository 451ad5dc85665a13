"""Schedules against torch's schedulers stepped for real, TensorFlow's formulas, and the originals' numbers."""

import math
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from falconet.optim.schedules import Schedule, drops_at

UPDATES = 10  # per epoch
EPOCHS = 6


def schedule(kind, **options) -> Schedule:
    return Schedule(**{"kind": kind, "peak": 0.4, "epochs": EPOCHS, "updates_per_epoch": UPDATES, **options})


def stepped(make, changes: int) -> list[float]:
    """The rates of a torch scheduler before each of `changes` steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = make(optimizer)
    rates = []
    for _ in range(changes):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


TORCH = {
    "step": (
        {"drops": (2, 5), "decay": 0.1},
        lambda o, f: lr_scheduler.MultiStepLR(o, milestones=[2 * f, 5 * f], gamma=0.1),
    ),
    "cosine": ({}, lambda o, f: lr_scheduler.CosineAnnealingLR(o, T_max=EPOCHS * f)),
    "exponential": ({"decay": 0.9}, lambda o, f: lr_scheduler.ExponentialLR(o, gamma=0.9)),
    "polynomial": (
        {"power": 3.0, "end_ratio": 0.0},
        lambda o, f: lr_scheduler.PolynomialLR(o, total_iters=EPOCHS * f, power=3.0),
    ),
}


@pytest.mark.parametrize("frequency", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", TORCH)
def test_schedule_equals_torchs_scheduler_at_its_frequency(kind, frequency):
    options, make = TORCH[kind]
    per_epoch = frequency or UPDATES
    rates = stepped(lambda optimizer: make(optimizer, per_epoch), EPOCHS * per_epoch)
    expected = np.repeat(rates, UPDATES // per_epoch)
    found = [schedule(kind, changes_per_epoch=frequency, **options).lr(u) for u in range(EPOCHS * UPDATES)]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", ["step", "cosine", "exponential"])
def test_warm_up_is_linear(kind):
    options = {**TORCH[kind][0], "changes_per_epoch": 1}
    cold, warm = schedule(kind, **options), schedule(kind, warmup_epochs=2.5, **options)
    for update in range(EPOCHS * UPDATES):
        factor = min(update / (2.5 * UPDATES), 1.0)
        assert warm.lr(update) == pytest.approx(cold.lr(update) * factor, rel=1e-12)


def test_polynomial_equals_tensorflows_after_a_ramp_to_the_peak():
    """(L0 - Lend)(1 - t)^power + Lend, as tf.train.polynomial_decay computes it."""
    found = [schedule("polynomial", warmup_epochs=2, end_ratio=1e-3).lr(u) for u in range(EPOCHS * UPDATES + 1)]
    updates = np.arange(EPOCHS * UPDATES + 1, dtype=np.float64)
    t = (updates - 20) / 40
    expected = np.where(updates < 20, 0.4 * updates / 20, (0.4 - 4e-4) * (1 - t) ** 2 + 4e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_run_shorter_than_its_warm_up_only_rises():
    found = [schedule("polynomial", epochs=2, warmup_epochs=5).lr(u) for u in range(2 * UPDATES)]
    np.testing.assert_allclose(found, 0.4 * np.arange(20) / 50, rtol=1e-12)


def test_frequency_0_424_changes_every_2_36_epochs_as_in_the_efficientnet_config():
    rates = schedule("exponential", peak=1.0, epochs=350, updates_per_epoch=1668, changes_per_epoch=0.424, decay=0.97)
    changed = [u for u in range(1, 20 * 1668) if rates.lr(u) != rates.lr(u - 1)]
    assert [round(u / 1668, 2) for u in changed[:4]] == [2.36, 4.72, 7.08, 9.43]
    assert rates.lr(349 * 1668) == pytest.approx(0.97 ** math.floor(349 * 0.424))


def test_exponential_drops_at_tensorflows_epochs():
    """TF1: decay^floor(epoch * drops / epochs)."""
    rates = schedule("exponential", epochs=100, changes_per_epoch=30 / 100, decay=0.94)
    for epoch in range(0, 100, 10):  # 0.3 * epoch is whole, and the double nearest 0.3 is below it
        assert rates.lr(epoch * UPDATES) == pytest.approx(0.4 * 0.94 ** (epoch * 30 // 100))


def test_change_at_an_exact_multiple_is_not_one_update_late():
    rates = schedule("exponential", updates_per_epoch=49, changes_per_epoch=7.0, decay=0.5)
    assert [rates.lr(u) for u in range(0, 49, 7)] == [0.4 * 0.5**k for k in range(7)]


def test_drop_between_two_changes_waits_for_the_next_one():
    rates = schedule("step", drops=(2.25,), changes_per_epoch=2, decay=0.1)  # milestone 4.5, so change 5
    assert next(u for u in range(EPOCHS * UPDATES) if rates.lr(u) < 0.4) == 25


def test_factors_of_passed_drops_multiply():
    """PopART's 1, 0.5, 0.1 of the first rate, from 0.5 and 0.75 of training on."""
    rates = schedule("step", epochs=8, drops=(4, 6), factors=(0.5, 0.2))
    found = [rates.lr(update) for update in range(8 * UPDATES)]
    np.testing.assert_allclose(found, 0.4 * np.repeat([1.0, 0.5, 0.1], [40, 20, 20]), rtol=1e-12)


def test_factor_belongs_to_its_drop_in_any_order():
    rates = schedule("step", drops=(4, 2), factors=(0.5, 0.1))
    assert [rates.lr(10 * epoch) for epoch in (1, 3, 5)] == pytest.approx([0.4, 0.04, 0.02])


def test_equal_factors_are_one_factor():
    one, many = schedule("step", drops=(2, 5), decay=0.1), schedule("step", drops=(2, 5), factors=(0.1, 0.1))
    assert [one.lr(u) for u in range(60)] == pytest.approx([many.lr(u) for u in range(60)], rel=1e-15)
    assert one.describe() == many.describe()


def test_schedule_stays_at_its_end():
    assert schedule("cosine").lr(10 * EPOCHS * UPDATES) == 0.0
    assert schedule("polynomial", end_ratio=0.25).lr(10 * EPOCHS * UPDATES) == 0.1


any_schedule = st.builds(
    Schedule,
    kind=st.sampled_from(["step", "cosine", "exponential", "polynomial"]),
    peak=st.floats(1e-6, 100),
    epochs=st.floats(0, 50).map(lambda x: round(x, 2)),
    updates_per_epoch=st.integers(1, 200),
    warmup_epochs=st.floats(0, 20).map(lambda x: round(x, 2)),
    changes_per_epoch=st.one_of(st.just(0.0), st.floats(0.1, 50)),
    decay=st.floats(0, 1),
    drops=st.lists(st.floats(0, 50), max_size=3).map(tuple),
    power=st.floats(0.5, 4),
    end_ratio=st.floats(0, 1),
)
quick = settings(max_examples=100, deadline=None, database=None)


@quick
@given(any_schedule, st.integers(0, 5000))
def test_rate_is_never_negative_or_above_the_peak(rates, update):
    assert 0.0 <= rates.lr(update) <= rates.peak * (1 + 1e-12)


@quick
@given(any_schedule)
def test_rate_never_rises_after_warm_up(rates):
    first = math.ceil(rates.warmup_epochs * rates.updates_per_epoch) + 1
    for now, later in pairwise(rates.lr(u) for u in range(first, first + 40)):
        assert later <= now * (1 + 1e-12)


@quick
@given(any_schedule, st.integers(0, 5000))
def test_warm_up_rises_in_equal_steps_at_most(rates, update):
    warmup_updates = rates.warmup_epochs * rates.updates_per_epoch
    if update + 1 < warmup_updates:
        assert rates.lr(update + 1) - rates.lr(update) <= rates.peak / warmup_updates * (1 + 1e-9)


@quick
@given(any_schedule)
def test_first_update_has_rate_0_only_with_warm_up(rates):
    assert rates.warmup_epochs == 0 or rates.lr(0) == 0.0


LINES = {
    "cosine from 0.4 to 0 over 30 epochs, warm-up 1 epoch": {"kind": "cosine", "epochs": 30, "warmup_epochs": 1},
    "cosine from 0.4 to 0 over 1 epoch, changing 4 times per epoch": {
        "kind": "cosine",
        "epochs": 1,
        "changes_per_epoch": 4,
    },
    "step from 0.4, times 0.5 at epoch 2, 4": {"kind": "step", "drops": (2, 4)},
    "step from 0.4": {"kind": "step"},
    "step from 0.4, times 0.5 at epoch 2, 4, times 0.2 at epoch 5": {
        "kind": "step",
        "drops": (2, 4, 5),
        "factors": (0.5, 0.5, 0.2),
    },
    "exponential from 0.4, times 0.97 every 2.36 epochs, warm-up 5 epochs": {
        "kind": "exponential",
        "decay": 0.97,
        "changes_per_epoch": 0.424,
        "warmup_epochs": 5,
    },
    "exponential from 0.4, times 0.5 every update": {"kind": "exponential"},
    "polynomial of power 2 from 0.4 to 4e-06 over 6 epochs, changing every epoch": {
        "kind": "polynomial",
        "changes_per_epoch": 1,
    },
}


@pytest.mark.parametrize(("line", "options"), LINES.items())
def test_schedule_is_described_in_one_line(line, options):
    assert schedule(**options).describe() == line


def test_schedules_import_neither_torch_nor_numpy():
    code = "import sys, falconet.optim.schedules; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@settings(deadline=None)
@given(
    st.lists(st.sampled_from((0.1, 0.3, 0.5, 0.6, 0.75, 0.8, 0.9)), max_size=3), st.integers(1, 500), st.integers(1, 90)
)
def test_drop_at_a_share_comes_with_the_first_update_beyond_it(shares, updates, updates_per_epoch):
    drops = tuple(drops_at(shares, updates, updates_per_epoch))
    schedule = Schedule(kind="step", peak=1.0, epochs=1, updates_per_epoch=updates_per_epoch, decay=0.5, drops=drops)
    for update in range(updates):
        passed = sum(Fraction(update, updates) >= Fraction(str(share)) for share in shares)
        assert schedule.lr(update) == 0.5**passed
