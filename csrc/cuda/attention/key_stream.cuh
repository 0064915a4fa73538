/* key_stream.cuh: the index lists of a work for the gather warps of Hopper's kernels, without the
 * entries that are none: a row is as long as its keys, wherever they stand.
 *
 * Every warp has a quarter of the columns, four of every sixteen, and takes the keys of its quarter
 * in their order, so no warp waits for another. Which four changes from sixteen to sixteen, so that
 * lists with a pattern (every second entry, every second page) still give the warps as many keys
 * each. A step has 32 keys of each warp; a work has the steps that its fullest quarter needs, and
 * one at least. The warps count their keys ahead, for the consumers have to know the last step.
 *
 * The count takes an entry for a key if it is not negative and below index_limit. One that names no
 * slot for another reason (a bad page in the block table) takes a key's place in a step, and is
 * masked there. A work with exactly one key gets its results another way (one_key.cuh), so the
 * warps add up the places without a key, too, and with the last step the consumers know all of
 * them.
 */
#pragma once

#include "cuda/attention/attend.cuh"

enum {
    GATHER_WARPS = 4,
    STREAM_COLUMNS = GATHER_WARPS * SMLA_WARP_LANES, /* that the warps look at together */
};

/* The lane's place among STREAM_COLUMNS columns. */
static __device__ __forceinline__ int
find_stream_column(int warp, int lane)
{
    const int four = (warp - lane / 4 - lane / 16) & 3;
    return 16 * (lane / 4) + 4 * four + lane % 4;
}

/* What a warp keeps of the list that it reads. */
typedef struct key_stream {
    const int32_t *at; /* the lane's next index */
    int32_t left;      /* columns from there to the end */
    uint32_t next;     /* that index, asked for ahead */
    uint32_t held;     /* the keys that wait for their step: in lanes below num_held */
    uint32_t over;     /* those that are more than a step's */
    int32_t num_held;
    int32_t to_come; /* keys that have not been taken from the list */
} key_stream;

static __device__ __forceinline__ void
load_next(key_stream *stream)
{
    ptx_load_4(stream->at, stream->left > 0, NO_INDEX, &stream->next);
}

/* At the first of the warp's columns in a list, of which num_keys are keys. */
static __device__ __forceinline__ key_stream
open_stream(const attention_launch &launch, const cta_work &work, int list, int warp, int lane,
            int32_t num_keys)
{
    const smla_key_list &keys = launch.params.lists[list];
    const column_range columns = find_columns(launch, work, list);
    const int column = columns.begin + find_stream_column(warp, lane);
    key_stream stream;
    stream.at = keys.indices + work.token * keys.indices_stride_token + column;
    stream.left = columns.end - column;
    stream.held = NO_INDEX;
    stream.over = NO_INDEX;
    stream.num_held = 0;
    stream.to_come = num_keys;
    return stream;
}

/* The first of the lane's indices of a list. It is in L1 then. */
static __device__ __forceinline__ uint32_t
load_first(const attention_launch &launch, const cta_work &work, int list, int warp, int lane)
{
    const key_stream stream = open_stream(launch, work, list, warp, lane, 0);
    uint32_t index;
    ptx_load_4_cached(stream.at, stream.left > 0, NO_INDEX, &index);
    return index;
}

/* The warp's keys of a list; LOADS indices of a lane at once. They are in L1 then, for
 * take_step. */
template <int LOADS>
static __device__ __forceinline__ uint32_t
count_keys(const attention_launch &launch, const cta_work &work, int list, int warp, int lane)
{
    const key_stream stream = open_stream(launch, work, list, warp, lane, 0);
    const uint32_t limit = launch.lists[list].index_limit;
    const int32_t *at = stream.at;
    uint32_t count = 0;
#pragma unroll 1
    for (int32_t left = stream.left; __any_sync(0xFFFFFFFFu, left > 0);
         left -= LOADS * STREAM_COLUMNS) {
        uint32_t indices[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            ptx_load_4_cached(at + i * STREAM_COLUMNS, left > i * STREAM_COLUMNS, NO_INDEX,
                              &indices[i]);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            count += indices[i] < limit;
        }
        at += LOADS * STREAM_COLUMNS;
    }
    return __reduce_add_sync(0xFFFFFFFFu, count);
}

