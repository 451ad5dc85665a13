"""The other methods in bench/loader.py: NVIDIA DALI and FFCV, on the CPU."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from falconet.data.storage import FileSource

SIZE, RESIZE, BATCH = 224, 256, 64
Epoch = Callable[[int], int]  # reads every photo once; returns how many


@dataclass(frozen=True)
class Method:
    """One way to read the photos: by one thread, and by loaders that persist between rounds."""

    name: str
    alone: Epoch
    loaders: dict[int, Epoch]  # by workers
    clock: Callable[[], float] = time.thread_time  # for `alone`; process time for one that uses other threads


def dali_method(source: FileSource, workers: list[int], training: bool) -> Method:
    """DALI's method: it decodes only the crop if it can, and its threads replace workers."""
    from nvidia.dali import fn, pipeline_def, types

    files = [str(source.path(index)) for index in range(len(source))]

    @pipeline_def(batch_size=BATCH, device_id=None)  # type: ignore[untyped-decorator]
    def pipeline() -> tuple[object, object]:  # in DALI's own type
        data, labels = fn.readers.file(
            files=files, labels=source.labels.tolist(), random_shuffle=training, name="files"
        )
        size = {"size": SIZE, "interp_type": types.INTERP_LINEAR, "antialias": True}
        if training:
            crops = fn.decoders.image_random_crop(data, random_area=[0.08, 1], random_aspect_ratio=[3 / 4, 4 / 3])
            images = fn.flip(fn.resize(crops, **size), horizontal=fn.random.coin_flip())
        else:
            whole = fn.resize(fn.decoders.image(data), **(size | {"size": RESIZE}), mode="not_smaller")
            images = fn.crop(whole, crop=(SIZE, SIZE))
        return images, labels

    def loader(count: int, **execution: object) -> Epoch:
        kept = pipeline(num_threads=count, **execution)
        kept.build()
        batches = -(-len(files) // BATCH)
        return lambda _: sum(len(kept.run()[1]) for _ in range(batches))

    # No prefetching: work done outside its turn would not be counted.
    alone = loader(1, exec_async=False, exec_pipelined=False, prefetch_queue_depth=1)
    loaders = {count: loader(count, prefetch_queue_depth=2) for count in workers}
    return Method("dali", alone, loaders, clock=time.process_time)


@dataclass(frozen=True)
class FfcvFiles:
    """FFCV's file, and the JPEG bytes in it as class folders."""

    own: Path
    jpegs: Path


def write_for_ffcv(source: FileSource, folder: Path) -> FfcvFiles:
    """Write FFCV's file with its recipe: JPEGs encoded again, at most 500 pixels wide or high, quality 90."""
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import encode_jpeg, resizer
    from ffcv.writer import DatasetWriter
    from PIL import Image

    longest, quality = 500, 90
    photos = _Photos(source)
    own = folder / "photos.beton"
    fields = {"image": RGBImageField(write_mode="jpg", max_resolution=longest, jpeg_quality=quality)}
    DatasetWriter(str(own), fields | {"label": IntField()}, num_workers=1).from_indexed_dataset(photos)
    for index in range(len(source)):
        pixels = resizer(np.asarray(Image.open(source.path(index)).convert("RGB")), longest)
        path = folder / "jpegs" / source.class_names[int(source.labels[index])] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_jpeg(pixels, quality).tobytes())
    return FfcvFiles(own, folder / "jpegs")


class _Photos:
    """Photos in the form that FFCV's writer takes."""

    def __init__(self, source: FileSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return Image.open(self._source.path(index)).convert("RGB"), int(self._source.labels[index])


def ffcv_method(files: FfcvFiles, repeat: int, workers: list[int], training: bool) -> Method:
    from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    def loader(count: int) -> Epoch:
        images = (
            [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
            if training
            else [CenterCropRGBImageDecoder((SIZE, SIZE), ratio=SIZE / RESIZE)]
        )
        kept = Loader(
            str(files.own),
            batch_size=BATCH,
            num_workers=count,
            os_cache=True,
            drop_last=False,
            order=OrderOption.RANDOM if training else OrderOption.SEQUENTIAL,
            pipelines={"image": [*images, ToTensor()], "label": [IntDecoder(), ToTensor()]},
        )
        return lambda _: sum(len(labels) for _ in range(repeat) for _, labels in kept)

    return Method("ffcv", loader(1), {count: loader(count) for count in workers}, clock=time.process_time)
