"""Keeps all images of a small dataset on the device, as bytes: batches are picked, shifted and mirrored there.

What happens to an image is drawn on the host, as for images that are read there, so a batch has the same pixels. The
draws take the host 0.06 ms for 2,000 images, while the device computes; the same hash on the device would take about
thirty launches per update.
"""

import threading
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from falconet.data.crops import Crops
from falconet.data.keyed import IntArray
from falconet.data.preprocessing import Preprocessing
from falconet.data.storage import ArraySource, BoolArray
from falconet.errors import ConfigError


def require_size(source: ArraySource, preprocessing: Preprocessing) -> None:
    """Refuse images that would have to be resized or cropped."""
    (height, width), side = source.images.shape[1:3], preprocessing.image_size
    kept = f"--dataset-location: got 'device', which keeps images of {width} x {height} as they are"
    if (height, width) != (side, side):
        raise ConfigError(f"{kept}; expected --image-size {width}, or host, because the model takes {side} x {side}")
    if preprocessing.resize != side:
        raise ConfigError(f"{kept}; expected --validation-crop whole, or host")


class ResidentRows:
    """Reads images from the device's memory into a batch there; this cannot fail.

    The loader's threads call it. On CUDA, each has its own stream and waits for it: then the pixels are complete.
    """

    dtype = torch.uint8

    def __init__(self, device: torch.device, *, source: ArraySource, crops: Crops, rows: int) -> None:
        """`rows`: images in a batch, which is picked at once."""
        self.size, self.rows = crops.size, rows
        require_size(source, crops.preprocessing)
        self._crops, self._device, self._thread = crops, device, threading.local()
        self._images = torch.from_numpy(source.images[np.arange(len(source))]).to(device)  # N x S x S x 3

    def read(self, indices: IntArray, *, epoch: int, out: Tensor) -> BoolArray:
        shifts = self._crops.shifts(indices, side=self.size, epoch=epoch)
        flips = self._crops.flips(indices, epoch=epoch)
        moves = np.column_stack((indices, np.zeros((len(indices), 2)) if shifts is None else shifts, flips))
        with self._own_stream():
            staged = torch.from_numpy(moves.astype(np.int64))
            if self._device.type == "cuda":
                staged = staged.pin_memory().to(self._device, non_blocking=True)
            reflects = self._crops.augmentation.shift_padding == "reflect"
            with torch.inference_mode():  # evaluation allocates the batch in it
                if self._device.type == "cuda":
                    from falconet.data import pixel_kernels  # Triton comes with CUDA only

                    pixel_kernels.pick(self._images, staged, reflects=reflects, out=out)
                else:
                    out.copy_(picked(self._images, staged, reflects=reflects))
            self._wait()
        return np.ones(len(indices), dtype=np.bool_)

    def _own_stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        if not hasattr(self._thread, "stream"):
            # High priority: kernels in equal streams wait until a captured update has ended.
            self._thread.stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._thread.stream)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps; a stream would spin
            done.record(self._thread.stream)
            done.synchronize()


def picked(images: Tensor, moves: Tensor, *, reflects: bool) -> Tensor:  # N x S x S x 3; M x 4 -> M x S x S x 3
    """Images by number, each moved down and right, then mirrored; `moves` has these four, in this order."""
    side = images.shape[1]
    at = torch.arange(side, device=images.device)
    numbers, down, right, mirrored = (column[:, None] for column in moves.T)  # M x 1 each
    rows = at - down  # M x S: where each row comes from
    columns = torch.where(mirrored.bool(), side - 1 - at, at) - right
    if reflects:
        rows, columns = (_reflected(places, side) for places in (rows, columns))
        return images[numbers[:, :, None], rows[:, :, None], columns[:, None, :]]
    inside = _is_inside(rows, side)[:, :, None] & _is_inside(columns, side)[:, None, :]
    rows, columns = rows.clamp(0, side - 1), columns.clamp(0, side - 1)
    return images[numbers[:, :, None], rows[:, :, None], columns[:, None, :]] * inside[..., None]


def _reflected(places: Tensor, side: int) -> Tensor:
    """Reflect places at the first and the last pixel, which are not repeated."""
    places = places.abs()
    return torch.where(places < side, places, 2 * (side - 1) - places)


def _is_inside(places: Tensor, side: int) -> Tensor:
    return (places >= 0) & (places < side)
