"""A loaded model for Python: predictions for photos, in files or in memory, and its parts for the user's own code."""

import io
import itertools
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from falconet.data.crops import Crops
from falconet.data.image_files import NO_NAME, UnreadableImageError, open_rgb, to_rgb
from falconet.data.preprocessing import Preprocessing, normaliser
from falconet.data.readers import ArrayReader
from falconet.data.storage import ArraySource, PixelArray
from falconet.errors import ConfigError, DataError
from falconet.infer import photos
from falconet.infer.classifier import Classifier
from falconet.infer.embeddings import tapped
from falconet.infer.photos import Photo
from falconet.infer.prediction import Prediction, predicted
from falconet.writing import could_name_a_file

Picture = str | os.PathLike[str] | Image.Image | npt.NDArray[Any] | Tensor
KINDS = (str, os.PathLike, Image.Image, np.ndarray, Tensor)
EXPECTED = "a path, a PIL image, a uint8 array of H x W or H x W x 3, or a uint8 tensor of 3 x H x W"
TOP = 5  # classes per prediction


@dataclass(frozen=True)
class Transform:
    """Turns a picture into the model's input, exactly as in validation; fits torchvision's datasets as `transform`."""

    preprocessing: Preprocessing

    def __call__(self, picture: Picture) -> Tensor:  # 3 x S x S, float32
        """The module's input for a picture, without the batch dimension."""
        inputs: Tensor = normaliser(self.preprocessing)(self.pixels(picture)[None])
        return inputs[0]

    def pixels(self, picture: Picture) -> Tensor:  # 3 x S x S, uint8
        """The picture resized and cropped, but not normalised."""
        whole, index = _pixels(picture), np.zeros(1, np.int64)
        reader = ArrayReader(ArraySource(whole[None], index, ("",)), crops=Crops(preprocessing=self.preprocessing))
        out = np.empty((1, reader.size, reader.size, 3), np.uint8)
        reader.read(index, epoch=0, out=out)
        return torch.from_numpy(out[0]).permute(2, 0, 1)


class _Scores(NamedTuple):
    name: str
    logits: Tensor
    features: Tensor


class Model:
    """A model that is ready to predict.

    `module` is the plain PyTorch module, `transform` turns a picture into its input, and `class_names` has the name of
    each of its outputs.
    """

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier

    @property
    def name(self) -> str:
        return self.classifier.name

    @property
    def module(self) -> nn.Module:
        """The module, in evaluation mode: N x 3 x S x S to N x classes, scores before the softmax or sigmoid."""
        return self.classifier.model

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classifier.class_names

    @property
    def transform(self) -> Transform:
        """The transform from a PIL image, a path or an array to the module's input, as in validation."""
        return Transform(self.classifier.preprocessing)

    @property
    def device(self) -> torch.device:
        return self.classifier.device

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is a sequence of them, and a picture
        self, pictures: Picture, *, top: int = TOP, batch_size: int | None = None
    ) -> Prediction: ...

    @overload
    def predict(
        self, pictures: Sequence[Picture], *, top: int = TOP, batch_size: int | None = None
    ) -> list[Prediction]: ...

    def predict(
        self, pictures: Picture | Sequence[Picture], *, top: int = TOP, batch_size: int | None = None
    ) -> Prediction | list[Prediction]:
        """The classes of a picture, or of each in a list, with their probabilities.

        A picture is a path, a PIL image, a uint8 array (H x W or H x W x 3), a uint8 tensor (3 x H x W), or a float
        tensor that `transform` made. A folder in a list stands for all photos in it, at any depth; those that cannot be
        read are left out with a warning. Any other picture that cannot be read raises DataError.

        `top`: classes per prediction; a model for several labels adds further ones of 0.5 or more. `batch_size`: images
        in one forward pass; None: as in the run's validation, or fewer if there are fewer pictures.
        """
        if top < 1:
            raise ConfigError(f"top: got {top}, expected a whole number, at least 1")
        if isinstance(pictures, str | os.PathLike) and os.path.isdir(pictures):  # noqa: PTH112, as below
            raise DataError(f"{os.fspath(pictures)}: is a folder; expected a photo, or a list with the folder in it")
        if isinstance(pictures, KINDS):
            (prediction,) = self.predict([pictures], top=top, batch_size=batch_size)
            return prediction
        rows = self._scores(_listed(pictures, EXPECTED), batch_size=batch_size)
        several = self.classifier.several_labels
        return [predicted(row.logits, self.class_names, top=top, several=several, name=row.name) for row in rows]

    def embeddings(
        self, pictures: Sequence[Picture], *, batch_size: int | None = None
    ) -> npt.NDArray[np.float32]:  # N x features
        """The classifier layer's input for each picture."""
        if isinstance(pictures, KINDS):
            raise DataError(f"got {type(pictures).__name__}, expected a list of pictures")
        found = _listed(pictures, "a list of pictures")
        rows = [row.features for row in self._scores(found, batch_size=batch_size, features=True)]
        return torch.stack(rows).numpy() if rows else np.zeros((0, 0), np.float32)

    def _scores(
        self, pictures: Sequence[Picture], *, batch_size: int | None, features: bool = False
    ) -> Iterator[_Scores]:
        """Scores in the order given: of files as validation reads them, of other pictures as `transform` makes them."""
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size: got {batch_size}, expected a whole number, at least 1")
        found = list(_found(pictures))
        files = [photo for photo, _ in found if photo]
        read = itertools.chain.from_iterable(photos.scored(self.classifier, files, batch=batch_size, features=features))
        in_memory = [picture for photo, picture in found if photo is None]
        computed = self._computed(in_memory, batch_size=batch_size, features=features)
        for photo, picture in found:
            if photo is None:
                yield next(computed)
                continue
            row = next(read)
            if not row.problem:
                yield _Scores(photo.name, row.logits, row.features)
            elif photo.name == os.fspath(picture):  # type: ignore[arg-type]  # a path
                raise DataError(f"{photo.name}: {row.problem}")
            else:
                warnings.warn(f"{photo.name}: {row.problem}; left out", stacklevel=4)

    def _computed(self, pictures: Sequence[Picture], *, batch_size: int | None, features: bool) -> Iterator[_Scores]:
        about, batch = self.classifier, batch_size or self.classifier.batch
        score = about.by_inputs.uncaptured if features else about.by_inputs
        for first in range(0, len(pictures), batch):
            inputs = torch.stack([self._input(picture) for picture in pictures[first : first + batch]])
            with ExitStack() as held:
                tap = held.enter_context(tapped(about.model, len(about.class_names))) if features else None
                logits = score(inputs.contiguous(memory_format=torch.channels_last)).cpu()
                seen = tap() if tap else None
            kept = torch.empty(len(logits), 0) if seen is None else seen.cpu()
            yield from (_Scores("", *row) for row in zip(logits, kept, strict=True))

    def _input(self, picture: Picture) -> Tensor:  # 3 x S x S
        if not isinstance(picture, Tensor) or not picture.is_floating_point():
            return self.transform(picture)
        side = self.classifier.preprocessing.image_size
        if tuple(picture.shape) != (3, side, side):
            raise DataError(
                f"got a float tensor of {_shape(picture)}, expected 3 x {side} x {side}, as `transform` makes it"
            )
        return picture.float().cpu()

    def __repr__(self) -> str:
        side = self.classifier.preprocessing.image_size
        return f"<{self.name}: {len(self.class_names)} classes, {side} x {side}, on {self.device}>"


