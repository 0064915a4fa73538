/* mha_attention_sm90.cu: multi-head attention over ragged, contiguous keys and values for Hopper,
 * with wgmma: prefills of rows of 192/128 and 128/128. varlen_attention.cu serves all other calls.
 *
 * Computes     s_j = softmax_scale * log2(e) * (q . k_j),
 *              w_j = 2^(s_j - ref) for the keys that the row sees, all of its request's or those up
 *              to its own position,
 *              out = sum_j w_j v_j / sum_j w_j / (1 + e^(sink - lse)),
 *              lse = ref * ln 2 + ln(sum_j w_j)
 * Shapes       q [Tq][H][D], k [Tk][Hk][D], v [Tk][Hk][128] bf16 or fp16, D 192 or 128; q and k may
 *              be pairs, cut at a multiple of 64. Addresses and strides are multiples of 16 bytes.
 *              out [Tq][H][128] of q's type or fp32, likewise; lse [Tq][H] fp32, any strides.
 * Shared mem   bytes for D = 192; rows lie in segments of 64 columns, swizzled by 128 bytes
 *                    0  queries  [2 groups][3][64][64]
 *               49,152  keys     [2 stages][3][128][64]
 *              147,456  values   [2 stages][2][128][64]
 *              212,992  out      [8 warps][16][64]
 *              229,376  4 tiles, 21 mbarriers; 230,400 in all, of 232,448
 * Roles        One CTA per SM. It takes tiles, 128 query rows of a head, and of each tile blocks of
 *              128 keys, from the last one that the tile sees to the first.
 *              warp 0         a lane copies keys by tensor maps, and asks for the next tile when
 *                             CLAIM_BLOCKS of this one are left
 *              warps 1, 2     a lane each copies values, and queries; then all lanes fill the rows
 *                             of no request, if the call made its results
 *              warp 3         the scheduler finds tiles (mha_tiles.cuh)
 *              2 groups       64 rows each, 240 registers per thread; the other warps have 24
 *              mbarriers      arrivals | waiting threads
 *              q_full[2]      the bytes | the group
 *              q_empty[2]     a lane per warp of the group, when first scores are started | warp 2
 *              k_full[2]      the bytes | groups
 *              k_empty[2]     a lane per consumer warp, when its scores are there | warp 0
 *              v_full[2]      the bytes | groups
 *              v_empty[2]     a lane per consumer warp, when its out is there | warp 1
 *              tile_full[4]   the scheduler | warps 0 to 2, groups
 *              tile_empty[4]  warps 0 to 2, each consumer thread | the scheduler
 *              tile_wanted    warp 0 | the scheduler
 *              named barriers
 *              TURN           the group that passes the turn | the group that takes it
 *              GROUP_BARRIER  the group, when values are cleared | the same
 * Roofline     2 (D + 128) FLOP per pair of row and key. A block of 192/128 takes the tensor cores
 *              2560 cycles for both groups, and they bind; from 4096 tokens on, power does.
 *              Measured on an H200, causal, 128 heads of 192/128 (2026-11-28, 807258a, bench --only
 *              dense_prefill): 8 x 1024 589 us, 584 TFLOP/s; 1 x 4096 926, 742; 1 x 8192 3846, 715.
 * Numerics     Scores and out are fp32 sums by tensor cores. Weights are rounded once, to the type
 *              of the operands; their sum is not rounded to it, and is compensated from block to
 *              block. For out it is corrected for what heavy weights lost (find_rounding). ref is
 *              the largest logit of the row's first block with one, and moves to a larger one only
 *              if that is 2^32 heavier, in fp16 2^8. Keys of the block that are not the request's
 *              are masked, and their values cleared. A NaN value in a key that only
 *              the causal mask hides makes 0 * NaN. No key, or no logit but -inf: out 0, lse -inf.
 *              A row's bits depend on its query, its request's keys and on how many queries of the
 *              request come behind it, because tiles and blocks are counted from the end.
 * Source       FlashAttention-3, for two groups of which one multiplies while the other one takes
 *              exponents. Queries as operands in registers, turns, references that seldom move, one
 *              stream of products over all tiles, late claims and sections of heads are ours.
 */
