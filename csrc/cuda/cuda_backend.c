/* cuda_backend.c: the CUDA backend as a table. An operator makes its device current, starts its
 * kernels on the caller's stream, and turns the error code of the launch into a status. Nothing
 * waits for the device, except in checked mode (SPARSE_MLA_CHECK=1).
 */
#include "core/params_all.h"
#include "cuda/attention/partials/part_rows.h"
#include "cuda/host/cuda.h"

/* ---- One call of an operator --------------------------------------------------------------- */

typedef struct cuda_call {
    const smla_call *call;
    const smla_cuda_device *device;
    bool is_checked;
    smla_cuda_guard guard;
} cuda_call;

/* An end_call must follow every begin_call that returned SMLA_OK. */
static smla_status
begin_call(const smla_call *of, cuda_call *call, smla_error *error)
{
    const smla_stream stream = of->stream;
    SMLA_TRY(smla_cuda_check_device(of->op, stream.device_id, error));
    call->call = of;
    call->device = smla_cuda_find_device(stream.device_id);
    SMLA_TRY(smla_cuda_enter(of->op, stream.device_id, &call->guard, error));
    call->is_checked = smla_cuda_is_set("SPARSE_MLA_CHECK");
    smla_status status = smla_cuda_check_stream(of->op, stream, error);
    if (status == SMLA_OK && call->is_checked) {
        status = smla_cuda_begin_checked(of->op, stream, error);
    }
    if (status != SMLA_OK) {
        smla_cuda_leave(&call->guard);
    }
    return status;
}

static smla_status
end_call(const cuda_call *call, smla_status status, smla_error *error)
{
    if (status == SMLA_OK && call->is_checked) {
        status = smla_cuda_end_checked(call->call->op, call->call->stream, error);
    }
    smla_cuda_leave(&call->guard);
    return status;
}

/* The error where a launcher has no kernel for what the operator's check lets through. A new format
 * needs a row in the table of every such launcher (docs/kernels.md). */
static smla_status
fail_without_kernel(const smla_call *call, smla_error *error)
{
    return call->kv_format == NULL
               ? smla_fail(error, SMLA_ERROR_RUNTIME, "%s: no CUDA kernel serves these arrays",
                           call->op)
               : smla_fail(error, SMLA_ERROR_RUNTIME,
                           "%s: no CUDA kernel serves caches of %s with %d elements a token",
                           call->op, call->kv_format->name, call->kv_format->row_elements);
}

/* Ends a call whose launches returned `code`. */
static smla_status
end_launch(const cuda_call *call, cudaError_t code, smla_error *error)
{
    const smla_status status =
        code == SMLA_NO_KERNEL
            ? fail_without_kernel(call->call, error)
            : smla_cuda_status(call->call->op, "cudaLaunchKernelExC", code, error);
    return end_call(call, status, error);
}

/* ---- Operators ----------------------------------------------------------------------------- */

/* In checked mode, the values that the CPU would refuse are errors before the launch. */
static smla_status
check_insert_values(const smla_qnorm_insert_params *p, smla_error *error)
{
    SMLA_TRY(smla_cuda_check_positions(&p->call, &p->rope, p->num_tokens, error));
    return smla_cuda_check_cache_write(&p->insert, error);
}

static smla_status
check_turned_keys(const smla_rope_and_cache_params *p, smla_error *error)
{
    SMLA_TRY(smla_cuda_check_positions(&p->call, &p->queries.rope, p->queries.num_tokens, error));
    return smla_cuda_check_cache_write(&p->insert, error);
}

static smla_status
check_chosen_slots(const smla_top_k_params *p, smla_error *error)
{
    return p->slots.out == NULL ? SMLA_OK : smla_cuda_check_global_topk(&p->slots, error);
}

static smla_status
check_lightning_values(const smla_lightning_params *p, smla_error *error)
{
    SMLA_TRY(smla_cuda_check_logits(&p->logits, error));
    return check_chosen_slots(&p->top_k, error);
}

static cudaError_t
launch_lightning_chunk(const smla_lightning_params *p, const smla_cuda_device *device)
{
    const cudaError_t code =
        p->logits.out == NULL ? cudaSuccess : smla_cuda_launch_indexer_logits(&p->logits, device);
    return code != cudaSuccess ? code : smla_cuda_launch_top_k_per_row(&p->top_k, device);
}

/* Chunks follow each other in the stream: the logits of one overwrite those of the last. */
static cudaError_t
smla_cuda_launch_lightning_indexer(const smla_lightning_params *p, const smla_cuda_device *device)
{
    cudaError_t code = cudaSuccess;
    for (int64_t token = 0; code == cudaSuccess && token < p->logits.num_tokens;
         token += p->chunk_tokens) {
        const smla_lightning_params chunk = smla_lightning_chunk(p, token);
        code = launch_lightning_chunk(&chunk, device);
    }
    return code;
}

