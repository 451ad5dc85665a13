"""Named configs against the originals' own values, by arithmetic that shares no code with the package.

tests/data/original_configs.json holds the entries of the originals' files with their merges applied: TensorFlow's of
SDK 2.1, then those that only SDK 2.5 had. Formulas are those of the originals' documents, written out here once more.
"""

import json
from pathlib import Path

import pytest

from falconet.config.commands import TrainOptions
from falconet.config.fields import options_of
from falconet.config.load import load, parse
from falconet.config.recipes import from_config
from falconet.config.settings import Setting
from falconet.legacy.table import Place
from falconet.legacy.translate import translate

ROOT = Path(__file__).parents[2]
ENTRIES = json.loads((ROOT / "tests/data/original_configs.json").read_text())
TENSORFLOW, PYTORCH = ENTRIES["tf1:train.py"], ENTRIES["pytorch:train.py"]
WITHOUT_SPLITS = "mk2_efficientnet_b4_16ipus_base"  # which cannot run alone, there either
PLACE = Setting("data-dir", ("imagenet",), "test")
CLASSES = {"imagenet": 1000, "cifar-10": 10}


def tensorflow(entry):
    """What the TensorFlow program made of an entry."""
    photos, kind = entry["dataset"] == "imagenet", entry["model"]
    efficient, rule = kind == "efficientnet", entry.get("optimiser", "SGD")
    micro = entry.get("batch_size") or entry.get("micro_batch_size")
    micro = micro or ({"resnet": 4, "resnext": 1, "efficientnet": 4}[kind] if photos else 32)
    total = micro * entry.get("gradient_accumulation_count", 1) * entry.get("replicas", 1)
    default = {"SGD": -7, "momentum": -10, "RMSprop": -14} if efficient else {"SGD": -8, "momentum": -11}
    exponent = entry.get("base_learning_rate", entry.get("base_learning_rate_exponent"))
    exponent = exponent if exponent is not None else default.get(rule) if photos else -6
    lr = entry.get("abs_learning_rate") or 2.0**exponent * total
    epochs = entry.get("epochs", 350 if efficient else 100 if photos else 160)
    decay = entry.get("lars_weight_decay" if rule == "LARS" else "weight_decay")
    decay = decay if decay is not None else (1e-5 if efficient else 1e-4) if photos else 1e-6
    smoothing = entry.get("label_smoothing", 0.1 if efficient and photos else 0.0)
    batch_norm = entry.get("batch_norm", not photos and not efficient)
    classes = CLASSES[entry["dataset"]]
    return {
        "global batch": total,
        "replicas": entry.get("replicas", 1),
        "stages": entry.get("shards", 1),
        "lr": lr,
        "epochs": epochs,
        "warm-up": entry.get("warmup_epochs", 5),
        "schedule": {"polynomial_decay_lr": "polynomial", "stepped": "step"}.get(
            entry.get("lr_schedule", "stepped"), entry.get("lr_schedule")
        ),
        "end": entry.get("abs_end_learning_rate", 1e-5 * lr),
        "optimizer": {"SGD": "sgd", "momentum": "sgd", "RMSprop": "rmsprop_tf", "LARS": "lars"}[rule],
        "momentum": 0.0 if rule == "SGD" else entry.get("momentum", 0.9),
        "rms decay": 1 - 2.0**-14 * total if rule == "RMSprop" else None,
        "weight decay": decay,
        "not decayed": "vectors" if rule == "LARS" else "norms" if photos else "nothing",
        # The share that the true class keeps.
        "true class": 1 - smoothing,
        "other classes": smoothing / (classes - 1),
        "scale": entry.get("loss_scaling", 128),
        "precision": str(entry.get("precision", "16.16")),
        "norm": "batch" if batch_norm else "group",
        "groups": None if batch_norm else entry.get("groups", 4 if efficient else 32),
        "strided": not batch_norm,
        "norm eps": 1e-3 if efficient else None if batch_norm else 1.53e-5,
        "norm momentum": 1 - entry.get("BN_decay", 0.97) if batch_norm else None,
        "norm span": entry.get("BN_span", 1),
        "mixup": entry.get("mixup_alpha", 0.0),
        "cutmix": entry.get("cutmix_lambda", 1.0) < 1,
        "average": entry["weight_avg_exp"][0] if "weight_avg_exp" in entry else None,
        "save every": entry.get("epochs_per_ckpt") or 1 / (entry.get("ckpts_per_epoch", 1) or 1 / epochs),
        "validates": entry.get("validation", True),
        "logs": entry.get("logs_per_epoch", 16),
        "half partials": entry.get("enable_half_partials", False),
        "bytes": entry.get("eight_bit_io", False) or entry.get("fused_preprocessing", False),
    }


