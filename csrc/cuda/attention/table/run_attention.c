/* run_attention.c: runs attention as its plan says. Where tokens are split, the combine kernel then
 * folds their partial rows, which lie in the caller's workspace.
 */
#include "core/attention/needs.h"
#include "core/log.h"
#include "cuda/attention/partials/part_rows.h"
#include "cuda/attention/table/wide_rows.h"

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
require_bytes(const smla_attention_params *params, int64_t least, smla_error *error)
{
    const int64_t given = params->workspace.memory == NULL ? 0 : params->workspace.bytes;
    if (given < least) {
        return smla_fail_value(error, params->call.op,
                               "`%s` must have at least %lld bytes, got %lld",
                               params->workspace.name, (long long)least, (long long)given);
    }
    return SMLA_OK;
}

static smla_status
require_workspace(const smla_attention_params *params, smla_error *error)
{
    return smla_is_split(params)
               ? require_bytes(params,
                               smla_partial_padding(params->workspace.memory) +
                                   smla_partial_bytes(smla_partial_num_rows(params, 0)),
                               error)
               : SMLA_OK;
}

/* Whether 32 bits can count the work items and columns. No memory holds the arrays of larger
 * calls. */
static bool
can_count_items(const smla_attention_params *params, int64_t whole_tokens)
{
    const int64_t whole_rows = whole_tokens * params->queries.num_heads;
    bool fits = whole_rows + smla_partial_num_rows(params, whole_tokens) <= INT32_MAX;
    for (int i = 0; i < params->keys.num_lists; i++) {
        fits = fits && params->keys.lists[i].topk <= INT32_MAX - SMLA_SPLIT_ALIGN;
    }
    return fits;
}

/* Launches a run, behind the first `whole_tokens` tokens of `params`, which are not split and go
 * with it. `own` are the params of the run's own tokens. */
static smla_status
run_kernel(const smla_attention_run *run, const smla_attention_params *params, int64_t whole_tokens,
           const smla_attention_params *own, smla_error *error)
{
    const char *const op = params->call.op;
    static const char call[] = "cudaLaunchKernelExC";
    smla_cuda_deferred deferred;
    const bool is_split = smla_is_split(own);
    /* A kernel that plans its cuts itself launches what combines them, too. */
    const bool is_cut = run->kernel->plans_itself && run->cut_bytes > 0;
    smla_wide_header *const wide = run->wide_offset == 0 ? NULL : smla_wide_header_of(own, run);
    const smla_attention_start start = {.cut_bytes = run->cut_bytes,
                                        .deferred = is_split || is_cut ? &deferred : NULL,
                                        .interleaves = run->interleaves,
                                        .whole_tokens = whole_tokens,
                                        .wide = wide,
                                        .tile_tokens = run->tile_tokens};
    smla_attention_launcher *const launch = wide != NULL           ? smla_attend_sm90_widened_64
                                            : run->tile_tokens > 1 ? run->kernel->launch_tiles
                                                                   : run->kernel->launch;
    SMLA_TRY(require_workspace(own, error));
    smla_cuda_begin_deferred(&deferred);
    SMLA_TRY(smla_cuda_status(op, call,
                              can_count_items(params, whole_tokens) ? launch(params, &start)
                                                                    : cudaErrorInvalidValue,
                              error));
    if (!is_split) {
        return SMLA_OK;
    }
    return smla_cuda_status(op, call,
                            smla_cuda_launch_combine(own, run->kernel,
                                                     deferred.is_full ? &deferred : NULL),
                            error);
}

/* Runs the first tokens whole, and the others in splits. One launch does both, unless the first
 * tokens widen their rows, which another kernel reads. */
static smla_status
run_with_rest(const smla_attention_params *params, smla_error *error)
{
    const smla_attention_run *const first = &params->plan.runs[0];
    const smla_attention_run *const rest = &params->plan.runs[1];
    const smla_attention_params last = smla_params_of_run(params, rest, first->num_tokens);
    if (first->wide_offset != 0) {
        const smla_attention_params wide = smla_params_of_run(params, first, 0);
        SMLA_TRY(run_kernel(first, &wide, 0, &wide, error));
        return run_kernel(rest, &last, 0, &last, error);
    }
    smla_attention_params all = *params;
    all.results.num_splits = rest->num_splits;
    return run_kernel(rest, &all, first->num_tokens, &last, error);
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
    return plan->num_runs == 1 ? run_kernel(&plan->runs[0], params, 0, params, error)
                               : run_with_rest(params, error);
}

/* ---- Keys and values of KV heads ----------------------------------------------------------- */

/* Ragged keys are not cut, whatever num_splits is. */
static bool
is_cut_as_given(const smla_attention_params *params)
{
    return params->source == SMLA_KEYS_PAGED && smla_is_split(params);
}

smla_status
smla_cuda_require_part_rows(const smla_attention_params *params, smla_error *error)
{
    return is_cut_as_given(params)
               ? require_bytes(params, smla_part_rows_bytes(params, params->results.num_splits),
                               error)
               : SMLA_OK;
}

/* Whether the tiles of Hopper's kernels have int32 numbers, wherever requests begin. */
static bool
can_count_tiles(const smla_attention_params *p)
{
    const int64_t num_reqs = p->visible.reqs.num_reqs;
    const int64_t most_reqs = num_reqs < p->queries.num_tokens ? num_reqs : p->queries.num_tokens;
    const int64_t most_rows = p->queries.num_tokens + most_reqs * (SMLA_MHA_TILE_ROWS - 1);
    return most_rows / SMLA_MHA_TILE_ROWS * p->queries.num_heads <= INT32_MAX;
}

cudaError_t
smla_cuda_attend_mha(const smla_attention_params *params, const smla_cuda_device *device)
{
    const bool is_given = params->results.num_splits != 0;
    const smla_attention_start start = {.cut_bytes = is_given ? 0 : params->workspace.bytes};
    smla_kernel_call call = {
        .source = params->source,
        .needs = smla_find_needs(params) | (can_count_tiles(params) ? 0 : SMLA_NEEDS_SIZES) |
                 (is_cut_as_given(params) ? SMLA_NEEDS_SPLITS : 0),
        .num_heads = params->queries.num_heads,
        .columns = SMLA_UNSPLIT,
    };
    const smla_attention_kernel *kernel;
    cudaError_t code = SMLA_NO_KERNEL;
    for (int i = 0; i < 2 && code == SMLA_NO_KERNEL; i++) {
        kernel = smla_find_kernel(device, &call);
        code = kernel == NULL ? SMLA_NO_KERNEL : kernel->launch(params, &start);
        call.needs |= code == SMLA_NO_KERNEL ? SMLA_NEEDS_UNALIGNED : 0;
    }
    if (smla_is_logging && kernel != NULL) {
        const char *const lack = smla_find_lack(device, &call);
        smla_log_text(lack == NULL ? " kernel %s," : " kernel %s (%s),", kernel->name, lack);
    }
    return code;
}
