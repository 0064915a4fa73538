/* attention_fp8_tiles_sm90.cu: attention_fp8_dense_sm90.cu for requests of several query tokens
 * with few heads: an item is a tile of rows, which read their keys together.
 *
 * Computes     as attention_fp8_dense_sm90.cu. Row i of a group of n tokens is head i % H of token
 *              i / H of the group, and n divides the number of query tokens of every request.
 * Shapes       as attention_fp8_dense_sm90.cu, with n = 2 to 8 and n * H <= 64, and rows of the
 *              query and of out as far apart from token to token as from head to head
 * Shared mem   that of attention_fp8_sm90.cu, with a row of the tile in place of a head, and the
 *              limits of its tokens (tile_limits.cuh)
 * Roles        those of attention_fp8_dense_sm90.cu. Gather warps bring the keys that the last
 *              token of a group sees. Consumers find how many of these other tokens do not see,
 *              and give hidden keys the weight 0. That costs steps before the last two a
 *              comparison. Items for the fallback are computed token by token.
 *              mbarriers        those of attention_fp8_dense_sm90.cu
 * Roofline     2 * H * 1088 FLOP per token and key, and 656 bytes per key of a request. 128
 *              requests of 4096 keys, 2 tokens of 16 heads: 344 MB, 80 us of HBM.
 * Numerics     as attention_fp8_dense_sm90.cu, with the rows of a tile in place of the heads of a
 *              token: they have one power of two of the query, and the room above references
 *              depends on the steps of the last token. So a row's bits depend on the other tokens
 *              of its group, and calls that say how many splits a row has take no tiles. A tile
 *              goes to the fallback, too, where a row may see one key and others see more. A NaN
 *              in a value that only some rows see may reach the out of all; lse is right.
 * Source       as attention_fp8_sm90.cu; tiles of tokens and heads: FlashMLA's dense decoding
 */
#include "cuda/attention/sm90/sparse_fp8/tile_launch.cuh"

/* ---- Launchers ----------------------------------------------------------------------------- */

LAUNCHER(smla_attend_sm90_fp8_tiles_64, launch_tiles<SMLA_ROW_FP8_DS_MLA, 64>)
LAUNCHER(smla_attend_sm90_fp8_tiles_32, launch_tiles<SMLA_ROW_FP8_DS_MLA, 32>)
LAUNCHER(smla_attend_sm90_fp8_tiles_16, launch_tiles<SMLA_ROW_FP8_DS_MLA, 16>)
