/* projection_e4m3_wide_sm90.cu: projections of up to 64 tokens of e4m3 to many outputs, by Hopper's
 * fp16 tensor cores. projection_e4m3.cu serves fewer outputs.
 *
 * Computes     out[t,h,n] = sum_b x_scale[t,h,b] w_scale[h,n/128,b] sum_k x[t,h,k] w[h,n,k],
 *              where b is a block of 128 values of k, a step; or with a w_scale[h,n] per output,
 *              which multiplies the whole sum
 * Shapes       as projection_e4m3.cu
 * Shared mem   a ring of STEPS steps: weights [256][128] e4m3; tokens [2][TOKENS][64] fp16, with a
 *              swizzle of 128 bytes (wgmma.cuh); a scale per token, two scales of the weight;
 *              mbarriers. 64 tokens: 4 x 48.3 KiB. 16 tokens: 5 x 36.1 KiB
 * Roles        A CTA per SM, which takes tiles of TOKENS tokens x 256 outputs i, i + grid, ...
 *              4 copy warps     bring weights with cp.async, as far ahead as the ring is long, and
 *                               tokens and scales through registers, which become fp16 and fp32
 *              2 warpgroups     128 outputs each, in two blocks of 64, which are the rows of a
 *                               product: weights become fp16 in registers, tokens are its columns.
 *                               While one group converts or adds, the other one's products are
 *                               under way
 *              mbarriers        arrivals | waiting threads
 *              full[slot]       128 copy threads when their copies have arrived, and again when
 *                               they have written tokens | consumers
 *              empty[slot]      256 consumers, after the step's last product | copy warps
 * Roofline     The weight's bytes should bind: [65536][1536] takes 23.4 us at 4.3 TB/s, and 64
 *              tokens need 16 us of tensor cores for that. With the quantisation in front an H200
 *              takes 32.6 us at 1 token and 45.6 at 64 (2026-11-28, `python -m sparse_mla bench
 *              --only linear`); README.md has what was tried.
 * Numerics     e4m3 is exact in fp16, and so are products. Tensor cores sum a step in fp32. Then
 *              it is multiplied by its factor, which is x_scale * w_scale rounded to fp32, and
 *              added in fp32. NaN reaches only results of its own token or output. Values of k
 *              are summed in another order than k's; the order depends on k alone.
 * Source       DeepGEMM, for a sum per 128 values. Weights as the operand in registers are ours.
 */
#include "cuda/projection/projection_e4m3.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace {

enum {
    CONSUMERS = 256,
    COPIERS = 128,
    GROUP_THREADS = 128,
    GROUP_OUTPUTS = SMLA_SCALE_TILE, /* outputs of a warpgroup, with one scale per step */
    BLOCK_OUTPUTS = 64,              /* outputs of a product */
    BLOCKS = GROUP_OUTPUTS / BLOCK_OUTPUTS,
    GROUPS = WIDE_OUTPUTS / GROUP_OUTPUTS,
    HALVES = 2,                        /* halves of a step: rows of 64 fp16 tokens */
    HALF_CHUNKS = ROW_CHUNKS / HALVES, /* chunks of e4m3 */
    WORDS = CHUNK_BYTES / 4,           /* words per chunk, and products per half */
    K_STEPS = HALVES * WORDS,          /* products per step, of 16 values of k each */
    TOKEN_ROW_BYTES = STEP_VALUES,     /* 64 fp16 */
    SWIZZLE_BITS = 7,                  /* bits of a token's index that wgmma's swizzle takes */
    PARITY_BIT = 2, /* the bit of a weight row's index that its chunks' order depends on */
    CONSUMER_REGISTERS = 208,
    COPIER_REGISTERS = 88,
};

static_assert((int)GROUPS * (int)GROUP_THREADS == (int)CONSUMERS, "a warpgroup has 128 outputs");

template <int TOKENS_, int STEPS_> struct wide_shape {
    static constexpr int TOKENS = TOKENS_;
    static constexpr int STEPS = STEPS_;
    static constexpr int SUMS = TOKENS_ / 2; /* per lane and block */
};

using few_tokens = wide_shape<16, 5>;
using most_tokens = wide_shape<64, 4>;