/* ---- Steps of a work ------------------------------------------------------------------------ */

/* Calls the warp's share of a work's indices to L2, in lines of 128 bytes, before they are
 * counted. */
static __device__ __forceinline__ void
prefetch_keys(const attention_launch &launch, const cta_work &work, int list, int warp, int lane)
{
    const smla_key_list &keys = launch.params.lists[list];
    const column_range columns = find_columns(launch, work, list);
    const int32_t *const at = keys.indices + work.token * keys.indices_stride_token;
#pragma unroll 1
    for (int32_t column = columns.begin + 32 * (SMLA_WARP_LANES * warp + lane);
         column < columns.end; column += 32 * STREAM_COLUMNS) {
        ptx_prefetch_l2(at + column, true);
    }
}

/* Steps of the lists of a work. */
typedef struct list_steps {
    int32_t main;
    int32_t extra;
    uint32_t num_keys; /* of both; without any, one step of the main list has none */
} list_steps;

/* Takes what the gather warps have counted in a list: the steps that hold the most keys of one. */
static __device__ __forceinline__ int32_t
steps_of_keys(const uint32_t counts[GATHER_WARPS], uint32_t *num_keys)
{
    uint32_t keys[GATHER_WARPS];
    ptx_load_shared_16(ptx_shared_address(counts), keys);
    *num_keys += keys[0] + keys[1] + keys[2] + keys[3];
    return (int32_t)((max(max(keys[0], keys[1]), max(keys[2], keys[3])) + SMLA_WARP_LANES - 1) /
                     SMLA_WARP_LANES);
}

/* The counts of a work: num_keys[list][warp], in shared memory. */
typedef uint32_t key_counts[2][GATHER_WARPS];

/* Of a work, by all gather warps: each counts the keys of its quarter, and they meet at a barrier.
 * Works have two `counts` in turn: one's are read as the work begins, when the next one's may
 * come. */
template <int LOADS>
static __device__ __forceinline__ void
count_work(const attention_launch &launch, const cta_work &work, int warp, int lane, int barrier,
           key_counts *counts)
{
#pragma unroll 1
    for (int list = 0; list < launch.params.num_lists; list++) {
        (*counts)[list][warp] = count_keys<LOADS>(launch, work, list, warp, lane);
    }
    ptx_barrier(barrier, GATHER_WARPS * SMLA_WARP_LANES);
}

/* What a warp has counted in a list: through a shuffle, for then it is known to be the warp's, as
 * all that follows from it. */
static __device__ __forceinline__ int32_t
find_count(const key_counts *counts, int list, int warp)
{
    return __shfl_sync(0xFFFFFFFFu, (int32_t)(*counts)[list][warp], 0);
}

/* What all have counted. */
static __device__ __forceinline__ list_steps
find_steps(const attention_launch &launch, const key_counts *counts)
{
    list_steps steps = {};
    steps.main = steps_of_keys((*counts)[0], &steps.num_keys);
    if (launch.params.num_lists == 2) {
        steps.extra = steps_of_keys((*counts)[1], &steps.num_keys);
    }
    steps.main += steps.num_keys == 0;
    return steps;
}

/* ---- Keys of a step ------------------------------------------------------------------------- */

/* The place of the n-th bit that is set, from 0 on; anything if there are not so many. */
static __device__ __forceinline__ int
find_nth_bit(uint32_t bits, int n)
{
    int place = 0;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
        const int below = __popc(bits & ((1u << width) - 1));
        if (n >= below) {
            n -= below;
            bits >>= width;
            place += width;
        }
    }
    return place;
}

/* Takes the lanes' next indices that are keys, behind those that are held. The next ones are asked
 * for last, into the register of these: a move out of another would wait for them. */
static __device__ __forceinline__ void
take_keys(key_stream *stream, uint32_t limit, int lane)
{
    const uint32_t is_key = __ballot_sync(0xFFFFFFFFu, stream->next < limit);
    if (is_key == 0xFFFFFFFFu && stream->num_held == 0) {
        stream->held = stream->next;
        stream->num_held = SMLA_WARP_LANES;
    } else {
        const int rank = (lane - stream->num_held) & (SMLA_WARP_LANES - 1);
        const uint32_t moved = __shfl_sync(0xFFFFFFFFu, stream->next, find_nth_bit(is_key, rank));
        if (rank < __popc(is_key)) {
            if (lane >= stream->num_held) {
                stream->held = moved;
            } else {
                stream->over = moved;
            }
        }
        stream->num_held += __popc(is_key);
    }
    stream->to_come -= __popc(is_key);
    stream->left -= STREAM_COLUMNS;
    stream->at += STREAM_COLUMNS;
    load_next(stream);
}

