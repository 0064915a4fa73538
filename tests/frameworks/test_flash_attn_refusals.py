"""What sparse_mla.flash_attn refuses, and that each error names the argument."""

from __future__ import annotations

import re

import numpy as np
import pytest
import reference as ref
from cases import bf16, int32

from sparse_mla.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

KVCACHE = {
    "q": bf16(2, 3, 4, 16),
    "k_cache": bf16(5, 8, 2, 16),
    "v_cache": bf16(5, 8, 2, 24),
    "page_table": int32([0, 1], [2, 3]),
    "cache_seqlens": int32(14, 6),
}
VARLEN = {
    "q": bf16(6, 4, 16),
    "k": bf16(9, 2, 16),
    "v": bf16(9, 2, 24),
    "cu_seqlens_q": int32(0, 3, 6),
    "cu_seqlens_k": int32(0, 4, 9),
}
TABLE = {
    "k": KVCACHE["k_cache"],
    "v": KVCACHE["v_cache"],
    "page_table": KVCACHE["page_table"],
    "seqused_k": int32(14, 6),
    "cu_seqlens_k": None,
}
NO_TABLE = {"page_table": None}

BEFORE = (
    "`{}` must be None, because keys are turned by sparse_mla.apply_rope and written by "
    "sparse_mla.reshape_and_cache before the call, got {}"
)
NEW_KEYS = [
    *(
        ({name: bf16(2, 3, 2, 16)}, BEFORE.format(name, "an array"))
        for name in ("k", "v", "rotary_cos", "rotary_sin")
    ),
    ({"k": 3}, BEFORE.format("k", "3")),
    ({"k": bf16(2), "rotary_seqlens": int32(1, 2)}, BEFORE.format("k", "an array")),
    ({"k": bf16(2), "cu_seqlens_k_new": int32(0, 1)}, BEFORE.format("k", "an array")),
]
ERRORS = [
    *NEW_KEYS,
    ({"cache_batch_idx": int32(0, 1)},
     "`cache_batch_idx` must be None beside a table of pages, got an array"),
    (NO_TABLE | {"block_table": int32([0], [1]), "cache_batch_idx": int32(0, 1)},
     "`cache_batch_idx` must be None beside a table of pages, got an array"),
    (NO_TABLE | {"cache_batch_idx": int32(0)}, "`cache_batch_idx` must have shape [2], got [1]"),
    (NO_TABLE | {"cache_batch_idx": int32([0], [1])},
     "`cache_batch_idx` must have shape [B], got [2, 1]"),
    (NO_TABLE | {"k_cache": bf16(1, 8, 2, 16), "v_cache": bf16(1, 8, 2, 24)},
     "`k_cache` must have a page for each of the 2 requests without `page_table` and "
     "`cache_batch_idx`, got 1"),
    ({"block_table": int32([0])},
     "`page_table` must be None beside `block_table`, its other name, got an array"),
    ({"sinks": bf16(4), "s_aux": bf16(4)},
     "`sinks` must be None beside `s_aux`, its other name, got an array"),
    ({"sinks": bf16(4, 1)}, "`sinks` must have shape [H], got [4, 1]"),
    ({"page_table": int32(0, 1)}, "`page_table` must have shape [B, W], got [2]"),
    ({"q": bf16(6, 4, 16)}, "`q` must have shape [B, n, H, D], got [6, 4, 16]"),
    ({"cu_seqlens_q": int32(0, 3, 6)}, "`q` must have shape [T, H, D], got [2, 3, 4, 16]"),
    ({"q": bf16(6, 4, 16), "cu_seqlens_q": int32([0, 3, 6])},
     "`cu_seqlens_q` must have shape [B + 1], got [1, 3]"),
    ({"k_cache": bf16(5, 8, 16)},
     "`k_cache` must have shape [pages, page_size, Hk, D], got [5, 8, 16]"),
    ({"v_cache": bf16(5, 8, 24)},
     "`v_cache` must have shape [pages, page_size, Hk, Dv], got [5, 8, 24]"),
    ({"qv": bf16(6, 4, 24)}, "`qv` must have shape [B, n, H, Dv], got [6, 4, 24]"),
    ({"qv": bf16(3, 2, 4, 24)}, "`qv` must have shape [2, 3, 4, Dv], got [3, 2, 4, 24]"),
    ({"cache_seqlens": -1}, "`cache_seqlens` must be 0 to 2147483647, got -1"),
    ({"cache_seqlens": 2**31}, "`cache_seqlens` must be 0 to 2147483647, got 2147483648"),
    ({"out": bf16(2, 3, 4, 16)}, "`out` must have shape [2, 3, 4, 24], got [2, 3, 4, 16]"),
    ({"out": bf16(2, 5, 4, 24)[:, :3]},
     "`out` must have batches that follow each other without a gap, got strides [960, 192, 48, 2]"),
]  # fmt: skip
TYPE_ERRORS = [
    ({"q": [1, 2]}, "`q` must be an array [B, n, H, D] with"),
    ({"k_cache": 5}, "`k_cache` must be an array [pages, page_size, Hk, D] with"),
    ({"v_cache": None}, "`v_cache` must be an array [pages, page_size, Hk, Dv] with"),
    ({"page_table": 5}, "`page_table` must be an array [B, W] with"),
    (NO_TABLE | {"cache_batch_idx": 3}, "`cache_batch_idx` must be an array [B] with"),
    ({"cache_seqlens": 3.5}, "`cache_seqlens` must be an int, got "),
    ({"cache_seqlens": [14, 6]}, "`cache_seqlens` must be an int, got "),
    ({"sinks": 1.0}, "`sinks` must be an array [H] with"),
    ({"qv": 1.0}, "`qv` must be an array [B, n, H, Dv] with"),
]
VARLEN_ERRORS = [
    ({"dropout_p": 0.5}, "`dropout_p` must be 0, there is no dropout here, got 0.5"),
    ({"seqused_q": int32(1, 2)},
     "`seqused_q` must be None, because queries follow each other without gaps, got an array"),
    ({"alibi_slopes": np.ones(4, np.float32)},
     "`alibi_slopes` must be None, because scores have no bias here, got an array"),
    ({"cu_seqlens_k": None}, "`cu_seqlens_k` must be given without a table of pages, got None"),
    (TABLE | {"seqused_k": None}, "`seqused_k` must be given beside a table of pages, got None"),
    (TABLE | {"cu_seqlens_k": int32(0, 4, 9)},
     "`cu_seqlens_k` must be None beside a table of pages, got an array"),
    (TABLE | {"block_table": int32([0])},
     "`page_table` must be None beside `block_table`, its other name, got an array"),
    ({"qv": bf16(6, 4, 24), "q_v": bf16(6, 4, 24)},
     "`qv` must be None beside `q_v`, its other name, got an array"),
    ({"q": bf16(2, 3, 4, 16)}, "`q` must have shape [T, H, D], got [2, 3, 4, 16]"),
    ({"seqused_k": int32(4)}, "`seqused_k` must have shape [2], got [1]"),
    ({"qv": bf16(6, 4, 24), "k": bf16(1, 9, 2, 16)},
     "`k` must have shape [S, Hk, D], got [1, 9, 2, 16]"),
    ({"qv": bf16(6, 4, 24), "v": bf16(1, 9, 2, 24)},
     "`v` must have shape [S, Hk, Dv], got [1, 9, 2, 24]"),
    ({"qv": bf16(5, 4, 24)}, "`qv` must have shape [6, 4, Dv], got [5, 4, 24]"),
]  # fmt: skip
# What the operators refuse, in their words.
PAGED = (flash_attn_with_kvcache, KVCACHE, "paged_attention")
CONTIGUOUS = (flash_attn_varlen_func, VARLEN, "varlen_attention")
OF_OPERATORS = [
    (*PAGED, {"k_descale": 2.0}, "k_descale"),
    (*PAGED, {"window_size": (-2, 0)}, "window_size"),
    (*PAGED, {"softcap": -1.0}, "softcap"),
    (*PAGED, {"attention_chunk": -1}, "attention_chunk"),
    (*PAGED, {"num_splits": 65}, "num_splits"),
    (*PAGED, {"q": bf16(2, 3, 4, 0)}, "q"),
    (*PAGED, {"q": bf16(2, 3, 3, 16)}, "k_cache"),
    (*PAGED, {"cache_leftpad": int32(15, 0)}, "cache_leftpad"),
    (*PAGED, {"qv": bf16(2, 3, 4, 16)}, "qv"),
    (*CONTIGUOUS, {"k_descale": 2.0}, "k_descale"),
    (*CONTIGUOUS, {"cu_seqlens_k": int32(0, 9, 4)}, "cu_seqlens_k"),
    (*CONTIGUOUS, {"q": bf16(6, 4, 0)}, "q"),
    (flash_attn_varlen_func, VARLEN | TABLE, "paged_attention", {"window_size": (0, -2)},
     "window_size"),
]  # fmt: skip


