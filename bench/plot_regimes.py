"""Draw docs/img/regimes.png from docs/evidence/regimes.json, which holds the measurements; needs matplotlib."""

import json
from pathlib import Path

from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
COLOURS = {"32.32": "#222222", "16.32": "#1f77b4", "16.16": "#d62728", "bf16.bf16": "#2ca02c"}


def style(name: str) -> dict[str, str]:
    return {
        "color": COLOURS[name.split()[0]],
        "linestyle": "--" if "nearest" in name else "-",
        "label": name,
    }


def main() -> None:
    evidence = json.loads((ROOT / "docs/evidence/regimes.json").read_text())
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, runs in evidence["full"].items():
        finals = [run[-1][1] for run in runs]
        place = list(evidence["full"]).index(name)
        axes[0].plot([place] * len(finals), finals, "o", color=style(name)["color"])
        axes[0].plot(place, sum(finals) / len(finals), "_", color=style(name)["color"], markersize=22)
    axes[0].set_xticks(range(len(evidence["full"])), [name.replace(" ", "\n") for name in evidence["full"]], fontsize=8)
    axes[0].set(title="40 epochs, peak learning rate 0.4", ylabel="validation accuracy, %", ylim=(89, 91.5))
    for name, points in evidence["low"].items():
        axes[1].plot(*zip(*points, strict=True), **style(name))
    axes[1].set(title="10 epochs, peak learning rate 0.01", xlabel="epoch", ylabel="validation accuracy, %")
    axes[1].legend(fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(ROOT / "docs/img/regimes.png", dpi=110)


if __name__ == "__main__":
    main()
