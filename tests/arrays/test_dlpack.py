"""The DLPack protocol, corner by corner, with a hand-made producer (csrc/python/arrays/)."""

import ctypes

import cases
import numpy as np
import operators
import pytest
import reference as ref
from dlpack_producer import CUDA, READ_ONLY, Consumed, Producer, assert_returned, assert_same_bytes
from helpers import assert_same_bits

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


# --- capsules in ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["q", "kv_cache", "indices", "attn_sink", "extra_kv_cache", "topk_length"]
)
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


@pytest.mark.parametrize("name", ["q", "kv_cache", "indices", "attn_sink", "out"])
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
    "unaligned cache": ("kv_cache", {"fields": {"byte_offset": 8}}, ValueError),
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


@pytest.mark.parametrize("bad", ["kv_cache", "indices", "attn_sink", "max_logits"])
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
