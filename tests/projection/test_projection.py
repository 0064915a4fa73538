"""split_kv_b_proj, k_up_proj, v_up_proj, kv_up_proj (csrc/cpu/projection/projection.c)."""

import cases
import device
import library
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bf16, assert_same_bits
from library import sparse_mla

SIZES = [(1, 128, 128), (3, 128, 128), (5, 64, 96), (4, 192, 128), (128, 128, 128)]


def make_weight(num_heads, nope, value, seed=0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return cases.random_bf16(rng, 512, num_heads * (nope + value), std=0.05)


def dims(num_heads, nope, value) -> dict:
    return {"num_heads": num_heads, "qk_nope_head_dim": nope, "v_head_dim": value}


def check_split(got, weight_bits, size) -> None:
    names = ("W_UK", "W_UV")
    want = ref.split_kv_b_proj(weight_bits, **dims(*size))
    for name, array, bits in zip(names, got, want, strict=True):
        assert np.asarray(array).dtype == ref.BF16
        assert_same_bf16(array, bits, name)


@pytest.mark.parametrize("size", SIZES)
def test_split_both_storages(size):
    weight = make_weight(*size)
    check_split(sparse_mla.split_kv_b_proj(weight, **dims(*size)), ref.bits16(weight), size)
    transposed = np.ascontiguousarray(weight.T)
    check_split(sparse_mla.split_kv_b_proj(transposed, **dims(*size)), ref.bits16(weight), size)


@pytest.mark.parametrize("stored", ["in_out", "out_in"])
@pytest.mark.parametrize("as_bytes", [True, False])
@pytest.mark.parametrize("size", [(3, 128, 128), (5, 64, 96)])
def test_split_block_scaled_fp8(stored, as_bytes, size):
    """Each block of 128 x 128 weights has a scale. 5 * 160 columns leave a partial block at the
    edge."""
    rng = np.random.default_rng(1)
    columns = size[0] * (size[1] + size[2])
    shape = (512, columns) if stored == "in_out" else (columns, 512)
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 127) == 127] = 0
    blocks = tuple(-(-n // 128) for n in shape)
    scale = rng.uniform(1e-4, 1e-2, blocks).astype(np.float32)
    bits = ref.dequantize_blocks(codes, scale)
    got = sparse_mla.split_kv_b_proj(
        codes if as_bytes else codes.view(ref.E4M3), **dims(*size), weight_scale_inv=scale
    )
    check_split(got, bits if stored == "in_out" else bits.T, size)


def test_split_of_a_quantised_layer_given_as_a_callable():
    """The layer is applied once, to the identity matrix. A layer written with NumPy runs on the CPU
    alone."""
    size = (3, 128, 128)
    weight = make_weight(*size)
    seen = []

    def layer(x):
        x = np.asarray(x)
        seen.append(x.shape)
        product = x.astype(np.float32) @ weight.astype(np.float32)
        return ref.to_bf16(product)

    got = library.package.split_kv_b_proj(layer, **dims(*size))
    assert seen == [(512, 512)]
    check_split(got, ref.bits16(weight), size)


@pytest.mark.parametrize("T", [0, 1, 3, 65])
@pytest.mark.parametrize("size", SIZES[:4])
def test_projections(T, size):
    rng = np.random.default_rng(2)
    num_heads, nope, _ = size
    w_uk, w_uv = sparse_mla.split_kv_b_proj(make_weight(*size), **dims(*size))
    for op, x, weight, formula in (
        ("k_up_proj", cases.random_bf16(rng, T, num_heads, nope), w_uk, ref.k_up_proj),
        ("v_up_proj", cases.random_bf16(rng, T, num_heads, 512), w_uv, ref.v_up_proj),
    ):
        want, tolerance = formula(x, np.asarray(weight))
        buffer = Guarded(want.shape, ref.BF16, row_gap=8)
        run = getattr(sparse_mla, op)
        assert run(x, weight, out=buffer.array) is buffer.array
        assert ref.worst_ratio(buffer.check(), want, tolerance) <= 1, op
        fresh = run(x, weight)
        assert (type(fresh), fresh.dtype) == (np.ndarray, ref.BF16)
        assert_same_bits(fresh, buffer.array, op)


def test_projections_at_128_heads():
    rng = np.random.default_rng(3)
    size = SIZES[-1]
    w_uk, w_uv = sparse_mla.split_kv_b_proj(make_weight(*size), **dims(*size))
    x = cases.random_bf16(rng, 2, 128, 128)
    want, tolerance = ref.k_up_proj(x, np.asarray(w_uk))
    assert ref.worst_ratio(sparse_mla.k_up_proj(x, w_uk), want, tolerance) <= 1
    x = cases.random_bf16(rng, 2, 128, 512)
    want, tolerance = ref.v_up_proj(x, np.asarray(w_uv))
    assert ref.worst_ratio(sparse_mla.v_up_proj(x, w_uv), want, tolerance) <= 1


def test_strided_inputs_give_the_same_bits():
    """q_nope is usually a slice of [T, H, 192]; weights come as views of the layer's weight."""
    rng = np.random.default_rng(4)
    whole = cases.random_bf16(rng, 5, 4, 192)
    weight = make_weight(4, 128, 128)
    w_uk, _ = ref.split_kv_b_proj(weight, **dims(4, 128, 128))
    compact = sparse_mla.k_up_proj(
        np.ascontiguousarray(whole[..., :128]), np.ascontiguousarray(w_uk)
    )
    assert_same_bits(sparse_mla.k_up_proj(whole[..., :128], w_uk), compact)


def test_strides_that_a_gemm_library_cannot_express():
    """One input is backwards, one is broadcast. On CUDA another kernel computes them, whose sums
    have another order."""
    rng = np.random.default_rng(5)
    w_uk, w_uv = ref.split_kv_b_proj(make_weight(4, 128, 128), **dims(4, 128, 128))
    x = cases.random_bf16(rng, 5, 4, 128)
    want, tolerance = ref.k_up_proj(x, w_uk)
    backwards = sparse_mla.k_up_proj(np.ascontiguousarray(x[::-1])[::-1], w_uk)
    assert ref.worst_ratio(backwards, want, tolerance) <= 1
    x = np.broadcast_to(cases.random_bf16(rng, 1, 4, 512), (5, 4, 512))
    want, tolerance = ref.v_up_proj(x, w_uv)
    assert ref.worst_ratio(sparse_mla.v_up_proj(x, w_uv), want, tolerance) <= 1


# --- keys and values of every head ---------------------------------------------------------------

# kv_b_proj [512, N] in all the ways that it may lie in memory.
LAYOUTS = {
    "rows": np.ascontiguousarray,
    "a layer's weight": lambda x: np.ascontiguousarray(x.T).T,
    "both dimensions apart": lambda x: x.repeat(2, 0).repeat(3, 1)[::2, ::3],
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("T", [0, 1, 3, 65])
@pytest.mark.parametrize("N", [0, 1, 67, 2 * (128 + 64), 4 * 256])
def test_keys_and_values(N, T, layout):
    rng = np.random.default_rng(9)
    kv_c = cases.random_bf16(rng, T, 576)[:, :512]  # rows of a cache, say
    kv_b_proj = LAYOUTS[layout](cases.random_bf16(rng, 512, N, std=0.05))
    want, tolerance = ref.kv_up_proj(kv_c, kv_b_proj)
    buffer = Guarded((T, N), ref.BF16, row_gap=8)
    assert sparse_mla.kv_up_proj(kv_c, kv_b_proj, out=buffer.array) is buffer.array
    assert ref.worst_ratio(buffer.check(), want, tolerance) <= 1
    fresh = sparse_mla.kv_up_proj(kv_c, kv_b_proj)
    assert (type(fresh), fresh.dtype) == (np.ndarray, ref.BF16)
    assert_same_bits(fresh, buffer.array)


def test_one_weight_for_all_heads():
    """A weight may be broadcast along either dimension."""
    rng = np.random.default_rng(10)
    kv_c = cases.random_bf16(rng, 5, 512)
    for shape in ((512, 1), (1, 40)):
        kv_b_proj = np.broadcast_to(cases.random_bf16(rng, *shape), (512, 40))
        want, tolerance = ref.kv_up_proj(kv_c, kv_b_proj)
        assert ref.worst_ratio(sparse_mla.kv_up_proj(kv_c, kv_b_proj), want, tolerance) <= 1


@pytest.mark.skipif(device.ON_CUDA, reason="cuBLAS chooses the order of sums by the shape")
def test_a_token_has_the_same_bits_in_every_batch_and_layout():
    rng = np.random.default_rng(11)
    kv_c = cases.random_bf16(rng, 130, 512)
    weight = cases.random_bf16(rng, 512, 300, std=0.05)
    whole = np.asarray(sparse_mla.kv_up_proj(kv_c, weight))
    for first, last in ((0, 1), (63, 66), (129, 130)):
        for layout in LAYOUTS.values():
            part = sparse_mla.kv_up_proj(kv_c[first:last], layout(weight)[:, 5:])
            assert_same_bits(part, whole[first:last, 5:])


def test_keys_and_values_are_those_of_the_split_weight():
    """Per head: W_UK's columns, then W_UV's. v_up_proj sums the same products."""
    rng = np.random.default_rng(12)
    size = (3, 128, 64)
    weight, latents = make_weight(*size), cases.random_bf16(rng, 7, 512)
    both = np.asarray(sparse_mla.kv_up_proj(latents, weight)).reshape(7, 3, 128 + 64)
    x = np.broadcast_to(latents[:, None], (7, 3, 512))
    for part, w in zip(
        (both[..., :128], both[..., 128:]), ref.split_kv_b_proj(weight, **dims(*size)), strict=True
    ):
        want, tolerance = ref.v_up_proj(x, w)
        assert ref.worst_ratio(part, want, tolerance) <= 1


def test_heavy_tailed_inputs():
    rng = np.random.default_rng(5)
    x = ref.to_bf16(rng.standard_t(1.2, (3, 4, 512)))
    weight = rng.standard_t(1.2, (512, 4, 128)).astype(np.float32)
    weight = ref.to_bf16(weight)
    want, tolerance = ref.v_up_proj(x, weight)
    assert ref.worst_ratio(sparse_mla.v_up_proj(x, weight), want, tolerance) <= 1


def test_absorbed_scores_are_the_uncompressed_ones():
    """q_nope . (W_UK^T c) = (W_UK q_nope) . c: the identity that absorption rests on."""
    rng = np.random.default_rng(6)
    weight = make_weight(2, 128, 128)
    w_uk, _ = sparse_mla.split_kv_b_proj(weight, **dims(2, 128, 128))
    q_nope, latent = cases.random_bf16(rng, 3, 2, 128), cases.random_bf16(rng, 40, 512)
    absorbed = np.asarray(sparse_mla.k_up_proj(q_nope, w_uk)).astype(np.float64)
    key = np.einsum("cl,lhp->chp", latent.astype(np.float64), np.asarray(w_uk, np.float64))
    want = np.einsum("thp,chp->thc", q_nope.astype(np.float64), key)
    got = np.einsum("thl,cl->thc", absorbed, latent.astype(np.float64))
    _, tolerance = ref.k_up_proj(q_nope, np.asarray(w_uk))
    allowed = np.einsum("thl,cl->thc", tolerance, np.abs(latent.astype(np.float64)))
    assert (np.abs(got - want) <= allowed).all()
