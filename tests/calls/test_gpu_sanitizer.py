"""A little of everything, for compute-sanitizer's memcheck and racecheck: pytest -m sanitizer.

The tests reach every launcher, FP8 and bf16 rows, one split and several, head counts that fill
tiles or do not, odd page sizes, and rows that are not aligned to 16 bytes. Inputs are small,
because compute-sanitizer runs kernels a hundred times slower.
"""

import dataclasses

import cases
import engine
import gpu
import numpy as np
import pytest
import reference as ref
import row_formats
from cases import AttentionCase
from compressor_steps import Case as Compressor
from dense_cases import Dense, Mask
from helpers import assert_within_bounds, guarded_attention
from library import sparse_mla
from paged_cases import Paged as Pages
from test_gpu_growth import check as check_large
from test_gpu_outlier_keys import make as make_large
from test_gpu_v4_forward import filled, new_streams
from test_grouped_projection import Call as Grouped
from test_indexer_logits import Paged, assert_logits, bound_of
from test_mla_attention import check as check_dense
from test_paged import check as check_pages
from test_qnorm_insert import Case, check_all
from test_reshape import check as check_writes
from test_reshape import make_caches, make_rows
from test_top_k import check as check_top_k
from test_top_k import make as top_k_rows
from test_top_k import whole
from test_v4_attention import V4Case
from test_v4_attention import check as check_v4
from test_varlen import check as check_varlen
from varlen_cases import Varlen

pytestmark = pytest.mark.sanitizer


@pytest.mark.parametrize("op", gpu.CALLS)
def test_operators(op):
    call = gpu.CALLS[op]()
    results = gpu.as_tuple(call.run(sparse_mla))
    assert not any(np.isnan(np.asarray(x, np.float32)).any() for x in results if x.itemsize > 1)


@pytest.mark.parametrize("fmt", row_formats.KEY_FORMATS)
def test_queries_and_keys(fmt):
    """Rows that are aligned to 16 bytes, and rows that are not."""
    check_all(Case(5, 3, fmt=fmt, layout="padded"), 1)
    case = Case(5, 3, fmt=fmt)
    case.q, case.kv = shifted(case.q), shifted(case.kv)
    check_all(case)


@pytest.mark.parametrize("fmt", row_formats.FORMATS)
@pytest.mark.parametrize("ratio", [3, 4, 40])
def test_compressor(fmt, ratio):
    """States that are aligned to 16 bytes, and states that are not; in two calls and in one."""
    requests = ((0, ratio + 2), (ratio - 1, 1), (2 * ratio, 3))
    for fused in (False, True):
        for gap in (0, 1):
            Compressor(requests, ratio=ratio, fmt=fmt, gap=gap).check(fused)


def shifted(x: np.ndarray) -> np.ndarray:
    """The same array, 2 bytes past a multiple of 16."""
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + 8), x.dtype)[..., 1 : x.shape[-1] + 1]
    wide[...] = x
    return wide


@pytest.mark.parametrize("dtype", [np.float32, ref.BF16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 70_000), (2, 9000), (150, 3000), (1, 530_000)])
def test_top_k(rows, columns, dtype):
    """Clusters of several sizes and single CTAs, with partial vectors; a row too long to hold."""
    logits = top_k_rows("few distinct", dtype, rows, columns + 1)[:, 1:]
    check_top_k(logits, *whole(logits), 300)


@pytest.mark.parametrize("T", [1, 20, 150])
def test_grouped_projections(T):
    """Every kernel of e4m3 values, with partial tiles."""
    call = Grouped(T, 2, 140, 384)
    call.check()
    unaligned = np.zeros((T, 2, 388), np.uint8)[..., 1:385]
    unaligned[...] = call.o
    call.check(o=unaligned)


@pytest.mark.parametrize("T", [1, 20, 64])
def test_wide_projections(T):
    """So many outputs that each SM has a tile of 256, and a partial one."""
    Grouped(T, 1, 150 * 256 + 60, 384).check()


def check(case: AttentionCase) -> None:
    made = case.make()
    assert_within_bounds(made.reference(), guarded_attention(sparse_mla.sparse_attention, made))


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
@pytest.mark.parametrize("num_splits", [1, 5, 8])
@pytest.mark.parametrize("num_heads", [1, 16, 24, 64, 128])
def test_attention(num_heads, num_splits, fmt):
    check(AttentionCase(2, num_heads, 330, fmt=fmt, num_splits=num_splits, pages=6, sink=True))


@pytest.mark.parametrize("num_splits", [1, 5])
@pytest.mark.parametrize("num_heads", [1, 16, 24, 64, 128])
def test_attention_over_v4_rows(num_heads, num_splits):
    """Pages of 4 and 64 rows are aligned to 16 bytes, as Hopper's kernels want them."""
    rows = {"extra": "fp8_v4", "extra_K": 200, "extra_block_size": 4}
    check_v4(V4Case(2, num_heads, 128, **rows, num_splits=num_splits, sink=True))


