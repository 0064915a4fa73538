/* logits_sm90.cu: the indexer's logits of FP8 queries and keys by Hopper's FP8 tensor cores, for 32
 * and 64 heads. logits.cu serves all others, more exactly.
 *
 * Computes     out[t,n] = |scale_n| sum_h weights[t,h] * relu(+-q[t,h] . key n) for n below the
 *              token's context, -inf from there on and for keys that do not exist
 * Shapes       q [T, H, 128] e4m3 and keys of 128 e4m3, all at multiples of 16 bytes; scales fp32;
 *              weights [T, H] fp32; out [T, N] fp32 or bf16
 * Shared mem   keys [STAGES][64][128] and two items' queries [tokens * H][128], swizzled by 128
 *              bytes (wgmma.cuh); scales, weights, items, mbarriers; up to 170 KiB
 * Roles        A CTA per SM, which takes works i, i + grid... A run of a work's tokens is an item.
 *              4 copy warps     bring a tile of 64 keys each in turn, with cp.async, and look up
 *                               its page a tile ahead; where pages hold whole tiles, or keys are
 *                               flat, that is one address per tile. They also bring the items'
 *                               queries, and fill columns without keys
 *              3 warpgroups     GROUPS 3: each has other tokens and goes through all tiles
 *                               GROUPS 1: each has the same tokens and every third tile
 *              mbarriers        arrivals | waiting threads
 *              full[stage]      32 lanes' copies, and lane 0 | consumers
 *              empty[stage]     4 warps per warpgroup that reads the tile | the copy warp
 *              q_full[slot]     128 threads' copies, and the first thread | consumers
 *              q_empty[slot]    12 warps | copy warps
 * Roofline     256 FLOP per token, head and key. 64 keys x 128 columns take 256 cycles of tensor
 *              cores; adding them up takes a warp 2 instructions per column, 128 for a tile, which
 *              the other warpgroups' products hide. While products write their sums to registers,
 *              additions run at half their rate, so that 340 cycles per tile are the least; it
 *              takes 420. A decode streams 132 bytes per key.
 * Numerics     The tensor cores add a dot product with about 14 bits, so that errors are below 2^-8
 *              of the sum of magnitudes. d + |d| is 2 relu(d), exactly, and passes NaN on. A lane
 *              adds heads 8 j + 2 c and 8 j + 2 c + 1 in order, then four lanes are added: the
 *              order is the same in all shapes. A negative scale of a key negates its products.
 * Source       DeepGEMM's sm90_fp8_mqa_logits, for keys as A and queries as B. Three token groups
 *              per key tile, which read keys from L2 a third as often, and keys without tensor maps
 *              are ours.
 */
#include "cuda/indexer/logits.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace {

enum {
    WARPGROUPS = 3,
    GROUP_THREADS = 128,
    CONSUMERS = WARPGROUPS * GROUP_THREADS,
    COPIERS = 128,
    COPY_WARPS = COPIERS / SMLA_WARP_LANES,
    COPY_REGISTERS = 104,
    CONSUMER_REGISTERS = 136,
    TILE_KEYS = 64,
    ROW_BYTES = SMLA_INDEX_HEAD_DIM,
    CHUNK_BYTES = 16,
    ROW_CHUNKS = ROW_BYTES / CHUNK_BYTES,
    TILE_BYTES = TILE_KEYS * ROW_BYTES,
    ROWS_PER_COPY = SMLA_WARP_LANES / ROW_CHUNKS,
    K_STEPS = ROW_BYTES / 32,
    SLOTS = 2,
    MOST_CHUNK = 8192,
};

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

/* How warpgroups share the work. */
template <int HEADS_, int TOKENS_, int GROUPS_> struct logits_shape {
    static constexpr int HEADS = HEADS_;
    static constexpr int TOKENS = TOKENS_;             /* per warpgroup */
    static constexpr int GROUPS = GROUPS_;             /* token groups: 3, or 1 */
    static constexpr int PARTS = WARPGROUPS / GROUPS_; /* warpgroups that take tiles in turn */
    static constexpr int COLUMNS = HEADS * TOKENS;     /* columns per product */
    static constexpr int BLOCK_TOKENS = TOKENS * GROUPS;
    static constexpr int BLOCK_ROWS = BLOCK_TOKENS * HEADS;
    static constexpr int STAGES = GROUPS == 1 ? 16 : 8;
    static constexpr int LEAST_CHUNK = GROUPS == 1 ? 4 * TILE_KEYS : 8 * TILE_KEYS;
    /* A decode's work costs a chain of loads, so it has few and long ones. */
    static constexpr int LARGEST_CHUNK = GROUPS == 1 ? MOST_CHUNK : 2048;
    static constexpr int WORKS_PER_SM = GROUPS == 1 ? 8 : 24;
};

