"""Requests without query tokens, in every builder and on every path: they may stand anywhere, they
count as decodes before the first prefill and as prefills behind it, nothing of them is read, and
the other results are those of the batch without them, bit for bit."""

from __future__ import annotations

import dataclasses

import cases
import engine
import numpy as np
import pytest
import reference_plan
from dense_steps import Case as DenseCase
from dense_steps import dense
from device import host
from helpers import assert_same_bits
from idle import count_decodes, draw_places, spread, spread_lens, spread_pages, starts_of
from library import sparse_mla
from test_dense_absorbed import Layer
from test_v4_forward import assert_equal, random_steps, run
from v4_attend_cases import SIZES, make_case
from v4_world import World

import sparse_mla as package

MOST_IDLE = 6


def assert_counts(got, want, keep, query_lens) -> None:
    """`want`: the metadata of the batch without idle requests."""
    num_decodes = count_decodes(query_lens, want.num_decodes, keep)
    assert (got.num_reqs, got.num_actual_tokens) == (len(keep), want.num_actual_tokens)
    assert (got.num_decodes, got.num_prefills) == (num_decodes, len(keep) - num_decodes)
    assert got.num_decode_tokens == want.num_decode_tokens
    assert got.num_prefill_tokens == want.num_prefill_tokens
    assert (got.max_query_len, got.path) == (want.max_query_len, want.path)
    rows = np.flatnonzero(keep)
    tokens = sum(query_lens)
    old, new = (host(m.req_id_per_token)[:tokens] for m in (want, got))
    assert_same_bits(rows[old].astype(np.int32), new)
    assert not host(got.req_id_per_token)[tokens:].any()


# --- DeepSeek-V3.2 -------------------------------------------------------------------------------


def with_idle(rng, batch: cases.Batch, keep, most: int) -> cases.Batch:
    query_lens = spread(keep, np.diff(batch.query_start_loc), 0)
    return dataclasses.replace(
        batch,
        query_start_loc=starts_of(query_lens),
        seq_lens=spread_lens(rng, keep, batch.seq_lens, most),
        block_table=spread_pages(rng, keep, batch.block_table),
    )


V32_BATCHES = {
    # query lengths, lengths, padding, decode threshold
    "mixed": ([1, 1, 1, 30, 2, 64, 9], [5, 70, 9, 130, 64, 200, 9], 0, 1),
    "padding": ([1, 1, 30, 2], [5, 70, 30, 64], 3, 1),
    "decodes": ([1] * 5, [3, 64, 65, 128, 200], 2, 1),
    "prefills": ([30, 2, 64], [30, 400, 64], 0, 1),
    "drafts": ([3, 3, 3, 40, 7], [70, 3, 50, 128, 300], 0, 3),
    "shorter drafts": ([3, 3, 2, 1, 40], [70, 3, 50, 9, 128], 1, 3),
}
V32_PATHS = ("mixed", "separate", "direct", "bf16", None)


def run_v32(step, batch, path, threshold):
    """-> metadata, out, lse"""
    fp8 = path != "bf16"
    options = {"path": path, "decode_threshold": threshold, "max_num_seqs": 24}
    config = engine.config(sparse_mla, fp8=fp8, **options)
    metadata = sparse_mla.MetadataBuilder(config).build(batch.common(sparse_mla, max_seq_len=None))
    kv = step.fp8_cache if fp8 else step.bf16_cache(sparse_mla)
    out, lse = sparse_mla.SparseMLA(config).forward(
        step.q, kv, step.topk_indices, metadata, attn_sink=step.attn_sink
    )
    return metadata, out, lse


