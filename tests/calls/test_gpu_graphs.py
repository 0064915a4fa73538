"""CUDA graphs: every operator and a whole decode step, captured once and replayed."""

import dataclasses

import cases
import device
import engine
import gpu
import library
import numpy as np
import operators
import pytest
import reference as ref
from gpu import CALLS, as_tuple, assert_same_values, capture, inputs, moved, outcome, torch, turned
from helpers import assert_within_bounds

import sparse_mla


def overwrite(call: operators.Call, other: operators.Call) -> None:
    """Copies another call's values into the arrays that the captured call reads or writes in
    place."""
    for name in (*inputs(call), *operators.WRITTEN.get(call.op, ())):
        call.get(name).copy_(other.get(name))


def check_replays(op, call, replay, results) -> None:
    """Asserts that three replays with new inputs give the bits of an eager run."""
    for by in (1, 2, 0):
        other = turned(CALLS[op](), by)
        want = outcome(moved(turned(CALLS[op](), by)))
        overwrite(call, moved(other))
        kept = {call.get(name).data_ptr() for name in operators.WRITTEN.get(call.op, ())}
        for x in map(device.as_torch, results):
            if x.data_ptr() not in kept:
                x.reshape(-1).view(torch.uint8).fill_(0xFF)
        torch.cuda.synchronize()
        replay()
        torch.cuda.synchronize()
        assert_same_values(gpu.values(tuple(results)), want, f"{op} rolled by {by}")


@pytest.mark.parametrize("keep_results", [False, True], ids=["torch allocates", "out="])
@pytest.mark.parametrize("op", CALLS)
def test_torch_graph(op, keep_results):
    """Results and workspace come from torch's allocator inside the capture, or from the caller."""
    call = moved(CALLS[op](), keep_results=keep_results)
    graph, results = capture(lambda: call.run(sparse_mla))
    check_replays(op, call, graph.replay, as_tuple(results))


@pytest.mark.cupy
@pytest.mark.parametrize("keep_results", [False, True], ids=["cupy allocates", "out="])
@pytest.mark.parametrize("op", CALLS)
def test_cupy_graph(op, keep_results, cupy):
    plain = moved(CALLS[op](), keep_results=keep_results)
    call = operators.Call(plain.op, dict(plain.args), dict(plain.kwargs))
    for name, x in {**call.args, **call.kwargs}.items():
        if isinstance(x, torch.Tensor):
            call.set(name, cupy.from_dlpack(x))
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call.run(sparse_mla)  # loads kernels and libraries, which must not happen in the capture
        stream.synchronize()
        stream.begin_capture()
        results = call.run(sparse_mla)
        graph = stream.end_capture()
    replay = lambda: graph.launch(stream)  # noqa: E731
    check_replays(op, plain, replay, as_tuple(results))


def test_two_calls_in_one_graph():
    """The second call reads what the first writes: slots converted from positions go to
    attention."""
    rng = np.random.default_rng(3)
    table = rng.permutation(40).astype(np.int32).reshape(2, 20)
    topk = rng.integers(-1, 20 * 64, (3, 200)).astype(np.int32)
    requests = np.array([0, 1, 1], np.int32)
    q, kv = cases.random_bf16(rng, 3, 16, 576), cases.make_rows(rng, 40 * 64, "fp8")
    kv = kv.reshape(40, 64, 656)
    placed = [gpu.put(x) for x in (requests, table, topk, q, kv)]

    def run():
        slots = sparse_mla.convert_req_index_to_global_index(*placed[:3], block_size=64)
        return sparse_mla.sparse_attention(placed[3], placed[4], slots, softmax_scale=0.04)

    graph, results = capture(run)
    for _ in range(3):
        topk = rng.integers(-1, 20 * 64, topk.shape).astype(np.int32)
        placed[2].copy_(gpu.put(topk))
        graph.replay()
        slots, _ = ref.convert_req_index_to_global_index(requests, table, topk, block_size=64)
        want = ref.attention(q, kv, slots, softmax_scale=0.04)
        out, lse = gpu.values(results)
        assert_within_bounds(want, {"out": out, "lse": lse})


# --- a uniform decode batch ----------------------------------------------------------------------

ROWS, WIDTH, PAGES = 8, 9, 60


def decode_batch(real: int, seed: int, query_len: int) -> cases.Batch:
    """`real` requests, padded with empty ones to ROWS; the block table always has WIDTH columns."""
    rng = np.random.default_rng(seed)
    pad = ROWS - real
    seq_lens = [int(n) for n in rng.integers(query_len, 300, real)]
    batch = cases.make_batch(
        [query_len] * real + [0] * pad, seq_lens + [0] * pad, pad_tokens=pad * query_len, seed=seed
    )
    table = np.full((ROWS, WIDTH), -1, np.int32)
    table[:, : batch.block_table.shape[1]] = batch.block_table
    return dataclasses.replace(batch, block_table=table)


