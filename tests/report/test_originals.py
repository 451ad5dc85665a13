"""Styles: the lines and CSV files of the originals, by the patterns that their tools read."""

import csv
import json
import re

import pytest

from falconet.report.originals import style_of
from falconet.report.styles import Facts, Point, RunLog, Validated
from falconet.report.throughput import Rate

NUMBER = r" *-?[\d.e+-]+"
PYTORCH_COLUMNS = (
    "loss_avg,loss_batch,epoch,iteration,train_accuracy_avg,train_accuracy_batch,learning_rate,train_img_per_sec,"
    "validation_accuracy,classification_loss_batch,classification_loss_avg,smoothing_loss_batch:,smoothing_loss_avg:"
)
TENSORFLOW_COLUMNS = (
    "step,iteration,epoch,lr,loss_batch,loss_avg,train_acc_batch,train_acc_avg,it_time,img_per_sec,total_time"
)


def facts(folder, **changes):
    known = {"options": {"micro-batch-size": "8", "wandb": False}, "folder": folder, "parameters": 75290}
    return Facts(
        **known, global_batch=64, replicas=2, stages=3, image_size=240, schedule=changes.get("schedule", "cosine")
    )


def point(update, *, loss=2.0, accuracy=25.0, lr=0.1, scale=None):
    """Ten updates of 64 images an epoch, half of the second of each waiting."""
    rate = Rate(images=320, seconds=5.0, waiting=2.5)
    return Point(
        update=update,
        epoch=update / 10,
        updates_per_epoch=10,
        epochs=3,
        global_batch=64,
        loss=loss,
        accuracy=accuracy,
        lr=lr,
        scale=scale,
        rate=rate,
        seconds=12.5,
    )


VALIDATED = Validated(
    name="ckpt-20", update=20, epoch=2.0, accuracy=75.903, loss=1.5, images=1000, seconds=0.5, batch=100
)


class Told:
    """A style, what it said and where it wrote."""

    def __init__(self, name, folder):
        self.lines, self.folder = [], folder
        self.style = style_of(name, RunLog(self.lines.append, folder))

    def csv(self, name):
        with (self.folder / name).open() as file:
            return list(csv.DictReader(file))


@pytest.fixture
def told(tmp_path):
    return lambda name: Told(name, tmp_path)


@pytest.mark.parametrize("name", ["falconet", "pytorch"])
def test_the_end_of_an_epoch_is_what_the_benchmark_patterns_read(told, name):
    one = told(name)
    one.style.end_epoch(point(20))
    text = "\n".join(one.lines)
    assert re.findall(r"throughput: *(.*?) samples\/sec", text) == ["64.0"]
    assert re.findall(r"accuracy: *(.*?) \%", text) == ["25.00"]
    assert re.findall(r"loss: *(\d*\.\d*)", text) == ["2.0000"]
    assert re.search(r"Epoch 2/3$", one.lines[0])


@pytest.mark.parametrize("name", ["falconet", "pytorch"])
def test_the_accuracy_on_the_test_set(told, name):
    one = told(name)
    one.style.validated(VALIDATED)
    assert any(re.fullmatch(r"(\[INFO\] )?Accuracy on test set: 75\.90%", line) for line in one.lines)


def test_pytorch_begins_with_its_facts_and_its_file_of_options(told, tmp_path):
    one = told("pytorch")
    one.style.begin(facts(tmp_path))
    assert one.lines == [
        "[INFO] Total replicas: 2",
        "[INFO] Global batch size: 64",
        "[INFO] Number of devices: 6",
        "[INFO] Total parameters: 75290",
    ]
    assert json.loads((tmp_path / "app.json").read_text()) == {"micro_batch_size": "8", "wandb": False}
    assert (tmp_path / "log.txt").read_text().splitlines() == one.lines


def test_pytorch_logs_rows_with_means_over_an_epoch(told, tmp_path):
    one = told("pytorch")
    for update, loss in ((5, 4.0), (10, 2.0), (15, 1.0)):
        one.style.log(point(update, loss=loss, accuracy=10 * loss))
    one.style.validated(VALIDATED)
    one.style.log(point(20, loss=1.0))
    assert (tmp_path / "training.csv").read_text().splitlines()[0] == PYTORCH_COLUMNS
    rows = one.csv("training.csv")
    assert [float(row["loss_avg"]) for row in rows] == [4.0, 3.0, 1.5, 1.0]
    assert [float(row["train_accuracy_avg"]) for row in rows][:3] == [40.0, 30.0, 15.0]
    assert [float(row["epoch"]) for row in rows] == [0.5, 1.0, 1.5, 2.0]
    assert [float(row["validation_accuracy"]) for row in rows] == [0.0, 0.0, 0.0, 75.903]
    assert one.csv("validation.csv") == [
        {"validation_epoch": "2.0", "validation_iteration": "20", "validation_accuracy": "75.903"}
    ]


