"""--mlperf-logging: as in the TensorFlow original's public logs of its configs, and a complete run."""

import json
from pathlib import Path

import pytest

from falconet.config.commands import TrainOptions
from falconet.config.load import load_options, read_line
from falconet.models import zoo
from falconet.optim.schedules import Schedule
from falconet.train.mlperf_submission import submission_of
from falconet.train.plan import Plan
from tiny import TINY

IMAGES, VALIDATED = 1_281_167, 50_000
# From mlcommons/training_results_v1.0 and _v1.1, Graphcore/results/ipu-pod16-TF1/resnet/result_0.txt; the steps of
# sgd's decay are ours, because an epoch here has whole updates: 39 x 667 where theirs were 26,024.
PUBLIC = {
    "mk2_resnet50_mlperf_pod16_bs20": {
        "opt_name": "sgd",
        "global_batch_size": 1920,
        "gradient_accumulation_steps": 6,
        "opt_weight_decay": 2.5e-05,
        "opt_learning_rate_warmup_epochs": 5,
        "model_bn_span": 40,
        "train_samples": IMAGES,
        "eval_samples": VALIDATED,
        "sgd_opt_learning_rate_decay_steps": 39 * 667,
        "sgd_opt_momentum": 0.9,
        "sgd_opt_weight_decay": 2.5e-05,
        "sgd_opt_base_learning_rate": 3.824,
        "sgd_opt_end_learning_rate": 0.0001,
        "sgd_opt_learning_rate_decay_poly_power": 2.0,
    },
    "mk2_resnet50_mlperf_pod16_lars": {
        "opt_name": "lars",
        "global_batch_size": 3200,
        "gradient_accumulation_steps": 10,
        "opt_weight_decay": 5e-05,
        "opt_learning_rate_warmup_epochs": 2,
        "model_bn_span": 40,
        "train_samples": IMAGES,
        "eval_samples": VALIDATED,
        "lars_opt_base_learning_rate": 10.72,
        "lars_opt_end_learning_rate": 0.0001,
        "lars_opt_learning_rate_decay_poly_power": 2.0,
        "lars_opt_learning_rate_decay_steps": 38,
        "lars_epsilon": 0.0,
        "lars_opt_momentum": 0.9,
        "lars_opt_learning_rate_warmup_epochs": 2,
        "lars_opt_weight_decay": 5e-05,
    },
}


def logged(config):
    options = load_options(TrainOptions, read_line(TrainOptions, ["--config", config, "--data-dir", "x"])).options
    assert options.logging.mlperf_logging
    rate, data = options.learning_rate, options.data
    accumulation, replicas = options.training.gradient_accumulation, options.parallel.replicas
    schedule = Schedule(
        kind=rate.lr_schedule,
        peak=rate.lr,
        epochs=options.training.epoch,
        updates_per_epoch=IMAGES // (data.micro_batch_size * accumulation * replicas),
        warmup_epochs=rate.warmup_epoch,
        power=rate.lr_power,
        end_ratio=rate.lr_end_ratio,
    )
    plan = Plan(
        epochs=options.training.epoch,
        images=IMAGES,
        micro_batch=data.micro_batch_size,
        accumulation=accumulation,
        replicas=replicas,
        schedule=schedule,
        logs_per_epoch=1,
        validation_mode="during",
        validation_frequency=1,
        epochs_per_save=1.0,
    )
    weights = [name for name, _ in zoo.build("resnet50", classes=1000, seed=0).named_parameters()]
    return submission_of(options, plan, weights=weights, validated=VALIDATED, epochs=plan.epochs, began=0.0)


@pytest.mark.parametrize("config", PUBLIC)
def test_a_named_config_logs_what_the_public_log_has(config):
    found = logged(config)
    assert {key: found.values[key] for key in PUBLIC[config]} == PUBLIC[config]
    others = found.values.keys() - PUBLIC[config].keys()
    assert others == {"seed", *(f"submission_{key}" for key in ("benchmark", "division", "org", "status", "platform"))}
    assert found.values["submission_division"] == "closed"
    # The 161 tensors of MLPerf's ResNet-50, by its checker's list: 53 convolutions, 53 norms, and fc.
    assert len(set(found.tensors)) == 161
    assert {name.rpartition("_")[2] for name in found.tensors} == {"weight", "gamma", "beta", "bias"}


def keys(path):
    return [json.loads(line.removeprefix(":::MLLOG "))["key"] for line in path.read_text().splitlines()]


def test_a_restored_run_continues_the_mlperf_log(falconet):
    assert falconet(f"train {TINY} --mlperf-logging --seed 7 --run-dir r").code == 0
    found = keys(Path("r/result_7.txt"))
    assert (found.count("epoch_stop"), found.count("eval_accuracy"), found[-1]) == (2, 2, "run_stop")
    assert falconet("restore --checkpoint-input-path r --epoch 3").code == 0
    found = keys(Path("r/result_7.txt"))
    assert (found.count("epoch_stop"), found.count("eval_accuracy"), found.count("run_stop")) == (3, 3, 1)
    assert found.count("init_start") == found.count("run_start") == 1


def test_other_update_rules_are_logged_with_the_common_keys(falconet):
    assert falconet(f"train {TINY} --epoch 1 --mlperf-logging --optimizer adamw --lr 0.002 --run-dir r").code == 0
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in Path("r/result_0.txt").read_text().splitlines()]
    values = {line["key"]: line["value"] for line in lines}
    assert (values["opt_name"], values["opt_base_learning_rate"]) == ("adamw", 0.002)
    assert values["submission_division"] == "open"