template <typename Shape> struct ring_memory {
    alignas(1024) uint8_t tokens[Shape::STEPS][HALVES][Shape::TOKENS][TOKEN_ROW_BYTES];
    alignas(128) uint8_t weights[Shape::STEPS][WIDE_OUTPUTS][STEP_VALUES];
    alignas(8) float token_scales[Shape::STEPS][Shape::TOKENS];
    float weight_scales[Shape::STEPS][GROUPS];
    alignas(8) uint64_t full[Shape::STEPS];
    uint64_t empty[Shape::STEPS];
};

/* A position in the ring. Every role goes through all steps of all tiles in the same order. */
typedef struct ring_position {
    int slot;
    uint32_t parity; /* the parity of the slot's phase */
} ring_position;

template <typename Shape>
__device__ __forceinline__ void
advance(ring_position *position)
{
    position->slot = position->slot == Shape::STEPS - 1 ? 0 : position->slot + 1;
    position->parity ^= position->slot == 0;
}

/* Finds a tile. It has all tokens. There are fewer than 2^32 tiles, because a tile has at least 256
 * bytes of weights. A division that may be a call would keep all roles to the fewest registers that
 * one of them has. */
__device__ __forceinline__ result_tile
find_wide_tile(const e4m3_projection &args, uint32_t number)
{
    const uint32_t head = smla_divide_uint32(number, args.output_tiles);
    const uint32_t column = number - head * (uint32_t)args.output_tiles.divisor;
    return result_tile{head, 0, (int64_t)column * WIDE_OUTPUTS};
}

/* ---- Copy warps: weights ------------------------------------------------------------------- */

/* The index of a weight row's chunk in shared memory. Eight lanes read four chunks of two rows with
 * one even row between them, in one pass if these rows differ in the order of their halves. */
__device__ __forceinline__ int
chunk_index(int row, int chunk)
{
    return chunk ^ (row & PARITY_BIT) * (HALF_CHUNKS / PARITY_BIT);
}

/* Where a thread's copies of a tile come from: its chunk of rows that are ROWS_APART apart. */
struct weight_copier {
    const uint8_t *from; /* its first chunk, in step 0 */
    int64_t stride;      /* bytes from one of its rows to the next */
    uint32_t to;  /* its first chunk, in bytes behind the first row of a step in shared memory */
    int num_rows; /* those of its rows that exist; others become zeros */
};

enum {
    ROWS_APART = COPIERS / ROW_CHUNKS,
    ROWS_PER_THREAD = WIDE_OUTPUTS / ROWS_APART,
};

__device__ __forceinline__ weight_copier
make_weight_copier(const smla_projection_params &p, const result_tile &tile, int thread)
{
    static_assert(ROWS_APART % (2 * PARITY_BIT) == 0, "a thread's rows have one order of chunks");
    const int row = thread / ROW_CHUNKS, chunk = thread % ROW_CHUNKS;
    const int64_t left = p.outer_dim - tile.outer;
    const int rows = (int)(left < WIDE_OUTPUTS ? left : WIDE_OUTPUTS) - row;
    return weight_copier{first_weight_row(p, tile) + row * p.w_stride_outer + chunk * CHUNK_BYTES,
                         ROWS_APART * p.w_stride_outer,
                         (uint32_t)(row * STEP_VALUES + chunk_index(row, chunk) * CHUNK_BYTES),
                         (rows + ROWS_APART - 1) / ROWS_APART};
}

__device__ __forceinline__ void
copy_weights(const weight_copier &copier, int64_t step, uint32_t to)
{
    const uint8_t *from = copier.from + step * STEP_VALUES;
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++, from += copier.stride) {
        ptx_cp_async_16_or_zero(to + copier.to + i * ROWS_APART * STEP_VALUES, from,
                                i < copier.num_rows);
    }
}

/* Brings the weights of a tile's first steps to L2. The earlier grid need not be over, because this
 * CTA does not read them yet. */
template <typename Shape>
__device__ __forceinline__ void
prefetch_weights(const e4m3_projection &args)
{
    const result_tile tile = find_wide_tile(args, blockIdx.x);
    const int thread = (int)threadIdx.x - CONSUMERS;
    for (int row = thread; row < WIDE_OUTPUTS; row += COPIERS) {
        const uint8_t *const from = first_weight_row(args.p, tile) + row * args.p.w_stride_outer;
        for (int step = 0; step < Shape::STEPS; step++) {
            ptx_prefetch_l2(from + step * STEP_VALUES,
                            tile.outer + row < args.p.outer_dim && step < args.num_steps);
        }
    }
}

