"""Both sides of every rule: the last value that is accepted, the first that is refused, and the
error text, which names the argument and its value (csrc/ops, rule.c, chunks.c, engine.c,
forward.c, csrc/cpu).

Dtypes, shapes, ranks and overlaps use the table of test_views.py; other rules are listed here.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import cases
import compiled
import dlpack_producer
import engine
import ml_dtypes
import numpy as np
import operators
import pytest
import reference as ref
from dlpack_producer import Producer
from helpers import RED
from test_views import (
    DECLARED_AS,
    TABLE,
    Calls,
    Refused,
    Row,
    bytes_of,
    frozen,
    int32,
    outcome_of,
    unit_of,
)

import sparse_mla
from sparse_mla import _C

INT32, INT64 = 2**31, 2**63  # the first integers that do not fit
HALF_STEP = 2.0**128 - 2.0**103  # the first number that rounds to infinity as a float32
# The first number that rounds to a float32 which is infinite times log2(e).
HALF_FACTOR = float.fromhex("0x1.62E42Fp+127")
BF16, F16, F32, U8 = ref.BF16, np.float16, np.float32, np.uint8


def zeros(*shape: int, dtype=BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


def refuses(text: str, error: type = ValueError):
    """Expects an error with exactly this text."""
    return pytest.raises(error, match=f"^{re.escape(text)}$")


# --- dtypes --------------------------------------------------------------------------------------

NAMED = {  # in the order in which error texts list them
    "bfloat16": BF16,
    "float16": F16,
    "float32": F32,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": U8,
    "int8": np.int8,
    "float8_e4m3fn": ref.E4M3,
    "bool": np.dtype(bool),
}
NEIGHBOURS = {"float64": "f8", "int16": "i2", "uint16": "u2", "uint32": "u4", "uint64": "u8"}
NEIGHBOURS |= {"complex64": "c8"}
NO_NAMES = (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4, ">i4", ">f4", "M8[s]")
BYTES = ("uint8", "int8", "float8_e4m3fn")
BF16_HINT = ": nothing is cast here (bfloat16 in NumPy is ml_dtypes.bfloat16)"
BITS_HINT = ": view the bits as bfloat16 (ml_dtypes.bfloat16 in NumPy)"
CACHES = ("kv_cache", "k_cache", "extra_kv_cache", "swa_kv_cache", "compressed_kv_cache")
BYTE_FORMATS = {
    "fp8_ds_mla": 656,
    "fp8_v4": 584,
    "fp8_e4m3": "512 or 576",
    "fp8_index": 132,
    "mxfp4_index": 68,
    "fp8_v41": 528,
    "fp8_v41_split": 528,
    "fp4_v41": 288,
    "fp4_v41_split": 288,
    "fp8_nope": 528,
}
SCALES = (
    "q_scale",
    "o_scale",
    "kv_scale",
    "extra_kv_scale",
    "bmm1_scale",
    "bmm2_scale",
    "q_scale_inv",
)
READERS = ("gather_kv_cache", "dequantize_kv_cache", "dequantize_and_gather_k_cache")


def known_formats(op: str, name: str = "") -> tuple[str, dict[str, int | str]]:
    """The bf16 rows that the argument `name` of an operator takes, and the formats of bytes."""
    if op in READERS:
        return "576 or 512", BYTE_FORMATS
    of_512 = BYTE_FORMATS | {"fp8_e4m3": 512}
    if op in (
        "quantize_and_insert_k_cache",
        "fused_qnorm_rope_kv_insert",
        "compress_norm_rope_store",
    ):
        others = ("fp8_ds_mla", "fp8_index", "mxfp4_index")
        return "512", {n: row for n, row in of_512.items() if n not in others}
    if op == "sparse_mla_dsv4":
        return "512", {name: of_512[name] for name in ("fp8_v4", "fp8_e4m3")}
    if "attention" in op:
        others = ("index",) if name == "extra_kv_cache" else ("index", "fp4")
        return "576 or 512", {
            n: row for n, row in BYTE_FORMATS.items() if not any(word in n for word in others)
        }
    if op == "concat_and_cache_mla":
        return "576 or 512", {n: BYTE_FORMATS[n] for n in ("fp8_ds_mla", "fp8_e4m3", "fp8_nope")}
    return "576" if op == "rope_and_cache_mla" else "576 or 512", {"fp8_ds_mla": 656}


def byte_rows(op: str, name: str = "") -> str:
    """The rows of bytes that an operator takes, in the words of an error."""
    rows = known_formats(op, name)[1]
    return " or ".join(f"{size} for format {fmt}" for fmt, size in rows.items())


def error_op(row: Row) -> str:
    """The operator's name in the texts of errors."""
    return DECLARED_AS.get(row.op, row.op)


def is_cache(row: Row, name: str) -> bool:
    return name in CACHES and row.op not in (*OPS_OF_HEADS, "reshape_and_cache")


# What operators over keys and values of heads take, beside a query of bf16 or e4m3.
OPS_OF_HEADS = ("varlen_attention", "paged_attention")
HALVES = {
    "q": ("bfloat16", "float16", "uint8", "float8_e4m3fn"),
    "k[0]": ("bfloat16", "uint8", "float8_e4m3fn"),
    "v": ("uint8", "float8_e4m3fn"),
    "out": ("bfloat16", "float32"),
    "workspace": ("uint8", "int8"),
}
HALVES |= {"q[0]": HALVES["q"], "k": HALVES["q"], "v_cache": HALVES["v"]}


def dtypes_of(row: Row, name: str) -> tuple[str, ...]:
    """The dtypes that the docstrings of sparse_mla.ops allow for an array."""
    if name in ("slot_mapping", "kv_slot_mapping", "positions"):
        return ("int32", "int64")
    if row.op in ("_absorb_q_proj", "_absorb_o_proj") and name not in SCALES:
        floats = ("bfloat16", "float16", "float32")
        return floats if name.startswith("W_") else (*floats, "uint8", "float8_e4m3fn")
    if name == "kv_c" and row.op != "concat_and_cache_mla":
        return tuple(n for n, dtype in NAMED.items() if dtype == row.example.arrays[name].dtype)
    if row.op == "reshape_and_cache" and name == "k_cache":
        kinds = (row.example.arrays["k"].dtype, np.dtype(U8), ref.E4M3)
        return tuple(n for n, dtype in NAMED.items() if dtype in kinds)
    if row.op == "reshape_and_cache" and name == "v_cache" and "v_scale" in row.rules:
        return HALVES[name]
    if row.op in OPS_OF_HEADS and name == "k_cache":
        return HALVES["k" if "v_descale" in row.rules else "k[0]"]
    if row.op in OPS_OF_HEADS and name in HALVES:
        is_bf16 = name in ("v", "v_cache") and "v_descale" not in row.rules
        return ("bfloat16",) if is_bf16 else HALVES[name]
    if row.op in ("indexer_logits", "lightning_indexer") and name == "q_scale":
        return ("uint8",)
    if row.op in ("indexer_logits", "lightning_indexer") and name in ("q", "k_cache[0]"):
        return ("uint8",) if name == "q" and "q_scale" in row.rules else ("uint8", "float8_e4m3fn")
    if row.op == "indexer_logits" and name == "out":
        return ("bfloat16", "float32")
    if name == "weights" and row.op == "fused_indexer_q_rope_quant":
        return ("bfloat16", "float32")
    if name == "out" and row.op == "fused_indexer_q_rope_quant":
        return ("uint8",) if "out_scale" in row.rules else ("uint8", "float8_e4m3fn")
    if row.op == "grouped_output_projection":
        kinds = {"o": ("bfloat16", "uint8", "float8_e4m3fn"), "o_scale": ("float32", "int32")}
        if name == "weight" and row.example.arrays[name].dtype != BF16:
            return ("uint8", "float8_e4m3fn")
        if name in kinds:
            return kinds[name]
    elif row.op == "fp8_linear" and name in ("weight", "workspace"):
        return ("uint8", "float8_e4m3fn" if name == "weight" else "int8")
    elif name in ("kv_c", "k", "weight") or (name == "x" and "quant" in row.op):
        floats = ("bfloat16", "float16", "float32")
        return (*floats, "uint8", "float8_e4m3fn") if name == "weight" else floats
    if name in (
        "lse",
        "lse_a",
        "lse_b",
        "lses",
        "attn_sink",
        "max_logits",
        "weight_scale_inv",
        *SCALES,
    ):
        return ("float32",)
    if name == "query" or (name == "q" and "q_scale" in row.rules):
        return ("bfloat16", "uint8", "float8_e4m3fn")
    if name == "q_out" and "q_scale_inv" in row.rules:
        return ("uint8", "float8_e4m3fn")
    ops = ("sparse_attention", "mla_attention", "lightning_indexer")
    if name == "workspace_buffer" or (name == "workspace" and error_op(row) in ops):
        return ("uint8", "int8")
    if name == "out" and row.op in ("dynamic_per_tensor_quant", "scaled_quantize"):
        return ("uint8", "float8_e4m3fn")
    if name == "is_valid":
        return ("uint8", "bool")
    if name in ("out_a", "outs"):
        return ("bfloat16", "float16", "float32")
    if row.op == "merge_attn_partials" and name == "out":
        outs = row.example.arrays["outs"].dtype
        return ("bfloat16",) if outs == BF16 else ("bfloat16", "float16", "float32")
    if name in ("q_weight", "kv_weight", "norm_weight", "logits", "q_pe"):
        return ("bfloat16", "float32")
    if name == "rope_table" and "q_pe" in row.rules:
        return ("bfloat16", "float32")
    if name == "kv" and "ape" in row.rules:
        return ("bfloat16", "float32")
    if name == "out" and "out_scale" in row.rules:
        return ("uint8", "float8_e4m3fn")
    plain = row.example.arrays[name].dtype
    return tuple(n for n, dtype in NAMED.items() if dtype == plain)


def listed(names) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def is_e4m3_of_576(row: Row, name: str, dtype: str) -> bool:
    """Whether a cache of bf16 values would be one of as many e4m3 values in this dtype."""
    x = row.example.arrays[name]
    return is_cache(row, name) and x.dtype == BF16 and x.shape[-1] == 576 and dtype in BYTES


def wrong_dtype(row: Row, name: str, dtype: str) -> tuple[type, str]:
    """The error for an array of this dtype."""
    wanted = dtypes_of(row, name)
    who = f"{row.blames.get(name, row.op)}: `{name}` must"
    if is_cache(row, name):
        x = row.example.arrays[name]
        fp8 = x.dtype != BF16
        if row.op == "forward":  # the cache format is the builder's
            formats = (
                f"{listed(BYTES)} for format fp8_ds_mla" if fp8 else "bfloat16 for format bfloat16"
            )
            return TypeError, f"{who} be {formats}, got {dtype}"
        if row.op == "indexer_k_quant_and_cache":  # this call names the format
            return TypeError, f"{who} be {listed(BYTES)} for format fp8_index, got {dtype}"
        scale = {"extra_kv_cache": "extra_kv_scale"}.get(name, "kv_scale")
        scale = "bmm2_scale" if row.op == "sparse_mla_dsv4" else scale
        if dtype == "bfloat16" and scale in row.rules:  # 512 values, as there were 512 bytes
            rule = "be left out for format bfloat16, which has no scale of the whole cache"
            return (
                ValueError,
                f"{row.blames.get(name, row.op)}: `{scale}` must {rule}, got an array",
            )
        bf16, byte_formats = known_formats(row.op, name)
        if is_e4m3_of_576(row, name, dtype):
            takes = f"bfloat16 or {' or '.join(byte_formats)}"
            rule = f"be of a format that this operator takes ({takes}), got fp8_e4m3"
            return ValueError, f"{who} {rule}"
        if dtype in ("bfloat16", *BYTES):
            rows = f"{bf16} for format bfloat16" if fp8 else byte_rows(row.op, name)
            return ValueError, f"{who} have a last dimension of {rows}, got shape {list(x.shape)}"
        known = " or ".join(f"{name}, {row}" for name, row in byte_formats.items())
        known = f"bfloat16 ({bf16} values a token), or {listed(BYTES)} ({known} bytes a token)"
        return TypeError, f"{who} be {known}, got {dtype}"
    hint = ""
    if wanted == ("bfloat16",):
        hint = BITS_HINT if dtype in ("int16", "uint16") else BF16_HINT
        if row.blames.get(name) == "MetadataBuilder":
            hint = hint.partition(" (")[0]
    elif wanted == ("int32",):
        hint = ": nothing is cast here, make it int32"
    return TypeError, f"{who} be {listed(wanted)}, got {dtype}{hint}"


