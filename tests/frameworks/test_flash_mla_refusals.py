"""What sparse_mla.flash_mla refuses, and that each error names the argument."""

import numpy as np
import pytest
from flash_mla_cases import DECODE, PREFILL, Arrays, Decode, Prefill, zeros
from helpers import assert_error_text

from sparse_mla import flash_mla

REFUSED_DECODES = {
    "dense, lengths of lists": (
        {"indices": None, "topk_length": zeros(3, dtype=np.int32)}, ValueError, "topk_length",
    ),
    "dense, extra cache": (
        {"indices": None, "extra_k_cache": zeros(2, 4, 1, 576)}, ValueError, "extra_k_cache",
    ),
    "causal": ({"causal": True}, ValueError, "causal"),
    "old splits": ({"num_splits": zeros(4)}, ValueError, "num_splits"),
    "splits alone": (
        {"tile_scheduler_metadata": None, "num_splits": zeros(4)}, ValueError, "num_splits",
    ),
    "out in a flag's place": (
        {"enable_batch_invariant": zeros(3, 2, 16, 512)}, TypeError, "enable_batch_invariant",
    ),
    "out in another's": ({"use_legacy": zeros(3, 2, 16, 512)}, TypeError, "use_legacy"),
    "out of rank 3": ({"out": zeros(6, 16, 512)}, ValueError, "out"),
    "out of more heads": ({"out": zeros(3, 2, 17, 512)}, ValueError, "out"),
    "out of keys' size": ({"out": zeros(3, 2, 16, 576)}, ValueError, "out"),
    "out turned": ({"out": zeros(2, 3, 16, 512)}, ValueError, "out"),
    "out with a gap": ({"out": zeros(3, 3, 16, 512)[:, 1:]}, ValueError, "out"),
    "out is a list": ({"out": [0]}, TypeError, "out"),
    "v of 64": ({"head_dim_v": 64}, ValueError, "head_dim_v"),
    "V4 queries": ({"q": zeros(3, 2, 16, 512)}, ValueError, "q"),
    "V4 cache": ({"k_cache": zeros(2, 64, 1, 584, dtype=np.uint8)}, ValueError, "q"),
    "no format's cache": ({"k_cache": zeros(2, 64, 1, 640, dtype=np.uint8)}, ValueError, "k_cache"),
    "V4 format": ({"kv_format": "V4"}, ValueError, "kv_format"),
    "bf16 of FP8": ({"is_fp8_kvcache": False}, ValueError, "is_fp8_kvcache"),
    "FP8 of bf16": (
        {"k_cache": zeros(2, 64, 1, 576), "is_fp8_kvcache": True}, ValueError, "is_fp8_kvcache",
    ),
    "q of rank 3": ({"q": zeros(6, 16, 576)}, ValueError, "q"),
    "q is a list": ({"q": [1, 2]}, TypeError, "q"),
    "indices of rank 2": ({"indices": zeros(6, 64, dtype=np.int32)}, ValueError, "indices"),
    "indices turned": ({"indices": zeros(2, 3, 64, dtype=np.int32)}, ValueError, "indices"),
    "lengths per query": ({"topk_length": zeros(6, dtype=np.int32)}, ValueError, "topk_length"),
    "extra lengths": (
        {"extra_topk_length": zeros(1, dtype=np.int32)}, ValueError, "extra_topk_length",
    ),
    "extra V4 cache": (
        {"extra_k_cache": zeros(2, 4, 1, 288, dtype=np.uint8)}, ValueError, "q",
    ),
    "extra indices": (
        {"extra_indices_in_kvcache": zeros(3, 64, dtype=np.int32)},
        ValueError,
        "extra_indices_in_kvcache",
    ),
}  # fmt: skip

