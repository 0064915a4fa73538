"""The compressor beside Transformers' deepseek_v4 in fp32: the same hidden states, as one prefill
and as steps."""

import device
import numpy as np
import pytest
import reference as ref
import row_formats as rows
from deepseek_models import V4_HIDDEN, make_v4_part, steps_of

import sparse_mla

pytestmark = pytest.mark.transformers

TOKENS = 300


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize(
    ("name", "ratio", "dim"),
    [
        ("DeepseekV4HCACompressor", 128, 512),
        ("DeepseekV4CSACompressor", 4, 512),
        ("DeepseekV4CSACompressor", 4, 128),
    ],
)
def test_rows_are_those_of_transformers(name, ratio, dim, in_steps):
    """Rows of 512 lie in a bf16 cache, so that only one rounding is ours; those of 128 have no
    format without codes, and get the bound of e4m3."""
    torch, made = make_v4_part(name, dim)
    hidden = torch.randn(1, TOKENS, V4_HIDDEN, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS)
    want = made(hidden, torch.randn(1, TOKENS, 32), positions[None], None, 0)[0][0, 0]
    kv, score = made.kv_proj(hidden)[0], made.gate_proj(hidden)[0]
    cos, sin = made.rotary_emb(hidden, positions[None], layer_type="compress")
    table = torch.cat([cos[0], sin[0]], 1)
    assert table.shape == (TOKENS, 64)

    width, groups = kv.shape[1], TOKENS // ratio
    state = torch.full((TOKENS // 4, 4, 2 * width), float("nan"))
    fmt = "bfloat16" if dim == 512 else "fp8_index"
    cache = rows.Pages(fmt, pages=groups // 5 + 1, block_size=5)
    dtype = torch.bfloat16 if dim == 512 else torch.uint8
    held = torch.zeros(cache.cache.shape, dtype=dtype)
    kv_slots = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
    place = device.NAME
    on = [x.to(place) for x in (state, torch.arange(TOKENS // 4).int()[None], held)]
    weight, table = made.kv_norm.weight.to(place), table.to(place)
    for start, end in steps_of(TOKENS) if in_steps else [(0, TOKENS)]:
        token = positions[start:end].to(place)
        sparse_mla.compress_norm_rope_store(
            on[0],
            on[1],
            torch.zeros(end - start, dtype=torch.int32, device=place),
            token,
            token,
            on[2],
            kv_slots[start:end].to(place),
            weight,
            table,
            eps=made.kv_norm.variance_epsilon,
            ratio=ratio,
            kv=kv[start:end].to(place),
            score=score[start:end].to(place),
            ape=made.position_bias.to(place),
        )
    got = sparse_mla.dequantize_kv_cache(on[2]).cpu().numpy().reshape(-1, dim)[:groups]
    y = want.numpy().astype(np.float64)
    assert y.shape == got.shape
    size = np.abs(y).max(1, keepdims=True)
    bound = 1.02 * 2.0**-8 * np.abs(y) + 2.0**-17 * size
    if dim == 128:  # the scale is at most 2 amax / 448
        bound = (2.0**-4 + 1.02 * 2.0**-8) * np.abs(y) + 2.0**-10 * size / 224 + 2.0**-17 * size
    assert ref.worst_ratio(got.astype(np.float64), y, bound) <= 1
