"""mla_attention over rows of 576 e4m3 with one scale per cache, by Hopper's kernel for FP8 rows.
The query is bf16 or e4m3. tests/c/test_cuda_attention.c has the plans of such calls."""

from __future__ import annotations

from functools import partial

import device
import numpy as np
import pytest
import reference as ref
from cases import picker
from dense_cases import E4M3, Dense, Mask, check_twice
from device import import_quietly
from gpu import capture
from helpers import assert_kernels, assert_same_bits, assert_within_bounds, check_seeds
from library import sparse_mla
from row_formats import E4M3_576

import sparse_mla as package

attend = sparse_mla.mla_attention
torch = import_quietly("torch")
CAUSAL = Mask(causal=True)
CODE_STD = 32.0  # keys have 14 times this at most, in units of kv_scale

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernel is Hopper's", allow_module_level=True)


def make(lens: list[int], *, queries: int | list[int] = 1, kv_scale=0.37, mask=CAUSAL, spread=1.0,
         **more) -> Dense:  # fmt: skip
    """Logits have the standard deviation `spread`, whatever kv_scale is."""
    key_std = more.setdefault("key_std", CODE_STD * kv_scale)
    q_scale = more.get("q_scale", 0.5) if more.get("e4m3") else 1.0
    std = more.get("std", 1.0)
    more.setdefault("scale", spread / (24 * key_std * q_scale * std))
    query_lens = queries if isinstance(queries, list) else [queries] * len(lens)
    return Dense(query_lens, lens, fmt=E4M3_576, kv_scale=kv_scale, mask=mask, **more)


def check(case: Dense) -> dict:
    """No scale is rounded to f16, so the bounds are those of bf16 rows."""
    return check_twice(case, f16_scales=False)


def same_results(got: dict, want: dict) -> None:
    assert_same_bits(got["out"], want["out"], "out")
    assert_same_bits(got["lse"], want["lse"], "lse")


def with_options(**options):
    """mla_attention with some options of a case replaced."""
    return lambda *args, **given: attend(*args, **(given | options))


def codes_of(case: Dense) -> np.ndarray:
    """The rows of the case's cache, [slots, 576] bytes."""
    return case.cache.array.view(np.uint8).reshape(-1, 576)


SETUP = """
import torch, sparse_mla
def call(count, heads, length, dtype="bfloat16", offset=0, **options):
    e4m3 = torch.float8_e4m3fn
    q = torch.zeros(count, 1, heads, 592, device="cuda").to(getattr(torch, dtype))
    cache = torch.zeros(300, 64, 576, device="cuda").to(e4m3)
    table = torch.zeros(count, -(-length // 64), dtype=torch.int32, device="cuda")
    lens = torch.full((count,), length, dtype=torch.int32, device="cuda")
    q = q[..., offset : offset + 576]
    if dtype != "bfloat16":
        options["q_scale"] = torch.full((1,), 0.5, device="cuda")
    options["kv_scale"] = torch.full((1,), 0.25, device="cuda")
    sparse_mla.mla_attention(q, cache, table, lens, softmax_scale=1.0, **options)
"""
HOPPER = "attention_fp8_e4m3_sm90.cu, {} heads per CTA"
PORTABLE = "attention_sm80.cu, {} heads per CTA"
CODED = "'float8_e4m3fn'"
CALLS = [
    ("128, 16, 4096", f"{HOPPER.format(16)} (tokens 128, splits 1)"),
    (f"128, 64, 4096, {CODED}", f"{HOPPER.format(64)} (tokens 128, splits 1)"),
    (f"128, 128, 4096, {CODED}", f"{HOPPER.format(64)} (tokens 128, splits 1)"),
    ("128, 20, 100, num_splits=1, causal=True", f"{HOPPER.format(32)} (tokens 128, splits 1)"),
    (f"8, 16, 4096, {CODED}, window_size=(70, 0)", f"{HOPPER.format(16)} (tokens 8, splits 16)"),
    ("1, 64, 4096, num_splits=3, attention_chunk=64",
     f"{HOPPER.format(64)} (tokens 1, splits 3)"),
    ("128, 64, 4096, num_splits=1, softcap=30.0",
     f"{PORTABLE.format(64)} (tokens 128, splits 1; softcap or scale)"),
    (f"128, 16, 4096, {CODED}, offset=8, num_splits=1",
     f"{PORTABLE.format(16)} (tokens 128, splits 1; rows that are not aligned to 16 bytes)"),
]  # fmt: skip


