/* merge.cu: softmax-weighted merges of partial attention results over disjoint key sets.
 *
 * Computes     lse = ln(sum of e^lse_i),
 *              out = f (sum of e^(lse_i - lse) out_i),
 *              f = 1 / (1 + e^(sink - lse)), or 1 without a sink. With two parts, tokens from
 *              merged_tokens on have only the second
 * Shapes       out_i [T, H, V] bf16, fp16 or fp32; lse_i, lse [T, H] fp32; out [T, H, V] of the
 *              parts' type, or bf16 where they are fp32; tokens and heads any stride apart, in
 *              each array its own; attn_sink [H] fp32. With two parts, out may be either part's,
 *              and so may lse
 * Shared mem   none
 * Roles        A thread computes 16 bytes of a part's row at a time (one element where rows are
 *              not aligned) and the row's weights. It loads two vectors of both of two parts, or
 *              one vector of four of many parts, before it adds any. When all threads of a block
 *              have read what the weights of two parts come from, a row's first thread writes lse.
 * Roofline     Memory binds: 2 rows read, 1 written, 3072 bytes for V 512 in bf16, 0.71 ns at 4.3
 *              TB/s. While memory moves 48 bytes, 132 SMs of 128 lanes at 1.75 GHz execute 330
 *              instructions. A thread needs about 150 for them, with two exponentials and a
 *              logarithm. Reached on an H200, V 512 in bf16: 4.3 TB/s, 100 % (2026-11-20, merge in
 *              `python -m sparse_mla bench --device cuda --only bytes`, replayed without the copy);
 *              88 % with 72 registers and 3 blocks per SM instead of 64 and 4.
 * Numerics     fp32, in the order of the parts. Weights come from e^(lse_i - largest lse), so
 *              nothing overflows. A part with an lse of -inf or +inf is empty, and what its row
 *              holds does not count. If all parts are empty, the first is copied and lse is -inf,
 *              whatever the sink is. The sink's exponent takes the largest lse off first, because
 *              that difference is exact where it matters.
 * Source       vLLM's merge_attn_states, for the convention of +inf.
 */
#include "core/params_merge.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    BLOCKS_PER_SM = 4, /* at least, so a thread has 64 registers */
};

/* How threads are spread over rows. */
struct merge_grid {
    smla_divisor num_heads;
    int32_t row_threads; /* a power of two */
};

struct merge_two {
    smla_merge_rows rows;
    smla_merge_part parts[2];
    int64_t merged_tokens;
    merge_grid grid;

    enum { GROUP = 2, UNROLL = 2 };           /* parts at a time, vectors per part at a time */
    static constexpr bool IS_IN_PLACE = true; /* outputs may be inputs */
    __device__ __forceinline__ int num_parts() const
    {
        return 2;
    }
    __device__ __forceinline__ int first_part(int64_t token) const
    {
        return token >= merged_tokens ? 1 : 0;
    }
};

struct merge_many {
    smla_merge_rows rows;
    smla_merge_part parts[SMLA_MAX_PARTS];
    int32_t part_count;
    merge_grid grid;

    enum { GROUP = 4, UNROLL = 1 };
    static constexpr bool IS_IN_PLACE = false;
    __device__ __forceinline__ int num_parts() const
    {
        return part_count;
    }
    __device__ __forceinline__ int first_part(int64_t) const
    {
        return 0;
    }
};

/* ---- Weights ------------------------------------------------------------------------------- */

/* What a row's parts have in common. */
struct row_weights {
    int64_t token;
    int64_t head;
    float top;     /* the largest lse; -inf: all parts are empty */
    float lse;     /* the merged one */
    float highest; /* the weight of a part with the largest lse */
};

enum { NO_WEIGHT = -1 }; /* the weight of an empty part, whose row is not read */

/* The lse of an empty part is -inf. Some kernels write +inf for it. */
template <class ARGS>
__device__ __forceinline__ float
read_lse(const ARGS &args, int part, int64_t token, int64_t head)
{
    const smla_merge_part &p = args.parts[part];
    const float lse = p.lse[token * p.lse_stride_token + head * p.lse_stride_head];
    return isinf(lse) || part < args.first_part(token) ? -INFINITY : lse;
}

/* e^(sink - lse), by which the sum of all weights grows. lse is top + rest. */
__device__ __forceinline__ float
weigh_sink(const smla_merge_rows &rows, int64_t head, float top, float rest)
{
    if (rows.attn_sink == NULL || isinf(top)) {
        return 0.0f;
    }
    return expf(__ldg(rows.attn_sink + head * rows.attn_sink_stride) - top - rest);
}

/* The sum of the weights of all parts, if the first one with the largest lse has 1, without that
 * one. */
