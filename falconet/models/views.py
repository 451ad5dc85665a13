"""Test-time augmentation: a model that averages its logits over several views of each image."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["none", "flip", "flip-shift"]  # as --tta has them
View = tuple[Callable[[Tensor], Tensor], float]  # of N x 3 x H x W, and its weight


def _itself(images: Tensor) -> Tensor:
    return images


def _shifted(images: Tensor, by: int) -> Tensor:
    """Images moved down and right by a pixel, or up and left, with reflected borders."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    return padded[..., 1 - by : 1 - by + height, 1 - by : 1 - by + width]


# Half of the weight stays where the image is, as in the speed recipes for CIFAR-10.
SHIFTS: tuple[View, ...] = ((_itself, 0.5), (lambda x: _shifted(x, 1), 0.25), (lambda x: _shifted(x, -1), 0.25))


def views_of(kind: Kind) -> tuple[View, ...]:
    """The views and their weights, whose sum is 1."""
    if kind == "none":
        return ((_itself, 1.0),)
    moved: Sequence[View] = SHIFTS if kind == "flip-shift" else ((_itself, 1.0),)
    return tuple(
        (view, weight / 2) for move, weight in moved for view in (move, lambda images, move=move: move(images).flip(-1))
    )


def describe(kind: Kind) -> str:
    """The averaged views in words."""
    shown = {
        "none": "the image itself",
        "flip": "2 views, the image and its mirror image",
        "flip-shift": "6 views, the image and its mirror image, each also shifted by a pixel both ways",
    }
    return shown[kind]


class Averaged(nn.Module):
    """Runs a model on each view; the logits are averaged in float32. The model is shared, not copied."""

    def __init__(self, model: nn.Module, views: Sequence[View]) -> None:
        super().__init__()
        self.model, self._views = model, views

    def forward(self, images: Tensor) -> Tensor:
        (first, weight), *others = self._views
        logits: Tensor = self.model(first(images)).float() * weight
        for view, weight in others:
            logits = logits.add(self.model(view(images)), alpha=weight)
        return logits


def averaged(model: nn.Module, kind: Kind) -> nn.Module:
    """The model averaged over the given views; the model itself if there is only one."""
    return model if kind == "none" else Averaged(model, views_of(kind))
