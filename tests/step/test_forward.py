"""SparseMLA.forward: each path of a step is within its bound, two paths within their sum."""

import dataclasses

import cases
import device
import engine
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bits, assert_within_bounds
from library import sparse_mla

NUM_HEADS = 33


def run(step, kv, *, path=None, num_heads=NUM_HEADS, q=None, sink=True, **config):
    """Runs a step with guarded outputs; returns the path taken, and out and lse."""
    if path is not None:
        config["path"] = path
    options = engine.config(sparse_mla, num_heads=num_heads, fp8=ref.is_fp8(kv), **config)
    metadata = sparse_mla.MetadataBuilder(options).build(step.batch.common(sparse_mla))
    rows = len(step.q)
    out = Guarded((rows, num_heads, 512), ref.BF16)
    lse = Guarded((rows, num_heads), np.float32)
    result = sparse_mla.SparseMLA(options).forward(
        step.q if q is None else q,
        kv,
        step.topk_indices,
        metadata,
        attn_sink=step.attn_sink if sink else None,
        out=out.array,
        lse=lse.array,
    )
    assert result[0] is out.array
    assert result[1] is lse.array
    tokens = step.batch.num_actual_tokens
    complete = rows == tokens
    got = {"out": out.check(written=complete), "lse": lse.check(written=complete)}
    return metadata.path, {name: x[:tokens] for name, x in got.items()}


@pytest.fixture(scope="module")
def step():
    return engine.make_step(engine.engine_batch(), NUM_HEADS)


@pytest.fixture(scope="module")
def results(step):
    """Result and fp64 reference of each path; `separate` is judged on its gathered rows."""
    bf16 = step.bf16_cache(sparse_mla)
    found = {}
    for path in ("mixed", "separate", "direct", "bf16"):
        kv = bf16 if path == "bf16" else step.fp8_cache
        taken, got = run(step, kv, path=path)
        assert taken == path
        found[path] = (got, step.reference(path, kv))
    return found


def test_the_batch_is_the_issue_s(step):
    options = engine.config(sparse_mla, num_heads=NUM_HEADS)
    metadata = sparse_mla.MetadataBuilder(options).build(step.batch.common(sparse_mla))
    assert metadata.path == "separate"
    assert (metadata.num_decodes, metadata.num_prefills) == (5, 7)
    assert len(metadata.prefill.chunks) == 3


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_within_its_bound(results, path):
    got, want = results[path]
    assert_within_bounds(want, got)


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
@pytest.mark.parametrize("slack", [1, 100])
def test_host_lengths_may_be_upper_bounds(results, step, path, slack):
    """An engine that does not wait for the device knows only how long its requests can be. The
    table's pages behind a request's end are what other requests have left there."""
    pages = step.batch.block_table
    stale = np.where(pages < 0, pages.max(axis=1, keepdims=True), pages)
    table = np.concatenate([stale, stale], axis=1).astype(np.int32)
    bounds = np.minimum(step.batch.seq_lens + slack, cases.ENGINE_WORKSPACE)
    changes = {"block_table": table, "fields": {"seq_lens_cpu": bounds, "max_seq_len": None}}
    kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
    loose = dataclasses.replace(step, batch=dataclasses.replace(step.batch, **changes))
    taken, got = run(loose, kv, path=path)
    assert taken == path
    exact, want = results[path]
    assert_within_bounds(want, got)
    if path != "separate":  # it cuts other chunks, whose calls have other splits
        for name in got:
            assert_same_bits(got[name], exact[name], name)


def test_pages_up_to_the_bound_are_of_the_cache(step):
    """A page that a gather may read is checked before anything is written, even if no token of
    the request lies in it."""
    if device.ON_CUDA:
        pytest.skip("a GPU reads zeros there, and no index names them")
    bounds = np.minimum(step.batch.seq_lens + 64, cases.ENGINE_WORKSPACE)
    changed = dataclasses.replace(step.batch, fields={"seq_lens_cpu": bounds, "max_seq_len": None})
    with pytest.raises(ValueError, match="`block_table` must name pages of the cache"):
        run(dataclasses.replace(step, batch=changed), step.fp8_cache, path="separate")


