"""`falconet watch`: runs of other processes, on a terminal, in a pipe and as a page; and mistakes."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.request

import pytest

from falconet.commands import watch
from falconet.report.run_files import read_run
from growing_runs import growing
from report_runs import write_run
from runs import LIMIT, begin, finish, wait_for

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")


class Terminal:
    """A command on a terminal of its own; what it shows is read as it comes."""

    def __init__(self, command, cwd, *, width=100, height=30, **variables):
        self._ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.modes, self.text = termios.tcgetattr(self.theirs), ""
        self.process = subprocess.Popen(
            self.line(command),
            cwd=cwd,
            env=os.environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | variables,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
        )

    def line(self, command):
        return [sys.executable, "-m", "falconet", *command.split()]

    def read(self):
        while select.select([self._ours], [], [], 0.02)[0]:
            self.text += os.read(self._ours, 1 << 16).decode(errors="replace")

    def wait(self, words):
        def has_come():
            self.read()
            return words in CODES.sub("", self.text)

        wait_for(has_come, f"{words!r} in {self.text[-2000:]!r}")

    def press(self, key):
        os.write(self._ours, key.encode())

    def end(self):
        """The exit code, what is left below the dashboard's own screen, and whether the terminal is as it was."""

        def has_ended():
            self.read()
            return self.process.poll() is not None

        wait_for(has_ended, "the end")
        self.read()
        left = CODES.sub("", self.text.rpartition("\x1b[?1049l")[2])
        return self.process.returncode, left, termios.tcgetattr(self.theirs) == self.modes

    def close(self):
        os.close(self._ours)
        os.close(self.theirs)


class Shell(Terminal):
    """A shell that the terminal belongs to, so that Ctrl-Z stops what runs in it."""

    def line(self, command):
        # The first terminal that the leader of a session opens becomes its own.
        shell = f"exec {command} <>{os.ttyname(self.theirs)} >&0 2>&0"
        return ["sh", "-c", shell]

    def wait_for_prompt(self):
        """Until the dashboard has left its own screen, and what it showed last is followed by the shell's prompt."""

        def has_come():
            self.read()
            _, left, after = self.text.rpartition("\x1b[?1049l")
            return left and "under way" in after and CODES.sub("", after).endswith("$ ")

        wait_for(has_come, f"a prompt in {self.text[-2000:]!r}")


@pytest.fixture
def terminal(tmp_path):
    with contextlib.ExitStack() as opened:

        def start(command, *, kind=Terminal, **options):
            found = kind(command, tmp_path, **options)
            opened.callback(found.close)
            return found

        yield start


@pytest.mark.dist
def test_a_real_run_is_followed_from_before_its_start_to_its_end(tmp_path):
    (tmp_path / "runs/digits").mkdir(parents=True)
    watching = begin("watch runs/digits", tmp_path)
    training = begin("train --run-dir runs/digits --epoch 3", tmp_path)
    code, out, err = finish(watching)
    assert finish(training)[0] == 0
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if not line.startswith("waiting: ")]
    rows = [json.loads(line) for line in (tmp_path / "runs/digits/metrics.jsonl").read_text().splitlines()]
    losses = [f"{row['train/loss']:.4f}" for row in rows if "train/loss" in row]
    assert [re.match(r"epoch (\d)/3  train loss (\S+)", line).groups() for line in lines[:3]] == [
        (str(number), loss) for number, loss in enumerate(losses, 1)
    ]
    assert lines[3].startswith("runs/digits: finished, best accuracy ")
    assert len(lines) == 4


@pytest.mark.dist
def test_a_real_run_that_is_interrupted_says_so_and_then_is_followed_again(tmp_path):
    training = begin("train --run-dir run --epoch 400", tmp_path)
    log = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: log.exists() and log.stat().st_size, "a log point")
    assert read_run(tmp_path / "run").state == "going"
    training.send_signal(signal.SIGINT)
    assert finish(training)[0] == 130
    code, out, _ = finish(begin("watch run", tmp_path))
    assert code == 0
    assert out.splitlines()[-1].startswith("run: interrupted")
    before = read_run(tmp_path / "run").moments[-1].update
    restored = begin("restore run", tmp_path)
    wait_for(lambda: read_run(tmp_path / "run").moments[-1].update > before, "a log point of the restored run")
    assert read_run(tmp_path / "run").state == "going"
    assert read_run(tmp_path / "run").ending is None
    restored.send_signal(signal.SIGINT)
    assert finish(restored)[0] == 130


