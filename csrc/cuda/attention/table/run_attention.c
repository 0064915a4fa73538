/* run_attention.c: runs attention as its plan says, in one launch or two. If a launch has splits,
 * the combine kernel then folds their partial rows, which lie in the caller's workspace.
 */
#include "core/log.h"
#include "cuda/attention/table/kernels.h"

/* The error when no kernel fits. It lists the kernels that there are. */
static smla_status
fail_without_kernel(const smla_attention_params *params, const smla_cuda_device *device,
                    smla_error *error)
{
    char formats[SMLA_FORMATS_TEXT];
    char rows[SMLA_KERNELS_TEXT];
    const smla_kv_format_info *const extra =
        params->keys.num_lists == 2 ? params->keys.lists[1].kv.format : NULL;
    smla_describe_formats(smla_join_formats(params->keys.lists[0].kv.format, extra), formats);
    smla_describe_kernels(rows);
    return smla_fail(error, SMLA_ERROR_RUNTIME,
                     "%s: no kernel for sm_%d, %d bytes of shared memory, %s and %lld heads; there "
                     "are, for 1 to 128 heads: %s",
                     params->call.op, device->compute_capability, device->max_shared_bytes, formats,
                     (long long)params->queries.num_heads, rows);
}

static smla_status
require_workspace(const smla_attention_params *params, smla_error *error)
{
    if (params->results.num_splits == 1) {
        return SMLA_OK;
    }
    const int64_t least = smla_partial_padding(params->workspace.memory) +
                          smla_partial_bytes(smla_partial_num_rows(params));
    const int64_t given = params->workspace.memory == NULL ? 0 : params->workspace.bytes;
    if (given < least) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have at least %lld bytes, got %lld", params->call.op,
                         params->workspace.name, (long long)least, (long long)given);
    }
    return SMLA_OK;
}

/* Tokens [start, start + count) of a call. */
static smla_attention_params
slice_tokens(const smla_attention_params *params, int64_t start, int64_t count)
{
    smla_attention_params part = *params;
    part.queries.num_tokens = count;
    smla_skip_queries(&part.queries, start);
    smla_skip_key_rows(&part.keys, start);
    smla_skip_results(&part.results, start);
    return part;
}

static smla_status
run_kernel(const smla_attention_run *run, const smla_attention_params *params, smla_error *error)
{
    const char *const op = params->call.op;
    static const char call[] = "cudaLaunchKernelExC";
    smla_cuda_deferred deferred;
    const bool is_split = params->results.num_splits > 1;
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
smla_cuda_attend_lists(const smla_attention_params *params, smla_error *error)
{
    const smla_attention_plan *const plan = &params->plan;
    if (params->queries.num_tokens == 0) {
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
        part.results.num_splits = run->num_splits;
        SMLA_TRY(run_kernel(run, &part, error));
        start += run->num_tokens;
    }
    return SMLA_OK;
}

/* ---- Ragged keys --------------------------------------------------------------------------- */

/* What mha_attention_sm90.cu takes: rows of 192 or 128 values in whole segments, and 128 values. */
enum { MHA_VALUE_DIM = 128, MHA_SEGMENT = 64 };

static bool
has_mha_sizes(const smla_attention_params *p)
{
    const int dim = p->queries.dims[0] + p->queries.dims[1];
    const int64_t num_reqs = p->visible.reqs.num_reqs;
    const int64_t most_reqs = num_reqs < p->queries.num_tokens ? num_reqs : p->queries.num_tokens;
    const int64_t most_rows = p->queries.num_tokens + most_reqs * (SMLA_MHA_TILE_ROWS - 1);
    return (dim == 192 || dim == 128) && p->kv.value_dim == MHA_VALUE_DIM &&
           p->queries.dims[0] % MHA_SEGMENT == 0 &&
           most_rows / SMLA_MHA_TILE_ROWS * p->queries.num_heads <= INT32_MAX;
}

static bool
are_results_aligned(const smla_results *results)
{
    const int64_t bytes = smla_float_bytes((smla_float_type)results->out_type);
    return ((uintptr_t)results->out | (uintptr_t)(results->out_stride_token * bytes) |
            (uintptr_t)(results->out_stride_head * bytes)) %
               16 ==
           0;
}

/* The needs depend on types, sizes of a row, masks and strides, but not on a batch that fits a
 * device, because kernels differ in the bits of a row. */
static unsigned
find_mha_needs(const smla_attention_params *p)
{
    const smla_range_rule *const rule = &p->visible.rule;
    const bool is_pure = p->queries.type == p->kv.type && p->kv.type != SMLA_FLOAT_E4M3;
    const bool is_causal_or_open = rule->left < 0 && rule->right <= 0 && rule->chunk == 0;
    const bool is_usual = p->logits.softcap == 0.0f && p->logits.softmax_scale > 0.0;
    return (is_pure ? 0 : SMLA_NEEDS_TYPES) | (has_mha_sizes(p) ? 0 : SMLA_NEEDS_SIZES) |
           (is_causal_or_open ? 0 : SMLA_NEEDS_MASK) | (is_usual ? 0 : SMLA_NEEDS_SOFTCAP) |
           (are_results_aligned(&p->results) ? 0 : SMLA_NEEDS_UNALIGNED) |
           (p->kv.num_keys == 0 || p->visible.reqs.num_reqs == 0 ? SMLA_NEEDS_NO_KEYS : 0);
}

cudaError_t
smla_cuda_attend_mha(const smla_attention_params *params, const smla_cuda_device *device)
{
    const smla_attention_start start = {.deferred = NULL};
    smla_kernel_call call = {.source = SMLA_KEYS_RAGGED, .needs = find_mha_needs(params)};
    const smla_attention_kernel *kernel;
    cudaError_t code = SMLA_NO_KERNEL;
    for (int i = 0; i < 2 && code == SMLA_NO_KERNEL; i++) {
        kernel = smla_find_whole_kernel(device, &call, params->queries.num_heads);
        code = kernel == NULL ? SMLA_NO_KERNEL : kernel->launch(params, &start);
        call.needs |= code == SMLA_NO_KERNEL ? SMLA_NEEDS_UNALIGNED : 0;
    }
    if (smla_is_logging && kernel != NULL) {
        const char *const lack = smla_find_lack(device, &call);
        smla_log_text(lack == NULL ? " kernel %s," : " kernel %s (%s),", kernel->name, lack);
    }
    return code;
}
