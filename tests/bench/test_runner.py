"""Running benchmarks: repeats, failures and notes."""

import json
import sys
import time
from types import SimpleNamespace

import pytest

from falconet.bench import execution, measurements
from falconet.bench.runner import Routine, _places, prepare, run_all
from falconet.bench.spec import read_spec

# A program that leaves what a training run leaves, without training.
PROGRAM = """
import json, os, pathlib, sys
home = pathlib.Path(os.environ["FALCONET_RUNS"]) / "run"
home.mkdir(parents=True)
rate = float(sys.argv[1])
(home / "plan.txt").write_text("global batch 10 = 10 x 1\\n")
points = [{"update": n, "train/images_per_second": rate if n > 2 else 1.0} for n in range(1, 21)]
(home / "metrics.jsonl").write_text("\\n".join(map(json.dumps, points)))
print("note: 8 replicas requested, 1 device is available: 1 runs")
sys.exit("it broke") if rate == 13 else None
"""


@pytest.fixture
def jobs(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def make(text):
        (tmp_path / "s.yml").write_text(text)
        return prepare(read_spec(tmp_path / "s.yml"), wandb=False, profile=False, note=lambda _: None)

    return make


def routine(tmp_path, **changes):
    return Routine(**({"repeat": 2, "folder": tmp_path / "out", "here": 4} | changes))


def test_every_variant_is_repeated_and_one_failure_does_not_stop_the_rest(jobs, tmp_path):
    printed = []
    text = (
        "a:\n  parameters:\n    rate: 100,13,200\n  cmd: python program.py {rate} --replicas 8\n"
        "  output: [[samples/sec, throughput], [watts, watts]]\n"
    )
    found = list(run_all(jobs(text), routine(tmp_path), printed.append))
    assert [(one.name, one.status) for one in found] == [
        ("a[rate=100]", "passed"),
        ("a[rate=13]", "failed"),
        ("a[rate=200]", "passed"),
    ]
    assert [found[number].throughput.mean for number in (0, 2)] == pytest.approx([100.0, 200.0])
    assert found[1].throughput is None
    assert found[2].output == {"samples/sec": "200"}
    assert found[0].throughput.count == 2
    assert found[1].reason == "exit code 1: it broke"
    assert found[0].folded == "8 replicas requested, 1 device is available: 1 runs"
    assert "  needs 8 devices, 4 here: runs folded and is marked as such" in printed
    assert "  FAILED: exit code 1: it broke" in printed
    assert "  run 2/2: 100.0 images/s (2 of 20 measurements dropped as warm-up, steady)" in printed
    assert (tmp_path / "out/a_rate=13/run1/output.log").read_text().endswith("it broke\n")
    json.dumps(found[0].runs)


def test_the_first_failure_stops_the_rest_when_asked(jobs, tmp_path):
    text = "a:\n  cmd: python program.py 13\nb:\n  cmd: python program.py 100\n"
    found = list(run_all(jobs(text), routine(tmp_path, stop_on_error=True), lambda _: None))
    assert [one.name for one in found] == ["a"]


def test_a_regexp_that_backtracks_without_end_fails_its_benchmark_alone(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "REGEXP_SECONDS", 0.5)
    text = (
        f"a:\n  cmd: echo {'a' * 60}\n  data: {{x: {{regexp: '((?:a|a)+)b'}}}}\n"  # 2 ** 60 ways to fail
        "b:\n  cmd: python program.py 200\n"
    )
    first, second = run_all(jobs(text), routine(tmp_path, repeat=1), lambda _: None)
    assert (first.status, second.status) == ("failed", "passed")
    assert first.reason.startswith("gave up on the regexp of x after ")


def test_a_metric_without_a_matching_line_is_a_failure(jobs, tmp_path):
    text = "a:\n  cmd: python program.py 100\n  data: {loss: {regexp: 'loss (x)'}}\n"
    (found,) = run_all(jobs(text), routine(tmp_path), lambda _: None)
    assert (found.status, found.reason) == ("failed", "no line matches the regexp of loss")


@pytest.mark.parametrize(
    ("rates", "reason"),
    [("nan nan", "throughput is nan"), ("inf inf", "throughput is inf"), ("0 0", "throughput is 0")],
)
def test_a_throughput_of_zero_or_nan_is_a_failure(jobs, tmp_path, rates, reason):
    text = f"a:\n  cmd: printf '%s/s\\n' {rates}\n  data: {{throughput: {{regexp: '(.*)/s'}}}}\n"
    (found,) = run_all(jobs(text), routine(tmp_path), lambda _: None)
    assert (found.status, found.reason) == ("failed", reason)


def test_a_derived_metric_that_cannot_be_computed_is_a_failure(jobs, tmp_path):
    text = "a:\n  cmd: python program.py 100\n  derived: {x: {expr: '{throughput} / 0'}}\n"
    (found,) = run_all(jobs(text), routine(tmp_path), lambda _: None)
    assert (found.status, found.reason) == ("failed", "cannot compute x")


def test_output_can_be_a_parameter(jobs, tmp_path):
    text = "a:\n  cmd: python program.py {rate}\n  parameters: {rate: 50}\n  output: [[asked, rate]]\n"
    (found,) = run_all(jobs(text), routine(tmp_path), lambda _: None)
    assert found.output == {"asked": "50"}


def test_a_command_that_measures_nothing_is_a_failure(jobs, tmp_path):
    (found,) = run_all(jobs("a:\n  cmd: python -c pass\n"), routine(tmp_path), lambda _: None)
    assert (found.status, found.reason) == ("failed", "finished, but measured nothing")


def test_the_shorter_timeout_applies(jobs, tmp_path, monkeypatch):
    def now():
        """The timeout has passed as soon as the line is logged."""
        return 2.0 * any(log.stat().st_size for log in tmp_path.rglob("output.log"))

    monkeypatch.setattr(execution, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    text = "a:\n  timeout: 1\n  cmd: python -c 'import time; print(5, flush=True); time.sleep(600)'\n"
    (found,) = run_all(jobs(text), routine(tmp_path, timeout=50.0), lambda _: None)
    assert (found.status, found.reason) == ("failed", "timed out after 1 s; its last line: 5")


def test_ignored_keys_are_noted_once(tmp_path):
    (tmp_path / "s.yml").write_text("".join(f"{name}:\n  cmd: x\n  pre_run_commands: [make]\n" for name in "ab"))
    printed = []
    prepare(read_spec(tmp_path / "s.yml"), wandb=False, profile=False, note=printed.append)
    assert printed == ["note: ignored pre_run_commands in the spec; nothing is installed or prepared here"]


def test_commands_use_the_python_of_the_tests(jobs):
    assert jobs("a:\n  cmd: python3 x.py\n")[0].command.argv[0] == sys.executable


def test_benchmarks_with_similar_names_have_separate_folders(jobs):
    long = "n" * 300
    made = jobs(f"'a x': {{cmd: x}}\n'a_x': {{cmd: x}}\n'..': {{cmd: x}}\n{long}: {{cmd: x}}\n")
    assert _places(made) == ["a_x", "a_x~2", "benchmark", "n" * 200]
