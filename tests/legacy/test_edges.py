"""Numbers at the edge: too small, not a number, or a length that is not a whole number of epochs."""

import pytest

from falconet.config.commands import TrainOptions
from falconet.config.load import load
from falconet.data.loader import BatchShape
from falconet.legacy.table import short
from falconet.legacy.translate import translate
from falconet.optim.schedules import Schedule, drops_at
from falconet.train.plan import phases_of, plan_of
from translations import lacking, refused, settings, translated, unlike, wrong

IMAGENET = "--dataset imagenet --data-dir d"
POPART = "--data-dir d"
TOO_SMALL = [
    *(
        ("tf1:train.py", f"{IMAGENET} {name} {value}", f"{name}: got {value}, expected at least 1")
        for name in ("--batch-size", "--gradient-accumulation-count", "--replicas", "--shards", "--iterations")
        for value in ("0", "-1")
    ),
    ("tf1:train.py", f"{IMAGENET} --iterations 1000 --log-freq 0", "--log-freq: got 0, expected at least 1"),
    ("tf1:train.py", f"{IMAGENET} --epochs 0", "--epochs: got 0, expected more than 0"),
    ("tf1:train.py", f"{IMAGENET} --epochs -2", "--epochs: got -2, expected more than 0"),
    ("tf1:validation.py", f"{IMAGENET} --generated-data --batch-size 0", "--batch-size: got 0, expected at least 1"),
    ("tf1:validation.py", f"{IMAGENET} --generated-data --replicas 0", "--replicas: got 0, expected at least 1"),
    *(
        ("popart:resnet_main.py", f"{POPART} {name} 0", f"{name}: got 0, expected at least 1")
        for name in (
            *("--batch-size", "--replication-factor", "--num-ipus", "--gradient-accumulation-factor"),
            *("--steps-per-log", "--batches-per-step"),
        )
    ),
    ("popart:resnet_synthetic_benchmark.py", "--steps 0", "--steps: got 0, expected at least 1"),
]
NO_NUMBERS = [
    *(
        ("tf1:train.py", f"{IMAGENET} {name} {value}", f"{name}: got '{value}', expected a number")
        for name in ("--epochs", "--abs-learning-rate", "--weight-decay", "--label-smoothing", "--mixup-alpha")
        for value in ("nan", "inf")
    ),
    (
        "tf1:train.py",
        f"{IMAGENET} --base-learning-rate 2000",
        "--base-learning-rate: got 2000, expected an exponent of 2",
    ),
    (
        "popart:resnet_main.py",
        f"{POPART} --base-learning-rate 2000",
        "--base-learning-rate: got 2000, expected an expon",
    ),
    ("popart:resnet_main.py", f"{POPART} --learning-rate-decay=", "--learning-rate-decay: got no number"),
]


def test_an_invalid_number_is_refused_under_its_old_name():
    cases = [((program, line), message) for program, line, message in (*TOO_SMALL, *NO_NUMBERS)]
    assert unlike(cases, lambda case: refused(*case)) == []


# 1,281,167 images of batch 4 are 320,291 updates, of batch 1,024 they are 1,251; 50,000 of batch 32 are 1,562.
LENGTHS = [
    (f"{IMAGENET} --iterations 10", {"updates": "10", "warmup-epoch": "0", "log-interval": "500"}),
    (f"{IMAGENET} --epochs 2.5", {"epoch": "2.5", "warmup-epoch": "2.5"}),
    (f"{IMAGENET} --epochs 3", {"epoch": "3"}),
    ("--dataset cifar-10 --data-dir d --iterations 781 --lr-schedule cosine", {"updates": "781", "lr": "0.5"}),
    (f"{IMAGENET} --epochs 65 --iterations 7", {"updates": "7", "warmup-epoch": "5"}),
    ("--dataset cifar-10 --generated-data --epochs 0.5", {"epoch": "0.5", "iterations": "1562"}),
]


