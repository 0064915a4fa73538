"""The DLPack protocol, corner by corner, with a hand-made producer (csrc/python/arrays/)."""

import binascii
import ctypes
import gc
import sys
import tracemalloc

import cases
import numpy as np
import operators
import pytest
import reference as ref
from dlpack_producer import CUDA, READ_ONLY, Consumed, Producer, assert_returned
from helpers import ALL_FRAMEWORKS, assert_same_bits

import sparse_mla

pytestmark = pytest.mark.frameworks


def has_gpu() -> bool:
    """Whether there is a driver that finds a GPU."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    started = driver.cuInit(0) == 0
    return started and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def expected() -> list[np.ndarray]:
    return [np.array(x) for x in operators.GOOD_CALLS["sparse_attention"]().run(sparse_mla)]


def with_producer(name, op="sparse_attention", **options):
    """A good call whose argument `name` comes from a hand-made producer."""
    call = operators.GOOD_CALLS[op]()
    producer = Producer(call.get(name), **options)
    call.set(name, producer)
    return call, producer


def as_numpy(x) -> np.ndarray:
    """A result of any type. A Tensor becomes an array of its dtype, ml_dtypes included."""
    return np.asarray(x)


def assert_same_bytes(got, want) -> None:
    for x, y in zip(got, want, strict=True):
        x = x.array if isinstance(x, Producer) else x
        assert as_numpy(x).tobytes() == y.tobytes()


# --- capsules in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "kv", "indices", "attn_sink", "extra_kv", "topk_length"])
@pytest.mark.parametrize("versioned", [True, False])
def test_both_kinds_of_capsule(name, versioned):
    want = expected()
    call, producer = with_producer(name, versioned=versioned)
    assert_same_bytes(call.run(sparse_mla), want)
    assert_returned(producer)


def test_a_producer_that_does_not_know_max_version():
    want = expected()
    call, producer = with_producer("indices", old_signature=True)
    assert_same_bytes(call.run(sparse_mla), want)
    assert_returned(producer)
    assert "max_version" in producer.requests[0], "the new protocol is tried first"
    assert "max_version" not in producer.requests[-1]


def test_max_version_is_dlpack_1():
    call, producer = with_producer("indices")
    call.run(sparse_mla)
    assert producer.requests[0]["max_version"][0] == 1
    assert producer.requests[0].get("stream") is None, "the CPU has no streams"


@pytest.mark.parametrize("offset", [4, 64, 4096])
@pytest.mark.parametrize("name", ["q", "indices", "lse"])
def test_byte_offset(name, offset):
    want = expected()
    call, producer = with_producer(name, byte_offset=offset)
    assert_same_bytes(call.run(sparse_mla), want)
    assert_returned(producer)


@pytest.mark.parametrize("name", ["q", "kv", "indices", "attn_sink", "out"])
@pytest.mark.parametrize("versioned", [True, False])
def test_null_strides_mean_compact(name, versioned):
    want = expected()
    call, producer = with_producer(name, null_strides=True, versioned=versioned)
    assert_same_bytes(call.run(sparse_mla), want)
    assert_returned(producer)


def test_strides_are_honoured():
    want = expected()
    call = operators.GOOD_CALLS["sparse_attention"]()
    wide = np.zeros((3, 8, 600), ref.BF16)
    wide[:, ::2, 10:586] = call.args["q"]
    producer = call.args["q"] = Producer(wide[:, ::2, 10:586])
    assert_same_bytes(call.run(sparse_mla), want)
    assert_returned(producer)


@pytest.mark.parametrize("odd", [0, -7, 3, 2**40])
def test_strides_of_size_1_dimensions_are_ignored(odd):
    """One token, one head, one index: their strides may hold anything."""
    rng = np.random.default_rng(0)
    q, kv = cases.random_bf16(rng, 1, 1, 576), cases.make_rows(rng, 4, "fp8")[None]
    indices = np.array([[2]], np.int32)
    want = sparse_mla.sparse_attention(q, kv, indices, softmax_scale=0.1)
    producers = [
        Producer(q, strides=[odd, odd, 1]),
        Producer(kv, strides=[odd, 656, 1]),
        Producer(indices, strides=[odd, odd]),
    ]
    out = Producer(np.zeros((1, 1, 512), ref.BF16), strides=[odd, odd, 1])
    got = sparse_mla.sparse_attention(*producers, softmax_scale=0.1, out=out)
    assert got[0] is out
    assert_same_bits(out.array, want[0])
    assert_returned(*producers, out)


@pytest.mark.parametrize("pointer", [None, 1, 2**47 + 3])
@pytest.mark.parametrize("versioned", [True, False])
def test_zero_size_arrays_may_have_any_pointer(pointer, versioned):
    empty = {
        "q": np.zeros((0, 4, 576), ref.BF16),
        "indices": np.zeros((0, 9), np.int32),
        "out": np.zeros((0, 4, 512), ref.BF16),
    }
    kv = cases.make_rows(np.random.default_rng(0), 4, "fp8")[None]
    made = {
        name: Producer(x, versioned=versioned, fields={"data": pointer})
        for name, x in empty.items()
    }
    out, lse = sparse_mla.sparse_attention(
        made["q"], kv, made["indices"], softmax_scale=1.0, out=made["out"]
    )
    assert out is made["out"]
    assert tuple(lse.shape) == (0, 4)
    assert_returned(*made.values())


# --- refusals: the deleter still runs exactly once -----------------------------------------------

REFUSED = {
    # name: (argument, producer options, exception)
    "two lanes": ("indices", {"fields": {"lanes": 2}}, TypeError),
    "unknown type code": ("indices", {"fields": {"code": 99}}, TypeError),
    "4-bit elements": ("indices", {"fields": {"bits": 4}}, TypeError),
    "bool for int32": ("indices", {"fields": {"code": 6, "bits": 8}}, TypeError),
    "float for int32": ("indices", {"fields": {"code": 2}}, TypeError),
    "cuda memory": ("indices", {"device": (CUDA, 0)}, ValueError),
    "an unknown device": ("indices", {"device": (77, 0)}, (ValueError, RuntimeError)),
    "negative rank": ("q", {"fields": {"ndim": -1}}, (ValueError, BufferError)),
    "rank 40": ("attn_sink", {"fields": {"ndim": 40}}, (ValueError, BufferError)),
    "rank 0": ("attn_sink", {"fields": {"ndim": 0}}, ValueError),
    "rank 1 for 2": ("indices", {"fields": {"ndim": 1}}, ValueError),
    "read-only output": ("out", {"flags": READ_ONLY}, BufferError),
    "read-only lse": ("lse", {"flags": READ_ONLY}, BufferError),
    "a future major version": ("q", {"version": (2, 0)}, BufferError),
    "null data": ("q", {"fields": {"data": None}}, (ValueError, BufferError)),
    "unaligned int32": ("indices", {"fields": {"byte_offset": 1}}, ValueError),
    "unaligned cache": ("kv", {"fields": {"byte_offset": 8}}, ValueError),
    "odd bf16 address": ("q", {"fields": {"byte_offset": 1}}, ValueError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_tensors_are_given_back(name):
    argument, options, error = REFUSED[name]
    call = operators.GOOD_CALLS["sparse_attention"]()
    before = {n: x.copy() for n, x in call.arrays().items()}
    producer = Producer(call.get(argument), **options)
    call.set(argument, producer)
    with pytest.raises(error, match=f"sparse_attention: `{argument}` "):
        call.run(sparse_mla)
    producer.assert_balanced()
    call.set(argument, producer.array)
    for n, x in call.arrays().items():
        assert_same_bits(x, before[n], f"{n} was written")
    call.run(sparse_mla)


@pytest.mark.parametrize(
    ("code", "bits", "name"),
    [
        (6, 8, "bool"),
        (7, 8, "float8_e3m4"),
        (10, 8, "float8_e4m3fn"),
        (12, 8, "float8_e5m2"),
        (14, 8, "float8_e8m0fnu"),
        (16, 6, "float6_e3m2fn"),
        (17, 4, "float4_e2m1fn"),
        (12, 16, "DLPack type code 12 of 16 bits"),
        (18, 4, "DLPack type code 18 of 4 bits"),
    ],
)
def test_a_refused_dtype_is_named(code, bits, name):
    call = operators.GOOD_CALLS["sparse_attention"]()
    producer = Producer(call.get("indices"), fields={"code": code, "bits": bits})
    call.set("indices", producer)
    with pytest.raises(TypeError, match=rf"`indices` must be int32, got {name}\b(?!.*code)"):
        call.run(sparse_mla)


@pytest.mark.parametrize(("offset", "text"), [(1, "1 byte off"), (3, "3 bytes off")])
def test_a_misaligned_address_is_told_in_bytes(offset, text):
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.set("indices", Producer(call.get("indices"), fields={"byte_offset": offset}))
    with pytest.raises(ValueError, match=f"aligned to 4 bytes, got an address that is {text}$"):
        call.run(sparse_mla)


@pytest.mark.skipif(has_gpu(), reason="a GPU would run on this pointer")
def test_a_device_that_this_build_lacks():
    """All arrays are on cuda:0, without backend or GPU: RuntimeError, all tensors given back."""
    call = operators.GOOD_CALLS["sparse_attention"]()
    producers = [Producer(x, device=(CUDA, 0)) for x in call.arrays().values()]
    for name, producer in zip(call.arrays(), producers, strict=True):
        call.set(name, producer)
    with pytest.raises(RuntimeError, match=r"sparse_attention: .*cuda"):
        call.run(sparse_mla)
    for producer in producers:
        producer.assert_balanced()


def test_read_only_inputs_are_fine():
    want = expected()
    call, producer = with_producer("q", flags=READ_ONLY)
    assert_same_bytes(call.run(sparse_mla), want)
    assert_returned(producer)


@pytest.mark.parametrize("versioned", [True, False])
def test_a_consumed_capsule_is_refused(versioned):
    call = operators.GOOD_CALLS["sparse_attention"]()
    producer = call.args["q"] = Consumed(call.args["q"], versioned=versioned)
    with pytest.raises(BufferError, match=r"sparse_attention: `q` "):
        call.run(sparse_mla)
    assert_returned(producer)


class Strange:
    """An array whose `__dlpack__` returns `result`, or raises it."""

    def __init__(self, result) -> None:
        self.result = result

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize("result", [None, 3, b"dltensor", np.zeros(3)], ids=lambda x: str(type(x)))
def test_dlpack_that_gives_no_capsule(result):
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.args["q"] = Strange(result)
    with pytest.raises((TypeError, BufferError), match=r"sparse_attention: `q` "):
        call.run(sparse_mla)


@pytest.mark.parametrize("error", [BufferError, RuntimeError, ValueError, MemoryError])
def test_dlpack_that_raises(error):
    """The producer's error passes, or becomes a BufferError about the argument, with its text."""
    call = operators.GOOD_CALLS["sparse_attention"]()
    call.args["q"] = Strange(error("the moon is full"))
    with pytest.raises((BufferError, error), match=r"the moon is full"):
        call.run(sparse_mla)


