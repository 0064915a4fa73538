/* logits_sm90.cu: the indexer's logits of FP8 queries and keys by Hopper's FP8 tensor cores, for 32
 * and 64 heads. logits.cu serves all others, more exactly.
 *
 * Computes     out[t,n] = |scale_n| sum_h weights[t,h] * relu(+-q[t,h] . key n) for n below the
 *              token's context, -inf from there on and for keys that do not exist. Twice a relu is
 *              d + |d|, so that the sum is half of mix . key + sum_h weights[t,h] |q[t,h] . key|
 *              with mix = sum_h weights[t,h] q[t,h] (logits_queries.cuh)
 * Shapes       q [T, H, 128] e4m3 and keys of 128 e4m3, all at multiples of 16 bytes; scales fp32;
 *              weights [T, H] fp32; out [T, N] fp32 or bf16
 * Shared mem   keys [STAGES][64][128] and two tasks' queries and mixes [columns][128], swizzled by
 *              128 bytes (wgmma.cuh); scales, weights, tasks, mbarriers; up to 180 KiB
 * Roles        A CTA per SM, which walks through work items (logits_plan.h). A task is a run of a
 *              work item's tokens.
 *              2 or 3 query warps
 *                               bring the tasks' queries and compute their mixes, a task ahead.
 *                               Then they fill columns without keys
 *              2 or 1 key warps take tiles of 64 keys alternately. A tile in one page, or of flat
 *                               keys, comes by tensor maps, else by cp.async
 *              3 warpgroups     GROUPS 3: each has other tokens and goes through all tiles
 *                               GROUPS 1: each has the same tokens and every third tile
 *              mbarriers        arrivals | waiting threads
 *              full[stage]      the lane that starts the copy, and the bytes; or 32 lanes' copies,
 *                               and lane 0 | consumers
 *              empty[stage]     4 warps per warpgroup that reads the tile | a key warp
 *              q_full[slot]     the query threads | consumers
 *              q_empty[slot]    12 warps | query warps
 * Roofline     256 FLOP per token, head and key. 64 keys x 136 columns, 8 of them for mixes, take
 *              272 cycles of tensor cores; adding them up takes a warp 1 instruction per column, 64
 *              for a tile, and about 100 others. A decode streams 132 bytes per key.
 * Numerics     The tensor cores add a dot product with about 14 bits, so that errors are below 2^-8
 *              of the sum of magnitudes. A mix has 16 bits; a token whose mix is worse adds d + |d|
 *              per head. NaN passes on. A lane adds heads 8 j + 2 c and 8 j + 2 c + 1 in order,
 *              then four lanes are added, then the mix: the order is the same in all shapes. A
 *              negative scale of a key negates its products.
 * Source       DeepGEMM's sm90_fp8_mqa_logits, for keys as A and queries as B. Three token groups
 *              per key tile, which read keys from L2 a third as often, and mixes are ours.
 */
#include "cuda/indexer/logits_keys.cuh"
#include "cuda/indexer/logits_queries.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace {

/* ---- Consumers ----------------------------------------------------------------------------- */

/* 2 relu(x). It costs one addition at full rate; a maximum runs at half the rate. */
__device__ __forceinline__ float
double_relu(float x)
{
    return x + fabsf(x);
}

/* Where a thread stores the logits of a task. Lane (g, c) of a warp ends with the logits of key g +
 * 8 (c % 2) of the warp's 16, for tokens 2 u + c / 2. */
template <typename Shape> struct token_results {
    uint8_t *at[Shape::PAIRS];  /* address of the logit of the lane's key in the first tile */
    int32_t left[Shape::PAIRS]; /* number of columns from there to the end of the token's keys */
    float units[Shape::PAIRS];  /* the unit of the token's mix, 0 if it has none */
    /* Number of scales in front of a tile's own; the same in all lanes. */
    uint32_t shift;
    uint32_t plain;  /* a bit per token of the warpgroup, the same in all lanes */
    uint32_t scaled; /* the same for tokens whose logits have a power */
};

/* Replaces d by 2 relu(d) in the columns of plain tokens, which have a bit of `plain` each, or by 2
 * relu(-d) in rows that are `negative`. */