def follows(row: Row, name: str, dtype: str) -> tuple[type, str] | None:
    """The error if a valid dtype does not fit another argument, or None."""
    partners = {"kv_c": "k_pe", "q_pe": "k_pe", "out_a": "out_b", "logits": "values"}
    other = partners.get(name)
    other = None if name == "kv_c" and row.op != "concat_and_cache_mla" else other
    other = "score" if name == "kv" and "ape" in row.rules else other
    other = "v" if name == "k" and row.op == "reshape_and_cache" else other
    plain = row.example.arrays
    if name == "outs" and dtype != "float32":  # a sum in fp32 may be stored as bf16
        other = "out"
    if other in plain and plain[name].dtype != NAMED[dtype]:
        got = next(n for n, known in NAMED.items() if known == plain[other].dtype)
        hint = BF16_HINT if dtype == "bfloat16" else ""
        return TypeError, f"{row.op}: `{other}` must be {dtype}, got {got}{hint}"
    if row.op in OPS_OF_HEADS or (row.op, name) == ("reshape_and_cache", "k_cache"):
        return unlike_half(row, name, dtype)
    if name == "q" and dtype == "bfloat16" and "q_scale" in plain:
        rest = "`q_scale` must be left out for a bfloat16 query, got an array"
        return ValueError, f"{row.blames.get(name, row.op)}: {rest}"
    if row.op == "grouped_output_projection":
        return unlike_o(row, name, dtype)
    is_split = name == "weight" and row.op != "fp8_linear"
    if is_split and dtype in BYTES and "weight_scale_inv" not in plain:
        rest = "`weight_scale_inv` must be given for an e4m3 weight, got none"
        return ValueError, f"split_kv_b_proj: {rest}"
    return None


def unlike_half(row: Row, name: str, dtype: str) -> tuple[type, str] | None:
    """The error for another kind of query or key, which its second array, its values or its scale
    does not have."""
    codes = ("uint8", "float8_e4m3fn")
    wanted = listed(codes) if dtype in codes else dtype
    hint = BF16_HINT if dtype == "bfloat16" else ""
    others = {"q[0]": "q[1]", "k[0]": "k[1]", "q": "qv", "k": "v", "k_cache": "v_cache"}
    other = others.get(name)
    if row.example.arrays[name].dtype == BF16:
        if dtype == "bfloat16" or other not in row.rules:
            return None
        return TypeError, f"{row.op}: `{other}` must be {wanted}, got bfloat16"
    if name in ("k", "k_cache") and dtype not in codes:
        got = next(n for n, known in NAMED.items() if known == row.example.arrays[other].dtype)
        return TypeError, f"{row.op}: `{other}` must be {wanted}, got {got}{hint}"
    if name == "q" and dtype not in codes:
        rule = "must be left out unless `q` is e4m3"
        return ValueError, f"{row.op}: `q_descale` {rule}, got {dtype}"
    return None


def unlike_o(row: Row, name: str, dtype: str) -> tuple[type, str] | None:
    """The error for another kind of `o`, or of its scales, which have 8 columns or 2."""
    was_bf16 = row.example.arrays["o"].dtype == BF16
    rule = None
    if name == "o" and was_bf16 != (dtype == "bfloat16"):
        rule = "given, got none: an e4m3 `o` has" if was_bf16 else "None, got an array: a bf16 `o`"
        rule = f"be {rule} {'scales' if was_bf16 else 'has no scales'}"
    if name == "o_scale" and row.example.arrays[name].dtype != NAMED[dtype]:
        wanted, got = (8, 2) if dtype == "float32" else (2, 8)
        hint = "a scale per 128 values of `o`, or four of them per int32"
        rule = f"have shape [>= 3, 2, {wanted}], got [3, 2, {got}]: {hint}"
    return rule and (ValueError, f"{row.op}: `o_scale` must {rule}")


def of_dtype(x: np.ndarray, dtype) -> np.ndarray:
    """The bytes of `x` as this dtype if the sizes agree, which suits a cache; else its values."""
    if x.dtype.itemsize == np.dtype(dtype).itemsize:
        return x.copy().view(dtype)
    with np.errstate(all="ignore"):
        return x.astype(dtype) if dtype in NAMED.values() else np.zeros(x.shape, dtype)


def others_are_untouched(calls: Calls, after: dict[str, str]) -> bool:
    before = calls.contents(calls.example.arrays)
    return all(after[name] == x for name, x in before.items() if name != calls.name)


DEVICE_ARRAYS = [
    pytest.param(row, name, id=f"{title}: {name}")
    for title, row in TABLE.items()
    for name, rules in row.rules.items()
    if "host" not in rules
]


@pytest.mark.parametrize(("row", "name"), DEVICE_ARRAYS)
def test_dtypes(row, name):
    calls = Calls(row, name)
    for dtype, number in (NAMED | NEIGHBOURS).items():
        x = of_dtype(calls.plain, np.dtype(number))
        fits = dtype in dtypes_of(row, name) or (
            is_cache(row, name) and calls.plain.dtype != BF16 and dtype in BYTES
        )
        takes_e4m3 = row.op != "forward" and "fp8_e4m3" in known_formats(row.op, name)[1]
        fits = fits or (takes_e4m3 and is_e4m3_of_576(row, name, dtype))
        wanted = follows(row, name, dtype) if fits else wrong_dtype(row, name, dtype)
        got, after = calls.run(x, x)
        if wanted is None:
            assert not isinstance(got, Refused), dtype
        else:
            assert got == Refused(*wanted), dtype
            assert others_are_untouched(calls, after), dtype
    for number in NO_NAMES:
        x = np.zeros(calls.plain.shape, number)
        rule = "be in native byte order" if str(number)[0] == ">" else "have a plain numeric dtype"
        who = f"{row.blames.get(name, row.op)}: `{name}` must {rule}, got {x.dtype!r}"
        assert calls.run(x, x)[0] == Refused(TypeError, who)


@pytest.mark.parametrize("number", ["f4", "f8", "?", "c8", BF16, ref.E4M3])
@pytest.mark.parametrize("title", [t for t, r in TABLE.items() if "host" in r.rules.values()])
def test_host_integers_are_integers(title, number):
    row = TABLE[title]
    for name in (n for n, rules in row.rules.items() if "host" in rules):
        calls = Calls(row, name)
        x = np.zeros(calls.plain.shape, number)
        got, _ = calls.run(x, x)
        who = f"{row.blames.get(name, row.op)}: `{name}` must hold integers, got "
        assert (got.error, got.text[: len(who)]) == (TypeError, who)


INTEGERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_host_integers_fit_int32(dtype):
    """The ends of each type and of int32, and the first values beyond int32."""
    split = sparse_mla.split_prefill_chunks
    info = np.iinfo(dtype)
    for value in {info.max, min(info.max, INT32 - 1), min(info.max, INT32)}:
        x = np.array([value], dtype)
        if value < INT32:
            assert split(x, INT32 - 1) == [(0, 1)]
            assert split([value], INT32 - 1) == [(0, 1)]
        else:
            rule = "must hold values that fit int32"
            with refuses(f"split_prefill_chunks: `seq_lens` {rule}, got {value}"):
                split(x, INT32 - 1)
    for value in {info.min, max(info.min, -INT32), max(info.min, -INT32 - 1)}:
        rule = "must be >= 0" if value >= -INT32 else "must hold values that fit int32"
        where = " at request 0" if value >= -INT32 else ""
        for x in (np.array([value], dtype), [value]) if value < 0 else ():
            with refuses(f"split_prefill_chunks: `seq_lens` {rule}, got {value}{where}"):
                split(x, INT32 - 1)


def test_host_integers_of_lists():
    split = sparse_mla.split_prefill_chunks
    for value, rule in ((INT32, "hold values that fit int32"), (INT64, "fit int64")):
        with refuses(f"split_prefill_chunks: `seq_lens` must {rule}, got {value}"):
            split([1, value], 5)
    with refuses("split_prefill_chunks: `seq_lens` must be an int, got float", TypeError):
        split([1, 2.0], 5)
    with refuses("split_prefill_chunks: `seq_lens` must have 1 dimension, got 2"):
        split(np.zeros((2, 1), np.int32), 5)
    with refuses("split_prefill_chunks: `seq_lens` must have 1 dimension, got 0"):
        split(np.zeros((), np.int32), 5)


# --- ranks and shapes ----------------------------------------------------------------------------

# Dimensions that may be larger by one while all other arrays stay as they are.
LARGER = {
    ("concat_and_cache_mla", "kv_c"): {0},
    ("concat_and_cache_mla", "k_pe"): {0},
    ("concat_and_cache_mla", "slot_mapping"): {0},  # the example has a row to spare
    ("reshape_and_cache", "k"): {0},
    ("reshape_and_cache", "v"): {0},
    ("reshape_and_cache", "slot_mapping"): {0},
    ("quantize_and_insert_k_cache", "k"): {0},
    ("quantize_and_insert_k_cache", "slot_mapping"): {0},
    ("indexer_k_quant_and_cache", "k"): {0},
    ("indexer_k_quant_and_cache", "slot_mapping"): {0},
    ("dequantize_and_gather_k_cache", "out"): {1},
    ("dequantize_and_gather_k_cache", "block_table"): {1},
    ("gather_kv_cache", "block_table"): {1},
    ("sparse_attention", "attn_sink"): {0},
    ("sparse_attention", "out"): {1},
    ("gather_kv_cache", "out"): {0},
    ("convert_req_index_to_global_index", "block_table"): {0, 1},
    ("convert_req_index_to_global_index", "prefill_workspace_starts"): {0},
    ("compute_global_topk_indices_and_lens", "req_id_per_token"): {0},
    ("compute_global_topk_indices_and_lens", "block_table"): {0, 1},
    ("compute_global_topk_indices_and_lens", "is_valid"): {0},
    ("top_k_per_row", "logits"): {1},
    ("top_k_per_row", "starts"): {0},
    ("top_k_per_row", "ends"): {0},
    ("top_k_per_row", "slots_block_table"): {0, 1},
    ("top_k_per_row", "req_id_per_token"): {0},
    ("top_k_per_row", "is_valid"): {0},
    ("combine_topk_swa_indices", "topk_indices"): {1},
    ("build_mixed_sparse_indices", "decode_compressed_indices"): {1},
    ("build_mixed_sparse_indices", "decode_compressed_lens"): {0},
    ("build_mixed_sparse_indices", "prefill_topk_indices"): {1},
    ("build_mixed_sparse_indices", "req_id_per_token"): {0},
    ("build_mixed_sparse_indices", "swa_block_table"): {0, 1},
    ("build_mixed_sparse_indices", "compressed_block_table"): {0, 1},
    ("build_mixed_sparse_indices", "is_valid"): {0},
    ("sparse_attention", "extra_indices"): {1},
    ("sparse_attention", "indices"): {1},
    ("sparse_attention", "workspace"): {0},
    ("sparse_mla_dsv4", "workspace_buffer"): {0},
    ("sparse_mla_dsv4", "sparse_indices"): {1},
    ("sparse_mla_dsv4", "seq_lens"): {0},
    ("sparse_mla_dsv4", "cum_seq_lens_q"): {0},
    ("sparse_mla_dsv4", "sinks"): {0},
    ("sparse_mla_dsv4", "out"): {1},
    ("mla_attention", "block_table"): {0, 1},
    ("mla_attention", "slot_table"): {0, 1},
    ("mla_attention", "attn_sink"): {0},
    ("mla_attention", "out"): {1},
    ("mla_attention", "workspace"): {0},
    ("varlen_attention", "attn_sink"): {0},
    ("varlen_attention", "workspace"): {0},
    ("paged_attention", "block_table"): {0, 1},
    ("paged_attention", "slot_table"): {0, 1},
    ("paged_attention", "attn_sink"): {0},
    ("paged_attention", "workspace"): {0},
    ("merge_attn_states", "attn_sink"): {0},
    ("merge_attn_partials", "attn_sink"): {0},
    ("fused_qnorm_rope_kv_insert", "q"): {0, 1},
    ("fused_qnorm_rope_kv_insert", "kv"): {0},
    ("fused_qnorm_rope_kv_insert", "positions"): {0},
    ("fused_qnorm_rope_kv_insert", "rope_table"): {0},
    ("fused_qnorm_rope_kv_insert", "slot_mapping"): {0},
    ("fused_qnorm_rope_kv_insert", "q_out"): {0, 1},
    ("save_partial_states", "kv"): {0},
    ("save_partial_states", "score"): {0},
    ("save_partial_states", "ape"): {0},
    ("save_partial_states", "positions"): {0},
    ("save_partial_states", "state"): {0, 1},
    ("save_partial_states", "slot_mapping"): {0},  # the example has a row to spare
    ("compress_norm_rope_store", "state"): {0, 1},
    ("compress_norm_rope_store", "block_table"): {0, 1},
    ("compress_norm_rope_store", "req_id_per_token"): {0},
    ("compress_norm_rope_store", "positions"): {0},
    ("compress_norm_rope_store", "slot_mapping"): {0},
    ("compress_norm_rope_store", "kv_slot_mapping"): {0},
    ("compress_norm_rope_store", "rope_table"): {0},
    ("compress_norm_rope_store", "kv"): {0},
    ("compress_norm_rope_store", "score"): {0},
    ("apply_rope", "positions"): {0},
    ("apply_rope", "rope_table"): {0},
    ("rope_and_cache_mla", "positions"): {0},
    ("rope_and_cache_mla", "rope_table"): {0},
    ("rope_and_cache_mla", "kv_c"): {0},
    ("rope_and_cache_mla", "slot_mapping"): {0},  # the example has a token to spare
    ("fused_inv_rope_fp8_quant", "positions"): {0},
    ("fused_inv_rope_fp8_quant", "rope_table"): {0},
    ("fused_inv_rope_fp8_quant", "out_scale"): {0},
    ("grouped_output_projection", "o_scale"): {0},
    ("fp8_linear", "workspace"): {0},
    ("_absorb_q_proj", "W_UK"): {0, 2},
    ("_absorb_o_proj", "W_UV"): {0},
    ("indexer_logits", "context_lens"): {0},
    ("indexer_logits", "req_id_per_token"): {0},
    ("indexer_logits", "block_table"): {0, 1},
    ("indexer_logits", "starts"): {0},
    ("indexer_logits", "out"): {1},
    ("lightning_indexer", "context_lens"): {0},
    ("lightning_indexer", "req_id_per_token"): {0},
    ("lightning_indexer", "block_table"): {0, 1},
    ("lightning_indexer", "starts"): {0},
    ("lightning_indexer", "slots_block_table"): {0, 1},
    ("lightning_indexer", "is_valid"): {0},
    ("lightning_indexer", "workspace"): {0},
    ("fused_indexer_q_rope_quant", "positions"): {0},
    ("fused_indexer_q_rope_quant", "rope_table"): {0},
    ("forward", "block_table"): {0, 1},
    ("forward", "q"): {0},
    ("forward", "topk_indices"): {0},
    ("forward", "out"): {0},
    ("forward", "lse"): {0},
    ("forward", "workspace"): {0},
}