def test_separate_against_the_fp8_bytes(results, step):
    got, _ = results["separate"]
    assert_within_bounds(step.reference("mixed", step.fp8_cache), got, gathered=True)


def test_the_bf16_cache_is_the_gathered_one(results, step):
    """Prefills on the bf16 cache read the same bytes that the separate path gathers."""
    prefills = slice(5, None)
    want = results["separate"][1].rows(prefills)
    got = {name: x[prefills] for name, x in results["bf16"][0].items()}
    assert_within_bounds(want, got)


GATHERED = {"mixed": False, "separate": True, "direct": False, "bf16": True}
PAIRS = [(a, b) for i, a in enumerate(GATHERED) for b in list(GATHERED)[i + 1 :]]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_pairs_within_the_sum_of_their_bounds(results, step, a, b):
    """Bounds are from one reference, fp64 on the FP8 bytes; gathered paths have an allowance."""
    common = step.reference("mixed", step.fp8_cache)
    empty = np.isneginf(common.lse)
    for name, bound in (("out", common.out_tolerance), ("lse", common.lse_tolerance)):
        x, y = (results[path][0][name].astype(np.float64) for path in (a, b))
        tolerance = sum(bound(gathered=GATHERED[x], **device.BOUNDS) for x in (a, b))
        differs = (x != y) & ~(empty[..., None] if name == "out" else empty)
        with np.errstate(invalid="ignore"):
            ratio = np.where(differs, np.abs(x - y) / tolerance, 0)
        assert ratio.max() <= 1, name


@pytest.mark.parametrize("path", ["mixed", "separate", "direct"])
@pytest.mark.parametrize("views", [False, True])
def test_q_as_a_pair(results, step, path, views):
    nope, rope = step.q[..., :512], step.q[..., 512:]
    pair = (nope, rope) if views else tuple(np.ascontiguousarray(x) for x in (nope, rope))
    _, got = run(step, step.fp8_cache, path=path, q=pair)
    for name, x in got.items():
        assert_same_bits(x, results[path][0][name], name)


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_rows_past_t_are_left_alone(step, path):
    """Buffers of a captured graph are padded; forward does not write the padding."""
    kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
    tokens = step.batch.num_actual_tokens
    options = engine.config(sparse_mla, num_heads=NUM_HEADS, fp8=path != "bf16", path=path)
    metadata = sparse_mla.MetadataBuilder(options).build(step.batch.common(sparse_mla))
    layer = sparse_mla.SparseMLA(options)
    q = np.concatenate([step.q, np.full((9, NUM_HEADS, 576), np.nan, ref.BF16)])
    topk = np.concatenate([step.topk_indices, np.full((9, 48), 2**31 - 1, np.int32)])
    out = Guarded((tokens + 9, NUM_HEADS, 512), ref.BF16)
    lse = Guarded((tokens + 9, NUM_HEADS), np.float32)
    layer.forward(q, kv, topk, metadata, out=out.array, lse=lse.array)
    assert (out.check(written=False)[tokens:].view(np.uint16) == 0xFFFF).all()
    assert (lse.check(written=False)[tokens:].view(np.uint32) == 0xFFFFFFFF).all()
    plain = layer.forward(step.q, kv, step.topk_indices, metadata)
    assert_same_bits(out.array[:tokens], plain[0])
    assert_same_bits(lse.array[:tokens], plain[1])
    assert len(layer.forward(q, kv, topk, metadata)[0]) == tokens + 9, "q's number of rows"


def test_a_larger_workspace_is_used_as_far_as_was_asked(results, step):
    """The other rows stay the caller's, and chunks are as long as without those rows."""
    asked, most = cases.ENGINE_WORKSPACE, 2 * cases.ENGINE_WORKSPACE + 300
    options = engine.config(sparse_mla, num_heads=NUM_HEADS, path="separate")
    workspace = Guarded((most, 576), ref.BF16, row_gap=24)
    builder = sparse_mla.MetadataBuilder(options, workspace=workspace.array)
    if not device.ON_CUDA:
        assert builder.workspace_bytes == asked * 1152
    metadata = builder.build(step.batch.common(sparse_mla))
    assert [chunk.chunk_tot_seqlen for chunk in metadata.prefill.chunks] == [367, 390, 303]
    assert max(chunk.chunk_tot_seqlen for chunk in metadata.prefill.chunks) <= asked
    got = sparse_mla.SparseMLA(options).forward(
        step.q, step.fp8_cache, step.topk_indices, metadata, attn_sink=step.attn_sink
    )
    for name, x in zip(("out", "lse"), got, strict=True):
        assert_same_bits(x, results["separate"][0][name], name)
    rows = workspace.check(written=False).view(np.uint16)
    assert (rows[390:] == 0xFFFF).all(), "rows that no chunk needs"
    assert not (rows[:390] == 0xFFFF).all(1).any()


