/* fp8_scores.cuh: the first product of attention_fp8_sm90.cu: the scores of a block of keys, and
 * how they become weights in shared memory and sums of weights.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/tile_limits.cuh"

/* A new reference minus the maximum rounded up, as an exponent: in an item's last step, and where
 * at most SHORT_STEPS are left. The weights of a warp's 16 keys together must still fit f16. Of so
 * few steps, all that f16 rounds away of light keys with ordinary values stays below 1e-6, also
 * where the heavy keys have values of 0. */
#define ONE_STEP_HEADROOM (-11.0f)
#define SHORT_HEADROOM    (-4.0f)
enum {
    SHORT_STEPS = 8,
    MOST_FREE_STEPS = 1024, /* 2^17 keys, for which the largest headroom suffices (find_headroom) */
    MAX_DOUBLINGS = 6,
};

/* ---- Consumers: scores --------------------------------------------------------------------- */

/* The address of a granule's scales of keys `row` and row + 8 for scale tile `tile`. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
find_scale_pair(uint32_t granule, int tile, int row)
{
    return granule + (uint32_t)offsetof(typename Shape::Granule, scales) +
           tile * (GRANULE_KEYS * 2) + (4 * (row >> 1) + (row & 1)) * 2;
}

/* Rounds scale / E of the warp's keys to f16, and stores it in the granule's table of scales, by
 * which values are multiplied. Marks the item for the fallback if a scale is too large. */
template <typename Shape>
static __device__ __forceinline__ scale_pairs
take_scales(fp8_memory<Shape> *shared, const thread_index &me, uint32_t granule)
{
    typedef typename Shape::Row Row;
    scale_pairs pairs;
    const float inv_unit = *(const volatile float *)&shared->inv_key_unit;
    if constexpr (Row::HAS_BYTE_SCALES) {
        uint32_t scales[2][2];
        load_byte_scales<Row>(granule + me.row * Row::PITCH, me.column, scales);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            pairs.words[i] = ptx_cvt_f16x2(smla_bits_float(scales[i][0] << 23) * inv_unit,
                                           smla_bits_float(scales[i][1] << 23) * inv_unit);
            ptx_store_shared_halves(find_scale_pair<Shape>(granule, 4 * i + me.column, me.row),
                                    pairs.words[i]);
        }
        mark_for_fallback(shared, ptx_exceeds_f16x2(pairs.words[0], LARGEST_SCALES) |
                                      ptx_exceeds_f16x2(pairs.words[1], LARGEST_SCALES));
    } else {
        const uint32_t from = granule + me.row * Row::PITCH + Row::SCALE_OFFSET + 4 * me.column;
        const float a = smla_bits_float(ptx_load_shared_4(from));
        const float b = smla_bits_float(ptx_load_shared_4(from + 8 * Row::PITCH));
        pairs.words[0] = ptx_cvt_f16x2(a * inv_unit, b * inv_unit);
        mark_for_fallback(shared, ptx_exceeds_f16x2(pairs.words[0], LARGEST_SCALES));
        ptx_store_shared_halves(find_scale_pair<Shape>(granule, me.column, me.row), pairs.words[0]);
    }
    return pairs;
}

/* Replaces the lane's RoPE values of a row, which are values, too, by f16 relative to E. Marks the
 * item for the fallback if one of them does not fit. */
template <typename Shape>
static __device__ __forceinline__ void
keep_rope(fp8_memory<Shape> *shared, uint32_t to, const uint32_t words[8])
{
    const uint32_t unit = smla_float_bits(*(const volatile float *)&shared->inv_key_unit);
    mark_for_fallback(shared, is_rope_large(find_rope_top(words), 127 - (int)(unit >> 23)));
    store_rope_halves(to, words, __byte_perm(unit, unit, 0x3232));
}

/* Starts two products of 16 dimensions: A in `a`, B at `step` and step + 1 of the query's tile.
 * is_first: the products replace the sum, instead of adding to it. */
