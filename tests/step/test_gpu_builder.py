"""The builder's buffers on the GPU: which stream waits for which, and which arrays are refused."""

import dataclasses

import cases
import device
import engine
import gpu
import library
import numpy as np
import pytest
import reference as ref
from gpu import assert_same_values, is_busy, torch
from helpers import assert_within_bounds

import sparse_mla

HEADS = 40


class Layer:
    """A layer and its arrays on the GPU, for the steps of one engine."""

    def __init__(self, path: str, num_heads: int = HEADS, **changes) -> None:
        self.path = path
        self.config = engine.config(
            library.sparse_mla, num_heads=num_heads, fp8=path != "bf16", path=path, **changes
        )
        self.layer = sparse_mla.SparseMLA(self.config)

    def place(self, lens, seed: int):
        """-> a step of these query lengths, its metadata's arrays and the layer's, on the GPU."""
        batch = cases.make_batch(lens, [n + 40 + seed for n in lens], seed=seed)
        step = engine.make_step(batch, HEADS, seed=seed)
        if self.path == "bf16":
            step.fp8_cache = step.bf16_cache(sparse_mla)
        names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
        common = batch.common(sparse_mla, **{n: gpu.put(getattr(batch, n)) for n in names})
        cache = device.Journey().put(step.fp8_cache)
        arrays = gpu.put(step.q), cache, gpu.put(step.topk_indices)
        return step, common, arrays

    def forward(self, arrays, metadata, **options):
        return self.layer.forward(*arrays, metadata, **options)

    def eager(self, common, arrays):
        metadata = sparse_mla.MetadataBuilder(self.config).build(common)
        return gpu.values(self.forward(arrays, metadata))


BATCHES = [([1, 1, 30], 1), ([1] * 12, 2), ([1, 5, 40, 3], 3), ([1, 1], 4)]


# --- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["builds", "forwards", "all"])
@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_steps_on_streams_of_their_own(path, late):
    """A build on one stream, its forward on another, the next build on a third: the device runs
    them in this order, whichever stream is late."""
    layer = Layer(path)
    placed = [layer.place(*batch) for batch in BATCHES]
    want = [layer.eager(common, arrays) for _, common, arrays in placed]
    builder = sparse_mla.MetadataBuilder(layer.config)
    layer.forward(placed[0][2], builder.build(placed[0][1]))
    torch.cuda.synchronize()
    results = []
    for _, common, arrays in placed:
        build_stream, forward_stream = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(build_stream):
            if late != "forwards":
                gpu.delay()
            metadata = builder.build(common)
        with torch.cuda.stream(forward_stream):
            if late != "builds":
                gpu.delay()
            results.append(layer.forward(arrays, metadata))
    torch.cuda.synchronize()
    for got, expected in zip(results, want, strict=True):
        assert_same_values(gpu.values(got), expected, path)


def test_many_builds_ahead_of_the_device():
    """The ring of staging buffers grows, so that no build waits and each forward reads the
    metadata of its own step."""
    layer = Layer("mixed")
    placed = [layer.place(*BATCHES[i % len(BATCHES)]) for i in range(12)]
    want = [layer.eager(common, arrays) for _, common, arrays in placed]
    builder = sparse_mla.MetadataBuilder(layer.config)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    results = []
    gpu.delay(stream)
    with torch.cuda.stream(stream):
        for _, common, arrays in placed:
            results.append(layer.forward(arrays, builder.build(common)))
    assert is_busy(stream), "a build waited for the device"
    stream.synchronize()
    for got, expected in zip(results, want, strict=True):
        assert_same_values(gpu.values(got), expected)


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_upper_bounds_of_lengths_need_no_synchronisation(path):
    """Lengths are exact on the device alone, where a kernel in front of the step may write them."""
    layer = Layer(path)
    step, common, arrays = layer.place([1, 1, 30], 1)
    want = layer.eager(common, arrays)
    bounds = np.minimum(step.batch.seq_lens + 20, 64 * step.batch.block_table.shape[1])
    common = dataclasses.replace(common, seq_lens_cpu=bounds, max_seq_len=None)
    builder = sparse_mla.MetadataBuilder(layer.config)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    gpu.delay(stream)
    with torch.cuda.stream(stream):
        got = layer.forward(arrays, builder.build(common))
    assert is_busy(stream), "the step waited for the device"
    stream.synchronize()
    assert_same_values(gpu.values(got), want)


def test_forward_on_a_given_stream():
    layer = Layer("separate")
    _, common, arrays = layer.place(*BATCHES[0])
    want = layer.eager(common, arrays)
    builder = sparse_mla.MetadataBuilder(layer.config)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    metadata = builder.build(common)
    gpu.delay(stream)
    results = layer.forward(arrays, metadata, stream=stream)
    assert is_busy(stream), "the call waited for the device"
    torch.cuda.synchronize()
    assert_same_values(gpu.values(results), want)


