"""What is read of a run folder: all of a whole one, what there is of a damaged one, nothing outside of it."""

import fcntl
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falconet.errors import DataError
from falconet.report import foreign_folder
from falconet.report.pages import run_page
from falconet.report.run_files import read_run
from report_runs import write_run


def test_a_whole_run_is_read(tmp_path):
    run = read_run(write_run(tmp_path / "first", options=[("lr", "0.2", "command line")]))
    assert (run.name, run.state, run.problems) == ("first", "done", [])
    assert run.changed == {"lr": ("0.2", "command line")}
    assert run.series("train/loss") == [(1.0, 2.0), (2.0, 1.0), (3.0, 2 / 3)]
    assert run.series("validation/accuracy") == [(1.0, 40.0), (2.0, 70.0), (3.0, 80.0)]
    assert run.answers is not None
    assert run.answers.confusions() == [(0, 1, 1)]
    assert [each.name for each in run.checkpoints if each.is_best] == ["ckpt_3"]
    assert run.update_times == [10.0] * 10 + [11.0] * 10 + [12.0] * 10


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a run folder; expected one with config"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        read_run(tmp_path / "nowhere")


def test_a_torn_last_line_is_left_out_and_named(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"update": 40, "train/lo')
    run = read_run(folder)
    assert run.problems == ["run/metrics.jsonl: the last line is incomplete; left out"]
    assert run.moments[-1].update == 30


@pytest.mark.parametrize(
    "name", ["config.yaml", "plan.txt", "updates.jsonl", "summary.json", "report", "checkpoints", "metrics.jsonl"]
)
def test_what_is_missing_leaves_the_rest(tmp_path, name):
    folder = write_run(tmp_path / "run")
    (folder / name).rename(tmp_path / "away")
    run = read_run(folder)
    assert run.options or name == "config.yaml"
    assert run.moments or name == "metrics.jsonl"
    assert "<h1>" in run_page.page([run])


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.yaml", "{not: [yaml\n", "config.yaml: 1 line is not an option; left out"),
        ("config.yaml", "\x00\n-\n<html>\n", "config.yaml: 3 lines are not options; left out"),
        ("config.yaml", "", "config.yaml: has no options"),
        ("metrics.jsonl", "", "metrics.jsonl: has no log points"),
        ("metrics.jsonl", '{"epoch": 1}\n', "metrics.jsonl: has no log points"),
        ("summary.json", "", "summary.json: empty; left out"),
        ("summary.json", "{", "summary.json: not JSON; left out"),
        ("report/layers.json", "[]", "report/layers.json: not a JSON object; left out"),
        ("report/layers.json", "null", "report/layers.json: not a JSON object; left out"),
        ("report/layers.json", '{"layers": 3}', "report/layers.json: not in the format of a run; left out"),
        ("report/answers.json", '{"classes": 3}', "report/answers.json: not in the format of a run; left out"),
        ("report/batch.json", '{"pictures": 3}', "report/batch.json: not in the format of a run; left out"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, problem):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(content)
    run = read_run(folder)
    assert run.problems == [f"run/{problem}"]
    assert problem in run_page.page([run])


def test_a_run_that_has_just_begun_has_no_log_points_and_no_problem(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert read_run(folder).problems == []
    finally:
        os.close(handle)


def test_a_run_that_holds_its_folder_is_still_going(tmp_path):
    folder = write_run(tmp_path / "run")
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert read_run(folder).state == "going"
    finally:
        os.close(handle)
    assert read_run(folder).state == "done"


def test_a_run_with_updates_after_its_summary_was_stopped(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_text(json.dumps({"updates": 20}))
    assert read_run(folder).state == "stopped"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "plan.txt", "report/answers.json", "checkpoints/ckpt_1/manifest.json"]
)
def test_no_link_is_followed(tmp_path, name):
    folder = write_run(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text('{"update": 1, "train/loss": 12345.0, "secret": "12345"}\n')
    (folder / name).unlink()
    (folder / name).symlink_to(secret)
    page = run_page.page([read_run(folder)])
    assert "12345" not in page


def test_no_linked_folder_is_followed(tmp_path):
    folder, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", names=("secret", "b"))
    (folder / "report").rename(tmp_path / "away")
    (folder / "report").symlink_to(other / "report")
    (folder / "checkpoints").rename(tmp_path / "gone")
    (folder / "checkpoints").symlink_to(other / "checkpoints")
    run = read_run(folder)
    assert run.answers is None
    assert run.checkpoints == []


def test_a_pipe_does_not_block(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "plan.txt").unlink()
    os.mkfifo(folder / "plan.txt")
    run = read_run(folder)
    assert run.plan == []
    assert run.problems == ["run/plan.txt: cannot be read: plan.txt is not a file"]


def test_only_the_beginning_of_a_huge_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_folder, "MOST_BYTES", 400)
    run = read_run(write_run(tmp_path / "run"))
    assert "run/metrics.jsonl: only the first 0 MiB are shown" in run.problems
    assert run.moments[0].update == 10


def test_older_runs_take_what_validate_measured(tmp_path):
    folder = write_run(tmp_path / "run")
    answers = json.loads((folder / "report/answers.json").read_text())
    (folder / "report/answers.json").unlink()
    (folder / "validation.json").write_text(json.dumps({"models": [{"accuracy": 10.0}, {"accuracy": 97.0, **answers}]}))
    found = read_run(folder).answers
    assert found is not None
    assert [each.name for each in found.classes] == ["cat", "dog", "owl"]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
KEYS = ("per_class", "confusion", "calibration", "mistakes", "hits", "pictures", "layers", "models", "epoch", "update")
INNER = (
    "class",
    "images",
    "correct",
    "accuracy",
    "cells",
    "bins",
    "low",
    "high",
    "label",
    "picture",
    "kind",
    "data",
    "name",
)
OBJECT = st.dictionaries(st.sampled_from(INNER), JSON | st.just("png"), max_size=6)
CONTENT = st.dictionaries(st.sampled_from(KEYS), JSON | OBJECT | st.lists(OBJECT, max_size=3), max_size=8)


@given(CONTENT, CONTENT, CONTENT)
def test_any_json_is_read_and_shown(tmp_path_factory, records, summary, line):
    folder = tmp_path_factory.mktemp("hostile") / "run"
    write_run(folder)
    for name in ("answers", "batch", "layers", "environment"):
        (folder / f"report/{name}.json").write_text(json.dumps(records))
    (folder / "summary.json").write_text(json.dumps(summary | {"peak_memory_bytes": records.get("epoch")}))
    (folder / "checkpoints/ckpt_1/manifest.json").write_text(json.dumps({"progress": summary, "files": line}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"update": 50, "train/loss": line.get("epoch"), **line}) + "\n")
    run_page.page([read_run(folder)]).encode()
