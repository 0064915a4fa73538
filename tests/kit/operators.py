"""The facts that tests know of each operator, in one table.

A new operator is a row of FACTS, with an example as its good call. Tests that go through all
operators then include it, and test_operator.py fails as long as a row is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import example_attention as attend
import example_calls as of
import numpy as np
import reference as ref
from example import BF16, F16, F32, I32, I64, U8, bytes_below, one_scale, rows_of, weight
from good_calls import (
    Call,
    attention_call,
    call_of,
    dsv4_call,
    mla_call,
    norm_call,
    paged_call,
    qnorm_insert_call,
    reshape_call,
    top_k_call,
    varlen_call,
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
    refused: tuple[str, Any] | None = None
    shape_of: str | None = None  # an array whose rank a result's shape depends on
    more_overloads: tuple[str, ...] = ()  # those that PyTorch has beside the default one and "out"
    is_exact: bool = False  # results are promised to the byte
    slots: str = "slot_mapping"  # those that tokens are written to; two tokens may have the same

    @property
    def overloads(self) -> tuple[str, ...]:
        """Those that PyTorch has; "out" takes the arrays that the operator would make."""
        has_out = self.num_results > 0 and "out=" in self.keywords
        return ("default", *(("out",) if has_out else ()), *self.more_overloads)


FACTS: dict[str, Facts] = {
    "concat_and_cache_mla": Facts(
        positional="kv_c k_pe kv_cache slot_mapping",
        keywords="kv_scale=1.0 kv_cache_dtype= stream=",
        good=lambda: call_of(of.write(BF16, I64, np.zeros((3, 4, 656), U8))),
        written=("kv_cache",),
        is_exact=True,
    ),
    "gather_kv_cache": Facts(
        positional="kv_cache block_table seq_lens workspace_starts",
        keywords="out seq_starts= kv_scale=1.0 kv_format= block_size= stream=",
        good=lambda: call_of(of.gather(rows_of("fp8", 5, 4)), seq_starts=None),
        written=("out",),
        is_exact=True,
    ),
    "reshape_and_cache": Facts(
        positional="k v k_cache v_cache slot_mapping",
        keywords="k_scale=1.0 v_scale=1.0 stream=",
        good=reshape_call,
        written=("k_cache", "v_cache"),
        is_exact=True,
    ),
    "transfer_kv_cache": Facts(
        positional="src dst src_slots dst_slots",
        keywords="kv_format= block_size= stream=",
        good=lambda: call_of(
            of.transfer(rows_of("fp8", 3, 4), bytes_below(256, 4, 3, 656), I64, I64)
        ),
        written=("dst",),
        is_exact=True,
        slots="dst_slots",
    ),
    "convert_req_index_to_global_index": Facts(
        positional="req_id_per_token block_table topk_indices",
        keywords=(
            "block_size prefill_request_ids= prefill_workspace_starts= valid_counts=False "
            "out= stream="
        ),
        good=lambda: call_of(of.convert(), valid_counts=False),
        num_results=1,
        refused=("block_table", np.zeros(3, np.int32)),
        shape_of="topk_indices",
        more_overloads=("valid_counts", "valid_counts_out"),
        is_exact=True,
    ),
    "compute_global_topk_indices_and_lens": Facts(
        positional="topk_indices req_id_per_token block_table block_size is_valid",
        keywords="out= lens= stream=",
        good=lambda: call_of(of.global_topk("uint8")),
        num_results=2,
        refused=("block_table", np.zeros(3, np.int32)),
        shape_of="topk_indices",
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
        more_overloads=("slots_block_table",),
        is_exact=True,
    ),
    "top_k_merge": Facts(
        positional="indices values",
        keywords="k out= stream=",
        good=lambda: call_of(of.top_k_merge(F32)),
        num_results=1,
        refused=("values", np.zeros((3, 2, 4), np.float32)),
        shape_of="indices",
        is_exact=True,
    ),
    "cp_local_positions": Facts(
        positional="positions",
        keywords="cp out= stream=",
        good=lambda: call_of(of.own_positions(I32)),
        num_results=1,
        refused=("cp", (2, 2, 4)),
        is_exact=True,
    ),
    "cp_local_topk": Facts(
        positional="topk_indices",
        keywords="cp out= lens= stream=",
        good=lambda: call_of(of.own_lists()),
        num_results=2,
        refused=("cp", (2, 2, 4)),
        is_exact=True,
    ),
    "cp_local_lengths": Facts(
        positional="seq_lens",
        keywords="cp out= stream=",
        good=lambda: call_of(of.own_lengths()),
        num_results=1,
        refused=("cp", (2, 2, 4)),
        is_exact=True,
    ),
    "combine_topk_swa_indices": Facts(
        positional="topk_indices query_start_loc seq_lens gather_lens window ratio topk M N",
        keywords="align=128 out= lens= stream=",
        good=lambda: call_of(of.combine()),
        num_results=2,
        refused=("seq_lens", np.zeros(3, np.int32)),
        shape_of="topk_indices",
        is_exact=True,
    ),
    "build_mixed_sparse_indices": Facts(
        positional=(
            "decode_swa_indices decode_compressed_indices decode_compressed_lens "
            "prefill_topk_indices query_start_loc seq_lens req_id_per_token swa_block_table "
            "swa_block_size compressed_block_table compressed_block_size window ratio topk"
        ),
        keywords="decode_indices_are_local=False is_valid= out= lens= stream=",
        good=lambda: call_of(of.mixed(U8, local=True)),
        num_results=2,
        refused=("swa_block_table", np.zeros(3, np.int32)),
        shape_of="decode_swa_indices",
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
        more_overloads=("return_max_logits",),
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
        takes_workspace=True,
    ),
    "merge_attn_states": Facts(
        positional="out_a lse_a out_b lse_b",
        keywords="attn_sink= prefill_tokens_with_context= out= lse= stream=",
        good=lambda: call_of(attend.merge(BF16)),
        num_results=2,
        refused=("lse_b", np.zeros((3, 5), np.float32)),
        shape_of="out_a",
    ),
    "merge_attn_partials": Facts(
        positional="outs lses",
        keywords="attn_sink= out= lse= stream=",
        good=lambda: call_of(attend.partials(BF16)),
        num_results=2,
        refused=("lses", np.zeros((3, 3, 5), np.float32)),
        shape_of="outs",
    ),
    "k_up_proj": Facts(
        positional="q_nope W_UK",
        keywords="out= stream=",
        good=lambda: call_of(of.k_up()),
        num_results=1,
        refused=("W_UK", np.zeros((512, 5, 128), ref.BF16)),
        shape_of="q_nope",
    ),
    "v_up_proj": Facts(
        positional="x W_UV",
        keywords="out= stream=",
        good=lambda: call_of(of.v_up()),
        num_results=1,
        refused=("W_UV", np.zeros((512, 5, 128), ref.BF16)),
        shape_of="W_UV",
    ),
    "kv_up_proj": Facts(
        positional="kv_c kv_b_proj",
        keywords="out= stream=",
        good=lambda: call_of(of.kv_up()),
        num_results=1,
        refused=("kv_b_proj", np.zeros((500, 130), ref.BF16)),
        shape_of="kv_b_proj",
    ),
    "grouped_output_projection": Facts(
        positional="o o_scale weight weight_scale",
        keywords="out= stream=",
        good=lambda: call_of(of.grouped(F32)),
        num_results=1,
        refused=("weight_scale", np.zeros((2, 1, 2), np.float32)),
        shape_of="o",
    ),
    "dynamic_per_tensor_quant": Facts(
        positional="x",
        keywords="out= stream=",
        good=lambda: call_of(of.quantize(BF16, U8, 3, 40), "out"),
        num_results=2,
        refused=("out", np.zeros((3, 41), np.uint8)),
        is_exact=True,
    ),
    "scaled_quantize": Facts(
        positional="x",
        keywords="group out= descale= stream=",
        good=lambda: call_of(of.scaled(F16, U8, (2, 35), 4, 70)),
        num_results=2,
        refused=("out", np.zeros((4, 47), np.uint8)),
        is_exact=True,
    ),
    "fp8_linear": Facts(
        positional="x weight descale",
        keywords="input_group out= workspace= stream=",
        good=lambda: call_of(of.linear((1, 128), 2, 2)),
        num_results=1,
        takes_workspace=True,
        refused=("descale", np.zeros((3, 2), np.float32)),
    ),
    "fused_q_kv_rmsnorm": Facts(
        positional="q kv q_weight kv_weight",
        keywords="eps q_out= kv_out= stream=",
        good=norm_call,
        num_results=2,
        refused=("kv_weight", np.zeros(511, np.float32)),
        is_exact=True,
    ),
    "apply_rope": Facts(
        positional="positions q_pe k_pe rope_table",
        keywords="interleaved=True inverse=False q_out= k_out= stream=",
        good=lambda: call_of(of.apply_rope(I64, BF16, F32)),
        num_results=2,
        refused=("rope_table", np.zeros(16, np.float32)),
        is_exact=True,
    ),
    "rope_and_cache_mla": Facts(
        positional="positions q_pe k_pe rope_table kv_c kv_cache slot_mapping",
        keywords="interleaved=True kv_scale=1.0 kv_cache_dtype= q_out= stream=",
        good=lambda: call_of(of.rope_and_cache(BF16, I64, rows_of("fp8", 3, 4))),
        written=("kv_cache",),
        is_exact=True,
    ),
    "fused_inv_rope_fp8_quant": Facts(
        positional="o positions rope_table",
        keywords="groups scale_layout=fp32 quantize=True out= out_scale= stream=",
        good=lambda: call_of(of.inverse(I64, U8, F32, scale_rows=3)),
        num_results=2,
        refused=("positions", np.zeros(2, np.int64)),
        more_overloads=("quantize",),
        is_exact=True,
    ),
    "fused_qnorm_rope_kv_insert": Facts(
        positional="q kv positions rope_table kv_cache slot_mapping",
        keywords="eps q_out= q_scale_inv= kv_scale=1.0 kv_format= block_size= stream=",
        good=qnorm_insert_call,
        written=("kv_cache",),
        is_exact=True,
    ),
    "fused_indexer_q_rope_quant": Facts(
        positional="q weights positions rope_table",
        keywords="softmax_scale head_scale use_fp4=False out= out_weights= out_scale= stream=",
        good=lambda: call_of(of.index_query(I64, BF16, True), use_fp4=True),
        num_results=3,
        refused=("positions", np.zeros(2, np.int64)),
        more_overloads=("use_fp4",),
        is_exact=True,
    ),
    "indexer_logits": Facts(
        positional="q weights k_cache context_lens",
        keywords=(
            "block_table= req_id_per_token= starts= q_scale= clean=True dtype=float32 "
            "kv_format= block_size= out= stream="
        ),
        good=lambda: call_of(of.logits(False, pages=True)),
        num_results=1,
        refused=("context_lens", np.zeros(2, np.int32)),
    ),
    "lightning_indexer": Facts(
        positional="q weights k_cache context_lens",
        keywords=(
            "k block_table= req_id_per_token= starts= q_scale= dtype=float32 kv_format= "
            "block_size= slots_block_table= slots_block_size= is_valid= out= slots= lens= "
            "values= max_logits_bytes=536870912 workspace= stream="
        ),
        good=lambda: call_of(of.lightning(False, pages=True), "values"),
        num_results=3,
        takes_workspace=True,
        refused=("context_lens", np.zeros(2, np.int32)),
        more_overloads=("slots_block_table",),
    ),
    "save_partial_states": Facts(
        positional="kv score ape positions state slot_mapping",
        keywords="stream=",
        good=lambda: call_of(of.save_states(F32, I64)),
        written=("state",),
        is_exact=True,
    ),
    "compress_norm_rope_store": Facts(
        positional=(
            "state block_table req_id_per_token positions slot_mapping kv_cache "
            "kv_slot_mapping norm_weight rope_table"
        ),
        keywords="eps ratio kv= score= ape= kv_scale=1.0 kv_format= block_size= stream=",
        good=lambda: call_of(of.compress(bytes_below(256, 3, 4, 512), kv_scale=one_scale())),
        written=("kv_cache",),
        is_exact=True,
    ),
    "quantize_and_insert_k_cache": Facts(
        positional="k k_cache slot_mapping",
        keywords="kv_scale=1.0 kv_format= block_size= stream=",
        good=lambda: call_of(
            of.insert(of.INSERT, weight(6, 512), bytes_below(256, 3, 4, 512), kv_scale=one_scale())
        ),
        written=("k_cache",),
        is_exact=True,
    ),
    "indexer_k_quant_and_cache": Facts(
        positional="k k_cache slot_mapping",
        keywords="kv_format= block_size= stream=",
        good=lambda: call_of(
            of.insert(of.INSERT_INDEX, weight(6, 128), bytes_below(256, 3, 600), **of.INDEXED)
        ),
        written=("k_cache",),
        is_exact=True,
    ),
    "dequantize_and_gather_k_cache": Facts(
        positional="out k_cache seq_lens gather_lens block_table block_size offset",
        keywords="kv_scale=1.0 kv_format= stream=",
        good=lambda: call_of(of.gather_last(bytes_below(120, 5, 4, 584))),
        written=("out",),
        is_exact=True,
    ),
    "dequantize_kv_cache": Facts(
        positional="kv_cache",
        keywords="kv_scale=1.0 kv_format= block_size= dtype=float32",
        good=lambda: call_of(of.dequantize(rows_of("fp8", 5, 4), "bfloat16")),
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
