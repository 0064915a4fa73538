/* combine_tiles.cu: the partial rows of cut tiles of a dense call -> out and lse.
 *
 * Computes     as combine.cu: out = sum_i f_i out_i / sum_i f_i sum_i * sink factor
 * Shapes       cut tiles and their slots of partial rows (kernels.h); out [T][H][512] bf16, lse
 *              [T][H] fp32, any strides, rows of out aligned to 16 bytes
 * Shared mem   none
 * Roles        A warp per row, eight per CTA, eight CTAs per CTA of attention, which has begun one
 *              cut tile or none. A lane has 16 values, and reads those of four parts at once.
 * Roofline     Per row 2056 bytes in per part, 1024 out. All rows are read at once, from L2.
 * Numerics     f_i is a power of two, so rescaling loses nothing. Values are summed in the order of
 *              the parts, sums along a fixed tree. A part without keys has f_i = 0; its out was
 *              never written and is not used.
 * Source       split-KV decoding (Flash-Decoding)
 */
#include "cuda/attention/partials/softmax.cuh"
#include "cuda/attention/table/kernels.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"
#include "cuda/ptx/ptx_sm90.cuh"

enum {
    COMBINE_WARPS = 8,
    TILE_CTAS = SMLA_TILE_ROWS / COMBINE_WARPS,
    LANE_VALUES = SMLA_KV_LORA_RANK / SMLA_WARP_LANES,
    LANE_VECTORS = LANE_VALUES / 4, /* vector i of lane l: values 128 i + 4 l and on */
    PARTS_AT_ONCE = 4,
};

/* Names that smla_results has, too, are those that softmax.cuh reads. */
typedef struct combine_tiles_launch {
    const smla_cut_tile *tiles; /* [CTAs of attention] */
    smla_partial_rows partials;
    int32_t slot_rows;
    int32_t team; /* slots from one part of a tile to the next */
    smla_divisor heads;
    uint16_t *out;
    int64_t out_stride_token;
    int64_t out_stride_head;
    float *lse;
    int64_t lse_stride_token;
    int64_t lse_stride_head;
    smla_sinks sinks;
    bool empty_lse_is_plus_inf;
    float *max_logits;
    int64_t max_logits_stride_token;
    int64_t max_logits_stride_head;
} combine_tiles_launch;

/* The partial rows of a row: part i is row first + i * stride. */
typedef struct row_parts {
    int64_t first;
    int64_t stride;
    int32_t count;
} row_parts;

/* What is known of the whole row. */
typedef struct folded_row {
    float max_log2;
    float sum;
} folded_row;

static __device__ __forceinline__ float2
load_state(const combine_tiles_launch &launch, const row_parts &parts, int part)
{
    return part < parts.count
               ? *(const float2 *)(launch.partials.state + 2 * (parts.first + part * parts.stride))
               : make_float2(-INFINITY, 0.0f);
}

static __device__ __forceinline__ folded_row
fold_states(const combine_tiles_launch &launch, const row_parts &parts, int lane)
{
    folded_row row = {-INFINITY, 0.0f};
    for (int part = lane; part < parts.count; part += SMLA_WARP_LANES) {
        row.max_log2 = fmaxf(row.max_log2, load_state(launch, parts, part).x);
    }
#pragma unroll
    for (int step = 1; step < SMLA_WARP_LANES; step *= 2) {
        row.max_log2 = fmaxf(row.max_log2, __shfl_xor_sync(0xFFFFFFFFu, row.max_log2, step));
    }
    const float reference = softmax_reference(row.max_log2);
    for (int part = lane; part < parts.count; part += SMLA_WARP_LANES) {
        const float2 state = load_state(launch, parts, part);
        row.sum += state.y * softmax_rescale(state.x, reference);
    }
#pragma unroll
    for (int step = 1; step < SMLA_WARP_LANES; step *= 2) {
        row.sum += __shfl_xor_sync(0xFFFFFFFFu, row.sum, step);
    }
    return row;
}

