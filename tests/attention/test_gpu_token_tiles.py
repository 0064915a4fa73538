"""mla_attention over FP8 rows by Hopper's kernel for tiles of several query tokens of a request.
Which calls it takes is in tests/c/test_cuda_token_tiles.c."""

from __future__ import annotations

from functools import partial

import device
import numpy as np
import pytest
import reference as ref
from cases import picker
from dense_cases import TOKEN, Dense, Mask, check_twice
from device import import_quietly
from gpu import capture
from helpers import assert_kernels, assert_same_bits, assert_within_bounds, check_seeds
from library import sparse_mla
from row_formats import E4M3_576

import sparse_mla as package

attend = sparse_mla.mla_attention
torch = import_quietly("torch")
CAUSAL = Mask(causal=True)
FORMATS = ["fp8", E4M3_576, TOKEN]
STEP = 128  # keys
LEAST_TOKENS = 3 * torch.cuda.get_device_properties(0).multi_processor_count // 2

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is Hopper's", allow_module_level=True)


def make(lens: list[int], *, queries=2, mask=CAUSAL, fmt="fp8", **more) -> Dense:
    """Requests without keys make a call of few others large enough for tiles."""
    lens = lens + [0] * (LEAST_TOKENS // queries + 1 - len(lens))
    return Dense([queries] * len(lens), lens, is_uniform=True, mask=mask, fmt=fmt, **more)


def bounds_of(case: Dense) -> dict:
    """Of rows of 576 e4m3 no scale is rounded to f16."""
    return {"f16_scales": False} if case.fmt == E4M3_576 else {}


def check(case: Dense) -> dict:
    return check_twice(case, **bounds_of(case))


SETUP = """
import torch, sparse_mla
def call(count, queries, heads, width=656, turned=False, starts=False, **options):
    kind = torch.uint8 if width == 656 else torch.float8_e4m3fn
    shape = (heads, count * queries, 576) if turned else (count * queries, heads, 576)
    q = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    q = (q.transpose(0, 1) if turned else q).unflatten(0, (count, queries))
    cache = torch.zeros(300, 64, width, dtype=torch.uint8, device="cuda").view(kind)
    table = torch.zeros(count, 64, dtype=torch.int32, device="cuda")
    lens = torch.full((count,), 4096, dtype=torch.int32, device="cuda")
    if starts:
        q = q.flatten(0, 1)
        options["cu_seqlens_q"] = torch.arange(
            0, count * queries + 1, queries, dtype=torch.int32, device="cuda")
    sparse_mla.mla_attention(q, cache, table, lens, softmax_scale=1.0, **options)
"""
TILES = "attention_fp8_tiles_sm90.cu, {} rows per CTA"
DENSE = "attention_fp8_dense_sm90.cu, {} heads per CTA"
CALLS = [
    ("128, 2, 16, causal=True", f"{TILES.format(32)} (tokens 256, splits 1)"),
    ("128, 4, 8", f"{TILES.format(32)} (tokens 512, splits 1)"),
    ("128, 4, 16, window_size=(-1, 3)", f"{TILES.format(64)} (tokens 512, splits 1)"),
    ("128, 2, 32, 576", f"{TILES.format(64).replace('fp8', 'e4m3')} (tokens 256, splits 1)"),
    ("25, 8, 8, causal=True", f"{TILES.format(64)} (tokens 200, splits 5)"),
    ("8, 2, 8, causal=True", f"{DENSE.format(16)} (tokens 16, splits 8)"),
    ("128, 1, 16", f"{DENSE.format(16)} (tokens 128, splits 1)"),
    ("128, 2, 64", f"{DENSE.format(64)} (tokens 256, splits 1)"),
    ("128, 2, 16, num_splits=1", f"{DENSE.format(16)} (tokens 256, splits 1)"),
    ("128, 2, 16, window_size=(100, 0)", f"{DENSE.format(16)} (tokens 256, splits 1)"),
    ("128, 2, 16, attention_chunk=64", f"{DENSE.format(16)} (tokens 256, splits 1)"),
    ("128, 2, 16, turned=True", f"{DENSE.format(16)} (tokens 256, splits 1)"),
    ("128, 2, 16, starts=True", f"{DENSE.format(16)} (tokens 256, splits 1)"),
]


def test_which_calls_it_takes():
    assert_kernels("mla_attention", SETUP, CALLS)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 5, 8, 16, 21, 32])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 8])
