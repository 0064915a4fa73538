/* fp8_growth.cuh: how attention_fp8_sm90.cu moves its references where weights exceed f16.
 *
 * Both groups add blocks of keys in one order: 0, 1, 2, 3, ... Group g turns the scores of blocks
 * g, g + 2, ... into weights (it weighs them). It tells the other group (`probs_ready`) before
 * either group multiplies the weights. So a reference may move between two blocks, if everything
 * that was added before is scaled:
 *
 *   - A group may find too large weights in its block. It sets has_grown before it arrives at
 *     `probs_ready`. It raises the references by whole numbers (`shift`) and arrives at
 *     `rescaled`. It weighs the block again and arrives at `probs_ready_again`. Then nobody waits
 *     for it, and it scales its own sums and its part of `out`, which is exact.
 *   - The other group finds has_grown set when it has waited for the block. As soon as references
 *     have moved, it scales its sums and its part of `out`, while the first group still weighs. It
 *     clears has_grown. The first group may set has_grown again with its next block, but before
 *     that it waits (`values_added`) until the other group has added this block.
 *   - An item's last block is one of group 1. If references move there, has_grown remains set until
 *     the groups have met, because each group needs the sums of both (find_factors).
 * References move in one group at a time, so both groups use the same two mbarriers. Both know how
 * often references have moved, and so which phase comes next (GROWTH_PARITY). Both also use the
 * same `shift`: a group waits for `values_added` before it weighs a block, and the other group
 * arrives there after all that it does with an earlier `shift`.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/fp8_scores.cuh"
#include "cuda/attention/sm90/sparse_fp8/outlier_keys.cuh"

/* 2^-shift, where shift is an integer that is not negative, or infinite. With ptx_exp2 instead, the
 * kernel spills 12 bytes. */
static __device__ __forceinline__ float
scale_of_shift(float shift)
{
    /* shift + 2^23 has the integer in its last bits; a conversion of it takes longer */
    const uint32_t exponent = smla_float_bits(shift + 0x1p23f) << 23;
    return shift < 127.0f ? smla_bits_float(smla_float_bits(1.0f) - exponent) : 0.0f;
}

/* Not 0 where a group's weights exceed f16. All threads read the same value; is_any tells the
 * compiler so. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
load_has_grown(const fp8_memory<Shape> *shared, int group)
{
    const volatile uint32_t *const has_grown = shared->has_grown;
    return has_grown[group];
}

static __device__ __forceinline__ bool
is_any(uint32_t has_grown)
{
    return __any_sync(0xFFFFFFFFu, has_grown != 0);
}

/* Multiplies `out` of the thread's heads by 2^-shift, which is exact. No products into `out` may be
 * under way. */
template <typename Shape>
static __device__ __forceinline__ void
scale_out(const fp8_memory<Shape> *shared, const thread_index &me, consumer<Shape> *state)
{
    const uint32_t from = ptx_shared_address(shared->shift_factor + 2 * me.column);
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
        uint32_t pair[2];
        ptx_load_shared_8(from + 32 * j, pair);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float factor = smla_bits_float(pair[i]);
#pragma unroll
            for (int b = 0; b < 4; b++) {
                ptx_scale(&state->out[b][4 * j + i], factor);
                ptx_scale(&state->out[b][4 * j + 2 + i], factor);
            }
        }
    }
}

/* Leaves the maxima of the warp's exponents in `to`, for every head, rounded to f16. That takes
 * half of the shuffles, and a reference may be off by one. NaN does not count. */
