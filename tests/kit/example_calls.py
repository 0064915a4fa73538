"""Examples of all operators but attention, for example_table.py and operators.py."""

from __future__ import annotations

import cases
import numpy as np
import reference as ref
from cases import int32
from example import F32, Example, bytes_below, call, codes, one_scale, scales, weight

HEAD_SCALES = ("k_scale", "v_scale")
INSERT, INSERT_INDEX = "quantize_and_insert_k_cache", "indexer_k_quant_and_cache"
INDEXED = {"kv_format": "fp8_index", "block_size": 4}


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


def transfer(src, dst, src_slots, dst_slots, **options) -> Example:
    """Six rows, of which one comes from no slot and one goes to none."""
    arrays = {
        "src": src,
        "dst": dst,
        "src_slots": np.array([0, 9, -1, 5, 7, 11], src_slots),
        "dst_slots": np.array([11, 5, 3, -1, 0, 2], dst_slots),
    }
    return call("transfer_kv_cache", arrays, **options)


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


def own_positions(dtype) -> Example:
    positions = np.array([[0, 3, 4, 9, -1, 13], [-7, 12, 5, 8, 2, 21]], dtype)
    arrays = {"positions": positions, "out": np.zeros((2, 6), dtype)}
    return call("cp_local_positions", arrays, cp=(0, 2, 4))


def own_vector(dtype) -> Example:
    arrays = {"positions": np.array([0, 3, 4, 9, -1, 13], dtype), "out": np.zeros(6, dtype)}
    return call("cp_local_positions", arrays, cp=(1, 2, 4))


def own_lists() -> Example:
    arrays = {
        "topk_indices": int32([0, 3, 4, 9, -1, 13], [-7, 12, 5, 8, 2, 21], [4, 5, -1, -1, -1, -1]),
        "out": np.zeros((3, 6), np.int32),
        "lens": np.zeros(3, np.int32),
    }
    return call("cp_local_topk", arrays, cp=(0, 2, 4))


def own_lengths() -> Example:
    arrays = {"seq_lens": int32(3, 6, 10, 14, -2), "out": np.zeros(5, np.int32)}
    return call("cp_local_lengths", arrays, cp=(1, 2, 4))


def top_k_merge(dtype) -> Example:
    """Three lists of two tokens. Scores are equal across lists, and one list of the last token has
    nothing."""
    indices = [[[0, 3, 8], [2, 4, -1]], [[1, 5, 6], [-1, -1, -1]], [[2, 7, 9], [0, 3, 5]]]
    values = [[[2, 1, 7], [1, 3, 9]], [[7, 1, 0], [9, 9, 9]], [[1, 2, -1], [2, 0, 0]]]
    arrays = {
        "indices": int32(*indices),
        "values": np.array(values, dtype),
        "out": np.zeros((2, 4), np.int32),
    }
    return call("top_k_merge", arrays, k=4)


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
        "rope_table": rng.normal(0, 0.7, (8, 24)).astype(table),
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
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(F32),
        "q_out": np.zeros((3, 5, 64), dtype),
        "kv_c": rng.normal(0, 1, (3, 512)).astype(dtype),
        "kv_cache": cache,
        "slot_mapping": np.array([11, 5], index),  # the last token has none
    }
    return call("rope_and_cache_mla", arrays, interleaved=interleaved)


def inverse(positions, out, scale=None, layout="fp32", scale_rows=4) -> Example:
    rng = np.random.default_rng(12)
    arrays = {
        "o": cases.random_bf16(rng, 3, 4, 512),
        "positions": np.array([4, 0, 2], positions),
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(np.float32),
        "out": np.zeros((3, 2, 1024), out),
    }
    if scale is None:
        return call("fused_inv_rope_fp8_quant", arrays, groups=2, quantize=False)
    arrays["out_scale"] = np.zeros((scale_rows, 2, 8 if layout == "fp32" else 2), scale)
    return call("fused_inv_rope_fp8_quant", arrays, groups=2, scale_layout=layout)


def index_query(positions, weights, fp4: bool) -> Example:
    rng = np.random.default_rng(14)
    arrays = {
        "q": cases.random_bf16(rng, 3, 2, 128),
        "weights": rng.normal(0, 1, (3, 2)).astype(np.float32),
        "positions": np.array([4, 0, 2], positions),
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(np.float32),
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
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(np.float32),
        "kv_cache": cache,
        "slot_mapping": np.array([0, 11, -1, 5], positions),
    }
    if q_out is not None:  # checked behind q
        arrays = {"q": arrays["q"], "q_out": np.zeros((5, 4, 512), q_out), **arrays}
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


def dequantize(cache: np.ndarray, dtype: str = "float32", **more: np.ndarray) -> Example:
    return call("dequantize_kv_cache", {"kv_cache": cache, **more}, dtype=dtype)
