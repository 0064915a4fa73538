/* bf16_products.cuh: the loop of attention_bf16_sm90.cu: scores of a block of keys, their
 * references, weights, and values of both groups' blocks.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/bf16_common.cuh"

/* The reference of a head that has had no key yet. Relative to it, logits are their own exponents.
 * No other reference has these bits. */
#define NO_REFERENCE (-0.0f)

enum {
    HALF_SCORES = BLOCK_KEYS / 4, /* per thread: two keys of every eight, for two heads */
    HALF_PROBS = BLOCK_KEYS / 8,
};

/* ---- Scores -------------------------------------------------------------------------------- */

/* Starts the products of 16 dimensions, which are f16 or bf16. is_half is known when the code is
 * compiled. */
static __device__ __forceinline__ void
multiply_keys(bool is_half, float (&scores)[BLOCK_KEYS / 2], uint64_t query, uint64_t keys,
              bool is_sum)
{
    if (is_half) {
        wgmma_16_tiles<true>(scores, query, keys, is_sum);
    } else {
        wgmma_16_tiles<false>(scores, query, keys, is_sum);
    }
}

/* Starts the products of the scores of the group's block, piece by piece as the pieces come. wgmma
 * cuts each addition off, so two sums of half the values lose half as much as one sum. */
template <typename Keys>
static __device__ __forceinline__ void
score_block(uint32_t base, const thread_index &me, uint32_t parity, bf16_consumer *state)
{
    const uint64_t query = wgmma_descriptor(BF16_AT(base, query), 1024, WGMMA_SWIZZLE_128);
    const uint64_t keys =
        wgmma_descriptor(BF16_AT(base, keys) + me.group * BLOCK_BYTES, 1024, WGMMA_SWIZZLE_128);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int piece = nth_piece<Keys>(me.group, i);
        ptx_mbarrier_wait(full_barrier(base, me.group, piece), parity);
        wgmma_fence();
#pragma unroll
        for (int tile = first_tile<Keys::ROPE>(piece); tile < first_tile<Keys::ROPE>(piece + 1);
             tile++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int n = (tile * TILE_BYTES + k * 32) >> 4;
                const int first = first_tile<Keys::ROPE>(
                    nth_piece<Keys>(me.group, Keys::HALVES_SCORES ? i / 2 * 2 : 0));
                multiply_keys(Keys::WIDE && tile != ROPE_TILE,
                              i < 2 || !Keys::HALVES_SCORES ? state->scores : state->more_scores,
                              query + n, keys + n, n != first * (TILE_BYTES >> 4));
            }
        }
        wgmma_commit();
    }
}

/* ---- Masks --------------------------------------------------------------------------------- */

/* The bits ALL_KEYS and IS_LAST that all words of is_key have for the group's block, which has
 * come. */
static __device__ __forceinline__ uint32_t
load_block_bits(uint32_t base, const thread_index &me)
{
    uint32_t words[GATHER_WARPS];
    ptx_load_shared_16(BF16_AT(base, is_key) + 4 * GATHER_WARPS * me.group, words);
    return words[0] & words[1] & words[2] & words[3];
}

/* A bit for each key that is there: of keys 0 to 31 (half 0) or 32 to 63 (half 1) of the group's
 * block. */
static __device__ __forceinline__ uint32_t
load_is_key(const bf16_memory *shared, int group, int half)
{
    const volatile uint32_t *const words = &shared->is_key[group][2 * half];
    return __byte_perm(words[0], words[1], 0x5410);
}

/* Puts -inf in place of the scores of keys that are not there. */
static __device__ __forceinline__ void
mask_scores(const bf16_memory *shared, const thread_index &me, float (&scores)[BLOCK_KEYS / 2])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t bits = load_is_key(shared, me.group, half) >> 2 * me.column;
#pragma unroll
        for (int i = 0; i < HALF_SCORES; i++) {
            float *const score = &scores[half * HALF_SCORES + i];
            *score = bits >> (8 * (i / 4) + i % 2) & 1 ? *score : -INFINITY;
        }
    }
}

/* Bit i is set if begin <= i < end, of 32 bits. */
static __device__ __forceinline__ uint32_t
bits_between(int32_t begin, int32_t end)
{
    const uint32_t from = begin >= 32 ? 0 : 0xFFFFFFFFu << max(begin, 0);
    const uint32_t to = end >= 32 ? 0xFFFFFFFFu : (1u << max(end, 0)) - 1;
    return from & to;
}

