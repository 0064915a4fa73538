/* projection_e4m3.cu: projections of e4m3 arrays with scales, by fp16 tensor cores, for every GPU.
 * On Hopper it serves up to MOST_EXACT_TOKENS tokens, where the weight's bytes bind.
 *
 * Computes     out[t,h,n] = sum_b x_scale[t,h,b] w_scale[h,n/128,b] sum_k x[t,h,k] w[h,n,k],
 *              where b is a block of 128 values of k, a step; or with a w_scale[h,n] per output,
 *              which multiplies the whole sum
 * Shapes       x [T, H, k] e4m3, w [H, n, k] e4m3: base and strides are multiples of 16 bytes; the
 *              scales fp32, or x's four exponents per int32, any strides; out [T, H, n] bf16
 * Shared mem   two rings of STEPS steps. A step has [TOKENS + OUTPUTS][128] bytes, a scale word per
 *              token, and one scale of the weight. Chunk j of row i is at index j ^ 4 (i % 2), so
 *              that the eight lanes of a 128-byte read touch eight banks. Tiles of 16 tokens x 64
 *              outputs have 2 x 4 steps of 10.1 KiB, tiles of 64 x 64 have 2 x 3 of 16.3 KiB, and
 *              tiles of 32 x 64 are between them. Behind the rings are the sums of three quarters,
 *              12 to 48 KiB
 * Roles        two teams of 256 threads: one has a tile's even steps, the other its odd ones. A
 *              team brings a step with cp.async, STEPS - 1 steps ahead. Four of its warps, a
 *              quarter of the threads, multiply the first halves of its steps, four the second
 *              ones: each warp 16 tokens x 16 outputs, or 32 x 32. A team has a barrier per step:
 *              all have read the step that is overwritten next, and all see what others have
 *              copied. At the end three quarters' sums go through shared memory to the first one,
 *              which stores.
 * Roofline     Up to 64 tokens the weight's bytes bind: 8 x 1024 x 4096 take 8 us of an H200's HBM.
 *              Beyond, mma.sync and the conversions of both operands bind.
 * Numerics     e4m3 is exact in fp16 (or 2^-8 of it, see SMLA_E4M3_UNIT), and so are products. A
 *              step is summed in fp32 by tensor cores, then multiplied by its factor, which is
 *              x_scale * w_scale rounded to fp32, and added in fp32. NaN reaches only results of
 *              its own token or output. Results that are not finite are computed again, in fp64:
 *              a product of scales may not fit fp32 where the result does. Lanes take values of k
 *              in another order than k's. The order of a sum depends on k alone: a quarter's half
 *              steps, then the quarters.
 * Source       DeepGEMM, for a sum per 128 values; the kernel is ours.
 */
#include "cuda/projection/projection_e4m3.cuh"

