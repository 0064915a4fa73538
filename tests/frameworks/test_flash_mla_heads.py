"""The drop-in for `flash_mla`: dense decoding with several KV heads, and in fp16."""

from __future__ import annotations

import numpy as np
import pytest
from dense_cases import Mask
from flash_attn_cases import Heads
from flash_mla_cases import Arrays
from helpers import assert_error_text, assert_same_bits

from sparse_mla import flash_mla, ops

CAUSAL = Mask(causal=True)
NUMPY = Arrays("numpy")
# As FlashMLA's own test has them, bf16 with one head goes another way.
KINDS = [(2, "bf16"), (4, "bf16"), (1, "fp16"), (2, "fp16")]


def make(seq_lens, s_q=2, heads=16, kv_heads=2, kind="bf16", dim=576, **changes) -> Heads:
    dims = (dim, 512)
    return Heads([s_q] * len(seq_lens), seq_lens, heads, kv_heads, dims, kind, kind, **changes)


@pytest.mark.parametrize("mask", [Mask(), CAUSAL])
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize(("kv_heads", "kind"), KINDS)
def test_against_fp64(kv_heads, kind, s_q, mask, arrays):
    """Also a request without keys, whose lse is +inf, and one with fewer keys than queries. Pages
    have NaN where no query looks, and the table junk behind a request's pages."""
    lens, heads = [140, 0, 1, 64], 4 * kv_heads
    for page_size in (64, 16, 1):
        more = {"mask": mask, "sink": page_size < 64, "page_size": page_size}
        make(lens, s_q, heads, kv_heads, kind, **more).check(arrays)


@pytest.mark.parametrize(("kv_heads", "kind"), KINDS)
def test_keys_of_512_values(kv_heads, kind, arrays):
    make([70, 3], kv_heads=kv_heads, kind=kind, dim=512, mask=CAUSAL).check(arrays)


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed):
    rng = np.random.default_rng([seed, 80])
    kv_heads, kind = KINDS[rng.integers(4)]
    lens = [int(rng.integers(0, 200)) for _ in range(rng.integers(1, 5))]
    case = make(
        lens, int(rng.integers(1, 5)), kv_heads * int(rng.integers(1, 9)), kv_heads, kind,
        dim=int(rng.choice([576, 512])), mask=Mask(bool(rng.integers(2))), seed=seed,
        page_size=int(rng.choice([1, 3, 16, 64])), holes=float(rng.choice([0.0, 0.2])),
        layout=str(rng.choice(["apart", "heads"])), is_spread=bool(rng.integers(2)),
        sink=bool(rng.integers(2)),
    )  # fmt: skip
    case.check(NUMPY)


@pytest.mark.parametrize(("kv_heads", "kind"), KINDS)
def test_values_are_a_view_of_keys(kv_heads, kind, monkeypatch):
    """paged_attention gets the caller's memory."""
    seen = []
    attend = ops.paged_attention
    monkeypatch.setattr(
        ops, "paged_attention", lambda *args, **more: seen.append(args) or attend(*args, **more)
    )
    case = make([70, 3], kv_heads=kv_heads, kind=kind)
    case.decode(NUMPY)
    ((q, k, v, *_),) = seen
    assert all(np.shares_memory(x, y) for x, y in ((q, case.q), (k, case.k_cache), (v, k)))
    assert v.ctypes.data == k.ctypes.data
    assert v.strides == k.strides


def test_one_head_of_bf16_stays_with_mla_attention(monkeypatch):
    monkeypatch.setattr(ops, "paged_attention", None)
    make([70, 3], kv_heads=1).check(NUMPY)


@pytest.mark.parametrize("count", [1, 7, 33])
def test_batch_invariance(count):
    """Requests give the same bits alone and in a batch."""
    case = make([300] * 33, 1)
    whole = case.decode(NUMPY, enable_batch_invariant=True)
    q, k_cache, _, table, lens = case.arguments()
    got = flash_mla.flash_mla_with_kvcache(
        q[:count, None], k_cache, table[:count], lens[:count], 512, None,
        enable_batch_invariant=True,
    )  # fmt: skip
    for x, y in zip(got, whole, strict=True):
        assert_same_bits(np.ascontiguousarray(x), np.ascontiguousarray(y[:count]))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_out_is_written(kind, writable_arrays):
    put, get = writable_arrays.put, writable_arrays.get
    case = make([40, 9], kind=kind)
    q, k_cache, _, table, lens = case.arguments()
    out, meta = put(np.zeros((2, 2, 16, 512), q.dtype)), flash_mla.FlashMLASchedMeta()
    q = q.reshape(2, 2, 16, 576)
    result, _ = flash_mla.flash_mla_with_kvcache(
        *map(put, (q, k_cache, table, lens)), 512, meta, out=out
    )
    assert result is out
    assert meta.have_initialized
    assert_same_bits(get(out), case.decode(writable_arrays)[0])


def zeros(*shape, dtype) -> np.ndarray:
    return np.zeros(shape, dtype)


BF16 = make([1]).q.dtype
E4M3 = Heads([1], [1], 2, 2, (64, 64), "e4m3", "e4m3").q.dtype
QUERY, CACHE = (3, 2, 16, 576), (2, 64, 2, 576)
REFUSED = {
    # Dense FP8 has no kernel here, whatever paged_attention takes.
    "FP8 keys": (BF16, CACHE, E4M3, {}, "mla_attention", "kv_cache"),
    "all FP8": (E4M3, CACHE, E4M3, {}, "mla_attention", "kv_cache|q"),
    "bytes": (BF16, CACHE, np.uint8, {}, "mla_attention", "kv_cache"),
    "FP8 query of fp16 keys": (E4M3, CACHE, np.float16, {}, "mla_attention", "kv_cache|q"),
    "fp16 query of bf16 keys": (np.float16, CACHE, BF16, {}, "mla_attention", "kv_cache|q"),
    "bf16 query of fp16 keys": (BF16, CACHE, np.float16, {}, "mla_attention", "kv_cache|q"),
    "heads that do not divide": (BF16, (2, 64, 3, 576), BF16, {}, "paged_attention", "k_cache"),
    "no heads": (BF16, (2, 64, 0, 576), BF16, {}, "paged_attention", "k_cache"),
    "fp16 of rank 3": (
        np.float16, (2, 64, 576), np.float16, {}, "flash_mla_with_kvcache", "k_cache",
    ),
    "a format of bytes": (
        BF16, CACHE, BF16, {"kv_format": "V32"}, "flash_mla_with_kvcache", "kv_format",
    ),
    "FP8 flag": (
        BF16, CACHE, BF16, {"is_fp8_kvcache": True}, "flash_mla_with_kvcache", "is_fp8_kvcache",
    ),
    "scales": (
        BF16, CACHE, BF16, {"descale_k": zeros(1, dtype=np.float32)}, "flash_mla_with_kvcache",
        "descale_k",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    q_type, shape, kv_type, more, op, argument = REFUSED[name]
    table, lens = np.zeros((3, 1), np.int32), np.ones(3, np.int32)
    q, k_cache = zeros(*QUERY, dtype=q_type), zeros(*shape, dtype=kv_type)
    with pytest.raises((TypeError, ValueError)) as caught:
        flash_mla.flash_mla_with_kvcache(q, k_cache, table, lens, 512, None, **more)
    assert_error_text(caught.value, op, argument.split("|"))
