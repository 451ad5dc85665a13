"""`poprun --host` over a real ssh: two addresses of this machine as two hosts."""

import getpass
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gloo
from watched import wait_until_gone

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(not SSHD or not shutil.which("ssh-keygen"), reason="sshd and ssh-keygen are not installed"),
    pytest.mark.skipif(os.getuid() == 0 and not Path("/run/sshd").exists(), reason="sshd needs the folder /run/sshd"),
]
HOSTS = ["127.0.0.2", "127.0.0.3"]  # not 127.0.0.1, which would be this host
LIMIT = 300


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """An ssh command that needs no password, and the server it talks to."""
    home, port = tmp_path_factory.mktemp("ssh"), gloo.free_port()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True)
    (home / "allowed").write_text((home / "user.pub").read_text())
    settings = [
        f"Port {port}",
        *(f"ListenAddress {host}" for host in HOSTS),
        f"HostKey {home / 'host'}",
        f"AuthorizedKeysFile {home / 'allowed'}",
        "StrictModes no",
        "PidFile none",
        "PermitRootLogin yes",
        f"SetEnv HOME={home}",  # else the shell's start-up files may print
    ]
    (home / "config").write_text("\n".join(settings) + "\n")
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(home / "config")], stderr=subprocess.PIPE)
    ssh = f"ssh -p {port} -i {home / 'user'} -l {getpass.getuser()} -o StrictHostKeyChecking=no -o LogLevel=ERROR"
    command = f"{ssh} -o UserKnownHostsFile=/dev/null -o BatchMode=yes"
    deadline = time.monotonic() + LIMIT
    while subprocess.run([*command.split(), HOSTS[0], "true"], capture_output=True).returncode:
        assert time.monotonic() < deadline, server.poll()
        time.sleep(0.1)
    yield command
    server.terminate()
    server.communicate()


def begin(shell, program, cwd):
    mpi = f"--tag-output --mca plm_rsh_agent '{shell}' -x PYTHONPATH -x SAID='two words'"
    flags = ["--num-replicas", "2", "--host", ",".join(HOSTS), f"--mpi-global-args={mpi}"]
    line = [sys.executable, "-m", "falconet.legacy.poprun", *flags, sys.executable, *program]
    env = {"PYTHONPATH": ""} | os.environ | {"MASTER_PORT": str(gloo.free_port())}
    return subprocess.Popen(line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_folder_variables_and_arguments_arrive_unchanged(shell, tmp_path):
    values = "*(os.environ[name] for name in ('RANK', 'MASTER_ADDR', 'SAID')), os.getcwd(), sys.argv"
    show = f"import os, sys; print({values})"
    process = begin(shell, ["-c", show, "$HOME", "it's"], tmp_path)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, "")
    rest = f"127.0.0.2 two words {tmp_path} ['-c', '$HOME', \"it's\"]"
    assert sorted(out.splitlines()) == [f"[1,0]:0 {rest}", f"[1,1]:1 {rest}"]


def test_when_poprun_is_killed_the_other_hosts_programs_end(shell, tmp_path):
    show = "pathlib.Path(os.environ['RANK']).write_text(str(os.getpid()))"
    program = f"import pathlib, os, time; {show}; time.sleep(600)"
    process = begin(shell, ["-c", program], tmp_path)
    deadline = time.monotonic() + LIMIT
    files = [tmp_path / "0", tmp_path / "1"]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    wait_until_gone(*(int(file.read_text()) for file in files))
