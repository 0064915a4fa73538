/* merge.cu: softmax-weighted merge of partial attention results over disjoint key sets, of two
 * states or of many partials.
 *
 * Computes     the largest lse, top; lower = sum of e^(lse_i - top) of all parts but one with lse
 *              top; lse = top + log1p(lower); weight_i = e^(lse_i - top) / ((1 + lower)
 *              (1 + e^(sink - lse))), without a sink / (1 + lower); out = sum of weight_i out_i. Of
 *              two states, side b is all from token merged_tokens on.
 * Shapes       2 states or 1 to 64 partials: out_i [T, H, V] bf16, fp16 or fp32, lse_i [T, H] fp32;
 *              out [T, H, V] of the parts' type, and of fp32 partials bf16 or fp16, too; lse
 *              [T, H] fp32; tokens and heads any stride apart, in each array its own; attn_sink
 *              [H] fp32. out may be that of a state, and lse may be that of a state.
 * Shared mem   none
 * Roles        Threads of a row have 2 vectors of 16 bytes of each part at a time (2 elements where
 *              rows are not aligned), and load them before the first weight is known.
 *                states    As many threads as the row has vectors; each computes the weights. When
 *                          all threads of a block have read what their weights come from, a row's
 *                          first thread writes lse.
 *                few       Up to 4 partials of one set of strides, in vectors. A warp; each lane
 *                          computes all weights. lses are loaded in front of the values, so that
 *                          the weights are known when the values arrive.
 *                many      The other partials. A warp. Lane i weighs part i, and part i + 32 where
 *                          there are so many. All lanes get the weights by shuffles. 8 parts are
 *                          loaded at a time.
 *              Parts may be in memory of other GPUs, which the backend has checked.
 * Roofline     Memory binds.
 *                states    2 rows read, 1 written, 3072 bytes for V 512 in bf16, 0.71 ns at 4.3
 *                          TB/s. While memory moves 48 bytes, 132 SMs of 128 lanes at 1.75 GHz
 *                          execute 330 instructions. A thread needs about 150 for them, with two
 *                          exponentials and a logarithm. Reached on an H200, V 512 in bf16: 4.3
 *                          TB/s, 100 % (2026-11-20, merge in `python -m sparse_mla bench --device
 *                          cuda --only bytes`, replayed without the copy); 88 % with 72 registers
 *                          and 3 blocks per SM instead of 64 and 4.
 *                few       With 4 parts, V 512 in bf16, a row has 5140 bytes, 1.2 ns at 4.3 TB/s,
 *                          in which 132 SMs execute 1100 instructions of a warp. A row takes about
 *                          750. An SM has 32 warps, each with 4 KB in flight, so 128 x 32 rows are
 *                          one wave of blocks. Measured on an H200, in a graph and with a cold L2:
 *                          4 parts of [128, 32, 512] in bf16 11.6 us, of 128 heads 27.6 us.
 *                many      With 8 parts, V 512 in bf16, a row has 9252 bytes, 2.2 ns at 4.3 TB/s.
 *                          An SM has 16 warps, each with 8 KB in flight. Reached on an H200, 128 x
 *                          128 rows: 43.7 us, 81 % of the copy (2026-11-28, the same benchmark,
 *                          with a choice per value between a copy and a product); 56 % with a
 *                          thread per 8 values that weighs all parts itself. fp32 reaches 4.1 TB/s,
 *                          so in bf16 instructions bind. They are as many per row however few its
 *                          values are: 1.3 TB/s with V 128.
 * Numerics     fp32. Products are added by fused multiplications, in the order of the parts, so two
 *              parts have the same bits as states and as partials. Nothing overflows, because the
 *              largest lse is taken off first; the sink's exponent takes it off first, too, because
 *              that difference is exact where it matters. A part with an lse of -inf or +inf is
 *              empty, and what its row holds does not count. If all parts are empty, the first is
 *              copied and lse is -inf, whatever the sink is. A row with one part keeps its bits
 *              where there is no sink, NaN too but in fp16.
 * Source       vLLM's merge_attn_states, for the convention of +inf.
 */
#include "cuda/attention/partials/merge_weights.cuh"
#include "cuda/attention/partials/part_rows.h"

