/* attention_few_sm90.cu: dense MLA attention over bf16 rows for Hopper, where all tiles of a call
 * fit the device at once.
 *
 * Computes     as attention_dense_sm90.cu: row i of a request sees keys begin_i to end_i - 1, by
 *              causal order and window (visible.h); no chunks, no shares of ranks
 * Shapes       as attention_dense_sm90.cu
 * Shared mem   query   [9][64][128 B]     64 rows; 64 dimensions per tile, 128-byte swizzle
 *              keys    [2][9][64][128 B]  two blocks of 64 cache rows, in the same layout
 *              probs   [64][128 B]        weights of a block; until then, scores of group 0
 *              and maxima, sums, masks, mbarriers: 231,424 bytes of the 232,448 that an SM has
 * Roles        One CTA per tile and split, all splits in one wave. Split s of n takes blocks s,
 *              s + n and so on of its request, so no length is needed to know where its first rows
 *              lie.
 *              4 gather warps   16 rows of each block, by cp.async
 *              2 warpgroups     copy the query, then score, weigh and add each block together
 *                               (few_products.cuh)
 *              mbarriers        arrivals | waited for by
 *              full[block][h]   128 copies of a half, 4 masks | group h
 *              empty[block][h]  128 threads of group h | gather warps; [1]: group 0, too
 *              query_full       256 copies | consumers
 *              per block, 3 barriers of 256: scores, maxima, weights
 * Roofline     as attention_dense_sm90.cu. A block takes 1152 cycles of wgmma for scores, 1024 for
 *              values, and about 500 between them, so 42 per key, where HBM takes 65 for an SM if
 *              all SMs read. One block: latencies one after the other (README.md).
 * Numerics     as attention_dense_sm90.cu, and a reference moves when a key is heavier by 2^40.
 *              Partial rows are fp32. A row's bits depend on its query, keys, H, the number of
 *              splits and the device.
 * Source       ours; split-KV decoding (Flash-Decoding)
 */
#include "cuda/attention/sm90/dense_few/few_products.cuh"
#include "cuda/attention/table/few_tiles.h"

/* ---- Results ------------------------------------------------------------------------------- */

/* The number of a row's partial row. */
static __device__ __forceinline__ int64_t
find_partial_row(const few_launch &launch, const few_item &item, int row)
{
    const few_place place = find_few_place(launch, item, row);
    const int64_t part = find_few_token(item, place) * launch.num_splits.divisor;
    return (part + item.split) * launch.heads.divisor + place.head;
}

/* Ends a row, whose sum and out are multiples of 2^reference. Returns the factor of its out. */
template <typename Kind>
static __device__ __forceinline__ float
finish_few_row(const few_launch &launch, const few_item &item, int row, float row_max,
               float reference, float sum, bool writes)
{
    const float unit = ptx_exp2(reference - ceilf(reference)); /* partial rows count by 2^integer */
    if constexpr (Kind::IS_SPLIT) {
        if (writes) {
            float *const state = launch.partials.state + 2 * find_partial_row(launch, item, row);
            *(float2 *)state = make_float2(row_max, sum * unit);
        }
        return sum == 0.0f ? 0.0f : unit;
    } else {
        const few_place place = find_few_place(launch, item, row);
        const float sink = softmax_sink(launch.sinks, place.head);
        return unit * softmax_finish(launch.results, launch.sinks, find_few_token(item, place),
                                     place.head, row_max, sum * unit, sink, writes);
    }
}

/* Ends all rows, and finds the factors of the lane's two. Lanes of even columns end row `row` of
 * their warp, lanes of odd columns row + 8. */
template <typename Kind>
static __device__ __forceinline__ void
finish_few_rows(const few_launch &launch, const few_item &item, const thread_index &me,
                const bf16_consumer &state, few_memory *shared, float factors[2])
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const float sum =
            smla_sum_of_lanes<SMLA_QUAD_LANES>(state.sum[piece] - state.excess[piece]);
        if (me.column == 0) {
            shared->sums[me.group][16 * me.warp + 8 * piece + me.row] = sum;
        }
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    const bool is_odd = (me.column & 1) != 0;
    const int row = 16 * me.warp + 8 * is_odd + me.row;
    float factor = 0.0f;
    if (row < item.num_rows) {
        factor =
            finish_few_row<Kind>(launch, item, row, is_odd ? state.row_max[1] : state.row_max[0],
                                 is_odd ? state.reference[1] : state.reference[0],
                                 shared->sums[0][row] + shared->sums[1][row],
                                 me.group == 0 && me.column < 2);
    }
    factors[0] = __shfl_sync(0xFFFFFFFFu, factor, me.lane & 28);
    factors[1] = __shfl_sync(0xFFFFFFFFu, factor, me.lane & 28 | 1);
}

