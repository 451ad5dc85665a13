"""Faster, slower or within noise on made-up results; results files."""

import json
import math

import numpy as np
import pytest

from falconet.bench import results
from falconet.bench.measurements import Measured, Sample
from falconet.bench.results import Result, change_between, compare, summarise
from falconet.bench.statistics import estimate
from falconet.errors import ConfigError


def result(rates, *, name="b", status="passed", command="falconet train", folded=None):
    runs = [Measured(samples=[Sample(rate, 1.0)], folded=folded, latencies=[1000 / rate]) for rate in rates]
    return summarise(runs, name=name, command=command, status=status)


CASES = {  # old, new -> verdict, and whether it fails at a margin of 5 %
    "the same": ([100, 101, 99], [100, 101, 99], "within noise", False),
    "a little less, in noise": ([100, 103, 97], [98, 101, 95], "within noise", False),
    "slower, within the margin": ([100, 100.1, 99.9], [97, 97.1, 96.9], "slower", False),
    "slower, beyond the margin": ([100, 101, 99], [80, 81, 79], "slower", True),
    "much less on average, but too noisy": ([100, 140, 60], [80, 120, 40], "within noise", False),
    "faster": ([100, 101, 99], [120, 121, 119], "faster", False),
    "no spread at all": ([100, 100], [90, 90], "slower", True),
    "one value": ([100], [50], "one value", False),
}


@pytest.mark.parametrize(("old", "new", "verdict", "fails"), CASES.values(), ids=CASES)
def test_verdict_depends_on_the_spread(old, new, verdict, fails):
    (found,) = compare({"b": result(old)}, [result(new)])
    assert (found.verdict, found.loses_more_than(5.0)) == (verdict, fails)


def test_interval_of_a_change_is_welchs():
    # By hand: 100 and 90, std 2 and 4, n 4 and 5. se^2 = 1 + 3.2 = 4.2; df = 17.64 / (1/3 + 10.24/4) = 6.10 -> 6;
    # t = 2.447; half = 2.447 * 2.049 = 5.015
    old = results.Estimate(100.0, 2.0, 0, 0, 4, "runs")
    new = results.Estimate(90.0, 4.0, 0, 0, 5, "runs")
    assert change_between(old, new) == pytest.approx((-10.0, -15.015, -4.985), abs=2e-3)


def test_equal_programs_differ_at_most_one_time_in_twenty():
    draws = np.random.default_rng(1).normal(100, 3, (1000, 6)).tolist()
    intervals = [change_between(estimate(row[:3]), estimate(row[3:]))[1:] for row in draws]
    assert np.mean([not low <= 0 <= high for low, high in intervals]) < 0.06


def test_new_missing_and_changed_benchmarks_are_reported():
    old = {"b": result([1, 1]), "gone": result([1, 1], name="gone")}
    new = [result([1, 1], folded="2 replicas requested"), result([1, 1], name="added")]
    found = {one.name: one for one in compare(old, new)}
    assert found["added"].verdict == "new"
    assert found["gone"].verdict == "missing"
    assert (found["b"].verdict, found["b"].why) == ("not comparable", "different folding")
    many = {name: result([1, 1], name=name) for name in "qwertyuiop"}
    assert [one.name for one in compare(many, [])] == list("qwertyuiop")
    (other,) = compare({"b": result([1, 1], command="x")}, [result([1, 1])])
    assert other.why == "different command"
    (none,) = compare({"b": result([1, 1])}, [result([], status="failed")])
    assert none.verdict == "not comparable"


def test_several_runs_become_one_result():
    found = result([90, 100, 110])
    assert (found.throughput.mean, found.throughput.std, found.throughput.of) == (100.0, 10.0, "runs")
    assert found.latency["max"] == pytest.approx(1000 / 90)
    assert len(found.runs) == 3
    # latencies of 1000 / rate: 11.11, 10 and 9.09 ms; 4.303 x 1.0113 / sqrt 3 = 2.512
    assert found.estimates["p50"].mean == pytest.approx(10.0673, abs=1e-3)
    assert found.estimates["p50"].half_width == pytest.approx(2.512, abs=2e-3)
    assert "p50" not in result([90]).estimates


def test_one_run_has_the_spread_within_it():
    run = Measured(samples=[Sample(10, 1.0), Sample(10, 2.0)] * 10)
    found = summarise([run], name="b", command="c", status="passed")
    assert found.throughput.mean == pytest.approx(20 / 3)
    assert (found.throughput.count, found.throughput.of) == (10, "blocks of one run")


def test_results_round_trip_through_json(tmp_path):
    path = tmp_path / "results.json"
    every = [result([90, 100]), result([5], name="one"), result([], name="none", status="failed")]
    results.write(path, every, {"cores": 2})
    found, machine = results.read(path)
    assert machine == {"cores": 2}
    assert found["b"].throughput == every[0].throughput
    assert math.isnan(found["one"].throughput.std)
    assert found["none"].throughput is None
    assert found["b"].estimates == every[0].estimates
    assert "NaN" not in path.read_text()


DAMAGED = {
    "": "is not JSON",
    "[]": "has format None",
    '{"format": "falconet-bench/9"}': "has format 'falconet-bench/9', expected 'falconet-bench/1'",
    json.dumps({"format": results.FORMAT}): "is damaged",
    json.dumps({"format": results.FORMAT, "machine": {}, "results": [{"x": 1}]}): "is damaged",
}


def test_a_damaged_results_file_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "old.json"
    results.write(path, [result([90, 100])], {})
    path.write_text(path.read_text().replace('"count": 2', '"count": "x"'))
    with pytest.raises(ConfigError, match="is damaged"):
        results.read(path)


def test_an_unknown_spread_is_not_noise():
    unknown = results.Estimate(100.0, math.nan, math.nan, math.nan, 3, "runs")
    change, low, high = change_between(unknown, estimate([90, 91, 89]))
    assert change == pytest.approx(-10)
    assert math.isnan(low)
    assert math.isnan(high)


@pytest.mark.parametrize(("text", "message"), DAMAGED.items())
def test_a_file_without_results_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        results.read(path)
    assert str(path) in str(error.value)


def test_a_result_without_a_number_is_a_result():
    assert Result(name="b", command="c", status="failed").throughput is None
