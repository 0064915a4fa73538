"""Arrays of torch, CuPy and JAX on the GPU: the same bits, as arrays of the caller's framework."""

import gc

import cases
import device
import gpu
import library
import numpy as np
import operators
import pytest
import reference as ref
from dlpack_producer import CUDA, Producer
from gpu import CALLS, TORCH, as_tuple, assert_same_values, moved, outcome, torch
from helpers import GPU_FRAMEWORKS, find_framework, guarded_attention

import sparse_mla

each_framework = pytest.mark.parametrize("gpu_framework", GPU_FRAMEWORKS, indirect=True)
writable = pytest.mark.parametrize("gpu_framework", GPU_FRAMEWORKS[:2], indirect=True)
RETURNING = [op for op in CALLS if op not in operators.WRITTEN]


# --- one result for all --------------------------------------------------------------------------


@each_framework
@pytest.mark.parametrize("op", RETURNING)
def test_operators_give_the_same_bits(gpu_framework, op):
    """Results are arrays of the framework, or Tensors of sparse_mla where the framework's arrays
    cannot be written (JAX)."""
    want = outcome(moved(CALLS[op]()))
    call = moved(CALLS[op](), gpu_framework)
    results = as_tuple(call.run(sparse_mla))
    for x in results:
        is_ours = gpu_framework.name == "jax" and isinstance(x, sparse_mla.Tensor)
        assert is_ours or gpu_framework.owns(x), type(x)
        assert tuple(x.__dlpack_device__()) == (2, 0)
    assert_same_values(gpu.values(results), want, op)


@each_framework
@pytest.mark.parametrize("name", ["h17_k63", "page3_bf16", "extra_same", "q_pair", "no_indices"])
def test_attention_gives_the_same_bits(gpu_framework, name):
    case = cases.ATTENTION[name].make()
    want = guarded_attention(library.sparse_mla.sparse_attention, case)
    put = gpu_framework.put
    results = case.run(sparse_mla.sparse_attention, put, return_max_logits=True)
    assert_same_values(gpu.values(results), want.values(), name)


@writable
@pytest.mark.parametrize("op", [op for op in CALLS if op != "dynamic_per_tensor_quant"])
def test_results_are_written_in_place(gpu_framework, op):
    """A given result is returned as the same object, at the same address, with the bits that an
    allocated result has."""
    want = outcome(moved(CALLS[op]()))
    call = moved(CALLS[op](), gpu_framework, keep_results=True)
    names = operators.given_results(call)
    given = [call.get(name) for name in names]
    before = [gpu_framework.address(x) for x in given]
    results = as_tuple(call.run(sparse_mla))
    for x, y in zip(results, given, strict=True):
        assert x is y
    assert [gpu_framework.address(x) for x in given] == before
    assert_same_values(gpu.values(results), want, op)


@pytest.mark.jax
@pytest.mark.parametrize("name", ["out", "lse", "max_logits"])
def test_jax_arrays_are_no_results(jax, name):
    call = moved(CALLS["sparse_attention"](), find_framework("jax", "cuda"), keep_results=True)
    for other in gpu.RESULTS:
        if other != name:
            call.kwargs.pop(other, None)
    with pytest.raises(BufferError, match=f"sparse_attention: `{name}` .*jax"):
        call.run(sparse_mla)


@pytest.mark.jax
def test_jax_with_torch_s_memory_for_results(jax):
    """The inputs are JAX's arrays, the results given torch tensors: the call allocates nothing."""
    want = outcome(moved(CALLS["sparse_attention"]()))
    call = moved(CALLS["sparse_attention"](), find_framework("jax", "cuda"), keep_results=True)
    for name in operators.given_results(call):
        call.set(name, gpu.put(np.zeros(call.get(name).shape, call.get(name).dtype)))
    results = call.run(sparse_mla)
    assert all(TORCH.owns(x) for x in results)
    assert_same_values(gpu.values(results), want)


@pytest.mark.jax
def test_jax_fp8_dtype_and_results_in_jit(jax):
    framework = find_framework("jax", "cuda")
    case = cases.ATTENTION["h17_k63"].make()
    want = gpu.values(case.run(sparse_mla.sparse_attention, gpu.put))
    kv = framework.put(case.kv.view(ref.E4M3))
    arrays = framework.put(case.q), kv, framework.put(case.indices)
    results = sparse_mla.sparse_attention(*arrays, **case.options)
    assert_same_values(gpu.values(results), want)
    doubled = jax.jit(lambda x: x * 2)(jax.dlpack.from_dlpack(results[1]))
    del results
    gc.collect()
    assert np.array_equal(np.asarray(doubled), want[1] * 2)


