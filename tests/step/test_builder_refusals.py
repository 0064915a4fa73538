"""Batches that MetadataBuilder and CommonAttentionMetadata refuse, and those at the limits, which
they take."""

import dataclasses

import cases
import engine
import library
import numpy as np
import pytest
import reference as ref
from dlpack_producer import Producer
from library import sparse_mla
from v32_plans import assert_metadata, build, plan_of


def bent(name):
    """A valid batch, and fields of its CommonAttentionMetadata of which one is wrong."""
    batch = engine.engine_batch()
    loc, lens, slots = (
        x.copy() for x in (batch.query_start_loc, batch.seq_lens, batch.slot_mapping)
    )
    if name == "decreasing query_start_loc":
        loc[3] = 9
    elif name == "query_start_loc does not start at 0":
        loc[0] = 1
    elif name == "negative seq_len":
        lens[2] = -1
    elif name == "seq_len below query_len":
        lens[6] = 16
    elif name == "seq_len above max_model_len":
        lens[2] = 513
        return batch, {"seq_lens_cpu": lens, "seq_lens": lens, "max_seq_len": 513}
    elif name == "block_table too narrow":
        return batch, {"block_table": batch.block_table[:, :2]}
    elif name == "too few tokens":
        return batch, {"num_actual_tokens": batch.num_actual_tokens - 1}
    elif name == "max_seq_len below a seq_len":
        return batch, {"max_seq_len": batch.seq_lens.max() - 1}
    elif name == "num_reqs":
        return batch, {"num_reqs": 11}
    elif name == "slot_mapping too short":
        return batch, {"slot_mapping": slots[:-1]}
    elif name == "block_table rank":
        return batch, {"block_table": batch.block_table[0]}
    fields = {"query_start_loc_cpu": loc, "seq_lens_cpu": lens}
    return batch, fields | {"query_start_loc": loc, "seq_lens": lens}


VALUE_ERRORS = {
    "decreasing query_start_loc": "`query_start_loc` must not decrease, got 4 after 9 at request 3",
    "query_start_loc does not start at 0": "`query_start_loc` must start with 0, got 1",
    "negative seq_len": r"`seq_lens` must be .* \(1 to 512\) at request 2, got -1",
    "seq_len below query_len": r"`seq_lens` must be .* \(17 to 512\) at request 6, got 16",
    "seq_len above max_model_len": r"`seq_lens` must be .* \(1 to 512\) at request 2, got 513",
    "max_seq_len below a seq_len": "`max_seq_len` must be at least .* largest, 390, got 389",
    "block_table too narrow": "`block_table` must have at least 3 columns .*, got 2",
    "too few tokens": r"`num_actual_tokens` must be at least .* = 111, got 110",
    "num_reqs": "`num_reqs` must be 12, .*, got 11",
    "slot_mapping too short": r"`slot_mapping` must have at least .* = 111 entries, got .*\[110\]",
    "block_table rank": r"`block_table` must have shape \[>= 12, any\], got",
}


@pytest.mark.parametrize(("name", "rule"), VALUE_ERRORS.items(), ids=list(VALUE_ERRORS))
def test_bad_batches(name, rule):
    """The error comes from build at the latest, and the builder works afterwards."""
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla))
    batch, fields = bent(name)
    with pytest.raises(ValueError, match=rf"^\w+(\.build)?: {rule}"):
        builder.build(batch.common(sparse_mla, **fields))
    assert_metadata(builder.build(batch.common(sparse_mla)), batch, plan_of(batch))


def test_slots_that_are_no_array_are_refused():
    batch = engine.engine_batch()
    slots = batch.slot_mapping.tolist()
    with pytest.raises(TypeError, match=r"build: `slot_mapping` must be an array, got list"):
        build(dataclasses.replace(batch, slot_mapping=slots))


@pytest.mark.parametrize("path", ["separate", "direct"])
@pytest.mark.parametrize("lens", [[9, 1], [1, 9, 1], [1, 9, 9, 1, 9]])
def test_prefills_before_decodes_are_refused(path, lens):
    batch = cases.make_batch(lens, [20] * len(lens))
    with pytest.raises(ValueError, match=r"query_start_loc"):
        build(batch, path=path)


@pytest.mark.parametrize("path", ["mixed", "bf16"])
def test_paths_without_order_take_any(path):
    batch = cases.make_batch([9, 1, 4], [20] * 3)
    got = build(batch, path=path, fp8=path == "mixed")
    assert_metadata(got, batch, plan_of(batch, path))


def test_a_sequence_longer_than_the_workspace_names_both_numbers():
    batch = cases.make_batch([20], [333])
    with pytest.raises(ValueError, match=r"333") as info:
        build(batch, prefill_workspace_tokens=332)
    assert "332" in str(info.value)


@pytest.mark.parametrize(
    ("lens", "limit"), [([1] * 17, "max_num_seqs"), ([200, 57], "max_num_batched_tokens")]
)
def test_batches_beyond_the_buffers(lens, limit):
    with pytest.raises(ValueError, match=limit):
        build(cases.make_batch(lens, [256] * len(lens)))


