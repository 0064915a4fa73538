"""SGLang's own functions of FlashMLA beside the plugin's on a GPU, where sgl-flash-mla is installed
beside SGLang's files: the same calls, with and without us, judged by fp64; and graphs.

    SMLA_DEVICE=cuda pytest tests/frameworks/test_sglang.py tests/frameworks/test_gpu_sglang.py
"""

from importlib.util import find_spec

import helpers
import pytest
import sglang_calls as calls
import sglang_files
from entry_points import write_entry_point
from flash_mla_cases import Decode, Prefill, assert_close, assert_results
from helpers import assert_within_bounds
from sglang_files import GROUP

pytestmark = pytest.mark.torch


def has_kernels() -> bool:
    return find_spec("flash_mla") is not None


with_kernels = pytest.mark.skipif(not has_kernels(), reason="sgl-flash-mla is not installed")


@pytest.fixture(params=["sparse_mla", "none"], ids=["ours", "theirs"])
def wrapper(request, tmp_path):
    """SGLang's module of FlashMLA; the parameter is SGLANG_PLUGINS."""
    if request.param == "none" and not has_kernels():
        pytest.skip("sgl-flash-mla is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_PLUGINS", request.param)
        with sglang_files.loaded(write_entry_point(tmp_path, group=GROUP)) as module:
            is_hooked = hasattr(module.flash_mla_with_kvcache, "__wrapped__")
            assert is_hooked == (request.param == "sparse_mla")
            yield module


@pytest.mark.parametrize("num_heads", [64, 128])
def test_decode_of_v32(num_heads, wrapper, torch_arrays):
    case = Decode(b=5, s_q=1, H=num_heads, K=2048, pages=40)
    assert_results(calls.decode_v32(wrapper, torch_arrays, case), case.reference())


@pytest.mark.parametrize("d_qk", [576, 512])
def test_prefill(d_qk, wrapper, torch_arrays):
    """Prefills of V3.2, and of V4 over its workspace."""
    case = Prefill(T=70, H=64, S=900, K=512, d_qk=d_qk, sink=True, topk_length=True)
    assert_results(calls.prefill(wrapper, torch_arrays, case), case.reference())


@pytest.mark.parametrize("name", calls.V4_LAYERS)
def test_decode_of_v4(name, wrapper, torch_arrays):
    case = calls.keep_to_flash_mla(calls.v4_layer(name))
    got, want = calls.decode_v4(wrapper, torch_arrays, case), case.inputs.reference()
    if hasattr(wrapper.flash_mla_with_kvcache, "__wrapped__"):
        assert_within_bounds(want, got)
    # FlashMLA's tolerances, whose absolute one is for keys of a tenth of this size.
    assert_close("out", got["out"], want.out, 1e-2, 2.01 / 128)
    assert_close("lse", got["lse"], want.lse, 1e-6, 8.01 / 65536)


@with_kernels
def test_flash_mla_is_the_wheel(tmp_path):
    """So that "theirs" above are FlashMLA's kernels, and not this project's shim."""
    with sglang_files.loaded([]) as module:
        assert "shim" not in module.flash_mla.__file__
        assert module.flash_mla.has_legacy()


@pytest.mark.parametrize("wrapper", ["sparse_mla"], indirect=True)
def test_a_captured_decode_reads_new_contents(wrapper, torch_arrays):
    """As in SGLang's graphs: the schedule's tensors are copied before a replay."""
    torch, put = helpers.find_framework("torch").module, torch_arrays.put
    first, second = (Decode(s_q=1, K=128) for _ in "ab")
    second.indices = first.indices[::-1].copy()
    lens = put(first.indices[:, 0, 0].clip(0, 128))
    kept = wrapper.get_mla_metadata(lens, 64, 1, 64, True, 128)
    q, cache, indices = put(first.q), put(first.k_cache), put(first.indices)

    def step():
        return wrapper.flash_mla_with_kvcache(
            q, cache, None, lens, 512, *kept, 576**-0.5, is_fp8_kvcache=True, indices=indices
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for case in (first, second):
        for to, new in zip(kept, wrapper.get_mla_metadata(lens, 64, 1, 64, True, 128), strict=True):
            to.copy_(new)
        indices.copy_(put(case.indices))
        graph.replay()
        torch.cuda.synchronize()
        assert_results([torch_arrays.get(x) for x in results], case.reference())
