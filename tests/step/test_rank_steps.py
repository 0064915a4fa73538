"""Layers with `Config.cp`: every rank has a cache, tables and slots of its own tokens alone, writes
and reads no other, and the merged parts are the result of one device with the whole cache."""

from __future__ import annotations

import copy
import dataclasses

import cases
import device
import engine
import numpy as np
import pytest
import reference as ref
import reference_v4
import v4_attend_cases
import v4_world
from dense_cases import owner
from dense_steps import Case, count_merges
from helpers import assert_same_bits, assert_within_bounds
from library import sparse_mla
from rank_steps import draw_len, draw_ranks, take_share

import sparse_mla as package

dense = package.dense


def merge(parts, **options):
    outs, lses = (list(x) for x in zip(*parts, strict=True))
    out, lse = sparse_mla.merge_attn_partials(outs, lses, **options)
    return np.asarray(out), np.asarray(lse)


# --- dense layers --------------------------------------------------------------------------------


def run_rank(case: Case, cp, **config):
    """One rank's layer, and that its cache then has its new tokens and nothing else."""
    share = copy.copy(case)
    share.batch, share.cache = take_share(case.batch, case.cache, cp, case.seed)
    lse = np.full((len(case.q), case.heads), np.nan, np.float32)
    out = share.run(cp=cp, lse=lse, **config)
    want = share.cache.copy()
    k_pe = case.turned()[1]
    package.concat_and_cache_mla(
        *(case.kv_c, k_pe, want, share.batch.slot_mapping),
        kv_scale=case.kv_scale,
        kv_cache_dtype=case.fmt,
    )
    assert_same_bits(share.written, want, f"the cache of rank {cp[0]}")
    empty = np.isneginf(lse)
    assert not ref.to_f32(out)[empty].any(), "rows without a key"
    assert np.isfinite(lse[~empty]).all()
    return share, (out, lse)


def run_ranks(case: Case, ranks: int, interleave: int, **config):
    """The merged parts of all ranks within the bounds of the whole; -> the ranks, their parts."""
    runs = [run_rank(case, (rank, ranks, interleave), **config) for rank in range(ranks)]
    shares, parts = zip(*runs, strict=True)
    paths = {share.metadata.path for share in shares}
    assert len(paths) == 1, "ranks on several paths count tokens twice"
    out, lse = merge(parts)
    want = case.exact(max(map(count_merges, shares)), *paths, ranks)
    count = sum(case.query_lens)
    want.check(out[:count])
    want.check_lse(lse[:count])
    assert not ref.to_f32(out[count:]).any()
    assert np.isneginf(lse[count:]).all()
    return shares, parts


FORMATS = ("bfloat16", "bfloat16", "fp8_ds_mla", "fp8_token", "fp8_e4m3")


def draw(seed: int) -> tuple[Case, int, int, dict]:
    rng = np.random.default_rng([11, seed])
    ranks, interleave = draw_ranks(rng)
    threshold = int(rng.choice([1, 3]))
    decodes, prefills = int(rng.integers(0, 4)), int(rng.integers(0, 4))
    query_lens = [int(n) for n in rng.integers(1, threshold + 1, decodes)]
    query_lens += [int(n) for n in rng.integers(threshold + 1, 20, prefills)]
    if not query_lens or rng.random() < 0.3:
        query_lens.insert(int(rng.integers(0, len(query_lens) + 1)), 0)
    if sum(query_lens) == 0:
        query_lens.append(1)
    lens = [draw_len(rng, ranks, interleave, n) for n in query_lens]
    page = int(rng.choice([1, 16, 64]))
    rope = int(rng.choice([64, 64, 0]))
    case = Case(
        query_lens,
        [n - q for n, q in zip(lens, query_lens, strict=True)],
        heads=int(rng.choice([1, 5])),
        page=page,
        fmt=str(rng.choice(FORMATS if rope else ("bfloat16", "fp8_nope"))),
        padding=int(rng.choice([0, 0, 3])),
        seed=seed,
        rope=rope,
        threshold=threshold,
    )
    path = [None, "separate", "separate", "mixed"][rng.integers(4)]
    config = {"path": path, "context_plan": str(rng.choice(["equal", "packed"]))}
    if path != "mixed" and rng.random() < 0.7:
        config["prefill_workspace_tokens"] = page * len(query_lens) + int(rng.integers(0, 90))
    return case, ranks, interleave, config | {"bound": seed % 3 if path else 0}


