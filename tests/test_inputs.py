"""Wrong names, values and paths are answered before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from falconet import cli, inputs
from falconet.config import rules
from falconet.config.commands import COMMANDS
from tiny import TINY

NO_PHOTOS = "nope: no such folder; expected photos in a folder per class, or a table of photos and labels\n"
MISTAKES = {
    "restore --checkpoint-input-path /nope": "/nope: no such file or folder\n",
    "restore --checkpoint-input-path runs/firts": "runs/firts: no such file or folder; did you mean 'runs/first'?\n",
    "restore --checkpoint-input-path runs/others": "runs/others: no such file or folder\n",
    "restore frist": "frist: no such file or folder; did you mean 'runs/first'?\n",
    "restore weight": "weight: no such file or folder\n",  # a file cannot be continued
    "validate weight": "weight: no such file or folder; did you mean 'weights.pth'?\n",
    "predict weigths.pth a.jpg": "weigths.pth: no such file or folder; did you mean 'weights.pth'?\n",
    "serve --repository runs/first": "--repository: runs/first is a run; expected the folder that holds it, or",
    "serve frist": "frist: no such file or folder; did you mean 'runs/first'?\n",
    "restore": "expected a run, such as runs/my-run, a checkpoint or a folder of them",
    "validate --checkpoint-input-path none.pt": "none.pt: no such file or folder\n",
    "average --checkpoint-input-path none": "none: no such file or folder\n",
    "bench infer --checkpoint-input-path none": "none: no such file or folder\n",
    "bench infer --model resnet5": "--model: 'resnet5' is not a model; did you mean 'resnet50'?\n",
    "train --model resnet5O": "--model: 'resnet5O' is not a model; did you mean 'resnet50'?\n",
    "restore --checkpoint-input-path runs/first --model resnet5O": "--model: 'resnet5O' is not a model",
    "train --data folder --data-dir nope": NO_PHOTOS,
    "train --data imagenet --data-dir nope": NO_PHOTOS,
    "train --data folder --data-dir nope --plan": NO_PHOTOS,
    "data bench --data folder --data-dir nope": NO_PHOTOS,
    "train --data imagenet": "--data imagenet: needs --data-dir",
    "data pack": "expected two folders",
    "data pack nope there": NO_PHOTOS,
    "data verify": "expected a folder of shards, as in `falconet data verify photos-packed`\n",
    "data verify nope": "nope: no such folder; expected one that `falconet data pack` made\n",
    "upload": "expected a run folder, as in `falconet upload runs/my-run`\n",
    "upload nope": "nope: no such folder; expected a run folder\n",
    "upload runs/frist": "runs/frist: no such folder; expected a run folder; did you mean 'runs/first'?\n",
    "upload frist": "frist: no such folder; expected a run folder; did you mean 'runs/first'?\n",
    "train run": f"{NO_PHOTOS[:-1].replace('nope', 'run')}; did you mean 'runs'?\n",
    f"train {TINY} --replicas 2 --batchnorm-span 2 --disable-stable-batchnorm": "--batchnorm-span: got 2, expected 1",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_mistake_is_answered_before_the_command_is_imported(falconet, monkeypatch, line, message):
    monkeypatch.setattr(cli, "import_module", lambda name: pytest.fail(f"{name} would be imported"))
    Path("runs/first/checkpoints").mkdir(parents=True)
    Path("runs/other").mkdir()  # a near name, but no run
    Path("runs/first/config.yaml").touch()
    Path("weights.pth").touch()
    answer = falconet(line)
    command = next(name for name in sorted(COMMANDS, key=len, reverse=True) if line.startswith(name))
    assert answer.code == 2
    assert answer.err.startswith(f"falconet {command}: {message}")
    assert answer.err.count("\n") == 1


def test_missing_server_library_is_answered_before_import(falconet, monkeypatch):
    monkeypatch.setattr(cli, "import_module", lambda name: pytest.fail(f"{name} would be imported"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "aiohttp" else pytest.fail(name))
    answer = falconet("serve")
    assert (answer.code, answer.err) == (
        2,
        "falconet serve: needs aiohttp, which is not installed: pip install 'falconet[serve]'\n",
    )


def test_command_line_and_spec_reader_do_not_import_torch():
    code = "import sys, falconet.cli, falconet.commands.bench; print({'torch', 'numpy', 'timm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


PLANNED = {
    "--data imagenet --model resnet18 --micro-batch-size 256": (
        "1,281,167 training and 50,000 validation images of 1,000 classes, 224 x 224, from the published sizes,"
        " because no data folder is given",
        "5,004 updates; 1,281,167 images; each epoch skips a different 143",
    ),
    "--data imagenet --data-dir nope --model resnet18 --micro-batch-size 100 --dataset-percentage 50": (
        "640,583 training and 50,000 validation images of 1,000 classes, 224 x 224, from the published sizes,"
        " because nope does not have them",
        "6,405 updates; 640,583 images",
    ),
    "--data cifar10 --model resnet8-cifar --micro-batch-size 100": (
        "50,000 training and 10,000 validation images of 10 classes, 32 x 32, from the published sizes, because data"
        " does not have them",
        "500 updates; 50,000 images",
    ),
}


@pytest.mark.parametrize(("line", "said"), PLANNED.items())
def test_plan_needs_neither_imagenet_nor_cifar(falconet, line, said):
    answer = falconet(f"train {line} --device cpu --epoch 1 --plan")
    assert answer.code == 0, answer.err
    for text in said:
        assert text in answer.out
    assert not Path("data").exists(), "nothing is fetched for a plan"


def test_run_needs_its_data(falconet, monkeypatch):
    def offline(*anything, **more):
        raise OSError("no network here")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    answer = falconet("train --data cifar10 --data-dir nope --model resnet8-cifar --device cpu")
    assert answer.code == 2
    assert "cifar10: not found under nope" in answer.err


def test_every_check_is_in_force():
    written = {function for name, function in vars(inputs).items() if name.startswith("_check_")}
    assert written == set(inputs.CHECKS)


@pytest.mark.parametrize("check", inputs.CHECKS)
def test_every_check_is_made_for_a_command(check):
    """A wrong type would silently switch it off."""
    assert any(rules.read_by(check, command()) is not None for command in COMMANDS.values())
