"""Inputs: the tables of cases that the tests share.

Everything is made in NumPy from a seed; `helpers.FRAMEWORKS` moves arrays to other frameworks.
Inputs are adversarial by default: cache rows that no index selects are NaN, and index lists hold
-1, duplicates and values past both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import reference as ref

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def bf16(*shape) -> np.ndarray:
    """Ones."""
    return np.ones(shape, ref.BF16)


def e4m3(*shape) -> np.ndarray:
    """Ones."""
    return np.ones(shape, ref.E4M3)


def random_bf16(rng, *shape, std=1.0) -> np.ndarray:
    return ref.to_bf16(rng.normal(0, std, shape))


def angles(max_pos=50) -> np.ndarray:
    """A table of cosines and sines [max_pos, 64] fp32."""
    turn = np.random.default_rng(3).uniform(-7, 7, (max_pos, 32))
    return np.concatenate([np.cos(turn), np.sin(turn)], 1).astype(np.float32)


def picker(rng):
    """A function that returns one of its arguments, drawn by `rng`."""
    return lambda *choices: choices[rng.integers(len(choices))]


def storage(view: np.ndarray) -> np.ndarray:
    """The whole memory that a view points into, as bytes."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view.view(np.uint8)


# --- cached tokens -------------------------------------------------------------------------------


