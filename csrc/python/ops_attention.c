/* ops_attention.c: positions to slots, attention over slots, merge of partial results.
 *
 * Rules are the core's: a result whose shape cannot be known, because an input is malformed, is
 * left absent, and the core reports that input first.
 */
#include "call.h"
#include "scratch.h"

static const DLDataType int32 = {kDLInt, 32, 1};
static const DLDataType uint8 = {kDLUInt, 8, 1};

static const smla_py_param convert_req_index_to_global_index_params[] = {
    {"req_id_per_token", SMLA_PY_INPUT},
    {"block_table", SMLA_PY_INPUT},
    {"topk_indices", SMLA_PY_INPUT},
    {"prefill_request_ids", SMLA_PY_OPTIONAL},
    {"prefill_workspace_starts", SMLA_PY_OPTIONAL},
    {"out", SMLA_PY_OUTPUT},
    {.name = "block_size"},
    {.name = "valid_counts"},
    {.name = "stream"},
};

static PyObject *
convert_req_index_to_global_index(const smla_py_state *state, PyObject *const *args)
{
    enum {
        REQ_ID,
        BLOCK_TABLE,
        TOPK,
        PREFILL_IDS,
        PREFILL_STARTS,
        OUT,
        COUNTS,
        NUM_ARGS = COUNTS /* that are arrays */
    };
    static const char op[] = "convert_req_index_to_global_index";
    smla_convert_req_index_args a = {.struct_size = sizeof a};
    smla_py_call call;
    smla_error error;
    smla_status status;
    bool wants_counts = false;
    smla_py_open(&call, state, op);
    if (smla_py_parse_int(op, "block_size", args[NUM_ARGS], &a.block_size) < 0 ||
        smla_py_parse_flag(args[NUM_ARGS + 1], &wants_counts) < 0 ||
        smla_py_take_stream(&call, args[NUM_ARGS + 2]) < 0 ||
        smla_py_add(&call, convert_req_index_to_global_index_params, NUM_ARGS, args) < 0 ||
        smla_py_settle(&call, &a.stream) < 0) {
        return NULL;
    }
    smla_py_add_absent(&call, "counts");
    if (smla_py_has_rank(&call, TOPK, 2)) {
        const int64_t shape[2] = {smla_py_call_dim(&call, TOPK, 0),
                                  smla_py_call_dim(&call, TOPK, 1)};
        if (smla_py_allocate_result(&call, OUT, int32, 2, shape) < 0 ||
            (wants_counts && smla_py_allocate_result(&call, COUNTS, int32, 1, shape) < 0)) {
            return smla_py_fail(&call);
        }
    }
    a.req_id_per_token = smla_py_call_view(&call, REQ_ID);
    a.block_table = smla_py_call_view(&call, BLOCK_TABLE);
    a.topk_indices = smla_py_call_view(&call, TOPK);
    a.prefill_request_ids = smla_py_call_view(&call, PREFILL_IDS);
    a.prefill_workspace_starts = smla_py_call_view(&call, PREFILL_STARTS);
    a.out = smla_py_call_view(&call, OUT);
    a.counts = smla_py_call_view(&call, COUNTS);
    Py_BEGIN_ALLOW_THREADS
    status = smla_convert_req_index_to_global_index(&a, &error);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){OUT, COUNTS}, wants_counts ? 2 : 1);
}

enum {
    ATT_Q,
    ATT_Q_PE,
    ATT_KV,
    ATT_INDICES,
    ATT_TOPK_LENGTH,
    ATT_SINK,
    ATT_EXTRA_KV,
    ATT_EXTRA_INDICES,
    ATT_EXTRA_TOPK_LENGTH,
    ATT_OUT,
    ATT_LSE,
    ATT_MAX_LOGITS,
    ATT_WORKSPACE,
};

static int
allocate_attention(smla_py_call *call, bool wants_max_logits)
{
    const int64_t shape[3] = {smla_py_call_dim(call, ATT_Q, 0), smla_py_call_dim(call, ATT_Q, 1),
                              SMLA_KV_LORA_RANK};
    if (!smla_py_has_rank(call, ATT_Q, 3) || !smla_py_is_head_count(shape[1])) {
        return 0;
    }
    if (smla_py_allocate_result(call, ATT_OUT, smla_py_bf16, 3, shape) < 0 ||
        smla_py_allocate_result(call, ATT_LSE, smla_py_fp32, 2, shape) < 0) {
        return -1;
    }
    return wants_max_logits ? smla_py_allocate_result(call, ATT_MAX_LOGITS, smla_py_fp32, 2, shape)
                            : 0;
}

