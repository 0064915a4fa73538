/* range_gather.cuh: the gather warps of attention_fp8_dense_sm90.cu. A token of a dense call sees a
 * range of its request's keys (visible.h), and a table has their pages or slots. So no index
 * is read, nothing is counted or moved together, and every warp knows by itself which keys a step
 * has.
 *
 * The keys of a step are 128 neighbours. As in fp8_gather.cuh, a warp brings four of every 16. An
 * item's first step begins at a multiple of four, so four rows that a warp brings are in one page,
 * where the number of tokens per page is a multiple of four. There one bulk copy may bring them.
 * Positions that the token does not see, and keys whose entry of the table names no page, are
 * absent: their rows are not read, but zeros.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/fp8_gather.cuh"

/* ---- Keys of an item ------------------------------------------------------------------------ */

/* smla_count_own in 32 bits, of less than 2^31 positions. */
static __device__ __forceinline__ uint32_t
count_own_keys(const smla_rank_share &share, uint32_t count)
{
    if (share.size == 0) {
        return count;
    }
    const uint64_t size = (uint64_t)(uint32_t)share.size * (uint32_t)share.interleave;
    const uint32_t period = (uint32_t)min(size, (uint64_t)UINT32_MAX);
    const uint32_t periods = count / period;
    const int64_t rest =
        (int64_t)(count - periods * period) - (int64_t)share.rank * share.interleave;
    return periods * (uint32_t)share.interleave +
           (uint32_t)min(max(rest, (int64_t)0), (int64_t)share.interleave);
}

/* smla_table_split_columns in 32 bits, because a gather warp has no registers for more. */
static __device__ __forceinline__ uint32_t
count_split_columns(const attention_launch &launch, int32_t token)
{
    const smla_visible &visible = launch.params.visible;
    const smla_index_map &map = launch.params.keys.lists[0].map;
    const int32_t req = map.req_id_per_token[token];
    uint32_t keys = 0;
    if (req >= 0 && req < map.num_reqs) {
        const int32_t length = visible.reqs.seq_lens[req * visible.reqs.seq_lens_stride];
        keys = count_own_keys(visible.rule.share, (uint32_t)max(length, 0));
    }
    const uint32_t share = smla_divide_uint32(keys + (uint32_t)launch.params.results.num_splits - 1,
                                              launch.num_splits);
    return max((share + SMLA_SPLIT_ALIGN - 1) / SMLA_SPLIT_ALIGN * SMLA_SPLIT_ALIGN,
               (uint32_t)visible.least_split_columns);
}

/* find_dense_columns in 32 bits. An item without heads has no keys. TILED: those of a tile. */
template <bool TILED>
static __device__ __forceinline__ column_range
find_range(const attention_launch &launch, const work_item &item)
{
    const smla_key_list &keys = launch.params.keys.lists[0];
    column_range range = {0, 0};
    if (item.num_heads == 0) {
        return range;
    }
    const int32_t token = first_token_of<TILED>(launch, item.token);
    uint32_t begin = (uint32_t)keys.begin[token];
    uint32_t end =
        min((uint32_t)keys.end[last_token_of<TILED>(launch, item.token)], (uint32_t)keys.topk);
    if (launch.params.results.num_splits > 1) {
        const uint32_t columns = count_split_columns(launch, token);
        begin = max(begin, (uint32_t)item.split * columns);
        end = min(end, (uint32_t)(item.split + item.num_segments) * columns);
    }
    if (begin < end) {
        range = column_range{(int32_t)begin, (int32_t)end};
    }
    return launch.num_segments > 1 ? take_segments(range, item) : range;
}

/* Where the first step of a range begins. */
static __device__ __forceinline__ uint32_t
find_first_position(const column_range &range)
{
    return (uint32_t)range.begin & ~(uint32_t)(NEIGHBOURS - 1);
}

/* The steps of a range: at least one, which has no keys if the range has none. */
static __device__ __forceinline__ int32_t
count_range_steps(const column_range &range)
{
    const uint32_t positions = (uint32_t)range.end - find_first_position(range);
    return max((int32_t)((positions + STEP_KEYS - 1) / STEP_KEYS), 1);
}

/* What a lane keeps about the keys of an item. */
typedef struct range_stream {
    const int32_t *entries; /* the row of the token's request in the table */
    uint32_t begin;
    uint32_t end;
    uint32_t position; /* where the lane's key of the next step is */
    uint32_t entry;    /* the table's entry for this position, loaded ahead; or NO_INDEX */
} range_stream;

