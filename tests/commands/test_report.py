"""`falconet report`, and the report that every run leaves: what it shows, and when it cannot be written."""

import base64
import csv
import errno
import io
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import runs
from falconet import writing
from falconet.report.results import results_of
from falconet.report.run_files import read_run
from falconet.train import record
from report_runs import write_run
from tiny import TINY

RECORDS = ("answers.json", "batch.json", "environment.json", "layers.json", "memory.jsonl")
PHOTOS = (
    "--model resnet10 --pretrained none --config photos --image-size 32 --epoch 2 --micro-batch-size 8 --device cpu"
)


def untimed(folder):
    """Every metric that does not measure time."""
    names = ("images_per_second", "waiting_percent", "seconds")
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith(names)} for line in lines]


def pixels(picture):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["data"]))).convert("RGB"))


def test_a_run_leaves_a_report_and_its_results(falconet):
    answer = falconet("train --epoch 2 --run-dir r")
    assert answer.code == 0, answer.err
    assert "\nreport               r/report.html\n" in answer.out
    assert "⠀" not in answer.out  # plots are for terminals
    assert sorted(path.name for path in Path("r/report").iterdir()) == sorted(RECORDS)
    html = Path("r/report.html").read_text()
    assert "finished" in html
    rows = list(csv.DictReader(Path("r/results.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    run = read_run(Path("r"))
    assert run.problems == []
    assert float(rows[1]["validation_accuracy"]) == run.series("validation/accuracy")[1][1]


def test_a_run_on_synthetic_data_leaves_a_report_without_pictures(falconet):
    answer = falconet("train --data synthetic --iterations 4 --micro-batch-size 8 --epoch 2 --profile --run-dir r")
    assert answer.code == 0, answer.err
    assert "\nreport               r/report.html\n" in answer.out
    assert sorted(path.name for path in Path("r/report").iterdir()) == [
        "environment.json",
        "layers.json",
        "memory.jsonl",
    ]
    html = Path("r/report.html").read_text()
    assert "<img" not in html
    assert all(f"<h2>{title}</h2>" in html for title in ("Curves", "Layers", "Profile", "Environment"))
    assert read_run(Path("r")).problems == []


def test_the_end_and_the_report_name_both_times(falconet):
    out = falconet("train --epoch 1 --run-dir r").out
    whole, trained = re.search(r"^time +(\S+) in all, training time (\S+)$", out, re.M).groups()
    found = results_of(read_run(Path("r")))
    assert (found["total time"], found["training time"]) == (whole, trained)


def test_several_runs_leave_their_results_beside_the_page(falconet, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, epochs=2)
    answer = falconet("report a b --output compared/page.html --save-plots")
    assert (answer.code, answer.err.count("\n")) == (2, 1)  # the folder is not there
    Path("compared").mkdir()
    Path("compared/results.csv").write_text("of another program")
    answer = falconet("report a b --output compared/page.html --save-plots")
    assert answer.out.startswith("written to compared/page.html and compared/page.csv\n")
    rows = list(csv.DictReader(Path("compared/page.csv").read_text().splitlines()))
    assert [row["run"] for row in rows] == ["a", "a", "b", "b"]
    assert Path("compared/results.csv").read_text() == "of another program"
    own = falconet("report a b --output a/page.html")
    assert own.out == "written to a/page.html\n"
    assert not [*Path("a").glob("*.csv")], "it would seem to be that of the run there"
    assert falconet("report a b --output page.csv").out == "written to page.csv\n"
    assert Path("page.csv").read_text().startswith("<!doctype html>")


def test_the_recorded_answers_are_those_of_validate(falconet):
    assert falconet("train --epoch 2 --run-dir r").code == 0
    assert falconet("validate r --device cpu --predictions p.csv").code == 0
    (model,) = json.loads(Path("r/validation.json").read_text())["models"]
    found = json.loads(Path("r/report/answers.json").read_text())
    for name in ("checkpoint", "images", "accuracy", "per_class", "confusion", "calibration"):
        assert found[name] == model[name], name
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    wrong = sorted((float(row["probability"]) for row in rows if row["label"] != row["predicted"]), reverse=True)
    assert [each["probability"] for each in found["mistakes"]] == pytest.approx(wrong[: record.EXAMPLES], abs=2e-6)
    right = sorted(float(row["probability"]) for row in rows if row["label"] == row["predicted"])
    assert [each["probability"] for each in found["hits"]] == pytest.approx(right[: record.EXAMPLES], abs=2e-6)
    first = rows[int(found["mistakes"][0]["path"].split()[-1])]
    assert (first["label"], first["predicted"]) == (found["mistakes"][0]["label"], found["mistakes"][0]["predicted"])


def test_pictures_are_the_photos_that_the_paths_name(falconet, image_folder):
    assert falconet(f"train photos {PHOTOS} --run-dir r").code == 0
    found = json.loads(Path("r/report/answers.json").read_text())
    examples = [*found["mistakes"], *found["hits"]]
    assert {each["path"] for each in examples} == {str(path) for path in Path("photos/val").rglob("*.png")}
    for each in examples:
        with Image.open(each["path"]) as stored:
            level = np.asarray(stored).mean()
        assert abs(pixels(each["picture"]).mean() - level) < 6
    seen = json.loads(Path("r/report/batch.json").read_text())["pictures"]
    assert len(seen) == 8
    for each in seen:  # cropped and mirrored, still dark or light
        assert (pixels(each).mean() < 125) == (each["label"] == "dark")


def test_a_report_changes_no_number_of_a_run(falconet):
    line = f"train {TINY} --ema-half-life 1 --mixup-alpha 0.2"
    assert falconet(f"{line} --run-dir with").code == 0
    assert falconet(f"{line} --no-report --run-dir without").code == 0
    assert untimed("with") == untimed("without")
    first, second = (runs.state(Path(name, "checkpoints")) for name in ("with", "without"))
    assert all((first[name] == second[name]).all() for name in first)
    assert not Path("without/report.html").exists()
    assert not Path("without/report").exists()


def test_an_interrupted_run_leaves_a_report_that_says_so(falconet, monkeypatch):
    runs.stop_at(monkeypatch, 6)
    assert falconet(f"train {TINY} --run-dir r").code == 130
    html = Path("r/report.html").read_text()
    assert "stopped before its end" in html
    assert read_run(Path("r")).seen is not None
    monkeypatch.undo()


def test_a_restored_run_continues_its_records(falconet, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        runs.stop_at(patch, 6)
        patch.chdir(tmp_path)
        assert falconet(f"train {TINY} --run-dir r").code == 130
    seen = Path("r/report/batch.json").read_text()
    assert falconet("restore r --device cpu").code == 0
    assert Path("r/report/batch.json").read_text() == seen
    run = read_run(Path("r"))
    assert run.state == "done"
    assert [each.update for each in run.memory] == [4, 8]


def test_a_run_that_continues_elsewhere_takes_its_records_along(falconet):
    assert falconet(f"train {TINY} --epoch 3 --checkpoints-kept all --run-dir r").code == 0
    first, second, _ = sorted(Path("r/checkpoints").iterdir())
    known = json.loads(Path("r/report/answers.json").read_text())
    known["update"] = 8
    Path("r/report/answers.json").write_text(json.dumps(known))
    for checkpoint, name, kept in ((first, "early", [4]), (second, "late", [4, 8])):
        answer = falconet(f"restore {checkpoint} --run-dir {name} --epoch 3 --no-report")
        assert answer.code == 0, answer.err
        assert Path(name, "report/batch.json").read_text() == Path("r/report/batch.json").read_text()
        assert Path(name, "report/answers.json").exists() == (max(kept) >= 8)  # not those of a later update


def test_a_full_disk_costs_one_line_and_no_update(falconet, monkeypatch):
    plain = writing.replace

    def full(folder, name, content):
        if name.startswith(("report", "results")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / name))
        plain(folder, name, content)

    monkeypatch.setattr(writing, "replace", full)
    answer = falconet(f"train {TINY} --run-dir r")
    assert answer.code == 0, answer.err
    notes = [line for line in answer.out.splitlines() if "report" in line]
    assert set(notes) == {"note: the report cannot be written: No space left on device; training is not affected"}
    assert len(notes) <= 2  # of the facts before the first update, and of the page
    assert json.loads(Path("r/summary.json").read_text())["updates"] == 8


def test_a_link_in_the_place_of_a_report_is_refused_before_training(falconet):
    Path("r").mkdir()
    Path("r/report.html").symlink_to("elsewhere")
    answer = falconet(f"train {TINY} --run-dir r")
    assert answer.code == 2
    assert "r/report.html: is a symbolic link" in answer.err
    assert not Path("elsewhere").exists()


def test_a_temporary_run_leaves_nothing_and_names_no_report(falconet):
    answer = falconet(f"train {TINY} --temporary")
    assert answer.code == 0, answer.err
    assert "report  " not in answer.out


def test_the_originals_print_what_they_printed_and_have_a_report_too(falconet):
    answers = [
        falconet(f"train {TINY} {extra} --run-dir r{number}", "pytorch")
        for number, extra in ((0, ""), (1, "--no-report"))
    ]
    assert [answer.code for answer in answers] == [0, 0]
    assert "report" not in answers[0].out
    heads = [[line.split(":")[0].split("=")[0] for line in answer.out.splitlines()] for answer in answers]
    assert len(heads[0]) == len(heads[1])
    assert Path("r0/report.html").exists()


def test_plots_are_saved_on_request(falconet):
    answer = falconet(f"train {TINY} --save-plots --run-dir r")
    assert answer.code == 0
    assert "\nplots                r/plots\n" in answer.out
    assert {"loss.png", "loss.pdf", "confusion.png", "calibration.pdf"} <= {p.name for p in Path("r/plots").iterdir()}
    answer = falconet(f"train {TINY} --save-plots --no-report --run-dir none")
    assert "--save-plots" in answer.out  # noted: it has no effect
    assert "\nplots  " not in answer.out
    assert not Path("none/plots").exists()


def test_plots_without_matplotlib_are_refused_at_once(falconet, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = falconet(f"train {TINY} --save-plots --run-dir r")
    assert answer.code == 2
    assert "--save-plots: needs matplotlib, which is not installed: pip install 'falconet[plots]'" in answer.err
    assert not Path("r").exists()


DIVIDED = {"replicas": "--replicas 2", "stages": "--pipeline-splits layer2/0 --gradient-accumulation 2"}


@pytest.mark.dist
@pytest.mark.usefixtures("two_cores", "forked_workers")
@pytest.mark.parametrize("division", DIVIDED)
def test_several_processes_record_every_image_once(falconet, division):
    answer = falconet(f"train {TINY} {DIVIDED[division]} --validation-images 21 --run-dir r")
    assert answer.code == 0, answer.err
    found = json.loads(Path("r/report/answers.json").read_text())
    assert sum(each["images"] for each in found["per_class"]) == found["images"] == 21
    numbers = [int(each["path"].split()[-1]) for each in (*found["mistakes"], *found["hits"])]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(range(21))
    right = sum(each["correct"] for each in found["per_class"])
    assert 100 * right / 21 == pytest.approx(found["accuracy"])
    assert Path("r/report.html").exists()


# The command.


def test_the_report_of_one_run_goes_into_its_folder(falconet, tmp_path):
    write_run(tmp_path / "run")
    answer = falconet("report run")
    assert answer.code == 0, answer.err
    assert answer.out == "written to run/report.html and run/results.csv\n"
    assert "<h1>run" in Path("run/report.html").read_text()


def test_several_runs_share_a_page_and_what_is_none_is_named(falconet, tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    Path("empty").mkdir()
    with Path("b/metrics.jsonl").open("a") as file:
        file.write('{"upd')
    too_long = "x" * 300
    answer = falconet(f"report a empty b nowhere {too_long} --output page.html --save-plots")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines() == [
        "left out: empty: not a run folder; expected one with config.yaml and metrics.jsonl",
        "left out: nowhere: no such folder; expected a run folder",
        f"left out: {too_long}: File name too long; expected a run folder that you may read",
        "note: b/metrics.jsonl: the last line is incomplete; left out",
        "written to page.html and page.csv",
        "18 plots written to plots",
    ]
    assert "2 runs compared" in Path("page.html").read_text()
    assert not Path("a/report.html").exists()


def test_runs_of_one_name_are_told_apart_by_their_folders(falconet, tmp_path):
    for place in ("monday/run", "tuesday/run", "tuesday/other"):
        write_run(tmp_path / place)
    assert falconet("report monday/run tuesday/run tuesday/other tuesday/run --output page.html").code == 0
    html = Path("page.html").read_text()
    assert '<p class="about">monday/run, tuesday/run, other</p>' in html
    assert "monday/run: training" in html
    with Path("page.csv").open(newline="") as file:
        assert {row["run"] for row in csv.DictReader(file)} == {"monday/run", "tuesday/run", "other"}


def test_runs_whose_folders_have_no_utf_8_names_are_compared(falconet, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    for folder in (name, "bär"):
        write_run(tmp_path / folder)
    answer = falconet(f"report {name} bär --output page.html")
    assert (answer.code, answer.out) == (0, "written to page.html and page.csv\n")
    with Path("page.csv").open(newline="", encoding="utf-8") as file:
        assert {row["run"] for row in csv.DictReader(file)} == {r"caf\udce9", "bär"}
    assert r"caf\udce9" in Path("page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "report": "expected one or more run folders, as in `falconet report runs/my-run`",
        "report nowhere": "nowhere: no such folder; expected a run folder",
        "report empty": "empty: not a run folder; expected one with config.yaml and metrics.jsonl",
        "report .": ".: not a run folder; expected one with config.yaml and metrics.jsonl, such as run",
        "report run/config.yaml": "run/config.yaml: a file; expected a run folder",
        "report empty empty": "none of these is a run folder; expected those that `falconet train` makes",
        "report run --output nowhere/page.html": "--output: cannot write nowhere/page.html: No such file or directory",
    }.items(),
)
def test_a_mistake_takes_one_line(falconet, tmp_path, line, message):
    write_run(tmp_path / "run")
    Path("empty").mkdir()
    answer = falconet(line)
    assert answer.code == 2
    assert answer.err == f"falconet report: {message}\n"


def test_a_linked_report_is_not_written_through(falconet, tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "report.html").symlink_to(tmp_path / "victim")
    answer = falconet("report run")
    assert answer.code == 2
    assert "is a symbolic link" in answer.err
    assert not (tmp_path / "victim").exists()
