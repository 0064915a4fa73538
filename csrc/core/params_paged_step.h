/* params_paged_step.h: the params of what fills the arrays of a paged step, and the rules that say
 * what is written, which the CPU and CUDA share. sparse_mla/paged_step.h has the words.
 */
#pragma once

#include "core/params.h"

/* A vector of int64 or int32. */
typedef struct smla_int_vector {
    const void *data;
    int64_t stride;
    bool is_int64;
} smla_int_vector;

/* Where keys of one query per row go: the rows of a tree. The steps of a draft share the slots. */
typedef struct smla_paged_tree_rows {
    int32_t *seqlens; /* [num_steps, rows], NULL: there are no rows */
    int32_t *starts;  /* [num_steps, rows + 1], running sums */
    int32_t *slots;   /* [B * rows_per_req, slots_stride] */
    int64_t seqlens_stride_step;
    int64_t starts_stride_step;
    int64_t slots_stride;
} smla_paged_tree_rows;

/* What both backends read of a batch, and where they write. An optional array is NULL. */
typedef struct smla_paged_step_params {
    smla_call call;
    int64_t num_reqs;
    int64_t num_real_reqs; /* the others are padding, whatever their lengths */
    const int32_t *seq_lens;
    int64_t seq_lens_stride;
    smla_int_vector pool;        /* rows of req_to_token */
    const int32_t *req_to_token; /* [num_pool_rows, pool_width] */
    int64_t pool_stride;
    int64_t num_pool_rows;
    int64_t pool_width;
    const int32_t *mapping; /* optional: slots of the window pool */
    int64_t mapping_stride;
    int64_t num_mapped;
    const int32_t *extend_lens; /* optional */
    int64_t extend_lens_stride;
    const int32_t *encoder_lens; /* optional */
    int64_t encoder_lens_stride;
    const uint8_t *mask; /* optional: a tree's rows of seq_len + rows_per_req entries, request by
                          * request; without it, a row's slots are those of cache_loc */
    int64_t mask_stride;
    int64_t mask_entries;
    smla_int_vector cache_loc; /* optional */
    int64_t num_cache_loc;
    int64_t loc_per_req; /* entries of cache_loc per request; 0: not known, or there are more */

    /* The mode. */
    int64_t page_size;
    int64_t max_context_len;
    int64_t max_tokens;      /* query tokens together, where each request has its own number */
    int64_t query_len;       /* per request; 0: extend_lens, or all tokens without them, */
    int64_t most_query_len;  /* cut to so many */
    bool reads_tokens_alone; /* entries of cache_loc behind the last query token are not read */
    int64_t added;           /* tokens of this step, which seq_lens leaves out */
    int64_t num_steps;       /* each one adds a token, and with a tree a slot per row */
    int64_t rows_per_req;    /* rows of a tree; 0: there is none */
    int64_t tree_slots;      /* slots of a row in step 0, where there is no mask */
    int64_t row_loc;         /* entries of cache_loc per row */
    int64_t left;            /* keys of the prefix in the rows of `swa`, less 1 */
    int64_t chunk;           /* positions of a virtual request at most */
    int64_t table_columns;   /* pages that the caller sees, of a request, */
    int64_t encoder_columns; /* and those in encoder_table, which are all written; 0: each request
                              * has as many as its encoder's tokens fill */

    /* Results. */
    int32_t *cache_seqlens; /* [num_steps, B] */
    int64_t seqlens_stride_step;
    int32_t *cu_seqlens_k; /* [num_steps, B + 1] */
    int64_t starts_stride_step;
    int32_t *cu_seqlens_q;   /* [B + 1] */
    int32_t *page_table;     /* [B, table_stride], like the next one and encoder_table */
    int32_t *swa_page_table; /* NULL without a mapping */
    int64_t table_stride;
    int32_t *swa_cache_loc; /* [num_cache_loc]; NULL without a mapping or cache_loc */
    int32_t *leftpad;       /* [B]; NULL without an encoder and a shared prefix */
    int32_t *encoder_seqlens;
    int32_t *encoder_starts; /* [B + 1] */
    int32_t *encoder_table;
    smla_paged_tree_rows expand;
    smla_paged_tree_rows swa;
    int32_t *token_ids;     /* [num_tokens + 1]: 0, 1, 2, ..., where rows of one query start */
    int64_t num_tokens;     /* query tokens, or at most so many */
    int64_t num_local;      /* virtual requests that there is room for; 0: none are made */
    int32_t *local_starts;  /* [num_local + 1], the same in all steps */
    int32_t *local_seqlens; /* [num_steps, num_local] */
    int32_t *local_table;   /* [num_steps, num_local, chunk / page_size] */
    int64_t prefix_len;     /* tokens that the requests share; 0: none */
    int32_t *prefix;        /* numbers of the prefix as one request */
    int32_t *rest_seqlens;  /* [B]: keys behind the whole pages of the prefix; NULL without one */
} smla_paged_step_params;