def test_which_calls_it_takes():
    assert_kernels("mla_attention", SETUP, CALLS)


def test_it_is_selected():
    rows = [row for row in sparse_mla.kernels() if "fp8_e4m3_sm90" in row["name"]]
    assert [row["heads"] for row in rows] == ["33...128", "17...128", "1...128"]
    assert {row["kv_format"] for row in rows} == {"fp8_e4m3 with RoPE, dense"}
    assert all(row["selected"] == row["available"] for row in rows)


# --- queries ---


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("heads", [1, 5, 16, 17, 33, 64, 100, 128])
@pytest.mark.parametrize("queries", [1, 2, 3, 4])
def test_heads_and_queries(heads, queries, e4m3):
    lens = [2000, 1, 700, 0, 129, 64]
    check(make(lens, queries=queries, heads=heads, e4m3=e4m3, sink=True, is_uniform=True))


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("heads", [3, 16, 20, 64, 128])
def test_pairs_of_queries(heads, e4m3):
    """The two parts of a query in arrays of their own, and heads that lie apart."""
    case = make([500, 70], queries=2, heads=heads, e4m3=e4m3, is_pair=True)
    got = check(case)
    q = np.concatenate(case.q, -1)
    wide = np.zeros((*q.shape[:2], 640), q.dtype)
    wide[..., :576] = q
    case.q, case.is_pair = wide[..., :576], False
    same_results(case.run(attend), got)


def test_every_code_of_a_query_and_of_a_key():
    """All 254 e4m3 numbers in both, each at every place of a lane, times ones."""
    numbers = np.setdiff1d(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    for shift in range(0, 254, 23):
        case = make([200], heads=16, e4m3=True, key_std=1.0, kv_scale=1.0, scale=1e-6)
        rows = codes_of(case)
        case.q.view(np.uint8)[...] = np.resize(np.roll(numbers, shift), case.q.shape)
        rows[case.slots[0]] = 0x38
        check(case)
        case.q.view(np.uint8)[...] = 0x38
        rows[case.slots[0]] = np.resize(np.roll(numbers, shift), (200, 576))
        check(case)


def test_every_dimension_has_its_own_query():
    """A key that is one at one dimension alone has the query's value there as its logit."""
    for e4m3 in (False, True):
        for first in range(0, 576, 64):
            case = make([64], heads=17, e4m3=e4m3, key_std=1.0, kv_scale=1.0, scale=1.0)
            rows = codes_of(case)
            rows[case.slots[0]] = 0
            rows[case.slots[0], np.arange(first, first + 64)] = 0x38
            check(case)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("heads", [16, 64])
def test_bad_heads(heads, e4m3):
    """A head with NaN has NaN as its results; a head of zeros, and one far smaller than the others,
    have their own."""
    case = make([300, 1, 0, 40], heads=heads, e4m3=e4m3)
    q = case.q.view(np.uint8 if e4m3 else np.uint16)
    q[:, 2] = 0
    q[:, 3, 100:] = 0
    q[:, 3, :100] = 1  # the smallest number of either type
    want = case.reference()
    assert_within_bounds(want, case.run(attend))
    q[:, 5, 570] = 0x7F if e4m3 else 0x7FC0
    got = case.run(attend)
    others = np.arange(heads) != 5
    assert np.isnan(ref.to_f32(got["out"][[0, 1, 3], 5])).all()
    assert np.isnan(got["lse"][[0, 1, 3], 5]).all()
    left = ref.Attention(**{name: x[:, others] for name, x in vars(want).items()})
    assert_within_bounds(left, {name: x[:, others] for name, x in got.items()})


# --- which keys ---


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049])
def test_lengths(length, heads):
    check(make([length], heads=heads))
    check(make([length, 4000 - length], heads=heads, queries=2, seed=1, e4m3=True))


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("block_size", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("layout", ["paged", "mqa", "padded"])
def test_pages(block_size, layout, has_slots):
    lens = [1000, 63, 0, 64, 320, 2]
    check(make(lens, heads=16, block_size=block_size, layout=layout, has_slots=has_slots))


@pytest.mark.parametrize("row_bytes", [576, 592, 640])
@pytest.mark.parametrize("page_rows", [16, 17])
def test_spaced_rows(row_bytes, page_rows):
    """Bytes between pages and between rows are NaN."""
    case = make([300, 70], queries=2, heads=64)
    dense = case.cache.array
    got = case.run(attend)
    wide = np.full((dense.shape[0], page_rows, row_bytes), 0xFF, np.uint8)
    wide[:, :16, :576] = dense.view(np.uint8)
    case.cache.array = wide.view(dense.dtype)[:, :16, :576]
    same_results(case.run(attend), got)


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 30])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_holes(missing, has_slots, num_splits):
    """Entries that name no page, junk behind a request's end, and a table that ends too early. All
    keys that no token sees are NaN."""
    check(make([900, 70, 640, 0], heads=20, holes=0.3, missing=missing, has_slots=has_slots,
               num_splits=num_splits))  # fmt: skip


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        Mask(),
        Mask(window=(50, 3)),
        Mask(causal=True, window=(5, 0)),
        Mask(causal=True, window=(130, 0)),
        Mask(window=(0, 0)),
        Mask(chunk=48),
        Mask(causal=True, cp=(1, 2, 4)),
    ],
    ids=str,
)
def test_masks(mask, e4m3):
    check(make([1500, 64, 3, 0, 129], queries=[3, 1, 0, 2, 4], heads=16, mask=mask, e4m3=e4m3))
    check(make([150, 70, 9, 331], queries=[3, 1, 0, 2], heads=64, mask=mask, e4m3=e4m3, sink=True))


