"""Each call of CUDA fails in turn, n = 0, 1, 2 and so on, in every operator, build and layer, on
the fake GPUs of fake_gpu.py: the error says what failed, everything that was made is destroyed,
the thread is as it was, and the next call is right."""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace

import cases
import fake_gpu
import fake_gpu_calls
import numpy as np
import operators
import paged_steps
import pytest
import test_fake_gpu_builder as builders
import test_fake_gpu_kept as fakes
import test_fake_gpu_v4 as v4_steps
import v4_attend_cases as attend
from dlpack_producer import CUDA, Producer
from exchange_producer import Exchanged
from fake_gpu import OUT_OF_MEMORY, UNKNOWN_ERROR, CupyArray, give_back, on_gpu
from helpers import FLOAT_MODES, assert_same_bits, mode_after
from test_fake_gpu_forward import PARTS, make_world

# The fake GPUs' arrays are on the second GPU, so that calls make it current and go back.
PLACE = 1
MODE = FLOAT_MODES["all flushed, up" if "all flushed, up" in FLOAT_MODES else "flushed"]
# Calls that the record leaves out unless they may fail, and any other.
WHICH = (None, "cudaGetDevice")
# A call is right without these: it gives back memory, events and streams, looks whether work that
# used them has ended, and goes to a GPU and back meanwhile.
WITHOUT = (
    "cudaFree",
    "cudaFreeHost",
    "cudaEventDestroy",
    "cudaStreamDestroy",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaGetDevice",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
)


def fail_each_call(gpu, package, run, texts: str, check=lambda _: None) -> int:
    """Lets the n-th call of CUDA in a run fail, for n = 0, 1, 2 and so on until none is left.
    -> how many of these runs failed. An error has a text that matches `texts`. A run may do without
    some calls (WITHOUT); `check` looks at its results."""

    def settle() -> dict[str, int]:
        gpu.finish()
        give_back(package)
        return gpu.counts()

    check(run())  # what is made once and kept is there now
    gc.collect()  # frees what earlier tests left in cycles
    before = settle()
    num_errors = 0
    for which in WHICH:
        for code in (UNKNOWN_ERROR, OUT_OF_MEMORY):
            n, is_over = 0, False
            while not is_over:
                outcome = SimpleNamespace(results=None, error=None)

                def attempt(outcome=outcome) -> None:
                    try:
                        outcome.results = run()
                    except (RuntimeError, MemoryError) as error:
                        outcome.error = (type(error), str(error))

                gpu.fail(which, n, code)
                assert mode_after(MODE, attempt) == MODE
                failed = gpu.failed
                is_over = not failed
                gpu.fail(None, -1)
                if outcome.error is None:
                    check(outcome.results)
                    assert is_over or failed in WITHOUT, f"{failed} has failed, and nobody said so"
                else:
                    kind, text = outcome.error
                    assert not is_over, text
                    assert re.match(texts, text), text
                    assert kind is MemoryError or code == UNKNOWN_ERROR or "memory" not in text
                    num_errors += 1
                outcome.results = None
                after = settle()
                if after != before:
                    gc.collect()
                    after = settle()
                assert after == before, f"after call {n} of {which or 'all'} has failed"
                n += 1
                assert n < 2000, "it never ends"
    check(run())
    return num_errors


# --- operators -----------------------------------------------------------------------------------

PUTS = {
    "an unknown framework": lambda x: on_gpu(x, PLACE),
    "the exchange API": lambda x: Exchanged(x, place=(CUDA, PLACE)),
    "cupy": lambda x: CupyArray(x, PLACE),
}


def values(results) -> list[np.ndarray]:
    return [
        x.array.copy() if hasattr(x, "array") else fake_gpu_calls.read(x)
        for x in fakes.in_a_tuple(results)
    ]


