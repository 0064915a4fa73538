"""Batches at each limit of a builder of sparse_mla.v4, which it takes, and past it, which it
refuses."""

from __future__ import annotations

import dataclasses

import device
import numpy as np
import pytest
import reference as ref
import reference_v4 as plan
from cases import int32
from library import sparse_mla
from v4_plans import assert_step, build, make_config, simple_batch, v4

import sparse_mla as package

# --- limits --------------------------------------------------------------------------------------

# Two decodes and two prefills; which of them a limit is broken by.
WHO = {"first decode": 0, "last decode": 1, "first prefill": 2, "last prefill": 3}
SMALL = plan.Sizes(
    window=6, max_num_seqs=4, max_num_batched_tokens=17, max_model_len=70, decode_threshold=2
)


class Limits:
    """Batches in which one request alone is at a limit or past it, for one builder."""

    def __init__(self) -> None:
        self.builder = v4.MetadataBuilder(make_config(SMALL))

    def batch(self, lens, seq_lens, **fields) -> plan.V4Batch:
        rows = len(lens)
        table = np.arange(rows * 20).reshape(rows, 20) % 97
        fields = {
            "compressed": {r: int32(*([r, r + 1, r + 2] for _ in lens)) for r in SMALL.ratios},
            "states": {r: (table + r).astype(np.int32) for r in SMALL.ratios},
        } | fields  # fmt: skip
        return simple_batch(lens, seq_lens, table, **fields)

    def accept(self, lens, seq_lens, **fields) -> None:
        batch = self.batch(lens, seq_lens, **fields)
        assert_step(build(SMALL, batch, self.builder), SMALL, batch)

    def refuse(self, rule, lens, seq_lens, max_seq_len=None, **fields) -> None:
        """The step before stays whole."""
        before = self.batch([1, 2, 3], [9, 9, 9])
        got = build(SMALL, before, self.builder)
        batch = self.batch(lens, seq_lens, **fields)
        common = batch.common(sparse_mla)
        if max_seq_len is not None:
            common.max_seq_len = max_seq_len  # too late for the check of the constructor
        tables = {"compressed": batch.compressed, "states": batch.states}
        with pytest.raises(ValueError, match=rf"^MetadataBuilder\.build: {rule}"):
            self.builder.build(common, **tables)
        assert_step(got, SMALL, before)


LENS = [1, 2, 3, 4]


@pytest.mark.parametrize("who", WHO)
def test_contexts_at_their_limits(who):
    """max_model_len, max_seq_len and the query's own length, each by one request."""
    limits, r = Limits(), WHO[who]

    def seq_lens(length, others=8):
        return [length if i == r else others for i in range(4)]

    limits.accept(LENS, seq_lens(70))
    limits.refuse(
        rf"`seq_lens` must be query length to max_model_len \({LENS[r]} to 70\) at request {r}, "
        "got 71", LENS, seq_lens(71),
    )  # fmt: skip
    if not device.ON_CUDA:  # where the tests make the metadata anew, whose own check comes first
        limits.refuse("`seq_lens` must be", LENS, seq_lens(71), max_seq_len=70)
    limits.refuse("`seq_lens` must be", LENS, seq_lens(-1))
    limits.accept(LENS, seq_lens(LENS[r]))
    limits.refuse(f"`seq_lens` must be .* at request {r}, got", LENS, seq_lens(LENS[r] - 1))
    limits.accept(LENS, seq_lens(33), max_seq_len=33)
    limits.accept(LENS, seq_lens(5, others=33), max_seq_len=33)
    if not device.ON_CUDA:  # as above
        limits.refuse(
            r"`max_seq_len` must be at least the longest request \(33\), got 32",
            LENS, seq_lens(33), max_seq_len=32,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("lens", "more"),
    [
        ([17], [18]),
        ([1, 2, 14], [1, 2, 15]),
        ([1, 2, 3, 11], [1, 2, 3, 12]),
        ([1, 2, 11, 3], [1, 2, 12, 3]),
        ([2, 15], [3, 15]),
    ],
)
def test_tokens_at_their_limit(lens, more):
    """max_num_batched_tokens = 17, by a prefill of any place, and by the first request."""
    limits = Limits()
    limits.accept(lens, [20] * len(lens))
    limits.refuse(
        "`num_actual_tokens` must be 0 to max_num_batched_tokens = 17, got 18",
        more, [20] * len(more),
    )  # fmt: skip


