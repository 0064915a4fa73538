/* logits_queries.cuh: the warps of logits_sm90.cu that bring queries, and work out their mixes.
 *
 * relu(d) is (d + |d|) / 2, so that a logit is half of
 *     sum_h w_h (q_h . key) + sum_h w_h |q_h . key| = (sum_h w_h q_h) . key + sum_h w_h |q_h . key|
 * The first sum takes one dot product with the mix, sum_h w_h q_h, in place of an addition per head
 * and key. A mix is four rows of e4m3, which follow the token's heads as columns of the product:
 *     mix = unit * (row 0 + row 1 / 16 + row 2 / 256 + row 3 / 4096)
 * A row is what the rows before leave, rounded, so that 16 bits are kept. A token whose mix cannot
 * be had that well, or whose weights are huge or NaN, is `plain`: its terms are d + |d|.
 */
#pragma once

#include "cuda/indexer/logits_works.cuh"
#include "cuda/ptx/widen_e4m3.cuh"

namespace {

enum {
    BARRIER_QUERIES = 1,
    MIX_STEP = 16,               /* ratio of two rows' units */
    MOST_MIX = (127 + 80) << 23, /* bits of 2^80: larger mixes make plain tokens */
    MOST_WEIGHT = (127 + 64) << 23,
    LEAST_UNIT = 127 - 100, /* exponents as fp32 has them */
    UNIT_STEP = 7,          /* a mix is below 256 units, and e4m3 reaches 448 */
};

/* Where the weight of a column is: a lane's four of 16 columns, 2 c, 2 c + 1, 2 c + 8 and 2 c + 9,
 * follow each other. */
__device__ __forceinline__ int
weight_place(int column)
{
    return (column & ~15) | (column >> 1 & 3) << 2 | (column >> 3 & 1) << 1 | (column & 1);
}

/* The row of shared memory for a head of the block; mixes lie between groups. */
template <typename Shape>
__device__ __forceinline__ int
head_row(int head)
{
    return head + head / Shape::COLUMNS * (Shape::GROUP_ROWS - Shape::COLUMNS);
}

/* Brings the queries and weights of an item. */
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
    for (int head = thread / ROW_CHUNKS; head < num_heads; head += QUERY_THREADS / ROW_CHUNKS) {
        const uint8_t *const from = p.q + (first_token + head / Shape::HEADS) * p.q_stride_token +
                                    head % Shape::HEADS * p.q_stride_head + chunk * CHUNK_BYTES;
        ptx_cp_async_16_or_zero(to + head_row<Shape>(head) * ROW_BYTES +
                                    (chunk ^ (head & 7)) * CHUNK_BYTES,
                                from, true);
    }
#pragma unroll 1
    for (int head = thread; head < num_heads; head += QUERY_THREADS) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->weights[slot][weight_place(head)]),
                               p.weights +
                                   (first_token + head / Shape::HEADS) * p.weights_stride_token +
                                   head % Shape::HEADS,
                               true);
    }
}

/* The thread's two values of the mixes of tokens that follow each other. Loads of 16 heads are
 * under way at a time. */
template <typename Shape>
__device__ __forceinline__ void
mix_heads(int slot, int token, const logits_memory<Shape> *shared,
          float (&mixes)[Shape::MIXED_AT_ONCE][2])
{
    enum { STEP = 16 };
    const int thread = (int)threadIdx.x - CONSUMERS;
    const int first = token * Shape::HEADS;
    const uint32_t from = ptx_shared_address(shared->queries[slot][head_row<Shape>(first)]) +
                          thread % (CHUNK_BYTES / 2) * 2;
    const float4 *const fours = (const float4 *)&shared->weights[slot][first];
#pragma unroll
    for (int t = 0; t < Shape::MIXED_AT_ONCE; t++) {
        mixes[t][0] = mixes[t][1] = 0.0f;
    }
#pragma unroll 1
    for (int base = 0; base < Shape::HEADS; base += STEP) {
        uint32_t pairs[Shape::MIXED_AT_ONCE][STEP];
        float4 weights[Shape::MIXED_AT_ONCE][STEP / 4];
#pragma unroll
        for (int t = 0; t < Shape::MIXED_AT_ONCE; t++) {
            const int head = t * Shape::HEADS + base;
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                pairs[t][i] =
                    ptx_load_shared_2(from + (head + i) * ROW_BYTES +
                                      (thread / (CHUNK_BYTES / 2) ^ (i & 7)) * CHUNK_BYTES);
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
                const int place = weight_place(i);
                const float4 four = weights[t][place / 4];
                const float weight = place % 4 == 0   ? four.x
                                     : place % 4 == 1 ? four.y
                                     : place % 4 == 2 ? four.z
                                                      : four.w;
                float q[2];
                ptx_cvt_f32x2_e4m3x2(pairs[t][i], q);
                mixes[t][0] = fmaf(weight, q[0], mixes[t][0]);
                mixes[t][1] = fmaf(weight, q[1], mixes[t][1]);
            }
        }
    }
}

