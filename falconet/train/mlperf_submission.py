"""What the log for MLPerf states of a run before its first update."""

from collections.abc import Sequence

import torch

from falconet.config import commands
from falconet.report.mlperf import Submission, tensor_name
from falconet.train.plan import Plan

BENCHMARK = "resnet"


def submission_of(
    options: commands.TrainOptions, plan: Plan, *, weights: Sequence[str], validated: int, epochs: int, began: float
) -> Submission:
    """What a submission declares.

    `weights`: names of the trained ones; `validated`: validation images; `epochs`: of all phases.
    """
    learning, rule = options.learning_rate, options.optimizer
    is_benchmark = options.model.model == "resnet50" and options.data.data == "imagenet"
    values = {
        "submission_benchmark": BENCHMARK,
        "submission_division": "closed" if is_benchmark else "open",
        "submission_org": "Falconet",
        "submission_status": "research",
        "submission_platform": f"{plan.replicas} x {_device(options)}",
        "seed": options.run.seed,
        "global_batch_size": plan.global_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "opt_weight_decay": rule.weight_decay,
        "opt_learning_rate_warmup_epochs": learning.warmup_epoch,
        "model_bn_span": options.parallel.batchnorm_span * plan.micro_batch,
        "train_samples": plan.images,
        "eval_samples": validated,
        **_update_rule(options, plan),
    }
    return Submission(values=values, tensors=[tensor_name(name) for name in weights], epochs=epochs, began=began)


def _update_rule(options: commands.TrainOptions, plan: Plan) -> dict[str, object]:
    """MLPerf has keys for sgd and lars; for other rules, the name and what all rules have."""
    learning, rule = options.learning_rate, options.optimizer
    name = {"sgd_combined": "sgd"}.get(rule.optimizer, rule.optimizer)
    if name not in ("sgd", "lars"):
        return {"opt_name": name, "opt_base_learning_rate": learning.peak}
    end = learning.peak * learning.lr_end_ratio if learning.lr_schedule == "polynomial" else plan.lr(plan.updates)
    warmup = round(learning.warmup_epoch * plan.updates_per_epoch)
    values = {
        "base_learning_rate": learning.peak,
        "end_learning_rate": float(f"{end:.9g}"),  # computed from a ratio, whose last digits are off
        "learning_rate_decay_poly_power": learning.lr_power,
        "learning_rate_decay_steps": plan.epochs if name == "lars" else plan.updates - warmup,
        "momentum": rule.momentum,
        "weight_decay": rule.weight_decay,
    }
    more = {"lars_epsilon": rule.optimizer_eps, "lars_opt_learning_rate_warmup_epochs": learning.warmup_epoch}
    return {
        "opt_name": name,
        **{f"{name}_opt_{key}": value for key, value in values.items()},
        **(more if name == "lars" else {}),
    }


def _device(options: commands.TrainOptions) -> str:
    if options.machine.device == "cpu" or not torch.cuda.is_available():
        return "CPU"
    return torch.cuda.get_device_name()
