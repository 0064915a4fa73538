"""SGLang 0.5.23's calls of FlashMLA, as its backends make them, with the arrays of our cases.

`wrapper` is SGLang's module of FlashMLA. Each function returns what assert_results or
assert_within_bounds takes.
"""

from __future__ import annotations

import functools

import numpy as np
from dense_cases import Dense
from flash_mla_cases import Arrays, Decode, Prefill
from row_formats import FORMATS
from test_flash_mla_v4 import Decode as V4Decode
from test_flash_mla_v4 import apart

# Pages begin at multiples of so many bytes: SGLang's KVLayout.page_align.
PAGE_UNITS = {"fp8_v4": 576, "fp8_v41_split": 512, "fp4_v41_split": 256} | {
    name: FORMATS[name].row_bytes for name in ("fp8_v41", "fp4_v41")
}


def decode_v32(wrapper, arrays: Arrays, case: Decode, **changes) -> list[np.ndarray]:
    """`DeepseekSparseAttnBackend._forward_flashmla_kv`: the schedule is two tensors."""
    num_heads, num_keys = case.q.shape[2], case.indices.shape[-1]
    lens = arrays.put(np.full(case.b, num_keys, np.int32))
    schedule, splits = wrapper.get_mla_metadata(
        cache_seqlens=lens,
        num_q_tokens_per_head_k=case.s_q * num_heads,
        num_heads_k=1,
        num_heads_q=num_heads,
        is_fp8_kvcache=True,
        topk=num_keys,
    )
    splits[: case.b + 1].copy_(splits.clone())  # as SGLang does for CUDA graphs
    given = {
        "q": case.q,
        "k_cache": case.k_cache,
        "cache_seqlens": lens,
        "head_dim_v": 512,
        "tile_scheduler_metadata": schedule,
        "num_splits": splits,
        "softmax_scale": case.softmax_scale or 576**-0.5,
        "indices": case.indices,
        "block_table": np.zeros((case.b, 0), np.int32),
        "is_fp8_kvcache": True,
        "kv_format": "V32",
    }
    return arrays.call(wrapper.flash_mla_with_kvcache, **given | changes)


def prefill(wrapper, arrays: Arrays, case: Prefill, **changes) -> list[np.ndarray]:
    """`DeepseekSparseAttnBackend._forward_flashmla_sparse`, and V4's `_forward_prefill_sparse`;
    SGLang asks for the older kernels, whose statistics are in base 2."""
    given = {
        "q": case.q,
        "kv": case.kv,
        "indices": case.indices,
        "sm_scale": case.sm_scale,
        "d_v": 512,
        "attn_sink": None,
        "topk_length": None,
    }
    out, *log2 = arrays.call(wrapper.flash_mla_sparse_fwd, **given | case.options | changes)
    scale = np.float32(1 if changes.get("use_legacy") is False else np.log(2))
    return [out, *(x * scale for x in log2)]


def decode_v4(wrapper, arrays: Arrays, case: V4Decode, **changes) -> dict:
    """`DeepseekV4AttnBackend.forward`: one window of keys and compressed rows, in padded pages."""
    pages = [keys.pages for keys in case.inputs.lists]
    caches = [apart(arrays, each, PAGE_UNITS[each.format.name]) for each in pages]
    flash_mla_with_kvcache = functools.partial(
        wrapper.flash_mla_with_kvcache, use_legacy=pages[0].format.name != "fp8_v41"
    )
    given = {
        "q": case.q,
        "head_dim_v": 512,
        "block_table": None,
        "cache_seqlens": None,
        "tile_scheduler_metadata": wrapper.get_mla_metadata()[0],
        "softmax_scale": 512**-0.5,
        "is_fp8_kvcache": True,
        "extra_k_cache": None,
        "extra_indices_in_kvcache": None,
        "topk_length": None,
        "extra_topk_length": None,
    }
    given |= {k: v for k, v in case.arguments.items() if k not in ("kv_format", "use_legacy")}
    given |= dict(zip(("k_cache", "extra_k_cache"), caches, strict=False))
    return by_row(*arrays.call(flash_mla_with_kvcache, **given | changes))


def by_row(out: np.ndarray, lse: np.ndarray) -> dict[str, np.ndarray]:
    """One row per query, lse -inf where FlashMLA has +inf."""
    lse = np.ascontiguousarray(lse.swapaxes(1, 2)).reshape(-1, lse.shape[1])
    lse = np.where(np.isposinf(lse), np.float32(-np.inf), lse)
    return {"out": out.reshape(-1, *out.shape[2:]), "lse": lse}


def decode_dense(wrapper, arrays: Arrays, case: Dense, **changes) -> dict:
    """`FlashMLABackend.forward_decode`: without indices, on bf16 rows."""
    q, cache, table, lens = case.arguments()
    lens = arrays.put(lens)
    schedule, splits = wrapper.get_mla_metadata(lens, q.shape[2], 1, is_fp8_kvcache=False)
    assert schedule.shape[1] == 8, "SGLang has memory for rows of this length"
    given = {
        "q": q,
        "k_cache": cache[:, :, None],
        "block_table": table,
        "cache_seqlens": lens,
        "head_dim_v": 512,
        "tile_scheduler_metadata": schedule,
        "num_splits": splits,
        "softmax_scale": case.options["softmax_scale"],
        "causal": True,
    }
    return by_row(*arrays.call(wrapper.flash_mla_with_kvcache, **given | changes))


# The sizes of DeepSeek V4: the window alone, beside C4A's rows, and beside C128A's. SGLang's pages
# of 256 tokens have 64 and 2 of their rows.
V4_LAYERS = {
    "window": {},
    "C4A": {"extra": "fp8_v4", "extra_K": 512, "extra_block_size": 64},
    "C128A": {"extra": "fp8_v4", "extra_K": 64, "extra_block_size": 2},
}


def v4_layer(name: str, **changes) -> V4Decode:
    sizes = {"b": 2, "s_q": 1, "H": 64, "K": 128, "block_size": 256}
    return V4Decode("fp8_v4", **sizes | V4_LAYERS[name] | changes)


def keep_to_flash_mla(case: V4Decode) -> V4Decode:
    """The case without what FlashMLA's kernels do not take: slots outside a cache, which they read,
    lengths outside the lists, and sinks that are not finite."""
    names = ("indices", "topk_length"), ("extra_indices_in_kvcache", "extra_topk_length")
    for keys, (indices, lens) in zip(case.inputs.lists, names, strict=False):
        is_slot = (keys.indices >= 0) & (keys.indices < keys.num_slots)
        keys.indices = np.where(is_slot, keys.indices, keys.indices[is_slot][0])
        case.arguments[indices] = keys.indices.reshape(case.b, case.s_q, -1)
        case.arguments[lens] = np.full(case.b, keys.indices.shape[1], np.int32)
        keys.topk_length = None
    sink = np.clip(case.arguments["attn_sink"], -80, 80)
    case.arguments["attn_sink"] = case.inputs.options["attn_sink"] = sink
    return case
