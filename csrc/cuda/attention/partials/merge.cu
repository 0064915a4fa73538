/* merge.cu: softmax-weighted merge of two partial attention results over disjoint key sets.
 *
 * Computes     lse = ln(e^lse_a + e^lse_b),
 *              out = f (e^(lse_a - lse) out_a + e^(lse_b - lse) out_b),
 *              f = 1 / (1 + e^(sink - lse)), or 1 without a sink; from token merged_tokens on side
 *              b is all
 * Shapes       out_a, out_b, out [T, H, V] bf16, fp16 or fp32; lse_a, lse_b, lse [T, H] fp32;
 *              tokens and heads any stride apart; attn_sink [H] fp32. out may be out_a or out_b,
 *              and lse may be lse_a or lse_b
 * Shared mem   none
 * Roles        A thread computes 16 bytes of a row of out at a time (one element where rows are not
 *              aligned) and the row's weights. When all threads of a block have read what their
 *              weights come from, a row's first thread writes lse.
 * Roofline     Memory binds: 2 rows read, 1 written, 3072 bytes for V 512 in bf16, 0.71 ns at 4.3
 *              TB/s. While memory moves 48 bytes, 132 SMs of 128 lanes at 1.75 GHz execute 330
 *              instructions. A thread needs about 150 for them, with two exponentials and a
 *              logarithm. Reached on an H200, V 512 in bf16: 4.3 TB/s, 100 % (2026-11-20, merge in
 *              `python -m sparse_mla bench --device cuda --only bytes`, replayed without the copy);
 *              88 % with 72 registers and 3 blocks per SM instead of 64 and 4.
 * Numerics     fp32; weights come from e^-|lse_a - lse_b|, so nothing overflows. A side with an lse
 *              of -inf or +inf is empty, and what its row holds does not count. If both sides are
 *              empty, side a is copied and lse is -inf, whatever the sink is. The sink's exponent
 *              takes the larger lse off first, because that difference is exact where it matters.
 * Source       vLLM's merge_attn_states, for the convention of +inf.
 */
#include "cuda/attention/partials/merge_values.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    BLOCKS_PER_SM = 4, /* or more, so a thread has 64 registers at most */
    UNROLL = 2,        /* vectors per thread at a time */
};

struct merge_args {
    smla_merge_params p;
    smla_divisor num_heads;
    int32_t row_threads; /* a power of two */
};

struct merge_weights {
    float lse;
    float a;
    float b;
    bool a_is_empty;
    bool b_is_empty;
};

/* If both sides are empty, only b is marked as empty, unless b is all. */
__device__ __forceinline__ merge_weights
weigh(const smla_merge_rows &rows, int64_t head, bool takes_b, float a, float b)
{
    if (isinf(b) && !takes_b) {
        return {a, 1.0f / (1.0f + weigh_sink(rows, head, a, 0.0f)), 0.0f, false, true};
    }
    if (isinf(a)) {
        return {b, 0.0f, 1.0f / (1.0f + weigh_sink(rows, head, b, 0.0f)), true, false};
    }
    const float lower = expf(-fabsf(a - b)); /* weight of the smaller side if the larger has 1 */
    const float sum = 1.0f + lower;
    const float top = fmaxf(a, b);
    const float rest = log1pf(lower);
    const float lse = top + rest;
    const float weight = 1.0f / (sum * (1.0f + weigh_sink(rows, head, top, rest)));
    const float lower_weight = lower * weight;
    return a >= b ? merge_weights{lse, weight, lower_weight, false, false}
                  : merge_weights{lse, lower_weight, weight, false, false};
}

/* weight * value; a weight of 1 leaves NaN as it is. */
__device__ __forceinline__ float
scale_value(float weight, float value)
{
    return weight == 1.0f ? value : weight * value;
}

__device__ __forceinline__ merge_weights
weigh_row(const smla_merge_params &p, int64_t token, int64_t head)
{
    const bool takes_b = token >= p.merged_tokens;
    return weigh(p.rows, head, takes_b, takes_b ? -INFINITY : read_lse(p.parts[0], token, head),
                 read_lse(p.parts[1], token, head));
}

/* UNROLL vectors of COUNT values of both sides, `step` apart, of which the first begins at
 * `start`. */
template <int TYPE, int COUNT> struct row_part {
    uint32_t words[2][UNROLL][TYPE == SMLA_FLOAT_FP32 ? COUNT : (COUNT + 1) / 2];
};

template <int TYPE, int COUNT>
__device__ __forceinline__ void
load_part(const smla_merge_params &p, int64_t token, int64_t head, int64_t start, int64_t step,
          row_part<TYPE, COUNT> *part)
{
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const smla_merge_part &from = p.parts[side];
        const int64_t row = token * from.out_stride_token + head * from.out_stride_head;
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (start + i * step < p.rows.value_dim) {
                load_bits<TYPE, COUNT>(from.out, row + start + i * step, part->words[side][i]);
            }
        }
    }
}

