"""varlen_attention of e4m3 arrays with descales of any size, and a softmax_scale that makes logits
of ordinary size: results are those of fp64 wherever they are normal numbers of bf16. Rows of
descales that several requests share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference as ref
from helpers import assert_same_bits
from library import sparse_mla
from paged_cases import Paged
from varlen_cases import Varlen

F32 = np.float32
DESCALES = [1.2e-38, 1e-30, 1e-15, 1.0, 1e30, 3e38]
SINK = np.full(2, 3, F32)


def make(rng, tokens, size):
    codes = ref.e4m3_encode((rng.uniform(-1, 1, (tokens, 2, 128)) * size).astype(F32))
    return codes.view(ref.E4M3), ref.e4m3_decode(codes).transpose(1, 0, 2).astype(np.float64)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sink", [None, SINK])
@pytest.mark.parametrize("num_keys", [1, 2, 70])
def test_descales(num_keys, sink, softcap):
    rng = np.random.default_rng(num_keys)
    starts = [np.array([0, n], np.int32) for n in (2, num_keys)]
    num_cases = 0
    for descales in itertools.product(DESCALES, repeat=3):
        q_descale, k_descale, v_descale = (float(F32(x)) for x in descales)
        scale = 1 / q_descale / k_descale / 8192
        if not 1.2e-38 < scale < 2.3e38:
            continue
        num_cases += 1
        (q, wide_q), (k, wide_k) = make(rng, 2, 16), make(rng, num_keys, 16)
        v, wide_v = make(rng, num_keys, min(400, 3e38 / v_descale))
        out, lse = sparse_mla.varlen_attention(
            q, k, v, *starts, softmax_scale=scale, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale, attn_sink=sink, softcap=softcap,
        )  # fmt: skip
        logits = wide_q @ wide_k.transpose(0, 2, 1) * (q_descale * k_descale * scale)
        logits = softcap * np.tanh(logits / softcap) if softcap else logits
        want_lse = np.log(np.exp(logits).sum(2))
        p = np.exp(logits - want_lse[..., None])
        if sink is not None:
            p /= 1 + np.exp(sink[:, None] - want_lse)[..., None]
        values = wide_v * v_descale
        want, size = p @ values, p @ np.abs(values)
        got = ref.to_f32(np.asarray(out)).astype(np.float64).transpose(1, 0, 2)
        tolerance = 2.0**-8 * (size + np.abs(want)) + 1e-4 * size + 2.0**-126
        assert ref.worst_ratio(got, want, tolerance) <= 1
        assert np.abs(np.asarray(lse).T - want_lse).max() < 1e-4
    assert num_cases >= 60


@pytest.mark.parametrize("num_rows", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", [Varlen, Paged])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_requests_may_share_a_row(name, kind, num_rows):
    """Request b has row b // (6 / num_rows), which gives the bits of a row for each request."""
    types = {"q_type": "e4m3", "kv_type": "e4m3", "descales": "rows"}
    case = kind([3, 1, 0, 2, 1, 5], [9, 40, 3, 0, 70, 6], 4, 2, (64, 64), **types)
    rows = case.scales[name][:num_rows].copy()
    case.scales[name] = rows.repeat(6 // num_rows, 0)
    op = sparse_mla.varlen_attention if kind is Varlen else sparse_mla.paged_attention

    def attend(*arrays, **options):
        return op(*arrays, **options | {f"{name}_descale": rows})

    got, want = case.run(attend), case.run(op)
    for x in want:
        assert_same_bits(got[x], want[x], x)
