"""A predictor: pixels in, scores out, at a few fixed batch sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from falconet.config.commands import ServeOptions
from falconet.config.settings import Setting
from falconet.infer.classifier import Classifier, open_classifier
from falconet.models import views
from falconet.numerics.cuda_graphs import Recording, why_not
from falconet.numerics.precision import allow_half_partials, describe_half_partials
from falconet.report.console import Say

Pixels = npt.NDArray[np.uint8]  # N x 3 x S x S, in any memory order
Scores = npt.NDArray[Any]  # N x classes; float16 if the regime computes in fp16, else float32
Execute = Callable[[Sequence[Pixels]], list[Scores]]  # the scores of each portion; blocks its thread


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Lanes that compute batches side by side, one batch each at a time."""

    each: tuple[Execute, ...]
    # All cores for one batch, if each lane has one core; None if that is no faster, or if a lane has all.
    whole: Execute | None = None
    least_whole: int = 1  # images from which on `whole` is faster than a lane
    share: bool = False  # whether idle lanes divide what waits, because each has a core of its own
    least_more: int = 1  # images that are worth starting a second lane


LANES = 2  # per CUDA device: one computes a batch while the other gathers and copies the next


def buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes to compute: the powers of two below `max_batch`, and `max_batch`."""
    powers = (1 << power for power in range(max_batch.bit_length()))
    return (*(size for size in powers if size < max_batch), max_batch)


def gather(portions: Sequence[Pixels], rows: npt.NDArray[np.uint8]) -> int:  # rows: N x S x S x 3
    """Copy the portions into the first rows of a batch; return the number of rows."""
    end = 0
    for portion in portions:
        start, end = end, end + len(portion)
        if portion.strides[1] == 1:  # decoded photos, which have the memory order of the rows
            rows[start:end] = portion.transpose(0, 2, 3, 1)
        else:  # 43 us for an image of 224 x 224; as one assignment 182 us, because its inner loop is three bytes
            for channel in range(3):
                rows[start:end, ..., channel] = portion[:, channel]
    return end


def divide(scores: Scores, portions: Sequence[Pixels]) -> list[Scores]:
    """Divide the scores of all portions into those of each."""
    ends = accumulate(map(len, portions), initial=0)
    return [scores[start:end] for start, end in pairwise(ends)]


class Predictor:
    """Computes scores; batches are padded to the next bucket, so that the device sees only a few shapes."""

    def __init__(self, classifier: Classifier, *, max_batch: int, captured: bool = True) -> None:
        self.classifier = classifier
        self.buckets = buckets(max_batch)
        self.captured = captured and classifier.capture and classifier.device.type == "cuda"
        self._score = classifier.scoring(classifier.preprocessing)

        formats = classifier.regime.formats(classifier.device)
        self.format = torch.float16 if formats["activations"] == torch.float16 else torch.float32

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the scores: float16 if the device computes in fp16, else float32 (numpy has no bf16)."""
        return np.dtype(np.float16 if self.format == torch.float16 else np.float32)

    @property
    def max_batch(self) -> int:
        return self.buckets[-1]

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:  # N x 3 x S x S, uint8 -> N x classes, on the device
        """Compute scores before the softmax, in one pass."""
        there = images.to(self.classifier.device, non_blocking=True).contiguous(memory_format=torch.channels_last)
        return self._score(there).to(self.format)

    def lanes(self) -> list["Lane"]:
        """Create the lanes that can run at the same time on this device, and warm them up for every bucket."""
        found = [Lane(self) for _ in range(LANES if self.classifier.device.type == "cuda" else 1)]
        for lane in found:
            lane.prepare()
        return found


class Lane:
    """Buffers and a stream for one batch at a time; several lanes overlap copies with computation."""

    def __init__(self, predictor: Predictor) -> None:
        about = predictor.classifier
        side = about.preprocessing.image_size
        most, cuda = predictor.max_batch, about.device.type == "cuda"
        shape = (most, side, side, 3)  # in the memory order in which photos are decoded and the model reads them
        self._predictor = predictor
        self._host = torch.zeros(shape, dtype=torch.uint8, pin_memory=cuda)
        self._there = torch.zeros(shape, dtype=torch.uint8, device=about.device) if cuda else self._host
        self._scores = torch.zeros(most, len(about.class_names), dtype=predictor.format, pin_memory=cuda)
        self._stream = torch.cuda.Stream(about.device) if cuda else None  # type: ignore[no-untyped-call]
        self._recordings: dict[int, Recording] = {}  # by bucket

    def prepare(self) -> None:
        """Compute every bucket once, so that the first requests do not pay for compilation and allocation."""
        for size in self._predictor.buckets:
            self._compute(size)
        if self._predictor.captured:
            try:
                self._capture()
            except RuntimeError as error:
                self._recordings.clear()
                self._predictor.classifier.note(why_not(error))

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()  # shared by all graphs: a lane computes one bucket at a time
        for size in reversed(self._predictor.buckets):
            inputs = self._images(size)
            self._recordings[size] = Recording(self._predictor.logits, inputs, stream=self._stream, pool=pool)

    def __call__(self, portions: Sequence[Pixels]) -> list[Scores]:
        """Compute the scores of each portion; together they must fit into the largest bucket."""
        count = gather(portions, self._host.numpy())
        # The other rows hold earlier images; they change nothing, because images are computed independently.
        self._compute(next(size for size in self._predictor.buckets if size >= count))
        return divide(self._scores[:count].numpy().copy(), portions)

    @torch.inference_mode()
    def _compute(self, size: int) -> None:
        """Compute the scores of the first rows into host memory."""
        if self._stream is None:
            self._scores[:size] = self._predictor.logits(self._images(size))
            return
        with torch.cuda.stream(self._stream):
            self._there[:size].copy_(self._host[:size], non_blocking=True)
            self._scores[:size].copy_(self._on_device(size), non_blocking=True)
        self._stream.synchronize()

    def _images(self, size: int) -> Tensor:  # N x 3 x S x S, channels last in memory
        """Copy the first rows to the device."""
        return self._there[:size].permute(0, 3, 1, 2)

    def _on_device(self, size: int) -> Tensor:
        found = self._recordings.get(size)
        return self._predictor.logits(self._images(size)) if found is None else found.replay()


def open_served(line: Sequence[Setting], say: Say) -> tuple[Classifier, ServeOptions]:
    """Open the model that a server's command line names; return it with the options, completed from its checkpoint."""
    classifier, options = open_classifier(ServeOptions, line, say)
    for text in classifier.loaded():
        say(text)
    if classifier.tta != "none":
        say(f"averages the logits of {views.describe(classifier.tta)}")
    if options.serving.half_partial:
        allow_half_partials(classifier.device)
        say(describe_half_partials(classifier.regime, classifier.device))
    return classifier, options