namespace {

enum {
    TEAMS = 2,
    HALVES = 2,
    QUARTERS = TEAMS * HALVES,
    QUARTER_THREADS = 128,
    QUARTER_WARPS = QUARTER_THREADS / SMLA_WARP_LANES,
    TEAM_THREADS = HALVES * QUARTER_THREADS,
    BLOCK_THREADS = QUARTERS * QUARTER_THREADS,
    TEAM_BARRIER = 1, /* team 0's; barrier 0 is __syncthreads's */
    PARITY_BIT = 1,   /* the bit of a row's index that its chunks' order depends on */
    HALF_CHUNKS = ROW_CHUNKS / HALVES,
    WORDS = CHUNK_BYTES / 4, /* words per chunk: a word is a lane's part of a k-step of 16 values */
};

/* A tile of results. A warp has ROW_TILES x 16 of its tokens and COLUMN_TILES x 8 of its
 * outputs. */
template <int WARP_ROWS_, int ROW_TILES_, int COLUMN_TILES_, int STEPS_> struct tile_shape {
    static constexpr int WARP_ROWS = WARP_ROWS_; /* number of warps along the tokens */
    static constexpr int ROW_TILES = ROW_TILES_;
    static constexpr int COLUMN_TILES = COLUMN_TILES_;
    static constexpr int STEPS = STEPS_; /* steps of a ring */
    static constexpr int WARP_COLUMNS = QUARTER_WARPS / WARP_ROWS;
    static constexpr int TOKENS = WARP_ROWS * ROW_TILES * 16;
    static constexpr int OUTPUTS = WARP_COLUMNS * COLUMN_TILES * 8;
    static constexpr int VALUES = ROW_TILES * COLUMN_TILES * 4; /* results per lane */
};

using small_tile = tile_shape<1, 1, 2, 4>;  /* 16 tokens x 64 outputs */
using half_tile = tile_shape<2, 1, 4, 3>;   /* 32 x 64, for scales of outputs: those spill at 64 */
using medium_tile = tile_shape<2, 2, 4, 3>; /* 64 tokens x 64 outputs */

/* A team's ring. */
template <typename Shape> struct step_ring {
    alignas(128) uint8_t tokens[Shape::STEPS][Shape::TOKENS][STEP_VALUES];
    uint8_t weights[Shape::STEPS][Shape::OUTPUTS][STEP_VALUES];
    uint32_t token_scales[Shape::STEPS][Shape::TOKENS];
    float weight_scale[Shape::STEPS];
};

template <typename Shape> struct tile_memory {
    step_ring<Shape> rings[TEAMS];
    /* All quarters' but the first one's. Not in the rings' memory: compute-sanitizer's racecheck
     * reports races there, although all threads meet between the reads and the writes. */
    float sums[QUARTERS - 1][Shape::VALUES][QUARTER_THREADS];
    bool is_lost[BLOCK_THREADS / SMLA_WARP_LANES]; /* a result of the warp is not finite */
};

template <typename Shape> struct tile_sums {
    /* Sums per lane, in the layout of D in ptx.cuh. */
    float d[Shape::ROW_TILES][Shape::COLUMN_TILES][4];
};

template <typename Shape>
__device__ __forceinline__ float &
sum_of(tile_sums<Shape> *sums, int i)
{
    return sums->d[i / 4 / Shape::COLUMN_TILES][i / 4 % Shape::COLUMN_TILES][i % 4];
}

template <typename Shape>
__device__ __forceinline__ void
clear_sums(tile_sums<Shape> *sums)
{
#pragma unroll
    for (int i = 0; i < Shape::VALUES; i++) {
        sum_of(sums, i) = 0.0f;
    }
}

/* ---- Copies -------------------------------------------------------------------------------- */

enum { ROWS_APART = TEAM_THREADS / ROW_CHUNKS }; /* a thread copies one of so many rows */

/* Where a thread's copies of a tile's steps come from: its chunk of step 0 of its first rows. Rows
 * that do not exist become zeros. */
struct step_copier {
    const uint8_t *tokens;
    const uint8_t *weights;
    uint32_t to;    /* its first chunk, in bytes behind the first row of a step in shared memory */
    int num_tokens; /* those of its rows that exist */
    int num_weights;
    const uint32_t *scale; /* its token's or the weight's, in step 0 */
    bool has_scale;
};

/* How many of the rows from `row` on, ROWS_APART apart, are in a tile. */
__device__ __forceinline__ int
count_rows(int64_t num_rows, int row, int tile_rows)
{
    const int rest = (int)(num_rows < tile_rows ? num_rows : tile_rows) - row;
    return (rest + ROWS_APART - 1) / ROWS_APART;
}

template <typename Shape>
__device__ __forceinline__ step_copier
make_copier(const e4m3_projection &args, int64_t number)
{
    const result_tile tile = find_tile(args, number, Shape::TOKENS, Shape::OUTPUTS);
    const smla_projection_params &p = args.p;
    const int thread = (int)threadIdx.x % TEAM_THREADS;
    const int row = thread / ROW_CHUNKS, chunk = thread % ROW_CHUNKS;
    const int index = chunk ^ (row & PARITY_BIT) * HALF_CHUNKS;
    return step_copier{first_token_row(p, tile) + row * p.x_stride_token + chunk * CHUNK_BYTES,
                       first_weight_row(p, tile) + row * p.w_stride_outer + chunk * CHUNK_BYTES,
                       (uint32_t)(row * STEP_VALUES + index * CHUNK_BYTES),
                       count_rows(p.num_tokens - tile.token, row, Shape::TOKENS),
                       count_rows(p.outer_dim - tile.outer, row, Shape::OUTPUTS),
                       thread < Shape::TOKENS
                           ? smla_token_scale_word(&p.scales, tile.token + thread, tile.head, 0)
                           : (const uint32_t *)smla_weight_scale(&p.scales, tile.head, tile.outer,
                                                                 0),
                       tile.token + thread < p.num_tokens};
}

/* Starts the thread's copies of ROWS rows of a step. */
template <int ROWS>
__device__ __forceinline__ void
copy_own_rows(const uint8_t *from, int64_t stride, uint32_t to, int num_rows)
{
#pragma unroll
    for (int i = 0; i < (ROWS + ROWS_APART - 1) / ROWS_APART; i++) {
        ptx_cp_async_16_or_zero(to + i * ROWS_APART * STEP_VALUES, from + i * ROWS_APART * stride,
                                i < num_rows);
    }
}

/* Starts the copies of a step. The outputs of a tile share one scale of the weight, because the
 * first output is a multiple of 64. */
template <bool PER_OUTPUT, typename Shape>
__device__ __forceinline__ void
copy_step(const e4m3_projection &args, const step_copier &copier, int64_t step, int slot,
          step_ring<Shape> *ring)
{
    static_assert(Shape::OUTPUTS == 64 && Shape::TOKENS < TEAM_THREADS, "a thread per scale");
    const smla_projection_params &p = args.p;
    const int thread = (int)threadIdx.x % TEAM_THREADS;
    const int64_t column = step * STEP_VALUES;
    copy_own_rows<Shape::OUTPUTS>(copier.weights + column, p.w_stride_outer,
                                  ptx_shared_address(ring->weights[slot]) + copier.to,
                                  copier.num_weights);
    if (thread < Shape::TOKENS * ROW_CHUNKS) {
        copy_own_rows<Shape::TOKENS>(copier.tokens + column, p.x_stride_token,
                                     ptx_shared_address(ring->tokens[slot]) + copier.to,
                                     copier.num_tokens);
    }
    if (thread < Shape::TOKENS) {
        const int64_t word = p.scales.x_is_packed ? step / 4 : step;
        ptx_cp_async_4_or_zero(ptx_shared_address(&ring->token_scales[slot][thread]),
                               copier.scale + word * p.scales.x_stride_column, copier.has_scale);
    } else if (!PER_OUTPUT && thread == Shape::TOKENS) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&ring->weight_scale[slot]),
                               copier.scale + step * p.scales.w_stride_inner, true);
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
    const int warp = (int)threadIdx.x % QUARTER_THREADS / SMLA_WARP_LANES;
    return warp / Shape::WARP_COLUMNS * Shape::ROW_TILES * 16 +
           (int)threadIdx.x % SMLA_WARP_LANES / 4;
}

