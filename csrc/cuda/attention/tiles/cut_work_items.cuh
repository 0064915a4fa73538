/* cut_work_items.cuh: cuts long work items where other items are short, in launches of at most one
 * item per SM, for the large kernels for FP8 rows.
 *
 * Such a launch takes as long as its longest item, while SMs with shorter items or without any are
 * idle. Here the longest items are cut. An item's own CTA keeps the head of the item, and each
 * other CTA may take one piece of an item after its own item. Head and pieces leave partial rows,
 * as splits do, and the CTA that finishes the last part of an item folds them (fold_item.cuh).
 *
 * An item has NUM_SEGMENTS segments of columns. Its length is the number of segments that have
 * keys, as if entries that are no keys stood at the end of its list. An item of a dense call has as
 * many segments of its own keys, and its length is the number of segments that it would have, were
 * they as long as those of the longest item. All CTAs look at the same
 * columns and come to the same plan, as in work_order.cuh. The CTAs are ranked by their loads. Each
 * long item gets a team of CTAs with short items. The longest item gets the CTA with the least
 * load, and so on; once all have one CTA, each gets a second one. A piece costs its CTA cut_cost
 * segments more. The budget is the least number of segments with which all teams can finish: a
 * longer item keeps so many, and leaves the rest to its team.
 *
 * So the parts of an item depend on all lists of the call, and on nothing else. Calls that say how
 * many splits a row has are not cut, because there a row's bits must not depend on other tokens.
 * Calls whose lists all have the same number of quarters, as in most calls, are not cut, either.
 * They only pay for the look at the lists.
 *
 * Each item has a word of the workspace that counts its finished parts (claims.cuh).
 */
#pragma once

#include "cuda/attention/keys/key_stream.cuh"
#include "cuda/attention/tiles/work_order.cuh"

enum {
    SEGMENT_ALIGN = 128, /* columns; so an item's first step lies in its head */
    CUT_COST = 384,      /* columns: the cost of beginning and ending a piece */
    MIN_GAIN = 2,        /* segments: a smaller gain is not worth the cuts */
    MIN_HEAD = 1,        /* segments: the first step may begin before the plan is made */
    WHOLE_KEYS = CUT_COST + (MIN_GAIN + 1) * SEGMENT_ALIGN, /* a longer item may be cut */
    QUARTER = NUM_SEGMENTS / 4,
    EIGHTH = NUM_SEGMENTS / 8, /* the resolution of lengths */
    MOST_LEVEL = 9,            /* the highest load; 0: no item, 1 to 9: 0 to 8 eighths */
};

/* Memory for the plan while it is made. */
typedef struct cut_scratch {
    rank_table ctas;                 /* ranks CTAs by level of load, the highest first */
    uint16_t ranked[ORDER_THREADS];  /* load << 8 | number of a CTA, the most load first */
    uint32_t pass_maxima[2];         /* find_maximum's result in each pass */
    uint8_t quarters[ORDER_THREADS]; /* quarters per item */
} cut_scratch;

static_assert((int)MAX_CUT_ITEMS == (int)ORDER_THREADS, "a thread for each work item");

/* ---- Lengths -------------------------------------------------------------------------------- */

/* What a plan needs of its launch, copied as in main_lists. */
typedef struct cut_problem {
    main_lists lists;
    uint32_t columns; /* columns per segment */
    int cost;         /* cut_cost, in segments */
    int max_pieces;
    int num_items;
} cut_problem;

static __device__ __forceinline__ cut_problem
find_problem(const attention_launch &launch, int num_items)
{
    return cut_problem{find_main_lists(launch), (uint32_t)launch.split_columns[0], launch.cut_cost,
                       launch.max_pieces, num_items};
}

/* find_problem of a dense call, whose longest item has `longest` keys. Lengths are measured in
 * segments of that item. */
static __device__ __forceinline__ cut_problem
find_range_problem(const attention_launch &launch, int num_items, uint32_t longest)
{
    const uint32_t columns = longest / NUM_SEGMENTS + 1;
    return cut_problem{main_lists{}, columns, (int)((CUT_COST + columns - 1) / columns),
                       launch.max_pieces, num_items};
}

/* Whether the last one of a list's first `segments` segments has a key in its middle column. */
static __device__ __forceinline__ bool
has_segments(const main_lists &lists, const item_list &list, uint32_t columns, int segments)
{
    return is_key_at(lists, list, (uint32_t)(segments - 1) * columns + columns / 2);
}

static __device__ __forceinline__ void
clear_scratch(int thread, cut_scratch *scratch)
{
    clear_level(thread, &scratch->ctas);
    if (thread < 2) {
        scratch->pass_maxima[thread] = 0;
    }
}

