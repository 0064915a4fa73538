"""Both sides of every rule about values in arrays, and about the memory of arrays (csrc/cpu,
rule.c)."""

from __future__ import annotations

import re
from typing import Any

import cases
import dlpack_producer
import numpy as np
import pytest
from bounds import (
    BF16,
    INT32,
    attend,
    attend_to_pages,
    convert,
    refuses,
    split_weight,
    zeros,
)
from cases import int32
from dlpack_producer import Producer
from example import F16, F32, U8, unit_of
from example_table import TABLE, Refused, bytes_of, frozen, outcome_of
from helpers import RED

import sparse_mla

# --- values in arrays -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots(dtype):
    """The last slot and any negative one are accepted. The first slot past the end is refused, and
    nothing is written."""
    for shape in ((3, 4, 576), (12, 576), (3, 4, 1, 576)):
        cache = zeros(*shape)
        ones = np.ones((2, 512), F32), np.ones((2, 64), F32)
        least = np.iinfo(dtype).min
        sparse_mla.concat_and_cache_mla(*ones, cache, np.array([11, least], dtype))
        written = cache.reshape(12, 576).astype(F32).any(1)
        assert written.tolist() == [False] * 11 + [True]
        for slot in (12, np.iinfo(dtype).max):
            cache[...] = 0
            with refuses(
                "concat_and_cache_mla: `slot_mapping` must be below the 12 slots of `kv_cache`, "
                f"got {slot} at token 1"
            ):
                sparse_mla.concat_and_cache_mla(*ones, cache, np.array([3, slot], dtype))
            assert not cache.astype(F32).any()


def test_a_cache_without_slots_takes_no_token():
    ones = np.ones((1, 512), F32), np.ones((1, 64), F32)
    sparse_mla.concat_and_cache_mla(*ones, zeros(0, 4, 576), int32(-1))
    with refuses(
        "concat_and_cache_mla: `slot_mapping` must be below the 0 slots of `kv_cache`, got 0 at "
        "token 0"
    ):
        sparse_mla.concat_and_cache_mla(*ones, zeros(0, 4, 576), int32(0))


def gather(length=4, start=0, first=0, table=(1, 0), rows=8, **changes):
    """Gathers a request, behind one of length 0, from 2 pages of 4 ones; -> rows written."""
    cache = np.ones((2, 4, 576), F32).astype(BF16)
    out = zeros(rows, 576)
    arguments = {
        "block_table": int32([0] * len(table), table),
        "seq_lens": int32(0, length),
        "workspace_starts": int32(0, start),
        "seq_starts": int32(0, first),
    } | changes
    sparse_mla.gather_kv_cache(cache, **arguments, out=out)
    return out.astype(F32).any(1).nonzero()[0].tolist()


ROWS = "must keep every row inside the 8 rows of `out`, got rows {} to {} for request 1"
PAGES = "must name pages of the cache (0 to 1), got {} for request 1, block {}"


@pytest.mark.parametrize(
    ("good", "bad", "text"),
    [
        ({"length": 0}, {"length": -1}, "`seq_lens` must be >= 0, got -1 at request 1"),
        ({"first": 0}, {"first": -1}, "`seq_starts` must be >= 0, got -1 at request 1"),
        ({"start": 0}, {"start": -1}, f"`workspace_starts` {ROWS.format(-1, 3)}"),
        ({"start": 4}, {"start": 5}, f"`workspace_starts` {ROWS.format(5, 9)}"),
        (
            {"length": 8},
            {"length": INT32 - 1, "start": INT32 - 1},
            f"`workspace_starts` {ROWS.format(INT32 - 1, 2 * INT32 - 2)}",
        ),
        (
            {"length": 4, "first": 4},
            {"length": 4, "first": 5},
            "`block_table` must have at least 3 columns for request 1, got 2",
        ),
        (
            {"length": 8, "table": (0, 1)},
            {"length": 8, "table": (0,)},
            "`block_table` must have at least 2 columns for request 1, got 1",
        ),
        ({"table": (1, 2)}, {"table": (2, 0)}, f"`block_table` {PAGES.format(2, 0)}"),
        ({"table": (0, -1)}, {"table": (-1, 0)}, f"`block_table` {PAGES.format(-1, 0)}"),
        (
            {"table": (7, 1), "first": 4, "length": 4},
            {"table": (7, 1), "first": 3, "length": 4},
            f"`block_table` {PAGES.format(7, 0)}",
        ),
        (
            {"table": (1, 7), "length": 4},
            {"table": (1, 7), "length": 5},
            f"`block_table` {PAGES.format(7, 1)}",
        ),
        (
            {"length": 0, "start": -9, "first": -9, "table": (INT32 - 1,)},
            {"length": 1, "start": 0, "first": 0, "table": (INT32 - 1,)},
            f"`block_table` {PAGES.format(INT32 - 1, 0)}",
        ),
        (
            {"length": 0, "table": ()},
            {"length": 1, "table": ()},
            "`block_table` must have at least 1 columns for request 1, got 0",
        ),
    ],
)
def test_gathers(good, bad, text):
    options = {"length": 4, "start": 0} | good
    rows = range(options["start"], options["start"] + options["length"])
    assert gather(**good) == list(rows)
    with refuses(f"gather_kv_cache: {text}"):
        gather(**bad)


