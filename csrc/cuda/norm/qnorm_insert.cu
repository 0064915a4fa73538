/* qnorm_insert.cu: normalises and rotates the heads of q, and rotates the keys of kv and writes
 * them into the cache, in one launch.
 *
 * Computes     q_out = RoPE of x * (1 / sqrt(sum(x^2) / 512 + eps)) for every head x of q, as bf16,
 *              or times q_scale_inv as e4m3; 0 for heads that q lacks
 *              row of a slot = bf16(RoPE(kv)) in the cache's format; row_encoder.cuh has the rules
 * Shapes       q [T, H, 512] bf16 and q_out [T, >= H, 512], tokens and heads any stride apart; kv
 *              [T, 512] bf16, rows any stride apart; positions [T] int64 or int32; cos_sin
 *              [max_pos, 64] fp32; slot_mapping [<= T] int32 or int64; rows as kv_format.h draws
 *              them. q_out may be q.
 * Shared mem   none
 * Roles        The first warps take a key each, because a key's loads depend on each other. Each
 *              other warp has two neighbouring heads of a token: 4 vectors of 16 bytes per lane,
 *              all loaded before the first is used. The last 8 lanes have the RoPE values, in the
 *              second vector of a head or a key. No barriers.
 * Roofline     Memory binds: 2048 bytes per head, and 1024 + 584 per key of fp8_v4; H 64, T 8192:
 *              253 us at 4.3 TB/s. A lane runs about 80 instructions per vector, of which 32 bytes
 *              move; in that time 132 SMs of 128 lanes at 1.75 GHz run 220.
 * Numerics     fp32, each operation rounded: the bytes of the CPU. params_norm.h has the order of
 *              the sum. A value that RMSNorm or RoPE makes NaN is the positive quiet NaN. A token
 *              with a bad position is not rotated, and one with a bad slot is not written. Of
 *              tokens with one slot the last of 32 wins, as in cache_insert.cu.
 * Source       The fused insert of vLLM for DeepSeek V4, for the operator.
 */
#include "cuda/cache/cache_slots.cuh"
#include "cuda/cache/row_encoder.cuh"
#include "cuda/norm/rms_norm.cuh"
#include "cuda/rope/rope.cuh"

namespace {

enum {
    WARP_HEADS = 2,
    VECTOR_WORDS = NORM_VECTOR / 2,
    HEAD_VECTORS = SMLA_V4_HEAD_DIM / SMLA_NORM_SUMS, /* vectors of a head per lane */
    FIRST_ROPE_LANE = SMLA_WARP_LANES - SMLA_QK_ROPE_HEAD_DIM / NORM_VECTOR,
};

static_assert(HEAD_VECTORS == 2, "a head is two vectors per lane");
static_assert(NORM_VECTOR == 2 * ROPE_PAIRS, "a lane turns its vector");

struct qnorm_args {
    smla_qnorm_insert_params p;
    smla_divisor block_size;
    smla_divisor head_work_items; /* work items per token of q_out, one per warp */
    int64_t num_work_items;       /* keys, and pairs of heads */
    bool angles_are_aligned;
};

/* The angles of a lane's vector; lanes without RoPE values get none. */
__device__ __forceinline__ rope_angles
load_angles(const qnorm_args &args, int64_t token)
{
    const int lane = lane_idx();
    if (lane < FIRST_ROPE_LANE) {
        return {};
    }
    return rope_load(args.p.rope, token, (lane - FIRST_ROPE_LANE) * ROPE_PAIRS,
                     args.angles_are_aligned);
}

/* ---- Heads --------------------------------------------------------------------------------- */

/* Loads 8 values that the same lane may write later. */
template <bool ALIGNED>
__device__ __forceinline__ void
load_vector(const uint16_t *x, uint32_t words[VECTOR_WORDS])
{
    if constexpr (ALIGNED) {
        smla_load_own_vector_4(x, words);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR_WORDS; i++) {
            words[i] = x[2 * i] | (uint32_t)x[2 * i + 1] << 16;
        }
    }
}

/* Stores 8 values as e4m3. */
template <bool ALIGNED>
__device__ __forceinline__ void
store_e4m3(uint8_t *out, const float x[NORM_VECTOR])
{
    const uint32_t bytes[NORM_VECTOR / 4] = {smla_floats_to_e4m3x4(x),
                                             smla_floats_to_e4m3x4(x + 4)};
    smla_store_words<NORM_VECTOR, ALIGNED, 1>(out, bytes);
}

