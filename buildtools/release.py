"""Builds the wheels of a release in dist/, and lets auditwheel judge them.

    python release.py [off] [system] [wheel] [aarch64]

Each argument is a value of SPARSE_MLA_CUDA, see toolkit.py, or `aarch64`: without CUDA, by a cross
compiler, and run under qemu where that is installed. The version gets what the wheel has of
CUDA: 0.1.0+cpu, 0.1.0+cu130. The wheel of shim/ is added. GCC compiles and ziglang links, because
its stubs of glibc keep the symbols old enough for manylinux_2_28. With the linker of Debian 12,
pthread_create and semaphores would bind the wheel to manylinux_2_34.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import toolkit

GLIBC = "2.28"
CROSS = {"AARCH64": "1", "CC": "aarch64-linux-gnu-gcc", "AR": "aarch64-linux-gnu-ar"}
QEMU = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max"]
BUILT, FINISHED = Path("build/wheels"), Path("dist")


def local_version(mode):
    found = toolkit.find_toolkit(mode)
    return "cu" + "".join(found.version.split(".")[:2]) if found else "cpu"


def build(mode):
    is_cross = mode == "aarch64"
    cuda = "off" if is_cross else mode
    for variant in ("release", "aarch64"):
        shutil.rmtree(f"build/{variant}/python", ignore_errors=True)
    command = [sys.executable, "setup.py", "-q", "egg_info", f"--tag-build=+{local_version(cuda)}"]
    command += ["bdist_wheel", "--dist-dir", str(BUILT)]
    command += ["--plat-name", "linux_aarch64"] if is_cross else []
    environment = {"SPARSE_MLA_CUDA": cuda, "SPARSE_MLA_GLIBC": GLIBC}
    environment |= CROSS if is_cross else {}
    subprocess.run(command, env=os.environ | environment, check=True)


def platform_of(wheel):
    """What auditwheel is asked for. It takes names of this machine's platforms alone, so that it
    finds those of another machine, and require_platform() compares."""
    ours = wheel.stem.endswith(platform.machine())
    return f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}" if ours else "auto"


def require_platform(wheel):
    """Exits where the wheel needs a newer glibc than promised."""
    newest = int(GLIBC.partition(".")[2])
    if not any(int(minor) <= newest for minor in re.findall(r"manylinux_2_(\d+)_", wheel.name)):
        sys.exit(f"error: {wheel.name} is not for glibc {GLIBC}")


def run_under_qemu(wheel):
    """Runs a C example on the library of a wheel for aarch64."""
    folder = Path("build/aarch64/wheel")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.unpack_archive(wheel, folder, "zip")
    package = folder.resolve() / "sparse_mla"
    program = str(folder / "decode")
    command = [CROSS["CC"], "examples/c/decode.c", f"-I{package}/include", f"-L{package}/lib"]
    command += [f"-Wl,-rpath,{package}/lib", "-lsparse_mla", "-lm", "-o", program]
    subprocess.run(command, check=True)
    subprocess.run([*QEMU, program], check=True)


def build_shim(target):
    """The wheel of the second distribution, shim/, which is Python alone."""
    with tempfile.TemporaryDirectory() as folder:  # setuptools leaves files beside the sources
        source = shutil.copytree("shim", Path(folder, "shim"))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--no-build-isolation", "-w", str(target)]
        subprocess.run([*command, str(source)], check=True)


def main():
    shutil.rmtree(BUILT, ignore_errors=True)
    for mode in sys.argv[1:] or ["off"]:
        build(mode)
    audit = [sys.executable, "-m", "auditwheel"]
    for wheel in sorted(BUILT.glob("*.whl")):
        repair = [*audit, "repair", "--plat", platform_of(wheel), "--wheel-dir", str(FINISHED)]
        subprocess.run([*repair, str(wheel)], check=True)
    for wheel in sorted(FINISHED.glob("*.whl")):
        require_platform(wheel)
        subprocess.run([*audit, "show", str(wheel)], check=True)
        if not wheel.stem.endswith(platform.machine()) and shutil.which(QEMU[0]):
            run_under_qemu(wheel)
    build_shim(FINISHED)


if __name__ == "__main__":
    main()