/* A run of tokens and a chunk of their columns. */
template <typename Shape> struct logits_item {
    int64_t first_token;
    int32_t num_tokens;
    int32_t num_tiles;                     /* 0: there are no more items */
    int32_t first;                         /* column */
    int32_t contexts[Shape::BLOCK_TOKENS]; /* at most the chunk's end */
};

template <typename Shape> struct logits_memory {
    alignas(1024) uint8_t keys[Shape::STAGES][TILE_KEYS][ROW_BYTES];
    alignas(1024) uint8_t queries[SLOTS][Shape::BLOCK_ROWS][ROW_BYTES];
    float scales[Shape::STAGES][TILE_KEYS];
    alignas(16) float weights[SLOTS][Shape::BLOCK_ROWS];
    alignas(8) uint64_t found[Shape::STAGES]; /* a bit per key that exists */
    logits_item<Shape> items[SLOTS];
    alignas(8) uint64_t full[Shape::STAGES];
    uint64_t empty[Shape::STAGES];
    uint64_t q_full[SLOTS];
    uint64_t q_empty[SLOTS];
};

/* ---- Copy warps ---------------------------------------------------------------------------- */

/* Where the weight of a column is: a lane's four of 16 columns, 2 c, 2 c + 1, 2 c + 8 and 2 c + 9,
 * follow each other. */
__device__ __forceinline__ int
weight_place(int column)
{
    return (column & ~15) | (column >> 1 & 3) << 2 | (column >> 3 & 1) << 1 | (column & 1);
}

/* Brings the queries and weights of an item. */
template <typename Shape>
__device__ __forceinline__ void
bring_queries(const smla_logits_params &p, int64_t first_token, int num_tokens, int slot,
              logits_memory<Shape> *shared)
{
    const int thread = (int)threadIdx.x - CONSUMERS;
    const int chunk = thread % ROW_CHUNKS;
    const int num_rows = num_tokens * Shape::HEADS;
    const uint32_t to = ptx_shared_address(shared->queries[slot]);
#pragma unroll 2
    for (int row = thread / ROW_CHUNKS; row < num_rows; row += COPIERS / ROW_CHUNKS) {
        const uint8_t *const from = p.q + (first_token + row / Shape::HEADS) * p.q_stride_token +
                                    row % Shape::HEADS * p.q_stride_head + chunk * CHUNK_BYTES;
        ptx_cp_async_16_or_zero(to + row * ROW_BYTES + (chunk ^ (row & 7)) * CHUNK_BYTES, from,
                                true);
    }
#pragma unroll 1
    for (int row = thread; row < num_rows; row += COPIERS) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->weights[slot][weight_place(row)]),
                               p.weights +
                                   (first_token + row / Shape::HEADS) * p.weights_stride_token +
                                   row % Shape::HEADS,
                               true);
    }
}

/* Copies 64 keys that follow each other. */
template <typename Shape>
__device__ __forceinline__ void
copy_run(const logits_args &args, const key_place &first, int stage, logits_memory<Shape> *shared)
{
    const smla_kv_view &kv = args.p.kv;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int chunk = lane % ROW_CHUNKS;
    const int row = lane / ROW_CHUNKS;
    const uint32_t to = ptx_shared_address(shared->keys[stage][row]);
    const uint8_t *from = first.row + row * kv.token_stride_bytes + chunk * CHUNK_BYTES;
#pragma unroll 4
    for (int i = 0; i < TILE_KEYS / ROWS_PER_COPY; i++) {
        const int place = chunk ^ ((row + i * ROWS_PER_COPY) & 7);
        ptx_cp_async_16_or_zero(to + i * ROWS_PER_COPY * ROW_BYTES + place * CHUNK_BYTES, from,
                                true);
        from += ROWS_PER_COPY * kv.token_stride_bytes;
    }
#pragma unroll
    for (int key = lane; key < TILE_KEYS; key += SMLA_WARP_LANES) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->scales[stage][key]),
                               first.scales + key * kv.scale_token_stride_bytes, true);
    }
}

