"""`falconet recipe verify` and `falconet configs --evidence`: what recipes reached, and whether they still do."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from falconet.commands import recipe_verify
from falconet.config import evidence, recipes
from falconet.config.evidence import Evidence, TrainedOnce
from falconet.errors import ConfigError
from runs import begin, finish

ROOT = Path(__file__).parents[2]
# In the place of `falconet train`: writes what a run would, with accuracies from a file.
TRAINER = """
import json, pathlib, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
accuracy = json.loads(pathlib.Path("accuracies.json").read_text())[int(words["--seed"])]
if accuracy is None:
    sys.exit("out of luck")
folder = pathlib.Path(words["--run-dir"])
folder.mkdir(parents=True)
images = 360.0 if accuracy < 100 else 240.0
metrics = {} if accuracy < 0 else {"validation/accuracy": accuracy, "validation/images": images}
about = {"device": "CPU", "processor": "a chip, 2 cores", "Falconet": "0.1", "PyTorch": "2.11"}
about["started"] = "2026-11-18 04:05:06 UTC"
summary = {"training_seconds": 1.5, "seconds": {"training": 1.4738}, "metrics": metrics, "environment": about}
(folder / "summary.json").write_text(json.dumps(summary))
(folder / "words.json").write_text(json.dumps(words))
"""


def made(*accuracies, recipe="digits"):
    runs = tuple(
        TrainedOnce(seed=seed, accuracy=each, seconds=2.0 + seed, images=360) for seed, each in enumerate(accuracies)
    )
    return Evidence(
        recipe=recipe, device="a chip", versions={"PyTorch": "2.11"}, date="2026-11-18", command="", runs=runs
    )


@pytest.fixture
def trainer(monkeypatch):
    """Let runs reach these accuracies, by seed; the evidence for digits is 99, 98 and 97 %."""
    Path("trainer.py").write_text(TRAINER)
    monkeypatch.setattr(recipe_verify, "TRAIN", (sys.executable, "trainer.py"))
    monkeypatch.setattr(evidence, "all_evidence", lambda: {"digits": made(99.0, 98.0, 97.0)})
    return lambda *accuracies: Path("accuracies.json").write_text(json.dumps(accuracies))


def test_a_recipe_that_reaches_what_it_did_holds(falconet, trainer):
    trainer(97.5, 98.0)
    answer = falconet("recipe verify digits --seeds 2 --runs again")
    assert answer.code == 0, answer.err
    assert "seed 1: 98.00 %, 1.47 s of training" in answer.out
    assert "recorded: 98.00 ± 1.00 % in 3 runs on a chip, 2026-11-18\n" in answer.out
    least = 98 - 2 * math.sqrt(1 / 3 + 1 / 2)
    assert f"holds: 97.75 %, expected at least {least:.2f} %\n" in answer.out
    assert "note: " not in answer.out
    assert sorted(path.name for path in Path("again").iterdir()) == ["seed-0", "seed-0.log", "seed-1", "seed-1.log"]


def test_each_run_gets_the_recipe_its_seed_and_the_folder_of_the_data(falconet, trainer):
    trainer(98.0, 98.0)
    assert falconet("recipe verify digits --seeds 2 --runs again --data-dir data --device cpu").code == 0
    words = json.loads(Path("again/seed-1/words.json").read_text())
    assert words == {
        "--config": "digits",
        "--seed": "1",
        "--run-dir": "again/seed-1",
        "--device": "cpu",
        "--data-dir": "data",
    }


def test_a_recipe_that_has_become_worse_does_not(falconet, trainer):
    trainer(95.0)
    answer = falconet("recipe verify digits")
    assert answer.code == 1
    assert "DOES NOT HOLD: 95.00 %" in answer.out


def test_other_data_than_was_recorded_is_noted(falconet, trainer):
    trainer(100.0)
    answer = falconet("recipe verify digits")
    note = "note: 240 images were validated, but 360 when it was recorded: the data is different\n"
    assert (answer.code, answer.out.count(note)) == (0, 1)


def test_what_was_recorded_is_read_again(falconet, trainer):
    trainer(90.0, 91.0)
    assert falconet("recipe verify cifar10-resnet20 --seeds 2 --record found.json").code == 0
    found = evidence.read(Path("found.json"))
    assert [(run.accuracy, run.images) for run in found.runs] == [(90.0, 360), (91.0, 360)]
    assert [run.seconds for run in found.runs] == [1.474, 1.474]
    assert (found.recipe, found.device, found.date) == ("cifar10-resnet20", "a chip, 2 cores", "2026-11-18")
    assert found.reached() == "90.50 ± 0.71 %"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digitz", "--name: 'digitz' is not a named config; did you mean 'digits'?"),
        ("", "--name: no recipe given"),
        ("cifar10-resnet20", "'cifar10-resnet20' has no recorded runs to compare with; expected one of digits, or"),
        ("digits --seeds 0", "--seeds: got '0', expected a whole number, at least 1"),
    ],
)
def test_a_mistake_is_one_line(falconet, trainer, words, message):
    answer = falconet(f"recipe verify {words}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "damaged"), ("[]", "damaged"), ('{"recipe": "digits"}', "damaged"), ("no runs", "no runs")],
)
def test_damaged_evidence_is_named(content, message, tmp_path):
    path = tmp_path / "digits.json"
    path.write_text(made().to_json() if content == "no runs" else content)
    with pytest.raises(ConfigError, match=message) as found:
        evidence.read(path)
    assert str(found.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("trainer.py/found.json", "cannot write to trainer.py/found.json: "),
        (".", ". is a folder, expected a file"),
        ("link", "link: is a symbolic link"),
    ],
)
def test_a_record_that_cannot_be_written_is_refused_before_the_first_run(falconet, trainer, record, message):
    Path("link").symlink_to("precious")
    answer = falconet(f"recipe verify digits --record {record} --runs again")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err
    assert "--record" in answer.err
    assert not Path("again").exists()


def test_a_mistake_that_a_run_finds_is_a_mistake_here(falconet, trainer, monkeypatch):
    monkeypatch.setattr(recipe_verify, "TRAIN", (sys.executable, "-c", "import sys; print('no data'); sys.exit(2)"))
    answer = falconet("recipe verify digits --runs r")
    assert answer.code == 2
    assert answer.err.endswith("r/seed-0.log: no data\n")


SAVING = """
import os, signal, time
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
os.kill(os.getppid(), signal.SIGINT)
for _ in range(3000):
    time.sleep(0.0 if stopped else 0.01)
