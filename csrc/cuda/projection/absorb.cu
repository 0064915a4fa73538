/* absorb.cu: the product of two weights, per head: W_UK absorbed into the projection of queries,
 * and W_UV into that of outputs. It runs once a model.
 *
 * Computes     out(r,h,l) = sum_n x(r, h D + n) * w[l,h,n], where D is the values of x per head
 * Shapes       x [rows, H D], w [L, H, n], any strides, bf16, fp16 or fp32; x also e4m3, with one
 *              scale for all, per output or per 128 x 128 block; out [rows, H L] or [H L, rows],
 *              bf16 or fp32, the last dimension contiguous
 * Shared mem   16,896 bytes: 16 values of n for a tile's 128 rows, and for its 128 latents, fp32.
 *              Rows of 132 floats keep vectors aligned, and leave two-way conflicts of stores.
 * Roles        A block of 256 threads per tile of 128 rows and 128 latents of a head; a thread has
 *              8 rows x 8 latents. It loads the next 16 values into registers while it multiplies.
 *              Barriers (__syncthreads): values written | values read.
 * Roofline     2 * rows * H * L * n FLOP in fp32, without tensor cores: 26 G for the queries of
 *              DeepSeek-V3 and 120 G for its output, 2.2 ms at the 67 TFLOP/s of an H200.
 * Numerics     Every operand is an fp32 number: the value times its scale, rounded once. Values of
 *              x in a tile with a scale above 2^100 are multiples of a power of two, and so are its
 *              sums. Products are summed in fp32 in the order of n, and rounded once where out is
 *              bf16.
 * Source       The formula of the absorbed projections (DeepSeek-V2, 2.1.2); the kernel is ours.
 */
#include "core/params_projection.h"
#include "cuda/host/cuda.h"
#include "cuda/projection/load_weight.cuh"
#include "cuda/ptx/launch.cuh"

namespace {

enum {
    TILE = 128,     /* rows, and latents, of a block */
    STEP = 16,      /* values of n that a block has in shared memory */
    THREADS = 256,  /* 16 x 16 */
    OWN = 8,        /* rows, and latents, of a thread: two groups of 4, TILE / 2 apart */
    ROW = TILE + 4, /* floats between values of n in shared memory */
    LOADS = TILE * STEP / THREADS,
};

struct absorb_args {
    smla_absorb_params p;
    smla_divisor latent_tiles;
    smla_divisor row_tiles;
};

struct tile_start {
    int64_t head;
    int64_t row;
    int64_t latent;
};

struct operands {
    float x[STEP][ROW];
    float w[STEP][ROW];
};

/* Which element of a step a thread loads: neighbours in a warp are neighbours in memory. */
struct element {
    int at; /* row or latent of the tile */
    int n;
};

__device__ __forceinline__ element
element_of(int i, bool n_is_inner)
{
    const int index = i * THREADS + (int)threadIdx.x;
    return n_is_inner ? element{index / STEP, index % STEP} : element{index % TILE, index / TILE};
}

/* The unit of a tile's values of x: 1, unless a value times its scale may be beyond fp32. The
 * product of such a value with w may still fit. All threads of the block call this. */
__device__ __forceinline__ float
choose_unit(const smla_absorb_params &p, const tile_start &tile)
{
    if (p.x.scale == NULL) {
        return 1.0f;
    }
    const int bits = p.x.scale_column_bits;
    const int64_t row = tile.row + threadIdx.x % TILE;
    const int64_t first = tile.head * p.head_columns;
    bool is_huge = false;
    for (int64_t column = first; row < p.num_rows && column < first + p.num_values;
         column = ((column >> bits) + 1) << bits) {
        is_huge |= fabsf(smla_scale_of_element(&p.x, row, column)) > 0x1p100f;
    }
    return __syncthreads_or(is_huge) ? 0x1p32f : 1.0f;
}

/* Loads a thread's elements of both operands. Those outside of the arrays are 0. */
__device__ __forceinline__ void
load_step(const smla_absorb_params &p, const tile_start &tile, int64_t first, float unit,
          float (&x)[LOADS], float (&w)[LOADS])
{
    const bool x_inner = llabs(p.x.stride_column) <= llabs(p.x.stride_row);
    const bool w_inner = llabs(p.w_stride_value) <= llabs(p.w_stride_latent);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const element ex = element_of(i, x_inner);
        const int64_t row = tile.row + ex.at;
        const bool has_x = row < p.num_rows && first + ex.n < p.num_values;
        x[i] =
            has_x ? load_weight(p.x, row, tile.head * p.head_columns + first + ex.n, unit) : 0.0f;
        const element ew = element_of(i, w_inner);
        const int64_t latent = tile.latent + ew.at;
        const bool has_w = latent < p.num_latents && first + ew.n < p.num_values;
        w[i] = has_w ? load_value(p.w, p.w_type,
                                  latent * p.w_stride_latent + tile.head * p.w_stride_head +
                                      (first + ew.n) * p.w_stride_value)
                     : 0.0f;
    }
}

/* Writes the elements that load_step gave a thread to shared memory, from which all threads
 * multiply. */
