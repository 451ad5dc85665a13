"""Which options have no effect beside others, or in a command that has them for another one's sake."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from falconet.config import schema
from falconet.config.effective import EFFECTIVE_WHEN
from falconet.config.model import Model
from falconet.config.options import options_of, value_of
from falconet.config.sections import Augmentation, Data, Machine
from falconet.config.settings import is_asked_for

Row = tuple[str, str, Callable[[Any], bool]]  # an option, what is said behind "has no effect", when it has one


def notes(options: object, sources: Mapping[str, str]) -> Iterator[str]:
    """One line for each option that was asked for and has no effect here."""
    known = options_of(type(options))
    for name, why in idle(options).items():
        changed = value_of(options, known[name]) != known[name].default  # a stored config.yaml names every default
        if changed and is_asked_for(sources.get(name)):
            yield f"--{name} has no effect {why}"


def idle(options: object) -> dict[str, str]:
    """Every option without effect here, and why."""
    found: dict[str, str] = {}
    for name, why, holds in ELSEWHERE.get(type(options), ()):
        if not holds(options):
            found.setdefault(name, why)
    trained, training = _as_training(options), options_of(schema.TrainOptions)
    for name, option in options_of(type(options)).items():
        if name not in training or training[name].path != option.path or (type(options), name) in OTHERWISE:
            continue
        for other, condition, holds in EFFECTIVE_WHEN:
            if other == name and not holds(trained):
                found.setdefault(name, f"without {condition}")
    return found


def _as_training(options: object) -> schema.TrainOptions:
    """A training with the sections that a command shares with it, the others as they are if nothing is said."""
    if isinstance(options, schema.TrainOptions):
        return options
    shared = {section.name for section in fields(schema.TrainOptions)}
    return schema.TrainOptions(**{name: section for name, section in vars(options).items() if name in shared})


def _names(section: type, *, but: tuple[str, ...] = ()) -> list[str]:
    return [field.name.replace("_", "-") for field in fields(section) if field.name not in but]


def _never(_: object) -> bool:
    return False


def _runs_a_model(options: schema.AverageOptions) -> bool:
    return options.average.validate or options.average.batchnorm_images > 0


_OF_TRAINING = (
    *("batchnorm-momentum", "disable-stable-batchnorm", "efficientnet-dropout", "efficientnet-drop-path"),
    *("weight-init", "zero-init"),
)
_NOT_TRAINED: tuple[Row, ...] = tuple((name, "on a model that is not trained", _never) for name in _OF_TRAINING)
_NOT_MIXED = ("label_smoothing", "mixup_alpha", "cutmix_lambda_low", "cutmix_lambda_high", "cutmix_disable_prob")
_ALONE = "on the input alone, without a model"
_UNVALIDATED: Row = ("validation-batch-size", "where nothing is validated", _never)

ELSEWHERE: dict[type[object], tuple[Row, ...]] = {
    schema.ValidateOptions: _NOT_TRAINED,
    schema.BenchServeOptions: (*_NOT_TRAINED, _UNVALIDATED),
    schema.InferOptions: (
        *_NOT_TRAINED,
        _UNVALIDATED,
        ("dataset-cache", "where batches are read once, before the clock starts", _never),
        ("weights", "beside --checkpoint-input-path", lambda options: options.input.checkpoint_input_path is None),
    ),
    schema.AverageOptions: (
        *(
            (name, "without --validate or --batchnorm-images", _runs_a_model)
            for section in (Data, Machine)
            for name in _names(section)
        ),
        (
            "weight-avg-exp-decay",
            "without --weight-avg-strategy exponential",
            lambda options: options.average.weight_avg_strategy == "exponential",
        ),
    ),
    schema.DataBenchOptions: (
        _UNVALIDATED,
        *((name, _ALONE, _never) for name in _names(Model, but=("model",))),
        *((name.replace("_", "-"), _ALONE, _never) for name in _NOT_MIXED),
        ("deterministic", _ALONE, _never),
        *(
            (name, "without --split train", lambda options: options.bench.split == "train")
            for name in _names(Augmentation, but=_NOT_MIXED)
        ),
        *(
            (name, "beside --md5", lambda options: not options.bench.md5)
            for name in ("split", "seconds", "passes", "output")
        ),
    ),
}
# Options that have an effect in a command where training has none for them.
OTHERWISE = {
    (schema.InferOptions, "iterations"),
    (schema.BenchServeOptions, "iterations"),
    (schema.DataBenchOptions, "bad-images-allowed"),
}
