/* held_row.cuh: a row of logits that a cluster holds in its registers and shared memory, on Hopper.
 *
 * A logit x has a key: the bits of the float 0 - x. So large logits have small floats, both zeros
 * have the same key, and every NaN has the key 0x7FFFFFFF, which comes last. It takes one sum to
 * make a key. Order is a matter of the sign:
 *
 *     logit      +inf ... small         0 and -0 ... -inf       NaN
 *     key        0xFF800000 ... 0x80000001  0 ... 0x7F800000    0x7FFFFFFF
 *     place      0x007FFFFF ... 0x7FFFFFFE  0x80000000 ...      0xFFFFFFFF
 *
 * The row is cut into vectors of 16 bytes, aligned in memory, so its first and last vector may be
 * partial. One or two parts of it are held (held_stream.cuh has the third). Every thread of the
 * cluster has a run of 1, 2, 4 or 8 neighbouring vectors of each, in the order of threads: the
 * first thread's second run comes behind the last one's first. A warp has its own place in shared
 * memory, to which bulk copies bring its vectors of one part in their order. A thread takes its
 * vectors in turn, but lanes begin at different ones, so that the lanes of one load touch all
 * banks:
 *
 *     bank (4 words each)     0    1    2    3    4    5    6    7       a run of 8 vectors
 *     lane 0                 v0   v1   v2   v3   v4   v5   v6   v7       takes v0 first
 *     lane 1                 v0   v1   v2   v3   v4   v5   v6   v7       takes v1 first
 *     lane 2                 v0   v1   v2   v3   v4   v5   v6   v7       takes v2 first
 *
 * So register i of a thread has another element of the run in each lane. Sets of keys are masks
 * with a bit per register, and `to_columns` rotates such a mask into the order of columns.
 */
#pragma once

#include "cuda/select/top_k_rows.cuh"

namespace {

enum {
    MOST_KEYS = 32, /* per thread and part */
    VECTOR_BYTES = 16,
};

/* ---- Keys ---------------------------------------------------------------------------------- */

constexpr uint32_t NO_LOGIT = 0x7FFF7FFFu; /* a NaN of fp32, or two of bf16 */

/* The key of a logit, from its fp32 bits. */
__device__ __forceinline__ uint32_t
key_of_bits(uint32_t bits)
{
    return __float_as_uint(__fsub_rn(0.0f, __uint_as_float(bits)));
}

template <bool IS_BF16> struct logit_type {
    static constexpr uint32_t BYTES = IS_BF16 ? 2 : 4;
    static constexpr uint32_t PER_VECTOR = VECTOR_BYTES / BYTES;
    static constexpr uint32_t MOST_STEPS = MOST_KEYS / PER_VECTOR; /* vectors of a run */

    /* The keys of a vector of logits. */
    static __device__ __forceinline__ void decode(const uint32_t words[4], uint32_t *keys)
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (IS_BF16) {
                keys[2 * i] = key_of_bits(words[i] << 16);
                keys[2 * i + 1] = key_of_bits(words[i] & 0xFFFF0000u);
            } else {
                keys[i] = key_of_bits(words[i]);
            }
        }
    }
};

/* ---- Rows ---------------------------------------------------------------------------------- */

/* A row, as one thread works it out for all. Elements and vectors are counted from the row's first
 * vector on. */
typedef struct held_row {
    const uint8_t *vectors; /* the row's first vector */
    result_row result;
    uint32_t token;
    bool is_selected;     /* there are more than k logits; else all are taken */
    uint32_t count;       /* logits of the row */
    uint32_t begin;       /* the row's first logit: less than the elements of a vector */
    uint32_t end;         /* one past the row's last logit */
    uint32_t first_whole; /* the first vector that lies in the row of the tensor as a whole */
    uint32_t end_whole;   /* one past the last such vector */
    uint32_t num_vectors;
    uint32_t steps;       /* vectors of a run: 1, 2, 4 or 8 */
    bool has_ragged_ends; /* the first or last vector has more than logits of the row */
    uint32_t repeat;      /* times this, a mask with a bit per element of a run fills a word */
} held_row;

