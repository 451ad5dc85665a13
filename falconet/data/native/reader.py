"""Image files decoded by the native library; what it leaves alone goes to Pillow with the same crop."""

import os
import threading
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from falconet.data import augment as augmenting
from falconet.data.augment import Augment
from falconet.data.keyed import FloatArray, IntArray
from falconet.data.native.binding import MOST_PIXELS, Library, SizeArray, Status, Workspace
from falconet.data.preprocessing import Preprocessing
from falconet.data.source import BoolArray, FileSource, PixelArray

if TYPE_CHECKING:
    from falconet.data.readers import Reader


class NativeReader:
    """One call reads a part's files, one draws their boxes, one decodes them; the loader's threads do the rest."""

    rows = 16  # about 9 ms, of which Python takes 1 %; and as many files lie in each thread's memory at once

    def __init__(
        self,
        source: FileSource,
        *,
        library: Library,
        preprocessing: Preprocessing,
        augment: Augment,
        seed: int,
        pillow: "Reader",
    ) -> None:
        self.size = preprocessing.image_size
        self._source, self._resize = source, preprocessing.resize
        self._folders = [os.fsencode(source.root / name) + b"/" for name in source.class_names]
        self._augment, self._seed = augment, seed
        self._library, self._pillow = library, pillow
        self._own = threading.local()

    def read(self, indices: IntArray, *, epoch: int, out: PixelArray) -> BoolArray:
        workspace = self._workspace()
        sizes, statuses = workspace.open([self._path(index) for index in indices.tolist()])
        boxes = self._boxes(indices, np.where((statuses == Status.OK)[:, None], sizes, 1), epoch)
        flips = augmenting.flips(self._augment, indices, seed=self._seed, epoch=epoch)
        left = np.flatnonzero(workspace.decode(boxes, flips, out) != Status.OK)
        read = np.ones(len(indices), dtype=np.bool_)
        if len(left) > 0:
            pixels = np.empty((len(left), *out.shape[1:]), np.uint8)
            read[left] = self._pillow.read(indices[left], epoch=epoch, out=pixels)
            out[left] = pixels
        return read

    def _workspace(self) -> Workspace:
        """This thread's own; it goes when the thread does."""
        if not hasattr(self._own, "workspace"):
            # Pillow's own limit, which refuses the image there, so that both agree on what is too large.
            self._own.workspace = Workspace(self._library, most_pixels=Image.MAX_IMAGE_PIXELS or MOST_PIXELS)
        workspace: Workspace = self._own.workspace
        return workspace

    def _path(self, index: int) -> bytes:
        source = self._source  # FileSource.path, without making a Path of it: a third of a microsecond instead of four
        begin, end = source.offsets[index : index + 2].tolist()
        return self._folders[int(source.labels[index])] + source.names[begin:end]

    def _boxes(self, indices: IntArray, sizes: SizeArray, epoch: int) -> FloatArray:  # N x 4
        if self._augment == "crop-flip":
            widths, heights = sizes.T.astype(np.int64)
            draws = augmenting.crop_draws(indices, seed=self._seed, epoch=epoch)
            return augmenting.random_resized_crop(widths, heights, draws).astype(np.float64)
        resize, crop = self._resize, self.size
        boxes = [augmenting.evaluation_box(*size, resize=resize, crop=crop) for size in sizes.tolist()]
        return np.array(boxes, np.float64).reshape(-1, 4)
