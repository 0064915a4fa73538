"""Random cases of attention, and their checks. A seed decides sizes, formats, values and lists.

`draw` returns the parameters of a case over keys of 576 values, `draw_v4` over those of 512 in one
cache or two; `make` creates the arrays, and `check` runs the case. What engines send is drawn most
often: compact queries, whole pages, logits of a normal distribution.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass

import cases
import numpy as np
import reference as ref
import row_formats
from cases import INT32_MAX, INT32_MIN, AttentionInputs
from helpers import NO_NAN, assert_same_bits, assert_within_bounds, guarded_attention
from library import sparse_mla
from test_v4_attention import E4M3, KV_SCALES, MAIN_FORMATS, Keys, V4Inputs

POOL = 2048  # number of rows, and of queries, that the cases choose from
MANY_TOKENS = (130, 301)  # more work items than a GPU has CTAs
MANY_TOKENS_SHARE = 0.03
MAX_KEYS = 4096  # most keys of all tokens of a case, if they are few
MAX_JUDGED = 12  # tokens of a case that the reference computes
MAX_LATE_KEYS = 32
LATE_NATS = (9, 20)
FIRST_LATE = 128
CHANGED_SHARE = 0.02  # share of the slots that each factor changes
ODD_LENGTHS_SHARE = 0.1
E4M3_QUERY_SHARE = 0.1
# Slices of the bytes of a row of 576 values. "scale" is the first scale of an FP8 row, and two
# values of a bf16 row.
NAN_BYTES = {
    "value": slice(0, 4),
    "scale": slice(512, 516),
    "rope": slice(-4, None),
    "row": slice(None),
}


@dataclass(frozen=True)
class ListDraw:
    """Parameters of a cache and of the index lists over it."""

    fmt: str  # "fp8" and "bf16" have 576 values, those of row_formats.py 512
    topk: int
    block_size: int
    layout: str
    data: str  # an argument of cases.make_rows, or a name of V4_DATA
    factors: tuple  # each multiplies some of the rows
    keys: str | None  # a name of cases.KEYS; None: the tokens have different ones
    duplicates: bool
    has_length: bool


@dataclass(frozen=True)
class Draw:
    seed: int
    num_tokens: int
    num_heads: int
    q_layout: str
    zero_queries: float  # share of the (token, head) pairs
    spread: int  # standard deviation of the logits
    main: ListDraw
    extra: ListDraw | None
    late_keys: int
    nan: str | None  # a name of NAN_BYTES: what is NaN in one key of one token; 512: any name
    sink: bool
    num_splits: int
    block_tables: bool  # main's indices come from positions, by way of tables with bad pages
    row_gap: int
    max_logits: bool
    again: bool
    alone: bool
    e4m3: bool = False  # the query's dtype, of 512 values

    @property
    def is_v4(self) -> bool:
        return self.main.fmt in row_formats.KEY_FORMATS


class Dice:
    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pick(self, *options):
        return options[self.rng.integers(len(options))]

    def happens(self, share: float) -> bool:
        return bool(self.rng.random() < share)


def draw(seed: int) -> Draw:
    dice = Dice(seed, 0)
    rng, pick, happens = dice.rng, dice.pick, dice.happens

    def draw_list(topk: int) -> ListDraw:
        fmt = pick("fp8", "bf16")
        return ListDraw(
            fmt=fmt,
            topk=topk,
            block_size=pick(64, 64, 64, 1, 16, 100),
            layout=pick("paged", "paged", "paged", "flat", "mqa", "padded", "interleaved"),
            data=pick(*["normal"] * 4, "tiles", "outlier", "heavy", *["pow2"] * (fmt == "fp8")),
            factors=pick((), (), (), (0,), (1e-5,), (100,), (1e-5, 100)),
            keys=pick(*["all"] * 8, *cases.KEYS, None, None, None),
            duplicates=happens(0.15),
            has_length=happens(0.3),
        )

    if happens(MANY_TOKENS_SHARE):
        topk = int(rng.integers(64, 201))
        num_tokens = int(rng.integers(*MANY_TOKENS))
        num_heads = pick(1, 3, 8, 16, 17, 32, 48, 64)
    else:
        topk = pick(64, 128, 256, 512, 1024, 2048, *[int(2 ** rng.uniform(6, 11))] * 6)
        num_tokens = min(int(rng.integers(1, 9)), MAX_KEYS // topk)
        num_heads = pick(1, 3, 8, 16, 17, 32, 48, 64, 100, 128)
    extra_topk = int(rng.integers(1, min(topk, 600) + 1))
    num_splits = pick(0, 0, 1, 1, int(rng.integers(2, 9)), int(rng.integers(2, 9)))
    return Draw(
        seed=seed,
        num_tokens=num_tokens,
        num_heads=num_heads,
        q_layout=pick(*["compact"] * 5, "pair", "pair_views", "head_major", "odd_stride"),
        zero_queries=pick(*[0.0] * 20, 0.1, 0.1, 1.0),
        spread=pick(1, 3, 6, 10),
        main=draw_list(topk),
        extra=draw_list(extra_topk) if happens(0.35) else None,
        late_keys=pick(0, 0, 1, max(1, min(MAX_LATE_KEYS, num_tokens * num_heads // 50))),
        nan=pick(*[None] * 28, *NAN_BYTES),
        sink=happens(0.3),
        num_splits=num_splits,
        block_tables=happens(0.15),
        row_gap=pick(0, 0, 8),
        max_logits=happens(0.4),
        again=happens(0.2),
        alone=num_splits > 0 and happens(0.3),
    )


def draw_v4(seed: int) -> Draw:
    """Mostly a window of 128 rows beside 512 or 1024 chosen ones, as DeepSeek V4 has them."""
    dice = Dice(seed, 3)
    rng, pick, happens = dice.rng, dice.pick, dice.happens

    def draw_list(topk: int, formats: list[str]) -> ListDraw:
        fmt = pick(*["fp8_v4"] * len(formats), *formats)
        return ListDraw(
            fmt=fmt,
            topk=topk,
            block_size=pick(64, 64, 256, 1, 2, 2, 4, 5),
            layout=pick("paged", "paged", *row_formats.layouts_of(fmt)),
            data=pick(*["normal"] * 4, *V4_DATA),
            factors=pick((), (), (), (0,), (1e-5,), (100,), (1e-5, 100)),
            keys=pick(*["all"] * 6, *cases.KEYS, None, None, None),
            duplicates=happens(0.15),
            has_length=happens(0.4),
        )

    if happens(MANY_TOKENS_SHARE):
        topk, extra_topk = pick(64, 128), int(rng.integers(1, 201))
        num_tokens = int(rng.integers(*MANY_TOKENS))
        num_heads = pick(1, 16, 32, 40, 64)
    else:
        topk = pick(128, 128, 128, 64, 1, int(2 ** rng.uniform(0, 11)))
        extra_topk = pick(512, 512, 1024, 4, int(2 ** rng.uniform(0, 11)))
        num_tokens = min(int(rng.integers(1, 17)), max(1, MAX_KEYS // (topk + extra_topk)))
        num_heads = pick(1, 16, 40, 64, 64, 128, int(rng.integers(1, 129)))
    num_splits = pick(0, 0, 1, 1, int(rng.integers(2, 9)))
    return Draw(
        seed=seed,
        num_tokens=num_tokens,
        num_heads=num_heads,
        q_layout=pick(*["compact"] * 5, "head_major", "odd_stride"),
        zero_queries=pick(*[0.0] * 20, 0.1, 0.1, 1.0),
        spread=pick(1, 3, 6, 10),
        main=draw_list(topk, MAIN_FORMATS),
        extra=draw_list(extra_topk, row_formats.KEY_FORMATS) if happens(0.75) else None,
        late_keys=pick(0, 0, 1, max(1, min(MAX_LATE_KEYS, num_tokens * num_heads // 50))),
        nan=pick(*[None] * 14, "row"),
        sink=happens(0.6),
        num_splits=num_splits,
        block_tables=happens(0.1),
        row_gap=pick(0, 0, 8),
        max_logits=happens(0.4),
        again=happens(0.2),
        alone=num_splits > 0 and happens(0.3),
        e4m3=happens(E4M3_QUERY_SHARE),
    )


# --- arrays --------------------------------------------------------------------------------------


@functools.cache
def row_pool(fmt: str, data: str) -> np.ndarray:
    return cases.make_rows(np.random.default_rng(len(data)), POOL, fmt, data)


@functools.cache
def query_pool(head_dim: int = ref.HEAD_DIM) -> np.ndarray:
    return cases.random_bf16(np.random.default_rng(0), POOL, head_dim)


class Rows:
    """Rows of 576 values, which are laid out when they are complete."""

    def __init__(self, rng, drawn: ListDraw, num_slots: int, prefix: str) -> None:
        self.drawn, self.num_slots, self.prefix = drawn, num_slots, prefix
        self.rows = row_pool(drawn.fmt, drawn.data)[rng.integers(0, POOL, num_slots)]

    def values(self, slots) -> np.ndarray:
        """float64 keys."""
        return ref.decode_rows(self.rows, slots)

    def store(self, slots, keys: np.ndarray) -> None:
        self.rows[slots] = cases.encode_keys(keys, self.drawn.fmt)

    def copy(self, slot: int, target: int) -> None:
        self.rows[target] = self.rows[slot]

    def spoil(self, slot: int, what: str) -> None:
        self.rows[slot].view(np.uint8)[NAN_BYTES[what]] = 0xFF

    def options(self, indices: np.ndarray, length: np.ndarray | None) -> dict:
        cases.hide_unselected(self.rows, indices, length)
        kv = cases.lay_out(self.rows, self.drawn.block_size, self.drawn.layout)
        return {f"{self.prefix}kv_cache": kv}


# Factors of keys [n, 512], which are made once per format.
V4_DATA = {
    "normal": lambda rng, n: 1,
    "mixed": lambda rng, n: 10.0 ** rng.uniform(-3, 1, (n, 1)),
    "rope": lambda rng, n: np.where(np.arange(512) < 448, 1, 10.0 ** rng.uniform(-6, 3, (n, 1))),
    "outlier": lambda rng, n: np.where(rng.random((n, 512)) < 0.01, 30, 1),
    "tiles": lambda rng, n: (10.0 ** rng.uniform(-4, 1, (n, 32))).repeat(16, 1),
}


@functools.cache
def v4_pool(fmt: str, data: str, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(len(data))
    return encode_v4(rng.normal(0, 1, (POOL, 512)) * V4_DATA[data](rng, POOL), fmt, prefix)


def encode_v4(keys: np.ndarray, fmt: str, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    bits = ref.bf16_encode(keys.astype(np.float32))
    return row_formats.FORMATS[fmt].encode(bits, KV_SCALES[prefix])


class V4Rows:
    """Rows of 512 values, in the pages of their format. Others than those of `place` stay random
    bytes."""

    def __init__(self, rng, drawn: ListDraw, num_slots: int, prefix: str) -> None:
        self.drawn, self.num_slots, self.prefix = drawn, num_slots, prefix
        self.pages = row_formats.Pages(
            drawn.fmt, drawn.layout, pages=num_slots // drawn.block_size,
            block_size=drawn.block_size, seed=int(rng.integers(1 << 30)),
        )  # fmt: skip
        some = rng.integers(0, POOL, num_slots)
        self.parts = [x[some] for x in v4_pool(drawn.fmt, drawn.data, prefix)]
        self.scale = KV_SCALES[prefix] if self.pages.format.scales == "cache" else 1.0

    def values(self, slots) -> np.ndarray:
        parts = [x[np.asarray(slots, np.int64)] for x in self.parts]
        return self.pages.format.decode(*parts, self.scale).astype(np.float64)

    def store(self, slots, keys: np.ndarray) -> None:
        for part, new in zip(self.parts, encode_v4(keys, self.drawn.fmt, self.prefix), strict=True):
            part[slots] = new

    def copy(self, slot: int, target: int) -> None:
        for part in self.parts:
            part[target] = part[slot]

    def spoil(self, slot: int, what: str) -> None:
        """Makes the scales NaN, and the values of a format without any."""
        data, scales = self.parts
        (scales if self.pages.format.scale_bytes else data)[slot] = 0xFF

    def options(self, indices: np.ndarray, length: np.ndarray | None) -> dict:
        flat = np.empty((self.num_slots, 1, 1))
        used = [ref.chosen_slots(indices, length, flat, t) for t in range(len(indices))]
        used = np.unique(np.concatenate(used))
        self.pages.put(used, *(x[used] for x in self.parts))
        self.keys = Keys(self.pages, indices, length, self.prefix)
        return {f"{self.prefix}kv_cache": self.pages.cache} | self.keys.options


class List:
    """The rows of a cache and the index lists over it. No list has the slots of `spare` yet."""

    def __init__(self, rng, drawn: ListDraw, num_tokens: int, storage=Rows, prefix="") -> None:
        self.drawn = drawn
        num_used = drawn.topk + int(rng.integers(drawn.topk))
        num_slots = -(-(num_used + MAX_LATE_KEYS + 1) // drawn.block_size) * drawn.block_size
        place = rng.permutation(num_slots)
        self.spare = [*place[num_used:]]
        self.rows = storage(rng, drawn, num_slots, prefix)
        for factor in drawn.factors:
            some = np.flatnonzero(rng.random(num_slots) < CHANGED_SHARE)
            self.rows.store(some, factor * self.rows.values(some))
        if drawn.duplicates:
            num_used = 1 + num_used // 16
        names = [drawn.keys or [*cases.KEYS][i] for i in rng.integers(0, len(cases.KEYS), 16)]
        self.indices = np.empty((num_tokens, drawn.topk), np.int32)
        for i, keys in enumerate(names):  # token i and every sixteenth token after it
            part = self.indices[i::16]
            part[...] = cases.make_indices_with_holes(rng, *part.shape, num_used, keys)
        is_key = (self.indices >= 0) & (self.indices < num_used)
        self.indices[self.indices == num_used] = num_slots
        self.indices[is_key] = place[self.indices[is_key]]
        self.length = None
        if drawn.has_length:
            self.length = rng.integers(1, drawn.topk + 1, num_tokens, np.int32)
            odd = rng.random(num_tokens) < ODD_LENGTHS_SHARE
            self.length[odd] = rng.choice([0, -5, drawn.topk + 7, INT32_MAX, INT32_MIN], odd.sum())

    def key_columns(self, token: int) -> np.ndarray:
        row = self.indices[token]
        is_key = (row >= 0) & (row < self.rows.num_slots)
        if self.length is not None:
            is_key &= np.arange(len(row)) < self.length[token]
        return np.flatnonzero(is_key)

    def own_row(self, token: int, column: int) -> int:
        """Makes this entry of a list select a copy of its row, and returns the copy's slot, which
        no other entry selects."""
        slot = self.spare.pop()
        self.rows.copy(self.indices[token, column], slot)
        self.indices[token, column] = slot
        return slot

    def add_late_keys(self, rng, q: np.ndarray, scale: float, count: int) -> None:
        """Changes keys so that each weighs e^9 to e^20 times as much as any other, for one head."""
        for pair in rng.permutation(q.shape[0] * q.shape[1])[:count]:
            token, head = divmod(int(pair), q.shape[1])
            columns = self.key_columns(token)
            query = ref.to_f32(q[token, head]).astype(np.float64)
            if not len(columns) or not query.any():
                continue
            late = columns[columns >= FIRST_LATE]
            column = rng.choice(late if len(late) else columns)
            logits = scale * self.rows.values(self.indices[token, columns]) @ query
            key = self.rows.values(self.indices[token, [column]])[0]
            wanted = (logits.max() + rng.uniform(*LATE_NATS)) / scale
            key += (wanted - key @ query) / (query @ query) * query
            self.rows.store([self.own_row(token, column)], key[None])

    def add_nan(self, rng, token: int, what: str) -> bool:
        """Makes NAN_BYTES[what] of one of the token's keys NaN. False if the token has no key."""
        columns = self.key_columns(token)
        if not len(columns):
            return False
        self.rows.spoil(self.own_row(token, rng.choice(columns)), what)
        return True

    def options(self) -> dict:
        prefix = self.rows.prefix
        options = self.rows.options(self.indices, self.length)
        options[f"{prefix}indices"] = self.indices
        if self.length is not None:
            options[f"{prefix}topk_length"] = self.length
        return options


