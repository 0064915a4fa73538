/* resident_stream.cuh: the end of a row that is too long to be resident in its cluster.
 *
 * The streamed part is what follows the two resident parts of a row. It is cut into shares of
 * neighbouring vectors, one per warp, in the order of warps. A warp reads its share again whenever
 * keys are counted, compared or written: once from memory, then from L2.
 */
#pragma once

#include "cuda/ptx/prefetch.cuh"
#include "cuda/topk/resident_digits.cuh"

namespace {

/* The row takes the keys of lower order than `order`, and the first `num_equal` keys of this
 * order. */
typedef struct key_threshold {
    uint32_t order;
    uint32_t num_equal;
} key_threshold;

/* How many keys are before the threshold, and how many are equal to it. */
typedef struct key_counts {
    uint32_t before;
    uint32_t equal;
} key_counts;

__device__ __forceinline__ uint32_t
order_of(uint32_t key)
{
    return (int32_t)key < 0 ? ~key : key ^ 0x80000000u;
}

/* Vectors that a lane loads before it uses the first of them. */
constexpr uint32_t STREAM_BATCH = 2;

/* The keys of a warp's share. A thread keeps only pointers to the row and the share, to spare
 * registers. */
template <bool IS_BF16> struct streamed_keys {
    using type = logit_type<IS_BF16>;

    const resident_row *row; /* the row, in shared memory */
    vector_range *shares;    /* the share of each warp of the CTA, in shared memory */

    /* Computes the share of warp `warp` of `num_warps` after the first num_resident vectors, and
     * starts to bring it to L2. All shares, the last one too, are whole batches of all lanes. Past
     * the end of the row there are no logits. */
    __device__ __forceinline__ void open(uint32_t num_resident, uint32_t warp, uint32_t num_warps)
    {
        constexpr uint32_t WHOLE = STREAM_BATCH * SMLA_WARP_LANES;
        const uint32_t num_vectors = row->num_vectors;
        const uint32_t num_left = num_vectors < num_resident ? 0 : num_vectors - num_resident;
        const uint32_t batches = (num_left + num_warps * WHOLE - 1) / (num_warps * WHOLE);
        const uint32_t first = num_resident + warp * batches * WHOLE;
        if (threadIdx.x % SMLA_WARP_LANES == 0) {
            const uint32_t end = first < num_vectors ? first + batches * WHOLE : first;
            const uint32_t end_whole = min(end, row->end_whole);
            shares[threadIdx.x / SMLA_WARP_LANES] = {first, end};
            if (first < end_whole) {
                ptx_bulk_prefetch_l2(row->vectors + (uint64_t)first * VECTOR_BYTES,
                                     (end_whole - first) * VECTOR_BYTES);
            }
        }
        __syncwarp();
    }

    /* Loads the logits of a vector that belongs to the row only in part. */
    __device__ __forceinline__ void load_partial_vector(uint32_t vector, uint32_t words[4]) const
    {
        const uint8_t *const from = row->vectors + (uint64_t)vector * VECTOR_BYTES;
        const uint32_t count = row->end - vector * type::PER_VECTOR;
#pragma unroll
        for (uint32_t i = 0; i < type::PER_VECTOR; i++) {
            if (i < count && IS_BF16) {
                const uint32_t bits = __ldg((const uint16_t *)from + i);
                words[i / 2] = i % 2 == 0 ? (words[i / 2] & 0xFFFF0000u) | bits
                                          : (words[i / 2] & 0xFFFFu) | bits << 16;
            } else if (i < count) {
                words[i] = __ldg((const uint32_t *)from + i);
            }
        }
    }

    /* Calls use(vector, keys) for all vectors of the share, all lanes of the warp together, 32
     * neighbouring vectors at a time. Elements outside the row get the last key. */
    template <typename Use> __device__ __forceinline__ void visit_vectors(const Use &use) const
    {
        const vector_range *const share = &shares[ptx_thread() / SMLA_WARP_LANES];
        const uint32_t end = row->end / type::PER_VECTOR; /* one past the last whole vector */
        uint32_t first = share->first + ptx_thread() % SMLA_WARP_LANES;
#pragma unroll 1
        /* The same condition for all lanes. */
        for (; first < share->end; first += STREAM_BATCH * SMLA_WARP_LANES) {
            uint32_t words[STREAM_BATCH][4];
#pragma unroll
            for (uint32_t i = 0; i < STREAM_BATCH; i++) {
                const uint32_t vector = first + i * SMLA_WARP_LANES;
                words[i][0] = words[i][1] = words[i][2] = words[i][3] = NO_LOGIT;
                if (vector < end) {
                    smla_load_vector_4(row->vectors + (uint64_t)vector * VECTOR_BYTES, words[i]);
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < STREAM_BATCH; i++) {
                const uint32_t vector = first + i * SMLA_WARP_LANES;
                uint32_t keys[type::PER_VECTOR];
                if (vector == end && row->end % type::PER_VECTOR != 0) {
                    load_partial_vector(vector, words[i]);
                }
                type::decode(words[i], keys);
                use(vector, keys);
            }
        }
    }

    /* Calls use(i, key) for all keys; the index i has no meaning for streamed keys. */
    template <typename Use> __device__ __forceinline__ void visit(const Use &use) const
    {
        visit_vectors([&](uint32_t, const uint32_t *keys) {
#pragma unroll
            for (uint32_t i = 0; i < type::PER_VECTOR; i++) {
                use(i, keys[i]);
            }
        });
    }

    /* Finds the keys of a vector that are before the threshold, and those that equal it, as masks
     * with a bit per key. */
    __device__ __forceinline__ void compare(uint32_t vector, const uint32_t *keys,
                                            const key_threshold &threshold, uint32_t *before,
                                            uint32_t *equal) const
    {
        const uint32_t end = threshold.num_equal == 0 ? 0 : row->end;
        *before = *equal = 0;
#pragma unroll
        for (uint32_t i = 0; i < type::PER_VECTOR; i++) {
            const uint32_t order = order_of(keys[i]);
            const bool is_logit = vector * type::PER_VECTOR + i < end;
            *before |= (order < threshold.order ? 1u : 0u) << i;
            *equal |= (order == threshold.order && is_logit ? 1u : 0u) << i;
        }
    }

    /* Counts the keys of the warp's share; all lanes get the result. */
    __device__ __forceinline__ key_counts count(const key_threshold &threshold) const
    {
        key_counts counts = {};
        visit_vectors([&](uint32_t vector, const uint32_t *keys) {
            uint32_t before;
            uint32_t equal;
            compare(vector, keys, threshold, &before, &equal);
            counts.before += __popc(before);
            counts.equal += __popc(equal);
        });
        return {__reduce_add_sync(ALL_LANES, counts.before),
                __reduce_add_sync(ALL_LANES, counts.equal)};
    }
};

} // namespace