/* mask_scores where each row of the tile sees its own range of keys. */
static __device__ __forceinline__ void
mask_rows(const bf16_memory *shared, const thread_index &me, float (&scores)[BLOCK_KEYS / 2])
{
    const int32_t word = *(const volatile int32_t *)&shared->dense.block_key[me.group];
    const int32_t first = word & -BLOCK_KEYS;
    const volatile row_limits *const limits =
        &shared->limits[word & (LIMIT_TURNS - 1)][16 * me.warp + me.row];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32_t are_keys = load_is_key(shared, me.group, half);
        const int32_t key = first + 32 * half;
#pragma unroll
        for (int piece = 0; piece < 2; piece++) {
            const uint32_t bits = (are_keys & bits_between(limits[8 * piece].begin - key,
                                                           limits[8 * piece].end - key)) >>
                                  2 * me.column;
#pragma unroll
            for (int i = 0; i < HALF_SCORES / 2; i++) {
                float *const score = &scores[half * HALF_SCORES + 4 * (i / 2) + 2 * piece + i % 2];
                *score = bits >> (8 * (i / 2) + i % 2) & 1 ? *score : -INFINITY;
            }
        }
    }
}

/* The largest of the thread's scores of head `row` (piece 0) or row + 8 (piece 1). */
static __device__ __forceinline__ float
find_row_max(const float (&scores)[BLOCK_KEYS / 2], int piece)
{
    float row_max = -INFINITY;
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i += 4) {
        row_max = fmaxf(row_max, fmaxf(scores[i + 2 * piece], scores[i + 2 * piece + 1]));
    }
    return row_max;
}

/* ---- References ----------------------------------------------------------------------------
 *
 * Scores of blocks become weights one block after the other: A0 by group 0, B0 by group 1, A1 by
 * group 0, and so on. A group publishes the references of each of its blocks. The references in
 * shared memory are those that were published last, and only the group whose turn it is may move
 * them. Its turn begins when the references of the block before are published. It ends when the
 * group publishes its own, after a look at all exponents of its 64 keys. So no thread writes
 * references while others read them:
 *
 *   group 0: wait for B(n-1) | read, follow, add B(n-1) | move, publish An, weigh, follow, add An
 *   group 1: wait for An | read, follow, add An | move, publish Bn, weigh, follow, add Bn | ...
 *
 * A block's references are published before its weights exist, so the other group follows while it
 * would wait for the weights anyway.
 *
 * Warp w of either group has the same 16 heads, and a head has four lanes of the warp. So each warp
 * does all of this alone: a maximum takes two shuffles, and branches are the warp's.
 *
 * Each group remembers the references that its own out, sums and maxima are relative to. To follow
 * is to multiply these by 2^(older - newer) where references have changed. A group finds the
 * other's changes when it compares its own references with those in shared memory: there is no flag
 * that could be missed or found twice. It knows its own changes, and `out` follows them last, from
 * registers, because the other group may move references again by then.
 * An item begins without references in registers. Its first block always writes the references in
 * shared memory, so no reference of the item before is used. When the item ends, group 0 has
 * followed group 1's last block, and both groups remember the same references.
 *
 * A reference may lie below the maximum, but by MAX_EXPONENT (key_kind) at most. So references
 * seldom move, and a block that moves none costs only a look at its exponents and at the
 * references.
 */

static __device__ __forceinline__ bool
has_reference(float reference)
{
    return smla_float_bits(reference) != smla_float_bits(NO_REFERENCE);
}

/* The address of the reference of head `row`. That of head row + 8 is 8 elements behind it. */
static __device__ __forceinline__ volatile float *
find_references(bf16_memory *shared, const thread_index &me)
{
    return &shared->reference[16 * me.warp + me.row];
}

/* The bits of the largest exponent of each head. They are compared as integers, three at once: this
 * is right where the largest one is positive. Infinity is above all numbers. The result for NaN
 * does not matter. */
static __device__ __forceinline__ void
find_highest(const float (&exponents)[BLOCK_KEYS / 2], int32_t highest[2])
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        highest[piece] = INT32_MIN;
#pragma unroll
        for (int i = 0; i < BLOCK_KEYS / 2; i += 4) {
            highest[piece] = __vimax3_s32(highest[piece], __float_as_int(exponents[i + 2 * piece]),
                                          __float_as_int(exponents[i + 2 * piece + 1]));
        }
    }
}

