/* key_source.cuh: how every attention kernel gets from an item's columns to indices, slots and
 * cache rows. Contains the kernels' argument, and the rules by which an entry of a list is a
 * key.
 */
#pragma once

#include "cuda/attention/kernel_params.cuh"
#include "cuda/attention/partials/softmax.cuh"
#include "cuda/attention/table/kernels.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/ptx_sm90.cuh"

enum {
    CHUNK_COLUMNS = 128, /* columns that a split takes at once where splits take them in turn */
    NUM_SEGMENTS = 16,   /* segments per item, where items may be cut */
    NEIGHBOURS = 4, /* rows of one page that Hopper's kernel for dense FP8 rows copies at once */
};

/* The index that stands for an absent entry of a list. It is not below any index_limit. */
enum : uint32_t { NO_INDEX = 0xFFFFFFFFu };

/* ---- Launch -------------------------------------------------------------------------------- */

/* What a kernel reads about a list, besides its smla_key_list. */
typedef struct list_facts {
    smla_divisor block_size;
    int64_t num_slots;
    uint32_t index_limit; /* indices from this one on name no slot */
    int16_t scale_offset;
    int16_t rope_offset;
    bool is_fp8;
    bool is_aligned;    /* every cache row is aligned to 16 bytes */
    uint8_t nope_type;  /* smla_nope_type */
    uint8_t scale_type; /* smla_scale_type */
    int8_t nope_chunks; /* chunks of eight values in the NoPE part, or of codes in the row */
    int8_t scale_shift; /* chunk c has scale c >> scale_shift */
} list_facts;

/* Corrects scores of FP8 rows from wgmma, which truncates every sum. Measured on an H200: if a
 * large product comes first, the 36 steps of a score lose 20 * 2^-24 of it on average and up to
 * 53 * 2^-24; if products have both signs, 7 * 2^-24. This factor keeps the largest errors below
 * the contract's 32 * 2^-24. Sums of at most 20 steps lose less and need none: scores of bf16 rows,
 * and of rows of 656 bytes with 16 heads. */
#define WGMMA_CORRECTION (1.0f + 0x1p-20f)

/* The argument of the kernels. Fields that the first instructions read come first. A launch's
 * arguments are in no cache. They come in lines of 64 bytes, each 280 cycles after an instruction
 * first needs it. */
typedef struct attention_launch {
    smla_divisor head_tiles; /* items per token and split */
    smla_divisor num_splits;
    int32_t split_columns[2]; /* per list: columns per split, or per segment if items may be cut */
    int32_t split_step[2];    /* columns from the start of a split (segment) to the next one's */
    int32_t column_stride;    /* columns from a chunk of a split to its next (interleave_splits) */
    int32_t extra_turn;       /* number of the split that begins the extra list */
    int32_t
        num_segments;   /* segments per item where items may be cut (cut_work_items.cuh), else 1 */
    bool q_is_aligned;  /* every row of q_nope and q_pe is aligned to 16 bytes */
    bool out_is_paired; /* every row of out is aligned to 4 bytes */
    bool has_key_unit;  /* smla_has_key_unit */
    float scale_log2;   /* softmax_scale * log2(e) */
    float wgmma_scale_log2;     /* scale_log2 * WGMMA_CORRECTION */
    smla_partial_rows partials; /* unused with one split, unless items are cut */
    list_facts lists[2];
    uint64_t *arrivals; /* where items may be cut: a word per item (cut_work_items.cuh) */
    int32_t slot_heads; /* rows per slot of partial rows: the most heads that an item may have */
    int32_t max_pieces; /* pieces that the workspace has slots for */
    int16_t tile_heads; /* heads per tile of the kernel */
    int16_t cut_cost;   /* cost of one piece of a cut item, in segments */
    /* The first tokens, which are whole where others are split; 0: all tokens are alike. It is in a
     * line with what follows, which is read as early. */
    int32_t whole_tokens;
    list_params params;
    smla_divisor entry_tokens;   /* keys.entry_tokens, which kernels of ranges read */
    given_key_scales key_scales; /* read where has_key_unit */
    float softmax_scale;         /* read where logits have scales of their own */
    /* Of launches whose items are tiles (find_row_item): query tokens of a tile, heads of each, and
     * what divides by the latter (token_of_row). */
    uint8_t tile_tokens;
    uint8_t token_heads;
    uint16_t heads_inverse;
} attention_launch;

