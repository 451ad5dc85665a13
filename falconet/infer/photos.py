"""Photos to predict: found in folders of any size, and scored in batches that are read as validation's are."""

import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from falconet.data.image_files import BadImages
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.data.sources.folder import Listing, image_names
from falconet.data.storage import FileSource
from falconet.infer.classifier import Classifier
from falconet.infer.embeddings import tapped
from falconet.parallel.world import World

STDIN = "-"
AT_ONCE = 4096  # photos per loader: names and threads are dropped between them, and memory stays bounded
# How the files of the formats that people send through a pipe start.
SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
HEAD = 12  # bytes, enough to recognise any of them


class Photo(NamedTuple):
    """A file to predict."""

    name: str  # as it was given, or found in a folder
    path: str  # what is opened: the same, or a copy of stdin


class Scored(NamedTuple):
    """What the model makes of a photo."""

    photo: Photo
    logits: Tensor  # classes, float32, on the host
    features: Tensor  # what the classifier layer gets, if that was asked for
    problem: str = ""  # why the scores mean nothing: the photo could not be read


Problem = Callable[[str, str], None]  # takes a name and what is wrong with it


def find(words: Iterable[str], *, stdin: BinaryIO, held: ExitStack, problem: Problem) -> Iterator[Photo]:
    """The photos that the words name, one after the other.

    Folders are searched recursively, in the order of a validation: sorted by name, links to folders followed only at
    the top. `-` stands for stdin: one photo if it starts like one, else paths, one per line. A file that is named is
    taken whatever it is called. `held` keeps the copy of a photo from stdin.
    """
    for word in words:
        if word == STDIN:
            yield from _from_stdin(stdin, held, problem)
        elif Path(word).is_dir():
            yield from _in_folder(word, problem)
        else:
            yield Photo(word, word)


def _in_folder(folder: str, problem: Problem) -> Iterator[Photo]:
    listing, count = Listing(), 0
    try:
        for name in image_names(folder, "", listing, linked=True):
            path = os.path.join(folder, name)  # noqa: PTH118, a million names
            yield Photo(path, path)
            count += 1
            listing.folders.clear()
    except OSError as error:
        problem(error.filename or folder, error.strerror or str(error))
        return
    if not count:
        problem(folder, "no photos in this folder")


def _from_stdin(stdin: BinaryIO, held: ExitStack, problem: Problem) -> Iterator[Photo]:
    head = stdin.read(HEAD)
    if not head:
        problem("stdin", "empty; expected paths, one per line, or a photo")
    elif is_photo(head):
        file = held.enter_context(tempfile.NamedTemporaryFile(prefix="falconet-photo-"))  # noqa: SIM115
        file.write(head)
        shutil.copyfileobj(stdin, file)
        file.flush()
        yield Photo(STDIN, file.name)
    else:
        rest = b"" if head.endswith(b"\n") else stdin.readline()
        lines = (line.rstrip(b"\r\n") for line in itertools.chain((head + rest).splitlines(), stdin))
        paths = (os.fsdecode(line) for line in lines if line not in (b"", STDIN.encode()))
        yield from find(paths, stdin=stdin, held=held, problem=problem)


def is_photo(head: bytes) -> bool:
    """Whether a file that starts like this is an image: JPEG, PNG, GIF, TIFF, WebP or BMP."""
    webp = head.startswith(b"RIFF") and head[8:12] == b"WEBP"
    bitmap = head.startswith(b"BM") and head[6:10] == bytes(4)  # four reserved bytes, which no path has
    return head.startswith(SIGNATURES) or webp or bitmap


def scored(
    classifier: Classifier, photos: Iterable[Photo], *, batch: int | None = None, features: bool = False
) -> Iterator[list[Scored]]:
    """Every photo with its scores, in order, a batch at a time, in bounded memory.

    `batch`: images in one forward pass; None: as in the run's validation, or fewer if there are fewer photos.
    """
    most = batch or classifier.batch
    rest = iter(photos)
    while some := list(itertools.islice(rest, max(1, AT_ONCE // most) * most)):
        yield from _scored(classifier, some, batch=batch or min(most, len(some)), features=features)


def _scored(classifier: Classifier, photos: list[Photo], *, batch: int, features: bool) -> Iterator[list[Scored]]:
    unread = _Unread()
    names = [_absolute(photo.path)[1:] for photo in photos]
    images = classifier.images(FileSource.of(Path("/"), names=names, labels=[0] * len(names), class_names=(".",)))
    device, regime = classifier.device, classifier.regime
    # What is decoded on a device, or kept between epochs, depends on the machine that trained.
    decode = classifier.data.decode_device if device.type == "cuda" else "cpu"
    data = replace(classifier.data, decode_device=decode, dataset_cache=False)
    reading = Input(data=data, regime=regime, world=World(device=device), note=lambda _: None)
    loader = reading.evaluation_loader(images, shape=BatchShape(micro_batch=batch), bad=unread)
    score = classifier.by_pixels.uncaptured if features else classifier.by_pixels
    tap: AbstractContextManager[Callable[[], Tensor | None]] = nullcontext(lambda: None)
    if features:
        tap = tapped(classifier.model, len(classifier.class_names))
    with tap as features_seen:
        for number, read in enumerate(loader.batches()):
            logits = score(read.images).cpu()
            seen = features_seen()
            kept = torch.empty(batch, 0) if seen is None else seen.cpu()
            is_read, is_finite = (read.labels >= 0).tolist(), logits.isfinite().all(dim=1).tolist()
            rows = []
            for row, photo in enumerate(photos[number * batch : (number + 1) * batch]):
                problem = "" if is_read[row] else unread.reasons[_absolute(photo.path)]
                if not problem and not is_finite[row]:
                    problem = "the model's scores for it are not finite"
                rows.append(Scored(photo, logits[row], kept[row], problem))
            yield rows


def _absolute(path: str) -> str:
    """From the root, without changing what `..` and links lead to."""
    return str(Path.cwd() / path)


class _Unread(BadImages):
    """Why each photo could not be read."""

    def __init__(self) -> None:
        super().__init__(None, note=lambda _: None)
        self.reasons: dict[str, str] = {}
        self._adding = threading.Lock()

    def add(self, where: str, reason: str) -> None:
        with self._adding:
            self.reasons[where] = reason