# Dimensions whose sum with this number is the size of another array.
SUMMANDS = {
    ("build_mixed_sparse_indices", "prefill_topk_indices", 0): 2,
    ("mla_attention", "cache_seqlens", 0): 1,
    ("paged_attention", "cache_seqlens", 0): 1,
}


def resized(x: np.ndarray, d: int, by: int) -> np.ndarray:
    """x with one slice more in dimension d, a copy of the last one; or with one slice less."""
    if by < 0:
        return np.take(x, range(x.shape[d] - 1), axis=d)
    return np.concatenate([x, np.take(x, [-1], axis=d)], axis=d)


def is_larger_accepted(row: Row, name: str, d: int, ndim: int) -> bool:
    op = error_op(row)
    if is_cache(row, name) and ndim == 2:  # a flat cache is one page
        return d == 0 and op != "forward"
    if is_cache(row, name):
        return d == 0 or (d == 1 and op not in ("forward", "dequantize_and_gather_k_cache"))
    return d in LARGER.get((op, name), set())


@pytest.mark.parametrize(("row", "name"), DEVICE_ARRAYS)
def test_every_dimension_one_larger_and_one_smaller(row, name):
    """The size is accepted, or refused with a text that names it; then no other array is written.

    Dimensions that may be larger also have a least size. Tests below check that rule.
    """
    calls = Calls(row, name)
    shape = calls.plain.shape
    for d, by in ((d, by) for d in range(len(shape)) for by in (1, -1)):
        x = resized(calls.plain, d, by)
        got, after = calls.run(x, x)
        if is_larger_accepted(row, name, d, len(shape)):
            assert by < 0 or not isinstance(got, Refused), d
            continue
        if by < 0 and (row.op, name, d) == ("forward", "topk_indices", 1):
            assert not isinstance(got, Refused), "fewer columns than topk_tokens"
            continue
        if by < 0 and (row.op, name, d) == ("sparse_mla_dsv4", "query", 1):
            assert not isinstance(got, Refused), "fewer heads than in out and sinks"
            continue
        if by < 0 and name.endswith("_descale") and d == 0 and shape[0] == 2:
            assert not isinstance(got, Refused), "one row, which both requests share"
            continue
        if by < 0 and row.op == "reshape_and_cache" and name.endswith("_scale"):
            assert not isinstance(got, Refused), "one scale, which both heads share"
            continue
        if by < 0 and (row.op, name) == ("_absorb_q_proj", "W_UK"):
            assert not isinstance(got, Refused), "what q_proj has more is for RoPE"
            continue
        assert isinstance(got, Refused), f"{x.shape} for {shape}"
        assert got.error is ValueError, got
        assert re.match(r"[\w.]+: `[\w\[\]]+` must have .+, got ", got.text), got
        size = x.shape[d] + SUMMANDS.get((error_op(row), name, d), 0)
        assert {str(x.shape[d]), str(size)} & {*re.findall(r"\d+", got.text)}, got
        assert others_are_untouched(calls, after)


@pytest.mark.parametrize(("row", "name"), DEVICE_ARRAYS)
def test_ranks_one_larger_and_one_smaller(row, name):
    if name in SCALES or (row.op == "_split_weight" and name == "weight_scale_inv"):
        return  # one value of any rank
    calls = Calls(row, name)
    plain = calls.plain.copy()
    for x in (plain[..., None], plain[None], plain[0, ...]):
        got, _ = calls.run(x, x)
        is_scale = (row.op, name) == ("fp8_linear", "descale") and plain.ndim == 1
        if is_scale and x.shape in ((*plain.shape, 1), ()):
            continue  # a scale per output has either rank, and one value is a scale, too
        if row.op == "reshape_and_cache" and name.endswith("_scale") and x.shape == ():
            continue
        is_paged = x.ndim in (2, 3) or (x.ndim == 4 and x.shape[2] == 1)
        if is_cache(row, name) and is_paged and x.shape[-1] == calls.plain.shape[-1]:
            continue  # a cache of another layout
        assert isinstance(got, Refused), x.shape
        who = row.blames.get(name, row.op)
        shown = ", ".join(map(str, x.shape))
        if row.op == "dynamic_per_tensor_quant":
            of_x, of_out = (x.ndim if n == name else calls.plain.ndim for n in ("x", "out"))
            text = f"{who}: `out` must have the {of_x} dimensions of `x`, got {of_out}"
            assert got == Refused(ValueError, text)
        elif error_op(row) == "mla_attention" and name in ("q", "q[0]") and x.ndim == 4:
            other, rule = "out" if name == "q" else "q[1]", "beside a query of that shape"
            text = f"{who}: `{other}` must have 4 dimensions {rule}, got 3"
            assert got == Refused(ValueError, text)
        else:
            assert got.error is ValueError
            assert got.text.startswith(f"{who}: `{name}` must have "), got
            assert f"got [{shown}]" in got.text or f"got shape [{shown}]" in got.text, got


def test_ranks_of_an_array_of_any_rank():
    quantize = sparse_mla.dynamic_per_tensor_quant
    for ndim in range(9):
        out, _ = quantize(np.ones((1,) * ndim, F32))
        assert out.ndim == ndim
    with refuses("dynamic_per_tensor_quant: `x` must have at most 8 dimensions, got 9"):
        quantize(np.ones((1,) * 9, F32))
    with refuses("dynamic_per_tensor_quant: `out` must have at most 8 dimensions, got 9"):
        quantize(np.ones((1,) * 8, F32), out=zeros(*(1,) * 9, dtype=U8))
    for ndim in (9, -1):
        with refuses(f"dynamic_per_tensor_quant: `x` must have at most 8 dimensions, got {ndim}"):
            quantize(Producer(np.ones((1,) * 8, F32), fields={"ndim": ndim}))


@pytest.mark.parametrize("width", [511, 513, 575, 577, 655, 657])
def test_rows_of_a_cache_are_as_wide_as_its_format(width):
    is_bf16 = width < 600
    dtype, rows = (BF16, {576: 576, 512: 512}) if is_bf16 else (U8, {656: 576})
    for row, head_size in rows.items():
        assert sparse_mla.dequantize_kv_cache(zeros(2, row, dtype=dtype)).shape == (2, head_size)
    known = "576 or 512 for format bfloat16" if is_bf16 else byte_rows("dequantize_kv_cache")
    rule = f"must have a last dimension of {known}, got shape [2, {width}]"
    with refuses(f"dequantize_kv_cache: `kv_cache` {rule}"):
        sparse_mla.dequantize_kv_cache(zeros(2, width, dtype=dtype))


def test_a_cache_sizes_what_goes_with_it():
    """The width of cache rows decides that of keys, queries, results and a second cache: 512 values
    without a RoPE part, else 576."""
    rows, indices = zeros(3, 512), np.zeros((2, 1), np.int32)
    with_rope, no_rope = zeros(3, 576), zeros(2, 0)
    hint = ": tokens, and the RoPE values of their keys"
    sparse_mla.concat_and_cache_mla(zeros(2, 512), no_rope, rows, np.arange(2))
    with refuses(f"concat_and_cache_mla: `k_pe` must have shape [any, 0], got [2, 64]{hint}"):
        sparse_mla.concat_and_cache_mla(zeros(2, 512), zeros(2, 64), rows, np.arange(2))
    with refuses(f"concat_and_cache_mla: `k_pe` must have shape [any, 64], got [2, 0]{hint}"):
        sparse_mla.concat_and_cache_mla(zeros(2, 512), no_rope, with_rope, np.arange(2))
    options = {"softmax_scale": 1.0}
    attend = sparse_mla.sparse_attention
    out, _ = attend(zeros(2, 3, 512), rows, indices, **options)
    assert out.shape == (2, 3, 512)
    rule = "got [2, 3, 576]: tokens, heads, and as many values as a cache row"
    with refuses(f"sparse_attention: `q` must have shape [any, any, 512], {rule}"):
        attend(zeros(2, 3, 576), rows, indices, **options)
    rule = "must be one array [tokens, heads, 512] for keys of 512 values, got a pair"
    for q_pe in (zeros(2, 3, 0), zeros(2, 3, 64)):
        with refuses(f"sparse_attention: `q` {rule}"):
            attend((zeros(2, 3, 512), q_pe), rows, indices, **options)
    for wide, other, got in (
        (576, rows, 512),
        (512, with_rope, 576),
        (512, zeros(3, 656, dtype=U8), 576),
    ):
        kv = zeros(3, wide)
        rule = f"must have keys of {wide} values, as `kv_cache` has, got {got}"
        with refuses(f"sparse_attention: `extra_kv_cache` {rule}"):
            attend(
                zeros(2, 3, wide),
                kv,
                indices,
                extra_kv_cache=other,
                extra_indices=indices,
                **options,
            )
        attend(zeros(2, 3, wide), kv, indices, extra_kv_cache=kv, extra_indices=indices, **options)
    out = zeros(4, 512)
    starts, lens, table = np.zeros(1, np.int32), np.full(1, 3, np.int32), np.zeros((1, 1), np.int32)
    sparse_mla.gather_kv_cache(zeros(1, 3, 512), table, lens, starts, out=out)
    with refuses("gather_kv_cache: `out` must have shape [any, 576], got [4, 512]"):
        sparse_mla.gather_kv_cache(zeros(1, 3, 576), table, lens, starts, out=out)


def test_a_scale_of_minus_one():
    """-1 is a scale like any other, although C uses -1 for numbers that are not given."""
    q = np.linspace(-1, 1, 2 * 3 * 576).reshape(2, 3, 576).astype(BF16)
    kv = np.linspace(1, -2, 5 * 576).reshape(5, 576).astype(BF16)
    indices = np.array([[0, 4, 2], [1, 3, 0]], np.int32)
    got = sparse_mla.sparse_attention(q, kv, indices, softmax_scale=-1.0)
    want = sparse_mla.sparse_attention(-q, kv, indices, softmax_scale=1.0)
    for x, y in zip(got, want, strict=True):
        assert x.tobytes() == y.tobytes()


