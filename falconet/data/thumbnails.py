"""Small pictures of photos for a page, also of what is left of broken ones."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image, ImageFile, ImageOps

from falconet.data.image_files import DAMAGE, UnreadableImageError, to_rgb, use_image
from falconet.data.storage import PhotoSource

SIDE = 168  # pixels of the longer side: 84 on a screen of two pixels per point
QUALITY = 62


def thumbnail(source: PhotoSource, number: int) -> bytes | None:
    """A photo as training sees it, as a JPEG; of a broken one what can be decoded, None: nothing."""
    try:
        with _broken_allowed():
            return use_image(source.opened(number), lambda image: _encoded(_shrunk(image)))
    except (UnreadableImageError, OSError):
        return None


def upright(source: PhotoSource, number: int) -> bytes | None:
    """A photo as viewers show it, turned by its EXIF tag."""
    try:
        return use_image(source.opened(number), lambda image: _encoded(ImageOps.exif_transpose(_shrunk(image))))
    except (UnreadableImageError, OSError, *DAMAGE):
        return None


def _shrunk(image: Image.Image) -> Image.Image:
    exif = image.getexif()
    image.draft("RGB", (2 * SIDE, 2 * SIDE))
    small = to_rgb(image)
    small.thumbnail((SIDE, SIDE), reducing_gap=2.0)
    small.info["exif"] = exif.tobytes() if exif else b""
    return small


def _encoded(image: Image.Image) -> bytes:
    image.info.clear()
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


@contextmanager
def _broken_allowed() -> Iterator[None]:
    """Let Pillow return what it has of a truncated file; a setting of the whole process, so of one thread."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before
