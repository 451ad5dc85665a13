"""A failure of one process that ends what all of them do together."""

import json

from falconet.errors import SaidElsewhereError, UserError, memory_shortage
from falconet.exits import FAILED
from falconet.parallel.world import World


class FailedTogetherError(Exception):
    """What failed in one of several processes and ended in all of them, so that they can still save.

    `error` is what this process should raise after that.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(str(error))


def failure_of_all(own: Exception | None, world: World, doing: str) -> Exception:
    """This process's own failure, or one with the same message as another's, which the first process then reports.

    `doing`: what a process that does not answer is said to have missed.
    """
    texts = world.texts("" if own is None else _to_json(own), doing)
    return own or _from_json(next(filter(None, texts)))


def _to_json(error: Exception) -> str:
    is_short = memory_shortage(error) is not None
    code = error.code if isinstance(error, UserError) else None
    return json.dumps({"text": str(error), "code": code, "is_short": is_short})


def _from_json(text: str) -> Exception:
    told = json.loads(text)
    if told["is_short"]:
        return MemoryError(told["text"])
    if told["code"] is None:  # a traceback, which one process prints
        said = SaidElsewhereError(told["text"])
        said.code = FAILED
        return said
    error = UserError(told["text"])
    error.code = told["code"]
    return error
