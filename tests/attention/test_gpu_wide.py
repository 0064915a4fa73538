"""Prefills over FP8 rows that widen the rows of their caches to f16 first, on Hopper.

A call does so where its workspace has room for the rows (attention_workspace_size(num_keys=)) and
where it saves time. The batches here are the smallest that do: T tokens of more than 64 heads are
whole waves of CTAs of a GPU with 132 SMs, so no rest of them is split. A cache with a scale outside
of f16's window is read as it is, and so gives the bits of a call without room.
"""

import cases
import device
import gpu
import numpy as np
import pytest
import reference as ref
from cases import AttentionInputs
from helpers import (
    NO_NAN,
    assert_kernels,
    assert_same_results,
    assert_within_bounds,
    guarded_attention,
)
from library import package, sparse_mla
from test_v4_attention import V4Case, V4Inputs

attend = sparse_mla.sparse_attention

T, K = 132, 1024
NUM_SLOTS = 1280
JUDGED = 6  # tokens of a case that the reference computes
EVERY = np.arange(K)


def tokens_of(num_heads: int) -> int:
    """Tokens of whole waves of CTAs, and enough of them to save time."""
    return T if num_heads > 96 else 2 * T


def workspace_bytes(case: AttentionInputs, num_keys: int) -> int:
    extra = case.options.get("extra_indices")
    return sparse_mla.attention_workspace_size(
        *case.shape,
        case.indices.shape[1],
        extra_topk=0 if extra is None else extra.shape[1],
        num_keys=num_keys,
        device=device.NAME,
    )


def count_rows(case: AttentionInputs) -> int:
    if isinstance(case, V4Inputs):
        return sum(keys.num_slots for keys in case.lists)
    return ref.num_slots(case.kv)


def room_of(case: AttentionInputs, byte=0xFF) -> np.ndarray:
    """A workspace for the rows of the case."""
    size = workspace_bytes(case, count_rows(case))
    assert size > workspace_bytes(case, 0), "the shape saves no time"
    return np.full(size, byte, np.uint8)


def make(rng, num_heads=128, *, rows=None, indices=None, q=None, **options) -> AttentionInputs:
    """Rows are [n, 656]; without them, they are random. Indices are random slots, or a list that
    every token has."""
    if rows is None:
        rows = cases.make_rows(rng, NUM_SLOTS, "fp8")
    num_tokens = tokens_of(num_heads)
    if indices is None:
        indices = rng.integers(0, len(rows), (num_tokens, K))
    indices = np.broadcast_to(indices, (num_tokens, K)).astype(np.int32, order="C")
    if q is None:
        q = rng.normal(0, 1, (num_tokens, num_heads, 576))
    options.setdefault("softmax_scale", ref.HEAD_DIM**-0.5)
    return AttentionInputs(ref.to_bf16(q), rows.reshape(-1, 64, 656), indices, options)


def run(case: AttentionInputs, **more) -> dict:
    return guarded_attention(attend, case, **({"workspace": room_of(case)} | more))


def judged(case: AttentionInputs) -> np.ndarray:
    return np.unique(np.linspace(0, case.shape[0] - 1, JUDGED).astype(int))


def check(case: AttentionInputs, poison=None) -> dict:
    """Asserts that results are within the bounds, with and without max_logits, and have the same
    bits in another run, whatever the workspace held."""
    some = judged(case)
    want = case.rows(some).reference()
    got = run(case, poison=poison)
    assert_within_bounds(want, {name: x[some] for name, x in got.items()})
    assert_same_results(run(case, poison=poison, workspace=room_of(case, 0)), got)
    without = run(case, poison=poison, max_logits=False)
    assert_within_bounds(want, {name: x[some] for name, x in without.items()})
    return got


def scales_of(rows: np.ndarray) -> np.ndarray:
    return rows[:, 512:528].view(np.float32)


def set_rope(rows: np.ndarray, course) -> None:
    """Gives the first RoPE value of each row."""
    rows[:, 528:].view(np.uint16)[: len(course), 0] = ref.bf16_encode(np.float32(course))


# --- the choice ---

SETUP = """
import torch
import sparse_mla

def call(tokens, heads, topk, pages, room):
    q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16, device="cuda")
    kv = torch.zeros(pages, 64, 656, dtype=torch.uint8, device="cuda")
    indices = torch.zeros(tokens, topk, dtype=torch.int32, device="cuda")
    size = sparse_mla.attention_workspace_size(
        tokens, heads, topk, num_keys=64 * pages, device="cuda")
    workspace = torch.empty(size + room, dtype=torch.uint8, device="cuda")
    sparse_mla.sparse_attention(q, kv, indices, softmax_scale=1.0, workspace=workspace)
"""


