/* fp8_kernel.cuh: the kernel of attention_fp8_sm90.cu, attention_fp8_dense_sm90.cu and
 * attention_fp8_e4m3_sm90.cu, which describe it, and its launch.
 */
#pragma once

#include "cuda/attention/partials/fold_item.cuh"
#include "cuda/attention/sm90/sparse_fp8/fp8_gather.cuh"
#include "cuda/attention/sm90/sparse_fp8/fp8_query.cuh"
#include "cuda/attention/sm90/sparse_fp8/fp8_results.cuh"
#include "cuda/attention/sm90/sparse_fp8/fp8_scores.cuh"
#include "cuda/attention/sm90/sparse_fp8/fp8_values.cuh"
#include "cuda/attention/sm90/sparse_fp8/range_gather.cuh"

/* ---- Consumers: a work item ---------------------------------------------------------------- */

template <typename Shape>
static __device__ __forceinline__ void
clear_out(consumer<Shape> *state)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < Shape::HEADS / 2; j++) {
            state->out[i][j] = 0.0f;
        }
    }
}

/* Waits until the item's keys are counted, and adds its number of steps to state->phase. */
template <typename Shape>
static __device__ __forceinline__ void
take_steps(fp8_memory<Shape> *shared, consumer<Shape> *state)
{
    const uint32_t turn = (state->phase & QUERY_PARITY) != 0;
    ptx_mbarrier_wait(ptx_shared_address(&shared->counted), turn);
    state->phase += ONE_STEP * (uint32_t)*(const volatile int32_t *)&shared->num_steps[turn];
}

/* Runs all steps of an item whose query is in shared memory. Finds the next item while the last
 * products are under way. */
template <typename Shape>
static __device__ __forceinline__ void
consume_steps(const fp8_launch &launch, fp8_memory<Shape> *shared, consumer<Shape> *state,
              work_item *next)
{
    const thread_index me = find_thread_index();
    const fp8_addresses at = find_addresses(shared, me.group);
    bool has_other = me.group == 1;
    const weight_tiles weights = {find_weights(shared, me.group),
                                  find_weights(shared, me.group ^ 1)};
    const uint64_t query =
        wgmma_descriptor(ptx_shared_address(shared->query), 1024, WGMMA_SWIZZLE_128);
#pragma unroll
    for (int i = 0; i < Shape::HEADS / 2; i++) {
        state->scores[i] =
            0.0f; /* without this, the last item's scores keep registers until here */
        if constexpr (Shape::SCALES_SCORES) {
#pragma unroll
            for (int part = 0; part < Shape::SCORE_PARTS; part++) {
                state->parts[part][i] = 0.0f;
            }
        }
    }
    clear_out(state);
#pragma unroll 1
    for (;;) {
        /* computed here, because nothing hides the reduction's latency behind a wait */
        const int other = make_uniform(find_other<Shape>(*state, has_other));
        score_block(shared, at, find_thread_index(), query, state);
        if (!are_steps_left(*state)) {
            wgmma_wait<0>();
            take_steps(shared, state);
            find_references(launch, find_thread_index_again(), shared, state);
            clear_sums(find_thread_index_again(), shared);
            if (find_thread_index_again().group == 1) { /* it has to wait for weights anyway */
                leave_sinks(launch.base, launch.base.params.logits.sinks, find_thread_index_again(),
                            shared);
            }
        }
        meet_other_block(shared, at, find_thread_index(), other, state);
        add_blocks(launch, shared, at, find_thread_index(), weights, other, has_other, state);
        finish_step(state);
        if (!are_steps_left(*state)) {
            break;
        }
        has_other = true;
        state->phase ^= BLOCK_PARITY;
    }
    *next = find_next(launch, shared);
    wgmma_wait<0>();
    if (find_thread_index_again().group == 0) {
        add_last_block(launch, shared, find_addresses(shared, 0), find_thread_index_again(), state);
    } else {
        find_factors(launch, 1, shared);
    }
    state->phase ^= BLOCK_PARITY;
}

/* begin_items in a dense call: only looks for long items among short ones, where items may be cut.
 * Gather warps know the steps of every item. */
template <typename Shape>
static __device__ __forceinline__ void
begin_ranges(const fp8_launch &launch, fp8_memory<Shape> *shared)
{
    const bool may_be_cut = launch.base.num_segments > 1;
    if (may_be_cut &&
        are_ranges_ragged<Shape::TILED>(launch.base, launch.num_items, BARRIER_CONSUMERS, shared)) {
        plan_cuts<true, Shape::TILED>(launch.base, launch.num_items, BARRIER_CONSUMERS, shared);
    }
    ptx_mbarrier_arrive(ptx_shared_address(&shared->order.planned), may_be_cut);
}