def test_requests_of_no_length_touch_nothing():
    """Table rows and starts of such requests may contain anything."""
    bad = {"block_table": int32([-5], [99]), "seq_lens": int32(0, 0)}
    starts = {"workspace_starts": int32(-7, 100), "seq_starts": int32(-1, INT32 - 1)}
    assert gather(**bad, **starts) == []
    assert gather(**bad, **starts, rows=0) == []


def test_positions():
    """Positions become slots, or rows of the workspace; what does not fit int32 becomes -1."""
    most = INT32 - 1
    assert convert((-1, 0, 2, 3, 4, most), [[5]], block_size=4) == [-1, 20, 22, 23, -1, -1]
    assert convert((0, 1, 2), [[0, -1, 3]], block_size=1) == [0, -1, 3]
    assert convert((0, 3), [[most // 4]], block_size=4) == [most - 3, most]
    assert convert((0,), [[most // 4 + 1]], block_size=4) == [-1]
    assert convert((0, 1, 2), [[most // 4 + 0, 9]], block_size=5) == [-1] * 3
    assert convert((0,), [[most]], block_size=1) == [most]
    assert convert((most - 1, most), [[0]], block_size=most) == [most - 1, -1]
    assert convert((0, 1, 2), [[0]], block_size=4, starts=(most - 1,)) == [most - 1, most, -1]
    assert convert((1,), [[0]], block_size=4, starts=(0,)) == [1]


def test_requests_and_prefills_of_positions():
    def run(ids=(0, 1), prefills=(-1, 0), starts=(3,)):
        return sparse_mla.convert_req_index_to_global_index(
            int32(*ids), int32([1], [0]), int32([0], [1]), block_size=2,
            prefill_request_ids=int32(*prefills), prefill_workspace_starts=int32(*starts),
        ).tolist()  # fmt: skip

    op = "convert_req_index_to_global_index"
    assert run() == [[2], [4]]
    assert run(prefills=(-INT32, 0)) == [[2], [4]]
    assert run(starts=(0, -1)) == [[2], [1]], "a start that nobody uses is not looked at"
    for bad in (-1, 2):
        with refuses(
            f"{op}: `req_id_per_token` must name a row of `block_table` (0 to 1), got {bad} at "
            "token 1"
        ):
            run(ids=(0, bad))
    with refuses(
        f"{op}: `prefill_request_ids` must name an entry of `prefill_workspace_starts` (0 to 0) or "
        "be -1, got 1 at token 1"
    ):
        run(prefills=(-1, 1))
    with refuses(f"{op}: `prefill_workspace_starts` must be >= 0, got -1 at entry 0"):
        run(starts=(-1,))
    with refuses(f"{op}: `prefill_workspace_starts` must be given, got none"):
        sparse_mla.convert_req_index_to_global_index(
            int32(0), int32([1]), int32([0]), block_size=2, prefill_request_ids=int32(0)
        )
    alone = sparse_mla.convert_req_index_to_global_index(
        int32(0), int32([1]), int32([0]), block_size=2, prefill_workspace_starts=int32(-5, 7)
    )
    assert alone.tolist() == [[2]], "starts without ids are checked for their type alone"


def test_indices_and_lengths_of_attention():
    """The last slot and the last column count as keys; what lies behind them does not."""
    kv = zeros(2, 3, 576)
    q = zeros(1, 1, 576)

    def keys(indices, length=None):
        length = None if length is None else int32(length)
        _, lse = sparse_mla.sparse_attention(
            q, kv, int32(indices), softmax_scale=1.0, topk_length=length
        )
        return round(float(np.exp(lse[0, 0])))

    assert keys([0, 5, 5]) == 3
    assert keys([0, 5, 6]) == 2
    assert keys([0, -1, INT32 - 1, -INT32]) == 1
    for length, want in ((0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (-1, 0), (INT32 - 1, 3)):
        assert keys([0, 1, 2], length) == want, length


def test_starts_of_requests_in_pages():
    """The CPU refuses starts that no batch has. Tokens behind the last start are left alone."""
    who = "mla_attention: `cu_seqlens_q` must"
    lens, table = (3, 5), ((0, 1, 2, 3, 4),) * 2
    lse = np.full((3, 1), 0.0, F32)

    def keys(*starts, **options):
        return attend_to_pages(3, 1, lens, table, cu_seqlens_q=int32(*starts), **options)

    assert keys(0, 1, 3) == [3, 5, 5]
    assert keys(0, 0, 3, causal=True) == [3, 4, 5]
    assert keys(0, 3, 3, causal=True) == [1, 2, 3]
    assert keys(0, 1, 2, lse=lse) == [3, 5, 1]
    assert lse[2, 0] == 0, "a token of no request was written"
    for starts, got in (((1, 2, 3), "1 at 0"), ((-1, 2, 3), "-1 at 0"), ((0, 2, 1), "1 at 2")):
        with refuses(f"{who} begin with 0 and never fall, got {got}"):
            keys(*starts)
    with refuses(f"{who} end at most at the 3 tokens of `q`, got 4"):
        keys(0, 1, 4)
    with refuses(f"{who} have shape [3], got [2]: one entry more than `cache_seqlens`"):
        keys(0, 3)


def test_lengths_and_tables_of_pages():
    """A length below 0 is none. Entries that name no page, and the end of a row, hide keys."""
    most = INT32 - 1
    for length, want in ((-INT32, 0), (-1, 0), (0, 0), (1, 1), (6, 6), (7, 6), (most, 6)):
        assert attend_to_pages(1, 1, (length,), ((0, 1),), 3) == [want], length
    for page, want in ((-INT32, 3), (-1, 3), (0, 6), (8, 6), (9, 3), (most, 3)):
        assert attend_to_pages(1, 1, (6,), ((1, page),), 3) == [want], page
    for slot, want in ((-1, 1), (26, 2), (27, 1), (most, 1)):
        slots = {"slot_table": int32([0, slot])}
        assert attend_to_pages(1, 1, (2,), None, 3, **slots) == [want], slot
    who = "mla_attention: `block_table` must be given, or `slot_table` in its place, got"
    with refuses(f"{who} neither"):
        attend_to_pages(table=None)
    with refuses(f"{who} both"):
        attend_to_pages(slot_table=int32([0]))


@pytest.mark.parametrize("given", ["extra_indices", "extra_topk_length", "both", "extra_kv_cache"])
def test_extra_lists_are_whole(given):
    extra = {
        "extra_kv_cache": zeros(1, 1, 576),
        "extra_indices": int32([0]),
        "extra_topk_length": int32(1),
    }
    attend(**extra)
    attend(**{n: x for n, x in extra.items() if n != "extra_topk_length"})
    names = ("extra_indices", "extra_topk_length") if given == "both" else (given,)
    missing = "extra_indices" if given == "extra_kv_cache" else "extra_kv_cache"
    with refuses(f"sparse_attention: `{missing}` must be given, got none"):
        attend(**{n: extra[n] for n in names})
    with refuses("sparse_attention: `extra_indices` must be given, got none"):
        attend(extra_kv_cache=extra["extra_kv_cache"], extra_topk_length=extra["extra_topk_length"])


def test_a_square_weight_is_read_as_it_lies():
    """[512, 512] could be stored either way; it is read with latents as rows."""
    weight = cases.random_bf16(np.random.default_rng(0), 512, 512)
    sizes = {"num_heads": 2, "qk_nope_head_dim": 100, "v_head_dim": 156}
    parts = weight.reshape(512, 2, 256)
    for stored in (weight, np.asfortranarray(weight)):
        w_uk, w_uv = sparse_mla.split_kv_b_proj(stored, **sizes)
        assert bytes_of(w_uk) == bytes_of(parts[..., :100])
        assert bytes_of(w_uv) == bytes_of(parts[..., 100:])
    codes = np.full((512, 512), 0x38, U8)  # ones
    scale = np.arange(16, dtype=F32).reshape(4, 4)
    w_uk, w_uv = sparse_mla.split_kv_b_proj(codes, **sizes, weight_scale_inv=scale)
    got = np.concatenate([w_uk, w_uv], axis=2).reshape(512, 512).astype(F32)
    assert np.array_equal(got, np.kron(scale, np.ones((128, 128))))


@pytest.mark.parametrize("shape", [(512, 128), (512, 129), (128, 512), (129, 512), (512, 1)])
def test_scales_are_one_per_block(shape):
    columns = next((n for n in shape if n != 512), 512)
    blocks = tuple(-(-n // 128) for n in shape)
    sizes = {"num_heads": 1, "qk_nope_head_dim": 1, "v_head_dim": columns - 1}
    if columns == 1:
        shape, blocks, sizes["v_head_dim"] = (512, 2), (4, 1), 1
    codes = np.full(shape, 0x38, U8)
    sparse_mla.split_kv_b_proj(codes, **sizes, weight_scale_inv=np.ones(blocks, F32))
    for d, by in ((0, 1), (0, -1), (1, 1), (1, -1)):
        bad = tuple(n + by * (i == d) for i, n in enumerate(blocks))
        rule = f"must have shape {list(blocks)}, got {list(bad)}"
        with refuses(f"split_kv_b_proj: `weight_scale_inv` {rule}"):
            sparse_mla.split_kv_b_proj(codes, **sizes, weight_scale_inv=np.ones(bad, F32))


def test_a_weight_fits_its_numbers():
    split_weight((512, 3))
    split_weight((3, 512))
    for shape in ((512, 2), (512, 4), (511, 3), (513, 3), (2, 512), (4, 512), (3, 511), (3, 513)):
        rule = f"must have shape [512, 3] or [3, 512] (1 heads x (1 + 2)), got {list(shape)}"
        with refuses(f"split_kv_b_proj: `weight` {rule}"):
            split_weight(shape)


# --- memory ---------------------------------------------------------------------------------------


def put(raw: np.ndarray, start: int, x: np.ndarray) -> np.ndarray:
    view = np.ndarray(x.shape, x.dtype, raw, start)
    view[...] = x
    return view


PAIRS = [
    pytest.param(example, out, other, id=f"{title}: {out}, {other}")
    for title, example in TABLE.items()
    for out, rules in example.rules.items()
    for other, other_rules in example.rules.items()
    if "written" in rules and out != other and "host" not in other_rules
]


@pytest.mark.parametrize(("example", "out", "other"), PAIRS)
def test_neighbours_and_overlaps(example, out, other):
    """Two arrays end to end, in either order, give the result of separate arrays. One element
    closer, which is one byte if one of them holds bytes, they are refused."""
    want = outcome_of(example, {n: x.copy() for n, x in example.arrays.items()})
    x, y = example.arrays[out], example.arrays[other]
    step, other_step = unit_of(x, example.rules[out]), unit_of(y, example.rules[other])
    names = [n for n in example.rules if n in (out, other)]
    both = "written" in example.rules[other]
    first, second = (out, other)
    if both and names[0] == other:
        first, second = other, out
    may_be = first == f"{second.removesuffix('_pe')}_out"
    may_be |= example.op == "merge_attn_states" and second in (f"{first}_a", f"{first}_b")
    may_be |= (example.op, first, second) == ("transfer_kv_cache", "dst", "src")
    rule = "be the whole of or not overlap" if may_be else "not overlap"
    text = f"{example.declared}: `{first}` must {rule} `{second}`, got arrays that share memory"
    raw = np.full(x.nbytes + y.nbytes + 256, RED, U8)
    for closer in (0, min(step, other_step)):
        for other_is_in_front in (True, False):
            sizes = (y.nbytes, x.nbytes) if other_is_in_front else (x.nbytes, y.nbytes)
            middle = -(-sizes[0] // 64) * 64 + (-raw.ctypes.data) % 64
            low, high = middle - sizes[0], middle
            # the array with the smaller step moves, so that both stay aligned
            moves_low = (other_step <= step) == other_is_in_front
            low, high = (low + closer, high) if moves_low else (low, high - closer)
            raw[:] = RED
            given = {n: a.copy() for n, a in example.arrays.items()}
            starts = (high, low) if other_is_in_front else (low, high)
            given[out], given[other] = put(raw, starts[0], x), put(raw, starts[1], y)
            before = raw.copy()
            got = outcome_of(example, given)
            if closer:
                assert got == Refused(ValueError, text)
                assert np.array_equal(raw, before), "written"
            else:
                assert got == want
                outside = np.ones(raw.size, bool)
                outside[low : middle + sizes[1]] = False
                assert (raw[outside] == RED).all()


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
def test_columns_of_one_buffer(shift):
    """Rows of x and of out alternate: x has the first 10 bytes of every 16, out has 5 others."""
    raw = np.zeros(16 * 4, U8)
    x = np.ndarray((3, 5), F16, raw, 0, (16, 2))
    x[...] = np.arange(15).reshape(3, 5)
    want, _ = sparse_mla.dynamic_per_tensor_quant(x.copy(), out=np.zeros((3, 5), U8))
    start = 10 + shift
    out = np.ndarray((3, 5), U8, raw, start, (16, 1))
    if 10 <= start <= 11:
        sparse_mla.dynamic_per_tensor_quant(x, out=out)
        assert np.array_equal(out, want)
    else:
        with refuses(
            "dynamic_per_tensor_quant: `out` must not overlap `x`, got arrays that share memory"
        ):
            sparse_mla.dynamic_per_tensor_quant(x, out=out)


@pytest.mark.parametrize("stride", [4, 5, 6])
def test_rows_that_reach_into_the_next(stride):
    raw = np.full(64, RED, U8)
    out = np.ndarray((3, 5), U8, raw, 8, (stride, 1))
    x = np.ones((3, 5), F32)
    if stride >= 5:
        sparse_mla.dynamic_per_tensor_quant(x, out=out)
        assert (out == 0x7E).all()
        assert (raw == 0x7E).sum() == 15
    else:
        with refuses(
            "dynamic_per_tensor_quant: `out` must have elements that do not overlap (it is "
            "written), got strides that reach back"
        ):
            sparse_mla.dynamic_per_tensor_quant(x, out=out)
        assert (raw == RED).all()


@pytest.mark.parametrize(
    "argument", ["kv_cache", "q", "indices", "topk_length", "attn_sink", "out"]
)
def test_an_argument_as_workspace(argument):
    """The array is large enough for a workspace, but the call uses it otherwise."""
    kv = np.zeros((4096, 576), BF16)
    arrays = {
        "q": np.zeros((256, 2, 576), BF16),
        "indices": np.zeros((256, 600), np.int32),
        "topk_length": np.zeros(2**17, np.int32)[::512],
        "attn_sink": np.zeros(2**17, F32)[:: 2**16],
        "out": np.zeros((256, 2, 512), BF16),
    }
    whole = {n: x.base if x.base is not None else x for n, x in (arrays | {"kv_cache": kv}).items()}
    workspace = whole[argument].reshape(-1).view(U8)
    size = sparse_mla.attention_workspace_size(256, 2, 600, device="cpu")
    assert workspace.size >= 2**19 or size < workspace.size
    first, second = ("out", "workspace") if argument == "out" else ("workspace", argument)
    with refuses(
        f"sparse_attention: `{first}` must not overlap `{second}`, got arrays that share memory"
    ):
        sparse_mla.sparse_attention(
            arrays.pop("q"), kv, arrays.pop("indices"), **arrays, softmax_scale=1.0,
            workspace=workspace,
        )  # fmt: skip
    assert not workspace.any()


def at_offset(size: int, offset: int, dtype=U8) -> np.ndarray:
    raw = np.zeros(size + 128, U8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + size].view(dtype)


@pytest.mark.parametrize("offset", [0, 1, 63])
@pytest.mark.parametrize(("T", "H", "splits"), [(1, 1, 1), (2, 17, 3), (70, 3, 2), (2, 128, 64)])
def test_workspace_bytes(T, H, splits, offset):
    """The error names the least size in which one thread can run, from the next multiple of 64 on;
    one byte less is refused. What attention_workspace_size returns is enough at any address."""
    case = cases.AttentionCase(T, H, 40, num_splits=splits, pages=1).make()
    want = case.run(sparse_mla.sparse_attention)

    def run(size: int, dtype=U8, at=offset):
        return case.run(sparse_mla.sparse_attention, workspace=at_offset(size, at, dtype))

    with pytest.raises(
        ValueError, match=r"`workspace` must have at least \d+ bytes, got 1$"
    ) as info:
        run(1, at=0)
    least = int(re.findall(r"\d+", str(info.value))[0]) + -offset % 64
    with refuses(
        f"sparse_attention: `workspace` must have at least {least} bytes, got {least - 1}"
    ):
        run(least - 1)
    told = sparse_mla.attention_workspace_size(T, H, 40, num_splits=splits, device="cpu")
    assert least <= told
    for got in (run(least), run(told), run(least, np.int8)):
        assert frozen(got, {}) == frozen(want, {})


def test_nothing_needs_no_workspace():
    assert sparse_mla.attention_workspace_size(0, 4, 9, device="cpu") == 0
    assert sparse_mla.attention_workspace_size(1, 4, 9, device="cpu") > 0
    attend(T=0, workspace=zeros(0, dtype=U8))
    attend(T=0, K=0)


def cache_of(stride: int, negative=False) -> Any:
    """A cache of two pages that are `stride` bytes apart; there is no memory for the second."""
    page = np.zeros((2, 4, 656), U8)
    return Producer(page, strides=[-stride if negative else stride, 656, 1])


def attend_to(kv):
    return sparse_mla.sparse_attention(zeros(1, 1, 576), kv, int32([0, 3]), softmax_scale=1.0)


def test_the_end_of_the_address_space():
    """An array may span 2^57 bytes at most and must not reach below address 0."""
    rule = "sparse_attention: `kv_cache` must fit in the address space with its strides, got shape"
    attend_to(cache_of(2**57 - 4 * 656))
    with refuses(f"{rule} [2, 4, 656]"):
        attend_to(cache_of(2**57 - 4 * 656 + 16))
    below = cache_of(16, negative=True)
    address = below.array.ctypes.data & -16
    assert address == below.array.ctypes.data, "or the stride would not be one of 16 bytes"
    below.strides[0] = -address
    attend_to(below)
    below.strides[0] = -address - 16
    with refuses(f"{rule} [2, 4, 656]"):
        attend_to(below)
    with refuses(f"{rule} [2, 4, 656]"):
        attend_to(cache_of(2**62))


def test_sizes_and_memory_of_capsules():
    """Only an empty array may have a null pointer; a negative size is refused."""
    kv = np.zeros((1, 4, 656), U8)
    q, none = zeros(1, 1, 576), Producer(np.zeros((1, 0), np.int32), fields={"data": None})
    out, lse = sparse_mla.sparse_attention(q, kv, none, softmax_scale=1.0)
    assert (lse == -np.inf).all() and not out.astype(F32).any()
    some = Producer(np.zeros((1, 1), np.int32), fields={"data": None})
    with refuses("sparse_attention: `indices` must have memory, got a null pointer"):
        sparse_mla.sparse_attention(q, kv, some, softmax_scale=1.0)

    class Negative(Producer):
        def capsule(self, versioned):
            made = super().capsule(versioned)
            shape = next(x[2] for x in dlpack_producer._alive.values() if x[0] is self)
            shape[1] = -1
            return made

    with refuses("sparse_attention: `indices` must have sizes >= 0, got shape [1, -1]"):
        sparse_mla.sparse_attention(q, kv, Negative(np.zeros((1, 1), np.int32)), softmax_scale=1.0)
