/* fp8_gather.cuh: the gather warps of attention_fp8_sm90.cu. They turn indices into cache rows, and
 * copy these to granules of the ring, ahead of the consumers.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/outlier_keys.cuh"

/* ---- Gather -------------------------------------------------------------------------------- */

/* Where the key of an index lies in its cache. */
typedef struct key_offset {
    uint32_t row;  /* start of its row, in units of 16 bytes from the lowest row, or NO_ROW */
    uint32_t back; /* in split pages: by how many bytes scales lag behind rows (find_scales) */
} key_offset;

/* Finds the key of an index. The index is below index_limit, or NO_INDEX. Arithmetic is modulo
 * 2^32, because strides may be negative. */
template <typename Row>
static __device__ __forceinline__ key_offset
find_key_offset(const attention_launch &launch, const row_span &span, int list, int32_t token,
                int32_t index)
{
    if (!Row::IS_SPLIT && span.pitch != 0) { /* the usual case, in few instructions */
        return key_offset{index >= 0 ? (uint32_t)index * span.pitch + span.bias : NO_ROW, 0};
    }
    const smla_kv_view &kv = launch.params.keys.lists[list].kv;
    const smla_divisor &block_size = launch.lists[list].block_size;
    const int32_t slot = slot_of_index(launch, list, token, index);
    if (slot < 0) {
        return key_offset{NO_ROW, 0};
    }
    const uint32_t page = smla_divide_uint32((uint32_t)slot, block_size);
    const uint32_t offset = (uint32_t)slot - page * (uint32_t)block_size.divisor;
    return key_offset{page * (uint32_t)(kv.page_stride_bytes >> 4) +
                          offset * (uint32_t)(kv.token_stride_bytes >> 4) + span.bias,
                      Row::IS_SPLIT
                          ? offset * (uint32_t)(kv.token_stride_bytes - kv.scale_token_stride_bytes)
                          : 0};
}

/* Where the scales of a key in a split page begin. From token to token of a page, scales advance by
 * less than rows. */
static __device__ __forceinline__ const uint8_t *
find_scales(const smla_kv_view &kv, const uint8_t *lowest, const key_offset &key)
{
    return lowest + (uint64_t)key.row * 16 + (kv.scales - kv.base) - key.back;
}

/* What a gather warp keeps in registers. It is little, because a thread has 24 registers. */
typedef struct gather_state {
    uint32_t base;   /* address of shared memory */
    uint32_t rows;   /* address of the warp's rows in the ring's first granule */
    uint32_t slot;   /* number of the next granule in the ring */
    uint32_t parity; /* parity to wait for at the next granule's `empty` */
} gather_state;

static __device__ __forceinline__ int
find_gather_warp(void)
{
    return (int)(ptx_thread() / SMLA_WARP_LANES) - CONSUMER_WARPS;
}

static __device__ __forceinline__ int
find_gather_lane(void)
{
    return (int)(ptx_thread() % SMLA_WARP_LANES);
}

/* Writes zeros in place of absent rows. `to` is the address of the warp's four rows. */
template <typename Row>
static __device__ __forceinline__ void
clear_rows(uint32_t to, uint32_t is_key)
{
    constexpr int REST =
        Row::COPY_BYTES / 16 - SMLA_WARP_LANES; /* lanes that clear 16 more bytes */
    const int lane = find_gather_lane();
#pragma unroll
    for (int i = 0; i < GATHER_KEYS; i++) {
        if (!(is_key >> i & 1)) {
            const uint32_t at = to + i * Row::PITCH + lane * 16;
            ptx_clear_shared_16(at);
            if (lane < REST) {
                ptx_clear_shared_16(at + SMLA_WARP_LANES * 16);
            }
        }
    }
    ptx_fence_async_shared(); /* orders later bulk copies to the same rows behind the zeros */
    __syncwarp();
}

/* Copies the scales of the warp's four keys of a granule, which lie in split pages, behind their
 * rows. Each of the first four lanes copies the scales of its own key. `to` is the address of the
 * warp's four rows. */
