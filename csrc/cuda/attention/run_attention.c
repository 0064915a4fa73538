/* run_attention.c: runs attention as the schedule says: in one piece or two, and with a combine
 * where keys are split; and where splits leave their partial rows.
 */
#include "cuda/attention/schedule.h"

static smla_row_formats
formats_of(const smla_attention_params *params)
{
    return smla_join_formats(params->lists[0].kv.format,
                             params->num_lists == 2 ? params->lists[1].kv.format : NULL);
}

/* A miss says what there is. */
static smla_status
fail_without_kernel(const smla_attention_params *params, const smla_cuda_device *device,
                    smla_error *error)
{
    char rows[512];
    smla_describe_kernels(rows, sizeof rows);
    return smla_fail(error, SMLA_ERROR_RUNTIME,
                     "sparse_attention: no kernel for sm_%d, %d bytes of shared memory, %s and "
                     "%lld heads; there are: %s",
                     device->compute_capability, device->max_shared_bytes,
                     smla_formats_name(formats_of(params)), (long long)params->num_heads, rows);
}

static smla_status
require_workspace(const smla_attention_params *params, smla_error *error)
{
    if (params->num_splits == 1) {
        return SMLA_OK;
    }
    const int64_t least =
        smla_partial_padding(params->workspace) + smla_partial_bytes(smla_partial_num_rows(params));
    const int64_t given = params->workspace == NULL ? 0 : params->workspace_bytes;
    if (given < least) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "sparse_attention: `workspace` must have at least %lld bytes, got %lld",
                         (long long)least, (long long)given);
    }
    return SMLA_OK;
}

static void
skip_tokens(smla_key_list *keys, int64_t count)
{
    keys->indices += count * keys->indices_stride_token;
    keys->topk_length += keys->topk_length == NULL ? 0 : count * keys->topk_length_stride;
    keys->map.req_id_per_token += keys->map.block_table == NULL ? 0 : count;
}

/* Tokens [start, start + count) of a call. */
static smla_attention_params
slice_tokens(const smla_attention_params *params, int64_t start, int64_t count)
{
    smla_attention_params part = *params;
    part.num_tokens = count;
    part.q_nope += start * part.q_nope_stride_token;
    part.q_pe += start * part.q_pe_stride_token;
    skip_tokens(&part.lists[0], start);
    if (part.num_lists == 2) {
        skip_tokens(&part.lists[1], start);
    }
    part.out += start * part.out_stride_token;
    part.lse += start * part.lse_stride_token;
    part.max_logits += part.max_logits == NULL ? 0 : start * part.max_logits_stride_token;
    return part;
}

static smla_status
run_kernel(const smla_attention_kernel *kernel, const smla_attention_params *params,
           smla_error *error)
{
    static const char op[] = "sparse_attention";
    static const char call[] = "cudaLaunchKernelExC";
    SMLA_TRY(require_workspace(params, error));
    SMLA_TRY(smla_cuda_status(op, call, kernel->launch(params), error));
    if (params->num_splits == 1) {
        return SMLA_OK;
    }
    return smla_cuda_status(op, call, smla_cuda_launch_combine(params, kernel), error);
}

/* A call whose split count is the backend's own, that of its plan. What does not fill a wave of
 * CTAs any more may be split, after the rest. */
static smla_status
run_planned(const smla_split_problem *problem, const smla_attention_params *params,
            smla_error *error)
{
    const smla_batch_plan plan = smla_find_plan(problem, params->num_tokens);
    const int64_t start = params->num_tokens - plan.rest;
    if (start == 0) {
        return run_kernel(plan.run.kernel, params, error);
    }
    const smla_attention_params full = slice_tokens(params, 0, start);
    SMLA_TRY(run_kernel(problem->whole, &full, error));
    smla_attention_params part = slice_tokens(params, start, plan.rest);
    const smla_run_plan run = smla_find_plan(problem, plan.rest).run;
    part.num_splits = run.num_splits;
    return run_kernel(run.kernel, &part, error);
}

smla_status
smla_cuda_sparse_attention(const smla_attention_params *params, smla_error *error)
{
    if (params->num_tokens == 0) {
        return SMLA_OK;
    }
    const smla_cuda_device *const device = smla_cuda_find_device(params->stream.device_id);
    const smla_attention_shape shape = {
        .num_heads = params->num_heads,
        .topk = params->lists[0].topk,
        .extra_topk = params->num_lists == 2 ? params->lists[1].topk : 0,
    };
    const smla_row_formats formats = formats_of(params);
    smla_split_problem problem;
    if (!smla_find_problem(device, &shape, formats, &problem)) {
        return fail_without_kernel(params, device, error);
    }
    if (params->is_planned) {
        return run_planned(&problem, params, error);
    }
    /* a token's bits must not depend on the batch */
    const smla_attention_kernel *const kernel =
        smla_find_kernel(device, formats, params->num_heads, params->num_splits,
                         smla_count_columns(&problem, params->num_splits));
    return run_kernel(kernel, params, error);
}
