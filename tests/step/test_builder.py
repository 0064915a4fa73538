"""Config, Backend, MetadataBuilder and the contents of Metadata (csrc/step/plans/plan_v32.c)."""

import dataclasses
import re

import cases
import compiled
import device
import engine
import library
import numpy as np
import pytest
import reference as ref
import reference_plan
from device import address, host
from dlpack_producer import Producer
from helpers import assert_same_bits
from library import sparse_mla

from sparse_mla import _C

UNIFORM_PATHS = ["mixed", "separate", "direct"]
ALL_PATHS = ["mixed", "separate", "bf16", "direct"]


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


# --- contents ------------------------------------------------------------------------------------


def test_engine_batch_has_three_chunks():
    batch = engine.engine_batch()
    plan = plan_of(batch)
    assert (plan.num_decodes, plan.num_prefills, len(plan.chunks)) == (5, 7, 3)
    assert_metadata(build(batch), batch, plan)


def test_workspace_starts_are_rebased_per_chunk():
    """The contract's example: seq_lens [10, 15, 20, 5] in chunks [0, 2), [2, 4)."""
    batch = cases.make_batch([4, 5, 6, 5], [10, 15, 20, 5])
    got = build(batch, prefill_workspace_tokens=25, max_model_len=25)
    assert host(got.prefill.workspace_starts).tolist() == [0, 10, 0, 20]
    assert [c.tokens_slice for c in got.prefill.chunks] == [slice(0, 9), slice(9, 20)]
    assert [c.chunk_tot_seqlen for c in got.prefill.chunks] == [25, 25]
    assert [c.req_start_idx for c in got.prefill.chunks] == [0, 2]


BATCHES = {
    # query lengths, sequence lengths, padding tokens, decode threshold
    "no requests": ([], [], 0, 1),
    "one decode": ([1], [9], 0, 1),
    "decodes": ([1] * 7, [3, 64, 65, 1, 128, 200, 77], 0, 1),
    "one prefill": ([30], [30], 0, 1),
    "prefills": ([30, 2, 64], [30, 400, 64], 0, 1),
    "mixed": ([1, 1, 30, 2], [5, 70, 30, 64], 0, 1),
    "padding tokens": ([1, 1, 30, 2], [5, 70, 30, 64], 6, 1),
    "spec decode": ([3, 3, 3], [70, 3, 128], 0, 3),
    "spec decode and prefills": ([3, 3, 40], [70, 3, 128], 0, 3),
    "spec decode, a shorter one": ([3, 3, 2, 40], [70, 3, 50, 128], 0, 3),
    "padded uniform": ([1, 1, 1, 0, 0], [9, 70, 3, 0, 0], 2, 1),
    "padded spec decode": ([2, 2, 0], [9, 70, 0], 2, 2),
}


@pytest.mark.parametrize("path", UNIFORM_PATHS)
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name, path):
    query_lens, seq_lens, pad, threshold = BATCHES[name]
    batch = cases.make_batch(query_lens, seq_lens, pad_tokens=pad)
    got = build(batch, path=path, decode_threshold=threshold)
    assert_metadata(got, batch, plan_of(batch, path, threshold))


def test_bf16_path():
    batch = engine.engine_batch()
    assert_metadata(build(batch, fp8=False), batch, plan_of(batch, "bf16"))
    assert_metadata(build(batch, kv_cache_dtype="auto"), batch, plan_of(batch, "bf16"))


@pytest.mark.parametrize(
    ("num_heads", "options", "want"),
    [
        (16, {}, "mixed"),
        (31, {}, "mixed"),
        (32, {}, "separate"),
        (128, {}, "separate"),
        (16, {"min_heads_for_bf16_prefill": 16}, "separate"),
        (128, {"min_heads_for_bf16_prefill": 129}, "mixed"),
        (128, {"fp8": False}, "bf16"),
        (16, {"path": "separate"}, "separate"),
        (128, {"path": "mixed"}, "mixed"),
        (128, {"path": "direct"}, "direct"),
        (16, {"path": "bf16", "fp8": False}, "bf16"),
    ],
)
def test_path_choice(num_heads, options, want):
    assert build(engine.engine_batch(), num_heads=num_heads, **options).path == want


# --- persistence ---------------------------------------------------------------------------------