@pytest.mark.parametrize("num_heads", [64, 128])
def test_attention_of_middle_batches(num_heads):
    """The schedule takes Hopper's kernel for few columns with 64 heads (test_gpu_small.py)."""
    tokens = 128 // num_heads
    check(AttentionCase(10 * tokens, num_heads, 1024, pages=6, topk_length=True))
    check_v4(V4Case(12 * tokens, num_heads, 128, extra="fp8_v4", extra_K=512, extra_block_size=4))


def test_outlier_keys_first():
    check_large(make_large("a few", 64, 2048, 1))


ODD = {
    "page 3": {"pages": 50, "block_size": 3, "layout": "padded"},
    "page 1": {"pages": 130, "block_size": 1},
    "page 100": {"pages": 2, "block_size": 100, "layout": "interleaved"},
    "unaligned rows": {"fmt": "bf16", "layout": "odd_stride"},
    "unaligned q": {"q_layout": "odd_stride"},
    "q in a pair": {"q_layout": "pair_views", "fmt": "bf16"},
    "two lists": {"extra": "bf16", "topk_length": True, "num_splits": 3},
    "all masked": {"indices": "all_masked", "num_splits": 2},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_attention(name):
    check(AttentionCase(3, 20, 130, **ODD[name]))


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_rows_of_few_keys(fmt):
    """Lists have 0, 1, 2 or 40 keys, and each CTA takes at least three work items."""
    rng = np.random.default_rng(2)
    case = AttentionCase(600, 16, 40, fmt=fmt, indices="ordered").make()
    num_keys = rng.choice([0, 1, 1, 2, 40], (600, 1))
    order = rng.permuted(np.tile(np.arange(40), (600, 1)), axis=1)
    case.indices = np.where(order < num_keys, case.indices, -1).astype(np.int32)
    assert_within_bounds(case.reference(), guarded_attention(sparse_mla.sparse_attention, case))


def test_rows_that_are_cut():
    """There are fewer tokens than SMs, with lists of 1024 and of 100 entries, so long work items
    are cut. One part has a scale that does not fit and is done again."""
    case = AttentionCase(70, 16, 1024, pages=20).make()
    rng = np.random.default_rng(5)
    case.indices = rng.integers(1, 1280, case.indices.shape).astype(np.int32)
    case.indices[rng.permutation(70)[:50], 100:] = -1
    case.kv.reshape(1280, -1)[0, 512:528].view(np.float32)[:] = 1e30
    case.indices[np.argmax(case.indices[:, 900] >= 0), 900] = 0
    got = guarded_attention(sparse_mla.sparse_attention, case)
    some = np.union1d(np.flatnonzero(case.indices[:, 900] >= 0)[:4], [0])
    want = case.rows(some).reference()
    assert_within_bounds(want, {name: x[some] for name, x in got.items()})


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_splits_in_turn(fmt):
    """The plan's splits take chunks of columns in turn (test_gpu_splits.py). Lists are short, long
    and full of holes, and an FP8 row has a scale that does not fit, so its split is done again."""
    case = AttentionCase(24, 64, 1990, fmt=fmt, pages=20).make()
    case.indices[::2, 700:] = -1
    if fmt == "fp8":
        slot = case.indices[3, 900:][np.isin(case.indices[3, 900:], np.arange(1280))][0]
        case.kv.reshape(1280, -1)[slot, 512:528].view(np.float32)[:] = 1e30
    got = guarded_attention(sparse_mla.sparse_attention, case)
    some = np.arange(4)
    assert_within_bounds(case.rows(some).reference(), {name: x[some] for name, x in got.items()})


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize(("lens", "H"), [((1, 1), 64), ((2, 2), 32), ((40, 1), 64), ((3, 1), 7)])
def test_logits(lens, H, kind):
    """Every way in which tokens and keys are shared out, with odd pages and a bad one."""
    case = Paged(lens, (290, 130), H, kind, kind, block_size=50)
    case.table[0, 3] = -1
    assert_logits(case.run(), *case.want(), bound_of(H, kind, kind))


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
def test_cache_rows(fmt):
    """A write and a gather, with pages of 5 tokens and gaps between them."""
    rng = np.random.default_rng(1)
    cache = cases.lay_out(cases.make_rows(rng, 40, fmt), 5, "interleaved")
    want = cache.copy()
    values = cases.random_bf16(rng, 9, 579)
    slots = np.array([39, 0, -1, 7, 4, 5, 12], np.int64)
    sparse_mla.concat_and_cache_mla(values[:, 1:513], values[:, 513:577], cache, slots)
    ref.concat_and_cache_mla(values[:, 1:513], values[:, 513:577], want, slots)
    assert np.array_equal(cache.view(np.uint8), want.view(np.uint8))
    out = np.zeros((20, 576), ref.BF16)
    table = np.array([[7, 1, 2], [0, 3, 5]], np.int32)
    lens, starts = np.array([12, 3], np.int32), np.array([5, 0], np.int32)
    sparse_mla.gather_kv_cache(cache, table, lens, starts, out=out, seq_starts=lens * 0 + 2)
    bits = np.zeros((20, 576), np.uint16)
    ref.gather_kv_cache(cache, table, lens, starts, bits, lens * 0 + 2)
    assert np.array_equal(ref.bits16(out), bits)


@pytest.mark.parametrize("stored", [ref.BF16, np.uint8])
@pytest.mark.parametrize("layout", ["apart", "padded"])
def test_pages_of_heads_are_written(layout, stored):
    """Whole vectors and single elements, tokens of one slot, and a slot that is none."""
    rng = np.random.default_rng(2)
    k, v = make_rows(rng, 70, 3, (192, 128), ref.BF16)
    slots = np.append(rng.integers(0, 40, 69), -1)
    memory, caches = make_caches(layout, 8, 5, 3, (192, 128), stored)
    check_writes(memory, caches, k, v, slots[:32], k_scale=0.3)
    check_writes(memory, caches, k, v, np.append(rng.permutation(40), [-1] * 30), v_scale=0.3)


@pytest.mark.parametrize("path", ["mixed", "separate", "direct"])
def test_a_step(path):
    batch = cases.make_batch([1, 1, 9], [30, 70, 40])
    step = engine.make_step(batch, 17)
    options = engine.config(sparse_mla, num_heads=17, path=path)
    metadata = sparse_mla.MetadataBuilder(options).build(batch.common(sparse_mla))
    out, lse = sparse_mla.SparseMLA(options).forward(
        step.q, step.fp8_cache, step.topk_indices, metadata, attn_sink=step.attn_sink
    )
    assert_within_bounds(step.reference(path, step.fp8_cache), {"out": out, "lse": lse})


@pytest.mark.parametrize("heads", [16, 20, 64])
@pytest.mark.parametrize(("num_splits", "block_size"), [(0, 16), (1, 3), (3, 64)])
def test_dense_fp8_rows(heads, num_splits, block_size):
    """Rows one by one and four at once, pages that are not there, and tokens of no request."""
    check_dense(Dense([2, 1, 1, 1], [300, 1, 0, 40], heads, "fp8", block_size=block_size,
                      mask=Mask(causal=True), num_splits=num_splits, holes=0.2,
                      padding=1))  # fmt: skip


@pytest.mark.parametrize("count", [100, 140])
def test_dense_fp8_items(count):
    """A long item that is cut, and items in an order."""
    check_dense(Dense([1] * count, [1000] + [5] * (count - 1), 16, "fp8"))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (320, 264)])
