"""The ninja graph: every C file, its flags, and what is linked from the objects.

One table of flags per concern; folders are globbed, so a new file needs no edit here. setup.py and
the Makefile ask for targets by name: extension, lib, tests, fuzz.

Environment: CC, AR, CFLAGS, LDFLAGS as everywhere. DEBUG=1, SANITIZE=1 or FUZZ=1 (clang) choose a
variant, which has its own folder under build/. WERROR=1 turns warnings into errors.
"""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Without contraction to FMA the plain C files round alike on every machine; kernel files opt in.
COMMON_FLAGS = """
    -std=c11 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Icsrc
    -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes
    -Werror=implicit-function-declaration
"""
SANITIZER = "-O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=undefined -fsanitize="
VARIANTS = {  # flags to compile and to link with
    "release": "-O2 -DNDEBUG",
    "debug": "-O0 -g",
    "sanitize": SANITIZER + "address,undefined",
    "fuzz": SANITIZER + "address,undefined,fuzzer-no-link",
}
GLUE_FLAGS = """
    -DPy_LIMITED_API=0x030B0000
    -DNPY_TARGET_VERSION=NPY_2_0_API_VERSION -DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION
"""


def is_on(switch):
    return os.environ.get(switch, "0") not in ("", "0")


VARIANT = next((v for v in VARIANTS if is_on(v.upper())), "release")
BUILD = Path("build", VARIANT)
LIB = Path("build/lib") if VARIANT == "release" else BUILD / "lib"
EXTENSION = BUILD / "_C.abi3.so"

# Kernel files end in their instruction set: attention_avx2.c. The x86 ones are left out on other
# machines; the core learns from SMLA_HAVE_X86_ISA whether they are there.
X86 = platform.machine() == "x86_64"
# Fuzzing is about what comes before them: instrumented by clang they would take minutes to compile.
KERNEL = "-ffp-contract=fast" + {"release": " -O3", "fuzz": " -fno-sanitize=all"}.get(VARIANT, "")
AVX512 = f"{KERNEL} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma"
X86_FLAGS = {
    "avx2": f"{KERNEL} -mavx2 -mfma -mf16c",
    "avx512": AVX512,
    "avx512bf16": f"{AVX512} -mavx512vbmi -mavx512bf16",
}
ISA_FLAGS = {"base": KERNEL, **X86_FLAGS}


def instruction_set(source):
    return source.stem.rpartition("_")[2]


def c_files(folder):
    """The C files of a folder that this machine compiles."""
    files = sorted(Path(folder).glob("*.c"))
    return [f for f in files if X86 or instruction_set(f) not in X86_FLAGS]


def package_include(package, folder):
    """The header folder of a package, found without importing it: tvm_ffi would load torch."""
    spec = importlib.util.find_spec(package)
    if spec is None or not (path := Path(spec.origin).parent / folder).is_dir():
        sys.exit(f"error: the build needs {package}, see build-system.requires in pyproject.toml")
    return path


def python_include():
    path = Path(sysconfig.get_path("include"))
    if not (path / "Python.h").exists():
        sys.exit(f"error: no Python.h in {path}: install Python's headers (python3-dev)")
    return path


def public_headers():
    """Installed name → source of the headers that callers include."""
    dlpack = Path("dlpack/dlpack.h")
    return {
        Path("sparse_mla.h"): Path("csrc/sparse_mla.h"),
        dlpack: package_include("tvm_ffi", "include") / dlpack,
    }


