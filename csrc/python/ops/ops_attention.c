/* ops_attention.c: attention over slots, and the merge of partial results. */
#include "core/attention/params_attention.h"
#include "core/rule.h"
#include "ops/dispatch.h"
#include "python/call/operator.h"

/* ---- Attention ----------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(sparse_attention)

/* Attention for flash_mla.py: lse is +inf for a query without keys. */
static smla_status
attend_plus_inf(const void *args, smla_error *error)
{
    smla_sparse_attention_args a = *(const smla_sparse_attention_args *)args;
    a.lse_empty_is_plus_inf = true;
    return smla_sparse_attention(&a, error);
}

enum { ATTENTION_Q, ATTENTION_OUT = 12, ATTENTION_LSE, ATTENTION_MAX_LOGITS };

static const smla_py_param attention_params[] = {
    [ATTENTION_Q] = {"q", SMLA_PY_PAIR, offsetof(smla_sparse_attention_args, q)},
    {"q_pe", SMLA_PY_SECOND, offsetof(smla_sparse_attention_args, q_pe)},
    {"kv_cache", SMLA_PY_INPUT, offsetof(smla_sparse_attention_args, kv_cache)},
    {"indices", SMLA_PY_INPUT, offsetof(smla_sparse_attention_args, indices)},
    {"topk_length", SMLA_PY_OPTIONAL, offsetof(smla_sparse_attention_args, topk_length)},
    {"attn_sink", SMLA_PY_OPTIONAL, offsetof(smla_sparse_attention_args, attn_sink)},
    {"extra_kv_cache", SMLA_PY_OPTIONAL, offsetof(smla_sparse_attention_args, extra_kv_cache)},
    {"extra_indices", SMLA_PY_OPTIONAL, offsetof(smla_sparse_attention_args, extra_indices)},
    {"extra_topk_length", SMLA_PY_OPTIONAL,
     offsetof(smla_sparse_attention_args, extra_topk_length)},
    {"q_scale", SMLA_PY_SCALE, offsetof(smla_sparse_attention_args, q_scale)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_sparse_attention_args, kv_scale)},
    {"extra_kv_scale", SMLA_PY_SCALE, offsetof(smla_sparse_attention_args, extra_kv_scale)},
    [ATTENTION_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_sparse_attention_args, out)},
    [ATTENTION_LSE] = {"lse", SMLA_PY_OUTPUT, offsetof(smla_sparse_attention_args, lse)},
    [ATTENTION_MAX_LOGITS] = {"max_logits", SMLA_PY_ASKED_OUTPUT,
                              offsetof(smla_sparse_attention_args, max_logits)},
    {"workspace", SMLA_PY_WORKSPACE, offsetof(smla_sparse_attention_args, workspace)},
    {"softmax_scale", SMLA_PY_FLOAT, offsetof(smla_sparse_attention_args, softmax_scale)},
    {"num_splits", SMLA_PY_INT32, offsetof(smla_sparse_attention_args, num_splits)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_sparse_attention_args, kv_format)},
    {"extra_kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_sparse_attention_args, extra_kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(smla_sparse_attention_args, block_size)},
    {"extra_block_size", SMLA_PY_SIZE, offsetof(smla_sparse_attention_args, extra_block_size)},
    {"return_max_logits", SMLA_PY_ASK, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_sparse_attention_args, stream)},
};

static const smla_py_result_row attention_results[] = {
    {SMLA_PY_MAKES(ATTENTION_OUT, BF16, SMLA_PY_SIZE(ATTENTION_Q, 0), SMLA_PY_SIZE(ATTENTION_Q, 1),
                   SMLA_PY_NUMBER(SMLA_KV_LORA_RANK))},
    {SMLA_PY_MAKES(ATTENTION_LSE, FP32, SMLA_PY_SIZE(ATTENTION_Q, 0),
                   SMLA_PY_SIZE(ATTENTION_Q, 1))},
    {SMLA_PY_MAKES(ATTENTION_MAX_LOGITS, FP32, SMLA_PY_SIZE(ATTENTION_Q, 0),
                   SMLA_PY_SIZE(ATTENTION_Q, 1))},
};

static const smla_py_limit attention_limits[] = {
    {SMLA_PY_LIMIT_NDIM, ATTENTION_Q, 3, 3},
    {SMLA_PY_LIMIT_HEADS, ATTENTION_Q, 1, SMLA_MAX_HEADS},
};

