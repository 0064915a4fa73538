"""paged_attention on a GPU: keys in parts, in rows that lie in the workspace (num_splits)."""

from __future__ import annotations

import re

import device
import numpy as np
import pytest
from dense_cases import Mask
from gpu import capture, torch
from paged_cases import Paged

import sparse_mla

CAUSAL = Mask(causal=True)


def sent(case: Paged):
    """-> the case's arguments and options on the GPU"""
    journey = device.Journey()
    options = {name: journey.put(x) for name, x in case.options.items()}
    return [journey.put(x) for x in case.arguments()], options


def size_of(case: Paged, num_splits: int) -> int:
    """Bytes of fp32 rows, of which each has two floats more."""
    least = 4 * case.tokens * case.heads * num_splits * (case.dims[1] + 2)
    options = {"num_splits": num_splits, "head_dim_v": case.dims[1], "device": "cuda"}
    assert sparse_mla.attention_workspace_size(case.tokens, case.heads, 1, **options) >= least + 15
    return least


def as_arrays(results) -> list[np.ndarray]:
    return [x.float().cpu().numpy() for x in results]


@pytest.mark.parametrize("num_splits", [2, 64])
def test_parts_need_their_workspace(num_splits):
    """A byte less is refused, and nothing is written. With 15 more any address serves."""
    case = Paged([1, 3], [700, 90], 8, 2, (64, 64), mask=CAUSAL, num_splits=num_splits)
    arguments, options = sent(case)
    out = torch.full((4, 8, 64), 7.0, dtype=torch.bfloat16, device="cuda")
    least = size_of(case, num_splits)
    workspace = torch.empty(least + 30, dtype=torch.uint8, device="cuda")
    text = f"paged_attention: `workspace` must have at least {least} bytes, got {least - 1}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        given = workspace[: least - 1]
        sparse_mla.paged_attention(*arguments, **options, out=out, workspace=given)
    assert bool((out == 7).all())
    want = sparse_mla.paged_attention(*arguments, **options)
    for given in (workspace[:least], workspace[1 : least + 16], workspace[15 : least + 30]):
        got = sparse_mla.paged_attention(*arguments, **options, workspace=given)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("num_splits", [0, 3])
def test_rows_behind_the_last_request(num_splits):
    """They stay in arrays that the caller gave, and in new ones they are 0 and -inf."""
    case = Paged(
        [1, 2], [3000, 90], 4, 2, (80, 80), mask=CAUSAL, num_splits=num_splits, padding=3, sink=True
    )
    arguments, options = sent(case)
    out = torch.full((6, 4, 80), 7.0, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((6, 4), 5.0, device="cuda")
    new = sparse_mla.paged_attention(*arguments, **options)
    sparse_mla.paged_attention(*arguments, **options, out=out, lse=lse)
    assert bool((out[3:] == 7).all()) and bool((lse[3:] == 5).all())
    assert torch.equal(out[:3], new[0][:3]) and torch.equal(lse[:3], new[1][:3])
    assert bool((new[0][3:] == 0).all()) and bool((new[1][3:] == -torch.inf).all())


@pytest.mark.parametrize("dims", [(80, 80), (192, 128), (576, 512)])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
def test_one_long_request_uses_the_device(dims, kind):
    """It is cut by itself: without room for parts the bits are other ones, and as good."""
    case = Paged([1], [20_000], 8, 1, dims, "bf16" if kind == "e4m3" else kind, kind, mask=CAUSAL)
    arguments, options = sent(case)
    cut = sparse_mla.paged_attention(*arguments, **options)
    small = torch.empty(16, dtype=torch.uint8, device="cuda")
    whole = sparse_mla.paged_attention(*arguments, **options, workspace=small)
    assert not torch.equal(cut[0], whole[0])
    for x, y in zip(as_arrays(cut), as_arrays(whole), strict=True):
        assert np.abs(x - y).max() < 4e-3


def test_parts_in_a_graph():
    """Replays with other lengths, whatever is in the workspace."""
    case = Paged([1, 1], [1500, 40], 8, 2, (80, 80), mask=CAUSAL, num_splits=5)
    arguments, options = sent(case)
    lens = arguments[4]
    workspace = torch.empty(size_of(case, 5), dtype=torch.uint8, device="cuda")
    out = torch.empty((2, 8, 80), dtype=torch.bfloat16, device="cuda")
    given = {"out": out, "lse": torch.empty((2, 8), device="cuda"), "workspace": workspace}

    def attend():
        sparse_mla.paged_attention(*arguments, **options, **given)

    graph = capture(attend)[0]
    for length in (1, 700, 1500, 0):
        lens[:1] = length + int(case.pads[0])
        workspace.random_(0, 256)
        graph.replay()
        replayed = out.clone()
        attend()
        assert torch.equal(replayed, out)