template <typename Row>
static __device__ __forceinline__ void
copy_scales(const smla_kv_view &kv, const uint8_t *from, const key_offset &key, uint32_t to,
            uint32_t full)
{
    const int lane = find_gather_lane();
    if (lane < GATHER_KEYS) {
        static_assert(Row::SCALE_BYTES == 8, "one copy");
        ptx_cp_async_8_or_zero(to + lane * Row::PITCH + Row::SCALE_OFFSET,
                               find_scales(kv, from, key), key.row != NO_ROW);
        ptx_mbarrier_arrive_after_copies(full);
    }
}

/* Copies the warp's four rows of a granule, once its previous rows are not needed any more. The
 * first four lanes have the offsets of the new rows; `from` is the lowest row. All addresses are
 * uniform and computed before the wait, because any instruction after it delays the ring. */
template <typename Shape>
static __device__ __forceinline__ void
copy_rows(const smla_kv_view &kv, const gather_state &state, const uint8_t *from,
          const key_offset &key, uint32_t is_key)
{
    typedef fp8_memory<Shape> memory;
    typedef typename Shape::Row Row;
    /* All lanes have the same slot; the shuffle tells the compiler so. */
    const uint32_t slot = __shfl_sync(0xFFFFFFFFu, state.slot, 0);
    const uint32_t granule =
        state.base + (uint32_t)offsetof(memory, ring) + slot * Shape::GRANULE_BYTES;
    const uint32_t to = state.rows + slot * Shape::GRANULE_BYTES;
    const uint32_t full = granule + (uint32_t)offsetof(typename Shape::Granule, full);
    const uint32_t empty = granule + (uint32_t)offsetof(typename Shape::Granule, empty);
    uint32_t offsets[GATHER_KEYS];
#pragma unroll
    for (int i = 0; i < GATHER_KEYS; i++) {
        offsets[i] = __shfl_sync(0xFFFFFFFFu, key.row, i);
    }
    const uint32_t is_key_at = granule + (uint32_t)offsetof(typename Shape::Granule, is_key) +
                               (uint32_t)find_gather_warp();
    const uint8_t *rows[GATHER_KEYS];
#pragma unroll
    for (int i = 0; i < GATHER_KEYS; i++) {
        rows[i] = from + (uint64_t)offsets[i] * 16;
    }
    const bool is_elected = ptx_elect();
    /* each branch has its own wait, as late as possible */
    if (is_key == 15) {
        ptx_mbarrier_wait(empty, state.parity);
        if (is_elected) {
#pragma unroll
            for (int i = 0; i < GATHER_KEYS; i++) {
                ptx_bulk_copy(to + i * Row::PITCH, rows[i], Row::COPY_BYTES, full);
            }
            ptx_store_shared_1(is_key_at, 15);
            ptx_mbarrier_arrive_expect(full, Row::COPY_BYTES * GATHER_KEYS);
        }
    } else {
        ptx_mbarrier_wait(empty, state.parity);
        clear_rows<Row>(to, is_key);
        if (is_elected) {
            ptx_store_shared_1(is_key_at, is_key);
            ptx_mbarrier_arrive_expect(full, Row::COPY_BYTES * __popc(is_key));
#pragma unroll
            for (int i = 0; i < GATHER_KEYS; i++) {
                if (is_key >> i & 1) {
                    ptx_bulk_copy(to + i * Row::PITCH, rows[i], Row::COPY_BYTES, full);
                }
            }
        }
    }
    if constexpr (Row::IS_SPLIT) {
        copy_scales<Row>(kv, from, key, to, full);
    }
    ptx_mbarrier_arrive(full, !is_elected);
    __syncwarp();
}