template <int TYPE, int COUNT>
__device__ __forceinline__ void
store_merged(const smla_merge_params &p, int64_t token, int64_t head, int64_t start, int64_t step,
             const merge_weights &merged, const row_part<TYPE, COUNT> &part)
{
    const int64_t row = token * p.rows.out_stride_token + head * p.rows.out_stride_head;
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        if (start + i * step >= p.rows.value_dim) {
            break;
        }
        float values[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const float a = take_value<TYPE>(part.words[0][i], k);
            const float b = take_value<TYPE>(part.words[1][i], k);
            /* No product with a weight of 0, because the row of an empty side may hold NaN. */
            values[k] = merged.a_is_empty   ? scale_value(merged.b, b)
                        : merged.b_is_empty ? scale_value(merged.a, a)
                                            : fmaf(merged.b, b, merged.a * a);
        }
        store_values<TYPE, COUNT>(p.rows.out, row + start + i * step, values);
    }
}

template <int TYPE, int COUNT>
__global__ void
__launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
    merge_kernel(const __grid_constant__ merge_args args)
{
    ptx_wait_for_grids();
    const smla_merge_params &p = args.p;
    const int block_rows = BLOCK_THREADS / args.row_threads;
    const int64_t num_rows = p.rows.num_tokens * p.rows.num_heads;
    const int64_t first = (int64_t)(threadIdx.x % args.row_threads) * COUNT;
    const int64_t step = (int64_t)args.row_threads * COUNT;
    int64_t block_row = (int64_t)blockIdx.x * block_rows;
    for (; block_row < num_rows; block_row += (int64_t)gridDim.x * block_rows) {
        const int64_t own = block_row + threadIdx.x / args.row_threads;
        const bool has_row = own < num_rows;
        const int64_t row = has_row ? own : num_rows - 1;
        const int64_t token = smla_divide(row, args.num_heads);
        const int64_t head = row - token * p.rows.num_heads;
        row_part<TYPE, COUNT> part;
        load_part(p, token, head, first, step, &part);
        const merge_weights merged = weigh_row(p, token, head);
        __syncthreads(); /* lse may be the lse of a side: all of the row's threads have read it */
        if (!has_row) {
            continue;
        }
        store_merged(p, token, head, first, step, merged, part);
        for (int64_t start = first + UNROLL * step; start < p.rows.value_dim;
             start += UNROLL * step) {
            load_part(p, token, head, start, step, &part);
            store_merged(p, token, head, start, step, merged, part);
        }
        if (first == 0) {
            store_lse(p.rows, token, head, merged.lse);
        }
    }
}

struct merge_row {
    smla_float_type type;
    int32_t count; /* elements per vector */
    void (*kernel)(merge_args);
};

const merge_row merge_rows[] = {
    {SMLA_FLOAT_BF16, 8, merge_kernel<SMLA_FLOAT_BF16, 8>},
    {SMLA_FLOAT_BF16, 1, merge_kernel<SMLA_FLOAT_BF16, 1>},
    {SMLA_FLOAT_FP16, 8, merge_kernel<SMLA_FLOAT_FP16, 8>},
    {SMLA_FLOAT_FP16, 1, merge_kernel<SMLA_FLOAT_FP16, 1>},
    {SMLA_FLOAT_FP32, 4, merge_kernel<SMLA_FLOAT_FP32, 4>},
    {SMLA_FLOAT_FP32, 1, merge_kernel<SMLA_FLOAT_FP32, 1>},
};

} /* namespace */

cudaError_t
smla_cuda_launch_merge_attn_states(const smla_merge_params *p, const smla_cuda_device *)
{
    const smla_merge_rows *const rows = &p->rows;
    if (rows->num_tokens == 0 || rows->num_heads == 0) {
        return cudaSuccess;
    }
    const int32_t count = choose_count(rows, p->parts, 2);
    merge_args args = {*p, smla_make_divisor(rows->num_heads), 1};
    while (args.row_threads < BLOCK_THREADS &&
           args.row_threads * count * UNROLL < rows->value_dim) {
        args.row_threads *= 2;
    }
    const int64_t num_blocks =
        smla_count_parts(rows->num_tokens * rows->num_heads, BLOCK_THREADS / args.row_threads);
    for (const merge_row &row : merge_rows) {
        if (row.type == rows->type && row.count == count) {
            return smla_launch(row.kernel, args, num_blocks, BLOCK_THREADS, 0, p->call.stream);
        }
    }
    return SMLA_NO_KERNEL;
}
