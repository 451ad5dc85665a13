"""`falconet bench`: the built-in smoke spec really runs, and every answer has its exit code."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from falconet.bench.execution import build_command
from falconet.bench.spec import builtin_specs, find_spec, read_spec
from falconet.config.commands import COMMANDS
from falconet.config.fields import options_of
from falconet.config.load import load
from falconet.config.settings import from_line

PROGRAM = "print('throughput: {} samples/sec')"


def spec(folder, *rates, extra=""):
    """A program that prints rates, the first of them warm-up."""
    lines = "; ".join(PROGRAM.format(rate) for rate in rates)
    text = f"""
steady_gen:
  data: {{throughput: {{regexp: 'throughput: *(.*?) samples', skip: 1}}, last: {{regexp: 'throughput: (.*?) s'}}}}
  cmd: >-
    python3 -c "{lines}"
{extra}
"""
    path = folder / "own.yml"
    path.write_text(text)
    return path


SMOKE = [
    "smoke_train_digits",
    "smoke_train_generated[batchsize=8]",
    "smoke_train_generated[batchsize=16]",
    "smoke_infer_generated",
]
PARTS = [("--benchmark smoke_train_digits", SMOKE[:1]), pytest.param("", SMOKE, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("part", "expected"), PARTS, ids=["one benchmark", "all of them"])
def test_smoke_spec_runs_and_writes_its_tables(falconet, tmp_path, part, expected):
    answer = falconet(f"bench --spec smoke {part} --repeat 1 --log-dir out --additional-metrics")
    assert answer.code == 0, answer.out + answer.err
    content = json.loads(Path("out/results.json").read_text())
    names = [result["name"] for result in content["results"]]
    assert names == expected
    for result in content["results"]:
        assert result["status"] == "passed"
        assert result["throughput"]["mean"] > 0
        assert result["throughput"]["low"] < result["throughput"]["mean"] < result["throughput"]["high"]
        assert result["latency"]["p50"] <= result["latency"]["p90"] <= result["latency"]["p99"]
        assert result["peak_memory"] > 50 << 20
        assert result["runs"][0]["warm_up"] >= 1
    assert content["results"][0]["waiting_percent"] >= 0
    with Path("out/results.csv").open() as file:
        assert [row["benchmark"] for row in csv.DictReader(file)] == names
    assert "| smoke_train_digits | PASSED |" in Path("out/results.md").read_text()
    assert f"{len(names)} of {len(names)} passed" in answer.out
    assert not Path("runs").exists()  # the runs lie with the results


def test_slower_than_before_is_exit_code_3(falconet, tmp_path):
    path = spec(tmp_path, 1, 100, 101, 99, 100, 101, 99, 100)
    assert falconet(f"bench --spec {path} --repeat 1 --log-dir old").code == 0
    text = path.read_text()
    same = falconet(f"bench --spec {path} --repeat 1 --log-dir same --compare old/results.json")
    assert same.code == 0
    assert "within noise" in same.out
    # the same command, so the old file is changed instead: it was faster then
    old = json.loads(Path("old/results.json").read_text())
    estimate = old["results"][0]["throughput"]
    for key in ("mean", "low", "high"):
        estimate[key] *= 1.3
    Path("old/results.json").write_text(json.dumps(old))
    assert path.read_text() == text
    slower = falconet(f"bench --spec {path} --repeat 1 --log-dir now --compare old/results.json")
    assert slower.code == 3
    assert "slower by more than 5 %: steady_gen" in slower.out
    assert "**slower**" in Path("now/comparison.md").read_text()
    allowed = falconet(f"bench --spec {path} --repeat 1 --log-dir ok --compare old/results.json --margin 50")
    assert allowed.code == 0


def test_failing_entry_shows_its_last_line_and_the_others_run(falconet, tmp_path):
    broken = "broken_gen:\n  cmd: falconet train --eopch 2\nlater_gen:\n  cmd: falconet models --x\n"
    path = spec(tmp_path, 1, 2, 3, extra=broken)
    answer = falconet(f"bench --spec {path} --repeat 1 --log-dir out")
    assert answer.code == 1
    assert "FAILED: exit code 2: falconet train: unknown option --eopch; did you mean '--epoch'?" in answer.out
    assert "1 of 3 passed" in answer.out
    stopped = falconet(f"bench --spec {path} --benchmark broken_gen steady_gen --stop-on-error --log-dir stopped")
    assert "0 of 2 passed, 1 not run; written" in stopped.out
    only = falconet(
        f"bench --spec {path} --benchmark steady_gen --repeat 1 --log-dir only --additional-metrics --csv-metrics loss"
    )
    assert only.code == 0
    assert "nothing measured loss; the columns are empty" in only.out
    assert Path("only/results.csv").read_text().splitlines()[0].endswith(",command,throughput,last,loss")


MISTAKES = {
    "--spec nothing.yml": "nothing.yml: cannot be read: No such file or directory",
    "--spec smok": "--spec: there is no spec 'smok'; did you mean 'smoke'?",
    "": "--spec: required, because there is no ./benchmarks.yml: a file, or one of gpu, pytorch_inference,"
    " pytorch_train, smoke, tensorflow",
    "--spec smoke --benchmark smoke_train_digit": "--benchmark: there is no benchmark 'smoke_train_digit'; did you"
    " mean 'smoke_train_digits'?",
    "--spec smoke --compare none.json": "--compare: cannot read none.json: No such file or directory",
    "--spec smoke --repeat 0": "--repeat: got '0', expected a whole number, at least 1",
    "--spec smoke --log-dir /proc/x": "--log-dir: cannot write to /proc/x: No such file or directory",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_mistake_is_one_line_and_exit_code_2(falconet, line, message):
    answer = falconet(f"bench {line}")
    assert (answer.code, answer.err) == (2, f"falconet bench: {message}\n")


def test_results_are_never_overwritten(falconet, tmp_path):
    path = spec(tmp_path, 1, 2)
    assert falconet(f"bench --spec {path} --repeat 1 --log-dir out").code == 0
    assert "already holds results" in falconet(f"bench --spec {path} --repeat 1 --log-dir out").err


def test_plan_lists_what_would_run_and_its_devices(falconet):
    answer = falconet("bench --spec pytorch_train --plan")
    assert answer.code == 0
    assert "pytorch_resnet50_train_real_pod16: 16 devices" in answer.out
    assert "_conv" not in answer.out
    assert not Path("bench-results").exists()


@pytest.mark.run
def test_ctrl_c_keeps_results(tmp_path):
    slow = 'slow_gen:\n  cmd: python3 -c "import time; print(1, flush=True); time.sleep(600)"\n'
    path = spec(tmp_path, 1, 2, 3, extra=slow)
    argv = [sys.executable, "-m", "falconet", "bench", "--spec", str(path), "--repeat", "1", "--log-dir", "out"]
    process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True)
    log = tmp_path / "out/slow_gen/run1/output.log"
    deadline = time.monotonic() + 300
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) == 130
    statuses = [one["status"] for one in json.loads((tmp_path / "out/results.json").read_text())["results"]]
    assert statuses == ["passed", "interrupted"]


@pytest.mark.parametrize("name", builtin_specs())
def test_every_command_of_a_built_in_spec_is_valid(name, monkeypatch):
    monkeypatch.setenv("DATASETS_DIR", "data")
    for benchmark in read_spec(find_spec(name)):
        for parameters in benchmark.variants:
            command = build_command(benchmark, parameters, wandb=True, profile=False, note=pytest.fail)
            words = list(command.argv[3:])
            two = " ".join(words[:2]) in COMMANDS
            options = COMMANDS[" ".join(words[: 1 + two])]
            load(options, from_line(words[1 + two :], options_of(options)))
