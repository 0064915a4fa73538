"""Every array argument of every operator as a view: sliced, backwards, broadcast, overlapping, at
an offset, the field of a record (csrc/core/rule.c, csrc/python/arrays/array.c).

A table names the operators and their arrays. Each array in turn is replaced by each view of it, as
an object of each kind of producer. The outcome has every bit of the contiguous call, or is exactly
the refusal that the rules of the argument give. Bytes between and around the elements stay.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import cases
import compiled
import engine
import numpy as np
import pytest
import reference as ref
from dlpack_producer import DTYPES, READ_ONLY, Producer
from exchange_producer import Exchanged
from helpers import RED

import sparse_mla
from sparse_mla import _C, ops

pytestmark = pytest.mark.frameworks

# --- the table -----------------------------------------------------------------------------------

# The rules of an array argument are some of these words:
#   strided   the last dimension need not be contiguous
#   written   an output: positive strides, no element twice
#   cache     rows of bytes: 16-byte alignment of base and strides
#   v4        fp8_v4: pages of 4 contiguous rows of 584 bytes, 8-byte alignment of base and pages
#   index     fp8_index: pages of 4 rows of 132 bytes, 4-byte alignment
#   scratch   written, but its contents mean nothing and are not compared
#   host      integers of any type in host memory


@dataclass
class Example:
    """A good call: its contiguous arrays by name, and a function that makes the call with other
    objects in their place."""

    arrays: dict[str, np.ndarray]
    run: Callable[[dict[str, Any]], Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    op: str
    make: Callable[[], Example]
    rules: dict[str, str]
    blames: dict[str, str] = field(default_factory=dict)  # array -> who refuses it, if not `op`

    @functools.cached_property
    def example(self) -> Example:
        """The example that all tests share. They copy its arrays, which are read-only."""
        example = self.make()
        for x in example.arrays.values():
            x.setflags(write=False)
        return example


def call(op: str, arrays: dict, **options) -> Example:
    function = getattr(ops, op)

    def run(given: dict) -> Any:
        given = dict(given)
        for name in ("q", "k", "k_cache"):
            if f"{name}[0]" in given:
                given[name] = (given.pop(f"{name}[0]"), given.pop(f"{name}[1]"))
        return function(**given, **options)

    return Example(arrays, run, options)


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def rows_of(fmt: str, *shape: int) -> np.ndarray:
    return cases.make_rows(np.random.default_rng(7), prod(shape), fmt).reshape(*shape, -1)


def write(dtype, slots, cache) -> Example:
    rng = np.random.default_rng(1)
    kv_c, k_pe = (rng.normal(0, 1, (6, n)).astype(np.float32) for n in (512, 64))
    as_dtype = ref.to_bf16 if dtype == ref.BF16 else lambda x: x.astype(dtype)
    slot_mapping = np.array([0, 11, -1, 5, 7], slots)
    arrays = {"kv_c": as_dtype(kv_c), "k_pe": as_dtype(k_pe), "kv_cache": cache}
    return call("concat_and_cache_mla", arrays | {"slot_mapping": slot_mapping})


def gather(cache) -> Example:
    is_flat = cache.ndim == 2
    arrays = {
        "kv_cache": cache,
        "block_table": int32([0, 7], [0, 9]) if is_flat else int32([4, 0, 2], [1, 3, 0]),
        "seq_lens": int32(6, 5),
        "workspace_starts": int32(1, 8),
        "seq_starts": int32(2, 1),
        "out": np.zeros((16, 576), ref.BF16),
    }
    return call("gather_kv_cache", arrays)


def bytes_below(most: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(11).integers(0, most, shape).astype(np.uint8)


def one_scale() -> np.ndarray:
    return np.full(1, 0.37, np.float32)


def write_scaled() -> Example:
    rng = np.random.default_rng(16)
    arrays = {
        "kv_c": cases.random_bf16(rng, 6, 512),
        "kv_cache": bytes_below(120, 3, 4, 512),
        "slot_mapping": np.array([0, 11, -1, 5, 7]),
        "kv_scale": one_scale(),
    }
    return call("concat_and_cache_mla", arrays, k_pe=None)


def write_heads(dtype, cache_dtype, slots) -> Example:
    rng = np.random.default_rng(28)
    k, v = (rng.normal(0, 1, (6, 2, n)).astype(np.float32) for n in (24, 16))
    as_dtype = ref.to_bf16 if dtype == ref.BF16 else lambda x: x.astype(dtype)
    arrays = {
        "k": as_dtype(k),
        "v": as_dtype(v),
        "k_cache": np.zeros((3, 4, 2, 24), cache_dtype),
        "v_cache": np.zeros((3, 4, 2, 16), cache_dtype),
        "slot_mapping": np.array([0, 11, -1, 5, 7], slots),
    }
    if np.dtype(cache_dtype).itemsize == 1:
        arrays |= {name: np.array([0.37, 2], np.float32) for name in HEAD_SCALES}
    return call("reshape_and_cache", arrays)


def insert(op: str, k, cache, *, kv_scale=None, **options) -> Example:
    arrays = {"k": k, "k_cache": cache, "slot_mapping": np.array([0, 11, -1, 5, 7])}
    if kv_scale is not None:
        arrays["kv_scale"] = kv_scale
    return call(op, arrays, **options)


def gather_last(cache, **arrays) -> Example:
    arrays = {
        "out": np.zeros((2, 8, 512), ref.BF16),
        "k_cache": cache,
        "seq_lens": int32(9, 5),
        "gather_lens": int32(4, 5),
        "block_table": int32([4, 0, 2], [1, 3, 0]),
        **arrays,
    }
    return call("dequantize_and_gather_k_cache", arrays, block_size=4, offset=2)


def gather_scaled() -> Example:
    example = gather(bytes_below(120, 5, 4, 512))
    arrays = example.arrays | {"out": np.zeros((16, 512), ref.BF16), "kv_scale": one_scale()}
    return call("gather_kv_cache", arrays)


def convert() -> Example:
    arrays = {
        "req_id_per_token": int32(0, 0, 1, 1),
        "block_table": int32([4, 0, 2], [1, 3, 0]),
        "topk_indices": int32([0, 5, -1], [11, 99, 2], [7, 1, 3], [-1, 4, 0]),
        "prefill_request_ids": int32(-1, -1, 1, 0),
        "prefill_workspace_starts": int32(2, 40),
        "out": np.zeros((4, 3), np.int32),
    }
    return call("convert_req_index_to_global_index", arrays, block_size=4, valid_counts=True)


def global_topk(dtype) -> Example:
    arrays = {
        "topk_indices": int32([3, 0, -1, 9], [5, 1, 99, 2], [7, 1, 3, 0]),
        "req_id_per_token": int32(0, 1, 1),
        "block_table": int32([6, 1], [2, -1]),
        "is_valid": np.array([1, 1, 0], dtype),
        "out": np.zeros((3, 4), np.int32),
        "lens": np.zeros(3, np.int32),
    }
    return call("compute_global_topk_indices_and_lens", arrays, block_size=4)


def top_k(dtype) -> Example:
    logits = [[1, 3, 0.5, 3, 0, -1, 2], [5, 4, 4, 4, 4, 1, 2], [9, 8, 7, 6, 5, 4, 3]]
    arrays = {
        "logits": np.array(logits, dtype),
        "starts": int32(0, 1, 4),
        "ends": int32(7, 3, 7),
        "slots_block_table": int32([6, 1], [2, -1]),
        "req_id_per_token": int32(0, 1, 1),
        "is_valid": np.array([1, 1, 0], np.uint8),
        "out": np.zeros((3, 3), np.int32),
        "slots": np.zeros((3, 3), np.int32),
        "lens": np.zeros(3, np.int32),
        "values": np.zeros((3, 3), dtype),
    }
    return call("top_k_per_row", arrays, k=3, slots_block_size=4)


def combine() -> Example:
    arrays = {
        "topk_indices": int32([0, 7, 5], [1, -1, 5], [0, 1, 5], [1, 0, 5]),
        "query_start_loc": int32(3, 5, 7),
        "seq_lens": int32(6, 9),
        "gather_lens": int32(4, 5),
        "out": np.zeros((4, 8), np.int32),
        "lens": np.zeros(4, np.int32),
    }
    options = {"window": 3, "ratio": 4, "topk": 2, "M": 8, "N": 3, "align": 4}
    return call("combine_topk_swa_indices", arrays, **options)


def mixed(dtype, *, local: bool) -> Example:
    """Two decodes, and two prefills of a token each."""
    arrays = {
        "decode_swa_indices": int32([8, 9, -1], [9, 8, 3]),
        "decode_compressed_indices": int32([2, 1], [5, 0]),
        "prefill_topk_indices": int32([0, 1, 5], [1, 0, 5]),
        "query_start_loc": int32(0, 2, 3, 4),
        "seq_lens": int32(4, 6, 9),
        "req_id_per_token": int32(0, 0, 1, 2),
        "swa_block_table": int32([4, 0, 0], [2, 5, 6], [1, 3, 7]),
        "compressed_block_table": int32([7, 8], [3, 9], [1, 2]),
        "out": np.zeros((4, 7), np.int32),
        "lens": np.zeros(4, np.int32),
    }
    if local:
        arrays["is_valid"] = np.array([1, 0], dtype)
    else:
        arrays["decode_compressed_lens"] = int32(1, 2)
    options = {"swa_block_size": 4, "compressed_block_size": 4, "window": 3, "ratio": 4, "topk": 2}
    absent = {"decode_compressed_lens": None} if local else {}
    return call(
        "build_mixed_sparse_indices", arrays, decode_indices_are_local=local, **options, **absent
    )


def attention(fmt: str, extra: str, *, pair=False, op="sparse_attention", columns=9) -> Example:
    """Attention of four tokens, which have many keys, one key, none and a few."""
    rng = np.random.default_rng(3)
    q = cases.random_bf16(rng, 4, 3, 576)
    parts = {"q[0]": q[..., :512].copy(), "q[1]": q[..., 512:].copy()} if pair else {"q": q}
    size = sparse_mla.attention_workspace_size(4, 3, 9, extra_topk=5, num_splits=2, device="cpu")
    arrays = parts | {
        "kv_cache": rows_of(fmt, 5, 4),
        "indices": rng.integers(0, 20, (4, columns)).astype(np.int32),
        "topk_length": int32(9, 1, 0, 4),
        "attn_sink": rng.normal(0, 1, 3).astype(np.float32),
        "extra_kv_cache": rows_of(extra, 2, 4),
        "extra_indices": rng.integers(0, 8, (4, 5)).astype(np.int32),
        "extra_topk_length": int32(5, 0, 0, 2),
        "out": np.zeros((4, 3, 512), ref.BF16),
        "lse": np.zeros((4, 3), np.float32),
        "max_logits": np.zeros((4, 3), np.float32),
        "workspace": np.zeros(size, np.uint8),
    }
    return call(op, arrays, softmax_scale=0.04, num_splits=2)


def scaled_attention(op="sparse_attention") -> Example:
    """Attention of an e4m3 query over two caches with a scale each."""
    example = attention("fp8", "bf16", op=op)
    q = ref.e4m3_encode(np.random.default_rng(4).normal(0, 1, (4, 3, 512)).astype(np.float32))
    example.arrays |= {
        "q": q.view(ref.E4M3),
        "kv_cache": bytes_below(120, 5, 4, 512),
        "extra_kv_cache": bytes_below(120, 2, 4, 512),
    }
    example.arrays |= {name: one_scale() for name in ("q_scale", "kv_scale", "extra_kv_scale")}
    return example


def dsv4() -> Example:
    """Four tokens, with keys in both parts, in the window alone and nowhere."""
    rng = np.random.default_rng(5)
    query = ref.e4m3_encode(rng.normal(0, 1, (4, 3, 512)).astype(np.float32))
    size = sparse_mla.attention_workspace_size(4, 3, 6, extra_topk=8, device="cpu")
    arrays = {
        "query": query.view(ref.E4M3),
        "swa_kv_cache": bytes_below(120, 5, 4, 512),
        "workspace_buffer": np.zeros(size, np.uint8),
        "sparse_indices": rng.integers(-1, 8, (4, 14)).astype(np.int32),
        "compressed_kv_cache": bytes_below(120, 2, 4, 512),
        "sparse_topk_lens": int32(14, 6, 0, 9),
        "seq_lens": int32(20, 9),
        "bmm1_scale": one_scale() / np.float32(1000),
        "bmm2_scale": one_scale(),
        "sinks": rng.normal(0, 1, 3).astype(np.float32),
        "cum_seq_lens_q": int32(0, 3, 4),
        "out": np.zeros((4, 3, 512), ref.BF16),
    }
    return call("sparse_mla_dsv4", arrays, window=6)


def pages(op="mla_attention") -> Example:
    """Two requests of two tokens with keys in bf16 pages, and a token of no request."""
    rng = np.random.default_rng(6)
    q = cases.random_bf16(rng, 5, 3, 576)
    size = sparse_mla.attention_workspace_size(5, 3, 9, num_splits=2, device="cpu")
    arrays = {
        "q[0]": q[..., :512].copy(),
        "q[1]": q[..., 512:].copy(),
        "kv_cache": rows_of("bf16", 5, 4),
        "cache_seqlens": int32(9, 5),
        "cu_seqlens_q": int32(0, 2, 4),
        "block_table": int32([4, 0, 2], [1, 3, 0]),
        "attn_sink": rng.normal(0, 1, 3).astype(np.float32),
        "out": np.zeros((5, 3, 512), ref.BF16),
        "lse": np.zeros((5, 3), np.float32),
        "workspace": np.zeros(size, np.uint8),
    }
    options = {"causal": True, "window_size": (6, -1), "softcap": 2.0, "num_splits": 2}
    return call(op, arrays, softmax_scale=0.04, **options)


def slots(op="mla_attention") -> Example:
    """A token of each request, an e4m3 query and keys under scales in a table of slots."""
    rng = np.random.default_rng(7)
    q = ref.e4m3_encode(rng.normal(0, 1, (4, 3, 512)).astype(np.float32))
    size = sparse_mla.attention_workspace_size(4, 3, 6, device="cpu")
    arrays = {
        "q": q.view(ref.E4M3),
        "q_scale": one_scale(),
        "kv_cache": bytes_below(120, 5, 4, 512),
        "kv_scale": one_scale(),
        "cache_seqlens": int32(6, 1, 0, 4),
        "slot_table": rng.integers(-1, 20, (4, 6)).astype(np.int32),
        "out": np.zeros((4, 3, 512), ref.BF16),
        "lse": np.zeros((4, 3), np.float32),
        "workspace": np.zeros(size, np.uint8),
    }
    return call(op, arrays, block_table=None, softmax_scale=0.04)


def ragged() -> Example:
    """Two requests with queries and keys in two parts, and rows of no request."""
    rng = np.random.default_rng(8)
    arrays = {
        "q[0]": cases.random_bf16(rng, 5, 4, 16),
        "q[1]": cases.random_bf16(rng, 5, 4, 8),
        "k[0]": cases.random_bf16(rng, 9, 2, 16),
        "k[1]": cases.random_bf16(rng, 9, 8),
        "v": cases.random_bf16(rng, 9, 2, 24),
        "cu_seqlens_q": int32(0, 2, 4),
        "cu_seqlens_k": int32(0, 5, 8),
        "attn_sink": rng.normal(0, 1, 4).astype(np.float32),
        "out": np.zeros((5, 4, 24), ref.BF16),
        "lse": np.zeros((5, 4), np.float32),
        "workspace": np.zeros(16, np.uint8),
    }
    options = {"causal": True, "window_size": (3, -1), "softcap": 2.0, "num_splits": 2}
    return call("varlen_attention", arrays, softmax_scale=0.2, **options)


def ragged_codes() -> Example:
    """The same in e4m3, with a scale of each request and KV head."""
    rng = np.random.default_rng(9)
    codes = lambda *shape: ref.e4m3_encode(rng.normal(0, 1, shape).astype(np.float32))  # noqa: E731
    arrays = {
        "q": codes(5, 4, 24).view(ref.E4M3),
        "k": codes(9, 2, 24).view(ref.E4M3),
        "v": codes(9, 2, 16).view(ref.E4M3),
        "cu_seqlens_q": int32(0, 2, 4),
        "cu_seqlens_k": int32(0, 5, 8),
        "q_descale": rng.uniform(0.5, 2, (2, 2)).astype(np.float32),
        "k_descale": rng.uniform(0.5, 2, (2, 2)).astype(np.float32),
        "v_descale": rng.uniform(0.5, 2, (2, 2)).astype(np.float32),
        "out": np.zeros((5, 4, 16), ref.BF16),
        "lse": np.zeros((5, 4), np.float32),
    }
    return call("varlen_attention", arrays, softmax_scale=0.2)


def paged_heads() -> Example:
    """Two requests whose queries have two parts, behind padding, and rows of no request."""
    rng = np.random.default_rng(10)
    arrays = {
        "q": cases.random_bf16(rng, 5, 4, 8),
        "qv": cases.random_bf16(rng, 5, 4, 24),
        "k_cache": cases.random_bf16(rng, 5, 4, 2, 8),
        "v_cache": cases.random_bf16(rng, 5, 4, 2, 24),
        "block_table": int32([4, 0, 2], [1, 3, 0]),
        "cache_seqlens": int32(9, 5),
        "cache_leftpad": int32(2, 1),
        "cu_seqlens_q": int32(0, 2, 4),
        "attn_sink": rng.normal(0, 1, 4).astype(np.float32),
        "out": np.zeros((5, 4, 24), ref.BF16),
        "lse": np.zeros((5, 4), np.float32),
        "workspace": np.zeros(16, np.uint8),
    }
    options = {"causal": True, "window_size": (6, -1), "softcap": 2.0}
    return call("paged_attention", arrays, softmax_scale=0.2, **options)


def slots_of_heads() -> Example:
    """A token of each request, with keys of e4m3 in a table of slots, and a scale of each request
    and KV head."""
    rng = np.random.default_rng(11)
    codes = lambda *shape: ref.e4m3_encode(rng.normal(0, 1, shape).astype(np.float32))  # noqa: E731
    arrays = {
        "q": codes(4, 4, 24).view(ref.E4M3),
        "k_cache": codes(5, 4, 2, 24).view(ref.E4M3),
        "v_cache": codes(5, 4, 2, 16).view(ref.E4M3),
        "slot_table": rng.integers(-1, 20, (4, 6)).astype(np.int32),
        "cache_seqlens": int32(6, 1, 0, 4),
        "q_descale": rng.uniform(0.5, 2, (4, 2)).astype(np.float32),
        "k_descale": rng.uniform(0.5, 2, (4, 2)).astype(np.float32),
        "v_descale": rng.uniform(0.5, 2, (4, 2)).astype(np.float32),
        "out": np.zeros((4, 4, 16), ref.BF16),
        "lse": np.zeros((4, 4), np.float32),
    }
    return call("paged_attention", arrays, block_table=None, softmax_scale=0.2)


def merge(dtype) -> Example:
    rng = np.random.default_rng(4)
    states = {}
    for side in "ab":
        out = cases.random_bf16(rng, 3, 4, 40)
        states[f"out_{side}"] = out if dtype == ref.BF16 else out.astype(dtype)
        states[f"lse_{side}"] = rng.normal(0, 1, (3, 4)).astype(np.float32)
    states["lse_a"][0, 1] = states["lse_b"][1, 2] = -np.inf
    states["attn_sink"] = rng.normal(0, 1, 4).astype(np.float32)
    results = {"out": np.zeros((3, 4, 40), dtype), "lse": np.zeros((3, 4), np.float32)}
    return call("merge_attn_states", states | results)


def partials(dtype) -> Example:
    rng = np.random.default_rng(5)
    outs = cases.random_bf16(rng, 3, 3, 4, 40)
    arrays = {
        "outs": outs if dtype == ref.BF16 else outs.astype(dtype),
        "lses": rng.normal(0, 1, (3, 3, 4)).astype(np.float32),
        "attn_sink": rng.normal(0, 1, 4).astype(np.float32),
        "out": np.zeros((3, 4, 40), dtype),
        "lse": np.zeros((3, 4), np.float32),
    }
    arrays["lses"][0, 0, 1] = arrays["lses"][1, 1, 2] = -np.inf
    return call("merge_attn_partials", arrays)


def split(op, weight, scale=None) -> Example:
    sizes = {"num_heads": 2, "qk_nope_head_dim": 64, "v_head_dim": 96}
    arrays = {"weight": weight}
    if scale is not None:
        arrays["weight_scale_inv"] = scale
    elif op.startswith("_"):
        sizes["weight_scale_inv"] = None
    return call(op, arrays, **sizes)


def split_any(dtype) -> Example:
    """A weight [7, 320] that is stored transposed."""
    arrays = {"weight": codes(320, 7), "weight_scale_inv": scales(320, 1)}
    sizes = {"num_rows": 7, "num_heads": 2, "first_dim": 64, "second_dim": 96, "dtype": dtype}
    return call("_split_weight", arrays, **sizes, storage=2, rows_are_outputs=False)


def absorb_part(op, name, w_name, stored) -> Example:
    """A weight of seven rows, stored transposed, whose heads have 64 values of W_UK or W_UV."""
    scale = scales(len(stored), 1) if name == "q_proj" else scales(7)
    arrays = {name: stored, name.replace("proj", "scale"): scale}
    arrays[w_name] = np.asarray(weight(5, 2, 64), np.float32)
    return call(op, arrays, num_rows=7, dtype="float32", storage=2)


def weight(*shape: int) -> np.ndarray:
    return cases.random_bf16(np.random.default_rng(9), *shape)


def codes(*shape: int) -> np.ndarray:
    return np.random.default_rng(9).integers(0, 0x7F, shape).astype(np.uint8)


def scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(10).uniform(0.5, 2, shape).astype(np.float32)


def k_up() -> Example:
    arrays = {"q_nope": weight(3, 2, 40), "W_UK": weight(512, 2, 40)}
    return call("k_up_proj", arrays | {"out": np.zeros((3, 2, 512), ref.BF16)})


def v_up() -> Example:
    arrays = {"x": weight(3, 2, 512), "W_UV": weight(512, 2, 40)}
    return call("v_up_proj", arrays | {"out": np.zeros((3, 2, 40), ref.BF16)})


def kv_up() -> Example:
    arrays = {"kv_c": weight(3, 512), "kv_b_proj": weight(512, 40)}
    return call("kv_up_proj", arrays | {"out": np.zeros((3, 40), ref.BF16)})


def grouped(scale=None) -> Example:
    out = {"out": np.zeros((3, 2, 40), ref.BF16)}
    if scale is None:
        arrays = {"o": weight(3, 2, 70), "weight": weight(2, 40, 70)}
        return call("grouped_output_projection", arrays | out, o_scale=None, weight_scale=None)
    arrays = {
        "o": codes(3, 2, 1024),
        "o_scale": scales(3, 2, 8) if scale == F32 else codes(3, 2, 2).astype(scale) << 23,
        "weight": codes(2, 40, 1024),
        "weight_scale": scales(2, 1, 8),
    }
    return call("grouped_output_projection", arrays | out)


def quantize(dtype, out, *shape: int) -> Example:
    x = np.random.default_rng(8).normal(0, 1, shape).astype(np.float32)
    x = ref.to_bf16(x) if dtype == ref.BF16 else x.astype(dtype)
    return call("dynamic_per_tensor_quant", {"x": x, "out": np.zeros(shape, out)})


def scaled(dtype, out, group: tuple[int, int], *shape: int) -> Example:
    x = np.random.default_rng(13).normal(0, 1, shape).astype(np.float32)
    x = ref.to_bf16(x) if dtype == ref.BF16 else x.astype(dtype)
    count = [1 if n == -1 else size // n for size, n in zip(shape, group, strict=True)]
    arrays = {"x": x, "out": np.zeros(shape, out), "descale": np.zeros(count, np.float32)}
    return call("scaled_quantize", arrays, group=group)


def linear(group: tuple[int, int], *descale: int) -> Example:
    arrays = {
        "x": weight(3, 256),
        "weight": codes(140, 256),
        "descale": scales(*descale),
        "out": np.zeros((3, 140), ref.BF16),
        "workspace": np.zeros(1000, np.uint8),
    }
    return call("fp8_linear", arrays, input_group=group)


def norm(q_weight, kv_weight) -> Example:
    rng = np.random.default_rng(11)
    arrays = {"q": cases.random_bf16(rng, 3, 300), "kv": cases.random_bf16(rng, 3, 512)}
    for name, dtype in (("q_weight", q_weight), ("kv_weight", kv_weight)):
        value = rng.normal(1, 0.3, arrays[name[:-7]].shape[1]).astype(np.float32)
        arrays[name] = ref.to_bf16(value) if dtype == ref.BF16 else value
    arrays |= {"q_out": np.zeros((3, 300), ref.BF16), "kv_out": np.zeros((3, 512), ref.BF16)}
    return call("fused_q_kv_rmsnorm", arrays, eps=1e-5)


def apply_rope(positions, dtype, table, interleaved=True) -> Example:
    rng = np.random.default_rng(13)
    arrays = {
        "positions": np.array([4, 0, 2], positions),
        "q_pe": rng.normal(0, 1, (3, 5, 24)).astype(dtype),
        "k_pe": rng.normal(0, 1, (3, 24)).astype(dtype),
        "rope_table": rng.normal(0, 0.7, (5, 24)).astype(table),
        "q_out": np.zeros((3, 5, 24), dtype),
        "k_out": np.zeros((3, 24), dtype),
    }
    return call("apply_rope", arrays, interleaved=interleaved)


def rope_and_cache(dtype, index, cache, interleaved=True) -> Example:
    rng = np.random.default_rng(14)
    arrays = {
        "positions": np.array([4, 0, 2], index),
        "q_pe": rng.normal(0, 1, (3, 5, 64)).astype(dtype),
        "k_pe": rng.normal(0, 1, (3, 64)).astype(dtype),
        "rope_table": rng.normal(0, 0.7, (5, 64)).astype(F32),
        "kv_c": rng.normal(0, 1, (3, 512)).astype(dtype),
        "kv_cache": cache,
        "slot_mapping": np.array([11, 5], index),  # the last token has none
        "q_out": np.zeros((3, 5, 64), dtype),
    }
    return call("rope_and_cache_mla", arrays, interleaved=interleaved)


def inverse(positions, out, scale=None, layout="fp32") -> Example:
    rng = np.random.default_rng(12)
    arrays = {
        "o": cases.random_bf16(rng, 3, 4, 512),
        "positions": np.array([4, 0, 2], positions),
        "rope_table": rng.normal(0, 0.7, (5, 64)).astype(np.float32),
        "out": np.zeros((3, 2, 1024), out),
    }
    if scale is None:
        return call("fused_inv_rope_fp8_quant", arrays, groups=2, quantize=False)
    arrays["out_scale"] = np.zeros((4, 2, 8 if layout == "fp32" else 2), scale)
    return call("fused_inv_rope_fp8_quant", arrays, groups=2, scale_layout=layout)


def index_query(positions, weights, fp4: bool) -> Example:
    rng = np.random.default_rng(14)
    arrays = {
        "q": cases.random_bf16(rng, 3, 2, 128),
        "weights": rng.normal(0, 1, (3, 2)).astype(np.float32),
        "positions": np.array([4, 0, 2], positions),
        "rope_table": rng.normal(0, 0.7, (5, 64)).astype(np.float32),
        "out": np.zeros((3, 2, 64 if fp4 else 128), np.uint8),
        "out_weights": np.zeros((3, 2), np.float32),
    }
    if weights == ref.BF16:
        arrays["weights"] = ref.to_bf16(arrays["weights"])
    if fp4:
        arrays["out_scale"] = np.zeros((3, 2, 4), np.uint8)
    return call("fused_indexer_q_rope_quant", arrays, softmax_scale=0.1, head_scale=0.5)


def scored(fp4: bool, pages: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The arrays that the indexer's logits are made of, and a cache, which is none of them."""
    rng = np.random.default_rng(15)
    width = 64 if fp4 else 128
    arrays = {
        "q": rng.integers(1, 120, (3, 2, width)).astype(np.uint8),
        "weights": rng.normal(0, 1, (3, 2)).astype(np.float32),
        "context_lens": np.array([8, 5, 7], np.int32),
    }
    if fp4:
        arrays["q_scale"] = rng.integers(120, 130, (3, 2, 4)).astype(np.uint8)
    keys = rng.integers(1, 120, (20, width)).astype(np.uint8)
    scales = rng.integers(120, 130, (20, 4)).astype(np.uint8)
    scales = scales if fp4 else rng.uniform(0.1, 2, 20).astype(np.float32)
    if not pages:
        return arrays | {"k_cache[0]": keys, "k_cache[1]": scales, "starts": int32(3, 3, 9)}, {}
    cache = np.zeros((5, 4, width + 4), np.uint8)
    cache.reshape(5, -1)[:, : 4 * width] = keys.reshape(5, -1)
    cache.reshape(5, -1)[:, 4 * width :] = scales.view(np.uint8).reshape(5, -1)
    arrays |= {"block_table": int32([4, 0], [1, 3]), "req_id_per_token": int32(0, 1, 1)}
    return arrays, {"k_cache": cache}


