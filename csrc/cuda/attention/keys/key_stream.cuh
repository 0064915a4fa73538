/* key_stream.cuh: gives the gather warps of Hopper's kernels the keys of an item's index lists, and
 * leaves out the entries that are no keys. So an item takes as long as its keys, wherever they
 * stand.
 *
 * Every warp has a quarter of the columns, four of every sixteen, and takes the keys of its quarter
 * in their order. So no warp waits for another. Which four they are changes from sixteen to
 * sixteen, so that lists with a pattern (every second entry, every second page) still give all
 * warps the same number of keys. A step has 32 keys of each warp. An item has as many steps as its
 * fullest quarter needs, and at least one. The warps count keys ahead, because the consumers must
 * know which step is the last.
 *
 * The count takes an entry for a key if its index is not negative and below index_limit. An index
 * that names no slot for another reason (a bad page in the block table) takes the position of a key
 * in a step, and is masked there. An item with one key gets that key's value (one_key.cuh). So the
 * warps also add up the positions without a key, and with the last step the consumers know the
 * sums.
 */
#pragma once

#include "cuda/attention/sm80/mqa/attend.cuh"

enum {
    GATHER_WARPS = 4,
    STREAM_COLUMNS = GATHER_WARPS * SMLA_WARP_LANES, /* columns that the warps read at once */
};

static_assert((int)STREAM_COLUMNS == (int)CHUNK_COLUMNS, "a chunk is read at once");

/* The lane's column among STREAM_COLUMNS columns. */
static __device__ __forceinline__ int
find_stream_column(int warp, int lane)
{
    const int four = (warp - lane / 4 - lane / 16) & 3;
    return 16 * (lane / 4) + 4 * four + lane % 4;
}

/* What a lane keeps about the list that its warp reads. */
typedef struct key_stream {
    const int32_t *at; /* address of the lane's next index */
    int32_t left;      /* columns from `at` to the list's end */
    uint32_t next;     /* the index at `at`, loaded ahead */
    uint32_t waiting;  /* a key that waits for its step; only lanes below num_waiting have one */
    uint32_t over;     /* a second key that waits: it goes to the step after `waiting`'s */
    int32_t num_waiting;
    int32_t to_come; /* keys of the warp that are still in the list */
} key_stream;

static __device__ __forceinline__ void
load_next(key_stream *stream)
{
    ptx_load_4(stream->at, stream->left > 0, NO_INDEX, &stream->next);
}

/* Opens a stream at the first of the warp's columns in a list. num_keys of those are keys. */
static __device__ __forceinline__ key_stream
open_stream(const attention_launch &launch, const work_item &item, int list, int warp, int lane,
            int32_t num_keys)
{
    const smla_key_list &keys = launch.params.keys.lists[list];
    const column_range columns = find_columns(launch, item, list);
    const int column = columns.begin + find_stream_column(warp, lane);
    key_stream stream;
    stream.at = keys.indices + item.token * keys.indices_stride_token + column;
    stream.left = columns.end - column;
    stream.waiting = NO_INDEX;
    stream.over = NO_INDEX;
    stream.num_waiting = 0;
    stream.to_come = num_keys;
    return stream;
}

/* Loads the lane's first index in a list. It stays in L1. */
static __device__ __forceinline__ uint32_t
load_first(const attention_launch &launch, const work_item &item, int list, int warp, int lane)
{
    const key_stream stream = open_stream(launch, item, list, warp, lane, 0);
    uint32_t index;
    ptx_load_4_cached(stream.at, stream.left > 0, NO_INDEX, &index);
    return index;
}

/* Counts the warp's keys in a list, from a lane's first index at `at` on. The list ends `left`
 * columns later. Chunks are `stride` apart. A lane loads LOADS indices at once, and they stay in
 * L1. */
template <int LOADS>
static __device__ __forceinline__ uint32_t
count_strided_keys(const int32_t *at, int32_t left, uint32_t limit, int32_t stride)
{
    uint32_t count = 0;
#pragma unroll 1
    for (; __any_sync(0xFFFFFFFFu, left > 0); left -= LOADS * stride) {
        uint32_t indices[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            ptx_load_4_cached(at + i * stride, left > i * stride, NO_INDEX, &indices[i]);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            count += indices[i] < limit;
        }
        at += LOADS * stride;
    }
    return __reduce_add_sync(0xFFFFFFFFu, count);
}

