/* work_order.cuh: which work items a CTA of Hopper's kernels takes, one after the other.
 *
 * An item's time depends on its number of keys. Where lists differ in length, a CTA that takes
 * every gridDim.x-th item may meet two long items, and all other CTAs wait for it at the end. Here
 * every CTA computes one order for the whole grid, and takes its own part of it. All CTAs read the
 * same lists and come to the same order, so they need no common memory and no messages.
 *
 * Items are taken in rounds of gridDim.x. In the first round CTA c takes item c, so that no CTA
 * waits for the order when a launch starts. In each further round the CTA with the least load so
 * far takes the longest item of the round. The CTA with the second least load takes the second
 * longest item, and so on. In a last round that is not full, the CTAs with the largest loads take
 * none.
 *
 * Lengths are estimated from a few columns of each item's main list; a dense call has them in its
 * ranges, relative to the longest of which they count. A wrong estimate costs time.
 * It changes no result, because the bits of a row do not depend on what its CTA did before. Where
 * every quarter of every list ends with a key, all lists count as full. There is nothing to level
 * then, and the order is the fixed one.
 *
 * The fixed order is: item n * gridDim.x + c is the n-th of CTA c. Launches of one item per CTA, of
 * more than NUM_ROUNDS rounds, or with splits of all tokens keep it. Many rounds level the loads
 * anyway. Where only the last tokens are split, the last round consists of splits, each as long as
 * its share of the token's list.
 */
#pragma once

#include "cuda/attention/sm80/mqa/attend.cuh"

enum {
    NUM_ROUNDS = 4,      /* the most rounds that are ordered */
    ORDER_THREADS = 256, /* all consumers; an ordered grid has no more CTAs */
    FULL_LENGTH = 8,     /* length, in eighths, of an item whose list is full of keys */
    NUM_LEVELS = 32,     /* levels of loads or lengths, a lane for each */
};

/* The result of the plan, in shared memory. It stays there until the CTA ends. */
typedef struct item_order {
    alignas(8) uint64_t planned;   /* mbarrier of `items`: 1 arrival, or each consumer's */
    int32_t items[1 + NUM_ROUNDS]; /* what nth_item returns for the CTA */
    /* Where items may be cut: one bit for each length that was found. In a dense call: how many
     * keys the longest item has. At the end: one bit for each item of the CTA that it must fold. */
    uint32_t seen;
} item_order;

/* Ranks threads by a small number, their level. Each level has a byte per warp. The byte first
 * counts the warp's threads of this level, and then is the rank of the first of these threads. */
typedef struct rank_table {
    alignas(8) uint64_t bytes[NUM_LEVELS];
} rank_table;

/* Memory for one round while the plan is made. */
typedef struct round_scratch {
    rank_table ctas;               /* ranks CTAs by load */
    rank_table items;              /* ranks items by length, the longest first */
    uint8_t ranked[ORDER_THREADS]; /* items of a round, the longest first */
} round_scratch;

typedef struct order_scratch {
    round_scratch round;
    uint8_t lengths[NUM_ROUNDS * ORDER_THREADS]; /* one per item */
} order_scratch;

static_assert((int)ORDER_THREADS == CTA_THREADS, "a consumer thread for each CTA of the grid");
static_assert((int)FULL_LENGTH * (NUM_ROUNDS - 1) < NUM_LEVELS, "loads are levels");

/* The number of CTAs for a number of work items. It is one per SM if all SMs have items or may get
 * pieces of items. Otherwise it is one per item, and one CTA without an item on an idle SM. This
 * CTA waits for no memory, so it is the first to execute each part of the kernel's code, and brings
 * the code from memory to L2 for the others. Behind other kernels that saves 2 us of a small
 * call. */
static inline int64_t
count_ctas(const attention_launch &launch, int64_t num_items, int64_t num_sms)
{
    return num_items < num_sms && launch.num_segments == 1 ? num_items + 1 : num_sms;
}

/* Whether CTAs take their work items from `item_order`, and not in the fixed order. */
static inline bool
has_order(const attention_launch &launch, int64_t num_items, int64_t num_ctas)
{
    return launch.num_segments > 1 ||
           ((launch.params.results.num_splits == 1 || launch.whole_tokens > 0) &&
            num_ctas <= ORDER_THREADS && num_items > num_ctas &&
            num_items <= NUM_ROUNDS * num_ctas);
}