/* The keys of the warp's next step, one a lane, NO_INDEX for none. */
static __device__ __forceinline__ uint32_t
take_step(key_stream *stream, uint32_t limit, int lane)
{
#pragma unroll 1
    while (stream->num_held < SMLA_WARP_LANES && stream->to_come > 0) {
        take_keys(stream, limit, lane);
    }
    const uint32_t index = lane < stream->num_held ? stream->held : NO_INDEX;
    stream->held = stream->over;
    stream->num_held = max(stream->num_held - SMLA_WARP_LANES, 0);
    return index;
}

/* ---- A work with one key -------------------------------------------------------------------- */

/* Adds the places without a key in a step of the warp to those of the work, in shared memory. Only
 * this warp writes there. The addition is atomic because nobody waits for such a one. */
static __device__ __forceinline__ void
add_absent(uint32_t is_key, uint32_t *num_absent)
{
    if (is_key != 0xFFFFFFFFu) {
        if (ptx_elect()) {
            atomicAdd(num_absent, SMLA_WARP_LANES - __popc(is_key));
        }
    }
}

/* Which gather warp has the only key of a work; -1 if the work has none or several. For consumers,
 * when the last step has come. num_absent and num_steps are in shared memory. */
static __device__ __forceinline__ int
warp_of_only_key(const uint32_t (&num_absent)[GATHER_WARPS], const int32_t *num_steps)
{
    uint32_t absent[GATHER_WARPS];
    ptx_load_shared_16(ptx_shared_address(num_absent), absent);
    const uint32_t places = SMLA_WARP_LANES * (uint32_t)*(const volatile int32_t *)num_steps;
    int only = -1;
#pragma unroll
    for (int warp = 0; warp < GATHER_WARPS; warp++) {
        only = absent[warp] + 1 == places ? warp : only;
    }
    const uint32_t sum = absent[0] + absent[1] + absent[2] + absent[3];
    return sum + 1 == GATHER_WARPS * places ? only : -1;
}

/* In every step of a gather warp, of whose places are_keys says which have a key. A key that is the
 * warp's only one in its step, and the lane's, may be the work's only one: what is known of it is
 * left in `only`. The warp's number is asked for only here, for mostly nobody needs it. */
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
        __syncwarp(); /* lane 0 arrives for all of them */
    }
}

/* An entry of a list, where its slot is not at hand. */
typedef struct listed_index {
    int32_t index;
    int32_t list;
} listed_index;

static __device__ __forceinline__ listed_key
find_listed_key(const attention_launch &, const cta_work &, const listed_key &key)
{
    return key;
}

static __device__ __forceinline__ listed_key
find_listed_key(const attention_launch &launch, const cta_work &work, const listed_index &key)
{
    return listed_key{slot_of_index(launch, key.list, work.token, key.index), key.list};
}

/* Writes the results of a work with exactly one key, by the code of one_key.cuh and all consumers.
 * Tensor cores would not give its value as it is: of bf16 rows they add it to 0, and -0 loses its
 * sign; of FP8 rows they take something from its scale. Returns false for other works, and has done
 * nothing. */
template <bool ROPE, typename Memory>
static __device__ __forceinline__ bool
leave_only_key(const attention_launch &launch, const cta_work &work, int turn, const Memory *shared)
{
    const int warp = warp_of_only_key(shared->num_absent[turn], &shared->num_steps[turn]);
    if (!__any_sync(0xFFFFFFFFu, warp >= 0)) { /* tells ptxas that it is the same for all lanes */
        return false;
    }
    attend_only_key<ROPE>(launch, work, find_listed_key(launch, work, shared->only[turn][warp]),
                          ptx_forget((int)threadIdx.x));
    __syncwarp(); /* without it, ptxas takes the branches of the loops for those of lanes */
    return true;
}
