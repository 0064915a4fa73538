/* logits_queries.cuh: the warps of logits_sm90.cu that bring queries, and compute their mixes.
 *
 * relu(d) is (d + |d|) / 2, so that a logit is half of
 *     sum_h w_h (q_h . key) + sum_h w_h |q_h . key| = (sum_h w_h q_h) . key + sum_h w_h |q_h . key|
 * The first sum takes one dot product with the mix, sum_h w_h q_h, in place of an addition per head
 * and key. A mix is four rows of e4m3, which follow the token's heads as columns of the product:
 *     mix = unit * (row 0 + row 1 / 16 + row 2 / 256 + row 3 / 4096)
 * Each row is the rounded rest that the rows before it leave, so that 16 bits are kept. A token is
 * `plain` if four rows cannot hold its mix that well, or if its weights are huge, tiny or NaN. For
 * each of its heads, d + |d| is added instead. Huge and tiny weights are first multiplied with a
 * power of two, by which its logits are divided, because scores may leave fp32 where logits, which
 * the scales of keys make, do not.
 */
#pragma once

#include "cuda/indexer/logits_work_items.cuh"
#include "cuda/ptx/widen_e4m3.cuh"

namespace {

enum {
    BARRIER_QUERIES = 1,         /* barrier of all query threads */
    MIX_STEP = 16,               /* ratio of the units of a row and the next */
    MOST_MIX = (127 + 80) << 23, /* bits of 2^80: larger mixes make plain tokens */
    /* Bits of 2^64 and 2^-64. Weights beyond them are first multiplied with a power of two. */
    MOST_WEIGHT = (127 + 64) << 23,
    LEAST_WEIGHT = (127 - 64) << 23,
    LEAST_UNIT = 127 - 100, /* least exponent of a unit, biased as in fp32 */
    /* Exponent bits between a mix and its unit: a mix is below 256 units, and e4m3 reaches 448. */
    UNIT_STEP = 7,
};

/* The index of a column's weight in shared memory. A lane's four of 16 columns, 2 c, 2 c + 1, 2 c +
 * 8 and 2 c + 9, get neighbouring indices. */
__device__ __forceinline__ int
weight_index(int column)
{
    return (column & ~15) | (column >> 1 & 3) << 2 | (column >> 3 & 1) << 1 | (column & 1);
}

/* The row of shared memory for a head of the block; the mixes of a group follow its heads. */
template <typename Shape>
__device__ __forceinline__ int
head_row(int head)
{
    return head + head / Shape::COLUMNS * (Shape::GROUP_ROWS - Shape::COLUMNS);
}

/* Copies the queries and weights of a task. */
template <typename Shape>
__device__ __forceinline__ void
bring_queries(const smla_logits_params &p, int64_t first_token, int num_tokens, int slot,
              logits_memory<Shape> *shared)
{
    const int thread = (int)threadIdx.x - CONSUMERS;
    const int chunk = thread % ROW_CHUNKS;
    const int num_heads = num_tokens * Shape::HEADS;
    const uint32_t to = ptx_shared_address(shared->queries[slot]);
#pragma unroll 2
    for (int head = thread / ROW_CHUNKS; head < num_heads;
         head += Shape::QUERY_THREADS / ROW_CHUNKS) {
        const uint8_t *const from = p.q + (first_token + head / Shape::HEADS) * p.q_stride_token +
                                    head % Shape::HEADS * p.q_stride_head + chunk * CHUNK_BYTES;
        ptx_cp_async_16_or_zero(to + head_row<Shape>(head) * ROW_BYTES +
                                    (chunk ^ (head & 7)) * CHUNK_BYTES,
                                from, true);
    }
#pragma unroll 1
    for (int head = thread; head < num_heads; head += Shape::QUERY_THREADS) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->weights[slot][weight_index(head)]),
                               p.weights +
                                   (first_token + head / Shape::HEADS) * p.weights_stride_token +
                                   head % Shape::HEADS,
                               true);
    }
}

/* The index of a query thread among those that compute the same mix. */
template <typename Shape>
__device__ __forceinline__ int
mix_thread(void)
{
    return ((int)threadIdx.x - CONSUMERS) % Shape::MIX_THREADS;
}

/* The offset of a thread's values in the row that is `row` rows after a multiple of eight rows. */
template <typename Shape>
__device__ __forceinline__ uint32_t
offset_of_values(int row)
{
    const int first = mix_thread<Shape>() * Shape::MIX_VALUES;
    return (uint32_t)(row * ROW_BYTES + (first / CHUNK_BYTES ^ (row & 7)) * CHUNK_BYTES +
                      first % CHUNK_BYTES);
}

