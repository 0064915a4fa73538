"""Each allocation of Python's fails in turn: calls raise MemoryError, leak nothing and do no other
harm.

tests/c/test_memory.c does the same for the allocations of the C library.
"""

import _imp
import functools
import importlib.machinery
import importlib.util
import sys
from types import SimpleNamespace

import cases
import device
import engine
import numpy as np
import operators
import paged_steps
import pytest
import reference as ref
import v4_attend_cases as attend
from fake_gpu import Driver, load, on_gpu
from helpers import assert_keeps_nothing, assert_same_bits, require

import sparse_mla

pytestmark = pytest.mark.frameworks

api = require("_testcapi")

# The allocation that fails may be one of Python's own clean-up, which then gives this warning.
IN_CLEAN_UP = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
ENOUGH = 12  # after so many good calls in a row no allocation is left to fail


def fail_each_allocation(call, *expected) -> int:
    """Makes the call's allocation n fail, for n = 0, 1, 2 and so on, until all allocations have
    failed. -> the number of calls that raised MemoryError. The call itself may raise `expected`."""
    num_failed, num_good = 0, 0
    outcome = None
    n = 0
    tracer = sys.gettrace()  # coverage's would crash without memory
    while num_good < ENOUGH:
        assert n < 5000, "it never ends"
        outcome = None
        sys.settrace(None)
        api.set_nomemory(n, n + 1)
        try:
            call()
        except MemoryError:
            api.remove_mem_hooks()
            outcome = MemoryError
        except expected:
            api.remove_mem_hooks()
        else:
            api.remove_mem_hooks()
        finally:
            api.remove_mem_hooks()
            sys.settrace(tracer)
        num_failed += outcome is MemoryError
        num_good = 0 if outcome is MemoryError else num_good + 1
        n += 1
    return num_failed


def counts_of(objects) -> list[int]:
    return [sys.getrefcount(x) for x in objects]


def bound(call, package=sparse_mla):
    """The call as a function without arguments, so that Python allocates nothing to pass them."""
    return functools.partial(getattr(package, call.op), *call.args.values(), **call.kwargs)


# --- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", operators.GOOD_CALLS)
def test_operators(op):
    call = operators.GOOD_CALLS[op]()
    for name in ("out", "lse", "max_logits", "lens"):
        if op not in operators.WRITTEN:
            call.kwargs.pop(name, None)
    arrays = list(call.arrays().values())
    run = bound(call)
    run()
    before = counts_of(arrays)
    num_failed = fail_each_allocation(run)
    makes_nothing = ("concat_and_cache_mla", "dequantize_and_gather_k_cache", "save_partial_states")
    makes_nothing += ("transfer_kv_cache",)
    assert num_failed > 0 or op in makes_nothing
    assert counts_of(arrays) == before


def test_a_query_in_two_parts():
    """The two parts are in a list, which the call copies to a tuple."""
    call = operators.GOOD_CALLS["sparse_attention"]()
    for name in ("out", "lse", "max_logits"):
        call.kwargs.pop(name, None)
    q = call.args["q"]
    call.args["q"] = parts = [q[..., :512], q[..., 512:]]
    run = bound(call)
    run()
    before = counts_of([*parts, parts])
    assert fail_each_allocation(run) > 0
    assert counts_of([*parts, parts]) == before


def foreign(x) -> SimpleNamespace:
    """An array of an unknown framework. NumPy's exports are in C; those of dlpack_producer.py use
    ctypes, which would crash without memory."""
    return SimpleNamespace(__dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__)


STATES = [np.ones(shape, np.float32) for shape in [(2, 3, 4), (2, 3)] * 2]


def test_arrays_by_dlpack():
    arrays = [foreign(x) for x in STATES]
    run = functools.partial(sparse_mla.merge_attn_states, *arrays)
    run()
    before = counts_of([*arrays, *STATES])
    assert fail_each_allocation(run, BufferError) > 0
    assert counts_of([*arrays, *STATES]) == before


