/* ops_varlen.c: attention to keys and values of heads, contiguous or in pages. */
#include "core/attention/params_attention.h"
#include "python/call/operator.h"
#include "sparse_mla.h"

SMLA_PY_COMPUTE_WINDOW(varlen_attention, smla_varlen_attention_args)

SMLA_PY_COMPUTE_WINDOW(paged_attention, smla_paged_attention_args)

/* A GPU's kernels divide their work better with the workspace; no result depends on it. */
static int64_t
varlen_workspace_bytes(const void *args)
{
    const smla_varlen_attention_args *const a = args;
    return a->q->device.device_type == kDLCUDA ? SMLA_RAGGED_WORKSPACE_BYTES : 0;
}

enum { VARLEN_Q, VARLEN_V = 4, VARLEN_OUT = 11, VARLEN_LSE };

static const smla_py_param varlen_params[] = {
    [VARLEN_Q] = {"q", SMLA_PY_PAIR, offsetof(smla_varlen_attention_args, q)},
    {"q_pe", SMLA_PY_SECOND, offsetof(smla_varlen_attention_args, q_pe)},
    {"k", SMLA_PY_PAIR, offsetof(smla_varlen_attention_args, k)},
    {"k_pe", SMLA_PY_SECOND, offsetof(smla_varlen_attention_args, k_pe)},
    [VARLEN_V] = {"v", SMLA_PY_INPUT, offsetof(smla_varlen_attention_args, v)},
    {"cu_seqlens_q", SMLA_PY_INPUT, offsetof(smla_varlen_attention_args, cu_seqlens_q)},
    {"cu_seqlens_k", SMLA_PY_INPUT, offsetof(smla_varlen_attention_args, cu_seqlens_k)},
    {"attn_sink", SMLA_PY_OPTIONAL, offsetof(smla_varlen_attention_args, attn_sink)},
    {"q_descale", SMLA_PY_SCALE_OR_NONE, offsetof(smla_varlen_attention_args, q_descale)},
    {"k_descale", SMLA_PY_SCALE_OR_NONE, offsetof(smla_varlen_attention_args, k_descale)},
    {"v_descale", SMLA_PY_SCALE_OR_NONE, offsetof(smla_varlen_attention_args, v_descale)},
    [VARLEN_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_varlen_attention_args, out)},
    [VARLEN_LSE] = {"lse", SMLA_PY_OUTPUT, offsetof(smla_varlen_attention_args, lse)},
    {"workspace", SMLA_PY_WORKSPACE, offsetof(smla_varlen_attention_args, workspace)},
    {"softmax_scale", SMLA_PY_FLOAT, offsetof(smla_varlen_attention_args, softmax_scale)},
    {"causal", SMLA_PY_FLAG, offsetof(smla_varlen_attention_args, is_causal)},
    {"window_size", SMLA_PY_TWO_INTS, offsetof(smla_varlen_attention_args, window_left)},
    {"attention_chunk", SMLA_PY_INT, offsetof(smla_varlen_attention_args, attention_chunk)},
    {"softcap", SMLA_PY_FLOAT, offsetof(smla_varlen_attention_args, softcap)},
    {"max_seqlen_q", SMLA_PY_HINT, offsetof(smla_varlen_attention_args, max_seqlen_q)},
    {"max_seqlen_k", SMLA_PY_HINT, offsetof(smla_varlen_attention_args, max_seqlen_k)},
    {"num_splits", SMLA_PY_INT32, offsetof(smla_varlen_attention_args, num_splits)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_varlen_attention_args, stream)},
};

_Static_assert(offsetof(smla_varlen_attention_args, window_right) ==
                   offsetof(smla_varlen_attention_args, window_left) + sizeof(int64_t),
               "the integers of a tuple follow each other");

static const smla_py_result_row varlen_results[] = {
    {.result = VARLEN_OUT,
     .dtype = {.source = SMLA_PY_HALVES_OF_ARRAY, .row = VARLEN_Q},
     .dims = {SMLA_PY_SIZE(VARLEN_Q, 0), SMLA_PY_SIZE(VARLEN_Q, 1), SMLA_PY_SIZE(VARLEN_V, 2)},
     .fills = SMLA_FILLS_OUT},
    {SMLA_PY_MAKES(VARLEN_LSE, FP32, SMLA_PY_SIZE(VARLEN_Q, 0), SMLA_PY_SIZE(VARLEN_Q, 1)),
     .fills = SMLA_FILLS_LSE},
};

static const smla_py_limit varlen_limits[] = {
    {SMLA_PY_LIMIT_NDIM, VARLEN_Q, 3, 3},
    {SMLA_PY_LIMIT_NDIM, VARLEN_V, 3, 3},
    {SMLA_PY_LIMIT_HEADS, VARLEN_Q, 1, SMLA_MAX_HEADS},
};

/* Enough for cuts of any kernel, whatever the requests' lengths are, and at least what claims need;
 * 0 if the call itself words an error better. */
static int64_t
paged_workspace_bytes(const void *args)
{
    const smla_paged_attention_args *const a = args;
    const bool is_on_gpu = a->q->device.device_type == kDLCUDA;
    const smla_attention_workspace_args needs = {
        .struct_size = sizeof needs,
        .num_tokens = smla_size(a->q, 0),
        .num_heads = smla_size(a->q, 1),
        .topk = 1,
        .num_splits = a->num_splits,
        .head_dim_v = smla_size(a->v_cache, 3),
        .device = a->q->device,
    };
    int64_t bytes = 0;
    if (!is_on_gpu || smla_attention_workspace_size(&needs, &bytes, NULL) != SMLA_OK) {
        return 0;
    }
    return bytes > SMLA_RAGGED_WORKSPACE_BYTES ? bytes : SMLA_RAGGED_WORKSPACE_BYTES;
}

