"""The lines about predictions."""

from falconet.report.inference import Facts, batch_line, summary

FACTS = Facts(model="resnet50", micro_batch=4, data="generated", dtype="torch.float16", devices=2)


def test_a_batch_is_told_with_its_instance_when_there_are_several():
    alone = batch_line(100.0, 40.0, instance=0, of=1)
    assert alone == "Throughput: 100.00 imgs/sec; Latency range: 40.000..40.000 ms"
    assert batch_line(100.0, 40.0, instance=1, of=4) == f"[instance2/4] {alone}"


def test_the_summary_by_hand():
    assert summary(FACTS, [100.0, 300.0], [1.0, 2.0, 6.0]) == [
        "resnet50 results:",
        "    micro_batch_size: 4",
        "    data_mode: generated",
        "    data_type: torch.float16",
        "    num_ipus: 2",
        "    throughput: 200.00 samples/sec (mean) (min: 100.00, max: 300.00, std: 100.00)",
        "    latency avg: 3.000 ms (mean) (min: 1.000, max: 6.000)",
    ]
