/* attention_small_sm90.cu: sparse MLA attention over FP8 rows for Hopper, for small batches: all
 * keys of a split are in shared memory at once.
 *
 * Computes     as attention_sm90.cu, transposed: S^T = K Q^T, P = 2^(scale S - ref),
 *              O^T = V^T P^T, with keys as A in registers and heads as N
 * Shapes       as attention_sm90.cu; a split has SMLA_SM90_SMALL_KEYS columns of both lists at most
 * Shared mem   query   [9][HEADS][128 B]   f16 (RoPE: bf16) times a power of two; 64 dimensions a
 *                      tile, permuted (store_words), 128-byte swizzle
 *              probs   [256][HEADS] f16    swizzled (wgmma.cuh)
 *              rows    [16][16][656 B]     granules of rows as they are in the cache
 *              scales  [16][4][16] f16, maxima of scores and query, sums by granule, masks
 *              32 heads: 228,544 bytes of the 232,448 that an SM has
 * Roles        One CTA for a token, split and head tile; 16 warps, four warpgroups, 128 registers.
 *              Half of the warps ask for rows, 32 each, half for the query, which they store
 *              meanwhile. Then every warp scores the 16 rows of its granule as they come, those of
 *              the first warpgroup first, and a warpgroup adds 128 of the 512 values. No pipeline:
 *              other CTAs of the device are ahead or behind. CTAs of neighbouring head tiles, which
 *              need the same rows, are a cluster of two: each asks for half of them, for both.
 *              mbarriers          arrivals | waited for by
 *              arrived[granule]   16 lanes that ask for its rows | the warp that scores it
 *              maxima             256 threads of the query | the same
 *              stored             256 threads of the query | all
 *              barriers           threads; what they see after it
 *              cluster            all; mbarriers of both CTAs
 *              3 __syncthreads    512; all rows, maxima of the scores, exponents of the scales
 *              4 and vote         512; weights, their sums, scales; whether a thread lost the row
 *              A lost row is done again by half of the threads and the code of attention_sm80.cu.
 * Roofline     Latencies in a row: index, row, scores, values. wgmma with A in registers takes 32
 *              cycles for 64 x 16 of A, however few the heads, so 18 cycles per key for scores and
 *              16 for values; 16 to bring a row to an SM. Measured on an H200, 128 CTAs of 32 heads
 *              and 256 keys, in us: start 0.6, until the query is stored 1.9, until weights are
 *              there 4.6 more, values 2.7, partial rows 0.5 (README.md).
 * Numerics     as attention_sm90.cu, but the reference is the maximum of all keys of the split, so
 *              no score is too large; the largest weight is 2^WEIGHT_EXPONENT. Scores are relative
 *              to the largest scale of the warp's keys, values to that of all keys of the split.
 *              Scales smaller by more than 2^WINDOW_SIZE mark the row, as do NaN, negative and zero
 *              ones. A NaN among the bytes makes its score NaN, and so all results. Partial rows
 *              are rounded to f16: means of values, relative to the largest scale, so by 2^-11, or
 *              where they are small by 2^-25 of the unit; scales above 2^9, where that might be
 *              felt, mark the row.
 *              A row's bits depend on its query, keys, num_splits, H and the device, not on T.
 * Source       as attention_sm90.cu; split-KV decoding (Flash-Decoding)
 */
#include "small_products.cuh"

/* ---- Results ------------------------------------------------------------------------------- */

/* Of head `lane`, a multiple of 2^reference. */
template <typename Shape>
static __device__ __forceinline__ float
find_sum(const small_memory<Shape> *shared, int lane)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SMALL_GRANULES; i++) {
        sum += shared->sums[i][lane % Shape::HEADS];
    }
    return sum;
}

/* Means of values, as f16 in units of the values' power of two: none is above the largest value.
 * `inverse` is 1 / sum of head `lane`. */
template <typename Shape>
static __device__ __forceinline__ void
write_small_row(const attention_launch &launch, const cta_work &work, const lane_place &me,
                float inverse, const float (&out)[2][Shape::HEADS / 2])
{
    uint16_t *const to =
        find_halves(launch, work, 2 * me.column) + 128 * me.group + 32 * me.warp + 4 * me.row;
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = 4 * j + i;
            const int head = 8 * j + 2 * me.column + i;
            const float factor = __shfl_sync(0xFFFFFFFFu, inverse, head);
            const uint32_t words[2] = {ptx_cvt_f16x2(out[0][at] * factor, out[0][at + 2] * factor),
                                       ptx_cvt_f16x2(out[1][at] * factor, out[1][at + 2] * factor)};
            if (head < work.num_heads) {
                smla_store_vector_2(to + (8 * j + i) * 2 * SMLA_KV_LORA_RANK, words);
            }
        }
    }
}

