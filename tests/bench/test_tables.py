"""Tables of results and comparisons."""

import csv

from falconet.bench import results
from falconet.bench.measurements import Measured, Sample
from falconet.bench.results import Comparison, summarise
from falconet.bench.statistics import Steady


def result(rates, **facts):
    runs = [
        Measured(
            samples=[Sample(rate, 1.0, 0.25)],
            latencies=[8.0],
            steady=Steady(1, "few"),
            peak_memory=1 << 30,
            metrics={"loss": 2.0, "accuracy": 50.0},
            folded=facts.get("folding"),
        )
        for rate in rates
    ]
    facts = {"name": "b|c", "command": "falconet train", "status": "passed", "devices": 16} | facts
    facts.pop("folding", None)
    facts["output"] = (("how wrong", "loss"),)
    return summarise(runs, **facts)


def test_markdown_table_has_numbers_intervals_and_notes():
    text = results.markdown(
        [
            result([1990, 2000, 2010], folding="16 replicas requested, 1 runs"),
            result([], status="failed", reason="why"),
        ],
        {"cores": 2, "devices": ""},
    )
    row, failed = text.splitlines()[2:4]
    assert row == (
        "| b/c | PASSED, folded | 2,000 | 1,975 to 2,025 | 0.5 % | 8.00 +- 0.00 | 8.00 +- 0.00 | 8.00 +- 0.00 |"
        " 25.0 +- 0.0 % | 1.00 GiB |"
    )
    assert failed.startswith("| b/c | FAILED |")
    assert "- b|c: written for 16 devices; 16 replicas requested, 1 runs" in text
    assert "- b|c: why" in text
    assert "- b|c: how wrong 2\n" in text
    assert "Machine: cores 2\n" in text


def test_a_name_with_line_breaks_stays_in_its_row():
    text = results.markdown([result([2000], name="two\nlines", status="failed", reason="a\nb")], {})
    assert text.splitlines()[2].startswith("| two lines | FAILED |")
    assert "- two lines: a b\n" in text
    assert [line.split("  ")[0] for line in results.plain_table(text)] == ["benchmark", "two lines"]


def test_dropped_measurements_of_short_runs_are_noted():
    samples = [Sample(1.0, 1.0)]
    for dropped, printed in ((0, "dropped 0"), (1, "dropped the first"), (3, "dropped 3")):
        run = Measured(samples=samples, steady=Steady(dropped, "few"))
        text = results.markdown([summarise([run], name="b", command="c", status="passed")], {})
        assert f"- b: too few measurements in a run to distinguish warm-up from noise; {printed}\n" in text
    nothing = results.markdown([summarise([Measured()], name="b", command="c", status="passed")], {})
    assert "dropped" not in nothing


def test_the_terminal_table_has_aligned_columns():
    lines = results.plain_table("| a | bb |\n| --- | --- |\n| ccc | d |\n\nother")
    assert lines == ["a    bb", "ccc  d"]


def test_csv_has_one_row_per_variant_and_the_chosen_metrics(tmp_path):
    every = [result([2000]), result([], status="failed")]
    results.write_csv(tmp_path / "r.csv", every, metrics=["loss", "nothing"])
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["passed", "failed"]
    assert (rows[0]["images_per_second"], rows[0]["loss"], rows[0]["nothing"]) == ("2000", "2.0", "")
    assert (rows[0]["latency_p50_ms"], rows[0]["waiting_percent"]) == ("8", "25.00")
    assert rows[1]["images_per_second"] == ""
    assert results.metric_names(every) == ["loss", "accuracy"]


def test_a_loss_beyond_the_margin_is_bold():
    slow = Comparison(name="a", verdict="slower", old=100.0, new=80.0, change=-20.0, low=-22.0, high=-18.0)
    text = results.comparison_markdown([slow, Comparison(name="n", verdict="new")], margin=5.0)
    assert "| a | **slower** | 100.0 | 80.0 | -20.0 % | -22.0 to -18.0 % |  |" in text
    assert "| n | new |" in text
    assert "**" not in results.comparison_markdown([slow], margin=25.0)
