/* fp8_values.cuh: the second product of attention_fp8_sm90.cu, values times weights, and how a head
 * ends: its sum, its factor of out and its lse.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/fp8_growth.cuh"
#include "cuda/attention/sm90/sparse_fp8/fp8_query.cuh"

/* ---- Consumers: values --------------------------------------------------------------------- */

/* Addresses of a lane's part of the ring's first granule. */
typedef struct value_addresses {
    uint32_t values;
    uint32_t scales;
} value_addresses;

/* Whether the warp's 64 dimensions are RoPE values, which have no scales. They are if the warp's
 * scale tile is the last. The tile's number is read from the address, because there is no register
 * to keep it in. */
template <typename Shape>
static __device__ __forceinline__ bool
has_rope_values(const value_addresses &addresses)
{
    if constexpr (Shape::Row::ROPE_IS_VALUE) {
        constexpr int TILE_BYTES = GRANULE_KEYS * 2;
        constexpr int TABLE_BYTES = Shape::Row::NUM_SCALES * TILE_BYTES;
        constexpr uint32_t LAST = TABLE_BYTES - TILE_BYTES;
        static_assert(offsetof(typename Shape::Granule, scales) % TABLE_BYTES == 0 &&
                          offsetof(fp8_memory<Shape>, ring) % TABLE_BYTES == 0,
                      "the table's first address ends with zeros");
        return __any_sync(0xFFFFFFFFu,
                          (addresses.scales & LAST) == LAST); /* tells ptxas that all lanes agree */
    }
    return false;
}

template <typename Shape>
static __device__ __forceinline__ value_addresses
find_values(const fp8_addresses &at, const thread_index &me)
{
    typedef typename Shape::Row Row;
    const int tile = Row::NUM_SCALES == 8 ? 4 * me.group + me.warp : 2 * me.group + (me.warp >> 1);
    value_addresses addresses;
    addresses.values =
        at.ring + 2 * me.column * Row::PITCH + 256 * me.group + 64 * me.warp + 8 * me.row;
    if constexpr (Row::HAS_SCALES) {
        addresses.scales = at.ring + (uint32_t)offsetof(typename Shape::Granule, scales) +
                           tile * (GRANULE_KEYS * 2) + me.column * 8;
    }
    return addresses;
}

/* Returns `offset`, which is the same in all lanes, so that ptxas knows this. Values computed from
 * it then stay in uniform registers. */
static __device__ __forceinline__ int
make_uniform(int offset)
{
    return (int)__reduce_max_sync(0xFFFFFFFFu, (uint32_t)offset);
}

/* Loads the lane's part of a granule's keys 2c, 2c + 1, 2c + 8, 2c + 9, where c is its column: 8
 * codes, or 4 of 8 RoPE values. */
template <typename Shape>
static __device__ __forceinline__ void
load_values(const value_addresses &addresses, int granule, int buffer, consumer<Shape> *state)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        ptx_load_shared_8(addresses.values + granule + (i % 2 + 8 * (i / 2)) * Shape::Row::PITCH,
                          &state->raw[buffer][2 * i]);
    }
    if constexpr (Shape::Row::HAS_SCALES) {
        ptx_load_shared_8(addresses.scales + granule, state->scale[buffer]);
    }
}

static __device__ __forceinline__ void
release_granule(uint32_t empty, int granule, bool is_on)
{
    ptx_mbarrier_arrive(empty + granule, is_on);
}

/* convert_values for RoPE values, which are f16 already (keep_rope). load_values loaded half of the
 * lane's values. The other half, from the second half of the row's RoPE part, is loaded here,
 * because an earlier load takes registers that the other warps do not have. */
template <typename Shape>
static __device__ __forceinline__ void
pair_rope_values(const value_addresses &addresses, int granule, int buffer, consumer<Shape> *state)
{
    uint32_t rest[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        ptx_load_shared_8(addresses.values + granule + (i % 2 + 8 * (i / 2)) * Shape::Row::PITCH +
                              64,
                          rest + 2 * i);
    }
#pragma unroll
    for (int b = 0; b < 4; b++) {
        const uint32_t *const words = b < 2 ? state->raw[buffer] : rest;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t *const a = &state->a[buffer][4 * b + 2 * i];
            a[0] = __byte_perm(words[4 * i + b % 2], words[4 * i + 2 + b % 2], 0x5410);
            a[1] = __byte_perm(words[4 * i + b % 2], words[4 * i + 2 + b % 2], 0x7632);
        }
    }
}

/* Converts raw values to operand A of a granule's four products. The rows of product b are
 * dimensions 2b and 2b + 1 of every eight (for RoPE values, see load_values). */
