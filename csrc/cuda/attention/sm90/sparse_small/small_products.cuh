/* small_products.cuh: the products of attention_small_sm90.cu: scores, and values times the weights
 * that the scores become.
 */
#pragma once

#include "cuda/attention/sm90/sparse_small/small_fetch.cuh"

/* ---- Scores -------------------------------------------------------------------------------- */

/* Loads the scales of the warp's keys. Returns the largest scale's exponent. Where V includes the
 * RoPE part, which has no scale, this part counts with the scale that codes of its size would need.
 */
template <typename Shape>
static __device__ __forceinline__ uint32_t
load_key_scales(uint32_t rows, const thread_index &me, small_state<Shape> *state)
{
    typedef typename Shape::Row Row;
    const uint32_t row = rows + me.row * Row::PITCH;
    if constexpr (Row::HAS_BYTE_SCALES) {
        uint32_t scales[2][2];
        load_byte_scales<Row>(row, me.column, scales);
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t is_key = i == 0 ? state->is_key.first : state->is_key.second;
            const uint32_t rope = rope_of_row<Row>(row + 8 * i * Row::PITCH, me.column);
            top = max(top, is_key & max_of_scales(scales[0][i], scales[1][i], rope));
            state->needs_fallback |= is_key != 0 && rope == 0x7F80; /* infinite */
            state->scale[0][i] = smla_bits_float(is_key & scales[0][i] << 23);
            state->scale[1][i] = smla_bits_float(is_key & scales[1][i] << 23);
        }
        return top;
    } else {
        const uint32_t from = row + Row::SCALE_OFFSET + 4 * me.column;
        const uint32_t a = ptx_load_shared_4(from) & state->is_key.first;
        const uint32_t b = ptx_load_shared_4(from + 8 * Row::PITCH) & state->is_key.second;
        state->scale[0][0] = smla_bits_float(a);
        state->scale[0][1] = smla_bits_float(b);
        return max(exponent_of_scale(a), exponent_of_scale(b));
    }
}

template <typename Shape>
static __device__ __forceinline__ void
find_key_exponent(uint32_t rows, const thread_index &me, small_state<Shape> *state)
{
    const uint32_t largest = __reduce_max_sync(0xFFFFFFFFu, load_key_scales(rows, me, state));
    const int exponent = (int)largest - 127 - TOP_SCALE_EXPONENT;
    state->key_exponent = min(max(exponent, -(int)MAX_KEY_EXPONENT), (int)MAX_KEY_EXPONENT);
    state->needs_fallback |= largest > 1 && exponent < -(int)MAX_KEY_EXPONENT;
}

/* The lane's scales / 2^exponent, as f16. They can be too large only where the exponent is at its
 * bound. */
template <typename Shape>
static __device__ __forceinline__ scale_pairs
round_scales(int exponent, small_state<Shape> *state)
{
    const float unit = power_of_two(-exponent);
    scale_pairs pairs;
#pragma unroll
    for (int i = 0; i < Shape::Row::NUM_SCALES / 4; i++) {
        pairs.words[i] = ptx_cvt_f16x2(state->scale[i][0] * unit, state->scale[i][1] * unit);
        state->needs_fallback |= ptx_exceeds_f16x2(pairs.words[i], LARGEST_SCALES);
    }
    return pairs;
}

/* Converts words to operand A of four steps of 16 dimensions. */
static __device__ __forceinline__ void
convert_keys(const uint32_t words[8], uint32_t scales, uint32_t a[16])
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        convert_key_step(words[j], words[4 + j], scales, &a[4 * j]);
    }
}

/* Makes operand A of the RoPE part: the row's bf16 times `factor`, a power of two. */
template <typename Shape>
static __device__ __forceinline__ void
scale_rope(uint32_t from, uint32_t factor, const small_state<Shape> &state, uint32_t a[16])
{
    uint32_t words[2][8];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (Shape::HAS_SHORT_ROWS) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                words[i][j] = state.rope[i][j];
            }
        } else {
            ptx_load_shared_16(from + 8 * i * Shape::Row::PITCH, &words[i][0]);
            ptx_load_shared_16(from + 8 * i * Shape::Row::PITCH + 16, &words[i][4]);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a[4 * j] = ptx_mul_bf16x2(words[0][2 * j], factor);
        a[4 * j + 1] = ptx_mul_bf16x2(words[1][2 * j], factor);
        a[4 * j + 2] = ptx_mul_bf16x2(words[0][2 * j + 1], factor);
        a[4 * j + 3] = ptx_mul_bf16x2(words[1][2 * j + 1], factor);
    }
}

