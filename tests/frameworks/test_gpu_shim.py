"""shim/ on a GPU: a script for flash_mla runs unchanged, and its results are right."""

import importlib.util

import pytest
from helpers import printed_by_python
from test_shim import as_installed

pytestmark = pytest.mark.torch

# It names nothing of sparse_mla: the FP8 cache is put together in PyTorch.
USER = """
import torch
import flash_mla
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

torch.manual_seed(0)
B, H, K, P, PAGES, SCALE = 4, 64, 128, 64, 40, 192**-0.5
latents = torch.randn(PAGES * P, 512, device="cuda")
rope = torch.randn(PAGES * P, 64, device="cuda").bfloat16()
scales = latents.view(-1, 4, 128).abs().amax(-1) / 448
codes = (latents.view(-1, 4, 128) / scales[..., None]).to(torch.float8_e4m3fn)
rows = [x.contiguous().view(torch.uint8).view(PAGES * P, -1) for x in (codes, scales, rope)]
cache = torch.cat(rows, 1).view(PAGES, P, 1, 656).view(torch.float8_e4m3fn)
kv = torch.cat([(codes.float() * scales[..., None]).view(-1, 512), rope.float()], 1)

q = torch.randn(B, 1, H, 576, device="cuda").bfloat16()
indices = torch.randint(0, PAGES * P, (B, 1, K), device="cuda", dtype=torch.int32)
lens = torch.full((B,), 1000, dtype=torch.int32, device="cuda")
table = torch.arange(B * 16, device="cuda", dtype=torch.int32).view(B, 16) % PAGES


def attend(kv):
    keys = kv[indices[:, 0].long()]
    logits = torch.einsum("bhd,bkd->bhk", q[:, 0].float(), keys) * SCALE
    values = torch.einsum("bhk,bkd->bhd", logits.softmax(-1), keys[..., :512])
    return values, logits.logsumexp(-1)


for options in ({}, {"use_legacy": True}):
    schedule, splits = get_mla_metadata(lens, H, 1, H, is_fp8_kvcache=True, topk=K, **options)
    out, lse = flash_mla_with_kvcache(
        q, cache, table, lens, 512, schedule, splits, SCALE, False, True, indices, **options
    )
    want = attend(kv)
    torch.testing.assert_close(out[:, 0].float(), want[0], rtol=2**-7, atol=2e-3)
    # Hopper's kernel multiplies codes by their scales in f16: README, "Accuracy and determinism".
    torch.testing.assert_close(lse[..., 0], want[1], rtol=0, atol=4e-3)
    in_bf16 = kv.bfloat16()
    out, most, log2 = flash_mla_sparse_fwd(q[:, 0], in_bf16[:, None], indices, SCALE, **options)
    want = attend(in_bf16.float())
    torch.testing.assert_close(out.float(), want[0], rtol=2**-7, atol=2e-3)
print(flash_mla.__name__)
"""


def test_a_script_for_flash_mla_runs_unchanged(tmp_path):
    if importlib.util.find_spec("flash_mla") is not None:
        pytest.skip("FlashMLA itself is installed, and comes first")
    assert "flash_mla" in printed_by_python("-c", as_installed(tmp_path) + USER)
