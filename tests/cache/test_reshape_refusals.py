"""What reshape_and_cache refuses, and in which words. Nothing is written then."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cases import bf16
from device import ON_CUDA
from library import sparse_mla
from numpy.lib.stride_tricks import as_strided


def codes(*shape) -> np.ndarray:
    return np.full(shape, 0x5A, np.uint8)


def ones(*shape) -> np.ndarray:
    return np.ones(shape, np.float32)


def arguments() -> dict:
    """Three tokens of two heads, in pages of two tokens."""
    return {
        "k": bf16(3, 2, 24),
        "v": bf16(3, 2, 16),
        "k_cache": codes(5, 2, 2, 24),
        "v_cache": codes(5, 2, 2, 16),
        "slot_mapping": np.array([0, 5, 9]),
    }


COPIES = {"k_cache": bf16(5, 2, 2, 24), "v_cache": bf16(5, 2, 2, 16)}
VALUES = "have a multiple of 8 values per head, at most {}, got {}"
K_CACHE = (
    "`k_cache` must have shape [any, any, {}], got {}: pages, tokens, the heads and values of `k`"
)
V_CACHE = (
    "`v_cache` must have shape [{}], got {}: the pages, tokens and heads of `k_cache`, the values "
    "of `v`"
)
ROWS = "`{}` must have at least one row per entry of `slot_mapping` (3), got 2"
NORMAL = "must be a positive normal float32, got {}"
ONE_SCALE = "must have one value or shape [2], or be a float, got shape {}"
NO_SCALE = "`{}_scale` must be left out unless `{}_cache` is e4m3, got bfloat16"
BUFFER = codes(5, 2, 2, 48)
ERRORS = [
    ({"k": bf16(3, 48)}, "`k` must have shape [any, any, any], got [3, 48]: "
     "tokens, KV heads, values"),
    ({"k": bf16(3, 0, 24)}, "`k` must have 1 to 128 heads, got 0"),
    ({"k": bf16(3, 129, 24)}, "`k` must have 1 to 128 heads, got 129"),
    ({"k": bf16(3, 2, 20)}, f"`k` must {VALUES.format(576, 20)}"),
    ({"k": bf16(3, 2, 0)}, f"`k` must {VALUES.format(576, 0)}"),
    ({"k": bf16(3, 2, 584)}, f"`k` must {VALUES.format(576, 584)}"),
    ({"v": bf16(3, 2, 12)}, f"`v` must {VALUES.format(512, 12)}"),
    ({"v": bf16(3, 2, 520)}, f"`v` must {VALUES.format(512, 520)}"),
    ({"v": bf16(3, 1, 16)}, "`v` must have shape [any, 2, any], got [3, 1, 16]: "
     "tokens, the heads of `k`, values"),
    ({"k": bf16(2, 2, 24)}, ROWS.format("k")),
    ({"v": bf16(2, 2, 16)}, ROWS.format("v")),
    ({"k_cache": codes(5, 2, 24)}, K_CACHE.format("2, 24", [5, 2, 24])),
    ({"k_cache": codes(5, 2, 1, 24)}, K_CACHE.format("2, 24", [5, 2, 1, 24])),
    ({"k_cache": codes(5, 2, 2, 16)}, K_CACHE.format("2, 24", [5, 2, 2, 16])),
    ({"k_cache": codes(5, 0, 2, 24)}, "`k_cache` must have 1 or more tokens per page, got 0"),
    ({"v_cache": codes(4, 2, 2, 16)}, V_CACHE.format("5, 2, 2, 16", [4, 2, 2, 16])),
    ({"v_cache": codes(5, 1, 2, 16)}, V_CACHE.format("5, 2, 2, 16", [5, 1, 2, 16])),
    ({"v_cache": codes(5, 2, 1, 16)}, V_CACHE.format("5, 2, 2, 16", [5, 2, 1, 16])),
    ({"v_cache": codes(5, 2, 2, 24)}, V_CACHE.format("5, 2, 2, 16", [5, 2, 2, 24])),
    ({"slot_mapping": np.zeros((1, 3), np.int64)}, "`slot_mapping` must have shape [any], got "
     "[1, 3]"),
    ({"slot_mapping": np.array([0, 10, 5])}, "`slot_mapping` must be below the 10 slots of "
     "`k_cache`, got 10 at token 1"),
    *(({f"{x}_scale": bad}, f"`{x}_scale` {NORMAL.format(text)}") for x in "kv"
      for bad, text in ((0.0, "0"), (-1.0, "-1"), (np.nan, "nan"), (np.inf, "inf"),
                        (1e-39, "1e-39"))),
    *(({f"{x}_scale": bad}, f"`{x}_scale` {ONE_SCALE.format(list(bad.shape))}") for x in "kv"
      for bad in (ones(3), ones(0), ones(1, 2), ones(2, 1), ones(2, 2))),
    (COPIES | {"k_scale": 0.5}, NO_SCALE.format("k", "k")),
    (COPIES | {"v_scale": 2.0}, NO_SCALE.format("v", "v")),
    (COPIES | {"v_scale": ones(1)}, NO_SCALE.format("v", "v")),
    ({"k_cache": BUFFER[..., :24], "v_cache": BUFFER[..., 16:32]}, "`k_cache` must not overlap "
     "`v_cache`, got arrays that share memory"),
    ({"k_cache": as_strided(codes(240), (5, 2, 2, 24), (48, 24, 24, 1))}, "`k_cache` must have "
     "elements that do not overlap (it is written)"),
    ({"k_cache": codes(5, 2, 2, 48)[..., ::2]}, "`k_cache` must have a contiguous last dimension "
     "(stride 1), got stride 2"),
]  # fmt: skip
TYPES = [
    ({"k": ones(3, 2, 24).astype(np.float64)}, "`k` must be bfloat16, float16 or float32, got "
     "float64"),
    ({"k": codes(3, 2, 24)}, "`k` must be bfloat16, float16 or float32, got uint8"),
    ({"v": ones(3, 2, 16)}, "`v` must be bfloat16, got float32"),
    ({"k_cache": ones(5, 2, 2, 24)}, "`k_cache` must be bfloat16, uint8 or float8_e4m3fn, got "
     "float32"),
    ({"v_cache": bf16(5, 2, 2, 16)}, "`v_cache` must be uint8 or float8_e4m3fn, got bfloat16"),
    (COPIES | {"v_cache": codes(5, 2, 2, 16)}, "`v_cache` must be bfloat16, got uint8"),
    ({"slot_mapping": np.zeros(3, np.int16)}, "`slot_mapping` must be int32 or int64, got int16"),
    ({"k_scale": np.ones(2)}, "`k_scale` must be float32, got float64"),
]  # fmt: skip


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(
    ("changes", "words", "error"),
    [*((*row, ValueError) for row in ERRORS), *((*row, TypeError) for row in TYPES)],
)
def test_refusals(changes, words, error):
    given = arguments() | changes
    caches = [given[name] for name in ("k_cache", "v_cache")]
    before = [x.copy() for x in caches]
    with pytest.raises(error, match=f"^{re.escape(f'reshape_and_cache: {words}')}"):
        sparse_mla.reshape_and_cache(**given)
    for x, y in zip(caches, before, strict=True):
        assert x.tobytes() == y.tobytes(), "a call that raises has written"


@pytest.mark.skipif(ON_CUDA, reason="scales on a device are not read")
@pytest.mark.parametrize(
    ("name", "scales", "got"),
    [("v_scale", [1, 0], "0"), ("k_scale", [np.nan, 1], "nan"), ("k_scale", [-1.0], "-1")],
)
def test_scales_of_heads_are_read_on_the_cpu(name, scales, got):
    given = arguments() | {name: np.float32(scales)}
    with pytest.raises(ValueError, match=f"^reshape_and_cache: `{name}` {NORMAL.format(got)}$"):
        sparse_mla.reshape_and_cache(**given)
    assert (given["k_cache"] == 0x5A).all(), "a call that raises has written"


def test_the_good_call_is_good():
    copies = arguments() | COPIES
    sparse_mla.reshape_and_cache(*arguments().values())
    sparse_mla.reshape_and_cache(*copies.values(), k_scale=1.0, v_scale=1)
