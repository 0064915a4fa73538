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

import sparse_mla

# name -> (positional, keyword-only) parameters; a trailing "=" marks one that has a default
OPERATORS = {
    "concat_and_cache_mla": ("kv_c k_pe kv_cache slot_mapping", "kv_cache_dtype= stream="),
    "gather_kv_cache": (
        "kv_cache block_table seq_lens workspace_starts",
        "out seq_starts= kv_scale= kv_format= block_size= stream=",
    ),
    "convert_req_index_to_global_index": (
        "req_id_per_token block_table topk_indices",
        "block_size prefill_request_ids= prefill_workspace_starts= valid_counts= out= stream=",
    ),
    "compute_global_topk_indices_and_lens": (
        "topk_indices req_id_per_token block_table block_size is_valid",
        "out= lens= stream=",
    ),
    "top_k_per_row": (
        "logits starts ends",
        "k slots_block_table= slots_block_size= req_id_per_token= is_valid= out= slots= lens= "
        "values= stream=",
    ),
    "combine_topk_swa_indices": (
        "topk_indices query_start_loc seq_lens gather_lens window ratio topk M N",
        "align= out= lens= stream=",
    ),
    "build_mixed_sparse_indices": (
        "decode_swa_indices decode_compressed_indices decode_compressed_lens prefill_topk_indices "
        "query_start_loc seq_lens req_id_per_token swa_block_table swa_block_size "
        "compressed_block_table compressed_block_size window ratio topk",
        "decode_indices_are_local= is_valid= out= lens= stream=",
    ),
    "sparse_attention": (
        "q kv indices",
        "softmax_scale topk_length= attn_sink= extra_kv= extra_indices= extra_topk_length= "
        "q_scale= kv_scale= extra_kv_scale= num_splits= kv_format= extra_kv_format= block_size= "
        "extra_block_size= return_max_logits= out= lse= max_logits= workspace= stream=",
    ),
    "sparse_mla_dsv4": (
        "query swa_kv_cache workspace_buffer sparse_indices compressed_kv_cache sparse_topk_lens "
        "seq_lens",
        "bmm1_scale bmm2_scale= sinks= window= cum_seq_lens_q= max_q_len= out= stream=",
    ),
    "attention_workspace_size": (
        "num_tokens num_heads topk",
        "extra_topk= num_splits= device",
    ),
    "merge_attn_states": ("out_a lse_a out_b lse_b", "attn_sink= out= lse= stream="),
    "split_kv_b_proj": (
        "weight",
        "num_heads qk_nope_head_dim v_head_dim weight_scale_inv=",
    ),
    "k_up_proj": ("q_nope W_UK", "out= stream="),
    "v_up_proj": ("x W_UV", "out= stream="),
    "grouped_output_projection": ("o o_scale weight weight_scale", "out= stream="),
    "dynamic_per_tensor_quant": ("x", "out= stream="),
    "rope_table": ("max_pos= R= base= yarn=", "fp32_angles="),
    "fused_q_kv_rmsnorm": ("q kv q_weight kv_weight", "eps q_out= kv_out= stream="),
    "fused_qnorm_rope_kv_insert": (
        "q kv positions cos_sin cache slot_mapping",
        "eps q_out= q_scale_inv= kv_scale= kv_format= block_size= stream=",
    ),
    "save_partial_states": ("kv score ape positions state slot_mapping", "stream="),
    "compress_norm_rope_store": (
        "state block_table req_id_per_token positions slot_mapping cache kv_slot_mapping "
        "norm_weight cos_sin",
        "eps ratio kv= score= ape= kv_scale= kv_format= block_size= stream=",
    ),
    "fused_inv_rope_fp8_quant": (
        "o positions cos_sin",
        "groups scale_layout= quantize= out= out_scale= stream=",
    ),
    "fused_indexer_q_rope_quant": (
        "q weights positions cos_sin",
        "softmax_scale head_scale use_fp4= out= out_weights= out_scale= stream=",
    ),
    "indexer_logits": (
        "q weights k_cache context_lens",
        "block_table= req_id_per_token= starts= q_scale= clean= dtype= kv_format= block_size= "
        "out= stream=",
    ),
    "lightning_indexer": (
        "q weights k_cache context_lens",
        "k block_table= req_id_per_token= starts= q_scale= dtype= kv_format= block_size= "
        "slots_block_table= slots_block_size= is_valid= out= slots= lens= values= "
        "max_logits_bytes= workspace= stream=",
    ),
    "lightning_indexer_workspace_size": (
        "num_tokens max_context",
        "k dtype= max_logits_bytes= device",
    ),
    "dequantize_kv_cache": ("kv_cache", "kv_scale= kv_format= block_size= dtype="),
    "quantize_and_insert_k_cache": (
        "k k_cache slot_mapping",
        "kv_scale= kv_format= block_size= stream=",
    ),
    "indexer_k_quant_and_cache": ("k k_cache slot_mapping", "kv_format= block_size= stream="),
    "dequantize_and_gather_k_cache": (
        "out k_cache seq_lens gather_lens block_table block_size offset",
        "kv_scale= kv_format= stream=",
    ),
    "split_decodes_and_prefills": (
        "query_start_loc num_actual_tokens",
        "decode_threshold= require_uniform=",
    ),
    "split_prefill_chunks": ("seq_lens workspace_tokens", ""),
    "get_prefill_workspace_size": ("max_model_len", ""),
    "kernels": ("", ""),
    "build_info": ("", ""),
    "get_include": ("", ""),
    "get_library_dir": ("", ""),
}
DEFAULTS = {
    ("sparse_attention", "num_splits"): 0,
    ("sparse_attention", "return_max_logits"): False,
    ("sparse_mla_dsv4", "bmm2_scale"): 1.0,
    ("sparse_mla_dsv4", "window"): 128,
    ("attention_workspace_size", "extra_topk"): 0,
    ("attention_workspace_size", "num_splits"): 0,
    ("convert_req_index_to_global_index", "valid_counts"): False,
    ("combine_topk_swa_indices", "align"): 128,
    ("build_mixed_sparse_indices", "decode_indices_are_local"): False,
    ("split_decodes_and_prefills", "decode_threshold"): 1,
    ("split_decodes_and_prefills", "require_uniform"): False,
    ("dequantize_kv_cache", "dtype"): "float32",
    ("rope_table", "R"): 64,
    ("rope_table", "base"): 10000.0,
    ("rope_table", "fp32_angles"): False,
    ("fused_inv_rope_fp8_quant", "scale_layout"): "fp32",
    ("fused_inv_rope_fp8_quant", "quantize"): True,
    ("fused_indexer_q_rope_quant", "use_fp4"): False,
    ("indexer_logits", "clean"): True,
    ("indexer_logits", "dtype"): "float32",
    ("lightning_indexer", "dtype"): "float32",
    ("lightning_indexer", "max_logits_bytes"): 2**29,
    ("lightning_indexer_workspace_size", "dtype"): "float32",
    ("lightning_indexer_workspace_size", "max_logits_bytes"): 2**29,
    ("dequantize_kv_cache", "kv_scale"): 1.0,
    ("gather_kv_cache", "kv_scale"): 1.0,
    ("sparse_attention", "q_scale"): 1.0,
    ("sparse_attention", "kv_scale"): 1.0,
    ("sparse_attention", "extra_kv_scale"): 1.0,
    ("quantize_and_insert_k_cache", "kv_scale"): 1.0,
    ("fused_qnorm_rope_kv_insert", "kv_scale"): 1.0,
    ("compress_norm_rope_store", "kv_scale"): 1.0,
    ("dequantize_and_gather_k_cache", "kv_scale"): 1.0,
}
ROOT = Path(sparse_mla.__file__).parent


