"""The lines that start a job, as a shell and torch's parser read them."""

import shlex
import socket

import pytest
from torch.distributed.run import parse_args

from falconet.errors import ConfigError
from falconet.legacy.hosts import Job, starts


def job(**changes):
    program = ["python3", "train.py", "--name", "a b", "$HOME"]
    values = {"program": program, "processes": 4, "port": 29501, "folder": "/data/my run", "variables": {"A": "x y"}}
    return Job(**values | changes)


def read(argv):
    """torchrun's view of a line."""
    assert list(argv[1:3]) == ["-m", "falconet.parallel.torchrun"]
    return parse_args(list(argv[3:]))


def test_on_this_host_torchrun_is_started_with_all_processes():
    (start,) = starts(job())
    args = read(start.argv)
    assert not start.remote
    assert (args.standalone, args.nproc_per_node, args.no_python) == (True, "4", True)
    assert [args.training_script, *args.training_script_args] == ["python3", "train.py", "--name", "a b", "$HOME"]


def test_on_other_hosts_ssh_starts_the_same_in_the_same_folder_with_the_variables():
    each = starts(job(hosts=["a", "b"], remote_shell=["ssh", "-p", "22"]))
    assert [start.host for start in each] == ["a", "b"]
    for number, start in enumerate(each):
        assert list(start.argv[:4]) == ["ssh", "-p", "22", start.host]
        cd, folder, also, execute, env, variable, *rest = shlex.split(start.argv[4])
        assert (cd, folder, also, execute, env, variable) == ("cd", "/data/my run", "&&", "exec", "env", "A=x y")
        args = read(rest)
        assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", number, "2")
        assert (args.master_addr, args.master_port) == ("a", 29501)
        assert args.training_script_args[-1] == "$HOME", "not expanded on the way"


def test_the_printed_lines_can_be_pasted():
    (start,) = starts(job())
    assert shlex.split(start.shown) == ["env", "A=x y", *start.argv]


@pytest.mark.parametrize(("shown", "filters"), [([0], ["0", "2"]), ([2, 3], ["2", "0,1"]), ([1, 2], ["1", "0"])])
def test_the_output_of_some_ranks_is_filtered_on_each_host(shown, filters):
    each = starts(job(hosts=["a", "b"], shown=shown))
    found = [read(shlex.split(start.argv[2])[6:]) for start in each]
    assert [args.local_ranks_filter for args in found] == filters
    assert {args.tee for args in found} == {"3"}


def test_a_first_host_that_the_others_could_not_find_is_refused():
    with pytest.raises(ConfigError, match="--host: the first is localhost, which means another host to b"):
        starts(job(hosts=["localhost", "b"]))


def test_two_names_of_this_host_are_refused():
    name = socket.gethostname()
    with pytest.raises(ConfigError) as caught:
        starts(job(hosts=[name, "localhost"], processes=1))
    assert str(caught.value) == f"--host: {name} and localhost are both this host; expected each host once"
