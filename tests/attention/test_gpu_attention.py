"""sparse_attention on the GPU, beyond the cases of test_attention.py: tile shapes, hard values."""

import functools
from dataclasses import replace
from itertools import product

import cases
import numpy as np
import pytest
import reference as ref
from cases import AttentionCase, AttentionInputs
from helpers import assert_same_bits, assert_within_bounds, guarded_attention
from library import sparse_mla

attend = sparse_mla.sparse_attention
FORMATS = ["fp8", "bf16"]
ALL_FORMATS = [*FORMATS, "bf16_512"]


def check(case: AttentionInputs, want: ref.Attention | None = None) -> dict:
    """Asserts that results are within the bounds, that nothing outside them is written, and that a
    second run gives the same bits."""
    got = guarded_attention(attend, case)
    assert_within_bounds(want or case.reference(), got)
    again = guarded_attention(attend, case)
    for name, x in got.items():
        assert_same_bits(again[name], x, f"{name} of the second run")
    return got


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ALL_FORMATS)
@pytest.mark.parametrize("num_heads", range(1, 129))
def test_every_head_count(num_heads, fmt):
    """There is more than one block of keys, so that the running maximum moves. Every third head
    count has a sink."""
    check(AttentionCase(2, num_heads, 140, fmt=fmt, pages=3, sink=num_heads % 3 == 0).make())


@pytest.mark.parametrize("fmt", ALL_FORMATS)
@pytest.mark.parametrize("num_splits", [*range(1, 20), 31, 32, 33, 63, 64])
def test_split_counts(num_splits, fmt):
    """A split is a multiple of 64 columns, so the last of many splits are empty."""
    check(
        AttentionCase(
            2, 17, 1000, fmt=fmt, pages=20, num_splits=num_splits, topk_length=True, sink=True
        ).make()
    )


@pytest.mark.parametrize("fmt", ALL_FORMATS)
@pytest.mark.parametrize("K", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 2049])
def test_widths(K, fmt):
    check(AttentionCase(2, 24, K, fmt=fmt, pages=40).make())