template <typename Shape>
__device__ __forceinline__ void
clip_plain(uint32_t plain, const bool negative[2], float (&d)[Shape::GROUP_ROWS / 2])
{
#pragma unroll
    for (int i = 0; i < Shape::COLUMNS / 2; i++) {
        const float x = negative[i / 2 % 2] ? -d[i] : d[i];
        d[i] = (plain >> i / (Shape::HEADS / 2) & 1) != 0 ? double_relu(x) : d[i];
    }
}

/* Adds up weight * |d| over each token's columns: sums[token][row]. */
template <typename Shape>
__device__ __forceinline__ void
add_columns(const float (&d)[Shape::GROUP_ROWS / 2], const float4 (&weights)[Shape::COLUMNS / 16],
            float sums[Shape::TOKENS][2])
{
    constexpr int TOKEN_STEPS = Shape::HEADS / 16;
    constexpr int STEPS = Shape::COLUMNS / 16;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const float w[4] = {weights[s].x, weights[s].y, weights[s].z, weights[s].w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float *const sum = &sums[s / TOKEN_STEPS][i / 2 % 2];
            const float term = fabsf(d[8 * s + i]);
            *sum = s % TOKEN_STEPS == 0 && i < 4 && i % 2 == 0
                       ? w[0] * term
                       : fmaf(w[i / 4 * 2 + i % 2], term, *sum);
        }
    }
}

/* Returns the dot products of the mixes with the lane's key, for its tokens. Lanes (g, c) and (g, c
 * + 1) each have two rows of a token's mix, for both lanes' keys. */
template <typename Shape>
__device__ __forceinline__ void
add_mixes(const float (&d)[Shape::GROUP_ROWS / 2], float results[Shape::PAIRS])
{
    const bool is_odd = threadIdx.x % 2 != 0;
    const float unit = is_odd ? 1.0f / (MIX_STEP * MIX_STEP) : 1.0f;
#pragma unroll
    for (int u = 0; u < Shape::PAIRS; u++) {
        const float *const own = &d[Shape::COLUMNS / 2 + 4 * u];
        const float first = fmaf(own[1], unit / MIX_STEP, own[0] * unit);
        const float second = fmaf(own[3], unit / MIX_STEP, own[2] * unit);
        const float give = is_odd ? first : second;
        results[u] = (is_odd ? second : first) + __shfl_xor_sync(ALL_LANES, give, 1);
    }
}

/* Adds the sums of four lanes. A lane keeps the sums of its row first, then those of its tokens. */
template <typename Shape>
__device__ __forceinline__ void
fold_lanes(const float sums[Shape::TOKENS][2], float results[Shape::PAIRS])
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

/* Returns the descriptor of the address 16 n bytes further on; addresses do not carry into its
 * upper half. */
__device__ __forceinline__ uint64_t
moved(uint64_t descriptor, uint32_t n)
{
    return (descriptor & 0xFFFFFFFF00000000) | (uint32_t)((uint32_t)descriptor + n);
}

/* The token of the warpgroup whose logits are the lane's number u. */
template <typename Shape>
__device__ __forceinline__ int
token_of_lane(int u)
{
    return Shape::TOKENS > 1 ? 2 * u + (int)threadIdx.x % 4 / 2 : 0;
}

__device__ __forceinline__ void
store_value(uint8_t *at, float logit, uint32_t value_bytes)
{
    if (value_bytes == sizeof(uint16_t)) {
        *(uint16_t *)at = (uint16_t)smla_cvt_bf16x2(logit, 0.0f);
    } else {
        *(float *)at = logit;
    }
}

/* Stores the logit of a token whose weights were divided by a power. A product that would leave
 * fp32 comes last. */
__device__ __noinline__ void
store_scaled(uint8_t *at, float sum, float factor, float power, uint32_t value_bytes)
{
    store_value(at, power > 1.0f ? sum * factor * power : sum * (factor * power), value_bytes);
}

/* Multiplies the tile of a stage, and stores its logits. `powers` are those of the warpgroup's
 * tokens that are `scaled`. `tile` counts from the task's first tile.
 * The thread with `frees` returns the stage to the key warp, for its warp. */
