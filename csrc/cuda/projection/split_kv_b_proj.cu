/* split_kv_b_proj.cu: the split of kv_b_proj into W_UK and W_UV. It runs once a model.
 *
 * Computes     w_uk[l,h,i] = bf16(weight[l, h (Pn + Pv) + i] * scale of its block),
 *              w_uv[l,h,i] the same for column h (Pn + Pv) + Pn + i
 * Shapes       weight, element (l, o) of [512, H (Pn + Pv)] in either storage order: bf16, fp16,
 *              fp32 or e4m3; its scales one fp32 per 128 x 128 block, any strides; w_uk
 *              [512, H, Pn], w_uv [512, H, Pv] bf16, the last dimension contiguous
 * Shared mem   4224 bytes, a tile of 32 x 32 words, with rows 33 words apart so that columns are
 *              read without bank conflicts
 * Roles        A block per tile, read along the shorter stride, written along the columns.
 *              Barriers (__syncthreads): tile written | tile read.
 * Numerics     Every byte is what the CPU gives: products are fp32 and are rounded once. The NaN of
 *              inf * 0 has the sign that the device gives.
 */
#include "core/params_projection.h"
#include "cuda/host/cuda.h"
#include "cuda/projection/load_value.cuh"
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
};

__device__ __forceinline__ uint16_t
read_weight(const smla_split_kv_b_proj_params &p, int64_t latent, int64_t column)
{
    const int64_t at = latent * p.stride_in + column * p.stride_out;
    if (p.type == SMLA_FLOAT_BF16 && p.scale == nullptr) {
        return __ldg((const uint16_t *)p.weight + at);
    }
    const float value = load_value(p.weight, p.type, at);
    if (p.scale == nullptr) {
        return smla_float_to_bf16(value);
    }
    const float scale = __ldg(p.scale + latent / SMLA_SCALE_TILE * p.scale_stride_in +
                              column / SMLA_SCALE_TILE * p.scale_stride_out);
    return smla_float_to_bf16(smla_scale_value(value, scale));
}

__device__ __forceinline__ void
write_weight(const split_args &args, int64_t latent, int64_t column, uint16_t value)
{
    const smla_split_kv_b_proj_params &p = args.p;
    const int64_t head = smla_divide(column, args.head_columns);
    const int64_t i = column - head * args.head_columns.divisor;
    if (i < p.nope_dim) {
        p.w_uk[latent * p.w_uk_stride_in + head * p.w_uk_stride_head + i] = value;
    } else {
        p.w_uv[latent * p.w_uv_stride_in + head * p.w_uv_stride_head + i - p.nope_dim] = value;
    }
}

__global__ void
__launch_bounds__(TILE_SIDE *TILE_ROWS) split_kernel(const __grid_constant__ split_args args)
{
    ptx_wait_for_grids();
    __shared__ uint32_t tile[TILE_SIDE][TILE_SIDE + 1]; /* [latent][column] */
    constexpr int LATENT_TILES = SMLA_KV_LORA_RANK / TILE_SIDE;
    const int x = (int)threadIdx.x % TILE_SIDE;
    const int y = (int)threadIdx.x / TILE_SIDE;
    const bool is_transposed = llabs(args.p.stride_in) < llabs(args.p.stride_out);
    const int64_t num_tiles = (args.num_columns + TILE_SIDE - 1) / TILE_SIDE * LATENT_TILES;
    for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
        const int64_t latent = index % LATENT_TILES * TILE_SIDE;
        const int64_t column = index / LATENT_TILES * TILE_SIDE;
        for (int i = y; i < TILE_SIDE; i += TILE_ROWS) {
            const int row = is_transposed ? x : i;
            const int col = is_transposed ? i : x;
            if (column + col < args.num_columns) {
                tile[row][col] = read_weight(args.p, latent + row, column + col);
            }
        }
        __syncthreads(); /* the tile is written */
        for (int i = y; i < TILE_SIDE; i += TILE_ROWS) {
            if (column + x < args.num_columns) {
                write_weight(args, latent + i, column + x, (uint16_t)tile[i][x]);
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
    if (head_columns == 0) {
        return cudaSuccess;
    }
    const split_args args = {*p, p->num_heads * head_columns, smla_make_divisor(head_columns)};
    const int64_t num_tiles =
        smla_count_parts(args.num_columns, TILE_SIDE) * (SMLA_KV_LORA_RANK / TILE_SIDE);
    return smla_launch(split_kernel, args, num_tiles, TILE_SIDE * TILE_ROWS, 0, p->call.stream);
}
