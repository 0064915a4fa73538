"""sparse_attention of a prefill on a CUDA device: our ways beside FlashMLA's kernel on the bf16
workspace. Its users must gather that workspace first; no number here includes the gather. Numbers
of "wide" include the pass that widens FP8 rows. The queries alone are larger than the L2 cache."""

from __future__ import annotations

from dataclasses import replace

from bench.common.rows import Bench, make_table
from bench.common.timing import Table, describe_error
from bench.cuda.inputs import Inputs, draw_slots, make_cache, upconvert
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
from bench.cuda.timing import DEVICE, Array, torch
from sparse_mla._rows import KEY_DIM

TOKENS = 4096
TOPK = 2048
HEADS = (64, 128)
KEYS, QUICK_KEYS = (8192, 32768, 131072), (32768,)


def measure(bench: Bench) -> Table:
    columns = [*OURS, *(PEER if bench.peer else ())]
    title = f"Prefill, T = {TOKENS}, K = {TOPK}, with a sink"
    table = make_table(title, ["kv", "H", "keys"], columns)
    for num_keys in bench.choose(KEYS, QUICK_KEYS):
        cache = make_cache(num_keys, "fp8_ds_mla")
        workspace = upconvert(cache)
        for num_heads in HEADS:
            try:
                add_rows(bench, table, num_heads, cache, workspace)
            except Exception as error:  # no memory, or a device that an earlier row has lost
                labels = {"H": num_heads, "keys": num_keys}
                table.failures.append(f"{show_labels(labels)}: {describe_error(error)}")
    return table


def add_rows(bench: Bench, table: Table, num_heads: int, cache: Array, workspace: Array) -> None:
    num_keys = len(workspace)
    q = torch.randn(TOKENS, num_heads, KEY_DIM, device=DEVICE).bfloat16()
    starts = torch.zeros(TOKENS, dtype=torch.long, device=DEVICE)
    indices = draw_slots(starts, starts + num_keys, TOPK)
    direct = Inputs(q, cache, indices, sink=torch.randn(num_heads, device=DEVICE))
    gathered = replace(direct, kv=workspace)
    sides = {
        "bfloat16": make_ours([gathered]),
        "fp8_ds_mla": make_ours([direct]),
        "fp8_ds_mla, wide": make_ours([direct], num_keys),
    }
    ours = [*sides]
    if bench.peer is not None:
        sides["peer"] = make_peer(bench.peer, [gathered])
    measure_sides(sides, bench.effort)
    for name in ours:
        work = Work(TOKENS, num_heads, TOPK, num_keys, name.split(",")[0])
        labels = {"kv_format": name, "H": num_heads, "keys": num_keys}
        pair = Pair(sides[name], sides.get("peer"), work)
        add_row(table, labels, pair, more={"floor_us": 1e6 * work.floor})
