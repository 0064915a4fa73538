"""`sparse-mla-config` prints what a C, C++ or Rust build needs to use this package's C library.

    cc decode.c $(sparse-mla-config --cflags --libs) -o decode
    cmake -Dsparse_mla_DIR=$(sparse-mla-config --cmakedir) ...
    PKG_CONFIG_PATH=$(sparse-mla-config --pkgconfigdir) pkg-config --cflags sparse_mla

The library lies in the Python environment, where no loader looks for it. So --libs also gives the
program its folder (-rpath); pkg-config does not.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import sparse_mla


def facts() -> dict[str, tuple[str, str]]:
    """Option -> what it prints, and its help."""
    include, lib = sparse_mla.get_include(), sparse_mla.get_library_dir()
    flags = shlex.join([f"-L{lib}", f"-Wl,-rpath,{lib}", "-lsparse_mla"])
    return {
        "cflags": (shlex.join([f"-I{include}"]), "flags to compile with"),
        "libs": (flags, "flags to link with, the run-time path among them"),
        "prefix": (str(Path(lib).parent), "the folder of include/ and lib/"),
        "includedir": (include, "the folder of sparse_mla.h"),
        "libdir": (lib, "the folder of libsparse_mla.so"),
        "pkgconfigdir": (f"{lib}/pkgconfig", "for PKG_CONFIG_PATH"),
        "cmakedir": (f"{lib}/cmake/sparse_mla", "for CMake's sparse_mla_DIR"),
        "version": (sparse_mla.__version__, "the version"),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sparse-mla-config",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = facts()
    for name, (text, meaning) in known.items():
        parser.add_argument(
            f"--{name}", dest="texts", action="append_const", const=text, help=meaning
        )
    texts = parser.parse_args(arguments).texts
    if not texts:
        parser.error(f"give one or more of --{', --'.join(known)}")
    print(*texts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