/* Works out where the logits of a token are in the row of the tensor, which has N columns. */
template <bool IS_BF16, int NUM_RUNS>
__device__ __forceinline__ void
open_row(held_row *row, const uint8_t *logits, const token_columns &columns, uint32_t num_columns)
{
    using type = logit_type<IS_BF16>;
    const uint32_t extra_bytes = (uint32_t)(uintptr_t)logits % VECTOR_BYTES;
    const uint32_t begin = extra_bytes / type::BYTES;
    const uint32_t end = begin + columns.count;
    const uint32_t first_whole = columns.begin < begin;
    const uint32_t num_vectors = (end + type::PER_VECTOR - 1) / type::PER_VECTOR;
    const uint32_t end_whole =
        min((num_columns - columns.begin + begin) / type::PER_VECTOR, num_vectors);
    uint32_t steps = 1;
    uint32_t repeat = IS_BF16 ? 0x01010101u : 0x11111111u;
#pragma unroll
    for (uint32_t most = 1; most < type::MOST_STEPS; most *= 2) {
        if (end > most * type::PER_VECTOR * NUM_RUNS) {
            steps = 2 * most;
            repeat = (uint32_t)(0xFFFFFFFFu / ((1ull << 2 * most * type::PER_VECTOR) - 1));
        }
    }
    row->vectors = logits - extra_bytes;
    row->count = columns.count;
    row->begin = begin;
    row->end = end;
    row->first_whole = first_whole;
    row->end_whole = end_whole;
    row->num_vectors = num_vectors;
    row->has_ragged_ends = begin != 0 || end % type::PER_VECTOR != 0;
    row->steps = steps;
    row->repeat = repeat;
}

/* The vectors of 32 runs, which a warp has: `first_run` is the first lane's. */
typedef struct warp_vectors {
    uint32_t first;
    uint32_t count;
} warp_vectors;

__device__ __forceinline__ warp_vectors
find_vectors(const held_row &row, uint32_t first_run)
{
    return {first_run * row.steps, SMLA_WARP_LANES * row.steps};
}

/* Begins to bring a warp's vectors to its place in shared memory, which nobody reads any more. Lane
 * 0 calls this. */
__device__ __forceinline__ void
copy_vectors(const held_row &row, const warp_vectors &vectors, uint32_t memory, uint32_t barrier)
{
    const uint32_t from = max(vectors.first, row.first_whole);
    const uint32_t to = min(vectors.first + vectors.count, row.end_whole);
    const uint32_t bytes = from < to ? (to - from) * VECTOR_BYTES : 0;
    ptx_mbarrier_arrive_expect(barrier, bytes);
    if (bytes != 0) {
        ptx_bulk_copy(memory + (from - vectors.first) * VECTOR_BYTES,
                      row.vectors + (uint64_t)from * VECTOR_BYTES, bytes, barrier);
    }
}

/* Makes a vector in shared memory one of logits of the row and NaN, if the warp has it. No bulk
 * copy brings vectors that are not whole: their logits come from here, an element per lane. */
template <bool IS_BF16>
__device__ __forceinline__ void
mend_vector(const held_row &row, uint32_t vector, const warp_vectors &vectors, uint32_t memory)
{
    using type = logit_type<IS_BF16>;
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
    const uint32_t place = vector - vectors.first;
    const uint32_t at = vector * type::PER_VECTOR + lane;
    const bool is_logit = at >= row.begin && at < row.end;
    const bool is_copied = vector >= row.first_whole && vector < row.end_whole;
    if (place < vectors.count && lane < type::PER_VECTOR && !(is_logit && is_copied)) {
        const uint32_t to = memory + place * VECTOR_BYTES + lane * type::BYTES;
        const uint8_t *const from = row.vectors + (uint64_t)at * type::BYTES;
        if constexpr (IS_BF16) {
            ptx_store_shared_2(to, is_logit ? __ldg((const uint16_t *)from) : (uint16_t)NO_LOGIT);
        } else {
            ptx_store_shared_4(to, is_logit ? __ldg((const uint32_t *)from) : NO_LOGIT);
        }
    }
}