/* scores += A * tile `tile` of the query. */
template <typename Shape, bool IS_ROPE>
static __device__ __forceinline__ void
multiply_keys(uint64_t query, int tile, const uint32_t a[16], float (&scores)[Shape::HEADS / 2])
{
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint64_t b = query + ((tile * Shape::HEADS * 128 + j * 32) >> 4);
        if constexpr (IS_ROPE) {
            wgmma_bf16(scores, a + 4 * j, b, true);
        } else {
            wgmma_f16<false>(scores, a + 4 * j, b, true);
        }
    }
    wgmma_commit();
}

/* scores = q . k / (the query's power of two * the power of two of the warp's keys). */
template <typename Shape>
static __device__ __forceinline__ void
score_keys(small_memory<Shape> *shared, uint32_t rows, const thread_index &me,
           small_state<Shape> *state, float (&scores)[Shape::HEADS / 2])
{
    typedef typename Shape::Row Row;
    const uint64_t query =
        wgmma_descriptor(ptx_shared_address(shared->query), 1024, WGMMA_SWIZZLE_128);
    const uint32_t row = rows + me.row * Row::PITCH + 32 * me.column;
    const scale_pairs pairs = round_scales(state->key_exponent, state);
    uint32_t a[2][16], words[8], of_part = 0;
    load_nope_words<Row>(row, 0, words);
#pragma unroll
    for (int tile = 0; tile < Row::NOPE_TILES; tile++) {
        if (tile % 2 == 0) {
            of_part = scales_of_part<Row>(pairs, me.lane, tile / 2);
        }
        wgmma_wait<1>(); /* the products of this A are done */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            ptx_pin(&words[i]);
        }
        convert_keys(words, of_part, a[tile % 2]);
        if (tile + 1 < Row::NOPE_TILES) {
            load_nope_words<Row>(row, tile + 1, words);
        }
        multiply_keys<Shape, false>(query, tile, a[tile % 2], scores);
    }
    wgmma_wait<1>();
    uint32_t *const rope = a[Row::NOPE_TILES % 2];
    scale_rope(row + Row::ROPE_OFFSET, two_powers_of_two(-state->key_exponent), *state, rope);
    multiply_keys<Shape, true>(query, Row::NOPE_TILES, rope, scores);
    wgmma_wait<0>();
}

/* ---- Weights ------------------------------------------------------------------------------- */

/* An integer that is ordered as the floats are; float_of_order is the inverse. */
static __device__ __forceinline__ int32_t
order_of_float(float x)
{
    const int32_t bits = (int32_t)smla_float_bits(x);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
}

static __device__ __forceinline__ float
float_of_order(int32_t order)
{
    return smla_bits_float((uint32_t)(order ^ (order >> 31 & 0x7FFFFFFF)));
}

/* Sets all row maxima to -inf, before there are any scores. */
template <typename Shape>
static __device__ __forceinline__ void
clear_row_maxima(small_memory<Shape> *shared)
{
    if (threadIdx.x < Shape::HEADS) {
        shared->row_maxima[threadIdx.x] = order_of_float(-INFINITY);
    }
}

/* Raises the heads' maxima by the warp's scores. A NaN is no maximum: the weights will show it. */
template <typename Shape>
static __device__ __forceinline__ void
raise_row_maxima(small_memory<Shape> *shared, const thread_index &me,
                 const small_state<Shape> &state, const float (&scores)[Shape::HEADS / 2])
{
    leave_row_maxima(scores, state.score_factor, state.is_key, me, [=](int head, float row_max) {
        atomicMax(&shared->row_maxima[head], order_of_float(fmaxf(row_max, -INFINITY)));
    });
}

/* Finds the references of the lane's heads, from the maxima of all scores, and the power of two of
 * all keys. */
template <typename Shape>
static __device__ __forceinline__ void
find_small_reference(const small_memory<Shape> *shared, int num_granules, int lane,
                     small_state<Shape> *state)
{
    bool are_finite = true;
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        const float row_max = float_of_order(shared->row_maxima[head_of_lane<Shape>(lane, set)]);
        const bool is_finite = fabsf(row_max) < INFINITY;
        const bool is_bad = state->is_bad[set] || row_max == INFINITY;
        state->needs_fallback |= !is_bad && is_finite && fabsf(row_max) >= MAX_SCORE;
        state->reference[set] = is_bad ? NAN : softmax_reference(row_max) - (float)WEIGHT_EXPONENT;
        state->row_max[set] = row_max;
        are_finite &= is_finite && !is_bad;
    }
    state->key_exponent =
        __reduce_max_sync(0xFFFFFFFFu, shared->key_exponent[lane % SMALL_GRANULES]);
    state->needs_fallback |= state->key_exponent > MAX_UNIT_EXPONENT;
    const uint32_t is_key = lane < num_granules ? shared->is_key[lane] : 0;
    state->has_only = __reduce_add_sync(0xFFFFFFFFu, __popc(is_key)) == 1;
    /* leave_only_row makes the row's state from row_max, which must be finite then. */
    state->needs_fallback |= state->has_only && !(Shape::LEAVES_ONLY && are_finite);
}

