/* size_options.h: every int64_t of an operator's args, and what it may be.
 * tests/package/test_source.py demands a row for each.
 */
#pragma once

#include "operators.h"

enum { ZERO = 1, MINUS_ONE = 2, UNREAD = 4 }; /* what an option may be; UNREAD: anything */

typedef struct size_option {
    int number; /* the operator's OP_ number */
    const char *name;
    size_t offset;
    unsigned meant;
} size_option;

#define ROW(operator, name, member, field, meant) \
    {OP_##operator, name, AT_FIELD(member, field), meant}

static const size_option size_options[] = {
    ROW(sparse_attention, "block_size", attention, block_size, ZERO),
    ROW(sparse_attention, "extra_block_size", attention, extra_block_size, ZERO),
    ROW(sparse_mla_dsv4, "window", dsv4, window, 0),
    ROW(sparse_mla_dsv4, "max_q_len", dsv4, max_q_len, UNREAD),
    ROW(mla_attention, "window_size", mla, window_left, ZERO | MINUS_ONE),
    ROW(mla_attention, "window_size", mla, window_right, ZERO | MINUS_ONE),
    ROW(mla_attention, "attention_chunk", mla, attention_chunk, ZERO),
    ROW(mla_attention, "cp", mla, cp_rank, ZERO),
    ROW(mla_attention, "cp", mla, cp_size, ZERO),
    ROW(mla_attention, "cp", mla, cp_interleave, ZERO),
    ROW(mla_attention, "max_seqlen_q", mla, max_seqlen_q, ZERO),
    ROW(mla_attention, "max_seqlen_k", mla, max_seqlen_k, ZERO),
    ROW(merge_attn_states, "prefill_tokens_with_context", merge, tokens_without_context, ZERO),
    ROW(varlen_attention, "window_size", varlen, window_left, ZERO | MINUS_ONE),
    ROW(varlen_attention, "window_size", varlen, window_right, ZERO | MINUS_ONE),
    ROW(varlen_attention, "attention_chunk", varlen, attention_chunk, ZERO),
    ROW(varlen_attention, "max_seqlen_q", varlen, max_seqlen_q, ZERO),
    ROW(varlen_attention, "max_seqlen_k", varlen, max_seqlen_k, ZERO),
    ROW(paged_attention, "window_size", paged, window_left, ZERO | MINUS_ONE),
    ROW(paged_attention, "window_size", paged, window_right, ZERO | MINUS_ONE),
    ROW(paged_attention, "attention_chunk", paged, attention_chunk, ZERO),
    ROW(paged_attention, "cp", paged, cp_rank, ZERO),
    ROW(paged_attention, "cp", paged, cp_size, ZERO),
    ROW(paged_attention, "cp", paged, cp_interleave, ZERO),
    ROW(paged_attention, "max_seqlen_q", paged, max_seqlen_q, ZERO),
    ROW(paged_attention, "max_seqlen_k", paged, max_seqlen_k, ZERO),
    ROW(gather_kv_cache, "block_size", gather, block_size, ZERO),
    ROW(dequantize_kv_cache, "block_size", dequantize, block_size, ZERO),
    ROW(transfer_kv_cache, "block_size", transfer, block_size, ZERO),
    ROW(quantize_and_insert_k_cache, "block_size", insert, block_size, ZERO),
    ROW(indexer_k_quant_and_cache, "block_size", index_insert, block_size, ZERO),
    ROW(dequantize_and_gather_k_cache, "block_size", gather_last, block_size, 0),
    ROW(dequantize_and_gather_k_cache, "offset", gather_last, offset, ZERO),
    ROW(compress_norm_rope_store, "ratio", compress, ratio, 0),
    ROW(compress_norm_rope_store, "block_size", compress, block_size, ZERO),
    ROW(convert_req_index_to_global_index, "block_size", convert, block_size, 0),
    ROW(compute_global_topk_indices_and_lens, "block_size", global_topk, block_size, 0),
    ROW(combine_topk_swa_indices, "window", combine, window, 0),
    ROW(combine_topk_swa_indices, "ratio", combine, ratio, 0),
    ROW(combine_topk_swa_indices, "topk", combine, topk, ZERO),
    ROW(combine_topk_swa_indices, "M", combine, M, ZERO),
    ROW(combine_topk_swa_indices, "N", combine, N, ZERO),
    ROW(combine_topk_swa_indices, "align", combine, align, 0),
    ROW(build_mixed_sparse_indices, "swa_block_size", mixed, swa_block_size, 0),
    ROW(build_mixed_sparse_indices, "compressed_block_size", mixed, compressed_block_size, 0),
    ROW(build_mixed_sparse_indices, "window", mixed, window, 0),
    ROW(build_mixed_sparse_indices, "ratio", mixed, ratio, 0),
    ROW(build_mixed_sparse_indices, "topk", mixed, topk, ZERO),
    ROW(indexer_logits, "block_size", logits, block_size, ZERO),
    ROW(lightning_indexer, "k", lightning, k, 0),
    ROW(lightning_indexer, "block_size", lightning, block_size, ZERO),
    ROW(lightning_indexer, "slots_block_size", lightning, slots_block_size, 0),
    ROW(lightning_indexer, "max_logits_bytes", lightning, max_logits_bytes, 0),
    ROW(fused_qnorm_rope_kv_insert, "block_size", qnorm, block_size, ZERO),
    ROW(scaled_quantize, "group", scaled, group_rows, MINUS_ONE),
    ROW(scaled_quantize, "group", scaled, group_columns, MINUS_ONE),
    ROW(fp8_linear, "input_group", linear, input_group_rows, MINUS_ONE),
    ROW(fp8_linear, "input_group", linear, input_group_columns, MINUS_ONE),
    ROW(fused_inv_rope_fp8_quant, "groups", inverse, groups, 0),
    ROW(top_k_per_row, "k", top_k, k, 0),
    ROW(top_k_per_row, "slots_block_size", top_k, slots_block_size, 0),
    ROW(top_k_merge, "k", top_k_merge, k, 0),
    ROW(cp_local_positions, "cp", own_positions, cp_rank, ZERO),
    ROW(cp_local_positions, "cp", own_positions, cp_size, 0),
    ROW(cp_local_positions, "cp", own_positions, cp_interleave, 0),
    ROW(cp_local_topk, "cp", own_lists, cp_rank, ZERO),
    ROW(cp_local_topk, "cp", own_lists, cp_size, 0),
    ROW(cp_local_topk, "cp", own_lists, cp_interleave, 0),
    ROW(cp_local_lengths, "cp", own_lengths, cp_rank, ZERO),
    ROW(cp_local_lengths, "cp", own_lengths, cp_size, 0),
    ROW(cp_local_lengths, "cp", own_lengths, cp_interleave, 0),
};

#undef ROW

enum { NUM_SIZE_OPTIONS = sizeof size_options / sizeof size_options[0] };
