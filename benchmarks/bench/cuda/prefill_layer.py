"""A layer of DeepSeek-V3's prefill on path "separate" on a CUDA device: `DenseMLA.forward`, and the
same operators one by one with a given kernel of multi-head attention: ours, the portable one, and
FlashAttention-3, for which keys are put together from their parts. One call, L2 flushed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import sparse_mla
from bench.common.rows import Bench
from bench.common.timing import Table, describe_error
from bench.cuda.dense_prefill import NOPE, ROPE, SCALE, VALUES, find_peer
from bench.cuda.timing import DEVICE, Array, torch

LATENT, PAGE = 512, 64
WORKSPACE_ROWS = 65536  # rows of context that are gathered at a time
# A fraction of the largest value. Kernels differ by roundings of partial results to bf16.
MOST_ERROR = 2**-6


@dataclass
class Shape:
    """Requests of (new tokens, cached tokens)."""

    name: str
    requests: list[tuple[int, int]]
    heads: int = 128

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.requests)


SHAPES = (
    Shape("8 × 1024", [(1024, 0)] * 8),
    Shape("1 × 4096", [(4096, 0)]),
    Shape("1 × 8192", [(8192, 0)]),
    Shape("8192 over 57,344 cached", [(8192, 57344)]),
)
QUICK = 2  # the first rows


@dataclass
class Rows:
    """Queries, and where requests start among them and among the keys."""

    q: Array
    query_starts: Array
    key_starts: Array
    longest: tuple[int, int]  # queries and keys of a request
    causal: bool


Attend = Callable[[Rows, Array, Array, Array], tuple[Array, Array]]


def attend(rows: Rows, k_nope: Array, k_pe: Array, v: Array, **options: Any) -> tuple[Any, Any]:
    """Our kernel. `options` are further ones of `varlen_attention`."""
    starts = rows.query_starts, rows.key_starts
    options |= {"softmax_scale": SCALE, "causal": rows.causal}
    return sparse_mla.varlen_attention(rows.q, (k_nope, k_pe), v, *starts, **options)


def attend_portably(rows: Rows, k_nope: Array, k_pe: Array, v: Array) -> tuple[Any, Any]:
    """The portable kernel: Hopper's has no window, even if it hides no key."""
    return attend(rows, k_nope, k_pe, v, window_size=(len(v), -1))


def attend_by_peer(
    function: Callable[..., Any], rows: Rows, k_nope: Array, k_pe: Array, v: Array
) -> tuple[Any, Any]:
    k = torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], -1)
    starts = rows.query_starts, rows.key_starts
    options = {"softmax_scale": SCALE, "causal": rows.causal, "return_attn_probs": True}
    out, lse = function(rows.q, k, v, *starts, *rows.longest, **options)
    return out, lse.T