def test_which_kernel_runs():
    """Rows are widened for many tokens of more than 32 heads over few keys, with room for them."""
    split = "attention_fp8_sm90.cu, 64 heads per CTA (tokens 132, splits 1)"
    wide = "attention_wide_sm90.cu, 64 heads per CTA (tokens 132, splits 1)"
    calls = [
        ("132, 128, 1024, 20, 0", wide),
        ("132, 128, 1024, 20, -1", split),
        ("132, 128, 1024, 20, 4096", wide),
        ("132, 128, 1024, 1000, 0", split),
    ]
    assert_kernels("sparse_attention", SETUP, calls)


def test_too_little_room():
    """A byte less than the rows need reads the cache, as an omitted workspace does. Less than that
    needs is refused."""
    case = make(np.random.default_rng(0))
    direct = guarded_attention(attend, case)
    assert_same_results(run(case, workspace=room_of(case)[:-1].copy()), direct)
    short = case.rows(slice(0, 1))
    with pytest.raises(ValueError, match=r"`workspace` must have at least [0-9]+ bytes, got 16"):
        guarded_attention(attend, short, workspace=np.zeros(16, np.uint8))


# --- values ---


@pytest.mark.parametrize("num_heads", [33, 64, 100, 128])
@pytest.mark.parametrize(
    "data", ["normal", "pow2", "outlier", "heavy", "monotone", "tiles", "subnormal", "wide"]
)
def test_values(data, num_heads):
    rng = np.random.default_rng(num_heads)
    rows = cases.make_rows(rng, NUM_SLOTS, "fp8", data)
    check(make(rng, num_heads, rows=rows, attn_sink=cases.make_sink(rng, num_heads)))


@pytest.mark.parametrize("exponent", [-30, -12, 0, 9])
def test_scales_of_any_size(exponent):
    """All scales times a power of two, and a query that undoes it."""
    rng = np.random.default_rng(exponent + 99)
    rows = cases.make_rows(rng, NUM_SLOTS, "fp8", "pow2")
    scales = scales_of(rows)
    scales *= np.float32(2.0 ** (exponent - np.floor(np.log2(scales.max()))))
    rows[:, 528:] = 0
    case = make(rng, rows=rows, softmax_scale=float(ref.HEAD_DIM**-0.5 * 2.0 ** (-exponent - 9)))
    check(case)


@pytest.mark.parametrize("exponent", [-100, -70, 60, 110])
def test_queries_of_any_size(exponent):
    """Heads whose queries differ by up to 2^200: each has a power of two of its own."""
    rng = np.random.default_rng(exponent + 999)
    q = rng.normal(0, 1, (T, 128, 576))
    q[:, ::2] *= 2.0**exponent
    check(make(rng, q=q, softmax_scale=float(2.0 ** min(-exponent, 0) / 30)))


def test_rows_of_zeros():
    """Rows of zeros have the smallest scale, in some rows, or in all."""
    rng = np.random.default_rng(1)
    rows = cases.make_rows(rng, NUM_SLOTS, "fp8")
    rows[::3, :512] = 0
    scales_of(rows)[::3] = np.finfo(np.float32).tiny
    check(make(rng, rows=rows))
    rows[:, :512] = 0
    scales_of(rows)[:] = np.finfo(np.float32).tiny
    check(make(rng, rows=rows))
    check(make(rng, rows=np.zeros_like(rows)))


def test_unequal_rows():
    """Light keys count where heavy ones have zeros among their values."""
    for factor in (1e-5, 1e2):
        rng = np.random.default_rng(3)
        rows = cases.make_rows(rng, NUM_SLOTS, "fp8", "outlier")
        scales_of(rows)[rng.random(NUM_SLOTS) < 0.02] *= np.float32(factor)
        check(make(rng, rows=rows))


@pytest.mark.parametrize("part", [slice(0, 4), slice(512, 516), slice(-4, None), slice(None)])
def test_nan_in_a_row(part):
    """A NaN, in a value, a scale or a RoPE value, reaches the tokens that have its key, and no
    other."""
    rng = np.random.default_rng(4)
    case = make(rng, indices=rng.integers(1, NUM_SLOTS, (T, K)))
    rows = case.kv.reshape(-1, 656)
    rows[0] = rows[1]  # it does not have the largest scale alone
    want = run(case)
    rows[0, part] = 0xFF
    assert_same_results(run(case), want)
    case.indices[7, 900] = 0
    got = run(case, poison=NO_NAN)
    assert np.isnan(ref.to_f32(got["out"][7])).all()
    assert np.isnan(got["lse"][7]).all()
    rest = np.arange(T) != 7
    assert_same_results({n: x[rest] for n, x in got.items()}, {n: x[rest] for n, x in want.items()})


