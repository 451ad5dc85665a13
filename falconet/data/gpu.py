"""JPEG files decoded on the device, where it gives the same picture as Pillow; other images on the host."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from falconet.data.buffers import Batch, Buffers
from falconet.data.crops import Crops
from falconet.data.gpu_decoders import Photo, Place, places, portions
from falconet.data.gpu_jpeg import plain_size
from falconet.data.image_files import UnreadableImageError
from falconet.data.keyed import GOLDEN, IntArray
from falconet.data.readers import Reader, opener
from falconet.data.storage import BoolArray, PhotoSource

PORTION = 128  # images per call: nvJPEG is efficient with many at once (bench/decode_device.py)


def given_to_device(indices: IntArray, share: float) -> BoolArray:
    """Which photos the device decodes if it decodes this share of them: by their numbers alone.

    Multiples of the golden ratio, without their whole parts, are spread evenly, so that every class has this share.
    """
    fractions = (indices.astype(np.uint64) * np.uint64(GOLDEN) >> np.uint64(11)) * 2.0**-53  # below 1
    return fractions < share


class DeviceBuffers(Buffers):
    """Memory for micro-batches whose images are decoded on the device; labels and mixes stay on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # It owns the batches' memory. Of high priority, as all of a loader's: no update is captured on those.
        self._home = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def batch(self, images: int, *, size: int, dtype: torch.dtype = torch.uint8) -> Batch:
        small = super().batch(images, size=0)
        # Consumers recorded what they did with this memory before, so the home stream can write padding to it.
        with torch.cuda.stream(self._home):
            pixels = torch.empty((images, size, size, 3), dtype=dtype, device=self._device)
        return small._replace(images=pixels.permute(0, 3, 1, 2))


class DeviceRows:
    """JPEG files through nvJPEG; everything else through the host's reader, with the same crop and flip.

    The loader's threads call it. A photo is always decoded in the same place, so that neither the number of threads nor
    a restart changes its pixels.

    Files are read by the native library, if there is one. In Python a file takes about 0.1 ms, mostly with Python's
    lock: 10,000 per second would leave the training loop no time to launch anything.
    """

    dtype = torch.uint8

    def __init__(
        self,
        device: torch.device,
        *,
        source: PhotoSource,
        crops: Crops,
        host: Reader,
        rows: int | None = None,
        share: float = 1.0,
    ) -> None:
        """`share`: of the photos, those that the device decodes."""
        self.size, self.rows = crops.size, rows or PORTION
        self._device, self._source, self._crops, self._host = device, source, crops, host
        self._share, self._places = share, places(device)
        self._open, self._thread = opener(source), threading.local()

    def read(self, indices: IntArray, *, epoch: int, out: Tensor) -> BoolArray:
        read = np.ones(len(indices), dtype=np.bool_)
        done = np.zeros(len(indices), dtype=np.bool_)
        asked = np.flatnonzero(given_to_device(indices, self._share))
        if len(asked) > 0:
            with self._places.taken() as place, torch.cuda.stream(place.stream):
                for portion in portions(self._plain(asked, indices, place)):
                    done[self._decode(portion, indices, epoch=epoch, out=out, place=place)] = True
        left = np.flatnonzero(~done)
        if len(left) > 0:
            read[left] = self._on_host(left, indices, epoch=epoch, out=out)
        return read

    def _plain(self, rows: IntArray, indices: IntArray, place: Place) -> Iterator[Photo]:
        """Those that the device can decode."""
        most = Image.MAX_IMAGE_PIXELS or 2**27
        for row, data in zip(rows.tolist(), self._encoded(indices[rows], place), strict=True):
            size = plain_size(data.numpy().data) if data is not None else None
            if data is not None and size and size.width * size.height <= most:
                yield Photo(row, data, size)

    def _decode(
        self, portion: Sequence[Photo], indices: IntArray, *, epoch: int, out: Tensor, place: Place
    ) -> list[int]:
        """Write photos into their rows; returns the rows. The others, which nvJPEG refused, are left to the host."""
        images = place.decoder.decode(portion)
        decoded = {photo.row: image for photo, image in zip(portion, images, strict=True) if image is not None}
        if decoded:
            self._place(decoded, indices, epoch=epoch, out=out)
        place.wait()
        return list(decoded)

    def _encoded(self, indices: IntArray, place: Place) -> Iterator[Tensor | None]:
        """The bytes of each file, until the next call; None if it cannot be read, which the host's reader reports."""
        if place.workspace is None:
            yield from map(self._read_in_python, indices.tolist())
        else:
            self._open(place.workspace, indices)
            block, sizes = place.workspace.encoded(len(indices), memory=place.memory)
            yield from (part if len(part) else None for part in torch.split(torch.from_numpy(block), sizes.tolist()))

    def _read_in_python(self, index: int) -> Tensor | None:
        try:
            data = bytearray(self._source.encoded(index))  # torch expects writable memory
        except (OSError, UnreadableImageError):
            return None
        return torch.frombuffer(data, dtype=torch.uint8) if data else None

    def _place(self, decoded: dict[int, Tensor], indices: IntArray, *, epoch: int, out: Tensor) -> None:
        from falconet.data.gpu_resize import resize_boxes  # Triton, which comes with CUDA

        own = indices[list(decoded)]
        sizes = np.array([(image.shape[2], image.shape[1]) for image in decoded.values()], np.int64)
        boxes, flips = self._crops.boxes(own, sizes, epoch=epoch), self._crops.flips(own, epoch=epoch)
        preprocessing = self._crops.preprocessing
        resize_boxes(list(decoded.values()), boxes, flips, out, preprocessing=preprocessing, rows=list(decoded))

    def _on_host(self, rows: IntArray, indices: IntArray, *, epoch: int, out: Tensor) -> BoolArray:
        """Decode the photos of these rows on this thread, and copy them; returns which could be read."""
        pixels = self._scratch(len(rows))
        read = self._host.read(indices[rows], epoch=epoch, out=pixels.numpy())
        with torch.cuda.stream(self._stream()):
            places = torch.from_numpy(rows).pin_memory().to(self._device, non_blocking=True)
            out[places] = pixels.to(self._device, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()
        return read

    # Each thread has its own of the following.

    def _scratch(self, count: int) -> Tensor:  # count x S x S x 3
        """Pinned memory for what the host decodes, used again after each part."""
        kept: Tensor | None = getattr(self._thread, "pixels", None)
        if kept is None or len(kept) < count:
            shape = (count + count // 4, self.size, self.size, 3)  # a little more, so that other parts fit too
            kept = self._thread.pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        return kept[:count]

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._thread, "stream"):
            self._thread.stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._thread.stream
        return stream
