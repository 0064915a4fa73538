/* fp8_results.cuh: the results of an item of attention_fp8_sm90.cu: rows, partial rows, or a mark
 * for the fallback.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/fp8_values.cuh"

/* ---- Consumers: results -------------------------------------------------------------------- */

/* Where a head's row of `out` begins. */
static __device__ __forceinline__ uint16_t *
find_out(const smla_results &results, const work_item &item, int head)
{
    return smla_out16(&results, item.token, item.first_head + head);
}

/* How far the partial row of row `row` of an item lies behind that of row 0, in f16. */
template <bool TILED>
static __device__ __forceinline__ int64_t
find_half_offset(const attention_launch &launch, const work_item &item, int row)
{
    const work_item of_row = find_row_item<TILED>(launch, item, row);
    return (int64_t)(of_row.first_row + row - item.first_row) * (2 * SMLA_KV_LORA_RANK);
}

/* Rounds a thread's eight values of a head to bf16, or to f16 for a partial row. */
template <typename Shape, bool IS_PARTIAL>
static __device__ __forceinline__ void
round_values(const consumer<Shape> &state, int j, int i, float factor, uint32_t words[4])
{
#pragma unroll
    for (int b = 0; b < 4; b++) {
        const float low = state.out[b][4 * j + i] * factor;
        const float high = state.out[b][4 * j + 2 + i] * factor;
        words[b] = IS_PARTIAL ? ptx_cvt_f16x2(low, high) : smla_cvt_bf16x2(low, high);
    }
}

/* The index of a lane's eight neighbouring values among the warp's 64. Of RoPE values, lanes of
 * even rows have eight of the first half, after trade_halves. */
static __device__ __forceinline__ int
find_eight(const thread_index &me, bool has_rope)
{
    return !has_rope ? 8 * me.row : me.row % 2 == 0 ? 4 * me.row : 4 * me.row + 28;
}

/* A lane has four RoPE values of each half (load_values), and its neighbour has the next four of
 * each. They trade, so that each has eight neighbouring values. */
static __device__ __forceinline__ void
trade_halves(const thread_index &me, uint32_t words[4])
{
    const bool is_odd = me.row % 2 != 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, is_odd ? words[i] : words[2 + i], 4);
        words[i] = is_odd ? got : words[i];
        words[2 + i] = is_odd ? words[2 + i] : got;
    }
}

/* Writes the heads' rows, in f16 for partial rows and otherwise in bf16. The first head's row
 * begins at `to`. A thread has heads 2 column and 2 column + 1 of every eight. Partial rows of
 * tiles are as far apart as find_half_offset says. */
template <bool IS_PARTIAL, typename Shape>
static __device__ __forceinline__ void
write_out(uint16_t *to, int64_t stride_head, int num_heads, const thread_index &me,
          fp8_memory<Shape> *shared, const consumer<Shape> &state, const attention_launch &launch,
          const work_item &item)
{
    constexpr bool IS_APART = Shape::TILED && IS_PARTIAL;
    const int first_head = 2 * me.column;
    const bool has_rope =
        Shape::Row::ROPE_IS_VALUE && 4 * me.group + me.warp == Shape::Row::NOPE_TILES;
    stride_head = IS_APART ? 0 : stride_head;
    to += first_head * stride_head + 256 * me.group + 64 * me.warp + find_eight(me, has_rope);
    float factors[Shape::HEADS / 8][2];
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
        uint32_t words[2];
        ptx_load_shared_8(ptx_shared_address(&shared->factor[me.group][first_head + 8 * j]), words);
        factors[j][0] = smla_bits_float(words[0]);
        factors[j][1] = smla_bits_float(words[1]);
    }
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float factor = factors[j][i];
            uint32_t words[4];
            round_values<Shape, IS_PARTIAL>(state, j, i, factor, words);
            if constexpr (Shape::Row::ROPE_IS_VALUE) {
                if (__any_sync(0xFFFFFFFFu, has_rope)) { /* tells ptxas that all lanes agree */
                    trade_halves(me, words);
                }
            }
            int64_t offset = i * stride_head;
            if constexpr (IS_APART) {
                offset = find_half_offset<true>(launch, item, first_head + 8 * j + i);
            }
            smla_store_vector_4_if(to + offset, words,
                                   (first_head + 8 * j + i < num_heads) &
                                       (!IS_PARTIAL || factor != 0.0f));
        }
        to += 8 * stride_head;
    }
}

