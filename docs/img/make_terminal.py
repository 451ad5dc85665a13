"""Draw train.svg and watch.svg: a real `falconet train` in a temporary folder, and a look at one, on a terminal."""

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from falconet.report import dashboard, terminal_plot
from falconet.report.dashboard import Place
from falconet.report.followed_runs import FollowedRun, what_is_there
from falconet.report.run_files import read_run

SHOWN = (1, 2, 3, 4, 5, 29, 30)  # epochs; the others are replaced by one line that says so
COLUMNS = 100
LOOKED_AT = 18  # epoch


def trained() -> list[str]:
    """The lines of the run, standard output alone, with the plot that a terminal shows before the summary."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "falconet", "train", "--run-dir", "runs/first"]
        done = subprocess.run(line, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        plot = terminal_plot.lines(read_run(Path(folder) / "runs/first"))
    lines = done.stdout.splitlines()
    end = next(place for place, text in enumerate(lines) if text.startswith("best accuracy")) - 1
    return [*lines[:end], *plot, *lines[end:]]


def watched() -> list[Text]:
    """What `falconet watch` shows of a run that is under way."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "falconet", "train", "--run-dir", "runs/first"]
        run = Path(folder) / "runs/first"
        with subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL) as training:
            followed: object = None
            while not (isinstance(followed, FollowedRun) and followed.look().moments[LOOKED_AT - 1 :]):
                time.sleep(0.1)
                followed = what_is_there(run) if (run / "metrics.jsonl").is_file() else None
            place = Place(width=COLUMNS, height=32)
            shown = dashboard.run_lines(followed.look(), place, where=Path("runs/first"))
            training.wait()
    return shown


def shortened(lines: list[str]) -> list[str]:
    """The same lines without the rows of epochs that are not in SHOWN."""
    kept: list[str] = []
    hidden: list[int] = []
    for line in lines:
        found = re.match(r" +(\d+)/\d+ ", line)
        if found and int(found[1]) not in SHOWN:
            hidden.append(int(found[1]))
            continue
        if hidden:
            kept.append(f"[ epochs {hidden[0]} to {hidden[-1]} not shown ]")
            hidden = []
        kept.append(line)
    return kept


def styled(line: str) -> Text:
    style = "bold" if line.startswith(("best accuracy", "  epoch")) else "dim" if line.startswith("[ ") else ""
    text = line.lstrip()
    # A segment of blanks is left out and the next one placed behind it; leading blanks, not every viewer keeps.
    return Text.assemble((" " * (len(line) - len(text)), "dim"), (text, style))


def draw(command: str, lines: list[Text], target: Path) -> None:
    """Write an SVG that fetches no fonts."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    for line in lines:
        console.print(line)
    svg = console.export_svg(title=" ".join(command.split()[:2]), theme=MONOKAI)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S).replace("Fira Code, monospace", "monospace")
    target.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    here = Path(__file__).parent
    draw("falconet train --run-dir runs/first", [styled(line) for line in shortened(trained())], here / "train.svg")
    draw("falconet watch runs/first", watched(), here / "watch.svg")