/* 0 if the call needs no workspace or if its arrays are malformed: the call itself words that error
 * better. */
static int64_t
find_workspace_bytes(const DLTensor *q, int64_t topk, int64_t extra_topk, int32_t num_splits,
                     const DLTensor *out)
{
    if (out == NULL) {
        return 0;
    }
    const smla_attention_workspace_args needs = {
        .struct_size = sizeof needs,
        .num_tokens = smla_size(q, 0),
        .num_heads = smla_size(q, 1),
        .topk = topk,
        .extra_topk = extra_topk,
        .num_splits = num_splits,
        .device = out->device,
    };
    int64_t bytes = 0;
    return smla_sparse_workspace_size(&needs, &bytes, NULL) == SMLA_OK ? bytes : 0;
}

static int64_t
attention_workspace_bytes(const void *args)
{
    const smla_sparse_attention_args *const a = args;
    if (a->workspace != NULL) {
        return 0;
    }
    return find_workspace_bytes(a->q, smla_size(a->indices, 1),
                                a->extra_indices == NULL ? 0 : smla_size(a->extra_indices, 1),
                                a->num_splits, a->out);
}

/* ---- Attention of a DeepSeek V4 layer ------------------------------------------------------ */

SMLA_PY_COMPUTE(sparse_mla_dsv4)

enum { DSV4_QUERY, DSV4_OUT = 10 };

static const smla_py_param dsv4_params[] = {
    [DSV4_QUERY] = {"query", SMLA_PY_INPUT, offsetof(smla_sparse_mla_dsv4_args, query)},
    {"swa_kv_cache", SMLA_PY_INPUT, offsetof(smla_sparse_mla_dsv4_args, swa_kv_cache)},
    {"sparse_indices", SMLA_PY_INPUT, offsetof(smla_sparse_mla_dsv4_args, sparse_indices)},
    {"compressed_kv_cache", SMLA_PY_INPUT,
     offsetof(smla_sparse_mla_dsv4_args, compressed_kv_cache)},
    {"sparse_topk_lens", SMLA_PY_INPUT, offsetof(smla_sparse_mla_dsv4_args, sparse_topk_lens)},
    {"seq_lens", SMLA_PY_NULLABLE, offsetof(smla_sparse_mla_dsv4_args, seq_lens)},
    {"bmm1_scale", SMLA_PY_SCALE, offsetof(smla_sparse_mla_dsv4_args, bmm1_scale)},
    {"bmm2_scale", SMLA_PY_SCALE, offsetof(smla_sparse_mla_dsv4_args, bmm2_scale)},
    {"sinks", SMLA_PY_OPTIONAL, offsetof(smla_sparse_mla_dsv4_args, sinks)},
    {"cum_seq_lens_q", SMLA_PY_OPTIONAL, offsetof(smla_sparse_mla_dsv4_args, cum_seq_lens_q)},
    [DSV4_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_sparse_mla_dsv4_args, out)},
    {"workspace_buffer", SMLA_PY_WORKSPACE, offsetof(smla_sparse_mla_dsv4_args, workspace_buffer)},
    {"window", SMLA_PY_INT, offsetof(smla_sparse_mla_dsv4_args, window)},
    {"max_q_len", SMLA_PY_SIZE, offsetof(smla_sparse_mla_dsv4_args, max_q_len)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_sparse_mla_dsv4_args, stream)},
};

static const smla_py_result_row dsv4_results[] = {
    {SMLA_PY_MAKES(DSV4_OUT, BF16, SMLA_PY_SIZE(DSV4_QUERY, 0), SMLA_PY_SIZE(DSV4_QUERY, 1),
                   SMLA_PY_NUMBER(SMLA_V4_HEAD_DIM))},
};

static const smla_py_limit dsv4_limits[] = {
    {SMLA_PY_LIMIT_NDIM, DSV4_QUERY, 3, 3},
    {SMLA_PY_LIMIT_HEADS, DSV4_QUERY, 1, SMLA_MAX_HEADS},
};

static int64_t
dsv4_workspace_bytes(const void *args)
{
    const smla_sparse_mla_dsv4_args *const a = args;
    const int64_t columns = smla_size(a->sparse_indices, 1);
    if (a->workspace_buffer != NULL || a->window < 0 || columns < a->window) {
        return 0;
    }
    return find_workspace_bytes(a->query, a->window, columns - a->window, 0, a->out);
}

