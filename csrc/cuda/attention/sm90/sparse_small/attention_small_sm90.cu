/* attention_small_sm90.cu: sparse MLA attention over FP8 rows for Hopper, for small batches: all
 * keys of a split are in shared memory at once.
 *
 * Computes     as attention_fp8_sm90.cu, transposed: S^T = K Q^T, P = 2^(scale S - ref),
 *              O^T = V^T P^T, with keys as A in registers and heads as N
 * Shapes       as attention_fp8_sm90.cu; a split has at most SMLA_SM90_SMALL_KEYS columns of both
 *              lists
 * Shared mem   query   [9][HEADS][128 B]   f16 (RoPE: bf16) times a power of two; 64 dimensions per
 *                      tile, permuted (store_words), 128-byte swizzle
 *              probs   [256][HEADS] f16    swizzled (wgmma.cuh)
 *              rows    [16][16][656 B]     granules of cache rows as they are in the cache; fp8_v4:
 *                      592 bytes per row, of which 8 are its scales
 *              scales  [16][4][16] f16, maxima of scores and query, sums by granule, masks; fp8_v4:
 *                      8 query tiles, and 8 scales per row
 *              32 heads: 226,304 bytes of the 232,448 that an SM has
 *              64 heads: all of them. Weights replace the query there. Rows of 656 bytes are cut
 *              to 528: half of the RoPE parts lie apart, half are in registers (fetch_rope).
 * Roles        One CTA per token, split and head tile; 16 warps, four warpgroups, 96 registers, so
 *              that CTAs of the combine kernel fit beside it. A CTA without an item makes an idle
 *              SM look the same to them (keep_sm). With 64 heads a thread has 128 registers, and
 *              the combine kernel waits for the CTAs' ends. Half of the warps ask for rows, 32
 *              each, while the other half store the query. Then every warp scores the 16 rows of
 *              its granule when they have come, the first warpgroup first. A warpgroup adds 128 of
 *              the 512 values. A CTA has no pipeline: other CTAs are ahead or behind. Two
 *              neighbouring head tiles, which need the same rows, are a cluster: each asks for
 *              half, for both.
 *              mbarriers          arrivals | waited for by
 *              arrived[granule]   16 lanes that ask for its rows (fp8_v4: twice, the second time
 *                                 with the scales) | the warp that scores it
 *              maxima             256 threads of the query | the same threads
 *              stored             256 threads of the query | all threads
 *              barriers           threads; what they see after it
 *              cluster            all; mbarriers of both CTAs
 *              3 __syncthreads    512; all rows, maxima of the scores, exponents of the scales
 *              4 and vote         512; weights, their sums, scales; the need of a fallback
 *              The fallback (Numerics): half of the threads run the code of attention_sm80.cu.
 * Roofline     Latencies one after the other: index, row, scores, values. wgmma with A in registers
 *              takes 32 cycles for 64 x 16 of A, however few the heads, so 18 cycles per key for
 *              scores and 16 for values; 16 to bring a row to an SM. Measured on an H200, 128 CTAs
 *              of 32 heads and 256 keys: the query is stored after 2.0 us, the weights 4.3 us
 *              later; values take 2.8 us and partial rows 0.5 us (README.md). 128 CTAs of 64 heads
 *              wait 8 us for their rows, which are twice as many.
 * Numerics     as attention_fp8_sm90.cu, but the reference is the maximum of all keys of the split,
 *              so no score is too large. The largest weight is 2^WEIGHT_EXPONENT. Scores are
 *              relative to the largest scale of the warp's keys, values to that of all keys of the
 *              split.
 *              Products of much smaller scales lose bits, and may be off by 2^-25 of the unit;
 *              where that might be felt, with scales above 2^9, the fallback runs. A NaN among
 *              scales or bytes makes its score NaN, and so all results. Partial rows are means of
 *              values in f16, relative to the largest scale. They are off by 2^-11, or where they
 *              are small by 2^-25 of the unit. RoPE values of fp8_v4 become f16 in this unit once
 *              it is known (keep_small_rope). An item with one key leaves that key's value in fp32.
 *              A row's bits depend on its query, keys, num_splits, H and the device, not on T.
 * Source       as attention_fp8_sm90.cu; split-KV decoding (Flash-Decoding)
 */
