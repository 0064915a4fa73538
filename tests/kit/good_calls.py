"""A good call of each operator, of which tests change one argument at a time. operators.py names
them."""

from __future__ import annotations

from dataclasses import dataclass

import cases
import numpy as np
import reference as ref


@dataclass
class Call:
    """A valid call of an operator. Tests change one of its arguments at a time."""

    op: str
    args: dict
    kwargs: dict

    def run(self, sparse_mla):
        return getattr(sparse_mla, self.op)(*self.args.values(), **self.kwargs)

    def arrays(self) -> dict[str, np.ndarray]:
        found = {}
        for name, value in (self.args | self.kwargs).items():
            parts = value if isinstance(value, tuple) else (value,)
            for i, part in enumerate(parts):
                if isinstance(part, np.ndarray):
                    found[f"{name}[{i}]" if len(parts) > 1 else name] = part
        return found

    def set(self, name: str, value) -> None:
        (self.args if name in self.args else self.kwargs)[name] = value

    def get(self, name: str):
        return self.args[name] if name in self.args else self.kwargs[name]


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def write_call() -> Call:
    rng = np.random.default_rng(1)
    args = {
        "kv_c": cases.random_bf16(rng, 6, 512),
        "k_pe": cases.random_bf16(rng, 6, 64),
        "kv_cache": np.zeros((3, 4, 656), np.uint8),
        "slot_mapping": np.array([0, 11, -1, 5, 7], np.int64),
    }
    return Call("concat_and_cache_mla", args, {})


def gather_call() -> Call:
    rng = np.random.default_rng(2)
    args = {
        "kv_cache": cases.make_rows(rng, 20, "fp8").reshape(5, 4, 656),
        "block_table": np.array([[4, 0, 2], [1, 3, 0]], np.int32),
        "seq_lens": np.array([9, 5], np.int32),
        "workspace_starts": np.array([0, 9], np.int32),
    }
    out = np.zeros((16, 576), ref.BF16)
    return Call("gather_kv_cache", args, {"out": out})


def reshape_call() -> Call:
    rng = np.random.default_rng(27)
    pages = np.zeros((3, 4, 2, 24 + 16), np.uint8)
    args = {
        "k": cases.random_bf16(rng, 6, 2, 24),
        "v": cases.random_bf16(rng, 6, 2, 16),
        "k_cache": pages[..., :24],
        "v_cache": pages[..., 24:],
        "slot_mapping": np.array([0, 11, -1, 5, 7], np.int64),
    }
    scales = {"k_scale": np.array([0.5, 0.3], np.float32), "v_scale": np.full(1, 2.0, np.float32)}
    return Call("reshape_and_cache", args, scales)


def index_call() -> Call:
    args = {
        "req_id_per_token": np.array([0, 0, 1], np.int32),
        "block_table": np.array([[4, 0, 2], [1, 3, 0]], np.int32),
        "topk_indices": np.array([[0, 5, -1], [11, 99, 2], [7, 1, 3]], np.int32),
    }
    kwargs = {
        "block_size": 4,
        "prefill_request_ids": np.array([-1, -1, 0], np.int32),
        "prefill_workspace_starts": np.array([2], np.int32),
        "out": np.zeros((3, 3), np.int32),
    }
    return Call("convert_req_index_to_global_index", args, kwargs)


def attention_call() -> Call:
    rng = np.random.default_rng(3)
    args = {
        "q": cases.random_bf16(rng, 3, 4, 576),
        "kv_cache": cases.make_rows(rng, 20, "fp8").reshape(5, 4, 656),
        "indices": rng.integers(-1, 20, (3, 9)).astype(np.int32),
    }
    kwargs = {
        "softmax_scale": 0.04,
        "topk_length": np.array([9, 4, 0], np.int32),
        "attn_sink": rng.normal(0, 1, 4).astype(np.float32),
        "extra_kv_cache": cases.make_rows(rng, 8, "bf16").reshape(2, 4, 576),
        "extra_indices": rng.integers(-1, 8, (3, 5)).astype(np.int32),
        "extra_topk_length": np.array([5, 1, 0], np.int32),
        "num_splits": 0,
        "return_max_logits": True,
        "out": np.zeros((3, 4, 512), ref.BF16),
        "lse": np.zeros((3, 4), np.float32),
        "max_logits": np.zeros((3, 4), np.float32),
    }
    return Call("sparse_attention", args, kwargs)