template <typename Shape, bool IS_ROPE>
static __device__ __forceinline__ void
multiply_scores(uint64_t query, int tile, int step, uint32_t a[16], bool is_first,
                float (&scores)[Shape::HEADS / 2])
{
    wgmma_fence();
#pragma unroll
    for (int j = step; j < step + 2; j++) {
        const uint64_t b = query + ((tile * Shape::HEADS * 128 + j * 32) >> 4);
        if constexpr (IS_ROPE) {
            wgmma_bf16(scores, a + 4 * j, b, !is_first || j != step);
        } else {
            wgmma_f16<false>(scores, a + 4 * j, b, !is_first || j != step);
        }
    }
    wgmma_commit();
}

/* Starts the RoPE part of the scores. `low` and `high` are the lane's RoPE values of rows `row` and
 * row + 8, the former of which lie at `rope`. */
template <typename Shape>
static __device__ __forceinline__ void
score_rope(fp8_memory<Shape> *shared, uint32_t rope, uint64_t query, const uint32_t (&low)[8],
           const uint32_t (&high)[8], consumer<Shape> *state)
{
    typedef typename Shape::Row Row;
    uint32_t a[16];
#pragma unroll
    for (int step = 0; step < 4; step += 2) {
        wgmma_wait<1>();
#pragma unroll
        for (int j = step; j < step + 2; j++) {
            a[4 * j] = low[2 * j];
            a[4 * j + 1] = high[2 * j];
            a[4 * j + 2] = low[2 * j + 1];
            a[4 * j + 3] = high[2 * j + 1];
        }
        multiply_scores<Shape, true>(query, Row::NOPE_TILES, step, a,
                                     Shape::SCALES_SCORES && step == 0, state->scores);
    }
    if constexpr (Row::ROPE_IS_VALUE) {
        keep_rope(shared, rope, low);
        keep_rope(shared, rope + 8 * Row::PITCH, high);
    }
}

/* Starts scores = q . k / units for the group's block: 64 keys, a granule per warp. `query` is the
 * descriptor of the query's tiles. The last products are still under way on return. */
template <typename Shape>
static __device__ __forceinline__ void
score_block(fp8_memory<Shape> *shared, const fp8_addresses &at, const thread_index &me,
            uint64_t query, consumer<Shape> *state)
{
    typedef typename Shape::Row Row;
    const uint32_t granule = wait_for_rows(at, me, *state);
    const thread_index here = find_thread_index_again();
    const uint32_t nope = granule + here.row * Row::PITCH + 32 * here.column;
    const uint32_t rope = nope + Row::ROPE_OFFSET;
    uint32_t words[3][8];
    load_nope_words<Row>(nope, 0, words[0]);
    load_nope_words<Row>(nope, 1, words[1]);
    state->key_bits = load_key_bits<Shape>(granule);
    scale_pairs scales;
    if constexpr (Row::HAS_SCALES) {
        scales = take_scales(shared, me, granule);
    }
    if constexpr (Shape::SCALES_SCORES) {
        static_assert(Shape::SCORE_PARTS == 4, "16 bytes");
        const uint32_t from = granule + here.row * Row::PITCH + Row::SCALE_OFFSET;
        ptx_load_shared_16(from, state->row_scales[0]);
        ptx_load_shared_16(from + 8 * Row::PITCH, state->row_scales[1]);
    }
    uint32_t of_part = 0;
#pragma unroll
    for (int tile = 0; tile < Row::CODE_TILES; tile++) {
        uint32_t a[16];
        uint32_t *const now = words[tile % 3];
        if (tile < Row::CODE_TILES - 2) {
            load_nope_words<Row>(nope, tile + 2, words[(tile + 2) % 3]);
        } else if (!Row::HAS_ROPE_CODES) { /* RoPE of rows row and row + 8 */
            const uint32_t from = rope + (tile - (Row::NOPE_TILES - 2)) * 8 * Row::PITCH;
            ptx_load_shared_16(from, words[(tile + 2) % 3]);
            ptx_load_shared_16(from + 16, words[(tile + 2) % 3] + 4);
        }
        if (Row::HAS_SCALES && !Shape::SCALES_SCORES && tile % 2 == 0) {
            of_part =
                scales_of_part<Row>(scales,
                                    Row::HAS_BYTE_SCALES ? (int)(ptx_thread() % SMLA_WARP_LANES)
                                                         : me.lane,
                                    tile / 2);
        }
#pragma unroll
        for (int step = 0; step < 4; step += 2) {
            if (tile + step == 0) {
                wgmma_wait<0>(); /* `out` is complete: after wait<1> ptxas takes it for under way */
            } else {
                wgmma_wait<1>();
            }
#pragma unroll
            for (int j = step; j < step + 2; j++) {
                ptx_pin(&now[j]);
                ptx_pin(&now[4 + j]);
            }
#pragma unroll
            for (int j = step; j < step + 2; j++) {
                if constexpr (Shape::SCALES_SCORES || !Row::HAS_SCALES) {
                    widen_key_step(now[j], now[4 + j], &a[4 * j]);
                } else {
                    convert_key_step(now[j], now[4 + j], of_part, &a[4 * j]);
                }
            }
            const bool is_first = (Shape::SCALES_SCORES ? tile % 2 : tile) + step == 0;
            multiply_scores<Shape, false>(query, tile, step, a, is_first,
                                          Shape::SCALES_SCORES
                                              ? state->parts[tile / 2 % Shape::SCORE_PARTS]
                                              : state->scores);
        }
    }
    if constexpr (!Row::HAS_ROPE_CODES) {
        wgmma_wait<1>();
        score_rope(shared, rope, query, words[Row::NOPE_TILES % 3],
                   words[(Row::NOPE_TILES + 1) % 3], state);
    }
}

