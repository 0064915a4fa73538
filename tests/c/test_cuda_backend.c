/* test_cuda_backend.c: how csrc/cuda/cuda_backend.c puts a call together, with and without
 * SPARSE_MLA_CHECK. The runtime is that of runtime.h, and operators do nothing.
 */
#include "fake_cuda/backend.h"

/* The CUDA backend's calls: the operators, what the builder's metadata needs, and what
 * mla_attention runs first. */
enum {
    CALL_fill_step_lists = NUM_OPERATORS,
    CALL_fill_paged_lists,
    CALL_find_key_ranges,
    NUM_CALLS
};

#define NAME(name, ...) [OP_##name] = #name,

static const char *const call_names[NUM_CALLS] = {
    SMLA_OPERATORS(NAME) SMLA_PROJECTIONS(NAME) SMLA_ATTENTIONS(NAME)[CALL_fill_step_lists] =
        "MetadataBuilder.build",
    [CALL_fill_paged_lists] = "MetadataBuilder.build",
    [CALL_find_key_ranges] = "mla_attention",
};

static const char *const launch_names[NUM_CALLS] = {
    SMLA_LAUNCHED_OPERATORS(NAME)[OP_lightning_indexer] =
        "top_k_per_row",                 /* logits are not asked for */
    [OP_fp8_linear] = "scaled_quantize", /* then e4m3_project */
    [OP_k_up_proj] = "project",
    [OP_v_up_proj] = "project",
    [OP_kv_up_proj] = "project",
    [OP_grouped_output_projection] = "e4m3_project",
    [OP_sparse_attention] = "attention",
    [OP_sparse_mla_dsv4] = "attention",
    [OP_mla_attention] = "attention",
    [OP_varlen_attention] = "attention of heads",
    [OP_paged_attention] = "attention of heads",
    [CALL_fill_step_lists] = "fill_step_lists",
    [CALL_fill_paged_lists] = "fill_paged_lists",
    [CALL_find_key_ranges] = "key_ranges",
};

#undef NAME

/* Whether a call starts its kernels itself, rather than through a launcher with a device. */
static bool
starts_kernels(int i)
{
    return i == OP_sparse_attention || i == OP_sparse_mla_dsv4 || i == OP_mla_attention ||
           i == OP_k_up_proj || i == OP_v_up_proj || i == OP_kv_up_proj;
}

/* How many arrays a checked call of an operator copies to the host. */
static const int num_reads_of[NUM_CALLS] = {
    [OP_concat_and_cache_mla] = 1,
    [OP_quantize_and_insert_k_cache] = 1,
    [OP_indexer_k_quant_and_cache] = 1,
    [OP_reshape_and_cache] = 1,
    [OP_transfer_kv_cache] = 2,
    [OP_gather_kv_cache] = 3,
    [OP_dequantize_and_gather_k_cache] = 3,
    [OP_convert_req_index_to_global_index] = 1,
    [OP_compute_global_topk_indices_and_lens] = 2,
    [OP_combine_topk_swa_indices] = 1,
    [OP_build_mixed_sparse_indices] = 3,
    [OP_top_k_per_row] = 2,
    [OP_fused_qnorm_rope_kv_insert] = 2,
    [OP_apply_rope] = 1,
    [OP_rope_and_cache_mla] = 2,
    [OP_fused_inv_rope_fp8_quant] = 1,
    [OP_save_partial_states] = 2,
    [OP_compress_norm_rope_store] = 5,
    [OP_fused_indexer_q_rope_quant] = 1,
    [OP_indexer_logits] = 2,
    [OP_lightning_indexer] = 4,
};

/* Calls an operator for `count` tokens, requests or the like; dynamic_per_tensor_quant ignores
 * `count`. */
