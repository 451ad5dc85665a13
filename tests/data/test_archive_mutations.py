"""Archives changed at random are read or refused in one line, in little memory."""

import io
import os
import random
import resource
import time
import zipfile

import pytest
import torch

import layouts
from falconet.checkpoint.foreign import read_weights
from falconet.data import layout
from falconet.data.image_files import UnreadableImageError, open_rgb
from falconet.errors import CheckpointError, DataError

pytestmark = pytest.mark.slow
SECONDS = 40.0
FIRST = int(os.environ.get("MUTATION_SEED", "0"))  # another one searches elsewhere
MEGABYTE = 1024  # of ru_maxrss, which counts in kB


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def flipped(data, draw, *, hot=()):
    """Change, insert, remove or repeat a few bytes, half of the time near a `hot` place."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at = draw.choice(hot) + draw.randrange(64) if hot and draw.random() < 0.5 else draw.randrange(len(data))
        at = min(at, len(data) - 1)
        stretch = slice(at, at + draw.choice((1, 1, 4, 100, 3000)))
        match draw.randrange(8):
            case 0:
                del data[stretch]
            case 1:
                data[at:at] = data[stretch]
            case 2:
                data[stretch] = bytes(len(data[stretch]))
            case 3:
                data[stretch] = b"\xff" * len(data[stretch])
            case _:
                data[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        if not data:
            return b"x"
    return bytes(data[: draw.randrange(len(data)) + 1] if draw.random() < 0.1 else data)


def bounded(attempt):
    """Call `attempt` with one seed after another; count what was read and what was refused."""
    seen, before, end, seed = {True: 0, False: 0}, peak(), time.monotonic() + SECONDS, FIRST
    while time.monotonic() < end:
        seed += 1
        begun = time.monotonic()
        try:
            seen[attempt(random.Random(seed))] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        assert time.monotonic() - begun < 10, f"seed {seed}"
        assert peak() - before < 500 * MEGABYTE, f"seed {seed}"
    assert all(seen.values()), seen


def one_line(error):
    assert "\n" not in str(error)
    str(error).encode(errors="backslashreplace")


def readable(folder):
    """Whether all photos in a folder can be read."""
    try:
        splits = layout.load_photos(folder)
    except DataError as error:
        one_line(error)
        return False
    for source in (splits.train, splits.validation):
        for index in range(len(source)):
            try:
                open_rgb(source.opened(index))
            except UnreadableImageError as error:
                one_line(error)
    return True


@pytest.mark.parametrize("kind", ["tar", "tfrecords"])
def test_changed_shards_are_read_or_refused(tmp_path, kind):
    folders = layouts.class_folders(tmp_path / "folders")
    made = getattr(layouts, {"tar": "tar_archives", "tfrecords": "tfrecords"}[kind])(folders, tmp_path / "made")
    shards = {path: path.read_bytes() for path in sorted(made.rglob("*")) if path.is_file()}

    def attempt(draw):
        for index in made.glob(".falconet-index/*"):
            index.unlink()
        for path, data in shards.items():
            path.write_bytes(data)
        path = draw.choice(list(shards))
        hot = list(range(0, len(shards[path]), 512)) if kind == "tar" else [0, 12, 40]
        path.write_bytes(flipped(shards[path], draw, hot=hot))
        return readable(made)

    bounded(attempt)


def test_changed_torch_files_are_read_or_refused(tmp_path):
    weights = {f"layer{n}.weight": torch.randn(7, n + 1) for n in range(5)} | {"fc.bias": torch.zeros(3).half()}
    originals = []
    for whole in (weights, {"state_dict": weights, "epoch": 3, "optimizer": {"state": {0: {"step": 1}}}}):
        for new in (True, False):
            buffer = io.BytesIO()
            torch.save(whole, buffer, _use_new_zipfile_serialization=new)
            originals.append(buffer.getvalue())
    path = tmp_path / "w.pt"

    def attempt(draw):
        data = draw.choice(originals)
        if data[:2] == b"PK" and draw.random() < 0.7:  # inside, with a directory and checksums that fit
            buffer = io.BytesIO()
            with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
                for name in old.namelist():
                    inner = old.read(name)
                    new.writestr(name, flipped(inner, draw) if draw.random() < 0.4 else inner)
            path.write_bytes(buffer.getvalue())
        else:
            path.write_bytes(flipped(data, draw, hot=[0, len(data) - 100]))
        try:
            read_weights(path)
        except CheckpointError as error:
            one_line(error)
            return False
        return True

    bounded(attempt)