def c_compiler():
    """$CC, else the compiler that built Python, else what there is."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        if command and shutil.which(shlex.split(command)[0]):
            return command
    sys.exit("error: no C compiler: install gcc or clang, or name one in CC")


def openmp_flags(cc):
    program = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
    command = [*shlex.split(cc), "-fopenmp", "-x", "c", "-", "-o", os.devnull]
    if subprocess.run(command, input=program, text=True, capture_output=True).returncode == 0:
        return ["-fopenmp"]
    print(f"note: `{cc}` does not link OpenMP programs: the kernels will run on one thread")
    return []


def check_header_version(version):
    header = Path("csrc/sparse_mla.h").read_text()
    parts = dict(re.findall(r"^#define SMLA_VERSION_(\w+) (\d+)$", header, re.MULTILINE))
    if (found := "{MAJOR}.{MINOR}.{PATCH}".format(**parts)) != version:
        sys.exit(f"error: version {found} in csrc/sparse_mla.h, {version} in pyproject.toml")


def module_flags(cc, version):
    """Flags of module.c alone: the facts of build_info(), and PyInit__C has no prototype."""
    banner = subprocess.run([*shlex.split(cc), "--version"], text=True, capture_output=True).stdout
    facts = {
        "SMLA_VERSION_STRING": version,
        "SMLA_BUILD_COMPILER": banner.partition("\n")[0],
        "SMLA_BUILD_FLAGS": VARIANT,
        "SMLA_BUILD_CUDA": "none: CPU-only build, this version has no CUDA backend",
    }
    return ["-Wno-missing-prototypes", *(f'-D{name}="{fact}"' for name, fact in facts.items())]


class Graph:
    """build.ninja under construction: `compile` and `link` add edges and return their outputs."""

    def __init__(self, file, version):
        from ninja.ninja_syntax import Writer

        self.cc = c_compiler()
        openmp = openmp_flags(self.cc)
        flags = [*COMMON_FLAGS.split(), *VARIANTS[VARIANT].split()]
        flags += openmp or ["-Wno-unknown-pragmas"]
        flags += ["-isystem", str(package_include("tvm_ffi", "include"))]
        flags += ["-DSMLA_HAVE_X86_ISA=1"] if X86 else []
        flags += ["-Werror"] if is_on("WERROR") else []
        cflags, ldflags = (os.environ.get(name, "") for name in ("CFLAGS", "LDFLAGS"))
        ar = os.environ.get("AR", "ar")
        libs = shlex.join([*openmp, "-lm"])

        self.writer = Writer(file, width=1000)
        self.writer.variable("builddir", str(BUILD))
        self.writer.variable("cc", f"{self.cc} {shlex.join(flags)} {cflags}")
        self.rule("cc", "$cc $extra -MMD -MF $out.d -c $in -o $out", depfile="$out.d", deps="gcc")
        self.rule("link", f"$cc -o $out $in $extra {ldflags} -lm")
        self.rule("ar", f"rm -f $out && {ar} rcs $out $in")
        self.rule("copy", "cp $in $out")
        self.rule("symlink", "ln -sf $$(basename $in) $out")
        self.rule("pkgconfig", f"sed 's|@VERSION@|{version}|; s|@LIBS@|{libs}|' $in > $out")

    def rule(self, name, command, **options):
        self.writer.rule(name, command, description=f"{name} $out", **options)

    def add(self, rule, output, inputs, extra=()):
        extra = shlex.join(map(str, extra))
        inputs = [str(path) for path in inputs]
        return self.writer.build(str(output), rule, inputs, variables={"extra": extra})[0]

    def compile(self, source, *extra):
        isa = ISA_FLAGS.get(instruction_set(source), "").split()
        return self.add("cc", BUILD / "obj" / source.with_suffix(".o"), [source], [*extra, *isa])

    def name(self, target, outputs):
        self.writer.build(target, "phony", [str(path) for path in outputs])


def write_graph(version):
    """Writes build.ninja and returns its path."""
    check_header_version(version)
    path = BUILD / "build.ninja"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        graph = Graph(file, version)
        core = [
            graph.compile(source, "-DSMLA_BUILD_SHARED")
            for source in c_files("csrc") + c_files("csrc/cpu")
        ]
        archive = graph.add("ar", LIB / "libsparse_mla.a", core)
        add_extension(graph, archive, version)
        add_library(graph, core, archive, version)
        add_programs(graph, archive)
    return path


def add_extension(graph, archive, version):
    include = ["-isystem", python_include(), "-isystem", package_include("numpy", "_core/include")]
    own_flags = {"module": module_flags(graph.cc, version)}
    glue = [
        graph.compile(source, *GLUE_FLAGS.split(), *include, *own_flags.get(source.stem, ()))
        for source in c_files("csrc/python")
    ]
    # The core's symbols stay inside: a libsparse_mla in the same process must not replace them.
    options = ["-shared", "-Wl,--exclude-libs,ALL"]
    graph.name("extension", [graph.add("link", EXTENSION, [*glue, archive], options)])


def add_library(graph, core, archive, version):
    soname = f"libsparse_mla.so.{version.partition('.')[0]}"
    shared = graph.add("link", LIB / soname, core, ["-shared", f"-Wl,-soname,{soname}"])
    outputs = [archive, shared, graph.add("symlink", LIB / "libsparse_mla.so", [shared])]
    for name, source in public_headers().items():
        outputs.append(graph.add("copy", LIB / "include" / name, [source]))
    config = LIB / "pkgconfig/sparse_mla.pc"
    outputs.append(graph.add("pkgconfig", config, ["buildtools/sparse_mla.pc.in"]))
    graph.name("lib", outputs)


def add_programs(graph, archive):
    """tests/c: fuzz_*.c are libFuzzer targets, the others programs of their own that assert()."""
    programs = {"tests": [], "fuzz": []}
    for source in c_files("tests/c"):
        kind = "fuzz" if source.stem.startswith("fuzz_") else "tests"
        options = ["-fsanitize=fuzzer"] if kind == "fuzz" else []
        objects = [graph.compile(source, "-UNDEBUG"), archive]
        programs[kind].append(graph.add("link", BUILD / kind / source.stem, objects, options))
    for kind, outputs in programs.items():
        graph.name(kind, outputs)