/* Tells the other group that the references are now those of the group's block. */
static __device__ __forceinline__ void
publish_references(uint32_t base, const thread_index &me)
{
    ptx_mbarrier_arrive(references_ready_barrier(base, me.group), true);
}

/* Whether one of the lane's heads has a reference, so that `out` is not 0 there. */
static __device__ __forceinline__ bool
has_keys(const bf16_consumer &state)
{
    return has_reference(state.reference[0]) || has_reference(state.reference[1]);
}

/* Multiplies the thread's sums and maxima so that they follow newer references. `out` follows
 * later, when the caller multiplies it by the factors. Returns whether it must, because some lane
 * of the warp has added to `out`. */
static __device__ __forceinline__ bool
adopt_references(const float newer[2], bf16_consumer *state, float factors[2])
{
    const bool had_keys = has_keys(*state);
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const float shift = state->reference[piece] - newer[piece];
        factors[piece] = ptx_exp2(fminf(shift, 0.0f)); /* shift > 0: no reference, no sum */
        state->sum[piece] *= factors[piece];
        state->excess[piece] *= factors[piece];
        state->row_max[piece] += shift;
        state->reference[piece] = newer[piece];
    }
    const bool has_both = has_reference(newer[0]) && has_reference(newer[1]);
    state->is_late = has_both ? 0 : INT32_MAX;
    return __any_sync(0xFFFFFFFFu, had_keys);
}

/* Multiplies `out` by factors of its heads. No product that adds to it is under way. */
static __device__ __forceinline__ void
scale_out(const float factors[2], bf16_consumer *state)
{
#pragma unroll
    for (int i = 0; i < HALF_VALUES / 2; i++) {
        state->out[i] *= factors[i / 2 % 2];
    }
}

/* A head's new reference. It is NaN where f16 keys are rounded by so much that this decides which
 * key is the heaviest; the item is then computed again (finish_wide_item). A head with an infinite
 * logit has NaN results anyway. */
template <typename Keys>
static __device__ __forceinline__ float
limit_reference(float reference)
{
    const float size = fabsf(reference);
    return Keys::WIDE && size >= MAX_SCORE && size < INFINITY ? NAN : reference;
}

/* Moves references to the block's maxima where exponents are too large or a head has had no key.
 * Publishes the references, and makes the exponents relative to them. Returns whether `out` must be
 * multiplied by the factors; sums and maxima have followed. */
template <typename Keys>
static __device__ __forceinline__ bool
move_references(uint32_t base, const thread_index &me, const int32_t highest[2],
                bf16_memory *shared, bf16_consumer *state, float factors[2])
{
    float row_maxima[2] = {__int_as_float(highest[0]), __int_as_float(highest[1])};
    if (__any_sync(0xFFFFFFFFu, state->is_late != 0)) {
        row_maxima[0] = find_row_max(state->scores, 0);
        row_maxima[1] = find_row_max(state->scores, 1);
    }
    max_of_lanes(row_maxima);
    float newer[2];
    bool any_moves = false;
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const float older = state->reference[piece];
        const bool moves =
            row_maxima[piece] > (has_reference(older) ? Keys::MAX_EXPONENT : -INFINITY);
        const float rise = moves ? row_maxima[piece] - Keys::TOP_EXPONENT : 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_KEYS / 2; i += 4) {
            state->scores[i + 2 * piece] -= rise;
            state->scores[i + 2 * piece + 1] -= rise;
        }
        /* + 0 turns -0, which is NO_REFERENCE, into 0 */
        newer[piece] = moves ? limit_reference<Keys>(older + rise + 0.0f) : older;
        any_moves |= moves;
    }
    __syncwarp(); /* all lanes have read the references, which one lane of four writes */
    if (me.column == 0) {
        find_references(shared, me)[0] = newer[0];
        find_references(shared, me)[8] = newer[1];
    }
    if (me.group == 0 && any_moves && has_keys(*state)) {
        atomicOr(&shared->has_moved, 1); /* racecheck accepts that several warps do it */
    }
    publish_references(base, me);
    return __any_sync(0xFFFFFFFFu, any_moves) && adopt_references(newer, state, factors);
}

/* Waits until the other group's block has published its references, and follows them if any have
 * moved. GROUP: the own one. Group 1 has products of scores under way, and ptxas accepts no change
 * of out before a wait for them, which all warps of a group have to make together. So all make it
 * where group 0 says that one of them must change its out. */