/* Finds how many steps the CTA's first item has. Group 0 counts the keys, because it waits for a
 * query anyway, and has as many warps as there are gather warps. Where items may be cut, group 1
 * looks for long lists among short ones meanwhile, and gather warps count the keys of cut items
 * again. Group 1 has a barrier, too, because racecheck understands a barrier of one group only if
 * the other group also has one. */
template <typename Shape>
static __device__ __forceinline__ void
begin_items(const fp8_launch &launch, fp8_memory<Shape> *shared)
{
    const thread_index me = find_thread_index_again();
    const bool may_be_cut = launch.base.num_segments > 1;
    if (me.group == 0) {
        const work_item item = find_numbered_item<true>(launch.base, (int)blockIdx.x, Shape::HEADS);
        const key_stream stream = open_stream(launch.base, item, 0, me.warp, me.lane, 0);
        count_item_keys<Shape::FIRST_COUNT_LOADS, Shape::COUNTS_APART>(launch.base, item, stream,
                                                                       launch.base.column_stride,
                                                                       me.warp, me.lane,
                                                                       BARRIER_GROUP, GROUP_THREADS,
                                                                       &shared->num_keys[0]);
    } else {
        ptx_barrier(BARRIER_GROUP + 1, GROUP_THREADS);
        if (may_be_cut) {
            find_quarters(launch.base, launch.num_items, me.warp * SMLA_WARP_LANES + me.lane,
                          GROUP_THREADS, shared);
        }
    }
    if (may_be_cut) {
        ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS); /* all quarters are found */
        if (are_items_ragged(shared->order)) {
            plan_cuts<false, false>(launch.base, launch.num_items, BARRIER_CONSUMERS, shared);
        }
    }
    if (ptx_forget((int)threadIdx.x) == 0) {
        if (!is_first_cut(launch.base, shared->order)) {
            publish_steps(find_steps(launch.base, &shared->num_keys[0]), 0, shared);
        }
    }
    ptx_mbarrier_arrive(ptx_shared_address(&shared->order.planned), may_be_cut);
}

/* Does the CTA's items in turn. Unless out is staged, the groups meet only as the next item
 * begins. */
template <typename Shape>
static __device__ __forceinline__ void
consume(const fp8_launch &launch, fp8_memory<Shape> *shared)
{
    consumer<Shape> state = {};
    state.own = BLOCK_GRANULES * Shape::GRANULE_BYTES * find_thread_index().group;
    ptx_wait_for_grids(); /* memory of other grids is read and written only from here on */
    ptx_let_next_grid_start();
    if constexpr (!Shape::Row::HAS_SCALES) {
        find_cache_scale(launch, shared);
    }
    if constexpr (Shape::RANGED) {
        begin_ranges(launch, shared);
    } else {
        begin_items(launch, shared);
    }
    order_items<Shape::RANGED, Shape::TILED>(launch, BARRIER_CONSUMERS, shared);
    work_item next = find_next(launch, shared);
#pragma unroll 1
    do {
        store_query(launch, find_thread_index_again(), next, shared, &state);
        consume_steps(launch, shared, &state, &next);
        state.phase ^= QUERY_PARITY;
        finish_row(launch, shared, state);
    } while (next.num_heads != 0);
}

/* ---- Kernel -------------------------------------------------------------------------------- */

/* Initialises the barriers and the values that are known before the first item. A launch's
 * arguments are in no cache. So every warp loads one line of them here. The lines then arrive
 * together, and not one after the other where they are needed. */