template <int LOADS>
static __device__ __noinline__ uint32_t
count_keys_apart(const int32_t *at, int32_t left, uint32_t limit, int32_t stride)
{
    return count_strided_keys<LOADS>(at, left, limit, stride);
}

/* count_strided_keys for a list whose stream was just opened; take_step will load the indices
 * again. `stride` is the launch's column_stride. APART: where splits take chunks in turn, a
 * function is called, because its code is long and other launches would jump over it. */
template <int LOADS, bool APART>
static __device__ __forceinline__ uint32_t
count_keys(const attention_launch &launch, int list, const key_stream &stream, int32_t stride)
{
    const uint32_t limit = launch.lists[list].index_limit;
    if (!APART) {
        return count_strided_keys<LOADS>(stream.at, stream.left, limit, stride);
    }
    return stride == CHUNK_COLUMNS
               ? count_strided_keys<LOADS>(stream.at, stream.left, limit, CHUNK_COLUMNS)
               : count_keys_apart<LOADS>(stream.at, stream.left, limit, stride);
}

/* ---- Steps of an item ----------------------------------------------------------------------- */

/* Prefetches the warp's share of a list to L2, in lines of 128 bytes, before its keys are
 * counted. */
static __device__ __forceinline__ void
prefetch_keys(const attention_launch &launch, const work_item &item, int list, int warp, int lane)
{
    const smla_key_list &keys = launch.params.keys.lists[list];
    const column_range columns = find_columns(launch, item, list);
    const int32_t *const at = keys.indices + item.token * keys.indices_stride_token;
#pragma unroll 1
    for (int32_t column = columns.begin + 32 * (SMLA_WARP_LANES * warp + lane);
         column < columns.end; column += 32 * STREAM_COLUMNS) {
        ptx_prefetch_l2(at + column, true);
    }
}

/* How many steps an item has in each list. */
typedef struct list_steps {
    int32_t main;
    int32_t extra;
    uint32_t num_keys; /* keys of both lists; if there are none, main is 1, a step without keys */
} list_steps;

/* The steps of a list, as many as the warp with the most keys needs. Adds the list's keys to
 * num_keys. */
static __device__ __forceinline__ int32_t
steps_of_keys(const uint32_t counts[GATHER_WARPS], uint32_t *num_keys)
{
    uint32_t keys[GATHER_WARPS];
    ptx_load_shared_16(ptx_shared_address(counts), keys);
    *num_keys += keys[0] + keys[1] + keys[2] + keys[3];
    return (int32_t)((max(max(keys[0], keys[1]), max(keys[2], keys[3])) + SMLA_WARP_LANES - 1) /
                     SMLA_WARP_LANES);
}

/* How many keys each gather warp has in each list of an item: [list][warp], in shared memory. */
typedef uint32_t key_counts[2][GATHER_WARPS];

/* Counts the keys of an item, whose main list has the stream `main`. Each of GATHER_WARPS warps
 * counts its quarter, and all meet at a barrier. Items use two `counts` in turn: consumers read
 * those of one item when it begins, and gather warps may then write those of the next item. */
template <int LOADS, bool APART>
static __device__ __forceinline__ void
count_item_keys(const attention_launch &launch, const work_item &item, const key_stream &main,
                int32_t stride, int warp, int lane, int barrier, int num_threads,
                key_counts *counts)
{
    key_stream stream = main;
    int list = 0;
#pragma unroll 1
    for (;;) {
        (*counts)[list][warp] = count_keys<LOADS, APART>(launch, list, stream, stride);
        if (++list == launch.params.keys.num_lists) {
            break;
        }
        stream = open_stream(launch, item, list, warp, lane, 0);
    }
    ptx_barrier(barrier, num_threads);
}

/* How many keys a warp has in a list. The shuffle lets ptxas know that this number, and all that
 * depends on it, is the same in all lanes. */
