"""Builds of a paged step in every mode, and chains of array operators that make the same metadata,
as an engine would write them, in NumPy or PyTorch. No chain waits for a device. On CUDA there are
two times: that of the host, which waits for nothing, and that of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from bench.common import timing
from bench.common.composition import torch
from bench.common.noise import spread_of
from bench.common.rows import Bench
from bench.common.timing import describe_error
from bench.cuda.timing import synchronize
from bench.tables.calls import BUILDS, host_seconds
from sparse_mla import paged

Array = Any
PAGE_SIZE, DRAFTS, STEPS, BRANCHES, CHUNK, ENCODER = 64, 8, 5, 4, 256, 100
TREE = {"topk": BRANCHES}
DECODES = ((256, 512), (256, 32_768))  # requests, tokens of each
OTHERS = (64, 4096)  # requests and tokens in other modes
CPU_QUICK = (4, 512)
QUEUED = 8  # calls that the host starts while the device is busy with something else
BUSY_CYCLES = 4_000_000  # longer than the host needs for them


@dataclass
class Table:
    """Rows of pages or slots, of which those of `lens` keys are specified."""

    rows: Array
    lens: Array
    entry: int = PAGE_SIZE  # keys per entry


Found = dict[str, Any]  # a name in the metadata -> an array, or a Table


class Batch:
    """Requests of `length` tokens, as arrays of `xp`: numpy, or torch and a device. The pages of a
    request are anywhere in the pool."""

    def __init__(self, num_reqs: int, length: int, xp: Any, device: str) -> None:
        self.num_reqs, self.length, self.xp, self.device = num_reqs, length, xp, device
        rng = np.random.default_rng(0)
        # A request has its tokens, those of an encoder in front, and its drafts.
        self.width = -(-(ENCODER + length + DRAFTS) // PAGE_SIZE) * PAGE_SIZE
        pages = rng.permutation(num_reqs * self.width // PAGE_SIZE)
        slots = pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)
        self.pool_table = self.put(slots.reshape(num_reqs, self.width))
        self.pool = self.put(rng.permutation(num_reqs), np.int64)
        self.host_lens = np.full(num_reqs, length, np.int32)
        self.lens = self.put(self.host_lens)
        self.host_new = np.full(num_reqs, min(4, length), np.int32)
        self.new = self.put(self.host_new)
        self.encoders = self.put(np.full(num_reqs, ENCODER))
        seen = rng.random((num_reqs, DRAFTS, DRAFTS)) < 0.5
        seen |= np.eye(DRAFTS, dtype=bool)
        mask = np.concatenate([np.ones((num_reqs, DRAFTS, length), bool), seen], -1)
        self.mask = self.put(mask.ravel(), bool)
        self.loc = self.put(np.arange(num_reqs * BRANCHES * STEPS))
        self.zero = self.put(np.zeros(1))
        self.requests = self.put(np.arange(num_reqs), np.int64)
        self.drafts = self.put(np.arange(DRAFTS))

    def put(self, values: np.ndarray, dtype: Any = np.int32) -> Array:
        return self.xp.asarray(values.astype(dtype), device=self.device)

    # --- what chains are made of ------------------------------------------------------------------

    def count(self, end: int, step: int = 1) -> Array:
        return self.xp.arange(0, end, step, dtype=self.xp.int32, device=self.device)

    def running(self, lens: Array) -> Array:
        return self.xp.concat([self.zero, self.xp.cumsum(lens, 0, dtype=self.xp.int32)])

    def pages(self, most: int) -> Array:
        return self.pool_table[self.pool, 0:most:PAGE_SIZE] // PAGE_SIZE

    def step(self, lens: Array, most: int, query_len: int = 1) -> Found:
        """What every mode has, with the same number of queries per request."""
        return {
            "cache_seqlens_int32": lens,
            "cu_seqlens_q": self.count(query_len * self.num_reqs + 1, query_len),
            "cu_seqlens_k": self.running(lens),
            "page_table": Table(self.pages(most), lens),
        }

    def rows(self, lens: Array, slots: Array) -> Found:
        """The rows of a tree."""
        return {
            "expand.cache_seqlens_int32": lens,
            "expand.cu_seqlens_q": self.count(len(lens) + 1),
            "expand.cu_seqlens_k": self.running(lens),
            "expand.slot_table": Table(slots, lens, 1),
        }

    # --- modes ------------------------------------------------------------------------------------

    def decode(self) -> Found:
        return self.step(self.lens, self.length)

    def draft(self, step: int = 1) -> Found:
        return self.step(self.lens + (step + 1), self.length + step + 1)

    def verify(self) -> Found:
        return self.step(self.lens + DRAFTS, self.length + DRAFTS, DRAFTS)

    def verify_tree(self) -> Found:
        """SGLang's way: sorts the drafts of each row, those that it sees first."""
        slots = self.pool_table[self.pool[:, None], self.lens[:, None] + self.drafts]
        width = (self.lens + DRAFTS)[:, None, None]
        first = self.running(DRAFTS * (self.lens + DRAFTS))[:-1, None, None]
        at = first + self.drafts[:, None] * width + self.lens[:, None, None] + self.drafts
        seen = self.mask[at]
        order = self.xp.argsort(self.xp.where(seen, self.drafts, self.drafts + DRAFTS), -1)
        table = slots[self.requests[:, None, None], order].reshape(-1, DRAFTS)
        lens = seen.sum(-1, dtype=self.xp.int32).reshape(-1)
        return self.step(self.lens, self.length, DRAFTS) | self.rows(lens, table)

    def extend(self) -> Found:
        return self.step(self.lens, self.length) | {"cu_seqlens_q": self.running(self.new)}

    def local(self) -> Found:
        """A decode, and its blocks of positions for layers with local attention."""
        found = self.step(self.lens, self.length)
        table, columns = found["page_table"].rows, CHUNK // PAGE_SIZE
        used = (self.lens - 1) % CHUNK + 1
        at = ((self.lens - 1) // CHUNK * columns)[:, None] + self.count(columns)
        at = at.clip(max=table.shape[1] - 1)
        return found | {
            "local_attn_metadata.local_query_start_loc": self.count(self.num_reqs + 1),
            "local_attn_metadata.local_seqused_k": used,
            "local_attn_metadata.local_block_table": Table(table[self.requests[:, None], at], used),
        }

    def encoder(self) -> Found:
        """Tables of the encoder's tokens, and of the text behind them."""
        pads = self.encoders % PAGE_SIZE
        lens = self.lens + pads
        columns = self.count(self.length + PAGE_SIZE - 1, PAGE_SIZE)
        at = (self.encoders - pads)[:, None] + columns
        text = self.pool_table[self.pool[:, None], at] // PAGE_SIZE
        return {
            "cache_seqlens_int32": lens,
            "cu_seqlens_q": self.count(self.num_reqs + 1),
            "cu_seqlens_k": self.running(lens),
            "page_table": Table(text, lens),
            "cache_leftpad": pads,
            "encoder_lens_int32": self.encoders,
            "encoder_cu_seqlens_k": self.running(self.encoders),
            "encoder_page_table": Table(self.pages(ENCODER), self.encoders),
        }

    def shared_prefix(self) -> Found:
        """A decode whose requests begin with half of their tokens in common."""
        found, length = self.decode(), self.length // 2
        lens = self.xp.full((1,), length, dtype=self.xp.int32, device=self.device)
        row = found["page_table"].rows[:1, : -(-length // PAGE_SIZE)]
        pads = self.xp.full((self.num_reqs,), length, dtype=self.xp.int32, device=self.device)
        return found | {
            "cache_leftpad": pads,
            "prefix.cache_seqlens_int32": lens,
            "prefix.cu_seqlens_q": self.count(self.num_reqs + 1, self.num_reqs),
            "prefix.cu_seqlens_k": self.running(lens),
            "prefix.page_table": Table(row, lens),
        }

    def all_drafts(self) -> list[Found]:
        """The steps of a draft, which share one table."""
        first, steps = self.step(self.lens, self.length + STEPS - 1), []
        for step in range(1, STEPS):
            lens = self.lens + step
            table = Table(first["page_table"].rows, lens)
            more = {"cu_seqlens_k": self.running(lens), "page_table": table}
            steps.append(first | more | {"cache_seqlens_int32": lens})
        return steps

    def all_branches(self) -> list[Found]:
        """The same with branches, whose rows have a slot more in each step."""
        first = self.step(self.lens, self.length, BRANCHES)
        slots = self.loc.reshape(-1, STEPS)
        one = self.xp.ones_like(slots[:, 0])
        return [first | self.rows(one * (i + 1), slots[:, : i + 1]) for i in range(STEPS - 1)]


Chain = Callable[[Batch], Any]


@dataclass(frozen=True)
class Kind:
    """A step of some mode: what its config adds, what build is given, and the chain."""

    name: str
    mode: str  # "": all steps of a draft
    chain: Chain
    config: dict[str, Any]
    given: Callable[[Batch], dict[str, Any]] = lambda batch: {}


def new_tokens(batch: Batch) -> dict[str, Any]:
    return {"extend_seq_lens": batch.new, "extend_seq_lens_cpu": batch.host_new}


def encoder_tokens(batch: Batch) -> dict[str, Any]:
    host = np.full(batch.num_reqs, ENCODER, np.int32)
    return {"encoder_lens": batch.encoders, "encoder_lens_cpu": host}


DECODE = Kind("decode", "decode", Batch.decode, {})
KINDS = (
    DECODE,
    Kind("draft step 1 of a chain", "decode", Batch.draft, {}, lambda batch: {"spec_step": 1}),
    Kind("verify, a chain", "target_verify", Batch.verify, {}),
    Kind(
        "verify, a tree", "target_verify", Batch.verify_tree, TREE,
        lambda batch: {"custom_mask": batch.mask},
    ),
    Kind("extend", "extend", Batch.extend, {}, new_tokens),
    Kind("draft extend", "draft_extend", Batch.extend, {}, new_tokens),
    Kind("decode with local layers", "decode", Batch.local, {"attention_chunk": CHUNK}),
    Kind(
        "decode with an encoder", "decode", Batch.encoder, {"is_encoder_decoder": True},
        encoder_tokens,
    ),
    Kind(
        "decode with a shared prefix", "decode", Batch.shared_prefix, {},
        lambda batch: {"common_prefix_len": batch.length // 2},
    ),
    Kind("all steps of a chain", "", Batch.all_drafts, {}),
    Kind(
        "all steps of a tree", "", Batch.all_branches, TREE,
        lambda batch: {"out_cache_loc": batch.loc},
    ),
)  # fmt: skip


def make_config(kind: Kind, batch: Batch) -> paged.Config:
    return paged.Config(
        max_bs=batch.num_reqs,
        max_num_tokens=batch.num_reqs * DRAFTS,
        max_context_len=batch.width - DRAFTS,
        page_size=PAGE_SIZE,
        num_draft_tokens=DRAFTS,
        speculative_num_steps=STEPS,
        device=batch.device,
        **kind.config,
    )


def make_build(kind: Kind, batch: Batch) -> Callable[[], Any]:
    """The build of ours."""
    config = make_config(kind, batch)
    lens = {"seq_lens_cpu": batch.host_lens}
    given = lens | kind.given(batch)
    if not kind.mode:
        draft = paged.MultiStepDraft(config, batch.pool_table)
        return lambda: draft.build(batch.lens, batch.pool, **given)
    builder = paged.MetadataBuilder(config, batch.pool_table)
    return lambda: builder.build(kind.mode, batch.lens, batch.pool, **given)


def make_replay(kind: Kind, batch: Batch) -> Callable[[], Any] | None:
    """The replay of a capture of ours; None of what cannot be captured."""
    given = {name: x for name, x in kind.given(batch).items() if not name.endswith("_cpu")}
    if kind.mode == "extend" or "common_prefix_len" in given:
        return None
    bs, config, arrays = batch.num_reqs, make_config(kind, batch), (batch.lens, batch.pool)
    if not kind.mode:
        draft = paged.MultiStepDraft(config, batch.pool_table)
        draft.capture(bs, bs * config.topk, *arrays, **given)
        return lambda: draft.replay(bs, *arrays, **given)
    builder = paged.MetadataBuilder(config, batch.pool_table)
    per_request = 1 if kind.mode == "decode" else DRAFTS
    builder.capture(kind.mode, bs, bs * per_request, *arrays, **given)
    return lambda: builder.replay(kind.mode, bs, *arrays, **given)


def find_differences(built: Any, found: Any, to_numpy: Callable[[Array], np.ndarray]) -> list[str]:
    """The names of metadata that are not the chain's."""
    if isinstance(built, list):
        pairs = zip(built, found, strict=True)
        return [name for pair in pairs for name in find_differences(*pair, to_numpy)]
    wrong = []
    for name, value in found.items():
        got = to_numpy(attrgetter(name)(built))
        if isinstance(value, Table):
            want, lens = to_numpy(value.rows), to_numpy(value.lens)
            columns = min(want.shape[1], got.shape[1])
            is_live = np.arange(columns) < -(-lens[:, None] // value.entry)
            is_equal = got[:, :columns] == want[:, :columns]
            right = bool(is_equal[is_live].all()) and -(-lens.max() // value.entry) <= columns
        else:
            right = np.array_equal(got, to_numpy(value))
        if not right:
            wrong.append(name)
    return wrong


# --- tables --------------------------------------------------------------------------------------


def measure(bench: Bench) -> timing.Table:
    quick = bench.effort.quick
    table = timing.Table("Metadata of a paged step", ["step", "B × tokens", "page"], [], [])
    xp, decodes, steps = torch, DECODES[:1] if quick else DECODES, OTHERS
    if bench.is_cuda:
        sides = ("ours", "build"), ("replay", "replay"), ("chain", "PyTorch")
        table.columns += [f"{name}: {x} µs" for _, name in sides for x in ("host", "device")]
    else:
        table.title += f", {bench.threads} threads"
        table.columns += ["build, µs", "replay, µs", "NumPy, µs", "ratio"]
        xp = np
        decodes, steps = ((CPU_QUICK,), CPU_QUICK) if quick else (DECODES, OTHERS)
    add = add_device_row if bench.is_cuda else add_row
    for shape in decodes:
        add(bench, table, DECODE, Batch(*shape, xp, bench.device))
    batch = Batch(*steps, xp, bench.device)
    for kind in KINDS[1:]:
        try:
            add(bench, table, kind, batch)
        except Exception as error:  # the other modes go on
            table.failures.append(f"{kind.name}: {describe_error(error)}")
    return table


def find_sides(
    bench: Bench, table: timing.Table, kind: Kind, batch: Batch
) -> tuple[list[str], dict[str, Any], dict[str, Callable[[], Any]]]:
    """The first cells of a row, the same in its record, and the calls, which have been judged."""
    build, replay = make_build(kind, batch), make_replay(kind, batch)
    shape = f"{batch.num_reqs} × {batch.length}"
    sides = {"ours": build, "chain": lambda: kind.chain(batch)}
    sides |= {"replay": replay} if replay is not None else {}
    wrong = [
        name
        for call in filter(None, (build, replay))
        for name in find_differences(call(), kind.chain(batch), bench.arrays.get)
    ]
    table.failures += [f"{kind.name}, {shape}: wrong {name}" for name in wrong]
    record = {"step": kind.name, "B × tokens": shape, "right": not wrong}
    return [kind.name, shape, str(PAGE_SIZE)], record, sides


def add_row(bench: Bench, table: timing.Table, kind: Kind, batch: Batch) -> None:
    row, record, sides = find_sides(bench, table, kind, batch)
    us = {name: 1e6 * x for name, x in bench.time(sides).items()}
    row += [f"{us[side]:.1f}" if side in us else "–" for side in ("ours", "replay", "chain")]
    record |= {"us": us["ours"], "replay_us": us.get("replay"), "chain_us": us["chain"]}
    table.add([*row, f"{us['chain'] / us['ours']:.2f}×"], record)


def add_device_row(bench: Bench, table: timing.Table, kind: Kind, batch: Batch) -> None:
    row, record, sides = find_sides(bench, table, kind, batch)
    on_host = host_seconds(sides, BUILDS, bench.effort)
    on_device = device_seconds(sides, bench.effort)
    right = record.pop("right")
    for side, name in (("ours", "ours"), ("replay", "replay"), ("chain", "PyTorch")):
        if side not in sides:
            row += ["–", "–"]
            continue
        times = 1e6 * on_host[side], 1e6 * on_device[side]
        row += [f"{us:.1f}" for us in times]
        record |= {f"{name}_host_us": times[0], f"{name}_device_us": times[1]}
    table.add(row, record | {"right": right})


def device_seconds(sides: dict[str, Callable[[], object]], effort: Any) -> dict[str, float]:
    """Seconds per call on the device, which has all calls in its queue before the first begins. The
    sides are measured in turn."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(effort.rounds):
        for name, side in sides.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            start.record()
            for _ in range(QUEUED):
                side()
            end.record()
            synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3 / QUEUED)
    effort.spreads += map(spread_of, samples.values())
    return {name: effort.pick(times) for name, times in samples.items()}
