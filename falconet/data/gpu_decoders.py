"""nvJPEG's decoders on a device, each with a stream and memory of its own, which a portion of photos borrows."""

import functools
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from falconet.data import native, nvjpeg
from falconet.data.gpu_jpeg import Size
from falconet.data.native.binding import Workspace
from falconet.data.storage import PixelArray

DECODERS = 4  # per device: while one waits for its pictures, others read files or resize
PORTION_PIXELS = 2**26  # in one call, if there are several photos: 0.2 GB per decoder


class Photo(NamedTuple):
    """A file for the device, and its row in the batch."""

    row: int
    data: Tensor
    size: Size


def portions(photos: Iterable[Photo]) -> Iterator[list[Photo]]:
    """Neighbours of at most PORTION_PIXELS together; a photo of more is alone."""
    portion, pixels = list[Photo](), 0
    for photo in photos:
        own = photo.size.width * photo.size.height
        if portion and pixels + own > PORTION_PIXELS:
            yield portion
            portion, pixels = [], 0
        portion.append(photo)
        pixels += own
    if portion:
        yield portion


class Decoder(Protocol):
    """Decodes several files on the current stream."""

    def decode(self, photos: Sequence[Photo]) -> list[Tensor | None]:
        """Each image as 3 x H x W on the device, until the next call; None for one that nvJPEG refuses."""


class OwnDecoder:
    """Our binding: the pictures of a portion in one block of memory, on any stream, without a lock between threads."""

    def __init__(self, decoder: nvjpeg.Decoder, device: torch.device) -> None:
        self._decoder, self._device = decoder, device
        self._block = torch.empty(0, dtype=torch.uint8, device=device)

    def decode(self, photos: Sequence[Photo]) -> list[Tensor | None]:
        accepted = [photo for photo in photos if self._decoder.size(photo.data) == photo.size]
        sizes = [photo.size for photo in accepted]
        begins = nvjpeg.laid_out(sizes)
        if len(self._block) < begins[-1]:
            self._block = torch.empty(int(begins[-1] * 5 // 4), dtype=torch.uint8, device=self._device)
        if not accepted:
            return [None] * len(photos)
        places = nvjpeg.planes(self._block.data_ptr(), sizes)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        whole = self._decoder.decode([photo.data for photo in accepted], places, stream=stream)
        pictures = torch.split(self._block[: begins[-1]], np.diff(begins).tolist())
        decoded = {
            photo.row: picture[: 3 * photo.size.width * photo.size.height].view(3, photo.size.height, photo.size.width)
            for photo, picture, is_whole in zip(accepted, pictures, whole, strict=True)
            if is_whole
        }
        return [decoded.get(photo.row) for photo in photos]


class TorchvisionDecoder:
    """Torchvision's binding: one portion at a time, on a stream of lowest priority.

    It writes on a stream that torch's allocator does not know, so a decoded image must not be freed before the last
    kernel that reads it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[Tensor | None] = []

    def decode(self, photos: Sequence[Photo]) -> list[Tensor | None]:
        self._kept = decode_jpegs([photo.data for photo in photos], self._device)
        return [
            image if image is not None and tuple(image.shape) == (3, photo.size.height, photo.size.width) else None
            for photo, image in zip(photos, self._kept, strict=True)
        ]


def decode_jpegs(encoded: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """Each image as 3 x H x W on the device; None for one that nvJPEG refuses."""
    from torchvision.io import ImageReadMode, decode_jpeg

    if not encoded:
        return []
    try:
        decoded: list[Tensor | None] = decode_jpeg(list(encoded), mode=ImageReadMode.RGB, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # one of them failed; nvJPEG does not report which
        if len(encoded) == 1:
            return [None]
        middle = len(encoded) // 2
        return decode_jpegs(encoded[:middle], device) + decode_jpegs(encoded[middle:], device)
    return decoded


class Place:
    """What one portion needs: a decoder, its stream, and memory for the files."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        library = native.library()
        self.workspace = None if library is None else Workspace(library)
        with torch.cuda.device(device):
            self.decoder = _decoder(device)
        self._files = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> PixelArray:
        """For so many bytes of files, from which the device copies by itself."""
        if len(self._files) < size:
            self._files = torch.empty(size + size // 4, dtype=torch.uint8, pin_memory=True)
        return self._files[:size].numpy()

    def wait(self) -> None:
        """Until the stream's work is done."""
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps; waiting for a stream spins
        done.record(self.stream)
        done.synchronize()


class Places:
    """The places of a device: as many are made as are ever used at once, at most `most`, and kept."""

    def __init__(self, make: Callable[[], Place], *, most: int) -> None:
        self._make = make
        self._free = queue.LifoQueue[Place | None]()  # the last one used again: no more are made than needed
        for _ in range(most):
            self._free.put(None)

    @contextmanager
    def taken(self) -> Iterator[Place]:
        """One place, once it is free."""
        place = self._free.get()
        try:
            place = place or self._make()
            yield place
        finally:
            self._free.put(place)


@functools.cache
def places(device: torch.device) -> Places:
    """Those of this device, which all loaders share."""
    return Places(functools.partial(Place, device), most=DECODERS)


def _decoder(device: torch.device) -> Decoder:
    library, _ = nvjpeg.load()
    return TorchvisionDecoder(device) if library is None else OwnDecoder(nvjpeg.decoder(library), device)


def describe(device: torch.device) -> str:
    """What decodes there."""
    library, why = nvjpeg.load()
    if library is None:
        return f"torchvision's nvJPEG: {why}"
    with torch.cuda.device(device):
        engines = nvjpeg.decoder(library).backend is nvjpeg.Backend.HARDWARE
    return f"nvJPEG {library.version}, {'engines of its own' if engines else 'multiprocessors'}"
