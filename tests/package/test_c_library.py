"""The C library of an installed package: programs of C, CMake and Rust that find it by
sparse-mla-config. `make examples-c` runs the same examples on build/lib."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import printed_by_python, run_python

import sparse_mla

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "examples" / "c").glob("*.c"))
FLAGS = sparse_mla.build_info()["flags"]

pytestmark = pytest.mark.skipif(
    FLAGS not in ("release", "debug"), reason=f"{FLAGS}: its library needs more than its user links"
)


@functools.cache
def config(*options: str) -> str:
    """What sparse-mla-config prints."""
    return printed_by_python("-m", "sparse_mla._config", *options).strip()


def run(*command: str | Path, **environment: str) -> str:
    """What a command prints. The loader is told nothing of the library."""
    cleared = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    done = subprocess.run(command, env=cleared | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> str:
    """The path of a program that works, or a skip."""
    path = shutil.which(name)
    if path is None or subprocess.run([path, "--version"], capture_output=True).returncode:
        pytest.skip(f"no {name} here")
    return path


def test_config_agrees_with_the_package():
    assert config("--includedir") == sparse_mla.get_include()
    assert config("--libdir") == sparse_mla.get_library_dir()
    assert config("--prefix") == str(Path(sparse_mla.get_include()).parent)
    assert config("--version") == sparse_mla.__version__
    for option in ("--pkgconfigdir", "--cmakedir"):
        assert any(Path(config(option)).iterdir()), option
    assert config("--libs", "--cflags") == f"{config('--libs')} {config('--cflags')}"


def test_config_without_an_option_lists_them():
    done = run_python("-m", "sparse_mla._config")
    assert done.returncode == 2
    assert "--cmakedir" in done.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_c_program_links_and_loads(program, tmp_path):
    flags = shlex.split(config("--cflags", "--libs"))
    run("cc", "-std=c11", program, *flags, "-lm", "-o", tmp_path / "program")
    assert "good" in run(tmp_path / "program")


def test_pkg_config_finds_the_same_library(tmp_path):
    folder = {"PKG_CONFIG_PATH": config("--pkgconfigdir")}
    pkg_config = tool("pkg-config")
    flags = run(pkg_config, "--cflags", "--libs", "sparse_mla", **folder).split()
    libdir = run(pkg_config, "--variable=libdir", "sparse_mla", **folder).strip()
    assert Path(libdir).samefile(sparse_mla.get_library_dir())
    source = ROOT / "examples/c/decode.c"
    run("cc", source, *flags, f"-Wl,-rpath,{libdir}", "-lm", "-o", tmp_path / "program")
    assert "good" in run(tmp_path / "program")


CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.20)
project(user C)
find_package(sparse_mla {version} REQUIRED)
add_executable(program {source})
target_link_libraries(program PRIVATE sparse_mla::sparse_mla m)
"""


@pytest.mark.parametrize(("version", "fits"), [(sparse_mla.__version__, True), ("99.0", False)])
def test_cmake_finds_it(tmp_path, version, fits):
    cmake = tool("cmake")
    source = ROOT / "examples/c/decode.c"
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_LISTS.format(version=version, source=source))
    folder = f"-Dsparse_mla_DIR={config('--cmakedir')}"
    configure = [cmake, "-S", tmp_path, "-B", tmp_path / "build", folder]
    if not fits:
        done = subprocess.run(configure, capture_output=True, text=True)
        assert done.returncode != 0
        assert f'compatible with requested version "{version}"' in " ".join(done.stderr.split())
        return
    run(*configure)
    run(cmake, "--build", tmp_path / "build")
    assert "good" in run(tmp_path / "build/program")


def test_a_rust_program_links_and_loads(tmp_path):
    cargo = tool("cargo")
    script = tmp_path / "sparse-mla-config"
    root = Path(sparse_mla.__file__).parents[1]
    command = (
        f'PYTHONPATH={shlex.quote(str(root))} exec {sys.executable} -m sparse_mla._config "$@"'
    )
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o755)
    shutil.copytree(ROOT / "examples/rust", tmp_path / "rust")
    manifest = tmp_path / "rust/Cargo.toml"
    printed = run(
        *(cargo, "run", "--quiet", "--offline", "--manifest-path", manifest),
        SPARSE_MLA_CONFIG=str(script),
        CARGO_TARGET_DIR=str(tmp_path / "target"),
    )
    assert "out [2.0, 2.0, 2.0, 2.0, 2.5" in printed
    assert "SMLA_ERROR_VALUE: merge_attn_states: `lse_b` must be given" in printed