def pytorch(entry):
    """What the PyTorch program made of an entry."""
    total = entry.get("micro_batch_size", 1) * entry.get("gradient_accumulation", 1) * entry.get("replicas", 1)
    lr, groups = entry.get("lr", 0.01), entry.get("norm_type") == "group"
    smoothing, rule = entry.get("label_smoothing", 0.0), entry.get("optimizer", "sgd")
    return {
        "global batch": total,
        "replicas": entry.get("replicas", 1),
        "stages": len(entry.get("pipeline_splits", [])) + 1,
        "lr": lr,
        "epochs": entry.get("epoch", 10),
        "warm-up": entry.get("warmup_epoch", 0),
        "schedule": entry.get("lr_schedule", "step"),
        "end": None,
        "optimizer": rule,
        "momentum": entry.get("momentum", 0.0),
        "rms decay": entry.get("rmsprop_decay", 0.99) if rule == "rmsprop_tf" else None,
        "weight decay": entry.get("weight_decay", 1e-4),
        "not decayed": "vectors",
        "true class": 1 - smoothing + smoothing / 1000,
        "other classes": smoothing / 1000,
        "scale": entry.get("loss_scaling", 1.0),
        "precision": str(entry.get("precision", "16.16")),
        "norm": entry.get("norm_type", "batch"),
        "groups": entry.get("norm_num_groups", 32) if groups else None,
        "strided": entry.get("enable_fast_groupnorm", False),
        "norm eps": entry.get("norm_eps"),
        "norm momentum": None,
        "norm span": 1,
        "mixup": entry.get("mixup_alpha", 0.0),
        "cutmix": entry.get("cutmix_lambda_low", 0.0) > 0,
        "average": entry.get("weight_avg_exp_decay") if entry.get("weight_avg_strategy") == "exponential" else None,
        "save every": 1,
        "validates": True,
        "logs": entry.get("logs_per_epoch", 1),
        "half partials": entry.get("half_partial", False),
        "bytes": entry.get("eight_bit_io", False),
    }


def resolved(options):
    """The same figures of canonical options."""
    training, rate, rule, model = options.training, options.learning_rate, options.optimizer, options.model
    classes = 10 if options.data.data == "cifar10" else 1000
    smoothing, batch_norm = options.augmentation.label_smoothing, model.norm_type == "batch"
    replicas = 1 if options.parallel.replicas == "auto" else options.parallel.replicas
    averaging = options.averaging
    return {
        "global batch": options.data.micro_batch_size * training.gradient_accumulation * replicas,
        "replicas": replicas,
        "stages": len(options.parallel.pipeline_splits) + 1,
        "lr": rate.lr,
        "epochs": training.epoch,
        "warm-up": rate.warmup_epoch,
        "schedule": rate.lr_schedule,
        "end": rate.lr * rate.lr_end_ratio,
        "optimizer": rule.optimizer,
        "momentum": rule.momentum,
        "rms decay": rule.rmsprop_decay if rule.optimizer == "rmsprop_tf" else None,
        "weight decay": rule.weight_decay,
        "not decayed": rule.weight_decay_exclude,
        "true class": 1 - smoothing + smoothing / classes,
        "other classes": smoothing / classes,
        "scale": options.numerics.loss_scaling,
        "precision": options.machine.precision,
        "norm": model.norm_type,
        "groups": None if batch_norm else model.norm_num_groups,
        "strided": model.norm_grouping == "strided",
        "norm eps": None if model.norm_eps == "auto" else model.norm_eps,
        "norm momentum": None if model.batchnorm_momentum == "auto" else model.batchnorm_momentum,
        "norm span": options.parallel.batchnorm_span,
        "mixup": options.augmentation.mixup_alpha,
        "cutmix": options.augmentation.cutmix_lambda_high > 0,
        "average": averaging.weight_avg_exp_decay if averaging.weight_avg_strategy == "exponential" else None,
        "save every": options.checkpoints.checkpoint_save_freq,
        "validates": options.validation.validation_mode != "none",
        "logs": options.logging.logs_per_epoch,
        "half partials": options.numerics.half_partial,
        "bytes": options.data.eight_bit_io,
    }


def differing(found, expected):
    """(name, value, expected value) of everything that differs."""
    if expected["schedule"] != "polynomial":
        expected = {name: value for name, value in expected.items() if name != "end"}
    near = {
        name: pytest.approx(value, rel=1e-6, abs=1e-12) if isinstance(value, float) else value
        for name, value in expected.items()
    }
    return [(name, found[name], value) for name, value in near.items() if found[name] != value]


def named(name):
    return resolved(load(TrainOptions, [PLACE, *from_config(name, options_of(TrainOptions))]).options)


def test_the_configs_of_the_tensorflow_program_are_what_its_formulas_give():
    one_stage = {WITHOUT_SPLITS: {"stages": 1}}
    expected = {name: tensorflow(entry) | one_stage.get(name, {}) for name, entry in TENSORFLOW.items()}
    assert {name: found for name in expected if (found := differing(named(name), expected[name]))} == {}


@pytest.mark.run
def test_configs_typed_in_the_tensorflow_programs_folder_are_the_same():
    place = Place(configs=ROOT / "compat/tensorflow/configs.yml")

    def typed(name):
        return resolved(
            parse(TrainOptions, translate("tf1:train.py", ["--config", name], place=place).settings).options
        )

    names = [name for name in TENSORFLOW if name != WITHOUT_SPLITS]
    assert {name: found for name in names if (found := differing(typed(name), tensorflow(TENSORFLOW[name])))} == {}


def test_the_configs_of_the_pytorch_program_are_what_its_entries_say():
    assert {name: found for name in PYTORCH if (found := differing(named(name), pytorch(PYTORCH[name])))} == {}


def test_typed_options_scale_a_configs_learning_rate():
    """2**-11 times 4 x 8 x 16 instead of 8 x 8 x 16."""
    place = Place(configs=ROOT / "compat/tensorflow/configs.yml")
    line = ["--config", "mk2_resnet50_gn_16ipus", "--batch-size", "4", "--epochs", "50"]
    options = parse(TrainOptions, translate("tf1:train.py", line, place=place).settings).options
    assert (options.learning_rate.lr, options.training.epoch) == (0.25, 50)
