"""top_k_per_row, compared exactly with a stable sort of integer keys (csrc/cpu/topk,
csrc/cuda/topk)."""

from __future__ import annotations

import numpy as np
import pytest
import reference as ref
import reference_index
from cases import int32
from helpers import Guarded, assert_same_bits
from library import package, sparse_mla

DTYPES = (np.float32, ref.BF16)
ISAS = [row["arch"] for row in package.kernels() if row["device"] == "cpu" and row["available"]]
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


def keys_of(logits: np.ndarray) -> np.ndarray:
    """Integers in the order of the logits: NaN below -inf, -0 = 0."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        x = logits.astype(np.float64)
    order = np.full(x.shape, -(2**63) + 1, np.int64)
    known = ~np.isnan(x)
    bits = np.abs(x[known]).view(np.int64)
    order[known] = np.where(x[known] < 0, -bits, bits)
    return order


def expect(logits, starts, ends, k) -> tuple[np.ndarray, np.ndarray]:
    """(out, values)."""
    num_tokens, num_columns = logits.shape
    out = np.full((num_tokens, k), -1, np.int32)
    values = np.full((num_tokens, k), -np.inf, logits.dtype)
    for t in range(num_tokens):
        begin, end = (min(max(int(x[t]), 0), num_columns) for x in (starts, ends))
        row = logits[t, begin : max(begin, end)]
        best = np.argsort(-keys_of(row), kind="stable")[:k]
        columns = np.sort(best).astype(np.int32)
        out[t, : len(columns)] = columns
        values[t, : len(columns)] = row[columns]
    return out, values


def check(logits, starts, ends, k) -> np.ndarray:
    """A call with outputs between red zones, one without outputs, and the reference agree."""
    want, want_values = expect(logits, starts, ends, k)
    before = logits.copy()
    out = Guarded(want.shape, np.int32, row_gap=3)
    values = Guarded(want.shape, logits.dtype, row_gap=5)
    got = sparse_mla.top_k_per_row(logits, starts, ends, k=k, out=out.array, values=values.array)
    assert got is out.array
    assert_same_bits(out.check(), want, "out")
    assert_same_bits(values.check(), want_values, "values")
    assert_same_bits(sparse_mla.top_k_per_row(logits, starts, ends, k=k), want, "new out")
    assert_same_bits(logits, before, "logits")
    return want


def whole(logits) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of rows that have all columns."""
    num_tokens, num_columns = logits.shape
    return np.zeros(num_tokens, np.int32), np.full(num_tokens, num_columns, np.int32)


# --- vectors by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_hand(dtype):
    logits = np.array([[1, 3, np.nan, 3, 0, -0.0, 2]]).astype(dtype)
    got = sparse_mla.top_k_per_row(logits, int32(0), int32(7), k=3)
    assert got.tolist() == [[1, 3, 6]]
    logits = np.array([[0, -0.0, 0, -1]]).astype(dtype)
    assert sparse_mla.top_k_per_row(logits, int32(0), int32(4), k=2).tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_counted_from_the_start(dtype):
    logits = np.array([[9, 1, 5, 2, 8]]).astype(dtype)
    for start, end, want in (
        (0, 5, [0, 4]), (1, 5, [1, 3]), (2, 4, [0, 1]), (3, 4, [0, -1]), (4, 4, [-1, -1]),
        (4, 2, [-1, -1]), (-7, 2, [0, 1]), (3, 99, [0, 1]), (9, 12, [-1, -1]), (-3, -1, [-1, -1]),
        (INT32_MIN, INT32_MAX, [0, 4]), (INT32_MAX, INT32_MIN, [-1, -1]),
    ):  # fmt: skip
        got = sparse_mla.top_k_per_row(logits, int32(start), int32(end), k=2)
        assert got.tolist() == [want], (start, end)


# --- distributions -------------------------------------------------------------------------------


def bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint32).view(np.float32)


