/* attention_sm80.cu: sparse MLA attention for every GPU from sm_80 on, with mma.sync.
 *
 * Computes     s_j = softmax_scale * log2(e) * (q . k_j),  w_j = 2^(s_j - ref),
 *              out = sum_j w_j v_j,  sum = sum_j w_j   over a split's keys, then (softmax.cuh)
 *              out / sum * sink factor, lse = ref * ln 2 + ln(sum)
 * Shapes       q [T][H][512] and [T][H][64] bf16, any strides, 2-byte aligned or better; rows of
 *              one or two caches by index [T][K] (key_rows.cuh), or keys in any format and q of
 *              bf16 or e4m3 (coded_rows.cuh); out [T][H][512] bf16, lse and max_logits [T][H]
 *              fp32, any strides. With splits: partial rows (kernels.h).
 * Shared mem   query    [HEADS][576] bf16      16-byte chunk c of row r at c ^ r % 8
 *              keys     [32][576] bf16         the same layout; a row is both key and value
 *              probs    [VERSIONS][HEADS][32]  bf16, chunk c of row r at c ^ r / 2 % 4
 *              scores   [4][HEADS][32] fp32    partial sums, key j of row r at j ^ score_flip(r)
 *              scales   [4][32] fp32, is_key [32], factor [HEADS], rows [HEADS]
 *              FP8 rows: 161,664 bytes with 64 heads (A100 has 163 KiB), 99,584 with 32 (sm_86, 89
 *              and 120 have 99 KiB), 68,608 with 16: two CTAs per SM of A100 and H200.
 * Roles        A CTA takes one (token, head tile, split). All 8 warps do everything. A block of 32
 *              keys has four phases, each of which ends at a barrier of all 256 threads:
 *                store    registers -> keys, scales, is_key. The barrier makes the block visible
 *                         and tells all threads whether it has a key; if not, the block is over.
 *                         Then the loads of the next block's rows start.
 *                score    warp = (group of dimensions, half of the tile): group t takes scale tile
 *                         t and a quarter of the RoPE part. Then partial scores are visible.
 *                weigh    4, 8 or 16 lanes per head: sum of the partial scores, online softmax.
 *                         Then probs and factor are visible.
 *                add      warp = 64 of the 512 values, all heads, out in registers. Then nobody
 *                         reads the block any more.
 *              Registers per thread: 32, 64 or 128 for out, 21 (FP8) or 37 for rows being loaded.
 * Roofline     2 * H * 1088 FLOP and 656 bytes per key (1152 for bf16 rows). H 64, 256 tokens,
 *              K 2048 on an H200: 92 us of wgmma, 150 us of mma.sync (62 % of wgmma's rate), 80 us
 *              of HBM. Shared memory binds. Cycles per key and 64 heads: 36 for operands of the
 *              scores, 16 for their partial sums, 16 for operands of the values, 13 for stores;
 *              besides, 54 of mma and 60 of issue slots. One CTA cannot overlap its phases: 110 to
 *              125 cycles, 275 us. H 16: 42 cycles of shared memory per key, 40 of HBM, two CTAs
 *              per SM: 120 to 130 us. Measured: 475 and 213 us (benchmarks/RESULTS.md). No unit is
 *              busier than 66 % (ncu): the phases wait for each other.
 * Numerics     e4m3 is exact in bf16, so keys are not rounded. A cache row's fp32 scale multiplies
 *              the fp32 sum of its 128 products, and the weight, which is then rounded to bf16,
 *              once per scale tile (VERSIONS). Sums of scores are 8 + 1 mma deep, then 4 partial
 *              sums in fp32. A query row's sum adds unrounded weights. So out is off by 2^-9 sum_j
 *              p_j |v_j| from rounding weights and 2^-9 |out| from rounding out, half of what the
 *              contract allows. No rounding to bf16 affects lse. The sum is compensated, because
 *              equal terms round the same way. ref is an integer (softmax.cuh). A masked key has
 *              weight 0 and a row of zeros, so bytes of unselected rows never meet a product. NaN
 *              in a selected row reaches the token's results. No key: out 0, lse and max_logits
 *              -inf. weight * scale is finite for scales below 0x1.FFp127, and loses bits only
 *              below 2^-126. A score overflows where fp32 does, before softmax_scale. On the CPU
 *              the scale of a cache makes no score overflow. An item with one key gives its value,
 *              rounded once (one_key.cuh). A row's bits depend on its query, keys, num_splits, H
 *              and the device, not on T.
 * Source       online softmax (FlashAttention), XOR swizzle and ldmatrix (CUTLASS's ideas). Groups
 *              by scale tile, four versions of the weights and the integer reference are ours.
 */
#include "cuda/attention/sm80/mqa/attend.cuh"

/* ---- Kernel -------------------------------------------------------------------------------- */

