"""sparse_mla.paged: the metadata of every mode, exactly: drawn batches, then random ones."""

from __future__ import annotations

import os

import device
import numpy as np
import pytest
from device import host
from paged_steps import MODES, Batch, check, make_batch, paged

CASES = int(os.environ.get("SMLA_RANDOM_CASES", 500))
A = [8, 9, 10, 11, 0, 1, 2, 3, 20, 21, 22, 23]
B = [4, 5, 6, 7, 12, 13, 14, 15, 0, 0, 0, 0]
ROWS = np.array([A, B], np.int32)


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


def config(**changes) -> dict:
    limits = {"max_bs": 4, "max_num_tokens": 32, "max_context_len": 12, "page_size": 4}
    return limits | changes


def lists(x) -> list:
    return host(x).tolist()


def build(mode: str, lens, pool, rows=ROWS, changes=None, **given):
    batch = Batch(mode, config(**(changes or {})), ints(*lens), ints(*pool), rows, **given)
    metadata = batch.build()
    check(batch, metadata)
    return metadata


# --- batches of the contract ---------------------------------------------------------------------


def test_decode():
    m = build("decode", [5, 9], [1, 0])
    assert lists(m.page_table[0])[:2] == [1, 3] and lists(m.page_table[1]) == [2, 0, 5]
    assert lists(m.cu_seqlens_k) == [0, 5, 14] and m.window_size == (-1, -1)


def test_step_of_a_chain():
    m = build("draft", [5, 9], [1, 0], changes={"speculative_num_steps": 2}, spec_step=1)
    assert lists(m.cache_seqlens_int32) == [7, 11] and lists(m.cu_seqlens_k) == [0, 7, 18]
    assert m.max_seq_len_k == 11


def test_verify_chain():
    changes = {"num_draft_tokens": 3, "max_context_len": 9}
    m = build("target_verify", [5, 9], [1, 0], changes=changes)
    assert lists(m.cache_seqlens_int32) == [8, 12] and lists(m.cu_seqlens_q) == [0, 3, 6]
    assert lists(m.cu_seqlens_k) == [0, 8, 20]


def test_extend():
    m = build("extend", [5, 9], [1, 0], extend_seq_lens=ints(2, 9))
    assert lists(m.cu_seqlens_q) == [0, 2, 11] and m.max_seq_len_q == 9
    assert lists(m.cu_seqlens_k) == [0, 5, 14]


def test_step_of_a_tree():
    changes = {"topk": 2, "speculative_num_steps": 3, "page_size": 1}
    given = {"spec_step": 1, "out_cache_loc": np.arange(12)}
    m = build("draft", [5, 4], [0, 1], changes=changes, **given)
    assert lists(m.expand.slot_table) == [[0, 1], [3, 4], [6, 7], [9, 10]]
    assert lists(m.cu_seqlens_q) == [0, 2, 4] and m.expand.max_seq_len_k == 2


SEEN = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)


@pytest.mark.parametrize(
    "left, prefix, slots",
    [
        (4, [3, 4], [[3, 4, 8], [3, 4, 8, 9], [3, 4, 8, 10]]),
        (1, [3, 4, 5, 6, 7], [[6, 7, 8], [6, 7, 8, 9], [6, 7, 8, 10]]),
        (0, [3, 4, 5, 6, 7], [[7, 8], [7, 8, 9], [7, 8, 10]]),
    ],
)
def test_verify_tree(left, prefix, slots):
    rows = ints(*prefix, 8, 9, 10)[None]
    mask = np.concatenate([np.ones((3, len(prefix)), bool), SEEN], 1).ravel()
    changes = {"topk": 2, "num_draft_tokens": 3, "page_size": 1, "sliding_window_size": left}
    given = {"custom_mask": mask, "masks": [SEEN]}
    changes["max_context_len"] = len(prefix)
    m = build("target_verify", [len(prefix)], [0], rows, changes, **given)
    assert lists(m.expand.slot_table) == [[8, 9, 10], [8, 9, 10], [8, 10, 9]]
    assert lists(m.expand.cache_seqlens_int32) == [1, 2, 2]
    table = lists(m.swa_spec_metadata.slot_table)
    assert [row[: len(s)] for row, s in zip(table, slots, strict=True)] == slots
    assert m.window_size == (left, 0)


