/* combine.cu: the partial rows of attention's splits -> out, lse and max_logits.
 *
 * Computes     out = sum_s f_s out_s / sum_s f_s sum_s * sink factor, f_s = 2^(ref_s - ref)
 * Shapes       partial rows (kernels.h); out [T][H][512] bf16, lse and max_logits [T][H] fp32, any
 *              strides
 * Shared mem   none is used. What is asked for keeps CTAs from being stacked on the few SMs that
 *              the grid in front leaves first, or has left free, while others are idle.
 * Roles        One CTA per token and head: a thread owns 4 of the 512 values, every warp finds the
 *              factors of the splits by itself, one lane per split. Nothing is waited for.
 * Roofline     2056 bytes in per split, or half of it (kernels.h), 1024 out: bound by the latency
 *              of one read, for sixteen splits are asked for at once, before their states are
 *              known.
 * Numerics     f_s is a power of two, so rescaling loses nothing. Values are summed in the order of
 *              the splits, sums along a fixed tree: the same bits on every run. Splits without keys
 *              have f_s = 0; their out was never written and is not looked at.
 * Source       split-KV decoding (Flash-Decoding); the exact factors are ours.
 */
#include "kernels.h"
#include "launch.cuh"
#include "numeric.cuh"
#include "ptx.cuh"
#include "softmax.cuh"

enum {
    THREAD_VALUES = 4,
    CTA_THREADS = SMLA_KV_LORA_RANK / THREAD_VALUES,
    LANE_SPLITS = SMLA_MAX_SPLITS / SMLA_WARP_LANES,
    FLIGHT = 16,   /* splits whose values are read at once */
    MAX_SHARE = 8, /* CTAs of an SM: more need not be spread */
};

static_assert(LANE_SPLITS == 2, "split s is lane s % 32's number s / 32");
static_assert(SMLA_WARP_LANES % FLIGHT == 0, "those of a flight are of one number");

typedef struct combine_launch {
    smla_attention_params params;
    smla_partial_rows partials;
    int64_t num_rows;
    smla_divisor num_heads;
    bool out_is_aligned; /* every row to 8 bytes */
} combine_launch;

/* What the lanes of a warp know of a row: for splits lane and lane + 32 what their values are
 * multiplied with, and in all of them the maximum and the sum of the whole. */
typedef struct whole_row {
    float factor[LANE_SPLITS];
    float float_factor[LANE_SPLITS]; /* HALF: of splits that have fp32 after all, 0 for others */
    float max_log2;
    float sum;
} whole_row;

/* Where the row of split 0 is. */
typedef struct partial_place {
    const float *states;
    const float *values;
    int64_t stride; /* to the next split, in rows */
    int num_splits;
} partial_place;

template <bool HALF>
static __device__ __forceinline__ whole_row
fold_states(const partial_place &place, int lane)
{
    whole_row row;
    float2 state[LANE_SPLITS];
    float unit[LANE_SPLITS] = {1.0f, 1.0f};
    bool is_half[LANE_SPLITS] = {};
#pragma unroll
    for (int i = 0; i < LANE_SPLITS; i++) {
        const int64_t split = SMLA_WARP_LANES * i + lane;
        state[i] = make_float2(-INFINITY, 0.0f);
        if (split < place.num_splits) {
            state[i] = *(const float2 *)(place.states + 2 * split * place.stride);
            if (HALF) {
                unit[i] = place.values[split * place.stride * SMLA_KV_LORA_RANK + SMLA_HALF_UNIT];
            }
        }
        if (HALF) {
            is_half[i] = smla_float_bits(state[i].y) >> 31;
            state[i].y = fabsf(state[i].y);
        }
    }
    row.max_log2 = fmaxf(state[0].x, state[1].x);
#pragma unroll
    for (int step = 1; step < SMLA_WARP_LANES; step *= 2) {
        row.max_log2 = fmaxf(row.max_log2, __shfl_xor_sync(0xFFFFFFFFu, row.max_log2, step));
    }
    const float reference = softmax_reference(row.max_log2);
    row.factor[0] = softmax_rescale(state[0].x, reference);
    row.factor[1] = softmax_rescale(state[1].x, reference);
    row.sum = state[0].y * row.factor[0] + state[1].y * row.factor[1];
#pragma unroll
    for (int step = 1; step < SMLA_WARP_LANES; step *= 2) {
        row.sum += __shfl_xor_sync(0xFFFFFFFFu, row.sum, step);
    }
#pragma unroll
    for (int i = 0; i < LANE_SPLITS && HALF; i++) {
        row.float_factor[i] = is_half[i] ? 0.0f : row.factor[i];
        row.factor[i] = is_half[i] && row.factor[i] != 0.0f ? row.factor[i] * unit[i] : 0.0f;
    }
    return row;
}

