"""The options of the commands that do not train (search, measure, predict, serve, tools), declared as in options.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from falconet.config.fields import AtLeast, Auto, Between, MoreThan, Range, local

# Which weights.


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Weights that were trained elsewhere, instead of a checkpoint's."""

    pretrained: Literal["none", "published"] | Path = local("none", bare="published")
    """Use the model's published weights or those of a file, and prepare photos as they expect."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which checkpoint of a folder is used."""

    checkpoint: Annotated[int, AtLeast(0)] | Literal["best", "last"] = local("best")
    """Checkpoint to use: the best validated one, the newest, or that of epoch N."""


# Searching and measuring.


@dataclass(frozen=True, kw_only=True)
class Search:
    """How many trials, and where they are kept."""

    budget: Annotated[int, AtLeast(1)] = 20
    """Trials in the whole study, including those of earlier starts and other workers."""
    study: Path | Auto = local("auto")
    """Folder of the study, to start, to continue or to share with other workers; auto: runs/search_<data>_<time>."""
    prune: bool = True
    """Stop a trial after an epoch that is worse than the median of the others at the same epoch."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Which checkpoints of a folder are measured."""

    checkpoint: Annotated[int, AtLeast(0)] | Literal["best", "last", "all"] = local("best")
    """Checkpoints to measure: the best validated one, the newest, that of epoch N, or all."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Where the result is written."""

    output: Path | None = local(None)
    """CSV file, with details in a .json; default: a run's validation.csv, or validation-NAME.csv beside a model."""
    predictions: Path | None = local(None)
    """CSV file with a row per image: path, label, and the five most probable classes with their probabilities."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Processes that share the images."""

    replicas: Annotated[int, AtLeast(1)] | Auto = local("auto")
    """Processes that measure together, one per device; auto: as many as the launcher started, else 1."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Which checkpoints are averaged, and how."""

    checkpoint_output_path: Path | None = local(None)
    """The averaged checkpoint, or a folder for it; default: <model>_<data>_<epoch>_averaged beside the others."""
    weight_avg_strategy: Literal["mean", "exponential"] = "mean"
    """Average with equal weights (mean) or with exponentially decaying ones."""
    weight_avg_exp_decay: Annotated[float, Between(0, 1)] = 0.99
    """Decay of the exponential average."""
    weight_avg_N: Annotated[int, AtLeast(1)] | Literal["all", -1] = "all"  # noqa: N815, the original's spelling
    """Average only the last N checkpoints; all or -1: every one."""
    weight_avg_discard: Annotated[int, AtLeast(0)] = 0
    """Leave out this many of the newest checkpoints first."""
    batchnorm_images: Annotated[int, AtLeast(0)] = 0
    """Re-estimate batch norm's statistics on this many training images; 0: average the statistics too."""
    validate: bool = False
    """Measure the accuracy of the result."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Which benchmarks run, how often, and what they are compared with."""

    spec: tuple[str, ...] = ()
    """Spec files in the originals' format, or names of built-in ones; default: ./benchmarks.yml."""
    benchmark: tuple[str, ...] = ()
    """Names of the benchmarks to run; default: all except those that end in _conv."""
    repeat: Annotated[int, AtLeast(1)] = 3
    """Runs per benchmark; differences are judged by the spread between them."""
    log_dir: Path | Auto = local("auto")
    """Folder for results and logs; auto: bench-results/<time>."""
    compare: Path | None = local(None)
    """A results.json of an earlier run; exit code 3 if a benchmark is slower by more than --margin."""
    margin: Annotated[float, AtLeast(0)] = 5.0
    """Percentage of throughput that may be lost before --compare fails."""
    timeout: Annotated[float, MoreThan(0)] | None = None
    """Seconds that one run may take; a longer one is stopped and counted as failed, and the next one starts."""
    include_convergence: bool = False
    """Also run the benchmarks that train to an accuracy, whose names end in _conv."""
    stop_on_error: bool = False
    """Stop after the first failure."""
    allow_wandb: bool = local(False)
    """Keep the --wandb options of the commands, which are removed otherwise."""
    profile: bool = local(False)
    """Pass --profile to commands that train, and mark their results as profiled."""
    show_output: bool = False
    """Also print the output of the commands."""
    csv_metrics: tuple[str, ...] = ()
    """Further metrics of the spec to add to results.csv as columns."""
    additional_metrics: bool = False
    """Add every metric of the spec to results.csv as a column."""
    plan: bool = local(False)
    """Print what would run, and the devices that each benchmark needs, then exit."""


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How predictions are measured."""

    config: str | None = local(None)
    """A named config for inference (`falconet configs`) or a YAML file, which may extend one; options override it."""
    replicas: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Processes that predict in parallel, one per device; auto: as many as the launcher started, else 1."""
    pipeline_splits: tuple[str, ...] = local(())
    """Layers that start a stage on another device, for a model too large for one; auto:N: N balanced stages."""
    device_iterations: Annotated[int, AtLeast(1)] = 1
    """Batches that the device computes per call from the host; on CUDA, as one captured graph."""
    repeat: Annotated[int, AtLeast(1)] = 1
    """Repetitions of --iterations batches; several are reported one by one."""
    seconds: Annotated[float, MoreThan(0)] | None = None
    """Seconds that a repetition may take, roughly: fewer batches than --iterations if need be, but at least one."""
    output: Path | None = local(None)
    """Also write every latency and the result to this JSON file."""
    weights: Literal["random", "pretrained", "auto"] = local("random")
    """Weights to use; pretrained: timm's, from the Hugging Face cache or network; auto: those if there, else random."""
    half_partial: bool = False
    """Let matrix products sum in half precision, on CUDA; convolutions always sum in fp32."""
    profile: bool = local(False)
    """Only trace two batches: profile/profile.json.gz (for Perfetto), profile.txt and profile_summary.json."""
    plan: bool = local(False)
    """Print what would be measured, then exit."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How many clients send requests, and how; --iterations is the number of requests per client."""

    config: str | None = local(None)
    """A named config for inference (`falconet configs`) or a YAML file, which may extend one; options override it."""
    url: str | None = local(None)
    """Measure a running server, such as http://127.0.0.1:8000, instead of starting one."""
    server: Literal["falconet", "triton", "both"] = "falconet"
    """The server to start: Falconet's, NVIDIA's Triton with the exported model, or both, measured in turns."""
    protocol: Literal["http", "grpc"] = "http"
    """What the clients speak; the port of --url must be that protocol's."""
    clients: Annotated[int, AtLeast(1)] = 1
    """Processes that send requests in parallel."""
    client_cores: Annotated[int, AtLeast(0)] = 0
    """CPU cores for the clients alone; the server gets the others. 0: all share all cores."""
    request_type: Literal["SYNC", "ASYNC"] = "SYNC"
    """How a client sends requests; SYNC: one at a time; ASYNC: it keeps --window of them in flight."""
    window: Annotated[int, AtLeast(1)] = 4
    """Requests that an ASYNC client keeps in flight, each on its own connection."""
    check_answers: bool = False
    """Compare every answer with the model's output, computed here."""
    output: Path | None = local(None)
    """Also write every latency and the result to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class DataBench:
    """Which images are measured, and for how long."""

    split: Literal["train", "validation"] = "train"
    """Training images with random crops in random order, or validation images with fixed crops in order."""
    seconds: Annotated[float, MoreThan(0)] = 2.0
    """Seconds to measure each step."""
    passes: Annotated[int, AtLeast(0)] = 0
    """Then also read all images this many times, and print the images per second of each pass."""
    md5: bool = False
    """Only compare the md5 of the training and validation folders with those of ILSVRC 2012."""
    output: Path | None = local(None)
    """Also write the result to this JSON file."""


# Predicting.


@dataclass(frozen=True, kw_only=True)
class Predict:
    """The photos, and what is written about them."""

    photos: tuple[str, ...] = local(())
    """Photos, and folders to search recursively; -: stdin, which has one path per line, or is one photo."""
    top: Annotated[int, AtLeast(1)] = 1
    """Classes to report per photo, the most probable first."""
    json: bool = False
    """Print JSON instead of a table: an array with one object per photo, each on its own line."""
    csv: bool = False
    """Print CSV instead of a table: path, label and probability."""
    output: Path | None = local(None)
    """Write the table, the JSON or the CSV to this file instead of stdout."""
    save_dir: Path | None = local(None)
    """Folder to sort the photos into: it gets a folder per class, with a link to each photo."""
    embeddings: Path | None = local(None)
    """Also write the features before the classifier, and the paths, to this .npz file."""
    batch_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images in one forward pass; auto: as in the run's validation, or fewer if there are fewer photos."""