/* Begins a plan: estimates how long each item of `thread` is, in quarters of the columns: up to the
 * last quarter with a key in its last segment. `thread` is one of num_threads. After a barrier,
 * order->seen has a bit for each length found. Usually there is one, and nothing to plan. Not
 * inlined, because all launches wait for the code behind it. */
template <typename Memory>
static __device__ __noinline__ void
find_quarters(const attention_launch &launch, int num_items, int thread, int num_threads,
              Memory *shared)
{
    static_assert(sizeof(cut_scratch) <= sizeof shared->probs, "free until the first weights");
    cut_scratch *const scratch = (cut_scratch *)shared->probs;
    const main_lists lists = find_main_lists(launch);
    const uint32_t columns = (uint32_t)launch.split_columns[0];
    uint32_t seen = 0;
    clear_scratch(thread, scratch);
#pragma unroll 1
    for (int idx = thread; idx < num_items; idx += num_threads) {
        const item_list list = find_list(lists, idx, true);
        bool has_quarter[4];
        int quarters = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            has_quarter[i] = has_segments(lists, list, columns, QUARTER * (i + 1));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            quarters = has_quarter[i] ? i + 1 : quarters;
        }
        scratch->quarters[idx] = (uint8_t)quarters;
        seen |= 1u << quarters;
    }
    seen = __reduce_or_sync(0xFFFFFFFFu, seen);
    if (ptx_elect()) {
        atomicOr(&shared->order.seen, seen);
    }
}

/* Begins a plan in a dense call, in place of find_quarters: finds how many keys the longest item
 * has. Returns whether these are enough to cut, and another item so much shorter that there may be
 * something to plan. All consumers call it. */
template <bool TILED, typename Memory>
static __device__ __noinline__ bool
are_ranges_ragged(const attention_launch &launch, int num_items, int barrier, Memory *shared)
{
    static_assert(sizeof(cut_scratch) <= sizeof shared->probs, "free until the first weights");
    clear_scratch(ptx_forget((int)threadIdx.x), (cut_scratch *)shared->probs);
    return find_longest<TILED>(launch, num_items, barrier, &shared->order.seen) &&
           *(const volatile uint32_t *)&shared->order.seen > WHOLE_KEYS;
}

/* Whether items differ in length; called after find_quarters and a barrier. */
static __device__ __forceinline__ bool
are_items_ragged(const item_order &order)
{
    const uint32_t seen = *(const volatile uint32_t *)&order.seen;
    return (seen & (seen - 1)) != 0;
}

/* The length of an item in eighths. */
static __device__ __forceinline__ int
find_length(const cut_problem &problem, int idx, const cut_scratch *scratch)
{
    const int eighths = 2 * scratch->quarters[idx];
    return eighths + has_segments(problem.lists, find_list(problem.lists, idx, true),
                                  problem.columns, EIGHTH * (eighths + 1));
}

/* find_length in a dense call. */
template <bool TILED>
static __device__ __forceinline__ int
find_range_length(const attention_launch &launch, const cut_problem &problem, int idx)
{
    const uint32_t columns = EIGHTH * problem.columns;
    const uint32_t eighths = (count_range_keys<TILED>(launch, idx) + columns - 1) / columns;
    return (int)min(eighths, (uint32_t)FULL_LENGTH);
}

/* ---- Plan ----------------------------------------------------------------------------------- */

/* The load that a CTA of a level would have with a piece of no segments: the load of its own item,
 * and the cost of a piece. The cost is only 1 where the CTA has no own item to end before. */
static __device__ __forceinline__ int
find_load(const cut_problem &problem, int level)
{
    return level == 0 ? 1 : max(EIGHTH * (level - 1), 1) + problem.cost;
}

/* The load of the CTA of a rank. Rank 0 has the most. */
static __device__ __forceinline__ int
load_of_rank(const cut_scratch *scratch, int rank)
{
    return (int)(scratch->ranked[rank] >> 8);
}

static __device__ __forceinline__ int
cta_of_rank(const cut_scratch *scratch, int rank)
{
    return (int)(scratch->ranked[rank] & 0xFF);
}

/* The largest of all threads' values, which are not negative. `maximum` points to 0 before the
 * call. */
static __device__ __forceinline__ int
find_maximum(int value, int barrier, uint32_t *maximum)
{
    const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, (uint32_t)value);
    if (ptx_elect()) {
        atomicMax(maximum, most);
    }
    ptx_barrier(barrier, ORDER_THREADS);
    return (int)*(volatile uint32_t *)maximum;
}

/* Which CTAs take pieces of which items: the items of ranks below num_long are cut, and each has
 * num_helpers helpers. The helpers are every num_long-th CTA from the end of the ranks. */