def logits(fp4: bool, dtype=np.float32, pages: bool = False) -> Example:
    arrays, cache = scored(fp4, pages)
    return call("indexer_logits", arrays | {"out": np.zeros((3, 8), dtype)}, **cache)


def lightning(fp4: bool, dtype=np.float32, pages: bool = False) -> Example:
    """Tokens come in chunks of two."""
    arrays, cache = scored(fp4, pages)
    arrays |= {
        "req_id_per_token": int32(0, 1, 1),
        "slots_block_table": int32([6, 1], [2, -1]),
        "is_valid": np.array([1, 1, 0], np.uint8),
        "out": np.zeros((3, 3), np.int32),
        "slots": np.zeros((3, 3), np.int32),
        "lens": np.zeros(3, np.int32),
        "values": np.zeros((3, 3), dtype),
        "workspace": np.zeros(3 * 128, np.uint8),
    }
    options = {"k": 3, "slots_block_size": 4, "max_logits_bytes": 2 * 128}
    return call("lightning_indexer", arrays, dtype=str(np.dtype(dtype)), **cache, **options)


def insert_queries(positions, cache, q_out=None, **scales) -> Example:
    rng = np.random.default_rng(13)
    arrays = {
        "q": cases.random_bf16(rng, 5 + (q_out is not None), 3, 512),
        "kv": cases.random_bf16(rng, 6, 512),
        "positions": np.array([4, 0, 2, 1, 3, 3], positions),
        "rope_table": rng.normal(0, 0.7, (5, 64)).astype(np.float32),
        "kv_cache": cache,
        "slot_mapping": np.array([0, 11, -1, 5], positions),
    }
    if q_out is not None:
        arrays["q_out"] = np.zeros((5, 4, 512), q_out)
    return call("fused_qnorm_rope_kv_insert", arrays | scales, eps=1e-6)


