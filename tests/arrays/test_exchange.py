"""Arrays of every framework in and out, without a copy (csrc/python/arrays/tensor.c)."""

import gc
import importlib
import inspect
import os
import sys

import cases
import numpy as np
import operators
import pytest
import reference as ref
from helpers import (
    ALL_FRAMEWORKS,
    BESIDE_TESTS,
    Guarded,
    assert_same_bits,
    assert_within_bounds,
    find_framework,
    guarded_attention,
    printed_by_python,
)

import sparse_mla

pytestmark = pytest.mark.frameworks

CASES = ["h17_k63", "page3_bf16", "extra_same", "q_pair", "no_indices", "topk_length_bf16"]
each_framework = pytest.mark.parametrize("framework", ALL_FRAMEWORKS, indirect=True)


# --- one result for all --------------------------------------------------------------------------


@each_framework
@pytest.mark.parametrize("name", CASES)
def test_attention_gives_the_same_bits(framework, name):
    """Results are arrays of q's framework, in its memory, with the bits of NumPy's results."""
    case = cases.ATTENTION[name].make()
    want = guarded_attention(sparse_mla.sparse_attention, case)
    results = case.run(sparse_mla.sparse_attention, framework.put, return_max_logits=True)
    for result, (what, array) in zip(results, want.items(), strict=True):
        assert framework.owns(result), f"{what} is a {type(result)}"
        assert_same_bits(framework.get(result), array, what)
    assert_within_bounds(case.reference(), want)


def moved(call, framework):
    """The call with every input array moved, and without output arrays that can be left out."""
    for name in operators.RESULTS:
        if call.op not in operators.WRITTEN:
            call.kwargs.pop(name, None)
    for name in call.arrays():
        call.set(name, framework.put(call.get(name)))
    return call


RETURNING = [op for op in operators.GOOD_CALLS if op not in operators.WRITTEN]


@each_framework
@pytest.mark.parametrize("op", RETURNING)
def test_operators_give_the_same_bits(framework, op):
    want = moved(operators.GOOD_CALLS[op](), find_framework("numpy")).run(sparse_mla)
    got = moved(operators.GOOD_CALLS[op](), framework).run(sparse_mla)
    single = not isinstance(want, tuple)
    for result, array in zip(*(((x,) if single else x) for x in (got, want)), strict=True):
        if np.ndim(array):
            assert framework.owns(result), type(result)
        assert_same_bits(framework.get(result), np.asarray(array), op)


WRITABLE = [name for name in ALL_FRAMEWORKS if name.values[0] != "jax"]


@pytest.mark.parametrize("framework", WRITABLE, indirect=True)
@pytest.mark.parametrize(
    "op",
    [*operators.WRITTEN, "sparse_attention", "fused_inv_rope_fp8_quant"],
)
def test_outputs_are_written_in_place(framework, op):
    """The same object comes back at the same address, and its memory holds the result."""
    call, plain = operators.GOOD_CALLS[op](), operators.GOOD_CALLS[op]()
    plain.run(sparse_mla)
    names = operators.given_results(call)
    for name in call.arrays():
        call.set(name, framework.put(call.get(name)))
    outputs = [call.get(name) for name in names]
    before = [framework.address(x) for x in outputs]
    result = call.run(sparse_mla)
    for returned, x in zip(
        result if isinstance(result, tuple) else (result,), outputs, strict=True
    ):
        assert returned is x
    assert [framework.address(x) for x in outputs] == before
    for name, x in zip(names, outputs, strict=True):
        assert_same_bits(framework.get(x), plain.get(name), name)


@pytest.mark.torch
def test_torch_outputs_share_numpy_memory(torch):
    """A torch view of NumPy memory as output: the NumPy array sees the result."""
    case = cases.ATTENTION["h17_k63"].make()
    framework = find_framework("torch")
    got = guarded_attention(sparse_mla.sparse_attention, case, framework.put)
    assert_within_bounds(case.reference(), got)