def test_pages_have_a_token_and_one_head():
    sizes = "[pages, block_size, 576], [pages, block_size, 1, 576] or [tokens, 576]"
    who = "dequantize_kv_cache: `kv_cache` must have"
    assert sparse_mla.dequantize_kv_cache(zeros(2, 1, 1, 576)).shape == (2, 1, 576)
    assert sparse_mla.dequantize_kv_cache(zeros(0, 1, 576)).shape == (0, 1, 576)
    assert sparse_mla.dequantize_kv_cache(zeros(0, 576)).shape == (0, 576)
    for shape in ((2, 1, 2, 576), (2, 1, 0, 576), (576,), (2, 1, 1, 1, 576)):
        with refuses(f"{who} shape {sizes}, got {list(shape)}"):
            sparse_mla.dequantize_kv_cache(zeros(*shape))
    with refuses(f"{who} at least one token per page, got shape [2, 0, 576]"):
        sparse_mla.dequantize_kv_cache(zeros(2, 0, 576))


def test_tokens_have_rows():
    """kv_c and k_pe need one row per entry of slot_mapping; one row less is refused."""
    cache, slots = zeros(9, 576), np.arange(4)
    write = sparse_mla.concat_and_cache_mla
    write(zeros(4, 512), zeros(4, 64), cache, slots)
    rule = "must have at least one row per entry of `slot_mapping` (4), got 3"
    with refuses(f"concat_and_cache_mla: `kv_c` {rule}"):
        write(zeros(3, 512), zeros(4, 64), cache, slots)
    with refuses(f"concat_and_cache_mla: `k_pe` {rule}"):
        write(zeros(4, 512), zeros(3, 64), cache, slots)


# --- numbers -------------------------------------------------------------------------------------


def attend(T=1, H=1, K=1, kv=None, **options):
    q, kv = zeros(T, H, 576), zeros(1, 1, 576) if kv is None else kv
    return sparse_mla.sparse_attention(
        q, kv, np.zeros((T, K), np.int32), **{"softmax_scale": 1.0, **options}
    )


def convert(topk=(0,), table=((0,),), *, block_size=1, starts=None):
    topk, table = int32(topk), int32(*table)
    options = {}
    if starts is not None:
        options = {"prefill_request_ids": int32(0), "prefill_workspace_starts": int32(*starts)}
    got = sparse_mla.convert_req_index_to_global_index(
        int32(0), table, topk, block_size=block_size, **options
    )
    return got[0].tolist()


def workspace_size(**changes):
    sizes = {"num_tokens": 1, "num_heads": 1, "topk": 1} | changes
    return sparse_mla.attention_workspace_size(
        sizes.pop("num_tokens"), sizes.pop("num_heads"), sizes.pop("topk"), device="cpu", **sizes
    )


def split_weight(shape=(512, 3), **changes):
    sizes = {"num_heads": 1, "qk_nope_head_dim": 1, "v_head_dim": 2} | changes
    return sparse_mla.split_kv_b_proj(zeros(*shape), **sizes)


def split_batch(starts=(0, 1), tokens=None, **options):
    tokens = starts[-1] if tokens is None else tokens
    return sparse_mla.split_decodes_and_prefills(starts, tokens, **options)


def cut_local(attention_chunk=4, block_size=2):
    sizes = {"attention_chunk": attention_chunk, "block_size": block_size}
    return sparse_mla.local_attention_batches([0, 2], [5], [[7, 8, 9]], **sizes)


def attend_to_pages(T=1, H=1, lens=(1,), table=((0,),), page=1, **options):
    """One request of `page` * width keys at most, unless options say otherwise; -> keys seen by
    each token."""
    q, kv = zeros(T, H, 576), options.pop("kv_cache", zeros(9, page, 576))
    _, lse = sparse_mla.mla_attention(
        q, kv, None if table is None else int32(*table), int32(*lens),
        **{"softmax_scale": 1.0, **options},
    )  # fmt: skip
    return np.exp(lse[:, 0]).round().astype(int).tolist()


COUNT = f"must be 0 to {INT32 - 1}, got "
WINDOW = "`window_size` must have -1 (open) or a number of keys on its {}, got {}"
SHARE = "`cp` must be (rank, ranks, interleave) with 0 <= rank < ranks and interleave >= 1, got {}"
SPLITS = "must be 0 (the plan chooses) or 1 to 64, got "
# The numbers of the operators that build index lists, with their least values.
LIST_NUMBERS = {
    "compute_global_topk_indices_and_lens": {"block_size": 1},
    "top_k_per_row": {"k": 1},
    "combine_topk_swa_indices": dict.fromkeys(("window", "ratio", "align"), 1)
    | dict.fromkeys(("M", "N"), 0),
    "build_mixed_sparse_indices": dict.fromkeys(
        ("swa_block_size", "compressed_block_size", "window", "ratio"), 1
    )
    | {"topk": 0},
}


def index_lists(op: str, **numbers) -> None:
    """A call without tokens, whose lists may have any width."""
    good = operators.GOOD_CALLS[op]()
    empty = np.zeros((0, 3), np.int32)
    for name in ("topk_indices", "decode_swa_indices", "prefill_topk_indices"):
        if name in good.args:
            good.args[name] = empty
    if op == "top_k_per_row":
        good.args["logits"] = empty.astype(np.float32)
    if op == "build_mixed_sparse_indices":
        good.args["decode_compressed_indices"] = good.args["decode_compressed_lens"] = None
    if op == "combine_topk_swa_indices":
        good.args["query_start_loc"] = np.zeros(3, np.int32)
    for name in ("out", "slots", "lens"):
        good.kwargs.pop(name, None)
    for name, value in numbers.items():
        good.set(name, value)
    out, *_, lens = good.run(sparse_mla)
    assert out.shape[0] == len(lens) == 0


NUMBERS: dict[str, tuple[str, Callable, tuple, dict[Any, str]]] = {
    # what: (operator, call, accepted values, {refused value: text from the argument's name on})
    "heads of q": (
        "sparse_attention",
        lambda n: attend(H=n),
        (1, 128),
        {n: f"`q` must have 1 to 128 heads, got {n}" for n in (0, 129)},
    ),
    "heads of a pair": (
        "sparse_attention",
        lambda n: sparse_mla.sparse_attention(
            (zeros(1, n, 512), zeros(1, n, 64)), zeros(1, 1, 576), int32([0]), softmax_scale=1.0
        ),
        (1, 128),
        {n: f"`q[0]` must have 1 to 128 heads, got {n}" for n in (0, 129)},
    ),
    "heads of k_up_proj": (
        "k_up_proj",
        lambda n: sparse_mla.k_up_proj(zeros(1, n, 1), zeros(512, n, 1)),
        (1, 128),
        {n: f"`q_nope` must have 1 to 128 heads, got {n}" for n in (0, 129)},
    ),
    "heads of v_up_proj": (
        "v_up_proj",
        lambda n: sparse_mla.v_up_proj(zeros(1, n, 512), zeros(512, n, 1)),
        (1, 128),
        {n: f"`x` must have 1 to 128 heads, got {n}" for n in (0, 129)},
    ),
    "groups of o": (
        "grouped_output_projection",
        lambda n: sparse_mla.grouped_output_projection(zeros(1, n, 1), None, zeros(n, 1, 1), None),
        (1, 128),
        {n: f"`o` must have 1 to 128 groups, got {n}" for n in (0, 129)},
    ),
    "heads of a weight": (
        "split_kv_b_proj",
        lambda n: split_weight((512, 3 * n), num_heads=n),
        (1, 128),
        {n: f"`num_heads` must be 1 to 128, got {n}" for n in (0, 129)},
    ),
    "NoPE values of a weight": (
        "split_kv_b_proj",
        lambda n: split_weight((512, 2 + n), qk_nope_head_dim=n),
        (1,),
        {0: f"`qk_nope_head_dim` must be 1 to {INT32 - 1}, got 0"},
    ),
    "most NoPE values": (
        "split_kv_b_proj",
        lambda n: split_weight(qk_nope_head_dim=n),
        (1,),
        {
            INT32 - 1: f"`weight` must have shape [512, {INT32 + 1}] or [{INT32 + 1}, 512] "
            f"(1 heads x ({INT32 - 1} + 2)), got [512, 3]",
            INT32: f"`qk_nope_head_dim` must be 1 to {INT32 - 1}, got {INT32}",
            INT64: f"`qk_nope_head_dim` must fit int64, got {INT64}",
        },
    ),
    "values of a weight": (
        "split_kv_b_proj",
        lambda n: split_weight((512, 1 + min(n, 2)), v_head_dim=n),
        (1, 2),
        {
            0: f"`v_head_dim` must be 1 to {INT32 - 1}, got 0",
            INT32 - 1: f"`weight` must have shape [512, {INT32}] or [{INT32}, 512] "
            f"(1 heads x (1 + {INT32 - 1})), got [512, 3]",
            INT32: f"`v_head_dim` must be 1 to {INT32 - 1}, got {INT32}",
        },
    ),
    "splits": (
        "sparse_attention",
        lambda n: attend(K=70, num_splits=n),
        (0, 1, 2, 63, 64),
        {n: f"`num_splits` {SPLITS}{n}" for n in (-1, 65, INT32 - 1, -INT32)}
        | {n: f"`num_splits` must fit int32, got {n}" for n in (INT32, -INT32 - 1)}
        | {n: f"`num_splits` must fit int64, got {n}" for n in (INT64, -INT64 - 1)},
    ),
    "scale": (
        "sparse_attention",
        lambda x: attend(softmax_scale=x),
        (np.nextafter(HALF_FACTOR, 0), np.nextafter(-HALF_FACTOR, 0), 0.0, 5e-324),
        {
            HALF_FACTOR: "`softmax_scale` must be at most 2.35866e+38 in size, got 2.35866e+38",
            -HALF_FACTOR: "`softmax_scale` must be at most 2.35866e+38 in size, got -2.35866e+38",
            3e38: "`softmax_scale` must be at most 2.35866e+38 in size, got 3e+38",
            HALF_STEP: "`softmax_scale` must be finite, got 3.40282e+38",
            -HALF_STEP: "`softmax_scale` must be finite, got -3.40282e+38",
            np.inf: "`softmax_scale` must be finite, got inf",
            np.nan: "`softmax_scale` must be finite, got nan",
        },
    ),
    "heads of pages": (
        "mla_attention",
        lambda n: attend_to_pages(H=n),
        (1, 128),
        {n: f"`q` must have 1 to 128 heads, got {n}" for n in (0, 129)},
    ),
    "splits of pages": (
        "mla_attention",
        lambda n: attend_to_pages(num_splits=n),
        (0, 1, 64),
        {n: f"`num_splits` {SPLITS}{n}" for n in (-1, 65)}
        | {n: f"`num_splits` must fit int32, got {n}" for n in (INT32, -INT32 - 1)},
    ),
    "scale of pages": (
        "mla_attention",
        lambda x: attend_to_pages(softmax_scale=x),
        (np.nextafter(HALF_FACTOR, 0), 0.0),
        {
            HALF_FACTOR: "`softmax_scale` must be at most 2.35866e+38 in size, got 2.35866e+38",
            HALF_STEP: "`softmax_scale` must be finite, got 3.40282e+38",
            np.nan: "`softmax_scale` must be finite, got nan",
        },
    ),
    **{
        f"window to the {side}": (
            "mla_attention",
            lambda n, i=i: attend_to_pages(window_size=[(n, 0), (0, n)][i]),
            (-1, 0, 1, INT32 - 1),
            {n: WINDOW.format(side, n) for n in (-2, INT32, INT64 - 1, -INT64)}
            | {n: f"`window_size` must fit int64, got {n}" for n in (INT64, -INT64 - 1)},
        )
        for i, side in enumerate(("left", "right"))
    },
    "ints of a window": (
        "mla_attention",
        lambda x: attend_to_pages(window_size=x),
        ((-1, -1), [0, 5]),
        {
            x: f"`window_size` must be a tuple of 2 ints, got {x}"
            for x in ((), (1,), (1, 2, 3), ("a", None, 2))
        },
    ),
    "chunks": (
        "mla_attention",
        lambda n: attend_to_pages(attention_chunk=n),
        (0, 1, INT32 - 1),
        {n: f"`attention_chunk` {COUNT}{n}" for n in (-1, INT32, INT64 - 1)},
    ),
    "softcap": (
        "mla_attention",
        lambda x: attend_to_pages(softcap=x),
        (0.0, -0.0, 2.0**-126, 30, np.nextafter(HALF_FACTOR, 0)),
        {
            HALF_FACTOR: "`softcap` must be at most 2.35866e+38 in size, got 2.35866e+38",
            -1.0: "`softcap` must be 0 (none) or a positive normal float32, got -1",
            -1e-60: "`softcap` must be 0 (none) or a positive normal float32, got -1e-60",
            1e-60: "`softcap` must be 0 (none) or a positive normal float32, got 1e-60",
            2.0**-127: "`softcap` must be 0 (none) or a positive normal float32, got 5.87747e-39",
            HALF_STEP: "`softcap` must be finite, got 3.40282e+38",
            np.inf: "`softcap` must be finite, got inf",
            np.nan: "`softcap` must be finite, got nan",
        },
    ),
    "share of a rank": (
        "mla_attention",
        lambda cp: attend_to_pages(cp=cp),
        (None, (0, 1, 1), (1, 2, 1), (7, 8, 64), (INT32 - 2, INT32 - 1, INT32 - 1), [0, 2, 4]),
        {
            cp: SHARE.format(cp)
            for cp in (
                *((-1, 2, 1), (2, 2, 1), (0, -1, 1), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 1, -1)),
                *((0, INT32, 1), (0, 1, INT32)),
            )
        }
        | {(0, 1): "`cp` must be a tuple of 3 ints, got (0, 1)"},
    ),
    **{
        f"{name} of pages": (
            "mla_attention",
            lambda n, name=name: attend_to_pages(**{name: n}),
            (None, 0, 1, INT32 - 1),
            {-1: f"`{name}` must be at least 0, got -1"}
            | {n: f"`{name}` {COUNT}{n}" for n in (INT32, INT64 - 1)},
        )
        for name in ("max_seqlen_q", "max_seqlen_k")
    },
    "page size": (
        "convert_req_index_to_global_index",
        lambda n: convert(block_size=n),
        (1, INT32 - 1),
        {n: f"`block_size` must be 1 to {INT32 - 1}, got {n}" for n in (0, -1, INT32, INT64 - 1)}
        | {n: f"`block_size` must fit int64, got {n}" for n in (INT64, -INT64 - 1)},
    ),
    **{
        f"{name} of index lists": (
            op,
            lambda n, op=op, name=name: index_lists(op, **{name: n}),
            (least, INT32 - 1),
            {
                n: f"`{name}` must be {least} to {INT32 - 1}, got {n}"
                for n in (least - 1, INT32, INT64 - 1)
            }
            | {n: f"`{name}` must fit int64, got {n}" for n in (INT64, -INT64 - 1)},
        )
        for op, names in LIST_NUMBERS.items()
        for name, least in names.items()
    },
    "heads of a workspace": (
        "attention_workspace_size",
        lambda n: workspace_size(num_heads=n),
        (1, 128),
        {n: f"`num_heads` must be 1 to 128, got {n}" for n in (0, 129)},
    ),
    "values of a workspace": (
        "attention_workspace_size",
        lambda n: workspace_size(head_dim_v=n),
        (1, 512),
        {n: f"`head_dim_v` must be 1 to 512, got {n}" for n in (-1, 0, 513, INT32)},
    ),
    "splits of a workspace": (
        "attention_workspace_size",
        lambda n: workspace_size(num_splits=n),
        (0, 64),
        {n: f"`num_splits` {SPLITS}{n}" for n in (-1, 65)}
        | {INT32: f"`num_splits` must fit int32, got {INT32}"},
    ),
    **{
        f"{name} of a workspace": (
            "attention_workspace_size",
            lambda n, name=name: workspace_size(**{name: n}),
            (0, INT32 - 1),
            {n: f"`{name}` {COUNT}{n}" for n in (-1, INT32, INT64 - 1)},
        )
        for name in ("num_tokens", "topk", "extra_topk", "num_keys")
    },
    "decode threshold": (
        "split_decodes_and_prefills",
        lambda n: split_batch(decode_threshold=n),
        (1, INT64 - 1),
        {0: "`decode_threshold` must be at least 1, got 0"},
    ),
    "decode threshold of an order": (
        "reorder_batch",
        lambda n: sparse_mla.reorder_batch([3, 1], decode_threshold=n),
        (1, INT64 - 1),
        {0: "`decode_threshold` must be at least 1, got 0"},
    ),
    "chunk of local attention": (
        "local_attention_batches",
        lambda n: cut_local(attention_chunk=n),
        (2, 8),
        {
            n: f"`attention_chunk` must be a multiple of block_size = 2, 1 to 2147483647, got {n}"
            for n in (-2, 0, 3, INT32 + 1, INT64 - 1)
        },
    ),
    "page of local attention": (
        "local_attention_batches",
        lambda n: cut_local(block_size=n),
        (2, 4),
        {n: f"`block_size` must be at least 1, got {n}" for n in (-1, 0)},
    ),
    "tokens of a batch": (
        "split_decodes_and_prefills",
        lambda n: split_batch((0, 2, 5), n),
        (5, 6, INT64 - 1),
        {4: "`num_actual_tokens` must be at least query_start_loc[-1] = 5, got 4"},
    ),
    "model length": (
        "get_prefill_workspace_size",
        sparse_mla.get_prefill_workspace_size,
        (0, INT32 - 1),
        {n: f"`max_model_len` must be 0 to {INT32 - 1}, got {n}" for n in (-1, INT32)},
    ),
    "stream": (
        "merge_attn_states",
        lambda n: sparse_mla.merge_attn_states(
            *(zeros(1, 1, 1), zeros(1, 1, dtype=F32)) * 2, stream=n
        ),
        (0, 2**64 - 1, -INT64),
        {n: f"`stream` must be a handle of at most 64 bits, got {n}" for n in (2**64, -INT64 - 1)},
    ),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers(what):
    op, call, good, bad = NUMBERS[what]
    for value in good:
        call(value)
    for value, text in bad.items():
        with refuses(f"{op}: {text}"):
            call(value)


