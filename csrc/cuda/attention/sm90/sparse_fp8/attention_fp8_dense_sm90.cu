/* attention_fp8_dense_sm90.cu: dense MLA attention over FP8 rows for Hopper, with wgmma.
 *
 * Computes     as attention_fp8_sm90.cu, over the keys of a request that a mask admits: token t
 *              sees keys begin[t] to end[t] - 1 of its request (visible.h)
 * Shapes       q [T][H][512] and [T][H][64] bf16; pages of fp8_ds_mla rows by block table or slot
 *              table; request, begin and end [T] int32 on the device (key_ranges.cu). All rows
 *              begin at multiples of 16 bytes.
 * Shared mem   that of attention_fp8_sm90.cu
 * Roles        those of attention_fp8_sm90.cu, and the same consumers. The gather warps read a
 *              table of pages, not of keys, and copy four rows at once where these are neighbours
 *              (range_gather.cuh). They find the steps of an item from its range, so nobody counts
 *              keys. Lengths for the order and the cuts of items are those of the ranges
 *              (work_order.cuh, cut_work_items.cuh). An item has one token, so several query tokens
 *              of a request read its rows again, from L2.
 *              mbarriers        those of attention_fp8_sm90.cu; only consumers wait for `counted`
 * Roofline     2 * H * 1088 FLOP and 656 bytes per key. 128 requests of 4096 keys: 344 MB, 80 us of
 *              HBM for 16 heads; 92 us of wgmma for 64 heads, and 184 us for 128, in two tiles.
 * Numerics     as attention_fp8_sm90.cu. The keys of a step, the room above a reference and the
 *              borders of given splits depend on the token's own range and request alone, so with
 *              num_splits = 1 a row's bits depend on its query, its keys, H and the device. Outlier
 *              keys are not taken first, as in all calls with a block table. A key that a row does
 *              not see is never read: its row is zeros.
 * Source       as attention_fp8_sm90.cu
 */
#include "cuda/attention/sm90/sparse_fp8/fp8_kernel.cuh"

/* ---- Launchers ----------------------------------------------------------------------------- */

LAUNCHER(smla_attend_sm90_fp8_dense_64, launch_rows<SMLA_ROW_FP8_DS_MLA, 64, true>)
LAUNCHER(smla_attend_sm90_fp8_dense_32, launch_rows<SMLA_ROW_FP8_DS_MLA, 32, true>)
LAUNCHER(smla_attend_sm90_fp8_dense_16, launch_rows<SMLA_ROW_FP8_DS_MLA, 16, true>)
