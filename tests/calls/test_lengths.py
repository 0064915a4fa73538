"""What a call costs follows from the lengths of lists and contexts, not from the widths of arrays;
and the width changes no result.

Times are processor times of one thread of another Python, the best of several, so that a busy
machine does not change them much. Before lengths were looked at, the wide calls here took 10 to 600
times as long as the narrow ones.
"""

import json
import os
import time

import device
import ml_dtypes
import numpy as np
import pytest
from cases import int32
from helpers import BESIDE_TESTS, assert_same_bits, printed_by_python

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the times are those of the CPU's kernels")

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
WIDE = 131072


# --- calls with arrays of any width --------------------------------------------------------------


def attend(width, num_keys=10, *, num_tokens=1, has_length=True, is_extra=False, **options):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((64, 576)).astype(BF16)
    q = rng.standard_normal((num_tokens, 32, 576)).astype(BF16)
    indices = np.full((num_tokens, width), -1, np.int32)
    indices[:, :num_keys] = np.arange(num_keys)
    lengths = np.full(num_tokens, num_keys, np.int32) if has_length else None
    lists = {"indices": indices, "topk_length": lengths}
    if is_extra:
        lists = {f"extra_{name}": x for name, x in lists.items()} | {
            "extra_kv_cache": rows,
            "indices": indices[:, :20],
        }
    return lambda: sparse_mla.sparse_attention(q, rows, **lists, softmax_scale=0.05, **options)


def lightning(num_pages, *contexts, **options):
    rng = np.random.default_rng(0)
    num_tokens = len(contexts)
    q = rng.standard_normal((num_tokens, 4, 128)).astype(E4M3)
    weights = rng.standard_normal((num_tokens, 4)).astype(np.float32)
    cache = rng.integers(0, 0x3F, (16, 64, 132)).astype(np.uint8)
    table = np.zeros((2, num_pages), np.int32)
    table[:, :16] = rng.permuted(np.tile(np.arange(16), (2, 1)), axis=1)[:, :num_pages]
    requests = np.arange(num_tokens, dtype=np.int32) % 2
    options = {"k": 100, "req_id_per_token": requests, "block_table": table} | options
    return lambda: sparse_mla.lightning_indexer(q, weights, cache, int32(*contexts), **options)


def top_k(width, length, num_tokens=8):
    logits = np.zeros((num_tokens, width), np.float32)
    ends = np.full(num_tokens, length, np.int32)
    return lambda: sparse_mla.top_k_per_row(logits, 0 * ends, ends, k=100)


def convert(num_pages):
    table = np.zeros((2, num_pages), np.int32)
    positions = np.arange(64, dtype=np.int32).reshape(2, 32)
    return lambda: sparse_mla.convert_req_index_to_global_index(
        int32(0, 1), table, positions, block_size=64
    )


def gather(num_pages):
    cache, out = np.zeros((4, 64, 656), np.uint8), np.zeros((128, 576), BF16)
    table = np.zeros((2, num_pages), np.int32)
    return lambda: sparse_mla.gather_kv_cache(cache, table, int32(9, 70), int32(0, 9), out=out)


PAIRS = {
    "attention": lambda wide: attend(WIDE if wide else 64),
    "attention, holes": lambda wide: attend(WIDE if wide else 64, has_length=False),
    "attention, no keys": lambda wide: attend(WIDE if wide else 64, 0),
    "attention, holes alone": lambda wide: attend(WIDE if wide else 64, 0, has_length=False),
    "attention, one key": lambda wide: attend(WIDE if wide else 64, 1),
    "attention, one key and holes": lambda wide: attend(WIDE if wide else 64, 1, has_length=False),
    "attention, extra keys": lambda wide: attend(WIDE if wide else 64, is_extra=True),
    "attention, 60 splits": lambda wide: attend(WIDE if wide else 64, num_splits=60 if wide else 1),
    "attention, many tokens": lambda wide: attend(
        6400 if wide else 64, num_tokens=20, num_splits=25 if wide else 1
    ),
    "lightning, no keys": lambda wide: lightning(65536 if wide else 16, 0, 0, 0),
    "lightning, keys": lambda wide: lightning(65536 if wide else 16, 1024, 3, 1000),
    "top-k": lambda wide: top_k(1 << 20 if wide else 128, 64),
    "top-k of long rows": lambda wide: top_k(1 << 20 if wide else 1000, 1000),
    "convert": lambda wide: convert(65536 if wide else 16),
    "gather": lambda wide: gather(65536 if wide else 16),
}


# --- times ---------------------------------------------------------------------------------------


def best_time(run) -> float:
    """Seconds of a call."""
    times = []
    for _ in range(15):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def print_times() -> None:
    print(json.dumps({name: [best_time(make(x)) for x in (0, 1)] for name, make in PAIRS.items()}))


