"""What an installed sparse_mla consists of: names, signatures, stubs, headers, imports."""

import functools
import inspect
import operator
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import printed_by_python
from operators import FACTS

import sparse_mla

pytestmark = pytest.mark.frameworks

# name -> (positional, keyword-only) parameters, as operators.Facts writes them
FUNCTIONS = {
    "split_kv_b_proj": ("weight", "num_heads qk_nope_head_dim v_head_dim weight_scale_inv="),
    "absorb": ("q_proj W_UK W_UV o_proj", "scheme="),
    "rope_table": ("max_pos= R=64 base=10000.0 yarn=", "fp32_angles=False"),
    "mla_softmax_scale": ("qk_head_dim=192", "yarn="),
    "reorder_batch": ("num_scheduled_tokens", "decode_threshold=1"),
    "local_attention_batches": (
        "query_start_loc seq_lens block_table",
        "attention_chunk block_size",
    ),
    "split_context_chunks": ("context_lens workspace_tokens", "block_size plan=equal"),
    "get_context_workspace_size": ("max_model_len max_num_seqs block_size", ""),
    "split_decodes_and_prefills": (
        "query_start_loc num_actual_tokens",
        "decode_threshold=1 require_uniform=False",
    ),
    "split_prefill_chunks": ("seq_lens workspace_tokens", ""),
    "get_prefill_workspace_size": ("max_model_len", ""),
    "kernels": ("", ""),
    "build_info": ("", ""),
    "get_include": ("", ""),
    "get_library_dir": ("", ""),
}
FUNCTIONS |= {op: (facts.positional, facts.keywords) for op, facts in FACTS.items()}
ROOT = Path(sparse_mla.__file__).parent


def parameter_text(parameter: inspect.Parameter) -> str:
    """The name, "name=" for one whose default is None, "name=1.0" or "name=(1,2)"."""
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    default = "" if parameter.default is None else str(parameter.default).replace(" ", "")
    return f"{parameter.name}={default}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name):
    parameters = inspect.signature(getattr(sparse_mla, name)).parameters.values()
    keyword_only = [parameter_text(p) for p in parameters if p.kind is p.KEYWORD_ONLY]
    positional = [parameter_text(p) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    want_positional, want_keywords = (text.split() for text in FUNCTIONS[name])
    assert positional == want_positional
    assert keyword_only == want_keywords


@pytest.mark.parametrize(
    ("owner", "name", "want"),
    [
        ("MetadataBuilder", "__init__", "self config workspace="),
        ("MetadataBuilder", "build", "self common common_prefix_len=0 fast_build=False"),
        ("SparseMLA", "__init__", "self config kv_b_proj= weight_scale_inv="),
        (
            "SparseMLA",
            "forward",
            "self q kv_cache topk_indices metadata attn_sink= out= lse= return_lse=True stream=",
        ),
        ("v4.MetadataBuilder", "__init__", "self config workspace="),
        (
            "v4.MetadataBuilder",
            "build",
            "self common compressed= states= index= index_states=",
        ),
        ("v4.SparseMLA", "__init__", "self config compress_ratio weights projections="),
        (
            "v4.SparseMLA",
            "attend",
            "self q caches metadata topk_indices= slots= lens= out= lse= return_lse=True stream=",
        ),
    ],
)
def test_method_signature(owner, name, want):
    method = getattr(operator.attrgetter(owner)(sparse_mla), name)
    assert [
        parameter_text(p) for p in inspect.signature(method).parameters.values()
    ] == want.split()


def test_all_is_exact_and_sorted_names_exist():
    assert len(set(sparse_mla.__all__)) == len(sparse_mla.__all__)
    for name in sparse_mla.__all__:
        assert hasattr(sparse_mla, name), name
    public = {name for name in vars(sparse_mla) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(sparse_mla, name))}
    assert public - modules <= set(sparse_mla.__all__), "public names outside __all__"


def test_stub_and_marker_are_installed():
    assert (ROOT / "py.typed").exists()
    assert (ROOT / "_C.pyi").read_text().strip()


def test_version_is_the_distribution_s():
    assert re.fullmatch(r"\d+\.\d+\.\d+([.+a-z0-9]*)", sparse_mla.__version__)


def test_build_info():
    info = sparse_mla.build_info()
    assert isinstance(info, dict)
    assert {"version", "compiler", "flags", "cuda", "cuda_archs", "dlpack"} <= set(info)
    info.clear()
    assert sparse_mla.build_info(), "every call gives a dict of its own"


def test_build_info_names_the_cuda_toolkit_or_says_how_to_get_one():
    info = sparse_mla.build_info()
    has_cuda = "cuda" in {row["device"] for row in sparse_mla.kernels()}
    if has_cuda:
        assert re.fullmatch(r"1\d\.\d+\.\d+ from \S+", info["cuda"])
        assert re.match(r"sm_\d", info["cuda_archs"])
    else:
        assert info["cuda"].startswith("none: CPU-only build")
        assert re.search(r"SPARSE_MLA_CUDA=wheel|as always for variant \w+", info["cuda"])
        assert info["cuda_archs"] == "none"


def test_kernels_are_the_dispatch_rows():
    rows = sparse_mla.kernels()
    assert len(rows) >= 2
    served = {row["kv_format"] for row in rows if row["device"] == "cpu"}
    assert served == {"fp8_ds_mla, bfloat16, any of 512 values"}


