"""sparse_mla.integrations.jax on a machine with a GPU: its calls run on the CPU alone, and refuse
arrays and programs of the GPU."""

import cases
import numpy as np
import pytest
from helpers import find_framework

pytestmark = pytest.mark.jax


@pytest.fixture
def smla(jax):
    import sparse_mla.integrations.jax

    return sparse_mla.integrations.jax


def arrays(place: str):
    put = find_framework("jax", place).put
    case = cases.ATTENTION["h17_k63"].make()
    return [put(x) for x in (case.q, case.kv, case.indices)]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_array_of_the_gpu_is_refused(smla, which):
    given = arrays("cpu")
    given[which] = arrays("cuda")[which]
    name = ("q", "kv", "indices")[which]
    with pytest.raises(ValueError, match=rf"sparse_attention: `{name}` must be on the CPU, got"):
        smla.sparse_attention(*given, softmax_scale=0.04)


def test_a_program_for_the_gpu_is_refused(jax, smla):
    """XLA refuses it, because no such call is registered for CUDA."""
    run = jax.jit(lambda *given: smla.sparse_attention(*given, softmax_scale=0.04))
    with pytest.raises(Exception, match=r"(?s)sparse_mla.*CUDA|CUDA.*sparse_mla"):
        jax.block_until_ready(run(*arrays("cuda")))


def test_arrays_of_the_cpu_are_computed_there(jax, smla):
    """JAX's default device is the GPU here, and the call still runs on the CPU."""
    run = jax.jit(lambda *given: smla.sparse_attention(*given, softmax_scale=0.04))
    out, lse = run(*arrays("cpu"))
    assert {d.platform for x in (out, lse) for d in x.devices()} == {"cpu"}
    assert np.isfinite(np.asarray(lse)).any()
