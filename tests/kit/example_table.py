"""A good call of each operator in each of its forms, and what a call with another array gives.

Tests of views, bounds and ownership replace one array at a time.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import example_attention as attend
import example_calls as of
import numpy as np
import pytest
from example import (
    BF16,
    E4M3,
    F16,
    F32,
    I32,
    I64,
    U8,
    Example,
    bytes_below,
    codes,
    one_scale,
    rows_of,
    scales,
    weight,
)
from example_step import step

TABLE: dict[str, Example] = {
    "write fp8": of.write(BF16, I64, rows_of("fp8", 3, 4)),
    "write bf16, flat": of.write(F32, I32, rows_of("bf16", 12)),
    "write fp8, head axis": of.write(F16, I64, rows_of("fp8", 3, 4, 1).view(np.int8)),
    "write fp8, pages of one token": of.write(F16, I32, rows_of("fp8", 12, 1)),
    "write e4m3": of.write_scaled(),
    "write heads, bf16": of.write_heads(BF16, BF16, I64),
    "write heads, e4m3": of.write_heads(F32, E4M3, I32),
    "write heads, bytes": of.write_heads(F16, U8, I64),
    "transfer fp8": of.transfer(rows_of("fp8", 3, 4), bytes_below(256, 4, 3, 656), I64, I32),
    "transfer fp8, flat": of.transfer(rows_of("fp8", 3, 4, 1), bytes_below(256, 12, 656), I32, I64),
    "transfer fp8_v4": of.transfer(
        bytes_below(120, 3, 4, 584), bytes_below(256, 3, 4, 584), I64, I64
    ),
    "gather fp8": of.gather(rows_of("fp8", 5, 4)),
    "gather bf16, head axis": of.gather(rows_of("bf16", 5, 4, 1)),
    "gather fp8, flat": of.gather(rows_of("fp8", 20)),
    "dequantize fp8": of.dequantize(rows_of("fp8", 3, 4).view(E4M3)),
    "dequantize fp8, one page": of.dequantize(rows_of("fp8", 1, 4)),
    "dequantize bf16, flat": of.dequantize(rows_of("bf16", 12), "bfloat16"),
    "dequantize, a scale": of.dequantize(bytes_below(120, 3, 4, 512), kv_scale=one_scale()),
    "dequantize fp8_v4": of.dequantize(bytes_below(120, 3, 4, 584)),
    "gather, a scale": of.gather_scaled(),
    "insert fp8_v4": of.insert(of.INSERT, weight(6, 512), bytes_below(256, 3, 4, 584)),
    "insert, a scale": of.insert(
        of.INSERT, weight(6, 512).astype(F16), bytes_below(256, 3, 4, 512), kv_scale=one_scale()
    ),
    "insert keys of the indexer": of.insert(
        of.INSERT_INDEX, weight(6, 128).astype(F32), bytes_below(256, 3, 600), **of.INDEXED
    ),
    "gather the last of fp8_v4": of.gather_last(bytes_below(120, 5, 4, 584)),
    "gather the last, a scale": of.gather_last(bytes_below(120, 5, 4, 512), kv_scale=one_scale()),
    "convert": of.convert(),
    "global top-k, uint8": of.global_topk("uint8"),
    "global top-k, bool": of.global_topk("bool"),
    "top-k, float32": of.top_k(F32),
    "top-k, bfloat16": of.top_k(BF16),
    "merge top-k, float32": of.top_k_merge(F32),
    "merge top-k, bfloat16": of.top_k_merge(BF16),
    "own positions, int64": of.own_positions(I64),
    "own positions, int32, one row": of.own_vector(I32),
    "own lists": of.own_lists(),
    "own lengths": of.own_lengths(),
    "combine": of.combine(),
    "mixed, positions": of.mixed(U8, local=True),
    "mixed, slots": of.mixed(U8, local=False),
    "attend fp8": attend.attention("fp8", "bf16"),
    "attend bf16, pair": attend.attention("bf16", "fp8", pair=True),
    "attend, +inf": attend.attention("bf16", "bf16", op="_attention_plus_inf"),
    "attend, +inf, scales": attend.scaled_attention("_attention_plus_inf"),
    "attend, one column": attend.attention("fp8", "bf16", columns=1),
    "attend, scales": attend.scaled_attention(),
    "DeepSeek V4": attend.dsv4(),
    "attend to pages": attend.pages(),
    "attend to slots": attend.slots(),
    "attend to pages, +inf": attend.pages("_mla_attention_plus_inf"),
    "attend to slots, +inf": attend.slots("_mla_attention_plus_inf"),
    "attend to rows": attend.ragged(),
    "attend to rows of e4m3": attend.ragged_codes(),
    "attend to pages of heads": attend.paged_heads(),
    "attend to slots of heads": attend.slots_of_heads(),
    "partials bf16": attend.partials(BF16),
    "partials fp32": attend.partials(F32),
    "merge bf16": attend.merge(BF16),
    "merge fp32": attend.merge(F32),
    "split bf16": of.split("split_kv_b_proj", weight(512, 320)),
    "split fp8": of.split("split_kv_b_proj", codes(512, 320), scales(4, 3)),
    "split fp8, transposed": of.split("_split_kv_b_proj", codes(320, 512), scales(3, 4)),
    "split any weight": of.split_any("float32"),
    "absorb in queries": of.absorb_part("_absorb_q_proj", "q_proj", "W_UK", codes(320, 7)),
    "absorb in outputs": of.absorb_part("_absorb_o_proj", "o_proj", "W_UV", codes(128, 7)),
    "k_up": of.k_up(),
    "v_up": of.v_up(),
    "kv_up": of.kv_up(),
    "grouped bf16": of.grouped(),
    "grouped e4m3": of.grouped(F32),
    "grouped e4m3, packed scales": of.grouped(I32),
    "quantize bf16": of.quantize(BF16, U8, 3, 5, 7),
    "quantize fp32": of.quantize(F32, E4M3, 6, 40),
    "quantize fp16, in pieces": of.quantize(F16, U8, 2, 4999),
    "quantize in groups": of.scaled(BF16, U8, (1, 128), 3, 256),
    "quantize columns": of.scaled(F32, E4M3, (-1, 1), 6, 70),
    "quantize tiles of fp16": of.scaled(F16, U8, (2, 35), 4, 70),
    "FP8 layer, blocks": of.linear((1, 128), 2, 2),
    "FP8 layer, channels": of.linear((1, -1), 140),
    "norm": of.norm(BF16, F32),
    "norm, other weights": of.norm(F32, BF16),
    "turn and write fp8": of.rope_and_cache(BF16, I64, rows_of("fp8", 3, 4)),
    "turn and write bf16, flat": of.rope_and_cache(F32, I32, rows_of("bf16", 12), False),
    "turn": of.apply_rope(I64, BF16, F32),
    "turn, halves of fp32": of.apply_rope(I32, F32, BF16, False),
    "turn back": of.inverse(I64, E4M3, F32),
    "turn back, packed scales": of.inverse(I32, U8, I32, "ue8m0x4"),
    "turn back, bf16": of.inverse(I64, BF16),
    "index query": of.index_query(I64, BF16, False),
    "index query, FP4": of.index_query(I32, F32, True),
    "logits of pages": of.logits(False, pages=True),
    "logits of flat keys": of.logits(False),
    "logits, FP4": of.logits(True, BF16),
    "lightning, pages": of.lightning(False, pages=True),
    "lightning, flat keys": of.lightning(False),
    "lightning, FP4": of.lightning(True, BF16),
    "insert queries": of.insert_queries(I64, bytes_below(256, 3, 4, 584), BF16),
    "insert queries in place": of.insert_queries(
        I32, bytes_below(256, 3, 4, 512), kv_scale=one_scale()
    ),
    "insert queries as codes": of.insert_queries(
        I64, bytes_below(256, 3, 4, 584), U8, q_scale_inv=one_scale()
    ),
    "save states": of.save_states(F32, I64),
    "save states, bf16": of.save_states(BF16, I32),
    "compress": of.compress(bytes_below(256, 3, 4, 512), kv_scale=one_scale()),
    "compress and save": of.compress(bytes_below(256, 3, 4, 584), saves=True),
    "step, separate": step("separate", True),
    "step, direct": step("direct", True),
    "step, bf16": step("bf16", False),
}
for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
    TABLE[f"split batch {kind}"] = of.split_batch(kind)
    TABLE[f"reorder {kind}"] = of.reorder(kind)
    TABLE[f"local attention {kind}"] = of.cut_local(kind)
    TABLE[f"split chunks {kind}"] = of.split_chunks(kind)
    TABLE[f"split context {kind}"] = of.split_context(kind)

# Arrays that a call does not read.
UNREAD = [("sparse_mla_dsv4", "seq_lens"), ("sparse_mla_dsv4", "cum_seq_lens_q")]
UNREAD += [("varlen_attention", "workspace"), ("paged_attention", "workspace")]

ARGUMENTS = [
    pytest.param(example, name, id=f"{title}: {name}")
    for title, example in TABLE.items()
    for name in example.arrays
]
DEVICE_ARRAYS = [x for x in ARGUMENTS if x.values[0].rules[x.values[1]] != "host"]


# --- outcomes ------------------------------------------------------------------------------------


def frozen(x: Any, given: dict) -> Any:
    """A result as values that can be compared; an array of the caller becomes its name."""
    for name, mine in given.items():
        if x is mine:
            return f"the caller's {name}"
    if isinstance(x, tuple | list):
        return [frozen(part, given) for part in x]
    if isinstance(x, dict):
        return {key: frozen(part, given) for key, part in x.items()}
    if x is None or isinstance(x, int | str):
        return x
    x = np.asarray(x)
    return f"{x.dtype} {x.shape} {bytes_of(x)}"


def bytes_of(x: np.ndarray) -> str:
    """A digest, because pytest prints it for a failure."""
    return hashlib.blake2b(x.tobytes(), digest_size=8).hexdigest()


@dataclass
class Refused:
    error: type
    text: str


def outcome_of(example: Example, given: dict) -> Any:
    try:
        return frozen(example.run(given), given)
    except (TypeError, ValueError, BufferError) as error:
        text = str(error)
        for hint in (": pass np.ascontiguousarray of it", ": pass its .contiguous()"):
            text = text.removesuffix(hint)  # the frameworks' own: tests/arrays/test_exchange.py
        return Refused(type(error), text)


class Calls:
    """An example, called with one argument in another form."""

    def __init__(self, example: Example, name: str) -> None:
        self.example, self.name, self.plain = example, name, example.arrays[name]

    def contents(self, arrays: dict[str, np.ndarray]) -> dict[str, str]:
        """Digests of all arrays except scratch."""
        rules = self.example.rules
        return {n: bytes_of(x) for n, x in arrays.items() if "scratch" not in rules[n]}

    def run(self, view: np.ndarray, given: Any) -> tuple[Any, dict[str, str]]:
        """-> the outcome of the call, and the arrays' contents after it. `given` is `view` as an
        object of some kind."""
        arrays = {n: x if n == self.name else x.copy() for n, x in self.example.arrays.items()}
        outcome = outcome_of(self.example, arrays | {self.name: given})
        return outcome, self.contents(arrays | {self.name: view})

    def refused(self, values: np.ndarray, broken: str) -> tuple[Refused, dict[str, str]]:
        """What is expected where a rule is broken: the error, and arrays that were not written."""
        text = f"{self.example.blames(self.name)}: `{self.name}` must {broken}"
        return Refused(ValueError, text), self.contents(self.example.arrays | {self.name: values})
