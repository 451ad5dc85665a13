"""The exported function: from a named input to fp32 logits."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from falconet.config.options import Model
from falconet.data.preprocessing import Preprocessing, normaliser
from falconet.errors import CheckpointError, first_line, memory_shortage
from falconet.infer.prediction import Activation

INPUT, OUTPUT = "images", "logits"
Pixels = npt.NDArray[np.uint8]  # N x S x S x 3
Values = npt.NDArray[Any]  # the input of the graph, or its logits
TRACED_BATCH = 2  # with 1, torch.export would take the batch for a constant


class FromPixels(nn.Module):
    """Normalise RGB pixels in the layout of an image library."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.normalise = normaliser(preprocessing)

    def forward(self, pixels: Tensor) -> Tensor:  # N x S x S x 3, uint8 -> N x 3 x S x S, float32
        values: Tensor = self.normalise(pixels.permute(0, 3, 1, 2))
        return values


class InHalf(nn.Module):
    """A model with fp16 weights and activations, between an fp32 input and fp32 logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images.half())
        return logits.float()


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model to export, on the CPU, with the facts that its users need."""

    name: str
    options: Model  # what the model was built from
    model: nn.Module  # in fp32
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    activation: Activation = "softmax"  # that makes probabilities of its scores
    takes_pixels: bool = False  # whether it normalises its input itself
    half: bool = False  # whether it computes in fp16

    def module(self, *, half: bool = False) -> nn.Module:
        """The function from input to logits; in fp32, the exported file is compared with it."""
        model = InHalf(self.model) if half else self.model
        parts = (FromPixels(self.preprocessing), model) if self.takes_pixels else (model,)
        return nn.Sequential(*parts).eval().requires_grad_(False)

    @torch.no_grad()
    def feed(self, pixels: Pixels) -> Values:
        """The model's input for these resized and cropped photos."""
        if self.takes_pixels:
            return pixels
        values: Tensor = FromPixels(self.preprocessing)(torch.from_numpy(pixels))
        return values.contiguous().numpy()

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of one image's input."""
        side = self.preprocessing.image_size
        return (side, side, 3) if self.takes_pixels else (3, side, side)

    @property
    def input_type(self) -> str:
        return "uint8" if self.takes_pixels else "float32"

    def describe_input(self) -> str:
        """A line with the exact input of the graph."""
        about = self.preprocessing
        shape = ", ".join(map(str, self.input_shape))
        photo = f"RGB photos, short side resized to {about.resize}, centre crop of {about.image_size}"
        return f"{INPUT}, {self.input_type} [N, {shape}]: {photo}, {self._normalised()}"

    def _normalised(self) -> str:
        if self.takes_pixels:
            return "values from 0 to 255; normalised inside"
        if self.preprocessing.standardised:
            return "(pixel - the image's mean) / the image's deviation"
        mean, std = ([round(value, 6) for value in each] for each in (self.preprocessing.mean, self.preprocessing.std))
        return f"(pixel / 255 - {mean}) / {std}"

    def describe_output(self) -> str:
        return f"{OUTPUT}, float32 [N, {len(self.class_names)}], before the {self.activation}"

    def traced(self, *, half: bool) -> torch.export.ExportedProgram:
        """The function as a graph of torch's operators, for any number of images."""
        side = self.preprocessing.image_size
        example = torch.from_numpy(self.feed(np.zeros((TRACED_BATCH, side, side, 3), np.uint8)))
        try:
            return torch.export.export(self.module(half=half), (example,), dynamic_shapes=dynamic_batch())
        except RuntimeError as error:
            if memory_shortage(error):
                raise
            raise CheckpointError(f"{self.name} cannot be traced by torch.export: {first_line(error)}") from error


def dynamic_batch() -> tuple[dict[int, Any]]:
    """A specification that leaves the size of the input's first dimension free."""
    return ({0: torch.export.Dim("batch", min=1)},)