__device__ __forceinline__ void
share_step(const smla_absorb_params &p, operands &shared, const float (&x)[LOADS],
           const float (&w)[LOADS])
{
    const bool x_inner = llabs(p.x.stride_column) <= llabs(p.x.stride_row);
    const bool w_inner = llabs(p.w_stride_value) <= llabs(p.w_stride_latent);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const element ex = element_of(i, x_inner);
        shared.x[ex.n][ex.at] = x[i];
        const element ew = element_of(i, w_inner);
        shared.w[ew.n][ew.at] = w[i];
    }
}

/* A thread's 8 values of a row of shared memory. */
__device__ __forceinline__ void
read_own(const float (&row)[ROW], int first, float (&own)[OWN])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 four = *(const float4 *)&row[first + half * TILE / 2];
        smla_spread_vector(four, own + 4 * half);
    }
}

__device__ __forceinline__ void
multiply_step(const operands &shared, int first_row, int first_latent, float (&sums)[OWN][OWN])
{
#pragma unroll
    for (int n = 0; n < STEP; n++) {
        float x[OWN], w[OWN];
        read_own(shared.x[n], first_row, x);
        read_own(shared.w[n], first_latent, w);
#pragma unroll
        for (int r = 0; r < OWN; r++) {
#pragma unroll
            for (int l = 0; l < OWN; l++) {
                sums[r][l] = fmaf(x[r], w[l], sums[r][l]);
            }
        }
    }
}

__device__ __forceinline__ void
write_sums(const smla_absorb_params &p, const tile_start &tile, int first_row, int first_latent,
           float unit, const float (&sums)[OWN][OWN])
{
#pragma unroll
    for (int r = 0; r < OWN; r++) {
        const int64_t row = tile.row + first_row + r % 4 + r / 4 * (TILE / 2);
#pragma unroll
        for (int l = 0; l < OWN; l++) {
            const int64_t latent = tile.latent + first_latent + l % 4 + l / 4 * (TILE / 2);
            if (row >= p.num_rows || latent >= p.num_latents) {
                continue;
            }
            const int64_t at = row * p.out_stride_row + tile.head * p.out_stride_head +
                               latent * p.out_stride_latent;
            if (p.is_fp32) {
                ((float *)p.out)[at] = sums[r][l] * unit;
            } else {
                ((uint16_t *)p.out)[at] = smla_float_to_bf16(sums[r][l] * unit);
            }
        }
    }
}

__global__ void
__launch_bounds__(THREADS) absorb_kernel(const __grid_constant__ absorb_args args)
{
    ptx_wait_for_grids();
    __shared__ __align__(16) operands shared;
    const smla_absorb_params &p = args.p;
    /* Neighbours in a warp write neighbours in memory. */
    const int across = (int)threadIdx.x % 16 * 4, down = (int)threadIdx.x / 16 * 4;
    const int first_row = p.out_stride_row == 1 ? across : down;
    const int first_latent = p.out_stride_row == 1 ? down : across;
    const int64_t num_tiles = p.num_heads * args.row_tiles.divisor * args.latent_tiles.divisor;
    for (int64_t index = blockIdx.x; index < num_tiles; index += gridDim.x) {
        const int64_t block_row = smla_divide(index, args.latent_tiles);
        const int64_t head = smla_divide(block_row, args.row_tiles);
        const tile_start tile = {head, (block_row - head * args.row_tiles.divisor) * TILE,
                                 (index - block_row * args.latent_tiles.divisor) * TILE};
        float sums[OWN][OWN] = {};
        float x[LOADS], w[LOADS];
        const float unit = choose_unit(p, tile);
        load_step(p, tile, 0, unit, x, w);
        for (int64_t n = 0; n < p.num_values; n += STEP) {
            share_step(p, shared, x, w);
            __syncthreads(); /* the values are written */
            load_step(p, tile, n + STEP, unit, x, w);
            multiply_step(shared, first_row, first_latent, sums);
            __syncthreads(); /* no thread reads them any more */
        }
        write_sums(p, tile, first_row, first_latent, unit, sums);
    }
}

cudaError_t
launch(const smla_absorb_params *p)
{
    const int64_t row_tiles = smla_count_parts(p->num_rows, TILE);
    const int64_t latent_tiles = smla_count_parts(p->num_latents, TILE);
    if (row_tiles == 0 || latent_tiles == 0) {
        return cudaSuccess;
    }
    const absorb_args args = {*p, smla_make_divisor(latent_tiles), smla_make_divisor(row_tiles)};
    return smla_launch(absorb_kernel, args, p->num_heads * row_tiles * latent_tiles, THREADS, 0,
                       p->call.stream);
}

} /* namespace */

/* ---- Launchers ----------------------------------------------------------------------------- */

cudaError_t
smla_cuda_launch_absorb_q_proj(const smla_absorb_params *p, const smla_cuda_device *)
{
    return launch(p);
}

cudaError_t
smla_cuda_launch_absorb_o_proj(const smla_absorb_params *p, const smla_cuda_device *)
{
    return launch(p);
}
