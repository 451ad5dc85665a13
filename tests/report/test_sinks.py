"""metrics.jsonl is strict JSON lines and only grows."""

import contextlib
import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falconet.report.sinks import JsonLines, Several, UpdateTimes
from falconet.report.styles import RunLog


def strictly(line):
    """Standard JSON, without Python's NaN and Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def written(path):
    return [strictly(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_restored_run_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for update in (1, 2):
        sink = JsonLines(path)
        sink.write(update, {"train/loss": 0.5 / update})
        sink.close()
    assert written(path) == [{"update": 1, "train/loss": 0.5}, {"update": 2, "train/loss": 0.25}]


def test_a_half_written_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1, "a": 1.0}\n{"update": 2, "a"')
    sink = JsonLines(path)
    sink.write(2, {"a": 2.0})
    sink.close()
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1, 2]


def test_lines_are_flushed_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for update in range(3):
        sink.write(update, {"a/b": 1.0})
        assert len(written(path)) == update + 1
    sink.close()


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "update")


@given(metrics=st.dictionaries(names, st.floats() | st.integers(), max_size=5), update=st.integers(0, 10**12))
def test_every_line_is_json_with_null_for_nan(tmp_path_factory, metrics, update):
    path = tmp_path_factory.mktemp("sink") / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write(update, metrics)
    sink.close()
    content = path.read_text(encoding="utf-8")
    assert content.count("\n") == 1
    no_number = (float("inf"), -float("inf"))
    expected = {name: None if value != value or value in no_number else value for name, value in metrics.items()}
    assert strictly(content) == {"update": update, **expected}


def test_several_sinks_get_every_metric_and_are_closed(tmp_path):
    paths = [tmp_path / name for name in ("a", "b")]
    sinks = [JsonLines(path) for path in paths]
    both = Several(sinks)
    both.write(3, {"x": 1.0})
    both.close()
    assert [written(path) for path in paths] == [[{"update": 3, "x": 1.0}]] * 2
    for sink in sinks:
        with pytest.raises(ValueError, match="closed file"):
            sink.write(4, {})


def test_update_times_are_in_milliseconds_and_half_lines_are_dropped(tmp_path):
    path = tmp_path / "updates.jsonl"
    path.write_text('{"update": 1, "milliseconds": [9.0]}\n{"update": 2, "mil')
    sink = UpdateTimes(path)
    sink.write(3, [0.25, 0.0123456])
    sink.close()
    assert written(path) == [{"update": 1, "milliseconds": [9.0]}, {"update": 3, "milliseconds": [250.0, 12.346]}]


def test_all_sinks_are_closed_even_if_one_raises(tmp_path):
    class Broken:
        def close(self):
            raise OSError("full")

    first, last = JsonLines(tmp_path / "first"), JsonLines(tmp_path / "last")
    with pytest.raises(OSError, match="full"):
        Several([first, Broken(), last]).close()
    for sink in (first, last):
        with pytest.raises(ValueError, match="closed file"):
            sink.write(1, {})


@pytest.fixture
def little_room(file_limit):
    """Files may have 4,000 bytes, until it is called."""
    file_limit(4000)
    return lambda: file_limit(None)


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(tmp_path, little_room):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for update in range(200):
        sink.write(update, {"train/loss": 0.5})
    assert (tmp_path / "metrics.jsonl").stat().st_size == 4000
    little_room()
    sink.write(200, {"train/loss": 0.5})
    sink.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(201))


def test_metrics_that_were_never_written_are_an_error_at_the_end(tmp_path, little_room):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for update in range(200):
        sink.write(update, {"train/loss": 0.5})
    with pytest.raises(OSError, match="File too large"):
        sink.close()
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_a_full_disk_does_not_replace_the_error_that_ends_a_run(tmp_path, little_room):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for update in range(200):
        sink.write(update, {"train/loss": 0.5})
    with pytest.raises(KeyboardInterrupt), contextlib.closing(sink):
        raise KeyboardInterrupt


def test_rows_and_lines_of_the_originals_wait_for_room_too(tmp_path, little_room):
    log = RunLog(lambda _: None, tmp_path)
    for update in range(400):
        log.row("training.csv", {"iteration": update, "loss": 0.5}, update=update)
        log.kept_line(f"update {update}")
    log.row_again("training.csv", {"iteration": 399, "loss": 0.25}, update=399)
    little_room()
    log.row("training.csv", {"iteration": 400, "loss": 0.5}, update=400)
    log.kept_line("the end")
    with (tmp_path / "training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["iteration"]) for row in rows] == list(range(401))
    assert rows[399]["loss"] == "0.25"
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 401
