"""Options that others leave unused are refused or noted, never dropped silently."""

import pytest

from falconet.errors import ConfigError
from falconet.legacy.table import Place
from falconet.legacy.tensorflow import OF_FAMILY
from falconet.legacy.translate import translate
from translations import lacking, refused, settings, translated, unlike, wrong

IMAGENET = "--dataset imagenet --data-dir d"
TRAIN, VALIDATE, POPART = "tf1:train.py", "tf1:validation.py", "popart:resnet_main.py"
UNUSED = [
    (TRAIN, f"{IMAGENET} --momentum 0.7", "--momentum: no effect with --optimiser SGD"),
    (TRAIN, f"{IMAGENET} --rmsprop-decay 0.7", "--rmsprop-decay: no effect without --optimiser RMSprop"),
    (
        TRAIN,
        f"{IMAGENET} --lars-eeta 0.7 --lars-epsilon 1",
        "--lars-epsilon, --lars-eeta: no effect without --optimiser LARS",
    ),
    (
        TRAIN,
        f"{IMAGENET} --optimiser LARS --abs-learning-rate 1 --weight-decay 0.1 --lars-weight-decay 0.2",
        "--weight-decay: no effect with --lars-weight-decay",
    ),
    (TRAIN, f"{IMAGENET} --lr-drops 7", "--lr-drops: no effect without --lr-schedule exponential"),
    (TRAIN, f"{IMAGENET} --poly-lr-end-ratio 0.7", "--poly-lr-end-ratio: no effect without --lr-schedule poly"),
    (
        TRAIN,
        f"{IMAGENET} --lr-schedule cosine --learning-rate-decay 0.7",
        "--learning-rate-decay: no effect without --lr-schedule stepped",
    ),
    (TRAIN, f"{IMAGENET} --iterations 9 --warmup-epochs 2", "--warmup-epochs: no effect with --iterations alone"),
    (TRAIN, f"{IMAGENET} --log-freq 7", "--log-freq: no effect without --iterations"),
    (TRAIN, f"{IMAGENET} --iterations 9 --logs-per-epoch 7", "--logs-per-epoch: no effect with --iterations"),
    (TRAIN, f"{IMAGENET} --wandb-project x", "--wandb-project: no effect without --wandb"),
    (TRAIN, f"{IMAGENET} --config-path x.yml", "--config-path: no effect without --config"),
    (TRAIN, f"{IMAGENET} --max-cross-replica-buffer-size 7", "--max-cross-replica-buffer-size: no effect with one"),
    (TRAIN, f"{IMAGENET} --pipeline-schedule Interleaved", "--pipeline-schedule: no effect without --pipeline"),
    (TRAIN, f"{IMAGENET} --BN-decay 0.7", "--BN-decay: no effect without --batch-norm"),
    (TRAIN, f"{IMAGENET} --batch-norm --groups 7", "--groups: no effect without --group-norm"),
    (TRAIN, f"{IMAGENET} --cutmix-version 2", "--cutmix-version: no effect without a --cutmix-lambda"),
    (TRAIN, f"{IMAGENET} --ckpts-per-epoch 0 --ckpt-epochs-offset 3", "--ckpt-epochs-offset: no effect with"),
    (VALIDATE, f"{IMAGENET} --cutmix-version 2", "--cutmix-version: is for training"),
    (VALIDATE, f"{IMAGENET} --shards 2 --pipeline", "--pipeline: a model that predicts is whole"),
    (POPART, "--data-dir d --norm-type BATCH --norm-groups 7", "--norm-groups: no effect without --norm-type GROUP"),
    (POPART, "--data-dir d --pipeline", "--pipeline: no effect with one of --num-ipus per replica"),
    ("popart:resnet_synthetic_benchmark.py", "--pipeline", "--pipeline: no effect without --shards"),
]
IN_USE = [
    f"{IMAGENET} --optimiser momentum --momentum 0.7",
    f"{IMAGENET} --optimiser LARS --abs-learning-rate 1 --lars-eeta 0.7 --weight-decay 0.1",
    f"{IMAGENET} --lr-schedule exponential --lr-drops 7 --lr-decay-rate 0.9 --warmup-epochs 2",
    f"{IMAGENET} --iterations 9 --log-freq 7",
    f"{IMAGENET} --epochs 2 --iterations 9 --logs-per-epoch 7 --warmup-epochs 1",
    f"{IMAGENET} --replicas 2 --max-cross-replica-buffer-size 7000000",
    f"{IMAGENET} --batch-norm --BN-decay 0.7",
    f"{IMAGENET} --groups 7 --cutmix-lambda 0.5 --cutmix-version 2",
    "--dataset imagenet --data-dir d --model efficientnet --top-width 8 --block-survival-prob 0.7 --norm-epsilon 1e-5",
]