@pytest.mark.parametrize("first", range(0, 300, 10))
def test_random_worlds_of_dense_layers(first):
    """1 to 8 ranks, interleaves of 1 to 64, lengths at borders, drafts, idle requests, padding."""
    for seed in range(first, first + 10):
        case, ranks, interleave, config = draw(seed)
        try:
            run_ranks(case, ranks, interleave, **config)
        except Exception as error:
            what = f"seed {seed}, cp (., {ranks}, {interleave}), {config}"
            raise AssertionError(f"{error}\n{what}") from error


@pytest.mark.parametrize("path", ["separate", "mixed", None])
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_ds_mla"])
def test_one_rank_has_the_bits_of_no_share(path, fmt):
    case = Case([1, 1, 7, 2, 30], [50, 0, 200, 0, 33], fmt=fmt, padding=2)
    lse = np.full((len(case.q), case.heads), np.nan, np.float32)
    want = case.run(path=path, lse=lse)
    for interleave in (1, 9, 1000):
        got, got_lse = run_rank(case, (0, 1, interleave), path=path)[1]
        assert_same_bits(got, want, f"out, interleave {interleave}")
        assert_same_bits(got_lse, lse, f"lse, interleave {interleave}")


def test_ranks_without_a_key():
    """Runs of 64 tokens: all but the first rank have no key of any request."""
    case = Case([1, 9], [40, 20], padding=1)
    for path in ("mixed", "separate"):
        _, parts = run_ranks(case, 4, 64, path=path)
        for out, lse in parts[1:]:
            assert not ref.to_f32(out).any()
            assert np.isneginf(lse).all()
        out, lse = merge(parts)
        assert_same_bits(out, parts[0][0], "out")
        assert_same_bits(lse, parts[0][1], "lse")


def test_new_tokens_of_prefills_are_the_first_rank_s():
    """Whoever caches them: on path "separate" another rank has their context alone."""
    case = Case([20], [0])
    shares, parts = run_ranks(case, 2, 4)
    assert np.isfinite(parts[0][1]).all()
    assert np.isneginf(parts[1][1]).all()
    assert (shares[1].batch.slot_mapping >= 0).sum() == 8, "it caches its own all the same"
    case = Case([20], [40])
    shares, parts = run_ranks(case, 2, 16, prefill_workspace_tokens=16)
    assert [device.host(s.metadata.prefill.context_lens).tolist() for s in shares] == [[24], [16]]
    assert [count_merges(s) for s in shares] == [2, 1]
    assert np.isfinite(parts[1][1]).all()


def test_a_long_chunked_context():
    """Many chunks on each rank, and of some requests none."""
    case = Case([4, 5, 6], [700, 3, 65], page=16, heads=2)
    for plan in ("equal", "packed"):
        shares, _ = run_ranks(case, 3, 8, context_plan=plan, prefill_workspace_tokens=48)
        assert max(map(count_merges, shares)) >= 5


def test_layers_of_ranks_return_lse():
    """Without being asked: a part without its lse is of no use."""
    case = Case([1, 3], [4, 0], threshold=3)
    config = case.config(cp=(1, 2, 4))
    layer = dense.DenseMLA(config, kv_b_proj=case.weight, rope_table=case.table)
    assert layer.forward(case.q, case.kv_c, case.k_pe, case.cache, None) == (None, None)
    config = dataclasses.replace(config, device="cpu")
    batch, cache = take_share(case.batch, case.cache, (1, 2, 4))
    metadata = dense.MetadataBuilder(config).build(batch.common(package))
    out, lse = layer.forward(case.q, case.kv_c, case.k_pe, cache, metadata)
    assert (out.shape, lse.shape) == ((4, 5, case.values), (4, 5))


