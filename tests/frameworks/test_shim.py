"""shim/: `import flash_mla` finds the drop-in, and FlashMLA itself where it is installed."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import find_framework, printed_by_python, run_python

SHIM = Path(__file__).parents[2] / "shim"
without_flash_mla = pytest.mark.skipif(
    find_spec("flash_mla") is not None, reason="FlashMLA is installed here, and comes first"
)

# The imports of SGLang 0.5.23 (sglang/kernels/ops/attention/flash_mla_interface.py), then the names
# that it calls for DeepSeek-V3.2; last a call as its wrapper makes it, with `use_legacy`.
USER = """
import flash_mla
from flash_mla import fused_norm_rope_attn_rope_cast as _mega
from flash_mla.flash_mla_interface import FlashMLASchedMeta
from flash_mla import flash_mla_with_kvcache, get_mla_metadata, flash_mla_sparse_fwd
import numpy as np, ml_dtypes
import sparse_mla.flash_mla
names = "get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
for name in (*names, "flash_attn_varlen_func"):
    assert getattr(flash_mla, name) is getattr(sparse_mla.flash_mla, name)
assert isinstance(flash_mla.get_mla_metadata()[0], FlashMLASchedMeta)
q = np.ones((2, 3, 576), ml_dtypes.bfloat16)
kv = np.ones((4, 1, 576), ml_dtypes.bfloat16)
indices = np.zeros((2, 1, 8), np.int32)
out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
    q, kv, indices, 0.1, 512, None, None, use_legacy=True, return_log2_lse=True
)
assert out.shape == (2, 3, 512) and (out == 1).all()
try:
    _mega.decode
except AttributeError as error:
    print(error)
"""
# A decode of DeepSeek-V3.2 as SGLang's wrapper makes it: the schedule is tensors, which are sliced
# and copied, and go back on a new FlashMLASchedMeta.
DECODE = """
import flash_mla, torch
from flash_mla.flash_mla_interface import FlashMLASchedMeta
lens = torch.full((2,), 8, dtype=torch.int32)
schedule, splits = flash_mla.get_mla_decoding_metadata(lens, 3, 1, 3, True, 8, use_legacy=True)
assert schedule.shape[1] == 8 and splits[: 2 + 1].shape == (3,)
splits.copy_(splits.clone())
q = torch.ones(2, 1, 3, 576, dtype=torch.bfloat16)
cache = torch.zeros(2, 64, 1, 656, dtype=torch.uint8)
indices = torch.zeros(2, 1, 8, dtype=torch.int32)
out, lse = flash_mla.flash_mla_with_kvcache(
    q=q, k_cache=cache, block_table=lens[:, None], cache_seqlens=lens, head_dim_v=512,
    tile_scheduler_metadata=FlashMLASchedMeta(tile_scheduler_metadata=schedule, num_splits=splits),
    softmax_scale=0.1, causal=False, is_fp8_kvcache=True, indices=indices, use_legacy=True,
    kv_format=None, descale_q=None, descale_k=None,
)
print(tuple(out.shape), tuple(lse.shape))
print(flash_mla.get_mla_decoding_metadata(lens, 3, 1))
"""
BY_NAME = "import sparse_mla_flash_mla; sparse_mla_flash_mla.install()\n"


def as_installed(folder: Path) -> str:
    """A start of Python that reads the .pth files of `folder`, as it does for site-packages."""
    for source in (SHIM / "sparse_mla_flash_mla", SHIM / "sparse_mla_flash_mla.pth"):
        target = folder / source.name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return f"import site; site.addsitedir({str(folder)!r})\n"


@without_flash_mla
def test_code_for_flash_mla_runs_unchanged(tmp_path):
    printed = printed_by_python("-c", as_installed(tmp_path) + USER)
    assert "fused_norm_rope_attn_rope_cast.decode: sparse_mla has no fused" in printed


@without_flash_mla
@pytest.mark.torch
def test_a_schedule_may_be_tensors(tmp_path):
    find_framework("torch")
    lines = printed_by_python("-c", as_installed(tmp_path) + DECODE).splitlines()
    assert lines[0] == "(2, 1, 3, 512) (2, 3, 1)"
    assert lines[1].startswith("(tensor(")


@without_flash_mla
def test_it_is_there_on_request_too():
    path = f"import sys; sys.path.insert(0, {str(SHIM)!r})\n"
    assert "sparse_mla has no fused" in printed_by_python("-c", path + 2 * BY_NAME + USER)


def test_starting_python_imports_nothing_of_sparse_mla(tmp_path):
    script = "import sys; print('sparse_mla' in sys.modules, 'flash_mla' in sys.modules)"
    assert printed_by_python("-c", as_installed(tmp_path) + script) == "False False\n"


@without_flash_mla
def test_the_real_package_comes_first(tmp_path):
    (tmp_path / "flash_mla.py").write_text("name = 'the real one'\n")
    script = "import flash_mla; print(flash_mla.name)"
    assert printed_by_python("-c", as_installed(tmp_path) + script) == "the real one\n"


@pytest.mark.parametrize("name", ["flash_mla", "flash_mla.flash_mla_interface"])
def test_without_the_shim_there_is_no_such_module(name):
    done = run_python("-c", f"import {name}")
    if done.returncode == 0:
        pytest.skip("FlashMLA is installed here")
    assert "No module named 'flash_mla'" in done.stderr
