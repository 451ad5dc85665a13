"""Metrics: added in the order of the updates, read rarely; a loss that is not finite names its update."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from falconet.checkpoint.state import Progress, Totals
from falconet.errors import DivergedError
from falconet.parallel.world import World
from falconet.train.metrics import Meter, NotFiniteError
from falconet.train.step import Update


def update(loss, correct=1, images=2, device="cpu"):
    number = torch.tensor(loss, dtype=torch.float32, device=device)
    return Update(
        number,
        number / 4,
        torch.tensor(correct, device=device),
        torch.tensor(images, device=device),
        torch.tensor(0, device=device),
    )


def add(meter, *updates):
    """As the loop does."""
    for one in updates:
        meter.add(one)
        meter.progress.update += 1


# Added in another order, or in pairs, these give other sums.
LOSSES = [2.0**60, 1.0, -(2.0**60), 3.0] * 4


@given(st.lists(st.booleans(), min_size=len(LOSSES), max_size=len(LOSSES)))
def test_totals_add_updates_in_order_however_often_they_are_read(reads):
    progress = Progress()
    meter = Meter(progress)
    expected = 0.0
    for loss, read in zip(LOSSES, reads, strict=True):
        add(meter, update(loss))
        expected += loss
        if read:
            meter.read()
    totals = meter.end_interval()
    assert totals == Totals(len(LOSSES), expected, len(LOSSES), 2 * len(LOSSES), smoothing=expected / 4)
    assert totals.mean_loss == expected / len(LOSSES)
    assert totals.accuracy == 50.0


def test_intervals_and_epochs_reset_independently():
    meter = Meter(Progress())
    add(meter, update(1.0), update(2.0))
    assert meter.end_interval() == Totals(2, 3.0, 2, 4, smoothing=0.75)
    add(meter, update(4.0))
    assert meter.end_interval() == Totals(1, 4.0, 1, 2, smoothing=1.0)
    assert meter.end_epoch() == Totals(3, 7.0, 3, 6, smoothing=1.75)
    assert meter.progress.interval == meter.progress.epoch == Totals()


@pytest.mark.parametrize("others", [0, 2])
def test_numbers_that_were_sent_are_added_before_those_of_later_updates(others):
    straight, sent = Meter(Progress()), Meter(Progress())
    for meter in (straight, sent):
        add(meter, *map(update, LOSSES[:5]))
    assert sent.send() is False  # a CPU has them at once
    for meter in (straight, sent):
        add(meter, *map(update, LOSSES[5 : 5 + others]))
    assert sent.end_interval() == straight.end_interval()
    assert sent.progress == straight.progress


def test_numbers_of_another_device_are_on_their_way_until_they_are_read():
    meter = Meter(Progress(), World(device=torch.device("meta")))
    assert not meter.send()  # there are none
    add(meter, update(1.0))
    assert meter.send()
    assert meter.send()
    meter.read()
    assert not meter.send()


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_loss_that_is_not_finite_names_its_update_and_keeps_earlier_totals(loss, at):
    progress = Progress(update=6)
    meter = Meter(progress)
    losses = [0.5, 0.25, 0.125]
    losses[at] = loss
    add(meter, *map(update, losses))
    with pytest.raises(NotFiniteError) as stopped:
        meter.read()
    assert str(stopped.value) == f"update {7 + at}: the loss is {loss}"
    assert stopped.value.update == 7 + at
    assert isinstance(stopped.value, DivergedError)
    assert progress.interval.loss == sum(losses[:at])


def test_collecting_never_reads_from_the_device():
    meter = Meter(Progress())
    add(meter, update(1.0, device="meta"))  # a meta tensor has no number to give
    with pytest.raises(NotImplementedError):
        meter.read()


@pytest.mark.gpu
def test_the_device_goes_on_while_its_numbers_come():
    device, cycles = torch.device("cuda", 0), 200_000_000  # about 0.1 s
    meter = Meter(Progress(), World(device=device))
    updates = [update(loss, device="cuda") for loss in (1.0, 2.0)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(cycles)
        add(meter, *updates)
        assert meter.send()
        torch.cuda._sleep(cycles)
        ended = torch.cuda.Event()
        ended.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.end_epoch() == Totals(2, 3.0, 2, 4, smoothing=0.75)
    assert not ended.query()


def test_a_restored_meter_continues_exactly():
    straight = Meter(Progress())
    add(straight, update(0.1), update(0.2))
    straight.read()
    restored = Meter(Progress.from_json(straight.progress.to_json()))
    for meter in (straight, restored):
        add(meter, update(0.3))
    assert restored.end_interval() == straight.end_interval()
    assert restored.end_epoch() == straight.end_epoch()
    assert restored.progress == straight.progress