/* ---- Attention to a paged cache ------------------------------------------------------------ */

SMLA_PY_COMPUTE_WINDOW(mla_attention, smla_mla_attention_args)

/* The same for flash_mla.py: lse is +inf for a query without keys. */
static smla_status
compute_mla_plus_inf(const void *args, smla_error *error)
{
    smla_mla_attention_args a = *(const smla_mla_attention_args *)args;
    a.lse_empty_is_plus_inf = true;
    return compute_mla_attention(&a, error);
}

enum { MLA_Q, MLA_OUT = 10, MLA_LSE };

static const smla_py_param mla_params[] = {
    [MLA_Q] = {"q", SMLA_PY_PAIR, offsetof(smla_mla_attention_args, q)},
    {"q_pe", SMLA_PY_SECOND, offsetof(smla_mla_attention_args, q_pe)},
    {"kv_cache", SMLA_PY_INPUT, offsetof(smla_mla_attention_args, kv_cache)},
    {"block_table", SMLA_PY_NULLABLE, offsetof(smla_mla_attention_args, block_table)},
    {"cache_seqlens", SMLA_PY_INPUT, offsetof(smla_mla_attention_args, cache_seqlens)},
    {"cu_seqlens_q", SMLA_PY_OPTIONAL, offsetof(smla_mla_attention_args, cu_seqlens_q)},
    {"slot_table", SMLA_PY_OPTIONAL, offsetof(smla_mla_attention_args, slot_table)},
    {"attn_sink", SMLA_PY_OPTIONAL, offsetof(smla_mla_attention_args, attn_sink)},
    {"q_scale", SMLA_PY_SCALE, offsetof(smla_mla_attention_args, q_scale)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_mla_attention_args, kv_scale)},
    [MLA_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_mla_attention_args, out)},
    [MLA_LSE] = {"lse", SMLA_PY_OUTPUT, offsetof(smla_mla_attention_args, lse)},
    {"workspace", SMLA_PY_WORKSPACE, offsetof(smla_mla_attention_args, workspace)},
    {"softmax_scale", SMLA_PY_FLOAT, offsetof(smla_mla_attention_args, softmax_scale)},
    {"causal", SMLA_PY_FLAG, offsetof(smla_mla_attention_args, is_causal)},
    {"window_size", SMLA_PY_TWO_INTS, offsetof(smla_mla_attention_args, window_left)},
    {"attention_chunk", SMLA_PY_INT, offsetof(smla_mla_attention_args, attention_chunk)},
    {"softcap", SMLA_PY_FLOAT, offsetof(smla_mla_attention_args, softcap)},
    {"cp", SMLA_PY_THREE_INTS, offsetof(smla_mla_attention_args, cp_rank)},
    {"max_seqlen_q", SMLA_PY_HINT, offsetof(smla_mla_attention_args, max_seqlen_q)},
    {"max_seqlen_k", SMLA_PY_HINT, offsetof(smla_mla_attention_args, max_seqlen_k)},
    {"num_splits", SMLA_PY_INT32, offsetof(smla_mla_attention_args, num_splits)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_mla_attention_args, kv_format)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_mla_attention_args, stream)},
};

_Static_assert(offsetof(smla_mla_attention_args, window_right) ==
                       offsetof(smla_mla_attention_args, window_left) + sizeof(int64_t) &&
                   offsetof(smla_mla_attention_args, cp_interleave) ==
                       offsetof(smla_mla_attention_args, cp_rank) + 2 * sizeof(int64_t),
               "the integers of a tuple follow each other");

