/* tile_launch.cuh: launches of attention_fp8_tiles_sm90.cu and attention_e4m3_tiles_sm90.cu, whose
 * items are tiles of rows. To most of the kernel a group of tokens looks like one token with as
 * many heads as the tile has rows: the query is described so. Ranges of keys, results, sinks and
 * partial rows are those of single tokens, and find_row_item finds a row's.
 */
#pragma once

#include "cuda/attention/sm90/sparse_fp8/fp8_kernel.cuh"

/* The argument of the kernel. */
typedef struct tile_launch {
    fp8_launch fp8;
    attention_launch by_token; /* the fallback's, whose items have one token each */
} tile_launch;

template <typename Shape>
__global__ void
__launch_bounds__(FP8_THREADS, 1) attend_tiles(const __grid_constant__ tile_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    attend_as_role(launch.fp8, launch.by_token, (fp8_memory<Shape> *)memory);
}

/* ---- Launchers ----------------------------------------------------------------------------- */

/* Rows of a token with one head may be said to be any distance apart. */
static inline int64_t
find_row_stride(int64_t stride_token, int64_t stride_head, int64_t num_heads)
{
    return num_heads == 1 ? stride_token : stride_head;
}

/* The params of a call in which a group of `count` tokens is one token with the heads of all. Only
 * what is per token and head changes, and of the results only how far apart rows are. */
static inline smla_attention_params
join_tokens(const smla_attention_params *params, int64_t count)
{
    const int64_t num_heads = params->queries.num_heads;
    smla_attention_params joined = *params;
    joined.queries.num_tokens /= count;
    joined.queries.num_heads *= count;
    for (int i = 0; i < 2; i++) {
        smla_head_rows *const rows = &joined.queries.parts[i];
        rows->stride_head = find_row_stride(rows->stride_token, rows->stride_head, num_heads);
        rows->stride_token *= count;
    }
    joined.results.out_stride_head =
        find_row_stride(joined.results.out_stride_token, joined.results.out_stride_head, num_heads);
    return joined;
}

/* Lets a launch by token read what a launch of tiles says about cut items. */
static inline void
take_cuts(const attention_launch &tiles, attention_launch *by_token)
{
    by_token->num_segments = tiles.num_segments;
    by_token->slot_heads = tiles.slot_heads;
    by_token->tile_heads = tiles.tile_heads;
    by_token->partials = tiles.partials;
}

static inline void
describe_tile(const smla_attention_params *params, int64_t count, attention_launch *launch)
{
    launch->tile_tokens = (uint8_t)count;
    launch->token_heads = (uint8_t)params->queries.num_heads;
    launch->heads_inverse = find_heads_inverse(params->queries.num_heads);
}

/* The plan of a call of tiles says how many tokens each has (schedule.c). */
template <int ROW, int HEADS>
static cudaError_t
launch_tiles(const smla_attention_params *params, const smla_attention_start *start)
{
    typedef fp8_shape<ROW, HEADS, false, true, true> Shape;
    constexpr int SHARED_BYTES = (int)sizeof(fp8_memory<Shape>);
    static_assert(SHARED_BYTES <= SMLA_SM90_SHARED_BYTES, "what an SM has");
    const int64_t count = start->tile_tokens;
    row_span spans[2];
    if (!is_query_aligned(params) || !is_out_aligned(params, 16) || !find_spans(params, spans)) {
        return launch_portable<ROW, HEADS>(params, start);
    }
    const smla_attention_params joined = join_tokens(params, count);
    smla_attention_start joined_start = *start;
    joined_start.whole_tokens /= count;
    tile_launch launch = {};
    const int64_t num_ctas = make_fp8_launch<Shape>(&joined, &joined_start, spans, &launch.fp8);
    launch.by_token = make_launch<HEADS>(params, start);
    take_cuts(launch.fp8.base, &launch.by_token);
    describe_tile(params, count, &launch.fp8.base);
    describe_tile(params, count, &launch.by_token);
    return smla_launch_large<attend_tiles<Shape>>(launch, num_ctas, FP8_THREADS, SHARED_BYTES,
                                                  params->call.stream, false, start->deferred);
}
