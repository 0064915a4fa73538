/* combine.cu: the partial rows of attention's splits -> out, lse and max_logits.
 *
 * Computes     out = sum_s f_s out_s / sum_s f_s sum_s * sink factor, f_s = 2^(ref_s - ref)
 * Shapes       partial rows (kernels.h); out [T][H][512] bf16, lse and max_logits [T][H] fp32, any
 *              strides
 * Shared mem   none is used. What is asked for keeps CTAs from being stacked on the few SMs that the
 *              grid in front leaves first, or has left free, while others are idle.
 * Roles        One CTA per token and head: a thread owns 4 of the 512 values, every warp finds the
 *              factors of the splits by itself, one lane per split. Nothing is waited for.
 * Roofline     2056 bytes in per split, 1024 out: bound by the latency of one read, for sixteen
 *              splits are asked for at once, before their states are known.
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
    FLIGHT = 16,                  /* splits whose values are read at once */
    MAX_SHARE = 8,                /* CTAs of an SM: more need not be spread */
    RESERVED_SHARED_BYTES = 1024, /* of every CTA, by the driver */
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

/* What the lanes of a warp know of a row: the factors of splits lane and lane + 32, and in all of
 * them the maximum and the sum of the whole. */
typedef struct whole_row {
    float factor[LANE_SPLITS];
    float max_log2;
    float sum;
} whole_row;

static __device__ __forceinline__ whole_row
fold_states(const float *states, int64_t stride, int num_splits, int lane)
{
    whole_row row;
    float2 state[LANE_SPLITS];
#pragma unroll
    for (int i = 0; i < LANE_SPLITS; i++) {
        const int split = SMLA_WARP_LANES * i + lane;
        state[i] = split < num_splits ? *(const float2 *)(states + split * stride)
                                      : make_float2(-INFINITY, 0.0f);
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
    return row;
}

/* A thread's values of FLIGHT splits, asked for before anything is known of them: those of a split
 * without keys are anything. Zeros past the last split. */
static __device__ __forceinline__ void
load_flight(const float *values, int64_t stride, int first, int num_splits, float4 part[FLIGHT])
{
#pragma unroll
    for (int i = 0; i < FLIGHT; i++) {
        part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i < num_splits) {
            part[i] = *(const float4 *)(values + (first + i) * stride);
        }
    }
}

/* total += f_s out_s of these splits. */
static __device__ __forceinline__ void
fold_flight(const whole_row &row, int first, const float4 part[FLIGHT], float4 *total)
{
    const float mine = first < SMLA_WARP_LANES ? row.factor[0] : row.factor[1];
#pragma unroll
    for (int i = 0; i < FLIGHT; i++) {
        const float factor = __shfl_sync(0xFFFFFFFFu, mine, (first + i) % SMLA_WARP_LANES);
        total->x += factor == 0.0f ? 0.0f : part[i].x * factor;
        total->y += factor == 0.0f ? 0.0f : part[i].y * factor;
        total->z += factor == 0.0f ? 0.0f : part[i].z * factor;
        total->w += factor == 0.0f ? 0.0f : part[i].w * factor;
    }
}

/* Where a row is. */
typedef struct row_place {
    int64_t token;
    int64_t head;
    const float *states; /* of split 0 */
    const float *values;
} row_place;

static __device__ __forceinline__ row_place
find_row(const combine_launch &launch, int64_t row_idx, int first_value)
{
    const smla_attention_params &params = launch.params;
    row_place place;
    place.token = smla_divide(row_idx, launch.num_heads);
    place.head = row_idx - place.token * params.num_heads;
    const int64_t first = place.token * params.num_splits * params.num_heads + place.head;
    place.states = launch.partials.state + 2 * first;
    place.values = launch.partials.out + first * SMLA_KV_LORA_RANK + first_value;
    return place;
}

static __device__ __forceinline__ void
combine_row(const combine_launch &launch, const row_place &place, int first_value)
{
    const smla_attention_params &params = launch.params;
    const int num_splits = params.num_splits;
    const int64_t stride = params.num_heads * SMLA_KV_LORA_RANK;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    float4 part[FLIGHT];
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    load_flight(place.values, stride, 0, num_splits, part);
    const whole_row row = fold_states(place.states, 2 * params.num_heads, num_splits, lane);
    const float factor =
        softmax_finish(params, place.token, place.head, row.max_log2, row.sum, threadIdx.x == 0);
    fold_flight(row, 0, part, &total);
#pragma unroll 1
    for (int first = FLIGHT; first < num_splits; first += FLIGHT) {
        load_flight(place.values, stride, first, num_splits, part);
        fold_flight(row, first, part, &total);
    }
    const uint32_t words[2] = {smla_cvt_bf16x2(total.x * factor, total.y * factor),
                               smla_cvt_bf16x2(total.z * factor, total.w * factor)};
    uint16_t *const to = params.out + place.token * params.out_stride_token +
                         place.head * params.out_stride_head + first_value;
    if (launch.out_is_aligned) {
        smla_store_words<8, true>(to, words);
    } else {
        smla_store_words<8, false>(to, words);
    }
}

static __global__ void
__launch_bounds__(CTA_THREADS) combine(const __grid_constant__ combine_launch launch)
{
    const int first_value = (int)threadIdx.x * THREAD_VALUES;
    row_place place = find_row(launch, blockIdx.x, first_value);
    ptx_let_next_grid_start();
    ptx_wait_for_grids();
    for (int64_t row_idx = blockIdx.x; row_idx < launch.num_rows; row_idx += gridDim.x) {
        combine_row(launch, place, first_value);
        place = find_row(launch, row_idx + gridDim.x, first_value);
    }
}

/* Shared memory that lets an SM have its share of the CTAs, and two in any case. */
static int
find_shared_bytes(const smla_cuda_device *device, int64_t num_rows)
{
    const int64_t share = smla_count_parts(num_rows, device->num_sms);
    const int64_t num_ctas = share < 2 ? 2 : share;
    const int64_t bytes = device->max_shared_bytes / num_ctas - RESERVED_SHARED_BYTES;
    return num_ctas > MAX_SHARE ? 0 : (int)(bytes / 1024 * 1024);
}

cudaError_t
smla_cuda_launch_combine(const smla_attention_params *params)
{
    combine_launch launch = {};
    launch.params = *params;
    launch.partials = smla_partials_of(params);
    launch.num_rows = params->num_tokens * params->num_heads;
    launch.num_heads = smla_make_divisor(params->num_heads);
    launch.out_is_aligned = smla_is_multiple(params->out, params->out_stride_token * 2, 8) &&
                            params->out_stride_head % 4 == 0;
    const smla_cuda_device *const device = smla_cuda_find_device(params->stream.device_id);
    const bool is_early = device->compute_capability >= 90;
    const int shared_bytes = is_early ? find_shared_bytes(device, launch.num_rows) : 0;
    if (shared_bytes > 0) {
        static uint64_t allowed;
        const cudaError_t code =
            allow_shared_bytes((const void *)combine, device->max_shared_bytes / 2,
                               params->stream.device_id, &allowed);
        if (code != cudaSuccess) {
            return code;
        }
    }
    return smla_launch(combine, launch, launch.num_rows, CTA_THREADS, shared_bytes,
                       params->stream.handle, is_early);
}
