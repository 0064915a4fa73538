"""Metadata that a step of DeepSeek-V3.2 builds, and what the contract fixes of it."""

import cases
import engine
import library
import numpy as np
import reference_plan
from device import host
from library import sparse_mla


def build(batch, **config):
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla, **config))
    return builder.build(batch.common(sparse_mla))


def plan_of(batch, path="separate", decode_threshold=1) -> reference_plan.Plan:
    return reference_plan.build(
        batch,
        path=path,
        decode_threshold=decode_threshold,
        workspace_tokens=cases.ENGINE_WORKSPACE,
    )


def assert_int32(got, want, what) -> None:
    got = host(got)
    assert got.dtype == np.int32, what
    assert got.tolist() == np.asarray(want).tolist(), what


def assert_metadata(got, batch, plan) -> None:
    """Checks every value that the contract fixes."""
    tokens = batch.num_actual_tokens
    assert got.path == plan.path
    assert got.num_reqs == batch.num_reqs
    assert got.num_actual_tokens == tokens
    assert got.max_query_len == int(np.diff(batch.query_start_loc).max(initial=0))
    assert got.max_seq_len == int(batch.seq_lens.max(initial=0))
    assert got.block_size == batch.block_size
    assert got.topk_tokens == 48
    assert_int32(got.query_start_loc, batch.query_start_loc, "query_start_loc")
    assert_int32(host(got.req_id_per_token)[:tokens], plan.req_id_per_token, "req ids")
    assert not host(got.req_id_per_token)[tokens:].any(), "zero-filled past T"
    assert library.refers_to(got, got.slot_mapping, batch.slot_mapping) or not tokens
    assert library.refers_to(got, got.block_table, batch.block_table) or not batch.num_reqs
    if plan.path in ("separate", "direct"):
        for name in ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens"):
            assert getattr(got, name) == getattr(plan, name), name
    if plan.path == "separate":
        assert_separate(got, plan)


def assert_separate(got, plan) -> None:
    assert (got.decode is None) == (plan.num_decodes == 0)
    if got.decode is not None:
        assert got.decode.decode_query_len == plan.decode_query_len
    assert (got.prefill is None) == (plan.num_prefills == 0)
    if got.prefill is None:
        return
    assert_int32(got.prefill.seq_lens, plan.prefill_seq_lens, "prefill.seq_lens")
    assert_int32(got.prefill.request_ids, plan.prefill_request_ids, "prefill.request_ids")
    assert_int32(got.prefill.workspace_starts, plan.workspace_starts, "workspace_starts")
    assert len(got.prefill.chunks) == len(plan.chunks)
    for chunk, want in zip(got.prefill.chunks, plan.chunks, strict=True):
        assert_int32(chunk.seq_lens, want.seq_lens, "chunk.seq_lens")
        assert_int32(chunk.block_table, want.block_table, "chunk.block_table")
        assert_int32(chunk.workspace_starts, want.workspace_starts, "chunk.workspace_starts")
        assert chunk.tokens_slice == want.tokens_slice
        assert chunk.req_start_idx == want.req_start_idx
        assert chunk.chunk_tot_seqlen == want.chunk_tot_seqlen