def refusals():
    x = np.zeros((2, 3), np.float32)
    quant, merge = sparse_mla.dynamic_per_tensor_quant, sparse_mla.merge_attn_states
    workspace_size, split = sparse_mla.attention_workspace_size, sparse_mla.split_prefill_chunks
    return {
        "no array": (functools.partial(quant, "x"), TypeError),
        "a list": (functools.partial(quant, [1.0]), TypeError),
        "a dtype": (functools.partial(quant, x.astype(np.int32)), TypeError),
        "no option": (functools.partial(quant, x, big=1), TypeError),
        "missing": (functools.partial(merge, x), TypeError),
        "a stream": (functools.partial(quant, x, stream="main"), TypeError),
        "a large stream": (functools.partial(quant, x, stream=1 << 70), ValueError),
        "a device": (functools.partial(workspace_size, 1, 1, 1, device="gpu"), ValueError),
        "no device": (functools.partial(workspace_size, 1, 1, 1, device=object()), TypeError),
        "no requests": (
            functools.partial(sparse_mla.split_decodes_and_prefills, [], 1),
            ValueError,
        ),
        "falling starts": (
            functools.partial(sparse_mla.split_decodes_and_prefills, [0, 5, 3], 5),
            ValueError,
        ),
        "a negative number": (functools.partial(sparse_mla.reorder_batch, [1, -1]), ValueError),
        "a long request": (functools.partial(split, [3, 9], 4), ValueError),
        "no int": (functools.partial(split, [1], "x"), TypeError),
        "no ints": (functools.partial(split, ["x"], 4), TypeError),
        "a long int": (functools.partial(split, [1 << 40], 4), ValueError),
        "read-only": (
            functools.partial(quant, x, out=np.frombuffer(bytes(6), np.uint8).reshape(2, 3)),
            BufferError,
        ),
        "a format": (functools.partial(quant, memoryview(bytes(8)).cast("c")), TypeError),
        "no buffer": (functools.partial(quant, Refusing()), BufferError),
    }


class Refusing:
    """An array whose __dlpack__ raises an error."""

    def __dlpack__(self, **_):
        raise ValueError("no")

    def __dlpack_device__(self):
        return 1, 0


@pytest.mark.parametrize("name", refusals())
def test_refusals(name):
    run, error = refusals()[name]
    with pytest.raises(error):
        run()
    assert fail_each_allocation(run, error) > 0
    with pytest.raises(error):
        run()


@pytest.mark.parametrize("name", refusals())
def test_refusals_keep_nothing(name):
    assert_keeps_nothing(*refusals()[name])


# --- what is not an operator ---------------------------------------------------------------------


def make_tensor():
    return sparse_mla.merge_attn_states(*map(foreign, STATES))[0]


def tensor_uses():
    return {
        "shape": lambda x: functools.partial(getattr, x, "shape"),
        "strides": lambda x: functools.partial(getattr, x, "strides"),
        "device": lambda x: functools.partial(getattr, x, "device"),
        "slice": lambda x: functools.partial(x.__getitem__, slice(0, 1)),
        "item": lambda x: functools.partial(x.__getitem__, 1),
        "legacy": lambda x: x.__dlpack__,
        "versioned": lambda x: functools.partial(x.__dlpack__, max_version=(1, 0)),
        "copy": lambda x: functools.partial(x.__dlpack__, max_version=(1, 0), copy=True),
        "device pair": lambda x: x.__dlpack_device__,
        "array": lambda x: x.__array__,
        "converted": lambda x: functools.partial(x.__array__, np.dtype(np.float64), copy=True),
        "buffer": lambda x: functools.partial(memoryview, x),
    }


@pytest.mark.parametrize("name", tensor_uses())
def test_tensors(name):
    tensor = make_tensor()
    run = tensor_uses()[name](tensor)
    run()
    before = counts_of([tensor])
    fail_each_allocation(run)
    assert counts_of([tensor]) == before
    run()
    assert_keeps_nothing(run)