/* The number of slots, or, if a block table maps positions to slots, the number of positions. */
static uint32_t
index_limit_of(const smla_key_list *list)
{
    const int64_t limit = list->map.block_table == NULL
                              ? smla_kv_num_slots(&list->kv)
                              : list->map.num_blocks * list->kv.block_size;
    return limit < 0x80000000LL ? (uint32_t)limit : 0x80000000u;
}

static list_facts
list_facts_of(const smla_key_list *list)
{
    const smla_kv_view *const kv = &list->kv;
    list_facts facts = {};
    facts.block_size = smla_make_divisor(kv->block_size);
    facts.num_slots = smla_kv_num_slots(kv);
    facts.index_limit = index_limit_of(list);
    facts.scale_offset = (int16_t)kv->format->scale_offset;
    facts.rope_offset = (int16_t)kv->format->rope_offset;
    facts.is_fp8 = kv->format->nope_type == SMLA_NOPE_E4M3;
    facts.nope_type = (uint8_t)kv->format->nope_type;
    facts.scale_type = (uint8_t)kv->format->scale_type;
    facts.nope_chunks =
        (int8_t)((smla_has_rope_codes(kv->format) ? kv->format->head_dim : kv->format->nope_dim) /
                 8);
    for (int values = 8; values < kv->format->scale_tile; values *= 2) {
        facts.scale_shift++;
    }
    facts.is_aligned =
        smla_is_multiple(kv->base, kv->page_stride_bytes, 16) && kv->token_stride_bytes % 16 == 0;
    return facts;
}

/* Whether all cache rows of a call are aligned to 16 bytes. */
static inline bool
are_lists_aligned(const smla_attention_params *params)
{
    bool are_aligned = true;
    for (int i = 0; i < params->keys.num_lists; i++) {
        are_aligned = are_aligned && list_facts_of(&params->keys.lists[i]).is_aligned;
    }
    return are_aligned;
}

/* A work item, or a part of one (work_items.cuh). */
typedef struct work_item {
    int32_t token;
    int32_t split;        /* number of the split, or of the first segment if the item may be cut */
    int32_t num_segments; /* number of segments; a split counts as one, a whole token as all */
    int32_t first_head;
    int32_t num_heads; /* heads in the tile; the tile's other rows are zeros */
    int32_t first_row; /* number of the first partial row (kernels.h), or NOT_PARTIAL */
} work_item;

enum { NOT_PARTIAL = -1 }; /* the item has all keys of its token, and writes results */

/* In launches whose items are tiles, an item's `token` is the number of a group of query tokens of
 * one request, and its heads are rows: row i is head i % token_heads of the group's token
 * i / token_heads. TILED: the launch is one. Returns the first token of a group. */
template <bool TILED>
static __device__ __forceinline__ int32_t
first_token_of(const attention_launch &launch, int32_t token)
{
    return TILED ? token * launch.tile_tokens : token;
}

enum { HEADS_INVERSE_SHIFT = 12, MOST_TILE_ROWS = 64 };

/* What rows of a tile are multiplied with to divide them by a number of heads. It has
 * HEADS_INVERSE_SHIFT bits behind the point, enough for rows below MOST_TILE_ROWS and 32 heads. */
static inline uint16_t
find_heads_inverse(int64_t num_heads)
{
    return (uint16_t)((1 << HEADS_INVERSE_SHIFT) / num_heads + 1);
}

/* The number in its group of the token to which a row of a tile belongs. */
static __device__ __forceinline__ int32_t
token_of_row(const attention_launch &launch, int row)
{
    return (int32_t)((uint32_t)row * launch.heads_inverse >> HEADS_INVERSE_SHIFT);
}

