"""The options of half-resolution training: smaller images first, then fine-tuning at the full size."""

from dataclasses import dataclass
from typing import Annotated

from falconet.config.ranges import AtLeast, Auto

REDUCED = {224: 160, 380: 252}  # the originals' pairs of sides, pixels
MULTIPLE = 4  # pixels, of every other reduced side


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Training at a reduced resolution, then fine-tuning at the full one."""

    half_res_training: bool = False
    """Train on smaller images (160 for 224, 252 for 380, else 5/7 of the side), average, fine-tune at full size."""
    fine_tune_epoch: Annotated[int, AtLeast(1)] | None = None
    """Epochs of fine-tuning, counted on from --epoch; it is sgd without momentum, mixing or augmentation."""
    fine_tune_lr: Annotated[float, AtLeast(0)] = 0.25
    """First learning rate of fine-tuning; a cosine takes it to 0, without warm-up."""
    fine_tune_micro_batch_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images in one forward and backward pass while fine-tuning; auto: as --micro-batch-size."""
    fine_tune_gradient_accumulation: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Micro-batches in one update while fine-tuning; auto: as --gradient-accumulation."""
    fine_tune_first_trainable_layer: str | None = None
    """Layers that run before this one, such as layer4/0, stay as they are while fine-tuning; without it, all train."""


def missing(options: FineTuning, *, averages: bool) -> str | None:
    """What half-resolution training needs beside it; `averages`: whether checkpoints are averaged."""
    if not options.half_res_training or (options.fine_tune_epoch and averages):
        return None
    if options.fine_tune_epoch is None:
        return "--fine-tune-epoch, the epochs at full size that follow"
    return "--weight-avg-strategy mean or exponential, because fine-tuning begins with the average of the checkpoints"


def reduced(image_size: int) -> int:
    """The side that half-resolution training uses, in pixels: 5/7 of the full one, to a multiple of 4."""
    return REDUCED.get(image_size) or max(MULTIPLE, MULTIPLE * round(image_size * 5 / 7 / MULTIPLE))