@pytest.mark.parametrize("path", ["separate", "direct"])
@pytest.mark.parametrize("request_idx", range(4))
def test_limits_by_one_request(request_idx, path):
    """max_model_len, the columns of block_table and the workspace, at each limit and one past it:
    two decodes and two prefills, of which one alone is long."""
    lens = [1, 1, 5, 7]

    def batch(length, *, columns=None):
        made = cases.make_batch(lens, [length if i == request_idx else 12 for i in range(4)])
        if columns is not None:
            return dataclasses.replace(made, block_table=made.block_table[:, :columns])
        return made

    def accept(good, **limits):
        assert_metadata(build(good, **limits), good, plan_of(good, path))

    limits = {"path": path, "max_model_len": 300}
    at = rf"at request {request_idx}, got"
    accept(batch(300), **limits)
    with pytest.raises(ValueError, match=rf"`seq_lens` must be .* to 300\) {at} 301"):
        build(batch(301), **limits)
    short = lens[request_idx]
    accept(batch(short), **limits)
    with pytest.raises(ValueError, match=rf"`seq_lens` must be .* {at} {short - 1}"):
        build(batch(short - 1), **limits)
    size = batch(12).block_size
    assert 2 * size < 300
    accept(batch(size, columns=1), **limits)
    for length, columns in ((size + 1, 2), (2 * size, 2), (2 * size + 1, 3)):
        accept(batch(length, columns=columns), **limits)
        rule = (
            rf"`block_table` must have at least {columns} columns for the {length} tokens of "
            rf"request {request_idx}, got {columns - 1}"
        )
        with pytest.raises(ValueError, match=rule):
            build(batch(length, columns=columns - 1), **limits)
    limits["prefill_workspace_tokens"] = 100
    assert build(batch(100), **limits).num_prefills == 2
    if request_idx < 2 or path == "direct":  # decodes need no workspace, nor does this path
        assert build(batch(101), **limits).num_prefills == 2
    else:
        with pytest.raises(ValueError, match=r"101 .*raise prefill_workspace_tokens"):
            build(batch(101), **limits)


def test_a_batch_of_zeros_is_no_batch_left_out():
    """A size of 0 is one that the engine gave."""
    starts, lens, table = (
        np.array([0, 1, 4], np.int32),
        np.array([9, 7], np.int32),
        np.zeros((2, 1)),
    )

    def make(starts=starts, lens=lens, **sizes):
        return library.package.CommonAttentionMetadata(starts, lens, np.arange(4), table, **sizes)

    usual = make()
    sizes = {"num_reqs": 2, "num_actual_tokens": 4, "max_query_len": 3, "max_seq_len": 9}
    assert {name: getattr(usual, name) for name in sizes} == sizes
    assert {type(getattr(usual, name)) for name in sizes} == {int}
    for name, size in sizes.items():
        given = make(**{name: np.int64(size)})
        assert (getattr(given, name), type(getattr(given, name))) == (size, int)
    for name in ("max_query_len", "max_seq_len"):
        assert getattr(make(**{name: sizes[name] + 1}), name) == sizes[name] + 1
        for small in (0, sizes[name] - 1):
            rule = f"must be at least the batch's largest, {sizes[name]}, got {small}"
            with pytest.raises(ValueError, match=f"^CommonAttentionMetadata: `{name}` {rule}$"):
                make(**{name: small})
    for bad in (0, 1, 3):
        with pytest.raises(ValueError, match=f"`num_reqs` must be 2, .* got {bad}$"):
            make(num_reqs=bad)
    assert make(num_actual_tokens=0).num_actual_tokens == 0
    assert make(num_actual_tokens=6).num_actual_tokens == 6
    nothing = make([0], [])
    assert (nothing.num_reqs, nothing.num_actual_tokens) == (0, 0)
    assert (nothing.max_query_len, nothing.max_seq_len) == (0, 0)
    assert nothing.seq_lens_cpu.dtype == np.int32
    for bad in ([], 3, [[0, 1]], np.zeros(0, np.int32)):
        with pytest.raises(ValueError, match=r"`query_start_loc` must have shape \[R \+ 1\], got"):
            make(bad, [])
    cpu = make(query_start_loc_cpu=[0, 2, 4], seq_lens_cpu=[3, 4])
    assert (cpu.max_query_len, cpu.max_seq_len) == (2, 4)
    assert (cpu.query_start_loc is starts) and (cpu.seq_lens is lens)
    with pytest.raises(ValueError, match="`query_start_loc` must have shape"):
        make(query_start_loc_cpu=[], seq_lens_cpu=[3, 4])
    for kind, is_host in ((1, True), (3, True), (13, True), (2, False), (10, False)):
        away = Producer(starts, device=(kind, 0))
        if is_host:  # DLPack's CPU, pinned and managed memory are read
            with pytest.raises((TypeError, ValueError)) as error:
                make(away)
            assert "must be given for device arrays" not in str(error.value)
        else:
            with pytest.raises(ValueError, match="`query_start_loc_cpu` must be given for device"):
                make(away)
            with pytest.raises(ValueError, match="`seq_lens_cpu` must be given for device"):
                make(lens=Producer(lens, device=(kind, 0)))


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"])
def test_sizes_of_a_batch_are_ints(name):
    batch = cases.make_batch([1, 5], [3, 20])
    with pytest.raises(TypeError, match=f"`{name}` must be an int, got ndarray"):
        batch.common(sparse_mla, **{name: np.array([np.nan, 1])})


def test_a_workspace_too_small_is_refused():
    small = np.zeros((cases.ENGINE_WORKSPACE - 1, 576), ref.BF16)
    rule = rf"`workspace` must have .*{cases.ENGINE_WORKSPACE}.*, got .*{len(small)}"
    with pytest.raises(ValueError, match=rule):
        sparse_mla.MetadataBuilder(engine.config(sparse_mla), workspace=small)
