"""Measure one server, or several in turns, by the times of their clients, and check their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from falconet.bench import load_test
from falconet.bench.client import Job, Outcome
from falconet.bench.load_test import Target, Tensors, Together
from falconet.bench.measurements import Measured, leave, settled
from falconet.config.commands import BenchServeOptions
from falconet.errors import ConfigError, WorldError, named_option
from falconet.report import inference as lines
from falconet.report.console import Screen, counted
from falconet.report.styles import Conventions

TURNS = 5  # of each server, if several are compared; they divide --iterations
MOST = 1000  # requests per client; a config for local batches would take minutes more


class Server(NamedTuple):
    """A server, and the work of its clients."""

    target: Target
    tensors: Tensors
    job: Job


Outcomes = dict[str, list[Outcome]]  # of the clients of each server, by its name


def requests(options: BenchServeOptions) -> int:
    """The number of requests that each client sends."""
    return min(options.data.iterations, MOST)


def window(options: BenchServeOptions) -> int:
    """The number of requests that a client has in flight."""
    return options.load.window if options.load.request_type == "ASYNC" else 1


def measure(server: Server, options: BenchServeOptions, screen: Screen, conventions: Conventions) -> list[Outcome]:
    """Measure one server."""
    clients, job = options.load.clients, server.job
    outcomes = load_test.run_clients(job, clients)
    counts = _executions(server.target)
    found = load_test.together(outcomes, in_flight=clients * job.window)
    _show(found, options, server.tensors, screen, conventions)
    if counts:
        screen.line(f"server: {counts} since it started")
    _write(_times(found, options), options)
    return outcomes


def compare(servers: Mapping[str, Server], options: BenchServeOptions, screen: Screen) -> Outcomes:
    """Measure several servers in turns, so that a change in the machine's speed affects all, and compare them."""
    count = max(-(-requests(options) // TURNS), load_test.DROPPED + 1)
    rounds = [_round(servers, options, count=count, forward=number % 2 == 1) for number in range(TURNS + 1)]
    in_flight = options.load.clients * window(options)
    turns = {  # the first one is a warm-up
        name: [load_test.together(each[name], in_flight=in_flight) for each in rounds[1:]] for name in servers
    }
    screen.line(f"served to {_clients(options)}, {TURNS} turns of {counted(count, 'request')} of each client:")
    for name, server in servers.items():
        latency = Measured(latencies=[1000 * time for one in turns[name] for time in one.latencies]).latency()
        counts = _executions(server.target)
        screen.line(f"{name:8}  {_of_turns(_rates(turns[name], options))} images/s, {counts}")
        screen.line(f"{name:8}  latency of a request in ms: {lines.percentiles(latency)}")
    (first, ours), (second, theirs) = ((name, _rates(turns[name], options)) for name in servers)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    screen.line(f"{first} / {second}: {_of_turns(ratios, digits=2)}")
    content = {name: [_times(one, options) for one in each] for name, each in turns.items()}
    _write({"model": options.model.model, "turns": content, "ratios": ratios}, options)
    return {name: [outcome for each in rounds for outcome in each[name]] for name in servers}


def _round(servers: Mapping[str, Server], options: BenchServeOptions, *, count: int, forward: bool) -> Outcomes:
    """One turn of each server; rounds alternate in direction, so that the last server of one starts the next."""
    names = list(servers)[:: 1 if forward else -1]
    return {
        name: load_test.run_clients(replace(servers[name].job, count=count), options.load.clients) for name in names
    }


def _rates(turns: Sequence[Together], options: BenchServeOptions) -> list[float]:
    """The images per second of each turn."""
    size = options.data.micro_batch
    return [size * one.requests * len(one.spacing) / sum(one.spacing) for one in turns]


def _of_turns(values: Sequence[float], digits: int = 1) -> str:
    low, high = min(values), max(values)
    return f"{median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _executions(target: Target) -> str:
    """The numbers of images and batches that the server has computed; empty: it does not report them."""
    try:
        (stats,) = target.statistics()["model_stats"]
        return f"{counted(stats['inference_count'], 'image')} in {counted(stats['execution_count'], 'batch')}"
    except (ConfigError, KeyError, TypeError, ValueError):
        return ""


def _show(
    found: Together, options: BenchServeOptions, tensors: Tensors, screen: Screen, conventions: Conventions
) -> None:
    measured = settled(found.spacing, found.latencies, images=found.requests * options.data.micro_batch)
    assert measured.throughput is not None
    steady = measured.steady
    predictions = lines.Predictions(
        model=options.model.model,
        micro_batch=options.data.micro_batch,
        data=options.data.data,
        dtype=tensors.datatype,
        devices=1,
        rates=measured.rates,
        latencies=measured.latencies,
    )
    for text in conventions.predictions(predictions):
        screen.line(text)
    spread = measured.spread()
    screen.line(f"served to {_clients(options)}: {lines.rate(measured.throughput, low=spread.low, high=spread.high)}")
    screen.line(f"served: latency of a request in ms: {lines.percentiles(measured.latency())}")
    dropped = min(load_test.DROPPED, requests(options) - 1)
    screen.line(
        f"the first {counted(dropped, 'request')} of each client dropped, then {steady.first} of {len(found.spacing)}"
        f" stretches of {found.requests} as warm-up ({steady.verdict})"
    )


def _clients(options: BenchServeOptions) -> str:
    load = options.load
    how = ["SYNC"] if load.request_type == "SYNC" else ["ASYNC", f"{counted(load.window, 'request')} in flight each"]
    if load.protocol == "grpc":
        how.append("gRPC")
    if load.client_cores:
        how.append(f"on {counted(load.client_cores, 'core')} of their own")
    return ", ".join([counted(load.clients, "client"), *how])


def _times(found: Together, options: BenchServeOptions) -> dict[str, object]:
    """All times, in the format of `bench infer`."""
    return {
        "images_per_batch": found.requests * options.data.micro_batch,
        "model": options.model.model,
        "throughput_seconds": found.spacing,
        "latency_seconds": found.latencies,
    }


def _write(content: Mapping[str, object], options: BenchServeOptions) -> None:
    """Write results for `falconet bench` and --output."""
    with named_option("output"):
        leave(content, output=options.load.output)


def check(outcomes: Outcomes, servers: Mapping[str, Server], screen: Screen) -> int:
    """Report how well the answers agree with the model's; exit code 1 if some do not."""
    for (name, found), server in zip(outcomes.items(), servers.values(), strict=True):
        answers, wrong = sum(len(one.times) for one in found), sum(one.wrong for one in found)
        apart, limit = max(one.apart for one in found), server.job.tolerance
        text = f"the largest difference is {apart:.1e} of an image's largest score, expected at most {limit:g}"
        label = f"{name}: " if len(servers) > 1 else ""
        if wrong:
            raise WorldError(
                f"{label}{wrong} of {counted(answers, 'answer')} differ from the model's output here: {text}"
            )
        screen.line(f"{label}all {answers} answers match the model's output here: {text}")
    return 0
