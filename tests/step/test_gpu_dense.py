"""sparse_mla.dense on the GPU: a captured layer replays after builds of other lengths, a step takes
no memory and does not wait for the device, and steps may have streams of their own."""

from __future__ import annotations

import dataclasses

import cases
import gpu
import numpy as np
import pytest
import reference as ref
import test_dense
from gpu import assert_same_values, capture, is_busy, torch

import sparse_mla

dense = sparse_mla.dense
NAMES = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
REQUESTS, HEADS, MAX_LEN, PAGE = 8, 16, 400, 16
PAGES = REQUESTS * MAX_LEN // PAGE + 3
ROWS = {"bfloat16": "bf16", "fp8_ds_mla": "fp8"}
FORMATS = list(ROWS)


class Engine:
    """One layer's decodes of `query_len` tokens, with every array at a fixed address."""

    def __init__(self, kv_cache_dtype: str, query_len: int = 1, **changes) -> None:
        rng = np.random.default_rng(7)
        self.query_len, self.tokens = query_len, REQUESTS * query_len
        self.config = dense.Config(
            HEADS,
            softmax_scale=192**-0.5,
            kv_cache_dtype=kv_cache_dtype,
            block_size=PAGE,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=self.tokens,
            max_model_len=MAX_LEN,
            decode_threshold=query_len,
            device="cuda",
            **changes,
        )
        weight = cases.random_bf16(rng, 512, HEADS * 256, std=512**-0.5)
        table = gpu.put(sparse_mla.rope_table(MAX_LEN))
        self.layer = dense.DenseMLA(self.config, kv_b_proj=gpu.put(weight), rope_table=table)
        rows = cases.make_rows(rng, PAGES * PAGE, ROWS[kv_cache_dtype])
        self.cache = gpu.put(rows.reshape(PAGES, PAGE, -1))
        batch = self.batch(REQUESTS, 0)
        self.arrays = {name: gpu.put(getattr(batch, name)) for name in NAMES}
        shapes = (self.tokens, HEADS, 192), (self.tokens, 512), (self.tokens, 64)
        self.inputs = [gpu.put(np.zeros(shape, ref.BF16)) for shape in shapes]

    def batch(self, real: int, seed: int) -> cases.Batch:
        """`real` requests, padded with empty ones: the shapes are always the same."""
        rng = np.random.default_rng([seed, real])
        pad = REQUESTS - real
        lens = [int(n) for n in rng.integers(self.query_len, MAX_LEN + 1, real)]
        batch = cases.make_batch(
            [self.query_len] * real + [0] * pad,
            lens + [0] * pad,
            block_size=PAGE,
            pad_tokens=pad * self.query_len,
            seed=seed,
        )
        table = np.full((REQUESTS, MAX_LEN // PAGE + 1), -1, np.int32)
        table[:, : batch.block_table.shape[1]] = batch.block_table
        return dataclasses.replace(batch, block_table=table)

    def load(self, batch: cases.Batch) -> None:
        """The batch's numbers in the fixed arrays, and other tokens."""
        for name, x in self.arrays.items():
            x.copy_(gpu.put(getattr(batch, name)))
        for x in self.inputs:
            x.normal_()

    def build(self, builder, batch: cases.Batch, bound: int = 0):
        return builder.build(
            batch.common(
                sparse_mla,
                **self.arrays,
                seq_lens_cpu=batch.seq_lens + np.int32(bound),
                max_seq_len=None,
            )
        )

    def forward(self, metadata, **options):
        return self.layer.forward(*self.inputs, self.cache, metadata, **options)

    def make_out(self):
        return gpu.put(np.zeros((self.tokens, HEADS, 128), ref.BF16))

    def assert_right(self, batch: cases.Batch, got: np.ndarray) -> None:
        """Compares a result with fp64, and that of padding tokens with zeros."""
        q, cache = gpu.values((self.inputs[0], self.cache))
        query_lens = np.diff(batch.query_start_loc)
        want = test_dense.reference(
            self.layer, query_lens, batch.seq_lens, q, cache, batch.block_table
        )
        test_dense.assert_close(got[: len(want)], want)
        assert not ref.to_f32(got[len(want) :]).any()


# --- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_a_captured_decode_replays_after_builds(kv_cache_dtype, query_len):
    """A thousand replays, each with new tokens after a build of other lengths on other pages, have
    the bits of eager steps in the result and in the cache."""
    fixed = Engine(kv_cache_dtype, query_len)
    builder, other = dense.MetadataBuilder(fixed.config), dense.MetadataBuilder(fixed.config)
    batches = [fixed.batch(real, seed) for seed, real in enumerate((8, 5, 1, 8, 7, 8, 2))]
    fixed.load(batches[0])
    metadata = fixed.build(builder, batches[0])
    out = fixed.make_out()
    graph, result = capture(lambda: fixed.forward(metadata, out=out))
    assert result is out
    for i in range(1000):
        batch = batches[i % len(batches)]
        fixed.load(batch)
        before = fixed.cache.clone()
        fixed.build(builder, batch)
        out.view(torch.uint8).fill_(0xFF)
        graph.replay()
        replayed = fixed.cache.clone()
        fixed.cache.copy_(before)
        want = fixed.forward(fixed.build(other, batch))
        assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)), i
        assert torch.equal(replayed.view(torch.uint8), fixed.cache.view(torch.uint8)), i
        if i < len(batches):
            assert not torch.equal(replayed.view(torch.uint8), before.view(torch.uint8)), i
            fixed.assert_right(batch, gpu.values(out)[0])