def test_queries_that_are_not_finite():
    """NaN and infinity, in the values and in the RoPE part, make their own head NaN."""
    case = make(np.random.default_rng(5))
    want = run(case)
    heads = [(0, 3, np.nan), (5, 520, np.nan), (60, 7, np.inf), (99, 575, -np.inf)]
    q = ref.to_f32(case.q)
    for head, dim, value in heads:
        q[2, head, dim] = value
    case.q = ref.to_bf16(q)
    got = run(case, poison=NO_NAN)
    odd = np.zeros(case.shape, bool)
    odd[2, [head for head, _, _ in heads]] = True
    assert np.isnan(ref.to_f32(got["out"][odd])).all()
    assert np.isnan(got["lse"][odd]).all()
    assert_same_results({n: x[~odd] for n, x in got.items()}, {n: x[~odd] for n, x in want.items()})


# --- rows of V4 ---


@pytest.mark.parametrize("num_heads", [64, 128])
@pytest.mark.parametrize("data", ["normal", "mixed", "zeros", "spread", "rope"])
def test_v4_rows(data, num_heads):
    """Two caches, whose rows lie one behind the other when they are wide. Rows that no list names
    are random bytes, so they are left away here."""
    case = V4Case(
        T=tokens_of(num_heads), H=num_heads, K=128, extra="fp8_v4", extra_K=K, data=data, sink=True,
        lengths=True, extra_block_size=16,
    ).make()  # fmt: skip
    for keys in case.lists:
        assert len(np.unique(keys.indices[keys.indices >= 0])) >= keys.num_slots
    check(case)


@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize("layout", ["padded", "bytes"])
def test_v4_pages(block_size, layout):
    check(V4Case(T=T, H=128, K=K, block_size=block_size, layout=layout).make())


def test_v4_values_outside_the_window():
    """A large RoPE value, or a large scale."""
    case = V4Case(T=T, H=128, K=K, extra="fp8_v4", extra_K=64).make()
    pages = case.lists[1].pages
    bits = ref.bf16_encode(np.full((1, 512), 1e6, np.float32))
    pages.put(np.array([3]), *pages.format.encode(bits, 1.0))
    assert_same_results(run(case), guarded_attention(attend, case))
    check(case)


# --- what the device refuses ---


@pytest.mark.parametrize("scale", [2.0**10, 1e4, 1e30, np.inf, -(2.0**10)])
def test_scales_outside_the_window(scale):
    """One scale in a row that no list names is enough: the results are those of a call without
    room."""
    rng = np.random.default_rng(6)
    case = make(rng, indices=rng.integers(1, NUM_SLOTS, (T, K)))
    scales_of(case.kv.reshape(-1, 656))[0, 2] = scale
    assert_same_results(run(case), guarded_attention(attend, case))
    check(case)


def test_scales_below_the_window():
    rng = np.random.default_rng(7)
    case = make(rng)
    scales_of(case.kv.reshape(-1, 656))[:] = 2.0**-90
    assert_same_results(run(case), guarded_attention(attend, case))


@pytest.mark.parametrize("sign", [-1, 1])
def test_large_logits(sign):
    """A head with logits of 2^11 and more is computed again, whenever its reference gets there."""
    for first in (0, 700):
        rng = np.random.default_rng(8)
        rows = cases.make_rows(rng, NUM_SLOTS, "fp8")
        course = np.where(np.arange(NUM_SLOTS) < first, 0, 40)
        set_rope(rows, sign * course)
        q = rng.normal(0, 1, (T, 128, 576))
        q[::5, ::7, 512] = 1024
        check(make(rng, rows=rows, q=q, indices=EVERY))


# --- references ---

COURSES = {
    "flat": np.zeros(K),
    "rising": EVERY / 16,
    "falling": EVERY[::-1] / 16,
    "a step in every block": EVERY // 64 * 12.0,
    "every second block": EVERY // 64 % 2 * 30.0,
    "one late heavy key": np.where(EVERY == K - 1, 60.0, 0.0),
    "heavier by 2^15": np.where(EVERY < 64, 0.0, 15.0),
    "heavier by 2^16": np.where(EVERY < 64, 0.0, 16.5),
    "heavier by 2^200": np.where(EVERY < 64, 0.0, 200.0),
    "lighter by 2^-60": np.where(EVERY < 64, 60.0, 0.0),
}