def save_states(dtype, integers) -> Example:
    rng = np.random.default_rng(14)
    as_dtype = ref.to_bf16 if dtype == ref.BF16 else lambda x: x.astype(np.float32)
    arrays = {
        "kv": as_dtype(rng.normal(0, 1, (6, 128))),
        "score": as_dtype(rng.normal(0, 1, (6, 128))),
        "ape": rng.normal(0, 1, (2, 128)).astype(np.float32),
        "positions": np.array([4, 5, 0, 1, 2, 2], integers),
        "state": rng.normal(0, 1, (3, 4, 256)).astype(np.float32),
        "slot_mapping": np.array([0, 1, -1, 9, 10], integers),
    }
    return call("save_partial_states", arrays)


def compress(cache, saves=False, **options) -> Example:
    rng = np.random.default_rng(15)
    dim = 512
    arrays = {
        "state": rng.normal(0, 1, (3, 4, 2 * dim)).astype(np.float32),
        "block_table": int32([2, 0], [1, -1]),
        "req_id_per_token": int32(0, 0, 1, 1, 0, 0),
        "positions": np.array([4, 5, 0, 1, 0, 0]),
        "slot_mapping": np.array([0, 1, 4, 5, -1]),
        "kv_cache": cache,
        "kv_slot_mapping": np.array([-1, 7, -1, 2, -1, -1]),
        "norm_weight": rng.normal(1, 0.1, dim).astype(np.float32),
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(np.float32),
    }
    if saves:
        arrays |= {"kv": rng.normal(0, 1, (6, dim)), "score": rng.normal(0, 1, (6, dim))}
        arrays |= {"ape": rng.normal(0, 1, (2, dim))}
        arrays |= {name: arrays[name].astype(np.float32) for name in ("kv", "score", "ape")}
    return call("compress_norm_rope_store", arrays | options, eps=1e-6, ratio=2)


