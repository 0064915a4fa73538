"""The handlers of XLA's custom calls, called as XLA would: other layouts, and errors of XLA's own.

csrc/python/xla/xla_abi.h describes the structures. No JAX is needed.
"""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from helpers import FLOAT_MODES, mode_after

import sparse_mla


class Buffers(ctypes.Structure):
    """The arguments or the results of a call frame that has none."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("rest", ctypes.c_void_p * 4)]


class Span(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char_p), ("length", ctypes.c_size_t)]


class Scalar(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("value", ctypes.c_void_p)]


class Headed(ctypes.Structure):
    """What most structures begin with."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p)]


class Buffer(Headed):
    _fields_ = [
        ("type", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_void_p),
    ]


class Attributes(Headed):
    _fields_ = [
        ("size", ctypes.c_int64),
        ("kinds", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
    ]


class ErrorArgs(Headed):
    _fields_ = [
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    ]


class OwnErrorArgs(Headed):
    _fields_ = [
        ("error", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
    ]


CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorArgs))
OwnError = ctypes.CFUNCTYPE(None, ctypes.POINTER(OwnErrorArgs))
Ask = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("head", ctypes.c_size_t * 5),
        ("create_error", CreateError),
        ("get_message", OwnError),
        ("destroy_error", OwnError),
        ("register_handler", ctypes.c_void_p),
        ("get_stream", Ask),
        ("between", ctypes.c_void_p * 12),
        ("get_device", Ask),
    ]


class Frame(Headed):
    _fields_ = [
        ("api", ctypes.POINTER(Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
    ]


def keep(frame: Frame, value):
    """The address of a value that lives as long as the frame."""
    frame.kept.append(value)
    return ctypes.addressof(value)


def keep_list(frame: Frame, kind, values: list) -> int:
    return keep(frame, (kind * len(values))(*values))


TYPES = {np.dtype(ml_dtypes.bfloat16): 16, np.dtype(np.float32): 11, np.dtype(np.int32): 4}


def fill_buffers(frame: Frame, part: Buffers, arrays) -> None:
    items = []
    for x in arrays:
        frame.kept.append(x)
        dims = keep_list(frame, ctypes.c_int64, list(x.shape))
        size = ctypes.sizeof(Buffer)
        buffer = Buffer(size, None, TYPES[x.dtype], x.ctypes.data, x.ndim, dims)
        items.append(keep(frame, buffer))
    kinds = keep_list(frame, ctypes.c_int, [1] * len(items))
    part.rest[:] = [None, len(items), kinds, keep_list(frame, ctypes.c_void_p, items)]


def make_attribute(frame: Frame, value) -> tuple[int, int]:
    """Kind and address of an attribute: a string, an int or a float."""
    if isinstance(value, bytes):
        return 4, keep(frame, Span(value, len(value)))
    number = ctypes.c_int64(value) if isinstance(value, int) else ctypes.c_double(value)
    return 3, keep(frame, Scalar(5 if isinstance(value, int) else 12, keep(frame, number)))


def make_frame(
    api: Api, operator: bytes | None = None, arguments=(), results=(), **attributes
) -> Frame:
    frame = Frame(struct_size=ctypes.sizeof(Frame), api=ctypes.pointer(api), stage=3)
    frame.kept = []
    for name in ("arguments", "results", "attributes"):
        part = getattr(frame, name)
        part.struct_size = ctypes.sizeof(part)
    fill_buffers(frame, frame.arguments, arguments)
    fill_buffers(frame, frame.results, results)
    given = attributes if operator is None else {"operator": operator, **attributes}
    names = [keep(frame, Span(name.encode(), len(name))) for name in given]
    made = [make_attribute(frame, value) for value in given.values()]
    frame.attributes.size = len(given)
    frame.attributes.kinds = keep_list(frame, ctypes.c_int, [kind for kind, _ in made])
    frame.attributes.names = keep_list(frame, ctypes.c_void_p, names)
    frame.attributes.items = keep_list(frame, ctypes.c_void_p, [item for _, item in made])
    return frame


def find_handler(platform: str):
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get_pointer(sparse_mla._C.xla_handlers()[platform], None)
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Frame))(address)


def run_handler(platform: str, frame: Frame) -> str | None:
    """The text of the error that the handler creates; the frame's API gets what creates it."""
    handler = find_handler(platform)
    texts = []

    def create_error(args):
        assert args.contents.struct_size >= 28
        texts.append(args.contents.message.decode())
        return 1

    create = CreateError(create_error)
    frame.api.contents.create_error = create
    assert handler(ctypes.byref(frame)) == (1 if texts else None)
    return texts[0] if texts else None


