"""The facts that tests know of each operator, in one table.

A new operator is a row of FACTS and a good call in good_calls.py. Tests that go through all
operators then include it, and test_operator.py fails as long as a row is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference as ref
from good_calls import (
    Call,
    apply_rope_call,
    attention_call,
    combine_call,
    compress_call,
    dequantize_call,
    dsv4_call,
    fp8_linear_call,
    gather_call,
    gather_last_call,
    global_topk_call,
    grouped_call,
    index_call,
    index_query_call,
    insert_call,
    insert_index_call,
    inverse_call,
    k_up_call,
    kv_up_call,
    lightning_call,
    logits_call,
    merge_call,
    mixed_call,
    mla_call,
    norm_call,
    paged_call,
    partials_call,
    qnorm_insert_call,
    quant_call,
    reshape_call,
    rope_and_cache_call,
    save_states_call,
    scaled_quantize_call,
    top_k_call,
    v_up_call,
    varlen_call,
    write_call,
)


@dataclass(frozen=True)
class Facts:
    """What a row of FACTS tells. Names are the operator's parameters, as it orders them."""

    positional: str  # "name=" has the default None, "name=1.0" another one
    keywords: str
    good: Callable[[], Call] | None = None  # None: it takes no arrays
    written: tuple[str, ...] = ()  # arrays that are written in place, which are the last results
    num_results: int = 0  # arrays that the good call makes if outputs are left out
    takes_workspace: bool = False  # the good call then makes one on a GPU; attention's has splits
    # An argument that the core refuses in the good call only when the results are made.
    refused: tuple[str, np.ndarray[Any, Any]] | None = None
    shape_of: str | None = None  # an array whose rank a result's shape depends on
    overloads: tuple[str, ...] = ()  # those that PyTorch has beside the default one
    is_exact: bool = False  # results are promised to the byte
    slots: str | None = None  # slots that tokens are written to: two tokens may have the same