def split_batch(dtype) -> Example:
    arrays = {"query_start_loc": np.array([0, 1, 2, 5, 9], dtype)}
    return call("split_decodes_and_prefills", arrays, num_actual_tokens=9)


def split_chunks(dtype) -> Example:
    return call(
        "split_prefill_chunks", {"seq_lens": np.array([10, 15, 20, 5], dtype)}, workspace_tokens=25
    )


def reorder(dtype) -> Example:
    return call("reorder_batch", {"num_scheduled_tokens": np.array([100, 1, 120, 1], dtype)})


def cut_local(dtype) -> Example:
    arrays = {
        "query_start_loc": np.array([0, 4, 14, 19], dtype),
        "seq_lens": np.array([6, 17, 9], dtype),
        "block_table": np.arange(27, dtype=dtype).reshape(3, 9),
    }
    return call("local_attention_batches", arrays, attention_chunk=4, block_size=2)


def split_context(dtype) -> Example:
    arrays = {"context_lens": np.array([10, 0, 20, 5], dtype)}
    return call("split_context_chunks", arrays, workspace_tokens=25, block_size=1, plan="packed")


def step(path: str, fp8: bool) -> Example:
    """A build and its forward: two decodes, and two prefills in two chunks.

    They are calls of the compiled builder, because sparse_mla.backend would make NumPy arrays of
    the host arrays first.
    """
    batch = cases.make_batch([1, 1, 3, 2], [9, 4, 12, 10], block_size=4)
    made = engine.make_step(batch, 2, topk=6)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 16}
    config = sparse_mla.Config(
        2, softmax_scale=0.1, block_size=4, topk_tokens=6, path=path,
        kv_cache_dtype="fp8_ds_mla" if fp8 else "bfloat16", **limits,
    )  # fmt: skip
    cache = np.ascontiguousarray(made.fp8_cache)
    arrays = {
        "query_start_loc_cpu": batch.query_start_loc,
        "seq_lens_cpu": batch.seq_lens,
        "block_table": batch.block_table,
        "q": made.q,
        "kv_cache": cache if fp8 else sparse_mla.dequantize_kv_cache(cache, dtype="bfloat16"),
        "topk_indices": made.topk_indices,
        "attn_sink": made.attn_sink,
        "out": np.zeros((7, 2, 512), ref.BF16),
        "lse": np.zeros((7, 2), np.float32),
    }
    if path == "separate":
        arrays["workspace"] = np.zeros((16, 576), ref.BF16)

    def run(given: dict) -> Any:
        builder = _C.Step("v32", vars(config) | {"path": path}, given.get("workspace"))
        planned = [given[name] for name in ("query_start_loc_cpu", "seq_lens_cpu", "block_table")]
        plan = compiled.build(builder, *planned, 4, 7)
        names = ("q", "kv_cache", "topk_indices", "attn_sink", "out", "lse")
        results = compiled.forward(
            builder, *(given[n] for n in names), 0.1, plan["generation"], None
        )
        return plan, results

    return Example(arrays, run)


