"""The operators that only move bytes, on a CUDA device, compared with a copy by PyTorch. Samples of
the bytes are judged first, against the CPU backend. Every operator moves far more bytes than the L2
cache holds, except the calls of 1 and 17 tokens, whose time is that of a launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import sparse_mla
from bench.common import compressor, heads
from bench.common.index_lists import make_moves
from bench.common.moves import Move
from bench.common.timing import Table
from bench.cuda.inputs import BLOCK_SIZE, make_cache, sample
from bench.cuda.merges import move_merged, move_partials, move_rank_partials
from bench.cuda.timing import (
    DEVICE,
    PEAK_BYTES,
    Array,
    CudaEffort,
    describe_error,
    interleave,
    synchronize,
    torch,
)
from bench.cuda.transfer import move_transfers
from sparse_mla._judge import BF16
from sparse_mla._rows import (
    BF16_ROW_BYTES,
    FP8_ROW_BYTES,
    KEY_DIM,
    KV_LORA_RANK,
    V4_DATA_BYTES,
    V4_ROW_BYTES,
    row_of,
)

NUM_TOKENS = 1 << 20
NUM_REQUESTS = 32
TOPK = 2048
NUM_QUERIES = 32768
QUANT_ELEMENTS = 1 << 28
NORM_TOKENS = 65536
TURNED_TOKENS = 8192
HEAD_TOKENS, HEAD_CALLS = 8192, 8
CALLS_PER_REPLAY = 3


def measure_bytes(effort: CudaEffort) -> Table:
    columns = ["operator", "sampled bytes", "GB", "µs", "TB/s", "copy TB/s", "of the copy"]
    columns += [f"of {PEAK_BYTES / 1e12:g} TB/s"]
    table = Table("Bytes moved (read + written), beside a copy by PyTorch", columns, [], [])
    copy, copy_bytes = make_copy()
    for make in MOVES:
        try:
            for move in make():
                add_row(table, move, copy, copy_bytes, effort)
                del move  # frees its memory before the next move is made
        except Exception as error:  # the other operators go on
            table.failures.append(f"{make.__name__}: {describe_error(error)}")
    return table


def add_row(
    table: Table, move: Move, copy: Callable[[], object], copy_bytes: int, effort: CudaEffort
) -> None:
    move.call()
    synchronize()
    is_right = move.is_right()
    if not is_right:
        table.failures.append(f"{move.name}: wrong values")
    if move.peer is not None:
        copy, copy_bytes = move.peer, move.num_bytes
    sides = {"ours": [move.call] * CALLS_PER_REPLAY, "copy": [copy] * CALLS_PER_REPLAY}
    seconds = interleave(sides, effort)
    rate = move.num_bytes / seconds["ours"]
    copy_rate = copy_bytes / seconds["copy"]
    row = [
        move.name,
        "right" if is_right else "FAIL",
        f"{move.num_bytes / 1e9:.2f}",
        f"{1e6 * seconds['ours']:.1f}",
        f"{rate / 1e12:.2f}",
        f"{copy_rate / 1e12:.2f}",
        f"{100 * rate / copy_rate:.0f} %",
        f"{100 * rate / PEAK_BYTES:.0f} %",
    ]
    record = {
        "operator": move.name,
        "right": is_right,
        "us": 1e6 * seconds["ours"],
        "floor_us": 1e6 * move.num_bytes / PEAK_BYTES,
        "tb_s": rate / 1e12,
        "copy_tb_s": copy_rate / 1e12,
        "of_copy": rate / copy_rate,
    }
    table.add(row, record)


def make_copy() -> tuple[Callable[[], object], int]:
    """A copy by an elementwise kernel. In a graph `copy_` would be a copy node, which an H200 runs
    at 2.8 TB/s."""
    source = torch.randint(1 << 31, (1 << 28,), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: torch.bitwise_not(source, out=target), 2 * source.nbytes


# --- caches --------------------------------------------------------------------------------------


def move_writes() -> Iterator[Move]:
    """Tokens follow each other inside a page, as an engine hands slots out, or go to random slots.
    At random slots, a row of 656 bytes shares its last sector of memory with a row that is written
    much later."""
    kv_c = torch.randn(NUM_TOKENS, 512, device=DEVICE).bfloat16()
    k_pe = torch.randn(NUM_TOKENS, 64, device=DEVICE).bfloat16()
    pages = torch.randperm(NUM_TOKENS // BLOCK_SIZE, device=DEVICE) * BLOCK_SIZE
    in_pages = (pages[:, None] + torch.arange(BLOCK_SIZE, device=DEVICE)).flatten()
    at_random = torch.randperm(NUM_TOKENS, device=DEVICE)
    for name, dtype, width, slots in (
        ("fp8_ds_mla", torch.uint8, FP8_ROW_BYTES, in_pages),
        ("fp8_ds_mla, random slots", torch.uint8, FP8_ROW_BYTES, at_random),
        ("bfloat16", torch.bfloat16, KEY_DIM, in_pages),
        ("bfloat16, random slots", torch.bfloat16, KEY_DIM, at_random),
    ):
        shape = (NUM_TOKENS // BLOCK_SIZE, BLOCK_SIZE, width)
        cache = torch.zeros(shape, dtype=dtype, device=DEVICE)

        def call(cache: Array = cache, slots: Array = slots) -> object:
            return sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, slots)

        def is_right(cache: Array = cache, slots: Array = slots) -> bool:
            tokens = sample(NUM_TOKENS)
            given = (kv_c[tokens].cpu(), k_pe[tokens].cpu())
            pages = cache.new_zeros((1, len(tokens), cache.shape[2]), device="cpu")
            sparse_mla.concat_and_cache_mla(*given, pages, torch.arange(len(tokens)))
            return same_bytes(cache.flatten(0, 1)[slots[tokens]], pages[0])

        num_bytes = kv_c.nbytes + k_pe.nbytes + slots.nbytes + cache.nbytes
        yield Move(f"concat_and_cache_mla, bf16 → {name}", call, num_bytes, is_right)


def put_bits(x: np.ndarray) -> Array:
    """An array on the device, to which bf16 goes as its bits."""
    if x.dtype != BF16:
        return torch.from_numpy(x).to(DEVICE)
    return torch.from_numpy(x.view(np.int16)).to(DEVICE).view(torch.bfloat16)


def move_heads() -> Iterator[Move]:
    return heads.make_moves(
        HEAD_TOKENS, HEAD_CALLS, put_bits, lambda x: x.view(torch.uint8).cpu().numpy()
    )


def split_parts(cache: Array, data_bytes: int) -> Array:
    """The data and the scales of all tokens of a cache in split pages, side by side."""
    pages, tokens = cache.flatten(1), cache.shape[0] * BLOCK_SIZE
    data, scales = pages[:, : BLOCK_SIZE * data_bytes], pages[:, BLOCK_SIZE * data_bytes :]
    return torch.cat([data.reshape(tokens, -1), scales.reshape(tokens, -1)], dim=1)


def move_inserts() -> Iterator[Move]:
    """Whole keys to slots in shuffled pages, and back from there."""
    pages = torch.randperm(NUM_TOKENS // BLOCK_SIZE, device=DEVICE)
    slots = (pages[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=DEVICE)).flatten()
    table = pages.int().view(NUM_REQUESTS, -1)
    lengths = torch.full((NUM_REQUESTS,), NUM_TOKENS // NUM_REQUESTS, device=DEVICE).int()
    for name, width, data_bytes, op in (
        ("fp8_v4", KV_LORA_RANK, V4_DATA_BYTES, sparse_mla.quantize_and_insert_k_cache),
        ("fp8_v41_split", KV_LORA_RANK, KV_LORA_RANK, sparse_mla.quantize_and_insert_k_cache),
        ("fp4_v41_split", KV_LORA_RANK, KV_LORA_RANK // 2, sparse_mla.quantize_and_insert_k_cache),
        ("fp8_index", 128, 128, sparse_mla.indexer_k_quant_and_cache),
    ):
        k = torch.randn(NUM_TOKENS, width, device=DEVICE).bfloat16()
        shape = (NUM_TOKENS // BLOCK_SIZE, BLOCK_SIZE, row_of(name))
        cache = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
        out = k.new_zeros(NUM_REQUESTS, NUM_TOKENS // NUM_REQUESTS, width)

        def insert(k=k, cache=cache, op=op, name=name) -> object:
            return op(k, cache, slots, kv_format=name)

        def is_right(k=k, cache=cache, op=op, name=name, data_bytes=data_bytes) -> bool:
            tokens = sample(NUM_TOKENS)
            rows = cache.new_zeros((len(tokens), 1, cache.shape[2]), device="cpu")
            op(k[tokens].cpu(), rows, torch.arange(len(tokens)), kv_format=name)
            return same_bytes(split_parts(cache, data_bytes)[slots[tokens]], rows[:, 0])

        def gather(cache=cache, out=out, name=name) -> object:
            return sparse_mla.dequantize_and_gather_k_cache(
                out, cache, lengths, None, table, block_size=BLOCK_SIZE, offset=0, kv_format=name
            )

        def is_gathered(k=k, cache=cache, out=out, name=name, data_bytes=data_bytes) -> bool:
            tokens = sample(NUM_TOKENS)
            rows = split_parts(cache, data_bytes)[slots[tokens]].cpu()[:, None]
            want = sparse_mla.dequantize_kv_cache(rows, kv_format=name, dtype="bfloat16")
            return same_bytes(out.flatten(0, 1)[tokens], want[:, 0])

        num_bytes = k.nbytes + slots.nbytes + cache.nbytes
        yield Move(f"{op.__name__}, bf16 → {name}", insert, num_bytes, is_right)
        num_bytes = cache.nbytes + out.nbytes
        what = f"dequantize_and_gather_k_cache, {name} → bf16"
        yield Move(what, gather, num_bytes, is_gathered)


def move_gathers() -> Iterator[Move]:
    num_pages = NUM_TOKENS // BLOCK_SIZE
    table = torch.randperm(num_pages, device=DEVICE).int().view(NUM_REQUESTS, -1)
    lengths = torch.full((NUM_REQUESTS,), NUM_TOKENS // NUM_REQUESTS, device=DEVICE).int()
    starts = lengths * torch.arange(NUM_REQUESTS, device=DEVICE).int()
    out = torch.zeros(NUM_TOKENS, KEY_DIM, dtype=torch.bfloat16, device=DEVICE)
    for name in ("fp8_ds_mla", "bfloat16"):
        cache = make_cache(NUM_TOKENS, name)

        def call(cache: Array = cache) -> object:
            return sparse_mla.gather_kv_cache(cache, table, lengths, starts, out=out)

        def is_right(cache: Array = cache) -> bool:
            rows = sample(NUM_TOKENS)
            slots = table.flatten()[rows // BLOCK_SIZE] * BLOCK_SIZE + rows % BLOCK_SIZE
            return same_bytes(out[rows], upconvert_on_cpu(cache.flatten(0, 1)[slots]))

        yield Move(f"gather_kv_cache, {name} → bf16", call, cache.nbytes + out.nbytes, is_right)


def move_dequantised() -> Iterator[Move]:
    cache = make_cache(NUM_TOKENS, "fp8_ds_mla")

    def call() -> Array:
        return sparse_mla.dequantize_kv_cache(cache, dtype="bfloat16")

    def is_right() -> bool:
        rows = sample(NUM_TOKENS)
        return same_bytes(call().flatten(0, 1)[rows], upconvert_on_cpu(cache.flatten(0, 1)[rows]))

    num_bytes = cache.nbytes + NUM_TOKENS * BF16_ROW_BYTES
    yield Move("dequantize_kv_cache, fp8_ds_mla → bf16", call, num_bytes, is_right)


def upconvert_on_cpu(rows: Array) -> Array:
    """Cache rows [n, row] -> [n, 576] bf16, by the CPU backend."""
    count = torch.tensor([len(rows)], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    out = torch.zeros(len(rows), KEY_DIM, dtype=torch.bfloat16)
    return sparse_mla.gather_kv_cache(rows.cpu()[None], zero[None], count, zero, out=out)


def same_bytes(a: Array, b: Array) -> bool:
    a, b = (array.cpu().contiguous().view(torch.uint8) for array in (a, b))
    return torch.equal(a, b)


# --- indices, states, quantisation ---------------------------------------------------------------


def move_indices() -> Iterator[Move]:
    num_pages = NUM_TOKENS // BLOCK_SIZE
    table = torch.randperm(num_pages, device=DEVICE).int().view(NUM_REQUESTS, -1)
    requests = torch.randint(NUM_REQUESTS, (NUM_QUERIES,), device=DEVICE).int().sort().values
    shape = (NUM_QUERIES, TOPK)
    topk_indices = torch.randint(-1, NUM_TOKENS // NUM_REQUESTS, shape, device=DEVICE).int()
    out = torch.zeros_like(topk_indices)

    def call() -> object:
        return sparse_mla.convert_req_index_to_global_index(
            requests, table, topk_indices, block_size=BLOCK_SIZE, out=out
        )

    def is_right() -> bool:
        rows = sample(NUM_QUERIES)
        given = (requests[rows].cpu(), table.cpu(), topk_indices[rows].cpu())
        want = sparse_mla.convert_req_index_to_global_index(*given, block_size=BLOCK_SIZE)
        return same_bytes(out[rows], want)

    num_bytes = topk_indices.nbytes + out.nbytes
    yield Move("convert_req_index_to_global_index", call, num_bytes, is_right)


def move_lists() -> Iterator[Move]:
    return make_moves(
        NUM_QUERIES, lambda x: torch.from_numpy(x).to(DEVICE), lambda x: x.cpu().numpy()
    )


def move_quantised() -> Iterator[Move]:
    """The scale needs every value, so the input is read at least twice."""
    x = torch.randn(QUANT_ELEMENTS, device=DEVICE).bfloat16()
    out = torch.zeros(QUANT_ELEMENTS, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales: list[Array] = []

    def call() -> object:
        scale = sparse_mla.dynamic_per_tensor_quant(x, out=out)[1]
        scales[:] = [scale]
        return scale

    def is_right() -> bool:
        amax = x.abs().amax().float().cpu()  # on CUDA a division by 448 would multiply by 1 / 448
        scale = amax.clamp_min(1e-10) / 448
        if not math.isclose(float(scales[0]), float(scale), rel_tol=0):
            return False
        some = sample(QUANT_ELEMENTS)
        want = (x[some].float().cpu() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return same_bytes(out.view(torch.uint8)[some], want)

    num_bytes = 2 * x.nbytes + out.nbytes
    yield Move("dynamic_per_tensor_quant, bf16, read twice", call, num_bytes, is_right)


# --- norms and RoPE ------------------------------------------------------------------------------


def move_norms() -> Iterator[Move]:
    """q and kv are columns of one buffer, as a fused projection leaves them."""
    for q_size in (1024, 1536):
        buffer = torch.randn(NORM_TOKENS, q_size + 512, device=DEVICE).bfloat16()
        weight = torch.randn(q_size, device=DEVICE).bfloat16()
        parts = buffer.split([q_size, 512], 1)
        outs = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in parts]
        inputs = (*parts, weight, weight[:512])

        def call(inputs: tuple[Array, ...] = inputs, outs: list[Array] = outs) -> object:
            return sparse_mla.fused_q_kv_rmsnorm(*inputs, eps=1e-6, q_out=outs[0], kv_out=outs[1])

        def is_right(inputs: tuple[Array, ...] = inputs, outs: list[Array] = outs) -> bool:
            tokens = sample(NORM_TOKENS)
            rows = [x[tokens].cpu() for x in inputs[:2]]
            want = sparse_mla.fused_q_kv_rmsnorm(*rows, *[w.cpu() for w in inputs[2:]], eps=1e-6)
            return all(same_bytes(x[tokens], y) for x, y in zip(outs, want, strict=True))

        num_bytes = 2 * buffer.nbytes
        yield Move(f"fused_q_kv_rmsnorm, {q_size} + 512", call, num_bytes, is_right)


def as_bits(x: Array) -> Array:
    """Bytes for e4m3, which PyTorch cannot index everywhere."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def move_rope() -> Iterator[Move]:
    table = torch.from_numpy(sparse_mla.rope_table(TURNED_TOKENS)).to(DEVICE)
    positions = torch.arange(TURNED_TOKENS, device=DEVICE)
    for num_heads, interleaved in ((16, True), (128, True), (128, False)):
        q = torch.randn(TURNED_TOKENS, num_heads, 64, device=DEVICE).bfloat16()
        k = torch.randn(TURNED_TOKENS, 64, device=DEVICE).bfloat16()
        outs = torch.empty_like(q), torch.empty_like(k)
        options = {"interleaved": interleaved}

        def call(
            q: Array = q,
            k: Array = k,
            outs: tuple[Array, ...] = outs,
            options: dict[str, Any] = options,
        ) -> object:
            results = {"q_out": outs[0], "k_out": outs[1]}
            return sparse_mla.apply_rope(positions, q, k, table, **results, **options)

        def is_right(
            q: Array = q,
            k: Array = k,
            outs: tuple[Array, ...] = outs,
            options: dict[str, Any] = options,
        ) -> bool:
            tokens = sample(TURNED_TOKENS)
            at, *given = (x[tokens].cpu() for x in (positions, q, k))
            want = sparse_mla.apply_rope(at, given[0], given[1], table.cpu(), **options)
            return all(same_bytes(x[tokens], y) for x, y in zip(outs, want, strict=True))

        kind = "neighbours" if interleaved else "halves"
        name = f"apply_rope, H {num_heads}, {kind}"
        yield Move(name, call, 2 * (q.nbytes + k.nbytes), is_right)


