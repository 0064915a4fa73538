"""Which CUDA toolkit a build takes, how it reads ptxas' report, and how it bounds stack frames.

nvcc is a script here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from helpers import require

BUILDTOOLS = Path(__file__).parents[2] / "buildtools"


def load(name: str):
    """Loads a module of buildtools/ by its path, because that folder is not in sys.path."""
    spec = importlib.util.spec_from_file_location(f"buildtools_{name}", BUILDTOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


toolkit = load("toolkit")


@pytest.fixture
def graph(monkeypatch):
    """buildtools/graph.py, which imports toolkit as setup.py lets it."""
    monkeypatch.syspath_prepend(str(BUILDTOOLS))
    return load("graph")


def install(root: Path, version: str = "13.0", lib: str = "lib64") -> Path:
    """A toolkit whose nvcc answers what the build asks."""
    for folder, file in (("include", "cuda_runtime_api.h"), (lib, "libcudart_static.a")):
        (root / folder).mkdir(parents=True)
        (root / folder / file).touch()
    (root / "bin").mkdir()
    nvcc = root / "bin/nvcc"
    answer = f"Cuda compilation tools, release {version}, V{version}.88"
    nvcc.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{answer}"; '
        f'else echo "#\\$ TOP={root}/bin/.." >&2; fi\n'
    )
    nvcc.chmod(0o755)
    return root


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without toolkit and driver: Linux on x86-64, all paths below tmp_path."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("SPARSE_MLA_CUDA", raising=False)
    monkeypatch.setenv("NVCC_CCBIN", "/bin/sh")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(toolkit, "STANDARD_PLACE", tmp_path / "usr/local/cuda")
    monkeypatch.setattr(toolkit, "DRIVER_FILES", (str(tmp_path / "driver"),))
    monkeypatch.setattr(toolkit, "has_wheels", lambda: True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    return tmp_path


def test_none_is_a_cpu_only_build(machine):
    assert toolkit.find_toolkit("auto") is None
    assert toolkit.find_toolkit("off") is None


@pytest.mark.parametrize(("mode", "hint"), [("system", "toolkit installed"), ("wheel", "nvvm")])
def test_none_is_an_error_where_one_was_asked_for(machine, mode, hint):
    with pytest.raises(SystemExit, match=hint):
        toolkit.find_toolkit(mode)


def test_the_order_of_the_search(machine, monkeypatch):
    install(machine / "site-packages/nvidia/cu13", lib="lib")
    assert toolkit.find_toolkit("auto").origin == "PyPI"
    install(toolkit.STANDARD_PLACE)
    assert toolkit.find_toolkit("auto").origin == str(toolkit.STANDARD_PLACE)
    monkeypatch.setenv("PATH", f"/nowhere:{install(machine / 'path')}/bin")
    assert toolkit.find_toolkit("auto").origin == "PATH"
    monkeypatch.setenv("CUDA_HOME", str(install(machine / "home")))
    found = toolkit.find_toolkit("auto")
    assert found.origin == "CUDA_HOME"
    assert found.nvcc == machine / "home/bin/nvcc"
    assert found.include == machine / "home/include"
    assert found.lib == machine / "home/lib64"
    assert toolkit.find_toolkit("system") == found
    wheel = toolkit.find_toolkit("wheel")
    assert wheel.lib == machine / "site-packages/nvidia/cu13/lib"
    assert wheel.version == "13.0.88"


def test_a_script_on_the_path_leads_to_the_toolkit(machine, monkeypatch):
    root = install(machine / "elsewhere")
    (machine / "bin").mkdir()
    script = machine / "bin/nvcc"
    script.write_text(f'#!/bin/sh\nexec {root}/bin/nvcc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(machine / "bin"))
    assert toolkit.find_toolkit("auto").lib == root / "lib64"


def test_an_old_nvcc_is_passed_over_with_a_note(machine, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{install(machine / 'old', '11.8')}/bin")
    install(toolkit.STANDARD_PLACE, "12.8")
    assert toolkit.find_toolkit("auto").version == "12.8.88"
    assert "CUDA 11.8.88 is older than 12.8" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["bin/nvcc", "include/cuda_runtime_api.h"])
def test_a_named_toolkit_that_is_unusable_is_an_error(machine, monkeypatch, damage):
    root = install(machine / "home")
    (root / damage).unlink()
    install(toolkit.STANDARD_PLACE)
    monkeypatch.setenv("CUDA_HOME", str(root))
    with pytest.raises(SystemExit, match=f"CUDA_HOME={root}.*{Path(damage).name}"):
        toolkit.find_toolkit("auto")


def test_a_missing_host_compiler_is_named(machine, monkeypatch):
    install(toolkit.STANDARD_PLACE)
    monkeypatch.delenv("NVCC_CCBIN")
    with pytest.raises(SystemExit, match=r"nvcc needs g\+\+.*install g\+\+"):
        toolkit.find_toolkit("auto")


# --- what `make demo` and `make test` build ------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "built", "mode"),
    [
        (False, None, "off"),
        (False, b"... none: CPU-only build (SPARSE_MLA_CUDA=off) ...", "off"),
        (False, b"... 13.0.88 from PATH ...", "auto"),
        (True, None, "auto"),
        (True, b"... none: CPU-only build (no NVIDIA driver here) ...", "auto"),
    ],
)
def test_here_is_what_this_machine_can_run(
    graph, machine, monkeypatch, capsys, driver, built, mode
):
    """With nvcc and without a driver that is a CPU-only build, unless CUDA is built already."""
    monkeypatch.setattr(graph, "toolkit", toolkit)
    monkeypatch.setattr(graph, "EXTENSION", machine / "_C.abi3.so")
    monkeypatch.setenv("SPARSE_MLA_CUDA", "here")
    install(toolkit.STANDARD_PLACE)
    if driver:
        (machine / "driver").touch()
    if built is not None:
        graph.EXTENSION.write_bytes(built)
    found, facts = graph.find_cuda()
    note = capsys.readouterr().err
    if mode == "auto":
        assert found.origin == str(toolkit.STANDARD_PLACE)
        assert note == ""
        return
    assert found is None
    assert "CPU-only build (no NVIDIA driver here); for CUDA, build again with" in note
    assert note.count("\n") == 1
    assert facts["SMLA_BUILD_CUDA"].startswith("none: CPU-only build (no NVIDIA driver here)")


@pytest.mark.parametrize("mode", ["auto", "system", "wheel", "off"])
def test_only_here_looks_at_the_machine(machine, mode):
    assert toolkit.settle_mode(mode) == toolkit.settle_mode(mode, True) == mode


def planned(*arguments: str, **environment: str) -> list[str]:
    """The builds that make would run."""
    own = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "SPARSE_MLA_CUDA", "DEBUG", "SANITIZE", "COVERAGE")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    done = subprocess.run(
        command, cwd=BUILDTOOLS.parent, env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [
        line for line in done.stdout.splitlines() if re.search(r"setup\.py -q|toolkit\.py", line)
    ]
    assert lines
    return lines


@pytest.mark.parametrize("target", ["demo", "bench", "test", "test-python", "test-c", "examples-c"])
def test_targets_that_run_here_build_for_here(target):
    assert all("SPARSE_MLA_CUDA=here " in line for line in planned(target))
    for lines in (
        planned(target, SPARSE_MLA_CUDA="system"),
        planned(target, "SPARSE_MLA_CUDA=off"),
    ):
        assert not any("=here " in line for line in lines)
        assert all(re.search("SPARSE_MLA_CUDA=(system|off) ", line) for line in lines)


@pytest.mark.parametrize("target", ["build", "lint", "lib", "test-gpu", "wheel"])
def test_other_targets_build_for_every_machine(target):
    assert not any("SPARSE_MLA_CUDA" in line for line in planned(target))


# --- the compiler --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["/nope", "/nope --sysroot=/"])
def test_a_compiler_that_was_named_is_taken_or_is_an_error(graph, monkeypatch, tmp_path, command):
    monkeypatch.setenv("CC", command)
    with pytest.raises(SystemExit, match=f"^error: CC={command}: there is no such command$"):
        graph.c_compiler()
    monkeypatch.setattr(graph, "BUILD", tmp_path)
    monkeypatch.setattr(graph, "check_header_version", lambda version: None)
    (tmp_path / "build.ninja").write_text("as before")
    with pytest.raises(SystemExit):
        graph.write_graph("0.1.0")
    assert (tmp_path / "build.ninja").read_text() == "as before"
    monkeypatch.setenv("CC", "sh -c")
    assert graph.c_compiler() == "sh -c"


def test_builds_in_one_folder_wait_for_each_other(graph, tmp_path, monkeypatch):
    """Before, `make lint` beside `make build` left objects whose headers ninja had forgotten."""
    monkeypatch.setenv("PYTHONPATH", str(BUILDTOOLS))
    code = """if True:
        import graph, pathlib, sys
        print("here", flush=True)
        with graph.alone_in(pathlib.Path(sys.argv[1])):
            print("alone")
    """
    command = [sys.executable, "-c", code, str(tmp_path / "build")]
    with graph.alone_in(tmp_path / "build"):
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == "here\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=0.5)
    assert other.communicate(timeout=60) == ("alone\n", None)
    assert other.returncode == 0


# --- free-threaded CPython -----------------------------------------------------------------------

FREE_THREADED = {
    "Py_GIL_DISABLED": 1,
    "SOABI": "cpython-313t-x86_64-linux-gnu",
    "EXT_SUFFIX": ".cpython-313t-x86_64-linux-gnu.so",
}
# Runs setup.py's commands up to their options, under the configuration of another Python.
ASK_SETUP = """if True:
    import json, sys, sysconfig
    sysconfig.get_config_vars().update(json.loads(sys.argv.pop(1)))
    import setuptools # and its distutils
    import distutils.core
    distribution = distutils.core.run_setup("setup.py", stop_after="config")
    wheel = distribution.get_command_obj("bdist_wheel")
    wheel.ensure_finalized()
    build = distribution.get_command_obj("build_ext")
    build.ensure_finalized()
    import graph
    print(*wheel.get_tag()[:2], build.get_ext_filename("sparse_mla._C"), graph.EXTENSION.name,
          any("Py_LIMITED_API" in flag for flag in graph.API_FLAGS))
