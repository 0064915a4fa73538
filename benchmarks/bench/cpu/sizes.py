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
from bench.cpu.arguments import (
    SLOTS,
    Arrays,
    cache_of,
    codes,
    concat,
    cos_sin,
    drawn,
    format_of,
    full,
    gather,
    index_queries,
    insert,
    inverse,
    k_up,
    keep,
    kv_up,
    norm,
    normal,
    pages_of,
    queries,
    starts,
    table,
    turn,
    turn_and_write,
    v_up,
)
from bench.cpu.sweep import FEW, HEADS, MANY, PAGES, SPARSE, WIDTHS, Sweep, call_with, vary
from sparse_mla._judge import BF16

SHORT = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)  # columns of a row
VALUES = (60, 24, 16, 15, 10, 8, 6, 5, 4, 3, 2, 1)  # a group has: fewer make more scales
EVEN_VALUES = (1, 2, 4, 8, 16, 32, 120)
DIMS = (8, 16, 24, 32, 40, 64, 80, 128)  # values of a head
LIMIT = 1.3  # times the quickest call that comes later in a sweep

# --- caches --------------------------------------------------------------------------------------


def write_sweeps() -> Iterator[Sweep]:
    writers: dict[str, tuple[Callable[..., Arrays], tuple[str, ...]]] = {
        "concat_and_cache_mla": (concat, ("bfloat16", "fp8_ds_mla")),
        "quantize_and_insert_k_cache": (insert, ("fp8_v4", "fp8_e4m3", "fp8_v41", "fp8_nope")),
        "indexer_k_quant_and_cache": (insert, ("fp8_index", "mxfp4_index")),
    }
    for op, (make, formats) in writers.items():
        for fmt in formats:
            sizes = {"tokens": FEW, "page": PAGES, "slots": SPARSE}
            inputs = ("kv_c", "k_pe") if make is concat else ("k",)
            yield from vary(op, partial(make, fmt), f"{fmt}, ", **sizes, place=inputs)


