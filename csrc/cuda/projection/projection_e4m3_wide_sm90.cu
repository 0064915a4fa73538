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
 *                               tokens and scales through registers, three steps ahead, which
 *                               become fp16 and fp32
 *              2 warpgroups     128 outputs each, in two blocks of 64, which are the rows of a
 *                               product: weights become fp16 in registers, tokens are its columns.
 *                               While one group converts or adds, the other one's products are
 *                               under way
 *              mbarriers        arrivals | waiting threads
 *              full[slot]       128 copy threads when their copies have arrived, and again when
 *                               they have written tokens | consumers
 *              empty[slot]      256 consumers, after the step's last product | copy warps
 * Roofline     The weight's bytes should bind: [65536][1536] takes 23.4 us at 4.3 TB/s, and 64
 *              tokens need 16 us of tensor cores for that. On an H200 a tile of 1 token takes
 *              1.02 times its bytes' time, and one of 64 tokens 1.3 to 1.4 times, to which 5 us
 *              for the quantisation, starts and ends are added; README.md has what was tried.
 * Numerics     e4m3 is exact in fp16, and so are products. Tensor cores sum a step in fp32. Then
 *              it is multiplied by its factor, which is x_scale * w_scale rounded to fp32, and
 *              added in fp32. NaN reaches only results of its own token or output. Results that
 *              are not finite are computed again, in fp64. Values of k are summed in another order
 *              than k's; the order depends on k alone.
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
    PARITY_BIT = 2,  /* the bit of a weight row's index that its chunks' order depends on */
    STEPS_AHEAD = 3, /* steps whose tokens a copy warp has loaded */
    CONSUMER_REGISTERS = 200,
    COPIER_REGISTERS = 104,
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

/* The thread's number among the copy threads. */
__device__ __forceinline__ int
copy_thread(void)
{
    return (int)threadIdx.x - CONSUMERS;
}

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
make_weight_copier(const smla_projection_params &p, const result_tile &tile)
{
    const int thread = copy_thread();
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
    for (int row = copy_thread(); row < WIDE_OUTPUTS; row += COPIERS) {
        const uint8_t *const from = first_weight_row(args.p, tile) + row * args.p.w_stride_outer;
        for (int step = 0; step < Shape::STEPS; step++) {
            ptx_prefetch_l2(from + step * STEP_VALUES,
                            tile.outer + row < args.p.outer_dim && step < args.num_steps);
        }
    }
}

/* ---- Copy warps: tokens -------------------------------------------------------------------- */

/* Where a thread's chunks of tokens come from: the same chunk of tokens that are TOKENS_APART
 * apart, so that eight lanes read a row. */
struct token_copier {
    const uint8_t *from; /* its first chunk, in step 0 */
    int token;           /* the first chunk's */
    int chunk;
};

enum { TOKENS_APART = COPIERS / ROW_CHUNKS };

/* A thread's share of a step. */
template <typename Shape> struct token_chunks {
    static constexpr int COUNT = Shape::TOKENS / TOKENS_APART;
    uint32_t words[COUNT][WORDS];
    uint32_t scale_word; /* its token is the one with the thread's number */
};

__device__ __forceinline__ token_copier
make_token_copier(const smla_projection_params &p, const result_tile &tile)
{
    const int token = copy_thread() / ROW_CHUNKS, chunk = copy_thread() % ROW_CHUNKS;
    return token_copier{first_token_row(p, tile) + token * p.x_stride_token + chunk * CHUNK_BYTES,
                        token, chunk};
}

template <typename Shape>
__device__ __forceinline__ void
load_tokens(const smla_projection_params &p, const result_tile &tile, const token_copier &copier,
            int64_t step, token_chunks<Shape> *chunks)
{
    const int thread = copy_thread();
    const uint8_t *from = copier.from + step * STEP_VALUES;
#pragma unroll
    for (int i = 0; i < token_chunks<Shape>::COUNT; i++) {
        ptx_load_16(from, copier.token + i * TOKENS_APART < p.num_tokens, chunks->words[i]);
        from += TOKENS_APART * p.x_stride_token;
    }
    ptx_load_4(smla_token_scale_word(&p.scales, thread, tile.head, step),
               thread < Shape::TOKENS && thread < p.num_tokens, 0, &chunks->scale_word);
}

