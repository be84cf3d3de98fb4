"""Bus bandwidth against size as a PNG: one panel per collective. Needs matplotlib, the extra ``plots``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = "--plot needs matplotlib: pip install 'meshcomm[plots]'"
COLUMNS = 4
COLOURS = {"meshcomm": "tab:blue", "torch": "tab:orange"}
LINES = ["-", "--", ":"]  # one kind per run


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def save(path: str, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw the runs as they go to --json."""
    if not available():
        raise ModuleNotFoundError(MISSING)
    # No pyplot: it would look for a window system.
    figure_module: Any = importlib.import_module("matplotlib.figure")
    names = list(dict.fromkeys(row["collective"] for run in runs for row in run["rows"]))
    columns = min(COLUMNS, len(names))
    height = -(-len(names) // columns)
    figure = figure_module.Figure(figsize=(3.6 * columns, 2.8 * height + 0.6), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False, sharex=True)
    lines: dict[str, Any] = {}
    for panel, name in zip(panels.flat, names, strict=False):
        lines |= draw(panel, name, runs)
    for panel in panels.flat[len(names) :]:
        panel.axis("off")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    figure.suptitle("Bus bandwidth, GB/s, against size, bytes")
    figure.savefig(path, dpi=120, format="png")


def draw(panel: Any, collective: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One collective's lines; each with its label."""
    lines: dict[str, Any] = {}
    for run, kind in zip(runs, LINES * len(runs), strict=False):
        rows = [row for row in run["rows"] if row["collective"] == collective]
        for who, colour in COLOURS.items():
            points = [(row["size"], row[who]["busbw_gb_s"]) for row in rows if row[who] is not None]
            if points:
                label = f"{who}, {run['backend']}, {run['ranks']} ranks"
                sizes, speeds = zip(*points, strict=True)
                (lines[label],) = panel.plot(sizes, speeds, kind, color=colour, marker=".")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(collective, fontsize="medium")
    panel.grid(visible=True, alpha=0.3)
    return lines
