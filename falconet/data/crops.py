"""Which box of each photo is read and whether it is mirrored: the same whoever decodes it."""

from dataclasses import dataclass

import numpy as np

from falconet.data import augment as augmenting
from falconet.data.augment import Augment
from falconet.data.keyed import FloatArray, IntArray
from falconet.data.preprocessing import Preprocessing
from falconet.data.source import BoolArray


@dataclass(frozen=True, kw_only=True)
class Crops:
    """Training's random boxes and flips, or evaluation's centre box, by image number and epoch."""

    preprocessing: Preprocessing
    augment: Augment  # crop-flip or none
    seed: int

    def boxes(self, indices: IntArray, sizes: IntArray, *, epoch: int) -> FloatArray:  # N x (width, height) -> N x 4
        if self.augment == "crop-flip":
            draws = augmenting.crop_draws(indices, seed=self.seed, epoch=epoch)
            return augmenting.random_resized_crop(sizes[:, 0], sizes[:, 1], draws).astype(np.float64)
        resize, crop = self.preprocessing.resize, self.preprocessing.image_size
        boxes = [augmenting.evaluation_box(*size, resize=resize, crop=crop) for size in sizes.tolist()]
        return np.array(boxes, np.float64).reshape(-1, 4)

    def flips(self, indices: IntArray, *, epoch: int) -> BoolArray:
        return augmenting.flips(self.augment, indices, seed=self.seed, epoch=epoch)