# Rows whose order is hard to find. Each takes (rng, rows, columns).
KINDS = {
    "random": lambda rng, *shape: rng.standard_normal(shape),
    "few distinct": lambda rng, *shape: rng.integers(-2, 3, shape),
    "constant": lambda rng, *shape: np.full(shape, -3.5),
    "ascending": lambda rng, *shape: np.sort(rng.standard_normal(shape), axis=1),
    "descending": lambda rng, *shape: -np.sort(rng.standard_normal(shape), axis=1),
    "peaky": lambda rng, *shape: rng.normal(0, np.where(rng.random(shape) < 0.01, 1e4, 1)),
    "special": lambda rng, *shape: rng.choice(
        [np.nan, -np.inf, np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38], shape
    ),
    "nearly all 0": lambda rng, *shape: np.where(
        rng.random(shape) < 0.98, 0, rng.normal(size=shape)
    ),
    "nearly all -inf": lambda rng, *shape: np.where(
        rng.random(shape) < 0.98, -np.inf, rng.normal(size=shape)
    ),
    "nearly all NaN": lambda rng, *shape: np.where(rng.random(shape) < 0.98, np.nan, -np.inf),
    "NaN bits": lambda rng, *shape: bits(rng.integers(0x7F800000, 1 << 31, shape)),
    "equal in 11 bits": lambda rng, *shape: bits(0x3F800000 + rng.integers(0, 1 << 21, shape)),
    "equal in 22 bits": lambda rng, *shape: bits(0x3F800000 + rng.integers(0, 1 << 10, shape)),
    "negative, equal in 22 bits": lambda rng, *shape: bits(
        0xBF800000 + rng.integers(0, 1 << 10, shape)
    ),
    "any bits": lambda rng, *shape: bits(rng.integers(0, 1 << 32, shape)),
    "two values": lambda rng, *shape: np.where(rng.random(shape) < 0.5, 1.0, 1.0000001),
    "last column wins": lambda rng, *shape: np.arange(shape[1]) >= shape[1] - 3
    + np.zeros(shape),
}  # fmt: skip


