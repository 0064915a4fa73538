"""Layers of DeepSeek V4 in one step: their inputs, and fp64 attention over the keys that the
contract's rules give each token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import device
import numpy as np
import reference as ref
import reference_v4 as plan
from cases import make_sink, random_bf16
from dense_cases import owner
from helpers import assert_within_bounds
from library import sparse_mla
from row_formats import Pages

v4 = sparse_mla.v4
SIZES = plan.Sizes(max_model_len=500, max_num_batched_tokens=96, decode_threshold=2)
NUM_PAGES = 90
RATIOS = (1, 4, 16)
FORMAT_PAIRS = [
    ("fp8_v4", None),
    ("bfloat16", None),
    ("fp8_v4", "fp4_v41_split"),
    ("bfloat16", "fp8_v41"),
    ("fp8_e4m3", "fp8_v4"),
    ("fp8_nope", "fp8_e4m3"),
]
KV_SCALE = 0.25  # a power of two, so that rows in bf16 are the same keys


def full_table(rng, rows: int, need: int) -> np.ndarray:
    """A page of its own for every entry that is needed; more columns than that."""
    pages = rng.permutation(NUM_PAGES)[: rows * need].reshape(rows, need)
    return np.concatenate([pages, np.full((rows, 1), -1)], 1).astype(np.int32)


def make_batch(rng, query_lens, contexts, *, padding=0) -> plan.V4Batch:
    seq_lens = np.array([n + c for n, c in zip(query_lens, contexts, strict=True)], np.int32)
    top = int(seq_lens.max(initial=1))
    slots = rng.integers(0, 99, sum(query_lens) + padding)
    slots[len(slots) - padding :] = -1
    rows = len(query_lens)
    swa_need = -(-top // SIZES.swa_block_size)
    table = np.full((rows, swa_need + 1), -1, np.int32)
    for b, n in enumerate(query_lens):  # pages in front of the windows are given back
        first = max(int(seq_lens[b]) - n - SIZES.window + 1, 0) // SIZES.swa_block_size
        last = -(-int(seq_lens[b]) // SIZES.swa_block_size)
        table[b, first:last] = rng.permutation(NUM_PAGES)[: last - first]
    return plan.V4Batch(
        list(query_lens), seq_lens, slots, table,
        compressed={r: full_table(rng, rows, -(-top // SIZES.block_size)) for r in SIZES.ratios},
        states={}, max_seq_len=top,
    )  # fmt: skip


def make_cache(rng, name: str, block_size: int, layout="paged") -> Pages:
    cache = Pages(name, layout, pages=NUM_PAGES, block_size=block_size, seed=int(rng.integers(99)))
    slots = np.arange(NUM_PAGES * block_size)
    bits = ref.bf16_encode(rng.normal(0, 1, (len(slots), 512)).astype(np.float32))
    cache.put(slots, *cache.format.encode(bits, KV_SCALE))
    return cache


@dataclass
class Case:
    """A layer's inputs in one step."""

    batch: plan.V4Batch
    config: object
    layer: object
    ratio: int
    swa: Pages
    compressed: Pages | None
    q: np.ndarray
    topk: np.ndarray | None
    sink: np.ndarray

    @property
    def caches(self):
        extra = None if self.compressed is None else self.compressed.cache
        return v4.Caches(self.swa.cache, extra)

    def build(self, builder=None, **tables):
        builder = builder or v4.MetadataBuilder(self.config)
        tables = tables or {"compressed": self.batch.compressed}
        return builder.build(self.batch.common(sparse_mla), **tables)

    def run(self, builder=None, **options) -> dict:
        metadata = self.build(builder)
        out, lse = self.layer.attend(self.q, self.caches, metadata, self.topk, **options)
        return {"out": out, "lse": lse}

    def keys(self, t: int) -> np.ndarray:
        """float64 keys of token t."""
        b, p = self.batch.tokens()[t]
        if not self.batch.is_valid(t):
            return np.zeros((0, 512))
        parts = [self.swa.values(plan.window_of(SIZES, self.batch, t), KV_SCALE)]
        if self.compressed is not None:
            rows = list(range((p + 1) // self.ratio))
            if self.topk is not None:
                rows = [int(i) for i in self.topk[t] if i >= 0]
            block_size = SIZES.block_size // self.ratio
            table = self.batch.compressed[self.ratio][b]
            slots = [plan.slot(table, i, block_size) for i in rows]
            assert min(slots, default=0) >= 0
            parts.append(self.compressed.values(slots, KV_SCALE))
        keys = np.concatenate(parts)
        if self.config.path == "separate" and t >= plan.split(SIZES, self.batch)[2]:
            keys = ref.to_f32(ref.to_bf16(keys))  # what the workspace holds
        return keys.astype(np.float64)

    def reference(self, *, sink=True) -> ref.Attention:
        tokens = self.batch.num_tokens
        query = self.q[:tokens]
        query = ref.e4m3_decode(query) if query.dtype == ref.E4M3 else ref.to_f32(query)
        scale = self.config.softmax_scale * self.config.q_scale
        keys = [self.keys(t) for t in range(tokens)]
        caches = [self.swa, self.compressed]
        kinds = ("none", "ue8m0", "e4m3")
        scales = any(c is not None and c.format.scales not in kinds for c in caches)
        return ref.attend_keys(
            query.astype(np.float64) * scale, keys, self.sink if sink else None, has_scales=scales
        )


def choose_rows(rng, batch: plan.V4Batch, ratio: int, width: int) -> np.ndarray:
    """Rows that an indexer might choose: any order, -1 anywhere, repetitions."""
    topk = np.full((batch.num_tokens, width), -1, np.int32)
    for t, (b, p) in enumerate(batch.tokens()):
        groups = (p + 1) // ratio
        if b < 0 or groups == 0:
            continue
        count = min(groups, width)
        topk[t, :count] = rng.permutation(groups)[:count]
        topk[t, rng.random(width) < 0.1] = -1
    return topk


def make_case(
    ratio,
    path,
    lens=(1, 2, 1, 9, 3, 20, 5),
    contexts=(40, 3, 0, 0, 60, 7, 33),
    *,
    formats=("fp8_v4", None),
    heads=3,
    padding=2,
    e4m3=False,
    layout="paged",
    seed=0,
    **changes,
) -> Case:
    rng = np.random.default_rng([seed, ratio, len(lens)])
    batch = make_batch(rng, lens, contexts, padding=padding)
    main, extra = formats[0], formats[1] or formats[0]
    has_scale = "fp8_e4m3" in (main, extra)
    options = SIZES.options() | {
        "topk_tokens": 16, "kv_cache_dtype": main, "compressed_kv_cache_dtype": extra,
        "kv_scale": KV_SCALE if has_scale else 1.0, "path": path, "device": device.NAME,
        "q_scale": 1.25 if e4m3 else 1.0,
    } | changes  # fmt: skip
    config = v4.Config(heads, **options)
    sink = make_sink(rng, heads + 2)
    q = random_bf16(rng, batch.num_tokens + 1, heads, 512)
    if e4m3:
        q = ref.e4m3_encode(ref.to_f32(q)).view(ref.E4M3)
    compressed = None
    if ratio > 1:
        compressed = make_cache(rng, extra, SIZES.block_size // ratio, layout)
    return Case(
        batch=batch,
        config=config,
        layer=v4.SparseMLA(config, ratio, v4.Weights(None, None, sink, None, None)),
        ratio=ratio,
        swa=make_cache(rng, main, SIZES.swa_block_size, layout),
        compressed=compressed,
        q=q,
        topk=choose_rows(rng, batch, ratio, 11) if ratio == 4 else None,
        sink=sink[:heads],
    )


def make_large_case(ratio, path=None, *, heads=128, **changes) -> Case:
    """A decode, and prefills of 680 tokens in 2 chunks, which Hopper's plan gathers if it may."""
    lens, contexts = (1, *4 * (170,)), (40, 0, 7, 33, 60)
    return make_case(
        ratio, path, lens, contexts, heads=heads, max_num_batched_tokens=1024, **changes
    )


def make_workspace(config) -> np.ndarray:
    """A workspace for path "separate"."""
    rows = -(-config.max_model_len // min(config.compress_ratios))
    rows += config.window + config.max_num_batched_tokens
    return np.zeros((config.prefill_chunk_size * rows, 512), ref.BF16)


def check(case: Case, **options) -> dict:
    got = case.run(**options)
    tokens = case.batch.num_tokens
    rest = {name: x[tokens:] for name, x in got.items()}
    got = {name: x[:tokens] for name, x in got.items()}
    assert_within_bounds(case.reference(), got)
    for name, x in rest.items():
        assert not ref.to_f32(x).any() if name == "out" else not x.any(), "rows behind the step"
    return got


def case_without_slots(ratio, path, tokens, **options) -> Case:
    """Every token has groups. Those that are not valid have top-k rows, as the others have."""
    case = make_case(ratio, path, (1, 2, 1, 9, 20), (120, 70, 33, 90, 64), **options)
    assert case.batch.num_tokens == 35
    case.batch.slot_mapping[:33] = 0  # 0 is a slot
    case.batch.slot_mapping[tokens] = -1
    if case.topk is not None:
        case.topk[33:] = [0, 5, 1, 2**31 - 1, -1, 3, -(2**31), 2, 9, 4, 8]
    return case


def take_share(case: Case, cp: tuple[int, int, int]) -> Case:
    """The case of one rank: compressed pages of its own with its own rows, all others NaN. The
    window's cache is that of the whole."""
    config = dataclasses.replace(case.config, cp=cp)
    sinks = None if cp[1] > 1 else case.sink
    layer = v4.SparseMLA(config, case.ratio, v4.Weights(None, None, sinks, None, None))
    share = dataclasses.replace(case, config=config, layer=layer)
    if case.compressed is None:
        return share
    size, whole = SIZES.block_size // case.ratio, case.batch.compressed[case.ratio]
    pages = iter(np.random.default_rng(cp).permutation(NUM_PAGES))
    name, layout = case.compressed.format.name, case.compressed.layout
    cache = Pages(name, layout, pages=NUM_PAGES, block_size=size)
    cache.memory[:] = 0xFF
    table = np.full((len(whole), whole.shape[1] + 1), -1, np.int32)
    for b, n in enumerate(case.batch.seq_lens):
        for row in range(int(n) // case.ratio):
            rank, local = owner(row, cp)
            if rank == cp[0]:
                if table[b, local // size] < 0:
                    table[b, local // size] = next(pages)
                at = int(table[b, local // size]) * size + local % size
                cache.put([at], *case.compressed.get([plan.slot(whole[b], row, size)]))
    batch = dataclasses.replace(case.batch, compressed={case.ratio: table})
    return dataclasses.replace(share, compressed=cache, batch=batch)
