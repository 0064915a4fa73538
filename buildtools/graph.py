"""The ninja graph: every C and CUDA file, its flags, and what is linked from the objects.

One table of flags per concern; folders are globbed, so a new file needs no edit here. setup.py and
the Makefile ask for targets by name: extension, lib, tests, fuzz.

Environment: CC, AR, CFLAGS and LDFLAGS have their usual meaning. DEBUG=1, SANITIZE=1,
SANITIZE=thread (gcc), COVERAGE=1, FUZZ=1 (clang) or AARCH64=1 (a cross compiler) choose a variant,
which has its own folder under build/. WERROR=1 turns warnings into errors. SPARSE_MLA_CUDA chooses
the CUDA toolkit, see toolkit.py. SPARSE_MLA_CUDA_ARCHS="80 90a" chooses the architectures that it
compiles for. SPARSE_MLA_GLIBC=2.28 links for that version of glibc, with ziglang. ALLOW_SPILLS=1
lets kernels use local memory. NVCC_APPEND_FLAGS=-lineinfo, which nvcc itself reads, tells profilers
the kernels' lines; it changes no code, and takes half as long again. FULL_API=1 builds the
extension for this version of CPython alone, as a free-threaded CPython always gets it. Where ccache
is installed, it keeps objects for later builds, unless CCACHE_DISABLE=1 is set.
"""

import contextlib
import fcntl
import functools
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

import toolkit

# Without contraction to FMA the plain C files round alike on every machine. Kernel files turn
# contraction on.
COMMON_FLAGS = """
    -std=c11 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Icsrc
    -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes
    -Werror=implicit-function-declaration
"""
SANITIZER = "-O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=undefined -fsanitize="
# With a sanitizer GCC takes more variables for uninitialized than are, as its manual says; the
# release build has that warning. Clang, which builds the fuzzers, does not know it.
FEWER_WARNINGS = " -Wno-maybe-uninitialized"
# Where functions begin moves the time of a short call by a tenth, so all begin at a cache line.
RELEASE = "-O2 -DNDEBUG -falign-functions=64"
VARIANTS = {  # flags to compile and to link with
    "release": RELEASE,
    "debug": "-O0 -g",
    "sanitize": SANITIZER + "address,undefined" + FEWER_WARNINGS,
    "thread": SANITIZER + "thread" + FEWER_WARNINGS,
    "coverage": "-O1 -g --coverage",
    "fuzz": SANITIZER + "address,undefined,fuzzer-no-link",
    "aarch64": RELEASE,  # cross-compiled
}
# Without exceptions, run-time types and guarded statics these objects need no C++ library, so that
# any C program can link them. nvcc runs one ptxas at a time (no --threads), because the reports of
# several would mix.
CUDA_FLAGS = """
    -std=c++17 -compress-mode=size -Icsrc -Xptxas=-v
    -Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics
    -Xcompiler=-Wall,-Wextra
"""
CUDA_VARIANTS = {  # the other variants are CPU-only; kernels are optimised in both
    "release": "-O3 -DNDEBUG",
    "debug": "-O0 -g",
}
MAX_FRAME = 16384  # bytes on the stack of a function in csrc/; frames.py prints the largest
SHARED = ["-shared", "-Wl,-z,nodelete"]  # the threads of pool.c stay, so its code has to
TEST_SHARED = [*SHARED, "-Wl,--exclude-libs,ALL"]  # do not export symbols of archives
CONFIG_FILES = (  # files of the C library, relative to its lib/
    "pkgconfig/sparse_mla.pc",
    "cmake/sparse_mla/sparse_mla-config.cmake",
    "cmake/sparse_mla/sparse_mla-config-version.cmake",
)
GLUE_FLAGS = """
    -DNPY_TARGET_VERSION=NPY_2_0_API_VERSION -DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION
"""


def is_on(switch):
    return os.environ.get(switch, "0") not in ("", "0")


def chosen_variant():
    variant = next((variant for variant in VARIANTS if is_on(variant.upper())), "release")
    threads = variant == "sanitize" and os.environ["SANITIZE"] == "thread"
    return "thread" if threads else variant


