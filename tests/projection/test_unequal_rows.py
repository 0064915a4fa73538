"""Projections of tokens whose values have very different sizes, in any order: tiny and huge tokens
take other paths than those beside them, and each result is that of fp64."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import test_grouped_projection as grouped
from library import sparse_mla

SIZES = (1.0, 1e-39, 0.0, 1e-36, 1e-25, 1e20, 1e28)


def draw_rows(rng, *shape: int) -> np.ndarray:
    """Tokens [T, ...] of random sizes."""
    size = rng.choice(SIZES, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return ref.to_bf16((rng.normal(0, 1, shape) * size).astype(np.float32))


def draw_weight(rng, *shape: int) -> np.ndarray:
    """Values that make results of the tiniest tokens normal numbers."""
    return ref.to_bf16(rng.normal(0, 1e5, shape).astype(np.float32))


def make_keys(rng, T):
    x, weight = draw_rows(rng, T, 3, 128), draw_weight(rng, 512, 3, 128)
    return sparse_mla.k_up_proj(x, weight), ref.k_up_proj(x, weight)


def make_values(rng, T):
    x, weight = draw_rows(rng, T, 3, 512), draw_weight(rng, 512, 3, 128)
    return sparse_mla.v_up_proj(x, weight), ref.v_up_proj(x, weight)


def make_both(rng, T):
    x, weight = draw_rows(rng, T, 512), draw_weight(rng, 512, 200)
    return sparse_mla.kv_up_proj(x, weight), ref.kv_up_proj(x, weight)


def make_groups(rng, T):
    x, weight = draw_rows(rng, T, 2, 256), draw_weight(rng, 2, 130, 256)
    value, magnitude = ref.grouped_output_projection(x, None, weight, None)
    got = sparse_mla.grouped_output_projection(x, None, weight, None)
    return got, (value, 2.0**-8 * np.abs(value) + 2.0**-16 * magnitude)


@pytest.mark.parametrize("T", [2, 5, 13, 66])
@pytest.mark.parametrize("make", [make_keys, make_values, make_both, make_groups])
def test_bf16(make, T):
    for seed in range(6):
        got, (want, tolerance) = make(np.random.default_rng(seed), T)
        assert ref.worst_ratio(np.asarray(got), want, tolerance) <= 1, seed


@pytest.mark.parametrize("T", [2, 5, 13, 66])
def test_e4m3(T):
    """Scales of tokens, and of their parts."""
    for seed in range(6):
        call = grouped.Call(T, 2, 140, 384)
        rng = np.random.default_rng(seed)
        shape = call.o_scale.shape
        call.o_scale[...] = rng.choice([1e-38, 1e-30, 1e-3, 1.0, 1e25], shape[:1])[:, None, None]
        call.o_scale *= rng.uniform(1, 2, shape).astype(np.float32)
        call.check()
