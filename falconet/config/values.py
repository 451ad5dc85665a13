"""What the values of single options mean, for the rules and the code that takes them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from falconet.config.options import Model

# Options of a model that its weights leave open: only new weights, training or speed depend on them.
_OPEN_WITH_WEIGHTS = (
    *("model", "weight_init", "zero_init", "batchnorm_momentum", "disable_stable_batchnorm", "enable_fast_groupnorm"),
    *("efficientnet_dropout", "efficientnet_drop_path", "proxy_recompute"),
)
# All others, as typed: with another value for one of them, the same weights compute something else.
BOUND_TO_WEIGHTS = tuple(
    field.name.replace("_", "-") for field in fields(Model) if field.name not in _OPEN_WITH_WEIGHTS
)

REDUCED = {224: 160, 380: 252}  # the originals' pairs of sides, in pixels
MULTIPLE = 4  # pixels; every other reduced side is rounded to it


def record_keys(text: str) -> dict[str, str] | None:
    """The keys by what they hold; None unless the text is image=KEY,label=KEY or one of the two."""
    pairs = [part.strip().split("=", 1) for part in text.split(",")]
    keys = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1]}
    return keys if len(keys) == len(pairs) and keys.keys() <= {"image", "label"} else None


_FROM_EPOCH = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,5})")


def resolutions(texts: Sequence[str]) -> dict[int, int] | None:
    """The side by its first epoch, counted from 1; None if the texts are not in order from epoch 1."""
    found = [_FROM_EPOCH.fullmatch(text) for text in texts]
    pairs = [(int(each[2]), int(each[1])) for each in found if each]
    epochs = [epoch for epoch, _ in pairs]
    in_order = epochs == sorted(set(epochs)) and epochs[:1] in ([], [1])
    return dict(pairs) if len(pairs) == len(texts) and in_order else None


ALLOWED = re.compile(r"auto|\d{1,12}|\d{1,3}(?:\.\d{1,6})?%")  # values of --bad-images-allowed
LEAST_ALLOWED = 5  # bad images, by default


def bad_images(allowed: str, images: int) -> int:
    """How many of this many training images may be bad."""
    if allowed == "auto":
        return max(LEAST_ALLOWED, images // 100)
    return int(images * float(allowed[:-1]) / 100) if allowed.endswith("%") else int(allowed)


def reduced_size(image_size: int) -> int:
    """The side that half-resolution training uses, in pixels: 5/7 of the full one, to a multiple of 4."""
    return REDUCED.get(image_size) or max(MULTIPLE, MULTIPLE * round(image_size * 5 / 7 / MULTIPLE))


@dataclass(frozen=True, kw_only=True)
class FurtherAverage:
    """One entry of --weight-avg-also."""

    strategy: Literal["mean", "exponential"]
    decay: float = 0.99
    last: int | None = None  # checkpoints; None: all
    epochs: int | None = None  # the last ones, whose checkpoints are averaged; None: all

    @property
    def suffix(self) -> str:
        """The end of its folder's name, after `averaged`."""
        if self.strategy == "exponential":
            return f"exp_{self.decay:.15g}"
        return f"mean_{self.last or 'all'}" if self.epochs is None else f"epochs_{self.epochs}"


_SHARE = re.compile(r"(.+)=(\d{1,9}(?:\.\d{1,9})?)")


def rate_share(text: str) -> tuple[str, float]:
    """The pattern and the factor in an entry of --lr-share, which the rules have checked."""
    found = _SHARE.fullmatch(text)
    assert found
    return found[1], float(found[2])


def is_rate_share(text: str) -> bool:
    found = _SHARE.fullmatch(text)
    return found is not None and float(found[2]) > 0


_MEAN, _EPOCHS = re.compile(r"mean:(all|[1-9]\d{0,8})"), re.compile(r"epochs:(\d{1,9})")
_EXPONENTIAL = re.compile(r"exponential:(0?\.\d+|[01](?:\.0*)?)")


def further_average(text: str) -> FurtherAverage | None:
    """Read `mean:5`, `epochs:5` or `exponential:0.97`; None if the text is none of them."""
    mean, exponential = _MEAN.fullmatch(text), _EXPONENTIAL.fullmatch(text)
    if mean:
        return FurtherAverage(strategy="mean", last=None if mean[1] == "all" else int(mean[1]))
    if epochs := _EPOCHS.fullmatch(text):
        return FurtherAverage(strategy="mean", epochs=int(epochs[1]))
    return FurtherAverage(strategy="exponential", decay=float(exponential[1])) if exponential else None


def share_of(proportions: tuple[float, ...], *, stage: int, stages: int) -> float | None:
    """The memory proportion of one stage; stages that share a process get the largest."""
    if not proportions:
        return None
    return proportions[stage] if len(proportions) == stages else max(proportions)
