"""Packs class folders into shards, with the same bytes however often it is started again."""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from falconet.data import native
from falconet.data.headers import MISSING
from falconet.data.image_files import UnreadableImageError, open_rgb, read_regular
from falconet.data.native.binding import Library
from falconet.data.sources import packed
from falconet.data.storage import FileSource
from falconet.errors import NO_ROOM, DataError

INTERVAL = 8  # MCUs between restart markers: docs/using/data.md explains the trade-off
QUALITY = 90  # for photos that are encoded again
MOST_SIDE = 65_500  # pixels: the longest side that libjpeg writes
LEFT_OUT = "left_out"  # a shard's entry for photos that it lacks: pairs of name and reason
WINDOW = 4  # images in progress per worker


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How each image is packed."""

    resize: int | None = None  # to this short side in pixels; None: lossless
    marked: bool = True  # with restart markers, if the native library can write them


class Outcome(NamedTuple):
    """One image, ready to be packed."""

    data: bytes
    read: int  # bytes in the file
    marked: bool
    trouble: str | None = None  # why it cannot be decoded, and is left out


class Broken(NamedTuple):
    """A photo that was left out because it is missing or cannot be decoded."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Shard:
    """One shard to write: images `begin` to `end` of a source."""

    source: FileSource
    split: str
    number: int
    of: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        return packed.shard_name(self.split, self.number)


def plan(sources: dict[str, FileSource], *, shard_size: int) -> list[Shard]:
    """Every shard to write; it depends only on the numbers of images, so the plan is always the same."""
    shards = []
    for split, source in sources.items():
        count = -(-len(source) // shard_size)
        for number in range(count):
            begin = number * shard_size
            shards.append(Shard(source, split, number, count, begin, min(begin + shard_size, len(source))))
    return shards


def made(shard: Shard, target: Path, recipe: Recipe) -> bool:
    """Whether the shard exists, complete, from this recipe, and newer than every file in it."""
    path = target / shard.name
    try:
        head = packed.read_head(path)
        files = (_stat(shard.source.path(index)) for index in range(shard.begin, shard.end))
        newest = max((found.st_mtime for found in files if found), default=0.0)
        facts = {name: fact for name, fact in head.facts.items() if name != LEFT_OUT}
        return bool(facts == _facts(shard, recipe) and path.stat().st_mtime >= newest)
    except (DataError, OSError):
        return False


def left_out(shard: Shard, target: Path) -> list[Broken]:
    """The photos left out of an existing shard, which lists them itself."""
    found = packed.read_head(target / shard.name).facts.get(LEFT_OUT, [])
    return [Broken(shard.source.root / str(name), str(reason)) for name, reason in found]


class Packer:
    """Packs one shard after another; each gets its name when it is complete."""

    def __init__(self, target: Path, *, recipe: Recipe, workers: int) -> None:
        self._target, self._recipe, self._workers = target, recipe, workers
        self._library = native.library() if recipe.marked else None
        self.images = self.marked = self.bytes_read = self.bytes_written = 0

    def pack(self, shard: Shard, *, done: Callable[[], None]) -> None:
        """Write one shard; `done` is called for each image. DataError: a file cannot be read, or the disk is full."""
        path = self._target / shard.name
        aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            with aside.open("xb") as file:  # a link of that name is not followed
                writer, broken = packed.Writer(file), list[tuple[str, str]]()
                for index, outcome in self._outcomes(shard):
                    if outcome.trouble is None:
                        label = int(shard.source.labels[index])
                        writer.add(outcome.data, label=label, name=shard.source.name(index))
                        self._count(outcome)
                    else:
                        broken.append((shard.source.name(index), outcome.trouble))
                    done()
                writer.finish(_facts(shard, self._recipe) | ({LEFT_OUT: broken} if broken else {}))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError as error:
            found = NO_ROOM.get(error.errno or 0)
            if found is None:
                reason = error.strerror or error
                raise DataError(f"{error.filename or path}: cannot be read or written ({reason})") from None
            raise DataError(
                f"{path}: {found.why}; the shards before it are whole: {found.helps} and give the same command again"
            ) from None
        finally:
            aside.unlink(missing_ok=True)
        _flush_folder(self._target)

    def _count(self, outcome: Outcome) -> None:
        self.images += 1
        self.marked += outcome.marked
        self.bytes_read += outcome.read
        self.bytes_written += len(outcome.data)

    def _outcomes(self, shard: Shard) -> Iterator[tuple[int, Outcome]]:
        """The images in order, with a bounded number in memory."""
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="falconet-pack")
        begun: deque[tuple[int, Future[Outcome]]] = deque()
        try:
            for index in range(shard.begin, shard.end):
                path = shard.source.path(index)
                begun.append((index, pool.submit(prepared, path, recipe=self._recipe, library=self._library)))
                if len(begun) >= WINDOW * self._workers:
                    first, future = begun.popleft()
                    yield first, future.result()
            while begun:
                first, future = begun.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def prepared(path: Path, *, recipe: Recipe, library: Library | None) -> Outcome:
    """The bytes to store for a file; unchanged if it cannot be improved, even if it is damaged."""
    try:
        original = read_regular(path)
    except OSError as error:
        if _leads_nowhere(path, error):
            return Outcome(b"", 0, False, MISSING)
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        data = original if recipe.resize is None else shrunk(original, recipe.resize)
    except OSError as error:  # from the encoder
        raise DataError(f"{path}: cannot be shrunk ({error.strerror or error})") from None
    marked = library.restart_marked(data, interval=INTERVAL) if library is not None and data else None
    if isinstance(marked, bytes):
        return Outcome(marked, len(original), True)
    return Outcome(data, len(original), False, _trouble(data))