SPLIT_DECODES = {
    # decodes, splits
    "alone": (1, 4),
    "a few": (16, 4),
    "more": (22, 2),
    "many": (33, 1),
}


@pytest.mark.skipif(device.ON_CUDA, reason="a GPU's plan depends on its size")
@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
@pytest.mark.parametrize("name", SPLIT_DECODES)
def test_decodes_are_split_as_planned(name, path):
    """The bits are those of an attention call with that many splits."""
    num_decodes, splits = SPLIT_DECODES[name]
    one = cases.make_batch([1], [900])  # all requests read its pages
    batch = dataclasses.replace(
        one,
        query_start_loc=np.arange(num_decodes + 1, dtype=np.int32),
        seq_lens=np.repeat(one.seq_lens, num_decodes),
        slot_mapping=np.repeat(one.slot_mapping, num_decodes),
        block_table=np.repeat(one.block_table, num_decodes, 0),
        num_actual_tokens=num_decodes,
    )
    made = engine.make_step(batch, 3, topk=1024)
    made.q[..., :512] = 0
    rows = made.fp8_cache.reshape(-1, 656)
    cases.cancel_neighbours(rows)
    made.fp8_cache = rows.reshape(made.fp8_cache.shape)
    kv = made.bf16_cache(sparse_mla) if path == "bf16" else made.fp8_cache
    limits = {"topk_tokens": 1024, "max_num_seqs": 70, "max_model_len": 1024}
    options = engine.config(
        sparse_mla, num_heads=3, fp8=path != "bf16", path=path, **limits,
        prefill_workspace_tokens=1024,
    )  # fmt: skip
    metadata = sparse_mla.MetadataBuilder(options).build(batch.common(sparse_mla))
    if path in ("separate", "direct"):
        assert metadata.decode.num_splits == splits
    got = sparse_mla.SparseMLA(options).forward(made.q, kv, made.topk_indices, metadata)
    slots = sparse_mla.convert_req_index_to_global_index(
        np.arange(num_decodes, dtype=np.int32), batch.block_table, made.topk_indices, block_size=64
    )

    def attend(num_splits: int) -> list[np.ndarray]:
        return sparse_mla.sparse_attention(
            made.q, kv, slots, softmax_scale=engine.SCALE, num_splits=num_splits
        )

    for x, y in zip(got, attend(splits), strict=True):
        assert_same_bits(x, y)
    others = [n for n in (1, 2, 4) if n != splits]
    assert all((got[0] != attend(n)[0]).any() for n in others), "no number of splits shows"


# --- other batches -------------------------------------------------------------------------------

STEPS = {
    # query lengths, sequence lengths, padding tokens, threshold, block size
    "decodes": ([1] * 6, [3, 64, 65, 1, 128, 200], 0, 1, 64),
    "prefills": ([30, 2, 64], [30, 100, 64], 0, 1, 64),
    "spec decode": ([3, 3, 3], [70, 3, 128], 0, 3, 64),
    "spec decode and prefills": ([3, 3, 2, 40], [70, 3, 9, 128], 0, 3, 64),
    "padded decodes": ([1, 1, 0, 0], [9, 70, 0, 0], 2, 1, 64),
    "padding tokens": ([1, 12], [9, 70], 5, 1, 64),
    "page 1": ([1, 12], [9, 70], 0, 1, 1),
    "page 100": ([1, 12], [9, 270], 0, 1, 100),
    "no tokens": ([], [], 0, 1, 64),
}


