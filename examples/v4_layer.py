"""A layer of DeepSeek V4 over paged caches, compared with the same layer in plain NumPy.

    python examples/v4_layer.py

The layer has compress ratio 4 and an indexer. Two requests are served as an engine serves them:
their prompts in chunks, then token by token. Each token sees the last WINDOW tokens, and those TOPK
of the complete groups of four tokens that the indexer likes best.

`plain` computes a whole request at once, without pages, steps and states. It rounds only where the
indexer compares groups, because FP8 decides there which ones are chosen. So the table's first lines
show what rounding to bf16 costs, the last ones what FP8 costs. The exit status is 1 if a token's
result is off by more than the bound, or if too many choices are too close to call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import ml_dtypes
import numpy as np

import sparse_mla
from sparse_mla import v4

Array = np.ndarray[Any, Any]
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn

HIDDEN, Q_LORA, HEADS, GROUPS, RANK, INDEX_HEADS = 64, 96, 4, 2, 32, 4
RATIO, WINDOW, TOPK, EPS = 4, 16, 6, 1e-6
PROMPTS, LENGTHS, CHUNK = (45, 30), (70, 61), 20  # tokens of the prompts, requests, prefill steps
PAGE = 4  # rows per page of every cache
WO_A_SCALE = 2.0**-9  # brings the weights wo_a into the range of e4m3

# Parts of the length of a token's result. One wrong group of the six changes it by 10 % and more.
BOUNDS: dict[Literal["bfloat16", "fp8_v4"], float] = {"bfloat16": 0.02, "fp8_v4": 0.12}
MARGIN = 2.0**-8  # a choice is too close if two scores differ by less, as a part of the best one
MOST_CLOSE = 0.1  # part of all tokens

rng = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return rng.normal(0, 1, shape).astype(np.float32)


# --- weights, and the projections, which belong to the model and not to the library --------------

shapes = {
    "fused_wqa_wkv": (HIDDEN, Q_LORA + 512),  # -> the latent query and the key
    "wq_b": (Q_LORA, HEADS * 512),
    "wkv_wgate": (HIDDEN, 2 * 1024),  # -> values and scores of the compressor
    "index_wkv_wgate": (HIDDEN, 2 * 256),  # -> those of the indexer's compressor
    "index_wq_b": (Q_LORA, INDEX_HEADS * 128),
    "index_weights_proj": (HIDDEN, INDEX_HEADS),
    "wo_b": (GROUPS * RANK, HIDDEN),
}
matrices = {name: normal(*shape) / np.float32(shape[0] ** 0.5) for name, shape in shapes.items()}


def projection(name: str) -> Callable[[Array], Array]:
    dtype = np.float32 if name.endswith("wkv_wgate") else BF16  # compressors pool in fp32
    return lambda x: (x.astype(np.float32) @ matrices[name]).astype(dtype)


projections = {name: projection(name) for name in matrices}
weights = {
    "q_norm": 1 + normal(Q_LORA) / 8,
    "kv_norm": 1 + normal(512) / 8,
    "attn_sink": normal(HEADS),
    "rope_table": sparse_mla.rope_table(max(LENGTHS), fp32_angles=True),
    "wo_a": normal(GROUPS, RANK, HEADS // GROUPS * 512) / np.float32(32),
    "ape": normal(RATIO, 1024) / 4,
    "compressor_norm": 1 + normal(512) / 8,
    "index_ape": normal(RATIO, 256) / 4,
    "index_norm": 1 + normal(128) / 8,
}
hidden = [normal(n, HIDDEN).astype(BF16) for n in LENGTHS]  # the tokens of every request


# --- the layer in plain NumPy --------------------------------------------------------------------


def project(name: str, x: Array) -> Array:
    return projections[name](x.astype(BF16)).astype(np.float64)


def norm(x: Array, weight: Array | float = 1.0) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def turn(x: Array, positions: Array, direction: int = 1) -> Array:
    """RoPE: the last 64 values are 32 pairs of neighbours, each with an angle of its own."""
    angles = weights["rope_table"][positions].astype(np.float64)
    angles = angles.reshape(-1, *(1,) * (x.ndim - 2), 64)  # the same ones for all heads
    cos, sin = angles[..., :32], direction * angles[..., 32:]
    a, b, turned = x[..., -64::2], x[..., -63::2], x.copy()
    turned[..., -64::2], turned[..., -63::2] = a * cos - b * sin, b * cos + a * sin
    return turned


def softmax(logits: Array, axis: int) -> Array:
    e = np.exp(logits - logits.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def pool(kv_score: Array, ape: Array, norm_weight: Array) -> Array:
    """A row for each complete group. It pools eight tokens: the group's own by the second halves of
    their values and scores, and the four before them by the first halves."""
    count, size = len(kv_score) // RATIO, len(norm_weight)
    by_group = kv_score[: count * RATIO].reshape(count, RATIO, 2, 2, size)
    values, scores = by_group[:, :, 0], by_group[:, :, 1] + ape.reshape(RATIO, 2, size)
    nothing = np.zeros((1, RATIO, size))  # lies before the first group
    before = np.concatenate([nothing, values[:-1, :, 0]])
    before_scores = np.concatenate([nothing - np.inf, scores[:-1, :, 0]])
    shares = softmax(np.concatenate([before_scores, scores[:, :, 1]], axis=1), axis=1)
    rows = (shares * np.concatenate([before, values[:, :, 1]], axis=1)).sum(1)
    return turn(norm(rows, norm_weight), np.arange(count) * RATIO)


def to_fp8(x: Array) -> Array:
    """Each row to e4m3, times the smallest power of two that brings it to 448 at most."""
    x = x.astype(BF16).astype(np.float64)
    scale = np.exp2(np.ceil(np.log2(np.abs(x).max(-1, keepdims=True) / 448)))
    return (x / scale).astype(E4M3).astype(np.float64) * scale


def choose(x: Array, qr: Array, complete: Array) -> tuple[Array, Array]:
    """-> the groups that each token chooses, and whether two are too close to call"""
    keys = pool(project("index_wkv_wgate", x), weights["index_ape"], weights["index_norm"])
    q = turn(project("index_wq_b", qr).reshape(len(x), INDEX_HEADS, 128), np.arange(len(x)))
    products = np.einsum("thd,gd->thg", to_fp8(q), to_fp8(keys))
    scores = np.einsum("th,thg->tg", project("index_weights_proj", x), np.maximum(products, 0))
    scores = np.where(complete, scores, -np.inf)
    best = -np.sort(-scores, axis=1)
    has_more = np.isfinite(best[:, TOPK])  # otherwise a token takes all that there are
    gap = np.where(has_more, best[:, TOPK - 1], np.inf) - np.where(has_more, best[:, TOPK], 0)
    return complete & (scores >= best[:, TOPK - 1 : TOPK]), gap < MARGIN * np.abs(best[:, 0])


def plain(x: Array) -> tuple[Array, Array]:
    """-> the layer's results for a request, and whose choice is too close to call"""
    positions = np.arange(len(x))
    qr_kv = project("fused_wqa_wkv", x)
    qr = norm(qr_kv[:, :Q_LORA], weights["q_norm"])
    kv = turn(norm(qr_kv[:, Q_LORA:], weights["kv_norm"]), positions)
    q = turn(norm(project("wq_b", qr).reshape(len(x), HEADS, 512)), positions)
    rows = pool(project("wkv_wgate", x), weights["ape"], weights["compressor_norm"])

    age = positions[:, None] - positions
    complete = np.arange(len(rows)) < (positions[:, None] + 1) // RATIO
    chosen, is_close = choose(x, qr, complete)
    seen = np.concatenate([(age >= 0) & (age < WINDOW), chosen], axis=1)

    keys = np.concatenate([kv, rows])  # keys are the values, too
    logits = np.where(seen[:, None], 512**-0.5 * np.einsum("thd,kd->thk", q, keys), -np.inf)
    sink = np.broadcast_to(weights["attn_sink"][:, None], (len(x), HEADS, 1))
    shares = softmax(np.concatenate([logits, sink], axis=2), axis=2)[..., :-1]
    out = turn(shares @ keys, positions, -1).reshape(len(x), GROUPS, -1)
    z = np.einsum("tgr,gnr->tgn", out, weights["wo_a"])
    return project("wo_b", z.reshape(len(x), -1)), is_close


