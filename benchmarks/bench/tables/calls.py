"""Host time of a call with tiny work, so that the way into the library and back is measured, and
on CUDA nothing piles up on the device. There, engine calls are measured, too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

import sparse_mla
from bench.common.composition import from_numpy
from bench.common.noise import spread_of, stay, visiting_cores
from bench.common.rows import Bench
from bench.common.timing import Table, describe_error
from bench.cuda.timing import DEVICE, Array, CudaEffort, synchronize, torch
from sparse_mla._judge import BF16
from sparse_mla._rows import FP8_ROW_BYTES, KEY_DIM, KV_LORA_RANK
from sparse_mla._types import RopeFormat

NUM_HEADS = 16  # heads in a call of an operator that has heads
NUM_REQUESTS = 256
CONTEXT = 2000
BLOCK_SIZE = 64
PREFILL_TOKENS = 100
WARM_UP_CALLS = 100
BATCH_CALLS = 32  # calls between two waits for the device
BUILDS = 4  # builds between two waits: each one copies from a ring of staging buffers
LAYER_FORMATS: tuple[RopeFormat, ...] = ("fp8_ds_mla", "bfloat16")
PYTORCH = "PyTorch"
LAUNCH = "torch.cuda._sleep(0)"  # measured in turn with each row, because hosts change speed
Call = Callable[[], object]
# Converts a NumPy array, an input or an output, into a framework's own.
Convert = Callable[[np.ndarray], Any]


def measure(bench: Bench) -> Table:
    return measure_on_device(bench.effort) if bench.is_cuda else measure_on_host(bench)


def measure_on_host(bench: Bench) -> Table:
    frameworks = find_host_frameworks()
    table = Table("Host time per call with out=", ["operator", *frameworks], [], [])
    for name, make in (("concat_and_cache_mla", make_write), ("sparse_attention", make_attention)):
        seconds = bench.time({key: make(*converters) for key, converters in frameworks.items()})
        cells = [f"{1e6 * seconds[key]:.2f} µs" for key in frameworks]
        table.add([name, *cells], {"operator": name, "seconds": seconds})
    return table


def measure_on_device(effort: CudaEffort) -> Table:
    table = Table("Host time per call of one token, with out=", ["call"], [], [])
    frameworks = find_frameworks(table)
    table.columns += [*frameworks, LAUNCH]
    for name, make in OPERATORS.items():
        sides: dict[str, Call] = {}
        for framework, converters in frameworks.items():
            try:
                sides[framework] = make(*converters)
                sides[framework]()
                synchronize()
            except Exception as error:  # the other frameworks go on
                sides.pop(framework, None)
                table.failures.append(f"{name}, {framework}: {describe_error(error)}")
        add_row(table, name, sides, BATCH_CALLS, effort)
    for name, make_call, batch in ENGINE_CALLS:
        try:
            add_row(table, name, {PYTORCH: make_call()}, batch, effort)
        except Exception as error:
            table.failures.append(f"{name}: {describe_error(error)}")
    return table


def add_row(
    table: Table, name: str, sides: dict[str, Call], batch: int, effort: CudaEffort
) -> None:
    seconds = host_seconds(sides | {LAUNCH: make_launch()}, batch, effort)
    cells = [f"{1e6 * seconds[key]:.2f} µs" if key in seconds else "" for key in table.columns[1:]]
    table.add([name, *cells], {"call": name, "seconds": seconds})


def host_seconds(sides: dict[str, Call], batch: int, effort: CudaEffort) -> dict[str, float]:
    """Seconds per call. The sides are measured in turn; the device is idle before each starts. The
    fastest round is looked for on every core."""
    for side in sides.values():
        for _ in range(WARM_UP_CALLS // batch):
            seconds_per_call(side, batch)
    samples: dict[str, list[float]] = {name: [] for name in sides}
    rounds = 4 * effort.rounds
    with visiting_cores(rounds) if effort.pick is min else nullcontext(stay) as go:
        for index in range(rounds):
            go(index)
            for name, side in sides.items():
                samples[name].append(seconds_per_call(side, batch))
    effort.spreads += map(spread_of, samples.values())
    return {name: effort.pick(values) for name, values in samples.items()}


def seconds_per_call(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    seconds = (time.perf_counter() - start) / count
    synchronize()
    return seconds


# --- frameworks ----------------------------------------------------------------------------------


def find_host_frameworks() -> dict[str, tuple[Convert, Convert]]:
    """Converters of inputs and outputs by framework. JAX arrays cannot be written, so outputs are
    NumPy's there."""
    frameworks: dict[str, tuple[Convert, Convert]] = {"NumPy": (np.asarray, np.asarray)}
    if find_spec("torch") is not None:
        frameworks["PyTorch"] = (from_numpy, from_numpy)
    if find_spec("jax") is not None:
        jax: Any = import_module("jax")

        cpu = jax.devices("cpu")[0]
        frameworks["JAX, out NumPy"] = (lambda array: jax.device_put(array, cpu), np.asarray)
    return frameworks


