/* attention_bf16_sm90.cu: sparse MLA attention over bf16 rows for Hopper, with wgmma.
 *
 * Computes     as attention_sm80.cu: S = Q K^T, P = 2^(scale S - ref), O = P V, with heads as M: 64
 *              per CTA. Missing heads are rows of zeros.
 * Shapes       as attention_sm80.cu, with caches of bf16, or of 512 values in any format that is
 *              exact as bf16 (key_kind)
 * Shared mem   query  [9][64][128 B] bf16     64 dimensions per tile, 128-byte swizzle
 *              keys   [2][9][64][128 B] bf16  the same: a block of 64 keys per warpgroup. A block's
 *                                             first 512 dimensions are also its values, because
 *                                             wgmma reads B with either dimension contiguous.
 *              probs  [64][128 B] bf16        weights of group 1, for group 0. Those of group 0 lie
 *                                             in the RoPE tile of its block, which is not needed
 *                                             after the scores.
 *              sums, maxima, references, mbarriers, is_key, counts of keys
 *              232,072 bytes of the 232,448 that an SM has
 * Roles        One CTA per SM. CTA i takes work items i, i + grid, ... (token, split, head tile),
 *              or after the first item those that level the loads (work_order.cuh). Where an SM
 *              would be idle, a CTA without items runs ahead through the code (count_ctas).
 *              4 gather warps   56 registers. They bring cache rows by index, with cp.async of 16
 *                               bytes, because a bulk copy cannot swizzle. Each brings 16 rows of
 *                               every block, from its quarter of the columns, and leaves out
 *                               entries that are no keys (key_stream.cuh). They run ahead as far as
 *                               blocks are free, into the next item, too. They count an item's keys
 *                               before its first step, so they know its last step, and mark it in
 *                               is_key. An item without keys is one step without keys.
 *                               For rows of codes there are 8, in pairs that share a quarter
 *                               (coded_gather.cuh). CTAs have 512 threads then.
 *              2 warpgroups     224 registers, beside 8 gather warps 200. A step is one block per
 *                               group. A group scores its own block for all heads, and adds 256 of
 *                               the 512 values of both blocks. Its own weights come from registers,
 *                               the other group's from shared memory.
 *                group 0        scores, weights and values of its block, values of the other's
 *                group 1        scores of its block, values of the other's, own weights and values:
 *                               so the groups fill each other's gaps, and group 0's block, which
 *                               is used first, is free first
 *                               The tensor cores share their time between products of both groups.
 *                               So what is needed first is started first: group 0's scores before
 *                               group 1's, and values with a group's own weights, behind which half
 *                               of a block is free, before the other group has these weights.
 *              mbarriers        arrivals | waited for by
 *              full[block][piece]   128 gather threads, when their copies have come (third piece:
 *                                   also 4 for is_key, IS_LAST) | the block's group. Four pieces
 *                                   divide the dimensions, so that scores begin with the first.
 *              empty[block][group]  128 threads of the group: its values are added | gather warps
 *              begun                128 threads of group 0: all its scores are under way | group 1,
 *                                   before its own scores
 *              references_ready[group]  128 threads of the group: references are those of its
 *                                   block (bf16_products.cuh) | the other group
 *              probs_ready[group]   128 threads of the group: its weights | the other group
 *              query_full           128 threads, gather warps or group 1 | consumers
 *              query_empty          256 consumers, after their last scores | gather warps
 *              planned              a consumer thread, which has written the order | gather warps
 *              scored               128 threads of group 0, which have scored its block | the same
 *                                   threads, before weights replace the block's RoPE tile
 *              barriers         CONSUMERS 256 threads, where an item ends; GATHER 128 threads,
 *                               where its keys are counted, and for the first item all threads
 *              A group learns from the other's weights that the other's block has come. A block
 *              that is full again was freed by both groups, so no thread still reads the weights
 *              that group 1 replaces.
 *              cp.async arrives when its bytes are in shared memory. PTX asks for a proxy fence
 *              before wgmma reads them. It is left out, because every consumer would wait 150 to
 *              200 cycles for it at every piece; FlashMLA loads in the same way, without a fence.
 * Roofline     2 * H * 1088 FLOP and 1152 bytes per key. 64 heads, in cycles per key and SM: 34 of
 *              wgmma; 37 of shared memory (scores 2304 bytes, because A and B of products of 64 x
 *              64 x 16 both come from there; values 1152; weights 128; rows 1152); 32 of L2 (a
 *              gather without products; 62 of HBM where no row is shared). Measured: 44 at the
 *              clock of 1.6 GHz that power leaves, of which start and end of items are 4; T 4096,
 *              32k keys, H 64: 1790 to 1884 us (620 to 653 TFLOP/s), H 128: 3702 to 3858 us. That
 *              was before the groups' products were in order; a prefill now takes 0.85 to 0.95 of
 *              the time (H100).
 * Numerics     Scores and values are fp32 sums of exact products of bf16. wgmma cuts these sums
 *              off, so a score is two sums of 16 to 20 steps: one of 36 would lose too much. Beside
 *              8 gather warps there are registers for one sum of 32 steps, and WGMMA_CORRECTION
 *              corrects it as for FP8 rows. A weight is 2^(scale S - ref). Weights are rounded to
 *              bf16 for the values. Their sums are fp32 sums of unrounded weights, compensated so
 *              that equal terms round the same way. ref is the head's maximum in the first block
 *              that has a key: the heaviest weight there is 1, and the weights just below it round
 *              by least. Where a later block has an exponent above 40, its maximum is the head's
 *              ref from there on, and earlier sums are multiplied by 2^(older ref - newer ref).
 *              Values up to 2^76 may meet weights of 2^40. Keys lighter than the heaviest by 2^126
 *              may not count. An item with one key gets that key's value when it ends
 *              (write_only_rows), because a value of -0 that is added to 0 would lose its sign.
 *              A logit of NaN or +inf makes out and lse of its head NaN; a logit of -inf has weight
 *              0. The bits of other heads do not change. Masked cache rows are zeros and have
 *              weight 0. A row's bits depend on its query, keys, num_splits, H and the device, not
 *              on T.
 * Source       The tiles, and two warpgroups that share a block's values: FlashMLA's sparse
 *              prefill, studied, not copied; online softmax (FlashAttention), warp roles (CUTLASS).
 *              References that seldom move and the order of the groups' products are ours.
 */