/* ---- Consumers: weights -------------------------------------------------------------------- */

/* The slot of a lane's sum for a pair of chunks. With 16 heads there is one chunk, and lanes l and
 * l ^ 4 keep half of a head's sum each (add_up_head). */
static __device__ __forceinline__ int
slot_of_sum(const thread_index &me, int pair)
{
    return 32 * pair + (me.lane & 4 ? 16 : 0) + head_of_sum(me);
}

/* Merges the results of reduce_half in lanes l and l ^ 4 for a pair of chunks: half of the lanes
 * get a head of the even chunk, half get one of the odd chunk. With 16 heads there is only `odd`,
 * which stays as it is. */
template <bool IS_MAX, typename Shape>
static __device__ __forceinline__ float
fold_pair(float even, float odd, const thread_index &me)
{
    if constexpr (Shape::CHUNKS == 1) {
        return odd;
    }
    const bool is_odd = me.lane & 4;
    const float give = __shfl_xor_sync(0xFFFFFFFFu, is_odd ? even : odd, 4);
    return merge_pair<IS_MAX>(is_odd ? odd : even, give);
}

/* Whether a chunk is the last of its pair. */
template <typename Shape>
static constexpr __device__ __forceinline__ bool
ends_pair(int chunk)
{
    return Shape::CHUNKS == 1 || chunk % 2 == 1;
}

/* The upper limit of find_row_headroom in a dense call, where a row's bits may not depend on how
 * wide the table is: the item's own steps decide. */
static __device__ __forceinline__ float
find_range_headroom(const fp8_launch &launch, int steps)
{
    const int doublings = steps <= MOST_FREE_STEPS ? 0 : 32 - __clz((steps - 1) / MOST_FREE_STEPS);
    return launch.headroom - (float)min(doublings, (int)MAX_DOUBLINGS);
}

/* A new reference minus the maximum rounded up: a negative exponent. It leaves range for heavier
 * keys that come later. It leaves less of it where few keys come, so that light keys keep more
 * bits. */
template <typename Shape>
static __device__ __forceinline__ float
find_row_headroom(const fp8_launch &launch, const consumer<Shape> &state)
{
    /* recomputed, because ptxas would keep a comparison of meet_other_block, and has no register */
    const int steps = ptx_forget((int)(state.phase / ONE_STEP));
    const float of_row = steps < 2              ? ONE_STEP_HEADROOM
                         : steps <= SHORT_STEPS ? SHORT_HEADROOM
                                                : 0.0f;
    return fminf(Shape::RANGED ? find_range_headroom(launch, steps) : launch.headroom, of_row);
}

/* Puts the scores together when all products are done. With SCALES_SCORES, state.scores hold only
 * the RoPE part of the scores. */
