"""rope_and_cache_mla (csrc/cpu/rope, csrc/cuda/rope): the bytes of apply_rope, then of
concat_and_cache_mla."""

import itertools

import device
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bits
from library import ISAS, sparse_mla
from test_apply_rope import DTYPES, F32, ROWS, made, places, rotate, rounded

CACHES = {"bfloat16": ref.BF16, "fp8_ds_mla": np.uint8}


def make_cache(fmt, num_pages=20, block_size=16):
    """Rows of bytes that no write leaves unchanged."""
    width = 576 if fmt == "bfloat16" else 656
    bits = np.full((num_pages, block_size, width), 0xAB, np.uint16 if width == 576 else np.uint8)
    return bits.view(CACHES[fmt])


def shuffled(count, num_slots=320):
    return np.random.default_rng(count).permutation(num_slots)[:count]


def both(positions, q, k, table, kv_c, cache, slots, **options):
    """(q_out, cache) of the two operators."""
    turn = {name: x for name, x in options.items() if name == "interleaved"}
    q_out, k_out = sparse_mla.apply_rope(positions, q, k, table, **turn)
    return q_out, sparse_mla.concat_and_cache_mla(kv_c, k_out, cache.copy(), slots)


def check(positions, q, k, table, kv_c, cache, slots, **options):
    """A new q_out, one that is given, and in place. Inputs stay."""
    given = positions, q, k, table, kv_c
    want = both(*given, cache, slots, **options)
    before = k.copy(), kv_c.copy()
    own = cache.copy()
    got = sparse_mla.rope_and_cache_mla(*given, own, slots, **options)
    assert got[1] is own
    out, in_place = Guarded(q.shape, q.dtype, row_gap=8), q.copy()
    again, third = cache.copy(), cache.copy()
    sparse_mla.rope_and_cache_mla(*given, again, slots, q_out=out.array, **options)
    sparse_mla.rope_and_cache_mla(
        positions, in_place, k, table, kv_c, third, slots, q_out=in_place, **options
    )
    for q_out, rows in ((got[0], own), (out.check(), again), (in_place, third)):
        assert_same_bits(q_out, want[0])
        assert_same_bits(rows, want[1])
    assert_same_bits(k, before[0])
    assert_same_bits(kv_c, before[1])


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", CACHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_every_type(fmt, dtype, interleaved):
    table = sparse_mla.rope_table(ROWS)
    for heads, tokens, kind in itertools.product((1, 3, 128), (1, 7, 65), DTYPES):
        q, k = made((tokens, heads, 64), dtype, heads), made((tokens, 64), dtype, 7)
        kv_c = made((tokens, 512), dtype, 8)
        given = places(tokens), q, k, rounded(table, kind), kv_c, make_cache(fmt), shuffled(tokens)
        check(*given, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_beside_a_reference(interleaved):
    """The RoPE part of a row is bf16 of the turned key, without the operators' help."""
    q, k, kv_c = made((9, 2, 64), F32), made((9, 64), F32, 1), made((9, 512), F32, 2)
    table, cache, slots = sparse_mla.rope_table(ROWS), make_cache("bfloat16"), shuffled(9)
    given = places(9), q, k, table, kv_c, cache, slots
    q_out, _ = sparse_mla.rope_and_cache_mla(*given, interleaved=interleaved)
    assert_same_bits(q_out, rotate(q, places(9), table, interleaved))
    rows = cache.reshape(-1, 576)[slots]
    assert_same_bits(rows[:, :512].copy(), ref.to_bf16(kv_c))
    turned = rotate(k, places(9), table, interleaved)
    assert_same_bits(rows[:, 512:].copy(), ref.to_bf16(turned))
    exact = np.hypot(*np.split(k.astype(np.float64).reshape(9, 32, 2), 2, -1) if interleaved
                     else (k[:, :32].astype(np.float64), k[:, 32:]))  # fmt: skip
    halves = turned.astype(np.float64)
    pairs = (halves[:, ::2], halves[:, 1::2]) if interleaved else (halves[:, :32], halves[:, 32:])
    assert np.abs(np.hypot(*pairs) - exact.reshape(9, 32)).max() < 1e-6  # lengths stay


@pytest.mark.parametrize("fmt", CACHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_any_bits(fmt, dtype, interleaved):
    """NaN, infinities, subnormal numbers and both zeros, as values and as angles."""
    rng = np.random.default_rng(5)
    bits = np.uint16 if dtype == ref.BF16 else np.uint32
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-38, 3e38], F32)
    top = np.iinfo(bits).max
    q = rng.integers(0, top, (64, 5, 64), bits, endpoint=True).view(dtype)
    k = rng.integers(0, top, (64, 64), bits, endpoint=True).view(dtype)
    kv_c = rng.integers(0, top, (64, 512), bits, endpoint=True).view(dtype)
    k[::2] = rounded(rng.choice(special, (32, 64)), dtype)
    table = rng.normal(0, 1, (ROWS, 64)).astype(F32)
    table[::3] = rng.choice(special, table[::3].shape)
    check(places(64), q, k, table, kv_c, make_cache(fmt), shuffled(64), interleaved=interleaved)


