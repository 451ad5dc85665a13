"""Styles: the lines and CSV files of the originals, by the patterns that their tools read."""

import csv
import json
import re
from dataclasses import replace

import pytest

from falconet.legacy.conventions import CONVENTIONS
from falconet.report.styles import Facts, Origin, Point, RunLog, Validated
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
    options = {"micro-batch-size": 8, "wandb": False, **changes.pop("options", {})}
    known = {"options": options, "folder": folder, "model": "Net(\n)", "parameters": 75290}
    return Facts(**known, global_batch=64, replicas=2, stages=3, image_size=240, epochs=3, **changes)


def point(update, *, loss=2.0, smoothing=0.0, accuracy=25.0, lr=0.1, scale=None):
    """Ten updates of 64 images an epoch, half of the second of each waiting."""
    rate = Rate(images=320, seconds=5.0, waiting=2.5)
    return Point(
        update=update,
        updates=5,
        number=update // 5,
        epoch=update / 10,
        updates_per_epoch=10,
        epochs=3,
        global_batch=64,
        loss=loss,
        smoothing_loss=smoothing,
        accuracy=accuracy,
        lr=lr,
        scale=scale,
        rate=rate,
        seconds=12.5,
        moment=12.5,
    )


VALIDATED = Validated(
    name="ckpt-20", update=20, epoch=2.0, accuracy=75.903, loss=1.5, images=1000, seconds=0.5, batch=100
)


SCALARS = {
    "pytorch": {"loss_avg", "train_accuracy_avg", "learning_rate", "smoothing_loss_avg:", "validation_accuracy"},
    "tensorflow": {"loss_avg", "train_acc_avg", "lr", "img_per_sec", "val_acc"},
    "popart": {"loss", "train_acc", "learning rate", "val_acc"},
}


class Styled:
    """A style, the lines it printed and the folder it wrote to."""

    def __init__(self, name, folder):
        self.lines, self.folder = [], folder
        self.style = CONVENTIONS[name].style(RunLog(self.lines.append, folder))

    def csv(self, name):
        with (self.folder / name).open() as file:
            return list(csv.DictReader(file))


@pytest.fixture
def styled(tmp_path):
    return lambda name: Styled(name, tmp_path)


def test_the_end_of_an_epoch_matches_the_benchmark_patterns(styled):
    one = styled("pytorch")
    one.style.end_epoch(point(20))
    text = "\n".join(one.lines)
    assert re.findall(r"throughput: *(.*?) samples\/sec", text) == ["64.0"]
    assert re.findall(r"accuracy: *(.*?) \%", text) == ["25.00"]
    assert re.findall(r"loss: *(\d*\.\d*)", text) == ["2.0000"]
    assert one.lines[0].endswith("Epoch 2")


def test_the_accuracy_on_the_test_set_is_printed(styled):
    one = styled("pytorch")
    one.style.validated(VALIDATED)
    assert any(re.fullmatch(r"\[INFO\] Accuracy on test set: 75\.90%", line) for line in one.lines)


def test_pytorch_names_a_checkpoint_that_it_validates(styled):
    one = styled("pytorch")
    origin = Origin(model="resnet18", data="imagenet", loss=1.5, accuracy=25.0)
    one.style.validated(replace(VALIDATED, origin=origin))
    one.style.validated(replace(VALIDATED, origin=replace(origin, loss=None)))
    known = "[INFO] Restore the resnet18 model to epoch 2 on imagenet dataset(train loss: 1.5, train accuracy: 25.0%)"
    assert one.lines[0] == f"{known}: {VALIDATED.name}"
    assert one.lines[3] == f"[INFO] Restore the resnet18 model to epoch 2 on imagenet dataset: {VALIDATED.name}"


def test_pytorch_prints_how_long_training_took(styled):
    one = styled("pytorch")
    one.style.end(trained=59.0, whole=61.5)
    assert one.lines[0].startswith("[INFO] Finished training. Time: 20")
    assert one.lines[0].endswith(". It took: 0:01:01.500000")


def test_pytorch_starts_with_its_facts_and_its_options_file(styled, tmp_path):
    one = styled("pytorch")
    one.style.begin(facts(tmp_path))
    assert one.lines[-1].startswith("[INFO] Training the model. Start: 20")
    assert one.lines[:-1] == [
        "[INFO] Total replicas: 2",
        "[INFO] Global batch size: 64",
        "[INFO] Number of IPUs required: 6",
        "[INFO] Net(\n)",
        "[INFO] Total parameters: 75290",
    ]
    assert json.loads((tmp_path / "app.json").read_text()) == {"micro_batch_size": 8, "wandb": False}
    kept = (tmp_path / "log.txt").read_text().splitlines()
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - \[INFO\] - train - falconet: Total replicas: 2"
    assert re.fullmatch(pattern, kept[0])  # time, module and function, as in the original's file


