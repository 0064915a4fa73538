"""Recorded outputs of an independent implementation; see fixtures/README.md.

Our result is compared with fp64 first. The peer must then agree within its own bound plus ours. Its
bound has the GPU's 32 units, and the allowance of a gathered row if it rounds scaled keys to bf16.
"""

from pathlib import Path

import device
import numpy as np
import pytest
import reference as ref
from cases import AttentionInputs
from helpers import assert_within_bounds, guarded_attention
from library import sparse_mla
from row_formats import Pages
from test_v4_attention import Keys, V4Inputs

DATA: dict[str, np.ndarray] = {}
for version in ("v32", "v4"):
    DATA |= np.load(Path(__file__).parents[1] / "fixtures" / f"flash_mla_{version}_small.npz")
CASES = sorted({key.split("/")[0] for key in DATA})
ROUNDS_SCALED_KEYS = {"decode_h64_f32scale"}


def load(name) -> tuple[AttentionInputs, dict[str, np.ndarray]]:
    data = {key.split("/")[1]: x for key, x in DATA.items() if key.startswith(name + "/")}
    peer = {key: data[key] for key in ("out", "lse", "max_logits") if key in data}
    peer["lse"] = np.where(np.isposinf(peer["lse"]), -np.inf, peer["lse"])
    return load_pages(data) if "cache" in data else load_rows(data), peer


def load_rows(data: dict[str, np.ndarray]) -> AttentionInputs:
    kv = data["kv"] if data["kv"].dtype == np.uint8 else data["kv"].view(ref.BF16)
    kv = np.frombuffer(aligned(kv), kv.dtype).reshape(kv.shape)
    options = {"softmax_scale": float(data["scale"])}
    options |= {key: data[key] for key in ("attn_sink", "topk_length") if key in data}
    return AttentionInputs(data["q"].view(ref.BF16), kv, data["indices"], options)


def load_pages(data: dict[str, np.ndarray]) -> V4Inputs:
    """The window's and the compressed cache of DeepSeek V4, in the peer's pages as they were."""
    lists = []
    for prefix in ("", "extra_"):
        cache, block_size = data[f"{prefix}cache"], int(data[f"{prefix}block_size"])
        pages = Pages("fp8_v4", "bytes", pages=len(cache), block_size=block_size)
        pages.memory, pages.stride = aligned(cache), cache.shape[1]
        pages.cache = pages.memory.reshape(cache.shape)
        lists.append(Keys(pages, data[f"{prefix}indices"], data[f"{prefix}topk_length"], prefix))
    options = {"softmax_scale": float(data["scale"]), "attn_sink": data["attn_sink"]}
    options |= {"extra_kv_cache": lists[1].pages.cache, "extra_indices": lists[1].indices}
    for keys in lists:
        options |= keys.options
    q, indices = data["q"].view(ref.BF16), lists[0].indices
    return V4Inputs(q, lists[0].pages.cache, indices, options, lists=lists)


def aligned(x: np.ndarray) -> np.ndarray:
    raw = np.zeros(x.nbytes + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64
    raw[start : start + x.nbytes] = x.view(np.uint8).reshape(-1)
    return raw[start : start + x.nbytes]


@pytest.fixture(params=CASES)
def recorded(request):
    return request.param, *load(request.param)


def peer_tolerance(name) -> dict:
    return {"units": 32, "gathered": name in ROUNDS_SCALED_KEYS}


def test_the_recording_is_what_the_readme_says(recorded):
    name, case, peer = recorded
    want = case.reference()
    sinks = case.options.get("attn_sink")
    if sinks is not None:
        assert np.isposinf(sinks).any()
        assert np.isneginf(sinks).any()
    assert_within_bounds(want, peer, **peer_tolerance(name))
    if name in ROUNDS_SCALED_KEYS:
        ratios = ref.attention_ratios(want, peer["out"], peer["lse"], units=32)
        assert min(ratios.values()) > 1, "the peer needs the allowance"


def test_ours_is_within_the_bounds(recorded):
    _, case, _ = recorded
    assert_within_bounds(case.reference(), guarded_attention(sparse_mla.sparse_attention, case))


def test_ours_agrees_with_the_peer(recorded):
    name, case, peer = recorded
    want = case.reference()
    got = guarded_attention(sparse_mla.sparse_attention, case)
    slack = peer_tolerance(name)
    bounds = {
        "out": want.out_tolerance(**device.BOUNDS) + want.out_tolerance(**slack),
        "lse": want.lse_tolerance(**device.BOUNDS) + want.lse_tolerance(**slack),
    }
    for key, bound in bounds.items():
        theirs = ref.to_f32(peer[key]).astype(np.float64)
        assert ref.worst_ratio(got[key], theirs, bound) <= 1, key


@pytest.mark.parametrize("name", sorted(ROUNDS_SCALED_KEYS))
def test_ours_does_not_round_scaled_keys(name):
    """Where the peer rounds scaled keys, its error is at least four times as large as ours."""
    case, peer = load(name)
    want = case.reference()
    got = guarded_attention(sparse_mla.sparse_attention, case)
    ours = ref.attention_ratios(want, got["out"], got["lse"], units=32)
    theirs = ref.attention_ratios(want, peer["out"], peer["lse"], units=32)
    assert all(4 * ours[key] <= theirs[key] for key in ours), (ours, theirs)
