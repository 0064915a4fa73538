/* attention_e4m3_tiles_sm90.cu: attention_fp8_tiles_sm90.cu over rows of 576 e4m3, as
 * attention_fp8_e4m3_sm90.cu has them.
 *
 * Computes     as attention_fp8_tiles_sm90.cu, over rows whose only scale is that of their cache
 * Shapes       those of attention_fp8_e4m3_sm90.cu, in tiles of attention_fp8_tiles_sm90.cu
 * Shared mem   that of attention_fp8_e4m3_sm90.cu, and the limits of a tile's tokens
 * Roles        those of attention_fp8_tiles_sm90.cu
 * Roofline     2 * H * 1088 FLOP per token and key, and 576 bytes per key of a request. 128
 *              requests of 4096 keys, 2 tokens of 16 heads: 302 MB, 70 us of HBM.
 * Numerics     as attention_fp8_e4m3_sm90.cu, with what attention_fp8_tiles_sm90.cu says of tiles
 * Source       as attention_fp8_tiles_sm90.cu
 */
#include "cuda/attention/sm90/sparse_fp8/tile_launch.cuh"

/* ---- Launchers ----------------------------------------------------------------------------- */

LAUNCHER(smla_attend_sm90_e4m3_tiles_64, launch_tiles<SMLA_ROW_FP8_E4M3_576, 64>)
LAUNCHER(smla_attend_sm90_e4m3_tiles_32, launch_tiles<SMLA_ROW_FP8_E4M3_576, 32>)
LAUNCHER(smla_attend_sm90_e4m3_tiles_16, launch_tiles<SMLA_ROW_FP8_E4M3_576, 16>)
