"""Draws a small SVG of this run, or of an earlier run's JSON. For a GPU: time against floor with a
mark per row, and what each kind of input costs. For a CPU: rates, beside the other side's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from bench.common.summary import inputs_of

WIDTH_INCHES, PANEL_INCHES = 7.2, 5.2
RateRow = tuple[str, str, float, float | None]  # table, row, our rate, the other one's
FORMATS = {"fp8_ds_mla": "FP8 rows", "bfloat16": "bf16 rows"}


def check(path: str) -> None:
    """Checks the option --plot before anything is measured."""
    if not path.endswith(".svg"):
        raise SystemExit(f"bench: --plot writes SVG: name a file that ends with .svg, not {path}")
    if find_spec("matplotlib") is None:
        raise SystemExit("bench: --plot needs matplotlib: pip install matplotlib")


def write(path: str, results: dict[str, Any]) -> None:
    """Draws results in the form that --json writes: the tables whose records have `us` and
    `floor_us`, and the tables of inputs; without these, the tables whose records have rates."""
    tables = {title: list(points(rows)) for title, rows in results.items()}
    tables = {title: rows for title, rows in tables.items() if rows}
    kinds = worst_by_kind(results)
    panels: list[Callable[[Any], None]] = []
    if tables:
        panels.append(partial(draw_floors, tables=tables))
    if kinds:
        panels.append(partial(draw_kinds, kinds=kinds))
    if not panels:
        panels = [
            partial(draw_rates, unit=unit, peer=peer, rows=rows)
            for unit, peer, rows in rates(results)
        ]
    if not panels:
        raise SystemExit("bench: these results have neither floors nor rates to plot")
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
            draw_peer(axes, pairs, color, f"{name}: FlashMLA")
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
            draw_peer(axes, pairs, color, f"{label}: FlashMLA")
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set(yscale="log", ylabel="worst time ÷ our flat time of the shape")


def draw_rates(axes: Any, unit: str, peer: str, rows: list[RateRow]) -> None:
    """Draws a column per row: our rate and, as a hollow mark, the other one's."""
    for index, title in enumerate(dict.fromkeys(title for title, _, _, _ in rows)):
        color, name = f"C{index}", title.split(",")[0].split(" (")[0]
        places = [place for place, row in enumerate(rows) if row[0] == title]
        ours = [rows[place][2] for place in places]
        axes.scatter(places, ours, s=14, color=color, label=f"{name}: sparse_mla")
        pairs = [(place, rate) for place in places if (rate := rows[place][3]) is not None]
        if pairs:
            draw_peer(axes, pairs, color, f"{name}: {peer}")
    axes.set_xticks(range(len(rows)), [row[1] for row in rows], rotation=90, fontsize=6)
    axes.set(yscale="log", ylabel=unit)


def draw_peer(axes: Any, pairs: Sequence[tuple[float, float]], color: str, label: str) -> None:
    x, y = zip(*pairs, strict=True)
    hollow = {"facecolors": "none", "edgecolors": color, "linewidths": 0.8}
    axes.scatter(x, y, s=22, label=label, **hollow)


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


def rates(results: dict[str, Any]) -> list[tuple[str, str, list[RateRow]]]:
    """Unit, the other side's name, and the rows of all tables whose records have such rates."""
    flops: list[RateRow] = []
    moved: list[RateRow] = []
    for title, rows in results.items():
        for row in rows if isinstance(rows, list) else []:
            if not isinstance(row, dict):
                continue
            if "ours" in row:
                ours, other = row["ours"]["gflops"], row.get("torch", {}).get("gflops")
                flops.append((title, label_of(row), ours, other))
            elif "gflops" in row:
                flops.append((title, label_of(row), row["gflops"], row.get("torch_gflops")))
            elif "gb_s" in row:
                moved.append((title, row["operator"], row["gb_s"], row["copy_gb_s"]))
    panels = [("GFLOP/s", "PyTorch", flops), ("GB/s, read + written", "np.copyto", moved)]
    return [panel for panel in panels if panel[2]]


def label_of(row: dict[str, Any]) -> str:
    """The cells that name a row: text and whole numbers."""
    named = {key: value for key, value in row.items() if isinstance(value, str | int)}
    return " ".join(v if isinstance(v, str) else f"{k} {v}" for k, v in named.items())