/* Prepares the order; one thread calls it before all else. An item that may be cut stays whole, and
 * the CTA's only item, unless a plan says otherwise. */
static __device__ __forceinline__ void
start_order(const attention_launch &launch, item_order *order)
{
    ptx_mbarrier_init(ptx_shared_address(&order->planned),
                      launch.num_segments > 1 ? ORDER_THREADS : 1);
    order->items[0] = launch.num_segments == 1
                          ? (int32_t)blockIdx.x
                          : make_part((int)blockIdx.x, 0, NUM_SEGMENTS, 0, 1, 0);
    order->items[1] = -1;
    order->items[2] = -1;
    order->seen = 0;
}

/* The CTA's n-th work item, counted from 0, or -1 behind the last one. Item 0 may be empty
 * (find_numbered_item). n may be one more than the last item's. With an order, callers pass
 * wait_for_order before they ask for n above 0. Where items may be cut, they pass it for any n, and
 * the result is the word of a part (work_items.cuh). */
static __device__ __forceinline__ int
nth_item(bool is_ordered, int num_items, const item_order *order, int n)
{
    if (is_ordered) {
        return ((const volatile int32_t *)order->items)[n];
    }
    const int idx = n * (int)gridDim.x + (int)blockIdx.x;
    return n == 0 || idx < num_items ? idx : -1;
}

/* Waits until the order is planned. Only gather warps need this, because consumers meet at a
 * barrier when they have made the plan. */
static __device__ __forceinline__ void
wait_for_order(bool is_ordered, uint32_t planned)
{
    if (is_ordered) {
        ptx_mbarrier_wait(planned, 0);
    }
}

/* ---- Lengths -------------------------------------------------------------------------------- */

/* The main lists of a launch whose first tokens are whole. They are copied at once, because a
 * function that is not inlined reads its kernel's arguments as slowly as memory, and again behind
 * every barrier. */
typedef struct main_lists {
    const int32_t *indices;
    const int32_t *topk_length;
    int64_t indices_stride;
    int64_t length_stride;
    uint32_t topk;
    uint32_t index_limit;
    smla_divisor head_tiles; /* items per whole token, or split */
} main_lists;

static __device__ __forceinline__ main_lists
find_main_lists(const attention_launch &launch)
{
    const smla_key_list &keys = launch.params.keys.lists[0];
    return main_lists{keys.indices,
                      keys.end,
                      keys.indices_stride_token,
                      keys.end_stride,
                      (uint32_t)keys.topk,
                      launch.lists[0].index_limit,
                      launch.head_tiles};
}

/* The list of a token, and its length. */
typedef struct item_list {
    const int32_t *indices;
    uint32_t count; /* not above topk */
} item_list;

static __device__ __forceinline__ item_list
find_token_list(const main_lists &lists, uint32_t token, bool is_on)
{
    uint32_t length;
    ptx_load_4(lists.topk_length + token * lists.length_stride, is_on & (lists.topk_length != NULL),
               lists.topk, &length);
    return item_list{lists.indices + token * lists.indices_stride,
                     (uint32_t)min(max((int32_t)length, 0), (int32_t)lists.topk)};
}

/* The list of an item, if all tokens are whole. */
static __device__ __forceinline__ item_list
find_list(const main_lists &lists, int idx, bool is_on)
{
    return find_token_list(lists, smla_divide_uint32((uint32_t)idx, lists.head_tiles), is_on);
}

/* Whether a column of a list is a key. It loads four bytes, because vectors took three times as
 * long where all CTAs read the same memory. */
static __device__ __forceinline__ bool
is_key_at(const main_lists &lists, const item_list &list, uint32_t column)
{
    uint32_t index;
    ptx_load_4(list.indices + column, column < lists.topk, NO_INDEX, &index);
    return index < lists.index_limit && column < list.count;
}

/* How many quarters of a token's list end with a key. The four loads are under way together. */
static __device__ __forceinline__ uint32_t
count_quarters(const main_lists &lists, uint32_t token)
{
    const item_list list = find_token_list(lists, token, true);
    bool is_key[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        is_key[i] = is_key_at(lists, list, (i + 1) * lists.topk / 4 - 1);
    }
    return (uint32_t)is_key[0] + is_key[1] + is_key[2] + is_key[3];
}