@pytest.mark.parametrize("path", V32_PATHS)
@pytest.mark.parametrize("name", V32_BATCHES)
def test_v32(name, path):
    query_lens, lens, padding, threshold = V32_BATCHES[name]
    rng = np.random.default_rng([1, len(name), V32_PATHS.index(path)])
    step = engine.make_step(cases.make_batch(query_lens, lens, pad_tokens=padding), 32)
    want, *results = run_v32(step, step.batch, path, threshold)
    for _ in range(4):
        keep = draw_places(rng, len(lens), MOST_IDLE)
        batch = with_idle(rng, step.batch, keep, 512)
        got, *found = run_v32(step, batch, path, threshold)
        assert_counts(got, want, keep, query_lens)
        assert got.max_seq_len == max(lens)
        for x, y in zip(found, results, strict=True):
            assert_same_bits(x, y)
        assert (got.prefill is None) == (want.prefill is None)
        if want.prefill is not None:
            prefills = keep[got.num_decodes :]
            assert_same_bits(host(got.prefill.seq_lens)[prefills], host(want.prefill.seq_lens))
            assert not host(got.prefill.seq_lens)[~prefills].any()
            for name_ in ("tokens_slice", "chunk_tot_seqlen"):
                wanted = [getattr(chunk, name_) for chunk in want.prefill.chunks]
                assert [getattr(chunk, name_) for chunk in got.prefill.chunks] == wanted
        has_decodes = got.num_decodes > 0 and got.path in ("separate", "direct")
        assert (got.decode is not None) == has_decodes
        if has_decodes:
            length = want.decode.decode_query_len if want.decode else 0
            assert got.decode.decode_query_len == length


@pytest.mark.parametrize("path", ["mixed", "bf16"])
def test_v32_in_any_order(path):
    """Paths with one call for all tokens take prefills before decodes, too."""
    rng = np.random.default_rng(2)
    step = engine.make_step(cases.make_batch([9, 1, 4, 1], [20, 30, 4, 1]), 32)
    want = run_v32(step, step.batch, path, 1)
    for _ in range(4):
        keep = draw_places(rng, 4, MOST_IDLE)
        got = run_v32(step, with_idle(rng, step.batch, keep, 512), path, 1)
        for x, y in zip(got[1:], want[1:], strict=True):
            assert_same_bits(x, y)


# --- dense ---------------------------------------------------------------------------------------

DENSE_BATCHES = {
    # query lengths, contexts, padding
    "mixed": ([1, 1, 5, 9, 2, 30, 3], [50, 0, 300, 10, 0, 40, 77], 0),
    "padding": ([1, 7, 2], [33, 90, 64], 3),
    "decodes": ([1, 1, 1], [40, 0, 299], 2),
    "prefills": ([5, 3, 2, 4], [300, 10, 0, 40], 0),
    "no context": ([1, 5, 7], [0, 0, 0], 0),
}


LONGEST = 2000  # tokens, for which the block tables have too few columns


def dense_with_idle(rng, case: DenseCase, keep) -> DenseCase:
    found = dataclasses.replace(case)  # makes the arrays again, the same ones
    found.batch = with_idle(rng, case.batch, keep, LONGEST)
    return found


def assert_context(got, want, keep) -> None:
    """The idle prefills have no context, and the chunks of the others are the same."""
    if want.prefill is None:
        return
    prefills = keep[got.num_decodes :]
    contexts = got.prefill.context_lens
    assert contexts[prefills].tolist() == want.prefill.context_lens.tolist()
    assert not contexts[~prefills].any()
    assert got.prefill.max_query_len == want.prefill.max_query_len
    assert got.has_context == want.has_context
    assert got.context_chunk_seq_tot == want.context_chunk_seq_tot
    chunks, wanted = got.prefill.chunks, want.prefill.chunks
    if isinstance(chunks, list):
        numbers = np.flatnonzero(prefills)
        for (a, b, starts, lens), old in zip(chunks, wanted, strict=True):
            assert numbers[old[0]] == a
            own = prefills[a:b]
            assert host(starts)[own].tolist() == host(old[2]).tolist()
            assert host(lens)[own].tolist() == host(old[3]).tolist()
            assert not host(lens)[~own].any()
    elif chunks is not None:
        lens = host(chunks.context_chunk_seq_lens)
        assert_same_bits(lens[:, prefills], host(wanted.context_chunk_seq_lens))
        assert not lens[:, ~prefills].any()


