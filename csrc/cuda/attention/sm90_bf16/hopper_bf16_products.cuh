/* hopper_bf16_products.cuh: the loop of attention_bf16_sm90.cu: scores of a block of keys, their
 * references, weights, and values of both groups' blocks.
 */
#ifndef SMLA_CUDA_HOPPER_BF16_PRODUCTS_CUH
#define SMLA_CUDA_HOPPER_BF16_PRODUCTS_CUH

#include "cuda/attention/sm90_bf16/hopper_bf16.cuh"

/* Above this exponent of a weight its head's reference moves. */
#define MAX_EXPONENT 40.0f

/* The reference of a head that has had no key: its logits are their own exponents. No other
 * reference has these bits. */
#define NO_REFERENCE (-0.0f)

enum {
    HALF_SCORES = WEIGHED_KEYS / 2, /* of a thread: two keys of every eight, for two heads */
    HALF_PROBS = WEIGHED_KEYS / 4,
};

/* ---- Scores -------------------------------------------------------------------------------- */

/* Starts the scores of the group's block, piece by piece as they come. */
template <bool ROPE>
static __device__ __forceinline__ void
score_block(uint32_t base, const lane_place &me, uint32_t parity, bf16_consumer *state)
{
    const uint64_t query = wgmma_descriptor(BF16_AT(base, query), 1024, WGMMA_SWIZZLE_128);
    const uint64_t keys =
        wgmma_descriptor(BF16_AT(base, keys) + me.group * BLOCK_BYTES, 1024, WGMMA_SWIZZLE_128);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int piece = nth_piece(me.group, i);
        ptx_mbarrier_wait(BF16_AT(base, full) + 8 * (me.group * PIECES + piece), parity);
        wgmma_fence();
#pragma unroll
        for (int tile = first_tile<ROPE>(piece); tile < first_tile<ROPE>(piece + 1); tile++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int n = (tile * TILE_BYTES + k * 32) >> 4;
                wgmma_bf16_tiles(state->scores, query + n, keys + n,
                                 n != first_tile<ROPE>(nth_piece(me.group, 0)) * (TILE_BYTES >> 4));
            }
        }
        wgmma_commit();
    }
}

/* ---- Masks --------------------------------------------------------------------------------- */

/* What is in all words of is_key of the group's block, which has come: ALL_KEYS, IS_LAST. */
static __device__ __forceinline__ uint32_t
load_block_bits(uint32_t base, const lane_place &me)
{
    uint32_t words[GATHER_WARPS];
    ptx_load_shared_16(BF16_AT(base, is_key) + 4 * GATHER_WARPS * me.group, words);
    return words[0] & words[1] & words[2] & words[3];
}

/* Whether keys 0 to 31 (half 0) or 32 to 63 (1) of the group's block are there, a bit each. */
static __device__ __forceinline__ uint32_t
load_is_key(const bf16_memory *shared, int group, int half)
{
    const volatile uint32_t *const words = &shared->is_key[group][2 * half];
    return __byte_perm(words[0], words[1], 0x5410);
}

/* -inf in place of scores of keys that are not there. */
static __device__ __forceinline__ void
mask_scores(const bf16_memory *shared, const lane_place &me, float (&scores)[BLOCK_KEYS / 2])
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

/* The largest of the thread's scores of row row (piece 0) or row + 8 (1). */
static __device__ __forceinline__ float
find_top(const float (&scores)[BLOCK_KEYS / 2], int piece)
{
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i += 4) {
        top = fmaxf(top, fmaxf(scores[i + 2 * piece], scores[i + 2 * piece + 1]));
    }
    return top;
}

/* ---- References ----------------------------------------------------------------------------
 *
 * Blocks are weighed one after the other: A0 by group 0, B0 by group 1, A1 by group 0, and so on.
 * The references in shared memory are those of the block that was weighed last, and only the group
 * whose turn it is may move them. Its turn begins when it has waited for the first weights of the
 * block in front, and ends when it tells of its own: all exponents of its 64 keys are looked at
 * before its first weights. So a group reads references that nobody writes, and writes references
 * that nobody reads:
 *
 *   group 0: wait for B(n-1) | read, follow, add B(n-1) | move, follow, weigh An | tell of An
 *   group 1:                              wait for An | read, follow, add An | move, weigh Bn | ...
 *
 * A warp has 16 heads, in both groups the same ones, and a head has four lanes of it. So all of
 * this is a matter of one warp: maxima need two shuffles, and branches are the warp's.
 *
 * Each group remembers the references that its own out, sums and maxima go with. To follow is to
 * compare them with those in shared memory, and to multiply by 2^(older - newer) where they differ.
 * There is no flag that could be lost or found twice. Group 1 moves references while it adds values
 * of An; it follows when those are added, before it adds its own. A work begins with no references,
 * in registers; its first block always writes them, so none of the work in front is read. When it
 * ends, group 0 has followed group 1's last block, and both remember the same.
 *
 * A reference may lie below the maximum, but by MAX_EXPONENT at most. So references seldom move,
 * and a block that moves none costs a look at its exponents and at the references.
 */