/* The length of a token's list, 0 to FULL_LENGTH, if `quarters` of its quarters end with keys. One
 * more column tells whether the keys reach the middle of the next quarter. */
static __device__ __forceinline__ uint32_t
estimate_length(const main_lists &lists, uint32_t token, uint32_t quarters)
{
    const uint32_t column = (uint32_t)((uint64_t)(2 * quarters + 1) * lists.topk / FULL_LENGTH);
    return 2 * quarters + is_key_at(lists, find_token_list(lists, token, true), column);
}

/* The keys of an item's token, or group of tokens, of a dense call. */
template <bool TILED>
static __device__ __forceinline__ uint32_t
count_token_keys(const attention_launch &launch, uint32_t token)
{
    const smla_key_list &keys = launch.params.keys.lists[0];
    const int32_t first = first_token_of<TILED>(launch, (int32_t)token);
    const int32_t last = last_token_of<TILED>(launch, (int32_t)token);
    const int32_t end = min(keys.end[TILED ? last : token], (int32_t)keys.topk);
    return (uint32_t)max(end - keys.begin[TILED ? first : token], 0);
}

/* The keys of an item of a dense call, if all tokens are whole. */
template <bool TILED>
static __device__ __forceinline__ uint32_t
count_range_keys(const attention_launch &launch, int idx)
{
    return count_token_keys<TILED>(launch, smla_divide_uint32((uint32_t)idx, launch.head_tiles));
}

/* Whether an item has so much fewer keys than the longest one that it counts as shorter. */
static __device__ __forceinline__ bool
is_short(uint32_t num_keys, uint32_t longest)
{
    return num_keys < longest - longest / FULL_LENGTH;
}

/* Finds how many keys the longest item of a dense call has, at `longest_at`, which was 0. All
 * consumer threads call it. Returns whether another item is shorter. */
template <bool TILED>
static __device__ __forceinline__ bool
find_longest(const attention_launch &launch, int num_items, int barrier, uint32_t *longest_at)
{
    uint32_t most = 0, least = UINT32_MAX;
#pragma unroll 1
    for (int idx = ptx_forget((int)threadIdx.x); idx < num_items; idx += ORDER_THREADS) {
        const uint32_t num_keys = count_range_keys<TILED>(launch, idx);
        most = max(most, num_keys);
        least = min(least, num_keys);
    }
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    if (ptx_elect()) {
        atomicMax(longest_at, most);
    }
    ptx_barrier(barrier, ORDER_THREADS);
    const uint32_t longest = *(const volatile uint32_t *)longest_at;
    return ptx_barrier_or(barrier, ORDER_THREADS, is_short(least, longest));
}

/* An item as a plan sees it: its token, and which split of the token's list it has. A whole list is
 * one split. */
typedef struct item_share {
    uint32_t token;
    uint32_t split;
    bool is_split;
} item_share;

/* HAS_SPLITS: the launch has whole tokens, and behind them tokens in splits. */
template <bool HAS_SPLITS>
static __device__ __forceinline__ item_share
find_share(const attention_launch &launch, int idx)
{
    const uint32_t pair = smla_divide_uint32((uint32_t)idx, launch.head_tiles);
    const uint32_t num_whole = (uint32_t)launch.whole_tokens;
    if (!HAS_SPLITS || pair < num_whole) {
        return item_share{pair, 0, false};
    }
    const uint32_t behind = pair - num_whole;
    const uint32_t token = smla_divide_uint32(behind, launch.num_splits);
    return item_share{num_whole + token,
                      behind - token * (uint32_t)launch.params.results.num_splits, true};
}

/* The eighths of a list of `length` eighths that an item has. */
static __device__ __forceinline__ uint32_t
take_share(const attention_launch &launch, const item_share &share, uint32_t length)
{
    if (!share.is_split) {
        return length;
    }
    const uint32_t up = (uint32_t)launch.params.results.num_splits - 1;
    const uint32_t begin = smla_divide_uint32(FULL_LENGTH * share.split, launch.num_splits);
    const uint32_t end =
        smla_divide_uint32(FULL_LENGTH * (share.split + 1) + up, launch.num_splits);
    return min(length, end) - min(length, begin);
}

/* Finds the lengths of all items of a dense call, if its tokens differ. All consumer threads call
 * it. Returns whether they do. */