/* Computes the thread's values of the mixes of neighbouring tokens. Loads of 16 heads are under way
 * at a time. */
template <typename Shape>
__device__ __forceinline__ void
mix_heads(int slot, int token, const logits_memory<Shape> *shared,
          float (&mixes)[Shape::MIXED_AT_ONCE][Shape::MIX_VALUES])
{
    enum { STEP = 16 };
    const int first = token * Shape::HEADS;
    const uint32_t from = ptx_shared_address(shared->queries[slot][head_row<Shape>(first)]);
    const float4 *const fours = (const float4 *)&shared->weights[slot][first];
#pragma unroll
    for (int t = 0; t < Shape::MIXED_AT_ONCE; t++) {
#pragma unroll
        for (int v = 0; v < Shape::MIX_VALUES; v++) {
            mixes[t][v] = 0.0f;
        }
    }
#pragma unroll 1
    for (int base = 0; base < Shape::HEADS; base += STEP) {
        uint32_t values[Shape::MIXED_AT_ONCE][STEP];
        float4 weights[Shape::MIXED_AT_ONCE][STEP / 4];
#pragma unroll
        for (int t = 0; t < Shape::MIXED_AT_ONCE; t++) {
            const int head = t * Shape::HEADS + base;
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                const uint32_t at =
                    from + (uint32_t)(head * ROW_BYTES) + offset_of_values<Shape>(i);
                values[t][i] =
                    Shape::MIX_VALUES == 2 ? ptx_load_shared_2(at) : ptx_load_shared_4(at);
            }
#pragma unroll
            for (int i = 0; i < STEP / 4; i++) {
                weights[t][i] = fours[head / 4 + i];
            }
        }
#pragma unroll
        for (int i = 0; i < STEP; i++) {
#pragma unroll
            for (int t = 0; t < Shape::MIXED_AT_ONCE; t++) {
                const int index = weight_index(i);
                const float4 four = weights[t][index / 4];
                const float weight = index % 4 == 0   ? four.x
                                     : index % 4 == 1 ? four.y
                                     : index % 4 == 2 ? four.z
                                                      : four.w;
#pragma unroll
                for (int v = 0; v < Shape::MIX_VALUES; v += 2) {
                    float q[2];
                    ptx_cvt_f32x2_e4m3x2(values[t][i] >> 8 * v, q);
                    mixes[t][v] = fmaf(weight, q[0], mixes[t][v]);
                    mixes[t][v + 1] = fmaf(weight, q[1], mixes[t][v + 1]);
                }
            }
        }
    }
}

/* Writes the rows of a mix, in units of `1 / inverse`. Returns whether they hold each value well
 * enough: within 2^-12 of it. */
template <typename Shape>
__device__ __forceinline__ bool
write_mix(const float mix[Shape::MIX_VALUES], float inverse, uint8_t *rows)
{
    float rest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float limits[Shape::MIX_VALUES];
#pragma unroll
    for (int v = 0; v < Shape::MIX_VALUES; v++) {
        rest[v] = mix[v] * inverse;
        limits[v] = 16.0f * fabsf(rest[v]);
    }
    /* The mixes of a pair of tokens are eight rows. */
    const uint32_t to = ptx_shared_address(rows) & ~(8u * ROW_BYTES - 1);
    const int first_row = (int)(ptx_shared_address(rows) / ROW_BYTES % 8);
#pragma unroll
    for (int i = 0; i < MIX_ROWS; i++) {
        const uint32_t kept = smla_floats_to_e4m3x4(rest);
#pragma unroll
        for (int v = 0; v < Shape::MIX_VALUES; v += 2) {
            float pair[2];
            ptx_cvt_f32x2_e4m3x2(kept >> 8 * v, pair);
            rest[v] = (rest[v] - pair[0]) * MIX_STEP;
            rest[v + 1] = (rest[v + 1] - pair[1]) * MIX_STEP;
        }
        const uint32_t at = to + offset_of_values<Shape>(first_row + i);
        if constexpr (Shape::MIX_VALUES == 2) {
            ptx_store_shared_2(at, (uint16_t)kept);
        } else {
            ptx_store_shared_4(at, kept);
        }
    }
    bool is_good = true;
#pragma unroll
    for (int v = 0; v < Shape::MIX_VALUES; v++) {
        is_good = is_good && fabsf(rest[v]) <= limits[v];
    }
    return is_good;
}

