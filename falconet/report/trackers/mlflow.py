"""MLflow: options as parameters, metrics by update, and the run's own files as artifacts."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from falconet.errors import ConfigError
from falconet.report.sinks import Metrics
from falconet.report.trackers.tracker import Tracker

EXPERIMENT = "falconet"
FOLDER, MARK = "falconet.run_folder", "falconet.run"  # tags by which a continued run finds its own
LONGEST = 500  # letters of a parameter that every server takes
# For its client, unless the user set them: by default it retries for minutes and prints the address of the run.
QUIETLY = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MLflow(Tracker):
    """A run where MLflow itself would keep it: at MLFLOW_TRACKING_URI, or in mlflow.db in the current folder."""

    def __init__(
        self, folder: Path, *, mark: str, options: Mapping[str, object], files: Sequence[str], continues: bool = False
    ) -> None:
        """`mark`: identifies a run and its continuations; `files`: artifacts, if they exist at the end."""
        for name, value in QUIETLY.items():
            os.environ.setdefault(name, value)
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError("needs the package mlflow: pip install 'falconet[mlflow]'") from error
        if not os.environ.get("MLFLOW_LOGGING_LEVEL"):
            logging.getLogger("mlflow").setLevel(logging.WARNING)  # otherwise it logs every table of its database
        self._mlflow: Any = mlflow
        self._folder, self._files = folder, files
        if not os.environ.get("MLFLOW_EXPERIMENT_NAME") and not os.environ.get("MLFLOW_EXPERIMENT_ID"):
            mlflow.set_experiment(EXPERIMENT)
        tags = {FOLDER: str(folder.absolute()), MARK: mark}
        earlier = self._earlier(tags) if continues else None
        mlflow.start_run(run_id=earlier, run_name=None if earlier else folder.name, tags=tags, log_system_metrics=False)
        if not earlier:  # parameters cannot be changed
            mlflow.log_params({name: str(value)[:LONGEST] for name, value in options.items()})

    def _earlier(self, tags: Mapping[str, str]) -> str | None:
        asked = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items() if "'" not in value)
        found = self._mlflow.search_runs(filter_string=asked, max_results=1, output_format="list")
        return found[0].info.run_id if found else None

    def write(self, update: int, metrics: Metrics) -> None:
        self._mlflow.log_metrics(dict(metrics), step=update)

    def write_result(self, update: int, metrics: Metrics) -> None:
        self.write(update, metrics)

    def close(self) -> None:
        try:
            for name in self._files:
                if (self._folder / name).is_file():
                    self._mlflow.log_artifact(str(self._folder / name))
        finally:
            self._mlflow.end_run()