/* The function of an operator in the backend's table. A call that is empty has nothing to do.
 * `requirement` is asked of every call. A call in checked mode then reads the values that the CPU
 * would refuse. */
#define OPERATOR_THAT(name, params_type, is_empty, requirement, check)                 \
    static smla_status name(const params_type *p, smla_error *error)                   \
    {                                                                                  \
        cuda_call call;                                                                \
        if (is_empty) {                                                                \
            return SMLA_OK;                                                            \
        }                                                                              \
        SMLA_TRY(begin_call(&p->call, &call, error));                                  \
        smla_status status = (requirement);                                            \
        if (status == SMLA_OK && call.is_checked) {                                    \
            status = (check);                                                          \
        }                                                                              \
        return status == SMLA_OK                                                       \
                   ? end_launch(&call, smla_cuda_launch_##name(p, call.device), error) \
                   : end_call(&call, status, error);                                   \
    }

#define OPERATOR(name, params_type, is_empty, check) \
    OPERATOR_THAT(name, params_type, is_empty, SMLA_OK, check)

/* The projection of an input that the first launch quantises. */
static cudaError_t
smla_cuda_launch_fp8_linear(const smla_fp8_linear_params *p, const smla_cuda_device *device)
{
    const cudaError_t code = smla_cuda_launch_scaled_quantize(&p->quantize, device);
    return code != cudaSuccess ? code : smla_cuda_launch_projection_e4m3(&p->project);
}

#define NO_TOKENS (p->num_tokens == 0)
#define NO_VALUES SMLA_OK /* no value of the arrays is an error */

OPERATOR(concat_and_cache_mla, smla_cache_write_params, NO_TOKENS,
         smla_cuda_check_cache_write(p, error))
OPERATOR(quantize_and_insert_k_cache, smla_cache_write_params, NO_TOKENS,
         smla_cuda_check_cache_write(p, error))
OPERATOR(indexer_k_quant_and_cache, smla_cache_write_params, NO_TOKENS,
         smla_cuda_check_cache_write(p, error))
OPERATOR(reshape_and_cache, smla_reshape_params, p->slots.num_tokens == 0,
         smla_cuda_check_cache_write(&p->slots, error))
OPERATOR(gather_kv_cache, smla_gather_params, p->num_reqs == 0, smla_cuda_check_gather(p, error))
OPERATOR(dequantize_and_gather_k_cache, smla_gather_params, p->num_reqs == 0,
         smla_cuda_check_gather(p, error))
OPERATOR(dequantize_kv_cache, smla_dequantize_params, smla_kv_num_slots(&p->kv) == 0, NO_VALUES)
OPERATOR(convert_req_index_to_global_index, smla_convert_params, NO_TOKENS,
         smla_cuda_check_convert(p, error))
OPERATOR(compute_global_topk_indices_and_lens, smla_topk_slots_params, NO_TOKENS,
         smla_cuda_check_global_topk(p, error))
OPERATOR(combine_topk_swa_indices, smla_combine_topk_swa_params, NO_TOKENS,
         smla_cuda_check_combine_topk_swa(p, error))
OPERATOR(build_mixed_sparse_indices, smla_mixed_indices_params, NO_TOKENS,
         smla_cuda_check_mixed_indices(p, error))
OPERATOR(cp_local_positions, smla_rank_lists_params, p->num_rows * p->num_columns == 0, NO_VALUES)
OPERATOR(cp_local_topk, smla_rank_lists_params, p->num_rows == 0, NO_VALUES)
OPERATOR(cp_local_lengths, smla_rank_lists_params, p->num_columns == 0, NO_VALUES)
OPERATOR(fill_step_lists, smla_step_lists_params, p->num_rows == 0, NO_VALUES)
OPERATOR(fill_paged_lists, smla_paged_step_params, false /* sums of no requests are 0 */, NO_VALUES)
OPERATOR(key_ranges, smla_key_ranges_params, p->reqs.num_tokens == 0, NO_VALUES)
OPERATOR(top_k_per_row, smla_top_k_params, NO_TOKENS, check_chosen_slots(p, error))
OPERATOR(top_k_merge, smla_top_k_merge_params, NO_TOKENS, NO_VALUES)
OPERATOR(merge_attn_states, smla_merge_params, p->rows.num_tokens * p->rows.num_heads == 0,
         NO_VALUES)
OPERATOR(split_kv_b_proj, smla_split_kv_b_proj_params, p->nope_dim == 0 && p->value_dim == 0,
         NO_VALUES)
OPERATOR(absorb_q_proj, smla_absorb_params, p->num_rows == 0 || p->num_latents == 0, NO_VALUES)
OPERATOR(absorb_o_proj, smla_absorb_params, p->num_rows == 0 || p->num_latents == 0, NO_VALUES)
OPERATOR(dynamic_per_tensor_quant, smla_quant_params, false /* no elements have a scale, too */,
         NO_VALUES)
OPERATOR(scaled_quantize, smla_scaled_quantize_params,
         p->num_row_groups == 0 || p->num_column_groups == 0, NO_VALUES)
OPERATOR(fp8_linear, smla_fp8_linear_params,
         p->project.num_tokens == 0 || p->project.outer_dim == 0, NO_VALUES)
OPERATOR(fused_q_kv_rmsnorm, smla_q_kv_norm_params, NO_TOKENS, NO_VALUES)
OPERATOR(fused_qnorm_rope_kv_insert, smla_qnorm_insert_params, NO_TOKENS,
         check_insert_values(p, error))
OPERATOR(apply_rope, smla_apply_rope_params,
         p->num_tokens == 0 || p->q.num_heads + p->k.num_heads == 0,
         smla_cuda_check_positions(&p->call, &p->rope, p->num_tokens, error))
OPERATOR(rope_and_cache_mla, smla_rope_and_cache_params,
         p->queries.num_tokens * p->queries.q.num_heads + p->insert.num_tokens == 0,
         check_turned_keys(p, error))
OPERATOR(fused_inv_rope_fp8_quant, smla_inverse_rope_params, NO_TOKENS,
         smla_cuda_check_positions(&p->call, &p->rope, p->num_tokens, error))
OPERATOR(save_partial_states, smla_partial_states_params, p->rows.num_tokens == 0,
         smla_cuda_check_partial_states(p, error))
OPERATOR(compress_norm_rope_store, smla_compress_params, p->insert.num_tokens == 0,
         smla_cuda_check_compress(p, error))
OPERATOR(fused_indexer_q_rope_quant, smla_index_query_params, NO_TOKENS,
         smla_cuda_check_positions(&p->call, &p->rope, p->num_tokens, error))
OPERATOR(indexer_logits, smla_logits_params, p->num_tokens == 0 || p->num_columns == 0,
         smla_cuda_check_logits(p, error))
OPERATOR(lightning_indexer, smla_lightning_params, p->logits.num_tokens == 0,
         check_lightning_values(p, error))

/* Turns a cache's addresses into those by which the device reaches its host memory, if it is there.
 * Refuses memory that is not pinned, and memory of which only a part is. */
static smla_status
reach_host_memory(smla_transfer_params *p, int side, smla_error *error)
{
    smla_cache_write_params *const cache = &p->sides[side];
    const smla_byte_range host = p->host_memory[side];
    struct cudaPointerAttributes first = {.devicePointer = NULL};
    struct cudaPointerAttributes last = {.devicePointer = NULL};
    if (host.low == NULL) {
        return SMLA_OK;
    }
    cudaError_t code = cudaPointerGetAttributes(&first, host.low);
    if (code == cudaSuccess) {
        code = cudaPointerGetAttributes(&last, host.high - 1);
    }
    SMLA_TRY(smla_cuda_status(p->call.op, "cudaPointerGetAttributes", code, error));
    const uint8_t *const low = first.devicePointer;
    const uint8_t *const high = last.devicePointer;
    if (first.type == cudaMemoryTypeUnregistered || last.type == cudaMemoryTypeUnregistered ||
        high - low != host.high - 1 - host.low) {
        return smla_fail_value(
            error, p->call.op,
            "`%s` must be on cuda:%d like `src_slots` or in pinned host memory, got host memory "
            "that is not pinned",
            cache->cache_name, p->call.stream.device_id);
    }
    const ptrdiff_t distance = low - host.low;
    cache->kv.base += distance;
    cache->kv.scales += distance;
    return SMLA_OK;
}

/* A copy of rows, whose caches the driver may know to be in pinned host memory. */
static smla_status
transfer_kv_cache(const smla_transfer_params *given, smla_error *error)
{
    smla_transfer_params p = *given;
    cuda_call call;
    if (p.sides[SMLA_TRANSFER_DST].num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&p.call, &call, error));
    smla_status status = SMLA_OK;
    for (int i = 0; i < SMLA_TRANSFER_SIDES && status == SMLA_OK; i++) {
        status = reach_host_memory(&p, i, error);
    }
    for (int i = 0; i < SMLA_TRANSFER_SIDES && status == SMLA_OK && call.is_checked; i++) {
        status = smla_cuda_check_cache_write(&p.sides[i], error);
    }
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_transfer_kv_cache(&p, call.device), error)
               : end_call(&call, status, error);
}

