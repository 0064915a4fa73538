"""The drop-in for `flash_mla` without indices: dense decoding over a paged cache."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
from cases import cancel_neighbours, make_rows, random_bf16
from dense_cases import Dense, Mask
from flash_mla_cases import ON_GPU, Arrays, check_decode
from helpers import assert_same_bits

from sparse_mla import flash_mla


def make(seq_lens, s_q=2, heads=16, fmt="bf16", causal=True, **changes) -> Dense:
    mask = Mask(causal=causal)
    queries = [s_q] * len(seq_lens)
    return Dense(queries, seq_lens, heads, fmt, 64, mask=mask, is_uniform=True, **changes)


def decode(arrays: Arrays, case: Dense, **options) -> list[np.ndarray]:
    q, cache, table, lens = case.arguments()
    meta = flash_mla.get_mla_metadata()[0]
    common = {"causal": case.mask.causal, "attn_sink": case.attn_sink} | options
    return arrays.call(
        flash_mla.flash_mla_with_kvcache, q, cache[:, :, None], table, lens, 512, meta, **common
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("heads", [1, 3, 63, 128])
def test_dense_decoding(arrays, heads, s_q, causal):
    """Also a request without keys, whose lse is +inf, and one with fewer keys than queries."""
    case = make([140, 0, 1, 64], s_q, heads, causal=causal, sink=heads == 3)
    assert check_decode(case, *decode(arrays, case)).any()


@pytest.mark.parametrize("fmt", ["fp8", "bf16_512"])
def test_other_caches(arrays, fmt):
    case = make([70, 3], fmt=fmt)
    assert not check_decode(case, *decode(arrays, case)).any()


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_batch_invariance(arrays, fmt):
    """Requests give the same bits alone and in a batch. Their 1024 keys cancel in pairs that are
    far from each other, so that rounding shows the order of the sum: without the option, a CPU
    splits the keys of up to 16 requests otherwise than those of 22."""
    length, count = 1024, 33
    rng = np.random.default_rng(5)
    rows = make_rows(rng, length, fmt)
    if fmt == "fp8":
        cancel_neighbours(rows)
    else:
        rows[1::2] = rows[::2]
        rows[1::2, :512] = -rows[1::2, :512]
    cache = rows[rng.permutation(length)].reshape(-1, 64, 1, rows.shape[-1])
    table = np.tile(rng.permutation(length // 64).astype(np.int32), (count, 1))
    lens = np.full(count, length, np.int32)
    q = random_bf16(rng, count, 1, 3, 576)
    q[..., :512] = 0

    def run(requests: int, is_invariant: bool) -> list[np.ndarray]:
        given = (x[:requests] for x in (q, table, lens))
        part, *rest = given
        return arrays.call(
            flash_mla.flash_mla_with_kvcache, part, cache, *rest, 512, None,
            enable_batch_invariant=is_invariant,
        )  # fmt: skip

    whole = run(count, True)
    planned = []
    for requests in (1, 16, 22, 32):
        for a, b in zip(run(requests, True), whole, strict=True):
            assert_same_bits(np.asarray(a), np.ascontiguousarray(b[:requests]))
        planned.append([x[:1].tobytes() for x in run(requests, False)])
    if not ON_GPU:
        assert planned[0] == planned[1] != planned[2]
        assert planned[0] != [x[:1].tobytes() for x in whole]


def test_one_schedule_serves_calls_of_any_size(arrays):
    """Engines keep the object of a step for all its layers, and some for the next step: no call
    takes from it what another one has planned."""
    meta = flash_mla.get_mla_metadata()[0]
    cases = (
        make([300, 9, 128]),
        make([5], s_q=1, heads=3),
        make([70, 0, 1, 64, 33], s_q=4, heads=64, fmt="fp8"),
        make([300, 9, 128], causal=False, sink=True),
    )

    def run(case: Dense, schedule) -> list[np.ndarray]:
        q, cache, table, lens = case.arguments()
        return arrays.call(
            flash_mla.flash_mla_with_kvcache, q, cache[:, :, None], table, lens, 512, schedule,
            causal=case.mask.causal, attn_sink=case.attn_sink,
        )  # fmt: skip

    for case in (*cases, *reversed(cases)):
        for shared, own in zip(
            run(case, meta), run(case, flash_mla.get_mla_metadata()[0]), strict=True
        ):
            assert_same_bits(np.ascontiguousarray(shared), np.ascontiguousarray(own))


def test_queries_with_gaps_are_copied():
    numpy = Arrays("numpy")
    case = make([40, 9], s_q=3)
    want, _ = decode(numpy, case)
    larger = np.zeros((2, 5, 16, 576), ref.BF16)
    larger[:, :3] = case.q
    case.q = larger[:, :3]
    got, _ = decode(numpy, case)
    assert_same_bits(got, want)


def test_out_is_written(writable_arrays):
    case = make([40, 9])
    put, get = writable_arrays.put, writable_arrays.get
    q, cache, table, lens = map(put, case.arguments())
    out = put(np.zeros((2, 2, 16, 512), ref.BF16))
    meta = flash_mla.FlashMLASchedMeta()
    result, _ = flash_mla.flash_mla_with_kvcache(
        q, cache, table, lens, 512, meta, causal=True, out=out
    )
    assert result is out
    assert meta.have_initialized
    assert_same_bits(get(out), decode(writable_arrays, case)[0])