def dsv4_call() -> Call:
    rng = np.random.default_rng(20)
    args = {
        "query": cases.random_bf16(rng, 3, 4, 512),
        "swa_kv_cache": cases.random_bf16(rng, 5, 4, 512),
        "workspace_buffer": None,
        "sparse_indices": rng.integers(-1, 8, (3, 9)).astype(np.int32),
        "compressed_kv_cache": cases.random_bf16(rng, 2, 4, 512),
        "sparse_topk_lens": np.array([9, 4, 0], np.int32),
        "seq_lens": np.array([9], np.int32),
    }
    kwargs = {
        "bmm1_scale": 0.04,
        "bmm2_scale": 1.0,
        "sinks": rng.normal(0, 1, 4).astype(np.float32),
        "window": 4,
        "out": np.zeros((3, 4, 512), ref.BF16),
    }
    return Call("sparse_mla_dsv4", args, kwargs)


def mla_call() -> Call:
    """Two tokens of a request and one of another, on rank 0 of two, which has 9 and 5 of the
    keys."""
    rng = np.random.default_rng(21)
    args = {
        "q": cases.random_bf16(rng, 3, 4, 576),
        "kv_cache": cases.make_rows(rng, 20, "fp8").reshape(5, 4, 656),
        "block_table": np.array([[4, 0, 2], [1, 3, 0]], np.int32),
        "cache_seqlens": np.array([17, 9], np.int32),
    }
    kwargs = {
        "softmax_scale": 0.04,
        "cu_seqlens_q": np.array([0, 2, 3], np.int32),
        "cp": (0, 2, 4),
        "causal": True,
        "window_size": (14, -1),
        "softcap": 20.0,
        "attn_sink": rng.normal(0, 1, 4).astype(np.float32),
        "num_splits": 0,
        "out": np.zeros((3, 4, 512), ref.BF16),
        "lse": np.zeros((3, 4), np.float32),
    }
    return Call("mla_attention", args, kwargs)


def varlen_call() -> Call:
    """Two tokens of a request with four keys, and one of another with three."""
    rng = np.random.default_rng(22)
    args = {
        "q": cases.random_bf16(rng, 3, 4, 24),
        "k": cases.random_bf16(rng, 7, 2, 24),
        "v": cases.random_bf16(rng, 7, 2, 16),
        "cu_seqlens_q": int32(0, 2, 3),
        "cu_seqlens_k": int32(0, 4, 7),
    }
    kwargs = {
        "softmax_scale": 0.2,
        "causal": True,
        "window_size": (2, -1),
        "softcap": 20.0,
        "attn_sink": rng.normal(0, 1, 4).astype(np.float32),
        "num_splits": 0,
        "out": np.zeros((3, 4, 16), ref.BF16),
        "lse": np.zeros((3, 4), np.float32),
    }
    return Call("varlen_attention", args, kwargs)


def paged_call() -> Call:
    """Two tokens of a request with 10 keys, and one of another with 8, in pages of four tokens."""
    rng = np.random.default_rng(26)
    args = {
        "q": cases.random_bf16(rng, 3, 4, 24),
        "k_cache": cases.random_bf16(rng, 5, 4, 2, 24),
        "v_cache": cases.random_bf16(rng, 5, 4, 2, 16),
        "block_table": int32([4, 0, 2], [1, 3, 0]),
        "cache_seqlens": int32(11, 9),
    }
    kwargs = {
        "softmax_scale": 0.2,
        "cu_seqlens_q": int32(0, 2, 3),
        "qv": cases.random_bf16(rng, 3, 4, 16),
        "cache_leftpad": int32(1, 1),
        "causal": True,
        "window_size": (8, -1),
        "softcap": 20.0,
        "attn_sink": rng.normal(0, 1, 4).astype(np.float32),
        "num_splits": 0,
        "out": np.zeros((3, 4, 16), ref.BF16),
        "lse": np.zeros((3, 4), np.float32),
    }
    return Call("paged_attention", args, kwargs)