/* Replaces RoPE values of the warp's keys, which are values, too, by f16 relative to 2^exponent. */
template <typename Shape>
static __device__ __forceinline__ void
keep_small_rope(uint32_t rows, int exponent, const thread_index &me, small_state<Shape> *state)
{
    typedef typename Shape::Row Row;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t at =
            rows + (me.row + 8 * i) * Row::PITCH + Row::ROPE_OFFSET + 32 * me.column;
        const uint32_t is_key = i == 0 ? state->is_key.first : state->is_key.second;
        uint32_t words[8];
        ptx_load_shared_16(at, words);
        ptx_load_shared_16(at + 16, words + 4);
        state->needs_fallback |= is_key != 0 && is_rope_large(find_rope_top(words), exponent);
        store_rope_halves(at, words, two_powers_of_two(-exponent));
    }
}

/* Stores the weights of the warp's keys, their sums, and the scales that the keys' values are
 * multiplied with. */
template <typename Shape>
static __device__ __forceinline__ void
weigh_keys(small_memory<Shape> *shared, int warp, const thread_index &me, small_state<Shape> *state,
           const float (&scores)[Shape::HEADS / 2])
{
    float sums[Shape::HEADS / 16][4];
#pragma unroll
    for (int chunk = 0; chunk < Shape::HEADS / 16; chunk++) {
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int head = 16 * chunk + 8 * j + 2 * me.column;
            const float of_lane = state->reference[16 * chunk / SMLA_WARP_LANES];
            const float reference[2] = {__shfl_sync(0xFFFFFFFFu, of_lane, head),
                                        __shfl_sync(0xFFFFFFFFu, of_lane, head + 1)};
            float e[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float x =
                    fmaf(scores[8 * chunk + 4 * j + i], state->score_factor, -reference[i % 2]);
                const uint32_t mask = i < 2 ? state->is_key.first : state->is_key.second;
                e[i] = smla_bits_float(smla_float_bits(ptx_exp2(x)) & mask);
            }
            pairs[2 * j] = ptx_cvt_f16x2(e[0], e[1]);
            pairs[2 * j + 1] = ptx_cvt_f16x2(e[2], e[3]);
            sums[chunk][2 * j] = e[0] + e[2];
            sums[chunk][2 * j + 1] = e[1] + e[3];
        }
        const int key = GRANULE_KEYS * warp + (me.lane & 15);
        const int piece = 2 * chunk + (me.lane >> 4);
        ptx_stmatrix_x4(find_probs(shared) + key * Shape::PROB_BYTES +
                            (piece ^ flip_of_key<Shape::HEADS>(key)) * 16,
                        pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    leave_rows<false>(sums, me, [=](int head, float sum) { shared->sums[warp][head] = sum; });
    typedef typename Shape::Row Row;
    const int exponent = max(state->key_exponent, -(int)MAX_KEY_EXPONENT);
    const scale_pairs scales = round_scales(exponent, state);
#pragma unroll
    for (int i = 0; i < Row::NUM_SCALES / 4; i++) {
        uint16_t *const to =
            (uint16_t *)&shared->scales[warp][(4 * i + me.column) * GRANULE_KEYS * 2] +
            4 * (me.row >> 1) + (me.row & 1);
        to[0] = (uint16_t)scales.words[i];
        to[2] = (uint16_t)(scales.words[i] >> 16);
    }
    if constexpr (Row::ROPE_IS_VALUE) {
        keep_small_rope(ptx_shared_address(shared->rows[warp]), exponent, me, state);
    }
}

/* ---- Values -------------------------------------------------------------------------------- */

/* A thread's values of a granule: 4 dimensions of keys 2 column + 0, 1, 8 and 9. */
typedef struct small_values {
    uint32_t raw[4];
    uint32_t scale[2];
} small_values;

/* Whether a warp has RoPE values, of which a word has two. */
template <typename Row>
static __device__ __forceinline__ bool
has_small_rope(const thread_index &me)
{
    return Row::ROPE_IS_VALUE &&
           __any_sync(0xFFFFFFFFu, 4 * me.group + me.warp >= SMALL_WARPS - 2); /* all lanes agree */
}

/* The address of a lane's values in a granule. */
template <typename Row>
static __device__ __forceinline__ uint32_t
find_small_values(uint32_t rows, const thread_index &me)
{
    const uint32_t from = rows + 2 * me.column * Row::PITCH;
    return has_small_rope<Row>(me) ? from + Row::ROPE_OFFSET + 64 * (me.warp - 2) + 8 * me.row
                                   : from + 128 * me.group + 32 * me.warp + 4 * me.row;
}

/* Loads the lane's values of a granule. Of RoPE values, it loads only the first two of four
 * dimensions. */
template <typename Shape>
static __device__ __forceinline__ void
load_small_values(const small_memory<Shape> *shared, int granule, const thread_index &me,
                  small_values *values)
{
    typedef typename Shape::Row Row;
    const uint32_t from = find_small_values<Row>(ptx_shared_address(shared->rows[granule]), me);
    const int tile = Row::NUM_SCALES == 8 ? 2 * me.group + me.warp / 2 : me.group;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values->raw[i] = ptx_load_shared_4(from + (i % 2 + 8 * (i / 2)) * Row::PITCH);
    }
    ptx_load_shared_8(ptx_shared_address(shared->scales[granule]) + tile * (GRANULE_KEYS * 2) +
                          8 * me.column,
                      values->scale);
}