/* A lost row, by the portable code and half of the threads. */
template <typename Shape>
static __device__ __forceinline__ void
redo_small_row(const attention_launch &launch, const cta_work &work, void *memory)
{
    if (threadIdx.x >= CTA_THREADS) {
        return;
    }
    typedef typename Shape::Portable Portable;
    const int num_tiles = ((int)launch.params.num_heads + Portable::HEADS - 1) / Portable::HEADS;
    const int part = work.token * launch.params.num_splits + work.split;
    const int first = work.first_head / Portable::HEADS;
#pragma unroll 1
    for (int i = first; i < min(first + Shape::REDO_TILES, num_tiles); i++) {
        attend_cta<Portable>(launch, (uint32_t)num_tiles, part * num_tiles + i,
                             (shared_memory<Portable> *)memory);
        ptx_barrier(0, CTA_THREADS);
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

/* The maxima of the scores of a warp that has keys, or of one that has none. */
template <typename Shape>
static __device__ __forceinline__ void
score_row(const attention_launch &launch, int num_granules, small_memory<Shape> *shared,
          small_state *state, float (&scores)[Shape::HEADS / 2])
{
    const lane_place me = find_place();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    const uint32_t rows = ptx_shared_address(shared->rows[warp]);
    if (me.group * GROUP_GRANULES < num_granules) {
        state->is_key = wait_for_granule(shared, warp, me);
        find_key_exponent(rows, me, state);
        state->score_factor = launch.wgmma_scale_log2 * power_of_two(state->query_exponent) *
                              power_of_two(state->key_exponent);
        state->is_lost |= !(fabsf(state->score_factor) <= 0x1p100f) ||
                          (fabsf(state->score_factor) < 0x1p-100f && launch.scale_log2 != 0.0f);
        score_keys(shared, rows, me, state, scores);
    }
    raise_tops(shared, me, *state, scores);
    const bool has_keys =
        __any_sync(0xFFFFFFFFu, (state->is_key.first | state->is_key.second) != 0);
    shared->key_exponent[warp] = has_keys ? state->key_exponent : (int)NO_EXPONENT;
}

/* The compiler knows the size of the clusters: the barrier would look for it in memory that no
 * cache has yet. */
template <typename Shape>
__global__ void
__cluster_dims__(Shape::PARTNERS, 1, 1) __launch_bounds__(SMALL_THREADS, 1)
    attend_small(const __grid_constant__ attention_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    small_memory<Shape> *const shared = (small_memory<Shape> *)memory;
    const lane_place me = find_place();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    if (me.lane == 0) {
        ptx_mbarrier_init(ptx_shared_address(&shared->arrived[warp]), GRANULE_KEYS);
        if (warp == 0) {
            ptx_mbarrier_init(ptx_shared_address(&shared->maxima), QUERY_THREADS);
            ptx_mbarrier_init(ptx_shared_address(&shared->stored), QUERY_THREADS);
        }
        ptx_fence_mbarrier_init();
    }
    clear_tops(shared);
    __syncwarp();
    ptx_cluster_arrive(); /* fetch_row waits: a partner's copies complete on its barriers, too */
    const cta_work work = find_work(launch, launch.num_head_tiles, (int)blockIdx.x, Shape::HEADS);
    const int num_granules = count_granules(launch);
    small_state state = {};
    float scores[Shape::HEADS / 2] = {};
    fetch_row(launch, work, num_granules, shared, &state);
    score_row(launch, num_granules, shared, &state, scores);
    __syncthreads(); /* barrier 3 */
    find_small_reference(shared, me.lane, &state);
    weigh_keys(shared, warp, me, &state, scores);
    ptx_fence_async_shared();
    if (__syncthreads_or(state.is_lost)) { /* barrier 4 */
        redo_small_row<Shape>(launch, work, memory);
        return;
    }
    const float sum = find_sum(shared, me.lane);
    if (warp == 0 && me.lane < work.num_heads) {
        leave_halves(launch, work, me.lane, state.reference, state.top, sum,
                     power_of_two(state.key_exponent));
    }
    if (state.key_exponent == NO_EXPONENT) {
        return; /* no key, no partial row */
    }
    float out[2][Shape::HEADS / 2];
    add_small_values(shared, num_granules, me, out);
    write_small_row<Shape>(launch, work, me, sum == 0.0f ? 0.0f : 1.0f / sum, out);
}

/* ---- Launchers ----------------------------------------------------------------------------- */

template <int HEADS, int PARTNERS>
static cudaError_t
launch_shape(const smla_attention_params *params)
{
    typedef small<HEADS, PARTNERS> Shape;
    constexpr int SHARED_BYTES = (int)sizeof(small_memory<Shape>);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    static_assert(sizeof(shared_memory<typename Shape::Portable>) <=
                      offsetof(small_memory<Shape>, arrived),
                  "no barriers where rows are done again");
    static uint64_t allowed;
    const cudaError_t code =
        prepare_attention((const void *)attend_small<Shape>, SHARED_BYTES, HEADS, params, &allowed);
    if (code != cudaSuccess) {
        return code;
    }
    const attention_launch launch = make_launch<HEADS>(params);
    return smla_launch(attend_small<Shape>, launch, count_works(launch), SMALL_THREADS,
                       SHARED_BYTES, params->stream, PARTNERS > 1);
}

/* The head tiles of a token and split, two and two, need the same rows. */
template <int HEADS>
static cudaError_t
launch_small(const smla_attention_params *params)
{
    return smla_count_parts(params->num_heads, HEADS) % 2 == 0 ? launch_shape<HEADS, 2>(params)
                                                               : launch_shape<HEADS, 1>(params);
}

cudaError_t
smla_attend_sm90_small_32(const smla_attention_params *params)
{
    return launch_small<32>(params);
}

cudaError_t
smla_attend_sm90_small_16(const smla_attention_params *params)
{
    return launch_small<16>(params);
}