VARIANT = chosen_variant()
BUILD = Path("build", VARIANT)
PREFIX = Path("build") if VARIANT == "release" else BUILD  # has the C library's include/ and lib/
LIB = PREFIX / "lib"
# A free-threaded CPython has no limited API: an extension serves one version of it.
HAS_LIMITED_API = not (sysconfig.get_config_var("Py_GIL_DISABLED") or is_on("FULL_API"))
API_FLAGS = ["-DPy_LIMITED_API=0x030B0000"] if HAS_LIMITED_API else []
EXTENSION = BUILD / f"_C{'.abi3.so' if HAS_LIMITED_API else sysconfig.get_config_var('EXT_SUFFIX')}"

# A kernel file, mqa_kernel.c, is compiled once per instruction set that INSTANCES lists for
# it, to mqa_avx2.o, with csrc/cpu/isa/avx2.h in front. Sets of other machines are left out.
# SMLA_HAVE_X86_ISA or SMLA_HAVE_ARM_ISA tells the core which are compiled. Fuzzing tests the checks
# that come before the kernels. Clang would take minutes to compile the kernels with
# instrumentation, so these have none, and only those of the base instruction set.
MACHINE = {"aarch64": "aarch64", "fuzz": "base"}.get(VARIANT, platform.machine())
OPTIMISED = {"release": " -O3", "aarch64": " -O3", "fuzz": " -fno-sanitize=all"}
FAST = ("release", "aarch64")  # kernels have all calls inlined: csrc/cpu/machine/simd.h
KERNEL = "-ffp-contract=fast" + OPTIMISED.get(VARIANT, "")
AVX2 = f"{KERNEL} -mavx2 -mfma -mf16c"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
AVX512BF16 = f"{AVX512} -mavx512vbmi -mavx512bf16"
FLAGS_BY_MACHINE = {
    "x86_64": {
        "avx2": AVX2,
        "avx512": AVX512,
        "avx512bf16": AVX512BF16,
        "amx": f"{AVX512BF16} -mamx-tile -mamx-bf16",
    },
    "aarch64": {
        "neon": KERNEL,
        "neonbf16": f"{KERNEL} -march=armv8.2-a+bf16",
    },
}
ISA_DEFINES = {"x86_64": ["-DSMLA_HAVE_X86_ISA=1"], "aarch64": ["-DSMLA_HAVE_ARM_ISA=1"]}
ISA_FLAGS = {"base": KERNEL, **FLAGS_BY_MACHINE.get(MACHINE, {})}
# These folders' kernels round every product, so that all machines give the same bytes.
WITHOUT_FMA = {"norm", "rope"}
INSTANCES = Path("csrc/cpu/isa/instances.h")


def suffix(source):
    return source.stem.rpartition("_")[2]


def instances():
    """Kernel → the instruction sets that it is compiled for, on any machine."""
    found = {}
    for kernel, isa in re.findall(r"^ +X\((\w+), (\w+)\)", INSTANCES.read_text(), re.MULTILINE):
        found.setdefault(kernel, []).append(isa)
    return found


def sets_of(source):
    """The instruction sets that a file is compiled for here, or "", that of every machine."""
    if suffix(source) != "kernel":
        return [""]
    return [isa for isa in instances()[source.stem.removesuffix("_kernel")] if isa in ISA_FLAGS]


def object_of(source, isa="", folder="obj"):
    stem = f"{source.stem.removesuffix('kernel')}{isa}" if isa else source.stem
    return BUILD / folder / source.with_name(f"{stem}.o")


# Code for sm_80 runs on GPUs of compute capability 8.x, and its PTX on all newer GPUs. Code for
# sm_90a runs on Hopper only. Files whose names end in _sm90 have no code for other GPUs.
CUDA_ARCHS = os.environ.get("SPARSE_MLA_CUDA_ARCHS", "").split() or ["80", "90a"]
ARCHS_BY_SUFFIX = {"sm90": ["90a"]}

# They are compiled first, so that no core waits for the last of them.
SLOW_KERNELS = ("compressor", "attention_fp8_sm90", "attention_small_sm90", "attention_sm80")
SLOW_KERNELS += ("varlen_attention", "attention_bf16_sm90", "scaled_quantize")


def c_files(*folders, pattern="**/*.c"):
    return sorted(path for folder in folders for path in Path(folder).glob(pattern))


def cuda_files():
    files = sorted(Path("csrc/cuda").rglob("*.cu"))
    return sorted(files, key=lambda file: file.stem not in SLOW_KERNELS)