/* RoPE values -> operand A of two products. The lane's other two dimensions are loaded only
 * here. */
template <typename Shape>
static __device__ __forceinline__ void
pair_small_rope(const small_memory<Shape> *shared, int granule, const thread_index &me,
                const small_values &values, uint32_t a[8])
{
    typedef typename Shape::Row Row;
    const uint32_t from = find_small_values<Row>(ptx_shared_address(shared->rows[granule]), me) + 4;
    uint32_t rest[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        rest[i] = ptx_load_shared_4(from + (i % 2 + 8 * (i / 2)) * Row::PITCH);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t *const words = i < 2 ? values.raw : rest;
        a[2 * i] = __byte_perm(words[i % 2 * 2], words[i % 2 * 2 + 1], 0x5410);
        a[2 * i + 1] = __byte_perm(words[i % 2 * 2], words[i % 2 * 2 + 1], 0x7632);
    }
}

/* Values -> operand A of two products. Rows of product b are dimensions 2b and 2b + 1 of every
 * four. */
static __device__ __forceinline__ void
convert_small_values(const small_values &values, uint32_t a[8])
{
#pragma unroll
    for (int b = 0; b < 2; b++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t bytes =
                __byte_perm(values.raw[2 * i], values.raw[2 * i + 1], b ? 0x7362 : 0x5140);
            uint32_t *const to = a + 4 * b + 2 * i;
            scale_e4m3x4(bytes, values.scale[i], &to[0], &to[1]);
        }
    }
}

/* A warp's sums of out for all heads, and the operands that add_small_values has prepared. */
template <typename Shape> struct small_output {
    float out[2][Shape::HEADS / 2];
    small_values values[2]; /* the next two granules, not converted yet */
    uint32_t a[2][8];
};

/* Starts the products of four granules. */
template <typename Shape>
static __device__ __forceinline__ void
add_four_granules(const small_memory<Shape> *shared, int first, const thread_index &me,
                  uint64_t probs, small_output<Shape> *output)
{
#pragma unroll
    for (int i = 0; i < GROUP_GRANULES; i++) {
        small_values *const values = &output->values[i % 2];
        uint32_t *const a = output->a[i % 2];
        wgmma_wait<1>(); /* the products of this A are done */
#pragma unroll
        for (int j = 0; j < 4; j++) {
            ptx_pin(&values->raw[j]);
        }
        if (has_small_rope<typename Shape::Row>(me)) {
            pair_small_rope(shared, first + i, me, *values, a);
        } else {
            convert_small_values(*values, a);
        }
        load_small_values(shared, min(first + i + 2, SMALL_GRANULES - 1), me, values);
        const uint64_t b = probs + (first + i) * (GRANULE_KEYS * Shape::PROB_BYTES >> 4);
        wgmma_fence();
        wgmma_f16<true>(output->out[0], a, b, true);
        wgmma_f16<true>(output->out[1], a + 4, b, true);
        wgmma_commit();
    }
}

/* out = values * weights, 128 values per warpgroup. Granules come in fours, because a split's
 * columns come in multiples of 64. On return the last products are under way. */
template <typename Shape>
static __device__ __forceinline__ void
add_small_values(const small_memory<Shape> *shared, int num_granules, const thread_index &me,
                 small_output<Shape> *output)
{
    const uint64_t probs =
        wgmma_descriptor(find_probs(shared), 8 * Shape::PROB_BYTES, Shape::PROBS_SWIZZLE);
#pragma unroll
    for (int i = 0; i < Shape::HEADS / 2; i++) {
        output->out[0][i] = 0.0f;
        output->out[1][i] = 0.0f;
    }
    load_small_values(shared, 0, me, &output->values[0]);
    load_small_values(shared, 1, me, &output->values[1]);
    int first = 0;
#pragma unroll 1
    for (; first < num_granules - GROUP_GRANULES; first += GROUP_GRANULES) {
        add_four_granules(shared, first, me, probs, output);
        wgmma_wait<0>(); /* ptxas keeps no products under way around a loop */
    }
    add_four_granules(shared, first, me, probs, output);
}