template <typename Shape>
static __device__ __forceinline__ void
join_scores(const fp8_memory<Shape> *shared, const consumer<Shape> &state,
            float (&joined)[Shape::HEADS / 2])
{
#pragma unroll
    for (int i = 0; i < Shape::HEADS / 2; i++) {
        joined[i] = state.scores[i];
    }
    if constexpr (Shape::SCALES_SCORES) {
        const float inv_unit = *(const volatile float *)&shared->inv_key_unit;
#pragma unroll
        for (int i = 0; i < Shape::HEADS / 2; i++) {
            const uint32_t *const scales = state.row_scales[i / 2 % 2];
            float sum = state.parts[0][i] * smla_bits_float(scales[0]);
#pragma unroll
            for (int part = 1; part < Shape::SCORE_PARTS; part++) {
                sum = fmaf(state.parts[part][i], smla_bits_float(scales[part]), sum);
            }
            joined[i] = fmaf(sum, inv_unit, joined[i]);
        }
    }
}

/* Finds reference[head] from the scores of the first 128 keys. */
template <typename Shape>
static __device__ __forceinline__ void
find_references(const fp8_launch &launch, const thread_index &me, fp8_memory<Shape> *shared,
                consumer<Shape> *state)
{
    const key_masks is_key = find_key_masks(me, state->key_bits);
    const int thread = GROUP_THREADS * me.group + SMLA_WARP_LANES * me.warp + me.lane;
    float *const row_maxima = shared->sums[4 * me.group + me.warp];
    float scores[Shape::HEADS / 2];
    join_scores(shared, *state, scores);
    float scale = shared->score_scale;
    if constexpr (Shape::TILED) {
        if (has_hidden_keys(shared, me, *state)) {
#pragma unroll
            for (int i = 0; i < Shape::HEADS / 2; i++) {
                scores[i] *= scale;
            }
            hide_keys(launch.base, shared, me, *state, scores);
            scale = 1.0f;
        }
    }
    leave_row_maxima(scores, scale, is_key, me,
                     [=](int head, float row_max) { row_maxima[head] = row_max; });
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    if (thread < Shape::HEADS) {
        float row_max = shared->sums[0][thread];
#pragma unroll
        for (int warp = 1; warp < CONSUMER_WARPS; warp++) {
            row_max = fmaxf(row_max, shared->sums[warp][thread]);
        }
        /* row_max is -inf without a key, or if all logits are -inf. If there are several steps, the
         * item then goes to the fallback. */
        const float found =
            row_max == -INFINITY ? 0.0f : ceilf(row_max) + find_row_headroom(launch, *state);
        const float otherwise = shared->reference[thread]; /* 0, or NaN from store_all_nope */
        mark_for_fallback(shared, !isnan(otherwise) &&
                                      (row_max == -INFINITY
                                           ? has_steps_left(*state, 2)
                                           : fabsf(row_max) >= MAX_SCORE && row_max < INFINITY));
        /* The reference is NaN if the item goes to the fallback, too: huge scores are off by so
         * much that weights may not fit. */
        shared->reference[thread] = row_max < MAX_SCORE ? found + otherwise : NAN;
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
}

/* Turns scores into exponents of weights. The row of an absent key is zeros, so its score stays 0.
 * Its weight will be 1, times values of 0, and weigh_chunk subtracts it from the sums. */
template <typename Shape>
static __device__ __forceinline__ void
find_exponents(const fp8_launch &launch, fp8_memory<Shape> *shared, const thread_index &me,
               consumer<Shape> *state)
{
    const key_masks is_key = find_key_masks(me, state->key_bits);
    const float scale = *(const volatile float *)&shared->score_scale;
    join_scores(shared, *state, state->scores);
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
        const float2 reference = *(const float2 *)&shared->reference[8 * j + 2 * me.column];
        float *const x = &state->scores[4 * j];
        ptx_fma_if(&x[0], scale, -reference.x, is_key.first);
        ptx_fma_if(&x[1], scale, -reference.y, is_key.first);
        ptx_fma_if(&x[2], scale, -reference.x, is_key.second);
        ptx_fma_if(&x[3], scale, -reference.y, is_key.second);
    }
    if constexpr (Shape::TILED) {
        if (has_hidden_keys(shared, find_thread_index_again(), *state)) {
            hide_keys(launch.base, shared, find_thread_index_again(), *state, state->scores);
        }
    }
}

