/* projection_e4m3.cu: projections of e4m3 arrays with scales, by fp16 tensor cores, for every GPU.
 * On Hopper it serves up to MOST_EXACT_TOKENS tokens, where the weight's bytes bind.
 *
 * Computes     out[t,h,n] = sum_b x_scale[t,h,b] w_scale[h,n/128,b] sum_k x[t,h,k] w[h,n,k],
 *              where b is a block of 128 values of k, a step
 * Shapes       x [T, H, k] e4m3, w [H, n, k] e4m3: base and strides are multiples of 16 bytes; the
 *              scales fp32, or x's four exponents per int32, any strides; out [T, H, n] bf16
 * Shared mem   a ring of STEPS steps. A step has [TOKENS + OUTPUTS][128] bytes, a scale word per
 *              token, and one scale of the weight. Chunk j of row i is at index j ^ 4 (i % 2), so
 *              that the eight lanes of a 128-byte read touch eight banks. Tiles of 16 tokens x 64
 *              outputs have 8 steps of 10.1 KiB, tiles of 64 x 64 have 4 of 16.3 KiB
 * Roles        128 threads bring a step with cp.async, STEPS - 1 steps ahead, and multiply: four
 *              warps of 16 tokens x 16 outputs, or of 32 x 32. There is a barrier per step: all
 *              have read the step that is overwritten next, and all see what others have copied.
 * Roofline     Up to 64 tokens the weight's bytes bind: 8 x 1024 x 4096 take 8 us of an H200's HBM.
 *              Beyond, mma.sync and the conversions of both operands bind.
 * Numerics     e4m3 is exact in fp16 (or 2^-8 of it, see SMLA_E4M3_UNIT), and so are products. A
 *              step is summed in fp32 by tensor cores, then multiplied by its factor, which is
 *              x_scale * w_scale rounded to fp32, and added in fp32. NaN reaches only results of
 *              its own token or output. Lanes take values of k in another order than k's. The order
 *              of a sum depends on k alone.
 * Source       DeepGEMM, for a sum per 128 values; the kernel is ours.
 */
#include "cuda/projection/projection_e4m3.cuh"

namespace {

enum {
    BLOCK_THREADS = 128,
    PARITY_BIT = 1, /* the bit of a row's index that its chunks' order depends on */
    HALF_CHUNKS = ROW_CHUNKS / 2,
    WORDS = CHUNK_BYTES / 4, /* words per chunk: a word is a lane's part of a k-step of 16 values */
};

/* A tile of results. A warp has ROW_TILES x 16 of its tokens and COLUMN_TILES x 8 of its
 * outputs. */
template <int WARP_ROWS_, int ROW_TILES_, int COLUMN_TILES_, int STEPS_> struct tile_shape {
    static constexpr int WARP_ROWS = WARP_ROWS_; /* number of warps along the tokens */
    static constexpr int ROW_TILES = ROW_TILES_;
    static constexpr int COLUMN_TILES = COLUMN_TILES_;
    static constexpr int STEPS = STEPS_; /* steps of the ring, a power of two */
    static constexpr int WARP_COLUMNS = BLOCK_THREADS / SMLA_WARP_LANES / WARP_ROWS;
    static constexpr int TOKENS = WARP_ROWS * ROW_TILES * 16;
    static constexpr int OUTPUTS = WARP_COLUMNS * COLUMN_TILES * 8;
};

using small_tile = tile_shape<1, 1, 2, 8>;  /* 16 tokens x 64 outputs */
using medium_tile = tile_shape<2, 2, 4, 4>; /* 64 tokens x 64 outputs */

template <typename Shape> struct tile_memory {
    alignas(128) uint8_t tokens[Shape::STEPS][Shape::TOKENS][STEP_VALUES];
    uint8_t weights[Shape::STEPS][Shape::OUTPUTS][STEP_VALUES];
    uint32_t token_scales[Shape::STEPS][Shape::TOKENS];
    float weight_scale[Shape::STEPS];
};

template <typename Shape> struct tile_sums {
    /* Sums per lane, in the layout of D in ptx.cuh. */
    float d[Shape::ROW_TILES][Shape::COLUMN_TILES][4];
};

/* ---- Copies -------------------------------------------------------------------------------- */

/* Starts the copies of a step. The outputs of a tile share one scale of the weight, because the
 * first output is a multiple of 64. */
template <typename Shape>
__device__ __forceinline__ void
copy_step(const e4m3_projection &args, const result_tile &tile, int64_t step,
          tile_memory<Shape> *shared)
{
    static_assert(Shape::OUTPUTS == 64 && Shape::TOKENS < BLOCK_THREADS, "a thread per scale");
    const smla_projection_params &p = args.p;
    const int slot = (int)(step % Shape::STEPS);
    const int thread = (int)threadIdx.x;
    const int64_t num_tokens = p.num_tokens - tile.token;
    copy_rows<Shape::TOKENS, BLOCK_THREADS, PARITY_BIT, HALF_CHUNKS>(
        ptx_shared_address(shared->tokens[slot]), first_token_row(p, tile) + step * STEP_VALUES,
        p.x_stride_token, num_tokens, thread);
    copy_rows<Shape::OUTPUTS, BLOCK_THREADS, PARITY_BIT, HALF_CHUNKS>(
        ptx_shared_address(shared->weights[slot]), first_weight_row(p, tile) + step * STEP_VALUES,
        p.w_stride_outer, p.outer_dim - tile.outer, thread);
    if (thread < Shape::TOKENS) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->token_scales[slot][thread]),
                               smla_token_scale_word(&p.scales, tile.token + thread, tile.head,
                                                     step),
                               thread < num_tokens);
    } else if (thread == Shape::TOKENS) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->weight_scale[slot]),
                               smla_weight_scale(&p.scales, tile.head, tile.outer, step), true);
    }
}

