"""Finished runs: our metrics, and the originals' CSV files with the names that upload_run.py gave them."""

import json

import pytest

from falconet.commands.upload import read_moments, read_options
from falconet.errors import DataError

TENSORFLOW = """step,iteration,epoch,lr,loss_batch,loss_avg,train_acc_batch,train_acc_avg,it_time,img_per_sec,total_time
1,10,0.5,0.1,2.5,2.4,10.0,11.0,0.2,320.0,2.0
2,20,1.0,0.05,2.1,2.2,20.0,21.0,0.2,330.0,4.0
"""
VALIDATION = """name,iteration,epoch,val_acc,val_time,val_size,img_per_sec,latency
ckpt-20,20,1.0,33.0,0.5,1000,2000.0,50.0
"""
PYTORCH = """loss_avg,loss_batch,epoch,iteration,train_accuracy_avg,learning_rate,classification_loss_batch
2.0,2.1,0.5,4,12.0,0.1,
"""


def test_metrics_are_read_update_by_update(tmp_path):
    lines = [
        {"update": 4, "train/loss": 1.0, "train/lr": 0.1},
        {"update": 2, "train/loss": 2.0},
        {"update": 4, "validation/accuracy": 50.0},
        {"update": 4, "train/loss": None},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"update": 5, "tr'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert read_moments(tmp_path) == [
        (2, {"train/loss": 2.0}),
        (4, {"train/loss": 1.0, "train/lr": 0.1, "validation/accuracy": 50.0}),
    ]


def test_columns_of_the_tensorflow_program_are_renamed_as_by_its_upload(tmp_path):
    (tmp_path / "training.csv").write_text(TENSORFLOW)
    (tmp_path / "validation.csv").write_text(VALIDATION)
    (tmp_path / "arguments.json").write_text('{"batch_size": 32}')
    first = {"epoch": 0.5, "learning_rate": 0.1, "loss_avg": 2.4, "train_accuracy": 11.0, "train_img_per_sec": 320.0}
    second = {"epoch": 1.0, "learning_rate": 0.05, "loss_avg": 2.2, "train_accuracy": 21.0, "train_img_per_sec": 330.0}
    assert read_moments(tmp_path) == [
        (10, first | {"total_time": 2.0}),
        (20, second | {"total_time": 4.0, "validation_accuracy": 33.0}),
    ]
    assert read_options(tmp_path) == {"batch_size": 32}


def test_columns_of_the_pytorch_program_keep_their_names_without_empty_ones(tmp_path):
    (tmp_path / "training.csv").write_text(PYTORCH)
    (tmp_path / "validation.csv").write_text("validation_epoch,validation_iteration,validation_accuracy\n1.0,8,44.0\n")
    ((update, metrics), validated) = read_moments(tmp_path)
    assert (update, metrics["train_accuracy_avg"], metrics["learning_rate"]) == (4, 12.0, 0.1)
    assert "classification_loss_batch" not in metrics
    assert validated == (8, {"validation_accuracy": 44.0})
    assert read_options(tmp_path) == {}


BROKEN = {
    "no run in it": {},
    "without its update": {"metrics.jsonl": '{"train/loss": 1.0}\n'},
    "not a JSON object": {"metrics.jsonl": "[1]\n"},
    "without an iteration": {"training.csv": "a,b\n1,2\n"},
    "without a number": {"training.csv": "a,b\nx,y\n"},
    "cannot be read": {"training.csv": "a\n\udc80\n"},
}


@pytest.mark.parametrize("said", BROKEN)
def test_folder_without_a_run_is_refused_in_one_line(tmp_path, said):
    for name, text in BROKEN[said].items():
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=said) as refused:
        read_moments(tmp_path)
    assert "\n" not in str(refused.value)