def make(drawn: Draw) -> tuple[AttentionInputs, int | None]:
    """Returns the inputs, and the token whose results must be NaN, or None."""
    rng = np.random.default_rng([drawn.seed, 1])
    shape = (drawn.num_tokens, drawn.num_heads)
    storage, head_dim = (V4Rows, 512) if drawn.is_v4 else (Rows, ref.HEAD_DIM)
    q = query_pool(head_dim)[rng.integers(0, POOL, shape)]
    q[rng.random(shape) < drawn.zero_queries] = 0
    lists = [
        List(rng, x, drawn.num_tokens, storage, prefix)
        for x, prefix in ((drawn.main, ""), (drawn.extra, "extra_"))
        if x
    ]
    keys = np.concatenate([x.rows.values(range(0, x.rows.num_slots, 7)) for x in lists])
    scale = float(drawn.spread / np.sqrt((keys**2).sum(1).mean() + 1e-30))
    lists[rng.integers(len(lists))].add_late_keys(rng, q, scale, drawn.late_keys)
    nan_token = int(rng.integers(drawn.num_tokens)) if drawn.nan else None
    if drawn.nan and not any(x.add_nan(rng, nan_token, drawn.nan) for x in lists):
        nan_token = None
    options = {"softmax_scale": scale}
    for each in lists:
        options |= each.options()
    if drawn.sink:
        options["attn_sink"] = cases.make_sink(rng, drawn.num_heads)
    kv, indices = options.pop("kv_cache"), options.pop("indices")
    if drawn.e4m3:
        options["q_scale"] = 1.25
        q = ref.e4m3_encode(ref.to_f32(q) / np.float32(1.25)).view(E4M3)
    given = (cases.lay_out_q(q, drawn.q_layout), kv, indices, options, drawn.num_splits)
    if drawn.is_v4:
        return V4Inputs(*given, lists=[x.rows.keys for x in lists]), nan_token
    return AttentionInputs(*given), nan_token