@pytest.mark.parametrize("path", ["mixed", "separate", "direct"])
@pytest.mark.parametrize("name", STEPS)
def test_steps(name, path):
    query_lens, seq_lens, pad, threshold, block_size = STEPS[name]
    batch = cases.make_batch(query_lens, seq_lens, block_size=block_size, pad_tokens=pad)
    step = engine.make_step(batch, 17)
    options = {"num_heads": 17, "decode_threshold": threshold, "block_size": block_size}
    taken, got = run(step, step.fp8_cache, path=path, **options)
    assert taken == path
    want = step.reference(path, step.fp8_cache, decode_threshold=threshold)
    assert_within_bounds(want, got)


@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_default_paths(num_heads):
    step = engine.make_step(cases.make_batch([1, 1, 20], [50, 9, 70]), num_heads)
    path, got = run(step, step.fp8_cache, num_heads=num_heads, sink=False)
    assert path == ("mixed" if num_heads < 32 else "separate")
    assert_within_bounds(step.reference(path, step.fp8_cache, sink=False), got)


def test_one_metadata_serves_every_layer(step):
    """Two layers with different caches share metadata and workspace."""
    options = engine.config(sparse_mla, num_heads=NUM_HEADS)
    metadata = sparse_mla.MetadataBuilder(options).build(step.batch.common(sparse_mla))
    layers = [engine.make_step(step.batch, NUM_HEADS, seed=seed) for seed in (1, 2)]
    impl = sparse_mla.SparseMLA(options)
    got = [impl.forward(x.q, x.fp8_cache, x.topk_indices, metadata) for x in layers]
    for x, (out, lse) in zip(layers, got, strict=True):
        want = x.reference("separate", x.fp8_cache, sink=False)
        assert_within_bounds(want, {"out": out, "lse": lse})


def test_steps_of_one_builder_do_not_disturb_each_other():
    options = engine.config(sparse_mla, num_heads=NUM_HEADS)
    builder, layer = sparse_mla.MetadataBuilder(options), sparse_mla.SparseMLA(options)
    for seed, lens in enumerate(([1, 1, 30], [5, 40], [1] * 9, [1, 100])):
        batch = cases.make_batch(lens, [n + 30 for n in lens], seed=seed)
        step = engine.make_step(batch, NUM_HEADS, seed=seed)
        metadata = builder.build(batch.common(sparse_mla))
        out, lse = layer.forward(step.q, step.fp8_cache, step.topk_indices, metadata)
        want = step.reference("separate", step.fp8_cache, sink=False)
        assert_within_bounds(want, {"out": out, "lse": lse})


def test_write_build_forward_from_the_raw_tokens():
    """The whole step: cache write by slot_mapping, then attention over what was written."""
    batch = cases.make_batch([40, 25], [40, 25])
    rng = np.random.default_rng(5)
    tokens = cases.make_rows(rng, batch.num_actual_tokens, "bf16")
    step = engine.make_step(batch, 8)
    step.fp8_cache = np.zeros((batch.num_pages, 64, 656), np.uint8)
    sparse_mla.concat_and_cache_mla(
        tokens[:, :512], tokens[:, 512:], step.fp8_cache, batch.slot_mapping
    )
    _, got = run(step, step.fp8_cache, num_heads=8, sink=False)
    expected = np.zeros_like(step.fp8_cache)
    ref.concat_and_cache_mla(tokens[:, :512], tokens[:, 512:], expected, batch.slot_mapping)
    assert_within_bounds(step.reference("mixed", expected, sink=False), got)


# --- layer weights and errors --------------------------------------------------------------------


def test_layer_projections():
    rng = np.random.default_rng(6)
    weight = cases.random_bf16(rng, 512, 8 * 256, std=0.05)
    options = engine.config(sparse_mla, num_heads=8)
    layer = sparse_mla.SparseMLA(options, kv_b_proj=weight)
    w_uk, w_uv = ref.split_kv_b_proj(weight, num_heads=8, qk_nope_head_dim=128, v_head_dim=128)
    assert_same_bits(np.asarray(layer.W_UK), np.ascontiguousarray(w_uk))
    assert_same_bits(np.asarray(layer.W_UV), np.ascontiguousarray(w_uv))
    q_nope, x = cases.random_bf16(rng, 3, 8, 128), cases.random_bf16(rng, 3, 8, 512)
    want, tolerance = ref.k_up_proj(q_nope, w_uk)
    assert ref.worst_ratio(layer.k_up_proj(q_nope), want, tolerance) <= 1
    want, tolerance = ref.v_up_proj(x, w_uv)
    assert ref.worst_ratio(layer.v_up_proj(x), want, tolerance) <= 1


