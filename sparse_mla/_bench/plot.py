"""Draws a small SVG of this run, or of an earlier run's JSON: time against floor with a mark per
row, and what each kind of input costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sparse_mla._bench.summary import inputs_of

WIDTH_INCHES, PANEL_INCHES = 7.2, 5.2
FORMATS = {"fp8_ds_mla": "FP8 rows", "bfloat16": "bf16 rows"}


def check(path: str) -> None:
    """Checks the option --plot before anything is measured."""
    if not path.endswith(".svg"):
        raise SystemExit(f"bench: --plot writes SVG: name a file that ends with .svg, not {path}")
    if find_spec("matplotlib") is None:
        raise SystemExit("bench: --plot needs matplotlib: pip install matplotlib")


def write(path: str, results: dict[str, Any]) -> None:
    """Draws results in the form that --json writes: the tables whose records have `us` and
    `floor_us`, and the tables of inputs."""
    tables = {title: list(points(rows)) for title, rows in results.items()}
    tables = {title: rows for title, rows in tables.items() if rows}
    kinds = worst_by_kind(results)
    panels: list[Callable[[Any], None]] = []
    if tables:
        panels.append(partial(draw_floors, tables=tables))
    if kinds:
        panels.append(partial(draw_kinds, kinds=kinds))
    if not panels:
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
    size = (WIDTH_INCHES, PANEL_INCHES * len(panels))
    figure, axes = pyplot.subplots(len(panels), figsize=size, layout="constrained", squeeze=False)
    for draw, panel in zip(panels, axes[:, 0], strict=True):
        draw(panel)
        panel.grid(True, which="major", color="0.9")
        panel.legend(frameon=False)
    device = str(results.get("device", "")).split(",")[0]
    axes[0, 0].set_title(f"{device}, {results.get('date', '')}", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw_floors(axes: Any, tables: dict[str, list[tuple[float, float, float | None]]]) -> None:
    every = [value for rows in tables.values() for row in rows for value in (row[0], row[1])]
    ends = [min(every), max(every)]
    axes.plot(ends, ends, color="0.4", linewidth=1, label="floor")
    for index, (title, rows) in enumerate(tables.items()):
        color, name = f"C{index}", title.split(",")[0].split(" (")[0]
        floors, times, _ = zip(*rows, strict=True)
        axes.scatter(floors, times, s=14, color=color, label=f"{name}: sparse_mla")
        pairs = [(floor, peer_time) for floor, _, peer_time in rows if peer_time]
        if pairs:
            draw_peer(axes, pairs, color, name)
    axes.set(xscale="log", yscale="log", xlabel="floor, µs", ylabel="measured, µs")


def draw_kinds(axes: Any, kinds: dict[str, dict[str, tuple[float, float | None]]]) -> None:
    """Draws for each kind of input the shape that costs most, as a multiple of our flat time."""
    names = list(dict.fromkeys(name for rows in kinds.values() for name in rows))
    axes.axhline(1, color="0.4", linewidth=1, label="flat")
    for index, (kv_format, rows) in enumerate(kinds.items()):
        color, label = f"C{index}", FORMATS.get(kv_format, kv_format)
        places = [names.index(name) + 0.2 * index for name in rows]
        times = [ours for ours, _ in rows.values()]
        axes.scatter(places, times, s=14, color=color, label=f"{label}: sparse_mla")
        peers = [peer for _, peer in rows.values()]
        pairs = [(place, time) for place, time in zip(places, peers, strict=True) if time]
        if pairs:
            draw_peer(axes, pairs, color, label)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set(yscale="log", ylabel="worst time ÷ our flat time of the shape")


def draw_peer(axes: Any, pairs: list[tuple[float, float]], color: str, label: str) -> None:
    x, y = zip(*pairs, strict=True)
    hollow = {"facecolors": "none", "edgecolors": color, "linewidths": 0.8}
    axes.scatter(x, y, s=22, label=f"{label}: FlashMLA", **hollow)


def worst_by_kind(
    results: dict[str, Any],
) -> dict[str, dict[str, tuple[float, float | None]]]:
    """kv_format -> kind -> (ours, FlashMLA's or None): the largest time of all shapes, divided by
    our flat time of the shape."""
    worst: dict[str, dict[str, tuple[float, float | None]]] = {}
    for row in inputs_of(results):
        if not row["flat_us"]:
            continue
        kinds = worst.setdefault(row["kv_format"], {})
        ours, peer = kinds.get(row["input"], (0.0, None))
        ours = max(ours, row["us"] / row["flat_us"])
        if row.get("peer_us"):
            peer = max(peer or 0.0, row["peer_us"] / row["flat_us"])
        kinds[row["input"]] = ours, peer
    return worst


def points(rows: Any) -> Iterable[tuple[float, float, float | None]]:
    """(floor, ours, peer or None) in µs of a table's records; nothing if `rows` is no table."""
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and "us" in row and "floor_us" in row:
            yield row["floor_us"], row["us"], row.get("peer_us")
