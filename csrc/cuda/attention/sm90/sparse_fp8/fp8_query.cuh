/* fp8_query.cuh: how consumers begin an item of attention_fp8_sm90.cu: they store its query in
 * shared memory, permuted and scaled, and find the powers of two that are its units.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/tile_limits.cuh"

/* ---- Consumers: query ---------------------------------------------------------------------- */

/* A lane's part of the query: 16 bytes per 64-dimension tile of two heads each. So eight lanes read
 * a head's 128 bytes of a tile. words[j] belongs to head query_head(me, j). */
template <int TILES> struct query_part {
    uint32_t words[2][TILES][4];
};

enum {
    PIECES = QUERY_LANES, /* pieces of 16 bytes in a head's row of a tile */
    HAS_KEYS = 1 << 8,    /* find_scale_max: above the exponent's 8 bits */
};

static __device__ __forceinline__ int
query_head(const thread_index &me, int j)
{
    return 8 * (4 * me.group + me.warp) + 4 * j + me.lane / PIECES;
}

/* Copies the query to shared memory, where gather warps do not: they fetch no query if q is not
 * aligned or if out may be staged there. The code is a loop, so that other launches jump over
 * little code, because they wait for memory after a long jump. */
template <typename Shape>
static __device__ __forceinline__ void
copy_query(const smla_queries &queries, const work_item &item, fp8_memory<Shape> *shared)
{
    constexpr int NOPE_PIECES = SMLA_KV_LORA_RANK / 8;
    constexpr int HEAD_PIECES = Shape::Row::HEAD_BYTES / 16;
#pragma unroll 1
    for (int i = ptx_forget((int)threadIdx.x); i < item.num_heads * HEAD_PIECES;
         i += CONSUMER_THREADS) {
        const int head = item.first_head + i / HEAD_PIECES;
        const int piece = i % HEAD_PIECES;
        const uint16_t *const from =
            piece < NOPE_PIECES
                ? smla_row16(&queries.parts[SMLA_NOPE], item.token, head) + 8 * piece
                : smla_row16(&queries.parts[SMLA_PE], item.token, head) + 8 * (piece - NOPE_PIECES);
        uint32_t words[4];
        smla_load_words<16, false>(from, words);
        ((uint4 *)shared->query)[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
}

/* read_query for a query of e4m3, which becomes bf16. Two lanes load the same 16 bytes, and each
 * takes its half. */
template <typename Shape>
static __device__ __forceinline__ void
read_query_codes(const work_item &item, const thread_index &me, const fp8_memory<Shape> *shared,
                 query_part<Shape::Row::QUERY_TILES> *part)
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int head = query_head(me, j);
        const uint32_t from = ptx_shared_address(shared->query) + head * Shape::Row::INFO.head_dim +
                              16 * (me.lane % PIECES / 2);
#pragma unroll
        for (int tile = 0; tile < Shape::Row::QUERY_TILES; tile++) {
            uint32_t codes[4];
            ptx_load_shared_16_if(from + 64 * tile, head < item.num_heads, codes);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t *const words = part->words[j][tile] + 2 * i;
                uint32_t low, high;
                ptx_cvt_f16x4_e4m3x4(me.lane % 2 == 0 ? codes[i] : codes[2 + i], &low, &high);
                words[0] = smla_cvt_bf16x2(smla_cvt_float((uint16_t)low),
                                           smla_cvt_float((uint16_t)(low >> 16)));
                words[1] = smla_cvt_bf16x2(smla_cvt_float((uint16_t)high),
                                           smla_cvt_float((uint16_t)(high >> 16)));
            }
        }
    }
}

/* Reads the lane's part of the query. Absent heads are zeros. The code has no branches, because
 * everything waits for it. */
template <typename Shape>
static __device__ __forceinline__ void
read_query(const work_item &item, const thread_index &me, const fp8_memory<Shape> *shared,
           query_part<Shape::Row::QUERY_TILES> *part)
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int head = query_head(me, j);
        const uint32_t from = ptx_shared_address(shared->query) + head * Shape::Row::HEAD_BYTES +
                              16 * (me.lane % PIECES);