def head_sweeps() -> Iterator[Sweep]:
    def heads(
        dtype: Any = np.uint8,
        tokens: int = 128,
        page: int = 64,
        slots: str = "all",
        heads: int = 8,
        dim: int = 64,
    ) -> Arrays:
        shape = (SLOTS // page, page, heads, dim)
        return {
            "k": normal(tokens, heads, dim),
            "v": normal(tokens, heads, dim),
            "k_cache": np.zeros(shape, dtype),
            "v_cache": np.zeros(shape, dtype),
            "slot_mapping": keep(np.arange(tokens), slots),
        }

    for name, dtype in (("bf16", BF16), ("e4m3", np.dtype(np.uint8))):
        sizes = {"tokens": FEW, "page": PAGES, "slots": SPARSE, "place": ("k", "v")}
        sizes |= {"heads": FEW, "dim": DIMS}
        yield from vary("reshape_and_cache", partial(heads, dtype), f"{name}, ", **sizes)


def copy_sweeps() -> Iterator[Sweep]:
    def copy(fmt: str, rows: int = 128, page: int = 64, slots: str = "all") -> Arrays:
        return {
            "src": pages_of(fmt, 64),
            "dst": pages_of(fmt, page),
            "src_slots": drawn(rows),
            "dst_slots": keep(np.arange(rows), slots),
        }

    sizes = {"rows": FEW, "page": PAGES, "slots": SPARSE}
    for fmt in ("bfloat16", "fp8_ds_mla", "fp8_v4"):
        yield from vary("transfer_kv_cache", partial(copy, fmt), f"{fmt}, ", **sizes)


def read_sweeps() -> Iterator[Sweep]:
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
        sizes = {"tokens": tokens, "requests": FEW}
        yield from vary("gather_kv_cache", partial(gather, fmt), f"{fmt}, ", **sizes)
        yield from vary("dequantize_kv_cache", partial(dequantize, fmt), f"{fmt}, ", pages=FEW)
    few = (1, 2, 4, 8, 16, 32, 64)
    for fmt in ("bfloat16", "fp8_ds_mla", "fp8_v4"):
        rows = partial(gather, fmt)
        of = f"{fmt}, tokens of a request"
        yield Sweep("gather_kv_cache", of, few, lambda n, f=rows: f(64 // n, n))
    op = "dequantize_and_gather_k_cache"
    yield Sweep(op, "tokens of a request", few, lambda n: gather_last(64 // n, n))
    yield from vary(op, gather_last, tokens=tokens, requests=FEW, page=PAGES)
    yield from vary("gather_kv_cache", partial(gather, "fp8_ds_mla"), page=PAGES)


# --- norms, RoPE and quantisers ------------------------------------------------------------------


def norm_sweeps() -> Iterator[Sweep]:
    inputs = ("q", "kv")
    yield from vary("fused_q_kv_rmsnorm", norm, width=WIDTHS, tokens=FEW, place=inputs)
    sizes: dict[str, Any] = {"heads": FEW, "tokens": FEW, "page": PAGES, "place": inputs}
    yield from vary("fused_qnorm_rope_kv_insert", queries, **sizes)


def rope_sweeps() -> Iterator[Sweep]:
    dims = tuple(2 * n for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64))
    for kind in (BF16, np.float32):
        for interleaved in (True, False):
            of = f"{np.dtype(kind).name} values{'' if interleaved else ' of halves'}"
            options = {"interleaved": interleaved}
            rows = partial(turn, kind=kind)
            yield Sweep("apply_rope", of, dims, lambda n, f=rows, o=options: f(dim=n) | o)
    yield from vary("apply_rope", turn, heads=HEADS, tokens=FEW, place=("q_pe", "k_pe"))
    sizes = {"heads": HEADS, "tokens": FEW, "page": PAGES, "slots": SPARSE}
    for fmt in ("bfloat16", "fp8_ds_mla"):
        yield from vary("rope_and_cache_mla", partial(turn_and_write, fmt), f"{fmt}, ", **sizes)
    sizes = {"heads": FEW, "tokens": FEW, "place": ("o",)}
    for quantizes, name in ((True, "e4m3"), (False, "bfloat16")):
        heads = partial(inverse, quantizes=quantizes)
        yield from vary("fused_inv_rope_fp8_quant", heads, f"{name}, ", **sizes)


def quant_sweeps() -> Iterator[Sweep]:
    def rows(columns: int, kind: Any = BF16) -> Arrays:
        return {"x": normal(128, columns, dtype=kind)}

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
        name, apart = np.dtype(kind).name, partial(rows_apart, kind=kind)
        yield from vary(op, partial(rows, kind=kind), f"{name} ", columns=WIDTHS)
        yield from vary(op, wide, f"{name}, ", place=("x",))
        yield Sweep(op, f"{name}, columns of rows apart", SHORT, apart)
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
    yield from vary("scaled_quantize", partial(groups, 512, (1, 128)), place=("x",))


# --- projections ---------------------------------------------------------------------------------


def projection_sweeps() -> Iterator[Sweep]:
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

    def split(heads: int = 2, dims: int = 128, value_dims: int = 128) -> Arrays:
        weight = normal(512, heads * (dims + value_dims))
        sizes = {"qk_nope_head_dim": dims, "v_head_dim": value_dims}
        return {"weight": weight, "num_heads": heads, **sizes}

    def absorb(heads: int = 2, dims: int = 128, width: int = 128) -> Arrays:
        return {
            "q_proj": normal(width, heads * (dims + 64)),
            "W_UK": normal(512, heads, dims),
            "W_UV": normal(512, heads, dims),
            "o_proj": normal(width, heads * dims),
        }

    for op, make, name in (("k_up_proj", k_up, "q_nope"), ("v_up_proj", v_up, "x")):
        yield from vary(op, make, tokens=MANY, heads=FEW, dims=WIDTHS, place=(name,))
    yield from vary("kv_up_proj", kv_up, tokens=MANY, columns=WIDTHS, place=("kv_c",))
    op, sizes = "grouped_output_projection", {"tokens": MANY, "groups": FEW}
    yield from vary(op, grouped, "bfloat16, ", **sizes, depth=WIDTHS, rank=WIDTHS)
    yield from vary(op, grouped_e4m3, "e4m3, ", tokens=MANY, rank=WIDTHS)
    for group in ((1, 128), (1, -1), (-1, -1)):
        for name, widths in {"tokens": MANY, "outputs": WIDTHS}.items():
            rows = partial(call_with, partial(linear, group=group), name)
            yield Sweep("fp8_linear", f"{name}, x in groups of {group}", widths, rows)
    yield from vary("absorb", absorb, heads=FEW[2:], width=WIDTHS, dims=WIDTHS)
    yield from vary("split_kv_b_proj", split, heads=FEW, dims=WIDTHS, value_dims=WIDTHS)


# --- the indexer and lists -----------------------------------------------------------------------


def indexer_sweeps() -> Iterator[Sweep]:
    def logits(
        tokens: int = 4,
        heads: int = 32,
        keys: int = 128,
        page: int = 64,
        *,
        fp4: bool,
        **options: Any,
    ) -> Arrays:
        scales = {"q_scale": np.full((tokens, heads, 4), 120, np.uint8)} if fp4 else {}
        return (
            scales
            | options
            | {
                "q": codes(tokens, heads, 64 if fp4 else 128),
                "weights": normal(tokens, heads, dtype=np.float32),
                "k_cache": cache_of("mxfp4_index" if fp4 else "fp8_index", page),
                "context_lens": full(tokens, keys),
                "block_table": table(tokens, keys, page),
                "req_id_per_token": np.arange(tokens, dtype=np.int32),
            }
        )

    for fp4 in (False, True):
        prefix, rows = "fp4, " if fp4 else "fp8, ", partial(index_queries, fp4=fp4)
        sizes = {"heads": HEADS, "tokens": FEW, "place": ("q",)}
        yield from vary("fused_indexer_q_rope_quant", rows, prefix, **sizes)
        sizes = {"keys": MANY, "heads": HEADS, "tokens": FEW, "page": (2, 64)}
        yield from vary("indexer_logits", partial(logits, fp4=fp4), prefix, **sizes)
        yield from vary("lightning_indexer", partial(logits, fp4=fp4, k=32), prefix, **sizes)


def list_sweeps() -> Iterator[Sweep]:
    def best(columns: int = 1024, k: int = 64, tokens: int = 8) -> Arrays:
        logits = normal(tokens, columns, dtype=np.float32)
        return {"logits": logits, "starts": full(tokens, 0), "ends": full(tokens, columns), "k": k}

    def convert(
        columns: int = 128, tokens: int = 64, page: int = 64, entries: str = "all", **options: Any
    ) -> Arrays:
        return options | {
            "topk_indices": keep(drawn(tokens, columns), entries),
            "req_id_per_token": full(tokens, 0),
            "block_table": table(1, SLOTS, page),
            "block_size": page,
        }

    def combine(topk: int = 64, window: int = 64, tokens_of_a_request: int = 64) -> Arrays:
        size = tokens_of_a_request
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

    def mixed(
        topk: int = 64, window: int = 64, tokens_of_a_request: int = 8, page: int = 64
    ) -> Arrays:
        size = tokens_of_a_request
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
    yield from vary("top_k_per_row", best, k=MANY, columns=WIDTHS, tokens=FEW)

    def merge(k: int = 64, lists: int = 4, tokens: int = 8, shares: str = "dealt") -> Arrays:
        """Positions dealt to the lists one by one, or in runs of a list."""
        every = np.arange(lists * 128, dtype=np.int32)
        dealt = every.reshape(lists, 128) if shares == "runs" else every.reshape(128, lists).T
        indices = np.ascontiguousarray(np.repeat(dealt[:, None], tokens, 1))
        return {"indices": indices, "values": normal(*indices.shape, dtype=np.float32), "k": k}

    def own(name: str, columns: int = 128, tokens: int = 64, interleave: int = 64) -> Arrays:
        return {name: drawn(tokens, columns), "cp": (0, 2, interleave)}

    def local(requests: int) -> Arrays:
        return {"seq_lens": full(requests, SLOTS), "cp": (0, 2, 64)}

    sizes: dict[str, Any] = {"k": MANY, "lists": FEW, "tokens": FEW, "shares": ("runs", "dealt")}
    yield from vary("top_k_merge", merge, **sizes)
    sizes = {"columns": WIDTHS, "tokens": FEW}
    odd = (1, 3, 7, 63, 65, 64)
    for op, name in {"cp_local_topk": "topk_indices", "cp_local_positions": "positions"}.items():
        yield from vary(op, partial(own, name), **sizes, interleave=odd)
    yield from vary("cp_local_lengths", local, requests=MANY)
    sizes |= {"page": odd, "entries": SPARSE}
    yield from vary("convert_req_index_to_global_index", convert, **sizes)
    rows = partial(convert, is_valid=None)
    yield from vary("compute_global_topk_indices_and_lens", rows, **sizes)
    sizes = {"topk": MANY, "window": MANY, "tokens_of_a_request": (1, 2, 4, 8)}
    yield from vary("combine_topk_swa_indices", combine, **sizes)
    yield from vary("build_mixed_sparse_indices", mixed, **sizes, page=PAGES)


def compressor_sweeps() -> Iterator[Sweep]:
    def save(tokens: int = 64, page: int = 64, slots: str = "all") -> Arrays:
        halves = {x: normal(tokens, 256, dtype=np.float32) for x in ("kv", "score")}
        return halves | {
            "ape": normal(4, 256, dtype=np.float32),
            "positions": np.arange(tokens),
            "state": np.zeros((SLOTS // page, page, 512), np.float32),
            "slot_mapping": keep(np.arange(tokens), slots),
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

    yield from vary("save_partial_states", save, tokens=FEW, page=PAGES, slots=SPARSE)
    op = "compress_norm_rope_store"
    yield from vary(op, compress, tokens=FEW)
    yield Sweep(op, "tokens, keys of an indexer", FEW, lambda n: compress(n, dim=128))
    yield from vary(op, compress, page=PAGES)


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