# Serving.


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The address, and how requests are batched."""

    host: str = local("127.0.0.1")
    """Address to listen on; 0.0.0.0: all interfaces, which calls for --api-key-file and --tls-certificate."""
    port: Annotated[int, Between(0, 65535)] | Auto = local("auto")
    """Port for HTTP; 0: any free one; auto: 8000, or any free one in `bench serve`."""
    grpc_port: Annotated[int, Between(0, 65535)] | Literal["auto", "none"] = local("auto")
    """Port for gRPC; 0: any free one; auto: the one after --port, 8001, if it is available; none: only HTTP."""
    max_batch: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Most images in a batch, and in one request; auto: 64, or the micro-batch in `bench serve`."""
    max_delay: Annotated[float, AtLeast(0)] = 0.0
    """Milliseconds that a request may wait for others to join it while the device is free."""
    max_queue: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Images that may wait; further requests are refused with status 429; auto: 16 x --max-batch."""
    max_body: Annotated[int, AtLeast(1)] = 64
    """MiB of one request with photos; larger ones are refused with status 413."""
    request_timeout: Annotated[float, MoreThan(0)] = 30.0
    """Seconds within which a received request must be computed; a later one is refused with status 504."""
    drain_timeout: Annotated[float, AtLeast(0)] = 20.0
    """Seconds to finish requests in progress when the server is stopped; those that need longer are cut off."""
    half_partial: bool = False
    """Let matrix products sum in half precision, on CUDA; convolutions always sum in fp32."""
    engine: Literal["auto", "torch", "onnxruntime", "openvino"] = "auto"
    """What computes the scores; auto: torch on CUDA; on a CPU, ONNX Runtime if the precision is 32.32, else torch."""
    int8: bool = False
    """Compute in 8-bit integers on a CPU, calibrated on the run's images; its accuracy is reported beside fp32's."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """Further models, and when they change."""

    more_models: tuple[Path, ...] = local(())
    """Further runs, checkpoints or weights files to serve, each under the name of its folder or file."""
    repository: Path | None = local(None)
    """Folder of runs that clients may load and unload by name, besides those served from the start."""
    watch: bool = local(False)
    """Serve a better checkpoint of a run as soon as there is one, without losing a request."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may send requests, and how they are protected on their way."""

    api_key_file: Path | None = local(None)
    """File of API keys, one per line; each request must have one; also the environment variable FALCONET_API_KEY."""
    tls_certificate: Path | None = local(None)
    """PEM file with the server's certificate and those of its issuers; turns on HTTPS and encrypts gRPC."""
    tls_key: Path | None = local(None)
    """PEM file with the key of --tls-certificate, not encrypted."""
    allowed_host: tuple[str, ...] = local(())
    """Host names that requests may use; on a loopback address, besides the server's own. Default elsewhere: any."""
    cors_origin: tuple[str, ...] = local(())
    """Web pages that may send requests from a browser, such as https://example.org; *: any. Default: its own page."""


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What the server reports about requests, besides the metrics at /metrics."""

    access_log: Path | None = local(None)
    """File to which a line of JSON per request is appended, opened again after a rotation; -: stdout."""
    opentelemetry: bool = local(False)
    """Send a trace of each request to the collector that the environment variables OTEL_* name."""


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """Input size and classes of a model without a checkpoint."""

    val_fraction: Annotated[float, Range(0, 1, open_low=True)] = 0.2
    """Fraction of each class to validate on if photos are not split, chosen by file name and --seed; 1: all of them."""
    image_size: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Side of the square input in pixels; auto: the weights' or the model's. A checkpoint has its own."""
    classes: Annotated[int, AtLeast(2)] | Auto = "auto"
    """Number of classes; auto: the weights', else 1000, or 10 for the CIFAR networks. A checkpoint has its own."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """The format, where it is written, and how it is checked."""

    format: Literal["onnx", "pt2", "aoti", "timm", "triton", "openvino"] = "onnx"
    """Format; pt2: torch.export; aoti: AOTInductor's machine code; timm: a folder; triton: a model repository."""
    output: Path | None = local(None)
    """Folder for the result; default: export/FORMAT (or onnx-int8) in the run folder, beside the weights, or here."""
    overwrite: bool = local(False)
    """Replace an earlier export in that folder."""
    preprocessing: bool = False
    """Put normalisation into the graph: it takes uint8 pixels, N x S x S x 3, instead of normalised N x 3 x S x S."""
    half: bool = False
    """Write fp16 weights and compute in fp16 (openvino: only weights); otherwise fp32, whatever the run's precision."""
    int8: bool = False
    """Compute in 8-bit integers, for CPUs (onnx only), calibrated on training images or --photos."""
    calibration_images: Annotated[int, AtLeast(1)] = 128
    """Images on which --int8 is calibrated; accuracy is measured on others."""
    reduce_range: bool = False
    """Use 7-bit weights with --int8, for x86 processors without VNNI, where sums of 8-bit products can overflow."""
    photos: Path | None = local(None)
    """Folder of photos to compare scores on; default: the run's validation images, else noise."""
    tolerance: Annotated[float, MoreThan(0)] | Auto = "auto"
    """Allowed difference of a score, over the image's largest; auto: 1e-4, --half: 0.05; accuracy with --int8: 0.01."""
    latency_batch: Annotated[int, AtLeast(1)] = 8
    """Images in the batch whose latency is measured, besides that of one image."""


