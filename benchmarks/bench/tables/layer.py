"""A DeepSeek V4 layer of V4-Flash's sizes in a step. On the CPU `forward` stands beside the sum of
the operators that it calls, and its projections take no time: they return arrays that are there. On
CUDA it is measured with projections by PyTorch, without streams beside the main one and with them,
and so is each of its parts: one call, L2 flushed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

import sparse_mla
from bench.common.composition import torch
from bench.common.rows import Bench
from bench.common.timing import Table, describe_error
from sparse_mla._rows import V4_ROW_BYTES, row_of
from sparse_mla.v4 import forward

Array = Any
CPU_CONTEXT = 4096
SHAPES = ((1, 4096), (1, 65536), (128, 4096), (128, 65536), (8192, 0))  # tokens, context
STREAMS = (1, 2, 3)

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


def make_step(a: Any, ratio: int, num_tokens: int, context: int, projections: Any) -> Step:
    """A decode of one token per request behind `context` tokens; without a context, a prefill of
    one request."""
    num_reqs, query_len = (num_tokens, 1) if context else (1, num_tokens)
    length = context + query_len
    v4 = sparse_mla.v4
    config = v4.Config(
        HEADS, topk_tokens=TOPK, index_n_heads=INDEX_HEADS, o_groups=GROUPS, device=a.device,
        max_num_seqs=num_reqs, max_num_batched_tokens=num_tokens, max_model_len=length,
    )  # fmt: skip
    layer = v4.SparseMLA(config, ratio, make_weights(a, ratio, length), projections)
    builder = v4.MetadataBuilder(config)
    tables: dict[str, Any] = {"compressed": {}, "states": {}}
    caches: dict[str, Array] = {}
    swa, caches["swa"] = pages_of(
        a, num_reqs, length, SWA_BLOCK_SIZE, (SWA_BLOCK_SIZE, V4_ROW_BYTES)
    )
    if ratio > 1:
        rows, size = BLOCK_SIZE // ratio, STATE_BLOCK_SIZES[ratio]
        width = 1024 if ratio == 4 else 512
        paged = pages_of(a, num_reqs, length, BLOCK_SIZE, (rows, V4_ROW_BYTES))
        tables["compressed"][ratio], caches["compressed"] = paged
        paged = pages_of(a, num_reqs, length, size, (size, 2 * width), "float32")
        tables["states"][ratio], caches["state"] = paged
    if ratio == 4:
        tables["index"], caches["index"] = pages_of(
            a, num_reqs, length, BLOCK_SIZE, (BLOCK_SIZE // 4, INDEX_ROW_BYTES)
        )
        tables["index_states"], caches["index_state"] = pages_of(
            a, num_reqs, length, 4, (4, 512), "float32"
        )
    common = make_batch(a, swa, num_reqs, query_len, length)
    x = a.randn(num_tokens, HIDDEN)
    metadata = builder.build(common, **tables)
    return Step(layer, x, v4.Caches(**caches), metadata, builder)


def pages_of(
    a: Any, num_reqs: int, length: int, tokens: int, page: tuple[int, int], dtype="uint8"
) -> tuple[Array, Array]:
    """A block table with pages of `tokens` tokens, and the cache."""
    need = -(-length // tokens)
    table = np.arange(num_reqs * need, dtype=np.int32).reshape(num_reqs, need)
    return a.put(table), a.zeros(num_reqs * need, *page, dtype=dtype)


def make_batch(a: Any, table: Array, num_reqs: int, query_len: int, length: int) -> Any:
    starts = (query_len * np.arange(num_reqs + 1)).astype(np.int32)
    lens = np.full(num_reqs, length, np.int32)
    need = -(-length // SWA_BLOCK_SIZE)
    positions = np.arange(length - query_len, length)
    slots = np.arange(num_reqs)[:, None] * need * SWA_BLOCK_SIZE + positions
    return sparse_mla.CommonAttentionMetadata(
        query_start_loc=a.put(starts),
        seq_lens=a.put(lens),
        slot_mapping=a.put(slots.reshape(-1)),
        block_table=table,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
    )


def make_weights(a: Any, ratio: int, length: int) -> Any:
    c, width = 2 if ratio == 4 else 1, HEADS // GROUPS * 512
    weights: dict[str, Array] = {
        "q_norm": a.randn(Q_LORA),
        "kv_norm": a.randn(512),
        "attn_sink": a.randn(HEADS, dtype="float32"),
        "rope_table": a.put(sparse_mla.rope_table(length, fp32_angles=True)),
        "wo_a": a.randint(0, 0x50, GROUPS, RANK, width, dtype="uint8"),  # e4m3, no NaN
        "wo_a_scale": a.randn(GROUPS, RANK // 128, width // 128, dtype="float32"),
    }
    if ratio > 1:
        weights["ape"] = a.randn(ratio, c * 512, dtype="float32")
        weights["compressor_norm"] = a.randn(512)
    if ratio == 4:
        weights["index_ape"] = a.randn(ratio, 256, dtype="float32")
        weights["index_norm"] = a.randn(128)
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


# --- tables --------------------------------------------------------------------------------------


def measure(bench: Bench) -> Table:
    return measure_parts(bench) if bench.is_cuda else measure_whole(bench)


def measure_whole(bench: Bench) -> Table:
    title = f"A DeepSeek V4 layer without its projections, {bench.threads} threads"
    columns = ["layer", "T", "context", "forward, ms", "its operators, ms", "÷"]
    table = Table(title, columns, [], [])
    shapes = [(ratio, num_tokens) for ratio in RATIOS for num_tokens in (1, 16)]
    for ratio, num_tokens in bench.choose(shapes, [(4, 1)]):
        ready = make_ready(bench.arrays, ratio, num_tokens)
        step = make_step(bench.arrays, ratio, num_tokens, CPU_CONTEXT, ready)
        parts = parts_of(step)

        def run_parts(parts: Parts = parts) -> None:
            for _, call in parts:
                call()

        seconds = bench.time({"forward": step.run, "operators": run_parts})
        whole, sum_of_parts = seconds["forward"], seconds["operators"]
        record = {"layer": RATIOS[ratio], "T": num_tokens, "context": CPU_CONTEXT}
        row = [*map(str, record.values()), f"{1e3 * whole:.3f}"]
        row += [f"{1e3 * sum_of_parts:.3f}", f"{whole / sum_of_parts:.3f}"]
        table.add(row, record | {"seconds": whole, "operators_seconds": sum_of_parts})
    return table


def make_ready(a: Any, ratio: int, num_tokens: int) -> dict[str, Callable[..., Array]]:
    """Projections that return an array that is there."""

    def make(name: str) -> Callable[..., Array]:
        dtype = "float32" if name.endswith("wkv_wgate") else "bfloat16"
        y = a.randn(num_tokens, width_of(name, ratio)[1], dtype=dtype)
        return lambda _: y

    return {name: make(name) for name in names_of(ratio)}


def measure_parts(bench: Bench) -> Table:
    columns = ["layer", "T", "context", "part", "µs", *(f"{n} streams" for n in STREAMS), "÷"]
    table = Table("A DeepSeek V4 layer (V4-Flash) and its parts, L2 flushed, µs", columns, [], [])
    for num_tokens, context in bench.choose(SHAPES, SHAPES[:1]):
        for ratio, name in RATIOS.items():
            try:
                products = make_products(bench.arrays, ratio)
                step = make_step(bench.arrays, ratio, num_tokens, context, products)
                add_parts(bench, table, step, {"layer": name, "T": num_tokens, "context": context})
            except Exception as error:  # the other layers go on
                text = describe_error(error)
                table.failures.append(f"{name}, T {num_tokens}, context {context}: {text}")
    return table


def add_parts(bench: Bench, table: Table, step: Step, labels: dict[str, object]) -> None:
    want = step.run()
    sides: dict[str, Callable[[], object]] = {"one": step.run}
    for count in STREAMS:
        call = partial(step.run, streams=[torch.cuda.Stream() for _ in range(count)])
        if not torch.equal(call(), want):
            table.failures.append(f"{labels}: {count} streams change the result")
        sides[str(count)] = call
    one, *with_streams = (1e6 * x for x in bench.time(sides).values())
    cells = [f"{x:.1f}" for x in (one, *with_streams)]
    first = [str(x) for x in labels.values()]
    record = labels | {"us": one, "us_streams": with_streams}
    table.add([*first, "all", *cells, f"{min(with_streams) / one:.2f}"], record)
    parts = {f"{i} {name}": call for i, (name, call) in enumerate(parts_of(step))}
    for name, spent in bench.time(parts).items():
        part = name.split(" ", 1)[1]
        row = [*first, part, f"{1e6 * spent:.1f}", *[""] * len(STREAMS), ""]
        table.add(row, labels | {"part": part, "us": 1e6 * spent})


def make_products(a: Any, ratio: int) -> dict[str, Callable[..., Array]]:
    """Products by PyTorch. The compressors' are bf16: the compressor takes them, too."""

    def make(name: str) -> Callable[..., Array]:
        rows, columns = width_of(name, ratio)
        weight = a.randn(rows, columns) / rows**0.5
        return lambda x: torch.mm(x, weight)

    return {name: make(name) for name in names_of(ratio)}