def test_buffers_keep_their_addresses():
    """Arrays that a captured graph reads get new values and keep their addresses."""
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla))
    seen = set()
    for round_number in range(5):
        batch = engine.engine_batch(seed=round_number)
        got = builder.build(batch.common(sparse_mla))
        assert_metadata(got, batch, plan_of(batch))
        seen.add(
            tuple(
                address(x)
                for x in (
                    got.req_id_per_token,
                    got.prefill.seq_lens,
                    got.prefill.request_ids,
                    got.prefill.workspace_starts,
                )
            )
        )
    assert len(seen) == 1


def test_a_shorter_batch_leaves_nothing_of_the_longer_one():
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla))
    first = builder.build(engine.engine_batch().common(sparse_mla))
    base = address(first.req_id_per_token)
    batch = cases.make_batch([1, 1], [9, 8])
    got = builder.build(batch.common(sparse_mla))
    assert_metadata(got, batch, plan_of(batch))
    assert address(got.req_id_per_token) == base
    whole = device.peek(address(got.req_id_per_token), 256, np.int32)
    assert whole.tolist() == [0, 1] + [0] * 254, "max_num_batched_tokens entries, zero past T"


def test_largest_batch_fits():
    """max_num_seqs requests, max_num_batched_tokens tokens, max_model_len context."""
    lens = [1] * 8 + [31] * 8
    batch = cases.make_batch(lens, [512] * 8 + [400] * 8)
    assert batch.num_actual_tokens == 256
    assert_metadata(build(batch), batch, plan_of(batch))


def test_two_builders_do_not_share():
    config = engine.config(sparse_mla)
    a, b = sparse_mla.MetadataBuilder(config), sparse_mla.MetadataBuilder(config)
    batch = engine.engine_batch()
    got = a.build(batch.common(sparse_mla))
    b.build(cases.make_batch([1], [1]).common(sparse_mla))
    assert_metadata(got, batch, plan_of(batch))


def test_metadata_outlives_its_builder():
    batch = engine.engine_batch()
    got = build(batch)
    for _ in range(20):
        build(cases.make_batch([1] * 9, [5] * 9))
    assert_metadata(got, batch, plan_of(batch))


def test_build_options_of_the_engine():
    batch = engine.engine_batch()
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla))
    got = builder.build(batch.common(sparse_mla), common_prefix_len=0, fast_build=True)
    assert_metadata(got, batch, plan_of(batch))


def as_tensor(x: np.ndarray):
    """The numbers of `x` as an int32 sparse_mla.Tensor in host memory. An index conversion makes
    it: where pages have one token and are in order, a position is its own slot."""
    table = np.arange(1000, dtype=np.int32)[None]
    zero = Producer(np.zeros(1, np.int32))
    convert = library.package.convert_req_index_to_global_index
    return convert(zero, table, x[None].astype(np.int32), block_size=1)[0]


def every_second(x: np.ndarray) -> np.ndarray:
    return np.repeat(x, 2)[::2]


HOST_KINDS = {
    "list": np.ndarray.tolist,
    "tuple": lambda x: tuple(x.tolist()),
    "list of NumPy's": list,
    "int64": lambda x: x.astype(np.int64),
    "uint16": lambda x: x.astype(np.uint16),
    "strided": every_second,
    "backwards": lambda x: x[::-1].copy()[::-1],
    "memoryview": memoryview,
    "Tensor": as_tensor,
    "Tensor, every second": lambda x: as_tensor(np.repeat(x, 2))[::2],
    "Tensor, backwards": lambda x: as_tensor(x[::-1])[::-1],
}
LENGTHS = ("query_start_loc", "seq_lens")


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_host_arrays_may_be_any_integers(kind):
    batch = engine.engine_batch()
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla))
    for names in (LENGTHS, LENGTHS[:1], LENGTHS[1:]):
        given = {f"{name}_cpu": HOST_KINDS[kind](getattr(batch, name)) for name in names}
        common = batch.common(sparse_mla, **given)
        assert_metadata(builder.build(common), batch, plan_of(batch))


@pytest.mark.skipif(device.ON_CUDA, reason="a GPU's lengths are arrays there")
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_lengths_that_the_host_reads_are_given_once(kind):
    """Host lengths replace device arrays: sizes follow, and metadata shows the caller's objects."""
    batch = engine.engine_batch()
    starts, lens = (HOST_KINDS[kind](getattr(batch, name)) for name in LENGTHS)
    common = sparse_mla.CommonAttentionMetadata(starts, lens, batch.slot_mapping, batch.block_table)
    got = sparse_mla.MetadataBuilder(engine.config(sparse_mla)).build(common)
    assert got.query_start_loc is starts
    assert_metadata(
        dataclasses.replace(got, query_start_loc=batch.query_start_loc), batch, plan_of(batch)
    )


