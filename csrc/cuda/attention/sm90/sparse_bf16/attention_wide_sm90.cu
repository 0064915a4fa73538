/* attention_wide_sm90.cu: sparse MLA attention over widened FP8 rows for Hopper, with wgmma.
 *
 * Computes     as attention_bf16_sm90.cu, whose roles and steps it has
 * Shapes       as attention_bf16_sm90.cu with one split, but caches of fp8_ds_mla, or of fp8_v4.
 *              Rows come from the workspace: 512 f16, multiples of E, and for fp8_ds_mla 64 bf16
 *              (wide_rows.h).
 * Shared mem   as attention_bf16_sm90.cu. The query's first eight tiles, and weights, are f16.
 * Roles        as attention_bf16_sm90.cu. Consumers convert an item's query before its first step
 *              (wide_query.cuh). An item that is refused (see Numerics) is marked, and computed
 *              again at the end from the cache, by the code of attention_sm80.cu.
 *              Where the widening pass has refused the rows, all threads end at once, and
 *              attention_fp8_asked_sm90.cu works.
 * Roofline     as attention_bf16_sm90.cu, and per item about 1500 cycles for its query. On an
 *              H200, T 4096, H 128, K 2048, 32k keys: 3582 us with the widening pass, where
 *              attention_fp8_sm90.cu takes 4414 (README.md).
 * Numerics     A key's values are rounded to f16 once, where attention_fp8_sm90.cu rounds its scale
 *              and then the product. Each head of the query has a power of two of its own, so that
 *              its largest value lies between 2^14 and 2^15: its f16 are exact down to 2^-28 of
 *              that. RoPE products of fp8_ds_mla are those of bf16. A score is two sums of 16 to
 *              20 steps, as for bf16 rows.
 *              Weights are f16, relative to ref. The maximum of the first block with a key has the
 *              weight 2^8. Where a later block has an exponent above 15.9, its maximum gets 2^8.
 *              So a weight is off by 2^-33 of the heaviest at most, where this is more than 2^-12
 *              of itself. Sums are fp32 sums of unrounded weights, as for bf16 rows.
 *              An item is refused where some head's reference is 2^11 or more, and finite: f16 keys
 *              then decide which key is the heaviest (MAX_SCORE). An item with one key gives that
 *              key's value, from the cache. A head whose q is not finite has NaN results. Bits of
 *              a query row depend on its query, keys, H, the device, and on the largest scale of
 *              the caches, but not on T.
 * Source       ours
 */
#include "cuda/attention/sm80/mqa/attend.cuh"
#include "cuda/attention/sm90/sparse_bf16/bf16_lists.cuh"
#include "cuda/attention/sm90/sparse_bf16/bf16_steps.cuh"
#include "cuda/attention/sm90/sparse_bf16/wide_query.cuh"
#include "cuda/attention/sm90/sparse_bf16/wide_results.cuh"

enum { FALLBACK_HEADS = 32 }; /* heads per tile of the fallback, as in attention_fp8_sm90.cu */

/* What follows from the format of the caches. */
template <int ROW> struct wide_kind {
    static constexpr bool IS_V4 = ROW == SMLA_ROW_FP8_V4;
    typedef key_kind<!IS_V4, false, false, true> Keys;
    typedef tile<FALLBACK_HEADS, IS_V4 ? SMLA_ROWS_512 : SMLA_ROWS_FP8, false> Portable;
};

/* ---- Consumers ------------------------------------------------------------------------------- */

/* Ends all mbarriers but that of the order, because the fallback uses the memory of the others. */
static __device__ __forceinline__ void
end_barriers(bf16_memory *shared)
{
    const uint32_t first = ptx_shared_address(shared->full);
    constexpr int COUNT =
        (int)((offsetof(bf16_memory, query_empty) - offsetof(bf16_memory, full)) / 8) + 1;
    const int thread = ptx_forget((int)threadIdx.x);
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS); /* nobody waits at an mbarrier any more */
    if (thread < COUNT) {
        ptx_mbarrier_end(first + 8 * thread);
    }
}

/* Computes refused items again. */
template <typename Portable>
static __device__ __forceinline__ void
attend_refused(const wide_launch &launch, bf16_memory *shared)
{
    typedef shared_memory<Portable> portable_memory;
    static_assert(sizeof(portable_memory) <= offsetof(bf16_memory, order),
                  "marks outlive the rest");
    end_barriers(shared);
    run_fallback(launch.source, TILE_HEADS / FALLBACK_HEADS, shared->wide.fallback_bits,
                 &shared->order, (portable_memory *)shared);
}