def test_the_caller_s_workspace_is_used():
    layer = Layer("separate")
    step, common, arrays = layer.place(*BATCHES[2])
    workspace = gpu.put(np.zeros((cases.ENGINE_WORKSPACE, 576), ref.BF16))
    builder = sparse_mla.MetadataBuilder(layer.config, workspace=workspace)
    got = gpu.values(layer.forward(arrays, builder.build(common)))
    assert bool(workspace.any())
    want = step.reference("separate", step.fp8_cache, sink=False)
    assert_within_bounds(want, dict(zip(("out", "lse"), got, strict=True)))


# --- arrays in the wrong place -------------------------------------------------------------------


def test_host_arrays_are_needed_beside_the_device_s():
    layer = Layer("mixed")
    _, common, _ = layer.place(*BATCHES[0])
    starts, lens, slots, table = (
        common.query_start_loc,
        common.seq_lens,
        common.slot_mapping,
        common.block_table,
    )
    with pytest.raises(ValueError, match=r"`query_start_loc_cpu` must .*, got None"):
        sparse_mla.CommonAttentionMetadata(starts, lens, slots, table)


def test_a_block_table_on_the_host_is_refused():
    layer = Layer("mixed")
    step, common, arrays = layer.place(*BATCHES[0])
    builder = sparse_mla.MetadataBuilder(layer.config)
    good, common.block_table = common.block_table, step.batch.block_table
    with pytest.raises(ValueError, match=r"`block_table` must .*, got"):
        layer.forward(arrays, builder.build(common))
    common.block_table = good
    want = layer.eager(common, arrays)
    assert_same_values(gpu.values(layer.forward(arrays, builder.build(common))), want)


@pytest.mark.parametrize("which", ["q", "cache", "topk"])
def test_forward_refuses_host_arrays(which):
    layer = Layer("mixed")
    _, common, arrays = layer.place(*BATCHES[0])
    metadata = sparse_mla.MetadataBuilder(layer.config).build(common)
    bad = list(arrays)
    place = ("q", "cache", "topk").index(which)
    bad[place] = bad[place].cpu()
    with pytest.raises(ValueError, match=r"must .*, got"):
        layer.forward(bad, metadata)
    layer.forward(arrays, metadata)


def test_a_workspace_on_the_host_is_refused():
    layer = Layer("separate")
    workspace = np.zeros((cases.ENGINE_WORKSPACE, 576), ref.BF16)
    with pytest.raises(ValueError, match=r"`workspace` must .*, got"):
        sparse_mla.MetadataBuilder(layer.config, workspace=workspace)


def test_a_device_that_is_not_there():
    with pytest.raises((ValueError, RuntimeError), match=r"99"):
        sparse_mla.MetadataBuilder(engine.config(sparse_mla, device="cuda:99"))


def test_cuda_means_the_first_device():
    assert sparse_mla.MetadataBuilder(engine.config(sparse_mla, device="cuda:0")) is not None
    sizes = {
        sparse_mla.attention_workspace_size(7, 16, 2048, num_splits=8, device=name)
        for name in ("cuda", "cuda:0", torch.device("cuda", 0))
    }
    assert len(sizes) == 1


# --- bad values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_bad_pages_and_positions_in_a_step_are_harmless(path):
    """The good request's token has the bits that it has without bad values. Tokens that have no
    key left have out 0 and lse -inf, and no value of out is NaN or infinite."""
    layer = Layer(path)
    _, common, arrays = layer.place([1, 1, 1, 30], 5)
    want = layer.eager(common, arrays)
    table, topk = common.block_table, arrays[2]
    table[1] = 2**31 - 1
    table[3, 0] = -7
    topk[2] = torch.tensor([2**31 - 1, -(2**31), 10**6, -1] * 12, dtype=torch.int32)
    metadata = sparse_mla.MetadataBuilder(layer.config).build(common)
    out, lse = gpu.values(layer.forward(arrays, metadata))
    assert_same_values([out[0], lse[0]], [want[0][0], want[1][0]], "the good request")
    for row in (1, 2):
        assert (ref.bits16(out[row]) == 0).all(), "no key is left"
        assert (lse[row] == -np.inf).all()
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("path", ["mixed", "direct", "bf16"])
def test_one_key_in_a_step_with_bad_pages(path):
    """Positions on a page that does not exist are no keys, so token 5 still has one key. Its out
    has the same bits, and on a bf16 cache they are that cache row's value."""
    layer = Layer(path)
    step, common, arrays = layer.place([1, 1, 1, 30], 5)
    slot = 64 * int(step.batch.block_table[3, 0]) + 7
    table, topk = common.block_table, arrays[2]
    table[3, 1] = -7
    topk[5] = -1
    topk[5, 3] = 7
    want = [x[5] for x in layer.eager(common, arrays)]
    topk[5, 20:30] = torch.arange(64, 74, dtype=torch.int32)
    got = [x[5] for x in layer.eager(common, arrays)]
    assert_same_values(got, want, "beside bad pages")
    if path == "bf16":
        bits = ref.raw_rows(step.fp8_cache, [slot])[:, :512]
        assert (ref.bits16(got[0]) == bits).all()