def test_pytorch_has_the_loss_scale_where_there_is_one(told, tmp_path):
    one = told("pytorch")
    one.style.log(point(5, scale=128.0))
    assert (tmp_path / "training.csv").read_text().splitlines()[0] == PYTORCH_COLUMNS + ",loss_scaling"
    assert one.csv("training.csv")[0]["loss_scaling"] == "128.0"


@pytest.mark.parametrize(("schedule", "said"), [("step", ["[INFO] Learning rate is changed to 0.05"]), ("cosine", [])])
def test_pytorch_says_a_new_learning_rate_for_the_step_schedule_alone(told, tmp_path, schedule, said):
    one = told("pytorch")
    one.style.begin(facts(tmp_path, schedule=schedule))
    del one.lines[:]
    for update, lr in ((5, 0.1), (10, 0.1), (15, 0.05), (20, 0.05)):
        one.style.log(point(update, lr=lr))
    assert one.lines == said


def test_tensorflow_begins_with_the_lines_its_tests_look_for(told, tmp_path):
    one = told("tensorflow")
    one.style.begin(facts(tmp_path))
    text = "\n".join(one.lines)
    for words in (f"Saving to {tmp_path}", "Batch Size: 64", "Total Parameters:75290", "240x240"):
        assert words in text
    assert json.loads((tmp_path / "arguments.json").read_text())["micro_batch_size"] == "8"


def test_tensorflow_has_a_line_and_a_row_for_every_log_point(told, tmp_path):
    one = told("tensorflow")
    one.style.log(point(5))
    one.style.end_epoch(point(10))
    pattern = (
        rf"step:{NUMBER}, iteration:{NUMBER}, epoch:{NUMBER}, lr:{NUMBER}, loss:{NUMBER}, top-1 accuracy:{NUMBER}%,"
        rf" img/sec:{NUMBER}, time:{NUMBER}, total_time:{NUMBER}"
    )
    assert len(one.lines) == 1
    assert re.fullmatch(pattern, one.lines[0])
    assert "img/sec:  64.00, time: 1.000000, total_time:     12.5" in one.lines[0]
    assert (tmp_path / "training.csv").read_text().splitlines()[0] == TENSORFLOW_COLUMNS


def test_tensorflow_tells_a_validation_with_its_latency(told):
    one = told("tensorflow")
    one.style.validated(VALIDATED)
    # 1000 images in 0.5 s are 10 batches of 50 ms
    assert one.lines == [
        "Validation top-1 accuracy [ckpt-20] (iteration:     20, epoch:   2.00, img/sec: 2000.00, time: 0.500000,"
        " latency (ms):  50.0000): 75.903%"
    ]
    (row,) = one.csv("validation.csv")
    assert list(row) == ["name", "iteration", "epoch", "val_acc", "val_time", "val_size", "img_per_sec", "latency"]


def test_tensorflow_names_checkpoints_by_their_update(told, tmp_path):
    one = told("tensorflow")
    assert one.style.checkpoint_name(2500) == "ckpt-2500"
    one.style.saved(tmp_path / "ckpt-2500")
    assert one.lines == [f"Saved checkpoint to {tmp_path}/ckpt-2500"]
    assert told("pytorch").style.checkpoint_name(2500) is None


def test_popart_has_its_two_lines(told):
    one = told("popart")
    one.style.log(point(5))
    one.style.validated(VALIDATED)
    pattern = (
        rf"step:{NUMBER}, epoch:{NUMBER}, lr:{NUMBER}, loss:{NUMBER}, accuracy:{NUMBER}%, img/sec:{NUMBER}"
        rf" step_time:{NUMBER} sec ipu_execution_time:{NUMBER}"
    )
    assert re.fullmatch(pattern, one.lines[0])
    assert "step_time:   5.00 sec ipu_execution_time:   2.50" in one.lines[0]
    validation = rf"Validation accuracy epoch{NUMBER}, img/sec:{NUMBER} accuracy:{NUMBER}% loss:{NUMBER}"
    assert re.fullmatch(validation, one.lines[1])


@pytest.mark.parametrize("name", ["falconet", "pytorch", "tensorflow", "popart"])
def test_without_a_folder_nothing_is_written(name, tmp_path):
    style = style_of(name, RunLog(lambda _: None, None))
    style.begin(facts(tmp_path))
    style.log(point(5))
    style.end_epoch(point(10))
    style.validated(VALIDATED)
    style.saved(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_restored_run_goes_on_in_the_same_file(told, tmp_path):
    told("tensorflow").style.log(point(5))
    told("tensorflow").style.log(point(10))
    assert [row["iteration"] for row in told("tensorflow").csv("training.csv")] == ["5", "10"]
