/* hopper_growth.cuh: how attention_sm90.cu moves its references where weights exceed f16.
 *
 * Both groups add blocks of keys in one order: 0, 1, 2, 3, ... Group g weighs blocks g, g + 2, ...,
 * and tells the other group (`weighed`) before either of them multiplies the weights. So a
 * reference may move between two blocks, if everything that was added before is scaled:
 *   - The group that finds too large weights in its block sets has_grown before it arrives at
 *     `weighed`. It raises the references by whole numbers (`shift`) and arrives at `moved`, weighs
 *     the block again and arrives at `weighed_again`. It scales the sums of both groups and its own
 *     part of `out`, which is exact. The other group does not touch the sums meanwhile: it has
 *     weighed its last block, and waits for this one before its next.
 *   - The other group finds has_grown set when it has waited for the block. As soon as references
 *     have moved, it scales its part of `out`, while the first group still weighs. It clears
 *     has_grown. The first group may set has_grown again with its next block, but before that it
 *     waits (`added`) until the other group has added this block.
 * References move in one group at a time, so both groups use the same two mbarriers, and know from
 * the times that references have moved which phase comes next (GROWTH_PARITY).
 */
#pragma once

#include "cuda/attention/sm90_fp8/hopper_scores.cuh"

/* 2^-shift, where shift is an integer that is not negative, or infinite. scale_out uses ptx_exp2
 * instead, which here would cost the kernel 12 bytes of spills. */
static __device__ __forceinline__ float
scale_of_shift(float shift)
{
    return shift < 127.0f ? power_of_two(-(int)shift) : 0.0f;
}

/* Not 0 where a group's weights exceed f16. All threads read the same value; is_any tells the
 * compiler so. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
load_has_grown(const hopper_memory<Shape> *shared, int group)
{
    const volatile uint32_t *const has_grown = shared->has_grown;
    return has_grown[group];
}

static __device__ __forceinline__ bool
is_any(uint32_t has_grown)
{
    return __any_sync(0xFFFFFFFFu, has_grown != 0);
}

/* Multiplies `out` of the thread's heads by 2^-shift. This is exact, because ptx_exp2 of an integer
 * is a power of two or 0. No products into `out` may be under way. */
template <typename Shape>
static __device__ __forceinline__ void
scale_out(const float *shift, const lane_place &me, consumer<Shape> *state)
{
    const uint32_t from = ptx_shared_address(shift + 2 * me.column);
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
        uint32_t pair[2];
        ptx_load_shared_8(from + 32 * j, pair);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float factor = ptx_exp2(-smla_bits_float(pair[i]));
#pragma unroll
            for (int b = 0; b < 4; b++) {
                ptx_scale(&state->out[b][4 * j + i], factor);
                ptx_scale(&state->out[b][4 * j + 2 + i], factor);
            }
        }
    }
}

/* Raises the references to where find_references would place them for the maxima of this block, and
 * stores in `shift` by how much. Absent keys have exponents of 0, which raise none. Scales the sums
 * of all warps by 2^-shift, and moves their maxima. */
template <typename Shape>
static __device__ __forceinline__ void
move_references(const hopper_launch &launch, const lane_place &me, hopper_memory<Shape> *shared,
                const consumer<Shape> &state)
{
    float (*const tops)[Shape::HEADS] = (float (*)[Shape::HEADS])shared->probs[me.group];
    float *const mine = tops[me.warp];
    const key_masks all = {1, 1};
    leave_tops(state.scores, 1.0f, all, me, [=](int at, float top) { mine[at] = top; });
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS);
    const int thread = SMLA_WARP_LANES * me.warp + me.lane;
    const int head = thread & (Shape::HEADS - 1);
    const float top =
        fmaxf(fmaxf(tops[0][head], tops[1][head]), fmaxf(tops[2][head], tops[3][head]));
    const float shift = fmaxf(ceilf(top) + find_row_headroom(launch, state), 0.0f);
    if (thread < Shape::HEADS) {
        const float reference = shift < INFINITY ? shared->reference[head] + shift : NAN;
        mark_for_redo(shared, fabsf(reference) >= MAX_SCORE);
        shared->reference[head] = reference;
        shared->shift[me.group][head] = shift;
    }
    ptx_mbarrier_arrive(ptx_shared_address(&shared->moved), true);
    static_assert(GROUP_THREADS % Shape::HEADS == 0, "all sums of a thread are those of `head`");
