"""apply_rope (csrc/cpu/rope, csrc/cuda/rope): the bytes of a reference that rounds each step."""

import itertools

import device
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bits, find_framework
from library import sparse_mla

F32 = np.float32
DTYPES = (ref.BF16, F32)
ROWS = 50  # rows of most tables


def rounded(x, dtype):
    """fp32 values as fp32 or bf16, with one NaN."""
    x = np.where(np.isnan(x), F32(np.nan), x)
    return x if dtype == F32 else ref.to_bf16(x)


def rotate(x, positions, table, interleaved=True, inverse=False):
    """apply_rope of one array, [T, H, R] or [T, R]."""
    wide = ref.to_f32(x if x.ndim == 3 else x[:, None])
    cos, sin = np.split(ref.to_f32(table[positions[: len(x)]])[:, None], 2, axis=-1)
    sin = -sin if inverse else sin
    half = x.shape[-1] // 2
    pairs = wide.reshape(*wide.shape[:2], half, 2)
    a, b = (pairs[..., 0], pairs[..., 1]) if interleaved else (wide[..., :half], wide[..., half:])
    with np.errstate(all="ignore"):
        first, second = a * cos - b * sin, b * cos + a * sin
    assert first.dtype == second.dtype == F32
    out = np.stack((first, second), -1) if interleaved else np.concatenate((first, second), -1)
    return rounded(out.reshape(x.shape), x.dtype)


def made(shape, dtype, seed=0):
    return rounded(np.random.default_rng(seed).normal(0, 1, shape).astype(F32), dtype)


def places(count, dtype=np.int64, rows=ROWS):
    return np.random.default_rng(count).integers(0, rows, count).astype(dtype)


def check(positions, q, k, table, **options):
    """New results, results given, and in place. A key has the same bits beside any queries."""
    want = [rotate(x, positions, table, **options) for x in (q, k)]
    for got, right in zip(
        sparse_mla.apply_rope(positions, q, k, table, **options), want, strict=True
    ):
        assert_same_bits(got, right)
    assert sparse_mla.apply_rope(positions, q, None, table, **options)[1] is None
    outs = [Guarded(x.shape, x.dtype, row_gap=8) for x in (q, k)]
    names = dict(zip(("q_out", "k_out"), (x.array for x in outs), strict=True))
    got = sparse_mla.apply_rope(positions, q, k, table, **names, **options)
    assert all(x is y.array for x, y in zip(got, outs, strict=True))
    for out, right in zip(outs, want, strict=True):
        assert_same_bits(out.check(), right)
    q, k = q.copy(), k.copy()
    sparse_mla.apply_rope(positions, q, k, table, q_out=q, k_out=k, **options)
    assert_same_bits(q, want[0])
    assert_same_bits(k, want[1])


# --- values --------------------------------------------------------------------------------------


def test_vectors():
    """The contract's, and the reverse."""
    table = sparse_mla.rope_table(2, R=4)
    for values, interleaved, want in (
        ([1, 0, 2, 0], True, [0.540302, 0.841471, 1.999900, 0.019999667]),
        ([1, 2, 0, 0], False, [0.540302, 1.999900, 0.841471, 0.019999667]),
    ):
        q = np.array([[values]], F32)
        options = {"interleaved": interleaved}
        out, none = sparse_mla.apply_rope(np.array([1]), q, None, table, **options)
        assert none is None
        assert np.abs(out[0, 0] - want).max() < 1e-6
        back, _ = sparse_mla.apply_rope(np.array([1]), out, None, table, inverse=True, **options)
        assert np.abs(back - q).max() < 1e-6


