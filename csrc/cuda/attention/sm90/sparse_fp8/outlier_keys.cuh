/* outlier_keys.cuh: takes outlier keys, which are much larger than the others, first where
 * references jump.
 *
 * A few rows of a cache may be a hundred times the others. Then some head has a new maximum in two
 * of three blocks, all through the list, and each time references move (fp8_growth.cuh). But
 * nobody needs keys in the order of their list. So when a reference has jumped, the gather warps
 * look at the scales of the keys that are left. The keys whose scales are much larger than usual
 * come next. After them, references seldom move again.
 *
 * The order may not depend on times, because results would then depend on them. The group that
 * raises references marks its block in the ring (mark_reference_jump). A gather warp reads a mark
 * when it has filled the block's first granule again: by then the block is done with, whatever the
 * times. A look takes 10,000 cycles, mostly for 1500 scales that lie far apart. The ring keeps the
 * consumers busy for as long.
 *
 * This is for 64 heads. With fewer heads, the ring holds too few cycles of products to hide a look
 * behind, and fewer blocks have a new maximum. And it is for the main list of calls whose rows are
 * evenly spaced, without a block table. The usual way from an index to a row takes more registers
 * than gather warps have.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/fp8_common.cuh"

/* By how much a reference, an exponent, moves in a jump. Without outlier keys it hardly ever moves
 * so far. */
#define REFERENCE_JUMP 64.0f

enum {
    OUTLIER_BITS = 3, /* a key is an outlier if its scale is 2^3 times the usual one */
    LOOKAHEAD = 16,   /* chunks per look */
    USUAL = 4,        /* the first chunks of a look, which tell the usual scale */
    MIN_STEPS = 8,    /* the fewest steps that a list must have left for a look */
};

static_assert((int)LOOKAHEAD <= (int)SMLA_WARP_LANES, "outlier_keys has a lane for each");
static_assert(MAX_ITEMS <= 1 << 9, "mark_of_step has as many bits for an item's number");

/* ---- Marks ---------------------------------------------------------------------------------- */

/* A number for a step of an item, never 0. `left`: the item's steps from this one on. */
static __device__ __forceinline__ uint32_t
mark_of_step(int item_idx, int32_t left)
{
    return ((uint32_t)item_idx << 23) + (uint32_t)left;
}

/* Consumers: if is_on, tells the gather warps that a reference has jumped at the group's block. */
template <typename Shape>
static __device__ __forceinline__ void
mark_reference_jump(fp8_memory<Shape> *shared, const consumer<Shape> &state, bool is_on)
{
    if (Shape::OUTLIERS_FIRST && is_on) {
        uint8_t *const reference_jump = (uint8_t *)&shared->ring->reference_jump + state.own;
        /* atomic, because racecheck accepts it when several threads do it */
        atomicExch((uint32_t *)reference_jump,
                   mark_of_step(shared->item_idx, (int32_t)(state.phase / ONE_STEP)));
    }
}

/* Gather warps: whether a reference has jumped at group 0's block of the step before the one just
 * gathered, or at group 1's block of the step before that. The first granules of both blocks were
 * filled again in this step. `slot` is the number of the next granule, `mark` the former step's. */
template <typename Shape>
static __device__ __forceinline__ bool
has_reference_jumped(uint32_t ring, uint32_t slot, uint32_t mark)
{
    constexpr int BEHIND = 2 * STEP_GRANULES - Shape::GRANULES;
    static_assert(BEHIND > 0 && BEHIND <= BLOCK_GRANULES, "both were filled in this step");
    const int found = (int)slot - BEHIND;
    const int first = found < 0 ? found + Shape::GRANULES : found;
    const int second = first - BLOCK_GRANULES + (first < BLOCK_GRANULES ? Shape::GRANULES : 0);
    const uint32_t at = ring + (uint32_t)offsetof(typename Shape::Granule, reference_jump);
    return __any_sync(0xFFFFFFFFu,
                      ptx_load_shared_4(at + first * Shape::GRANULE_BYTES) == mark ||
                          ptx_load_shared_4(at + second * Shape::GRANULE_BYTES) == mark + 1);
}

/* ---- Keys ----------------------------------------------------------------------------------- */

/* What a gather warp knows about the next chunks of a list. */
typedef struct outlier_keys {
    uint32_t taken; /* a bit for each key taken from the chunk whose number is the lane's */
    int32_t chunk;  /* number of the next chunk; from LOOKAHEAD on, no key of it was taken */
} outlier_keys;

/* Brings the first scale of each key in the next chunks, a word per chunk, to shared memory at the
 * lane's address `to`. The word is 0 where there is no key. */