def test_a_run_that_fails_leaves_why(falconet, tmp_path):
    answer = falconet("train --run-dir run --epoch 2 --lr 1e30")
    assert answer.code == 2
    ending = json.loads((tmp_path / "run/report/ending.json").read_text())
    assert ending["kind"] == "failed"
    assert ending["reason"] in answer.err
    assert falconet("watch run").out.splitlines()[-1].startswith("run: failed: ")
    assert falconet("train --run-dir other --epoch 1").code == 0
    assert not (tmp_path / "other/report/ending.json").exists()


@pytest.mark.dist
def test_the_dashboard_grows_and_leaves_its_last_state_on_the_terminal(terminal, tmp_path):
    with growing(tmp_path / "run", 2) as run:
        screen = terminal("watch run")
        screen.wait("epoch 2 of 20")
        run.grow()
        screen.wait("epoch 3 of 20")
        run.end()
        code, left, is_clean = screen.end()
    assert (code, is_clean) == (0, True)
    assert "finished" in left
    assert "best accuracy 80.00 % after epoch 3" in left
    assert "q or Ctrl-C" not in left
    assert "\x1b[?25h" in screen.text, "the cursor is back"


@pytest.mark.dist
@pytest.mark.parametrize(("how", "expected"), [("q", 0), ("\x03", 130), ("SIGTERM", 130)])
def test_leaving_puts_the_terminal_in_order(terminal, tmp_path, how, expected):
    with growing(tmp_path / "run", 2):
        screen = terminal("watch run")
        screen.wait("epoch 2 of 20")
        if how == "q":
            screen.press("q")
        else:  # a terminal that is not the process's own sends no signal for ^C
            screen.process.send_signal(signal.SIGINT if how == "\x03" else signal.SIGTERM)
        code, left, is_clean = screen.end()
    assert (code, is_clean) == (expected, True)
    assert "under way" in left
    assert "Traceback" not in screen.text


@pytest.mark.dist
def test_ctrl_z_gives_the_terminal_back_and_fg_shows_the_dashboard_again(terminal, tmp_path):
    with growing(tmp_path / "run", 2) as run:
        shell = terminal("bash --norc --noediting -i", kind=Shell, PS1="$ ")
        shell.press(f"{sys.executable} -m falconet watch run\n")
        shell.wait("epoch 2 of 20")
        shell.press("\x1a")
        shell.wait("Stopped")
        before = shell.text.partition("Stopped")[0]
        assert before.rindex("\x1b[?1049l") > before.rindex("\x1b[?1049h"), "its own screen is left"
        assert before.rindex("\x1b[?25h") > before.rindex("\x1b[?25l"), "the cursor is shown"
        assert termios.tcgetattr(shell.theirs)[3] & termios.ECHO, "what is typed is shown"
        shell.text = ""
        run.grow()
        shell.press("fg\n")
        shell.wait("epoch 3 of 20")
        assert "\x1b[?1049h" in shell.text
        shell.press("q")
        shell.wait_for_prompt()  # until which the dashboard would take what is typed
        shell.press("exit $?\n")
        assert shell.end()[0] == 0
    assert "Traceback" not in shell.text


@pytest.mark.dist
def test_a_run_that_is_not_there_yet_is_waited_for_and_one_that_stopped_may_be_restored(terminal, tmp_path):
    (tmp_path / "run").mkdir()
    screen = terminal("watch run")
    screen.wait("waiting: there is no run in run yet")
    with growing(tmp_path / "run", 2) as run:
        screen.wait("epoch 2 of 20")
        run.end_early(kind="interrupted")
        screen.wait("interrupted")
        (run.folder / "report/ending.json").unlink()
        run.hold()
        run.grow()
        screen.wait("epoch 3 of 20")
        run.folder.rename(tmp_path / "elsewhere")  # all of it at once
        code, left, is_clean = screen.end()
    assert (code, is_clean) == (2, True)
    assert "epoch 3 of 20" in left
    assert left.rstrip().endswith("falconet watch: run: no such folder; expected a run folder")


