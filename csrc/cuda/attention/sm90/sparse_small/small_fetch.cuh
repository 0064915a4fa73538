/* small_fetch.cuh: how a CTA of attention_small_sm90.cu begins: rows come to shared memory, and the
 * query (small_query.cuh) meanwhile.
 */
#pragma once

#include "cuda/attention/sm90/sparse_small/small_query.cuh"

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Where the index of a lane's row is. A split's columns of the main list come first, then those of
 * the extra list. This needs no memory access, so it is known before the grids in front are
 * done. */
typedef struct list_entry {
    int list;
    int32_t column;
    const int32_t *index;
    bool is_on;
} list_entry;

static __device__ __forceinline__ int
count_granules(const attention_launch &launch)
{
    const int columns =
        launch.split_columns[0] + (launch.params.keys.num_lists == 2 ? launch.split_columns[1] : 0);
    return columns / GRANULE_KEYS;
}

/* The row of a granule that a lane fetches. Rows come roughly in the order of the requests. So each
 * warp asks for some of the first warpgroup's keys, then of the second's, and so on. Scores begin
 * when a quarter of the rows is there. */
typedef struct fetch_index {
    int granule;
    int key; /* number in the granule */
} fetch_index;

static __device__ __forceinline__ fetch_index
find_fetch(int warp, int lane)
{
    /* the first key that this warp fetches for each warpgroup */
    const int first = (warp - QUERY_WARPS) * FETCH_KEYS;
    fetch_index fetched;
    fetched.granule = lane / FETCH_KEYS * GROUP_GRANULES + first / GRANULE_KEYS;
    fetched.key = first % GRANULE_KEYS + lane % FETCH_KEYS;
    return fetched;
}

/* The entry of a key; `key` is the key's number among the split's. */
static __device__ __forceinline__ list_entry
find_key(const attention_launch &launch, const work_item &item, int key)
{
    const int num_main = launch.split_columns[0];
    list_entry entry;
    entry.list = key < num_main ? 0 : 1;
    const smla_key_list &keys = launch.params.keys.lists[entry.list];
    entry.column = item.split * launch.split_columns[entry.list] + key - entry.list * num_main;
    entry.index = keys.indices + item.token * keys.indices_stride_token + entry.column;
    entry.is_on = key < count_granules(launch) * GRANULE_KEYS && entry.column < keys.topk;
    return entry;
}

static __device__ __forceinline__ uint32_t
load_index(const list_entry &entry)
{
    uint32_t index;
    ptx_load_4(entry.index, entry.is_on, NO_ROW, &index);
    return index;
}

/* The row of a key and its scales, by its index. The row is NULL if there is no key. */
template <typename Shape>
static __device__ __forceinline__ smla_kv_token
find_key_row(const attention_launch &launch, const work_item &item, const list_entry &entry,
             uint32_t index)
{
    const smla_key_list &keys = launch.params.keys.lists[entry.list];
    int32_t length = INT32_MAX;
    if (keys.end != NULL) {
        length = read_length(keys, item.token);
    }
    return address_of_slot(launch, entry.list,
                           slot_of_index<Shape::CALLS_RARE>(launch, entry.list, item.token,
                                                            entry.column < length ? (int32_t)index
                                                                                  : -1));
}

/* Whether the RoPE parts of a granule's rows are copied apart, to small_memory::ropes. */
template <typename Shape>
static __device__ __forceinline__ bool
has_rope_copies(int granule)
{
    return Shape::HAS_SHORT_ROWS && granule < QUERY_WARPS;
}

/* Starts the copy of a part of row `number` of a granule. Of two partners one copies it, for
 * both. */
template <typename Shape>
static __device__ __forceinline__ void
copy_part(uint32_t to, const uint8_t *from, int bytes, int number, uint32_t arrived)
{
    if (Shape::PARTNERS == 1) {
        ptx_bulk_copy(to, from, bytes, arrived);
    } else if (number % 2 == (int)ptx_cluster_rank()) {
        ptx_bulk_copy_to_all(to, from, bytes, arrived, 3);
    }
}

/* Starts the copies of a warp's rows, one per lane. Of two partners, each asks for every other row,
 * for both. Each asks for all scales of split pages itself. Zeros are stored where there is no
 * row. */
template <typename Shape>
static __device__ __forceinline__ void
copy_rows(const smla_kv_token &key, int num_granules, int warp, int lane,
          small_memory<Shape> *shared)
{
    typedef typename Shape::Row Row;
    constexpr int VECTORS = Row::COPY_BYTES / 16;
    const fetch_index at = find_fetch(warp, lane);
    const int number = lane % FETCH_KEYS; /* the lane's number among its granule's lanes */
    const uint32_t rows =
        ptx_shared_address(shared->rows[at.granule]) + (at.key - number) * Row::PITCH;
    const uint32_t arrived = ptx_shared_address(&shared->arrived[at.granule]);
    const uint32_t is_key = __ballot_sync(0xFFFFFFFFu, key.row != NULL) >> (lane - number) & 0xFF;
    if (at.granule >= num_granules) {
        return;
    }
#pragma unroll 1
    for (uint32_t missing = ~is_key & 0xFF; missing != 0; missing &= missing - 1) {
        const uint32_t zeros = rows + (__ffs((int)missing) - 1) * Row::PITCH;
#pragma unroll 1
        for (int i = number; i < VECTORS; i += FETCH_KEYS) {
            ptx_clear_shared_16(zeros + 16 * i);
        }
    }
    if (number == 0) {
        ((uint8_t *)&shared->is_key[at.granule])[at.key / FETCH_KEYS] = (uint8_t)is_key;
        const int rope_bytes = has_rope_copies<Shape>(at.granule) ? (int)ROPE_BYTES : 0;
        ptx_mbarrier_arrive_expect(arrived, (Row::COPY_BYTES + rope_bytes) * __popc(is_key));
    }
    ptx_mbarrier_arrive(arrived, number != 0);
    if constexpr (Row::IS_SPLIT) {
        ptx_cp_async_8_or_zero(rows + number * Row::PITCH + Row::SCALE_OFFSET, key.scales,
                               key.row != NULL);
        ptx_mbarrier_arrive_after_copies(arrived);
    }
    if (key.row == NULL) {
        return;
    }
    if (has_rope_copies<Shape>(at.granule)) { /* first, because these keys are scored first */
        copy_part<Shape>(ptx_shared_address(&shared->ropes[at.granule][at.key]),
                         key.row + Row::ROPE_OFFSET, ROPE_BYTES, number, arrived);
        copy_part<Shape>(rows + number * Row::PITCH, key.row, Row::COPY_BYTES, number, arrived);
    } else {
        copy_part<Shape>(rows + number * Row::PITCH, key.row, Row::COPY_BYTES, number, arrived);
    }
}