FACTS: dict[str, Facts] = {
    "concat_and_cache_mla": Facts(
        positional="kv_c k_pe kv_cache slot_mapping",
        keywords="kv_scale=1.0 kv_cache_dtype= stream=",
        good=write_call,
        written=("kv_cache",),
        is_exact=True,
        slots="slot_mapping",
    ),
    "gather_kv_cache": Facts(
        positional="kv_cache block_table seq_lens workspace_starts",
        keywords="out seq_starts= kv_scale=1.0 kv_format= block_size= stream=",
        good=gather_call,
        written=("out",),
        is_exact=True,
    ),
    "reshape_and_cache": Facts(
        positional="k v k_cache v_cache slot_mapping",
        keywords="k_scale=1.0 v_scale=1.0 stream=",
        good=reshape_call,
        written=("k_cache", "v_cache"),
        is_exact=True,
        slots="slot_mapping",
    ),
    "convert_req_index_to_global_index": Facts(
        positional="req_id_per_token block_table topk_indices",
        keywords=(
            "block_size prefill_request_ids= prefill_workspace_starts= valid_counts=False "
            "out= stream="
        ),
        good=index_call,
        num_results=1,
        refused=("block_table", np.zeros(3, np.int32)),
        shape_of="topk_indices",
        overloads=("valid_counts", "out", "valid_counts_out"),
        is_exact=True,
    ),
    "compute_global_topk_indices_and_lens": Facts(
        positional="topk_indices req_id_per_token block_table block_size is_valid",
        keywords="out= lens= stream=",
        good=global_topk_call,
        num_results=2,
        refused=("block_table", np.zeros(3, np.int32)),
        shape_of="topk_indices",
        overloads=("out",),
        is_exact=True,
    ),
    "top_k_per_row": Facts(
        positional="logits starts ends",
        keywords=(
            "k slots_block_table= slots_block_size= req_id_per_token= is_valid= out= slots= "
            "lens= values= stream="
        ),
        good=top_k_call,
        num_results=3,
        refused=("slots_block_table", np.zeros(3, np.int32)),
        shape_of="logits",
        overloads=("slots_block_table", "out"),
        is_exact=True,
    ),
    "combine_topk_swa_indices": Facts(
        positional="topk_indices query_start_loc seq_lens gather_lens window ratio topk M N",
        keywords="align=128 out= lens= stream=",
        good=combine_call,
        num_results=2,
        refused=("seq_lens", np.zeros(3, np.int32)),
        shape_of="topk_indices",
        overloads=("out",),
        is_exact=True,
    ),
    "build_mixed_sparse_indices": Facts(
        positional=(
            "decode_swa_indices decode_compressed_indices decode_compressed_lens "
            "prefill_topk_indices query_start_loc seq_lens req_id_per_token swa_block_table "
            "swa_block_size compressed_block_table compressed_block_size window ratio topk"
        ),
        keywords="decode_indices_are_local=False is_valid= out= lens= stream=",
        good=mixed_call,
        num_results=2,
        refused=("swa_block_table", np.zeros(3, np.int32)),
        shape_of="decode_swa_indices",
        overloads=("out",),
        is_exact=True,
    ),
    "sparse_attention": Facts(
        positional="q kv_cache indices",
        keywords=(
            "softmax_scale topk_length= attn_sink= extra_kv_cache= extra_indices= "
            "extra_topk_length= q_scale=1.0 kv_scale=1.0 extra_kv_scale=1.0 num_splits=0 "
            "kv_format= extra_kv_format= block_size= extra_block_size= "
            "return_max_logits=False out= lse= max_logits= workspace= stream="
        ),
        good=attention_call,
        num_results=3,
        takes_workspace=True,
        refused=("attn_sink", np.zeros(1, np.float32)),
        shape_of="q",
        overloads=("return_max_logits", "out"),
    ),
    "sparse_mla_dsv4": Facts(
        positional=(
            "query swa_kv_cache workspace_buffer sparse_indices compressed_kv_cache "
            "sparse_topk_lens seq_lens"
        ),
        keywords=(
            "bmm1_scale bmm2_scale=1.0 sinks= window=128 cum_seq_lens_q= max_q_len= out= stream="
        ),
        good=dsv4_call,
        num_results=1,
        refused=("sinks", np.zeros(1, np.float32)),
        shape_of="query",
        overloads=("out",),
    ),
    "mla_attention": Facts(
        positional="q kv_cache block_table cache_seqlens",
        keywords=(
            "softmax_scale cu_seqlens_q= slot_table= cp= q_scale=1.0 kv_scale=1.0 kv_format= "
            "causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 attn_sink= "
            "max_seqlen_q= max_seqlen_k= num_splits=0 out= lse= workspace= stream="
        ),
        good=mla_call,
        num_results=2,
        takes_workspace=True,
        refused=("attn_sink", np.zeros(1, np.float32)),
        shape_of="q",
        overloads=("out",),
    ),
    "varlen_attention": Facts(
        positional="q k v cu_seqlens_q cu_seqlens_k",
        keywords=(
            "softmax_scale causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
            "attn_sink= q_descale= k_descale= v_descale= max_seqlen_q= max_seqlen_k= num_splits=0 "
            "out= lse= workspace= stream="
        ),
        good=varlen_call,
        num_results=2,
        takes_workspace=True,
        refused=("attn_sink", np.zeros(1, np.float32)),
        shape_of="q",
        overloads=("out",),
    ),
    "paged_attention": Facts(
        positional="q k_cache v_cache block_table cache_seqlens",
        keywords=(
            "softmax_scale cu_seqlens_q= slot_table= qv= cache_leftpad= cp= causal=False "
            "window_size=(-1,-1) attention_chunk=0 softcap=0.0 attn_sink= q_descale= k_descale= "
            "v_descale= max_seqlen_q= max_seqlen_k= num_splits=0 out= lse= workspace= stream="
        ),
        good=paged_call,
        num_results=2,
        refused=("attn_sink", np.zeros(1, np.float32)),
        shape_of="q",
        overloads=("out",),
        takes_workspace=True,
    ),
    "merge_attn_states": Facts(
        positional="out_a lse_a out_b lse_b",
        keywords="attn_sink= prefill_tokens_with_context= out= lse= stream=",
        good=merge_call,
        num_results=2,
        refused=("lse_b", np.zeros((3, 5), np.float32)),
        shape_of="out_a",
        overloads=("out",),
    ),
    "merge_attn_partials": Facts(
        positional="outs lses",
        keywords="attn_sink= out= lse= stream=",
        good=partials_call,
        num_results=2,
        refused=("lses", np.zeros((3, 3, 5), np.float32)),
        shape_of="outs",
        overloads=("out",),
    ),
    "k_up_proj": Facts(
        positional="q_nope W_UK",
        keywords="out= stream=",
        good=k_up_call,
        num_results=1,
        refused=("W_UK", np.zeros((512, 5, 128), ref.BF16)),
        shape_of="q_nope",
        overloads=("out",),
    ),
    "v_up_proj": Facts(
        positional="x W_UV",
        keywords="out= stream=",
        good=v_up_call,
        num_results=1,
        refused=("W_UV", np.zeros((512, 5, 128), ref.BF16)),
        shape_of="W_UV",
        overloads=("out",),
    ),
    "kv_up_proj": Facts(
        positional="kv_c kv_b_proj",
        keywords="out= stream=",
        good=kv_up_call,
        num_results=1,
        refused=("kv_b_proj", np.zeros((500, 130), ref.BF16)),
        shape_of="kv_b_proj",
        overloads=("out",),
    ),
    "grouped_output_projection": Facts(
        positional="o o_scale weight weight_scale",
        keywords="out= stream=",
        good=grouped_call,
        num_results=1,
        refused=("weight_scale", np.zeros((2, 1, 2), np.float32)),
        shape_of="o",
        overloads=("out",),
    ),
    "dynamic_per_tensor_quant": Facts(
        positional="x",
        keywords="out= stream=",
        good=quant_call,
        num_results=2,
        refused=("out", np.zeros((3, 41), np.uint8)),
        overloads=("out",),
        is_exact=True,
    ),
    "scaled_quantize": Facts(
        positional="x",
        keywords="group out= descale= stream=",
        good=scaled_quantize_call,
        num_results=2,
        refused=("out", np.zeros((4, 47), np.uint8)),
        overloads=("out",),
        is_exact=True,
    ),
    "fp8_linear": Facts(
        positional="x weight descale",
        keywords="input_group out= workspace= stream=",
        good=fp8_linear_call,
        num_results=1,
        takes_workspace=True,
        refused=("descale", np.zeros((3, 2), np.float32)),
        overloads=("out",),
    ),
    "fused_q_kv_rmsnorm": Facts(
        positional="q kv q_weight kv_weight",
        keywords="eps q_out= kv_out= stream=",
        good=norm_call,
        num_results=2,
        refused=("kv_weight", np.zeros(511, np.float32)),
        overloads=("out",),
        is_exact=True,
    ),
    "apply_rope": Facts(
        positional="positions q_pe k_pe rope_table",
        keywords="interleaved=True inverse=False q_out= k_out= stream=",
        good=apply_rope_call,
        num_results=2,
        refused=("rope_table", np.zeros(16, np.float32)),
        overloads=("out",),
        is_exact=True,
    ),
    "rope_and_cache_mla": Facts(
        positional="positions q_pe k_pe rope_table kv_c kv_cache slot_mapping",
        keywords="interleaved=True kv_scale=1.0 kv_cache_dtype= q_out= stream=",
        good=rope_and_cache_call,
        written=("kv_cache",),
        is_exact=True,
        slots="slot_mapping",
    ),
    "fused_inv_rope_fp8_quant": Facts(
        positional="o positions rope_table",
        keywords="groups scale_layout=fp32 quantize=True out= out_scale= stream=",
        good=inverse_call,
        num_results=2,
        refused=("positions", np.zeros(2, np.int64)),
        overloads=("quantize", "out"),
        is_exact=True,
    ),
    "fused_qnorm_rope_kv_insert": Facts(
        positional="q kv positions rope_table kv_cache slot_mapping",
        keywords="eps q_out= q_scale_inv= kv_scale=1.0 kv_format= block_size= stream=",
        good=qnorm_insert_call,
        written=("kv_cache",),
        is_exact=True,
        slots="slot_mapping",
    ),
    "fused_indexer_q_rope_quant": Facts(
        positional="q weights positions rope_table",
        keywords="softmax_scale head_scale use_fp4=False out= out_weights= out_scale= stream=",
        good=index_query_call,
        num_results=3,
        refused=("positions", np.zeros(2, np.int64)),
        overloads=("use_fp4", "out"),
        is_exact=True,
    ),
    "indexer_logits": Facts(
        positional="q weights k_cache context_lens",
        keywords=(
            "block_table= req_id_per_token= starts= q_scale= clean=True dtype=float32 "
            "kv_format= block_size= out= stream="
        ),
        good=logits_call,
        num_results=1,
        refused=("context_lens", np.zeros(2, np.int32)),
        overloads=("out",),
    ),
    "lightning_indexer": Facts(
        positional="q weights k_cache context_lens",
        keywords=(
            "k block_table= req_id_per_token= starts= q_scale= dtype=float32 kv_format= "
            "block_size= slots_block_table= slots_block_size= is_valid= out= slots= lens= "
            "values= max_logits_bytes=536870912 workspace= stream="
        ),
        good=lightning_call,
        num_results=3,
        takes_workspace=True,
        refused=("context_lens", np.zeros(2, np.int32)),
        overloads=("slots_block_table", "out"),
    ),
    "save_partial_states": Facts(
        positional="kv score ape positions state slot_mapping",
        keywords="stream=",
        good=save_states_call,
        written=("state",),
        is_exact=True,
        slots="slot_mapping",
    ),
    "compress_norm_rope_store": Facts(
        positional=(
            "state block_table req_id_per_token positions slot_mapping kv_cache "
            "kv_slot_mapping norm_weight rope_table"
        ),
        keywords="eps ratio kv= score= ape= kv_scale=1.0 kv_format= block_size= stream=",
        good=compress_call,
        written=("kv_cache",),
        is_exact=True,
        slots="slot_mapping",
    ),
    "quantize_and_insert_k_cache": Facts(
        positional="k k_cache slot_mapping",
        keywords="kv_scale=1.0 kv_format= block_size= stream=",
        good=insert_call,
        written=("k_cache",),
        is_exact=True,
        slots="slot_mapping",
    ),
    "indexer_k_quant_and_cache": Facts(
        positional="k k_cache slot_mapping",
        keywords="kv_format= block_size= stream=",
        good=insert_index_call,
        written=("k_cache",),
        is_exact=True,
        slots="slot_mapping",
    ),
    "dequantize_and_gather_k_cache": Facts(
        positional="out k_cache seq_lens gather_lens block_table block_size offset",
        keywords="kv_scale=1.0 kv_format= stream=",
        good=gather_last_call,
        written=("out",),
        is_exact=True,
    ),
    "dequantize_kv_cache": Facts(
        positional="kv_cache",
        keywords="kv_scale=1.0 kv_format= block_size= dtype=float32",
        good=dequantize_call,
        num_results=1,
        shape_of="kv_cache",
        is_exact=True,
    ),
    "attention_workspace_size": Facts(
        positional="num_tokens num_heads topk",
        keywords="extra_topk=0 num_splits=0 head_dim_v=512 num_keys=0 device",
    ),
    "lightning_indexer_workspace_size": Facts(
        positional="num_tokens max_context",
        keywords="k dtype=float32 max_logits_bytes=536870912 device",
    ),
}

# The calls of operators that have `stream=`, and those of PyTorch's and JAX's operators.
FRAMEWORK_CALLS = {op: facts.good for op, facts in FACTS.items() if facts.good is not None}
GOOD_CALLS = {
    op: make for op, make in FRAMEWORK_CALLS.items() if "stream=" in FACTS[op].keywords.split()
}
# Arrays that operators write in place. They are always given.
WRITTEN = {op: facts.written for op, facts in FACTS.items() if facts.written}
# Arrays that callers may give.
RESULTS = (
    "out",
    "lse",
    "max_logits",
    "q_out",
    "k_out",
    "kv_out",
    "out_weights",
    "out_scale",
    "descale",
    "slots",
    "lens",
)


def given_results(call: Call) -> list[str]:
    """Names of the given arrays that the call writes and returns, in the order of its results."""
    written = FACTS[call.op].written
    return [*(name for name in RESULTS if name in call.kwargs and name not in written), *written]
