"""Random inputs of attention in device memory. Caches are made by PyTorch alone, so that attention
is not judged on what another operator of this library wrote."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.cuda.timing import DEVICE, Array, memory_bytes, torch
from sparse_mla._rows import BF16_ROW_BYTES, FP8_ROW_BYTES, KEY_DIM, KV_LORA_RANK, ROPE_BYTES

NUM_SAMPLES = 512
BLOCK_SIZE = 64
ROW_BYTES = {
    "fp8_ds_mla": FP8_ROW_BYTES,
    "bfloat16": BF16_ROW_BYTES,
    "bfloat16_512": 2 * KV_LORA_RANK,
}
CHUNK_TOKENS = 1 << 18
FLT_MIN = 2.0**-126
SOFTMAX_SCALE = (128 + 64) ** -0.5
REQUEST_TOKENS = 36864  # slots per request; lengths vary around 32k
MEAN_TOKENS = 32768


@dataclass
class Inputs:
    """What one call of attention is given, and what its judge must know.

    q [T, H, 576] bf16, or 512 values where keys have 512; kv a paged cache or a workspace [tokens,
    576]; indices [T, K] int32, below 0 for none, with at least one key per token; sink [H] fp32 or
    None.
    """

    q: Array
    kv: Array
    indices: Array
    scale: float = SOFTMAX_SCALE
    sink: Array = None
    num_reqs: int = 1
    spare: int = 0  # the first slot of kv that belongs to no request
    notable: tuple[int, ...] = ()  # tokens that the judge takes in addition
    nan_token: int | None = None  # the token that selects a NaN; its results must be NaN

    @property
    def rows(self) -> Array:
        """kv as rows [slots, row]; a view."""
        return self.kv.view(-1, self.kv.shape[-1])


@dataclass
class Requests:
    """A paged cache [pages, 64, row], and `starts` [R] and `lengths` [R] of the slots that each
    request owns. Slots from `spare` on belong to no request."""

    kv: Array
    starts: Array
    lengths: Array
    spare: int = field(init=False)

    def __post_init__(self) -> None:
        self.spare = int((self.starts + self.lengths).max())

    def draw(
        self, num_reqs: int, query_len: int, num_heads: int, topk: int, first: int = 0
    ) -> Inputs:
        """N(0, 1) queries of `num_reqs` requests from `first` on, starting over after the last."""
        requests = (torch.arange(num_reqs, device=DEVICE) + first) % len(self.starts)
        requests = requests.repeat_interleave(query_len)
        row = self.kv.shape[-1]
        head_dim = KEY_DIM if row == FP8_ROW_BYTES else row
        q = torch.randn(len(requests), num_heads, head_dim, device=DEVICE).bfloat16()
        indices = draw_slots(self.starts[requests], self.lengths[requests], topk)
        return Inputs(q, self.kv, indices, num_reqs=num_reqs, spare=self.spare)


def make_requests(num_reqs: int, kv_format: str, topk: int, num_spare: int = 0) -> Requests:
    """Requests in a quarter of the device's memory at most, and spare slots behind them."""
    affordable = memory_bytes() // 4 // ROW_BYTES[kv_format] // num_reqs
    tokens = max(topk, min(REQUEST_TOKENS, affordable)) // BLOCK_SIZE * BLOCK_SIZE
    least = max(topk, 2 * MEAN_TOKENS * tokens // REQUEST_TOKENS - tokens)
    num_spare = -(-num_spare // BLOCK_SIZE) * BLOCK_SIZE
    kv = make_cache(num_reqs * tokens + num_spare, kv_format)
    starts = torch.arange(num_reqs, device=DEVICE) * tokens
    lengths = torch.randint(least, tokens + 1, (num_reqs,), device=DEVICE)
    return Requests(kv, starts, lengths)


def make_cache(num_tokens: int, kv_format: str) -> Array:
    """[pages, 64, row] of N(0, 1) values; FP8 rows with fp32 scales as a cache write makes them."""
    is_fp8 = kv_format == "fp8_ds_mla"
    dtype = torch.uint8 if is_fp8 else torch.bfloat16
    shape = (num_tokens // BLOCK_SIZE, BLOCK_SIZE, ROW_BYTES[kv_format] // dtype.itemsize)
    cache = torch.empty(shape, dtype=dtype, device=DEVICE)
    for rows in cache.view(-1, shape[-1]).split(CHUNK_TOKENS):
        head_dim = KEY_DIM if is_fp8 else shape[-1]
        rows.copy_(encode_keys(torch.randn(len(rows), head_dim, device=DEVICE), is_fp8))
    return cache


def encode_keys(keys: Array, is_fp8: bool) -> Array:
    """[n, 576] fp32 -> cache rows, [n, 656] bytes of fp8_ds_mla or [n, 576] bf16."""
    return quantise(keys) if is_fp8 else keys.bfloat16()


def decode_rows(rows: Array) -> Array:
    """Cache rows of either format -> keys [n, 576] fp32."""
    if rows.shape[1] != FP8_ROW_BYTES:
        return rows.float()
    values, scales, rope = split_rows(rows)
    return torch.cat([(values.float() * scales).view(-1, KV_LORA_RANK), rope.float()], dim=1)


def quantise(keys: Array) -> Array:
    """[n, 576] fp32 -> [n, 656] bytes of fp8_ds_mla."""
    tiles = keys[:, :KV_LORA_RANK].view(-1, 4, 128)
    scale = (tiles.abs().amax(-1) / 448).clamp_min(FLT_MIN)
    values = (tiles / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = (values.view(-1, KV_LORA_RANK), scale, keys[:, KV_LORA_RANK:].bfloat16())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def split_rows(rows: Array) -> tuple[Array, Array, Array]:
    """[n, 656] bytes -> e4m3 values [n, 4, 128], scales [n, 4, 1] fp32, RoPE [n, 64] bf16."""
    values = rows[:, :KV_LORA_RANK].contiguous().view(torch.float8_e4m3fn).view(-1, 4, 128)
    scales = rows[:, KV_LORA_RANK:-ROPE_BYTES].contiguous().view(torch.float32)[..., None]
    return values, scales, rows[:, -ROPE_BYTES:].contiguous().view(torch.bfloat16)


def upconvert(cache: Array) -> Array:
    """A paged FP8 cache -> the bf16 workspace [tokens, 576] that prefill gathers from it."""
    rows = cache.view(-1, FP8_ROW_BYTES)
    workspace = torch.empty(len(rows), KEY_DIM, dtype=torch.bfloat16, device=rows.device)
    for source, target in zip(rows.split(CHUNK_TOKENS), workspace.split(CHUNK_TOKENS), strict=True):
        target.copy_(decode_rows(source))
    return workspace


def draw_slots(starts: Array, lengths: Array, topk: int) -> Array:
    """[T, K] int32: for each token K slots of its request, spread over the request's length, in
    random order and hardly ever one twice. starts and lengths [T] give the request's slots."""
    shape = (len(starts), topk)
    columns = torch.arange(topk, device=DEVICE) + torch.rand(shape, device=DEVICE)
    positions = (columns * (lengths[:, None] / topk)).long().minimum(lengths[:, None] - 1)
    order = torch.rand(shape, device=DEVICE).argsort(dim=1)
    return (starts[:, None] + positions.gather(1, order)).int()


def sample(size: int) -> Array:
    """Some random numbers of 0...size - 1, on the device."""
    return torch.randint(size, (min(size, NUM_SAMPLES),), device=DEVICE)
