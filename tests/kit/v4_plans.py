"""Metadata that a step of DeepSeek V4 builds, and what the contract fixes of it."""

from __future__ import annotations

import device
import numpy as np
import reference_v4 as plan
from device import host
from library import sparse_mla

v4 = sparse_mla.v4
VECTORS = ("req_id_per_token", "positions", "is_valid", "swa_indices", "swa_lens")


def make_config(sizes: plan.Sizes, **changes):
    options = sizes.options() | {"device": device.NAME, "topk_tokens": 16} | changes
    return v4.Config(options.pop("num_heads", 2), **options)


def build(sizes: plan.Sizes, batch: plan.V4Batch, builder=None, **changes):
    builder = builder or v4.MetadataBuilder(make_config(sizes, **changes))
    tables = {"compressed": batch.compressed, "states": batch.states}
    return builder.build(batch.common(sparse_mla), **tables)


def assert_array(got, want, what, dtype=np.int32) -> None:
    got = host(got)
    assert got.dtype == dtype, what
    assert got.tolist() == np.asarray(want).tolist(), what


def assert_layer(got, want: dict, ratio: int, columns: int) -> None:
    for name in ("slot_mapping", "state_slot_mapping", "context_lens"):
        assert_array(getattr(got, name), want[name], f"{name} of ratio {ratio}")
    for name in ("decode_indices", "decode_lens", "prefill_indices"):
        x = getattr(got, name)
        if ratio == 4:
            assert x is None
        elif name == "decode_lens" or want[name]:
            assert_array(x, want[name], f"{name} of ratio {ratio}")
        else:
            assert host(x).shape == (0, columns)


def assert_step(got, sizes: plan.Sizes, batch: plan.V4Batch) -> None:
    """Checks every value that the contract fixes."""
    want = plan.step(sizes, batch)
    counts = plan.split(sizes, batch)
    names = ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens")
    assert tuple(getattr(got, name) for name in names) == counts
    longest = max(batch.query_lens[: counts[0]], default=0)
    assert (got.decode.decode_query_len if got.decode else 0) == longest
    assert (got.num_reqs, got.num_actual_tokens) == (len(batch.query_lens), batch.num_tokens)
    assert (got.max_seq_len, got.block_size) == (batch.max_seq_len, sizes.swa_block_size)
    for name in VECTORS:
        if want[name]:
            assert_array(
                getattr(got, name), want[name], name, bool if name == "is_valid" else np.int32
            )
    assert sorted(got.layers) == list(sizes.ratios)
    for ratio in sizes.ratios:
        columns = plan.used_width(sizes, ratio, batch.max_seq_len)
        assert got.layers[ratio].block_size == sizes.block_size // ratio
        assert_layer(got.layers[ratio], plan.layer(sizes, batch, ratio), ratio, columns)
    if 4 in sizes.ratios:
        assert_layer(got.index, plan.layer(sizes, batch, 4), 4, 0)
    else:
        assert got.index is None
    assert_prefill(got, sizes, batch, want)


def assert_prefill(got, sizes, batch, want) -> None:
    num_decodes, num_prefills = plan.split(sizes, batch)[:2]
    if num_prefills == 0:
        assert got.prefill is None
        return
    assert_array(got.prefill.seq_lens, batch.seq_lens[num_decodes:], "prefill.seq_lens")
    assert_array(got.prefill.gather_lens, want["gather_lens"][num_decodes:], "gather_lens")
    chunks = plan.chunks(sizes, batch)
    assert len(got.prefill.chunks) == len(chunks)
    for chunk, (a, b, tokens) in zip(got.prefill.chunks, chunks, strict=True):
        assert (chunk.req_start_idx, chunk.tokens_slice) == (a, tokens)
        assert_array(chunk.seq_lens, batch.seq_lens[num_decodes + a : num_decodes + b], "seq_lens")
        assert_array(
            chunk.gather_lens, want["gather_lens"][num_decodes + a : num_decodes + b], "gather_lens"
        )
        table = batch.block_table[num_decodes + a : num_decodes + b]
        assert_array(chunk.block_table, table, "chunk.block_table")


def simple_batch(query_lens, seq_lens, table, **fields) -> plan.V4Batch:
    lens = np.array(seq_lens, np.int32)
    slots = np.zeros(sum(query_lens), np.int64)
    table = np.array(table, np.int32)
    fields = {"compressed": {}, "states": {}, "max_seq_len": int(lens.max(initial=0))} | fields
    return plan.V4Batch(list(query_lens), lens, slots, table, **fields)