@pytest.mark.parametrize("kind", ["list", "tuple", "int64"])
def test_no_lengths(kind):
    """An empty list counts as a list of integers."""
    batch = cases.make_batch([], [])
    empty = {f"{name}_cpu": HOST_KINDS[kind](getattr(batch, name)) for name in LENGTHS}
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla))
    assert_metadata(builder.build(batch.common(sparse_mla, **empty)), batch, plan_of(batch))


# --- splits of decodes ---------------------------------------------------------------------------

SPLIT_STEPS = {
    # decodes, query tokens of a prefill after its first. The CPU divides 64 parts among all tokens;
    # a token gets ceil(K / 256) of them at most.
    "one decode": (1, 0),
    "decodes": (16, 0),
    "a part less": (17, 0),
    "two parts": (22, 0),
    "three, and a prefill": (21, 1),
    "one part": (33, 1),
    "many": (65, 0),
    "a prefill": (0, 9),
    "decodes beside a long prefill": (3, 30),
    "nothing": (0, 0),
}


@pytest.mark.skipif(device.ON_CUDA, reason="a GPU's plan has a test of its own, in C")
@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
@pytest.mark.parametrize("name", SPLIT_STEPS)
def test_decode_num_splits(name, path):
    """The number follows from the decodes if a call serves them alone, else from all tokens."""
    decodes, prefill = SPLIT_STEPS[name]
    lens = [1] * decodes + ([prefill + 1] if prefill else [])
    has_parts = path in ("separate", "direct")
    tokens = decodes if has_parts else sum(lens)
    want = min(4, max(1, 64 // tokens)) if tokens else 1
    limits = {"max_num_seqs": 70, "max_num_batched_tokens": 128, "max_model_len": 64}
    config = compiled.make_v32().step[1] | limits
    config |= {"topk_tokens": 1024, "path": path, "prefill_workspace_tokens": None}
    config["kv_cache_dtype"] = "bfloat16" if path == "bf16" else "fp8_ds_mla"
    made = _C.Step("v32", config, None)
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    table = np.zeros((len(lens), 16), np.int32)
    plan = compiled.build(made, starts, lens, table, len(lens), sum(lens))
    assert plan["decode_num_splits"] == want
    if has_parts and decodes:
        config = engine.config(sparse_mla, path=path, topk_tokens=1024, max_num_seqs=70)
        got = sparse_mla.MetadataBuilder(config).build(
            cases.make_batch(lens, lens).common(sparse_mla)
        )
        assert got.decode.num_splits == want


# --- errors --------------------------------------------------------------------------------------


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


BAD_CONFIGS = [
    (ValueError, {"num_heads": 0}),
    (ValueError, {"num_heads": 129}),
    (ValueError, {"kv_cache_dtype": "fp7"}),
    (ValueError, {"block_size": 0}),
    (ValueError, {"topk_tokens": 0}),
    (ValueError, {"max_num_seqs": 0}),
    (ValueError, {"max_num_batched_tokens": -1}),
    (ValueError, {"max_model_len": 0}),
    (ValueError, {"decode_threshold": 0}),
    (ValueError, {"path": "fastest"}),
    (ValueError, {"path": "bf16"}),
    (ValueError, {"path": "mixed", "kv_cache_dtype": "bfloat16"}),
    (ValueError, {"path": "separate", "kv_cache_dtype": "bfloat16"}),
    (ValueError, {"path": "direct", "kv_cache_dtype": "bfloat16"}),
    (ValueError, {"kv_lora_rank": 256}),
    (ValueError, {"device": "tpu"}),
    (TypeError, {"max_num_seqs": "many"}),
    (TypeError, {"softmax_scale": "0.1"}),
    (TypeError, {"no_such_option": 1}),
]


@pytest.mark.parametrize(("error", "options"), BAD_CONFIGS, ids=lambda x: str(x))
def test_bad_configs(error, options):
    with pytest.raises(error) as info:
        sparse_mla.MetadataBuilder(engine.config(sparse_mla, **options))
    name, value = next(iter(options.items()))
    wrong = type(value).__name__ if error is TypeError else repr(value)
    if name in sparse_mla.Config.__dataclass_fields__:
        assert re.fullmatch(rf"Config: `{name}` must .*, got {wrong}", str(info.value))
    else:
        assert f"'{name}'" in str(info.value)


BOUNDS = {
    "num_heads": (1, 128),
    "kv_lora_rank": (512, 512),
    "qk_rope_head_dim": (64, 64),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "block_size", "topk_tokens"), (1, None)),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_model_len"), (1, None)),
    **dict.fromkeys(("decode_threshold", "min_heads_for_bf16_prefill"), (1, None)),
    "prefill_workspace_tokens": (1, None),
}
CONFIG = {"num_heads": 16, "softmax_scale": 0.5, "max_num_seqs": 4}
CONFIG |= {"max_num_batched_tokens": 64, "max_model_len": 100}


