"""The figures of a comparison as bars, one panel for each."""

from __future__ import annotations

from pathlib import Path

from report import FIGURES, Figures

#: Panels side by side.
COLUMNS = 3
#: How much longer than the shortest bar the longest may be.
SPREAD = 50
_COLORS = {True: "#2f6f9f", False: "#b8b8b8"}


def plot(figures: Figures, folder: Path) -> list[Path]:
    """Draw ``compare.png`` and ``compare.svg`` into a folder; returns their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "taskgate"  # the same figures make the same file
    from matplotlib import pyplot as plt

    shown = [name for name in FIGURES if any(values.get(name) is not None for values in figures.values())]
    rows = max(1, -(-len(shown) // COLUMNS))
    height = 0.6 + 0.3 * len(figures)
    picture, grid = plt.subplots(rows, COLUMNS, figsize=(4.5 * COLUMNS, height * rows), squeeze=False)
    panels = list(grid.flat)
    for panel, name in zip(panels, shown, strict=False):
        figure = FIGURES[name]
        brokers = [broker for broker, values in figures.items() if values.get(name) is not None]
        values = [figures[broker][name] or 0.0 for broker in brokers]
        colors = [_COLORS[broker.startswith("taskgate+")] for broker in brokers]
        bars = panel.barh(brokers, values, color=colors)
        panel.bar_label(bars, labels=[f"{value:,.{figure.digits}f}" for value in values], padding=2, fontsize=8)
        panel.set_title(f"{figure.title} ({'more' if figure.more else 'less'} is better)", fontsize=9)
        if min(values) > 0 and max(values) > SPREAD * min(values):
            panel.set_xscale("log")  # else the longest would be all that is seen
        panel.invert_yaxis()
        panel.margins(x=0.2)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    picture.tight_layout()
    paths = [folder / "compare.png", folder / "compare.svg"]
    picture.savefig(paths[0], dpi=150)
    picture.savefig(paths[1], metadata={"Date": None})
    plt.close(picture)
    return paths
