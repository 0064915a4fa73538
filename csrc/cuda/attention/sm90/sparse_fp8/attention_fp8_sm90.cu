/* attention_fp8_sm90.cu: sparse MLA attention over FP8 rows for Hopper, with wgmma.
 *
 * Computes     the same as attention_sm80.cu, transposed: S^T = K Q^T, P = 2^(scale S - ref),
 *              O^T = V^T P^T, with keys as operand A in registers and heads as dimension N
 * Shapes       as attention_sm80.cu, but caches of fp8_ds_mla only, or of fp8_v4 only
 * Shared mem   query   [9][HEADS][128 B]     f16 (RoPE: bf16) times powers of two; 64 dimensions a
 *                      tile, permuted (store_query_words), 128-byte swizzle; fp8_v4: 8 tiles
 *              probs   [2][64][HEADS] f16    a block's weights per warpgroup, swizzled (wgmma.cuh)
 *              ring    [GRANULES]            a granule: 16 rows of 656 bytes as in the cache, with
 *                      their scales as f16, is_key and mbarriers, 10,656 bytes together; fp8_v4:
 *                      592 bytes per row, of which 8 are its scales, 9,760 together
 *              sums, references, shifts, factors, counts of keys
 *              64 heads: 13 granules (fp8_v4: 15); the total is nearly all of the 232,448 bytes
 *              that an SM has
 * Roles        One CTA per SM. CTA i takes work items i, i + grid, ... (token, split, head tile),
 *              or after the first item those that level the loads (work_order.cuh). Where an SM
 *              would be idle, a CTA without items runs ahead through the code (count_ctas). Where
 *              lists differ in length and there are no more items than SMs, long items are cut,
 *              and CTAs with short items take the pieces (cut_work_items.cuh).
 *              4 gather warps   24 registers. Indices -> keys -> rows: each warp has a quarter of
 *                               the columns, leaves out the entries that are no keys
 *                               (key_stream.cuh), and takes outlier keys first where references
 *                               jump (outlier_keys.cuh). It brings 4 rows of every granule, one
 *                               bulk copy per row, and for fp8_v4 a copy of 8 bytes for its
 *                               scales. It runs ahead, and first brings a quarter of a new query.
 *              2 warpgroups     240 registers. They take blocks of 64 keys in turn. For each of its
 *                               blocks, a group finds the scores, adds values of the other group's
 *                               older block while its own scores become weights, and adds values
 *                               of its own block. It has all heads and 256 of the 512 values. Where
 *                               weights exceed f16, references move first (fp8_growth.cuh).
 *              mbarriers        arrivals | waiting threads
 *              full[granule]    128 gather threads and the bytes they announce (fp8_v4: and 16
 *                               threads' scales) | consumers
 *              empty[granule]   256 consumers, which have converted the values | gather warps
 *              probs_ready[group]   128 threads of the group: weights, scales | the other group
 *              rescaled         128 threads of the group whose weights exceed f16: the references
 *                               have moved | the other group
 *              probs_ready_again    the same threads, when the weights fit | the other group
 *              values_added[group]  128 threads of the other group | the group, before new weights
 *              query_free       256 consumers, after an item's last scores | gather warps
 *              query_full       a thread of each gather warp, and its bytes | consumers
 *              counted          one thread, when an item's number of steps is known | consumers,
 *                               and for a launch's first item gather warps, too
 *              planned          the consumer thread that has stored the order, or all 256 consumers
 *                               where items may be cut | gather warps
 *              Most threads arrive for themselves: it costs nothing, and racecheck can follow it.
 *              named barriers   CONSUMERS 256 threads, GROUP + g 128 threads, GATHER 128 threads;
 *                               barrier 0 in the fallback
 *              An item whose numbers do not fit (see Numerics) is marked for the fallback: the code
 *              of attention_sm80.cu computes it again at the end, because shared memory is free
 *              then.
 * Roofline     2 * H * 1088 FLOP and 656 bytes per key. 64 heads, per key and SM: 34 cycles of
 *              wgmma, 40 of HBM, 42 of shared memory. Measured on an H200, 64 heads, K 2048: 128
 *              tokens 72 us, 256 tokens 144 us (509 TFLOP/s), which is about 52 cycles per key of
 *              a CTA's second item, with its start and end. No unit is saturated: issue slots and
 *              latencies bind, with two warps per scheduler (README.md).
 * Numerics     e4m3 is exact in f16. A value times its scale / E is rounded to f16, where E is a
 *              power of two per item, found from the first step's scales (find_key_exponent). With
 *              16 heads, scores of fp8_ds_mla take codes alone: a scale multiplies their sum.
 *              Scales up to 146 E fit, 2^9 times the first ones where these are usual. Below 2^-5 E
 *              products lose bits and may be off by 2^-25 E, which is negligible, as E is at most
 *              2^3. The query has one power of two per item, so its f16 are exact in heads whose
 *              largest value is within 2^13 of the tile's. Weights are f16, relative to ref: the
 *              first step's maximum, rounded up, has weight 4, or more where few keys or none come
 *              later (find_row_headroom). Where the weights of a warp's 16 keys add up to 65,504 or
 *              more in a later step, ref moves by an integer to the maximum (rounded to f16), as in
 *              the first step, and earlier sums are scaled by a power of two, exactly. Sums are
 *              fp32, of unrounded weights. Masked rows are zeros, and their weights are subtracted
 *              from the sums.
 *              fp8_v4: scales are powers of two, so a value times scale / E is exact unless it is
 *              subnormal in f16. A RoPE part is also a value. Its bf16 are divided by E and kept as
 *              f16 (keep_rope); an item goes to the fallback where one is 2^16 E or more. Scores
 *              take the bf16. NaN in a key makes all results NaN, a score of +inf those of its
 *              head. A head whose q is not finite has NaN results and no influence on other heads.
 *              An item goes to the fallback, too, where scales are above 146 E, E above 2^3,
 *              scores 2^11 or more, heads smaller by 2^13 than the largest, or all scores of the
 *              first of several steps -inf. An item with one key gives that key's value
 *              (one_key.cuh). Partial rows are means of values relative to E, rounded to f16: off
 *              by 2^-11, if small by 2^-25 E. A query row's bits depend on its query, keys,
 *              num_splits, H and the device, not on T. Where the plan chooses num_splits, they
 *              also depend on the lengths of all lists, as items may be cut. Where references
 *              jump, they also depend on whether rows are evenly spaced (outlier_keys.cuh).
 * Source       Ours are: keys as A from registers, the granule ring, the order of the two
 *              warpgroups, references that move only where they must, between two blocks, and
 *              outlier keys first. Online softmax is FlashAttention's, warp roles are CUTLASS's.
 */