class Absorbed(Engine):
    """The same from latents of queries to the layer's output, with weights in bf16 or e4m3."""

    def __init__(self, scheme: str | None, query_len: int = 1, **changes) -> None:
        super().__init__("bfloat16", query_len, **changes)
        rng = np.random.default_rng(8)
        shapes = (512, HEADS * 256), (256, HEADS * 192), (384, HEADS * 128)
        weights = [gpu.put(cases.random_bf16(rng, *shape, std=0.05)) for shape in shapes]
        self.layer = dense.DenseMLA(
            self.config,
            **dict(zip(("kv_b_proj", "q_proj", "o_proj"), weights, strict=True)),
            absorb=True,
            scheme=scheme,
            rope_table=self.layer.rope_table,
        )
        self.inputs[0] = gpu.put(np.zeros((self.tokens, 256), ref.BF16))

    def make_out(self):
        return gpu.put(np.zeros((self.tokens, 384), ref.BF16))


SCHEMES = (None, "tensor", "block", "token_tensor", "token_channel")


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_captured_decode_with_absorbed_weights_replays(scheme, query_len):
    """Replays have the bits of eager steps, and neither takes memory."""
    fixed = Absorbed(scheme, query_len)
    builder, other = dense.MetadataBuilder(fixed.config), dense.MetadataBuilder(fixed.config)
    batches = [fixed.batch(real, seed) for seed, real in enumerate((8, 5, 1, 7))]
    fixed.load(batches[0])
    metadata = fixed.build(builder, batches[0])
    out, want = fixed.make_out(), fixed.make_out()
    graph, _ = capture(lambda: fixed.forward(metadata, out=out))
    for i in range(40):
        batch = batches[i % len(batches)]
        fixed.load(batch)
        before, allocated = fixed.cache.clone(), gpu.count_tensors()
        fixed.build(builder, batch)
        out.view(torch.uint8).fill_(0xFF)
        graph.replay()
        assert gpu.count_tensors() == allocated
        fixed.cache.copy_(before)
        fixed.forward(fixed.build(other, batch), out=want)
        assert gpu.count_tensors() == allocated
        assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)), i
        assert torch.isfinite(out).all()
        assert out[:1].any()


# --- what a step does not do ---------------------------------------------------------------------


def run_steps(fixed: Engine, builder, batches, out) -> None:
    for batch in batches:
        fixed.forward(fixed.build(builder, batch), out=out)


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_steps_take_no_memory(kv_cache_dtype):
    """Neither torch's allocator nor CUDA is asked for memory."""
    fixed = Engine(kv_cache_dtype)
    builder, out = dense.MetadataBuilder(fixed.config), fixed.make_out()
    batches = [fixed.batch(real, seed) for seed, real in enumerate((8, 5, 8))]
    fixed.load(batches[0])
    run_steps(fixed, builder, batches, out)  # loads kernels and libraries

    def run():
        for _ in range(100):
            run_steps(fixed, builder, batches, out)
            torch.cuda.synchronize()

    assert gpu.allocations(run) == []
    assert "cudaMalloc" in gpu.allocations(lambda: dense.MetadataBuilder(fixed.config))


