"""Installs wheels in fresh virtual environments and runs tests/kit/installed.py there.

    python check_install.py [WHEEL…]

Without arguments it takes every wheel in dist/ that fits this machine. Each wheel is checked alone,
then beside PyTorch, then beside JAX, in environments under build/installed/ that hold nothing else.
"""

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ["", "torch", "jax"]


def requirement(framework):
    """What pyproject.toml says of a framework, so that all tests have the same one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return next(
        line for line in project["dependency-groups"]["frameworks"] if line.startswith(framework)
    )


def check(framework, wheels):
    """Checks the wheels, one after another, in one environment."""
    folder = ROOT / "build" / "installed" / (framework or "alone")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    install = [sys.executable, "-m", "pip", f"--python={folder}/bin/python", "install"]
    install += ["--quiet", "--disable-pip-version-check"]
    if framework:
        subprocess.run([*install, requirement(framework)], check=True)
    outside = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    for wheel in wheels:
        subprocess.run([*install, str(wheel)], check=True)
        command = [str(folder / "bin/python"), "-P", str(ROOT / "tests/kit/installed.py")]
        print(wheel.name, flush=True)
        subprocess.run([*command, *([framework] if framework else [])], env=outside, check=True)


def main():
    here = sorted((ROOT / "dist").glob(f"*_{platform.machine()}.whl"))
    wheels = [Path(name) for name in sys.argv[1:]] or here
    if not wheels:
        sys.exit("error: dist/ has no wheel for this machine; make wheel, or make release")
    for framework in FRAMEWORKS:
        check(framework, wheels)


if __name__ == "__main__":
    main()