def test_interrupts_pass_through():
    call = operators.GOOD_CALLS["sparse_attention"]()

    class Interrupted(Strange):
        def __dlpack__(self, **_):
            raise KeyboardInterrupt

    call.args["q"] = Interrupted(None)
    with pytest.raises(KeyboardInterrupt):
        call.run(sparse_mla)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_device_that_raises(error):
    """An interrupt passes through. After another error the device is taken from the capsule."""
    call = operators.GOOD_CALLS["merge_attn_states"]()
    want = call.run(sparse_mla)

    class Nowhere(Producer):
        def __dlpack_device__(self):
            raise error("nowhere")

    call.args["lse_a"] = Nowhere(call.args["lse_a"])
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt, match="nowhere"):
            call.run(sparse_mla)
        assert call.args["lse_a"].consumed == 0
    else:
        assert_same_bytes(call.run(sparse_mla), want)
        assert_returned(call.args["lse_a"])


@pytest.mark.parametrize("bad", ["kv", "indices", "attn_sink", "max_logits"])
def test_every_argument_is_given_back_when_one_is_bad(bad):
    """Arguments come from producers and one has a wrong rank: each deleter runs exactly once."""
    call = operators.GOOD_CALLS["sparse_attention"]()
    producers = {}
    for name, x in call.arrays().items():
        producers[name] = Producer(x[..., None] if name == bad else x)
        call.set(name, producers[name])
    with pytest.raises(ValueError, match=f"sparse_attention: `{bad}` must .*, got"):
        call.run(sparse_mla)
    for producer in producers.values():
        producer.assert_balanced()
    assert producers[bad].consumed >= 1


