"""Arrays with more bytes or elements than 32 bits can count. A test takes up to 12 GiB."""

import gc

import cases
import gpu
import numpy as np
import pytest
import reference as ref
from gpu import torch
from helpers import assert_same_bf16, assert_same_bits, assert_within_bounds

import sparse_mla

GIB = 1 << 30
FORMATS = ["fp8", "bf16"]
SCALE = 0.04


@pytest.fixture(autouse=True)
def _give_back():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def poisoned_cache(fmt: str, *shape: int):
    """A cache of NaN bytes."""
    if fmt == "fp8":
        return torch.full((*shape, 656), 0xFF, dtype=torch.uint8, device="cuda")
    bits = torch.full((*shape, 576), -1, dtype=torch.int16, device="cuda")
    return bits.view(torch.bfloat16)


def on_gpu(values):
    return torch.tensor(values, device="cuda")


def far_apart(shape, dtype, stride: int):
    """A poisoned array whose first dimension is `stride` elements apart, and its storage."""
    size = ((shape[0] - 1) * stride + int(np.prod(shape[1:]))) * dtype.itemsize
    storage = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda").view(dtype)
    inner = [int(np.prod(shape[i + 1 :])) for i in range(1, len(shape))]
    return storage.as_strided(shape, [stride, *inner]), storage


# --- caches --------------------------------------------------------------------------------------