def test_layer_without_weights_has_no_projections():
    layer = sparse_mla.SparseMLA(engine.config(sparse_mla, num_heads=8))
    with pytest.raises((ValueError, RuntimeError), match=r"kv_b_proj"):
        layer.k_up_proj(np.zeros((1, 8, 128), ref.BF16))


def bad_forward(name, step):
    """Returns (error, name in the text, arguments of forward), of which one is wrong."""
    q, kv, topk = step.q, step.fp8_cache, step.topk_indices
    other = step.bf16_cache(sparse_mla)
    table = {
        "cache of another format": (TypeError, "kv_cache", (q, other, topk)),
        "another page size": (ValueError, "kv_cache", (q, kv[:, :32], topk)),
        "heads": (ValueError, "q", (q[:, :5], kv, topk)),
        "too few q rows": (ValueError, "q", (q[:-1], kv, topk)),
        "too few topk rows": (ValueError, "topk_indices", (q, kv, topk[:-1])),
        "topk dtype": (TypeError, "topk_indices", (q, kv, topk.astype(np.int64))),
        "q dtype": (TypeError, "q", (q.astype(np.float32), kv, topk)),
    }
    return table[name]


BAD_FORWARDS = [
    "cache of another format",
    "another page size",
    "heads",
    "too few q rows",
    "too few topk rows",
    "topk dtype",
    "q dtype",
]


@pytest.mark.parametrize("path", ["mixed", "separate", "direct"])
@pytest.mark.parametrize("name", BAD_FORWARDS)
def test_bad_arguments_write_nothing(step, name, path):
    error, argument, arguments = bad_forward(name, step)
    options = engine.config(sparse_mla, num_heads=NUM_HEADS, path=path)
    metadata = sparse_mla.MetadataBuilder(options).build(step.batch.common(sparse_mla))
    layer = sparse_mla.SparseMLA(options)
    out = Guarded((len(step.q), NUM_HEADS, 512), ref.BF16)
    before = out.storage.copy()
    with pytest.raises(error, match=f"^forward: `{argument}` must .*, got"):
        layer.forward(*arguments, metadata, out=out.array)
    assert_same_bits(out.storage, before, "nothing may be written")
    layer.forward(step.q, step.fp8_cache, step.topk_indices, metadata, out=out.array)
    out.check()


@pytest.mark.parametrize("where", ["workspace", "block_table"])
def test_arrays_that_the_builder_keeps_are_not_the_caller_s_to_reuse(step, where):
    """q overlaps the workspace into which prefills are gathered, or out the block table."""
    tokens, table = step.batch.num_actual_tokens, step.batch.common(sparse_mla).block_table
    workspace = np.zeros((cases.ENGINE_WORKSPACE, 576), ref.BF16)
    space = np.zeros(max(tokens * NUM_HEADS * 512 * 2, table.nbytes), np.uint8)
    out = space[: tokens * NUM_HEADS * 512 * 2].view(ref.BF16).reshape(tokens, NUM_HEADS, 512)
    q = step.q
    common = step.batch.common(sparse_mla)
    if where == "workspace":
        heads = NUM_HEADS * tokens
        big = np.zeros((cases.ENGINE_WORKSPACE + heads, 576), ref.BF16)
        workspace = big[: cases.ENGINE_WORKSPACE]
        q = big[cases.ENGINE_WORKSPACE - 1 :][:heads].reshape(tokens, NUM_HEADS, 576)
        q[:] = step.q
    else:
        common.block_table = space[: table.nbytes].view(np.int32).reshape(table.shape)
        common.block_table[:] = table
    options = engine.config(sparse_mla, num_heads=NUM_HEADS, path="separate")
    metadata = sparse_mla.MetadataBuilder(options, workspace=workspace).build(common)
    before = space.copy()
    with pytest.raises(ValueError, match=rf"`{where}`.*overlap|overlap `{where}`"):
        sparse_mla.SparseMLA(options).forward(
            q, step.fp8_cache, step.topk_indices, metadata, out=out
        )
    assert (space == before).all()