#pragma unroll 2 /* there are no registers for more, nor to keep the factor */
    for (int i = thread; i < CONSUMER_WARPS * Shape::SLOTS; i += GROUP_THREADS) {
        shared->sums[0][i] *= scale_of_shift(shift);
        if constexpr (Shape::MAXIMA) {
            shared->tops[0][i] -= shift;
        }
    }
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS);
}

/* Does weigh_chunk again for both chunks of a pair, with exponents smaller by `shift`. Adds the sum
 * only where weigh_chunk has left it out. The chunks take each step together, because nothing else
 * hides latencies here. */
template <typename Shape>
static __device__ __forceinline__ void
weigh_pair_again(uint32_t probs, const lane_place &me, int pair, hopper_memory<Shape> *shared,
                 consumer<Shape> *state)
{
    constexpr int COUNT = Shape::CHUNKS == 1 ? 1 : 2; /* chunks per pair */
    const key_masks is_key = find_key_masks(me, state->key_bits);
    float e[COUNT][8], sums[COUNT][4], half[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int chunk = COUNT * pair + i;
        float *const x = &state->scores[8 * chunk];
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            const float2 shift =
                *(const float2 *)&shared->shift[me.group][16 * chunk + 2 * j + 2 * me.column];
            ptx_fma_if(&x[j], 1.0f, -shift.x, is_key.first);
            ptx_fma_if(&x[j + 1], 1.0f, -shift.y, is_key.first);
            ptx_fma_if(&x[j + 2], 1.0f, -shift.x, is_key.second);
            ptx_fma_if(&x[j + 3], 1.0f, -shift.y, is_key.second);
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        exp_chunk(&state->scores[8 * (COUNT * pair + i)], e[i], sums[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        store_weights<Shape>(probs, me, COUNT * pair + i, e[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        half[i] = reduce_half<false>(sums[i], me.lane);
    }
    const float added = fold_pair<false, Shape>(half[0], half[COUNT - 1], me) -
                        count_absent<Shape>(me, state->key_bits);
    if (state->has_grown[pair]) {
        shared->sums[4 * me.group + me.warp][slot_of_sum(me, pair)] += added;
    }
}

/* Raises the references for a group with too large weights, and weighs its block again. No products
 * into the group's `out` may be under way. */
template <typename Shape>
static __device__ __forceinline__ void
raise_references(const hopper_launch &launch, const hopper_addresses &at, const lane_place &me,
                 hopper_memory<Shape> *shared, consumer<Shape> *state)
{
    move_references(launch, me, shared, *state);
#pragma unroll
    for (int pair = 0; pair < (Shape::CHUNKS + 1) / 2; pair++) {
        weigh_pair_again(at.probs, me, pair, shared, state);
    }
    ptx_fence_async_shared();
    ptx_mbarrier_arrive(ptx_shared_address(&shared->weighed_again), true);
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS);
    state->phase ^= GROWTH_PARITY;
    scale_out(shared->shift[me.group], me, state);
}

/* Lets the other group follow, when it has waited for such a block. WAITS: products of scores are
 * under way, and ptxas accepts no change of out before a wait for them. */
template <bool WAITS, typename Shape>
static __device__ __forceinline__ void
follow_references(const lane_place &me, hopper_memory<Shape> *shared, consumer<Shape> *state)
{
    const int other = me.group ^ 1;
    const int thread = SMLA_WARP_LANES * me.warp + me.lane;
    const uint32_t parity = (state->phase & GROWTH_PARITY) != 0;
    ptx_mbarrier_wait(ptx_shared_address(&shared->moved), parity);
    if constexpr (WAITS) {
        wgmma_wait<0>();
    }
    scale_out(shared->shift[other], me, state);
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS); /* all have read has_grown */
    if (thread == 0) {
        shared->has_grown[other] = 0;
    }
    ptx_mbarrier_wait(ptx_shared_address(&shared->weighed_again), parity);
    state->phase ^= GROWTH_PARITY;
}
