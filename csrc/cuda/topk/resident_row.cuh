/* resident_row.cuh: a row of logits that a cluster keeps in its registers and shared memory, on
 * Hopper.
 *
 * A logit x has a key: the bits of the float 0 - x. So large logits have small floats, both zeros
 * have the same key, and every NaN has the key 0x7FFFFFFF, which comes last. A key costs one
 * addition. The order of a key is its rank among all 2^32 keys; how it is computed depends on the
 * sign:
 *
 *     logit      +inf ... small         0 and -0 ... -inf       NaN
 *     key        0xFF800000 ... 0x80000001  0 ... 0x7F800000    0x7FFFFFFF
 *     order      0x007FFFFF ... 0x7FFFFFFE  0x80000000 ...      0xFFFFFFFF
 *
 * The row is cut into vectors of 16 bytes, aligned in memory, so its first and last vector may be
 * partial. One or two parts of the row are resident (resident_stream.cuh reads the third). Of each
 * resident part, every thread of the cluster has a run of 1, 2, 4 or 8 neighbouring vectors, in the
 * order of threads: the first thread's second run follows the last thread's first run. Each warp
 * has its own range of shared memory, to which bulk copies bring its vectors of one part in order.
 * A thread reads the vectors of its run one after another, but lanes begin at different vectors, so
 * that the lanes of one load touch all banks:
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

#include "cuda/topk/top_k_rows.cuh"

namespace {

enum {
    MOST_KEYS = 32, /* most keys of a thread per part */
    VECTOR_BYTES = 16,
};

/* ---- Keys ---------------------------------------------------------------------------------- */

constexpr uint32_t NO_LOGIT = 0x7FFF7FFFu; /* bits of a NaN of fp32, or of two NaN of bf16 */

/* The key of a logit, from its fp32 bits. */
__device__ __forceinline__ uint32_t
key_of_bits(uint32_t bits)
{
    return __float_as_uint(__fsub_rn(0.0f, __uint_as_float(bits)));
}

