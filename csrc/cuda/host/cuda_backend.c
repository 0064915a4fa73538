/* cuda_backend.c: the CUDA backend as a table. An operator makes its device current, starts its
 * kernels on the caller's stream, and turns the error code of the launch into a status. Nothing
 * waits for the device, except in checked mode (SPARSE_MLA_CHECK=1).
 */
#include "cuda/host/cuda.h"

/* ---- One call of an operator --------------------------------------------------------------- */

typedef struct cuda_call {
    const char *op;
    smla_stream stream;
    const smla_kv_format_info *format; /* the format of the cache; NULL: there is no cache */
    const smla_cuda_device *device;
    bool is_checked;
    smla_cuda_guard guard;
} cuda_call;

/* An end_call must follow every begin_call that returned SMLA_OK. */
static smla_status
begin_call(cuda_call *call, smla_error *error)
{
    SMLA_TRY(smla_cuda_check_device(call->op, call->stream.device_id, error));
    call->device = smla_cuda_find_device(call->stream.device_id);
    SMLA_TRY(smla_cuda_enter(call->op, call->stream.device_id, &call->guard, error));
    call->is_checked = smla_cuda_is_set("SPARSE_MLA_CHECK");
    smla_status status = smla_cuda_check_stream(call->op, call->stream, error);
    if (status == SMLA_OK && call->is_checked) {
        status = smla_cuda_begin_checked(call->op, call->stream, error);
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
        status = smla_cuda_end_checked(call->op, call->stream, error);
    }
    smla_cuda_leave(&call->guard);
    return status;
}

/* The error where a launcher has no kernel for what the operator's check lets through. A new format
 * needs a row in the table of every such launcher (docs/kernels.md). */
static smla_status
fail_without_kernel(const cuda_call *call, smla_error *error)
{
    return call->format == NULL
               ? smla_fail(error, SMLA_ERROR_RUNTIME, "%s: no CUDA kernel serves these arrays",
                           call->op)
               : smla_fail(error, SMLA_ERROR_RUNTIME,
                           "%s: no CUDA kernel serves caches of %s with %d elements a token",
                           call->op, call->format->name, call->format->row_elements);
}

/* Ends the call of an operator that consists of one launch. */
static smla_status
end_launch(const cuda_call *call, cudaError_t code, smla_error *error)
{
    if (code == SMLA_NO_KERNEL) {
        return end_call(call, fail_without_kernel(call, error), error);
    }
    return end_call(call, smla_cuda_status(call->op, "cudaLaunchKernelExC", code, error), error);
}

/* ---- Cache and indices --------------------------------------------------------------------- */

static smla_status
write_tokens(const smla_cache_write_params *p,
             cudaError_t (*launch)(const smla_cache_write_params *params), smla_error *error)
{
    cuda_call call = {.op = p->op, .stream = p->stream, .format = p->kv.format};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? smla_cuda_check_cache_write(p, error) : SMLA_OK;
    return status == SMLA_OK ? end_launch(&call, launch(p), error) : end_call(&call, status, error);
}

static smla_status
concat_and_cache_mla(const smla_cache_write_params *p, smla_error *error)
{
    return write_tokens(p, smla_cuda_launch_concat_and_cache_mla, error);
}

static smla_status
quantize_and_insert_k_cache(const smla_cache_write_params *p, smla_error *error)
{
    return write_tokens(p, smla_cuda_launch_insert_k_cache, error);
}

static smla_status
indexer_k_quant_and_cache(const smla_cache_write_params *p, smla_error *error)
{
    return write_tokens(p, smla_cuda_launch_insert_k_cache, error);
}

/* Finds nothing: the values are on the device. In checked mode gather_kv_cache reads them. */
static smla_status
check_gather(const smla_gather_params *p, smla_error *error)
{
    (void)p;
    (void)error;
    return SMLA_OK;
}

