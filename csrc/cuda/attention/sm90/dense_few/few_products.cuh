/* few_products.cuh: what the consumers of attention_few_sm90.cu do with a block of keys: scores,
 * weights, values.
 *
 * Both groups share each step, so that the block's time is short. Group h multiplies half h of the
 * dimensions, gets the other half's sums of its own 32 keys, makes weights of these, and adds half
 * h of the values of all 64 keys.
 */
#pragma once

#include "cuda/attention/sm90/dense_few/few_gather.cuh"

/* ---- Scores -------------------------------------------------------------------------------- */

/* scores = q . k of the block over NUM_TILES tiles from `first` on. */
template <int NUM_TILES>
static __device__ __forceinline__ void
score_tiles(uint32_t base, int block, uint32_t first, bf16_consumer *state)
{
    const uint64_t query = wgmma_descriptor(FEW_AT(base, query) + first, 1024, WGMMA_SWIZZLE_128);
    const uint64_t keys =
        wgmma_descriptor(FEW_AT(base, keys) + block * BLOCK_BYTES + first, 1024, WGMMA_SWIZZLE_128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4 * NUM_TILES; k++) {
        const int n = (k / 4 * TILE_BYTES + k % 4 * 32) >> 4;
        wgmma_16_tiles<false>(state->scores, query + n, keys + n, k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
}

/* scores = q . k of the block over the group's half of the dimensions. */
template <typename Kind>
static __device__ __forceinline__ void
score_half(uint32_t base, const thread_index &me, int block, bf16_consumer *state)
{
    if (me.group == 0) {
        score_tiles<HALF_TILES>(base, block, 0, state);
    } else {
        score_tiles<HALF_TILES + Kind::ROPE>(base, block, HALF_TILES * TILE_BYTES, state);
    }
}

/* Where a group leaves its sums of the other group's keys: group 0 where the weights will be, group
 * 1 in the RoPE tile of the block, which it alone has multiplied. */
static __device__ __forceinline__ uint32_t
find_given_scores(uint32_t base, int block, int group)
{
    return group == 0 ? FEW_AT(base, probs)
                      : FEW_AT(base, keys) + block * BLOCK_BYTES + ROPE_TILE * TILE_BYTES;
}

/* Adds the sums of the two groups. state->scores[0...15] are then those of the group's keys. */
static __device__ __forceinline__ void
exchange_scores(uint32_t base, const thread_index &me, int block, bf16_consumer *state)
{
    const uint32_t at = threadIdx.x % GROUP_THREADS * 16;
    const uint32_t to = find_given_scores(base, block, me.group) + at;
    const uint32_t from = find_given_scores(base, block, me.group ^ 1) + at;
#pragma unroll
    for (int i = 0; i < HALF_SCORES; i += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float *const first = &state->scores[i + j], *const second = first + HALF_SCORES;
            words[j] = smla_float_bits(me.group == 0 ? *second : *first);
            *first = me.group == 0 ? *first : *second;
        }
        ptx_store_shared_16(to + i * (GROUP_THREADS * 4), words);
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
#pragma unroll
    for (int i = 0; i < HALF_SCORES; i += 4) {
        uint32_t words[4];
        ptx_load_shared_16(from + i * (GROUP_THREADS * 4), words);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            state->scores[i + j] += smla_bits_float(words[j]);
        }
    }
}

/* Scores of the group's keys -> logits in the log2 domain; -inf for keys that a row does not see.
 * `key` is the position of the group's first key. */
static __device__ __forceinline__ void
find_logits(float scale_log2, const few_memory *shared, const thread_index &me, int block,
            int32_t key, const row_limits limits[2], bf16_consumer *state)
{
    const uint32_t are_keys =
        *(const volatile uint32_t *)&shared->is_key[block][me.group][2 * me.group];
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const uint32_t bits =
            (are_keys & bits_between(limits[piece].begin - key, limits[piece].end - key)) >>
            2 * me.column;
#pragma unroll
        for (int i = 0; i < HALF_SCORES / 2; i++) {
            float *const score = &state->scores[4 * (i / 2) + 2 * piece + i % 2];
            *score = bits >> (8 * (i / 2) + i % 2) & 1 ? *score * scale_log2 : -INFINITY;
        }
    }
}

/* ---- Weights ------------------------------------------------------------------------------- */

/* Moves the rows' references, which state->row_max has, to the block's maxima: where a row has had
 * no key, and where a weight would be above 2^FEW_MAX_EXPONENT. So the first maximum has the
 * weight 1 exactly, and sums that a move multiplies hardly count any more. `shrinks` gets their
 * factors. */