def test_a_builder_of_a_rank_is_used_again():
    """Metadata of one builder, step after step, has nothing of the steps before."""
    cp = 1, 3, 5
    step = [Case([2, 8], [60, 41], seed=s, threshold=2) for s in range(3)]
    step.append(Case([2, 8], [1, 0], seed=3, threshold=2))
    builder = dense.MetadataBuilder(
        step[0].config(cp=cp, max_model_len=80, prefill_workspace_tokens=32)
    )
    for case in (*step, *step[::-1]):
        config = {"max_model_len": 80, "prefill_workspace_tokens": 32}
        again = run_rank(case, cp, builder=builder, **config)[1]
        for name, x, y in zip(("out", "lse"), again, run_rank(case, cp, **config)[1], strict=True):
            assert_same_bits(x, y, name)


# --- DeepSeek-V3.2 -------------------------------------------------------------------------------


def attend(step, kv, cp, **config):
    """A layer of V3.2; its part, and the metadata."""
    options = engine.config(sparse_mla, fp8=ref.is_fp8(kv), cp=cp, **config)
    if cp is not None:
        batch, kv = take_share(step.batch, kv, cp)
        step = dataclasses.replace(step, batch=batch)
    metadata = sparse_mla.MetadataBuilder(options).build(step.batch.common(sparse_mla))
    out, lse = sparse_mla.SparseMLA(options).forward(step.q, kv, step.topk_indices, metadata)
    return metadata, (np.asarray(out), np.asarray(lse))


