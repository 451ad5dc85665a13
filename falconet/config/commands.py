"""Every command: what it does, an example, and its sections of options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from falconet.config.options import (
    Augmentation,
    Averaging,
    Checkpoints,
    Data,
    FineTuning,
    Input,
    LearningRate,
    Logging,
    Machine,
    Model,
    Numerics,
    Optimizer,
    Parallel,
    Run,
    Training,
    Validation,
    Views,
    Workspace,
)
from falconet.config.tool_options import (
    Access,
    Average,
    Bench,
    Choice,
    Choices,
    Configs,
    Copies,
    DataBench,
    DataCheck,
    Doctor,
    Export,
    Fresh,
    Inference,
    Load,
    Models,
    Pack,
    Predict,
    Pretrained,
    Recipe,
    Report,
    Search,
    Serving,
    Table,
    Telemetry,
    Upload,
    Verify,
    Watch,
)


class Command:
    """A command's example and options, besides its docstring; a subclass has its sections of options as fields."""

    example: ClassVar[str]
    common: ClassVar[tuple[str, ...]] = ()  # the options that the help shows first; empty: all, under their headings
    arguments: ClassVar[tuple[str, ...]] = ()  # options that may be given by position, in this order
    instead: ClassVar[Mapping[str, str]] = {}  # option -> the argument that is not given beside it
    optional: ClassVar[tuple[str, ...]] = ()  # arguments that may be left out


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Command):
    """Train a model on a folder of photos or on other data; with no options at all, on the built-in digits."""

    example = "falconet train photos/ --model resnet50"
    arguments: ClassVar[tuple[str, ...]] = ("data-dir",)
    optional: ClassVar[tuple[str, ...]] = ("data-dir",)
    common: ClassVar[tuple[str, ...]] = (
        *("config", "model", "data", "data-dir", "image-size", "pretrained"),
        *("epoch", "micro-batch-size", "gradient-accumulation", "optimizer", "lr", "lr-schedule"),
        *("weight-decay", "augment", "device", "precision", "replicas", "run-dir", "resume", "plan"),
    )

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
    views: Views = field(default_factory=Views)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(TrainOptions):
    """Search for the best options: train with several and compare; a value may be log:1e-4:1e-1, range:0:1 or a,b,c."""

    example = "falconet search photos/ --budget 20 --lr log:1e-4:1e-1 --model resnet18,efficientnet-b0"
    common = ("budget", "study", "prune", "data-dir", "model", "epoch", "lr", "weight-decay", "label-smoothing", "seed")

    search: Search = field(default_factory=Search)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(TrainOptions):
    """Report what this machine has and whether it works; for a training run, what limits it and what to change."""

    example = "falconet doctor photos/ --model resnet50"
    common = (
        *("config", "model", "data", "data-dir", "image-size", "micro-batch-size", "augment", "dataloader-workers"),
        *("decode-device", "device", "precision", "distributed", "replicas"),
    )

    doctor: Doctor = field(default_factory=Doctor)


@dataclass(frozen=True, kw_only=True)
class RestoreOptions(TrainOptions):
    """Continue a run exactly where a checkpoint left it; options override the checkpoint's."""

    example = "falconet restore runs/my-run"
    arguments = ("checkpoint-input-path",)
    common = ("checkpoint-input-path", "epoch", "data-dir", "device", "replicas", "run-dir", "plan")

    input: Input = field(default_factory=Input)


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(Command):
    """Measure the accuracy of a run's best checkpoint, or of others: in total, by class, and image by image."""

    example = "falconet validate runs/my-run other-photos/"
    arguments = ("checkpoint-input-path", "data-dir")
    optional = ("data-dir",)
    instead: ClassVar[Mapping[str, str]] = {"pretrained": "checkpoint-input-path"}
    common = (
        "checkpoint-input-path",
        "checkpoint",
        "output",
        "predictions",
        "data",
        "data-dir",
        "model",
        "pretrained",
        "validation-batch-size",
        "device",
        "precision",
        "replicas",
    )

    input: Input = field(default_factory=Input)
    choice: Choices = field(default_factory=Choices)
    pretrained: Pretrained = field(default_factory=Pretrained)
    table: Table = field(default_factory=Table)
    copies: Copies = field(default_factory=Copies)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)
    views: Views = field(default_factory=Views)


