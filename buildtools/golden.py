"""Compares all results of attention with those of an earlier commit, bit by bit.

tests/fixtures/golden.json has hashes of random cases of every attention operator and layer
(tests/kit/golden.py), for each instruction set. Results depend on it alone, so one file serves all
numbers of threads.

    python buildtools/golden.py                     500 cases, this CPU's sets, 1, 2 and 7 threads
    python buildtools/golden.py --cases 25 --threads 2 --isa avx2
    python buildtools/golden.py --aarch64 --cases 25     the cross build, emulated
    python buildtools/golden.py --write             makes the file anew, for a change that is wanted
    python buildtools/golden.py --save FILE         hashes of one run: of CUDA with SMLA_DEVICE=cuda
    python buildtools/golden.py --equal FILE FILE   compares two such runs

A change that is wanted names the operators whose bits it changes, and why, in its commit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests/fixtures/golden.json"
PROGRAM = ROOT / "tests/kit/golden.py"
sys.path.insert(0, str(ROOT / "tests/kit"))
import golden_lines  # noqa: E402

AARCH64 = ROOT / "build/aarch64"
# An emulated machine that has BF16 products, and one that has none.
ARM_CPUS = {"neonbf16": "max", "neon": "cortex-a72"}
# Debian's Python and what it and NumPy are linked with.
ARM_PACKAGES = """
    python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 zlib1g libexpat1 libffi8
    libgcc-s1 libstdc++6 libbz2-1.0 liblzma5 libuuid1 libssl3
"""


def run_here(isa: str, threads: int, cases: int, subjects: list[str]) -> dict[str, list[str]]:
    environment = {"SPARSE_MLA_CPU_ISA": isa, "OMP_NUM_THREADS": str(threads)}
    return run([sys.executable], cases, subjects, **environment)


def run_on_aarch64(isa: str, threads: int, cases: int, subjects: list[str]) -> dict[str, list[str]]:
    root = AARCH64 / "root"
    python = ["qemu-aarch64", "-cpu", ARM_CPUS[isa], "-L", root, root / "usr/bin/python3.11"]
    here = next(x for x in sys.path if x.endswith("site-packages"))
    path = ":".join(map(str, (AARCH64 / "python", AARCH64 / "site", here)))
    return run(python, cases, subjects, PYTHONPATH=path, OMP_NUM_THREADS=str(threads))


def run(python, cases: int, subjects: list[str], **environment: str) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "hashes.json")
        command = [*map(str, python), str(PROGRAM), str(to), str(cases), *subjects]
        subprocess.run(
            command, check=True, env={**os.environ, "PYTHONSAFEPATH": "1", **environment}
        )
        return json.loads(to.read_text())


def prepare_aarch64() -> None:
    """Cross-compiles the extension, and brings a Python and NumPy that an emulator can run."""
    cross = {"AARCH64": "1", "CC": "aarch64-linux-gnu-gcc", "AR": "aarch64-linux-gnu-ar"}
    command = [sys.executable, "setup.py", "-q", "ninja", "--targets=extension"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **cross})
    package = AARCH64 / "python/sparse_mla"
    shutil.rmtree(package, ignore_errors=True)
    leave = shutil.ignore_patterns("lib", "include", "_C.abi3.so", "__pycache__")
    shutil.copytree(ROOT / "sparse_mla", package, ignore=leave)
    shutil.copy(AARCH64 / "_C.abi3.so", package)
    if not (AARCH64 / "root/usr/bin/python3.11").exists():
        debs = AARCH64 / "debs"
        debs.mkdir(exist_ok=True)
        subprocess.run(["dpkg", "--add-architecture", "arm64"], check=True)
        subprocess.run(["apt-get", "update", "-q"], check=True)
        names = [f"{name}:arm64" for name in ARM_PACKAGES.split()]
        subprocess.run(["apt-get", "download", "-q", *names], check=True, cwd=debs)
        for deb in debs.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", deb, AARCH64 / "root"], check=True)
    if not (AARCH64 / "site/numpy").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:"]
        command += ["--target", AARCH64 / "site", "--python-version", "3.11", "--no-deps"]
        for glibc in (27, 28):
            command += ["--platform", f"manylinux_2_{glibc}_aarch64"]
        subprocess.run([*command, "numpy", "ml_dtypes"], check=True)


def sets_of_this_cpu() -> list[str]:
    import sparse_mla

    rows = (row for row in sparse_mla.kernels() if row["device"] == "cpu" and row["available"])
    return [row["arch"] for row in rows]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500, help="of each operator and layer")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 7])
    parser.add_argument("--isa", nargs="+", help="instruction sets; all that this CPU has")
    parser.add_argument("--subjects", nargs="+", default=[], help="operators and layers; all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--aarch64", action="store_true")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true")
    how.add_argument("--save", type=Path, metavar="FILE")
    how.add_argument("--equal", type=Path, nargs=2, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.cases % golden_lines.GROUP != 0:
        parser.error(f"--cases must be a multiple of {golden_lines.GROUP}, got {options.cases}")
    return options


def main(arguments: list[str]) -> str | None:
    options = parse(arguments)
    if options.equal:
        first, second = (json.loads(path.read_text()) for path in options.equal)
        return golden_lines.differences(second, first)
    if options.save:
        found = run([sys.executable], options.cases, options.subjects)
        options.save.write_text(json.dumps(found, indent=1) + "\n")
        return None
    if options.aarch64:
        prepare_aarch64()
    known = json.loads(FIXTURE.read_text()) if FIXTURE.exists() else {}
    sets = options.isa or ([*ARM_CPUS] if options.aarch64 else sets_of_this_cpu())
    run_one = run_on_aarch64 if options.aarch64 else run_here
    jobs = [(isa, threads) for isa in sets for threads in options.threads]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda job: run_one(*job, options.cases, options.subjects), jobs)
        wrong = []
        for (isa, threads), found in zip(jobs, results, strict=True):
            if options.write and threads == options.threads[0]:
                known.setdefault(isa, {}).update(found)
            error = golden_lines.differences(found, known.get(isa, {}))
            print(f"{isa}, {threads} threads: {error or f'{len(found)} × {options.cases} equal'}")
            wrong += [f"{isa}, {threads} threads: {error}"] if error else []
    if options.write and not wrong:
        FIXTURE.write_text(json.dumps(known, indent=1) + "\n")
    return "\n".join(wrong) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