def draw_step(seed: int):
    rng = np.random.default_rng([12, seed])
    ranks, interleave = draw_ranks(rng)
    threshold = int(rng.choice([1, 3]))
    query_lens = [threshold] * int(rng.integers(0, 4))
    query_lens += [int(n) for n in rng.integers(threshold + 1, 20, rng.integers(0, 4))]
    query_lens = query_lens or [1]
    if rng.random() < 0.3:
        query_lens.insert(int(rng.integers(0, len(query_lens) + 1)), 0)
    batch = cases.make_batch(
        query_lens,
        [draw_len(rng, ranks, interleave, n) for n in query_lens],
        block_size=int(rng.choice([1, 16, 64])),
        pad_tokens=int(rng.choice([0, 0, 3])),
        seed=seed,
    )
    step = engine.make_step(batch, heads := int(rng.choice([2, 17])), seed=seed)
    path = str(rng.choice(["mixed", "separate", "direct", "bf16"]))
    config = {"path": path, "block_size": batch.block_size, "decode_threshold": threshold}
    return step, ranks, interleave, config | {"num_heads": heads}


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_worlds_of_sparse_layers(first):
    for seed in range(first, first + 20):
        step, ranks, interleave, config = draw_step(seed)
        kv = step.bf16_cache(sparse_mla) if config["path"] == "bf16" else step.fp8_cache
        what = f"seed {seed}, cp (., {ranks}, {interleave}), {config}"
        parts = []
        for rank in range(ranks):
            metadata, part = attend(step, kv, (rank, ranks, interleave), **config)
            assert metadata.path == config["path"]
            empty = np.isneginf(part[1])
            assert not ref.to_f32(part[0])[empty].any(), what
            parts.append(part)
        out, lse = merge(parts, attn_sink=step.attn_sink)
        want = step.reference("bf16" if config["path"] == "bf16" else "mixed", kv)
        gathered = config["path"] == "separate"
        try:
            assert_within_bounds(want, {"out": out, "lse": lse}, gathered=gathered, merges=1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{what}") from error


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_one_rank_of_a_sparse_layer_has_the_bits_of_no_share(path):
    step = engine.make_step(engine.engine_batch(pad_tokens=2), 17)
    kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
    want = attend(step, kv, None, path=path, num_heads=17)[1]
    for interleave in (1, 100):
        got = attend(step, kv, (0, 1, interleave), path=path, num_heads=17)[1]
        for name, x, y in zip(("out", "lse"), got, want, strict=True):
            assert_same_bits(x, y, name)


def test_gathers_have_the_rank_s_rows():
    """Chunks follow the rank's own rows, of which a request may have none."""
    step = engine.make_step(cases.make_batch([3, 5, 9], [64, 130, 9]), 4)
    parts = []
    for rank, own in enumerate(([64, 64, 9], [0, 64, 0], [0, 2, 0], [0, 0, 0])):
        options = {"path": "separate", "prefill_workspace_tokens": 130, "num_heads": 4}
        metadata, part = attend(step, step.fp8_cache, (rank, 4, 64), **options)
        parts.append(part)
        assert device.host(metadata.prefill.seq_lens).tolist() == own
        rows = [chunk.chunk_tot_seqlen for chunk in metadata.prefill.chunks]
        assert rows == ([128, 9] if rank == 0 else [sum(own)])
    assert np.isneginf(parts[3][1]).all()
    out, lse = merge(parts, attn_sink=step.attn_sink)
    want = step.reference("mixed", step.fp8_cache)
    assert_within_bounds(want, {"out": out, "lse": lse}, gathered=True, merges=1)


# --- DeepSeek V4 ---------------------------------------------------------------------------------

v4 = sparse_mla.v4


def run_v4(case, ranks: int, interleave: int) -> list:
    """The parts of all ranks, whose merge is the whole within its bounds."""
    parts = []
    for rank in range(ranks):
        got = v4_attend_cases.take_share(case, (rank, ranks, interleave)).run()
        got = [np.asarray(device.host(got[n]))[: case.batch.num_tokens] for n in ("out", "lse")]
        assert not ref.to_f32(got[0])[np.isneginf(got[1])].any(), "rows without a key"
        parts.append(got)
    out, lse = merge(parts, attn_sink=case.sink if ranks > 1 else None)
    assert_within_bounds(case.reference(), {"out": out, "lse": lse}, merges=1)
    return parts


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_worlds_of_v4_layers(first):
    """1 to 8 ranks; each has its own compressed rows, and rank 0 the window."""
    for seed in range(first, first + 10):
        rng = np.random.default_rng([13, seed])
        ranks, interleave = int(rng.integers(1, 9)), int(rng.integers(1, 9))
        ratio = int(rng.choice([1, 4, 4, 16]))
        lens = [int(n) for n in rng.integers(1, 3, rng.integers(0, 4))]
        lens += [int(n) for n in rng.integers(3, 15, rng.integers(0, 4))]
        lens = lens or [2]
        contexts = [int(n) for n in rng.integers(0, 180, len(lens))]
        formats = v4_attend_cases.FORMAT_PAIRS[seed % 6]
        path = [None, "direct"][seed % 2]
        case = v4_attend_cases.make_case(ratio, path, lens, contexts, formats=formats, seed=seed)
        try:
            run_v4(case, ranks, interleave)
        except Exception as error:
            raise AssertionError(f"{error}\nseed {seed}, cp (., {ranks}, {interleave})") from error


@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_the_window_is_the_first_rank_s(ratio):
    case = v4_attend_cases.make_case(ratio, None, (1, 9), (60, 30), padding=0)
    parts = run_v4(case, 3, 1)
    assert np.isfinite(parts[0][1]).all()
    assert np.isneginf(parts[2][1]).all() == (ratio == 1)
    one = v4_attend_cases.take_share(case, (0, 1, 7)).run()
    for name, x in case.run().items():
        assert_same_bits(device.host(one[name]), device.host(x), name)


@pytest.mark.parametrize("cp", [(0, 2, 1), (1, 2, 3), (4, 5, 2), (0, 1, 4)])
def test_lists_of_compressed_rows_are_the_rank_s(cp):
    """Every array of the step: own rows are numbered from 0, the window is whole."""
    sizes = reference_v4.Sizes(decode_threshold=2)
    rng = np.random.default_rng(cp)
    for _ in range(20):
        batch = reference_v4.random_batch(rng, sizes)
        configs = [v4.Config(2, device=device.NAME, cp=c, **sizes.options()) for c in (None, cp)]
        whole, got = (
            v4.MetadataBuilder(config).build(
                batch.common(sparse_mla), compressed=batch.compressed, states=batch.states
            )
            for config in configs
        )
        for name in ("positions", "is_valid", "swa_indices", "swa_lens", "req_id_per_token"):
            assert_same_bits(device.host(getattr(got, name)), device.host(getattr(whole, name)))
        for ratio in sizes.ratios:
            check_lists(sizes, batch, ratio, cp, whole.layers[ratio], got.layers[ratio])


def check_lists(sizes, batch, ratio, cp, whole, got) -> None:
    table, rows = batch.compressed[ratio], sizes.block_size // ratio
    states = device.host(whole.state_slot_mapping)
    assert_same_bits(device.host(got.state_slot_mapping), states)
    seen = device.host(whole.context_lens)
    count = np.array([sum(owner(y, cp)[0] == cp[0] for y in range(n)) for n in seen], np.int32)
    assert device.host(got.context_lens).tolist() == count.tolist()
    slots, decodes = device.host(got.slot_mapping), reference_v4.split(sizes, batch)[2]
    for t, (b, p) in enumerate(batch.tokens()):
        ends = batch.is_valid(t) and (p + 1) % ratio == 0
        rank, local = owner(p // ratio, cp)
        own = ends and rank == cp[0]
        assert slots[t] == (reference_v4.slot(table[b], local, rows) if own else -1)
        if ratio == 4:
            continue
        numbers = range(count[t])
        if t < decodes:
            row = device.host(got.decode_indices)[t]
            want = [reference_v4.slot(table[b], y, rows) for y in numbers]
            assert device.host(got.decode_lens)[t] == count[t]
        else:
            row, want = device.host(got.prefill_indices)[t - decodes], [*numbers]
        assert row.tolist() == want + [-1] * (len(row) - len(want))


# --- what is refused -----------------------------------------------------------------------------

LIMITS = {"softmax_scale": 0.1, "max_num_seqs": 2, "max_num_batched_tokens": 8}
LIMITS |= {"max_model_len": 64}
CONFIGS = [package.Config, dense.Config, package.v4.Config]


@pytest.mark.parametrize("config", CONFIGS)
def test_bad_shares(config):
    rule = r"must be \(rank, ranks, interleave\) with 0 <= rank < ranks and interleave >= 1, got "
    for bad in ((2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 2, 0), (0, 2**31, 1), (0, 1), ()):
        with pytest.raises(ValueError, match=rf"^Config: `cp` {rule}\({str(bad)[1:-1]}\)$"):
            config(2, cp=bad, **LIMITS)
    with pytest.raises(TypeError, match=r"^Config: `cp` must be a tuple of 3 ints, got int$"):
        config(2, cp=3, **LIMITS)
    with pytest.raises(TypeError, match=r"^Config: `cp` must be an int, got float$"):
        config(2, cp=(0, 2, 1.0), **LIMITS)
    assert config(2, cp=[np.int64(1), 2, 4], **LIMITS).cp == (1, 2, 4)
    assert config(2, **LIMITS).cp is None


def test_tables_need_columns_of_own_tokens_alone():
    case = Case([1, 9], [40, 60], page=4)
    batch, _ = take_share(case.batch, case.cache, (0, 2, 8))
    config = {"cp": (0, 2, 8), "device": "cpu", "block_size": 4}
    narrow = dataclasses.replace(batch, block_table=batch.block_table[:, :9])
    fit = dataclasses.replace(batch, block_table=batch.block_table[:, :10])
    options = {"topk_tokens": 8, "num_heads": 2, "path": "mixed"} | config
    for builder in (
        dense.MetadataBuilder(case.config(**config)),
        package.MetadataBuilder(engine.config(package, **options)),
    ):
        builder.build(fit.common(package))
        text = "`block_table` must have at least 10 columns for the 37 tokens of request 1, got 9$"
        with pytest.raises(ValueError, match=f"^MetadataBuilder.build: {text}"):
            builder.build(narrow.common(package))


def test_absorbed_weights_are_refused():
    """They give sums over heads, which no merge can weigh."""
    case = Case([2], [0])
    config = case.config(cp=(1, 2, 4), device="cpu")
    weights = {"q_proj": np.ones((64, 5 * 96), ref.BF16), "o_proj": np.ones((5 * 48, 8), ref.BF16)}
    weights |= {"kv_b_proj": case.weight, "absorb": True}
    text = r"`absorb` must be False with `cp` of several ranks, because W_UV_O adds up heads before"
    with pytest.raises(ValueError, match=rf"^DenseMLA: {text} ranks are merged, got True with \("):
        dense.DenseMLA(config, **weights)
    dense.DenseMLA(dataclasses.replace(config, cp=(0, 1, 4)), **weights)
    layer = dense.DenseMLA(dataclasses.replace(config, cp=None), **weights)
    batch, cache = take_share(case.batch, case.cache, config.cp)
    metadata = dense.MetadataBuilder(config).build(batch.common(package))
    text = (
        r"`builder` must be of one rank for absorbed weights, because W_UV_O adds up heads before"
    )
    with pytest.raises(
        ValueError, match=rf"^dense.forward: {text} ranks are merged, got `cp` of 2"
    ):
        layer.forward(np.ones((2, 64), ref.BF16), case.kv_c, case.k_pe, cache, metadata)


def test_sinks_are_the_merge_s():
    step = engine.make_step(cases.make_batch([1], [9]), 2)
    batch, kv = take_share(step.batch, step.fp8_cache, (0, 2, 4))
    options = engine.config(sparse_mla, num_heads=2, cp=(0, 2, 4))
    metadata = sparse_mla.MetadataBuilder(options).build(batch.common(sparse_mla))
    text = r"`attn_sink` must be given to the merge of ranks \(merge_attn_partials\) with `cp`, "
    with pytest.raises(ValueError, match=f"^forward: {text}because each rank would count it, got"):
        sparse_mla.SparseMLA(options).forward(
            *(step.q, kv, step.topk_indices, metadata), attn_sink=step.attn_sink
        )


def test_what_several_ranks_of_v4_refuse():
    case = v4_attend_cases.make_case(4, None, (1,), (60,))
    share = v4_attend_cases.take_share(case, (1, 2, 4))
    text = r"`path` must be 'direct' or None with `cp` of several ranks, whose prefills read the "
    with pytest.raises(ValueError, match=rf"^Config: {text}caches, got 'separate'$"):
        dataclasses.replace(share.config, path="separate")
    bare, sinks = share.layer, v4.Weights(None, None, case.sink, None, None)
    share.layer = v4.SparseMLA(share.config, 4, sinks)
    with pytest.raises(
        ValueError, match=r"^attend: `attn_sink` must be given to the merge of ranks"
    ):
        share.run()
    share.layer = bare
    tokens = case.batch.num_tokens
    given = {"slots": np.zeros((tokens, 3), np.int32), "lens": np.ones(tokens, np.int32)}
    text = r"^attend: `slots` must be left out with `cp` of several ranks: give the `topk_indices`"
    with pytest.raises(ValueError, match=text):
        share.run(**given)
    weights = v4_world.World(package, 4, (9,))
    config = dataclasses.replace(weights.config, cp=(0, 2, 1))
    layer = package.v4.SparseMLA(config, 4, weights.layer.weights, weights.projections)
    text = (
        r"^SparseMLA.forward: `cp` must be of one rank, because ranks are merged between attention"
    )
    with pytest.raises(ValueError, match=text):
        layer.forward(weights.hidden[0], weights.caches, None)
