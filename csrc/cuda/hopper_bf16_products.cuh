/* hopper_bf16_products.cuh: the loop of attention_bf16_sm90.cu: scores of a block of keys, weights,
 * and values of both groups' blocks.
 */
#ifndef SMLA_CUDA_HOPPER_BF16_PRODUCTS_CUH
#define SMLA_CUDA_HOPPER_BF16_PRODUCTS_CUH

#include "hopper_bf16.cuh"

/* Of weights of a thread's keys: where their sum is larger the row is lost. Values and their sums
 * have 2^63 left. */
#define MAX_WEIGHTS 0x1p64f

enum {
    HALF_SCORES = WEIGHED_KEYS / 2, /* of a thread: two keys of every eight, for two heads */
    HALF_PROBS = WEIGHED_KEYS / 4,
};

/* ---- Scores -------------------------------------------------------------------------------- */

/* Starts the scores of the group's block, piece by piece as they come. */
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
        for (int tile = first_tile(piece); tile < first_tile(piece + 1); tile++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int n = (tile * TILE_BYTES + k * 32) >> 4;
                wgmma_bf16_tiles(state->scores, query + n, keys + n,
                                 n != first_tile(nth_piece(me.group, 0)) * (TILE_BYTES >> 4));
            }
        }
        wgmma_commit();
    }
}

/* ---- Weights ------------------------------------------------------------------------------- */

/* Whether keys 0 to 31 (half 0) or 32 to 63 (1) of the group's block are there, a bit each. */
static __device__ __forceinline__ uint32_t
load_is_key(const bf16_memory *shared, int group, int half)
{
    return *(const volatile uint32_t *)&shared->is_key[group][2 * half];
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

static __device__ __forceinline__ bool
has_nan(const float (&scores)[BLOCK_KEYS / 2], int piece)
{
    bool is_nan = false;
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i += 4) {
        is_nan |= isnan(scores[i + 2 * piece]) | isnan(scores[i + 2 * piece + 1]);
    }
    return is_nan;
}

/* Group 0 fixes the references of the work by its first block: the maximum, rounded up. Without a
 * score there it is NaN: a key that comes later makes its weight NaN, and that loses the row. -inf
 * is the reference of a head that a NaN has met: whatever happens, its results are NaN. */
static __device__ __forceinline__ void
find_references(float score_scale, const lane_place &me, const bf16_consumer &state,
                bf16_memory *shared)
{
    float logits[BLOCK_KEYS / 2];
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i++) {
        logits[i] = state.scores[i] * score_scale;
    }
    mask_scores(shared, me, logits);
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        float top = find_top(logits, piece);
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
        const uint32_t nans = __ballot_sync(0xFFFFFFFFu, has_nan(logits, piece));
        if (me.column == 0) {
            shared->reference[16 * me.warp + 8 * piece + me.row] = nans >> me.lane & 15 ? -INFINITY
                                                                   : top == -INFINITY ? NAN
                                                                                      : ceilf(top);
        }
    }
    __syncwarp();
}

/* What turns scores into weights: minus the references of rows row and row + 8. */
typedef struct row_shift {
    float minus[2];
    uint32_t is_key; /* all ones unless a key of the block is not there */
} row_shift;

static __device__ __forceinline__ row_shift
load_shift(const bf16_memory *shared, const lane_place &me)
{
    const volatile float *const reference = &shared->reference[16 * me.warp + me.row];
    return row_shift{{-reference[0], -reference[8]},
                     load_is_key(shared, me.group, 0) & load_is_key(shared, me.group, 1)};
}

/* Scores -> exponents of weights. */
template <bool MAXIMA>
static __device__ __forceinline__ void
find_exponents(float score_scale, const lane_place &me, const row_shift &shift,
               const bf16_memory *shared, bf16_consumer *state)
{
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 2; i++) {
        state->scores[i] = fmaf(state->scores[i], score_scale, shift.minus[i / 2 % 2]);
    }
    if (shift.is_key != 0xFFFFFFFFu) {
        mask_scores(shared, me, state->scores);
    }
    state->is_nan[0] = shift.minus[0] == INFINITY;
    state->is_nan[1] = shift.minus[1] == INFINITY;
    if constexpr (MAXIMA) {
        state->top[0] = fmaxf(state->top[0], find_top(state->scores, 0));
        state->top[1] = fmaxf(state->top[1], find_top(state->scores, 1));
    }
}

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
        state->is_lost |= !(sum < MAX_WEIGHTS) & !state->is_nan[piece];
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

/* Starts the same for the other group's block, when its weights are there. */
static __device__ __forceinline__ void
add_other_half(uint32_t base, const lane_place &me, uint32_t parity, int half, bf16_consumer *state)
{
    const int other = me.group ^ 1;
    const uint64_t values = describe_values(base, other, me.group);
    const uint64_t probs = wgmma_descriptor(find_probs(base, other), 1024, WGMMA_SWIZZLE_128);
    ptx_mbarrier_wait(BF16_AT(base, weighed) + 16 * other + 8 * half, parity);
    wgmma_fence();
#pragma unroll
    for (int k = 2 * half; k < 2 * half + 2; k++) {
        wgmma_bf16_rows_first(state->out, probs + (k * 32 >> 4), values + (k * 16 * 128 >> 4));
    }
    wgmma_commit();
}

#endif /* SMLA_CUDA_HOPPER_BF16_PRODUCTS_CUH */
