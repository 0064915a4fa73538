"""The operators around attention on a CUDA device, in a step of few tokens: their time is that of a
launch, and of what a kernel waits for. Calls in a row are measured, and a first call whose inputs
and code are not in the caches. Results are judged elsewhere, at larger sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sparse_mla
from bench.common.timing import Table
from bench.cuda.timing import (
    DEVICE,
    Array,
    CudaEffort,
    describe_error,
    interleave,
    interleave_flushed,
    torch,
)
from sparse_mla._rows import V4_ROW_BYTES

TOKENS = (1, 17, 128)
CALLS_PER_REPLAY = 20
HEADS, INDEX_HEADS, Q_LORA, TOPK, WINDOW = 64, 64, 1024, 512, 128  # V4-Flash
BLOCK_SIZE, PAGES = 64, 64  # per request
CONTEXT = BLOCK_SIZE * PAGES
LONG, LONG_TOPK, RANKS = 65536, 2048, 4  # DeepSeek-V3.2
STATE_BLOCK_SIZES = {4: 4, 128: 8}

Named = Iterator[tuple[str, Callable[[], object]]]


def measure_helpers(effort: CudaEffort) -> Table:
    columns = ["operator", *(f"T {n}, µs" for n in TOKENS), f"T {TOKENS[0]}, flushed, µs"]
    title = f"Operators of a decode, {CALLS_PER_REPLAY} calls per graph; flushed: one call"
    table = Table(title, columns, [], [])
    one = torch.zeros(1, device=DEVICE)
    times: dict[str, list[float]] = {}
    flushed: dict[str, float] = {}
    for num_tokens in TOKENS:
        for make in (make_launch(one), *HELPERS):
            try:
                for name, call in make(num_tokens):
                    call()
                    sides = {"ours": [call] * CALLS_PER_REPLAY}
                    times.setdefault(name, []).append(interleave(sides, effort)["ours"])
                    if num_tokens == TOKENS[0]:
                        flushed[name] = interleave_flushed(sides, effort)["ours"]
            except Exception as error:  # the other operators go on
                table.failures.append(f"{make.__name__}, T {num_tokens}: {describe_error(error)}")
    for name, seconds in times.items():
        row = [f"{1e6 * x:.2f}" for x in seconds] + ["-"] * (len(TOKENS) - len(seconds))
        record: dict[str, object] = {"operator": name, "us_flushed": 1e6 * flushed[name]}
        record |= {f"us_{n}": 1e6 * x for n, x in zip(TOKENS, seconds, strict=False)}
        table.add([name, *row, f"{1e6 * flushed[name]:.2f}"], record)
    return table


def make_launch(one: Array) -> Callable[[int], Named]:
    """PyTorch's addition to one number. It begins when the call before has ended."""

    def launches(num_tokens: int) -> Named:
        yield "torch.add of one number, for comparison", lambda: torch.add(one, 1, out=one)

    return launches


def zeros(*shape: int, dtype: Any = None) -> Array:
    return torch.zeros(*shape, dtype=dtype or torch.uint8, device=DEVICE)


def bf16(*shape: int) -> Array:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def angles() -> Array:
    return torch.from_numpy(sparse_mla.rope_table(CONTEXT, fp32_angles=True)).to(DEVICE)


def last_positions(num_tokens: int) -> Array:
    """Each token closes a group of its request, of any ratio."""
    return torch.full((num_tokens,), CONTEXT - 1, device=DEVICE)


def make_tables(num_tokens: int, pages: int) -> tuple[Array, Array]:
    """A block table with pages of its own for every request, and the last page of each."""
    table = torch.randperm(num_tokens * pages, device=DEVICE).int().view(num_tokens, pages)
    return table, table[:, -1].long()


def norms(num_tokens: int) -> Named:
    q, kv = bf16(num_tokens, Q_LORA + 512).split([Q_LORA, 512], 1)
    given = {"q_out": bf16(num_tokens, Q_LORA), "kv_out": bf16(num_tokens, 512), "eps": 1e-6}
    weights = bf16(Q_LORA), bf16(512)
    yield (
        "fused_q_kv_rmsnorm",
        lambda: sparse_mla.fused_q_kv_rmsnorm(q, kv, *weights, **given),
    )


def inserts(num_tokens: int) -> Named:
    q, kv, table = bf16(num_tokens, HEADS, 512), bf16(num_tokens, 512), angles()
    positions = last_positions(num_tokens)
    cache = zeros(num_tokens, BLOCK_SIZE, V4_ROW_BYTES)
    slots = torch.randperm(num_tokens, device=DEVICE) * BLOCK_SIZE
    fused = (q, kv, positions, table, cache, slots)
    out = torch.empty_like(q)
    yield (
        "fused_qnorm_rope_kv_insert",
        lambda: sparse_mla.fused_qnorm_rope_kv_insert(*fused, eps=1e-6, q_out=out),
    )
    yield (
        "quantize_and_insert_k_cache, fp8_v4",
        lambda: sparse_mla.quantize_and_insert_k_cache(kv, cache, slots),
    )
    keys, rows = bf16(num_tokens, 128), zeros(num_tokens, BLOCK_SIZE, 132)
    yield (
        "indexer_k_quant_and_cache, fp8_index",
        lambda: sparse_mla.indexer_k_quant_and_cache(keys, rows, slots),
    )