template <bool HAS_SPLITS, bool TILED>
static __device__ __forceinline__ bool
find_range_lengths(const attention_launch &launch, int num_items, int barrier, uint8_t *lengths,
                   uint32_t *longest_at)
{
    const int num_whole =
        HAS_SPLITS ? (int)launch.params.queries.num_tokens * (int)launch.head_tiles.divisor
                   : num_items;
    if (!find_longest<TILED>(launch, num_whole, barrier, longest_at)) {
        return false;
    }
    const float per_key = (float)FULL_LENGTH / (float)*(const volatile uint32_t *)longest_at;
#pragma unroll 1
    for (int idx = ptx_forget((int)threadIdx.x); idx < num_items; idx += ORDER_THREADS) {
        const item_share share = find_share<HAS_SPLITS>(launch, idx);
        const uint32_t length =
            __float2uint_ru((float)count_token_keys<TILED>(launch, share.token) * per_key);
        lengths[idx] = (uint8_t)take_share(launch, share, min(length, (uint32_t)FULL_LENGTH));
    }
    return true;
}

/* Finds the lengths of all items of a call over lists, if some list is not full. All consumer
 * threads call it. Returns whether one is not. */
template <bool HAS_SPLITS>
static __device__ __forceinline__ bool
find_list_lengths(const attention_launch &launch, int num_items, int barrier, uint8_t *lengths)
{
    const main_lists lists = find_main_lists(launch);
    const int thread = ptx_forget((int)threadIdx.x);
    bool is_ragged = false;
#pragma unroll 1
    for (int idx = thread; idx < num_items; idx += ORDER_THREADS) {
        const uint32_t quarters = count_quarters(lists, find_share<HAS_SPLITS>(launch, idx).token);
        lengths[idx] = (uint8_t)quarters;
        is_ragged |= quarters != 4;
    }
    is_ragged = ptx_barrier_or(barrier, ORDER_THREADS, is_ragged);
#pragma unroll 1
    for (int idx = thread; is_ragged && idx < num_items; idx += ORDER_THREADS) {
        const item_share share = find_share<HAS_SPLITS>(launch, idx);
        const uint32_t length = estimate_length(lists, share.token, lengths[idx]);
        lengths[idx] = (uint8_t)take_share(launch, share, length);
    }
    return is_ragged;
}

/* ---- Ranks ---------------------------------------------------------------------------------- */

/* Clears the counts of one level; threads 0 to NUM_LEVELS - 1 together clear the table. */
static __device__ __forceinline__ void
clear_level(int thread, rank_table *table)
{
    if (thread < NUM_LEVELS) {
        table->bytes[thread] = 0;
    }
}

/* Returns the thread's rank among the threads of its warp with the same level, and writes their
 * count to the table, which was cleared before. */
static __device__ __forceinline__ int
count_equals(int thread, uint32_t level, bool is_on, rank_table *table)
{
    const uint32_t equals =
        __match_any_sync(0xFFFFFFFFu, level) & __ballot_sync(0xFFFFFFFFu, is_on);
    const int rank = __popc(equals & ((1u << thread % SMLA_WARP_LANES) - 1));
    if (is_on && rank == 0) {
        ((uint8_t *)&table->bytes[level])[thread / SMLA_WARP_LANES] = (uint8_t)__popc(equals);
    }
    return rank;
}

/* Turns counts into first ranks, in one warp. The smallest level comes first; threads of one level
 * keep their order. No rank is above 255, so no byte overflows into the next. */
static __device__ __forceinline__ void
find_first_ranks(int lane, rank_table *table)
{
    constexpr uint64_t EACH = 0x0101010101010101;
    const uint64_t counts = table->bytes[lane];
    const int count = (int)(__dp4a((uint32_t)counts, (uint32_t)EACH, 0u) +
                            __dp4a((uint32_t)(counts >> 32), (uint32_t)EACH, 0u));
    const int sum = smla_scan_lanes(count, lane);
    table->bytes[lane] = (counts * EACH << 8) + (count == 0 ? 0 : (uint64_t)(sum - count) * EACH);
}

/* The rank of a thread after count_equals, find_first_ranks and a barrier. */
static __device__ __forceinline__ int
rank_of(int thread, uint32_t level, int rank_in_warp, const rank_table *table)
{
    return ((const uint8_t *)&table->bytes[level])[thread / SMLA_WARP_LANES] + rank_in_warp;
}

/* ---- Plan ----------------------------------------------------------------------------------- */