/* Workspace that the caller did not give: plain memory on the CPU; like the results elsewhere, and
 * a Tensor, which nobody else holds, until the work is over. */
static int
allocate_workspace(smla_py_call *call, smla_sparse_attention_args *a, smla_py_scratch *scratch)
{
    const int64_t bytes = smla_py_workspace_bytes(a);
    if (bytes == 0) {
        return 0;
    }
    if (a->out->device.device_type == kDLCPU) {
        a->workspace = smla_py_take_scratch(scratch, bytes);
        if (a->workspace == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        return 0;
    }
    smla_py_array *workspace = &call->arrays[ATT_WORKSPACE];
    if (smla_py_allocate_result(call, ATT_WORKSPACE, uint8, 1, &bytes) < 0) {
        return -1;
    }
    workspace->is_foreign |= Py_TYPE(workspace->object) == call->state->tensor_type;
    a->workspace = smla_py_view(workspace);
    return 0;
}

static const smla_py_param sparse_attention_params[] = {
    {"q", SMLA_PY_INPUT},
    {"kv", SMLA_PY_INPUT},
    {"indices", SMLA_PY_INPUT},
    {"topk_length", SMLA_PY_OPTIONAL},
    {"attn_sink", SMLA_PY_OPTIONAL},
    {"extra_kv", SMLA_PY_OPTIONAL},
    {"extra_indices", SMLA_PY_OPTIONAL},
    {"extra_topk_length", SMLA_PY_OPTIONAL},
    {"out", SMLA_PY_OUTPUT},
    {"lse", SMLA_PY_OUTPUT},
    {"max_logits", SMLA_PY_OUTPUT},
    {"workspace", SMLA_PY_OUTPUT},
    {.name = "softmax_scale"},
    {.name = "num_splits"},
    {.name = "kv_format"},
    {.name = "return_max_logits"},
    {.name = "stream"},
};

static PyObject *
attend(const smla_py_state *state, PyObject *const *args, bool lse_empty_is_plus_inf)
{
    enum { NUM_ARGS = ATT_WORKSPACE }; /* that are arrays: q is one, or a pair */
    static const char op[] = "sparse_attention";
    PyObject *const *options = args + NUM_ARGS;
    smla_sparse_attention_args a = {.struct_size = sizeof a,
                                    .lse_empty_is_plus_inf = lse_empty_is_plus_inf};
    smla_py_call call;
    smla_error error;
    smla_status status;
    bool wants_max_logits = false;
    smla_py_open(&call, state, op);
    if (smla_py_parse_float(op, "softmax_scale", options[0], &a.softmax_scale) < 0 ||
        smla_py_parse_int32(op, "num_splits", options[1], &a.num_splits) < 0 ||
        smla_py_parse_kv_format(op, "kv_format", options[2], &a.kv_format) < 0 ||
        smla_py_parse_flag(options[3], &wants_max_logits) < 0 ||
        smla_py_take_stream(&call, options[4]) < 0 || smla_py_add_query(&call, args[0]) < 0 ||
        smla_py_add(&call, sparse_attention_params + 1, NUM_ARGS - 1, args + 1) < 0 ||
        smla_py_settle(&call, &a.stream) < 0) {
        return NULL;
    }
    wants_max_logits |= call.arrays[ATT_MAX_LOGITS].object != NULL;
    if (allocate_attention(&call, wants_max_logits) < 0) {
        return smla_py_fail(&call);
    }
    a.q = smla_py_call_view(&call, ATT_Q);
    a.q_pe = smla_py_call_view(&call, ATT_Q_PE);
    a.kv = smla_py_call_view(&call, ATT_KV);
    a.indices = smla_py_call_view(&call, ATT_INDICES);
    a.topk_length = smla_py_call_view(&call, ATT_TOPK_LENGTH);
    a.attn_sink = smla_py_call_view(&call, ATT_SINK);
    a.extra_kv = smla_py_call_view(&call, ATT_EXTRA_KV);
    a.extra_indices = smla_py_call_view(&call, ATT_EXTRA_INDICES);
    a.extra_topk_length = smla_py_call_view(&call, ATT_EXTRA_TOPK_LENGTH);
    a.out = smla_py_call_view(&call, ATT_OUT);
    a.lse = smla_py_call_view(&call, ATT_LSE);
    a.max_logits = smla_py_call_view(&call, ATT_MAX_LOGITS);
    a.workspace = smla_py_call_view(&call, ATT_WORKSPACE);
    smla_py_scratch scratch = {.bytes = 0};
    if (allocate_workspace(&call, &a, &scratch) < 0) {
        return smla_py_fail(&call);
    }
    Py_BEGIN_ALLOW_THREADS
    status = smla_sparse_attention(&a, &error);
    free(scratch.tensor.data);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){ATT_OUT, ATT_LSE, ATT_MAX_LOGITS},
                          wants_max_logits ? 3 : 2);
}

