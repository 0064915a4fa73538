"""Time against floor, a mark per row, as a small SVG: of this run, or of an earlier run's JSON."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

SIZE_INCHES = (7.2, 5.2)


def check(path: str) -> None:
    """Before anything is measured."""
    if not path.endswith(".svg"):
        raise SystemExit(f"bench: --plot writes SVG: name a file that ends with .svg, not {path}")
    if find_spec("matplotlib") is None:
        raise SystemExit("bench: --plot needs matplotlib: pip install matplotlib")


def write(path: str, results: dict[str, Any]) -> None:
    """Results as --json writes them: the tables whose records have `us` and `floor_us`."""
    tables = {title: list(points(rows)) for title, rows in results.items()}
    tables = {title: rows for title, rows in tables.items() if rows}
    if not tables:
        raise SystemExit(
            "bench: these results have no floors to plot: they come from --device cuda"
        )
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "sparse_mla",  # the same results give the same file
            "font.size": 9,
        }
    )
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=SIZE_INCHES, layout="constrained")
    every = [value for rows in tables.values() for row in rows for value in (row[0], row[1])]
    ends = [min(every), max(every)]
    axes.plot(ends, ends, color="0.4", linewidth=1, label="floor")
    for index, (title, rows) in enumerate(tables.items()):
        color, name = f"C{index}", title.split(",")[0].split(" (")[0]
        floors, times, peer_times = zip(*rows, strict=True)
        axes.scatter(floors, times, s=14, color=color, label=f"{name}: sparse_mla")
        if any(peer_times):
            pairs = [pair for pair in zip(floors, peer_times, strict=True) if pair[1]]
            axes.scatter(
                *zip(*pairs, strict=True),
                s=22,
                facecolors="none",
                edgecolors=color,
                linewidths=0.8,
                label=f"{name}: FlashMLA",
            )
    axes.set(xscale="log", yscale="log", xlabel="floor, µs", ylabel="measured, µs")
    device = str(results.get("device", "")).split(",")[0]
    axes.set_title(f"{device}, {results.get('date', '')}", fontsize=9)
    axes.grid(True, which="major", color="0.9")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def points(rows: Any) -> Iterable[tuple[float, float, float | None]]:
    """(floor, ours, peer or None) in µs of a table's records; nothing of what is no table."""
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and "us" in row and "floor_us" in row:
            yield row["floor_us"], row["us"], row.get("peer_us")