FUNCTIONS = {
    "kernels": sparse_mla.kernels,
    "build_info": sparse_mla.build_info,
    "chunks": functools.partial(sparse_mla.split_prefill_chunks, [999, 998, 997], 1000),
    "split": functools.partial(
        sparse_mla._C.split_decodes_and_prefills, [0, 1, 999], 999, 1, False
    ),
    "operator": functools.partial(
        sparse_mla._C.Operator, sparse_mla.ops.k_up_proj.__wrapped__, "k_up_proj"
    ),
    "a list": functools.partial(
        sparse_mla._C.split_prefill_chunks, [int(text) for text in ("900", "901")], 5000
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    run = FUNCTIONS[name]
    items = [x for x in getattr(run, "args", ()) if isinstance(x, list)]
    run()
    before = counts_of([y for x in items for y in x])
    fail_each_allocation(run)
    run()
    assert counts_of([y for x in items for y in x]) == before
    assert_keeps_nothing(run)


# --- builds and forwards -------------------------------------------------------------------------


@IN_CLEAN_UP
@pytest.mark.parametrize("path", ["separate", "mixed", "bf16"])
def test_builds_and_forwards(path):
    step = engine.make_step(cases.make_batch([1, 2, 30], [40, 50, 60]), 2)
    kv = step.bf16_cache(sparse_mla) if path == "bf16" else step.fp8_cache
    config = engine.config(sparse_mla, num_heads=2, fp8=path != "bf16", path=path)
    common = step.batch.common(sparse_mla)
    builder, layer = sparse_mla.MetadataBuilder(config), sparse_mla.SparseMLA(config)
    arrays = [step.q, kv, step.topk_indices, common.block_table]
    metadata = builder.build(common)
    want = layer.forward(step.q, kv, step.topk_indices, metadata)
    metadata = None
    before = counts_of(arrays[:3])
    assert fail_each_allocation(functools.partial(builder.build, common)) > 0
    metadata = builder.build(common)
    run = functools.partial(layer.forward, step.q, kv, step.topk_indices, metadata)
    assert fail_each_allocation(run) > 0
    got = run()
    run = None
    assert counts_of(arrays[:3]) == before
    for x, y in zip(got, want, strict=True):
        assert ref.bits16(x).tobytes() == ref.bits16(y).tobytes() if x.dtype == ref.BF16 else True
        assert x.tobytes() == y.tobytes()
    assert fail_each_allocation(functools.partial(sparse_mla.MetadataBuilder, config)) > 0


@IN_CLEAN_UP
@pytest.mark.parametrize("path", ["mixed", "separate"])
def test_dense_steps(path):
    rng, dense = np.random.default_rng(7), sparse_mla.dense
    batch = cases.make_batch([1, 2, 9], [20, 25, 30], block_size=16)
    config = dense.Config(
        2,
        softmax_scale=0.1,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        path=path,
        prefill_workspace_tokens=64,
    )
    weight = cases.random_bf16(rng, 512, 2 * 256, std=0.04)
    layer = dense.DenseMLA(config, kv_b_proj=weight, rope_table=sparse_mla.rope_table(64))
    builder, common = dense.MetadataBuilder(config), batch.common(sparse_mla)
    shapes = (12, 2, 192), (12, 512), (12, 64)
    arrays = [cases.random_bf16(rng, *shape) for shape in shapes]
    arrays.append(cases.random_bf16(rng, batch.num_pages, 16, 576))

    def forward(metadata):
        return layer.forward(*arrays, metadata)

    def build():
        try:
            return builder.build(common)
        except SystemError as error:  # from NumPy's maximum, which finds no memory
            assert str(error) == "error return without exception set"
            raise MemoryError from None

    want = forward(build())
    before = counts_of(arrays)
    assert fail_each_allocation(build) > 0
    assert fail_each_allocation(functools.partial(forward, build())) > 0
    assert counts_of(arrays) == before
    assert_same_bits(ref.bits16(forward(build())), ref.bits16(want))
    assert fail_each_allocation(functools.partial(dense.MetadataBuilder, config)) > 0


@IN_CLEAN_UP
@pytest.mark.parametrize("topk", [1, 2])
def test_paged_steps(topk):
    batch = paged_steps.make_verification(topk)
    config = sparse_mla.paged.Config(**batch.config)
    arrays = [batch.seq_lens, batch.pool, batch.req_to_token]
    make = functools.partial(sparse_mla.paged.MetadataBuilder, config, batch.req_to_token)
    builder = make()
    build = functools.partial(
        builder.build, "target_verify", *arrays[:2], custom_mask=batch.custom_mask
    )
    build()
    before = counts_of(arrays)
    assert fail_each_allocation(build) > 0
    assert counts_of(arrays) == before
    paged_steps.check(batch, build())
    assert fail_each_allocation(make) > 0


@IN_CLEAN_UP
@pytest.mark.skipif(device.ON_CUDA, reason="the inputs are made for the GPU then")
@pytest.mark.parametrize("path", ["direct", "separate"])
def test_v4_steps(path):
    case = attend.make_case(4, path, (1, 2, 9), (4, 5, 6))
    builder = sparse_mla.v4.MetadataBuilder(case.config)
    arrays = [case.q, case.swa.cache, case.topk, case.batch.block_table]
    want = case.layer.attend(case.q, case.caches, case.build(builder), case.topk)
    before = counts_of(arrays[:3])
    assert fail_each_allocation(functools.partial(case.build, builder)) > 0
    metadata, caches = case.build(builder), case.caches
    run = functools.partial(case.layer.attend, case.q, caches, metadata, case.topk)
    assert fail_each_allocation(run) > 0
    got = run()
    assert fail_each_allocation(functools.partial(case.layer.attend, case.q, caches, None)) > 0
    run = caches = None
    assert counts_of(arrays[:3]) == before
    for x, y in zip(got, want, strict=True):
        assert x.tobytes() == y.tobytes()
    make = functools.partial(sparse_mla.v4.MetadataBuilder, case.config)
    assert fail_each_allocation(make) > 0


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_busy", [False, True])
def test_calls_on_a_gpu(is_busy):
    package, driver = load(), Driver()
    driver.reset()
    tensors = package.merge_attn_states(*map(on_gpu, STATES))
    driver.set_busy(is_busy)
    foreigners = [foreign(x) for x in tensors] * 2
    for arrays in (tensors * 2, foreigners):
        run = functools.partial(package.merge_attn_states, *arrays, stream=driver.new_stream())
        run()
        driver.finish()
        before = counts_of(arrays)
        driver.set_busy(is_busy)
        assert fail_each_allocation(run, BufferError) > 0
        driver.finish()
        run()
        run()
        assert counts_of(arrays) == before
    uses = {
        "interface": functools.partial(getattr, tensors[0], "__cuda_array_interface__"),
        "dlpack": tensors[0].__dlpack__,
        "repr": functools.partial(repr, tensors[0]),
    }
    for use in uses.values():
        use()
        assert fail_each_allocation(use) > 0
        use()
    assert driver.num_failures == 0


@IN_CLEAN_UP
@pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="Python crashes: 3.13's garbage collector meets a dict that got no memory",
)
def test_the_import():
    """Each call makes a new module. An import without memory fails, and leaves no module that lacks
    a part."""
    spec = importlib.util.spec_from_file_location(
        "sparse_mla._C",
        sparse_mla._C.__file__,
        loader=importlib.machinery.ExtensionFileLoader("sparse_mla._C", sparse_mla._C.__file__),
    )

    def make():
        module = _imp.create_dynamic(spec)
        _imp.exec_dynamic(module)
        return module

    whole = dir(make())
    made = []

    def check():
        try:
            made.append(make())
        except SystemError as error:  # from CPython 3.11, where a type's name finds no memory
            assert "failed without setting an exception" in str(error)
            raise MemoryError from None

    assert fail_each_allocation(check, ImportError) > 0
    assert all(dir(module) == whole for module in made)
    for module in made:
        tensor = module.Operator(sparse_mla.ops.merge_attn_states.__wrapped__, "merge_attn_states")
        assert tensor(*map(foreign, STATES))[0].shape == (2, 3, 4)
