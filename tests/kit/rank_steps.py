"""Steps of context parallelism: what a rank gets of a batch and its cache."""

from __future__ import annotations

import dataclasses

import cases
import numpy as np
from dense_cases import owner


def draw_ranks(rng) -> tuple[int, int]:
    """The number of ranks, and the interleave."""
    return int(rng.integers(1, 9)), int(rng.integers(1, 65))


def draw_len(rng, ranks: int, interleave: int, least: int) -> int:
    """A length next to a border between two ranks, at least so large."""
    borders = [n * interleave for n in range(2 * ranks + 2) if n * interleave < 300]
    return max(int(rng.choice(borders)) + int(rng.integers(-1, 2)), least)


def take_share(
    batch: cases.Batch, cache: np.ndarray, cp: tuple[int, int, int], seed: int = 0
) -> tuple[cases.Batch, np.ndarray]:
    """The batch with the rank's own table and slots, and a cache [pages, page, row] that has the
    rank's own rows alone. All other bytes are 0xFF, which is NaN, and other entries are junk."""
    rng = np.random.default_rng([seed, *cp])
    page, query_lens = batch.block_size, np.diff(batch.query_start_loc)
    own = [[x for x in range(int(n)) if owner(x, cp)[0] == cp[0]] for n in batch.seq_lens]
    need = [-(-len(positions) // page) for positions in own]
    pages = rng.permutation(sum(need) + 2)
    table = rng.integers(-9, -1, (len(own), max([*need, 0]) + 1)).astype(np.int32)
    rows = np.empty((len(pages), page, cache.shape[2]), cache.dtype)
    rows.view(np.uint8)[...] = 0xFF
    slots = np.full(batch.num_actual_tokens, -1, np.int64)
    for r, (positions, count) in enumerate(zip(own, need, strict=True)):
        table[r, :count], pages = pages[:count], pages[count:]
        for x in positions:
            local = owner(x, cp)[1]
            at = table[r, local // page], local % page
            rows[at] = cache[batch.block_table[r, x // page], x % page]
            token = x - (int(batch.seq_lens[r]) - int(query_lens[r]))
            if token >= 0:
                slots[batch.query_start_loc[r] + token] = at[0] * page + at[1]
    share = dataclasses.replace(batch, block_table=table, slot_mapping=slots, num_pages=len(rows))
    return share, rows
