"""A checkpoint from another person decides how training continues, not where files go or what is removed or sent."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from falconet.checkpoint import format, manifest
from falconet.cli import main
from falconet.config.commands import BenchServeOptions, ServeOptions
from falconet.config.load import load_options, read_line
from tiny import TINY

NAME = "resnet8-cifar_generated_1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one epoch, made once."""
    home = tmp_path_factory.mktemp("trained")
    assert main(f"train {TINY} --epoch 1 --checkpoint-save-freq 0.5 --run-dir {home / 'r'}".split()) == 0
    return home / "r"


@pytest.fixture
def victim(trained, falconet, tmp_path):
    """A run of the user, which nothing here may touch; the folder is `tmp_path`, in which commands run."""
    shutil.copytree(trained, tmp_path / "victim")
    before = contents(tmp_path / "victim")
    yield tmp_path / "victim"
    assert contents(tmp_path / "victim") == before


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replaced(folder, **entries):
    """The same with whole entries replaced."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text()) | entries
    content["digest"] = manifest._digest(content)
    path.write_text(json.dumps(content))


def forge(folder, *, runtime=None, **config):
    """Another manifest for a checkpoint, with a digest that fits."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["runtime"] |= runtime or {}
    content["config"] |= {name.replace("_", "-"): {"value": value, "source": "x"} for name, value in config.items()}
    content["digest"] = manifest._digest(content)
    path.write_text(json.dumps(content))


def downloaded(trained, **forged):
    """The run as it came from another person, its newest checkpoint forged."""
    shutil.copytree(trained, "dl")
    forge(Path("dl/checkpoints") / NAME, **forged)
    return "restore --checkpoint-input-path dl --epoch 2"


def test_recorded_run_folder_is_not_written_to(falconet, trained, victim):
    downloaded(trained, runtime={"run_dir": str(victim)})
    shutil.move(f"dl/checkpoints/{NAME}", "alone/inner")
    line = "restore --checkpoint-input-path alone/inner --epoch 2"
    answer = falconet(line)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "--run-dir: required, because alone/inner is not in a run folder" in answer.err
    assert falconet(f"{line} --plan").code == 0
    assert falconet(f"{line} --run-dir r").code == 0
    assert format.checkpoints_in(Path("r/checkpoints"))[-1].name == "resnet8-cifar_generated_2"
    assert sorted(path.name for path in Path("alone").iterdir()) == ["inner"]


def test_run_folder_among_the_options_is_not_written_to(falconet, trained, victim):
    line = downloaded(trained, runtime={"run_dir": str(victim)}, run_dir=str(victim))
    answer = falconet(line)
    assert answer.code == 0, answer.err
    assert "run folder           dl\n" in answer.out


def test_checkpoint_folder_is_not_taken_over_and_nothing_is_removed(falconet, trained, victim):
    line = downloaded(trained, checkpoint_output_path=str(victim / "checkpoints"), checkpoints_kept="1")
    before = {folder.name for folder in format.checkpoints_in(Path("dl"))}
    answer = falconet(line)
    assert answer.code == 0, answer.err
    note = "note: --checkpoints-kept is not taken from a checkpoint; add it to the command line to remove"
    assert f"{note} older checkpoints" in answer.out
    after = {folder.name for folder in format.checkpoints_in(Path("dl"))}
    assert before | {"resnet8-cifar_generated_2"} <= after, "none is removed where the line does not ask for it"
    assert falconet(f"{line[:-1]}3 --checkpoints-kept 1").code == 0
    assert len(format.checkpoints_in(Path("dl"))) <= 2, "the newest and the best"


SINKS = {
    "wandb": "add it to the command line to continue uploading",
    "tensorboard": "add it to the command line to continue the TensorBoard files",
    "mlflow": "add it to the command line to continue the run in MLflow",
    "aim": "add it to the command line to log to Aim again",
    "profile": "add it to the command line to trace updates",
}


@pytest.mark.parametrize("sink", SINKS)
def test_sink_is_not_started_and_a_note_reports_it(falconet, trained, victim, monkeypatch, sink):
    def started(**_):
        raise AssertionError("an upload was started")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=started, Error=OSError, Histogram=None))
    answer = falconet(downloaded(trained, **{sink: True, "weight_histogram": sink == "wandb"}))
    assert answer.code == 0, answer.err
    assert answer.out.count(f"note: --{sink} is not taken from a checkpoint; {SINKS[sink]}\n") == 1
    assert not Path("dl/tensorboard").exists()
    assert not Path("dl/profile.json.gz").exists()


def test_other_checkpoints_are_not_read(falconet, trained, victim):
    answer = falconet(downloaded(trained, validate_checkpoints=str(victim), init_path=str(victim)))
    assert answer.code == 0, answer.err
    assert "note: --validate-checkpoints is not taken from a checkpoint" in answer.out
    assert "--init-path" not in answer.out
    assert not Path("dl/validation.csv").exists()


