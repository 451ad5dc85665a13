"""poprun's flags: every one that the originals used, spelled as they spelled it."""

import shlex

import pytest

from falconet.errors import ConfigError
from falconet.legacy.poprun import FLAGS, OF_THE_IPU, read_poprun, with_script
from translations import lacking, refusal

# The lines of the originals' own texts; the programs' arguments are shortened.
PARTITION = "--vipu-server-host=10.1.3.101 --vipu-partition=p64 --reset-partition=no --update-partition=no"
HOSTS = "10.1.3.101,10.1.3.102,10.1.3.103,10.1.3.104"
SEEDS = {
    "-v --numa-aware 1 --num-instances 8 --num-replicas 16 --ipus-per-replica 1 --mpi-local-args='--tag-output'"
    " python3 t": {
        "replicas": 16,
        "instances": 8,
        "stages": 1,
        "numa_aware": True,
        "verbose": True,
        "tagged": True,
        "notes": [],
    },
    "-v --numa-aware 1 --num-instances 4 --num-replicas 4 --ipus-per-replica --mpi-local-args='--tag-output'"
    " python3 t": {
        "replicas": 4,
        "stages": 4,
        "tagged": True,
        "notes": ["--ipus-per-replica: has no value; using 4, as the README that omits it means"],
    },
    f"-v --host {HOSTS} --numa-aware=yes {PARTITION}"
    " --mpi-global-args='--tag-output --mca btl_tcp_if_include 10.1.3.0/24'"
    " --mpi-local-args='-x LD_LIBRARY_PATH -x TF_CPP_VMODULE=poplar_compiler=1 -x TF_POPLAR_FLAGS=--a=/b'"
    " --num-replicas=16 --num-instances=16 --ipus-per-replica 4 python3 t": {
        "replicas": 16,
        "stages": 4,
        "hosts": tuple(HOSTS.split(",")),
        "tagged": True,
        "network": "10.1.3.0/24",
        "exported": {
            "LD_LIBRARY_PATH": None,
            "TF_CPP_VMODULE": "poplar_compiler=1",
            "TF_POPLAR_FLAGS": "--a=/b",
        },
        "notes": [
            "--vipu-server-host, --vipu-partition, --reset-partition, --update-partition: no effect, there is no IPU"
            " here"
        ],
    },
    "-v --host 10.10.19.150,10.10.19.151 --numa-aware=yes --vipu-server-host=10.3.19.150 --vipu-server-timeout=300"
    " --vipu-cluster=gcl --num-ilds=2 --mpi-global-args='--tag-output --allow-run-as-root --mca oob_tcp_if_include"
    " 10.10.0.0/16 --mca btl_tcp_if_include 10.10.0.0/16' --mpi-local-args='-x PATH -x POPLAR_ENGINE_OPTIONS'"
    " --ipus-per-replica 4 --num-replicas=32 --num-instances=32 python3 t": {
        "replicas": 32,
        "network": "10.10.0.0/16",
        "exported": {"PATH": None, "POPLAR_ENGINE_OPTIONS": None},
        "notes": [
            "--mpi-global-args --allow-run-as-root: no effect without mpirun",
            "--vipu-server-host, --vipu-server-timeout, --vipu-cluster, --num-ilds: no effect, there is no IPU here",
        ],
    },
    "--numa-aware=yes --num-replicas=4 --num-instances=4 --ipus-per-replica 4 python t": {"replicas": 4, "stages": 4},
    "--num-replicas 4 --ipus-per-replica 1 --num-instances 4 --numa-aware 1 python3 t": {"numa_aware": True},
    "--num-instances=2 --num-replicas=2 python3 t": {"instances": 2},
}


def test_the_lines_of_the_originals_are_understood():
    assert lacking(SEEDS.items(), lambda line: vars(read_poprun(shlex.split(line)))) == []
    assert {read_poprun(shlex.split(line)).program[-1] for line in SEEDS} == {"t"}


def test_flags_of_the_ipu_are_noted_to_have_no_effect():
    for flag in OF_THE_IPU:
        for line in ([flag, "x", "program"], [f"{flag}=x", "program"]):
            assert read_poprun(line).notes == [f"{flag}: no effect, there is no IPU here"]


@pytest.mark.parametrize("flag", [name for name in FLAGS if name.startswith("--num-") or name == "--host"])
def test_a_value_may_follow_a_space_or_an_equals_sign(flag):
    assert read_poprun([flag, "2", "program"]) == read_poprun([f"{flag}=2", "program"])