/* ---- Copy warps: tokens -------------------------------------------------------------------- */

/* Half a step of a token, which a thread turns into fp16. The first half's thread brings the scale,
 * too. */
struct token_copier {
    const uint8_t *from; /* in step 0 */
    bool exists;         /* else the half is zeros */
    int token;
    int half;
};

struct token_half {
    uint32_t words[HALF_CHUNKS][WORDS];
    uint32_t scale_word;
};

template <typename Shape>
__device__ __forceinline__ token_copier
make_token_copier(const smla_projection_params &p, const result_tile &tile, int thread)
{
    const int token = thread % Shape::TOKENS, half = thread / Shape::TOKENS;
    return token_copier{first_token_row(p, tile) + token * p.x_stride_token +
                            half * HALF_CHUNKS * CHUNK_BYTES,
                        half < HALVES && token < p.num_tokens, token, half};
}

__device__ __forceinline__ void
load_token(const smla_projection_params &p, const result_tile &tile, const token_copier &copier,
           int64_t step, token_half *half)
{
#pragma unroll
    for (int chunk = 0; chunk < HALF_CHUNKS; chunk++) {
        ptx_load_16(copier.from + step * STEP_VALUES + chunk * CHUNK_BYTES, copier.exists,
                    half->words[chunk]);
    }
    ptx_load_4(smla_token_scale_word(&p.scales, copier.token, tile.head, step),
               copier.exists && copier.half == 0, 0, &half->scale_word);
}

/* Writes the half as fp16. Word w of each chunk belongs to product w. There chunk c has rows 2 c,
 * 2 c + 1, 2 c + 8 and 2 c + 9 of B, which are the columns of A that lane c of four has
 * (wgmma.cuh). */
__device__ __forceinline__ void
store_token(const token_copier &copier, const token_half &half, uint32_t row)
{
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        uint32_t low[HALF_CHUNKS], high[HALF_CHUNKS];
#pragma unroll
        for (int chunk = 0; chunk < HALF_CHUNKS; chunk++) {
            ptx_cvt_f16x4_e4m3x4(half.words[chunk][word], &low[chunk], &high[chunk]);
        }
        const int swizzle = copier.token & SWIZZLE_BITS;
        ptx_store_shared_16(row + ((2 * word) ^ swizzle) * CHUNK_BYTES, low);
        ptx_store_shared_16(row + ((2 * word + 1) ^ swizzle) * CHUNK_BYTES, high);
    }
}

/* ---- Copy warps: all ----------------------------------------------------------------------- */

/* Starts the copies of the weight's scales. */
template <typename Shape>
__device__ __forceinline__ void
copy_weight_scales(const smla_projection_params &p, const result_tile &tile, int64_t step, int slot,
                   int thread, ring_memory<Shape> *shared)
{
    const int64_t outer = tile.outer + thread * GROUP_OUTPUTS;
    if (thread < GROUPS) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->weight_scales[slot][thread]),
                               smla_weight_scale(&p.scales, tile.head, outer, step),
                               outer < p.outer_dim);
    }
}

/* Writes the token's half and its scale to shared memory. */
template <typename Shape>
__device__ __forceinline__ void
write_token(const smla_projection_params &p, const token_copier &copier, const token_half &half,
            int64_t step, int slot, ring_memory<Shape> *shared)
{
    if (copier.half < HALVES) {
        store_token(copier, half,
                    ptx_shared_address(shared->tokens[slot][copier.half][copier.token]));
    }
    if (copier.half == 0) {
        shared->token_scales[slot][copier.token] =
            smla_scale_of_word(&p.scales, half.scale_word, step);
    }
}

