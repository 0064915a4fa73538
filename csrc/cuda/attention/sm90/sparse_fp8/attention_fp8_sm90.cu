/* attention_fp8_sm90.cu: sparse MLA attention over FP8 rows for Hopper, with wgmma.
 *
 * Computes     the same as attention_sm80.cu, transposed: S^T = K Q^T, P = 2^(scale S - ref),
 *              O^T = V^T P^T, with keys as operand A in registers and heads as dimension N
 * Shapes       as attention_sm80.cu, but caches of fp8_ds_mla only, or of fp8_v4 only
 * Shared mem   query   [9][HEADS][128 B]     f16 (RoPE: bf16) times powers of two; 64 dimensions a
 *                      tile, permuted (store_query_words), 128-byte swizzle; fp8_v4: 8 tiles
 *              probs   [2][64][HEADS] f16    a block's weights per warpgroup, swizzled (wgmma.cuh)
 *              ring    [GRANULES]            a granule: 16 rows of 656 bytes as in the cache, with
 *                      their scales as f16, is_key and mbarriers, 10,656 bytes together; fp8_v4:
 *                      592 bytes per row, of which 8 are its scales, 9,760 together
 *              sums, references, shifts, factors, counts of keys
 *              64 heads: 13 granules (fp8_v4: 15); the total is nearly all of the 232,448 bytes
 *              that an SM has
 * Roles        One CTA per SM. CTA i takes work items i, i + grid, ... (token, split, head tile),
 *              or after the first item those that level the loads (work_order.cuh). Where an SM
 *              would be idle, a CTA without items runs ahead through the code (count_ctas). Where
 *              lists differ in length and there are no more items than SMs, long items are cut,
 *              and CTAs with short items take the pieces (cut_work_items.cuh).
 *              4 gather warps   24 registers. Indices -> keys -> rows: each warp has a quarter of
 *                               the columns, leaves out the entries that are no keys
 *                               (key_stream.cuh), and takes outlier keys first where references
 *                               jump (outlier_keys.cuh). It brings 4 rows of every granule, one
 *                               bulk copy per row, and for fp8_v4 a copy of 8 bytes for its
 *                               scales. It runs ahead, and first brings a quarter of a new query.
 *              2 warpgroups     240 registers. They take blocks of 64 keys in turn. For each of its
 *                               blocks, a group finds the scores, adds values of the other group's
 *                               older block while its own scores become weights, and adds values
 *                               of its own block. It has all heads and 256 of the 512 values. Where
 *                               weights exceed f16, references move first (fp8_growth.cuh).
 *              mbarriers        arrivals | waiting threads
 *              full[granule]    128 gather threads and the bytes they announce (fp8_v4: and 16
 *                               threads' scales) | consumers
 *              empty[granule]   256 consumers, which have converted the values | gather warps
 *              probs_ready[group]   128 threads of the group: weights, scales | the other group
 *              rescaled         128 threads of the group whose weights exceed f16: the references
 *                               have moved | the other group
 *              probs_ready_again    the same threads, when the weights fit | the other group
 *              values_added[group]  128 threads of the other group | the group, before new weights
 *              query_free       256 consumers, after an item's last scores | gather warps
 *              query_full       a thread of each gather warp, and its bytes | consumers
 *              counted          one thread, when an item's number of steps is known | consumers,
 *                               and for a launch's first item gather warps, too
 *              planned          the consumer thread that has stored the order, or all 256 consumers
 *                               where items may be cut | gather warps
 *              Most threads arrive for themselves: it costs nothing, and racecheck can follow it.
 *              named barriers   CONSUMERS 256 threads, GROUP + g 128 threads, GATHER 128 threads;
 *                               barrier 0 in the fallback
 *              An item whose numbers do not fit (see Numerics) is marked for the fallback: the code
 *              of attention_sm80.cu computes it again at the end, because shared memory is free
 *              then.
 * Roofline     2 * H * 1088 FLOP and 656 bytes per key. 64 heads, per key and SM: 34 cycles of
 *              wgmma, 40 of HBM, 42 of shared memory. Measured on an H200, 64 heads, K 2048: 128
 *              tokens 72 us, 256 tokens 144 us (509 TFLOP/s), which is about 52 cycles per key of
 *              a CTA's second item, with its start and end. No unit is saturated: issue slots and
 *              latencies bind, with two warps per scheduler (README.md).
 * Numerics     e4m3 is exact in f16. A value times its scale / E is rounded to f16, where E is a
 *              power of two per item, found from the first step's scales (find_key_exponent). With
 *              16 heads, scores of fp8_ds_mla take codes alone: a scale multiplies their sum.
 *              Scales up to 146 E fit, 2^9 times the first ones where these are usual. Below 2^-5 E
 *              products lose bits and may be off by 2^-25 E, which is negligible, as E is at most
 *              2^3. The query has one power of two per item, so its f16 are exact in heads whose
 *              largest value is within 2^13 of the tile's. Weights are f16, relative to ref: the
 *              first step's maximum, rounded up, has weight 4, or more where few keys or none come
 *              later (find_row_headroom). Where the weights of a warp's 16 keys add up to 65,504 or
 *              more in a later step, ref moves by an integer to the maximum (rounded to f16), as in
 *              the first step, and earlier sums are scaled by a power of two, exactly. Sums are
 *              fp32, of unrounded weights. Masked rows are zeros, and their weights are subtracted
 *              from the sums.
 *              fp8_v4: scales are powers of two, so a value times scale / E is exact unless it is
 *              subnormal in f16. A RoPE part is also a value. Its bf16 are divided by E and kept as
 *              f16 (keep_rope); an item goes to the fallback where one is 2^16 E or more. Scores
 *              take the bf16. NaN in a key makes all results NaN, a score of +inf those of its
 *              head. A head whose q is not finite has NaN results and no influence on other heads.
 *              An item goes to the fallback, too, where scales are above 146 E, E above 2^3,
 *              scores 2^11 or more, heads smaller by 2^13 than the largest, or all scores of the
 *              first of several steps -inf. An item with one key gives that key's value
 *              (one_key.cuh). Partial rows are means of values relative to E, rounded to f16: off
 *              by 2^-11, if small by 2^-25 E. A query row's bits depend on its query, keys,
 *              num_splits, H and the device, not on T. Where the plan chooses num_splits, they
 *              also depend on the lengths of all lists, as items may be cut. Where references
 *              jump, they also depend on whether rows are evenly spaced (outlier_keys.cuh).
 * Source       Ours are: keys as A from registers, the granule ring, the order of the two
 *              warpgroups, references that move only where they must, between two blocks, and
 *              outlier keys first. Online softmax is FlashAttention's, warp roles are CUTLASS's.
 */
#include "cuda/attention/sm90/sparse_fp8/fp8_kernel.cuh"

/* ---- Launchers ----------------------------------------------------------------------------- */

LAUNCHER(smla_attend_sm90_fp8_64, launch_rows<SMLA_ROW_FP8_DS_MLA, 64, false>)
LAUNCHER(smla_attend_sm90_fp8_32, launch_rows<SMLA_ROW_FP8_DS_MLA, 32, false>)
LAUNCHER(smla_attend_sm90_fp8_16, launch_rows<SMLA_ROW_FP8_DS_MLA, 16, false>)
LAUNCHER(smla_attend_sm90_v4_64, launch_rows<SMLA_ROW_FP8_V4, 64, false>)
LAUNCHER(smla_attend_sm90_v4_32, launch_rows<SMLA_ROW_FP8_V4, 32, false>)
LAUNCHER(smla_attend_sm90_v4_16, launch_rows<SMLA_ROW_FP8_V4, 16, false>)