/* Stores vector `i` of a head that begins at element `at` of q_out. */
template <bool ALIGNED>
__device__ __forceinline__ void
store_vector(const smla_qnorm_insert_params &p, int64_t at, int i, float q_scale_inv,
             float x[NORM_VECTOR])
{
    at += i * SMLA_NORM_SUMS + lane_idx() * NORM_VECTOR;
    if (p.q_out_type == SMLA_FLOAT_BF16) {
        uint32_t words[VECTOR_WORDS];
        smla_round_to_bf16<NORM_VECTOR>(x, words);
        smla_store_words<16, ALIGNED>((uint16_t *)p.q_out + at, words);
    } else {
#pragma unroll
        for (int k = 0; k < NORM_VECTOR; k++) {
            x[k] = __fmul_rn(x[k], q_scale_inv);
        }
        store_e4m3<ALIGNED>((uint8_t *)p.q_out + at, x);
    }
}

/* Normalises, rotates and stores one head. `exists` is the same for all lanes. */
template <bool ALIGNED>
__device__ __forceinline__ void
finish_head(const smla_qnorm_insert_params &p, int64_t at, bool exists, float q_scale_inv,
            const rope_angles &angles, const uint32_t words[HEAD_VECTORS][VECTOR_WORDS])
{
    float x[HEAD_VECTORS][NORM_VECTOR] = {};
    if (exists) {
        float sums[NORM_VECTOR] = {};
#pragma unroll
        for (int i = 0; i < HEAD_VECTORS; i++) {
            smla_widen_bf16<NORM_VECTOR>(words[i], x[i]);
            norm_add_squares(sums, x[i]);
        }
        /* Multiply by 2^-9, which equals the division by 512 even where the result is rounded. */
        const float mean = __fmul_rn(norm_fold_sums(sums), 1.0f / SMLA_V4_HEAD_DIM);
        const float factor = norm_factor_of_mean(mean, p.eps);
#pragma unroll
        for (int i = 0; i < HEAD_VECTORS; i++) {
#pragma unroll
            for (int k = 0; k < NORM_VECTOR; k++) {
                x[i][k] = __fmul_rn(x[i][k], factor);
            }
        }
        if (lane_idx() >= FIRST_ROPE_LANE) {
            rope_rotate<false>(x[HEAD_VECTORS - 1], angles);
        }
    }
#pragma unroll
    for (int i = 0; i < HEAD_VECTORS; i++) {
        store_vector<ALIGNED>(p, at, i, q_scale_inv, x[i]);
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void
write_heads(const qnorm_args &args, int64_t token, int64_t first_head)
{
    const smla_qnorm_insert_params &p = args.p;
    const uint16_t *const x = p.q + token * p.q_stride_token + first_head * p.q_stride_head;
    uint32_t words[WARP_HEADS][HEAD_VECTORS][VECTOR_WORDS];
#pragma unroll
    for (int h = 0; h < WARP_HEADS; h++) {
        if (first_head + h < p.num_heads) {
#pragma unroll
            for (int i = 0; i < HEAD_VECTORS; i++) {
                load_vector<ALIGNED>(x + h * p.q_stride_head + i * SMLA_NORM_SUMS +
                                         lane_idx() * NORM_VECTOR,
                                     words[h][i]);
            }
        }
    }
    const rope_angles angles = load_angles(args, token);
    const float q_scale_inv = smla_load_given_scale(p.q_scale_inv);
    const int64_t at = token * p.q_out_stride_token + first_head * p.q_out_stride_head;
#pragma unroll
    for (int h = 0; h < WARP_HEADS; h++) {
        if (first_head + h < p.out_heads) {
            finish_head<ALIGNED>(p, at + h * p.q_out_stride_head, first_head + h < p.num_heads,
                                 q_scale_inv, angles, words[h]);
        }
    }
}

/* ---- Keys ---------------------------------------------------------------------------------- */

template <int ROW, bool ALIGNED>
__device__ __forceinline__ void
insert_key(const qnorm_args &args, int64_t token)
{
    const smla_cache_write_params &p = args.p.insert;
    const uint16_t *const from =
        (const uint16_t *)p.kv_c + token * p.kv_c_stride_token + lane_idx() * NORM_VECTOR;
    key_part<ROW> key;
#pragma unroll
    for (int i = 0; i < HEAD_VECTORS; i++) {
        smla_load_words<16, ALIGNED>(from + i * SMLA_NORM_SUMS, key.pairs[i]);
    }
    const rope_angles angles = load_angles(args, token);
    const float inverse = 1.0f / smla_load_given_scale(p.kv_scale);
    const int64_t slot = find_slots(p, token, 1); /* lane 0 has the slot */
    const smla_kv_token target = find_slot_row(p.kv, args.block_size, slot);
    uint8_t *const row = shuffle_pointer(target.row, 0);
    uint8_t *const scales = shuffle_pointer(target.scales, 0);
    if (row == nullptr) { /* the same condition for all lanes */
        return;
    }
    if (lane_idx() >= FIRST_ROPE_LANE) {
        float x[NORM_VECTOR];
        smla_widen_bf16<NORM_VECTOR>(key.pairs[HEAD_VECTORS - 1], x);
        rope_rotate<false>(x, angles);
        smla_round_to_bf16<NORM_VECTOR>(x, key.pairs[HEAD_VECTORS - 1]);
    }
    store_key<ROW, ALIGNED>(key, inverse, {row, scales});
}

template <int ROW, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS) qnorm_kernel(const __grid_constant__ qnorm_args args)
{
    ptx_wait_for_grids();
    const int64_t num_keys = args.p.insert.num_tokens;
    const int64_t step = (int64_t)gridDim.x * BLOCK_WARPS;
    int64_t work = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; work < args.num_work_items; work += step) {
        if (work < num_keys) {
            insert_key<ROW, ALIGNED>(args, work);
        } else {
            const int64_t token = smla_divide(work - num_keys, args.head_work_items);
            const int64_t part = work - num_keys - token * args.head_work_items.divisor;
            write_heads<ALIGNED>(args, token, part * WARP_HEADS);
        }
    }
}

