"""What this build and this machine have."""

from __future__ import annotations

from os import path
from typing import Any

from sparse_mla import _C

__all__ = [
    "build_info",
    "get_include",
    "get_library_dir",
    "kernels",
]


def kernels() -> list[dict[str, Any]]:
    """The rows of the dispatch table: which kernel serves which arguments.

    Returns
    -------
    A list of dicts: device ("cpu", "cuda"), arch (instruction set, or the oldest GPU architecture),
    kv_format, heads, name (the source file; mqa_avx2.c is mqa_kernel.c for AVX2),
    available (whether this machine can run the kernel) and selected (whether attention calls may
    use it). The first row that fits a call serves it. On a GPU, unless the call gives `num_splits`,
    the row that is estimated to be fastest serves it. A build without CUDA has no CUDA rows.

    Examples
    --------
    >>> import sparse_mla
    >>> any(row["selected"] for row in sparse_mla.kernels())
    True
    """
    return _C.kernels()


def build_info() -> dict[str, Any]:
    """How this build was made, and what it found on this machine.

    Returns
    -------
    A dict: version, core_version, compiler, flags (the build variant), cuda (the toolkit's version
    and origin; "none: ..." and how to get it in a CPU-only build), cuda_archs (what the kernels
    were compiled for), dlpack and numpy_api (versions), openmp (its date as an int, 0 = none),
    cpu_features (instruction sets that there is a kernel for).

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.build_info()["version"] == sparse_mla.__version__
    True
    """
    return _C.build_info()


def get_include() -> str:
    """The folder of sparse_mla.h, sparse_mla/ and dlpack/dlpack.h, for C code that calls the core.

    Returns
    -------
    str, a path for a compiler's -I.

    Examples
    --------
    >>> import sparse_mla
    >>> sparse_mla.get_include().endswith("include")
    True
    """
    return path.join(path.dirname(path.dirname(__file__)), "include")


def get_library_dir() -> str:
    """The folder of the C library, libsparse_mla.so, for programs that call the core from C.

    It is another copy of the core than this module's, so both may be used in one process. Below the
    folder are pkgconfig/ and cmake/. The command `sparse-mla-config` prints flags made of it.

    Returns
    -------
    str, a path for a linker's -L and -rpath, and for LD_LIBRARY_PATH.

    Examples
    --------
    >>> import ctypes, os, sparse_mla
    >>> name = f"libsparse_mla.so.{sparse_mla.__version__.split('.')[0]}"
    >>> library = ctypes.CDLL(os.path.join(sparse_mla.get_library_dir(), name))
    >>> library.smla_version() > 0
    True
    """
    return path.join(path.dirname(path.dirname(__file__)), "lib")