def call_handler(platform: str, frame: Frame) -> str:
    text = run_handler(platform, frame)
    assert text is not None
    return text


@pytest.mark.parametrize("grown", [None, "arguments", "results", "attributes"])
def test_a_call_frame_of_another_layout(grown):
    """A part of the frame that is larger than in our version moves the parts behind it. The handler
    refuses such a frame and reads nothing of it."""
    frame = make_frame(Api())
    if grown is not None:
        getattr(frame, grown).struct_size += 8
    text = call_handler("cpu", frame)
    wanted = "`operator` must name" if grown is None else "XLA's call frame must be that of version"
    assert wanted in text


def test_an_xla_that_does_not_tell_the_device():
    """An older one has fewer functions, which struct_size says."""
    api = Api(struct_size=ctypes.sizeof(Api) - 8)
    text = call_handler("CUDA", make_frame(api, b"k_up_proj"))
    assert text.startswith("k_up_proj: XLA must tell the device of a call")


@pytest.mark.parametrize("missing", ["device", "stream"])
def test_errors_of_xla_s_functions_are_passed_on(missing):
    """They belong to the handler, which destroys them."""
    destroyed = []

    def get_message(args):
        assert args.contents.error == 7
        args.contents.message = b"none here"

    api = Api(
        struct_size=ctypes.sizeof(Api),
        get_message=OwnError(get_message),
        destroy_error=OwnError(lambda args: destroyed.append(args.contents.error)),
        get_device=Ask(lambda args: 7 if missing == "device" else None),
        get_stream=Ask(lambda args: 7 if missing == "stream" else None),
    )
    text = call_handler("CUDA", make_frame(api, b"k_up_proj"))
    assert text == f"k_up_proj: XLA has no {missing}: none here"
    assert destroyed == [7]


# --- the thread's floating-point mode ------------------------------------------------------------


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, ml_dtypes.bfloat16)


def attend(**changes) -> Frame:
    """A call of sparse_attention, which takes a workspace of its own."""
    arguments = ones(1, 1, 576), ones(300, 576), np.zeros((1, 256), np.int32)
    results = ones(1, 1, 512), np.zeros((1, 1), np.float32)
    names = list(dict(sparse_mla.sparse_attention.table))
    present = sum(1 << names.index(name) for name in ("q", "kv_cache", "indices", "out", "lse"))
    options = {"softmax_scale": 0.1, "num_splits": 2, "return_max_logits": 0, "present": present}
    return make_frame(Api(), b"sparse_attention", arguments, results, **options | changes)


def project(columns: int, present: int = 0b111) -> Frame:
    arrays = ones(1, 2, 8), ones(512, 2, columns)
    return make_frame(Api(), b"k_up_proj", arrays, [ones(1, 2, 512)], present=present)


def of_another_version() -> Frame:
    frame = project(8)
    frame.results.struct_size += 8
    return frame


FRAMES = {
    "a projection": (lambda: project(8), None),
    "attention with a workspace": (attend, None),
    "another version": (of_another_version, "XLA's call frame must be that of version"),
    "no operator": (lambda: make_frame(Api()), "`operator` must name an operator"),
    "an operator that nobody knows": (lambda: make_frame(Api(), b"k_up"), "must name an operator"),
    "a wrong array": (lambda: project(9), "k_up_proj: `W_UK` must have shape"),
    "an array too little": (lambda: project(8, 0b11), "k_up_proj: `present` must name the 3"),
    "a bad option": (lambda: attend(num_splits=65), "sparse_attention: `num_splits` must be"),
    "an option too large": (lambda: attend(num_splits=1 << 40), "`num_splits` must fit int32"),
    "a scale of 0": (lambda: attend(kv_scale=0.0), "`kv_scale` must be a positive normal"),
    "an unknown format": (lambda: attend(kv_format=b"fp3"), "`kv_format` must be"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_handler_leaves_the_floating_point_mode(name):
    """After calls that end well and calls that fail, for one reason each."""
    make, words = FRAMES[name]
    for mode in FLOAT_MODES.values():
        frame, texts = make(), []
        assert mode_after(mode, lambda: texts.append(run_handler("cpu", frame))) == mode  # noqa: B023
        assert (texts[0] is None) if words is None else (words in texts[0])
        after = mode_after(mode, lambda: run_handler("CUDA", make_frame(Api(), b"k_up_proj")))
        assert after == mode
