"""Which options each canonical command has, for whoever writes a line of it."""

from falconet.config import schema

# Options, and values, that other branches bring; empty when all of them are there.
PENDING = frozenset(
    {
        *("pipeline-splits", "pipeline-schedule", "offload-optimizer", "use-bbox-info", "eight-bit-io", "log-style"),
        *("normalization-location", "dataloader-rebatch-size", "dataset-cache", "data imagenet"),
    }
)

SCHEMAS: dict[str, type[object]] = {
    "train": schema.TrainOptions,
    "restore": schema.RestoreOptions,
    "validate": schema.ValidateOptions,
    "average": schema.AverageOptions,
}