CORE = ("csrc/core", "csrc/ops", "csrc/step", "csrc/cpu")


def package_include(package, folder):
    """The header folder of a package, found without an import, because tvm_ffi would load torch."""
    spec = importlib.util.find_spec(package)
    if spec is None or not (path := Path(spec.origin).parent / folder).is_dir():
        sys.exit(f"error: the build needs {package}, see build-system.requires in pyproject.toml")
    return path


def python_include():
    path = Path(sysconfig.get_path("include"))
    if not (path / "Python.h").exists():
        sys.exit(f"error: no Python.h in {path}: install Python's headers (python3-dev)")
    return path


def alias_of_multiarch():
    """Debian's pyconfig.h includes the one of the target's Python, which is not here. This
    machine's is its equal in what the stable ABI uses."""
    folder = BUILD / "multiarch"
    folder.mkdir(parents=True, exist_ok=True)
    alias = folder / "aarch64-linux-gnu"
    alias.unlink(missing_ok=True)
    alias.symlink_to(Path("/usr/include", sysconfig.get_config_var("MULTIARCH")))
    return folder


def alias_of_dlpack():
    """A folder with DLPack's header, whose name is the same in every environment. ccache finds an
    object again only where all options are the same."""
    folder = BUILD / "headers"
    folder.mkdir(parents=True, exist_ok=True)
    alias = folder / "dlpack"
    alias.unlink(missing_ok=True)
    alias.symlink_to(package_include("tvm_ffi", "include/dlpack"))
    return folder


def compiler_cache():
    return ["ccache"] if shutil.which("ccache") else []


def public_headers():
    """Installed name → source of the headers that callers include."""
    csrc, dlpack = Path("csrc"), Path("dlpack/dlpack.h")
    ours = [csrc / "sparse_mla.h", *sorted(csrc.glob("sparse_mla/*.h"))]
    return {
        **{path.relative_to(csrc): path for path in ours},
        dlpack: package_include("tvm_ffi", "include") / dlpack,
    }


def c_compiler():
    """$CC, else the compiler that built Python, else the first of cc, gcc and clang."""
    named = os.environ.get("CC", "").strip()
    for command in [named] if named else [sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]:
        if command and shutil.which(shlex.split(command)[0]):
            return command
    if named:
        sys.exit(f"error: CC={named}: there is no such command")
    sys.exit("error: no C compiler: install gcc or clang, or name one in CC")


def openmp_flags(cc):
    """Flags to compile and to link parallel loops. GCC's run on csrc/cpu/machine/pool.c instead of
    its OpenMP library, so nothing links that."""
    program = "#if !defined(__clang__)\n#error\n#endif\n"
    is_clang = compiles(cc, program, "-fsyntax-only")
    if not is_clang and compiles(cc, "int x;", "-fopenmp", "-fsyntax-only"):
        return ["-fopenmp"], ["-pthread"]
    program = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
    if is_clang and compiles(cc, program, "-fopenmp"):
        return ["-fopenmp"], ["-fopenmp"]
    print(f"note: `{cc}` has no OpenMP: the kernels will run on one thread")
    return ["-Wno-unknown-pragmas"], []


def stack_flags(cc):
    """Flags that bound the frames of functions, because callers' threads may have stacks of 64 KiB.
    Compilers spell them in different ways. Sanitizers and builds without optimisation have larger
    frames."""
    if VARIANT not in OPTIMISED or VARIANT == "fuzz":
        return []
    choices = [
        [f"-Werror=frame-larger-than={MAX_FRAME}"],  # GCC's
        [f"-Wframe-larger-than={MAX_FRAME}", "-Werror=frame-larger-than"],  # Clang's
    ]
    wanted = [choices, [["-fstack-clash-protection"]], [["-fstack-usage"]]]  # frames.py reads these
    known = functools.partial(compiles, cc, "", "-E", "-Werror")  # leaves no file
    return [flag for alike in wanted for flag in next((x for x in alike if known(*x)), [])]


def compiles(cc, program, *flags):
    command = [*shlex.split(cc), *flags, "-x", "c", "-", "-o", os.devnull]
    return subprocess.run(command, input=program, text=True, capture_output=True).returncode == 0