#include "cuda/attention/sm90/mha/mha_loads.cuh"
#include "cuda/attention/sm90/mha/mha_steps.cuh"
#include "cuda/attention/sm90/mha/mha_tiles.cuh"
#include "cuda/attention/table/kernels.h"

namespace {

template <int D, bool HALF>
__global__ void
__launch_bounds__(MHA_THREADS, 1) attend_mha(const __grid_constant__ mha_args args)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    mha_memory<D> *const shared = (mha_memory<D> *)memory;
    /* The shuffle lets ptxas know that all lanes agree. */
    const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / SMLA_WARP_LANES, 0);
    if (threadIdx.x == 0) {
        start_memory(shared);
    }
    __syncthreads(); /* all threads see the barriers */
    ptx_wait_for_grids();
    if (warp < LOAD_WARPS) {
        ptx_release_registers<LOAD_REGISTERS>();
        if (warp == 3) {
            schedule_tiles(args, shared);
        } else if (lane_idx() == 0) {
            if (warp == 0) {
                load_keys(args, shared);
            } else if (warp == 1) {
                load_values(args, shared);
            } else {
                load_queries(args, shared);
            }
        }
        __syncwarp();
        if (warp == 1 || warp == 2) { /* while the last blocks are multiplied */
            smla_fill_rows_of_none(&args.p.padding, &args.p.visible.reqs, blockIdx.x, gridDim.x,
                                   (int)threadIdx.x - SMLA_WARP_LANES, 2 * SMLA_WARP_LANES);
        }
    } else {
        ptx_claim_registers<CONSUMER_REGISTERS>();
        consume_tiles<D, HALF>(args, warp / GROUP_WARPS - 1, warp % GROUP_WARPS, shared);
    }
}

/* ---- Launcher ------------------------------------------------------------------------------ */

/* Makes the map for boxes of `box_rows` rows of one head. Returns false where no map can describe
 * the rows. A dimension of size 1 may have any stride. */
bool
map_rows(const smla_head_rows &rows, int64_t dim, int64_t num_rows, int64_t num_heads, int box_rows,
         CUtensorMap *map)
{
    const int64_t segments = dim / SEGMENT;
    const int64_t heads = rows.stride_head == 0 ? 1 : num_heads;
    const int64_t token_bytes = num_rows == 1 ? dim * 2 : rows.stride_token * 2;
    const int64_t head_bytes = heads == 1 ? dim * 2 : rows.stride_head * 2;
    if (token_bytes <= 0 || head_bytes <= 0 || num_rows > INT32_MAX) {
        return false;
    }
    const smla_cuda_array array = {rows.data,
                                   2,
                                   4,
                                   {SEGMENT, (uint64_t)num_rows, (uint64_t)segments,
                                    (uint64_t)heads},
                                   {(uint64_t)token_bytes, SEGMENT_BYTES, (uint64_t)head_bytes},
                                   {SEGMENT, (uint32_t)box_rows, (uint32_t)segments, 1}};
    return smla_cuda_make_tensor_map(&array, true, map);
}

/* Makes the maps of one array, or of the two of a pair. */
bool
map_parts(const smla_head_rows *parts, const int16_t *dims, int count, int64_t num_rows,
          int64_t num_heads, int box_rows, CUtensorMap maps[2], mha_rows *rows)
{
    for (int i = 0; i < count; i++) {
        if (dims[i] > 0 && !map_rows(parts[i], dims[i], num_rows, num_heads, box_rows, &maps[i])) {
            return false;
        }
        rows->segments[i] = dims[i] / SEGMENT;
        rows->head_step[i] = parts[i].stride_head == 0 || num_heads == 1 ? 0 : 1;
    }
    return true;
}

static_assert((int)TILE_ROWS == (int)SMLA_MHA_TILE_ROWS, "run_attention.c counts them");

