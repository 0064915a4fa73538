"""sparse_mla.v4: MetadataBuilder and the contents of Metadata (csrc/step/plans/plan_v4.c,
step_lists.c and step_lists.cu), against a reference in plain Python."""

from __future__ import annotations

import device
import numpy as np
import pytest
import reference_v4 as plan
from cases import int32
from device import address, host
from library import sparse_mla
from v4_plans import VECTORS, assert_layer, assert_step, build, make_config, simple_batch

v4 = sparse_mla.v4


# --- the contract's vectors ----------------------------------------------------------------------


def test_windows_by_hand():
    sizes = plan.Sizes(window=5)
    got = build(sizes, simple_batch([1, 3], [10, 6], [[7, 3, 9], [5, 2, 4]]))
    assert host(got.positions).tolist() == [9, 3, 4, 5]
    assert host(got.swa_indices).tolist() == [
        [13, 14, 15, 36, 37], [20, 21, 22, 23, -1], [20, 21, 22, 23, 8], [21, 22, 23, 8, 9],
    ]  # fmt: skip
    assert host(got.swa_lens).tolist() == [5, 4, 5, 5]


def test_compressed_slots_by_hand():
    sizes = plan.Sizes(block_size=8, ratios=(4,))
    batch = simple_batch([8], [8], [[0, 1]], compressed={4: int32([6, 1])})
    got = build(sizes, batch)
    assert host(got.layers[4].slot_mapping).tolist() == [-1, -1, -1, 12, -1, -1, -1, 13]
    assert got.layers[4].state_slot_mapping is None


def test_gather_lens_by_hand():
    sizes = plan.Sizes(window=128)
    got = build(sizes, simple_batch([2, 3], [5, 300], np.zeros((2, 80))))
    assert host(got.prefill.gather_lens).tolist() == [5, 130]


@pytest.mark.parametrize(
    ("position", "pages", "want"),
    [(255, [4, 9], [8, 9, -1, -1]), (383, [5, 6], [10, 11, 12, -1])],
)
def test_all_groups_of_a_decode_by_hand(position, pages, want):
    sizes = plan.Sizes(block_size=256, ratios=(128,), state_block_sizes={128: 8})
    batch = simple_batch([1], [position + 1], np.zeros((1, 200)), compressed={128: int32(pages)})
    layer = build(sizes, batch).layers[128]
    assert host(layer.decode_indices)[:, :4].tolist() == [want]
    assert (host(layer.decode_indices)[:, 4:] == -1).all()
    assert host(layer.decode_lens).tolist() == [sum(x >= 0 for x in want)]


def test_all_groups_of_a_prefill_by_hand():
    sizes = plan.Sizes(block_size=256, ratios=(128,), state_block_sizes={128: 8})
    batch = simple_batch([2], [128], np.zeros((1, 64)), compressed={128: int32([3])})
    layer = build(sizes, batch).layers[128]
    assert host(layer.prefill_indices)[:, :4].tolist() == [[-1] * 4, [0, -1, -1, -1]]


# --- random batches ------------------------------------------------------------------------------

SIZES = {
    "small": plan.Sizes(),
    "window 1, pages of 1": plan.Sizes(window=1, swa_block_size=1),
    "a window wider than a page": plan.Sizes(window=130, swa_block_size=64),
    "drafts": plan.Sizes(decode_threshold=3),
    "a ratio without an indexer": plan.Sizes(ratios=(16,)),
    "three ratios, odd pages": plan.Sizes(
        ratios=(2, 4, 5), block_size=60, swa_block_size=7, state_block_sizes={2: 1, 4: 3, 5: 64}
    ),
    "no ratio": plan.Sizes(ratios=()),
    "one chunk each": plan.Sizes(prefill_chunk_size=1),
    "a short model": plan.Sizes(max_model_len=430),
}


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("name", SIZES)
def test_random_batches(name, path):
    """One builder plans all of them, so nothing of a step is left for the next."""
    sizes = SIZES[name]
    rng = np.random.default_rng(list(name.encode()))
    builder = v4.MetadataBuilder(make_config(sizes, path=path))
    for _ in range(25):
        batch = plan.random_batch(rng, sizes)
        got = build(sizes, batch, builder)
        assert got.path == path
        assert_step(got, sizes, batch)


def test_wide_lists():
    """The width grows by powers of two up to what max_model_len needs."""
    sizes = plan.Sizes(ratios=(2,), state_block_sizes={2: 4}, max_model_len=900)
    for max_seq_len, columns in ((1, 128), (257, 128), (258, 256), (514, 512), (900, 512)):
        batch = simple_batch([1], [1], [[0]], compressed={2: int32([0])}, max_seq_len=max_seq_len)
        layer = build(sizes, batch).layers[2]
        assert host(layer.decode_indices).shape == (1, min(columns, 512)), max_seq_len
    sizes.max_model_len = 700
    batch.max_seq_len = 700
    assert host(build(sizes, batch).layers[2].decode_indices).shape == (1, 384)