/* CTAs per SM for which registers must suffice. Two CTAs of keys of any 576 values would spill, and
 * on sm_100 two of mixed rows. */
template <typename Tile>
static constexpr int
min_ctas_per_sm()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    const bool is_large = Tile::FORMATS == SMLA_ROWS_MIXED || Tile::FORMATS == SMLA_ROWS_ANY_576;
#else
    const bool is_large = Tile::FORMATS == SMLA_ROWS_ANY_576;
#endif
    return is_large ? 1 : SMLA_SM80_CTAS_PER_SM(Tile::HEADS);
}

template <typename Tile>
__global__ void
__launch_bounds__(CTA_THREADS, min_ctas_per_sm<Tile>())
    attend(const __grid_constant__ attention_launch launch)
{
    extern __shared__ __align__(128) uint8_t memory[];
    ptx_wait_for_grids();
    attend_cta<Tile>(launch, (uint32_t)launch.head_tiles.divisor, (int)blockIdx.x, WHOLE_ITEM,
                     (shared_memory<Tile> *)memory);
}

/* ---- Launchers ----------------------------------------------------------------------------- */

/* Launches the tokens that are not split by themselves, in front of the others. */
static cudaError_t
launch_whole_and_rest(const smla_attention_params *params, const smla_attention_start *start,
                      smla_attention_launcher *launch)
{
    const int64_t count = start->whole_tokens;
    const int64_t rest = params->queries.num_tokens - count;
    smla_attention_params first = smla_params_of_tokens(params, 0, count);
    const smla_attention_params last = smla_params_of_tokens(params, count, rest);
    const smla_attention_start of_first = {};
    smla_attention_start of_last = *start;
    of_last.whole_tokens = 0;
    first.results.num_splits = 1;
    const cudaError_t code = launch(&first, &of_first);
    return code == cudaSuccess ? launch(&last, &of_last) : code;
}

template <int HEADS, int FORMATS>
static cudaError_t
launch_attend(const smla_attention_params *params, const smla_attention_start *start)
{
    typedef tile<HEADS, FORMATS, true> Tile;
    if (start->whole_tokens > 0) {
        return launch_whole_and_rest(params, start, launch_attend<HEADS, FORMATS>);
    }
    constexpr int SHARED_BYTES = (int)sizeof(shared_memory<Tile>);
    static_assert(SHARED_BYTES == SMLA_SM80_SHARED_BYTES(HEADS, FORMATS), "kernels.h says so");
    const attention_launch launch = make_launch<HEADS>(params, start);
    return smla_launch_large<attend<Tile>>(launch, count_items(launch), CTA_THREADS, SHARED_BYTES,
                                           params->call.stream, false, start->deferred);
}

LAUNCHER(smla_attend_sm80_fp8_64, launch_attend<64, SMLA_ROWS_FP8>)
LAUNCHER(smla_attend_sm80_fp8_32, launch_attend<32, SMLA_ROWS_FP8>)
LAUNCHER(smla_attend_sm80_fp8_16, launch_attend<16, SMLA_ROWS_FP8>)
LAUNCHER(smla_attend_sm80_bf16_64, launch_attend<64, SMLA_ROWS_BF16>)
LAUNCHER(smla_attend_sm80_bf16_32, launch_attend<32, SMLA_ROWS_BF16>)
LAUNCHER(smla_attend_sm80_bf16_16, launch_attend<16, SMLA_ROWS_BF16>)
LAUNCHER(smla_attend_sm80_bf16_512_64, launch_attend<64, SMLA_ROWS_BF16_512>)
LAUNCHER(smla_attend_sm80_bf16_512_32, launch_attend<32, SMLA_ROWS_BF16_512>)
LAUNCHER(smla_attend_sm80_bf16_512_16, launch_attend<16, SMLA_ROWS_BF16_512>)
LAUNCHER(smla_attend_sm80_mixed_16, launch_attend<16, SMLA_ROWS_MIXED>)
LAUNCHER(smla_attend_sm80_e4m3_576_64, launch_attend<64, SMLA_ROWS_E4M3_576>)
LAUNCHER(smla_attend_sm80_e4m3_576_32, launch_attend<32, SMLA_ROWS_E4M3_576>)
LAUNCHER(smla_attend_sm80_e4m3_576_16, launch_attend<16, SMLA_ROWS_E4M3_576>)
LAUNCHER(smla_attend_sm80_any_576_16, launch_attend<16, SMLA_ROWS_ANY_576>)
LAUNCHER(smla_attend_sm80_512_64, launch_attend<64, SMLA_ROWS_512>)
LAUNCHER(smla_attend_sm80_512_32, launch_attend<32, SMLA_ROWS_512>)
LAUNCHER(smla_attend_sm80_512_16, launch_attend<16, SMLA_ROWS_512>)
