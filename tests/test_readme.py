"""The README's commands run as printed, and every page that is linked or named exists."""

import re
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NAMES_PAGES = {"", ".py", ".yaml", ".yml", ".sbatch"}
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "compat/README.md"])


def commands(text: str) -> list[str]:
    """The falconet lines of console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.S)
    return [line for block in blocks for line in block.splitlines() if line.startswith("falconet ")]


NEED_DATA = [line for line in commands(README) if "--data-dir" in line or "photo" in line]


def test_readme_is_short():
    assert len(README.splitlines()) < 150


def test_commands_run_in_the_order_printed(falconet):
    for line in commands(README):
        if line not in NEED_DATA:
            answer = falconet(line.removeprefix("falconet "))
            assert answer.code == 0, f"{line}: {answer.err}"


@pytest.mark.parametrize("line", NEED_DATA)
def test_command_that_needs_data_fails_only_without_it(falconet, line, monkeypatch):
    def no_network(*args: object, **kwargs: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    answer = falconet(line.removeprefix("falconet "))
    assert answer.code == 2
    assert re.search(r"falconet (train|predict|serve): (photos|runs/photos|cifar10).*", answer.err), answer.err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_index_names_every_page():
    index = ROOT / "docs/README.md"
    named = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)]+)\)", index.read_text())}
    assert not {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page != index} - named


def test_pages_named_in_code_exist():
    folders = ("falconet", "tests", "bench", "deploy")
    files = [ROOT / "Makefile", *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in NAMES_PAGES and path.is_file()]
    named = {page for text in texts for page in re.findall(r"docs/[a-z/]+\.md", text)}
    assert named
    assert not {page for page in named if not (ROOT / page).exists()}


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)`", README) + re.findall(r"^make ([\w-]+)$", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