static __device__ __forceinline__ bool
has_reference(float reference)
{
    return smla_float_bits(reference) != smla_float_bits(NO_REFERENCE);
}

/* Where the references of heads row and row + 8 are: the second is 8 behind the first. */
static __device__ __forceinline__ volatile float *
find_references(bf16_memory *shared, const lane_place &me)
{
    return &shared->reference[16 * me.warp + me.row];
}

/* The bits of the largest exponent of each head, compared as integers, three at once: right where
 * it is positive. Infinity is above all numbers. What NaN does here does not matter. */
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

/* Moves references to the block's maxima where exponents are too large, or heads have had no key,
 * and makes the exponents go with them. Whether any has moved: what was added up does not follow
 * yet. */
static __device__ __forceinline__ bool
move_references(const lane_place &me, const int32_t highest[2], bf16_memory *shared,
                bf16_consumer *state)
{
    const bool any_late = __any_sync(0xFFFFFFFFu, state->is_late != 0);
    bool any_moves = false;
    __syncwarp(); /* all lanes have read the references that one of four writes */
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const float top = max_of_lanes(any_late ? find_top(state->scores, piece)
                                                : __int_as_float(highest[piece]));
        const float older = state->reference[piece];
        const bool moves = top > (has_reference(older) ? MAX_EXPONENT : -INFINITY);
        const float rise = moves ? top : 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_KEYS / 2; i += 4) {
            state->scores[i + 2 * piece] -= rise;
            state->scores[i + 2 * piece + 1] -= rise;
        }
        if (me.column == 0) { /* + 0 makes 0 of -0, which is NO_REFERENCE */
            find_references(shared, me)[8 * piece] = moves ? older + rise + 0.0f : older;
        }
        any_moves |= moves;
    }
    __syncwarp();
    return __any_sync(0xFFFFFFFFu, any_moves);
}

/* Makes all that the thread has added up follow the references in shared memory. Nothing is in
 * flight that adds to out. WAITS: but scores are, and ptxas accepts no change of out before a wait
 * for those. */
template <bool WAITS>
static __device__ __forceinline__ void
follow_references(const lane_place &me, bf16_memory *shared, bf16_consumer *state)
{
    const bool had_keys = has_reference(state->reference[0]) || has_reference(state->reference[1]);
    float factors[2];
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const float newer = find_references(shared, me)[8 * piece];
        const float shift = state->reference[piece] - newer;
        factors[piece] = ptx_exp2(fminf(shift, 0.0f)); /* above 0 there was no reference, nor sum */
        state->sum[piece] *= factors[piece];
        state->excess[piece] *= factors[piece];
        state->top[piece] += shift;
        state->reference[piece] = newer;
    }
    const bool has_both = has_reference(state->reference[0]) && has_reference(state->reference[1]);
    state->is_late = has_both ? 0 : INT32_MAX;
    if (__any_sync(0xFFFFFFFFu, had_keys)) {
        if constexpr (WAITS) {
            wgmma_wait<0>();
        }
#pragma unroll
        for (int i = 0; i < HALF_VALUES / 2; i++) {
            state->out[i] *= factors[i / 2 % 2];
        }
    }
}

/* The same where the other group has moved any. */
template <bool WAITS>
static __device__ __forceinline__ void
follow_other_group(const lane_place &me, bf16_memory *shared, bf16_consumer *state)
{
    bool has_moved = false;
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        has_moved |= smla_float_bits(find_references(shared, me)[8 * piece]) !=
                     smla_float_bits(state->reference[piece]);
    }
    if (__any_sync(0xFFFFFFFFu, has_moved)) {
        follow_references<WAITS>(me, shared, state);
    }
}

/* Scores -> exponents of weights. Whether that has moved references; if the group FOLLOWS at once,
 * it has. block_bits: load_block_bits. */
