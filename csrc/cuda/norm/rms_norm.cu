/* rms_norm.cu: RMSNorm of the rows of q and of kv, in one launch.
 *
 * Computes     y = bf16(x * (1 / sqrt(sum(x^2) / size + eps)) * weight)
 * Shapes       q [T, any size], kv [T, 512], both results: bf16, rows any stride apart; weights
 *              [size] bf16 or fp32. A result may be its input.
 * Shared mem   none
 * Roles        A warp takes a token, and loads both rows before it uses the first value. With few
 *              tokens a warp takes one row; the first warps take those of q, the others those of
 *              kv. A lane has vectors of 8 values. It keeps its first 6 vectors of q and 2 of kv
 *              between the sum and the product (rows of 1536 and 512 values), and reads the rest of
 *              a longer row twice. No barriers.
 * Roofline     Memory binds: a row is read and written once, 4 bytes per value; 6144 bytes per
 *              token for q of 1024, 1.4 ns at 4.3 TB/s. A lane runs about 70 instructions per
 *              vector, of which 32 bytes move; in that time 132 SMs of 128 lanes at 1.75 GHz run
 *              220.
 * Numerics     fp32, each operation rounded: the bits of the CPU. backend.h has the order of the
 *              sum. A result that is NaN is the positive quiet NaN. Rows with a sum that overflows
 *              become 0, or NaN where x is infinite.
 * Source       fused_q_kv_rmsnorm of vLLM, for the operator.
 */
#include "cuda/host/cuda.h"
#include "cuda/norm/rms_norm.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    BLOCK_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    Q_VECTORS = 6,  /* vectors of q that a lane keeps: rows of 1536 values */
    KV_VECTORS = 2, /* vectors of kv that a lane keeps: rows of 512 values */
    VECTOR_WORDS = NORM_VECTOR / 2,
    STEP = SMLA_NORM_SUMS, /* values that a warp covers by a vector per lane */
    SM_TOKENS = 16,        /* tokens per SM from which on a warp takes both rows of a token */
};

struct norm_args {
    smla_q_kv_norm_params p;
    bool is_split; /* a warp takes one row of a token, the first ones those of q */
};

/* Loads up to 8 values, of which `left` exist; the others become zeros. The loads are not those of
 * read-only data, because the row may be written later. */