@pytest.mark.dist
def test_without_colours_there_are_none_and_a_small_terminal_is_enough(terminal, tmp_path):
    write_run(tmp_path / "run", epochs=12)
    screen = terminal("watch run", width=40, height=15, NO_COLOR="1")
    code, left, _ = screen.end()
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", screen.text)
    assert max(map(len, left.splitlines())) <= 40


@pytest.mark.dist
def test_a_folder_is_a_table_in_which_new_runs_appear(terminal, tmp_path):
    write_run(tmp_path / "runs/old")
    screen = terminal("watch")
    screen.wait("1 run, 0 under way")
    screen.wait("q or Ctrl-C leaves")
    assert "goes on" not in screen.text
    with growing(tmp_path / "runs/new", 3):
        screen.wait("2 runs, 1 under way")
        screen.wait("3/20")
        screen.wait("q or Ctrl-C leaves; the run goes on")
        screen.press("q")
        code, left, _ = screen.end()
    assert code == 0
    assert left.index("new") < left.index("old")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("watch photos", "photos: holds photos, such as a.jpg, and no run; expected a run folder, or a folder of runs"),
        (
            "watch photos --page",
            "photos: holds photos, such as a.jpg, and no run; expected a run folder, or a folder of runs",
        ),
        ("watch no/such/run", "no/such/run: no such folder; expected a run folder, or a folder of runs"),
        ("watch rnu", "rnu: no such folder; expected a run folder, or a folder of runs; did you"),
        ("watch photos/a.jpg", "photos/a.jpg: a file; expected a run folder, or a folder of runs"),
        ("watch run --port 80", "--port: needs --page"),
        ("watch run --browser", "--browser: needs --page"),
        ("watch run --page --port 70000", "--port"),
    ],
)
def test_mistakes_are_one_line(falconet, tmp_path, line, words):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.jpg").touch()
    write_run(tmp_path / "run")
    answer = falconet(line)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("falconet watch: ")
    assert words in answer.err
    assert answer.err.count("\n") == 1


def test_damaged_runs_and_those_of_older_versions_are_shown_as_far_as_they_can_be_read(falconet, tmp_path):
    whole = write_run(tmp_path / "run")
    for name in ("plan.txt", "updates.jsonl", "config.yaml"):
        (whole / name).unlink()
    shutil.rmtree(whole / "report")
    with (whole / "metrics.jsonl").open("a") as file:
        file.write('{"update": 40, "ep')
    answer = falconet("watch run")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["epoch 1", "epoch 2", "epoch 3"]
    assert lines[3:] == [
        "run: finished, best accuracy 80.00 % after epoch 3",
        "note: run/metrics.jsonl: the last line is incomplete; left out",
        "note: run/config.yaml is missing",
    ]


def test_a_reader_that_stops_reading_ends_it(tmp_path):
    with growing(tmp_path / "run", 2) as run:
        watching = begin("watch run", tmp_path)
        assert watching.stdout.readline().startswith("epoch 1/20")
        watching.stdout.close()

        def has_ended():
            run.grow()
            time.sleep(0.2)
            return watching.poll() is not None

        wait_for(has_ended, "the end")
        assert watching.returncode == 0
        assert watching.stderr.read() == ""
        watching.stderr.close()


@pytest.mark.dist
def test_the_page_is_announced_answers_and_ends_with_ctrl_c(tmp_path):
    write_run(tmp_path / "runs/first")
    watching = begin("watch runs --page --port 0", tmp_path)
    line = watching.stdout.readline()
    found = re.fullmatch(r"watching runs at (http://127\.0\.0\.1:\d+); Ctrl-C stops\n", line)
    with urllib.request.urlopen(found[1], timeout=LIMIT) as answer:
        assert b'href="/run/first/"' in answer.read()
    watching.send_signal(signal.SIGINT)
    code, out, err = finish(watching)
    assert (code, out, err) == (130, "", "")


def test_a_port_that_is_taken_is_one_line(falconet, tmp_path):
    write_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = falconet(f"watch run --page --port {taken.getsockname()[1]}")
    assert answer.code == 2
    assert "is in use; choose another port, or 0 for any free one" in answer.err


def test_looking_takes_a_tenth_of_the_time_at_most(monkeypatch):
    monkeypatch.setattr(watch.time, "monotonic", lambda: 103.0)
    assert watch._pause(100.0) == 30.0
    assert watch._pause(103.0) == 1.0