def find_frameworks(table: Table) -> dict[str, tuple[Convert, Convert]]:
    """Converters of inputs and of outputs, from NumPy arrays to device arrays of each framework."""
    frameworks: dict[str, tuple[Convert, Convert]] = {PYTORCH: (to_torch, to_torch)}
    for name, module, find in (("CuPy", "cupy", find_cupy), ("JAX, out PyTorch", "jax", find_jax)):
        if find_spec(module) is not None:
            try:
                frameworks[name] = find()
            except Exception as error:  # installed, but not for this device
                table.failures.append(f"{name}: {describe_error(error)}")
    return frameworks


def to_torch(array: np.ndarray) -> Array:
    return from_numpy(array).to(DEVICE)


def find_cupy() -> tuple[Convert, Convert]:
    cupy: Any = import_module("cupy")

    def to_cupy(array: np.ndarray) -> Any:
        return cupy.from_dlpack(to_torch(array))

    to_cupy(np.zeros(1, BF16))
    return to_cupy, to_cupy


def find_jax() -> tuple[Convert, Convert]:
    """Converters for JAX. JAX arrays cannot be written, so the outputs are PyTorch's."""
    # JAX would allocate three quarters of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax: Any = import_module("jax")
    device = jax.devices("cuda")[0]
    return lambda array: jax.device_put(array, device).block_until_ready(), to_torch


# --- operators -----------------------------------------------------------------------------------


def make_write(given: Convert, written: Convert) -> Callable[[], object]:
    """Four arrays; the only slot is -1, so nothing is written."""
    kv_c = given(np.zeros((1, KV_LORA_RANK), BF16))
    k_pe = given(np.zeros((1, 64), BF16))
    kv_cache = written(np.zeros((1, 64, FP8_ROW_BYTES), np.uint8))
    slot_mapping = given(np.full(1, -1, np.int32))
    return lambda: sparse_mla.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping)


def make_attention(
    given: Convert, written: Convert, device: str = "cpu", num_heads: int = 1
) -> Callable[[], object]:
    """Six arrays; one token, one key."""
    q = given(np.zeros((1, num_heads, KEY_DIM), BF16))
    kv = given(np.zeros((1, 64, FP8_ROW_BYTES), np.uint8))
    indices = given(np.zeros((1, 1), np.int32))
    size = sparse_mla.attention_workspace_size(1, num_heads, 1, device=device)
    out = written(np.zeros((1, num_heads, KV_LORA_RANK), BF16))
    lse = written(np.zeros((1, num_heads), np.float32))
    workspace = written(np.zeros(size, np.uint8))

    def attend() -> object:
        return sparse_mla.sparse_attention(
            q, kv, indices, softmax_scale=1.0, out=out, lse=lse, workspace=workspace
        )

    return attend


def make_conversion(given: Convert, written: Convert) -> Call:
    """Four arrays; one token, one index."""
    requests, table, topk_indices = (
        given(np.zeros(shape, np.int32)) for shape in (1, (1, 1), (1, 1))
    )
    out = written(np.zeros((1, 1), np.int32))
    return lambda: sparse_mla.convert_req_index_to_global_index(
        requests, table, topk_indices, block_size=BLOCK_SIZE, out=out
    )


def make_gather(given: Convert, written: Convert) -> Call:
    """Five arrays; one token."""
    cache = given(np.zeros((1, BLOCK_SIZE, FP8_ROW_BYTES), np.uint8))
    table, one, zero = (
        given(array)
        for array in (np.zeros((1, 1), np.int32), np.ones(1, np.int32), np.zeros(1, np.int32))
    )
    out = written(np.zeros((1, KEY_DIM), BF16))
    return lambda: sparse_mla.gather_kv_cache(cache, table, one, zero, out=out)


def make_merge(given: Convert, written: Convert) -> Call:
    """Six arrays; one token."""
    shape, lse_shape = (1, NUM_HEADS, KV_LORA_RANK), (1, NUM_HEADS)
    state, lse = given(np.zeros(shape, BF16)), given(np.zeros(lse_shape, np.float32))
    out, merged_lse = written(np.zeros(shape, BF16)), written(np.zeros(lse_shape, np.float32))
    return lambda: sparse_mla.merge_attn_states(state, lse, state, lse, out=out, lse=merged_lse)


OPERATORS: dict[str, Callable[[Convert, Convert], Call]] = {
    "concat_and_cache_mla": make_write,
    "gather_kv_cache": make_gather,
    "convert_req_index_to_global_index": make_conversion,
    "merge_attn_states": make_merge,
    "sparse_attention": lambda given, written: make_attention(given, written, DEVICE, NUM_HEADS),
}


# --- what an engine calls ------------------------------------------------------------------------


def make_yardstick() -> Call:
    a, out = (torch.zeros(1, device=DEVICE) for _ in range(2))
    return lambda: torch.add(a, a, out=out)


def make_launch() -> Call:
    """A kernel that ends at once, with hardly any host work around its launch."""
    return lambda: torch.cuda._sleep(0)