/* Which of a round's `count` items CTA number `thread` takes if its load is `load`; -1 for none.
 * All consumer threads call it. */
static __device__ __forceinline__ int
share_out_round(int thread, int count, const uint8_t *lengths, uint32_t load, int barrier,
                round_scratch *scratch)
{
    const bool is_cta = thread < (int)gridDim.x;
    const bool is_item = thread < count;
    const uint32_t level = is_item ? FULL_LENGTH - lengths[thread] : 0;
    clear_level(thread, &scratch->ctas);
    clear_level(thread, &scratch->items);
    ptx_barrier(barrier, ORDER_THREADS);
    const int cta_in_warp = count_equals(thread, load, is_cta, &scratch->ctas);
    const int item_in_warp = count_equals(thread, level, is_item, &scratch->items);
    ptx_barrier(barrier, ORDER_THREADS); /* all threads are counted */
    if (thread < 2 * SMLA_WARP_LANES) {
        find_first_ranks(thread % SMLA_WARP_LANES,
                         thread < SMLA_WARP_LANES ? &scratch->ctas : &scratch->items);
    }
    ptx_barrier(barrier, ORDER_THREADS);
    const int cta_rank = rank_of(thread, load, cta_in_warp, &scratch->ctas);
    if (is_item) {
        scratch->ranked[rank_of(thread, level, item_in_warp, &scratch->items)] = (uint8_t)thread;
    }
    ptx_barrier(barrier, ORDER_THREADS); /* `ranked` is written, and the tables may be cleared */
    return is_cta && cta_rank < count ? scratch->ranked[cta_rank] : -1;
}

/* Not inlined: most launches have no order, and jumping over the code would cost them up to 2 us,
 * because code that lies behind a jump is not fetched ahead. */
template <bool RANGED, bool TILED, bool HAS_SPLITS, typename Memory>
static __device__ __noinline__ void
plan_order(const attention_launch &launch, int num_items, int barrier, Memory *shared)
{
    static_assert(sizeof(order_scratch) <= sizeof shared->probs, "free until the first weights");
    order_scratch *const scratch = (order_scratch *)shared->probs;
    item_order *const order = &shared->order;
    const int thread = ptx_forget((int)threadIdx.x);
    bool is_ragged;
    if constexpr (RANGED) {
        is_ragged = find_range_lengths<HAS_SPLITS, TILED>(launch, num_items, barrier,
                                                          scratch->lengths, &order->seen);
    } else {
        is_ragged = find_list_lengths<HAS_SPLITS>(launch, num_items, barrier, scratch->lengths);
    }
    const int to_order = is_ragged ? num_items : 0;
    ptx_barrier(barrier, ORDER_THREADS);
    uint32_t load = thread < (int)gridDim.x ? scratch->lengths[thread] : 0;
    int first = 0;
#pragma unroll 1
    for (int round = 0; round < NUM_ROUNDS; round++) {
        first += (int)gridDim.x;
        int idx = first + thread < num_items ? first + thread : -1;
        if (first < to_order) {
            const int round_idx =
                share_out_round(thread, min(num_items - first, (int)gridDim.x),
                                scratch->lengths + first, load, barrier, &scratch->round);
            idx = round_idx < 0 ? -1 : first + round_idx;
            load += idx < 0 ? 0 : scratch->lengths[idx];
        }
        if (thread == (int)blockIdx.x) {
            order->items[1 + round] = idx;
        }
    }
    ptx_mbarrier_arrive(ptx_shared_address(&order->planned), thread == (int)blockIdx.x);
    ptx_barrier(barrier, ORDER_THREADS); /* no thread reads the scratch memory any more */
}

/* Makes the plan of an ordered launch. All consumers call it when they may read memory of other
 * grids, and meet at `barrier`. Its scratch memory is that of the weights, which come later. */
template <bool RANGED = false, bool TILED = false, typename Launch, typename Memory>
static __device__ __forceinline__ void
order_items(const Launch &launch, int barrier, Memory *shared)
{
    if (launch.is_ordered && launch.base.num_segments == 1) {
        if (launch.base.whole_tokens > 0) {
            plan_order<RANGED, TILED, true>(launch.base, launch.num_items, barrier, shared);
        } else {
            plan_order<RANGED, TILED, false>(launch.base, launch.num_items, barrier, shared);
        }
    }
}