/* Copies 64 keys that lie anywhere; lane i has the places of keys i and i + 32. Keys that do not
 * exist become zeros. */
template <typename Shape>
__device__ __forceinline__ void
copy_places(const key_place places[2], int stage, logits_memory<Shape> *shared)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int chunk = lane % ROW_CHUNKS;
    const uint32_t to = ptx_shared_address(shared->keys[stage]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll 4
        for (int i = 0; i < SMLA_WARP_LANES / ROWS_PER_COPY; i++) {
            const int lane_of_row = i * ROWS_PER_COPY + lane / ROW_CHUNKS;
            const int row = half * SMLA_WARP_LANES + lane_of_row;
            const uint8_t *const from =
                (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)places[half].row,
                                             lane_of_row);
            ptx_cp_async_16_or_zero(to + row * ROW_BYTES + (chunk ^ (row & 7)) * CHUNK_BYTES,
                                    from + chunk * CHUNK_BYTES, from != NULL);
        }
        ptx_cp_async_4_or_zero(ptx_shared_address(
                                   &shared->scales[stage][half * SMLA_WARP_LANES + lane]),
                               places[half].scales, places[half].row != NULL);
    }
}

/* The columns of a tile that a lane looks up: the first one where the tile's keys follow each
 * other, or its own two. */
__device__ __forceinline__ int
own_column(const logits_args &args, int half)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    return args.has_runs ? half * (TILE_KEYS - 1) : half * SMLA_WARP_LANES + lane;
}

/* Brings the tile of columns `first`... as tile number `count` of the CTA. A warp calls it;
 * `pages` are those of its lanes' columns. */
template <typename Shape>
__device__ __forceinline__ void
bring_keys(const logits_args &args, int64_t source, int64_t first, const int32_t pages[2],
           uint32_t count, logits_memory<Shape> *shared)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int stage = (int)(count % Shape::STAGES);
    key_place places[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        places[half] = place_key(args, source, first + own_column(args, half), pages[half]);
    }
    ptx_mbarrier_wait(ptx_shared_address(&shared->empty[stage]), count / Shape::STAGES % 2 ^ 1);
    uint32_t found[2] = {__ballot_sync(ALL_LANES, places[0].row != NULL),
                         __ballot_sync(ALL_LANES, places[1].row != NULL)};
    if (args.has_runs && found[0] != 0 && found[1] != 0) {
        copy_run(args, places[0], stage, shared);
    } else if (!args.has_runs || !args.p.has_pages) {
        if (args.has_runs) { /* flat keys begin or end inside the tile */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                places[half] = place_key(args, source, first + half * SMLA_WARP_LANES + lane, 0);
                found[half] = __ballot_sync(ALL_LANES, places[half].row != NULL);
            }
        }
        copy_places(places, stage, shared);
    }
    if (lane == 0) {
        shared->found[stage] = (uint64_t)found[1] << 32 | found[0];
    }
    const uint32_t full = ptx_shared_address(&shared->full[stage]);
    ptx_mbarrier_arrive_after_copies(full);
    ptx_mbarrier_arrive(full, lane == 0);
}

/* Brings a warp's share of an item's tiles. Pages are looked up a tile ahead, because the first keys
 * can be asked for only when their page has come. `tiles` counts those of the items before. */
template <typename Shape>
__device__ __forceinline__ void
bring_item(const logits_args &args, int64_t source, int64_t first_column, int num_tiles,
           uint32_t tiles, logits_memory<Shape> *shared)
{
    const uint32_t warp = (threadIdx.x - CONSUMERS) / SMLA_WARP_LANES;
    uint32_t i = (warp - tiles) % COPY_WARPS;
    int64_t first = first_column + (int64_t)i * TILE_KEYS;
    int32_t pages[2] = {find_page(args, source, first + own_column(args, 0)),
                        find_page(args, source, first + own_column(args, 1))};
    for (; i < (uint32_t)num_tiles; i += COPY_WARPS) {
        const int64_t ahead = first + COPY_WARPS * TILE_KEYS;
        const int32_t next[2] = {find_page(args, source, ahead + own_column(args, 0)),
                                 find_page(args, source, ahead + own_column(args, 1))};
        bring_keys(args, source, first, pages, tiles + i, shared);
        first = ahead;
        pages[0] = next[0];
        pages[1] = next[1];
    }
}