static smla_status
gather_kv_cache(const smla_gather_params *p, smla_error *error)
{
    cuda_call call = {.op = p->op, .stream = p->stream, .format = p->kv.format};
    if (p->num_reqs == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? smla_cuda_check_gather(p, error) : SMLA_OK;
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_gather_kv_cache(p, call.device), error)
               : end_call(&call, status, error);
}

static smla_status
dequantize_and_gather_k_cache(const smla_gather_params *p, smla_error *error)
{
    return gather_kv_cache(p, error);
}

static smla_status
dequantize_kv_cache(const smla_dequantize_params *p, smla_error *error)
{
    cuda_call call = {.op = "dequantize_kv_cache", .stream = p->stream, .format = p->kv.format};
    if (smla_kv_num_slots(&p->kv) == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    return end_launch(&call, smla_cuda_launch_dequantize_kv_cache(p), error);
}

static smla_status
convert_req_index_to_global_index(const smla_convert_params *p, smla_error *error)
{
    cuda_call call = {.op = "convert_req_index_to_global_index", .stream = p->stream};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? smla_cuda_check_convert(p, error) : SMLA_OK;
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_convert_req_index_to_global_index(p), error)
               : end_call(&call, status, error);
}

static smla_status
compute_global_topk_indices_and_lens(const smla_topk_slots_params *p, smla_error *error)
{
    cuda_call call = {.op = "compute_global_topk_indices_and_lens", .stream = p->stream};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? smla_cuda_check_global_topk(p, error) : SMLA_OK;
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_compute_global_topk_indices_and_lens(p), error)
               : end_call(&call, status, error);
}

static smla_status
top_k_per_row(const smla_top_k_params *p, smla_error *error)
{
    cuda_call call = {.op = "top_k_per_row", .stream = p->stream};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const bool has_values = call.is_checked && p->slots.out != NULL;
    const smla_status status = has_values ? smla_cuda_check_global_topk(&p->slots, error) : SMLA_OK;
    return status == SMLA_OK ? end_launch(&call, smla_cuda_launch_top_k_per_row(p), error)
                             : end_call(&call, status, error);
}

static smla_status
combine_topk_swa_indices(const smla_combine_topk_swa_params *p, smla_error *error)
{
    cuda_call call = {.op = "combine_topk_swa_indices", .stream = p->stream};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status =
        call.is_checked ? smla_cuda_check_combine_topk_swa(p, error) : SMLA_OK;
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_combine_topk_swa_indices(p), error)
               : end_call(&call, status, error);
}

static smla_status
build_mixed_sparse_indices(const smla_mixed_indices_params *p, smla_error *error)
{
    cuda_call call = {.op = "build_mixed_sparse_indices", .stream = p->stream};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? smla_cuda_check_mixed_indices(p, error) : SMLA_OK;
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_build_mixed_sparse_indices(p), error)
               : end_call(&call, status, error);
}

