"""Frameworks, commands, guarded buffers and the checks that several test files share."""

from __future__ import annotations

import contextlib
import ctypes
import doctest
import importlib
import os
import platform
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import device
import numpy as np
import pytest
import reference as ref

import sparse_mla

TESTS = Path(__file__).parents[1]
# Tests import the kit, the package of the benchmarks, and other tests, by their names alone.
KIT = [str(TESTS / "kit"), str(TESTS.parent / "benchmarks")]
FOLDERS = [*KIT, *sorted({str(path.parent) for path in TESTS.glob("*/test_*.py")})]
BUILD = TESTS.parent / "build" / sparse_mla.build_info()["flags"]
RED_ZONE_BYTES = 256
RED = 0x5C
NO_NAN = 0x7F  # poison that is no NaN: floats of this byte are 3.4e38, far above any result


def find_c_test(name: str) -> Path:
    """A library that `make test-c` builds; without it, the test is skipped."""
    library = BUILD / "tests" / f"{name}.so"
    if not library.exists():
        pytest.skip("the C tests are not built: make test-c")
    return library


# --- frameworks ----------------------------------------------------------------------------------


def require(name: str):
    """The module, or a skip where its package is not installed. A package that is installed and
    does not import is a failure: its tests would otherwise be skipped without a word."""
    try:
        return device.import_quietly(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not missing or not f"{name}.".startswith(f"{missing}."):
            raise
    pytest.skip(f"{missing} is not installed", allow_module_level=True)


class Framework:
    """How NumPy arrays become this framework's arrays and back. The base class is NumPy."""

    name = "numpy"
    writable = True
    shares_memory = True

    def put(self, x: np.ndarray):
        return x

    def get(self, x) -> np.ndarray:
        return np.asarray(x)

    def owns(self, x) -> bool:
        return type(x) is np.ndarray

    def address(self, x) -> int:
        return x.__array_interface__["data"][0]


class Torch(Framework):
    """PyTorch. On the CPU its tensors share NumPy's memory."""

    name = "torch"
    carriers = (("bfloat16", ref.BF16, np.int16), ("float8_e4m3fn", ref.E4M3, np.uint8))

    def __init__(self, place: str = "cpu") -> None:
        self.module = require("torch")
        self.place = place
        self.shares_memory = place == "cpu"

    def put(self, x: np.ndarray):
        if any(s < 0 for s in x.strides) or not x.flags.writeable:
            x = x.copy()
        for name, dtype, carrier in self.carriers:
            if x.dtype == dtype:
                bits = self.module.from_numpy(x.view(carrier)).to(self.place)
                return bits.view(getattr(self.module, name))
        return self.module.from_numpy(x).to(self.place)

    def get(self, x) -> np.ndarray:
        for name, dtype, carrier in self.carriers:
            if x.dtype is getattr(self.module, name):
                bits = x.view(getattr(self.module, np.dtype(carrier).name))
                return bits.cpu().numpy().view(dtype)
        return x.cpu().numpy()

    def owns(self, x) -> bool:
        return type(x) is self.module.Tensor

    def address(self, x) -> int:
        return x.data_ptr()


class Jax(Framework):
    name = "jax"
    writable = False
    shares_memory = False  # put copies; int64 becomes int32

    def __init__(self, place: str = "cpu") -> None:
        self.module = require("jax")
        self.place = self.module.devices(place)[0]

    def put(self, x: np.ndarray):
        x = x.astype(np.int32) if x.dtype == np.int64 else x
        return self.module.numpy.array(x, device=self.place)

    def owns(self, x) -> bool:
        return isinstance(x, self.module.Array)

    def address(self, x) -> int:
        return x.unsafe_buffer_pointer()


class Cupy(Framework):
    """CuPy, on GPUs only. It has no e4m3, so arrays of e4m3 become arrays of bytes."""

    name = "cupy"
    shares_memory = False

    def __init__(self, place: str = "cuda") -> None:
        self.module = require("cupy")

    def put(self, x: np.ndarray):
        if x.dtype == ref.BF16:
            return self.module.array(x.view(np.uint16)).view(ref.BF16)
        return self.module.array(x.view(np.uint8) if x.dtype == ref.E4M3 else x)

    def get(self, x) -> np.ndarray:
        if x.dtype == ref.BF16:
            return self.module.asnumpy(x.view(np.uint16)).view(ref.BF16)
        return self.module.asnumpy(x)

    def owns(self, x) -> bool:
        return type(x) is self.module.ndarray

    def address(self, x) -> int:
        return x.data.ptr


class Transformers(Torch):
    """Transformers, whose models take torch's tensors."""

    name = "transformers"

    def __init__(self, place: str = "cpu") -> None:
        super().__init__(place)
        self.module = require("transformers")


class Vllm(Torch):
    """vLLM, whose layers take torch's tensors. The module is that of its configs, which imports
    packages that the wheel alone does not bring."""

    name = "vllm"

    def __init__(self, place: str = "cpu") -> None:
        super().__init__(place)
        self.module = require("vllm.config")


FRAMEWORKS: dict[str, type[Framework]] = {
    "numpy": Framework,
    "torch": Torch,
    "jax": Jax,
    "cupy": Cupy,
    "transformers": Transformers,
    "vllm": Vllm,
}


def with_marks(*names: str) -> list:
    return [
        pytest.param(name, marks=() if name == "numpy" else getattr(pytest.mark, name))
        for name in names
    ]


ALL_FRAMEWORKS = with_marks("numpy", "torch", "jax")  # on the CPU
GPU_FRAMEWORKS = with_marks("torch", "cupy", "jax")


def find_framework(name: str, *place: str) -> Framework:
    """The framework, or a skip with the reason. With SMLA_REQUIRE a skip fails the session."""
    return FRAMEWORKS[name](*place)


# --- commands ------------------------------------------------------------------------------------


def run_python(*arguments, stdout=subprocess.PIPE, **environment):
    """Runs another Python, which imports the same package as these tests."""
    return subprocess.run(
        [sys.executable, *arguments],
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=600,
        env=environment_of_python(environment),
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment_of_python(more: dict) -> dict[str, str]:
    """Where another Python finds the package that these tests have imported, and `more`."""
    root = Path(importlib.import_module("sparse_mla").__file__).parents[1]
    folders = [str(root), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))} | more