static __device__ __forceinline__ int32_t
find_count(const key_counts *counts, int list, int warp)
{
    return __shfl_sync(0xFFFFFFFFu, (int32_t)(*counts)[list][warp], 0);
}

/* The steps of an item, from the counts of all gather warps. */
static __device__ __forceinline__ list_steps
find_steps(const attention_launch &launch, const key_counts *counts)
{
    list_steps steps = {};
    steps.main = steps_of_keys((*counts)[0], &steps.num_keys);
    if (launch.params.keys.num_lists == 2) {
        steps.extra = steps_of_keys((*counts)[1], &steps.num_keys);
    }
    steps.main += steps.num_keys == 0;
    return steps;
}

/* ---- Keys of a step ------------------------------------------------------------------------- */

/* The index of the n-th set bit, counted from 0; an arbitrary number if there is no such bit. */
static __device__ __forceinline__ int
find_nth_bit(uint32_t bits, int n)
{
    int bit_idx = 0;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
        const int below = __popc(bits & ((1u << width) - 1));
        if (n >= below) {
            n -= below;
            bits >>= width;
            bit_idx += width;
        }
    }
    return bit_idx;
}

/* find_nth_bit as a called function. */
static __device__ __noinline__ int
find_nth_bit_apart(uint32_t bits, int n)
{
    return find_nth_bit(bits, n);
}

/* Appends keys, the indices of some lanes, to the keys that the warp holds. It holds 64 at most. */
template <bool APART>
static __device__ __forceinline__ void
hold_keys(key_stream *stream, uint32_t are_keys, uint32_t index, int lane)
{
    const int rank = (lane - stream->num_waiting) & (SMLA_WARP_LANES - 1);
    const int from_lane = APART ? find_nth_bit_apart(are_keys, rank) : find_nth_bit(are_keys, rank);
    const uint32_t shuffled = __shfl_sync(0xFFFFFFFFu, index, from_lane);
    if (rank < __popc(are_keys)) {
        if (lane >= stream->num_waiting) {
            stream->waiting = shuffled;
        } else {
            stream->over = shuffled;
        }
    }
    stream->num_waiting += __popc(are_keys);
}

/* Takes the keys among the next indices of those lanes whose bits `wanted` has, and appends them to
 * the keys that the warp holds. The following indices are loaded last, into the same register,
 * because a move from another register would wait for them. */
template <bool APART>
static __device__ __forceinline__ void
take_keys(key_stream *stream, uint32_t limit, int32_t column_stride, int lane,
          uint32_t wanted = 0xFFFFFFFFu)
{
    const uint32_t is_key = __ballot_sync(0xFFFFFFFFu, stream->next < limit) & wanted;
    if (is_key == 0xFFFFFFFFu && stream->num_waiting == 0) {
        stream->waiting = stream->next;
        stream->num_waiting = SMLA_WARP_LANES;
    } else {
        hold_keys<APART>(stream, is_key, stream->next, lane);
    }
    stream->to_come -= __popc(is_key);
    stream->left -= column_stride;
    stream->at += column_stride;
    load_next(stream);
}

/* Hands out the keys of a step, one per lane. A lane without a key gets NO_INDEX. */
static __device__ __forceinline__ uint32_t
hand_out_step(key_stream *stream, int lane)
{
    const uint32_t index = lane < stream->num_waiting ? stream->waiting : NO_INDEX;
    stream->waiting = stream->over;
    stream->num_waiting = max(stream->num_waiting - SMLA_WARP_LANES, 0);
    return index;
}

/* Takes the keys of the warp's next step, and hands them out. APART: the code for lists with holes
 * is a called function, because lists without holes would jump over it, and what lies behind a jump
 * comes late from memory. */
template <bool APART = false>
static __device__ __forceinline__ uint32_t
take_step(const attention_launch &launch, int list, key_stream *stream, int lane)
{
#pragma unroll 1
    while (stream->num_waiting < SMLA_WARP_LANES && stream->to_come > 0) {
        take_keys<APART>(stream, launch.lists[list].index_limit, launch.column_stride, lane);
    }
    return hand_out_step(stream, lane);
}

