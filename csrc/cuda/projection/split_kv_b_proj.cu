/* split_kv_b_proj.cu: the split of kv_b_proj, or of another weight, into two parts of each head. It
 * runs once a model.
 *
 * Computes     w_uk[l,h,i] = weight[l, h (Pn + Pv) + i] * scale of its block, rounded where it is
 *              bf16, w_uv[l,h,i] the same for column h (Pn + Pv) + Pn + i
 * Shapes       weight, element (l, o) of [L, H (Pn + Pv)] in either storage order: bf16, fp16, fp32
 *              or e4m3; its scales one fp32 for all, per output or per 128 x 128 block, with any
 *              strides; w_uk [L, H, Pn], w_uv [L, H, Pv] bf16 or fp32, the last dimension
 *              contiguous
 * Shared mem   4224 bytes, a tile of 32 x 32 words, with rows 33 words apart so that columns are
 *              read without bank conflicts
 * Roles        A block per tile, read along the shorter stride, written along the columns.
 *              Barriers (__syncthreads): tile written | tile read.
 * Numerics     Every byte is what the CPU gives: products are fp32 and are rounded once. The NaN of
 *              inf * 0 has the sign that the device gives.
 */
#include "core/params_projection.h"
#include "cuda/host/cuda.h"
#include "cuda/projection/load_weight.cuh"
#include "cuda/ptx/launch.cuh"

namespace {

enum {
    TILE_SIDE = 32,
    TILE_ROWS = 8, /* rows that a block's threads cover at a time */
};

struct split_args {
    smla_split_kv_b_proj_params p;
    int64_t num_columns;
    smla_divisor head_columns; /* columns per head: Pn + Pv */
    smla_divisor row_tiles;    /* tiles in a column of them */
};

/* An element as a word: the bits of a float, or of a bf16. */
__device__ __forceinline__ uint32_t
read_weight(const smla_split_kv_b_proj_params &p, int64_t row, int64_t column)
{
    const int64_t at = row * p.weight.stride_row + column * p.weight.stride_column;
    if (p.weight.type == SMLA_FLOAT_BF16 && p.weight.scale == nullptr && !p.is_fp32) {
        return __ldg((const uint16_t *)p.weight.values + at);
    }
    const float value = load_weight(p.weight, row, column);
    return p.is_fp32 ? smla_float_bits(value) : smla_float_to_bf16(value);
}

__device__ __forceinline__ void
write_weight(const split_args &args, int64_t row, int64_t column, uint32_t word)
{
    const smla_split_kv_b_proj_params &p = args.p;
    const int64_t head = smla_divide(column, args.head_columns);
    const int64_t i = column - head * args.head_columns.divisor;
    const bool is_first = i < p.nope_dim;
    const int64_t at = is_first
                           ? row * p.w_uk_stride_in + head * p.w_uk_stride_head + i
                           : row * p.w_uv_stride_in + head * p.w_uv_stride_head + i - p.nope_dim;
    void *const part = is_first ? p.w_uk : p.w_uv;
    if (p.is_fp32) {
        ((uint32_t *)part)[at] = word;
    } else {
        ((uint16_t *)part)[at] = (uint16_t)word;
    }
}

__global__ void
__launch_bounds__(TILE_SIDE *TILE_ROWS) split_kernel(const __grid_constant__ split_args args)
{
    ptx_wait_for_grids();
    __shared__ uint32_t tile[TILE_SIDE][TILE_SIDE + 1]; /* [row][column] */
    const int x = (int)threadIdx.x % TILE_SIDE;
    const int y = (int)threadIdx.x / TILE_SIDE;
    const smla_weight &weight = args.p.weight;
    const bool is_transposed = llabs(weight.stride_row) < llabs(weight.stride_column);
    const int64_t row_tiles = args.row_tiles.divisor;
    const int64_t num_tiles = (args.num_columns + TILE_SIDE - 1) / TILE_SIDE * row_tiles;
    for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
        const int64_t column_tile = smla_divide(index, args.row_tiles);
        const int64_t first_row = (index - column_tile * row_tiles) * TILE_SIDE;
        const int64_t column = column_tile * TILE_SIDE;
        for (int i = y; i < TILE_SIDE; i += TILE_ROWS) {
            const int row = is_transposed ? x : i;
            const int col = is_transposed ? i : x;
            if (first_row + row < args.p.num_rows && column + col < args.num_columns) {
                tile[row][col] = read_weight(args.p, first_row + row, column + col);
            }
        }
        __syncthreads(); /* the tile is written */
        for (int i = y; i < TILE_SIDE; i += TILE_ROWS) {
            if (first_row + i < args.p.num_rows && column + x < args.num_columns) {
                write_weight(args, first_row + i, column + x, tile[i][x]);
            }
        }
        __syncthreads(); /* no thread reads the tile any more */
    }
}

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_cuda_launch_split_kv_b_proj(const smla_split_kv_b_proj_params *p, const smla_cuda_device *)
{
    const int64_t head_columns = p->nope_dim + p->value_dim;
    const int64_t row_tiles = smla_count_parts(p->num_rows, TILE_SIDE);
    if (head_columns == 0 || row_tiles == 0) {
        return cudaSuccess;
    }
    const split_args args = {*p, p->num_heads * head_columns, smla_make_divisor(head_columns),
                             smla_make_divisor(row_tiles)};
    const int64_t num_tiles = smla_count_parts(args.num_columns, TILE_SIDE) * row_tiles;
    return smla_launch(split_kernel, args, num_tiles, TILE_SIDE * TILE_ROWS, 0, p->call.stream);
}
