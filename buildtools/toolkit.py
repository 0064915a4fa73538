"""Finds the CUDA toolkit that compiles csrc/cuda, or tells why there is none.

SPARSE_MLA_CUDA=auto     the first of CUDA_HOME, nvcc on PATH, /usr/local/cuda, and NVIDIA's wheels
                         in site-packages; a CPU-only build where there is none
               =system   one of the first three; without one the build fails
               =wheel    NVIDIA's wheels; without them the build fails
               =off      a CPU-only build
               =here     auto where this machine has an NVIDIA driver, or has built CUDA already;
                         else off. `make demo` and `make test` ask for it: they need no kernels
                         that nothing here can run, and those take minutes to compile
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

MODES = ("auto", "system", "wheel", "off", "here")
OLDEST = (12, 8)  # the first with the Blackwell targets sm_100 and sm_120
STANDARD_PLACE = Path("/usr/local/cuda")
DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")
HOW_TO_GET_CUDA = (
    "for CUDA, build again with SPARSE_MLA_CUDA=auto and a CUDA toolkit installed, {}.{} or later, "
    "or with SPARSE_MLA_CUDA=wheel, which takes the compiler from PyPI"
).format(*OLDEST)


@dataclass(frozen=True)
class Toolkit:
    nvcc: Path
    version: str
    origin: str  # how nvcc was found: "CUDA_HOME", "PATH", "PyPI" or a folder
    include: Path  # folder of cuda_runtime_api.h
    lib: Path  # folder of libcudart_static.a


class Unusable(Exception):
    """Tells why an nvcc that exists cannot be used."""


def note(text):
    print(f"note: {text}", file=sys.stderr)


def selected_mode():
    mode = os.environ.get("SPARSE_MLA_CUDA") or "auto"
    if mode not in MODES:
        sys.exit(f"error: SPARSE_MLA_CUDA={mode}: must be one of {', '.join(MODES)}")
    return mode


def settle_mode(mode, has_built_cuda=False):
    """`here` as auto or off; any other mode as it is."""
    if mode != "here":
        return mode
    return "auto" if has_driver() or has_built_cuda else "off"


def find_toolkit(mode):
    """The toolkit that `mode` selects; None, which only auto and off give, is a CPU-only build."""
    if mode == "off":
        return None
    places = system_places() if mode in ("auto", "system") else []
    places += wheel_places() if mode in ("auto", "wheel") else []
    for nvcc, origin in places:
        try:
            return probe(nvcc, origin)
        except Unusable as reason:
            if origin == "CUDA_HOME":  # the user asked for this nvcc
                sys.exit(f"error: CUDA_HOME={os.environ['CUDA_HOME']}: {reason}")
            note(f"{nvcc} ({origin}) is not used: {reason}")
    if mode == "system":
        sys.exit(f"error: SPARSE_MLA_CUDA=system, and no CUDA toolkit found; {HOW_TO_GET_CUDA}")
    if mode == "wheel":
        require_wheels_exist()
        wheels = shlex.join(wheel_requirements())
        sys.exit(f"error: SPARSE_MLA_CUDA=wheel, and no wheels found: pip install {wheels}")
    return None


def system_places():
    """Every nvcc outside site-packages, and how it was found; the first choice comes first."""
    if home := os.environ.get("CUDA_HOME"):
        return [(Path(home, "bin/nvcc"), "CUDA_HOME")]
    on_path = [Path(folder, "nvcc") for folder in os.environ.get("PATH", "").split(os.pathsep)]
    places = [(nvcc, "PATH") for nvcc in on_path if os.access(nvcc, os.X_OK)]
    standard = STANDARD_PLACE / "bin/nvcc"
    return places + ([(standard, str(STANDARD_PLACE))] if standard.exists() else [])


def has_wheels():
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def has_driver():
    return any(os.path.exists(file) for file in DRIVER_FILES)


def require_wheels_exist():
    if not has_wheels():
        sys.exit("error: SPARSE_MLA_CUDA=wheel: NVIDIA's wheels are for Linux x86_64 and aarch64")


def wheel_places():
    """The nvcc of NVIDIA's wheels, which share one folder: for CUDA 13 that is nvidia/cu13."""
    folders = [Path(folder, "nvidia/cu13/bin/nvcc") for folder in sys.path]
    return [(nvcc, "PyPI") for nvcc in folders if has_wheels() and nvcc.exists()]


def probe(nvcc, origin):
    """Asks an nvcc for its version and folders, because it may be a script that starts another."""
    release = re.search(r"release (\d+)\.(\d+), V(\S+)", run(nvcc, "--version"))
    if release is None:
        raise Unusable("it does not tell its version")
    if tuple(map(int, release.groups()[:2])) < OLDEST:
        raise Unusable("CUDA {} is older than {}.{}".format(release[3], *OLDEST))
    require_host_compiler()
    plan = run(nvcc, "--dryrun", "-x", "cu", os.devnull, "-o", os.devnull)
    top = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)
    if top is None:
        raise Unusable("`nvcc --dryrun` does not tell its folder")
    root = Path(top[1].strip()).resolve()
    return Toolkit(
        nvcc=folder_of("nvcc", root, "bin") / "nvcc",
        version=release[3],
        origin=origin,
        include=folder_of("cuda_runtime_api.h", root, "include"),
        lib=folder_of("libcudart_static.a", root, "lib64", "lib"),
    )


def run(nvcc, *options):
    """What nvcc prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run([nvcc, *options], **pipes)
    except OSError as error:
        raise Unusable(f"cannot run {nvcc}: {error.strerror}") from error
    if done.returncode:
        raise Unusable(f"it fails: {done.stdout.strip() or 'without a message'}")
    return done.stdout


def folder_of(file, root, *names):
    folders = [root / name for name in names] + list(root.glob(f"targets/*/{names[-1]}"))
    for folder in folders:
        if (folder / file).exists():
            return folder
    raise Unusable(f"no {file} in {root}")


def require_host_compiler():
    """Exits where nvcc's host compiler is missing; nvcc's own message does not name g++."""
    compiler = os.environ.get("NVCC_CCBIN") or "g++"
    if shutil.which(compiler) is None:
        sys.exit(
            f"error: nvcc needs {compiler}, which is not here: install g++, "
            "or build without CUDA: SPARSE_MLA_CUDA=off"
        )


def wheel_requirements():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    return project["dependency-groups"]["cuda"]


def wanted_wheels():
    """What pip must install before the build. These are NVIDIA's wheels where they are asked for,
    and in mode auto where a GPU would otherwise stay unused. Nobody else downloads their 100 MB."""
    mode = settle_mode(selected_mode())
    if mode == "wheel":
        require_wheels_exist()
    elif mode != "auto" or not has_wheels() or not has_driver() or find_toolkit(mode):
        return []
    else:
        note("an NVIDIA driver and no CUDA toolkit: the compiler comes from PyPI")
    require_host_compiler()
    return wheel_requirements()


if __name__ == "__main__":  # tells make what pip has yet to install
    print(*([] if wheel_places() else wanted_wheels()))
