/* mha.h: what the files of multi-head attention share. One file cuts calls (mha.c); one kernel
 * (mha_kernel.c) is compiled once per instruction set into a smla_mha_isa.
 *
 * The *rows* of a request and a KV head are its query tokens times the heads that read the KV head,
 * token by token. A *tile* is up to SMLA_MHA_ROWS of them, which read the keys together. Small
 * requests that follow each other share a tile, because a tile of one row would take as long as one
 * of a whole vector of rows. Their keys lie one after another in a block, and rows see their own.
 */
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/index/slot.h"
#include "cpu/machine/thread_scratch.h"

enum {
    SMLA_MHA_ROWS = 512,
    SMLA_MHA_PAD = 32,         /* D and Dv are padded to a multiple: whole steps of every unit */
    SMLA_MHA_SHARED_KEYS = 64, /* keys of the requests that share a tile: within one block */
    SMLA_MHA_STEP_KEYS = 32,   /* keys whose products a unit may add before all others */
};

static inline int
smla_pad_mha_dims(int64_t dims)
{
    return (int)((dims + SMLA_MHA_PAD - 1) / SMLA_MHA_PAD * SMLA_MHA_PAD);
}

typedef struct smla_mha_tile {
    int64_t req;      /* the first request */
    int64_t num_reqs; /* if several have rows, then the tile has all of them */
    int64_t kv_head;
    int64_t row; /* the first one, counted in the request */
    int num_rows;
    smla_key_range keys; /* no row sees others, counted in the request */
    int64_t first_token; /* the token and the head whose results come first */
    int64_t first_head;
} smla_mha_tile;

/* A row of queries, and the keys that it sees. */
typedef struct smla_mha_row {
    int64_t token; /* in all arrays but the results */
    int64_t head;
    int64_t out_at; /* element of `out`, and of `lse` */
    int64_t lse_at;
    int64_t req;
    int64_t first_key;   /* where key 0 of the tile would lie, counted as the request's keys do */
    smla_key_range keys; /* numbers in the tile */
} smla_mha_row;

/* The query heads that read a KV head. */
static inline int64_t
smla_mha_group(const smla_attention_params *params)
{
    return params->queries.num_heads / params->kv.num_kv_heads;
}

/* ---- Where rows lie ------------------------------------------------------------------------ */

/* A key's place in its arrays. Ragged keys are in page 0. */
typedef struct smla_kv_place {
    int64_t page; /* -1: the key is hidden */
    int64_t token;
} smla_kv_place;

/* Finds the key at a position of a request (smla_kv_request). */
static inline smla_kv_place
smla_find_kv_place(const smla_attention_params *params, int64_t req, int64_t position)
{
    const smla_kv_pages *const pages = &params->pages;
    const smla_kv_place hidden = {-1, 0};
    if (params->source != SMLA_KEYS_PAGED) {
        return (smla_kv_place){0, position};
    }
    const smla_page_row row = smla_page_row_of(&pages->table, req);
    const int64_t entry = smla_find_page(&row, position);
    const int64_t slot = entry * row.block_size + position % row.block_size;
    const smla_kv_place place = {slot / pages->page_size, slot % pages->page_size};
    return entry < 0 || place.page >= pages->num_pages ? hidden : place;
}

/* The keys that a query of a request sees, but for those behind the last entry of its table, which
 * are hidden: however many keys a length counts, they cost no time. */
static inline smla_key_range
smla_find_mha_range(const smla_attention_params *params, const smla_kv_request *of, int64_t query)
{
    const smla_key_range range = smla_find_kv_range(&params->visible.rule, of, query);
    if (params->source != SMLA_KEYS_PAGED) {
        return range;
    }
    const smla_page_table *const table = &params->pages.table;
    const int64_t positions = table->num_blocks * table->block_size;
    const int64_t past = positions > of->first_key ? positions - of->first_key : 0;
    return (smla_key_range){smla_clamp_int64(range.begin, 0, past),
                            smla_clamp_int64(range.end, 0, past)};
}

/* Values of a row: `dim` of them, from element `at` of an array on. */
typedef struct smla_row_part {
    const void *data;
    int64_t at;
    int64_t dim;
} smla_row_part;

static inline void
smla_find_query(const smla_attention_params *params, int64_t token, int64_t head,
                smla_row_part parts[2])
{
    for (int i = 0; i < 2; i++) {
        const smla_head_rows *const rows = &params->queries.parts[i];
        parts[i] =
            (smla_row_part){rows->data, token * rows->stride_token + head * rows->stride_head,
                            params->queries.dims[i]};
    }
}

/* Finds the two parts of a key, and its value. */
static inline void
smla_find_key(const smla_attention_params *params, smla_kv_place place, int64_t kv_head,
              smla_row_part parts[SMLA_KV_ARRAYS])
{
    for (int i = 0; i < SMLA_KV_ARRAYS; i++) {
        const smla_head_rows *const rows = &params->kv.rows[i];
        parts[i] = (smla_row_part){
            rows->data,
            place.page * params->pages.strides_page[i] + place.token * rows->stride_token +
                kv_head * rows->stride_head,
            i == SMLA_VALUES ? params->kv.value_dim : params->queries.dims[i],
        };
    }
}