@pytest.mark.parametrize("heads", [1, 64])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("kv_scale", [0.37, 3e4, 1e-20])
def test_one_key(heads, num_splits, kv_scale):
    more = {"heads": heads, "num_splits": num_splits, "kv_scale": kv_scale}
    check(make([1, 1], sink=True, **more))
    check(make([300], queries=4, mask=Mask(window=(0, 0)), **more))


# --- scales ---


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("kv_scale", [2.0**-6, 1.0, 0.37, 3e4, 1e-20, 2.0**-79, 2.0**10])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_scales(kv_scale, e4m3, num_splits):
    """As numbers and as arrays on the device, whose bits are the same."""
    for heads in (16, 64):
        case = make([700, 1, 65, 0], queries=2, heads=heads, e4m3=e4m3, num_splits=num_splits,
                    kv_scale=kv_scale)  # fmt: skip
        got = check(case)
        arrays = {"kv_scale": np.full(1, kv_scale, np.float32)}
        if e4m3:
            arrays["q_scale"] = np.full(1, case.q_scale, np.float32)
        same_results(case.run(with_options(**arrays)), got)


@pytest.mark.parametrize("kv_scale", [2.0**-82, 1e-30, 2.0**11, 2.0**82, 1e30])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_scales_that_go_to_the_portable_code(kv_scale, num_splits):
    for heads in (5, 64):
        check(make([700, 1, 65, 0], queries=2, heads=heads, num_splits=num_splits,
                   kv_scale=kv_scale))  # fmt: skip


@pytest.mark.parametrize("value", [0.0, -0.37, np.inf, -np.inf, np.nan, 1e-40])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_scales_that_are_no_scales(value, num_splits):
    """No call may write what the portable kernel would not. That kernel takes calls with a softcap,
    and a cap of 2^100 changes no logit."""
    case = make([700, 1, 65, 0], heads=64, num_splits=num_splits)
    scale = np.full(1, value, np.float32)
    got = case.run(with_options(kv_scale=scale))
    want = case.run(with_options(kv_scale=scale, softcap=2.0**100))
    for name, tolerance in (("out", 2.0**-6), ("lse", 1e-4)):
        a, b = ref.to_f32(np.asarray(got[name])), ref.to_f32(np.asarray(want[name]))
        assert np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True), name


