"""A DeepSeek V4 layer of V4-Flash's sizes in a step, for the benchmark: what `forward` takes, and
the calls that it is made of. Arrays come from a function of the device's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

import sparse_mla
from sparse_mla._rows import V4_ROW_BYTES, row_of
from sparse_mla.v4 import forward

Array = Any
# (what it is for, its shape, the name of its dtype) -> an array. Its values are small and random;
# "zeros" are zeros.
Make = Callable[[str, tuple[int, ...], str], Array]

HIDDEN, Q_LORA, HEADS, INDEX_HEADS, TOPK = 4096, 1024, 64, 64, 512
GROUPS, RANK = 8, 1024
BLOCK_SIZE, SWA_BLOCK_SIZE, STATE_BLOCK_SIZES = 256, 64, {4: 4, 128: 8}
WINDOW = 128
INDEX_ROW_BYTES = row_of("fp8_index")
RATIOS = {1: "SWA", 4: "C4A", 128: "C128A"}
WIDTHS = {  # projection -> (input, output)
    "fused_wqa_wkv": (HIDDEN, Q_LORA + 512),
    "wq_b": (Q_LORA, HEADS * 512),
    "wo_b": (GROUPS * RANK, HIDDEN),
    "index_weights_proj": (HIDDEN, INDEX_HEADS),
    "index_wkv_wgate": (HIDDEN, 512),
    "index_wq_b": (Q_LORA, INDEX_HEADS * 128),
}


def width_of(name: str, ratio: int) -> tuple[int, int]:
    """Input and output of a projection; the compressor's depends on the ratio."""
    return (HIDDEN, 2048 if ratio == 4 else 1024) if name == "wkv_wgate" else WIDTHS[name]


def names_of(ratio: int) -> list[str]:
    names = ["fused_wqa_wkv", "wq_b", "wo_b"]
    names += ["wkv_wgate"] if ratio > 1 else []
    return names + (["index_weights_proj", "index_wkv_wgate", "index_wq_b"] if ratio == 4 else [])


@dataclass
class Step:
    """A layer, and the step that it runs."""

    layer: Any
    x: Array
    caches: Any
    metadata: Any
    builder: Any  # the owner of what the metadata shows

    def run(self, **options: Any) -> Array:
        return self.layer.forward(self.x, self.caches, self.metadata, **options)


