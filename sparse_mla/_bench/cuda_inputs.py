"""Random inputs of attention in device memory. Caches are made by PyTorch alone, so that attention
is not judged on what another operator of this library wrote."""

from __future__ import annotations

from sparse_mla._bench.cuda_timing import DEVICE, Array, torch

BLOCK_SIZE = 64
FP8_ROW_BYTES = 656
CHUNK_TOKENS = 1 << 18
FLT_MIN = 2.0**-126


def make_cache(num_tokens: int, kv_format: str) -> Array:
    """[pages, 64, row] of N(0, 1) values; FP8 rows with fp32 scales as a cache write makes them."""
    is_fp8 = kv_format == "fp8_ds_mla"
    shape = (num_tokens // BLOCK_SIZE, BLOCK_SIZE, FP8_ROW_BYTES if is_fp8 else 576)
    dtype = torch.uint8 if is_fp8 else torch.bfloat16
    cache = torch.empty(shape, dtype=dtype, device=DEVICE)
    for rows in cache.view(-1, shape[-1]).split(CHUNK_TOKENS):
        keys = torch.randn(len(rows), 576, device=DEVICE)
        rows.copy_(quantise(keys) if is_fp8 else keys)
    return cache


def quantise(keys: Array) -> Array:
    """[n, 576] fp32 -> [n, 656] bytes of fp8_ds_mla."""
    tiles = keys[:, :512].view(-1, 4, 128)
    scale = (tiles.abs().amax(-1) / 448).clamp_min(FLT_MIN)
    values = (tiles / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = (values.view(-1, 512), scale, keys[:, 512:].bfloat16())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def split_rows(rows: Array) -> tuple[Array, Array, Array]:
    """[n, 656] bytes -> e4m3 values [n, 4, 128], scales [n, 4, 1] fp32, RoPE [n, 64] bf16."""
    values = rows[:, :512].contiguous().view(torch.float8_e4m3fn).view(-1, 4, 128)
    scales = rows[:, 512:528].contiguous().view(torch.float32)[..., None]
    return values, scales, rows[:, 528:].contiguous().view(torch.bfloat16)


def upconvert(cache: Array) -> Array:
    """A paged FP8 cache -> the bf16 workspace [tokens, 576] that prefill gathers from it."""
    rows = cache.view(-1, FP8_ROW_BYTES)
    workspace = torch.empty(len(rows), 576, dtype=torch.bfloat16, device=rows.device)
    for source, target in zip(rows.split(CHUNK_TOKENS), workspace.split(CHUNK_TOKENS), strict=True):
        values, scales, rope = split_rows(source)
        target[:, :512] = (values.float() * scales).view(-1, 512)
        target[:, 512:] = rope
    return workspace


def draw_slots(starts: Array, lengths: Array, topk: int) -> Array:
    """[T, K] int32: for each token K positions of its request, all over its length and in random
    order, hardly ever one twice. starts, lengths: [T] of the slots that the request owns."""
    shape = (len(starts), topk)
    columns = torch.arange(topk, device=DEVICE) + torch.rand(shape, device=DEVICE)
    positions = (columns * (lengths[:, None] / topk)).long().minimum(lengths[:, None] - 1)
    order = torch.rand(shape, device=DEVICE).argsort(dim=1)
    return (starts[:, None] + positions.gather(1, order)).int()
