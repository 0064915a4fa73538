/* projection_e4m3_sm90.cu: projections of many tokens of e4m3 with scales, by Hopper's FP8 tensor
 * cores. projection_e4m3.cu serves fewer tokens, more exactly.
 *
 * Computes     out[t,h,n] = sum_b x_scale[t,h,b] w_scale[h,n/128,b] sum_k x[t,h,k] w[h,n,k],
 *              where b is a block of 128 values of k, a step; or with a w_scale[h,n] per output,
 *              which multiplies the whole sum
 * Shapes       as projection_e4m3.cu
 * Shared mem   a ring of 6 steps, 192 KiB: tokens [128][128] and weights [128][128] e4m3, with a
 *              swizzle of 128 bytes (wgmma.cuh); a scale word per token, one scale of the weight;
 *              mbarriers
 * Roles        A CTA per SM, which takes tiles of 128 tokens x 128 outputs i, i + grid, ...
 *              4 copy warps     bring steps with cp.async, as far ahead as the ring is long
 *              2 warpgroups     64 tokens each: products of a step, then sums += factor * products.
 *                               While one group adds, the other one's products are under way.
 *              mbarriers        arrivals | waiting threads
 *              full[slot]       128 copy threads, when their copies have arrived | consumers
 *              empty[slot]      256 consumers, after their products | copy warps
 * Roofline     2 * T * H * n * k FLOP. A step takes 512 cycles of tensor cores. Operands take 384
 *              cycles of shared memory to read and 256 to write, so that shared memory binds.
 * Numerics     The tensor cores add the products of a step with about 14 bits. The sum is
 *              multiplied by its factor, x_scale * w_scale rounded to fp32, and added in fp32:
 *              errors are below 2^-8 sum |x w| instead of 2^-16. NaN reaches only results of its
 *              own token or output. Results that are not finite are computed again, in fp64. The
 *              order of a sum depends on k alone.
 * Source       DeepGEMM's sm90_fp8_gemm_1d2d, for adding a step's products to sums in registers;
 *              copies without tensor maps, which take any strides, are ours.
 */
#include "cuda/projection/projection_e4m3.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace {

enum {
    TILE_TOKENS = 128,
    TILE_OUTPUTS = 128,
    RING_STEPS = 6,
    CONSUMERS = 256,
    COPIERS = 128,
    GROUP_THREADS = 128,
    GROUP_TOKENS = 64,
    SWIZZLE_BITS = 7, /* a chunk's index is xor-ed with its row's index modulo 8 */
    TILE_STEP_BYTES = TILE_TOKENS * STEP_VALUES,
    NUM_SUMS = GROUP_TOKENS * TILE_OUTPUTS / GROUP_THREADS,
    K_STEPS = STEP_VALUES / 32, /* number of products per step, of 32 values of k each */
};

static_assert((int)TILE_TOKENS == (int)TILE_OUTPUTS && (int)TILE_TOKENS == (int)COPIERS,
              "both operands take as much memory, and a copy thread brings a token's scale");

struct ring_memory {
    alignas(1024) uint8_t tokens[RING_STEPS][TILE_TOKENS][STEP_VALUES];
    alignas(1024) uint8_t weights[RING_STEPS][TILE_OUTPUTS][STEP_VALUES];
    uint32_t token_scales[RING_STEPS][TILE_TOKENS];
    float weight_scale[RING_STEPS];
    alignas(8) uint64_t full[RING_STEPS];
    uint64_t empty[RING_STEPS];
};

/* ---- Copy warps ---------------------------------------------------------------------------- */

/* Copies a step's ROWS rows; rows from num_rows on become zeros. `to` is the address of the first
 * row in shared memory, `from` that of its values. Chunk j of row i goes to index j ^ i % 8. */