/* total += the values of PARTS_AT_ONCE parts from `first` on, times their factors. */
static __device__ __forceinline__ void
fold_values(const combine_tiles_launch &launch, const row_parts &parts, int first, float reference,
            int lane, float total[LANE_VALUES])
{
    float4 values[PARTS_AT_ONCE][LANE_VECTORS];
    float factors[PARTS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; i++) {
        const int part = min(first + i, parts.count - 1);
        const float *const from =
            launch.partials.out + (parts.first + part * parts.stride) * SMLA_KV_LORA_RANK;
        const float2 state = load_state(launch, parts, first + i);
        factors[i] = state.y == 0.0f ? 0.0f : softmax_rescale(state.x, reference);
#pragma unroll
        for (int j = 0; j < LANE_VECTORS; j++) {
            values[i][j] = *(const float4 *)(from + 128 * j + 4 * lane);
        }
    }
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; i++) {
#pragma unroll
        for (int j = 0; j < LANE_VECTORS; j++) {
            ptx_fma_unless_zero(&total[4 * j], values[i][j].x, factors[i]);
            ptx_fma_unless_zero(&total[4 * j + 1], values[i][j].y, factors[i]);
            ptx_fma_unless_zero(&total[4 * j + 2], values[i][j].z, factors[i]);
            ptx_fma_unless_zero(&total[4 * j + 3], values[i][j].w, factors[i]);
        }
    }
}

static __global__ void
__launch_bounds__(COMBINE_WARPS *SMLA_WARP_LANES)
    combine_tiles(const __grid_constant__ combine_tiles_launch launch)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int cta = (int)blockIdx.x / TILE_CTAS;
    const int row =
        (int)blockIdx.x % TILE_CTAS * COMBINE_WARPS + (int)threadIdx.x / SMLA_WARP_LANES;
    ptx_let_next_grid_start();
    ptx_wait_for_grids();
    const smla_cut_tile tile = launch.tiles[cta];
    if (tile.num_parts == 0 || row >= tile.num_rows) {
        return;
    }
    const int team = cta / launch.team, member = cta - team * launch.team;
    const int64_t slot = (int64_t)2 * team * launch.team + member;
    const row_parts parts = {slot * launch.slot_rows + row, (int64_t)launch.team * launch.slot_rows,
                             tile.num_parts};
    const uint32_t place = (uint32_t)(tile.first_row + row);
    const int32_t query = (int32_t)smla_divide_uint32(place, launch.heads);
    const int64_t token = tile.token + query;
    const int64_t head = place - query * launch.heads.divisor;
    const float sink = softmax_sink(launch.sinks, head);
    const folded_row whole = fold_states(launch, parts, lane);
    const float factor = softmax_finish(launch, launch.sinks, token, head, whole.max_log2,
                                        whole.sum, sink, lane == 0);
    const float reference = softmax_reference(whole.max_log2);
    float total[LANE_VALUES] = {};
#pragma unroll 1
    for (int first = 0; first < parts.count; first += PARTS_AT_ONCE) {
        fold_values(launch, parts, first, reference, lane, total);
    }
    uint16_t *const to =
        launch.out + token * launch.out_stride_token + head * launch.out_stride_head + 4 * lane;
#pragma unroll
    for (int j = 0; j < LANE_VECTORS; j++) {
        const float *const x = &total[4 * j];
        const uint32_t words[2] = {smla_cvt_bf16x2(x[0] * factor, x[1] * factor),
                                   smla_cvt_bf16x2(x[2] * factor, x[3] * factor)};
        smla_store_vector_2(to + 128 * j, words);
    }
}

cudaError_t
smla_cuda_launch_combine_tiles(const smla_attention_params *params, const smla_cut_tiles *cut,
                               int32_t team, smla_cuda_deferred *deferred)
{
    combine_tiles_launch launch = {};
    launch.tiles = cut->tiles;
    launch.partials = cut->partials;
    launch.slot_rows = (int32_t)cut->slot_rows;
    launch.team = team;
    launch.heads = smla_make_divisor(params->queries.num_heads);
    take_results(*params, &launch);
    return smla_launch(combine_tiles, launch, cut->num_ctas * TILE_CTAS,
                       COMBINE_WARPS * SMLA_WARP_LANES, 0, params->call.stream, false, deferred);
}
