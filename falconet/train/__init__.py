"""What happens in a run, in this order: preparation, run, build, plan, phase, loop, step, log, validation, conclusion.

`falconet.train(...)` is also the function of the Python API: Python binds a package's name in its parent as soon as
anything in it is imported, so the package itself is made callable.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from falconet.api import Run


class _Training(ModuleType):
    def __call__(self, photos: str | Path | None = None, **options: object) -> "Run":
        """Train a model; see `falconet.api.train`."""
        run: Run = import_module("falconet.api").train(photos, **options)
        return run


sys.modules[__name__].__class__ = _Training