/* All gather warps count the keys of an item. For a launch's first item, consumers do it. */
template <typename Shape>
static __device__ __forceinline__ void
count_keys_of(const fp8_launch &launch, const work_item &item, uint32_t turn,
              fp8_memory<Shape> *shared)
{
    const key_stream stream =
        open_stream(launch.base, item, 0, find_gather_warp(), find_gather_lane(), 0);
    /* ptx_forget with 64 heads, because ptxas otherwise keeps multiples of it in registers */
    const int32_t stride =
        Shape::OUTLIERS_FIRST ? ptx_forget(launch.base.column_stride) : launch.base.column_stride;
    count_item_keys<Shape::COUNT_LOADS, false>(launch.base, item, stream, stride,
                                               find_gather_warp(), find_gather_lane(),
                                               BARRIER_GATHER, GROUP_THREADS,
                                               &shared->num_keys[turn]);
}

/* Counts the keys of the CTA's parts of items: of its first item, if that is cut, and of the piece
 * after it. */
template <typename Shape>
static __device__ __forceinline__ void
count_parts_of(const fp8_launch &launch, fp8_memory<Shape> *shared)
{
#pragma unroll 1
    for (uint32_t n = is_first_cut(launch.base, shared->order) ? 0 : 1; n < 2; n++) {
        const int part = nth_item(true, 0, &shared->order, (int)n);
        if (part >= 0) {
            count_keys_of(launch, find_ordered_item(launch.base, part, Shape::HEADS), n, shared);
        }
        if (n == 0 && threadIdx.x == CONSUMER_THREADS) {
            publish_steps(find_steps(launch.base, &shared->num_keys[0]), 0, shared);
        }
    }
}

/* Moves to the ring's next granule. */
template <typename Shape>
static __device__ __forceinline__ void
pass_granule(gather_state *state)
{
    state->slot++;
    if (state->slot == Shape::GRANULES) {
        state->slot = 0;
        state->parity ^= 1;
    }
}

/* Gathers a step of an item. Lane l has the index of the warp's key l % 4 in granule l / 4. */
template <typename Shape>
static __device__ __forceinline__ void
gather_step(const fp8_launch &launch, const work_item &item, int list, uint32_t index,
            uint32_t turn, fp8_memory<Shape> *shared, gather_state *state)
{
    typedef typename Shape::Row Row;
    key_offset key =
        find_key_offset<Row>(launch.base, launch.lists[list], list, item.token, (int32_t)index);
    uint32_t is_key = __ballot_sync(0xFFFFFFFFu, key.row != NO_ROW);
    count_step(is_key, key.row != NO_ROW, listed_index{(int32_t)index, list}, turn,
               find_gather_warp, shared);
#pragma unroll 1
    for (int i = 0; i < STEP_GRANULES; i++) {
        copy_rows<Shape>(launch.base.params.keys.lists[list].kv, *state, launch.lists[list].lowest,
                         key, is_key & 15);
        /* the next granule's keys move to the first lanes, so that numbers of lanes stay
         * constants */
        is_key >>= GATHER_KEYS;
        key.row = __shfl_down_sync(0xFFFFFFFFu, key.row, GATHER_KEYS);
        if constexpr (Row::IS_SPLIT) {
            key.back = __shfl_down_sync(0xFFFFFFFFu, key.back, GATHER_KEYS);
        }
        pass_granule<Shape>(state);
    }
}

/* Takes outlier keys first if a reference has jumped, after step `step` of the main list of the
 * CTA's item n, as long as the list has enough steps left. The scales come to the warp's rows in
 * the next granule, when that is free. In step 0 num_steps may not be known yet. */
