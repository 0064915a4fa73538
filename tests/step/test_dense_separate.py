"""sparse_mla.dense on path "separate": prefills as multi-head attention to up-projected latents,
their cached context in chunks. Compared with fp64 of the whole, within the bounds of its roundings.
"""

from __future__ import annotations

import dataclasses

import device
import numpy as np
import pytest
import reference as ref
from dense_steps import ARRAYS, Case, count_merges, draw, travel, wide
from helpers import NO_NAN, Guarded, assert_same_bits

import sparse_mla as package

dense = package.dense


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 104, 8))
def test_random_batches(first):
    """Both plans with small workspaces, from a page up, and one chunk for all, against fp64; and
    requests without context have the bits that they have alone."""
    for seed in range(first, first + 8):
        case = draw(seed)
        rng = np.random.default_rng([10, seed])
        prefills = [c for n, c in zip(case.query_lens, case.contexts, strict=True) if n > 1]
        sharing = max(sum(c > 0 for c in prefills), 1)
        more = int(rng.choice([0, 1, case.page, 3 * case.page + 2, 40]))
        least = {"equal": sharing * case.page, "packed": case.page}
        results = []
        for plan, tokens in least.items():
            options = {"context_plan": plan, "prefill_workspace_tokens": tokens + more}
            got = case.run(pair=seed % 2 == 1, bound=seed % 3, **options)
            assert case.metadata.path == "separate"
            case.exact(count_merges(case)).check(got[: sum(case.query_lens)])
            results.append(got)
        whole = case.run(prefill_workspace_tokens=8 * 384)
        assert count_merges(case) == (max(prefills) > 0)
        case.exact(1).check(whole[: sum(case.query_lens)])
        for r, (n, c) in enumerate(zip(case.query_lens, case.contexts, strict=True)):
            if n > 1 and c == 0:
                start = int(case.batch.query_start_loc[r])
                alone = case.alone(r)
                for got in (*results, whole):
                    assert_same_bits(got[start : start + n], alone, f"request {r} of batch {seed}")


@pytest.mark.parametrize("plan", ["equal", "packed"])
@pytest.mark.parametrize("page", [1, 16])
def test_many_prompts_in_small_chunks(plan, page):
    """256 prompts, a page of each per chunk at most: nearly all have no key left in later chunks of
    plan "equal", and nothing becomes NaN."""
    rng = np.random.default_rng(3)
    contexts = [int(c) for c in rng.integers(0, 3, 256) * rng.integers(0, 3 * page, 256)]
    contexts[100] = 9 * page + 3
    case = Case([2] * 256, contexts, heads=1, page=page, nope=16, values=8)
    rows = page * (sum(c > 0 for c in contexts) if plan == "equal" else 20)
    got = case.run(context_plan=plan, prefill_workspace_tokens=rows)
    if plan == "equal":
        assert max(case.metadata.context_chunk_max_seq_lens) == page
        assert count_merges(case) >= 10
    assert count_merges(case) >= 5
    case.exact(count_merges(case)).check(got)