def parameter_text(parameter: inspect.Parameter) -> str:
    return parameter.name + ("" if parameter.default is inspect.Parameter.empty else "=")


@pytest.mark.parametrize("name", OPERATORS)
def test_signature(name):
    parameters = inspect.signature(getattr(sparse_mla, name)).parameters.values()
    keyword_only = [parameter_text(p) for p in parameters if p.kind is p.KEYWORD_ONLY]
    positional = [parameter_text(p) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    want_positional, want_keywords = (text.split() for text in OPERATORS[name])
    assert positional == want_positional
    assert keyword_only == want_keywords
    for parameter in parameters:
        if parameter.default is not inspect.Parameter.empty:
            assert parameter.default == DEFAULTS.get((name, parameter.name)), parameter


@pytest.mark.parametrize(
    ("owner", "name", "want"),
    [
        ("MetadataBuilder", "__init__", "self config workspace="),
        ("MetadataBuilder", "build", "self common common_prefix_len= fast_build="),
        ("SparseMLA", "__init__", "self config kv_b_proj= weight_scale_inv="),
        (
            "SparseMLA",
            "forward",
            "self q kv_cache topk_indices metadata attn_sink= out= lse= stream=",
        ),
        ("v4.MetadataBuilder", "__init__", "self config workspace="),
        (
            "v4.MetadataBuilder",
            "build",
            "self common compressed= states= index= index_states=",
        ),
        ("v4.SparseMLA", "__init__", "self config compress_ratio weights"),
        (
            "v4.SparseMLA",
            "attend",
            "self q caches metadata topk_indices= out= lse= stream=",
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
    status.h cache.h index.h attention.h projection.h norm.h compressor.h indexer.h
    step.h v4_step.h
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
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


FIRST = "import sys, time, __future__, dataclasses, numpy, ml_dtypes; "


def test_import_brings_nothing_but_numpy_ml_dtypes_and_dataclasses():
    code = FIRST + (
        "before = set(sys.modules); import sparse_mla; "
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours = {"", "._C", "._compiled", "._flash_arrays", "._format_names", "._results", "._types"}
    ours |= {".backend", ".flash_mla", ".ops", ".steps", ".v4"}
    ours |= {f".{name}.{part}" for name in ("backend", "v4") for part in ("facts", "layer")}
    ours |= {f".steps.{name}" for name in ("common", "v32", "v4")}
    names = "_declare", "attention", "cache", "compressor", "facts", "index"
    names += "indexer", "norm", "planning", "projection"
    ours |= {f".ops.{name}" for name in names}
    assert set(done.stdout.split()) == {f"sparse_mla{name}" for name in ours}


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
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_info_command():
    command = [sys.executable, "-m", "sparse_mla", "info"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for word in (sparse_mla.__version__, "cpu", "numpy", "fp8_ds_mla"):
        assert word in done.stdout, word


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
