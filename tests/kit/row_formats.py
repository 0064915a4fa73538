"""The formats of keys of 512 values and of the indexer's keys, and fp8_e4m3 of 576, from
docs/formats.md: a reference that shares nothing with csrc. `reference.py` has fp8_ds_mla, and the
conversions of bf16 and e4m3.

A row is two parts here, its data and its scales; `Pages` puts them where they belong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import reference as ref

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


_E2M1_MIDPOINTS = (E2M1_VALUES[:-1].astype(np.float64) + E2M1_VALUES[1:]) / 2


def e2m1_encode(x: np.ndarray) -> np.ndarray:
    """float32 -> codes 0 to 15: the nearest value, ties to the even code, NaN -> 7."""
    x = np.asarray(x, np.float32)
    magnitude = np.where(np.isnan(x), np.float32(0), np.abs(x)).astype(np.float64)
    code = np.searchsorted(_E2M1_MIDPOINTS, magnitude, side="left")
    tie = (code < 7) & (magnitude == _E2M1_MIDPOINTS[np.minimum(code, 6)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return np.where(np.isnan(x), 7, code | np.where(np.signbit(x), 8, 0)).astype(np.uint8)


def e2m1_decode(codes: np.ndarray) -> np.ndarray:
    value = E2M1_VALUES[codes & 7]
    return np.where(codes & 8, -value, value).astype(np.float32)


def join_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes [n, 2 m] -> bytes [n, m], the first of two in the lower half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def split_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), 2 * packed.shape[1])


def ue8m0_decode(exponents: np.ndarray) -> np.ndarray:
    value = np.ldexp(1.0, exponents.astype(np.int64) - 127)
    return np.where(exponents == 255, np.nan, value).astype(np.float32)


def power_scale(amax: np.ndarray, top: float, least: float) -> np.ndarray:
    """The smallest power of two s with top * s >= max(amax, least), as float64."""
    want = np.maximum(amax.astype(np.float64), least)
    exponent = np.frexp(want)[1] - np.frexp(top)[1] - 1  # too small by at most two
    for _ in range(3):
        exponent += np.ldexp(top, exponent) < want
    scale = np.ldexp(1.0, exponent)
    assert (top * scale >= want).all()
    assert (top * scale / 2 < want).all()
    return scale


def amax_of(tiles: np.ndarray) -> np.ndarray:
    magnitude = np.where(np.isnan(tiles), 0, np.minimum(np.abs(tiles), ref.FLT_MAX))
    return magnitude.max(-1).astype(np.float32)


@dataclass(frozen=True)
class Format:
    name: str
    width: int  # values of a key
    data_bytes: int
    scale_bytes: int
    codes: str  # "bf16", "e4m3" or "e2m1"
    scales: str  # "none", "any fp32", "fp32", "ue8m0", "e4m3" or "cache"
    tile: int = 0
    rope: int = 0
    least: float = 0.0
    split: bool = False
    alignment: int = 16
    divides: bool = False  # codes are x / kv_scale, where others are x * (1 / kv_scale)

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @property
    def row_shape(self) -> tuple[int, np.dtype]:
        """Last dimension and dtype of a cache."""
        is_bf16 = self.codes == "bf16"
        return (self.width, ref.BF16) if is_bf16 else (self.row_bytes, np.dtype(np.uint8))

    @property
    def needs_name(self) -> bool:
        """Whether dtype and last dimension fit another format, too."""
        return sum(f.row_shape == self.row_shape for f in ALL_FORMATS.values()) > 1

    def encode(self, bits: np.ndarray, kv_scale=1.0) -> tuple[np.ndarray, np.ndarray]:
        """bf16 patterns [n, width] -> bytes of data and of scales."""
        n, nope = len(bits), self.width - self.rope
        no_scales = np.zeros((n, self.scale_bytes), np.uint8)
        if self.codes == "bf16":
            return np.ascontiguousarray(bits).view(np.uint8), no_scales
        x = ref.bf16_decode(bits[:, :nope])
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if self.scales == "cache":
                scale = np.float32(kv_scale)
                codes, scales = x / scale if self.divides else x * (1 / scale), no_scales
            else:
                tiles = x.reshape(n, nope // self.tile, self.tile)
                scale, scales = self._scales(amax_of(tiles))
                codes = (tiles / scale[..., None]).reshape(n, nope)
        encode = ref.e4m3_encode if self.codes == "e4m3" else e2m1_encode
        data = encode(codes.astype(np.float32))
        data = data if self.codes == "e4m3" else join_nibbles(data)
        rope = np.ascontiguousarray(bits[:, nope:]).view(np.uint8)
        return np.concatenate([data, rope], 1), scales

    def _scales(self, amax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Maxima [n, tiles] -> the scales as float32, and their bytes."""
        top = 448.0 if self.codes == "e4m3" else 6.0
        if self.scales == "any fp32":
            scale = np.maximum(amax / np.float32(top), ref.FLT_MIN).astype(np.float32)
            return scale, scale.view(np.uint8)
        if self.scales == "e4m3":
            quotient = np.clip(amax / np.float32(6), np.float32(2.0**-9), np.float32(448))
            codes = ref.e4m3_encode(quotient)
            return ref.e4m3_decode(codes), codes
        scale = power_scale(amax, top, self.least)
        if self.scales == "fp32":
            return scale.astype(np.float32), scale.astype(np.float32).view(np.uint8)
        codes = (np.log2(scale) + 127).astype(np.uint8)
        padding = np.zeros((len(codes), self.scale_bytes - codes.shape[1]), np.uint8)
        return scale.astype(np.float32), np.concatenate([codes, padding], 1)

    def decode(self, data: np.ndarray, scales: np.ndarray, kv_scale=1.0) -> np.ndarray:
        """Bytes -> float32 [n, width]; the products in fp32."""
        n, nope = len(data), self.width - self.rope
        rope = ref.bf16_decode(
            np.ascontiguousarray(data[:, self.data_bytes - 2 * self.rope :]).view("u2")
        )
        if self.codes == "bf16":
            return ref.bf16_decode(np.ascontiguousarray(data).view(np.uint16))
        if self.codes == "e4m3":
            value = ref.e4m3_decode(np.ascontiguousarray(data[:, :nope]))
        else:
            value = e2m1_decode(split_nibbles(data))
        if self.scales == "cache":
            scale = np.full((n, 1), kv_scale, np.float32)
        else:
            count = nope // self.tile
            if self.scales in ("fp32", "any fp32"):
                scale = np.ascontiguousarray(scales).view(np.float32)
            elif self.scales == "ue8m0":
                scale = ue8m0_decode(scales[:, :count])
            else:
                scale = ref.e4m3_decode(np.ascontiguousarray(scales))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            tiles = value.reshape(n, scale.shape[1], nope // scale.shape[1])
            value = (tiles * scale[..., None]).reshape(n, nope)
        return np.concatenate([value, rope], 1)


MXFP4_LEAST = 6 * 2.0**-126
_V41 = {"codes": "e4m3", "scales": "ue8m0", "tile": 32, "least": 1e-4}
_FP4 = {"codes": "e2m1", "scales": "e4m3", "tile": 16}
FORMATS = {
    f.name: f
    for f in (
        Format("bfloat16", 512, 1024, 0, "bf16", "none", alignment=2),
        Format("fp8_v4", 512, 576, 8, "e4m3", "ue8m0", 64, 64, 1e-4, split=True, alignment=8),
        Format("fp8_e4m3", 512, 512, 0, "e4m3", "cache"),
        Format("fp8_index", 128, 128, 4, "e4m3", "fp32", 128, 0, 1e-4, split=True, alignment=4),
        Format(
            "mxfp4_index",
            128,
            64,
            4,
            "e2m1",
            "ue8m0",
            32,
            0,
            6 * 2.0**-126,
            split=True,
            alignment=4,
        ),
        Format("fp8_v41", 512, 512, 16, **_V41),
        Format("fp8_v41_split", 512, 512, 16, **_V41, split=True),
        Format("fp4_v41", 512, 256, 32, **_FP4),
        Format("fp4_v41_split", 512, 256, 32, **_FP4, split=True),
        Format("fp8_nope", 512, 512, 16, "e4m3", "any fp32", 128),
    )
}
# Keys with RoPE: 512 values of the latent, then 64 of RoPE, all of them codes.
E4M3_576 = "fp8_e4m3_576"
ALL_FORMATS = FORMATS | {E4M3_576: Format("fp8_e4m3", 576, 576, 0, "e4m3", "cache", divides=True)}
KEY_FORMATS = [name for name, f in FORMATS.items() if f.width == 512]
INDEX_FORMATS = [name for name, f in FORMATS.items() if f.width == 128]


class Pages:
    """A cache of random bytes, with random bytes between its pages, in one of these layouts:

    paged      [pages, block_size, row]
    mqa        [pages, block_size, 1, row]
    padded     [pages, block_size, row], pages with room for another row and some more units of the
               format's alignment
    bytes      [pages, page bytes], for split pages; the pages have the same room
    flat       [S, row], for other formats
    """

    def __init__(self, name: str, layout="paged", *, pages=4, block_size=5, seed=0) -> None:
        self.format = f = ALL_FORMATS[name]
        self.pages, self.block_size = pages, block_size
        room = (-(-f.row_bytes // f.alignment) + 3) * f.alignment
        gap = room if layout in ("padded", "bytes") else 0
        self.page_bytes = block_size * f.row_bytes
        self.stride = self.page_bytes + gap
        rng = np.random.default_rng(seed)
        size = pages * self.stride + 64
        memory = np.zeros(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        self.memory = memory[start : start + size]
        self.memory[:] = rng.integers(0, 256, size, dtype=np.uint8)
        row, dtype = f.row_shape
        rows = np.lib.stride_tricks.as_strided(
            self.memory.view(dtype)[:row],
            (pages, block_size, row),
            (self.stride, f.row_bytes, dtype.itemsize),
        )
        if layout == "mqa":
            self.cache = rows[:, :, None]
        elif layout == "flat":
            self.cache = rows.reshape(-1, row)
            assert np.shares_memory(self.cache, self.memory)
        elif layout == "bytes":
            self.cache = self.memory[: pages * self.stride].reshape(pages, self.stride)
        else:
            self.cache = rows
        self.layout = layout

    @property
    def options(self) -> dict:
        """The keywords that a call with this cache needs."""
        is_bytes = self.layout == "bytes"
        found = {"kv_format": self.format.name} if is_bytes or self.format.needs_name else {}
        return found | ({"block_size": self.block_size} if is_bytes else {})

    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """The data and the scales of all tokens: views [pages, block_size, bytes] of the memory."""
        f = self.format
        if f.split:
            starts, steps = (0, self.block_size * f.data_bytes), (f.data_bytes, f.scale_bytes)
        else:
            starts, steps = (0, f.data_bytes), (f.row_bytes, f.row_bytes)
        return tuple(
            np.lib.stride_tricks.as_strided(
                self.memory[start:], (self.pages, self.block_size, size), (self.stride, step, 1)
            )
            for start, step, size in zip(starts, steps, (f.data_bytes, f.scale_bytes), strict=True)
        )

    def _at(self, slots) -> tuple[np.ndarray, np.ndarray]:
        return np.divmod(np.asarray(slots, np.int64), self.block_size)

    def put(self, slots, data: np.ndarray, scales: np.ndarray) -> None:
        """Writes one row per slot; negative slots are skipped."""
        slots = np.asarray(slots, np.int64)
        keep = slots >= 0
        at = self._at(slots[keep])
        for part, rows in zip(self._parts(), (data, scales), strict=True):
            part[at] = rows[keep]

    def get(self, slots) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of data and of scales, one row per slot."""
        at = self._at(slots)
        data, scales = self._parts()
        return data[at], scales[at]

    def values(self, slots, kv_scale=1.0) -> np.ndarray:
        return self.format.decode(*self.get(slots), kv_scale)


def layouts_of(name: str) -> list[str]:
    return ["paged", "mqa", "padded", "bytes" if FORMATS[name].split else "flat"]


def random_keys(rng, n: int, width: int) -> np.ndarray:
    """bf16 patterns [n, width]: tiles of sizes from subnormal to huge, of zeros and below every
    floor, with NaN, infinities and both zeros among them."""
    size = 10.0 ** rng.uniform(-12, 6, (n, width // 16, 1))
    size[rng.random(size.shape) < 0.05] = 0
    size[rng.random(size.shape) < 0.05] = 1e-38
    size[rng.random(size.shape) < 0.02] = 1e38
    # Neighbouring tiles of 16 often have one size, so that wider tiles are not all alike.
    size = np.where(rng.random((n, 1, 1)) < 0.5, size[:, :1], size)
    with np.errstate(over="ignore"):
        bits = ref.bf16_encode((rng.normal(0, 1, (n, width // 16, 16)) * size).astype(np.float32))
    bits = bits.reshape(n, width)
    some = rng.random(bits.shape)
    for code, low in zip((0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0001), range(6), strict=True):
        chosen = (some > low * 1e-3) & (some < (low + 0.3) * 1e-3)
        bits[chosen] = code
    return bits


def random_patterns(rng, n: int, width: int) -> np.ndarray:
    """Keys as random_keys makes them, and NaN of all payloads, as random bits whose exponents are
    changed. This is ten times as fast."""
    bits = rng.integers(0, 2**16, (n, width), np.uint16)
    tiles = bits.reshape(n, width // 16, 16)
    # The largest exponent of a tile is any, or near that of 1, and often that of the whole row.
    shape = (n, width // 16, 1)
    top = rng.integers(0, 255, shape, np.uint16)
    top = np.where(rng.random(shape) < 0.5, rng.integers(110, 140, shape, np.uint16), top)
    top = np.where(rng.random((n, 1, 1)) < 0.5, top[:, :1], top)
    below = tiles >> 7 & 15
    tiles &= 0x807F
    tiles |= (np.maximum(top, below) - below) << 7
    is_zero = rng.random((n, width // 128, 1)) < 0.03
    is_zero = is_zero.repeat(8, 1) | (rng.random(shape) < 0.03)
    tiles &= np.where(is_zero, 0x8000, 0xFFFF).astype(np.uint16)
    flat = bits.reshape(-1)
    for kept in (0x807F, 0x8000):  # NaN, then infinities
        places = rng.integers(0, flat.size, flat.size // 1000)
        flat[places] = flat[places] & kept | 0x7F80
    return bits
