"""The table of a run: one row per epoch, aligned, within 80 columns, with a mark at the best so far."""

import pytest

from falconet.report.epochs import ACCURACY, EpochTable, Metric, Row, in_short, span
from falconet.report.styles import Facts, Falconet, Point, RunLog, Validated
from falconet.report.throughput import Rate

SPANS = {0.04: "0.0s", 1.7: "1.7s", 59.94: "59.9s", 59.96: "1m00s", 125: "2m05s", 3599.4: "59m59s", 3599.6: "1h00m"}


@pytest.mark.parametrize(("seconds", "text"), [*SPANS.items(), (11_220, "3h07m"), (400_000, "4.6d")])
def test_a_time_is_shown_in_at_most_six_letters(seconds, text):
    assert span(seconds) == text


def test_an_epoch_is_shown_with_as_many_decimals_as_it_needs():
    assert [in_short(epoch) for epoch in (3.0, 2.5, 50 / 22, 100.0)] == ["3", "2.5", "2.27", "100"]


def facts(**changes):
    known = {"options": {}, "folder": None, "model": "", "parameters": 1, "global_batch": 8, "replicas": 1, "stages": 1}
    return Facts(**known, image_size=8, **({"epochs": 30} | changes))


def point(epoch, **changes):
    return Point(
        update=round(10 * epoch),
        updates=10,
        number=round(epoch),
        epoch=epoch,
        updates_per_epoch=10,
        epochs=30,
        global_batch=8,
        loss=0.75,
        smoothing_loss=0.0,
        accuracy=62.5,
        lr=0.01,
        scale=None,
        rate=Rate(images=80, seconds=0.1, waiting=0.0),
        seconds=1.0,
        **({"moment": 0.0, "ends_epoch": True, "validates": True} | changes),
    )


def validated(epoch, accuracy, **changes):
    update = round(10 * epoch)
    return Validated(
        name="x", update=update, epoch=epoch, accuracy=accuracy, loss=0.5, images=9, seconds=1.0, batch=8, **changes
    )


class Table:
    """A style, and its lines without the blank one and the header."""

    def __init__(self, **changes):
        self.lines, self.now = [], 0.0
        self.style = Falconet(RunLog(self.lines.append, None), clock=lambda: self.now)
        self.style.begin(facts(**changes))

    @property
    def rows(self):
        return [line.split() for line in self.lines[2:]]


def test_an_epoch_is_one_row_printed_after_its_validation():
    table = Table()
    table.now = 5.25
    table.style.end_epoch(point(1))
    assert table.rows == []
    table.now = 7.5
    table.style.validated(validated(1, 50.0, is_best=True))
    table.now = 9.0
    table.style.end_epoch(point(2, moment=8.0, validates=False))  # reported a second after its end
    assert table.lines == [
        "",
        "  epoch  train loss  train acc  val loss  val acc        lr  images/s    time",
        "   1/30      0.7500     62.50%    0.5000   50.00%      0.01       800    7.5s *",
        "   2/30      0.7500     62.50%         -        -      0.01       800    0.5s",
    ]


def test_log_points_within_an_epoch_have_rows_and_the_last_one_is_that_of_the_epoch():
    table = Table()
    for share in (0.5, 1.0):
        table.style.log(point(share, ends_epoch=share == 1.0))
    table.style.end_epoch(point(1))
    table.style.validated(validated(1, 50.0))
    table.style.log(point(1.27, ends_epoch=False))
    assert [row[0] for row in table.rows] == ["50%", "1/30", "27%"]


def test_rows_of_a_run_that_ends_within_an_epoch_have_its_length():
    table = Table(epochs=2.5)
    table.style.end_epoch(point(1, validates=False))
    table.style.end_epoch(point(2.5, validates=False))
    assert [row[0] for row in table.rows] == ["1/2.5", "2.5/2.5"]


def test_the_moving_average_has_a_column():
    table = Table(averages=True)
    table.style.end_epoch(point(1))
    table.style.validated(validated(1, 50.0, average=60.0))
    assert "val acc ema acc" in table.lines[1]
    assert table.rows[0][3:6] == ["0.5000", "50.00%", "60.00%"]


def test_a_run_without_validations_has_no_columns_for_them():
    table = Table(validates=False)
    table.style.end_epoch(point(1, validates=False))
    assert table.lines[1].split() == ["epoch", "train", "loss", "train", "acc", "lr", "images/s", "time"]
    assert table.rows[0][1:3] == ["0.7500", "62.50%"]


def test_a_validation_left_to_a_restored_run_is_a_row_in_each():
    stopped, restored = Table(), Table()
    stopped.style.end_epoch(point(3))
    stopped.style.stopped()
    stopped.style.stopped()
    restored.style.validated(validated(3, 50.0))
    assert [row[:5] for row in stopped.rows] == [["3/30", "0.7500", "62.50%", "-", "-"]]
    assert [row[:5] for row in restored.rows] == [["3/30", "-", "-", "0.5000", "50.00%"]]


def test_the_name_of_what_is_measured_is_in_the_header_and_in_lines():
    table = Table(metric=Metric("mean average precision", "mAP"))
    table.style.averaged(validated(1, 50.0), which="mean_2")
    assert "train mAP  val loss  val mAP" in table.lines[1]
    assert table.lines[2] == "mean average precision of the averaged checkpoints (mean_2): 50.00%"


@pytest.mark.parametrize("averages", [False, True])
def test_every_row_fits_into_80_columns_below_its_header(averages):
    table = EpochTable(epochs=300, metric=ACCURACY, validates=True, averages=averages)
    longest = Row(
        epoch=300,
        train_loss=999.99,
        train_score=100.0,
        lr=5.66e-07,
        images_per_second=123_456,
        seconds=3599,
        loss=1e9,
        score=100.0,
        average_score=100.0,
        is_best=True,
    )
    row, header = table.row(longest), table.header()
    assert len(row) <= 80
    assert len(row.removesuffix(" *")) == len(header)
    assert row.isascii()
    assert header.isascii()