static smla_status
call_operator(int i, smla_stream stream, int64_t count)
{
    const smla_backend *const b = &smla_cuda_backend;
    const smla_call call = {.op = call_names[i], .stream = stream};
    const smla_cache_write_params write = {.call = call,
                                           .num_tokens = count,
                                           .slot_mapping = device_zeros,
                                           .slot_stride = 1};
    const smla_transfer_params transfer = {.call = call, .sides = {write, write}};
    const smla_gather_params gather = {.call = call,
                                       .num_reqs = count,
                                       .num_blocks = 1,
                                       .block_table = device_zeros,
                                       .seq_lens = device_zeros,
                                       .workspace_starts = device_zeros};
    const smla_dequantize_params dequantize = {.call = call,
                                               .kv = {.num_pages = count, .block_size = 1}};
    const smla_convert_params convert = {.call = call,
                                         .num_tokens = count,
                                         .req_id_per_token = device_zeros};
    const smla_attention_params attention = {.call = call,
                                             .queries = {.num_tokens = count},
                                             .plan = {.num_runs = 1}};
    const smla_attention_params varlen = {.call = call,
                                          .queries = {.num_tokens = count},
                                          .source = SMLA_KEYS_RAGGED,
                                          .visible.reqs = {.num_reqs = 1}};
    smla_attention_params paged = varlen;
    paged.source = SMLA_KEYS_PAGED;
    const smla_merge_params merge = {.call = call, .rows = {.num_tokens = count, .num_heads = 1}};
    const smla_merge_partials_params partials = {.call = call, .rows = merge.rows};
    const smla_split_kv_b_proj_params weight = {.call = call, .nope_dim = count};
    const smla_absorb_params absorb = {.call = call, .num_rows = count, .num_latents = 1};
    const smla_projection_params project = {.call = call, .num_tokens = 1, .outer_dim = count};
    const smla_projection_params project_e4m3 = {.call = call,
                                                 .num_tokens = count,
                                                 .outer_dim = 1,
                                                 .is_e4m3 = true};
    const smla_scaled_quantize_params scaled = {.call = call,
                                                .num_row_groups = count,
                                                .num_column_groups = 1};
    const smla_fp8_linear_params linear = {.call = call,
                                           .quantize = scaled,
                                           .project = project_e4m3};
    const smla_quant_params quant = {.call = call};
    const smla_q_kv_norm_params norm = {.call = call, .num_tokens = count};
    const smla_inverse_rope_params turn_back = {.call = call,
                                                .num_tokens = count,
                                                .rope = {.positions = device_zeros, .max_pos = 1}};
    const smla_apply_rope_params apply_rope = {.call = call,
                                               .num_tokens = count,
                                               .q = {.num_heads = 1},
                                               .rope = turn_back.rope};
    const smla_rope_and_cache_params rope_and_cache = {.call = call,
                                                       .queries = apply_rope,
                                                       .insert = write};
    const smla_index_query_params index_query = {.call = call,
                                                 .num_tokens = count,
                                                 .rope = turn_back.rope};
    const smla_logits_params logits = {.call = call,
                                       .num_tokens = count,
                                       .num_columns = 1,
                                       .has_pages = true,
                                       .context_lens = device_zeros,
                                       .req_id_per_token = device_zeros};
    const smla_topk_slots_params global_topk = {.call = call,
                                                .num_tokens = count,
                                                .req_id_per_token = device_zeros,
                                                .is_valid = device_flags};
    smla_top_k_params top_k = {.call = call, .num_tokens = count, .slots = global_topk};
    top_k.slots.out = (int32_t[1]){0};
    const smla_lightning_params lightning = {.call = call,
                                             .logits = logits,
                                             .top_k = top_k,
                                             .chunk_tokens = 1};
    const smla_qnorm_insert_params insert_queries = {.call = call,
                                                     .num_tokens = count,
                                                     .rope = turn_back.rope,
                                                     .insert = write};
    const smla_reshape_params reshape = {.call = call, .slots = write};
    const smla_partial_states_params save = {.call = call,
                                             .rows = write,
                                             .positions = device_zeros};
    const smla_compress_params compress = {.call = call,
                                           .states = {.rows = write},
                                           .table = {.block_table = device_zeros, .num_blocks = 1},
                                           .num_reqs = 1,
                                           .req_id_per_token = device_zeros,
                                           .rope = turn_back.rope,
                                           .insert = write};
    const smla_query_batch batch = {.query_start_loc = device_zeros};
    const smla_combine_topk_swa_params combine = {.call = call,
                                                  .num_tokens = count,
                                                  .batch = batch};
    const smla_mixed_indices_params mixed = {.call = call,
                                             .num_tokens = count,
                                             .num_decode_tokens = count,
                                             .batch = batch,
                                             .req_id_per_token = device_zeros,
                                             .is_valid = device_flags};
    const smla_rank_lists_params own_lists = {.call = call,
                                              .num_rows = count,
                                              .num_columns = count};
    const smla_top_k_merge_params top_k_merge = {.call = call, .num_tokens = count};
    const smla_step_lists_params step_lists = {.call = call, .num_rows = count};
    const smla_paged_step_params paged_lists = {.call = call, .num_reqs = count};
    const smla_key_ranges_params ranges = {.call = call, .reqs.num_tokens = count};
    switch (i) {
    case OP_concat_and_cache_mla: return b->concat_and_cache_mla(&write, &error);
    case OP_quantize_and_insert_k_cache: return b->quantize_and_insert_k_cache(&write, &error);
    case OP_indexer_k_quant_and_cache: return b->indexer_k_quant_and_cache(&write, &error);
    case OP_transfer_kv_cache: return b->transfer_kv_cache(&transfer, &error);
    case OP_reshape_and_cache: return b->reshape_and_cache(&reshape, &error);
    case OP_gather_kv_cache: return b->gather_kv_cache(&gather, &error);
    case OP_dequantize_and_gather_k_cache: return b->dequantize_and_gather_k_cache(&gather, &error);
    case OP_dequantize_kv_cache: return b->dequantize_kv_cache(&dequantize, &error);
    case OP_convert_req_index_to_global_index:
        return b->convert_req_index_to_global_index(&convert, &error);
    case OP_varlen_attention: return b->attend(&varlen, &error);
    case OP_paged_attention: return b->attend(&paged, &error);
    case OP_merge_attn_states: return b->merge_attn_states(&merge, &error);
    case OP_merge_attn_partials: return b->merge_attn_partials(&partials, &error);
    case OP_split_kv_b_proj: return b->split_kv_b_proj(&weight, &error);
    case OP_absorb_q_proj: return b->absorb_q_proj(&absorb, &error);
    case OP_absorb_o_proj: return b->absorb_o_proj(&absorb, &error);
    case OP_dynamic_per_tensor_quant: return b->dynamic_per_tensor_quant(&quant, &error);
    case OP_scaled_quantize: return b->scaled_quantize(&scaled, &error);
    case OP_fp8_linear: return b->fp8_linear(&linear, &error);
    case OP_fused_q_kv_rmsnorm: return b->fused_q_kv_rmsnorm(&norm, &error);
    case OP_apply_rope: return b->apply_rope(&apply_rope, &error);
    case OP_rope_and_cache_mla: return b->rope_and_cache_mla(&rope_and_cache, &error);
    case OP_fused_inv_rope_fp8_quant: return b->fused_inv_rope_fp8_quant(&turn_back, &error);
    case OP_compute_global_topk_indices_and_lens:
        return b->compute_global_topk_indices_and_lens(&global_topk, &error);
    case OP_combine_topk_swa_indices: return b->combine_topk_swa_indices(&combine, &error);
    case OP_build_mixed_sparse_indices: return b->build_mixed_sparse_indices(&mixed, &error);
    case OP_fused_qnorm_rope_kv_insert:
        return b->fused_qnorm_rope_kv_insert(&insert_queries, &error);
    case OP_cp_local_positions: return b->cp_local_positions(&own_lists, &error);
    case OP_cp_local_topk: return b->cp_local_topk(&own_lists, &error);
    case OP_cp_local_lengths: return b->cp_local_lengths(&own_lists, &error);
    case OP_top_k_merge: return b->top_k_merge(&top_k_merge, &error);
    case OP_top_k_per_row: return b->top_k_per_row(&top_k, &error);
    case OP_fused_indexer_q_rope_quant: return b->fused_indexer_q_rope_quant(&index_query, &error);
    case OP_indexer_logits: return b->indexer_logits(&logits, &error);
    case OP_save_partial_states: return b->save_partial_states(&save, &error);
    case OP_compress_norm_rope_store: return b->compress_norm_rope_store(&compress, &error);
    case OP_lightning_indexer: return b->lightning_indexer(&lightning, &error);
    case OP_k_up_proj:
    case OP_v_up_proj:
    case OP_kv_up_proj: return b->projection(&project, &error);
    case OP_grouped_output_projection: return b->projection(&project_e4m3, &error);
    case CALL_fill_step_lists: return b->fill_step_lists(&step_lists, &error);
    case CALL_fill_paged_lists: return b->fill_paged_lists(&paged_lists, &error);
    case CALL_find_key_ranges: return b->find_key_ranges(&ranges, &error);
    default: return b->attend(&attention, &error);
    }
}