/* Mends the first and the last vector of the row, if they need it. */
template <bool IS_BF16>
__device__ __forceinline__ void
mend_ends(const held_row &row, const warp_vectors &vectors, uint32_t memory)
{
    if (!row.has_ragged_ends) {
        return;
    }
#pragma unroll 1
    for (uint32_t end = 0; end < 2; end++) {
        mend_vector<IS_BF16>(row, end == 0 ? 0 : row.num_vectors - 1, vectors, memory);
    }
    ptx_fence_async_shared(); /* the next bulk copy comes later */
    __syncwarp();             /* all lanes see the logits */
}

/* ---- Runs ---------------------------------------------------------------------------------- */

/* A run of a thread. */
typedef struct held_run {
    uint32_t first;  /* its first element */
    uint32_t width;  /* its elements */
    uint32_t turn;   /* the element in register 0 */
    uint32_t repeat; /* the row's */
} held_run;

/* Run number `run` of the row. */
template <bool IS_BF16>
__device__ __forceinline__ held_run
open_run(const held_row &row, uint32_t run)
{
    using type = logit_type<IS_BF16>;
    const uint32_t steps = row.steps;
    const uint32_t lane = run % SMLA_WARP_LANES;
    return {run * steps * type::PER_VECTOR, steps * type::PER_VECTOR,
            (lane * steps / 8 & (steps - 1)) * type::PER_VECTOR, row.repeat};
}

/* A mask with a bit per register, the first one highest, as one with the first one lowest. */
__device__ __forceinline__ uint32_t
in_order(const held_run &run, uint32_t mask)
{
    return __brev(mask << (32 - run.width));
}

/* Such a mask as one with a bit per element of the run. */
__device__ __forceinline__ uint32_t
to_columns(const held_run &run, uint32_t mask)
{
    const uint32_t filled = mask * run.repeat;
    return __funnelshift_l(filled, filled, run.turn) & (0xFFFFFFFFu >> (32 - run.width));
}

/* The elements of the run that are logits of the row. */
__device__ __forceinline__ uint32_t
find_logits(const held_row &row, const held_run &run)
{
    const uint32_t low = run.first < row.begin ? row.begin - run.first : 0;
    const uint32_t high = row.end <= run.first ? 0 : min(row.end - run.first, run.width);
    return high <= low ? 0 : (0xFFFFFFFFu >> (32 - high)) & (0xFFFFFFFFu << low);
}