@pytest.mark.parametrize("name", COURSES)
@pytest.mark.parametrize("num_heads", [64, 128])
def test_references(name, num_heads):
    """Logits along the list, as powers of two; half of the heads see them the other way round."""
    rng = np.random.default_rng(9)
    rows = cases.make_rows(rng, NUM_SLOTS, "fp8")
    set_rope(rows, COURSES[name] * np.log(2))
    q = rng.normal(0, 0.1, (tokens_of(num_heads), num_heads, 576))
    q[..., 512] = np.where(np.arange(num_heads) % 2, 24.0, -24.0)
    check(make(rng, num_heads, rows=rows, q=q, indices=EVERY, softmax_scale=1 / 24))


# --- lists ---


@pytest.mark.parametrize("keys", cases.KEYS)
def test_holes(keys):
    rng = np.random.default_rng(10)
    check(make(rng, indices=cases.make_indices_with_holes(rng, T, K, NUM_SLOTS, keys)))


def test_lengths():
    rng = np.random.default_rng(11)
    check(make(rng, topk_length=cases.make_topk_length(rng, T, K)))
    check(make(rng, topk_length=rng.integers(0, 140, T).astype(np.int32)))


def test_one_key():
    """A token with one key has that key's value, within half a step of bf16 and 2^-20 of it."""
    rng = np.random.default_rng(12)
    has_one = np.arange(T) % 3 == 0
    case = make(rng, topk_length=np.where(has_one, 1, K).astype(np.int32))
    got = check(case)
    for token in np.flatnonzero(has_one):
        value = ref.decode_rows(case.kv, case.indices[token, :1])[0, :512]
        error = np.abs(ref.to_f32(got["out"][token]) - value)
        assert (error <= np.abs(value) * (2.0**-8 + 2.0**-20)).all()


@pytest.mark.parametrize("layout", ["padded", "token_stride", "interleaved", "negative", "zero"])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_layouts(layout, block_size):
    rng = np.random.default_rng(13)
    case = make(rng)
    rows = case.kv.reshape(-1, 656)
    case.kv = cases.lay_out(rows, block_size, layout)
    check(case)


@pytest.mark.parametrize("layout", ["pair", "head_major", "negative", "odd_stride"])
def test_queries_anywhere(layout):
    """Rows of q that are not aligned read the cache."""
    case = make(np.random.default_rng(14))
    case.q = cases.lay_out_q(case.q, layout)
    check(case)


def test_more_tokens():
    """The tokens behind whole waves are a run of their own, over the cache."""
    rng = np.random.default_rng(15)
    for num_tokens, num_heads in ((301, 128), (700, 40)):
        case = AttentionInputs(
            cases.random_bf16(rng, num_tokens, num_heads, 576),
            cases.make_rows(rng, NUM_SLOTS, "fp8").reshape(-1, 64, 656),
            rng.integers(-1, NUM_SLOTS, (num_tokens, K)).astype(np.int32),
            {"softmax_scale": ref.HEAD_DIM**-0.5},
        )
        check(case)


@pytest.mark.parametrize("shard", range(5))
def test_random_calls(shard):
    for seed in range(6 * shard, 6 * shard + 6):
        rng = np.random.default_rng(1000 + seed)
        data = str(rng.choice(["normal", "outlier", "heavy", "tiles", "pow2"]))
        rows = cases.make_rows(rng, NUM_SLOTS, "fp8", data)
        kind = rng.choice(["random", "ordered"])
        case = make(
            rng,
            int(rng.integers(33, 129)),
            rows=rows,
            q=None,
            softmax_scale=float(rng.choice([0.01, 0.04, 0.2])),
        )
        case.indices = cases.make_indices(rng, case.shape[0], K, NUM_SLOTS, kind)
        if rng.random() < 0.5:
            case.options["topk_length"] = cases.make_topk_length(rng, case.shape[0], K)
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# --- replays ---


def test_graphs():
    """Replays with other rows and lists, some refused, give the bits of eager calls."""
    rng = np.random.default_rng(16)
    first = make(rng)
    q, kv, indices = (gpu.put(x) for x in (first.q, first.kv, first.indices))
    workspace = gpu.put(room_of(first))
    attend_there = package.sparse_attention
    call = lambda: attend_there(q, kv, indices, workspace=workspace, **first.options)  # noqa: E731
    graph, results = gpu.capture(call)
    for n in range(6):
        other = make(rng)
        if n % 2:
            scales_of(other.kv.reshape(-1, 656))[n, 0] = 1e4
        kv.copy_(gpu.put(other.kv))
        indices.copy_(gpu.put(other.indices))
        gpu.torch.cuda.synchronize()
        graph.replay()
        gpu.assert_same_values(gpu.values(results), gpu.values(call()))
