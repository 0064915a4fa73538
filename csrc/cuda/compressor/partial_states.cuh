/* partial_states.cuh: how a thread loads and saves four channels of a state of DeepSeek V4's
 * compressor. */
#pragma once

#include "core/params_compressor.h"
#include "cuda/cache/cache_slots.cuh"

namespace {

enum {
    CHANNELS = 4,                       /* channels per thread: 16 bytes of fp32 */
    PIECE = CHANNELS * SMLA_WARP_LANES, /* channels that a warp saves at a time */
};

/* Loads four values of kv or of score without conversion: four words of fp32, or two of bf16. */
template <bool ALIGNED>
__device__ __forceinline__ void
load_words_given(const void *rows, int64_t at, bool are_bf16, uint32_t words[CHANNELS])
{
    if (are_bf16) {
        smla_load_words<8, ALIGNED>((const uint16_t *)rows + at, words);
    } else {
        smla_load_words<16, ALIGNED, 4>((const float *)rows + at, words);
    }
}

/* Converts the words that load_words_given has loaded to fp32. */
__device__ __forceinline__ void
widen_given(const uint32_t words[CHANNELS], bool are_bf16, float x[CHANNELS])
{
    if (are_bf16) {
        x[0] = smla_low_bf16(words[0]);
        x[1] = smla_high_bf16(words[0]);
        x[2] = smla_low_bf16(words[1]);
        x[3] = smla_high_bf16(words[1]);
    } else {
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            x[i] = smla_bits_float(words[i]);
        }
    }
}

/* Loads four words of a saved state. The load is not one of read-only data, because kernels write
 * states. */
template <bool ALIGNED>
__device__ __forceinline__ void
load_saved(const float *row, uint32_t words[CHANNELS])
{
    if constexpr (ALIGNED) {
        smla_load_own_vector_4(row, words);
    } else {
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            words[i] = smla_float_bits(row[i]);
        }
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void
load_ape(const smla_partial_states_params &p, int64_t index, int64_t channel,
         uint32_t words[CHANNELS])
{
    smla_load_words<16, ALIGNED, 4>(p.ape + index * p.ape_stride + channel, words);
}

template <bool ALIGNED>
__device__ __forceinline__ void
store_floats(float *row, const float x[CHANNELS])
{
    uint32_t words[CHANNELS];
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        words[i] = smla_float_bits(x[i]);
    }
    smla_store_words<16, ALIGNED, 4>(row, words);
}

/* Stores four channels of a state. A NaN score becomes the positive quiet NaN, as on the CPU. */
template <bool ALIGNED>
__device__ __forceinline__ void
store_state(float *row, int64_t width, const float values[CHANNELS], const float sums[CHANNELS])
{
    float scores[CHANNELS];
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        scores[i] = isnan(sums[i]) ? smla_bits_float(0x7FC00000u) : sums[i];
    }
    store_floats<ALIGNED>(row, values);
    store_floats<ALIGNED>(row + width, scores);
}

/* Four channels of a state, as they were loaded. */
struct state_part {
    uint32_t values[CHANNELS];
    uint32_t scores[CHANNELS]; /* scores; ape is still to be added to those of this step */
};

/* Starts the loads of four channels of a token. */
template <bool ALIGNED>
__device__ __forceinline__ void
load_given(const smla_partial_states_params &p, int64_t token, int64_t channel, state_part &part)
{
    const bool are_bf16 = p.rows.input_type == SMLA_FLOAT_BF16;
    load_words_given<ALIGNED>(p.rows.kv_c, token * p.rows.kv_c_stride_token + channel, are_bf16,
                              part.values);
    load_words_given<ALIGNED>(p.rows.k_pe, token * p.rows.k_pe_stride_token + channel, are_bf16,
                              part.scores);
}

/* Converts loaded channels: the values, and the scores with ape added. */
__device__ __forceinline__ void
add_ape(const state_part &part, const uint32_t ape[CHANNELS], bool are_bf16, float values[CHANNELS],
        float scores[CHANNELS])
{
    widen_given(part.values, are_bf16, values);
    widen_given(part.scores, are_bf16, scores);
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        scores[i] = __fadd_rn(scores[i], smla_bits_float(ape[i]));
    }
}

/* Saves four channels of a token from what load_given has loaded. */
template <bool ALIGNED>
__device__ __forceinline__ void
save_given(const smla_partial_states_params &p, const state_part &part,
           const uint32_t ape[CHANNELS], float *row, int64_t channel)
{
    float values[CHANNELS];
    float scores[CHANNELS];
    add_ape(part, ape, p.rows.input_type == SMLA_FLOAT_BF16, values, scores);
    store_state<ALIGNED>(row + channel, p.width, values, scores);
}

/* Saves four channels of a token. `index` is the token's index in its group. */
template <bool ALIGNED>
__device__ __forceinline__ void
save_channels(const smla_partial_states_params &p, int64_t token, int64_t index, float *row,
              int64_t channel)
{
    state_part part;
    uint32_t ape[CHANNELS];
    load_given<ALIGNED>(p, token, channel, part);
    load_ape<ALIGNED>(p, index, channel, ape);
    save_given<ALIGNED>(p, part, ape, row, channel);
}

__device__ __forceinline__ int64_t
position_of(const smla_partial_states_params &p, int64_t token)
{
    return smla_read_integer(p.positions, p.positions_are_int64, token * p.positions_stride);
}

__device__ __forceinline__ int64_t
index_in_group(int64_t position, const smla_divisor &ratio)
{
    return position - smla_divide(position, ratio) * ratio.divisor;
}

/* The slot of a token; -1 or less if the token is not written. */
__device__ __forceinline__ int64_t
valid_slot(const smla_cache_write_params &p, int64_t token)
{
    const int64_t slot = read_slot(p, token);
    return slot < p.kv.num_pages * p.kv.block_size ? slot : -1;
}

/* Whether all vectors of four channels are aligned: to 16 bytes, or to 8 bytes of bf16. */
bool
has_aligned_states(const smla_partial_states_params &p)
{
    const int64_t bytes = p.rows.input_type == SMLA_FLOAT_BF16 ? 2 : 4;
    return has_aligned_rows(p.rows.kv) &&
           smla_is_multiple(p.rows.kv_c, p.rows.kv_c_stride_token * bytes, CHANNELS * bytes) &&
           smla_is_multiple(p.rows.k_pe, p.rows.k_pe_stride_token * bytes, CHANNELS * bytes) &&
           smla_is_multiple(p.ape, p.ape_stride * 4, 16);
}

} /* namespace */
