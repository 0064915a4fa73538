"""Calls keep nothing: reference counts, traced allocations and resident memory over many calls."""

import gc
import os
import sys
import tracemalloc

import cases
import compiled
import engine
import ml_dtypes
import numpy as np
import operators
import pytest
from dlpack_producer import Producer
from helpers import FLOAT_MODES, assert_keeps_nothing, mode_after

import sparse_mla
from sparse_mla import _C

pytestmark = pytest.mark.frameworks

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


def bad_call(op) -> operators.Call:
    """A call that fails after it has acquired its arrays: the last one has a wrong dtype."""
    call = operators.GOOD_CALLS[op]()
    name = list(call.arrays())[-1]
    call.set(name, np.zeros(call.get(name).shape, np.int16))
    return call


def run_failing(call) -> None:
    try:
        call.run(sparse_mla)
    except (TypeError, ValueError):
        return
    raise AssertionError("the call should fail")


CALLS = {
    "good": (operators.GOOD_CALLS.__getitem__, lambda call: call.run(sparse_mla)),
    "bad": (lambda op: lambda: bad_call(op), run_failing),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_reference_counts(op, kind):
    """500 calls leave the reference counts of their arguments, and of a dtype, a type, a string and
    a small integer, as they were."""
    make, run = CALLS[kind]
    call = make(op)()
    arrays = list(call.arrays().values())
    run(call)
    counts = [sys.getrefcount(x) for x in arrays]
    common = (np.dtype(np.float32), np.ndarray, "bfloat16", 512)
    before = [sys.getrefcount(x) for x in common]
    for _ in range(500):
        run(call)
    assert [sys.getrefcount(x) for x in arrays] == counts
    after = [sys.getrefcount(x) for x in common]
    assert all(abs(y - x) < 100 for x, y in zip(before, after, strict=True)), (before, after)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_traced_memory(op, kind):
    """After the first 100 calls, 500 more leave no allocations of Python's or NumPy's behind."""
    make, run = CALLS[kind]
    call = make(op)()
    for _ in range(100):
        run(call)
    gc.collect()
    tracemalloc.start()
    try:
        run(call)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(500):
            run(call)
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth < 8 << 10, f"{growth} bytes after 500 calls"


def test_new_outputs_are_freed():
    """A call has 4 MiB of results. If they were kept, 200 calls would take 800 MiB."""
    case = cases.AttentionCase(32, 128, 1, pages=1).make()
    for _ in range(5):
        case.run(sparse_mla.sparse_attention)
    before = resident()
    for _ in range(200):
        case.run(sparse_mla.sparse_attention)
    assert resident() - before < 64 << 20


def test_workspace_taken_inside_a_call_is_freed():
    case = cases.AttentionCase(16, 64, 300, num_splits=5).make()
    size = sparse_mla.attention_workspace_size(16, 64, 300, num_splits=5, device="cpu")
    for _ in range(3):
        case.run(sparse_mla.sparse_attention)
    before = resident()
    for _ in range(60):
        case.run(sparse_mla.sparse_attention)
    assert resident() - before < max(16 << 20, 20 * size)


def test_tensors_of_unknown_producers_are_freed():
    case = cases.AttentionCase(32, 128, 1, pages=1).make()
    make = lambda: sparse_mla.sparse_attention(  # noqa: E731
        Producer(case.q), case.kv, case.indices, **case.options
    )
    for _ in range(5):
        make()
    gc.collect()
    before = resident()
    for i in range(100):
        out, lse = make()
        view = np.asarray(lse)
        capsule = out.__dlpack__(max_version=(1, 0))
        del out, lse, view, capsule
        if i % 10 == 0:
            gc.collect()
    gc.collect()
    assert resident() - before < 64 << 20


def test_builders_and_layers_are_freed():
    """Each builder has persistent buffers of 2 MiB and more."""
    options = {"max_num_batched_tokens": 1 << 19, "max_num_seqs": 512}
    step = engine.make_step(engine.engine_batch(), 32)

    def once():
        config = engine.config(sparse_mla, **options)
        metadata = sparse_mla.MetadataBuilder(config).build(step.batch.common(sparse_mla))
        sparse_mla.SparseMLA(config).forward(step.q, step.fp8_cache, step.topk_indices, metadata)

    for _ in range(5):
        once()
    gc.collect()
    before = resident()
    for _ in range(100):
        once()
    gc.collect()
    assert resident() - before < 64 << 20


def test_failing_builds_keep_nothing():
    builder = sparse_mla.MetadataBuilder(engine.config(sparse_mla))
    batch = engine.engine_batch()
    lens = batch.seq_lens.copy()
    lens[0] = -1
    counts = sys.getrefcount(batch.block_table), sys.getrefcount(batch.slot_mapping)
    for _ in range(200):
        with pytest.raises(ValueError, match=r"seq_lens"):
            builder.build(batch.common(sparse_mla, seq_lens_cpu=lens, seq_lens=lens))
    gc.collect()
    assert (sys.getrefcount(batch.block_table), sys.getrefcount(batch.slot_mapping)) == counts


# --- what a wrong argument leaves ----------------------------------------------------------------


class Failing:
    """An object that fails whatever it is asked."""

    def __int__(self):
        raise ZeroDivisionError("no value")

    __index__ = __float__ = __bool__ = __str__ = __len__ = __iter__ = __cuda_stream__ = __int__
    __dlpack__ = __dlpack_device__ = property(__int__)


class FailingArray(Failing):
    """One that is an array as far as anybody can tell without asking."""

    def __dlpack_device__(self):
        return (1, 0)

    __dlpack__ = Failing.__int__


class Unprintable:
    def __repr__(self):
        raise ZeroDivisionError("no text")


# Types that are read as dtypes are last. Each value is wrong for some kinds of arguments.
WRONG = (
    *(object(), Failing(), FailingArray(), Unprintable(), 1 << 70, -(1 << 40), 0.5, float("nan")),
    *("tpu", "\ud800", "bfloat16\0", b"cpu", (1, 2, 3), [object()], {}, (1, "x")),
    *(np.zeros((2, 2, 2, 2, 2), np.complex64), np.zeros(3, ">i4"), np.zeros((), "U3")),
    *(np.int16, np.dtype(">f4"), np.dtype("U3"), ml_dtypes.int4),
)
# What every call may refer to.
COMMON = (
    *(np.dtype(x) for x in ("float32", "uint8", "int32", "int64", "bool", ml_dtypes.bfloat16)),
    *(np.ndarray, _C.Tensor, _C.Step, _C.Operator, object, Failing, 512, 1, "cpu"),
    *(ValueError, TypeError, ZeroDivisionError, "bfloat16", (), None, True, False, ...),
)


def fails(call, *args, **kwargs) -> bool:
    """Whether the call raises an error, of which nothing is kept."""
    try:
        call(*args, **kwargs)
    except (TypeError, ValueError, BufferError, AttributeError, ZeroDivisionError, RuntimeError):
        return True
    return False


def assert_lets_go(call, calls: list[tuple[tuple, dict]]) -> None:
    """Calls that fail leave every reference count as it was, and no memory. Those that do not fail
    are left out. Small numbers and strings of the source are one object for the whole process,
    which other threads (the one that pytest-xdist listens with) take and drop meanwhile: they are
    counted over many runs. What earlier tests left in cycles is freed before anything is counted.
    """
    gc.collect()
    failing = [one for one in calls if fails(call, *one[0], **one[1])]
    assert failing
    values = [x for args, kwargs in calls for x in (*args, *kwargs.values())]
    values += [x for items in values if isinstance(items, tuple) for x in items]
    common = [*COMMON, *{x for x in values if type(x) in (int, str)}]
    given = [x for x in (*values, call) if not any(x is y for y in common)]
    held = [sys.getrefcount(x) for x in given]
    for args, kwargs in failing:
        assert fails(call, *args, **kwargs)
        assert [sys.getrefcount(x) for x in given] == held, (args, kwargs)

    def run() -> None:
        for args, kwargs in failing:
            fails(call, *args, **kwargs)

    def count_moves() -> int:
        """How far 20 runs move the counts of common things. A leak moves one by 20 in each run."""
        held = [sys.getrefcount(x) for x in common]
        for _ in range(20):
            run()
        return max(abs(sys.getrefcount(x) - n) for x, n in zip(common, held, strict=True))

    assert any(count_moves() < 20 for _ in range(5))
    assert_keeps_nothing(run, calls=20)


@pytest.mark.parametrize("op", operators.FRAMEWORK_CALLS)
def test_a_wrong_argument_leaves_nothing(op):
    """Every argument in turn, arrays and options, between good ones."""
    call = operators.FRAMEWORK_CALLS[op]()
    operator = getattr(sparse_mla, op)
    names = {*dict(operator.table), "stream"} & {*operator.__wrapped__.__annotations__}
    good = call.args | call.kwargs
    for name in sorted(names):
        assert_lets_go(operator, [((), good | {name: wrong}) for wrong in WRONG])


@pytest.mark.parametrize("op", operators.FRAMEWORK_CALLS)
def test_a_call_that_does_not_fit_leaves_nothing(op):
    call = operators.FRAMEWORK_CALLS[op]()
    good = list((call.args | call.kwargs).items())
    args, first = tuple(x for _, x in good), dict(good[:1])
    bad = [((), dict(good[1:])), ((), dict(good) | {"color": 1}), (args * 9, {}), (args, first)]
    bad.append(((), {"kv_format": object(), "kv_cache_dtype": object(), **dict(good)}))
    assert_lets_go(getattr(sparse_mla, op), bad)


def with_wrong_items(good: tuple) -> list[tuple[tuple, dict]]:
    """The arguments with each of them, and each item of those that are tuples, replaced in turn,
    and with one more or less."""
    bad: list[tuple] = [(*good, None), good[:-1]]
    for i, value in enumerate(good):
        items = [*WRONG]
        if isinstance(value, tuple):
            items += [(*value[:j], x, *value[j + 1 :]) for j in range(len(value)) for x in WRONG]
            items += [value[:-1], (*value, value[-1])]
        bad += [(*good[:i], x, *good[i + 1 :]) for x in items]
    return [(args, {}) for args in bad]


def make_calls() -> dict[str, compiled.Call]:
    return compiled.make_calls() | compiled.make_named_calls()


@pytest.mark.parametrize("name", make_calls())
def test_a_wrong_argument_of_the_compiled_module_leaves_nothing(name):
    """A builder can be used again afterwards."""
    call, good = make_calls()[name]
    assert_lets_go(call, [*with_wrong_items(good), (good, {"color": 1})])
    call(*good)


# --- what a call leaves of the thread's floating-point mode --------------------------------------


@pytest.mark.parametrize("op", operators.FRAMEWORK_CALLS)
def test_an_operator_leaves_the_floating_point_mode(op):
    """A good call, and calls with a wrong argument at each place."""
    call = operators.FRAMEWORK_CALLS[op]()
    good, operator = call.args | call.kwargs, getattr(sparse_mla, op)
    wrongs = [(name, wrong) for name in good for wrong in (Failing(), WRONG[-8])]
    runs = [lambda: operator(**good), lambda: operator(None)]
    runs += [lambda one=one: operator(**good | dict([one])) for one in wrongs]
    for mode in FLOAT_MODES.values():
        for run in runs:
            assert mode_after(mode, lambda run=run: fails(run)) == mode


@pytest.mark.parametrize("name", make_calls())
def test_the_compiled_module_leaves_the_floating_point_mode(name):
    call, good = make_calls()[name]
    bad = [args for args, _ in with_wrong_items(good)][:: max(len(good), 1)]
    for mode in FLOAT_MODES.values():
        for args in (good, *bad, good):
            assert mode_after(mode, lambda args=args: fails(call, *args)) == mode