def through_block_tables(rng, indices: np.ndarray, num_slots: int, block_size: int) -> np.ndarray:
    """The same keys, as the library finds them from positions of three requests.

    An entry that is no key becomes a position below 0, past the table or on a bad page.
    """
    bad_pages = [-1, INT32_MIN, num_slots // block_size, INT32_MAX]
    num_pages = num_slots // block_size
    pages = np.array([rng.permutation(num_pages) for _ in range(3)])
    table = np.concatenate([pages, np.tile(bad_pages, (3, 1))], 1).astype(np.int32)
    requests = rng.integers(0, 3, len(indices)).astype(np.int32)
    is_key = (indices >= 0) & (indices < num_slots)
    slots = np.where(is_key, indices, 0)
    column = np.take_along_axis(pages.argsort(1)[requests], slots // block_size, 1)
    bad = rng.integers(num_pages * block_size, (num_pages + 6) * block_size, indices.shape)
    bad[rng.random(bad.shape) < 0.5] = -1
    positions = np.where(is_key, column * block_size + slots % block_size, bad).astype(np.int32)
    arrays = (requests, table, positions)
    got = sparse_mla.convert_req_index_to_global_index(*arrays, block_size=block_size)
    want, _ = ref.convert_req_index_to_global_index(*arrays, block_size=block_size)
    assert_same_bits(got, want, "indices")
    assert np.array_equal(got[is_key], indices[is_key])
    return got


# --- checks --------------------------------------------------------------------------------------


def check(drawn: Draw) -> None:
    """Judged tokens are within the bounds, and NaN is where it must be and nowhere else. Some cases
    also give the same bits in a second call, and for a token alone."""
    case, nan_token = make(drawn)
    rng = np.random.default_rng([drawn.seed, 2])
    if drawn.block_tables:
        num_slots = case.lists[0].num_slots if drawn.is_v4 else ref.num_slots(case.kv)
        case.indices = through_block_tables(rng, case.indices, num_slots, drawn.main.block_size)

    def attend(case: AttentionInputs) -> dict:
        how = {"row_gap": drawn.row_gap, "max_logits": drawn.max_logits, "poison": NO_NAN}
        return guarded_attention(sparse_mla.sparse_attention, case, **how)

    got = attend(case)
    for name, x in got.items():
        is_nan = np.isnan(ref.to_f32(x)).reshape(drawn.num_tokens, -1)
        must_be = np.arange(drawn.num_tokens) == nan_token
        wrong = np.flatnonzero((is_nan != must_be[:, None]).any(1))
        assert not len(wrong), f"{name}: NaN in token {nan_token} alone, not so in {wrong[:9]}"
    tokens = rng.permutation(drawn.num_tokens)
    tokens = tokens[tokens != nan_token][:MAX_JUDGED]
    if len(tokens):
        assert_within_bounds(case.rows(tokens).reference(), {n: x[tokens] for n, x in got.items()})
    if drawn.again:
        for name, x in attend(case).items():
            assert_same_bits(x, got[name], f"{name} of the second call")
    if drawn.alone:
        for token in tokens[:2]:
            part = slice(token, token + 1)
            for name, x in attend(case.rows(part)).items():
                assert_same_bits(x, got[name][part], f"{name} of token {token} alone")


def failure_of(seed: int, draw=draw) -> str | None:
    """Runs the case of a seed. Returns its error with all of its parameters, or None."""
    drawn = draw(seed)
    try:
        check(drawn)
    except Exception as error:
        named = "\n".join(f"    {name} = {x}" for name, x in asdict(drawn).items())
        return f"SMLA_RANDOM_SEED={seed}: {type(error).__name__}: {error}\n{named}"
    return None