def test_heads_and_queries(queries, heads, causal, fmt):
    lens = [2000, 1, 700, 0, 129, 64, 2, 3]
    check(make(lens, queries=queries, heads=heads, mask=Mask(causal=causal), fmt=fmt, sink=True))


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("queries", [2, 4])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_limits_around_the_ends_of_steps(steps, queries, heads):
    """Keys that some token does not see are in the last step, or in both of the last two."""
    lens = [max(STEP * steps + beyond, 0) for beyond in range(-4, 6)]
    check(make(lens, queries=queries, heads=heads))
    check(make(lens, queries=queries, heads=heads, fmt=E4M3_576, mask=Mask(window=(-1, 2))))


@pytest.mark.parametrize("fmt", FORMATS[:2])
@pytest.mark.parametrize("mask", [Mask(), CAUSAL, Mask(window=(-1, 1)), Mask(window=(-1, 5))])
def test_masks(mask, fmt):
    check(make([1500, 64, 3, 0, 129], queries=4, heads=16, mask=mask, fmt=fmt))


@pytest.mark.parametrize("fmt", FORMATS[:2])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("sink", [False, True])
def test_rows_with_one_key(sink, heads, fmt):
    """The first token of some request sees one key, the next ones more: the value is exact."""
    check(make([1, 2, 3, 4, 5, 300], queries=4, heads=heads, fmt=fmt, sink=sink))


@pytest.mark.sanitizer
def test_rows_with_one_key_among_holes():
    """Only two keys have pages, and the first token sees one of them."""
    case = make([700], queries=2, heads=16, block_size=1)
    left = case.slots[1][[100, 699]]
    case.table[0, [x for x in range(700) if x not in (100, 699)]] = -1
    case.slots[:2] = [left[:1], left]
    check(case)


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("block_size", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("layout", ["paged", "mqa", "padded"])
def test_pages(layout, block_size, has_slots):
    case = make([1000, 63, 0, 64, 320, 2], heads=16, block_size=block_size, layout=layout,
                has_slots=has_slots)  # fmt: skip
    check(case)


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 30])
@pytest.mark.parametrize("fmt", FORMATS[:2])
def test_holes(fmt, missing, has_slots):
    """Entries that name no page, junk behind a request's end, and a table that ends too early."""
    case = make([900, 70, 640, 0], queries=4, heads=16, holes=0.3, missing=missing,
                has_slots=has_slots, fmt=fmt)  # fmt: skip
    check(case)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("heads", [3, 16, 20])
def test_pairs_of_queries(heads, e4m3):
    check(make([500, 70], queries=3, heads=heads, fmt=E4M3_576, e4m3=e4m3, is_pair=True))


