"""Batches whose index lists have keys up to lengths of their own, as launches for Hopper plan them:
made, run several times, judged at some tokens."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import reference as ref
from cases import AttentionInputs
from helpers import assert_same_bits, assert_within_bounds, guarded_attention
from library import sparse_mla

attend = sparse_mla.sparse_attention

NUM_SLOTS = 4096
WIDTH = 2048

# Name -> the lengths of n lists of WIDTH columns.
LENGTHS = {
    "full": lambda rng, n: np.full(n, WIDTH),
    "any": lambda rng, n: rng.integers(0, WIDTH + 1, n),
    "short": lambda rng, n: rng.integers(0, 140, n),
    "one key": lambda rng, n: np.ones(n),
    "one is long": lambda rng, n: np.where(np.arange(n) == n // 2, WIDTH, 200),
    "few are long": lambda rng, n: np.where(np.arange(n) % 9 == 0, WIDTH, rng.integers(0, 300, n)),
    "half are long": lambda rng, n: np.where(np.arange(n) % 2 == 0, WIDTH, 100),
    "half are empty": lambda rng, n: np.where(np.arange(n) % 2 == 0, 1700, 0),
}

every_format = pytest.mark.parametrize("fmt", ["fp8", "bf16"])


def make_lists(rng, fmt, length, num_heads, width=WIDTH, *, by_length) -> AttentionInputs:
    """One list of `width` entries per element of `length`: keys up to this length, which is the
    list's topk_length or has -1 behind it. With sinks; the plan chooses the splits."""
    rows = cases.make_rows(rng, NUM_SLOTS, fmt)
    indices = rng.integers(0, NUM_SLOTS, (len(length), width)).astype(np.int32)
    options = {"softmax_scale": ref.HEAD_DIM**-0.5, "attn_sink": cases.make_sink(rng, num_heads)}
    if by_length:
        options["topk_length"] = length
    else:
        indices[np.arange(width) >= length[:, None]] = -1
    return AttentionInputs(
        q=cases.random_bf16(rng, len(length), num_heads, ref.HEAD_DIM),
        kv=rows.reshape(-1, 64, rows.shape[-1]),
        indices=indices,
        options=options,
    )


def make(fmt, lengths, num_tokens, num_heads, *, by_length=False, seed=0) -> AttentionInputs:
    """Lists whose lengths are those of this name."""
    rng = np.random.default_rng([num_tokens, num_heads, seed])
    length = LENGTHS[lengths](rng, num_tokens).astype(np.int32)
    return make_lists(rng, fmt, length, num_heads, by_length=by_length)


def spoil_rows(case: AttentionInputs, fmt, value) -> np.ndarray:
    """Gives the cache's first 32 rows the scales `value` (of bf16 rows, values of 1e4 at most),
    and takes them out of all lists. -> which entries are keys."""
    rows = case.kv.reshape(-1, case.kv.shape[-1])
    if fmt == "fp8":
        rows[:32, 512:528].view(np.float32)[:] = value
    else:
        rows[:32, :512] = min(value, 1e4)
    is_key = case.indices >= 0
    case.indices[is_key] = np.maximum(case.indices[is_key], 32)
    return is_key


def run_often(case: AttentionInputs, *, times: int, **more) -> tuple[dict, dict]:
    """-> the results, which have the same bits in so many more runs, and those of one split."""
    got = guarded_attention(attend, case, **more)
    for _ in range(times):
        for name, x in guarded_attention(attend, case, **more).items():
            assert_same_bits(x, got[name], f"{name} of another run")
    return got, guarded_attention(attend, case, num_splits=1, **more)


def assert_right(case: AttentionInputs, got: dict, tokens) -> None:
    assert_within_bounds(case.rows(tokens).reference(), {n: x[tokens] for n, x in got.items()})


def assert_nan_stays(case: AttentionInputs, got: dict, value, touched, judged) -> None:
    """The tokens that select a spoilt row have NaN in all results if `value` is NaN; otherwise
    those of them that are to be judged are right."""
    if np.isnan(value):
        assert np.isnan(got["out"][touched].astype(np.float32)).all()
        assert np.isnan(got["lse"][touched]).all()
    else:
        assert_right(case, got, judged)