template <typename Shape>
static __device__ __forceinline__ void
start(const fp8_launch &launch, fp8_memory<Shape> *shared)
{
    const int thread = (int)threadIdx.x;
    const int warp = thread / SMLA_WARP_LANES;
    static_assert(offsetof(fp8_launch, base.params.logits.softmax_scale) <=
                      CONSTANT_LINE * FP8_THREADS / SMLA_WARP_LANES,
                  "a line for each warp");
    const uint32_t argument = ((const uint32_t *)&launch)[CONSTANT_LINE / 4 * warp];
    if (thread == CONSUMER_THREADS) {
        for (int i = 0; i < Shape::GRANULES; i++) {
            typename Shape::Granule *const granule = &shared->ring[i];
            ptx_mbarrier_init(ptx_shared_address(&granule->full),
                              GATHER_WARPS * SMLA_WARP_LANES +
                                  (Shape::Row::IS_SPLIT ? GRANULE_KEYS : 0));
            ptx_mbarrier_init(ptx_shared_address(&granule->empty), CONSUMER_THREADS);
            granule->reference_jump = 0;
        }
        ptx_mbarrier_init(ptx_shared_address(&shared->query_full), GATHER_WARPS);
        ptx_mbarrier_init(ptx_shared_address(&shared->query_free), CONSUMER_THREADS);
        ptx_mbarrier_init(ptx_shared_address(&shared->counted), 1);
        ptx_mbarrier_init(ptx_shared_address(&shared->rescaled), GROUP_THREADS);
        ptx_mbarrier_init(ptx_shared_address(&shared->probs_ready_again), GROUP_THREADS);
        start_order(launch.base, &shared->order);
        for (int i = 0; i < 2; i++) {
            ptx_mbarrier_init(ptx_shared_address(&shared->probs_ready[i]), GROUP_THREADS);
            ptx_mbarrier_init(ptx_shared_address(&shared->values_added[i]), GROUP_THREADS);
        }
        ptx_fence_mbarrier_init();
    }
    if (thread == 0) {
        shared->item_idx = -1;   /* begin_item adds 1: the first item is number 0 */
        shared->key_unit = 1.0f; /* until store_query finds the first item's */
        shared->has_grown[0] = shared->has_grown[1] = 0;
    }
    if (thread < MAX_ITEMS / 32) {
        shared->fallback_bits[thread] = 0;
    }
    ((uint32_t *)shared->probs)[warp] = argument; /* nobody reads it, but it keeps the load alive */
    if constexpr (Shape::RANGED) {                /* the rest of the arguments is needed, too */
        constexpr int LINES = (int)sizeof(fp8_launch) / CONSTANT_LINE;
        const int line = min(warp + FP8_THREADS / SMLA_WARP_LANES, LINES - 1);
        ((uint32_t *)shared->probs)[warp + FP8_THREADS / SMLA_WARP_LANES] =
            ((const uint32_t *)&launch)[CONSTANT_LINE / 4 * line];
    }
    __syncthreads();
}

/* Ends all mbarriers except `planned`, because run_fallback reuses the memory of many of them. */
template <typename Shape>
static __device__ __forceinline__ void
end_barriers(fp8_memory<Shape> *shared)
{
    const int thread = ptx_forget((int)threadIdx.x);
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS); /* nobody waits at an mbarrier any more */
    if (thread < Shape::GRANULES) {
        ptx_mbarrier_end(ptx_shared_address(&shared->ring[thread].full));
        ptx_mbarrier_end(ptx_shared_address(&shared->ring[thread].empty));
    }
    if (thread == 0) {
        ptx_mbarrier_end(ptx_shared_address(&shared->query_full));
        ptx_mbarrier_end(ptx_shared_address(&shared->query_free));
        ptx_mbarrier_end(ptx_shared_address(&shared->counted));
        ptx_mbarrier_end(ptx_shared_address(&shared->rescaled));
        ptx_mbarrier_end(ptx_shared_address(&shared->probs_ready_again));
    }
    if (thread < 2) {
        ptx_mbarrier_end(ptx_shared_address(&shared->probs_ready[thread]));
        ptx_mbarrier_end(ptx_shared_address(&shared->values_added[thread]));
    }
}

/* What a thread of the kernel does. `by_token` is for the fallback: the launch itself, or in a
 * launch of tiles, one whose items have one token each. */
template <typename Shape>
static __device__ __forceinline__ void
attend_as_role(const fp8_launch &launch, const attention_launch &by_token,
               fp8_memory<Shape> *shared)
{
    start(launch, shared);
    if (threadIdx.x >= CONSUMER_THREADS) {
        ptx_release_registers<GATHER_REGISTERS>();
        if constexpr (Shape::RANGED) {
            gather_ranges(launch, shared);
        } else {
            gather(launch, shared);
        }
    } else {
        ptx_claim_registers<CONSUMER_REGISTERS>();
        consume(launch, shared);
        end_barriers(shared);
        typedef shared_memory<typename Shape::Portable> portable_memory;
        static_assert(sizeof(portable_memory) <= offsetof(fp8_memory<Shape>, fallback_bits),
                      "marks outlive the rest");
        if constexpr (Shape::TILED) {
            run_tile_fallback(launch, by_token, shared->fallback_bits, &shared->order,
                              (portable_memory *)shared);
        } else {
            run_fallback(launch, Shape::FALLBACK_TILES, shared->fallback_bits, &shared->order,
                         (portable_memory *)shared);
        }
        if (has_parts(launch.base, shared->order)) {
            fold_cut_items<!Shape::Row::HAS_SCALES, Shape::TILED>(launch.base, Shape::HEADS,
                                                                  BARRIER_CONSUMERS,
                                                                  &shared->order);
        }
    }
}

