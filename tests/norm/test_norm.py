"""fused_q_kv_rmsnorm (csrc/cpu/norm and csrc/cuda/norm)."""

import numpy as np
import pytest
import reference as ref
import reference_norm as norm
from helpers import Guarded, assert_same_bits
from library import sparse_mla

F32 = np.float32


def rows(T: int, size: int, seed=0, shift=0, gap=8) -> tuple[np.ndarray, np.ndarray]:
    """q and kv as columns of one buffer, heavy-tailed."""
    rng = np.random.default_rng(seed)
    buffer = ref.to_bf16(rng.standard_t(2, (T, shift + size + 512 + gap)).astype(F32))
    return buffer[:, shift : shift + size], buffer[:, shift + size : shift + size + 512]


def weights(size: int, dtype, seed=1) -> np.ndarray:
    value = np.random.default_rng(seed).normal(1, 0.5, size).astype(F32)
    return ref.to_bf16(value) if dtype == "bf16" else value


def check_norm(q, kv, q_weight, kv_weight, eps=1e-6, row_gap=0) -> tuple:
    outs = [Guarded(x.shape, ref.BF16, row_gap=row_gap) for x in (q, kv)]
    got = sparse_mla.fused_q_kv_rmsnorm(
        q, kv, q_weight, kv_weight, eps=eps, q_out=outs[0].array, kv_out=outs[1].array
    )
    assert got[0] is outs[0].array
    assert got[1] is outs[1].array
    results = [out.check() for out in outs]
    for x, w, y in zip((q, kv), (q_weight, kv_weight), results, strict=True):
        assert_same_bits(ref.bits16(y), norm.rms_norm_bits(x, w, eps))
    return tuple(results)


@pytest.mark.parametrize("T", [0, 1, 17, 300])
@pytest.mark.parametrize("size", [1, 7, 64, 255, 256, 264, 1024, 1536, 1544, 2500, 8192])
def test_norm(T, size):
    q, kv = rows(T, size, gap=0)
    kinds = ("bf16", "fp32") if size % 2 else ("fp32", "bf16")
    w = weights(size, kinds[0]), weights(512, kinds[1], 2)
    results = check_norm(q, kv, *w, row_gap=8 * (T % 2))
    for x, weight, y in zip((q, kv), w, results, strict=True):
        want, tolerance = norm.rms_norm(x, weight, 1e-6)
        assert ref.worst_ratio(y, want, tolerance) <= 1


@pytest.mark.parametrize("shift", [1, 4, 8])
@pytest.mark.parametrize("size", [96, 1024, 1025])
def test_norm_of_columns(shift, size):
    """Rows begin off a multiple of 16 bytes; rows go backwards; all rows are one row."""
    q, kv = rows(9, size, shift=shift, gap=3)
    w = weights(size + 1, "bf16")[1:], weights(513, "fp32")[1:]
    check_norm(q, kv, *w)
    check_norm(q[::-1], kv[::-1], *w, row_gap=1)
    check_norm(np.broadcast_to(q[:1], q.shape), np.broadcast_to(kv[:1], kv.shape), *w, row_gap=3)


@pytest.mark.parametrize("size", [96, 1024, 2500])
def test_norm_in_place(size):
    """Outputs are their inputs: columns of one buffer, whose other columns stay."""
    q, kv = rows(11, size, gap=5)
    buffer = q.base if q.base is not None else q
    want = check_norm(q.copy(), kv.copy(), weights(size, "bf16"), weights(512, "bf16"))
    rest = buffer[:, size + 512 :].copy()
    got = sparse_mla.fused_q_kv_rmsnorm(
        q, kv, weights(size, "bf16"), weights(512, "bf16"), eps=1e-6, q_out=q, kv_out=kv
    )
    assert got[0] is q
    assert got[1] is kv
    assert_same_bits(q, want[0])
    assert_same_bits(kv, want[1])
    assert_same_bits(buffer[:, size + 512 :], rest)


def test_norm_overlaps():
    """An output is its own input or shares nothing with it; the other input is no excuse."""
    buffer = ref.to_bf16(np.ones((4, 2100), F32))
    q, kv = buffer[:, :512], buffer[:, 512:1024]
    w = np.ones(512, F32)

    def refused(text, q=q, kv=kv, **outs):
        before = buffer.tobytes()
        with pytest.raises(ValueError, match="fused_q_kv_rmsnorm") as info:
            sparse_mla.fused_q_kv_rmsnorm(q, kv, w, w, eps=0.1, **outs)
        assert str(info.value) == f"fused_q_kv_rmsnorm: {text}, got arrays that share memory"
        assert buffer.tobytes() == before

    refused("`q_out` must be the whole of or not overlap `q`", q_out=buffer[:, 1:513])
    refused("`q_out` must be the whole of or not overlap `q`", q=q[::-1], q_out=q)
    refused("`q_out` must not overlap `kv`", q_out=kv)
    refused("`kv_out` must not overlap `q`", kv_out=q)
    refused("`q_out` must not overlap `kv`", q=buffer[:, 1200:1712], kv=q, q_out=q)
    refused("`q_out` must not overlap `kv`", kv=q, q_out=q)
    refused("`q_out` must not overlap `kv_out`", q_out=buffer[:, 1024:1536], kv_out=buffer[:, 1535:][:, :512])  # noqa: E501  # fmt: skip
    sparse_mla.fused_q_kv_rmsnorm(q, kv, w, w, eps=0.1, q_out=buffer[:, 1024:1536], kv_out=kv)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 2.0**-126, 3.0, 3e38])
def test_norm_extremes(eps):
    """Zero rows, NaN, infinities, tiny values whose squares vanish, huge ones whose squares
    overflow: exactly the fp32 steps."""
    q = np.zeros((9, 300), F32)
    q[1, 5], q[2, 7], q[3, 0], q[3, 9] = np.nan, np.inf, -np.inf, 1
    q[4], q[5], q[6, 3], q[7] = 1e-30, 1e30, 3e38, 1e-19
    q[8, ::2], q[8, 1::2] = -0.0, 1e-40
    q = ref.to_bf16(q)
    q[1, 6] = ref.bits16(q[1, 6:7])[0] * 0 - ref.to_bf16(np.float32([np.nan]))[0]  # a negative NaN
    kv = ref.to_bf16(np.zeros((9, 512), F32))
    kv[:, :300] = q
    w = weights(300, "bf16"), weights(512, "fp32")
    w[0][2], w[1][3] = np.nan, np.inf
    q_out, _ = check_norm(q, kv, *w, eps=eps)
    assert np.isnan(ref.to_f32(q_out)[1]).all(), "a NaN reaches the whole row"
    if eps > 0:
        assert (ref.to_f32(q_out)[0, 3:] == 0).all()
        assert (ref.to_f32(q_out)[5, 3:] == 0).all(), "a sum that overflows"


def test_norm_results_are_new_arrays():
    q, kv = rows(3, 96)
    got = sparse_mla.fused_q_kv_rmsnorm(q, kv, weights(96, "bf16"), weights(512, "bf16"), eps=1e-6)
    want = check_norm(q, kv, weights(96, "bf16"), weights(512, "bf16"))
    for x, y in zip(got, want, strict=True):
        assert (type(x), x.dtype) == (np.ndarray, ref.BF16)
        assert_same_bits(x, y)


@pytest.mark.parametrize("size", [513, 1024, 1800])
def test_norm_of_many_tokens(size):
    """Enough for a GPU to give a warp both rows of a token."""
    q, kv = rows(8192, size)
    check_norm(q, kv, weights(size, "bf16"), weights(512, "bf16"))
