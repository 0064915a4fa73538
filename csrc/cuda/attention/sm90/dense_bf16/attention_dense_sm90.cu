/* attention_dense_sm90.cu: dense MLA attention over bf16 rows for Hopper, with wgmma.
 *
 * Computes     as attention_bf16_sm90.cu, over the keys of a request that a mask admits: row i of
 *              a request sees keys begin_i to end_i - 1 (visible.h)
 * Shapes       q [T][H][512] and [T][H][64] bf16, or [T][H][512] alone; pages of bf16 rows by block
 *              table or slot table; lengths and starts of requests on the device. All rows begin at
 *              multiples of 16 bytes.
 * Shared mem   that of attention_bf16_sm90.cu, with a row of the tile in place of a head. Where it
 *              has maxima of logits, which nobody wants here, are the limits of the tile's rows.
 * Roles        One CTA per SM. A CTA takes items one after the other: a tile, 64 rows of a request,
 *              and steps of 128 keys. Row i of a request is head i % H of its query token i / H, so
 *              several query tokens of few heads share a tile, and each key is read once for it.
 *              4 gather warps   as in attention_bf16_sm90.cu, by page: they read no index and count
 *                               no keys.
 *              2 warpgroups     bf16_steps.cuh. A block that some row sees in part is marked, and
 *                               masked by the limits of each row. A warp of group 1 is the planner:
 *                               it decides which items the CTA takes (dense_items.cuh), and makes
 *                               an item when consumers begin the one before.
 *              mbarriers        those of attention_bf16_sm90.cu. `planned` tells gather warps of an
 *                               item, query_full consumers, or both that there is none.
 * Roofline     2 * H * 1088 FLOP and 1152 bytes per key of a request. One query token of 16 heads,
 *              128 requests of 4096 keys: 604 MB, 147 us at 4.1 TB/s of HBM; 64 heads: 34 cycles of
 *              wgmma per key and SM, where HBM takes 62, so HBM binds, too; 128 heads take two
 *              tiles: 2 * 44 cycles as measured for index lists, 220 us. RESULTS.md has the times.
 * Numerics     as attention_bf16_sm90.cu. Blocks begin at multiples of 64 keys of the request, and
 *              a masked block changes no sum, so the bits of a row do not depend on the other rows
 *              of its tile. With num_splits = 1 tiles are never cut, and a row's bits do not depend
 *              on the batch. A NaN in a value that only some rows of a tile see may reach the out
 *              of all its rows.
 * Source       an even run of keys for each SM: FlashMLA's scheduler of dense decoding, studied,
 *              not copied; the rest as attention_bf16_sm90.cu
 */
#include "cuda/attention/sm90/dense_bf16/dense_results.cuh"
#include "cuda/attention/sm90/sparse_bf16/bf16_steps.cuh"

/* ---- Kernel -------------------------------------------------------------------------------- */

/* Group 1 has the planner, because it waits for group 0 when an item begins. The shuffle lets ptxas
 * know that all lanes agree. */
static __device__ __forceinline__ bool
is_planner(void)
{
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    return __shfl_sync(0xFFFFFFFFu, warp, 0) == GROUP_THREADS / SMLA_WARP_LANES;
}

static __device__ __forceinline__ int
lane_of_planner(void)
{
    return ptx_forget((int)threadIdx.x) % SMLA_WARP_LANES;
}

template <typename Keys>
static __device__ __forceinline__ void
consume_tiles(const dense_launch &launch, bf16_memory *shared)
{
    bf16_phase phase = {};
    if (is_planner()) {
        prefetch_requests(launch, lane_of_planner());
    }
    start<Keys>(launch, shared);
    ptx_wait_for_grids();
    if (is_planner()) {
        start_walk(launch, lane_of_planner(), &shared->dense.walk);
        publish_item(launch, lane_of_planner(), 0, 0, shared);
    }
#pragma unroll 1
    for (int turn = 0;; turn = next_turn(turn)) {
        const int parity = (int)phase.item;
        ptx_mbarrier_wait(BF16_AT(find_base(shared), query_full), phase.item);
        if (((const volatile dense_item *)&shared->dense.items[turn])->num_rows == 0) {
            break;
        }
        if (is_planner()) {
            publish_item(launch, lane_of_planner(), next_turn(turn), phase.item ^ 1, shared);
        }
        bf16_consumer state;
        clear_sums(&state);
        consume_steps<Keys, false>(launch, &phase, shared, &state);
        finish_tile(launch, shared->dense.items[turn], parity, shared, state);
    }
}

