"""Runs on a terminal of any size."""

from pathlib import Path

import pytest
from rich.cells import cell_len

from falconet.report.dashboard import Place, run_lines, runs_lines
from falconet.report.followed_runs import FollowedFolder, FollowedRun
from falconet.report.gpu_driver import Gauge
from growing_runs import growing
from report_runs import write_run

WHERE = Path("runs/first")


def shown(run, *, width=100, height=40, **more):
    place = Place(width=width, height=height, clock=lambda: (run.written or 0.0) + 2)
    return [line.plain for line in run_lines(run, place, where=WHERE, **more)]


@pytest.fixture
def run(tmp_path):
    with growing(tmp_path / "run", 12) as found:
        yield FollowedRun(found.folder).look()


def test_a_run_shows_its_state_progress_best_speed_and_epochs(run):
    text = "\n".join(shown(run))
    assert text.splitlines()[0].startswith("runs/first ")
    assert text.splitlines()[0].endswith(" under way")
    assert "epoch 12 of 20" in text
    assert " 60 %, about 6s left" in text  # 80 updates of 0.1 s, 2 s ago
    assert "best accuracy 95.00 % after epoch 12" in text  # 100 - 60 / 12
    assert "best checkpoint ckpt_1" in text
    assert "learning rate 0.00833" in text
    assert "1,000 images/s · 5 % of the time waiting for data" in text
    assert "device memory 1.00 GiB · host memory 0.50 GiB" in text
    assert "loss (log scale)" in text
    rows = [line.split() for line in text.splitlines() if "/20 " in line]
    assert rows[-1] == ["12/20", "0.1667", "95.00%", "*", "0.0833", "95.83%", "0.00833", "1,000", "5%"]
    assert [row[0] for row in rows] == [f"{epoch}/20" for epoch in range(1, 13)]


@pytest.mark.parametrize("width", [12, 20, 30, 39, 63, 64, 80, 200])
@pytest.mark.parametrize("height", [3, 10, 24, 60])
def test_every_size_is_kept_to(run, width, height):
    lines = shown(run, width=width, height=height)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= max(height, 14 if width < 64 else 8), "what must be said, and nothing else"


def test_a_short_terminal_shows_the_newest_epochs(run):
    rows = [line.split()[0] for line in shown(run, height=16) if "/20 " in line]
    assert rows[-1] == "12/20"
    assert len(rows) < 12


def test_plots_are_stacked_where_it_is_narrow(run):
    lines = shown(run, width=50, height=60)
    assert [line.strip() for line in lines if "loss (log" in line or "accuracy, %" in line] == [
        "loss (log scale)",
        "accuracy, %",
    ]


def test_a_terminal_without_unicode_gets_ascii(run):
    place = Place(width=80, height=40, has_unicode=False)
    lines = [line.plain for line in run_lines(run, place, where=WHERE)]
    assert "\n".join(lines).isascii()
    assert any("####" in line for line in lines)


def test_only_gpus_of_the_kind_of_the_run_are_shown(tmp_path):
    with growing(tmp_path / "run", 1) as found:
        (found.folder / "report/environment.json").write_text('{"device": "NVIDIA H200, 139 GiB"}')
        run = FollowedRun(found.folder).look()
    gauges = [
        Gauge(number=0, name="NVIDIA H200", busy=97.0, used=3 << 30, total=139 << 30),
        Gauge(number=1, name="NVIDIA T4", busy=1.0, used=0, total=16 << 30),
    ]
    lines = [line for line in shown(run, gauges=gauges) if "GPU" in line]
    assert lines == ["GPU 0 of this machine: 97 % busy, 3.0 of 139.0 GiB used"]


def test_a_run_without_log_points_and_a_damaged_one_are_shown(tmp_path):
    with growing(tmp_path / "run") as found:
        assert any(line.startswith("no log points yet") for line in shown(FollowedRun(found.folder).look()))
        (found.folder / "metrics.jsonl").write_text("not JSON\n[]\n")
        assert "note: run/metrics.jsonl: 2 lines are not JSON; left out" in shown(FollowedRun(found.folder).look())


def test_a_long_reason_is_shown_in_whole(tmp_path):
    reason = (
        "the loss is not a number after update 30; the newest checkpoint is runs/first/checkpoints/ckpt_1; try --lr"
    )
    with growing(tmp_path / "run", 3) as found:
        found.end_early(kind="failed", reason=reason)
        lines = shown(FollowedRun(found.folder).look(), width=60)
    assert " ".join(lines).startswith(f"runs/first failed: {reason} resnet8-cifar")


def test_hostile_text_acts_on_no_terminal(tmp_path):
    evil = "\x1b]0;owned\x07"
    with growing(tmp_path / "run", 2) as found:
        (found.folder / "config.yaml").write_text(f'model: "{evil}x"\ndata: {evil}\n')
        (found.folder / "checkpoints/ckpt_1").rename(found.folder / f"checkpoints/{evil}")
        found.end_early(kind="failed", reason=evil)
        text = "\n".join(shown(FollowedRun(found.folder).look()))
    assert "\x1b" not in text
    assert "\x07" not in text


def runs_shown(folder, **size):
    followed = FollowedFolder(folder)
    place = Place(**({"width": 100, "height": 30} | size))
    return [line.plain for line in runs_lines(followed.look(), place, where=Path("runs"), left_out=followed.left_out)]


def test_a_folder_is_a_table_of_runs_the_newest_first(tmp_path):
    write_run(tmp_path / "old", epochs=3)
    with growing(tmp_path / "new", 2) as going:
        lines = runs_shown(tmp_path)
        assert lines[0].split() == ["runs", "2", "runs,", "1", "under", "way"]
        assert lines[2].split() == ["run", "state", "epoch", "best", "images/s", "left", "train", "loss"]
        assert lines[3].split()[:5] == ["new", "under", "way", "2/20", "70.00%"]
        assert lines[4].split() == ["old", "finished", "3", "80.00%", "1,000", "-", "0.6667"]
        going.end_early(kind="interrupted")
        assert any(line.startswith("new  interrupted ") for line in runs_shown(tmp_path))


@pytest.mark.parametrize("width", [20, 40, 80, 160])
def test_a_table_of_runs_fits_and_keeps_both_ends_of_long_names(tmp_path, width):
    for number in range(3):
        write_run(tmp_path / f"resnet50_imagenet_20261118-0{number}0000_{'x' * 40}_end{number}")
    lines = runs_shown(tmp_path, width=width, height=6)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) == 5
    assert lines[-1] == "and 2 older"


def test_runs_of_different_images_are_said_to_be_so(tmp_path):
    write_run(tmp_path / "digits")
    assert not any("different images" in line for line in runs_shown(tmp_path))
    write_run(tmp_path / "photos", options=[("data", "folder", "line"), ("data-dir", "/photos", "line")])
    assert runs_shown(tmp_path)[-1] == "The runs have different images: their accuracies cannot be compared."
