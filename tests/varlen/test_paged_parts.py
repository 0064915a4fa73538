"""paged_attention: a request's keys in parts, which are merged (num_splits)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference as ref
from borders import constants, on_any_threads
from cases import int32
from dense_cases import Mask
from device import ON_CUDA
from helpers import assert_same_bits, assert_within_bounds
from library import ISAS, sparse_mla
from paged_cases import LAYOUTS, Paged, assert_same, check
from varlen_cases import F16

import sparse_mla as package

attend = sparse_mla.paged_attention
CAUSAL = Mask(causal=True)
PART_KEYS = constants("cpu/attention/mha_parts.c")["PART_KEYS"]
SPLITS = [0, 2, 3, 64]


@pytest.fixture(params=[None] if ON_CUDA else ISAS)
def isa(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setenv("SPARSE_MLA_CPU_ISA", request.param)


def part_of(case: Paged, b: int, keys: range) -> dict:
    """One part of a request, as a call of its own: the request ends where the part does, and its
    padding is what lies in front of the part."""
    q, k_cache, v_cache, table, _ = case.arguments()
    rows = slice(sum(case.query_lens[:b]), sum(case.query_lens[: b + 1]))
    pad = case.pads[b] + keys.start
    options = {"softmax_scale": case.softmax_scale, "num_splits": 1}
    options["cache_leftpad"] = int32(pad)
    options["cu_seqlens_q"] = int32(0, case.query_lens[b])
    out = np.empty((case.query_lens[b], case.heads, case.dims[1]), np.float32)
    lens = int32(pad + len(keys))
    out, lse = attend(q[rows], k_cache, v_cache, table[b : b + 1], lens, out=out, **options)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}


@pytest.mark.parametrize("num_splits", [2, 3, 7, 64])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300, 700])
@pytest.mark.parametrize("sink", [False, True])
def test_parts_are_ranges_that_are_merged(num_splits, length, sink):
    """ceil(ceil(n_k / n) / 64) * 64 keys each, from key 0 on."""
    case = Paged([2, 1], [length, 9], 4, 2, (64, 64), num_splits=num_splits, sink=sink, page_size=3)
    got = check(case)
    part = -(-length // num_splits)
    share = -(-part // 64) * 64
    keys = [range(at, min(at + share, length)) for at in range(0, length, share)]
    parts = [part_of(case, 0, x) for x in keys]
    outs, lses = [x["out"] for x in parts], [x["lse"] for x in parts]
    sinks = {"attn_sink": case.attn_sink} if sink else {}
    out, lse = (np.empty(x.shape, x.dtype) for x in (got["out"][:2], got["lse"][:2]))
    sparse_mla.merge_attn_partials(outs, lses, out=out, lse=lse, **sinks)
    if ON_CUDA:  # it sums the parts of a request as it likes
        merged = {
            name: np.concatenate([x, got[name][2:]]) for name, x in (("out", out), ("lse", lse))
        }
        assert_within_bounds(case.reference(), merged)
    else:
        assert_same({"out": out, "lse": lse}, {name: got[name][:2] for name in got})


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize(
    "fields",
    [
        {"dims": (64, 64), "kv_heads": 2},
        {"dims": (80, 80), "kv_heads": 1, "q_type": "fp16", "kv_type": "fp16"},
        {"dims": (128, 128), "kv_heads": 8, "out_type": np.dtype(np.float32)},
        {"dims": (40, 24), "kv_heads": 4, "q_type": "e4m3", "kv_type": "e4m3", "descales": "rows"},
        {"dims": (64, 512), "kv_heads": 1, "has_qv": True},
        {"dims": (576, 512), "kv_heads": 1, "softcap": 5.0},
        {"dims": (64, 64), "kv_heads": 2, "mask": Mask(causal=True, window=(100, 0))},
        {"dims": (64, 64), "kv_heads": 2, "mask": Mask(chunk=200)},
        {
            "dims": (64, 64),
            "kv_heads": 2,
            "mask": Mask(causal=True, cp=(1, 2, 16)),
            "leftpad": None,
        },
        {"dims": (64, 64), "kv_heads": 2, "std": 6.0, "holes": 0.3},
    ],
)
def test_masks_types_and_sizes(fields, num_splits, isa):
    """Few rows over many keys, many rows, and requests without keys or queries."""
    lens = [1, 3, 0, 70, 1], [700, 150, 9, 90, 0]
    common = {"mask": CAUSAL, "leftpad": [9, 0, 1, 0, 3], "sink": True, "padding": 2}
    check(Paged(*lens, 8, num_splits=num_splits, **(common | fields)))


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("q_type", ["bf16", "fp16"])
def test_long_requests(num_splits, q_type):
    """As many keys as the plan begins to cut at, and beside such requests shorter ones, whose rows
    share tiles."""
    keys = [2 * PART_KEYS - 1, 1, 2 * PART_KEYS, 70, 3, 5 * PART_KEYS + 77, 0, 9]
    case = Paged(
        [1, 1, 2, 1, 1, 1, 1, 2], keys, 4, 2, (64, 64), q_type, q_type, mask=CAUSAL, sink=True,
        num_splits=num_splits, page_size=64,
    )  # fmt: skip
    check(case)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("mask", [CAUSAL, Mask(causal=True, window=(300, 0))])
def test_no_bit_depends_on_pages(num_splits, mask):
    case = Paged([1, 2], [2500, 300], 8, 2, (64, 64), num_splits=num_splits, mask=mask, holes=0.0)
    want = check(case)
    for page_size in (1, 3, 64, 1000):
        assert_same(dataclasses.replace(case, page_size=page_size).run(attend), want)
    for layout in LAYOUTS:  # on CUDA, rows that are not aligned are another kernel's
        again = dataclasses.replace(
            case, layout=layout, is_spread=not ON_CUDA, has_slots=layout == "row"
        )
        assert_same(again.run(attend), want)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 64] if ON_CUDA else [1, *SPLITS])
def test_a_request_does_not_depend_on_others(num_splits):
    """Alone and in a batch; with num_splits 1 also without its own other queries. Where a GPU
    chooses parts, it looks at the batch."""
    keys = [2 * PART_KEYS + 9, 70, 4 * PART_KEYS, 1, 3 * PART_KEYS]
    case = Paged([1, 3, 2, 1, 17], keys, 8, 2, (64, 64), mask=CAUSAL, num_splits=num_splits)
    got = check(case)
    q, k_cache, v_cache, table, lens = case.arguments()
    for b, count in enumerate(case.query_lens):
        first = sum(case.query_lens[:b])
        for skipped in range(count if num_splits == 1 else 1):
            rows = slice(first + skipped, first + count)
            options = case.options | {"cu_seqlens_q": int32(0, count - skipped)}
            out, lse = attend(
                q[rows], k_cache, v_cache, table[b : b + 1], lens[b : b + 1], **options
            )
            assert_same_bits(out, got["out"][rows], "out")
            assert_same_bits(lse, got["lse"][rows], "lse")


def run(case: Paged) -> dict[str, np.ndarray]:
    return case.run(package.paged_attention)


@pytest.mark.skipif(ON_CUDA, reason="the CPU's threads")
@pytest.mark.parametrize("num_splits", SPLITS)
def test_any_number_of_threads(num_splits):
    keys = [5, 6 * PART_KEYS, 70, 1, 2 * PART_KEYS] + [3] * 30
    case = Paged(
        [1, 1, 90, 1, 4] + [1] * 30, keys, 8, 2, (64, 64), mask=CAUSAL, num_splits=num_splits
    )
    assert_within_bounds(case.reference(), on_any_threads(run, case))


@pytest.mark.skipif(ON_CUDA, reason="the CPU holds so many partial rows at once")
def test_partial_rows_beyond_the_memory_that_is_taken():
    """Prefills whose partial rows are computed in several turns."""
    most = 64 << 20
    case = Paged([300, 80], [400, 90], 16, 1, (8, 512), mask=CAUSAL, num_splits=64)
    assert 2 * most < 380 * 16 * 64 * 513 * 4
    check(case)


@pytest.mark.parametrize("num_splits", SPLITS)
def test_values_that_are_not_finite(num_splits, isa):
    """An infinite value, and a NaN key that only the last query sees, in a later part."""
    case = Paged([2], [300], 4, 2, (64, 64), mask=CAUSAL, num_splits=num_splits, has_slots=True)
    case.v[299, 0, 3] = np.inf
    case.v[17, 1, 5] = -np.inf
    case.put_keys()
    got = case.run(attend)
    out = np.asarray(got["out"], np.float32)
    assert np.isposinf(out[1, :2, 3]).all()
    assert np.isneginf(out[:, 2:, 5]).all()
    assert np.isfinite(np.delete(out[:, :2], 3, 2)).all()
    assert np.isfinite(np.asarray(got["lse"])).all()
    case.k[299, 0, 0] = np.nan
    case.put_keys()
    got = case.run(attend)
    assert np.isnan(np.asarray(got["lse"])[1, :2]).all()
    assert np.isfinite(np.asarray(got["lse"])[0]).all() or ON_CUDA


@pytest.mark.parametrize("num_splits", SPLITS)
def test_a_heavy_key_in_the_last_part(num_splits):
    case = Paged([1], [700], 8, 2, (128, 128), mask=CAUSAL, std=0.1, num_splits=num_splits)
    case.k[699] = 40 * np.sign(np.asarray(case.q[0, :2], np.float32))
    case.put_keys()
    check(case)


def test_half_results_are_rounded_once():
    """Parts are fp32, and so is their sum until it is fp16 or bf16."""
    for kind, wanted in (("fp16", F16), ("bf16", ref.BF16)):
        case = Paged([1], [300], 4, 2, (64, 64), kind, kind, num_splits=3)
        wide = dataclasses.replace(case, out_type=np.dtype(np.float32)).run(attend)
        got = check(case)
        assert got["out"].dtype == wanted
        assert_same_bits(got["out"], wide["out"].astype(wanted))
        assert_same_bits(got["lse"], wide["lse"])
