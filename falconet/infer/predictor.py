"""A model with its preprocessing: pixels in, scores out, in few shapes and one number format."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from falconet.data.preprocessing import Preprocessing, normaliser
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
        self._normalise = normaliser(classifier.preprocessing).to(classifier.device)

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

    def lanes(self) -> list["Lane"]:
        """What can work at the same time on this device, each warmed up in every shape."""
        found = [Lane(self) for _ in range(LANES if self.classifier.device.type == "cuda" else 1)]
        for lane in found:
            lane.prepare()
        return found


class Lane:
    """Memory and a stream for one batch at a time; several lanes overlap copies and computation."""

    def __init__(self, predictor: Predictor) -> None:
        about, shape = (
            predictor.classifier,
            (predictor.max_batch, 3, *[predictor.classifier.preprocessing.image_size] * 2),
        )
        cuda = about.device.type == "cuda"
        self._predictor = predictor
        self._images = torch.zeros(shape, dtype=torch.uint8, pin_memory=cuda)
        self._there = torch.zeros(shape, dtype=torch.uint8, device=about.device) if cuda else self._images
        self._scores = torch.zeros(shape[0], len(about.class_names), dtype=predictor.dtype, pin_memory=cuda)
        self._stream = torch.cuda.Stream(about.device) if cuda else None  # type: ignore[no-untyped-call]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by bucket, with where its scores are

    def prepare(self) -> None:
        """Compute every bucket once, so that the first requests do not wait for compilation and memory."""
        for size in self._predictor.buckets:
            self._compute(size)
        if self._predictor.captured:
            pool = torch.cuda.graph_pool_handle()  # one memory for all: a lane computes one bucket at a time
            for size in reversed(self._predictor.buckets):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    scores = self._predictor.logits(self._there[:size])
                self._graphs[size] = (graph, scores)

    def __call__(self, portions: Sequence[Pixels]) -> list[Scores]:
        """The scores of every image of each portion; all of them together fit into the largest bucket."""
        ends = list(accumulate(len(portion) for portion in portions))
        rows = self._images.numpy()
        for portion, end in zip(portions, ends, strict=True):
            rows[end - len(portion) : end] = portion
        # What lies in the rows beyond is an earlier image: each is computed for itself, so it changes nothing.
        self._compute(next(size for size in self._predictor.buckets if size >= ends[-1]))
        return np.split(self._scores[: ends[-1]].numpy().copy(), ends[:-1])

    @torch.inference_mode()
    def _compute(self, size: int) -> None:
        """The scores of the first rows, in the host's memory when it returns."""
        if self._stream is None:
            self._scores[:size] = self._predictor.logits(self._images[:size])
            return
        with torch.cuda.stream(self._stream):
            self._there[:size].copy_(self._images[:size], non_blocking=True)
            self._scores[:size].copy_(self._on_device(size), non_blocking=True)
        self._stream.synchronize()

    def _on_device(self, size: int) -> Tensor:
        if size not in self._graphs:
            return self._predictor.logits(self._there[:size])
        graph, scores = self._graphs[size]
        graph.replay()
        return scores