@pytest.mark.parametrize("op", list(operators.GOOD_CALLS))
def test_every_operator_gives_everything_back(op):
    want = operators.GOOD_CALLS[op]()
    result = want.run(sparse_mla)
    result = result if isinstance(result, tuple) else (result,)
    call = operators.GOOD_CALLS[op]()
    producers = {name: Producer(x) for name, x in call.arrays().items()}
    for name, producer in producers.items():
        call.set(name, producer)
    got = call.run(sparse_mla)
    got = got if isinstance(got, tuple) else (got,)
    assert_same_bytes(got, [np.asarray(x) for x in result])
    del got
    assert_returned(*producers.values())


# --- our Tensor ----------------------------------------------------------------------------------


def our_tensors(T=3, H=4):
    """out (bf16), lse (fp32) as sparse_mla.Tensor, because q's producer has no allocator."""
    call = cases.AttentionCase(T, H, 20, pages=2).make()
    want = call.run(sparse_mla.sparse_attention)
    q = Producer(call.q)
    got = sparse_mla.sparse_attention(q, call.kv, call.indices, **call.options)
    assert_returned(q)
    return got, want


def test_results_for_an_unknown_producer_are_tensors():
    (out, lse), _ = our_tensors()
    assert isinstance(out, sparse_mla.Tensor)
    assert isinstance(lse, sparse_mla.Tensor)
    assert tuple(out.shape) == (3, 4, 512)
    assert tuple(lse.shape) == (3, 4)
    text = repr(out)
    assert "Tensor" in text
    assert "bfloat16" in text
    assert "3, 4, 512" in text
    assert "cpu" in text.lower()