/* Keys: key_kind. */
template <typename Keys>
__global__ void
__launch_bounds__(Keys::THREADS, 1) attend_dense(const __grid_constant__ dense_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    bf16_memory *const shared = (bf16_memory *)memory;
    if (threadIdx.x < CONSUMER_THREADS) {
        ptx_claim_registers<Keys::CONSUMER_REGISTERS>();
        consume_tiles<Keys>(launch, shared);
    } else {
        ptx_release_registers<Keys::GATHER_REGISTERS>();
        gather_tiles<Keys>(launch, shared);
    }
}

/* ---- Launchers ----------------------------------------------------------------------------- */

/* CTAs of a team: the tiles that share their keys, if it is known how many, and always those of one
 * token. */
static int32_t
count_team(const smla_attention_params *params, int64_t num_ctas)
{
    enum { MOST = 4 };
    const smla_requests *const reqs = &params->visible.reqs;
    const int64_t tokens = reqs->query_starts == NULL ? reqs->query_len : 1;
    const int64_t tiles = smla_count_parts(tokens * params->queries.num_heads, TILE_HEADS);
    const int64_t team = tiles < 1 ? 1 : tiles < MOST ? tiles : (int64_t)MOST;
    return (int32_t)(team < num_ctas ? team : num_ctas);
}

/* A CTA per unit of the plan, as far as the host knows, and one per SM at most. */
static int64_t
count_dense_ctas(const smla_attention_params *params, int64_t num_reqs, bool may_cut)
{
    const int64_t num_sms = num_sms_of(params);
    const int64_t tiles =
        smla_count_parts(params->queries.num_tokens * params->queries.num_heads, TILE_HEADS) +
        num_reqs;
    const int64_t steps = smla_count_parts(params->keys.lists[0].topk, STEP_KEYS) + TILE_COST;
    const int64_t most = may_cut ? tiles * steps : tiles;
    return most < num_sms ? most : num_sms;
}

/* A window's number of keys, in 32 bits: no request has more keys than that. */
static int32_t
clamp_keys(int64_t keys)
{
    return keys < INT32_MAX - 1 ? (int32_t)keys : INT32_MAX - 1;
}

template <typename Keys>
static cudaError_t
launch_dense(const smla_attention_params *params, const smla_attention_start *start)
{
    constexpr int SHARED_BYTES = (int)sizeof(bf16_memory);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    const smla_range_rule *const rule = &params->visible.rule;
    const bool may_cut = start->cut_bytes > 0;
    dense_launch launch = {};
    launch.base = make_launch<TILE_HEADS>(params, start);
    launch.heads = smla_make_divisor(params->queries.num_heads);
    launch.num_reqs = (int32_t)params->visible.reqs.num_reqs + params->results.fills_padding;
    launch.left = clamp_keys(rule->left);
    launch.right = clamp_keys(rule->right);
    launch.has_shares = rule->chunk > 0 || rule->share.size > 0;
    const int64_t num_ctas = count_dense_ctas(params, launch.num_reqs, may_cut);
    launch.team = count_team(params, num_ctas);
    smla_cut_tiles cut = {};
    if (may_cut) {
        cut = smla_cut_tiles_at(params->workspace.memory,
                                params->queries.num_tokens * params->queries.num_heads, num_ctas);
        launch.cut_tiles = cut.tiles;
        launch.slot_rows = (int32_t)cut.slot_rows;
        launch.base.partials = cut.partials;
    }
    const cudaError_t started =
        smla_launch_large<attend_dense<Keys>>(launch, num_ctas, Keys::THREADS, SHARED_BYTES,
                                              params->call.stream, false, start->deferred);
    return started != cudaSuccess || !may_cut
               ? started
               : smla_cuda_launch_combine_tiles(params, &cut, launch.team, start->deferred);
}

LAUNCHER(smla_attend_sm90_dense_64, launch_dense<key_kind<true, false, true>>)
LAUNCHER(smla_attend_sm90_dense_512_64, launch_dense<key_kind<false, false, true>>)