template <typename Shape>
static __device__ __forceinline__ void
look_for_outlier_keys(const fp8_launch &launch, int n, int32_t step, int32_t end,
                      const fp8_memory<Shape> *shared, const gather_state &state,
                      key_stream *stream, outlier_keys *outliers)
{
    static_assert(LOOKAHEAD * 128 <= GATHER_KEYS * Shape::Row::PITCH, "a granule has the room");
    const uint32_t ring = (uint32_t)offsetof(fp8_memory<Shape>, ring);
    const uint32_t offset = state.slot * Shape::GRANULE_BYTES;
    if (step > 0 && step <= end - MIN_STEPS && outliers->chunk >= LOOKAHEAD &&
        launch.lists[0].pitch != 0 &&
        has_reference_jumped<Shape>(state.base + ring, state.slot,
                                    mark_of_step(n, shared->num_steps[ptx_forget(n) & 1] + 1 -
                                                        step))) {
        /* ptx_forget, because ptxas otherwise keeps this sum in a register all the time */
        ptx_mbarrier_wait((uint32_t)ptx_forget((int)state.base) + ring + offset +
                              (uint32_t)offsetof(typename Shape::Granule, empty),
                          state.parity);
        take_outlier_keys<Shape>(launch, state.rows + offset, find_gather_lane(), stream, outliers);
        ptx_fence_async_shared(); /* orders later bulk copies to these rows behind this */
        __syncwarp();
    }
}

/* Gathers steps [begin, end) of one list of the CTA's item n, after its keys are counted. */
template <typename Shape>
static __device__ __forceinline__ void
gather_list(const fp8_launch &launch, const work_item &item, int n, int list, int32_t begin,
            int32_t end, fp8_memory<Shape> *shared, gather_state *state)
{
    if (begin == end) {
        return;
    }
    const uint32_t turn = (uint32_t)n & 1;
    key_stream stream = open_stream(launch.base, item, list, find_gather_warp(), find_gather_lane(),
                                    find_count(&shared->num_keys[turn], list, find_gather_warp()));
    load_next(&stream);
    outlier_keys outliers = {0, LOOKAHEAD};
#pragma unroll 1
    for (int32_t step = 0; step < end; step++) {
        const uint32_t index =
            Shape::OUTLIERS_FIRST
                ? take_other_step(launch.base, list, &stream, &outliers, find_gather_lane())
                : take_step(launch.base, list, &stream, find_gather_lane());
        if (step >= begin) {
            gather_step(launch, item, list, index, turn, shared, state);
            if constexpr (Shape::OUTLIERS_FIRST) {
                if (list == 0) {
                    look_for_outlier_keys(launch, n, step, end, shared, *state, &stream, &outliers);
                }
            }
        }
    }
}

/* A row of a query's part. Value: the query's type, as bits. */
template <typename Value>
static __device__ __forceinline__ const Value *
find_query_row(const smla_head_rows &part, int32_t token, int32_t head)
{
    if constexpr (sizeof(Value) == 1) {
        return smla_row8(&part, token, head);
    } else {
        return smla_row16(&part, token, head);
    }
}

/* fetch_query for a query of this type. */
template <typename Value, typename Shape>
static __device__ __forceinline__ void
fetch_values(const fp8_launch &launch, const work_item &item, uint32_t base)
{
    typedef fp8_memory<Shape> memory;
    constexpr int WARP_HEADS = Shape::HEADS / GATHER_WARPS;
    constexpr int HEAD_BYTES = Shape::Row::INFO.head_dim * (int)sizeof(Value);
    constexpr int NOPE_BYTES = SMLA_KV_LORA_RANK * (int)sizeof(Value);
    const smla_queries &queries = launch.base.params.queries;
    const int first = __shfl_sync(0xFFFFFFFFu, find_gather_warp() * WARP_HEADS, 0);
    const int num_heads = max(min(item.num_heads - first, WARP_HEADS), 0);
    const uint32_t full = base + (uint32_t)offsetof(memory, query_full);
    const uint32_t to = base + (uint32_t)offsetof(memory, query) + first * HEAD_BYTES;
    const Value *nope =
        find_query_row<Value>(queries.parts[SMLA_NOPE], item.token, item.first_head + first);
    const Value *rope =
        find_query_row<Value>(queries.parts[SMLA_PE], item.token, item.first_head + first);
    if (ptx_elect()) {
        ptx_mbarrier_arrive_expect(full, num_heads * HEAD_BYTES);
        if (launch.query_is_dense && num_heads > 0) {
            ptx_bulk_copy(to, nope, num_heads * HEAD_BYTES, full);
        } else {
#pragma unroll 1
            for (int i = 0; i < num_heads; i++) {
                ptx_bulk_copy(to + i * HEAD_BYTES, nope, NOPE_BYTES, full);
                if constexpr (HEAD_BYTES > NOPE_BYTES) {
                    ptx_bulk_copy(to + i * HEAD_BYTES + NOPE_BYTES, rope, HEAD_BYTES - NOPE_BYTES,
                                  full);
                }
                nope += queries.parts[SMLA_NOPE].stride_head;
                rope += queries.parts[SMLA_PE].stride_head;
            }
        }
    }
    __syncwarp();
}