/* The calls of an operator whose launches are `first`, and `second` or nothing. */
static void
list_calls(const char *first, const char *second, char *calls, size_t size)
{
    snprintf(calls, size,
             "cuCtxPushCurrent cudaStreamIsCapturing@1 cudaStreamGetDevice@1~ %s@1 "
             "%scuCtxPopCurrent@1 ",
             first, second);
}

/* Every operator runs with its stream's device current, or reports why it cannot. */
static void
test_operators(void)
{
    const smla_stream stream = {.device_id = 1, .handle = &streams[1]};
    const smla_stream foreign = {.device_id = 1, .handle = &streams[0]};
    begin();
    cpu_status = SMLA_OK;
    EXPECT_OK(call_operator(OP_concat_and_cache_mla, stream, 1));
    for (int i = 0; i < NUM_CALLS; i++) {
        char calls[256];
        char text[128];
        list_calls(launch_names[i], i == OP_fp8_linear ? "e4m3_project@1 " : "", calls,
                   sizeof calls);
        forget_calls();
        launch_device = NULL;
        EXPECT_OK(call_operator(i, stream, 1));
        EXPECT_CALLS(calls);
        const bool is_launched = !starts_kernels(i) && i != OP_grouped_output_projection;
        EXPECT(launch_device == (is_launched ? smla_cuda_find_device(1) : NULL));
        if (i != OP_dynamic_per_tensor_quant && i != CALL_fill_paged_lists) { /* nothing to do */
            EXPECT_OK(call_operator(i, stream, 0));
            EXPECT_CALLS("");
        }
        launch_code = cudaErrorUnknown;
        snprintf(text, sizeof text, "%s: %s failed: a text (code 999)", call_names[i],
                 starts_kernels(i) ? "a kernel" : "cudaLaunchKernelExC");
        list_calls(launch_names[i], "", calls, sizeof calls);
        EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, text);
        EXPECT_CALLS(calls);
        launch_code = cudaSuccess;
        snprintf(text, sizeof text, "%s: `stream` must be a stream of the arrays' device",
                 call_names[i]);
        EXPECT_FAIL(call_operator(i, foreign, 1), SMLA_ERROR_VALUE, text);
        EXPECT_EQ(count_calls(launch_names[i]), 0);
        EXPECT_EQ(fake.current, 0);
        snprintf(text, sizeof text, "%s: the CUDA device must be one of", call_names[i]);
        EXPECT_FAIL(call_operator(i, (smla_stream){2, NULL}, 1), SMLA_ERROR_RUNTIME, text);
        fail_call("cuCtxPushCurrent", 0, cudaErrorUnknown);
        snprintf(text, sizeof text, "%s: cuCtxPushCurrent failed", call_names[i]);
        EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, text);
        EXPECT_EQ(count_calls(launch_names[i]), 0);
        EXPECT_EQ(fake.current, 0);
    }
    const smla_merge_params no_heads = {.call = {.stream = {2, NULL}}, .rows = {.num_tokens = 1}};
    EXPECT_OK(smla_cuda_backend.merge_attn_states(&no_heads, &error));
    const smla_merge_partials_params no_rows = {.call = no_heads.call, .rows = no_heads.rows};
    EXPECT_OK(smla_cuda_backend.merge_attn_partials(&no_rows, &error));
    const smla_projection_params no_tokens = {.call = {.op = op, .stream = {2, NULL}},
                                              .outer_dim = 1};
    EXPECT_OK(smla_cuda_backend.projection(&no_tokens, &error));
    const smla_split_kv_b_proj_params no_keys = {.call = {.stream = stream}, .value_dim = 1};
    forget_calls();
    EXPECT_OK(smla_cuda_backend.split_kv_b_proj(&no_keys, &error));
    EXPECT_EQ(count_calls("split_kv_b_proj"), 1);
    const smla_gather_params gather = {.num_reqs = 1};
    forget_calls();
    EXPECT_OK(smla_cuda_backend.check_gather(&gather, &error));
    EXPECT_CALLS("");
}