/* Writes a token's half of a step as fp16; each of its four lanes has a chunk, and writes the two
 * chunks of a product. Word w of each chunk belongs to product w. There chunk c has rows 2 c,
 * 2 c + 1, 2 c + 8 and 2 c + 9 of B, which are the columns of A that lane c of four has
 * (wgmma.cuh). Lanes of the second half write in the other order, so that eight lanes reach all
 * banks. */
__device__ __forceinline__ void
store_half(int token, int chunk, uint32_t (&words)[WORDS], uint32_t row)
{
    const int product = chunk % WORDS, swizzle = token & SWIZZLE_BITS;
    const bool is_second = chunk >= HALF_CHUNKS;
    uint32_t low[HALF_CHUNKS], high[HALF_CHUNKS];
    smla_turn_words((int)threadIdx.x, words);
#pragma unroll
    for (int c = 0; c < HALF_CHUNKS; c++) {
        uint32_t pairs[2];
        ptx_cvt_f16x4_e4m3x4(words[c], &pairs[0], &pairs[1]);
        low[c] = is_second ? pairs[1] : pairs[0];
        high[c] = is_second ? pairs[0] : pairs[1];
    }
    ptx_store_shared_16(row + ((2 * product + is_second) ^ swizzle) * CHUNK_BYTES, low);
    ptx_store_shared_16(row + ((2 * product + !is_second) ^ swizzle) * CHUNK_BYTES, high);
}

/* ---- Copy warps: all ----------------------------------------------------------------------- */

/* Starts the copies of the weight's scales. */
template <typename Shape>
__device__ __forceinline__ void
copy_weight_scales(const smla_projection_params &p, const result_tile &tile, int64_t step, int slot,
                   ring_memory<Shape> *shared)
{
    const int thread = copy_thread();
    const int64_t outer = tile.outer + thread * GROUP_OUTPUTS;
    if (thread < GROUPS) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->weight_scales[slot][thread]),
                               smla_weight_scale(&p.scales, tile.head, outer, step),
                               outer < p.outer_dim);
    }
}

/* Writes the thread's chunks and its token's scale to shared memory. */
template <typename Shape>
__device__ __forceinline__ void
write_tokens(const smla_projection_params &p, const token_copier &copier, int64_t step, int slot,
             token_chunks<Shape> *chunks, ring_memory<Shape> *shared)
{
    const int thread = copy_thread(), half = copier.chunk / HALF_CHUNKS;
#pragma unroll
    for (int i = 0; i < token_chunks<Shape>::COUNT; i++) {
        const int token = copier.token + i * TOKENS_APART;
        store_half(token, copier.chunk, chunks->words[i],
                   ptx_shared_address(shared->tokens[slot][half][token]));
    }
    if (thread < Shape::TOKENS) {
        shared->token_scales[slot][thread] =
            smla_scale_of_word(&p.scales, chunks->scale_word, step);
    }
}

/* A tile, and where the thread's copies of it come from. */
struct tile_copier {
    result_tile tile;
    weight_copier weights;
    token_copier tokens;
};

/* Fills a slot with a step. */
template <typename Shape, bool PER_OUTPUT>
__device__ __forceinline__ void
copy_step(const smla_projection_params &p, const tile_copier &copier, int64_t step,
          const ring_position &position, token_chunks<Shape> *chunks, ring_memory<Shape> *shared)
{
    const int slot = position.slot;
    const uint32_t full = ptx_shared_address(&shared->full[slot]);
    ptx_mbarrier_wait(ptx_shared_address(&shared->empty[slot]), position.parity ^ 1);
    copy_weights(copier.weights, step, ptx_shared_address(shared->weights[slot]));
    if constexpr (!PER_OUTPUT) {
        copy_weight_scales(p, copier.tile, step, slot, shared);
    }
    ptx_mbarrier_arrive_after_copies(full);
    write_tokens(p, copier.tokens, step, slot, chunks, shared);
    ptx_mbarrier_arrive(full, true);
}

