"""Compare `falconet data check` with plain Pillow loops over the same files: processor time per photo, one thread each.

    python bench/data_check.py FOLDER [--photos 2000]

The files are read once before, so that the disk does not count. CleanVision is measured if it is installed.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from falconet.data import inspection, layout
from falconet.data.fingerprints import near_pairs
from falconet.data.storage import FileSource


def check(source: FileSource) -> None:
    *_, (seen, _) = inspection.inspect([source], workers=1)
    near_pairs(seen.prints)


def verify(source: FileSource) -> None:
    for index in range(len(source)):
        with Image.open(source.path(index)) as image:
            image.verify()


def load(source: FileSource) -> None:
    for index in range(len(source)):
        with Image.open(source.path(index)) as image:
            image.load()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", type=int, default=2000)
    asked = parser.parse_args()
    splits = layout.survey(asked.folder)
    source = max((splits.train, splits.validation), key=len)
    assert isinstance(source, FileSource)
    source = source.subset(source.labels.argsort(kind="stable")[:: max(1, len(source) // asked.photos)])
    for index in range(len(source)):
        source.path(index).read_bytes()
    ways: dict[str, Callable[[FileSource], None]] = {
        "falconet data check": check,
        "Pillow verify (headers)": verify,
        "Pillow load (decodes)": load,
    }
    try:
        from cleanvision import Imagelab
    except ImportError:
        pass
    else:
        paths = [str(source.path(index)) for index in range(len(source))]
        ways["CleanVision"] = lambda _: Imagelab(filepaths=paths).find_issues(n_jobs=1, verbose=False)
    for name, way in ways.items():
        spent = []
        for _ in range(3):
            began = time.process_time()
            way(source)
            spent.append(time.process_time() - began)
        print(f"{name:24} {len(source) / min(spent):8,.0f} photos per second and core", flush=True)


if __name__ == "__main__":
    main()