def make_step(
    ratio: int, num_tokens: int, context: int, make: Make, device: str, projections: Any
) -> Step:
    """A decode of one token per request behind `context` tokens; without a context, a prefill of
    one request."""
    num_reqs, query_len = (num_tokens, 1) if context else (1, num_tokens)
    length = context + query_len
    v4 = sparse_mla.v4
    config = v4.Config(
        HEADS, topk_tokens=TOPK, index_n_heads=INDEX_HEADS, o_groups=GROUPS, device=device,
        max_num_seqs=num_reqs, max_num_batched_tokens=num_tokens, max_model_len=length,
    )  # fmt: skip
    layer = v4.SparseMLA(config, ratio, make_weights(ratio, length, make), projections)
    builder = v4.MetadataBuilder(config)
    tables: dict[str, Any] = {"compressed": {}, "states": {}}
    caches: dict[str, Array] = {}
    swa, caches["swa"] = pages_of(
        make, num_reqs, length, SWA_BLOCK_SIZE, (SWA_BLOCK_SIZE, V4_ROW_BYTES)
    )
    if ratio > 1:
        rows, size = BLOCK_SIZE // ratio, STATE_BLOCK_SIZES[ratio]
        width = 1024 if ratio == 4 else 512
        paged = pages_of(make, num_reqs, length, BLOCK_SIZE, (rows, V4_ROW_BYTES))
        tables["compressed"][ratio], caches["compressed"] = paged
        paged = pages_of(make, num_reqs, length, size, (size, 2 * width), "float32")
        tables["states"][ratio], caches["state"] = paged
    if ratio == 4:
        tables["index"], caches["index"] = pages_of(
            make, num_reqs, length, BLOCK_SIZE, (BLOCK_SIZE // 4, INDEX_ROW_BYTES)
        )
        tables["index_states"], caches["index_state"] = pages_of(
            make, num_reqs, length, 4, (4, 512), "float32"
        )
    common = make_batch(make, swa, num_reqs, query_len, length)
    x = make("hidden states", (num_tokens, HIDDEN), "bfloat16")
    metadata = builder.build(common, **tables)
    return Step(layer, x, v4.Caches(**caches), metadata, builder)


def pages_of(
    make: Make, num_reqs: int, length: int, tokens: int, page: tuple[int, int], dtype="uint8"
) -> tuple[Array, Array]:
    """A block table with pages of `tokens` tokens, and the cache."""
    need = -(-length // tokens)
    table = np.arange(num_reqs * need, dtype=np.int32).reshape(num_reqs, need)
    return as_given(make, table), make("zeros", (num_reqs * need, *page), dtype)


def as_given(make: Make, values: np.ndarray) -> Array:
    """An array of these integers in the framework that `make` stands for."""
    array = make("zeros", values.shape, str(values.dtype))
    array[...] = array.new_tensor(values) if hasattr(array, "new_tensor") else values
    return array


def make_batch(make: Make, table: Array, num_reqs: int, query_len: int, length: int) -> Any:
    starts = (query_len * np.arange(num_reqs + 1)).astype(np.int32)
    lens = np.full(num_reqs, length, np.int32)
    need = -(-length // SWA_BLOCK_SIZE)
    positions = np.arange(length - query_len, length)
    slots = np.arange(num_reqs)[:, None] * need * SWA_BLOCK_SIZE + positions
    return sparse_mla.CommonAttentionMetadata(
        query_start_loc=as_given(make, starts),
        seq_lens=as_given(make, lens),
        slot_mapping=as_given(make, slots.reshape(-1)),
        block_table=table,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
    )


def make_weights(ratio: int, length: int, make: Make) -> Any:
    c, width = 2 if ratio == 4 else 1, HEADS // GROUPS * 512
    weights: dict[str, Array] = {
        "q_norm": make("norm", (Q_LORA,), "bfloat16"),
        "kv_norm": make("norm", (512,), "bfloat16"),
        "attn_sink": make("sink", (HEADS,), "float32"),
        "rope_table": make("angles", (length, 64), "float32"),
        "wo_a": make("wo_a", (GROUPS, RANK, width), "uint8"),
        "wo_a_scale": make("scales", (GROUPS, RANK // 128, width // 128), "float32"),
    }
    if ratio > 1:
        weights["ape"] = make("ape", (ratio, c * 512), "float32")
        weights["compressor_norm"] = make("norm", (512,), "bfloat16")
    if ratio == 4:
        weights["index_ape"] = make("ape", (ratio, 256), "float32")
        weights["index_norm"] = make("norm", (128,), "bfloat16")
    return sparse_mla.v4.Weights(**weights)


# --- parts ---------------------------------------------------------------------------------------

Parts = list[tuple[str, Callable[[], object]]]


class Recorder:
    """The operators, whose calls it keeps."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return keep_calls(self.parts, name, getattr(sparse_mla, name))


def keep_calls(parts: Parts, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `function` and keeps the call, without the stream: it may run again in a capture."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        later = {key: value for key, value in keywords.items() if key != "stream"}
        parts.append((name, lambda: function(*arguments, **later)))
        return function(*arguments, **keywords)

    return call


@contextmanager
def recorded(layer: Any) -> Iterator[Parts]:
    """Keeps the calls that `forward` makes of operators, of attention, and of projections."""
    parts: Parts = []
    projections = dict(layer.projections)
    attend = layer.attend
    layer.attend = keep_calls(parts, "attend", attend)
    for name, function in projections.items():
        layer.projections[name] = keep_calls(parts, name, function)
    with mock.patch.object(forward, "ops", Recorder(parts)):
        yield parts
    del layer.attend
    layer.projections.update(projections)


def parts_of(step: Step) -> Parts:
    with recorded(step.layer) as parts:
        step.run()
    return parts