REFUSED_PREFILLS = {
    "V4 queries": ({"q": zeros(5, 16, 512)}, ValueError, "q"),
    "q of rank 4": ({"q": zeros(5, 1, 16, 576)}, ValueError, "q"),
    "v of 576": ({"d_v": 576}, ValueError, "d_v"),
    "two key heads": ({"kv": zeros(9, 2, 576)}, ValueError, "kv"),
    "flat keys": ({"kv": zeros(9, 576)}, ValueError, "kv"),
    "keys of no format": ({"kv": zeros(9, 1, 448)}, ValueError, "kv"),
    "keys without RoPE": ({"kv": zeros(9, 1, 512)}, ValueError, "q"),
    "flat indices": ({"indices": zeros(5, 64, dtype=np.int32)}, ValueError, "indices"),
    "other tokens": ({"indices": zeros(4, 1, 64, dtype=np.int32)}, ValueError, "indices"),
    "two index heads": ({"indices": zeros(5, 2, 64, dtype=np.int32)}, ValueError, "indices"),
    "out in a flag's place": ({"use_legacy": zeros(5, 16, 512)}, TypeError, "use_legacy"),
    "out of rank 4": ({"out": zeros(5, 1, 16, 512)}, ValueError, "out"),
    "out of more tokens": ({"out": zeros(6, 16, 512)}, ValueError, "out"),
    "out of more heads": ({"out": zeros(5, 17, 512)}, ValueError, "out"),
    "out is a list": ({"out": [0]}, TypeError, "out"),
}


@pytest.mark.parametrize("name", REFUSED_DECODES)
def test_refused_decode(name):
    changes, error, argument = REFUSED_DECODES[name]
    case = Decode(H=16, K=64)
    arguments = {
        "q": case.q,
        "k_cache": case.k_cache,
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "indices": case.indices,
    }
    with pytest.raises(error) as caught:
        flash_mla.flash_mla_with_kvcache(**(arguments | changes))
    assert_error_text(caught.value, DECODE, [argument])


@pytest.mark.parametrize("name", REFUSED_PREFILLS)
def test_refused_prefill(name):
    changes, error, argument = REFUSED_PREFILLS[name]
    case = Prefill(H=16, K=64)
    arguments = {"q": case.q, "kv": case.kv, "indices": case.indices, "sm_scale": 0.04}
    with pytest.raises(error) as caught:
        flash_mla.flash_mla_sparse_fwd(**(arguments | changes))
    assert_error_text(caught.value, PREFILL, [argument])


@pytest.mark.parametrize("what", ["q", "k_cache"])
def test_refusals_say_what_is_served(what):
    names = {"q": "V4 queries", "k_cache": "no format's cache"}
    changes, error, _ = REFUSED_DECODES[names[what]]
    case = Decode(H=16, K=64)
    meta, _ = flash_mla.get_mla_metadata()
    arguments = {"indices": case.indices} | changes
    q, k_cache = arguments.pop("q", case.q), arguments.pop("k_cache", case.k_cache)
    with pytest.raises(error, match=r"sparse MLA of DeepSeek-V3\.2"):
        flash_mla.flash_mla_with_kvcache(q, k_cache, None, None, 512, meta, **arguments)


def test_dense_decoding_needs_no_metadata():
    assert flash_mla.get_mla_decoding_metadata(None, 128, 1) == (None, None)


def test_the_core_s_errors_pass_through(arrays):
    case = Decode(H=16, K=64)
    with pytest.raises(TypeError, match="indices"):
        case.run(arrays, indices=case.indices.astype(np.float32))
    with pytest.raises(ValueError, match="128 heads"):
        Decode(H=129, K=64, b=1).run(arrays)


def test_the_core_checks_out():
    numpy, decode, prefill = Arrays("numpy"), Decode(H=16, K=64), Prefill(H=16, K=64)
    for case, shape in ((decode, (3, 2, 16, 512)), (prefill, (prefill.T, 16, 512))):
        for dtype in (np.float32, np.float16, np.uint16):
            with pytest.raises(TypeError, match="`out` must be bfloat16, got "):
                case.run(numpy, out=zeros(*shape, dtype=dtype))
        read_only = zeros(*shape)
        read_only.flags.writeable = False
        with pytest.raises(BufferError, match="`out` must be writable"):
            case.run(numpy, out=read_only)
        with pytest.raises(ValueError, match="`out` must not overlap `q`"):
            case.run(numpy, out=case.q[..., :512])