/* Where the arrays of a shared prefix begin in `prefix`. Those who cannot begin inside a page take
 * its whole pages. */
enum {
    SMLA_PREFIX_SEQLEN,
    SMLA_PREFIX_PAGES_SEQLEN,
    SMLA_PREFIX_KEY_STARTS,
    SMLA_PREFIX_STARTS = SMLA_PREFIX_KEY_STARTS + 2,
    SMLA_PREFIX_SIZE = SMLA_PREFIX_STARTS + 2,
};

/* A request. Padding has no tokens, and nothing else of it is read. */
typedef struct smla_paged_request {
    int64_t pool_row;
    int64_t seq_len; /* 0: padding */
    int64_t encoder_len;
    int64_t query_len;
    int64_t mask_row; /* entries in a row of the mask, which padding has too */
} smla_paged_request;

SMLA_HOST_DEVICE static inline int64_t
smla_int_at(const smla_int_vector *vector, int64_t i)
{
    return vector->is_int64 ? ((const int64_t *)vector->data)[i * vector->stride]
                            : ((const int32_t *)vector->data)[i * vector->stride];
}

SMLA_HOST_DEVICE static inline int64_t
smla_least_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Quotient and remainder of lengths, which fit 32 bits. A GPU has no instruction for 64. */
SMLA_HOST_DEVICE static inline int64_t
smla_divide_len(int64_t len, int64_t by)
{
    return (uint32_t)len / (uint32_t)by;
}

SMLA_HOST_DEVICE static inline int64_t
smla_len_rest(int64_t len, int64_t by)
{
    return (uint32_t)len % (uint32_t)by;
}

/* Reads a request. Lengths beyond the config and the width of req_to_token are cut. */
SMLA_HOST_DEVICE static inline smla_paged_request
smla_read_paged_request(const smla_paged_step_params *p, int64_t req)
{
    smla_paged_request r = {-1, 0, 0, p->query_len, 0};
    const int64_t given = req < p->num_real_reqs ? p->seq_lens[req * p->seq_lens_stride] : 0;
    r.mask_row = (given > 0 ? given : 0) + p->rows_per_req;
    r.pool_row = given > 0 ? smla_int_at(&p->pool, req) : -1;
    if (r.pool_row < 0 || r.pool_row >= p->num_pool_rows) {
        return r;
    }
    const int64_t most = smla_least_of(p->max_context_len, p->pool_width);
    if (p->encoder_lens != NULL) {
        const int64_t len = p->encoder_lens[req * p->encoder_lens_stride];
        r.encoder_len = len < 0 ? 0 : smla_least_of(len, most);
    }
    r.seq_len = smla_least_of(given, most - r.encoder_len);
    if (p->query_len == 0) {
        const int64_t len =
            p->extend_lens == NULL ? r.seq_len : p->extend_lens[req * p->extend_lens_stride];
        r.query_len = len < 0 ? 0 : smla_least_of(smla_least_of(len, r.seq_len), p->most_query_len);
    }
    return r;
}