@pytest.mark.parametrize(("q_type", "kv_type"), [("bf16", "bf16"), ("fp16", "e4m3")])
def test_ragged_prefills(dims, q_type, kv_type):
    """Each kernel, rows that are copied and rows that are loaded, tiles of one request and empty
    ones."""
    case = Varlen([70, 0, 3], [150, 9, 0], 4, 2, dims, q_type, kv_type, padding=2,
                  mask=Mask(causal=True))  # fmt: skip
    check_varlen(case)
    case.is_spread = True
    check_varlen(case)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (320, 264)])
@pytest.mark.parametrize(("q_type", "kv_type"), [("bf16", "bf16"), ("fp16", "e4m3")])
def test_pages(dims, q_type, kv_type):
    """Rows that are copied and rows that are loaded, hidden keys, a short table, slots."""
    case = Pages([70, 0, 3], [150, 9, 0], 4, 2, dims, q_type, kv_type, padding=2, page_size=3,
                 mask=Mask(causal=True), holes=0.2, missing=2, leftpad=[5, 0, 0])  # fmt: skip
    check_pages(case)
    check_pages(dataclasses.replace(case, is_spread=True, has_slots=True, layout="row"))


@pytest.mark.parametrize("kv_type", ["bf16", "e4m3"])
def test_pages_of_latents(kv_type):
    """Both parts of a query, with a scale each."""
    check_pages(Pages([1, 1, 1], [70, 9, 0], 16, 1, (64, 512), "bf16", kv_type, has_qv=True,
                      is_decode=True, descales="rows"))  # fmt: skip


def test_more_prefills_than_ctas():
    """Hopper's CTAs claim all tiles but their first."""
    check_varlen(Varlen([1] * 150, [3] * 150, 1, 1, mask=Mask(causal=True)))


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_a_v4_layer(ratio, count):
    """Prefills, then a decode of all requests, which may run on streams."""
    world, parts = filled(ratio)
    world.use_products()
    metadata = world.build(parts, 1)
    x = gpu.put(world.inputs(parts, 1))
    want = world.layer.forward(x, world.caches, metadata)
    out = world.layer.forward(x, world.caches, metadata, streams=new_streams(count))
    assert gpu.torch.equal(out, want)
