"""The servers that `bench serve` measures: Falconet's and Triton's, started with the same model, or a running one."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from falconet import writing
from falconet.bench import load_test, triton_server
from falconet.bench.load_test import Target
from falconet.config.commands import BenchServeOptions, ServeOptions
from falconet.config.load import of_command
from falconet.config.settings import LINE, Setting, spelled
from falconet.data.dataset import Dataset, open_to_measure
from falconet.errors import ConfigError, named_option
from falconet.export import triton_repository
from falconet.export.formats import ONNX, save_onnx
from falconet.export.graph import Graph
from falconet.export.triton_repository import MODELS, Scheduling
from falconet.infer.classifier import Classifier
from falconet.infer.predictor import open_served
from falconet.report.console import Say

RUNNING, OURS, TRITON = "server", "falconet", "triton"  # what a server is called in the results


@contextlib.contextmanager
def opened(options: BenchServeOptions, line: Sequence[Setting], say: Say) -> Iterator[dict[str, Target]]:
    """The servers to measure, by name; those that were started are stopped at the end."""
    load = options.load
    if load.url is not None:
        with named_option("url"):
            target = Target.at(load.url, options.model.model, load.protocol)
            target.metadata()  # fails now, with the option's name, if no server answers
        yield {RUNNING: target}
        return
    kinds = (OURS, TRITON) if load.server == "both" else (load.server,)
    starts = {OURS: _falconet, TRITON: _triton}
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(starts[name](options, line, say)) for name in kinds}


@contextlib.contextmanager
def _falconet(options: BenchServeOptions, line: Sequence[Setting], _: Say) -> Iterator[Target]:
    with load_test.started(["serve", *_server_line(options, line)], options.load.protocol) as target:
        yield target


@contextlib.contextmanager
def _triton(options: BenchServeOptions, line: Sequence[Setting], say: Say) -> Iterator[Target]:
    """NVIDIA's server with the same model, as many threads, and the same limits of a batch."""
    classifier, _ = open_model(options, line, say)
    if classifier.device.type == "cuda" and triton_server.find().packages is not None:
        raise ConfigError("--server triton: PyPI's tritonserver computes on the CPU; expected --device cpu as well")
    most = max_batch(options)
    scheduling = Scheduling(
        max_batch=most,
        delay=round(1000 * options.serving.max_delay),
        threads=torch.get_num_threads() if classifier.device.type == "cpu" else None,
    )
    with writing.scratch() as home:
        folder = Path(home)
        graph = _graph(classifier, options, say)
        save_onnx(graph, triton_repository.write(graph, folder, scheduling) / ONNX)
        with triton_server.started(folder / MODELS, models=[graph.name]) as running:
            ports = running.ports
            port = ports.grpc if options.load.protocol == "grpc" else ports.http
            yield Target(protocol=options.load.protocol, host=triton_server.HOST, port=port, model=graph.name)


def _graph(classifier: Classifier, options: BenchServeOptions, say: Say) -> Graph:
    """The model that Falconet serves, with its weights as they were rounded."""
    if classifier.tta != "none":
        raise ConfigError("--server triton: the run averages several views of an image; an exported model has only one")
    computed = classifier.regime.formats(classifier.device)["activations"]
    if computed == torch.bfloat16:
        say("note: Triton computes in fp32, Falconet in bf16")
    return Graph(
        name=classifier.served_name,
        options=replace(options.model, model=classifier.name),
        model=classifier.model.cpu().float().eval(),
        preprocessing=classifier.preprocessing,
        class_names=classifier.class_names,
        activation=classifier.activation,
        takes_pixels=True,
        half=computed == torch.float16,
    )


def open_model(options: BenchServeOptions, line: Sequence[Setting], say: Say) -> tuple[Classifier, ServeOptions]:
    """The model that the servers have, in this process."""
    added = {} if options.input.checkpoint_input_path else _untrained(options)
    settings = [Setting(name, spelled(value), LINE) for name, value in added.items()]
    return open_served([*of_command(ServeOptions, line), *settings], say)


def max_batch(options: BenchServeOptions) -> int:
    """Images that a server computes at once."""
    batch, most = options.data.micro_batch, options.serving.max_batch
    if most == "auto":
        return batch
    if most < batch:
        raise ConfigError(
            f"--max-batch: got {most}, expected at least --micro-batch-size, the {batch} images of one request"
        )
    return most


def _server_line(options: BenchServeOptions, line: Sequence[Setting]) -> list[str]:
    """The options of our server: those of the line that it has too, and what only its measurement knows."""
    own = {setting.option: setting for setting in of_command(ServeOptions, line)}
    added: dict[str, object] = {"max-batch": max_batch(options)}
    if options.serving.port == "auto":
        added["port"] = 0
    if options.serving.max_queue == "auto":
        added["max-queue"] = options.data.micro_batch * options.load.clients * window(options)
    if options.input.checkpoint_input_path is None:
        added |= _untrained(options)
    settings = own | {name: Setting(name, spelled(value), LINE) for name, value in added.items()}
    return [word for setting in settings.values() for word in setting.argv()]


def _untrained(options: BenchServeOptions) -> dict[str, object]:
    """The options of a model with random weights for the images that are sent."""
    data = images(options)
    return {"model": options.model.model, "image-size": data.preprocessing.image_size, "classes": data.classes}


def window(options: BenchServeOptions) -> int:
    """Requests that a client has in flight."""
    return options.load.window if options.load.request_type == "ASYNC" else 1


def images(options: BenchServeOptions) -> Dataset:
    data = options.data
    if data.data == "synthetic":
        raise ConfigError(
            "--data synthetic: exists only on the device, but requests come from the host; expected generated"
        )
    return open_to_measure(data, model=options.model.model, global_batch=data.micro_batch, seed=0)