#include "cuda/attention/sm90/sparse_small/small_products.cuh"

/* How registers are shared out. With fewer than 64 heads, some are left to the combine kernel. */
template <bool IS_FULL> struct small_registers {
    static constexpr int PER_THREAD = IS_FULL ? 128 : 96;
    static constexpr int ROOM = IS_FULL ? 0 : SMLA_ROOM_REGISTERS;
    static constexpr int BOUND_THREADS = IS_FULL ? 512 : 640; /* __launch_bounds__ gets it */
    static constexpr int FALLBACK = 168; /* registers of a thread that runs the fallback */
    static constexpr int REST = IS_FULL ? 88 : 24; /* registers of the other threads */
    static_assert(SMALL_THREADS * PER_THREAD + ROOM == SMLA_SM_REGISTERS, "all of an SM");
    static_assert(CTA_THREADS * FALLBACK + (SMALL_THREADS - CTA_THREADS) * REST ==
                      SMALL_THREADS * PER_THREAD,
                  "setmaxnreg shares out what the launch gave");
};

enum {
    KEEP_NS = 2000, /* the combine kernel comes 1.0 to 1.7 us after the wait for the grids */
    NAP_NS = 500,
};

/* ---- Results ------------------------------------------------------------------------------- */

/* The sum of a head's weights, as a multiple of 2^reference. */
template <typename Shape>
static __device__ __forceinline__ float
find_sum(const small_memory<Shape> *shared, int head)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SMALL_GRANULES; i++) {
        sum += shared->sums[i][head];
    }
    return sum;
}

/* One warp leaves the states of the partial rows. `sums` has the sums of the lane's heads. */
template <typename Shape>
static __device__ __forceinline__ void
leave_states(const attention_launch &launch, const work_item &item, int warp, int lane,
             const small_state<Shape> &state, const float (&sums)[Shape::HEAD_SETS])
{
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        const int head = lane + SMLA_WARP_LANES * set;
        if (warp == 0 && head < item.num_heads) {
            leave_halves(launch, item, head, state.reference[set], state.row_max[set], sums[set],
                         power_of_two(state.key_exponent));
        }
    }
}

/* Writes means of values, as f16 in units of the values' power of two. No mean is above the largest
 * value. `inverse` is 1 / sum for each of the lane's heads. */
template <typename Shape>
static __device__ __forceinline__ void
write_small_row(const attention_launch &launch, const work_item &item, const thread_index &me,
                const float (&inverse)[Shape::HEAD_SETS], const float (&out)[2][Shape::HEADS / 2])
{
    uint16_t *const to =
        find_halves(launch, item, 2 * me.column) + 128 * me.group + 32 * me.warp + 4 * me.row;
#pragma unroll
    for (int j = 0; j < Shape::HEADS / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = 4 * j + i;
            const int head = 8 * j + 2 * me.column + i;
            const float factor = __shfl_sync(0xFFFFFFFFu, inverse[8 * j / SMLA_WARP_LANES], head);
            const uint32_t words[2] = {ptx_cvt_f16x2(out[0][at] * factor, out[0][at + 2] * factor),
                                       ptx_cvt_f16x2(out[1][at] * factor, out[1][at + 2] * factor)};
            if (head < item.num_heads) {
                smla_store_vector_2(to + (8 * j + i) * 2 * SMLA_KV_LORA_RANK, words);
            }
        }
    }
}

/* Writes the partial rows of an item with one key, as fp32 because halves would lose bits of its
 * value. row_maxima has the scores, which are finite. Each warp has every 16th head. */
