/* merge_partials.cu: softmax-weighted merge of many partial attention results over disjoint keys.
 *
 * Computes     lse = ln(sum of e^lse_i), out = f (sum of e^(lse_i - lse) out_i),
 *              f = 1 / (1 + e^(sink - lse)), or 1 without a sink; merge_values.cuh says how
 * Shapes       1 to 64 parts: out_i [T, H, V] bf16, fp16 or fp32, lse_i [T, H] fp32; out [T, H, V]
 *              of the parts' type, or bf16 where they are fp32; lse [T, H] fp32; tokens and heads
 *              any stride apart, in each array its own; attn_sink [H] fp32
 * Shared mem   none
 * Roles        A warp merges a row. Lane i weighs part i, and part i + 32 where there are so many.
 *              All lanes get the weights by shuffles, and add their values, 2 vectors of 16 bytes
 *              of each part at a time (2 elements where rows are not aligned). Vectors of 8 parts
 *              are loaded before the first weight is known.
 * Roofline     With 8 parts, V 512 in bf16, a row has 9252 bytes, 2.2 ns at 4.3 TB/s. An SM has 16
 *              warps, each with 8 KB in flight. Reached on an H200, 128 x 128 rows: 43.7 us, 81 %
 *              of the copy (2026-11-28, merge in `python -m sparse_mla bench --device cuda --only
 *              bytes`); 56 % with a thread per 8 values that weighs all parts itself. fp32 reaches
 *              4.1 TB/s, so in bf16 instructions bind. They are as many per row however few its
 *              values are: 1.3 TB/s with V 128.
 * Numerics     fp32, in the order of the parts. Nothing overflows, because the largest lse is taken
 *              off first. A part with an lse of -inf or +inf is empty, and what its row holds does
 *              not count. If all parts are empty, the first is copied and lse is -inf, whatever the
 *              sink is. A row with one part keeps its bits where there is no sink, NaN too but in
 *              fp16.
 * Source       vLLM's merge_attn_states, for the convention of +inf.
 */
#include "cuda/attention/partials/merge_values.cuh"

