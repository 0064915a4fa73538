"""sparse_attention on a CUDA device beside FlashMLA and beside the floor; errors first.

Decode rotates over as many inputs as the L2 cache cannot hold. Prefill's queries alone are larger
than the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sparse_mla
from sparse_mla._bench.cuda_inputs import BLOCK_SIZE, draw_slots, make_cache, upconvert
from sparse_mla._bench.cuda_judge import judge
from sparse_mla._bench.cuda_timing import (
    DEVICE,
    Array,
    CudaEffort,
    describe_error,
    floor_seconds,
    interleave,
    l2_bytes,
    memory_bytes,
    synchronize,
    torch,
)
from sparse_mla._bench.peer import Peer, read_attend, read_decode
from sparse_mla._bench.timing import Table

SOFTMAX_SCALE = (128 + 64) ** -0.5
ROW_BYTES = {"fp8_ds_mla": 656, "bfloat16": 1152}
REQUEST_TOKENS = 36864  # slots per request; lengths vary around 32k
MEAN_TOKENS = 32768
MAX_INPUT_SETS = 128
MIN_CALLS = 12  # of a replay, so that starting it costs little of each; large batches need less
LARGE_BYTES = 1 << 30
PREFILL_TOKENS = 4096
PREFILL_TOPK = 2048

# kv_format, K, head counts, (requests, tokens per request)
FULL_BATCHES = [(1, 1), (2, 1), (4, 1), (8, 1), (64, 1), (128, 1), (64, 2), (128, 2)]
FULL_DECODES = [
    ("fp8_ds_mla", 2048, (16, 32, 64, 128), FULL_BATCHES),
    ("fp8_ds_mla", 16384, (64, 128), [(148, 2)]),
    ("bfloat16", 2048, (16, 64, 128), [(1, 1), (64, 1), (64, 2)]),
]
QUICK_DECODES = [
    ("fp8_ds_mla", 2048, (16, 64, 128), [(1, 1), (8, 1), (64, 1), (128, 2)]),
    ("bfloat16", 2048, (128,), [(64, 1)]),
]
FULL_PREFILL_KEYS = (8192, 32768, 131072)
QUICK_PREFILL_KEYS = (32768,)
PREFILL_HEADS = (64, 128)

SIDE_COLUMNS = ["µs", "TFLOP/s", "floor µs", "× floor", "error/bound"]
PEER_COLUMNS = ["FlashMLA µs", "÷ ours", "error/bound"]


# --- one row -------------------------------------------------------------------------------------


@dataclass
class Side:
    """Calls over different inputs, and what is known of the first one's result."""

    calls: Sequence[Callable[[], tuple]]
    read: Callable[[tuple], tuple[Array, Array]]  # what a call returned -> out [T, H, 512], lse
    judge: Callable[[tuple[Array, Array]], float]
    owned: tuple[Array, ...] = ()  # the memory that the first call writes, where it was given
    error: float = math.nan  # as a fraction of its bound
    seconds: float = math.nan
    failure: str = ""

    def check(self) -> None:
        """Runs every input once: kernels are loaded, and the first result is judged."""
        for array in self.owned:
            array.fill_(math.nan)
        self.error = self.judge(self.read(self.calls[0]()))
        if self.owned and not self.error <= 1:
            self.failure = f"error is {self.error:.3g} of its bound"
        for call in self.calls[1:]:
            call()
        synchronize()


@dataclass
class Work:
    """What a call must do: its FLOP, and its fewest bytes to and from memory."""

    num_tokens: int
    num_heads: int
    topk: int
    num_keys: int  # that there are
    kv_format: str
    labels: dict[str, Any] = field(default_factory=dict)

    @property
    def flop(self) -> float:
        return 2 * self.num_tokens * self.num_heads * self.topk * (576 + 512)

    @property
    def num_bytes(self) -> float:
        rows = min(self.num_tokens * self.topk, self.num_keys)
        return rows * ROW_BYTES[self.kv_format] + self.num_tokens * self.num_heads * 2 * (576 + 512)


def measure_sides(sides: dict[str, Side], effort: CudaEffort) -> None:
    """Fills errors and times in. A side that fails leaves the others their numbers."""
    for side in sides.values():
        try:
            side.check()
        except Exception as error:  # whatever it is, the other rows go on
            side.failure = describe_error(error)
            side.calls = ()
    live = {name: side for name, side in sides.items() if side.calls}
    before = {name: [a.clone() for a in side.owned] for name, side in live.items()}
    try:
        time_sides(live, effort)
    except Exception:  # one of them cannot be captured: which one, each alone will say
        for name, side in live.items():
            try:
                time_sides({name: side}, effort)
            except Exception as error:
                side.failure = side.failure or describe_error(error)
    for name, side in live.items():
        same = [torch.equal(a, b) for a, b in zip(before[name], side.owned, strict=True)]
        if not all(same) and not side.failure:
            side.failure = "replays changed the result's bits"


def time_sides(sides: dict[str, Side], effort: CudaEffort) -> None:
    seconds = interleave({name: side.calls for name, side in sides.items()}, effort)
    for name, side in sides.items():
        side.seconds = seconds[name]


