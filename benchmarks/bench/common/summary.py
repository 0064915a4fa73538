"""Sums up the inputs' table in one line per shape: the flat input beside the slowest usual one.

The lines are made from the table's records, of this run or of an earlier run's JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.common.timing import Table

COLUMNS = ["cache", "H", "requests", "flat µs", "slowest µs", "× flat", "which"]
PEER_COLUMNS = ["FlashMLA ÷ ours: flat", "slowest", "least", "which"]
SHAPE = ("kv_format", "H", "requests")
Record = dict[str, Any]


def summarise(results: dict[str, Any]) -> Table | None:
    """The summary of results in the form that --json writes; None if they have no flat input."""
    shapes: dict[tuple, list[Record]] = {}
    for record in inputs_of(results):
        shapes.setdefault(tuple(record[key] for key in SHAPE), []).append(record)
    has_peer = any("peer_over_ours" in row for rows in shapes.values() for row in rows)
    table = Table("Flat and slowest input", COLUMNS + (PEER_COLUMNS if has_peer else []), [], [])
    for rows in shapes.values():
        flat = next((row for row in rows if row["input"] == "flat"), None)
        if flat is not None:
            cells, record = summarise_shape(flat, rows)
            table.rows.append(cells if has_peer else cells[: len(COLUMNS)])
            table.records.append(record)
    return table if table.rows else None


def inputs_of(results: dict[str, Any]) -> Iterable[Record]:
    """The records of measured inputs in all tables; rows that failed have no time."""
    for rows in results.values():
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and row.get("input") and row.get("us"):
                yield row


def summarise_shape(flat: Record, rows: list[Record]) -> tuple[list[str], Record]:
    usual = [row for row in rows if row["usual"] and row is not flat] or [flat]
    slowest = max(usual, key=lambda row: row["over_flat"] or 0)
    beside = [row for row in usual if row.get("peer_over_ours")]
    least: Record = min(beside, key=lambda row: row["peer_over_ours"], default={})
    record = {key: flat[key] for key in SHAPE} | {
        "flat": flat,
        "slowest": slowest,
        "least_ahead": least,
    }
    cells = [str(flat[key]) for key in SHAPE]
    cells += [f"{flat['us']:.1f}", f"{slowest['us']:.1f}", show(slowest["over_flat"])]
    cells += [slowest["input"], *(show(row.get("peer_over_ours")) for row in (flat, slowest))]
    return [*cells, show(least.get("peer_over_ours")), least.get("input", "")], record


def show(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"
