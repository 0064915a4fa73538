/* rotate_heads.cuh: a thread's part of apply_rope, whose bytes and layouts apply_rope.cu tells: 4
 * pairs of 4 neighbouring heads of a token.
 */
#pragma once

#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"
#include "cuda/rope/rope.cuh"

namespace {

enum {
    THREAD_HEADS = 4,
    VALUES = 2 * ROPE_PAIRS, /* values of a head that a thread has: two runs of ROPE_PAIRS */
};

struct apply_args {
    smla_apply_rope_params p;
    smla_divisor parts;       /* threads that share a head */
    smla_divisor head_groups; /* groups of THREAD_HEADS of a token, the key included */
    int64_t num_threads;
    bool table_is_aligned;
};

/* What a thread rotates: pairs ROPE_PAIRS * part and on, of heads from `head` on. */
struct thread_work {
    int64_t token;
    int64_t head;
    int64_t part;
};

__host__ __device__ constexpr int
bytes_of(int type)
{
    return type == SMLA_FLOAT_BF16 ? 2 : 4;
}

/* ---- Values -------------------------------------------------------------------------------- */

/* The index in a head of a thread's value i. With halves, the first run has the first values of the
 * pairs, and the second run the others. */
template <bool IS_NEOX>
__device__ __forceinline__ int64_t
index_of(int64_t part, int i, int64_t num_pairs)
{
    return IS_NEOX ? part * ROPE_PAIRS + i % ROPE_PAIRS + i / ROPE_PAIRS * num_pairs
                   : part * VALUES + i;
}

/* The number of pair k's first (second = 0) or second value among a thread's values. */
template <bool IS_NEOX>
__device__ __forceinline__ int
value_of_pair(int k, int second)
{
    return IS_NEOX ? k + second * ROPE_PAIRS : 2 * k + second;
}

/* Whether a thread's value i is of a pair that the head has. */
template <bool IS_NEOX>
__device__ __forceinline__ bool
exists(int64_t part, int i, int64_t num_pairs)
{
    return part * ROPE_PAIRS + (IS_NEOX ? i % ROPE_PAIRS : i / 2) < num_pairs;
}

/* A run of ROPE_PAIRS values. The memory may be written later, so it is no read-only data. */
template <int BYTES>
__device__ __forceinline__ void
load_run(const uint8_t *from, uint32_t *words)
{
    if constexpr (BYTES == 16) {
        smla_load_own_vector_4(from, words);
    } else {
        const uint2 pair = *(const uint2 *)from;
        words[0] = pair.x;
        words[1] = pair.y;
    }
}

/* Loads a thread's values of a head, as they are in memory. Values that do not exist are 0. */
template <int TYPE, bool IS_NEOX, bool ALIGNED>
__device__ __forceinline__ void
load_values(const uint8_t *head, int64_t part, int64_t num_pairs, uint32_t *words)
{
    constexpr int BYTES = bytes_of(TYPE);
    constexpr int RUN_BYTES = ROPE_PAIRS * BYTES;
    const uint8_t *const first = head + index_of<IS_NEOX>(part, 0, num_pairs) * BYTES;
    if constexpr (ALIGNED && !IS_NEOX && BYTES == 2) { /* both runs in one vector */
        load_run<2 * RUN_BYTES>(first, words);
    } else if constexpr (ALIGNED) {
        load_run<RUN_BYTES>(first, words);
        load_run<RUN_BYTES>(head + index_of<IS_NEOX>(part, ROPE_PAIRS, num_pairs) * BYTES,
                            words + RUN_BYTES / 4);
    } else {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const int64_t at = index_of<IS_NEOX>(part, i, num_pairs);
            uint32_t bits = 0;
            if (exists<IS_NEOX>(part, i, num_pairs)) {
                bits = BYTES == 2 ? ((const uint16_t *)head)[at] : ((const uint32_t *)head)[at];
            }
            if (BYTES == 2 && i % 2 != 0) {
                words[i / 2] |= bits << 16;
            } else {
                words[i * BYTES / 4] = bits;
            }
        }
    }
}

