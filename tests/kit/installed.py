"""Checks an installed sparse_mla as users meet it. buildtools/check_install.py makes environments
for it; by hand, the Python of an environment runs it:

    bin/python -P tests/kit/installed.py          without a framework
    bin/python -P tests/kit/installed.py torch    beside PyTorch, which has computed before; or jax

It runs the README's Python blocks, the demo (beside a framework the short one), and the C examples
against the package's own library, found in both of the documented ways. The process must have one
OpenMP library at most, and none that sparse_mla has brought. A framework's arrays must give what
NumPy's give. The benchmarks are not installed, and their command says in one line where they are.
"""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def start_torch():
    import torch

    torch.ones(700, 700) @ torch.ones(700, 700)  # in several threads
    return torch.from_numpy


def start_jax():
    import jax

    (jax.numpy.ones((700, 700)) @ jax.numpy.ones((700, 700))).block_until_ready()
    return jax.numpy.asarray


FRAMEWORKS = {"torch": start_torch, "jax": start_jax}


def printed_by(*command):
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def openmp_libraries():
    """The paths of what this process has mapped."""
    name = re.compile(r"/lib(gomp|omp|iomp)\d*[-.][^/]*$")
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in maps if name.search(line)})


def run_readme():
    """Runs the Python blocks, one after another, and compares what each `print(…)  # text` says.
    -> the names that they define"""
    text = (ROOT / "README.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    want = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    assert want and printed.getvalue().splitlines() == want, printed.getvalue()
    return names


def run_c_examples(sparse_mla, folder):
    """All of them with the flags of `sparse-mla-config`, then one with the folders from Python."""
    flags = shlex.split(printed_by(str(BIN / "sparse-mla-config"), "--cflags", "--libs"))
    lib = sparse_mla.get_library_dir()
    by_hand = [f"-I{sparse_mla.get_include()}", f"-L{lib}", f"-Wl,-rpath,{lib}", "-lsparse_mla"]
    examples = sorted((ROOT / "examples" / "c").glob("*.c"))
    for source, options in [*((source, flags) for source in examples), (examples[0], by_hand)]:
        program = f"{folder}/{source.stem}"
        compiler = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", str(source), "-o", program]
        printed_by(*compiler, *options, "-lm")
        printed_by(program)


def look_for_benchmarks(sparse_mla):
    """Nothing of them is in the package, and `bench` ends with status 2 after one line."""
    files = Path(sparse_mla.__file__).parent.rglob("*")
    assert [path for path in files if "bench" in path.name] == []
    command = [sys.executable, "-P", "-m", "sparse_mla", "bench", "--quick"]
    done = subprocess.run(command, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert len(done.stderr.splitlines()) == 1 and "benchmarks/bench" in done.stderr, done


def main(name=""):
    put = FRAMEWORKS[name]() if name else None
    before = openmp_libraries()
    sparse_mla = importlib.import_module("sparse_mla")
    assert Path(sparse_mla.__file__).is_relative_to(sys.prefix), sparse_mla.__file__
    cache = run_readme()["cache"]
    if put:
        given = put(cache)
        got = sparse_mla.dequantize_kv_cache(given)
        assert type(got) is type(given), type(got)
        assert (got == put(sparse_mla.dequantize_kv_cache(cache))).all()
    libraries = openmp_libraries()
    assert libraries == before and len(before) <= 1, (before, libraries)

    printed_by(sys.executable, "-P", "-m", "sparse_mla", "demo", *(["--short"] if name else []))
    look_for_benchmarks(sparse_mla)
    with tempfile.TemporaryDirectory() as folder:
        run_c_examples(sparse_mla, folder)
    facts = f"{sparse_mla.__version__}, CUDA {sparse_mla.build_info()['cuda'].split()[0]}"
    print(f"sparse_mla {facts} beside {name or 'no framework'}: OpenMP libraries: {libraries}")


if __name__ == "__main__":
    main(*sys.argv[1:])