template <int GROUP>
static __device__ __forceinline__ void
follow_other_group(uint32_t base, const thread_index &me, uint32_t parity, bf16_memory *shared,
                   bf16_consumer *state)
{
    ptx_mbarrier_wait(references_ready_barrier(base, me.group ^ 1), parity);
    const bool waits = GROUP == 1 && *(const volatile uint32_t *)&shared->has_moved != 0;
    const float newer[2] = {find_references(shared, me)[0], find_references(shared, me)[8]};
    const bool has_moved = smla_float_bits(newer[0]) != smla_float_bits(state->reference[0]) ||
                           smla_float_bits(newer[1]) != smla_float_bits(state->reference[1]);
    if (__any_sync(0xFFFFFFFFu, has_moved | waits)) {
        float factors[2];
        if (GROUP == 1 && __any_sync(0xFFFFFFFFu, waits)) {
            wgmma_wait<0>();
            if (adopt_references(newer, state, factors)) {
                scale_out(factors, state);
            }
        } else if (adopt_references(newer, state, factors) && GROUP == 0) {
            scale_out(factors, state);
        }
    }
}

/* What multiplies scores of a lane's first or second head. */
template <typename Keys>
static __device__ __forceinline__ float
find_score_scale(const attention_launch &launch, const bf16_consumer &state, int piece)
{
    return Keys::WIDE ? state.score_scale[piece] : launch.scale_log2;
}

/* Begins the exponents of weights with the first half of each score, the sum over half of the
 * dimensions. The product over the other half is still under way. */
template <typename Keys>
static __device__ __forceinline__ void
begin_exponents(const attention_launch &launch, bf16_consumer *state)
{
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i++) {
        const int piece = i / 2 % 2;
        state->scores[i] = fmaf(state->scores[i], find_score_scale<Keys>(launch, *state, piece),
                                -state->reference[piece]);
    }
}

/* Scores -> exponents of weights, after begin_exponents. Publishes the block's references. Returns
 * whether references have moved, so that `out` must be multiplied by the factors. block_bits: the
 * result of load_block_bits. */
template <typename Keys, bool MAXIMA>
static __device__ __forceinline__ bool
find_exponents(const attention_launch &launch, uint32_t base, const thread_index &me,
               uint32_t block_bits, bf16_memory *shared, bf16_consumer *state, float factors[2])
{
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i++) {
        state->scores[i] =
            Keys::HALVES_SCORES
                ? fmaf(state->more_scores[i], find_score_scale<Keys>(launch, *state, i / 2 % 2),
                       state->scores[i])
                : fmaf(state->scores[i], launch.wgmma_scale_log2, -state->reference[i / 2 % 2]);
    }
    if ((block_bits & unmasked_bits<Keys>()) != unmasked_bits<Keys>()) {
        if constexpr (Keys::TILED) {
            mask_rows(shared, me, state->scores);
        } else {
            mask_scores(shared, me, state->scores);
        }
    }
    if constexpr (MAXIMA) {
        state->row_max[0] = fmaxf(state->row_max[0], find_row_max(state->scores, 0));
        state->row_max[1] = fmaxf(state->row_max[1], find_row_max(state->scores, 1));
    }
    int32_t highest[2];
    find_highest(state->scores, highest);
    const bool is_rare =
        __vimax3_s32(highest[0], highest[1], state->is_late) > __float_as_int(Keys::MAX_EXPONENT);
    if (__any_sync(0xFFFFFFFFu, is_rare)) {
        return move_references<Keys>(base, me, highest, shared, state, factors);
    }
    publish_references(base, me);
    return false;
}

/* ---- Weights ------------------------------------------------------------------------------- */

/* Exponents of half a block -> weights, which also become, in bf16 or f16, operand A of the next
 * products. */
template <typename Keys>
static __device__ __forceinline__ void
weigh_half(int half, bf16_consumer *state)
{
    float *const weights = &state->scores[half * HALF_SCORES];
#pragma unroll
    for (int i = 0; i < HALF_SCORES; i++) {
        weights[i] = ptx_exp2(weights[i]);
    }
#pragma unroll
    for (int i = 0; i < HALF_PROBS; i++) {
        state->probs[half * HALF_PROBS + i] =
            Keys::WIDE ? ptx_cvt_f16x2(weights[2 * i], weights[2 * i + 1])
                       : smla_cvt_bf16x2(weights[2 * i], weights[2 * i + 1]);
    }
}

