"""Every process finds its place, whatever launcher started it."""

import json

import pytest

from falconet.errors import ConfigError
from falconet.parallel.environment import (
    OURS,
    OWN,
    TETHERED,
    Place,
    asked_of_launcher,
    attempt,
    cores_of,
    find_place,
    first_host,
    is_one_per_host,
    threads_of,
)

CLUSTER = {"cluster": {"chief": ["a:1234"], "worker": ["b:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
PLACES = {
    "torchrun": (
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "h",
            "MASTER_PORT": "7",
        },
        Place(launcher="torchrun", rank=3, size=4, local_rank=1, local_size=2, address="h", port=7),
    ),
    "torchrun on one host, whose name other hosts know": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"},
        Place(launcher="torchrun", rank=1, size=2, local_rank=1, local_size=2, address="127.0.0.1"),
    ),
    "torchrun on one host, which holds the store itself": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
        | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        Place(launcher="torchrun", rank=1, size=2, local_rank=1, local_size=2, address="h"),
    ),
    "torchrun, which does not say how many are on this host": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
        Place(launcher="torchrun", rank=1, size=2, local_rank=1, local_size=2, address="h"),
    ),
    "srun on one node": (
        {
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_NODELIST": "gpu07",
        },
        Place(launcher="srun", rank=1, size=2, local_rank=1, local_size=2, port=20_000),
    ),
    "mpirun": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        Place(launcher="mpirun", rank=1, size=2, local_rank=1, local_size=2),
    ),
    "MPICH": (
        {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"},
        Place(launcher="mpiexec", rank=0, size=3, local_rank=0, local_size=3),
    ),
    "srun on three nodes": (
        {
            "SLURM_PROCID": "4",
            "SLURM_STEP_NUM_TASKS": "5",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
            "SLURM_NODEID": "2",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NODELIST": "gpu[07-08],cpu1",
            "SLURM_JOB_ID": "20003",
        },
        Place(launcher="srun", rank=4, size=5, local_rank=0, local_size=1, address="gpu07", port=20_003),
    ),
    "mpirun with one TF_CONFIG for all": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "TF_CONFIG": '{"cluster":{"worker":["worker0:3636","worker1:3636"]},"task":{"type":"worker"}}',
        },
        Place(launcher="mpirun", rank=1, size=2, local_rank=0, local_size=1, address="worker0", port=3636),
    ),
    "TF_CONFIG": (
        {"TF_CONFIG": json.dumps(CLUSTER)},
        Place(launcher="TF_CONFIG", rank=2, size=3, local_rank=1, local_size=2, address="a", port=1234),
    ),
    "torchrun, with variables that are empty": (
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "",
            "LOCAL_WORLD_SIZE": "",
            "MASTER_ADDR": "",
            "MASTER_PORT": "",
        },
        Place(launcher="torchrun", rank=1, size=2, local_rank=1, local_size=2),
    ),
    "srun, with variables that are empty": (
        {
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NODEID": "",
            "SLURM_LOCALID": "1",
            "SLURM_JOB_ID": "",
            "SLURM_STEP_NODELIST": "",
        },
        Place(launcher="srun", rank=1, size=2, local_rank=1, local_size=2, port=20_000),
    ),
    "variables of every launcher, all empty": (
        dict.fromkeys(("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TF_CONFIG"), "")
        | {"SLURM_STEP_NUM_TASKS": ""},
        None,
    ),
    "no launcher": ({"PATH": "/bin"}, None),
    "torchrun of one": ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    "a batch script without srun": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),
    "TF_CONFIG of an estimator alone": ({"TF_CONFIG": "{}"}, None),
}


@pytest.mark.parametrize(("variables", "place"), PLACES.values(), ids=PLACES.keys())
def test_a_process_finds_its_place(variables, place):
    assert find_place(variables) == place


APART = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("RANK", "SIZE", "LOCAL_SIZE"), "021", strict=True)}
APART |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "MASTER_ADDR": "a"}
MISTAKES = {
    "RANK: got 'x' from the launcher, expected an integer": {"RANK": "x", "WORLD_SIZE": "2"},
    "WORLD_SIZE: got 'two' from the launcher": {"RANK": "0", "WORLD_SIZE": "two"},
    "PMI_SIZE: got '' from the launcher": {"PMI_RANK": "0", "PMI_SIZE": ""},
    "torchrun: this is process 2 of 2": {"RANK": "2", "WORLD_SIZE": "2"},
    "MASTER_PORT: got 99999": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"},
    "MASTER_ADDR: required under mpirun on several hosts": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "TF_CONFIG: cannot be parsed": {"TF_CONFIG": "{'cluster'"},
    "TF_CONFIG: cannot be parsed; .*JSONDecodeError": APART | {"TF_CONFIG": "{'cluster'"},
    "TF_CONFIG: cannot be parsed; .*AttributeError": APART | {"TF_CONFIG": "[]"},
    "TF_CONFIG: cannot be parsed; .*'a' is not host:port": APART | {"TF_CONFIG": '{"cluster": {"worker": ["a"]}}'},
}