template <bool IS_BF16> struct logit_type {
    static constexpr uint32_t BYTES = IS_BF16 ? 2 : 4;
    static constexpr uint32_t PER_VECTOR = VECTOR_BYTES / BYTES;
    static constexpr uint32_t MOST_STEPS = MOST_KEYS / PER_VECTOR; /* most vectors of a run */

    /* Converts a vector of logits to keys. */
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

/* A row; one thread computes these fields for all others. Elements and vectors are counted from the
 * row's first vector on. */
typedef struct resident_row {
    const uint8_t *vectors; /* the row's first vector */
    result_row result;
    uint32_t token;
    bool is_selected;     /* whether there are more than k logits; otherwise all are taken */
    uint32_t count;       /* number of logits of the row */
    uint32_t begin;       /* element of the row's first logit, which lies in the first vector */
    uint32_t end;         /* one past the row's last logit */
    uint32_t first_whole; /* the first vector that lies in the tensor's row completely */
    uint32_t end_whole;   /* one past the last such vector */
    uint32_t num_vectors;
    uint32_t steps;       /* vectors of a run: 1, 2, 4 or 8 */
    bool has_ragged_ends; /* the first or last vector is partial */
    /* Factor that fills a word with copies of a mask of one bit per element of a run. */
    uint32_t repeat;
} resident_row;

/* Finds where the logits of a token are in its row of the tensor, which has num_columns columns. */
template <bool IS_BF16, int NUM_RUNS>
__device__ __forceinline__ void
open_row(resident_row *row, const uint8_t *logits, const token_columns &columns,
         uint32_t num_columns)
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

/* The vectors of a warp's 32 runs. `first_run`, below, is the run of lane 0. */
typedef struct warp_vectors {
    uint32_t first;
    uint32_t count;
} warp_vectors;

__device__ __forceinline__ warp_vectors
find_vectors(const resident_row &row, uint32_t first_run)
{
    return {first_run * row.steps, SMLA_WARP_LANES * row.steps};
}

/* Starts the copy of a warp's vectors to its range of shared memory, which no lane reads any more.
 * Only lane 0 calls this. */
__device__ __forceinline__ void
copy_vectors(const resident_row &row, const warp_vectors &vectors, uint32_t memory,
             uint32_t barrier)
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

/* Repairs one vector in shared memory, if it belongs to the warp: elements that are no logits of
 * the row become NaN. Bulk copies bring only complete vectors. Of others, each lane loads one logit
 * here. */
template <bool IS_BF16>
__device__ __forceinline__ void
mend_vector(const resident_row &row, uint32_t vector, const warp_vectors &vectors, uint32_t memory)
{
    using type = logit_type<IS_BF16>;
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
    const uint32_t index = vector - vectors.first;
    const uint32_t at = vector * type::PER_VECTOR + lane;
    const bool is_logit = at >= row.begin && at < row.end;
    const bool is_copied = vector >= row.first_whole && vector < row.end_whole;
    if (index < vectors.count && lane < type::PER_VECTOR && !(is_logit && is_copied)) {
        const uint32_t to = memory + index * VECTOR_BYTES + lane * type::BYTES;
        const uint8_t *const from = row.vectors + (uint64_t)at * type::BYTES;
        if constexpr (IS_BF16) {
            ptx_store_shared_2(to, is_logit ? __ldg((const uint16_t *)from) : (uint16_t)NO_LOGIT);
        } else {
            ptx_store_shared_4(to, is_logit ? __ldg((const uint32_t *)from) : NO_LOGIT);
        }
    }
}

/* Repairs the first and the last vector of the row, if they need it. */
template <bool IS_BF16>
__device__ __forceinline__ void
mend_ends(const resident_row &row, const warp_vectors &vectors, uint32_t memory)
{
    if (!row.has_ragged_ends) {
        return;
    }
#pragma unroll 1
    for (uint32_t end = 0; end < 2; end++) {
        mend_vector<IS_BF16>(row, end == 0 ? 0 : row.num_vectors - 1, vectors, memory);
    }
    ptx_fence_async_shared(); /* orders these writes before the next bulk copy */
    __syncwarp();             /* all lanes see the logits */
}

/* ---- Runs ---------------------------------------------------------------------------------- */

/* A thread's run of neighbouring vectors. */
typedef struct resident_run {
    uint32_t first;    /* the run's first element */
    uint32_t width;    /* number of the run's elements */
    uint32_t rotation; /* the element that register 0 has */
    uint32_t repeat;   /* `repeat` of the row */
} resident_run;

/* Returns run number `run` of the row. */
template <bool IS_BF16>
__device__ __forceinline__ resident_run
open_run(const resident_row &row, uint32_t run)
{
    using type = logit_type<IS_BF16>;
    const uint32_t steps = row.steps;
    const uint32_t lane = run % SMLA_WARP_LANES;
    return {run * steps * type::PER_VECTOR, steps * type::PER_VECTOR,
            (lane * steps / 8 & (steps - 1)) * type::PER_VECTOR, row.repeat};
}

/* Reverses a mask with a bit per register, whose first register is the highest bit, so that the
 * first one becomes the lowest. */
__device__ __forceinline__ uint32_t
in_order(const resident_run &run, uint32_t mask)
{
    return __brev(mask << (32 - run.width));
}

/* Rotates a mask of registers, in the order that in_order gives, into one with a bit per element of
 * the run. */
__device__ __forceinline__ uint32_t
to_columns(const resident_run &run, uint32_t mask)
{
    const uint32_t filled = mask * run.repeat;
    return __funnelshift_l(filled, filled, run.rotation) & (0xFFFFFFFFu >> (32 - run.width));
}

/* The mask of the run's elements that are logits of the row. */
__device__ __forceinline__ uint32_t
find_logits(const resident_row &row, const resident_run &run)
{
    const uint32_t low = run.first < row.begin ? row.begin - run.first : 0;
    const uint32_t high = row.end <= run.first ? 0 : min(row.end - run.first, run.width);
    return high <= low ? 0 : (0xFFFFFFFFu >> (32 - high)) & (0xFFFFFFFFu << low);
}

/* The keys of a run that lies in registers. */
template <bool IS_BF16> struct resident_keys {
    using type = logit_type<IS_BF16>;

    /* Vectors per run of each warp of the CTA, in shared memory; 0 if the warp has no logit of the
     * row. */
    uint32_t *warp_steps;
    uint32_t keys[MOST_KEYS];

    /* Loads the keys of the run from the warp's range of shared memory. Vectors outside the row get
     * the last key. */
    __device__ __forceinline__ void load(const resident_row &row, const resident_run &run,
                                         uint32_t warp_memory)
    {
        const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
        const uint32_t rotation = run.rotation / type::PER_VECTOR;
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
                ptx_load_shared_16(memory +
                                       ((step + rotation) & (type::MOST_STEPS - 1)) * VECTOR_BYTES,
                                   words);
                type::decode(words, keys + step * type::PER_VECTOR);
            }
            return;
        }
#pragma unroll
        for (uint32_t step = 0; step < type::MOST_STEPS; step++) {
            const uint32_t index = (step + rotation) & (steps - 1);
            uint32_t words[4] = {NO_LOGIT, NO_LOGIT, NO_LOGIT, NO_LOGIT};
            if (step < steps && index < num_vectors) {
                ptx_load_shared_16(memory + index * VECTOR_BYTES, words);
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

/* The keys of a run that lies in shared memory. */
template <bool IS_BF16> struct parked_keys {
    using type = logit_type<IS_BF16>;

    uint32_t *warp_steps; /* vectors per run of each warp, as in resident_keys */
    uint32_t memory;      /* the address of the first warp's logits */

    /* Fills the vectors of the run that are outside the row with NaN. */
    __device__ __forceinline__ void load(const resident_row &row, const resident_run &run,
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
            for (uint32_t index = num_vectors; index < row.steps; index++) {
                ptx_store_shared_16(warp_memory + (lane * row.steps + index) * VECTOR_BYTES, words);
            }
            ptx_fence_async_shared(); /* orders these writes before the next bulk copy */
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
        const uint32_t rotation = lane * steps / 8;
#pragma unroll 1
        for (uint32_t step = 0; step < steps; step++) {
            const uint32_t index = (step + rotation) & (steps - 1);
            uint32_t words[4];
            uint32_t keys[type::PER_VECTOR];
            ptx_load_shared_16(run + index * VECTOR_BYTES, words);
            type::decode(words, keys);
#pragma unroll
            for (uint32_t i = 0; i < type::PER_VECTOR; i++) {
                use(step * type::PER_VECTOR + i, keys[i]);
            }
        }
    }
};

} // namespace