def fail_each_call_of(gpu, package, op, put, stream) -> int:
    """Arrays that the operator writes are as they were before each run."""
    call = fakes.moved(op, put)
    call.kwargs["stream"] = stream
    kept = {
        name: call.get(name).array.copy()
        for name in operators.given_results(call)
        if name in call.args or name in call.kwargs
    }
    want: list[list[np.ndarray]] = []

    def run():
        for name, array in kept.items():
            call.get(name).array[...] = array
        return call.run(package)

    def check(results) -> None:
        got = values(results)
        want.append(got) if not want else None
        for x, y in zip(got, want[0], strict=True):
            assert_same_bits(x, y, op)
        for x in call.arrays_given:
            if isinstance(x, Producer):
                x.forget()

    call.arrays_given = [*call.args.values(), *call.kwargs.values()]
    return fail_each_call(gpu, package, run, rf"^{op}: ", check)


@pytest.fixture
def streams(gpu, cupy, monkeypatch):
    """Producers work on other streams than the call's, which then waits for theirs."""
    monkeypatch.setattr(Exchanged, "stream", gpu.new_stream(PLACE))
    cupy.stream, cupy.current = gpu.new_stream(PLACE), PLACE
    return gpu.new_stream(PLACE)


@pytest.mark.parametrize("framework", PUTS)
@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_operators(package, gpu, streams, op, framework):
    assert fail_each_call_of(gpu, package, op, PUTS[framework], streams) > 5


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_checked_operators(package, gpu, streams, op, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CHECK", "1")
    assert fail_each_call_of(gpu, package, op, PUTS["cupy"], streams) > 7


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_captured_operators(package, gpu, streams, op):
    """The framework allocates results and the workspace."""
    gpu.capture(streams)
    assert fail_each_call_of(gpu, package, op, PUTS["the exchange API"], streams) > 1
    gpu.capture(streams, False)


# --- builders and layers -------------------------------------------------------------------------


def make_v32(package, path):
    """-> a function that makes a builder, and one that builds and runs a layer of it."""
    step = builders.small_step()
    config = builders.make_config(package, path, PLACE)
    layer, common = package.SparseMLA(config), builders.place(package, step.batch, PLACE)
    arrays = builders.arrays_of(step, path, PLACE)
    return (
        lambda: package.MetadataBuilder(config),
        lambda builder, second: layer.forward(*arrays, builder.build(common), stream=second),
    )


def make_v4(package, ratio_path):
    step = v4_steps.V4Step(package, *ratio_path, PLACE)

    def run(builder, second):
        step.builder = builder
        return step.attend(step.build(), stream=second)

    return lambda: package.v4.MetadataBuilder(step.config), run


def make_dense_config(package, path, **changes):
    options = {
        "softmax_scale": 0.1,
        "kv_cache_dtype": "fp8_ds_mla",
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "prefill_workspace_tokens": 64,
        "device": f"cuda:{PLACE}",
    }
    return package.dense.Config(2, path=path, **(options | changes))


def make_dense(package, path):
    rng = np.random.default_rng(7)
    batch = cases.make_batch([1, 2, 30], [40, 50, 60], block_size=16)
    config = make_dense_config(package, path)
    put = PUTS["cupy"]
    weight = put(cases.random_bf16(rng, 512, 2 * 256, std=0.04))
    table = put(package.rope_table(256))
    layer = package.dense.DenseMLA(config, kv_b_proj=weight, rope_table=table)
    common = builders.place(package, batch, PLACE)
    tokens = batch.num_actual_tokens
    shapes = (tokens, 2, 192), (tokens, 512), (tokens, 64)
    inputs = [put(cases.random_bf16(rng, *shape)) for shape in shapes]
    cache = put(cases.make_rows(rng, batch.num_pages * 16, "fp8").reshape(-1, 16, 656))

    def run(builder, second):
        metadata = builder.build(common)
        given = [CupyArray(x.array.copy(), PLACE) for x in inputs]
        return layer.forward(*given, cache, metadata, stream=second)

    return lambda: package.dense.MetadataBuilder(config), run


def make_paged(package, topk):
    """Verification of drafts: a chain, or a tree whose rows have slots."""
    batch = paged_steps.make_verification(topk)
    put = PUTS["cupy"]
    config = package.paged.Config(**batch.config, device=f"cuda:{PLACE}")
    lens, pool, table = (put(x) for x in (batch.seq_lens, batch.pool, batch.req_to_token))
    mask = None if topk == 1 else put(batch.custom_mask)
    q = put(np.ones((len(batch.seq_lens) * batch.num_draft_tokens, 2, 64), np.float16))
    cache = put(np.ones((-(-batch.num_slots // 4), 4, 1, 64), np.float16))

    def run(builder, second):
        m = builder.build(
            "target_verify", lens, pool, custom_mask=mask, seq_lens_cpu=batch.seq_lens
        )
        return package.paged.attention(m, q, cache, cache, softmax_scale=0.1, stream=second)

    return lambda: package.paged.MetadataBuilder(config, table), run


STEPS = {
    **{f"v32, {path}": (make_v32, path) for path in ("mixed", "separate", "direct", "bf16")},
    **{
        f"v4, {ratio}, {path}": (make_v4, (ratio, path))
        for ratio in attend.RATIOS
        for path in ("direct", "separate")
    },
    **{f"dense, {path}": (make_dense, path) for path in ("mixed", "separate")},
    **{f"paged, topk {topk}": (make_paged, topk) for topk in (1, 2)},
}


@pytest.mark.parametrize("name", STEPS)
def test_builders(package, gpu, streams, name):
    """A builder is made and destroyed in each run."""
    make, _ = STEPS[name][0](package, STEPS[name][1])
    assert fail_each_call(gpu, package, lambda: bool(make()), r"^MetadataBuilder: ") > 10


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("name", STEPS)
def test_steps(package, gpu, cupy, streams, name, check, monkeypatch):
    """A builder that has failed builds again. Builds and the layer are on streams of their own."""
    monkeypatch.setenv("SPARSE_MLA_CHECK", check)
    make, run = STEPS[name][0](package, STEPS[name][1])
    builder, want = make(), []

    def compare(results) -> None:
        got = values(results)
        want.append(got) if not want else None
        for x, y in zip(got, want[0], strict=True):
            assert_same_bits(x, y, name)

    texts = r"^(MetadataBuilder(\.build)?|[\w.]+): "
    assert fail_each_call(gpu, package, lambda: run(builder, streams), texts, compare) > 15


@pytest.mark.parametrize("count", [0, 3])
def test_a_v4_layer_in_lanes(package, gpu, cupy, count):
    """The streams of a layer that fails are joined, and its events destroyed."""
    world = make_world(package, 4)
    world.layer.streams = [gpu.new_stream() for _ in range(count)]
    cupy.stream = gpu.new_stream()
    x = world.to(world.inputs(PARTS))

    def run():
        return world.layer.forward(x, world.caches, world.build(PARTS))

    assert fail_each_call(gpu, package, run, r"^[\w.]+: ") > 20


# --- Tensors -------------------------------------------------------------------------------------


def test_tensors(package, gpu, streams):
    """Tensors that another call reads, that a consumer takes on a stream, and that are dropped."""
    arrays = [on_gpu(x, PLACE) for x in fake_gpu_calls.STATES]
    reader = gpu.new_stream(PLACE)

    def run():
        made = package.merge_attn_states(*arrays, stream=streams)
        made[0].__dlpack__(stream=reader)
        made[0].__dlpack__(stream=1, max_version=(1, 0))
        return package.merge_attn_states(*made, *made, stream=reader)

    def check(_) -> None:
        for x in arrays:
            x.forget()

    assert fail_each_call(gpu, package, run, r"^[\w.]+: ", check) > 15


def test_unloading(gpu, monkeypatch):
    """A module that is unloaded while work goes on destroys what it has kept, whatever fails."""
    gc.collect()
    before = gpu.counts()
    for n in range(12):
        package = fake_gpu.load()
        gpu.set_busy()
        package.merge_attn_states(*[on_gpu(x, PLACE) for x in fake_gpu_calls.STATES])
        gpu.fail(None, n)
        del package
        gc.collect()
        gpu.fail(None, -1)
        gpu.finish()
        assert gpu.counts() == before
