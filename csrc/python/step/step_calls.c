/* step_calls.c: what Python passes to the builds and the layers of each plan, as tables. A build
 * reads its options before its arrays, in the order of the rows.
 */
#include "python/step/step.h"

enum { ABSORBED_OUTPUT = 6 }; /* the row of W_UV_O, whose descale is the next one */

/* The results of a layer are its last two arrays: out, and lse where the table has it as an output
 * or the call asks for it. */
static int
allocate(smla_py_call *call, int ndim, int64_t values)
{
    const smla_step *const core = ((const smla_py_step *)call->step)->core;
    return smla_py_allocate_rows(call, call->num_arrays - 2, ndim, core->num_heads, values,
                                 core->facts.num_actual_tokens);
}

static int
allocate_latents(smla_py_call *call, const void *Py_UNUSED(args))
{
    call->asks = true;
    return allocate(call, 3, SMLA_KV_LORA_RANK);
}

static int
allocate_values(smla_py_call *call, const void *Py_UNUSED(args))
{
    const smla_step *const core = ((const smla_py_step *)call->step)->core;
    return allocate(call, 3, smla_dense_value_dim((const smla_dense_builder *)core));
}

/* With absorbed weights, results have a column per output of W_UV_O: dimension 1 of a bf16 weight,
 * and 0 of an e4m3 one, which lies transposed and has a descale. */
static int
allocate_outputs(smla_py_call *call, const void *Py_UNUSED(args))
{
    const bool is_transposed = call->arrays[ABSORBED_OUTPUT + 1].object != NULL;
    return smla_py_has_rank(call, ABSORBED_OUTPUT, 2)
               ? allocate(call, 2, smla_py_call_dim(call, ABSORBED_OUTPUT, is_transposed ? 0 : 1))
               : 0;
}

/* The batch of a build, whose names are the same for all plans. */
#define BATCH_ROWS(args)                                                              \
    {"num_reqs", SMLA_PY_INT, offsetof(args, num_reqs)},                              \
        {"num_actual_tokens", SMLA_PY_INT, offsetof(args, num_actual_tokens)},        \
        {"query_start_loc_cpu", SMLA_PY_STARTS, offsetof(args, query_start_loc_cpu)}, \
    {                                                                                 \
        "seq_lens_cpu", SMLA_PY_LENGTHS, offsetof(args, seq_lens_cpu)                 \
    }

/* The end of a layer's table: the step, and the number of the build that its metadata is from. */
#define STEP_ROWS(args)                                                                     \
    {"step", SMLA_PY_STEP, offsetof(args, builder)}, {"generation", SMLA_PY_GENERATION, 0}, \
    {                                                                                       \
        "stream", SMLA_PY_STREAM, offsetof(args, stream)                                    \
    }

/* ---- DeepSeek-V3.2 ------------------------------------------------------------------------- */

static const smla_py_param build_v32[] = {
    {"block_table", SMLA_PY_RETAINED, offsetof(smla_build_args, block_table)},
    BATCH_ROWS(smla_build_args),
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(smla_build_args, stream)},
};

SMLA_PY_COMPUTE(forward)

static const smla_py_param layer_v32[] = {
    {"q", SMLA_PY_PAIR, offsetof(smla_forward_args, q)},
    {"q_pe", SMLA_PY_SECOND, offsetof(smla_forward_args, q_pe)},
    {"kv_cache", SMLA_PY_INPUT, offsetof(smla_forward_args, kv_cache)},
    {"topk_indices", SMLA_PY_INPUT, offsetof(smla_forward_args, topk_indices)},
    {"attn_sink", SMLA_PY_OPTIONAL, offsetof(smla_forward_args, attn_sink)},
    {"out", SMLA_PY_OUTPUT, offsetof(smla_forward_args, out)},
    {"lse", SMLA_PY_OUTPUT, offsetof(smla_forward_args, lse)},
    {"softmax_scale", SMLA_PY_FLOAT, offsetof(smla_forward_args, softmax_scale)},
    STEP_ROWS(smla_forward_args),
};

/* ---- DeepSeek V4 --------------------------------------------------------------------------- */

static const smla_py_param build_v4[] = {
    {"block_table", SMLA_PY_RETAINED, offsetof(smla_v4_build_args, block_table)},
    {"slot_mapping", SMLA_PY_RETAINED, offsetof(smla_v4_build_args, slot_mapping)},
    {"compressed", SMLA_PY_TABLES, offsetof(smla_v4_build_args, compressed_tables)},
    {"index", SMLA_PY_TABLE, offsetof(smla_v4_build_args, index_table)},
    {"states", SMLA_PY_TABLES, offsetof(smla_v4_build_args, state_tables)},
    {"index_states", SMLA_PY_TABLE, offsetof(smla_v4_build_args, index_state_table)},
    BATCH_ROWS(smla_v4_build_args),
    {"max_seq_len", SMLA_PY_INT, offsetof(smla_v4_build_args, max_seq_len)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(smla_v4_build_args, stream)},
};