static __device__ __forceinline__ void
raise_references(const thread_index &me, few_memory *shared, bf16_consumer *state, float shrinks[2])
{
    const int row = 16 * me.warp + me.row;
    float row_maxima[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < HALF_SCORES; i++) {
        row_maxima[i / 2 % 2] = fmaxf(row_maxima[i / 2 % 2], state->scores[i]);
    }
    max_of_lanes(row_maxima);
    if (me.column == 0) {
        shared->maxima[me.group][row] = row_maxima[0];
        shared->maxima[me.group][row + 8] = row_maxima[1];
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const float other = *(const volatile float *)&shared->maxima[me.group ^ 1][row + 8 * piece];
        const float older = state->row_max[piece];
        const float largest = fmaxf(row_maxima[piece], other);
        const float newer = largest > older + FEW_MAX_EXPONENT ? largest : older;
        state->row_max[piece] = newer;
        state->reference[piece] = newer == -INFINITY ? 0.0f : newer;
        shrinks[piece] = ptx_exp2(older - state->reference[piece]);
    }
}

/* Logits of the group's keys -> weights, which it stores and adds to its sums. */
static __device__ __forceinline__ void
weigh_keys(uint32_t base, const thread_index &me, const float shrinks[2], bf16_consumer *state)
{
    const int row = 16 * me.warp + me.lane % 16;
    float *const weights = state->scores;
#pragma unroll
    for (int i = 0; i < HALF_SCORES; i++) {
        weights[i] = ptx_exp2(weights[i] - state->reference[i / 2 % 2]);
    }
#pragma unroll
    for (int k = 0; k < KEPT_KEYS / 16; k++) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = smla_cvt_bf16x2(weights[8 * k + 2 * i], weights[8 * k + 2 * i + 1]);
        }
        const int chunk = 4 * me.group + 2 * k + me.lane / 16;
        ptx_stmatrix_x4(FEW_AT(base, probs) + row * 128 + (chunk ^ (row & 7)) * 16, a[0], a[1],
                        a[2], a[3]);
    }
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        float pairs[HALF_SCORES / 4];
#pragma unroll
        for (int i = 0; i < HALF_SCORES / 4; i++) {
            pairs[i] = weights[4 * i + 2 * piece] + weights[4 * i + 2 * piece + 1];
        }
        const float older = state->sum[piece] * shrinks[piece];
        const float term =
            sum_values<HALF_SCORES / 4>(pairs) - state->excess[piece] * shrinks[piece];
        state->sum[piece] = older + term;
        state->excess[piece] = (state->sum[piece] - older) - term;
    }
}

/* ---- Values -------------------------------------------------------------------------------- */

/* out = out * shrinks + weights * values, for the group's half of the values. */
static __device__ __forceinline__ void
add_half(uint32_t base, const thread_index &me, int block, bool is_first, const float shrinks[2],
         bf16_consumer *state)
{
    const uint64_t probs = wgmma_descriptor(FEW_AT(base, probs), 1024, WGMMA_SWIZZLE_128);
    const uint64_t values = wgmma_descriptor_of_tiles(FEW_AT(base, keys) + block * BLOCK_BYTES +
                                                          me.group * HALF_TILES * TILE_BYTES,
                                                      TILE_BYTES);
    if (!is_first && __any_sync(0xFFFFFFFFu, shrinks[0] != 1.0f || shrinks[1] != 1.0f)) {
        scale_out(shrinks, state);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_KEYS / 16; k++) {
        wgmma_16_rows_first<false>(state->out, probs + (k * 32 >> 4), values + (k * 16 * 128 >> 4));
    }
    wgmma_commit();
    wgmma_wait<0>();
}

/* ---- Blocks -------------------------------------------------------------------------------- */

/* Block number i of the CTA, whose first key is at position `key`. */
template <typename Kind>
static __device__ __forceinline__ void
consume_block(const few_launch &launch, int i, int32_t key, const row_limits limits[2],
              const thread_index &me, few_memory *shared, bf16_consumer *state)
{
    const uint32_t base = ptx_shared_address(shared);
    const int block = i % FEW_BLOCKS;
    float shrinks[2];
    ptx_mbarrier_wait(few_full(base, block, me.group), (uint32_t)i / FEW_BLOCKS & 1);
    score_half<Kind>(base, me, block, state);
    if (me.group == 0 && i > 0) { /* group 1 has multiplied the weights that scores replace */
        ptx_mbarrier_wait(few_empty(base, block ^ 1, 1), (uint32_t)(i - 1) / FEW_BLOCKS & 1);
    }
    exchange_scores(base, me, block, state);
    find_logits(launch.scale_log2, shared, me, block, key + KEPT_KEYS * me.group, limits, state);
    raise_references(me, shared, state, shrinks);
    weigh_keys(base, me, shrinks, state);
    ptx_fence_async_shared();
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    add_half(base, me, block, i == 0, shrinks, state);
    ptx_mbarrier_arrive(few_empty(base, block, me.group), true);
}