def test_workspace_of_the_largest_shapes_does_not_overflow():
    most = INT32 - 1
    sizes = [
        workspace_size(num_tokens=t, num_heads=128, topk=k, extra_topk=e, num_splits=n)
        for t in (1, most)
        for k in (1, most)
        for e in (0, most)
        for n in (0, 64)
    ]
    assert all(0 < size < 2**40 for size in sizes)


def test_sizes_of_results():
    assert sparse_mla.get_prefill_workspace_size(INT32 - 1) == 5 * (INT32 - 1)
    assert split_batch((0, 2, 5), INT64 - 1, decode_threshold=9) == (2, 0, INT64 - 1, 0)


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        ((1,), "must start with 0, got 1"),
        ((-1, 0), "must start with 0, got -1"),
        ((0, 3, 2), "must not decrease, got 2 after 3 at request 1"),
        ((0, -1), "must not decrease, got -1 after 0 at request 0"),
        ((), "must have one entry more than requests, got 0"),
    ],
)
def test_starts_of_queries(starts, text):
    with refuses(f"split_decodes_and_prefills: `query_start_loc` {text}"):
        sparse_mla.split_decodes_and_prefills(starts, 9, decode_threshold=2)


@pytest.mark.parametrize(
    ("starts", "want"),
    [
        ((0,), (0, 0, 9, 0)),
        ((0, 0), (1, 0, 9, 0)),
        ((0, 2, 2), (2, 0, 9, 0)),
        ((0, 3, 3), (0, 2, 0, 9)),
        ((0, 0, 1), (2, 0, 9, 0)),
        ((0, 0, 3), (1, 1, 0, 9)),
        ((0, 2, 3, 3), (3, 0, 9, 0)),
        ((0, 3, 6, 6), (0, 3, 0, 9)),
        ((0, 1, 1, 4, 4, 6), (2, 3, 1, 8)),
        ((0, 2, 4, 4, 4), (4, 0, 9, 0)),
        ((0, 2, 5), (1, 1, 2, 7)),
    ],
)
def test_starts_of_queries_that_are_good(starts, want):
    assert sparse_mla.split_decodes_and_prefills(starts, 9, decode_threshold=2) == want


@pytest.mark.parametrize("most", [0, 1, 7, INT32 - 1])
def test_requests_as_long_as_the_workspace(most):
    split = sparse_mla.split_prefill_chunks
    assert split([most, 0, most], most) == [(0, 2), (2, 3)][: 2 if most else 0] or most == 0
    if most < INT32 - 1:
        with refuses(
            f"split_prefill_chunks: `seq_lens` must fit the workspace of {most} tokens one by one, "
            f"got {most + 1} at request 1 (raise prefill_workspace_tokens)"
        ):
            split([most, most + 1], most)
    with refuses("split_prefill_chunks: `seq_lens` must be >= 0, got -1 at request 1"):
        split([0, -1], most)


def test_a_chunk_is_full_at_the_workspace_not_before():
    split = sparse_mla.split_prefill_chunks
    assert split([3, 4], 7) == [(0, 2)]
    assert split([3, 5], 7) == [(0, 1), (1, 2)]
    assert split([0, 0], 0) == [(0, 2)]


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [576, 656])
def test_names_of_formats(row):
    """All three names are known; names with a letter more or less or in capitals are not."""
    kv = zeros(1, row, dtype=BF16 if row == 576 else U8)
    good = ("auto", "bfloat16") if row == 576 else ("fp8_ds_mla", "fp8_token")
    for name in (*good, None):
        assert sparse_mla.dequantize_kv_cache(kv, kv_format=name).shape == (1, 576)
    names = ("auto", "bfloat16", *BYTE_FORMATS, "fp8_token")
    known = ", ".join(f'"{name}"' for name in names[:-1]) + f' or "{names[-1]}"'
    for name in names:
        for bad in {name[:-1], name + "x", name.upper(), ""} - {*names}:
            rule = f"must be {known}, got {bad!r}"
            with refuses(f"dequantize_kv_cache: `kv_format` {rule}"):
                sparse_mla.dequantize_kv_cache(kv, kv_format=bad)
    for name in {"bfloat16", "fp8_ds_mla"} - set(good):
        dtypes = "bfloat16" if name == "bfloat16" else listed(BYTES)
        got = "uint8" if row == 656 else "bfloat16"
        text = f"dequantize_kv_cache: `kv_cache` must be {dtypes} for format {name}, got {got}"
        with refuses(text, TypeError):
            sparse_mla.dequantize_kv_cache(kv, kv_format=name)


def test_names_of_result_dtypes():
    for name in ("float32", "bfloat16"):
        assert str(sparse_mla.dequantize_kv_cache(zeros(1, 576), dtype=name).dtype) == name
    for name in ("float16", "float3", "float322", "", np.float16, None):
        rule = f'must be "float32" or "bfloat16", got {name!r}'
        with refuses(f"dequantize_kv_cache: `dtype` {rule}"):
            sparse_mla.dequantize_kv_cache(zeros(1, 576), dtype=name)


@pytest.mark.parametrize("name", ["cuda:", "cuda:-1", "cuda:10000", "cuda:1x", "cuda1", "CPU", ""])
def test_names_of_devices(name):
    assert workspace_size() > 0, "on cpu"
    rule = f'must be "cpu", "cuda" or "cuda:N", got {name!r}'
    with refuses(f"attention_workspace_size: `device` {rule}"):
        sparse_mla.attention_workspace_size(1, 1, 1, device=name)
    with pytest.raises(RuntimeError, match=r"^attention_workspace_size: "):
        sparse_mla.attention_workspace_size(1, 1, 1, device="cuda:9999")


@pytest.mark.parametrize("device", [(1, 0), (1, 5), (3, 0), (13, 1)])
def test_memory_that_the_host_can_read_is_the_cpu_s(device):
    out, _ = sparse_mla.sparse_attention(
        zeros(1, 1, 576), zeros(1, 1, 576), Producer(int32([0]), device=device), softmax_scale=1.0
    )
    assert out.shape == (1, 1, 512)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ((2, 0), "cuda:0"),
        ((4, 0), "DLPack device type 4:0"),
        ((12, 1), "DLPack device type 12:1"),
    ],
)
def test_memory_that_it_cannot(device, name):
    with refuses(f"sparse_attention: `indices` must be on cpu like `q`, got {name}"):
        sparse_mla.sparse_attention(
            zeros(1, 1, 576),
            zeros(1, 1, 576),
            Producer(int32([0]), device=device),
            softmax_scale=1.0,
            stream=0,
        )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_pair_is_two(count):
    q, kv = (zeros(1, 1, 512), zeros(1, 1, 64), zeros(1, 1, 64)), zeros(1, 1, 576)
    for pair in (q[:2], list(q[:2])):
        sparse_mla.sparse_attention(pair, kv, int32([0]), softmax_scale=1.0)
    rule = f"must be an array or the pair (NoPE part, RoPE part), got {count} items"
    with refuses(f"sparse_attention: `q` {rule}", TypeError):
        sparse_mla.sparse_attention(q[:count], kv, int32([0]), softmax_scale=1.0)


