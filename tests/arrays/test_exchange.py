"""Arrays of every framework in and out, without a copy (csrc/python/arrays/tensor.c)."""

import gc
import importlib
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


@pytest.mark.parametrize("name", ["out", "lse", "max_logits"])
def test_read_only_numpy_output(name):
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.kwargs[name].flags.writeable = False
    with pytest.raises(BufferError, match=f"sparse_attention: `{name}` .*(read-only|writ)"):
        call.run(sparse_mla)


def test_read_only_numpy_cache():
    call = operators.GOOD_CALLS["concat_and_cache_mla"]()
    cache, before = call.args["kv_cache"], call.args["kv_cache"].copy()
    cache.flags.writeable = False
    with pytest.raises(BufferError, match=r"concat_and_cache_mla: `kv_cache`"):
        call.run(sparse_mla)
    assert_same_bits(cache, before)


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