ATTENTION = {
    "indices": "",
    "topk_length": "strided",
    "attn_sink": "strided",
    "extra_indices": "",
    "extra_topk_length": "strided",
    "out": "written",
    "lse": "strided written",
    "max_logits": "strided written",
    "workspace": "scratch written",
}
DSV4 = {
    "query": "",
    "swa_kv_cache": "cache",
    "sparse_indices": "",
    "compressed_kv_cache": "cache",
    "sparse_topk_lens": "strided",
    "seq_lens": "strided",
    "bmm1_scale": "strided",
    "bmm2_scale": "strided",
    "sinks": "strided",
    "cum_seq_lens_q": "strided",
    "out": "written",
    "workspace_buffer": "scratch written",
}
DENSE = {
    "cache_seqlens": "strided",
    "out": "written",
    "lse": "strided written",
    "workspace": "scratch written",
}
PAGES = {"q[0]": "", "q[1]": "", "kv_cache": "", "attn_sink": "strided"} | DENSE
PAGES |= {"block_table": "strided", "cu_seqlens_q": "strided"}
SLOTS = {"q": "", "kv_cache": "cache", "slot_table": "strided"} | DENSE
SLOTS |= dict.fromkeys(("q_scale", "kv_scale"), "strided")
UNREAD = [("sparse_mla_dsv4", "seq_lens"), ("sparse_mla_dsv4", "cum_seq_lens_q")]
UNREAD += [("varlen_attention", "workspace"), ("paged_attention", "workspace")]
RAGGED = {"v": "", "cu_seqlens_q": "strided", "cu_seqlens_k": "strided"}
RAGGED |= {"out": "written", "lse": "strided written"}
DESCALES = dict.fromkeys(("q_descale", "k_descale", "v_descale"), "strided")
PAGED = {"q": "", "k_cache": "", "v_cache": "", "cache_seqlens": "strided"}
PAGED |= {"out": "written", "lse": "strided written"}
LISTS = {"out": "written", "lens": "strided written"}
BATCH = {"query_start_loc": "strided", "seq_lens": "strided"}
MIXED = BATCH | {
    "decode_swa_indices": "",
    "decode_compressed_indices": "",
    "prefill_topk_indices": "",
    "req_id_per_token": "strided",
    "swa_block_table": "strided",
    "compressed_block_table": "strided",
}
WRITE = {"kv_c": "", "k_pe": "", "slot_mapping": "strided"}
HEADS = {"k": "", "v": "", "slot_mapping": "strided"}
HEADS |= {"k_cache": "written", "v_cache": "written"}
HEAD_SCALES = {"k_scale": "strided", "v_scale": "strided"}
GATHER = {
    "block_table": "strided",
    "seq_lens": "strided",
    "workspace_starts": "strided",
    "seq_starts": "strided",
    "out": "written",
}
SCALED_ATTENTION = (
    ATTENTION
    | {"q": "", "kv_cache": "cache", "extra_kv_cache": "cache"}
    | dict.fromkeys(("q_scale", "kv_scale", "extra_kv_scale"), "strided")
)
INSERT = {"k": "", "slot_mapping": "strided"}
GATHER_LAST = {
    "out": "written",
    "seq_lens": "strided",
    "gather_lens": "strided",
    "block_table": "strided",
}
STEP = {
    "query_start_loc_cpu": "host",
    "seq_lens_cpu": "host",
    "block_table": "strided",
    "q": "",
    "topk_indices": "",
    "attn_sink": "strided",
    "out": "written",
    "lse": "strided written",
}
BUILD = dict.fromkeys(
    ("query_start_loc_cpu", "seq_lens_cpu", "block_table"), "MetadataBuilder.build"
)
BUILD["workspace"] = "MetadataBuilder"
MERGE = dict.fromkeys(("out_a", "out_b"), "") | dict.fromkeys(("lse_a", "lse_b"), "strided")
MERGE |= {"attn_sink": "strided", "out": "written", "lse": "strided written"}
PARTIALS = {"outs": "", "lses": "strided", "attn_sink": "strided", "out": "written"}
PARTIALS |= {"lse": "strided written"}
NORM = {"q": "", "kv": "", "q_weight": "", "kv_weight": "", "q_out": "written"}
NORM |= {"kv_out": "written"}
GROUPED = {"o": "", "o_scale": "strided", "weight": "", "weight_scale": "strided"}
GROUPED |= {"out": "written"}
SCALED = {"x": "", "out": "written", "descale": "strided written"}
LINEAR = {"x": "", "weight": "", "descale": "strided", "out": "written"}
LINEAR |= {"workspace": "scratch written"}
APPLY_ROPE = {"positions": "strided", "q_pe": "", "k_pe": "", "rope_table": ""}
APPLY_ROPE |= {"q_out": "written", "k_out": "written"}
ROPE_AND_CACHE = {"positions": "strided", "q_pe": "", "k_pe": "", "rope_table": "", "kv_c": ""}
ROPE_AND_CACHE |= {"slot_mapping": "strided", "q_out": "written"}
INVERSE = {"o": "", "positions": "strided", "rope_table": "", "out": "written"}
INDEX_QUERY = {"q": "", "weights": "", "positions": "strided", "rope_table": ""}
INDEX_QUERY |= {"out": "written", "out_weights": "written"}
LOGITS = {"q": "", "weights": "", "context_lens": "strided", "out": "written"}
FLAT_KEYS = {"k_cache[0]": "", "starts": "strided"}
CHOICE = LOGITS | {"req_id_per_token": "strided", "slots_block_table": "strided"}
CHOICE |= {"is_valid": "strided", "slots": "written", "lens": "strided written"}
CHOICE |= {"values": "written", "workspace": "scratch written"}
QNORM = {"kv": "", "positions": "strided", "rope_table": "", "slot_mapping": "strided"}
SAVE = {"kv": "", "score": "", "ape": "", "positions": "strided", "state": "written"}
SAVE |= {"slot_mapping": "strided"}
COMPRESS = dict.fromkeys(("block_table", "req_id_per_token", "positions"), "strided")
COMPRESS |= {"slot_mapping": "strided", "kv_slot_mapping": "strided", "norm_weight": ""}
COMPRESS |= {"rope_table": ""}
F16, F32, U8 = np.float16, np.float32, np.uint8

