/* projection_e4m3.cuh: what the kernels of e4m3 projections share: tiles of results, 16-byte chunks
 * of rows in shared memory, the store of results, and the second sums of those that overflowed.
 *
 * A step is 128 values of k, which have one scale per token and one per 128 outputs. Instances with
 * PER_OUTPUT have one scale per output instead, which multiplies the whole sum. In shared memory a
 * row of a step is 128 bytes: eight chunks, in an order that the kernel chooses.
 */
#pragma once

#include "core/projection_scale.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

enum {
    STEP_VALUES = SMLA_SCALE_TILE, /* bytes per row of a step */
    CHUNK_BYTES = 16,
    ROW_CHUNKS = STEP_VALUES / CHUNK_BYTES,
};

/* The most tokens for which Hopper's kernel is not used, because FP8 tensor cores would gain
 * nothing. */
enum { MOST_EXACT_TOKENS = 64 };

/* The launchers of projection_e4m3_sm90.cu and projection_e4m3_wide_sm90.cu. */
extern "C" cudaError_t smla_cuda_launch_projection_e4m3_sm90(const smla_projection_params *params);
extern "C" cudaError_t
smla_cuda_launch_projection_e4m3_wide_sm90(const smla_projection_params *params);

enum { WIDE_OUTPUTS = 256 }; /* outputs of a tile of projection_e4m3_wide_sm90.cu */

/* Whether up to MOST_EXACT_TOKENS tokens have so many outputs that each SM has a wide tile. */
static inline bool
smla_is_projection_wide(const smla_projection_params *p, int64_t num_sms)
{
    return p->inner_dim > 0 && p->num_heads * (p->outer_dim / WIDE_OUTPUTS) >= num_sms;
}

/* The argument of the kernels. */
typedef struct e4m3_projection {
    smla_projection_params p;
    smla_divisor output_tiles; /* number of tiles per head */
    smla_divisor token_tiles;  /* number of tiles per head */
    int64_t num_tiles;         /* number of tiles of all heads */
    int64_t num_steps;
    bool pairs_are_aligned; /* whether outputs 2 i and 2 i + 1 can be stored as one word */
} e4m3_projection;

/* The head, the first token and the first output of a tile. */
typedef struct result_tile {
    int64_t head;
    int64_t token;
    int64_t outer;
} result_tile;

static inline e4m3_projection
make_projection(const smla_projection_params *p, int tile_tokens, int tile_outputs)
{
    const int64_t output_tiles = smla_count_parts(p->outer_dim, tile_outputs);
    const int64_t token_tiles = smla_count_parts(p->num_tokens, tile_tokens);
    return e4m3_projection{*p,
                           smla_make_divisor(output_tiles),
                           smla_make_divisor(token_tiles),
                           p->num_heads * token_tiles * output_tiles,
                           p->inner_dim / STEP_VALUES,
                           smla_are_rows_aligned(p->out, p->out_stride_token, p->out_stride_head,
                                                 4)};
}

/* Starts a kernel with a block per tile, but at most so many blocks. */
template <auto KERNEL>
static cudaError_t
launch_projection(const smla_projection_params *p, int tile_tokens, int tile_outputs,
                  int64_t most_blocks, int block_threads, int shared_bytes)
{
    static uint64_t allowed;
    const e4m3_projection args = make_projection(p, tile_tokens, tile_outputs);
    return smla_launch_large(KERNEL, args,
                             args.num_tiles < most_blocks ? args.num_tiles : most_blocks,
                             block_threads, shared_bytes, shared_bytes, p->call.stream, &allowed);
}

/* A position in a ring of steps. Every role goes through all steps of all tiles in the same
 * order. */
typedef struct ring_position {
    int slot;
    uint32_t parity; /* the parity of the slot's phase */
} ring_position;

template <int STEPS>
static __device__ __forceinline__ void
advance(ring_position *position)
{
    position->slot = position->slot == STEPS - 1 ? 0 : position->slot + 1;
    position->parity ^= position->slot == 0;
}

/* Finds a tile. Tiles that run at the same time differ in their outputs first. So they share the
 * rows of their tokens, and the weight of a head stays in L2. */
static __device__ __forceinline__ result_tile
find_tile(const e4m3_projection &args, int64_t number, int tile_tokens, int tile_outputs)
{
    const int64_t row = smla_divide(number, args.output_tiles);
    const int64_t head = smla_divide(row, args.token_tiles);
    const int64_t column = number - row * args.output_tiles.divisor;
    return result_tile{head, (row - head * args.token_tiles.divisor) * tile_tokens,
                       column * tile_outputs};
}

/* The e4m3 row of the tile's first token, and below of its first output. */
static __device__ __forceinline__ const uint8_t *
first_token_row(const smla_projection_params &p, const result_tile &tile)
{
    return (const uint8_t *)p.x + tile.token * p.x_stride_token + tile.head * p.x_stride_head;
}