def test_tensor_buffer_protocol():
    (_, lse), want = our_tensors()
    view = memoryview(lse)
    assert (view.format, view.shape, view.itemsize, view.c_contiguous) == ("f", (3, 4), 4, True)
    assert_same_bits(np.asarray(lse), want[1])
    view[0, 0] = 5.0
    assert np.asarray(lse)[0, 0] == 5.0, "one memory"


def test_tensor_of_bf16_in_numpy():
    """Buffers have no bf16. NumPy gets an array of ml_dtypes on the same memory instead."""
    (out, _), want = our_tensors()
    first, second = np.asarray(out), np.asarray(out)
    assert_same_bits(first, want[0])
    assert np.shares_memory(first, second)
    with pytest.raises(BufferError, match="bfloat16"):
        memoryview(out)


def test_tensor_dlpack_by_numpy():
    (_, lse), want = our_tensors()
    assert tuple(lse.__dlpack_device__()) == (1, 0)
    got = np.from_dlpack(lse)
    assert_same_bits(got, want[1])
    address = np.asarray(lse).__array_interface__["data"][0]
    assert got.__array_interface__["data"][0] == address, "zero copy"


def capsule_name(capsule) -> bytes:
    get = ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_char_p, (ctypes.py_object,)
    return get(capsule)


