"""Batches of paged steps in every mode, and the metadata that a builder must make of them.

The reference goes request by request through the rules of the metadata, with Python's integers. It
says of a table only the live entries: those of keys that a row has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import device
import numpy as np

import sparse_mla

paged = sparse_mla.paged
JUNK = (-(2**31), -1, 2**31 - 1, 123456789)
# The modes of a test's batches; "draft" is a decode with a spec_step.
MODES = ("decode", "idle", "draft", "target_verify", "extend", "mixed", "draft_extend")
ARRAYS = ("extend_seq_lens", "out_cache_loc", "custom_mask", "encoder_lens")


def called(mode: str) -> str:
    """The mode as a builder has it."""
    return "decode" if mode == "draft" else mode


@dataclass
class Batch:
    """One step of an engine."""

    mode: str
    config: dict[str, Any]
    seq_lens: np.ndarray
    pool: np.ndarray
    req_to_token: np.ndarray
    mapping: np.ndarray | None = None
    extend_seq_lens: np.ndarray | None = None
    out_cache_loc: np.ndarray | None = None
    custom_mask: np.ndarray | None = None
    encoder_lens: np.ndarray | None = None
    spec_step: int | None = None
    prefix: int = 0
    bound: int = 0  # host lengths are so much too large
    has_twins: bool = True
    masks: list[np.ndarray] = field(default_factory=list)  # [N, N], of each request
    num_slots: int = 0
    is_fixed: bool = False  # whether a capture is replayed

    def __getattr__(self, name: str):
        """A number of the config, or its default."""
        defaults = {f.name: f.default for f in paged.Config.__dataclass_fields__.values()}
        if name.startswith("__") or name not in defaults:
            raise AttributeError(name)
        return self.config.get(name, defaults[name])

    @property
    def is_tree(self) -> bool:
        return self.topk > 1 and self.mode in ("draft", "target_verify")

    def twins(self) -> dict[str, np.ndarray]:
        if not self.has_twins and device.DEVICE == "cpu":
            return {}
        given = {
            "seq_lens_cpu": self.seq_lens,
            "extend_seq_lens_cpu": self.extend_seq_lens,
            "encoder_lens_cpu": self.encoder_lens,
        }
        longest = self.max_context_len
        return {
            name: np.minimum(np.maximum(lens, 0) + self.bound, longest)
            for name, lens in given.items()
            if lens is not None
        }

    def build(self, builder=None):
        """The metadata, whose arrays are on the session's device."""
        journey = device.Journey() if device.DEVICE != "cpu" else None
        put = journey.put if journey else lambda x: x
        if builder is None:
            config = paged.Config(**self.config, device=device.NAME)
            mapping = None if self.mapping is None else put(self.mapping)
            builder = paged.MetadataBuilder(
                config, put(self.req_to_token), full_to_swa_index_mapping=mapping
            )
        arrays = {name: getattr(self, name) for name in ARRAYS}
        metadata = builder.build(
            called(self.mode),
            put(self.seq_lens),
            put(self.pool),
            spec_step=self.spec_step,
            common_prefix_len=self.prefix,
            **{name: put(x) for name, x in arrays.items() if x is not None},
            **self.twins(),
        )
        KEPT.append(journey)
        del KEPT[:-8]
        return metadata


KEPT: list[Any] = []  # the latest batches on the device, which their metadata may refer to


# --- what a builder must make --------------------------------------------------------------------


@dataclass
class Table:
    """Rows of pages or slots, each as long as its keys need."""

    rows: list[list[int]]

    def check(self, got: np.ndarray, what: str) -> None:
        assert got.dtype == np.int32 and len(got) == len(self.rows), what
        for i, row in enumerate(self.rows):
            assert got[i, : len(row)].tolist() == row, f"{what}, row {i}"


def running(lens) -> list[int]:
    return [0, *np.cumsum(np.asarray(lens, np.int64)).tolist()]


