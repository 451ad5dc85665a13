"""Numbers with their words: one is one."""

import re
from pathlib import Path

import pytest

import falconet
from falconet.report.console import are, counted

WORDS = {
    (1, "epoch"): "1 epoch is",
    (0, "epoch"): "0 epochs are",
    (2000, "class"): "2,000 classes are",
    (2, "micro-batch"): "2 micro-batches are",
    (1, "process"): "1 process is",
    (3, "CUDA device"): "3 CUDA devices are",
}


@pytest.mark.parametrize(("given", "said"), WORDS.items())
def test_a_number_and_its_word_agree(given, said):
    assert are(*given) == said
    assert counted(*given) == said.rpartition(" ")[0]


def test_nobody_writes_that_several_are_here_without_looking_at_the_number():
    """`1 devices are here` was said in four places."""
    sources = Path(falconet.__file__).parent.rglob("*.py")
    found = {
        path.name for path in sources if re.search(r"\}( CUDA)? [a-z]+s are (here|started|done)", path.read_text())
    }
    assert not found