/* Writes the rows of a mix, in units of `1 / inverse`. Returns whether they hold it well enough:
 * within 2^-12, by value. */
template <typename Shape>
__device__ __forceinline__ bool
write_mix(const float mix[2], float inverse, uint32_t rows)
{
    const int thread = (int)threadIdx.x - CONSUMERS;
    float rest[2] = {mix[0] * inverse, mix[1] * inverse};
    const float limits[2] = {16.0f * fabsf(rest[0]), 16.0f * fabsf(rest[1])};
#pragma unroll
    for (int i = 0; i < MIX_ROWS; i++) {
        const float values[4] = {rest[0], rest[1], 0.0f, 0.0f};
        const uint32_t pair = smla_floats_to_e4m3x4(values);
        float kept[2];
        ptx_cvt_f32x2_e4m3x2(pair, kept);
        rest[0] = (rest[0] - kept[0]) * MIX_STEP;
        rest[1] = (rest[1] - kept[1]) * MIX_STEP;
        const uint32_t row = rows / ROW_BYTES + i;
        ptx_store_shared_2(rows + i * ROW_BYTES +
                               (thread / (CHUNK_BYTES / 2) ^ (row & 7)) * CHUNK_BYTES +
                               thread % (CHUNK_BYTES / 2) * 2,
                           (uint16_t)pair);
    }
    return fabsf(rest[0]) <= limits[0] && fabsf(rest[1]) <= limits[1];
}

/* The largest of the bits of two values; NaN and infinity are above all others. */
__device__ __forceinline__ uint32_t
largest_bits(const float values[2])
{
    return __reduce_max_sync(ALL_LANES, max(smla_float_bits(fabsf(values[0])),
                                            smla_float_bits(fabsf(values[1]))));
}

/* Works out the mixes of tokens of the block that follow each other, by all query threads. */
template <typename Shape>
__device__ __forceinline__ void
add_mixes_of(int slot, int token, int num_tokens, logits_memory<Shape> *shared)
{
    constexpr int COUNT = Shape::MIXED_AT_ONCE;
    const int thread = (int)threadIdx.x - CONSUMERS;
    logits_item<Shape> *const item = &shared->items[slot];
    uint32_t (*const largest)[2] = shared->largest[token / COUNT % 2];
    float mixes[COUNT][2];
    mix_heads<Shape>(slot, token, shared, mixes);
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        const float weight = thread < Shape::HEADS
                                 ? shared->weights[slot][(token + t) * Shape::HEADS + thread]
                                 : 0.0f;
        const bool is_huge = !(fabsf(weight) <= __int_as_float(MOST_WEIGHT));
        const uint32_t bits = largest_bits(mixes[t]);
        const bool any_is_huge = __any_sync(ALL_LANES, is_huge);
        if (thread % SMLA_WARP_LANES == 0) {
            largest[t][thread / SMLA_WARP_LANES] = any_is_huge ? 0xFFFFFFFFu : bits;
        }
    }
    ptx_barrier(BARRIER_QUERIES, QUERY_THREADS); /* all have `largest` */
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        const int at = token + t;
        const uint32_t bits = max(largest[t][0], largest[t][1]);
        const bool is_plain = bits > (uint32_t)MOST_MIX;
        const int exponent = max((int)(bits >> 23) - UNIT_STEP, (int)LEAST_UNIT);
        const int row =
            at / Shape::TOKENS * Shape::GROUP_ROWS + Shape::COLUMNS + at % Shape::TOKENS * MIX_ROWS;
        const float inverse = is_plain ? 0.0f : __int_as_float((254 - exponent) << 23);
        const float given[2] = {is_plain ? 0.0f : mixes[t][0], is_plain ? 0.0f : mixes[t][1]};
        const bool is_good =
            write_mix<Shape>(given, inverse, ptx_shared_address(shared->queries[slot][row]));
        if ((is_plain || !is_good) && at < num_tokens) {
            atomicOr(&item->plain, 1u << at);
        }
        if (thread == 0) {
            item->units[at] = is_plain ? 0.0f : __int_as_float(exponent << 23);
        }
    }
}