/* Results have the dimensions of the query, [T, H, ...] or [B, n, H, ...]. */
static const smla_py_result_row mla_results[] = {
    {SMLA_PY_MAKES(MLA_OUT, BF16, SMLA_PY_SIZE(MLA_Q, 0), SMLA_PY_SIZE(MLA_Q, 1),
                   SMLA_PY_SIZE(MLA_Q, 2), SMLA_PY_NUMBER(SMLA_KV_LORA_RANK)),
     .when = {SMLA_PY_IF_NDIM, MLA_Q, 4}, .fills = SMLA_FILLS_OUT},
    {SMLA_PY_MAKES(MLA_OUT, BF16, SMLA_PY_SIZE(MLA_Q, 0), SMLA_PY_SIZE(MLA_Q, 1),
                   SMLA_PY_NUMBER(SMLA_KV_LORA_RANK)),
     .when = {SMLA_PY_IF_NDIM, MLA_Q, 3}, .fills = SMLA_FILLS_OUT},
    {SMLA_PY_MAKES(MLA_LSE, FP32, SMLA_PY_SIZE(MLA_Q, 0), SMLA_PY_SIZE(MLA_Q, 1),
                   SMLA_PY_SIZE(MLA_Q, 2)),
     .when = {SMLA_PY_IF_NDIM, MLA_Q, 4}, .fills = SMLA_FILLS_LSE},
    {SMLA_PY_MAKES(MLA_LSE, FP32, SMLA_PY_SIZE(MLA_Q, 0), SMLA_PY_SIZE(MLA_Q, 1)),
     .when = {SMLA_PY_IF_NDIM, MLA_Q, 3}, .fills = SMLA_FILLS_LSE},
};

static const smla_py_limit mla_limits[] = {{SMLA_PY_LIMIT_NDIM, MLA_Q, 3, 4}};

/* Enough for requests that fill the table: a call may need less. 0 as in find_workspace_bytes. */
static int64_t
mla_workspace_bytes(const void *args)
{
    const smla_mla_attention_args *const a = args;
    const bool has_slots = a->slot_table != NULL;
    const DLTensor *const table = has_slots ? a->slot_table : a->block_table;
    int64_t topk = 0;
    int64_t bytes = 0;
    if (a->workspace != NULL || a->out == NULL || table == NULL || a->q->ndim < 3) {
        return 0;
    }
    const bool is_flat = a->kv_cache->ndim == 2;
    const int64_t page = has_slots ? 1 : smla_size(a->kv_cache, is_flat ? 0 : 1);
    const bool is_countable = !__builtin_mul_overflow(smla_size(table, 1), page, &topk);
    const smla_attention_workspace_args needs = {
        .struct_size = sizeof needs,
        .num_tokens = smla_size(a->q, 0) * (a->q->ndim == 4 ? smla_size(a->q, 1) : 1),
        .num_heads = smla_size(a->q, a->q->ndim == 4 ? 2 : 1),
        .topk = is_countable && topk >= 0 && topk < INT32_MAX ? topk : INT32_MAX,
        .num_splits = a->num_splits,
        .device = a->out->device,
    };
    return smla_attention_workspace_size(&needs, &bytes, NULL) == SMLA_OK ? bytes : 0;
}

/* ---- Size of the workspace ----------------------------------------------------------------- */

static const smla_py_param workspace_size_params[] = {
    {"num_tokens", SMLA_PY_INT, offsetof(smla_attention_workspace_args, num_tokens)},
    {"num_heads", SMLA_PY_INT, offsetof(smla_attention_workspace_args, num_heads)},
    {"topk", SMLA_PY_INT, offsetof(smla_attention_workspace_args, topk)},
    {"extra_topk", SMLA_PY_INT, offsetof(smla_attention_workspace_args, extra_topk)},
    {"num_splits", SMLA_PY_INT32, offsetof(smla_attention_workspace_args, num_splits)},
    {"head_dim_v", SMLA_PY_INT, offsetof(smla_attention_workspace_args, head_dim_v)},
    {"num_keys", SMLA_PY_INT, offsetof(smla_attention_workspace_args, num_keys)},
    {"device", SMLA_PY_DEVICE, offsetof(smla_attention_workspace_args, device)},
};

/* A head_dim_v of 0 is left out in C. */
static smla_status
find_workspace_size(const smla_attention_workspace_args *args, int64_t *bytes, smla_error *error)
{
    SMLA_TRY(smla_require_count("attention_workspace_size", "head_dim_v", args->head_dim_v, 1,
                                SMLA_KV_LORA_RANK, error));
    return smla_attention_workspace_size(args, bytes, error);
}

static PyObject *
answer_workspace_size(const void *args)
{
    smla_error error;
    int64_t bytes = 0;
    if (find_workspace_size(args, &bytes, &error) != SMLA_OK) {
        return smla_py_raise(&error);
    }
    return PyLong_FromLongLong(bytes);
}