def make(kind: str, dtype, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        return KINDS[kind](rng, rows, columns).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_distributions(kind, dtype):
    logits = make(kind, dtype, 3, 4099)
    for k in (1, 7, 512, 2048, 4096, 4098, 4099, 4100, 5000):
        check(logits, *whole(logits), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_random_ranges(kind, dtype):
    rng = np.random.default_rng(5)
    for seed in range(12):
        columns = int(rng.integers(1, 3000))
        logits = make(kind, dtype, 4, columns, seed)
        starts = rng.integers(-3, columns // 2 + 1, 4).astype(np.int32)
        ends = rng.integers(-2, columns + 9, 4).astype(np.int32)
        check(logits, starts, ends, int(rng.integers(1, 700)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 128])
def test_as_many_columns_as_k(k, dtype):
    for columns in (k - 1, k, k + 1, k + 2):
        check(*((x := make("few distinct", dtype, 2, columns)), *whole(x)), k)
        check(*((x := make("random", dtype, 2, columns)), *whole(x)), k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_and_no_columns(dtype):
    assert sparse_mla.top_k_per_row(
        np.zeros((0, 9), dtype), np.zeros(0, np.int32), np.zeros(0, np.int32), k=4
    ).shape == (0, 4)
    check(np.zeros((3, 0), dtype), int32(0, 0, -1), int32(0, 5, 9), 2)


# --- long rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["random", "few distinct", "constant", "equal in 22 bits", "special"]
)
@pytest.mark.parametrize(("columns", "k"), [(779_425, 2048), (2_000_000, 512), (262_144, 4096)])
def test_long_rows(columns, k, kind):
    """Their columns are shared: by threads on a CPU, by the CTAs of a cluster on Hopper."""
    logits = make(kind, np.float32, 2, columns, seed=columns)
    check(logits, int32(0, 3), int32(columns, columns - 5), k)


def test_long_bf16_rows():
    logits = make("random", ref.BF16, 1, 779_425)
    check(logits, *whole(logits), 2048)


@pytest.mark.parametrize("rows", [1, 3, 40, 300])
@pytest.mark.parametrize("columns", [8192, 20_001])
def test_many_rows(rows, columns):
    """Grids of every size, so that clusters of every size take rows."""
    logits = make("random", np.float32, rows, columns, seed=rows)
    rng = np.random.default_rng(rows)
    starts = rng.integers(0, 100, rows).astype(np.int32)
    ends = rng.integers(columns - 4000, columns, rows).astype(np.int32)
    check(logits, starts, ends, 600)


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", range(9))
def test_rows_anywhere_in_memory(shift, dtype):
    """Strides and addresses that are no multiples of a vector."""
    wide = make("random", dtype, 5, 3001, seed=shift)
    logits = wide[:, shift : shift + 2900 + shift]
    check(logits, np.full(5, shift // 2, np.int32), np.full(5, 2890, np.int32), 77)
    check(logits[::2], *whole(logits[::2]), 300)
    check(logits[::-1], *whole(logits), 300)


def test_a_row_for_all_tokens():
    row = make("random", np.float32, 1, 900)
    logits = np.broadcast_to(row, (4, 900))
    got = sparse_mla.top_k_per_row(logits, int32(0, 0, 1, 2), int32(900, 450, 900, 99), k=50)
    want, _ = expect(logits, int32(0, 0, 1, 2), int32(900, 450, 900, 99), 50)
    assert_same_bits(got, want, "out")


def test_more_starts_than_rows():
    logits = make("random", np.float32, 2, 50)
    got = sparse_mla.top_k_per_row(logits, int32(0, 1, 9), int32(50, 40, 9, 9), k=5)
    want, _ = expect(logits, int32(0, 1), int32(50, 40), 5)
    assert_same_bits(got, want, "out")


# --- slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_valid", [None, np.bool_, np.uint8])
@pytest.mark.parametrize(("k", "columns", "rows"), [(7, 90, 4), (1500, 5000, 3), (600, 70_000, 2)])
def test_slots_are_those_of_the_separate_call(k, columns, rows, is_valid):
    rng = np.random.default_rng(k)
    logits = make("random", np.float32, rows, columns, seed=k)
    starts = rng.integers(0, 5, rows).astype(np.int32)
    ends = np.full(rows, columns, np.int32)
    ends[1] = starts[1] + k // 2  # a row with fewer columns than k
    table = rng.integers(-1, 50, (3, columns // 16)).astype(np.int32)
    ids = rng.integers(0, 3, rows).astype(np.int32)
    valid = None if is_valid is None else (rng.random(rows) < 0.6).astype(is_valid)
    options = {
        "slots_block_table": table,
        "slots_block_size": 8,
        "req_id_per_token": ids,
        "is_valid": valid,
    }
    want_out, _ = expect(logits, starts, ends, k)
    want, want_lens = reference_index.compute_global_topk_indices_and_lens(
        want_out, ids, table, 8, valid
    )
    out, slots = (Guarded(want.shape, np.int32, row_gap=3) for _ in range(2))
    lens = Guarded((rows, 2), np.int32)
    got = sparse_mla.top_k_per_row(
        logits, starts, ends, k=k, **options,
        out=out.array, slots=slots.array, lens=lens.array[:, 0],
    )  # fmt: skip
    assert got[0] is out.array
    assert got[1] is slots.array
    assert_same_bits(out.check(), want_out, "out")
    assert_same_bits(slots.check(), want, "slots")
    assert_same_bits(lens.array[:, 0], want_lens, "lens")
    new = sparse_mla.top_k_per_row(logits, starts, ends, k=k, **options)
    apart = sparse_mla.compute_global_topk_indices_and_lens(new[0], ids, table, 8, valid)
    for x, y in zip(new, (want_out, *apart), strict=True):
        assert_same_bits(x, y, "a result of its own")


NEEDS = {"slots_block_size": 4, "req_id_per_token": int32(0, 0)}


@pytest.mark.parametrize("name", NEEDS)
def test_a_block_table_needs(name):
    logits = make("random", np.float32, 2, 9)
    options = {"slots_block_table": int32([0, 1])} | NEEDS
    del options[name]
    text = f"top_k_per_row: `{name}` must come with `slots_block_table`, got none"
    with pytest.raises(ValueError, match=f"^{text}$"):
        sparse_mla.top_k_per_row(logits, *whole(logits), k=2, **options)


@pytest.mark.parametrize(
    ("name", "given"),
    [*NEEDS.items(), ("is_valid", np.ones(2, bool)), ("slots", int32([0, 0], [0, 0])),
     ("lens", int32(0, 0))],
)  # fmt: skip
def test_without_a_block_table_there_is_no(name, given):
    logits = make("random", np.float32, 2, 9)
    text = f"top_k_per_row: `{name}` must be left out without `slots_block_table`, got one"
    with pytest.raises(ValueError, match=f"^{text}$"):
        sparse_mla.top_k_per_row(logits, *whole(logits), k=2, **{name: given})


# --- instruction sets ----------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(dtype, isa, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    for kind in KINDS:
        logits = make(kind, dtype, 2, 700)
        for k in (1, 100, 699):
            check(logits, int32(0, 1), int32(700, 697), k)


# --- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "few distinct"])
def test_rows_do_not_depend_on_each_other(kind):
    logits = make(kind, np.float32, 20, 9000)
    together = sparse_mla.top_k_per_row(logits, *whole(logits), k=1000)
    again = sparse_mla.top_k_per_row(logits, *whole(logits), k=1000)
    assert_same_bits(again, together, "a second run")
    for t in (0, 7, 19):
        row = logits[t : t + 1]
        alone = sparse_mla.top_k_per_row(row, *whole(row), k=1000)
        assert_same_bits(alone, together[t : t + 1], "a row alone")