def test_torch_fp8_dtype_is_bytes():
    case = cases.ATTENTION["h17_k63"].make()
    want = gpu.values(case.run(sparse_mla.sparse_attention, gpu.put))
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        kv = gpu.put(case.kv).view(dtype)
        got = sparse_mla.sparse_attention(
            gpu.put(case.q), kv, gpu.put(case.indices), **case.options
        )
        assert_same_values(gpu.values(got), want, str(dtype))


# --- our Tensor ----------------------------------------------------------------------------------


def our_tensors():
    """-> the results of a call with JAX's arrays, and their expected values."""
    framework = find_framework("jax", "cuda")
    case = cases.AttentionCase(3, 4, 20, pages=2).make()
    want = gpu.values(case.run(sparse_mla.sparse_attention, gpu.put))
    results = case.run(sparse_mla.sparse_attention, framework.put)
    return list(results), want


@pytest.mark.jax
def test_tensor_describes_itself():
    (out, lse), _ = our_tensors()
    if not isinstance(out, sparse_mla.Tensor):
        pytest.skip("JAX took the results over")
    assert (out.dtype, out.shape, out.device) == ("bfloat16", (3, 4, 512), "cuda:0")
    assert "cuda:0" in repr(out)
    face = lse.__cuda_array_interface__
    assert face["shape"] == (3, 4)
    assert face["typestr"] == "<f4"
    assert face["data"][0] == torch.from_dlpack(lse).data_ptr()
    with pytest.raises(BufferError):
        memoryview(lse)
    with pytest.raises((BufferError, TypeError, ValueError)):
        np.asarray(lse)


@each_framework
def test_tensor_in_frameworks(gpu_framework):
    """A framework imports a Tensor without a copy, and its memory lives on when the Tensor is
    gone."""
    (out, lse), want = our_tensors()
    module = gpu_framework.module
    importer = module.dlpack.from_dlpack if gpu_framework.name == "jax" else module.from_dlpack
    address = torch.from_dlpack(lse).data_ptr()
    got = [importer(out), importer(lse)]
    assert all(gpu_framework.owns(x) for x in got)
    assert gpu_framework.address(got[1]) == address
    del out, lse
    gc.collect()
    churn = [torch.full((1 << 16,), 255, dtype=torch.uint8, device="cuda") for _ in range(50)]
    assert_same_values([gpu_framework.get(x) for x in got], want)
    assert len(churn) == 50


@pytest.mark.jax
@pytest.mark.cupy
def test_tensor_by_the_cuda_array_interface(cupy):
    (_, lse), want = our_tensors()
    if not isinstance(lse, sparse_mla.Tensor):
        pytest.skip("JAX took the results over")
    assert_same_values([cupy.asnumpy(cupy.asarray(lse)), want[1]], [want[1], want[1]])
    assert_same_values([torch.as_tensor(lse, device="cuda").cpu().numpy()], [want[1]])


@pytest.mark.jax
def test_a_tensor_is_an_argument_again():
    (out, lse), want = our_tensors()
    merged = sparse_mla.merge_attn_states(out, lse, out, lse)
    placed = [gpu.put(x) for x in want]
    assert_same_values(
        gpu.values(merged), gpu.values(sparse_mla.merge_attn_states(*placed, *placed))
    )


# --- what does not fit together ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["q", "kv_cache", "indices", "attn_sink", "extra_kv_cache", "out", "lse"]
)
def test_host_arrays_among_the_gpu_s_are_refused(name):
    call = moved(CALLS["sparse_attention"](), keep_results=True)
    good = call.get(name)
    for stranger in (device.host(good), good.cpu(), good.cpu().pin_memory()):
        call.set(name, stranger)
        with pytest.raises(ValueError, match=r"sparse_attention: `\w+` must .*, got"):
            call.run(sparse_mla)
    call.set(name, good)
    call.run(sparse_mla)


@pytest.mark.parametrize("op", [op for op in CALLS if op != "dynamic_per_tensor_quant"])
def test_every_operator_refuses_a_host_array(op):
    args = moved(CALLS[op](), keep_results=True).args
    for name in (name for name, x in args.items() if hasattr(x, "__dlpack__")):
        call = moved(CALLS[op](), keep_results=True)
        call.set(name, device.host(call.get(name)))
        with pytest.raises(ValueError, match=rf"{call.op}: `\w+` must .*, got"):
            call.run(sparse_mla)


