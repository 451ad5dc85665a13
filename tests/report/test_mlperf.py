"""The MLPerf log has the events of the TensorFlow original's public logs, in their order."""

import json

import pytest

from falconet.report.mlperf import MlperfLog, Submission, tensor_name

SUBMISSION = Submission(
    values={"submission_benchmark": "resnet", "global_batch_size": 8}, tensors=["fc1_bias"], epochs=3, began=5.0
)


def events(path):
    lines = path.read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def keys(path):
    """Each event as its key and epoch."""
    return [(event["key"], event["metadata"].get("epoch_num")) for event in events(path)]


def trained(log, *epochs, accuracy=None):
    for epoch in epochs:
        log.write(10 * epoch, {"epoch": epoch - 0.5, "train/loss": 1.0})
        log.write(20 * epoch, {"epoch": float(epoch), "train/loss": 1.0})
        if accuracy is not None:
            log.write(20 * epoch, {"validation/accuracy": accuracy, "validation/seconds": 2.0})


BEGINNING = [
    *(("cache_clear", None), ("init_start", None), ("submission_benchmark", None), ("global_batch_size", None)),
    *(("weights_initialization", None), ("init_stop", None), ("run_start", None), ("block_start", None)),
]


def test_a_whole_run_is_logged(tmp_path):
    path = tmp_path / "result_0.txt"
    log = MlperfLog(path, SUBMISSION)
    trained(log, 1, accuracy=50.0)
    trained(log, 2, 3)
    log.close()
    assert keys(path) == [
        *BEGINNING,
        *(("epoch_start", 1), ("epoch_stop", 1), ("epoch_start", 2)),
        *(("eval_start", 1), ("eval_stop", 1), ("eval_accuracy", 1)),
        *(("epoch_stop", 2), ("epoch_start", 3), ("epoch_stop", 3)),
        *(("block_stop", None), ("run_stop", 3)),
    ]
    found = {event["key"]: event for event in events(path)}
    assert found["init_start"]["time_ms"] == 5000
    assert found["eval_stop"]["time_ms"] - found["eval_start"]["time_ms"] == pytest.approx(2000, abs=100)
    assert found["eval_accuracy"]["value"] == 0.5
    assert (
        found["block_start"]["metadata"] | {"first_epoch_num": 1, "epoch_count": 3} == found["block_start"]["metadata"]
    )
    assert found["weights_initialization"]["metadata"]["tensor"] == "fc1_bias"
    kinds = {"init_start": "INTERVAL_START", "epoch_stop": "INTERVAL_END", "eval_accuracy": "POINT_IN_TIME"}
    assert {key: found[key]["event_type"] for key in kinds} == kinds
    assert list(found["init_stop"]) == ["namespace", "time_ms", "event_type", "key", "value", "metadata"]


@pytest.mark.parametrize(("accuracy", "status"), [(75.9, "success"), (75.85, "aborted")])
def test_reaching_the_target_accuracy_is_a_success(tmp_path, accuracy, status):
    path = tmp_path / "result_0.txt"
    log = MlperfLog(path, SUBMISSION)
    trained(log, 1, accuracy=accuracy)
    trained(log, 2, accuracy=10.0)  # the best one counts
    log.close()
    end = events(path)[-1]
    assert (end["metadata"]["status"], end["value"]) == (status, {"success": status == "success"})


def test_a_restored_run_continues_from_its_checkpoint(tmp_path):
    straight, stopped = tmp_path / "straight.txt", tmp_path / "stopped.txt"
    log = MlperfLog(straight, SUBMISSION)
    trained(log, 1, 2, 3, accuracy=76.0)
    log.close()
    log = MlperfLog(stopped, SUBMISSION)
    trained(log, 1, 2, accuracy=76.0)
    log.close()  # interrupted: logged as the end
    with stopped.open("a") as file:
        file.write(':::MLLOG {"names')  # and killed while it wrote
    log = MlperfLog(stopped, SUBMISSION, done=1)
    trained(log, 2, 3, accuracy=10.0)
    log.close()
    assert sorted(keys(stopped), key=str) == sorted(keys(straight), key=str)
    assert keys(stopped)[: len(BEGINNING)] == BEGINNING
    assert events(stopped)[-1]["value"] == {"success": True}  # by what was measured before


NAMES = {
    "conv1.weight": "conv0_weight",
    "bn1.weight": "bn0_gamma",
    "bn1.bias": "bn0_beta",
    "layer1.0.conv1.weight": "stage1_unit1_conv1_weight",
    "layer1.0.downsample.0.weight": "stage1_unit1_conv1sc_weight",
    "layer1.0.downsample.1.weight": "stage1_unit1_bnsc_gamma",
    "layer3.5.bn3.bias": "stage3_unit6_bn3_beta",
    "fc.weight": "fc1_weight",
    "fc.bias": "fc1_bias",
    "blocks.0.conv_dw.weight": "blocks.0.conv_dw.weight",
}


@pytest.mark.parametrize(("ours", "theirs"), NAMES.items())
def test_resnet50_weights_get_mlperf_names(ours, theirs):
    assert tensor_name(ours) == theirs
