/* run_attention.c: runs attention as its plan says, in one launch or two. If a launch has splits,
 * the combine kernel then folds their partial rows, which lie in the caller's workspace.
 */
#include "cuda/attention/table/kernels.h"

/* The error when no kernel fits. It lists the kernels that there are. */
static smla_status
fail_without_kernel(const smla_attention_params *params, const smla_cuda_device *device,
                    smla_error *error)
{
    char formats[SMLA_FORMATS_TEXT];
    char rows[SMLA_KERNELS_TEXT];
    const smla_kv_format_info *const extra =
        params->num_lists == 2 ? params->lists[1].kv.format : NULL;
    smla_describe_formats(smla_join_formats(params->lists[0].kv.format, extra), formats);
    smla_describe_kernels(rows);
    return smla_fail(error, SMLA_ERROR_RUNTIME,
                     "%s: no kernel for sm_%d, %d bytes of shared memory, %s and %lld heads; there "
                     "are, for 1 to 128 heads: %s",
                     params->call.op, device->compute_capability, device->max_shared_bytes, formats,
                     (long long)params->num_heads, rows);
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
                         "%s: `%s` must have at least %lld bytes, got %lld", params->call.op,
                         params->workspace_name, (long long)least, (long long)given);
    }
    return SMLA_OK;
}

static void
skip_tokens(smla_key_list *keys, int64_t count)
{
    keys->indices += keys->indices == NULL ? 0 : count * keys->indices_stride_token;
    keys->begin += keys->begin == NULL ? 0 : count * keys->begin_stride;
    keys->end += keys->end == NULL ? 0 : count * keys->end_stride;
    keys->map.req_id_per_token += keys->map.req_id_per_token == NULL ? 0 : count;
}

/* Tokens [start, start + count) of a call. */
static smla_attention_params
slice_tokens(const smla_attention_params *params, int64_t start, int64_t count)
{
    smla_attention_params part = *params;
    part.num_tokens = count;
    if (part.q_e4m3 != NULL) {
        part.q_e4m3 += start * part.q_nope_stride_token;
    } else {
        part.q_nope += start * part.q_nope_stride_token;
        part.q_pe += start * part.q_pe_stride_token;
    }
    skip_tokens(&part.lists[0], start);
    if (part.num_lists == 2) {
        skip_tokens(&part.lists[1], start);
    }
    part.out += start * part.out_stride_token;
    part.lse += part.lse == NULL ? 0 : start * part.lse_stride_token;
    part.max_logits += part.max_logits == NULL ? 0 : start * part.max_logits_stride_token;
    return part;
}

static smla_status
run_kernel(const smla_attention_run *run, const smla_attention_params *params, smla_error *error)
{
    const char *const op = params->call.op;
    static const char call[] = "cudaLaunchKernelExC";
    smla_cuda_deferred deferred;
    const bool is_split = params->num_splits > 1;
    /* A kernel that plans its cuts itself launches what combines them, too. */
    const bool is_cut = run->kernel->plans_itself && run->cut_bytes > 0;
    const smla_attention_start start = {run->cut_bytes, is_split || is_cut ? &deferred : NULL,
                                        run->interleaves};
    SMLA_TRY(require_workspace(params, error));
    smla_cuda_begin_deferred(&deferred);
    SMLA_TRY(smla_cuda_status(op, call, run->kernel->launch(params, &start), error));
    if (!is_split) {
        return SMLA_OK;
    }
    return smla_cuda_status(op, call,
                            smla_cuda_launch_combine(params, run->kernel,
                                                     deferred.is_full ? &deferred : NULL),
                            error);
}

smla_status
smla_cuda_sparse_attention(const smla_attention_params *params, const smla_attention_plan *plan,
                           smla_error *error)
{
    if (params->num_tokens == 0) {
        return SMLA_OK;
    }
    if (plan->runs[0].kernel == NULL) {
        return fail_without_kernel(params, smla_cuda_find_device(params->call.stream.device_id),
                                   error);
    }
    if (plan->num_runs == 1) {
        return run_kernel(&plan->runs[0], params, error);
    }
    int64_t start = 0;
    for (int i = 0; i < plan->num_runs; i++) {
        const smla_attention_run *const run = &plan->runs[i];
        smla_attention_params part = slice_tokens(params, start, run->num_tokens);
        part.num_splits = run->num_splits;
        SMLA_TRY(run_kernel(run, &part, error));
        start += run->num_tokens;
    }
    return SMLA_OK;
}