static smla_status
fill_step_lists(const smla_step_lists_params *p, smla_error *error)
{
    cuda_call call = {.op = "MetadataBuilder.build", .stream = p->stream};
    if (p->num_rows == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    return end_launch(&call, smla_cuda_launch_fill_step_lists(p), error);
}

/* ---- Attention ----------------------------------------------------------------------------- */

/* Kernels mask indices and lengths out of range, in checked mode, too: they are valid input. */
static smla_status
sparse_attention(const smla_attention_params *p, const smla_attention_plan *plan, smla_error *error)
{
    cuda_call call = {.op = p->op, .stream = p->stream};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    return end_call(&call, smla_cuda_sparse_attention(p, plan, error), error);
}

static smla_status
merge_attn_states(const smla_merge_params *p, smla_error *error)
{
    cuda_call call = {.op = "merge_attn_states", .stream = p->stream};
    if (p->num_tokens == 0 || p->num_heads == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    return end_launch(&call, smla_cuda_launch_merge_attn_states(p), error);
}

/* ---- Absorption ---------------------------------------------------------------------------- */

static smla_status
split_kv_b_proj(const smla_split_kv_b_proj_params *p, smla_error *error)
{
    cuda_call call = {.op = "split_kv_b_proj", .stream = p->stream};
    if (p->nope_dim == 0 && p->value_dim == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    return end_launch(&call, smla_cuda_launch_split_kv_b_proj(p), error);
}

static smla_status
projection(const smla_projection_params *p, smla_error *error)
{
    cuda_call call = {.op = p->op, .stream = p->stream};
    if (p->num_tokens == 0 || p->outer_dim == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    return p->is_e4m3 ? end_launch(&call, smla_cuda_launch_projection_e4m3(p), error)
                      : end_call(&call, smla_cuda_projection(p, error), error);
}

/* There is no early return, because an array without elements has a scale, too. */
static smla_status
dynamic_per_tensor_quant(const smla_quant_params *p, smla_error *error)
{
    cuda_call call = {.op = "dynamic_per_tensor_quant", .stream = p->stream};
    SMLA_TRY(begin_call(&call, error));
    return end_launch(&call, smla_cuda_launch_dynamic_per_tensor_quant(p, call.device), error);
}

/* ---- Norms and RoPE ------------------------------------------------------------------------ */

static smla_status
fused_q_kv_rmsnorm(const smla_q_kv_norm_params *p, smla_error *error)
{
    cuda_call call = {.op = "fused_q_kv_rmsnorm", .stream = p->stream};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    return end_launch(&call, smla_cuda_launch_fused_q_kv_rmsnorm(p), error);
}

/* In checked mode, the values that the CPU would refuse are errors before the launch. */
static smla_status
check_insert_values(const smla_qnorm_insert_params *p, smla_error *error)
{
    const smla_cache_write_params *const insert = &p->insert;
    SMLA_TRY(smla_cuda_check_positions(insert->op, &p->rope, p->num_tokens, insert->stream, error));
    return smla_cuda_check_cache_write(insert, error);
}

static smla_status
fused_qnorm_rope_kv_insert(const smla_qnorm_insert_params *p, smla_error *error)
{
    cuda_call call = {.op = p->insert.op,
                      .stream = p->insert.stream,
                      .format = p->insert.kv.format};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? check_insert_values(p, error) : SMLA_OK;
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_fused_qnorm_rope_kv_insert(p), error)
               : end_call(&call, status, error);
}

static smla_status
save_partial_states(const smla_partial_states_params *p, smla_error *error)
{
    cuda_call call = {.op = p->rows.op, .stream = p->rows.stream};
    if (p->rows.num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? smla_cuda_check_partial_states(p, error) : SMLA_OK;
    return status == SMLA_OK ? end_launch(&call, smla_cuda_launch_save_partial_states(p), error)
                             : end_call(&call, status, error);
}

static smla_status
compress_norm_rope_store(const smla_compress_params *p, smla_error *error)
{
    cuda_call call = {.op = p->insert.op,
                      .stream = p->insert.stream,
                      .format = p->insert.kv.format};
    if (p->insert.num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? smla_cuda_check_compress(p, error) : SMLA_OK;
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_compress_norm_rope_store(p, call.device), error)
               : end_call(&call, status, error);
}

static smla_status
fused_inv_rope_fp8_quant(const smla_inverse_rope_params *p, smla_error *error)
{
    cuda_call call = {.op = "fused_inv_rope_fp8_quant", .stream = p->stream};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status =
        call.is_checked
            ? smla_cuda_check_positions(call.op, &p->rope, p->num_tokens, p->stream, error)
            : SMLA_OK;
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_fused_inv_rope_fp8_quant(p), error)
               : end_call(&call, status, error);
}

/* ---- Indexer ------------------------------------------------------------------------------- */

static smla_status
fused_indexer_q_rope_quant(const smla_index_query_params *p, smla_error *error)
{
    cuda_call call = {.op = "fused_indexer_q_rope_quant", .stream = p->stream};
    if (p->num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status =
        call.is_checked
            ? smla_cuda_check_positions(call.op, &p->rope, p->num_tokens, p->stream, error)
            : SMLA_OK;
    return status == SMLA_OK
               ? end_launch(&call, smla_cuda_launch_fused_indexer_q_rope_quant(p), error)
               : end_call(&call, status, error);
}

static smla_status
indexer_logits(const smla_logits_params *p, smla_error *error)
{
    cuda_call call = {.op = "indexer_logits", .stream = p->stream};
    if (p->num_tokens == 0 || p->num_columns == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? smla_cuda_check_logits(p, error) : SMLA_OK;
    return status == SMLA_OK ? end_launch(&call, smla_cuda_launch_indexer_logits(p), error)
                             : end_call(&call, status, error);
}

/* In checked mode, the values that the CPU would refuse are errors before the first launch. */
static smla_status
check_lightning_values(const smla_lightning_params *p, smla_error *error)
{
    SMLA_TRY(smla_cuda_check_logits(&p->logits, error));
    return p->top_k.slots.out == NULL ? SMLA_OK
                                      : smla_cuda_check_global_topk(&p->top_k.slots, error);
}

static cudaError_t
launch_lightning_chunk(const smla_lightning_params *p)
{
    const cudaError_t code =
        p->logits.out == NULL ? cudaSuccess : smla_cuda_launch_indexer_logits(&p->logits);
    return code != cudaSuccess ? code : smla_cuda_launch_top_k_per_row(&p->top_k);
}

/* Chunks follow each other in the stream: the logits of one overwrite those of the last. */
static smla_status
lightning_indexer(const smla_lightning_params *p, smla_error *error)
{
    const int64_t num_tokens = p->logits.num_tokens;
    cuda_call call = {.op = "lightning_indexer", .stream = p->logits.stream};
    if (num_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(begin_call(&call, error));
    const smla_status status = call.is_checked ? check_lightning_values(p, error) : SMLA_OK;
    cudaError_t code = cudaSuccess;
    for (int64_t token = 0; status == SMLA_OK && code == cudaSuccess && token < num_tokens;
         token += p->chunk_tokens) {
        const smla_lightning_params chunk = smla_lightning_chunk(p, token);
        code = launch_lightning_chunk(&chunk);
    }
    return status == SMLA_OK ? end_launch(&call, code, error) : end_call(&call, status, error);
}

/* ---- The table ----------------------------------------------------------------------------- */

/* The line follows another initializer, so it begins with the comma. */
#define FILL_SLOT(name, args_type, params_type) , .name = name

const smla_backend smla_cuda_backend = {
    .name = "cuda",
    .device_type = kDLCUDA,
    .check_device = smla_cuda_check_device,
    .chunk_logits_bytes = INT64_MAX,
    .chunk_tokens = 64, /* whole blocks of tokens of every kernel of logits */
    .check_gather = check_gather,
    .fill_step_lists = fill_step_lists,
    .prefers_direct = smla_cuda_prefers_direct,
    .attention_workspace_size = smla_cuda_attention_workspace_size,
    .plan_attention = smla_cuda_plan_attention,
    .kernel_name = smla_cuda_kernel_name,
    .sparse_attention = sparse_attention,
    .projection = projection,
    .kernels = smla_cuda_kernels,
    .allocate = smla_cuda_allocate,
    .release = smla_cuda_release,
    .create_mirror = smla_cuda_create_mirror,
    .destroy_mirror = smla_cuda_destroy_mirror,
    .begin_write = smla_cuda_begin_write,
    .end_write = smla_cuda_end_write,
    .begin_use = smla_cuda_begin_use,
    .end_use = smla_cuda_end_use,
    .streams = &smla_cuda_stream_ops SMLA_OPERATORS(FILL_SLOT),
};