/* Hands an item with `num_tokens` tokens over; without tokens it is the end. */
template <typename Shape>
__device__ __forceinline__ void
hand_over(const logits_args &args, const logits_work &work, int64_t first_token, int num_tokens,
          int num_tiles, uint32_t item, logits_memory<Shape> *shared)
{
    const int slot = (int)(item % SLOTS);
    const uint32_t full = ptx_shared_address(&shared->q_full[slot]);
    const bool is_first = threadIdx.x == CONSUMERS;
    ptx_mbarrier_wait(ptx_shared_address(&shared->q_empty[slot]), item / SLOTS % 2 ^ 1);
    bring_queries(args.p, first_token, num_tokens, slot, shared);
    if (is_first) {
        logits_item<Shape> *const to = &shared->items[slot];
        to->first_token = first_token;
        to->num_tokens = num_tokens;
        to->num_tiles = num_tiles;
        to->first = (int32_t)work.first;
        for (int i = 0; i < num_tokens; i++) {
            to->contexts[i] = (int32_t)smaller_of(context_of(args.p, first_token + i), work.end);
        }
    }
    ptx_mbarrier_arrive_after_copies(full);
    ptx_mbarrier_arrive(full, is_first);
}

template <typename Shape>
__device__ __forceinline__ void
copy_works(const logits_args &args, logits_memory<Shape> *shared)
{
    const smla_logits_params &p = args.p;
    uint32_t tiles = 0; /* tiles in the items before */
    uint32_t items = 0;
    logits_work work = {};
    for (int64_t number = blockIdx.x; number < args.num_works; number += gridDim.x) {
        work = find_work(args, number, Shape::BLOCK_TOKENS);
        int64_t token = work.first_token;
        while (token < work.end_token) {
            const int64_t next = end_of_run(p, token, work.end_token);
            int64_t longest = 0;
            for (int64_t t = token; t < next; t++) {
                const int64_t context = context_of(p, t);
                longest = context > longest ? context : longest;
            }
            longest = smaller_of(longest, work.end);
            if (longest > work.first) {
                const int num_tiles = (int)((longest - work.first + TILE_KEYS - 1) / TILE_KEYS);
                const int64_t source = source_of(p, token);
                hand_over(args, work, token, (int)(next - token), num_tiles, items, shared);
                bring_item(args, source, work.first, num_tiles, tiles, shared);
                tiles += (uint32_t)num_tiles;
                items++;
            }
            token = next;
        }
        fill_rest(p, work, (int)threadIdx.x - CONSUMERS, COPIERS);
    }
    hand_over(args, work, 0, 0, 0, items, shared);
}

/* ---- Consumers ----------------------------------------------------------------------------- */

/* Doubles relu, which costs one addition at full rate; a maximum has half the rate. */
__device__ __forceinline__ float
double_relu(float x)
{
    return x + fabsf(x);
}

/* What a warpgroup keeps for an item. Lane (g, c) of a warp ends with the logits of key
 * g + 8 (c % 2) of the warp's 16, for tokens 2 u + c / 2. */
template <typename Shape> struct token_results {
    enum { COUNT = (Shape::TOKENS + 1) / 2 };
    uint8_t *at[COUNT];  /* the logit of the lane's key in the first tile */
    int32_t left[COUNT]; /* columns from there to the end of the token's keys */
};

/* sums[row][token] += weight * 2 relu(d) for the columns of each token, or 2 relu(-d) in rows that
 * are `negative`. */
template <typename Shape, bool HAS_SIGNS>
__device__ __forceinline__ void
add_columns(const float (&d)[Shape::COLUMNS / 2], const float4 (&weights)[Shape::COLUMNS / 16],
            const bool negative[2], float sums[Shape::TOKENS][2])
{
    constexpr int TOKEN_STEPS = Shape::HEADS / 16;
    constexpr int STEPS = Shape::COLUMNS / 16;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const float w[4] = {weights[s].x, weights[s].y, weights[s].z, weights[s].w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float *const sum = &sums[s / TOKEN_STEPS][i / 2 % 2];
            const float x = d[8 * s + i];
            const float term = double_relu(HAS_SIGNS && negative[i / 2 % 2] ? -x : x);
            *sum = s % TOKEN_STEPS == 0 && i < 4 && i % 2 == 0
                       ? w[0] * term
                       : fmaf(w[i / 4 * 2 + i % 2], term, *sum);
        }
    }
}