/* The reverse of load_values. */
template <int TYPE, bool IS_NEOX, bool ALIGNED>
__device__ __forceinline__ void
store_values(uint8_t *head, int64_t part, int64_t num_pairs, const uint32_t *words)
{
    constexpr int BYTES = bytes_of(TYPE);
    constexpr int RUN_BYTES = ROPE_PAIRS * BYTES;
    uint8_t *const first = head + index_of<IS_NEOX>(part, 0, num_pairs) * BYTES;
    if constexpr (ALIGNED && !IS_NEOX && BYTES == 2) {
        smla_store_words<2 * RUN_BYTES, true>(first, words);
    } else if constexpr (ALIGNED) {
        smla_store_words<RUN_BYTES, true>(first, words);
        smla_store_words<RUN_BYTES, true>(head + index_of<IS_NEOX>(part, ROPE_PAIRS, num_pairs) *
                                                     BYTES,
                                          words + RUN_BYTES / 4);
    } else {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const int64_t at = index_of<IS_NEOX>(part, i, num_pairs);
            if (!exists<IS_NEOX>(part, i, num_pairs)) {
                continue;
            }
            if (BYTES == 2) {
                ((uint16_t *)head)[at] = (uint16_t)(words[i / 2] >> 16 * (i % 2));
            } else {
                ((uint32_t *)head)[at] = words[i];
            }
        }
    }
}

/* Rotates what load_values loaded. */
template <int TYPE, bool IS_NEOX>
__device__ __forceinline__ void
rotate_words(uint32_t *words, const rope_angles &angles)
{
    float values[VALUES];
    float pairs[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        values[i] = bytes_of(TYPE) == 4 ? smla_bits_float(words[i])
                    : i % 2 == 0        ? smla_low_bf16(words[i / 2])
                                        : smla_high_bf16(words[i / 2]);
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        pairs[i] = values[value_of_pair<IS_NEOX>(i / 2, i % 2)];
    }
    rope_rotate<false>(pairs, angles);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        values[value_of_pair<IS_NEOX>(i / 2, i % 2)] = pairs[i];
    }
    if constexpr (bytes_of(TYPE) == 4) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            words[i] = isnan(values[i]) ? 0x7FC00000u : smla_float_bits(values[i]);
        }
    } else {
        smla_round_to_bf16<VALUES>(values, words);
    }
}

/* ---- Angles -------------------------------------------------------------------------------- */

/* Loads ROPE_PAIRS values of the table from element `at` on; if they are not aligned, the first
 * `count` of them. */
__device__ __forceinline__ void
load_table(const apply_args &args, int64_t at, int64_t count, float *to)
{
    const void *const table = args.p.rope.cos_sin;
    const bool is_bf16 = args.p.table_type == SMLA_FLOAT_BF16;
    if (args.table_is_aligned && is_bf16) {
        const uint2 words = __ldg((const uint2 *)((const uint16_t *)table + at));
        const uint32_t pairs[2] = {words.x, words.y};
        smla_widen_bf16<ROPE_PAIRS>(pairs, to);
    } else if (args.table_is_aligned) {
        smla_spread_vector(__ldg((const float4 *)((const float *)table + at)), to);
    } else {
#pragma unroll
        for (int i = 0; i < ROPE_PAIRS; i++) {
            to[i] = i >= count ? 0.0f : smla_read_float(table, is_bf16, at + i);
        }
    }
}

static_assert(ROPE_PAIRS == 4, "load_table has vectors of four");

/* The angles of a thread's pairs at a position that the table has. */
__device__ __forceinline__ rope_angles
load_angles(const apply_args &args, int64_t position, int64_t part)
{
    const int64_t pair = part * ROPE_PAIRS;
    const int64_t at = position * args.p.rope.cos_sin_stride_pos + pair;
    rope_angles angles;
    load_table(args, at, args.p.num_pairs - pair, angles.cos);
    load_table(args, at + args.p.num_pairs, args.p.num_pairs - pair, angles.sin);
#pragma unroll
    for (int i = 0; i < ROPE_PAIRS; i++) {
        angles.sin[i] = args.p.is_inverse ? -angles.sin[i] : angles.sin[i];
    }
    return angles;
}

/* ---- Heads --------------------------------------------------------------------------------- */

/* The array that a head is in: the key is the head behind the queries. Its stride is 0, so every
 * number is its number there. */
__device__ __forceinline__ const smla_rope_heads &
array_of_head(const smla_apply_rope_params &p, int64_t head)
{
    return head < p.q.num_heads ? p.q : p.k;
}