PROGRAMS = {
    "falconet train --num-replicas x": ("falconet", "train", "--num-replicas", "x"),
    "--numa-aware falconet train": ("falconet", "train"),
    "--numa-aware no -- falconet train": ("falconet", "train"),
}


@pytest.mark.parametrize(("line", "program"), PROGRAMS.items())
def test_the_program_starts_where_the_flags_end(line, program):
    assert read_poprun(line.split()).program == program


def test_without_replicas_there_is_one_per_instance():
    assert read_poprun(["--num-instances", "4", "program"]).replicas == 4
    assert read_poprun(["program"]).replicas == 1


def test_hosts_and_remote_shells_of_mpirun_are_used():
    asked = read_poprun(["--mpi-global-args", "-H a:2,b:2 --mca plm_rsh_agent 'ssh -p 22'", "--num-replicas=2", "t"])
    assert asked.hosts == ("a", "b")
    assert asked.remote_shell == ("ssh", "-p", "22")


MISTAKES = {
    "--num-replica 2 t": "--num-replica: poprun has no such flag; did you mean '--num-replicas'?",
    "--num-replicas two t": "--num-replicas: got 'two', expected a whole number, at least 1",
    "--num-replicas 0 t": "--num-replicas: got '0', expected a whole number, at least 1",
    "--num-replicas --num-instances 2 t": "--num-replicas: needs a value",
    "--num-replicas 3 --num-instances 2 t": "--num-replicas: got 3, expected a multiple of --num-instances, which is 2",
    "--num-replicas 3 --host a,b t": "--num-replicas: got 3, expected a multiple of the 2 hosts",
    "--num-replicas 2 --host a,a t": "--host: got 'a,a', expected each host once",
    "--host a,,b t": "--host: got 'a,,b', expected names or addresses",
    "--host=-oProxyCommand=x t": "--host: got '-oProxyCommand=x', expected names or addresses",
    "--numa-aware=maybe t": "--numa-aware: got 'maybe', expected yes or no",
    "--mpi-local-args=-x t": "--mpi-local-args: -x needs 1 value",
    "--mpi-local-args=--tag-outputs t": "--tag-outputs is not supported; did you mean '--tag-output'?",
    '--mpi-local-args="-x \'A" t': "which is not a shell line: No closing quotation",
    "--num-replicas 2 --only-output-from-instance 2 t": "--only-output-from-instance: got 2, expected less than",
    "--num-replicas 2": "PROGRAM: required after the flags",
}


def test_a_mistake_is_answered_in_one_line():
    answers = {line: refusal(lambda line=line: read_poprun(shlex.split(line))) for line in MISTAKES}
    assert [(line, text) for line, text in answers.items() if MISTAKES[line] not in text or "\n" in text] == []


SCRIPTS = {  # the words after poprun's flags, and what is run in a folder with a train.py
    "python3 --config mk2_resnet50_bn_128ipus": "python3 train.py --config mk2_resnet50_bn_128ipus",
    "/usr/bin/python3.11 --data-dir d": "/usr/bin/python3.11 train.py --data-dir d",
    "python3 train.py --config x": None,
    "python3 -m falconet train": None,
    "python3 --version": None,
    "falconet train --epoch 2": None,
    "python3": None,
}


def test_a_missing_script_defaults_to_train_py_with_a_note():
    for line, expected in SCRIPTS.items():
        program, note = with_script(line.split(), ["configs.yml", "train.py"])
        assert " ".join(program) == (expected or line)
        python, option = [*line.split(), ""][:2]
        assert note == (f"{python} {option}: names no script; running {python} train.py" if expected else None)


def test_a_missing_script_without_a_train_py_is_refused():
    with pytest.raises(ConfigError, match="python3 --config: names no script; expected `python3 "):
        with_script(["python3", "--config", "x"], ["resnet_main.py"])


def test_the_cache_of_compiled_programs_becomes_that_of_kernels():
    line = ["--num-replicas", "2", "--executable-cache-path=cache", "python3", "train.py"]
    assert read_poprun(line).exported == {"TRITON_CACHE_DIR": "cache"}
    assert read_poprun(line).notes == []
    exporting = ["--mpi-local-args=-x TRITON_CACHE_DIR=own", *line]
    assert read_poprun(exporting).exported == {"TRITON_CACHE_DIR": "own"}
    assert read_poprun(["--executable-cache-path=", "python3", "train.py"]).exported == {}


@pytest.mark.parametrize("flag", ["-v", "-vv", "--vv", "--verbose"])
def test_every_spelling_of_verbose_is_accepted(flag):
    assert read_poprun(shlex.split(f"{flag} --num-replicas 2 --num-instances 2 python3 t")).verbose
