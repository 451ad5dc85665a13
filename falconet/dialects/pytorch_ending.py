"""How a training of the PyTorch program ended: its checkpoints validated, or after the updates that were traced."""

from collections.abc import Iterable

from falconet.dialects.rows import becomes
from falconet.dialects.table import Effect, Old, Say, To
from falconet.dialects.values import Values

TRACED_UPDATES = 6  # three before, three under the profiler


def profile(old: Values) -> Iterable[Effect]:
    """Theirs ended after the first host call, which was traced."""
    if not old.flag("--profile"):
        return
    yield To("profile")
    if _ends_when_traced(old):
        yield To("updates", (str(TRACED_UPDATES),))
        yield Say(
            f"--profile: ends after {TRACED_UPDATES} updates, the last three of them traced; nothing is validated"
        )
    else:
        yield Say(
            "--profile: three updates are traced; the training goes on after them, because --half-res-training and"
            " --initial-loss-scaling need whole epochs"
        )


def validation_mode(old: Values) -> Iterable[Effect]:
    yield To("validation-mode", ("none" if _ends_when_traced(old) else old.text("--validation-mode"),))


def checkpoint_input(old: Values) -> Iterable[Effect]:
    """Where their validation after training looked for checkpoints; empty, their default, is the last weights."""
    folder = old.text("--checkpoint-input-path") if old.has("--checkpoint-input-path") else ""
    if not folder:
        return
    if _ends_when_traced(old):
        return  # before there is anything to measure, which is said
    validates, averages = old.text("--validation-mode") == "after", old.text("--weight-avg-strategy") != "none"
    if validates:
        yield To("validate-checkpoints", (folder,))
    own = old.has("--checkpoint-output-path") and old.text("--checkpoint-output-path") == folder
    if averages and not own:
        yield Say("--checkpoint-input-path: the run's own checkpoints are averaged; others by `falconet average`")
    elif not validates and not averages:
        yield Say("--checkpoint-input-path: has no effect without --validation-mode after or a --weight-avg-strategy")


def _ends_when_traced(old: Values) -> bool:
    scaled = old.has("--initial-loss-scaling") and not old.flag("--auto-loss-scaling")
    return old.flag("--profile") and not old.flag("--half-res-training") and not scaled


ENDING: tuple[Old, ...] = (
    becomes(
        "--profile",
        "flag",
        None,
        "profile updates validation-mode",
        profile,
        f"torch.profiler; training ends after {TRACED_UPDATES} updates, as it did after the first host call",
    ),
    becomes(
        "--checkpoint-input-path",
        "text",
        None,
        "validate-checkpoints",
        checkpoint_input,
        "with --validation-mode after, each checkpoint of this folder is measured at the end",
        aliases=("--checkpoint-input-dir",),
    ),
    becomes(
        "--validation-mode",
        "text",
        "after",
        "validation-mode",
        validation_mode,
        "the same; none with --profile",
        choices=("none", "during", "after"),
    ),
)