def merge_call() -> Call:
    rng = np.random.default_rng(4)
    args = {
        "out_a": cases.random_bf16(rng, 3, 4, 512),
        "lse_a": rng.normal(0, 1, (3, 4)).astype(np.float32),
        "out_b": cases.random_bf16(rng, 3, 4, 512),
        "lse_b": rng.normal(0, 1, (3, 4)).astype(np.float32),
    }
    kwargs = {"out": np.zeros((3, 4, 512), ref.BF16), "lse": np.zeros((3, 4), np.float32)}
    return Call("merge_attn_states", args, kwargs)


def partials_call() -> Call:
    rng = np.random.default_rng(11)
    args = {
        "outs": cases.random_bf16(rng, 3, 3, 4, 512),
        "lses": rng.normal(0, 1, (3, 3, 4)).astype(np.float32),
    }
    kwargs = {"out": np.zeros((3, 4, 512), ref.BF16), "lse": np.zeros((3, 4), np.float32)}
    return Call("merge_attn_partials", args, kwargs)


def k_up_call() -> Call:
    rng = np.random.default_rng(5)
    args = {
        "q_nope": cases.random_bf16(rng, 3, 4, 128),
        "W_UK": cases.random_bf16(rng, 512, 4, 128, std=0.1),
    }
    return Call("k_up_proj", args, {"out": np.zeros((3, 4, 512), ref.BF16)})


def v_up_call() -> Call:
    rng = np.random.default_rng(6)
    args = {
        "x": cases.random_bf16(rng, 3, 4, 512),
        "W_UV": cases.random_bf16(rng, 512, 4, 128, std=0.1),
    }
    return Call("v_up_proj", args, {"out": np.zeros((3, 4, 128), ref.BF16)})


def kv_up_call() -> Call:
    rng = np.random.default_rng(22)
    args = {
        "kv_c": cases.random_bf16(rng, 3, 512),
        "kv_b_proj": cases.random_bf16(rng, 512, 130, std=0.1),
    }
    return Call("kv_up_proj", args, {"out": np.zeros((3, 130), ref.BF16)})


def grouped_call() -> Call:
    rng = np.random.default_rng(7)
    args = {
        "o": rng.integers(0, 120, (3, 2, 256)).astype(np.uint8),
        "o_scale": rng.uniform(0.5, 2, (3, 2, 2)).astype(np.float32),
        "weight": rng.integers(0, 120, (2, 130, 256)).astype(np.uint8),
        "weight_scale": rng.uniform(0.5, 2, (2, 2, 2)).astype(np.float32),
    }
    return Call("grouped_output_projection", args, {"out": np.zeros((3, 2, 130), ref.BF16)})


def quant_call() -> Call:
    rng = np.random.default_rng(8)
    return Call("dynamic_per_tensor_quant", {"x": cases.random_bf16(rng, 3, 40)}, {})


def scaled_quantize_call() -> Call:
    rng = np.random.default_rng(24)
    out, descale = np.zeros((4, 48), np.uint8), np.zeros((2, 3), np.float32)
    options = {"group": (2, 16), "out": out, "descale": descale}
    return Call("scaled_quantize", {"x": cases.random_bf16(rng, 4, 48)}, options)


