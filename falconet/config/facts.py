"""Facts that follow from several options, which rules and runs share."""

import re
from typing import Literal

from falconet.config.commands import Command, TrainOptions
from falconet.config.options import Augmentation, Averaging, Data, Machine, Numerics, Parallel
from falconet.config.tool_options import Inference

PHOTO_KINDS = ("imagenet", "folder")  # kinds of data that are encoded images of many sizes
AUTO_STAGES = re.compile(r"auto:\d{1,4}")  # a value of --pipeline-splits


def only_planned(options: Command) -> bool:
    """Whether a run is only planned, with data whose published size is known."""
    return isinstance(options, TrainOptions) and options.data.data == "imagenet" and options.run.plan


def is_stored(data: Data) -> bool:
    """Whether images are read, not generated."""
    return data.data not in ("generated", "synthetic")


def crops(augmentation: Augmentation) -> bool:
    """Whether images may be cropped at random."""
    return augmentation.augment in ("auto", "crop-flip")


def crops_photos(data: Data, augmentation: Augmentation) -> bool:
    """Whether photos are cropped at random."""
    return data.data in PHOTO_KINDS and crops(augmentation)


def boxes_used(data: Data, augmentation: Augmentation) -> Literal["no", "if there", "yes"]:
    """Whether random crops look at annotated objects."""
    if not crops_photos(data, augmentation):
        return "no"
    if augmentation.use_bbox_info:
        return "yes"
    return "if there" if augmentation.use_bbox_info_if_there else "no"


def uses_cutmix(augmentation: Augmentation) -> bool:
    return (augmentation.cutmix_lambda_low, augmentation.cutmix_lambda_high) not in ((0.0, 0.0), (1.0, 1.0))


def least_micro_batch(augmentation: Augmentation) -> int:
    """The fewest images in a micro-batch for mixing to find partners."""
    return 2 if uses_cutmix(augmentation) or augmentation.mixup_alpha > 0 else 1


def stages_of(section: Parallel | Inference) -> int:
    """The number of stages per replica that the options ask for."""
    splits = section.pipeline_splits
    return int(splits[0][5:]) if splits and AUTO_STAGES.fullmatch(splits[0]) else len(splits) + 1


def recompute_mode(numerics: Numerics, parallel: Parallel) -> Literal["none", "auto", "manual"]:
    """The mode that the options ask for, also by the originals' flag; pipeline stages recompute by default."""
    if numerics.recompute_mode is not None:
        return numerics.recompute_mode
    if not (numerics.enable_recompute or numerics.memory_budget is not None or parallel.pipeline_splits):
        return "none"
    return "manual" if numerics.recompute_checkpoints else "auto"


def is_scaled(numerics: Numerics, machine: Machine) -> bool:
    """Whether updates use the loss scale and the half-precision update rules."""
    asked = numerics.auto_loss_scaling or numerics.loss_scaling != 1.0 or numerics.initial_loss_scaling is not None
    return asked or machine.precision not in ("32.32", "bf16.32", "auto")


def averages(averaging: Averaging) -> bool:
    """Whether checkpoints are averaged after training."""
    return averaging.weight_avg_strategy != "none"
