"""absorb: weights that take W_UK and W_UV in, of every storage, dtype and scheme, against fp64."""

from __future__ import annotations

import dataclasses

import cases
import device
import numpy as np
import pytest
import reference as ref

import sparse_mla as package

SCHEMES = ("tensor", "block", "token_tensor", "token_channel")
BF16 = 2.0**-8  # the largest relative error of a rounding
LATENTS = 512


def host(x) -> np.ndarray:
    """A result in fp64, from whatever device."""
    if not isinstance(x, np.ndarray):
        x = x.float().cpu().numpy()
    return x.astype(np.float64)


def put(x):
    """Arrays, and tuples of them, where this session tests."""
    return x if device.DEVICE == "cpu" else device.Journey().put(x)


def absorb(q_proj, w_uk, w_uv, o_proj, **options):
    return package.absorb(*put((q_proj, w_uk, w_uv, o_proj)), **options)


# --- weights -------------------------------------------------------------------------------------


def make_scale(rng, shape, kind: str) -> np.ndarray:
    """Scales of a weight [out, in], not powers of two."""
    sizes = {
        "tensor": (1,),
        "block": tuple(-(-n // 128) for n in shape),
        "outputs": (shape[0],),
        "token_channel": (shape[0], 1),
    }[kind]
    return rng.uniform(0.5, 1.5, sizes).astype(np.float32) / 256


def dequantize(weight, scale) -> np.ndarray:
    """A weight [out, in] in fp64: the fp32 products of values and scales."""
    rows, columns = weight.shape
    if scale.size == 1:
        factors = scale.reshape(1, 1)
    elif scale.size == rows:
        factors = scale.reshape(rows, 1)
    else:
        factors = scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    return (ref.to_f32(weight) * factors).astype(np.float64)


@dataclasses.dataclass
class Sizes:
    queries: int = 96  # Lq
    heads: int = 3
    nope: int = 40
    rope: int = 64
    values: int = 24
    hidden: int = 130

    def draw(self, dtype=np.float32, seed=0):
        """q_proj [Lq, H (Pn + R)], W_UK, W_UV, o_proj [hidden, H Pv]"""
        rng = np.random.default_rng(seed)
        shapes = (
            (self.queries, self.heads * (self.nope + self.rope)),
            (LATENTS, self.heads, self.nope),
            (LATENTS, self.heads, self.values),
            (self.hidden, self.heads * self.values),
        )
        return tuple(rng.normal(0, 1, shape).astype(np.float32).astype(dtype) for shape in shapes)

    def exact(self, q_proj, w_uk, w_uv, o_proj):
        """fp64 (W_Q_UK, W_QR, W_UV_O), and the sizes of the sums of the first and the last."""
        q = q_proj.astype(np.float64).reshape(self.queries, self.heads, self.nope + self.rope)
        o = o_proj.astype(np.float64).reshape(self.hidden, self.heads, self.values)
        uk, uv = w_uk.astype(np.float64), w_uv.astype(np.float64)
        w_qr = q[..., self.nope :].reshape(self.queries, self.heads * self.rope)
        products = []
        for f in (np.asarray, np.abs):
            by_query = np.einsum("qhn,lhn->qhl", f(q[..., : self.nope]), f(uk))
            by_output = np.einsum("lhv,ohv->hlo", f(uv), f(o))
            products.append(
                (
                    by_query.reshape(self.queries, self.heads * LATENTS),
                    by_output.reshape(self.heads * LATENTS, self.hidden),
                )
            )
        return products[0][0], w_qr, products[0][1], products[1]


def check(sizes: Sizes, got, arrays) -> None:
    """Results in bf16 are fp64's, with sums in fp32 and one rounding."""
    w_q_uk, w_qr, w_uv_o = got
    for x in got:
        assert str(x.dtype).endswith("bfloat16")
    want_q, want_r, want_o, (size_q, size_o) = sizes.exact(*arrays)
    for x, want, size, n in (
        (w_q_uk, want_q, size_q, sizes.nope),
        (w_uv_o, want_o, size_o, sizes.values),
    ):
        assert tuple(x.shape) == want.shape
        sums = n * 2.0**-24 * size
        assert (np.abs(host(x) - want) <= BF16 * (np.abs(want) + sums) + sums).all()
    assert np.array_equal(host(w_qr), ref.to_f32(ref.to_bf16(want_r.astype(np.float32))))


# --- bf16 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("dtype", [ref.BF16, np.float16, np.float32])
def test_plain_weights(dtype, storage):
    sizes = Sizes()
    arrays = sizes.draw(dtype)
    q, uk, uv, o = arrays
    if storage == "transposed":
        q, o = np.ascontiguousarray(q.T), np.ascontiguousarray(o.T)
        uk, uv = (np.ascontiguousarray(x.transpose(2, 1, 0)).transpose(2, 1, 0) for x in (uk, uv))
    elif storage == "strided":
        q, o = q.repeat(2, 0).repeat(3, 1)[::2, ::3], np.asfortranarray(o)
        uk, uv = uk.repeat(2, 2)[..., ::2], uv.repeat(2, 1)[:, ::2]
    check(sizes, absorb(q, uk, uv, o), arrays)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1, 1, 1, 0, 1, 1),
        Sizes(7, 2, 8, 0, 8, 5),
        Sizes(257, 1, 65, 64, 129, 130),
        Sizes(129, 5, 128, 64, 128, 128),
        Sizes(16, 2, 72, 24, 200, 300),
        Sizes(0, 2, 16, 64, 16, 0),
    ],
    ids=str,
)
def test_sizes(sizes):
    arrays = sizes.draw(ref.BF16, seed=1)
    check(sizes, absorb(*arrays), arrays)


