"""A good call of each operator, of which tests change one argument at a time. operators.py names
them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import cases
import numpy as np
import reference as ref
from cases import int32
from example import Example

from sparse_mla import ops


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


def call_of(example: Example, *left_out: str, **changes) -> Call:
    """The call of an example, with arrays of its own, without a workspace and what is left out."""
    left_out = ("workspace", *left_out)
    given = {name: x.copy() for name, x in example.arrays.items() if name not in left_out}
    for name in [n for n in given if n.endswith("[0]")]:
        given[name[:-3]] = (given.pop(name), given.pop(f"{name[:-3]}[1]"))
    given |= example.options | changes
    parameters = inspect.signature(getattr(ops, example.op)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    args = {name: given.pop(name) for name in positional}
    return Call(example.op, args, given)


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


def masked(rng, window_size: tuple[int, int], num_values: int) -> dict:
    """The options of dense attention that the calls below have in common."""
    return {
        "causal": True,
        "window_size": window_size,
        "softcap": 20.0,
        "attn_sink": rng.normal(0, 1, 4).astype(np.float32),
        "num_splits": 0,
        "out": np.zeros((3, 4, num_values), ref.BF16),
        "lse": np.zeros((3, 4), np.float32),
    }


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
        **masked(rng, (14, -1), 512),
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
        **masked(rng, (2, -1), 16),
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
        **masked(rng, (8, -1), 16),
    }
    return Call("paged_attention", args, kwargs)


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