def _trouble(data: bytes) -> str | None:
    """Why these bytes are not an image. It has to decode them, so it is used only for files without restart markers."""
    try:
        open_rgb(io.BytesIO(data))
    except UnreadableImageError as error:
        return str(error)
    return None


def shrunk(data: bytes, short_side: int) -> bytes:
    """Shrink and encode a photo with a longer short side; a smaller one, or one too long for a JPEG, is unchanged."""
    try:
        image = open_rgb(io.BytesIO(data))
    except UnreadableImageError:
        return data
    short = min(image.width, image.height)
    if short <= short_side:
        return data
    size = (round(image.width * short_side / short), round(image.height * short_side / short))
    if max(size) > MOST_SIDE:
        return data
    file = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return file.getvalue()


def _facts(shard: Shard, recipe: Recipe) -> dict[str, object]:
    """The facts that a shard stores about itself; equal facts mean equal files."""
    return {
        "split": shard.split,
        "number": shard.number,
        "shards": shard.of,
        "classes": list(shard.source.class_names),
        "made": {"interval": INTERVAL if recipe.marked else None, "resize": recipe.resize, "files": _digest(shard)},
    }


def _digest(shard: Shard) -> str:
    """A digest of the files' names, labels and sizes."""
    total = hashlib.sha256()
    for index in range(shard.begin, shard.end):
        found = _stat(shard.source.path(index))
        size = found.st_size if found else MISSING
        total.update(f"{int(shard.source.labels[index])} {size} ".encode())
        total.update(os.fsencode(shard.source.name(index)) + b"\0")
    return total.hexdigest()


def _stat(path: Path) -> os.stat_result | None:
    """A photo's stat; None for a broken link."""
    try:
        return path.stat()
    except OSError as error:
        if _leads_nowhere(path, error):
            return None
        raise


def _leads_nowhere(path: Path, error: OSError) -> bool:
    """Whether a photo is a broken link, or one to itself; any other missing photo may be on a disk that is gone."""
    return error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink()


@contextlib.contextmanager
def alone(target: Path) -> Iterator[None]:
    """Allow one packing at a time in a folder, and remove what a killed one left unfinished."""
    handle = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{target}: another `falconet data pack` is writing there") from None
        except OSError:  # a file system without locks
            pass
        for path in target.glob(".*.partial"):
            path.unlink()
        yield
    finally:
        os.close(handle)


def leftovers(target: Path, shards: Sequence[Shard]) -> list[Path]:
    """Shards of an earlier, larger set, which would pass for parts of this one."""
    names = {shard.name for shard in shards}
    return [path for paths in packed.find(target).values() for path in paths if path.name not in names]


def _flush_folder(folder: Path) -> None:
    """Flush a folder, so that a new name in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
