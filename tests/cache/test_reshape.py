"""reshape_and_cache, byte for byte (csrc/cpu/cache/cache.c, csrc/cuda/cache/cache_heads.cu).

SMLA_RANDOM_ROWS=1000000 sets the number of random rows; a GPU gets as many without it. There each
call is also compared with the CPU's (library.py).
"""

from __future__ import annotations

import os
from functools import partial

import device
import numpy as np
import pytest
import reference as ref
from borders import on_threads
from cases import storage
from helpers import Guarded, assert_same_bits
from library import ISAS, package, sparse_mla

pytestmark = pytest.mark.frameworks

RANDOM_ROWS = int(os.environ.get("SMLA_RANDOM_ROWS", 1_000_000 if device.ON_CUDA else 10_000))
DTYPES = {"bf16": ref.BF16, "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
write = sparse_mla.reshape_and_cache


def random_bytes(rng, shape, dtype) -> np.ndarray:
    """Any bit pattern of the type: all sizes, infinities and NaN with and without a sign."""
    dtype = np.dtype(dtype)
    rows = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return rows.view(dtype)


# --- caches --------------------------------------------------------------------------------------

LAYOUTS = (
    "apart",
    "keys, then values",  # [2, P, ps, Hk, D] of one buffer
    "side by side in a row",  # [P, ps, Hk, D + Dv]
    "a key, then a value, per token",  # [P, ps, 2, Hk, D]
    "pages in turn",  # [P, 2, ps, Hk, D]
    "heads before tokens",  # [P, Hk, ps, D]
    "padded",
)


def make_caches(layout, pages, page, heads, dims, dtype, seed=0):
    """-> the memory of both caches, of random bytes, and the caches [P, ps, Hk, D] in it."""
    rng = np.random.default_rng(seed)
    dim, value_dim = dims
    wide = max(dims)

    def memory(*shape) -> np.ndarray:
        return random_bytes(rng, shape, dtype)

    if layout == "apart":
        both = memory(pages, page, heads, dim), memory(pages, page, heads, value_dim)
        return both, both
    if layout == "keys, then values":
        whole = memory(2, pages, page, heads, wide)
        k, v = whole[0, ..., :dim], whole[1, ..., :value_dim]
    elif layout == "side by side in a row":
        whole = memory(pages, page, heads, dim + value_dim)
        k, v = whole[..., :dim], whole[..., dim:]
    elif layout == "a key, then a value, per token":
        whole = memory(pages, page, 2, heads, wide)
        k, v = whole[:, :, 0, :, :dim], whole[:, :, 1, :, :value_dim]
    elif layout == "pages in turn":
        whole = memory(pages, 2, page, heads, wide)
        k, v = whole[:, 0, ..., :dim], whole[:, 1, ..., :value_dim]
    elif layout == "heads before tokens":
        whole = memory(pages, heads, page, dim + value_dim)
        k, v = (x.transpose(0, 2, 1, 3) for x in (whole[..., :dim], whole[..., dim:]))
    else:
        whole = memory(pages + 1, page + 2, heads + 1, dim + value_dim + 3)
        whole = whole[:pages, :page, :heads]
        k, v = whole[..., 1 : 1 + dim], whole[..., dim + 2 : dim + 2 + value_dim]
    return (whole,), (k, v)


def check_call(call, memory, caches, k, v, slots, *, k_scale=1.0, v_scale=1.0) -> None:
    """The call and the reference must leave the same bytes in all memory of the caches."""
    memory = [storage(x) for x in memory]
    before = [x.copy() for x in memory]
    scales = {} if caches[0].dtype.itemsize > 1 else {"k_scale": k_scale, "v_scale": v_scale}
    got = call(k, v, *caches, slots, **scales)
    assert isinstance(got, tuple)
    assert all(x is y for x, y in zip(got, caches, strict=True))
    after = [x.copy() for x in memory]
    for x, y in zip(memory, before, strict=True):
        x[...] = y
    for rows, cache, scale in ((k, caches[0], k_scale), (v, caches[1], v_scale)):
        ref.write_heads(rows, cache, slots, scale)
    for x, y in zip(after, memory, strict=True):
        assert_same_bits(x, y, "the caches' memory")


check = partial(check_call, write)


def make_rows(rng, count, heads, dims, dtype):
    return tuple(random_bytes(rng, (count, heads, dim), dtype) for dim in dims)


SLOTS = [19, 0, -1, 7, 4, 5, -(2**31), 12]


@pytest.mark.parametrize("cache_dtype", ["same", "e4m3", "uint8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dtypes(layout, dtype, cache_dtype):
    rng = np.random.default_rng(1)
    rows = make_rows(rng, 8, 3, (24, 16), DTYPES[dtype])
    stored = {"same": DTYPES[dtype], "e4m3": ref.E4M3, "uint8": np.uint8}[cache_dtype]
    memory, caches = make_caches(layout, 4, 5, 3, (24, 16), stored)
    for slot_dtype in (np.int64, np.int32):
        check(memory, caches, *rows, np.array(SLOTS, slot_dtype), k_scale=0.3, v_scale=2.5)


DIMS = [(8, 8), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512), (40, 24)]
DIMS += [(576, 512), (24, 512)]


@pytest.mark.parametrize("heads", [1, 2, 8, 128])
@pytest.mark.parametrize("dims", DIMS)
def test_sizes(dims, heads):
    rng = np.random.default_rng(2)
    for dtype, stored in ((ref.BF16, np.uint8), (ref.BF16, ref.BF16), (np.dtype("f4"), np.uint8)):
        rows = make_rows(rng, 6, heads, dims, dtype)
        memory, caches = make_caches("apart", 3, 4, heads, dims, stored)
        check(memory, caches, *rows, np.array([11, 0, -1, 5, 7]), k_scale=0.7)


@pytest.mark.parametrize("page", [1, 3, 16, 64, 1000])
@pytest.mark.parametrize("layout", ["apart", "padded"])
def test_page_sizes(page, layout):
    rng = np.random.default_rng(3)
    pages = 3 if page > 1 else 40
    rows = make_rows(rng, 30, 2, (16, 8), ref.BF16)
    slots = rng.permutation(pages * page)[:30]
    for stored in (ref.BF16, np.uint8):
        memory, caches = make_caches(layout, pages, page, 2, (16, 8), stored)
        check(memory, caches, *(x[: len(slots)] for x in rows), slots, v_scale=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_strides(dtype):
    """Keys and values of one projection, heads apart, tokens back to front or all one."""
    rng = np.random.default_rng(4)
    joint = random_bytes(rng, (8, 3, 2 * 5 * 16), DTYPES[dtype]).reshape(8, 3, 10, 16)
    k, v = joint[:, 1, ::2], joint[:, 2, ::2, 3:11]
    forms = [(k, v), (k[::-1], v[:, ::-1]), tuple(np.broadcast_to(x[:1], x.shape) for x in (k, v))]
    for stored in (DTYPES[dtype], ref.E4M3):
        for rows in forms:
            memory, caches = make_caches("padded", 4, 5, 5, (16, 8), stored)
            check(memory, caches, *rows, np.array(SLOTS), k_scale=3.0)
            strided = np.array([x for slot in SLOTS for x in (slot, 99)])[::2]
            check(memory, caches, *rows, strided, k_scale=3.0)


@pytest.mark.parametrize("shift", [0, 1, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_caches_off_vectors(dtype, shift):
    """Both begin `shift` elements behind a vector: 16 bytes of rows, and what becomes of them."""
    rng = np.random.default_rng(5)
    wide = random_bytes(rng, (7, 2, 64), DTYPES[dtype])
    k, v = wide[..., shift : shift + 24], wide[..., 32 : 32 + 16]
    for stored in (DTYPES[dtype], np.uint8):
        whole = random_bytes(rng, (3, 4, 2, 64), stored)
        for at in (0, shift):
            caches = whole[..., at : at + 24], whole[..., 32 + at : 48 + at]
            check((whole,), caches, k, v, np.array([11, 0, -1, 5, 7, 2, 9]), k_scale=0.6)


def test_the_number_of_tokens_is_that_of_the_slots():
    rng = np.random.default_rng(6)
    k, v = make_rows(rng, 9, 2, (8, 16), ref.BF16)
    memory, caches = make_caches("apart", 3, 4, 2, (8, 16), ref.BF16)
    check(memory, caches, k, v[:5], np.array([4, -1, 6]))
    check(memory, caches, k, v, np.zeros(0, np.int64))
    check(memory, caches, k[:0], v[:0], np.zeros(0, np.int32))
    check(memory, caches, k, v, np.full(9, -1))
    memory, caches = make_caches("apart", 0, 4, 2, (8, 16), ref.BF16)
    check(memory, caches, k, v, np.full(9, -7))


# --- values --------------------------------------------------------------------------------------

VECTOR = np.array([1, -1, 1e6, -1e6, np.inf, np.nan, 0, 0.1], np.float32)
CODES = {
    1.0: "38 b8 7e fe 7e 7f 00 1d",
    0.5: "40 c0 7e fe 7e 7f 00 25",
    0.3: "45 c5 7e fe 7e 7f 00 2b",
}


@pytest.mark.parametrize("scale", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vector(scale, dtype):
    """Signs of NaN and of 0 stay. 1e6 is beyond fp16, where it becomes an infinity."""
    with np.errstate(over="ignore"):
        x = (ref.to_bf16(VECTOR) if dtype == "bf16" else VECTOR.astype(DTYPES[dtype]))[None, None]
    negative = x.copy()
    bits = negative.view(np.uint8).reshape(8, -1)
    bits[:, -1] ^= 0x80
    want = np.frombuffer(bytes.fromhex(CODES[scale]), np.uint8)
    per_head = np.full(1, scale, np.float32)
    for given in (scale, per_head, per_head.reshape(()), per_head.reshape(1, 1)):
        caches = np.zeros((2, 2, 1, 8), np.uint8), np.zeros((2, 2, 1, 8), np.uint8)
        write(x, negative, *caches, np.array([3]), k_scale=given, v_scale=given)
        assert_same_bits(caches[0][1, 1, 0], want)
        assert_same_bits(caches[1][1, 1, 0], want ^ 0x80)


def test_each_head_has_its_scale():
    x = np.ones((2, 3, 8), np.float32)
    scales = np.array([0.5, 9, 1, 9, 4, 9], np.float32)[::2]
    caches = np.zeros((1, 2, 3, 8), np.uint8), np.zeros((1, 2, 3, 8), np.uint8)
    write(x, x, *caches, np.array([1, 0]), k_scale=scales, v_scale=scales[::-1])
    want = np.array([0x40, 0x38, 0x28], np.uint8)  # 2, 1, 1/4
    assert_same_bits(caches[0], np.broadcast_to(want[:, None], (1, 2, 3, 8)))
    assert_same_bits(caches[1], np.broadcast_to(want[::-1, None], (1, 2, 3, 8)))


def hard_values(rng, count: int, scale: float) -> np.ndarray:
    """fp32: half of any bits, a quarter near the numbers midway between two of e4m3, times the
    scale, and a quarter as scores are."""
    midways = ref._E4M3_MIDPOINTS[rng.integers(0, 126, count)]
    with np.errstate(over="ignore", invalid="ignore"):
        near = (midways * scale).astype(np.float32).view(np.int32) + rng.integers(-2, 3, count)
        near = near.astype(np.int32).view(np.float32) * rng.choice(np.float32([1, -1]), count)
        usual = (rng.standard_normal(count) * 100 * scale).astype(np.float32)
    anything = rng.integers(0, 1 << 32, count, np.uint32).view(np.float32)
    kind = rng.integers(0, 4, count)
    return np.where(kind < 2, anything, np.where(kind == 2, near, usual))


SCALES = (1.0, 2.0**-7, 0.3, 447.0, 2.0**-59, 2.0**-61, 2.0**-126, 2.0**101, 2.0**120, 1e-3)
SCALES += (2 - 2.0**-23, 1 - 2.0**-24)  # next to powers of two, where quotients by products fail


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_rows(dtype):
    """Every scale, as a number and as an array."""
    rows = RANDOM_ROWS // len(SCALES)
    for i, scale in enumerate(SCALES):
        rng = np.random.default_rng([len(dtype), i])
        values = hard_values(rng, rows * 24, scale)
        with np.errstate(over="ignore", invalid="ignore"):
            values = ref.to_bf16(values) if dtype == "bf16" else values.astype(DTYPES[dtype])
        k, v = values[: rows * 8].reshape(rows, 1, 8), values[rows * 8 :].reshape(rows, 1, 16)
        memory, caches = make_caches("apart", -(-rows // 16), 16, 1, (8, 16), np.uint8)
        per_head = np.full(1, scale, np.float32)
        check(memory, caches, k, v, rng.permutation(rows), k_scale=scale, v_scale=per_head)


@pytest.mark.skipif(device.ON_CUDA, reason="instruction sets of the CPU")
@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(isa, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    rng = np.random.default_rng(7)
    scales = np.float32([2.0**-126, 0.3, 2.0**101])
    for dtype in DTYPES.values():
        rows = make_rows(rng, 64, 3, (40, 24), dtype)
        for layout in ("apart", "padded"):
            memory, caches = make_caches(layout, 8, 9, 3, (40, 24), np.uint8)
            check(memory, caches, *rows, rng.permutation(72)[:64], k_scale=scales, v_scale=0.3)


# --- slots ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("slot", [20, 2**31 - 1, 2**40, 2**63 - 1])
def test_a_slot_past_the_end_writes_nothing(slot):
    rng = np.random.default_rng(8)
    k, v = make_rows(rng, 4, 2, (8, 8), ref.BF16)
    (whole,), caches = make_caches("pages in turn", 4, 5, 2, (8, 8), ref.BF16)
    before = whole.view(np.uint8).copy()
    words = f"`slot_mapping` must be below the 20 slots of `k_cache`, got {slot} at token 2"
    with pytest.raises(ValueError, match=f"^reshape_and_cache: {words}"):
        write(k, v, *caches, np.array([1, 2, slot, 3]))
    assert_same_bits(whole.view(np.uint8), before, "nothing may be written")


def test_the_last_of_neighbours_with_one_slot_wins():
    rng = np.random.default_rng(9)
    k, v = make_rows(rng, 12, 2, (8, 24), ref.BF16)
    slots = np.array([6, 1, 6, 6, -1, 2, 1, 6, 2, 3, 1, 6])
    for stored in (ref.BF16, np.uint8):
        memory, caches = make_caches("apart", 2, 4, 2, (8, 24), stored)
        check(memory, caches, k, v, slots, k_scale=0.3)


def write_many(seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    k, v = make_rows(rng, 5000, 2, (8, 16), ref.BF16)
    slots = rng.integers(-3, 900 if seed else 6000, 5000)
    memory, caches = make_caches("apart", 100, 60, 2, (8, 16), np.uint8)
    package.reshape_and_cache(k, v, *caches, slots, k_scale=0.3)
    return [x.tobytes() for x in memory]


@pytest.mark.skipif(device.ON_CUDA, reason="threads of the CPU")
@pytest.mark.parametrize("seed", [0, 1])
def test_the_last_token_of_a_slot_wins_for_any_number_of_threads(seed):
    rng = np.random.default_rng(seed)
    k, v = make_rows(rng, 5000, 2, (8, 16), ref.BF16)
    slots = rng.integers(-3, 900 if seed else 6000, 5000)
    memory, caches = make_caches("apart", 100, 60, 2, (8, 16), np.uint8)
    ref.write_heads(k, caches[0], slots, 0.3)
    ref.write_heads(v, caches[1], slots)
    want = [x.tobytes() for x in memory]
    for threads in (1, 2, 5):
        assert on_threads(threads, write_many, seed) == want


# --- what reads them -----------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [ref.BF16, ref.E4M3])
def test_paged_attention_reads_what_was_written(stored):
    """Keys of two requests go to shuffled pages, token by token; attention is that of the rows."""
    rng = np.random.default_rng(10)
    heads, page, lens = 2, 4, np.array([11, 7], np.int32)
    rows = [ref.to_bf16(rng.standard_normal((18, heads, 16))) for _ in range(2)]
    table = np.array([[4, 0, 2], [1, 3, 5]], np.int32)
    at = np.concatenate([table[b, np.arange(n) // page] * page + np.arange(n) % page
                         for b, n in enumerate(lens)])  # fmt: skip
    caches = [Guarded((6, page, heads, 16), stored).array for _ in range(2)]
    scales = {}
    if stored == ref.E4M3:
        scales = {"k": np.float32([0.02, 0.03]), "v": np.float32([0.5, 0.01])}
        write(*rows, *caches, at, k_scale=scales["k"], v_scale=scales["v"])
        given = [ref.e4m3_encode(ref.to_f32(x) / scales[name][:, None]).view(ref.E4M3)
                 for name, x in zip("kv", rows, strict=True)]  # fmt: skip
    else:
        write(*rows, *caches, at)
        given = rows
    descales = {f"{name}_descale": x[None] for name, x in scales.items()}
    q = ref.to_bf16(rng.standard_normal((2, 4, 16)))
    got = sparse_mla.paged_attention(q, *caches, table, lens, softmax_scale=0.3, **descales)
    starts = np.array([0, 1, 2], np.int32), np.array([0, 11, 18], np.int32)
    want = sparse_mla.varlen_attention(q, *given, *starts, softmax_scale=0.3, **descales)
    for x, y in zip(got, want, strict=True):
        assert_same_bits(np.asarray(x), np.asarray(y))
