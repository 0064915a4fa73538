"""A good call whose arrays tests replace one by one, and what such calls are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import cases
import numpy as np
import reference as ref

from sparse_mla import ops

BF16, E4M3, F16, F32, U8 = ref.BF16, ref.E4M3, np.float16, np.float32, np.uint8
I32, I64 = np.int32, np.int64


@dataclass
class Example:
    """A good call: its contiguous arrays by name, which are read-only, and a function that makes
    the call with other objects in their place."""

    op: str
    arrays: dict[str, np.ndarray]
    run: Callable[[dict[str, Any]], Any]
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for x in self.arrays.values():
            x.setflags(write=False)

    @property
    def declared(self) -> str:
        return DECLARED_AS.get(self.op, self.op)

    def kind(self, name: str) -> str:
        """The kind of an array in the operator's table in C."""
        return dict(getattr(getattr(ops, self.op, None), "table", ())).get(
            name.partition("[")[0], ""
        )

    @functools.cached_property
    def rules(self) -> dict[str, str]:
        """What each array may be, in some of these words:
        strided   the last dimension need not be contiguous
        written   an output: positive strides, no element twice
        cache     rows of bytes: 16-byte alignment of base and strides
        v4        fp8_v4: pages of 4 contiguous rows of 584 bytes, 8-byte alignment of base, pages
        index     fp8_index: pages of 4 rows of 132 bytes, 4-byte alignment
        scratch   written, but its contents mean nothing and are not compared
        host      integers of any type in host memory
        """
        tests = {"strided": self.is_strided, "written": self.is_written}
        tests["scratch"] = lambda name: name in ("workspace", "workspace_buffer")
        found = {}
        for name, x in self.arrays.items():
            if self.op in HOST_OPS or name.endswith("_cpu"):
                found[name] = "host"
                continue
            words = [word for word, holds in tests.items() if holds(name)]
            if self.is_cache(name) and x.itemsize == 1:
                words.append({584: "v4", 600: "index"}.get(x.shape[-1], "cache"))
            found[name] = " ".join(words)
        return found

    def is_cache(self, name: str) -> bool:
        """Whether rows of a cache format are in the array, or rows of which it is one."""
        return name.endswith(CACHE_ENDS) or (name == "k_cache" and self.op not in OPS_OF_HEADS)

    def is_strided(self, name: str) -> bool:
        if name in ("out_scale", "k_cache[1]", "q_scale"):  # bytes are scales of FP4
            return self.op in STRIDED_OPS or self.arrays[name].dtype != U8
        return self.op in STRIDED_OPS or name in STRIDED or name.endswith(STRIDED_ENDS)

    def is_written(self, name: str) -> bool:
        if self.op == "forward":
            return name in ("out", "lse", "workspace")
        kind = self.kind(name)
        if kind == "input, maybe output":
            return "kv" in self.arrays
        in_place = self.op == "fused_qnorm_rope_kv_insert" and "q_out" not in self.arrays
        return kind in WRITTEN_KINDS or (in_place and name == "q")

    def blames(self, name: str) -> str:
        """Who refuses the array, in the words of errors."""
        if self.op == "forward":
            return BUILD.get(name, "forward")
        return TITLES.get(self.op, self.op)


HOST_OPS = ("split_decodes_and_prefills", "split_prefill_chunks", "reorder_batch")
HOST_OPS += ("local_attention_batches", "split_context_chunks")
OPS_OF_HEADS = ("varlen_attention", "paged_attention", "reshape_and_cache")
STRIDED_OPS = ("dynamic_per_tensor_quant", "split_kv_b_proj", "_split_kv_b_proj", "_split_weight")
STRIDED_OPS += ("_absorb_q_proj", "_absorb_o_proj")
STRIDED_ENDS = ("scale", "lens", "starts", "start_loc", "seqlens_q", "seqlens_k", "seqlens")
STRIDED_ENDS += ("length", "leftpad", "_inv", "seq_lens_q", "block_table", "slot_table")
STRIDED_ENDS += ("slot_mapping", "src_slots", "dst_slots")
CACHE_ENDS = ("kv_cache", "src", "dst")
STRIDED = {"attn_sink", "sinks", "lse", "lse_a", "lse_b", "lses", "max_logits", "positions", "ends"}
STRIDED |= {"is_valid", "req_id_per_token", "prefill_request_ids", "kv_b_proj"}
WRITTEN_KINDS = ("input and output", "output", "output or none", "output or first", "asked output")
WRITTEN_KINDS += ("workspace",)
# Operators without a declaration of their own.
DECLARED_AS = {
    "_attention_plus_inf": "sparse_attention",
    "_mla_attention_plus_inf": "mla_attention",
    "_attention_plans": "attention_workspace_size",
}
# Operators with another name in errors.
TITLES = DECLARED_AS | {
    "_split_kv_b_proj": "split_kv_b_proj",
    "_split_weight": "split_kv_b_proj",
    "_absorb_q_proj": "absorb",
    "_absorb_o_proj": "absorb",
}
BUILD = dict.fromkeys(
    ("query_start_loc_cpu", "seq_lens_cpu", "block_table"), "MetadataBuilder.build"
)
BUILD["workspace"] = "MetadataBuilder"


UNITS = {"cache": 16, "v4": 8, "index": 4}  # alignment of caches, in bytes


def unit_of(x: np.ndarray, rules: str) -> int:
    return next((unit for rule, unit in UNITS.items() if rule in rules), x.itemsize)


def call(op: str, arrays: dict, **options) -> Example:
    function = getattr(ops, op)

    def run(given: dict) -> Any:
        given = dict(given)
        for name in ("q", "k", "k_cache"):
            if f"{name}[0]" in given:
                given[name] = (given.pop(f"{name}[0]"), given.pop(f"{name}[1]"))
        return function(**given, **options)

    return Example(op, arrays, run, options)


def rows_of(fmt: str, *shape: int) -> np.ndarray:
    return cases.make_rows(np.random.default_rng(7), prod(shape), fmt).reshape(*shape, -1)


def bytes_below(most: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(11).integers(0, most, shape).astype(np.uint8)


def one_scale() -> np.ndarray:
    return np.full(1, 0.37, np.float32)


def weight(*shape: int) -> np.ndarray:
    return cases.random_bf16(np.random.default_rng(9), *shape)


def codes(*shape: int) -> np.ndarray:
    return np.random.default_rng(9).integers(0, 0x7F, shape).astype(np.uint8)


def scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(10).uniform(0.5, 2, shape).astype(np.float32)