TABLE: dict[str, Row] = {
    "write fp8": Row(
        "concat_and_cache_mla",
        lambda: write(ref.BF16, np.int64, rows_of("fp8", 3, 4)),
        WRITE | {"kv_cache": "cache written"},
    ),
    "write bf16, flat": Row(
        "concat_and_cache_mla",
        lambda: write(F32, np.int32, rows_of("bf16", 12)),
        WRITE | {"kv_cache": "written"},
    ),
    "write fp8, head axis": Row(
        "concat_and_cache_mla",
        lambda: write(F16, np.int64, rows_of("fp8", 3, 4, 1).view(np.int8)),
        WRITE | {"kv_cache": "cache written"},
    ),
    "write fp8, pages of one token": Row(
        "concat_and_cache_mla",
        lambda: write(F16, np.int32, rows_of("fp8", 12, 1)),
        WRITE | {"kv_cache": "cache written"},
    ),
    "write e4m3": Row(
        "concat_and_cache_mla",
        write_scaled,
        {"kv_c": "", "slot_mapping": "strided", "kv_cache": "cache written", "kv_scale": "strided"},
    ),
    "write heads, bf16": Row(
        "reshape_and_cache", lambda: write_heads(ref.BF16, ref.BF16, np.int64), HEADS
    ),
    "write heads, e4m3": Row(
        "reshape_and_cache", lambda: write_heads(F32, ref.E4M3, np.int32), HEADS | HEAD_SCALES
    ),
    "write heads, bytes": Row(
        "reshape_and_cache", lambda: write_heads(F16, U8, np.int64), HEADS | HEAD_SCALES
    ),
    "gather fp8": Row(
        "gather_kv_cache", lambda: gather(rows_of("fp8", 5, 4)), GATHER | {"kv_cache": "cache"}
    ),
    "gather bf16, head axis": Row(
        "gather_kv_cache", lambda: gather(rows_of("bf16", 5, 4, 1)), GATHER | {"kv_cache": ""}
    ),
    "gather fp8, flat": Row(
        "gather_kv_cache", lambda: gather(rows_of("fp8", 20)), GATHER | {"kv_cache": "cache"}
    ),
    "dequantize fp8": Row(
        "dequantize_kv_cache",
        lambda: call("dequantize_kv_cache", {"kv_cache": rows_of("fp8", 3, 4).view(ref.E4M3)}),
        {"kv_cache": "cache"},
    ),
    "dequantize fp8, one page": Row(
        "dequantize_kv_cache",
        lambda: call("dequantize_kv_cache", {"kv_cache": rows_of("fp8", 1, 4)}),
        {"kv_cache": "cache"},
    ),
    "dequantize bf16, flat": Row(
        "dequantize_kv_cache",
        lambda: call("dequantize_kv_cache", {"kv_cache": rows_of("bf16", 12)}, dtype="bfloat16"),
        {"kv_cache": ""},
    ),
    "dequantize, a scale": Row(
        "dequantize_kv_cache",
        lambda: call(
            "dequantize_kv_cache",
            {"kv_cache": bytes_below(120, 3, 4, 512), "kv_scale": one_scale()},
        ),
        {"kv_cache": "cache", "kv_scale": "strided"},
    ),
    "dequantize fp8_v4": Row(
        "dequantize_kv_cache",
        lambda: call("dequantize_kv_cache", {"kv_cache": bytes_below(120, 3, 4, 584)}),
        {"kv_cache": "v4"},
    ),
    "gather, a scale": Row(
        "gather_kv_cache", gather_scaled, GATHER | {"kv_cache": "cache", "kv_scale": "strided"}
    ),
    "insert fp8_v4": Row(
        "quantize_and_insert_k_cache",
        lambda: insert("quantize_and_insert_k_cache", weight(6, 512), bytes_below(256, 3, 4, 584)),
        INSERT | {"k_cache": "v4 written"},
    ),
    "insert, a scale": Row(
        "quantize_and_insert_k_cache",
        lambda: insert(
            "quantize_and_insert_k_cache",
            weight(6, 512).astype(F16),
            bytes_below(256, 3, 4, 512),
            kv_scale=one_scale(),
        ),
        INSERT | {"k_cache": "cache written", "kv_scale": "strided"},
    ),
    "insert keys of the indexer": Row(
        "indexer_k_quant_and_cache",
        lambda: insert(
            "indexer_k_quant_and_cache",
            weight(6, 128).astype(F32),
            bytes_below(256, 3, 600),
            kv_format="fp8_index",
            block_size=4,
        ),
        INSERT | {"k_cache": "index written"},
    ),
    "gather the last of fp8_v4": Row(
        "dequantize_and_gather_k_cache",
        lambda: gather_last(bytes_below(120, 5, 4, 584)),
        GATHER_LAST | {"k_cache": "v4"},
    ),
    "gather the last, a scale": Row(
        "dequantize_and_gather_k_cache",
        lambda: gather_last(bytes_below(120, 5, 4, 512), kv_scale=one_scale()),
        GATHER_LAST | {"k_cache": "cache", "kv_scale": "strided"},
    ),
    "convert": Row(
        "convert_req_index_to_global_index",
        convert,
        {
            "req_id_per_token": "strided",
            "block_table": "strided",
            "topk_indices": "",
            "prefill_request_ids": "strided",
            "prefill_workspace_starts": "strided",
            "out": "written",
        },
    ),
    **{
        f"global top-k, {dtype}": Row(
            "compute_global_topk_indices_and_lens",
            lambda dtype=dtype: global_topk(dtype),
            {
                "topk_indices": "",
                "req_id_per_token": "strided",
                "block_table": "strided",
                "is_valid": "strided",
            }
            | LISTS,
        )
        for dtype in ("uint8", "bool")
    },
    **{
        f"top-k, {np.dtype(dtype)}": Row(
            "top_k_per_row",
            lambda dtype=dtype: top_k(dtype),
            {
                "logits": "",
                "starts": "strided",
                "ends": "strided",
                "slots_block_table": "strided",
                "req_id_per_token": "strided",
                "is_valid": "strided",
                "out": "written",
                "slots": "written",
                "lens": "strided written",
                "values": "written",
            },
        )
        for dtype in (np.float32, ref.BF16)
    },
    "combine": Row(
        "combine_topk_swa_indices",
        combine,
        {"topk_indices": "", "gather_lens": "strided"} | BATCH | LISTS,
    ),
    "mixed, positions": Row(
        "build_mixed_sparse_indices",
        lambda: mixed(np.uint8, local=True),
        MIXED | {"is_valid": "strided"} | LISTS,
    ),
    "mixed, slots": Row(
        "build_mixed_sparse_indices",
        lambda: mixed(np.uint8, local=False),
        MIXED | {"decode_compressed_lens": "strided"} | LISTS,
    ),
    "attend fp8": Row(
        "sparse_attention",
        lambda: attention("fp8", "bf16"),
        ATTENTION | {"q": "", "kv_cache": "cache", "extra_kv_cache": ""},
    ),
    "attend bf16, pair": Row(
        "sparse_attention",
        lambda: attention("bf16", "fp8", pair=True),
        ATTENTION | {"q[0]": "", "q[1]": "", "kv_cache": "", "extra_kv_cache": "cache"},
    ),
    "attend, +inf": Row(
        "_attention_plus_inf",
        lambda: attention("bf16", "bf16", op="_attention_plus_inf"),
        ATTENTION | {"q": "", "kv_cache": "", "extra_kv_cache": ""},
        dict.fromkeys((*ATTENTION, "q", "kv_cache", "extra_kv_cache"), "sparse_attention"),
    ),
    "attend, +inf, scales": Row(
        "_attention_plus_inf",
        lambda: scaled_attention("_attention_plus_inf"),
        SCALED_ATTENTION,
        dict.fromkeys(SCALED_ATTENTION, "sparse_attention"),
    ),
    "attend, one column": Row(
        "sparse_attention",
        lambda: attention("fp8", "bf16", columns=1),
        ATTENTION | {"q": "", "kv_cache": "cache", "extra_kv_cache": ""},
    ),
    "attend, scales": Row(
        "sparse_attention",
        scaled_attention,
        SCALED_ATTENTION,
    ),
    "DeepSeek V4": Row("sparse_mla_dsv4", dsv4, DSV4),
    "attend to pages": Row("mla_attention", pages, PAGES),
    "attend to slots": Row("mla_attention", slots, SLOTS),
    "attend to pages, +inf": Row(
        "_mla_attention_plus_inf",
        lambda: pages("_mla_attention_plus_inf"),
        PAGES,
        dict.fromkeys(PAGES, "mla_attention"),
    ),
    "attend to slots, +inf": Row(
        "_mla_attention_plus_inf",
        lambda: slots("_mla_attention_plus_inf"),
        SLOTS,
        dict.fromkeys(SLOTS, "mla_attention"),
    ),
    "attend to rows": Row(
        "varlen_attention",
        ragged,
        dict.fromkeys(("q[0]", "q[1]", "k[0]", "k[1]"), "")
        | RAGGED
        | {"attn_sink": "strided", "workspace": "scratch written"},
    ),
    "attend to rows of e4m3": Row(
        "varlen_attention",
        ragged_codes,
        {"q": "", "k": ""} | RAGGED | DESCALES,
    ),
    "attend to pages of heads": Row(
        "paged_attention",
        paged_heads,
        PAGED
        | dict.fromkeys(("block_table", "cache_leftpad", "cu_seqlens_q", "attn_sink"), "strided")
        | {"qv": "", "workspace": "scratch written"},
    ),
    "attend to slots of heads": Row(
        "paged_attention", slots_of_heads, PAGED | DESCALES | {"slot_table": "strided"}
    ),
    "partials bf16": Row("merge_attn_partials", lambda: partials(ref.BF16), PARTIALS),
    "partials fp32": Row("merge_attn_partials", lambda: partials(F32), PARTIALS),
    "merge bf16": Row("merge_attn_states", lambda: merge(ref.BF16), MERGE),
    "merge fp32": Row("merge_attn_states", lambda: merge(F32), MERGE),
    "split bf16": Row(
        "split_kv_b_proj", lambda: split("split_kv_b_proj", weight(512, 320)), {"weight": "strided"}
    ),
    "split fp8": Row(
        "split_kv_b_proj",
        lambda: split("split_kv_b_proj", codes(512, 320), scales(4, 3)),
        {"weight": "strided", "weight_scale_inv": "strided"},
    ),
    "split fp8, transposed": Row(
        "_split_kv_b_proj",
        lambda: split("_split_kv_b_proj", codes(320, 512), scales(3, 4)),
        {"weight": "strided", "weight_scale_inv": "strided"},
        dict.fromkeys(("weight", "weight_scale_inv"), "split_kv_b_proj"),
    ),
    "split any weight": Row(
        "_split_weight",
        lambda: split_any("float32"),
        {"weight": "strided", "weight_scale_inv": "strided"},
        dict.fromkeys(("weight", "weight_scale_inv"), "split_kv_b_proj"),
    ),
    "absorb in queries": Row(
        "_absorb_q_proj",
        lambda: absorb_part("_absorb_q_proj", "q_proj", "W_UK", codes(320, 7)),
        dict.fromkeys(("q_proj", "q_scale", "W_UK"), "strided"),
        dict.fromkeys(("q_proj", "q_scale", "W_UK"), "absorb"),
    ),
    "absorb in outputs": Row(
        "_absorb_o_proj",
        lambda: absorb_part("_absorb_o_proj", "o_proj", "W_UV", codes(128, 7)),
        dict.fromkeys(("o_proj", "o_scale", "W_UV"), "strided"),
        dict.fromkeys(("o_proj", "o_scale", "W_UV"), "absorb"),
    ),
    "k_up": Row("k_up_proj", k_up, {"q_nope": "", "W_UK": "", "out": "written"}),
    "v_up": Row("v_up_proj", v_up, {"x": "", "W_UV": "", "out": "written"}),
    "kv_up": Row("kv_up_proj", kv_up, {"kv_c": "", "kv_b_proj": "strided", "out": "written"}),
    "grouped bf16": Row(
        "grouped_output_projection", grouped, {"o": "", "weight": "", "out": "written"}
    ),
    "grouped e4m3": Row("grouped_output_projection", lambda: grouped(F32), GROUPED),
    "grouped e4m3, packed scales": Row(
        "grouped_output_projection", lambda: grouped(np.int32), GROUPED
    ),
    "quantize bf16": Row(
        "dynamic_per_tensor_quant",
        lambda: quantize(ref.BF16, U8, 3, 5, 7),
        {"x": "strided", "out": "strided written"},
    ),
    "quantize fp32": Row(
        "dynamic_per_tensor_quant",
        lambda: quantize(F32, ref.E4M3, 6, 40),
        {"x": "strided", "out": "strided written"},
    ),
    "quantize fp16, in pieces": Row(
        "dynamic_per_tensor_quant",
        lambda: quantize(F16, U8, 2, 4999),
        {"x": "strided", "out": "strided written"},
    ),
    "quantize in groups": Row(
        "scaled_quantize", lambda: scaled(ref.BF16, U8, (1, 128), 3, 256), SCALED
    ),
    "quantize columns": Row(
        "scaled_quantize", lambda: scaled(F32, ref.E4M3, (-1, 1), 6, 70), SCALED
    ),
    "quantize tiles of fp16": Row(
        "scaled_quantize", lambda: scaled(F16, U8, (2, 35), 4, 70), SCALED
    ),
    "FP8 layer, blocks": Row("fp8_linear", lambda: linear((1, 128), 2, 2), LINEAR),
    "FP8 layer, channels": Row("fp8_linear", lambda: linear((1, -1), 140), LINEAR),
    "norm": Row("fused_q_kv_rmsnorm", lambda: norm(ref.BF16, F32), NORM),
    "norm, other weights": Row("fused_q_kv_rmsnorm", lambda: norm(F32, ref.BF16), NORM),
    "turn and write fp8": Row(
        "rope_and_cache_mla",
        lambda: rope_and_cache(ref.BF16, np.int64, rows_of("fp8", 3, 4)),
        ROPE_AND_CACHE | {"kv_cache": "cache written"},
    ),
    "turn and write bf16, flat": Row(
        "rope_and_cache_mla",
        lambda: rope_and_cache(F32, np.int32, rows_of("bf16", 12), False),
        ROPE_AND_CACHE | {"kv_cache": "written"},
    ),
    "turn": Row("apply_rope", lambda: apply_rope(np.int64, ref.BF16, F32), APPLY_ROPE),
    "turn, halves of fp32": Row(
        "apply_rope", lambda: apply_rope(np.int32, F32, ref.BF16, False), APPLY_ROPE
    ),
    "turn back": Row(
        "fused_inv_rope_fp8_quant",
        lambda: inverse(np.int64, ref.E4M3, F32),
        INVERSE | {"out_scale": "strided written"},
    ),
    "turn back, packed scales": Row(
        "fused_inv_rope_fp8_quant",
        lambda: inverse(np.int32, U8, np.int32, "ue8m0x4"),
        INVERSE | {"out_scale": "strided written"},
    ),
    "turn back, bf16": Row(
        "fused_inv_rope_fp8_quant", lambda: inverse(np.int64, ref.BF16), INVERSE
    ),
    "index query": Row(
        "fused_indexer_q_rope_quant", lambda: index_query(np.int64, ref.BF16, False), INDEX_QUERY
    ),
    "index query, FP4": Row(
        "fused_indexer_q_rope_quant",
        lambda: index_query(np.int32, F32, True),
        INDEX_QUERY | {"out_scale": "written"},
    ),
    "logits of pages": Row(
        "indexer_logits",
        lambda: logits(False, pages=True),
        LOGITS | {"block_table": "strided", "req_id_per_token": "strided"},
    ),
    "logits of flat keys": Row(
        "indexer_logits", lambda: logits(False), LOGITS | FLAT_KEYS | {"k_cache[1]": "strided"}
    ),
    "logits, FP4": Row(
        "indexer_logits",
        lambda: logits(True, ref.BF16),
        LOGITS | FLAT_KEYS | {"k_cache[1]": "", "q_scale": ""},
    ),
    "lightning, pages": Row(
        "lightning_indexer",
        lambda: lightning(False, pages=True),
        CHOICE | {"block_table": "strided"},
    ),
    "lightning, flat keys": Row(
        "lightning_indexer",
        lambda: lightning(False),
        CHOICE | FLAT_KEYS | {"k_cache[1]": "strided"},
    ),
    "lightning, FP4": Row(
        "lightning_indexer",
        lambda: lightning(True, ref.BF16),
        CHOICE | FLAT_KEYS | {"k_cache[1]": "", "q_scale": ""},
    ),
    "insert queries": Row(
        "fused_qnorm_rope_kv_insert",
        lambda: insert_queries(np.int64, bytes_below(256, 3, 4, 584), ref.BF16),
        {"q": "", "q_out": "written"} | QNORM | {"kv_cache": "v4 written"},
    ),
    "insert queries in place": Row(
        "fused_qnorm_rope_kv_insert",
        lambda: insert_queries(np.int32, bytes_below(256, 3, 4, 512), kv_scale=one_scale()),
        {"q": "written"} | QNORM | {"kv_cache": "cache written", "kv_scale": "strided"},
    ),
    "insert queries as codes": Row(
        "fused_qnorm_rope_kv_insert",
        lambda: insert_queries(np.int64, bytes_below(256, 3, 4, 584), U8, q_scale_inv=one_scale()),
        {"q": "", "q_out": "written"}
        | QNORM
        | {"kv_cache": "v4 written", "q_scale_inv": "strided"},
    ),
    "save states": Row("save_partial_states", lambda: save_states(F32, np.int64), SAVE),
    "save states, bf16": Row("save_partial_states", lambda: save_states(ref.BF16, np.int32), SAVE),
    "compress": Row(
        "compress_norm_rope_store",
        lambda: compress(bytes_below(256, 3, 4, 512), kv_scale=one_scale()),
        {"state": ""} | COMPRESS | {"kv_cache": "cache written", "kv_scale": "strided"},
    ),
    "compress and save": Row(
        "compress_norm_rope_store",
        lambda: compress(bytes_below(256, 3, 4, 584), saves=True),
        {"state": "written", "kv": "", "score": "", "ape": ""}
        | COMPRESS
        | {"kv_cache": "v4 written"},
    ),
    "step, separate": Row(
        "forward",
        lambda: step("separate", True),
        STEP | {"kv_cache": "cache", "workspace": "scratch written"},
        BUILD,
    ),
    "step, direct": Row(
        "forward", lambda: step("direct", True), STEP | {"kv_cache": "cache"}, BUILD
    ),
    "step, bf16": Row("forward", lambda: step("bf16", False), STEP | {"kv_cache": ""}, BUILD),
}
for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
    TABLE[f"split batch {kind}"] = Row(
        "split_decodes_and_prefills",
        lambda kind=kind: split_batch(kind),
        {"query_start_loc": "host"},
    )
    TABLE[f"reorder {kind}"] = Row(
        "reorder_batch", lambda kind=kind: reorder(kind), {"num_scheduled_tokens": "host"}
    )
    TABLE[f"local attention {kind}"] = Row(
        "local_attention_batches",
        lambda kind=kind: cut_local(kind),
        {"query_start_loc": "host", "seq_lens": "host", "block_table": "host"},
    )
    TABLE[f"split chunks {kind}"] = Row(
        "split_prefill_chunks", lambda kind=kind: split_chunks(kind), {"seq_lens": "host"}
    )
    TABLE[f"split context {kind}"] = Row(
        "split_context_chunks", lambda kind=kind: split_context(kind), {"context_lens": "host"}
    )

