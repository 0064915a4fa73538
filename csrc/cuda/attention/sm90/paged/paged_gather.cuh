/* paged_gather.cuh: the gather warps of paged_attention_sm90.cu. Ahead of the consumers, they plan
 * the CTA's items, and bring queries and, key by key, rows of pages to shared memory.
 *
 * Each lane finds the place of a key of its warp. A thread then copies 16 bytes of a segment at a
 * time: lane l copies chunk l % 8 of row l / 8 of a wave, so that eight lanes copy a row's 128
 * bytes, from the address that the row's lane has found. */
#pragma once

#include "cuda/attention/sm90/paged/paged_items.cuh"
#include "cuda/attention/tiles/claims.cuh"

enum { WAVE_ROWS = SMLA_WARP_LANES / SEGMENT_CHUNKS }; /* rows per copy instruction of a warp */

/* What a gather thread keeps over items. */
struct paged_gather {
    uint32_t num_items;
    uint32_t num_buffers; /* filled so far */
    uint32_t query_turns; /* bit of a group: parity of the queries that it has got */
};

__device__ __forceinline__ int
gather_warp(void)
{
    return (int)threadIdx.x / SMLA_WARP_LANES;
}

/* The offset in a segment of the thread's chunk of its row in a wave. Waves begin at the row
 * `first_row`, a multiple of 8. */
__device__ __forceinline__ uint32_t
find_chunk(int first_row, int wave)
{
    const int row = lane_idx() / SEGMENT_CHUNKS + wave * WAVE_ROWS;
    return (uint32_t)((first_row + row) * SEGMENT_BYTES +
                      ((lane_idx() % SEGMENT_CHUNKS) ^ row % 8) * 16);
}

/* ---- Items ---------------------------------------------------------------------------------- */

/* Tells consumers of an item. All gather threads call it, and each finds a row's limits. Those of a
 * row that is not there hide nothing. */
template <int D>
__device__ __forceinline__ void
publish_item(const paged_args &args, const planned_item &planned, const paged_slots &slots,
             uint32_t number, paged_memory<D> *shared)
{
    const uint32_t slot = slots.slot_of(number);
    const int row = (int)threadIdx.x;
    paged_limits limits = {0, INT32_MAX};
    if (row < planned.item.num_rows) {
        limits = find_limits(args, planned.request,
                             find_row(args, 0, planned.item.first_row + row).query);
    }
    ptx_mbarrier_wait(at(shared->item_empty[slot]), slots.turn_of(number) ^ 1);
    if (slots.count < ITEM_SLOTS || row < GROUP_ROWS) {
        shared->limits[slots.first_limit(number) + row] = limits;
    }
    if (threadIdx.x == 0) {
        shared->items[slot] = planned.item;
    }
    ptx_mbarrier_arrive(at(shared->item_full[slot]), true);
}

/* ---- Queries -------------------------------------------------------------------------------- */

/* Brings a group's rows of a tile, of which `first` is the first one. Zeros fill up rows that a
 * consumer thread takes together; behind these, what was there remains. */
template <int D>
__device__ __forceinline__ void
bring_queries(const paged_args &args, const paged_item &item, int group, int first,
              paged_gather *state, paged_memory<D> *shared)
{
    const smla_head_rows &q = args.p.queries.parts[SMLA_NOPE];
    const int warp_row = gather_warp() * (GROUP_ROWS / GATHER_WARPS);
    ptx_mbarrier_wait(at(shared->q_empty[group]), (state->query_turns >> group & 1) ^ 1);
    state->query_turns ^= 1u << group;
#pragma unroll 1
    for (int wave = 0; wave < GROUP_ROWS / GATHER_WARPS / WAVE_ROWS; wave++) {
        const int wave_row = first + warp_row + wave * WAVE_ROWS;
        if (wave_row / (WARP_ROWS / 2) > (item.num_rows - 1) / (WARP_ROWS / 2)) {
            break;
        }
        const int row = wave_row + lane_idx() / SEGMENT_CHUNKS;
        const bool is_on = row < item.num_rows;
        const paged_row place = find_row(args, item.kv_head, item.first_row + (is_on ? row : 0));
        const uint16_t *const from = smla_row16(&q, item.first_query + place.query, place.head) +
                                     lane_idx() % SEGMENT_CHUNKS * 8;
        const uint32_t to = ptx_shared_address(shared->queries[group]) + find_chunk(warp_row, wave);
#pragma unroll
        for (int segment = 0; segment < paged_shape<D>::SEGMENTS; segment++) {
            ptx_cp_async_16_or_zero(to + segment * GROUP_ROWS * SEGMENT_BYTES,
                                    from + segment * SEGMENT, is_on);
        }
    }
    ptx_mbarrier_arrive_after_copies(at(shared->q_full[group]));
}