@pytest.mark.parametrize("plan", ["equal", "packed"])
@pytest.mark.parametrize("path", ["separate", "mixed", None])
@pytest.mark.parametrize("name", DENSE_BATCHES)
def test_dense(name, path, plan):
    query_lens, contexts, padding = DENSE_BATCHES[name]
    rng = np.random.default_rng([3, len(name), len(plan), len(path or "")])
    case = DenseCase(
        query_lens, contexts, padding=padding, fmt=str(rng.choice(["bfloat16", "fp8_ds_mla"]))
    )
    options = {"path": path, "context_plan": plan, "prefill_workspace_tokens": 96}
    options["max_model_len"] = LONGEST
    want = case.run(**options)
    for _ in range(4):
        keep = draw_places(rng, len(query_lens), MOST_IDLE)
        other = dense_with_idle(rng, case, keep)
        assert_same_bits(other.run(max_num_seqs=24, **options), want)
        assert_counts(other.metadata, case.metadata, keep, query_lens)
        assert_context(other.metadata, case.metadata, keep)


@pytest.mark.parametrize("plan", ["equal", "packed"])
def test_dense_with_more_idle_requests_than_tokens(plan):
    """The builder has room for a part of each in every chunk."""
    rng = np.random.default_rng(4)
    case = DenseCase([2, 3, 2], [300, 77, 280], page=16)
    options = {"context_plan": plan, "prefill_workspace_tokens": 48, "max_model_len": LONGEST}
    want = case.run(**options)
    for at in ([0, 30, 59], [0, 1, 2], [57, 58, 59], [9, 10, 40]):
        keep = np.zeros(60, bool)
        keep[at] = True
        assert_same_bits(dense_with_idle(rng, case, keep).run(max_num_seqs=60, **options), want)


def test_dense_mixed_in_any_order():
    rng = np.random.default_rng(5)
    case = DenseCase([7, 1, 4, 1], [20, 30, 0, 0])
    for path in ("mixed", None):
        options = {"path": path, "max_model_len": LONGEST}
        want = case.run(**options)
        keep = draw_places(rng, 4, MOST_IDLE)
        assert_same_bits(dense_with_idle(rng, case, keep).run(max_num_seqs=24, **options), want)


@pytest.mark.parametrize("scheme", [None, "token_channel"])
@pytest.mark.parametrize("path", ["separate", "mixed"])
def test_absorbed_weights(path, scheme):
    rng = np.random.default_rng(6)
    case = DenseCase([1, 1, 7, 2, 30], [50, 0, 77, 200, 0])
    layer = Layer(case, scheme=scheme)
    want = layer.run(path=path)
    layer.case.batch = with_idle(rng, case.batch, draw_places(rng, 5, MOST_IDLE), max(case.lens))
    assert_same_bits(layer.run(path=path, max_num_seqs=24), want)


# --- DeepSeek V4 ---------------------------------------------------------------------------------

V4_BATCHES = {
    # query lengths, contexts, padding; decodes have up to two tokens
    "mixed": ([1, 2, 1, 9, 3, 20, 5], [40, 3, 0, 0, 60, 7, 33], 2),
    "decodes": ([2, 1, 1], [40, 3, 0], 1),
    "prefills": ([9, 3, 20, 5, 4, 3, 6], [0, 60, 7, 33, 1, 2, 90], 0),
}