#pragma unroll
        for (int tile = 0; tile < Shape::Row::QUERY_TILES; tile++) {
            ptx_load_shared_16_if(from + 128 * tile, head < item.num_heads, part->words[j][tile]);
        }
    }
}

/* Reads the lane's part of a query of either type. */
template <typename Shape>
static __device__ __forceinline__ void
read_any_query(const fp8_launch &launch, const work_item &item, const thread_index &me,
               const fp8_memory<Shape> *shared, query_part<Shape::Row::QUERY_TILES> *part)
{
    if constexpr (!Shape::Row::HAS_SCALES) {
        if (is_query_coded(launch)) {
            read_query_codes(item, me, shared, part);
            return;
        }
    }
    read_query(item, me, shared, part);
}

template <typename Shape>
static __device__ __forceinline__ void
wait_for_query(fp8_memory<Shape> *shared, const consumer<Shape> &state)
{
    ptx_mbarrier_wait(ptx_shared_address(&shared->query_full), (state.phase & QUERY_PARITY) != 0);
}

template <typename Shape>
static __device__ __forceinline__ void
store_nope(fp8_memory<Shape> *shared, int head, int piece,
           const uint32_t (&part)[Shape::Row::QUERY_TILES][4], float factor)
{
    constexpr int TILES = Shape::Row::CODE_TILES;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t pair = part[tile][i];
            words[i] = ptx_cvt_f16x2(smla_low_bf16(pair) * factor, smla_high_bf16(pair) * factor);
        }
        if (TILES % 2 != 0 && tile == TILES - 1) {
            store_query_words(shared, tile, head, piece % 2 * 4, piece / 2, words);
        } else {
            store_query_words(shared, tile / 2 * 2 + piece / 2 % 2, head, piece % 2 * 4,
                              tile % 2 * 2 + piece / 4, words);
        }
    }
}

template <typename Shape>
static __device__ __forceinline__ void
store_rope(fp8_memory<Shape> *shared, int head, int piece, const uint32_t part[4], uint32_t factors)
{
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        words[i] = ptx_mul_bf16x2(part[i], factors);
    }
    store_query_words(shared, Shape::Row::NOPE_TILES, head, piece % 2 * 4, piece / 2, words);
}

/* The largest scale exponent among the warp's keys of the item's first step, with the bit HAS_KEYS;
 * 0 without keys. Where V includes the RoPE part, this has no scale, and counts with the one that
 * codes would need. Rows without scales have the exponent 0. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
find_scale_max(const thread_index &me, uint32_t granule)
{
    typedef typename Shape::Row Row;
    const uint32_t key_bits = load_key_bits<Shape>(granule);
    const key_masks is_key = find_key_masks(me, key_bits);
    const uint32_t row = granule + me.row * Row::PITCH;
    uint32_t top = 0;
    if constexpr (!Row::HAS_SCALES) {
        return key_bits != 0 ? HAS_KEYS : 0;
    } else if constexpr (Row::HAS_BYTE_SCALES) {
        uint32_t scales[2][2];
        load_byte_scales<Row>(row, me.column, scales);
        const uint32_t a =
            max_of_scales(scales[0][0], scales[1][0], rope_of_row<Row>(row, me.column));
        const uint32_t b = max_of_scales(scales[0][1], scales[1][1],
                                         rope_of_row<Row>(row + 8 * Row::PITCH, me.column));
        top = max(is_key.first ? a : 0, is_key.second ? b : 0);
    } else {
        const uint32_t from = row + Row::SCALE_OFFSET + 4 * me.column;
        const uint32_t a = is_key.first ? ptx_load_shared_4(from) : 0;
        const uint32_t b = is_key.second ? ptx_load_shared_4(from + 8 * Row::PITCH) : 0;
        top = max(exponent_of_scale(a), exponent_of_scale(b));
    }
    return __reduce_max_sync(0xFFFFFFFFu, top) | (key_bits != 0 ? HAS_KEYS : 0);
}

/* Makes the query of an item zeros if its first step has no keys: a query that is not finite would
 * spoil results that do not depend on it. If there are more steps, find_references sends the item
 * to the fallback. */