/* A thread's four values of FLIGHT splits, asked for before anything is known of them: those of a
 * split without keys are anything. Zeros past the last split. */
template <bool HALF> struct flight {
    uint32_t words[FLIGHT][HALF ? 2 : 4];
};

template <bool HALF>
static __device__ __forceinline__ void
load_flight(const partial_place &place, int first, flight<HALF> *values)
{
    constexpr int THREAD_FLOATS = HALF ? THREAD_VALUES / 2 : THREAD_VALUES;
    const float *const from = place.values + THREAD_FLOATS * threadIdx.x;
#pragma unroll
    for (int i = 0; i < FLIGHT; i++) {
        const float *const row = from + (first + i) * place.stride * SMLA_KV_LORA_RANK;
        const bool is_on = first + i < place.num_splits;
        if constexpr (HALF) {
            const uint2 two = is_on ? *(const uint2 *)row : make_uint2(0, 0);
            values->words[i][0] = two.x;
            values->words[i][1] = two.y;
        } else {
            const uint4 four = is_on ? *(const uint4 *)row : make_uint4(0, 0, 0, 0);
            values->words[i][0] = four.x;
            values->words[i][1] = four.y;
            values->words[i][2] = four.z;
            values->words[i][3] = four.w;
        }
    }
}

template <bool HALF>
static __device__ __forceinline__ float
find_value(const uint32_t words[HALF ? 2 : 4], int value)
{
    if constexpr (HALF) {
        return smla_cvt_float((uint16_t)(words[value / 2] >> 16 * (value % 2)));
    } else {
        return smla_bits_float(words[value]);
    }
}

/* total += factor * values, of these splits. */
template <bool HALF>
static __device__ __forceinline__ void
fold_flight(const whole_row &row, int first, flight<HALF> *values, float total[THREAD_VALUES])
{
    const float mine = first < SMLA_WARP_LANES ? row.factor[0] : row.factor[1];
#pragma unroll
    for (int i = 0; i < FLIGHT; i++) {
        const float factor = __shfl_sync(0xFFFFFFFFu, mine, (first + i) % SMLA_WARP_LANES);
        uint32_t *const words = values->words[i];
#pragma unroll
        for (int j = 0; j < (HALF ? 2 : 4); j++) {
            words[j] = factor == 0.0f ? 0 : words[j];
        }
#pragma unroll
        for (int j = 0; j < THREAD_VALUES; j++) {
            total[j] += find_value<HALF>(words, j) * factor;
        }
    }
}

/* HALF: the same of the rows that were done again, and are of fp32. */
static __device__ __forceinline__ void
fold_floats(const partial_place &place, const whole_row &row, float total[THREAD_VALUES])
{
#pragma unroll 1
    for (int split = 0; split < place.num_splits; split++) {
        const float mine = split < SMLA_WARP_LANES ? row.float_factor[0] : row.float_factor[1];
        const float factor = __shfl_sync(0xFFFFFFFFu, mine, split % SMLA_WARP_LANES);
        const float *const from =
            place.values + split * place.stride * SMLA_KV_LORA_RANK + THREAD_VALUES * threadIdx.x;
#pragma unroll
        for (int j = 0; j < THREAD_VALUES && factor != 0.0f; j++) {
            total[j] += from[j] * factor;
        }
    }
}

/* Where a row is. */
typedef struct row_place {
    int64_t token;
    int64_t head;
    partial_place partials;
} row_place;

