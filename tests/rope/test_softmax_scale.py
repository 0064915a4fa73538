"""mla_softmax_scale: the numbers of DeepSeek's models, and its errors."""

import math

import pytest
from helpers import FLOAT_MODES, mode_after

import sparse_mla

V3 = {"factor": 40, "orig_max_pos": 4096, "mscale": 1, "mscale_all_dim": 1}


def test_scales_of_models():
    """DeepSeek-V3's, as the contract has it; V2-Lite's; and models without YaRN."""
    assert sparse_mla.mla_softmax_scale(yarn=V3) == pytest.approx(0.135233779, abs=5e-10)
    lite = {"factor": 40, "orig_max_pos": 4096, "mscale": 0.707, "mscale_all_dim": 0.707}
    g = 0.0707 * math.log(40) + 1
    assert sparse_mla.mla_softmax_scale(yarn=lite) == pytest.approx(192**-0.5 * g * g, rel=1e-15)
    assert sparse_mla.mla_softmax_scale() == 1 / math.sqrt(192)
    assert sparse_mla.mla_softmax_scale(576) == 1 / 24
    assert type(sparse_mla.mla_softmax_scale(4)) is float


@pytest.mark.parametrize("change", [{"mscale_all_dim": 0}, {"factor": 1}, {"mscale": 5}])
def test_what_changes_nothing(change):
    """Without mscale_all_dim or with a factor of 1 YaRN has no say, and mscale never has one."""
    plain = sparse_mla.mla_softmax_scale(yarn=V3 if "mscale" in change else None)
    assert sparse_mla.mla_softmax_scale(yarn=V3 | change) == plain


def test_the_floating_point_mode_changes_nothing():
    want, got = sparse_mla.mla_softmax_scale(yarn=V3), []
    for mode in FLOAT_MODES.values():
        mode_after(mode, lambda: got.append(sparse_mla.mla_softmax_scale(yarn=V3)))
    assert set(got) == {want}


@pytest.mark.parametrize(
    ("size", "yarn", "error", "text"),
    [
        (0, None, ValueError, "`qk_head_dim` must be at least 1, got 0"),
        (192.0, None, TypeError, "`qk_head_dim` must be an int, got float"),
        (True, None, TypeError, "`qk_head_dim` must be an int, got bool"),
        (192, [], TypeError, "`yarn` must be None or a dict, got list"),
        (192, {"factor": 40}, ValueError, "`yarn` must have the key orig_max_pos, got ['factor']"),
        (192, V3 | {"factor": 0.5}, ValueError, "`yarn['factor']` must be finite and at least 1"),
        (192, V3 | {"theta": 1}, ValueError, "`yarn` must have keys of factor, orig_max_pos"),
    ],
)
def test_errors(size, yarn, error, text):
    with pytest.raises(error) as info:
        sparse_mla.mla_softmax_scale(size, yarn=yarn)
    assert str(info.value).startswith(f"mla_softmax_scale: {text}")
