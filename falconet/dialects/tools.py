"""The originals' benchmark runner, `python3 -m examples_utils benchmark`."""

from falconet.dialects.pytorch import OFFLINE
from falconet.dialects.rows import becomes, nothing, part_of, same
from falconet.dialects.table import Program, To

PROGRAMS = (
    Program(
        name="tool:examples_utils benchmark",
        options=(
            same("--spec", "text", count="some"),
            same("--benchmark", "text", count="some"),
            same("--allow-wandb", "flag"),
            nothing("--ignore-wandb", "flag", "always so unless --allow-wandb is given"),
            becomes(
                "--compile-only",
                "flag",
                None,
                "plan",
                lambda old: [To("plan")] if old.flag("--compile-only") else [],
                OFFLINE,
            ),
            same("--include-convergence", "flag"),
            becomes(
                "--ignore-errors",
                "flag",
                None,
                "stop-on-error",
                lambda old: [To("no-stop-on-error" if old.flag("--ignore-errors") else "stop-on-error")],
                "the first failure stops the rest unless given",
            ),
            same("--log-dir", "text", aliases=("--logdir",)),
            nothing("--logging", "text", "what fails is always said; --show-output prints everything"),
            same("--profile", "flag"),
            same("--timeout", "number"),
            same("--csv-metrics", "text", count="some"),
            same("--additional-metrics", "flag"),
            part_of("--help", "flag", None, "help", "prints the options and what each becomes", aliases=("-h",)),
        ),
        command="bench",
        about="runs benchmark specs",
    ),
)
