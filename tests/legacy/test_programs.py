"""The originals' scripts, run as people type them: inside their folders, for a few updates on generated images."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from falconet.config.options import Model
from falconet.legacy.programs import canonical, gc_profile, main
from falconet.legacy.tensorflow_facts import EFFICIENTNETS
from falconet.legacy.translate import PROGRAMS as TABLES
from falconet.models.efficientnet import SIZES

COMPAT = Path(__file__).parents[2] / "compat"
PROGRAMS = {
    "pytorch:train.py": COMPAT / "pytorch/train/train.py",
    "pytorch:restore.py": COMPAT / "pytorch/train/restore.py",
    "pytorch:validate.py": COMPAT / "pytorch/train/validate.py",
    "pytorch:weight_avg.py": COMPAT / "pytorch/train/weight_avg.py",
    "pytorch:inference/run_benchmark.py": COMPAT / "pytorch/inference/run_benchmark.py",
    "pytorch:inference/run_benchmark_with_triton_server.py": COMPAT
    / "pytorch/inference/run_benchmark_with_triton_server.py",
    "pytorch:datasets/host_benchmark.py": COMPAT / "pytorch/datasets/host_benchmark.py",
    "pytorch:datasets/validate_dataset.py": COMPAT / "pytorch/datasets/validate_dataset.py",
    "tf1:train.py": COMPAT / "tensorflow/train.py",
    "tf1:validation.py": COMPAT / "tensorflow/validation.py",
    "tf1:restore.py": COMPAT / "tensorflow/restore.py",
    "tf1:weight_avg.py": COMPAT / "tensorflow/weight_avg.py",
    "tf1:upload_run.py": COMPAT / "tensorflow/upload_run.py",
    "tf1:inference_embedded.py": COMPAT / "tensorflow/inference_embedded.py",
    "popart:resnet_main.py": COMPAT / "popart/resnet_main.py",
    "popart:resnet_synthetic_benchmark.py": COMPAT / "popart/resnet_synthetic_benchmark.py",
    "tool:examples_utils benchmark": COMPAT / "examples_utils/__main__.py",
}


@pytest.fixture
def original(capfd, tmp_path, monkeypatch):
    """Runs a line of a program in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)

    def call(program, line):
        code = main(program, str(PROGRAMS[program]), shlex.split(line))
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_every_script_runs_its_program(monkeypatch):
    started = {}
    monkeypatch.setattr("falconet.legacy.programs.run", lambda program, script, *_: started.update({program: script}))
    monkeypatch.setattr(sys, "argv", ["script", "benchmark"])
    for script in PROGRAMS.values():
        runpy.run_path(str(script), run_name="__main__")
    assert started == {program: str(script) for program, script in PROGRAMS.items()}


FEW = "--generated-data --model resnet --model-size 8 --dataset cifar-10 --epochs 1 --no-validation"


def test_an_error_of_the_run_begins_with_the_program_and_names_its_options(original, image_folder):
    line = f"{FEW} --batch-size 500 -- --data folder --data-dir {image_folder} --threads 1 --device cpu"
    code, _, err = original("tf1:train.py", line)
    assert code == 2
    assert err.splitlines()[-1] == (
        "train.py: --batch-size: a global batch of 500 is more than the 24 training images; expected a smaller"
        " --batch-size, --gradient-accumulation-count or --replicas"
    )


def test_workers_begin_their_errors_with_the_program_that_started_them(capfd):
    assert canonical(["tensorflow:train.py", "{}", "train", "--lr", "fast"]) == 2
    assert capfd.readouterr().err.startswith("train.py: --base-learning-rate: here --lr: got 'fast'")


def test_the_interleaved_schedule_is_advised_as_the_program_takes_it(original):
    pipeline = "--shards 2 --pipeline --pipeline-splits b2/0/relu --pipeline-schedule Interleaved"
    code, _, err = original("tf1:train.py", f"{FEW} {pipeline} --gradient-accumulation-count 1")
    assert code == 2
    assert "for --pipeline-schedule Interleaved; --pipeline-schedule Grouped takes any number" in err


def test_every_script_belongs_to_a_program():
    scripts = {path for path in COMPAT.rglob("*.py") if not re.match(r"__init__|conftest|test_", path.name)}
    assert scripts == set(PROGRAMS.values())


