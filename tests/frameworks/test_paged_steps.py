"""sparse_mla.paged with arrays of PyTorch and JAX: metadata and layers are those of NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from device import ON_CUDA
from helpers import assert_same_bits, assert_within_bounds, find_framework, with_marks
from paged_layers import Layer
from paged_steps import ARRAYS, called, check, make_batch, make_verification

import sparse_mla

paged = sparse_mla.paged


def build(framework, batch):
    """The metadata of a batch whose arrays are the framework's."""
    mapping = None if batch.mapping is None else framework.put(batch.mapping)
    builder = paged.MetadataBuilder(
        paged.Config(**batch.config),
        framework.put(batch.req_to_token),
        full_to_swa_index_mapping=mapping,
    )
    given = {name: getattr(batch, name) for name in ARRAYS}
    return builder.build(
        called(batch.mode),
        framework.put(batch.seq_lens),
        framework.put(batch.pool),
        spec_step=batch.spec_step,
        common_prefix_len=batch.prefix,
        **{name: framework.put(x) for name, x in given.items() if x is not None},
    )


@pytest.mark.parametrize("name", with_marks("torch", "jax"))
@pytest.mark.parametrize("mode", ["decode", "draft", "target_verify", "extend", "draft_extend"])
def test_metadata(name, mode):
    framework = find_framework(name)
    for seed in range(12):
        batch = make_batch(np.random.default_rng([seed, 1]), mode, 4)
        batch.bound = 0
        if batch.pool.dtype == np.int64 and name == "jax":  # 64 bits are off by default
            batch.pool = batch.pool.astype(np.int32)
        if batch.out_cache_loc is not None:
            batch.out_cache_loc = batch.out_cache_loc.astype(np.int32)
        check(batch, build(framework, batch))


@pytest.mark.parametrize("name", with_marks("torch", "jax"))
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("is_latent", [False, True])
def test_layers(name, topk, dtype, is_latent):
    """Results are the framework's, of the dtype of q, with the bits of NumPy's. Nobody writes an
    array of JAX, so its parts have 16 bits."""
    framework = find_framework(name)
    batch = make_verification(topk)
    layer = Layer(batch, dtype=dtype, is_latent=is_latent, has_sink=True)
    want = layer.check(batch.build())
    caches = [None if x is None else framework.put(x) for x in layer.caches]
    out, lse = paged.attention(
        build(framework, batch),
        framework.put(layer.q),
        *caches,
        softmax_scale=layer.scale,
        attn_sink=framework.put(layer.sink),
    )
    assert framework.owns(out) and framework.owns(lse)
    got = {"out": framework.get(out), "lse": framework.get(lse)}
    if ON_CUDA or (name == "jax" and topk > 1 and not is_latent):  # other bits
        assert got["out"].dtype == want["out"].dtype
        assert_within_bounds(layer.reference(), got, merges=1)
    else:
        assert_same_bits(got["out"], want["out"])
    assert ON_CUDA or np.array_equal(got["lse"], want["lse"])