/* The last token of a group, which sees as many keys as any. */
template <bool TILED>
static __device__ __forceinline__ int32_t
last_token_of(const attention_launch &launch, int32_t token)
{
    return TILED ? token * launch.tile_tokens + launch.tile_tokens - 1 : token;
}

/* The item with one row of a tile, as functions for items of one token see it: row `row` is head
 * first_head + row of the token, and partial row first_row + row. Partial rows lie by token, but
 * those of a cut item (cut_work_items.cuh) behind each other. */
template <bool TILED>
static __device__ __forceinline__ work_item
find_row_item(const attention_launch &launch, const work_item &item, int row)
{
    work_item of_row = item;
    if constexpr (TILED) {
        const int32_t heads = launch.token_heads;
        const int32_t before = token_of_row(launch, row);
        of_row.token = item.token * launch.tile_tokens + before;
        of_row.first_head = -before * heads;
        if (item.first_row != NOT_PARTIAL && launch.num_segments == 1) {
            of_row.first_row += before * (launch.params.results.num_splits - 1) * heads;
        }
    }
    return of_row;
}

/* Kernels that read scales of logits use this instead of scale_log2. The two are equal if the
 * scales are 1. Scores are divided by the unit of keys. */
static __device__ __forceinline__ float
find_scale_log2(const attention_launch &launch)
{
    const float scale =
        __fdiv_rn(launch.softmax_scale * smla_load_given_scale(launch.params.logits.q_scale),
                  smla_load_given_scale(launch.params.logits.divisor));
    return (float)((double)scale * (double)find_key_unit(launch) * 1.4426950408889634074);
}

/* What makes logits of scores, in the log2 domain. */
typedef struct logit_rule {
    float scale_log2;
    float cap_log2; /* 0: logits are not capped */
} logit_rule;

/* CODED: scales of logits may be on the device. RANGED: logits may be capped. */
template <bool CODED, bool RANGED>
static __device__ __forceinline__ logit_rule
find_logit_rule(const attention_launch &launch)
{
    return logit_rule{CODED ? find_scale_log2(launch) : launch.scale_log2,
                      RANGED ? launch.params.logits.softcap * 1.44269504f : 0.0f};
}

/* Where the quotient is small, tanh changes nothing. */
static __device__ __noinline__ float
cap_logit(float logit, float cap_log2)
{
    const float x = logit / cap_log2;
    return fabsf(x) < 0x1p-13f ? logit : cap_log2 * tanhf(x);
}

template <bool RANGED>
static __device__ __forceinline__ float
find_logit(float score, const logit_rule &rule)
{
    const float logit = score * rule.scale_log2;
    return RANGED && rule.cap_log2 != 0.0f ? cap_logit(logit, rule.cap_log2) : logit;
}

/* ---- Columns ------------------------------------------------------------------------------- */

/* The columns of an item in one list: chunks of CHUNK_COLUMNS, column_stride apart, from `begin` on
 * and up to `end`. Usually these are all columns in between. */
typedef struct column_range {
    int32_t begin;
    int32_t end;
} column_range;

/* The number of columns of a token's list that are in use, not clamped to K. */
static __device__ __forceinline__ int32_t
read_length(const smla_key_list &keys, int32_t token)
{
    return max(keys.end[token * keys.end_stride], 0) - (int32_t)keys.end_offset;
}

/* Whether the item's rows stay as they are: its token belongs to no request of a dense call. */
template <bool RANGED>
static __device__ __forceinline__ bool
is_left_alone(const attention_launch &launch, const work_item &item)
{
    return RANGED && smla_is_left_alone(&launch.params.keys, item.token);
}

/* The first column of a segment of an item of a dense call, where items may be cut. Segments have
 * equal numbers of the item's own columns, so that a wide table makes none of them larger. They
 * begin at multiples of CHUNK_COLUMNS behind the item's first group of NEIGHBOURS. */
