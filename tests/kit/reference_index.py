"""The index lists of DeepSeek V4 in plain Python integers, entry by entry, from the formulas.

Shares nothing with csrc. Arrays of any integer type come in; lists are int32 arrays.
"""

from __future__ import annotations

import itertools

import numpy as np

INT32_MAX = 2**31 - 1


def fit(index: int) -> int:
    return index if 0 <= index <= INT32_MAX else -1


def slot(row, position: int, block_size: int) -> int:
    """The slot of a position by a request's row of the block table; -1 where it has none."""
    if position < 0 or position // block_size >= len(row) or row[position // block_size] < 0:
        return -1
    return fit(int(row[position // block_size]) * block_size + position % block_size)


def padded(entries: list[int], width: int) -> list[int]:
    assert len(entries) <= width
    return entries + [-1] * (width - len(entries))


def arrays(rows: list[list[int]], lens: list[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array(rows, np.int32).reshape(len(rows), width), np.array(lens, np.int32)


def compute_global_topk_indices_and_lens(topk, req_ids, table, block_size, is_valid):
    rows, lens = [], []
    for t in range(len(topk)):
        valid = is_valid is None or bool(is_valid[t])
        row = table[req_ids[t]] if valid else []
        slots = [slot(row, int(p), block_size) for p in topk[t]]
        kept = [s for s in slots if s >= 0]
        rows.append(padded(kept, topk.shape[1]))
        lens.append(len(kept))
    return arrays(rows, lens, topk.shape[1])


def sight(position: int, window: int, ratio: int, topk: int) -> tuple[list[int], int]:
    """The positions of a token's window, and the number of compressed entries that it sees."""
    first = max(position - window + 1, 0)
    return list(range(first, position + 1)), max(min((position + 1) // ratio, topk), 0)


def combine_topk_swa_indices(
    topk_indices, query_start_loc, seq_lens, gather_lens, window, ratio, topk, M, N, align=128
):
    width = -(-(topk + window) // align) * align
    rows, lens = [[-1] * width for _ in topk_indices], [0] * len(topk_indices)
    starts = [int(x) - int(query_start_loc[0]) for x in query_start_loc]
    for b, (start, end) in enumerate(itertools.pairwise(starts)):
        for t in range(start, end):
            position = int(seq_lens[b]) - (end - start) + (t - start)
            seen, tl = sight(position, window, ratio, topk)
            gather_start = int(seq_lens[b]) - int(gather_lens[b])
            first, end_row = M * b + N - gather_start, M * (b + 1) if gather_start >= 0 else 0
            entries = [fit(M * b + int(x)) if x >= 0 else -1 for x in topk_indices[t, :tl]]
            entries += [
                fit(first + p) if p >= gather_start and first + p < end_row else -1 for p in seen
            ]
            rows[t], lens[t] = padded(entries, width), len(entries)
    return arrays(rows, lens, width)


def build_mixed_sparse_indices(
    decode_swa, decode_compressed, decode_lens, prefill_topk, query_start_loc, seq_lens, req_ids,
    swa_table, swa_block_size, compressed_table, compressed_block_size, window, ratio, topk,
    decode_indices_are_local=False, is_valid=None,
):  # fmt: skip
    num_decodes = 0 if decode_swa is None else len(decode_swa)
    decode_width = 0 if decode_compressed is None else decode_compressed.shape[1]
    num_tokens = len(req_ids) if prefill_topk is None else num_decodes + len(prefill_topk)
    compressed_width = -(-max(topk, decode_width) // 4) * 4
    rows, lens = [], []
    for t in range(num_decodes):
        given = [int(x) for x in decode_compressed[t]] if decode_width else []
        length = len(given)
        if decode_indices_are_local and given:
            valid = is_valid is None or bool(is_valid[t])
            row = compressed_table[req_ids[t]] if valid else []
            length = sum(p >= 0 for p in given) if valid else 0
            given = [slot(row, p, compressed_block_size) for p in given]
        elif decode_lens is not None:
            length = min(max(int(decode_lens[t]), 0), decode_width)
        rows.append([int(x) for x in decode_swa[t]] + padded(given, compressed_width))
        lens.append(window + length)
    for t in range(num_decodes, num_tokens):
        seen, slots, tl = [], [], 0
        if t < query_start_loc[-1]:
            b = int(req_ids[t])
            position = int(seq_lens[b]) - int(query_start_loc[b + 1]) + t
            positions, tl = sight(position, window, ratio, topk)
            seen = [slot(swa_table[b], p, swa_block_size) for p in positions]
            local = [] if tl == 0 else [int(p) for p in prefill_topk[t - num_decodes, :tl]]
            slots = [slot(compressed_table[b], p, compressed_block_size) for p in local]
        rows.append(padded(seen, window) + padded(slots, compressed_width))
        lens.append(window + tl)
    return arrays(rows, lens, window + compressed_width)