template <typename Shape>
__global__ void
__launch_bounds__(FP8_THREADS, 1) attend_fp8(const __grid_constant__ fp8_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    attend_as_role(launch, launch.base, (fp8_memory<Shape> *)memory);
}

/* ---- Launchers ----------------------------------------------------------------------------- */

#define LARGEST_HALF      65504.0f
#define SMALLEST_HEADROOM (-14.0f) /* the headroom of an item in which no key comes later */
/* An absent key adds 1 to the sum, which is subtracted again: the maximum's weight, 4 or more, must
 * not be smaller than that. */
#define LARGEST_HEADROOM (-2.0f)

/* The first step's maximum has weight 2^-headroom. Every other weight may be off by 2^-25 in f16;
 * all of them together may be off by 2^-10 of the sum at most. Light keys matter where heavy keys
 * have values of 0. So only the range that later keys may need is free above the maximum, and none
 * where no key comes later. */
template <typename Shape>
static float
find_headroom(const smla_attention_params *params, int64_t whole_tokens)
{
    const int64_t columns =
        smla_columns_of_split(params, whole_tokens > 0 ? 1 : params->results.num_splits);
    if (Shape::RANGED) { /* find_upper_headroom does the rest */
        return LARGEST_HEADROOM;
    }
    if (params->keys.num_lists == 1 && columns <= SMLA_SM90_KEYS) {
        return SMALLEST_HEADROOM;
    }
    float headroom = LARGEST_HEADROOM;
    while (headroom > -8.0f && (float)columns > ldexpf(1.0f, 15 - (int)headroom)) {
        headroom -= 1.0f;
    }
    return headroom;
}

/* Finds where the rows of a cache lie. Returns false where they span more than 64 GiB: offsets have
 * 32 bits, in units of 16 bytes. In a split page, the lag of scales behind rows has 32 bits. */
static bool
find_span(const smla_key_list *list, row_span *span)
{
    const smla_kv_view *const kv = &list->kv;
    const int64_t pages = kv->num_pages == 0 ? 0 : kv->num_pages - 1;
    const int64_t ends[2] = {pages * (kv->page_stride_bytes >> 4),
                             (kv->block_size - 1) * (kv->token_stride_bytes >> 4)};
    int64_t below = 0;
    int64_t above = 0;
    for (int i = 0; i < 2; i++) {
        below += ends[i] < 0 ? -ends[i] : 0;
        above += ends[i] > 0 ? ends[i] : 0;
    }
    span->lowest = kv->base - below * 16;
    span->bias = (uint32_t)below;
    const bool is_split = kv->format->layout == SMLA_PAGE_SPLIT;
    const bool is_even = !is_split && list->map.block_table == NULL &&
                         kv->page_stride_bytes == kv->block_size * kv->token_stride_bytes;
    span->pitch = is_even ? (uint32_t)(kv->token_stride_bytes >> 4) : 0;
    const int64_t lag = is_split ? kv->token_stride_bytes - kv->scale_token_stride_bytes : 0;
    return below + above < (int64_t)NO_ROW && lag >= 0 && lag * kv->block_size < (int64_t)NO_ROW;
}

/* Finds where the rows of all lists lie. Returns false where the kernel cannot read them. */
static bool
find_spans(const smla_attention_params *params, row_span spans[2])
{
    bool fits = are_lists_aligned(params);
    for (int i = 0; i < params->keys.num_lists; i++) {
        fits = fits && find_span(&params->keys.lists[i], &spans[i]);
    }
    return fits;
}

/* The number of CTAs for a number of items: more than one per SM where a CTA has too few fallback
 * bits. */
static int64_t
count_fp8_ctas(const attention_launch &launch, int64_t num_items, int64_t num_sms)
{
    const int64_t num_ctas = count_ctas(launch, num_items, num_sms);
    return smla_count_parts(num_items, num_ctas) > MAX_ITEMS
               ? smla_count_parts(num_items, MAX_ITEMS)
               : num_ctas;
}

