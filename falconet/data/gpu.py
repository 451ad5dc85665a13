"""Decodes JPEG files on the device if it gives the same picture as Pillow, and other images on the host."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from falconet.data import native
from falconet.data.buffers import Batch, Buffers
from falconet.data.crops import Crops
from falconet.data.image_files import UnreadableImageError
from falconet.data.keyed import IntArray
from falconet.data.native.binding import Workspace
from falconet.data.readers import Reader, opener
from falconet.data.storage import BoolArray, PhotoSource

START, END = b"\xff\xd8", b"\xff\xd9"
LAST = 256  # bytes at the end in which a file's end marker is looked for first
BASELINE, SCAN, ADOBE, JFIF = 0xC0, 0xDA, 0xEE, 0xE0
OTHER_FRAMES = frozenset({*range(0xC1, 0xD0)} - {0xC4, 0xC8, 0xCC})  # extended, progressive, lossless, arithmetic
# Horizontal and vertical sampling factors of the luminance: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1.
SAMPLINGS = frozenset({0x11, 0x21, 0x22, 0x12, 0x41})


Bytes = bytes | bytearray | memoryview


class Size(NamedTuple):
    width: int
    height: int


def plain_size(data: Bytes) -> Size | None:
    """Width and height of a complete 8-bit baseline JPEG, grey or YCbCr; None for what the host has to decode."""
    if data[:2] != START:
        return None
    at, size, adobe, jfif = 2, None, None, False
    named_rgb = False
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if length < 2 or at + 2 + length > len(data) or marker in OTHER_FRAMES:
            return None
        if marker == SCAN:
            # The device may also give pixels for a truncated file, but wrong ones.
            whole = END in bytes(data[max(at, len(data) - LAST) :]) or END in bytes(data[at:])
            colours = adobe == 0 or (adobe is None and not jfif and named_rgb)
            return size if whole and not colours else None
        if marker == BASELINE:
            frame = _frame(data[at + 4 : at + 2 + length])
            if frame is None or size is not None:
                return None
            size, named_rgb = frame
        elif marker == JFIF:
            jfif = jfif or data[at + 4 : at + 9] == b"JFIF\0"
        elif marker == ADOBE and data[at + 4 : at + 9] == b"Adobe" and length >= 14:
            adobe = data[at + 15]
        at += 2 + length
    return None


def _frame(frame: Bytes) -> tuple[Size, bool] | None:
    """The size of a frame, and whether its components are named R, G and B."""
    if len(frame) < 6 or frame[0] != 8:
        return None
    height, width, components = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4], frame[5]
    if height == 0 or width == 0 or components not in (1, 3) or len(frame) != 6 + 3 * components:
        return None
    if components == 1:
        return Size(width, height), False
    luminance, blue, red = frame[7], frame[10], frame[13]
    if luminance not in SAMPLINGS or (blue, red) != (0x11, 0x11):
        return None
    return Size(width, height), (frame[6], frame[9], frame[12]) == tuple(b"RGB")


PORTION = 128  # images per call: nvJPEG is more efficient with many (bench/decode_device.py)
PORTION_PIXELS = 2**26  # at most, for several images: 0.2 GB per thread


class Photo(NamedTuple):
    """A file for the device, and its row in the batch."""

    row: int
    data: Tensor
    size: Size


def portions(photos: Iterable[Photo]) -> Iterator[list[Photo]]:
    """Neighbours with at most PORTION_PIXELS in total; a larger photo is alone."""
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


class DeviceBuffers(Buffers):
    """Memory for micro-batches whose images are decoded on the device; labels and mixes stay on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # It owns the batches' memory. High priority, like all streams of a loader: no update is captured on those.
        self._home = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def batch(self, images: int, *, size: int, dtype: torch.dtype = torch.uint8) -> Batch:
        small = super().batch(images, size=0)
        # Consumers have recorded their use of this memory, so the home stream can write padding to it.
        with torch.cuda.stream(self._home):
            pixels = torch.empty((images, size, size, 3), dtype=dtype, device=self._device)
        return small._replace(images=pixels.permute(0, 3, 1, 2))