/* Refuses memory of another GPU that the current device cannot read: there is no path to it, or
 * nobody has mapped it or turned on peer access. */
static smla_status
require_reach(const smla_call *call, const char *name, int64_t part, const void *memory,
              smla_error *error)
{
    struct cudaPointerAttributes found = {.devicePointer = NULL};
    SMLA_TRY(smla_cuda_status(call->op, "cudaPointerGetAttributes",
                              cudaPointerGetAttributes(&found, memory), error));
    return found.devicePointer != NULL
               ? SMLA_OK
               : smla_fail_value(error, call->op,
                                 "`%s[%lld]` must be in memory that cuda:%d can read, got memory "
                                 "of cuda:%d without peer access",
                                 name, (long long)part, call->stream.device_id, found.device);
}

static smla_status
require_parts_in_reach(const smla_merge_partials_params *p, smla_error *error)
{
    const uint64_t remote = p->remote_outs | p->remote_lses;
    for (int64_t i = 0; i < p->num_parts && remote >> i != 0; i++) {
        if (p->remote_outs >> i & 1) {
            SMLA_TRY(require_reach(&p->call, "outs", i, p->parts[i].out, error));
        }
        if (p->remote_lses >> i & 1) {
            SMLA_TRY(require_reach(&p->call, "lses", i, p->parts[i].lse, error));
        }
    }
    return SMLA_OK;
}