/* Asks for the queries of tokens that may become item number `item`. */
template <typename Shape>
__device__ __forceinline__ void
ask_for_queries(const logits_args &args, int64_t first_token, int num_tokens, uint32_t item,
                logits_memory<Shape> *shared)
{
    const int slot = (int)(item % SLOTS);
    ptx_mbarrier_wait(ptx_shared_address(&shared->q_empty[slot]), item / SLOTS % 2 ^ 1);
    ptx_cp_async_wait_all(); /* queries that no item wanted */
    bring_queries(args.p, first_token, num_tokens, slot, shared);
}

/* Hands an item with `num_tokens` tokens over, whose queries were asked for; without tokens it is
 * the end. */
template <typename Shape>
__device__ __forceinline__ void
hand_over(const logits_args &args, const logits_work &work, const logits_run &run, int scale_shift,
          uint32_t item, logits_memory<Shape> *shared)
{
    const int num_tokens = (int)(run.end_token - run.first_token);
    const int slot = (int)(item % SLOTS);
    if (threadIdx.x == CONSUMERS) {
        logits_item<Shape> *const to = &shared->items[slot];
        to->first_token = run.first_token;
        to->num_tokens = num_tokens;
        to->num_tiles = run.num_tiles;
        to->first = (int32_t)work.first;
        to->shift = scale_shift;
        to->plain = 0;
        for (int i = 0; i < num_tokens; i++) {
            to->contexts[i] =
                (int32_t)smaller_of(context_of(args.p, run.first_token + i), work.end);
        }
    }
    ptx_cp_async_wait_all();
    ptx_barrier(BARRIER_QUERIES, QUERY_THREADS); /* all queries and weights are there */
#pragma unroll 1
    for (int token = 0; token < num_tokens; token += Shape::MIXED_AT_ONCE) {
        add_mixes_of<Shape>(slot, token, num_tokens, shared);
    }
    ptx_fence_async_shared(); /* the thread's copies and mixes are visible to wgmma */
    ptx_mbarrier_arrive(ptx_shared_address(&shared->q_full[slot]), true);
}

template <typename Shape>
__device__ __forceinline__ void
copy_queries(const sm90_args &all, logits_memory<Shape> *shared)
{
    /* Then a work is a run, and its queries need not wait until its request is known. */
    constexpr bool IS_EARLY = Shape::BLOCK_TOKENS == 1;
    const logits_args &args = all.args;
    const bool has_shifts = all.has_maps && !args.p.has_pages;
    uint32_t items = 0;
    logits_walk walk = start_walk<Shape>(all);
    logits_work work = {};
    while (next_work<Shape>(all, &walk, &work)) {
        int64_t token = work.first_token;
        while (token < work.end_token) {
            if (IS_EARLY) {
                ask_for_queries(args, token, 1, items, shared);
            }
            const logits_run run = find_run<Shape>(args.p, work, token);
            if (run.num_tiles > 0) {
                if (!IS_EARLY) {
                    ask_for_queries(args, token, (int)(run.end_token - token), items, shared);
                }
                hand_over(args, work, run, has_shifts ? (int)run.source & (SCALE_ALIGN - 1) : 0,
                          items, shared);
                items++;
            }
            token = run.end_token;
        }
    }
    ask_for_queries(args, 0, 0, items, shared);
    hand_over(args, work, logits_run{}, 0, items, shared);
}

} // namespace
