"""The plan: when a run logs, validates and saves, as pure arithmetic."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falconet.checkpoint.manifest import Position
from falconet.config.commands import TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import parse
from falconet.config.settings import LINE, Setting, from_line
from falconet.data.loader import BatchShape
from falconet.errors import ConfigError
from falconet.optim.schedules import Schedule
from falconet.train.plan import Plan, phases_of, plan_of, updates_in_epoch


def plan(*, epochs=3, updates_per_epoch=10, **changes):
    values = {
        "micro_batch": 8,
        "accumulation": 1,
        "replicas": 1,
        "images": 8 * updates_per_epoch,
        "logs_per_epoch": 1,
        "validation_mode": "during",
        "validation_frequency": 1,
        "epochs_per_save": 1.0,
    }
    schedule = Schedule(kind="cosine", peak=0.1, epochs=epochs, updates_per_epoch=updates_per_epoch)
    return Plan(epochs=epochs, schedule=schedule, **(values | changes))


def points(asks, epochs, updates_per_epoch):
    """The updates at which something is done, epoch by epoch, counted from 1 within each."""
    return [
        [done for done in range(1, updates_per_epoch + 1) if asks(epoch * updates_per_epoch + done)]
        for epoch in range(epochs)
    ]


some_epochs, some_updates = st.integers(1, 6), st.integers(1, 60)


@given(some_epochs, some_updates, st.integers(1, 80))
def test_log_points_are_evenly_spread_and_end_with_the_epoch(epochs, updates, logs):
    per_epoch = points(plan(epochs=epochs, updates_per_epoch=updates, logs_per_epoch=logs).logs_at, epochs, updates)
    for logged in per_epoch:
        assert len(logged) == min(logs, updates)
        assert logged[-1] == updates
        gaps = [b - a for a, b in zip([0, *logged], logged, strict=False)]
        assert max(gaps) - min(gaps) <= 1


@given(some_epochs, some_updates, st.integers(1, 80), st.integers(0, 50))
def test_log_points_lie_an_interval_apart_whatever_the_epochs(epochs, updates, interval, before):
    made = plan(epochs=epochs, updates_per_epoch=updates, log_interval=interval, updates_before=before)
    logged = [update - before for update in range(before + 1, made.updates + 1) if made.logs_at(update)]
    assert logged == [*range(interval, epochs * updates, interval), epochs * updates]


LENGTHS = {  # options, updates per epoch: updates, epochs begun
    ("2.5", 4): (10, 3),
    ("2.5", 3): (8, 3),  # 7.5, to the even one
    ("30.5", 6): (183, 31),
    ("3", 4): (12, 3),
    ("3.0", 4): (12, 3),
    ("0.01", 4): (1, 1),
}


@pytest.mark.parametrize(("asked", "length"), LENGTHS.items())
def test_part_of_an_epoch_is_counted_in_the_updates_that_there_are(asked, length):
    text, per_epoch = asked
    options = parse(TrainOptions, [Setting("epoch", (text,), LINE), Setting("warmup-epoch", ("0",), LINE)]).options
    (phase,) = phases_of(options)
    made = plan_of(phase, images=8 * per_epoch + 1, shape=BatchShape(micro_batch=8), updates_before=0)
    assert (made.updates, made.last_epoch) == length
    assert made.schedule.epochs == pytest.approx(made.updates / per_epoch)  # a cosine ends with the training


@given(some_epochs, some_updates, st.integers(1, 8), st.sampled_from(["none", "during", "after"]))
def test_validation_runs_at_its_frequency_and_at_the_end_never_within_an_epoch(epochs, updates, frequency, mode):
    made = plan(epochs=epochs, updates_per_epoch=updates, validation_mode=mode, validation_frequency=frequency)
    expected = {
        "none": set(),
        "after": {epochs},
        "during": {epoch for epoch in range(1, epochs + 1) if epoch % frequency == 0} | {epochs},
    }[mode]
    found = points(made.validates_at, epochs, updates)
    assert found == [[updates] if epoch in expected else [] for epoch in range(1, epochs + 1)]


@given(some_epochs, some_updates, st.floats(0.01, 10))
def test_the_last_update_is_always_saved_and_no_gap_is_longer_than_asked_for(epochs, updates, frequency):
    made = plan(epochs=epochs, updates_per_epoch=updates, epochs_per_save=frequency)
    saved = [update for update in range(1, made.updates + 1) if made.saves_at(update)]
    assert saved[-1] == made.updates
    longest = math.ceil(frequency * updates * (1 + 1e-12))
    assert all(b - a <= longest for a, b in zip([0, *saved], saved, strict=False))


@given(some_epochs, some_updates, st.integers(1, 8))
def test_a_fraction_of_an_epoch_saves_that_often_per_epoch_and_at_its_end(epochs, updates, parts):
    # 0.25 saves four times per epoch, as the option's help says, even if four does not divide the updates.
    saved = points(plan(epochs=epochs, updates_per_epoch=updates, epochs_per_save=1 / parts).saves_at, epochs, updates)
    assert [len(done) for done in saved] == [min(parts, updates)] * epochs
    assert all(done[-1] == updates for done in saved)


@given(some_epochs, some_updates, st.integers(1, 8))
def test_a_save_frequency_in_whole_epochs_saves_at_their_ends(epochs, updates, every):
    saved = points(
        plan(epochs=epochs, updates_per_epoch=updates, epochs_per_save=float(every)).saves_at, epochs, updates
    )
    expected = [epoch % every == 0 or epoch == epochs for epoch in range(1, epochs + 1)]
    assert saved == [[updates] if ends else [] for ends in expected]


@given(some_epochs, some_updates, st.integers(1, 8), st.integers(1, 30))
def test_saves_are_counted_from_the_first_epoch(epochs, updates, every, first):
    made = plan(epochs=epochs, updates_per_epoch=updates, epochs_per_save=float(every), first_saved=first)
    saved = [update for update in range(made.updates + 1) if made.saves_at(update)]
    assert saved == sorted({*range(first * updates, made.updates + 1, every * updates), made.updates})


SAVING = {  # epochs between saves, the first one: of 30 epochs
    (1, 0): "saves every epoch and at the end",
    (4, 1): "saves every 4 epochs from epoch 1 and at the end",
    (4, 31): "saves at the end",
}


@pytest.mark.parametrize(("how", "words"), SAVING.items())
def test_the_plan_describes_when_it_saves(how, words):
    assert plan(epochs=30, epochs_per_save=how[0], first_saved=how[1]).lines()[-1].endswith(f"; {words}")


def test_a_first_save_in_an_earlier_phase_does_not_delay_a_later_one():
    made = plan(epochs=3, updates_per_epoch=4, epochs_before=5, updates_before=35, first_saved=2)
    assert [update for update in range(35, 48) if made.saves_at(update)] == [39, 43, 47]


@given(epochs=st.integers(1, 3), updates=st.integers(1, 12), logs=st.integers(1, 5), in_a_row=st.integers(1, 20))
def test_the_host_returns_after_a_row_of_updates_and_wherever_something_is_due(epochs, updates, logs, in_a_row):
    made = plan(epochs=epochs, updates_per_epoch=updates, logs_per_epoch=logs, epochs_per_save=0.4, in_a_row=in_a_row)
    every = range(1, made.updates + 1)
    returns = [update for update in every if made.returns_at(update)]
    due = {update for update in every if made.logs_at(update) or made.saves_at(update) or made.validates_at(update)}
    assert due | {update for update in every if update % in_a_row == 0} == set(returns)
    assert returns[-1] == made.updates
    assert all(later - earlier <= in_a_row for earlier, later in zip([0, *returns], returns, strict=False))


def test_updates_in_a_row_are_in_the_plan():
    assert "4 updates in a row, fewer where something is due" in plan(in_a_row=4).lines()
    assert not any("in a row" in line for line in plan().lines())


def test_the_learning_rate_is_the_schedule():
    made = plan(epochs=2, updates_per_epoch=3)
    assert [made.lr(update) for update in range(6)] == [
        pytest.approx(0.05 * (1 + math.cos(math.pi * update / 6))) for update in range(6)
    ]


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_an_epoch_has_as_many_whole_updates_as_fit(images, batch):
    if images < batch:
        with pytest.raises(ConfigError, match=f"a global batch of {batch:,} is more than the {images:,} training"):
            updates_in_epoch(images, batch)
    else:
        updates = updates_in_epoch(images, batch)
        assert updates * batch <= images < (updates + 1) * batch


def test_a_global_batch_larger_than_the_data_names_the_options():
    with pytest.raises(ConfigError) as refused:
        updates_in_epoch(1437, 5000)
    assert str(refused.value) == (
        "--micro-batch-size: a global batch of 5,000 is more than the 1,437 training images;"
        " expected a smaller --micro-batch-size, --gradient-accumulation or --replicas"
    )


def test_the_plan_is_described_in_four_lines():
    made = plan(epochs=30, updates_per_epoch=44, images=1437, micro_batch=8, accumulation=2, replicas=2)
    assert made.lines() == [
        "global batch 32 = micro-batch 8 x accumulation 2 x replicas 2",
        "1,320 updates = 30 epochs x 44 updates; 1,437 images; each epoch skips a different 29",
        "learning rate cosine from 0.1 to 0 over 30 epochs",
        "validates every epoch; saves every epoch and at the end",
    ]


def test_one_of_a_kind_is_singular():
    made = plan(epochs=1, updates_per_epoch=1, images=1025, micro_batch=1024)
    assert made.lines()[:2] == [
        "global batch 1,024 = micro-batch 1024 x accumulation 1 x replicas 1",
        "1 update = 1 epoch x 1 update; 1,025 images; each epoch skips a different 1",
    ]


VALIDATION = {
    ("none", 1): "validates never;",
    ("after", 1): "validates at the end;",
    ("during", 1): "validates every epoch;",
    ("during", 5): "validates every 5 epochs;",
}


@pytest.mark.parametrize(("how", "words"), VALIDATION.items())
def test_the_plan_describes_when_it_validates(how, words):
    made = plan(validation_mode=how[0], validation_frequency=how[1], images=80)
    assert made.lines()[-1].startswith(words)
    assert "leaves out" not in made.lines()[1]


def test_a_later_phase_continues_the_counts_of_the_one_before():
    # 5 epochs of 7 updates are done; 2 epochs of 4 updates follow, at a rate from 0.1 to 0.
    made = plan(epochs=2, updates_per_epoch=4, epochs_before=5, updates_before=35, logs_per_epoch=2)
    assert (made.last_epoch, made.updates) == (7, 43)
    assert [made.place(update) for update in (35, 38, 39, 42, 43)] == [(5, 0), (5, 3), (6, 0), (6, 3), (7, 0)]
    assert [made.update_at(*made.place(update)) for update in range(35, 44)] == list(range(35, 44))
    assert [made.epoch_at(update) for update in (35, 36, 39, 43)] == [5.0, 5.25, 6.0, 7.0]
    assert [update for update in range(36, 44) if made.logs_at(update)] == [37, 39, 41, 43]
    for asks in (made.ends_epoch, made.validates_at, made.saves_at):
        assert [update for update in range(36, 44) if asks(update)] == [39, 43]
    halves = [0.5 * (1 + math.cos(math.pi * done / 8)) for done in range(8)]
    assert [made.lr(update) for update in range(35, 43)] == pytest.approx([0.1 * half for half in halves])
    assert made.lines()[1].startswith("8 updates = 2 epochs x 4 updates; 32 images")


BATCHES = {  # updates per epoch of the checkpoint's batch and of the plan's -> updates made, made in all of 5 epochs
    (10, 10): (30, 50),
    (20, 10): (60, 80),
    (5, 10): (15, 35),
}


@pytest.mark.parametrize(("before", "now"), BATCHES)
def test_a_run_that_continues_with_another_global_batch_counts_its_updates_on(before, now):
    fresh = plan(epochs=5, updates_per_epoch=now, frozen_epochs=4, patience=2)
    made, total = BATCHES[before, now]
    assert made == 3 * before
    continued = replace(fresh, updates_before=fresh.start_of(Position(epoch=3, images=0, update=made)))
    assert (continued.place(made), continued.updates) == ((3, 0), total)
    assert [continued.epoch_at(update) for update in (made, made + now, total)] == [3.0, 4.0, 5.0]
    assert [continued.lr(made + done) for done in range(2 * now)] == [
        fresh.lr(3 * now + done) for done in range(2 * now)
    ]
    assert continued.unfrozen_at == made + now
    length = f"{5 * now} updates = 5 epochs x {now} updates; "
    mixed = f"{total} updates in 5 epochs, the earlier ones with another global batch; now {now} updates per epoch; "
    stated = length if before == now else mixed
    assert continued.lines() == [line.replace(length, stated) for line in fresh.lines()]
    assert [continued.ends_early(made + now, best=best) for best in (2.0, 3.0)] == [True, False]
    assert fresh.start_of(Position(epoch=4, images=0, update=made + now)) == continued.updates_before
    assert continued.start_of(Position(epoch=4, images=0, update=made + now)) == continued.updates_before


def test_weights_that_stop_to_train_do_so_at_the_same_epoch_with_another_global_batch():
    fresh = plan(trained_epochs=2.5)
    continued = replace(fresh, updates_before=fresh.start_of(Position(epoch=1, images=0, update=20)))
    assert continued.epoch_at(continued.frozen_from) == 2.5


def test_a_checkpoint_within_an_epoch_continues_only_with_a_batch_that_divides_its_images():
    fresh = plan(updates_per_epoch=10)
    made = replace(fresh, updates_before=fresh.start_of(Position(epoch=1, images=40, update=30)))
    assert (made.place(30), made.updates) == ((1, 5), 45)
    with pytest.raises(ConfigError, match="12 images into an epoch, which a global batch of 8 does not divide"):
        plan().start_of(Position(epoch=1, images=12, update=30))
    with pytest.raises(
        ConfigError, match="24 images into an epoch of 32, of which a global batch of 24 makes no further"
    ):
        plan(updates_per_epoch=1, micro_batch=24, images=32).start_of(Position(epoch=1, images=24, update=30))


def test_a_run_whose_photos_became_fewer_continues_in_the_next_epoch():
    fewer = plan(updates_per_epoch=3, micro_batch=4, images=15)
    made = replace(fewer, updates_before=fewer.start_of(Position(epoch=1, images=16, update=9)))
    assert made.place(9) == (2, 1)


COUNTED = {  # updates asked for, micro-batch after 6 updates of 8 images -> updates at the end
    (12, 4): 12,
    (12, 8): 12,
    (12, 16): 12,
    (7, 16): 7,
    (6, 4): 6,
    (2, 16): 4,  # before those that were made: nothing is left
}


@pytest.mark.parametrize(("asked", "micro_batch"), COUNTED)
def test_a_length_in_updates_counts_those_of_another_global_batch(asked, micro_batch):
    (phase,) = phases_of(parse(TrainOptions, from_line(["--updates", f"{asked}"], options_of(TrainOptions))).options)
    planned = partial(plan_of, phase, images=32, shape=BatchShape(micro_batch=micro_batch))
    done = Position(epoch=1, images=16, update=6)
    made = planned(updates_before=planned(updates_before=0).start_of(done))
    assert made.updates == COUNTED[asked, micro_batch]
    assert made.place(6) == (1, 16 // micro_batch)
    assert made.schedule.epochs == pytest.approx(made.epoch_at(made.updates))  # a cosine ends with the training
    mixed = f"{made.updates} updates in {made.epoch_at(made.updates):g} "
    assert any(line.startswith(mixed) for line in made.lines()) == (micro_batch != 8)


def test_a_limit_in_updates_ends_within_an_epoch_with_log_validation_and_save():
    cut = plan(epochs=3, updates_per_epoch=10, limit=23)
    assert cut.updates == 23
    assert [update for update in range(1, 24) if cut.ends_epoch(update)] == [10, 20, 23]
    assert [update for update in range(1, 24) if cut.validates_at(update)] == [10, 20, 23]
    assert [update for update in range(1, 24) if cut.saves_at(update)] == [10, 20, 23]
    assert [update for update in range(1, 24) if cut.logs_at(update)] == [10, 20, 23]
    assert "23 updates = 2.3 epochs x 10 updates; 80 images" in cut.lines()


@given(some_epochs, some_updates)
def test_a_limit_of_whole_epochs_changes_nothing(epochs, updates_per_epoch):
    whole = plan(epochs=epochs, updates_per_epoch=updates_per_epoch)
    same = plan(epochs=epochs, updates_per_epoch=updates_per_epoch, limit=epochs * updates_per_epoch)
    assert same.lines() == whole.lines()
    for update in range(1, whole.updates + 1):
        assert same.validates_at(update) == whole.validates_at(update)
        assert same.logs_at(update) == whole.logs_at(update)
