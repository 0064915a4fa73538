/* params_attention.h: attention is queries x keys x what a query sees x logits -> results. Every
 * attention has these params, and those over a cache have a plan. Compiles as C and as CUDA.
 */
#pragma once

#include "core/attention/keys.h"
#include "core/attention/logits.h"
#include "core/attention/queries.h"
#include "core/attention/results.h"
#include "core/attention/visible.h"

/* The shape of attention: all that the workspace size and the number of splits depend on. */
typedef struct smla_attention_shape {
    int64_t num_tokens;
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk;
    int num_splits; /* 0 = the plan chooses */
    int32_t device_id;
    int64_t num_keys;  /* rows of the caches, which a prefill may widen; 0: it widens none */
    int64_t room;      /* in a plan: bytes of the call's workspace */
    int32_t value_dim; /* values of a partial row, for the workspace size; 0: those of latents */
    /* The formats of the main and the extra list. The main format is NULL while it is not known:
     * the choice of a split count does not need it, and the workspace size covers all formats. */
    const smla_kv_format_info *formats[2];
    smla_key_source source; /* a table has lengths on the device: no plan depends on topk */
    unsigned needs;         /* SMLA_NEEDS_ bits, of the kernel */
    int64_t table_reqs; /* requests of a table without a mask but causal order and a window; or 0 */
    bool has_starts;    /* they may differ in their numbers of query tokens */
    /* Query tokens of each request of a table, where tokens of a request may share a tile: equally
     * many tokens, rows that are equally far apart, and keys from the first one on; else 0. */
    int64_t tile_queries;
    bool explains;      /* the plan says what it lacks, which a log asks for */
    bool covers_tables; /* the workspace size is enough for tables of this shape, too */
} smla_attention_shape;

/* How attention runs for all tokens of a call, or for some of them. */
typedef struct smla_attention_run {
    const struct smla_attention_kernel *kernel; /* NULL on the CPU, and if no kernel fits */
    int64_t num_tokens;
    int num_splits;
    /* Bytes of workspace for the partial rows of a launch that cuts long items by itself. Every
     * caller that asked for the workspace size has them. 0: it cuts none. */
    int64_t cut_bytes;
    /* Splits take chunks of columns in turn, so a short list gives all of them as much. Where the
     * caller says how many splits there are, each has a range of columns. */
    bool interleaves;
    /* The workspace has room from this byte on for rows that the launch widens first; 0: it widens
     * none. */
    int64_t wide_offset;
    /* Query tokens of a request that an item has, all heads of each, where items are tiles of rows;
     * they divide num_tokens. 0: an item has one token. */
    int64_t tile_tokens;
} smla_attention_run;

/* How a backend runs attention of a shape. The check asks the backend for the plan once per call,
 * and it goes with the params. */
typedef struct smla_attention_plan {
    int64_t workspace_bytes; /* what attention_workspace_size returns */
    int num_runs;            /* 1, or 2: the first tokens, which are not split, and the rest */
    bool reads_lengths;      /* a dense call needs no ranges per token (smla_key_ranges_params) */
    const char *lack;        /* what the device's best kernel lacks; NULL: nothing */
    smla_attention_run runs[2];
} smla_attention_plan;

/* The first and the last key that each token sees in a table, and its request. */
typedef struct smla_token_ranges {
    int32_t *req_ids; /* [T], like the next two; NULL: nothing writes them in this call */
    int32_t *begin;
    int32_t *end;
} smla_token_ranges;

/* Lets a table's list read them. */
static inline void
smla_take_ranges(const smla_token_ranges *ranges, smla_key_list *list)
{
    list->map.req_id_per_token = ranges->req_ids;
    list->begin = ranges->begin;
    list->end = ranges->end;
}

/* A launch copies of it what its kernel reads. */
typedef struct smla_attention_params {
    smla_call call;
    smla_queries queries;
    smla_key_source source;
    union {
        smla_key_lists keys; /* SMLA_KEYS_LISTS, SMLA_KEYS_TABLE */
        smla_kv_heads kv;    /* SMLA_KEYS_RAGGED, SMLA_KEYS_PAGED */
    };
    smla_results results;
    smla_logits logits;
    smla_visible visible; /* unused with lists */
    smla_workspace workspace;
    smla_padding_rows padding; /* what is filled of `out` and `lse` */
    smla_kv_pages pages;       /* SMLA_KEYS_PAGED */
    smla_token_ranges ranges;  /* written in front of attention, for a table */
    smla_attention_plan plan;  /* ragged and paged keys have none */
} smla_attention_params;

/* Whether the keys are lists, as a table is. */
static inline bool
smla_has_lists(const smla_attention_params *params)
{
    return params->source == SMLA_KEYS_LISTS || params->source == SMLA_KEYS_TABLE;
}