@pytest.mark.parametrize("q_scale", [1e-30, 0.3, 1e20])
def test_scales_of_queries(q_scale):
    check(make([300, 2], heads=20, e4m3=True, q_scale=q_scale))


@pytest.mark.parametrize("std", [1e-20, 0.01, 30.0])
def test_queries_of_any_size(std):
    check(make([800, 65], heads=16, std=std))


@pytest.mark.parametrize("key_std", [1e-3, 0.02, 1.0, 300.0])
def test_codes_of_any_size(key_std):
    """Zeros, subnormal codes, and many that saturate."""
    check(make([800, 65], heads=16, kv_scale=1.0, key_std=key_std, num_splits=3))
    check(make([800, 65], heads=64, kv_scale=1.0, key_std=key_std))


# --- logits ---


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("spread", [10.0, 100.0, 1500.0])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_large_logits(spread, heads, num_splits):
    """The largest go to the portable code."""
    check(make([900, 64, 300], heads=heads, spread=spread, num_splits=num_splits, sink=True))


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_a_heavy_late_key(heads, num_splits):
    case = make([3000, 100, 1500], heads=heads, num_splits=num_splits, key_std=1.0, scale=0.05)
    rng = np.random.default_rng(heads)
    for slots in case.slots:
        case.cache.write(rng, slots[-1:], 40.0)
    check(case)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_keys_that_grow(heads, num_splits):
    """Logits grow along a request, so references move."""
    case = make([1500, 300], heads=heads, num_splits=num_splits, key_std=1.0, scale=1 / 24)
    rng = np.random.default_rng(heads)
    for part in range(1, 6):
        case.cache.write(rng, case.slots[0][250 * part : 250 * part + 250], 1.0 + 5 * part)
    check(case)


@pytest.mark.parametrize("position", [0, 130, 899])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_row_of_nan(position, num_splits):
    """It makes the results of its own request NaN, and of no other."""
    case = make([900, 300], heads=64, num_splits=num_splits)
    want = case.reference()
    codes_of(case)[case.slots[0][position]] = 0x7F
    got = case.run(attend)
    assert np.isnan(ref.to_f32(got["out"][0])).all()
    assert np.isnan(got["lse"][0]).all()
    assert_within_bounds(want.rows(slice(1, 2)), {name: x[1:] for name, x in got.items()})


# --- plans ---

# Name -> the lengths of 120 requests.
RAGGED = {
    "any": [int(x) for x in np.random.default_rng(0).integers(0, 1500, 120)],
    "one is long": [3000 if i == 60 else 200 for i in range(120)],
    "half are empty": [1700 if i % 2 else 0 for i in range(120)],
}


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("kv_scale", [0.37, 100.0, 3e4])
def test_items_are_cut(name, heads, kv_scale):
    """As many requests as a GPU has SMs: long ones are cut among CTAs with short ones. What an
    earlier call has left in the workspace does not matter."""
    case = make(RAGGED[name], heads=heads, kv_scale=kv_scale, sink=True, padding=2)
    want = check(case)
    size = sparse_mla.attention_workspace_size(122, heads, 4096, device=device.NAME)
    for byte in (0, 255):
        same_results(case.run(attend, workspace=np.full(size, byte, np.uint8)), want)


def test_a_part_goes_to_the_portable_code():
    """Only one part of a request that is cut has logits that are too large."""
    case = make([4000 if i == 7 else 150 for i in range(100)], heads=64, key_std=0.1, scale=1.0)
    rng = np.random.default_rng(0)
    case.cache.write(rng, case.slots[7][3900:], 100.0)
    check(case)


def test_parts_of_one_key():
    """A long request of which one key has a page, among short ones."""
    case = make([4000 if i == 7 else 150 for i in range(100)], heads=64, block_size=1)
    left = case.slots[7][3001]
    case.table[7, np.arange(4000) != 3001] = -1
    codes_of(case)[np.setdiff1d(case.slots[7], left)] = 0xFF
    case.slots[7] = case.slots[7][3001:3002]
    check(case)


