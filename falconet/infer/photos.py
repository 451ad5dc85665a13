"""Photos to predict: found in folders of any size, and scored in batches that are read as in validation."""

import itertools
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from falconet.data.image_files import NO_NAME, BadImages, UnreadableImageError, use_image
from falconet.data.input import Input
from falconet.data.loader import BatchShape
from falconet.data.sources.folder import HEIC, Listing, image_names
from falconet.data.storage import FileSource
from falconet.infer.classifier import Classifier
from falconet.infer.embeddings import tapped
from falconet.parallel.world import World
from falconet.writing import could_name_a_file

STDIN = "-"
AT_ONCE = 4096  # photos per loader: names and threads are dropped between loaders, so memory is bounded
# How files in the formats that people send through a pipe start.
SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
AS_TEXT = ("PPM", "XBM", "XPM")  # Pillow's names of formats that may start without any control character
HEAD = 12  # bytes, enough to recognise each of them
LONGEST = 4096  # bytes in a path that Linux opens, with its final zero
_CONTROL, _EMPTY = re.compile(rb"[\x01-\x08\x0a-\x1f\x7f]"), re.compile(rb"\A\0|\0\0")


class Photo(NamedTuple):
    """A file to predict."""

    name: str  # as given, or as found in a folder
    path: str  # the file to open: the same, or a copy of stdin


class Scored(NamedTuple):
    """What the model makes of a photo."""

    photo: Photo
    logits: Tensor  # classes, float32, on the host
    features: Tensor  # the classifier layer's input, if that was asked for
    problem: str = ""  # why the scores mean nothing: the photo could not be read


Problem = Callable[[str, str], None]  # takes a name and what is wrong with it


def find(words: Iterable[str], *, stdin: BinaryIO, held: ExitStack, problem: Problem) -> Iterator[Photo]:
    """Find the photos that the words name, one after the other.

    Folders are searched recursively, in the order of a validation: sorted by name, with links to folders followed only
    at the top. `-` stands for stdin: paths, one per line or each with a NUL after it, or one photo of any format. A
    named file is taken whatever its name is. `held` keeps the copy of a photo from stdin.
    """
    for word in words:
        if word == STDIN:
            yield from _from_stdin(stdin, held, problem)
        elif not word or not could_name_a_file(word):
            problem(word or "''", NO_NAME)
        elif os.path.isdir(word):  # noqa: PTH112, Path's raises where it may not look
            yield from _in_folder(word, problem)
        else:
            yield Photo(word, word)


def _in_folder(folder: str, problem: Problem) -> Iterator[Photo]:
    listing, count = Listing(also=HEIC), 0  # photos of a phone, which are named as unreadable instead of passed over
    try:
        for name in image_names(folder, "", listing, linked=True):
            path = os.path.join(folder, name)  # noqa: PTH118, a million names
            yield Photo(path, path)
            count += 1
            listing.folders.clear()
    except OSError as error:
        listing.refused.append(error)
    for refused in listing.refused:
        problem(refused.filename or folder, refused.strerror or str(refused))
    if not count and not listing.refused:
        problem(folder, "no photos in this folder")


def _from_stdin(stdin: BinaryIO, held: ExitStack, problem: Problem) -> Iterator[Photo]:
    head = stdin.read(LONGEST)
    if not head:
        problem("stdin", "empty; expected paths, one per line, or a photo")
    elif not is_photo(head) and _is_list(head):
        paths = (os.fsdecode(path) for path in _listed(head, stdin) if path not in (b"", STDIN.encode()))
        yield from find(paths, stdin=stdin, held=held, problem=problem)
    else:
        file = held.enter_context(tempfile.NamedTemporaryFile(prefix="falconet-photo-"))  # noqa: SIM115
        file.write(head)
        shutil.copyfileobj(stdin, file)
        file.flush()
        reason = "" if is_photo(head) else _why_no_photo(Path(file.name))
        if reason:
            problem("stdin", f"neither a photo nor a list of paths ({reason})")
        else:
            yield Photo(STDIN, file.name)


def _is_list(head: bytes) -> bool:
    """Whether a file that starts like this is a list of paths: in any other file, `/` between two NULs is no folder.

    `find -print0` writes no empty path, and only what exists may have control characters in its name.
    """
    whole = head.split(b"\0" if b"\0" in head else b"\n")[:-1]
    odd = [path for path in whole if _CONTROL.search(path.rstrip(b"\r"))]
    return not _EMPTY.search(head) and all(map(os.path.lexists, odd)) and bool(_why_no_photo(BytesIO(head), AS_TEXT))


def _why_no_photo(file: Path | BinaryIO, formats: tuple[str, ...] | None = None) -> str:
    """Why Pillow does not take a file for a photo in one of the formats, or in any; empty if it does."""
    try:
        use_image(file, lambda _: None, formats=formats)
    except UnreadableImageError as error:
        return str(error)
    return ""


def _listed(head: bytes, rest: BinaryIO) -> Iterator[bytes]:
    """The paths in a list, one per line, or each with a NUL after it, as `find -print0` writes them."""
    if b"\0" not in head:
        for line in itertools.chain((head + rest.readline()).split(b"\n"), rest):
            yield line.rstrip(b"\r\n")
        return
    left = b""
    for piece in itertools.chain([head], iter(lambda: rest.read(LONGEST), b"")):
        *paths, left = (left + piece).split(b"\0")
        yield from paths
    yield left


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
    names = [str(Path.cwd() / photo.path)[1:] for photo in photos]  # keeps what `..` and links lead to
    source = FileSource.of(Path("/"), names=names, labels=[0] * len(names), class_names=(".",))
    images = classifier.images(source)
    device, regime = classifier.device, classifier.regime
    # Decoding on a device, and caches between epochs, were chosen for the machine that trained.
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
            first = number * batch
            for row, photo in enumerate(photos[first : first + batch]):
                problem = "" if is_read[row] else unread.reasons[source.where(first + row)]
                if not problem and not is_finite[row]:
                    problem = "the model's scores for it are not finite"
                rows.append(Scored(photo, logits[row], kept[row], problem))
            yield rows


class _Unread(BadImages):
    """Collects why each photo could not be read."""

    def __init__(self) -> None:
        super().__init__(None, note=lambda _: None)
        self.reasons: dict[str, str] = {}
        self._adding = threading.Lock()

    def add(self, where: str, reason: str) -> None:
        with self._adding:
            self.reasons[where] = reason