def add_row(table: Table, work: Work, ours: Side, peer: Side | None) -> None:
    floor = floor_seconds(work.flop, work.num_bytes)
    row = [str(value) for value in work.labels.values()]
    record: dict[str, object] = dict(work.labels) | {"floor_us": 1e6 * floor}
    if math.isnan(ours.seconds):
        row += ["FAIL"] + [""] * (len(SIDE_COLUMNS) - 1)
    else:
        row += [
            f"{1e6 * ours.seconds:.1f}",
            f"{work.flop / ours.seconds / 1e12:.0f}",
            f"{1e6 * floor:.1f}",
            f"{ours.seconds / floor:.2f}",
            f"{'FAIL ' if ours.failure else ''}{ours.error:.3g}",
        ]
        record |= {
            "us": 1e6 * ours.seconds,
            "tflops": work.flop / ours.seconds / 1e12,
            "over_floor": ours.seconds / floor,
            "error_over_bound": finite(ours.error),
        }
    if ours.failure:
        record["failure"] = ours.failure
        table.failures.append(f"{show(work.labels)}: {ours.failure}")
    if peer is not None:
        row += peer_cells(ours, peer, record)
        if peer.failure:
            table.notes.append(f"FlashMLA, {show(work.labels)}: {peer.failure}")
    table.add(row, record)


def peer_cells(ours: Side, peer: Side, record: dict[str, object]) -> list[str]:
    if math.isnan(peer.seconds):
        record["peer_failure"] = peer.failure
        return ["failed", "", ""]
    ratio = peer.seconds / ours.seconds
    record |= {
        "peer_us": 1e6 * peer.seconds,
        "peer_over_ours": finite(ratio),
        "peer_error_over_bound": finite(peer.error),
    }
    shown = "" if math.isnan(ratio) else f"{ratio:.2f}×"
    return [f"{1e6 * peer.seconds:.1f}", shown, f"{peer.error:.3g}"]


def finite(value: float) -> float | None:
    """As JSON can hold it."""
    return value if math.isfinite(value) else None


def show(labels: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in labels.items())


def make_ours(
    queries: Sequence[Array], kv: Array, indices: Sequence[Array], sink: Array = None
) -> Side:
    """Calls with all of their memory given, as an engine makes them; one workspace for all."""
    num_tokens, num_heads, _ = queries[0].shape
    topk = indices[0].shape[1]
    size = sparse_mla.attention_workspace_size(num_tokens, num_heads, topk, device=DEVICE)
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)

    def make_call(q: Array, slots: Array, out: Array, lse: Array) -> Callable[[], tuple]:
        return lambda: sparse_mla.sparse_attention(
            q,
            kv,
            slots,
            softmax_scale=SOFTMAX_SCALE,
            attn_sink=sink,
            out=out,
            lse=lse,
            workspace=workspace,
        )

    shape = (num_tokens, num_heads)
    outs = [torch.empty((*shape, 512), dtype=torch.bfloat16, device=DEVICE) for _ in queries]
    lses = [torch.empty(shape, dtype=torch.float32, device=DEVICE) for _ in queries]
    calls = [make_call(*given) for given in zip(queries, indices, outs, lses, strict=True)]

    def judge_first(results: tuple[Array, Array]) -> float:
        return judge(queries[0], kv, indices[0], results, SOFTMAX_SCALE, sink)

    return Side(calls, lambda results: results[:2], judge_first, (outs[0], lses[0]))


# --- decode --------------------------------------------------------------------------------------


def measure_decode(effort: CudaEffort, peer: Peer | None) -> Table:
    columns = ["cache", "H", "requests", "K", *SIDE_COLUMNS, *(PEER_COLUMNS if peer else [])]
    table = Table("Decode, lengths around 32k, uniformly random slots", columns, [], [])
    for kv_format, topk, head_counts, batches in QUICK_DECODES if effort.quick else FULL_DECODES:
        requests = max(num_reqs for num_reqs, _ in batches)
        try:
            cache, lengths = make_requests(requests, kv_format, topk)
        except Exception as error:  # no memory for it: the other formats may fit
            table.failures.append(f"{kv_format} K {topk}: {describe_error(error)}")
            continue
        for num_heads in head_counts:
            for num_reqs, query_len in batches:
                labels = {
                    "kv_format": kv_format,
                    "H": num_heads,
                    "requests": f"{num_reqs} × {query_len}",
                    "K": topk,
                }
                num_tokens = num_reqs * query_len
                num_keys = int(lengths.sum())
                work = Work(num_tokens, num_heads, topk, num_keys, kv_format, labels)
                try:
                    add_decode(table, work, num_reqs, cache, lengths, peer, effort)
                except Exception as error:  # no memory, or a device that an earlier row has lost
                    table.failures.append(f"{show(labels)}: {describe_error(error)}")
        del cache, lengths  # before the next one is made
    return table


