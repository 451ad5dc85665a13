"""How a run is told, as the options ask: ours, or the lines and files of one of the originals."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from falconet.config import rules
from falconet.report.originals import style_of
from falconet.report.sinks import Sink
from falconet.report.styles import Facts, RunLog, Style

if TYPE_CHECKING:
    from falconet.wiring.running import Run


def open_style(run: "Run", folder: Path, *, sinks: Sequence[Sink]) -> Style:
    """The style of a run, which has said its first lines; in other processes than the first it is mute."""
    options, is_first = run.options, run.world.is_first
    say = run.screen.line if is_first else lambda _: None
    style = style_of(options.style.log_style, RunLog(say, folder if is_first else None, sinks=sinks))
    style.begin(
        Facts(
            options={name: entry["value"] for name, entry in run.loaded.table().items()},
            folder=folder,
            model=str(run.model),
            parameters=run.placement.parameters,
            global_batch=run.plan.global_batch,
            replicas=run.plan.replicas,
            stages=rules.stages_of(options.parallel),
            image_size=run.images.training.image_size,
            restored=run.restored.folder if run.restored else None,
        )
    )
    return style
