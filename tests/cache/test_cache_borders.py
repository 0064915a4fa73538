"""Cache writes and gathers at the borders of how threads divide them, on any number of threads
(csrc/cpu/cache): every byte is the reference's."""

from __future__ import annotations

import cases
import device
import numpy as np
import pytest
import reference as ref
import row_formats as rows
import test_cache
from borders import THREADS, constants, on_threads, sizes_around
from helpers import Guarded, assert_same_bits

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

PLAN = constants("cpu/cache/cache.c")
WORTH, LONG = PLAN["PARALLEL_WRITE_TOKENS"], PLAN["LONG_WRITE_ROWS"]
SLOTS_PER_TOKEN = constants("cpu/cache/slot_shares.c")["SLOTS_PER_TOKEN"]


# --- writes --------------------------------------------------------------------------------------


def check_write(count: int, pages: int, slots: np.ndarray) -> None:
    """Tokens with a value each, so that a row shows which token wrote it last. Pages have gaps."""
    cache = test_cache.filled("padded", "bf16_512", pages=pages, block_size=16)
    kv_c = np.arange(count, dtype=np.uint16)[:, None].repeat(512, 1).view(ref.BF16)
    memory = test_cache.storage(cache)
    want = memory.copy()
    got = sparse_mla.concat_and_cache_mla(kv_c, None, cache, slots)
    assert got is cache
    after = memory.copy()
    memory[...] = want
    flat = cache.view(np.uint16)
    last = {int(slot): t for t, slot in enumerate(slots) if slot >= 0}
    if last:
        at = np.divmod(np.fromiter(last, np.int64), 16)
        flat[at] = np.fromiter(last.values(), np.uint16)[:, None]
    assert_same_bits(after, memory, f"{count} tokens, {pages} pages")