static __device__ __forceinline__ uint32_t
find_segment(const column_range &columns, int32_t segment)
{
    const uint32_t first = (uint32_t)columns.begin & ~(uint32_t)(NEIGHBOURS - 1);
    const uint64_t before = (uint64_t)((uint32_t)columns.end - first) * (uint32_t)segment;
    constexpr uint64_t PER_CHUNK = NUM_SEGMENTS * CHUNK_COLUMNS;
    const uint32_t chunks = (uint32_t)((before + PER_CHUNK - 1) / PER_CHUNK);
    return min(first + chunks * CHUNK_COLUMNS, (uint32_t)columns.end);
}

/* The columns in an item's own segments, of all `columns` of a dense call's item. */
static __device__ __forceinline__ column_range
take_segments(const column_range &columns, const work_item &item)
{
    return column_range{(int32_t)max(find_segment(columns, item.split), (uint32_t)columns.begin),
                        (int32_t)find_segment(columns, item.split + item.num_segments)};
}

/* The columns in the segments of a tile that one of its tokens sees. */
static __device__ __forceinline__ column_range
take_tile_segments(const attention_launch &launch, const work_item &item)
{
    const smla_key_list &keys = launch.params.keys.lists[0];
    const int32_t group = item.token / launch.tile_tokens;
    const int32_t begin = keys.begin[first_token_of<true>(launch, group)];
    const int32_t end = min(keys.end[last_token_of<true>(launch, group)], (int32_t)keys.topk);
    if (begin >= end) {
        return column_range{0, 0};
    }
    const column_range taken = take_segments(column_range{begin, end}, item);
    const int32_t seen = min(taken.end, keys.end[item.token]);
    return taken.begin < seen ? column_range{taken.begin, seen} : column_range{0, 0};
}

/* The columns of an item of a dense call, where splits are cut from the request's own keys. TILED:
 * the item is one token of a tile. */
template <bool HAS_WHOLE, bool TILED>
static __device__ __forceinline__ column_range
find_dense_columns(const attention_launch &launch, const work_item &item)
{
    const smla_key_list &keys = launch.params.keys.lists[0];
    const bool may_be_cut = launch.num_segments > 1; /* then there is one split */
    if (TILED && may_be_cut) {
        return take_tile_segments(launch, item);
    }
    const list_params &params = launch.params;
    const int64_t columns =
        smla_table_split_columns(&params.keys, &params.visible, &params.results, item.token);
    const int64_t first = may_be_cut ? 0 : item.split * columns;
    const int64_t last = first + (HAS_WHOLE && !may_be_cut ? item.num_segments : 1) * columns;
    const int64_t begin = max(first, (int64_t)keys.begin[item.token]);
    const int64_t end = min(min(last, (int64_t)keys.end[item.token]), keys.topk);
    const column_range found =
        begin < end ? column_range{(int32_t)begin, (int32_t)end} : column_range{0, 0};
    return may_be_cut ? take_segments(found, item) : found;
}

/* RANGED: lists may have dense columns and a `begin`. HAS_WHOLE: as in make_pair_item. The sums are
 * below 2^32, because a launch has less than 2^31 columns (can_count_items). */
template <bool RANGED = false, bool HAS_WHOLE = true, bool TILED = false>
static __device__ __forceinline__ column_range
find_columns(const attention_launch &launch, const work_item &item, int list)
{
    const smla_key_list &keys = launch.params.keys.lists[list];
    if (RANGED && smla_is_table(&launch.params.keys)) {
        return find_dense_columns<HAS_WHOLE, TILED>(launch, item);
    }
    uint32_t length = (uint32_t)keys.topk;
    if (keys.end != NULL) {
        length = min(length, (uint32_t)max(read_length(keys, item.token), 0));
    }
    int32_t turn = item.split - (list == 0 ? 0 : launch.extra_turn);
    turn += turn < 0 ? launch.params.results.num_splits : 0;
    uint32_t begin = (uint32_t)turn * (uint32_t)launch.split_step[list];
    const uint32_t last =
        min(begin + item.num_segments * (uint32_t)launch.split_columns[list], length);
    if (RANGED && keys.begin != NULL) {
        begin = max(begin, (uint32_t)max(keys.begin[item.token * keys.begin_stride], 0));
    }
    return begin < last ? column_range{(int32_t)begin, (int32_t)last} : column_range{0, 0};
}