@pytest.mark.parametrize("plan", ["equal", "packed"])
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_prefills_take_no_memory(kv_cache_dtype, plan):
    """Path "separate" with context in chunks, and queries as a pair of views."""
    fixed = Engine(kv_cache_dtype, path="separate", prefill_workspace_tokens=64, context_plan=plan)
    builder, out = dense.MetadataBuilder(fixed.config), torch.zeros_like(fixed.make_out())
    batch = cases.make_batch((1, 2, 4), (30, 202, 104), block_size=PAGE)
    common = batch.common(sparse_mla, **{name: gpu.put(getattr(batch, name)) for name in NAMES})
    q, *rest = fixed.inputs
    pair = q[..., :128], q[..., 128:]

    def step() -> None:
        metadata = builder.build(common)
        assert len(metadata.context_chunk_seq_tot) > 3
        fixed.layer.forward(pair, *rest, fixed.cache, metadata, out=out)

    step()  # loads kernels and libraries

    def run():
        for _ in range(100):
            step()
            torch.cuda.synchronize()

    assert gpu.allocations(run) == []  # views of the builder's arrays are no allocations


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_a_step_does_not_wait_for_lengths(kv_cache_dtype, query_len):
    """The device's lengths are zeros until the stream, which is late, has written them. The host
    has upper bounds, and none of them changes a bit."""
    fixed = Engine(kv_cache_dtype, query_len)
    builder, batch = dense.MetadataBuilder(fixed.config), fixed.batch(7, 3)
    batch.seq_lens[:7] = np.minimum(batch.seq_lens[:7], MAX_LEN - 7)
    batch.slot_mapping[: 7 * query_len] = np.concatenate(
        [
            test_dense.slots_of(row, length, PAGE)[-query_len:]
            for row, length in zip(batch.block_table[:7], batch.seq_lens[:7], strict=True)
        ]
    )
    fixed.load(batch)
    want = gpu.values(fixed.forward(fixed.build(builder, batch)))
    fixed.assert_right(batch, want[0])
    lens = fixed.arrays["seq_lens"]
    late, out = lens.clone(), fixed.make_out()
    for bound in (0, 7):
        lens.zero_()
        out.view(torch.uint8).fill_(0xFF)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        gpu.delay(stream)
        with torch.cuda.stream(stream):
            lens.copy_(late)
            got = fixed.forward(fixed.build(builder, batch, bound), out=out)
        assert is_busy(stream), "the step waited for the device"
        stream.synchronize()
        assert_same_values(gpu.values(got), want, f"bound {bound}")


@pytest.mark.parametrize("path", ["separate", "mixed"])
@pytest.mark.parametrize("late", ["builds", "layers", "all"])
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_steps_on_streams_of_their_own(kv_cache_dtype, late, path):
    """A build on one stream, its layer on another, the next build on a third: the device runs them
    in this order, whichever stream is late. Prefills and decodes take turns."""
    fixed = Engine(kv_cache_dtype, 3, path=path, prefill_workspace_tokens=128)
    builder = dense.MetadataBuilder(fixed.config)
    placed = []
    for seed, lens in enumerate([(1, 2, 15), (1,) * 8, (2, 3, 5, 9), (1, 1)]):
        batch = cases.make_batch(lens, [n + 60 * seed for n in lens], block_size=PAGE, seed=seed)
        arrays = {name: gpu.put(getattr(batch, name)) for name in NAMES}
        rows = np.random.default_rng(seed)
        tokens = [cases.random_bf16(rows, *x.shape) for x in fixed.inputs]
        placed.append((batch.common(sparse_mla, **arrays), [gpu.put(x) for x in tokens]))
    before = fixed.cache.clone()

    def run(common, tokens, *streams):
        build_stream, layer_stream = streams or (None, None)
        with torch.cuda.stream(build_stream):
            if streams and late != "layers":
                gpu.delay()
            metadata = builder.build(common)
        with torch.cuda.stream(layer_stream):
            if streams and late != "builds":
                gpu.delay()
            return fixed.layer.forward(*tokens, fixed.cache, metadata)

    want = [gpu.values(run(*one)) for one in placed]
    cache = gpu.values(fixed.cache)
    fixed.cache.copy_(before)
    torch.cuda.synchronize()
    results = [run(*one, torch.cuda.Stream(), torch.cuda.Stream()) for one in placed]
    torch.cuda.synchronize()
    for got, expected in zip(results, want, strict=True):
        assert_same_values(gpu.values(got), expected, late)
    assert_same_values(gpu.values(fixed.cache), cache, late)