def test_formats_of_buffers():
    """A buffer holds numbers in native byte order and has at most 8 dimensions."""
    quantize = sparse_mla.dynamic_per_tensor_quant
    quantize(memoryview(np.ones((1,) * 8, F32)))
    for prefix, buffer in {
        "": np.ones(2, F32),
        "@": memoryview(np.ones(2, F32)).cast("B").cast("@f"),
        "<": (ctypes.c_float.__ctype_le__ * 2)(1, 1),
    }.items():
        assert memoryview(buffer).format == f"{prefix}f"
        codes, scale = quantize(memoryview(buffer))
        assert codes.shape == (2,)
        assert np.asarray(scale) == F32(1) / F32(448)
    with refuses("dynamic_per_tensor_quant: `x` must have at most 8 dimensions, got 9"):
        quantize(memoryview(np.ones((1,) * 9, F32)))
    for bad in (np.ones(2, ">f4"), np.ones(2, "f4,f4"), memoryview(b"ab").cast("c")):
        text = memoryview(bad).format
        rule = f'must have a plain numeric format, got "{text}"'
        with refuses(f"dynamic_per_tensor_quant: `x` {rule}", TypeError):
            quantize(memoryview(bad))


# --- values in arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots(dtype):
    """The last slot and any negative one are accepted. The first slot past the end is refused, and
    nothing is written."""
    for shape in ((3, 4, 576), (12, 576), (3, 4, 1, 576)):
        cache = zeros(*shape)
        ones = np.ones((2, 512), F32), np.ones((2, 64), F32)
        least = np.iinfo(dtype).min
        sparse_mla.concat_and_cache_mla(*ones, cache, np.array([11, least], dtype))
        written = cache.reshape(12, 576).astype(F32).any(1)
        assert written.tolist() == [False] * 11 + [True]
        for slot in (12, np.iinfo(dtype).max):
            cache[...] = 0
            with refuses(
                "concat_and_cache_mla: `slot_mapping` must be below the 12 slots of `kv_cache`, "
                f"got {slot} at token 1"
            ):
                sparse_mla.concat_and_cache_mla(*ones, cache, np.array([3, slot], dtype))
            assert not cache.astype(F32).any()


def test_a_cache_without_slots_takes_no_token():
    ones = np.ones((1, 512), F32), np.ones((1, 64), F32)
    sparse_mla.concat_and_cache_mla(*ones, zeros(0, 4, 576), int32(-1))
    with refuses(
        "concat_and_cache_mla: `slot_mapping` must be below the 0 slots of `kv_cache`, got 0 at "
        "token 0"
    ):
        sparse_mla.concat_and_cache_mla(*ones, zeros(0, 4, 576), int32(0))


def gather(length=4, start=0, first=0, table=(1, 0), rows=8, **changes):
    """Gathers a request, behind one of length 0, from 2 pages of 4 ones; -> rows written."""
    cache = np.ones((2, 4, 576), F32).astype(BF16)
    out = zeros(rows, 576)
    arguments = {
        "block_table": int32([0] * len(table), table),
        "seq_lens": int32(0, length),
        "workspace_starts": int32(0, start),
        "seq_starts": int32(0, first),
    } | changes
    sparse_mla.gather_kv_cache(cache, **arguments, out=out)
    return out.astype(F32).any(1).nonzero()[0].tolist()


ROWS = "must keep every row inside the 8 rows of `out`, got rows {} to {} for request 1"
PAGES = "must name pages of the cache (0 to 1), got {} for request 1, block {}"


@pytest.mark.parametrize(
    ("good", "bad", "text"),
    [
        ({"length": 0}, {"length": -1}, "`seq_lens` must be >= 0, got -1 at request 1"),
        ({"first": 0}, {"first": -1}, "`seq_starts` must be >= 0, got -1 at request 1"),
        ({"start": 0}, {"start": -1}, f"`workspace_starts` {ROWS.format(-1, 3)}"),
        ({"start": 4}, {"start": 5}, f"`workspace_starts` {ROWS.format(5, 9)}"),
        (
            {"length": 8},
            {"length": INT32 - 1, "start": INT32 - 1},
            f"`workspace_starts` {ROWS.format(INT32 - 1, 2 * INT32 - 2)}",
        ),
        (
            {"length": 4, "first": 4},
            {"length": 4, "first": 5},
            "`block_table` must have at least 3 columns for request 1, got 2",
        ),
        (
            {"length": 8, "table": (0, 1)},
            {"length": 8, "table": (0,)},
            "`block_table` must have at least 2 columns for request 1, got 1",
        ),
        ({"table": (1, 2)}, {"table": (2, 0)}, f"`block_table` {PAGES.format(2, 0)}"),
        ({"table": (0, -1)}, {"table": (-1, 0)}, f"`block_table` {PAGES.format(-1, 0)}"),
        (
            {"table": (7, 1), "first": 4, "length": 4},
            {"table": (7, 1), "first": 3, "length": 4},
            f"`block_table` {PAGES.format(7, 0)}",
        ),
        (
            {"table": (1, 7), "length": 4},
            {"table": (1, 7), "length": 5},
            f"`block_table` {PAGES.format(7, 1)}",
        ),
        (
            {"length": 0, "start": -9, "first": -9, "table": (INT32 - 1,)},
            {"length": 1, "start": 0, "first": 0, "table": (INT32 - 1,)},
            f"`block_table` {PAGES.format(INT32 - 1, 0)}",
        ),
        (
            {"length": 0, "table": ()},
            {"length": 1, "table": ()},
            "`block_table` must have at least 1 columns for request 1, got 0",
        ),
    ],
)
def test_gathers(good, bad, text):
    options = {"length": 4, "start": 0} | good
    rows = range(options["start"], options["start"] + options["length"])
    assert gather(**good) == list(rows)
    with refuses(f"gather_kv_cache: {text}"):
        gather(**bad)


def test_requests_of_no_length_touch_nothing():
    """Table rows and starts of such requests may contain anything."""
    bad = {"block_table": int32([-5], [99]), "seq_lens": int32(0, 0)}
    starts = {"workspace_starts": int32(-7, 100), "seq_starts": int32(-1, INT32 - 1)}
    assert gather(**bad, **starts) == []
    assert gather(**bad, **starts, rows=0) == []


