"""What subnormal numbers cost on the CPU: every operator on ordinary inputs, and beside them on
inputs that are subnormal, or whose products are. Processors take up to 150 cycles for each.

Figures are ratios of process CPU time in one thread, for each instruction set of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import sparse_mla
from bench.common.rows import Bench
from bench.common.timing import Table, find_isas, on_isa
from bench.cpu import arguments
from bench.cpu.arguments import SLOTS, Arrays, codes, cos_sin, normal
from sparse_mla._judge import BF16
from sparse_mla._rows import FP8_ROW_BYTES, KEY_DIM, V4_DATA_BYTES, V4_ROW_BYTES
from sparse_mla._types import KvFormat

Edit = Callable[[Arrays], None]
LIMIT = 1.3  # times the flat time
TOKENS = 64
FLT_MIN = np.float32(2.0**-126)


@dataclass
class Case:
    """An operator, its ordinary arguments, and edits that make subnormal inputs of them."""

    op: str
    make: Callable[[], Arrays]
    kinds: dict[str, Edit]
    label: str = ""

    @property
    def title(self) -> str:
        return f"{self.op}, {self.label}" if self.label else self.op

    def arguments(self, kind: str | None = None) -> Arrays:
        arrays = self.make()
        if kind is not None:
            self.kinds[kind](arrays)
        return arrays

    def call(self, arrays: Arrays) -> Any:
        return getattr(sparse_mla, self.op)(**arrays)


# --- arrays --------------------------------------------------------------------------------------


def times(factor: float, *names: str) -> Edit:
    def edit(arrays: Arrays) -> None:
        for name in names:
            x = arrays[name]
            arrays[name] = (x.astype(np.float64) * factor).astype(x.dtype)

    return edit


def outliers(factor: float, *names: str) -> Edit:
    """All values times a factor, but one of each row."""

    def edit(arrays: Arrays) -> None:
        for name in names:
            x = arrays[name]
            kept = x[..., 3].copy()
            arrays[name] = (x.astype(np.float64) * factor).astype(x.dtype)
            arrays[name][..., 3] = kept

    return edit


def sizes(*names: str) -> dict[str, Edit]:
    """Values whose squares are subnormal, that are small, and that are subnormal themselves."""
    kinds = {f"{names[0]} {x:.0e}": times(x, *names) for x in (1e-20, 1e-36, 1e-38, 1e-40)}
    return kinds | {f"{names[0]} 1e-20, 1 outlier": outliers(1e-20, *names)}


# --- attention -----------------------------------------------------------------------------------


def write_rows(values: np.ndarray, fmt: str) -> np.ndarray:
    cache: np.ndarray
    slots = np.arange(len(values))
    if fmt == "fp8_ds_mla":
        cache = np.zeros((len(values) // 64, 64, FP8_ROW_BYTES), np.uint8)
        sparse_mla.concat_and_cache_mla(
            values[:, :512].copy(), values[:, 512:].copy(), cache, slots
        )
        return cache
    if fmt == "bfloat16":
        return values.reshape(-1, 64, KEY_DIM)
    cache = np.zeros((len(values) // 64, 64, V4_ROW_BYTES), np.uint8)
    sparse_mla.quantize_and_insert_k_cache(values[:, :512].copy(), cache, slots)
    return cache


def set_scales(scale: Any, arrays: Arrays) -> None:
    """Of fp8_ds_mla rows, which have scales between 512 codes and the RoPE values."""
    rows = arrays["kv_cache"].reshape(-1, FP8_ROW_BYTES)
    rows[:, 512 : 512 + 16].view(np.float32)[:] = scale


def attention(fmt: str, heads: int) -> Case:
    dim = 512 if fmt == "fp8_v4" else KEY_DIM
    rng = np.random.default_rng(1)
    indices = np.stack([rng.choice(SLOTS - 1, 512, False) + 1 for _ in range(4)]).astype(np.int32)
    indices[:, 0] = 0  # the first key may be heavy

    def make() -> Arrays:
        q = normal(4, heads, dim, std=0.1)
        q[..., 0] = 1
        keys = normal(SLOTS, KEY_DIM, std=0.1)
        keys[:, 0] = 0
        return {"q": q, "kv_cache": write_rows(keys, fmt), "indices": indices, "softmax_scale": 1.0}

    def with_keys(change: Callable[[np.ndarray], np.ndarray]) -> Edit:
        def edit(arrays: Arrays) -> None:
            keys = normal(SLOTS, KEY_DIM, std=0.1).astype(np.float32)
            keys[:, 0] = 0
            arrays["kv_cache"] = write_rows(change(keys).astype(BF16), fmt)

        return edit

    def heavier(gap: float, keys: np.ndarray) -> np.ndarray:
        keys[0] = 0
        keys[0, 0] = gap
        return keys

    def units(arrays: Arrays) -> None:
        """Logits of normal keys with softmax_scale 1: tens apart."""
        with_keys(lambda keys: keys * np.float32(10))(arrays)
        arrays["q"] = normal(4, heads, dim)

    def mixed(keys: np.ndarray) -> np.ndarray:
        keys[:, ::2] *= np.float32(1e-37)
        return keys

    gaps = (70, 80, 86, 90, 100)
    kinds: dict[str, Edit] = {f"a key {x} above": with_keys(partial(heavier, x)) for x in gaps}
    kinds["unit rows, scale 1"] = units
    for size in (1e-20, 1e-36, 1e-37, 1e-38, 1e-40):
        kinds[f"keys {size:.0e}"] = with_keys(partial(np.multiply, np.float32(size)))
    kinds["every second value 1e-37"] = with_keys(mixed)
    kinds |= {f"q {size:.0e}": times(size, "q") for size in (1e-36, 1e-38, 1e-40)}
    if fmt == "fp8_ds_mla":
        kinds["scales FLT_MIN"] = partial(set_scales, FLT_MIN)
    if fmt == "fp8_v4":

        def bytes_0(arrays: Arrays) -> None:
            pages = arrays["kv_cache"].reshape(len(arrays["kv_cache"]), -1)
            pages[:, 64 * V4_DATA_BYTES :].reshape(-1, 8)[:, :7] = 0

        kinds["scales 2^-127"] = bytes_0
    return Case("sparse_attention", make, kinds, f"{fmt}, {heads} heads")


def merge(dtype: Any) -> Case:
    def make() -> Arrays:
        outs = {f"out_{side}": normal(TOKENS, 16, 512, seed=ord(side)) for side in "ab"}
        states = {f"lse_{side}": normal(TOKENS, 16, dtype=np.float32) for side in "ab"}
        return {name: x.astype(dtype) for name, x in outs.items()} | states

    def pull_apart(gap: float, arrays: Arrays) -> None:
        arrays["lse_a"] += np.float32(gap)

    kinds = sizes("out_a", "out_b")
    kinds |= {f"{gap} apart": partial(pull_apart, gap) for gap in (80, 86, 88)}
    return Case("merge_attn_states", make, kinds, np.dtype(dtype).name)


# --- projections and logits ----------------------------------------------------------------------


def projection(op: str, given: Arrays, x: str, weight: str) -> Case:
    def make() -> Arrays:
        return {x: given[x].copy(), weight: normal(*given[weight].shape, std=0.05)}

    kinds = sizes(x) | {f"{weight} 1e-38": times(1e-38, weight)}
    return Case(op, make, kinds | {"both 1e-19": times(1e-19, x, weight)})


def grouped() -> Case:
    def make() -> Arrays:
        return {
            "o": codes(TOKENS, 2, 512),
            "o_scale": np.full((TOKENS, 2, 4), 0.01, np.float32),
            "weight": codes(2, 128, 512),
            "weight_scale": np.full((2, 1, 4), 0.01, np.float32),
        }

    kinds = {f"o_scale {x:.0e}": times(100 * x, "o_scale") for x in (1e-20, 1e-36, 1e-38)}
    return Case("grouped_output_projection", make, kinds, "e4m3")


def indexer(op: str, *, fp4: bool) -> Case:
    width = 64 if fp4 else 128

    def make() -> Arrays:
        scales: np.ndarray = np.full(2048, 0.01, np.float32)
        if fp4:
            scales = np.full((2048, 4), 120, np.uint8)
        arrays: Arrays = {
            "q": codes(8, 32, width),
            "k_cache": (codes(2048, width), scales),
            "weights": normal(8, 32, dtype=np.float32),
            "context_lens": np.full(8, 2048, np.int32),
        }
        if fp4:
            arrays["q_scale"] = np.full((8, 32, 4), 120, np.uint8)
        return arrays | ({"k": 256} if op == "lightning_indexer" else {})

    def set_key_scales(scale: Any, arrays: Arrays) -> None:
        arrays["k_cache"][1][:] = scale

    kinds = {f"weights {x:.0e}": times(x, "weights") for x in (1e-30, 1e-36, 1e-38, 1e-40)}
    for scale in (2, 0) if fp4 else (1e-36, 1e-38, 1e-40):
        kinds[f"scales {scale}"] = partial(set_key_scales, scale)
    return Case(op, make, kinds, "fp4" if fp4 else "fp8")


# --- cache rows ----------------------------------------------------------------------------------


def concat(dtype: Any, fmt: str) -> Case:
    make = partial(arguments.concat, fmt, SLOTS, dtype=dtype)
    label = f"{np.dtype(dtype).name} to {fmt}"
    return Case("concat_and_cache_mla", make, sizes("kv_c", "k_pe"), label)


def insert(fmt: KvFormat, dtype: Any = BF16) -> Case:
    def make() -> Arrays:
        arrays = arguments.insert(fmt, SLOTS, dtype=dtype)
        return arrays | ({} if fmt == "fp8_e4m3" else {"kv_format": fmt})

    def shrink(arrays: Arrays) -> None:
        times(1e-37, "k")(arrays)
        arrays["kv_scale"] = 1e-37

    kinds = sizes("k")
    if fmt == "fp8_e4m3":
        kinds["k 1e-37, kv_scale 1e-37"] = shrink
    return Case("quantize_and_insert_k_cache", make, kinds, f"{np.dtype(dtype).name} to {fmt}")


def insert_index(fmt: KvFormat) -> Case:
    make = partial(arguments.insert, fmt, SLOTS)
    return Case("indexer_k_quant_and_cache", make, sizes("k"), fmt)


def read(op: str, dtype: str = "bfloat16") -> Case:
    def make() -> Arrays:
        if op == "dequantize_kv_cache":
            return {"kv_cache": arguments.cache_of("fp8_ds_mla"), "dtype": dtype}
        return arguments.gather("fp8_ds_mla", 1, SLOTS)

    scales = (1e-30, 1e-36, 1.2e-38, 1e-40)
    kinds: dict[str, Edit] = {f"scales {x:.0e}": partial(set_scales, x) for x in scales}
    return Case(op, make, kinds, f"fp8_ds_mla to {dtype}")


def quantize(dtype: Any) -> Case:
    def make() -> Arrays:
        return {"x": normal(SLOTS, 512, dtype=dtype)}

    return Case("dynamic_per_tensor_quant", make, sizes("x"), np.dtype(dtype).name)


def split() -> Case:
    def make() -> Arrays:
        return {
            "weight": codes(512, 1024),
            "weight_scale_inv": np.full((4, 8), 0.01, np.float32),
            "num_heads": 4,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        }

    kinds = {f"scales {x:.0e}": times(100 * x, "weight_scale_inv") for x in (1e-36, 1e-38, 1e-40)}
    return Case("split_kv_b_proj", make, kinds, "e4m3")


# --- norms, RoPE, the compressor -----------------------------------------------------------------


def norm() -> Case:
    def make() -> Arrays:
        weights = {f"{name}_weight": normal(512, std=0.1, mean=1) for name in ("q", "kv")}
        return arguments.norm(tokens=SLOTS) | weights

    return Case("fused_q_kv_rmsnorm", make, sizes("q", "kv"))


def queries(dtype: Any) -> Case:
    def make() -> Arrays:
        arrays = arguments.queries(TOKENS, 8) | {"q_out": np.zeros((TOKENS, 8, 512), dtype)}
        return arrays | ({} if dtype == BF16 else {"q_scale_inv": np.ones(1, np.float32)})

    return Case("fused_qnorm_rope_kv_insert", make, sizes("q", "kv"), np.dtype(dtype).name)


def turn(dtype: Any) -> Case:
    def make() -> Arrays:
        return arguments.turn(TOKENS, 16, kind=dtype) | {"rope_table": cos_sin(TOKENS)}

    return Case("apply_rope", make, sizes("q_pe", "k_pe"), np.dtype(dtype).name)


def turn_and_write(dtype: Any, fmt: str) -> Case:
    def make() -> Arrays:
        written = arguments.turn_and_write(fmt, TOKENS)
        values = {"kv_c": normal(TOKENS, 512, dtype=dtype), "rope_table": cos_sin(TOKENS)}
        return written | arguments.turn(TOKENS, 16, kind=dtype) | values

    label = f"{np.dtype(dtype).name} to {fmt}"
    return Case("rope_and_cache_mla", make, sizes("q_pe", "k_pe", "kv_c"), label)


def inverse(*, quantizes: bool) -> Case:
    def make() -> Arrays:
        return arguments.inverse(TOKENS, 16, quantizes=quantizes) | {"groups": 2}

    label = "e4m3" if quantizes else "bfloat16"
    return Case("fused_inv_rope_fp8_quant", make, sizes("o"), label)


def index_query() -> Case:
    make = partial(arguments.index_queries, TOKENS, 32, fp4=False)
    return Case("fused_indexer_q_rope_quant", make, sizes("q"))


def states(rows: int, dim: int) -> Arrays:
    positions = np.arange(rows)
    return {
        "state": normal(rows // 64, 64, 2 * dim, dtype=np.float32),
        "slot_mapping": positions,
        "positions": positions,
    }


def save() -> Case:
    def make() -> Arrays:
        return states(SLOTS, 512) | {
            "kv": normal(SLOTS, 512, dtype=np.float32),
            "score": normal(SLOTS, 512, dtype=np.float32),
            "ape": normal(2, 512, dtype=np.float32),
        }

    return Case("save_partial_states", make, sizes("kv", "score", "ape"))


def compress(ratio: int) -> Case:
    dim = 512
    closes = ratio

    def make() -> Arrays:
        arrays = states(SLOTS, dim)
        closed = np.where((np.arange(SLOTS) + 1) % closes == 0, np.arange(SLOTS) // closes, -1)
        return arrays | {
            "block_table": np.arange(SLOTS // 64, dtype=np.int32)[None],
            "req_id_per_token": np.zeros(SLOTS, np.int32),
            "kv_cache": np.zeros((SLOTS // 64, 64, V4_ROW_BYTES), np.uint8),
            "kv_slot_mapping": closed,
            "norm_weight": normal(dim, std=0.1, mean=1, dtype=np.float32),
            "rope_table": cos_sin(SLOTS),
            "eps": 1e-6,
            "ratio": ratio,
        }

    def scale(columns: slice, factor: float, arrays: Arrays) -> None:
        arrays["state"][..., columns] *= np.float32(factor)

    values, scores = partial(scale, slice(dim)), partial(scale, slice(dim, None))
    small = (1e-20, 1e-36, 1e-38, 1e-40)
    kinds: dict[str, Edit] = {f"values {x:.0e}": partial(values, x) for x in small}
    kinds |= {f"scores tens apart (x {x})": partial(scores, x) for x in (30, 60)}
    return Case("compress_norm_rope_store", make, kinds, f"ratio {ratio}")


def make_cases() -> list[Case]:
    return [
        *(attention(fmt, 16) for fmt in ("fp8_ds_mla", "bfloat16", "fp8_v4")),
        attention("fp8_ds_mla", 64),
        *map(merge, (np.float32, BF16)),
        projection("k_up_proj", arguments.k_up(TOKENS, 4), "q_nope", "W_UK"),
        projection("v_up_proj", arguments.v_up(TOKENS, 4), "x", "W_UV"),
        projection("kv_up_proj", arguments.kv_up(TOKENS, 512), "kv_c", "kv_b_proj"),
        grouped(),
        *(indexer("indexer_logits", fp4=fp4) for fp4 in (False, True)),
        indexer("lightning_indexer", fp4=False),
        *(concat(dtype, "fp8_ds_mla") for dtype in (BF16, np.float32)),
        concat(np.float32, "bfloat16"),
        insert("fp8_v4"),
        insert("fp8_e4m3"),
        insert("fp4_v41"),
        insert("fp8_nope"),
        insert("fp8_v4", np.float32),
        insert_index("fp8_index"),
        insert_index("mxfp4_index"),
        read("gather_kv_cache"),
        *(read("dequantize_kv_cache", dtype) for dtype in ("bfloat16", "float32")),
        *map(quantize, (BF16, np.float32)),
        split(),
        norm(),
        *map(queries, (BF16, np.uint8)),
        *map(turn, (BF16, np.float32)),
        turn_and_write(BF16, "fp8_ds_mla"),
        turn_and_write(np.float32, "bfloat16"),
        *(inverse(quantizes=quantizes) for quantizes in (True, False)),
        index_query(),
        save(),
        *map(compress, (2, 128)),
    ]


# --- the table -----------------------------------------------------------------------------------


def cpu_seconds(call: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


def find_ratios(case: Case, repeats: int) -> dict[str, float]:
    """The CPU time of each kind over the flat one's: the best of several, measured in turn."""
    arguments = {kind: case.arguments(kind) for kind in (None, *case.kinds)}
    best = dict.fromkeys(arguments, np.inf)
    case.call(arguments[None])
    count = max(1, round(2e-3 / max(cpu_seconds(lambda: case.call(arguments[None]), 3), 1e-6)))
    for _ in range(repeats):
        for kind, arrays in arguments.items():
            best[kind] = min(best[kind], cpu_seconds(partial(case.call, arrays), count))
    return {kind: best[kind] / best[None] for kind in case.kinds}


def measure(bench: Bench) -> Table:
    # One thread, or the CPU time would be that of threads that wait, too
    isas = find_isas()
    title = "Subnormal numbers on the CPU: time over that of ordinary inputs, one thread"
    table = Table(title, ["operator", "inputs", *isas], [], [])
    for case in make_cases():
        ratios = {}
        for isa in isas:
            with on_isa(isa):
                ratios[isa] = find_ratios(case, 3 if bench.effort.quick else 9)
        for kind in case.kinds:
            row = {isa: ratios[isa][kind] for isa in isas}
            cells = [f"{row[isa]:.2f}{' !' if row[isa] > LIMIT else ''}" for isa in isas]
            table.add([case.title, kind, *cells], {"operator": case.title, "kind": kind, **row})
    table.notes.append(f"! is above {LIMIT}")
    return table