/* Adds the block's weights to the sums, compensated: equal terms round the same way. */
static __device__ __forceinline__ void
add_to_sums(bf16_consumer *state)
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        float pairs[BLOCK_KEYS / 8];
#pragma unroll
        for (int i = 0; i < BLOCK_KEYS / 8; i++) {
            pairs[i] = state->scores[4 * i + 2 * piece] + state->scores[4 * i + 2 * piece + 1];
        }
        const float sum = sum_values<BLOCK_KEYS / 8>(pairs);
        const float older = state->sum[piece];
        const float term = sum - state->excess[piece];
        state->sum[piece] = older + term;
        state->excess[piece] = (state->sum[piece] - older) - term;
    }
}

/* The address of a group's weights for the other group. */
static __device__ __forceinline__ uint32_t
find_probs(uint32_t base, int group)
{
    return group == 0 ? BF16_AT(base, keys) + ROPE_TILE * TILE_BYTES : BF16_AT(base, probs);
}

/* Stores the weights of half a block in shared memory. */
static __device__ __forceinline__ void
store_half(uint32_t base, const thread_index &me, int half, const bf16_consumer &state)
{
    const int head = 16 * me.warp + me.lane % 16;
    const uint32_t to = find_probs(base, me.group) + head * 128;
#pragma unroll
    for (int k = 2 * half; k < 2 * half + 2; k++) {
        const uint32_t *const a = &state.probs[4 * k];
        ptx_stmatrix_x4(to + ((2 * k + me.lane / 16) ^ (head & 7)) * 16, a[0], a[1], a[2], a[3]);
    }
}

/* Publishes the stored weights to the other group. The fence makes them visible to wgmma. */
static __device__ __forceinline__ void
publish_weights(uint32_t base, const thread_index &me)
{
    ptx_fence_async_shared();
    ptx_mbarrier_arrive(probs_ready_barrier(base, me.group), true);
}

/* ---- Values -------------------------------------------------------------------------------- */

/* The descriptor of the group's values of a block, as B. */
static __device__ __forceinline__ uint64_t
describe_values(uint32_t base, int block, int group)
{
    return wgmma_descriptor_of_tiles(BF16_AT(base, keys) + block * BLOCK_BYTES +
                                         group * (HALF_TILES * TILE_BYTES),
                                     TILE_BYTES);
}

/* Gives the group's values of a block back to the gather warps. */
static __device__ __forceinline__ void
free_values(uint32_t base, int block, int group)
{
    ptx_mbarrier_arrive(empty_barrier(base, block, group), true);
}

/* Starts out += weights * values for 16 keys. A kernel with 512 threads has no instruction for 256
 * values at once, because ptxas wants all of an instruction's registers to fit what a launch gives
 * every thread. */
template <typename Keys, typename Weights>
static __device__ __forceinline__ void
add_values(bf16_consumer *state, Weights weights, uint64_t values)
{
    if constexpr (!Keys::CODED) {
        wgmma_16_rows_first<Keys::WIDE>(state->out, weights, values);
    } else {
        wgmma_bf16_rows_first_128<0>(state->out, weights, values);
        wgmma_bf16_rows_first_128<64>(state->out, weights,
                                      values + (HALF_TILES / 2 * TILE_BYTES >> 4));
    }
}

/* Starts out += weights * values for half the keys of the group's own block. */
template <typename Keys>
static __device__ __forceinline__ void
add_own_half(uint32_t base, const thread_index &me, int half, bf16_consumer *state)
{
    const uint64_t values = describe_values(base, me.group, me.group);
    wgmma_fence();
#pragma unroll
    for (int k = 2 * half; k < 2 * half + 2; k++) {
        add_values<Keys>(state, (const uint32_t *)&state->probs[4 * k],
                         values + (k * 16 * 128 >> 4));
    }
    wgmma_commit();
}

/* Waits for the other group's weights. */
static __device__ __forceinline__ void
wait_for_weights(uint32_t base, const thread_index &me, uint32_t parity)
{
    ptx_mbarrier_wait(probs_ready_barrier(base, me.group ^ 1), parity);
}

/* Starts out += weights * values for the other group's block. */
template <typename Keys>
static __device__ __forceinline__ void
add_other_block(uint32_t base, const thread_index &me, bf16_consumer *state)
{
    const int other = me.group ^ 1;
    const uint64_t values = describe_values(base, other, me.group);
    const uint64_t probs = wgmma_descriptor(find_probs(base, other), 1024, WGMMA_SWIZZLE_128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_KEYS / 16; k++) {
        add_values<Keys>(state, probs + (k * 32 >> 4), values + (k * 16 * 128 >> 4));
    }
    wgmma_commit();
}