template <int ROWS>
__device__ __forceinline__ void
copy_rows(uint32_t to, const uint8_t *from, int64_t stride, int64_t num_rows, int thread)
{
    constexpr int ROWS_APART = COPIERS / ROW_CHUNKS;
    static_assert(ROWS % ROWS_APART == 0, "all threads copy equally many chunks");
    const int chunk = thread % ROW_CHUNKS;
#pragma unroll
    for (int i = 0; i < ROWS / ROWS_APART; i++) {
        const int row = thread / ROW_CHUNKS + i * ROWS_APART;
        const int index = chunk ^ (row & SWIZZLE_BITS);
        ptx_cp_async_16_or_zero(to + row * STEP_VALUES + index * CHUNK_BYTES,
                                from + row * stride + chunk * CHUNK_BYTES, row < num_rows);
    }
}

template <bool PER_OUTPUT>
__device__ __forceinline__ void
copy_step(const e4m3_projection &args, const result_tile &tile, int64_t step, int slot,
          ring_memory *shared)
{
    const smla_projection_params &p = args.p;
    const int thread = (int)threadIdx.x - CONSUMERS;
    const int64_t num_tokens = p.num_tokens - tile.token;
    copy_rows<TILE_TOKENS>(ptx_shared_address(shared->tokens[slot]),
                           first_token_row(p, tile) + step * STEP_VALUES, p.x_stride_token,
                           num_tokens, thread);
    copy_rows<TILE_OUTPUTS>(ptx_shared_address(shared->weights[slot]),
                            first_weight_row(p, tile) + step * STEP_VALUES, p.w_stride_outer,
                            p.outer_dim - tile.outer, thread);
    ptx_cp_async_4_or_zero(ptx_shared_address(&shared->token_scales[slot][thread]),
                           smla_token_scale_word(&p.scales, tile.token + thread, tile.head, step),
                           thread < num_tokens);
    if (!PER_OUTPUT && thread == 0) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->weight_scale[slot]),
                               smla_weight_scale(&p.scales, tile.head, tile.outer, step), true);
    }
}

template <bool PER_OUTPUT>
__device__ __forceinline__ void
copy_tiles(const e4m3_projection &args, ring_memory *shared)
{
    ring_position position = {0, 0};
    for (int64_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        const result_tile tile = find_tile(args, number, TILE_TOKENS, TILE_OUTPUTS);
#pragma unroll 1
        for (int64_t step = 0; step < args.num_steps; step++) {
            ptx_mbarrier_wait(ptx_shared_address(&shared->empty[position.slot]),
                              position.parity ^ 1);
            copy_step<PER_OUTPUT>(args, tile, step, position.slot, shared);
            ptx_mbarrier_arrive_after_copies(ptx_shared_address(&shared->full[position.slot]));
            advance<RING_STEPS>(&position);
        }
    }
}

/* ---- Consumers ----------------------------------------------------------------------------- */

/* The first of the thread's two tokens in the tile; the second comes 8 tokens later. */
__device__ __forceinline__ int
token_of_thread(void)
{
    return (int)threadIdx.x / SMLA_WARP_LANES * 16 + (int)threadIdx.x % SMLA_WARP_LANES / 4;
}

/* wgmma descriptors of the warpgroup's tokens and of the weights, both in slot 0. */
typedef struct tile_operands {
    uint64_t tokens;
    uint64_t weights;
} tile_operands;

__device__ __forceinline__ tile_operands
find_operands(const ring_memory *shared)
{
    const int group = (int)threadIdx.x / GROUP_THREADS;
    return tile_operands{wgmma_descriptor(ptx_shared_address(
                                              shared->tokens[0][group * GROUP_TOKENS]),
                                          8 * STEP_VALUES, WGMMA_SWIZZLE_128),
                         wgmma_descriptor(ptx_shared_address(shared->weights[0]), 8 * STEP_VALUES,
                                          WGMMA_SWIZZLE_128)};
}

