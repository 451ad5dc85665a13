"""Notes and errors of a translation, one line each."""

import pytest

from falconet.errors import ConfigError
from falconet.legacy.table import Place
from falconet.legacy.translate import translate, translate_mapping
from translations import refused, translated, unlike

IMAGENET = "--dataset imagenet --data-dir d"
CIFAR = "--dataset cifar-10 --data-dir d"


NOTED = [
    (
        "pytorch:train.py",
        "--exchange-memory-target memory",
        "--exchange-memory-target: cuDNN chooses convolutions by speed; --available-memory-proportion limits",
    ),
    (
        "tf1:train.py",
        f"{CIFAR} --dataset-percentage-to-use 10",
        "--dataset-percentage-to-use: has an effect on ImageNet",
    ),
    ("pytorch:train.py", "--fine-tune-lr 0.1", "--fine-tune-lr: has no effect without --half-res-training"),
    ("tf1:train.py", f"{IMAGENET} --epochs 1", "warm-up of 5 epochs is longer than the training: it ends at"),
    (
        "tf1:train.py",
        "--generated-data --dataset imagenet --mixup-alpha 0.2",
        "--mixup-alpha and --cutmix-lambda: random",
    ),
    ("tf1:train.py", f"{IMAGENET} --model squeezenet --BN-decay 0.9", "--BN-decay: SqueezeNet has no norms"),
    ("tf1:train.py", f"{IMAGENET} --model squeezenet --group-dim 4", "--group-dim: has no effect on a squeezenet"),
    ("popart:resnet_main.py", "--data-dir d --get-reports", "--get-reports: had no effect"),
]


def test_differences_are_noted():
    noted = [(case, [text for text in translated(*case[:2]).notes if text.startswith(case[2])]) for case in NOTED]
    assert [case for case, texts in noted if len(texts) != 1] == []
    assert translated("pytorch:validate.py", "--checkpoint-input-path p").notes == ()


REFUSED = [
    ("tf1:train.py", "", "--dataset: required, or --data-dir; expected imagenet, cifar-10 or cifar-100"),
    ("tf1:train.py", "--data-dir photos", "--dataset: cannot be guessed from --data-dir photos"),
    (
        "tf1:train.py",
        f"{IMAGENET} --model alexnet",
        "--model: got 'alexnet', expected resnet, resnext, efficientnet, squeezenet",
    ),
    (
        "tf1:train.py",
        f"{CIFAR} --model squeezenet --model-size 2",
        "--model-size: squeezenet 2 for cifar-10 does not exist",
    ),
    (
        "tf1:train.py",
        f"{IMAGENET} --model-size 51",
        "--model-size: resnet 51 for imagenet does not exist; expected 10, 14",
    ),
    ("tf1:train.py", f"{CIFAR} --model-size 18", "--model-size: resnet 18 for cifar-10 does not exist; expected 8, 14"),
    (
        "tf1:train.py",
        f"{IMAGENET} --shards 4 --pipeline",
        "--pipeline-splits: got 0, expected 3, one less than --shards, of b1/0/relu",
    ),
    (
        "tf1:train.py",
        f"{IMAGENET} --shards 2 --pipeline --pipeline-splits x",
        "--pipeline-splits: 'x' is not a split of",
    ),
    ("tf1:train.py", f"{IMAGENET} --optimiser LARS", "--base-learning-rate: required with --optimiser LARS"),
    ("tf1:train.py", f"{IMAGENET} --optimiser RMSprop --base-learning-rate -9", "--rmsprop-decay: required with"),
    ("tf1:upload_run.py", "--base-folder a", "--name: is required by upload_run.py"),
    ("pytorch:train.py", "--wandb-weight-histogram", "--wandb-weight-histogram: needs --wandb"),
    ("tf1:weight_avg.py", "--restore-path a", "--filename: is required by weight_avg.py"),
    ("popart:resnet_main.py", "", "--data-dir: is required by resnet_main.py"),
    (
        "popart:resnet_main.py",
        "--data-dir d --batch-size 5 --replication-factor 2",
        "--batch-size: got 5, expected a multiple",
    ),
    (
        "popart:resnet_main.py",
        "--data-dir d --num-ipus 3 --replication-factor 2",
        "--num-ipus: got 3, expected a multiple",
    ),
    (
        "popart:resnet_main.py",
        "--data-dir d --learning-rate-decay 1,0.5,0",
        "--learning-rate-decay: got 1,0.5,0, expected",
    ),
    (
        "popart:resnet_main.py",
        "--data-dir d --learning-rate-decay 1,0.5",
        "--learning-rate-decay: got 2 multipliers, expected 3",
    ),
    (
        "tf1:train.py",
        "--checkpoint-input-path r",
        "--checkpoint-input-path is the PyTorch program's; here it is --restore-path",
    ),
    (
        "tf1:train.py",
        "--auto-loss-scaling",
        "--auto-loss-scaling is the PyTorch program's; train.py has no such option; Falconet's option goes after a"
        " lone --: -- --auto-loss-scaling",
    ),
    (
        "pytorch:train.py",
        "--BN-span 2",
        "--BN-span is the TensorFlow program's; train.py has no such option; Falconet's option goes after a lone --: --"
        " --batchnorm-span",
    ),
    ("pytorch:weight_avg.py", "--mode mean", "--mode is the TensorFlow program's; here it is --weight-avg-strategy"),
    ("tf1:train.py", "--repeat 3", "--repeat is validation.py's; train.py has no such option"),
    ("pytorch:train.py", "--config resnet50", "--config resnet50: there is no configs.yml here"),
    ("pytorch:tran.py", "", "'pytorch:tran.py' is not a program of the originals; did you mean 'pytorch:train.py'?"),
]


