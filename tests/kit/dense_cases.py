"""Batches of dense attention over a paged cache, and what mla_attention must give for them.

The reference asks of every key and every query, by the words of the contract, whether the one sees
the other. It knows no ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import reference as ref
from cases import encode_keys, head_dim, make_sink, random_bf16
from helpers import Guarded, assert_same_bits, assert_within_bounds
from library import sparse_mla
from row_formats import ALL_FORMATS, E4M3_576, Pages

from sparse_mla import _C

E4M3 = np.dtype(ref.E4M3)
KV_SCALE = 0.75
TOKEN = "fp8_token"  # dense attention alone takes this format
OTHER_NAMES = {
    ("bfloat16", 576): "bf16",
    ("fp8_ds_mla", 576): "fp8",
    ("fp8_token", 576): TOKEN,
    ("fp8_e4m3", 576): E4M3_576,
}
# Every other format of keys that the package knows, by the names of `Cache`.
KEY_FORMATS = [
    OTHER_NAMES.get((name, dim), name)
    for name, rows in _C.KV_FORMATS.items()
    for dim in rows.values()
    if dim >= ref.V_DIM and name != TOKEN
]
# One cache may have them alone; FP4 rows are those of a second cache.
MAIN_FORMATS = [name for name in KEY_FORMATS if not name.startswith("fp4")]
DENSE_FORMATS = [*MAIN_FORMATS, TOKEN]
LAYOUTS = ("paged", "mqa", "padded", "unpaged")


def has_rope(fmt: str) -> bool:
    return fmt in OTHER_NAMES.values()


def takes_e4m3(fmt: str) -> bool:
    """Whether a query beside keys of this format may be e4m3."""
    return fmt == E4M3_576 or not has_rope(fmt)


def owner(x: int, cp) -> tuple[int, int]:
    """The rank that has position x, and its number there."""
    _, size, interleave = cp
    period = interleave * size
    return x // interleave % size, x // period * interleave + x % interleave


@dataclass
class Mask:
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    cp: tuple[int, int, int] | None = None

    @property
    def options(self) -> dict:
        return {
            "causal": self.causal,
            "window_size": self.window,
            "attention_chunk": self.chunk,
            "cp": self.cp,
        }

    def sees(self, j: int, p: int) -> bool:
        """Whether the query at position p sees key j."""
        left, right = self.window
        return (
            (not self.causal or j <= p)
            and (left < 0 or j >= p - left)
            and (right < 0 or j <= p + right)
            and (self.chunk == 0 or j // self.chunk == p // self.chunk)
        )

    def rows_of(self, n_q: int, n_k: int, i: int) -> list[int]:
        """The row positions of the keys that query i sees, in the tables of this rank."""
        p = n_k - n_q + i
        seen = [j for j in range(n_k) if self.sees(j, p)]
        if self.cp is None:
            return seen
        return [owner(j, self.cp)[1] for j in seen if owner(j, self.cp)[0] == self.cp[0]]


@dataclass
class Cache:
    """A cache of a format of row_formats or of cases, all of whose rows are NaN until they are
    written. "unpaged" is [pages, bytes] for split pages, and [slots, row] for other formats."""

    fmt: str
    pages: int
    block_size: int
    layout: str = "paged"
    kv_scale: float = KV_SCALE  # for a format that has one
    array: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.split = None
        if self.fmt in ALL_FORMATS:
            unpaged = "bytes" if ALL_FORMATS[self.fmt].split else "flat"
            layout = unpaged if self.layout == "unpaged" else self.layout
            self.split = Pages(self.fmt, layout, pages=self.pages, block_size=self.block_size)
            self.split.memory[:] = 0xFF
            self.array = self.split.cache
        else:
            row = encode_keys(np.zeros((1, 576), np.float32), self.fmt)
            gap = 1 if self.layout == "padded" else 0
            memory = np.empty((self.pages, self.block_size + gap, row.shape[1]), row.dtype)
            memory.view(np.uint8)[...] = 0xFF
            self.rows = memory[:, : self.block_size]
            views = {"mqa": self.rows[:, :, None], "unpaged": memory.reshape(-1, row.shape[1])}
            self.array = views.get(self.layout, self.rows)

    @property
    def num_slots(self) -> int:
        return self.pages * self.block_size

    @property
    def width(self) -> int:
        return self.split.format.width if self.split else head_dim(self.fmt)

    @property
    def has_scales(self) -> bool:
        if self.split is None:
            return self.fmt in ("fp8", TOKEN)
        return self.split.format.scales not in ("none", "ue8m0", "e4m3")

    @property
    def scale(self) -> float:
        return self.kv_scale if self.split and self.split.format.scales == "cache" else 1.0

    @property
    def format_name(self) -> str:
        """What a call names the format by."""
        names = {other: name for (name, _), other in OTHER_NAMES.items()}
        return names.get(self.fmt, self.fmt)

    @property
    def options(self) -> dict:
        if self.split is None:
            return {"kv_format": self.fmt} if self.fmt == TOKEN else {}
        found = dict(self.split.options)
        return found | ({"kv_scale": self.scale} if self.scale != 1 else {})

    def write(self, rng, slots: np.ndarray, std=1.0) -> None:
        self.put(slots, rng.normal(0, std, (len(slots), 576)).astype(np.float32))

    def put(self, slots: np.ndarray, keys: np.ndarray) -> None:
        """Writes keys [n, 576] fp32, of which a format has the first values."""
        if self.split is not None:
            bits = ref.bf16_encode(keys[:, : self.width])
            self.split.put(slots, *self.split.format.encode(bits, self.scale))
        else:
            at = np.divmod(slots, self.block_size)
            self.rows[at] = encode_keys(keys, self.fmt)

    def keys(self, slots: np.ndarray) -> np.ndarray:
        """float64 [n, width]"""
        if self.split is not None:
            return self.split.values(slots).astype(np.float64) * float(np.float32(self.scale))
        return ref.decode_rows(self.rows, slots)[:, : self.width]


# n_q, n_k, mask, and a row per query of the keys that it sees
MASK_ROWS = [
    (2, 5, Mask(causal=True), "11110 11111"),
    (5, 2, Mask(causal=True), "00 00 00 10 11"),
    (3, 5, Mask(window=(1, 1)), "01110 00111 00011"),
    (3, 5, Mask(causal=True, window=(1, 0)), "01100 00110 00011"),
    (4, 6, Mask(causal=True, chunk=4), "111000 111100 000010 000011"),
    (2, 3, Mask(), "111 111"),
    (3, 4, Mask(causal=True, window=(0, 5)), "0100 0010 0001"),
    (6, 4, Mask(chunk=2), "0000 0000 1100 1100 0011 0011"),
]


@dataclass
class Dense:
    """A batch: query_lens and seq_lens of its requests, and `padding` tokens of none of them."""

    query_lens: list[int]
    seq_lens: list[int]
    heads: int = 5
    fmt: str = "bf16"
    block_size: int = 16
    mask: Mask = field(default_factory=Mask)
    has_slots: bool = False
    is_uniform: bool = False  # a query [B, n, H, D]
    is_pair: bool = False
    e4m3: bool = False
    sink: bool = False
    softcap: float = 0.0
    num_splits: int = 0
    padding: int = 0
    holes: float = 0.0  # the share of bad entries of the table
    missing: int = 0  # columns that the table lacks
    std: float = 1.0
    key_std: float | None = None  # None: as std
    scale: float | None = None
    q_scale: float = 0.5  # for an e4m3 query
    kv_scale: float = KV_SCALE
    seed: int = 0
    layout: str = "paged"

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, self.heads, *self.query_lens])
        entry = 1 if self.has_slots else self.block_size
        longest = max([0, *self.seq_lens])
        width = max(0, -(-longest // entry) - self.missing)
        need = sum(-(-n // self.block_size) for n in self.seq_lens)
        self.cache = Cache(self.fmt, need + 3, self.block_size, self.layout, self.kv_scale)
        self.table = self.make_table(rng, width, entry)
        self.tokens = sum(self.query_lens)
        self.slots = self.find_slots(entry)
        visible = np.unique(np.concatenate([*self.slots, np.zeros(0, np.int64)]).astype(np.int64))
        self.cache.write(rng, visible, self.std if self.key_std is None else self.key_std)
        self.q = self.make_query(rng)
        self.attn_sink = make_sink(rng, self.heads) if self.sink else None

    @property
    def softmax_scale(self) -> float:
        return self.cache.width**-0.5 if self.scale is None else self.scale

    def make_table(self, rng, width: int, entry: int) -> np.ndarray:
        """Each request has pages of its own, in any order; junk behind its length."""
        pages = rng.permutation(self.cache.pages)
        limit = self.cache.num_slots if entry == 1 else self.cache.pages
        table = rng.integers(-5, limit + 9, (len(self.seq_lens) + 1, width)).astype(np.int32)
        first = 0
        for b, length in enumerate(self.seq_lens):
            own = pages[first : first + -(-length // self.block_size)]
            first += len(own)
            if entry == 1:
                own = (own[:, None] * self.block_size + np.arange(self.block_size)).ravel()
                own = own[:length]
            own = own[:width].astype(np.int64)
            bad = rng.random(len(own)) < self.holes
            own[bad] = rng.choice([-1, -(2**31), limit, 2**31 - 1], bad.sum())
            table[b, : len(own)] = own
        return table[: len(self.seq_lens)] if self.seed % 2 else table  # rows of no request

    def slot_at(self, b: int, x: int, entry: int) -> int:
        """The slot of row position x, -1 for a hidden key."""
        column = x // entry
        if column >= self.table.shape[1]:
            return -1
        at = int(self.table[b, column])
        slot = at * entry + x % entry
        return slot if at >= 0 and slot < self.cache.num_slots else -1

    def find_slots(self, entry: int) -> list[np.ndarray]:
        """The slots of the keys that each token sees."""
        found = []
        for b, (n_q, n_k) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            for i in range(n_q):
                slots = [self.slot_at(b, x, entry) for x in self.mask.rows_of(n_q, n_k, i)]
                found.append(np.array([s for s in slots if s >= 0], np.int64))
        return found

    def make_query(self, rng):
        rows = self.tokens + self.padding
        q = random_bf16(rng, rows, self.heads, self.cache.width, std=self.std)
        if self.e4m3:
            q = ref.e4m3_encode(ref.to_f32(q)).view(E4M3)
        if self.is_uniform:
            q = q.reshape(len(self.query_lens), self.query_lens[0], *q.shape[1:])
        if self.is_pair:
            return np.ascontiguousarray(q[..., :512]), np.ascontiguousarray(q[..., 512:])
        return q

    @property
    def options(self) -> dict:
        found = {"softmax_scale": self.softmax_scale, "softcap": self.softcap}
        found |= self.mask.options | self.cache.options
        found["num_splits"] = self.num_splits
        if self.has_slots:
            found["slot_table"] = self.table
        if not self.is_uniform:
            starts = np.cumsum([0, *self.query_lens]).astype(np.int32)
            found["cu_seqlens_q"] = starts
        if self.attn_sink is not None:
            found["attn_sink"] = self.attn_sink
        if self.e4m3:
            found["q_scale"] = self.q_scale
        return found

    def arguments(self) -> tuple:
        table = None if self.has_slots else self.table
        return self.q, self.cache.array, table, np.array(self.seq_lens, np.int32)

    def run(self, op, **more) -> dict:
        """Runs the batch with guarded outputs, of which rows of no request must stay."""
        rows = self.tokens + self.padding
        shape = (rows, self.heads)
        if self.is_uniform:
            shape = (len(self.query_lens), self.query_lens[0], self.heads)
        out = Guarded((*shape, 512), ref.BF16)
        lse = Guarded(shape, np.float32)
        got = op(*self.arguments(), **self.options, out=out.array, lse=lse.array, **more)
        assert got[0] is out.array
        assert got[1] is lse.array
        complete = self.padding == 0
        found = {"out": out.check(written=complete), "lse": lse.check(written=complete)}
        flat = {"out": found["out"].reshape(rows, self.heads, 512)}
        flat["lse"] = found["lse"].reshape(rows, self.heads)
        for name, x in flat.items():
            left = np.ascontiguousarray(x[self.tokens :]).view(np.uint8)
            assert (left == out.poison).all(), f"{name}: rows of no request were written"
        return {name: x[: self.tokens] for name, x in flat.items()}

    def reference(self) -> ref.Attention:
        if self.e4m3:
            parts = self.q if self.is_pair else (self.q,)
            codes = np.concatenate([ref.e4m3_decode(part) for part in parts], -1)
            query = codes.astype(np.float64) * self.q_scale
        else:
            query = ref.join_q(self.q)
        query = query.reshape(-1, self.heads, self.cache.width)[: self.tokens]
        keys = [self.cache.keys(slots) for slots in self.slots]
        return ref.attend_keys(
            query * self.softmax_scale,
            keys,
            self.attn_sink,
            has_scales=self.cache.has_scales,
            softcap=self.softcap,
        )


def check_twice(case: Dense, **bounds) -> dict:
    """The results of a batch, which are within the bounds, and the same in a second run."""
    got = case.run(sparse_mla.mla_attention)
    assert_within_bounds(case.reference(), got, **bounds)
    again = case.run(sparse_mla.mla_attention)
    for name, x in got.items():
        assert_same_bits(again[name], x, f"{name} of the second run")
    return got
