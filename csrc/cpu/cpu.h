/* cpu.h: the operators of the CPU backend; cpu_backend.c puts them into the table.
 *
 * Every function takes params that a check has made. Only values inside arrays (slots, pages,
 * request ids) are left to check, before anything is written. OpenMP shares out large work; no
 * result depends on the number of threads. The CUDA backend's checked mode calls the check
 * functions on host copies of its arrays.
 */
#pragma once

#include "core/backend.h"
#include "core/numeric.h"
#include "cpu/machine/thread_scratch.h"

struct smla_slot_isa;

/* Chunks of lightning_indexer; cpu_backend.c and lightning.c. */
enum {
    SMLA_CPU_CHUNK_LOGITS_BYTES = 4 << 20, /* logits stay in a core's cache or the one behind it */
    SMLA_CPU_CHUNK_TOKENS = 8,             /* logits.c decodes a key once for so many */
};

#define SMLA_DECLARE_CPU_OPERATOR(name, args_type, params_type, family) \
    smla_status smla_cpu_##name(const params_type *params, smla_error *error);

SMLA_OPERATORS(SMLA_DECLARE_CPU_OPERATOR)
smla_status smla_cpu_projection(const smla_projection_params *params, smla_error *error);
smla_status smla_cpu_fill_step_lists(const smla_step_lists_params *params, smla_error *error);
smla_status smla_cpu_fill_paged_lists(const smla_paged_step_params *params, smla_error *error);

/* Defined in cache.c, index.c, index_lists.c, logits.c, rope.c and compressor.c. */
smla_status smla_cpu_check_cache_write(const smla_cache_write_params *params, smla_error *error);
smla_status smla_cpu_check_gather(const smla_gather_params *params, smla_error *error);
smla_status smla_cpu_check_convert(const smla_convert_params *params, smla_error *error);
smla_status smla_cpu_check_positions(const char *op, const smla_rope *rope, int64_t num_tokens,
                                     smla_error *error);
smla_status smla_cpu_check_global_topk(const smla_topk_slots_params *params, smla_error *error);
smla_status smla_cpu_check_combine_topk_swa(const smla_combine_topk_swa_params *params,
                                            smla_error *error);
smla_status smla_cpu_check_logits(const smla_logits_params *params, smla_error *error);
smla_status smla_cpu_check_partial_states(const smla_partial_states_params *params,
                                          smla_error *error);
smla_status smla_cpu_check_compress(const smla_compress_params *params, smla_error *error);
smla_status smla_cpu_check_mixed_indices(const smla_mixed_indices_params *params,
                                         smla_error *error);

/* The slots and the length of one token; index_lists.c. */
void smla_cpu_write_global_topk(const struct smla_slot_isa *kernel,
                                const smla_topk_slots_params *params, int64_t token);

/* indexer_logits and top_k_per_row behind their checks and with scratch, which lightning_indexer
 * makes once for all chunks; logits.c and top_k.c. The scratch of a call serves its chunks. */
int64_t smla_cpu_longest_context(const smla_logits_params *params);
smla_scratch_size smla_cpu_logits_scratch(const smla_logits_params *params);
smla_scratch_size smla_cpu_top_k_scratch(const smla_top_k_params *params);
smla_status smla_cpu_score_keys(const smla_logits_params *params,
                                const smla_thread_scratch *scratch, smla_error *error);
smla_status smla_cpu_choose_keys(const smla_top_k_params *params,
                                 const smla_thread_scratch *scratch, smla_error *error);

/* One element of an array of any float type, as fp32, exactly. */
static inline float
smla_cpu_load_float(const void *array, smla_float_type type, int64_t index)
{
    switch (type) {
    case SMLA_FLOAT_BF16: return smla_bf16_to_float(((const uint16_t *)array)[index]);
    case SMLA_FLOAT_FP16: return smla_half_to_float(((const uint16_t *)array)[index]);
    case SMLA_FLOAT_FP32: return ((const float *)array)[index];
    case SMLA_FLOAT_E4M3: return smla_e4m3_to_float(((const uint8_t *)array)[index]);
    }
    return 0.0f;
}
