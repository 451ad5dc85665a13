"""app.json and arguments.json: the options of an original by its own names, numbers as numbers."""

import json
from pathlib import Path

import pytest

from falconet.checkpoint import format
from falconet.legacy.programs import main
from falconet.legacy.translate import translate, translate_mapping

ROOT = Path(__file__).parents[2]
SMALL = "--device cpu --threads 1 --dataloader-workers 0 --image-size 16"
PYTORCH = (
    "--data generated --model resnet18 --iterations 2 --epoch 1 --micro-batch-size 4 --precision 32.32 --lr 0.5"
    " --weight-decay 1e-05 --lr-epoch-decay 3 7.5 --validation-mode none --checkpoint-output-path out --half-partial"
)
TENSORFLOW = (
    "--generated-data --dataset cifar-10 --model-size 8 --iterations 4 --batch-size 4 --precision 32.32 --momentum 0.8"
    " --optimiser momentum --weight-avg-N 1 2 --no-validation --logs-path out --learning-rate-schedule 0.5,0.75"
)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Run a program of the originals in an empty folder; its options file."""
    monkeypatch.chdir(tmp_path)

    def call(program, line, *, file):
        script = ROOT / "compat" / {"pytorch": "pytorch/train", "tf1": "tensorflow"}[program.partition(":")[0]] / "x.py"
        assert main(program, str(script), [*line.split(), "--", *SMALL.split()]) == 0
        return json.loads((tmp_path / "out" / file).read_text())

    return call


def test_pytorch_options_are_stored_under_its_names_as_numbers(started):
    stored = started("pytorch:train.py", PYTORCH, file="app.json")
    typed = {"lr": 0.5, "weight_decay": 1e-05, "lr_epoch_decay": [3, 7.5], "half_partial": True, "model": "resnet18"}
    defaults = {"warmup_epoch": 0, "weight_avg_N": -1, "auto_loss_scaling": False, "pipeline_splits": [], "seed": 0}
    assert stored.items() >= {**typed, **defaults, "config": None, "precision": "32.32"}.items()
    assert {type(stored[name]) for name in ("lr", "loss_scaling", "mixup_alpha")} == {float}
    assert not stored.keys() & {"help", "image_size", "zero_init"}


def test_tensorflow_options_are_stored_under_its_names_as_numbers(started):
    stored = started("tf1:train.py", TENSORFLOW, file="arguments.json")
    typed = {
        "batch_size": 4,
        "momentum": 0.8,
        "weight_avg_N": [1, 2],
        "iterations": 4,
        "learning_rate_schedule": "0.5,0.75",
    }
    # Computed from data and model, as the original does; --no-validation was stored so too.
    computed = {"dataset": "cifar-10", "model_size": "8", "weight_decay": 1e-6, "groups": 16, "epochs": None}
    assert stored.items() >= {**typed, **computed, "validation": False, "ckpts_per_epoch": 1}.items()


NORMS = {  # what the name of the run folder says too
    "--dataset cifar-10 --model-size 8": (True, False),
    "--dataset cifar-10 --model-size 8 --group-norm": (False, True),
    "--dataset imagenet --model-size 50": (False, True),
    "--dataset imagenet --model-size 50 --batch-norm": (True, False),
    "--dataset imagenet --model efficientnet --model-size B0": (False, True),
}


@pytest.mark.parametrize("line", NORMS)
def test_tensorflow_norm_that_is_used_is_stored(line):
    stored = translate("tf1:train.py", ["--generated-data", *line.split()]).stored
    assert (stored["batch_norm"], stored["group_norm"]) == NORMS[line]


def test_tensorflow_options_have_one_key_each():
    line = "--generated-data --dataset imagenet --model efficientnet --model-size B0 --stochastic-rounding OFF"
    stored = translate("tf1:train.py", line.split()).stored
    one_key = {"hostside_norm": False, "no_stochastic_rounding": True, "proxy_recompute": True}
    assert stored.items() >= one_key.items()
    others = {"no_hostside_norm", "stochastic_rounding", "no_proxy_recompute", "no_validation", "valid_batch_size"}
    assert not stored.keys() & others


@pytest.mark.parametrize(
    ("program", "line", "file"),
    [("pytorch:train.py", PYTORCH, "app.json"), ("tf1:train.py", TENSORFLOW, "arguments.json")],
)
def test_stored_options_can_be_read_again_and_mean_what_was_typed(started, program, line, file):
    stored = started(program, line, file=file)
    again = meant(translate_mapping(program, stored, source=file))
    assert meant(translate(program, line.split())).items() <= again.items()


def meant(translation):
    """The canonical options with their values, 3.0 being 3."""
    return {setting.option: tuple(map(number, setting.values)) for setting in translation.settings}


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.usefixtures("two_cores", "forked_workers")
def test_several_processes_store_what_was_typed(started):
    stored = started("pytorch:train.py", f"{PYTORCH} --replicas 2", file="app.json")
    assert (stored["replicas"], stored["lr"], stored["half_partial"]) == (2, 0.5, True)


def test_restored_run_keeps_the_options_of_its_start(started, tmp_path):
    first = started("pytorch:train.py", PYTORCH.replace("--epoch 1", "--epoch 2"), file="app.json")
    restore = str(ROOT / "compat/pytorch/train/restore.py")
    assert main("pytorch:restore.py", restore, ["--checkpoint-input-path", "out", "--", "--epoch", "3"]) == 0
    assert json.loads(Path("out/app.json").read_text()) == first
    older = next(str(folder) for folder in format.checkpoints_in(Path("out")) if folder.name.endswith("_1"))
    assert main("pytorch:restore.py", restore, ["--checkpoint-input-path", older, "--", "--epoch", "2"]) == 0
    (new,) = {*Path().iterdir()} - {Path("out")}
    assert json.loads((new / "app.json").read_text()) == first
