"""The page of a run: its numbers, what differs between runs, and that whatever a run states is text."""

import csv
import json
import random
import re

import pytest

from falconet.config.commands import TrainOptions
from falconet.config.fields import options_of
from falconet.report.curves import MOST_POINTS, charts_of, csv_lines, epoch_rows, thinned
from falconet.report.pages import mistakes, run_page
from falconet.report.pages.run_page import page
from falconet.report.results import MIXED, OUTPUTS, differences, is_mixed, results_of
from falconet.report.run_files import read_run
from report_runs import answers, lines, metrics, several_labels, write_run

ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e"


def island(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def test_the_headline_has_the_best_accuracy_and_the_speed(tmp_path):
    found = results_of(read_run(write_run(tmp_path / "run")))
    assert found["best accuracy"] == "80.00 %"
    assert found["reached after"] == "epoch 3"
    assert found["images per second"] == "990"
    assert found["training time"] == "12.3s"
    assert found["peak memory"] == "1.00 GiB"
    assert found["calibration error"] == "4.50 %"


def test_of_equally_accurate_epochs_the_headline_has_that_of_the_lowest_loss(tmp_path):
    """As the best checkpoint is chosen; the loss falls in every epoch."""
    folder = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    equal = [row | ({"validation/accuracy": 90.0} if "validation/accuracy" in row else {}) for row in rows]
    (folder / "metrics.jsonl").write_text(lines(equal))
    assert results_of(read_run(folder))["reached after"] == "epoch 3"


def test_a_page_shows_every_section(tmp_path):
    html = page([read_run(write_run(tmp_path / "run", options=[("lr", "0.2", "command line")]))])
    for words in (
        *("Where it is wrong", "What the network saw", "Layers", "Checkpoints", "Plan and options", "Environment"),
        *("Most confident mistakes", "Least confident hits", "Confusion matrix", "Calibration", "command line"),
        *("cat 70 % + dog 30 %", "val/cat/1.jpg", "16 x 8 x 8", "model resnet8-cifar", "Leon Sorokin"),
    ):
        assert words in html, words
    keys = [chart["key"] for chart in island(html)["charts"]]
    assert keys == ["loss", "accuracy", "lr", "throughput", "memory"]


def test_curves_are_on_one_axis_of_epochs(tmp_path):
    chart = island(page([read_run(write_run(tmp_path / "run", points=2))]))["charts"][0]
    epochs, training, validation = chart["data"]
    assert epochs == [0.5, 1, 1.5, 2, 2.5, 3]
    assert training == [4, 2, 1.33333, 1, 0.8, 0.666667]
    assert validation == [None, 1, None, 0.5, None, 0.333333]


def test_the_page_fetches_nothing_and_runs_only_its_own_scripts(tmp_path):
    html = page([read_run(write_run(tmp_path / "run"))])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == 2
    assert not re.search(r'(src|href)="(?!data:image/|#)', html)
    assert not re.search(r"@import|url\(", html)


def test_what_a_run_states_is_text(tmp_path):
    folder = write_run(tmp_path / "run", names=(ATTACK, f"{ATTACK}2"), options=[("lr", ATTACK, ATTACK)])
    (folder / "plan.txt").write_text(ATTACK)
    (folder / "report/environment.json").write_text(json.dumps({ATTACK: ATTACK}))
    (folder / "report/layers.json").write_text(json.dumps({"layers": [{"name": ATTACK, "kind": ATTACK}]}))
    (folder / "report/batch.json").write_text(
        json.dumps(
            {"pictures": [{"label": ATTACK, "kind": "png", "data": '"><script>'}, {"label": "x", "kind": "svg+xml"}]}
        )
    )
    html = page([read_run(folder), read_run(folder)])
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert "\u202e" not in html
    assert len(re.findall(r"<script", html)) == 3  # the data and two of ours


def test_a_name_of_any_bytes_can_be_written(tmp_path):
    folder = write_run(tmp_path / "run", names=("caf\udce9", "b"))
    run_page.write_own(folder)
    assert "caf\\udce9" in (folder / "report.html").read_text()


def test_the_options_that_differ_come_first(tmp_path):
    first = read_run(write_run(tmp_path / "first", options=[("lr", "0.2", "command line")]))
    second = read_run(write_run(tmp_path / "second", options=[("ema-half-life", "1", "command line")]))
    assert differences([first, second]) == {"lr": ["0.2", "0.1"], "ema-half-life": ["-", "1"]}
    html = page([first, second])
    assert html.index("What differs") < html.index("Curves</h2>")
    assert "--ema-half-life" in html
    assert MIXED not in html
    labels = [curve["label"] for curve in island(html)["charts"][0]["curves"]]
    assert labels == ["first: training", "first: validation", "second: training", "second: validation"]


def test_an_option_that_an_older_run_does_not_know_is_no_difference_at_its_default(tmp_path):
    first = read_run(write_run(tmp_path / "first", options=[("report", "true", "default")]))
    assert differences([first, read_run(write_run(tmp_path / "second"))]) == {}


def test_options_that_only_say_what_is_written_are_folded_away(tmp_path):
    wandb, plots = ("wandb", "true", "command line"), ("save-plots", "true", "command line")
    first = read_run(write_run(tmp_path / "first", options=[wandb, ("lr", "0.2", "command line")]))
    second = read_run(write_run(tmp_path / "second", options=[plots]))
    html = page([first, second])
    folded = html.index("<summary>Also different, without an effect on the result: --wandb, --save-plots</summary>")
    assert html.index("--lr") < folded < html.index("Other options") < html.index("<h3>Results</h3>")
    assert "--wandb" not in html[:folded]
    alike = page([first, read_run(write_run(tmp_path / "third", options=[("lr", "0.2", "command line")]))])
    assert "All options that change the result are the same." in alike


def test_every_option_that_is_folded_away_exists():
    assert {*options_of(TrainOptions)} >= OUTPUTS


IMAGES = {  # of two runs: the kind, the folder and the validated images
    "the same": (("digits", None, 10), ("digits", None, 10), False),
    "others": (("digits", None, None), ("cifar10", None, None), True),
    "a published dataset, in two places": (("cifar10", "/a", 10), ("cifar10", "/b", 10), False),
    "a published dataset, in its own place": (("cifar10", "/a", 10), ("cifar10", None, 10), False),
    "one folder": (("folder", "photos/", 10), ("folder", "photos", 10), False),
    "one folder, by way of another": (("folder", "/a/b/../photos", 10), ("folder", "/a/photos", 10), False),
    "from the root": (("folder", "photos", 10), ("folder", "/a/photos", 10), False),
    "from a folder beside it": (("folder", "../photos", 10), ("folder", "/a/photos", 10), False),
    "from two folders": (("folder", "../photos", 10), ("folder", "photos", 10), False),
    "from inside": (("folder", ".", 10), ("folder", "/a/photos", 10), False),
    "from inside and above": (("folder", "photos", 10), ("folder", "../../a/photos", 10), False),
    "two folders": (("folder", "a/photos", 10), ("folder", "/b/photos", 10), True),
    "two folders from the root": (("folder", "/photos", 10), ("folder", "/a/photos", 10), True),
    "two folders below others": (("folder", "../a/photos", 10), ("folder", "b/photos", 10), True),
    "one that is too long": (("folder", "a/photos", 10), ("folder", "/photos", 10), True),
    "nearly": (("folder", "tos", 10), ("folder", "/a/photos", 10), True),
    "two folders of one name": (("folder", "photos", 10), ("folder", "/a/photos", 11), True),
    "one folder that grew": (("folder", "/a/photos", 10), ("folder", "/a/photos", 11), True),
    "not validated yet": (("folder", "photos", 10), ("folder", "/a/photos", None), False),
}


@pytest.mark.parametrize("named", IMAGES)
def test_runs_of_different_images_are_noted(tmp_path, named):
    *stated, is_noted = IMAGES[named]
    runs = []
    for place, (kind, data, count) in enumerate(stated):
        options = [("data", kind, "command line"), *([("data-dir", data, "command line")] if data else [])]
        folder = write_run(tmp_path / str(place), options=options)
        if count is not None:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(lines([{"update": 60, "epoch": 3.0, "validation/images": count}]))
        runs.append(read_run(folder))
    assert is_mixed(runs) == is_noted
    assert (MIXED in page(runs)) == is_noted


def test_runs_of_different_classes_have_different_images(tmp_path):
    runs = [write_run(tmp_path / "first"), write_run(tmp_path / "second", names=("a", "b"))]
    assert "The runs have different images: their accuracies cannot be compared." in page([*map(read_run, runs)])


def test_equal_best_values_are_all_named(tmp_path):
    folder = write_run(tmp_path / "run", epochs=6)
    scores = [90.0, 80.0, 90.0, 70.0, 60.0, 60.0]
    found = [{"update": 10 * each, "epoch": each, "train/loss": 1.0} for each in range(1, 7)]
    found += [
        {"update": 10 * at, "validation/accuracy": score, "validation/loss": 1 / at}
        for at, score in enumerate(scores, 1)
    ]
    (folder / "metrics.jsonl").write_text(lines(found))
    run = read_run(folder)
    assert results_of(run)["reached after"] == "epoch 3"  # of the two, that of the lower loss
    loss, accuracy, *_ = charts_of([run])
    assert "highest 90 after epochs 1 and 3." in accuracy.summary
    assert "lowest 1 after epoch 1 and 5 later ones." in loss.summary


def test_the_time_in_all_is_told_from_that_of_training(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_text(json.dumps({"updates": 30, "training_seconds": 14.5, "whole_seconds": 21.7}))
    found = results_of(read_run(folder))
    assert (found["training time"], found["total time"]) == ("14.5s", "21.7s")


def test_a_thousand_classes_and_a_long_run_stay_small(tmp_path):
    folder, draw = write_run(tmp_path / "run"), random.Random(0)
    names = [f"n{number:08d} a class with a rather long name" for number in range(1000)]
    content = answers(names, images=50)
    wrong = [[draw.randrange(1000), draw.randrange(1000), draw.randrange(1, 9)] for _ in range(80_000)]
    content["confusion"]["cells"] = [*([label, label, 38] for label in range(1000)), *wrong]
    (folder / "report/answers.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text(lines(metrics(90, points=500)))
    html = page([read_run(folder)])
    assert len(html.encode()) < 3_000_000
    matrix = island(html)["matrices"]["r0-matrix"]
    assert len(matrix["names"]) == 1000
    assert len(matrix["cells"]) == 3 * mistakes.MOST_CELLS


def test_thinning_keeps_the_ends_and_the_extremes():
    points = [(float(x), float(x % 7)) for x in range(10_000)]
    points[5000] = (5000.0, 99.0)
    points[7001] = (7001.0, -99.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert {points[0], points[-1], points[5000], points[7001]} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]


def test_results_have_a_row_per_epoch(tmp_path):
    run = read_run(write_run(tmp_path / "run", points=2))
    rows = epoch_rows(run)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[0]["train_loss"] == pytest.approx((4 + 2) / 2)  # of both log points
    assert rows[0]["lr"] == 0.1  # at the end of the epoch
    header, first, *_ = csv_lines(run)
    assert header.split(",")[:4] == ["epoch", "update", "train_loss", "train_accuracy"]
    assert first.split(",")[:3] == ["1", "10", "3"]


def test_results_of_several_runs_name_the_run_of_each_row(tmp_path):
    runs = [read_run(write_run(tmp_path / name, epochs=2)) for name in ("first", 'a, "b"')]
    rows = list(csv.DictReader(csv_lines(*runs)))
    assert [(row["run"], row["epoch"]) for row in rows] == [
        ("first", "1"),
        ("first", "2"),
        ('a, "b"', "1"),
        ('a, "b"', "2"),
    ]
    assert rows[3]["validation_accuracy"] == "70"


def test_a_chart_is_described_in_words(tmp_path):
    loss = charts_of([read_run(write_run(tmp_path / "run"))])[0]
    assert loss.summary.startswith("training: 2 after epoch 1, 0.6667 after epoch 3, lowest 0.6667 after epoch 3.")
    assert loss.can_be_log


def test_photos_with_several_labels_are_counted_once_and_training_is_not_said_to_have_their_precision(tmp_path):
    folder = several_labels(tmp_path / "run")
    run = read_run(folder)
    assert "of 25 images." in page([run])
    (chart,) = [each for each in charts_of([run]) if each.key == "accuracy"]
    assert chart.title == "Mean average precision"
    assert [curve.label for curve in chart.curves] == ["training, all labels right", "validation"]


def test_a_run_without_a_log_point_says_so(tmp_path):
    folder = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "summary.json"):
        (folder / name).unlink()
    html = page([read_run(folder)])
    assert html.count("There are no log points") == 1, "once, not in place of the headline, too"
    assert "There are no log points." in html
    assert "stopped before its end" in html
    assert "There are no log points yet." in page([read_run(folder, state="going")])


def test_a_run_that_left_how_it_ended_is_shown_so(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    assert '<span class="badge stopped">stopped before its end</span>' in page([read_run(folder)])
    (folder / "report/ending.json").write_text(json.dumps({"kind": "failed", "reason": ATTACK}))
    html = page([read_run(folder)])
    assert '<span class="badge stopped">failed: &lt;script&gt;' in html
    assert "<script>alert(1)" not in html
