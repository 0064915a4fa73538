"""What a builder, its memory and the pool of threads keep must not show in the results of later
calls: tables that become wider, and processes that fork."""

from __future__ import annotations

import dataclasses

import cases
import engine
import numpy as np
import pytest
from dense_steps import Case as DenseCase
from dense_steps import dense
from device import ON_CUDA, host
from helpers import BESIDE_TESTS, assert_same_bits, printed_by_python
from library import sparse_mla
from v4_attend_cases import make_case
from v4_world import World

import sparse_mla as package

# --- wider tables --------------------------------------------------------------------------------

LENGTHS = (64, 30, 50)
GROWING = [  # (request, first position, tokens), decodes first
    [(0, 0, 9), (1, 0, 5)],
    [(0, 9, 1), (1, 5, 1), (2, 0, 20)],
    [(1, 6, 3), (0, 10, 30)],
    [(0, 40, 4), (2, 20, 30)],
    [(1, 9, 1)],
    [(0, 44, 20), (1, 10, 20)],
]


def page_tokens(world: World, name: str) -> int:
    sizes = world.sizes
    if name == "swa":
        return sizes.swa_block_size
    return sizes.state_block_sizes[world.ratio] if name.endswith("state") else sizes.block_size


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_tables_that_grow_between_forwards(ratio, path):
    """The layer's memory is made in the first step, when tables are narrow. Later tables are as
    wide as the longest request needs, and in the end narrower again."""
    options = {"seed": ratio, "options": {"path": path}}
    grown, whole = (World(package, ratio, LENGTHS, **options) for _ in range(2))
    tables = dict(grown.tables)
    for parts in GROWING:
        longest = max(a + n for _, a, n in parts)
        for name, table in tables.items():
            grown.tables[name] = table[:, : -(-longest // page_tokens(grown, name))]
        assert_same_bits(grown.step(parts), whole.step(parts), str(parts))
    for b, n in enumerate((64, 30, 50)):
        grown.tables = dict(tables)
        got, want = grown.visible(b, n), whole.visible(b, n)
        for name in want:
            assert_same_bits(got[name], want[name], name)


def test_the_indexer_s_memory_fits_each_table():
    """Its size follows from the table's width, so a wider table makes new memory, once."""
    world, whole = World(package, 4, LENGTHS), World(package, 4, LENGTHS)
    tokens, page = world.sizes.max_num_batched_tokens, world.sizes.block_size // 4
    table = world.tables["index"]
    taken, sizes = [], {}
    for columns, part in ((2, (0, 0, 9)), (9, (0, 9, 9)), (2, (0, 18, 1)), (9, (0, 19, 9))):
        more = columns - table.shape[1]
        world.tables["index"] = np.pad(table, ((0, 0), (0, more)), constant_values=-1)
        assert_same_bits(world.step([part]), whole.step([part]))
        taken.append(world.builder.forward_bytes)
        sizes[columns] = package.lightning_indexer_workspace_size(
            tokens, columns * page, k=world.topk, device="cpu"
        )
    assert sizes[9] > sizes[2]
    assert taken == [taken[0], *[taken[0] + sizes[9]] * 3]


def grow(batch: cases.Batch, columns: int) -> cases.Batch:
    """The same batch with so many columns behind those that it needs."""
    table = np.pad(batch.block_table, ((0, 0), (0, columns)), constant_values=-1)
    return dataclasses.replace(batch, block_table=table)


STEPS = [  # query lengths, lengths, columns that the table has more
    ([1, 1, 9], [5, 9, 9], 0),
    ([1, 1, 30], [70, 130, 300], 1),
    ([1, 5, 3], [66, 5, 200], 9),
    ([1, 1, 1], [400, 3, 1], 0),
    ([2, 40], [2, 390], 3),
]


@pytest.mark.parametrize("path", ["mixed", "separate", "direct", "bf16"])
def test_steps_of_v32_with_growing_tables(path):
    config = engine.config(sparse_mla, fp8=path != "bf16", path=path)
    builder = sparse_mla.MetadataBuilder(config)
    layer = sparse_mla.SparseMLA(config)
    for query_lens, lens, more in STEPS:
        batch = grow(cases.make_batch(query_lens, lens), more)
        step = engine.make_step(batch, 32)
        kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
        found = []
        for of in (builder, sparse_mla.MetadataBuilder(config)):
            metadata = of.build(batch.common(sparse_mla))
            found.append(layer.forward(step.q, kv, step.topk_indices, metadata))
        for x, y in zip(*found, strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("plan", ["equal", "packed"])
@pytest.mark.parametrize("path", ["separate", "mixed", None])
def test_dense_steps_with_growing_tables(path, plan):
    options = {
        "path": path, "context_plan": plan, "prefill_workspace_tokens": 64, "max_num_seqs": 3,
        "max_num_batched_tokens": 64, "max_model_len": 402,
    }  # fmt: skip
    builder = None
    for query_lens, lens, more in STEPS:
        contexts = [n - q for n, q in zip(lens, query_lens, strict=True)]
        case = DenseCase(query_lens, contexts)
        case.batch = grow(case.batch, more)
        builder = builder or dense.MetadataBuilder(case.config(**options))
        assert_same_bits(case.run(builder=builder, **options), case.run(**options))


@pytest.mark.parametrize("path", ["direct", "separate"])
@pytest.mark.parametrize("ratio", [1, 4, 16])
def test_attention_of_v4_with_growing_tables(ratio, path):
    builder = None
    for seed, context in enumerate((0, 400, 3, 90)):
        case = make_case(ratio, path, (1, 2, 9, 3), (context, 1, 0, context), seed=seed)
        builder = builder or sparse_mla.v4.MetadataBuilder(case.config)
        got, want = case.run(builder), case.run()
        for name, x in want.items():
            assert_same_bits(host(got[name]), host(x), name)


# --- forks ---------------------------------------------------------------------------------------

FORK = """
import os, signal, time
import numpy as np
import sparse_mla
import cases, engine
from test_dense_absorbed import Layer
from dense_steps import Case
from v4_attend_cases import make_case
from v4_world import World

def threads():
    return set(os.listdir("/proc/self/task"))

LENS, CONTEXTS = [1, 1, 1, 1, 9, 20, 7], [40, 300, 0, 90, 0, 60, 300]

def run_v32(path):
    batch = cases.make_batch(LENS, np.add(LENS, CONTEXTS))
    step = engine.make_step(batch, 32)
    config = engine.config(sparse_mla, path=path)
    builder, layer = sparse_mla.MetadataBuilder(config), sparse_mla.SparseMLA(config)
    def call():
        metadata = builder.build(batch.common(sparse_mla))
        return layer.forward(step.q, step.fp8_cache, step.topk_indices, metadata)
    return call

def run_dense(path):
    case = Case(LENS, CONTEXTS)
    builder = sparse_mla.dense.MetadataBuilder(case.config(path=path))
    return lambda: [case.run(builder=builder, path=path)]

def run_absorbed(path):
    layer = Layer(Case(LENS, CONTEXTS))
    return lambda: [layer.run(path=path)]

def run_attend(path):
    case = make_case(4, path, LENS, CONTEXTS, prefill_chunk_size=2)
    builder = sparse_mla.v4.MetadataBuilder(case.config)
    return lambda: case.run(builder).values()

def run_layer(path):
    world = World(sparse_mla, 4, (40, 40), options={"path": path})
    return lambda: [world.step([(0, 0, 30), (1, 0, 20)])]

make, path = NAME
before = threads()
call = globals()["run_" + make](path)

def work():
    "-> the results, and how many threads the process has started for them"
    results = [np.asarray(x).tobytes() for x in call()]
    return results, len(threads()) - 1

def fork(work_of_child):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang ends as a signal, and as a failure
        status = 1
        try:
            work_of_child()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
"""
CHILDREN = """
want, count = work()
def child():
    assert len(threads()) == 1
    got, own = work()
    assert got == want
    assert own == count, (own, count)
def family():
    child()
    fork(child)
    assert work() == (want, count)
fork(family)
fork(child)
assert work() == (want, count)
print(count)
"""
LAYERS = [
    *(("v32", path) for path in ("mixed", "separate", "direct")),
    *((name, path) for name in ("dense", "absorbed") for path in ("separate", "mixed")),
    *((name, path) for name in ("attend", "layer") for path in ("direct", "separate")),
]
# NumPy's BLAS starts threads, too; it must not have any here.
POOL = {"OPENBLAS_NUM_THREADS": "1"}


def run_forked(layer: tuple[str, str], script: str, threads: int) -> str:
    code = BESIDE_TESTS + FORK.replace("NAME", repr(layer)) + script
    return printed_by_python("-c", code, **POOL, OMP_NUM_THREADS=str(threads)).strip()


@pytest.mark.skipif(ON_CUDA, reason="the CPU's threads")
@pytest.mark.parametrize("layer", LAYERS, ids="-".join)
def test_a_child_has_as_many_threads_as_its_parent(layer):
    """It starts workers of its own, with a builder that its parent made and used."""
    assert run_forked(layer, CHILDREN, 3) == "2"


OWN_COUNT = """
def child():
    os.environ["OMP_NUM_THREADS"] = "4"
    _, count = work()
    assert count == 3, count
fork(child)
print(work()[1])
"""


@pytest.mark.skipif(ON_CUDA, reason="the CPU's threads")
def test_a_child_may_set_its_count_before_the_first_call():
    """The count is read by the first call, so a parent that has made none leaves it open."""
    code = OWN_COUNT.replace("work()", "work_anew()")
    anew = """
def work_anew():
    global call
    call = run_v32("mixed")
    return work()
"""
    script = FORK.replace("NAME", repr(LAYERS[0])).replace(
        'call = globals()["run_" + make](path)', ""
    )
    printed = printed_by_python(
        "-c", BESIDE_TESTS + script + anew + code, **POOL, OMP_NUM_THREADS="2"
    )
    assert printed.strip() == "1"