template <typename Shape>
__device__ __forceinline__ void
score_tile(uint32_t stage, uint64_t keys, uint64_t queries,
           const float4 (&weights)[Shape::COLUMNS / 16], const token_results<Shape> &to,
           const float *powers, uint32_t tile, uint32_t value_bytes, bool frees,
           logits_memory<Shape> *shared)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int warp_row = (int)threadIdx.x % GROUP_THREADS / SMLA_WARP_LANES * 16;
    const int row = warp_row + lane / 4 + lane % 2 * 8;
    const float scale = shared->scales[stage][to.shift + row];
    const uint32_t found = ((const uint32_t *)&shared->found[stage])[row / 32];
    float d[Shape::GROUP_ROWS / 2];
    if (!Shape::HAS_MAPS) {
        ptx_fence_async_shared(); /* makes what cp.async wrote visible to wgmma */
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
        wgmma_e4m3(d, moved(keys, stage * (TILE_BYTES >> 4) + 2 * k), moved(queries, 2 * k),
                   k != 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    __syncwarp();
    ptx_mbarrier_arrive(ptx_shared_address(&shared->empty[stage]), frees);
    float sums[Shape::TOKENS][2];
    float results[Shape::PAIRS];
    float mixes[Shape::PAIRS];
    if (to.plain != 0) { /* lane (g, 0) has key g, lane (g, 1) has key g + 8 */
        const uint32_t negative = __ballot_sync(ALL_LANES, scale < 0.0f);
        const bool rows[2] = {(negative >> (lane & ~3) & 1) != 0,
                              (negative >> (lane & ~3) & 2) != 0};
        clip_plain<Shape>(to.plain, rows, d);
    }
    add_columns<Shape>(d, weights, sums);
    fold_lanes<Shape>(sums, results);
    add_mixes<Shape>(d, mixes);
    const float factor = 0.5f * fabsf(scale);
    const uint32_t sign = smla_float_bits(scale) & 0x80000000u;
    const bool exists = found >> row % 32 & 1;
#pragma unroll
    for (int u = 0; u < Shape::PAIRS; u++) {
        const float mix = smla_bits_float(smla_float_bits(mixes[u] * to.units[u]) ^ sign);
        const float logit = exists ? (results[u] + mix) * factor : -INFINITY;
        uint8_t *const at = to.at[u] + tile * (TILE_KEYS * value_bytes);
        if ((int)(tile * TILE_KEYS) >= to.left[u]) {
            continue;
        }
        store_value(at, logit, value_bytes);
    }
    if (to.scaled != 0) { /* rare: stores these tokens' logits again */
#pragma unroll
        for (int u = 0; u < Shape::PAIRS; u++) {
            const int token = token_of_lane<Shape>(u);
            if ((to.scaled >> token & 1) != 0 && exists && (int)(tile * TILE_KEYS) < to.left[u]) {
                store_scaled(to.at[u] + tile * (TILE_KEYS * value_bytes), results[u], factor,
                             powers[token], value_bytes);
            }
        }
    }
}

template <typename Shape>
__device__ __forceinline__ void
load_task(const smla_logits_params &p, const logits_memory<Shape> *shared, int slot, int group,
          uint32_t value_bytes, float4 (&weights)[Shape::COLUMNS / 16], token_results<Shape> *to)
{
    const logits_task<Shape> &task = shared->tasks[slot];
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int c = lane % 4;
    const int warp_row = (int)threadIdx.x % GROUP_THREADS / SMLA_WARP_LANES * 16;
    const int own = task.first + warp_row + lane / 4 + lane % 2 * 8;
    const float4 *const fours = (const float4 *)&shared->weights[slot][group * Shape::COLUMNS] + c;
#pragma unroll
    for (int s = 0; s < Shape::COLUMNS / 16; s++) {
        weights[s] = fours[4 * s];
    }
#pragma unroll
    for (int u = 0; u < Shape::PAIRS; u++) {
        /* With one token per warpgroup, two lanes have each logit, and only one of them stores
         * it. */
        const bool is_stored = Shape::TOKENS > 1 || c < 2;
        const int token = group * Shape::TOKENS + token_of_lane<Shape>(u);
        const bool exists = is_stored && token < task.num_tokens;
        to->at[u] = (uint8_t *)p.out +
                    ((int64_t)(task.first_token + token) * p.out_stride_token + own) * value_bytes;
        to->left[u] = exists ? task.contexts[token] - own : 0;
        to->units[u] = exists && (task.plain >> token & 1) == 0 ? task.units[token] : 0.0f;
    }
    to->shift = same_in_warp((uint32_t)task.shift);
    to->plain = same_in_warp(task.plain) >> group * Shape::TOKENS & ((1 << Shape::TOKENS) - 1);
    to->scaled = same_in_warp(task.scaled) >> group * Shape::TOKENS & ((1 << Shape::TOKENS) - 1);
}

template <typename Shape>
__device__ __forceinline__ void
consume_tasks(const sm90_args &all, logits_memory<Shape> *shared)
{
    const smla_logits_params &p = all.args.p;
    const uint32_t warpgroup = same_in_warp(threadIdx.x / GROUP_THREADS);
    const int group = Shape::GROUPS == 1 ? 0 : (int)warpgroup;
    const uint32_t value_bytes = same_in_warp(p.out_type == SMLA_FLOAT_BF16 ? 2 : 4);
    const uint64_t keys =
        wgmma_descriptor(ptx_shared_address(shared->keys[0]), 8 * ROW_BYTES, WGMMA_SWIZZLE_128);
    const uint64_t all_queries =
        wgmma_descriptor(ptx_shared_address(shared->queries[0][group * Shape::GROUP_ROWS]),
                         8 * ROW_BYTES, WGMMA_SWIZZLE_128);
    static_assert(Shape::STAGES % Shape::PARTS == 0, "a stage belongs to one warpgroup");
    const uint32_t step = step_of<Shape>(all);
    const bool frees = threadIdx.x % SMLA_WARP_LANES == 0;
    uint32_t stage = Shape::PARTS == 1 ? 0 : warpgroup; /* stage of the next tile */
    uint32_t parity = 0;
    uint32_t tiles = 0; /* number of tiles in earlier tasks */
    ptx_wait_for_grids();
    for (uint32_t number = 0;; number++) {
        const int slot = (int)(number % SLOTS);
        ptx_mbarrier_wait(ptx_shared_address(&shared->q_full[slot]), number / SLOTS % 2);
        const uint32_t num_tiles = same_in_warp((uint32_t)shared->tasks[slot].num_tiles);
        if (num_tiles == 0) {
            break;
        }
        const bool has_tokens =
            (int)same_in_warp((uint32_t)shared->tasks[slot].num_tokens) > group * Shape::TOKENS;
        const uint64_t queries =
            moved(all_queries, (uint32_t)(slot * (Shape::BLOCK_ROWS * ROW_BYTES >> 4)));
        float4 weights[Shape::COLUMNS / 16];
        token_results<Shape> to;
        load_task<Shape>(p, shared, slot, group, value_bytes, weights, &to);
        const uint32_t skipped =
            Shape::PARTS == 1 ? 0 : (warpgroup + WARPGROUPS - tiles % WARPGROUPS) % WARPGROUPS;
#pragma unroll 1
        for (uint32_t i = skipped; i < num_tiles; i += Shape::PARTS) {
            ptx_mbarrier_wait(ptx_shared_address(&shared->full[stage]), parity);
            if (has_tokens) {
                score_tile<Shape>(stage, keys, queries, weights, to,
                                  &shared->tasks[slot].units[group * Shape::TOKENS], i * step,
                                  value_bytes, frees, shared);
            } else {
                __syncwarp();
                ptx_mbarrier_arrive(ptx_shared_address(&shared->empty[stage]), frees);
            }
            stage += Shape::PARTS;
            if (stage >= Shape::STAGES) {
                stage -= Shape::STAGES;
                parity ^= 1;
            }
        }
        __syncwarp();
        ptx_mbarrier_arrive(ptx_shared_address(&shared->q_empty[slot]), frees);
        tiles += num_tiles;
    }
}

/* ---- Kernel -------------------------------------------------------------------------------- */

/* Initialises the barriers. A launch's arguments are in no cache yet. So every warp loads one line
 * of them: the lines arrive together, and not one after another where they are needed. */
template <typename Shape>
__device__ __forceinline__ void
start(const sm90_args &all, logits_memory<Shape> *shared)
{
    enum { LINE_WORDS = 16, NUM_LINES = sizeof(sm90_args) / sizeof(uint32_t) / LINE_WORDS };
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    const uint32_t argument = ((const uint32_t *)&all)[warp % NUM_LINES * LINE_WORDS];
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < Shape::STAGES; i++) {
            ptx_mbarrier_init(ptx_shared_address(&shared->full[i]),
                              Shape::HAS_MAPS ? 1 : SMLA_WARP_LANES + 1);
            ptx_mbarrier_init(ptx_shared_address(&shared->empty[i]), 4 * Shape::GROUPS);
        }
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            ptx_mbarrier_init(ptx_shared_address(&shared->q_full[i]), Shape::QUERY_THREADS);
            ptx_mbarrier_init(ptx_shared_address(&shared->q_empty[i]), 4 * WARPGROUPS);
        }
        ptx_fence_mbarrier_init();
    }
    /* No thread reads this; the store keeps the load alive. */
    shared->sums[warp] = (int32_t)argument;
}

