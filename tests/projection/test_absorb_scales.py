"""absorb of e4m3 weights with scales of any size: a weight may be beyond fp32 where its product
with W_UK or W_UV is not."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from test_absorb import host, put

import sparse_mla

HEADS, DIM, ROPE, LATENTS, QUERIES, HIDDEN = 2, 128, 64, 256, 40, 130


def make_scale(rng, shape, kind, size) -> np.ndarray:
    rows, columns = shape
    sizes = {
        "tensor": (1,),
        "block": (-(-rows // 128), -(-columns // 128)),
        "outputs": (rows,),
    }[kind]
    return (rng.uniform(0.9, 1, sizes) * size).astype(np.float32)


def widen(codes, scale) -> np.ndarray:
    """A weight [out, in] in fp64."""
    rows, columns = codes.shape
    wide = scale.astype(np.float64)
    if scale.ndim == 2:
        wide = wide.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    else:
        wide = wide.reshape(-1, 1)
    return ref.e4m3_decode(codes).astype(np.float64) * wide


def check(got, value, magnitude) -> None:
    tolerance = 2.0**-8 * np.abs(value) + 2.0**-16 * magnitude + 2.0**-126
    assert ref.worst_ratio(host(got), value, tolerance) <= 1


@pytest.mark.parametrize("size", [1.2e-38, 1e-30, 1.0, 1e30, 7e35, 1e37, 3.4e38])
@pytest.mark.parametrize("kind", ["tensor", "block", "outputs"])
def test_scales_of_weights(kind, size):
    """A part of W_UK and W_UV is 0, and the first head's outputs have ordinary scales."""
    rng = np.random.default_rng(0)
    q_shape, o_shape = (HEADS * (DIM + ROPE), QUERIES), (HIDDEN, HEADS * DIM)
    pairs = []
    for shape in (q_shape, o_shape):
        codes = ref.e4m3_encode(rng.normal(0, 60, shape).astype(np.float32))
        scale = make_scale(rng, shape, kind, size)
        if kind == "outputs" and shape == q_shape:
            scale[: DIM + ROPE] = 1e-3
        pairs.append((codes, scale))
    parts = [
        (rng.normal(0, 1, (LATENTS, HEADS, DIM)) * min(1 / size, 1e36)).astype(np.float32)
        for _ in range(2)
    ]
    for part in parts:
        part[: LATENTS // 2] = 0
    W_Q_UK, _, W_UV_O = sparse_mla.absorb(*put((pairs[0], *parts, pairs[1])))
    wide = [widen(*pair) for pair in pairs]
    queries = wide[0].reshape(HEADS, DIM + ROPE, QUERIES)[:, :DIM]
    outputs = wide[1].reshape(HIDDEN, HEADS, DIM)
    w_uk, w_uv = (part.astype(np.float64) for part in parts)
    by_query = [np.einsum("hnq,lhn->qhl", f(queries), f(w_uk)) for f in (np.asarray, np.abs)]
    check(W_Q_UK, *(x.reshape(QUERIES, -1) for x in by_query))
    by_output = [np.einsum("lhv,ohv->hlo", f(w_uv), f(outputs)) for f in (np.asarray, np.abs)]
    check(W_UV_O, *(x.reshape(-1, HIDDEN) for x in by_output))