# Tools.


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """What is checked."""

    distributed: bool = False
    """Start --replicas processes (default: one per CUDA device, or 2 on a CPU) and check that they work together."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """What is packed, what is left out, and how."""

    source: Path | None = local(None)
    """Folder with train/ and val/, each with one folder per class; also the command's first argument."""
    target: Path | None = local(None)
    """Folder for the shards; also the command's second argument."""
    shard_size: Annotated[int, AtLeast(1)] = 2048
    """Images per shard; 2,048 ImageNet photos are 220 MB."""
    resize: Annotated[int, AtLeast(1)] | None = None
    """Shrink photos to this short side in pixels, and encode them again at quality 90 (lossy)."""
    exclude_list: Path | None = local(None)
    """File that lists photos to leave out, one path per line; `falconet data check` writes it."""
    workers: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Threads; auto: one per core."""


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """What is checked, what is reported, and what is written."""

    source: Path | None = local(None)
    """Folder of photos, or a table, in any layout that training reads; also the command's first argument."""
    output: Path | Auto = local("auto")
    """File that lists every finding, one per line; auto: NAME-check.txt here, where NAME is the folder's name."""
    json: Path | None = local(None)
    """Also write the findings as JSON."""
    html: Path | None = local(None)
    """Also write the findings as a page with small pictures: one file that needs no network."""
    exclude_list: Path | None = local(None)
    """Also write a list of the broken photos, which `train --exclude-list` leaves out."""
    exclude_duplicates: Literal["none", "exact", "near"] = "none"
    """Copies to add to that list, exact or near: training photos that recur in validation or in training."""
    near_bits: Annotated[int, Between(0, 80)] = 60
    """Bits, of 256, in which fingerprints of near copies may differ; different photos differ in 78 or more."""
    smallest_side: Annotated[int, AtLeast(1)] = 32
    """Report photos with a side of fewer pixels than this."""
    largest_megapixels: Annotated[float, MoreThan(0)] = 50.0
    """Report photos of more megapixels than this."""
    largest_ratio: Annotated[float, AtLeast(1)] = 4.0
    """Report photos with one side more than this many times as long as the other."""
    val_fraction: Annotated[float, Range(0, 1, open_low=True)] = 0.2
    """Fraction of each class to validate on if the photos are not split, as in training."""
    seed: Annotated[int, Between(0, 2**32 - 1)] = 0
    """Seed of that split, as in training."""
    workers: Annotated[int, AtLeast(1)] | Auto = "auto"
    """Threads; auto: one per core."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """What is checked."""

    source: Path | None = local(None)
    """Folder with the shards; also the command's first argument."""