/* A launcher whose table has no kernel for what the check lets through: a format that its author
 * has not added there. */
static void
test_tables_without_a_kernel(void)
{
    const smla_stream stream = {.device_id = 1, .handle = &streams[1]};
    const smla_kv_view kv = {.num_pages = 1,
                             .block_size = 1,
                             .format = &smla_kv_formats[SMLA_ROW_BFLOAT16_512]};
    const smla_cache_write_params write = {.call = {.op = "concat_and_cache_mla",
                                                    .stream = stream,
                                                    .kv_format = kv.format},
                                           .num_tokens = 1,
                                           .kv = kv};
    const smla_gather_params gather = {.call = {.op = "gather_kv_cache",
                                                .stream = stream,
                                                .kv_format = kv.format},
                                       .num_reqs = 1,
                                       .kv = kv};
    const smla_dequantize_params dequantize = {
        .call = {.op = "dequantize_kv_cache", .stream = stream, .kv_format = kv.format}, .kv = kv};
    const smla_merge_params merge = {.call = {.op = "merge_attn_states", .stream = stream},
                                     .rows = {.num_tokens = 1, .num_heads = 1}};
    begin();
    launch_code = SMLA_NO_KERNEL;
    EXPECT_FAIL(smla_cuda_backend.concat_and_cache_mla(&write, &error), SMLA_ERROR_RUNTIME,
                "concat_and_cache_mla: no CUDA kernel serves caches of bfloat16 with 512 elements "
                "a token");
    EXPECT_FAIL(smla_cuda_backend.gather_kv_cache(&gather, &error), SMLA_ERROR_RUNTIME,
                "gather_kv_cache: no CUDA kernel serves caches of bfloat16 with 512 elements");
    EXPECT_FAIL(smla_cuda_backend.dequantize_kv_cache(&dequantize, &error), SMLA_ERROR_RUNTIME,
                "dequantize_kv_cache: no CUDA kernel serves caches of bfloat16 with 512 elements");
    EXPECT_FAIL(smla_cuda_backend.merge_attn_states(&merge, &error), SMLA_ERROR_RUNTIME,
                "merge_attn_states: no CUDA kernel serves these arrays");
    EXPECT_EQ(fake.current, 0);
    launch_code = cudaSuccess;
}