/* Loads the entry for the lane's next position, if that is in the range. */
static __device__ __forceinline__ void
load_entry(const attention_launch &launch, range_stream *stream)
{
    const int64_t stride = launch.params.keys.lists[0].map.block_table_stride_block;
    const uint32_t column = smla_divide_uint32(stream->position, launch.entry_tokens);
    ptx_load_4_cached(stream->entries + column * stride,
                      stream->position >= stream->begin && stream->position < stream->end, NO_INDEX,
                      &stream->entry);
}

/* Opens a stream at the first step of an item. The lane's key is number lane % 4 of the warp's four
 * in granule lane / 4. */
template <bool TILED>
static __device__ __forceinline__ range_stream
open_range(const attention_launch &launch, const work_item &item, const column_range &range)
{
    const smla_index_map &map = launch.params.keys.lists[0].map;
    const int lane = find_gather_lane();
    range_stream stream;
    stream.begin = (uint32_t)range.begin;
    stream.end = (uint32_t)range.end;
    stream.position = find_first_position(range) + lane / GATHER_KEYS * GRANULE_KEYS +
                      find_gather_warp() * GATHER_KEYS + lane % GATHER_KEYS;
    stream.entries =
        map.block_table + map.req_id_per_token[first_token_of<TILED>(launch, item.token)] *
                              map.block_table_stride_req;
    load_entry(launch, &stream);
    return stream;
}

/* What find_key_offset returns, for the lane's key. Its table entry names a page or a slot. */
static __device__ __forceinline__ uint32_t
find_position_offset(const fp8_launch &launch, const range_stream &stream)
{
    const row_span &span = launch.lists[0];
    const smla_kv_view &kv = launch.base.params.keys.lists[0].kv;
    const smla_divisor &block_size = launch.base.lists[0].block_size;
    const uint32_t tokens = (uint32_t)launch.base.entry_tokens.divisor;
    const uint32_t in_entry =
        stream.position - smla_divide_uint32(stream.position, launch.base.entry_tokens) * tokens;
    const uint32_t slot = stream.entry * tokens + in_entry;
    if (stream.entry >= launch.base.lists[0].index_limit) {
        return NO_ROW;
    }
    if (span.pitch != 0) {
        return slot * span.pitch + span.bias;
    }
    const uint32_t page = smla_divide_uint32(slot, block_size);
    return page * (uint32_t)(kv.page_stride_bytes >> 4) +
           (slot - page * (uint32_t)block_size.divisor) * (uint32_t)(kv.token_stride_bytes >> 4) +
           span.bias;
}

/* ---- Rows ----------------------------------------------------------------------------------- */

/* Whether one copy brings a warp's four keys of a granule, if all four are there: they are
 * neighbours in memory, and as far apart as in the ring. */
template <typename Row>
static __device__ __forceinline__ bool
has_neighbours(const attention_launch &launch)
{
    static_assert(GATHER_KEYS == NEIGHBOURS, "one copy");
    return Row::PITCH == Row::COPY_BYTES &&
           (uint32_t)launch.entry_tokens.divisor % NEIGHBOURS == 0 &&
           launch.params.keys.lists[0].kv.token_stride_bytes == Row::COPY_BYTES;
}

/* copy_rows for four neighbours, with one copy. The first lane has the first row's offset. */
template <typename Shape>
static __device__ __forceinline__ void
copy_neighbours(const gather_state &state, const uint8_t *from, uint32_t offset)
{
    typedef typename Shape::Row Row;
    constexpr uint32_t BYTES = Row::COPY_BYTES * GATHER_KEYS;
    const uint32_t slot = __shfl_sync(0xFFFFFFFFu, state.slot, 0);
    const uint32_t granule =
        state.base + (uint32_t)offsetof(fp8_memory<Shape>, ring) + slot * Shape::GRANULE_BYTES;
    const uint32_t to = state.rows + slot * Shape::GRANULE_BYTES;
    const uint32_t full = granule + (uint32_t)offsetof(typename Shape::Granule, full);
    const uint32_t is_key_at = granule + (uint32_t)offsetof(typename Shape::Granule, is_key) +
                               (uint32_t)find_gather_warp();
    const uint8_t *const row = from + (uint64_t)__shfl_sync(0xFFFFFFFFu, offset, 0) * 16;
    const bool is_elected = ptx_elect();
    ptx_mbarrier_wait(granule + (uint32_t)offsetof(typename Shape::Granule, empty), state.parity);
    if (is_elected) {
        ptx_bulk_copy(to, row, BYTES, full);
        ptx_store_shared_1(is_key_at, 15);
        ptx_mbarrier_arrive_expect(full, BYTES);
    }
    ptx_mbarrier_arrive(full, !is_elected);
    __syncwarp();
}