/* The number of absent keys among the keys that fold_pair adds up. These are the warp's 16 keys.
 * With one chunk, where lanes l and l ^ 4 keep half each, they are the 8 keys in rows of the lane's
 * parity. */
template <typename Shape>
static __device__ __forceinline__ float
count_absent(const thread_index &me, uint32_t key_bits)
{
    return (float)(Shape::CHUNKS > 1 ? 16 - __popc(key_bits)
                                     : 8 - __popc(key_bits & 0x05050505u << (me.row & 1)));
}

/* Turns a chunk's exponents into weights, and adds up the lane's two keys, for reduce_half. */
static __device__ __forceinline__ void
exp_chunk(const float x[8], float e[8], float sums[4])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        e[i] = ptx_exp2(x[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int from = 4 * (i / 2) + i % 2;
        sums[i] = e[from] + e[from + 2];
    }
}

/* Stores the weights of a chunk in the group's block of probs. */
template <typename Shape>
static __device__ __forceinline__ void
store_weights(uint32_t probs, const thread_index &me, int chunk, const float e[8])
{
    const int key = 16 * me.warp + (me.lane & 15);
    const int piece = 2 * chunk + (me.lane >> 4);
    ptx_stmatrix_x4(probs + key * Shape::PROB_BYTES + (piece ^ flip_of_key<Shape::HEADS>(key)) * 16,
                    ptx_cvt_f16x2(e[0], e[1]), ptx_cvt_f16x2(e[2], e[3]), ptx_cvt_f16x2(e[4], e[5]),
                    ptx_cvt_f16x2(e[6], e[7]));
}

/* Turns the exponents of a chunk of 16 heads into weights, stores these in probs, and adds them to
 * the sums. Where the sum over a warp's keys shows that weights may be too large for f16, has_grown
 * is set and the sum is not added. raise_references will raise the references and add the sum,
 * before anybody multiplies these weights. NaN is not too large. */
template <typename Shape>
static __device__ __forceinline__ void
weigh_chunk(const fp8_launch &launch, const fp8_addresses &at, const thread_index &me, int chunk,
            fp8_memory<Shape> *shared, consumer<Shape> *state)
{
    const float *const x = &state->scores[8 * chunk];
    const int warp = 4 * me.group + me.warp;
    float e[8], sums[4];
    exp_chunk(x, e, sums);
    store_weights<Shape>(at.probs, me, chunk, e);
    const float half = reduce_half<false>(sums, me.lane);
    if (ends_pair<Shape>(chunk)) {
        float *const slot = &shared->sums[warp][slot_of_sum(me, chunk / 2)];
        const float older = *slot;
        const float fresh = fold_pair<false, Shape>(state->even_sum, half, me) -
                            count_absent<Shape>(me, state->key_bits);
        state->has_grown[chunk / 2] = fresh >= launch.max_weight;
        if (!state->has_grown[chunk / 2]) {
            *slot = older + fresh;
        }
    } else {
        state->even_sum = half;
    }
    if constexpr (Shape::MAXIMA) {
        const key_masks is_key = find_key_masks(me, state->key_bits);
        const float row_maxima[4] = {max_of_keys(is_key, x[0], x[2]),
                                     max_of_keys(is_key, x[1], x[3]),
                                     max_of_keys(is_key, x[4], x[6]),
                                     max_of_keys(is_key, x[5], x[7])};
        const float row_max = reduce_half<true>(row_maxima, me.lane);
        if (ends_pair<Shape>(chunk)) {
            float *const slot = &shared->maxima[warp][slot_of_sum(me, chunk / 2)];
            *slot = fmaxf(*slot, fold_pair<true, Shape>(state->even_max, row_max, me));
        } else {
            state->even_max = row_max;
        }
    }
}

template <typename Shape>
static __device__ __forceinline__ void
clear_sums(const thread_index &me, fp8_memory<Shape> *shared)
{
    const int warp = 4 * me.group + me.warp;
#pragma unroll
    for (int pair = 0; pair < (Shape::CHUNKS + 1) / 2; pair++) {
        shared->sums[warp][slot_of_sum(me, pair)] = 0.0f;
        if constexpr (Shape::MAXIMA) {
            shared->maxima[warp][slot_of_sum(me, pair)] = -INFINITY;
        }
    }
}