def linker_for_glibc(cc):
    """The linker and its own libraries. SPARSE_MLA_GLIBC=2.28 links with ziglang, for machines of
    that glibc and later. GCC's support library comes first, because the kernels are GCC's."""
    glibc = os.environ.get("SPARSE_MLA_GLIBC")
    if not glibc:
        return "$cc", []
    command = [*shlex.split(cc), "-print-libgcc-file-name"]
    libgcc = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout.strip()
    return f"{sys.executable} -m ziglang cc -target {MACHINE}-linux-gnu.{glibc}", [libgcc]


def portable_arch():
    """The newest architecture whose PTX later ones accept, or None."""
    return max((arch for arch in CUDA_ARCHS if arch.isdecimal()), key=int, default=None)


def code_flags(archs):
    for arch in archs:
        if not re.fullmatch(r"([89]|1\d)\d[af]?", arch):
            sys.exit(f"error: SPARSE_MLA_CUDA_ARCHS: {arch} is no architecture: 80, 90a, 120, …")
        code = f"[sm_{arch},compute_{arch}]" if arch == portable_arch() else f"sm_{arch}"
        yield f"-gencode=arch=compute_{arch},code={code}"


def has_built_cuda():
    """Whether the extension of an earlier build is complete and has CUDA."""
    return EXTENSION.exists() and b"none: CPU-only build" not in EXTENSION.read_bytes()


def find_cuda():
    """The toolkit, or None, and what build_info() says about it."""
    asked = toolkit.selected_mode()
    mode = toolkit.settle_mode(asked, has_built_cuda())
    found = toolkit.find_toolkit(mode) if VARIANT in CUDA_VARIANTS else None
    if found:
        fact = f"{found.version} from {found.origin}"
        ptx = f", compute_{portable_arch()} (PTX)" if portable_arch() else ""
        archs = f"sm_{', sm_'.join(CUDA_ARCHS)}{ptx}"
    else:
        if VARIANT not in CUDA_VARIANTS:
            fact = f"CPU-only build, as always for variant {VARIANT}"
        else:
            chosen = "no NVIDIA driver here" if asked == "here" else "SPARSE_MLA_CUDA=off"
            reason = chosen if mode == "off" else "no CUDA toolkit found"
            fact = f"CPU-only build ({reason}); {toolkit.HOW_TO_GET_CUDA}"
        toolkit.note(fact)
        fact, archs = f"none: {fact}", "none"
    return found, {"SMLA_BUILD_CUDA": fact, "SMLA_BUILD_CUDA_ARCHS": archs}


def check_header_version(version):
    header = Path("csrc/sparse_mla/status.h")
    defines = re.findall(r"^#define SMLA_VERSION_(\w+) (\d+)$", header.read_text(), re.MULTILINE)
    if (found := "{MAJOR}.{MINOR}.{PATCH}".format(**dict(defines))) != version:
        sys.exit(f"error: version {found} in {header}, {version} in pyproject.toml")


def module_flags(cc, version, cuda_facts):
    """Flags for module.c alone: the facts of build_info(), and no warning that PyInit__C has no
    prototype."""
    banner = subprocess.run([*shlex.split(cc), "--version"], text=True, capture_output=True).stdout
    facts = {
        "SMLA_VERSION_STRING": version,
        "SMLA_BUILD_COMPILER": banner.partition("\n")[0],
        "SMLA_BUILD_FLAGS": "release" if VARIANT == "aarch64" else VARIANT,
        **cuda_facts,
    }
    return ["-Wno-missing-prototypes", *(f'-D{name}="{fact}"' for name, fact in facts.items())]


def nvcc_command(cuda, include):
    """nvcc as buildtools/ptxas.py runs it; `$report` is a variable of the ninja edge."""
    # The title shows the version in the report, and makes ninja compile again after an update of
    # the toolkit.
    command = [sys.executable, "buildtools/ptxas.py", f"--title=nvcc {cuda.version}"]
    command += ["--strict"] if is_on("WERROR") else []
    command += ["--allow-spills"] if is_on("ALLOW_SPILLS") or VARIANT != "release" else []
    command += [
        "$report",
        *compiler_cache(),
        cuda.nvcc,
        *CUDA_FLAGS.split(),
        *CUDA_VARIANTS[VARIANT].split(),
    ]
    command += ["-Werror=all-warnings"] if is_on("WERROR") else []
    return shlex.join(map(str, [*command, *include]))