static __device__ __forceinline__ void
write_partial_rows(const few_launch &launch, const few_item &item, const thread_index &me,
                   const float factors[2], const bf16_consumer &state)
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const int row = 16 * me.warp + 8 * piece + me.row;
        const float factor = factors[piece];
        if (row >= item.num_rows || factor == 0.0f) {
            continue;
        }
        float *const to = launch.partials.out +
                          find_partial_row(launch, item, row) * SMLA_KV_LORA_RANK +
                          HALF_VALUES * me.group + 2 * me.column;
#pragma unroll
        for (int j = 0; j < HALF_VALUES / 8; j++) {
            *(float2 *)(to + 8 * j) = make_float2(state.out[4 * j + 2 * piece] * factor,
                                                  state.out[4 * j + 2 * piece + 1] * factor);
        }
    }
}

template <typename Kind>
static __device__ __forceinline__ void
write_few_rows(const few_launch &launch, const few_item &item, const thread_index &me,
               const float factors[2], const bf16_consumer &state)
{
    if constexpr (Kind::IS_SPLIT) {
        write_partial_rows(launch, item, me, factors, state);
    } else {
        const auto find_row = [&](int row) {
            const few_place place = find_few_place(launch, item, row);
            return smla_out16(&launch.results, find_few_token(item, place), place.head);
        };
        write_out_rows<true>(item.num_rows, find_row, me, factors, state);
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

/* From here on the CTA may access memory of other grids, and the combine kernel may come. */
static __device__ __forceinline__ void
wait_for_others(void)
{
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
}

/* Finds the CTA's item, and tells the combine kernel whose its tokens are. Returns false if the CTA
 * has no rows. All warps call it. */
template <typename Kind>
static __device__ __forceinline__ bool
begin_item(const few_launch &launch, few_item *item)
{
    wait_for_others();
    if constexpr (Kind::HAS_STARTS) {
        if (!search_item(launch, item)) {
            return false;
        }
        const bool is_none = item->req == (int32_t)launch.reqs.num_reqs;
        const bool stays = is_none && !launch.results.fills_padding;
        const int32_t first = find_few_place(launch, *item, 0).query;
        const int32_t last = find_few_place(launch, *item, item->num_rows - 1).query;
        if (Kind::IS_SPLIT && launch.req_ids != NULL && item->split == 0 &&
            (int32_t)threadIdx.x <= last - first) {
            launch.req_ids[item->token + first + threadIdx.x] = stays ? -1 : item->req;
        }
        return !stays;
    }
    return true;
}

template <typename Kind>
static __device__ __forceinline__ void
consume(const few_launch &launch, const few_item &item, few_memory *shared)
{
    const uint32_t base = ptx_shared_address(shared);
    const thread_index me = find_thread_index();
    const int32_t num_keys = load_num_keys(launch, item);
    copy_few_query<Kind>(launch, item, base);
    row_limits limits[2];
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const int row = min(16 * me.warp + 8 * piece + me.row, item.num_rows - 1);
        limits[piece] =
            find_few_limits(launch, item, find_few_place(launch, item, row).query, num_keys);
    }
    const few_blocks blocks =
        find_few_blocks<Kind>(launch, item, find_seen(launch, item, num_keys));
    bf16_consumer state;
    clear_sums(&state);
    ptx_mbarrier_wait(FEW_AT(base, query_full), 0);
#pragma unroll 1
    for (int i = 0; i < blocks.count; i++) {
        consume_block<Kind>(launch, i, blocks.first_key + i * blocks.stride, limits, me, shared,
                            &state);
    }
    float factors[2];
    finish_few_rows<Kind>(launch, item, me, state, shared, factors);
    write_few_rows<Kind>(launch, item, me, factors, state);
}

/* Initialises an mbarrier in each of the first threads. */
static __device__ __forceinline__ void
start_few(few_memory *shared)
{
    const int number = (int)threadIdx.x;
    if (number < FEW_MBARRIERS) {
        const int arrivals = number < 2 * FEW_BLOCKS   ? (int)FULL_ARRIVALS
                             : number < 4 * FEW_BLOCKS ? (int)GROUP_THREADS
                                                       : (int)CONSUMER_THREADS;
        ptx_mbarrier_init(ptx_shared_address(shared->full) + 8 * number, arrivals);
        ptx_fence_mbarrier_init();
    }
    __syncthreads();
}

template <typename Kind>
__global__ void
__launch_bounds__(FEW_THREADS, 1) attend_few(const __grid_constant__ few_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    few_memory *const shared = (few_memory *)memory;
    few_item item = find_few_item<Kind>(launch);
    start_few(shared);
    if (!begin_item<Kind>(launch, &item)) {
        return;
    }
    if (threadIdx.x < CONSUMER_THREADS) {
        ptx_claim_registers<FEW_CONSUMER_REGISTERS>();
        consume<Kind>(launch, item, shared);
    } else {
        ptx_release_registers<FEW_GATHER_REGISTERS>();
        gather_blocks<Kind>(launch, item, ptx_shared_address(shared));
    }
}

/* ---- Launchers ----------------------------------------------------------------------------- */

/* A window's number of keys, in 32 bits: no request has more keys than that. */
static int32_t
clamp_keys(int64_t keys)
{
    return keys < INT32_MAX - 1 ? (int32_t)keys : INT32_MAX - 1;
}

static few_launch
make_few_launch(const smla_attention_params *params)
{
    const smla_key_list &list = params->keys.lists[0];
    const smla_requests &reqs = params->visible.reqs;
    const smla_range_rule &rule = params->visible.rule;
    few_launch launch = {};
    launch.num_splits = smla_make_divisor(params->results.num_splits);
    launch.req_tiles =
        smla_make_divisor(smla_count_parts(reqs.query_len * params->queries.num_heads, TILE_HEADS));
    launch.reqs = reqs;
    launch.table = list.map.block_table;
    launch.table_stride_req = list.map.block_table_stride_req;
    launch.table_stride_entry = list.map.block_table_stride_block;
    launch.entry_tokens = smla_make_divisor(params->keys.entry_tokens);
    launch.num_columns = (int32_t)list.topk;
    launch.left = clamp_keys(rule.left);
    launch.right = clamp_keys(rule.right);
    launch.heads = smla_make_divisor(params->queries.num_heads);
    launch.query[SMLA_NOPE] = params->queries.parts[SMLA_NOPE];
    launch.query[SMLA_PE] = params->queries.parts[SMLA_PE];
    launch.rows = list.kv.base;
    launch.page_tokens = smla_make_divisor(list.kv.block_size);
    launch.num_slots = smla_kv_num_slots(&list.kv);
    launch.page_stride_bytes = list.kv.page_stride_bytes;
    launch.token_stride_bytes = list.kv.token_stride_bytes;
    launch.scale_log2 = (float)((float)params->logits.softmax_scale * 1.4426950408889634074);
    launch.results = params->results;
    launch.sinks = params->logits.sinks;
    if (smla_is_split(params)) {
        launch.partials = smla_partials_of(params, 0);
    }
    if (!params->results.fills_padding) {
        launch.req_ids = params->ranges.req_ids;
    }
    return launch;
}

template <typename Kind>
static cudaError_t
launch_kind(const smla_attention_params *params, const smla_attention_start *start)
{
    constexpr int SHARED_BYTES = (int)sizeof(few_memory);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    const few_launch launch = make_few_launch(params);
    const int64_t num_ctas =
        smla_count_few_tiles(params->queries.num_tokens, params->queries.num_heads,
                             launch.reqs.num_reqs, Kind::HAS_STARTS) *
        launch.num_splits.divisor;
    return smla_launch_large<attend_few<Kind>>(launch, num_ctas, FEW_THREADS, SHARED_BYTES,
                                               params->call.stream, false, start->deferred);
}

template <bool ROPE, bool IS_SPLIT>
static cudaError_t
launch_split(const smla_attention_params *params, const smla_attention_start *start)
{
    return params->visible.reqs.query_starts == NULL
               ? launch_kind<few_kind<ROPE, IS_SPLIT, false>>(params, start)
               : launch_kind<few_kind<ROPE, IS_SPLIT, true>>(params, start);
}

template <bool ROPE>
static cudaError_t
launch_few(const smla_attention_params *params, const smla_attention_start *start)
{
    return smla_is_split(params) ? launch_split<ROPE, true>(params, start)
                                 : launch_split<ROPE, false>(params, start);
}

LAUNCHER(smla_attend_sm90_few_64, launch_few<true>)
LAUNCHER(smla_attend_sm90_few_512_64, launch_few<false>)