@pytest.mark.torch
def test_torch_strides_and_devices(torch):
    """Sliced, expanded and transposed tensors, offsets inside a storage."""
    case = cases.AttentionCase(4, 9, 60).make()
    want = guarded_attention(sparse_mla.sparse_attention, case)
    put = find_framework("torch").put
    q = put(case.q)
    storage = torch.zeros((6, 20, 600), dtype=torch.bfloat16)
    storage[1:5, 3:12, 7:583] = q
    head_major = q.transpose(0, 1).contiguous().transpose(0, 1)
    for variant in (storage[1:5, 3:12, 7:583], head_major, (q[..., :512], q[..., 512:])):
        options = {
            name: put(x) if isinstance(x, np.ndarray) else x for name, x in case.options.items()
        }
        out, _ = sparse_mla.sparse_attention(variant, put(case.kv), put(case.indices), **options)
        assert_same_bits(find_framework("torch").get(out), want["out"])
    one = q[:1].expand(4, -1, -1)
    out, _ = sparse_mla.sparse_attention(one, put(case.kv), put(case.indices), **case.options)
    case.q = np.broadcast_to(case.q[:1], case.q.shape)
    assert_same_bits(
        find_framework("torch").get(out),
        guarded_attention(sparse_mla.sparse_attention, case)["out"],
    )
    with pytest.raises((ValueError, BufferError), match=r"sparse_attention: `q` "):
        sparse_mla.sparse_attention(q.to("meta"), put(case.kv), put(case.indices), **options)


@pytest.mark.torch
def test_torch_fp8_dtype_is_bytes(torch):
    case = cases.ATTENTION["h17_k63"].make()
    want = guarded_attention(sparse_mla.sparse_attention, case)
    put = find_framework("torch").put
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        kv = put(case.kv).view(dtype)
        out, _ = sparse_mla.sparse_attention(put(case.q), kv, put(case.indices), **case.options)
        assert_same_bits(find_framework("torch").get(out), want["out"])


@pytest.mark.torch
def test_mixed_frameworks_on_the_cpu(torch):
    """NumPy indices and options with a torch q, or the reverse: results are of q's framework."""
    case = cases.ATTENTION["topk_length"].make()
    want = guarded_attention(sparse_mla.sparse_attention, case)
    put = find_framework("torch").put
    out, lse = sparse_mla.sparse_attention(put(case.q), case.kv, case.indices, **case.options)
    assert isinstance(out, torch.Tensor)
    assert_same_bits(find_framework("torch").get(out), want["out"])
    out, lse = sparse_mla.sparse_attention(case.q, put(case.kv), put(case.indices), **case.options)
    assert type(out) is np.ndarray
    assert type(lse) is np.ndarray


@pytest.mark.jax
def test_jax_fp8_cache_and_results_usable_in_jit(jax):
    case = cases.ATTENTION["h17_k63"].make()
    want = guarded_attention(sparse_mla.sparse_attention, case)
    put = find_framework("jax").put
    kv = put(case.kv.view(ref.E4M3))
    out, lse = sparse_mla.sparse_attention(put(case.q), kv, put(case.indices), **case.options)
    doubled = jax.jit(lambda x: x * 2)(lse)
    del lse
    gc.collect()
    assert np.array_equal(np.asarray(doubled), want["lse"] * 2)
    assert_same_bits(np.asarray(out), want["out"])


@pytest.mark.jax
def test_jax_arrays_without_their_slow_dlpack(jax, monkeypatch):
    """jaxlib's export function is called directly, once per array. Where it fails, jax's __dlpack__
    is called, which calls the function with keywords."""
    jaxlib = importlib.import_module("jaxlib._jax")
    export = jaxlib.buffer_to_dlpack_managed_tensor
    case = cases.ATTENTION["h17_k63"].make()
    want = guarded_attention(sparse_mla.sparse_attention, case)
    put = find_framework("jax").put
    arrays = [put(x) for x in (case.q, case.kv, case.indices)]
    for is_broken in (False, True):
        calls = []

        def count(x, calls=calls, is_broken=is_broken, **options):
            calls.append(bool(options))
            if is_broken and not options:
                raise TypeError("another signature")
            return export(x, **options)

        monkeypatch.setattr(jaxlib, "buffer_to_dlpack_managed_tensor", count)
        out, lse = sparse_mla.sparse_attention(*arrays, **case.options)
        monkeypatch.undo()
        assert calls == ([False, True] if is_broken else [False]) * 3
        assert_same_bits(np.asarray(out), want["out"])
        assert_same_bits(np.asarray(lse), want["lse"])


SHARDED = """
import jax, numpy as np, sparse_mla
mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("x",))
half = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
q = jax.device_put(np.zeros((2, 8, 576), jax.numpy.bfloat16), half)
kv = np.zeros((1, 64, 656), np.uint8)
try:
    sparse_mla.sparse_attention(q, kv, np.zeros((2, 4), np.int32), softmax_scale=1.0)
except BufferError as error:
    print(error)
"""