template <typename Shape>
static __device__ __forceinline__ void
leave_only_row(const attention_launch &launch, const work_item &item,
               const small_memory<Shape> *shared)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const uint32_t is_key = lane < count_granules(launch) ? shared->is_key[lane] : 0;
    const int granule = __ffs((int)__ballot_sync(0xFFFFFFFFu, is_key != 0)) - 1;
    const int number = __ffs((int)__shfl_sync(0xFFFFFFFFu, is_key, granule)) - 1;
    const list_entry entry = find_key(launch, item, GRANULE_KEYS * granule + number);
    const listed_key only = {slot_of_index(launch, entry.list, item.token,
                                           (int32_t)load_index(entry)),
                             entry.list};
    lane_part key;
    lane_part value;
    float scales[2];
    load_only_key<false, Shape::Row::ROPE_IS_VALUE>(launch, only, lane, &key, scales);
    scale_part(key, scales, &value);
#pragma unroll 1
    for (int head = (int)threadIdx.x / SMLA_WARP_LANES; head < item.num_heads;
         head += SMALL_WARPS) {
        const int64_t row = item.first_row + head;
        const float row_max = float_of_order(shared->row_maxima[head]);
        const float sum = ptx_exp2(row_max - softmax_reference(row_max));
        if (lane == 0) {
            *(float2 *)(launch.partials.state + 2 * row) = make_float2(row_max, sum);
        }
        store_part(launch.partials.out + row * SMLA_KV_LORA_RANK, lane, value, sum);
    }
}

/* The fallback: half of the threads run the portable code with the others' registers. */
template <typename Shape>
static __device__ __forceinline__ void
run_small_fallback(const attention_launch &launch, const work_item &item, void *memory)
{
    typedef small_registers<Shape::IS_FULL> registers;
    if (threadIdx.x >= CTA_THREADS) {
        ptx_release_registers<registers::REST>();
        return;
    }
    ptx_claim_registers<registers::FALLBACK>();
    typedef typename Shape::Portable Portable;
    const int num_tiles =
        ((int)launch.params.queries.num_heads + Portable::HEADS - 1) / Portable::HEADS;
    const int part = item.token * launch.params.results.num_splits + item.split;
    const int first = item.first_head / Portable::HEADS;
#pragma unroll 1
    for (int i = first; i < min(first + Shape::FALLBACK_TILES, num_tiles); i++) {
        attend_cta<Portable>(launch, (uint32_t)num_tiles, part * num_tiles + i, WHOLE_ITEM,
                             (shared_memory<Portable> *)memory);
        ptx_barrier(0, CTA_THREADS);
    }
}

/* leave_only_row as a called function. */
template <typename Shape>
static __device__ __noinline__ void
leave_only_row_apart(const attention_launch &launch, work_item item,
                     const small_memory<Shape> *shared)
{
    leave_only_row(launch, item, shared);
}

/* Ends an item that has one key or needs the fallback. */
template <typename Shape>
static __device__ __forceinline__ void
finish_rare_row(const attention_launch &launch, const work_item &item, bool needs_fallback,
                void *memory)
{
    if (!Shape::LEAVES_ONLY || __syncthreads_or(needs_fallback)) {
        run_small_fallback<Shape>(launch, item, memory);
    } else if constexpr (Shape::CALLS_RARE) { /* a called function calls no other */
        leave_only_row(launch, item, (const small_memory<Shape> *)memory);
    } else {
        leave_only_row_apart(launch, item, (const small_memory<Shape> *)memory);
    }
}

/* finish_rare_row as a called function, because other launches would jump over its code. */
template <typename Shape>
static __device__ __noinline__ void
finish_rare_row_apart(const attention_launch &launch, work_item item, bool needs_fallback,
                      void *memory)
{
    finish_rare_row<Shape>(launch, item, needs_fallback, memory);
}

/* ---- Kernel -------------------------------------------------------------------------------- */