@dataclass(frozen=True, kw_only=True)
class AverageOptions(Command):
    """Average the checkpoints of a run into one."""

    example = "falconet average runs/my-run --weight-avg-N 3 --validate"
    arguments = ("checkpoint-input-path",)
    common = (
        *("checkpoint-input-path", "checkpoint-output-path", "weight-avg-strategy", "weight-avg-N"),
        *("batchnorm-images", "validate", "data-dir", "device"),
    )

    input: Input = field(default_factory=Input)
    average: Average = field(default_factory=Average)
    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Command):
    """Predict the classes of photos, with their probabilities."""

    example = "falconet predict runs/my-run photo.jpg more-photos/ --top 3"
    arguments = ("checkpoint-input-path", "photos")
    instead: ClassVar[Mapping[str, str]] = {"pretrained": "checkpoint-input-path"}
    common = (
        *("checkpoint-input-path", "checkpoint", "photos", "top", "json", "csv", "output", "save-dir", "embeddings"),
        *("model", "pretrained", "device"),
    )

    predict: Predict = field(default_factory=Predict)
    input: Input = field(default_factory=Input)
    choice: Choice = field(default_factory=Choice)
    pretrained: Pretrained = field(default_factory=Pretrained)
    model: Model = field(default_factory=Model)
    fresh: Fresh = field(default_factory=Fresh)
    machine: Machine = field(default_factory=Machine)
    views: Views = field(default_factory=Views)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Command):
    """Run benchmark specs, and compare with an earlier run."""

    example = "falconet bench --spec smoke --repeat 3 --compare earlier/results.json"

    bench: Bench = field(default_factory=Bench)


@dataclass(frozen=True, kw_only=True)
class InferOptions(Command):
    """Measure the throughput and latency of a model that predicts."""

    example = "falconet bench infer --model resnet50 --data generated --micro-batch-size 64 --iterations 200"
    common = (
        *("config", "model", "checkpoint-input-path", "weights", "data", "data-dir", "image-size"),
        *("micro-batch-size", "iterations", "device", "precision", "replicas", "output", "plan"),
    )

    inference: Inference = field(default_factory=Inference)
    input: Input = field(default_factory=Input)
    choice: Choice = field(default_factory=Choice)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)
    workspace: Workspace = field(default_factory=Workspace)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Command):
    """Serve models over HTTP and gRPC: photos in, class names out; and the Open Inference Protocol, as Triton does."""

    example = "falconet serve runs/my-run --port 8000"
    arguments = ("checkpoint-input-path", "more-models")
    optional = ("more-models",)
    instead: ClassVar[Mapping[str, str]] = {"pretrained": "checkpoint-input-path"}
    common = (
        *("checkpoint-input-path", "more-models", "checkpoint", "model", "pretrained", "repository", "watch"),
        *("host", "port", "grpc-port", "max-batch", "max-delay", "engine", "int8", "device", "precision"),
    )

    serving: Serving = field(default_factory=Serving)
    models: Models = field(default_factory=Models)
    access: Access = field(default_factory=Access)
    telemetry: Telemetry = field(default_factory=Telemetry)
    input: Input = field(default_factory=Input)
    choice: Choice = field(default_factory=Choice)
    pretrained: Pretrained = field(default_factory=Pretrained)
    model: Model = field(default_factory=Model)
    fresh: Fresh = field(default_factory=Fresh)
    machine: Machine = field(default_factory=Machine)
    views: Views = field(default_factory=Views)


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions(Command):
    """Measure the throughput and latency of a server, Falconet's or Triton's."""

    example = "falconet bench serve --model resnet50 --data generated --clients 8 --request-type ASYNC --iterations 50"
    common = (
        *("config", "model", "checkpoint-input-path", "url", "server", "protocol", "clients", "request-type", "window"),
        *("data", "data-dir", "micro-batch-size", "iterations", "device", "precision", "check-answers", "output"),
    )

    load: Load = field(default_factory=Load)
    serving: Serving = field(default_factory=Serving)
    input: Input = field(default_factory=Input)
    choice: Choice = field(default_factory=Choice)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Command):
    """Write a model as ONNX, torch.export, AOTInductor, timm, Triton or OpenVINO, and check its scores."""

    example = "falconet export runs/my-run --format onnx --preprocessing"
    arguments = ("checkpoint-input-path",)
    common = (
        *("checkpoint-input-path", "checkpoint", "format", "output", "overwrite", "preprocessing", "half", "int8"),
        *("photos", "tolerance", "latency-batch", "model", "pretrained", "device"),
    )

    export: Export = field(default_factory=Export)
    input: Input = field(default_factory=Input)
    choice: Choice = field(default_factory=Choice)
    pretrained: Pretrained = field(default_factory=Pretrained)
    model: Model = field(default_factory=Model)
    fresh: Fresh = field(default_factory=Fresh)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class DataBenchOptions(Command):
    """Measure each step of the input pipeline, and name the slowest."""

    example = "falconet data bench photos --model resnet50"
    arguments = optional = ("data-dir",)
    common = (
        *(
            "data",
            "data-dir",
            "model",
            "image-size",
            "micro-batch-size",
            "dataloader-workers",
            "decode-device",
            "augment",
        ),
        *("split", "seconds", "passes", "md5", "output", "device"),
    )

    bench: DataBench = field(default_factory=DataBench)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augmentation: Augmentation = field(default_factory=Augmentation)
    machine: Machine = field(default_factory=Machine)


