"""sparse_mla.v4 on the GPU: captured layers replay after builds, and steps on streams of their own.

The operators' tests on the GPU run test_v4_builder.py and test_v4_attend.py there, too.
"""

from __future__ import annotations

import device
import gpu
import numpy as np
import pytest
import reference as ref
import reference_v4 as plan
import v4_attend_cases as attend
from gpu import assert_same_values, capture, torch
from helpers import assert_within_bounds

import sparse_mla

v4 = sparse_mla.v4
NAMES = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
TOKENS, REQUESTS = 10, 5


class Engine:
    """One layer with every array at a fixed address, as an engine keeps them."""

    def __init__(self, ratio: int, formats=("fp8_v4", None)) -> None:
        self.ratio = ratio
        self.first = self.case(REQUESTS, 0, formats)
        self.formats = formats
        self.config = self.first.config
        cache = device.Journey()
        extra = self.first.compressed
        self.caches = v4.Caches(
            cache.put(self.first.swa.cache), None if extra is None else cache.put(extra.cache)
        )
        self.sink = gpu.put(np.zeros(6, np.float32))
        self.layer = v4.SparseMLA(self.config, ratio, v4.Weights(None, None, self.sink, None, None))
        self.arrays = {name: gpu.put(getattr(self.first.batch, name)) for name in NAMES}
        self.tables = {r: gpu.put(x) for r, x in self.first.batch.compressed.items()}
        self.q = gpu.put(self.first.q)
        self.topk = None if self.first.topk is None else gpu.put(self.first.topk)

    def case(self, real: int, seed: int, formats) -> attend.Case:
        """`real` decodes of two tokens, padded with empty ones: always the same shapes."""
        rng = np.random.default_rng([seed, real])
        lens = [2] * real + [0] * (REQUESTS - real)
        contexts = [int(n) for n in rng.integers(0, 300, real)] + [0] * (REQUESTS - real)
        case = attend.make_case(
            self.ratio, None, lens, contexts, formats=formats, padding=TOKENS - 2 * real, seed=seed
        )
        batch = case.batch
        batch.block_table = widen(batch.block_table, 200)
        batch.compressed = {r: widen(x, 60) for r, x in batch.compressed.items()}
        batch.max_seq_len = attend.SIZES.max_model_len
        return case

    def load(self, real: int, seed: int) -> attend.Case:
        """New contents in the fixed arrays; the caches stay."""
        case = self.case(real, seed, self.formats)
        case.swa, case.compressed, case.sink = (
            self.first.swa,
            self.first.compressed,
            self.first.sink,
        )
        for name, x in self.arrays.items():
            x.copy_(gpu.put(getattr(case.batch, name)))
        for ratio, x in self.tables.items():
            x.copy_(gpu.put(case.batch.compressed[ratio]))
        self.q.copy_(gpu.put(case.q))
        self.sink[: len(case.sink)].copy_(gpu.put(case.sink))
        if self.topk is not None:
            self.topk.copy_(gpu.put(case.topk))
        return case

    def build(self, builder, case):
        common = case.batch.common(sparse_mla, **self.arrays)
        return builder.build(common, compressed=self.tables)

    def attend(self, metadata, **options):
        return self.layer.attend(self.q, self.caches, metadata, self.topk, **options)


def widen(table: np.ndarray, columns: int) -> np.ndarray:
    wide = np.full((REQUESTS, columns), -1, np.int32)
    wide[:, : table.shape[1]] = table
    return wide


@pytest.mark.parametrize("formats", [("fp8_v4", None), ("bfloat16", "fp8_v41")], ids=str)
@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_a_captured_layer_replays_after_builds(ratio, formats):
    """A thousand replays, each after a build of another step, have the bits of eager calls."""
    fixed = Engine(ratio, formats)
    builder, other = v4.MetadataBuilder(fixed.config), v4.MetadataBuilder(fixed.config)
    metadata = fixed.build(builder, fixed.load(REQUESTS, 1))
    given = {
        "out": gpu.put(np.zeros((len(fixed.q), 3, 512), ref.BF16)),
        "lse": gpu.put(np.zeros((len(fixed.q), 3), np.float32)),
    }
    graph, results = capture(lambda: fixed.attend(metadata, **given))
    steps = [fixed.case(real, seed, formats) for seed, real in enumerate((5, 3, 1, 5, 4))]
    for i in range(1000):
        if i % 100 < len(steps):
            step = fixed.load(len([n for n in steps[i % 100].batch.query_lens if n]), i % 100)
        fixed.build(builder, step)
        for x in results:
            x.view(torch.uint8).fill_(0xFF)
        graph.replay()
        want = fixed.attend(fixed.build(other, step))
        for x, y in zip(results, want, strict=True):
            assert torch.equal(x[:TOKENS].view(torch.uint8), y[:TOKENS].view(torch.uint8)), i
        if i < len(steps):
            got = dict(zip(("out", "lse"), (x[:TOKENS] for x in gpu.values(results)), strict=True))
            assert_within_bounds(step.reference(), got)