template <bool ALIGNED>
__device__ __forceinline__ void
load_row(const uint16_t *x, int64_t left, uint32_t words[VECTOR_WORDS])
{
    if constexpr (ALIGNED) {
        const uint4 vector = left > 0 ? *(const uint4 *)x : make_uint4(0, 0, 0, 0);
        words[0] = vector.x;
        words[1] = vector.y;
        words[2] = vector.z;
        words[3] = vector.w;
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR_WORDS; i++) {
            const uint32_t low = 2 * i < left ? x[2 * i] : 0;
            const uint32_t high = 2 * i + 1 < left ? x[2 * i + 1] : 0;
            words[i] = low | high << 16;
        }
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void
store_row(uint16_t *out, int64_t left, const uint32_t words[VECTOR_WORDS])
{
    if constexpr (ALIGNED) {
        smla_store_words<16, true>(out, words);
    } else {
#pragma unroll
        for (int i = 0; i < NORM_VECTOR; i++) {
            if (i < left) {
                out[i] = (uint16_t)(words[i / 2] >> 16 * (i % 2));
            }
        }
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void
load_weight(const smla_norm_rows &rows, int64_t start, float weight[NORM_VECTOR])
{
    if (rows.weight_type == SMLA_FLOAT_BF16) {
        uint32_t words[VECTOR_WORDS];
        load_row<ALIGNED>((const uint16_t *)rows.weight + start, rows.size - start, words);
        smla_widen_bf16<NORM_VECTOR>(words, weight);
        return;
    }
    const float *const from = (const float *)rows.weight + start;
    if constexpr (ALIGNED) {
        smla_spread_vector(__ldg((const float4 *)from), weight);
        smla_spread_vector(__ldg((const float4 *)from + 1), weight + 4);
    } else {
#pragma unroll
        for (int i = 0; i < NORM_VECTOR; i++) {
            weight[i] = start + i < rows.size ? __ldg(from + i) : 0.0f;
        }
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void
scale_vector(const smla_norm_rows &rows, uint16_t *out, int64_t start, float factor,
             const uint32_t words[VECTOR_WORDS])
{
    float x[NORM_VECTOR];
    float weight[NORM_VECTOR];
    uint32_t scaled[VECTOR_WORDS];
    smla_widen_bf16<NORM_VECTOR>(words, x);
    load_weight<ALIGNED>(rows, start, weight);
#pragma unroll
    for (int i = 0; i < VECTOR_WORDS; i++) {
        const float low = __fmul_rn(__fmul_rn(x[2 * i], factor), weight[2 * i]);
        const float high = __fmul_rn(__fmul_rn(x[2 * i + 1], factor), weight[2 * i + 1]);
        scaled[i] = smla_floats_to_bf16x2(low, high);
    }
    store_row<ALIGNED>(out + start, rows.size - start, scaled);
}

/* Loads the first KEPT vectors of a lane. */
template <bool ALIGNED, int KEPT>
__device__ __forceinline__ void
load_kept(const smla_norm_rows &rows, int64_t token, uint32_t kept[KEPT][VECTOR_WORDS])
{
    const int first = (int)threadIdx.x % SMLA_WARP_LANES * NORM_VECTOR;
    const uint16_t *const x = rows.x + token * rows.x_stride_token + first;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        load_row<ALIGNED>(x + i * STEP, rows.size - first - i * STEP, kept[i]);
    }
}

/* Normalises a row; each lane has KEPT vectors of it in registers. */
template <bool ALIGNED, int KEPT>
__device__ __forceinline__ void
normalize(const smla_norm_rows &rows, int64_t token, float eps,
          const uint32_t kept[KEPT][VECTOR_WORDS])
{
    const uint16_t *const x = rows.x + token * rows.x_stride_token;
    uint16_t *const out = rows.out + token * rows.out_stride_token;
    const int64_t first = (int64_t)(threadIdx.x % SMLA_WARP_LANES) * NORM_VECTOR;
    float sums[NORM_VECTOR] = {};
    float values[NORM_VECTOR];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        smla_widen_bf16<NORM_VECTOR>(kept[i], values);
        norm_add_squares(sums, values);
    }
    for (int64_t start = first + KEPT * STEP; start < rows.size; start += STEP) {
        uint32_t words[VECTOR_WORDS];
        load_row<ALIGNED>(x + start, rows.size - start, words);
        smla_widen_bf16<NORM_VECTOR>(words, values);
        norm_add_squares(sums, values);
    }
    const float factor = norm_factor(norm_fold_sums(sums), rows.size, eps);
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        if (first + i * STEP < rows.size) {
            scale_vector<ALIGNED>(rows, out, first + i * STEP, factor, kept[i]);
        }
    }
    for (int64_t start = first + KEPT * STEP; start < rows.size; start += STEP) {
        uint32_t words[VECTOR_WORDS];
        load_row<ALIGNED>(x + start, rows.size - start, words);
        scale_vector<ALIGNED>(rows, out, start, factor, words);
    }
}

template <bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, ALIGNED ? 4 : 3)
    norm_kernel(const __grid_constant__ norm_args args)
{
    ptx_wait_for_grids();
    const smla_q_kv_norm_params &p = args.p;
    const int64_t step = (int64_t)gridDim.x * BLOCK_WARPS;
    const int64_t num_work_items = args.is_split ? 2 * p.num_tokens : p.num_tokens;
    int64_t work = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; work < num_work_items; work += step) {
        const bool has_q = work < p.num_tokens;
        const bool has_kv = !args.is_split || !has_q;
        const int64_t token = has_q ? work : work - p.num_tokens;
        uint32_t q[Q_VECTORS][VECTOR_WORDS];
        uint32_t kv[KV_VECTORS][VECTOR_WORDS];
        if (has_q) {
            load_kept<ALIGNED, Q_VECTORS>(p.rows[0], token, q);
        }
        if (has_kv) {
            load_kept<ALIGNED, KV_VECTORS>(p.rows[1], token, kv);
        }
        if (has_q) {
            normalize<ALIGNED, Q_VECTORS>(p.rows[0], token, p.eps, q);
        }
        if (has_kv) {
            normalize<ALIGNED, KV_VECTORS>(p.rows[1], token, p.eps, kv);
        }
    }
}

bool
is_aligned(const smla_norm_rows &rows)
{
    return rows.size % NORM_VECTOR == 0 && smla_is_multiple(rows.x, rows.x_stride_token * 2, 16) &&
           smla_is_multiple(rows.out, rows.out_stride_token * 2, 16) &&
           smla_is_multiple(rows.weight, 0, 16);
}

} /* namespace */

cudaError_t
smla_cuda_launch_fused_q_kv_rmsnorm(const smla_q_kv_norm_params *params,
                                    const smla_cuda_device *device)
{
    const int64_t num_tokens = params->num_tokens;
    const int64_t num_sms = device->num_sms;
    const norm_args args = {*params, num_tokens < SM_TOKENS * num_sms};
    const int64_t num_work_items = args.is_split ? 2 * num_tokens : num_tokens;
    const bool aligned = is_aligned(params->rows[0]) && is_aligned(params->rows[1]);
    return smla_launch(aligned ? norm_kernel<true> : norm_kernel<false>, args,
                       smla_count_parts(num_work_items, BLOCK_WARPS), BLOCK_THREADS, 0,
                       params->call.stream);
}
