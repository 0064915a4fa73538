"""The lightning indexer and its parts at the borders of their plans, on any number of threads
(csrc/cpu/indexer)."""

from __future__ import annotations

import device
import numpy as np
import pytest
import test_index_query as query
import test_lightning_indexer as lightning
from borders import THREADS, constants, every_address, on_any_threads, on_threads, sizes_around
from cases import angles
from test_indexer_logits import Flat, Paged, assert_logits, bound_of

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

PLAN = constants("cpu/indexer/logits.c")
TOKENS, COLUMNS = PLAN["BLOCK_TOKENS"], PLAN["TASK_COLUMNS"]
KEYS, HEADS = PLAN["SMLA_LOGITS_KEYS"], PLAN["SMLA_LOGITS_HEADS"]
CHUNK = constants("cpu/cpu.h")
ROW_BYTES = constants("ops/check_indexer_lightning.c")["ROW_ALIGNMENT"]
ROW = constants("cpu/indexer/lightning.c")["ROW_ALIGNMENT"]
QUERIES = constants("cpu/indexer/index_query.c")


# --- logits --------------------------------------------------------------------------------------


def score(kind: str, *fields) -> dict[str, np.ndarray]:
    return {"logits": np.asarray((Paged if kind == "pages" else Flat)(*fields).run())}


def check_logits(kind: str, *fields) -> None:
    got = on_any_threads(score, kind, *fields)
    case = (Paged if kind == "pages" else Flat)(*fields)
    assert_logits(got["logits"], *case.want(), bound_of(case.H))


@pytest.mark.parametrize("H", sizes_around(HEADS, 2 * HEADS))
def test_blocks_of_heads(H):
    check_logits("pages", (2, 3), (70, 200), H)


@pytest.mark.parametrize("T", sizes_around(TOKENS, 2 * TOKENS))
def test_blocks_of_tokens(T):
    """One request, and requests that end inside a block of tokens."""
    check_logits("pages", (T,), (300,), 3)
    check_logits("pages", (3, T - 4, 1), (300, 90, 384), 3)
    check_logits("flat", T, 2 * KEYS + 1, 3)


@pytest.mark.parametrize("context", sizes_around(KEYS, COLUMNS, 2 * COLUMNS))
def test_tasks_of_columns(context):
    """Contexts, and widths of arrays, that fill tiles and tasks."""
    width = -(-context // 64) + 1
    check_logits("pages", (2, 9), (context, context - 1), 3, "fp8", "fp8", 64, width)
    check_logits("flat", 11, context, 3)


# --- top-k ---------------------------------------------------------------------------------------


def choose(kind: str, fields: tuple, k: int, options: dict) -> None:
    lightning.check((Paged if kind == "pages" else Flat)(*fields), k, **options)


@pytest.mark.parametrize("num_threads", THREADS)
def test_chunks_of_tokens(num_threads):
    """Chunks of as many tokens as decode a key together, one less and one more."""
    for tokens in sizes_around(CHUNK["SMLA_CPU_CHUNK_TOKENS"], 2 * CHUNK["SMLA_CPU_CHUNK_TOKENS"]):
        fields = (5, tokens), (300, 384), 3
        row = lightning.row_bytes(Paged(*fields))
        for rows in (1, tokens, tokens + 5):
            limit = {"max_logits_bytes": rows * row}
            on_threads(num_threads, choose, "pages", fields, 20, limit)


@pytest.mark.parametrize("num_threads", THREADS)
def test_rows_of_logits(num_threads):
    """Contexts of as many columns as a row is rounded to, in tables that are wider."""
    for context in sizes_around(ROW, 2 * ROW):
        fields = (3, 10), (context, context - 3), 2, "fp8", "fp8", 64, 9
        for k in sizes_around(context, most=context):
            on_threads(num_threads, choose, "pages", fields, k, {})


def choose_long(context: int) -> None:
    """A request that names the same pages many times, because their values take long to make."""
    case = Paged((19,), (300,), 1)
    case.width = -(-context // case.block_size) + 1
    pages = np.random.default_rng(1).integers(0, case.pages.pages, (1, case.width))
    case.table = pages.astype(np.int32)
    case.lengths += context - case.lengths.max()
    lightning.check(case, 9, with_values=False)


def test_rows_as_long_as_a_cache():
    """Contexts so long that a chunk has as many tokens as decode a key together, or fewer."""
    longest = CHUNK["SMLA_CPU_CHUNK_LOGITS_BYTES"] // 4 // CHUNK["SMLA_CPU_CHUNK_TOKENS"]
    for context in (longest, longest + 1):
        on_threads(16, choose_long, context)


def check_workspaces(kind: str, fields: tuple, k: int) -> None:
    """The bytes that are told suffice wherever they begin, between red zones; so do those of one
    token's logits."""
    case = (Paged if kind == "pages" else Flat)(*fields)
    told = lightning.size(len(case.q), case.N, k=k)
    for shift, memory in enumerate(every_address(told, ROW_BYTES)):
        lightning.check(case, k, workspace=memory, with_values=False)
        row = lightning.row_bytes(case) + -shift % ROW_BYTES
        lightning.check(case, k, workspace=memory[:row], with_values=False)
        args, options = lightning.inputs(case)
        with pytest.raises(ValueError, match=f"must have at least {row} bytes"):
            sparse_mla.lightning_indexer(*args, k=k, workspace=memory[: row - 1], **options)


@pytest.mark.parametrize("num_threads", THREADS)
def test_exact_workspaces(num_threads):
    on_threads(
        num_threads, check_workspaces, "pages", ((3, 7), (100, 128), 2, "fp8", "fp8", 64, 2), 5
    )


# --- queries -------------------------------------------------------------------------------------


def quantize(shapes: list[tuple[int, int]], fp4: bool) -> None:
    for T, H in shapes:
        q, weights = query.queries(T, H)
        positions = np.random.default_rng(1).integers(0, query.MAX_POS, T)
        query.check(q, weights, positions, angles(), fp4)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("fp4", [False, True])
def test_queries(fp4, num_threads):
    """As many heads as are worth threads, and as are quantised together."""
    shapes = [(n // h, h) for n in sizes_around(QUERIES["PARALLEL_HEADS"]) for h in (1, 5, 3, n)
              if n % h == 0]  # fmt: skip
    shapes += [(3, H) for H in sizes_around(QUERIES["INDEX_KEYS"], 2 * QUERIES["INDEX_KEYS"])]
    on_threads(num_threads, quantize, shapes, fp4)