@pytest.mark.jax
def test_a_jax_array_over_two_devices_is_no_array(jax):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    told = printed_by_python("-c", SHARDED, **flags)
    assert "`q` must be exportable by DLPack" in told and "2 devices" in told


@pytest.mark.jax
def test_a_jax_write_is_refused_and_leaves_the_array(jax):
    """The cache is an output of the cache write, so it cannot be an immutable array."""
    call = operators.GOOD_CALLS["concat_and_cache_mla"]()
    cache = jax.numpy.zeros((3, 4, 656), jax.numpy.uint8)
    call.args["kv_cache"] = cache
    with pytest.raises(BufferError, match=r"concat_and_cache_mla: `kv_cache` .*jax"):
        call.run(sparse_mla)
    assert not np.asarray(cache).any()


# A look-up of its type's attribute is where another thread may meet the type, too. Here it is the
# same thread, so that it happens each time.
MET_TWICE = """
import sys
import numpy as np, sparse_mla
from exchange_producer import Exchanged

class Meta(type):
    met = 0
    @property
    def requires_grad(cls):
        Meta.met += 1
        if Meta.met == 1:
            quantize()
        raise AttributeError

class Array(Exchanged, metaclass=Meta):
    pass

array = Array(np.ones((1, 8), np.float32))
quantize = lambda: sparse_mla.dynamic_per_tensor_quant(array)
before = sys.getrefcount(Array)
for _ in range(4):
    quantize()
print(Meta.met, sys.getrefcount(Array) - before)
"""


def test_a_type_that_two_calls_meet_at_once_is_remembered_once():
    """Otherwise one type could take the places of all, and be kept as often."""
    assert printed_by_python("-c", BESIDE_TESTS + MET_TWICE).split() == ["2", "1"]


# --- what cannot be exported or written ----------------------------------------------------------


@pytest.mark.jax
@pytest.mark.parametrize("name", ["out", "lse", "max_logits"])
def test_jax_output(jax, name):
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.kwargs[name] = jax.numpy.array(call.kwargs[name])
    with pytest.raises(BufferError, match=f"sparse_attention: `{name}` .*jax"):
        call.run(sparse_mla)


@pytest.mark.jax
def test_jax_tracer_gets_a_helping_text(jax):
    case = cases.ATTENTION["h17_k63"].make()
    put = find_framework("jax").put
    kv, indices = put(case.kv), put(case.indices)
    seen = []

    def step(q):
        with pytest.raises(BufferError, match=r"sparse_attention: `q` ") as info:
            sparse_mla.sparse_attention(q, kv, indices, **case.options)
        seen.append(str(info.value))
        return q

    jax.jit(step)(put(case.q))
    (text,) = seen
    assert "inside jax.jit call sparse_mla.integrations.jax" in text, "the text says how"
    assert "trac" in text.lower()
    out, _ = sparse_mla.sparse_attention(put(case.q), kv, indices, **case.options)
    assert isinstance(out, jax.Array), "the next call works"


@pytest.mark.torch
@pytest.mark.parametrize("name", ["q", "out", "lse"])
def test_requires_grad(torch, name):
    call = operators.GOOD_CALLS["sparse_attention"]()
    put = find_framework("torch").put
    for each in call.arrays():
        call.set(each, put(call.get(each)))
    call.get(name).requires_grad_(True)
    with pytest.raises(BufferError, match=rf"sparse_attention: `{name}` .*grad"):
        call.run(sparse_mla)
    call.set(name, call.get(name).detach())
    call.run(sparse_mla)


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_parameters_are_taken_while_gradients_are_off(torch, mode):
    put = find_framework("torch").put
    want = moved(operators.GOOD_CALLS["k_up_proj"](), find_framework("torch")).run(sparse_mla)
    call = operators.GOOD_CALLS["k_up_proj"]()
    for name in call.arrays():
        call.set(name, torch.nn.Parameter(put(call.get(name))))
    with getattr(torch, mode)():
        got = call.run(sparse_mla)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    with pytest.raises(BufferError, match=r"k_up_proj: `.*` .* call under torch.no_grad\(\), or "):
        call.run(sparse_mla)


def attention_in_torch():
    call = moved(operators.GOOD_CALLS["sparse_attention"](), find_framework("torch"))
    q, kv, indices = (call.args[name] for name in ("q", "kv", "indices"))
    return lambda *arrays: sparse_mla.sparse_attention(*arrays, softmax_scale=0.1), (q, kv, indices)