template <class ARGS>
__device__ __forceinline__ float
sum_lower(const ARGS &args, int64_t token, int64_t head, float top)
{
    float sum = 0.0f;
    bool seen_top = false;
#pragma unroll 4
    for (int i = 0; i < args.num_parts(); i++) {
        const float lse = read_lse(args, i, token, head);
        const bool is_top = !seen_top && lse == top;
        seen_top |= is_top;
        sum += is_top || isinf(lse) ? 0.0f : expf(lse - top);
    }
    return sum;
}

template <class ARGS>
__device__ __forceinline__ row_weights
weigh_row(const ARGS &args, int64_t token, int64_t head)
{
    float top = -INFINITY;
#pragma unroll 4
    for (int i = 0; i < args.num_parts(); i++) {
        top = fmaxf(top, read_lse(args, i, token, head));
    }
    const float lower = sum_lower(args, token, head, top);
    const float rest = log1pf(lower);
    const float sink = weigh_sink(args.rows, head, top, rest);
    return {token, head, top, top + rest, 1.0f / ((1.0f + lower) * (1.0f + sink))};
}

/* If all parts are empty, the first one counts. */
template <class ARGS>
__device__ __forceinline__ float
weigh_part(const ARGS &args, const row_weights &row, int part)
{
    const float lse = read_lse(args, part, row.token, row.head);
    if (isinf(lse)) {
        const bool is_copied = isinf(row.lse) && part == args.first_part(row.token);
        return is_copied ? 1.0f : (float)NO_WEIGHT;
    }
    return expf(lse - row.top) * row.highest;
}

/* ---- Values -------------------------------------------------------------------------------- */

/* Loads the bits of COUNT elements, unconverted. */
template <int TYPE, int COUNT>
__device__ __forceinline__ void
load_bits(const void *array, int64_t index, uint32_t *words)
{
    if constexpr (COUNT > 1) { /* 16 bytes */
        const int64_t bytes = TYPE == SMLA_FLOAT_FP32 ? 4 : 2;
        smla_load_own_vector_4((const uint8_t *)array + index * bytes, words);
    } else if constexpr (TYPE == SMLA_FLOAT_FP32) {
        words[0] = ((const uint32_t *)array)[index];
    } else {
        words[0] = ((const uint16_t *)array)[index];
    }
}

/* Element i of what load_bits loaded, as a float. */
template <int TYPE>
__device__ __forceinline__ float
take_value(const uint32_t *words, int i)
{
    if constexpr (TYPE == SMLA_FLOAT_FP32) {
        return smla_bits_float(words[i]);
    } else if constexpr (TYPE == SMLA_FLOAT_FP16) {
        return smla_cvt_float((uint16_t)(words[i / 2] >> i % 2 * 16));
    } else {
        return i % 2 == 0 ? smla_low_bf16(words[i / 2]) : smla_high_bf16(words[i / 2]);
    }
}

template <int TYPE, int COUNT>
__device__ __forceinline__ void
store_values(void *array, int64_t index, const float *values)
{
    if constexpr (TYPE == SMLA_FLOAT_FP32) {
        uint32_t words[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            words[i] = smla_float_bits(values[i]);
        }
        smla_store_words<COUNT * 4, true>((float *)array + index, words);
    } else if constexpr (COUNT == 1) {
        ((uint16_t *)array)[index] =
            TYPE == SMLA_FLOAT_FP16 ? smla_float_to_half(values[0]) : smla_float_to_bf16(values[0]);
    } else {
        uint32_t words[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            words[i] = TYPE == SMLA_FLOAT_FP16
                           ? smla_cvt_f16x2(values[2 * i], values[2 * i + 1])
                           : smla_floats_to_bf16x2(values[2 * i], values[2 * i + 1]);
        }
        smla_store_words<COUNT * 2, true>((uint16_t *)array + index, words);
    }
}

/* UNROLL vectors of COUNT values of GROUP parts, `step` apart, of which the first begins at
 * `start`. */
template <int TYPE, int COUNT, class ARGS> struct row_group {
    uint32_t words[ARGS::GROUP][ARGS::UNROLL][TYPE == SMLA_FLOAT_FP32 ? COUNT : (COUNT + 1) / 2];
};

/* Loads the parts from `part` on. */
template <int TYPE, int COUNT, class ARGS>
__device__ __forceinline__ void
load_group(const ARGS &args, int part, int64_t token, int64_t head, int64_t start, int64_t step,
           row_group<TYPE, COUNT, ARGS> *group)
{
#pragma unroll
    for (int k = 0; k < ARGS::GROUP; k++) {
        if (part + k >= args.num_parts()) {
            break;
        }
        const smla_merge_part &p = args.parts[part + k];
        const int64_t row = token * p.out_stride_token + head * p.out_stride_head;
#pragma unroll
        for (int i = 0; i < ARGS::UNROLL; i++) {
            if (start + i * step < args.rows.value_dim) {
                load_bits<TYPE, COUNT>(p.out, row + start + i * step, group->words[k][i]);
            }
        }
    }
}

