"""`falconet data verify`: check every image of packed shards against its checksum."""

from falconet.config.commands import VerifyOptions
from falconet.config.load import Loaded
from falconet.data.sources import packed
from falconet.errors import DataError
from falconet.report.console import Counting, Screen, counted


def run(loaded: Loaded[VerifyOptions]) -> int:
    source = loaded.options.verify.source
    assert source is not None
    shards = packed.find(source)
    if not any(shards.values()):
        raise DataError(f"{source}: no packed shards in it; `falconet data pack` makes them")
    splits = packed.load(source, shards)  # raises for a missing or torn shard
    paths = [path for found in shards.values() for path in found]
    problems: list[str] = []
    screen = Screen()
    with Counting(f"verifying {source}", total=len(paths)) as counting:
        for path in paths:
            for problem in packed.verify(path):
                screen.line(problem)
                problems.append(problem)
            counting.add()
    if problems:
        raise DataError(f"{source}: {counted(len(problems), 'damaged image')}; the first: {problems[0]}")
    images = len(splits.train) + len(splits.validation)
    screen.line(f"{source}: {counted(len(paths), 'shard')}, {counted(images, 'image')}: all checksums match")
    return 0