print("saved" if stopped else "not stopped")
"""


def test_an_interruption_waits_for_the_run_to_save(falconet, trainer, monkeypatch):
    Path("trainer.py").write_text(SAVING)
    answer = falconet("recipe verify digits --runs r --seeds 2")
    assert answer.code == 130
    assert "stopping once the run has saved" in answer.out
    assert Path("r/seed-0.log").read_text() == "saved\n"
    assert not Path("r/seed-1.log").exists()


VERIFY = """
import sys
from falconet.commands import recipe_verify
from falconet.cli import main
recipe_verify.TRAIN = (sys.executable, "trainer.py")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_signal_to_the_verification_alone_reaches_the_run(tmp_path, number):
    (tmp_path / "trainer.py").write_text(SAVING.replace("getppid(), signal.SIGINT", f"getppid(), signal.{number}"))
    process = begin("recipe verify digits --runs r", tmp_path, launcher=(sys.executable, "-c", VERIFY))
    code, out, err = finish(process)
    assert code == 130, err
    assert "stopped; finished runs are in r" in out
    assert (tmp_path / "r/seed-0.log").read_text() == "saved\n"


def test_a_run_that_fails_is_named_with_its_last_line(falconet, trainer):
    trainer(None)
    answer = falconet("recipe verify digits --runs r")
    assert answer.code == 1
    assert answer.err.endswith("r/seed-0: the run ended with exit code 1: out of luck\n")


def test_a_recipe_without_validation_has_nothing_to_compare(falconet, trainer):
    trainer(-1)
    assert "was not validated, so there is nothing to compare" in falconet("recipe verify digits").err


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.9512, "0.951 s"), (7.5, "7.5 s"), (9.996, "10 s"), (33.912, "33.9 s"), (1823.456, "1823.5 s")],
)
def test_short_trainings_are_listed_to_three_digits(seconds, shown):
    once = TrainedOnce(seed=0, accuracy=98.0, seconds=seconds, images=360)
    heading, row = evidence.table({"digits": replace(made(), runs=(once,))})
    assert row[heading.index("training")] == shown


def test_one_run_may_differ_by_a_tenth_of_a_percent():
    assert made(98.0).least(1) == pytest.approx(97.9)
    assert made(98.0).spread is None


def test_evidence_is_listed_in_columns(falconet):
    answer = falconet("configs --evidence")
    assert answer.code == 0
    heading, *rows, last = answer.out.splitlines()
    assert heading.split() == ["recipe", "accuracy", "runs", "training", "on", "date", "with"]
    assert [row.split()[0] for row in rows] == [*evidence.all_evidence()]
    assert "recipe verify" in last
    shown = {row.split()[0]: row for row in rows}
    assert "  0.87 s counted  " in shown["cifar10-speedrun"]  # as in speedrun.jsonl, and as the records count
    assert "  33.9 s  " in shown["cifar10-resnet20"]


def test_evidence_is_written_without_what_it_does_not_state():
    found = made(98.0)
    assert "counted" not in found.to_json()
    counted = replace(found, runs=(replace(found.runs[0], counted=0.871),))
    assert json.loads(counted.to_json())["runs"][0]["counted"] == 0.871


@pytest.mark.parametrize("each", evidence.all_evidence().values(), ids=lambda each: each.recipe)
def test_shipped_evidence_is_of_a_named_config(each):
    assert each.recipe in recipes.all_configs()
    program, script, *_ = each.command.split()
    if program == "python":  # a comparison of ours, which trains many runs in one process
        assert (ROOT / script).is_file()
        assert f"--seeds {len(each.runs)}" in each.command
    else:
        assert each.command == f"falconet recipe verify {each.recipe} --seeds {len(each.runs)}"
    assert all(0 < run.accuracy <= 100 for run in each.runs)
    assert [run.seed for run in each.runs] == list(range(len(each.runs)))


@pytest.mark.slow
def test_digits_reach_what_was_recorded(falconet):
    answer = falconet("recipe verify digits")
    assert answer.code == 0, answer.out
    assert "holds" in answer.out