def test_padding_has_a_part_of_the_mask():
    changes = {"topk": 2, "num_draft_tokens": 3, "page_size": 1}
    seen = np.ones((3, 3), bool)
    for lens, pool, size in (([5, 0], [0, -7], 33), ([0, 5], [9, 0], 33)):
        parts = [np.concatenate([np.zeros((3, n), bool), seen], 1).ravel() for n in lens]
        mask = np.concatenate(parts)
        assert len(mask) == size
        given = {"custom_mask": mask, "masks": [seen, seen]}
        m = build("target_verify", lens, pool, changes=changes, **given)
        assert sorted(lists(m.expand.cache_seqlens_int32)) == [0, 0, 0, 3, 3, 3]
    chain = {"num_draft_tokens": 3, "max_context_len": 9}
    assert lists(build("target_verify", [5, 0], [0, -7], changes=chain).cache_seqlens_int32) == [
        8,
        0,
    ]


def test_window_pool():
    mapping = np.full(24, -1, np.int32)
    mapping[0:4], mapping[20:24] = range(4, 8), range(8, 12)
    m = build("decode", [9], [0], mapping=mapping, out_cache_loc=ints(20, -1, 3))
    assert lists(m.swa_page_table) == [[-1, 1, 2]] and lists(m.swa_out_cache_loc) == [8, -1, 7]


def test_encoder():
    rows = np.arange(32, dtype=np.int32).reshape(2, 16)
    m = build("decode", [3, 2], [0, 1], rows, {"is_encoder_decoder": True}, encoder_lens=ints(6, 3))
    assert lists(m.encoder_page_table) == [[0, 1], [4, 5]]
    assert lists(m.page_table) == [[1, 2], [4, 5]] and lists(m.cache_leftpad) == [2, 3]
    assert lists(m.cache_seqlens_int32) == [5, 5] and m.max_seq_len_k == 5


@pytest.mark.skipif(device.ON_CUDA, reason="a GPU's lengths must be within the config")
def test_bounds_beyond_the_config():
    """Where the host reads the lengths, those of the caller may be anything above."""
    rows = np.arange(32, dtype=np.int32).reshape(2, 16)
    settings = paged.Config(**config(is_encoder_decoder=True))
    builder = paged.MetadataBuilder(settings, rows)
    far = [2**30] * 2
    m = builder.build(
        "extend",
        ints(3, 2),
        ints(0, 1),
        encoder_lens=ints(6, 3),
        seq_lens_cpu=far,
        extend_seq_lens=ints(1, 1),
        extend_seq_lens_cpu=far,
        encoder_lens_cpu=far,
    )
    assert m.page_table.shape == m.encoder_page_table.shape == (2, 3)
    assert m.page_table[:, :2].tolist() == [[1, 2], [4, 5]]
    assert m.encoder_page_table[:, :2].tolist() == [[0, 1], [4, 5]]


def test_shared_prefix():
    given = {"extend_seq_lens": ints(1, 2), "prefix": 6}
    m = build("extend", [9, 10], [0, 1], **given)
    assert lists(m.prefix.page_table) == [[2, 0]] and lists(m.prefix.cu_seqlens_q) == [0, 3]
    assert lists(m.cache_leftpad) == [6, 6]


def test_local_attention():
    rows = np.zeros((3, 20), np.int32)
    rows[:, ::2] = 2 * np.arange(30).reshape(3, 10)  # pages 0 to 29
    changes = {"attention_chunk": 4, "page_size": 2, "max_context_len": 20}
    m = build("extend", [6, 17, 9], [0, 1, 2], rows, changes, extend_seq_lens=ints(4, 10, 5))
    local = m.local_attn_metadata
    assert lists(local.local_query_start_loc)[:9] == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert lists(local.local_seqused_k)[:8] == [4, 2, 4, 4, 4, 1, 4, 1]
    want = [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 18], [22, 23], [24, 25]]
    assert lists(local.local_block_table)[:8] == want
    assert (local.local_max_query_len, local.local_max_seq_len) == (4, 4)