template <int TYPE, bool IS_NEOX, bool ALIGNED>
__device__ __forceinline__ void
rotate_heads(const apply_args &args, const thread_work &work)
{
    constexpr int BYTES = bytes_of(TYPE);
    const smla_apply_rope_params &p = args.p;
    const int64_t num_heads = p.q.num_heads + p.k.num_heads;
    uint32_t words[THREAD_HEADS][VALUES * BYTES / 4];
#pragma unroll
    for (int h = 0; h < THREAD_HEADS; h++) {
        const int64_t head = work.head + h;
        if (head < num_heads) {
            const smla_rope_heads &heads = array_of_head(p, head);
            const int64_t at = work.token * heads.stride_token + head * heads.stride_head;
            load_values<TYPE, IS_NEOX, ALIGNED>((const uint8_t *)heads.x + at * BYTES, work.part,
                                                p.num_pairs, words[h]);
        }
    }
    const int64_t position = rope_position(p.rope, work.token);
    const bool is_known = position >= 0 && position < p.rope.max_pos;
    rope_angles angles = {};
    if (is_known) {
        angles = load_angles(args, position, work.part);
    }
#pragma unroll
    for (int h = 0; h < THREAD_HEADS; h++) {
        const int64_t head = work.head + h;
        if (head < num_heads) {
            const smla_rope_heads &heads = array_of_head(p, head);
            const int64_t at = work.token * heads.out_stride_token + head * heads.out_stride_head;
            if (is_known) {
                rotate_words<TYPE, IS_NEOX>(words[h], angles);
            }
            store_values<TYPE, IS_NEOX, ALIGNED>((uint8_t *)heads.out + at * BYTES, work.part,
                                                 p.num_pairs, words[h]);
        }
    }
}

/* Rotates what thread `i` of num_threads has. */
template <int TYPE, bool IS_NEOX, bool ALIGNED>
__device__ __forceinline__ void
rotate_part(const apply_args &args, int64_t i)
{
    const int64_t row = smla_divide(i, args.parts);
    const int64_t token = smla_divide(row, args.head_groups);
    const thread_work work = {token, (row - token * args.head_groups.divisor) * THREAD_HEADS,
                              i - row * args.parts.divisor};
    rotate_heads<TYPE, IS_NEOX, ALIGNED>(args, work);
}

/* ---- Launch -------------------------------------------------------------------------------- */

/* Whether every head begins at a multiple of `bytes`, in the input and in the output. */
bool
are_heads_aligned(const smla_rope_heads &heads, int64_t element_bytes, int64_t bytes)
{
    return smla_are_rows_aligned(heads.x, heads.stride_token, heads.stride_head, bytes,
                                 element_bytes) &&
           smla_are_rows_aligned(heads.out, heads.out_stride_token, heads.out_stride_head, bytes,
                                 element_bytes);
}

/* Whether the kernel for whole vectors may run. */
bool
are_vectors(const smla_apply_rope_params &p)
{
    const int64_t bytes = bytes_of(p.type);
    const int64_t vector_bytes = p.is_neox && p.type == SMLA_FLOAT_BF16 ? 8 : 16;
    return p.num_pairs % ROPE_PAIRS == 0 && are_heads_aligned(p.q, bytes, vector_bytes) &&
           are_heads_aligned(p.k, bytes, vector_bytes);
}

apply_args
make_apply_args(const smla_apply_rope_params &p)
{
    const int64_t head_groups = smla_count_parts(p.q.num_heads + p.k.num_heads, THREAD_HEADS);
    const int64_t table_bytes = bytes_of(p.table_type);
    apply_args args = {};
    args.p = p;
    args.parts = smla_make_divisor(smla_count_parts(p.num_pairs, ROPE_PAIRS));
    args.head_groups = smla_make_divisor(head_groups > 0 ? head_groups : 1);
    args.num_threads = p.num_tokens * head_groups * args.parts.divisor;
    args.table_is_aligned =
        p.num_pairs % ROPE_PAIRS == 0 &&
        smla_is_multiple(p.rope.cos_sin, p.rope.cos_sin_stride_pos * table_bytes,
                         ROPE_PAIRS * table_bytes);
    return args;
}

} /* namespace */
