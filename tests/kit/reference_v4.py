"""Reference of DeepSeek V4's backend layer: batches, the metadata of a step entry by entry, and the
keys that a token sees. In plain Python integers, from the contract's table; shares nothing with
csrc.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from reference_index import padded, slot
from reference_plan import split_decodes_and_prefills


@dataclass
class Sizes:
    """What the metadata depends on; the names are those of v4.Config."""

    window: int = 6
    swa_block_size: int = 4
    block_size: int = 32
    ratios: tuple = (4, 16)
    state_block_sizes: dict = field(default_factory=lambda: {4: 4, 16: 8})
    max_num_seqs: int = 12
    max_num_batched_tokens: int = 160
    max_model_len: int = 2500
    decode_threshold: int = 1
    prefill_chunk_size: int = 3

    def options(self) -> dict:
        fields = dict(vars(self))
        return {"compress_ratios": fields.pop("ratios"), **fields}


@dataclass
class V4Batch:
    query_lens: list
    seq_lens: np.ndarray
    slot_mapping: np.ndarray
    block_table: np.ndarray
    compressed: dict
    states: dict
    max_seq_len: int | None = None

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)

    def common(self, sparse_mla, **arrays):
        """-> the CommonAttentionMetadata, of other arrays for some names."""
        names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
        given = {name: getattr(self, name) for name in names} | arrays
        return sparse_mla.CommonAttentionMetadata(
            **given,
            query_start_loc_cpu=self.query_start_loc,
            seq_lens_cpu=self.seq_lens,
            num_actual_tokens=self.num_tokens,
            max_seq_len=self.max_seq_len,
        )

    def tokens(self):
        """-> the request and the position of each token; (-1, 0) for padding."""
        found = [
            (b, int(self.seq_lens[b]) - n + i)
            for b, n in enumerate(self.query_lens)
            for i in range(n)
        ]
        return found + [(-1, 0)] * (self.num_tokens - len(found))

    def is_valid(self, t: int) -> bool:
        return self.tokens()[t][0] >= 0 and int(self.slot_mapping[t]) >= 0


def random_table(rng, rows: int, need: int, pages: int) -> np.ndarray:
    """A table with more or fewer columns than are needed, and with some bad entries."""
    width = max(need + int(rng.integers(-1, 3)), 0)
    table = rng.integers(0, pages, (rows + int(rng.integers(0, 2)), width)).astype(np.int32)
    table[rng.random(table.shape) < 0.1] = rng.choice([-1, -(2**31)])
    table[rng.random(table.shape) < 0.02] = 2**31 - 1
    return table


def random_batch(rng, sizes: Sizes, *, longest=400) -> V4Batch:
    """Decodes of several lengths, then prefills, then padding tokens; some may be missing."""
    num_decodes, num_prefills = int(rng.integers(0, 5)), int(rng.integers(0, 5))
    most = sizes.decode_threshold
    lens = [int(rng.integers(1, most + 1)) for _ in range(num_decodes)]
    lens += [int(rng.integers(most + 1, most + 20)) for _ in range(num_prefills)]
    context = rng.choice([0, 1, 5, longest // 3, longest], len(lens))
    seq_lens = np.array([n + int(c) for n, c in zip(lens, context, strict=True)], np.int32)
    padding = int(rng.integers(0, 4)) if lens else 0
    slots = rng.integers(0, 1000, sum(lens) + padding).astype(rng.choice(["int64", "int32"]))
    slots[rng.random(len(slots)) < 0.1] = -1
    top = int(seq_lens.max(initial=0))

    def table(block_size):
        return random_table(rng, len(lens), -(-top // block_size), 50)

    return V4Batch(
        lens, seq_lens, slots,
        block_table=table(sizes.swa_block_size),
        compressed={r: table(sizes.block_size) for r in sizes.ratios},
        states={r: table(sizes.state_block_sizes[r]) for r in sizes.ratios},
        max_seq_len=min(top + int(rng.integers(0, 300)), sizes.max_model_len),
    )  # fmt: skip


def used_width(sizes: Sizes, ratio: int, max_seq_len: int) -> int:
    groups = (sizes.max_model_len + ratio - 1) // ratio
    stride = (groups + 127) // 128 * 128
    used = 128
    while used < max_seq_len // ratio:
        used *= 2
    return min(stride, used)


def window_of(sizes: Sizes, batch: V4Batch, t: int) -> list[int]:
    """The slots of a valid token's window."""
    b, p = batch.tokens()[t]
    first = max(p - sizes.window + 1, 0)
    return [slot(batch.block_table[b], i, sizes.swa_block_size) for i in range(first, p + 1)]


def step(sizes: Sizes, batch: V4Batch) -> dict:
    """Every array of the step, by its name in Metadata."""
    tokens = batch.tokens()
    valid = [batch.is_valid(t) for t in range(batch.num_tokens)]
    windows = [window_of(sizes, batch, t) if v else [] for t, v in enumerate(valid)]
    query_lens = np.array(batch.query_lens, np.int64)
    return {
        "req_id_per_token": [max(b, 0) for b, _ in tokens],
        "positions": [p for _, p in tokens],
        "is_valid": valid,
        "swa_indices": [padded(w, sizes.window) for w in windows],
        "swa_lens": [len(w) for w in windows],
        "gather_lens": [
            int(n + min(s - n, sizes.window - 1))
            for n, s in zip(query_lens, batch.seq_lens, strict=True)
        ],
    }


def split(sizes: Sizes, batch: V4Batch) -> tuple[int, int, int, int]:
    return split_decodes_and_prefills(
        batch.query_start_loc, batch.num_tokens, decode_threshold=sizes.decode_threshold
    )


def layer(sizes: Sizes, batch: V4Batch, ratio: int, table=None, states=None) -> dict:
    """Every array of `Metadata.layers[ratio]`, by its name."""
    table = batch.compressed[ratio] if table is None else table
    states = batch.states[ratio] if states is None else states
    rows = sizes.block_size // ratio
    width = used_width(sizes, ratio, batch.max_seq_len)
    num_decode_tokens = split(sizes, batch)[2]
    found = {name: [] for name in ("slot_mapping", "state_slot_mapping", "context_lens")}
    found |= {name: [] for name in ("decode_indices", "decode_lens", "prefill_indices")}
    for t, (b, p) in enumerate(batch.tokens()):
        valid = batch.is_valid(t)
        closes = valid and (p + 1) % ratio == 0
        found["slot_mapping"].append(slot(table[b], p // ratio, rows) if closes else -1)
        state_size = sizes.state_block_sizes[ratio]
        found["state_slot_mapping"].append(slot(states[b], p, state_size) if valid else -1)
        found["context_lens"].append((p + 1) // ratio if valid else 0)
        n = min((p + 1) // ratio, width) if valid else 0
        if t < num_decode_tokens:
            slots = [slot(table[b], j, rows) for j in range(n)]
            found["decode_indices"].append(padded(slots, width))
            found["decode_lens"].append(n)
        else:
            found["prefill_indices"].append(padded(list(range(n)), width))
    return found


def chunks(sizes: Sizes, batch: V4Batch) -> list[tuple[int, int, slice]]:
    """The first and the last request of each chunk, counted from the first prefill, and its
    tokens."""
    num_decodes, num_prefills = split(sizes, batch)[:2]
    starts = batch.query_start_loc
    found = []
    for a in range(0, num_prefills, sizes.prefill_chunk_size):
        b = min(a + sizes.prefill_chunk_size, num_prefills)
        tokens = slice(int(starts[num_decodes + a]), int(starts[num_decodes + b]))
        found.append((a, b, tokens))
    return found
