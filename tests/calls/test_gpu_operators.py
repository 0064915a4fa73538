"""Operators other than attention at sizes that fill a GPU: many blocks, many tokens per block,
long rows."""

import cases
import numpy as np
import pytest
import reference as ref
from helpers import Guarded, assert_same_bf16, assert_same_bits
from index_lists import COMBINE, GLOBAL, MIXED, gathered, make_batch, mixed_arguments, positions
from index_lists import check as check_lists
from library import sparse_mla
from reference_norm import pack_scales
from test_grouped_projection import Call as Grouped
from test_index import check as check_index
from test_index import inputs as index_inputs
from test_merge import check as check_merge
from test_merge import states


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(
    ("T", "R", "W", "K", "block_size"),
    [
        (5000, 7, 30, 70, 16),  # several tokens per block, and requests that change inside it
        (3000, 3000, 4, 33, 64),  # one request per token
        (40, 3, 8192, 260, 3),
        (40, 3, 8193, 260, 3),
        (40, 3, 20_000, 2048, 1),
        (2, 1, 100, 100_001, 64),
    ],
)
def test_index_conversion(T, R, W, K, block_size, prefill):
    requests, table, topk = index_inputs(T, R, W, K, block_size)
    table[:, W // 2] = -1
    options = {}
    if prefill:
        rng = np.random.default_rng(1)
        options["prefill_request_ids"] = rng.integers(-1, 5, T).astype(np.int32)
        options["prefill_workspace_starts"] = rng.integers(0, 10**6, 5).astype(np.int32)
    check_index(requests, table, topk, block_size, **options)


@pytest.mark.parametrize(
    ("T", "K", "block_size"), [(3000, 70, 16), (40, 512, 64), (7, 3000, 3), (2, 40_001, 64)]
)
def test_global_topk(T, K, block_size):
    """Rows of many tiles, in which entries of every kind are dropped."""
    rng = np.random.default_rng(8)
    R, W = 13, 50
    table = rng.integers(-1, 900, (R, W)).astype(np.int32)
    ids = rng.integers(0, R, T).astype(np.int32)
    is_valid = rng.random(T) < 0.9
    _, lens = check_lists(
        GLOBAL, positions(rng, T, K, W * block_size), ids, table, block_size, is_valid
    )
    assert lens.max() > 0


@pytest.mark.parametrize(("decodes", "prefills"), [(500, 0), (0, 60), (200, 30)])
@pytest.mark.parametrize(("window", "topk"), [(128, 512), (1000, 3)])
def test_index_lists_of_large_batches(decodes, prefills, window, topk):
    rng = np.random.default_rng(9)
    batch = make_batch(rng, decodes, prefills, longest=3000)
    arguments = mixed_arguments(
        rng, batch, window=window, ratio=4, topk=topk, decode_topk=topk, local=True
    )
    check_lists(MIXED, *arguments, decode_indices_are_local=True)
    lists = positions(rng, batch.num_tokens, topk, 700)
    parts = (batch.query_start_loc, batch.seq_lens, gathered(batch, window))
    check_lists(COMBINE, lists, *parts, window, 4, topk, 1900, 700)


@pytest.mark.parametrize("fmt", ["fp8", "bf16", "bf16_512"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_write_of_many_tokens(fmt, dtype, shift):
    """Inputs begin `shift` elements behind an aligned address; a few slots are negative."""
    rng = np.random.default_rng(2)
    tokens, pages = 3000, 60
    value = rng.standard_t(2, (tokens, 600)).astype(np.float32)
    joint = ref.to_bf16(value) if dtype == "bfloat16" else value.astype(dtype)
    kv_c, k_pe = joint[:, shift : shift + 512], joint[:, 520 + shift : 584 + shift]
    k_pe = k_pe[:, : cases.rope_dim(fmt)]
    slots = rng.permutation(pages * 64)[:tokens].astype(np.int64)
    slots[::37] = -1
    cache = cases.lay_out(cases.make_rows(rng, pages * 64, fmt), 64, "padded")
    want = cases.lay_out(cache.reshape(pages * 64, -1).copy(), 64, "padded")
    ref.concat_and_cache_mla(kv_c, k_pe, want, slots)
    sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, slots)
    assert_same_bits(cache.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("fmt", ["fp8", "bf16", "bf16_512"])
def test_several_tokens_of_one_slot(fmt):
    """Tokens of one slot are neighbours or far apart. The cache row is that of one of them, not a
    mixture."""
    rng = np.random.default_rng(3)
    tokens = cases.make_rows(rng, 200, "bf16")
    slots = np.full(200, 5, np.int64)
    slots[100:110] = 6
    tokens = np.ascontiguousarray(tokens[:, : cases.head_dim(fmt)])
    cache = np.zeros_like(cases.make_rows(rng, 8, fmt)).reshape(2, 4, -1)
    sparse_mla.concat_and_cache_mla(tokens[:, :512], tokens[:, 512:], cache, slots)
    rows = ref.bits16(tokens)
    if fmt == "fp8":
        rows = ref.quantize_rows(rows[:, :512], rows[:, 512:])
    for slot, owners in ((5, np.flatnonzero(slots == 5)), (6, range(100, 110))):
        row = cache.reshape(8, -1)[slot].tobytes()
        assert row in {rows[i].tobytes() for i in owners}


@pytest.mark.parametrize("fmt", ["fp8", "bf16", "bf16_512"])
@pytest.mark.parametrize("row_gap", [0, 1, 8])
def test_gather_of_many_requests(fmt, row_gap):
    """Lengths are 0 to 700. Requests are in any order in the workspace, with gaps between them."""
    rng = np.random.default_rng(4)
    lens = rng.integers(0, 60, 300).astype(np.int32)
    lens[[3, 77, 200]] = [0, 700, 650]
    first = rng.integers(0, 70, 300).astype(np.int32)
    cache = cases.lay_out(cases.make_rows(rng, 50 * 16, fmt), 16, "interleaved")
    table = rng.integers(0, 50, (300, 50)).astype(np.int32)
    starts, used = np.zeros(300, np.int32), 0
    for r in rng.permutation(300):
        starts[r] = used
        used += int(lens[r]) + int(rng.integers(0, 3))
    out = Guarded((used, cases.head_dim(fmt)), ref.BF16, row_gap=row_gap)
    want = ref.bits16(np.ascontiguousarray(out.array)).copy()
    sparse_mla.gather_kv_cache(cache, table, lens, starts, out=out.array, seq_starts=first)
    ref.gather_kv_cache(cache, table, lens, starts, want, first)
    assert_same_bf16(out.check(written=False), want)


@pytest.mark.parametrize("dtype", [ref.BF16, np.dtype(np.float32)], ids=str)
def test_merge_of_many_rows(dtype):
    check_merge(*states(dtype, (200, 128)), row_gap=8)
    check_merge(*states(dtype, (1, 1)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1,), (7,), (1_000_003,), (3, 70_001), (5, 1, 333, 77)])
def test_quantiser(shape, dtype):
    """The largest value is the last, in the tail that does not fill a block."""
    value = np.random.default_rng(5).normal(0, 3, shape).astype(np.float32)
    value.reshape(-1)[-1] = -77.0
    x = ref.to_bf16(value) if dtype == "bfloat16" else value.astype(dtype)
    codes, scale = sparse_mla.dynamic_per_tensor_quant(x)
    want_codes, want_scale = ref.dynamic_per_tensor_quant(x)
    assert scale.reshape(())[()] == want_scale
    assert_same_bits(codes.view(np.uint8), want_codes)


@pytest.mark.parametrize("T", [1, 17, 300])
def test_projections(T):
    rng = np.random.default_rng(6)
    w_uk = cases.random_bf16(rng, 512, 128, 128, std=0.05)
    for op, width in (("k_up_proj", 128), ("v_up_proj", 512)):
        x = cases.random_bf16(rng, T, 128, width)
        want, tolerance = getattr(ref, op)(x, w_uk)
        out = Guarded(want.shape, ref.BF16, row_gap=8)
        getattr(sparse_mla, op)(x, w_uk, out=out.array)
        assert ref.worst_ratio(out.check(), want, tolerance) <= 1, op


@pytest.mark.parametrize("T", [1, 17, 2000])
def test_latents_become_keys_and_values(T):
    rng = np.random.default_rng(13)
    kv_c = cases.random_bf16(rng, T, 576)[:, :512]
    stored = cases.random_bf16(rng, 16 * 256, 512, std=0.05)
    want, tolerance = ref.kv_up_proj(kv_c, stored.T)
    for kv_b_proj in (stored.T, np.ascontiguousarray(stored.T)):
        out = Guarded(want.shape, ref.BF16, row_gap=8)
        sparse_mla.kv_up_proj(kv_c, kv_b_proj, out=out.array)
        assert ref.worst_ratio(out.check(), want, tolerance) <= 1


@pytest.mark.parametrize("kind", ["flat", "peaky"])
@pytest.mark.parametrize("size", [(16, 8, 1024, 4096), (64, 4, 1024, 4096), (1500, 8, 1000, 1024)])
def test_grouped_projections(size, kind):
    """The first is V4-Flash's. The last has more tiles than a GPU has SMs."""
    call = Grouped(*size, kind)
    call.check()
    call.check(o_scale=pack_scales(call.o_scale))
