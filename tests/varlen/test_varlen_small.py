"""varlen_attention of many small requests, which share tiles on a CPU: each has the bits that it
has alone, whatever its neighbours are, on every instruction set."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import reference as ref
from device import ON_CUDA
from helpers import assert_same_bits
from library import ISAS, sparse_mla

pytestmark = pytest.mark.skipif(ON_CUDA, reason="the CPU's tiles and instruction sets")

UNUSUAL = (np.nan, np.inf, -np.inf, 2.0**60, 1e-40, -0.0)


def starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def rows(rng, count: int, heads: int, dim: int, dtype, *, has_unusual: bool) -> np.ndarray:
    x = rng.standard_normal((count, heads, dim)).astype(np.float32)
    if has_unusual:
        at = rng.random(x.shape) < 1e-3
        x[at] = rng.choice(UNUSUAL, at.sum())
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def small_batch(kind: str, group: int, *, has_unusual: bool, seed: int) -> tuple[dict, dict]:
    """Requests of 0 to 20 queries, and as many keys or a few more; scales differ between some."""
    rng = np.random.default_rng([seed, group])
    dtype = {"bf16": ref.BF16, "fp16": np.float16, "e4m3": ref.E4M3}[kind]
    query_lens = rng.choice([0, 1, 1, 1, 2, 3, 4, 7, 15, 20], 60)
    key_lens = query_lens + rng.choice([0, 0, 0, 1, 13], 60)
    tokens, keys = query_lens.sum(), key_lens.sum()
    arrays = {
        "q": rows(rng, tokens, 2 * group, 72, dtype, has_unusual=has_unusual),
        "k": rows(rng, keys, 2, 72, dtype, has_unusual=has_unusual),
        "v": rows(rng, keys, 2, 40, dtype, has_unusual=has_unusual),
    }
    scales = {}
    if kind == "e4m3":
        names = ("q_descale", "k_descale", "v_descale")
        scales = {name: rng.choice([0.5, 0.5, 0.7], (60, 1)).repeat(2, 1) for name in names}
    lengths = {"query": starts(query_lens), "key": starts(key_lens)}
    return arrays | lengths, {name: x.astype(np.float32) for name, x in scales.items()}


def attend(arrays: dict, scales: dict, options: dict) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = (arrays[name] for name in "qkv")
    return sparse_mla.varlen_attention(
        q, k, v, arrays["query"], arrays["key"], softmax_scale=0.12, **scales, **options
    )


def alone(arrays: dict, scales: dict, options: dict, req: int) -> tuple[np.ndarray, np.ndarray]:
    (first, end), (first_key, end_key) = (
        list(pairwise(arrays[name]))[req] for name in ("query", "key")
    )
    taken = {
        "q": arrays["q"][first:end],
        "k": arrays["k"][first_key:end_key],
        "v": arrays["v"][first_key:end_key],
        "query": starts([end - first]),
        "key": starts([end_key - first_key]),
    }
    return attend(taken, {name: x[req : req + 1] for name, x in scales.items()}, options)


MASKS = {
    "all": {},
    "causal": {"causal": True},
    "one key": {"causal": True, "window_size": (0, -1)},
    "window": {"causal": True, "window_size": (2, -1)},
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("has_unusual", [False, True], ids=["usual", "unusual"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("group", [1, 3])
def test_small_requests_are_alone(group, kind, mask, has_unusual, isa, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    arrays, scales = small_batch(kind, group, has_unusual=has_unusual, seed=len(mask))
    sinks = np.linspace(-2, 2, 2 * group, dtype=np.float32)
    options = MASKS[mask] | ({"attn_sink": sinks} if group == 3 else {"softcap": 20.0})
    out, lse = attend(arrays, scales, options)
    for req, (first, end) in enumerate(pairwise(arrays["query"])):
        if end > first:
            want_out, want_lse = alone(arrays, scales, options, req)
            assert_same_bits(out[first:end], want_out, f"out of request {req}")
            assert_same_bits(lse[first:end], want_lse, f"lse of request {req}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mask", ["causal", "one key"])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_one_key_is_its_value_among_others(kind, mask, isa, monkeypatch):
    """Subnormal values, too. A negative zero is a positive one, as in every sum."""
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    arrays, _ = small_batch(kind, 1, has_unusual=False, seed=9)
    v = arrays["v"]
    v[::2] = np.float32(3e-40 if kind == "bf16" else 3e-7)
    v[::3, :, ::5] = -0.0
    out, lse = attend(arrays, {}, MASKS[mask])
    q, k = (arrays[name].astype(np.float64) for name in "qk")
    for (first, end), (first_key, end_key) in zip(
        pairwise(arrays["query"]), pairwise(arrays["key"]), strict=True
    ):
        for token in range(first, end):
            key = end_key - (end - token)
            if mask == "one key" or key == first_key:
                assert np.array_equal(out[token], v[key])
                assert not np.signbit(out[token][v[key] == 0]).any()
                want = 0.12 * (q[token] * k[key]).sum(-1)
                assert np.allclose(lse[token], want, rtol=2.0**-23, atol=1e-12)