def test_subnormal_and_large_weights():
    """No value is flushed, and none is rounded before it is multiplied."""
    sizes = Sizes(8, 1, 4, 0, 4, 8)
    q, uk, uv, o = sizes.draw()
    q *= np.float32(2.0**-130)
    uk *= np.float32(2.0**120)
    o *= np.float32(2.0**100)
    arrays = q, uk, uv, o
    check(sizes, absorb(*arrays), arrays)


def test_kv_b_proj_of_float32_is_not_rounded():
    """W_UK and W_UV in fp32 give other bits than rounded to bf16."""
    sizes = Sizes()
    arrays = sizes.draw()
    got = absorb(*arrays)
    check(sizes, got, arrays)
    q, uk, uv, o = arrays
    rounded = q, ref.to_f32(ref.to_bf16(uk)), ref.to_f32(ref.to_bf16(uv)), o
    check(sizes, absorb(*rounded), rounded)
    assert not np.array_equal(host(got[0]), host(absorb(*rounded)[0]))


@pytest.mark.parametrize("kind", ["tensor", "block", "outputs", "token_channel"])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_pairs(kind, as_bytes):
    """e4m3 weights [out, in] with every kind of scale, of sizes that end inside a block."""
    sizes = Sizes(queries=200, hidden=150, heads=2, nope=72, values=88)
    rng = np.random.default_rng(2)
    q, uk, uv, o = sizes.draw()
    pairs, exact = [], []
    for x in (np.ascontiguousarray(q.T), o):
        weight = ref.e4m3_encode(x * 100).view(ref.E4M3)
        scale = make_scale(rng, x.shape, kind)
        exact.append(dequantize(weight, scale))
        pairs.append((weight.view(np.uint8) if as_bytes else weight, scale))
    got = absorb(pairs[0], uk, uv, pairs[1])
    check(sizes, got, (exact[0].T, uk, uv, exact[1]))


def test_a_scale_without_dimensions():
    sizes = Sizes()
    q, uk, uv, o = sizes.draw()
    weight, scale = ref.e4m3_encode(q.T * 100).view(ref.E4M3), np.array(1 / 77, np.float32)
    got = absorb((np.ascontiguousarray(weight), scale), uk, uv, o)
    check(sizes, got, (dequantize(weight, scale).T, uk, uv, o))


# --- shapes that fit twice -----------------------------------------------------------------------


def test_shapes_that_fit_both_forms():
    """q_proj is read as [Lq, n], and o_proj as [hidden, n]; a pair is always [out, in]."""
    sizes = Sizes(queries=2 * 104, heads=2, hidden=48)
    q, uk, uv, o = arrays = sizes.draw()
    assert q.shape[0] == q.shape[1]
    assert o.shape[0] == o.shape[1]
    check(sizes, absorb(*arrays), arrays)
    weight, one = ref.e4m3_encode(q * 16).view(ref.E4M3), np.ones(1, np.float32)
    got = absorb((np.ascontiguousarray(weight.T), one), uk, uv, o)
    check(sizes, got, (ref.to_f32(weight), uk, uv, o))


def test_the_form_with_rope_comes_first():
    """DeepSeek-V2-Lite's q_proj, stored transposed, might also be one without RoPE that is not."""
    sizes = Sizes(queries=16 * 8, heads=16, nope=8, hidden=20, values=8)
    q, uk, uv, o = arrays = sizes.draw()
    assert q.shape == (16 * 8, 16 * 72)
    check(sizes, absorb(np.ascontiguousarray(q.T), uk, uv, o), arrays)


