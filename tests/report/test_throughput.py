"""Images per second and the share of waiting, with a clock moved by hand."""

import pytest

from falconet.report.throughput import Laps, Rate, Stopwatch


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def test_a_rate_is_images_over_seconds():
    rate = Rate(images=300, seconds=4.0, waiting=1.0)
    assert rate.images_per_second == 75.0
    assert rate.waiting_percent == 25.0


def test_a_rate_over_no_time_is_finite():
    assert Rate(images=0, seconds=0.0, waiting=0.0).images_per_second == 0.0
    assert Rate(images=0, seconds=0.0, waiting=0.0).waiting_percent == 0.0


def test_each_lap_starts_at_the_last(clock):
    laps = Laps(Stopwatch(clock))
    clock.pass_by(2.0)
    assert laps.end(100) == Rate(100, 2.0, 0.0)
    clock.pass_by(0.5)
    assert laps.end(100) == Rate(100, 0.5, 0.0)


def test_time_before_the_first_lap_is_not_counted(clock):
    watch = Stopwatch(clock)
    clock.pass_by(60.0)
    laps = Laps(watch)
    clock.pass_by(1.0)
    assert laps.end(10).seconds == 1.0


def test_laps_of_several_lengths_share_a_watch(clock):
    watch = Stopwatch(clock)
    short, long = Laps(watch), Laps(watch)
    for _ in range(3):
        clock.pass_by(1.0)
        assert short.end(8) == Rate(8, 1.0, 0.0)
    assert long.end(24) == Rate(24, 3.0, 0.0)


def test_images_from_before_a_restore_do_not_count(clock):
    laps = Laps(Stopwatch(clock), already=24)
    clock.pass_by(1.0)
    assert laps.end(32) == Rate(8, 1.0, 0.0)
    clock.pass_by(4.0)
    assert laps.end(32) == Rate(32, 4.0, 0.0)


def test_pauses_are_not_training_time_even_after_an_error(clock):
    def fail_slowly():
        clock.pass_by(100.0)
        raise ValueError("broken")

    watch = Stopwatch(clock)
    laps = Laps(watch)
    clock.pass_by(1.0)
    with watch.standing():
        clock.pass_by(100.0)
    clock.pass_by(2.0)
    with pytest.raises(ValueError, match="broken"), watch.standing():
        fail_slowly()
    clock.pass_by(3.0)
    assert laps.end(6) == Rate(6, 6.0, 0.0)


def test_preparation_is_training_time_and_counted_apart(clock):
    watch = Stopwatch(clock)
    laps = Laps(watch)
    clock.pass_by(1.0)
    with watch.preparing():
        clock.pass_by(5.0)
    clock.pass_by(2.0)
    assert watch.preparation == 5.0
    assert laps.end(4) == Rate(4, 8.0, 0.0)


def test_waiting_is_the_time_until_an_update_arrives(clock):
    def slow_updates():
        for update in range(3):
            clock.pass_by(0.25)
            yield update
        clock.pass_by(9.0)  # finding out that there are no more is no waiting for data

    watch = Stopwatch(clock)
    laps = Laps(watch)
    seen = []
    for update in watch.waits(slow_updates()):
        seen.append(update)
        clock.pass_by(0.75)
        if update == 1:
            assert laps.end(16) == Rate(16, 2.0, 0.5)
    assert seen == [0, 1, 2]
    rate = laps.end(8)
    assert rate.waiting == 0.25
    assert rate.seconds == 10.0


def test_waiting_beside_a_device_at_work_is_not_counted(clock):
    class Device:
        """Each update takes it a second, from when it is launched or the one before is done."""

        def __init__(self):
            self.busy_until = 0.0

        def work(self):
            self.busy_until = max(self.busy_until, clock()) + 1.0

        def mark(self):
            return max(self.busy_until, clock())

        def reach(self, mark): ...

        def between(self, first, second):
            return second - first

    device = Device()
    watch = Stopwatch(clock, device)
    laps = Laps(watch)

    def updates():
        for seconds in (0.5, 0.4, 2.0):  # the first one finds an idle device, the second a busy one
            clock.pass_by(seconds)
            yield seconds

    for _ in watch.waits(updates()):
        device.work()
        watch.updated()
    rate = laps.end(3)
    assert rate.waiting == pytest.approx(0.5 + 0.0 + 0.4)  # the third arrived 0.4 s after the device had nothing to do