def place_keys_among_bad_pages(rng, tokens: int, topk: int, end: int):
    """-> lists [tokens, topk], and the key of each list (-1 for none), for a table in which only
    the first page exists. Seven of ten lists have one key, a position on that page, in any column.
    Other columns have -1 or positions on other pages: none, one, some or all of them."""
    keys = np.where(rng.random(tokens) < 0.7, rng.integers(0, 64, tokens), -1)
    share = rng.choice([0, 1 / topk, 0.1, 0.6, 1], (tokens, 1))
    topk_indices = np.where(
        rng.random((tokens, topk)) < share, rng.integers(64, end, (tokens, topk)), -1
    )
    columns = rng.integers(0, topk, tokens)
    columns[:2] = 0, topk - 1
    topk_indices[np.arange(tokens), columns] = keys
    return topk_indices.astype(np.int32), keys


@pytest.mark.parametrize("num_heads", [1, 16, 64, 128])
@pytest.mark.parametrize(
    ("tokens", "topk"),
    [(40, 48), (5, 1024), (450, 1024)],  # one split; several splits; several work items per CTA
)
@pytest.mark.parametrize("path", ["mixed", "direct", "bf16"])
def test_one_key_among_bad_pages(path, tokens, topk, num_heads):
    """Of the pages in the block table only the first exists. Positions on the others change no bit
    of out, except where a launch for many tokens shares a list of FP8 rows among CTAs: the value of
    a part is rounded in fp32, so out may be rounded the other way. Everywhere they make a row
    longer, so lse may be rounded the other way."""
    rng = np.random.default_rng([tokens, num_heads])
    layer = Layer(path, num_heads, topk_tokens=topk, max_num_batched_tokens=512, max_model_len=2048)
    batch = cases.make_batch([tokens], [1100], seed=1)
    first = int(batch.block_table[0, 0])
    batch.block_table[0, 1:] = np.resize([-1, -7, 2**31 - 1, batch.num_pages], 18)
    step = engine.make_step(batch, num_heads, topk=topk)
    cache = step.fp8_cache
    if path == "bf16":
        cache = step.bf16_cache(sparse_mla)
        ref.bits16(cache)[..., :512:9] = 0x8000  # -0, whose sign out must keep
    names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
    common = batch.common(sparse_mla, **{n: gpu.put(getattr(batch, n)) for n in names})
    q, kv = gpu.put(step.q), device.Journey().put(cache)
    bad, keys = place_keys_among_bad_pages(rng, tokens, topk, 1100)
    good = np.where(bad < 64, bad, -1)
    got = layer.eager(common, (q, kv, gpu.put(bad)))
    want = layer.eager(common, (q, kv, gpu.put(good)))
    if path == "bf16" or tokens < 450:
        assert_same_values(got[:1], want[:1], "without bad positions")
    slots = np.where(keys < 0, -1, 64 * first + keys)[:, None]
    reference = ref.attention(step.q, cache, slots, softmax_scale=engine.SCALE)
    for x in (got, want):
        assert_within_bounds(reference, {"out": x[0], "lse": x[1]})
    out, lse = (x[keys < 0] for x in got)
    assert (ref.bits16(out) == 0).all()
    assert (lse == -np.inf).all()
    value = ref.decode_rows(cache, 64 * first + keys[keys >= 0])[:, None, :512]
    error = np.abs(ref.to_f32(got[0][keys >= 0]).astype(np.float64) - value)
    assert (error <= 2.0**-8 * np.abs(value) + 2.0**-133).all()
    if path == "bf16":
        bits = ref.raw_rows(cache, 64 * first + keys[keys >= 0])[:, None, :512]
        assert (ref.bits16(got[0][keys >= 0]) == bits).all()


# --- paths ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="no kernel for Hopper")
@pytest.mark.parametrize(
    ("num_heads", "tokens", "want"),
    [
        (HEADS, 40, "direct"),  # for few tokens a gather costs more than it saves
        (HEADS, 4000, "separate"),
        (32, 4000, "direct"),  # the kernel for bf16 rows takes as long for 32 heads as for 64
    ],
)
def test_the_plan_weighs_a_gather_against_slower_rows(num_heads, tokens, want):
    config = engine.config(
        library.sparse_mla,
        num_heads=num_heads,
        path=None,
        topk_tokens=128,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        prefill_workspace_tokens=4096,
    )
    batch = cases.make_batch([1, 1, tokens], [50, 9, tokens])
    builder = library.sparse_mla.MetadataBuilder(config)
    metadata = builder.build(batch.common(library.sparse_mla))
    assert metadata.path == want
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    if tokens < 100:
        step = engine.make_step(batch, num_heads, topk=config.topk_tokens)
        layer = library.sparse_mla.SparseMLA(config)
        out, lse = layer.forward(step.q, step.fp8_cache, step.topk_indices, metadata)
        reference = step.reference(want, step.fp8_cache, sink=False)
        assert_within_bounds(reference, {"out": out, "lse": lse})