def test_tensor_capsules():
    (_, lse), _ = our_tensors()
    assert capsule_name(lse.__dlpack__()) == b"dltensor"
    assert capsule_name(lse.__dlpack__(max_version=(0, 8))) == b"dltensor"
    assert capsule_name(lse.__dlpack__(max_version=(1, 0))) == b"dltensor_versioned"
    assert capsule_name(lse.__dlpack__(stream=None, max_version=(1, 3))) == b"dltensor_versioned"


def test_tensor_array_copies_when_it_must():
    (out, _), want = our_tensors()
    memory, bf16, fp32 = np.asarray(out), ref.BF16, np.float32
    for options in ({}, {"dtype": bf16}, {"copy": False}, {"dtype": bf16, "copy": False}):
        assert np.shares_memory(np.array(out, **{"copy": None} | options), memory), options
        assert np.shares_memory(out.__array__(**options), memory), options
    for options in ({"dtype": fp32}, {"copy": True}, {"dtype": fp32, "copy": True}):
        copied = out.__array__(**options)
        assert not np.shares_memory(copied, memory), options
        assert_same_bits(copied, want[0].astype(options.get("dtype", bf16)))
    with pytest.raises(ValueError, match="Unable to avoid copy"):
        np.array(out, dtype=fp32, copy=False)
    with pytest.raises(TypeError, match="colour"):
        out.__array__(colour=1)


def test_buffers_of_slices_need_strides():
    (_, lse), want = our_tensors()
    assert b"".join([lse]) == want[1].tobytes()
    assert b"".join([lse[1:]]) == want[1][1:].tobytes()
    with pytest.raises(BufferError, match="not contiguous"):
        binascii.crc32(lse[::2])
    view = memoryview(lse[::2])
    assert (view.shape, view.strides, view.readonly) == ((2, 4), (32, 4), False)
    assert_same_bits(np.asarray(view), want[1][::2])


def test_versioned_exports_can_be_written():
    (_, lse), _ = our_tensors()
    assert np.from_dlpack(Bearer(lse.__dlpack__(max_version=(1, 0)))).flags.writeable


class Undecided:
    def __bool__(self):
        raise ValueError("yes and no")

    def __repr__(self):  # in the test's name, which must be the same in all xdist workers
        return "Undecided()"


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        ({"stream": "main"}, TypeError, "__dlpack__: `stream` must .*, got str"),
        ({"max_version": (1,)}, TypeError, "__dlpack__: `max_version` must .*, got"),
        ({"max_version": ("1", 0)}, TypeError, "__dlpack__: `max_version` must .*, got"),
        ({"dl_device": "moon"}, (TypeError, ValueError), "__dlpack__: `dl_device` must .*, got"),
        ({"dl_device": (2, 0)}, BufferError, "on its own device only"),
        ({"dl_device": (1, 1)}, BufferError, "on its own device only"),
        ({"copy": Undecided()}, ValueError, "yes and no"),
        ({"colour": 1}, TypeError, "colour"),
    ],
    ids=str,
)
def test_exports_that_cannot_be_had(request_, error, text):
    (_, lse), _ = our_tensors()
    before = sys.getrefcount(lse)
    with pytest.raises(error, match=text):
        lse.__dlpack__(**request_)
    assert sys.getrefcount(lse) == before
    assert capsule_name(lse.__dlpack__(dl_device=(1, 0), copy=False)) == b"dltensor"


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_copies_are_compact_and_their_own(version):
    (out, lse), want = our_tensors(T=5)
    before = sys.getrefcount(lse)
    for tensor, wanted in ((lse, want[1]), (lse[1::2], want[1][1::2]), (lse[3:3], want[1][3:3])):
        capsule = tensor.__dlpack__(max_version=version, copy=True)
        copied = np.from_dlpack(Bearer(capsule))
        assert_same_bits(copied, wanted)
        assert copied.flags.c_contiguous
        assert not np.shares_memory(copied, np.asarray(lse))
    del tensor, capsule, copied
    assert sys.getrefcount(lse) == before
    rows = sparse_mla.merge_attn_states(out, lse, out, lse)[0].__dlpack__(copy=True)
    assert capsule_name(rows) == b"dltensor"


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_an_unused_capsule_keeps_and_frees_its_tensor(version):
    (_, lse), _ = our_tensors()
    before = sys.getrefcount(lse)
    capsule = lse.__dlpack__(max_version=version)
    assert sys.getrefcount(lse) == before + 1, "kept"
    del capsule
    assert sys.getrefcount(lse) == before, "freed"