enum { PAGED_Q, PAGED_V_CACHE = 3, PAGED_OUT = 13, PAGED_LSE };

static const smla_py_param paged_params[] = {
    [PAGED_Q] = {"q", SMLA_PY_INPUT, offsetof(smla_paged_attention_args, q)},
    {"qv", SMLA_PY_OPTIONAL, offsetof(smla_paged_attention_args, qv)},
    {"k_cache", SMLA_PY_INPUT, offsetof(smla_paged_attention_args, k_cache)},
    [PAGED_V_CACHE] = {"v_cache", SMLA_PY_INPUT, offsetof(smla_paged_attention_args, v_cache)},
    {"block_table", SMLA_PY_NULLABLE, offsetof(smla_paged_attention_args, block_table)},
    {"cache_seqlens", SMLA_PY_INPUT, offsetof(smla_paged_attention_args, cache_seqlens)},
    {"cu_seqlens_q", SMLA_PY_OPTIONAL, offsetof(smla_paged_attention_args, cu_seqlens_q)},
    {"slot_table", SMLA_PY_OPTIONAL, offsetof(smla_paged_attention_args, slot_table)},
    {"cache_leftpad", SMLA_PY_OPTIONAL, offsetof(smla_paged_attention_args, cache_leftpad)},
    {"attn_sink", SMLA_PY_OPTIONAL, offsetof(smla_paged_attention_args, attn_sink)},
    {"q_descale", SMLA_PY_SCALE_OR_NONE, offsetof(smla_paged_attention_args, q_descale)},
    {"k_descale", SMLA_PY_SCALE_OR_NONE, offsetof(smla_paged_attention_args, k_descale)},
    {"v_descale", SMLA_PY_SCALE_OR_NONE, offsetof(smla_paged_attention_args, v_descale)},
    [PAGED_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_paged_attention_args, out)},
    [PAGED_LSE] = {"lse", SMLA_PY_OUTPUT, offsetof(smla_paged_attention_args, lse)},
    {"workspace", SMLA_PY_WORKSPACE, offsetof(smla_paged_attention_args, workspace)},
    {"softmax_scale", SMLA_PY_FLOAT, offsetof(smla_paged_attention_args, softmax_scale)},
    {"causal", SMLA_PY_FLAG, offsetof(smla_paged_attention_args, is_causal)},
    {"window_size", SMLA_PY_TWO_INTS, offsetof(smla_paged_attention_args, window_left)},
    {"attention_chunk", SMLA_PY_INT, offsetof(smla_paged_attention_args, attention_chunk)},
    {"softcap", SMLA_PY_FLOAT, offsetof(smla_paged_attention_args, softcap)},
    {"cp", SMLA_PY_THREE_INTS, offsetof(smla_paged_attention_args, cp_rank)},
    {"max_seqlen_q", SMLA_PY_HINT, offsetof(smla_paged_attention_args, max_seqlen_q)},
    {"max_seqlen_k", SMLA_PY_HINT, offsetof(smla_paged_attention_args, max_seqlen_k)},
    {"num_splits", SMLA_PY_INT32, offsetof(smla_paged_attention_args, num_splits)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_paged_attention_args, stream)},
};

_Static_assert(offsetof(smla_paged_attention_args, window_right) ==
                       offsetof(smla_paged_attention_args, window_left) + sizeof(int64_t) &&
                   offsetof(smla_paged_attention_args, cp_interleave) ==
                       offsetof(smla_paged_attention_args, cp_rank) + 2 * sizeof(int64_t),
               "the integers of a tuple follow each other");

static const smla_py_result_row paged_results[] = {
    {.result = PAGED_OUT,
     .dtype = {.source = SMLA_PY_HALVES_OF_ARRAY, .row = PAGED_Q},
     .dims = {SMLA_PY_SIZE(PAGED_Q, 0), SMLA_PY_SIZE(PAGED_Q, 1), SMLA_PY_SIZE(PAGED_V_CACHE, 3)},
     .fills = SMLA_FILLS_OUT},
    {.result = PAGED_LSE,
     .dtype = SMLA_PY_MAKES_FP32,
     .dims = {SMLA_PY_SIZE(PAGED_Q, 0), SMLA_PY_SIZE(PAGED_Q, 1)},
     .fills = SMLA_FILLS_LSE},
};

static const smla_py_limit paged_limits[] = {
    {SMLA_PY_LIMIT_NDIM, PAGED_Q, 3, 3},
    {SMLA_PY_LIMIT_NDIM, PAGED_V_CACHE, 4, 4},
    {SMLA_PY_LIMIT_HEADS, PAGED_Q, 1, SMLA_MAX_HEADS},
};

const smla_py_operator smla_py_varlen_operators[] = {
    {SMLA_PY_OPERATOR(varlen_attention, varlen, smla_varlen_attention_args),
     .fills_offset = offsetof(smla_varlen_attention_args, fills_padding),
     .workspace_bytes = varlen_workspace_bytes},
    {.name = "paged_attention",
     SMLA_PY_TABLE(paged_params, smla_paged_attention_args, smla_paged_attention_args),
     .compute = compute_paged_attention,
     SMLA_PY_RESULTS(paged_results),
     SMLA_PY_LIMITS(paged_limits),
     .fills_offset = offsetof(smla_paged_attention_args, fills_padding),
     .workspace_bytes = paged_workspace_bytes},
    {.name = NULL},
};
