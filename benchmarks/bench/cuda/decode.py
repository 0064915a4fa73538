"""sparse_attention on a CUDA device compared with FlashMLA and with the floor; errors come first.

Logits are flat and every entry is valid; `kinds.py` has other inputs. Calls rotate over more inputs
than the L2 cache can hold.
"""

from __future__ import annotations

import math

from bench.common.rows import Bench, make_table
from bench.common.timing import Table, describe_error
from bench.cuda.inputs import Requests, make_requests
from bench.cuda.sides import (
    OURS,
    PEER,
    Pair,
    Work,
    add_row,
    make_ours,
    make_peer,
    measure_sides,
    show_labels,
)
from bench.cuda.timing import l2_bytes

MAX_INPUT_SETS = 128
MIN_CALLS = 12  # calls per replay, to share the cost of its start; large batches need fewer
LARGE_BYTES = 1 << 30

# kv_format, K, head counts, (requests, tokens per request)
FULL_BATCHES = [(2**i, 1) for i in range(9)] + [(n, 2) for n in (1, 8, 32, 64, 128, 256)]
FULL_DECODES = [
    ("fp8_ds_mla", 2048, (16, 32, 64, 128), FULL_BATCHES),
    ("fp8_ds_mla", 16384, (64, 128), [(148, 2)]),
    ("bfloat16", 2048, (16, 64, 128), [(1, 1), (8, 1), (64, 1), (128, 1), (128, 2)]),
]
QUICK_DECODES = [
    ("fp8_ds_mla", 2048, (16, 64, 128), [(1, 1), (8, 1), (64, 1), (128, 2)]),
    ("bfloat16", 2048, (128,), [(64, 1)]),
]


def measure(bench: Bench) -> Table:
    title = "Decode, lengths around 32k, uniformly random slots"
    columns = [*OURS, *(PEER if bench.peer else ())]
    table = make_table(title, ["cache", "H", "requests", "K"], columns)
    for kv_format, topk, head_counts, batches in bench.choose(FULL_DECODES, QUICK_DECODES):
        try:
            requests = make_requests(max(num_reqs for num_reqs, _ in batches), kv_format, topk)
        except Exception as error:  # for example no memory; other formats may fit
            table.failures.append(f"{kv_format} K {topk}: {describe_error(error)}")
            continue
        num_keys = int(requests.lengths.sum())
        for num_heads in head_counts:
            for num_reqs, query_len in batches:
                labels = {"kv_format": kv_format, "H": num_heads}
                labels |= {"requests": f"{num_reqs} × {query_len}", "K": topk}
                work = Work(num_reqs * query_len, num_heads, topk, num_keys, kv_format)
                try:
                    pair = measure_pair(bench, work, num_reqs, requests)
                    add_row(table, labels, pair, more={"floor_us": 1e6 * work.floor})
                except Exception as error:  # no memory, or a device that an earlier row has lost
                    table.failures.append(f"{show_labels(labels)}: {describe_error(error)}")
        del requests  # frees its memory before the next one is made
    return table


def measure_pair(bench: Bench, work: Work, num_reqs: int, requests: Requests) -> Pair:
    num_sets = max(2, min(MAX_INPUT_SETS, math.ceil(2 * l2_bytes() / work.num_bytes)))
    shape = (num_reqs, work.num_tokens // num_reqs, work.num_heads, work.topk)
    inputs = [requests.draw(*shape, first=index * num_reqs) for index in range(num_sets)]
    sides = {"ours": make_ours(inputs)}
    if bench.peer is not None:
        sides["peer"] = make_peer(bench.peer, inputs)
    repeats = 1 if work.num_bytes > LARGE_BYTES else math.ceil(MIN_CALLS / num_sets)
    for side in sides.values():
        side.calls = list(side.calls) * repeats
    measure_sides(sides, bench.effort)
    return Pair(sides["ours"], sides.get("peer"), work)