template <typename Shape>
static __device__ __forceinline__ void
fetch_scales(const fp8_launch &launch, const key_stream &stream, uint32_t to)
{
    const row_span &span = launch.lists[0];
    const int32_t stride = ptx_forget(launch.base.column_stride);
    const uint32_t limit = launch.base.lists[0].index_limit;
    const uint8_t *const scales = span.lowest + Shape::Row::SCALE_OFFSET;
#pragma unroll 4
    for (int i = 0; i < LOOKAHEAD;
         i++) { /* first the indices, because there are no registers for many of them */
        ptx_cp_async_4_or_zero(to + 128 * i, stream.at + i * stride, stream.left > i * stride);
    }
    ptx_cp_async_wait_all();
#pragma unroll 2
    for (int i = 0; i < LOOKAHEAD; i++) {
        const uint32_t index = ptx_load_shared_4(to + 128 * i);
        const uint32_t row = index * span.pitch + span.bias;
        ptx_cp_async_4_or_zero(to + 128 * i, scales + (uint64_t)row * 16,
                               stream.left > i * stride && index < limit);
    }
    ptx_cp_async_wait_all();
}

/* The exponent of a scale that fetch_scales has brought. */
static __device__ __forceinline__ uint32_t
load_level(uint32_t from)
{
    return ptx_load_shared_4(from) >> 23 & 0xFF;
}

/* The least exponent of an outlier's scale: OUTLIER_BITS above the mean of the first exponents. */
static __device__ __forceinline__ uint32_t
find_bound(uint32_t levels)
{
    uint32_t sum = 0;
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < USUAL; i++) {
        const uint32_t level = load_level(levels + 128 * i);
        sum += level;
        count += level != 0;
    }
    count = __reduce_add_sync(0xFFFFFFFFu, count);
    sum = __reduce_add_sync(0xFFFFFFFFu, sum);
    return (uint32_t)__fdividef((float)sum, fmaxf((float)count, 1.0f)) + OUTLIER_BITS;
}

/* Looks at the keys of the next chunks, and takes up to 32 outliers behind the keys that the warp
 * holds. It holds at most 31, because a step has just been handed out. Scales come to shared memory
 * at `to`. */
template <typename Shape>
static __device__ __forceinline__ void
take_outlier_keys(const fp8_launch &launch, uint32_t to, int lane, key_stream *stream,
                  outlier_keys *outliers)
{
    stream->over = NO_INDEX;
    const uint32_t levels = to + 4 * lane;
    fetch_scales<Shape>(launch, *stream, levels);
    const uint32_t bound = find_bound(levels);
    uint32_t taken = 0;
#pragma unroll 4
    for (int i = 0; i < LOOKAHEAD; i++) {
        const uint32_t are_outliers =
            __ballot_sync(0xFFFFFFFFu, load_level(levels + 128 * i) >= bound);
        taken = lane == i ? are_outliers : taken;
    }
    /* keys taken up to the lane's chunk; arbitrary in lanes without a chunk */
    const uint32_t last = smla_scan_lanes<LOOKAHEAD>((uint32_t)__popc(taken), lane);
    taken = last <= SMLA_WARP_LANES ? taken : 0;
    const uint32_t total = __reduce_add_sync(0xFFFFFFFFu, __popc(taken));
    *outliers = outlier_keys{taken, 0};
    if (total != 0) {
        /* lane l finds the l-th of the keys taken */
        int chunk = 0;
#pragma unroll
        for (int width = LOOKAHEAD / 2; width > 0; width /= 2) {
            const uint32_t below = __shfl_sync(0xFFFFFFFFu, last, chunk + width - 1);
            chunk += (uint32_t)lane >= below ? width : 0;
        }
        const uint32_t keys = __shfl_sync(0xFFFFFFFFu, taken, chunk);
        const uint32_t first = __shfl_sync(0xFFFFFFFFu, last, chunk) - __popc(keys);
        const int column = find_nth_bit_apart(keys, lane - (int)first);
        const int32_t *const at =
            (const int32_t *)__shfl_sync(0xFFFFFFFFu, (unsigned long long)stream->at, column);
        uint32_t index;
        ptx_load_4_cached(at + chunk * launch.base.column_stride, (uint32_t)lane < total, NO_INDEX,
                          &index);
        hold_keys<true>(stream, 0xFFFFFFFFu >> (SMLA_WARP_LANES - total), index, lane);
        stream->to_come -= (int32_t)total;
    }
    load_next(stream); /* loaded again, so that no register keeps it meanwhile */
}

/* take_step that skips the keys that take_outlier_keys has taken. */
static __device__ __forceinline__ uint32_t
take_other_step(const attention_launch &launch, int list, key_stream *stream,
                outlier_keys *outliers, int lane)
{
#pragma unroll 1
    while (stream->num_waiting < SMLA_WARP_LANES && stream->to_come > 0) {
        const uint32_t taken =
            __shfl_sync(0xFFFFFFFFu, outliers->taken, outliers->chunk & (SMLA_WARP_LANES - 1));
        const uint32_t others = outliers->chunk < LOOKAHEAD ? ~taken : 0xFFFFFFFFu;
        outliers->chunk++;
        take_keys<false>(stream, launch.lists[list].index_limit, launch.column_stride, lane,
                         others);
    }
    return hand_out_step(stream, lane);
}