@pytest.mark.parametrize("name", BOUNDS)
def test_each_limit_of_a_config_from_both_sides(name):
    least, most = BOUNDS[name]
    for good in (least, np.int64(least), most or 1 << 40):
        value = getattr(sparse_mla.Config(**CONFIG | {name: good}), name)
        assert (value, type(value)) == (good, int)
    rule = {least: str(least), None: f"at least {least}"}.get(most, f"{least} to {most}")
    for bad in (least - 1, 0, -1, *([most + 1] if most else [])):
        with pytest.raises(ValueError, match=f"^Config: `{name}` must be {rule}, got {bad}$"):
            sparse_mla.Config(**CONFIG | {name: bad})
    for bad in (1.0, "1", np.zeros(2), *([] if name == "prefill_workspace_tokens" else [None])):
        text = f"^Config: `{name}` must be an int, got {type(bad).__name__}$"
        with pytest.raises(TypeError, match=text):
            sparse_mla.Config(**CONFIG | {name: bad})


def test_other_options_of_a_config_from_both_sides():
    def make(**changes):
        return sparse_mla.Config(**CONFIG | changes)

    for scale in (0, -1.5, np.float32(0.25), 3):
        value = make(softmax_scale=scale).softmax_scale
        assert (value, type(value)) == (scale, float)
    for bad in (float("inf"), float("-inf"), float("nan")):
        with pytest.raises(ValueError, match=f"^Config: `softmax_scale` must be finite, got {bad}"):
            make(softmax_scale=bad)
    for bad in ("1", None, [1.0], 1j):
        with pytest.raises(TypeError, match=r"^Config: `softmax_scale` must be a float, got "):
            make(softmax_scale=bad)
    for name in ("cpu", "cuda", "cuda:0", "cuda:12"):
        assert make(device=name).device == name
    for bad in ("", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:1 ", " cuda", "cuda:-1", 0, None):
        with pytest.raises(
            ValueError, match=r"^Config: `device` must be 'cpu', 'cuda' or 'cuda:N'"
        ):
            make(device=bad)
    served = {"auto": {"bf16"}, "bfloat16": {"bf16"}}
    served["fp8_ds_mla"] = {"mixed", "separate", "direct"}
    for dtype, paths in served.items():
        for path in (*ALL_PATHS, None):
            if path is None or path in paths:
                assert make(kv_cache_dtype=dtype, path=path).path == path
                continue
            names = " or ".join(f"'{x}'" for x in ALL_PATHS if x in paths)
            rule = f"must be {names} for a {dtype} cache, got '{path}'"
            with pytest.raises(ValueError, match=f"^Config: `path` {rule}$"):
                make(kv_cache_dtype=dtype, path=path)
    for name in ("kv_cache_dtype", "path"):
        for bad in ("", 0, False, "fp8", "BF16"):
            with pytest.raises(ValueError, match=f"^Config: `{name}` must be .*, got "):
                make(**{name: bad})
    with pytest.raises(ValueError, match=r"`kv_cache_dtype` must be .* got None"):
        make(kv_cache_dtype=None)


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


def test_required_config_arguments():
    with pytest.raises(TypeError, match=r"4 required keyword-only arguments: 'softmax_scale'"):
        sparse_mla.Config(16)
    with pytest.raises(TypeError, match=r"3 required keyword-only arguments: 'max_num_seqs'"):
        sparse_mla.Config(16, softmax_scale=1.0)


def test_config_defaults():
    config = sparse_mla.Config(
        128, softmax_scale=0.1, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1000
    )
    want = {
        "num_heads": 128,
        "softmax_scale": 0.1,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "topk_tokens": 2048,
        "decode_threshold": 1,
        "min_heads_for_bf16_prefill": 32,
        "path": None,
        "device": "cpu",
    }
    assert {name: getattr(config, name) for name in want} == want
    assert config.prefill_workspace_tokens is None
    text = repr(config)
    assert text.startswith("Config(")
    assert "128" in text


def test_repr_of_metadata_shows_the_path():
    text = repr(build(engine.engine_batch()))
    assert text.startswith("Metadata(")
    assert "separate" in text
    assert "\n" not in text or len(text.splitlines()) < 30


def test_caller_workspace_is_used():
    """The separate path gathers into the workspace that it was given."""
    workspace = np.zeros((cases.ENGINE_WORKSPACE, 576), ref.BF16)
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla), workspace=workspace)
    step = engine.make_step(engine.engine_batch(), 32)
    metadata = builder.build(step.batch.common(sparse_mla))
    layer = sparse_mla.SparseMLA(engine.config(sparse_mla))
    layer.forward(step.q, step.fp8_cache, step.topk_indices, metadata)
    plan = plan_of(step.batch)
    chunk = plan.chunks[-1]
    want = np.zeros((chunk.chunk_tot_seqlen, 576), np.uint16)
    ref.gather_kv_cache(
        step.fp8_cache, chunk.block_table, chunk.seq_lens, chunk.workspace_starts, want
    )
    assert_same_bits(workspace[: len(want)].view(np.uint16), want, "the last chunk's rows")