template <typename Shape>
static __device__ __forceinline__ void
leave_half_maxima(const consumer<Shape> &state, const thread_index &me, uint32_t *to)
{
    constexpr int PAIRS =
        Shape::HEADS / 8; /* pairs of heads 8j + 2c and the next one; c: the column */
    constexpr int SAME_LANES = 4 * (8 / PAIRS - 1); /* bits of lanes with the same result */
    uint32_t row_maxima[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const float *const x = &state.scores[4 * j];
        row_maxima[j] = ptx_max_f16x2(ptx_cvt_f16x2(x[0], x[1]), ptx_cvt_f16x2(x[2], x[3]));
    }
    /* reduces over the lanes' rows: a lane keeps half of its pairs, as long as it has two */
#pragma unroll
    for (int step = 0; step < 3; step++) {
        const int distance = 16 >> step;
        const int left = PAIRS >> (step + 1);
        const bool is_upper = me.lane & distance;
        if (left == 0) {
            row_maxima[0] =
                ptx_max_f16x2(row_maxima[0], __shfl_xor_sync(0xFFFFFFFFu, row_maxima[0], distance));
        }
#pragma unroll
        for (int j = 0; j < left; j++) {
            const uint32_t give = is_upper ? row_maxima[j] : row_maxima[left + j];
            const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, give, distance);
            row_maxima[j] = ptx_max_f16x2(is_upper ? row_maxima[left + j] : row_maxima[j], got);
        }
    }
    if ((me.lane & SAME_LANES) == 0) {
        const int first = me.row / (8 / PAIRS); /* the pair that is left */
        to[4 * first + me.column] = row_maxima[0];
    }
}

/* Raises the references to those that find_references would find for the maxima of this block, and
 * stores in `shift` by how much. Absent keys have exponents of 0, which raise no reference. An item
 * goes to the fallback where a reference becomes too large or infinite. scale_sums and scale_out
 * follow. */
template <typename Shape>
static __device__ __forceinline__ void
move_references(const fp8_launch &launch, const thread_index &me, fp8_memory<Shape> *shared,
                const consumer<Shape> &state)
{
    uint16_t (*const row_maxima)[Shape::HEADS] =
        (uint16_t (*)[Shape::HEADS])shared->probs[me.group];
    leave_half_maxima(state, me, (uint32_t *)row_maxima[me.warp]);
    const int thread = SMLA_WARP_LANES * me.warp + me.lane;
    const int head = thread & (Shape::HEADS - 1);
    const float older =
        *(const volatile float *)&shared->reference[head]; /* loaded here to hide its latency */
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS);
    const uint32_t row_max = ptx_max_f16x2(ptx_max_f16x2(row_maxima[0][head], row_maxima[1][head]),
                                           ptx_max_f16x2(row_maxima[2][head], row_maxima[3][head]));
    const float shift =
        fmaxf(ceilf(smla_cvt_float((uint16_t)row_max)) + find_row_headroom(launch, state), 0.0f);
    if (thread < Shape::HEADS) {
        const float reference = older + shift;
        mark_for_fallback(shared, fabsf(reference) >= MAX_SCORE);
        shared->reference[head] = reference;
        shared->shift[head] = shift;
        shared->shift_factor[head] = scale_of_shift(shift);
        mark_reference_jump(shared, state, shift >= REFERENCE_JUMP);
    }
    ptx_mbarrier_arrive(ptx_shared_address(&shared->rescaled), true);
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS);
}

/* Turns the block's exponents into weights again, after it has subtracted `shift` from all of them.
 * So the weight of an absent key is 2^-shift. Returns the sums of exp_chunk. */
template <typename Shape>
static __device__ __forceinline__ void
weigh_again(uint32_t probs, const thread_index &me, const fp8_memory<Shape> *shared,
            consumer<Shape> *state, float (&sums)[Shape::CHUNKS][4])
{
    constexpr int CHUNKS = Shape::CHUNKS;
    uint32_t shift[2 * CHUNKS][2];
#pragma unroll
    for (int j = 0; j < 2 * CHUNKS; j++) {
        ptx_load_shared_8(ptx_shared_address(shared->shift + 8 * j + 2 * me.column), shift[j]);
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        float *const x = &state->scores[8 * chunk];
        float e[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] -= smla_bits_float(shift[2 * chunk + i / 4][i % 2]);
        }
        exp_chunk(x, e, sums[chunk]);
        store_weights<Shape>(probs, me, chunk, e);
    }
}

