"""The package on GPUs made of plain memory: tests/c/fake_cuda/gpu.c under the host files of
csrc/cuda, and frameworks whose arrays say that they are on a GPU.

`load()` gives a second package, besides the one that is imported. All work is done when a call
returns, but events do not say so while the GPU is set to busy.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
from dlpack_producer import CUDA, Producer
from exchange_producer import Exchanged
from helpers import find_c_test

OUT_OF_MEMORY, UNKNOWN_ERROR = 2, 999  # CUDA's codes


def load() -> ModuleType:
    """Imports a second copy of the package, on the fake GPUs."""
    extension = str(find_c_test("fake_gpu"))
    names = [name for name in sys.modules if name.split(".")[0] == "sparse_mla"]
    former = {name: sys.modules.pop(name) for name in names}
    try:
        loader = importlib.machinery.ExtensionFileLoader("sparse_mla._C", extension)
        spec = importlib.util.spec_from_file_location("sparse_mla._C", extension, loader=loader)
        sys.modules["sparse_mla._C"] = core = importlib.util.module_from_spec(spec)
        loader.exec_module(core)
        for name in ("dense", "paged", "v4"):  # a later first use would find the other package
            importlib.import_module(f"sparse_mla.{name}")
        return sys.modules["sparse_mla"]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sparse_mla"]:
            del sys.modules[name]
        sys.modules.update(former)


class Driver:
    """Controls the fake GPUs, and reports the calls that they got."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(find_c_test("fake_gpu")))
        for name in ("new_stream", "followed", "launch_stream"):
            getattr(self.library, f"fake_gpu_{name}").restype = ctypes.c_void_p
        self.library.fake_gpu_is_relaxed.restype = ctypes.c_bool
        for name in ("calls", "failed"):
            getattr(self.library, f"fake_gpu_{name}").restype = ctypes.c_char_p
        self.names: list[bytes] = []  # names of calls that fail; C points to them

    def ask(self, name: str, *arguments):
        return getattr(self.library, f"fake_gpu_{name}")(*arguments)

    def reset(self) -> None:
        self.ask("reset")
        self.events_before = self.ask("num_events")

    def new_stream(self, device_id: int = 0) -> int:
        return self.ask("new_stream", device_id)

    def set_busy(self, is_busy: bool = True) -> None:
        self.ask("set_busy", is_busy)

    def finish(self) -> None:
        """Ends all work; later work ends as soon as it is started."""
        self.set_busy(False)
        self.ask("finish")

    def capture(self, stream: int, is_capturing: bool = True) -> None:
        self.ask("capture", ctypes.c_void_p(stream), is_capturing)

    def fail(self, call: str | None, num_good=0, code=UNKNOWN_ERROR, keeps=False) -> None:
        """Lets `call` (None: any) fail after `num_good` good ones, once or, if `keeps`, always."""
        self.names.append(call.encode() if call else b"")
        self.ask("fail", self.names[-1] or None, num_good, code, keeps)

    @property
    def failed(self) -> str:
        """The call that has failed since `fail`; "" if none has."""
        return (self.ask("failed") or b"").decode()

    def allocator(self, has_words: bool):
        """An allocator for an exchange API. It fails, with or without an error text."""
        return getattr(self.library, "fake_gpu_refuse" if has_words else "fake_gpu_refuse_silently")

    def followed(self, stream: int) -> int | None:
        """The stream whose work this one waits for; 1 is the legacy stream."""
        return self.ask("followed", ctypes.c_void_p(stream))

    @property
    def launch(self) -> tuple[int, int]:
        """Stream and device of the last launch."""
        return self.ask("launch_stream") or 0, self.ask("launch_device")

    @property
    def num_events(self) -> int:
        """Events that are alive, less those that were alive at the reset."""
        return self.ask("num_events") - self.events_before

    @property
    def num_memory(self) -> int:
        return self.ask("num_memory")

    def counts(self) -> dict[str, int]:
        """What is alive of all that the runtime makes, and what a call restores."""
        names = ("num_events", "num_memory", "num_host", "num_streams", "current", "is_relaxed")
        return {name: self.ask(name) for name in names}

    @property
    def num_failures(self) -> int:
        return self.ask("num_failures")

    def calls(self) -> list[str]:
        """Names of the CUDA calls since the last call of this method."""
        calls = self.ask("calls").decode().replace("~", "").split()
        self.ask("forget_calls")
        return calls


