"""Which options each canonical command has, for whoever writes a line of it."""

from falconet.config import schema
from falconet.config.options import options_of

_OPTIONS = {
    "train": "TrainOptions",
    "restore": "RestoreOptions",
    "validate": "ValidateOptions",
    "average": "AverageOptions",
    "bench": "BenchOptions",
    "bench infer": "InferOptions",
    "data bench": "DataBenchOptions",
}
# By name, because some come with other branches; to be written out when all are there.
SCHEMAS: dict[str, type[object]] = {
    command: getattr(schema, name) for command, name in _OPTIONS.items() if hasattr(schema, name)
}
_COMING = (
    *("pipeline-splits", "pipeline-schedule", "offload-optimizer", "use-bbox-info", "eight-bit-io", "log-style"),
    *("normalization-location", "dataloader-rebatch-size", "dataset-cache"),
)


def _pending() -> frozenset[str]:
    """Options, and values, that other branches bring and that are not there yet; they are left out of a line."""
    there = {name for command in SCHEMAS.values() for name in options_of(command)}
    values = set() if "imagenet" in options_of(schema.TrainOptions)["data"].choices() else {"data imagenet"}
    return frozenset({name for name in _COMING if name not in there} | values)


PENDING = _pending()