@pytest.mark.parametrize("size", [2, 4, 6, 8, 10, 12, 14, 16, 24, 64, 130, 256, 300, 514])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_sizes(size, dtype, interleaved):
    """Whole vectors and parts of them, and more pairs than are taken at a time."""
    table = sparse_mla.rope_table(ROWS, R=size)
    for heads, inverse, kind in itertools.product((1, 3, 8, 17), (False, True), DTYPES):
        q, k = made((5, heads, size), dtype, heads), made((5, size), dtype, 7)
        options = {"interleaved": interleaved, "inverse": inverse}
        check(places(5), q, k, rounded(table, kind), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("inverse", [False, True])
def test_a_million_values(dtype, interleaved, inverse):
    table = sparse_mla.rope_table(4096)
    positions = places(640, rows=4096)
    q, k = made((640, 25, 64), dtype, 3), made((640, 64), dtype, 4)
    check(positions, q, k, table, interleaved=interleaved, inverse=inverse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_any_bits(dtype, interleaved):
    """NaN, infinities, subnormal numbers and both zeros, as values and as angles."""
    rng = np.random.default_rng(5)
    bits, kind = (np.uint16, np.uint16) if dtype == ref.BF16 else (np.uint32, np.uint32)
    info = np.iinfo(bits)
    q = rng.integers(0, info.max, (64, 5, 32), kind, endpoint=True).view(dtype)
    k = rng.integers(0, info.max, (64, 32), kind, endpoint=True).view(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-38, 3e38], F32)
    q[::2] = rounded(rng.choice(special, (32, 5, 32)), dtype)
    table = rng.normal(0, 1, (ROWS, 32)).astype(F32)
    table[::3] = rng.choice(special, table[::3].shape)
    check(places(64), q, k, table, interleaved=interleaved)


def test_rounding_is_once():
    """A product of bf16 values and fp32 angles is no bf16, and a fused product would differ."""
    rng = np.random.default_rng(6)
    q = made((40, 8, 64), ref.BF16, 8)
    table = rng.uniform(-1, 1, (ROWS, 64)).astype(F32)
    got, _ = sparse_mla.apply_rope(places(40), q, None, table)
    wide = ref.to_f32(q).astype(np.float64).reshape(40, 8, 32, 2)
    cos, sin = np.split(table[places(40)].astype(np.float64)[:, None], 2, axis=-1)
    exact = wide[..., 0] * cos - wide[..., 1] * sin
    error = np.abs(ref.to_f32(got).reshape(wide.shape)[..., 0] - exact)
    scale = np.abs(wide[..., 0] * cos) + np.abs(wide[..., 1] * sin)
    assert (error <= 2.0**-8 * np.abs(exact) + 2.0**-22 * scale).all()


# --- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
def test_parts_of_larger_rows(interleaved):
    """Queries and keys as slices, in place: what is around them stays."""
    rows = made((6, 5, 192), ref.BF16)
    cache = made((6, 576), ref.BF16, 1)
    table = sparse_mla.rope_table(ROWS)
    q, k = rows[..., 128:], cache[:, 512:]
    want = [rotate(x, places(6), table, interleaved) for x in (q, k)]
    before = rows.copy(), cache.copy()
    options = {"interleaved": interleaved, "q_out": q, "k_out": k}
    sparse_mla.apply_rope(places(6), q, k, table, **options)
    assert_same_bits(rows[..., :128], before[0][..., :128])
    assert_same_bits(cache[:, :512], before[1][:, :512])
    assert_same_bits(q, want[0])
    assert_same_bits(k, want[1])


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alignment(offset, dtype):
    """Rows that begin anywhere, in inputs, outputs and tables."""
    size, tokens, heads = 64, 4, 5
    wide = made((tokens, heads, size + offset), dtype)
    table = np.random.default_rng(2).normal(0, 1, (ROWS, size + offset)).astype(F32)
    for interleaved in (True, False):
        q, k = wide[..., offset:], wide[:, 0, offset:]
        out = np.zeros((tokens, heads, size + offset), dtype)[..., offset:]
        want = rotate(q, places(tokens), table[:, offset:], interleaved)
        got, key = sparse_mla.apply_rope(
            places(tokens), q, k, table[:, offset:], interleaved=interleaved, q_out=out
        )
        assert got is out
        assert_same_bits(got, want)
        assert_same_bits(key, rotate(k, places(tokens), table[:, offset:], interleaved))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_positions(dtype):
    """Of both dtypes, with strides, and more of them than tokens, which are not read."""
    table = sparse_mla.rope_table(ROWS)
    q, k = made((5, 2, 64), ref.BF16), made((5, 64), ref.BF16, 1)
    check(places(5, dtype), q, k, table)
    check(np.repeat(places(5, dtype), 3)[::3], q, k, table)
    more = np.append(places(5, dtype), [2**31 - 1, -5]).astype(dtype)
    check(more, q, k, table)


@pytest.mark.parametrize("shape", [(0, 3, 64), (3, 0, 64), (0, 0, 64)])
def test_nothing_to_turn(shape):
    table = sparse_mla.rope_table(ROWS)
    q, k = np.zeros(shape, ref.BF16), made((shape[0], 64), ref.BF16)
    out, key = sparse_mla.apply_rope(places(shape[0]), q, k, table)
    assert out.shape == shape
    assert_same_bits(key, rotate(k, places(shape[0]), table))
    assert sparse_mla.apply_rope(places(shape[0]), q, None, table)[0].shape == shape
    if shape[0] == 0:  # then no row of the table is needed
        assert sparse_mla.apply_rope(places(0), q, k, table[:0])[0].shape == shape


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [-1, ROWS, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_bad_positions(dtype, bad, interleaved):
    """The CPU refuses them before it writes. CUDA copies these tokens, NaN and all, and reads
    nothing outside the table."""
    q, k = made((6, 3, 64), ref.BF16), made((6, 64), ref.BF16, 1)
    q[4, 1, :5] = k[4, 7] = np.array([0xFFC1], np.uint16).view(ref.BF16)[0]
    table, positions = sparse_mla.rope_table(ROWS), places(6, dtype)
    want = [rotate(x, positions, table, interleaved) for x in (q, k)]
    for x, right in zip((q, k), want, strict=True):
        right[4] = x[4]
    positions[4] = bad
    outs = [Guarded(x.shape, x.dtype) for x in (q, k)]

    def call():
        names = dict(zip(("q_out", "k_out"), (x.array for x in outs), strict=True))
        return sparse_mla.apply_rope(positions, q, k, table, interleaved=interleaved, **names)

    if device.DEVICE == "cpu":
        with pytest.raises(ValueError, match="positions") as info:
            call()
        assert str(info.value) == (
            f"apply_rope: `positions` must be rows of `rope_table`, which has {ROWS}, got {bad} "
            "for token 4"
        )
        for out in outs:
            assert (ref.bits16(out.check(written=False)) == 0xFFFF).all()
    else:
        call()
        for out, right in zip(outs, want, strict=True):
            assert_same_bits(out.check(written=False), right)


# --- errors --------------------------------------------------------------------------------------


def test_texts():
    table = sparse_mla.rope_table(ROWS, R=8)
    good = {"positions": places(3), "q_pe": made((3, 2, 8), F32), "k_pe": made((3, 8), F32)}
    good |= {"rope_table": table}
    for wrong, error, text in (
        ({"q_pe": made((3, 2, 7), F32)}, ValueError, "`q_pe` must have an even number of values "
         "per head, at least 2, got 7"),
        ({"k_pe": None, "k_out": made((3, 8), F32)}, ValueError, "`k_out` must be absent without "
         "`k_pe`, got an array"),
        ({"k_pe": made((3, 8), ref.BF16)}, TypeError, "`k_pe` must be float32, got bfloat16"),
        ({"rope_table": table[:, :6]}, ValueError, "`rope_table` must have shape [any, 8], got "
         "[50, 6]: cosines, then sines, per position"),
        ({"q_out": made((3, 1, 8), F32)}, ValueError, "`q_out` must have shape [3, 2, 8], got "
         "[3, 1, 8]: the shape of what is turned"),
    ):  # fmt: skip
        with pytest.raises(error) as info:
            sparse_mla.apply_rope(**(good | wrong))
        assert str(info.value) == f"apply_rope: {text}"


def test_only_the_whole_input_may_be_the_output():
    q, table = made((4, 3, 8), F32), sparse_mla.rope_table(ROWS, R=8)
    k = q[:, 0]
    for outs in ({"q_out": q[::-1]}, {"k_out": q[:, 1]}, {"q_out": q, "k_out": q[:, 2]}):
        with pytest.raises(ValueError, match=r"must (be the whole of or )?not overlap|strides"):
            sparse_mla.apply_rope(places(4), q, k, table, **outs)
    rows = made((5, 3, 8), F32)
    with pytest.raises(ValueError, match=r"`q_out` must be the whole of or not overlap `q_pe`"):
        sparse_mla.apply_rope(places(4), rows[:4], None, table, q_out=rows[1:])


# --- frameworks ----------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_torch_without_keys(backend):
    """A result that is None, in eager and in compiled calls; and in place."""
    torch = find_framework("torch", device.NAME)
    smla = device.import_quietly("sparse_mla.integrations.torch")
    q, k, table = made((3, 2, 64), ref.BF16), made((3, 64), ref.BF16), sparse_mla.rope_table(ROWS)
    want = [rotate(x, places(3), table) for x in (q, k)]
    positions, tensor, key, angles = (torch.put(x) for x in (places(3), q, k, table))

    def turn(q, k):
        return smla.apply_rope(positions, q, k, angles)

    if backend is not None:
        turn = torch.module.compile(turn, backend=backend, fullgraph=True)
    out, none = turn(tensor, None)
    assert none is None
    assert_same_bits(torch.get(out), want[0])
    for got, right in zip(turn(tensor, key), want, strict=True):
        assert_same_bits(torch.get(got), right)
    out, none = smla.apply_rope(positions, tensor, None, angles, q_out=tensor)
    assert none is None
    assert out is tensor
    assert_same_bits(torch.get(tensor), want[0])


@pytest.mark.jax
@pytest.mark.parametrize("jit", [False, True])
def test_jax_without_keys(jit):
    jax = find_framework("jax", device.NAME)
    smla = device.import_quietly("sparse_mla.integrations.jax")
    q, table = made((3, 2, 64), ref.BF16), sparse_mla.rope_table(ROWS)
    positions, array, angles = (jax.put(x) for x in (places(3, np.int32), q, table))

    def turn(positions, q, table):
        return smla.apply_rope(positions, q, None, table, interleaved=False)

    out, none = (jax.module.jit(turn) if jit else turn)(positions, array, angles)
    assert none is None
    assert_same_bits(jax.get(out), rotate(q, places(3), table, False))