SMLA_PY_COMPUTE(v4_attend)

static const smla_py_param layer_v4[] = {
    {"q", SMLA_PY_INPUT, offsetof(smla_v4_attend_args, q)},
    {"caches.swa", SMLA_PY_INPUT, offsetof(smla_v4_attend_args, swa_kv_cache)},
    {"caches.compressed", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, compressed_kv_cache)},
    {"topk_indices", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, topk_indices)},
    {"slots", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, slots)},
    {"lens", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, lens)},
    {"attn_sink", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, attn_sink)},
    {"out", SMLA_PY_OUTPUT, offsetof(smla_v4_attend_args, out)},
    {"lse", SMLA_PY_OUTPUT, offsetof(smla_v4_attend_args, lse)},
    {"compress_ratio", SMLA_PY_INT, offsetof(smla_v4_attend_args, compress_ratio)},
    STEP_ROWS(smla_v4_attend_args),
};

/* ---- Dense MLA ----------------------------------------------------------------------------- */

static const smla_py_param build_dense[] = {
    {"block_table", SMLA_PY_RETAINED, offsetof(smla_dense_build_args, block_table)},
    {"slot_mapping", SMLA_PY_RETAINED, offsetof(smla_dense_build_args, slot_mapping)},
    {"seq_lens", SMLA_PY_RETAINED, offsetof(smla_dense_build_args, seq_lens)},
    BATCH_ROWS(smla_dense_build_args),
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(smla_dense_build_args, stream)},
};

SMLA_PY_COMPUTE(dense_forward)

static const smla_py_param layer_dense[] = {
    {"q", SMLA_PY_PAIR, offsetof(smla_dense_forward_args, q)},
    {"q_pe", SMLA_PY_SECOND, offsetof(smla_dense_forward_args, q_pe)},
    {"kv_c", SMLA_PY_INPUT, offsetof(smla_dense_forward_args, kv_c)},
    {"k_pe", SMLA_PY_OPTIONAL, offsetof(smla_dense_forward_args, k_pe)},
    {"W_UK", SMLA_PY_INPUT, offsetof(smla_dense_forward_args, W_UK)},
    {"W_UV", SMLA_PY_INPUT, offsetof(smla_dense_forward_args, W_UV)},
    {"kv_b_proj", SMLA_PY_OPTIONAL, offsetof(smla_dense_forward_args, kv_b_proj)},
    {"rope_table", SMLA_PY_OPTIONAL, offsetof(smla_dense_forward_args, rope_table)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_dense_forward_args, kv_scale)},
    {"kv_cache", SMLA_PY_INOUT, offsetof(smla_dense_forward_args, kv_cache)},
    {"out", SMLA_PY_OUTPUT, offsetof(smla_dense_forward_args, out)},
    {"lse", SMLA_PY_ASKED_OUTPUT, offsetof(smla_dense_forward_args, lse)},
    {"return_lse", SMLA_PY_ASK, 0},
    {"softmax_scale", SMLA_PY_FLOAT, offsetof(smla_dense_forward_args, softmax_scale)},
    {"interleaved", SMLA_PY_UNLESS, offsetof(smla_dense_forward_args, is_neox)},
    STEP_ROWS(smla_dense_forward_args),
};

SMLA_PY_COMPUTE(dense_absorbed_forward)

#define ABSORBED(field) offsetof(smla_dense_absorbed_forward_args, field)

static const smla_py_param layer_absorbed[] = {
    {"q_c", SMLA_PY_INPUT, ABSORBED(q_c)},
    {"kv_c", SMLA_PY_INPUT, ABSORBED(kv_c)},
    {"k_pe", SMLA_PY_OPTIONAL, ABSORBED(k_pe)},
    {"W_Q_UK", SMLA_PY_INPUT, ABSORBED(W_Q_UK)},
    {"W_Q_UK_descale", SMLA_PY_OPTIONAL, ABSORBED(W_Q_UK_descale)},
    {"W_QR", SMLA_PY_OPTIONAL, ABSORBED(W_QR)},
    [ABSORBED_OUTPUT] = {"W_UV_O", SMLA_PY_INPUT, ABSORBED(W_UV_O)},
    {"W_UV_O_descale", SMLA_PY_OPTIONAL, ABSORBED(W_UV_O_descale)},
    {"W_Q", SMLA_PY_OPTIONAL, ABSORBED(W_Q)},
    {"o_proj", SMLA_PY_OPTIONAL, ABSORBED(o_proj)},
    {"kv_b_proj", SMLA_PY_OPTIONAL, ABSORBED(kv_b_proj)},
    {"rope_table", SMLA_PY_OPTIONAL, ABSORBED(rope_table)},
    {"kv_scale", SMLA_PY_SCALE, ABSORBED(kv_scale)},
    {"kv_cache", SMLA_PY_INOUT, ABSORBED(kv_cache)},
    {"out", SMLA_PY_OUTPUT, ABSORBED(out)},
    {"lse", SMLA_PY_ASKED_OUTPUT, ABSORBED(lse)},
    {"return_lse", SMLA_PY_ASK, 0},
    {"softmax_scale", SMLA_PY_FLOAT, ABSORBED(softmax_scale)},
    {"interleaved", SMLA_PY_UNLESS, ABSORBED(is_neox)},
    {"input_group", SMLA_PY_TWO_INTS, ABSORBED(input_group_rows)},
    STEP_ROWS(smla_dense_absorbed_forward_args),
};

