"""Steps of a compressor: states and rows, before and after, as every byte must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import reference_compressor as compressor
import row_formats as rows
from cases import angles
from helpers import assert_same_bits
from library import sparse_mla

F32 = np.float32
EPS = 1e-6
KV_SCALE = 0.37  # scale of caches that have one
MAX_POS = 800
STEP = ("kv", "score", "ape")


class Case:
    """A step of some requests: (tokens before it, tokens of it) each, in any order, with padding at
    its end. The states before the step are random, those of freed pages NaN, and unused parts of
    the state's memory, too."""

    def __init__(
        self,
        requests=((0, 9), (3, 1), (7, 5)),
        *,
        ratio=4,
        fmt="fp8_v4",
        layout="paged",
        sbs=4,
        dtype: Any = F32,
        integers: Any = np.int64,
        weight_dtype: Any = F32,
        padding=3,
        gap=0,
        ring=0,
        seed=0,
    ) -> None:
        rng = np.random.default_rng([seed, ratio, len(requests)])
        self.pages = rows.Pages(fmt, layout, pages=self.cache_pages(requests, ratio))
        dim, c = self.pages.format.width, compressor.overlap(ratio)
        width = c * dim
        blocks = max(-(-(before + n) // sbs) for before, n in requests)
        if ring:
            blocks = max(blocks, ring)
        used = len(requests) * (ring or blocks)
        self.memory = np.full((used + 2, sbs, 2 * width + gap), np.nan, F32)
        self.state = self.memory[:, :, : 2 * width]
        self.state[:] = rng.normal(0, 2, self.state.shape)
        numbers = rng.permutation(used + 2)[:used].reshape(len(requests), -1)
        self.table = np.full((len(requests), blocks), -1, np.int32)
        tokens, kv_slots, next_row = [], [], 0
        cache_rows = rng.permutation(self.pages.pages * self.pages.block_size)
        for r, (before, n) in enumerate(requests):
            for block in range(-(-(before + n) // sbs)):
                self.table[r, block] = numbers[r, block % ring if ring else block]
            keep = max(0, ratio * (before // ratio - c + 1))
            for block in range(keep // sbs if not ring else 0):  # freed
                self.state[self.table[r, block]] = np.nan
                self.table[r, block] = -1
            for p in range(before, before + n):
                closes = (p + 1) % ratio == 0
                tokens.append((r, p))
                kv_slots.append(int(cache_rows[next_row]) if closes else -1)
                next_row += closes
        order = rng.permutation(len(requests))
        at = [t for r in order for t, token in enumerate(tokens) if token[0] == r]
        requests_of, positions = np.array(tokens, np.int64).reshape(-1, 2)[at].T
        slots = [
            compressor.slot_of(self.table[r], p, sbs)
            for r, p in zip(requests_of, positions, strict=True)
        ]
        pad = np.full(padding, -1)
        self.arrays: dict[str, Any] = {
            "state": self.state,
            "block_table": self.table,
            "req_id_per_token": np.append(requests_of, 0 * pad).astype(np.int32),
            "positions": np.append(positions, 0 * pad).astype(integers),
            "slot_mapping": np.append(slots, pad).astype(integers),
            "kv_cache": self.pages.cache,
            "kv_slot_mapping": np.append(np.array(kv_slots)[at], pad).astype(integers),
            "norm_weight": rng.normal(1, 0.3, dim).astype(weight_dtype),
            "rope_table": angles(MAX_POS),
        }
        count = len(at) + padding
        both = rng.normal(0, 2, (count, 2 * width)).astype(dtype)  # one projection's result
        self.step: dict[str, Any] = {
            "kv": both[:, :width],
            "score": both[:, width:],
            "ape": rng.normal(0, 1, (ratio, width)).astype(F32),
        }
        self.options: dict[str, Any] = {"eps": EPS, "ratio": ratio} | self.pages.options
        if self.pages.format.scales == "cache":
            self.options["kv_scale"] = KV_SCALE

    @staticmethod
    def cache_pages(requests, ratio: int) -> int:
        return sum((before + n) // ratio for before, n in requests) // 5 + 2

    @property
    def call(self) -> dict[str, Any]:
        return self.arrays | {"ratio": self.options["ratio"]}

    def save(self, **options):
        kv, score, ape = (self.step[name] for name in STEP)
        a = self.arrays
        return sparse_mla.save_partial_states(
            kv, score, ape, a["positions"], a["state"], a["slot_mapping"], **options
        )

    def close(self, **options):
        return sparse_mla.compress_norm_rope_store(
            *self.arrays.values(), **(self.options | options)
        )

    def want_memory(self) -> np.ndarray:
        """The state's memory after the step."""
        memory = self.memory.copy()
        slots = self.arrays["slot_mapping"]
        keep = np.flatnonzero(slots >= 0)
        kv, score, ape = (self.step[name] for name in STEP)
        width = kv.shape[1]
        new = compressor.state_rows(kv, score, ape, self.arrays["positions"][: len(kv)])
        pages, offsets = np.divmod(slots[keep].astype(np.int64), self.state.shape[1])
        memory[pages, offsets, : 2 * width] = new[keep]
        return memory

    def groups(self, memory: np.ndarray) -> dict[int, compressor.Group]:
        flat = memory.reshape(-1, memory.shape[2])[:, : self.state.shape[2]]
        return compressor.compress(self.call, flat)

    def want_pages(self, memory: np.ndarray) -> np.ndarray:
        """The cache's memory after the step."""
        before = self.pages.memory.copy()
        groups = self.groups(memory)
        if groups:
            weight, table = self.arrays["norm_weight"], self.arrays["rope_table"]
            bits = [
                compressor.key_bits(g, weight, table, self.options["eps"]) for g in groups.values()
            ]
            encoded = self.pages.format.encode(np.array(bits), KV_SCALE)
            self.pages.put(np.array(list(groups)), *encoded)
        after = self.pages.memory.copy()
        self.pages.memory[:] = before
        return after

    def check(self, fused: bool) -> None:
        """The whole memory of state and cache is as the reference leaves it."""
        state, inputs = self.want_memory(), {n: x.copy() for n, x in self.step.items()}
        pages = self.want_pages(state)
        if fused:
            assert self.close(**self.step) is self.pages.cache
        else:
            assert self.save() is self.arrays["state"]
            assert_same_bits(self.memory, state, "state")
            assert self.close() is self.pages.cache
        assert_same_bits(self.memory, state, "state")
        assert_same_bits(self.pages.memory, pages, "cache")
        for name, x in inputs.items():
            assert_same_bits(np.ascontiguousarray(self.step[name]), np.ascontiguousarray(x), name)


def check_both(*args, **options) -> None:
    for fused in (False, True):
        Case(*args, **options).check(fused)