class Engine:
    """One layer's step with every array at a fixed address, as an engine keeps them."""

    def __init__(self, path: str, num_heads: int, query_len: int) -> None:
        self.path, self.num_heads, self.query_len = path, num_heads, query_len
        rng = np.random.default_rng(1)
        fmt = "bf16" if path == "bf16" else "fp8"
        self.cache = cases.lay_out(cases.make_rows(rng, PAGES * 64, fmt), 64, "padded")
        self.sink = cases.make_sink(rng, num_heads)
        self.config = engine.config(
            library.sparse_mla,
            num_heads=num_heads,
            fp8=path != "bf16",
            path=path,
            decode_threshold=query_len,
        )
        self.layer = sparse_mla.SparseMLA(self.config)
        self.tokens = ROWS * query_len
        batch = decode_batch(ROWS, 0, query_len)
        names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
        self.arrays = {name: gpu.put(getattr(batch, name)) for name in names}
        self.q = gpu.put(np.zeros((self.tokens, num_heads, 576), ref.BF16))
        self.topk = gpu.put(np.full((self.tokens, 48), -1, np.int32))
        self.device_cache = device.Journey().put(self.cache)
        self.device_sink = gpu.put(self.sink)

    def load(self, real: int, seed: int) -> engine.Step:
        """New contents in the fixed arrays; -> the step, for the reference."""
        batch = decode_batch(real, seed, self.query_len)
        rng = np.random.default_rng([seed, 1])
        q = cases.random_bf16(rng, self.tokens, self.num_heads, 576)
        step = engine.Step(batch, q, cases.causal_topk(rng, batch, 48), self.cache, self.sink)
        for name, x in self.arrays.items():
            x.copy_(gpu.put(getattr(batch, name)))
        self.q.copy_(gpu.put(q))
        self.topk.copy_(gpu.put(step.topk_indices))
        return step

    def build(self, builder, batch):
        return builder.build(batch.common(sparse_mla, **self.arrays))

    def forward(self, metadata, **results):
        return self.layer.forward(
            self.q,
            self.device_cache,
            self.topk,
            metadata,
            attn_sink=self.device_sink,
            **results,
        )


@pytest.mark.parametrize("keep_results", [False, True], ids=["torch allocates", "out="])
@pytest.mark.parametrize(
    ("path", "num_heads", "query_len"),
    [
        ("mixed", 16, 1),
        ("mixed", 128, 2),
        ("separate", 64, 1),
        ("separate", 33, 3),
        ("direct", 16, 1),
        ("bf16", 128, 1),
    ],
)
def test_a_captured_decode_batch_replays_after_build(path, num_heads, query_len, keep_results):
    """A build before each replay writes the metadata that the graph reads: other lengths, other
    pages, fewer real requests."""
    fixed = Engine(path, num_heads, query_len)
    builder = sparse_mla.MetadataBuilder(fixed.config)
    step = fixed.load(ROWS, 1)
    metadata = fixed.build(builder, step.batch)
    given = {}
    if keep_results:
        given["out"] = gpu.put(np.zeros((fixed.tokens, num_heads, 512), ref.BF16))
        given["lse"] = gpu.put(np.zeros((fixed.tokens, num_heads), np.float32))
    graph, results = capture(lambda: fixed.forward(metadata, **given))
    for seed, real in ((2, ROWS), (3, 5), (4, 1)):
        step = fixed.load(real, seed)
        fixed.build(builder, step.batch)
        for x in results:
            x.view(torch.uint8).fill_(0xFF)
        graph.replay()
        got = gpu.values(tuple(results))
        fresh = fixed.build(sparse_mla.MetadataBuilder(fixed.config), step.batch)
        assert_same_values(got, gpu.values(fixed.forward(fresh)), f"{real} of {ROWS} requests")
        want = step.reference(path, fixed.cache, decode_threshold=query_len)
        assert_within_bounds(want, dict(zip(("out", "lse"), got, strict=True)))


def test_a_build_inside_a_capture_is_refused():
    """The graph would replay the build's copy with stale contents. The refusal harms neither the
    capture nor the builder."""
    fixed = Engine("mixed", 16, 1)
    builder = sparse_mla.MetadataBuilder(fixed.config)
    step = fixed.load(ROWS, 1)
    metadata = fixed.build(builder, step.batch)
    want = gpu.values(fixed.forward(metadata))
    seen = []

    def run():
        if torch.cuda.is_current_stream_capturing():
            with pytest.raises(ValueError, match=r"captur"):
                fixed.build(builder, step.batch)
            seen.append(True)
        return fixed.forward(metadata)

    graph, results = capture(run)
    assert seen == [True]
    graph.replay()
    assert_same_values(gpu.values(results), want)
    assert_same_values(gpu.values(fixed.forward(fixed.build(builder, step.batch))), want)