def write(counts: list[int], num_threads: int) -> None:
    """In ranges of tokens, where no two ranges share a slot, and by slots, where two do: the tokens
    beside a border of ranges, the first and the last token, or any."""
    rng = np.random.default_rng(1)
    for count in counts:
        pages = count // 16 + 2
        some = rng.permutation(16 * pages)[:count]
        ends = [count * share // num_threads for share in range(1, num_threads)]
        kinds = {"distinct": some, "few": rng.integers(0, 7, count), "absent": some.copy()}
        kinds["absent"][rng.random(count) < 0.3] = -1
        for name, (a, b) in {
            "borders": ([n - 1 for n in ends], ends),
            "first and last": ([0], [count - 1]),
            "last and first": ([count - 1], [0]),
        }.items():
            kinds[name] = some.copy()
            kinds[name][a] = kinds[name][b]
        for slots in kinds.values():
            check_write(count, pages, slots)


@pytest.mark.parametrize("num_threads", THREADS)
def test_writes(num_threads):
    """As many tokens as are worth threads, as a share lists at a time, and as ranges need."""
    counts = sizes_around(WORTH, PLAN["LISTED_TOKENS"], PLAN["FETCHED_TOKENS"], LONG * num_threads)
    on_threads(num_threads, write, counts, num_threads)


def write_sparsely(count: int) -> None:
    """A cache so large that ranges are not tried, and one that is just small enough."""
    rng = np.random.default_rng(2)
    for num_slots in sizes_around(SLOTS_PER_TOKEN * count, SLOTS_PER_TOKEN * (count + 1)):
        cache = np.zeros((num_slots, 128 + 4), np.uint8)
        keys = rows.random_keys(rng, count, 128).view(ref.BF16)
        slots = rng.permutation(num_slots)[:count]
        slots[:2] = slots[-2:]
        sparse_mla.indexer_k_quant_and_cache(keys, cache[:, None], slots, kv_format="fp8_index")
        data, scales = rows.FORMATS["fp8_index"].encode(ref.bits16(keys))
        want = np.zeros_like(cache)
        for part, at in ((data, slice(0, 128)), (scales.view(np.uint8), slice(128, 132))):
            want[slots[2:], at] = part[2:]
        assert_same_bits(cache, want, f"{num_slots} slots")


@pytest.mark.parametrize("num_threads", [2, 7])
def test_writes_to_large_caches(num_threads):
    on_threads(num_threads, write_sparsely, LONG * num_threads)


def write_formats(count: int) -> None:
    """Rows of every format, in pages with room for more rows than they have."""
    rng = np.random.default_rng(3)
    for name, form in rows.FORMATS.items():
        for layout in rows.layouts_of(name):
            pages = rows.Pages(name, layout, pages=count // 5 + 2)
            keys = rows.random_keys(rng, count, form.width)
            slots = rng.permutation(pages.pages * 5)[:count]
            scale = {"kv_scale": 0.37} if form.scales == "cache" else {}
            before = pages.memory.copy()
            op = "indexer_k_quant_and_cache" if form.width == 128 else "quantize_and_insert_k_cache"
            getattr(sparse_mla, op)(
                keys.view(ref.BF16), pages.cache, slots, **pages.options, **scale
            )
            after = pages.memory.copy()
            pages.memory[:] = before
            pages.put(slots, *form.encode(keys, 0.37))
            assert_same_bits(after, pages.memory, f"{name}, {layout}")


@pytest.mark.parametrize("num_threads", THREADS)
def test_formats(num_threads):
    on_threads(num_threads, write_formats, WORTH + 1)


# --- reads ---------------------------------------------------------------------------------------


def gather(counts: list[int]) -> None:
    """Requests of these lengths, of which the last two have a row in common: the later one wins."""
    for fmt in test_cache.FORMATS:
        block = 5
        pages = sum(-(-n // block) for n in counts)
        rng = np.random.default_rng(4)
        cache = cases.lay_out(cases.make_rows(rng, pages * block, fmt), block, "padded")
        order, table = rng.permutation(pages).astype(np.int32), []
        for n in counts:
            need = -(-n // block)
            table.append(np.append(order[:need], np.full(pages - need, -1, np.int32)))
            order = order[need:]
        lens = np.array(counts, np.int32)
        starts = np.concatenate([[0], np.cumsum(lens[:-1])]).astype(np.int32)
        starts[-1] = max(starts[-1] - 1, 0)
        test_cache.check_gather(cache, np.stack(table), lens, starts, int(lens.sum()), row_gap=8)


@pytest.mark.parametrize("num_threads", THREADS)
def test_gathers(num_threads):
    for count in sizes_around(64, num_threads):
        on_threads(num_threads, gather, [3, count, count])


def gather_last(num_requests: int, tokens: int) -> None:
    """Requests whose rows in `out` [B, M, 512] have a gap behind them."""
    rng = np.random.default_rng(5)
    pages = rows.Pages("fp8_v4", "bytes", pages=num_requests * 30)
    pages.put(np.arange(pages.pages * 5), *pages.format.encode(
        rows.random_keys(rng, pages.pages * 5, 512)))  # fmt: skip
    table = rng.permutation(pages.pages).reshape(num_requests, 30).astype(np.int32)
    lens = np.full(num_requests, 140, np.int32) - np.arange(num_requests, dtype=np.int32)
    take = np.minimum(lens, tokens).astype(np.int32)
    for gap in (0, 512, 520):
        out = Guarded((num_requests, tokens + 2, 512), ref.BF16, row_gap=gap, poison=0x5A)
        poison = np.ascontiguousarray(out.array).copy()
        sparse_mla.dequantize_and_gather_k_cache(
            out.array, pages.cache, lens, take, table, 5, 1, kv_format="fp8_v4"
        )
        for b in range(num_requests):
            positions = np.arange(lens[b] - take[b], lens[b])
            slots = table[b, positions // 5] * 5 + positions % 5
            poison[b, 1 : 1 + take[b]] = ref.to_bf16(pages.values(slots))
        assert_same_bits(np.ascontiguousarray(out.check(written=False)), poison, f"gap {gap}")


@pytest.mark.parametrize("num_threads", THREADS)
def test_gathers_to_rows_with_gaps(num_threads):
    for num_requests in (1, 2, 3):
        for tokens in sizes_around(64):
            on_threads(num_threads, gather_last, num_requests, tokens)


def dequantize(counts: list[int]) -> None:
    for count in counts:
        for pages, block in ((count, 1), (1, count), (2, count // 2)):
            cache = rows.Pages("fp8_v4", "padded", pages=pages, block_size=block)
            slots = np.arange(pages * block)
            keys = rows.random_keys(np.random.default_rng(6), len(slots), 512)
            cache.put(slots, *cache.format.encode(keys))
            got = sparse_mla.dequantize_kv_cache(cache.cache, kv_format="fp8_v4")
            want = cache.values(slots)
            assert_same_bits(np.asarray(got).reshape(len(slots), 512), want, f"{pages} x {block}")


@pytest.mark.parametrize("num_threads", THREADS)
def test_whole_caches(num_threads):
    on_threads(num_threads, dequantize, sizes_around(64))