def run_on_fake_tensors(torch, attend, arrays):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    attend(*map(mode.from_tensor, arrays))


def symbolically_trace(torch, attend, arrays):
    class Module(torch.nn.Module):
        def forward(self, q, kv, indices):
            return attend(q, kv, indices)

    torch.fx.symbolic_trace(Module())


def export(torch, attend, arrays):
    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return attend(*arrays)

    torch.export.export(Module(), arrays, strict=False)


def run_on_meta(torch, attend, arrays):
    attend(*(x.to("meta") for x in arrays))


def run_in_vmap(torch, attend, arrays):
    torch.func.vmap(attend)(*(x[None] for x in arrays))


def functionalize(torch, attend, arrays):
    torch.func.functionalize(attend)(*arrays)


@pytest.mark.torch
@pytest.mark.parametrize(
    "trace",
    [run_on_fake_tensors, symbolically_trace, export, run_on_meta, run_in_vmap, functionalize],
)
def test_traced_calls_of_torch_name_the_integration(torch, trace):
    attend, arrays = attention_in_torch()
    with pytest.raises(BufferError) as info:
        trace(torch, attend, arrays)
    text = str(info.value)
    assert text.startswith("sparse_attention: `q` must ")
    assert text.endswith("torch.func call sparse_mla.integrations.torch")
    attend(*arrays)  # the next call works


def compile_as_one_graph(torch, attend, arrays):
    torch.compile(attend, fullgraph=True, backend="eager")(*arrays)


def export_by_dynamo(torch, attend, arrays):
    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return attend(*arrays)

    torch.export.export(Module(), arrays, strict=True)


INTEGRATION = "sparse_mla.integrations.torch"
quiet_dynamo = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning"  # about modules that PyTorch imports late
)


@pytest.mark.torch
@quiet_dynamo
@pytest.mark.parametrize("trace", [compile_as_one_graph, export_by_dynamo])
def test_dynamo_names_the_integration(torch, trace):
    torch._dynamo.reset()
    attend, arrays = attention_in_torch()
    with pytest.raises(torch._dynamo.exc.Unsupported) as info:
        trace(torch, attend, arrays)
    assert f"call {INTEGRATION}.sparse_attention)" in str(info.value)
    attend(*arrays)  # the next call works


@pytest.mark.torch
@quiet_dynamo
def test_dynamo_breaks_the_graph_at_an_operator(torch):
    torch._dynamo.reset()
    attend, arrays = attention_in_torch()
    compiled = torch.compile(lambda *x: attend(*x)[0] * 2, backend="eager")
    assert torch.equal(compiled(*arrays), attend(*arrays)[0] * 2)


@pytest.mark.torch
@quiet_dynamo
def test_operators_that_no_integration_has_name_the_module(torch):
    torch._dynamo.reset()
    ask = torch.compile(sparse_mla.attention_workspace_size, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"call {INTEGRATION}\)"):
        ask(1, 2, 3)


@pytest.mark.torch
@quiet_dynamo
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (sparse_mla.SparseMLA.forward, INTEGRATION),
        (sparse_mla.MetadataBuilder.build, INTEGRATION),
        (sparse_mla.v4.SparseMLA.attend, INTEGRATION),
        (sparse_mla.v4.MetadataBuilder.build, INTEGRATION),
        (sparse_mla.flash_mla.flash_mla_with_kvcache, f"{INTEGRATION}.sparse_attention"),
        (sparse_mla.flash_mla.flash_mla_sparse_fwd, f"{INTEGRATION}.sparse_attention"),
    ],
    ids=lambda x: getattr(x, "__qualname__", ""),
)
def test_functions_on_the_host_name_the_integration(torch, function, named):
    torch._dynamo.reset()
    required = [x for x in inspect.signature(function).parameters.values() if x.default is x.empty]
    arguments = {x.name: None for x in required if x.kind is not x.VAR_KEYWORD}
    call = torch.compile(lambda: function(**arguments), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"in compiled code call {named}\)"):
        call()


@pytest.mark.torch
@quiet_dynamo
def test_marks_for_dynamo_go_with_the_operator(torch):
    from torch._dynamo import trace_rules

    op = sparse_mla._C.Operator(lambda q_nope, W_UK, *, out=None, stream=None: None, "k_up_proj")
    op.__name__ = "k_up_proj"
    assert hash(op) == hash(op)
    address = id(op)
    assert address in trace_rules._disallowed_callable_ids
    del op
    gc.collect()
    assert address not in trace_rules._disallowed_callable_ids