/* Adds the sums of four lanes. A lane keeps its row, then its tokens. */
template <typename Shape>
__device__ __forceinline__ void
fold_lanes(const float sums[Shape::TOKENS][2], float results[token_results<Shape>::COUNT])
{
    const int c = (int)threadIdx.x % 4;
    float rows[Shape::TOKENS];
#pragma unroll
    for (int t = 0; t < Shape::TOKENS; t++) {
        const float keep = c % 2 == 0 ? sums[t][0] : sums[t][1];
        const float give = c % 2 == 0 ? sums[t][1] : sums[t][0];
        rows[t] = keep + __shfl_xor_sync(ALL_LANES, give, 1);
    }
    if constexpr (Shape::TOKENS == 1) {
        results[0] = rows[0] + __shfl_xor_sync(ALL_LANES, rows[0], 2);
    } else {
#pragma unroll
        for (int u = 0; u < Shape::TOKENS / 2; u++) {
            const float keep = c < 2 ? rows[2 * u] : rows[2 * u + 1];
            const float give = c < 2 ? rows[2 * u + 1] : rows[2 * u];
            results[u] = keep + __shfl_xor_sync(ALL_LANES, give, 2);
        }
    }
}

/* Every lane passes the same value; the compiler then knows that it is the same. */
__device__ __forceinline__ uint32_t
same_in_warp(uint32_t x)
{
    return __reduce_max_sync(ALL_LANES, x);
}

/* A descriptor `n` times 16 bytes further on; addresses do not carry into its upper half. */
__device__ __forceinline__ uint64_t
moved(uint64_t descriptor, uint32_t n)
{
    return (descriptor & 0xFFFFFFFF00000000) | (uint32_t)((uint32_t)descriptor + n);
}

/* Multiplies the tile of a stage, and stores its logits. `tile` counts from the item's first. */
template <typename Shape>
__device__ __forceinline__ void
score_tile(uint32_t stage, uint64_t keys, uint64_t queries,
           const float4 (&weights)[Shape::COLUMNS / 16], const token_results<Shape> &to,
           uint32_t tile, uint32_t value_bytes, logits_memory<Shape> *shared)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int warp_row = (int)threadIdx.x % GROUP_THREADS / SMLA_WARP_LANES * 16;
    const int row = warp_row + lane / 4 + lane % 2 * 8;
    const float scale = shared->scales[stage][row];
    const uint32_t found = ((const uint32_t *)&shared->found[stage])[row / 32];
    float d[Shape::COLUMNS / 2];
    ptx_fence_async_shared(); /* what cp.async wrote is visible to wgmma */
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
        wgmma_e4m3(d, moved(keys, stage * (TILE_BYTES >> 4) + 2 * k), moved(queries, 2 * k),
                   k != 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    __syncwarp();
    ptx_mbarrier_arrive(ptx_shared_address(&shared->empty[stage]), lane == 0);
    float sums[Shape::TOKENS][2];
    float results[token_results<Shape>::COUNT];
    add_columns<Shape, false>(d, weights, NULL, sums);
    const uint32_t negative = __ballot_sync(ALL_LANES, scale < 0.0f);
    if (negative != 0) { /* lane (g, 0) has key g, lane (g, 1) has key g + 8 */
        const bool rows[2] = {(negative >> (lane & ~3) & 1) != 0,
                              (negative >> (lane & ~3) & 2) != 0};
        add_columns<Shape, true>(d, weights, rows, sums);
    }
    fold_lanes<Shape>(sums, results);
    const float factor = 0.5f * fabsf(scale);
    const bool exists = found >> row % 32 & 1;
#pragma unroll
    for (int u = 0; u < token_results<Shape>::COUNT; u++) {
        const float logit = exists ? results[u] * factor : -INFINITY;
        uint8_t *const at = to.at[u] + tile * (TILE_KEYS * value_bytes);
        if ((int)(tile * TILE_KEYS) >= to.left[u]) {
            continue;
        }
        if (value_bytes == sizeof(uint16_t)) {
            *(uint16_t *)at = (uint16_t)smla_cvt_bf16x2(logit, 0.0f);
        } else {
            *(float *)at = logit;
        }
    }
}