def _latent_values(rng, n: int, data: str) -> np.ndarray:
    """Keys before they are encoded, float32 [n, 576]; `data` names their distribution."""
    value = rng.normal(0, 1, (n, ref.HEAD_DIM))
    if data == "outlier":  # a few channels and keys are orders of magnitude larger
        value[:, rng.integers(0, ref.HEAD_DIM, 4)] *= 300
        value[rng.integers(0, max(n, 1), max(n // 16, 1))] *= 20
    elif data == "heavy":
        value = np.clip(rng.standard_t(1.2, value.shape), -1e4, 1e4)
    elif data == "monotone":  # logits rise with the slot: every tile moves the running maximum
        value *= 0.05
        value[:, : ref.V_DIM] += np.linspace(-1, 1, max(n, 1))[:n, None]
    elif data == "huge":
        value *= 100
    elif data == "tiles":  # each tile of 128 values has its own magnitude
        tiles = value[:, : ref.V_DIM].reshape(n, -1, ref.TILE)
        tiles *= 10.0 ** rng.uniform(-3, 0.5, (*tiles.shape[:2], 1))
    return value.astype(np.float32)


def head_dim(fmt: str) -> int:
    """Number of values in a key of format `fmt`."""
    return ref.V_DIM if fmt == "bf16_512" else ref.HEAD_DIM


def rope_dim(fmt: str) -> int:
    return head_dim(fmt) - ref.V_DIM


def cancel_neighbours(rows: np.ndarray) -> None:
    """Makes every second FP8 row of [n, 656] the row before it, with its NoPE values negated.
    Queries without a NoPE part give both keys the same weight, so the exact sum of their values is
    0. What a kernel adds up is rounding error, which shows the order of its additions."""
    rows[1::2] = rows[: len(rows) // 2 * 2 : 2]
    rows[1::2, : ref.V_DIM] ^= 0x80


def encode_keys(keys: np.ndarray, fmt: str) -> np.ndarray:
    """Keys [n, 576] as cache rows: [n, 656] uint8 for "fp8" and "fp8_token", [n, 576] bf16 for
    "bf16", and [n, 512] bf16 for "bf16_512", which drops the RoPE part."""
    bits = ref.bf16_encode(keys)
    if fmt == "bf16_512":
        return np.ascontiguousarray(bits[:, : ref.V_DIM]).view(ref.BF16)
    if fmt == "bf16":
        return bits.view(ref.BF16)
    return ref.quantize_rows(bits[:, : ref.V_DIM], bits[:, ref.V_DIM :], fmt == "fp8_token")


def make_rows(rng, n: int, fmt: str, data: str = "normal") -> np.ndarray:
    """n cache rows with values from `data`, in the shape and dtype of `encode_keys`."""
    rows = encode_keys(_latent_values(rng, n, data), fmt)
    if fmt != "fp8":
        return rows
    scales = rows[:, 512:528].view(np.float32)
    if data == "pow2":
        scales[:] = np.exp2(np.floor(np.log2(scales)))
    elif data == "wide":  # each row mixes scales from 1e-30 to 1e4
        scales[:] = 10.0 ** rng.uniform(-30, 4, scales.shape)
        scales[np.arange(n), rng.integers(0, 4, n)] = 1e4
    elif data == "subnormal":  # every e4m3 subnormal and both zeros
        rows[:, :512] = rng.integers(0, 8, (n, 512)) | (rng.integers(0, 2, (n, 512)) << 7)
        scales[:] = rng.uniform(50, 150, scales.shape)
    return rows


def poisoned_storage(shape, dtype) -> np.ndarray:
    """An array whose bytes are all 0xFF: NaN as e4m3, fp32 and bf16."""
    array = np.empty(shape, dtype)
    array.view(np.uint8).fill(0xFF)
    return array


def lay_out(rows: np.ndarray, block_size: int, layout: str) -> np.ndarray:
    """Rows [pages * block_size, width] as a cache of the given layout, its gaps filled with NaN."""
    num_slots, width = rows.shape
    pages = num_slots // block_size
    paged = rows.reshape(pages, block_size, width)
    gap = 16 // rows.itemsize
    if layout == "flat":
        return rows
    if layout == "mqa":
        return rows.reshape(pages, block_size, 1, width)
    if layout == "negative":
        return np.ascontiguousarray(paged[::-1])[::-1]
    if layout == "zero":  # every page is the same memory
        strides = (0, *paged.strides[1:])
        return np.lib.stride_tricks.as_strided(paged[0], paged.shape, strides)
    if layout == "padded":
        view = poisoned_storage((pages, block_size + 1, width), rows.dtype)[:, :block_size]
    elif layout == "interleaved":
        view = poisoned_storage((pages, 3, block_size, width), rows.dtype)[:, 1]
    elif layout == "token_stride":
        view = poisoned_storage((pages, block_size, width + gap), rows.dtype)[..., :width]
    elif layout == "odd_stride":  # bf16 only: rows are aligned to 2 bytes and no more
        view = poisoned_storage((pages, block_size, width + 1), rows.dtype)[..., 1:]
    else:
        assert layout == "paged", layout
        return paged
    view[...] = paged
    return view


def lay_out_q(q: np.ndarray, layout: str):
    num_tokens, num_heads, dim = q.shape
    if layout == "compact":
        return q
    if layout == "pair":
        return np.ascontiguousarray(q[..., :512]), np.ascontiguousarray(q[..., 512:])
    if layout == "pair_views":  # both halves point into one buffer
        return q[..., :512], q[..., 512:]
    if layout == "head_major":
        return np.ascontiguousarray(q.swapaxes(0, 1)).swapaxes(0, 1)
    if layout == "negative":
        return np.ascontiguousarray(q[::-1, ::-1])[::-1, ::-1]
    if layout == "zero":  # every token and head reads the same 576 values
        return np.broadcast_to(q[:1, :1], q.shape)
    assert layout == "odd_stride", layout
    view = poisoned_storage((num_tokens, num_heads + 2, dim + 3), q.dtype)[:, 1:-1, 3:]
    view[...] = q
    return view


# --- attention -----------------------------------------------------------------------------------


@dataclass
class AttentionInputs:
    q: object
    kv: np.ndarray
    indices: np.ndarray
    options: dict
    num_splits: int = 0

    def reference(self) -> ref.Attention:
        return ref.attention(self.q, self.kv, self.indices, **self.options)

    def run(self, op, put=lambda x: x, **more):
        """Calls op(q, kv, indices, ...) with every array moved by `put`."""
        move = lambda x: put(x) if isinstance(x, np.ndarray) else x  # noqa: E731
        q = tuple(move(x) for x in self.q) if isinstance(self.q, tuple) else move(self.q)
        options = {name: move(value) for name, value in self.options.items()}
        options.setdefault("num_splits", self.num_splits)
        return op(q, move(self.kv), move(self.indices), **(options | more))

    def rows(self, part) -> AttentionInputs:
        per_token = ("topk_length", "extra_indices", "extra_topk_length")
        options = {n: v[part] if n in per_token else v for n, v in self.options.items()}
        q = tuple(x[part] for x in self.q) if isinstance(self.q, tuple) else self.q[part]
        return replace(self, q=q, indices=self.indices[part], options=options)

    @property
    def shape(self) -> tuple[int, int]:
        q = self.q[0] if isinstance(self.q, tuple) else self.q
        return q.shape[:2]


@dataclass(frozen=True)
class AttentionCase:
    """The parameters of an attention call; `make` creates its arrays."""

    T: int
    H: int
    K: int
    fmt: str = "fp8"
    data: str = "normal"
    pages: int = 5
    block_size: int = 64
    layout: str = "paged"
    q_layout: str = "compact"
    indices: str = "random"
    topk_length: bool = False
    sink: bool = False
    extra: str | None = None
    num_splits: int = 0
    softmax_scale: float | None = None
    seed: int = 0

    def make(self) -> AttentionInputs:
        rng = np.random.default_rng([self.seed, self.T, self.H, self.K])
        rows = make_rows(rng, self.pages * self.block_size, self.fmt, self.data)
        num_slots = len(rows)
        indices = make_indices(rng, self.T, self.K, num_slots, self.indices)
        options = {"softmax_scale": self.softmax_scale or head_dim(self.fmt) ** -0.5}
        topk_length = make_topk_length(rng, self.T, self.K) if self.topk_length else None
        if self.layout == "zero":
            rows = np.tile(rows[: self.block_size], (self.pages, 1))
        else:
            hide_unselected(rows, indices, topk_length)
        if topk_length is not None:
            options["topk_length"] = topk_length
        if self.sink:
            options["attn_sink"] = make_sink(rng, self.H)
        if self.extra:
            options |= self._extra_cache(rng)
        q = random_bf16(
            rng, self.T, self.H, head_dim(self.fmt), std=3 if self.data == "huge" else 1
        )
        if self.data == "monotone":
            q = ref.to_bf16(np.abs(ref.to_f32(q)))
        return AttentionInputs(
            q=lay_out_q(q, self.q_layout),
            kv=lay_out(rows, self.block_size, self.layout),
            indices=indices,
            options=options,
            num_splits=self.num_splits,
        )

    def _extra_cache(self, rng) -> dict:
        width, pages, block_size = 37, 3, 7
        rows = make_rows(rng, pages * block_size, self.extra)
        indices = make_indices(rng, self.T, width, len(rows), "random")
        length = make_topk_length(rng, self.T, width)
        hide_unselected(rows, indices, length)
        kv = lay_out(rows, block_size, "padded")
        return {"extra_kv_cache": kv, "extra_indices": indices, "extra_topk_length": length}


def make_indices(rng, num_tokens, width, num_slots, kind) -> np.ndarray:
    """Index lists [T, K] int32, which are a slice of a wider array."""
    storage = np.full((num_tokens, width + 3), 0, np.int32)
    view = storage[:, :width]
    if kind == "all_masked":
        view[...] = rng.choice([-1, INT32_MIN, num_slots, INT32_MAX], view.shape)
        return view
    if kind == "ordered":
        view[...] = np.linspace(0, max(num_slots - 1, 0), width).astype(np.int32)
        return view
    view[...] = rng.integers(0, max(num_slots, 1), view.shape)
    odd = rng.random(view.shape)
    view[odd < 0.10] = -1
    view[(odd > 0.10) & (odd < 0.12)] = num_slots
    view[(odd > 0.12) & (odd < 0.14)] = INT32_MAX
    view[(odd > 0.14) & (odd < 0.16)] = INT32_MIN
    if width > 4:
        view[:, width // 2 : width // 2 + 3] = view[:, :1]  # one slot occurs four times
    if num_tokens > 2:
        view[1] = -1
    return view


def quarter_of(c):
    """The gather warp of Hopper's kernels that takes column c. Every warp takes four columns of
    every sixteen; which four changes from sixteen to sixteen."""
    return (c // 4 + c % 128 // 16 + c % 128 // 64) % 4


# Which columns of a list hold keys. c: column numbers, width: their count, r: random numbers.
KEYS = {
    "all": lambda c, width, r: c >= 0,
    "every second one": lambda c, width, r: c % 2 == 0,
    "every second block": lambda c, width, r: c // 64 % 2 == 0,
    "every sixteenth one": lambda c, width, r: c % 16 == 0,
    "not the first block": lambda c, width, r: c >= 64,
    "not the first two blocks": lambda c, width, r: c >= 128,
    "half of them": lambda c, width, r: r < 0.5,
    "nearly all": lambda c, width, r: r < 0.98,
    "few": lambda c, width, r: r < 0.03,
    "four of every sixteen": lambda c, width, r: c // 4 % 4 == 0,
    "those of one warp": lambda c, width, r: quarter_of(c) == 2,
    "those of all warps but one": lambda c, width, r: quarter_of(c) != 1,
    "the first": lambda c, width, r: c == 0,
    "the last": lambda c, width, r: c == width - 1,
    "none": lambda c, width, r: c < 0,
}


def make_indices_with_holes(rng, num_tokens, width, num_slots, keys) -> np.ndarray:
    """Index lists [T, K] int32: slots where KEYS[keys] is true, invalid indices elsewhere."""
    c = np.broadcast_to(np.arange(width), (num_tokens, width))
    slots = rng.integers(0, num_slots, c.shape)
    holes = rng.choice([-1, INT32_MIN, num_slots, INT32_MAX], c.shape)
    is_key = KEYS[keys](c, width, rng.random(c.shape))
    return np.where(is_key, slots, holes).astype(np.int32)


def make_topk_length(rng, num_tokens, width) -> np.ndarray:
    choices = [0, width, width + 7, -5, 1, width // 2, INT32_MAX, INT32_MIN]
    length = rng.integers(0, width + 1, num_tokens)
    length[: len(choices)] = choices[:num_tokens]
    return length.astype(np.int32)[rng.permutation(num_tokens)]


def make_sink(rng, num_heads) -> np.ndarray:
    sink = rng.normal(0, 3, num_heads).astype(np.float32)
    sink[1:4] = [np.inf, -np.inf, 80.0][: max(num_heads - 1, 0)]
    return sink


def hide_unselected(rows, indices, topk_length) -> None:
    """Fills every cache row that no list selects with NaN bytes."""
    flat = rows.reshape(len(rows), 1, -1)
    used = np.zeros(len(rows), bool)
    for t in range(len(indices)):
        used[ref.chosen_slots(indices, topk_length, flat, t)] = True
    rows.view(np.uint8)[~used] = 0xFF


ATTENTION: dict[str, AttentionCase] = {
    # shapes
    "one": AttentionCase(1, 1, 1),
    "no_tokens": AttentionCase(0, 16, 32),
    "no_indices": AttentionCase(3, 16, 0),
    "no_indices_sink_bf16": AttentionCase(3, 5, 0, fmt="bf16", sink=True),
    "h2": AttentionCase(3, 2, 33),
    "h3_k7": AttentionCase(4, 3, 7, pages=2),
    "h5_bf16": AttentionCase(4, 5, 65, fmt="bf16"),
    "h16_k64": AttentionCase(5, 16, 64),
    "h17_k63": AttentionCase(3, 17, 63),
    "h31_k129": AttentionCase(2, 31, 129, fmt="bf16"),
    "h32_k257": AttentionCase(3, 32, 257),
    "h64_k300": AttentionCase(2, 64, 300, sink=True),
    "h100_k128": AttentionCase(2, 100, 128),
    "h127_k191": AttentionCase(2, 127, 191, fmt="bf16", sink=True),
    "h128_k1": AttentionCase(3, 128, 1),
    "h128_k2048": AttentionCase(2, 128, 2048, pages=40),
    "h128_k2048_bf16": AttentionCase(1, 128, 2048, fmt="bf16", pages=40),
    "t33_h8": AttentionCase(33, 8, 40, topk_length=True, sink=True),
    # pages and layouts
    "page1": AttentionCase(3, 8, 70, pages=90, block_size=1),
    "page3": AttentionCase(3, 8, 70, pages=31, block_size=3, layout="padded"),
    "page100": AttentionCase(3, 8, 70, pages=2, block_size=100, layout="interleaved"),
    "page3_bf16": AttentionCase(3, 8, 70, fmt="bf16", pages=31, block_size=3, layout="interleaved"),
    "mqa": AttentionCase(3, 8, 70, layout="mqa"),
    "mqa_bf16": AttentionCase(3, 8, 70, fmt="bf16", layout="mqa"),
    "flat": AttentionCase(3, 8, 70, layout="flat"),
    "flat_bf16": AttentionCase(3, 8, 70, fmt="bf16", layout="flat"),
    "padded_bf16": AttentionCase(3, 8, 70, fmt="bf16", layout="padded"),
    "token_stride": AttentionCase(3, 8, 70, layout="token_stride"),
    "odd_stride_bf16": AttentionCase(3, 8, 70, fmt="bf16", layout="odd_stride"),
    "negative_pages": AttentionCase(3, 8, 70, layout="negative"),
    "zero_pages": AttentionCase(3, 8, 70, layout="zero"),
    "q_head_major": AttentionCase(3, 9, 70, q_layout="head_major"),
    "q_negative": AttentionCase(3, 9, 70, q_layout="negative"),
    "q_zero": AttentionCase(3, 9, 70, q_layout="zero"),
    "q_odd": AttentionCase(3, 9, 70, q_layout="odd_stride"),
    "q_pair": AttentionCase(3, 9, 70, q_layout="pair", sink=True),
    "q_pair_views_bf16": AttentionCase(3, 9, 70, fmt="bf16", q_layout="pair_views"),
    # masks
    "all_masked": AttentionCase(3, 8, 70, indices="all_masked", sink=True),
    "topk_length": AttentionCase(9, 8, 70, topk_length=True),
    "topk_length_bf16": AttentionCase(9, 8, 70, fmt="bf16", topk_length=True, sink=True),
    "extra_same": AttentionCase(9, 8, 70, extra="fp8", topk_length=True, sink=True),
    "extra_bf16": AttentionCase(9, 8, 70, extra="bf16", sink=True),
    "extra_fp8_on_bf16": AttentionCase(9, 33, 70, fmt="bf16", extra="fp8"),
    "extra_only": AttentionCase(4, 8, 20, extra="fp8", indices="all_masked"),
    "extra_k0": AttentionCase(4, 8, 0, extra="bf16", sink=True),
    # values
    "outlier": AttentionCase(3, 16, 200, data="outlier", sink=True),
    "outlier_bf16": AttentionCase(3, 16, 200, fmt="bf16", data="outlier"),
    "heavy": AttentionCase(3, 16, 200, data="heavy"),
    "heavy_bf16": AttentionCase(3, 64, 200, fmt="bf16", data="heavy"),
    "monotone": AttentionCase(2, 16, 320, data="monotone", indices="ordered"),
    "monotone_bf16": AttentionCase(2, 16, 320, fmt="bf16", data="monotone", indices="ordered"),
    "logits_1e4": AttentionCase(3, 16, 200, data="huge", softmax_scale=1.5),
    "logits_1e4_bf16": AttentionCase(3, 16, 200, fmt="bf16", data="huge", softmax_scale=1.5),
    "scale_negative": AttentionCase(3, 16, 100, softmax_scale=-0.05),
    "scale_tiny": AttentionCase(3, 16, 100, softmax_scale=1e-30),
    "equal_logits": AttentionCase(3, 16, 200, softmax_scale=1e-8),  # lse is ln n
    "equal_logits_k2048": AttentionCase(2, 16, 2048, pages=40, softmax_scale=1e-8),
    "equal_logits_bf16": AttentionCase(3, 16, 777, fmt="bf16", softmax_scale=1e-8),
    "one_token": AttentionCase(4, 16, 101, pages=1, block_size=1, softmax_scale=1e-8),
    # one key K times: its terms are equal, so every rounding of the running sum goes the same way
    "one_token_k1530": AttentionCase(
        2, 16, 1530, pages=1, block_size=1, indices="ordered", softmax_scale=1e-3
    ),
    "one_token_k1530_bf16": AttentionCase(
        2, 16, 1530, fmt="bf16", pages=1, block_size=1, indices="ordered", softmax_scale=1e-3
    ),
    "scales_wide": AttentionCase(3, 16, 200, data="wide", softmax_scale=1e-7),
    "scales_wide_steep": AttentionCase(3, 16, 200, data="wide"),
    "scales_pow2": AttentionCase(3, 16, 200, data="pow2"),
    "subnormal_bytes": AttentionCase(3, 16, 200, data="subnormal"),
    # splits
    "splits_1": AttentionCase(3, 16, 300, num_splits=1, sink=True),
    "splits_3": AttentionCase(3, 16, 300, num_splits=3, topk_length=True),
    "splits_7_bf16": AttentionCase(3, 16, 1000, fmt="bf16", num_splits=7, pages=20),
    "splits_64": AttentionCase(3, 16, 300, num_splits=64, sink=True, extra="fp8"),
    # rows without RoPE
    "h1_512": AttentionCase(1, 1, 1, fmt="bf16_512"),
    "h5_512": AttentionCase(4, 5, 65, fmt="bf16_512", topk_length=True, sink=True),
    "h31_k129_512": AttentionCase(2, 31, 129, fmt="bf16_512"),
    "h127_k191_512": AttentionCase(2, 127, 191, fmt="bf16_512", sink=True),
    "h64_k2048_512": AttentionCase(2, 64, 2048, fmt="bf16_512", pages=40),
    "page3_512": AttentionCase(
        3, 8, 70, fmt="bf16_512", pages=31, block_size=3, layout="interleaved"
    ),
    "mqa_512": AttentionCase(3, 8, 70, fmt="bf16_512", layout="mqa"),
    "flat_512": AttentionCase(3, 8, 70, fmt="bf16_512", layout="flat", q_layout="negative"),
    "odd_stride_512": AttentionCase(3, 8, 70, fmt="bf16_512", layout="odd_stride"),
    "q_odd_512": AttentionCase(3, 9, 70, fmt="bf16_512", q_layout="odd_stride"),
    "q_head_major_512": AttentionCase(3, 9, 70, fmt="bf16_512", q_layout="head_major"),
    "extra_512": AttentionCase(
        9, 33, 70, fmt="bf16_512", extra="bf16_512", topk_length=True, sink=True
    ),
    "all_masked_512": AttentionCase(3, 8, 70, fmt="bf16_512", indices="all_masked"),
    "heavy_512": AttentionCase(3, 64, 200, fmt="bf16_512", data="heavy"),
    "monotone_512": AttentionCase(2, 16, 320, fmt="bf16_512", data="monotone", indices="ordered"),
    "logits_1e4_512": AttentionCase(3, 16, 200, fmt="bf16_512", data="huge", softmax_scale=1.5),
    "one_token_k1530_512": AttentionCase(
        2, 16, 1530, fmt="bf16_512", pages=1, block_size=1, indices="ordered", softmax_scale=1e-3
    ),
    "splits_7_512": AttentionCase(3, 16, 1000, fmt="bf16_512", num_splits=7, pages=20),
    "splits_64_masked": AttentionCase(3, 16, 300, num_splits=64, indices="all_masked"),
}


def huge_cases() -> dict[str, AttentionInputs]:
    """Offsets past 32 bits and slots up to 2^31 - 2; zero strides keep the memory small."""
    rng = np.random.default_rng(7)
    strided = np.lib.stride_tricks.as_strided
    row = make_rows(rng, 64, "bf16")
    flat = strided(row, (INT32_MAX, ref.HEAD_DIM), (0, 2))
    page = make_rows(rng, 64, "fp8")
    paged = strided(page, (2**27, 64, ref.FP8_ROW_BYTES), (0, ref.FP8_ROW_BYTES, 1))
    indices = np.array([[INT32_MAX - 1, 5, INT32_MAX, -1, 2**30 + 17, 2**31 - 100]], np.int32)
    options = {"softmax_scale": ref.HEAD_DIM**-0.5}
    q = random_bf16(rng, 1, 4, ref.HEAD_DIM)
    return {
        "flat": AttentionInputs(q, flat, indices, options),
        "paged": AttentionInputs(q, paged, indices, options),
    }


# --- batches of the backend layer ----------------------------------------------------------------


@dataclass
class Batch:
    """A step as an engine describes it. Its arrays serve as host arrays and as device arrays."""

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    slot_mapping: np.ndarray
    block_table: np.ndarray
    num_actual_tokens: int
    block_size: int
    num_pages: int
    fields: dict = field(default_factory=dict)

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    def common(self, sparse_mla, **changes):
        lens = np.diff(self.query_start_loc)
        arguments = {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "slot_mapping": self.slot_mapping,
            "block_table": self.block_table,
            "query_start_loc_cpu": self.query_start_loc,
            "seq_lens_cpu": self.seq_lens,
            "num_reqs": self.num_reqs,
            "num_actual_tokens": self.num_actual_tokens,
            "max_query_len": int(lens.max(initial=0)),
            "max_seq_len": int(self.seq_lens.max(initial=0)),
        }
        arguments |= self.fields | changes
        names = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")
        arrays = [arguments.pop(name) for name in names]
        return sparse_mla.CommonAttentionMetadata(*arrays, **arguments)


def make_batch(query_lens, seq_lens, *, block_size=64, pad_tokens=0, seed=0) -> Batch:
    """A batch with randomly drawn pages, and with spare pages and spare table columns."""
    rng = np.random.default_rng(seed)
    need = [-(-int(n) // block_size) for n in seq_lens]
    num_pages = sum(need) + 3
    free = rng.permutation(num_pages)
    width = max([*need, 1]) + 1
    table = np.full((len(need), width), -1, np.int32)
    used = 0
    for r, count in enumerate(need):
        table[r, :count] = free[used : used + count]
        used += count
    start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_tokens = int(start[-1]) + pad_tokens
    slots = np.full(num_tokens, -1, np.int64)
    for r, length in enumerate(query_lens):
        position = np.arange(seq_lens[r] - length, seq_lens[r])
        page = table[r, position // block_size].astype(np.int64)
        slots[start[r] : start[r + 1]] = page * block_size + position % block_size
    return Batch(
        query_start_loc=start,
        seq_lens=np.asarray(seq_lens, np.int32),
        slot_mapping=slots,
        block_table=table,
        num_actual_tokens=num_tokens,
        block_size=block_size,
        num_pages=num_pages,
    )


def causal_topk(rng, batch: Batch, width: int) -> np.ndarray:
    """Positions [T, K] in each token's request, up to the token's own; unused columns are -1."""
    indices = np.full((batch.num_actual_tokens, width), -1, np.int32)
    for r in range(batch.num_reqs):
        start, end = batch.query_start_loc[r : r + 2]
        for t in range(start, end):
            visible = int(batch.seq_lens[r]) - int(end - t) + 1
            chosen = rng.permutation(visible)[:width]
            indices[t, : len(chosen)] = chosen
    return indices


# A batch of 5 decodes and 7 prefills. The prefills need 3 chunks of a 400-token workspace.
ENGINE_QUERY_LENS = [1, 1, 1, 1, 1, 5, 17, 2, 40, 9, 3, 30]
ENGINE_SEQ_LENS = [70, 1, 130, 64, 65, 150, 17, 200, 390, 100, 3, 200]
ENGINE_WORKSPACE = 400
