/* tile_limits.cuh: which keys the rows of a tile see (attention_fp8_tiles_sm90.cu). An item has the
 * keys of its last query token. Tokens in front of it may see fewer: with causal order the token d
 * places in front misses the last d keys. So hidden keys are among the tile's last few, in the last
 * two steps of an item, and they are the same for all heads of a token.
 *
 * Consumers count the hidden keys of each token when they begin an item, and a gather warp says
 * where its last step begins. In the last two steps hidden keys get the weight 0. Such a key is
 * there for other rows, so it counts as no absent one.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/fp8_common.cuh"

enum { MOST_HIDDEN = SMLA_TILE_TOKENS - 1 };

/* ---- An item begins ------------------------------------------------------------------------- */

/* Threads 0 to SMLA_TILE_TOKENS - 1 return where the keys end that a token of the tile sees. */
static __device__ __forceinline__ int32_t
load_token_end(const attention_launch &launch, const work_item &item)
{
    const smla_key_list &keys = launch.params.keys.lists[0];
    const int thread = ptx_forget((int)threadIdx.x);
    uint32_t end;
    ptx_load_4(keys.end + first_token_of<true>(launch, item.token) +
                   min(thread, launch.tile_tokens - 1),
               thread < SMLA_TILE_TOKENS, 0, &end);
    return min((int32_t)end, (int32_t)keys.topk);
}

/* Leaves what load_token_end has returned. No thread is at the item before any more, and others
 * see it after the next barrier. */
template <typename Shape>
static __device__ __forceinline__ void
leave_limits(const attention_launch &launch, int32_t token_end, fp8_memory<Shape> *shared)
{
    const int thread = ptx_forget((int)threadIdx.x);
    if (thread < SMLA_WARP_LANES) {
        const int32_t end = __shfl_sync(0xFFFFFFFFu, token_end, launch.tile_tokens - 1);
        if (thread < SMLA_TILE_TOKENS) {
            shared->limits.hidden[thread] =
                (uint8_t)min(max(end - token_end, 0), (int32_t)MOST_HIDDEN);
        }
        if (thread == 0) {
            shared->limits.end = end;
        }
    }
}

/* ---- Hidden keys ----------------------------------------------------------------------------- */

/* How far the first key of the warp's granule in this step lies behind the tile's last key. */
template <typename Shape>
static __device__ __forceinline__ int
find_first_behind(const fp8_memory<Shape> *shared, const thread_index &me,
                  const consumer<Shape> &state)
{
    const volatile tile_limits<true> *const limits = &shared->limits;
    const int steps_behind = (int)(state.phase / ONE_STEP) - 1;
    const int last_step = limits->last_step[(state.phase & QUERY_PARITY) != 0];
    return 64 * me.group + 16 * me.warp - steps_behind * STEP_KEYS - (limits->end - 1 - last_step);
}

/* Whether some row of the tile does not see some key of the warp's in this step. All lanes agree,
 * and the votes tell ptxas so. Tokens in front see no more keys than those behind them. */
template <typename Shape>
static __device__ __forceinline__ bool
has_hidden_keys(const fp8_memory<Shape> *shared, const thread_index &me,
                const consumer<Shape> &state)
{
    if (__any_sync(0xFFFFFFFFu, has_steps_left(state, 3))) {
        return false;
    }
    const int most = *(const volatile uint8_t *)&shared->limits.hidden[0];
    return __any_sync(0xFFFFFFFFu,
                      find_first_behind(shared, me, state) + GRANULE_KEYS - 1 + most > 0);
}

/* Makes -inf of what a row has for a key that it does not see: a logit, or the exponent of a
 * weight. Absent keys keep what they have. */
template <typename Shape>
static __device__ __forceinline__ void
hide_keys(const attention_launch &launch, const fp8_memory<Shape> *shared, const thread_index &me,
          const consumer<Shape> &state, float (&values)[Shape::HEADS / 2])
{
    const key_masks is_key = find_key_masks(me, state.key_bits);
    const int behind = find_first_behind(shared, me, state) + me.row;
    const volatile uint8_t *const hidden = shared->limits.hidden;
#pragma unroll
    for (int i = 0; i < Shape::HEADS / 4; i++) {
        const int row = 8 * (i / 2) + 2 * me.column + i % 2;
        /* rows that are not there hide any keys */
        const int most = hidden[token_of_row(launch, row) % SMLA_TILE_TOKENS];
        float *const of_row = &values[4 * (i / 2) + i % 2];
        of_row[0] = is_key.first && behind + most > 0 ? -INFINITY : of_row[0];
        of_row[2] = is_key.second && behind + 8 + most > 0 ? -INFINITY : of_row[2];
    }
}

/* ---- An item ends ---------------------------------------------------------------------------- */

/* Whether some row may have exactly one key in an item with more. Its value must then not be
 * rounded (one_key.cuh), so the item is left to the fallback. An item that does not begin with the
 * request's first key has rows whose other keys lie in front. */
template <typename Shape>
static __device__ __forceinline__ bool
may_have_lone_key(const fp8_memory<Shape> *shared)
{
    const int turn = shared->item_idx & 1;
    const int32_t num_steps = *(const volatile int32_t *)&shared->num_steps[turn];
    const volatile tile_limits<true> *const limits = &shared->limits;
    uint32_t absent[GATHER_WARPS];
    ptx_load_shared_16(ptx_shared_address(shared->num_absent[turn]), absent);
    const uint32_t num_keys =
        (uint32_t)num_steps * STEP_KEYS - (absent[0] + absent[1] + absent[2] + absent[3]);
    const bool is_first = limits->last_step[turn] == (num_steps - 1) * STEP_KEYS;
    return __any_sync(0xFFFFFFFFu,
                      is_first && num_keys > 1 && num_keys <= 1 + (uint32_t)limits->hidden[0]);
}