@pytest.mark.torch
@quiet_dynamo
def test_a_dynamo_without_marks_is_left_alone(torch, monkeypatch):
    from torch._dynamo import trace_rules

    monkeypatch.delattr(trace_rules, "_disallowed_callable_ids")
    op = sparse_mla._C.Operator(lambda q_nope, W_UK, *, out=None, stream=None: None, "k_up_proj")
    op.__name__ = "k_up_proj"
    assert {op: 1}[op] == 1


@pytest.mark.torch
@pytest.mark.usefixtures("torch")
def test_no_mark_before_dynamo():
    """Hashing an operator imports nothing where PyTorch has not loaded Dynamo."""
    code = (
        "import sys, torch, sparse_mla; {sparse_mla.sparse_attention: 1}; "
        "print([x for x in sys.modules if 'integrations' in x or x == 'torch._dynamo'])"
    )
    assert printed_by_python("-c", code) == "[]\n"


# --- what belongs to one framework ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "indices", "out"])
def test_masked_arrays_are_refused(name):
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.set(name, np.ma.masked_array(call.get(name)))
    with pytest.raises(TypeError, match=rf"`{name}` must be an array without a mask, .*filled"):
        call.run(sparse_mla)
    call.set(name, call.get(name).data)
    call.run(sparse_mla)


def test_masked_lengths_on_the_host_are_refused():
    with pytest.raises(TypeError, match="`seq_lens` must be an array without a mask"):
        sparse_mla.split_prefill_chunks(np.ma.masked_array([10, 15], mask=[0, 1]), 25)


CONTIGUOUS = {"numpy": ": pass np.ascontiguousarray of it", "torch": ": pass its .contiguous()"}


@each_framework
def test_hints_fit_the_framework(framework):
    w_uk = framework.put(np.zeros((512, 2, 4), np.float32))
    with pytest.raises(TypeError, match=r"`W_UK` must be bfloat16, got float32") as info:
        sparse_mla.k_up_proj(framework.put(np.zeros((1, 2, 4), ref.BF16)), w_uk)
    cast = " (bfloat16 in NumPy is ml_dtypes.bfloat16)" if framework.name == "numpy" else ""
    assert str(info.value).endswith(f": nothing is cast here{cast}")


@each_framework
def test_a_hint_to_copy_is_for_inputs_only(framework):
    x = framework.put(np.zeros((3, 2, 8), np.float32))
    strided, lse = x[:, :, ::2], framework.put(np.zeros((3, 2), np.float32))
    if framework.name != "jax":  # its slices are contiguous
        with pytest.raises(ValueError, match=r"`out_a` must have a contiguous") as info:
            sparse_mla.merge_attn_states(strided, lse, strided, lse)
        assert str(info.value).endswith(f"got stride 2{CONTIGUOUS.get(framework.name, '')}")
    if framework.writable:
        whole = x[:, :, :4]
        with pytest.raises(ValueError, match=r"`out` must have a contiguous") as info:
            sparse_mla.merge_attn_states(whole, lse, whole, lse, out=strided)
        assert str(info.value).endswith("got stride 2")


def dtype_objects(name):
    """The objects that stand for a dtype in the frameworks at hand."""
    yield name
    yield np.dtype(ref.BF16 if name == "bfloat16" else name)
    yield ref.BF16.type if name == "bfloat16" else np.float32
    for module in ("torch", "jax.numpy"):
        if module.partition(".")[0] in sys.modules:
            yield getattr(sys.modules[module], name)


@each_framework
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_dtypes_are_names_or_objects(framework, name):
    cache = framework.put(np.zeros((2, 64, 656), np.uint8))
    for dtype in dtype_objects(name):
        values = sparse_mla.dequantize_kv_cache(cache, dtype=dtype)
        assert str(values.dtype).removeprefix("torch.") == name, f"dtype={dtype!r}"


@pytest.mark.parametrize("dtype", [None, float, np.float64, "float64", "torch.float32", 32, object])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r'`dtype` must be "float32" or "bfloat16", got '):
        sparse_mla.dequantize_kv_cache(np.zeros((2, 64, 656), np.uint8), dtype=dtype)


@pytest.mark.torch
def test_torch_sparse_and_conj_are_refused(torch):
    call = operators.GOOD_CALLS["merge_attn_states"]()
    call.args["lse_a"] = torch.zeros(3, 4).to_sparse()
    with pytest.raises((BufferError, TypeError), match=r"merge_attn_states: `lse_a`"):
        call.run(sparse_mla)


