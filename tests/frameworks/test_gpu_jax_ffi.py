"""sparse_mla.integrations.jax inside programs on a GPU: the bits of direct calls, on XLA's stream.

test_jax_ffi.py runs on such a machine, too, with arrays on the CPU.
"""

import time

import cases
import numpy as np
import pytest
from helpers import assert_same_bits, assert_within_bounds, find_framework
from jax_calls import CALLS, moved, plain
from test_jax_ffi import decode, run_through

import sparse_mla

pytestmark = [pytest.mark.jax, pytest.mark.torch]


@pytest.fixture(scope="module")
def place():
    return find_framework("jax", "cuda")


@pytest.fixture(scope="module")
def torch_cuda():
    """Direct calls are made with PyTorch's tensors, because some of them write an array."""
    return find_framework("torch", "cuda")


@pytest.fixture(scope="module")
def smla():
    import sparse_mla.integrations.jax

    return sparse_mla.integrations.jax


def as_tuple(results) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def assert_same(got, want, framework) -> None:
    for i, (x, y) in enumerate(zip(as_tuple(got), as_tuple(want), strict=True)):
        assert x.devices() and {d.platform for d in x.devices()} == {"gpu"}
        assert_same_bits(np.asarray(x), framework.get(y), f"result {i}")


def run_directly(op, framework):
    call = plain(op)
    for name, x in call.arrays().items():
        call.set(name, framework.put(x))
    return call.run(sparse_mla)


@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("op", CALLS)
def test_the_direct_call_s_bits(place, torch_cuda, smla, op, how):
    want = run_directly(op, torch_cuda)
    assert_same(run_through(place, smla, op, how), want, torch_cuda)


@pytest.mark.parametrize("name", cases.ATTENTION)
def test_attention(place, torch_cuda, smla, name):
    case = cases.ATTENTION[name].make()
    want = case.run(
        sparse_mla.sparse_attention, lambda x: torch_cuda.put(x.copy()), return_max_logits=True
    )
    run = place.module.jit(
        smla.sparse_attention, static_argnames=("softmax_scale", "num_splits", "return_max_logits")
    )
    got = case.run(run, place.put, return_max_logits=True)
    assert_same(got, want, torch_cuda)
    results = dict(zip(("out", "lse", "max_logits"), map(np.asarray, got), strict=True))
    assert_within_bounds(case.reference(), results, units=32)


def test_a_donated_cache_is_written_in_place(place, smla):
    jax, call = place.module, moved("concat_and_cache_mla", place)
    arrays = {**call.args, **call.kwargs}
    run = jax.jit(smla.concat_and_cache_mla, donate_argnums=2)
    cache = jax.numpy.array(arrays["kv_cache"], copy=True)
    address = cache.unsafe_buffer_pointer()
    got = run(arrays["kv_c"], arrays["k_pe"], cache, arrays["slot_mapping"])
    assert cache.is_deleted() and got.unsafe_buffer_pointer() == address
    assert not np.asarray(arrays["kv_cache"]).any() and np.asarray(got).any()


def test_a_decode_loop_in_one_program(place, torch_cuda, smla):
    """Every step attends to the tokens that it and the steps before it have written."""
    jax, rng, steps = place.module, np.random.default_rng(2), 6
    inputs = {
        "latent": cases.random_bf16(rng, steps, 1, 512),
        "rope": cases.random_bf16(rng, steps, 1, 64),
        "slot": rng.permutation(20)[:steps, None].astype(np.int32),
        "q": cases.random_bf16(rng, steps, 1, 64, 576),
    }
    seen = np.where(np.tri(steps, dtype=bool), inputs["slot"][:, 0], np.int32(-1))
    inputs["chosen"] = seen.astype(np.int32)[:, None]
    program = jax.jit(lambda *args: decode(jax, smla, *args), donate_argnums=0)
    cache = np.zeros((5, 4, 656), np.uint8)
    last, (out, lse) = program(place.put(cache), {name: place.put(x) for name, x in inputs.items()})
    cache = torch_cuda.put(cache)
    for i in range(steps):
        x = {name: torch_cuda.put(value[i]) for name, value in inputs.items()}
        sparse_mla.concat_and_cache_mla(x["latent"], x["rope"], cache, x["slot"])
        want = sparse_mla.sparse_attention(x["q"], cache, x["chosen"], softmax_scale=0.04)
        assert_same((out[i], lse[i]), want, torch_cuda)
    assert_same(last, cache, torch_cuda)