@pytest.mark.parametrize(("message", "variables"), MISTAKES.items())
def test_nonsense_is_refused_in_one_line(message, variables):
    with pytest.raises(ConfigError, match=message) as refused:
        find_place(variables)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("nodes", "host"), [("n1", "n1"), ("n1,n2", "n1"), ("a[3-5],b", "a3"), ("a[007,9]", "a007"), ("a[1-2]-x", "a1-x")]
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(("stages", "asked"), [("3", (2, 3)), ("", None)])
def test_what_the_launcher_was_asked_for_is_in_its_variables(stages, asked):
    assert asked_of_launcher({"FALCONET_REPLICAS": "2", "FALCONET_STAGES": stages}) == asked


def test_attempts_are_counted_by_either_launcher():
    assert attempt({}) == 0
    assert attempt({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2
    assert attempt({"FALCONET_ATTEMPT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}) == 1


TWO = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
TASKS = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}
CORES = {
    "alone": ({}, 16, 16, 16),
    "alone in a container": ({}, 64, 4, 4),
    "torchrun divides": ({"RANK": "0", "WORLD_SIZE": "4"}, 16, 16, 4),
    "torchrun in a container divides what it may use": ({"RANK": "0", "WORLD_SIZE": "4"}, 64, 8, 2),
    "mpirun binds to a core": (TWO | {"OMPI_MCA_orte_bound_at_launch": "1"}, 16, 1, 1),
    "mpirun binds two to a socket": (TWO | {"OMPI_MCA_orte_bound_at_launch": "1"}, 8, 8, 4),
    "mpirun without binding": (TWO | {"OMPI_MCA_hwloc_base_binding_policy": "none"}, 16, 16, 8),
    "mpiexec binds": ({"PMI_RANK": "0", "PMI_SIZE": "2", "HYDRA_USER_PROVIDED_BINDING": "1"}, 8, 4, 4),
    "srun binds each task to its four": (TASKS | {"SLURM_CPU_BIND_TYPE": "mask_cpu:"}, 64, 4, 4),
    "srun without binding": (TASKS | {"SLURM_CPU_BIND_TYPE": "none"}, 64, 16, 4),
    "more processes than cores": ({"RANK": "0", "WORLD_SIZE": "8"}, 2, 2, 1),
}


@pytest.mark.parametrize(("variables", "host", "own", "cores"), CORES.values(), ids=CORES.keys())
def test_cores_are_divided_unless_the_launcher_binds_them(variables, host, own, cores):
    assert cores_of(variables, host=host, own=own) == cores


def test_future_processes_share_the_cores():
    assert cores_of({}, host=8, own=8, expected=4) == 2


def test_hosts_that_tf_config_names_once_have_one_process_each():
    config = {"task": {"type": "worker", "index": 1}}
    hosts = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, **config})}
    shared = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "a:2"]}, **config})}
    assert [is_one_per_host(variables, find_place(variables)) for variables in (hosts, shared)] == [True, False]


def test_mpirun_reports_hosts_that_have_one_process_each():
    two = APART | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert [is_one_per_host(variables, find_place(variables)) for variables in (APART, two)] == [True, False]


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
THREADS = {
    "unset": ({}, 8),
    "set": ({"OMP_NUM_THREADS": "3"}, 3),
    "nested": ({"OMP_NUM_THREADS": "3,2"}, 3),
    "empty": ({"OMP_NUM_THREADS": ""}, 8),
    "invalid, which OpenMP ignores": ({"OMP_NUM_THREADS": "0"}, 8),
    "torchrun's own": (TORCHRUN, 8),
    "the user's under torchrun": (TORCHRUN | {"OMP_NUM_THREADS": "2"}, 2),
    "the user's under our launcher": (TORCHRUN | {"FALCONET_LAUNCHER": "77"}, 1),
}


@pytest.mark.parametrize(("variables", "threads"), THREADS.values(), ids=THREADS)
def test_omp_num_threads_is_respected(variables, threads):
    assert threads_of(variables, cores=8) == threads


@pytest.mark.parametrize(("own", "name"), [({}, "torchrun"), ({TETHERED: "poprun"}, "poprun"), ({OWN: "7"}, OURS)])
def test_a_launcher_has_the_name_that_its_user_knows(own, name):
    place = find_place({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **own})
    assert place is not None
    assert place.launcher == name