#include "cuda/attention/sm90/sparse_bf16/bf16_lists.cuh"
#include "cuda/attention/sm90/sparse_bf16/bf16_results.cuh"
#include "cuda/attention/sm90/sparse_bf16/bf16_steps.cuh"

/* ---- Consumers ------------------------------------------------------------------------------- */

template <typename Keys, bool MAXIMA, bool ALIGNED>
static __device__ __forceinline__ void
consume(const bf16_launch &launch, bf16_memory *shared)
{
    bf16_phase phase = {};
    start<Keys>(launch, shared);
    ptx_wait_for_grids();
    begin_items<Keys, ALIGNED>(launch, shared);
    int idx = (int)blockIdx.x; /* item 0, whatever the order */
#pragma unroll 1
    for (int n = 0; idx >= 0;) {
        bf16_consumer state;
        clear_sums(&state);
        consume_steps<Keys, MAXIMA>(launch, &phase, shared, &state);
        finish_item<Keys, MAXIMA, ALIGNED>(launch, idx, n & 1, shared, state);
        idx = nth_item(launch.is_ordered, launch.num_items, &shared->order, ++n);
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

/* Keys: key_kind. MAXIMA: max_logits are wanted. ALIGNED: all rows of q and out and all cache
 * rows begin at multiples of 16 bytes. */
template <typename Keys, bool MAXIMA, bool ALIGNED>
__global__ void
__launch_bounds__(Keys::THREADS, 1) attend_bf16(const __grid_constant__ bf16_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    bf16_memory *const shared = (bf16_memory *)memory;
    if (threadIdx.x < CONSUMER_THREADS) {
        ptx_claim_registers<Keys::CONSUMER_REGISTERS>();
        consume<Keys, MAXIMA, ALIGNED>(launch, shared);
    } else {
        ptx_release_registers<Keys::GATHER_REGISTERS>();
        gather<Keys, ALIGNED>(launch, shared);
    }
}

/* ---- Launchers ----------------------------------------------------------------------------- */

template <typename Keys, bool MAXIMA, bool ALIGNED>
static cudaError_t
launch_bf16(const smla_attention_params *params, const smla_attention_start *start)
{
    constexpr int SHARED_BYTES = (int)sizeof(bf16_memory);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    bf16_launch launch = {};
    launch.base = make_launch<TILE_HEADS>(params, start);
    launch.num_items = (int32_t)count_items(launch.base);
    const int64_t num_ctas = count_ctas(launch.base, launch.num_items, num_sms_of(params));
    launch.is_ordered = has_order(launch.base, launch.num_items, num_ctas);
    return smla_launch_large<attend_bf16<Keys, MAXIMA, ALIGNED>>(launch, num_ctas, Keys::THREADS,
                                                                 SHARED_BYTES, params->call.stream,
                                                                 false, start->deferred);
}

/* Whether all rows of q and out and all cache rows begin at multiples of 16 bytes. */
static bool
are_rows_aligned(const smla_attention_params *params)
{
    return is_query_aligned(params) && are_lists_aligned(params) && is_out_aligned(params, 16);
}

template <typename Keys, bool ALIGNED>
static cudaError_t
launch_any(const smla_attention_params *params, const smla_attention_start *start)
{
    return params->results.max_logits == NULL ? launch_bf16<Keys, false, ALIGNED>(params, start)
                                              : launch_bf16<Keys, true, ALIGNED>(params, start);
}

/* Launches the kernel, one of four, that suits the call. */
template <bool ROPE>
static cudaError_t
launch_bf16_rows(const smla_attention_params *params, const smla_attention_start *start)
{
    typedef key_kind<ROPE, false> Keys;
    return are_rows_aligned(params) ? launch_any<Keys, true>(params, start)
                                    : launch_any<Keys, false>(params, start);
}

LAUNCHER(smla_attend_sm90_bf16_64, launch_bf16_rows<true>)
LAUNCHER(smla_attend_sm90_bf16_512_64, launch_bf16_rows<false>)

/* Rows that are not aligned are rare, and gather warps that load them need more registers than
 * there are. So the portable kernel serves them. */
cudaError_t
smla_attend_sm90_512_64(const smla_attention_params *params, const smla_attention_start *start)
{
    if (are_rows_aligned(params)) {
        return launch_any<key_kind<false, true>, true>(params, start);
    }
    return params->queries.num_heads > 32   ? smla_attend_sm80_512_64(params, start)
           : params->queries.num_heads > 16 ? smla_attend_sm80_512_32(params, start)
                                            : smla_attend_sm80_512_16(params, start);
}
