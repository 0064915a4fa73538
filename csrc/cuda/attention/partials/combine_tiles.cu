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
#include "cuda/attention/partials/fold.cuh"

enum {
    COMBINE_WARPS = 8,
    TILE_CTAS = SMLA_TILE_ROWS / COMBINE_WARPS,
    LANE_VALUES = SMLA_KV_LORA_RANK / SMLA_WARP_LANES,
    LANE_VECTORS = LANE_VALUES / 4, /* vector i of lane l: values 128 i + 4 l and on */
    PARTS_AT_ONCE = 4,
};

typedef struct combine_tiles_launch {
    const smla_cut_tile *tiles; /* [CTAs of attention] */
    smla_partial_rows partials;
    int32_t slot_rows;
    int32_t team; /* slots from one part of a tile to the next */
    smla_divisor heads;
    smla_results results;
    smla_sinks sinks;
} combine_tiles_launch;

/* What is known of the whole row. */
typedef struct folded_row {
    float max_log2;
    float sum;
} folded_row;

static __device__ __forceinline__ folded_row
fold_states(const row_parts &parts, int lane)
{
    folded_row row = {-INFINITY, 0.0f};
    for (int part = lane; part < parts.count; part += SMLA_WARP_LANES) {
        row.max_log2 = fmaxf(row.max_log2, load_state<false>(parts, part).max_log2);
    }
    row.max_log2 = smla_max_of_lanes(row.max_log2);
    const float reference = softmax_reference(row.max_log2);
    for (int part = lane; part < parts.count; part += SMLA_WARP_LANES) {
        const part_state state = load_state<false>(parts, part);
        row.sum += state.sum * softmax_rescale(state.max_log2, reference);
    }
    row.sum = smla_sum_of_lanes(row.sum);
    return row;
}

/* total += the values of PARTS_AT_ONCE parts from `first` on, times their factors. */
static __device__ __forceinline__ void
fold_values(const row_parts &parts, int first, float reference, int lane, float total[LANE_VALUES])
{
    float4 values[PARTS_AT_ONCE][LANE_VECTORS];
    float factors[PARTS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; i++) {
        const int part = min(first + i, parts.count - 1);
        const float *const from = parts.values + part * parts.stride * SMLA_KV_LORA_RANK;
        const part_state state = load_state<false>(parts, first + i);
        factors[i] = state.sum == 0.0f ? 0.0f : softmax_rescale(state.max_log2, reference);
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
    const row_parts parts = find_parts(launch.partials, slot * launch.slot_rows + row,
                                       (int64_t)launch.team * launch.slot_rows, tile.num_parts);
    const uint32_t place = (uint32_t)(tile.first_row + row);
    const int32_t query = (int32_t)smla_divide_uint32(place, launch.heads);
    const int64_t token = tile.token + query;
    const int64_t head = place - query * launch.heads.divisor;
    const float sink = softmax_sink(launch.sinks, head);
    const folded_row whole = fold_states(parts, lane);
    const float factor = softmax_finish(launch.results, launch.sinks, token, head, whole.max_log2,
                                        whole.sum, sink, lane == 0);
    const float reference = softmax_reference(whole.max_log2);
    float total[LANE_VALUES] = {};
#pragma unroll 1
    for (int first = 0; first < parts.count; first += PARTS_AT_ONCE) {
        fold_values(parts, first, reference, lane, total);
    }
    uint16_t *const to = smla_out16(&launch.results, token, head) + 4 * lane;
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
    launch.results = params->results;
    launch.sinks = params->logits.sinks;
    return smla_launch(combine_tiles, launch, cut->num_ctas * TILE_CTAS,
                       COMBINE_WARPS * SMLA_WARP_LANES, 0, params->call.stream, false, deferred);
}