/* Asks for the RoPE parts of the warp's keys, if nobody copies them to shared memory. A lane gets
 * dimensions from 16 column on of rows `row` and row + 8. Other warps ask for the rest of these
 * rows, so the keys are looked up twice. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_rope(const attention_launch &launch, const work_item &item, int warp,
           small_state<Shape> *state)
{
    const thread_index me = find_thread_index();
    list_entry entry[2];
    uint32_t index[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        entry[i] = find_key(launch, item, GRANULE_KEYS * warp + me.row + 8 * i);
        index[i] = load_index(entry[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint8_t *const row = find_key_row<Shape>(launch, item, entry[i], index[i]).row;
        const uint8_t *const from = row + Shape::Row::ROPE_OFFSET + 32 * me.column;
        ptx_load_16(from, row != NULL, &state->rope[i][0]);
        ptx_load_16(from + 16, row != NULL, &state->rope[i][4]);
    }
}

/* Loads the RoPE parts of the warp's keys, if they are in shared memory. Those of absent keys may
 * be anything, because the scores are masked. */
template <typename Shape>
static __device__ __forceinline__ void
load_rope(const small_memory<Shape> *shared, int warp, const thread_index &me,
          small_state<Shape> *state)
{
    if constexpr (Shape::HAS_SHORT_ROWS) {
        if (warp < QUERY_WARPS) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t from =
                    ptx_shared_address(&shared->ropes[warp][me.row + 8 * i][32 * me.column]);
                ptx_load_shared_16(from, &state->rope[i][0]);
                ptx_load_shared_16(from + 16, &state->rope[i][4]);
            }
        }
    }
}

/* Waits for the rows of the warp's granule. Returns masks of all bits or none. */
template <typename Shape>
static __device__ __forceinline__ key_masks
wait_for_granule(const small_memory<Shape> *shared, int warp, const thread_index &me)
{
    ptx_mbarrier_wait(ptx_shared_address(&shared->arrived[warp]), 0);
    const uint32_t is_key = *(const volatile uint16_t *)&shared->is_key[warp];
    return key_masks{0u - (is_key >> me.row & 1), 0u - (is_key >> (me.row + 8) & 1)};
}

/* ---- Both ---------------------------------------------------------------------------------- */

/* From here on the CTA may access memory of other grids, and the combine kernel may come. */
static __device__ __forceinline__ void
wait_for_others(void)
{
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
}

/* The query's warps ask for the query and store it. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_query(const attention_launch &launch, const work_item &item, int warp, int lane,
            small_memory<Shape> *shared, small_state<Shape> *state)
{
    const query_lane at = find_query_lane(warp, lane);
    const query_source entry = find_query(launch.params.queries, item, at);
    if (Shape::HEADS > 16) { /* a shorter query is there before the rows are */
        prefetch_query<Shape>(launch, item, entry, at);
    }
    wait_for_others();
    small_query<Shape> query = {};
    load_query<Shape, Shape::ALIGNED>(launch.params.queries, entry, at, item.num_heads, &query);
    __syncwarp();
    ptx_cluster_wait();
    store_query(shared, query, at, lane, state);
    ptx_mbarrier_wait(ptx_shared_address(&shared->stored), 0);
}

/* The other warps ask for rows, and wait for the query. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_keys(const attention_launch &launch, const work_item &item, int warp, int lane,
           int num_granules, small_memory<Shape> *shared, small_state<Shape> *state)
{
    const fetch_index fetch = find_fetch(warp, lane);
    const list_entry at = find_key(launch, item, fetch.granule * GRANULE_KEYS + fetch.key);
    ptx_prefetch_l2(at.index, at.is_on);
    wait_for_others();
    const smla_kv_token key = find_key_row<Shape>(launch, item, at, load_index(at));
    __syncwarp();
    ptx_cluster_wait();
    copy_rows(key, num_granules, warp, lane, shared);
    if constexpr (Shape::HAS_SHORT_ROWS) {
        fetch_rope(launch, item, warp, state);
    }
    ptx_mbarrier_wait(ptx_shared_address(&shared->stored), 0);
    find_query_exponent(shared, lane, state);
}

/* Half of the warps ask for rows, which takes as long as rows take to come. Meanwhile the others
 * ask for the query and store it. Afterwards the query is there, and rows are on their way. The two
 * halves ask for different parameters, so neither half waits for parameters of the other. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_row(const attention_launch &launch, const work_item &item, int num_granules,
          small_memory<Shape> *shared, small_state<Shape> *state)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    if (warp < QUERY_WARPS) {
        fetch_query(launch, item, warp, lane, shared, state);
    } else {
        fetch_keys(launch, item, warp, lane, num_granules, shared, state);
    }
}