/* Gathers a step of an item. The entries of the next step are loaded meanwhile. */
template <typename Shape>
static __device__ __forceinline__ void
gather_range_step(const fp8_launch &launch, uint32_t turn, range_stream *stream,
                  fp8_memory<Shape> *shared, gather_state *state)
{
    typedef typename Shape::Row Row;
    const smla_kv_view &kv = launch.base.params.keys.lists[0].kv;
    const listed_position only = {(int32_t)stream->position};
    key_offset key = {find_position_offset(launch, *stream), 0};
    uint32_t is_key = __ballot_sync(0xFFFFFFFFu, key.row != NO_ROW);
    stream->position += STEP_KEYS;
    load_entry(launch.base, stream);
    count_step(is_key, key.row != NO_ROW, only, turn, find_gather_warp, shared);
#pragma unroll 1
    for (int i = 0; i < STEP_GRANULES; i++) {
        if (has_neighbours<Row>(launch.base) && (is_key & 15) == 15) {
            copy_neighbours<Shape>(*state, launch.lists[0].lowest, key.row);
        } else {
            copy_rows<Shape>(kv, *state, launch.lists[0].lowest, key, is_key & 15);
        }
        is_key >>= GATHER_KEYS;
        key.row = __shfl_down_sync(0xFFFFFFFFu, key.row, GATHER_KEYS);
        pass_granule<Shape>(state);
    }
}

/* ---- All items ------------------------------------------------------------------------------ */

/* Gathers all items of the CTA. A launch's first step comes before the plan of cuts: it always
 * belongs to the CTA's own item. Steps are published when the consumers have freed the query of the
 * item before. */
template <typename Shape>
static __device__ __forceinline__ void
gather_ranges(const fp8_launch &launch, fp8_memory<Shape> *shared)
{
    gather_state state;
    start_gather(shared, &state);
    const uint32_t planned = state.base + (uint32_t)offsetof(fp8_memory<Shape>, order.planned);
    ptx_wait_for_grids();
    work_item item = find_numbered_item<true>(launch.base, (int)blockIdx.x, Shape::HEADS);
    column_range range = find_range<Shape::TILED>(launch.base, item);
    range_stream stream = open_range<Shape::TILED>(launch.base, item, range);
    if (launch.fetches_query) {
        fetch_query<Shape>(launch, item, state.base);
    }
    gather_range_step(launch, 0, &stream, shared, &state);
    wait_for_order(launch.base.num_segments > 1, planned);
    if (is_first_cut(launch.base, shared->order)) {
        item = find_ordered_item(launch.base, nth_item(true, 0, &shared->order, 0), Shape::HEADS);
        range = find_range<Shape::TILED>(launch.base, item);
        stream.end = (uint32_t)range.end;
        load_entry(launch.base, &stream);
    }
#pragma unroll 1
    for (int n = 0;; n++) {
        const uint32_t turn = (uint32_t)n & 1;
        const int32_t num_steps = count_range_steps(range);
        if (threadIdx.x == CONSUMER_THREADS) {
            if constexpr (Shape::TILED) {
                shared->limits.last_step[turn] =
                    (int32_t)find_first_position(range) + (num_steps - 1) * STEP_KEYS;
            }
            publish_steps(list_steps{num_steps, 0, 0}, turn, shared);
        }
#pragma unroll 1
        for (int32_t left = num_steps - (n == 0); left > 0; left--) {
            gather_range_step(launch, turn, &stream, shared, &state);
        }
        wait_for_order(launch.is_ordered, planned);
        const int idx = nth_item(launch.is_ordered, launch.num_items, &shared->order, n + 1);
        if (idx < 0) {
            break;
        }
        item = find_ordered_item(launch.base, idx, Shape::HEADS);
        range = find_range<Shape::TILED>(launch.base, item);
        stream = open_range<Shape::TILED>(launch.base, item, range);
        begin_next_item<Shape>(launch, item, turn, state.base, shared);
    }
}
