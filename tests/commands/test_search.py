"""`falconet search`: spaces, trials, pruning, continuing, several workers and dead ones."""

import csv
import os
import signal
import sys

import pytest

import falconet.commands.search as search
from runs import begin, finish, wait_for
from watched import wait_until_gone

# Stands for `falconet train`: its accuracy after each epoch grows with --lr; it fails above 0.09.
TRAINER = """
import json, pathlib, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
home, rate = pathlib.Path(given["--run-dir"]), float(given["--lr"])
(home / "config.yaml").write_text(f"lr: {rate}\\n")
if rate > 0.09:
    sys.exit("the loss is not finite")
with (home / "metrics.jsonl").open("w") as file:
    for epoch in range(3):
        time.sleep(PAUSE)
        score = 1000 * rate + epoch
        print(json.dumps({"validation/accuracy": score, "validation_ema/accuracy": score + 1}), file=file, flush=True)
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    def fake(pause=0.0):
        script = tmp_path / "trainer.py"
        script.write_text(TRAINER.replace("PAUSE", str(pause)))
        monkeypatch.setattr(search, "TRAIN", (sys.executable, str(script)))

    monkeypatch.setattr(search, "POLLED", 0.02)
    fake()
    return fake


MISTAKES = {
    "": "expected at least one option with a range or with choices",
    "--lr 0.1": "expected at least one option with a range or with choices",
    "--lr log:0.1": "--lr: got 'log:0.1', expected a number, at least 0",
    "--lr log:0.1:0.01": "expected a smaller number and then a larger one",
    "--lr log:0:0.1": "expected more than 0 in a range by logarithm",
    "--lr 0.1,x": "--lr: got '0.1,x', expected a number, at least 0",
    "--momentum range:0:2": "--momentum: got 'range:0:2', expected a number, from 0 to 1",
    "--model resnet8-cifar,resnet9-cifar": "--model: 'resnet9-cifar' is not a model",
    "--optimizer sgd,adm": "--optimizer: got 'sgd,adm'",
    "--lr 0.1,0.1": "expected different values",
    "--lr 0.1,0.2 --run-dir here": "--run-dir: a search sets it for each trial; --study names the folder",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_wrong_space_is_one_line(falconet, line):
    answer = falconet(f"search {line}")
    assert answer.code == 2
    assert MISTAKES[line] in answer.err
    assert answer.err.count("\n") == 1


def test_a_study_that_cannot_be_opened_is_one_line(falconet, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/study.db").write_text("not a database")
    for name, why in {"file": "expected a folder that you may write", "broken": "is not a study"}.items():
        answer = falconet(f"search --lr 0.01,0.02 --study {name}")
        assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
        assert f"--study: {name}" in answer.err
        assert why in answer.err


@pytest.mark.usefixtures("trainer")
def test_a_folder_of_any_name_holds_a_study(falconet, tmp_path):
    assert falconet("search --lr 0.01,0.02 --budget 1 --study odd?s#t%20/é").code == 0
    assert (tmp_path / "odd?s#t%20/é/study.db").is_file()


def trials(folder):
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("trainer")
def test_the_best_trial_leaves_its_config(falconet, tmp_path):
    answer = falconet("search --budget 5 --lr log:1e-3:1e-1 --micro-batch-size 32,64 --study study --no-prune")
    assert answer.code == 0, answer.err
    rows = trials(tmp_path / "study")
    assert [float(row["lr"]) for row in rows] == sorted((float(row["lr"]) for row in rows), reverse=True)
    best = rows[0]
    assert (tmp_path / "study/best.yaml").read_text() == f"lr: {float(best['lr'])}\n"
    assert {row["micro-batch-size"] for row in rows} <= {"32", "64"}
    assert f"best: trial {best['trial']}, {float(best['accuracy']):.2f} %" in answer.out
    assert float(best["accuracy"]) == pytest.approx(
        1000 * float(best["lr"]) + 2 + 1, abs=0.01
    )  # the average's, after 3


@pytest.mark.usefixtures("trainer")
def test_a_search_continues_up_to_its_budget(falconet, tmp_path):
    line = "search --lr range:0.01:0.05 --study study --budget"
    assert falconet(f"{line} 2").code == 0
    answer = falconet(f"{line} 3")
    assert "2 trials of 3 done" in answer.out
    assert len(trials(tmp_path / "study")) == 3
    refused = falconet("search --lr range:0.01:0.06 --study study --budget 4")
    assert refused.code == 2
    assert "--study: study searches --lr 0.01 to 0.05; expected the same, or another folder" in refused.err


def test_a_trial_worse_than_the_median_is_stopped(falconet, trainer, tmp_path):
    choices = ",".join(f"{rate:.3f}" for rate in (0.08, 0.081, 0.082, 0.083))
    assert falconet(f"search --lr {choices} --study study --budget 5").code == 0
    trainer(pause="600 * (epoch == 2)")  # the third epoch never comes, however late the stop does
    (tmp_path / "trainer.py").write_text((tmp_path / "trainer.py").read_text().replace("1000 * rate", "rate"))
    assert falconet(f"search --lr {choices} --study study --budget 6").code == 0
    stopped = [row for row in trials(tmp_path / "study") if row["state"] == "pruned"]
    assert stopped
    assert int(stopped[-1]["epochs"]) < 3


@pytest.mark.usefixtures("trainer")
def test_a_failed_trial_costs_only_itself_but_failing_always_stops_the_search(falconet, tmp_path):
    answer = falconet("search --lr 0.05,0.95 --study mixed --budget 8")
    assert answer.code == 0, answer.err
    assert {row["state"] for row in trials(tmp_path / "mixed")} <= {"complete", "fail"}
    refused = falconet("search --lr 0.95,0.96 --study bad --budget 8")
    assert refused.code == 2
    assert "the first 4 trials failed, the last with: the loss is not finite" in refused.err


def test_a_dead_workers_trial_counts_if_its_training_ended(falconet, trainer, tmp_path, monkeypatch):
    line = "search --lr range:0.01:0.05 --study study --budget"
    assert falconet(f"{line} 1").code == 0
    study = search.optuna.load_study(study_name="falconet", storage=f"sqlite:///{tmp_path}/study/study.db")
    for _ in range(2):  # as a killed worker leaves them
        study.ask({"lr": search.optuna.distributions.FloatDistribution(0.01, 0.05)})
    (tmp_path / "study/trial-1").mkdir()
    (tmp_path / "study/trial-1/metrics.jsonl").write_text('{"validation/accuracy": 77.5}\n')
    for name in ("summary.json", "config.yaml"):
        (tmp_path / "study/trial-1" / name).write_text("{}")
    monkeypatch.setattr(search, "BEGINNING", 0)
    assert falconet(f"{line} 3").code == 0
    states = {row["trial"]: (row["state"], row["accuracy"]) for row in trials(tmp_path / "study")}
    assert states["1"] == ("complete", "77.50")
    assert states["2"] == ("fail", "")


SLEEPER = """
import os, pathlib, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pathlib.Path(given["--run-dir"], "pid").write_text(f"{os.getpid()}\\n")
time.sleep(600)
"""
SEARCH = """
import sys
from falconet.commands import search
from falconet.cli import main
search.TRAIN = (sys.executable, "sleeper.py")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_search_that_is_ended_leaves_no_trial_running(tmp_path, number):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    process = begin("search --lr 0.01,0.02 --study s", tmp_path, launcher=(sys.executable, "-c", SEARCH))
    told = tmp_path / "s/trial-0/pid"
    wait_for(lambda: told.exists() and told.read_text().endswith("\n"), "a trial")
    process.send_signal(number)
    code, out, _ = finish(process)
    assert code == 130
    assert out.endswith("stopped; the same command with --study s continues\n")
    wait_until_gone(int(told.read_text()))


@pytest.mark.slow
def test_two_workers_share_a_study_and_one_may_be_killed(tmp_path):
    line = "search --data digits --epoch 1 --lr log:1e-3:1e-1 --study study --budget 3"
    first, second = (begin(line, tmp_path) for _ in range(2))
    wait_for(lambda: (tmp_path / "study/trial-1/metrics.jsonl").exists(), "two trials")
    os.kill(second.pid, signal.SIGKILL)
    second.communicate()
    code, _, err = finish(first)
    assert code == 0, err
    assert sum(row["state"] == "complete" for row in trials(tmp_path / "study")) >= 2