template <typename Shape>
static __device__ __forceinline__ void
convert_codes(int buffer, consumer<Shape> *state)
{
    const uint32_t *const raw = state->raw[buffer];
#pragma unroll
    for (int b = 0; b < 4; b++) {
        uint32_t *const a = &state->a[buffer][4 * b];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t bytes =
                __byte_perm(raw[4 * i + b / 2], raw[4 * i + 2 + b / 2], b % 2 ? 0x7362 : 0x5140);
            if constexpr (Shape::Row::HAS_SCALES) {
                scale_e4m3x4(bytes, state->scale[buffer][i], &a[2 * i], &a[2 * i + 1]);
            } else {
                ptx_cvt_f16x4_e4m3x4(bytes, &a[2 * i], &a[2 * i + 1]);
            }
        }
    }
}

/* Converts values of any kind of the granule at `granule`. */
template <typename Shape>
static __device__ __forceinline__ void
convert_values(const value_addresses &addresses, int granule, int buffer, consumer<Shape> *state)
{
    if (__builtin_expect(has_rope_values<Shape>(addresses), false)) {
        pair_rope_values(addresses, granule, buffer, state);
    } else {
        convert_codes(buffer, state);
    }
}

/* Descriptors of the weights of the own and of the other group, kept over the steps. */
typedef struct weight_tiles {
    uint64_t own;
    uint64_t other;
} weight_tiles;

/* The descriptor of a group's weights in shared memory. */
template <typename Shape>
static __device__ __forceinline__ uint64_t
find_weights(fp8_memory<Shape> *shared, int group)
{
    return wgmma_descriptor(ptx_shared_address(shared->probs[group]), 8 * Shape::PROB_BYTES,
                            Shape::PROBS_SWIZZLE);
}

/* Starts out += values of a granule * its weights. */
template <typename Shape>
static __device__ __forceinline__ void
add_values(uint64_t weights, int granule, int buffer, consumer<Shape> *state)
{
    const uint64_t b = weights + granule * (GRANULE_KEYS * Shape::PROB_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wgmma_f16<true>(state->out[i], &state->a[buffer][4 * i], b, true);
    }
    wgmma_commit();
}

/* Waits for the weights of the other group's older block, and converts that block's first values.
 * The block begins at `other`. If the other group has raised the references, this group follows.
 * After an item's last scores, the next query may replace this one. */
template <typename Shape>
static __device__ __forceinline__ void
meet_other_block(fp8_memory<Shape> *shared, const fp8_addresses &at, const thread_index &me,
                 int other, consumer<Shape> *state)
{
    const value_addresses addresses = find_values<Shape>(at, me);
    ptx_mbarrier_wait(at.probs_ready + 8 * (me.group ^ 1), (state->phase >> 1 ^ me.group ^ 1) & 1);
    const uint32_t has_grown =
        load_has_grown(shared,
                       me.group ^ 1); /* this load is under way together with those of the values */
    load_values(addresses, find_granule<Shape>(other, 0), 0, state);
    load_values(addresses, find_granule<Shape>(other, 1), 1, state);
    if (is_any(has_grown)) {
        follow_references<true>(find_thread_index_again(), shared, state);
    }
    /* find_values again, because for fp8_v4 there is no register to keep its result in */
    convert_values(find_values<Shape>(at, find_thread_index_again()), find_granule<Shape>(other, 0),
                   0, state);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        ptx_pin(&state->a[0][i]);
    }
    wgmma_wait<0>(); /* the scores are complete */
    ptx_mbarrier_arrive(ptx_shared_address(&shared->query_free), !has_steps_left(*state, 2));
}

/* Makes the group's weights visible to wgmma of both groups. Tells the other group whether some are
 * too large for f16, and returns it. The flag is read before the thread arrives, so that no warp of
 * the group can mark its next block meanwhile. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
publish_weights(const fp8_addresses &at, const thread_index &me, const consumer<Shape> &state,
                fp8_memory<Shape> *shared)
{
    bool has_grown = false;
#pragma unroll
    for (int pair = 0; pair < (Shape::CHUNKS + 1) / 2; pair++) {
        has_grown |= state.has_grown[pair];
    }
    ptx_fence_async_shared();
    const uint32_t warp = (uint32_t)ptx_forget((int)threadIdx.x) / SMLA_WARP_LANES;
    ptx_store_shared_1_if(ptx_shared_address(shared->has_grown) + warp, 1, has_grown);
    ptx_barrier(BARRIER_GROUP + me.group, GROUP_THREADS);
    const uint32_t has_any_grown = load_has_grown(shared, ptx_forget(me.group));
    ptx_mbarrier_arrive(at.probs_ready + 8 * me.group, true);
    return has_any_grown;
}

/* The batch of values (one per granule of a step) during which a chunk of 16 heads gets its
 * weights. This is the best of the orders that were measured (README.md). */