template <typename Shape>
__global__ void
__launch_bounds__(CONSUMERS + COPIERS, 1) logits_sm90(const __grid_constant__ sm90_args all)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    logits_memory<Shape> *const shared = (logits_memory<Shape> *)memory;
    if (Shape::HAS_MAPS && threadIdx.x == CONSUMERS + Shape::QUERY_THREADS) {
        ptx_prefetch_map(&all.keys);
        ptx_prefetch_map(&all.scales);
    }
    start<Shape>(all, shared);
    if (Shape::IS_EVEN) {
        ptx_wait_for_grids();
        find_share<Shape>(all, shared);
        __syncthreads(); /* all threads see the barriers and their share */
    }
    if (threadIdx.x < CONSUMERS) {
        bool is_started = false;
        await_start<Shape>(&is_started);
        ptx_claim_registers<CONSUMER_REGISTERS>();
        consume_tasks<Shape>(all, shared);
    } else {
        ptx_release_registers<COPY_REGISTERS>();
        ptx_wait_for_grids();
        if (threadIdx.x < CONSUMERS + Shape::QUERY_THREADS) {
            copy_queries<Shape>(all, shared);
        } else {
            copy_keys<Shape>(all, shared);
        }
    }
}

/* Makes the tensor maps of keys and scales. Returns false if there can be none, and cp.async must
 * bring the keys. Tiles lie in one page, or keys are flat. */