SHORT = "--iterations 2 --epoch 1 --micro-batch-size 4"
TRAINED = {
    "pytorch": (
        "pytorch:train.py",
        f"--data generated --model mobilenet-v3-small {SHORT} --precision 32.32 -- --image-size 32",
    ),
    "tensorflow": ("tf1:train.py", "--generated-data --dataset cifar-10 --model-size 8 --iterations 2 --batch-size 4"),
    "popart": (
        "popart:resnet_synthetic_benchmark.py",
        "--mode train --size 8 --batch-size 4 --steps 1 --batches-per-step 2",
    ),
}


@pytest.mark.parametrize(("program", "line"), TRAINED.values(), ids=TRAINED)
def test_a_program_trains(original, program, line):
    code, out, err = original(program, line)
    assert code == 0, err
    assert "global batch 4 = micro-batch 4 x accumulation 1 x replicas 1" in out


STAGED = "--pipeline --shards 2 --pipeline-splits b2/0/relu --gradient-accumulation-count 2 --enable-recompute"
PIPELINED = {
    "tensorflow": (
        "tf1:train.py",
        f"--generated-data --dataset cifar-10 --model-size 8 --iterations 2 --batch-size 2 {STAGED} --precision 32.32",
        r"^step: .* img/sec: ",
    ),
    "pytorch": (
        "pytorch:train.py",
        "--data generated --model resnet18 --iterations 1 --epoch 1 --micro-batch-size 2 --gradient-accumulation 2"
        " --pipeline-splits layer3/0 --norm-type group --precision 32.32 --validation-mode none -- --image-size 32",
        r"^\[INFO\] throughput: *(.*?) samples\/sec$",
    ),
}


@pytest.mark.dist
@pytest.mark.usefixtures("two_cores", "forked_workers")
@pytest.mark.parametrize(("program", "line", "pattern"), PIPELINED.values(), ids=PIPELINED)
def test_a_pipelined_program_trains(original, program, line, pattern):
    """It starts a worker per stage."""
    code, out, err = original(program, line)
    assert code == 0, err
    assert "pipeline of 2 stages, grouped: 2 micro-batches per update" in out
    assert re.search(pattern, out, re.M), "the workers print as the program did"


INFERRED = {
    "pytorch": (
        "pytorch:inference/run_benchmark.py",
        "--data generated --model resnet18 --iterations 4 --micro-batch-size 2 --norm-type group -- --image-size 32",
    ),
    "tensorflow": (
        "tf1:validation.py",
        "--model resnet --model-size 8 --dataset cifar-10 --batch-size 4 --generated-data -- --iterations 4",
    ),
    "popart": ("popart:resnet_synthetic_benchmark.py", "--size 8 --batch-size 4 --steps 1 --batches-per-step 4"),
}


@pytest.mark.parametrize(("program", "line"), INFERRED.values(), ids=INFERRED)
def test_a_program_measures_inference(original, program, line):
    code, out, err = original(program, line)
    assert code == 0, err
    assert "samples/sec (mean)" in out or "images/s" in out


@pytest.mark.dist
def test_a_program_measures_a_server(original):
    """As the originals' spec starts it, except for the size."""
    code, out, err = original(
        "pytorch:inference/run_benchmark_with_triton_server.py",
        "-s -k 'test_single_model[resnet50-resnet50-RequestType.SYNC-1]' --benchmark_only=true ../tests/tritonserver/"
        " -- --micro-batch-size 2 --iterations 8 --image-size 32 --precision 32.32 --device cpu --threads 1",
    )
    assert code == 0, err
    assert "samples/sec (mean)" in out
    assert "served to 1 client, SYNC" in out


@pytest.mark.run
def test_the_loader_is_measured_and_the_data_checked(original, image_folder):
    code, out, err = original(
        "pytorch:datasets/host_benchmark.py",
        f"--data imagenet --imagenet-data-path {image_folder} --micro-batch-size 4 --iterations 1 -- --image-size 32"
        " --seconds 0.05",
    )
    assert code == 0, err
    assert "Throughput of the iteration:" in out
    _, out, _ = original("pytorch:datasets/validate_dataset.py", f"--imagenet-data-path {image_folder}")
    assert "corrupted, or not the ILSVRC 2012 folder" in out


def test_a_run_is_continued_validated_and_averaged(original):
    line = "--generated-data --dataset cifar-10 --model-size 8 --iterations 2 --batch-size 4 --logs-path run"
    assert original("tf1:train.py", line)[0] == 0
    code, out, _ = original("tf1:train.py", "--restore-path run --epochs 2 --dataset cifar-10 --generated-data")
    assert (code, "4 updates = 2 epochs" in out) == (0, True)
    code, out, _ = original("tf1:restore.py", "--restore-path run")
    assert (code, "a larger --epochs continues the run" in out) == (0, True)
    assert "Accuracy on test set" in original("pytorch:validate.py", "--checkpoint-input-path run")[1]
    line = "--restore-path run --filename average --mode mean --discard-last 1"
    assert "averaged 2 checkpoints (mean): ckpt-0, ckpt-2" in original("tf1:weight_avg.py", line)[1]