/* Copies the warp's heads of an item's query, as they lie in memory, over the previous query, which
 * nobody multiplies any more. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_query(const fp8_launch &launch, const work_item &item, uint32_t base)
{
    if constexpr (!Shape::Row::HAS_SCALES) {
        if (is_query_coded(launch)) {
            fetch_values<uint8_t, Shape>(launch, item, base);
            return;
        }
    }
    fetch_values<uint16_t, Shape>(launch, item, base);
}

/* Begins an item that is not the launch's first, when consumers have freed the query of the item
 * before, whose turn is `turn`. */
template <typename Shape>
static __device__ __forceinline__ void
begin_next_item(const fp8_launch &launch, const work_item &item, uint32_t turn, uint32_t base,
                fp8_memory<Shape> *shared)
{
    ptx_mbarrier_wait(base + (uint32_t)offsetof(fp8_memory<Shape>, query_free), turn);
    if (ptx_elect()) { /* consumers are done with the item before, which used this element */
        shared->num_absent[turn ^ 1][find_gather_warp()] = 0;
    }
    if (launch.fetches_query) {
        fetch_query<Shape>(launch, item, base);
    }
}

/* Begins a launch's first item, as far as the warp's first 32 columns allow. Fetches the query, and
 * gathers the first step if these columns hold all its keys: either all 32 are keys, or the warp
 * has no other keys. Returns whether it gathered the step. The code is straight, in the order of
 * its waits, because neither code nor data are in any cache yet. Consumers count the keys
 * meanwhile. */
template <typename Shape>
static __device__ __forceinline__ bool
begin_launch(const fp8_launch &launch, const work_item &item, fp8_memory<Shape> *shared,
             gather_state *state)
{
    uint32_t index = load_first(launch.base, item, 0, find_gather_warp(), find_gather_lane());
    if (launch.fetches_query) {
        fetch_query<Shape>(launch, item, state->base);
    }
    const uint32_t is_key = __ballot_sync(0xFFFFFFFFu, index < launch.base.lists[0].index_limit);
    bool has_step = is_key == 0xFFFFFFFFu;
    if (!has_step) {
        wait_for_order(launch.base.num_segments > 1,
                       state->base + (uint32_t)offsetof(fp8_memory<Shape>, order.planned));
        if (is_first_cut(launch.base, shared->order)) {
            return false;
        }
        ptx_mbarrier_wait(state->base + (uint32_t)offsetof(fp8_memory<Shape>, counted), 0);
        has_step =
            find_count(&shared->num_keys[0], 0, find_gather_warp()) == (int32_t)__popc(is_key);
        const int lane = find_gather_lane();
        const uint32_t shuffled = __shfl_sync(0xFFFFFFFFu, index, find_nth_bit(is_key, lane));
        index = lane < __popc(is_key) ? shuffled : NO_INDEX;
    }
    /* with two lists, the first step is the main list's for sure if its first entries are all
     * keys */
    has_step &= launch.base.params.keys.num_lists == 1 ||
                (Shape::Row::ROPE_IS_VALUE && is_key == 0xFFFFFFFFu);
    if (has_step) {
        gather_step(launch, item, 0, index, 0, shared, state);
    }
    return has_step;
}