def test_a_captured_warm_up_gives_zeros():
    fixed = Engine(4)
    graph, results = capture(lambda: fixed.attend(None))
    for x in results:
        x.view(torch.uint8).fill_(0xFF)
    graph.replay()
    assert not any(x.view(torch.uint8).any() for x in results)


@pytest.mark.parametrize("late", ["builds", "layers", "all"])
@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_steps_on_streams_of_their_own(ratio, path, late):
    """A build on one stream, its layer on another, the next build on a third: the device runs them
    in this order, whichever stream is late."""
    placed = []
    for seed, lens in enumerate([(1, 2, 30), (1,) * 12, (2, 5, 40, 3), (1, 1)]):
        case = attend.make_case(ratio, path, lens, [9 * seed + 3] * len(lens), seed=seed)
        arrays = {name: gpu.put(getattr(case.batch, name)) for name in NAMES}
        tables = {r: gpu.put(x) for r, x in case.batch.compressed.items()}
        journey = device.Journey()
        extra = None if case.compressed is None else journey.put(case.compressed.cache)
        caches = v4.Caches(journey.put(case.swa.cache), extra)
        topk = None if case.topk is None else gpu.put(case.topk)
        weights = v4.Weights(None, None, gpu.put(case.sink), None, None)
        layer = v4.SparseMLA(case.config, ratio, weights)
        common = case.batch.common(sparse_mla, **arrays)
        placed.append((case, layer, common, tables, (gpu.put(case.q), caches), topk))

    def run(builder, layer, common, tables, arrays, topk, streams=(None, None)):
        with torch.cuda.stream(streams[0]):
            if streams[0] is not None and late != "layers":
                gpu.delay()
            metadata = builder.build(common, compressed=tables)
        with torch.cuda.stream(streams[1]):
            if streams[1] is not None and late != "builds":
                gpu.delay()
            return layer.attend(*arrays, metadata, topk)

    config = placed[0][0].config
    want = [gpu.values(run(v4.MetadataBuilder(config), *one[1:])) for one in placed]
    builder = v4.MetadataBuilder(config)
    run(builder, *placed[0][1:])
    torch.cuda.synchronize()
    results = []
    for one in placed:
        streams = torch.cuda.Stream(), torch.cuda.Stream()
        results.append(run(builder, *one[1:], streams=streams))
    torch.cuda.synchronize()
    for got, expected, one in zip(results, want, placed, strict=True):
        assert_same_values(gpu.values(got), expected, path)
        tokens = one[0].batch.num_tokens
        got = {name: x[:tokens] for name, x in zip(("out", "lse"), gpu.values(got), strict=True)}
        assert_within_bounds(one[0].reference(), got)


def test_lists_are_those_of_the_cpu():
    """Metadata from the GPU's kernel, entry by entry, for pages that do not exist, too."""
    sizes = plan.Sizes(decode_threshold=2)
    rng = np.random.default_rng(8)
    options = sizes.options() | {"topk_tokens": 16}
    there = v4.MetadataBuilder(v4.Config(2, **options, device="cuda"))
    here = v4.MetadataBuilder(v4.Config(2, **options))
    for _ in range(50):
        batch = plan.random_batch(rng, sizes)
        arrays = {name: gpu.put(getattr(batch, name)) for name in NAMES}
        tables = [{r: gpu.put(x) for r, x in t.items()} for t in (batch.compressed, batch.states)]
        got = there.build(
            batch.common(sparse_mla, **arrays), compressed=tables[0], states=tables[1]
        )
        want = here.build(
            batch.common(sparse_mla), compressed=batch.compressed, states=batch.states
        )
        for name in ("positions", "is_valid", "swa_indices", "swa_lens", "req_id_per_token"):
            assert np.array_equal(device.host(getattr(got, name)), getattr(want, name)), name
        for ratio, layer in want.layers.items():
            for name in ("slot_mapping", "state_slot_mapping", "context_lens", "decode_indices",
                         "decode_lens", "prefill_indices"):  # fmt: skip
                x, y = getattr(got.layers[ratio], name), getattr(layer, name)
                assert (x is None and y is None) or np.array_equal(device.host(x), y), name
