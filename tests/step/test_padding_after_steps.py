"""A step with a few tokens and much padding, after a step that fills the builder: nothing of the
step before is left in what the metadata says of padding."""

from __future__ import annotations

import cases
import engine
import numpy as np
import pytest
import reference_v4 as plan
from library import sparse_mla
from test_batch_bounds import fields_of
from v4_plans import make_config, v4

PADDING = [0, 1, 100, 150]  # tokens; a step has at most 160


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("path", ["mixed", "separate", "direct"])
def test_v32(path, padding):
    config = engine.config(sparse_mla, path=path, max_num_batched_tokens=160)
    full = cases.make_batch([1, 1, 9, 149], [70, 3, 200, 149])
    small = cases.make_batch([1, 1, 4], [5, 130, 7], pad_tokens=padding)
    builder = sparse_mla.MetadataBuilder(config)
    builder.build(full.common(sparse_mla))
    got = fields_of(builder.build(small.common(sparse_mla)))
    fresh = sparse_mla.MetadataBuilder(config).build(small.common(sparse_mla))
    assert got == fields_of(fresh)
    assert got["req_id_per_token"] == [0, 1, 2, 2, 2, 2] + [0] * padding


def make_batch(rng, sizes: plan.Sizes, query_lens: list[int], padding: int) -> plan.V4Batch:
    seq_lens = np.array(query_lens, np.int32) + 20
    need = int(seq_lens.max())
    rows = len(query_lens)
    return plan.V4Batch(
        query_lens, seq_lens, rng.integers(0, 1000, sum(query_lens) + padding),
        block_table=plan.random_table(rng, rows, -(-need // sizes.swa_block_size), 50),
        compressed={
            r: plan.random_table(rng, rows, -(-need // sizes.block_size), 50) for r in sizes.ratios
        },
        states={
            r: plan.random_table(rng, rows, -(-need // size), 50)
            for r, size in sizes.state_block_sizes.items()
        },
        max_seq_len=need,
    )  # fmt: skip


@pytest.mark.parametrize("padding", PADDING)
def test_v4(padding):
    sizes, rng = plan.Sizes(), np.random.default_rng(padding)
    full = make_batch(rng, sizes, [1, 1, 9, 149], 0)
    small = make_batch(rng, sizes, [1, 1, 4], padding)
    config = make_config(sizes)
    found = []
    for batches in ((full, small), (small,)):
        builder = v4.MetadataBuilder(config)
        for batch in batches:
            step = builder.build(
                batch.common(sparse_mla), compressed=batch.compressed, states=batch.states
            )
        found.append(fields_of(step))
    assert found[0] == found[1]