"""


def ask_setup(**changes) -> list[str]:
    """The tags of a wheel, the extension's file in it and in build/, whether its API is limited."""
    # Some versions of setuptools assert that this very Python could import the wheel; -O: none.
    command = [sys.executable, "-O", "-W", "ignore", "-c", ASK_SETUP]
    done = subprocess.run(
        [*command, json.dumps(changes)], cwd=BUILDTOOLS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_wheel_serves_every_python_that_has_the_stable_abi():
    require("setuptools")
    file = "sparse_mla/_C.abi3.so"
    assert ask_setup(Py_GIL_DISABLED=0) == ["cp311", "abi3", file, "_C.abi3.so", "True"]


def test_a_free_threaded_python_has_a_wheel_of_its_own():
    """Its limited API would end in an #error, and a file of the stable ABI would crash it."""
    require("setuptools")
    python, abi, file, built, is_limited = ask_setup(**FREE_THREADED)
    assert python == f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert abi == "cp313t"
    assert file == "sparse_mla/_C.cpython-313t-x86_64-linux-gnu.so"
    assert built == "_C.cpython-313t-x86_64-linux-gnu.so"
    assert is_limited == "False"


# Copies a built extension into a package that has those of other Pythons.
COPY_EXTENSION = """if True:
    import sys
    from pathlib import Path
    import setuptools # and its distutils
    import distutils.core
    root = Path(sys.argv.pop(1))
    distribution = distutils.core.run_setup("setup.py", stop_after="config")
    build = distribution.get_command_obj("build_ext")
    build.build_lib = str(root)
    build.ensure_finalized()
    build.inplace = False
    import graph
    graph.EXTENSION = root / "built"
    type(build).build_extension.__globals__["run_ninja"] = lambda *targets: None
    build.build_extension(build.extensions[0])
"""


@pytest.mark.parametrize("before", [(), ("_C.abi3.so",), ("_C.cpython-313t-x86_64-linux-gnu.so",)])
def test_a_package_has_the_extension_of_one_python(tmp_path, before):
    """A wheel must not carry an earlier build for another Python, nor must that be imported."""
    require("setuptools")
    package = tmp_path / "sparse_mla"
    package.mkdir()
    for name in (*before, "_C.pyi"):
        (package / name).write_text("other")
    (tmp_path / "built").write_text("this")
    command = [sys.executable, "-W", "ignore", "-c", COPY_EXTENSION, tmp_path]
    clean = {name: value for name, value in os.environ.items() if name != "FULL_API"}
    subprocess.run(command, cwd=BUILDTOOLS.parent, env=clean, check=True)
    found = {file.name: file.read_text() for file in package.iterdir()}
    is_limited = not sysconfig.get_config_var("Py_GIL_DISABLED")
    own = "_C.abi3.so" if is_limited else "_C" + sysconfig.get_config_var("EXT_SUFFIX")
    assert found == {own: "this", "_C.pyi": "other"}


@pytest.mark.parametrize("empty", ["", " "])
def test_no_name_is_the_first_compiler_there_is(graph, monkeypatch, empty):
    monkeypatch.setenv("CC", empty)
    monkeypatch.setattr(graph.sysconfig, "get_config_var", lambda name: "/nope")
    monkeypatch.setattr(graph.shutil, "which", lambda name: name == "gcc" or None)
    assert graph.c_compiler() == "gcc"
    monkeypatch.setattr(graph.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"^error: no C compiler"):
        graph.c_compiler()


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(str(BUILDTOOLS))
    return load("release")


def test_a_release_s_wheel_is_for_the_promised_glibc(release):
    for tags in ("manylinux_2_28_x86_64", "manylinux2014_aarch64.manylinux_2_17_aarch64"):
        release.require_platform(Path(f"dist/a-1+cpu-cp311-abi3-{tags}.whl"))
    for tag in ("manylinux_2_34_aarch64", "linux_aarch64"):
        with pytest.raises(SystemExit, match=rf"-{tag}\.whl is not for glibc 2\.28"):
            release.require_platform(Path(f"dist/a-1+cpu-cp311-abi3-{tag}.whl"))


def test_a_release_has_the_shim(release, tmp_path, monkeypatch):
    """Its .pth file lies where an installation puts it beside the package."""
    require("setuptools")
    monkeypatch.chdir(BUILDTOOLS.parent)
    release.build_shim(tmp_path)
    (wheel,) = tmp_path.glob("sparse_mla_flash_mla-*-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "sparse_mla_flash_mla.pth" in names
    assert {f"sparse_mla_flash_mla/{x}" for x in ("__init__.py", "flash_mla/__init__.py")} <= names


def test_auditwheel_names_the_platform_of_another_machine_s_wheel(release, monkeypatch):
    monkeypatch.setattr(release.platform, "machine", lambda: "x86_64")
    names = [f"a-1+cpu-cp311-abi3-linux_{machine}.whl" for machine in ("x86_64", "aarch64")]
    found = [release.platform_of(Path(name)) for name in names]
    assert found == ["manylinux_2_28_x86_64", "auto"]


def test_debian_s_headers_of_python_serve_a_cross_compiler(graph, monkeypatch, tmp_path):
    """Its pyconfig.h includes <aarch64-linux-gnu/python3.x/pyconfig.h>."""
    monkeypatch.setattr(graph, "BUILD", tmp_path)
    monkeypatch.setattr(graph.sysconfig, "get_config_var", lambda name: "x86_64-linux-gnu")
    for _ in range(2):
        alias = graph.alias_of_multiarch() / "aarch64-linux-gnu"
        assert alias.readlink() == Path("/usr/include/x86_64-linux-gnu")


def test_an_unknown_mode_is_an_error(machine, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CUDA", "yes")
    with pytest.raises(SystemExit, match="SPARSE_MLA_CUDA=yes: must be one of auto, system"):
        toolkit.selected_mode()


@pytest.mark.parametrize(
    ("mode", "driver", "toolkit_there", "count"),
    [
        ("auto", False, False, 0),
        ("auto", True, False, 5),
        ("auto", True, True, 0),
        ("wheel", False, True, 5),
        ("system", True, False, 0),
        ("off", True, False, 0),
    ],
)
def test_wheels_that_pip_is_asked_for(machine, monkeypatch, mode, driver, toolkit_there, count):
    if driver:
        (machine / "driver").touch()
    if toolkit_there:
        install(toolkit.STANDARD_PLACE)
    monkeypatch.setenv("SPARSE_MLA_CUDA", mode)
    wheels = toolkit.wanted_wheels()
    assert len(wheels) == count
    assert all(wheel.startswith("nvidia-") and "==" in wheel for wheel in wheels)


# What nvcc 13.0 prints for a kernel that calls a function, compiled for two architectures.
CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3addILi2EEvPfi' for 'sm_80'
ptxas info    : Function properties for _Z3addILi2EEvPfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 14.180 ms
ptxas info    : Function properties for _Z4helpPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3addILi2EEvPfi' for 'sm_90a'
ptxas info    : Function properties for _Z3addILi2EEvPfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers
ptxas info    : Compile time = 3.171 ms
"""
STACK = CLEAN.replace("0 bytes stack frame, 0 bytes", "32 bytes stack frame, 0 bytes", 1)
SPILL = "4 bytes spill loads".join(CLEAN.rsplit("0 bytes spill loads", 1))
ADVICE = CLEAN + "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized\n"
WARNING = CLEAN + "ptxas warning : Value of threads per SM is out of range\n"


def report(tmp_path: Path, output: str, *options: str, status: int = 0):
    """Runs ptxas.py on a compiler that prints `output`."""
    file = tmp_path / "output"
    file.write_text(output)
    compiler = ["sh", "-c", f"cat {file} >&2; exit {status}"]
    command = [BUILDTOOLS / "ptxas.py", "--title=nvcc", *options, tmp_path / "report", *compiler]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


def test_a_report_is_one_line_per_kernel_and_architecture(tmp_path):
    done = report(tmp_path, CLEAN, "--strict")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    title, header, *lines = (tmp_path / "report").read_text().splitlines()
    assert title == "nvcc"
    assert re.split("  +", header) == [
        *("arch", "registers", "stack", "spill stores", "spill loads", "shared", "kernel")
    ]
    numbers = [line.split()[:6] for line in lines]
    assert ["sm_80", "40", "0", "0", "0", "256"] in numbers
    assert ["sm_90a", "10", "0", "0", "0", "0"] in numbers
    assert ["sm_80", "-", "0", "0", "0", "0"] in numbers
    assert len(numbers) == 3


def code_of(name: str, products: int, waits: int) -> str:
    lines = ["HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR8]"] * products
    return "\n".join([f"Function : {name}", *lines, *["WARPGROUP.DEPBAR.LE gsb0, 0x0"] * waits])


def test_serialised_products_fail_the_build(tmp_path):
    """nvcc and cuobjdump are scripts in one folder."""
    output = tmp_path / "obj" / "some_sm90.cu.o"
    for name, text in (("nvcc", ""), ("cuobjdump", 'cat "$2"')):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
    output.parent.mkdir()
    command = [sys.executable, BUILDTOOLS / "ptxas.py", tmp_path / "report", tool.parent / "nvcc"]
    for waits, status in ((20, 0), (45, 1)):
        output.write_text(code_of("good", 60, 7) + "\n" + code_of("second", 50, waits))
        done = subprocess.run([*command, "-o", output], capture_output=True, text=True, check=False)
        assert done.returncode == status
        assert ("kernel second waits 45 times for 50 wgmma products" in done.stderr) == bool(status)


@pytest.mark.parametrize(
    ("output", "arch", "bytes_used"),
    [(STACK, "sm_80", "32 bytes of stack"), (SPILL, "sm_90a", "4 of loads")],
)
def test_local_memory_fails_the_build(tmp_path, output, arch, bytes_used):
    done = report(tmp_path, output)
    assert done.returncode == 1
    assert f" for {arch} uses local memory" in done.stderr
    assert bytes_used in done.stderr
    assert "add" in done.stderr
    assert (tmp_path / "report").exists()
    assert report(tmp_path, output, "--allow-spills").returncode == 0


@pytest.mark.parametrize("output", [ADVICE, WARNING])
def test_advice_is_shown_and_is_an_error_when_strict(tmp_path, output):
    lenient = report(tmp_path, output)
    assert lenient.returncode == 0
    assert lenient.stderr.strip() == output.splitlines()[-1]
    assert report(tmp_path, output, "--strict").returncode == 1


def test_the_compiler_s_failure_is_the_build_s(tmp_path):
    done = report(tmp_path, "file.cu(3): error: no such thing", status=2)
    assert done.returncode == 2
    assert "no such thing" in done.stderr


# --- stack frames --------------------------------------------------------------------------------


@pytest.fixture
def frames(graph, monkeypatch):
    """buildtools/frames.py, which imports graph.py as `python buildtools/frames.py` lets it."""
    monkeypatch.setitem(sys.modules, "graph", graph)
    return load("frames")


def report_frames(build: Path, *lines: str) -> str:
    """Writes the compiler's report of a file in csrc/."""
    folder = build / "obj/csrc/cpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.su").write_text("".join(f"{line}\n" for line in lines))
    return str(build)


def test_the_largest_frame_is_printed(frames, tmp_path, capsys):
    lines = "csrc/a.c:1:1:small\t16\tstatic", "csrc/a.c:9:1:large\t16384\tdynamic,bounded"
    assert frames.main(report_frames(tmp_path, *lines)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "16384" in printed[0]
    assert [line.split() for line in printed[1:]] == [
        ["16384", "csrc/a.c:9:1:large"],
        ["16", "csrc/a.c:1:1:small"],
    ]


@pytest.mark.parametrize(
    "line", ["csrc/a.c:9:1:large\t16385\tstatic", "csrc/a.c:9:1:large\t64\tdynamic"]
)
def test_a_frame_that_is_too_large(frames, tmp_path, capsys, line):
    assert frames.main(report_frames(tmp_path, "csrc/a.c:1:1:small\t16\tstatic", line)) == 1
    assert "error: csrc/a.c:9:1:large" in capsys.readouterr().out


def test_a_build_without_reports_of_frames(frames, tmp_path, capsys):
    assert frames.main(str(tmp_path)) == 1
    assert "no reports" in capsys.readouterr().out


@pytest.mark.parametrize("variant", ["release", "aarch64"])
def test_large_frames_do_not_compile(graph, monkeypatch, tmp_path, variant):
    monkeypatch.setattr(graph, "VARIANT", variant)
    monkeypatch.chdir(tmp_path)
    flags = graph.stack_flags(graph.c_compiler())
    assert "-fstack-clash-protection" in flags
    program = "void use(char *);\nvoid run(void) {{ char x[{}]; use(x); }}\n"

    def compiles(size):
        source = tmp_path / "a.c"
        source.write_text(program.format(size))
        command = [*graph.c_compiler().split(), "-O2", *flags, "-c", str(source)]
        return subprocess.run(command, capture_output=True).returncode == 0

    assert compiles(graph.MAX_FRAME - 512)
    assert not compiles(graph.MAX_FRAME + 512)


@pytest.mark.parametrize("variant", ["debug", "sanitize", "thread", "coverage", "fuzz"])
def test_other_builds_have_frames_of_any_size(graph, monkeypatch, variant):
    monkeypatch.setattr(graph, "VARIANT", variant)
    assert graph.stack_flags(graph.c_compiler()) == []