namespace {

enum {
    BLOCK_WARPS = 4,
    BLOCK_THREADS = BLOCK_WARPS * SMLA_WARP_LANES,
    BLOCKS_PER_SM = 4, /* or more, so a thread has 128 registers at most */
    UNROLL = 2,        /* vectors per part at a time */
    GROUP = 8,         /* parts at a time */
};

enum { ALL_LANES = 0xFFFFFFFF };

struct partials_args {
    smla_merge_rows rows;
    smla_merge_part parts[SMLA_MAX_PARTS];
    int32_t num_parts;
    smla_divisor num_heads;
};

/* ---- Weights ------------------------------------------------------------------------------- */

enum { NO_WEIGHT = -1 }; /* the weight of an empty part, whose row is not read */

/* A lane's part of a row's weights: those of parts `lane` and `lane` + 32. */
struct lane_weights {
    float of[2];
    float lse;    /* the merged one, in all lanes */
    bool is_copy; /* the only part that counts has weight 1, in all lanes */
};

/* What lane `part` % 32 has for a part, in all lanes. */
__device__ __forceinline__ float
from_lane(const float of[2], int part)
{
    return __shfl_sync(ALL_LANES, part < SMLA_WARP_LANES ? of[0] : of[1], part % SMLA_WARP_LANES);
}

__device__ __forceinline__ float
find_largest(float x)
{
#pragma unroll
    for (int step = SMLA_WARP_LANES / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    }
    return x;
}

/* The number of the first part that has lse `top`; SMLA_MAX_PARTS if none has. */
__device__ __forceinline__ int
find_first(const float lse[2], float top)
{
    const unsigned low = __ballot_sync(ALL_LANES, lse[0] == top);
    const unsigned high = __ballot_sync(ALL_LANES, lse[1] == top);
    return low != 0    ? __ffs(low) - 1
           : high != 0 ? SMLA_WARP_LANES + __ffs(high) - 1
                       : SMLA_MAX_PARTS;
}

/* Weighs a row's parts. If all are empty, the first one counts. */
__device__ __forceinline__ lane_weights
weigh_row(const partials_args &args, int64_t token, int64_t head)
{
    const int lane = threadIdx.x % SMLA_WARP_LANES;
    float lse[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int part = lane + k * SMLA_WARP_LANES;
        lse[k] = part < args.num_parts ? read_lse(args.parts[part], token, head) : -INFINITY;
    }
    const float top = find_largest(fmaxf(lse[0], lse[1]));
    const int first = find_first(lse, top);
    float power[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        power[k] = isinf(lse[k]) ? 0.0f : expf(lse[k] - top);
    }
    float lower = 0.0f;
    for (int part = 0; part < args.num_parts; part++) {
        const float one = from_lane(power, part);
        lower += part == first ? 0.0f : one;
    }
    const float rest = log1pf(lower);
    const float sum = (1.0f + lower) * (1.0f + weigh_sink(args.rows, head, top, rest));
    const float highest = 1.0f / sum;
    const int num_full = __popc(__ballot_sync(ALL_LANES, !isinf(lse[0]))) +
                         __popc(__ballot_sync(ALL_LANES, !isinf(lse[1])));
    lane_weights weights = {{NO_WEIGHT, NO_WEIGHT}, top + rest, num_full < 2 && highest == 1.0f};
#pragma unroll
    for (int k = 0; k < 2; k++) {
        weights.of[k] = isinf(lse[k]) ? (float)NO_WEIGHT : power[k] * highest;
    }
    weights.of[0] = num_full == 0 && lane == 0 ? 1.0f : weights.of[0];
    return weights;
}

/* ---- Values -------------------------------------------------------------------------------- */

/* UNROLL vectors of COUNT values of GROUP parts. A lane's vectors are a warp's width apart. */
template <int TYPE, int COUNT> struct row_group {
    uint32_t words[GROUP][UNROLL][TYPE == SMLA_FLOAT_FP32 ? COUNT : (COUNT + 1) / 2];
};

/* Where a lane works: a row, and its first value there. */
struct lane_place {
    int64_t token;
    int64_t head;
    int64_t start;
};

/* Loads the parts from `part` on. */
template <int TYPE, int COUNT>
__device__ __forceinline__ void
load_group(const partials_args &args, int part, const lane_place &at, row_group<TYPE, COUNT> *group)
{
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
        if (part + k >= args.num_parts) {
            break;
        }
        const smla_merge_part &from = args.parts[part + k];
        const int64_t row = at.token * from.out_stride_token + at.head * from.out_stride_head;
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int64_t value = at.start + i * SMLA_WARP_LANES * COUNT;
            if (value < args.rows.value_dim) {
                load_bits<TYPE, COUNT>(from.out, row + value, group->words[k][i]);
            }
        }
    }
}

/* Adds the parts from `part` on. The sums begin with -0, which keeps the sign of a first zero. No
 * product with an empty part, because its row may hold NaN. */
template <int TYPE, int COUNT>
__device__ __forceinline__ void
add_group(const partials_args &args, int part, const row_group<TYPE, COUNT> &group,
          const lane_weights &weights, float sums[UNROLL][COUNT])
{
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
        if (part + k >= args.num_parts) {
            break;
        }
        const float weight = from_lane(weights.of, part + k);
        if (weight == (float)NO_WEIGHT) { /* in all lanes */
            continue;
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                const float value = take_value<TYPE>(group.words[k][i], j);
                sums[i][j] = weights.is_copy ? value : fmaf(weight, value, sums[i][j]);
            }
        }
    }
}

template <int OUT_TYPE, int COUNT>
__device__ __forceinline__ void
store_sums(const smla_merge_rows &rows, const lane_place &at, const float sums[UNROLL][COUNT])
{
    const int64_t row = at.token * rows.out_stride_token + at.head * rows.out_stride_head;
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int64_t value = at.start + i * SMLA_WARP_LANES * COUNT;
        if (value < rows.value_dim) {
            store_values<OUT_TYPE, COUNT>(rows.out, row + value, sums[i]);
        }
    }
}