class Graph:
    """build.ninja under construction: `compile` and `link` add edges and return their outputs."""

    def __init__(self, file, version):
        from ninja.ninja_syntax import Writer

        self.cc = c_compiler()
        self.cuda, self.cuda_facts = find_cuda()
        openmp, threads = openmp_flags(self.cc)
        self.stack = stack_flags(self.cc)
        flags = [*COMMON_FLAGS.split(), *VARIANTS[VARIANT].split()]
        flags += [] if VARIANT in FAST else ["-DSMLA_FREE_INLINING=1"]
        dlpack = ["-isystem", str(alias_of_dlpack())]
        flags += dlpack
        flags += ISA_DEFINES.get(MACHINE, [])
        flags += ["-DSMLA_HAVE_CUDA=1"] if self.cuda else []
        flags += ["-Werror"] if is_on("WERROR") else []
        cflags, ldflags = (os.environ.get(name, "") for name in ("CFLAGS", "LDFLAGS"))
        ar = os.environ.get("AR", "ar")
        libs = ["-lm", *threads]
        if self.cuda:
            libs += [f"-L{self.cuda.lib}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]

        self.writer = Writer(file, width=1000)
        self.writer.variable("builddir", str(BUILD))
        self.writer.variable("cc", f"{self.cc} {shlex.join(flags)} {cflags}")
        self.compile_rule("cc", " ".join([*compiler_cache(), "$cc", *openmp]))
        linker, more_libs = linker_for_glibc(self.cc)
        libs += more_libs
        self.rule("link", f"{linker} -o $out $in $extra {ldflags} {shlex.join(libs)}")
        self.rule("ar", f"rm -f $out && {ar} rcs $out $in")
        self.rule("copy", "cp $in $out")
        self.rule("symlink", "ln -sf $$(basename $in) $out")
        private = shlex.join(libs)
        edits = (
            f"s|@VERSION@|{version}|; s|@MAJOR@|{version.partition('.')[0]}|; s|@LIBS@|{private}|"
        )
        self.rule("fill", f"sed '{edits}' $in > $out")
        if self.cuda:
            self.compile_rule("nvcc", nvcc_command(self.cuda, dlpack))

    def rule(self, name, command, **options):
        self.writer.rule(name, command, description=f"{name} $out", **options)

    def compile_rule(self, name, compiler):
        command = f"{compiler} $extra -MMD -MF $out.d -c $in -o $out"
        self.rule(name, command, depfile="$out.d", deps="gcc")

    def add(self, rule, output, inputs, extra=(), **options):
        options.setdefault("variables", {})["extra"] = shlex.join(map(str, extra))
        return self.writer.build(str(output), rule, [str(path) for path in inputs], **options)[0]

    def compile(self, source, *extra, isa="", folder="obj"):
        """Compiles a file, for an instruction set where it is a kernel file."""
        own = [*ISA_FLAGS[isa].split(), "-include", INSTANCES.with_name(f"{isa}.h")] if isa else []
        if source.parent.name in WITHOUT_FMA:
            own.append("-ffp-contract=off")
        stack = self.stack if source.parts[0] == "csrc" else []
        return self.add("cc", object_of(source, isa, folder), [source], [*extra, *own, *stack])

    def compile_cuda(self, source):
        return self.add(
            "nvcc",
            BUILD / "obj" / f"{source}.o",
            [source],
            code_flags(ARCHS_BY_SUFFIX.get(suffix(source), CUDA_ARCHS)),
            implicit="buildtools/ptxas.py",
            variables={"report": BUILD / "ptxas" / f"{source.stem}.txt"},
        )

    def name(self, target, outputs):
        self.writer.build(target, "phony", [str(path) for path in outputs])


@contextlib.contextmanager
def alone_in(folder):
    """Waits until no other process is in this context with the same folder. Where two ninjas
    compile a file at once, one of them forgets which headers it includes, without a word, and an
    edit of those headers no longer compiles it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield


def write_graph(version):
    """Writes build.ninja and returns its path."""
    check_header_version(version)
    c_compiler()  # without one this exits, and an earlier graph stays as it is
    path = BUILD / "build.ninja"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        graph = Graph(file, version)
        core = [graph.compile_cuda(source) for source in cuda_files()] if graph.cuda else []
        core += [
            graph.compile(source, "-DSMLA_BUILD_SHARED", isa=isa)
            for source in c_files(*CORE)
            for isa in sets_of(source)
        ]
        if graph.cuda:
            core += [
                graph.compile(source, "-DSMLA_BUILD_SHARED", "-isystem", graph.cuda.include)
                for source in c_files("csrc/cuda")
            ]
        archive = graph.add("ar", LIB / "libsparse_mla.a", core)
        glue = add_extension(graph, archive, version)
        add_library(graph, core, archive, version)
        libraries = []
        if VARIANT != "aarch64":  # a cross compiler has no Python that could load them
            libraries = [add_fake_gpu(graph, glue), add_ranges(graph, archive)]
        add_programs(graph, archive, libraries)
    return path


def add_extension(graph, archive, version):
    include = ["-isystem", python_include(), "-isystem", package_include("numpy", "_core/include")]
    if VARIANT == "aarch64" and sysconfig.get_config_var("MULTIARCH"):
        include += ["-isystem", alias_of_multiarch()]
    flags = [*API_FLAGS, *GLUE_FLAGS.split(), *include]
    own_flags = {"module": module_flags(graph.cc, version, graph.cuda_facts)}
    glue = [
        graph.compile(source, *flags, *own_flags.get(source.stem, ()))
        for source in c_files("csrc/python")
    ]
    exports = "-Wl,--version-script=buildtools/extension.map"
    graph.name("extension", [graph.add("link", EXTENSION, [*glue, archive], [*SHARED, exports])])
    return glue


def add_fake_gpu(graph, glue):
    """Links the extension once more, for tests/kit/fake_gpu.py: csrc/cuda's host files run on a
    CUDA runtime made of plain memory, and the CPU's kernels replace CUDA's. cuBLAS is left out."""
    flags = ["-DSMLA_HAVE_CUDA=1", "-isystem", "tests/c/fake_cuda"]
    core = [source for source in c_files(*CORE, "csrc/cuda") if suffix(source) != "cublas"]
    core.append(Path("tests/c/fake_cuda/gpu.c"))
    objects = [
        graph.compile(source, *flags, folder="obj/fake_gpu")
        if source.name == "backends.c" or "cuda" in str(source.parent)
        else str(object_of(source, isa))
        for source in core
        for isa in sets_of(source)
    ]
    return graph.add("link", BUILD / "tests" / "fake_gpu.so", [*glue, *objects], TEST_SHARED)


def add_ranges(graph, archive):
    """Links the library of tests/attention/test_ranges.py."""
    ranges = graph.compile(Path("tests/c/ranges/ranges.c"))
    return graph.add("link", BUILD / "tests" / "ranges.so", [ranges, archive], TEST_SHARED)


def shared_name(version):
    return f"libsparse_mla.so.{version.partition('.')[0]}"


def add_library(graph, core, archive, version):
    soname = shared_name(version)
    exports = "-Wl,--version-script=buildtools/library.map"
    shared = graph.add("link", LIB / soname, core, [*SHARED, exports, f"-Wl,-soname,{soname}"])
    outputs = [archive, shared, graph.add("symlink", LIB / "libsparse_mla.so", [shared])]
    for name, source in public_headers().items():
        outputs.append(graph.add("copy", PREFIX / "include" / name, [source]))
    for name in CONFIG_FILES:
        template = Path("buildtools", Path(name).name + ".in")
        outputs.append(graph.add("fill", LIB / name, [template]))
    graph.name("lib", outputs)


def add_programs(graph, archive, others):
    """Links the programs of tests/c: fuzz_*.c are libFuzzer targets, the others are test programs
    that assert(). The tests of csrc/cuda's host files contain a fake CUDA runtime. Without a
    toolkit they also take its headers from tests/c/fake_cuda. `others` are built with the tests."""
    cuda_headers = graph.cuda.include if graph.cuda else "tests/c/fake_cuda"
    programs = {"tests": [*others], "fuzz": []}
    for source in c_files("tests/c", pattern="*.c"):
        kind = "fuzz" if source.stem.startswith("fuzz_") else "tests"
        options = ["-fsanitize=fuzzer"] if kind == "fuzz" else []
        objects = [graph.compile(source, "-UNDEBUG", "-isystem", cuda_headers), archive]
        programs[kind].append(graph.add("link", BUILD / kind / source.stem, objects, options))
    for kind, outputs in programs.items():
        graph.name(kind, outputs)
