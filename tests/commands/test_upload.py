"""`falconet upload`: a finished run is sent to Weights & Biases, here a stand-in that records what it gets."""

import sys
from pathlib import Path

import pytest

from falconet.legacy.programs import main
from tiny import TINY


class Wandb:
    """What of the package is used, writing down its calls."""

    Histogram = None

    def __init__(self):
        self.opened, self.logged, self.finished = {}, {}, False

    mode, base_url, api_key = "offline", "", None

    def setup(self):
        self.settings = self
        return self

    def Settings(self, **options):
        return options

    def init(self, **options):
        self.opened = options
        return self

    def log(self, metrics, *, step):
        assert step >= max(self.logged, default=0), "Weights & Biases refuses a step back"
        self.logged.setdefault(step, {}).update(metrics)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_run_is_uploaded_with_its_config(falconet, wandb):
    assert falconet(f"train {TINY} --logs-per-epoch 2 --run-dir runs/first").code == 0
    answer = falconet("upload runs/first --wandb-project classifiers")
    assert answer.code == 0, answer.err
    assert answer.out == "uploaded 4 log points of runs/first as first to the project classifiers\n"
    assert (wandb.opened["project"], wandb.opened["name"]) == ("classifiers", "first")
    assert wandb.opened["config"]["micro-batch-size"] == "8"
    assert list(wandb.logged) == [2, 4, 6, 8]
    assert {"train/loss", "validation/accuracy", "epoch"} <= wandb.logged[8].keys()
    assert wandb.finished


def test_the_tensorflow_programs_upload_sends_its_columns(falconet, wandb, capfd):
    assert falconet(f"train {TINY} --run-dir r", "tensorflow").code == 0
    assert main("tf1:upload_run.py", "upload_run.py", ["--base-folder", "r", "--name", "mine"]) == 0
    assert (wandb.opened["project"], wandb.opened["name"]) == ("large-scale-cnn", "mine")
    assert wandb.opened["config"]["micro_batch_size"] == 8
    assert wandb.logged[4].keys() == {
        *("epoch", "learning_rate", "loss_avg", "train_accuracy", "train_img_per_sec", "total_time"),
        "validation_accuracy",
    }


def test_missing_key_is_one_line_with_a_way_out(falconet, wandb, monkeypatch):
    wandb.mode = "online"
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(Path.cwd()))
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/metrics.jsonl").write_text('{"update": 1, "train/loss": 0.5}\n')
    answer = falconet("upload runs/first")
    assert (answer.code, answer.err) == (
        2,
        "falconet upload: Weights & Biases: no API key, which `wandb login` stores;"
        " WANDB_MODE=offline needs neither a key nor a network\n",
    )


REFUSED = {
    "upload": "falconet upload: expected a run folder, as in `falconet upload runs/my-run`",
    "upload nowhere": "falconet upload: nowhere: no such folder; expected a run folder",
    "upload empty": "falconet upload: empty: no run in it; expected metrics.jsonl, or training.csv of an original",
}


@pytest.mark.parametrize("line", REFUSED)
def test_folder_without_a_run_is_one_line(falconet, wandb, line):
    Path("empty").mkdir()
    answer = falconet(line)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert answer.err.startswith(REFUSED[line])