/* sums += each token's factor * the products of the step at `position`. */
template <bool PER_OUTPUT>
__device__ __forceinline__ void
add_step(const e4m3_projection &args, int64_t step, const tile_operands &operands,
         const ring_position &position, ring_memory *shared, float (&products)[NUM_SUMS],
         float (&sums)[NUM_SUMS])
{
    const uint64_t moved = (uint64_t)(position.slot * (TILE_STEP_BYTES >> 4));
    ptx_mbarrier_wait(ptx_shared_address(&shared->full[position.slot]), position.parity);
    ptx_fence_async_shared(); /* makes what cp.async wrote visible to wgmma */
    const int token = token_of_thread();
    const uint32_t words[2] = {shared->token_scales[position.slot][token],
                               shared->token_scales[position.slot][token + 8]};
    const float weight_scale = PER_OUTPUT ? 1.0f : shared->weight_scale[position.slot];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
        wgmma_e4m3(products, operands.tokens + moved + 2 * k, operands.weights + moved + 2 * k,
                   k != 0);
    }
    wgmma_commit();
    const float factors[2] = {smla_scale_of_word(&args.p.scales, words[0], step) * weight_scale,
                              smla_scale_of_word(&args.p.scales, words[1], step) * weight_scale};
    wgmma_wait<0>();
    ptx_mbarrier_arrive(ptx_shared_address(&shared->empty[position.slot]), true);
#pragma unroll
    for (int i = 0; i < NUM_SUMS; i++) {
        sums[i] = fmaf(products[i], factors[i / 2 % 2], sums[i]);
    }
}

template <bool PER_OUTPUT>
__device__ __forceinline__ void
consume_tiles(const e4m3_projection &args, ring_memory *shared)
{
    const tile_operands operands = find_operands(shared);
    ring_position position = {0, 0};
    for (int64_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        const result_tile tile = find_tile(args, number, TILE_TOKENS, TILE_OUTPUTS);
        float products[NUM_SUMS];
        float sums[NUM_SUMS];
#pragma unroll
        for (int i = 0; i < NUM_SUMS; i++) {
            sums[i] = 0.0f;
        }
#pragma unroll 1
        for (int64_t step = 0; step < args.num_steps; step++) {
            add_step<PER_OUTPUT>(args, step, operands, position, shared, products, sums);
            advance<RING_STEPS>(&position);
        }
        const int64_t token = tile.token + token_of_thread();
        const int64_t outer = tile.outer + threadIdx.x % 4 * 2;
        output_scales scales = {1.0f, 1.0f};
        lost_results lost = 0;
#pragma unroll
        for (int i = 0; i < NUM_SUMS / 2; i++) {
            if constexpr (PER_OUTPUT) {
                if (i % 2 == 0) {
                    scales = load_output_scales(args.p, tile.head, outer + i / 2 * 8);
                }
                sums[2 * i] *= scales.first;
                sums[2 * i + 1] *= scales.second;
            }
            lost = store_pair(args, tile.head, token + i % 2 * 8, outer + i / 2 * 8, sums[2 * i],
                              sums[2 * i + 1], lost);
        }
        if (__any_sync(~0u, has_lost(lost))) {
#pragma unroll 1
            for (int i = 0; i < NUM_SUMS / 2; i++) {
                mend_pair(args, tile.head, token + i % 2 * 8, outer + i / 2 * 8);
            }
        }
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

template <bool PER_OUTPUT>
__global__ void
__launch_bounds__(CONSUMERS + COPIERS, 1)
    project_e4m3_sm90(const __grid_constant__ e4m3_projection args)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    ring_memory *const shared = (ring_memory *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING_STEPS; i++) {
            ptx_mbarrier_init(ptx_shared_address(&shared->full[i]), COPIERS);
            ptx_mbarrier_init(ptx_shared_address(&shared->empty[i]), CONSUMERS);
        }
    }
    __syncthreads();
    ptx_wait_for_grids();
    if (threadIdx.x >= CONSUMERS) {
        copy_tiles<PER_OUTPUT>(args, shared);
    } else {
        consume_tiles<PER_OUTPUT>(args, shared);
    }
}

template <bool PER_OUTPUT>
cudaError_t
launch_tiles(const smla_projection_params *p)
{
    return launch_projection<project_e4m3_sm90<PER_OUTPUT>>(
        p, TILE_TOKENS, TILE_OUTPUTS, smla_cuda_find_device(p->call.stream.device_id)->num_sms,
        CONSUMERS + COPIERS, sizeof(ring_memory));
}

} // namespace

cudaError_t
smla_cuda_launch_projection_e4m3_sm90(const smla_projection_params *p)
{
    return p->scales.w_is_per_output ? launch_tiles<true>(p) : launch_tiles<false>(p);
}
