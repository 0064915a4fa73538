/* keys.h: where the keys of attention lie. A call has keys of one source:
 *   - lists    of slots in a cache, or of positions that a table turns into slots: a main list and
 *              an optional extra one
 *   - a table  of pages or slots, so that a query sees a range of its request's keys. It is a list
 *              without indices, whose column j is position j
 *   - ragged   keys and values of all requests, one behind the other
 *   - paged    keys and values in pages of a cache, which a table of pages or slots names
 * Compiles as C and as CUDA.
 */
#pragma once

#include "core/attention/queries.h"
#include "core/attention/visible.h"

typedef enum smla_key_source {
    SMLA_KEYS_LISTS = 0,
    SMLA_KEYS_TABLE = 1,
    SMLA_KEYS_RAGGED = 2,
    SMLA_KEYS_PAGED = 3,
} smla_key_source;

/* ---- Lists and tables ---------------------------------------------------------------------- */

/* With this map, attention itself turns positions inside a request into slots, by the rules of
 * convert_req_index_to_global_index. This saves a call of that operator and the memory of its
 * output. R and W are as in smla_convert_params. */
typedef struct smla_index_map {
    const int32_t *block_table; /* [R, W]; NULL: indices are slots already */
    int64_t block_table_stride_req;
    int64_t block_table_stride_block;
    int64_t num_reqs;                /* R */
    int64_t num_blocks;              /* W */
    const int32_t *req_id_per_token; /* [T], contiguous */
} smla_index_map;

/* A list of keys. The keys of token t are in columns begin[t] to end[t] - 1 of its row of
 * `indices`. A negative index is no key. */
typedef struct smla_key_list {
    smla_kv_view kv;
    const int32_t *indices; /* [T, K]; NULL: column j has index j */
    int64_t indices_stride_token;
    int64_t topk;       /* K */
    const int32_t *end; /* topk_length: [T], clamped to 0...K; NULL: K */
    int64_t end_stride;
    smla_index_map map;   /* turns positions into slots; the page size is kv.block_size */
    const int32_t *begin; /* [T], clamped to 0...K; NULL: 0 */
    int64_t begin_stride;
    /* Columns of the main list, if end[t] counts them too (sparse_mla_dsv4); 0 in a main list. They
     * are subtracted before end[t] is clamped. */
    int64_t end_offset;
} smla_key_list;

/* Of a table, begin, end and the map's request ids are written by the call itself
 * (smla_key_ranges_params). A token with a negative request id belongs to no request, and its rows
 * of the results stay as they are. Splits are cut from the request's own length. */
typedef struct smla_key_lists {
    smla_key_list lists[2]; /* main, extra; a table is a main list */
    /* Tokens per entry of the table: of a page, or 1 in a slot table. 0: these are lists */
    int32_t entry_tokens;
    int32_t num_lists; /* 1 or 2 */
} smla_key_lists;

/* Whether a list needs a kernel that serves dense columns and `begin`. */
static inline bool
smla_has_ranges(const smla_key_list *list)
{
    return list->indices == NULL || list->begin != NULL;
}

SMLA_HOST_DEVICE static inline bool
smla_is_table(const smla_key_lists *keys)
{
    return keys->entry_tokens != 0;
}

/* Whether the call leaves the token's rows of the results as they are. */
SMLA_HOST_DEVICE static inline bool
smla_is_left_alone(const smla_key_lists *keys, int64_t token)
{
    return smla_is_table(keys) && keys->lists[0].map.req_id_per_token[token] < 0;
}

/* Whatever lists have for each token: indices, limits, request ids. */
static inline void
smla_skip_key_rows(smla_key_lists *keys, int64_t count)
{
    for (int i = 0; i < keys->num_lists; i++) {
        smla_key_list *const list = &keys->lists[i];
        list->indices += list->indices == NULL ? 0 : count * list->indices_stride_token;
        list->begin += list->begin == NULL ? 0 : count * list->begin_stride;
        list->end += list->end == NULL ? 0 : count * list->end_stride;
        list->map.req_id_per_token += list->map.req_id_per_token == NULL ? 0 : count;
    }
}