template <typename Shape, bool PER_OUTPUT>
__device__ __forceinline__ void
copy_tiles(const e4m3_projection &args, ring_memory<Shape> *shared)
{
    const int thread = (int)threadIdx.x - CONSUMERS;
    ring_position position = {0, 0};
    for (uint32_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        const result_tile tile = find_wide_tile(args, number);
        const weight_copier weights = make_weight_copier(args.p, tile, thread);
        const token_copier token = make_token_copier<Shape>(args.p, tile, thread);
        token_half half;
        load_token(args.p, tile, token, 0, &half);
#pragma unroll 1
        for (int64_t step = 0; step < args.num_steps; step++) {
            const int slot = position.slot;
            const uint32_t full = ptx_shared_address(&shared->full[slot]);
            ptx_mbarrier_wait(ptx_shared_address(&shared->empty[slot]), position.parity ^ 1);
            copy_weights(weights, step, ptx_shared_address(shared->weights[slot]));
            if constexpr (!PER_OUTPUT) {
                copy_weight_scales(args.p, tile, step, slot, thread, shared);
            }
            ptx_mbarrier_arrive_after_copies(full);
            write_token(args.p, token, half, step, slot, shared);
            ptx_mbarrier_arrive(full, true);
            if (step + 1 < args.num_steps) {
                load_token(args.p, tile, token, step + 1, &half);
            }
            advance<Shape>(&position);
        }
    }
}

/* ---- Consumers ----------------------------------------------------------------------------- */

/* The first of the lane's two outputs in a block; the second is the next one. They are rows g and
 * g + 8 of the product, so that a lane stores neighbours. */
__device__ __forceinline__ int
output_of_lane(void)
{
    const int warp = (int)threadIdx.x % GROUP_THREADS / SMLA_WARP_LANES;
    return warp * 16 + (int)threadIdx.x % SMLA_WARP_LANES / 4 * 2;
}

/* Loads the lane's weights of a step, for a block whose first row is `rows`, as operands of all
 * products. */
__device__ __forceinline__ void
load_weights(const uint8_t (*rows)[STEP_VALUES], uint32_t (&a)[K_STEPS][4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = output_of_lane() + i;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int chunk = half * HALF_CHUNKS + (int)threadIdx.x % 4;
            uint32_t words[WORDS];
            ptx_load_shared_16(ptx_shared_address(
                                   &rows[row][chunk_index(row, chunk) * CHUNK_BYTES]),
                               words);
#pragma unroll
            for (int word = 0; word < WORDS; word++) {
                uint32_t *const operand = a[half * WORDS + word];
                ptx_cvt_f16x4_e4m3x4(words[word], &operand[i], &operand[2 + i]);
            }
        }
    }
}

/* sums += each token's factor * products. */
template <typename Shape>
__device__ __forceinline__ void
add_products(const float *token_scales, float weight_scale, const float (&products)[Shape::SUMS],
             float (&sums)[Shape::SUMS])
{
#pragma unroll
    for (int j = 0; j < Shape::TOKENS / 8; j++) {
        uint32_t words[2];
        ptx_load_shared_8(ptx_shared_address(&token_scales[8 * j + threadIdx.x % 4 * 2]), words);
        const float factors[2] = {smla_bits_float(words[0]) * weight_scale,
                                  smla_bits_float(words[1]) * weight_scale};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[4 * j + i] = fmaf(products[4 * j + i], factors[i % 2], sums[4 * j + i]);
        }
    }
}

/* Adds a step to the sums of the group's blocks. `tokens` describes the tokens in slot 0. */
template <typename Shape, bool PER_OUTPUT>
__device__ __forceinline__ void
add_step(int slot, uint64_t tokens, const ring_memory<Shape> *shared,
         float (&sums)[BLOCKS][Shape::SUMS])
{
    constexpr int HALF_BYTES = Shape::TOKENS * TOKEN_ROW_BYTES;
    const int group = (int)threadIdx.x / GROUP_THREADS;
    const uint64_t operand = tokens + (uint64_t)(slot * (HALVES * HALF_BYTES >> 4));
    const float weight_scale = PER_OUTPUT ? 1.0f : shared->weight_scales[slot][group];
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        uint32_t a[K_STEPS][4];
        float products[Shape::SUMS];
        load_weights(&shared->weights[slot][group * GROUP_OUTPUTS + block * BLOCK_OUTPUTS], a);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) {
            wgmma_f16<false>(products, a[k],
                             operand + (k / WORDS * HALF_BYTES >> 4) + k % WORDS * 2, k != 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        add_products<Shape>(shared->token_scales[slot], weight_scale, products, sums[block]);
    }
}

