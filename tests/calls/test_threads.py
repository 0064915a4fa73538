"""Calls from many threads give one result, and the GIL is released while the core works."""

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cases
import compiled
import engine
import numpy as np
import operators
import pytest
from dlpack_producer import Producer
from helpers import BESIDE_TESTS, assert_same_bits, find_framework, printed_by_python

import sparse_mla
from sparse_mla import _C

pytestmark = pytest.mark.frameworks

NUM_THREADS = 16


@pytest.fixture(autouse=True)
def _switch_often():
    """Threads change places between almost any two bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work, count=NUM_THREADS) -> list:
    """Runs work(i) in `count` threads that start together, and raises their exceptions here."""
    barrier = threading.Barrier(count)

    def run(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(run, i) for i in range(count)]]


def as_tuple(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_every_operator_from_many_threads(op):
    want = [np.array(x) for x in as_tuple(operators.GOOD_CALLS[op]().run(sparse_mla))]

    def work(_):
        for _ in range(20):
            got = as_tuple(operators.GOOD_CALLS[op]().run(sparse_mla))
            for x, y in zip(got, want, strict=True):
                assert_same_bits(np.asarray(x), y, op)

    in_threads(work)


def test_shared_inputs_from_many_threads():
    case = cases.ATTENTION["h64_k300"].make()
    want = case.run(sparse_mla.sparse_attention)

    def work(_):
        return [case.run(sparse_mla.sparse_attention) for _ in range(5)]

    for results in in_threads(work):
        for got in results:
            for x, y in zip(got, want, strict=True):
                assert_same_bits(x, y)


def test_errors_in_some_threads_do_not_reach_others():
    want = [np.array(x) for x in operators.GOOD_CALLS["sparse_attention"]().run(sparse_mla)]

    def work(i):
        for _ in range(30):
            call = operators.GOOD_CALLS["sparse_attention"]()
            if i % 2:
                call.args["indices"] = call.args["indices"].astype(np.int64)
                with pytest.raises(TypeError, match=r"`indices` must be int32, got int64"):
                    call.run(sparse_mla)
            else:
                for x, y in zip(call.run(sparse_mla), want, strict=True):
                    assert_same_bits(x, y)

    in_threads(work)


def test_one_builder_per_thread():
    config = engine.config(sparse_mla)
    layer = sparse_mla.SparseMLA(config)
    batch = engine.engine_batch()
    step = engine.make_step(batch, 32)

    def work(_):
        builder = sparse_mla.MetadataBuilder(config)
        results = []
        for _ in range(3):
            metadata = builder.build(batch.common(sparse_mla))
            results.append(layer.forward(step.q, step.fp8_cache, step.topk_indices, metadata))
        return results

    first = None
    for results in in_threads(work, 6):
        for got in results:
            first = first or got
            for x, y in zip(got, first, strict=True):
                assert_same_bits(x, y)


class Meanwhile(Producer):
    """An array whose export runs `work` in another thread, which is in the middle of a call."""

    def __init__(self, x: np.ndarray, work) -> None:
        super().__init__(x)
        self.work = work

    def __dlpack__(self, **request):
        thread = threading.Thread(target=self.work)
        thread.start()
        thread.join()
        return super().__dlpack__(**request)


class Used:
    """A builder, one step, and the errors that a second thread got."""

    def __init__(self) -> None:
        config = compiled.make_v32().step[1] | {"prefill_workspace_tokens": 0}
        self.builder = _C.Step("v32", config, None)
        batch = cases.make_batch([1, 3], [9, 12], block_size=4)
        self.lengths = batch.query_start_loc, batch.seq_lens
        self.table = batch.block_table
        self.step = engine.make_step(batch, 2, topk=6)
        self.told: list[str] = []
        self.generation = 0

    def build(self, table=None, starts=None):
        starts = self.lengths[0] if starts is None else starts
        table = self.table if table is None else table
        plan = compiled.build(self.builder, starts, self.lengths[1], table, 2, 4)
        self.generation = plan["generation"]
        return plan

    def forward(self, q=None, lse=None):
        step = self.step
        q = step.q if q is None else q
        arrays = q, step.fp8_cache, step.topk_indices, None, None, lse
        return compiled.forward(self.builder, *arrays, 0.1, self.generation, None)

    def meddle(self) -> None:
        for work in (self.build, self.forward):
            try:
                work()
            except RuntimeError as error:
                self.told.append(str(error))


BUSY = {
    # the call that the first thread makes
    "build, block table": lambda used, x: used.build(table=x(used.table)),
    "build, lengths": lambda used, x: used.build(starts=x(used.lengths[0])),
    "forward, q": lambda used, x: used.forward(q=x(used.step.q)),
    "forward, lse": lambda used, x: used.forward(lse=x(np.zeros((4, 2), np.float32))),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("what", BUSY)
def test_a_builder_in_use_refuses_a_second_thread(what, fails):
    """A builder in use refuses builds and forwards of a second thread, and the first thread's call
    is not disturbed. After an error in either thread the builder can be used again."""
    used, undisturbed = Used(), Used()
    undisturbed.build()
    used.build()
    want = [np.asarray(x).copy() for x in undisturbed.forward()]
    arrays: list[Producer] = []

    def give(x: np.ndarray) -> Producer:
        arrays.append(Meanwhile(x[..., None] if fails else x, used.meddle))
        return arrays[-1]

    if fails:
        with pytest.raises(ValueError, match="must have"):
            BUSY[what](used, give)
    else:
        BUSY[what](used, give)
    rule = "`builder` must be used by one thread at a time, got a second one"
    assert used.told == [f"MetadataBuilder.build: {rule}", f"forward: {rule}"]
    kept = what == "build, block table" and not fails
    assert arrays[0].outstanding == kept
    used.told.clear()
    for use in (used.forward, used.build):
        with pytest.raises(TypeError, match="must be an array"):
            use(object())
    if what.startswith("build"):
        assert used.build()["generation"] == (2 if fails else 3)
    thread = threading.Thread(target=used.meddle)
    thread.start()
    thread.join()
    assert not used.told
    for x, y in zip(used.forward(), want, strict=True):
        assert_same_bits(np.asarray(x), y)


def long_call(seconds: float):
    """A prepared attention call that takes at least `seconds` here."""
    tokens = 2
    while tokens < 10_000:
        case = cases.AttentionCase(2, 128, 1024, pages=20).make()
        rows = np.arange(tokens) % 2
        case = case.rows(rows)
        start = time.perf_counter()
        case.run(sparse_mla.sparse_attention)
        if time.perf_counter() - start >= seconds:
            return case
        tokens *= 2
    raise AssertionError("no call takes long enough to measure")


def test_the_gil_is_released():
    """Another thread keeps working during one long call."""
    case = long_call(0.2)
    span = {}

    def call():
        span["start"] = time.perf_counter()
        case.run(sparse_mla.sparse_attention)
        span["end"] = time.perf_counter()

    thread = threading.Thread(target=call)
    ticks = []
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.002)
    thread.join()
    length = span["end"] - span["start"]
    margin = 0.1 * length  # if the call held the GIL, only its very ends could have ticks
    inside = [t for t in ticks if span["start"] + margin < t < span["end"] - margin]
    assert len(inside) >= 5, f"{len(inside)} ticks during a call of {length:.2f} s"


class Alarm(Exception):
    """What the second handler of the next test raises."""


def test_signals_during_calls_of_many_threads():
    """Handlers run in the middle of the main thread's call, and may call the library. Only that
    call is ended, by an exception."""
    case = long_call(0.2)
    short = operators.GOOD_CALLS["sparse_attention"]().run
    want = [np.array(x) for x in case.run(sparse_mla.sparse_attention)]
    seen, results, is_over = [], [], threading.Event()

    def work():
        while not is_over.is_set():
            results.append(case.run(sparse_mla.sparse_attention))

    def go_on(*_):
        seen.append(short(sparse_mla))

    def end(*_):
        raise Alarm

    threads = [threading.Thread(target=work) for _ in range(2)]
    before = signal.signal(signal.SIGALRM, go_on)
    for thread in threads:
        thread.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        while not seen:
            results.append(case.run(sparse_mla.sparse_attention))
        signal.setitimer(signal.ITIMER_REAL, 0)
        with pytest.raises(Alarm):  # a signal of before may be on its way
            signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            while True:
                case.run(sparse_mla.sparse_attention)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_over.set()
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGALRM, before)
    results.append(case.run(sparse_mla.sparse_attention))
    for got in results:
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x, y)


FORK = """
import os, signal
import operators, sparse_mla
call = operators.GOOD_CALLS["sparse_attention"]().run
call(sparse_mla)
child = os.fork()
if child == 0:
    signal.alarm(60)  # a hang ends as a signal, and as a failure
    call(sparse_mla)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