template <typename Shape>
static __device__ __forceinline__ void
clear_query(fp8_memory<Shape> *shared)
{
    const int thread = ptx_forget((int)threadIdx.x);
#pragma unroll 1
    for (int i = thread; i < (int)sizeof(shared->query) / 16; i += CONSUMER_THREADS) {
        ((uint4 *)shared->query)[i] = make_uint4(0, 0, 0, 0);
    }
    if (thread < Shape::HEADS) {
        shared->reference[thread] = 0.0f;
    }
}

/* Clears the weights that group 0 multiplies in its first step, when group 1 has no block yet. */
template <typename Shape>
static __device__ __forceinline__ void
clear_weights(const thread_index &me, fp8_memory<Shape> *shared)
{
#pragma unroll
    for (int i = 0; i < 64 * Shape::PROB_BYTES / 16 / GROUP_THREADS; i++) {
        ((uint4 *)shared->probs[1])[i * GROUP_THREADS + 32 * me.warp + me.lane] =
            make_uint4(0, 0, 0, 0);
    }
}

/* Stores the largest finite value of the warp's heads for other warps. Finds the maxima of both
 * heads. */
template <typename Shape>
static __device__ __forceinline__ void
publish_query_max(const thread_index &me, const query_part<Shape::Row::QUERY_TILES> &part,
                  fp8_memory<Shape> *shared, uint32_t head_max[2])
{
    uint32_t top = 0;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        head_max[j] = find_head_max(part.words[j]);
        top = max(top, head_max[j] < 0x7F80 ? head_max[j] : 0);
    }
    const uint32_t warp_max = __reduce_max_sync(0xFFFFFFFFu, top);
    if (me.lane == 0) {
        shared->query_max[4 * me.group + me.warp] = warp_max;
    }
}

/* The largest of the values that the warps have stored. */
static __device__ __forceinline__ uint32_t
max_of_warps(const uint32_t *values, int count)
{
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < count; i++) {
        top = max(top, values[i]);
    }
    return top;
}

/* The exponent of E, the unit of scales and values, clamped to +-MAX_KEY_EXPONENT. Products below
 * 2^-14 E lose bits, and scales from 2^7 E on do not fit. So E is large, to leave room for the
 * scales of later keys, as long as 2^-25 E is negligible. First keys that are all zeros, with
 * scales of FLT_MIN, tell nothing about later keys. */
static __device__ __forceinline__ int
find_key_exponent(uint32_t scale_max)
{
    if (scale_max <= 1) {
        return USUAL_UNIT_EXPONENT;
    }
    const int top = (int)scale_max - 127;
    const int exponent =
        max(top - TOP_SCALE_EXPONENT, min(top - LOW_SCALE_EXPONENT, (int)FINE_UNIT_EXPONENT));
    return min(max(exponent, -(int)MAX_KEY_EXPONENT), (int)MAX_KEY_EXPONENT);
}

/* Stores the NoPE part in shared memory, relative to a power of two, and returns its exponent.
 * Heads that are not finite get NaN as their reference, so their results are NaN if there is a
 * key. */
template <typename Shape>
static __device__ __forceinline__ int
store_all_nope(const thread_index &me, const query_part<Shape::Row::QUERY_TILES> &part,
               const uint32_t head_max[2], fp8_memory<Shape> *shared)
{
    const uint32_t query_max = max_of_warps(shared->query_max, (Shape::HEADS + 7) / 8);
    bool needs_fallback;
    const int exponent = find_query_exponent(query_max, &needs_fallback);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int head = query_head(me, j);
        needs_fallback |= head_max[j] != 0 && (head_max[j] >> 7) + MAX_HEAD_RATIO < query_max >> 7;
        if (head < Shape::HEADS) {
            if (me.lane % PIECES == 0) {
                shared->reference[head] = head_max[j] < 0x7F80 ? 0.0f : NAN;
            }
            store_nope(shared, head, me.lane % PIECES, part.words[j], power_of_two(-exponent));
        }
    }
    mark_for_fallback(shared, needs_fallback);
    return exponent;
}

