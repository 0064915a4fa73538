/* backend.h: cuda_backend.c and checked.c on the fake runtime of runtime.h, with operators that do
 * nothing, and checks of the CPU that write down what they get. Included once in a program.
 */
#pragma once

#include <stdlib.h>

static void *test_malloc(size_t size);
static void test_free(void *memory);

#include "core/params_all.h"

#define malloc      test_malloc
#define free        test_free
#define free_arrays free_copies /* testing.h has `free_arrays`, too */
#include "cuda/host/checked.c"  // NOLINT(bugprone-suspicious-include)
#undef malloc
#undef free
#undef free_arrays
#include "cuda/cuda_backend.c" // NOLINT(bugprone-suspicious-include)

/* ---- Operators that do nothing, in front of testing.h, which has a global `error` ---------- */

static cudaError_t launch_code;
static const smla_cuda_device *launch_device;

static cudaError_t launch_nothing(const char *name);

#define LAUNCHER(name, args_type, params_type, family)                                             \
    cudaError_t smla_cuda_launch_##name(const params_type *params, const smla_cuda_device *device) \
    {                                                                                              \
        (void)params;                                                                              \
        launch_device = device;                                                                    \
        return launch_nothing(#name);                                                              \
    }

SMLA_LAUNCHED_OPERATORS(LAUNCHER)
LAUNCHER(fill_step_lists, smla_v4_build_args, smla_step_lists_params, step)
LAUNCHER(fill_paged_lists, smla_paged_build_args, smla_paged_step_params, paged_step)
LAUNCHER(key_ranges, smla_mla_attention_args, smla_key_ranges_params, attention)

cudaError_t
smla_cuda_launch_projection_e4m3(const smla_projection_params *params)
{
    (void)params;
    return launch_nothing("e4m3_project");
}

smla_status
smla_cuda_attend_lists(const smla_attention_params *params, smla_error *error)
{
    if (params->plan.num_runs != 1) {
        abort(); /* the caller's plan was not handed on */
    }
    return smla_cuda_status(params->call.op, "a kernel", launch_nothing("attention"), error);
}

cudaError_t
smla_cuda_attend_mha(const smla_attention_params *params, const smla_cuda_device *device)
{
    (void)params;
    launch_device = device;
    return launch_nothing("attention of heads");
}

smla_status
smla_cuda_require_part_rows(const smla_attention_params *params, smla_error *error)
{
    (void)params;
    (void)error;
    return SMLA_OK;
}

smla_status
smla_cuda_projection(const smla_projection_params *params, smla_error *error)
{
    return smla_cuda_status(params->call.op, "a kernel", launch_nothing("project"), error);
}

/* Other tests cover the rest of the backend's table. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define ABSENT(type, name, ...) \
    type name(__VA_ARGS__)      \
    {                           \
        abort();                \
    }
ABSENT(void, smla_cuda_plan_attention, const smla_attention_shape *s, smla_attention_plan *p)
ABSENT(bool, smla_cuda_prefers_direct, const smla_attention_shape *s, int64_t r, int64_t c)
ABSENT(int64_t, smla_cuda_attention_workspace_size, const smla_attention_shape *s)
ABSENT(const char *, smla_cuda_kernel_name, const smla_attention_run *r)
ABSENT(int64_t, smla_cuda_kernels, smla_kernel_info *r, int64_t c)
ABSENT(void *, smla_cuda_allocate, int32_t d, int64_t b)
ABSENT(void *, smla_cuda_allocate_zeros, int32_t d, int64_t b)
ABSENT(void, smla_cuda_release, int32_t d, void *m)
ABSENT(smla_mirror *, smla_cuda_create_mirror, int32_t d, int64_t b)
ABSENT(void, smla_cuda_destroy_mirror, smla_mirror *m)
ABSENT(smla_status, smla_cuda_begin_write, const char *o, smla_mirror *m, smla_stream s, void **h,
       smla_error *e)
ABSENT(smla_status, smla_cuda_end_write, const char *o, smla_mirror *m, smla_stream s,
       smla_error *e)
ABSENT(smla_status, smla_cuda_begin_use, const char *o, smla_mirror *m, smla_stream s,
       smla_error *e)
ABSENT(smla_status, smla_cuda_end_use, const char *o, smla_mirror *m, smla_stream s, smla_error *e)
const smla_stream_ops smla_cuda_stream_ops = {.record = NULL};
#pragma GCC diagnostic pop

/* What the checks of the CPU backend get. */
static smla_status cpu_status;
static smla_cache_write_params seen_write;
static smla_gather_params seen_gather;
static smla_convert_params seen_convert;
static smla_rope seen_rope;
static smla_topk_slots_params seen_global_topk;
static smla_combine_topk_swa_params seen_combine;
static smla_mixed_indices_params seen_mixed;
static int64_t seen_sum; /* the sum of the arrays' values */
static const int32_t device_zeros[4];
static const uint8_t device_flags[4];
static int num_device_arrays; /* arrays that the checks got instead of copies */

static inline int64_t
sum_of(const int32_t *data, int64_t count, int64_t stride)
{
    int64_t sum = 0;
    for (int64_t i = 0; data != NULL && i < count; i++) {
        sum += data[i * stride];
    }
    return sum;
}

smla_status
smla_cpu_check_cache_write(const smla_cache_write_params *p, smla_error *error)
{
    seen_write = *p;
    num_device_arrays += p->slot_mapping == device_zeros;
    seen_sum = 0;
    for (int64_t i = 0; i < p->num_tokens; i++) {
        seen_sum += p->slots_are_int64 ? ((const int64_t *)p->slot_mapping)[i * p->slot_stride]
                                       : ((const int32_t *)p->slot_mapping)[i * p->slot_stride];
    }
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_gather(const smla_gather_params *p, smla_error *error)
{
    seen_gather = *p;
    num_device_arrays += (p->block_table == device_zeros) + (p->seq_lens == device_zeros) +
                         (p->workspace_starts == device_zeros) + (p->seq_starts == device_zeros);
    seen_sum = 0;
    for (int64_t i = 0; i < p->num_reqs; i++) {
        seen_sum += sum_of(p->block_table + i * p->block_table_stride_req, p->num_blocks,
                           p->block_table_stride_block);
    }
    seen_sum += 1000 * sum_of(p->seq_lens, p->num_reqs, p->seq_lens_stride);
    seen_sum += 1000000 * sum_of(p->workspace_starts, p->num_reqs, p->workspace_starts_stride);
    seen_sum += 1000000000 * sum_of(p->seq_starts, p->num_reqs, p->seq_starts_stride);
    seen_sum += 7 * sum_of(p->gather_lens, p->num_reqs, p->gather_lens_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_convert(const smla_convert_params *p, smla_error *error)
{
    seen_convert = *p;
    num_device_arrays += p->req_id_per_token == device_zeros;
    seen_sum = sum_of(p->req_id_per_token, p->num_tokens, p->req_id_stride);
    seen_sum += 1000 * sum_of(p->prefill_request_ids, p->num_tokens, p->prefill_request_ids_stride);
    seen_sum += 1000000 * sum_of(p->prefill_workspace_starts, p->num_prefills,
                                 p->prefill_workspace_starts_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_logits(const smla_logits_params *p, smla_error *error)
{
    num_device_arrays += p->context_lens == device_zeros || p->req_id_per_token == device_zeros;
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_positions(const char *op, const smla_rope *rope, int64_t num_tokens,
                         smla_error *error)
{
    (void)op;
    seen_rope = *rope;
    num_device_arrays += rope->positions == device_zeros;
    seen_sum = 0;
    for (int64_t i = 0; i < num_tokens; i++) {
        const int64_t at = i * rope->positions_stride;
        seen_sum += rope->positions_are_int64 ? ((const int64_t *)rope->positions)[at]
                                              : ((const int32_t *)rope->positions)[at];
    }
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

static inline int64_t
sum_of_flags(const uint8_t *data, int64_t count, int64_t stride)
{
    int64_t sum = 0;
    for (int64_t i = 0; data != NULL && i < count; i++) {
        sum += data[i * stride];
    }
    return sum;
}

static inline int64_t
sum_of_starts(const smla_query_batch *batch)
{
    return sum_of(batch->query_start_loc, batch->num_reqs + 1, batch->query_start_loc_stride);
}

smla_status
smla_cpu_check_global_topk(const smla_topk_slots_params *p, smla_error *error)
{
    seen_global_topk = *p;
    num_device_arrays += (p->req_id_per_token == device_zeros) + (p->is_valid == device_flags);
    seen_sum = sum_of(p->req_id_per_token, p->num_tokens, p->req_id_stride);
    seen_sum += 1000 * sum_of_flags(p->is_valid, p->num_tokens, p->is_valid_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

smla_status
smla_cpu_check_combine_topk_swa(const smla_combine_topk_swa_params *p, smla_error *error)
{
    seen_combine = *p;
    num_device_arrays += (p->batch.query_start_loc == device_zeros) +
                         (p->batch.seq_lens == device_zeros) + (p->gather_lens == device_zeros);
    seen_sum = sum_of_starts(&p->batch) +
               100 * sum_of(p->batch.seq_lens, p->batch.num_reqs, p->batch.seq_lens_stride) +
               10000 * sum_of(p->gather_lens, p->batch.num_reqs, p->gather_lens_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

static inline bool
is_device_array(const void *array)
{
    return array == device_zeros;
}

smla_status
smla_cpu_check_partial_states(const smla_partial_states_params *p, smla_error *error)
{
    num_device_arrays += is_device_array(p->positions);
    return smla_cpu_check_cache_write(&p->rows, error);
}

smla_status
smla_cpu_check_compress(const smla_compress_params *p, smla_error *error)
{
    num_device_arrays += is_device_array(p->rope.positions) + is_device_array(p->req_id_per_token) +
                         is_device_array(p->table.block_table) +
                         is_device_array(p->states.rows.slot_mapping);
    return smla_cpu_check_cache_write(&p->insert, error);
}

smla_status
smla_cpu_check_mixed_indices(const smla_mixed_indices_params *p, smla_error *error)
{
    seen_mixed = *p;
    num_device_arrays += (p->batch.query_start_loc == device_zeros) +
                         (p->req_id_per_token == device_zeros) + (p->is_valid == device_flags);
    seen_sum = sum_of_starts(&p->batch);
    seen_sum += 1000 * sum_of(p->req_id_per_token, p->num_tokens, p->req_id_stride);
    seen_sum += 1000000 * sum_of_flags(p->is_valid, p->num_decode_tokens, p->is_valid_stride);
    return cpu_status == SMLA_OK ? SMLA_OK : smla_fail(error, cpu_status, "the CPU's");
}

/* ---- The runtime --------------------------------------------------------------------------- */

#include "../operator_numbers.h"
#include "devices.h"

static inline cudaError_t
launch_nothing(const char *name)
{
    (void)answer(name);
    return launch_code;
}

static bool has_memory = true;
static size_t asked_bytes;

static int num_live; /* live copies of arrays */

static inline void *
test_malloc(size_t size)
{
    asked_bytes = size;
    num_live += has_memory;
    return has_memory ? malloc(size) : NULL;
}

static inline void
test_free(void *memory)
{
    num_live -= memory != NULL;
    free(memory);
}