template <typename Shape, bool PER_OUTPUT>
__device__ __forceinline__ void
copy_tiles(const e4m3_projection &args, ring_memory<Shape> *shared)
{
    ring_position position = {0, 0};
    for (uint32_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        const result_tile tile = find_wide_tile(args, number);
        const tile_copier copier = {tile, make_weight_copier(args.p, tile),
                                    make_token_copier(args.p, tile)};
        token_chunks<Shape> chunks[STEPS_AHEAD];
#pragma unroll
        for (int i = 0; i < STEPS_AHEAD; i++) {
            if (i < args.num_steps) {
                load_tokens(args.p, tile, copier.tokens, i, &chunks[i]);
            }
        }
#pragma unroll 1
        for (int64_t first = 0; first < args.num_steps; first += STEPS_AHEAD) {
#pragma unroll
            for (int i = 0; i < STEPS_AHEAD; i++) {
                const int64_t step = first + i;
                if (step >= args.num_steps) {
                    break;
                }
                copy_step<Shape, PER_OUTPUT>(args.p, copier, step, position, &chunks[i], shared);
                if (step + STEPS_AHEAD < args.num_steps) {
                    load_tokens(args.p, tile, copier.tokens, step + STEPS_AHEAD, &chunks[i]);
                }
                advance<Shape::STEPS>(&position);
            }
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

/* Where the lane's first chunk of a block is, in bytes behind the block. */
__device__ __forceinline__ uint32_t
first_chunk_of_lane(void)
{
    const int row = output_of_lane(), chunk = (int)threadIdx.x % 4;
    return (uint32_t)(row * STEP_VALUES + chunk_index(row, chunk) * CHUNK_BYTES);
}

/* Loads the lane's weights of a block as operands of all products of a step. Its two outputs have
 * one order of chunks, in which the second half's chunk is the first one's with another bit. */
__device__ __forceinline__ void
load_weights(uint32_t block, uint32_t first_chunk, uint32_t (&a)[K_STEPS][4])
{
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        const uint32_t chunk = block + (first_chunk ^ half * HALF_CHUNKS * CHUNK_BYTES);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t words[WORDS];
            ptx_load_shared_16(chunk + i * STEP_VALUES, words);
#pragma unroll
            for (int word = 0; word < WORDS; word++) {
                uint32_t *const operand = a[half * WORDS + word];
                ptx_cvt_f16x4_e4m3x4(words[word], &operand[i], &operand[2 + i]);
            }
        }
    }
}

/* The factors of the lane's tokens. */
template <typename Shape>
__device__ __forceinline__ void
load_factors(const float *token_scales, float weight_scale, float (&factors)[Shape::TOKENS / 4])
{
#pragma unroll
    for (int j = 0; j < Shape::TOKENS / 8; j++) {
        uint32_t words[2];
        ptx_load_shared_8(ptx_shared_address(&token_scales[8 * j + threadIdx.x % 4 * 2]), words);
        factors[2 * j] = smla_bits_float(words[0]) * weight_scale;
        factors[2 * j + 1] = smla_bits_float(words[1]) * weight_scale;
    }
}

/* Adds a step to the sums of the group's blocks. `tokens` describes the tokens in slot 0. */
template <typename Shape, bool PER_OUTPUT>
__device__ __forceinline__ void
add_step(int slot, uint64_t tokens, uint32_t first_chunk, const ring_memory<Shape> *shared,
         float (&sums)[BLOCKS][Shape::SUMS])
{
    constexpr int HALF_BYTES = Shape::TOKENS * TOKEN_ROW_BYTES;
    const int group = (int)threadIdx.x / GROUP_THREADS;
    const uint32_t weights = ptx_shared_address(shared->weights[slot][group * GROUP_OUTPUTS]);
    const uint64_t operand = tokens + (uint64_t)(slot * (HALVES * HALF_BYTES >> 4));
    const float weight_scale = PER_OUTPUT ? 1.0f : shared->weight_scales[slot][group];
    float factors[Shape::TOKENS / 4];
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        uint32_t a[K_STEPS][4];
        float products[Shape::SUMS];
        load_weights(weights + block * (BLOCK_OUTPUTS * STEP_VALUES), first_chunk, a);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) {
            wgmma_f16<false>(products, a[k],
                             operand + (k / WORDS * HALF_BYTES >> 4) + k % WORDS * 2, k != 0);
        }
        wgmma_commit();
        if (block == 0) { /* the products are under way */
            load_factors<Shape>(shared->token_scales[slot], weight_scale, factors);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < Shape::SUMS; i++) {
            sums[block][i] = fmaf(products[i], factors[i / 4 * 2 + i % 2], sums[block][i]);
        }
    }
}