/* What a gather warp begins with. */
template <typename Shape>
static __device__ __forceinline__ void
start_gather(fp8_memory<Shape> *shared, gather_state *state)
{
    /* the shuffles keep ptxas from computing the address again and again */
    state->base = __shfl_sync(0xFFFFFFFFu, ptx_shared_address(shared), 0);
    state->rows =
        state->base + (uint32_t)offsetof(fp8_memory<Shape>, ring) +
        __shfl_sync(0xFFFFFFFFu, find_gather_warp(), 0) * (GATHER_KEYS * Shape::Row::PITCH);
    state->slot = 0;
    state->parity = 1;
    shared->num_absent[0][find_gather_warp()] = 0;
}

/* Gathers all items of the CTA. With 64 heads, the keys of an item are counted after the first step
 * of the previous item, because the consumers store a query then. With fewer heads they are counted
 * after its last step, because memory binds there. After a launch's first item they are counted
 * after its last step, too, because the order may not be known earlier. Keys of cut items are
 * counted before the loop. */
template <typename Shape>
static __device__ __forceinline__ void
gather(const fp8_launch &launch, fp8_memory<Shape> *shared)
{
    enum { FIRST_STEP, MAIN_LIST, EXTRA_LIST, NUM_PARTS };
    gather_state state;
    start_gather(shared, &state);
    ptx_wait_for_grids();
    work_item item = find_numbered_item<true>(launch.base, (int)blockIdx.x, Shape::HEADS);
    bool has_begun = begin_launch<Shape>(launch, item, shared, &state);
    wait_for_order(launch.base.num_segments > 1,
                   state.base + (uint32_t)offsetof(fp8_memory<Shape>, order.planned));
    if (__builtin_expect(has_parts(launch.base, shared->order), false)) {
        count_parts_of(launch, shared);
        item = find_ordered_item(launch.base, nth_item(true, 0, &shared->order, 0), Shape::HEADS);
    }
    ptx_mbarrier_wait(state.base + (uint32_t)offsetof(fp8_memory<Shape>, counted), 0);
#pragma unroll 1
    for (int n = 0;; n++) {
        const uint32_t turn = (uint32_t)n & 1;
        const list_steps steps = find_steps(launch.base, &shared->num_keys[turn]);
        if (n > 0 && threadIdx.x == CONSUMER_THREADS) {
            publish_steps(steps, turn, shared);
        }
        const int32_t first = min(steps.main, 1);
#pragma unroll 1
        for (int part = has_begun ? MAIN_LIST : FIRST_STEP; part < NUM_PARTS; part++) {
            gather_list<Shape>(launch, item, n, part == EXTRA_LIST ? 1 : 0,
                               part == MAIN_LIST ? first : 0,
                               part == FIRST_STEP  ? first
                               : part == MAIN_LIST ? steps.main
                                                   : steps.extra,
                               shared, &state);
            /* ptx_forget, because values found from n otherwise stay in registers during the
             * parts */
            const int now = ptx_forget(n);
            if (part == (Shape::HEADS == 64 && now > 0 ? FIRST_STEP : EXTRA_LIST) &&
                launch.base.num_segments == 1) {
                wait_for_order(launch.is_ordered,
                               state.base + (uint32_t)offsetof(fp8_memory<Shape>, order.planned));
                const int ahead =
                    nth_item(launch.is_ordered, launch.num_items, &shared->order, now + 1);
                if (ahead >= 0) {
                    count_keys_of(launch,
                                  find_numbered_item<true>(launch.base, ahead, Shape::HEADS),
                                  turn ^ 1, shared);
                }
            }
        }
        const int idx = nth_item(launch.is_ordered, launch.num_items, &shared->order, n + 1);
        if (idx < 0) {
            break;
        }
        item = find_ordered_item(launch.base, idx, Shape::HEADS);
        has_begun = false;
        begin_next_item<Shape>(launch, item, turn, state.base, shared);
    }
}