@dataclass(frozen=True, kw_only=True)
class Configs:
    """What is listed."""

    evidence: bool = False
    """List only the configs that were trained here: what they reached, on which machine, when and how often."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which recipe is trained again, and on what."""

    name: str | None = None
    """A named config that `falconet configs --evidence` lists; also the command's first argument."""
    seeds: Annotated[int, AtLeast(1)] = 1
    """Number of runs, with the seeds 0, 1, ..."""
    data_dir: Path | None = local(None)
    """Folder of the data, as `falconet train` takes it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: cuda if available, else cpu."""
    runs: Path | Auto = local("auto")
    """Folder for the runs and their logs; auto: runs/recipe_NAME."""
    record: Path | None = local(None)
    """Write what was reached to this JSON file, and compare it with nothing."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Which runs are shown, and where the page goes."""

    runs: tuple[Path, ...] = local(())
    """Run folders; several are shown side by side. Also the command's arguments."""
    output: Path | None = local(None)
    """Page to write; default: report.html in the run folder; for several runs in the current one, with a CSV file."""
    save_plots: bool = False
    """Also draw plots as PNG and PDF into plots/ beside the page; needs matplotlib."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is watched, and where it is shown."""

    source: Path | None = local(None)
    """Run folder, or folder of runs; also the command's argument; default: runs, or what FALCONET_RUNS names."""
    page: bool = local(False)
    """Show the report as a page that follows the run, on 127.0.0.1, instead of on the terminal."""
    port: Annotated[int, Between(0, 65535)] | Auto = local("auto")
    """Port of the page; 0: any free one; auto: 8600, or the next free one."""
    browser: bool = local(False)
    """Also open the page in a browser."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Which run is uploaded, and under which name."""

    source: Path | None = local(None)
    """Run folder, of Falconet or of an original; also the command's first argument."""
    name: str | None = None
    """Name of the uploaded run; default: the name of its folder."""
    wandb_project: str = local("falconet")
    """Weights & Biases project."""
