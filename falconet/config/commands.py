"""Which commands there are, and which sections of options each has."""

from dataclasses import dataclass, field

from falconet.config.options import (
    Augmentation,
    Average,
    Averaging,
    Bench,
    Checkpoints,
    Data,
    DataBench,
    Doctor,
    FineTuning,
    Fresh,
    Inference,
    Input,
    LearningRate,
    Load,
    Logging,
    Machine,
    Model,
    Numerics,
    Optimizer,
    Pack,
    Parallel,
    Run,
    Serving,
    Table,
    Training,
    Upload,
    Validation,
    Verify,
    Workspace,
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a classifier from scratch."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    learning_rate: LearningRate = field(default_factory=LearningRate)
    numerics: Numerics = field(default_factory=Numerics)
    augmentation: Augmentation = field(default_factory=Augmentation)
    validation: Validation = field(default_factory=Validation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    averaging: Averaging = field(default_factory=Averaging)
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    logging: Logging = field(default_factory=Logging)
    machine: Machine = field(default_factory=Machine)
    workspace: Workspace = field(default_factory=Workspace)
    parallel: Parallel = field(default_factory=Parallel)


@dataclass(frozen=True, kw_only=True)
class RestoreOptions(TrainOptions):
    """Continue a run exactly where a checkpoint left it."""

    input: Input = field(default_factory=Input)


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """Measure the accuracy of a checkpoint, or of each one in a folder."""

    input: Input = field(default_factory=Input)
    table: Table = field(default_factory=Table)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """Average the checkpoints of a run into one."""

    input: Input = field(default_factory=Input)
    average: Average = field(default_factory=Average)
    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Run the benchmarks of spec files, and compare with an earlier run."""

    bench: Bench = field(default_factory=Bench)


@dataclass(frozen=True, kw_only=True)
class InferOptions:
    """Measure how fast a model predicts: images per second, latency of a batch."""

    inference: Inference = field(default_factory=Inference)
    input: Input = field(default_factory=Input)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)
    workspace: Workspace = field(default_factory=Workspace)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Answer requests over HTTP in the Open Inference Protocol, as Triton does."""

    serving: Serving = field(default_factory=Serving)
    input: Input = field(default_factory=Input)
    model: Model = field(default_factory=Model)
    fresh: Fresh = field(default_factory=Fresh)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions:
    """Measure a server: images per second of all clients, latency of a request."""

    load: Load = field(default_factory=Load)
    serving: Serving = field(default_factory=Serving)
    input: Input = field(default_factory=Input)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Tell what this machine has, and whether it works."""

    doctor: Doctor = field(default_factory=Doctor)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class DataBenchOptions:
    """Measure the input pipeline: each stage alone, and all together."""

    bench: DataBench = field(default_factory=DataBench)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augmentation: Augmentation = field(default_factory=Augmentation)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Put the images of class folders into checksummed shards (docs/data.md)."""

    pack: Pack = field(default_factory=Pack)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Check every image of packed shards against its checksum."""

    verify: Verify = field(default_factory=Verify)


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    """Send the metrics of a finished run to Weights & Biases."""

    upload: Upload = field(default_factory=Upload)


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """No options."""


COMMANDS: dict[str, type[object]] = {  # by their words, in the order in which they are shown
    "train": TrainOptions,
    "restore": RestoreOptions,
    "validate": ValidateOptions,
    "average": AverageOptions,
    "bench": BenchOptions,
    "bench infer": InferOptions,
    "serve": ServeOptions,
    "bench serve": BenchServeOptions,
    "doctor": DoctorOptions,
    "data bench": DataBenchOptions,
    "data pack": PackOptions,
    "data verify": VerifyOptions,
    "upload": UploadOptions,
    "models": ListOptions,
    "configs": ListOptions,
}