def test_a_lap_that_the_device_has_not_ended_yet_is_that_of_the_device(clock):
    class Device:
        """A second behind the host, until the host waits for it."""

        def mark(self):
            return clock() + 1.0 if clock() > 1000.0 else clock()

        def reach(self, mark):
            clock.now = max(clock.now, mark)

        def between(self, first, second):
            assert max(first, second) <= clock(), "the device has not been there"
            return second - first

    watch = Stopwatch(clock, Device())
    laps = Laps(watch)
    images = watch.waits(iter("abc"))
    next(images)
    clock.pass_by(2.0)
    end = watch.split()
    clock.pass_by(0.5)
    next(images)  # of the next lap
    assert laps.end(30, at=end()) == Rate(30, 3.0, 0.0)
    assert clock.now == 1003.0
    clock.pass_by(4.0)
    assert laps.end(10) == Rate(10, 4.0, 0.0)


def test_a_pause_after_a_lap_was_ended_does_not_change_it(clock):
    watch = Stopwatch(clock)
    laps = Laps(watch)
    clock.pass_by(1.0)
    with watch.standing():
        clock.pass_by(70.0)
    clock.pass_by(2.0)
    end = watch.split()
    clock.pass_by(0.25)
    with watch.standing():
        clock.pass_by(50.0)
    assert laps.end(12, at=end()) == Rate(12, 3.0, 0.0)
    assert laps.end(1) == Rate(1, 0.25, 0.0)


def test_an_update_starts_at_the_previous_one_or_after_a_pause(clock):
    watch = Stopwatch(clock)
    for seconds in (2.0, 1.0):
        clock.pass_by(seconds)
        watch.updated()
    with watch.standing():
        clock.pass_by(50.0)
    clock.pass_by(4.0)
    watch.updated()
    assert watch.update_seconds() == [2.0, 1.0, 4.0]
    assert watch.update_seconds() == []


def test_device_times_are_read_late_and_once(clock):
    class Marks:
        """A device whose marks are numbers and whose times are only known later."""

        marked, asked = 0, 0

        def mark(self):
            self.marked += 1
            return self.marked

        def between(self, first, second):
            self.asked += 1
            return 10.0 * (second - first)

    marks = Marks()
    watch = Stopwatch(clock, marks)
    for _ in range(3):
        watch.updated()
    assert (marks.marked, marks.asked) == (4, 0)
    assert watch.update_seconds() == [10.0, 10.0, 10.0]
    assert marks.asked == 3


def test_the_host_waits_for_a_device_that_is_four_updates_behind(clock):
    class Marks:
        def __init__(self):
            self.marked, self.reached = 0, []

        def mark(self):
            self.marked += 1
            return self.marked

        def reach(self, mark):
            self.reached.append(mark)

        def between(self, first, second):
            return 1.0

    marks = Marks()
    watch = Stopwatch(clock, marks)
    for _ in range(6):
        watch.updated()
    assert marks.reached == [2, 3]  # the ends of the first two updates: 1 is the start
    watch.update_seconds()  # the device has finished all of them
    for _ in range(4):
        watch.updated()
    assert marks.reached == [2, 3]


def test_what_the_device_still_computes_before_a_pause_is_training_time(clock):
    class Device:
        """Each update takes it a second, and the host launches it at once."""

        def __init__(self):
            self.busy_until = clock()

        def mark(self):
            return max(self.busy_until, clock())

        def reach(self, mark):
            clock.now = max(clock.now, mark)

        def between(self, first, second):
            return second - first

    device = Device()
    watch = Stopwatch(clock, device)
    epochs = Laps(watch)
    for _ in range(2):
        device.busy_until += 3.0
        end = watch.split()
        with watch.standing():  # the report is written before the host has waited for the epoch
            clock.pass_by(10.0)
            device.busy_until = clock()
        assert epochs.end(6, at=end()) == Rate(6, 3.0, 0.0)