# Operators that have no declaration of their own.
DECLARED_AS = {
    "_attention_plus_inf": "sparse_attention",
    "_mla_attention_plus_inf": "mla_attention",
    "_attention_plans": "attention_workspace_size",
}
WITHOUT_ARRAYS = {
    "_attention_plans",
    "attention_workspace_size",
    "lightning_indexer_workspace_size",
    "get_context_workspace_size",
    "get_prefill_workspace_size",
    "kernels",
    "build_info",
    "get_include",
    "get_library_dir",
    "rope_table",
    "mla_softmax_scale",
}


# Functions that read the shapes of arrays. The operators they are composed of have rows.
COMPOSED = {"absorb"}


def array_parameters(op) -> set[str]:
    parameters = inspect.signature(op).parameters.values()
    host = ("query_start_loc", "seq_lens", "num_scheduled_tokens", "context_lens", "block_table")
    words = ("Array", "Like[", "Written")  # types of sparse_mla/_types.py
    return {p.name for p in parameters if any(w in p.annotation for w in words) or p.name in host}


def named_in_table(op: str) -> set[str]:
    rows = [row for row in TABLE.values() if row.op == op]
    return {name.partition("[")[0] for row in rows for name in row.rules}


def test_every_array_of_every_operator_has_a_row():
    """A new operator or array argument fails this test until the table has it."""
    operators = {n: x for n, x in vars(ops).items() if isinstance(x, _C.Operator)}
    functions = {
        n: x
        for n, x in vars(ops).items()
        if inspect.isfunction(x) and x.__module__.startswith(ops.__name__) and not n.startswith("_")
    }
    for name in (operators | functions).keys() - COMPOSED:
        declared = getattr(ops, DECLARED_AS.get(name, name))
        assert array_parameters(declared) == named_in_table(name), name
        assert (name in WITHOUT_ARRAYS) == (not named_in_table(name)), name
    assert {row.op for row in TABLE.values()} <= {*operators, *functions, "forward"}
    assert {n for n, x in vars(_C).items() if inspect.isbuiltin(x)} == {
        "reorder_batch",
        "split_context_chunks",
        "split_decodes_and_prefills",
        "split_prefill_chunks",
        "get_context_workspace_size",
        "get_prefill_workspace_size",
        "local_attention_batches",
        "new_array",
        "find_stream",
        "read_stream",
        "order_streams",
        "kernels",
        "build_info",
        "call_exactly",
        "xla_handlers",
    }
    members = {n for n in vars(_C.Step) if not n.startswith("_")}
    assert members == {
        *("build", "check", "layer", "mark_use", "refresh", "warm_up"),
        "workspace_bytes",
    }


def test_tables_name_arrays_that_examples_have():
    for name, row in TABLE.items():
        assert set(row.example.arrays) == set(row.rules), name


# --- views ---------------------------------------------------------------------------------------

MARGIN = 1024  # guard bytes in front of and behind the bytes of a view


