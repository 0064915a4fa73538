/* attention_fp8_e4m3_sm90.cu: dense MLA attention over rows of 576 e4m3 for Hopper, with wgmma.
 *
 * Computes     as attention_fp8_dense_sm90.cu, over rows whose only scale is that of their cache
 * Shapes       q [T][H][512] and [T][H][64] bf16, or both e4m3 with one q_scale; pages of rows of
 *              fp8_e4m3, 576 bytes, by block table or slot table; kv_scale and q_scale are numbers,
 *              or one fp32 on the device. All rows begin at multiples of 16 bytes.
 * Shared mem   query   [9][HEADS][128 B] f16: RoPE's tile is like the others, as are its keys. As
 *                      it comes from memory, a query of e4m3 has half of the bytes.
 *              probs   as in attention_fp8_sm90.cu
 *              ring    [GRANULES]        a granule: 16 rows, 592 bytes apart, is_key and mbarriers,
 *                      9504 bytes together. 64, 32 and 16 heads: 14, 16 and 20 granules
 * Roles        those of attention_fp8_dense_sm90.cu. The ring has rows further apart than memory,
 *              so each row is a bulk copy of its own. One thread loads the scales, once per launch
 *              (find_cache_scale). Codes are widened, and nothing multiplies them: 256
 *              multiplications less per lane and step than with rows of 656 bytes.
 *              mbarriers        those of attention_fp8_dense_sm90.cu
 * Roofline     2 * H * 1088 FLOP and 576 bytes per key. 128 requests of 4096 keys: 302 MB, 70 us of
 *              HBM for 16 heads; 92 us of wgmma for 64 heads, and 184 us for 128, in two tiles.
 *              Measured on an H200 with a query of e4m3: 96, 132 and 241 us (README.md).
 * Numerics     Keys are exact in f16, RoPE values, too. The query is as in attention_fp8_sm90.cu,
 *              and has its one power of two in RoPE's tile, too. kv_scale and q_scale multiply
 *              scores in fp32, as part of their factor, and kv_scale multiplies out as part of its
 *              factor. All items go to the fallback if kv_scale is not within 2^-80 to 2^10, so
 *              also if it is NaN. The other reasons for the fallback are those of
 *              attention_fp8_sm90.cu that do not come from scales of rows. Partial rows are means
 *              of codes times 2^7, rounded to f16: off by 2^-11, if small by 2^-32 kv_scale. Rows'
 *              bits depend on what they depend on in attention_fp8_dense_sm90.cu. A key that a row
 *              does not see is never read.
 * Source       as attention_fp8_sm90.cu
 */
#include "cuda/attention/sm90/sparse_fp8/fp8_kernel.cuh"

/* ---- Launchers ----------------------------------------------------------------------------- */

LAUNCHER(smla_attend_sm90_e4m3_dense_64, launch_rows<SMLA_ROW_FP8_E4M3_576, 64, true>)
LAUNCHER(smla_attend_sm90_e4m3_dense_32, launch_rows<SMLA_ROW_FP8_E4M3_576, 32, true>)
LAUNCHER(smla_attend_sm90_e4m3_dense_16, launch_rows<SMLA_ROW_FP8_E4M3_576, 16, true>)
