"""rope_table: the angles of plain RoPE and of YaRN, DeepSeek V3's and V4's."""

import itertools
import math

import numpy as np
import pytest
import reference_norm as norm
from helpers import assert_same_bits
from library import sparse_mla

F32 = np.float32
V3 = {"factor": 40, "orig_max_pos": 4096, "mscale": 1, "mscale_all_dim": 1}
V4 = {"factor": 16, "orig_max_pos": 65536, "beta_fast": 32, "beta_slow": 1}


@pytest.mark.parametrize("size", [2, 4, 64, 130])
@pytest.mark.parametrize("yarn", [None, V3, V4, {"factor": 2.5, "orig_max_pos": 100}], ids=str)
@pytest.mark.parametrize("base", [10000, 160000.0, 1.5])
def test_table(size, yarn, base):
    """fp64 angles, each value rounded once; NumPy's and C's cosines may differ in the last bit."""
    max_pos = 40
    table = sparse_mla.rope_table(max_pos, size, base, yarn)
    assert (table.shape, table.dtype) == ((max_pos, size), F32)
    assert table.flags.c_contiguous
    magnitude = 1.0
    if yarn is not None:
        mscales = (yarn.get("mscale", 1), yarn.get("mscale_all_dim", 0))
        first, second = (0.1 * a * math.log(yarn["factor"]) + 1 for a in mscales)
        magnitude = first / second
    for t, i in itertools.product(range(max_pos), range(size // 2)):
        angle = t * norm.yarn_frequency(i, size, base, yarn)
        for at, f in ((i, math.cos), (i + size // 2, math.sin)):
            assert abs(table[t, at] - magnitude * f(angle)) <= 2.0**-24 * magnitude + 1e-15 * t


@pytest.mark.parametrize("yarn", [None, V4], ids=str)
def test_table_of_fp32_angles(yarn):
    """DeepSeek V4's: the frequency and the product are rounded to fp32; no magnitude."""
    positions = [0, 1, 7, 65535, 999_999]
    table = sparse_mla.rope_table(10**6, 64, 160000.0, yarn, fp32_angles=True)
    for t, i in itertools.product(positions, range(32)):
        angle = F32(F32(t) * F32(norm.yarn_frequency(i, 64, 160000.0, yarn)))
        assert abs(table[t, i] - math.cos(float(angle))) <= 2.0**-25 * 1.001
        assert abs(table[t, 32 + i] - math.sin(float(angle))) <= 2.0**-25 * 1.001
    exact = sparse_mla.rope_table(10**6, 64, 160000.0, yarn)
    assert np.abs(exact[999_999] - table[999_999]).max() > 1e-3, "the option has an effect"


def test_table_vectors():
    """The contract's numbers of DeepSeek V3."""
    f = [norm.yarn_frequency(i, 64, 10000, V3) for i in range(32)]
    assert f[10] == pytest.approx(0.0562341325, rel=1e-9)
    assert f[11] == pytest.approx(0.0390069266, rel=1e-8)
    assert f[16] == pytest.approx(0.0055, rel=1e-9)
    assert f[23] == pytest.approx(3.33380358e-05, rel=1e-8)
    table = sparse_mla.rope_table(2, yarn=V3)
    for i in (10, 11, 16, 23, 31):
        assert table[1, 32 + i] == pytest.approx(math.sin(f[i]), rel=1e-6)
    assert sparse_mla.rope_table(2, R=4)[1].tolist() == [
        F32(x) for x in (math.cos(1), math.cos(0.01), math.sin(1), math.sin(0.01))
    ]


def test_sizes_of_tables():
    assert sparse_mla.rope_table(0).shape == (0, 64)
    assert sparse_mla.rope_table(yarn={"factor": 4, "orig_max_pos": 25}).shape == (100, 64)
    large = sparse_mla.rope_table(40_000)  # several blocks
    for t in (16383, 16384, 39_999):
        assert large[t, 0] == F32(math.cos(t))


def test_a_factor_of_one_changes_nothing():
    plain = sparse_mla.rope_table(50)
    yarn = {"factor": 1, "orig_max_pos": 4096, "mscale": 3}
    assert_same_bits(sparse_mla.rope_table(50, yarn=yarn), plain)


@pytest.mark.parametrize(
    ("args", "options", "error", "text"),
    [
        ((), {}, ValueError, "`max_pos` must be given without `yarn`, got None"),
        ((-1,), {}, ValueError, "`max_pos` must be 0 to 2147483647, got -1"),
        ((2**31,), {}, ValueError, "`max_pos` must be 0 to 2147483647, got 2147483648"),
        ((1.5,), {}, TypeError, "`max_pos` must be an int, got float"),
        ((True,), {}, TypeError, "`max_pos` must be an int, got bool"),
        ((4, 63), {}, ValueError, "`R` must be even and at least 2, got 63"),
        ((4, 0), {}, ValueError, "`R` must be even and at least 2, got 0"),
        ((4, 64.0), {}, TypeError, "`R` must be an int, got float"),
        ((4, 64, 1), {}, ValueError, "`base` must be finite and above 1, got 1"),
        ((4, 64, math.inf), {}, ValueError, "`base` must be finite and above 1, got inf"),
        ((4, 64, math.nan), {}, ValueError, "`base` must be finite and above 1, got nan"),
        ((4, 64, "10000"), {}, TypeError, "`base` must be a number, got str"),
        ((4,), {"yarn": 40}, TypeError, "`yarn` must be None or a dict, got int"),
        ((4,), {"yarn": {}}, ValueError, "`yarn` must have the key factor, got []"),
        (
            (4,),
            {"yarn": {"factor": 2}},
            ValueError,
            "`yarn` must have the key orig_max_pos, got ['factor']",
        ),
        ((4,), {"yarn": V3 | {"typo": 1}}, ValueError, "`yarn` must have keys of factor, orig_max_pos, beta_fast, beta_slow, mscale, mscale_all_dim, got typo"),  # noqa: E501
        ((4,), {"yarn": V3 | {"factor": 0.5}}, ValueError, "`yarn['factor']` must be finite and at least 1, got 0.5"),  # noqa: E501
        ((4,), {"yarn": V3 | {"beta_slow": 0}}, ValueError, "`yarn['beta_slow']` must be finite and positive, got 0"),  # noqa: E501
        ((4,), {"yarn": V3 | {"mscale": math.inf}}, ValueError, "`yarn['mscale']` must be finite and at least 0, got inf"),  # noqa: E501
        ((4,), {"yarn": V3 | {"factor": "2"}}, TypeError, "`yarn['factor']` must be a number, got str"),  # noqa: E501
    ],
)  # fmt: skip
def test_bad_tables(args, options, error, text):
    with pytest.raises(error) as info:
        sparse_mla.rope_table(*args, **options)
    assert str(info.value) == f"rope_table: {text}"
