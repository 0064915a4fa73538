/* top_k_keys.cuh: logits as keys, and the part of a row that a warp has.
 *
 * A logit has a key, an integer that grows with it. The key of NaN is 1 << 16, which is below that
 * of -inf; -0 has the key of 0. Key 0 belongs to no logit. The low 16 bits of the keys of bf16
 * logits are 0, so shared memory has only the upper halves. Stored keys are as large as logits.
 *
 * The row is cut into vectors of 16 bytes, aligned in memory, so its first and last vector may be
 * partial. Elements of these vectors that are no logits of the row are not read and have key 0.
 * Each warp of the cluster has the same number of neighbouring vectors, in steps of one vector per
 * lane.
 */
#pragma once

#include "cuda/topk/top_k_rows.cuh"

namespace {

enum {
    BLOCK_THREADS = 512,
    NUM_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    VECTOR_BYTES = 16,
    COPIES = 8, /* vectors per thread whose copies from global memory are under way */
    BATCH = 4,  /* vectors per thread that are handled together */
};

/* ---- Keys ---------------------------------------------------------------------------------- */

/* The key of a logit, from its fp32 bits. */
__device__ __forceinline__ uint32_t
make_key(uint32_t bits)
{
    const uint32_t size = bits & 0x7FFFFFFFu;
    const uint32_t flip = (uint32_t)((int32_t)bits >> 31) | 0x80000000u;
    const uint32_t key = size == 0 ? 0x80000000u : bits ^ flip;
    return size > 0x7F800000u ? 0x10000u : key;
}

template <bool IS_BF16> struct logit_vector {
    static constexpr int ELEMENT_BYTES = IS_BF16 ? 2 : 4;
    static constexpr uint32_t ELEMENTS = VECTOR_BYTES / ELEMENT_BYTES;

    /* Converts logits to keys, both as they lie in memory. */
    static __device__ __forceinline__ void encode(uint32_t words[4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t word = words[i];
            words[i] =
                IS_BF16 ? make_key(word << 16) >> 16 | (make_key(word & 0xFFFF0000u) & 0xFFFF0000u)
                        : make_key(word);
        }
    }

    /* Returns key i of a vector of keys. */
    static __device__ __forceinline__ uint32_t key(const uint32_t words[4], int i)
    {
        return !IS_BF16 ? words[i] : i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u;
    }

    /* Loads logit i from global memory, and returns its key. */
    static __device__ __forceinline__ uint32_t load(const void *logits, uint64_t i)
    {
        return IS_BF16 ? make_key((uint32_t)__ldg((const uint16_t *)logits + i) << 16) & 0xFFFF0000u
                       : make_key(__ldg((const uint32_t *)logits + i));
    }
};

/* ---- The part of a warp -------------------------------------------------------------------- */

/* The part of a row that a warp has. Elements are counted from the row's first vector on. */
typedef struct row_part {
    const uint8_t *vectors; /* the row's first vector */
    uint32_t begin;         /* element of the row's first logit, which lies in the first vector */
    uint32_t end;           /* one past the row's last logit */
    uint32_t first_vector;  /* the warp's first vector */
    uint32_t num_steps;     /* steps of the warp, as many as any other warp of the cluster has */
    /* The number of steps, from the first on, whose keys are in shared memory. */
    uint32_t memory_steps;
    uint32_t keys; /* the address of the warp's first key in shared memory */
} row_part;

template <bool IS_BF16>
__device__ __forceinline__ row_part
open_part(const uint8_t *logits, uint32_t count, uint32_t warp, uint32_t num_warps,
          uint32_t max_memory_steps, uint32_t cta_keys)
{
    using vector = logit_vector<IS_BF16>;
    row_part part;
    const uint32_t extra_bytes = (uint32_t)(uintptr_t)logits % VECTOR_BYTES;
    part.vectors = logits - extra_bytes;
    part.begin = extra_bytes / vector::ELEMENT_BYTES;
    part.end = part.begin + count;
    const uint32_t num_vectors = (part.end + vector::ELEMENTS - 1) / vector::ELEMENTS;
    const uint32_t step_vectors = num_warps * SMLA_WARP_LANES;
    part.num_steps = (num_vectors + step_vectors - 1) / step_vectors;
    part.first_vector = warp * part.num_steps * SMLA_WARP_LANES;
    part.memory_steps = part.num_steps < max_memory_steps ? part.num_steps : max_memory_steps;
    part.keys = cta_keys + warp % NUM_WARPS * part.memory_steps * (SMLA_WARP_LANES * VECTOR_BYTES);
    return part;
}

__device__ __forceinline__ uint32_t
vector_of(const row_part &part, uint32_t step)
{
    return part.first_vector + step * SMLA_WARP_LANES + threadIdx.x % SMLA_WARP_LANES;
}

/* The address in shared memory of this thread's vector of a step. */
__device__ __forceinline__ uint32_t
address_of(const row_part &part, uint32_t step)
{
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
    return part.keys + (step * SMLA_WARP_LANES + lane) * VECTOR_BYTES;
}

/* Whether all elements of a vector are logits of the row. */
template <bool IS_BF16>
__device__ __forceinline__ bool
is_whole(const row_part &part, uint32_t vector)
{
    constexpr uint32_t ELEMENTS = logit_vector<IS_BF16>::ELEMENTS;
    return vector * ELEMENTS >= part.begin && (vector + 1) * ELEMENTS <= part.end;
}

/* Loads the keys of a partial vector, element by element. */
template <bool IS_BF16>
__device__ __forceinline__ void
load_partial_vector(const row_part &part, uint32_t vector, uint32_t words[4])
{
    using traits = logit_vector<IS_BF16>;
    words[0] = words[1] = words[2] = words[3] = 0;
#pragma unroll
    for (uint32_t i = 0; i < traits::ELEMENTS; i++) {
        const uint32_t at = vector * traits::ELEMENTS + i;
        if (at >= part.begin && at < part.end) {
            const uint32_t key = traits::load(part.vectors, at);
            words[IS_BF16 ? i / 2 : i] |= IS_BF16 && i % 2 == 0 ? key >> 16 : key;
        }
    }
}

/* ---- Reading keys -------------------------------------------------------------------------- */

template <bool IS_BF16>
__device__ __forceinline__ void
start_copy(const row_part &part, uint32_t step)
{
    const uint32_t vector = vector_of(part, step);
    if (step < part.memory_steps && is_whole<IS_BF16>(part, vector)) {
        ptx_cp_async_16(address_of(part, step), part.vectors + (uint64_t)vector * VECTOR_BYTES);
    }
    /* Where nothing is copied, an empty group keeps the count of groups right. */
    ptx_cp_async_commit();
}

/* Converts the copied logits of a step to keys, in shared memory. Until a barrier, each thread
 * accesses only vectors of its own. */
template <bool IS_BF16>
__device__ __forceinline__ void
finish_copy(const row_part &part, uint32_t step, uint32_t words[4])
{
    const uint32_t vector = vector_of(part, step);
    if (is_whole<IS_BF16>(part, vector)) {
        ptx_load_shared_16(address_of(part, step), words);
        logit_vector<IS_BF16>::encode(words);
    } else {
        load_partial_vector<IS_BF16>(part, vector, words);
    }
    ptx_store_shared_16(address_of(part, step), words);
}

/* Loads the keys of steps that are not in shared memory, from L2. All loads start before the first
 * is used. */
template <bool IS_BF16>
__device__ __forceinline__ void
load_batch(const row_part &part, uint32_t step, uint32_t words[BATCH][4])
{
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const uint32_t vector = vector_of(part, step + i);
        if (step + i >= part.memory_steps && step + i < part.num_steps &&
            is_whole<IS_BF16>(part, vector)) {
            smla_load_vector_4(part.vectors + (uint64_t)vector * VECTOR_BYTES, words[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const uint32_t vector = vector_of(part, step + i);
        if (step + i < part.memory_steps || step + i >= part.num_steps) {
            continue;
        }
        if (is_whole<IS_BF16>(part, vector)) {
            logit_vector<IS_BF16>::encode(words[i]);
        } else {
            load_partial_vector<IS_BF16>(part, vector, words[i]);
        }
    }
}

/* Reads the keys of BATCH steps; keys past the warp's last step are 0. */
template <bool IS_BF16>
__device__ __forceinline__ void
read_batch(const row_part &part, uint32_t step, uint32_t words[BATCH][4])
{
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        ptx_load_shared_16_if(address_of(part, step + i), step + i < part.memory_steps, words[i]);
    }
    if (step + BATCH > part.memory_steps && part.memory_steps < part.num_steps) {
        load_batch<IS_BF16>(part, step, words);
    }
}

/* Reads the key of the warp's element `at`. */
template <bool IS_BF16>
__device__ __forceinline__ uint32_t
read_key(const row_part &part, uint32_t at)
{
    using traits = logit_vector<IS_BF16>;
    if (at < part.memory_steps * (SMLA_WARP_LANES * traits::ELEMENTS)) {
        const uint32_t address = part.keys + at * traits::ELEMENT_BYTES;
        return IS_BF16 ? ptx_load_shared_2(address) << 16 : ptx_load_shared_4(address);
    }
    const uint32_t element = part.first_vector * traits::ELEMENTS + at;
    const bool is_logit = element >= part.begin && element < part.end;
    return is_logit ? traits::load(part.vectors, element) : 0;
}

} // namespace