static PyObject *
list_runs(const smla_backend *backend, const smla_attention_plan *plan)
{
    PyObject *list = PyList_New(plan->num_runs);
    for (int i = 0; list != NULL && i < plan->num_runs; i++) {
        const smla_attention_run *const run = &plan->runs[i];
        PyObject *const item = Py_BuildValue("(Liz)", (long long)run->num_tokens, run->num_splits,
                                             backend->kernel_name(run));
        if (item == NULL || PyList_SetItem(list, i, item) < 0) { /* steals */
            Py_CLEAR(list);
        }
    }
    return list;
}

/* For `python -m sparse_mla info --plan`: a dict for each row format of attention. */
static PyObject *
answer_plans(const void *args)
{
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const format = &smla_kv_formats[i];
        if ((SMLA_KV_ATTENTION & SMLA_KV_SET(i)) == 0) {
            continue;
        }
        const smla_backend *backend;
        smla_attention_plan plan;
        smla_error error;
        if (smla_find_attention_plan(args, format, &plan, &backend, &error) != SMLA_OK) {
            Py_DECREF(list);
            return smla_py_raise(&error);
        }
        PyObject *const item =
            Py_BuildValue("{s:s,s:i,s:L,s:z,s:N}", "kv_format", format->name, "head_dim",
                          format->head_dim, "workspace_bytes", (long long)plan.workspace_bytes,
                          "lack", plan.lack, "runs", list_runs(backend, &plan));
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

/* ---- Merge --------------------------------------------------------------------------------- */

/* Python counts the tokens that have a part a, or says nothing, which is -1. */
static smla_status
compute_merge_attn_states(const void *args, smla_error *error)
{
    smla_merge_attn_states_args a = *(const smla_merge_attn_states_args *)args;
    const bool has_all = a.tokens_without_context < 0 || a.out_a == NULL || a.out_a->ndim == 0;
    a.tokens_without_context = has_all ? 0 : a.out_a->shape[0] - a.tokens_without_context;
    return smla_merge_attn_states(&a, error);
}

enum { MERGE_OUT_A, MERGE_OUT = 5, MERGE_LSE };

static const smla_py_param merge_params[] = {
    [MERGE_OUT_A] = {"out_a", SMLA_PY_INPUT, offsetof(smla_merge_attn_states_args, out_a)},
    {"lse_a", SMLA_PY_INPUT, offsetof(smla_merge_attn_states_args, lse_a)},
    {"out_b", SMLA_PY_INPUT, offsetof(smla_merge_attn_states_args, out_b)},
    {"lse_b", SMLA_PY_INPUT, offsetof(smla_merge_attn_states_args, lse_b)},
    {"attn_sink", SMLA_PY_OPTIONAL, offsetof(smla_merge_attn_states_args, attn_sink)},
    [MERGE_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_merge_attn_states_args, out)},
    [MERGE_LSE] = {"lse", SMLA_PY_OUTPUT, offsetof(smla_merge_attn_states_args, lse)},
    {"prefill_tokens_with_context", SMLA_PY_COUNT_OR_NONE,
     offsetof(smla_merge_attn_states_args, tokens_without_context)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_merge_attn_states_args, stream)},
};

static const smla_py_result_row merge_results[] = {
    {.result = MERGE_OUT,
     .dtype = {.source = SMLA_PY_FLOATS_OF_ARRAY, .row = MERGE_OUT_A},
     .dims = {SMLA_PY_ALL_SIZES(MERGE_OUT_A)}},
    {SMLA_PY_MAKES(MERGE_LSE, FP32, SMLA_PY_SIZE(MERGE_OUT_A, 0), SMLA_PY_SIZE(MERGE_OUT_A, 1))},
};

static const smla_py_limit merge_limits[] = {{SMLA_PY_LIMIT_NDIM, MERGE_OUT_A, 3, 3}};

/* ---- Merge of many parts ------------------------------------------------------------------- */

SMLA_PY_COMPUTE(merge_attn_partials)

enum { PARTIALS_OUTS, PARTIALS_OUT = 3, PARTIALS_LSE };