def test_pytorch_logs_rows_with_means_over_an_epoch(styled, tmp_path):
    one = styled("pytorch")
    for update, loss in ((5, 4.0), (10, 2.0), (15, 1.0)):
        one.style.log(point(update, loss=loss, accuracy=10 * loss))
    one.style.log(point(20, loss=1.0))
    one.style.validated(VALIDATED)
    assert (tmp_path / "training.csv").read_text().splitlines()[0] == PYTORCH_COLUMNS + ",loss_scaling"
    rows = one.csv("training.csv")
    assert [float(row["loss_avg"]) for row in rows] == [4.0, 3.0, 1.5, 1.0]
    assert [float(row["train_accuracy_avg"]) for row in rows][:3] == [40.0, 30.0, 15.0]
    assert [float(row["epoch"]) for row in rows] == [0.5, 1.0, 1.5, 2.0]
    assert [float(row["validation_accuracy"]) for row in rows] == [0.0, 0.0, 0.0, 75.903]  # where it was measured
    assert [float(row["loss_scaling"]) for row in rows] == [1.0] * 4
    # Without smoothing the loss is that of the classes alone.
    assert [float(row["classification_loss_batch"]) for row in rows] == [4.0, 2.0, 1.0, 1.0]
    assert {row["smoothing_loss_avg:"] for row in rows} == {"0.0"}
    assert one.csv("validation.csv") == [
        {"validation_epoch": "2.0", "validation_iteration": "20", "validation_accuracy": "75.903"}
    ]


@pytest.mark.parametrize(("automatic", "ending"), [(False, ",loss_scaling"), (True, "")])
def test_pytorch_has_the_loss_scale_unless_it_is_automatic(styled, tmp_path, automatic, ending):
    one = styled("pytorch")
    one.style.begin(facts(tmp_path, options={"auto-loss-scaling": automatic}))
    one.style.log(point(5, scale=128.0))
    assert (tmp_path / "training.csv").read_text().splitlines()[0] == PYTORCH_COLUMNS + ending
    assert one.csv("training.csv")[0].get("loss_scaling") == (None if automatic else "128.0")


def test_pytorch_logs_the_parts_of_a_smoothed_loss(styled, tmp_path):
    one = styled("pytorch")
    one.style.begin(facts(tmp_path, options={"label-smoothing": "0.1"}))
    one.style.log(point(5, loss=2.0, smoothing=0.5))
    one.style.log(point(10, loss=1.0, smoothing=0.25))
    columns = ("classification_loss_batch", "classification_loss_avg", "smoothing_loss_batch:", "smoothing_loss_avg:")
    found = [[float(row[name]) for name in columns] for row in one.csv("training.csv")]
    assert found == [[1.5, 1.5, 0.5, 0.5], [0.75, 1.125, 0.25, 0.375]]


def test_pytorch_counts_throughput_from_the_start_of_an_epoch(styled):
    one = styled("pytorch")
    fast, slow = Rate(images=300, seconds=1.0, waiting=0.0), Rate(images=100, seconds=3.0, waiting=0.0)
    for update, rate in ((5, fast), (10, slow)):
        one.style.log(replace(point(update), rate=rate))
    one.style.end_epoch(point(10))
    one.style.log(replace(point(15), rate=slow))
    rates = [float(row["train_img_per_sec"]) for row in one.csv("training.csv")]
    assert rates == pytest.approx([300.0, 100.0, 100 / 3])


@pytest.mark.parametrize(("mode", "said"), [("during", True), ("after", False)])
def test_pytorch_prints_the_validation_accuracy_during_training(styled, tmp_path, mode, said):
    one = styled("pytorch")
    one.style.begin(facts(tmp_path, options={"validation-mode": mode}))
    one.style.validated(VALIDATED)
    assert ("[INFO] Validation Accuracy: 75.90%" in one.lines) == said
    assert one.lines.index("[INFO] Testing the model") < one.lines.index("[INFO] Accuracy on test set: 75.90%")


@pytest.mark.parametrize(("schedule", "said"), [("step", ["[INFO] Learning rate is changed to 0.05"]), ("cosine", [])])
def test_pytorch_prints_a_new_learning_rate_for_the_step_schedule_only(styled, tmp_path, schedule, said):
    one = styled("pytorch")
    one.style.begin(facts(tmp_path, options={"lr-schedule": schedule}))
    del one.lines[:]
    for update, lr in ((5, 0.1), (10, 0.1), (15, 0.05), (20, 0.05)):
        one.style.log(point(update, lr=lr))
    assert one.lines == said