@pytest.mark.torch
@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x[:1, :1], lambda x: x[:, :0], lambda x: x[1]]
)
def test_torch_imaginary_parts_of_a_conjugate_are_refused(torch, view):
    """Memory holds the values of such a view with the opposite sign."""
    call = operators.GOOD_CALLS["merge_attn_states"]()
    call.args["lse_a"] = view(torch.zeros(3, 4, dtype=torch.complex64).conj().imag)
    assert call.args["lse_a"].is_neg()
    with pytest.raises(BufferError, match=r"merge_attn_states: `lse_a` .* the negative bit"):
        call.run(sparse_mla)


@pytest.mark.torch
@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_the_negative_bit_is_refused_in_every_array(torch, op):
    """Whatever its dtype and strides: an input, an output, a part of a pair."""
    framework = find_framework("torch")
    for name in operators.GOOD_CALLS[op]().arrays():
        call = operators.GOOD_CALLS[op]()
        for other in call.arrays():
            call.set(other, framework.put(call.get(other)))
        plain = call.get(name)
        if plain.dtype == torch.bool or "float8" in str(plain.dtype):
            continue  # test_the_negative_bit_of_every_dtype has them
        call.set(name, torch._neg_view(plain))
        before = framework.get(plain).copy()
        with pytest.raises(BufferError) as info:
            call.run(sparse_mla)
        rule = "must hold its values as they are, got a tensor with the negative bit"
        assert f"{op}: `" in str(info.value)
        assert f"{rule}: pass its .resolve_neg()" in str(info.value)
        assert_same_bits(framework.get(plain), before, name)


@pytest.mark.torch
@pytest.mark.parametrize("rank", [0, 1, 2, 5, 6])
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int32", "int64", "bfloat16", "float16", "float32",
              "float64", "float8_e4m3fn"],
)  # fmt: skip
def test_the_negative_bit_of_every_dtype(torch, dtype, rank):
    """Of every rank, of a parameter, of a subclass, of a tensor made in inference mode, of one
    without elements, of a part and of a detached tensor. The same without the bit passes: its shape
    is refused then."""
    call = operators.GOOD_CALLS["merge_attn_states"]()
    subclass = type("Subclass", (torch.Tensor,), {})
    with torch.inference_mode():
        inferred = torch.zeros((2,) * rank).to(getattr(torch, dtype))
    plain = torch.zeros((2,) * rank).to(getattr(torch, dtype))
    kinds = [plain, inferred, plain.as_subclass(subclass), plain[..., :0] if rank else plain]
    kinds += [plain[..., ::2], plain.movedim(0, -1)] if rank else []
    kinds += [torch.nn.Parameter(plain, requires_grad=False)]
    for tensor in kinds:
        negative = torch._neg_view(tensor)
        for given in (negative, negative.detach(), negative[...]):
            assert given.is_neg()
            call.args["lse_a"] = given
            with pytest.raises(BufferError, match=r"`lse_a` .* the negative bit"):
                call.run(sparse_mla)
        for given in (tensor, torch._neg_view(negative)):
            assert not given.is_neg()
            call.args["lse_a"] = given
            with pytest.raises((TypeError, ValueError), match="merge_attn_states: `lse_a` must"):
                call.run(sparse_mla)


# Memory that the next objects of up to 500 bytes will have holds all kinds of bytes.
FILL_FREE_MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
held = [(libc.malloc(size), size) for size in range(16, 512, 16) for _ in range(7)]
for number, (memory, size) in enumerate(held):
    ctypes.memset(memory, number * 101 % 256, size)
for memory, _ in held:
    libc.free(memory)
"""
COUNT_QUESTIONS = """
asked, ask = [], torch.Tensor.is_neg
sparse_mla.dynamic_per_tensor_quant(torch.ones(2))
torch.Tensor.is_neg = lambda x: asked.append(x.ndim) or ask(x)
for rank in range(8):
    sparse_mla.dynamic_per_tensor_quant(torch.ones((2,) * rank))
print(asked)
"""


@pytest.mark.torch
@pytest.mark.parametrize("fill", ["", FILL_FREE_MEMORY], ids=["as-it-is", "filled"])
def test_the_negative_bit_is_seen_without_asking(torch, fill):
    """Of tensors, only those are asked whose sizes are outside of their object, and the process's
    first. A process of its own, because the types of earlier tests fill the table of types. What
    free memory holds stays in the padding of PyTorch's objects."""
    script = f"import torch, sparse_mla\n{fill}{COUNT_QUESTIONS}"
    assert printed_by_python("-c", script) == "[6, 7]\n"


