"""Other programs' names for things are suggested before names that are merely spelled alike."""

import pytest

from falconet.config import synonyms
from falconet.config.commands import COMMANDS
from falconet.config.fields import options_of

LINES = {
    "train --learning-rate 0.1": "unknown option --learning-rate; did you mean '--lr'?",
    "train --no-captur": "unknown option --no-captur; did you mean '--no-capture'?",
    "train --workers 4": "unknown option --workers; did you mean '--dataloader-workers'?",
    "train --batch-size 8": "unknown option --batch-size; did you mean '--micro-batch-size'?",
    "train --epochs 3": "unknown option --epochs; did you mean '--epoch'?",
    "train --imgsz 224": "unknown option --imgsz; did you mean '--image-size'?",
    "train --img_size 224": "unknown option --img_size; did you mean '--image-size'?",
    "train --amp": "unknown option --amp; did you mean '--precision 16.32'?",
    "train -b 64": "unknown option -b; did you mean '--micro-batch-size'?",
    "train photos --val-dir x": "unknown option --val-dir; expected one folder with train/ and val/ in it, as in"
    " `falconet train FOLDER`",
    "validate r --val_dir=x": "unknown option --val_dir; did you mean '--data-dir'?",
    "train a/train a/val": "got 'a/train a/val', expected one folder with all photos, in train/ and val/ if they are"
    " divided; did you mean 'a'?",
    "train a/x b/x": "got 'a/x b/x', expected one folder with all photos, in train/ and val/ if they are divided\n",
    "validate r a b": "got 'a b', expected one folder with all photos, in train/ and val/ if they are divided\n",
    "train --device mps": "--device: got 'mps', expected auto, cpu or cuda; Apple's GPUs are not supported;"
    " did you mean 'cpu'?",
    "train --device 0": "--device: got '0', expected auto, cpu or cuda; did you mean 'cuda'?",
    "train --device 0,1": "; did you mean 'cuda'?",
    "train --device cuda:1": "; did you mean 'cuda'?",
    "train --precision fp16": "; did you mean '16.16'?",
    "train epochs=5": "got 'epochs=5', expected options with dashes; did you mean '--epoch 5'?",
    "train --val 0.1": "unknown option --val; did you mean '--val-fraction'?",
    "train --split 0.1": "unknown option --split; did you mean '--val-fraction'?",
    "train --gpu 0": "unknown option --gpu; did you mean '--device cuda'?",
    "train --freeze-backbone": "unknown option --freeze-backbone; did you mean '--freeze backbone'?",
    "train --weights w.pth": "unknown option --weights; did you mean '--pretrained'?",
    "train --save runs": "unknown option --save; did you mean '--run-dir'?",
    "predict --save sorted": "unknown option --save; did you mean '--save-dir'?",
    "train --ta-wide": "unknown option --ta-wide; did you mean '--auto-augment'?",
    "train --auto-augment ta_wide": "; did you mean 'trivialaugment'?",
    "train --auto-augment rand-m9-mstd0.5": "; did you mean 'randaugment'?",
    "train --conf c.yaml": "unknown option --conf; did you mean '--config'?",
    "version": "'version' is not a command; did you mean 'falconet --version'?",
    "val": "'val' is not a command; did you mean 'falconet validate'?",
    "fit": "'fit' is not a command; did you mean 'falconet train'?",
}


@pytest.mark.parametrize("line", LINES)
def test_other_programs_words_are_known(falconet, line):
    answer = falconet(line)
    assert answer.code == 2
    assert LINES[line] in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("line", ["predict --conf 0.5", "train --verbose", "validate --quiet", "export --gpuid 0"])
def test_nothing_is_suggested_for_a_word_that_resembles_none(falconet, line):
    answer = falconet(line)
    assert answer.code == 2
    assert answer.err.endswith(f": unknown option {line.split()[1]}\n")


def test_every_suggested_option_exists():
    known = {name for command in COMMANDS.values() for name in options_of(command)}
    suggested = {meant.split()[0] for meant in synonyms.OPTIONS.values()}
    assert suggested <= known


def test_no_synonym_hides_an_option_of_training():
    assert not synonyms.OPTIONS.keys() & options_of(COMMANDS["train"]).keys()


def test_every_suggested_choice_can_be_typed():
    known = options_of(COMMANDS["train"])
    for option, words in synonyms.CHOICES.items():
        assert set(words.values()) <= set(known[option].choices)


def test_every_suggested_command_exists():
    assert set(synonyms.COMMANDS.values()) - {"--version"} <= set(COMMANDS)