bool
make_maps(const smla_logits_params *p, sm90_args *all)
{
    const smla_kv_view *const kv = &p->kv;
    const uint64_t page_bytes =
        p->has_pages ? (uint64_t)kv->page_stride_bytes : (uint64_t)kv->token_stride_bytes;
    const smla_cuda_array keys = {kv->base,
                                  1,
                                  3,
                                  {ROW_BYTES, (uint64_t)kv->block_size, (uint64_t)kv->num_pages},
                                  {(uint64_t)kv->token_stride_bytes, page_bytes},
                                  {ROW_BYTES, TILE_KEYS, 1}};
    const smla_cuda_array scales = {
        kv->scales,   4,          2, {(uint64_t)kv->block_size, (uint64_t)kv->num_pages},
        {page_bytes}, {SCALES, 1}};
    return kv->scale_token_stride_bytes == 4 && kv->block_size <= INT32_MAX - TILE_KEYS &&
           kv->num_pages <= INT32_MAX && smla_cuda_make_tensor_map(&keys, true, &all->keys) &&
           smla_cuda_make_tensor_map(&scales, false, &all->scales);
}

enum { MOST_COLUMNS = 1 << 29, FILL_COLUMNS = 512, MOST_FILL_COLUMNS = 4096 };

template <typename Shape>
cudaError_t
launch_shape(const sm90_args &all, int64_t num_sms)
{
    static uint64_t allowed;
    const int bytes = (int)sizeof(logits_memory<Shape>);
    const bool is_short = all.plan.num_work_items < num_sms && !all.plan.is_even;
    return smla_launch_large(logits_sm90<Shape>, all, is_short ? all.plan.num_work_items : num_sms,
                             CONSUMERS + COPIERS, bytes, bytes, all.args.p.call.stream, &allowed);
}

