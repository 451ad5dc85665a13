"""`falconet data pack`: pack class folders into checksummed shards."""

from pathlib import Path

from falconet import writing
from falconet.config.commands import PackOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded
from falconet.data import exclusion, layout, native, packing
from falconet.data.dataset import home_of
from falconet.data.headers import MISSING
from falconet.data.storage import FileSource
from falconet.errors import DataError, Interrupted, named_option, printable
from falconet.exits import BROKEN, DONE
from falconet.parallel import world
from falconet.report.console import Counting, Say, Screen, are, counted

MOST_NAMED = 5  # broken photos that are printed; the list has all of them
LIST = "broken_photos.txt"  # in the target


def run(loaded: Loaded[PackOptions]) -> int:
    options = loaded.options.pack
    assert options.source is not None
    assert options.target is not None
    screen = Screen()
    say: Say = lambda text: screen.line(printable(text))  # noqa: E731, names of files may have line breaks
    sources = _sources(options.source, options.exclude_list, say)
    target = _made(options.target)
    shards = packing.plan(sources, shard_size=options.shard_size)
    recipe = packing.Recipe(resize=options.resize, marked=native.library() is not None)
    _check_target(target, shards)
    if not recipe.marked:
        say(f"no restart markers, so decoding will not be faster: no native decoder here ({native.why_not()})")
    packer = packing.Packer(target, recipe=recipe, workers=value_or(options.workers, world.cores()))
    whole, broken = 0, list[packing.Broken]()
    try:
        with (
            packing.alone(target),
            Counting(f"packing {options.source}", total=sum(map(len, sources.values()))) as counting,
        ):
            for shard in shards:
                if packing.made(shard, target, recipe):
                    counting.add(shard.end - shard.begin)
                else:
                    packer.pack(shard, done=counting.add)
                broken += packing.left_out(shard, target)
                whole += 1
    except KeyboardInterrupt:
        say(f"stopped; {whole} of {are(len(shards), 'shard')} complete, and the same command continues from there")
        raise Interrupted from None
    say(_summary(packer, len(shards), target))
    _list(broken, target, source=options.source)
    if not broken:
        return DONE
    photos = counted(sum(map(len, sources.values())), "photo")
    say(f"left out {len(broken):,} of {photos}, which {_why(broken)}; {target / LIST} lists all:")
    for each in broken[:MOST_NAMED]:
        say(f"  {each.path}: {each.reason}")
    if len(broken) > MOST_NAMED:
        say(f"  and {len(broken) - MOST_NAMED:,} more")
    return BROKEN


def _why(broken: list[packing.Broken]) -> str:
    missing = sum(each.reason == MISSING for each in broken)
    return " or ".join(
        [*(["are missing"] if missing else []), *(["cannot be decoded"] if missing < len(broken) else [])]
    )


def _list(broken: list[packing.Broken], target: Path, *, source: Path) -> None:
    """List the photos that were left out, by reason, in the format of --exclude-list."""
    if not broken:
        (target / LIST).unlink(missing_ok=True)
        return
    reasons = dict.fromkeys(each.reason for each in broken)
    parts = [
        exclusion.text_of(
            (each.path for each in broken if each.reason == reason), home=home_of(source), remarks=[reason]
        )
        for reason in reasons
    ]
    writing.replace(target, LIST, "".join(parts).encode("utf-8", "surrogateescape"))


def _sources(source: Path, excluded: Path | None, say: Say) -> dict[str, FileSource]:
    splits = layout.load_photos(source)
    if excluded is not None:
        with named_option("exclude_list"):
            before = len(splits.notes)
            splits = exclusion.applied(splits, exclusion.read(excluded, home=home_of(source)))
        for note in splits.notes[before:]:
            say(note)
    if splits.label_sets is not None:
        raise DataError(f"{source}: photos with several labels, which shards cannot hold; expected one label each")
    if not len(splits.train):
        raise DataError(f"{source}: no photos to train on; expected a folder train/ as well")
    found = {"train": splits.train, "validation": splits.validation}
    return {split: files for split, files in found.items() if isinstance(files, FileSource)}


def _made(target: Path) -> Path:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{target}: cannot be created ({error.strerror})") from None
    return target


def _check_target(target: Path, shards: list[packing.Shard]) -> None:
    others = packing.leftovers(target, shards)
    if others:
        raise DataError(f"{others[0]}: belongs to another set, which had more shards; expected an empty folder")


def _summary(packer: packing.Packer, shards: int, target: Path) -> str:
    if packer.images == 0:
        return f"{target}: nothing to do, {are(shards, 'shard')} already there"
    growth = packer.bytes_written / max(1, packer.bytes_read) - 1
    return (
        f"{target}: {counted(shards, 'shard')}; {counted(packer.images, 'image')} packed now, {packer.marked:,} of them"
        f" with restart markers, {packer.bytes_written / 1e6:,.1f} MB ({growth:+.1%})"
    )