static __device__ __forceinline__ row_place
find_row(const combine_launch &launch, int64_t row_idx)
{
    const smla_attention_params &params = launch.params;
    row_place place;
    place.token = smla_divide(row_idx, launch.num_heads);
    place.head = row_idx - place.token * params.num_heads;
    const int64_t first = place.token * params.num_splits * params.num_heads + place.head;
    place.partials.states = launch.partials.state + 2 * first;
    place.partials.values = launch.partials.out + first * SMLA_KV_LORA_RANK;
    place.partials.stride = params.num_heads;
    place.partials.num_splits = params.num_splits;
    return place;
}

template <bool HALF>
static __device__ __forceinline__ void
combine_row(const combine_launch &launch, const row_place &place)
{
    const smla_attention_params &params = launch.params;
    flight<HALF> values;
    float total[THREAD_VALUES] = {};
    load_flight(place.partials, 0, &values);
    const whole_row row = fold_states<HALF>(place.partials, (int)threadIdx.x % SMLA_WARP_LANES);
    const float factor =
        softmax_finish(params, place.token, place.head, row.max_log2, row.sum, threadIdx.x == 0);
    fold_flight(row, 0, &values, total);
#pragma unroll 1
    for (int first = FLIGHT; first < params.num_splits; first += FLIGHT) {
        load_flight(place.partials, first, &values);
        fold_flight(row, first, &values, total);
    }
    if (HALF &&
        __any_sync(0xFFFFFFFFu, row.float_factor[0] != 0.0f || row.float_factor[1] != 0.0f)) {
        fold_floats(place.partials, row, total);
    }
    const uint32_t words[2] = {smla_cvt_bf16x2(total[0] * factor, total[1] * factor),
                               smla_cvt_bf16x2(total[2] * factor, total[3] * factor)};
    uint16_t *const to = params.out + place.token * params.out_stride_token +
                         place.head * params.out_stride_head + THREAD_VALUES * threadIdx.x;
    if (launch.out_is_aligned) {
        smla_store_words<8, true>(to, words);
    } else {
        smla_store_words<8, false>(to, words);
    }
}

template <bool HALF>
static __global__ void
__launch_bounds__(CTA_THREADS) combine(const __grid_constant__ combine_launch launch)
{
    row_place place = find_row(launch, blockIdx.x);
    ptx_let_next_grid_start();
    ptx_wait_for_grids();
    for (int64_t row_idx = blockIdx.x; row_idx < launch.num_rows; row_idx += gridDim.x) {
        combine_row<HALF>(launch, place);
        place = find_row(launch, row_idx + gridDim.x);
    }
}

/* Shared memory that lets an SM have its share of the CTAs, and two in any case. */
static int
find_shared_bytes(const smla_cuda_device *device, int64_t num_rows)
{
    const int64_t share = smla_count_parts(num_rows, device->num_sms);
    const int64_t num_ctas = share < 2 ? 2 : share;
    const int64_t bytes = device->max_shared_bytes / num_ctas - SMLA_RESERVED_SHARED_BYTES;
    return num_ctas > MAX_SHARE ? 0 : (int)(bytes / 1024 * 1024);
}

template <bool HALF>
static cudaError_t
launch_combine(const combine_launch &launch)
{
    const smla_attention_params &params = launch.params;
    const smla_cuda_device *const device = smla_cuda_find_device(params.stream.device_id);
    const bool is_early = can_start_early(device->compute_capability);
    const int shared_bytes = is_early ? find_shared_bytes(device, launch.num_rows) : 0;
    if (shared_bytes > 0) {
        static uint64_t allowed;
        const cudaError_t code =
            allow_shared_bytes((const void *)combine<HALF>, device->max_shared_bytes / 2,
                               params.stream.device_id, &allowed);
        if (code != cudaSuccess) {
            return code;
        }
    }
    return smla_launch(combine<HALF>, launch, launch.num_rows, CTA_THREADS, shared_bytes,
                       params.stream);
}

cudaError_t
smla_cuda_launch_combine(const smla_attention_params *params, bool has_halves)
{
    combine_launch launch = {};
    launch.params = *params;
    launch.partials = smla_partials_of(params);
    launch.num_rows = params->num_tokens * params->num_heads;
    launch.num_heads = smla_make_divisor(params->num_heads);
    launch.out_is_aligned =
        smla_are_rows_aligned(params->out, params->out_stride_token, params->out_stride_head, 8);
    return has_halves ? launch_combine<true>(launch) : launch_combine<false>(launch);
}