/* Brings the queries of an item to the groups that it has. */
template <int D>
__device__ __forceinline__ void
bring_item_queries(const paged_args &args, const paged_item &item, paged_gather *state,
                   paged_memory<D> *shared)
{
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        if (item.owners >> group & 1) {
            bring_queries(args, item, group, item.owners == 3 ? group * GROUP_ROWS : 0, state,
                          shared);
        }
    }
}

/* ---- Keys and values ------------------------------------------------------------------------ */

/* Where a key's row of an array lies. */
__device__ __forceinline__ const uint8_t *
find_key_row(const paged_args &args, int array, const kv_place &place, int32_t kv_head)
{
    const smla_head_rows &rows = args.p.kv.rows[array];
    return (const uint8_t *)rows.data + place.page * args.pages.page_bytes[array] +
           (place.token * rows.stride_token + kv_head * rows.stride_head) * 2;
}

/* Copies the warp's rows of a block to the next buffer. `row` is that of the lane's key, NULL for a
 * hidden one, which becomes zeros. `hidden` are the bits of the warp's hidden keys. */
template <int D>
__device__ __forceinline__ void
bring_rows(const uint8_t *row, uint32_t hidden, paged_gather *state, paged_memory<D> *shared)
{
    using shape = paged_shape<D>;
    const uint32_t buffer = state->num_buffers % shape::BUFFERS;
    const int warp_key = gather_warp() * shape::WARP_KEYS;
    await_empty(shared, state->num_buffers);
    if (lane_idx() == 0) {
        const uint32_t to = ptx_shared_address(shared->hidden[buffer]) + warp_key / 8;
        if constexpr (shape::WARP_KEYS == 32) {
            ptx_store_shared_4(to, hidden);
        } else {
            ptx_store_shared_2(to, (uint16_t)hidden);
        }
        ptx_mbarrier_arrive(at(shared->full[buffer]), true);
    }
    __syncwarp();
    const uint32_t to = ptx_shared_address(shared->buffers[buffer]);
#pragma unroll 4
    for (int wave = 0; wave < shape::WARP_KEYS / WAVE_ROWS; wave++) {
        const int key = wave * WAVE_ROWS + lane_idx() / SEGMENT_CHUNKS;
        const uint8_t *const from =
            (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)row, key);
        const uint32_t chunk = to + find_chunk(warp_key, wave);
#pragma unroll
        for (int segment = 0; segment < shape::SEGMENTS; segment++) {
            ptx_cp_async_16_or_zero(chunk + segment * shape::SEGMENT_STEP,
                                    from + segment * SEGMENT_BYTES +
                                        lane_idx() % SEGMENT_CHUNKS * 16,
                                    from != NULL);
        }
    }
    ptx_mbarrier_arrive_after_copies(at(shared->full[buffer]));
    state->num_buffers++;
}

/* The table's entry for a key of an item; -1, which hides it, where no row sees it. */
__device__ __forceinline__ int32_t
load_key_entry(const paged_args &args, const planned_item &planned, int32_t key)
{
    return load_entry(args.pages, planned.req, (uint32_t)(planned.request.position + key),
                      key >= planned.seen.begin && key < planned.seen.end);
}