/* A transfer from or to host memory: the device gets its own address of it if all of it is
 * pinned. */
static void
test_pinned_host_memory(void)
{
    static uint8_t memory[64], alias[64];
    const smla_stream stream = {.device_id = 1, .handle = &streams[1]};
    begin();
    cpu_status = SMLA_OK;
    EXPECT_OK(call_operator(OP_transfer_kv_cache, stream, 1));
    set_env("SPARSE_MLA_CHECK", "1");
    for (int side = 0; side < SMLA_TRANSFER_SIDES; side++) {
        static const char *const names[] = {"src", "dst"};
        const smla_call call = {.op = "transfer_kv_cache", .stream = stream};
        char text[160];
        smla_transfer_params p = {.call = call};
        for (int i = 0; i < SMLA_TRANSFER_SIDES; i++) {
            p.sides[i] = (smla_cache_write_params){.call = call,
                                                   .cache_name = names[i],
                                                   .num_tokens = 1,
                                                   .slot_mapping = device_zeros};
        }
        p.sides[side].kv = (smla_kv_view){.base = memory + 24, .scales = memory + 40};
        p.host_memory[side] = (smla_byte_range){memory + 16, memory + 48, true};
        snprintf(text, sizeof text,
                 "transfer_kv_cache: `%s` must be on cuda:1 like `src_slots` or in pinned host "
                 "memory, got host memory that is not pinned",
                 names[side]);
        const struct {
            int64_t first;
            int64_t bytes;
            bool is_good;
        } cases[] = {{0, 64, true},   {16, 32, true}, {0, 0, false},
                     {17, 47, false}, {0, 47, false}, {48, 16, false}};
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            fake.pinned = memory + cases[i].first;
            fake.pinned_bytes = cases[i].bytes;
            fake.reached_at = alias + cases[i].first;
            forget_calls();
            if (cases[i].is_good) {
                EXPECT_OK(smla_cuda_backend.transfer_kv_cache(&p, &error));
                EXPECT(side == SMLA_TRANSFER_SRC || seen_write.kv.base == alias + 24);
                EXPECT(side == SMLA_TRANSFER_SRC || seen_write.kv.scales == alias + 40);
            } else {
                EXPECT_FAIL(smla_cuda_backend.transfer_kv_cache(&p, &error), SMLA_ERROR_VALUE,
                            text);
            }
            EXPECT_EQ(count_calls("cudaPointerGetAttributes"), 2);
            EXPECT_EQ(count_calls("transfer_kv_cache"), cases[i].is_good);
            EXPECT_EQ(fake.current, 0);
        }
        for (int n = 0; n < 2; n++) {
            fail_call("cudaPointerGetAttributes", n, cudaErrorUnknown);
            EXPECT_FAIL(smla_cuda_backend.transfer_kv_cache(&p, &error), SMLA_ERROR_RUNTIME,
                        "transfer_kv_cache: cudaPointerGetAttributes failed: a text (code 999)");
            EXPECT_EQ(fake.current, 0);
        }
    }
}