def fp8_linear_call() -> Call:
    rng = np.random.default_rng(25)
    args = {
        "x": cases.random_bf16(rng, 3, 256),
        "weight": rng.integers(0, 0x60, (140, 256)).astype(np.uint8),
        "descale": rng.uniform(0.5, 1, (2, 2)).astype(np.float32),
    }
    options = {"input_group": (1, 128), "out": np.zeros((3, 140), ref.BF16)}
    return Call("fp8_linear", args, options)


def norm_call() -> Call:
    rng = np.random.default_rng(10)
    buffer = cases.random_bf16(rng, 3, 96 + 512)
    args = {
        "q": buffer[:, :96],
        "kv": buffer[:, 96:],
        "q_weight": cases.random_bf16(rng, 96),
        "kv_weight": rng.normal(1, 0.1, 512).astype(np.float32),
    }
    outputs = {"q_out": np.zeros((3, 96), ref.BF16), "kv_out": np.zeros((3, 512), ref.BF16)}
    return Call("fused_q_kv_rmsnorm", args, {"eps": 1e-6, **outputs})


def apply_rope_call() -> Call:
    rng = np.random.default_rng(15)
    args = {
        "positions": np.array([7, 0, 3], np.int64),
        "q_pe": cases.random_bf16(rng, 3, 4, 16),
        "k_pe": cases.random_bf16(rng, 3, 16),
        "rope_table": rng.normal(0, 0.7, (8, 16)).astype(np.float32),
    }
    outputs = {"q_out": np.zeros((3, 4, 16), ref.BF16), "k_out": np.zeros((3, 16), ref.BF16)}
    return Call("apply_rope", args, outputs)


def rope_and_cache_call() -> Call:
    rng = np.random.default_rng(23)
    args = {
        "positions": np.array([7, 0, 3], np.int64),
        "q_pe": cases.random_bf16(rng, 3, 4, 64),
        "k_pe": cases.random_bf16(rng, 3, 64),
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(np.float32),
        "kv_c": cases.random_bf16(rng, 3, 512),
        "kv_cache": np.zeros((3, 4, 656), np.uint8),
        "slot_mapping": np.array([11, -1, 5], np.int64),
    }
    return Call("rope_and_cache_mla", args, {"q_out": np.zeros((3, 4, 64), ref.BF16)})


def inverse_call() -> Call:
    rng = np.random.default_rng(11)
    args = {
        "o": cases.random_bf16(rng, 3, 4, 512),
        "positions": np.array([7, 0, 3], np.int64),
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(np.float32),
    }
    kwargs = {
        "groups": 2,
        "out": np.zeros((3, 2, 1024), np.uint8),
        "out_scale": np.zeros((3, 2, 8), np.float32),
    }
    return Call("fused_inv_rope_fp8_quant", args, kwargs)


def qnorm_insert_call() -> Call:
    rng = np.random.default_rng(14)
    args = {
        "q": cases.random_bf16(rng, 5, 4, 512),
        "kv": cases.random_bf16(rng, 5, 512),
        "positions": np.array([7, 0, 3, 3, 1], np.int64),
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(np.float32),
        "kv_cache": np.zeros((3, 4, 512), np.uint8),
        "slot_mapping": np.array([0, 11, -1, 5], np.int64),
    }
    options = {"kv_scale": np.full(1, 0.5, np.float32), "q_out": np.zeros((5, 5, 512), ref.BF16)}
    return Call("fused_qnorm_rope_kv_insert", args, {"eps": 1e-6, **options})


def index_query_call() -> Call:
    rng = np.random.default_rng(15)
    args = {
        "q": cases.random_bf16(rng, 3, 2, 128),
        "weights": cases.random_bf16(rng, 3, 2),
        "positions": np.array([7, 0, 3], np.int64),
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(np.float32),
    }
    outputs = {
        "out": np.zeros((3, 2, 64), np.uint8),
        "out_weights": np.zeros((3, 2), np.float32),
        "out_scale": np.zeros((3, 2, 4), np.uint8),
    }
    scales = {"softmax_scale": 128**-0.5, "head_scale": 2**-0.5}
    return Call("fused_indexer_q_rope_quant", args, {**scales, "use_fp4": True, **outputs})