def test_decode_tokens_at_their_limit():
    sizes = dataclasses.replace(SMALL, max_num_batched_tokens=8, ratios=())
    for lens in ([2, 2, 2, 2], [1, 2, 2, 3], [2, 6]):
        batch = simple_batch(lens, [9] * len(lens), np.zeros((len(lens), 4)))
        assert_step(build(sizes, batch), sizes, batch)
    for lens in ([2, 2, 2, 3], [1, 2, 2, 4], [2, 7]):
        batch = simple_batch(lens, [9] * len(lens), np.zeros((len(lens), 4)))
        with pytest.raises(ValueError, match=r"max_num_batched_tokens = 8, got 9$"):
            build(sizes, batch)
    batch = simple_batch([2, 2, 2], [9] * 3, np.zeros((3, 4)))  # padding counts, too
    for padding, is_good in ((2, True), (3, False)):
        padded = dataclasses.replace(batch, slot_mapping=np.array([0] * 6 + [-1] * padding))
        if is_good:
            assert_step(build(sizes, padded), sizes, padded)
        else:
            with pytest.raises(ValueError, match=r"max_num_batched_tokens = 8, got 9$"):
                build(sizes, padded)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("num_prefills", [0, 1, 4])
def test_requests_at_their_limit(num_prefills, length):
    """max_num_seqs = 4, by decodes, by one prefill and by prefills alone."""
    limits = Limits()
    decodes = [min(length, 2)] * (4 - num_prefills)
    prefills = [3 if length < 3 else length] * num_prefills
    limits.accept(decodes + prefills, [30] * 4)
    last = prefills[-1] if prefills else decodes[-1]
    limits.refuse(
        "`num_reqs` must be 0 to max_num_seqs = 4, got 5", [*decodes, *prefills, last], [30] * 5
    )