static constexpr __device__ __forceinline__ int
batch_of_chunk(int chunk)
{
    return chunk < 2 ? 0 : chunk - 1;
}

/* Adds the other group's older block, at `other`, then the own block, and turns own scores into
 * weights meanwhile. `has_other` is false in group 0's first step, where probs[1] is zero. */
template <typename Shape>
static __device__ __forceinline__ void
add_blocks(const fp8_launch &launch, fp8_memory<Shape> *shared, const fp8_addresses &at,
           const thread_index &me, const weight_tiles &weights, int other, bool has_other,
           consumer<Shape> *state)
{
    const value_addresses addresses = find_values<Shape>(at, me);
    const int own = make_uniform(state->own);
    /* not uniform, because ptxas would compute each barrier's address apart from its granule's */
    const uint32_t empty = (uint32_t)ptx_forget((int)at.empty);
    uint32_t has_grown = 0;
#pragma unroll
    for (int batch = 0; batch < STEP_GRANULES; batch++) {
        const int first = batch < BLOCK_GRANULES ? other : own;
        if (batch > 0 && batch < STEP_GRANULES - 1 && batch != BLOCK_GRANULES - 1) {
            load_values(addresses, find_granule<Shape>(first, (batch + 1) % BLOCK_GRANULES),
                        (batch + 1) & 1, state);
        }
        if (batch > 0) {
            wgmma_wait<0>();
            if (batch == BLOCK_GRANULES && is_any(has_grown)) {
                raise_references(launch, find_addresses(shared, find_thread_index_again().group),
                                 find_thread_index_again(), shared, state);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                ptx_pin(&state->raw[batch & 1][i]);
            }
            convert_values(addresses, find_granule<Shape>(first, batch % BLOCK_GRANULES), batch & 1,
                           state);
        }
        if (batch == BLOCK_GRANULES) {
            ptx_mbarrier_arrive(at.values_added + 8 * (me.group ^ 1), true);
        }
        release_granule(empty, find_granule<Shape>(first, batch % BLOCK_GRANULES),
                        batch >= BLOCK_GRANULES || has_other);
        add_values(batch < BLOCK_GRANULES ? weights.other : weights.own, batch % BLOCK_GRANULES,
                   batch & 1, state);
        if (batch == 0) {
            find_exponents(launch, shared, me, state);
            /* the other group has added this group's last block, or the zeros before group 1's */
            ptx_mbarrier_wait(at.values_added + 8 * me.group,
                              (state->phase >> 1 ^ me.group ^ 1) & 1);
        }
#pragma unroll
        for (int chunk = 0; chunk < Shape::CHUNKS; chunk++) {
            if (batch == batch_of_chunk(chunk)) {
                weigh_chunk(launch, at, me, chunk, shared, state);
            }
        }
        if (batch == 3) {
            has_grown = publish_weights(at, me, *state, shared);
            /* This group's own block. After the barrier in publish_weights all its granules are
             * in shared memory, so no wait is needed. */
            load_values(addresses, find_granule<Shape>(own, 0), 0, state);
        }
    }
    const bool wraps = state->own >= (Shape::GRANULES - STEP_GRANULES) * Shape::GRANULE_BYTES;
    state->phase ^= wraps ? RING_PARITY : 0;
    state->own += (STEP_GRANULES - (wraps ? Shape::GRANULES : 0)) * Shape::GRANULE_BYTES;
}

/* Adds up a head's weights. Where max_logits are wanted, finds how far its maximum lies above the
 * reference. */
template <typename Shape>
static __device__ __forceinline__ void
add_up_head(const fp8_memory<Shape> *shared, int head, float *sum, float *row_max)
{
    *sum = 0.0f;
    *row_max = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < CONSUMER_WARPS; warp++) {
#pragma unroll
        for (int slot = 0; slot < Shape::SLOTS; slot += Shape::HEADS) {
            *sum += shared->sums[warp][head + slot];
            if constexpr (Shape::MAXIMA) {
                *row_max = fmaxf(*row_max, shared->maxima[warp][head + slot]);
            }
        }
    }
}

/* Stores sinks in `factor`, where the heads' factors will be, because find_factors has no time to
 * load them. */
template <typename Shape>
static __device__ __forceinline__ void
leave_sinks(const attention_launch &launch, const smla_sinks &sinks, const thread_index &me,
            fp8_memory<Shape> *shared)
{
    const int head = SMLA_WARP_LANES * me.warp + me.lane;
    if (sinks.values != NULL && head < shared->current_item.num_heads) {
        const int of_token = Shape::TILED ? head - token_of_row(launch, head) * launch.token_heads
                                          : shared->current_item.first_head + head;
        const float sink = sinks.values[of_token * sinks.stride];
        shared->factor[0][head] = sink;
        shared->factor[1][head] = sink;
    }
}