class DeviceRows:
    """Reads JPEG files by torchvision's nvJPEG, and everything else by the host's reader, with the same crop and flip.

    The loader's threads call it. Each has its own stream and waits for it after each portion: then the pixels are
    complete and what was decoded may be freed. (Torchvision writes on a stream that torch's allocator does not know, so
    a decoded image must not be freed before the last kernel that reads it is done.)

    Files are read by the native library, if there is one. In Python a file takes about 0.1 ms, mostly while holding
    Python's lock: 10,000 per second would leave the training loop no time to launch anything.
    """

    dtype = torch.uint8

    def __init__(
        self, device: torch.device, *, source: PhotoSource, crops: Crops, host: Reader, rows: int | None = None
    ) -> None:
        self.size, self.rows = crops.size, rows or PORTION
        self._device, self._source, self._crops, self._host = device, source, crops, host
        self._open, self._thread = opener(source), threading.local()

    def read(self, indices: IntArray, *, epoch: int, out: Tensor) -> BoolArray:
        read = np.ones(len(indices), dtype=np.bool_)
        with torch.cuda.stream(self._stream()):
            decoded = set[int]()
            for portion in portions(self._plain(indices)):
                decoded.update(self._decode(portion, indices, epoch=epoch, out=out))
            left = [row for row in range(len(indices)) if row not in decoded]
            if left:
                pixels = self._scratch(len(left))
                read[left] = self._host.read(indices[left], epoch=epoch, out=pixels.numpy())
                out[torch.tensor(left, device=self._device)] = pixels.to(self._device, non_blocking=True)
                self._wait()
        return read

    def _plain(self, indices: IntArray) -> Iterator[Photo]:
        """The photos that the device can decode."""
        most = Image.MAX_IMAGE_PIXELS or 2**27
        for row, data in enumerate(self._encoded(indices)):
            size = plain_size(data.numpy().data) if data is not None else None
            if data is not None and size and size.width * size.height <= most:
                yield Photo(row, data, size)

    def _decode(self, portion: Sequence[Photo], indices: IntArray, *, epoch: int, out: Tensor) -> list[int]:
        """Write photos into their rows and return these; what nvJPEG refuses is left to the host."""
        images = decode_jpegs([photo.data for photo in portion], self._device)
        decoded = {
            photo.row: image
            for photo, image in zip(portion, images, strict=True)
            if image is not None and tuple(image.shape) == (3, photo.size.height, photo.size.width)
        }
        if decoded:
            rows = np.array(list(decoded))
            self._place(list(decoded.values()), indices[rows], out, rows, epoch)
        self._wait()
        return list(decoded)

    def _wait(self) -> None:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps; waiting for a stream spins
        done.record(self._stream())
        done.synchronize()

    def _encoded(self, indices: IntArray) -> Iterator[Tensor | None]:
        """The bytes of each file, until the next call; None if it cannot be read, which the host's reader reports."""
        workspace = self._workspace()
        if workspace is None:
            yield from map(self._read_in_python, indices.tolist())
        elif len(indices) > 0:
            self._open(workspace, indices)
            block, sizes = workspace.encoded(len(indices))
            yield from (part if len(part) else None for part in torch.split(torch.from_numpy(block), sizes.tolist()))

    def _read_in_python(self, index: int) -> Tensor | None:
        try:
            data = bytearray(self._source.encoded(index))  # torch expects writable memory
        except (OSError, UnreadableImageError):
            return None
        return torch.frombuffer(data, dtype=torch.uint8) if data else None

    def _place(self, decoded: list[Tensor], indices: IntArray, images: Tensor, rows: IntArray, epoch: int) -> None:
        from falconet.data.gpu_resize import resize_boxes  # Triton comes with CUDA only

        sizes = np.array([(image.shape[2], image.shape[1]) for image in decoded], np.int64)
        boxes, flips = self._crops.boxes(indices, sizes, epoch=epoch), self._crops.flips(indices, epoch=epoch)
        whole = len(rows) == len(images)
        out = images if whole else torch.empty((len(rows), *images.shape[1:]), dtype=torch.uint8, device=self._device)
        resize_boxes(decoded, boxes, flips, out, preprocessing=self._crops.preprocessing)
        if not whole:
            images[torch.from_numpy(rows).to(self._device)] = out

    # Each thread has its own copy of the following.

    def _scratch(self, count: int) -> Tensor:  # count x S x S x 3
        """Pinned memory for what the host decodes, reused after each part."""
        kept: Tensor | None = getattr(self._thread, "pixels", None)
        if kept is None or len(kept) < count:
            shape = (count + count // 4, self.size, self.size, 3)  # a little more, so that other parts fit too
            kept = self._thread.pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return kept[:count]

    def _workspace(self) -> Workspace | None:
        library = native.library()
        if library is not None and not hasattr(self._thread, "workspace"):
            self._thread.workspace = Workspace(library)
        return getattr(self._thread, "workspace", None)

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._thread, "stream"):
            self._thread.stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._thread.stream
        return stream


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
