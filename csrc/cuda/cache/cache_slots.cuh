/* cache_slots.cuh: what the kernels that write cache rows share: slots, runs of tokens, and the
 * conversion of values of any type to bf16. */
#pragma once

#include "core/params_cache.h"
#include "cuda/cache/cache_rows.cuh"

/* cache_insert.cu: writes keys that are quantised whole. SMLA_NO_KERNEL says that the format is
 * none of these. */
extern "C" cudaError_t smla_cuda_insert_keys(const smla_cache_write_params *params);

namespace {

enum {
    MAX_RUN_TOKENS = 4, /* most tokens that a warp writes, one after another */
    MIN_RUNS = 1 << 14, /* runs that a grid has before a warp takes a second token */
};

struct write_args {
    smla_cache_write_params p;
    smla_divisor block_size;
    row_offsets offsets;
    int32_t run_tokens;
};

/* Converts `COUNT` values to bf16, two per word. */
template <int TYPE, int COUNT>
__device__ __forceinline__ void
narrow(const uint32_t *given, uint32_t *pairs)
{
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        if constexpr (TYPE == SMLA_FLOAT_FP32) {
            pairs[i] = smla_floats_to_bf16x2(smla_bits_float(given[2 * i]),
                                             smla_bits_float(given[2 * i + 1]));
        } else if constexpr (TYPE == SMLA_FLOAT_FP16) {
            float floats[2];
            smla_halves_to_floats(given[i], floats);
            pairs[i] = smla_floats_to_bf16x2(floats[0], floats[1]);
        } else {
            pairs[i] = given[i];
        }
    }
}

__device__ __forceinline__ int64_t
read_slot(const smla_cache_write_params &p, int64_t token)
{
    const int64_t at = token * p.slot_stride;
    return p.slots_are_int64 ? ((const int64_t *)p.slot_mapping)[at]
                             : ((const int32_t *)p.slot_mapping)[at];
}

/* Gives lane i the slot of token first + i of a run, or -1 if the token is not written. A token is
 * not written if its slot is outside the cache, or if one of the next 31 tokens has the same
 * slot. */
__device__ __forceinline__ int64_t
find_slots(const smla_cache_write_params &p, int64_t first, int num_tokens)
{
    const int lane = lane_idx();
    const int64_t token = first + lane;
    const bool sees_behind = lane + 1 < num_tokens && token + SMLA_WARP_LANES < p.num_tokens;
    const int64_t slot = token < p.num_tokens ? read_slot(p, token) : -1;
    const int64_t behind = sees_behind ? read_slot(p, token + SMLA_WARP_LANES) : -1;
    bool yields = false;
    for (int i = 0; i < num_tokens; i++) {
        const int64_t own = __shfl_sync(ALL_LANES, slot, i);
        /* The slot of a token that is 1 to 31 tokens after token i. */
        const int64_t other = lane > i ? slot : behind;
        const bool is_taken = __any_sync(ALL_LANES, lane != i && other == own);
        yields = lane == i ? is_taken : yields;
    }
    const bool is_written =
        lane < num_tokens && !yields && slot >= 0 && slot < p.kv.num_pages * p.kv.block_size;
    return is_written ? slot : -1;
}

/* Returns the addresses of a slot's row and of its scales. */
__device__ __forceinline__ smla_kv_token
row_of_slot(const smla_kv_view &kv, const smla_divisor &block_size, int64_t slot)
{
    const int64_t page = smla_divide(slot, block_size);
    return smla_kv_token_at(&kv, page, slot - page * kv.block_size);
}

/* row_of_slot, whose addresses are null for a negative slot. */
__device__ __forceinline__ smla_kv_token
find_slot_row(const smla_kv_view &kv, const smla_divisor &block_size, int64_t slot)
{
    return slot < 0 ? smla_kv_token{nullptr, nullptr} : row_of_slot(kv, block_size, slot);
}

/* How many tokens a warp writes, one after another. */
int32_t
choose_run_tokens(int64_t num_tokens)
{
    const int64_t tokens = num_tokens / MIN_RUNS;
    return tokens < 1 ? 1 : tokens < MAX_RUN_TOKENS ? (int32_t)tokens : MAX_RUN_TOKENS;
}

/* Starts a kernel whose warps write runs of tokens. */
cudaError_t
launch_writes(void (*kernel)(write_args), const smla_cache_write_params *p)
{
    const int32_t run_tokens = choose_run_tokens(p->num_tokens);
    const write_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv),
                             run_tokens};
    return smla_launch(kernel, args,
                       smla_count_parts(p->num_tokens, (int64_t)run_tokens * BLOCK_WARPS),
                       BLOCK_THREADS, 0, p->call.stream);
}

} /* namespace */