/* The lane's key of an item's first block. */
template <int D>
__device__ __forceinline__ int32_t
find_first_key(const paged_item &item)
{
    constexpr int WARP_KEYS = paged_shape<D>::WARP_KEYS;
    return item.first_key + gather_warp() * WARP_KEYS + lane_idx() % WARP_KEYS;
}

/* Brings the blocks of an item, and its queries behind the first one: their memory may be free
 * later than that of keys. The table is read one block ahead, and `entry` is that of the lane's
 * first key. */
template <int D>
__device__ __forceinline__ void
bring_item(const paged_args &args, const planned_item &planned, int32_t entry, paged_gather *state,
           paged_memory<D> *shared)
{
    using shape = paged_shape<D>;
    const paged_item &item = planned.item;
    int32_t key = find_first_key<D>(item);
#pragma unroll 1
    for (int32_t block = 0; block < item.num_blocks; block++) {
        const kv_place place =
            find_place(args.pages, entry, (uint32_t)(planned.request.position + key));
        const bool is_on = place.page >= 0;
        const uint32_t hidden = __ballot_sync(ALL_LANES, !is_on);
        key += shape::KEYS;
        entry = load_key_entry(args, planned, key);
#pragma unroll 1
        for (int array = SMLA_NOPE; array <= SMLA_VALUES; array += SMLA_VALUES - SMLA_NOPE) {
            const uint8_t *const row =
                is_on ? find_key_row(args, array, place, item.kv_head) : NULL;
            bring_rows<D>(row, hidden, state, shared);
        }
        if (block == 0) {
            bring_item_queries(args, item, state, shared);
        }
    }
}

/* Claims a tile, in one thread, which notes its number. */
template <int D>
__device__ __forceinline__ void
claim_tile(const paged_args &args, uint32_t slot, paged_memory<D> *shared)
{
    if (threadIdx.x == 0 && args.counters != NULL) {
        shared->claimed[slot] = gridDim.x + add_to_counter(&args.counters[CLAIMS]);
    }
}

/* The number of the tile that has been claimed, or without claims of the next one. */
template <int D>
__device__ __forceinline__ uint32_t
find_claim(const paged_args &args, uint32_t tile, uint32_t slot, const paged_memory<D> *shared)
{
    if (args.counters == NULL) {
        return tile + gridDim.x;
    }
    ptx_barrier(GATHER_BARRIER, GATHER_THREADS); /* the number is visible */
    return shared->claimed[slot];
}

/* Plans and brings all items of the CTA. An item of one group's rows goes to the groups in turn, so
 * that one group writes results while the other one is at the next item. A claim takes a trip to
 * memory, so it is made in front of the item before. */
template <int D>
__device__ __forceinline__ void
gather_items(const paged_args &args, paged_memory<D> *shared)
{
    paged_gather state = {};
    if (args.counters != NULL && threadIdx.x == 0) {
        start_claims(args.counters);
    }
    paged_walk walk = start_walk<D>(args, shared);
    const paged_slots slots = {walk.past > 0 ? ITEM_SLOTS / 2u : ITEM_SLOTS};
    if (threadIdx.x == 0) {
        shared->slots = slots;
    }
    planned_item planned;
    do {
        find_item<D>(args, &walk, &planned);
        planned.item.owners =
            planned.item.num_rows > GROUP_ROWS ? 3 : 1 << state.num_items % GROUPS;
        const int32_t entry = planned.item.num_rows == 0
                                  ? 0
                                  : load_key_entry(args, planned, find_first_key<D>(planned.item));
        publish_item(args, planned, slots, state.num_items, shared);
        if (!walk.is_cut) {
            claim_tile(args, state.num_items % 2, shared);
        }
        if (planned.item.num_rows > 0) {
            bring_item(args, planned, entry, &state, shared);
        }
        if (!walk.is_cut) {
            walk.next = find_claim(args, walk.next, state.num_items % 2, shared);
        }
        state.num_items++;
    } while (planned.item.num_rows > 0);
    if (args.counters != NULL && threadIdx.x == 0) {
        end_claims(args.counters);
    }
}