template <typename Shape, bool PER_OUTPUT>
__device__ __forceinline__ void
store_block(const e4m3_projection &args, const result_tile &tile, int64_t outer,
            const float (&sums)[Shape::SUMS])
{
    output_scales scales = {1.0f, 1.0f};
    if constexpr (PER_OUTPUT) {
        scales = load_output_scales(args.p, tile.head, outer);
    }
#pragma unroll
    for (int i = 0; i < Shape::SUMS / 2; i++) {
        const int at = i / 2 * 4 + i % 2; /* the first output's; the second's is two behind */
        const int64_t token = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        store_pair(args, tile.head, token, outer, sums[at] * scales.first,
                   sums[at + 2] * scales.second);
    }
}

template <typename Shape, bool PER_OUTPUT>
__device__ __forceinline__ void
consume_tiles(const e4m3_projection &args, ring_memory<Shape> *shared)
{
    const int group = (int)threadIdx.x / GROUP_THREADS;
    const uint64_t tokens = wgmma_descriptor(ptx_shared_address(shared->tokens[0][0]),
                                             8 * TOKEN_ROW_BYTES, WGMMA_SWIZZLE_128);
    ring_position position = {0, 0};
    for (uint32_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        const result_tile tile = find_wide_tile(args, number);
        float sums[BLOCKS][Shape::SUMS] = {};
#pragma unroll 1
        for (int64_t step = 0; step < args.num_steps; step++) {
            ptx_mbarrier_wait(ptx_shared_address(&shared->full[position.slot]), position.parity);
            ptx_fence_async_shared(); /* makes the tokens that threads wrote visible to wgmma */
            add_step<Shape, PER_OUTPUT>(position.slot, tokens, shared, sums);
            ptx_mbarrier_arrive(ptx_shared_address(&shared->empty[position.slot]), true);
            advance<Shape>(&position);
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const int64_t outer = tile.outer + group * GROUP_OUTPUTS + block * BLOCK_OUTPUTS;
            store_block<Shape, PER_OUTPUT>(args, tile, outer + output_of_lane(), sums[block]);
        }
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

template <typename Shape, bool PER_OUTPUT>
__global__ void
__launch_bounds__(CONSUMERS + COPIERS, 1) project_wide(const __grid_constant__ e4m3_projection args)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    ring_memory<Shape> *const shared = (ring_memory<Shape> *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Shape::STEPS; i++) {
            ptx_mbarrier_init(ptx_shared_address(&shared->full[i]), 2 * COPIERS);
            ptx_mbarrier_init(ptx_shared_address(&shared->empty[i]), CONSUMERS);
        }
    }
    if (threadIdx.x >= CONSUMERS) {
        prefetch_weights<Shape>(args);
    }
    __syncthreads(); /* the barriers are initialised */
    ptx_wait_for_grids();
    if (threadIdx.x >= CONSUMERS) {
        ptx_release_registers<COPIER_REGISTERS>();
        copy_tiles<Shape, PER_OUTPUT>(args, shared);
    } else {
        ptx_claim_registers<CONSUMER_REGISTERS>();
        consume_tiles<Shape, PER_OUTPUT>(args, shared);
    }
}

template <typename Shape, bool PER_OUTPUT>
cudaError_t
launch_tiles(const smla_projection_params *p)
{
    static uint64_t allowed;
    const int bytes = (int)sizeof(ring_memory<Shape>);
    const cudaError_t code = allow_shared_bytes((const void *)project_wide<Shape, PER_OUTPUT>,
                                                bytes, p->call.stream.device_id, &allowed);
    const e4m3_projection args = make_projection(p, Shape::TOKENS, WIDE_OUTPUTS);
    const int64_t num_sms = smla_cuda_find_device(p->call.stream.device_id)->num_sms;
    return code != cudaSuccess ? code
                               : smla_launch(project_wide<Shape, PER_OUTPUT>, args,
                                             args.num_tiles < num_sms ? args.num_tiles : num_sms,
                                             CONSUMERS + COPIERS, bytes, p->call.stream);
}

template <typename Shape>
cudaError_t
launch_scaled(const smla_projection_params *p)
{
    return p->scales.w_is_per_output ? launch_tiles<Shape, true>(p) : launch_tiles<Shape, false>(p);
}

} // namespace

cudaError_t
smla_cuda_launch_projection_e4m3_wide_sm90(const smla_projection_params *p)
{
    return p->num_tokens <= few_tokens::TOKENS ? launch_scaled<few_tokens>(p)
                                               : launch_scaled<most_tokens>(p);
}