def compressors(num_tokens: int) -> Named:
    for ratio, dim, row, closes in (
        (4, 512, V4_ROW_BYTES, True),
        (4, 512, V4_ROW_BYTES, False),
        (128, 512, V4_ROW_BYTES, True),
        (128, 512, V4_ROW_BYTES, False),
        (4, 128, 132, True),
    ):
        block_size, width = STATE_BLOCK_SIZES[ratio], dim * (2 if ratio == 4 else 1)
        table, last = make_tables(num_tokens, CONTEXT // block_size)
        state = torch.randn(table.numel(), block_size, 2 * width, device=DEVICE)
        requests = torch.arange(num_tokens, device=DEVICE).int()
        cache = zeros(num_tokens, BLOCK_SIZE, row)
        rows = torch.arange(num_tokens, device=DEVICE) * BLOCK_SIZE
        positions = last_positions(num_tokens)
        if not closes:
            rows, positions = torch.full_like(rows, -1), positions - 1
        slots = last * block_size + positions % block_size
        before = (state, table, requests, positions, slots, cache, rows)
        arrays = (*before, torch.ones(dim, device=DEVICE), angles())
        kv, score = torch.randn(2, num_tokens, width, device=DEVICE)
        step = {"kv": kv, "score": score, "ape": torch.randn(ratio, width, device=DEVICE)}

        def compress(arrays: Any = arrays, ratio: int = ratio, step: Any = step) -> object:
            return sparse_mla.compress_norm_rope_store(*arrays, eps=1e-6, ratio=ratio, **step)

        what = "" if closes else ", no group ends"
        yield f"compress_norm_rope_store with save, C{ratio}, D {dim}{what}", compress


def index_queries(num_tokens: int) -> Named:
    q, weights = bf16(num_tokens, INDEX_HEADS, 128), torch.randn(num_tokens, INDEX_HEADS)
    arrays = (q, weights.to(DEVICE), last_positions(num_tokens), angles())
    for fp4 in (False, True):
        given: dict[str, Any] = {"softmax_scale": 128**-0.5, "head_scale": INDEX_HEADS**-0.5}
        given["use_fp4"] = fp4
        results = sparse_mla.fused_indexer_q_rope_quant(*arrays, **given)
        given |= dict(zip(("out", "out_weights", "out_scale"), results, strict=False))

        def quantise(given: dict[str, Any] = given) -> object:
            return sparse_mla.fused_indexer_q_rope_quant(*arrays, **given)

        yield f"fused_indexer_q_rope_quant, {'FP4' if fp4 else 'FP8'}", quantise


def lists(num_tokens: int) -> Named:
    table, _ = make_tables(num_tokens, PAGES)
    topk = torch.randint(CONTEXT // 4, (num_tokens, TOPK), device=DEVICE).int()
    requests = torch.arange(num_tokens, device=DEVICE).int()
    outs = {"out": torch.empty_like(topk), "lens": zeros(num_tokens, dtype=torch.int32)}
    given = (topk, requests, table, BLOCK_SIZE, None)
    yield (
        "compute_global_topk_indices_and_lens",
        lambda: sparse_mla.compute_global_topk_indices_and_lens(*given, **outs),
    )


def rank_lists(num_tokens: int) -> Named:
    """Lists of DeepSeek-V3.2, of which one rank of two has half, and the choices of four ranks."""
    topk = torch.randint(LONG, (num_tokens, LONG_TOPK), device=DEVICE).int()
    outs = {"out": torch.empty_like(topk), "lens": zeros(num_tokens, dtype=torch.int32)}
    yield (
        f"cp_local_topk, K {LONG_TOPK}",
        lambda: sparse_mla.cp_local_topk(topk, cp=(0, 2, 64), **outs),
    )
    dealt = torch.randperm(RANKS * LONG_TOPK, device=DEVICE).int().view(RANKS, 1, LONG_TOPK)
    indices = dealt.sort(-1).values.expand(-1, num_tokens, -1).contiguous()
    scores = torch.randn(indices.shape, device=DEVICE)
    yield (
        f"top_k_merge, {RANKS} lists of {LONG_TOPK}",
        lambda: sparse_mla.top_k_merge(indices, scores, k=LONG_TOPK, out=outs["out"]),
    )


def turns(num_tokens: int) -> Named:
    q, k = bf16(num_tokens, HEADS, 64), bf16(num_tokens, 64)
    given = (last_positions(num_tokens), q, k, angles())
    outs = {"q_out": torch.empty_like(q), "k_out": torch.empty_like(k)}
    yield "apply_rope", lambda: sparse_mla.apply_rope(*given, **outs)


def outputs(num_tokens: int) -> Named:
    o, positions, table = bf16(num_tokens, HEADS, 512), last_positions(num_tokens), angles()
    made = sparse_mla.fused_inv_rope_fp8_quant(o, positions, table, groups=HEADS // 8)
    outs = {"out": made[0], "out_scale": made[1], "groups": HEADS // 8}
    yield (
        "fused_inv_rope_fp8_quant",
        lambda: sparse_mla.fused_inv_rope_fp8_quant(o, positions, table, **outs),
    )


HELPERS: tuple[Callable[[int], Named], ...] = (
    norms,
    inserts,
    compressors,
    index_queries,
    lists,
    rank_lists,
    turns,
    outputs,
)