@dataclass(frozen=True, kw_only=True)
class PackOptions(Command):
    """Pack class folders into checksummed shards that decode faster."""

    example = "falconet data pack photos photos-packed"
    arguments = ("source", "target")

    pack: Pack = field(default_factory=Pack)


@dataclass(frozen=True, kw_only=True)
class DataCheckOptions(Command):
    """Decode every photo, and report broken and unusual ones, copies, and badly divided classes."""

    example = "falconet data check photos --html check.html --exclude-list broken.txt"
    arguments = ("source",)
    common = ("source", "html", "json", "output", "exclude-list", "exclude-duplicates", "smallest-side", "workers")

    check: DataCheck = field(default_factory=DataCheck)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Command):
    """Check every image of packed shards against its checksum."""

    example = "falconet data verify photos-packed"
    arguments = ("source",)

    verify: Verify = field(default_factory=Verify)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Command):
    """Write a page about a run, or about several side by side: curves, classes, mistakes, options."""

    example = "falconet report runs/first runs/second --output comparison.html"
    arguments = ("runs",)

    report: Report = field(default_factory=Report)


@dataclass(frozen=True, kw_only=True)
class WatchOptions(Command):
    """Follow a run, or a folder of runs, as they go: on the terminal, or as a page in a browser."""

    example = "falconet watch runs/my-run"
    arguments = ("source",)
    optional = ("source",)

    watch: Watch = field(default_factory=Watch)


@dataclass(frozen=True, kw_only=True)
class UploadOptions(Command):
    """Upload the metrics of a finished run to Weights & Biases."""

    example = "falconet upload runs/my-run --name baseline --wandb-project classifiers"
    arguments = ("source",)

    upload: Upload = field(default_factory=Upload)


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(Command):
    """List the models: names, parameters, input sizes."""

    example = "falconet models"


@dataclass(frozen=True, kw_only=True)
class ConfigsOptions(Command):
    """List the named configs, and what each one reaches."""

    example = "falconet configs --evidence"

    configs: Configs = field(default_factory=Configs)


@dataclass(frozen=True, kw_only=True)
class RecipeVerifyOptions(Command):
    """Train a named config again, and report whether it still reaches what was recorded; exit code 1 if not."""

    example = "falconet recipe verify digits --seeds 3"
    arguments = ("name",)

    recipe: Recipe = field(default_factory=Recipe)


COMMANDS: dict[str, type[Command]] = {  # by name, in the order of the overview
    "train": TrainOptions,
    "restore": RestoreOptions,
    "search": SearchOptions,
    "validate": ValidateOptions,
    "average": AverageOptions,
    "predict": PredictOptions,
    "bench": BenchOptions,
    "bench infer": InferOptions,
    "export": ExportOptions,
    "serve": ServeOptions,
    "bench serve": BenchServeOptions,
    "doctor": DoctorOptions,
    "data check": DataCheckOptions,
    "data bench": DataBenchOptions,
    "data pack": PackOptions,
    "data verify": VerifyOptions,
    "report": ReportOptions,
    "watch": WatchOptions,
    "upload": UploadOptions,
    "models": ModelsOptions,
    "configs": ConfigsOptions,
    "recipe verify": RecipeVerifyOptions,
}
