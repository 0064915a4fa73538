"""Layers that are asked for lse give it in the framework of their queries. All arrays are the
host's, on a machine with a GPU, too."""

from __future__ import annotations

import device
import engine
import numpy as np
import pytest
import reference as ref
import v4_attend_cases
from dense_steps import Case, count_merges
from helpers import assert_same_bits, require

import sparse_mla as package


def to_torch(x: np.ndarray):
    torch = require("torch")
    if x.dtype == ref.BF16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def to_jax(x: np.ndarray):
    jax = require("jax")
    return jax.device_put(x, jax.devices("cpu")[0])


@pytest.mark.torch
@pytest.mark.parametrize("path", ["mixed", "separate"])
@pytest.mark.parametrize("given", [False, True])
def test_dense_layer(path, given):
    torch = require("torch")
    case = Case([1, 1, 7, 2, 30], [50, 0, 200, 0, 33], padding=2)
    config = case.config(path=path, prefill_workspace_tokens=64, device="cpu")
    case.metadata = package.dense.MetadataBuilder(config).build(case.batch.common(package))
    weight, table = to_torch(case.weight), to_torch(case.table)
    layer = package.dense.DenseMLA(config, kv_b_proj=weight, rope_table=table)
    arrays = [to_torch(x) for x in (case.q, case.kv_c, case.k_pe, case.cache)]
    want = layer.forward(*arrays, case.metadata)
    memory = torch.full((5, 44), 7.0).T if given else None
    out, lse = layer.forward(*arrays, case.metadata, lse=memory, return_lse=not given)
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))
    assert (lse.dtype, lse is memory) == (torch.float32, given)
    case.exact(count_merges(case), path).check_lse(lse[:41].numpy())
    assert (lse[41:43] == -torch.inf).all()
    assert not given or (memory[43] == 7).all()


@pytest.mark.parametrize(
    "put",
    [
        pytest.param(to_torch, marks=pytest.mark.torch),
        pytest.param(to_jax, marks=pytest.mark.jax),
    ],
)
def test_v32_layer(put):
    step = engine.make_step(engine.engine_batch(pad_tokens=3), 32)
    config = package.Config(
        32, softmax_scale=engine.SCALE, kv_cache_dtype="fp8_ds_mla", topk_tokens=48,
        max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512,
    )  # fmt: skip
    metadata = package.MetadataBuilder(config).build(step.batch.common(package))
    layer = package.SparseMLA(config)
    host = step.q, np.ascontiguousarray(step.fp8_cache), step.topk_indices
    want = layer.forward(*host, metadata)
    arrays = [put(x) for x in host]
    out, lse = layer.forward(*arrays, metadata, return_lse=True)
    alone = layer.forward(*arrays, metadata, return_lse=False)
    assert type(out) is type(lse) is type(alone) is type(arrays[0])
    assert_same_bits(np.asarray(lse), want[1], "lse")
    assert (np.asarray(lse)[-3:] == -np.inf).all()


@pytest.mark.torch
@pytest.mark.skipif(device.ON_CUDA, reason="the case's config is the GPU's, and its caches NumPy's")
def test_v4_attention():
    torch = require("torch")
    case = v4_attend_cases.make_case(4, "separate")
    want = v4_attend_cases.check(case)
    q, topk = to_torch(case.q), to_torch(case.topk)
    arrays = q, case.caches, case.build(), topk
    out, lse = case.layer.attend(*arrays, return_lse=True)
    alone = case.layer.attend(*arrays, return_lse=False)
    assert torch.equal(out.view(torch.int16), alone.view(torch.int16))
    tokens = case.batch.num_tokens
    assert_same_bits(lse.numpy()[:tokens], want["lse"], "lse")