call(sparse_mla)
"""


def test_a_child_works_after_its_parent_has():
    """A forked child has none of the threads that its parent's calls have started."""
    printed_by_python("-c", BESIDE_TESTS + FORK)


OPENMP_LIBRARIES = """
import importlib
for name in {names}:
    importlib.import_module(name)
import operators, sparse_mla
operators.GOOD_CALLS["sparse_attention"]().run(sparse_mla)
maps = [line.split()[-1] for line in open("/proc/self/maps")]
print(*sorted({{path for path in maps if "libgomp" in path or "omp.so" in path}}), sep="\\n")
"""


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize(
    ("framework", "count"),
    [
        ("numpy", 0),
        pytest.param("torch", 1, marks=pytest.mark.torch),
        pytest.param("jax", 0, marks=pytest.mark.jax),
    ],
)
def test_a_process_has_no_openmp_library_but_its_framework_s(framework, count, ours_first):
    find_framework(framework)
    if "clang" in sparse_mla.build_info()["compiler"]:
        pytest.skip("clang's own OpenMP library is linked")
    names = ["sparse_mla", framework][:: 1 if ours_first else -1]
    code = BESIDE_TESTS + OPENMP_LIBRARIES.format(names=names)
    libraries = printed_by_python("-c", code).split()
    assert len(libraries) == count, libraries
    assert all(f"/{framework}/" in path for path in libraries), libraries