typedef struct cut_teams {
    int num_long;
    int num_helpers;
} cut_teams;

static __device__ __forceinline__ int
rank_of_helper(const cut_teams &teams, int rank, int i)
{
    return (int)gridDim.x - 1 - rank - i * teams.num_long;
}

/* The least budget, in segments, with which the item of a rank and its helpers can finish. */
static __device__ __forceinline__ int
find_team_load(const cut_problem &problem, const cut_teams &teams, int rank,
               const cut_scratch *scratch)
{
    int sum = load_of_rank(scratch, rank) - problem.cost;
    int least = sum;
#pragma unroll 1
    for (int i = 0; i < teams.num_helpers; i++) {
        sum += load_of_rank(scratch, rank_of_helper(teams, rank, i));
        least = min(least, (sum + i + 1) / (i + 2));
    }
    return least;
}

/* What find_piece finds: the piece that a helper takes of a rank's item, where no CTA has more than
 * `budget` segments. All sizes are in segments. */
typedef struct piece_range {
    int before; /* sizes of all pieces in front of this one */
    int size;   /* size of this piece */
    int count;  /* number of the item's pieces */
} piece_range;

static __device__ __forceinline__ piece_range
find_piece(const cut_problem &problem, const cut_teams &teams, int rank, int helper, int budget,
           const cut_scratch *scratch)
{
    piece_range range = {0, 0, 0};
    int left = load_of_rank(scratch, rank) - problem.cost - budget;
#pragma unroll 1
    for (int i = 0; i < teams.num_helpers && left > 0; i++) {
        const int room = budget - load_of_rank(scratch, rank_of_helper(teams, rank, i));
        const int size = min(left, max(room, 0));
        range.before += i < helper ? size : 0;
        range.size = i == helper ? size : range.size;
        range.count += size > 0;
        left -= size;
    }
    return range;
}

/* The word that describes the nth part of an item whose head has `budget` of the `length` segments
 * that were planned for it. In a dense call these become the item's own NUM_SEGMENTS. */
template <bool RANGED>
static __device__ __forceinline__ int
describe_part(int idx, int nth, const piece_range &range, int first_piece, int budget, int length)
{
    const auto own = [&](int segments) {
        return RANGED ? segments * NUM_SEGMENTS / length : segments;
    };
    const int begin = nth == 0 ? 0 : budget + range.before;
    const int end =
        nth == range.count ? (int)NUM_SEGMENTS : own(budget + range.before + range.size);
    return make_part(idx, own(begin), end, nth, range.count + 1, first_piece);
}

/* The rank of CTA number `thread`, from 0 for the most load. CTAs of one level keep their order. */
static __device__ __forceinline__ int
find_rank(int thread, int level, bool is_cta, int barrier, cut_scratch *scratch)
{
    const uint32_t reversed_level = (uint32_t)(MOST_LEVEL - level);
    const int rank_in_warp = count_equals(thread, reversed_level, is_cta, &scratch->ctas);
    ptx_barrier(barrier, ORDER_THREADS);
    if (thread < SMLA_WARP_LANES) {
        find_first_ranks(thread, &scratch->ctas);
    }
    ptx_barrier(barrier, ORDER_THREADS);
    return rank_of(thread, reversed_level, rank_in_warp, &scratch->ctas);
}

/* Decides which items are cut. All consumers call it, after find_quarters. Its scratch memory is
 * that of the weights, which come later. Not inlined, because few launches come here. */
