/* work_items.cuh: work items, which kernels call items for short. A work item is what a CTA of an
 * attention kernel takes at a time: one head tile of one split of one token, or a part of that. The
 * file also prepares the launches of these kernels.
 */
#pragma once

#include "cuda/attention/keys/key_rows.cuh"

/* ---- Work items by number ------------------------------------------------------------------- */

/* Work items are numbered by token, then split, then head tile. The head tiles of a token and split
 * are neighbours because they gather the same cache rows: L2 serves all but the first. */
static __device__ __forceinline__ work_item
make_item(const attention_launch &launch, int32_t token, int32_t split, int32_t tile,
          int heads_per_cta)
{
    work_item item;
    item.token = token;
    item.split = split;
    item.num_segments = launch.num_segments;
    item.first_head = tile * heads_per_cta;
    item.num_heads = min((int32_t)launch.params.queries.num_heads - item.first_head, heads_per_cta);
    item.first_row = NOT_PARTIAL;
    if (launch.params.results.num_splits > 1) {
        item.first_row = (token * launch.params.results.num_splits + split) *
                             (int)launch.params.queries.num_heads +
                         item.first_head;
    }
    return item;
}

/* In some launches the first whole_tokens tokens are whole, and only the others are split. Items of
 * whole tokens come first. They have all splits of their token. This makes the item of a token and
 * split that are number `pair` of the launch. `token` and `split` are those of this number if only
 * tokens behind the whole ones count. HAS_WHOLE: the launch may have whole tokens. */
template <bool HAS_WHOLE>
static __device__ __forceinline__ work_item
make_pair_item(const attention_launch &launch, int32_t pair, int32_t token, int32_t split,
               int32_t tile, int heads_per_cta)
{
    work_item item = make_item(launch, token, split, tile, heads_per_cta);
    if constexpr (HAS_WHOLE) {
        if (pair < launch.whole_tokens) {
            item.token = pair;
            item.split = 0;
            item.num_segments = launch.params.results.num_splits;
            item.first_row = NOT_PARTIAL;
        } else {
            item.token += launch.whole_tokens;
        }
    }
    return item;
}

/* Finds a work item by its number. There are num_tiles items per token and split. The function
 * divides, because the portable kernels have no registers for divisors that they could multiply
 * with. */
template <bool HAS_WHOLE>
static __device__ __forceinline__ work_item
find_item(const attention_launch &launch, uint32_t num_tiles, int cta, int heads_per_cta)
{
    const uint32_t num_splits = (uint32_t)launch.params.results.num_splits;
    const uint32_t pair = (uint32_t)cta / num_tiles;
    const uint32_t behind = HAS_WHOLE ? pair - (uint32_t)launch.whole_tokens : pair;
    return make_pair_item<HAS_WHOLE>(launch, (int32_t)pair, (int32_t)(behind / num_splits),
                                     (int32_t)(behind % num_splits),
                                     (int32_t)((uint32_t)cta % num_tiles), heads_per_cta);
}

/* find_item for launch.head_tiles, without divisions: Hopper's launches begin with it. A number
 * behind the last item gives an item without heads and columns, for which nothing is read or
 * written. */
template <bool HAS_WHOLE>
static __device__ __forceinline__ work_item
find_numbered_item(const attention_launch &launch, int idx, int heads_per_cta)
{
    const int pair = (int)smla_divide_uint32((uint32_t)idx, launch.head_tiles);
    const int behind = HAS_WHOLE ? pair - launch.whole_tokens : pair;
    const int token = (int)smla_divide_uint32((uint32_t)behind, launch.num_splits);
    work_item item =
        make_pair_item<HAS_WHOLE>(launch, pair, token,
                                  behind - token * launch.params.results.num_splits,
                                  idx - pair * (int)launch.head_tiles.divisor, heads_per_cta);
    if (item.token >= launch.params.queries.num_tokens) {
        item.token = 0;
        item.num_segments = 0;
        item.num_heads = 0;
    }
    return item;
}

/* ---- Parts of work items -------------------------------------------------------------------- */

/* Where a launch may cut work items (cut_work_items.cuh), a word describes each part of an item:
 * the item's number, the part's segments, the part's number and the number of parts, and the number
 * of the item's first piece. The first part of an item is its head. The others are pieces, numbered
 * over all items. */
enum {
    MAX_PARTS = 8, /* the most parts per item */
    MAX_CUT_ITEMS = 256,
    WHOLE_ITEM = -1, /* stands for the word in a launch that cuts no items */
};

static __device__ __forceinline__ int
make_part(int idx, int begin, int end, int nth, int count, int first_piece)
{
    return idx | begin << 8 | (end - 1) << 12 | nth << 16 | (count - 1) << 19 | first_piece << 22;
}

static __device__ __forceinline__ int
item_of_part(int part)
{
    return part & (MAX_CUT_ITEMS - 1);
}

static __device__ __forceinline__ int
count_parts(int part)
{
    return (part >> 19 & (MAX_PARTS - 1)) + 1;
}

/* The slot of the partial rows that an item's n-th part leaves. Head parts have the first gridDim.x
 * slots. */
static __device__ __forceinline__ int
slot_of_part(int part, int n)
{
    return n == 0 ? item_of_part(part) : (int)gridDim.x + (part >> 22) + n - 1;
}

/* The first partial row of a part. The fallback takes smaller head tiles, which may begin in the
 * middle of a slot. */
static __device__ __forceinline__ int32_t
find_first_row(const attention_launch &launch, int part, int32_t first_head)
{
    const int slot = slot_of_part(part, part >> 16 & (MAX_PARTS - 1));
    return count_parts(part) == 1
               ? (int32_t)NOT_PARTIAL
               : slot * launch.slot_heads + (first_head & (launch.tile_heads - 1));
}

