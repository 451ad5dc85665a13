"""Measurements read from hand-made files and output."""

import json
import re

import pytest

from falconet.bench.execution import Ended
from falconet.bench.measurements import Measured, Sample, measure
from falconet.bench.spec import Benchmark, Metric

THROUGHPUT = Metric(pattern=re.compile(r"throughput: *(.*?) samples\/sec"), skip=1)


def benchmark(tmp_path, **changes):
    return Benchmark(name="b", where="s", folder=tmp_path, command="c", **changes)


def ended(*lines, peak=1 << 20):
    return Ended(code=0, seconds=9.0, lines=lines, peak_memory=peak)


def training(folder, rates, *, batch=64, waiting=10.0, summary=True):
    """A run folder with two updates between log points."""
    folder.mkdir(parents=True)
    (folder / "plan.txt").write_text(f"model x\nglobal batch {batch} = micro-batch {batch} x ...\n")
    points = [
        {"update": 2 * number, "train/images_per_second": rate, "train/waiting_percent": waiting}
        for number, rate in enumerate(rates, start=1)
    ]
    lines = [json.dumps(point) for point in points]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"update": 99, "validation/accuracy": 5}', '{"half']))
    times = [{"update": point["update"], "milliseconds": [90.0, 110.0]} for point in points]
    times[-1]["milliseconds"] = [150.0, 250.0]
    (folder / "updates.jsonl").write_text("\n".join([*map(json.dumps, times), '{"half']))
    if summary:
        (folder / "summary.json").write_text(json.dumps({"peak_memory_bytes": 3 << 30}))


def test_a_training_run_is_measured_without_its_warm_up(tmp_path):
    training(tmp_path / "runs/r", [10.0] + [640.0] * 9 + [320.0])
    found = measure(benchmark(tmp_path), {}, ended(), tmp_path / "runs")
    # nine stretches of 128 images in 0.2 s and one in 0.4 s
    assert found.steady.first == 1
    assert found.throughput == pytest.approx(1280 / 2.2)
    assert found.waiting_percent == pytest.approx(10.0)
    # milliseconds of every update, not means over stretches: as many of 90 as of 110, and two of the last one
    assert found.latency()["p50"] == pytest.approx(110.0)
    assert found.latency()["max"] == pytest.approx(250.0)
    assert len(found.latencies) == 22 - 1
    assert found.peak_memory == 3 << 30
    assert found.metrics["throughput"] == found.throughput


def test_a_killed_run_keeps_what_it_logged(tmp_path):
    training(tmp_path / "runs/r", [10.0, 64.0, 64.0], summary=False)
    found = measure(benchmark(tmp_path), {}, ended(), tmp_path / "runs")
    assert found.throughput == pytest.approx(64.0)
    assert found.peak_memory == 1 << 20


def test_predictions_have_separate_latencies(tmp_path):
    (tmp_path / "runs").mkdir()
    content = {
        "images_per_batch": 8,
        "throughput_seconds": [9.0] + [0.01] * 20,
        "latency_seconds": [9.0] + [0.02] * 20,
        "peak_memory_bytes": 5,
    }
    (tmp_path / "runs/inference.json").write_text(json.dumps(content))
    found = measure(benchmark(tmp_path), {}, ended(), tmp_path / "runs")
    assert found.throughput == pytest.approx(800.0)
    assert found.latency() == pytest.approx({"p50": 20, "p90": 20, "p99": 20, "mean": 20, "max": 20})
    assert found.peak_memory == 5


def test_other_programs_are_measured_by_their_output(tmp_path):
    spec = benchmark(
        tmp_path,
        metrics={
            "throughput": THROUGHPUT,
            "loss": Metric(pattern=re.compile(r"loss: (\S+)"), reduction="final"),
            "best": Metric(pattern=re.compile(r"loss: (\S+)"), reduction="min"),
            "first": Metric(pattern=re.compile(r"loss: (\S+)"), reduction="value"),
            "mean": Metric(pattern=re.compile(r"loss: (\S+)"), skip=1),
        },
        derived={"each": "{throughput} / {replicas}", "half": "{each} / 2", "none": "{nothing}"},
    )
    lines = ["throughput: 10 samples/sec", "loss: 3", "throughput: 100 samples/sec", "loss: 1", "loss: 2", "loss: x"]
    found = measure(spec, {"replicas": "4", "kind": "b"}, ended(*lines), tmp_path / "runs")
    assert found.metrics == {
        "throughput": 100.0,
        "loss": 2.0,
        "best": 1.0,
        "first": 3.0,
        "mean": 1.5,
        "each": 25.0,
        "half": 12.5,
    }


def test_latency_has_its_own_warm_up_and_is_a_metric_even_if_not_printed(tmp_path):
    latency = Metric(pattern=re.compile(r"latency: (\S+)"), skip=3)
    spec = benchmark(tmp_path, metrics={"throughput": THROUGHPUT, "latency": latency})
    lines = [f"latency: {value}" for value in (90, 80, 70, 5, 5)]
    assert measure(spec, {}, ended(*lines), tmp_path).latency()["max"] == 5.0
    (tmp_path / "inference.json").write_text(json.dumps({"latency_seconds": [0.02] * 20}))
    assert measure(spec, {}, ended(), tmp_path).metrics["latency"] == pytest.approx(20.0)


def test_throughput_is_all_images_over_all_seconds(tmp_path):
    spec = benchmark(tmp_path, metrics={"throughput": THROUGHPUT})
    lines = [f"throughput: {rate} samples/sec" for rate in (5, 100, 50)]
    # as many images at 100 as at 50 in a second: 2 / (1/100 + 1/50)
    found = measure(spec, {}, ended(*lines), tmp_path)
    assert found.throughput == pytest.approx(200 / 3)
    assert found.waiting_percent is None  # not measured


def test_folding_is_read_from_the_trainers_output(tmp_path):
    printed = "16 replicas requested, 1 CUDA device is available: 1 runs, with 16 times the accumulation"
    stages = "4 stages requested, 1 CUDA device is available: all stages of a replica run in one process"
    found = measure(benchmark(tmp_path), {}, ended(f"note: {stages}", f"note: {printed}", "other"), tmp_path)
    assert found.folded == f"{stages}; {printed}"
    assert measure(benchmark(tmp_path), {}, ended("note: x has no effect"), tmp_path).folded is None


def test_spread_within_a_run_is_over_blocks(tmp_path):
    fast, slow = Sample(10, 1.0), Sample(10, 2.0)
    found = Measured(samples=[fast, fast, slow, slow]).within()
    assert (found.count, found.mean, found.of) == (2, pytest.approx(7.5), "blocks of one run")
    assert Measured(samples=[fast, slow, fast]).within() is None


def test_loss_and_accuracy_come_from_the_log_points_if_no_line_has_them(tmp_path):
    loss = Metric(pattern=re.compile(r"loss: (\S+)"), reduction="final")
    spec = benchmark(tmp_path, metrics={"loss": loss, "accuracy": Metric(pattern=re.compile(r"accuracy: (\S+)"))})
    points = [{"update": 1, "train/loss": 3.0, "train/accuracy": 10.0}, {"update": 1, "validation/accuracy": 1.0}]
    points.append({"update": 2, "train/loss": 2.0, "train/accuracy": 30.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, points)) + '\n{"torn')
    assert measure(spec, {}, ended("1/2  9.0  9.00%"), tmp_path).metrics == {"loss": 2.0, "accuracy": 20.0}
    assert measure(spec, {}, ended("loss: 7"), tmp_path).metrics["loss"] == 7.0