/* The most tiles of a head that requests of any lengths can have: one that is not full for each. */
int64_t
count_most_tiles(const smla_attention_params &p)
{
    const int64_t num_reqs = p.visible.reqs.num_reqs < p.queries.num_tokens
                                 ? p.visible.reqs.num_reqs
                                 : p.queries.num_tokens;
    return (p.queries.num_tokens + num_reqs * (TILE_ROWS - 1)) / TILE_ROWS;
}

/* Fills args but for the counters. Returns false where no tensor map can describe the rows. */
bool
make_args(const smla_attention_params &p, mha_args *args)
{
    args->p = mha_params_of(&p);
    args->most_head_tiles = (uint32_t)count_most_tiles(p);
    args->group = smla_make_divisor(p.queries.num_heads / p.kv.num_kv_heads);
    args->out_token_bytes =
        p.results.out_stride_token * (p.results.out_type == SMLA_FLOAT_FP32 ? 4 : 2);
    args->out_head_bytes =
        p.results.out_stride_head * (p.results.out_type == SMLA_FLOAT_FP32 ? 4 : 2);
    args->scale_log2 = (float)(p.logits.softmax_scale * 1.4426950408889634074);
    args->is_causal = p.visible.rule.right == 0;
    args->out_is_fp32 = p.results.out_type == SMLA_FLOAT_FP32;
    return map_parts(p.queries.parts, p.queries.dims, 2, p.queries.num_tokens, p.queries.num_heads,
                     GROUP_ROWS, args->q_maps, &args->q) &&
           map_parts(p.kv.rows, p.queries.dims, 2, p.kv.num_keys, p.kv.num_kv_heads, BLOCK_KEYS,
                     args->k_maps, &args->k) &&
           map_parts(&p.kv.rows[SMLA_VALUES], &p.kv.value_dim, 1, p.kv.num_keys, p.kv.num_kv_heads,
                     BLOCK_KEYS, args->v_maps, &args->v);
}

/* The counters, if there is something to claim, they can count it, and the workspace has room. */
unsigned long long *
find_counters(const smla_attention_params &p, int64_t most_tiles, int64_t num_ctas)
{
    const bool has_room = p.workspace.memory != NULL &&
                          p.workspace.bytes >= SMLA_RAGGED_WORKSPACE_BYTES &&
                          (uintptr_t)p.workspace.memory % alignof(uint64_t) == 0;
    return has_room && most_tiles > num_ctas && most_tiles + num_ctas <= (int64_t)COUNTER_MASK
               ? (unsigned long long *)p.workspace.memory
               : NULL;
}

template <int D, bool HALF>
cudaError_t
launch_mha(const smla_attention_params &p, const smla_cuda_device *device, mha_args *args)
{
    static_assert(sizeof(mha_memory<D>) <= 227 << 10, "an SM of Hopper has 227 KiB");
    const int64_t most_tiles = count_most_tiles(p) * p.queries.num_heads;
    const int64_t num_ctas = most_tiles < device->num_sms ? most_tiles : device->num_sms;
    args->counters = find_counters(p, most_tiles, num_ctas);
    return smla_launch_large<attend_mha<D, HALF>>(*args, num_ctas, MHA_THREADS,
                                                  (int)sizeof(mha_memory<D>), p.call.stream);
}

} /* namespace */

cudaError_t
smla_attend_sm90_mha(const smla_attention_params *params, const smla_attention_start *start)
{
    const smla_attention_params &p = *params;
    const smla_cuda_device *const device = smla_cuda_find_device(p.call.stream.device_id);
    const bool is_half = p.queries.type == SMLA_FLOAT_FP16;
    mha_args args = {};
    (void)start;
    if (!make_args(p, &args)) {
        return SMLA_NO_KERNEL;
    }
    if (p.queries.dims[0] + p.queries.dims[1] == 192) {
        return is_half ? launch_mha<192, true>(p, device, &args)
                       : launch_mha<192, false>(p, device, &args);
    }
    return is_half ? launch_mha<128, true>(p, device, &args)
                   : launch_mha<128, false>(p, device, &args);
}