def v4_with_idle(rng, batch, keep):
    most = SIZES.max_model_len
    return dataclasses.replace(
        batch,
        query_lens=spread(keep, batch.query_lens, 0).tolist(),
        seq_lens=spread_lens(rng, keep, batch.seq_lens, most),
        block_table=spread_pages(rng, keep, batch.block_table),
        compressed={r: spread_pages(rng, keep, x) for r, x in batch.compressed.items()},
        max_seq_len=None,
    )


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", [1, 4, 16])
@pytest.mark.parametrize("name", V4_BATCHES)
def test_v4(name, ratio, path):
    query_lens, contexts, padding = V4_BATCHES[name]
    rng = np.random.default_rng([7, len(name), ratio, len(path)])
    case = make_case(ratio, path, query_lens, contexts, padding=padding, max_num_seqs=24)
    want, results = case.build(), case.run()
    for _ in range(4):
        keep = draw_places(rng, len(query_lens), MOST_IDLE)
        other = dataclasses.replace(case, batch=v4_with_idle(rng, case.batch, keep))
        got = other.build()
        assert_counts(got, want, keep, query_lens)
        assert got.max_seq_len == int(case.batch.seq_lens.max())
        for name_, x in other.run().items():
            assert_same_bits(x, results[name_], name_)
        if want.prefill is None:
            assert got.prefill is None
            continue
        prefills = keep[got.num_decodes :]
        for name_ in ("seq_lens", "gather_lens"):
            found = host(getattr(got.prefill, name_))
            assert_same_bits(found[prefills], host(getattr(want.prefill, name_)))
            assert not found[~prefills].any()
        slices = [chunk.tokens_slice for chunk in want.prefill.chunks]
        assert [chunk.tokens_slice for chunk in got.prefill.chunks] == slices
        assert sum(len(host(chunk.seq_lens)) for chunk in got.prefill.chunks) == len(prefills)


def test_a_long_idle_request_does_not_widen_lists():
    """Its length would change the width of lists, and with it how attention cuts them."""
    case = make_case(16, None, [1, 5], [9, 0], max_model_len=9000)
    batch = dataclasses.replace(case.batch, max_seq_len=None)
    want = dataclasses.replace(case, batch=batch).build().layers[16]
    rng, keep = np.random.default_rng(8), np.array([True, False, True, False])
    other = v4_with_idle(rng, batch, keep)
    other.seq_lens[~keep] = 9000
    got = dataclasses.replace(case, batch=other).build().layers[16]
    assert host(got.decode_indices).shape == host(want.decode_indices).shape == (1, 128)


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_v4_layers(ratio, path):
    """From hidden states on: results, caches and the states of compressors. Requests pause."""
    rng = np.random.default_rng([10, ratio, len(path)])
    lengths = (40, 23, 31)

    def new() -> World:
        return World(package, ratio, lengths, seed=ratio, options={"path": path})

    steps = random_steps(rng, lengths)
    paused = []
    for parts, padding in steps:
        keep = draw_places(rng, len(parts), 5)
        done = {b: a + n for b, a, n in parts}
        idle = [(int(b), done.get(b, 7), 0) for b in rng.integers(0, 3, (~keep).sum())]
        mixed = iter(parts), iter(idle)
        paused.append(([next(mixed[0] if kept else mixed[1]) for kept in keep], padding))
    assert_equal(run(new(), paused), run(new(), steps))


# --- steps without tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("path", V32_PATHS)
def test_v32_of_idle_requests_alone(path, padding):
    batch = cases.make_batch([0, 0, 0], [0, 70, 512], pad_tokens=padding)
    batch.block_table[:] = -1
    metadata, out, lse = run_v32(engine.make_step(batch, 32), batch, path, 1)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, padding)
    assert (metadata.num_prefills, metadata.max_seq_len, metadata.prefill) == (0, 0, None)
    assert out.shape == (padding, 32, 512)
    assert not out.astype(np.float32).any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("path", ["separate", "mixed", None])
def test_dense_of_idle_requests_alone(path, padding):
    case = DenseCase([0, 0], [0, 99], padding=padding)
    case.batch.block_table[:] = -1
    out = case.run(path=path, max_num_batched_tokens=8)
    assert out.shape == (padding, case.heads, case.values)
    m = case.metadata
    assert (m.num_decodes, m.num_decode_tokens, m.prefill) == (2, padding, None)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_v4_of_idle_requests_alone(ratio, path, padding):
    case = make_case(ratio, path, [0, 0], [0, 99], padding=padding)
    case.batch.block_table[:] = -1
    metadata, got = case.build(), case.run()
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, padding)
    assert not host(got["out"]).astype(np.float32).any()
    assert np.isneginf(host(got["lse"])[:padding]).all()