@pytest.mark.parametrize("fmt", CACHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens(fmt, dtype):
    """More than a block of tokens, and enough for the CPU's threads."""
    table, num_tokens = sparse_mla.rope_table(4096), 3000
    q, k = made((num_tokens, 5, 64), dtype, 3), made((num_tokens, 64), dtype, 4)
    kv_c, cache = made((num_tokens, 512), dtype, 5), make_cache(fmt, 200)
    slots = shuffled(num_tokens, 3200)
    check(places(num_tokens, rows=4096), q, k, table, kv_c, cache, slots)


@pytest.mark.skipif(device.ON_CUDA, reason="instruction sets of the CPU")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", CACHES)
def test_instruction_sets(fmt, isa, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CPU_ISA", isa)
    q, k, kv_c = made((5, 3, 64), ref.BF16), made((5, 64), ref.BF16, 1), made((5, 512), ref.BF16, 2)
    table = sparse_mla.rope_table(ROWS)
    check(places(5), q, k, table, kv_c, make_cache(fmt), shuffled(5))


# --- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", CACHES)
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alignment(offset, dtype, fmt):
    """Rows that begin anywhere, in queries, keys and tables: whole vectors and single values."""
    wide = made((6, 5, 64 + offset), dtype)
    rows = made((6, 576 + offset), dtype, 1)
    table = np.random.default_rng(2).normal(0, 1, (ROWS, 64 + offset)).astype(F32)[:, offset:]
    for interleaved, aligned_keys in itertools.product((True, False), repeat=2):
        keys = rows if not aligned_keys else np.ascontiguousarray(rows[:, offset:])
        q, k, kv_c = wide[..., offset:], keys[:, -64:], keys[:, -576:-64]
        given = places(6), q, k, table, kv_c, make_cache(fmt), shuffled(6)
        check(*given, interleaved=interleaved)


@pytest.mark.parametrize("fmt", CACHES)
def test_fewer_slots_than_tokens(fmt):
    """Queries of all tokens are turned; the cache takes those that have a slot. Positions may be
    more than tokens, and kv_c may have other rows than slots."""
    q, k, kv_c = made((8, 3, 64), ref.BF16), made((8, 64), ref.BF16, 1), made((8, 512), ref.BF16, 2)
    table = sparse_mla.rope_table(ROWS)
    more = np.append(places(8), [2**31 - 1, -5])
    for count in (0, 1, 5, 8):
        for positions, latents in ((places(8), kv_c), (more, kv_c[: max(count, 1)])):
            check(positions, q, k, table, latents, make_cache(fmt), shuffled(8)[:count])


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_skipped_slots_and_strides(kind):
    """Negative slots skip; every other entry of larger arrays of indices."""
    q, k, kv_c = made((6, 2, 64), ref.BF16), made((6, 64), ref.BF16, 1), made((6, 512), ref.BF16, 2)
    slots = np.array([3, -1, 17, -(2**31), 319, 0], kind)
    table = sparse_mla.rope_table(ROWS)
    for fmt in CACHES:
        check(places(6, kind), q, k, table, kv_c, make_cache(fmt), slots)
        apart = places(6, kind).repeat(3)[::3], q, k, table, kv_c
        check(*apart, make_cache(fmt), slots.repeat(2)[::2])


def test_the_last_token_of_a_slot_wins():
    q, k, kv_c = made((6, 2, 64), ref.BF16), made((6, 64), ref.BF16, 1), made((6, 512), ref.BF16, 2)
    slots, table = np.array([5, 7, 5, 9, 7, 5]), sparse_mla.rope_table(ROWS)
    given = places(6), q, k, table, kv_c
    for fmt in CACHES:
        want = both(*given, make_cache(fmt), slots)[1]
        cache = make_cache(fmt)
        sparse_mla.rope_and_cache_mla(*given, cache, slots)
        assert_same_bits(cache, want)


@pytest.mark.parametrize("shape", [(0, 3, 64), (3, 0, 64), (0, 0, 64)])
@pytest.mark.parametrize("num_slots", [0, 3])
def test_nothing_to_turn(shape, num_slots):
    """Without heads, the keys are still written."""
    tokens = shape[0]
    q, k, kv_c = np.zeros(shape, F32), made((tokens, 64), F32), made((tokens, 512), F32)
    table, slots = sparse_mla.rope_table(ROWS), shuffled(min(tokens, num_slots))
    check(places(tokens), q, k, table, kv_c, make_cache("fp8_ds_mla"), slots)
    if tokens == 0:  # then neither a row of the table nor a page is needed
        given = places(0), q, k, table[:0], kv_c, make_cache("bfloat16", 0), slots
        assert sparse_mla.rope_and_cache_mla(*given)[0].shape == shape


@pytest.mark.parametrize("bad", [-1, ROWS, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_positions(bad, interleaved, dtype):
    """The CPU refuses them before it writes. CUDA copies these tokens, NaN and all."""
    q, k, kv_c = made((6, 3, 64), dtype), made((6, 64), dtype, 1), made((6, 512), dtype, 2)
    q[4, 1, :5] = k[4, 7] = np.nan
    table, positions, slots = sparse_mla.rope_table(ROWS), places(6), shuffled(6)
    positions[4] = bad
    cache = make_cache("bfloat16")
    given = positions, q, k, table, kv_c
    if device.ON_CUDA:
        check(*given, cache, slots, interleaved=interleaved)
        return
    before, out = cache.copy(), Guarded(q.shape, q.dtype)
    with pytest.raises(ValueError, match="positions") as info:
        sparse_mla.rope_and_cache_mla(
            *given, cache, slots, interleaved=interleaved, q_out=out.array
        )
    assert str(info.value) == (
        f"rope_and_cache_mla: `positions` must be rows of `rope_table`, which has {ROWS}, got "
        f"{bad} for token 4"
    )
    assert_same_bits(cache, before)
    out.check(written=False)


@pytest.mark.parametrize("slot", [320, 2**31 - 1])
def test_slots_past_the_end(slot):
    """The CPU refuses them before it writes; on CUDA the token is skipped."""
    q, k, kv_c = made((3, 2, 64), ref.BF16), made((3, 64), ref.BF16, 1), made((3, 512), ref.BF16, 2)
    table, cache = sparse_mla.rope_table(ROWS), make_cache("fp8_ds_mla")
    given, slots = (places(3), q, k, table, kv_c), np.array([4, slot, 8])
    if device.ON_CUDA:
        check(*given, cache, slots)
        return
    before = cache.copy()
    with pytest.raises(ValueError, match="must be below the 320 slots of `kv_cache`, got"):
        sparse_mla.rope_and_cache_mla(*given, cache, slots)
    assert_same_bits(cache, before)


# --- errors --------------------------------------------------------------------------------------


def test_texts():
    bf16 = ref.BF16
    good = {"positions": places(3), "q_pe": made((3, 2, 64), bf16), "k_pe": made((3, 64), bf16)}
    good |= {"rope_table": sparse_mla.rope_table(ROWS), "kv_c": made((3, 512), bf16)}
    good |= {"kv_cache": make_cache("bfloat16"), "slot_mapping": shuffled(3)}
    narrow = {"q_pe": made((3, 2, 32), bf16), "k_pe": made((3, 32), bf16)}
    for wrong, error, text in (
        (narrow | {"rope_table": sparse_mla.rope_table(ROWS, R=32)}, ValueError, "`k_pe` must have "
         "shape [any, 64], got [3, 32]: tokens, and the RoPE values of their keys"),
        ({"kv_c": made((3, 512), F32)}, TypeError, "`kv_c` must be bfloat16, got float32: nothing "
         "is cast here"),
        ({"k_pe": made((3, 64), F32)}, TypeError, "`k_pe` must be bfloat16, got float32: nothing "
         "is cast here"),
        ({"k_pe": made((4, 64), bf16)}, ValueError, "`k_pe` must have shape [3, 64], got [4, 64]: "
         "the tokens and the values of `q_pe`"),
        ({"slot_mapping": shuffled(4)}, ValueError, "`kv_c` must have at least one row per entry "
         "of `slot_mapping` (4), got 3"),
        ({"q_out": made((3, 1, 64), bf16)}, ValueError, "`q_out` must have shape [3, 2, 64], got "
         "[3, 1, 64]: the shape of what is turned"),
    ):  # fmt: skip
        with pytest.raises(error) as info:
            sparse_mla.rope_and_cache_mla(**(good | wrong))
        assert str(info.value).startswith(f"rope_and_cache_mla: {text}")
    with pytest.raises(ValueError, match="`kv_cache` must be of a format that this operator takes"):
        sparse_mla.rope_and_cache_mla(**(good | {"kv_cache": np.zeros((2, 4, 512), bf16)}))


def test_the_output_may_be_the_whole_input_alone():
    q, k, kv_c = made((4, 3, 64), F32), made((4, 64), F32, 1), made((4, 512), F32, 2)
    given, table = (kv_c, make_cache("bfloat16"), shuffled(4)), sparse_mla.rope_table(ROWS)
    rows = made((5, 3, 64), F32)
    with pytest.raises(ValueError, match=r"`q_out` must be the whole of or not overlap `q_pe`"):
        sparse_mla.rope_and_cache_mla(places(4), rows[:4], k, table, *given, q_out=rows[1:])
    with pytest.raises(ValueError, match=r"must not overlap"):
        sparse_mla.rope_and_cache_mla(places(4), q, q[:, 0], table, *given, q_out=q)