@pytest.mark.parametrize(("count", "heads"), [(135, 16), (160, 16), (145, 128), (700, 16)])
def test_items_are_ordered(count, heads):
    """More items than SMs: in an order by length, in two runs, or in many rounds."""
    lens = [int(x) for x in np.random.default_rng(count).integers(0, 90_000 // count, count)]
    case = make(lens, queries=[i % 3 for i in range(count)], heads=heads, e4m3=heads == 128)
    want = case.reference()
    for num_splits in (0, 1):
        case.num_splits = num_splits
        assert_within_bounds(want, case.run(attend))


@pytest.mark.parametrize("heads", [16, 40])
def test_a_request_s_bits(heads):
    """With one split they do not depend on other requests, however wide these make the table."""
    alone = make([500], queries=[2], heads=heads, num_splits=1, scale=0.003)
    want = alone.run(attend)
    for count in (1, 40, 300):
        rng = np.random.default_rng(5)
        queries = [int(x) for x in rng.integers(0, 4, count)]
        lens = [*(int(x) for x in rng.integers(0, 300, count - 1)), 3000, 500]
        case = make(lens, queries=[*queries, 2], heads=heads, num_splits=1, scale=0.003)
        codes_of(case)[case.slots[-1]] = codes_of(alone)[alone.slots[-1]]
        case.q[-2:] = alone.q
        got = case.run(attend)
        same_results({name: x[-2:] for name, x in got.items()}, want)


# --- at random ---


def draw(seed: int) -> Dense:
    rng = np.random.default_rng(seed)
    pick = picker(rng)
    count = int(rng.integers(1, 6))
    return make(
        [int(rng.integers(0, 701)) for _ in range(count)],
        queries=[int(rng.integers(0, 10)) for _ in range(count)],
        heads=pick(1, 5, 16, 17, 64, 128),
        block_size=pick(1, 3, 16, 64),
        mask=Mask(
            causal=bool(rng.random() < 0.6),
            window=pick((-1, -1), (-1, -1), (int(rng.integers(0, 90)), -1), (3, 5), (0, 0)),
            chunk=pick(0, 0, 0, 48),
        ),
        has_slots=bool(rng.random() < 0.3),
        is_pair=bool(rng.random() < 0.4),
        sink=bool(rng.random() < 0.3),
        e4m3=bool(rng.random() < 0.5),
        num_splits=pick(0, 0, 1, 3, 64),
        padding=pick(0, 0, 2),
        holes=pick(0.0, 0.0, 0.2),
        missing=pick(0, 0, 1, 3),
        spread=pick(0.1, 1.0, 1.0, 10.0),
        kv_scale=float(np.exp(rng.normal(0, 8))),
        seed=seed,
    )


@pytest.mark.parametrize("block", range(6))
def test_random_batches(block):
    check_seeds(range(30 * block, 30 * block + 30), lambda seed: check(draw(seed)))


def test_replays_with_other_scales():
    """A captured call reads its scales when it runs."""
    case = make([900, 64, 1], heads=64, e4m3=True, block_size=64)
    q, cache, table, lens = (
        torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).cuda() for x in case.arguments()
    )
    q = q.view(torch.float8_e4m3fn).view(case.q.shape)
    table = table.view(torch.int32).view(case.table.shape)
    lens = lens.view(torch.int32)
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device="cuda")
    scales = torch.tensor([case.q_scale, case.kv_scale], device="cuda")
    options = {"softmax_scale": case.softmax_scale, "causal": True, "cu_seqlens_q": starts}
    options |= {"q_scale": scales[:1], "kv_scale": scales[1:]}
    call = partial(package.mla_attention, q, cache, table, lens, **options)
    graph, (out, lse) = capture(call)
    assert case.q.dtype == E4M3
    for q_scale, kv_scale in ((0.5, 0.37), (0.25, 3.0), (2.0, 0.01)):
        scales.copy_(torch.tensor([q_scale, kv_scale]))
        case.q_scale, case.cache.kv_scale = q_scale, kv_scale
        graph.replay()
        torch.cuda.synchronize()
        bits = out.view(torch.int16).cpu().numpy().view(np.uint16).view(ref.BF16)
        assert_within_bounds(case.reference(), {"out": bits, "lse": lse.cpu().numpy()})
