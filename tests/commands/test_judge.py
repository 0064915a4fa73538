"""The fp64 reference by which the demo and the benchmarks judge results tells right from wrong."""

import cases
import numpy as np
import pytest
import reference as ref
import reference_norm
import row_formats

import sparse_mla
from sparse_mla import _judge

pytestmark = pytest.mark.frameworks


def judged(num_keys, **change):
    rng = np.random.default_rng(1)
    q = cases.random_bf16(rng, 2, 576)
    rows = cases.make_rows(rng, num_keys, "fp8")
    keys = _judge.exact_rows(rows)
    out, lse = np.zeros((2, 512), ref.BF16), np.full(2, -np.inf, np.float32)
    if num_keys:
        result = sparse_mla.sparse_attention(
            q[None], rows[None], np.arange(num_keys, dtype=np.int32)[None], softmax_scale=0.1
        )
        out, lse = result[0][0].copy(), result[1][0].copy()
    for name, value in change.items():
        {"out": out, "lse": lse}[name][1] = value
    return _judge.judge_row(q, keys, out, lse, softmax_scale=0.1)


def test_the_judge_keeps_the_worst_of_each():
    total = _judge.Fractions()
    for out, lse in [(0.25, 0.5), (0.75, 0.125), (0.5, 0.25)]:
        total.add(_judge.Fractions(out, lse, rows=2))
    assert total == _judge.Fractions(0.75, 0.5, rows=6)
    assert total.within
    assert _judge.Fractions(1, 1).within
    assert not _judge.Fractions(1.001, 0).within
    assert not _judge.Fractions(0, 1.001).within
    for a, b in [(np.nan, 0.5), (0.5, np.nan), (np.nan, np.nan), (np.inf, 0.5)]:
        assert _judge.worse(a, b) == np.inf


@pytest.mark.parametrize("num_keys", [0, 1, 40])
def test_the_judge_tells_right_from_wrong(num_keys):
    right = judged(num_keys)
    assert right.within
    assert right.rows == 1
    assert (right.out == 0) == (num_keys == 0)
    for name, value in [("out", 7.0), ("out", np.nan), ("lse", 1e4), ("lse", np.nan)]:
        wrong = judged(num_keys, **{name: value})
        assert not wrong.within, (name, value)
        total = _judge.Fractions()
        for part in (right, wrong, right):
            total.add(part)
        assert not total.within, "NaN is worse than any number"
        assert total.rows == 3
        assert (total.out, total.lse) >= (right.out, right.lse)


def test_the_judge_s_rows_are_the_bytes_meaning():
    rng = np.random.default_rng(2)
    rows = cases.make_rows(rng, 5, "fp8")
    assert np.array_equal(_judge.exact_rows(rows), ref.decode_rows(rows, np.arange(5)))
    bf16 = cases.make_rows(rng, 5, "bf16")
    assert np.array_equal(_judge.exact_rows(bf16), bf16.astype(np.float64))
    gathered = np.zeros((5, 576), ref.BF16)
    table, lens, starts = (np.array(x, np.int32) for x in ([[0]], [5], [0]))
    sparse_mla.gather_kv_cache(rows[None], table, lens, starts, out=gathered)
    assert np.array_equal(ref.bits16(_judge.upconvert_rows(rows)), ref.bits16(gathered))


@pytest.mark.parametrize("name", ["fp8_v4", "bfloat16"])
def test_the_judge_s_rows_of_v4_are_the_bytes_meaning(name):
    """Any bytes of which no number is NaN or infinite, in pages of 5 rows."""
    pages, slots = row_formats.Pages(name), np.array([19, 0, 7, 7, 4])
    pages.memory &= 0xBF  # the first bit of every exponent is 0
    want = pages.values(slots).astype(np.float64)
    assert np.array_equal(_judge.exact_v4_rows(pages.cache, slots), want)
    assert np.isfinite(want).all()
    assert len(np.unique(want)) > 500


def test_the_judge_turns_back_as_the_operator_does():
    rng = np.random.default_rng(5)
    table = sparse_mla.rope_table(9, fp32_angles=True)
    o = cases.random_bf16(rng, 3, 2, 512)
    want = reference_norm.turn_back(o, np.array([8, 0, 3]), table)
    for row, position, turned in zip(o.astype(np.float64), (8, 0, 3), want, strict=True):
        assert np.allclose(row @ _judge.inverse_rope(table[position]), turned, rtol=0, atol=1e-6)


def test_the_judge_s_sink_is_the_reference_s():
    """It takes its part of the result and of the bound, and leaves lse alone."""
    rng = np.random.default_rng(6)
    q, rows = cases.random_bf16(rng, 3, 576), cases.make_rows(rng, 40, "bf16")
    sink = np.array([-50, 4, 9], np.float32)
    indices = np.arange(40, dtype=np.int32)[None]
    want = ref.attention(q[None], rows, indices, softmax_scale=0.1, attn_sink=sink)
    exact = _judge.attend_row(q, _judge.exact_rows(rows), softmax_scale=0.1, sink=sink)
    for got, wanted in (
        (exact.out, want.out),
        (exact.out_bound, want.out_tolerance()),
        (exact.lse, want.lse),
        (exact.lse_bound, want.lse_tolerance()),
    ):
        assert np.allclose(got, wanted[0], rtol=1e-12, atol=0)


def test_the_judge_reads_rows_of_any_dtype_and_stride():
    rows = cases.make_rows(np.random.default_rng(3), 6, "fp8")
    want = _judge.exact_rows(rows)
    wide = np.zeros((12, 700), np.uint8)
    wide[::2, :656] = rows
    for same in (rows.view(np.int8), rows.view(ref.E4M3), wide[::2, :656]):
        assert np.array_equal(_judge.exact_rows(same), want)


def test_the_judge_allows_for_rounded_keys():
    """Gathered rows have a larger bound, because they are rounded to bf16: a step of out here."""
    rng = np.random.default_rng(4)
    q, keys = cases.random_bf16(rng, 2, 576), rng.normal(0, 1, (9, 576))
    logits = 0.1 * q.astype(np.float64) @ keys.T
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    out = weights @ keys[:, :512] + 2.0**-8 * weights @ np.abs(keys[:, :512])
    lse = np.log(np.exp(logits).sum(1)).astype(np.float32)
    judge = [
        _judge.judge_row(q, keys, out, lse, softmax_scale=0.1, gathered=gathered)
        for gathered in (False, True)
    ]
    assert judge[1].out < judge[0].out < 3
    assert judge[1].lse < judge[0].lse / 10
    assert judge[1].within
