"""Free memory is the least of what the machine, the container and the batch job have left."""

import pytest

from falconet.parallel import host

USED = {"memory.max": "5000\n", "memory.current": "3000\n"}
FIRST = {"memory/memory.limit_in_bytes": "5000\n", "memory/memory.usage_in_bytes": "3000\n"}
NONE = {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "3000\n"}
JOB = "memory/slurm/uid_0/job_7"
WHOLE = 2_048_000  # what the machine has


def second(group, limit, used):
    return {f"{group}/memory.max": limit, f"{group}/memory.current": used}


def first(group, limit, used):
    return {f"{group}/memory.limit_in_bytes": limit, f"{group}/memory.usage_in_bytes": used}


DISK = "anon 7\nfile 900\nshmem 400\ninactive_file 300\nactive_file 200\n"
FIRST_DISK = "active_file 1\ncache 9\ntotal_active_file 30\ntotal_inactive_file 4\n"
STEP = "4:cpu,memory:/slurm/uid_0/job_7/step_0\n0::/\n"
CASES = {  # files below /sys/fs/cgroup, /proc/self/cgroup, bytes that are free
    "no groups at all": ({}, "", WHOLE),
    "a container without a limit": ({"memory.max": "max\n", "memory.current": "1000\n"}, "0::/\n", WHOLE),
    "a container": (USED, "0::/\n", 2000),
    "memory that holds files of a disk can be taken again": (USED | {"memory.stat": DISK}, "0::/\n", 2500),
    "more in use than there may be": (USED | {"memory.current": "6000\n"}, "0::/\n", 0),
    "a job above this process": (second("job", "700\n", "600\n"), "0::/job/step\n", 100),
    "the tightest of several": (
        USED | second("job", "max\n", "600\n") | second("job/step", "90\n", "60\n"),
        "0::/job/step\n",
        30,
    ),
    "another process's group": (USED | second("other", "700\n", "600\n"), "0::/job\n", 2000),
    "version 1: a container": (FIRST, "4:memory:/\n0::/\n", 2000),
    "version 1: no limit is a large number": (NONE, "4:memory:/\n", WHOLE),
    "version 1: files of a disk, of all groups below": (FIRST | {"memory/memory.stat": FIRST_DISK}, "", 2034),
    "version 1: a batch job": (NONE | first(JOB, "900\n", "500\n"), STEP, 400),
    "version 1: a path of the host's, not seen in a container": (FIRST, "4:memory:/docker/of-the-host\n", 2000),
    "both versions at once": (FIRST | second("job", "700\n", "600\n"), "4:memory:/\n0::/job\n", 100),
}


@pytest.mark.parametrize(("files", "membership", "free"), CASES.values(), ids=CASES.keys())
def test_free_memory_is_the_machines_or_the_containers(tmp_path, monkeypatch, files, membership, free):
    machine = {"meminfo": "MemTotal: 9000 kB\nMemAvailable:  2000 kB\n", "membership": membership}
    for name, text in (machine | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    assert host.available() == free


def test_this_machine_has_free_memory():
    assert host.available() > 0