def test_the_index_has_tables_of_its_own():
    sizes = plan.Sizes()
    rng = np.random.default_rng(4)
    for _ in range(20):
        batch, other = plan.random_batch(rng, sizes), plan.random_batch(rng, sizes)
        rows = len(batch.query_lens)
        tables = {
            "index": plan.random_table(rng, rows, 5, 50),
            "index_states": plan.random_table(rng, rows, 60, 50),
        }
        builder = v4.MetadataBuilder(make_config(sizes))
        for names in ([], ["index"], ["index_states"], ["index", "index_states"]):
            given = {name: tables[name] for name in names}
            got = builder.build(
                batch.common(sparse_mla), compressed=batch.compressed, states=batch.states, **given
            )
            want = plan.layer(sizes, batch, 4, given.get("index"), given.get("index_states"))
            assert_layer(got.index, want, 4, 0)
            assert_layer(got.layers[4], plan.layer(sizes, batch, 4), 4, 0)
        assert other is not batch


def test_ratios_without_tables_are_absent():
    sizes = plan.Sizes()
    batch = plan.random_batch(np.random.default_rng(1), sizes)
    builder = v4.MetadataBuilder(make_config(sizes))
    got = builder.build(batch.common(sparse_mla), compressed={16: batch.compressed[16]})
    assert list(got.layers) == [16]
    assert got.index is None
    assert got.layers[16].state_slot_mapping is None
    assert builder.build(batch.common(sparse_mla)).layers == {}


def test_an_index_alone():
    """The indexer's cache may be all that a step has."""
    sizes = plan.Sizes()
    batch = plan.random_batch(np.random.default_rng(1), sizes)
    builder = v4.MetadataBuilder(make_config(sizes))
    table, states = batch.compressed[4], batch.states[4]
    got = builder.build(batch.common(sparse_mla), index=table, index_states=states)
    assert got.layers == {}
    assert_layer(got.index, plan.layer(sizes, batch, 4), 4, 0)


# --- persistence ---------------------------------------------------------------------------------


def arrays_of(metadata) -> list:
    layer = metadata.layers[16]
    names = ("slot_mapping", "state_slot_mapping", "context_lens", "decode_indices", "decode_lens")
    return [
        *(getattr(metadata, name) for name in VECTORS),
        *(getattr(layer, name) for name in names),
        metadata.index.slot_mapping,
    ]


def test_buffers_keep_their_addresses():
    sizes = plan.Sizes()
    rng = np.random.default_rng(2)
    builder = v4.MetadataBuilder(make_config(sizes))
    seen = set()
    for _ in range(5):
        batch = plan.random_batch(rng, sizes)
        while plan.split(sizes, batch)[2] == 0:
            batch = plan.random_batch(rng, sizes)
        got = build(sizes, batch, builder)
        seen.add(tuple(address(x) for x in arrays_of(got)))
    assert len(seen) == 1


def test_a_shorter_batch_leaves_nothing_of_the_longer_one():
    """Vectors are padded up to max_num_batched_tokens."""
    sizes = plan.Sizes(decode_threshold=200)
    builder = v4.MetadataBuilder(make_config(sizes))
    tables = {"compressed": {4: int32([1] * 8), 16: int32([2] * 8)}, "states": {4: int32([3] * 99)}}
    long = simple_batch([160], [160], np.ones((1, 60)), **tables)
    build(sizes, long, builder)
    got = build(sizes, simple_batch([4], [4], np.ones((1, 60)), **tables), builder)
    size = sizes.max_num_batched_tokens

    def whole(x, dtype=np.int32):
        return device.peek(address(x), size, dtype).tolist()

    layer = got.layers[4]
    assert whole(layer.slot_mapping) == [-1] * 3 + [8] + [-1] * (size - 4)
    assert whole(layer.state_slot_mapping) == [12, 13, 14, 15] + [-1] * (size - 4)
    assert whole(layer.context_lens) == [0] * 3 + [1] + [0] * (size - 4)
    assert whole(got.swa_lens) == [1, 2, 3, 4] + [0] * (size - 4)
    assert whole(got.is_valid, np.uint8) == [1] * 4 + [0] * (size - 4)
    assert whole(got.positions) == [0, 1, 2, 3] + [0] * (size - 4)
    assert whole(got.layers[16].decode_lens) == [0] * size


@pytest.mark.skipif(device.ON_CUDA, reason="a GPU's arrays have no such flag")
def test_arrays_of_metadata_are_read_only():
    got = build(plan.Sizes(), simple_batch([2], [9], [[1, 2, 3]]))
    for x in (got.swa_indices, got.is_valid, got.positions):
        assert not x.flags.writeable


def test_metadata_outlives_its_builder():
    sizes = plan.Sizes()
    batch = plan.random_batch(np.random.default_rng(3), sizes)
    got = build(sizes, batch)
    for seed in range(20):
        build(sizes, plan.random_batch(np.random.default_rng(seed), sizes))
    assert_step(got, sizes, batch)