/* Adds all parts of a lane's vectors. `group` has the first ones. */
template <int TYPE, int OUT_TYPE, int COUNT>
__device__ __forceinline__ void
merge_vectors(const partials_args &args, const lane_place &at, const lane_weights &weights,
              row_group<TYPE, COUNT> *group)
{
    float sums[UNROLL][COUNT];
#pragma unroll
    for (int i = 0; i < UNROLL * COUNT; i++) {
        sums[i / COUNT][i % COUNT] = -0.0f;
    }
    add_group(args, 0, *group, weights, sums);
    for (int part = GROUP; part < args.num_parts; part += GROUP) {
        load_group(args, part, at, group);
        add_group(args, part, *group, weights, sums);
    }
    store_sums<OUT_TYPE, COUNT>(args.rows, at, sums);
}

/* ---- Kernel -------------------------------------------------------------------------------- */

template <int TYPE, int OUT_TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
    partials_kernel(const __grid_constant__ partials_args args)
{
    ptx_wait_for_grids();
    const int lane = threadIdx.x % SMLA_WARP_LANES;
    const int64_t num_rows = args.rows.num_tokens * args.rows.num_heads;
    int64_t row = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; row < num_rows; row += (int64_t)gridDim.x * BLOCK_WARPS) {
        const int64_t token = smla_divide(row, args.num_heads);
        lane_place at = {token, row - token * args.rows.num_heads, (int64_t)lane * COUNT};
        row_group<TYPE, COUNT> group;
        load_group(args, 0, at, &group);
        const lane_weights weights = weigh_row(args, at.token, at.head);
        merge_vectors<TYPE, OUT_TYPE>(args, at, weights, &group);
        /* The condition is the same for all lanes, which exchange weights. */
        for (int64_t done = UNROLL * SMLA_WARP_LANES * COUNT; done < args.rows.value_dim;
             done += UNROLL * SMLA_WARP_LANES * COUNT) {
            at.start = done + lane * COUNT;
            load_group(args, 0, at, &group);
            merge_vectors<TYPE, OUT_TYPE>(args, at, weights, &group);
        }
        if (lane == 0) {
            store_lse(args.rows, at.token, at.head, weights.lse);
        }
    }
}

/* ---- Table --------------------------------------------------------------------------------- */

struct partials_row {
    smla_float_type type;
    smla_float_type out_type;
    int32_t count; /* elements per vector */
    void (*kernel)(partials_args);
};

template <int TYPE, int OUT_TYPE, int COUNT>
constexpr partials_row
serve()
{
    return {(smla_float_type)TYPE, (smla_float_type)OUT_TYPE, COUNT,
            partials_kernel<TYPE, OUT_TYPE, COUNT>};
}

const partials_row partials_rows[] = {
    serve<SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 8>(), serve<SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 1>(),
    serve<SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 8>(), serve<SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 1>(),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 4>(), serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 1>(),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 4>(), serve<SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 1>(),
};

} /* namespace */

cudaError_t
smla_cuda_launch_merge_attn_partials(const smla_merge_partials_params *p, const smla_cuda_device *)
{
    const smla_merge_rows *const rows = &p->rows;
    partials_args args = {*rows, {}, (int32_t)p->num_parts, {}};
    if (rows->num_tokens == 0 || rows->num_heads == 0) {
        return cudaSuccess;
    }
    for (int64_t i = 0; i < p->num_parts; i++) {
        args.parts[i] = p->parts[i];
    }
    args.num_heads = smla_make_divisor(rows->num_heads);
    const int32_t count = choose_count(rows, p->parts, p->num_parts);
    const int64_t num_blocks = smla_count_parts(rows->num_tokens * rows->num_heads, BLOCK_WARPS);
    for (const partials_row &row : partials_rows) {
        if (row.type == rows->type && row.out_type == rows->out_type && row.count == count) {
            return smla_launch(row.kernel, args, num_blocks, BLOCK_THREADS, 0, p->call.stream);
        }
    }
    return SMLA_NO_KERNEL;
}