/* Parts that another GPU's memory has: the driver is asked for each of them, and for no other. */
static void
test_parts_in_reach(void)
{
    static uint8_t memory[4];
    const smla_call call = {.op = "merge_attn_partials",
                            .stream = {.device_id = 0, .handle = &streams[0]}};
    smla_merge_partials_params p = {.call = call,
                                    .rows = {.num_tokens = 1, .num_heads = 1},
                                    .num_parts = SMLA_MAX_PARTS};
    begin();
    cpu_status = SMLA_OK;
    fake.mapped = memory;
    fake.mapped_bytes = sizeof memory;
    fake.mapped_device = 1;
    EXPECT_OK(smla_cuda_backend.merge_attn_partials(&p, &error));
    EXPECT_EQ(count_calls("cudaPointerGetAttributes"), 0);
    const int64_t parts[] = {0, 5, SMLA_MAX_PARTS - 1};
    for (int i = 0; i < 3; i++) {
        for (int is_lse = 0; is_lse < 2; is_lse++) {
            char text[160];
            smla_merge_part *const part = &p.parts[parts[i]];
            part->out = memory + 1;
            part->lse = (const float *)(const void *)memory;
            p.remote_outs = p.remote_lses = (uint64_t)1 << parts[i];
            forget_calls();
            EXPECT_OK(smla_cuda_backend.merge_attn_partials(&p, &error));
            EXPECT_EQ(count_calls("cudaPointerGetAttributes"), 2);
            EXPECT_EQ(count_calls("merge_attn_partials"), 1);
            part->out = is_lse ? part->out : memory + sizeof memory;
            part->lse = NULL;
            snprintf(text, sizeof text,
                     "merge_attn_partials: `%s[%d]` must be in memory that cuda:0 can read, got "
                     "memory of cuda:1 without peer access",
                     is_lse ? "lses" : "outs", (int)parts[i]);
            forget_calls();
            EXPECT_FAIL(smla_cuda_backend.merge_attn_partials(&p, &error), SMLA_ERROR_VALUE, text);
            EXPECT_EQ(count_calls("cudaPointerGetAttributes"), 1 + is_lse);
            EXPECT_EQ(count_calls("merge_attn_partials"), 0);
            fail_call("cudaPointerGetAttributes", 0, cudaErrorUnknown);
            EXPECT_FAIL(smla_cuda_backend.merge_attn_partials(&p, &error), SMLA_ERROR_RUNTIME,
                        "merge_attn_partials: cudaPointerGetAttributes failed: a text (code 999)");
            EXPECT_EQ(fake.current, 0);
        }
    }
}