def expect(error: type, words: str):
    return pytest.raises(error, match=f"^{re.escape(words)}")


@pytest.mark.parametrize(
    ("changes", "words", "error"),
    [*((*row, ValueError) for row in ERRORS), *((*row, TypeError) for row in TYPE_ERRORS)],
)
def test_errors(changes, words, error):
    with expect(error, f"flash_attn_with_kvcache: {words}"):
        flash_attn_with_kvcache(**(KVCACHE | changes))


@pytest.mark.parametrize(("changes", "words"), VARLEN_ERRORS)
def test_varlen_errors(changes, words):
    with expect(ValueError, f"flash_attn_varlen_func: {words}"):
        flash_attn_varlen_func(**(VARLEN | changes))


@pytest.mark.parametrize(("function", "good", "op", "changes", "argument"), OF_OPERATORS)
def test_errors_of_operators(function, good, op, changes, argument):
    with expect(ValueError, f"{op}: `{argument}` must "):
        function(**(good | changes))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (flash_attn_with_kvcache, KVCACHE),
        (flash_attn_varlen_func, VARLEN),
        (flash_attn_varlen_func, VARLEN | TABLE),
    ],
)
def test_the_calls_are_good(function, arguments):
    assert function(**arguments).shape[-2:] == (4, 24)


def test_nothing_is_written_by_a_refused_call():
    out = np.full((2, 3, 4, 24), 7, ref.BF16)
    for changes in [changes for changes, _ in ERRORS if "out" not in changes]:
        with pytest.raises(ValueError, match="must"):
            flash_attn_with_kvcache(**(KVCACHE | {"out": out} | changes))
    assert (out.astype(np.float32) == 7).all()