/* The bits of the largest magnitude among a warp's values; NaN and infinity are above all
 * others. */
template <int COUNT>
__device__ __forceinline__ uint32_t
largest_bits(const float (&values)[COUNT])
{
    uint32_t largest = 0;
#pragma unroll
    for (int v = 0; v < COUNT; v++) {
        largest = max(largest, smla_float_bits(fabsf(values[v])));
    }
    return __reduce_max_sync(ALL_LANES, largest);
}

/* Multiplies a token's weights after all threads of the mixer have read them. */
template <typename Shape>
__device__ __forceinline__ void
multiply_weights(float factor, float *weights)
{
    __syncwarp();
    for (int head = mix_thread<Shape>(); head < Shape::HEADS; head += Shape::MIX_THREADS) {
        weights[head] *= factor;
    }
}

/* Computes the mixes of neighbouring tokens of the block, by the threads of one mixer. Only tokens
 * below `num_tokens` count. */
template <typename Shape>
__device__ __forceinline__ void
add_mixes_of(int slot, int token, int num_tokens, logits_memory<Shape> *shared)
{
    constexpr int COUNT = Shape::MIXED_AT_ONCE;
    constexpr bool IS_WARP = Shape::MIX_THREADS == SMLA_WARP_LANES;
    const int thread = mix_thread<Shape>();
    logits_task<Shape> *const task = &shared->tasks[slot];
    constexpr int OWN_WEIGHTS = (Shape::HEADS + Shape::MIX_THREADS - 1) / Shape::MIX_THREADS;
    uint2(*const largest)[2] = shared->largest[token / COUNT % 2];
    float mixes[COUNT][Shape::MIX_VALUES];
    uint32_t bits[COUNT];    /* the mix's largest value */
    uint32_t weights[COUNT]; /* the largest weight */
    mix_heads<Shape>(slot, token, shared, mixes);
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        float own[OWN_WEIGHTS] = {};
#pragma unroll
        for (int i = 0; i < OWN_WEIGHTS; i++) {
            const int head = i * Shape::MIX_THREADS + thread;
            own[i] = head < Shape::HEADS ? shared->weights[slot][(token + t) * Shape::HEADS + head]
                                         : 0.0f;
        }
        bits[t] = largest_bits(mixes[t]);
        weights[t] = largest_bits(own);
        if (!IS_WARP && thread % SMLA_WARP_LANES == 0) {
            largest[t][thread / SMLA_WARP_LANES] = make_uint2(bits[t], weights[t]);
        }
    }
    if constexpr (!IS_WARP) {
        ptx_barrier(BARRIER_QUERIES, Shape::QUERY_THREADS); /* all threads see `largest` */
    }
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        const int at = token + t;
        if (!IS_WARP) {
            bits[t] = max(largest[t][0].x, largest[t][1].x);
            weights[t] = max(largest[t][0].y, largest[t][1].y);
        }
        const bool is_huge = weights[t] > (uint32_t)MOST_WEIGHT;
        const bool is_tiny = weights[t] < (uint32_t)LEAST_WEIGHT && weights[t] != 0;
        const bool is_plain = is_huge || is_tiny || bits[t] > (uint32_t)MOST_MIX;
        const float power = is_huge ? 0x1p64f : is_tiny ? 0x1p-64f : 0.0f;
        const int exponent = max((int)(bits[t] >> 23) - UNIT_STEP, (int)LEAST_UNIT);
        const int row =
            at / Shape::TOKENS * Shape::GROUP_ROWS + Shape::COLUMNS + at % Shape::TOKENS * MIX_ROWS;
        const float inverse = is_plain ? 0.0f : __int_as_float((254 - exponent) << 23);
        float given[Shape::MIX_VALUES];
#pragma unroll
        for (int v = 0; v < Shape::MIX_VALUES; v++) {
            given[v] = is_plain ? 0.0f : mixes[t][v];
        }
        const bool is_good = write_mix<Shape>(given, inverse, shared->queries[slot][row]);
        if ((is_plain || !is_good) && at < num_tokens) {
            atomicOr(&task->plain, 1u << at);
        }
        if (power != 0.0f && at < num_tokens) {
            multiply_weights<Shape>(is_huge ? 0x1p-64f : 0x1p64f,
                                    &shared->weights[slot][at * Shape::HEADS]);
        }
        if (thread == 0 && at < num_tokens) {
            task->units[at] = is_plain ? power : __int_as_float(exponent << 23);
            if (power != 0.0f) {
                atomicOr(&task->scaled, 1u << at);
            }
        }
    }
}