template <int HEADS, int TOKENS, int GROUPS>
cudaError_t
launch_groups(const sm90_args &all, int64_t num_sms, bool has_maps)
{
    if (!has_maps) {
        return launch_shape<logits_shape<HEADS, TOKENS, GROUPS, false, false>>(all, num_sms);
    }
    if constexpr (TOKENS * GROUPS <= SMLA_LOGITS_MOST_EVEN_TOKENS) {
        if (all.plan.is_even) {
            return launch_shape<logits_shape<HEADS, TOKENS, GROUPS, true, true>>(all, num_sms);
        }
    }
    return launch_shape<logits_shape<HEADS, TOKENS, GROUPS, true, false>>(all, num_sms);
}

template <int HEADS>
cudaError_t
launch_heads(const smla_logits_params *p)
{
    enum { TOKENS = 128 / HEADS };
    const int64_t num_sms = smla_cuda_find_device(p->call.stream.device_id)->num_sms;
    sm90_args all = {};
    logits_args *const args = &all.args;
    args->p = *p;
    args->page_keys = smla_make_divisor(p->has_pages ? p->pages.block_size : 1);
    args->has_runs = !p->has_pages || p->pages.block_size % TILE_KEYS == 0;
    const bool has_maps = args->has_runs && make_maps(p, &all);
    const int64_t num_reqs = p->has_pages ? p->num_reqs : 1;
    const smla_logits_plan plan =
        smla_plan_logits(HEADS, p->num_tokens, num_reqs, p->num_columns, num_sms, has_maps);
    if (plan.num_work_items == 0) {
        return cudaSuccess;
    }
    args->chunk_columns = choose_chunk(p->num_columns, plan.token_blocks, 4 * num_sms, FILL_COLUMNS,
                                       MOST_FILL_COLUMNS);
    args->num_work_items =
        plan.token_blocks * smla_count_parts(p->num_columns, args->chunk_columns);
    all.plan = plan;
    const bool is_regular = num_reqs > 0 && p->num_tokens % num_reqs == 0;
    all.guess_tokens = smla_make_divisor(is_regular ? plan.req_tokens : 1);
    all.req_blocks = smla_make_divisor(plan.req_blocks);
    all.blocks = smla_make_divisor(plan.token_blocks);
    all.step = smla_make_divisor(plan.step);
    all.column_tiles = (int32_t)smla_count_parts(p->num_columns, TILE_KEYS);
    all.thread_blocks = (int32_t)smla_count_parts(plan.token_blocks, CONSUMERS + COPIERS);
    if (plan.num_groups == 1) {
        return plan.group_tokens == 1 ? launch_groups<HEADS, 1, 1>(all, num_sms, has_maps)
                                      : launch_groups<HEADS, TOKENS, 1>(all, num_sms, has_maps);
    }
    if constexpr (HEADS == 64) {
        if (plan.group_tokens == 1) {
            return launch_groups<HEADS, 1, 3>(all, num_sms, has_maps);
        }
    }
    return launch_groups<HEADS, TOKENS, 3>(all, num_sms, has_maps);
}

} // namespace

/* Whether this kernel serves a call. The rule depends only on formats, heads and alignment, so that
 * a row's bits do not depend on other rows. */
bool
smla_cuda_serves_logits_sm90(const smla_logits_params *p)
{
    return smla_cuda_is_hopper(smla_cuda_find_device(p->call.stream.device_id)) &&
           (p->num_heads == 32 || p->num_heads == 64) && p->q_scale == NULL &&
           p->kv.format->number == SMLA_ROW_FP8_INDEX && p->num_columns < MOST_COLUMNS &&
           p->num_tokens < MOST_COLUMNS &&
           smla_is_multiple(p->q, p->q_stride_token | p->q_stride_head, CHUNK_BYTES) &&
           smla_is_multiple(p->kv.base, p->kv.page_stride_bytes | p->kv.token_stride_bytes,
                            CHUNK_BYTES);
}

cudaError_t
smla_cuda_launch_logits_sm90(const smla_logits_params *p)
{
    return p->num_heads == 64 ? launch_heads<64>(p) : launch_heads<32>(p);
}