/* Reduces a work item to the part that the word `part` describes. */
static __device__ __forceinline__ void
take_part(const attention_launch &launch, int part, work_item *item)
{
    item->split = part >> 8 & (NUM_SEGMENTS - 1);
    item->num_segments = (part >> 12 & (NUM_SEGMENTS - 1)) + 1 - item->split;
    item->first_row = find_first_row(launch, part, item->first_head);
}

/* Finds a work item by its number, and reduces it to a part unless `part` is WHOLE_ITEM. TILED: the
 * part is one of a tile, and the item is a token of this tile. */
template <bool HAS_WHOLE, bool TILED>
static __device__ __forceinline__ work_item
find_part(const attention_launch &launch, uint32_t num_tiles, int cta, int part, int heads_per_cta)
{
    work_item item = find_item<HAS_WHOLE>(launch, num_tiles, cta, heads_per_cta);
    if (part != WHOLE_ITEM) {
        take_part(launch, part, &item);
        if (TILED && item.first_row != NOT_PARTIAL) {
            item.first_row += item.token % launch.tile_tokens * launch.token_heads;
        }
    }
    return item;
}

/* The work item, or part of one, that nth_item (work_order.cuh) names. */
static __device__ __forceinline__ work_item
find_ordered_item(const attention_launch &launch, int number, int heads_per_cta)
{
    const bool is_part = launch.num_segments > 1;
    work_item item =
        find_numbered_item<true>(launch, is_part ? item_of_part(number) : number, heads_per_cta);
    if (is_part && item.num_heads != 0) {
        take_part(launch, number, &item);
    }
    return item;
}

/* ---- Launchers ----------------------------------------------------------------------------- */

/* Defines a launcher of the kernel table; the function that follows its name launches. */
#define LAUNCHER(name, ...)                                                                  \
    cudaError_t name(const smla_attention_params *params, const smla_attention_start *start) \
    {                                                                                        \
        return __VA_ARGS__(params, start);                                                   \
    }

static inline int64_t
num_sms_of(const smla_attention_params *params)
{
    return smla_cuda_find_device(params->call.stream.device_id)->num_sms;
}

/* Whether every row of q_nope and q_pe is aligned to 16 bytes. */
static bool
is_query_aligned(const smla_attention_params *params)
{
    const smla_head_rows &nope = params->queries.parts[SMLA_NOPE];
    const smla_head_rows &pe = params->queries.parts[SMLA_PE];
    const int64_t bytes = smla_float_bytes(params->queries.type);
    return smla_are_rows_aligned(nope.data, nope.stride_token, nope.stride_head, 16, bytes) &&
           smla_are_rows_aligned(pe.data, pe.stride_token, pe.stride_head, 16, bytes);
}

/* Whether every row of out is aligned to `bytes`. */
static inline bool
is_out_aligned(const smla_attention_params *params, int64_t bytes)
{
    const smla_results &results = params->results;
    return smla_are_rows_aligned(results.out, results.out_stride_token, results.out_stride_head,
                                 bytes);
}

/* Lets splits take chunks of columns in turn. The chunks of the extra list follow those of the main
 * list. */
static inline void
interleave_splits(attention_launch *launch)
{
    const list_params &params = launch->params;
    launch->column_stride = params.results.num_splits * CHUNK_COLUMNS;
    launch->extra_turn = (int32_t)(smla_count_parts(params.keys.lists[0].topk, CHUNK_COLUMNS) %
                                   params.results.num_splits);
    for (int i = 0; i < params.keys.num_lists; i++) {
        launch->split_columns[i] =
            (int32_t)params.keys.lists[i].topk; /* a split ends with its list */
        launch->split_step[i] = CHUNK_COLUMNS;
    }
}

template <int HEADS>
static attention_launch
make_launch(const smla_attention_params *params, const smla_attention_start *start)
{
    attention_launch launch = {};
    launch.params = list_params_of(params);
    launch.whole_tokens = (int32_t)start->whole_tokens;
    if (params->results.num_splits > 1) {
        launch.partials = smla_partials_of(params, start->whole_tokens);
    }
    for (int i = 0; i < params->keys.num_lists; i++) {
        launch.lists[i] = list_facts_of(&params->keys.lists[i]);
        launch.split_columns[i] =
            (int32_t)smla_split_columns(params->keys.lists[i].topk, params->results.num_splits);
        launch.split_step[i] = launch.split_columns[i];
    }
    launch.entry_tokens =
        smla_make_divisor(smla_is_table(&params->keys) ? params->keys.entry_tokens : 1);
    launch.column_stride = CHUNK_COLUMNS;
    launch.num_segments = 1;
    launch.head_tiles = smla_make_divisor(smla_count_parts(params->queries.num_heads, HEADS));
    launch.num_splits = smla_make_divisor(params->results.num_splits);
    launch.softmax_scale = (float)params->logits.softmax_scale;
    launch.scale_log2 = (float)(launch.softmax_scale * 1.4426950408889634074);
    launch.wgmma_scale_log2 = launch.scale_log2 * WGMMA_CORRECTION;
    launch.q_is_aligned = is_query_aligned(params);
    launch.has_key_unit = smla_has_key_unit(&params->keys);
    launch.key_scales = key_scales_of(&params->logits);
    launch.out_is_paired = is_out_aligned(params, 4);
    if (start->interleaves) {
        interleave_splits(&launch);
    }
    return launch;
}

static inline int64_t
count_items(const attention_launch &launch)
{
    const int64_t whole = launch.whole_tokens;
    const int64_t others = launch.params.queries.num_tokens - whole;
    return (whole + others * launch.params.results.num_splits) * launch.head_tiles.divisor;
}