def logits_call() -> Call:
    rng = np.random.default_rng(16)
    pages = rng.integers(0, 120, (5, 4, 132)).astype(np.uint8)
    pages.reshape(5, -1)[:, 4 * 128 :].view(np.float32)[...] = 0.25
    args = {
        "q": rng.integers(0, 120, (3, 2, 128)).astype(np.uint8),
        "weights": rng.standard_normal((3, 2)).astype(np.float32),
        "k_cache": pages,
        "context_lens": np.array([7, 8, 3], np.int32),
    }
    options = {
        "block_table": np.array([[4, 0], [1, 3]], np.int32),
        "req_id_per_token": np.array([0, 0, 1], np.int32),
        "out": np.zeros((3, 8), np.float32),
    }
    return Call("indexer_logits", args, options)


def lightning_call() -> Call:
    """Chunks of one token, of which the last takes all its keys."""
    call = logits_call()
    options = call.kwargs | {
        "k": 4,
        "slots_block_table": int32([6, 1], [2, -1]),
        "slots_block_size": 4,
        "is_valid": np.array([1, 1, 0], np.uint8),
        "out": np.zeros((3, 4), np.int32),
        "slots": np.zeros((3, 4), np.int32),
        "lens": np.zeros(3, np.int32),
        "max_logits_bytes": 128,
    }
    return Call("lightning_indexer", call.args, options)


def save_states_call() -> Call:
    rng = np.random.default_rng(15)
    both = rng.normal(0, 1, (6, 256)).astype(np.float32)
    args = {
        "kv": both[:, :128],
        "score": both[:, 128:],
        "ape": rng.normal(0, 1, (2, 128)).astype(np.float32),
        "positions": np.array([4, 5, 0, 1, 2], np.int64),
        "state": np.zeros((3, 4, 256), np.float32),
        "slot_mapping": np.array([0, 1, -1, 9, 10], np.int64),
    }
    return Call("save_partial_states", args, {})


def compress_call() -> Call:
    rng = np.random.default_rng(16)
    args = {
        "state": rng.normal(0, 1, (3, 4, 1024)).astype(np.float32),
        "block_table": int32([2, 0], [1, -1]),
        "req_id_per_token": int32(0, 0, 1, 1, 0),
        "positions": np.array([4, 5, 0, 1, 0], np.int64),
        "slot_mapping": np.array([0, 1, 4, 5, -1], np.int64),
        "kv_cache": np.zeros((3, 4, 512), np.uint8),
        "kv_slot_mapping": np.array([-1, 7, -1, 2, -1], np.int64),
        "norm_weight": rng.normal(1, 0.1, 512).astype(np.float32),
        "rope_table": rng.normal(0, 0.7, (8, 64)).astype(np.float32),
    }
    options = {"eps": 1e-6, "ratio": 2, "kv_scale": np.full(1, 0.5, np.float32)}
    return Call("compress_norm_rope_store", args, options)


def global_topk_call() -> Call:
    args = {
        "topk_indices": int32([3, 0, -1, 9], [5, 1, 99, 2], [7, 1, 3, 0]),
        "req_id_per_token": int32(0, 1, 1),
        "block_table": int32([6, 1], [2, -1]),
        "block_size": 4,
        "is_valid": np.array([1, 1, 0], np.uint8),
    }
    kwargs = {"out": np.zeros((3, 4), np.int32), "lens": np.zeros(3, np.int32)}
    return Call("compute_global_topk_indices_and_lens", args, kwargs)