/* The weights of the parts from `part` on. */
template <class ARGS>
__device__ __forceinline__ void
weigh_group(const ARGS &args, const row_weights &row, int part, float weights[ARGS::GROUP])
{
#pragma unroll
    for (int k = 0; k < ARGS::GROUP; k++) {
        weights[k] =
            part + k < args.num_parts() ? weigh_part(args, row, part + k) : (float)NO_WEIGHT;
    }
}

/* The sums of a vector's values so far. */
template <int COUNT> struct vector_sums {
    float values[COUNT];
    bool has_part;
};

/* sum + weight * value. A first value with a weight of 1 stays as it is, NaN too. */
__device__ __forceinline__ float
add_value(bool has_part, float sum, float weight, float value)
{
    return has_part ? fmaf(weight, value, sum) : weight == 1.0f ? value : weight * value;
}

/* Adds vector i of the group. No product with an empty part, because its row may hold NaN. */
template <int TYPE, int COUNT, class ARGS>
__device__ __forceinline__ void
add_group(const row_group<TYPE, COUNT, ARGS> &group, const float weights[ARGS::GROUP], int i,
          vector_sums<COUNT> *sums)
{
#pragma unroll
    for (int k = 0; k < ARGS::GROUP; k++) {
        if (weights[k] == (float)NO_WEIGHT) {
            continue;
        }
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            sums->values[j] = add_value(sums->has_part, sums->values[j], weights[k],
                                        take_value<TYPE>(group.words[k][i], j));
        }
        sums->has_part = true;
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

/* Adds the parts behind the first group. There are none where UNROLL is not 1. */
template <int TYPE, int COUNT, class ARGS>
__device__ __forceinline__ void
add_later_groups(const ARGS &args, const row_weights &row, int64_t start, int64_t step,
                 row_group<TYPE, COUNT, ARGS> *group, vector_sums<COUNT> *sums)
{
    for (int part = ARGS::GROUP; part < args.num_parts(); part += ARGS::GROUP) {
        float weights[ARGS::GROUP];
        load_group(args, part, row.token, row.head, start, step, group);
        weigh_group(args, row, part, weights);
        add_group(*group, weights, 0, sums);
    }
}

/* Adds all parts of a thread's vectors from `start` on. `group` has the first parts, and `weights`
 * are theirs. */
template <int TYPE, int OUT_TYPE, int COUNT, class ARGS>
__device__ __forceinline__ void
merge_vectors(const ARGS &args, const row_weights &row, int64_t start, int64_t step,
              const float weights[ARGS::GROUP], row_group<TYPE, COUNT, ARGS> *group)
{
    const smla_merge_rows &rows = args.rows;
    const int64_t out_row = row.token * rows.out_stride_token + row.head * rows.out_stride_head;
#pragma unroll
    for (int i = 0; i < ARGS::UNROLL; i++) {
        if (start + i * step >= rows.value_dim) {
            break;
        }
        vector_sums<COUNT> sums = {};
        add_group(*group, weights, i, &sums);
        add_later_groups(args, row, start, step, group, &sums);
        store_values<OUT_TYPE, COUNT>(rows.out, out_row + start + i * step, sums.values);
    }
}

template <int TYPE, int OUT_TYPE, int COUNT, class ARGS>
__global__ void
__launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM) merge_kernel(const __grid_constant__ ARGS args)
{
    ptx_wait_for_grids();
    const int row_threads = args.grid.row_threads;
    const int block_rows = BLOCK_THREADS / row_threads;
    const int64_t num_rows = args.rows.num_tokens * args.rows.num_heads;
    const int64_t first = (int64_t)(threadIdx.x % row_threads) * COUNT;
    const int64_t step = (int64_t)row_threads * COUNT;
    int64_t block_row = (int64_t)blockIdx.x * block_rows;
    for (; block_row < num_rows; block_row += (int64_t)gridDim.x * block_rows) {
        const int64_t own = block_row + threadIdx.x / row_threads;
        const bool has_row = own < num_rows;
        const int64_t row_idx = has_row ? own : num_rows - 1;
        const int64_t token = smla_divide(row_idx, args.grid.num_heads);
        const int64_t head = row_idx - token * args.rows.num_heads;
        row_group<TYPE, COUNT, ARGS> group;
        float weights[ARGS::GROUP];
        load_group(args, 0, token, head, first, step, &group);
        const row_weights row = weigh_row(args, token, head);
        weigh_group(args, row, 0, weights);
        if constexpr (ARGS::IS_IN_PLACE) {
            __syncthreads(); /* lse may be a part's: all of the row's threads have read it */
        }
        if (!has_row) {
            continue;
        }
        merge_vectors<TYPE, OUT_TYPE>(args, row, first, step, weights, &group);
        for (int64_t start = first + ARGS::UNROLL * step; start < args.rows.value_dim;
             start += ARGS::UNROLL * step) {
            load_group(args, 0, token, head, start, step, &group);
            merge_vectors<TYPE, OUT_TYPE>(args, row, start, step, weights, &group);
        }
        if (first == 0) {
            args.rows.lse[token * args.rows.lse_stride_token + head * args.rows.lse_stride_head] =
                row.lse;
        }
    }
}