template <typename Shape>
__device__ __forceinline__ void
load_item(const smla_logits_params &p, const logits_memory<Shape> *shared, int slot, int group,
          uint32_t value_bytes, float4 (&weights)[Shape::COLUMNS / 16], token_results<Shape> *to)
{
    const logits_item<Shape> &item = shared->items[slot];
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int c = lane % 4;
    const int warp_row = (int)threadIdx.x % GROUP_THREADS / SMLA_WARP_LANES * 16;
    const int own = item.first + warp_row + lane / 4 + lane % 2 * 8;
    const float4 *const fours = (const float4 *)&shared->weights[slot][group * Shape::COLUMNS] + c;
#pragma unroll
    for (int s = 0; s < Shape::COLUMNS / 16; s++) {
        weights[s] = fours[4 * s];
    }
#pragma unroll
    for (int u = 0; u < token_results<Shape>::COUNT; u++) {
        /* With one token per warpgroup two lanes have each logit, and one of them stores it. */
        const bool is_stored = Shape::TOKENS > 1 || c < 2;
        const int token = group * Shape::TOKENS + (Shape::TOKENS > 1 ? 2 * u + c / 2 : 0);
        const bool exists = is_stored && token < item.num_tokens;
        to->at[u] = (uint8_t *)p.out +
                    ((item.first_token + token) * p.out_stride_token + own) * value_bytes;
        to->left[u] = exists ? item.contexts[token] - own : 0;
    }
}

template <typename Shape>
__device__ __forceinline__ void
consume_items(const smla_logits_params &p, logits_memory<Shape> *shared)
{
    const uint32_t warpgroup = same_in_warp(threadIdx.x / GROUP_THREADS);
    const int group = Shape::GROUPS == 1 ? 0 : (int)warpgroup;
    const uint32_t value_bytes = same_in_warp(p.out_type == SMLA_FLOAT_BF16 ? 2 : 4);
    const uint64_t keys =
        wgmma_descriptor(ptx_shared_address(shared->keys[0]), 8 * ROW_BYTES, WGMMA_SWIZZLE_128);
    const uint64_t all_queries =
        wgmma_descriptor(ptx_shared_address(shared->queries[0][group * Shape::COLUMNS]),
                         8 * ROW_BYTES, WGMMA_SWIZZLE_128);
    uint32_t tiles = 0; /* tiles in the items before */
    for (uint32_t number = 0;; number++) {
        const int slot = (int)(number % SLOTS);
        ptx_mbarrier_wait(ptx_shared_address(&shared->q_full[slot]), number / SLOTS % 2);
        const uint32_t num_tiles = same_in_warp((uint32_t)shared->items[slot].num_tiles);
        if (num_tiles == 0) {
            break;
        }
        const bool has_tokens =
            (int)same_in_warp((uint32_t)shared->items[slot].num_tokens) > group * Shape::TOKENS;
        const uint64_t queries =
            moved(all_queries, (uint32_t)(slot * (Shape::BLOCK_ROWS * ROW_BYTES >> 4)));
        float4 weights[Shape::COLUMNS / 16];
        token_results<Shape> to;
        load_item<Shape>(p, shared, slot, group, value_bytes, weights, &to);
        const uint32_t skipped =
            Shape::PARTS == 1 ? 0 : (warpgroup + WARPGROUPS - tiles % WARPGROUPS) % WARPGROUPS;
#pragma unroll 1
        for (uint32_t i = skipped; i < num_tiles; i += Shape::PARTS) {
            const uint32_t count = tiles + i;
            const uint32_t stage = count % Shape::STAGES;
            ptx_mbarrier_wait(ptx_shared_address(&shared->full[stage]), count / Shape::STAGES % 2);
            if (has_tokens) {
                score_tile<Shape>(stage, keys, queries, weights, to, i, value_bytes, shared);
            } else {
                __syncwarp();
                ptx_mbarrier_arrive(ptx_shared_address(&shared->empty[stage]),
                                    threadIdx.x % SMLA_WARP_LANES == 0);
            }
        }
        tiles += num_tiles;
        __syncwarp();
        ptx_mbarrier_arrive(ptx_shared_address(&shared->q_empty[slot]),
                            threadIdx.x % SMLA_WARP_LANES == 0);
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

template <typename Shape>
__global__ void
__launch_bounds__(CONSUMERS + COPIERS, 1) logits_sm90(const __grid_constant__ logits_args args)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    logits_memory<Shape> *const shared = (logits_memory<Shape> *)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Shape::STAGES; i++) {
            ptx_mbarrier_init(ptx_shared_address(&shared->full[i]), SMLA_WARP_LANES + 1);
            ptx_mbarrier_init(ptx_shared_address(&shared->empty[i]), 4 * Shape::GROUPS);
        }
        for (int i = 0; i < SLOTS; i++) {
            ptx_mbarrier_init(ptx_shared_address(&shared->q_full[i]), COPIERS + 1);
            ptx_mbarrier_init(ptx_shared_address(&shared->q_empty[i]), 4 * WARPGROUPS);
        }
    }
    __syncthreads();
    ptx_wait_for_grids();
    if (threadIdx.x >= CONSUMERS) {
        ptx_release_registers<COPY_REGISTERS>();
        copy_works<Shape>(args, shared);
    } else {
        ptx_claim_registers<CONSUMER_REGISTERS>();
        consume_items<Shape>(args.p, shared);
    }
}