class Placed:
    """The elements of `x` in guarded memory, with any strides and offset, both in bytes.

    Where elements share memory the one written last stays; `values` are those that the view has.
    """

    def __init__(self, x: np.ndarray, strides, offset=0) -> None:
        reach = [(n - 1) * s for n, s in zip(x.shape, strides, strict=True)]
        below = -sum(r for r in reach if r < 0)
        below = -(-below // 64) * 64
        above = sum(r for r in reach if r > 0) + x.itemsize
        size = 2 * MARGIN + below + above + offset + 64
        memory = np.full(size, RED, U8)
        start = MARGIN + below + -memory.ctypes.data % 64 + offset
        self.memory = memory
        self.view = np.ndarray(x.shape, x.dtype, memory, start, strides)
        self.view[...] = x
        self.values = self.view.copy()
        mine = np.zeros(size, bool)
        np.ndarray((*x.shape, x.itemsize), bool, mine, start, (*strides, 1))[...] = True
        self.between = ~mine
        self.before = memory.copy()

    def check(self, may_be_written: bool, what: str) -> None:
        same = self.memory == self.before
        assert same[self.between].all(), f"{what}: a write between or around the elements"
        assert may_be_written or same.all(), f"{what} was written"

    def reset(self) -> None:
        self.memory[...] = self.before


def nested(x: np.ndarray, steps=None, order=None, gaps=None) -> list[int]:
    """Strides in bytes, with which each dimension steps over the dimensions inside it. `gaps` adds
    bytes to a dimension's stride, `steps` multiplies it, and `order` lists the dimensions from the
    outermost to the innermost."""
    strides, span = [0] * x.ndim, x.itemsize
    for d in reversed(order or range(x.ndim)):
        strides[d] = span + (gaps or {}).get(d, 0)
        strides[d] *= (steps or {}).get(d, 1)
        span = abs(strides[d]) * x.shape[d]
    return strides


UNITS = {"cache": 16, "v4": 8, "index": 4}  # alignment of caches, in bytes
SPLIT_ROWS = {"v4": 584, "index": 132}  # bytes per token in split pages


def unit_of(x: np.ndarray, rules: str) -> int:
    return next((unit for rule, unit in UNITS.items() if rule in rules), x.itemsize)


def split_pages_refusal(in_bytes: list[int], row: int) -> str | None:
    """What is wrong with pages of 4 tokens of `row` bytes."""
    token = in_bytes[1] if len(in_bytes) == 3 else row
    if token != row:
        rule = f"have contiguous pages (a token stride of {row} bytes)"
        return f"{rule}, got a stride of {token}"
    if in_bytes[0] < 4 * row:
        return f"have a page stride of at least {4 * row} bytes, got {in_bytes[0]}"
    return None


def views_of(x: np.ndarray, rules: str) -> dict[str, tuple[list[int], int]]:
    """name -> strides and offset, in bytes."""
    unit = unit_of(x, rules)
    compact = nested(x)
    last = x.ndim - 1
    views = {"contiguous": (compact, 0), "one further": (compact, unit)}
    wide = [d for d in range(x.ndim) if x.shape[d] > 1]
    for d in wide:
        views[f"every second of {d}"] = (nested(x, {d: 2}), 0)
        views[f"every third of {d}"] = (nested(x, {d: 3}), unit)
        views[f"gap in {d}"] = (nested(x, gaps={d: unit}), 0)
        views[f"half a gap in {d}"] = (nested(x, gaps={d: max(unit // 2, 1)}), 0)
        views[f"record field, {d}"] = (nested(x, gaps={d: 1}), 0)
        views[f"backwards in {d}"] = (nested(x, {d: -1}), 0)
        views[f"broadcast in {d}"] = ([0 if i == d else s for i, s in enumerate(compact)], 0)
        if d != last:
            closer = [s - unit if i == d else s for i, s in enumerate(compact)]
            views[f"overlapping in {d}"] = (closer, 0)
    if x.ndim > 1:
        views["backwards but for the last"] = (nested(x, dict.fromkeys(range(last), -1)), 0)
        views["outermost inside"] = (nested(x, order=[*range(1, last), 0, last]), 0)
        views["transposed"] = (nested(x, order=[*range(last, -1, -1)]), 0)
    if len(wide) < x.ndim:
        junk = [s if n > 1 else 7 for n, s in zip(x.shape, compact, strict=True)]
        views["any stride of one element"] = (junk, 0)
    views["a byte off"] = (compact, 1)
    views["half an element off"] = (compact, max(unit // 2, 1))
    return views


def refusal_of(x: np.ndarray, rules: str) -> str | None:
    """The rule that a view breaks and what the view has instead, in the error's words. None where
    the view is good."""
    item = x.itemsize
    in_bytes = [s if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True)]
    for d, stride in enumerate(in_bytes):
        if stride % item:
            return (
                f"have strides in multiples of its {item}-byte elements, got {stride} bytes in "
                f"dimension {d}"
            )
    strides = [s // item for s in in_bytes]
    address = x.__array_interface__["data"][0]
    if "host" in rules:
        return "be aligned to its elements, got another address" if address % item else None
    if "strided" not in rules and x.shape[-1] > 1 and strides[-1] != 1:
        return f"have a contiguous last dimension (stride 1), got stride {strides[-1]}"
    unit = unit_of(x, rules)
    if address % unit:
        off = address % unit
        bytes_off = "1 byte" if off == 1 else f"{off} bytes"
        return f"be aligned to {unit} bytes, got an address that is {bytes_off} off"
    row = next((row for rule, row in SPLIT_ROWS.items() if rule in rules), None)
    if row and (broken := split_pages_refusal(in_bytes, row)):
        return broken
    if any(rule in rules for rule in UNITS):
        page, token = (0, in_bytes[0]) if x.ndim == 2 else in_bytes[:2]
        page, token = (in_bytes[0], row) if row else (page, token)
        if page % unit or token % unit:
            return (
                f"have page and token strides in multiples of {unit} bytes, got {page} and {token}"
            )
    if "written" not in rules:
        return None
    for d, (n, stride) in enumerate(zip(x.shape, strides, strict=True)):
        if n > 1 and stride <= 0:
            return f"have positive strides (it is written), got {stride} in dimension {d}"
    span = item
    for stride, n in sorted(zip(in_bytes, x.shape, strict=True)):
        if n > 1 and stride < span:
            return "have elements that do not overlap (it is written), got strides that reach back"
        span += (n - 1) * stride
    return None


def ways_in(x: np.ndarray) -> dict[str, Any]:
    """One view as objects of different kinds, all on the view's memory."""
    ways: dict[str, Any] = {"NumPy": x}
    if x.dtype.isbuiltin == 1:
        ways["buffer"] = memoryview(x)
    if x.dtype in DTYPES and all(s % x.itemsize == 0 for s in x.strides):
        ways["exchange API"] = Exchanged(x)
        ways["capsule"] = Producer(x, byte_offset=640)
        ways["old capsule"] = Producer(x, byte_offset=16, versioned=False)
        if list(x.strides) == nested(x):
            ways["capsule without strides"] = Producer(x, byte_offset=48, null_strides=True)
    return ways


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
    """A row's example, called with one argument in another form."""

    def __init__(self, row: Row, name: str) -> None:
        self.row, self.name, self.example = row, name, row.example
        self.plain = self.example.arrays[name]

    def contents(self, arrays: dict[str, np.ndarray]) -> dict[str, str]:
        """Digests of all arrays except scratch."""
        rules = self.row.rules
        return {n: bytes_of(x) for n, x in arrays.items() if "scratch" not in rules[n]}

    def run(self, view: np.ndarray, given: Any) -> tuple[Any, dict[str, str]]:
        """-> the outcome of the call, and the arrays' contents after it. `given` is `view` as an
        object of some kind."""
        arrays = {n: x if n == self.name else x.copy() for n, x in self.example.arrays.items()}
        outcome = outcome_of(self.example, arrays | {self.name: given})
        return outcome, self.contents(arrays | {self.name: view})

    def refused(self, values: np.ndarray, broken: str) -> tuple[Refused, dict[str, str]]:
        """What is expected where a rule is broken: the error, and arrays that were not written."""
        text = f"{self.row.blames.get(self.name, self.row.op)}: `{self.name}` must {broken}"
        return Refused(ValueError, text), self.contents(self.example.arrays | {self.name: values})


class Unknown:
    """A NumPy array as an array of an unknown framework. NumPy's capsule tells whether it is
    read-only."""

    def __init__(self, x: np.ndarray) -> None:
        self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__


ARGUMENTS = [
    pytest.param(row, name, id=f"{title}: {name}")
    for title, row in TABLE.items()
    for name in row.rules
]


@pytest.mark.parametrize(("row", "name"), ARGUMENTS)
def test_views(row, name):
    rules = row.rules[name]
    calls = Calls(row, name)
    accepted, refused, outcomes = set(), set(), []
    for view, (strides, offset) in views_of(calls.plain, rules).items():
        placed = Placed(calls.plain, strides, offset)
        broken = refusal_of(placed.view, rules)
        if broken is None:
            values = placed.values.copy()
            want = calls.run(values, values)
            outcomes.append(want)
            assert view.startswith(("broadcast", "overl")) or not isinstance(want[0], Refused), view
            accepted.add(view)
        else:
            want = calls.refused(placed.values, broken)
            refused.add(view)
        for way, given in ways_in(placed.view).items():
            what = f"{view}, {way}"
            assert calls.run(placed.view, given) == want, what
            placed.check("written" in rules and broken is None, what)
            placed.reset()
    assert {"contiguous", "one further"} <= accepted
    assert refused or (calls.plain.itemsize == 1 and "written" not in rules)
    # Views whose elements share memory have other values, which must change the results. A vector
    # that must be contiguous has no such view, nor have split pages and arrays of one element.
    is_fixed = calls.plain.ndim == 1 and "strided" not in rules and "host" not in rules
    shares = not any(rule in rules for rule in SPLIT_ROWS) and calls.plain.size > 1
    if (
        "written" not in rules
        and (row.op, name) not in UNREAD
        and name != "seq_lens_cpu"
        and not is_fixed
        and shares
    ):
        results = [(got, {n: x for n, x in after.items() if n != name}) for got, after in outcomes]
        assert any(result != results[0] for result in results), "an argument without effect"


@pytest.mark.parametrize(("row", "name"), ARGUMENTS)
def test_read_only_arrays(row, name):
    """A call accepts read-only arrays of every kind of producer where it reads them, and refuses
    them where it writes them."""
    calls = Calls(row, name)
    x = calls.plain.copy()
    want = calls.run(x, x)[0]
    x = calls.plain.copy()
    ways: dict[str, Any] = {"ndarray": x.view()}
    ways["ndarray"].flags.writeable = False
    if x.dtype.isbuiltin == 1:
        ways["memoryview"] = memoryview(x).toreadonly()
    if x.dtype in DTYPES:
        ways["Producer"] = Producer(x, flags=READ_ONLY)
        ways["Exchanged"] = Exchanged(x, is_read_only=True)
    if x.dtype.isbuiltin == 1:
        ways["Unknown"] = Unknown(ways["ndarray"])
    for kind, given in ways.items():
        got, _ = calls.run(x, given)
        if "written" in row.rules[name]:
            who = f"{row.blames.get(name, row.op)}: `{name}`"
            text = f"{who} must be writable, got a read-only {kind}"
            assert got == Refused(BufferError, text)
            assert bytes_of(x) == bytes_of(calls.plain)
        else:
            assert got == want, kind