/* Both launches for each chunk of tokens; the first one that fails is the last. */
static void
test_chunks_of_lightning_indexer(void)
{
    float matrix[4];
    const smla_stream stream = {.device_id = 1, .handle = &streams[1]};
    const smla_lightning_params call = {
        .call = {.op = "lightning_indexer", .stream = stream},
        .logits = {.num_tokens = 5, .out = matrix},
        .top_k = {.num_tokens = 5, .logits = matrix},
        .chunk_tokens = 2,
    };
    begin();
    EXPECT_OK(smla_cuda_backend.lightning_indexer(&call, &error));
    forget_calls();
    EXPECT_OK(smla_cuda_backend.lightning_indexer(&call, &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaStreamIsCapturing@1 cudaStreamGetDevice@1~ "
                 "indexer_logits@1 top_k_per_row@1 indexer_logits@1 top_k_per_row@1 "
                 "indexer_logits@1 top_k_per_row@1 "
                 "cuCtxPopCurrent@1 ");
    launch_code = cudaErrorUnknown;
    EXPECT_FAIL(smla_cuda_backend.lightning_indexer(&call, &error), SMLA_ERROR_RUNTIME,
                "lightning_indexer: cudaLaunchKernelExC failed: a text (code 999)");
    launch_code = cudaSuccess;
    EXPECT_EQ(count_calls("indexer_logits"), 1);
    EXPECT_EQ(count_calls("top_k_per_row"), 0);
}

/* A device that is current already may still be too old. */
static void
test_old_device(void)
{
    begin();
    fake.capability = 75;
    for (int i = 0; i < NUM_CALLS; i++) {
        EXPECT_FAIL(call_operator(i, (smla_stream){0, NULL}, 1), SMLA_ERROR_RUNTIME,
                    "must have compute capability 8.0 or newer, got 7.5 (cuda:0)");
        EXPECT_EQ(count_calls(launch_names[i]), 0);
    }
}

/* The functions of other files that the backend's table names. */
static void
test_backend_table(void)
{
    const smla_backend *const b = &smla_cuda_backend;
    EXPECT(strcmp(b->name, "cuda") == 0 && b->device_type == kDLCUDA);
    EXPECT(b->check_device == smla_cuda_check_device);
    EXPECT(b->plan_attention == smla_cuda_plan_attention);
    EXPECT(b->prefers_direct == smla_cuda_prefers_direct);
    EXPECT(b->attention_workspace_size == smla_cuda_attention_workspace_size);
    EXPECT(b->kernel_name == smla_cuda_kernel_name);
    EXPECT(b->kernels == smla_cuda_kernels);
    EXPECT(b->allocate == smla_cuda_allocate && b->release == smla_cuda_release);
    EXPECT(b->allocate_zeros == smla_cuda_allocate_zeros);
    EXPECT(b->create_mirror == smla_cuda_create_mirror);
    EXPECT(b->destroy_mirror == smla_cuda_destroy_mirror);
    EXPECT(b->begin_write == smla_cuda_begin_write && b->end_write == smla_cuda_end_write);
    EXPECT(b->begin_use == smla_cuda_begin_use && b->end_use == smla_cuda_end_use);
    EXPECT(b->streams == &smla_cuda_stream_ops);
    begin();
    fake.capability = 103;
    EXPECT_EQ(smla_cuda_backend.capability(1), 103);
    EXPECT_EQ(smla_cuda_backend.capability(2), 0);
}

/* Operators with SPARSE_MLA_CHECK=1. */
static void
test_checked_operators(void)
{
    const smla_stream stream = {.device_id = 1, .handle = &streams[1]};
    begin();
    EXPECT_OK(call_operator(OP_sparse_attention, stream, 1));
    set_env("SPARSE_MLA_CHECK", "1");
    for (int i = 0; i < NUM_CALLS; i++) {
        const int num_reads = num_reads_of[i];
        char text[128];
        forget_calls();
        cpu_status = SMLA_OK;
        EXPECT_OK(call_operator(i, stream, 1));
        EXPECT_EQ(count_calls("copy to host"), num_reads);
        EXPECT_EQ(count_calls("cudaStreamSynchronize"), 2 + num_reads);
        EXPECT_EQ(count_calls(launch_names[i]), 1);
        const char *const end = strstr(fake.calls, launch_names[i]);
        EXPECT(end != NULL && strstr(end, "cudaStreamSynchronize@1 cuCtxPopCurrent@1 ") != NULL);
        EXPECT_EQ(num_device_arrays, 0);
        /* the CPU's check refuses the values */
        cpu_status = SMLA_ERROR_VALUE;
        forget_calls();
        if (num_reads > 0) {
            EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_VALUE, "the CPU's");
        }
        EXPECT_EQ(count_calls(launch_names[i]), 0);
        EXPECT_EQ(fake.current, 0);
        cpu_status = SMLA_OK;
        /* errors of earlier work, of the copies, and of the call's own kernels */
        for (int n = 0; n < 2 + num_reads; n++) {
            forget_calls();
            snprintf(text, sizeof text, "%s: %s failed: a text (code 700)", call_names[i],
                     n == 0               ? "cudaStreamSynchronize, before the call,"
                     : n == 1 + num_reads ? "a kernel of this call"
                                          : "cudaStreamSynchronize");
            fail_call("cudaStreamSynchronize", n, cudaErrorIllegalAddress);
            EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, text);
            EXPECT_EQ(count_calls(launch_names[i]), n == 1 + num_reads);
            EXPECT_EQ(fake.current, 0);
        }
        for (int n = 0; n < num_reads; n++) {
            fail_call("copy to host", n, cudaErrorIllegalAddress);
            snprintf(text, sizeof text, "%s: cudaMemcpyAsync failed", call_names[i]);
            EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, text);
        }
        /* a failed launch is reported as such, and the stream is not waited for */
        launch_code = cudaErrorInvalidValue;
        forget_calls();
        EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME, "(code 1)");
        EXPECT_EQ(count_calls("cudaStreamSynchronize"), 1 + num_reads);
        launch_code = cudaSuccess;
        streams[1].is_capturing = true;
        EXPECT_FAIL(call_operator(i, stream, 1), SMLA_ERROR_RUNTIME,
                    "SPARSE_MLA_CHECK must be unset while a CUDA graph is captured");
        streams[1].is_capturing = false;
    }
    fail_call("cudaStreamIsCapturing", 1, cudaErrorUnknown);
    EXPECT_FAIL(call_operator(OP_sparse_attention, stream, 1), SMLA_ERROR_RUNTIME,
                "cudaStreamIsCapturing failed");
    has_memory = false;
    EXPECT_FAIL(call_operator(OP_concat_and_cache_mla, stream, 1), SMLA_ERROR_MEMORY,
                "concat_and_cache_mla: SPARSE_MLA_CHECK must find 4 bytes for a copy of an array");
    has_memory = true;
    EXPECT_EQ(num_live, 0);
}

int
main(void)
{
    RUN(test_operators);
    RUN(test_tables_without_a_kernel);
    RUN(test_pinned_host_memory);
    RUN(test_parts_in_reach);
    RUN(test_chunks_of_lightning_indexer);
    RUN(test_old_device);
    RUN(test_backend_table);
    RUN(test_checked_operators);
    return report("test_cuda_backend");
}
