"""Photos in request bodies."""

from typing import NamedTuple

from falconet.infer.photos import is_photo
from falconet.serve.refusals import RequestError


class Upload(NamedTuple):
    """A photo of a request."""

    name: str
    encoded: memoryview


class Uploads(NamedTuple):
    """The photos of a request, and its other fields."""

    photos: list[Upload]
    fields: dict[str, str]


def read(body: memoryview, content_type: str) -> Uploads:
    """The photos in a body."""
    del content_type
    if not is_photo(bytes(body[:12])):
        raise RequestError("the body is not a photo")
    return Uploads([Upload("", body)], {})
