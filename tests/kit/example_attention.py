"""Examples of attention and of merges, for example_table.py and operators.py."""

from __future__ import annotations

import cases
import numpy as np
import reference as ref
from cases import int32
from example import Example, bytes_below, call, one_scale, rows_of

import sparse_mla


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
    arrays = example.arrays | {
        "q": q.view(ref.E4M3),
        "kv_cache": bytes_below(120, 5, 4, 512),
        "extra_kv_cache": bytes_below(120, 2, 4, 512),
    }
    arrays |= {name: one_scale() for name in ("q_scale", "kv_scale", "extra_kv_scale")}
    return call(op, arrays, **example.options)


def dsv4() -> Example:
    """Four tokens, with keys in both parts, in the window alone and nowhere."""
    rng = np.random.default_rng(5)
    query = ref.e4m3_encode(rng.normal(0, 1, (4, 3, 512)).astype(np.float32))
    size = sparse_mla.attention_workspace_size(4, 3, 6, extra_topk=8, device="cpu")
    arrays = {
        "query": query.view(ref.E4M3),
        "swa_kv_cache": bytes_below(120, 5, 4, 512),
        "sparse_indices": rng.integers(-1, 8, (4, 14)).astype(np.int32),
        "compressed_kv_cache": bytes_below(120, 2, 4, 512),
        "sparse_topk_lens": int32(14, 6, 0, 9),
        "seq_lens": int32(20, 9),
        "bmm1_scale": one_scale() / np.float32(1000),
        "bmm2_scale": one_scale(),
        "sinks": rng.normal(0, 1, 3).astype(np.float32),
        "cum_seq_lens_q": int32(0, 3, 4),
        "out": np.zeros((4, 3, 512), ref.BF16),
        "workspace_buffer": np.zeros(size, np.uint8),
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


def normal_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """e4m3 of the normal distribution."""
    return ref.e4m3_encode(rng.normal(0, 1, shape).astype(np.float32)).view(ref.E4M3)


def ragged_codes() -> Example:
    """The same in e4m3, with a scale of each request and KV head."""
    rng = np.random.default_rng(9)
    arrays = {
        "q": normal_codes(rng, 5, 4, 24),
        "k": normal_codes(rng, 9, 2, 24),
        "v": normal_codes(rng, 9, 2, 16),
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
    arrays = {
        "q": normal_codes(rng, 4, 4, 24),
        "k_cache": normal_codes(rng, 5, 4, 2, 24),
        "v_cache": normal_codes(rng, 5, 4, 2, 16),
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
