"""What decodes photos here, and how many threads read them."""

from falconet.config import sections
from falconet.config.ranges import value_or
from falconet.data import native
from falconet.parallel import resources

MOST_WORKERS = 32  # the originals' limit
DEVICE_WORKERS = 3  # where the device decodes: two keep it busy, and more than four get into each other's way


def decoder() -> str:
    """What reads JPEG files here."""
    library = native.library()
    return f"the native decoder ({library.processor})" if library else f"Pillow: {native.why_not()}"


def workers(data: sections.Data, processes: int = 1) -> int:
    most = DEVICE_WORKERS if data.decode_device == "cuda" else MOST_WORKERS
    return value_or(data.dataloader_workers, min(most, resources.cores(processes)))
