/* step_calls.c: what Python passes to the builds and the layers of each plan, as tables. A build
 * reads its options before its arrays, in the order of the rows.
 */
#include "python/step/step.h"

/* The result of a dense layer is its last array. */
static int
allocate_values(smla_py_call *call, const void *Py_UNUSED(args))
{
    const smla_step *const core = ((const smla_py_step *)call->step)->core;
    const int64_t values = smla_dense_value_dim((const smla_dense_builder *)core);
    return smla_py_allocate_values(call, 0, call->num_arrays - 1, values,
                                   core->facts.num_actual_tokens);
}

/* Results of a layer are its last two arrays. */
static int
allocate_results(smla_py_call *call, const void *Py_UNUSED(args))
{
    const smla_step *const core = ((const smla_py_step *)call->step)->core;
    return smla_py_allocate_rows(call, 0, call->num_arrays - 2, core->facts.num_actual_tokens);
}

/* ---- DeepSeek-V3.2 ------------------------------------------------------------------------- */

static const smla_py_param build_v32[] = {
    {"block_table", SMLA_PY_RETAINED, offsetof(smla_build_args, block_table)},
    {"num_reqs", SMLA_PY_INT, offsetof(smla_build_args, num_reqs)},
    {"num_actual_tokens", SMLA_PY_INT, offsetof(smla_build_args, num_actual_tokens)},
    {"query_start_loc_cpu", SMLA_PY_STARTS, offsetof(smla_build_args, query_start_loc_cpu)},
    {"seq_lens_cpu", SMLA_PY_LENGTHS, offsetof(smla_build_args, seq_lens_cpu)},
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
    {"step", SMLA_PY_STEP, offsetof(smla_forward_args, builder)},
    {"generation", SMLA_PY_GENERATION, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_forward_args, stream)},
};

/* ---- DeepSeek V4 --------------------------------------------------------------------------- */

static const smla_py_param build_v4[] = {
    {"block_table", SMLA_PY_RETAINED, offsetof(smla_v4_build_args, block_table)},
    {"slot_mapping", SMLA_PY_RETAINED, offsetof(smla_v4_build_args, slot_mapping)},
    {"compressed", SMLA_PY_TABLES, offsetof(smla_v4_build_args, compressed_tables)},
    {"index", SMLA_PY_TABLE, offsetof(smla_v4_build_args, index_table)},
    {"states", SMLA_PY_TABLES, offsetof(smla_v4_build_args, state_tables)},
    {"index_states", SMLA_PY_TABLE, offsetof(smla_v4_build_args, index_state_table)},
    {"num_reqs", SMLA_PY_INT, offsetof(smla_v4_build_args, num_reqs)},
    {"num_actual_tokens", SMLA_PY_INT, offsetof(smla_v4_build_args, num_actual_tokens)},
    {"query_start_loc_cpu", SMLA_PY_STARTS, offsetof(smla_v4_build_args, query_start_loc_cpu)},
    {"seq_lens_cpu", SMLA_PY_LENGTHS, offsetof(smla_v4_build_args, seq_lens_cpu)},
    {"max_seq_len", SMLA_PY_INT, offsetof(smla_v4_build_args, max_seq_len)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(smla_v4_build_args, stream)},
};

SMLA_PY_COMPUTE(v4_attend)

static const smla_py_param layer_v4[] = {
    {"q", SMLA_PY_INPUT, offsetof(smla_v4_attend_args, q)},
    {"caches.swa", SMLA_PY_INPUT, offsetof(smla_v4_attend_args, swa_cache)},
    {"caches.compressed", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, compressed)},
    {"topk_indices", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, topk_indices)},
    {"slots", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, slots)},
    {"lens", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, lens)},
    {"attn_sink", SMLA_PY_OPTIONAL, offsetof(smla_v4_attend_args, attn_sink)},
    {"out", SMLA_PY_OUTPUT, offsetof(smla_v4_attend_args, out)},
    {"lse", SMLA_PY_OUTPUT, offsetof(smla_v4_attend_args, lse)},
    {"compress_ratio", SMLA_PY_INT, offsetof(smla_v4_attend_args, compress_ratio)},
    {"step", SMLA_PY_STEP, offsetof(smla_v4_attend_args, builder)},
    {"generation", SMLA_PY_GENERATION, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_v4_attend_args, stream)},
};

/* ---- Dense MLA ----------------------------------------------------------------------------- */

static const smla_py_param build_dense[] = {
    {"block_table", SMLA_PY_RETAINED, offsetof(smla_dense_build_args, block_table)},
    {"slot_mapping", SMLA_PY_RETAINED, offsetof(smla_dense_build_args, slot_mapping)},
    {"seq_lens", SMLA_PY_RETAINED, offsetof(smla_dense_build_args, seq_lens)},
    {"num_reqs", SMLA_PY_INT, offsetof(smla_dense_build_args, num_reqs)},
    {"num_actual_tokens", SMLA_PY_INT, offsetof(smla_dense_build_args, num_actual_tokens)},
    {"query_start_loc_cpu", SMLA_PY_STARTS, offsetof(smla_dense_build_args, query_start_loc_cpu)},
    {"seq_lens_cpu", SMLA_PY_LENGTHS, offsetof(smla_dense_build_args, seq_lens_cpu)},
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
    {"softmax_scale", SMLA_PY_FLOAT, offsetof(smla_dense_forward_args, softmax_scale)},
    {"interleaved", SMLA_PY_UNLESS, offsetof(smla_dense_forward_args, is_neox)},
    {"step", SMLA_PY_STEP, offsetof(smla_dense_forward_args, builder)},
    {"generation", SMLA_PY_GENERATION, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_dense_forward_args, stream)},
};

/* ---- List ---------------------------------------------------------------------------------- */

#define PLAN(plan, build_args, layer_args, layer_op, function, results)                        \
    {                                                                                          \
        .core = &smla_##plan##_plan,                                                           \
        .build = {.name = smla_build_op, SMLA_PY_TABLE(build_##plan, build_args, build_args)}, \
        .layer = {.name = (layer_op),                                                          \
                  SMLA_PY_TABLE(layer_##plan, layer_args, layer_args),                         \
                  .compute = compute_##function,                                               \
                  .allocate = (results)},                                                      \
    }

static const smla_py_plan plans[] = {
    PLAN(v32, smla_build_args, smla_forward_args, "forward", forward, allocate_results),
    PLAN(v4, smla_v4_build_args, smla_v4_attend_args, "attend", v4_attend, allocate_results),
    PLAN(dense, smla_dense_build_args, smla_dense_forward_args, "dense.forward", dense_forward,
         allocate_values),
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