def give_back(package: ModuleType) -> None:
    """Releases what was kept for work that is over by now. The call itself keeps nothing."""
    Exchanged.stream = 0
    package.dynamic_per_tensor_quant(Exchanged(np.ones((1, 1), np.float32), place=(CUDA, 0)))


# --- frameworks ----------------------------------------------------------------------------------


def on_gpu(x: np.ndarray, device_id: int = 0, **options) -> Producer:
    """An array of a framework that the library does not know."""
    return Producer(x, device=(CUDA, device_id), **options)


class LikeTorch(Producer):
    """An array of PyTorch from before the exchange API."""

    __module__ = "torch.of_these_tests"

    def __init__(self, array: np.ndarray, device_id: int = 0, **options) -> None:
        super().__init__(array, device=(CUDA, device_id), **options)


class LikeJax(Producer):
    """An array of JAX."""

    __module__ = "jaxlib.of_these_tests"

    def __init__(self, array: np.ndarray, **options) -> None:
        super().__init__(array, device=(CUDA, 0), **options)
        self.waits = 0

    def block_until_ready(self) -> None:
        self.waits += 1


class LikePythonJax(LikeJax):
    """An array of JAX whose type is not compiled, so that it could be a tracer."""

    __module__ = "jax.of_these_tests"


class CupyArray:
    """An array of CuPy, which has no exchange API and is read by its attributes."""

    __module__ = "cupy"

    def __init__(self, array: np.ndarray, device_id: int = 0) -> None:
        self.array = array
        self.data = SimpleNamespace(
            ptr=array.__array_interface__["data"][0], device_id=device_id, owner=array
        )
        self.dtype, self.shape, self.strides = array.dtype, array.shape, array.strides

    def __getitem__(self, key) -> CupyArray:
        return CupyArray(self.array[key], self.data.device_id)

    def __setitem__(self, key, value) -> None:
        self.array[key] = value

    def __len__(self) -> int:
        return len(self.array)

    def reshape(self, *shape) -> CupyArray:
        return CupyArray(self.array.reshape(*shape), self.data.device_id)

    def swapaxes(self, a: int, b: int) -> CupyArray:
        return CupyArray(self.array.swapaxes(a, b), self.data.device_id)

    def copy(self) -> CupyArray:
        return CupyArray(self.array.copy(), self.data.device_id)


class Cupy(ModuleType):
    """The part of the package `cupy` that the extension uses."""

    ndarray = CupyArray

    def __init__(self) -> None:
        super().__init__("cupy")
        self.reset()
        cupy = self

        class Device:
            def __init__(self, device_id: int) -> None:
                self.device_id = device_id

            def __enter__(self):
                cupy.entered.append(self.device_id)
                self.former, cupy.current = cupy.current, self.device_id
                return self

            def __exit__(self, *error) -> None:
                cupy.left.append(error)
                cupy.current = self.former

        def get_current_stream(device_id):
            self.asked.append(device_id)
            return SimpleNamespace(ptr=self.stream)

        class Stream:
            """A stream by its handle; as a context it is the current one."""

            def __init__(self, ptr: int, device_id: int = -1) -> None:
                self.ptr = ptr

            def __enter__(self):
                cupy.former.append(cupy.stream)
                cupy.stream = self.ptr
                return self

            def __exit__(self, *error) -> None:
                cupy.stream = cupy.former.pop()

        self.cuda = SimpleNamespace(
            Device=Device,
            get_current_stream=get_current_stream,
            Stream=Stream,
            ExternalStream=Stream,
        )

    def reset(self) -> None:
        self.stream, self.current = 0, 0
        self.former: list[int] = []  # streams that are current again later
        self.asked: list[int] = []  # devices whose stream was asked for
        self.entered: list[int] = []
        self.left: list[tuple] = []  # arguments of __exit__

    def empty(self, shape, dtype) -> CupyArray:
        return CupyArray(np.full(shape, 0x55, np.uint8).astype(dtype), self.current)
