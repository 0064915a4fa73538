"""Every dtype for every array of every operator: accepted, or refused with exactly the text that
names those it takes (csrc/core/rule.c, kv_rule.c).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import reference as ref
from bounds import (
    BF16,
    BYTES,
    INT32,
    INT64,
    SCALES,
    byte_rows,
    known_formats,
    listed,
    others_are_untouched,
    refuses,
)
from example import F16, F32, U8, Example
from example_table import DEVICE_ARRAYS, TABLE, Calls, Refused

import sparse_mla

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
NO_NAMES = (
    np.clongdouble,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.int4,
    ">i4",
    ">f4",
    "M8[s]",
)
BF16_HINT = ": nothing is cast here (bfloat16 in NumPy is ml_dtypes.bfloat16)"
BITS_HINT = ": view the bits as bfloat16 (ml_dtypes.bfloat16 in NumPy)"
ATTEND_HEADS = ("varlen_attention", "paged_attention")
# What operators over keys and values of heads take, beside a query of bf16 or e4m3.
HALVES = {
    "q": ("bfloat16", "float16", "uint8", "float8_e4m3fn"),
    "k[0]": ("bfloat16", "uint8", "float8_e4m3fn"),
    "v": ("uint8", "float8_e4m3fn"),
    "out": ("bfloat16", "float32"),
    "workspace": ("uint8", "int8"),
}
HALVES |= {"q[0]": HALVES["q"], "k": HALVES["q"], "v_cache": HALVES["v"]}


def dtypes_of(example: Example, name: str) -> tuple[str, ...]:
    """The dtypes that the docstrings of sparse_mla.ops allow for an array."""
    if name in ("slot_mapping", "kv_slot_mapping", "positions", "src_slots", "dst_slots"):
        return ("int32", "int64")
    if example.op in ("_absorb_q_proj", "_absorb_o_proj") and name not in SCALES:
        floats = ("bfloat16", "float16", "float32")
        return floats if name.startswith("W_") else (*floats, "uint8", "float8_e4m3fn")
    if name == "kv_c" and example.op != "concat_and_cache_mla":
        return tuple(n for n, dtype in NAMED.items() if dtype == example.arrays[name].dtype)
    if example.op == "reshape_and_cache" and name == "k_cache":
        kinds = (example.arrays["k"].dtype, np.dtype(U8), ref.E4M3)
        return tuple(n for n, dtype in NAMED.items() if dtype in kinds)
    if example.op == "reshape_and_cache" and name == "v_cache" and "v_scale" in example.rules:
        return HALVES[name]
    if example.op in ATTEND_HEADS and name == "k_cache":
        return HALVES["k" if "v_descale" in example.rules else "k[0]"]
    if example.op in ATTEND_HEADS and name in HALVES:
        is_bf16 = name in ("v", "v_cache") and "v_descale" not in example.rules
        return ("bfloat16",) if is_bf16 else HALVES[name]
    if example.op in ("indexer_logits", "lightning_indexer") and name == "q_scale":
        return ("uint8",)
    if example.op in ("indexer_logits", "lightning_indexer") and name in ("q", "k_cache[0]"):
        return (
            ("uint8",) if name == "q" and "q_scale" in example.rules else ("uint8", "float8_e4m3fn")
        )
    if example.op == "indexer_logits" and name == "out":
        return ("bfloat16", "float32")
    if name == "weights" and example.op == "fused_indexer_q_rope_quant":
        return ("bfloat16", "float32")
    if name == "out" and example.op == "fused_indexer_q_rope_quant":
        return ("uint8",) if "out_scale" in example.rules else ("uint8", "float8_e4m3fn")
    if example.op == "grouped_output_projection":
        kinds = {"o": ("bfloat16", "uint8", "float8_e4m3fn"), "o_scale": ("float32", "int32")}
        if name == "weight" and example.arrays[name].dtype != BF16:
            return ("uint8", "float8_e4m3fn")
        if name in kinds:
            return kinds[name]
    elif example.op == "fp8_linear" and name in ("weight", "workspace"):
        return ("uint8", "float8_e4m3fn" if name == "weight" else "int8")
    elif name in ("kv_c", "k", "weight") or (name == "x" and "quant" in example.op):
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
    if name == "query" or (name == "q" and "q_scale" in example.rules):
        return ("bfloat16", "uint8", "float8_e4m3fn")
    if name == "q_out" and "q_scale_inv" in example.rules:
        return ("uint8", "float8_e4m3fn")
    ops = ("sparse_attention", "mla_attention", "lightning_indexer")
    if name == "workspace_buffer" or (name == "workspace" and example.declared in ops):
        return ("uint8", "int8")
    if name == "out" and example.op in ("dynamic_per_tensor_quant", "scaled_quantize"):
        return ("uint8", "float8_e4m3fn")
    if name == "is_valid":
        return ("uint8", "bool")
    if name in ("out_a", "outs"):
        return ("bfloat16", "float16", "float32")
    if example.op == "merge_attn_partials" and name == "out":
        outs = example.arrays["outs"].dtype
        return ("bfloat16",) if outs == BF16 else ("bfloat16", "float16", "float32")
    if name in ("q_weight", "kv_weight", "norm_weight", "logits", "q_pe") or (
        (example.op, name) == ("top_k_merge", "values")
    ):
        return ("bfloat16", "float32")
    if name == "rope_table" and "q_pe" in example.rules:
        return ("bfloat16", "float32")
    if name == "kv" and "ape" in example.rules:
        return ("bfloat16", "float32")
    if name == "out" and "out_scale" in example.rules:
        return ("uint8", "float8_e4m3fn")
    plain = example.arrays[name].dtype
    return tuple(n for n, dtype in NAMED.items() if dtype == plain)


def is_e4m3_of_576(example: Example, name: str, dtype: str) -> bool:
    """Whether a cache of bf16 values would be one of as many e4m3 values in this dtype."""
    x = example.arrays[name]
    return example.is_cache(name) and x.dtype == BF16 and x.shape[-1] == 576 and dtype in BYTES


def wrong_dtype(example: Example, name: str, dtype: str) -> tuple[type, str]:
    """The error for an array of this dtype."""
    wanted = dtypes_of(example, name)
    who = f"{example.blames(name)}: `{name}` must"
    if example.is_cache(name):
        x = example.arrays[name]
        fp8 = x.dtype != BF16
        if example.op == "forward":  # the cache format is the builder's
            formats = (
                f"{listed(BYTES)} for format fp8_ds_mla" if fp8 else "bfloat16 for format bfloat16"
            )
            return TypeError, f"{who} be {formats}, got {dtype}"
        if example.op == "indexer_k_quant_and_cache":  # this call names the format
            return TypeError, f"{who} be {listed(BYTES)} for format fp8_index, got {dtype}"
        scale = {"extra_kv_cache": "extra_kv_scale"}.get(name, "kv_scale")
        scale = "bmm2_scale" if example.op == "sparse_mla_dsv4" else scale
        if dtype == "bfloat16" and scale in example.rules:  # 512 values, as there were 512 bytes
            rule = "be left out for format bfloat16, which has no scale of the whole cache"
            return (
                ValueError,
                f"{example.blames(name)}: `{scale}` must {rule}, got an array",
            )
        bf16, byte_formats = known_formats(example.op, name)
        if is_e4m3_of_576(example, name, dtype):
            takes = f"bfloat16 or {' or '.join(byte_formats)}"
            rule = f"be of a format that this operator takes ({takes}), got fp8_e4m3"
            return ValueError, f"{who} {rule}"
        if dtype in ("bfloat16", *BYTES):
            rows = f"{bf16} for format bfloat16" if fp8 else byte_rows(example.op, name)
            return ValueError, f"{who} have a last dimension of {rows}, got shape {list(x.shape)}"
        known = " or ".join(f"{name}, {row}" for name, row in byte_formats.items())
        known = f"bfloat16 ({bf16} values a token), or {listed(BYTES)} ({known} bytes a token)"
        return TypeError, f"{who} be {known}, got {dtype}"
    hint = ""
    if wanted == ("bfloat16",):
        hint = BITS_HINT if dtype in ("int16", "uint16") else BF16_HINT
        if example.blames(name) == "MetadataBuilder":
            hint = hint.partition(" (")[0]
    elif wanted == ("int32",):
        hint = ": nothing is cast here, make it int32"
    return TypeError, f"{who} be {listed(wanted)}, got {dtype}{hint}"


def follows(example: Example, name: str, dtype: str) -> tuple[type, str] | None:
    """The error if a valid dtype does not fit another argument, or None."""
    partners = {"kv_c": "k_pe", "q_pe": "k_pe", "out_a": "out_b", "logits": "values"}
    other = partners.get(name)
    other = None if name == "kv_c" and example.op != "concat_and_cache_mla" else other
    other = "score" if name == "kv" and "ape" in example.rules else other
    other = "v" if name == "k" and example.op == "reshape_and_cache" else other
    plain = example.arrays
    if example.op == "cp_local_positions" and name == "positions":
        other = "out"
    if name == "outs" and dtype != "float32":  # a sum in fp32 may be stored as bf16
        other = "out"
    if other in plain and plain[name].dtype != NAMED[dtype]:
        got = next(n for n, known in NAMED.items() if known == plain[other].dtype)
        hints = {"bfloat16": BF16_HINT, "int32": ": nothing is cast here, make it int32"}
        hint = hints.get(dtype, "")
        return TypeError, f"{example.op}: `{other}` must be {dtype}, got {got}{hint}"
    if example.op in ATTEND_HEADS or (example.op, name) == ("reshape_and_cache", "k_cache"):
        return unlike_half(example, name, dtype)
    if name == "q" and dtype == "bfloat16" and "q_scale" in plain:
        rest = "`q_scale` must be left out for a bfloat16 query, got an array"
        return ValueError, f"{example.blames(name)}: {rest}"
    if example.op == "grouped_output_projection":
        return unlike_o(example, name, dtype)
    is_split = name == "weight" and example.op != "fp8_linear"
    if is_split and dtype in BYTES and "weight_scale_inv" not in plain:
        rest = "`weight_scale_inv` must be given for an e4m3 weight, got none"
        return ValueError, f"split_kv_b_proj: {rest}"
    return None


def unlike_half(example: Example, name: str, dtype: str) -> tuple[type, str] | None:
    """The error for another kind of query or key, which its second array, its values or its scale
    does not have."""
    codes = ("uint8", "float8_e4m3fn")
    wanted = listed(codes) if dtype in codes else dtype
    hint = BF16_HINT if dtype == "bfloat16" else ""
    others = {"q[0]": "q[1]", "k[0]": "k[1]", "q": "qv", "k": "v", "k_cache": "v_cache"}
    other = others.get(name)
    if example.arrays[name].dtype == BF16:
        if dtype == "bfloat16" or other not in example.rules:
            return None
        return TypeError, f"{example.op}: `{other}` must be {wanted}, got bfloat16"
    if name in ("k", "k_cache") and dtype not in codes:
        got = next(n for n, known in NAMED.items() if known == example.arrays[other].dtype)
        return TypeError, f"{example.op}: `{other}` must be {wanted}, got {got}{hint}"
    if name == "q" and dtype not in codes:
        rule = "must be left out unless `q` is e4m3"
        return ValueError, f"{example.op}: `q_descale` {rule}, got {dtype}"
    return None


def unlike_o(example: Example, name: str, dtype: str) -> tuple[type, str] | None:
    """The error for another kind of `o`, or of its scales, which have 8 columns or 2."""
    was_bf16 = example.arrays["o"].dtype == BF16
    rule = None
    if name == "o" and was_bf16 != (dtype == "bfloat16"):
        rule = "given, got none: an e4m3 `o` has" if was_bf16 else "None, got an array: a bf16 `o`"
        rule = f"be {rule} {'scales' if was_bf16 else 'has no scales'}"
    if name == "o_scale" and example.arrays[name].dtype != NAMED[dtype]:
        wanted, got = (8, 2) if dtype == "float32" else (2, 8)
        hint = "a scale per 128 values of `o`, or four of them per int32"
        rule = f"have shape [>= 3, 2, {wanted}], got [3, 2, {got}]: {hint}"
    return rule and (ValueError, f"{example.op}: `o_scale` must {rule}")


def of_dtype(x: np.ndarray, dtype) -> np.ndarray:
    """The bytes of `x` as this dtype if the sizes agree, which suits a cache; else its values."""
    if x.dtype.itemsize == np.dtype(dtype).itemsize:
        return x.copy().view(dtype)
    with np.errstate(all="ignore"):
        return x.astype(dtype) if dtype in NAMED.values() else np.zeros(x.shape, dtype)


@pytest.mark.parametrize(("example", "name"), DEVICE_ARRAYS)
def test_dtypes(example, name):
    calls = Calls(example, name)
    for dtype, number in (NAMED | NEIGHBOURS).items():
        x = of_dtype(calls.plain, np.dtype(number))
        fits = dtype in dtypes_of(example, name) or (
            example.is_cache(name) and calls.plain.dtype != BF16 and dtype in BYTES
        )
        takes_e4m3 = example.op != "forward" and "fp8_e4m3" in known_formats(example.op, name)[1]
        fits = fits or (takes_e4m3 and is_e4m3_of_576(example, name, dtype))
        wanted = follows(example, name, dtype) if fits else wrong_dtype(example, name, dtype)
        got, after = calls.run(x, x)
        if wanted is None:
            assert not isinstance(got, Refused), dtype
        else:
            assert got == Refused(*wanted), dtype
            assert others_are_untouched(calls, after), dtype
    for number in NO_NAMES:
        x = np.zeros(calls.plain.shape, number)
        rule = "be in native byte order" if str(number)[0] == ">" else "have a plain numeric dtype"
        who = f"{example.blames(name)}: `{name}` must {rule}, got {x.dtype!r}"
        assert calls.run(x, x)[0] == Refused(TypeError, who)


@pytest.mark.parametrize("number", ["f4", "f8", "?", "c8", BF16, ref.E4M3])
@pytest.mark.parametrize("title", [t for t, x in TABLE.items() if "host" in x.rules.values()])
def test_host_integers_are_integers(title, number):
    example = TABLE[title]
    for name in (n for n, rules in example.rules.items() if rules == "host"):
        calls = Calls(example, name)
        x = np.zeros(calls.plain.shape, number)
        got, _ = calls.run(x, x)
        who = f"{example.blames(name)}: `{name}` must hold integers, got "
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