/* ---- Products ------------------------------------------------------------------------------ */

/* Loads the lane's chunk of a row in half a step. Lane c of four has values 16 c to 16 c + 15, so
 * that a word is the lane's part of an operand for 16 values of k. */
__device__ __forceinline__ void
load_chunk(const uint8_t (*rows)[STEP_VALUES], int row, int half, uint32_t words[WORDS])
{
    const int chunk = half * HALF_CHUNKS + (int)threadIdx.x % 4;
    const int index = chunk ^ (row & PARITY_BIT) * HALF_CHUNKS;
    ptx_load_shared_16(ptx_shared_address(&rows[row][index * CHUNK_BYTES]), words);
}

/* The index of the first token row, and below of the first output row, that this lane loads. */
template <typename Shape>
__device__ __forceinline__ int
token_row(void)
{
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    return warp / Shape::WARP_COLUMNS * Shape::ROW_TILES * 16 +
           (int)threadIdx.x % SMLA_WARP_LANES / 4;
}

template <typename Shape>
__device__ __forceinline__ int
output_row(void)
{
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    return warp % Shape::WARP_COLUMNS * Shape::COLUMN_TILES * 8 +
           (int)threadIdx.x % SMLA_WARP_LANES / 4;
}

/* sums += the products of half a step, which is 64 values of k. */
template <typename Shape>
__device__ __forceinline__ void
multiply_half(const tile_memory<Shape> *shared, int slot, int half, tile_sums<Shape> *sums)
{
    uint32_t tokens[Shape::ROW_TILES][2][WORDS];
    uint32_t weights[Shape::COLUMN_TILES][WORDS];
#pragma unroll
    for (int i = 0; i < 2 * Shape::ROW_TILES; i++) {
        load_chunk(shared->tokens[slot], token_row<Shape>() + 8 * i, half, tokens[i / 2][i % 2]);
    }
#pragma unroll
    for (int j = 0; j < Shape::COLUMN_TILES; j++) {
        load_chunk(shared->weights[slot], output_row<Shape>() + 8 * j, half, weights[j]);
    }
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        uint32_t b[Shape::COLUMN_TILES][2];
#pragma unroll
        for (int j = 0; j < Shape::COLUMN_TILES; j++) {
            smla_widen_e4m3x4(weights[j][word], b[j]);
        }
#pragma unroll
        for (int i = 0; i < Shape::ROW_TILES; i++) {
            uint32_t rows[2][2];
            smla_widen_e4m3x4(tokens[i][0][word], rows[0]);
            smla_widen_e4m3x4(tokens[i][1][word], rows[1]);
            const uint32_t a[4] = {rows[0][0], rows[1][0], rows[0][1], rows[1][1]};
#pragma unroll
            for (int j = 0; j < Shape::COLUMN_TILES; j++) {
                ptx_mma_f16(sums->d[i][j], a, b[j]);
            }
        }
    }
}

template <typename Shape>
__device__ __forceinline__ void
clear_sums(tile_sums<Shape> *sums)
{
#pragma unroll
    for (int i = 0; i < Shape::ROW_TILES * Shape::COLUMN_TILES * 4; i++) {
        sums->d[i / 4 / Shape::COLUMN_TILES][i / 4 % Shape::COLUMN_TILES][i % 4] = 0.0f;
    }
}