/* ---- Launch -------------------------------------------------------------------------------- */

template <class ARGS> struct merge_row {
    smla_float_type type;
    smla_float_type out_type;
    int32_t count; /* elements per vector */
    void (*kernel)(ARGS);
};

template <class ARGS>
const merge_row<ARGS> merge_rows[] = {
    {SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 8, merge_kernel<SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 8, ARGS>},
    {SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 1, merge_kernel<SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 1, ARGS>},
    {SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 8, merge_kernel<SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 8, ARGS>},
    {SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 1, merge_kernel<SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 1, ARGS>},
    {SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 4, merge_kernel<SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 4, ARGS>},
    {SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 1, merge_kernel<SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 1, ARGS>},
    {SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 4, merge_kernel<SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 4, ARGS>},
    {SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 1, merge_kernel<SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 1, ARGS>},
};

/* Whether all rows of an array begin at multiples of 16 bytes. */
bool
is_aligned(const void *rows, int64_t stride_token, int64_t stride_head, int64_t element_bytes)
{
    return smla_is_multiple(rows, stride_token * element_bytes, 16) &&
           stride_head * element_bytes % 16 == 0;
}

int64_t
bytes_of(smla_float_type type)
{
    return type == SMLA_FLOAT_FP32 ? 4 : 2;
}

/* Elements per vector: 16 bytes of a part, or one element. */
int32_t
choose_count(const smla_merge_rows *rows, const smla_merge_part *parts, int64_t num_parts)
{
    const int64_t bytes = bytes_of(rows->type);
    bool good = rows->value_dim * bytes % 16 == 0 &&
                is_aligned(rows->out, rows->out_stride_token, rows->out_stride_head,
                           bytes_of(rows->out_type));
    for (int64_t i = 0; good && i < num_parts; i++) {
        good = is_aligned(parts[i].out, parts[i].out_stride_token, parts[i].out_stride_head, bytes);
    }
    return good ? 16 / (int32_t)bytes : 1;
}

/* Launches what serves the args, of which only the grid is not set yet. */
template <class ARGS>
cudaError_t
launch(ARGS *args, int64_t num_parts, const smla_call *call)
{
    const smla_merge_rows *const rows = &args->rows;
    if (rows->num_tokens == 0 || rows->num_heads == 0) {
        return cudaSuccess;
    }
    const int32_t count = choose_count(rows, args->parts, num_parts);
    int32_t row_threads = 1;
    while (row_threads < BLOCK_THREADS && row_threads * count * ARGS::UNROLL < rows->value_dim) {
        row_threads *= 2;
    }
    args->grid = {smla_make_divisor(rows->num_heads), row_threads};
    const int64_t num_blocks =
        smla_count_parts(rows->num_tokens * rows->num_heads, BLOCK_THREADS / row_threads);
    for (const merge_row<ARGS> &row : merge_rows<ARGS>) {
        if (row.type == rows->type && row.out_type == rows->out_type && row.count == count) {
            return smla_launch(row.kernel, *args, num_blocks, BLOCK_THREADS, 0, call->stream);
        }
    }
    return SMLA_NO_KERNEL;
}

} /* namespace */

cudaError_t
smla_cuda_launch_merge_attn_states(const smla_merge_params *p, const smla_cuda_device *)
{
    merge_two args = {p->rows, {p->parts[0], p->parts[1]}, p->merged_tokens, {}};
    return launch(&args, 2, &p->call);
}

cudaError_t
smla_cuda_launch_merge_attn_partials(const smla_merge_partials_params *p, const smla_cuda_device *)
{
    merge_many args;
    args.rows = p->rows;
    args.part_count = (int32_t)p->num_parts;
    for (int64_t i = 0; i < SMLA_MAX_PARTS; i++) { /* the rest is sent, too, so it is not junk */
        args.parts[i] = i < p->num_parts ? p->parts[i] : smla_merge_part{};
    }
    return launch(&args, p->num_parts, &p->call);
}