def _listed(pictures: Iterable[Picture], expected: str) -> list[Picture]:
    """The pictures, which may be any iterable, but not the bytes of a file."""
    if isinstance(pictures, bytes | bytearray | memoryview | io.IOBase) or not isinstance(pictures, Iterable):
        raise DataError(f"got {type(pictures).__name__}, expected {expected}")
    return list(pictures)


def _found(pictures: Sequence[Picture]) -> Iterator[tuple[Photo | None, Picture]]:
    """Each picture with its file, if it is a file; a folder gives several."""
    for picture in pictures:
        if not isinstance(picture, KINDS):
            raise DataError(f"got {type(picture).__name__}, expected {EXPECTED}")
        if not isinstance(picture, str | os.PathLike):
            yield None, picture
            continue
        path = os.fspath(picture)
        if not could_name_a_file(path):
            _refuse(f"{path!a:.80}", NO_NAME)
        if not os.path.isdir(path):  # noqa: PTH112, Path's raises where it may not look
            yield Photo(path, path), picture
            continue
        with ExitStack() as held:
            yield from (
                (photo, picture) for photo in photos.find([path], stdin=sys.stdin.buffer, held=held, problem=_refuse)
            )


def _refuse(name: str, problem: str) -> None:
    raise DataError(f"{name}: {problem}")


def _pixels(picture: Picture) -> PixelArray:  # H x W x 3
    if isinstance(picture, str | os.PathLike):
        try:
            return np.asarray(open_rgb(Path(picture)))
        except UnreadableImageError as error:
            raise DataError(f"{os.fspath(picture)}: {error}") from None
    if isinstance(picture, Image.Image):
        try:
            return np.asarray(to_rgb(picture))
        except OSError as error:
            raise DataError(f"the PIL image cannot be read: {error}") from None
    array = picture.permute(1, 2, 0).cpu().numpy() if isinstance(picture, Tensor) and picture.dim() == 3 else picture
    if isinstance(array, np.ndarray) and array.dtype == np.uint8:
        if array.ndim == 3 and array.shape[2] == 1:
            array = array[:, :, 0]
        if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4)):
            return np.asarray(Image.fromarray(np.ascontiguousarray(array)).convert("RGB"))
    if not isinstance(picture, np.ndarray | Tensor):
        raise DataError(f"got {type(picture).__name__}, expected {EXPECTED}")
    raise DataError(f"got {picture.dtype} of {_shape(picture)}, expected {EXPECTED}")


def _shape(values: Tensor | npt.NDArray[Any]) -> str:
    return " x ".join(map(str, values.shape)) or "no dimension"