def test_a_decode_has_one_virtual_request():
    changes = {"attention_chunk": 8, "max_context_len": 20}
    m = build("decode", [5, 9], [1, 0], changes=changes)
    assert lists(m.local_attn_metadata.local_query_start_loc) == [0, 1, 2]
    assert lists(m.local_attn_metadata.local_seqused_k) == [5, 1]


# --- random batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_batches(mode, page_size):
    for seed in range(-(-CASES // 3)):
        batch = make_batch(np.random.default_rng([seed, page_size, len(mode)]), mode, page_size)
        try:
            check(batch, batch.build())
        except BaseException as error:
            error.add_note(f"seed {seed}: {batch}")
            raise


@pytest.mark.parametrize("topk", [1, 3])
def test_steps_of_a_draft(topk):
    """One launch for all steps gives what one for each gives."""
    for seed in range(60):
        rng = np.random.default_rng([seed, topk])
        page_size = int(rng.choice([1, 4, 16]))
        batch = make_batch(rng, "draft", page_size, topk=topk, is_encoder_decoder=False)
        if topk > 1 and (batch.attention_chunk or batch.encoder_lens is not None):
            continue
        if batch.encoder_lens is not None:
            batch.encoder_lens = None
        batch.out_cache_loc = None
        if topk > 1:
            size = len(batch.seq_lens) * topk * batch.speculative_num_steps
            batch.out_cache_loc = rng.integers(0, 99, size)
        batch.bound = 0
        put = device.Journey().put if device.DEVICE != "cpu" else lambda x: x
        draft = paged.MultiStepDraft(
            paged.Config(**batch.config, device=device.NAME),
            put(batch.req_to_token),
            full_to_swa_index_mapping=put(batch.mapping),
        )
        got = draft.build(
            put(batch.seq_lens),
            put(batch.pool),
            seq_lens_cpu=np.maximum(batch.seq_lens, 0),
            out_cache_loc=put(batch.out_cache_loc),
        )
        assert len(got) == batch.speculative_num_steps - 1
        for step, metadata in enumerate(got):
            batch.spec_step = step
            check(batch, metadata)


def test_builds_of_other_modes_stay():
    """Each mode has memory of its own, and "idle" is "decode", "mixed" is "extend"."""
    for seed in range(40):
        rng = np.random.default_rng([seed, 5])
        batch = make_batch(
            rng, "decode", 4, topk=1, sliding_window_size=-1, is_encoder_decoder=False
        )
        batch.encoder_lens, batch.prefix, batch.bound = None, 0, 0
        if batch.mapping is not None:
            batch.out_cache_loc = None
        put = device.Journey().put if device.DEVICE != "cpu" else lambda x: x
        builder = paged.MetadataBuilder(
            paged.Config(**batch.config, device=device.NAME),
            put(batch.req_to_token),
            full_to_swa_index_mapping=put(batch.mapping),
        )
        kept = []
        for mode in ("decode", "draft", "target_verify", "extend", "draft_extend"):
            extend = np.maximum(batch.seq_lens, 0) if mode == "draft_extend" else None
            step = 0 if mode == "draft" else None
            same = dict(vars(batch), mode=mode, extend_seq_lens=extend, spec_step=step)
            same["out_cache_loc"] = None
            other = Batch(**same)
            kept.append((other, other.build(builder)))
        for other, metadata in kept:
            check(other, metadata)


def test_no_steps():
    settings = paged.Config(**config(speculative_num_steps=1), device=device.NAME)
    put = device.Journey().put if device.DEVICE != "cpu" else lambda x: x
    assert paged.MultiStepDraft(settings, put(ROWS)).build(put(ints(5)), put(ints(0))) == []