template <typename Shape>
__device__ __forceinline__ int
output_row(void)
{
    const int warp = (int)threadIdx.x % QUARTER_THREADS / SMLA_WARP_LANES;
    return warp % Shape::WARP_COLUMNS * Shape::COLUMN_TILES * 8 +
           (int)threadIdx.x % SMLA_WARP_LANES / 4;
}

/* sums += the products of half a step, which is 64 values of k. */
template <typename Shape>
__device__ __forceinline__ void
multiply_half(const step_ring<Shape> *ring, int slot, int half, tile_sums<Shape> *sums)
{
    uint32_t a[Shape::ROW_TILES][WORDS][4]; /* operands of tokens */
#pragma unroll
    for (int i = 0; i < 2 * Shape::ROW_TILES; i++) {
        uint32_t words[WORDS];
        load_chunk(ring->tokens[slot], token_row<Shape>() + 8 * i, half, words);
#pragma unroll
        for (int word = 0; word < WORDS; word++) {
            uint32_t pairs[2];
            smla_widen_e4m3x4(words[word], pairs);
            a[i / 2][word][i % 2] = pairs[0];
            a[i / 2][word][2 + i % 2] = pairs[1];
        }
    }
#pragma unroll
    for (int j = 0; j < Shape::COLUMN_TILES; j++) {
        uint32_t words[WORDS];
        load_chunk(ring->weights[slot], output_row<Shape>() + 8 * j, half, words);
#pragma unroll
        for (int word = 0; word < WORDS; word++) {
            uint32_t b[2];
            smla_widen_e4m3x4(words[word], b);
#pragma unroll
            for (int i = 0; i < Shape::ROW_TILES; i++) {
                ptx_mma_f16(sums->d[i][j], a[i][word], b);
            }
        }
    }
}