/* Scales the warp's sums by 2^-shift, and subtracts `shift` from its maxima. */
template <typename Shape>
static __device__ __forceinline__ void
scale_sums(const thread_index &me, fp8_memory<Shape> *shared)
{
    const int warp = 4 * me.group + me.warp;
    const auto scale = [=](int slot) {
        shared->sums[warp][slot] *= shared->shift_factor[slot % Shape::HEADS];
        if constexpr (Shape::MAXIMA) {
            shared->maxima[warp][slot] -= shared->shift[slot % Shape::HEADS];
        }
    };
    if constexpr (Shape::MAXIMA && !Shape::Row::ROPE_IS_VALUE) {
#pragma unroll 1 /* unrolled, it spills */
        for (int slot = me.lane; slot < Shape::SLOTS; slot += SMLA_WARP_LANES) {
            scale(slot);
        }
        __syncwarp();
    } else {
#pragma unroll
        for (int pair = 0; pair < (Shape::CHUNKS + 1) / 2; pair++) {
            scale(slot_of_sum(me, pair));
        }
    }
}

/* Adds the sums that weigh_again has returned to the warp's sums, where weigh_chunk has not added
 * its own. All shuffles come together, because nothing else hides latencies here. */
template <typename Shape>
static __device__ __forceinline__ void
add_again(const float (&sums)[Shape::CHUNKS][4], const thread_index &me, fp8_memory<Shape> *shared,
          const consumer<Shape> &state)
{
    constexpr int CHUNKS = Shape::CHUNKS;
    float half[CHUNKS];
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        half[chunk] = reduce_half<false>(sums[chunk], me.lane);
    }
    const float absent = count_absent<Shape>(me, state.key_bits);
#pragma unroll
    for (int pair = 0; pair < (CHUNKS + 1) / 2; pair++) {
        const int slot = slot_of_sum(me, pair);
        const int last = CHUNKS == 1 ? 0 : 2 * pair + 1;
        const float fresh = fold_pair<false, Shape>(half[2 * pair], half[last], me) -
                            absent * shared->shift_factor[slot % Shape::HEADS];
        if (state.has_grown[pair]) {
            shared->sums[4 * me.group + me.warp][slot] += fresh;
        }
    }
}

/* Raises the references for a group with too large weights, and weighs its block again. No products
 * into the group's `out` may be under way. */
template <typename Shape>
static __device__ __forceinline__ void
raise_references(const fp8_launch &launch, const fp8_addresses &at, const thread_index &me,
                 fp8_memory<Shape> *shared, consumer<Shape> *state)
{
    move_references(launch, me, shared, *state);
    float sums[Shape::CHUNKS][4];
    weigh_again(at.probs, me, shared, state, sums);
    ptx_fence_async_shared();
    ptx_mbarrier_arrive(ptx_shared_address(&shared->probs_ready_again), true);
    state->phase ^= GROWTH_PARITY;
    scale_out(shared, me, state);
    scale_sums(me, shared);
    add_again(sums, me, shared, *state);
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS); /* the group's weights are visible */
}

/* The other group calls this when it has waited for a block whose group raised the references: it
 * follows them. WAITS: products of scores are under way, and ptxas accepts no change of out before
 * a wait for them. */
template <bool WAITS, typename Shape>
static __device__ __forceinline__ void
follow_references(const thread_index &me, fp8_memory<Shape> *shared, consumer<Shape> *state)
{
    const int other = me.group ^ 1;
    const int thread = SMLA_WARP_LANES * me.warp + me.lane;
    const uint32_t parity = (state->phase & GROWTH_PARITY) != 0;
    ptx_mbarrier_wait(ptx_shared_address(&shared->rescaled), parity);
    if constexpr (WAITS) {
        wgmma_wait<0>();
    }
    scale_sums(me, shared);
    scale_out(shared, me, state);
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS); /* all have read has_grown */
    if (WAITS && thread == 0) { /* after an item's last block, find_factors does this */
        shared->has_grown[other] = 0;
    }
    ptx_mbarrier_wait(ptx_shared_address(&shared->probs_ready_again), parity);
    state->phase ^= GROWTH_PARITY;
}
