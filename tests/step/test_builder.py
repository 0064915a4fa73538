"""MetadataBuilder and the contents of Metadata (csrc/step/plans/plan_v32.c)."""

import dataclasses

import cases
import compiled
import device
import engine
import library
import numpy as np
import pytest
import reference as ref
from device import address, host
from dlpack_producer import Producer
from helpers import assert_same_bits
from library import sparse_mla
from v32_plans import assert_metadata, build, plan_of

from sparse_mla import _C

UNIFORM_PATHS = ["mixed", "separate", "direct"]


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


# --- what is shown, and a workspace that is given ------------------------------------------------


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
