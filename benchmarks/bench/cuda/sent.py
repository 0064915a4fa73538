"""The table of inputs as engines send them. Each kind of `kinds.py` is measured in turn with
the flat input of the same shape and with FlashMLA. The L2 cache is flushed before each replay."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from bench.common.peer import Peer
from bench.common.timing import Table
from bench.cuda.inputs import ROW_BYTES, Inputs, make_requests
from bench.cuda.kinds import KINDS, SPARE_SHARE, num_lists
from bench.cuda.sides import (
    Side,
    finite,
    make_ours,
    make_peer,
    measure_sides,
    show_labels,
    show_ratio,
    show_us,
    tell_failures,
)
from bench.cuda.timing import CudaEffort, describe_error

TOPK = 2048
MIN_SPARE = 4096  # slots, because the share of changed rows varies with few entries
COLUMNS = ["cache", "H", "requests", "input", "µs", "× flat", "error/bound"]
PEER_COLUMNS = ["FlashMLA µs", "÷ ours", "error/bound"]


@dataclass
class Rows:
    """The rows of the table: every kind of every shape."""

    kv_formats: tuple[str, ...] = ("fp8_ds_mla", "bfloat16")
    head_counts: tuple[int, ...] = (16, 64, 128)
    batches: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (64, 1), (128, 1), (128, 2), (1, 1024))
    kinds: tuple[str, ...] = tuple(KINDS)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Rows:
        """The rows that the command line asks for; SystemExit with the reason if it is wrong."""
        rows = cls(head_counts=(64,), batches=((8, 1), (128, 1))) if options.quick else cls()
        if options.cache:
            rows.kv_formats = tuple(pick("--cache", options.cache, ROW_BYTES))
        if options.kinds:
            rows.kinds = tuple(pick("--kinds", options.kinds, KINDS))
        if options.heads:
            rows.head_counts = tuple(read_heads(options.heads))
        if options.batches:
            rows.batches = tuple(read_batches(options.batches))
        return rows

    @property
    def max_tokens(self) -> int:
        return max(num_reqs * query_len for num_reqs, query_len in self.batches)


def pick(option: str, text: str, known: dict) -> Iterator[str]:
    for name in text.split(","):
        if name not in known:
            raise SystemExit(f"bench: {option} {name}: one of {', '.join(known)}")
        yield name


def read_heads(text: str) -> Iterator[int]:
    for number in text.split(","):
        if not number.isdecimal() or not 1 <= int(number) <= 128:
            raise SystemExit(f"bench: --heads {number}: numbers from 1 to 128, as 16,64")
        yield int(number)


def read_batches(text: str) -> Iterator[tuple[int, int]]:
    for batch in text.split(","):
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", batch)
        if found is None:
            raise SystemExit(f"bench: --batches {batch}: requests x tokens of each, as 8x1,128x2")
        yield int(found[1]), int(found[2])


def measure_inputs(effort: CudaEffort, peer: Peer | None, rows: Rows) -> Table:
    columns = COLUMNS + (PEER_COLUMNS if peer else [])
    table = Table(f"Inputs as engines send them, K = {TOPK}, L2 flushed", columns, [], [])
    num_reqs = max(count for count, _ in rows.batches)
    num_spare = max(MIN_SPARE, math.ceil(SPARE_SHARE * rows.max_tokens * TOPK))
    for kv_format in rows.kv_formats:
        try:
            requests = make_requests(num_reqs, kv_format, TOPK, num_spare)
        except Exception as error:  # for example no memory; the other formats may fit
            table.failures.append(f"{kv_format}: {describe_error(error)}")
            continue
        for num_heads in rows.head_counts:
            for batch in rows.batches:
                labels = {
                    "kv_format": kv_format,
                    "H": num_heads,
                    "requests": f"{batch[0]} × {batch[1]}",
                }
                try:
                    flat = requests.draw(*batch, num_heads, TOPK)
                    add_shape(table, labels, flat, rows.kinds, peer, effort)
                except Exception as error:  # no memory, or a device that an earlier row has lost
                    table.failures.append(f"{show_labels(labels)}: {describe_error(error)}")
        del requests  # frees its memory before the next one is made
    table.notes += [f"{name}: {KINDS[name].text}" for name in rows.kinds]
    return table


def add_shape(
    table: Table,
    labels: dict[str, object],
    flat: Inputs,
    kinds: tuple[str, ...],
    peer: Peer | None,
    effort: CudaEffort,
) -> None:
    for name in kinds:
        if KINDS[name].needs_lists and num_lists(flat) == 1:
            continue
        record = labels | {"input": name, "usual": KINDS[name].is_usual}
        try:
            sides = make_sides(flat, KINDS[name].make(flat), peer)
            measure_sides(sides, effort, rotating=False)
            add_row(table, record, sides)
        except Exception as error:  # no memory, or a device that an earlier row has lost
            shown = show_labels(labels | {"input": name})
            table.failures.append(f"{shown}: {describe_error(error)}")


def make_sides(flat: Inputs, inputs: Inputs, peer: Peer | None) -> dict[str, Side]:
    """The flat input is measured again with every kind, so that both times of a ratio have the same
    clocks."""
    sides = {"ours": make_ours([inputs]), "flat": make_ours([flat])}
    if peer is not None:
        sides["peer"] = make_peer(peer, [inputs])
    return sides


def add_row(table: Table, record: dict[str, object], sides: dict[str, Side]) -> None:
    ours, peer = sides["ours"], sides.get("peer")
    over_flat = ours.flushed_seconds / sides["flat"].flushed_seconds
    labels = {key: value for key, value in record.items() if key != "usual"}
    row = [
        *map(str, labels.values()),
        show_us(ours.flushed_seconds) or "FAIL",
        show_ratio(over_flat),
        f"{'FAIL ' if ours.failure else ''}{ours.error:.3g}",
    ]
    record |= {
        "us": finite(1e6 * ours.flushed_seconds),
        "flat_us": finite(1e6 * sides["flat"].flushed_seconds),
        "over_flat": finite(over_flat),
        "error_over_bound": finite(ours.error),
    }
    if peer is not None:
        row += peer_cells(ours, peer, record)
    tell_failures(table, labels, record, ours, peer)
    table.add(row, record)


def peer_cells(ours: Side, peer: Side, record: dict[str, object]) -> list[str]:
    if math.isnan(peer.flushed_seconds):
        record["peer_failure"] = peer.failure
        return ["failed", "", ""]
    ratio = peer.flushed_seconds / ours.flushed_seconds
    record |= {
        "peer_us": 1e6 * peer.flushed_seconds,
        "peer_over_ours": finite(ratio),
        "peer_error_over_bound": finite(peer.error),
    }
    return [show_us(peer.flushed_seconds), show_ratio(ratio), f"{peer.error:.3g}"]