static const smla_py_param partials_params[] = {
    [PARTIALS_OUTS] = {"outs", SMLA_PY_PARTS, offsetof(smla_merge_attn_partials_args, outs)},
    {"lses", SMLA_PY_PARTS, offsetof(smla_merge_attn_partials_args, lses)},
    {"attn_sink", SMLA_PY_OPTIONAL, offsetof(smla_merge_attn_partials_args, attn_sink)},
    [PARTIALS_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_merge_attn_partials_args, out)},
    [PARTIALS_LSE] = {"lse", SMLA_PY_OUTPUT, offsetof(smla_merge_attn_partials_args, lse)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_merge_attn_partials_args, stream)},
};

/* Parts in one array have a dimension more than one of a list. */
static const smla_py_result_row partials_results[] = {
    {.result = PARTIALS_OUT,
     .dtype = {.source = SMLA_PY_FLOATS_OF_ARRAY, .row = PARTIALS_OUTS},
     .when = {SMLA_PY_IF_NDIM, PARTIALS_OUTS, 4},
     .dims = {SMLA_PY_SIZE(PARTIALS_OUTS, 1), SMLA_PY_SIZE(PARTIALS_OUTS, 2),
              SMLA_PY_SIZE(PARTIALS_OUTS, 3)}},
    {.result = PARTIALS_OUT,
     .dtype = {.source = SMLA_PY_FLOATS_OF_ARRAY, .row = PARTIALS_OUTS},
     .when = {SMLA_PY_IF_NDIM, PARTIALS_OUTS, 3},
     .dims = {SMLA_PY_ALL_SIZES(PARTIALS_OUTS)}},
    {SMLA_PY_MAKES(PARTIALS_LSE, FP32, SMLA_PY_SIZE(PARTIALS_OUTS, 1),
                   SMLA_PY_SIZE(PARTIALS_OUTS, 2)),
     .when = {SMLA_PY_IF_NDIM, PARTIALS_OUTS, 4}},
    {SMLA_PY_MAKES(PARTIALS_LSE, FP32, SMLA_PY_SIZE(PARTIALS_OUTS, 0),
                   SMLA_PY_SIZE(PARTIALS_OUTS, 1)),
     .when = {SMLA_PY_IF_NDIM, PARTIALS_OUTS, 3}},
};

static const smla_py_limit partials_limits[] = {{SMLA_PY_LIMIT_NDIM, PARTIALS_OUTS, 3, 4}};

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_attention_operators[] = {
    {SMLA_PY_OPERATOR(sparse_attention, attention, smla_sparse_attention_args),
     .workspace_bytes = attention_workspace_bytes},
    {.name = "_attention_plus_inf",
     .title = "sparse_attention",
     SMLA_PY_TABLE(attention_params, smla_sparse_attention_args, smla_sparse_attention_args),
     .compute = attend_plus_inf,
     SMLA_PY_RESULTS(attention_results),
     SMLA_PY_LIMITS(attention_limits),
     .workspace_bytes = attention_workspace_bytes},
    {SMLA_PY_OPERATOR(sparse_mla_dsv4, dsv4, smla_sparse_mla_dsv4_args),
     .workspace_bytes = dsv4_workspace_bytes},
    {SMLA_PY_OPERATOR(mla_attention, mla, smla_mla_attention_args),
     .fills_offset = offsetof(smla_mla_attention_args, fills_padding),
     .workspace_bytes = mla_workspace_bytes},
    {.name = "_mla_attention_plus_inf",
     .title = "mla_attention",
     SMLA_PY_TABLE(mla_params, smla_mla_attention_args, smla_mla_attention_args),
     .compute = compute_mla_plus_inf,
     SMLA_PY_RESULTS(mla_results),
     SMLA_PY_LIMITS(mla_limits),
     .fills_offset = offsetof(smla_mla_attention_args, fills_padding),
     .workspace_bytes = mla_workspace_bytes},
    {.name = "attention_workspace_size",
     SMLA_PY_TABLE(workspace_size_params, smla_attention_workspace_args,
                   smla_attention_workspace_args),
     .answer = answer_workspace_size},
    {.name = "_attention_plans",
     .title = "attention_workspace_size",
     SMLA_PY_TABLE(workspace_size_params, smla_attention_workspace_args,
                   smla_attention_workspace_args),
     .answer = answer_plans},
    {SMLA_PY_OPERATOR(merge_attn_states, merge, smla_merge_attn_states_args)},
    {SMLA_PY_OPERATOR(merge_attn_partials, partials, smla_merge_attn_partials_args)},
    {.name = NULL},
};
