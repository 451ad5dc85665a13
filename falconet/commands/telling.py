"""How a run is told, as the options ask: ours, or the lines and files of one of the originals."""

from collections.abc import Callable
from pathlib import Path

from falconet.config import rules, schema
from falconet.config.load import Loaded
from falconet.report.originals import style_of
from falconet.report.styles import Facts, RunLog, Style
from falconet.train.plan import Plan


def open_style(
    loaded: Loaded[schema.TrainOptions],
    plan: Plan,
    *,
    parameters: int,
    image_size: int,
    folder: Path,
    say: Callable[[str], None] | None,
) -> Style:
    """The style of a run, which has said its first lines; without `say` it is mute and writes nothing."""
    options = loaded.options
    style = style_of(options.style.log_style, RunLog(say or (lambda _: None), folder if say else None))
    facts = Facts(
        options={name: entry["value"] for name, entry in loaded.table().items()},
        folder=folder,
        parameters=parameters,
        global_batch=plan.global_batch,
        replicas=plan.replicas,
        stages=rules.stages_of(options.parallel),
        image_size=image_size,
        schedule=options.learning_rate.lr_schedule,
    )
    style.begin(facts)
    return style