/* ---- An item with one key ------------------------------------------------------------------- */

/* Adds the number of positions without a key in a step to the warp's sum for the item, in shared
 * memory. Only this warp writes there. The addition is atomic because no thread waits for an atomic
 * addition. */
static __device__ __forceinline__ void
add_absent(uint32_t is_key, uint32_t *num_absent)
{
    if (is_key != 0xFFFFFFFFu) {
        if (ptx_elect()) {
            atomicAdd(num_absent, SMLA_WARP_LANES - __popc(is_key));
        }
    }
}

/* The gather warp that has the only key of an item; -1 if the item has none or several. Consumers
 * call it when the last step has come. num_absent and num_steps are in shared memory. */
static __device__ __forceinline__ int
warp_of_only_key(const uint32_t (&num_absent)[GATHER_WARPS], const int32_t *num_steps)
{
    uint32_t absent[GATHER_WARPS];
    ptx_load_shared_16(ptx_shared_address(num_absent), absent);
    const uint32_t num_positions = SMLA_WARP_LANES * (uint32_t)*(const volatile int32_t *)num_steps;
    int only = -1;
#pragma unroll
    for (int warp = 0; warp < GATHER_WARPS; warp++) {
        only = absent[warp] + 1 == num_positions ? warp : only;
    }
    const uint32_t sum = absent[0] + absent[1] + absent[2] + absent[3];
    return sum + 1 == GATHER_WARPS * num_positions ? only : -1;
}

/* Gather warps call this in every step; are_keys says which positions have a key. The only key of
 * the warp in a step may be the only key of the item, so its lane (is_mine) stores it in `only`.
 * The warp's number is found only here, because usually nobody needs it. */
template <typename Key, typename Memory>
static __device__ __forceinline__ void
count_step(uint32_t are_keys, bool is_mine, const Key &key, uint32_t turn, int (*find_warp)(void),
           Memory *shared)
{
    if (are_keys != 0xFFFFFFFFu) {
        add_absent(are_keys, &shared->num_absent[turn][find_warp()]);
        if (__popc(are_keys) == 1 && is_mine) {
            shared->only[turn][find_warp()] = key;
        }
        __syncwarp(); /* these writes come before lane 0 arrives for the warp */
    }
}

/* A key of an item of a dense call, by its position in the request. */
typedef struct listed_position {
    int32_t position;
} listed_position;

/* A key of an item, by its index; listed_key has the slot. */
typedef struct listed_index {
    int32_t index;
    int32_t list;
} listed_index;

static __device__ __forceinline__ listed_key
find_listed_key(const attention_launch &, const work_item &, const listed_key &key)
{
    return key;
}

static __device__ __forceinline__ listed_key
find_listed_key(const attention_launch &launch, const work_item &item, const listed_index &key)
{
    return listed_key{slot_of_index(launch, key.list, item.token, key.index), key.list};
}

static __device__ __forceinline__ listed_key
find_listed_key(const attention_launch &launch, const work_item &item, const listed_position &key)
{
    return listed_key{slot_of_position(launch, item.token, key.position), 0};
}

/* Whether an item has exactly one key. Tensor cores would change the key's value: they add bf16
 * values to 0, so -0 loses its sign, and FP8 values lose bits of their scale. So the value is
 * loaded once more and written instead of the products (write_value). */
template <typename Memory>
static __device__ __forceinline__ bool
has_only_key(int turn, const Memory *shared)
{
    const int warp = warp_of_only_key(shared->num_absent[turn], &shared->num_steps[turn]);
    return __any_sync(0xFFFFFFFFu, warp >= 0); /* tells ptxas that all lanes agree */
}

/* The key of an item for which has_only_key is true. */
template <typename Memory>
static __device__ __forceinline__ listed_key
only_key_of_item(const attention_launch &launch, const work_item &item, int turn,
                 const Memory *shared)
{
    const int warp = warp_of_only_key(shared->num_absent[turn], &shared->num_steps[turn]);
    return find_listed_key(launch, item, shared->only[turn][warp]);
}
