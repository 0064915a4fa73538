"""The handlers of XLA's custom calls, called as XLA would: other layouts, and errors of XLA's own.

csrc/python/xla/xla_abi.h describes the structures. No JAX is needed.
"""

import ctypes

import pytest

import sparse_mla


class Buffers(ctypes.Structure):
    """The arguments or the results of a call frame that has none."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("rest", ctypes.c_void_p * 4)]


class Span(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char_p), ("length", ctypes.c_size_t)]


class Attributes(ctypes.Structure):
    """One attribute, a string, or none."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("kinds", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(Span))),
        ("items", ctypes.POINTER(ctypes.POINTER(Span))),
    ]


class ErrorArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    ]


class OwnErrorArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
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


class Frame(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("api", ctypes.POINTER(Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
    ]


def make_frame(api: Api, operator: bytes | None = None) -> Frame:
    frame = Frame(struct_size=ctypes.sizeof(Frame), api=ctypes.pointer(api), stage=3)
    for name in ("arguments", "results", "attributes"):
        part = getattr(frame, name)
        part.struct_size = ctypes.sizeof(part)
    if operator is not None:
        frame.attributes.size = 1
        frame.attributes.kinds = ctypes.pointer(ctypes.c_int(4))
        for field, text in (("names", b"operator"), ("items", operator)):
            span = ctypes.pointer(Span(text, len(text)))
            setattr(frame.attributes, field, ctypes.pointer(span))
    return frame


def call_handler(platform: str, frame: Frame) -> str:
    """The text of the error that the handler creates; the frame's API gets what creates it."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get_pointer(sparse_mla._C.xla_handlers()[platform], None)
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Frame))(address)
    texts = []

    def create_error(args):
        assert args.contents.struct_size >= 28
        texts.append(args.contents.message.decode())
        return 1

    create = CreateError(create_error)
    frame.api.contents.create_error = create
    assert handler(ctypes.byref(frame)) == 1
    return texts[0]


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
