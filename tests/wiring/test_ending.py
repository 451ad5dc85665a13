"""How a run goes on that ended before its end: the command that is printed works."""

import pytest

from falconet.wiring import ending
from tiny import TINY

PLACES = {
    "in the run folder": "",
    "elsewhere": "--checkpoint-output-path other/place",
    "the run folder": "--checkpoint-output-path r",
}


@pytest.mark.parametrize("more", PLACES.values(), ids=PLACES)
def test_the_command_that_is_printed_finds_the_checkpoints_and_the_run_folder(falconet, more):
    assert falconet(f"train {TINY} --epoch 1 --run-dir r {more}").code == 0
    refused = falconet(f"train {TINY} --epoch 1 --run-dir r {more}").err
    line = refused.partition("`falconet ")[2].partition("`")[0]
    answer = falconet(f"{line} --epoch 2")
    assert answer.code == 0, answer.err
    assert "run folder           r\n" in answer.out


def test_without_a_checkpoint_there_is_nothing_to_continue_from(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    said = "there is no checkpoint to continue from: the same command begins again"
    assert ending.how_to_go_on(tmp_path, tmp_path / "checkpoints") == said
    assert ending.how_to_go_on(tmp_path, tmp_path / "never/made") == said