# --- orders --------------------------------------------------------------------------------------


def test_the_order_of_reorder_batch_is_taken():
    """By all builders, with the counts that it gives. A decode has any length up to the threshold
    where decodes may be ragged, else one."""
    rng = np.random.default_rng(9)
    for _ in range(60):
        threshold = int(rng.integers(1, 4))
        choices = np.array([0, 0, threshold, threshold + 1, 9])
        scheduled = rng.choice(choices, rng.integers(1, 9))
        swaps, *counts = package.reorder_batch(scheduled, decode_threshold=threshold)
        for i, j in swaps:
            scheduled[[i, j]] = scheduled[[j, i]]
        lens = scheduled + rng.integers(0, 30, len(scheduled))
        common = cases.make_batch(scheduled, lens).common(package)
        limits = {
            "max_num_seqs": 9, "max_num_batched_tokens": 96, "max_model_len": 64,
            "decode_threshold": threshold,
        }  # fmt: skip
        builders = [
            *(
                package.MetadataBuilder(
                    package.Config(
                        64, softmax_scale=1, kv_cache_dtype="fp8_ds_mla", path=path, **limits
                    )
                )
                for path in ("mixed", "separate", "direct", None)
            ),
            *(
                dense.MetadataBuilder(dense.Config(2, softmax_scale=1, path=path, **limits))
                for path in ("separate", "mixed", None)
            ),
            *(
                package.v4.MetadataBuilder(package.v4.Config(64, path=path, **limits))
                for path in ("direct", "separate")
            ),
        ]
        for builder in builders:
            m = builder.build(common)
            got = [m.num_decodes, m.num_prefills, m.num_decode_tokens, m.num_prefill_tokens]
            assert got == counts, (scheduled, builder)
        assert reference_plan.reorder_batch(scheduled, decode_threshold=threshold)[0] == []


def errors_of_builds():
    """Batches that builders refuse, by what refuses them."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    sparse = package.Config(
        64, softmax_scale=1, kv_cache_dtype="fp8_ds_mla", path="separate",
        prefill_workspace_tokens=30, **limits,
    )  # fmt: skip
    many = dense.Config(
        2, softmax_scale=1, path="separate", block_size=16, prefill_workspace_tokens=16, **limits
    )
    return {
        "decreasing": (sparse, [3, -1], [9, 9]),
        "order": (sparse, [4, 0, 1], [9, 0, 9]),
        "order of v4": (package.v4.Config(64, **limits), [4, 0, 1], [9, 0, 9]),
        "order of dense": (many, [4, 0, 1], [9, 0, 9]),
        "workspace": (sparse, [1, 0, 5, 5], [5, 9, 31, 9]),
        "workspace of dense": (many, [5, 0, 5], [9, 9, 9]),
        "negative idle length": (sparse, [4, 0], [9, -1]),
        "idle length": (sparse, [4, 0], [9, 65]),
    }


@pytest.mark.parametrize("name", errors_of_builds())
def test_errors_name_the_build(name):
    config, query_lens, lens = errors_of_builds()[name]
    kinds = {package.Config: package, dense.Config: dense, package.v4.Config: package.v4}
    builder = kinds[type(config)].MetadataBuilder(config)
    tokens = max(sum(query_lens), 0)
    table = np.arange(4 * len(lens), dtype=np.int32).reshape(-1, 4)
    lens = np.array(lens, np.int32)
    slots = np.zeros(tokens, np.int64)
    common = package.CommonAttentionMetadata(starts_of(query_lens), lens, slots, table)
    with pytest.raises(ValueError, match=r"^MetadataBuilder\.build: `\w+` must .* got ") as info:
        builder.build(common)
    if name == "workspace":
        assert "got 31 at request 2" in str(info.value)
