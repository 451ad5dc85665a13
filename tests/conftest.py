"""Fixtures shared by all tests: the command line in this process, small data, and a time limit."""

import gc
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from PIL import Image

import watched
from falconet.cli import main
from falconet.legacy.conventions import CONVENTIONS

# Variables that a terminal, a launcher or a user may have set and that change what Falconet does.
INHERITED = re.compile(
    r"COLUMNS|LINES|(FORCE|NO)_COLOR|CLICOLOR\w*|TTY_\w+|DATA_DIR|FALCONET_\w+|WANDB_\w+"
    r"|OMP_NUM_THREADS|RANK|WORLD_SIZE|LOCAL_\w+|MASTER_\w+|TORCHELASTIC_\w+|SLURM_\w+|OMPI_\w+|PMI_\w+|MPI_\w+|HYDRA_\w+|TF_CONFIG"
)
for name in filter(INHERITED.fullmatch, list(os.environ)):
    del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads weights; must be set before huggingface_hub is imported

# A shell's `&` starts programs with Ctrl-C ignored, `nohup` with SIGHUP; every process of a test would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


gc.disable()  # a fifth of the time of collection, which imports torch and leaves little garbage

# The same examples on every machine, without a deadline; `--hypothesis-profile default` searches for new ones.
settings.register_profile("here", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")


@pytest.fixture
def file_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None], None]]:
    """Limits the bytes that a file may have, until the test ends or gives None; a full disk answers in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # cut short by a limit, it breaks every later import
    yield limit
    limit(None)


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that run whole commands; sort files by how long they take, so that the workers end together."""
    for item in items:
        if {"falconet", "original", "trained"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("run")
    longest = [{item.path for item in items if item.get_closest_marker(mark)} for mark in ("dist", "run")]
    items.sort(key=lambda item: [item.path not in paths for paths in longest])


def pytest_collection_finish() -> None:
    """Search for garbage from here on, but not among what was imported."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report leaks when the process ends


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Begin with the same random numbers, whatever ran before in this process."""
    if torch := sys.modules.get("torch"):  # which some tests do without
        torch.default_generator.manual_seed(0)  # that of the CPU alone: `manual_seed` costs a millisecond
    return (yield from watched.in_time(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from watched.in_time(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    return (yield from watched.in_time(item))


@pytest.fixture(autouse=True)
def no_processes_left() -> Iterator[None]:
    """Give a test that starts processes more time, and end them if it fails."""
    with watched.processes_ended(begun=lambda: watched.WATCH.limit(watched.WITH_PROCESSES)):
        yield


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have two cores: their number decides how many processes run."""
    monkeypatch.setattr("falconet.parallel.world.cores", lambda processes=1: 2)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands fork their workers from a process that has imported everything: to start one takes seconds."""
    import gloo

    gloo.forkserver()  # now, without what a command puts into the environment
    monkeypatch.setattr("falconet.parallel.launch.elastic_launch", gloo.forked)


@pytest.fixture
def falconet(capfd, tmp_path, monkeypatch) -> Callable[..., Answer]:
    """Run a command line in an empty folder, with our conventions or an original's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)

    def call(line: str, conventions: str = "falconet") -> Answer:
        code = main(line.split(), CONVENTIONS[conventions])
        return Answer(code, *capfd.readouterr())

    return call


@pytest.fixture
def image_folder(tmp_path) -> Path:
    """Two classes, dark and light, of 12 training and 4 validation PNG photos each."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for label, level in (("dark", 60), ("light", 190)):
            folder = tmp_path / "photos" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(level - 50, level + 50, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture(scope="module")
def browser():
    """One for a whole module, because to start it takes longer than most tests."""
    import browsing  # playwright, which only tests of pages need

    with browsing.chromium() as started:
        yield started


@pytest.fixture
def visit(browser):
    """Opens pages of servers; at the end nothing may have failed in them, or been asked of another server."""
    import browsing

    with browsing.visiting(browser) as opened:
        yield opened


@pytest.fixture
def open_file(browser):
    """Opens pages from files; at the end nothing may have failed or been printed in them, or been asked of a server."""
    import browsing

    with browsing.opening_files(browser) as opened:
        yield opened