def make_requests(num_reqs: int, kv_format: str, topk: int) -> tuple[Array, Array]:
    """A cache of at most a quarter of the device's memory, and the requests' lengths [R]."""
    affordable = memory_bytes() // 4 // ROW_BYTES[kv_format] // num_reqs
    tokens = max(topk, min(REQUEST_TOKENS, affordable)) // BLOCK_SIZE * BLOCK_SIZE
    least = max(topk, 2 * MEAN_TOKENS * tokens // REQUEST_TOKENS - tokens)
    cache = make_cache(num_reqs * tokens, kv_format)
    return cache, torch.randint(least, tokens + 1, (num_reqs,), device=DEVICE)


def add_decode(
    table: Table,
    work: Work,
    num_reqs: int,
    cache: Array,
    lengths: Array,
    peer: Peer | None,
    effort: CudaEffort,
) -> None:
    shape = (work.num_tokens, work.num_heads, 576)
    num_sets = max(2, min(MAX_INPUT_SETS, math.ceil(2 * l2_bytes() / work.num_bytes)))
    request_tokens = len(cache) * BLOCK_SIZE // len(lengths)
    starts = torch.arange(len(lengths), device=DEVICE) * request_tokens
    queries, indices = [], []
    for index in range(num_sets):
        requests = (torch.arange(num_reqs, device=DEVICE) + index * num_reqs) % len(lengths)
        requests = requests.repeat_interleave(work.num_tokens // num_reqs)
        queries.append(torch.randn(shape, device=DEVICE).bfloat16())
        indices.append(draw_slots(starts[requests], lengths[requests], work.topk))
    sides = {"ours": make_ours(queries, cache, indices)}
    if peer is not None:
        sides["peer"] = make_decode_peer(peer, work, num_reqs, queries, cache, indices)
    repeats = 1 if work.num_bytes > LARGE_BYTES else math.ceil(MIN_CALLS / num_sets)
    for side in sides.values():
        side.calls = list(side.calls) * repeats
    measure_sides(sides, effort)
    add_row(table, work, sides["ours"], sides.get("peer"))


def make_decode_peer(
    peer: Peer,
    work: Work,
    num_reqs: int,
    queries: Sequence[Array],
    cache: Array,
    indices: Sequence[Array],
) -> Side:
    given = list(zip(queries, indices, strict=True))
    if work.kv_format == "fp8_ds_mla":
        plan = peer.get_plan()
        calls = [peer.decode(q, cache, i, SOFTMAX_SCALE, num_reqs, plan) for q, i in given]
        read = read_decode
    else:
        calls = [peer.attend(q, cache, i, SOFTMAX_SCALE, None) for q, i in given]
        read = read_attend
    return Side(
        calls,
        lambda results: read(results, work.num_heads),
        lambda results: judge(queries[0], cache, indices[0], results, SOFTMAX_SCALE, None),
    )


# --- prefill -------------------------------------------------------------------------------------


def measure_prefill(effort: CudaEffort, peer: Peer | None) -> Table:
    """Both of our ways beside the peer's kernel on the bf16 workspace, which its users must gather
    first: that gather is in no number here."""
    columns = ["kv", "H", "keys", *SIDE_COLUMNS, *(PEER_COLUMNS if peer else [])]
    title = f"Prefill, T = {PREFILL_TOKENS}, K = {PREFILL_TOPK}, with a sink"
    table = Table(title, columns, [], [])
    for num_keys in QUICK_PREFILL_KEYS if effort.quick else FULL_PREFILL_KEYS:
        cache = make_cache(num_keys, "fp8_ds_mla")
        workspace = upconvert(cache)
        for num_heads in PREFILL_HEADS:
            try:
                add_prefills(table, num_heads, cache, workspace, peer, effort)
            except Exception as error:  # no memory, or a device that an earlier row has lost
                labels = {"H": num_heads, "keys": num_keys}
                table.failures.append(f"{show(labels)}: {describe_error(error)}")
    return table


def add_prefills(
    table: Table,
    num_heads: int,
    cache: Array,
    workspace: Array,
    peer: Peer | None,
    effort: CudaEffort,
) -> None:
    num_keys = len(workspace)
    q = torch.randn(PREFILL_TOKENS, num_heads, 576, device=DEVICE).bfloat16()
    starts = torch.zeros(PREFILL_TOKENS, dtype=torch.long, device=DEVICE)
    indices = draw_slots(starts, starts + num_keys, PREFILL_TOPK)
    sink = torch.randn(num_heads, device=DEVICE)
    sides = {
        "workspace": make_ours([q], workspace, [indices], sink),
        "direct": make_ours([q], cache, [indices], sink),
    }
    if peer is not None:
        sides["peer"] = Side(
            [peer.attend(q, workspace, indices, SOFTMAX_SCALE, sink)],
            lambda results: read_attend(results, num_heads),
            lambda results: judge(q, workspace, indices, results, SOFTMAX_SCALE, sink),
        )
    measure_sides(sides, effort)
    for name, kv_format in (("workspace", "bfloat16"), ("direct", "fp8_ds_mla")):
        labels = {"kv_format": kv_format, "H": num_heads, "keys": num_keys}
        work = Work(PREFILL_TOKENS, num_heads, PREFILL_TOPK, num_keys, kv_format, labels)
        add_row(table, work, sides[name], sides.get("peer"))