/* Finds what is the same for all items of rows without scales. Scales may be on the device, so one
 * thread loads them, once. No item fits if kv_scale is not an ordinary positive number: NaN, as
 * cache_scale, sends all items to the fallback. */
template <typename Shape>
static __device__ __forceinline__ void
find_cache_scale(const fp8_launch &launch, fp8_memory<Shape> *shared)
{
    if (ptx_forget((int)threadIdx.x) == 0) {
        const float scale = smla_load_given_scale(launch.base.key_scales.given[0]);
        const float inv_unit = smla_inverse_unit(find_key_unit(launch.base));
        shared->key_unit = scale;
        shared->cache_scale =
            scale >= LEAST_CACHE_SCALE && scale <= LARGEST_CACHE_SCALE
                ? find_scale_log2(launch.base) * (scale * inv_unit) * WGMMA_CORRECTION
                : NAN;
    }
}

/* Stores the query in shared memory, and finds the item's powers of two from it and from the scales
 * of the first 128 keys, which arrive last. All consumers may multiply afterwards. */
template <typename Shape>
static __device__ __forceinline__ void
store_query(const fp8_launch &launch, const thread_index &me, const work_item &next,
            fp8_memory<Shape> *shared, consumer<Shape> *state)
{
    const fp8_addresses at = find_addresses(shared, me.group);
    query_part<Shape::Row::QUERY_TILES> part;
    int32_t token_end = 0;
    if constexpr (Shape::TILED) { /* loaded here to hide its latency */
        token_end = load_token_end(launch.base, next);
    }
    if (!Shape::Row::HAS_SCALES || Shape::TILED || launch.fetches_query) {
        wait_for_query(shared, *state);
    } else {
        copy_query(launch.base.params.queries, next, shared);
    }
    read_any_query(launch, next, me, shared, &part);
    uint32_t head_max[2];
    publish_query_max(me, part, shared, head_max);
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS); /* nobody is at the last item any more */
    begin_item(launch, next, shared);
    if constexpr (Shape::TILED) {
        leave_limits(launch.base, token_end, shared);
    }
    if (me.group == 1) {
        clear_weights(me, shared);
    }
    const int exponent = store_all_nope(me, part, head_max, shared);
    const uint32_t warp_scale = find_scale_max<Shape>(me, wait_for_rows(at, me, *state));
    if (me.lane == 0) {
        shared->scale_max[4 * me.group + me.warp] = warp_scale;
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    const uint32_t scale_max = max_of_warps(shared->scale_max, CONSUMER_WARPS);
    const int key_exponent = Shape::Row::HAS_SCALES ? find_key_exponent(scale_max % HAS_KEYS) : 0;
    if (scale_max == 0) {
        clear_query(shared);
    }
#pragma unroll
    for (int j = 0; j < 2 && !Shape::Row::HAS_ROPE_CODES; j++) {
        if (scale_max != 0 && query_head(me, j) < Shape::HEADS) {
            store_rope(shared, query_head(me, j), me.lane % PIECES,
                       part.words[j][Shape::Row::NOPE_TILES],
                       (uint32_t)(127 - exponent - key_exponent) * 0x00800080u);
        }
    }
    const float score_scale = (!Shape::Row::HAS_SCALES ? shared->cache_scale
                               : Shape::SCALES_SCORES  ? launch.base.scale_log2
                                                       : launch.base.wgmma_scale_log2) *
                              power_of_two(exponent) * power_of_two(key_exponent);
    mark_for_fallback(shared,
                      !(fabsf(score_scale) <= 0x1p100f) ||
                          (fabsf(score_scale) < 0x1p-100f && launch.base.scale_log2 != 0.0f) ||
                          key_exponent > MAX_UNIT_EXPONENT || key_exponent == -MAX_KEY_EXPONENT);
    if (ptx_forget((int)threadIdx.x) == 0) {
        shared->score_scale = score_scale;
        if (Shape::Row::HAS_SCALES) {
            shared->key_unit = power_of_two(key_exponent);
            shared->inv_key_unit = power_of_two(-key_exponent);
        }
    }
    ptx_fence_async_shared();
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
}