# --- schemes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(scheme):
    """The first and the last are quantised from the fp32 product, [out, in]; W_QR is not."""
    sizes = Sizes(queries=256, hidden=384, heads=2)
    arrays = sizes.draw(ref.BF16)
    plain, got = absorb(*arrays), absorb(*arrays, scheme=scheme)
    want_q, _, want_o, (size_q, size_o) = sizes.exact(*arrays)
    assert np.array_equal(host(got[1]), host(plain[1]))
    for (weight, descale), want, size, n in (
        (got[0], want_q.T, size_q.T, sizes.nope),
        (got[2], want_o.T, size_o.T, sizes.values),
    ):
        assert str(weight.dtype).endswith("float8_e4m3fn")
        assert tuple(weight.shape) == want.shape
        out, inner = want.shape
        groups = {"block": (128, 128), "token_channel": (1, inner)}.get(scheme, (out, inner))
        tiles = np.abs(want).reshape(out // groups[0], groups[0], inner // groups[1], groups[1])
        scale = tiles.max((1, 3)) / 448
        assert tuple(descale.shape) == scale.shape
        assert np.allclose(host(descale), scale, rtol=1e-5)
        each = scale.repeat(groups[0], 0).repeat(groups[1], 1)
        error = np.abs(
            host(weight) * host(descale).repeat(groups[0], 0).repeat(groups[1], 1) - want
        )
        sums = 2 * n * 2.0**-24 * size + 1e-5 * np.abs(want)
        assert (error <= np.maximum(2.0**-4 * np.abs(want), 2.0**-10 * each) + sums).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_products_stay_within_five_percent(scheme):
    """N(0, 1) data: x through the quantised weight, and through the product in fp64."""
    sizes = Sizes(queries=256, hidden=256, heads=2)
    arrays = sizes.draw()
    (q, q_descale), _, (o, o_descale) = absorb(*arrays, scheme=scheme)
    want_q, _, want_o, _ = sizes.exact(*arrays)
    group = {"tensor": (-1, -1), "block": (1, 128)}.get(scheme, (1, -1))
    rng = np.random.default_rng(3)
    for weight, descale, want in ((q, q_descale, want_q), (o, o_descale, want_o)):
        x = cases.random_bf16(rng, 70, len(want))
        got = host(package.fp8_linear(put(x), weight, descale, input_group=group))
        exact = ref.to_f32(x).astype(np.float64) @ want
        assert np.linalg.norm(got - exact) < 0.05 * np.linalg.norm(exact)


def test_quantised_from_fp32_not_from_bf16():
    """Bytes differ from those of the product that was rounded to bf16 first."""
    arrays = Sizes(queries=128, hidden=128).draw()
    (weight, descale), _, _ = absorb(*arrays, scheme="tensor")
    rounded = absorb(*arrays)[0].T  # contiguous, as it was made
    twice, twice_descale = package.scaled_quantize(rounded, group=(-1, -1))
    assert host(descale) != host(twice_descale)
    assert not np.array_equal(host(weight), host(twice))


# --- layers --------------------------------------------------------------------------------------


class Layer:
    """A linear layer written with NumPy, which runs on the CPU alone."""

    def __init__(self, matrix, **facts) -> None:
        self.matrix = matrix
        vars(self).update(facts)

    def __call__(self, x):
        assert x.shape[0] == x.shape[1]
        return x @ self.matrix, None


@pytest.mark.parametrize("fact", ["in_features", "input_size", "weight"])
def test_layers(fact):
    sizes = Sizes()
    q, uk, uv, o = arrays = sizes.draw()
    facts = {"weight": q.T} if fact == "weight" else {fact: sizes.queries}
    check(sizes, package.absorb(Layer(q, **facts), uk, uv, Layer(o.T)), arrays)


@pytest.mark.parametrize(
    ("queries", "rope"), [(512, 64), (384, 64), (384, 128), (512, 128), (256, 64), (256, 0)]
)
def test_a_weight_whose_sizes_both_fit_outputs(queries, rope):
    """A layer whose weight alone tells its inputs stores [out, in]: [384, 512] is not [in, out]."""
    sizes = Sizes(queries=queries, heads=2, nope=128, rope=rope)
    q, uk, uv, o = arrays = sizes.draw()
    check(sizes, package.absorb(Layer(q, weight=q.T), uk, uv, o), arrays)


def test_a_weight_that_is_stored_transposed():
    """[in, out] is taken where the first size fits no outputs."""
    sizes = Sizes(queries=129, heads=2, nope=128, rope=64)
    q, uk, uv, o = arrays = sizes.draw()
    check(sizes, package.absorb(Layer(q, weight=q), uk, uv, o), arrays)


def test_layers_that_cannot_be_taken():
    q, uk, uv, o = Sizes().draw()
    with pytest.raises(
        ValueError, match=r"^absorb: `q_proj` must be a layer that tells its inputs"
    ):
        package.absorb(Layer(q), uk, uv, o)
    with pytest.raises(ValueError, match=r"^absorb: `o_proj` must be a layer without bias"):
        package.absorb(q, uk, uv, Layer(o.T, bias=np.zeros(3)))


# --- errors --------------------------------------------------------------------------------------


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


GOOD = {
    "q_proj": zeros(96, 3 * 104),
    "W_UK": zeros(512, 3, 40),
    "W_UV": zeros(512, 3, 24),
    "o_proj": zeros(130, 3 * 24),
}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"q_proj": zeros(96, 311)},
            ValueError,
            r"`q_proj` must have shape \[Lq, n\] or \[n, Lq\], where n is 3 heads x \(40 \+ R\), "
            r"got \[96, 311\]",
        ),
        ({"q_proj": zeros(96)}, ValueError, r"`q_proj` must have shape .*, got \[96\]"),
        ({"q_proj": 3}, TypeError, "`q_proj` must be an array, a layer or a pair, got int"),
        (
            {"q_proj": (zeros(96, 312), zeros(1))},
            ValueError,
            r"`q_proj` must have shape \[n, Lq\] in a pair, .*, got \[96, 312\]",
        ),
        (
            {"q_proj": (zeros(312, 96, dtype=np.uint8),)},
            TypeError,
            r"`q_proj` must be a pair \(weight, scale\) of arrays, got \['\w+'\]",
        ),
        (
            {"q_proj": (zeros(312, 96, dtype=np.uint8), 0.5)},
            TypeError,
            r"`q_proj` must be a pair .*, got \['\w+', 'float'\]",
        ),
        (
            {"q_proj": (zeros(312, 96, dtype=np.uint8), zeros(3, 2))},
            ValueError,
            r"`q_scale` must have shape \[3, 1\], got \[3, 2\]",
        ),
        (
            {"q_proj": (zeros(312, 96, dtype=np.uint8), zeros(96))},
            ValueError,
            r"`q_scale` must have shape \[3, 1\], got \[96\]",
        ),
        (
            {"q_proj": zeros(96, 312, dtype=np.uint8)},
            ValueError,
            r"`q_proj` must be a pair \(weight, scale\) for e4m3, got no scale",
        ),
        (
            {"o_proj": zeros(130, 72, dtype=ref.E4M3)},
            ValueError,
            r"`o_proj` must be a pair \(weight, scale\) for e4m3, got no scale",
        ),
        (
            {"q_proj": zeros(96, 312, dtype=np.int32)},
            TypeError,
            "`q_proj` must be bfloat16, .*, got int32",
        ),
        (
            {"W_UK": zeros(512, 120)},
            ValueError,
            r"`W_UK` must have shape \[L, H, n\], got \[512, 1",
        ),
        (
            {"W_UK": zeros(512, 0, 40), "q_proj": zeros(96, 0)},
            ValueError,
            r"`W_UK` must have shape \[L, H, n\], got \[512, 0, 40\]",
        ),
        ({"W_UV": None}, TypeError, "`W_UV` must be an array, got NoneType"),
        (
            {"o_proj": zeros(130, 71)},
            ValueError,
            r"`o_proj` must have shape \[hidden, n\] or \[n, hidden\], where n is 3 heads x 24",
        ),
        (
            {"o_proj": (zeros(72, 130, dtype=np.uint8), zeros(1))},
            ValueError,
            r"`o_proj` must have shape \[hidden, n\] in a pair, .*, got \[72, 130\]",
        ),
        (
            {"o_proj": (zeros(130, 72, dtype=np.uint8), zeros(72))},
            ValueError,
            r"`o_scale` must have shape \[2, 1\], got \[72\]",
        ),
        ({"scheme": "channel"}, ValueError, "`scheme` must be None or one of 'tensor', .*, got 'c"),
        ({"scheme": "block"}, ValueError, "`scheme` must not be 'block' unless .*, got 96 and 130"),
    ],
    ids=str,
)
def test_errors(changes, error, text):
    given = GOOD | changes
    options = {"scheme": given.pop("scheme")} if "scheme" in given else {}
    with pytest.raises(error, match=text):
        absorb(*given.values(), **options)