def pages_of(batch: Batch, slots, mapped: bool) -> list[int]:
    """The pages of keys whose slots are given from the first position of a page on."""
    firsts = [int(s) for s in slots[:: batch.page_size]]
    return [(map_slot(batch, s) if mapped else s) // batch.page_size for s in firsts]


def map_slot(batch: Batch, slot: int) -> int:
    inside = 0 <= slot < len(batch.mapping)
    return int(batch.mapping[slot]) if inside else min(slot, -1)


def local_of(batch: Batch, query_lens, keys, tables) -> dict[str, Any]:
    """Virtual requests: queries and keys of a block of positions."""
    chunk, starts, used, rows = batch.attention_chunk, [0], [], []
    for q, n, table in zip(query_lens, keys, tables, strict=True):
        if q and n < q:
            starts.append(starts[-1] + q)
            used.append(0)
            rows.append([])
            continue
        for block in range((n - q) // chunk, -(-n // chunk)) if q else ():
            begin, end = block * chunk, min((block + 1) * chunk, n)
            starts.append(starts[-1] + end - max(begin, n - q))
            used.append(end - begin)
            first = begin // batch.page_size
            rows.append(table[first : first + -(-(end - begin) // batch.page_size)])
    return {"starts": starts, "used": used, "rows": Table(rows)}


def expected(batch: Batch) -> dict[str, Any]:
    """The metadata by names; of parts as dicts."""
    n_draft, k, step, left = (
        batch.num_draft_tokens,
        batch.topk,
        batch.spec_step,
        batch.sliding_window_size,
    )
    count = len(batch.seq_lens)
    lens = [max(int(n), 0) for n in batch.seq_lens]
    rows = [
        batch.req_to_token[int(b)] if n else None for b, n in zip(batch.pool, lens, strict=True)
    ]
    encoders = [0] * count
    if batch.encoder_lens is not None:
        encoders = [int(e) if n else 0 for e, n in zip(batch.encoder_lens, lens, strict=True)]
    per_req = {"draft": max(k, 1), "target_verify": n_draft, "decode": 1, "idle": 1}.get(batch.mode)
    if per_req is not None:
        query_lens = [per_req] * count
    else:
        given = batch.seq_lens if batch.extend_seq_lens is None else batch.extend_seq_lens
        query_lens = [int(q) if n else 0 for q, n in zip(given, lens, strict=True)]
    added = 0
    if not batch.is_tree:
        added = {"draft": (step or 0) + 1, "target_verify": n_draft}.get(batch.mode, 0)
    pads = [e % batch.page_size for e in encoders]
    keys = [n and n + added + pad for n, pad in zip(lens, pads, strict=True)]
    slots = [
        [] if row is None else row[e - pad : e - pad + m]
        for row, e, pad, m in zip(rows, encoders, pads, keys, strict=True)
    ]
    want: dict[str, Any] = {
        "cache_seqlens_int32": keys,
        "cu_seqlens_q": running(query_lens),
        "cu_seqlens_k": running(keys),
        "max_seq_len_q": max(query_lens, default=0) if per_req is None else per_req,
        "max_seq_len_k": max([n + pad for n, pad in zip(lens, pads, strict=True)], default=0)
        + added,
        "page_table": Table([pages_of(batch, s, False) for s in slots]),
        "window_size": (left, 0) if left >= 0 else (-1, -1),
        "cache_leftpad": pads if batch.encoder_lens is not None else None,
        "swa_page_table": None,
        "swa_out_cache_loc": None,
        "encoder_lens_int32": None,
        "expand": None,
        "swa_spec_metadata": None,
        "prefix": None,
        "local_attn_metadata": None,
    }
    if batch.prefix:
        want["cache_leftpad"] = [batch.prefix] * count
        want["prefix"] = {
            "cache_seqlens_int32": [batch.prefix],
            "cu_seqlens_q": [0, sum(query_lens)],
            "cu_seqlens_k": [0, batch.prefix],
            "max_seq_len_k": batch.prefix,
            "page_table": Table([pages_of(batch, slots[0][: batch.prefix], False)]),
        }
    if batch.mapping is not None:
        want["swa_page_table"] = Table([pages_of(batch, s, True) for s in slots])
        if batch.out_cache_loc is not None:
            mapped = [int(s) if s < 0 else map_slot(batch, int(s)) for s in batch.out_cache_loc]
            for i in padding_loc(batch, lens, per_req):
                mapped[i] = -1
            want["swa_out_cache_loc"] = mapped
    if batch.encoder_lens is not None:
        held = [[] if r is None else r[:e] for r, e in zip(rows, encoders, strict=True)]
        want["encoder_lens_int32"] = encoders
        want["encoder_cu_seqlens_k"] = running(encoders)
        want["encoder_max_seq_len_k"] = max(encoders, default=0)
        want["encoder_page_table"] = Table([pages_of(batch, s, False) for s in held])
    if batch.is_tree:
        want |= tree_of(batch, lens, rows)
    if batch.attention_chunk:
        tables = want["page_table" if batch.mapping is None else "swa_page_table"].rows
        want["local_attn_metadata"] = local_of(batch, query_lens, keys, tables)
    return want


def padding_loc(batch: Batch, lens, per_req: int | None) -> list[int]:
    """The entries of out_cache_loc that belong to padding, as far as one can know."""
    count, given = len(lens), len(batch.out_cache_loc)
    of_steps = max(batch.topk, 1) * batch.speculative_num_steps
    if per_req is None:
        return list(range(running_tokens(batch), given)) if batch.is_fixed else []
    if batch.mode == "draft" and given == count * of_steps:
        per_req = of_steps
    return [i for i in range(given) if given == count * per_req and not lens[i // per_req]]


def tree_of(batch: Batch, lens, rows) -> dict[str, Any]:
    """The parts of a tree: a row per branch, or per draft token."""
    seen, windows = [], []
    for b, (n, row) in enumerate(zip(lens, rows, strict=True)):
        for i in range(batch.topk if batch.mode == "draft" else batch.num_draft_tokens):
            own = []
            if batch.mode == "draft":
                first = (b * batch.topk + i) * batch.speculative_num_steps
                own = [int(s) for s in batch.out_cache_loc[first : first + batch.spec_step + 1]]
            elif n:
                drafts = row[n : n + batch.num_draft_tokens]
                own = [int(s) for s, sees in zip(drafts, batch.masks[b][i], strict=True) if sees]
            own = own if n else []
            width = min(n, batch.sliding_window_size + 1)
            before = [int(s) for s in row[n - width : n]] if n else []
            seen.append(own)
            windows.append(before + own)
    parts = {"expand": seen}
    if batch.sliding_window_size >= 0:
        if batch.mapping is not None:
            windows = [[map_slot(batch, s) for s in row] for row in windows]
        parts["swa_spec_metadata"] = windows
    return {
        name: {
            "cache_seqlens_int32": [len(row) for row in found],
            "cu_seqlens_q": list(range(len(found) + 1)),
            "cu_seqlens_k": running([len(row) for row in found]),
            "max_seq_len_q": 1,
            "slot_table": Table(found),
        }
        for name, found in parts.items()
    }


# --- comparison ----------------------------------------------------------------------------------


def compare(name: str, got: Any, want: Any) -> None:
    if want is None:
        assert got is None, name
    elif isinstance(want, Table):
        want.check(device.host(got), name)
    elif isinstance(want, dict):
        for each, value in want.items():
            compare(f"{name}.{each}", getattr(got, each), value)
    elif isinstance(want, list):
        values = device.host(got)
        assert values.dtype == np.int32 and values.tolist() == want, name
    else:
        assert got == want, name


def check_local(got, want: dict[str, Any]) -> None:
    """Virtual requests, behind which may be others without tokens."""
    starts, used, rows = want["starts"], want["used"], want["rows"]
    got_starts, got_used = device.host(got.local_query_start_loc), device.host(got.local_seqused_k)
    n = len(used)
    assert len(got_used) >= n and len(got_starts) == len(got_used) + 1
    assert got_starts.tolist() == starts + [starts[-1]] * (len(got_used) - n)
    assert got_used.tolist() == used + [0] * (len(got_used) - n)
    rows.check(device.host(got.local_block_table)[:n], "local_block_table")
    lens = np.diff(starts)
    assert got.local_max_query_len >= max(lens, default=0)
    assert got.local_max_seq_len >= max(used, default=0)


def check(batch: Batch, metadata) -> None:
    """Compares every field. Sizes of the host may be larger where its lengths are bounds."""
    want = expected(batch)
    is_exact = batch.bound == 0 and not batch.is_fixed
    local = want.pop("local_attn_metadata")
    sizes = {name: want.pop(name) for name in list(want) if "max_seq_len" in name}
    for name, value in sizes.items():
        got = getattr(metadata, name)
        assert got == value if is_exact else got >= value, name
    for name, value in want.items():
        compare(name, getattr(metadata, name), value)
    if local is None:
        assert metadata.local_attn_metadata is None
    else:
        check_local(metadata.local_attn_metadata, local)


# --- random batches ------------------------------------------------------------------------------


def fill_pool(rng, rows: int, width: int, page_size: int, tokens: np.ndarray) -> tuple[Any, int]:
    """A req_to_token whose row b has `tokens[b]` slots in pages of its own, then junk; and how many
    slots there are."""
    pages = [-(-int(n) // page_size) for n in tokens]
    order = rng.permutation(sum(pages) + 2)
    table = rng.choice(np.array(JUNK), (rows, width)).astype(np.int32)
    for b in range(rows):
        own = order[sum(pages[:b]) : sum(pages[: b + 1])]
        slots = (own[:, None] * page_size + np.arange(page_size)).ravel()
        table[b, : tokens[b]] = slots[: tokens[b]]
    return table, len(order) * page_size


def make_batch(rng, mode: str, page_size: int, longest: int = 0, **changes) -> Batch:
    """A random batch, of a random config with these changes. `longest` is its max_context_len."""
    max_bs, longest = int(rng.integers(1, 9)), longest or int(rng.choice([17, 60, 300]))
    n, k, s = int(rng.integers(1, 9)), int(rng.integers(1, 5)), int(rng.integers(1, 6))
    is_tree = k > 1 and mode in ("draft", "target_verify")
    kind = rng.choice(["plain", "window", "chunk", "encoder", "prefix"])
    config: dict[str, Any] = {
        "max_bs": max_bs,
        "max_num_tokens": max_bs * longest,
        "max_context_len": longest,
        "page_size": page_size,
        "topk": k if kind in ("plain", "window") else int(rng.integers(0, 2)),
        "num_draft_tokens": n,
        "speculative_num_steps": s,
        "sliding_window_size": int(rng.integers(0, longest)) if kind == "window" else -1,
        "attention_chunk": page_size * int(rng.integers(1, 9)) if kind == "chunk" else 0,
        "is_encoder_decoder": bool(kind == "encoder"),
    } | changes
    max_bs, n, s = (config[x] for x in ("max_bs", "num_draft_tokens", "speculative_num_steps"))
    is_tree = is_tree and config["topk"] > 1
    count = int(rng.integers(0, max_bs + 1))
    lens = rng.integers(-1, longest + 1, count).astype(np.int32)
    lens[rng.random(count) < 0.2] = longest
    encoders = None
    if config["is_encoder_decoder"]:
        encoders = np.array([rng.integers(0, longest + 1 - max(m, 0)) for m in lens], np.int32)
    extend = None
    if mode == "draft_extend" or (mode in ("extend", "mixed") and rng.random() < 0.8):
        extend = np.array([rng.integers(0, max(m, 0) + 1) for m in lens], np.int32)
    prefix = 0
    queries = {"decode": 1, "idle": 1, "target_verify": 0}.get(mode)
    may_share = kind == "prefix" and mode not in ("draft", "draft_extend") and not is_tree
    if may_share and count:
        new = queries if queries is not None else (lens if extend is None else extend)
        prefix = max(int((lens - new).min()), 0)
        prefix = int(rng.integers(0, prefix + 1))
    pool_rows = max_bs + 3
    pool = rng.permutation(pool_rows)[:count].astype(rng.choice([np.int32, np.int64]))
    tokens = rng.integers(0, longest, pool_rows)
    used = np.maximum(lens, 0) + (0 if encoders is None else encoders) + max(n, s)
    tokens[pool] = used
    width = longest + max(n, s) + int(rng.integers(0, 3)) * page_size
    table, num_slots = fill_pool(rng, pool_rows, width, page_size, tokens)
    batch = Batch(
        mode,
        config,
        lens,
        pool,
        table,
        extend_seq_lens=extend,
        encoder_lens=encoders,
        prefix=prefix,
        bound=int(rng.choice([0, 0, 3])) if encoders is None and not prefix else 0,
        has_twins=bool(rng.integers(0, 2)),
        num_slots=num_slots,
    )
    if mode == "draft":
        batch.spec_step = int(rng.integers(0, s))
    add_mapping(rng, batch, num_slots)
    add_drafts(rng, batch, num_slots)
    return batch


def add_mapping(rng, batch: Batch, num_slots: int) -> None:
    if rng.random() < 0.5 or batch.prefix:
        return
    pages = rng.permutation(num_slots // batch.page_size + 1)
    slots = (pages[:, None] * batch.page_size + np.arange(batch.page_size)).ravel()
    slots[np.repeat(rng.random(len(pages)) < 0.2, batch.page_size)] = rng.choice([0, -1])
    batch.mapping = slots[: num_slots - int(rng.integers(0, 2)) * batch.page_size].astype(np.int32)


def add_drafts(rng, batch: Batch, num_slots: int) -> None:
    """Slots of this step's tokens, and the mask of a tree."""
    count, n = len(batch.seq_lens), batch.num_draft_tokens
    if batch.is_tree and batch.mode == "draft":
        size = count * batch.topk * batch.speculative_num_steps
        batch.out_cache_loc = rng.integers(0, num_slots, size)
    elif rng.random() < 0.5:
        tokens = running_tokens(batch)
        batch.out_cache_loc = rng.integers(-1, num_slots, tokens)
    if batch.is_tree and batch.mode == "target_verify":
        parts = []
        for m in np.maximum(batch.seq_lens, 0):
            mask = rng.random((n, n)) < rng.choice([0.2, 0.6])
            mask[rng.random(n) < 0.2] = False
            batch.masks.append(mask)
            parts.append(np.concatenate([np.ones((n, m), bool), mask], 1).ravel())
        batch.custom_mask = np.concatenate([*parts, np.zeros(0, bool)])


def running_tokens(batch: Batch) -> int:
    count = len(batch.seq_lens)
    if batch.mode in ("extend", "mixed", "draft_extend"):
        given = batch.seq_lens if batch.extend_seq_lens is None else batch.extend_seq_lens
        return int(sum(max(q, 0) for q, m in zip(given, batch.seq_lens, strict=True) if m > 0))
    return count * (batch.num_draft_tokens if batch.mode == "target_verify" else 1)


def make_verification(topk: int) -> Batch:
    """Two requests, each with three drafts to verify: a chain, or a tree."""
    config = {"max_bs": 2, "max_num_tokens": 8, "max_context_len": 9, "page_size": 4}
    config |= {"num_draft_tokens": 3, "topk": topk}
    lens = np.array([5, 9], np.int32)
    table, num_slots = fill_pool(np.random.default_rng(7), 2, 12, 4, lens + 3)
    batch = Batch("target_verify", config, lens, np.array([1, 0]), table[::-1].copy())
    batch.num_slots = num_slots
    if topk > 1:
        batch.masks = [np.tri(3, dtype=bool)] * 2
        parts = [np.concatenate([np.ones((3, n), bool), np.tri(3, dtype=bool)], 1) for n in lens]
        batch.custom_mask = np.concatenate([part.ravel() for part in parts])
    return batch