/* ---- Tiles --------------------------------------------------------------------------------- */

static inline bool
smla_is_one_key(smla_key_range keys)
{
    return keys.end - keys.begin == 1;
}

/* The number in the tile of a request's first key, if those before it end at `end`. A row's bits
 * must not depend on its neighbours. So a request's keys are paired as if they were alone, and are
 * in one step if they fit. */
static inline int64_t
smla_place_mha_keys(int64_t end, int64_t num_keys)
{
    const int64_t at = (end + 1) / 2 * 2;
    const int64_t step = SMLA_MHA_STEP_KEYS;
    return at % step + num_keys > step ? (at + step - 1) / step * step : at;
}

static inline float
smla_read_mha_scale(const smla_descale *scale, int64_t req, int64_t kv_head)
{
    return scale->pointer == NULL ? scale->value
                                  : scale->pointer[smla_descale_at(scale, req, kv_head)];
}

/* What the values of a part of a tile's keys are multiplied with. */
static inline float
smla_mha_key_scale(const smla_attention_params *params, const smla_mha_tile *tile, int part)
{
    const bool is_value = part == 0 && params->kv.has_value_part;
    return smla_read_mha_scale(is_value ? &params->logits.v_descale : &params->logits.k_descale,
                               tile->req, tile->kv_head);
}

/* The larger one. */
static inline float
smla_mha_keys_scale(const smla_attention_params *params, const smla_mha_tile *tile)
{
    const float first = smla_mha_key_scale(params, tile, 0);
    const float second = smla_mha_key_scale(params, tile, 1);
    return first > second ? first : second;
}

/* The factor of a part of q . k: 1, but where the two scales differ. */
static inline float
smla_mha_part_factor(const smla_attention_params *params, const smla_mha_tile *tile, int part)
{
    return smla_mha_key_scale(params, tile, part) / smla_mha_keys_scale(params, tile);
}

static inline bool
smla_has_part_factors(const smla_attention_params *params, const smla_mha_tile *tile)
{
    return params->kv.has_value_part &&
           smla_mha_key_scale(params, tile, 0) != smla_mha_key_scale(params, tile, 1);
}

/* What q . k is multiplied with. */
static inline double
smla_mha_logit_scale(const smla_attention_params *params, const smla_mha_tile *tile)
{
    return params->logits.softmax_scale *
           (double)smla_read_mha_scale(&params->logits.q_descale, tile->req, tile->kv_head) *
           (double)smla_mha_keys_scale(params, tile);
}

/* Multiplies the parts of a query with their factors. */
static inline void
smla_apply_part_factors(const smla_attention_params *params, const smla_mha_tile *tile, float *row)
{
    if (!smla_has_part_factors(params, tile)) {
        return;
    }
    for (int i = 0; i < 2; i++) {
        const float factor = smla_mha_part_factor(params, tile, i);
        for (int d = 0; d < params->queries.dims[i]; d++) {
            *row++ *= factor;
        }
    }
}

/* The kernel of one instruction set. */
typedef struct smla_mha_isa {
    int lanes; /* rows of a vector; tiles of up to twice as many have none for rows with one key */
    /* Bytes for a tile of any dimensions, and for each padded dimension of queries, of values. */
    smla_attention_scratch scratch;
    /* `scratch` is aligned to 64 bytes. */
    void (*run_tile)(const smla_attention_params *params, const smla_mha_tile *tile,
                     uint8_t *scratch);
} smla_mha_isa;

/* Computes one row in double, however long it takes: for rows whose query, keys or scales are too
 * large for the kernels, or are not finite. mha_exact.c */
void smla_attend_mha_exactly(const smla_attention_params *params, const smla_mha_tile *tile,
                             const smla_mha_row *row);

/* The logit of q . k = `product`. */
double smla_find_mha_logit(const smla_attention_params *params, const smla_mha_tile *tile,
                           double product);

/* Writes lse, and returns what the row's sum of values is multiplied with: 1 / sum, the sink's
 * factor, and v_descale. */
double smla_finish_mha_row(const smla_attention_params *params, const smla_mha_tile *tile,
                           const smla_mha_row *row, double sum, double lse);

/* Cuts and runs a call. mha.c */
smla_status smla_attend_mha(const smla_attention_params *params, const struct smla_cpu_isa *isa,
                            smla_error *error);

/* ---- Requests whose keys are cut into parts: mha_parts.c ------------------------------------- */

/* The parts that a request's keys are cut into. With 1, its rows are not cut. */
int smla_count_mha_parts(const smla_attention_params *params, int64_t req);

/* What the requests with several parts are cut into, and the memory that they need. */
typedef struct smla_mha_parts {
    int64_t num_tiles;
    int64_t num_parts; /* those of all tiles */
    int64_t bytes;     /* aligned to 64 bytes */
} smla_mha_parts;

smla_mha_parts smla_plan_mha_parts(const smla_attention_params *params);

/* Runs these requests. */
smla_status smla_attend_mha_parts(const smla_attention_work *of, const smla_mha_parts *parts,
                                  void *memory, smla_error *error);