class LargeCache:
    """A cache of more than 4 GiB with a few cache rows in use: the first, those around bytes 2^31
    and 2^32, and the last."""

    def __init__(self, fmt: str, layout: str) -> None:
        size = 656 if fmt == "fp8" else 1152
        if layout == "flat":
            count = 5 * GIB // size
            self.kv = poisoned_cache(fmt, count)
            step = size
        elif layout == "paged":
            pages = 5 * GIB // size // 64
            self.kv = poisoned_cache(fmt, pages, 64)
            count, step = pages * 64, size
        else:  # pages of 3 tokens, 600 MiB apart
            assert layout == "far pages", layout
            per_page = 600 * (1 << 20) // size
            whole = poisoned_cache(fmt, 17, per_page)
            self.kv = whole[:, :3]
            count, step = 17 * 3, 0
        if layout == "far pages":
            self.slots = [0, 2, 3 * 3, 3 * 4 + 1, 3 * 7 + 2, 3 * 8, count - 1]
        else:
            around = [2**31 // step, 2**31 // step + 1, 2**32 // step, 2**32 // step + 1]
            self.slots = [0, *around, count - 1]
        self.count = count
        self.rows = cases.make_rows(np.random.default_rng(1), len(self.slots), fmt)

    def fill(self) -> None:
        rows = gpu.put(self.rows)
        if self.kv.ndim == 2:
            self.kv[on_gpu(self.slots)] = rows
            return
        block_size = self.kv.shape[1]
        for slot, row in zip(self.slots, rows, strict=True):
            self.kv[slot // block_size, slot % block_size] = row

    def read(self) -> np.ndarray:
        if self.kv.ndim == 2:
            return gpu.get(self.kv[on_gpu(self.slots)])
        block_size = self.kv.shape[1]
        picked = [self.kv[slot // block_size, slot % block_size] for slot in self.slots]
        return gpu.get(torch.stack(picked))


LAYOUTS = ["flat", "paged", "far pages"]


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_attention_to_a_large_cache(fmt, layout, num_splits):
    cache = LargeCache(fmt, layout)
    cache.fill()
    n = len(cache.slots)
    places = np.array([*range(n), -1, n] * 25, np.int32)  # n becomes a slot past the end
    places = np.stack([places, places[::-1]])
    slots = np.array([*cache.slots, cache.count, -1], np.int32)[places]
    q = cases.random_bf16(np.random.default_rng(2), 2, 24, 576)
    got = sparse_mla.sparse_attention(
        gpu.put(q), cache.kv, gpu.put(slots), softmax_scale=SCALE, num_splits=num_splits
    )
    want = ref.attention(q, cache.rows, places, softmax_scale=SCALE)
    out, lse = gpu.values(got)
    assert_within_bounds(want, {"out": out, "lse": lse})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_write_to_a_large_cache(fmt, layout):
    cache = LargeCache(fmt, layout)
    rng = np.random.default_rng(3)
    values = cases.random_bf16(rng, len(cache.slots) + 2, 576)
    slots = np.array([*cache.slots, -1, cache.count], np.int64)
    kv_c, k_pe = gpu.put(values[:, :512].copy()), gpu.put(values[:, 512:].copy())
    sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache.kv, gpu.put(slots))
    bits = ref.bits16(values[: len(cache.slots)])
    got = cache.read()
    if fmt == "fp8":
        assert_same_bits(got, ref.quantize_rows(bits[:, :512], bits[:, 512:]))
    else:
        assert_same_bits(ref.bits16(got), bits)
    for slot in cache.slots[1:-1]:  # the row in front must be untouched
        neighbour = slot - 1
        if neighbour in cache.slots or neighbour < 0:
            continue
        flat = cache.kv.ndim == 2
        page, offset = divmod(neighbour, 1 if flat else cache.kv.shape[1])
        row = cache.kv[neighbour] if flat else cache.kv[page, offset]
        assert bool((row.contiguous().view(torch.uint8) == 0xFF).all()), f"slot {neighbour}"


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("fmt", FORMATS)
def test_gather_from_a_large_cache(fmt, layout):
    """Each request has one page, the only column of its block table, and one token in it."""
    cache = LargeCache(fmt, layout)
    cache.fill()
    pages, offsets = np.divmod(np.array(cache.slots), cache.kv.shape[1])
    n = len(pages)
    out = torch.zeros((n, 576), dtype=torch.bfloat16, device="cuda")
    sparse_mla.gather_kv_cache(
        cache.kv,
        gpu.put(pages[:, None].astype(np.int32)),
        gpu.put(np.ones(n, np.int32)),
        gpu.put(np.arange(n, dtype=np.int32)),
        seq_starts=gpu.put(offsets.astype(np.int32)),
        out=out,
    )
    want = ref.upconvert_rows(cache.rows) if fmt == "fp8" else ref.bits16(cache.rows)
    assert_same_bf16(gpu.get(out), want)


def test_gather_to_rows_beyond_32_bits():
    """The gather writes to out past element 2^31 and byte 2^32."""
    rows = cases.make_rows(np.random.default_rng(4), 64, "fp8")
    first = 2**31 // 576 + 5
    out = torch.zeros((first + 64, 576), dtype=torch.bfloat16, device="cuda")
    one = np.zeros(1, np.int32)
    sparse_mla.gather_kv_cache(
        gpu.put(rows.reshape(1, 64, 656)),
        gpu.put(one[None]),
        gpu.put(one + 64),
        gpu.put(one + first),
        out=out,
    )
    assert_same_bf16(gpu.get(out[first:]), ref.upconvert_rows(rows))
    assert not bool(out[first - 64 : first].any())
    assert not bool(out[:64].any())


# --- the arrays of attention, merge and the quantiser --------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("name", ["q", "out", "indices"])
def test_attention_with_tokens_far_apart(name, num_splits):
    """Token strides are so large that the third token is past element 2^31."""
    case = cases.AttentionCase(3, 4, 200, pages=8, num_splits=num_splits).make()
    arrays = {
        "q": gpu.put(case.q),
        "indices": gpu.put(case.indices),
        "out": gpu.put(np.zeros((3, 4, 512), ref.BF16)),
    }
    near = arrays[name]
    stride = 1_100_000_000
    far, storage = far_apart(near.shape, near.dtype, stride)
    if name != "out":
        far.copy_(near)
    arrays[name] = far
    got = sparse_mla.sparse_attention(
        arrays["q"],
        gpu.put(case.kv),
        arrays["indices"],
        **case.options,
        num_splits=num_splits,
        out=arrays["out"],
    )
    assert got[0] is arrays["out"]
    out, lse = gpu.get(got[0].contiguous()), gpu.get(got[1])
    assert_within_bounds(case.reference(), {"out": out, "lse": lse})
    row = near[0].numel()
    for gap in (storage[row : row + 4096], storage[stride + row : stride + row + 4096]):
        assert bool((gap.view(torch.uint8) == 0x7F).all()), "a write between the rows"


def test_merge_with_tokens_far_apart():
    rng = np.random.default_rng(5)
    state = [cases.random_bf16(rng, 3, 2, 512), rng.normal(0, 1, (3, 2)).astype(np.float32)] * 2
    near = [gpu.put(x) for x in state]
    want = gpu.values(sparse_mla.merge_attn_states(*near))
    far, _ = far_apart((3, 2, 512), torch.bfloat16, 1_100_000_000)
    far.copy_(near[0])
    out, _ = far_apart((3, 2, 512), torch.bfloat16, 1_100_000_000)
    got = sparse_mla.merge_attn_states(far, *near[1:], out=out)
    assert_same_bits(gpu.get(got[0].contiguous()), want[0])
    assert_same_bits(gpu.get(got[1]), want[1])


def test_quantiser_of_more_than_2_31_elements():
    """The largest value is the last one, and every part has the bytes that it has in a small
    array."""
    part = np.random.default_rng(6).normal(0, 1, 1 << 20).astype(np.float32)
    part = np.clip(part, -4, 4)
    count = 2**31 // len(part) + 3
    x = gpu.put(part).to(torch.bfloat16).repeat(count)
    x[-1] = 7.0
    codes, scale = sparse_mla.dynamic_per_tensor_quant(x)
    assert float(scale) == np.float32(7.0) / np.float32(448)
    value = ref.to_f32(ref.bf16_encode(part))
    want = gpu.put(ref.e4m3_encode(value / np.float32(float(scale))))
    codes = codes.view(torch.uint8).view(count, len(part))
    codes[-1, -1] = want[-1]
    assert bool((codes == want).all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_many_tokens(fmt):
    """There are more tokens than a grid's second and third dimensions hold, each with one key."""
    tokens = 70_000
    rows = cases.make_rows(np.random.default_rng(7), 64, fmt)
    q = cases.random_bf16(np.random.default_rng(8), 8, 2, 576)
    which = np.arange(tokens) % 8
    indices = (np.arange(tokens, dtype=np.int32) % 64)[:, None]
    got = sparse_mla.sparse_attention(
        gpu.put(q)[torch.from_numpy(which).cuda()],
        gpu.put(rows),
        gpu.put(indices),
        softmax_scale=SCALE,
    )
    want = ref.attention(q[which[:64]], rows, indices[:64], softmax_scale=SCALE)
    out, lse = gpu.values(got)
    assert_within_bounds(want, {"out": out[:64], "lse": lse[:64]})
    repeats = np.resize(np.arange(64), tokens)
    assert_same_bits(out, out[repeats])
    assert_same_bits(lse, lse[repeats])