# --- the library's layer, in an engine's hands ---------------------------------------------------


class Engine:
    def __init__(self, kv_format: Literal["bfloat16", "fp8_v4"]) -> None:
        config = v4.Config(
            HEADS,
            window=WINDOW,
            compress_ratios=[RATIO],
            topk_tokens=TOPK,
            index_n_heads=INDEX_HEADS,
            o_groups=GROUPS,
            kv_cache_dtype=kv_format,
            block_size=RATIO * PAGE,  # tokens of a page of groups
            swa_block_size=PAGE,
            state_block_sizes={RATIO: PAGE},
            max_num_seqs=len(LENGTHS),
            max_num_batched_tokens=len(LENGTHS) * CHUNK,
            max_model_len=max(LENGTHS),
            eps=EPS,
        )
        wo_a = {"wo_a": weights["wo_a"].astype(BF16)}  # it may be bf16 with any cache
        if kv_format == "fp8_v4":
            blocks = GROUPS, -(-RANK // 128), HEADS // GROUPS * 512 // 128  # 128 x 128 weights each
            wo_a = {"wo_a": (weights["wo_a"] / WO_A_SCALE).astype(E4M3)}
            wo_a["wo_a_scale"] = np.full(blocks, WO_A_SCALE, np.float32)
        self.builder = v4.MetadataBuilder(config)
        self.layer = v4.SparseMLA(config, RATIO, v4.Weights(**(weights | wo_a)), projections)
        row, dtype = (512, BF16) if kv_format == "bfloat16" else (584, np.uint8)
        arrays = {  # tokens per page, values of a row, and their dtype
            "swa": (PAGE, row, dtype),
            "compressed": (PAGE * RATIO, row, dtype),
            "index": (PAGE * RATIO, 132, np.uint8),
            "state": (PAGE, 2 * 1024, np.float32),
            "index_state": (PAGE, 2 * 256, np.float32),
        }
        self.tables, caches = {}, {}  # each request has pages of its own, in any order
        for name, (tokens, values, dtype) in arrays.items():
            pages = rng.permutation(len(LENGTHS) * -(-max(LENGTHS) // tokens)).astype(np.int32)
            self.tables[name] = pages.reshape(len(LENGTHS), -1)
            caches[name] = np.zeros((len(pages), PAGE, values), dtype)
        self.caches = v4.Caches(**caches)

    def step(self, parts: list[tuple[int, int, int]]) -> Array:
        """Runs tokens of some requests: (request, first position, number of tokens)."""
        requests = [request for request, _, _ in parts]
        starts = np.cumsum([0, *(count for _, _, count in parts)], dtype=np.int32)
        seq_lens = np.array([first + count for _, first, count in parts], np.int32)
        tables = {name: table[requests] for name, table in self.tables.items()}
        slots = [
            self.tables["swa"][request, p // PAGE] * PAGE + p % PAGE
            for request, first, count in parts
            for p in range(first, first + count)
        ]
        metadata = self.builder.build(  # once per step, for all layers
            v4.CommonAttentionMetadata(starts, seq_lens, np.array(slots), tables["swa"]),
            compressed={RATIO: tables["compressed"]},
            states={RATIO: tables["state"]},
            index=tables["index"],
            index_states=tables["index_state"],
        )
        x = np.concatenate([hidden[request][first : first + n] for request, first, n in parts])
        return self.layer.forward(x, self.caches, metadata)  # once per layer

    def serve(self) -> Array:
        """-> the layer's results for every token of every request"""
        results, done = [np.zeros((n, HIDDEN)) for n in LENGTHS], [0] * len(LENGTHS)
        while unfinished := [i for i, n in enumerate(LENGTHS) if done[i] < n]:
            parts = [(i, done[i], max(min(CHUNK, PROMPTS[i] - done[i]), 1)) for i in unfinished]
            parts.sort(key=lambda part: part[2])  # decodes come first
            rows = self.step(parts)
            for i, first, count in parts:
                results[i][first : first + count], rows = rows[:count], rows[count:]
                done[i] += count
        return np.concatenate(results)


def main() -> int:
    wanted, close = (np.concatenate(x) for x in zip(*map(plain, hidden), strict=True))
    in_prompt = np.concatenate([np.arange(n) < p for n, p in zip(LENGTHS, PROMPTS, strict=True)])
    is_good, largest = bool(close.mean() <= MOST_CLOSE), 0.0
    print("caches    tokens   number  deviation: mean  largest  bound")
    for kv_format, bound in BOUNDS.items():
        got = Engine(kv_format).serve()
        deviation = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        for name, tokens in (("prompts", in_prompt & ~close), ("decodes", ~in_prompt & ~close)):
            x = deviation[tokens]
            print(f"{kv_format:9} {name} {len(x):7} {x.mean():16.2%} {x.max():8.2%} {bound:6.0%}")
            is_good &= bool(x.max() <= bound)
            largest = max(largest, x.max())
    print(f"{close.sum()} tokens are left out, whose choice of groups is too close to call")
    print(f"largest deviation {largest:.2%}: {'good' if is_good else 'BAD'}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