def test_wide_arrays_cost_as_much_as_narrow_ones():
    script = BESIDE_TESTS + "import test_lengths; test_lengths.print_times()"
    times = json.loads(printed_by_python("-c", script, OMP_NUM_THREADS="1"))
    slow = {name: (a, b) for name, (a, b) in times.items() if b > 4 * a + 3e-4}
    assert len(times) == len(PAIRS)
    assert not slow


# --- threads -------------------------------------------------------------------------------------


def started_threads(make, *arguments) -> int:
    """Threads that a call starts in another Python."""
    script = f"import test_lengths as t; t.print_started(t.{make}{arguments!r})"
    return int(printed_by_python("-c", BESIDE_TESTS + script, OMP_NUM_THREADS="4"))


def print_started(run) -> None:
    before = len(os.listdir("/proc/self/task"))
    run()
    print(len(os.listdir("/proc/self/task")) - before)


@pytest.mark.parametrize(
    ("make", "short", "long"),
    [
        ("top_k", (1 << 20, 64), (1 << 16, 1 << 16)),
        ("top_k", (1 << 20, 64, 1), (1 << 20, 1 << 20, 1)),
        ("lightning", (4096, 0, 90, 0), (16, 1024, 1024, 1024)),
    ],
)
def test_short_rows_start_no_threads(make, short, long):
    assert started_threads(make, *short) == 0
    assert started_threads(make, *long) > 0


# --- results -------------------------------------------------------------------------------------

CONTEXTS = [(0, 0, 0), (1024, 3, 1000), (1, 1024), (100, 101, 99), tuple(range(0, 1025, 16))]


@pytest.mark.parametrize("contexts", CONTEXTS, ids=lambda x: f"{len(x)} tokens to {max(x)}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lightning_indexer_of_a_wide_table(contexts, dtype):
    def run(num_pages, max_logits_bytes):
        num_tokens = len(contexts)
        arrays = {
            "out": np.full((num_tokens, 100), 77, np.int32),
            "values": np.full((num_tokens, 100), 77, BF16 if dtype == "bfloat16" else np.float32),
        }
        options = arrays | {"dtype": dtype, "max_logits_bytes": max_logits_bytes}
        lightning(num_pages, *contexts, **options)()
        return arrays

    want = run(16, 1 << 30)
    for num_pages, most in ((16, 4096), (17, 1 << 30), (1000, 1 << 18), (1000, 1 << 30)):
        for name, x in run(num_pages, most).items():
            assert_same_bits(x, want[name], f"{name}, {num_pages} pages, {most} bytes")


def lists_with_empty_parts(num_tokens: int, width: int, num_splits: int) -> np.ndarray:
    """Indices of which any parts are empty, whole tokens, too. Some parts have one key."""
    rng = np.random.default_rng(3)
    indices = rng.integers(0, 64, (num_tokens, num_splits, width // num_splits)).astype(np.int32)
    indices[rng.random(indices.shape) < 0.3] = -1
    indices[rng.random(indices.shape[:2]) < 0.5] = -1
    indices[0] = indices[1, 1:] = indices[2, :-1] = -1
    indices[3, :, 1:] = -1
    indices[4] = -1
    indices[4, 2, 5] = 7
    return indices.reshape(num_tokens, width)


@pytest.mark.parametrize("has_extra", [False, True])
def test_both_schedules_skip_empty_parts_alike(has_extra):
    """Few parts run in parallel; of many tokens each runs its parts in turn. Products are so small
    here that sums become -0."""
    num_tokens, num_splits = 80, 5
    rng = np.random.default_rng(4)
    rows = (rng.standard_normal((64, 576)) * 1e-19).astype(BF16)
    rows[:, :64] = (rng.standard_normal((64, 64)) * 2e-38).astype(BF16)
    q = (rng.standard_normal((num_tokens, 20, 576)) * 1e20).astype(BF16)
    indices = lists_with_empty_parts(num_tokens, 320, num_splits)

    def run(tokens):
        lists = (
            {"extra_kv_cache": rows, "extra_indices": indices[tokens, ::-1]} if has_extra else {}
        )
        lists = {name: np.ascontiguousarray(x) for name, x in lists.items()}
        return sparse_mla.sparse_attention(
            q[tokens], rows, indices[tokens], softmax_scale=1.0, num_splits=num_splits, **lists
        )

    want = [np.asarray(x) for x in run(slice(None))]
    zeros = want[0].view(np.uint16)
    assert (zeros == 0x8000).any() and (zeros == 0).any()
    for token in range(num_tokens):
        for x, y in zip(run(slice(token, token + 1)), want, strict=True):
            assert_same_bits(np.asarray(x)[0], y[token], f"token {token}")
