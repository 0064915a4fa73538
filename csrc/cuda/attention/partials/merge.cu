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
 *                partials  A warp. Lane i weighs part i, and part i + 32 where there are so many.
 *                          All lanes get the weights by shuffles. 8 parts are loaded at a time.
 * Roofline     Memory binds.
 *                states    2 rows read, 1 written, 3072 bytes for V 512 in bf16, 0.71 ns at 4.3
 *                          TB/s. While memory moves 48 bytes, 132 SMs of 128 lanes at 1.75 GHz
 *                          execute 330 instructions. A thread needs about 150 for them, with two
 *                          exponentials and a logarithm. Reached on an H200, V 512 in bf16: 4.3
 *                          TB/s, 100 % (2026-11-20, merge in `python -m sparse_mla bench --device
 *                          cuda --only bytes`, replayed without the copy); 88 % with 72 registers
 *                          and 3 blocks per SM instead of 64 and 4.
 *                partials  With 8 parts, V 512 in bf16, a row has 9252 bytes, 2.2 ns at 4.3 TB/s.
 *                          An SM has 16 warps, each with 8 KB in flight. Reached on an H200, 128 x
 *                          128 rows: 43.7 us, 81 % of the copy (2026-11-28, the same benchmark);
 *                          56 % with a thread per 8 values that weighs all parts itself. fp32
 *                          reaches 4.1 TB/s, so in bf16 instructions bind. They are as many per
 *                          row however few its values are: 1.3 TB/s with V 128.
 * Numerics     fp32. Products are added by fused multiplications, in the order of the parts, so two
 *              parts have the same bits as states and as partials. Nothing overflows, because the
 *              largest lse is taken off first; the sink's exponent takes it off first, too, because
 *              that difference is exact where it matters. A part with an lse of -inf or +inf is
 *              empty, and what its row holds does not count. If all parts are empty, the first is
 *              copied and lse is -inf, whatever the sink is. A row with one part keeps its bits
 *              where there is no sink, NaN too but in fp16.
 * Source       vLLM's merge_attn_states, for the convention of +inf.
 */
#include "core/attention/visible.h"
#include "cuda/attention/partials/part_rows.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