/* Copies the rows that write_out has staged in shared memory to `out`, where rows of out are not
 * aligned. */
template <typename Shape>
static __device__ __forceinline__ void
copy_out(const fp8_launch &launch, const work_item &item, const fp8_memory<Shape> *shared)
{
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
#pragma unroll 1
    for (int i = ptx_forget((int)threadIdx.x); i < item.num_heads * SMLA_KV_LORA_RANK;
         i += CONSUMER_THREADS) {
        find_out(launch.base.params.results, item, i / SMLA_KV_LORA_RANK)[i % SMLA_KV_LORA_RANK] =
            ((const uint16_t *)shared->query)[i];
    }
}

/* Whether a warp has marked the item for the fallback. It does so before it publishes its last
 * weights. */
template <typename Shape>
static __device__ __forceinline__ bool
is_marked_for_fallback(const fp8_memory<Shape> *shared)
{
    uint32_t flags[2];
    static_assert(CONSUMER_WARPS == sizeof flags, "a byte for each warp");
    ptx_load_shared_8(ptx_shared_address(shared->needs_fallback), flags);
    return (flags[0] | flags[1]) != 0;
}

/* ---- Consumers: an item with one key ------------------------------------------------------- */

/* Writes the results of an item with one key: its value times its weight, which is in `factor`.
 * Each warp has every eighth head. Not inlined, so that other items do not jump over it. */
template <typename Shape>
static __device__ __noinline__ void
finish_only_key(const attention_launch &launch, fp8_memory<Shape> *shared)
{
    const work_item item = shared->current_item;
    const int thread = ptx_forget((int)threadIdx.x);
    const int warp = thread / SMLA_WARP_LANES;
    const int lane = thread % SMLA_WARP_LANES;
    if (is_marked_for_fallback(shared)) {
        mark_item(shared->item_idx, thread, shared->fallback_bits);
        return;
    }
    if (thread < item.num_heads) {
        const work_item of_row = find_row_item<Shape::TILED>(launch, item, thread);
        float reference, sum, row_max;
        find_head_state(shared, thread, &reference, &sum, &row_max);
        const float factor = leave_head(launch, of_row, thread, reference, row_max, sum, true);
        /* the only key has all of the weight except a sink's share; NaN stays NaN */
        const bool is_all =
            item.first_row == NOT_PARTIAL && launch.params.logits.sinks.values == NULL;
        shared->factor[0][thread] = is_all && sum > 0.0f ? 1.0f : sum * factor;
        if constexpr (!Shape::Row::HAS_SCALES) { /* load_only_value divides by the unit of keys */
            shared->factor[0][thread] *=
                item.first_row == NOT_PARTIAL ? find_key_unit(launch) : 1.0f;
        }
    }
    const work_item of_first = find_row_item<Shape::TILED>(launch, item, 0);
    const lane_part value = load_only_value<Shape::Portable::CODED>(
        launch, only_key_of_item(launch, of_first, shared->item_idx & 1, shared), lane);
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS); /* all weights are in `factor` */
#pragma unroll 1
    for (int head = warp; head < item.num_heads; head += CONSUMER_WARPS) {
        const work_item of_row = find_row_item<Shape::TILED>(launch, item, head);
        write_value(launch, of_row, head, lane, value, shared->factor[0][head]);
    }
}

/* ---- Consumers: the fallback of tiles ------------------------------------------------------ */

