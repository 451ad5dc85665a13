"""`falconet data verify`: every image of packed shards against its checksum."""

from collections.abc import Sequence

from falconet.config.commands import VerifyOptions
from falconet.config.load import load_options
from falconet.config.settings import Setting
from falconet.data.sources import packed
from falconet.errors import DataError
from falconet.report.console import Counting, Screen, counted


def run(line: Sequence[Setting]) -> int:
    source = load_options(VerifyOptions, line).options.verify.source
    assert source is not None
    shards = packed.find(source)
    if not any(shards.values()):
        raise DataError(f"{source}: no packed shards in it; `falconet data pack` makes them")
    splits = packed.load(source, shards)  # which names a shard that is missing or torn
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
        raise DataError(f"{source}: {len(problems)} damaged; the first: {problems[0]}")
    images = len(splits.train) + len(splits.validation)
    screen.line(f"{source}: {counted(len(paths), 'shard')}, {counted(images, 'image')}: every one has its checksum")
    return 0