def test_an_option_that_another_one_leaves_unused_is_noted_once():
    noted = [(case, [text for text in translated(*case[:2]).notes if text.startswith(case[2])]) for case in UNUSED]
    assert [case for case, texts in noted if len(texts) != 1] == []


def test_options_that_are_used_are_not_noted():
    assert wrong([(line, ()) for line in IN_USE], lambda line: translated(TRAIN, line).notes) == []


SWITCHES = ("--no-se", "--use-relu", "--widenet", "--use-bypass", "--proxy-norm", "--no-proxy-recompute")


def test_an_option_of_another_model_is_refused_under_the_name_that_was_typed():
    cases = [
        (
            (program, f"{IMAGENET} {name}{'' if name in SWITCHES else ' 1'}"),
            f"{name}: is for --model {family}, not resnet",
        )
        for program in (TRAIN, VALIDATE)
        for family, names in OF_FAMILY.items()
        for name in names
    ]
    assert wrong(cases, lambda case: refused(*case)) == []


DECAYS = [
    ("", "0.0001"),
    ("--weight-decay 0.002", "0.002"),
    ("--weight-decay 0.002 --lars-weight-decay 0.003", "0.003"),
]


def test_the_decay_of_lars_is_its_own_or_the_common_one_as_documented():
    lars = f"{IMAGENET} --optimiser LARS --abs-learning-rate 1"
    assert wrong(DECAYS, lambda line: settings(TRAIN, f"{lars} {line}")["weight-decay"]) == []


# 50,000 images in batches of 4 on 2 x 4 devices are 1,562.5 batches each, of 16 on 4 x 4 they are 195.3.
COPIES = [
    ("--generated-data --batch-size 4 --replicas 2 --shards 4", None, {"replicas": "8", "iterations": "1563"}),
    ("--generated-data --batch-size 4 --shards 2", None, {"replicas": "2", "iterations": "6250"}),
    ("--generated-data --batch-size 4 --shards 4", 2, {"replicas": "2", "iterations": "6250"}),  # poprun's count
    (
        "--data-dir d --batch-size 16 --replicas 4 --shards 4 --available-memory-proportion 0.1 1 0.3 1 0.2 1 0.1 1",
        None,
        {"replicas": "16", "iterations": "196", "available-memory-proportion": "0.3"},
    ),
]


@pytest.mark.parametrize("program", [VALIDATE, "tf1:inference_embedded.py"])
def test_shards_of_a_model_that_predicts_are_more_replicas(program):
    cases = [((program, f"--dataset imagenet {line}", launched), expected) for line, launched, expected in COPIES]
    assert lacking(cases, lambda case: settings(*case)) == []
    assert [case for case, _ in cases if translated(*case).notes] == []


REFUSED = [
    (TRAIN, f"{IMAGENET} --epochs-per-ckpt 2 --ckpts-per-epoch 3", "--epochs-per-ckpt: cannot be combined with"),
    (TRAIN, f"{IMAGENET} --learning-rate-schedule nan", "--learning-rate-schedule: got 'nan', expected shares"),
    (POPART, "--data-dir d --learning-rate-decay nan,1,1", "--learning-rate-decay: got 'nan,1,1', expected numbers"),
    ("pytorch:train.py", "--epoch -1", "--epoch: got '-1', expected a whole number, at least 1"),
    (TRAIN, f"{IMAGENET} --groups 0", "--groups: here --norm-num-groups: got '0', "),
    (TRAIN, f"{IMAGENET} --abs-learning-rate -1", "--abs-learning-rate: here --lr: got '-1', "),
    (
        "pytorch:datasets/host_benchmark.py",
        "--iterations -1",
        "--iterations: here --passes: got '-1', ",
    ),
    ("pytorch:train.py", "--lr -1", "--lr: got '-1', "),
]


def test_a_mistake_starts_with_the_name_that_was_typed():
    cases = [((program, line), message) for program, line, message in REFUSED]
    assert unlike(cases, lambda case: refused(*case)) == []


def test_poprun_and_tf_config_do_not_both_count_replicas():
    place = Place(replicas=4, environment={"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'})
    with pytest.raises(ConfigError, match="--distributed: is for TF_CONFIG only; poprun started this"):
        translate(TRAIN, [*IMAGENET.split(), "--distributed"], place=place)


def test_a_value_of_several_lines_is_answered_in_one():
    with pytest.raises(ConfigError) as caught:
        translate("pytorch:train.py", ["--lr", "a\nb"])
    assert str(caught.value) == r"--lr: got 'a\nb', expected a number"