def move_turned_keys() -> Iterator[Move]:
    """Queries turned, keys turned and written to shuffled pages."""
    table = torch.from_numpy(sparse_mla.rope_table(TURNED_TOKENS)).to(DEVICE)
    positions = torch.arange(TURNED_TOKENS, device=DEVICE)
    pages = torch.randperm(TURNED_TOKENS // BLOCK_SIZE, device=DEVICE) * BLOCK_SIZE
    slots = (pages[:, None] + torch.arange(BLOCK_SIZE, device=DEVICE)).flatten()
    for num_heads, name in ((128, "fp8_ds_mla"), (128, "bfloat16"), (16, "fp8_ds_mla")):
        is_fp8 = name == "fp8_ds_mla"
        row, dtype = (FP8_ROW_BYTES, torch.uint8) if is_fp8 else (KEY_DIM, torch.bfloat16)
        q = torch.randn(TURNED_TOKENS, num_heads, 64, device=DEVICE).bfloat16()
        k, kv_c = (torch.randn(TURNED_TOKENS, n, device=DEVICE).bfloat16() for n in (64, 512))
        shape = (TURNED_TOKENS // BLOCK_SIZE, BLOCK_SIZE, row)
        cache, q_out = torch.zeros(shape, dtype=dtype, device=DEVICE), torch.empty_like(q)
        inputs = (positions, q, k, table, kv_c, cache, slots)

        def call(inputs: tuple[Array, ...] = inputs, q_out: Array = q_out) -> object:
            return sparse_mla.rope_and_cache_mla(*inputs, q_out=q_out)

        def is_right(inputs: tuple[Array, ...] = inputs, q_out: Array = q_out) -> bool:
            tokens = sample(TURNED_TOKENS)
            at, q, k, kv_c = (inputs[i][tokens].cpu() for i in (0, 1, 2, 4))
            cache, slots = inputs[5:]
            rows = cache.new_zeros((1, len(tokens), cache.shape[2]), device="cpu")
            given = (at, q, k, inputs[3].cpu(), kv_c, rows, torch.arange(len(tokens)))
            want = sparse_mla.rope_and_cache_mla(*given)[0]
            written = cache.flatten(0, 1)[slots[tokens]]
            return same_bytes(q_out[tokens], want) and same_bytes(written, rows[0])

        num_bytes = 2 * q.nbytes + k.nbytes + kv_c.nbytes + cache.nbytes
        yield Move(f"rope_and_cache_mla, H {num_heads}, {name}", call, num_bytes, is_right)


def move_turned() -> Iterator[Move]:
    table = torch.from_numpy(sparse_mla.rope_table(TURNED_TOKENS, fp32_angles=True)).to(DEVICE)
    positions = torch.arange(TURNED_TOKENS, device=DEVICE)
    for num_heads, options in (
        (64, {}),
        (128, {}),
        (64, {"scale_layout": "ue8m0x4"}),
        (64, {"quantize": False}),
    ):
        o = torch.randn(TURNED_TOKENS, num_heads, 512, device=DEVICE).bfloat16()
        fixed: dict[str, Any] = {"groups": num_heads // 8, **options}
        made = sparse_mla.fused_inv_rope_fp8_quant(o, positions, table, **fixed)
        results = made if isinstance(made, tuple) else (made,)
        outs = dict(zip(("out", "out_scale"), results, strict=False))
        given = {**fixed, **outs}

        def call(o: Array = o, given: dict[str, Any] = given) -> object:
            return sparse_mla.fused_inv_rope_fp8_quant(o, positions, table, **given)

        def is_right(
            o: Array = o,
            fixed: dict[str, Any] = fixed,
            results: tuple[Array, ...] = results,
        ) -> bool:
            tokens = sample(TURNED_TOKENS)
            given = (o[tokens].cpu(), positions[tokens].cpu(), table.cpu())
            want = sparse_mla.fused_inv_rope_fp8_quant(*given, **fixed)
            pairs = zip(results, want if isinstance(want, tuple) else (want,), strict=True)
            return all(same_bytes(as_bits(x)[tokens], as_bits(y)) for x, y in pairs)

        num_bytes = o.nbytes + sum(x.nbytes for x in results)
        kind = ", ".join(map(str, options.values())) or "fp32 scales"
        kind = "bf16" if kind == "False" else kind
        yield Move(f"fused_inv_rope_fp8_quant, H {num_heads}, {kind}", call, num_bytes, is_right)


def move_queries() -> Iterator[Move]:
    """The queries and keys of a step on their way to attention."""
    for num_heads, num_tokens in ((64, TURNED_TOKENS), (128, TURNED_TOKENS), (64, 1), (64, 17)):
        table = torch.from_numpy(sparse_mla.rope_table(num_tokens, fp32_angles=True)).to(DEVICE)
        q = torch.randn(num_tokens, num_heads, 512, device=DEVICE).bfloat16()
        kv = torch.randn(num_tokens, 512, device=DEVICE).bfloat16()
        positions = torch.arange(num_tokens, device=DEVICE)
        shape = (num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, V4_ROW_BYTES)
        cache = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
        inputs, q_out = (q, kv, positions, table, cache, positions), torch.empty_like(q)

        def call(inputs: tuple[Array, ...] = inputs, q_out: Array = q_out) -> object:
            return sparse_mla.fused_qnorm_rope_kv_insert(*inputs, eps=1e-6, q_out=q_out)

        def is_right(inputs: tuple[Array, ...] = inputs, q_out: Array = q_out) -> bool:
            tokens = sample(len(q_out))
            q, kv, positions = (x[tokens].cpu() for x in inputs[:3])
            rows = inputs[4].new_zeros((len(tokens), 1, V4_ROW_BYTES), device="cpu")
            slots = torch.arange(len(tokens))
            want = sparse_mla.fused_qnorm_rope_kv_insert(
                q, kv, positions, inputs[3].cpu(), rows, slots, eps=1e-6
            )
            written = split_parts(inputs[4], V4_DATA_BYTES)[tokens]
            return same_bytes(q_out[tokens], want[0]) and same_bytes(written, rows[:, 0])

        num_bytes = 2 * q.nbytes + kv.nbytes + num_tokens * V4_ROW_BYTES
        name = f"fused_qnorm_rope_kv_insert, H {num_heads}, T {num_tokens}"
        yield Move(name, call, num_bytes, is_right)


def move_index_queries() -> Iterator[Move]:
    """The indexer's queries on their way to the logits."""
    for num_heads, fp4 in ((64, False), (64, True)):
        table = torch.from_numpy(sparse_mla.rope_table(TURNED_TOKENS, fp32_angles=True)).to(DEVICE)
        q = torch.randn(TURNED_TOKENS, num_heads, 128, device=DEVICE).bfloat16()
        weights = torch.randn(TURNED_TOKENS, num_heads, device=DEVICE)
        inputs = (q, weights, torch.arange(TURNED_TOKENS, device=DEVICE))
        fixed: dict[str, Any] = {"softmax_scale": 128**-0.5, "head_scale": num_heads**-0.5}
        fixed["use_fp4"] = fp4
        results = sparse_mla.fused_indexer_q_rope_quant(*inputs, table, **fixed)
        given = {**fixed, **dict(zip(("out", "out_weights", "out_scale"), results, strict=False))}

        def call(
            arrays: tuple[Array, ...] = (*inputs, table), given: dict[str, Any] = given
        ) -> object:
            return sparse_mla.fused_indexer_q_rope_quant(*arrays, **given)

        def is_right(
            inputs: tuple[Array, ...] = inputs,
            table: Array = table,
            fixed: dict[str, Any] = fixed,
            results: tuple[Array, ...] = results,
        ) -> bool:
            tokens = sample(TURNED_TOKENS)
            q, weights, positions = (x[tokens].cpu() for x in inputs)
            want = sparse_mla.fused_indexer_q_rope_quant(
                q, weights, positions, table.cpu(), **fixed
            )
            pairs = zip(results, want, strict=True)
            return all(same_bytes(as_bits(x)[tokens], as_bits(y)) for x, y in pairs)

        num_bytes = sum(x.nbytes for x in (q, weights, *results))
        name = f"fused_indexer_q_rope_quant, H {num_heads}, {'FP4' if fp4 else 'FP8'}"
        yield Move(name, call, num_bytes, is_right)


def move_states() -> Iterator[Move]:
    return compressor.make_moves(
        TURNED_TOKENS, lambda x: torch.from_numpy(x).to(DEVICE), lambda x: x.cpu().numpy()
    )


MOVES: tuple[Callable[[], Iterator[Move]], ...] = (
    move_writes,
    move_inserts,
    move_heads,
    move_transfers,
    move_gathers,
    move_dequantised,
    move_indices,
    move_lists,
    move_merged,
    move_partials,
    move_rank_partials,
    move_quantised,
    move_norms,
    move_rope,
    move_turned_keys,
    move_turned,
    move_queries,
    move_index_queries,
    move_states,
)
