"""Runs in a pipe: a line per epoch, once."""

from pathlib import Path

from falconet.report.epoch_lines import Told
from falconet.report.followed_runs import FollowedFolder, FollowedRun
from growing_runs import growing
from report_runs import write_run


def test_every_epoch_is_told_once_and_then_the_end(tmp_path):
    told = Told(where=Path("runs/a"))
    with growing(tmp_path / "run", 2) as run:
        followed = FollowedRun(run.folder)
        assert list(told.lines({"": followed.look()})) == [
            "epoch 1/20  train loss 2.0000  train acc 50.00%  val loss 1.0000  val acc 40.00%  lr 0.1  1,000 images/s"
            "  5% waiting",
            "epoch 2/20  train loss 1.0000  train acc 75.00%  val loss 0.5000  val acc 70.00%  lr 0.05  1,000 images/s"
            "  5% waiting",
        ]
        assert list(told.lines({"": followed.look()})) == []
        run.grow()
        assert [line.split("  ")[0] for line in told.lines({"": followed.look()})] == ["epoch 3/20"]
        run.end()
        assert list(told.lines({"": followed.look()})) == ["runs/a: finished, best accuracy 80.00 % after epoch 3"]


def test_a_run_that_goes_back_is_told_as_restored(tmp_path):
    told = Told(where=Path("runs/a"))
    with growing(tmp_path / "run", 3) as run:
        followed = FollowedRun(run.folder)
        list(told.lines({"": followed.look()}))
        log = run.folder / "metrics.jsonl"
        kept = "".join(log.read_text().splitlines(keepends=True)[:2])
        log.unlink()
        log.write_text(kept)
        assert list(told.lines({"": followed.look()})) == ["restored, continues after epoch 1"]
        run.epoch = 1
        run.grow()
        assert [line.split("  ")[0] for line in told.lines({"": followed.look()})] == ["epoch 2/20"]


def test_runs_of_a_folder_are_told_by_name_from_now_on(tmp_path):
    told, followed = Told(where=tmp_path), FollowedFolder(tmp_path)
    write_run(tmp_path / "old")
    with growing(tmp_path / "new", 1) as run:
        assert list(told.lines(followed.look())) == [
            "old: finished, best accuracy 80.00 % after epoch 3",
            "new: under way, best accuracy 40.00 % after epoch 1",
        ]
        run.grow()
        assert [line.split("  ")[0] for line in told.lines(followed.look())] == ["new: epoch 2/20"]
        run.end_early(kind="failed", reason="the loss is not a number")
        assert list(told.lines(followed.look())) == [
            "new: failed: the loss is not a number, best accuracy 70.00 % after epoch 2"
        ]
        run.folder.rename(tmp_path / "moved")
        assert "new: the run folder is gone" in list(told.lines(followed.look()))