def test_pinned_memory_is_the_cpu_s():
    call = moved(CALLS["sparse_attention"]())
    want = [np.asarray(x) for x in CALLS["sparse_attention"]().run(sparse_mla)]
    for name, x in {**call.args, **call.kwargs}.items():
        if isinstance(x, torch.Tensor):
            call.set(name, x.cpu().pin_memory())
    results = call.run(sparse_mla)
    assert all(x.device.type == "cpu" for x in results)
    assert_same_values(gpu.values(results), want)


@pytest.mark.parametrize("number", [99, -1])
def test_a_device_that_is_not_there(number):
    call = CALLS["sparse_attention"]()
    producers = [Producer(x, device=(CUDA, number)) for x in call.arrays().values()]
    for name, producer in zip(call.arrays(), producers, strict=True):
        call.set(name, producer)
    with pytest.raises((RuntimeError, ValueError), match=r"sparse_attention: "):
        call.run(sparse_mla)
    for producer in producers:
        producer.assert_balanced()
    outcome(moved(CALLS["sparse_attention"]()))


@pytest.mark.parametrize("name", ["q", "out", "lse"])
def test_requires_grad(name):
    call = moved(CALLS["sparse_attention"](), keep_results=True)
    call.get(name).requires_grad_(True)
    with pytest.raises(BufferError, match=rf"sparse_attention: `{name}` .*grad"):
        call.run(sparse_mla)
    call.set(name, call.get(name).detach())
    call.run(sparse_mla)


class Unknown:
    """A tensor of which only DLPack's two methods are visible."""

    def __init__(self, x) -> None:
        self.x = x

    def __dlpack__(self, **request):
        return self.x.__dlpack__(**request)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("op", CALLS)
def test_unknown_producers(op):
    """New results are Tensors of sparse_mla; given results are written."""
    want = outcome(moved(CALLS[op]()))
    call = moved(CALLS[op]())
    for name, x in {**call.args, **call.kwargs}.items():
        if isinstance(x, torch.Tensor):
            call.set(name, Unknown(x))
    results = as_tuple(call.run(sparse_mla))
    torch.cuda.synchronize()
    if op in operators.WRITTEN:
        results = tuple(x.x for x in results)
    else:
        assert all(isinstance(x, sparse_mla.Tensor) for x in results)
    assert_same_values(gpu.values(results), want, op)


def test_unknown_producers_inside_a_capture():
    """A graph must not hold memory that sparse_mla allocates. Inside a capture a call refuses to
    allocate results or the workspace, and works where all of them are given."""
    want = outcome(moved(CALLS["sparse_attention in 5 splits"]()))
    call = moved(CALLS["sparse_attention in 5 splits"](), keep_results=True)
    shape = (3, 24, 400)
    size = sparse_mla.attention_workspace_size(*shape, num_splits=5, device="cuda")
    workspace = gpu.put(np.zeros(size, np.uint8))
    call.set("q", Unknown(call.get("q")))
    refusals = []

    def run():
        if torch.cuda.is_current_stream_capturing():
            for name in ("workspace", *operators.given_results(call)):
                kwargs = {**call.kwargs, "workspace": workspace}
                del kwargs[name]
                with pytest.raises(ValueError, match=rf"`{name}` must be given .*\d+ bytes"):
                    sparse_mla.sparse_attention(*call.args.values(), **kwargs)
                refusals.append(name)
        return sparse_mla.sparse_attention(*call.args.values(), **call.kwargs, workspace=workspace)

    graph, results = gpu.capture(run)
    assert len(refusals) == 4
    for x in results:
        x.view(torch.uint8).fill_(0xFF)
    graph.replay()
    assert_same_values(gpu.values(results), want)


# --- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_torch_layer_as_weight(dtype):
    """The layer is applied to an identity matrix, which must be on the weight's device and of a
    dtype that the layer can multiply."""
    rng = np.random.default_rng(6)
    weight = gpu.put(cases.random_bf16(rng, 2 * 256, 512, std=0.05))

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stored = weight.to(getattr(torch, dtype))
            self.weight = torch.nn.Parameter(stored, requires_grad=False)

        def forward(self, x):
            return x @ self.weight.to(x.dtype).T

    layer = Layer()
    sizes = {"num_heads": 2, "qk_nope_head_dim": 128, "v_head_dim": 128}
    got = sparse_mla.split_kv_b_proj(layer, **sizes)
    assert all(x.is_cuda for x in got)
    bits = ref.bits16(gpu.get(layer.weight.to(torch.bfloat16))).T
    want = ref.split_kv_b_proj(bits, **sizes)
    for x, y in zip(got, want, strict=True):
        assert np.array_equal(gpu.get(x).astype(np.float32), ref.bf16_decode(y))