namespace {

/* ---- Values -------------------------------------------------------------------------------- */

/* UNROLL vectors of GROUP parts. A thread's vectors are as far apart as the row's threads reach. */
template <typename Shape> struct row_group {
    uint32_t words[Shape::GROUP][UNROLL][Shape::WORDS];
};

/* The values between two vectors of a thread. */
template <typename Shape>
__device__ __forceinline__ int
find_step(const args_of<Shape> &args)
{
    return count_row_threads<Shape>(args) * Shape::COUNT;
}

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

/* Loads the parts from `part` on. */
template <typename Shape>
__device__ __forceinline__ void
load_group(const args_of<Shape> &args, int part, const row_place &at, row_group<Shape> *group)
{
#pragma unroll
    for (int k = 0; k < Shape::GROUP; k++) {
        if (is_past<Shape>(args, part + k)) {
            break;
        }
        const smla_merge_part &strides = find_strides(args, part + k);
        const int64_t row = at.token * strides.out_stride_token + at.head * strides.out_stride_head;
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int64_t value = at.start + i * find_step<Shape>(args);
            if (value < args.rows.value_dim) {
                load_bits<Shape::TYPE, Shape::COUNT>(args.parts[part + k].out, row + value,
                                                     group->words[k][i]);
            }
        }
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

/* Adds vector i of a group's parts. The sums begin with -0, which keeps the sign of a first zero.
 * No product with an empty part, because its row may hold NaN. */
template <typename Shape>
__device__ __forceinline__ void
add_vectors(const row_group<Shape> &group, int i, const float weights[Shape::GROUP], bool is_copy,
            float sums[Shape::COUNT])
{
#pragma unroll
    for (int k = 0; k < Shape::GROUP; k++) {
        if (weights[k] == (float)NO_WEIGHT) { /* in all threads of the row */
            continue;
        }
        if (is_copy) {
#pragma unroll
            for (int j = 0; j < Shape::COUNT; j++) {
                sums[j] = take_value<Shape::TYPE>(group.words[k][i], j);
            }
            continue;
        }
#pragma unroll
        for (int j = 0; j < Shape::COUNT; j++) {
            sums[j] = fmaf(weights[k], take_value<Shape::TYPE>(group.words[k][i], j), sums[j]);
        }
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
                           ? ptx_cvt_f16x2(values[2 * i], values[2 * i + 1])
                           : smla_floats_to_bf16x2(values[2 * i], values[2 * i + 1]);
        }
        smla_store_words<COUNT * 2, true>((uint16_t *)array + index, words);
    }
}

/* Stores vector i of a row. */
template <typename Shape>
__device__ __forceinline__ void
store_vector(const args_of<Shape> &args, const row_place &at, int i, const float sums[Shape::COUNT])
{
    const smla_merge_rows &rows = args.rows;
    const int64_t value = at.start + i * find_step<Shape>(args);
    if (value < rows.value_dim) {
        const int64_t row = at.token * rows.out_stride_token + at.head * rows.out_stride_head;
        store_values<Shape::OUT_TYPE, Shape::COUNT>(rows.out, row + value, sums);
    }
}

/* Adds all parts of a thread's vectors, and stores them. `group` has the first ones. */
template <typename Shape>
__device__ __forceinline__ void
merge_vectors(const args_of<Shape> &args, const row_place &at,
              const row_weights<Shape::MOST_PARTS> &weights, row_group<Shape> *group)
{
    constexpr bool IS_ONE_GROUP = Shape::MOST_PARTS == Shape::GROUP;
    float sums[UNROLL][Shape::COUNT];
    float of[Shape::GROUP];
    find_weights<Shape>(args, 0, weights, of);
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
#pragma unroll
        for (int j = 0; j < Shape::COUNT; j++) {
            sums[i][j] = -0.0f;
        }
        add_vectors<Shape>(*group, i, of, weights.is_copy, sums[i]);
        if constexpr (IS_ONE_GROUP) {
            store_vector<Shape>(args, at, i, sums[i]);
        }
    }
    if constexpr (!IS_ONE_GROUP) {
        for (int part = Shape::GROUP; part < args.num_parts; part += Shape::GROUP) {
            load_group<Shape>(args, part, at, group);
            find_weights<Shape>(args, part, weights, of);
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                add_vectors<Shape>(*group, i, of, weights.is_copy, sums[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            store_vector<Shape>(args, at, i, sums[i]);
        }
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

template <typename Shape>
__global__ void
__launch_bounds__(Shape::THREADS, Shape::BLOCKS_PER_SM)
    merge_kernel(const __grid_constant__ args_of<Shape> args)
{
    ptx_wait_for_grids();
    const smla_merge_rows &rows = args.rows;
    const int row_threads = count_row_threads<Shape>(args);
    const int block_rows = Shape::THREADS / row_threads;
    const int64_t num_rows = count_tokens<Shape>(args) * rows.num_heads;
    const int64_t first = (int64_t)(threadIdx.x % row_threads) * Shape::COUNT;
    const int64_t wave = UNROLL * find_step<Shape>(args);
    int64_t block_row = (int64_t)blockIdx.x * block_rows;
    for (; block_row < num_rows; block_row += (int64_t)gridDim.x * block_rows) {
        const int64_t own = block_row + threadIdx.x / row_threads;
        const bool has_row = own < num_rows;
        if (!Shape::IS_STATES && !has_row) {
            break;
        }
        const int64_t row = has_row ? own : num_rows - 1;
        const int64_t token = smla_divide(row, args.num_heads);
        row_place at = {token, row - token * rows.num_heads, first};
        row_group<Shape> group;
        row_weights<Shape::MOST_PARTS> weights;
        if constexpr (Shape::IS_STATES) {
            load_group<Shape>(args, 0, at, &group);
            weights = weigh_states(args, at.token, at.head);
            __syncthreads(); /* lse may be that of a state: all of the row's threads have read it */
            if (!has_row) {
                continue;
            }
        } else {
            row_lses<Shape::MOST_PARTS> lses = load_lses(args, at.token, at.head);
            load_group<Shape>(args, 0, at, &group);
#pragma unroll
            for (float &lse : lses.of) {
                lse = normal_lse(lse);
            }
            weights = weigh_partials(args, at.head, lses);
        }
        merge_vectors<Shape>(args, at, weights, &group);
        /* The condition is the same for all threads of a row, which may exchange weights. */
        for (int64_t done = wave; done < rows.value_dim; done += wave) {
            at.start = done + first;
            load_group<Shape>(args, 0, at, &group);
            merge_vectors<Shape>(args, at, weights, &group);
        }
        if (first == 0 && (Shape::IS_STATES || rows.lse != NULL)) {
            rows.lse[at.token * rows.lse_stride_token + at.head * rows.lse_stride_head] =
                weights.lse;
        }
    }
}

/* ---- Table --------------------------------------------------------------------------------- */

template <int MOST_PARTS> struct merge_row {
    smla_float_type type;
    smla_float_type out_type;
    int32_t count; /* elements per vector */
    void (*kernel)(merge_args<MOST_PARTS>);
};

template <int TYPE, int OUT_TYPE, int COUNT, int MOST_PARTS>
constexpr auto
serve()
{
    return merge_row<MOST_PARTS>{(smla_float_type)TYPE, (smla_float_type)OUT_TYPE, COUNT,
                                 merge_kernel<merge_shape<TYPE, OUT_TYPE, COUNT, MOST_PARTS>>};
}

#define VECTORS_OF_ONE_TYPE(most_parts)                           \
    serve<SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 8, most_parts>(),     \
        serve<SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 8, most_parts>(), \
        serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 4, most_parts>()

#define ELEMENTS_OF_ONE_TYPE(most_parts)                          \
    serve<SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 1, most_parts>(),     \
        serve<SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 1, most_parts>(), \
        serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 1, most_parts>()

const merge_row<STATES> state_rows[] = {VECTORS_OF_ONE_TYPE(STATES), ELEMENTS_OF_ONE_TYPE(STATES)};

const merge_row<FEW_PARTS> few_rows[] = {
    VECTORS_OF_ONE_TYPE(FEW_PARTS),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 4, FEW_PARTS>(),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP16, 4, FEW_PARTS>(),
};

const merge_row<MANY_PARTS> many_rows[] = {
    VECTORS_OF_ONE_TYPE(MANY_PARTS),
    ELEMENTS_OF_ONE_TYPE(MANY_PARTS),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 4, MANY_PARTS>(),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 1, MANY_PARTS>(),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP16, 4, MANY_PARTS>(),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP16, 1, MANY_PARTS>(),
};

/* ---- Launcher ------------------------------------------------------------------------------ */

/* Elements per vector: 16 bytes of a part, or one element where some row is not aligned. */
int32_t
choose_count(const smla_merge_rows &rows, const smla_merge_part *parts, int64_t num_parts)
{
    const int64_t bytes = smla_float_bytes(rows.type);
    const int64_t out_strides = rows.out_stride_token | rows.out_stride_head;
    bool is_aligned = rows.value_dim * bytes % 16 == 0 &&
                      smla_is_multiple(rows.out, out_strides * smla_float_bytes(rows.out_type), 16);
    for (int64_t i = 0; is_aligned && i < num_parts; i++) {
        const int64_t strides = parts[i].out_stride_token | parts[i].out_stride_head;
        is_aligned = smla_is_multiple(parts[i].out, strides * bytes, 16);
    }
    return is_aligned ? 16 / (int32_t)bytes : 1;
}

bool
have_same_strides(const smla_merge_part *parts, int64_t num_parts)
{
    bool are_same = true;
    for (int64_t i = 1; i < num_parts; i++) {
        are_same = are_same && parts[i].out_stride_token == parts[0].out_stride_token &&
                   parts[i].out_stride_head == parts[0].out_stride_head &&
                   parts[i].lse_stride_token == parts[0].lse_stride_token &&
                   parts[i].lse_stride_head == parts[0].lse_stride_head;
    }
    return are_same;
}

/* The threads of a row of states: as many as it has vectors, at most a block. */
int32_t
choose_row_threads(int64_t value_dim, int32_t count, int32_t block_threads)
{
    int32_t threads = 1;
    while (threads < block_threads && threads * count * UNROLL < value_dim) {
        threads *= 2;
    }
    return threads;
}

template <int MOST_PARTS, int NUM_ROWS>
cudaError_t
launch_merge(const merge_row<MOST_PARTS> (&table)[NUM_ROWS], const smla_merge_rows &rows,
             const smla_merge_part *parts, int64_t num_parts, int32_t count, int64_t merged_tokens,
             const int32_t *num_tokens, smla_stream stream)
{
    constexpr int THREADS = merge_size<MOST_PARTS>::THREADS;
    if (rows.num_tokens == 0 || rows.num_heads == 0) {
        return cudaSuccess;
    }
    merge_args<MOST_PARTS> args = {rows,
                                   merged_tokens,
                                   {},
                                   (int32_t)num_parts,
                                   SMLA_WARP_LANES,
                                   smla_make_divisor(rows.num_heads),
                                   num_tokens};
    if (MOST_PARTS == STATES) {
        args.row_threads = choose_row_threads(rows.value_dim, count, THREADS);
    }
    for (int64_t i = 0; i < num_parts; i++) {
        args.parts[i] = parts[i];
    }
    const int64_t num_blocks =
        smla_count_parts(rows.num_tokens * rows.num_heads, THREADS / args.row_threads);
    for (const merge_row<MOST_PARTS> &row : table) {
        if (row.type == rows.type && row.out_type == rows.out_type && row.count == count) {
            return smla_launch(row.kernel, args, num_blocks, THREADS, 0, stream);
        }
    }
    return SMLA_NO_KERNEL;
}

} /* namespace */

cudaError_t
smla_cuda_launch_merge_attn_states(const smla_merge_params *p, const smla_cuda_device *)
{
    const int32_t count = choose_count(p->rows, p->parts, STATES);
    return launch_merge(state_rows, p->rows, p->parts, STATES, count, p->merged_tokens, NULL,
                        p->call.stream);
}

cudaError_t
smla_cuda_launch_merge_attn_partials(const smla_merge_partials_params *p, const smla_cuda_device *)
{
    return smla_cuda_launch_merge_parts(p, NULL);
}

cudaError_t
smla_cuda_launch_merge_parts(const smla_merge_partials_params *p, const int32_t *num_tokens)
{
    const int32_t count = choose_count(p->rows, p->parts, p->num_parts);
    const int64_t most = p->rows.num_tokens;
    const bool are_few =
        p->num_parts <= FEW_PARTS && count > 1 && have_same_strides(p->parts, p->num_parts);
    return are_few ? launch_merge(few_rows, p->rows, p->parts, p->num_parts, count, most,
                                  num_tokens, p->call.stream)
                   : launch_merge(many_rows, p->rows, p->parts, p->num_parts, count, most,
                                  num_tokens, p->call.stream);
}