template <bool RANGED, bool TILED, typename Memory>
static __device__ __noinline__ void
plan_cuts(const attention_launch &launch, int num_items, int barrier, Memory *shared)
{
    cut_scratch *const scratch = (cut_scratch *)shared->probs;
    item_order *const order = &shared->order;
    const cut_problem problem =
        RANGED ? find_range_problem(launch, num_items, *(const volatile uint32_t *)&order->seen)
               : find_problem(launch, num_items);
    const int thread = ptx_forget((int)threadIdx.x);
    const int num_ctas = (int)gridDim.x;
    const bool is_cta = thread < num_ctas;
    const int level = thread < num_items
                          ? 1 + (RANGED ? find_range_length<TILED>(launch, problem, thread)
                                        : find_length(problem, thread, scratch))
                          : 0;
    const int my_rank = find_rank(thread, level, is_cta, barrier, scratch);
    if (is_cta) {
        scratch->ranked[my_rank] = (uint16_t)(find_load(problem, level) << 8 | thread);
    }
    ptx_barrier(barrier, ORDER_THREADS);
    /* From here on thread i has the item of rank i. At first each of the longer items has one
     * helper: that tells which items are long. */
    const int length =
        thread < num_ctas ? load_of_rank(scratch, thread) - problem.cost : -problem.cost;
    cut_teams teams = {num_ctas, 1};
    bool is_long = 2 * thread < num_ctas;
    int budget = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        const int least = is_long ? find_team_load(problem, teams, thread, scratch) : length;
        budget = find_maximum(max(least, (int)MIN_HEAD), barrier, &scratch->pass_maxima[pass]);
        is_long = length > budget;
        if (pass == 0) {
            teams.num_long = ptx_barrier_count(barrier, ORDER_THREADS, is_long);
            if (teams.num_long == 0) {
                return;
            }
            teams.num_helpers =
                min(min(num_ctas - teams.num_long, problem.max_pieces) / teams.num_long,
                    (int)MAX_PARTS - 1);
        }
    }
    if (thread == (int)blockIdx.x && load_of_rank(scratch, 0) - problem.cost >= budget + MIN_GAIN) {
        const bool has_head = my_rank < teams.num_long;
        const int from_end = num_ctas - 1 - my_rank;
        const int helper = has_head ? -1 : from_end / teams.num_long;
        const int rank = has_head ? my_rank : from_end - helper * teams.num_long;
        const piece_range range = find_piece(problem, teams, rank, helper, budget, scratch);
        if (has_head ? range.count > 0 : range.size > 0) {
            const int idx = cta_of_rank(scratch, rank);
            const int first_piece = rank * teams.num_helpers;
            order->items[has_head ? 0 : 1] =
                describe_part<RANGED>(idx, 1 + helper, range, first_piece, budget,
                                      load_of_rank(scratch, rank) - problem.cost);
        }
    }
    ptx_barrier(barrier, ORDER_THREADS); /* no thread reads the scratch memory any more */
}

/* ---- The CTA's parts ------------------------------------------------------------------------- */

/* Whether the plan cuts the CTA's first item. */
static __device__ __forceinline__ bool
is_first_cut(const attention_launch &launch, const item_order &order)
{
    return launch.num_segments > 1 && count_parts(nth_item(true, 0, &order, 0)) > 1;
}

/* Whether the plan gives the CTA any part of a cut item. */
static __device__ __forceinline__ bool
has_parts(const attention_launch &launch, const item_order &order)
{
    return is_first_cut(launch, order) ||
           (launch.num_segments > 1 && nth_item(true, 0, &order, 1) >= 0);
}

/* ---- Launchers ------------------------------------------------------------------------------- */

/* Lets the launch cut its items, if it may and if they are long enough. The room for parts is the
 * plan's cut_bytes, not the whole workspace, because the workspace's size must not change the
 * parts. */
template <int HEADS>
static void
allow_cuts(const smla_attention_params *params, int64_t cut_bytes, int64_t num_items,
           attention_launch *launch)
{
    const int64_t topk = params->keys.lists[0].topk;
    const int64_t num_sms = smla_cuda_find_device(params->call.stream.device_id)->num_sms;
    const int64_t columns = smla_count_parts(topk, NUM_SEGMENTS * SEGMENT_ALIGN) * SEGMENT_ALIGN;
    if (params->keys.num_lists != 1 || num_items > num_sms || num_sms > MAX_CUT_ITEMS ||
        topk <= CUT_COST + (MIN_GAIN + 1) * columns) {
        return;
    }
    const int64_t arrival_bytes = MAX_CUT_ITEMS * (int64_t)sizeof(uint64_t);
    const int64_t heads = params->queries.num_heads < HEADS ? params->queries.num_heads : HEADS;
    const int64_t slot_bytes = smla_partial_bytes(2 * heads) / 2;
    const int64_t num_slots = (cut_bytes - 2 * SMLA_PARTIAL_ALIGN - arrival_bytes) / slot_bytes;
    const int64_t num_pieces = num_slots - num_sms < num_sms ? num_slots - num_sms : num_sms;
    if (num_pieces < 1 || params->workspace.bytes < cut_bytes) {
        return;
    }
    uint8_t *const memory =
        (uint8_t *)params->workspace.memory + smla_partial_padding(params->workspace.memory);
    launch->num_segments = NUM_SEGMENTS;
    launch->split_columns[0] = (int32_t)columns;
    launch->split_step[0] = (int32_t)columns;
    launch->cut_cost = (int16_t)smla_count_parts(CUT_COST, columns);
    launch->max_pieces = (int32_t)num_pieces;
    launch->slot_heads = (int32_t)heads;
    launch->tile_heads = HEADS;
    launch->arrivals = (uint64_t *)memory;
    launch->partials.state = (float *)(memory + arrival_bytes);
    launch->partials.out =
        (float *)(memory + arrival_bytes + smla_partial_state_bytes(num_slots * heads));
}
