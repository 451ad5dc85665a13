"""The README's commands run as printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", README, re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("falconet ")]
NEED_DATA = [line for line in COMMANDS if "--data-dir" in line]


def test_the_readme_is_short():
    assert len(README.splitlines()) < 150


def test_the_commands_run_in_the_order_printed(falconet):
    for line in COMMANDS:
        if line not in NEED_DATA:
            answer = falconet(line.removeprefix("falconet "))
            assert answer.code == 0, f"{line}: {answer.err}"


@pytest.mark.parametrize("line", NEED_DATA)
def test_a_command_that_needs_data_fails_only_for_want_of_it(falconet, line, monkeypatch):
    import urllib.request

    def no_network(*args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    answer = falconet(line.removeprefix("falconet "))
    assert answer.code == 2
    assert re.search(r"falconet train: (photos|cifar10).*", answer.err), answer.err


def test_the_files_it_points_to_are_there():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_make_targets_it_names_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", README) + re.findall(r"^make (\w+)$", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