/* ---- Table --------------------------------------------------------------------------------- */

/* The kernels of a format: for any arrays, and for aligned ones. */
template <int ROW>
constexpr format_kernels<qnorm_args, 2>
serve()
{
    return {(smla_kv_row_number)ROW, {qnorm_kernel<ROW, false>, qnorm_kernel<ROW, true>}};
}

const format_kernels<qnorm_args, 2> qnorm_table[] = {
    serve<SMLA_ROW_FP8_V4>(),  serve<SMLA_ROW_BFLOAT16_512>(), serve<SMLA_ROW_FP8_E4M3>(),
    serve<SMLA_ROW_FP8_V41>(), serve<SMLA_ROW_FP4_V41>(),      serve<SMLA_ROW_FP8_NOPE>(),
};

/* Whether all vectors are aligned: to 16 bytes of bf16, or to 8 bytes of e4m3. Only bf16 rows of
 * the cache need a check; the stores of other formats are always aligned. */
bool
is_aligned(const smla_qnorm_insert_params *p)
{
    const int64_t out_bytes = p->q_out_type == SMLA_FLOAT_BF16 ? 2 : 1;
    const int64_t vector_bytes = NORM_VECTOR * out_bytes;
    return smla_are_rows_aligned(p->q, p->q_stride_token, p->q_stride_head, 16) &&
           smla_are_rows_aligned(p->q_out, p->q_out_stride_token, p->q_out_stride_head,
                                 vector_bytes, out_bytes) &&
           smla_is_multiple(p->insert.kv_c, p->insert.kv_c_stride_token * 2, 16) &&
           (p->insert.kv.format->nope_type != SMLA_NOPE_BF16 || has_aligned_rows(p->insert.kv));
}

} /* namespace */

cudaError_t
smla_cuda_launch_fused_qnorm_rope_kv_insert(const smla_qnorm_insert_params *params,
                                            const smla_cuda_device *)
{
    qnorm_args args = {};
    args.p = *params;
    args.block_size = smla_make_divisor(params->insert.kv.block_size);
    args.head_work_items = smla_make_divisor(smla_count_parts(params->out_heads, WARP_HEADS));
    args.num_work_items =
        params->insert.num_tokens + params->num_tokens * args.head_work_items.divisor;
    args.angles_are_aligned = rope_is_aligned(params->rope);
    return smla_launch(find_kernel(qnorm_table, params->insert.kv, is_aligned(params)), args,
                       smla_count_parts(args.num_work_items, BLOCK_WARPS), BLOCK_THREADS, 0,
                       params->call.stream);
}