static __device__ __forceinline__ const uint8_t *
first_weight_row(const smla_projection_params &p, const result_tile &tile)
{
    return (const uint8_t *)p.w + tile.head * p.w_stride_head + tile.outer * p.w_stride_outer;
}

/* The scales of outputs `outer` and outer + 1; 0 for an output that does not exist. */
typedef struct output_scales {
    float first;
    float second;
} output_scales;

static __device__ __forceinline__ output_scales
load_output_scales(const smla_projection_params &p, int64_t head, int64_t outer)
{
    const float *const scale = smla_output_scale(&p.scales, head, outer);
    return output_scales{outer < p.outer_dim ? __ldg(scale) : 0.0f,
                         outer + 1 < p.outer_dim ? __ldg(scale + p.scales.w_stride_outer) : 0.0f};
}

/* Tells from pairs of results whether one of them was not finite, so that mend_pair must look at
 * them. Sums of results times 0, in bf16: 0 or -0, unless one was infinite or NaN. */
typedef uint32_t lost_results;

static __device__ __forceinline__ bool
has_lost(lost_results lost)
{
    return (lost & 0x7FFF7FFFu) != 0;
}

/* Stores the results of outputs `outer` and outer + 1, if they exist, and adds them to `lost`. */
static __device__ __forceinline__ lost_results
store_pair(const e4m3_projection &args, int64_t head, int64_t token, int64_t outer, float first,
           float second, lost_results lost)
{
    const smla_projection_params &p = args.p;
    uint16_t *const out = p.out + token * p.out_stride_token + head * p.out_stride_head + outer;
    const uint32_t pair = smla_cvt_bf16x2(first, second);
    if (token >= p.num_tokens || outer >= p.outer_dim) {
        return lost;
    }
    if (args.pairs_are_aligned && outer + 1 < p.outer_dim) {
        smla_store_vector_1(out, &pair);
    } else {
        out[0] = (uint16_t)pair;
        if (outer + 1 < p.outer_dim) {
            out[1] = (uint16_t)(pair >> 16);
        }
    }
    return ptx_fma_bf16x2(pair, 0, lost);
}

/* ---- Results that fp32 cannot sum ---------------------------------------------------------- */

/* One result in fp64, which holds every product of scales. The lanes of a warp share each step. */
static __device__ __forceinline__ float
sum_in_double(const smla_projection_params &p, int64_t head, int64_t token, int64_t outer)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const uint8_t *const x = first_token_row(p, result_tile{head, token, outer});
    const uint8_t *const w = first_weight_row(p, result_tile{head, token, outer});
    double sum = 0.0;
#pragma unroll 1
    for (int64_t k = 0; k < p.inner_dim; k += STEP_VALUES) {
        const int64_t tile = k / STEP_VALUES;
        double products = 0.0;
#pragma unroll 1
        for (int i = lane; i < STEP_VALUES; i += SMLA_WARP_LANES) {
            products += (double)(smla_e4m3_to_float(x[k + i]) * smla_e4m3_to_float(w[k + i]));
        }
        sum += products * smla_token_scale(&p.scales, token, head, tile) *
               (p.scales.w_is_per_output ? 1.0f : *smla_weight_scale(&p.scales, head, outer, tile));
    }
#pragma unroll 1
    for (int distance = SMLA_WARP_LANES / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
    }
    return (float)(p.scales.w_is_per_output ? sum * *smla_output_scale(&p.scales, head, outer)
                                            : sum);
}

/* Computes the results of a stored pair again, where they are not finite: a product of scales, or a
 * part of a sum, may have overflowed on the way to a result that fits. All lanes of a warp call it.
 * It reads the results back, because holding the sums for it would cost registers. */
static __device__ __forceinline__ void
mend_pair(const e4m3_projection &args, int64_t head, int64_t token, int64_t outer)
{
    const smla_projection_params &p = args.p;
#pragma unroll 1
    for (int64_t own = outer; own < outer + 2; own++) {
        uint16_t *const out = p.out + token * p.out_stride_token + head * p.out_stride_head + own;
        const bool exists = token < p.num_tokens && own < p.outer_dim;
        uint32_t lost = __ballot_sync(~0u, exists && (*out & 0x7F80) == 0x7F80);
#pragma unroll 1
        for (; lost != 0; lost &= lost - 1) {
            const int lane = __ffs((int)lost) - 1;
            const float sum = sum_in_double(p, head, __shfl_sync(~0u, (long long)token, lane),
                                            __shfl_sync(~0u, (long long)own, lane));
            if ((int)threadIdx.x % SMLA_WARP_LANES == lane) {
                *out = smla_float_to_bf16(sum);
            }
        }
    }
}