def test_a_call_waits_for_nothing(place, smla):
    """A program with a second of work in front of the call is given to the GPU at once."""
    jax, jnp = place.module, place.module.numpy
    case = cases.AttentionCase(16, 64, 300, num_splits=5).make()  # needs a workspace
    scale = case.options["softmax_scale"]

    def run(x, q, kv, indices):
        for _ in range(40):
            x = (x @ x) * 1e-4
        return smla.sparse_attention(
            q + x[0, 0].astype(q.dtype) * 0, kv, indices, softmax_scale=scale, num_splits=5
        )

    given = [place.put(x) for x in (case.q, case.kv, case.indices)]
    x = jax.device_put(jnp.ones((12288, 12288), jnp.float32), place.place)
    run = jax.jit(run).lower(x, *given).compile()
    jax.block_until_ready(run(x, *given))
    started = time.perf_counter()
    results = run(x, *given)
    returned = time.perf_counter() - started
    jax.block_until_ready(results)
    took = time.perf_counter() - started
    assert returned < took / 4, (returned, took)


def test_workspaces_go_back_to_xla(place, smla):
    """One call after another takes the same memory, and calls that fail give it back, too."""
    jax, case = place.module, cases.AttentionCase(16, 64, 300, num_splits=5).make()
    size = sparse_mla.attention_workspace_size(16, 64, 300, num_splits=5, device="cuda")
    assert size > 1 << 20
    scale = case.options["softmax_scale"]
    run = jax.jit(lambda *x: smla.sparse_attention(*x, softmax_scale=scale, num_splits=5))
    good = [place.put(x) for x in (case.q, case.kv, case.indices)]
    bad = [good[0], good[1].astype(np.int16), good[2]]

    def in_use():
        jax.block_until_ready(run(*good))
        with pytest.raises(RuntimeError, match="`kv_cache` must be"):
            jax.block_until_ready(run(*bad))
        return place.place.memory_stats()["bytes_in_use"]

    before = in_use()
    assert {in_use() for _ in range(20)} == {before}


def test_errors_have_the_direct_call_s_text(place, torch_cuda, smla):
    case = cases.ATTENTION["h16_k64"].make()
    given = [case.q, case.kv, case.indices.astype(np.int16)]
    with pytest.raises(TypeError) as caught:
        sparse_mla.sparse_attention(*map(torch_cuda.put, given), softmax_scale=0.04)
    run = place.module.jit(lambda *given: smla.sparse_attention(*given, softmax_scale=0.04))
    with pytest.raises(RuntimeError) as failed:
        place.module.block_until_ready(run(*map(place.put, given)))
    assert str(caught.value) in str(failed.value)
    assert "INVALID_ARGUMENT" in str(failed.value)


def test_arrays_of_the_cpu_are_computed_there(place, smla):
    """JAX's default device is the GPU here, and the call still runs on the CPU."""
    case = cases.ATTENTION["h17_k63"].make()
    put = find_framework("jax", "cpu").put
    run = place.module.jit(lambda *given: smla.sparse_attention(*given, softmax_scale=0.04))
    out, lse = run(*map(put, (case.q, case.kv, case.indices)))
    assert {d.platform for x in (out, lse) for d in x.devices()} == {"cpu"}
    assert np.isfinite(np.asarray(lse)).any()
