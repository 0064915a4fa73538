"""Builds the wheels of a release in dist/, and lets auditwheel judge them.

    python release.py [off] [system] [wheel]

Each argument is a value of SPARSE_MLA_CUDA, see toolkit.py. The version gets what the wheel has of
CUDA: 0.1.0+cpu, 0.1.0+cu130. GCC compiles and ziglang links, because its stubs of glibc keep the
symbols old enough for manylinux_2_28. With the linker of Debian 12, pthread_create and semaphores
would bind the wheel to manylinux_2_34.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import toolkit

GLIBC = "2.28"
BUILT, FINISHED = Path("build/wheels"), Path("dist")


def local_version(mode):
    found = toolkit.find_toolkit(mode)
    return "cu" + "".join(found.version.split(".")[:2]) if found else "cpu"


def main():
    shutil.rmtree(BUILT, ignore_errors=True)
    for mode in sys.argv[1:] or ["off"]:
        shutil.rmtree("build/python", ignore_errors=True)
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "egg_info",
            f"--tag-build=+{local_version(mode)}",
        ]
        command += ["bdist_wheel", "--dist-dir", str(BUILT)]
        environment = {"SPARSE_MLA_CUDA": mode, "SPARSE_MLA_GLIBC": GLIBC}
        subprocess.run(command, env=os.environ | environment, check=True)
    plat = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    audit = [sys.executable, "-m", "auditwheel"]
    for wheel in sorted(BUILT.glob("*.whl")):
        repair = [*audit, "repair", "--plat", plat, "--wheel-dir", str(FINISHED), str(wheel)]
        subprocess.run(repair, check=True)
    for wheel in sorted(FINISHED.glob("*.whl")):
        subprocess.run([*audit, "show", str(wheel)], check=True)


if __name__ == "__main__":
    main()
