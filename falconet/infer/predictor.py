"""A model with its preprocessing: pixels in, scores out, in few shapes and one number format."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from falconet.data.preprocessing import Normalise, Preprocessing
from falconet.numerics.precision import Regime

Pixels = npt.NDArray[np.uint8]  # N x 3 x S x S
Scores = npt.NDArray[Any]  # N x classes; float16 where the regime computes in fp16, else float32
LANES = 2  # of a CUDA device: while one batch is computed, the next is gathered and copied


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A model that is ready to predict, and what a checkpoint knows about it."""

    name: str
    model: nn.Module  # on `device`, in the formats of `regime`
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    regime: Regime
    device: torch.device


def buckets(max_batch: int) -> tuple[int, ...]:
    """The batch sizes that are computed: powers of two, and the largest."""
    powers = (1 << power for power in range(max_batch.bit_length()))
    return (*(size for size in powers if size < max_batch), max_batch)


class Predictor:
    """Scores of images; a batch is filled up to the next bucket, so that the device sees few shapes."""

    def __init__(self, classifier: Classifier, *, max_batch: int, captured: bool = True) -> None:
        self.classifier = classifier
        self.buckets = buckets(max_batch)
        self.captured = captured and classifier.device.type == "cuda"
        self._model = classifier.model.eval()
        self._normalise = Normalise(classifier.preprocessing).to(classifier.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores: half where the device computes in fp16; numpy has no bf16, so that is widened."""
        formats = self.classifier.regime.formats(self.classifier.device)
        return torch.float16 if formats["activations"] == torch.float16 else torch.float32

    @property
    def max_batch(self) -> int:
        return self.buckets[-1]

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:  # N x 3 x S x S, uint8 -> N x classes, on the device
        """Scores before the softmax, in one pass."""
        there = images.to(self.classifier.device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        return self.classifier.regime.run(self._model, self._normalise(there)).to(self.dtype)

    def probabilities(self, images: Tensor) -> Tensor:
        """Of each class, float32; they add up to 1."""
        return self.logits(images).float().softmax(dim=1)

    def lanes(self) -> list["Lane"]:
        """What can work at the same time on this device, each warmed up in every shape."""
        found = [Lane(self) for _ in range(LANES if self.classifier.device.type == "cuda" else 1)]
        for lane in found:
            lane.prepare()
        return found


class Lane:
    """Memory and a stream for one batch at a time; several lanes overlap copies and computation."""

    def __init__(self, predictor: Predictor) -> None:
        about, most = predictor.classifier, predictor.max_batch
        self._predictor = predictor
        self._cuda = about.device.type == "cuda"
        side = about.preprocessing.image_size
        self._images = torch.zeros(most, 3, side, side, dtype=torch.uint8, pin_memory=self._cuda)
        self._scores = torch.zeros(most, len(about.class_names), dtype=predictor.dtype, pin_memory=self._cuda)
        self._stream = torch.cuda.Stream(about.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def prepare(self) -> None:
        """Compute every bucket once, so that the first requests do not wait for compilation and memory."""
        for size in self._predictor.buckets:
            self._compute(size)
            if self._predictor.captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                    self._issue(size)
                self._graphs[size] = graph

    def __call__(self, portions: Sequence[Pixels]) -> list[Scores]:
        """The scores of every image of each portion; all of them together fit into the largest bucket."""
        ends = list(accumulate(len(portion) for portion in portions))
        rows = self._images.numpy()
        for portion, end in zip(portions, ends, strict=True):
            rows[end - len(portion) : end] = portion
        # What lies in the rows beyond is an earlier image: each is computed for itself, so it changes nothing.
        self._compute(next(size for size in self._predictor.buckets if size >= ends[-1]))
        return np.split(self._scores[: ends[-1]].numpy().copy(), ends[:-1])

    def _compute(self, size: int) -> None:
        if self._stream is None:
            self._issue(size)
            return
        with torch.cuda.stream(self._stream):
            if size in self._graphs:
                self._graphs[size].replay()
            else:
                self._issue(size)
        self._stream.synchronize()

    @torch.inference_mode()
    def _issue(self, size: int) -> None:
        scores = self._predictor.logits(self._images[:size])
        self._scores[:size].copy_(scores, non_blocking=True)