def test_show_translation_prints_the_line_and_runs_nothing(original, tmp_path):
    code, out, err = original(
        "tf1:train.py", "--dataset imagenet --data-dir 'my data' --fp-exceptions --show-translation"
    )
    line, *notes = out.splitlines()
    assert (code, err) == (0, "")
    assert line.startswith("falconet train ")
    assert "my data" in shlex.split(line)
    assert notes[0].startswith("note: --fp-exceptions: always on")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", ["pytorch:inference/run_benchmark.py", "pytorch:datasets/host_benchmark.py"])
def test_the_sample_photos_are_where_make_get_data_puts_them(original, program):
    code, out, err = original(program, "--data real --show-translation")
    assert code == 0, err
    assert f"--data-dir {COMPAT / 'pytorch/data/images'} " in out


def test_falconets_options_follow_two_dashes(original):
    _, out, _ = original("pytorch:train.py", "--lr 2 --show-translation -- --image-size 64")
    assert out.splitlines()[0].endswith(" --image-size 64")


@pytest.mark.parametrize("line", ["--help", "--model efficientnet --help", "-h"])
def test_help_lists_the_options_and_what_they_become(original, line):
    code, out, _ = original("tf1:train.py", line)
    assert code == 0
    assert "--pipeline-splits TEXT ..." in out
    assert "--momentum: the same" in out


EFFICIENTNET = """\
efficientnet B4 on imagenet:
  --model-size TEXT (default B4)
      The layers of a resnet or resnext; B0 to B7, also 0 to 7, of an efficientnet. Here --model: a part of
      the model's name
  --group-dim NUMBER (default 1)
"""


def test_help_of_a_model_has_its_options_with_their_defaults_and_meaning(original):
    code, out, _ = original("tf1:train.py", "--model efficientnet --model-size 4 --help")
    assert code == 0
    assert EFFICIENTNET in out
    first, _, rest = out.partition("every model (defaults are those of this one):\n")
    assert "  --dropout-rate NUMBER (default 0.4)\n      Dropout before the classifier. Here --efficientnet-" in first
    assert "  --no-se\n      Without it: EfficientNet: squeeze and excitation in every block. Here " in first
    assert "  --epochs, --epoch NUMBER (default 350)\n      Passes over the training images, such as 2.5. Here" in rest
    assert "  --label-smoothing NUMBER (default 0.1)\n" in rest
    assert "--use-bypass" not in out, "which is squeezenet's"
    assert "auto:" not in first


def test_help_of_a_model_on_cifar_has_the_defaults_of_cifar(original):
    _, out, _ = original("tf1:train.py", "--model resnext --dataset cifar-10 --help")
    assert "resnext 11 on cifar-10:\n" in out
    assert "  --batch-size, --micro-batch-size NUMBER (default 8)\n" in out
    assert "--convolution-groups NUMBER (default 32)" in out


def test_help_of_a_line_with_a_mistake_is_that_of_all_models(original):
    code, out, _ = original("tf1:train.py", "--model efficientnet --model-size 9 --help")
    assert (code, "--use-bypass" in out) == (0, True)


def test_defaults_in_the_help_are_those_of_the_models():
    found = {f"efficientnet-{size.lower()}": shape for size, shape in EFFICIENTNETS.items()}
    assert found == {
        name: (str(size.width), str(size.depth), str(size.side), str(size.dropout)) for name, size in SIZES.items()
    }
    model = Model()
    assert (model.efficientnet_expand_ratio, model.efficientnet_group_dim) == (6, 1)
    assert (model.efficientnet_depth_divisor, model.efficientnet_top_width) == (8, 1280)
    assert (model.resnext_groups, model.resnext_group_dim) == (32, 4)


def test_a_mistake_is_one_line_under_the_scripts_name(original):
    code, out, err = original("pytorch:train.py", "--optimiser SGD")
    assert (code, out) == (2, "")
    assert err == "train.py: --optimiser is the TensorFlow program's; here it is --optimizer\n"


def test_a_mistake_of_the_benchmark_runner_is_under_its_name(original):
    code, _, err = original("tool:examples_utils benchmark", "--benchmarks x")
    assert (code, err) == (2, "examples_utils: unknown option --benchmarks; did you mean '--benchmark'?\n")