def test_thresholds_of_decodes():
    """decode_threshold = 2: one more token makes a prefill, which no decode may follow."""
    limits = Limits()
    for lens, num_decodes in (([2, 2], 2), ([2, 3], 1), ([3, 3], 0), ([1, 2, 3], 2)):
        limits.accept(lens, [30] * len(lens))
        batch = limits.batch(lens, [30] * len(lens))
        assert build(SMALL, batch, limits.builder).num_decodes == num_decodes
    for lens, at in (([3, 2], 1), ([2, 3, 2], 2), ([3, 3, 3, 1], 3), ([1, 4, 1, 4], 2)):
        limits.refuse(
            rf"`query_start_loc` must have decodes \(at most 2 tokens\) before prefills, got "
            rf"{lens[at]} tokens at request {at} behind a prefill", lens, [30] * len(lens),
        )  # fmt: skip


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("ratio", [4, 16])
def test_tables_at_their_limits(ratio, who):
    """A request whose context ends in the last page of its table, and one or two tokens behind it:
    what has no page is -1. A table of fewer rows than requests is refused."""
    limits, r = Limits(), WHO[who]
    whole = limits.batch(LENS, [8] * 4)
    for length in (63, 64, 65, 66):  # two pages of 32 tokens, and behind them
        lens = [length if i == r else 8 for i in range(4)]
        limits.accept(LENS, lens, compressed=whole.compressed | {ratio: int32(*[[5, 2]] * 4)})
        pages = np.full((4, 64 // SMALL.state_block_sizes[ratio]), 3, np.int32)
        limits.accept(LENS, lens, states=whole.states | {ratio: pages})
    for name in ("compressed", "states"):
        tables = getattr(whole, name)
        limits.refuse(
            rf"`{name}\[{ratio}\]` must have shape \[>= 4, any\], got \[3, ",
            LENS, [8] * 4, **{name: tables | {ratio: tables[ratio][:3]}},
        )  # fmt: skip


@pytest.mark.parametrize("who", WHO)
def test_windows_at_their_limits(who):
    """Contexts of one token less than the window, as many, and one more, of one request."""
    limits, r = Limits(), WHO[who]
    for length in range(4, 16):
        limits.accept(LENS, [length if i == r else 9 for i in range(4)])


# --- errors of a build ---------------------------------------------------------------------------


def test_bad_builds():
    """The errors name their arguments, and the step before them stays valid."""
    sizes = plan.Sizes()
    batch = simple_batch(
        [1, 4], [9, 20], np.zeros((2, 9)), compressed={4: int32([1], [2]), 16: int32([1], [2])},
        states={4: int32([1], [2]), 16: int32([1], [2])},
    )  # fmt: skip
    builder = v4.MetadataBuilder(make_config(sizes))
    got = build(sizes, batch, builder)

    def changed(**fields):
        return dataclasses.replace(batch, **fields)

    errors = [
        (changed(query_lens=[4, 1]), "`query_start_loc` must have decodes"),
        (changed(query_lens=[1, 9]), "`num_actual_tokens` must be at least"),
        (changed(seq_lens=int32(9, 3)), "`seq_lens` must be query length to max_model_len"),
        (changed(seq_lens=int32(9, 2501), max_seq_len=2501), "`seq_lens` must be query length"),
        (changed(block_table=int32([1])), "`block_table` must have shape"),
        (changed(compressed={16: int32([1])}), r"`compressed\[16\]` must have shape .* numbers"),
        (changed(states=batch.states | {4: int32([1])}), r"`states\[4\]` must have shape"),
        (changed(compressed={}), "`compressed` must have a table of each ratio in `states`"),
        (changed(compressed={8: int32([1], [2])}), "`compressed` must have keys among .* got 8"),
        (changed(states={8: int32([1], [2])}), "`states` must have keys among .* got 8"),
    ]
    for bad, rule in errors:
        with pytest.raises(ValueError, match=rf"^\w+(\.build)?: ({rule})"):
            build(sizes, bad, builder)
        assert_step(got, sizes, batch)
    types = [
        (changed(block_table=np.zeros((2, 9))), "`block_table` must be int32"),
        (changed(slot_mapping=np.zeros(5, np.int16)), "`slot_mapping` must be int"),
        (changed(compressed=[int32([1], [2])]), "`compressed` must be a dict of block tables"),
    ]
    for bad, rule in types:
        with pytest.raises(TypeError, match=rf"^\w+(\.build)?: {rule}"):
            build(sizes, bad, builder)
    short = changed(slot_mapping=batch.slot_mapping[:4])
    common = short.common(sparse_mla)
    common.num_actual_tokens = 5
    with pytest.raises(ValueError, match=r"`slot_mapping` must have shape .* a slot per token"):
        builder.build(common)
    assert_step(build(sizes, batch, builder), sizes, batch)


def test_tables_of_an_index_need_its_ratio():
    sizes = plan.Sizes(ratios=(16,))
    batch = simple_batch([1], [9], np.zeros((1, 9)))
    builder = v4.MetadataBuilder(make_config(sizes))
    with pytest.raises(ValueError, match="`index` must be None for a config without compress rat"):
        builder.build(batch.common(sparse_mla), index=int32([1]))


def test_a_builder_takes_its_own_config():
    with pytest.raises(TypeError, match=r"`config` must be a sparse_mla\.v4\.Config, got int"):
        v4.MetadataBuilder(3)
    with pytest.raises(TypeError, match="`common` must be a CommonAttentionMetadata, got int"):
        package.v4.MetadataBuilder(make_config(plan.Sizes())).build(3)


def test_workspaces():
    sizes = plan.Sizes()
    rows = 3 * (2500 // 4 + 6 + 160)
    builder = v4.MetadataBuilder(make_config(sizes, path="separate"))
    assert getattr(builder, "builder", builder).workspace_bytes == rows * 1024
    assert package.v4.MetadataBuilder(make_config(sizes)).workspace_bytes == 0
    config = make_config(sizes, path="separate")
    for shape, rule in (((rows - 1, 512), rf"shape \[>= {rows}, 512\]"), ((rows, 576), "shape")):
        with pytest.raises(ValueError, match=f"^MetadataBuilder: `workspace` must have {rule}"):
            v4.MetadataBuilder(config, workspace=np.zeros(shape, ref.BF16))
    apart = np.zeros((3, rows // 3 + 1, 512), ref.BF16)[:, :-1]
    with pytest.raises(ValueError, match=rf"`workspace` must have shape \[>= {rows}, 512\], got"):
        v4.MetadataBuilder(config, workspace=apart)
    with pytest.raises(TypeError, match="`workspace` must be bfloat16, got float32"):
        v4.MetadataBuilder(config, workspace=np.zeros((rows, 512), np.float32))
    huge = make_config(sizes, path="separate", max_model_len=2**29, prefill_chunk_size=2**10)
    with pytest.raises(ValueError, match=r"`prefill_chunk_size` must make .* 2\^31 rows"):
        v4.MetadataBuilder(huge)