def test_a_workspace_too_small_is_refused():
    small = np.zeros((cases.ENGINE_WORKSPACE - 1, 576), ref.BF16)
    rule = rf"`workspace` must have .*{cases.ENGINE_WORKSPACE}.*, got .*{len(small)}"
    with pytest.raises(ValueError, match=rule):
        sparse_mla.MetadataBuilder(engine.config(sparse_mla), workspace=small)


# --- Backend -------------------------------------------------------------------------------------


def value_of(x):
    """A fact of the Backend, which may be an attribute or a static method."""
    return x() if callable(x) else x


def test_backend_describes_itself():
    backend = sparse_mla.Backend
    assert value_of(getattr(backend, "name", None) or backend.get_name) == "SPARSE_MLA"
    assert [str(x).split(".")[-1] for x in value_of(backend.supported_dtypes)] == ["bfloat16"]
    formats = list(value_of(backend.supported_kv_cache_dtypes))
    assert {"auto", "bfloat16", "fp8_ds_mla"} <= set(formats)
    assert list(value_of(backend.supported_head_sizes)) == [576]
    assert value_of(backend.is_mla) is True
    assert value_of(backend.is_sparse) is True
    assert value_of(backend.accept_output_buffer) is True
    assert value_of(backend.cudagraph_support) == "UNIFORM_BATCH"
    assert backend.get_builder_cls() is library.package.MetadataBuilder
    assert backend.get_impl_cls() is library.package.SparseMLA


@pytest.mark.parametrize(("cuda", "has_cuda"), [("13.0.88 from PATH", True), ("none: off", False)])
def test_compute_capabilities(monkeypatch, cuda, has_cuda):
    monkeypatch.setattr(library.package._C, "build_info", lambda: {"cuda": cuda})
    for capability, is_new in (((7, 5), False), ((8, 0), True), ((8, 6), True), ((9, 0), True)):
        supported = library.package.Backend.supports_compute_capability(*capability)
        assert supported is (has_cuda and is_new), capability


@pytest.mark.parametrize(("name", "width"), [("auto", 576), ("bfloat16", 576), ("fp8_ds_mla", 656)])
def test_kv_cache_shape(name, width):
    shape = sparse_mla.Backend.get_kv_cache_shape
    assert tuple(shape(7, 64, cache_dtype_str=name)) == (7, 64, width)
    assert tuple(shape(7, 1, 1, 576, name)) == (7, 1, width)


def test_kv_cache_shape_defaults_and_errors():
    shape = sparse_mla.Backend.get_kv_cache_shape
    rules = {"num_kv_heads": "1", "head_size": "576"}
    rules["cache_dtype_str"] = "'auto' or 'bfloat16' or 'fp8_ds_mla'"
    for name, rule in rules.items():
        for bad in (0, -1, 2, 575, 577, "", None):
            text = f"^Backend.get_kv_cache_shape: `{name}` must be {rule}, got {bad!r}$"
            with pytest.raises(ValueError, match=text):
                shape(7, 64, **{name: bad})
    assert tuple(shape(7, 64)) == (7, 64, 576)
    with pytest.raises(ValueError, match=r"cache_dtype_str"):
        shape(7, 64, cache_dtype_str="int4")
    with pytest.raises(ValueError, match=r"num_kv_heads"):
        shape(7, 64, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"head_size"):
        shape(7, 64, head_size=512)
