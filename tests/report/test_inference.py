"""The lines about predictions."""

from dataclasses import replace

import numpy as np

from falconet.report.inference import Facts, batch_line, summary, tensorflow

FACTS = Facts(model="resnet50", micro_batch=4, data="generated", dtype="torch.float16", devices=2)


def test_a_batch_is_told_with_its_instance_when_there_are_several():
    alone = batch_line(100.0, 40.0, instance=0, of=1)
    assert alone == "[INFO]  Throughput: 100.00 imgs/sec; Latency range: 40.000..40.000 ms"
    assert batch_line(100.0, 40.0, instance=1, of=4) == alone.replace("  ", " [instance2/4] ", 1)


def test_the_summary_by_hand():
    assert summary(FACTS, [100.0, 300.0], [1.0, 2.0, 6.0]) == [
        f"[INFO] {'-' * 91}",
        "[INFO] resnet50 results:",
        "[INFO] \n\tmicro_batch_size: 4",
        "[INFO] \n\tdata_mode: generated",
        "[INFO] \n\tdata_type: torch.float16",
        "[INFO] \n\tnum_ipus: 2",
        "[INFO] \n\tthroughput: 200.00 samples/sec (mean) (min: 100.00, max: 300.00, std: 100.00)",
        "[INFO] \n\tlatency avg: 3.000 ms (mean) (min: 1.000, max: 6.000)",
    ]


def test_photos_of_a_folder_are_real_data_in_the_pytorch_programs_words():
    assert "[INFO] \n\tdata_mode: real" in summary(replace(FACTS, data="folder"), [1.0], [1.0])


def test_the_lines_of_the_tensorflow_program():
    latencies = [float(number) for number in range(1, 501)]
    first, second = tensorflow(FACTS, [100.0, 300.0], latencies)
    high, higher = np.percentile(latencies, [99, 99.9])
    assert first == (
        f"Latencies - avg: 250.5000, 99th percentile: {high:8.4f}, 99.9th percentile: {higher:8.4f}, max: 500.0000"
    )
    # 2 batches of 4 in each of 2 processes: 8 images in 0.08 s, and 8 in 0.02667 s
    assert second == (
        "Validation top-1 accuracy [resnet50] (iteration:      0, epoch:   0.00, img/sec: 150.00, time: 0.106667,"
        " latency (ms): 250.5000):    nan%"
    )
    assert "99th percentile:   7.0000" in tensorflow(FACTS, [1.0], [7.0])[0]
