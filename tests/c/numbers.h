/* numbers.h: every number of an operator's args. tests/package/test_source.py demands a row for
 * each.
 */
#pragma once

#include "core/kv_format.h"
#include "operators.h"

/* ---- int64_t ------------------------------------------------------------------------------- */

enum { ZERO = 1, MINUS_ONE = 2, UNREAD = 4 }; /* what an option may be; UNREAD: anything */

typedef struct size_option {
    int number; /* the operator's OP_ number */
    const char *name;
    size_t offset;
    unsigned meant;
} size_option;

#define ROW(operator, name, member, field, meant) \
    {OP_##operator, name, AT_FIELD(member, field), meant}

static const size_option sizes[] = {
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

enum { NUM_SIZES = sizeof sizes / sizeof sizes[0] };

/* ---- double and int32_t -------------------------------------------------------------------- */

/* What a field may hold: a double, any int32_t, or one from 0 to below this number. */
enum { DOUBLE = -1, ANY = 0, FLAG = 2, FORMAT = SMLA_NUM_KV_FORMATS + 1 };

#define SCALAR(operator, most, member, field) {OP_##operator, most, AT_FIELD(member, field)}

static const struct {
    int number; /* the operator's OP_ number */
    int most;
    size_t offset;
} scalars[] = {
    SCALAR(concat_and_cache_mla, FORMAT, write, kv_format),
    SCALAR(concat_and_cache_mla, DOUBLE, write, kv_scale.value),
    SCALAR(gather_kv_cache, FORMAT, gather, kv_format),
    SCALAR(gather_kv_cache, DOUBLE, gather, kv_scale.value),
    SCALAR(dequantize_kv_cache, FORMAT, dequantize, kv_format),
    SCALAR(dequantize_kv_cache, DOUBLE, dequantize, kv_scale.value),
    SCALAR(quantize_and_insert_k_cache, FORMAT, insert, kv_format),
    SCALAR(quantize_and_insert_k_cache, DOUBLE, insert, kv_scale.value),
    SCALAR(indexer_k_quant_and_cache, FORMAT, index_insert, kv_format),
    SCALAR(dequantize_and_gather_k_cache, FORMAT, gather_last, kv_format),
    SCALAR(dequantize_and_gather_k_cache, DOUBLE, gather_last, kv_scale.value),
    SCALAR(reshape_and_cache, DOUBLE, reshape, k_scale.value),
    SCALAR(reshape_and_cache, DOUBLE, reshape, v_scale.value),
    SCALAR(transfer_kv_cache, FORMAT, transfer, kv_format),
    SCALAR(build_mixed_sparse_indices, FLAG, mixed, decode_indices_are_local),
    SCALAR(sparse_attention, DOUBLE, attention, softmax_scale),
    SCALAR(sparse_attention, ANY, attention, num_splits),
    SCALAR(sparse_attention, FORMAT, attention, kv_format),
    SCALAR(sparse_attention, FORMAT, attention, extra_kv_format),
    SCALAR(sparse_attention, FLAG, attention, lse_empty_is_plus_inf),
    SCALAR(sparse_attention, DOUBLE, attention, q_scale.value),
    SCALAR(sparse_attention, DOUBLE, attention, kv_scale.value),
    SCALAR(sparse_attention, DOUBLE, attention, extra_kv_scale.value),
    SCALAR(sparse_mla_dsv4, DOUBLE, dsv4, bmm1_scale.value),
    SCALAR(sparse_mla_dsv4, DOUBLE, dsv4, bmm2_scale.value),
    SCALAR(mla_attention, DOUBLE, mla, q_scale.value),
    SCALAR(mla_attention, DOUBLE, mla, kv_scale.value),
    SCALAR(mla_attention, DOUBLE, mla, softmax_scale),
    SCALAR(mla_attention, DOUBLE, mla, softcap),
    SCALAR(mla_attention, FLAG, mla, has_window),
    SCALAR(mla_attention, FLAG, mla, is_causal),
    SCALAR(mla_attention, ANY, mla, num_splits),
    SCALAR(mla_attention, FORMAT, mla, kv_format),
    SCALAR(mla_attention, FLAG, mla, lse_empty_is_plus_inf),
    SCALAR(mla_attention, ANY, mla, fills_padding),
    SCALAR(varlen_attention, DOUBLE, varlen, q_descale.value),
    SCALAR(varlen_attention, DOUBLE, varlen, k_descale.value),
    SCALAR(varlen_attention, DOUBLE, varlen, v_descale.value),
    SCALAR(varlen_attention, DOUBLE, varlen, softmax_scale),
    SCALAR(varlen_attention, DOUBLE, varlen, softcap),
    SCALAR(varlen_attention, FLAG, varlen, has_window),
    SCALAR(varlen_attention, FLAG, varlen, is_causal),
    SCALAR(varlen_attention, ANY, varlen, num_splits),
    SCALAR(varlen_attention, ANY, varlen, fills_padding),
    SCALAR(paged_attention, DOUBLE, paged, q_descale.value),
    SCALAR(paged_attention, DOUBLE, paged, k_descale.value),
    SCALAR(paged_attention, DOUBLE, paged, v_descale.value),
    SCALAR(paged_attention, DOUBLE, paged, softmax_scale),
    SCALAR(paged_attention, DOUBLE, paged, softcap),
    SCALAR(paged_attention, FLAG, paged, has_window),
    SCALAR(paged_attention, FLAG, paged, is_causal),
    SCALAR(paged_attention, ANY, paged, num_splits),
    SCALAR(paged_attention, ANY, paged, fills_padding),
    SCALAR(split_kv_b_proj, ANY, split, storage),
    SCALAR(split_kv_b_proj, FLAG, split, rows_are_outputs),
    SCALAR(absorb_q_proj, ANY, absorb_q, storage),
    SCALAR(absorb_o_proj, ANY, absorb_o, storage),
    SCALAR(fused_q_kv_rmsnorm, DOUBLE, norm, eps),
    SCALAR(apply_rope, FLAG, apply_rope, is_neox),
    SCALAR(apply_rope, FLAG, apply_rope, inverse),
    SCALAR(rope_and_cache_mla, FLAG, rope_and_cache, is_neox),
    SCALAR(rope_and_cache_mla, FORMAT, rope_and_cache, kv_format),
    SCALAR(rope_and_cache_mla, DOUBLE, rope_and_cache, kv_scale.value),
    SCALAR(fused_inv_rope_fp8_quant, ANY, inverse, scale_layout),
    SCALAR(fused_qnorm_rope_kv_insert, DOUBLE, qnorm, eps),
    SCALAR(fused_qnorm_rope_kv_insert, DOUBLE, qnorm, q_scale_inv.value),
    SCALAR(fused_qnorm_rope_kv_insert, DOUBLE, qnorm, kv_scale.value),
    SCALAR(fused_qnorm_rope_kv_insert, FORMAT, qnorm, kv_format),
    SCALAR(fused_indexer_q_rope_quant, DOUBLE, index_query, softmax_scale),
    SCALAR(fused_indexer_q_rope_quant, DOUBLE, index_query, head_scale),
    SCALAR(indexer_logits, FLAG, logits, leaves_rest),
    SCALAR(indexer_logits, FORMAT, logits, kv_format),
    SCALAR(compress_norm_rope_store, DOUBLE, compress, eps),
    SCALAR(compress_norm_rope_store, DOUBLE, compress, kv_scale.value),
    SCALAR(compress_norm_rope_store, FORMAT, compress, kv_format),
    SCALAR(lightning_indexer, FORMAT, lightning, kv_format),
};

#undef SCALAR

enum { NUM_SCALARS = sizeof scalars / sizeof scalars[0] };