# What a PyTorch could be like whose negative views differ from their tensors in other ways.
OTHER_VIEWS = {
    "no bit": "torch._neg_view = lambda x: x",
    "two bits": "torch._neg_view = lambda x: shifted(x, 3)",
    "a bit in two words": "torch._neg_view = lambda x: neg_view(shifted(x, 1))",
    "a bit that plain ones have": "torch.zeros = lambda *a, **k: shifted(zeros(*a, **k), 1)\n"
    "torch._neg_view = lambda x: neg_view(zeros(x.shape, dtype=x.dtype))",
}
SHIFTED = """
neg_view, zeros = torch._neg_view, torch.zeros
def shifted(x, offset):
    return zeros(x.numel() + offset, dtype=x.dtype)[offset:].view(x.shape)
"""


@pytest.mark.torch
@pytest.mark.parametrize("views", OTHER_VIEWS)
def test_the_negative_bit_is_asked_for_where_it_cannot_be_told(torch, views):
    script = f"import torch, sparse_mla\n{SHIFTED}{OTHER_VIEWS[views]}\n{COUNT_QUESTIONS}"
    assert printed_by_python("-c", script) == f"{[*range(8)]}\n"


@pytest.mark.torch
def test_the_negative_bit_without_the_exchange_api(torch):
    """A tensor that comes through __dlpack__, as those of older versions do."""
    old = type("Old", (torch.Tensor,), {"__dlpack_c_exchange_api__": None, "__module__": "torch"})
    call = operators.GOOD_CALLS["merge_attn_states"]()
    plain = torch.zeros(3, 4).as_subclass(old)
    call.args["lse_a"] = plain
    call.run(sparse_mla)
    call.args["lse_a"] = torch._neg_view(plain)
    with pytest.raises(BufferError, match=r"`lse_a` .* the negative bit"):
        call.run(sparse_mla)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch says that some kinds are new or old
@pytest.mark.parametrize("kind", ["zero", "meta", "nested", "quantized", "sparse"])
def test_tensors_without_plain_memory_are_refused(torch, kind):
    plain = torch.zeros(3, 4)
    tensor = {
        "zero": lambda: torch._efficientzerotensor((3, 4)),
        "meta": lambda: plain.to("meta"),
        "nested": lambda: torch.nested.nested_tensor([plain[0], plain[1]]),
        "quantized": lambda: torch.quantize_per_tensor(plain, 0.5, 0, torch.qint8),
        "sparse": lambda: plain.to_sparse_csr(),
    }[kind]()
    call = operators.GOOD_CALLS["merge_attn_states"]()
    call.args["lse_a"] = tensor
    with pytest.raises((BufferError, TypeError, ValueError), match="merge_attn_states: `lse_a`"):
        call.run(sparse_mla)


@pytest.mark.torch
@pytest.mark.parametrize("negative", range(4))
def test_the_negative_bit_is_refused_by_builders(torch, negative):
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64}
    builder = sparse_mla.v4.MetadataBuilder(
        sparse_mla.v4.Config(8, compress_ratios=(), state_block_sizes={}, **limits)
    )
    arrays = [
        torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5], dtype=torch.int32),
        torch.tensor([3, 4]), torch.zeros((1, 1), dtype=torch.int32),
    ]  # fmt: skip
    builder.build(sparse_mla.CommonAttentionMetadata(*arrays))
    arrays[negative] = torch._neg_view(arrays[negative])
    with pytest.raises((BufferError, RuntimeError), match="negative bit"):  # ours, or PyTorch's
        builder.build(sparse_mla.CommonAttentionMetadata(*arrays))


@pytest.mark.torch
@pytest.mark.parametrize("negative", range(3))
def test_the_negative_bit_is_refused_by_the_drop_in(torch, negative):
    arrays = [
        torch.zeros((1, 8, 576), dtype=torch.bfloat16),
        torch.zeros((64, 1, 576), dtype=torch.bfloat16),
        torch.zeros((1, 1, 64), dtype=torch.int32),
    ]
    sparse_mla.flash_mla.flash_mla_sparse_fwd(*arrays, 1.0)
    arrays[negative] = torch._neg_view(arrays[negative])
    with pytest.raises(BufferError, match="the negative bit"):
        sparse_mla.flash_mla.flash_mla_sparse_fwd(*arrays, 1.0)