def top_k_call() -> Call:
    """Rows of which one takes all columns, one has none, and two have equal logits."""
    logits = [[1, 3, np.nan, 3, 0, -0.0, 2], [5, 4, 4, 4, 4, 1, 2], [9, 8, 7, 6, 5, 4, 3]]
    args = {
        "logits": np.array(logits, np.float32),
        "starts": int32(0, 1, 4),
        "ends": int32(7, 7, 2),
    }
    kwargs = {
        "k": 3,
        "slots_block_table": int32([6, 1], [2, -1]),
        "slots_block_size": 4,
        "req_id_per_token": int32(0, 1, 1),
        "is_valid": np.array([1, 1, 0], np.uint8),
        "out": np.zeros((3, 3), np.int32),
        "slots": np.zeros((3, 3), np.int32),
        "lens": np.zeros(3, np.int32),
    }
    return Call("top_k_per_row", args, kwargs)


def combine_call() -> Call:
    args = {
        "topk_indices": int32([0, -1, 5], [0, -1, 5], [0, 1, 5], [1, 0, 5]),
        "query_start_loc": int32(3, 5, 7),
        "seq_lens": int32(6, 9),
        "gather_lens": int32(4, 4),
        "window": 3,
        "ratio": 4,
        "topk": 2,
        "M": 8,
        "N": 3,
    }
    kwargs = {"align": 4, "out": np.zeros((4, 8), np.int32), "lens": np.zeros(4, np.int32)}
    return Call("combine_topk_swa_indices", args, kwargs)


def mixed_call() -> Call:
    args = {
        "decode_swa_indices": int32([8, 9, -1], [9, 8, 3]),
        "decode_compressed_indices": int32([2, -1], [1, 0]),
        "decode_compressed_lens": int32(1, 2),
        "prefill_topk_indices": int32([0, 1, 5], [1, 0, 5]),
        "query_start_loc": int32(0, 2, 4),
        "seq_lens": int32(4, 9),
        "req_id_per_token": int32(0, 0, 1, 1),
        "swa_block_table": int32([4, 0, 0], [2, 5, 6]),
        "swa_block_size": 4,
        "compressed_block_table": int32([7], [3]),
        "compressed_block_size": 4,
        "window": 3,
        "ratio": 4,
        "topk": 2,
    }
    kwargs = {
        "decode_indices_are_local": True,
        "is_valid": np.array([1, 0], np.uint8),
        "out": np.zeros((4, 7), np.int32),
        "lens": np.zeros(4, np.int32),
    }
    return Call("build_mixed_sparse_indices", args, kwargs)


def insert_call() -> Call:
    args = {
        "k": cases.random_bf16(np.random.default_rng(11), 6, 512),
        "k_cache": np.zeros((3, 4, 512), np.uint8),
        "slot_mapping": np.array([0, 11, -1, 5, 7], np.int64),
    }
    return Call("quantize_and_insert_k_cache", args, {"kv_scale": np.full(1, 0.5, np.float32)})


def insert_index_call() -> Call:
    args = {
        "k": cases.random_bf16(np.random.default_rng(12), 6, 128),
        "k_cache": np.zeros((3, 600), np.uint8),
        "slot_mapping": np.array([0, 11, -1, 5, 7], np.int64),
    }
    options = {"kv_format": "fp8_index", "block_size": 4}
    return Call("indexer_k_quant_and_cache", args, options)


def gather_last_call() -> Call:
    pages = np.random.default_rng(13).integers(0, 120, (5, 4, 584)).astype(np.uint8)
    args = {
        "out": np.zeros((2, 8, 512), ref.BF16),
        "k_cache": pages,
        "seq_lens": np.array([9, 5], np.int32),
        "gather_lens": np.array([4, 5], np.int32),
        "block_table": np.array([[4, 0, 2], [1, 3, 0]], np.int32),
        "block_size": 4,
        "offset": 2,
    }
    return Call("dequantize_and_gather_k_cache", args, {})


def dequantize_call() -> Call:
    rows = cases.make_rows(np.random.default_rng(9), 20, "fp8").reshape(5, 4, 656)
    return Call("dequantize_kv_cache", {"kv_cache": rows}, {"dtype": "bfloat16"})