#include "cuda/attention/sm90/sparse_fp8/fp8_gather.cuh"
#include "cuda/attention/sm90/sparse_fp8/fp8_query.cuh"
#include "cuda/attention/sm90/sparse_fp8/fp8_scores.cuh"
#include "cuda/attention/sm90/sparse_fp8/fp8_values.cuh"

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
                leave_sinks(launch.base.params, find_thread_index_again(), shared);
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
        const work_item item = find_numbered_item(launch.base, (int)blockIdx.x, Shape::HEADS);
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
            plan_cuts(launch.base, launch.num_items, BARRIER_CONSUMERS, shared);
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
    begin_items(launch, shared);
    order_items(launch, BARRIER_CONSUMERS, shared);
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
    static_assert(offsetof(fp8_launch, base.params.kv_scale) <=
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

template <typename Shape>
__global__ void
__launch_bounds__(FP8_THREADS, 1) attend_fp8(const __grid_constant__ fp8_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    fp8_memory<Shape> *const shared = (fp8_memory<Shape> *)memory;
    start(launch, shared);
    if (threadIdx.x >= CONSUMER_THREADS) {
        ptx_release_registers<GATHER_REGISTERS>();
        gather(launch, shared);
    } else {
        ptx_claim_registers<CONSUMER_REGISTERS>();
        consume(launch, shared);
        end_barriers(shared);
        typedef shared_memory<typename Shape::Portable> portable_memory;
        static_assert(sizeof(portable_memory) <= offsetof(fp8_memory<Shape>, fallback_bits),
                      "marks outlive the rest");
        run_fallback(launch, Shape::FALLBACK_TILES, shared->fallback_bits, &shared->order,
                     (portable_memory *)shared);
        if (has_parts(launch.base, shared->order)) {
            fold_cut_items(launch.base, Shape::HEADS, BARRIER_CONSUMERS, &shared->order);
        }
    }
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
static float
find_headroom(const smla_attention_params *params)
{
    const int64_t columns = smla_columns_of_split(params);
    if (params->num_lists == 1 && columns <= SMLA_SM90_KEYS) {
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

/* The number of CTAs for a number of items: more than one per SM where a CTA has too few fallback
 * bits. */
static int64_t
count_fp8_ctas(const attention_launch &launch, int64_t num_items)
{
    const int64_t num_ctas = count_ctas(launch, num_items);
    return smla_count_parts(num_items, num_ctas) > MAX_ITEMS
               ? smla_count_parts(num_items, MAX_ITEMS)
               : num_ctas;
}

/* Whether the RoPE parts of queries lie behind their NoPE parts. */
static bool
is_pair_dense(const smla_attention_params *params)
{
    return params->q_pe == params->q_nope + SMLA_KV_LORA_RANK &&
           params->q_pe_stride_head == params->q_nope_stride_head &&
           params->q_pe_stride_token == params->q_nope_stride_token;
}

template <int ROW, int HEADS, bool MAXIMA>
static cudaError_t
launch_fp8(const smla_attention_params *params, const smla_attention_start *start,
           const row_span spans[2])
{
    typedef fp8_shape<ROW, HEADS, MAXIMA> Shape;
    constexpr int SHARED_BYTES = (int)sizeof(fp8_memory<Shape>);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    static uint64_t allowed;
    const cudaError_t code =
        prepare_attention((const void *)attend_fp8<Shape>, SHARED_BYTES, HEADS, params, &allowed);
    if (code != cudaSuccess) {
        return code;
    }
    fp8_launch launch = {};
    launch.base = make_launch<HEADS>(params);
    if (start->interleaves) {
        interleave_splits(&launch.base);
    }
    launch.num_items = (int32_t)count_items(launch.base);
    for (int i = 0; i < params->num_lists; i++) {
        launch.lists[i] = spans[i];
    }
    launch.headroom = find_headroom(params);
    launch.max_weight = launch.headroom == SMALLEST_HEADROOM ? INFINITY : LARGEST_HALF;
    launch.out_is_aligned =
        smla_are_rows_aligned(params->out, params->out_stride_token, params->out_stride_head, 16);
    launch.fetches_query = launch.base.q_is_aligned && launch.out_is_aligned;
    launch.query_is_dense = params->q_nope_stride_head == Shape::Row::INFO.head_dim &&
                            (Shape::Row::ROPE_IS_VALUE || is_pair_dense(params));
    allow_cuts<HEADS>(params, start->cut_bytes, launch.num_items, &launch.base);
    const int64_t num_ctas = count_fp8_ctas(launch.base, launch.num_items);
    launch.is_ordered = has_order(launch.base, launch.num_items, num_ctas);
    return smla_launch(attend_fp8<Shape>, launch, num_ctas, FP8_THREADS, SHARED_BYTES,
                       params->call.stream, false, start->deferred);
}

template <int ROW, int HEADS>
static cudaError_t
launch_tile(const smla_attention_params *params, const smla_attention_start *start)
{
    row_span spans[2];
    bool fits = are_lists_aligned(params);
    for (int i = 0; i < params->num_lists; i++) {
        fits = fits && find_span(&params->lists[i], &spans[i]);
    }
    if (!fits) {
        return launch_portable<ROW, HEADS>(params, start);
    }
    return params->max_logits == NULL ? launch_fp8<ROW, HEADS, false>(params, start, spans)
                                      : launch_fp8<ROW, HEADS, true>(params, start, spans);
}

cudaError_t
smla_attend_sm90_fp8_64(const smla_attention_params *params, const smla_attention_start *start)
{
    return launch_tile<SMLA_ROW_FP8_DS_MLA, 64>(params, start);
}

cudaError_t
smla_attend_sm90_fp8_32(const smla_attention_params *params, const smla_attention_start *start)
{
    return launch_tile<SMLA_ROW_FP8_DS_MLA, 32>(params, start);
}

cudaError_t
smla_attend_sm90_fp8_16(const smla_attention_params *params, const smla_attention_start *start)
{
    return launch_tile<SMLA_ROW_FP8_DS_MLA, 16>(params, start);
}

cudaError_t
smla_attend_sm90_v4_64(const smla_attention_params *params, const smla_attention_start *start)
{
    return launch_tile<SMLA_ROW_FP8_V4, 64>(params, start);
}

cudaError_t
smla_attend_sm90_v4_32(const smla_attention_params *params, const smla_attention_start *start)
{
    return launch_tile<SMLA_ROW_FP8_V4, 32>(params, start);
}

cudaError_t
smla_attend_sm90_v4_16(const smla_attention_params *params, const smla_attention_start *start)
{
    return launch_tile<SMLA_ROW_FP8_V4, 16>(params, start);
}