def make_config(
    num_heads: int, topk: int, kv_cache_dtype: RopeFormat = "fp8_ds_mla"
) -> sparse_mla.Config:
    return sparse_mla.Config(
        num_heads,
        softmax_scale=0.1,
        kv_cache_dtype=kv_cache_dtype,
        topk_tokens=topk,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=4096,
        max_model_len=CONTEXT,
        prefill_workspace_tokens=NUM_REQUESTS * CONTEXT,
        device=DEVICE,
    )


def make_common(num_decodes: int, num_prefills: int) -> Callable[[], Any]:
    """A step's batch as an engine has it: lengths on the host and on the device."""
    query_lens = [1] * num_decodes + [PREFILL_TOKENS] * num_prefills
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.full(len(query_lens), CONTEXT, np.int32)
    num_pages = -(-CONTEXT // BLOCK_SIZE)
    slots = torch.zeros(int(starts[-1]), dtype=torch.long, device=DEVICE)
    table = torch.zeros(len(query_lens), num_pages, dtype=torch.int32, device=DEVICE)
    device_starts, device_lens = to_torch(starts), to_torch(lens)
    return lambda: sparse_mla.CommonAttentionMetadata(
        device_starts,
        device_lens,
        slots,
        table,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
    )


def make_build(num_decodes: int, num_prefills: int) -> Call:
    builder = sparse_mla.MetadataBuilder(make_config(64, 2048))
    common = make_common(num_decodes, num_prefills)()
    return lambda: builder.build(common)


def make_common_and_build() -> Call:
    builder = sparse_mla.MetadataBuilder(make_config(64, 2048))
    make = make_common(NUM_REQUESTS, 0)
    return lambda: builder.build(make())


def make_forward(num_heads: int) -> Call:
    """A forward call with few requests and keys, so that the device keeps up with the host."""
    num_reqs, topk = 4, 64
    config = make_config(num_heads, topk)
    builder, layer = sparse_mla.MetadataBuilder(config), sparse_mla.SparseMLA(config)
    metadata = builder.build(make_common(num_reqs, 0)())
    q = torch.zeros(num_reqs, num_heads, KEY_DIM, dtype=torch.bfloat16, device=DEVICE)
    cache = torch.zeros(1, BLOCK_SIZE, FP8_ROW_BYTES, dtype=torch.uint8, device=DEVICE)
    topk_indices = torch.zeros(num_reqs, topk, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(num_reqs, num_heads, KV_LORA_RANK, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.zeros(num_reqs, num_heads, device=DEVICE)
    return lambda: layer.forward(q, cache, topk_indices, metadata, out=out, lse=lse)


def make_layer(num_heads: int, kv_cache_dtype: RopeFormat) -> Call:
    """What a layer of a small decode calls: the cache's write, and forward, which allocates lse."""
    num_reqs, topk = 4, 2048
    config = make_config(num_heads, topk, kv_cache_dtype)
    builder, layer = sparse_mla.MetadataBuilder(config), sparse_mla.SparseMLA(config)
    metadata = builder.build(make_common(num_reqs, 0)())
    row, dtype = (
        (FP8_ROW_BYTES, torch.uint8)
        if kv_cache_dtype == "fp8_ds_mla"
        else (KEY_DIM, torch.bfloat16)
    )
    cache = torch.zeros(1, BLOCK_SIZE, row, dtype=dtype, device=DEVICE)
    q = torch.zeros(num_reqs, num_heads, KEY_DIM, dtype=torch.bfloat16, device=DEVICE)
    kv_c, k_pe = q[:, 0, :KV_LORA_RANK].clone(), q[:, 0, KV_LORA_RANK:].clone()
    slots = torch.arange(num_reqs, device=DEVICE)
    topk_indices = torch.zeros(num_reqs, topk, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(num_reqs, num_heads, KV_LORA_RANK, dtype=torch.bfloat16, device=DEVICE)

    def call() -> None:
        sparse_mla.concat_and_cache_mla(kv_c, k_pe, cache, slots, kv_format=kv_cache_dtype)
        layer.forward(q, cache, topk_indices, metadata, out=out)

    return call


ENGINE_CALLS: tuple[tuple[str, Callable[[], Call], int], ...] = (
    ("torch.add(out=), for comparison", make_yardstick, BATCH_CALLS),
    (f"build, {NUM_REQUESTS} decodes", lambda: make_build(NUM_REQUESTS, 0), BUILDS),
    (
        f"build, {NUM_REQUESTS - 16} decodes and 16 prefills",
        lambda: make_build(NUM_REQUESTS - 16, 16),
        BUILDS,
    ),
    (
        f"CommonAttentionMetadata and build, {NUM_REQUESTS} decodes",
        make_common_and_build,
        BUILDS,
    ),
    ("forward, 4 decodes, H 16", lambda: make_forward(16), BATCH_CALLS),
    ("forward, 4 decodes, H 64", lambda: make_forward(64), BATCH_CALLS),
    *(
        (
            f"a layer: write and forward, 4 decodes, H {heads}, K 2048, {dtype}",
            partial(make_layer, heads, dtype),
            BATCH_CALLS,
        )
        for dtype in LAYER_FORMATS
        for heads in (16, 64, 128)
    ),
)
