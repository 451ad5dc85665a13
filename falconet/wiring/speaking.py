"""Who says what, where several processes share a screen."""

import os

from rich.console import Console

from falconet.parallel import environment
from falconet.parallel.world import World
from falconet.report.screen import Say, Screen


def screen_of(world: World) -> Screen:
    """Only the first process prints."""
    return Screen() if world.is_first else Screen(Console(quiet=True))


def spoken(world: World | None = None) -> Say:
    """How this process says what concerns itself: the first one plainly, others with their rank.

    Before there is a world, only the first one speaks.
    """
    if world is None:
        place = environment.find_place(os.environ)
        return Screen(Console(quiet=True) if place and place.rank else None).line
    plain = Screen()
    return plain.line if world.is_first else lambda text: plain.line(f"rank {world.rank}: {text}")
