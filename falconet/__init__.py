"""Falconet: convolutional image classifiers with PyTorch, from a laptop to a cluster.

>>> import falconet as fn
>>> run = fn.train("photos", model="resnet18")
>>> model = fn.load(run)
>>> model.predict("photo.jpg")

`train`, `load` and `evaluate` take the options of the command line as keyword arguments.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from falconet.api import Run as Run
    from falconet.api import evaluate as evaluate
    from falconet.api import load as load
    from falconet.api import train as train
    from falconet.errors import UserError as UserError
    from falconet.infer.model import Model as Model
    from falconet.infer.prediction import Prediction as Prediction

__version__ = "0.1.0"

# torch takes seconds to import: each name is imported when it is first used. `train` is a package that can be called.
_HOMES = {
    **dict.fromkeys(("Run", "evaluate", "load"), "falconet.api"),
    "UserError": "falconet.errors",
    "Model": "falconet.infer.model",
    "Prediction": "falconet.infer.prediction",
}
__all__ = ["Model", "Prediction", "Run", "UserError", "evaluate", "load", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("falconet.train")
    if name not in _HOMES:
        raise AttributeError(f"module 'falconet' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