/* Replaces each head's sink by the factor of its `out`, in each group's own copy. For a partial row
 * the factor makes `out` means of values. This function does no more, because `out` waits for it;
 * lse comes later (leave_heads). */
template <typename Shape>
static __device__ __forceinline__ void
find_factors(const fp8_launch &launch, int group, fp8_memory<Shape> *shared)
{
    const list_params &params = launch.base.params;
    const int head = ptx_forget((int)threadIdx.x) % GROUP_THREADS;
    if (is_any(load_has_grown(shared, 1))) { /* references have moved in the last block */
        ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS); /* the sums of both groups are complete */
        if (ptx_forget((int)threadIdx.x) == 0) {
            shared->has_grown[1] = 0;
        }
    }
    if (head < shared->current_item.num_heads) {
        float sum, row_max;
        add_up_head(shared, head, &sum, &row_max);
        float factor = 0.0f;
        if (sum != 0.0f && shared->current_item.first_row != NOT_PARTIAL) {
            factor = __frcp_rn(sum) * (Shape::Row::HAS_SCALES ? 1.0f : HALVES_PER_CODE);
        } else if (sum != 0.0f) {
            if (params.logits.sinks.values != NULL) {
                const float log2_e = 0x1.715476p+0f;
                sum +=
                    ptx_exp2(fmaf(shared->factor[group][head], log2_e, -shared->reference[head]));
            }
            factor = __frcp_rn(sum) * shared->key_unit;
        }
        shared->factor[group][head] = factor;
    }
    ptx_barrier(BARRIER_GROUP + group, GROUP_THREADS);
}

/* A head's reference, sum and maximum, as leave_head takes them. */
template <typename Shape>
static __device__ __forceinline__ void
find_head_state(const fp8_memory<Shape> *shared, int head, float *reference, float *sum,
                float *row_max)
{
    *reference = shared->reference[head];
    add_up_head(shared, head, sum, row_max);
    *row_max = Shape::MAXIMA ? *row_max + *reference : *reference;
}

/* The unit of an item's halves. Whoever folds partial rows multiplies their values by the call's
 * unit of keys (logits.h), so halves leave that out. */
template <typename Shape>
static __device__ __forceinline__ float
find_half_unit(const fp8_memory<Shape> *shared)
{
    const float unit = shared->key_unit;
    if constexpr (Shape::Row::HAS_SCALES) {
        return unit;
    }
    return unit * smla_inverse_unit(smla_choose_key_unit(unit, unit)) / HALVES_PER_CODE;
}

/* Writes lse and max_logits of the heads, or the states of their partial rows. The threads of group
 * 0 do this, because that group is the first to have written its results. */
template <typename Shape>
static __device__ __forceinline__ void
leave_heads(const fp8_launch &launch, const work_item &item, const fp8_memory<Shape> *shared)
{
    const int head = ptx_forget((int)threadIdx.x);
    if (head < item.num_heads) {
        const work_item of_row = find_row_item<Shape::TILED>(launch.base, item, head);
        float reference, sum, row_max;
        find_head_state(shared, head, &reference, &sum, &row_max);
        if (item.first_row == NOT_PARTIAL) {
            leave_head(launch.base, of_row, head, reference, row_max, sum, true);
        } else {
            leave_halves(launch.base, of_row, head, reference, row_max, sum,
                         find_half_unit(shared));
        }
    }
}

/* Adds the values of group 1's last block to group 0's `out`, and finds group 0's factors
 * meanwhile. */
template <typename Shape>
static __device__ __forceinline__ void
add_last_block(const fp8_launch &launch, fp8_memory<Shape> *shared, const fp8_addresses &at,
               const thread_index &me, consumer<Shape> *state)
{
    const uint64_t weights = find_weights(shared, 1);
    const value_addresses addresses = find_values<Shape>(at, me);
    const int other = make_uniform(find_other<Shape>(*state, true));
    ptx_mbarrier_wait(at.probs_ready + 8, state->phase >> 1 & 1);
    if (is_any(load_has_grown(shared, 1))) {
        follow_references<false>(find_thread_index_again(), shared, state);
    }
    load_values(addresses, find_granule<Shape>(other, 0), 0, state);
#pragma unroll
    for (int batch = 0; batch < BLOCK_GRANULES; batch++) {
        if (batch + 1 < BLOCK_GRANULES) {
            load_values(addresses, find_granule<Shape>(other, batch + 1), (batch + 1) & 1, state);
        }
        wgmma_wait<0>();
        convert_codes(batch & 1, state);
        release_granule(at.empty, find_granule<Shape>(other, batch), true);
        add_values(weights, batch, batch & 1, state);
    }
    find_factors(launch, 0, shared);
    wgmma_wait<0>();
}