/* Whether the unit of keys (smla_choose_key_unit) may be another number than 1. */
static inline bool
smla_has_key_unit(const smla_key_lists *keys)
{
    bool has_unit = false;
    for (int i = 0; i < keys->num_lists; i++) {
        has_unit |= keys->lists[i].kv.format->scale_type == SMLA_SCALE_CACHE;
    }
    return has_unit;
}

/* ---- Keys and values of KV heads: ragged or paged ------------------------------------------ */

/* The arrays of keys and values. Keys have two parts, as queries have. */
enum { SMLA_VALUES = 2, SMLA_KV_ARRAYS = 3 };

/* Keys have parts of the same dims as queries. Where only one of the two is a pair, the other is
 * cut into two views at the same dim. */
typedef struct smla_kv_heads {
    int64_t num_keys;     /* ragged: Tk; paged: slots */
    int64_t num_kv_heads; /* Hk; query head h reads KV head h / (H / Hk) */
    smla_head_rows rows[SMLA_KV_ARRAYS];
    smla_float_type type;  /* bf16, fp16 or e4m3 */
    int16_t value_dim;     /* Dv */
    bool has_value_part;   /* part 0 of a key is its value, with the value's scale */
    const int32_t *starts; /* ragged: cu_seqlens_k [R + 1] */
    int64_t starts_stride;
} smla_kv_heads;

/* The pages in which keys and values lie. An entry of the table that names no page hides its keys.
 */
typedef struct smla_kv_pages {
    smla_page_table table; /* pages or slots; its block_size is the positions per entry */
    int64_t num_pages;     /* P */
    int64_t strides_page[SMLA_KV_ARRAYS]; /* elements */
    const int32_t *leftpad;               /* [R]: positions in front of key 0; NULL: none */
    int64_t leftpad_stride;
    int32_t page_size;
} smla_kv_pages;

/* The query tokens and keys of one request: numbers in the arrays of all requests. Key j of a paged
 * request is at its position first_key + j. */
typedef struct smla_kv_request {
    int64_t first_query;
    int64_t num_queries;
    int64_t first_key;
    int64_t num_keys;
} smla_kv_request;

/* Ragged keys have no pages. Numbers on a device are unchecked, so they are clamped. */
SMLA_HOST_DEVICE static inline smla_kv_request
smla_find_kv_request(const smla_requests *reqs, const smla_kv_heads *kv, const smla_kv_pages *pages,
                     int64_t req)
{
    const int64_t query = smla_query_start(reqs, req);
    const int64_t past_query = smla_query_start(reqs, req + 1);
    const int64_t num_queries = past_query < query ? 0 : past_query - query;
    if (pages == NULL) {
        const int32_t *const starts = kv->starts + req * kv->starts_stride;
        const int64_t key = smla_clamp_int64(starts[0], 0, kv->num_keys);
        const int64_t past_key = smla_clamp_int64(starts[kv->starts_stride], key, kv->num_keys);
        return (smla_kv_request){query, num_queries, key, past_key - key};
    }
    const int64_t length = smla_seq_len(reqs, req);
    const int64_t pad = pages->leftpad == NULL ? 0 : pages->leftpad[req * pages->leftpad_stride];
    const int64_t first_key = smla_clamp_int64(pad, 0, length);
    return (smla_kv_request){query, num_queries, first_key, length - first_key};
}

/* The keys that query `query` of a request sees, as numbers in the request. */
SMLA_HOST_DEVICE static inline smla_key_range
smla_find_kv_range(const smla_range_rule *rule, const smla_kv_request *req, int64_t query)
{
    return smla_find_key_range(rule, req->num_keys - req->num_queries + query, req->num_keys);
}