template <typename Shape>
cudaError_t
launch_shape(const smla_logits_params *p)
{
    static uint64_t allowed;
    const int bytes = (int)sizeof(logits_memory<Shape>);
    const cudaError_t code =
        allow_shared_bytes((const void *)logits_sm90<Shape>, bytes, p->stream.device_id, &allowed);
    const int64_t num_sms = smla_cuda_find_device(p->stream.device_id)->num_sms;
    const int64_t token_blocks = smla_count_parts(p->num_tokens, Shape::BLOCK_TOKENS);
    logits_args args = {};
    args.p = *p;
    args.page_keys = smla_make_divisor(p->has_pages ? p->pages.block_size : 1);
    args.has_runs = !p->has_pages || p->pages.block_size % TILE_KEYS == 0;
    args.token_blocks = smla_make_divisor(token_blocks);
    args.chunk_columns = choose_chunk(p->num_columns, token_blocks, Shape::WORKS_PER_SM * num_sms,
                                      Shape::LEAST_CHUNK, Shape::LARGEST_CHUNK);
    args.num_works = token_blocks * smla_count_parts(p->num_columns, args.chunk_columns);
    return code != cudaSuccess ? code
                               : smla_launch(logits_sm90<Shape>, args,
                                             args.num_works < num_sms ? args.num_works : num_sms,
                                             CONSUMERS + COPIERS, bytes, p->stream);
}

/* Few tokens per request share tiles among the warpgroups; many tokens share a tile. Flat keys
 * count as one request. */
template <int HEADS>
cudaError_t
launch_heads(const smla_logits_params *p)
{
    enum { FEW = 8 };
    const int64_t num_reqs = p->has_pages ? p->num_reqs : 1;
    if (p->num_tokens <= num_reqs) {
        return launch_shape<logits_shape<HEADS, 1, 1>>(p);
    }
    if (p->num_tokens <= FEW * num_reqs) {
        return launch_shape<logits_shape<HEADS, 128 / HEADS, 1>>(p);
    }
    return launch_shape<logits_shape<HEADS, 128 / HEADS, 3>>(p);
}

} // namespace

/* The rule depends on formats, heads and alignment only, so that a row's bits do not depend on
 * other rows. */
bool
smla_cuda_serves_logits_sm90(const smla_logits_params *p)
{
    return smla_cuda_find_device(p->stream.device_id)->compute_capability == 90 &&
           (p->num_heads == 32 || p->num_heads == 64) && p->q_scale == NULL &&
           p->kv.format->number == SMLA_ROW_FP8_INDEX && p->num_columns < INT32_MAX - MOST_CHUNK &&
           smla_is_multiple(p->q, p->q_stride_token | p->q_stride_head, CHUNK_BYTES) &&
           smla_is_multiple(p->kv.base, p->kv.page_stride_bytes | p->kv.token_stride_bytes,
                            CHUNK_BYTES);
}

cudaError_t
smla_cuda_launch_logits_sm90(const smla_logits_params *p)
{
    return p->num_heads == 64 ? launch_heads<64>(p) : launch_heads<32>(p);
}