template <typename Kind, bool MAXIMA>
static __device__ __forceinline__ void
consume(const wide_launch &launch, bf16_memory *shared)
{
    typedef typename Kind::Keys Keys;
    bf16_phase phase = {};
    if (threadIdx.x < MAX_ITEMS / 32) {
        shared->wide.fallback_bits[threadIdx.x] = 0;
    }
    start<Keys>(launch, shared);
    begin_items<Keys, true>(launch, shared);
    int idx = (int)blockIdx.x; /* item 0, whatever the order */
#pragma unroll 1
    for (int n = 0; idx >= 0;) {
        bf16_consumer state;
        convert_query<Keys>(launch.base, launch.header, phase.item, shared);
        take_score_scales(shared, &state);
        clear_sums(&state);
        consume_steps<Keys, MAXIMA>(launch, &phase, shared, &state);
        finish_wide_item<Kind::IS_V4, MAXIMA>(launch, idx, n, shared, state);
        idx = nth_item(launch.is_ordered, launch.num_items, &shared->order, ++n);
    }
    attend_refused<typename Kind::Portable>(launch, shared);
}

/* ---- Kernel -------------------------------------------------------------------------------- */

/* Kind: wide_kind. MAXIMA: max_logits are wanted. All rows of q and out and all cache rows begin at
 * multiples of 16 bytes. */
template <typename Kind, bool MAXIMA>
__global__ void
__launch_bounds__(Kind::Keys::THREADS, 1) attend_wide(const __grid_constant__ wide_launch launch)
{
    typedef typename Kind::Keys Keys;
    extern __shared__ __align__(1024) uint8_t memory[];
    bf16_memory *const shared = (bf16_memory *)memory;
    ptx_wait_for_grids();
    if (*(const volatile uint32_t *)&launch.header->is_refused) {
        return;
    }
    if (threadIdx.x < CONSUMER_THREADS) {
        ptx_claim_registers<Keys::CONSUMER_REGISTERS>();
        consume<Kind, MAXIMA>(launch, shared);
    } else {
        ptx_release_registers<Keys::GATHER_REGISTERS>();
        gather<Keys, true>(launch, shared);
    }
}

/* ---- Launchers ----------------------------------------------------------------------------- */

/* Fills in a launch over the lists of `params`, and returns its number of CTAs: more than one per
 * SM where a CTA would have too few fallback bits. */
static int64_t
make_bf16_launch(const smla_attention_params *params, const smla_attention_start *start,
                 bf16_launch *launch)
{
    launch->base = make_launch<TILE_HEADS>(params, start);
    launch->num_items = (int32_t)count_items(launch->base);
    int64_t num_ctas = count_ctas(launch->base, launch->num_items, num_sms_of(params));
    if (smla_count_parts(launch->num_items, num_ctas) > MAX_ITEMS) {
        num_ctas = smla_count_parts(launch->num_items, MAX_ITEMS);
    }
    launch->is_ordered = has_order(launch->base, launch->num_items, num_ctas);
    return num_ctas;
}

template <int ROW, bool MAXIMA>
static cudaError_t
launch_wide(const smla_attention_params *params, const smla_attention_start *start)
{
    constexpr int SHARED_BYTES = (int)sizeof(bf16_memory);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    wide_launch launch = {};
    smla_attention_params wide = *params;
    smla_take_wide_rows(start->wide, &wide.keys);
    const int64_t num_ctas = make_bf16_launch(&wide, start, &launch);
    (void)make_bf16_launch(params, start, &launch.source);
    launch.header = start->wide;
    return smla_launch_large<attend_wide<wide_kind<ROW>, MAXIMA>>(launch, num_ctas,
                                                                  wide_kind<ROW>::Keys::THREADS,
                                                                  SHARED_BYTES,
                                                                  params->call.stream);
}

template <int ROW>
static cudaError_t
launch_row(const smla_attention_params *params, const smla_attention_start *start)
{
    return params->results.max_logits == NULL ? launch_wide<ROW, false>(params, start)
                                              : launch_wide<ROW, true>(params, start);
}

cudaError_t
smla_attend_sm90_wide_64(const smla_attention_params *params, const smla_attention_start *start)
{
    return params->keys.lists[0].kv.format->number == SMLA_ROW_FP8_DS_MLA
               ? launch_row<SMLA_ROW_FP8_DS_MLA>(params, start)
               : launch_row<SMLA_ROW_FP8_V4>(params, start);
}
