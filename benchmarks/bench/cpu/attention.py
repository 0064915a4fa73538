"""sparse_attention compared with the PyTorch composition: errors, then rates and their ratio.

PyTorch's rate is the better one of two calls: all tokens at once, and token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import sparse_mla
from bench.common.timing import Effort, Table, interleave
from sparse_mla._judge import BF16, Fractions, exact_rows, judge_row
from sparse_mla._rows import FP8_ROW_BYTES, KEY_DIM, KV_LORA_RANK

if TYPE_CHECKING:
    from bench.common.composition import Composition

TOPK = 2048
NUM_SLOTS = 16384
SOFTMAX_SCALE = (128 + 64) ** -0.5
NUM_JUDGED_TOKENS = 2
FULL = (16, 64, 128), (1, 32)  # numbers of heads and of tokens
QUICK = (16, 128), (1, 8)


def make_cache(rng: np.random.Generator, kv_format: str) -> np.ndarray:
    """[S, row], filled through the library's own cache write."""
    kv_c = rng.standard_normal((NUM_SLOTS, KV_LORA_RANK), np.float32)
    k_pe = rng.standard_normal((NUM_SLOTS, 64), np.float32)
    is_fp8 = kv_format == "fp8_ds_mla"
    kv_cache = np.zeros(
        (NUM_SLOTS, FP8_ROW_BYTES if is_fp8 else KEY_DIM), np.uint8 if is_fp8 else BF16
    )
    return sparse_mla.concat_and_cache_mla(kv_c, k_pe, kv_cache, np.arange(NUM_SLOTS))


def make_attention(q: np.ndarray, kv: np.ndarray, indices: np.ndarray) -> Callable[[], tuple]:
    """A call with all of its memory given, as an engine makes it."""
    num_tokens, num_heads, _ = q.shape
    size = sparse_mla.attention_workspace_size(num_tokens, num_heads, TOPK, device="cpu")
    out = np.empty((num_tokens, num_heads, KV_LORA_RANK), BF16)
    lse = np.empty((num_tokens, num_heads), np.float32)
    workspace = np.empty(size, np.uint8)
    return lambda: sparse_mla.sparse_attention(
        q, kv, indices, softmax_scale=SOFTMAX_SCALE, out=out, lse=lse, workspace=workspace
    )


def judge(results: tuple, q: np.ndarray, kv: np.ndarray, indices: np.ndarray) -> Fractions:
    worst = Fractions()
    for token in range(min(NUM_JUDGED_TOKENS, len(q))):
        keys = exact_rows(kv[indices[token]])
        out, lse = results[0][token], results[1][token]
        worst.add(judge_row(q[token], keys, out, lse, softmax_scale=SOFTMAX_SCALE))
    return worst


def measure(effort: Effort, num_threads: int) -> Table:
    from bench.common.composition import Composition, prepare  # imports PyTorch

    dtype = prepare(num_threads)
    title = f"Sparse attention, K = {TOPK}, {NUM_SLOTS} cached tokens, {num_threads} threads"
    table = make_table(title, ["cache", "H", "T"], dtype is not None)
    rng = np.random.default_rng(0)
    head_counts, token_counts = QUICK if effort.quick else FULL
    for kv_format in ("fp8_ds_mla", "bfloat16"):
        kv = make_cache(rng, kv_format)
        for num_heads in head_counts:
            for num_tokens in token_counts:
                q = rng.standard_normal((num_tokens, num_heads, KEY_DIM), np.float32).astype(BF16)
                indices = rng.integers(NUM_SLOTS, size=(num_tokens, TOPK), dtype=np.int32)
                peer = None
                if dtype is not None:
                    peer = Composition(q, kv, indices, SOFTMAX_SCALE, dtype)
                flop = 2 * num_tokens * num_heads * TOPK * (KEY_DIM + KV_LORA_RANK)
                measure_row(
                    table,
                    {"kv_format": kv_format, "H": num_heads, "T": num_tokens},
                    flop=flop,
                    ours=make_attention(q, kv, indices),
                    peer=peer,
                    judge_results=partial(judge, q=q, kv=kv, indices=indices),
                    effort=effort,
                )
    return table


def make_table(title: str, labels: list[str], has_peer: bool) -> Table:
    columns = [*labels, "error/bound", "GFLOP/s"]
    columns += ["PyTorch: error/bound", "GFLOP/s", "ratio"] if has_peer else []
    return Table(title, columns, [], [])


def measure_row(
    table: Table,
    labels: dict[str, object],
    *,
    flop: int,
    ours: Callable[[], tuple],
    peer: Composition | None,
    judge_results: Callable[[tuple], Fractions],
    effort: Effort,
) -> None:
    """Judges both sides, then times them. The peer's time is that of its faster call."""
    sides: dict[str, Callable[[], object]] = {"ours": ours}
    errors = {"ours": judge_results(ours())}
    if peer is not None:
        sides["torch"] = peer.batched
        if len(peer.q) > 1:
            sides["torch by token"] = peer.by_token
        errors["torch"] = judge_results(peer.numpy())
    seconds = interleave(sides, effort)
    if "torch by token" in seconds:
        seconds["torch"] = min(seconds["torch"], seconds.pop("torch by token"))
    add_row(table, labels, flop, errors, seconds)


def add_row(
    table: Table,
    labels: dict[str, object],
    flop: int,
    errors: dict[str, Fractions],
    seconds: dict[str, float],
) -> None:
    """`labels` are the first cells: kv_format, H and T, and perhaps others."""
    row = [str(label) for label in labels.values()]
    record = dict(labels)
    for side, error in errors.items():
        worst = max(error.out, error.lse)
        rate = flop / seconds[side] / 1e9
        row += [f"{worst:.3g}", f"{rate:.0f}"]
        record[side] = {"error_over_bound": worst, "gflops": rate}
        if side == "ours" and worst > 1:
            name = "{kv_format} H {H} T {T}".format(**labels)
            table.failures.append(f"{name}: {worst:.3g} × bound")
    if "torch" in seconds:
        ratio = seconds["torch"] / seconds["ours"]
        row.append(f"{ratio:.2f}×")
        record["ratio"] = ratio
    table.add(row, record)