/* Scores the warp's keys, if it has any. Stores the scores' maxima and the keys' exponent. */
template <typename Shape>
static __device__ __forceinline__ void
score_row(const attention_launch &launch, int num_granules, small_memory<Shape> *shared,
          small_state<Shape> *state, float (&scores)[Shape::HEADS / 2])
{
    const thread_index me = find_thread_index();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    const uint32_t rows = ptx_shared_address(shared->rows[warp]);
    if (me.group * GROUP_GRANULES < num_granules) {
        state->is_key = wait_for_granule(shared, warp, me);
        load_rope(shared, warp, me, state);
        find_key_exponent(rows, me, state);
        state->score_factor = launch.wgmma_scale_log2 * power_of_two(state->query_exponent) *
                              power_of_two(state->key_exponent);
        state->needs_fallback |=
            !(fabsf(state->score_factor) <= 0x1p100f) ||
            (fabsf(state->score_factor) < 0x1p-100f && launch.scale_log2 != 0.0f);
        score_keys(shared, rows, me, state, scores);
    }
    raise_row_maxima(shared, me, *state, scores);
    const bool has_keys =
        __any_sync(0xFFFFFFFFu, (state->is_key.first | state->is_key.second) != 0);
    shared->key_exponent[warp] = has_keys ? state->key_exponent : (int)NO_EXPONENT;
}

/* Adds the values and writes results, unless there is no key. */
template <typename Shape>
static __device__ __forceinline__ void
finish_small_row(const attention_launch &launch, const work_item &item, int num_granules,
                 const thread_index &me, small_memory<Shape> *shared,
                 const small_state<Shape> &state)
{
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    if (state.key_exponent == NO_EXPONENT) {
        const float none[Shape::HEAD_SETS] = {};
        leave_states(launch, item, warp, me.lane, state, none);
        return;
    }
    small_output<Shape> output;
    add_small_values(shared, num_granules, me, &output);
    float sums[Shape::HEAD_SETS];
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        sums[set] = find_sum(shared, head_of_lane<Shape>(me.lane, set));
    }
    leave_states(launch, item, warp, me.lane, state, sums);
    float inverse[Shape::HEAD_SETS];
#pragma unroll
    for (int set = 0; set < Shape::HEAD_SETS; set++) {
        inverse[set] = sums[set] == 0.0f ? 0.0f : smla_rcp(sums[set]);
    }
    wgmma_wait<0>();
    write_small_row<Shape>(launch, item, me, inverse, output.out);
}

/* For a CTA without a work item, in a cluster of such CTAs: occupies its SM until the combine
 * kernel has come beside the CTAs with items. An idle SM would take four times its share of
 * rows. */
static __device__ __forceinline__ void
keep_sm(void)
{
    wait_for_others();
#pragma unroll 1
    for (int i = 0; i < KEEP_NS / NAP_NS; i++) {
        __nanosleep(NAP_NS);
    }
}

/* The compiler knows the size of the clusters. Otherwise the cluster's barrier would look for the
 * size in memory that is in no cache yet. */
template <typename Shape>
__global__ void
__cluster_dims__(Shape::PARTNERS, 1, 1)
    __launch_bounds__(small_registers<Shape::IS_FULL>::BOUND_THREADS, 1)
        attend_small(const __grid_constant__ attention_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    small_memory<Shape> *const shared = (small_memory<Shape> *)memory;
    const thread_index me = find_thread_index();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    const work_item item = find_item<false>(launch, (uint32_t)launch.head_tiles.divisor,
                                            (int)blockIdx.x, Shape::HEADS);
    if (item.token >= launch.params.queries.num_tokens) {
        keep_sm();
        return;
    }
    if (me.lane == 0) {
        ptx_mbarrier_init(ptx_shared_address(&shared->arrived[warp]),
                          GRANULE_KEYS * (Shape::Row::IS_SPLIT ? 2 : 1));
        if (warp == 0) {
            ptx_mbarrier_init(ptx_shared_address(&shared->maxima), QUERY_THREADS);
            ptx_mbarrier_init(ptx_shared_address(&shared->stored), QUERY_THREADS);
        }
        ptx_fence_mbarrier_init();
    }
    clear_row_maxima(shared);
    __syncwarp();
    ptx_cluster_arrive(); /* fetch_row waits: copies complete on the partner's mbarriers, too */
    const int num_granules = count_granules(launch);
    small_state<Shape> state = {};
    float scores[Shape::HEADS / 2] = {};
    fetch_row(launch, item, num_granules, shared, &state);
    score_row(launch, num_granules, shared, &state, scores);
    __syncthreads(); /* barrier 3 */
    find_small_reference(shared, num_granules, me.lane, &state);
    weigh_keys(shared, warp, me, &state, scores);
    ptx_fence_async_shared();
    if (!__syncthreads_or(state.needs_fallback | state.has_only)) { /* barrier 4 */
        finish_small_row<Shape>(launch, item, num_granules, me, shared, state);
    } else if constexpr (Shape::CALLS_RARE) {
        finish_rare_row_apart<Shape>(launch, item, state.needs_fallback, memory);
    } else {
        finish_rare_row<Shape>(launch, item, state.needs_fallback, memory);
    }
}

