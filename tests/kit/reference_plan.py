"""Reference of the planning half: splits, chunks, the builder's metadata, the forward paths.

It follows the contract's numbered list in plain Python integers and NumPy. The numeric half is
`reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import reference as ref


def split_decodes_and_prefills(
    query_start_loc, num_actual_tokens, *, decode_threshold=1, require_uniform=False
) -> tuple[int, int, int, int]:
    """Leading requests of length <= threshold are decodes (of one length if require_uniform).
    Requests without tokens are like the others: they neither end the decodes nor begin them."""
    lens = [int(n) for n in np.diff(np.asarray(query_start_loc, np.int64))]
    if int(query_start_loc[0]) != 0 or min(lens, default=0) < 0:
        raise ValueError("query_start_loc must start at 0 and never decrease")
    if num_actual_tokens < sum(lens):
        raise ValueError("num_actual_tokens is smaller than query_start_loc[-1]")
    first = next((length for length in lens if length > 0), 0)
    is_decode = [
        length == 0 or (length <= decode_threshold and (not require_uniform or length == first))
        for length in lens
    ]
    num_decodes = [*is_decode, False].index(False)
    num_prefills = len(lens) - num_decodes
    decode_tokens = sum(lens[:num_decodes]) if num_prefills else num_actual_tokens
    return num_decodes, num_prefills, decode_tokens, num_actual_tokens - decode_tokens


def reorder_batch(num_scheduled_tokens, *, decode_threshold=1):
    """(swaps, decodes, prefills, their tokens), as the contract writes it."""
    lens = [int(n) for n in num_scheduled_tokens]
    d = [i for i, n in enumerate(lens) if n <= decode_threshold]
    p = [i for i, n in enumerate(lens) if n > decode_threshold]
    swaps = []
    for i in range(1, min(len(d), len(p)) + 1):
        if d[len(d) - i] < len(d):
            break
        swaps.append((p[i - 1], d[len(d) - i]))
    tokens = sum(lens[i] for i in d), sum(lens[i] for i in p)
    return swaps, len(d), len(p), *tokens


def split_context(lens, tokens: int, page: int) -> list[list[int]]:
    """The equal plan: the rows of each prefill in each chunk."""
    size = tokens // sum(n > 0 for n in lens) // page * page
    return [[min(max(n - start, 0), size) for n in lens] for start in range(0, max(lens), size)]


def split_prefill_chunks(seq_lens, workspace_tokens) -> list[tuple[int, int]]:
    """Requests packed greedily in order while the sum of seq_lens fits the workspace."""
    chunks, start, used = [], 0, 0
    for i, length in enumerate(int(n) for n in seq_lens):
        if length > workspace_tokens:
            raise ValueError(f"{length} does not fit {workspace_tokens}")
        if i > start and used + length > workspace_tokens:
            chunks.append((start, i))
            start, used = i, 0
        used += length
    if len(seq_lens):
        chunks.append((start, len(seq_lens)))
    return chunks


@dataclass
class Chunk:
    seq_lens: np.ndarray
    tokens_slice: slice
    block_table: np.ndarray
    req_start_idx: int
    workspace_starts: np.ndarray
    chunk_tot_seqlen: int


@dataclass
class Plan:
    """What `MetadataBuilder.build` must put into Metadata."""

    path: str
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    req_id_per_token: np.ndarray
    decode_query_len: int | None = None
    prefill_seq_lens: np.ndarray | None = None
    prefill_request_ids: np.ndarray | None = None
    workspace_starts: np.ndarray | None = None
    chunks: list[Chunk] = field(default_factory=list)


def choose_path(num_heads: int, fp8: bool, forced: str | None = None, min_heads=32) -> str:
    if forced is not None:
        return forced
    return ("mixed" if num_heads < min_heads else "separate") if fp8 else "bf16"


def build(batch, *, path: str, decode_threshold: int, workspace_tokens: int) -> Plan:
    """batch: query_start_loc, seq_lens, block_table, num_actual_tokens (see `cases.Batch`)."""
    start = np.asarray(batch.query_start_loc, np.int64)
    lens = np.diff(start)
    counts = split_decodes_and_prefills(
        start, batch.num_actual_tokens, decode_threshold=decode_threshold, require_uniform=True
    )
    request = np.zeros(batch.num_actual_tokens, np.int32)
    request[: start[-1]] = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    plan = Plan(path, *counts, req_id_per_token=request)
    first = plan.num_decodes
    if first:
        plan.decode_query_len = int(max(lens[:first]))
    if plan.num_prefills and path == "separate":
        _plan_prefills(plan, batch, start, first, workspace_tokens)
    return plan


def _plan_prefills(plan, batch, start, first, workspace_tokens) -> None:
    seq_lens = np.asarray(batch.seq_lens[first:] * (np.diff(start[first:]) > 0), np.int32)
    plan.prefill_seq_lens = seq_lens
    plan.prefill_request_ids = np.full(batch.num_actual_tokens, -1, np.int32)
    for i in range(plan.num_prefills):
        plan.prefill_request_ids[start[first + i] : start[first + i + 1]] = i
    plan.workspace_starts = np.zeros(plan.num_prefills, np.int32)
    for a, b in split_prefill_chunks(seq_lens, workspace_tokens):
        plan.workspace_starts[a + 1 : b] = np.cumsum(seq_lens[a : b - 1])
        plan.chunks.append(
            Chunk(
                seq_lens=seq_lens[a:b],
                tokens_slice=slice(int(start[first + a]), int(start[first + b])),
                block_table=batch.block_table[first + a : first + b],
                req_start_idx=a,
                workspace_starts=plan.workspace_starts[a:b],
                chunk_tot_seqlen=int(seq_lens[a:b].sum()),
            )
        )


def forward(plan: Plan, q, kv, topk_indices, batch, *, softmax_scale, attn_sink=None):
    """One layer of a step. Path separate attends to the gathered bf16 rows, as the library does."""
    tokens = batch.num_actual_tokens
    q = tuple(x[:tokens] for x in q) if isinstance(q, tuple) else q[:tokens]
    indices, _ = ref.convert_req_index_to_global_index(
        plan.req_id_per_token,
        batch.block_table,
        topk_indices[:tokens],
        block_size=kv.shape[1],
        prefill_request_ids=plan.prefill_request_ids,
        prefill_workspace_starts=plan.workspace_starts,
    )
    options = {"softmax_scale": softmax_scale, "attn_sink": attn_sink}
    if not plan.chunks:
        return ref.attention(q, kv, indices, **options)

    def attend(cache, rows):
        part = tuple(x[rows] for x in q) if isinstance(q, tuple) else q[rows]
        return ref.attention(part, cache, indices[rows], **options)

    parts = [attend(kv, slice(0, plan.num_decode_tokens))]
    for chunk in plan.chunks:
        workspace = np.zeros((chunk.chunk_tot_seqlen, ref.HEAD_DIM), np.uint16)
        ref.gather_kv_cache(
            kv, chunk.block_table, chunk.seq_lens, chunk.workspace_starts, workspace
        )
        parts.append(attend(workspace.view(ref.BF16), chunk.tokens_slice))
    padding = slice(plan.chunks[-1].tokens_slice.stop, tokens)  # no request, indices are -1
    parts.append(attend(kv, padding))
    return ref.Attention.join(parts)