/* sums += each token's factor * the products of half a step. */
template <bool PER_OUTPUT, typename Shape>
__device__ __forceinline__ void
add_half(const e4m3_projection &args, int64_t step, int slot, int half,
         const step_ring<Shape> *ring, tile_sums<Shape> *sums)
{
    tile_sums<Shape> products;
    clear_sums(&products);
    multiply_half(ring, slot, half, &products);
    const float weight_scale = PER_OUTPUT ? 1.0f : ring->weight_scale[slot];
#pragma unroll
    for (int i = 0; i < 2 * Shape::ROW_TILES; i++) {
        const uint32_t word = ring->token_scales[slot][token_row<Shape>() + 8 * i];
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
__device__ __forceinline__ int
next_slot(int slot)
{
    return slot + 1 == Shape::STEPS ? 0 : slot + 1;
}

/* Each team's barrier has a constant number: compute-sanitizer takes a number in a register for
 * another barrier's. */
__device__ __forceinline__ void
wait_for_team(int team)
{
    if (team == 0) {
        ptx_barrier(TEAM_BARRIER, TEAM_THREADS);
    } else {
        ptx_barrier(TEAM_BARRIER + 1, TEAM_THREADS);
    }
}

/* The sums of a quarter. */
template <bool PER_OUTPUT, typename Shape>
__device__ __forceinline__ void
sum_quarter(const e4m3_projection &args, int64_t number, int team, int half, step_ring<Shape> *ring,
            tile_sums<Shape> *sums)
{
    const int num_own = (int)(args.num_steps + TEAMS - 1 - team) / TEAMS;
    const step_copier copier = make_copier<Shape>(args, number);
    clear_sums(sums);
#pragma unroll 1
    for (int i = 0; i < Shape::STEPS - 1; i++) {
        if (i < num_own) {
            copy_step<PER_OUTPUT>(args, copier, i * TEAMS + team, i, ring);
        }
        ptx_cp_async_commit();
    }
    int slot = 0, free_slot = Shape::STEPS - 1;
#pragma unroll 1
    for (int i = 0; i < num_own; i++) {
        ptx_cp_async_wait<Shape::STEPS - 2>();
        wait_for_team(team);
        if (i + Shape::STEPS - 1 < num_own) {
            copy_step<PER_OUTPUT>(args, copier, (i + Shape::STEPS - 1) * TEAMS + team, free_slot,
                                  ring);
        }
        /* Where nothing is copied, an empty group keeps the count of groups right. */
        ptx_cp_async_commit();
        add_half<PER_OUTPUT>(args, i * TEAMS + team, slot, half, ring, sums);
        slot = next_slot<Shape>(slot);
        free_slot = next_slot<Shape>(free_slot);
    }
}

/* Adds the other quarters' sums to the first one's. */
template <typename Shape>
__device__ __forceinline__ void
add_quarters(int quarter, tile_memory<Shape> *shared, tile_sums<Shape> *sums)
{
    const int thread = (int)threadIdx.x % QUARTER_THREADS;
    if (quarter > 0) {
#pragma unroll
        for (int i = 0; i < Shape::VALUES; i++) {
            shared->sums[quarter - 1][i][thread] = sum_of(sums, i);
        }
    }
    __syncthreads();
    if (quarter == 0) {
#pragma unroll
        for (int from = 0; from < QUARTERS - 1; from++) {
#pragma unroll
            for (int i = 0; i < Shape::VALUES; i++) {
                sum_of(sums, i) += shared->sums[from][i][thread];
            }
        }
    }
    __syncthreads(); /* the next tile may overwrite the rings, and later the sums */
}

/* The lane's results of a tile: rows of tokens, and pairs of outputs. */
template <typename Shape> struct lane_results {
    int64_t head;
    int64_t token;                                    /* the token of row 0 */
    int64_t outer;                                    /* the first output of pair 0 */
    static constexpr int ROWS = 2 * Shape::ROW_TILES; /* rows 8 tokens apart */
    static constexpr int PAIRS = Shape::COLUMN_TILES; /* pairs 8 outputs apart */
};

template <typename Shape>
__device__ __forceinline__ lane_results<Shape>
find_results(const e4m3_projection &args, int64_t number)
{
    const result_tile tile = find_tile(args, number, Shape::TOKENS, Shape::OUTPUTS);
    return lane_results<Shape>{tile.head, tile.token + token_row<Shape>(),
                               tile.outer + output_row<Shape>() -
                                   threadIdx.x % SMLA_WARP_LANES / 4 + threadIdx.x % 4 * 2};
}

/* Stores the tile's sums, times the scales of their outputs where there are some. Returns whether
 * the lane has a result that is not finite. */
template <bool PER_OUTPUT, typename Shape>
__device__ __forceinline__ bool
store_tile(const e4m3_projection &args, int64_t number, const tile_sums<Shape> &sums)
{
    const lane_results<Shape> own = find_results<Shape>(args, number);
    output_scales scales[own.PAIRS];
#pragma unroll
    for (int j = 0; j < own.PAIRS; j++) {
        scales[j] = PER_OUTPUT ? load_output_scales(args.p, own.head, own.outer + 8 * j)
                               : output_scales{1.0f, 1.0f};
    }
    bool is_lost = false;
#pragma unroll
    for (int i = 0; i < own.ROWS; i++) {
#pragma unroll
        for (int j = 0; j < own.PAIRS; j++) {
            const float *const pair = sums.d[i / 2][j] + i % 2 * 2;
            is_lost |=
                has_lost(store_pair(args, own.head, own.token + 8 * i, own.outer + 8 * j,
                                    pair[0] * scales[j].first, pair[1] * scales[j].second, 0));
        }
    }
    return is_lost;
}

/* Computes again the results of a block's tiles that are not finite. */
template <typename Shape>
__device__ __forceinline__ void
mend_tiles(const e4m3_projection &args)
{
#pragma unroll 1
    for (int64_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        const lane_results<Shape> own = find_results<Shape>(args, number);
#pragma unroll 1
        for (int i = 0; i < own.ROWS * own.PAIRS; i++) {
            mend_pair(args, own.head, own.token + i % own.ROWS * 8, own.outer + i / own.ROWS * 8);
        }
    }
}

template <typename Shape, bool PER_OUTPUT>
__global__ void
__launch_bounds__(BLOCK_THREADS, 1) project_e4m3(const __grid_constant__ e4m3_projection args)
{
    extern __shared__ __align__(128) uint8_t memory[];
    tile_memory<Shape> *const shared = (tile_memory<Shape> *)memory;
    const int quarter = (int)threadIdx.x / QUARTER_THREADS;
    const int team = quarter / HALVES, half = quarter % HALVES;
    bool *const is_lost = &shared->is_lost[threadIdx.x / SMLA_WARP_LANES];
    *is_lost = false;
    __syncwarp();
    ptx_wait_for_grids();
    for (int64_t number = blockIdx.x; number < args.num_tiles; number += gridDim.x) {
        tile_sums<Shape> sums;
        sum_quarter<PER_OUTPUT>(args, number, team, half, &shared->rings[team], &sums);
        add_quarters(quarter, shared, &sums);
        if (quarter == 0 && store_tile<PER_OUTPUT>(args, number, sums)) {
            *is_lost = true;
        }
    }
    __syncwarp();
    if (*is_lost) { /* after the last tile, because there registers are free */
        mend_tiles<Shape>(args);
    }
}

template <typename Shape, bool PER_OUTPUT>
cudaError_t
launch_tiles(const smla_projection_params *p)
{
    return launch_projection<project_e4m3<Shape, PER_OUTPUT>>(p, Shape::TOKENS, Shape::OUTPUTS,
                                                              INT64_MAX, BLOCK_THREADS,
                                                              sizeof(tile_memory<Shape>));
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
    if (smla_cuda_is_hopper(device) && smla_is_projection_wide(p, device->num_sms)) {
        return smla_cuda_launch_projection_e4m3_wide_sm90(p);
    }
    const bool is_small = p->num_tokens <= small_tile::TOKENS;
    if (p->scales.w_is_per_output) {
        return is_small ? launch_tiles<small_tile, true>(p) : launch_tiles<half_tile, true>(p);
    }
    return is_small ? launch_tiles<small_tile, false>(p) : launch_tiles<medium_tile, false>(p);
}