def test_only_the_first_of_several_processes_prints_notes(original, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = original("pytorch:train.py", "--optimiser SGD")
    assert (code, err) == (2, "")


def test_a_script_finds_the_configs_in_its_folder():
    line = [sys.executable, "train.py", "--config", "resnet50-pod64", "--show-translation"]
    run = subprocess.run(line, cwd=COMPAT / "pytorch/train", capture_output=True, text=True, check=True)
    assert "--gradient-accumulation 14" in run.stdout
    assert "--replicas 64" in run.stdout


def test_gc_profile_sets_the_run_folder_and_becomes_the_program(capfd, tmp_path):
    """Ctrl-C and SIGTERM then reach the program alone, which saves before it ends."""
    wrapper = [sys.executable, "-c", "from falconet.legacy.programs import gc_profile; gc_profile()"]
    program = [sys.executable, "-c", "import os; print(os.getpid(), os.environ['FALCONET_RUNS'])"]
    with subprocess.Popen(
        [*wrapper, "-d", str(tmp_path / "profile_dir"), "--", *program], stdout=subprocess.PIPE, text=True
    ) as started:
        said, _ = started.communicate()
    assert (started.returncode, said) == (0, f"{started.pid} {tmp_path / 'profile_dir'}\n")
    assert gc_profile(["-d", "profile_dir"]) == 2
    assert capfd.readouterr().err == "usage: gc-profile -d FOLDER -- PROGRAM [arguments]\n"
    assert gc_profile(["-d", "profile_dir", "--", "no-such-program"]) == 2
    assert capfd.readouterr().err == "gc-profile: no-such-program: No such file or directory\n"


def test_a_log_dir_that_gc_profile_replaces_is_noted(original, monkeypatch, tmp_path):
    monkeypatch.setenv("FALCONET_RUNS", str(tmp_path / "profile_dir"))
    line = "--generated-data --dataset cifar-10 --model-size 8 --iterations 1 --batch-size 4 --log-dir mine"
    code, _, err = original("tf1:train.py", line)
    expected = (
        f"train.py: note: FALCONET_RUNS={tmp_path}/profile_dir, set by `gc-profile -d` or `falconet bench`, takes"
    )
    assert (code, err) == (0, f"{expected} precedence over mine, which this line asks for\n")
    assert [path.name for path in tmp_path.iterdir()] == ["profile_dir"]


# Packages that a canonical option or a command needs, by the extra of pyproject.toml that installs them.
NEEDED = {"wandb": "wandb", "wandb-project": "wandb", "tensorboard": "tensorboard", "clients": "serve"}


@pytest.mark.parametrize(("folder", "dialect"), [("pytorch", "pytorch"), ("tensorflow", "tf1"), ("popart", "popart")])
def test_requirements_install_what_the_options_need(folder, dialect):
    (own,) = re.findall(r"^-e \.\./\.\.\[(.*)\]$", (COMPAT / folder / "requirements.txt").read_text(), re.M)
    programs = [program for program in TABLES.values() if program.dialect == dialect]
    set_by_options = {new for program in programs for option in program.options for new in option.new}
    always = {"tensorboard"} if dialect == "popart" else set()  # the original always wrote its scalars
    assert set(own.split(",")) == {NEEDED[name] for name in (set_by_options | always) & NEEDED.keys()}


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["pytorch", "tensorflow"])
def test_the_tests_in_an_originals_folder_pass(folder):
    """As its README says: `pytest`."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(line, cwd=COMPAT / folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_the_benchmark_runner_has_its_old_name():
    line = [sys.executable, "-m", "examples_utils", "benchmark", "--spec", "benchmarks.yml", "--show-translation"]
    run = subprocess.run(line, cwd=COMPAT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("falconet bench --spec benchmarks.yml")
    wrong = subprocess.run(line[:3], cwd=COMPAT, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.splitlines()[0][:6]) == (2, "usage:")


def test_ctrl_c_during_startup_of_a_script_prints_nothing(tmp_path):
    (tmp_path / "yaml.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    line = [sys.executable, COMPAT / "pytorch/train/train.py", "--help"]
    ended = subprocess.run(line, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("asked", ["--help", "--config resnet50 --show-translation"])
def test_a_closed_stdout_is_not_an_error(asked):
    """As `train.py --help | head` leaves it."""
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, COMPAT / "pytorch/train/train.py", *asked.split()]
    ended = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
