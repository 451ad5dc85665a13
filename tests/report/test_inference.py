"""Figures of predictions in words."""

import math

from falconet.report.inference import Predictions, heading, percentiles, rate

FOUND = {"model": "resnet50", "micro_batch": 4, "data": "generated", "dtype": "torch.float16"}


def test_the_heading_names_what_was_measured():
    one = Predictions(**FOUND, devices=1, rates=[1.0], latencies=[1.0])
    assert heading(one) == ["resnet50, batches of 4, data generated, torch.float16"]
    two = Predictions(**FOUND, devices=2, rates=[1.0], latencies=[1.0])
    assert heading(two) == ["resnet50, batches of 4 in each of 2 processes, data generated, torch.float16"]


def test_a_rate_has_an_interval_where_there_is_one():
    assert rate(1234.56, low=-3.0, high=2000.0) == "1,234.6 images/s (95 % 0.0 to 2,000.0)"
    assert rate(1234.56, low=math.nan, high=math.nan) == "1,234.6 images/s"


def test_latencies_are_printed_by_name():
    assert percentiles({"p50": 1.0, "p99": 2.5}) == "p50 1.000  p99 2.500"
