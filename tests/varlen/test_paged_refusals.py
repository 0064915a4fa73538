"""What paged_attention refuses, and in which words."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cases import bf16, e4m3, int32
from device import ON_CUDA
from library import sparse_mla

attend = sparse_mla.paged_attention


def call(**changes):
    """Two requests of two tokens and one, with 4 and 3 keys in pages of two tokens."""
    arguments = {
        "q": bf16(3, 4, 24),
        "k_cache": bf16(5, 2, 2, 24),
        "v_cache": bf16(5, 2, 2, 16),
        "block_table": int32([0, 1], [2, 3]),
        "cache_seqlens": int32(4, 3),
        "cu_seqlens_q": int32(0, 2, 3),
        "softmax_scale": 1.0,
    }
    return attend(**(arguments | changes))


ALL_E4M3 = {"q": e4m3(3, 4, 24), "k_cache": e4m3(5, 2, 2, 24), "v_cache": e4m3(5, 2, 2, 16)}
PER_TOKEN = {"cu_seqlens_q": None, "cache_seqlens": int32(4, 3, 1)}
SLOTS = {"block_table": None, "slot_table": int32([0, 1, 2, 3], [4, 5, 6, 7])}
VALUES = "have a multiple of 8 values per head, at most {}, got {}"
HEADS = "`k_cache` must have a number of heads that divides the 4 of `q`, got {}"
ONE_TABLE = "`block_table` must be given, or `slot_table` in its place, got {}"
ERRORS = [
    ({"q": bf16(3, 4)}, "`q` must have shape [any, any, any], got [3, 4]: tokens, heads, values"),
    ({"q": bf16(3, 129, 24)}, "`q` must have 1 to 128 heads, got 129"),
    ({"q": bf16(3, 4, 20)}, f"`q` must {VALUES.format(576, 20)}"),
    ({"q": bf16(3, 4, 584)}, f"`q` must {VALUES.format(576, 584)}"),
    ({"q": bf16(3, 4, 0)}, f"`q` must {VALUES.format(576, 0)}"),
    ({"q": bf16(3, 4, 16)}, "`k_cache` must have shape [any, any, any, 16], got [5, 2, 2, 24]: "
     "pages, tokens, KV heads, the values of `q`"),
    ({"k_cache": bf16(5, 2, 24)}, "`k_cache` must have shape [any, any, any, 24], got [5, 2, 24]: "
     "pages, tokens, KV heads, the values of `q`"),
    ({"k_cache": bf16(5, 0, 2, 24)}, "`k_cache` must have 1 or more tokens per page, got 0"),
    ({"k_cache": np.broadcast_to(bf16(1, 1, 1, 24), (65536, 32768, 1, 24))},
     "`k_cache` must have at most 2147483647 tokens, got 65536 pages of 32768"),
    ({"k_cache": bf16(5, 2, 3, 24), "v_cache": bf16(5, 2, 3, 16)}, HEADS.format(3)),
    ({"k_cache": bf16(5, 2, 0, 24), "v_cache": bf16(5, 2, 0, 16)}, HEADS.format(0)),
    ({"k_cache": bf16(5, 2, 8, 24), "v_cache": bf16(5, 2, 8, 16)}, HEADS.format(8)),
    ({"v_cache": bf16(4, 2, 2, 16)}, "`v_cache` must have shape [5, 2, 2, any], got [4, 2, 2, 16]: "
     "the pages, tokens and heads of `k_cache`"),
    ({"v_cache": bf16(5, 3, 2, 16)}, "`v_cache` must have shape [5, 2, 2, any], got [5, 3, 2, 16]: "
     "the pages, tokens and heads of `k_cache`"),
    ({"v_cache": bf16(5, 2, 1, 16)}, "`v_cache` must have shape [5, 2, 2, any], got [5, 2, 1, 16]: "
     "the pages, tokens and heads of `k_cache`"),
    ({"v_cache": bf16(5, 2, 2, 520)}, f"`v_cache` must {VALUES.format(512, 520)}"),
    ({"v_cache": bf16(5, 2, 2, 12)}, f"`v_cache` must {VALUES.format(512, 12)}"),
    ({"qv": bf16(3, 4, 24)}, "`qv` must have 16 values per head, as `v_cache` has, got 24"),
    ({"qv": bf16(2, 4, 16)}, "`qv` must have shape [3, 4, any], got [2, 4, 16]: the tokens and "
     "heads of `q`, the values of `v_cache`"),
    ({"qv": bf16(3, 2, 16)}, "`qv` must have shape [3, 4, any], got [3, 2, 16]: the tokens and "
     "heads of `q`, the values of `v_cache`"),
    ({"q": bf16(3, 4, 72), "k_cache": bf16(5, 2, 2, 72), "v_cache": bf16(5, 2, 2, 512),
      "qv": bf16(3, 4, 512)}, f"`qv` must {VALUES.format(504, 512)}"),
    ({"block_table": None}, ONE_TABLE.format("neither")),
    ({"slot_table": int32([0, 1], [2, 3])}, ONE_TABLE.format("both")),
    ({"block_table": int32(0, 1)}, "`block_table` must have shape [>= 2, any], got [2]"),
    ({"block_table": int32([0, 1])}, "`block_table` must have shape [>= 2, any], got [1, 2]"),
    (SLOTS | {"slot_table": int32([0, 1])}, "`slot_table` must have shape [>= 2, any], got [1, 2]"),
    ({"cache_seqlens": int32([4, 3])}, "`cache_seqlens` must have shape [any], got [1, 2]: "
     "a length per request of the query"),
    (PER_TOKEN | {"cache_seqlens": int32(4, 3)}, "`cache_seqlens` must have shape [3], got [2]: "
     "a length per request of the query"),
    ({"cu_seqlens_q": int32(0, 3)}, "`cu_seqlens_q` must have shape [3], got [2]"),
    ({"cache_leftpad": int32(0)},
     "`cache_leftpad` must have shape [2], got [1]: an entry per request"),
    ({"cache_leftpad": int32(0, 0), "cp": (0, 2, 1)},
     "`cache_leftpad` must be left out beside `cp`, got an array"),
    ({"window_size": (-2, 0)},
     "`window_size` must have -1 (open) or a number of keys on its left, got -2"),
    ({"window_size": (0, -3)},
     "`window_size` must have -1 (open) or a number of keys on its right, got -3"),
    ({"attention_chunk": -1}, "`attention_chunk` must be 0 to 2147483647, got -1"),
    ({"softcap": -1.0}, "`softcap` must be 0 (none) or a positive normal float32, got -1"),
    ({"softcap": float("nan")}, "`softcap` must be finite, got nan"),
    ({"softcap": 3e38}, "`softcap` must be at most 2.35866e+38 in size, got 3e+38"),
    ({"softmax_scale": float("nan")}, "`softmax_scale` must be finite, got nan"),
    ({"softmax_scale": -3e38}, "`softmax_scale` must be at most 2.35866e+38 in size, got -3e+38"),
    ({"max_seqlen_q": -1}, "`max_seqlen_q` must be at least 0, got -1"),
    ({"max_seqlen_k": -1}, "`max_seqlen_k` must be at least 0, got -1"),
    ({"num_splits": 65}, "`num_splits` must be 0 (the plan chooses) or 1 to 64, got 65"),
    ({"num_splits": -1}, "`num_splits` must be 0 (the plan chooses) or 1 to 64, got -1"),
    ({"attn_sink": np.zeros(3, np.float32)}, "`attn_sink` must have shape [>= 4], got [3]"),
    ({"q_descale": 2.0}, "`q_descale` must be left out unless `q` is e4m3, got bfloat16"),
    ({"k_descale": np.ones(1, np.float32)},
     "`k_descale` must be left out unless `k_cache` is e4m3, got bfloat16"),
    ({"v_descale": 0.5}, "`v_descale` must be left out unless `v_cache` is e4m3, got bfloat16"),
    (ALL_E4M3 | {"q_descale": float("inf")},
     "`q_descale` must be a positive normal float32, got inf"),
    (ALL_E4M3 | {"k_descale": -1.0}, "`k_descale` must be a positive normal float32, got -1"),
    (ALL_E4M3 | {"v_descale": float("nan")},
     "`v_descale` must be a positive normal float32, got nan"),
    (ALL_E4M3 | {"k_descale": np.ones((2, 4), np.float32)},
     "`k_descale` must have one value or shape [n, 2], where n divides the 2 requests, or be a "
        "float, got shape [2, 4]"),
    (ALL_E4M3 | {"v_descale": np.ones(2, np.float32)},
     "`v_descale` must have one value or shape [n, 2], where n divides the 2 requests, or be a "
        "float, got shape [2]"),
    (ALL_E4M3 | {"q_descale": np.ones((3, 2), np.float32)},
     "`q_descale` must have one value or shape [n, 2], where n divides the 2 requests, or be a "
        "float, got shape [3, 2]"),
    ({"out": bf16(3, 4, 24)}, "`out` must have shape [3, 4, 16], got [3, 4, 24]: the tokens and "
     "heads of `q`, the values of `v`"),
    ({"lse": np.zeros((3, 2), np.float32)}, "`lse` must have shape [3, 4], got [3, 2]"),
]  # fmt: skip


def refuses(words: str, error: type = ValueError):
    return pytest.raises(error, match=f"^{re.escape(f'paged_attention: {words}')}")


@pytest.mark.parametrize(
    "cp", [(2, 2, 1), (-1, 2, 1), (0, 2, 0), (0, -1, 1), (0, 0, 1), (0, 2, 2**31)]
)
def test_ranks_are_checked(cp):
    rule = "be (rank, ranks, interleave) with 0 <= rank < ranks and interleave >= 1"
    with refuses(f"`cp` must {rule}, got ({cp[0]}, {cp[1]}, {cp[2]})"):
        call(cp=cp)


TYPE_ERRORS = [
    (
        {"q": np.ones((3, 4, 24), np.float32)},
        "`q` must be bfloat16, float16, uint8 or float8_e4m3fn, got float32",
    ),
    ({"q": (bf16(3, 4, 16), bf16(3, 4, 8))}, "`q` must be "),
    ({"qv": np.ones((3, 4, 16), np.float16)}, "`qv` must be bfloat16, got float16"),
    ({"qv": e4m3(3, 4, 16)}, "`qv` must be bfloat16, got float8_e4m3fn"),
    (
        {"k_cache": np.ones((5, 2, 2, 24), np.float16)},
        "`k_cache` must be bfloat16, uint8 or float8_e4m3fn, got float16",
    ),
    ({"v_cache": np.ones((5, 2, 2, 16), np.float16)}, "`v_cache` must be bfloat16, got float16"),
    ({"v_cache": e4m3(5, 2, 2, 16)}, "`v_cache` must be bfloat16, got float8_e4m3fn"),
    (
        {"out": np.zeros((3, 4, 16), np.float16)},
        "`out` must be bfloat16 or float32, got float16",
    ),
    ({"cache_seqlens": np.array([4, 3])}, "`cache_seqlens` must be int32, got int64"),
    ({"cache_leftpad": np.array([0, 0])}, "`cache_leftpad` must be int32, got int64"),
    ({"block_table": np.zeros((2, 2), np.int64)}, "`block_table` must be int32, got int64"),
    (
        {"block_table": None, "slot_table": np.zeros((2, 2), np.int64)},
        "`slot_table` must be int32, got int64",
    ),
]


@pytest.mark.parametrize(
    ("changes", "words", "error"),
    [*((*row, ValueError) for row in ERRORS), *((*row, TypeError) for row in TYPE_ERRORS)],
)
def test_errors(changes, words, error):
    with refuses(words, error):
        call(**changes)


@pytest.mark.skipif(ON_CUDA, reason="numbers on the device are clamped")
@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ((1, 2, 3), "begin with 0 and never fall, got 1 at 0"),
        ((0, -1, 3), "begin with 0 and never fall, got -1 at 1"),
        ((0, 2, 1), "begin with 0 and never fall, got 1 at 2"),
        ((0, 2, 4), "end at most at the 3 tokens of `q`, got 4"),
    ],
)
def test_starts_are_checked(starts, words):
    with refuses(f"`cu_seqlens_q` must {words}"):
        call(cu_seqlens_q=int32(*starts))


@pytest.mark.skipif(ON_CUDA, reason="numbers on the device are clamped")
@pytest.mark.parametrize(
    ("lens", "pads", "words"),
    [
        ((4, 3), (0, 4), "between 0 and the 3 of `cache_seqlens`, got 4 at 1"),
        ((4, 3), (-1, 0), "between 0 and the 4 of `cache_seqlens`, got -1 at 0"),
        ((4, -3), (4, 1), "between 0 and the 0 of `cache_seqlens`, got 1 at 1"),
    ],
)
def test_padding_is_checked(lens, pads, words):
    with refuses(f"`cache_leftpad` must be {words}"):
        call(cache_seqlens=int32(*lens), cache_leftpad=int32(*pads))


@pytest.mark.skipif(ON_CUDA, reason="numbers on the device are not read")
@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, 1e-40])
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_descales_are_checked(name, scale):
    rows = np.array([[1.0, 1.0], [1.0, scale]], np.float32)
    with refuses(f"`{name}` must be a positive normal float32, got "):
        call(**ALL_E4M3, **{name: rows})


WILD = (2**31 - 1, -(2**31), 5, -3)


@pytest.mark.parametrize("seed", range(8))
def test_wild_numbers_harm_nothing(seed):
    """On a device they are clamped: results mean nothing, and no other memory is touched. Tables
    and lengths may hold anything on the CPU, too."""
    rng = np.random.default_rng(seed)
    for name, size in (("cu_seqlens_q", 3), ("cache_leftpad", 2), ("cache_seqlens", 2)):
        wild = {name: rng.choice(WILD, size).astype(np.int32)}
        wild["block_table"] = rng.choice(WILD, (2, 2)).astype(np.int32)
        if name == "cache_seqlens":
            wild[name][wild[name] > 5] = 1_000_000 if ON_CUDA else 2**31 - 1  # past the table
        try:
            call(**wild)
        except ValueError as error:
            assert not ON_CUDA, error
            assert name in str(error)
            assert name != "cache_seqlens"


def test_queries_behind_all_tokens_of_a_device():
    """A result with rows of no request, which neither table nor length has."""
    out, lse = call(q=bf16(5, 4, 24))
    assert not np.asarray(out[3:], np.float32).any()
    assert np.isneginf(lse[3:]).all()