/* sums += each token's factor * the products of a step. */
template <typename Shape>
__device__ __forceinline__ void
add_step(const e4m3_projection &args, int64_t step, const tile_memory<Shape> *shared,
         tile_sums<Shape> *sums)
{
    const int slot = (int)(step % Shape::STEPS);
    tile_sums<Shape> products;
    clear_sums(&products);
#pragma unroll 1 /* unrolled, the loads of both halves would spill registers */
    for (int half = 0; half < 2; half++) {
        multiply_half(shared, slot, half, &products);
    }
    const float weight_scale = shared->weight_scale[slot];
#pragma unroll
    for (int i = 0; i < 2 * Shape::ROW_TILES; i++) {
        const uint32_t word = shared->token_scales[slot][token_row<Shape>() + 8 * i];
        const float factor = smla_scale_of_word(&args.p.scales, word, step) * weight_scale;
#pragma unroll
        for (int j = 0; j < Shape::COLUMN_TILES; j++) {
            float *const to = sums->d[i / 2][j] + i % 2 * 2;
            const float *const from = products.d[i / 2][j] + i % 2 * 2;
            to[0] = fmaf(from[0] * (SMLA_E4M3_UNIT * SMLA_E4M3_UNIT), factor, to[0]);
            to[1] = fmaf(from[1] * (SMLA_E4M3_UNIT * SMLA_E4M3_UNIT), factor, to[1]);
        }
    }
}

/* ---- A tile -------------------------------------------------------------------------------- */

template <typename Shape>
__device__ __forceinline__ void
compute_tile(const e4m3_projection &args, const result_tile &tile, tile_memory<Shape> *shared,
             tile_sums<Shape> *sums)
{
    clear_sums(sums);
#pragma unroll 1
    for (int64_t step = 0; step < Shape::STEPS - 1; step++) {
        if (step < args.num_steps) {
            copy_step(args, tile, step, shared);
        }
        ptx_cp_async_commit();
    }
#pragma unroll 1
    for (int64_t step = 0; step < args.num_steps; step++) {
        ptx_cp_async_wait<Shape::STEPS - 2>();
        __syncthreads();
        if (step + Shape::STEPS - 1 < args.num_steps) {
            copy_step(args, tile, step + Shape::STEPS - 1, shared);
        }
        /* Where nothing is copied, an empty group keeps the count of groups right. */
        ptx_cp_async_commit();
        add_step(args, step, shared, sums);
    }
    /* All have read this tile's last steps, which the next tile's first ones overwrite. */
    __syncthreads();
}

template <typename Shape>
__global__ void
__launch_bounds__(BLOCK_THREADS, 2) project_e4m3(const __grid_constant__ e4m3_projection args)
{
    extern __shared__ __align__(128) uint8_t memory[];
    tile_memory<Shape> *const shared = (tile_memory<Shape> *)memory;
    ptx_wait_for_grids();
    for (int64_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        const result_tile tile = find_tile(args, number, Shape::TOKENS, Shape::OUTPUTS);
        tile_sums<Shape> sums;
        compute_tile(args, tile, shared, &sums);
        const int64_t outer = tile.outer + output_row<Shape>() - threadIdx.x % SMLA_WARP_LANES / 4 +
                              threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * Shape::ROW_TILES; i++) {
            const int64_t token = tile.token + token_row<Shape>() + 8 * i;
#pragma unroll
            for (int j = 0; j < Shape::COLUMN_TILES; j++) {
                const float *const pair = sums.d[i / 2][j] + i % 2 * 2;
                store_pair(args, tile.head, token, outer + 8 * j, pair[0], pair[1]);
            }
        }
    }
}

template <typename Shape>
cudaError_t
launch_tiles(const smla_projection_params *p)
{
    static uint64_t allowed;
    const int bytes = (int)sizeof(tile_memory<Shape>);
    const cudaError_t code = allow_shared_bytes((const void *)project_e4m3<Shape>, bytes,
                                                p->call.stream.device_id, &allowed);
    const e4m3_projection args = make_projection(p, Shape::TOKENS, Shape::OUTPUTS);
    return code != cudaSuccess ? code
                               : smla_launch(project_e4m3<Shape>, args, args.num_tiles,
                                             BLOCK_THREADS, bytes, p->call.stream);
}

} // namespace

cudaError_t
smla_cuda_launch_projection_e4m3(const smla_projection_params *p)
{
    const bool has_chunks =
        smla_is_multiple(p->x, p->x_stride_token | p->x_stride_head, CHUNK_BYTES) &&
        smla_is_multiple(p->w, p->w_stride_outer | p->w_stride_head, CHUNK_BYTES);
    if (!has_chunks) {
        return smla_cuda_launch_projection(p);
    }
    const smla_cuda_device *const device = smla_cuda_find_device(p->call.stream.device_id);
    if (p->num_tokens > MOST_EXACT_TOKENS && smla_cuda_is_hopper(device)) {
        return smla_cuda_launch_projection_e4m3_sm90(p);
    }
    return p->num_tokens <= small_tile::TOKENS ? launch_tiles<small_tile>(p)
                                               : launch_tiles<medium_tile>(p);
}
