/* claims.cuh: counters by which the CTAs of a launch claim work, or tell when it is done.
 *
 * They are in the caller's workspace, whose contents are undefined. A word with a tag counts, any
 * other contents count as 0. The last CTA that counts leaves a word without a tag, so that a launch
 * that follows, or a graph that is replayed, begins at 0 again. A word that has the tag by chance
 * would be taken for a count: one in 2^40.
 */
#pragma once

#include "core/attention/params_attention.h"

enum : uint64_t {
    COUNTER_TAG = 0xB6E93D5A71000000,
    COUNTER_MASK = 0xFFFFFF, /* bits of the count */
};

static __device__ __forceinline__ bool
is_counting(unsigned long long word)
{
    return (word & ~(unsigned long long)COUNTER_MASK) == COUNTER_TAG;
}

/* Makes a counter 0 unless another CTA of the launch has. Only such CTAs change the word in
 * between, so a failed exchange means that one of them has. */
static __device__ __forceinline__ void
start_counter(unsigned long long *counter)
{
    const unsigned long long old = *(volatile unsigned long long *)counter;
    if (!is_counting(old)) {
        atomicCAS(counter, old, (unsigned long long)COUNTER_TAG);
    }
}

/* Returns the count before this one. */
static __device__ __forceinline__ uint32_t
add_to_counter(unsigned long long *counter)
{
    return (uint32_t)(atomicAdd(counter, 1ull) & COUNTER_MASK);
}

/* ---- Claims of work -------------------------------------------------------------------------- */

enum counter_idx { CLAIMS = 0, EXITS = 1, NUM_COUNTERS = 2 };

static_assert(NUM_COUNTERS * sizeof(uint64_t) == SMLA_RAGGED_WORKSPACE_BYTES,
              "what callers are told");

static __device__ __forceinline__ void
start_claims(unsigned long long *counters)
{
#pragma unroll
    for (int i = 0; i < NUM_COUNTERS; i++) {
        start_counter(&counters[i]);
    }
}

/* A CTA calls this when it claims no more work. The last CTA to do so takes the tags away. */
static __device__ __forceinline__ void
end_claims(unsigned long long *counters)
{
    if (add_to_counter(&counters[EXITS]) == gridDim.x - 1) {
        counters[CLAIMS] = 0;
        counters[EXITS] = 0;
    }
}

/* ---- Arrivals -------------------------------------------------------------------------------- */

/* Counts one of `count` arrivals; this thread knows that what its CTA leaves is written. Returns
 * whether it is the last one: then what all of them leave is written. One exchange starts, counts
 * and ends, so the CTA that comes last waits for one trip to memory. */
static __device__ __forceinline__ bool
count_arrival(unsigned long long *counter, uint32_t count)
{
    __threadfence();
    unsigned long long old = *(volatile unsigned long long *)counter;
    for (;;) {
        const unsigned long long next = (is_counting(old) ? old : COUNTER_TAG) + 1;
        const bool is_last = (next & COUNTER_MASK) == count;
        const unsigned long long found = atomicCAS(counter, old, is_last ? 0 : next);
        if (found == old) {
            __threadfence();
            return is_last;
        }
        old = found;
    }
}
