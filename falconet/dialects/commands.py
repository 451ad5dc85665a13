"""Which options each canonical command has, for whoever writes a line of it."""

from falconet.config import schema

SCHEMAS: dict[str, type[object]] = {
    "train": schema.TrainOptions,
    "restore": schema.RestoreOptions,
    "validate": schema.ValidateOptions,
    "average": schema.AverageOptions,
    "bench": schema.BenchOptions,
    "bench infer": schema.InferOptions,
    "bench serve": schema.BenchServeOptions,
    "data bench": schema.DataBenchOptions,
    "upload": schema.UploadOptions,
}