namespace {

enum {
    BLOCKS_PER_SM = 4, /* or more, so a thread has 64 registers at most, of partials 128 */
    UNROLL = 2,        /* vectors per part at a time */
};

template <int MOST_PARTS> constexpr int block_threads = MOST_PARTS == 2 ? 256 : 128;

/* TYPE, OUT_TYPE: smla_float_type. COUNT: elements per vector. STATES: there are two parts. */
template <int TYPE_, int OUT_TYPE_, int COUNT_, bool STATES_> struct merge_shape {
    static constexpr int TYPE = TYPE_;
    static constexpr int OUT_TYPE = OUT_TYPE_;
    static constexpr int COUNT = COUNT_;
    static constexpr bool STATES = STATES_;
    static constexpr int MOST_PARTS = STATES ? 2 : (int)SMLA_MAX_PARTS;
    static constexpr int GROUP = STATES ? 2 : 8; /* parts at a time */
    static constexpr int WORDS = TYPE == SMLA_FLOAT_FP32 ? COUNT : (COUNT + 1) / 2;
    static constexpr int THREADS = block_threads<MOST_PARTS>;
};

template <int MOST_PARTS> struct merge_args {
    smla_merge_rows rows;
    int64_t merged_tokens; /* states: tokens behind these have no side a */
    smla_merge_part parts[MOST_PARTS];
    int32_t num_parts;
    int32_t row_threads; /* a power of two; a warp's, where the parts are partials */
    smla_divisor num_heads;
    const int32_t *num_tokens; /* partials: tokens behind so many stay as they are; NULL: none */
};

template <typename Shape> using args_of = merge_args<Shape::MOST_PARTS>;

template <typename Shape>
__device__ __forceinline__ int64_t
count_tokens(const args_of<Shape> &args)
{
    const int64_t most = args.rows.num_tokens;
    return Shape::STATES || args.num_tokens == NULL
               ? most
               : smla_clamp_int64(__ldg(args.num_tokens), 0, most);
}

template <typename Shape>
__device__ __forceinline__ int
count_row_threads(const args_of<Shape> &args)
{
    return Shape::STATES ? args.row_threads : SMLA_WARP_LANES;
}

/* Whether there is no part `part`. */
template <typename Shape>
__device__ __forceinline__ bool
is_past(const args_of<Shape> &args, int part)
{
    return !Shape::STATES && part >= args.num_parts;
}

/* Where a thread works: a row, and its first value there. */
struct row_place {
    int64_t token;
    int64_t head;
    int64_t start;
};

/* ---- Weights ------------------------------------------------------------------------------- */

enum { NO_WEIGHT = -1 }; /* the weight of an empty part, whose row does not count */

/* A row's weights: those of both states, or a lane's share of them, parts `lane` and `lane` + 32 of
 * the partials. */
struct row_weights {
    float of[2];
    float lse;    /* the merged one */
    bool is_copy; /* the only part that counts has weight 1 */
};

/* The lse of an empty part is -inf. Some kernels write +inf for it. */
__device__ __forceinline__ float
read_lse(const smla_merge_part &part, int64_t token, int64_t head)
{
    const float lse = part.lse[token * part.lse_stride_token + head * part.lse_stride_head];
    return isinf(lse) ? -INFINITY : lse;
}

/* e^(sink - lse), by which the sum of all weights grows. lse is top + rest. */
__device__ __forceinline__ float
weigh_sink(const smla_merge_rows &rows, int64_t head, float top, float rest)
{
    if (rows.sinks.values == NULL || isinf(top)) {
        return 0.0f;
    }
    return expf(__ldg(rows.sinks.values + head * rows.sinks.stride) - top - rest);
}

/* Weighs a row's states. If both are empty, a counts, unless b is all. */
__device__ __forceinline__ row_weights
weigh_states(const merge_args<2> &args, int64_t token, int64_t head)
{
    const bool takes_b = token >= args.merged_tokens;
    const float a = takes_b ? -INFINITY : read_lse(args.parts[0], token, head);
    const float b = read_lse(args.parts[1], token, head);
    const bool is_b_alone = isinf(a) && (takes_b || !isinf(b));
    if (is_b_alone || isinf(b)) {
        const float lse = is_b_alone ? b : a;
        const float weight = 1.0f / (1.0f + weigh_sink(args.rows, head, lse, 0.0f));
        return {{is_b_alone ? (float)NO_WEIGHT : weight, is_b_alone ? weight : (float)NO_WEIGHT},
                lse,
                weight == 1.0f};
    }
    const float lower = expf(-fabsf(a - b)); /* weight of the smaller side if the larger has 1 */
    const float top = fmaxf(a, b);
    const float rest = log1pf(lower);
    const float weight = 1.0f / ((1.0f + lower) * (1.0f + weigh_sink(args.rows, head, top, rest)));
    const float lower_weight = lower * weight;
    return {{a >= b ? weight : lower_weight, a >= b ? lower_weight : weight}, top + rest, false};
}

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

/* Weighs a row's partials. If all are empty, the first one counts. */
__device__ __forceinline__ row_weights
weigh_partials(const merge_args<SMLA_MAX_PARTS> &args, int64_t token, int64_t head)
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
    row_weights weights = {{NO_WEIGHT, NO_WEIGHT}, top + rest, num_full < 2 && highest == 1.0f};
#pragma unroll
    for (int k = 0; k < 2; k++) {
        weights.of[k] = isinf(lse[k]) ? (float)NO_WEIGHT : power[k] * highest;
    }
    weights.of[0] = num_full == 0 && lane == 0 ? 1.0f : weights.of[0];
    return weights;
}

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
        const smla_merge_part &from = args.parts[part + k];
        const int64_t row = at.token * from.out_stride_token + at.head * from.out_stride_head;
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int64_t value = at.start + i * find_step<Shape>(args);
            if (value < args.rows.value_dim) {
                load_bits<Shape::TYPE, Shape::COUNT>(from.out, row + value, group->words[k][i]);
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

/* Adds the parts from `part` on. The sums begin with -0, which keeps the sign of a first zero. No
 * product with an empty part, because its row may hold NaN. */
template <typename Shape>
__device__ __forceinline__ void
add_group(const args_of<Shape> &args, int part, const row_group<Shape> &group,
          const row_weights &weights, float sums[UNROLL][Shape::COUNT])
{
#pragma unroll
    for (int k = 0; k < Shape::GROUP; k++) {
        if (is_past<Shape>(args, part + k)) {
            break;
        }
        const float weight = Shape::STATES ? weights.of[k % 2] : from_lane(weights.of, part + k);
        if (weight == (float)NO_WEIGHT) { /* in all threads of the row */
            continue;
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
#pragma unroll
            for (int j = 0; j < Shape::COUNT; j++) {
                const float value = take_value<Shape::TYPE>(group.words[k][i], j);
                sums[i][j] = weights.is_copy ? value : fmaf(weight, value, sums[i][j]);
            }
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

/* Adds all parts of a thread's vectors, and stores them. `group` has the first ones. */
template <typename Shape>
__device__ __forceinline__ void
merge_vectors(const args_of<Shape> &args, const row_place &at, const row_weights &weights,
              row_group<Shape> *group)
{
    const smla_merge_rows &rows = args.rows;
    float sums[UNROLL][Shape::COUNT];
#pragma unroll
    for (int i = 0; i < UNROLL * Shape::COUNT; i++) {
        sums[i / Shape::COUNT][i % Shape::COUNT] = -0.0f;
    }
    add_group<Shape>(args, 0, *group, weights, sums);
    for (int part = Shape::GROUP; !Shape::STATES && part < args.num_parts; part += Shape::GROUP) {
        load_group<Shape>(args, part, at, group);
        add_group<Shape>(args, part, *group, weights, sums);
    }
    const int64_t row = at.token * rows.out_stride_token + at.head * rows.out_stride_head;
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int64_t value = at.start + i * find_step<Shape>(args);
        if (value < rows.value_dim) {
            store_values<Shape::OUT_TYPE, Shape::COUNT>(rows.out, row + value, sums[i]);
        }
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

template <typename Shape>
__global__ void
__launch_bounds__(Shape::THREADS, BLOCKS_PER_SM)
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
        if (!Shape::STATES && !has_row) {
            break;
        }
        const int64_t row = has_row ? own : num_rows - 1;
        const int64_t token = smla_divide(row, args.num_heads);
        row_place at = {token, row - token * rows.num_heads, first};
        row_group<Shape> group;
        load_group<Shape>(args, 0, at, &group);
        row_weights weights;
        if constexpr (Shape::STATES) {
            weights = weigh_states(args, at.token, at.head);
            __syncthreads(); /* lse may be that of a state: all of the row's threads have read it */
            if (!has_row) {
                continue;
            }
        } else {
            weights = weigh_partials(args, at.token, at.head);
        }
        merge_vectors<Shape>(args, at, weights, &group);
        /* The condition is the same for all threads of a row, which may exchange weights. */
        for (int64_t done = wave; done < rows.value_dim; done += wave) {
            at.start = done + first;
            load_group<Shape>(args, 0, at, &group);
            merge_vectors<Shape>(args, at, weights, &group);
        }
        if (first == 0 && (Shape::STATES || rows.lse != NULL)) {
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

template <int TYPE, int OUT_TYPE, int COUNT, bool STATES>
constexpr auto
serve()
{
    typedef merge_shape<TYPE, OUT_TYPE, COUNT, STATES> Shape;
    return merge_row<Shape::MOST_PARTS>{(smla_float_type)TYPE, (smla_float_type)OUT_TYPE, COUNT,
                                        merge_kernel<Shape>};
}

#define ROWS_OF_ONE_TYPE(states)                              \
    serve<SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 8, states>(),     \
        serve<SMLA_FLOAT_BF16, SMLA_FLOAT_BF16, 1, states>(), \
        serve<SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 8, states>(), \
        serve<SMLA_FLOAT_FP16, SMLA_FLOAT_FP16, 1, states>(), \
        serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 4, states>(), \
        serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP32, 1, states>()

const merge_row<2> state_rows[] = {ROWS_OF_ONE_TYPE(true)};

const merge_row<SMLA_MAX_PARTS> partial_rows[] = {
    ROWS_OF_ONE_TYPE(false),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 4, false>(),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_BF16, 1, false>(),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP16, 4, false>(),
    serve<SMLA_FLOAT_FP32, SMLA_FLOAT_FP16, 1, false>(),
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
             const smla_merge_part *parts, int64_t num_parts, int64_t merged_tokens,
             const int32_t *num_tokens, smla_stream stream)
{
    constexpr int THREADS = block_threads<MOST_PARTS>;
    if (rows.num_tokens == 0 || rows.num_heads == 0) {
        return cudaSuccess;
    }
    const int32_t count = choose_count(rows, parts, num_parts);
    merge_args<MOST_PARTS> args = {rows,
                                   merged_tokens,
                                   {},
                                   (int32_t)num_parts,
                                   SMLA_WARP_LANES,
                                   smla_make_divisor(rows.num_heads),
                                   num_tokens};
    if (MOST_PARTS == 2) {
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
    return launch_merge(state_rows, p->rows, p->parts, 2, p->merged_tokens, NULL, p->call.stream);
}

cudaError_t
smla_cuda_launch_merge_attn_partials(const smla_merge_partials_params *p, const smla_cuda_device *)
{
    return smla_cuda_launch_merge_parts(p, NULL);
}

cudaError_t
smla_cuda_launch_merge_parts(const smla_merge_partials_params *p, const int32_t *num_tokens)
{
    return launch_merge(partial_rows, p->rows, p->parts, p->num_parts, p->rows.num_tokens,
                        num_tokens, p->call.stream);
}