def test_a_length_that_is_not_whole_epochs_is_exact_to_the_update():
    assert lacking(LENGTHS, lambda line: settings("tf1:train.py", line)) == []
    lengths = [(line, {"epoch", "updates"} & settings("tf1:train.py", line).keys()) for line, _ in LENGTHS]
    assert [(line, names) for line, names in lengths if len(names) != 1] == []


def test_the_steps_of_a_training_by_updates_are_shares_of_it():
    """781 updates of CIFAR: drops at a half and three quarters, 390.5 and 585.75 updates."""
    line = "--dataset cifar-10 --data-dir d --iterations 781"
    options = load(TrainOptions, translate("tf1:train.py", line.split()).settings).options.learning_rate
    schedule = Schedule(
        kind="step",
        peak=1.0,
        epochs=0.5,
        updates_per_epoch=1562,
        decay=options.lr_decay[0],
        drops=tuple(drops_at(options.lr_drop_shares, 781, 1562)),
        warmup_epochs=options.warmup_epoch,
    )
    assert [schedule.lr(update) for update in (0, 390, 391, 585, 586, 780)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )


@pytest.mark.parametrize("images", [1_281_167, 50_000, 1000])
def test_the_drops_of_an_exponential_training_by_updates_are_even_for_any_data(images):
    """decay^k, k = floor(update x drops / updates), counted in whole numbers."""
    line = f"{IMAGENET} --iterations 350 --lr-schedule exponential --lr-decay-rate 0.9 --lr-drops 7 --batch-size 10"
    options = load(TrainOptions, translate("tf1:train.py", line.split()).settings).options
    shape = BatchShape(micro_batch=10)
    plan = plan_of(phases_of(options)[0], images=images, shape=shape, updates_before=0)
    peak = options.learning_rate.lr
    assert [plan.schedule.lr(update) for update in range(350)] == pytest.approx(
        [peak * 0.9 ** (update * 7 // 350) for update in range(350)]
    )


def test_rmsprop_may_be_spelled_as_in_the_documents():
    line = "--model efficientnet --dataset imagenet --data-dir d --batch-size 4 --optimiser"
    coded, documented = (translate("tf1:train.py", [*line.split(), name]) for name in ("RMSprop", "RMSProp"))
    assert documented.settings == coded.settings
    assert {setting.option: setting.values for setting in coded.settings}["lr"] == (str(4 / 2**14),)


AVERAGES = [
    ("--weight-avg-exp 0.97", {"weight-avg-exp-decay": "0.97", "weight-avg-also": None}),
    ("--weight-avg-exp 0.97 0.99", {"weight-avg-exp-decay": "0.97", "weight-avg-also": "exponential:0.99"}),
    ("--weight-avg-N 3 5", {"weight-avg-strategy": "mean", "weight-avg-epochs": "3", "weight-avg-also": "epochs:5"}),
    (
        "--weight-avg-exp 0.9 0.97 --weight-avg-N 3 5 --ckpts-per-epoch 2",
        {"weight-avg-exp-decay": "0.9", "weight-avg-also": "exponential:0.97 epochs:3 epochs:5"},
    ),
]


def test_every_average_of_a_list_is_made():
    assert lacking(AVERAGES, lambda line: settings("tf1:train.py", f"{IMAGENET} {line}")) == []
    for line, _ in AVERAGES:
        translation = translated("tf1:train.py", f"{IMAGENET} {line}")
        assert not any("average" in note for note in translation.notes)
        load(TrainOptions, translation.settings)


SHORTCUTS = [  # The program's default is B for every size; the networks' own are A for CIFAR.
    ("--size 20", {"model": "resnet20-cifar", "shortcut-type": "B", "stem": None}),
    ("--size 20 --shortcut-type A", {"shortcut-type": None}),
    ("--size 8 --shortcut-type C", {"shortcut-type": "C"}),
    ("--size 50 --dataset IMAGENET", {"shortcut-type": None, "stem": None, "image-size": None}),
    ("--size 50 --dataset IMAGENET --shortcut-type A", {"shortcut-type": "A", "bottleneck-stride": "1x1"}),
    ("--size 18", {"model": "resnet18", "stem": "cifar", "image-size": "32", "shortcut-type": None}),
    ("--size 20 --dataset IMAGENET", {"stem": "imagenet", "image-size": "224", "shortcut-type": "B"}),
    ("--size x50", {"model": "resnext50", "stem": "cifar", "bottleneck-stride": "1x1"}),
    ("--norm-type NONE", {"norm-type": "none", "conv-bias": ""}),
    ("--norm-type BATCH", {"norm-type": None, "conv-bias": None}),
]


def test_the_popart_programs_networks_are_its_own():
    assert lacking(SHORTCUTS, lambda line: settings("popart:resnet_main.py", f"{POPART} {line}")) == []
    assert [line for line, _ in SHORTCUTS if translated("popart:resnet_main.py", f"{POPART} {line}").notes] == []


def test_basic_resnets_of_the_tensorflow_program_project_at_every_stage():
    for size, expected in (("18", ("stages",)), ("34", ("stages",)), ("50", None)):
        settings = translate("tf1:train.py", [*IMAGENET.split(), "--model-size", size]).settings
        assert {setting.option: setting.values for setting in settings}.get("shortcut-type") == expected


EFFECTS = [
    # Shares of version 1 are 1 + ln(u) / 4 unless the batch is skipped, with chance 1.55 x 0.85 - 0.96.
    (
        "--cutmix-lambda 0.85",
        {"cutmix-draw": "exponential", "cutmix-lambda-high": "1", "cutmix-disable-prob": "0.3575"},
    ),
    ("--cutmix-lambda 0.85 --cutmix-version 2", {"cutmix-draw": None, "cutmix-lambda-low": "0.85"}),
    ("", {"normalization": "mean"}),
    ("--normalise-input", {"normalization": None}),
    ("", {"use-bbox-info-if-there": "", "crop-draw": "height", "crop-area": "0.05", "augment": None}),
    (
        "--train-with-valid-preprocessing",
        {"augment": "none", "use-bbox-info-if-there": None, "crop-area": None, "object-crop-area": None},
    ),
    ("--offload-fp32-weight-copy --optimiser momentum", {"precision": "16.32", "offload-optimizer": ""}),
    ("--offload-fp32-weight-copy --precision 32.32", {"precision": None}),
]


def test_options_of_the_tensorflow_program_do_what_they_did():
    assert lacking(EFFECTS, lambda line: settings("tf1:train.py", f"{IMAGENET} {line}")) == []
    assert [line for line, _ in EFFECTS if translated("tf1:train.py", f"{IMAGENET} {line}").notes] == []


CIFAR = [
    ("", ("image", "host", None)),
    ("--no-hostside-norm", ("image", "host", None)),
    ("--eight-bit-io", ("image", None, None)),  # on the device
    ("--generated-data", (None, None, None)),
]


def test_images_of_cifar_are_standardised_one_by_one_on_the_host():
    cifar = "--dataset cifar-10 --data-dir d --model-size 8"
    names = ("normalization", "normalization-location", "crop-area")
    assert wrong(CIFAR, lambda line: tuple(map(settings("tf1:train.py", f"{cifar} {line}").get, names))) == []


def test_a_device_number_becomes_cuda_visible_devices():
    one = translate("tf1:train.py", [*IMAGENET.split(), "--select-ipus", "3", "4"])
    assert one.environment == {"CUDA_VISIBLE_DEVICES": "3"}
    assert one.line().startswith("CUDA_VISIBLE_DEVICES=3 falconet train ")
    assert not translate("tf1:train.py", [*IMAGENET.split(), "--select-ipu", "AUTO"]).environment
    several = translate("tf1:train.py", [*IMAGENET.split(), "--select-ipu", "3", "--replicas", "2"])
    assert not several.environment
    assert several.notes == ("--select-ipu 3: devices are chosen by CUDA_VISIBLE_DEVICES",)


def test_the_popart_benchmarks_common_options_are_known():
    line = "--mode train --shards 2 --pipeline --report"
    train = translate("popart:resnet_synthetic_benchmark.py", line.split())
    value = {setting.option: " ".join(setting.values) for setting in train.settings}
    assert (value["pipeline-splits"], value["profile"], train.notes) == ("auto:2", "", ())
    infer = translate("popart:resnet_synthetic_benchmark.py", ["--shards", "2", "--auto-sharding"])
    assert infer.notes[0] == "--shards 2: predictions are measured with the whole model on one device"


NUMBERS = {
    16384.0: "16384",
    0.5: "0.5",
    0.1 + 0.2: "0.3",  # what arithmetic left in the last digit
    2**-9.5 * 2304: "3.181980515339464",
    3e-05: "3e-05",
    2.0**-60: "8.67361738e-19",  # the originals' rates are powers of two
}


def test_a_number_keeps_every_significant_digit():
    assert {number: short(number) for number in NUMBERS} == NUMBERS


PIPELINED = (
    f"{IMAGENET} --model-size 50 --shards 2 --pipeline --pipeline-splits b3/0/relu --gradient-accumulation-count 8"
)
PROPORTIONS = [
    (f"{IMAGENET} --available-memory-proportion 0.1", ("0.1",)),
    (f"{PIPELINED} --available-memory-proportion 0.1", ("0.1",)),
    (f"{PIPELINED} --available-memory-proportion 0.1 0.2 0.3 0.4", ("0.1", "0.3")),
]
WRONG_PROPORTIONS = [
    (f"{IMAGENET} --available-memory-proportion 0.1 0.2", "got 2 values, expected one without --pipeline"),
    (f"{PIPELINED} --available-memory-proportion 0.1 0.2 0.3", "got 3 values, expected one, or 4: two for each of"),
    (f"{PIPELINED} --available-memory-proportion 0.1 0.2", "got 2 values, expected one, or 4: two for each of the 2"),
]


def test_memory_proportions_are_one_or_two_per_stage():
    found = [settings("tf1:train.py", line)["available-memory-proportion"] for line, _ in PROPORTIONS]
    assert [tuple(value.split()) for value in found] == [expected for _, expected in PROPORTIONS]
    cases = [(("tf1:train.py", line), f"--available-memory-proportion: {text}") for line, text in WRONG_PROPORTIONS]
    assert unlike(cases, lambda case: refused(*case)) == []


SMALL_BATCHES = [
    ("tf1:train.py", f"{IMAGENET} --cutmix-lambda 0.85 --batch-size 2", None),
    ("tf1:train.py", f"{IMAGENET} --cutmix-lambda 0.85 --mixup-alpha 0.2 --batch-size 2", None),
    ("pytorch:train.py", "--cutmix-lambda-high 0.8 --micro-batch-size 3", None),
    ("pytorch:train.py", "--cutmix-lambda-high 0.8 --micro-batch-size 2", "got 2, expected at least 3 for --cutmix"),
    (
        "pytorch:train.py",
        "--cutmix-lambda-high 0.8 --mixup-alpha 0.1 --micro-batch-size 3",
        "got 3, expected at least 4 for --cutmix-lambda-low and -high with --mixup-alpha",
    ),
]


@pytest.mark.parametrize(("program", "line", "message"), SMALL_BATCHES)
def test_mixing_takes_the_batches_that_the_original_took(program, line, message):
    if message is None:
        translate(program, line.split())
    else:
        assert message in refused(program, line)


def test_generated_data_validates_as_many_images_as_the_original():
    images = {"--dataset imagenet": "50000", "--dataset cifar-10": "10000"}
    for data, count in images.items():
        assert settings("tf1:train.py", f"--generated-data {data} --epochs 1")["validation-images"] == count
    # A short run has a tenth of its own training images.
    assert "validation-images" not in settings("tf1:train.py", "--generated-data --dataset imagenet --iterations 10")
