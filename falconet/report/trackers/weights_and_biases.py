"""Weights & Biases: metrics, histograms, pictures and the confusion matrix."""

import http.client
import io
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from falconet import writing
from falconet.errors import ConfigError
from falconet.report.sinks import Metrics
from falconet.report.trackers import drawings
from falconet.report.trackers.histograms import Histogram
from falconet.report.trackers.tracker import Confusion, Picture, Tracker, in_words

# Together less than a run waits for a tracker: wandb's own limit is 90 s, after which nothing would be kept.
ANSWERING, STARTING = 4.0, 8.0  # seconds for the server's first answer, and for it to take a new run
UNCONNECTED = ("offline", "dryrun", "disabled")  # modes that need neither a key nor a connection
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
CHARTED = 100  # classes whose confusion matrix is a chart: its table has a row for each pair, at most 10,000


class WeightsAndBiases(Tracker):
    """A run on its server or, without a key or a connection, a folder that `wandb sync` uploads."""

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        config: Mapping[str, object],
        offline: Callable[[str], None] | None = None,
    ) -> None:
        """`offline`: called with the reason if it has to log offline; None: fail instead."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("needs the package wandb: pip install 'falconet[wandb]'") from error
        place = writing.subfolder(folder, "wandb")  # it writes there
        about: dict[str, Any] = {"project": project, "name": name, "dir": str(folder), "config": dict(config)}
        self._wandb: Any = wandb
        self._run: Any = None
        problem = _obstacle(wandb)
        if problem is None:
            try:
                self._run = wandb.init(**about, settings=wandb.Settings(init_timeout=STARTING))
            except wandb.Error as error:  # a key that is refused, or a server that does not take the run
                problem = in_words(error)
        if self._run is None:
            if offline is None:
                raise ConfigError(f"Weights & Biases: {problem}; WANDB_MODE=offline needs neither a key nor a network")
            offline(f"{problem}; logging offline to {place}, which `wandb sync` uploads")
            self._run = wandb.init(**about, mode="offline")

    def write(self, update: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=update)

    def write_weights(self, update: int, histograms: Mapping[str, Histogram]) -> None:
        drawn = {
            f"weights/{name}": self._wandb.Histogram(np_histogram=(list(found.counts), found.edges))
            for name, found in histograms.items()
        }
        self._run.log(drawn, step=update)

    # The following are written after the numbers of their update, perhaps after later ones. wandb accepts nothing
    # for a past step, so they are logged with the latest one.

    def write_pictures(self, update: int, name: str, pictures: Sequence[Picture]) -> None:  # noqa: ARG002
        images = [
            self._wandb.Image(Image.open(io.BytesIO(each.content)).convert("RGB"), caption=each.caption)
            for each in pictures
        ]
        self._run.log({f"pictures/{name}": images}, commit=False)

    def write_confusion(self, update: int, confusion: Confusion) -> None:  # noqa: ARG002
        if len(confusion.class_names) > CHARTED:
            drawn = self._wandb.Image(drawings.matrix(confusion))
        else:
            labels = [label for label, _, images in confusion.cells for _ in range(images)]
            predicted = [other for _, other, images in confusion.cells for _ in range(images)]
            drawn = self._wandb.plot.confusion_matrix(
                y_true=labels, preds=predicted, class_names=list(confusion.class_names)
            )
        self._run.log({"validation/confusion": drawn}, commit=False)

    def write_result(self, update: int, metrics: Metrics) -> None:  # noqa: ARG002
        self._run.summary.update(dict(metrics))

    def close(self) -> None:
        self._run.finish()


def _obstacle(wandb: Any) -> str | None:
    """The reason why the server cannot be used, found within seconds and without a prompt; None: it probably can."""
    settings = wandb.setup().settings
    if settings.mode in UNCONNECTED:
        return None
    stored = (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")  # which may have the key of another server: wandb tells
    has_key = settings.api_key or any(map(os.environ.get, KEYS))
    if not has_key and not any(path and Path(path).expanduser().is_file() for path in stored):
        return "no API key, which `wandb login` stores"
    why = _unanswered(settings.base_url)
    return f"no connection to {settings.base_url}: {why}" if why else None


def _unanswered(address: str) -> str | None:
    """The reason why a server does not answer; None: it answers, even if with an error. Uses proxies as wandb does."""
    try:
        asked = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(asked, timeout=ANSWERING):
            return None
    except urllib.error.HTTPError:
        return None
    except urllib.error.URLError as error:
        reason = error.reason
        if isinstance(reason, ssl.SSLError):  # wandb may trust other certificates
            return None
        return in_words(reason) if isinstance(reason, OSError) else str(reason)
    except TimeoutError:
        return f"no answer within {ANSWERING:g} s"
    except (ConnectionError, ValueError, http.client.HTTPException):  # not as expected: wandb tells
        return None