/* run_fallback where items are tiles, one token after the other. `by_token` is the launch in which
 * they are items. */
template <typename Portable>
static __device__ __forceinline__ void
run_tile_fallback(const fp8_launch &all, const attention_launch &by_token,
                  const uint32_t *fallback_bits, const item_order *order,
                  shared_memory<Portable> *shared)
{
    const attention_launch &launch = all.base;
    const int num_splits = launch.params.results.num_splits;
    const int num_tiles =
        ((int)by_token.params.queries.num_heads + Portable::HEADS - 1) / Portable::HEADS;
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
#pragma unroll 1
    for (int number = 0;; number++) {
        const int found = nth_item(all.is_ordered, all.num_items, order, number);
        if (found < 0) {
            break;
        }
        const bool is_part = launch.num_segments > 1;
        const int idx = is_part ? item_of_part(found) : found;
        if (idx >= all.num_items || !(fallback_bits[number / 32] >> number % 32 & 1)) {
            continue;
        }
        /* Whole tokens are items of their own. Behind them each token has num_splits. */
        const int behind = idx - launch.whole_tokens;
        const int count = (int)launch.tile_tokens;
        const int split = behind < 0 ? 0 : behind % num_splits;
        const int step = behind < 0 ? 1 : num_splits;
        const int first = behind < 0
                              ? idx * count
                              : launch.whole_tokens * count + (behind - split) * count + split;
#pragma unroll 1
        for (int i = 0; i < count * num_tiles; i++) {
            const int pair = first + i / num_tiles * step;
            attend_cta<Portable>(by_token, (uint32_t)num_tiles, pair * num_tiles + i % num_tiles,
                                 is_part ? found : WHOLE_ITEM, shared);
            ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
        }
    }
}

/* ---- Consumers: the end of an item --------------------------------------------------------- */

/* Writes the results of an item, or marks it for run_fallback. */
template <typename Shape>
static __device__ __forceinline__ void
finish_row(const fp8_launch &launch, fp8_memory<Shape> *shared, const consumer<Shape> &state)
{
    const work_item item = shared->current_item;
    if (has_only_key(shared->item_idx & 1, shared)) {
        finish_only_key(launch.base, shared);
        __syncwarp(); /* without it, ptxas believes that lanes diverge in the loops */
        return;
    }
    if (is_marked_for_fallback(
            shared)) { /* the item may be without heads; then run_fallback skips it */
        mark_item(shared->item_idx, ptx_forget((int)threadIdx.x), shared->fallback_bits);
        return;
    }
    if constexpr (Shape::TILED) {
        if (may_have_lone_key(shared)) {
            mark_item(shared->item_idx, ptx_forget((int)threadIdx.x), shared->fallback_bits);
            return;
        }
    }
    const list_params &params = launch.base.params;
    if (item.first_row != NOT_PARTIAL) {
        write_out<true>(find_halves(launch.base, item, 0), 2 * SMLA_KV_LORA_RANK, item.num_heads,
                        find_thread_index_again(), shared, state, launch.base, item);
    } else if constexpr (Shape::TILED) {
        write_out<false>(find_out(params.results, find_row_item<true>(launch.base, item, 0), 0),
                         params.results.out_stride_head, item.num_heads, find_thread_index_again(),
                         shared, state, launch.base, item);
    } else {
        const bool is_aligned = launch.out_is_aligned;
        write_out<false>(is_aligned ? find_out(params.results, item, 0) : (uint16_t *)shared->query,
                         is_aligned ? params.results.out_stride_head : SMLA_KV_LORA_RANK,
                         item.num_heads, find_thread_index_again(), shared, state, launch.base,
                         item);
        if (!is_aligned) {
            copy_out(launch, item, shared);
            ptx_barrier(BARRIER_CONSUMERS,
                        CONSUMER_THREADS); /* the next query goes to the same memory */
        }
    }
    leave_heads(launch, item, shared);
}
