"""What tools of the originals read: every program run from its folder, its lines and files against the inventory.

`{}` stands for a number; a line of a table is a line of the output, and the lines come in this order.
"""

import csv
import json
import re
import shlex
from pathlib import Path

import pytest

from falconet.legacy.programs import main

pytestmark = pytest.mark.run

COMPAT = Path(__file__).parents[1] / "compat"
HERE = "--device cpu --threads 1 --dataloader-workers 1"
FOLDERS = {"pytorch": "pytorch/train", "tf1": "tensorflow", "popart": "popart"}


@pytest.fixture
def run(capfd, tmp_path, monkeypatch):
    """Runs a line of a program in an empty folder, in this process; gives what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", "")
    monkeypatch.delenv("FALCONET_RUNS", raising=False)

    def call(program, line, *, own=""):
        dialect, _, script = program.partition(":")
        place = COMPAT / FOLDERS[dialect] / script if "/" not in script else COMPAT / dialect / script
        assert place.exists(), place
        code = main(program, str(place), [*shlex.split(line), "--", *own.split(), *HERE.split()])
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

    return call


def requires_in_order(text, table):
    """Every line of the table is in the text, one after the other."""
    lines = iter(text.splitlines())
    for expected in table.strip("\n").splitlines():
        pattern = re.escape(expected).replace(r"\{\}", r" *-?[\d.]+(?:e[+-]?\d+)?").replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, line) for line in lines), f"not there, or too early: {expected}"


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def header(path):
    return path.read_text().splitlines()[0]


PYTORCH = (
    "--data generated --model mobilenet-v3-small --iterations 4 --epoch 2 --micro-batch-size 4 --precision 32.32"
    " --validation-mode during --validation-frequency 2 --logs-per-epoch 2 --checkpoint-output-path out"
)
PYTORCH_LINES = """
[INFO] Total replicas: 1
[INFO] Global batch size: 4
[INFO] Number of IPUs required: 1
[INFO] MobileNetV3(
[INFO] Total parameters: {}
[INFO] Training the model. Start: ...
[INFO] Epoch 1/2
[INFO] Epoch 1
[INFO] loss: {},
[INFO] accuracy: {} %
[INFO] throughput: {} samples/sec
Checkpoint saved to: out/mobilenet-v3-small_generated_1
[INFO] Epoch 2/2
[INFO] Epoch 2
[INFO] loss: {},
[INFO] accuracy: {} %
[INFO] throughput: {} samples/sec
[INFO] Testing the model
[INFO] Accuracy on test set: {}%
[INFO] Validation Accuracy: {}%
Checkpoint saved to: out/mobilenet-v3-small_generated_2
[INFO] Finished training. Time: .... It took: 0:00:...
"""
PYTORCH_COLUMNS = (
    "loss_avg,loss_batch,epoch,iteration,train_accuracy_avg,train_accuracy_batch,learning_rate,train_img_per_sec,"
    "validation_accuracy,classification_loss_batch,classification_loss_avg,smoothing_loss_batch:,smoothing_loss_avg:,"
    "loss_scaling"
)


MEASURED = (
    "[INFO] Restore the mobilenet-v3-small model to epoch {epoch} on generated"
    " dataset(train loss: {{}}, train accuracy: {{}}%): mobilenet-v3-small_generated_{epoch}\n"
    "[INFO] Testing the model\n"
    "[INFO] Accuracy on test set: {{}}%"
)


def test_pytorch_program_prints_and_writes_its_lines_and_files(run):
    requires_in_order(run("pytorch:train.py", PYTORCH, own="--image-size 32"), PYTORCH_LINES)
    out = Path("out")
    assert {"app.json", "log.txt", "training.csv", "validation.csv"} <= {path.name for path in out.iterdir()}
    assert header(out / "training.csv") == PYTORCH_COLUMNS
    assert [float(row["epoch"]) for row in rows(out / "training.csv")] == [0.5, 1.0, 1.5, 2.0]
    assert [row["iteration"] for row in rows(out / "training.csv")] == ["2", "4", "6", "8"]
    assert header(out / "validation.csv") == "validation_epoch,validation_iteration,validation_accuracy"
    stored = json.loads((out / "app.json").read_text())
    assert (stored["micro_batch_size"], stored["precision"], stored["seed"]) == (4, "32.32", 0)
    assert " - [INFO] - " in (out / "log.txt").read_text()
    requires_in_order(
        run("pytorch:validate.py", "--checkpoint-path out"),
        "\n".join(MEASURED.format(epoch=epoch) for epoch in (1, 2)),
    )


INFERENCE = f"""
{"[INFO]  Throughput: {} imgs/sec; Latency range: {}..{} ms"}
[INFO] {"-" * 91}
[INFO] resnet18 results:
        micro_batch_size: 2
        data_mode: generated
        data_type: torch.float16
        num_ipus: 1
        throughput: {{}} samples/sec (mean) (min: {{}}, max: {{}}, std: {{}})
        latency avg: {{}} ms (mean) (min: {{}}, max: {{}})
"""


def test_pytorch_inference_prints_its_lines(run):
    line = "--data generated --model resnet18 --iterations 4 --micro-batch-size 2 --norm-type group --precision 32.32"
    text = run("pytorch:inference/run_benchmark.py", line, own="--image-size 32")
    requires_in_order(text.replace("torch.float32", "torch.float16"), INFERENCE)
    assert re.findall(r"throughput: *(.*?) samples\/sec", text)
    assert re.findall(r"latency avg: *(.*?) ms", text)


TENSORFLOW = (
    "--generated-data --dataset cifar-10 --model-size 8 --iterations 4 --log-freq 2 --batch-size 4 --precision 32.32"
    " --name-suffix mine --weight-avg-exp 0.97 --mlperf-logging --seed 3"
)
TENSORFLOW_LINES = """
 Saving to logs/RN8_bs4_BN_32.32_mine_v...
 Batch Size: 4
 Image size: 32x32
Total Parameters:{}
step:{}, iteration:      2, epoch:   0.50, lr:{}, loss:{}, top-1 accuracy:{}%, img/sec:{}, time:{}, total_time:{}
step:{}, iteration:      4, epoch:   1.00, lr:{}, loss:{}, top-1 accuracy:{}%, img/sec:{}, time:{}, total_time:{}
Validation top-1 accuracy [ckpt-4] (iteration:      4, epoch:   1.00, img/sec:{}, time:{}, latency (ms):{}):{}%
Saved checkpoint to ...ckpt-4
Training loop completed in {}s.
Time to train: {}s.
Validation top-1 accuracy [weight_avg_exp_0.97] (iteration:      4, epoch:   1.00, img/sec:{}, ...):{}%
"""
TENSORFLOW_COLUMNS = (
    "step,iteration,epoch,lr,loss_batch,loss_avg,train_acc_batch,train_acc_avg,it_time,img_per_sec,total_time"
)


def test_tensorflow_program_prints_and_writes_its_lines_and_files(run):
    requires_in_order(run("tf1:train.py", TENSORFLOW), TENSORFLOW_LINES)
    (folder,) = Path("logs").iterdir()
    assert re.fullmatch(r"RN8_bs4_BN_32\.32_mine_v[\d.]+_[A-Z0-9]{3}", folder.name)
    files = {"arguments.json", "log.txt", "training.csv", "validation.csv", "result_3.txt"}
    assert files <= {path.name for path in folder.iterdir()}
    assert header(folder / "training.csv") == TENSORFLOW_COLUMNS
    stored = json.loads((folder / "arguments.json").read_text())
    assert (stored["batch_size"], stored["iterations"], stored["weight_avg_exp"]) == (4, 4, [0.97])
    assert header(folder / "validation.csv") == "name,iteration,epoch,val_acc,val_time,val_size,img_per_sec,latency"
    assert [row["name"] for row in rows(folder / "validation.csv")] == ["ckpt-4", "weight_avg_exp_0.97"]
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"ckpt-4", "weight_avg_exp_0.97"}
    requires_in_order(
        run("tf1:validation.py", f"--restore-path {folder}"),
        "Validation top-1 accuracy [ckpt-4] (...):{}%\nValidation top-1 accuracy [weight_avg_exp_0.97] (...):{}%",
    )
    text = run("tf1:restore.py", f"--restore-path {folder}", own="--epoch 2")
    requires_in_order(text, "Restoring training from latest checkpoint: ...ckpt-4\nTime to train: {}s.")
    assert len(rows(folder / "training.csv")) == 4


def test_tensorflow_inference_prints_its_lines(run):
    line = "--model resnet --model-size 8 --dataset cifar-10 --batch-size 4 --generated-data --precision 32.32"
    requires_in_order(
        run("tf1:validation.py", line, own="--iterations 4"),
        "Latencies - avg:{}, 99th percentile:{}, 99.9th percentile:{}, max:{}\n"
        "Validation top-1 accuracy [resnet8-cifar] (iteration:{}, epoch:{}, img/sec:{}, time:{}, latency (ms):{}):{}%",
    )


POPART = """
Executing epoch  0
step:{}, epoch:   0.50, lr:{}, loss:{}, accuracy:{}%, img/sec:{} step_time:{} sec ipu_execution_time:{}
step:{}, epoch:   1.00, lr:{}, loss:{}, accuracy:{}%, img/sec:{} step_time:{} sec ipu_execution_time:{}
Validation accuracy epoch   1.00, img/sec:{} accuracy:{}% loss:{}
"""


def test_popart_program_prints_and_writes_its_lines_and_files(run):
    line = "--data-dir d --size 8 --batch-size 4 --epochs 1 --precision 32 --no-prng --log_dir_string here"
    requires_in_order(run("popart:resnet_main.py", line, own="--data generated --iterations 2"), POPART)
    (folder,) = Path("logs").glob("*/8/here")
    assert "micro_batch_size=4" in (folder / "log_str.txt").read_text().splitlines()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert {"loss", "train_acc", "learning rate", "val_acc"} <= set(events.Tags()["scalars"])