/* Positions in front of the first key in its page: where an encoder's tokens end. */
SMLA_HOST_DEVICE static inline int64_t
smla_paged_leftpad(const smla_paged_step_params *p, const smla_paged_request *r)
{
    return r->encoder_len == 0 ? 0 : smla_len_rest(r->encoder_len, p->page_size);
}

/* cache_seqlens of a request in a step. */
SMLA_HOST_DEVICE static inline int64_t
smla_paged_cache_len(const smla_paged_step_params *p, const smla_paged_request *r, int64_t step)
{
    const int64_t more = p->rows_per_req > 0 ? 0 : p->added + step;
    return r->seq_len == 0 ? 0
                           : smla_least_of(r->seq_len + more, p->pool_width - r->encoder_len) +
                                 smla_paged_leftpad(p, r);
}

/* Tokens in the whole pages of a shared prefix. */
SMLA_HOST_DEVICE static inline int64_t
smla_paged_whole_prefix(const smla_paged_step_params *p)
{
    return p->prefix_len - smla_len_rest(p->prefix_len, p->page_size);
}

/* Keys of the prefix in a tree's row of `swa`. */
SMLA_HOST_DEVICE static inline int64_t
smla_paged_window_len(const smla_paged_step_params *p, const smla_paged_request *r)
{
    return smla_least_of(r->seq_len, p->left + 1);
}

/* The page before which a request's text begins: the encoder's tokens fill so many. */
SMLA_HOST_DEVICE static inline int64_t
smla_paged_first_page(const smla_paged_step_params *p, const smla_paged_request *r)
{
    return r->encoder_len == 0 ? 0 : smla_divide_len(r->encoder_len, p->page_size);
}

/* Pages that a step's keys are in. */
SMLA_HOST_DEVICE static inline int64_t
smla_paged_num_pages(const smla_paged_step_params *p, int64_t keys)
{
    return smla_divide_len(keys + p->page_size - 1, p->page_size);
}

/* Columns of a request in encoder_table. */
SMLA_HOST_DEVICE static inline int64_t
smla_paged_encoder_columns(const smla_paged_step_params *p, const smla_paged_request *r)
{
    const int64_t columns =
        p->encoder_columns > 0 ? p->encoder_columns : smla_paged_num_pages(p, r->encoder_len);
    return smla_least_of(columns, smla_paged_num_pages(p, p->pool_width));
}

/* Whether entry i of cache_loc belongs to padding, so that it must not be read. */
SMLA_HOST_DEVICE static inline bool
smla_is_padding_loc(const smla_paged_step_params *p, int64_t i, int64_t num_queries)
{
    if (p->reads_tokens_alone) {
        return i >= num_queries;
    }
    return p->loc_per_req > 0 &&
           smla_read_paged_request(p, smla_divide_len(i, p->loc_per_req)).seq_len == 0;
}

/* ---- Virtual requests ---------------------------------------------------------------------- */

/* A virtual request: queries, the position of its first key, and its keys. */
typedef struct smla_paged_virtual {
    int64_t query_len;
    int64_t start;
    int64_t seq_len;
} smla_paged_virtual;

/* How many virtual requests a request of so many keys has. One with more queries is padding. */
SMLA_HOST_DEVICE static inline int64_t
smla_count_virtual(const smla_paged_step_params *p, int64_t query_len, int64_t keys)
{
    return query_len == 0     ? 0
           : keys < query_len ? 1
                              : smla_divide_len(keys - 1, p->chunk) -
                                    smla_divide_len(keys - query_len, p->chunk) + 1;
}

SMLA_HOST_DEVICE static inline smla_paged_virtual
smla_virtual_at(const smla_paged_step_params *p, int64_t query_len, int64_t keys, int64_t i)
{
    if (keys < query_len) {
        smla_paged_virtual none = {query_len, 0, 0};
        return none;
    }
    const int64_t first = keys - query_len;
    const int64_t start = (smla_divide_len(first, p->chunk) + i) * p->chunk;
    const int64_t end = smla_least_of(start + p->chunk, keys);
    smla_paged_virtual made = {end - (first > start ? first : start), start, end - start};
    return made;
}