/* Starts the copies of the queries of tokens that may become task number `task`. */
template <typename Shape>
__device__ __forceinline__ void
ask_for_queries(const logits_args &args, int64_t first_token, int num_tokens, uint32_t task,
                logits_memory<Shape> *shared)
{
    const int slot = (int)(task % SLOTS);
    ptx_mbarrier_wait(ptx_shared_address(&shared->q_empty[slot]), task / SLOTS % 2 ^ 1);
    ptx_cp_async_wait_all(); /* former copies, of queries that no task needs, are done */
    bring_queries(args.p, first_token, num_tokens, slot, shared);
}

/* Gives a task to the consumers, after its queries are copied. A task without tokens tells them to
 * stop. */
template <typename Shape>
__device__ __forceinline__ void
hand_over(const logits_part &part, const logits_run &run, int scale_shift, uint32_t task,
          logits_memory<Shape> *shared)
{
    const int slot = (int)(task % SLOTS);
    const int thread = (int)threadIdx.x - CONSUMERS;
    const int mixer = thread / Shape::MIX_THREADS;
    logits_task<Shape> *const to = &shared->tasks[slot];
    if (thread == 0) {
        to->first_token = run.first_token;
        to->num_tokens = run.num_tokens;
        to->num_tiles = run.num_tiles;
        to->first = part.tile * TILE_KEYS;
        to->shift = scale_shift;
        to->plain = 0;
        to->scaled = 0;
    }
    if (thread < run.num_tokens) {
        to->contexts[thread] = run.context;
    }
    ptx_cp_async_wait_all();
    /* All queries and weights are in shared memory. */
    ptx_barrier(BARRIER_QUERIES, Shape::QUERY_THREADS);
#pragma unroll 1
    for (int token = mixer * Shape::MIXED_AT_ONCE; token < run.num_tokens;
         token += Shape::MIXERS * Shape::MIXED_AT_ONCE) {
        add_mixes_of<Shape>(slot, token, run.num_tokens, shared);
    }
    ptx_fence_async_shared(); /* the thread's copies and mixes are visible to wgmma */
    ptx_mbarrier_arrive(ptx_shared_address(&shared->q_full[slot]), true);
}

/* Fills the columns without keys. They are cut into work items that do not depend on which CTA has
 * the keys before them, so any CTA may fill them. Each takes every gridDim.x-th item. */
template <typename Shape>
__device__ __forceinline__ void
fill_work_items(const sm90_args &all)
{
    const logits_args &args = all.args;
#pragma unroll 1
    for (int64_t number = blockIdx.x; number < args.num_work_items; number += gridDim.x) {
        const int64_t chunk = smla_divide(number, all.blocks);
        const logits_part part =
            part_of_block<Shape>(all, (int32_t)(number - chunk * all.plan.token_blocks));
        const int64_t first = chunk * args.chunk_columns;
        fill_rest(args.p,
                  logits_work_item{part.first_token, part.end_token, first,
                                   smaller_of(first + args.chunk_columns, args.p.num_columns)},
                  (int)threadIdx.x - CONSUMERS, Shape::QUERY_THREADS);
    }
}

template <typename Shape>
__device__ __forceinline__ void
copy_queries(const sm90_args &all, logits_memory<Shape> *shared)
{
    const logits_args &args = all.args;
    const bool has_shifts = Shape::HAS_MAPS && !args.p.has_pages;
    bool is_started = false;
    uint32_t tasks = 0;
    logits_walk walk = start_walk<Shape>(shared);
    logits_part part = {};
    /* The last task tells the consumers to stop. It takes the same path as others, so that no other
     * code has to be fetched. */
    for (bool is_end = false; !is_end;) {
        is_end = !next_part<Shape>(all, &walk, &part);
        int32_t token = part.first_token;
#pragma unroll 1
        do {
            logits_run run = {};
            await_start<Shape>(&is_started);
            /* Start the copies before it is known which tokens have the same keys. */
            ask_for_queries(args, token, is_end ? 0 : part.end_token - token, tasks, shared);
            if (!is_end) {
                run = find_run<Shape>(all, part, token);
            }
            if (run.num_tiles > 0 || is_end) {
                hand_over(part, run, has_shifts ? run.source & (SCALE_ALIGN - 1) : 0, tasks,
                          shared);
                tasks++;
            }
            token += run.num_tokens;
        } while (!is_end && token < part.end_token);
    }
    if (!args.p.leaves_rest) {
        fill_work_items<Shape>(all);
    }
}

} // namespace