/* The index in a column of a list. A dense list has no indices in memory: column j has index j. */
template <bool RANGED>
static __device__ __forceinline__ int32_t
read_column(const smla_key_list &keys, int32_t token, int32_t column)
{
    if (RANGED && keys.indices == NULL) {
        return column;
    }
    return __ldg(keys.indices + token * keys.indices_stride_token + column);
}

/* ---- Slots and rows ------------------------------------------------------------------------ */

/* The slot of position `index` of a request, or -1 if there is none. The rules are those of
 * convert_req_index_to_global_index. */
static __device__ __forceinline__ int64_t
map_position(const smla_index_map &map, const smla_divisor &block_size, int64_t req, int32_t index)
{
    const int64_t block = smla_divide_uint32((uint32_t)index, block_size);
    if (req < 0 || req >= map.num_reqs || block >= map.num_blocks) {
        return -1;
    }
    const int64_t page =
        map.block_table[req * map.block_table_stride_req + block * map.block_table_stride_block];
    const int64_t slot = page * block_size.divisor + (index - block * block_size.divisor);
    return page < 0 || slot > INT32_MAX ? -1 : slot;
}

/* The slot of position `index` of the token's request. */
static __device__ __forceinline__ int64_t
map_index(const smla_index_map &map, const smla_divisor &block_size, int32_t token, int32_t index)
{
    return map_position(map, block_size, map.req_id_per_token[token], index);
}

/* map_index as a called function, which reads the kernel's arguments more slowly. */
static __device__ __noinline__ int64_t
map_index_apart(const smla_index_map &map, const smla_divisor &block_size, int32_t token,
                int32_t index)
{
    return map_index(map, block_size, token, index);
}

/* The slot that an index of a list names; negative if it names none. APART: the code for block
 * tables is a called function, because lists without a block table would jump over it, and what
 * lies behind a jump comes late from memory. */
template <bool APART = false>
static __device__ __forceinline__ int32_t
slot_of_index(const attention_launch &launch, int list, int32_t token, int32_t index)
{
    const smla_index_map &map = launch.params.keys.lists[list].map;
    const list_facts &facts = launch.lists[list];
    if (index < 0) {
        return -1;
    }
    const int64_t slot = map.block_table == NULL ? index
                         : APART ? map_index_apart(map, facts.block_size, token, index)
                                 : map_index(map, facts.block_size, token, index);
    return slot < facts.num_slots ? (int32_t)slot : -1;
}

/* The slot of a key of a dense call, negative if there is none. */
static __device__ __forceinline__ int32_t
slot_of_position(const attention_launch &launch, int32_t token, int32_t position)
{
    if (position < 0) {
        return -1;
    }
    const int64_t slot =
        map_index(launch.params.keys.lists[0].map, launch.entry_tokens, token, position);
    return slot < launch.lists[0].num_slots ? (int32_t)slot : -1;
}

/* The cache row of a slot and its scales; both are NULL for a negative slot. */
static __device__ __forceinline__ smla_kv_token
address_of_slot(const attention_launch &launch, int list, int32_t slot)
{
    const smla_divisor &block_size = launch.lists[list].block_size;
    if (slot < 0) {
        return smla_kv_token{NULL, NULL};
    }
    const int64_t page = smla_divide_uint32((uint32_t)slot, block_size);
    return smla_kv_token_at(&launch.params.keys.lists[list].kv, page,
                            slot - page * block_size.divisor);
}

static __device__ __forceinline__ const uint8_t *
row_of_slot(const attention_launch &launch, int list, int32_t slot)
{
    return address_of_slot(launch, list, slot).row;
}
