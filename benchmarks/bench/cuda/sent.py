"""The table of inputs as engines send them. Each kind of `kinds.py` is measured in turn with
the flat input of the same shape and with FlashMLA. The L2 cache is flushed before each replay."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.common.rows import Bench, make_table
from bench.common.timing import Table, describe_error
from bench.cuda.inputs import ROW_BYTES, Inputs, make_requests
from bench.cuda.kinds import KINDS, SPARE_SHARE, num_lists
from bench.cuda.sides import (
    OUR_ERROR,
    PEER_ERROR,
    Pair,
    add_row,
    finite,
    make_ours,
    make_peer,
    measure_sides,
    ratio,
    show_labels,
    spent,
)

TOPK = 2048
MIN_SPARE = 4096  # slots, because the share of changed rows varies with few entries
COLUMNS = (
    spent("µs", "us", lambda x: x.ours.flushed_seconds),
    ratio("× flat", "over_flat", lambda x: x.ours.flushed_seconds / x.beside.flushed_seconds),
    OUR_ERROR,
)
PEER_COLUMNS = (
    spent("FlashMLA µs", "peer_us", lambda x: x.peer.flushed_seconds),
    ratio("÷ ours", "peer_over_ours", lambda x: x.peer.flushed_seconds / x.ours.flushed_seconds),
    PEER_ERROR,
)


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


def measure(bench: Bench) -> Table:
    rows: Rows = bench.rows
    columns = [*COLUMNS, *(PEER_COLUMNS if bench.peer else ())]
    title = f"Inputs as engines send them, K = {TOPK}, L2 flushed"
    table = make_table(title, ["cache", "H", "requests", "input"], columns)
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
                labels = {"kv_format": kv_format, "H": num_heads}
                labels["requests"] = f"{batch[0]} × {batch[1]}"
                try:
                    flat = requests.draw(*batch, num_heads, TOPK)
                    add_shape(bench, table, labels, flat)
                except Exception as error:  # no memory, or a device that an earlier row has lost
                    table.failures.append(f"{show_labels(labels)}: {describe_error(error)}")
        del requests  # frees its memory before the next one is made
    table.notes += [f"{name}: {KINDS[name].text}" for name in rows.kinds]
    return table


def add_shape(bench: Bench, table: Table, shape: dict[str, Any], flat: Inputs) -> None:
    """The flat input is measured again with every kind, so that both times of a ratio have the same
    clocks."""
    for name in bench.rows.kinds:
        kind, labels = KINDS[name], shape | {"input": name}
        if kind.needs_lists and num_lists(flat) == 1:
            continue
        try:
            inputs = kind.make(flat)
            sides = {"ours": make_ours([inputs]), "flat": make_ours([flat])}
            if bench.peer is not None:
                sides["peer"] = make_peer(bench.peer, [inputs])
            measure_sides(sides, bench.effort, rotating=False)
            pair = Pair(sides["ours"], sides.get("peer"), sides["flat"])
            more = {"usual": kind.is_usual, "flat_us": finite(1e6 * pair.beside.flushed_seconds)}
            add_row(table, labels, pair, COLUMNS, PEER_COLUMNS, more)
        except Exception as error:  # no memory, or a device that an earlier row has lost
            table.failures.append(f"{show_labels(labels)}: {describe_error(error)}")