ROOMS = """
    status.h cache.h index.h attention.h projection.h norm.h rope.h compressor.h topk.h
    indexer.h step.h v4_step.h dense_step.h paged_step.h varlen.h
"""
HEADERS = ["sparse_mla.h", *(f"sparse_mla/{room}" for room in ROOMS.split())]


def test_get_include_holds_the_headers():
    include = Path(sparse_mla.get_include())
    found = {str(path.relative_to(include)) for path in include.rglob("*.h")}
    assert found == {*HEADERS, "dlpack/dlpack.h"}
    assert "DLManagedTensorVersioned" in (include / "dlpack" / "dlpack.h").read_text()


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize(("compiler", "standard"), [("cc", "c11"), ("c++", "c++17")])
def test_the_headers_compile_alone(header, compiler, standard):
    """A C user includes one header, which is C11 and needs only the C library and DLPack."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    flags = [f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    language = ["-x", "c" if compiler == "cc" else "c++"]
    command = [compiler, *flags, f"-I{sparse_mla.get_include()}", *language, "-"]
    program = f"#include <{header}>\nint main(void) {{ return (int)sizeof(smla_error) == 0; }}\n"
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_loads_no_library_of_cuda():
    """The import works on machines without a driver, and does not load a driver before a call needs
    a device."""
    code = (
        "import sparse_mla; "
        "print(*[x for x in open('/proc/self/maps') if any(lib in x for lib in "
        "('libcuda', 'libcublas', 'libnv'))])"
    )
    assert printed_by_python("-c", code).strip() == ""


FIRST = "import sys, time, __future__, dataclasses, numpy, ml_dtypes; "


def test_import_brings_nothing_but_numpy_ml_dtypes_and_dataclasses():
    code = FIRST + (
        "before = set(sys.modules); import sparse_mla; "
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    printed = printed_by_python("-c", code)
    ours = {
        "",
        "._C",
        "._compiled",
        "._flash_arrays",
        "._flash_paged",
        "._flash_varlen",
        "._format_names",
        "._types",
    }
    ours |= {".backend", ".backend.facts", ".backend.layer", ".ops", ".steps"}
    ours |= {".flash_attn", ".flash_mla"}
    ours |= {f".steps.{name}" for name in ("common", "v32")}  # dense and v4: at their first use
    names = "_declare _sections attention attention_merge cache cache_read compressor facts index"
    names += " index_ranks indexer norm planning projection projection_fp8 projection_weights rope"
    names += " topk varlen"
    ours |= {f".ops.{name}" for name in names.split()}
    assert set(printed.split()) == {f"sparse_mla{name}" for name in ours}


def test_import_costs_little_beyond_numpy(tmp_path):
    """The import took a fifth of the CPU time of NumPy and ml_dtypes when it was measured. Both are
    timed in one process, and every process finds bytecode that an earlier one wrote, as a user's
    second import does: Python's compiler would take longer than all the rest."""
    code = (
        "import time; start = time.process_time(); import dataclasses, numpy, ml_dtypes; "
        "between = time.process_time(); import sparse_mla; end = time.process_time(); "
        "print((end - between) / (between - start))"
    )
    command = [sys.executable, "-c", code]
    env = dict(os.environ, PYTHONPYCACHEPREFIX=str(tmp_path))
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    run = functools.partial(
        subprocess.run, command, env=env, capture_output=True, text=True, check=True
    )
    run()
    assert min(float(run().stdout) for _ in range(5)) < 0.4


def test_a_call_with_numpy_arrays_loads_no_framework():
    code = (
        "import sys, numpy as np, ml_dtypes, sparse_mla; b = ml_dtypes.bfloat16; "
        "sparse_mla.sparse_attention(np.ones((1, 2, 576), b), np.ones((4, 576), b), "
        "np.zeros((1, 3), np.int32), softmax_scale=1.0); "
        "print(*sorted({'torch', 'jax', 'cupy'} & set(sys.modules)))"
    )
    assert printed_by_python("-c", code).strip() == ""


def test_info_command():
    printed = printed_by_python("-m", "sparse_mla", "info")
    for word in (sparse_mla.__version__, "cpu", "numpy", "fp8_ds_mla"):
        assert word in printed, word


def test_version_option():
    printed = printed_by_python("-m", "sparse_mla", "--version")
    assert printed == f"sparse_mla {sparse_mla.__version__}\n"


@pytest.mark.parametrize("cls", ["Tensor", "Metadata"])
def test_types_are_final_or_plain(cls):
    """The types name a module of this package as theirs."""
    assert getattr(sparse_mla, cls).__module__.startswith("sparse_mla")


@pytest.mark.parametrize("name", ["numpy._core._multiarray_umath", "ml_dtypes"])
def test_import_needs_what_it_is_made_of(name):
    """Where a part of NumPy or of ml_dtypes is missing, the import raises an ImportError."""
    program = (
        "import sys, numpy, ml_dtypes\n"
        f"sys.modules[{name!r}] = None\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        import sparse_mla._C\n"
        "    except ImportError as error:\n"
        "        print(type(error).__name__)\n"
    )
    assert printed_by_python("-c", program).split()[0].endswith("Error")


def test_completion_offers_what_is_public():
    assert dir(sparse_mla) == sorted(sparse_mla.__all__)