/* The token of the lane's pair i of outputs. */
__device__ __forceinline__ int64_t
token_of_pair(int i)
{
    return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

template <typename Shape, bool PER_OUTPUT>
__device__ __forceinline__ void
store_block(const e4m3_projection &args, const result_tile &tile, int64_t outer,
            const float (&sums)[Shape::SUMS], lost_results *lost)
{
    output_scales scales = {1.0f, 1.0f};
    if constexpr (PER_OUTPUT) {
        scales = load_output_scales(args.p, tile.head, outer);
    }
#pragma unroll
    for (int i = 0; i < Shape::SUMS / 2; i++) {
        const int at = i / 2 * 4 + i % 2; /* the first output's; the second's is two behind */
        *lost = store_pair(args, tile.head, token_of_pair(i), outer, sums[at] * scales.first,
                           sums[at + 2] * scales.second, *lost);
    }
}

/* The lane's first output of a tile. */
__device__ __forceinline__ int64_t
first_output(const result_tile &tile)
{
    const int group = (int)threadIdx.x / GROUP_THREADS;
    return tile.outer + group * GROUP_OUTPUTS + output_of_lane();
}

/* Computes again the results of a block's tiles that are not finite. Not inlined, because a call
 * from a cold cache would wait for this code where it ends. */
template <typename Shape>
__device__ __noinline__ void
mend_tiles(const e4m3_projection &args)
{
#pragma unroll 1
    for (int64_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        const result_tile tile = find_wide_tile(args, number);
#pragma unroll 1
        for (int i = 0; i < BLOCKS * Shape::SUMS / 2; i++) {
            mend_pair(args, tile.head, token_of_pair(i % (Shape::SUMS / 2)),
                      first_output(tile) + i / (Shape::SUMS / 2) * BLOCK_OUTPUTS);
        }
    }
}

template <typename Shape, bool PER_OUTPUT>
__device__ __forceinline__ void
consume_tiles(const e4m3_projection &args, ring_memory<Shape> *shared)
{
    const uint64_t tokens = wgmma_descriptor(ptx_shared_address(shared->tokens[0][0]),
                                             8 * TOKEN_ROW_BYTES, WGMMA_SWIZZLE_128);
    const uint32_t first_chunk = first_chunk_of_lane();
    ring_position position = {0, 0};
    lost_results lost = 0;
    for (uint32_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        float sums[BLOCKS][Shape::SUMS] = {};
#pragma unroll 1
        for (int64_t step = 0; step < args.num_steps; step++) {
            ptx_mbarrier_wait(ptx_shared_address(&shared->full[position.slot]), position.parity);
            ptx_fence_async_shared(); /* makes the tokens that threads wrote visible to wgmma */
            add_step<Shape, PER_OUTPUT>(position.slot, tokens, first_chunk, shared, sums);
            ptx_mbarrier_arrive(ptx_shared_address(&shared->empty[position.slot]), true);
            advance<Shape::STEPS>(&position);
        }
        const result_tile tile = find_wide_tile(args, number);
        const int64_t outer = first_output(tile);
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            store_block<Shape, PER_OUTPUT>(args, tile, outer + block * BLOCK_OUTPUTS, sums[block],
                                           &lost);
        }
    }
    if (__any_sync(~0u, has_lost(lost))) {
        mend_tiles<Shape>(args);
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
    return launch_projection<project_wide<Shape, PER_OUTPUT>>(
        p, Shape::TOKENS, WIDE_OUTPUTS, smla_cuda_find_device(p->call.stream.device_id)->num_sms,
        CONSUMERS + COPIERS, sizeof(ring_memory<Shape>));
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