/* ---- Attention to pages -------------------------------------------------------------------- */

#define PAGED(field) offsetof(smla_paged_build_args, field)

static const smla_py_param build_paged[] = {
    {"seq_lens", SMLA_PY_RETAINED, PAGED(seq_lens)},
    {"req_pool_indices", SMLA_PY_RETAINED, PAGED(req_pool_indices)},
    {"req_to_token", SMLA_PY_RETAINED, PAGED(req_to_token)},
    {"full_to_swa_index_mapping", SMLA_PY_TABLE, PAGED(full_to_swa_index_mapping)},
    {"extend_seq_lens", SMLA_PY_TABLE, PAGED(extend_seq_lens)},
    {"out_cache_loc", SMLA_PY_TABLE, PAGED(out_cache_loc)},
    {"custom_mask", SMLA_PY_TABLE, PAGED(custom_mask)},
    {"encoder_lens", SMLA_PY_TABLE, PAGED(encoder_lens)},
    {"num_reqs", SMLA_PY_INT, PAGED(num_reqs)},
    {"mode", SMLA_PY_INT32, PAGED(mode)},
    {"spec_step", SMLA_PY_INT, PAGED(spec_step)},
    {"num_steps", SMLA_PY_INT, PAGED(num_steps)},
    {"common_prefix_len", SMLA_PY_INT, PAGED(common_prefix_len)},
    {"is_fixed", SMLA_PY_INT32, PAGED(is_fixed)},
    {"num_tokens", SMLA_PY_INT, PAGED(num_tokens)},
    {"num_padding_reqs", SMLA_PY_INT, PAGED(num_padding_reqs)},
    {"seq_lens_cpu", SMLA_PY_LENGTHS_OR_NONE, PAGED(seq_lens_cpu)},
    {"extend_seq_lens_cpu", SMLA_PY_LENGTHS_OR_NONE, PAGED(extend_seq_lens_cpu)},
    {"encoder_lens_cpu", SMLA_PY_LENGTHS_OR_NONE, PAGED(encoder_lens_cpu)},
    {"stream", SMLA_PY_STREAM, PAGED(stream)},
};

/* ---- List ---------------------------------------------------------------------------------- */

#define PLAN(plan, build_args)   \
    .core = &smla_##plan##_plan, \
    .build = {.name = smla_build_op, SMLA_PY_TABLE(build_##plan, build_args, build_args)}

#define LAYER(table, layer_args, layer_op, function, results) \
    {.name = (layer_op),                                      \
     SMLA_PY_TABLE(layer_##table, layer_args, layer_args),    \
     .compute = compute_##function,                           \
     .allocate = (results)}

static const smla_py_plan plans[] = {
    {PLAN(v32, smla_build_args),
     .layers = {LAYER(v32, smla_forward_args, "forward", forward, allocate_latents)}},
    {PLAN(v4, smla_v4_build_args),
     .layers = {LAYER(v4, smla_v4_attend_args, "attend", v4_attend, allocate_latents)}},
    {PLAN(dense, smla_dense_build_args),
     .layers = {LAYER(dense, smla_dense_forward_args, "dense.forward", dense_forward,
                      allocate_values),
                LAYER(absorbed, smla_dense_absorbed_forward_args, "dense.forward",
                      dense_absorbed_forward, allocate_outputs)}},
    {PLAN(paged, smla_paged_build_args)}, /* Python composes its layer of operators */
};

const smla_py_plan *
smla_py_find_plan(const char *name)
{
    for (int i = 0; i < SMLA_PY_COUNT(plans); i++) {
        if (strcmp(plans[i].core->name, name) == 0) {
            return &plans[i];
        }
    }
    return NULL;
}
