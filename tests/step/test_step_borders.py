"""Steps whose batches and lists just fit what a builder was made for, on any number of threads
(csrc/step): the widest lists, the longest requests, exact workspaces."""

from __future__ import annotations

import contextlib
import dataclasses

import cases
import dense_steps as separate
import device
import engine
import numpy as np
import pytest
import reference as ref
import v4_attend_cases as v4
from borders import THREADS, constants, on_threads, sizes_around
from helpers import Guarded, assert_same_bits, assert_within_bounds

import sparse_mla

pytestmark = pytest.mark.skipif(device.ON_CUDA, reason="the borders are those of the CPU's plans")

ALIGN = constants("step/plans/plan_v4.h")["SMLA_V4_LIST_ALIGN"]


# --- DeepSeek V4 ---------------------------------------------------------------------------------


@contextlib.contextmanager
def sizes(**changes):
    """The sizes of the steps of v4_attend_cases, with changes."""
    before = v4.SIZES, v4.NUM_PAGES
    v4.NUM_PAGES = changes.pop("pages", v4.NUM_PAGES)
    v4.SIZES = dataclasses.replace(v4.SIZES, **changes)
    try:
        yield
    finally:
        v4.SIZES, v4.NUM_PAGES = before


def attend_widest(width: int, window: int, ratio: int, path: str) -> None:
    """A step of all tokens of the config, whose last token has the widest list that it may have."""
    topk = width - window
    lens, contexts = (40, 33), (300, 4 * topk)
    tokens, longest = sum(lens), contexts[1] + lens[1]
    limits = {"max_num_batched_tokens": tokens, "max_model_len": longest, "pages": 260}
    with sizes(window=window, **limits):
        case = v4.make_case(ratio, path, lens, contexts, padding=0, topk_tokens=topk)
        if ratio == 4:
            rng = np.random.default_rng(width)
            case.topk = v4.choose_rows(rng, case.batch, ratio, topk)
        v4.check(case)


@pytest.mark.parametrize("ratio", v4.RATIOS)
@pytest.mark.parametrize("path", ["direct", "separate"])
def test_widest_lists(path, ratio):
    """The choice of an indexer and the window are together as wide as lists are rounded to, half
    of it, one entry less and one more."""
    for width in sizes_around(3 * ALIGN // 2, 2 * ALIGN, 5 * ALIGN // 2):
        on_threads(16, attend_widest, width, 21, ratio, path)


def attend_long(groups: int, path: str) -> None:
    """Requests of so many compressed rows, all of which a layer without an indexer sees."""
    lens = (1, 5, 3)
    contexts = (16 * groups - 1, 16 * groups - 5, 16 * groups)
    with sizes(max_model_len=max(contexts) + 5, pages=3 * (groups + 4)):
        v4.check(v4.make_case(16, path, lens, contexts))


@pytest.mark.parametrize("path", ["direct", "separate"])
def test_columns_that_a_step_uses(path):
    for groups in sizes_around(ALIGN, 2 * ALIGN):
        on_threads(2, attend_long, groups, path)


def attend_chunks(num_prefills: int, size: int, layout: str) -> None:
    lens = (1, 2, *range(3, 3 + num_prefills))
    contexts = [0, 40, *([7, 0, 33] * num_prefills)[:num_prefills]]
    with sizes(prefill_chunk_size=size, max_num_batched_tokens=sum(lens) + 2):
        for ratio in v4.RATIOS:
            v4.check(v4.make_case(ratio, "separate", lens, contexts, layout=layout))


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("layout", ["padded", "bytes"])
def test_chunks_of_requests(layout, num_threads):
    """As many prefills as a chunk takes, one less and one more; pages with room for more rows than
    they have."""
    for num_prefills in sizes_around(3, 6):
        on_threads(num_threads, attend_chunks, num_prefills, 3, layout)


# --- DeepSeek-V3.2 -------------------------------------------------------------------------------


def forward(step: engine.Step, path: str, **changes) -> dict[str, np.ndarray]:
    workspace = changes.pop("workspace", None)
    tokens = step.batch.num_actual_tokens
    config = engine.config(
        sparse_mla, num_heads=3, path=path, max_num_batched_tokens=tokens, **changes
    )
    builder = sparse_mla.MetadataBuilder(config, workspace=workspace)
    metadata = builder.build(step.batch.common(sparse_mla))
    out, lse = Guarded((tokens, 3, 512), ref.BF16), Guarded((tokens, 3), np.float32)
    results = {"out": out.array, "lse": lse.array}
    layer = sparse_mla.SparseMLA(config)
    layer.forward(
        step.q, step.fp8_cache, step.topk_indices, metadata, attn_sink=step.attn_sink, **results
    )
    return {"out": out.check(), "lse": lse.check()}


def gather_exactly(query_lens: list[int], seq_lens: list[int]) -> None:
    """Workspaces that hold the longest prefill, two of them, all, and one row less or more. Each
    gives the bits of the others, and leaves what lies beside it alone."""
    step = engine.make_step(cases.make_batch(query_lens, seq_lens), 3)
    prefills = [s for n, s in zip(query_lens, seq_lens, strict=True) if n > 1]
    longest = max(prefills)
    want = forward(step, "separate", prefill_workspace_tokens=sum(prefills))
    for rows in sizes_around(longest, prefills[0] + prefills[1], sum(prefills), least=longest):
        given = Guarded((rows, 576), ref.BF16, poison=0x5A)
        for options in ({"prefill_workspace_tokens": rows}, {"workspace": given.array}):
            options.setdefault("prefill_workspace_tokens", None)
            for name, x in forward(step, "separate", **options).items():
                assert_same_bits(x, want[name], f"{name}, {rows} rows")
        given.check(written=False)
    plan = step.reference("separate", step.fp8_cache)
    assert_within_bounds(plan, want)


@pytest.mark.parametrize("num_threads", THREADS)
def test_exact_workspaces(num_threads):
    on_threads(num_threads, gather_exactly, [1, 1, 17, 5, 30], [70, 64, 150, 65, 130])


# --- dense MLA -----------------------------------------------------------------------------------


def expand_exactly(plan: str, page: int) -> None:
    """Workspaces of whole pages per prefill, one row less and one more; contexts that end with a
    page, one token before it and one behind it."""
    contexts = [3 * page, 3 * page - 1, 0, 3 * page + 1, page]
    case = separate.Case([1, 4, 5, 2, 3], contexts, heads=3, page=page)
    sharing = {"equal": 3, "packed": 1}[plan]  # prefills that have context
    for rows in sizes_around(sharing * page, 2 * sharing * page, 7 * page, least=sharing * page):
        got = case.run(context_plan=plan, prefill_workspace_tokens=rows)
        assert case.metadata.path == "separate"
        case.exact(separate.count_merges(case)).check(got)


@pytest.mark.parametrize("num_threads", [1, 16])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("plan", ["equal", "packed"])
def test_chunks_of_context(plan, page, num_threads):
    on_threads(num_threads, expand_exactly, plan, page)
