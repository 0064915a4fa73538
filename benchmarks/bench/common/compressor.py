"""DeepSeek V4's compressor, for the tables of moved bytes: a prefill whose groups of 4 or of 128
become rows of an fp8_v4 cache in the launch that saves its states; what NumPy says about some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import sparse_mla
from bench.common.moves import Move
from sparse_mla._rows import KV_LORA_RANK, V4_ROW_BYTES

DIM, ROW_BYTES, BLOCK_SIZE = KV_LORA_RANK, V4_ROW_BYTES, 64
NOPE = 448  # values that RoPE leaves alone
STATE_BLOCK_SIZES = {4: 4, 128: 8}
SAMPLED = slice(None, None, 61)


def make_moves(num_tokens: int, a: Any) -> Iterator[Move]:
    put, get = a.put, a.get
    for ratio, block_size in STATE_BLOCK_SIZES.items():
        rng = np.random.default_rng(ratio)
        width = DIM * (2 if ratio == 4 else 1)
        kv, score = rng.standard_normal((2, num_tokens, width), np.float32)
        ape = rng.standard_normal((ratio, width), np.float32)
        positions = np.arange(num_tokens)
        table = rng.permutation(num_tokens // block_size).astype(np.int32)
        slots = table[positions // block_size] * np.int64(block_size) + positions % block_size
        num_groups = num_tokens // ratio
        closes = (positions + 1) % ratio == 0
        rows = np.where(closes, positions // ratio, -1)
        pages = -(-num_groups // BLOCK_SIZE)
        state = put(np.zeros((num_tokens // block_size, block_size, 2 * width), np.float32))
        cache = put(np.zeros((pages, BLOCK_SIZE, ROW_BYTES), np.uint8))
        angles = sparse_mla.rope_table(num_tokens, fp32_angles=True)
        ids, weight = np.zeros(num_tokens, np.int32), np.ones(DIM, np.float32)
        before: list[np.ndarray] = [table[None], ids, positions, slots]
        after: list[np.ndarray] = [rows, weight, angles]
        arrays = [state, *(put(x) for x in before), cache, *(put(x) for x in after)]
        step = {"kv": put(kv), "score": put(score), "ape": put(ape)}

        def compress(
            arrays: list[Any] = arrays, ratio: int = ratio, step: dict[str, Any] = step
        ) -> object:
            return sparse_mla.compress_norm_rope_store(*arrays, eps=1e-6, ratio=ratio, **step)

        saved = np.concatenate([kv, score + ape[positions % ratio]], 1)

        def is_right(
            ratio: int = ratio,
            state: Any = state,
            cache: Any = cache,
            saved: np.ndarray = saved,
            slots: np.ndarray = slots,
            num_groups: int = num_groups,
        ) -> bool:
            tokens = np.arange(len(saved))[SAMPLED]
            states = get(state).reshape(len(saved), -1)[slots[tokens]]
            groups = np.arange(num_groups)[SAMPLED]
            got = get(sparse_mla.dequantize_kv_cache(cache)).reshape(-1, DIM)[groups, :NOPE]
            want = np.array([pool(saved, int(group), ratio) for group in groups])[:, :NOPE]
            largest = np.abs(want.reshape(len(want), -1, 64)).max(2).repeat(64, 1)
            bound = 0.07 * np.abs(want) + 2.0**-9 * largest  # e4m3, and bf16 before it
            return np.array_equal(states, saved[tokens]) and bool(
                (np.abs(got - want) <= bound).all()
            )

        num_bytes = kv.nbytes + score.nbytes + saved.nbytes + num_groups * ROW_BYTES
        name = f"compress_norm_rope_store with save, C{ratio}, T {num_tokens}"
        yield Move(name, compress, num_bytes, is_right)


def pool(saved: np.ndarray, group: int, ratio: int) -> np.ndarray:
    """A row in fp64, before RoPE. `saved` [T, 2 c D] has the states by position."""
    width = saved.shape[1] // 2
    own = saved[group * ratio : (group + 1) * ratio].astype(np.float64)
    values, scores = own[:, width - DIM : width], own[:, 2 * width - DIM :]
    if width > DIM and group > 0:
        before = saved[(group - 1) * ratio : group * ratio].astype(np.float64)
        values = np.concatenate([before[:, :DIM], values])
        scores = np.concatenate([before[:, width : width + DIM], scores])
    weights = np.exp(scores - scores.max(0))
    x = (weights * values).sum(0) / weights.sum(0)
    y: np.ndarray = x / np.sqrt((x * x).mean() + 1e-6)
    return y