def assert_kernels(op: str, setup: str, calls: list[tuple[str, str]]) -> None:
    """Asserts which kernels the log names. `setup` defines the function `call`, and each of `calls`
    has its arguments and the kernel."""
    lines = [setup, *(f"call({arguments})" for arguments, _ in calls)]
    done = run_python("-c", "\n".join(lines), SPARSE_MLA_LOG="1")
    assert done.returncode == 0, done.stderr
    logged = [line for line in done.stderr.splitlines() if op in line]
    assert len(logged) == len(calls), done.stderr
    for line, (arguments, kernel) in zip(logged, calls, strict=True):
        assert f" kernel {kernel}," in line, arguments


def printed_by_python(*arguments, **environment) -> str:
    """What another Python prints; it has to exit with status 0."""
    run = run_python(*arguments, **environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


# Put in front of another Python's script, this lets it import the modules of these tests.
BESIDE_TESTS = f"import sys; sys.path[:0] = {FOLDERS!r}\n"


# --- buffers -------------------------------------------------------------------------------------


class Guarded:
    """An output buffer between two red zones, filled with poison: NaN for floats, 0xA5 bytes for
    integers, or the byte `poison`.

    `row_gap` is the number of elements between two rows of the first dimension; the gaps are red
    zones, too.
    """

    def __init__(self, shape, dtype, *, row_gap=0, align=64, poison: int | None = None) -> None:
        dtype = np.dtype(dtype)
        row = int(np.prod(shape[1:], dtype=np.int64)) + row_gap
        size = shape[0] * row * dtype.itemsize
        self.storage = np.full(size + 2 * RED_ZONE_BYTES + align, RED, np.uint8)
        start = RED_ZONE_BYTES + -(self.storage.ctypes.data + RED_ZONE_BYTES) % align
        body = self.storage[start : start + size].view(dtype)
        strides = [row * dtype.itemsize]
        inner = np.empty(shape[1:], dtype).strides
        self.array = np.lib.stride_tricks.as_strided(body, shape, [*strides, *inner])
        self.poison = poison or (0xA5 if dtype.kind in "iu" else 0xFF)
        self._fill(self.poison)
        mask = self.storage.copy()
        self._fill(RED ^ 0xFF)
        self.outside = self.storage == RED
        self.storage[:] = mask

    def _fill(self, byte: int) -> None:
        if self.array.size:
            flat = np.frombuffer(bytes([byte]) * self.array.itemsize, self.array.dtype)
            self.array[...] = flat[0]

    def check(self, *, written: bool = True) -> np.ndarray:
        """Checks that red zones are intact and, with `written`, that no element is still poison."""
        assert (self.storage[self.outside] == RED).all(), "a write outside the output"
        if written and self.array.size:
            data = np.ascontiguousarray(self.array)
            left = (data.view(np.uint8).reshape(-1, data.itemsize) == self.poison).all(1)
            assert not left.any(), f"{left.sum()} of {left.size} elements were not written"
        return self.array


def same_bits(a, b) -> bool:
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    return same_kind and a.tobytes() == b.tobytes()


def assert_same_bits(got, want, what: str = "") -> None:
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    if got.tobytes() != want.tobytes():
        width = got.itemsize
        differs = (
            got.reshape(-1).view(np.uint8).reshape(-1, width)
            != want.reshape(-1).view(np.uint8).reshape(-1, width)
        ).any(1)
        first = np.unravel_index(int(differs.argmax()), got.shape)
        raise AssertionError(
            f"{what}: {differs.sum()} of {differs.size} elements differ, first at {first}: "
            f"{got[first]!r}, expected {want[first]!r}"
        )


def assert_same_bf16(got, want_bits, what: str = "") -> None:
    """Bit equality of bf16 values, except that any NaN equals any NaN."""
    got_bits, want_bits = ref.bits16(np.asarray(got)), np.asarray(want_bits)
    nan = np.isnan(ref.bf16_decode(want_bits))
    assert np.array_equal(np.isnan(ref.bf16_decode(got_bits)), nan), f"{what}: NaN elsewhere"
    assert_same_bits(np.where(nan, 0, got_bits), np.where(nan, 0, want_bits), what)


# --- attention -----------------------------------------------------------------------------------


def guarded_attention(
    op, case, put=lambda x: x, *, max_logits=True, row_gap=0, poison=None, **more
):
    """Runs a case with guarded outputs; -> {"out", "lse", "max_logits"} as NumPy arrays.

    Results that may be NaN need a `poison` that is not NaN: NO_NAN.
    """
    shapes = {"out": ((*case.shape, 512), ref.BF16), "lse": (case.shape, np.float32)}
    if max_logits:
        shapes["max_logits"] = shapes["lse"]
        more["return_max_logits"] = True
    buffers = {n: Guarded(*x, row_gap=row_gap, poison=poison) for n, x in shapes.items()}
    outputs = {name: put(buffer.array) for name, buffer in buffers.items()}
    results = case.run(op, put, **outputs, **more)
    for result, name in zip(results, outputs, strict=True):
        assert result is outputs[name], f"{name} must be returned as the same object"
    return {name: buffer.check() for name, buffer in buffers.items()}


def assert_same_results(a: dict, b: dict, what="") -> None:
    for name in a:
        assert_same_bits(a[name], b[name], f"{what} {name}")


def assert_within_bounds(want: ref.Attention, got: dict, **tolerance) -> dict[str, float]:
    """Checks `got` against the bounds of the session's device, or those of `tolerance`."""
    ratios = ref.attention_ratios(want, **got, **(device.BOUNDS | tolerance))
    assert max(ratios.values()) <= 1, f"|err| / bound: {ratios}"
    return ratios


def assert_merged(got, want, factor=1.0) -> None:
    """Checks (out, lse) of a merge against fp64's (out, lse, magnitude), whose bound for out grows
    with `factor`."""
    (out, lse), (want_out, want_lse, magnitude) = got, want
    tolerance = ref.merge_tolerance(want_out, factor * magnitude, out.dtype)
    assert ref.worst_ratio(out, want_out, tolerance) <= 1
    assert ref.worst_ratio(lse, want_lse, ref.merge_lse_tolerance(want_lse)) <= 1


def assert_parts_are_whole(got, whole: ref.Attention, merged, factor=1.0) -> None:
    """Checks (out, lse), attention to parts of the keys that were merged to bf16, against attention
    to all; `merged` and `factor` are those of assert_merged. Each part may be off by its bound, and
    their sums of p|v| add up to that of the whole. The merge adds its own rounding."""
    (out, lse), (merged_out, merged_lse, magnitude) = got, merged
    merge_error = ref.merge_tolerance(merged_out, factor * magnitude, ref.BF16)
    tolerance = 2 * whole.out_tolerance(**device.BOUNDS) + merge_error
    empty = np.isneginf(whole.lse)[..., None]
    assert ref.worst_ratio(out, whole.out, np.where(empty, 1e-300, tolerance)) <= 1
    lse_tolerance = whole.lse_tolerance(**device.BOUNDS) + ref.merge_lse_tolerance(merged_lse)
    assert ref.worst_ratio(lse, whole.lse, lse_tolerance) <= 1


def assert_right_again(op, case, want: ref.Attention, got: dict) -> None:
    """A second call gives the bits of `got`; a call without max_logits is within the bounds."""
    for name, x in guarded_attention(op, case).items():
        assert_same_bits(x, got[name], f"{name} of the second run")
    assert_within_bounds(want, guarded_attention(op, case, max_logits=False))


# --- leaks ---------------------------------------------------------------------------------------


class Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


libc = ctypes.CDLL(None)
if hasattr(libc, "mallinfo2"):  # glibc 2.33
    libc.mallinfo2.restype = Mallinfo


def malloc_bytes() -> int:
    """Bytes that the C library has allocated; 0 where it does not count them."""
    if not hasattr(libc, "mallinfo2"):
        return 0
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def assert_keeps_nothing(run, *expected, calls=200) -> None:
    """Counts blocks of Python's allocator and bytes of malloc's over rounds of many calls. A leak
    grows in every round; what other code allocates in between does not."""
    found = []
    for _ in range(40):
        blocks, num_bytes = sys.getallocatedblocks(), malloc_bytes()
        for _ in range(calls):
            with contextlib.suppress(*expected):
                run()
        found.append((sys.getallocatedblocks() - blocks, malloc_bytes() - num_bytes))
        if found[-1][0] < calls // 2 and found[-1][1] < 16 * calls:  # a block has 32 bytes or more
            return
    raise AssertionError(f"{calls} calls leave (blocks, bytes), round for round: {found}")


# --- floating-point modes ------------------------------------------------------------------------

# What a library may have done to the thread that calls: bits of MXCSR and of FPCR, and the rounding
# of fesetround where neither is known.
FLOATING_POINT_MODES = {
    "default": {"x86_64": 0, "aarch64": 0, "rounding": "TONEAREST"},
    "flush to zero": {"x86_64": 0x8040, "aarch64": 1 << 24, "rounding": "TONEAREST"},
    "upward": {"x86_64": 0x4000, "aarch64": 1 << 22, "rounding": "UPWARD"},
    "toward zero": {"x86_64": 0x6000, "aarch64": 3 << 22, "rounding": "TOWARDZERO"},
}
MODE_MASKS = {"x86_64": (28, 0xE040), "aarch64": (0, 0x1C00000)}  # offset in fenv_t, bits


@contextlib.contextmanager
def floating_point_mode(name: str):
    """Sets how this thread rounds, and what becomes of subnormal numbers."""
    libm = ctypes.CDLL("libm.so.6")
    before = ctypes.create_string_buffer(256)
    libm.fegetenv(before)
    machine = os.uname().machine
    if machine in MODE_MASKS:
        offset, mask = MODE_MASKS[machine]
        changed = ctypes.create_string_buffer(before.raw, len(before))
        (bits,) = struct.unpack_from("<I", changed, offset)
        bits = bits & ~mask | FLOATING_POINT_MODES[name][machine]
        struct.pack_into("<I", changed, offset, bits)
        libm.fesetenv(changed)
    else:
        rounding = {"TONEAREST": 0, "UPWARD": 2, "TOWARDZERO": 1}  # RISC-V, for one
        libm.fesetround(rounding[FLOATING_POINT_MODES[name]["rounding"]])
    try:
        yield
    finally:
        libm.fesetenv(before)


# --- errors --------------------------------------------------------------------------------------


def assert_error_text(error: BaseException, op: str, arguments) -> None:
    """The text is ``op: `argument` must RULE, got ACTUAL``, with one of the argument names."""
    names = "|".join(re.escape(n) for n in arguments)
    pattern = rf"^{re.escape(op)}: `({names})` must .+, got .+"
    text = str(error)
    assert re.search(pattern, text, re.DOTALL), f"{text!r} does not match {pattern!r}"


# --- floating-point modes ------------------------------------------------------------------------

libm = ctypes.CDLL("libm.so.6")
# Where fegetenv puts the register of modes, its bits that are exception flags, and modes.
MODE_AT, MODE_FLAGS, FLOAT_MODES = {
    "x86_64": (
        28,  # MXCSR
        0x3F,
        {
            "default": 0x1F80,
            "down": 0x3F80,
            "up": 0x5F80,
            "to zero": 0x7F80,
            "results flushed": 0x9F80,
            "operands flushed": 0x1FC0,
            "all flushed, up": 0xDFC0,
        },
    ),
    "aarch64": (
        0,  # FPCR
        0,
        {"default": 0, "up": 1 << 22, "down": 2 << 22, "to zero": 3 << 22, "flushed": 1 << 24},
    ),
}[platform.machine()]


def read_float_mode() -> int:
    """How this thread rounds, what becomes of subnormal numbers, and which exceptions trap."""
    environment = ctypes.create_string_buffer(64)
    libm.fegetenv(environment)
    return struct.unpack_from("<I", environment, MODE_AT)[0] & ~MODE_FLAGS


@contextlib.contextmanager
def float_mode(mode: int):
    """Sets the mode of this thread, and sets back what it was."""
    former, own = (ctypes.create_string_buffer(64) for _ in "ab")
    for environment in (former, own):
        libm.fegetenv(environment)
    struct.pack_into("<I", own, MODE_AT, mode)
    libm.fesetenv(own)
    try:
        yield
    finally:
        libm.fesetenv(former)


def mode_after(mode: int, run) -> int:
    """The mode that a thread of this mode has after a run."""
    with float_mode(mode):
        run()
        return read_float_mode()


def check_seeds(seeds: Iterable[int], check: Callable[[int], object]) -> None:
    """Checks what each seed draws; a failure tells its seed."""
    for seed in seeds:
        try:
            check(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# --- documentation -------------------------------------------------------------------------------


def run_examples(page: str, word: str) -> None:
    """Runs those Python blocks of a page below docs/ that contain `word`."""
    text = (TESTS.parent / "docs" / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    chosen = [block for block in blocks if word in block]
    assert chosen, f"no example with {word} in {page}"
    for block in chosen:
        exec(compile(block, page, "exec"), {"__name__": "__main__"})


def run_docstrings(module: ModuleType, names: Iterable[str]) -> None:
    """Runs the examples of a module's docstrings, which those of `names` must have."""
    found = doctest.DocTestFinder(exclude_empty=True).find(module)
    tests = [test for test in found if test.examples]
    assert {f"{module.__name__}.{name}" for name in names} < {test.name for test in tests}
    report: list[str] = []
    for test in tests:
        doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