@pytest.mark.parametrize("count", [1, 31, 66, 100, 128, 131, 133, 160])
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_numbers_of_requests(heads, count):
    """Splits, one item per SM, whole tokens before splits, and several rounds."""
    lens = [int(x) for x in np.random.default_rng(count).integers(0, 60_000 // count, count)]
    case = make(lens, heads=heads, sink=True, block_size=64)
    got = case.run(attend)
    assert_within_bounds(case.reference(), got)
    size = sparse_mla.attention_workspace_size(
        len(got["lse"]), heads, max(lens), device=device.NAME
    )
    for byte in (0, 255):
        other = case.run(attend, workspace=np.full(size, byte, np.uint8))
        for name, x in got.items():
            assert_same_bits(other[name], x, name)


@pytest.mark.sanitizer
@pytest.mark.parametrize("fmt", FORMATS[:2])
@pytest.mark.parametrize("queries", [2, 4])
def test_items_are_cut(queries, fmt):
    """A long request among short ones, whose tile is cut among CTAs."""
    lens = [5000 if i == 7 else 150 for i in range(100)]
    check(make(lens, queries=queries, heads=16, fmt=fmt, sink=True))


@pytest.mark.sanitizer
def test_a_part_goes_to_the_portable_code():
    """Only one part of a tile that is cut has logits that are too large."""
    case = make([5000 if i == 7 else 150 for i in range(100)], heads=16, key_std=0.1, scale=1.0)
    rng = np.random.default_rng(0)
    case.cache.write(rng, case.slots[2 * 7 + 1][4900:], 100.0)
    check(case)


@pytest.mark.parametrize("count", [2, 20, 150])
@pytest.mark.parametrize("queries", [2, 4])
def test_tiles_for_the_portable_code(queries, count):
    """Splits, and whole tokens, of requests whose logits are too large."""
    lens = [int(x) for x in np.random.default_rng(count).integers(0, 400, count)]
    check(make(lens, queries=queries, heads=16, std=600.0, key_std=3.0))


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_keys_that_grow(heads):
    """Logits grow along a request, so references move, in the last step, too."""
    case = make([1500, 300, 129], heads=heads, key_std=1.0, scale=1 / 24)
    rng = np.random.default_rng(heads)
    for part in range(1, 6):
        case.cache.write(rng, case.slots[1][250 * part : 250 * part + 250], 1.0 + 5 * part)
    case.cache.write(rng, case.slots[3][-2:], 30.0)
    check(case)


@pytest.mark.sanitizer
@pytest.mark.parametrize("fmt", FORMATS[:2])
def test_a_heavy_key_that_one_token_does_not_see(fmt):
    """It must not become the reference of that token's rows."""
    for length in (100, 128, 129, 130, 700):
        case = make([length], queries=2, heads=16, fmt=fmt, key_std=1.0, scale=0.05)
        case.cache.write(np.random.default_rng(length), case.slots[1][-1:], 60.0)
        check(case)


def test_rows_of_zeros():
    case = make([700, 64, 5], queries=4, heads=16)
    case.cache.put(case.slots[3][:300], np.zeros((300, 576), np.float32))
    case.q[2] = 0
    case.q[0, 1] = 0
    check(case)


@pytest.mark.parametrize("fmt", FORMATS[:2])
@pytest.mark.parametrize("back", [1, 2, 500])
def test_a_row_of_nan(back, fmt):
    """It makes the results NaN of the tokens that see it, of other tokens of the request at most
    out, and of no other request."""
    case = make([700, 300], queries=2, heads=16, fmt=fmt)
    want = case.reference()
    rows = case.cache.array.view(np.uint8).reshape(-1, 576 if fmt == E4M3_576 else 656)
    rows[case.slots[1][-back], :512] = 0x7F
    got = case.run(attend)
    sees = [back > 1, True]
    for token in range(2):
        is_nan = np.isnan(got["lse"][token])
        assert is_nan.all() if sees[token] else not is_nan.any()
        assert np.isnan(ref.to_f32(got["out"][token])).all() or not sees[token]
    if not sees[0]:
        assert np.allclose(got["lse"][0], want.lse[0], rtol=1e-4)
    left = {name: x[2:4] for name, x in got.items()}
    assert_within_bounds(want.rows(slice(2, 4)), left, **bounds_of(case))


def test_bad_heads():
    """A head with NaN has NaN as its results, and rows of other tokens have their own."""
    case = make([300, 40], queries=2, heads=16)
    want = case.reference()
    case.q.view(np.uint16)[0, 1, 5, 100] = 0x7FC0
    got = case.run(attend)
    assert np.isnan(ref.to_f32(got["out"][1, 5])).all()
    assert np.isnan(got["lse"][1, 5])
    for others in (slice(0, 1), slice(2, 4)):
        left = {name: x[others] for name, x in got.items()}
        assert_within_bounds(want.rows(others), left)


def draw(seed: int) -> Dense:
    rng = np.random.default_rng(seed)
    pick = picker(rng)
    count = pick(1, 2, 5, 20)
    return make(
        [int(rng.integers(0, pick(5, 140, 700))) for _ in range(count)],
        queries=pick(2, 3, 4, 6, 8, 9),
        heads=pick(1, 3, 8, 16, 20, 32),
        fmt=pick(*FORMATS),
        block_size=pick(1, 3, 16, 64),
        mask=Mask(causal=bool(rng.random() < 0.7), window=pick((-1, -1), (-1, 2))),
        has_slots=bool(rng.random() < 0.3),
        is_pair=bool(rng.random() < 0.4),
        sink=bool(rng.random() < 0.4),
        holes=pick(0.0, 0.0, 0.2),
        missing=pick(0, 0, 1),
        std=pick(0.3, 1.0, 3.0),
        seed=seed,
    )


@pytest.mark.parametrize("block", range(6))
def test_random_batches(block):
    check_seeds(range(20 * block, 20 * block + 20), lambda seed: check(draw(seed)))


def test_replays():
    """A captured call gives the bits of the first one."""
    case = make([900, 64, 1], queries=2, heads=16, block_size=64)
    want = case.run(attend)
    arrays = case.arguments()
    q, cache, table, lens = (
        torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).cuda() for x in arrays
    )
    q = q.view(torch.bfloat16).view(-1, 2, 16, 576)
    cache = cache.view(arrays[1].shape)
    table = table.view(torch.int32).view(arrays[2].shape)
    lens = lens.view(torch.int32)
    options = {"softmax_scale": case.softmax_scale, "causal": True}
    call = partial(package.mla_attention, q, cache, table, lens, **options)
    graph, (out, lse) = capture(call)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        bits = out.view(torch.int16).cpu().numpy().view(np.uint16).reshape(-1, 16, 512)
        assert np.array_equal(bits, np.asarray(want["out"]).view(np.uint16).reshape(-1, 16, 512))
        assert np.array_equal(
            lse.cpu().numpy().reshape(-1, 16), np.asarray(want["lse"]).reshape(-1, 16)
        )
