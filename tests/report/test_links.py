"""No report file is ever written through a symbolic link."""

import contextlib

import pytest
import torch

from falconet.errors import LinkError
from falconet.report.mlperf import MlperfLog, Submission
from falconet.report.profile import trace
from falconet.report.sinks import JsonLines, UpdateTimes
from falconet.report.styles import RunLog
from falconet.report.trackers.tensorboard import TensorBoard


def log(folder):
    return RunLog(lambda _: None, folder)


def traced(folder):
    device = torch.device("cpu")
    trace.write(trace.stopped(trace.started(device)), {}, folder)


WRITERS = {
    "metrics.jsonl": lambda folder: JsonLines(folder / "metrics.jsonl"),
    "updates.jsonl": lambda folder: UpdateTimes(folder / "updates.jsonl"),
    "tensorboard": lambda folder: TensorBoard(folder / "tensorboard"),
    "result_0.txt": lambda folder: MlperfLog(
        folder / "result_0.txt", Submission(values={}, tensors=(), epochs=1, began=0.0)
    ),
    "log.txt": lambda folder: log(folder).kept_line("a line"),
    "training.csv": lambda folder: log(folder).row("training.csv", {"epoch": 1}, update=1),
    "validation.csv": lambda folder: log(folder).row("validation.csv", {"epoch": 1}, update=1),
    "app.json": lambda folder: log(folder).json("app.json", {}),
    "log_str.txt": lambda folder: log(folder).text("log_str.txt", "a line"),
    "profile.json.gz": traced,
    "profile.txt": traced,
    "profile_summary.json": traced,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_is_refused_and_its_target_unchanged(tmp_path, name):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    run.mkdir()
    (victim / "file").write_text("")  # also what an appended file would read first
    (run / name).symlink_to(victim if name == "tensorboard" else victim / "file")
    with pytest.raises(LinkError, match=f"run/{name}: is a symbolic link"):
        WRITERS[name](run)
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert (victim / "file").read_text() == ""


def test_all_files_are_written_without_links(tmp_path):
    for write in WRITERS.values():
        opened = write(tmp_path)
        with contextlib.closing(opened) if opened is not None else contextlib.nullcontext():
            pass
    assert {path.name for path in tmp_path.iterdir()} == set(WRITERS)