@pytest.mark.parametrize("plan", ["equal", "packed"])
def test_256_prompts_at_all_stages(plan):
    """Prompts of 2415 tokens, with contexts of every length up to 2413, in chunks of 128 tokens of
    each: later chunks have no key left of more and more of them. On a CPU an eighth of that."""
    tokens, chunk = (2415, 128) if device.ON_CUDA else (302, 16)
    contexts = np.linspace(0, tokens - 2, 256).astype(int).tolist()
    case = Case([2] * 256, contexts, heads=1, page=16, nope=16, values=8)
    got = case.run(context_plan=plan, prefill_workspace_tokens=255 * chunk)
    if plan == "equal":
        assert len(case.metadata.context_chunk_seq_tot) == -(-(tokens - 2) // chunk) == 19
        assert max(case.metadata.context_chunk_max_seq_lens) == chunk
        left = (device.host(case.metadata.context_chunk_seq_lens) > 0).sum(1)
        assert left[0] >= 254 > 15 >= left[-1] > 0
    case.exact(count_merges(case)).check(got)


@pytest.mark.parametrize("page", [1, 16, 64])
def test_both_paths_agree(page):
    """Within the sum of their bounds. A bf16 cache has the same new tokens on both."""
    case = Case([1, 1, 7, 2, 30], [50, 0, 200, 0, 33], page=page, seed=page)
    paths = "separate", "mixed"
    results = [wide(case.run(path=path, prefill_workspace_tokens=3 * 64)) for path in paths]
    exact = [case.exact(4, path) for path in paths]
    assert (results[0] != results[1]).any(), "the paths are one"
    assert (np.abs(results[0] - results[1]) <= exact[0].bound + exact[1].bound).all()
    for result, want in zip(results, exact, strict=True):
        want.check(result)


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_nope"])
@pytest.mark.parametrize("path", ["separate", "mixed"])
@pytest.mark.parametrize("plan", ["equal", "packed"])
def test_models_without_rope(fmt, path, plan):
    """Keys are the 512 values of a latent, and a query is one array."""
    case = Case([1, 1, 7, 2, 30], [50, 0, 200, 0, 33], rope=0, padding=1, fmt=fmt)
    got = case.run(path=path, context_plan=plan, prefill_workspace_tokens=64)
    assert case.metadata.head_dim == 512
    case.exact(count_merges(case), path).check(got[:41])
    if path == "separate":
        assert count_merges(case) == {"equal": 7, "packed": 5}[plan]
        assert tuple(case.metadata.chunked_prefill_workspace.shape) == (64, 512)


def test_what_models_without_rope_refuse():
    case = Case([2], [0], rope=0)
    metadata = dense.MetadataBuilder(dataclasses.replace(case.config(), device="cpu")).build(
        case.batch.common(package)
    )
    layer = dense.DenseMLA(case.config(), kv_b_proj=case.weight)
    pair, wide_rows = (case.q, np.zeros((2, 5, 0), ref.BF16)), np.zeros((3, 16, 576), ref.BF16)
    for changes, name in (
        ({"q": pair}, "q"),
        ({"k_pe": np.zeros((2, 64), ref.BF16)}, "k_pe"),
        ({"kv_cache": wide_rows}, "kv_cache"),
    ):
        arrays = {"q": case.q, "kv_c": case.kv_c, "k_pe": None, "kv_cache": case.cache} | changes
        with pytest.raises(ValueError, match=rf"^dense\.forward: `{name}` must"):
            layer.forward(**arrays, metadata=metadata)
    layer.rope_table = package.rope_table(9)
    with pytest.raises(ValueError, match=r"^dense\.forward: `rope_table` must be left out"):
        layer.forward(case.q, case.kv_c, None, case.cache, metadata)


def test_new_tokens_are_not_quantised():
    """On an FP8 cache a prefill without context is that on a bf16 cache, bit for bit."""
    results = [Case([9], [0], fmt=fmt).run() for fmt in ("bfloat16", "fp8_ds_mla")]
    assert_same_bits(*results)
    mixed = Case([9], [0], fmt="fp8_ds_mla").run(path="mixed")
    assert np.abs(wide(mixed) - wide(results[0])).max() > 0


def test_decodes_have_the_bits_of_path_mixed():
    case = Case([1, 1, 1], [40, 0, 299], padding=2)
    assert_same_bits(case.run(), case.run(path="mixed"))


# --- memory --------------------------------------------------------------------------------------


def test_given_workspaces_are_all_that_is_written():
    """Rows past a chunk, and past the step's tokens, stay as they were."""
    case = Case([1, 5, 8], [30, 100, 7], page=16)
    want = case.run(prefill_workspace_tokens=48)
    trip = travel()
    memory = [Guarded((n, m), ref.BF16, poison=NO_NAN) for n, m in ((60, 576), (64, 5 * 80))]
    config = case.config(prefill_workspace_tokens=48)
    given = [trip.put(x.array) for x in memory]
    builder = dense.MetadataBuilder(config, workspace=given[0], up_workspace=given[1])
    own = dense.MetadataBuilder(config)
    assert builder.workspace_bytes == own.workspace_bytes
    assert_same_bits(case.run(builder=builder, pair=True, prefill_workspace_tokens=48), want)
    trip.fetch()
    rows, up = (np.asarray(x.check(written=False)).view(np.uint8) for x in memory)
    written = [len(x) - int((x == NO_NAN).all(1)[::-1].argmin()) for x in (rows, up)]
    largest = max(case.metadata.context_chunk_seq_tot)
    assert written == [largest, max(largest, 13)]


def test_workspace_bytes():
    """All memory of a step: a row more of the workspace adds what it takes, and no more."""
    case = Case([4, 4], [9, 0], page=1)
    sizes = [
        dense.MetadataBuilder(case.config(prefill_workspace_tokens=n)).workspace_bytes
        for n in (999, 1000)
    ]
    assert sizes[1] - sizes[0] == 2 * (576 + 5 * 80)
    mixed = dense.MetadataBuilder(case.config(path="mixed")).workspace_bytes
    assert sizes[0] - mixed >= 2 * 999 * (576 + 5 * 80) + 2 * 8 * 5 * (2 * 48 + 4)
    assert mixed >= 8 * 5 * 2 * 2 * 512
    default = dense.MetadataBuilder(case.config()).workspace_bytes
    tokens = package.get_context_workspace_size(15, 2, 1)
    assert default - sizes[0] == 2 * (tokens - 999) * (576 + 5 * 80)


# --- metadata ------------------------------------------------------------------------------------


def build(case: Case, **changes):
    case.run(**changes)
    return case.metadata


def test_chunks_of_the_equal_plan():
    m = build(
        Case([1, 5, 3, 2], [6, 0, 10, 300], page=64),
        prefill_workspace_tokens=256,
        decode_threshold=1,
    )
    assert m.has_context
    lens = [[0, 10, 128], [0, 0, 128], [0, 0, 44]]
    assert device.host(m.context_chunk_seq_lens).tolist() == lens
    assert device.host(m.context_chunk_starts).tolist() == [[0] * 3, [128] * 3, [256] * 3]
    running = [[0, 0, 10, 138], [0, 0, 0, 128], [0, 0, 0, 44]]
    assert device.host(m.context_chunk_cu_seq_lens).tolist() == running
    assert m.context_chunk_seq_tot == [138, 128, 44]
    assert m.context_chunk_max_seq_lens == [128, 128, 44]
    assert tuple(m.chunked_prefill_workspace.shape) == (256, 576)
    part = m.prefill
    assert (part.max_query_len, part.context_lens.tolist()) == (5, [0, 10, 300])
    assert device.host(part.query_start_loc).tolist() == [0, 5, 8, 10]
    assert device.host(part.seq_lens).tolist() == [5, 13, 302]
    assert part.chunks.context_chunk_seq_tot == [138, 128, 44]
    assert device.host(m.decode.query_start_loc).tolist() == [0, 1]
    assert device.host(m.decode.seq_lens).tolist() == [7]


def test_chunks_of_the_packed_plan():
    m = build(
        Case([5, 3, 2, 4], [300, 10, 0, 40], page=64),
        prefill_workspace_tokens=256,
        context_plan="packed",
    )
    chunks = [(a, b, *(device.host(x).tolist() for x in xs)) for a, b, *xs in m.prefill.chunks]
    assert chunks == [(0, 1, [0], [256]), (0, 2, [256, 0], [44, 10]), (3, 4, [0], [40])]
    assert m.has_context
    assert m.context_chunk_starts is None
    assert (m.context_chunk_seq_tot, m.context_chunk_max_seq_lens) == ([256, 54, 40], [256, 44, 40])


@pytest.mark.parametrize("plan", ["equal", "packed"])
def test_no_context(plan):
    m = build(Case([1, 4], [5, 0]), context_plan=plan)
    assert not m.has_context
    assert m.prefill.chunks is None
    assert m.context_chunk_starts is m.context_chunk_seq_tot is m.chunked_prefill_workspace is None


def choose(query_lens, contexts, **sizes) -> str:
    """The path that a step has if its config leaves it open: no layer runs."""
    case, trip = Case([1], [0]), travel()
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    lens = np.add(query_lens, contexts).astype(np.int32)
    limits = {"max_num_batched_tokens": int(starts[-1]), "max_model_len": int(lens.max())}
    sizes = {"qk_nope_head_dim": 128, "v_head_dim": 128, "prefill_workspace_tokens": 512} | sizes
    config = case.config(path=None, max_num_seqs=len(lens), **limits, **sizes)
    table = np.zeros((len(lens), -(-int(lens.max()) // 16)), np.int32)
    arrays = (starts, lens, np.zeros(starts[-1], np.int64), table)
    common = package.CommonAttentionMetadata(
        *map(trip.put, arrays), query_start_loc_cpu=starts, seq_lens_cpu=lens
    )
    return dense.MetadataBuilder(config).build(common).path


def test_the_plan_chooses_the_cheaper_path():
    """Clear cases only: where the paths cost about the same, either will do."""
    assert choose([16], [8192]) == "mixed"
    assert choose([2], [100_000]) == "mixed"
    assert choose([4096], [0]) == "separate"
    assert choose([4096], [8192]) == "separate"
    assert choose([2], [0]) == "separate"  # a pair costs less there, and there is nothing to make
    assert choose([2, 4000], [3000, 0]) == "separate"  # the new tokens' own pairs count, too
    assert choose([2, 40], [3000, 0]) == "mixed"
    assert choose([1, 1], [3000, 0]) == "mixed"
    assert choose([9, 1], [0, 0]) == "mixed"  # a decode behind a prefill
    assert choose([9], [0], v_head_dim=127) == "mixed"  # no kernel for values of that size
    assert choose([9], [0], qk_nope_head_dim=520, qk_rope_head_dim=0) == "mixed"  # nor for keys


@pytest.mark.parametrize("context", [500, 8192])
def test_more_new_tokens_never_turn_a_step_to_mixed(context):
    paths = [choose([2**n], [context]) for n in range(1, 13)]
    assert paths == sorted(paths)  # "mixed", then "separate"
    assert len(set(paths)) == 2


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prefill_workspace_tokens": 15}, "prefill_workspace_tokens.* at least a page"),
        ({"v_head_dim": 20}, '`path` must be "mixed" unless'),
        ({"qk_nope_head_dim": 520, "qk_rope_head_dim": 0}, '`path` .* "separate" with 520 and 48'),
    ],
)
def test_bad_builders(changes, text):
    case = Case([4], [9])
    with pytest.raises(ValueError, match=f"^MetadataBuilder: .*{text}"):
        dense.MetadataBuilder(case.config(**changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_plan", "even"),
        ("context_plan", None),
        ("prefill_workspace_tokens", 0),
        ("path", "direct"),
        ("qk_rope_head_dim", 32),
        ("qk_rope_head_dim", -1),
    ],
)
def test_bad_configs(name, value):
    with pytest.raises(ValueError, match=f"^Config: `{name}` must be"):
        Case([4], [9]).config(**{name: value})


@pytest.mark.parametrize("name", ["workspace", "up_workspace"])
@pytest.mark.parametrize("shape", [(15, 576), (64, 575), (8, 400), (64, 399)])
def test_bad_workspaces(name, shape):
    trip, case = travel(), Case([4, 9], [9, 9])
    config = case.config(prefill_workspace_tokens=48)
    with pytest.raises(ValueError, match=f"^MetadataBuilder: `{name}` must have shape"):
        dense.MetadataBuilder(config, **{name: trip.put(np.zeros(shape, ref.BF16))})


def test_a_small_workspace_and_a_bad_order():
    case = Case([4, 9, 2], [9, 9, 9])
    text = "a page of 16 tokens for each of 3 prefills with context, got 47"
    with pytest.raises(ValueError, match=f"^MetadataBuilder.build: .*{text}"):
        case.run(prefill_workspace_tokens=47)
    case.run(prefill_workspace_tokens=47, context_plan="packed")
    with pytest.raises(ValueError, match="`query_start_loc` must have decodes"):
        Case([4, 1], [9, 9]).run()


def test_a_layer_needs_the_weight_and_memory_of_its_own():
    case = Case([4], [9])
    config = case.config(prefill_workspace_tokens=64)
    trip = travel()
    memory = trip.put(np.zeros((64, 400), ref.BF16))
    builder = dense.MetadataBuilder(config, up_workspace=memory)
    common = case.batch.common(
        package, **{name: trip.put(getattr(case.batch, name)) for name in ARRAYS}
    )
    metadata = builder.build(common)
    arrays = trip.put((case.q, case.kv_c, case.k_pe, case.cache))
    weight = trip.put(case.weight)
    layer = dense.DenseMLA(case.config(path="mixed"), kv_b_proj=weight)
    with pytest.raises(ValueError, match=r"^dense\.forward: `kv_b_proj` must"):
        layer.forward(*arrays, metadata)
    layer = dense.DenseMLA(config, kv_b_proj=weight)
    with pytest.raises(ValueError, match=r"^dense\.forward: `out` must not overlap `up_workspace`"):
        layer.forward(*arrays, metadata, out=memory.reshape(-1)[:960].reshape(4, 5, 48))
    assert layer.forward(*arrays, None, out=arrays[0]) is arrays[0]


@pytest.mark.parametrize("kind", ["transposed", "fp32", "fp8"])
def test_other_forms_of_the_weight(kind):
    """The matrix that prefills use is that of W_UK and W_UV."""
    case = Case([4], [0])
    weight, scale = case.weight, None
    if kind == "transposed":
        weight = np.ascontiguousarray(weight.T)
    elif kind == "fp32":
        weight = ref.to_f32(weight)
    else:
        weight = (weight.astype(np.float32) * 4).astype(ref.E4M3)
        scale = np.full((4, 4), 0.25, np.float32)
    layer = dense.DenseMLA(case.config(), kv_b_proj=weight, weight_scale_inv=scale)
    joined = np.concatenate([layer.W_UK, layer.W_UV], -1).reshape(512, -1)
    assert_same_bits(np.ascontiguousarray(layer.kv_b_proj), joined)
    assert np.shares_memory(layer.kv_b_proj, weight) == (kind == "transposed")
