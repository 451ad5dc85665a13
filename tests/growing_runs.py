"""A run folder that grows as `falconet train` lets it, held by this process, without training."""

import contextlib
import fcntl
import json
import os
import tempfile
from pathlib import Path

import report_runs

EPOCHS = 20
PLAN = (
    f"model resnet8-cifar\n{EPOCHS * 10} updates = {EPOCHS} epochs x 10 updates; 640 images\nlearning rate constant\n"
)


class GrowingRun:
    """`held` is the lock that a going run has on its folder."""

    def __init__(self, folder):
        """The folder comes into being as a whole, held: another process may be watching."""
        self.folder, self.epoch = folder, 0
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as beside:
            whole = report_runs.write_run(Path(beside, "run"), epochs=1)
            for name in ("summary.json", "metrics.jsonl", "updates.jsonl"):
                (whole / name).unlink()
            (whole / "plan.txt").write_text(PLAN)
            self._hold(whole)
            whole.rename(folder)

    def hold(self):
        self._hold(self.folder)

    def _hold(self, folder):
        self._handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def release(self):
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def grow(self, epochs=1):
        self.epoch += epochs
        whole = report_runs.metrics(self.epoch)
        self.add("metrics.jsonl", [each for each in whole if each["update"] > 10 * (self.epoch - epochs)])
        self.add("updates.jsonl", [{"update": 10 * self.epoch, "milliseconds": [100.0] * 10 * epochs}])

    def add(self, name, objects):
        with (self.folder / name).open("a") as file:
            file.write(report_runs.lines(objects))

    def end(self):
        summary = {"updates": 10 * self.epoch, "images_per_second": 990.0, "training_seconds": 12.3}
        (self.folder / "summary.json").write_text(json.dumps(summary))
        self.release()

    def end_early(self, **ending):
        (self.folder / "report/ending.json").write_text(json.dumps(ending))
        self.release()


@contextlib.contextmanager
def growing(folder, epochs=0):
    run = GrowingRun(folder)
    if epochs:
        run.grow(epochs)
    try:
        yield run
    finally:
        run.release()