/* The part of a call over lists for `count` tokens from token `start` on. */
static inline smla_attention_params
smla_params_of_tokens(const smla_attention_params *params, int64_t start, int64_t count)
{
    smla_attention_params part = *params;
    part.queries.num_tokens = count;
    smla_skip_queries(&part.queries, start);
    smla_skip_key_rows(&part.keys, start);
    smla_skip_results(&part.results, start);
    return part;
}

/* The part that one of the plan's runs computes. */
static inline smla_attention_params
smla_params_of_run(const smla_attention_params *params, const smla_attention_run *run,
                   int64_t start)
{
    smla_attention_params part = smla_params_of_tokens(params, start, run->num_tokens);
    part.results.num_splits = run->num_splits;
    return part;
}

/* The pages of the keys, which ragged keys do not have. */
static inline const smla_kv_pages *
smla_pages_of(const smla_attention_params *params)
{
    return params->source == SMLA_KEYS_PAGED ? &params->pages : NULL;
}

/* A request, if keys are ragged or paged. */
static inline smla_kv_request
smla_find_request(const smla_attention_params *params, int64_t req)
{
    return smla_find_kv_request(&params->visible.reqs, &params->kv, smla_pages_of(params), req);
}

/* Columns of a split of a token's keys in a table: smla_split_columns of its request's keys. */
SMLA_HOST_DEVICE static inline int64_t
smla_table_split_columns(const smla_key_lists *keys, const smla_visible *visible,
                         const smla_results *results, int64_t token)
{
    const smla_index_map *const map = &keys->lists[0].map;
    const int64_t req = map->req_id_per_token[token];
    const bool is_known = req >= 0 && req < map->num_reqs;
    const int64_t length = is_known ? smla_seq_len(&visible->reqs, req) : 0;
    const int64_t own = smla_count_own(&visible->rule.share, length);
    const int64_t columns = smla_split_columns(own, results->num_splits);
    return columns > visible->least_split_columns ? columns : visible->least_split_columns;
}

/* Fills the rows behind the last request. `threads` of `teams` teams share the work, and this is
 * thread `thread` of team `team`. */
SMLA_HOST_DEVICE static inline void
smla_fill_rows_of_none(const smla_padding_rows *padding, const smla_requests *reqs, int64_t team,
                       int64_t teams, int thread, int threads)
{
    if (smla_has_padding(padding)) {
        const int64_t first = smla_query_start(reqs, reqs->num_reqs);
        smla_fill_padding(padding, first + team, teams, reqs->num_tokens, thread, threads);
    }
}

/* What writes the ranges of a dense call: for each token its request, and the keys that it sees. */
typedef struct smla_key_ranges_params {
    smla_call call;
    smla_requests reqs;
    smla_range_rule rule;
    int32_t absent_req; /* what req_ids has for tokens of no request, which see no key */
    smla_token_ranges to;
    int64_t *positions; /* [T]: where each token is in its request, else 0; NULL: not wanted */
    smla_padding_rows padding; /* results of attention that are filled meanwhile */
} smla_key_ranges_params;

enum { SMLA_RANGES_ALIGN = 64 };

/* Bytes of workspace for the ranges of so many tokens, wherever the workspace begins. */
static inline int64_t
smla_key_ranges_bytes(int64_t num_tokens)
{
    const int64_t bytes = num_tokens * 3 * (int64_t)sizeof(int32_t);
    return num_tokens == 0
               ? 0
               : (bytes + 2 * SMLA_RANGES_ALIGN - 1) / SMLA_RANGES_ALIGN * SMLA_RANGES_ALIGN;
}

/* Writes what belongs to one token. */
SMLA_HOST_DEVICE static inline void
smla_write_key_range(const smla_key_ranges_params *params, int64_t token)
{
    const smla_requests *const reqs = &params->reqs;
    int64_t req = 0; /* the first request that ends behind the token */
    for (int64_t past = reqs->num_reqs; req < past;) {
        const int64_t middle = (req + past) / 2;
        if (smla_query_start(reqs, middle + 1) > token) {
            past = middle;
        } else {
            req = middle + 1;
        }
    }
    smla_key_range range = {0, 0};
    int64_t position = 0;
    const bool is_query = req < reqs->num_reqs;
    if (is_query) {
        const int64_t start = smla_query_start(reqs, req);
        const int64_t num_queries = smla_query_start(reqs, req + 1) - start;
        const int64_t num_keys = smla_seq_len(reqs, req);
        position = num_keys - num_queries + (token - start);
        range = smla_find_key_range(&params->rule, position, num_keys);
    }
    if (params->positions != NULL) {
        params->positions[token] = position < 0 ? 0 : position;
    }
    params->to.req_ids[token] = is_query ? (int32_t)req : params->absent_req;
    params->to.begin[token] = (int32_t)range.begin;
    params->to.end[token] = (int32_t)range.end;
}