static PyObject *
sparse_attention(const smla_py_state *state, PyObject *const *args)
{
    return attend(state, args, false);
}

/* For flash_mla.py. */
static PyObject *
attention_plus_inf(const smla_py_state *state, PyObject *const *args)
{
    return attend(state, args, true);
}

static const smla_py_param attention_workspace_size_params[] = {
    {.name = "num_tokens"}, {.name = "num_heads"},  {.name = "topk"},
    {.name = "extra_topk"}, {.name = "num_splits"}, {.name = "device"},
};

static PyObject *
attention_workspace_size(const smla_py_state *Py_UNUSED(state), PyObject *const *args)
{
    static const char op[] = "attention_workspace_size";
    smla_attention_workspace_args a = {.struct_size = sizeof a};
    smla_error error;
    int64_t bytes = 0;
    if (smla_py_parse_int(op, "num_tokens", args[0], &a.num_tokens) < 0 ||
        smla_py_parse_int(op, "num_heads", args[1], &a.num_heads) < 0 ||
        smla_py_parse_int(op, "topk", args[2], &a.topk) < 0 ||
        smla_py_parse_int(op, "extra_topk", args[3], &a.extra_topk) < 0 ||
        smla_py_parse_int32(op, "num_splits", args[4], &a.num_splits) < 0 ||
        smla_py_parse_device(op, "device", args[5], &a.device) < 0) {
        return NULL;
    }
    if (smla_attention_workspace_size(&a, &bytes, &error) != SMLA_OK) {
        return smla_py_raise(&error);
    }
    return PyLong_FromLongLong(bytes);
}

static const smla_py_param merge_attn_states_params[] = {
    {"out_a", SMLA_PY_INPUT}, {"lse_a", SMLA_PY_INPUT}, {"out_b", SMLA_PY_INPUT},
    {"lse_b", SMLA_PY_INPUT}, {"out", SMLA_PY_OUTPUT},  {"lse", SMLA_PY_OUTPUT},
    {.name = "stream"},
};

static PyObject *
merge_attn_states(const smla_py_state *state, PyObject *const *args)
{
    enum { OUT_A, LSE_A, OUT_B, LSE_B, OUT, LSE, NUM_ARRAYS };
    static const char op[] = "merge_attn_states";
    smla_merge_attn_states_args a = {.struct_size = sizeof a};
    smla_py_call call;
    smla_error error;
    smla_status status;
    smla_py_open(&call, state, op);
    if (smla_py_take_stream(&call, args[NUM_ARRAYS]) < 0 ||
        smla_py_add(&call, merge_attn_states_params, NUM_ARRAYS, args) < 0 ||
        smla_py_settle(&call, &a.stream) < 0) {
        return NULL;
    }
    const DLDataType dtype = call.arrays[OUT_A].view.dtype;
    const bool is_state = (dtype.code == smla_py_bf16.code && dtype.bits == smla_py_bf16.bits) ||
                          (dtype.code == smla_py_fp32.code && dtype.bits == smla_py_fp32.bits);
    if (smla_py_has_rank(&call, OUT_A, 3) && is_state) {
        const int64_t *shape = call.arrays[OUT_A].shape;
        if (smla_py_allocate_result(&call, OUT, dtype, 3, shape) < 0 ||
            smla_py_allocate_result(&call, LSE, smla_py_fp32, 2, shape) < 0) {
            return smla_py_fail(&call);
        }
    }
    a.out_a = smla_py_call_view(&call, OUT_A);
    a.lse_a = smla_py_call_view(&call, LSE_A);
    a.out_b = smla_py_call_view(&call, OUT_B);
    a.lse_b = smla_py_call_view(&call, LSE_B);
    a.out = smla_py_call_view(&call, OUT);
    a.lse = smla_py_call_view(&call, LSE);
    Py_BEGIN_ALLOW_THREADS
    status = smla_merge_attn_states(&a, &error);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){OUT, LSE}, 2);
}

/* ---- Table --------------------------------------------------------------------------------- */

const smla_py_operator smla_py_attention_operators[] = {
    SMLA_PY_OPERATOR(convert_req_index_to_global_index),
    SMLA_PY_OPERATOR(sparse_attention),
    {"_attention_plus_inf", sparse_attention_params, SMLA_PY_COUNT(sparse_attention_params),
     attention_plus_inf},
    SMLA_PY_OPERATOR(attention_workspace_size),
    SMLA_PY_OPERATOR(merge_attn_states),
    {.name = NULL},
};