def test_positions():
    """Positions become slots, or rows of the workspace; what does not fit int32 becomes -1."""
    most = INT32 - 1
    assert convert((-1, 0, 2, 3, 4, most), [[5]], block_size=4) == [-1, 20, 22, 23, -1, -1]
    assert convert((0, 1, 2), [[0, -1, 3]], block_size=1) == [0, -1, 3]
    assert convert((0, 3), [[most // 4]], block_size=4) == [most - 3, most]
    assert convert((0,), [[most // 4 + 1]], block_size=4) == [-1]
    assert convert((0, 1, 2), [[most // 4 + 0, 9]], block_size=5) == [-1] * 3
    assert convert((0,), [[most]], block_size=1) == [most]
    assert convert((most - 1, most), [[0]], block_size=most) == [most - 1, -1]
    assert convert((0, 1, 2), [[0]], block_size=4, starts=(most - 1,)) == [most - 1, most, -1]
    assert convert((1,), [[0]], block_size=4, starts=(0,)) == [1]


def test_requests_and_prefills_of_positions():
    def run(ids=(0, 1), prefills=(-1, 0), starts=(3,)):
        return sparse_mla.convert_req_index_to_global_index(
            int32(*ids), int32([1], [0]), int32([0], [1]), block_size=2,
            prefill_request_ids=int32(*prefills), prefill_workspace_starts=int32(*starts),
        ).tolist()  # fmt: skip

    op = "convert_req_index_to_global_index"
    assert run() == [[2], [4]]
    assert run(prefills=(-INT32, 0)) == [[2], [4]]
    assert run(starts=(0, -1)) == [[2], [1]], "a start that nobody uses is not looked at"
    for bad in (-1, 2):
        with refuses(
            f"{op}: `req_id_per_token` must name a row of `block_table` (0 to 1), got {bad} at "
            "token 1"
        ):
            run(ids=(0, bad))
    with refuses(
        f"{op}: `prefill_request_ids` must name an entry of `prefill_workspace_starts` (0 to 0) or "
        "be -1, got 1 at token 1"
    ):
        run(prefills=(-1, 1))
    with refuses(f"{op}: `prefill_workspace_starts` must be >= 0, got -1 at entry 0"):
        run(starts=(-1,))
    with refuses(f"{op}: `prefill_workspace_starts` must be given, got none"):
        sparse_mla.convert_req_index_to_global_index(
            int32(0), int32([1]), int32([0]), block_size=2, prefill_request_ids=int32(0)
        )
    alone = sparse_mla.convert_req_index_to_global_index(
        int32(0), int32([1]), int32([0]), block_size=2, prefill_workspace_starts=int32(-5, 7)
    )
    assert alone.tolist() == [[2]], "starts without ids are checked for their type alone"


def test_indices_and_lengths_of_attention():
    """The last slot and the last column count as keys; what lies behind them does not."""
    kv = zeros(2, 3, 576)
    q = zeros(1, 1, 576)

    def keys(indices, length=None):
        length = None if length is None else int32(length)
        _, lse = sparse_mla.sparse_attention(
            q, kv, int32(indices), softmax_scale=1.0, topk_length=length
        )
        return round(float(np.exp(lse[0, 0])))

    assert keys([0, 5, 5]) == 3
    assert keys([0, 5, 6]) == 2
    assert keys([0, -1, INT32 - 1, -INT32]) == 1
    for length, want in ((0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (-1, 0), (INT32 - 1, 3)):
        assert keys([0, 1, 2], length) == want, length


def test_starts_of_requests_in_pages():
    """The CPU refuses starts that no batch has. Tokens behind the last start are left alone."""
    who = "mla_attention: `cu_seqlens_q` must"
    lens, table = (3, 5), ((0, 1, 2, 3, 4),) * 2
    lse = np.full((3, 1), 0.0, F32)

    def keys(*starts, **options):
        return attend_to_pages(3, 1, lens, table, cu_seqlens_q=int32(*starts), **options)

    assert keys(0, 1, 3) == [3, 5, 5]
    assert keys(0, 0, 3, causal=True) == [3, 4, 5]
    assert keys(0, 3, 3, causal=True) == [1, 2, 3]
    assert keys(0, 1, 2, lse=lse) == [3, 5, 1]
    assert lse[2, 0] == 0, "a token of no request was written"
    for starts, got in (((1, 2, 3), "1 at 0"), ((-1, 2, 3), "-1 at 0"), ((0, 2, 1), "1 at 2")):
        with refuses(f"{who} begin with 0 and never fall, got {got}"):
            keys(*starts)
    with refuses(f"{who} end at most at the 3 tokens of `q`, got 4"):
        keys(0, 1, 4)
    with refuses(f"{who} have shape [3], got [2]: one entry more than `cache_seqlens`"):
        keys(0, 3)


def test_lengths_and_tables_of_pages():
    """A length below 0 is none. Entries that name no page, and the end of a row, hide keys."""
    most = INT32 - 1
    for length, want in ((-INT32, 0), (-1, 0), (0, 0), (1, 1), (6, 6), (7, 6), (most, 6)):
        assert attend_to_pages(1, 1, (length,), ((0, 1),), 3) == [want], length
    for page, want in ((-INT32, 3), (-1, 3), (0, 6), (8, 6), (9, 3), (most, 3)):
        assert attend_to_pages(1, 1, (6,), ((1, page),), 3) == [want], page
    for slot, want in ((-1, 1), (26, 2), (27, 1), (most, 1)):
        slots = {"slot_table": int32([0, slot])}
        assert attend_to_pages(1, 1, (2,), None, 3, **slots) == [want], slot
    who = "mla_attention: `block_table` must be given, or `slot_table` in its place, got"
    with refuses(f"{who} neither"):
        attend_to_pages(table=None)
    with refuses(f"{who} both"):
        attend_to_pages(slot_table=int32([0]))


@pytest.mark.parametrize("given", ["extra_indices", "extra_topk_length", "both", "extra_kv_cache"])
def test_extra_lists_are_whole(given):
    extra = {
        "extra_kv_cache": zeros(1, 1, 576),
        "extra_indices": int32([0]),
        "extra_topk_length": int32(1),
    }
    attend(**extra)
    attend(**{n: x for n, x in extra.items() if n != "extra_topk_length"})
    names = ("extra_indices", "extra_topk_length") if given == "both" else (given,)
    missing = "extra_indices" if given == "extra_kv_cache" else "extra_kv_cache"
    with refuses(f"sparse_attention: `{missing}` must be given, got none"):
        attend(**{n: extra[n] for n in names})
    with refuses("sparse_attention: `extra_indices` must be given, got none"):
        attend(extra_kv_cache=extra["extra_kv_cache"], extra_topk_length=extra["extra_topk_length"])


def test_a_square_weight_is_read_as_it_lies():
    """[512, 512] could be stored either way; it is read with latents as rows."""
    weight = cases.random_bf16(np.random.default_rng(0), 512, 512)
    sizes = {"num_heads": 2, "qk_nope_head_dim": 100, "v_head_dim": 156}
    parts = weight.reshape(512, 2, 256)
    for stored in (weight, np.asfortranarray(weight)):
        w_uk, w_uv = sparse_mla.split_kv_b_proj(stored, **sizes)
        assert bytes_of(w_uk) == bytes_of(parts[..., :100])
        assert bytes_of(w_uv) == bytes_of(parts[..., 100:])
    codes = np.full((512, 512), 0x38, U8)  # ones
    scale = np.arange(16, dtype=F32).reshape(4, 4)
    w_uk, w_uv = sparse_mla.split_kv_b_proj(codes, **sizes, weight_scale_inv=scale)
    got = np.concatenate([w_uk, w_uv], axis=2).reshape(512, 512).astype(F32)
    assert np.array_equal(got, np.kron(scale, np.ones((128, 128))))


@pytest.mark.parametrize("shape", [(512, 128), (512, 129), (128, 512), (129, 512), (512, 1)])
def test_scales_are_one_per_block(shape):
    columns = next((n for n in shape if n != 512), 512)
    blocks = tuple(-(-n // 128) for n in shape)
    sizes = {"num_heads": 1, "qk_nope_head_dim": 1, "v_head_dim": columns - 1}
    if columns == 1:
        shape, blocks, sizes["v_head_dim"] = (512, 2), (4, 1), 1
    codes = np.full(shape, 0x38, U8)
    sparse_mla.split_kv_b_proj(codes, **sizes, weight_scale_inv=np.ones(blocks, F32))
    for d, by in ((0, 1), (0, -1), (1, 1), (1, -1)):
        bad = tuple(n + by * (i == d) for i, n in enumerate(blocks))
        rule = f"must have shape {list(blocks)}, got {list(bad)}"
        with refuses(f"split_kv_b_proj: `weight_scale_inv` {rule}"):
            sparse_mla.split_kv_b_proj(codes, **sizes, weight_scale_inv=np.ones(bad, F32))


def test_a_weight_fits_its_numbers():
    split_weight((512, 3))
    split_weight((3, 512))
    for shape in ((512, 2), (512, 4), (511, 3), (513, 3), (2, 512), (4, 512), (3, 511), (3, 513)):
        rule = f"must have shape [512, 3] or [3, 512] (1 heads x (1 + 2)), got {list(shape)}"
        with refuses(f"split_kv_b_proj: `weight` {rule}"):
            split_weight(shape)


# --- memory --------------------------------------------------------------------------------------


def put(raw: np.ndarray, start: int, x: np.ndarray) -> np.ndarray:
    view = np.ndarray(x.shape, x.dtype, raw, start)
    view[...] = x
    return view


PAIRS = [
    pytest.param(row, out, other, id=f"{title}: {out}, {other}")
    for title, row in TABLE.items()
    for out, rules in row.rules.items()
    for other, other_rules in row.rules.items()
    if "written" in rules and out != other and "host" not in other_rules
]


@pytest.mark.parametrize(("row", "out", "other"), PAIRS)
def test_neighbours_and_overlaps(row, out, other):
    """Two arrays end to end, in either order, give the result of separate arrays. One element
    closer, which is one byte if one of them holds bytes, they are refused."""
    example = row.example
    want = outcome_of(example, {n: x.copy() for n, x in example.arrays.items()})
    x, y = example.arrays[out], example.arrays[other]
    step, other_step = unit_of(x, row.rules[out]), unit_of(y, row.rules[other])
    names = [n for n in row.rules if n in (out, other)]
    both = "written" in row.rules[other]
    first, second = (out, other)
    if both and names[0] == other:
        first, second = other, out
    may_be = first == f"{second.removesuffix('_pe')}_out"
    may_be |= row.op == "merge_attn_states" and second in (f"{first}_a", f"{first}_b")
    rule = "be the whole of or not overlap" if may_be else "not overlap"
    text = f"{error_op(row)}: `{first}` must {rule} `{second}`, got arrays that share memory"
    raw = np.full(x.nbytes + y.nbytes + 256, RED, U8)
    for closer in (0, min(step, other_step)):
        for other_is_in_front in (True, False):
            sizes = (y.nbytes, x.nbytes) if other_is_in_front else (x.nbytes, y.nbytes)
            middle = -(-sizes[0] // 64) * 64 + (-raw.ctypes.data) % 64
            low, high = middle - sizes[0], middle
            # the array with the smaller step moves, so that both stay aligned
            moves_low = (other_step <= step) == other_is_in_front
            low, high = (low + closer, high) if moves_low else (low, high - closer)
            raw[:] = RED
            given = {n: a.copy() for n, a in example.arrays.items()}
            starts = (high, low) if other_is_in_front else (low, high)
            given[out], given[other] = put(raw, starts[0], x), put(raw, starts[1], y)
            before = raw.copy()
            got = outcome_of(example, given)
            if closer:
                assert got == Refused(ValueError, text)
                assert np.array_equal(raw, before), "written"
            else:
                assert got == want
                outside = np.ones(raw.size, bool)
                outside[low : middle + sizes[1]] = False
                assert (raw[outside] == RED).all()


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
def test_columns_of_one_buffer(shift):
    """Rows of x and of out alternate: x has the first 10 bytes of every 16, out has 5 others."""
    raw = np.zeros(16 * 4, U8)
    x = np.ndarray((3, 5), F16, raw, 0, (16, 2))
    x[...] = np.arange(15).reshape(3, 5)
    want, _ = sparse_mla.dynamic_per_tensor_quant(x.copy(), out=np.zeros((3, 5), U8))
    start = 10 + shift
    out = np.ndarray((3, 5), U8, raw, start, (16, 1))
    if 10 <= start <= 11:
        sparse_mla.dynamic_per_tensor_quant(x, out=out)
        assert np.array_equal(out, want)
    else:
        with refuses(
            "dynamic_per_tensor_quant: `out` must not overlap `x`, got arrays that share memory"
        ):
            sparse_mla.dynamic_per_tensor_quant(x, out=out)


@pytest.mark.parametrize("stride", [4, 5, 6])
def test_rows_that_reach_into_the_next(stride):
    raw = np.full(64, RED, U8)
    out = np.ndarray((3, 5), U8, raw, 8, (stride, 1))
    x = np.ones((3, 5), F32)
    if stride >= 5:
        sparse_mla.dynamic_per_tensor_quant(x, out=out)
        assert (out == 0x7E).all()
        assert (raw == 0x7E).sum() == 15
    else:
        with refuses(
            "dynamic_per_tensor_quant: `out` must have elements that do not overlap (it is "
            "written), got strides that reach back"
        ):
            sparse_mla.dynamic_per_tensor_quant(x, out=out)
        assert (raw == RED).all()


@pytest.mark.parametrize(
    "argument", ["kv_cache", "q", "indices", "topk_length", "attn_sink", "out"]
)
def test_an_argument_as_workspace(argument):
    """The array is large enough for a workspace, but the call uses it otherwise."""
    kv = np.zeros((4096, 576), BF16)
    arrays = {
        "q": np.zeros((256, 2, 576), BF16),
        "indices": np.zeros((256, 600), np.int32),
        "topk_length": np.zeros(2**17, np.int32)[::512],
        "attn_sink": np.zeros(2**17, F32)[:: 2**16],
        "out": np.zeros((256, 2, 512), BF16),
    }
    whole = {n: x.base if x.base is not None else x for n, x in (arrays | {"kv_cache": kv}).items()}
    workspace = whole[argument].reshape(-1).view(U8)
    size = sparse_mla.attention_workspace_size(256, 2, 600, device="cpu")
    assert workspace.size >= 2**19 or size < workspace.size
    first, second = ("out", "workspace") if argument == "out" else ("workspace", argument)
    with refuses(
        f"sparse_attention: `{first}` must not overlap `{second}`, got arrays that share memory"
    ):
        sparse_mla.sparse_attention(
            arrays.pop("q"), kv, arrays.pop("indices"), **arrays, softmax_scale=1.0,
            workspace=workspace,
        )  # fmt: skip
    assert not workspace.any()


def at_offset(size: int, offset: int, dtype=U8) -> np.ndarray:
    raw = np.zeros(size + 128, U8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + size].view(dtype)


@pytest.mark.parametrize("offset", [0, 1, 63])
@pytest.mark.parametrize(("T", "H", "splits"), [(1, 1, 1), (2, 17, 3), (70, 3, 2), (2, 128, 64)])
def test_workspace_bytes(T, H, splits, offset):
    """The error names the least size in which one thread can run, from the next multiple of 64 on;
    one byte less is refused. What attention_workspace_size returns is enough at any address."""
    case = cases.AttentionCase(T, H, 40, num_splits=splits, pages=1).make()
    want = case.run(sparse_mla.sparse_attention)

    def run(size: int, dtype=U8, at=offset):
        return case.run(sparse_mla.sparse_attention, workspace=at_offset(size, at, dtype))

    with pytest.raises(
        ValueError, match=r"`workspace` must have at least \d+ bytes, got 1$"
    ) as info:
        run(1, at=0)
    least = int(re.findall(r"\d+", str(info.value))[0]) + -offset % 64
    with refuses(
        f"sparse_attention: `workspace` must have at least {least} bytes, got {least - 1}"
    ):
        run(least - 1)
    told = sparse_mla.attention_workspace_size(T, H, 40, num_splits=splits, device="cpu")
    assert least <= told
    for got in (run(least), run(told), run(least, np.int8)):
        assert frozen(got, {}) == frozen(want, {})


def test_nothing_needs_no_workspace():
    assert sparse_mla.attention_workspace_size(0, 4, 9, device="cpu") == 0
    assert sparse_mla.attention_workspace_size(1, 4, 9, device="cpu") > 0
    attend(T=0, workspace=zeros(0, dtype=U8))
    attend(T=0, K=0)


def cache_of(stride: int, negative=False) -> Any:
    """A cache of two pages that are `stride` bytes apart; there is no memory for the second."""
    page = np.zeros((2, 4, 656), U8)
    return Producer(page, strides=[-stride if negative else stride, 656, 1])


def attend_to(kv):
    return sparse_mla.sparse_attention(zeros(1, 1, 576), kv, int32([0, 3]), softmax_scale=1.0)


def test_the_end_of_the_address_space():
    """An array may span 2^57 bytes at most and must not reach below address 0."""
    rule = "sparse_attention: `kv_cache` must fit in the address space with its strides, got shape"
    attend_to(cache_of(2**57 - 4 * 656))
    with refuses(f"{rule} [2, 4, 656]"):
        attend_to(cache_of(2**57 - 4 * 656 + 16))
    below = cache_of(16, negative=True)
    address = below.array.ctypes.data & -16
    assert address == below.array.ctypes.data, "or the stride would not be one of 16 bytes"
    below.strides[0] = -address
    attend_to(below)
    below.strides[0] = -address - 16
    with refuses(f"{rule} [2, 4, 656]"):
        attend_to(below)
    with refuses(f"{rule} [2, 4, 656]"):
        attend_to(cache_of(2**62))


def test_sizes_and_memory_of_capsules():
    """Only an empty array may have a null pointer; a negative size is refused."""
    kv = np.zeros((1, 4, 656), U8)
    q, none = zeros(1, 1, 576), Producer(np.zeros((1, 0), np.int32), fields={"data": None})
    out, lse = sparse_mla.sparse_attention(q, kv, none, softmax_scale=1.0)
    assert (lse == -np.inf).all() and not out.astype(F32).any()
    some = Producer(np.zeros((1, 1), np.int32), fields={"data": None})
    with refuses("sparse_attention: `indices` must have memory, got a null pointer"):
        sparse_mla.sparse_attention(q, kv, some, softmax_scale=1.0)

    class Negative(Producer):
        def capsule(self, versioned):
            made = super().capsule(versioned)
            shape = next(x[2] for x in dlpack_producer._alive.values() if x[0] is self)
            shape[1] = -1
            return made

    with refuses("sparse_attention: `indices` must have sizes >= 0, got shape [1, -1]"):
        sparse_mla.sparse_attention(q, kv, Negative(np.zeros((1, 1), np.int32)), softmax_scale=1.0)


# --- the backend layer ---------------------------------------------------------------------------

LIMITS = {
    "num_heads": 2,
    "block_size": 4,
    "topk_tokens": 6,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 8,
    "max_model_len": 16,
    "decode_threshold": 1,
    "min_heads_for_bf16_prefill": 32,
    "prefill_workspace_tokens": 0,
}


def builder(path=None, dtype="fp8_ds_mla", workspace=None, device="cpu", **changes):
    names = {"kv_cache_dtype": dtype, "path": path, "device": device}
    return _C.Step("v32", LIMITS | names | changes, workspace)


def test_a_builder_takes_all_fields_of_its_config():
    config = LIMITS | {"kv_cache_dtype": "fp8_ds_mla", "path": None, "device": "cpu"}
    _C.Step("v32", config | {"more": 1}, None)
    for name in config:
        rule = f"`config` must have a value of '{name}', got none"
        with refuses(f"MetadataBuilder: {rule}", TypeError):
            _C.Step("v32", {key: x for key, x in config.items() if key != name}, None)
    with refuses('MetadataBuilder: `plan` must be a plan of a step, got "v31"'):
        _C.Step("v31", config, None)


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_of_a_builder(name):
    most = 128 if name == "num_heads" else INT32 - 1
    zero_is_default = name in (
        "decode_threshold",
        "min_heads_for_bf16_prefill",
        "prefill_workspace_tokens",
    )
    builder(**{name: 1})
    with refuses(f"MetadataBuilder: `{name}` must be an int, got str", TypeError):
        builder(**{name: "3"})
    for value in (-1, most + 1) if zero_is_default else (0, most + 1):
        with refuses(f"MetadataBuilder: `{name}` must be 1 to {most}, got {value}"):
            builder(**{name: value})
    if zero_is_default:
        builder(**{name: 0})
    if name in ("num_heads", "block_size", "max_model_len", "decode_threshold") or zero_is_default:
        builder("mixed", **{name: most})


@pytest.mark.parametrize("name", [n for n in LIMITS if n != "num_heads"])
def test_sizes_of_a_config(name):
    sizes = {n: x for n, x in LIMITS.items() if n != "prefill_workspace_tokens"}

    def config(**changes):
        return sparse_mla.Config(softmax_scale=1.0, **(sizes | changes))

    assert getattr(config(**{name: 1}), name) == 1
    with refuses(f"Config: `{name}` must be at least 1, got 0"):
        config(**{name: 0})
    for heads in (1, 128):
        config(num_heads=heads)
    for heads in (0, 129):
        with refuses(f"Config: `num_heads` must be 1 to 128, got {heads}"):
            config(num_heads=heads)


PATHS = {"fp8_ds_mla": ("mixed", "separate", "direct"), "bfloat16": ("bf16",)}


@pytest.mark.parametrize("dtype", PATHS)
def test_paths_serve_their_caches(dtype):
    for path in ("mixed", "separate", "direct", "bf16"):
        if path in PATHS[dtype]:
            builder(path, dtype)
            continue
        served = '"mixed", "separate" or "direct"' if dtype == "fp8_ds_mla" else '"bf16"'
        rule = f'must serve a {dtype} cache ({served}), got "{path}"'
        with refuses(f"MetadataBuilder: `path` {rule}"):
            builder(path, dtype)
    for bad in ("mixe", "mixedd", "auto", "", 1):
        names = '"mixed", "separate", "bf16" or "direct"'
        with refuses(f"MetadataBuilder: `path` must be None, {names}, got {bad!r}"):
            builder(bad, dtype)
    with refuses("MetadataBuilder: `kv_format` must be a known cache format, got 0"):
        builder(None, None)


@pytest.mark.parametrize(("heads", "path"), [(31, "mixed"), (32, "separate"), (33, "separate")])
def test_heads_that_choose_the_path(heads, path):
    for least, moved in ((0, 0), (32, 0), (heads, None), (heads + 1, None)):
        made = builder(num_heads=heads, min_heads_for_bf16_prefill=least)
        plan = compiled.build(made, [0, 1], [1], np.zeros((1, 1), np.int32), 1, 1)
        wanted = path if moved == 0 else ("separate" if least == heads else "mixed")
        assert plan["path"] == wanted


def test_a_workspace_of_the_caller():
    """The workspace needs prefill_workspace_tokens rows, one at least; for 0 it is used in full."""
    for rows, asked, tokens in ((5, 5, 5), (6, 5, 5), (5, 0, 5), (1, 0, 1)):
        made = builder("separate", workspace=zeros(rows, 576), prefill_workspace_tokens=asked)
        assert made.workspace_bytes == tokens * 1152
    for rows, asked, least in ((4, 5, 5), (0, 0, 1)):
        rule = f"must have shape [>= {least}, 576], got [{rows}, 576]"
        with refuses(f"MetadataBuilder: `workspace` {rule}"):
            builder("separate", workspace=zeros(rows, 576), prefill_workspace_tokens=asked)


def build(lens=(1, 1), seq_lens=None, *, tokens=None, table=(3, 4), num_reqs=None, **options):
    starts = [0, *np.cumsum(lens).tolist()]
    seq_lens = list(lens) if seq_lens is None else seq_lens
    made = builder(**({"path": "separate"} | options))
    num_reqs = len(lens) if num_reqs is None else num_reqs
    tokens = starts[-1] if tokens is None else tokens
    return compiled.build(made, starts, seq_lens, np.zeros(table, np.int32), num_reqs, tokens)


BUILDS = {
    # what: (good, bad, text)
    "requests": (
        {"lens": (1, 1, 1)},
        {"lens": (1, 1, 1, 1), "table": (4, 4)},
        "`num_reqs` must be 0 to max_num_seqs = 3, got 4",
    ),
    "tokens": (
        {"tokens": 8},
        {"tokens": 9},
        "`num_actual_tokens` must be 0 to max_num_batched_tokens = 8, got 9",
    ),
    "tokens below 0": (
        {"lens": (), "tokens": 0},
        {"lens": (), "tokens": -1},
        "`num_actual_tokens` must be 0 to max_num_batched_tokens = 8, got -1",
    ),
    "tokens without requests": (
        {"lens": (), "tokens": 0},
        {"lens": (), "tokens": 1},
        "`num_actual_tokens` must be 0 without requests, got 1",
    ),
    "tokens of the queries": (
        {"tokens": 2},
        {"tokens": 1},
        "`num_actual_tokens` must be at least query_start_loc[-1] = 2, got 1",
    ),
    "rows of the table": (
        {"table": (2, 4)},
        {"table": (1, 4)},
        "`block_table` must have shape [>= 2, any], got [1, 4]: a row of page numbers per request",
    ),
    "columns of the table": (
        {"seq_lens": (8, 1), "table": (2, 2)},
        {"seq_lens": (9, 1), "table": (2, 2)},
        "`block_table` must have at least 3 columns for the 9 tokens of request 0, got 2",
    ),
    "a sequence as short as its query": (
        {"lens": (1, 3), "seq_lens": (1, 3)},
        {"lens": (1, 3), "seq_lens": (1, 2)},
        "`seq_lens` must be query length to max_model_len (3 to 16) at request 1, got 2: context "
        "and query together",
    ),
    "the longest sequence": (
        {"seq_lens": (1, 16)},
        {"seq_lens": (1, 17), "table": (2, 9)},
        "`seq_lens` must be query length to max_model_len (1 to 16) at request 1, got 17: context "
        "and query together",
    ),
    "decodes first": (
        {"lens": (1, 2, 2), "seq_lens": (4, 4, 4)},
        {"lens": (2, 1), "seq_lens": (4, 4)},
        "`query_start_loc` must have decodes (at most 1 tokens) before prefills, got 1 tokens at "
        "request 1 behind a prefill: sort the batch by query length",
    ),
    "entries of the lengths": (
        {},
        {"seq_lens": (1,)},
        "`seq_lens_cpu` must be of the 2 requests of `num_reqs`, got those of 1",
    ),
    "entries of the starts": (
        {},
        {"num_reqs": 1},
        "`query_start_loc_cpu` must be of the 1 requests of `num_reqs`, got those of 2",
    ),
}


@pytest.mark.parametrize("what", BUILDS)
def test_steps(what):
    good, bad, text = BUILDS[what]
    build(**good)
    with refuses(f"MetadataBuilder.build: {text}"):
        build(**bad)


def test_a_prefill_as_long_as_the_workspace():
    options = {"lens": (1, 4), "prefill_workspace_tokens": 9}
    assert build(seq_lens=(16, 9), **options)["chunks"] == [(0, 1, 1, 5, 9)]
    with refuses(
        "MetadataBuilder.build: `seq_lens` must fit the workspace of 9 tokens one by one, got 10 "
        "at request 1 (raise prefill_workspace_tokens)"
    ):
        build(seq_lens=(16, 10), **options)


FORWARDS = {
    # what: (accepted arrays, refused arrays, error text)
    "columns of topk": (
        lambda a: {"topk_indices": np.repeat(a["topk_indices"], 2, 1)[:, :6]},
        lambda a: {"topk_indices": np.repeat(a["topk_indices"], 2, 1)[:, :7]},
        "`topk_indices` must have at most topk_tokens = 6 columns, got 7",
    ),
    "tokens of q": (
        lambda a: {"q": a["q"][[*range(7), 0]]},
        lambda a: {"q": a["q"][:6], "out": None, "lse": None},
        "`q` must have shape [>= 7, 2, 576], got [6, 2, 576]: tokens, heads, 512 latent and 64 "
        "RoPE values",
    ),
    "tokens of topk": (
        lambda a: {"topk_indices": a["topk_indices"][[*range(7), 0]]},
        lambda a: {"topk_indices": a["topk_indices"][:6]},
        "`topk_indices` must have shape [>= 7, any], got [6, 6]",
    ),
    "rows of out": (
        lambda a: {"out": zeros(8, 2, 512)},
        lambda a: {"out": zeros(6, 2, 512)},
        "`out` must have shape [>= 7, 2, 512], got [6, 2, 512]",
    ),
    "rows of lse": (
        lambda a: {"lse": zeros(8, 2, dtype=F32)},
        lambda a: {"lse": zeros(6, 2, dtype=F32)},
        "`lse` must have shape [>= 7, 2], got [6, 2]",
    ),
    "heads of lse": (
        lambda a: {"lse": zeros(7, 2, dtype=F32)},
        lambda a: {"lse": zeros(7, 3, dtype=F32)},
        "`lse` must have shape [>= 7, 2], got [7, 3]",
    ),
    "sinks": (
        lambda a: {"attn_sink": None},
        lambda a: {"attn_sink": zeros(3, dtype=F32)},
        "`attn_sink` must have shape [2], got [3]",
    ),
    "tokens per page": (
        lambda a: {"kv_cache": a["kv_cache"][:, :4]},
        lambda a: {"kv_cache": a["kv_cache"][:, :3]},
        "`kv_cache` must have pages of block_size = 4 tokens, got 3",
    ),
}


@pytest.mark.parametrize("title", ["step, separate", "step, direct", "step, bf16"])
@pytest.mark.parametrize("what", FORWARDS)
def test_forwards(what, title):
    good, bad, text = FORWARDS[what]
    example = TABLE[title].example

    def fresh():
        return {n: x.copy() for n, x in example.arrays.items()}

    got = outcome_of(example, fresh() | good(example.arrays))
    assert not isinstance(got, Refused), got
    got = outcome_of(example, fresh() | bad(example.arrays))
    assert got == Refused(ValueError, f"forward: {text}")


def test_a_step_is_the_latest_one():
    example = engine.make_step(cases.make_batch([1], [4], block_size=4), 2, topk=6)
    made = builder("mixed")
    batch = example.batch
    plans = [
        compiled.build(made, batch.query_start_loc, batch.seq_lens, batch.block_table, 1, 1)
        for _ in range(2)
    ]
    arguments = (example.q, example.fp8_cache, example.topk_indices, None, None, None)
    assert [plan["generation"] for plan in plans] == [1, 2]
    for bad in (1, 3):
        rule = "must come from its builder's latest build (number 2), got that of build"
        with refuses(f"forward: `metadata` {rule} {bad}"):
            compiled.forward(made, *arguments, 0.1, bad, None)
    for scale in (np.inf, HALF_STEP):
        with refuses(f"forward: `softmax_scale` must be finite, got {scale:g}"):
            compiled.forward(made, *arguments, scale, 2, None)
    with refuses("forward: `softmax_scale` must be at most 2.35866e+38 in size, got 2.35866e+38"):
        compiled.forward(made, *arguments, HALF_FACTOR, 2, None)
    compiled.forward(made, *arguments, np.nextafter(HALF_FACTOR, 0), 2, None)
    compiled.forward(made, *arguments, 0.1, 2, None)