/* The keys of a run, in registers. */
template <bool IS_BF16> struct held_keys {
    using type = logit_type<IS_BF16>;

    uint32_t *warp_steps; /* vectors of the runs of each warp of the CTA, in shared memory; 0 if the
                           * warp has no logit of the row */
    uint32_t keys[MOST_KEYS];

    /* Takes the keys of the run from the warp's place in shared memory. Vectors that are none of
     * the row's have the last key. */
    __device__ __forceinline__ void load(const held_row &row, const held_run &run,
                                         uint32_t warp_memory)
    {
        const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
        const uint32_t turn = run.turn / type::PER_VECTOR;
        const uint32_t first = run.first / type::PER_VECTOR;
        const uint32_t num_vectors = row.num_vectors < first ? 0 : row.num_vectors - first;
        const uint32_t memory = warp_memory + lane * row.steps * VECTOR_BYTES;
        const uint32_t steps = row.steps;
        if (lane == 0) {
            warp_steps[threadIdx.x / SMLA_WARP_LANES] = first < row.num_vectors ? steps : 0;
        }
        __syncwarp();
        if (__all_sync(ALL_LANES, steps == type::MOST_STEPS && steps <= num_vectors)) {
#pragma unroll
            for (uint32_t step = 0; step < type::MOST_STEPS; step++) {
                uint32_t words[4];
                ptx_load_shared_16(memory + ((step + turn) & (type::MOST_STEPS - 1)) * VECTOR_BYTES,
                                   words);
                type::decode(words, keys + step * type::PER_VECTOR);
            }
            return;
        }
#pragma unroll
        for (uint32_t step = 0; step < type::MOST_STEPS; step++) {
            const uint32_t place = (step + turn) & (steps - 1);
            uint32_t words[4] = {NO_LOGIT, NO_LOGIT, NO_LOGIT, NO_LOGIT};
            if (step < steps && place < num_vectors) {
                ptx_load_shared_16(memory + place * VECTOR_BYTES, words);
            }
            type::decode(words, keys + step * type::PER_VECTOR);
        }
    }

    /* Calls use(i, key) for all keys. */
    template <typename Use> __device__ __forceinline__ void visit(const Use &use) const
    {
        const uint32_t steps = warp_steps[ptx_thread() / SMLA_WARP_LANES];
#pragma unroll
        for (uint32_t step = 0; step < type::MOST_STEPS; step++) {
            if (step >= steps) {
                break;
            }
#pragma unroll
            for (uint32_t i = step * type::PER_VECTOR; i < (step + 1) * type::PER_VECTOR; i++) {
                use(i, keys[i]);
            }
        }
    }
};

/* The keys of a run that stays in shared memory. */
template <bool IS_BF16> struct parked_keys {
    using type = logit_type<IS_BF16>;

    uint32_t *warp_steps; /* as above */
    uint32_t memory;      /* the place of the first warp of the CTA */

    /* Fills vectors that do not belong to the row with NaN. */
    __device__ __forceinline__ void load(const held_row &row, const held_run &run,
                                         uint32_t warp_memory)
    {
        const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
        const uint32_t first = run.first / type::PER_VECTOR;
        const uint32_t num_vectors = row.num_vectors < first ? 0 : row.num_vectors - first;
        const bool is_empty = first - lane * row.steps >= row.num_vectors;
        if (lane == 0) {
            warp_steps[threadIdx.x / SMLA_WARP_LANES] = is_empty ? 0 : row.steps;
        }
        __syncwarp();
        if (!is_empty && __any_sync(ALL_LANES, num_vectors < row.steps)) {
            const uint32_t words[4] = {NO_LOGIT, NO_LOGIT, NO_LOGIT, NO_LOGIT};
#pragma unroll 1
            for (uint32_t place = num_vectors; place < row.steps; place++) {
                ptx_store_shared_16(warp_memory + (lane * row.steps + place) * VECTOR_BYTES, words);
            }
            ptx_fence_async_shared(); /* the next bulk copy comes later */
            __syncwarp();
        }
    }

    template <typename Use> __device__ __forceinline__ void visit(const Use &use) const
    {
        const uint32_t warp = ptx_thread() / SMLA_WARP_LANES;
        const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
        const uint32_t steps = warp_steps[warp];
        const uint32_t run =
            memory + (warp * SMLA_WARP_LANES * type::MOST_STEPS + lane * steps) * VECTOR_BYTES;
        const uint32_t turn = lane * steps / 8;
#pragma unroll 1
        for (uint32_t step = 0; step < steps; step++) {
            const uint32_t place = (step + turn) & (steps - 1);
            uint32_t words[4];
            uint32_t keys[type::PER_VECTOR];
            ptx_load_shared_16(run + place * VECTOR_BYTES, words);
            type::decode(words, keys);
#pragma unroll
            for (uint32_t i = 0; i < type::PER_VECTOR; i++) {
                use(step * type::PER_VECTOR + i, keys[i]);
            }
        }
    }
};

} // namespace
