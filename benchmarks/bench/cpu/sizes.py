"""What small and odd sizes cost on the CPU: every operator with one, two, three ... of something,
beside calls with more of it. No call should take longer than one that has more to do.

Figures are ratios of a thread's CPU time, for each instruction set of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.common.rows import Bench
from bench.common.timing import Table, find_isas, on_isa
from bench.cpu import attention_sizes
from bench.cpu.subnormal import Arrays, codes, cos_sin, normal
from bench.cpu.sweep import (
    FEW,
    HEADS,
    MANY,
    PAGES,
    PLACES,
    SLOTS,
    SPARSE,
    WIDTHS,
    Sweep,
    cache_of,
    drawn,
    format_of,
    full,
    keep,
    pages_of,
    placed,
    starts,
    table,
)
from sparse_mla._judge import BF16
from sparse_mla._rows import KEY_DIM

SHORT = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)  # columns of a row
VALUES = (60, 24, 16, 15, 10, 8, 6, 5, 4, 3, 2, 1)  # a group has: fewer make more scales
EVEN_VALUES = (1, 2, 4, 8, 16, 32, 120)
DIMS = (8, 16, 24, 32, 40, 64, 80, 128)  # values of a head
LIMIT = 1.3  # times the quickest call that comes later in a sweep

# --- caches --------------------------------------------------------------------------------------


def slots(which: str, tokens: int) -> np.ndarray:
    return keep(np.arange(tokens), which)


def write_sweeps() -> Iterator[Sweep]:
    def concat(fmt: str, tokens: int = 128, page: int = 64, which: str = "all") -> Arrays:
        return {
            "kv_c": normal(tokens, 512),
            "k_pe": normal(tokens, 64),
            "kv_cache": pages_of(fmt, page),
            "slot_mapping": slots(which, tokens),
        }

    def insert(fmt: str, tokens: int = 128, page: int = 64, which: str = "all") -> Arrays:
        return {
            "k": normal(tokens, 128 if fmt.endswith("index") else 512),
            "k_cache": pages_of(fmt, page),
            "slot_mapping": slots(which, tokens),
            **format_of(fmt),
        }

    writers: dict[str, tuple[Callable[..., Arrays], tuple[str, ...]]] = {
        "concat_and_cache_mla": (concat, ("bfloat16", "fp8_ds_mla")),
        "quantize_and_insert_k_cache": (insert, ("fp8_v4", "fp8_e4m3", "fp8_v41", "fp8_nope")),
        "indexer_k_quant_and_cache": (insert, ("fp8_index", "mxfp4_index")),
    }
    for op, (make, formats) in writers.items():
        for fmt in formats:
            rows = partial(make, fmt)
            inputs = ("kv_c", "k_pe") if make is concat else ("k",)
            yield Sweep(op, f"{fmt}, tokens", FEW, rows)
            yield Sweep(op, f"{fmt}, page", PAGES, lambda n, f=rows: f(page=n))
            yield Sweep(op, f"{fmt}, slots", SPARSE, lambda which, f=rows: f(which=which))
            yield Sweep(op, f"{fmt}, place", PLACES, placed(rows, *inputs))


def head_sweeps() -> Iterator[Sweep]:
    def heads(
        dtype: Any = np.uint8,
        tokens: int = 128,
        page: int = 64,
        which: str = "all",
        heads: int = 8,
        dim: int = 64,
    ) -> Arrays:
        shape = (SLOTS // page, page, heads, dim)
        return {
            "k": normal(tokens, heads, dim),
            "v": normal(tokens, heads, dim),
            "k_cache": np.zeros(shape, dtype),
            "v_cache": np.zeros(shape, dtype),
            "slot_mapping": slots(which, tokens),
        }

    for name, dtype in (("bf16", BF16), ("e4m3", np.dtype(np.uint8))):
        rows = partial(heads, dtype)
        sweep = partial(Sweep, "reshape_and_cache")
        yield sweep(f"{name}, tokens", FEW, lambda n, f=rows: f(tokens=n))
        yield sweep(f"{name}, page", PAGES, lambda n, f=rows: f(page=n))
        yield sweep(f"{name}, slots", SPARSE, lambda which, f=rows: f(which=which))
        yield sweep(f"{name}, place", PLACES, placed(rows, "k", "v"))
        yield sweep(f"{name}, heads", FEW, lambda n, f=rows: f(heads=n))
        yield sweep(f"{name}, dim", DIMS, lambda n, f=rows: f(dim=n))


def copy_sweeps() -> Iterator[Sweep]:
    def rows(fmt: str, count: int = 128, page: int = 64, which: str = "all") -> Arrays:
        return {
            "src": pages_of(fmt, 64),
            "dst": pages_of(fmt, page),
            "src_slots": drawn(count),
            "dst_slots": slots(which, count),
        }

    for fmt in ("bfloat16", "fp8_ds_mla", "fp8_v4"):
        copy = partial(rows, fmt)
        yield Sweep("transfer_kv_cache", f"{fmt}, rows", FEW, copy)
        yield Sweep("transfer_kv_cache", f"{fmt}, page", PAGES, lambda n, f=copy: f(page=n))
        yield Sweep(
            "transfer_kv_cache", f"{fmt}, slots", SPARSE, lambda which, f=copy: f(which=which)
        )


def read_sweeps() -> Iterator[Sweep]:
    def gather(fmt: str, requests: int = 4, tokens: int = 64, page: int = 64) -> Arrays:
        dim = KEY_DIM if fmt in ("bfloat16", "fp8_ds_mla") else 512
        return {
            "kv_cache": cache_of(fmt, page),
            "block_table": table(requests, tokens, page),
            "seq_lens": full(requests, tokens),
            "workspace_starts": starts(requests * tokens, tokens)[:-1],
            "out": np.zeros((requests * tokens, dim), BF16),
            **format_of(fmt),
        }

    def gather_last(requests: int = 4, tokens: int = 64, page: int = 64) -> Arrays:
        return {
            "out": np.zeros((requests, tokens, 512), BF16),
            "k_cache": cache_of("fp8_v4", page),
            "seq_lens": full(requests, tokens),
            "gather_lens": full(requests, tokens),
            "block_table": table(requests, tokens, page),
            "block_size": page,
            "offset": 0,
        }

    def dequantize(fmt: str, pages: int = 8) -> Arrays:
        return {"kv_cache": cache_of(fmt)[:pages].copy(), "dtype": "bfloat16", **format_of(fmt)}

    tokens = (1, 2, 3, 7, 8, 15, 17, 31, 33, 63, 65)
    for fmt in ("bfloat16", "fp8_ds_mla", "fp8_v4", "fp8_e4m3", "fp8_v41", "fp8_nope"):
        rows = partial(gather, fmt)
        yield Sweep("gather_kv_cache", f"{fmt}, tokens", tokens, lambda n, f=rows: f(tokens=n))
        yield Sweep("gather_kv_cache", f"{fmt}, requests", FEW, rows)
        yield Sweep("dequantize_kv_cache", f"{fmt}, pages", FEW, partial(dequantize, fmt))
    few = (1, 2, 4, 8, 16, 32, 64)
    for fmt in ("bfloat16", "fp8_ds_mla", "fp8_v4"):
        rows = partial(gather, fmt)
        of = f"{fmt}, tokens of a request"
        yield Sweep("gather_kv_cache", of, few, lambda n, f=rows: f(64 // n, n))
    sweep = partial(Sweep, "dequantize_and_gather_k_cache")
    yield sweep("tokens of a request", few, lambda n: gather_last(64 // n, n))
    yield sweep("tokens", tokens, lambda n: gather_last(tokens=n))
    yield sweep("requests", FEW, gather_last)
    yield sweep("page", PAGES, lambda n: gather_last(page=n))
    yield Sweep("gather_kv_cache", "page", PAGES, lambda n: gather("fp8_ds_mla", page=n))


# --- norms, RoPE and quantisers ------------------------------------------------------------------


def norm_sweeps() -> Iterator[Sweep]:
    def norm(width: int = 512, tokens: int = 128) -> Arrays:
        rows = {"q": normal(tokens, width), "kv": normal(tokens, 512)}
        return rows | {"q_weight": normal(width), "kv_weight": normal(512), "eps": 1e-6}

    def queries(tokens: int = 32, heads: int = 4, page: int = 64) -> Arrays:
        return {
            "q": normal(tokens, heads, 512),
            "kv": normal(tokens, 512),
            "positions": np.arange(tokens),
            "rope_table": cos_sin(64),
            "kv_cache": pages_of("fp8_v4", page),
            "slot_mapping": np.arange(tokens),
            "eps": 1e-6,
        }

    yield Sweep("fused_q_kv_rmsnorm", "width", WIDTHS, norm)
    yield Sweep("fused_q_kv_rmsnorm", "tokens", FEW, lambda n: norm(tokens=n))
    yield Sweep("fused_q_kv_rmsnorm", "place", PLACES, placed(norm, "q", "kv"))
    sweep = partial(Sweep, "fused_qnorm_rope_kv_insert")
    yield sweep("heads", FEW, lambda n: queries(heads=n))
    yield sweep("tokens", FEW, queries)
    yield sweep("page", PAGES, lambda n: queries(page=n))
    yield sweep("place", PLACES, placed(queries, "q", "kv"))


def rope_sweeps() -> Iterator[Sweep]:
    def turn(tokens: int = 32, heads: int = 8, dim: int = 64, kind: Any = BF16) -> Arrays:
        return {
            "positions": np.arange(tokens),
            "q_pe": normal(tokens, heads, dim, dtype=kind),
            "k_pe": normal(tokens, dim, dtype=kind),
            "rope_table": normal(tokens, dim, dtype=np.float32),
        }

    def turn_and_write(
        fmt: str, tokens: int = 32, heads: int = 8, page: int = 64, which: str = "all"
    ) -> Arrays:
        written = {"kv_c": normal(tokens, 512), "kv_cache": pages_of(fmt, page)}
        return turn(tokens, heads) | written | {"slot_mapping": slots(which, tokens)}

    def inverse(tokens: int = 16, heads: int = 8, *, quantizes: bool) -> Arrays:
        return {
            "o": normal(tokens, heads, 512),
            "positions": np.arange(tokens),
            "rope_table": cos_sin(64),
            "groups": 1,
            "quantize": quantizes,
        }

    dims = tuple(2 * n for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64))
    for kind in (BF16, np.float32):
        for interleaved in (True, False):
            of = f"{np.dtype(kind).name} values{'' if interleaved else ' of halves'}"
            options = {"interleaved": interleaved}
            rows = partial(turn, kind=kind)
            yield Sweep("apply_rope", of, dims, lambda n, f=rows, o=options: f(dim=n) | o)
    yield Sweep("apply_rope", "heads", HEADS, lambda n: turn(heads=n))
    yield Sweep("apply_rope", "tokens", FEW, turn)
    yield Sweep("apply_rope", "place", PLACES, placed(turn, "q_pe", "k_pe"))
    for fmt in ("bfloat16", "fp8_ds_mla"):
        rows = partial(turn_and_write, fmt)
        sweep = partial(Sweep, "rope_and_cache_mla")
        yield sweep(f"{fmt}, heads", HEADS, lambda n, f=rows: f(heads=n))
        yield sweep(f"{fmt}, tokens", FEW, rows)
        yield sweep(f"{fmt}, page", PAGES, lambda n, f=rows: f(page=n))
        yield sweep(f"{fmt}, slots", SPARSE, lambda which, f=rows: f(which=which))
    for quantizes in (True, False):
        heads = partial(inverse, quantizes=quantizes)
        sweep = partial(Sweep, "fused_inv_rope_fp8_quant")
        name = "e4m3" if quantizes else "bfloat16"
        yield sweep(f"{name}, heads", FEW, lambda n, f=heads: f(heads=n))
        yield sweep(f"{name}, tokens", FEW, heads)
        yield sweep(f"{name}, place", PLACES, placed(heads, "o"))


def quant_sweeps() -> Iterator[Sweep]:
    def rows(width: int, kind: Any = BF16) -> Arrays:
        return {"x": normal(128, width, dtype=kind)}

    def groups(width: int, group: tuple[int, int], kind: Any = BF16) -> Arrays:
        return {"x": normal(120, width, dtype=kind), "group": group}

    def rows_apart(width: int, gap: int = 1, kind: Any = BF16) -> Arrays:
        """As many values in rows of any width."""
        rows = normal(6144 // width, width + gap, dtype=kind)
        return {"x": rows[:, :width]}

    def tall(rows: int) -> Arrays:
        return groups(1, (rows, 1))

    op = "dynamic_per_tensor_quant"
    for kind in (BF16, np.float16, np.float32):
        wide = partial(rows, 512, kind)
        yield Sweep(op, f"{np.dtype(kind).name} columns", WIDTHS, lambda n, k=kind: rows(n, k))
        yield Sweep(op, f"{np.dtype(kind).name}, place", PLACES, placed(wide, "x"))
        apart = partial(rows_apart, kind=kind)
        yield Sweep(op, f"{np.dtype(kind).name}, columns of rows apart", SHORT, apart)
    for group in ((1, 128), (120, 1), (2, 16)):
        sizes = [n * group[1] for n in FEW]
        make = partial(groups, group=group)
        yield Sweep("scaled_quantize", f"columns in groups of {group}", sizes, make)
    tiny = partial(groups, 480)
    for height in (1, 2):
        of = f"values in a row of a group of {height}"
        yield Sweep("scaled_quantize", of, VALUES, lambda n, m=height: tiny(group=(m, n)))
    yield Sweep("scaled_quantize", "values of a group", EVEN_VALUES, lambda n: tiny(group=(1, n)))
    yield Sweep("scaled_quantize", "tokens of a column's group", (1, 2, 8, 120), tall)
    for gap in (0, 1):
        of = f"columns of rows{' apart' if gap else ''}, in groups of 1"
        yield Sweep(
            "scaled_quantize", of, SHORT, lambda n, d=gap: rows_apart(n, d) | {"group": (1, 1)}
        )
    yield Sweep("scaled_quantize", "place", PLACES, placed(lambda: groups(512, (1, 128)), "x"))


# --- projections ---------------------------------------------------------------------------------


def projection_sweeps() -> Iterator[Sweep]:
    def k_up(tokens: int = 8, heads: int = 2, dim: int = 128) -> Arrays:
        return {"q_nope": normal(tokens, heads, dim), "W_UK": normal(512, heads, dim)}

    def v_up(tokens: int = 8, heads: int = 2, dim: int = 128) -> Arrays:
        return {"x": normal(tokens, heads, 512), "W_UV": normal(512, heads, dim)}

    def kv_up(tokens: int = 8, columns: int = 256) -> Arrays:
        return {"kv_c": normal(tokens, 512), "kv_b_proj": normal(512, columns)}

    def grouped(tokens: int = 8, groups: int = 2, depth: int = 256, rank: int = 128) -> Arrays:
        o, weight = normal(tokens, groups, depth), normal(groups, rank, depth)
        return {"o": o, "o_scale": None, "weight": weight, "weight_scale": None}

    def grouped_e4m3(tokens: int = 8, groups: int = 2, rank: int = 128) -> Arrays:
        scales = np.ones((groups, -(-rank // 128), 2), np.float32)
        o, weight = codes(tokens, groups, 256), codes(groups, rank, 256)
        ones = np.ones((tokens, groups, 2), np.float32)
        return {"o": o, "o_scale": ones, "weight": weight, "weight_scale": scales}

    def linear(tokens: int = 8, outputs: int = 256, group: tuple[int, int] = (1, 128)) -> Arrays:
        blocks = (-(-outputs // 128), 4) if group == (1, 128) else (1,)
        descale = np.ones(blocks, np.float32)
        weight = codes(outputs, 512)
        x = normal(tokens, 512)
        return {"x": x, "weight": weight, "descale": descale, "input_group": group}

    def split(heads: int = 2, dims: tuple[int, int] = (128, 128)) -> Arrays:
        weight = normal(512, heads * sum(dims))
        sizes = {"qk_nope_head_dim": dims[0], "v_head_dim": dims[1]}
        return {"weight": weight, "num_heads": heads, **sizes}

    def absorb(heads: int = 2, dim: int = 128, width: int = 128) -> Arrays:
        return {
            "q_proj": normal(width, heads * (dim + 64)),
            "W_UK": normal(512, heads, dim),
            "W_UV": normal(512, heads, dim),
            "o_proj": normal(width, heads * dim),
        }

    for op, make in {"k_up_proj": k_up, "v_up_proj": v_up}.items():
        name = "q_nope" if op == "k_up_proj" else "x"
        yield Sweep(op, "tokens", MANY, make)
        yield Sweep(op, "heads", FEW, lambda n, f=make: f(heads=n))
        yield Sweep(op, "dims", WIDTHS, lambda n, f=make: f(dim=n))
        yield Sweep(op, "place", PLACES, placed(make, name))
    yield Sweep("kv_up_proj", "tokens", MANY, kv_up)
    yield Sweep("kv_up_proj", "columns", WIDTHS, lambda n: kv_up(columns=n))
    yield Sweep("kv_up_proj", "place", PLACES, placed(kv_up, "kv_c"))
    sweep = partial(Sweep, "grouped_output_projection")
    yield sweep("bfloat16, tokens", MANY, grouped)
    yield sweep("bfloat16, groups", FEW, lambda n: grouped(groups=n))
    yield sweep("bfloat16, depth", WIDTHS, lambda n: grouped(depth=n))
    yield sweep("bfloat16, rank", WIDTHS, lambda n: grouped(rank=n))
    yield sweep("e4m3, tokens", MANY, grouped_e4m3)
    yield sweep("e4m3, rank", WIDTHS, lambda n: grouped_e4m3(rank=n))
    for group in ((1, 128), (1, -1), (-1, -1)):
        rows = partial(linear, group=group)
        yield Sweep("fp8_linear", f"tokens, x in groups of {group}", MANY, rows)
        yield Sweep(
            "fp8_linear",
            f"outputs, x in groups of {group}",
            WIDTHS,
            lambda n, f=rows: f(outputs=n),
        )
    yield Sweep("absorb", "heads", FEW[2:], absorb)
    yield Sweep("absorb", "width", WIDTHS, lambda n: absorb(width=n))
    yield Sweep("absorb", "dims", WIDTHS, lambda n: absorb(dim=n))
    yield Sweep("split_kv_b_proj", "heads", FEW, split)
    yield Sweep("split_kv_b_proj", "dims", WIDTHS, lambda n: split(dims=(n, 128)))
    yield Sweep("split_kv_b_proj", "value dims", WIDTHS, lambda n: split(dims=(128, n)))


# --- the indexer and lists -----------------------------------------------------------------------


def indexer_sweeps() -> Iterator[Sweep]:
    def queries(tokens: int = 32, heads: int = 8, *, fp4: bool) -> Arrays:
        return {
            "q": normal(tokens, heads, 128),
            "weights": normal(tokens, heads, dtype=np.float32),
            "positions": np.arange(tokens),
            "rope_table": cos_sin(64),
            "softmax_scale": 0.1,
            "head_scale": 0.5,
            "use_fp4": fp4,
        }

    def logits(
        tokens: int = 4, heads: int = 32, keys: int = 128, page: int = 64, *, fp4: bool
    ) -> Arrays:
        scales = {"q_scale": np.full((tokens, heads, 4), 120, np.uint8)} if fp4 else {}
        return scales | {
            "q": codes(tokens, heads, 64 if fp4 else 128),
            "weights": normal(tokens, heads, dtype=np.float32),
            "k_cache": cache_of("mxfp4_index" if fp4 else "fp8_index", page),
            "context_lens": full(tokens, keys),
            "block_table": table(tokens, keys, page),
            "req_id_per_token": np.arange(tokens, dtype=np.int32),
        }

    for fp4 in (False, True):
        name, rows = "fp4" if fp4 else "fp8", partial(queries, fp4=fp4)
        sweep = partial(Sweep, "fused_indexer_q_rope_quant")
        yield sweep(f"{name}, heads", HEADS, lambda n, f=rows: f(heads=n))
        yield sweep(f"{name}, tokens", FEW, rows)
        yield sweep(f"{name}, place", PLACES, placed(rows, "q"))
        scores = partial(logits, fp4=fp4)
        for op in ("indexer_logits", "lightning_indexer"):
            options = {"k": 32} if op == "lightning_indexer" else {}
            sweep = partial(Sweep, op)
            yield sweep(f"{name}, keys", MANY, lambda n, f=scores, o=options: f(keys=n) | o)
            yield sweep(f"{name}, heads", HEADS, lambda n, f=scores, o=options: f(heads=n) | o)
            yield sweep(f"{name}, tokens", FEW, lambda n, f=scores, o=options: f(n) | o)
            yield sweep(f"{name}, page", (2, 64), lambda n, f=scores, o=options: f(page=n) | o)


def list_sweeps() -> Iterator[Sweep]:
    def best(columns: int = 1024, k: int = 64, tokens: int = 8) -> Arrays:
        logits = normal(tokens, columns, dtype=np.float32)
        return {"logits": logits, "starts": full(tokens, 0), "ends": full(tokens, columns), "k": k}

    def convert(columns: int = 128, tokens: int = 64, page: int = 64, which: str = "all") -> Arrays:
        return {
            "topk_indices": keep(drawn(tokens, columns), which),
            "req_id_per_token": full(tokens, 0),
            "block_table": table(1, SLOTS, page),
            "block_size": page,
        }

    def combine(topk: int = 64, window: int = 64, size: int = 64) -> Arrays:
        requests = 64 // size
        return {
            "topk_indices": drawn(64, topk, below=250),
            "query_start_loc": starts(64, size),
            "seq_lens": full(requests, SLOTS),
            "gather_lens": full(requests, size + window),
            "window": window,
            "ratio": 4,
            "topk": topk,
            "M": 512,
            "N": 256,
            "align": 1,
        }

    def mixed(topk: int = 64, window: int = 64, size: int = 8, page: int = 64) -> Arrays:
        requests = 64 // size
        return {
            "decode_swa_indices": drawn(32, window),
            "decode_compressed_indices": drawn(32, topk, below=250),
            "decode_compressed_lens": full(32, topk),
            "prefill_topk_indices": drawn(32, topk, below=250),
            "query_start_loc": starts(64, size),
            "seq_lens": full(requests, SLOTS),
            "req_id_per_token": np.repeat(np.arange(requests, dtype=np.int32), size),
            "swa_block_table": table(requests, SLOTS, page),
            "swa_block_size": page,
            "compressed_block_table": table(requests, SLOTS // 4, 16),
            "compressed_block_size": 16,
            "window": window,
            "ratio": 4,
            "topk": topk,
        }

    def ties(which: str, columns: int, k: int) -> Arrays:
        arrays = best(columns, k, tokens=4)
        logits = arrays["logits"]
        if which != "distinct":
            logits[...] = np.where(logits > 0, 1, 1 if which == "equal" else 2)
        return arrays

    for columns, k in ((512, 64), (4096, 512), (32768, 2048)):
        tied = partial(ties, columns=columns, k=k)
        of = f"values of {columns} logits"
        yield Sweep("top_k_per_row", of, ("equal", "two", "distinct"), tied)
    yield Sweep("top_k_per_row", "k", MANY, lambda n: best(k=n))
    yield Sweep("top_k_per_row", "columns", WIDTHS, best)
    yield Sweep("top_k_per_row", "tokens", FEW, lambda n: best(tokens=n))

    def merge(k: int = 64, lists: int = 4, tokens: int = 8, which: str = "dealt") -> Arrays:
        """Positions dealt to the lists one by one, or in runs of a list."""
        every = np.arange(lists * 128, dtype=np.int32)
        shares = every.reshape(lists, 128) if which == "runs" else every.reshape(128, lists).T
        indices = np.ascontiguousarray(np.repeat(shares[:, None], tokens, 1))
        return {"indices": indices, "values": normal(*indices.shape, dtype=np.float32), "k": k}

    def own(columns: int = 128, tokens: int = 64, interleave: int = 64) -> Arrays:
        return {"topk_indices": drawn(tokens, columns), "cp": (0, 2, interleave)}

    yield Sweep("top_k_merge", "k", MANY, merge)
    yield Sweep("top_k_merge", "lists", FEW, lambda n: merge(lists=n))
    yield Sweep("top_k_merge", "tokens", FEW, lambda n: merge(tokens=n))
    yield Sweep("top_k_merge", "shares", ("runs", "dealt"), lambda which: merge(which=which))
    for op in ("cp_local_topk", "cp_local_positions"):
        name = "positions" if op == "cp_local_positions" else "topk_indices"

        def lists(n: dict[str, int], name: str = name) -> Arrays:
            arrays = own(**n)
            return {name: arrays.pop("topk_indices")} | arrays

        yield Sweep(op, "columns", WIDTHS, lambda n, f=lists: f({"columns": n}))
        yield Sweep(op, "tokens", FEW, lambda n, f=lists: f({"tokens": n}))
        yield Sweep(
            op, "interleave", (1, 3, 7, 63, 65, 64), lambda n, f=lists: f({"interleave": n})
        )
    yield Sweep(
        *("cp_local_lengths", "requests", MANY),
        lambda n: {"seq_lens": full(n, SLOTS), "cp": (0, 2, 64)},
    )
    converters: dict[str, Arrays] = {
        "convert_req_index_to_global_index": {},
        "compute_global_topk_indices_and_lens": {"is_valid": None},
    }
    for op, options in converters.items():
        sweep = partial(Sweep, op)
        yield sweep("columns", WIDTHS, lambda n, o=options: convert(n) | o)
        yield sweep("tokens", FEW, lambda n, o=options: convert(tokens=n) | o)
        yield sweep("page", (1, 3, 7, 63, 65, 64), lambda n, o=options: convert(page=n) | o)
        yield sweep("entries", SPARSE, lambda which, o=options: convert(which=which) | o)
    for op, make in {
        "combine_topk_swa_indices": combine,
        "build_mixed_sparse_indices": mixed,
    }.items():
        sweep = partial(Sweep, op)
        yield sweep("topk", MANY, lambda n, f=make: f(topk=n))
        yield sweep("window", MANY, lambda n, f=make: f(window=n))
        yield sweep("tokens of a request", (1, 2, 4, 8), lambda n, f=make: f(size=n))
    yield Sweep("build_mixed_sparse_indices", "page", PAGES, lambda n: mixed(page=n))


def compressor_sweeps() -> Iterator[Sweep]:
    def save(tokens: int = 64, page: int = 64, which: str = "all") -> Arrays:
        halves = {x: normal(tokens, 256, dtype=np.float32) for x in ("kv", "score")}
        return halves | {
            "ape": normal(4, 256, dtype=np.float32),
            "positions": np.arange(tokens),
            "state": np.zeros((SLOTS // page, page, 512), np.float32),
            "slot_mapping": slots(which, tokens),
        }

    def compress(tokens: int = 64, page: int = 64, dim: int = 512) -> Arrays:
        positions = np.arange(tokens)
        return {
            "state": normal(SLOTS // page, page, 4 * dim, dtype=np.float32),
            "block_table": table(1, SLOTS, page),
            "req_id_per_token": full(tokens, 0),
            "positions": positions,
            "slot_mapping": positions,
            "kv_cache": pages_of("fp8_v4" if dim == 512 else "fp8_index", 64),
            "kv_slot_mapping": np.where(positions % 4 == 3, positions // 4, -1),
            "norm_weight": normal(dim, dtype=np.float32),
            "rope_table": cos_sin(SLOTS),
            "eps": 1e-6,
            "ratio": 4,
        }

    sweep = partial(Sweep, "save_partial_states")
    yield sweep("tokens", FEW, save)
    yield sweep("page", PAGES, lambda n: save(page=n))
    yield sweep("slots", SPARSE, lambda which: save(which=which))
    sweep = partial(Sweep, "compress_norm_rope_store")
    yield sweep("tokens", FEW, compress)
    yield sweep("tokens, keys of an indexer", FEW, lambda n: compress(n, dim=128))
    yield sweep("page", PAGES, lambda n: compress(page=n))


def make_sweeps() -> list[Sweep]:
    families = [*attention_sizes.FAMILIES, write_sweeps, head_sweeps, copy_sweeps, read_sweeps]
    families += [norm_sweeps, rope_sweeps, quant_sweeps, projection_sweeps, indexer_sweeps]
    families += [list_sweeps, compressor_sweeps]
    return [sweep for family in families for sweep in family()]


# --- the table -----------------------------------------------------------------------------------


def measure(bench: Bench) -> Table:
    # One thread: its thread's own time is what a busy machine changes least
    isas = find_isas()
    title = (
        "Small and odd sizes on the CPU: the largest time over that of a larger call, one thread"
    )
    made = Table(title, ["operator", "sizes of", *isas], [], [])
    for sweep in make_sweeps():
        worst = {}
        for isa in isas:
            sweep.best.clear()
            with on_isa(isa):
                worst[isa] = sweep.measure_within(LIMIT, 3 if bench.effort.quick else 9, attempts=4)
        cells = [f"{x:.2f} at {n}{' !' if x > LIMIT else ''}" for x, n in worst.values()]
        ratios = {isa: x for isa, (x, _) in worst.items()}
        made.add([sweep.op, sweep.of, *cells], {"operator": sweep.op, "of": sweep.of, **ratios})
    made.notes.append(f"! is above {LIMIT}")
    return made