def test_what_cannot_be_done_is_refused_in_one_line():
    cases = [((program, line), message) for program, line, message in REFUSED]
    assert unlike(cases, lambda case: refused(*case)) == []


def test_the_line_overrides_a_named_config(tmp_path):
    path = tmp_path / "configs.yml"
    path.write_text("a: &a\n  model: resnet50\n  lr: 2\n  exchange_memory_target: memory\nb:\n  <<: *a\n  lr: 3\n")
    place = Place(configs=path)
    translation = translate("pytorch:train.py", ["--config", "b", "--epoch", "7"], place=place)
    found = {setting.option: " ".join(setting.values) for setting in translation.settings}
    assert (found["model"], found["lr"], found["epoch"]) == ("resnet50", "3", "7")
    assert translation.notes == ("of the config, these have no effect here: --exchange-memory-target",)
    same = translate_mapping("pytorch:train.py", {"model": "resnet50", "lr": 3, "epoch": 7}, source="here")
    assert same.settings == translation.settings


CONFIG_MISTAKES = {
    "a: [": "is not YAML",
    "- a": "expected named configs",
    "resnet5: {lr: 1}": "configs.yml; did you mean 'resnet5'?",
    "resnet50: {lrr: 1}": "config resnet50: unknown option lrr; did you mean '--lr'?",
}


@pytest.mark.parametrize(("text", "message"), CONFIG_MISTAKES.items())
def test_a_mistake_in_a_file_of_configs_is_answered_in_one_line(tmp_path, text, message):
    path = tmp_path / "configs.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        translate("pytorch:train.py", ["--config", "resnet50"], place=Place(configs=path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parts_without_effect_of_an_option_are_not_noted():
    """--batch-norm also sets the momentum of the statistics, which predictions do not use and the line did not name."""
    line = ["--dataset", "imagenet", "--synthetic-data", "--batch-norm"]
    translation = translate("tf1:validation.py", line)
    assert "batchnorm-momentum" not in {setting.option for setting in translation.settings}
    asked = translate("tf1:validation.py", [*line, "--BN-decay", "0.9"])
    assert "batchnorm-momentum" not in {setting.option for setting in asked.settings}
    assert "--BN-decay: is for training" in asked.notes