/* ---- Launchers ----------------------------------------------------------------------------- */

/* The number of CTAs, with those without an item, for SMs that would be idle (keep_sm). */
static int64_t
count_small_ctas(const attention_launch &launch, int num_sms, int partners)
{
    const list_params &params = launch.params;
    const int64_t num_items = count_items(launch);
    return smla_fits_beside(num_items, params.queries.num_tokens * params.queries.num_heads,
                            params.results.num_splits, num_sms)
               ? num_sms / partners * partners
               : num_items;
}

template <int ROW, int HEADS, int PARTNERS, bool ALIGNED>
static cudaError_t
launch_shape(const smla_attention_params *params, const smla_attention_start *start)
{
    typedef small<ROW, HEADS, PARTNERS, ALIGNED> Shape;
    constexpr int SHARED_BYTES = (int)sizeof(small_memory<Shape>);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    static_assert(sizeof(shared_memory<typename Shape::Portable>) <=
                      offsetof(small_memory<Shape>, arrived),
                  "no barriers where rows are done again");
    constexpr int ROOM_CTAS = SMLA_COMBINE_CTAS(small_registers<Shape::IS_FULL>::ROOM, 1);
    static_assert(SHARED_BYTES + ROOM_CTAS * SMLA_RESERVED_SHARED_BYTES <= SMLA_SM90_SHARED_BYTES,
                  "CTAs of the combine kernel fit beside it");
    const attention_launch launch = make_launch<HEADS>(params, start);
    const int64_t num_ctas = Shape::IS_FULL
                                 ? count_items(launch)
                                 : count_small_ctas(launch, (int)num_sms_of(params), PARTNERS);
    return smla_launch_large<attend_small<Shape>>(launch, num_ctas, SMALL_THREADS, SHARED_BYTES,
                                                  params->call.stream, PARTNERS > 1,
                                                  start->deferred);
}

/* Two head tiles of a token and split, which need the same rows, are a cluster. */
template <int ROW, int HEADS, bool ALIGNED>
static cudaError_t
launch_any(const smla_attention_params *params, const smla_attention_start *start)
{
    return smla_count_parts(params->queries.num_heads, HEADS) % 2 == 0
               ? launch_shape<ROW, HEADS, 2, ALIGNED>(params, start)
               : launch_shape<ROW, HEADS, 1, ALIGNED>(params, start);
}

/* Bulk copies bring aligned rows only. Those of fp8_ds_mla always are. */
template <int ROW, int HEADS>
static cudaError_t
launch_small(const smla_attention_params *params, const smla_attention_start *start)
{
    return !are_lists_aligned(params) ? launch_portable<ROW, HEADS>(params, start)
           : is_query_aligned(params) ? launch_any<ROW, HEADS, true>(params, start)
                                      : launch_any<ROW, HEADS, false>(params, start);
}

LAUNCHER(smla_attend_sm90_small_64, launch_small<SMLA_ROW_FP8_DS_MLA, 64>)
LAUNCHER(smla_attend_sm90_small_32, launch_small<SMLA_ROW_FP8_DS_MLA, 32>)
LAUNCHER(smla_attend_sm90_small_16, launch_small<SMLA_ROW_FP8_DS_MLA, 16>)
LAUNCHER(smla_attend_sm90_small_v4_64, launch_small<SMLA_ROW_FP8_V4, 64>)
LAUNCHER(smla_attend_sm90_small_v4_32, launch_small<SMLA_ROW_FP8_V4, 32>)
LAUNCHER(smla_attend_sm90_small_v4_16, launch_small<SMLA_ROW_FP8_V4, 16>)