/* Whether the RoPE parts of queries lie behind their NoPE parts. */
static bool
is_pair_dense(const smla_queries *queries)
{
    return queries->parts[SMLA_PE].data ==
               (const uint8_t *)queries->parts[SMLA_NOPE].data +
                   SMLA_KV_LORA_RANK * smla_float_bytes(queries->type) &&
           queries->parts[SMLA_PE].stride_head == queries->parts[SMLA_NOPE].stride_head &&
           queries->parts[SMLA_PE].stride_token == queries->parts[SMLA_NOPE].stride_token;
}

/* Changes what a launch says about the cache of a dense call: the table's entries are limited, not
 * indices, and whether rows are evenly spaced does not depend on the table. */
static inline void
describe_dense_cache(const smla_attention_params *params, fp8_launch *launch)
{
    const smla_kv_view *const kv = &params->keys.lists[0].kv;
    const bool is_even = kv->page_stride_bytes == kv->block_size * kv->token_stride_bytes;
    launch->base.lists[0].index_limit =
        (uint32_t)(smla_kv_num_slots(kv) / params->keys.entry_tokens);
    launch->lists[0].pitch = is_even ? (uint32_t)(kv->token_stride_bytes >> 4) : 0;
}

/* Fills in a launch, and returns its number of CTAs. */
template <typename Shape>
static int64_t
make_fp8_launch(const smla_attention_params *params, const smla_attention_start *start,
                const row_span spans[2], fp8_launch *launch)
{
    constexpr int HEADS = Shape::HEADS;
    launch->base = make_launch<HEADS>(params, start);
    launch->num_items = (int32_t)count_items(launch->base);
    for (int i = 0; i < params->keys.num_lists; i++) {
        launch->lists[i] = spans[i];
    }
    if constexpr (Shape::RANGED) {
        describe_dense_cache(params, launch);
    }
    launch->headroom = find_headroom<Shape>(params, start->whole_tokens);
    launch->max_weight = launch->headroom == SMALLEST_HEADROOM ? INFINITY : LARGEST_HALF;
    launch->out_is_aligned = is_out_aligned(params, 16);
    launch->fetches_query = launch->base.q_is_aligned && launch->out_is_aligned;
    launch->query_is_dense =
        params->queries.parts[SMLA_NOPE].stride_head == Shape::Row::INFO.head_dim &&
        (Shape::Row::ROPE_IS_VALUE || is_pair_dense(&params->queries));
    allow_cuts<HEADS>(params, start->cut_bytes, launch->num_items, &launch->base);
    const int64_t num_ctas = count_fp8_ctas(launch->base, launch->num_items, num_sms_of(params));
    launch->is_ordered = has_order(launch->base, launch->num_items, num_ctas);
    return num_ctas;
}

template <typename Shape>
static cudaError_t
launch_fp8(const smla_attention_params *params, const smla_attention_start *start,
           const row_span spans[2])
{
    constexpr int SHARED_BYTES = (int)sizeof(fp8_memory<Shape>);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    fp8_launch launch = {};
    const int64_t num_ctas = make_fp8_launch<Shape>(params, start, spans, &launch);
    return smla_launch_large<attend_fp8<Shape>>(launch, num_ctas, FP8_THREADS, SHARED_BYTES,
                                                params->call.stream, false, start->deferred);
}

/* Whether the kernel reads the query and writes out. Rows without scales are those of dense calls
 * alone, which the table of kernels sends elsewhere where rows are not aligned. So their kernel has
 * no code for such a query. */
template <int ROW>
static bool
serves_arrays(const smla_attention_params *params)
{
    return ring_row<ROW>::HAS_SCALES || (is_query_aligned(params) && is_out_aligned(params, 16));
}

/* Launches the kernel, or the portable one where this one cannot read the rows. Calls over tables
 * want no max_logits. */
template <int ROW, int HEADS, bool RANGED>
static cudaError_t
launch_rows(const smla_attention_params *params, const smla_attention_start *start)
{
    row_span spans[2];
    if (!serves_arrays<ROW>(params) || !find_spans(params, spans)) {
        return launch_portable<ROW, HEADS>(params, start);
    }
    if constexpr (!RANGED) {
        if (params->results.max_logits != NULL) {
            return launch_fp8<fp8_shape<ROW, HEADS, true>>(params, start, spans);
        }
    }
    return launch_fp8<fp8_shape<ROW, HEADS, false, RANGED>>(params, start, spans);
}
