"""Which tables v4.MetadataBuilder.build gets, in every combination, against plain integers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference_v4 as plan
from device import host
from library import sparse_mla
from v4_plans import assert_layer, make_config, v4

TABLES = ("compressed", "states", "index", "index_states")
CHOICES = list(itertools.product([False, True], repeat=4))


def make_tables(rng, sizes, rows: int) -> dict:
    return {
        "compressed": plan.random_table(rng, rows, 20, 50),
        "states": plan.random_table(rng, rows, 60, 50),
        "index": plan.random_table(rng, rows, 20, 50),
        "index_states": plan.random_table(rng, rows, 60, 50),
    }


def build(builder, batch, tables, given):
    options = {name: tables[name] for name in ("index", "index_states") if name in given}
    options |= {name: {4: tables[name]} for name in ("compressed", "states") if name in given}
    return builder.build(batch.common(sparse_mla), **options)


def check(got, batch, sizes, table, states) -> None:
    """A layer's arrays, and the tables that its operators read."""
    want = plan.layer(sizes, batch, 4, table, batch.states[4] if states is None else states)
    if states is None:
        assert got.state_slot_mapping is None
        assert got.state_block_table is None
        want["state_slot_mapping"] = None
    else:
        assert np.array_equal(host(got.state_block_table), states)
    assert np.array_equal(host(got.block_table), table)
    assert got.block_size == sizes.block_size // 4
    for name, x in want.items():
        if x is None or getattr(got, name) is None:
            assert x is None or name.startswith(("decode", "prefill")), name
            continue
        found = host(getattr(got, name))
        assert np.array_equal(found, np.array(x, found.dtype).reshape(found.shape)), name


@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_tables_of_ratio_4_and_of_its_indexer(chosen):
    """The indexer's tables are its own where they are given, and those of ratio 4 otherwise. States
    need pages of the rows that they become."""
    given = {name for name, is_given in zip(TABLES, chosen, strict=True) if is_given}
    sizes = plan.Sizes()
    rng = np.random.default_rng(6)
    builder = v4.MetadataBuilder(make_config(sizes))
    for _ in range(6):
        batch = plan.random_batch(rng, sizes)
        tables = make_tables(rng, sizes, len(batch.query_lens))
        index = "index" if "index" in given else "compressed"
        states = "index_states" if "index_states" in given else "states"
        has_rows = "compressed" in given
        lacks_rows = ("states" in given and not has_rows) or (
            "index_states" in given and index not in given
        )
        if lacks_rows:
            with pytest.raises(
                ValueError, match=r"^MetadataBuilder.build: `(compressed|index)` must"
            ):
                build(builder, batch, tables, given)
            continue
        got = build(builder, batch, tables, given)
        assert list(got.layers) == ([4] if has_rows else [])
        if has_rows:
            check(got.layers[4], batch, sizes, tables["compressed"],
                  tables["states"] if "states" in given else None)  # fmt: skip
        assert (got.index is None) == (index not in given)
        if index in given:
            check(got.index, batch, sizes, tables[index],
                  tables[states] if states in given else None)  # fmt: skip


def test_layers_of_other_ratios_do_not_read_the_indexer_s_tables():
    sizes = plan.Sizes()
    rng = np.random.default_rng(7)
    batch = plan.random_batch(rng, sizes)
    tables = make_tables(rng, sizes, len(batch.query_lens))
    builder = v4.MetadataBuilder(make_config(sizes))
    got = builder.build(
        batch.common(sparse_mla), compressed=batch.compressed, states=batch.states,
        index=tables["index"], index_states=tables["index_states"],
    )  # fmt: skip
    assert_layer(got.layers[16], plan.layer(sizes, batch, 16), 16, 0)
    check(got.layers[4], batch, sizes, batch.compressed[4], batch.states[4])
