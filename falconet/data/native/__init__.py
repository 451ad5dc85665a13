"""The native JPEG decoder, in C++: reads, crops, resizes and flips files straight into a batch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from falconet.data.native.binding import Library

# Imported on request, so that `python -m falconet.data.native.compiler` does not load what it is about to build.


def library() -> "Library | None":
    """The native decoder; None if it was not built, for the reason that `why_not` gives."""
    from falconet.data.native import binding

    return binding.load()[0]


def why_not() -> str:
    """Why there is no library, in one line; empty if there is one."""
    from falconet.data.native import binding

    return binding.load()[1]