@pytest.mark.parametrize("fmt", ALL_FORMATS)
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("layout", ["paged", "padded", "interleaved"])
def test_page_sizes(block_size, layout, fmt):
    pages = -(-300 // block_size)
    check(
        AttentionCase(3, 20, 200, fmt=fmt, pages=pages, block_size=block_size, layout=layout).make()
    )


@pytest.mark.parametrize(("fmt", "extra"), [*product(FORMATS, FORMATS), ("bf16_512", "bf16_512")])
@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("num_heads", [5, 64, 128])
def test_extra_lists(fmt, extra, num_splits, num_heads):
    check(
        AttentionCase(
            9, num_heads, 170, fmt=fmt, extra=extra, num_splits=num_splits, topk_length=True
        ).make()
    )


@pytest.mark.parametrize(
    ("q_layout", "fmt"),
    [
        *product(["pair", "pair_views"], FORMATS),
        *product(["head_major", "odd_stride", "zero"], ALL_FORMATS),
    ],
)
@pytest.mark.parametrize("num_heads", [1, 16, 65])
def test_query_layouts(q_layout, fmt, num_heads):
    check(AttentionCase(3, num_heads, 150, fmt=fmt, q_layout=q_layout, sink=True).make())


@pytest.mark.parametrize("fmt", ALL_FORMATS)
@pytest.mark.parametrize("q_layout", ["compact", "odd_stride"])
@pytest.mark.parametrize("num_heads", [12, 64])
def test_rows_in_turn(num_heads, q_layout, fmt):
    """There are more tokens than the device runs CTAs, so each CTA takes several. Some tokens have
    no keys; what the CTA's token before them left must not change their results."""
    case = AttentionCase(
        450,
        num_heads,
        150,
        fmt=fmt,
        pages=20,
        q_layout=q_layout,
        topk_length=True,
        sink=True,
        num_splits=1,
    ).make()
    assert not case.options["topk_length"].all()
    check(case)


@pytest.mark.parametrize("fmt", ["bf16", "bf16_512"])
@pytest.mark.parametrize("offset", range(8))
def test_bf16_rows_at_every_alignment(offset, fmt):
    """Cache rows that begin 0 to 14 bytes past a multiple of 16 give the same bits."""
    case = AttentionCase(2, 20, 150, fmt=fmt).make()
    want = check(case)
    wide = cases.poisoned_storage((*case.kv.shape[:2], 592), ref.BF16)
    view = wide[..., offset : offset + case.kv.shape[-1]]
    view[...] = case.kv
    case.kv = view
    for name, x in check(case).items():
        assert_same_bits(x, want[name], name)


FILL = r"""
extern "C" __global__ void fill(int num_words, unsigned value)
{
    extern __shared__ volatile unsigned memory[];
    for (int i = threadIdx.x; i < num_words; i += blockDim.x) {
        memory[i] = value;
    }
}
"""


@pytest.mark.cupy
@pytest.mark.parametrize("word", [0xFFFFFFFF, 0xFF800000, 0x7F800000])  # NaN, -inf, inf
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_what_shared_memory_held_before_is_not_felt(num_heads, num_splits, fmt, word, cupy):
    case = AttentionCase(
        3, num_heads, 1000, fmt=fmt, pages=20, num_splits=num_splits, topk_length=True
    ).make()
    case.options["topk_length"][:] = [0, 700, 1]
    device_facts = cupy.cuda.Device().attributes
    size = device_facts["MaxSharedMemoryPerBlockOptin"]
    fill = cupy.RawKernel(FILL, "fill")
    fill.max_dynamic_shared_size_bytes = size
    results = []
    for value in (0, word):
        fill(
            (device_facts["MultiProcessorCount"],),
            (1024,),
            (np.int32(size // 4), np.uint32(value)),
            shared_mem=size,
        )
        results.append(guarded_attention(attend, case))
    assert_within_bounds(case.reference(), results[0])
    for name, x in results[1].items():
        assert_same_bits(x, results[0][name], name)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_hundred_runs_give_the_same_bits(fmt):
    case = AttentionCase(4, 48, 700, fmt=fmt, pages=20, num_splits=6, sink=True).make()
    first = guarded_attention(attend, case)
    for _ in range(100):
        for name, x in guarded_attention(attend, case).items():
            assert_same_bits(x, first[name], name)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("num_splits", [1, 2, 7, 64])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_batch_invariance(num_heads, num_splits, fmt):
    """With num_splits fixed, a token's results have the same bits in batches of 1, 3, 64 and
    300 tokens."""
    case = AttentionCase(300, num_heads, 200, fmt=fmt, pages=8, num_splits=num_splits).make()
    whole = guarded_attention(attend, case)
    rng = np.random.default_rng(num_splits)
    for count in (1, 3, 64, 300):
        rows = rng.permutation(300)[:count]
        part = guarded_attention(attend, case.rows(rows))
        for name, x in part.items():
            assert_same_bits(x, whole[name][rows], f"{name} of {count} rows")


# --- values --------------------------------------------------------------------------------------

NUM_TOKENS = 1024
MOST_HEADS = 128


def keys(rng, scales, *, codes="normal", rope=1.0) -> np.ndarray:
    """A cache [16, 64, 656] with e4m3 bytes of the kind `codes`, the scales [n, 1] or [n, 4], and
    a RoPE part: given, or random with standard deviation `rope`."""
    shape = (NUM_TOKENS, 512)
    if codes == "normal":
        value = np.clip(rng.normal(0, 60, shape), -448, 448).astype(np.float32)
        bytes_ = ref.e4m3_encode(value)
    elif codes == "subnormal":
        bytes_ = rng.integers(0, 8, shape) | (rng.integers(0, 2, shape) << 7)
    elif codes == "largest":
        bytes_ = 0x7E | (rng.integers(0, 2, shape) << 7)
    else:
        assert codes == "any", codes
        bytes_ = rng.integers(0, 256, shape)
        bytes_[(bytes_ & 127) == 127] -= 1
    rows = np.empty((NUM_TOKENS, 656), np.uint8)
    rows[:, :512] = bytes_
    scales = np.broadcast_to(np.asarray(scales, np.float32), (NUM_TOKENS, 4))
    rows[:, 512:528] = np.ascontiguousarray(scales).view(np.uint8)
    part = rope if isinstance(rope, np.ndarray) else rng.normal(0, rope, (NUM_TOKENS, 64))
    rows[:, 528:] = ref.bf16_encode(part.astype(np.float32)).view(np.uint8)
    return rows.reshape(16, 64, 656)


def powers(rng, low, high, *shape) -> np.ndarray:
    return 10.0 ** rng.uniform(low, high, shape)


def make(rng, kv, *, q=None, q_std=1.0, indices=None, masked=0.0):
    T, H, K = 2, MOST_HEADS, 1024
    if q is None:
        q = rng.normal(0, q_std, (T, H, 576))
    if indices is None:
        indices = rng.integers(0, NUM_TOKENS, (T, K))
    indices = np.broadcast_to(indices, (T, indices.shape[-1])).astype(np.int32, order="C")
    indices[rng.random(indices.shape) < masked] = -1
    q = ref.to_bf16(q)
    options = {"softmax_scale": ref.HEAD_DIM**-0.5}
    return AttentionInputs(q, kv, indices, options)


@functools.lru_cache(1)  # pytest varies num_splits fastest, so the last case is enough
def hard_case(name: str, fmt: str, num_heads: int) -> tuple[AttentionInputs, ref.Attention]:
    """The case `name` with num_heads of its heads, spread evenly from the first to the last, odd
    and even ones; and its reference results."""
    case = (SCALES | COURSES)[name](np.random.default_rng(5))
    heads = np.linspace(0, MOST_HEADS - 1, num_heads).round().astype(int)
    case.q = np.ascontiguousarray(case.q[:, heads])
    if fmt == "bf16":
        bits = ref.upconvert_rows(case.kv.reshape(-1, 656))
        case.kv = bits.view(ref.BF16).reshape(16, 64, 576)
    return case, case.reference()


every_tile = pytest.mark.parametrize("num_heads", [16, 32, 64, MOST_HEADS])
# 1024 columns in one piece; in splits of 512 for Hopper's kernel for large batches; in splits of
# 256 and 128 for its kernel for small batches.
every_split = pytest.mark.parametrize("num_splits", [1, 2, 4, 8])


UNIFORM = (1e-30, 1e-20, 1e-10, 1e-6, 1e-3, 1.0, 30.0, 1e4)
SCALES = {
    **{
        f"{s:g} everywhere": lambda rng, s=s: make(
            rng, keys(rng, s, rope=min(60 * s, 1e3)), q_std=1 / max(60 * s, 1e-24)
        )
        for s in UNIFORM
    },
    "1e4, logits of 1e6": lambda rng: make(rng, keys(rng, 1e4)),
    "1e-30, tiny logits": lambda rng: make(rng, keys(rng, 1e-30)),
    "1e-3 to 1 by row": lambda rng: make(
        rng, keys(rng, powers(rng, -3, 0, NUM_TOKENS, 1)), q_std=0.02
    ),
    "1e-30 to 1e4 by row": lambda rng: make(
        rng, keys(rng, powers(rng, -30, 4, NUM_TOKENS, 1)), q_std=1e-6
    ),
    "1e-30 to 1e4 by tile": lambda rng: make(
        rng, keys(rng, powers(rng, -30, 4, NUM_TOKENS, 4)), q_std=1e-6
    ),
    "2^-12 to 1 by tile, any bytes": lambda rng: make(
        rng, keys(rng, np.exp2(rng.uniform(-12, 0, (NUM_TOKENS, 4))), codes="any"), q_std=0.02
    ),
    "subnormal bytes": lambda rng: make(rng, keys(rng, 1.0, codes="subnormal")),
    "subnormal bytes, 1e-4 to 1": lambda rng: make(
        rng, keys(rng, powers(rng, -4, 0, NUM_TOKENS, 1), codes="subnormal")
    ),
    "448 everywhere": lambda rng: make(rng, keys(rng, 0.01, codes="largest"), q_std=0.1),
    "a zero tile": lambda rng: make(rng, zero_tiles(keys(rng, 0.02), slice(128, 256))),
    "zero tiles only": lambda rng: make(rng, zero_tiles(keys(rng, 0.02), slice(0, 512))),
    "rows 300 times the others": lambda rng: make(
        rng, keys(rng, np.where(np.arange(NUM_TOKENS)[:, None] % 100, 0.01, 3.0)), q_std=0.5
    ),
    "heads of 2^-16 to 2^16": lambda rng: make(
        rng,
        keys(rng, 0.005),
        q=rng.normal(0, 1, (2, MOST_HEADS, 576)) * np.exp2(np.arange(-16, 16, 0.25))[:, None],
    ),
}


def zero_tiles(kv: np.ndarray, part: slice) -> np.ndarray:
    """Makes the values `part` of all cache rows zeros, as the cache write stores tiles of zeros:
    bytes of sign bits alone, with the smallest scale."""
    kv[..., part] &= 0x80
    scales = kv[..., 512:528].reshape(-1, 16).view(np.float32)
    scales[:, part.start // 128 : part.stop // 128] = ref.FLT_MIN
    kv[..., 512:528] = scales.view(np.uint8).reshape(*kv.shape[:2], 16)
    return kv


@every_split
@every_tile
@pytest.mark.parametrize("name", SCALES)
def test_scales(name, num_heads, num_splits):
    case, want = hard_case(name, "fp8", num_heads)
    check(replace(case, num_splits=num_splits), want)


def logits(rng, first_rope, **options) -> AttentionInputs:
    """Keys with the given first RoPE values, and queries that multiply this value by `look`, so
    that the logits follow the given course."""
    rope = np.zeros((NUM_TOKENS, 64))
    rope[:, 0] = first_rope
    q = rng.normal(0, 0.1, (2, MOST_HEADS, 576))
    q[:, :, 512] = options.pop("look", 24.0)
    return make(rng, keys(rng, 0.01, rope=rope), q=q, **options)


ORDER = np.arange(NUM_TOKENS)
ONE_HUGE = np.where(ORDER == NUM_TOKENS - 1, 1000.0, 0.0)
BY_HEAD = np.where(np.arange(MOST_HEADS) % 2, 480.0, -480.0)
COURSES = {
    "rising to 1000": lambda rng: logits(rng, ORDER, indices=ORDER),
    "falling from 1000": lambda rng: logits(rng, ORDER, indices=ORDER[::-1]),
    "rising and falling by head to 1e4": lambda rng: logits(
        rng, ORDER * 0.5, indices=ORDER, look=BY_HEAD
    ),
    "one huge key last": lambda rng: logits(rng, ONE_HUGE, indices=ORDER),
    "one huge key last, half masked": lambda rng: logits(rng, ONE_HUGE, indices=ORDER, masked=0.5),
    "one hugely negative": lambda rng: logits(rng, -ONE_HUGE, indices=ORDER),
    "random, +-1e4": lambda rng: make(rng, keys(rng, 0.1), q_std=100.0),
    "200 masked first, logits of -750": lambda rng: logits(
        rng, 20.0, indices=np.where(ORDER < 200, -1, ORDER), look=-900.0
    ),
    "all but the last masked, logits of -750": lambda rng: logits(
        rng, 20.0, indices=np.where(ORDER < 1000, -1, ORDER), look=-900.0
    ),
    "all masked": lambda rng: make(rng, keys(rng, 0.01), indices=np.full(1024, -1)),
    "a single key": lambda rng: make(rng, keys(rng, 0.01), indices=np.where(ORDER == 877, 5, -1)),
    "one key three times": lambda rng: make(
        rng, keys(rng, 0.01), indices=np.where(ORDER < 3, 9, -1)
    ),
    # Where all logits are tiny, the bounds allow almost no error in lse.
    "a single key, tiny logits": lambda rng: make(
        rng, keys(rng, 0.01), q_std=0.01, indices=np.where(ORDER == 77, 5, -1)
    ),
    **{
        f"{part:g} of the keys, tiny logits": lambda rng, part=part: make(
            rng, keys(rng, 0.01), q_std=0.01, indices=ORDER, masked=1 - part
        )
        for part in (0.5, 0.02)
    },
    # Relative to the first 128 keys, these weights are near the largest number of f16.
    **{
        f"later keys 2^{power} as heavy": lambda rng, power=power: logits(
            rng, np.where(ORDER < 128, 0, power * np.log(2)), indices=ORDER
        )
        for power in (9, 11, 14)
    },
    **{
        f"one later key 2^{power} as heavy": lambda rng, power=power: logits(
            rng, np.where(ORDER == 500, power * np.log(2), 0), indices=ORDER
        )
        for power in (12, 13, 14, 15, 16)
    },
}


@every_tile
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("place", [0, 300, 575])
def test_a_large_product_among_small_ones(place, fmt, num_heads):
    """wgmma cuts each step of a sum off instead of rounding it, and one large product among small
    ones makes that error the largest. The scales are 1, so keys are exact in f16."""
    rng = np.random.default_rng(7)
    case = AttentionCase(64, num_heads, 64, fmt=fmt, pages=1, layout="flat", data="pow2").make()
    parts = [rng.normal(0, 2.0**-6, (64, n, 576)) for n in (num_heads, 1)]
    for part in parts:
        part[..., place] = rng.uniform(1, 2, part.shape[:2])
    case.q, key = (ref.to_bf16(part.astype(np.float32)) for part in parts)
    case.kv[...] = key[:, 0] if fmt == "bf16" else e4m3_rows(key[:, 0])
    case.indices[...] = np.where(np.arange(64), -1, np.arange(64)[:, None])
    case.options["softmax_scale"] = 1.0
    check(case)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_two_of_many_huge_scores_are_near(num_splits):
    """Logits are about 10,000, and two large ones differ by less than keys rounded to f16 would
    move them. That rounding must not decide whose value is the result."""
    case = AttentionCase(39, 65, 128, data="huge", softmax_scale=1.0, pages=43, seed=1427726027)
    layout = {"layout": "token_stride", "q_layout": "negative", "topk_length": True}
    check(replace(case, num_splits=num_splits, **layout).make())


def e4m3_rows(key: np.ndarray) -> np.ndarray:
    """FP8 cache rows [n, 656] of bf16 keys [n, 576], with scales of 1."""
    codes = key[:, :512].astype(ref.E4M3).view(np.uint8)
    scales = np.ones((len(key), 4), np.float32).view(np.uint8)
    return np.concatenate([codes, scales, key[:, 512:].view(np.uint8)], 1)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize(("K", "seed"), [(64, 2033127097), (128, 1002269185), (209, 1299444815)])
def test_light_keys_where_heavy_ones_are_zeros(K, seed, num_splits):
    """One key has nearly all the weight, and an eighth of its values are zeros. There the result
    comes from light keys, whose weights would have few bits in f16."""
    case = AttentionCase(8, 65, K, data="subnormal", softmax_scale=1.0, pages=30, seed=seed)
    check(replace(case, num_splits=num_splits).make())


@every_split
@every_tile
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", COURSES)
def test_courses_of_logits(name, fmt, num_heads, num_splits):
    case, want = hard_case(name, fmt, num_heads)
    check(replace(case, num_splits=num_splits), want)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("num_splits", [1, 6])
def test_excluded_tokens_are_not_read(fmt, num_splits):
    """All cache rows that no list selects are NaN. The lists name some of them in columns past
    topk_length."""
    case = AttentionCase(
        9, 40, 500, fmt=fmt, pages=40, num_splits=num_splits, topk_length=True, sink=True
    ).make()
    assert (case.kv.view(np.uint8) == 0xFF).all(-1).any(), "some token must be poison"
    got = check(case)
    assert not np.isnan(got["lse"]).any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_in_a_selected_token_reaches_its_rows_alone(fmt):
    case = AttentionCase(5, 20, 100, fmt=fmt, pages=4).make()
    clean = guarded_attention(attend, case)
    slot = int(case.indices[3][case.indices[3] >= 0][0]) % ref.num_slots(case.kv)
    touched = np.array([slot in ref.chosen_slots(case.indices, None, case.kv, t) for t in range(5)])
    assert touched[3]
    case.kv.view(np.uint8)[slot // 64, slot % 64] = 0xFF
    outputs = np.zeros((5, 20, 512), ref.BF16), np.zeros((5, 20), np.float32)
    case.run(attend, out=outputs[0], lse=outputs[1])
    assert np.isnan(outputs[1][touched]).all()
    assert_same_bits(outputs[0][~touched], clean["out"][~touched])
    assert_same_bits(outputs[1][~touched], clean["lse"][~touched])
