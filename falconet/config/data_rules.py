"""What may not be combined about data; rules like those of `rules`, which calls them."""

from typing import Any, Literal

PHOTOS = ("imagenet", "folder")  # kinds of data that are encoded images of many sizes


def folder_needs_a_place(options: Any) -> str | None:
    kind = options.data.data
    if kind in PHOTOS and options.data.data_dir is None and not only_planned(options):
        return f"--data {kind}: needs --data-dir (or the environment variable DATA_DIR), a folder with train/ and val/"
    return None


def only_planned(options: Any) -> bool:
    """Whether a run is planned and not made, on data whose published size is known."""
    return options.data.data == "imagenet" and hasattr(options, "run") and options.run.plan


def bytes_are_not_normalised_yet(options: Any) -> str | None:
    if options.data.normalization_location == "host" and options.data.eight_bit_io:
        return (
            "--normalization-location host: contradicts --eight-bit-io, which copies pixels; wanted device, or"
            " --no-eight-bit-io beside it"
        )
    return None


def colours_are_three(options: Any) -> str | None:
    for name in ("pixel_mean", "pixel_deviation"):
        count = len(getattr(options.data, name))
        if count not in (0, 3):
            return f"--{name.replace('_', '-')}: got {count} numbers, wanted 3, of red, green and blue"
    return None


def by_pixels(options: Any) -> bool:
    """Whether pixels are normalised by numbers of the whole data."""
    return bool(options.data.normalization_location != "none" and options.data.normalization == "deviation")


def decoded_there_is_not_copied(options: Any) -> str | None:
    if options.data.decode_device == "cuda" and not options.data.eight_bit_io:
        return "--decode-device cuda: contradicts --no-eight-bit-io: its pixels are never copied; wanted cpu"
    return None


def is_stored(options: Any) -> bool:
    """Whether images lie somewhere, and are not made up."""
    return options.data.data not in ("generated", "synthetic")


def crops_photos(options: Any) -> bool:
    """Whether random crops of photos are drawn."""
    return options.data.data in PHOTOS and options.augmentation.augment in ("auto", "crop-flip")


def crops(options: Any) -> bool:
    """Whether images may be cropped at random."""
    return options.augmentation.augment in ("auto", "crop-flip")


def objects_by_area(options: Any) -> bool:
    """Whether crops must overlap objects by a rule that can be chosen; TensorFlow's draw has its own."""
    return boxes_used(options) != "no" and options.augmentation.crop_draw == "area"


def boxes_used(options: Any) -> Literal["no", "if there", "yes"]:
    """Whether these crops look at annotated objects."""
    if not crops_photos(options):
        return "no"
    if options.augmentation.use_bbox_info:
        return "yes"
    return "if there" if options.augmentation.use_bbox_info_if_there else "no"


def validates_whole(options: Any) -> bool:
    """Whether one process validates with the whole model; stages hand on micro-batches."""
    return options.validation.validation_mode != "none" and not options.parallel.pipeline_splits