OPERATOR_THAT(merge_attn_partials, smla_merge_partials_params,
              p->rows.num_tokens * p->rows.num_heads == 0, require_parts_in_reach(p, error),
              NO_VALUES)

/* The projections, which are cuBLAS's or kernels of e4m3. */
static smla_status
projection(const smla_projection_params *p, smla_error *error)
{
    cuda_call call;
    if (p->num_tokens == 0 || p->outer_dim == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&p->call, &call, error));
    return p->is_e4m3 ? end_launch(&call, smla_cuda_launch_projection_e4m3(p), error)
                      : end_call(&call, smla_cuda_projection(p, error), error);
}

/* Kernels mask indices and lengths out of range, in checked mode, too: they are valid input. */
static smla_status
attend(const smla_attention_params *p, smla_error *error)
{
    const bool has_heads = !smla_has_lists(p);
    cuda_call call;
    if (p->queries.num_tokens == 0 ||
        (has_heads && p->visible.reqs.num_reqs == 0 && !smla_has_padding(&p->padding))) {
        return SMLA_OK;
    }
    SMLA_TRY(smla_cuda_require_part_rows(p, error));
    SMLA_TRY(begin_call(&p->call, &call, error));
    return has_heads ? end_launch(&call, smla_cuda_attend_mha(p, call.device), error)
                     : end_call(&call, smla_cuda_attend_lists(p, error), error);
}

/* Finds nothing: the values are on the device. In checked mode gather_kv_cache reads them. */
static smla_status
check_gather(const smla_gather_params *p, smla_error *error)
{
    (void)p;
    (void)error;
    return SMLA_OK;
}

static int32_t
find_capability(int32_t device_id)
{
    const smla_cuda_device *const device = smla_cuda_find_device(device_id);
    return device == NULL ? 0 : device->compute_capability;
}

/* ---- The table ----------------------------------------------------------------------------- */

/* The line follows another initializer, so it begins with the comma. */
#define FILL_SLOT(name, args_type, params_type, family) , .name = name

const smla_backend smla_cuda_backend = {
    .name = "cuda",
    .device_type = kDLCUDA,
    .check_device = smla_cuda_check_device,
    .capability = find_capability,
    .chunk_logits_bytes = INT64_MAX,
    .chunk_tokens = 64, /* whole blocks of tokens of every kernel of logits */
    .check_gather = check_gather,
    .fill_step_lists = fill_step_lists,
    .fill_paged_lists = fill_paged_lists,
    .prefers_direct = smla_cuda_prefers_direct,
    .attention_workspace_size = smla_cuda_attention_workspace_size,
    .plan_attention = smla_cuda_plan_attention,
    .kernel_name = smla_cuda_kernel_name,
    .find_key_ranges = key_ranges,
    .attend = attend,
    .projection = projection,
    .kernels = smla_cuda_kernels,
    .allocate = smla_cuda_allocate,
    .allocate_zeros = smla_cuda_allocate_zeros,
    .release = smla_cuda_release,
    .create_mirror = smla_cuda_create_mirror,
    .destroy_mirror = smla_cuda_destroy_mirror,
    .begin_write = smla_cuda_begin_write,
    .end_write = smla_cuda_end_write,
    .begin_use = smla_cuda_begin_use,
    .end_use = smla_cuda_end_use,
    .streams = &smla_cuda_stream_ops SMLA_OPERATORS(FILL_SLOT),
};