template <bool MAXIMA, bool FOLLOWS>
static __device__ __forceinline__ bool
find_exponents(float score_scale, const lane_place &me, uint32_t block_bits, bf16_memory *shared,
               bf16_consumer *state)
{
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i++) {
        state->scores[i] = fmaf(state->scores[i], score_scale, -state->reference[i / 2 % 2]);
    }
    if ((block_bits & ALL_KEYS) != ALL_KEYS) {
        mask_scores(shared, me, state->scores);
    }
    if constexpr (MAXIMA) {
        state->top[0] = fmaxf(state->top[0], find_top(state->scores, 0));
        state->top[1] = fmaxf(state->top[1], find_top(state->scores, 1));
    }
    int32_t highest[2];
    find_highest(state->scores, highest);
    const bool is_rare =
        __vimax3_s32(highest[0], highest[1], state->is_late) > __float_as_int(MAX_EXPONENT);
    if (!__any_sync(0xFFFFFFFFu, is_rare)) {
        return false;
    }
    const bool has_moved = move_references(me, highest, shared, state);
    if (FOLLOWS && has_moved) {
        follow_references<false>(me, shared, state);
    }
    return has_moved;
}

/* ---- Weights ------------------------------------------------------------------------------- */

/* Exponents of half a block -> weights, and in bf16 as A of the next products. */
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
        state->probs[half * HALF_PROBS + i] = smla_cvt_bf16x2(weights[2 * i], weights[2 * i + 1]);
    }
}

/* Takes the weights of the block. Compensated: equal terms round the same way. */
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

/* Where a group's weights are for the other one. */
static __device__ __forceinline__ uint32_t
find_probs(uint32_t base, int group)
{
    return group == 0 ? BF16_AT(base, keys) + ROPE_TILE * TILE_BYTES : BF16_AT(base, probs);
}

/* Weights of half a block to shared memory. */
static __device__ __forceinline__ void
store_half(uint32_t base, const lane_place &me, int half, const bf16_consumer &state)
{
    const int head = 16 * me.warp + me.lane % 16;
    const uint32_t to = find_probs(base, me.group) + head * 128;
#pragma unroll
    for (int k = 2 * half; k < 2 * half + 2; k++) {
        const uint32_t *const a = &state.probs[4 * k];
        ptx_stmatrix_x4(to + ((2 * k + me.lane / 16) ^ (head & 7)) * 16, a[0], a[1], a[2], a[3]);
    }
}

/* Tells the other group of them: the fence is for wgmma. */
static __device__ __forceinline__ void
publish_half(uint32_t base, const lane_place &me, int half)
{
    ptx_fence_async_shared();
    ptx_mbarrier_arrive(BF16_AT(base, weighed) + 16 * me.group + 8 * half, true);
}

/* ---- Values -------------------------------------------------------------------------------- */

/* The group's values of a block, as B. */
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
    ptx_mbarrier_arrive(BF16_AT(base, empty) + 16 * block + 8 * group, true);
}

/* Starts out += weights * values for half the keys of the group's own block. */
static __device__ __forceinline__ void
add_own_half(uint32_t base, const lane_place &me, int half, bf16_consumer *state)
{
    const uint64_t values = describe_values(base, me.group, me.group);
    wgmma_fence();
#pragma unroll
    for (int k = 2 * half; k < 2 * half + 2; k++) {
        wgmma_bf16_rows_first(state->out, &state->probs[4 * k], values + (k * 16 * 128 >> 4));
    }
    wgmma_commit();
}

/* Waits for weights of the other group: those of half a block. */
static __device__ __forceinline__ void
wait_for_weights(uint32_t base, const lane_place &me, uint32_t parity, int half)
{
    ptx_mbarrier_wait(BF16_AT(base, weighed) + 16 * (me.group ^ 1) + 8 * half, parity);
}

/* Starts the same for the other group's block. */
static __device__ __forceinline__ void
add_other_half(uint32_t base, const lane_place &me, int half, bf16_consumer *state)
{
    const int other = me.group ^ 1;
    const uint64_t values = describe_values(base, other, me.group);
    const uint64_t probs = wgmma_descriptor(find_probs(base, other), 1024, WGMMA_SWIZZLE_128);
    wgmma_fence();
#pragma unroll
    for (int k = 2 * half; k < 2 * half + 2; k++) {
        wgmma_bf16_rows_first(state->out, probs + (k * 32 >> 4), values + (k * 16 * 128 >> 4));
    }
    wgmma_commit();
}

#endif /* SMLA_CUDA_HOPPER_BF16_PRODUCTS_CUH */
