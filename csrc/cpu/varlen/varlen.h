/* varlen.h: what the files of varlen_attention share. There is one scheduler (varlen.c) and one
 * kernel (varlen_kernel.h), which is compiled into a smla_varlen_isa per instruction set.
 *
 * The *rows* of a request and a KV head are its query tokens times the heads that read the KV head,
 * token by token. A *tile* is up to SMLA_VARLEN_ROWS of them, which read the keys together.
 */
#pragma once

#include "core/backend.h"
#include "core/params_varlen.h"

enum {
    SMLA_VARLEN_ROWS = 512,
    SMLA_VARLEN_PAD = 32, /* D and Dv are padded to a multiple: whole steps of every unit */
};

static inline int
smla_pad_varlen_dims(int64_t dims)
{
    return (int)((dims + SMLA_VARLEN_PAD - 1) / SMLA_VARLEN_PAD * SMLA_VARLEN_PAD);
}

typedef struct smla_varlen_tile {
    smla_varlen_request of;
    int64_t req;
    int64_t kv_head;
    int64_t row; /* the first one, counted in the request */
    int num_rows;
} smla_varlen_tile;

/* A row of queries, and the keys that it sees. */
typedef struct smla_varlen_row {
    int64_t token; /* in all arrays */
    int64_t head;
    smla_key_range keys; /* numbers in the request */
} smla_varlen_row;

static inline smla_varlen_row
smla_find_varlen_row(const smla_varlen_params *params, const smla_varlen_tile *tile, int row)
{
    const int64_t group = params->num_heads / params->num_kv_heads;
    const int64_t query = (tile->row + row) / group;
    return (smla_varlen_row){
        .token = tile->of.first_query + query,
        .head = tile->kv_head * group + (tile->row + row) % group,
        .keys = smla_find_varlen_range(params, &tile->of, query),
    };
}

static inline float
smla_read_varlen_scale(const smla_varlen_scale *scale, int64_t req, int64_t kv_head)
{
    return scale->pointer == NULL
               ? scale->value
               : scale->pointer[req * scale->stride_req + kv_head * scale->stride_head];
}

/* What q . k is multiplied with. */
static inline double
smla_varlen_logit_scale(const smla_varlen_params *params, const smla_varlen_tile *tile)
{
    return params->softmax_scale *
           (double)smla_read_varlen_scale(&params->q_descale, tile->req, tile->kv_head) *
           (double)smla_read_varlen_scale(&params->k_descale, tile->req, tile->kv_head);
}

/* What a kernel takes of a thread's scratch: numbers, because those of other instruction sets are
 * read, too, and code of theirs may not run. */
typedef struct smla_varlen_scratch {
    int64_t tile_bytes; /* for a tile of any dimensions */
    int64_t bytes_per_query_dim;
    int64_t bytes_per_value_dim;
} smla_varlen_scratch;

static inline int64_t
smla_varlen_scratch_bytes(const smla_varlen_scratch *scratch, const smla_varlen_params *params)
{
    return scratch->tile_bytes +
           scratch->bytes_per_query_dim *
               smla_pad_varlen_dims(params->q[0].dim + params->q[1].dim) +
           scratch->bytes_per_value_dim * smla_pad_varlen_dims(params->value_dim);
}

/* The kernel of one instruction set. */
typedef struct smla_varlen_isa {
    smla_varlen_scratch scratch;
    /* `scratch` is aligned to 64 bytes. */
    void (*run_tile)(const smla_varlen_params *params, const smla_varlen_tile *tile,
                     uint8_t *scratch);
} smla_varlen_isa;

extern const smla_varlen_isa smla_varlen_base;
#if defined(SMLA_HAVE_X86_ISA)
extern const smla_varlen_isa smla_varlen_avx2;
extern const smla_varlen_isa smla_varlen_avx512;
extern const smla_varlen_isa smla_varlen_avx512bf16;
extern const smla_varlen_isa smla_varlen_amx;
#elif defined(SMLA_HAVE_ARM_ISA)
extern const smla_varlen_isa smla_varlen_neon;
extern const smla_varlen_isa smla_varlen_neonbf16;
#endif

/* Computes one row in double, however long it takes: for rows whose query, keys or scales are too
 * large for the kernels, or are not finite. varlen_exact.c */
void smla_attend_varlen_exactly(const smla_varlen_params *params, const smla_varlen_tile *tile,
                                const smla_varlen_row *row);

/* Writes lse, and returns what the row's sum of values is multiplied with: 1 / sum, the sink's
 * factor, and v_descale. */
double smla_finish_varlen_row(const smla_varlen_params *params, const smla_varlen_tile *tile,
                              const smla_varlen_row *row, double sum, double lse);