def test_config_of_another_program_makes_no_run_folder(falconet, trained, tmp_path):
    shutil.copytree(trained / "checkpoints", tmp_path / "project/checkpoints")
    (tmp_path / "project/config.yaml").write_text("model: mine\n")
    (tmp_path / "project/plan.txt").write_text("mine")
    answer = falconet("restore --checkpoint-input-path project --epoch 2")
    assert answer.code == 2
    assert "is not in a run folder" in answer.err
    assert (tmp_path / "project/plan.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["restore", "validate", "average --batchnorm-images 8"])
@pytest.mark.parametrize("place", [{}, {"data_dir": "victim/data"}], ids=["nowhere", "a folder"])
def test_checkpoint_alone_starts_no_download(falconet, trained, victim, monkeypatch, command, place):
    def fetched(*_, **__):
        raise AssertionError("a download was started")

    monkeypatch.setattr("falconet.data.sources.cifar.download", fetched)
    downloaded(trained, data="cifar10", image_size="32", **place)
    answer = falconet(f"{command} --checkpoint-input-path dl/checkpoints/{NAME}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "cifar10: not found under " in answer.err
    assert "data that only a checkpoint names is not downloaded" in answer.err


def test_only_the_line_chooses_host_port_and_url():
    stored = {"host": "0.0.0.0", "port": "1", "url": "http://elsewhere", "output": "/x", "max-batch": "7"}
    table = {name: {"value": value} for name, value in stored.items()}
    served = load_options(ServeOptions, read_line(ServeOptions, []), table).options.serving
    assert (served.host, served.port, served.max_batch) == ("127.0.0.1", "auto", 7)
    load = load_options(BenchServeOptions, [], table).options.load
    assert (load.url, load.output) == (None, None)


WRITTEN = (
    *("config.yaml", "plan.txt", "metrics.jsonl", "updates.jsonl", "summary.json", "validation.csv", "training.csv"),
    *("log.txt", "checkpoints", "tensorboard", "wandb", "profile.json.gz", "profile.txt", "profile_summary.json"),
)


@pytest.mark.parametrize("name", WRITTEN)
def test_link_in_a_run_folder_is_refused_before_training(falconet, victim, tmp_path, name):
    (tmp_path / "r").mkdir()
    target = victim if "." not in name else victim / name if (victim / name).exists() else victim / "config.yaml"
    (tmp_path / "r" / name).symlink_to(target)
    answer = falconet(f"train {TINY} --epoch 1 --run-dir r")
    words = f"r/{name}: is a symbolic link; refusing to write through it; remove it or choose another --run-dir"
    assert (answer.code, answer.err) == (2, f"falconet train: {words}\n")
    assert [path.name for path in (tmp_path / "r").iterdir()] == [name]


def test_link_in_place_of_the_probe_is_not_followed(falconet, victim, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r/.writable").symlink_to(victim / "config.yaml")
    assert falconet(f"train {TINY} --epoch 1 --run-dir r").code == 0
    assert (tmp_path / "r/.writable").is_symlink()


def test_link_to_the_checkpoints_of_another_run_is_refused(falconet, trained, victim, tmp_path):
    shutil.copytree(trained, "dl", ignore=shutil.ignore_patterns("checkpoints"))
    with Path("dl/config.yaml").open("a") as config:
        config.write("checkpoint-output-path: dl/saved\n")
    (tmp_path / "dl/saved").symlink_to(victim / "checkpoints")
    answer = falconet("restore --checkpoint-input-path dl/saved --epoch 2")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "dl/saved: is a symbolic link; refusing to write through it" in answer.err


def test_run_folder_itself_may_be_a_link(falconet, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "big/disk")
    Path("r").symlink_to("big/disk")
    answer = falconet("restore --checkpoint-input-path r --epoch 2")
    assert answer.code == 0, answer.err
    assert (tmp_path / "big/disk/checkpoints/resnet8-cifar_generated_2").is_dir()


def test_accuracy_table_is_written_through_no_link_unless_it_was_named(falconet, trained, victim):
    shutil.copytree(trained, "dl")
    Path("dl/validation.csv").symlink_to(victim / "config.yaml")
    answer = falconet("validate --checkpoint-input-path dl")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "dl/validation.csv: is a symbolic link; refusing to write through it" in answer.err
    assert answer.err.endswith("choose another --output\n")
    Path("named.csv").symlink_to("own.csv")
    assert falconet("validate --checkpoint-input-path dl --output named.csv").code == 0
    assert Path("own.csv").read_text().startswith("checkpoint,epoch,")


SENSELESS = {
    "an empty meter": {"meter": {}},
    "a meter of words": {"meter": {"update": "x", "interval": {}, "epoch": {}}},
    "a list of options": {"config": ["epoch"]},
    "no options": {"config": {}},
    "too few names": {"class_names": ["0"]},
    "a hundred million classes": {"classes": 10**8},
    "half a character": {"model": "m\ud800"},
}


@pytest.mark.parametrize("entries", SENSELESS.values(), ids=SENSELESS)
@pytest.mark.parametrize("command", ["restore", "validate"])
def test_a_senseless_manifest_is_one_line(falconet, trained, entries, command):
    shutil.copytree(trained, "dl")
    replaced(Path("dl/checkpoints") / NAME, **entries)
    more = " --epoch 2" if command == "restore" else ""
    answer = falconet(f"{command} --checkpoint-input-path dl/checkpoints/{NAME}{more}")
    if command == "validate" and ("meter" in entries or entries == {"config": {}}):  # which it does without
        assert answer.code == 0
    else:
        assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err


def test_a_best_validation_that_is_none_is_ignored(falconet, trained):
    shutil.copytree(trained, "dl")
    replaced(Path("dl/checkpoints") / NAME, best=["high"], metrics={})
    assert falconet("restore --checkpoint-input-path dl --epoch 2").code == 0