@pytest.mark.parametrize("name", ["out", "lse", "max_logits"])
def test_read_only_numpy_output(name):
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.kwargs[name].flags.writeable = False
    with pytest.raises(BufferError, match=f"sparse_attention: `{name}` .*(read-only|writ)"):
        call.run(sparse_mla)


def test_read_only_numpy_cache():
    call = operators.GOOD_CALLS["concat_and_cache_mla"]()
    call.args["kv_cache"].flags.writeable = False
    with pytest.raises(BufferError, match=r"concat_and_cache_mla: `kv_cache`"):
        call.run(sparse_mla)
    assert not call.args["kv_cache"].any()


def test_read_only_numpy_inputs_are_fine():
    call = operators.GOOD_CALLS["sparse_attention"]()
    want = [np.array(x) for x in call.run(sparse_mla)]
    for name, x in call.arrays().items():
        if name not in ("out", "lse", "max_logits"):
            x.flags.writeable = False
    for got, before in zip(call.run(sparse_mla), want, strict=True):
        assert_same_bits(got, before)


@pytest.mark.parametrize("name", ["indices", "topk_length", "attn_sink", "lse"])
def test_foreign_byte_order(name):
    """A big-endian array has the wrong dtype; its bytes are not read as if they were native."""
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.set(name, call.get(name).astype(call.get(name).dtype.newbyteorder(">")))
    with pytest.raises((TypeError, BufferError), match=f"sparse_attention: `{name}` "):
        call.run(sparse_mla)


def test_numpy_subclasses_and_masked_memory():
    """Objects of a subclass of ndarray are arrays; object arrays are not."""
    call = operators.GOOD_CALLS["sparse_attention"]()
    want = [np.array(x) for x in call.run(sparse_mla)]

    class Mine(np.ndarray):
        pass

    call.args["q"] = call.args["q"].view(Mine)
    for got, before in zip(call.run(sparse_mla), want, strict=True):
        assert_same_bits(got, before)
    call.args["indices"] = call.args["indices"].astype(object)
    with pytest.raises(TypeError, match=r"sparse_attention: `indices` must .*, got"):
        call.run(sparse_mla)


def test_uint16_is_never_silently_bf16():
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.args["q"] = call.args["q"].view(np.uint16)
    with pytest.raises(TypeError, match=r"sparse_attention: `q` must .*, got .*uint16"):
        call.run(sparse_mla)


# --- memory --------------------------------------------------------------------------------------


@each_framework
def test_a_large_cache_is_not_copied(framework):
    """Two keys of a 256 MiB cache are selected: the call's own memory stays far below its size."""
    kv = framework.put(np.zeros((6400, 64, 656), np.uint8))
    call = cases.AttentionCase(1, 4, 2).make()
    q, indices = framework.put(call.q), framework.put(np.array([[5, 400_000]], np.int32))
    sparse_mla.sparse_attention(q, kv[:1], indices, softmax_scale=0.1)
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this kernel keeps no peak of resident memory that can start again")
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # VmHWM starts again from the present size
    before = resident_peak()
    sparse_mla.sparse_attention(q, kv, indices, softmax_scale=0.1)
    assert resident_peak() - before < 32 << 20


def resident_peak() -> int:
    with open("/proc/self/status") as status:
        line = next(x for x in status if x.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_inputs_are_not_kept():
    """After the call nothing refers to the arguments; results have their own memory."""
    call = operators.GOOD_CALLS["sparse_attention"]()
    for name in ("out", "lse", "max_logits"):
        del call.kwargs[name]
    out, _, _ = call.run(sparse_mla)
    want = out.copy()
    assert out.base is None or out.base is not call.args["q"]
    call.args["q"][...] = 0
    del call
    gc.collect()
    assert_same_bits(out, want)


def test_outputs_that_overlap_are_refused():
    """out over q, lse over max_logits: one clear error, nothing written."""
    call = operators.GOOD_CALLS["sparse_attention"]()
    buffer = Guarded((3, 4, 576), ref.BF16)
    buffer.array[...] = call.args["q"]
    call.args["q"], call.kwargs["out"] = buffer.array, buffer.array[..., :512]
    before = buffer.storage.copy()
    with pytest.raises(ValueError, match=r"sparse_attention: `out` must .*, got"):
        call.run(sparse_mla)
    assert_same_bits(buffer.storage, before)
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.kwargs["max_logits"] = call.kwargs["lse"]
    with pytest.raises(ValueError, match=r"sparse_attention: `lse` must .*`max_logits`"):
        call.run(sparse_mla)