def test_tensors_leave_nothing():
    """Tensors leave neither their memory nor the few hundred bytes of their objects."""
    (out, lse), _ = our_tensors()
    for _ in range(2):  # the first round fills caches
        tracemalloc.start()
        for _ in range(200):
            _ = out[1:], lse.__dlpack__(), np.asarray(lse)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert held < 20_000


class Bearer:
    """An array that gives a capsule which was made before."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_outlives_the_tensor(version):
    """The consumer that takes the capsule over gives the memory back, once."""
    (_, lse), want = our_tensors()
    before = sys.getrefcount(lse)
    view = np.from_dlpack(Bearer(lse.__dlpack__(max_version=version)))
    assert sys.getrefcount(lse) == before + 1
    del view
    assert sys.getrefcount(lse) == before
    bearer = Bearer(lse.__dlpack__(max_version=version))
    del lse
    churn = [np.full((3, 4), -1, np.float32) for _ in range(500)]
    assert_same_bits(np.from_dlpack(bearer), want[1])
    del churn


def test_views_outlive_the_tensor():
    (out, lse), want = our_tensors()
    by_dlpack, by_buffer, bf16 = np.from_dlpack(lse), np.asarray(lse), np.asarray(out)
    del out, lse
    gc.collect()
    churn = [np.full(2048, 255, np.uint8) for _ in range(500)]
    assert_same_bits(by_dlpack, want[1])
    assert_same_bits(by_buffer, want[1])
    assert_same_bits(bf16, want[0])
    del churn


def test_a_tensor_is_an_argument_again():
    """Results go back in as arguments, and the merge of Tensors gives Tensors."""
    (out, lse), want = our_tensors()
    merged = sparse_mla.merge_attn_states(out, lse, out, lse)
    plain = sparse_mla.merge_attn_states(*want, *want)
    assert all(isinstance(x, sparse_mla.Tensor) for x in merged)
    assert_same_bytes(merged, plain)
    assert sparse_mla.merge_attn_states(*want, *want, out=out, lse=lse)[0] is out
    assert_same_bytes((out, lse), plain)


@pytest.mark.parametrize("framework", ALL_FRAMEWORKS[1:], indirect=True)
def test_tensor_in_frameworks(framework):
    name = framework.name
    (out, lse), want = our_tensors()
    importer = (
        framework.module.from_dlpack if name == "torch" else framework.module.dlpack.from_dlpack
    )
    got = [importer(x) for x in (out, lse)]
    if name == "torch":
        address = np.asarray(lse).__array_interface__["data"][0]
        assert framework.address(got[1]) == address, "zero copy"
    del out, lse
    gc.collect()
    for x, y in zip(got, want, strict=True):
        assert framework.owns(x)
        assert_same_bits(framework.get(x), y)


def test_tensor_of_no_elements():
    (out, lse), _ = our_tensors(T=0)
    assert tuple(out.shape) == (0, 4, 512)
    assert np.from_dlpack(lse).shape == (0, 4)


def test_an_export_that_fails_is_asked_for_once():
    """Only after a TypeError, which may mean an unknown keyword, is the producer asked again."""
    for error, times in ((ValueError("no"), 1), (TypeError("no"), 2)):

        class Failing(Producer):
            asked = 0

            def __dlpack__(self, error=error, **request):
                self.asked += 1
                raise error

        x = Failing(np.ones((2, 3), np.float32))
        with pytest.raises(BufferError, match=r"got from its __dlpack__: no$") as caught:
            sparse_mla.dynamic_per_tensor_quant(x)
        assert x.asked == times
        assert caught.value.__cause__ is caught.value.__context__ is error