def test_tensorflow_starts_with_the_lines_its_tests_look_for(styled, tmp_path):
    one = styled("tensorflow")
    one.style.begin(facts(tmp_path))
    text = "\n".join(one.lines)
    for words in (f"Saving to {tmp_path}", "Batch Size: 64", "Total Parameters:75290", "240x240"):
        assert words in text
    assert json.loads((tmp_path / "arguments.json").read_text())["micro_batch_size"] == 8
    assert "Restoring" not in text


def test_tensorflow_prints_what_it_restores_and_how_long_it_took(styled, tmp_path):
    one = styled("tensorflow")
    one.style.begin(facts(tmp_path, restored=tmp_path / "ckpt-4"))
    one.style.end(trained=1.5, whole=2.25)
    assert f"Restoring training from latest checkpoint: {tmp_path}/ckpt-4" in one.lines
    one.style.begin(facts(tmp_path, restored=tmp_path / "ckpt-2", is_newest=False))
    one.style.end(trained=1.5, whole=2.25)
    assert f"Restoring training from checkpoint: {tmp_path}/ckpt-2" in one.lines
    assert one.lines[-2:] == ["Training loop completed in 1.50s.", "Time to train: 2.25s."]


def test_tensorflow_lists_a_checkpoint_once(styled, tmp_path):
    for _ in range(2):
        styled("tensorflow").style.validated(VALIDATED)
    styled("tensorflow").style.validated(replace(VALIDATED, name="ckpt-30"))
    assert [row["name"] for row in styled("tensorflow").csv("validation.csv")] == ["ckpt-20", "ckpt-30"]


def test_sinks_get_the_numbers_of_a_style_under_its_names(tmp_path):
    class Sink(dict):
        def write(self, update, metrics):
            self.setdefault(update, {}).update(metrics)

    for name, expected in SCALARS.items():
        sink = Sink()
        style = CONVENTIONS[name].style(RunLog(lambda _: None, None, sinks=[sink]))
        style.log(point(20))
        style.validated(VALIDATED)
        assert sink[20].keys() >= expected, name


def test_tensorflow_has_a_line_and_a_row_for_every_log_point(styled, tmp_path):
    one = styled("tensorflow")
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


def test_tensorflow_prints_a_validation_with_its_latency(styled):
    one = styled("tensorflow")
    one.style.validated(VALIDATED)
    # 1000 images in 0.5 s are 10 batches of 50 ms
    assert one.lines == [
        "Validation top-1 accuracy [ckpt-20] (iteration:     20, epoch:   2.00, img/sec: 2000.00, time: 0.500000,"
        " latency (ms):  50.0000): 75.903%"
    ]
    (row,) = one.csv("validation.csv")
    assert list(row) == ["name", "iteration", "epoch", "val_acc", "val_time", "val_size", "img_per_sec", "latency"]


def test_tensorflow_names_checkpoints_by_their_update(styled, tmp_path):
    one = styled("tensorflow")
    assert one.style.checkpoint_name(2500) == "ckpt-2500"
    one.style.saved(tmp_path / "ckpt-2500")
    assert one.lines == [f"Saved checkpoint to {tmp_path}/ckpt-2500"]
    assert one.style.average_name("exp_0.97") == "weight_avg_exp_0.97"
    assert styled("pytorch").style.checkpoint_name(2500) is None


def test_popart_stores_its_options(styled, tmp_path):
    one = styled("popart")
    one.style.begin(facts(tmp_path))
    one.style.begin_epoch(1, 3)
    assert "micro_batch_size=8" in (tmp_path / "log_str.txt").read_text().splitlines()
    assert one.lines == ["Executing epoch  0"]


def test_popart_has_its_two_lines(styled):
    one = styled("popart")
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
    style = CONVENTIONS[name].style(RunLog(lambda _: None, None))
    style.begin(facts(tmp_path))
    style.begin_epoch(1, 3)
    style.log(point(5))
    style.end_epoch(point(10))
    style.validated(VALIDATED)
    style.saved(tmp_path)
    style.end(trained=1.0, whole=2.0)
    assert list(tmp_path.iterdir()) == []


def test_a_restored_run_continues_in_the_same_file(styled, tmp_path):
    styled("tensorflow").style.log(point(5))
    styled("tensorflow").style.log(point(10))
    assert [row["iteration"] for row in styled("tensorflow").csv("training.csv")] == ["5", "10"]


@pytest.mark.parametrize("name", ["pytorch", "tensorflow", "popart"])
def test_the_accuracy_of_the_moving_average_is_the_last_line(styled, name):
    one = styled(name)
    one.style.validated(replace(VALIDATED, average=60.0))
    assert one.lines[-1] == "Accuracy on test set of the moving average: 60.00%"
