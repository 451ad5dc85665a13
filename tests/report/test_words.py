"""Numbers agree with their nouns."""

import pytest

from falconet.report.console import are, counted

WORDS = {
    (1, "epoch"): "1 epoch is",
    (0, "epoch"): "0 epochs are",
    (2000, "class"): "2,000 classes are",
    (2, "micro-batch"): "2 micro-batches are",
    (1, "process"): "1 process is",
    (3, "CUDA device"): "3 CUDA devices are",
}


@pytest.mark.parametrize(("given", "expected"), WORDS.items())
def test_numbers_agree_with_their_nouns(given, expected):
    assert are(*given) == expected
    assert counted(*given) == expected.rpartition(" ")[0]