class Layer:
    """A step's prefills, a layer's weight, and what is cached of them."""

    def __init__(self, shape: Shape) -> None:
        new, cached = zip(*shape.requests, strict=True)
        lens = [a + b for a, b in shape.requests]
        self.new = new
        starts = [0, *accumulate(new)]
        self.starts = ints(starts)
        pages = [-(-n // PAGE) for n in lens]
        self.table = torch.zeros(len(lens), max(pages), dtype=torch.int32, device=DEVICE)
        first, slots = 0, []
        for req, count in enumerate(pages):
            self.table[req, :count] = torch.arange(first, first + count)
            slots.append(torch.arange(first * PAGE + cached[req], first * PAGE + lens[req]))
            first += count
        self.slots = torch.cat(slots).to(DEVICE)
        self.cache = normal(first, PAGE, LATENT + ROPE)
        self.q = normal(shape.num_tokens, shape.heads, NOPE + ROPE)
        self.kv_c, self.k_pe = normal(shape.num_tokens, LATENT), normal(shape.num_tokens, ROPE)
        self.kv_b_proj = normal(LATENT, shape.heads * (NOPE + VALUES)) * LATENT**-0.5
        config = sparse_mla.dense.Config(
            shape.heads,
            softmax_scale=SCALE,
            block_size=PAGE,
            max_num_seqs=len(lens),
            max_num_batched_tokens=shape.num_tokens,
            max_model_len=max(lens),
            prefill_workspace_tokens=WORKSPACE_ROWS if any(cached) else None,
            path="separate",
            device=DEVICE,
        )
        self.layer = sparse_mla.dense.DenseMLA(config, kv_b_proj=self.kv_b_proj)
        self.builder = sparse_mla.dense.MetadataBuilder(config)
        common = sparse_mla.CommonAttentionMetadata(
            self.starts,
            ints(lens),
            self.slots,
            self.table,
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
        )
        self.metadata = self.builder.build(common)
        self.chunks = chunks_of(self.metadata) if self.metadata.has_context else []
        self.rows = normal(max((x[3] for x in self.chunks), default=0), LATENT + ROPE)

    def forward(self) -> Array:
        rows = self.q, self.kv_c, self.k_pe
        return self.layer.forward(*rows, self.cache, self.metadata)

    def run(self, attend: Attend) -> Array:
        """forward, operator by operator."""
        sparse_mla.concat_and_cache_mla(self.kv_c, self.k_pe, self.cache, self.slots)
        longest = max(self.new)
        own = Rows(self.q, self.starts, self.starts, (longest, longest), True)
        out, lse = self.attend(attend, own, self.kv_c, self.k_pe)
        for starts, counts, bounds, total, most in self.chunks:
            rows = self.rows[:total]
            sparse_mla.gather_kv_cache(
                self.cache, self.table, counts, bounds[:-1], out=rows, seq_starts=starts
            )
            chunk = Rows(self.q, self.starts, bounds, (longest, most), False)
            part = self.attend(attend, chunk, rows[:, :LATENT], rows[:, LATENT:])
            out, lse = sparse_mla.merge_attn_states(out, lse, *part)
        return out

    def attend(self, attend: Attend, rows: Rows, kv_c: Array, k_pe: Array) -> tuple[Any, Any]:
        up = sparse_mla.kv_up_proj(kv_c, self.kv_b_proj)
        up = up.view(len(kv_c), -1, NOPE + VALUES)
        return attend(rows, up[..., :NOPE], k_pe, up[..., NOPE:])


def chunks_of(metadata: sparse_mla.dense.Metadata) -> list[tuple[Any, ...]]:
    """Of each chunk the starts, the lengths, the bounds of lengths, their sum, and the longest."""
    arrays = [
        torch.from_dlpack(getattr(metadata, f"context_chunk_{name}"))
        for name in ("starts", "seq_lens", "cu_seq_lens")
    ]
    numbers: Any = metadata.context_chunk_seq_tot, metadata.context_chunk_max_seq_lens
    return [*zip(*arrays, *numbers, strict=True)]


def normal(*shape: int) -> Array:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def ints(values: list[int]) -> Array:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sides_of(layer: Layer) -> dict[str, Callable[[], Array]]:
    sides: dict[str, Callable[[], Array]] = {"forward": layer.forward}
    sides["operators"] = partial(layer.run, attend)
    sides["portable"] = partial(layer.run, attend_portably)
    peer = find_peer()
    if peer is not None:
        sides["FA3"] = partial(layer.run, partial(attend_by_peer, peer))
    return sides


def spend_by_kernel(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel of a call."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return {x.key: x.self_device_time_total for x in profile.key_averages()}


# Parts of the names of kernels that move a context's rows.
MOVES = ("merge_kernel", "gather_kernel")


def measure(bench: Bench) -> Table:
    columns = ["new × cached", "H", "forward µs", "operators µs", "portable µs", "FA3 µs"]
    columns += ["FA3 ÷ forward", "merges, gathers"]
    table = Table("A DeepSeek-V3 layer's prefill, up-projection included", columns, [], [])
    for shape in bench.choose(SHAPES, SHAPES[:QUICK]):
        try:
            add_row(bench, table, shape)
        except torch.cuda.OutOfMemoryError as reason:
            table.failures.append(f"{shape.name}: {describe_error(reason)}")
    return table


def add_row(bench: Bench, table: Table, shape: Shape) -> None:
    layer = Layer(shape)
    sides = sides_of(layer)
    want = sides["forward"]().float()
    for name, call in sides.items():
        worst = float((call().float() - want).abs().max() / want.abs().max())
        if not worst <= MOST_ERROR:
            table.failures.append(f"{shape.name}: {name} differs by {worst:.2g} of the largest")
    seconds = bench.time(sides)
    spent = spend_by_kernel(layer.forward)
    moved = sum(us for name, us in spent.items() if any(word in name for word in MOVES))
    share = moved / max(sum(spent.values()), 1e-9)
    us = {name: 1e6 * x for name, x in seconds.items()}
    cells = [f"{us[name]:.0f}" if name in us else "–" for name in ("operators", "portable", "FA3")]
    ratio = f"{us['FA3'] / us['forward']:.2f}" if "FA3" in us else "–"
    labels = {"requests": shape.name, "heads": shape.heads}
    row = [shape.name, str(shape.heads), f"{us['forward']:.0f}", *cells, ratio, f"{share:.1%}"]
    table.add(row, labels | {f"{name}_us": x for name, x in us.items()} | {"moved": share})
