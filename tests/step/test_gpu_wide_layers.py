"""Layers of DeepSeek V4 whose prefills are gathered to bf16 where that saves time, on Hopper.

A builder with a workspace and without a path chooses for each step. Rows of fp8_v4 lose nothing as
bf16, so results are held to the bounds of the caches' own keys on both paths.
"""

import device
import gpu
import numpy as np
import pytest
import v4_attend_cases as attend
from gpu import capture, torch
from helpers import BESIDE_TESTS, assert_kernels, assert_same_bits, assert_within_bounds
from library import sparse_mla as library

import sparse_mla

v4 = sparse_mla.v4
NAMES = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")


def builder_of(case: attend.Case):
    return library.v4.MetadataBuilder(case.config, workspace=attend.make_workspace(case.config))


def large_case(ratio: int, heads: int, seed=0) -> attend.Case:
    """64 heads take twice as many tokens as 128 until a gather pays."""
    if heads == 128:
        return attend.make_large_case(ratio, seed=seed)
    return attend.make_case(
        ratio, None, (1, *4 * (230,)), (40, 0, 7, 33, 60), heads=heads, seed=seed,
        max_num_batched_tokens=1024,
    )  # fmt: skip


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_large_prefills_are_gathered(ratio, heads):
    case = large_case(ratio, heads)
    builder = builder_of(case)
    assert case.build(builder).path == "separate"
    got = case.run(builder)
    tokens = case.batch.num_tokens
    assert_within_bounds(case.reference(), {name: x[:tokens] for name, x in got.items()})
    again = case.run(builder)
    for name in got:
        assert_same_bits(again[name][:tokens], got[name][:tokens], name)


@pytest.mark.parametrize("ratio", attend.RATIOS)
def test_small_prefills_are_not(ratio):
    case = attend.make_case(ratio, None, heads=64)
    assert case.build(builder_of(case)).path == "direct"
    got, want = case.run(builder_of(case)), case.run()
    for name in want:
        assert_same_bits(got[name], want[name], name)


SETUP = f"""{BESIDE_TESTS}
import v4_attend_cases as attend
from library import sparse_mla

def call(has_workspace):
    case = attend.make_case(
        4, None, 3 * (220,), (0, 5, 60), heads=128, padding=0, max_num_batched_tokens=1024)
    workspace = attend.make_workspace(case.config) if has_workspace else None
    case.run(sparse_mla.v4.MetadataBuilder(case.config, workspace=workspace))
"""


def test_which_kernel_runs():
    """660 tokens of two tiles are ten waves of 132 SMs, so no rest of them is split."""
    text = ".cu, 64 heads per CTA (tokens 660, splits 1)"
    calls = [("True", f"attention_bf16_sm90{text}"), ("False", f"attention_fp8_sm90{text}")]
    assert_kernels("sparse_attention", SETUP, calls)


def arrays_of(case: attend.Case) -> dict:
    """All arrays of a layer with an indexer."""
    found = {name: getattr(case.batch, name) for name in NAMES}
    found |= {"table": case.batch.compressed[4], "q": case.q, "topk": case.topk, "sink": case.sink}
    found |= {"swa": case.swa.cache, "compressed": case.compressed.cache}
    return {name: gpu.put(np.ascontiguousarray(x)) for name, x in found.items()}


def test_a_captured_prefill_replays_after_builds():
    """Replays have the bits of eager calls for whatever lies in the arrays."""
    steps = [large_case(4, 128, seed) for seed in range(3)]
    config, tokens = steps[0].config, steps[0].batch.num_tokens
    fixed = arrays_of(steps[0])
    layer = v4.SparseMLA(config, 4, v4.Weights(None, None, fixed["sink"], None, None))
    caches = v4.Caches(fixed["swa"], fixed["compressed"])
    workspaces = [gpu.put(attend.make_workspace(config)) for _ in range(2)]
    builder, other = (v4.MetadataBuilder(config, workspace=x) for x in workspaces)

    def build(builder, step):
        common = step.batch.common(sparse_mla, **{name: fixed[name] for name in NAMES})
        return builder.build(common, compressed={4: fixed["table"]})

    def run(metadata):
        return layer.attend(fixed["q"], caches, metadata, fixed["topk"])

    metadata = build(builder, steps[0])
    assert metadata.path == "separate"
    graph, results = capture(lambda: run(metadata))
    for step in [*steps, steps[0]]:
        for name, x in arrays_of(step).items():
            fixed[name].copy_(x)
        build(builder, step)
        for x in results:
            x.view(torch.uint8).fill_(0xFF)
        graph.replay()
        want = run(build(other, step))
        for x, y in zip(results, want, strict=True):
            assert torch.equal(x[:tokens].view(torch.uint8), y[:tokens].view(torch.uint8))
        got = dict(zip(("out", "lse"), (device.host(x)[:tokens] for x in results), strict=True))
        assert_within_bounds(step.reference(), got)
