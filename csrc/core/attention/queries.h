/* queries.h: the queries of attention. Compiles as C and as CUDA. */
#pragma once

#include "core/params.h"

/* Rows [tokens, heads, dim] of queries, keys or values. The dims of a row are contiguous. */
typedef struct smla_head_rows {
    const void *data; /* NULL where dim is 0 or there is no row */
    int64_t stride_token;
    int64_t stride_head; /* 0: all heads share a row, as those of k_pe do */
} smla_head_rows;

/* A row of 16-bit values. */
SMLA_HOST_DEVICE static inline const uint16_t *
smla_row16(const smla_head_rows *rows, int64_t token, int64_t head)
{
    return (const uint16_t *)rows->data + token * rows->stride_token + head * rows->stride_head;
}

/* A row of 8-bit values. */
SMLA_HOST_DEVICE static inline const uint8_t *
smla_row8(const smla_head_rows *rows, int64_t token, int64_t head)
{
    return (const uint8_t *)rows->data + token * rows->stride_token + head * rows->stride_head;
}

/* Rows of queries and keys have two parts, and scores are the sum of both products. Those over
 * latents have their 512 latent values in part 0, and those of RoPE in part 1. */
enum { SMLA_NOPE = 0, SMLA_PE = 1 };

typedef struct smla_queries {
    int64_t num_tokens;   /* T */
    int64_t num_heads;    /* H */
    smla_float_type type; /* bf16, fp16 or e4m3 */
    int16_t dims[2];      /* values of each part; 0: it is absent */
    smla_head_rows parts[2];
} smla_queries;

static inline void
smla_skip_rows(smla_head_rows *rows, smla_float_type type, int64_t count)
{
    if (rows->data != NULL) {
        rows->data =
            (const uint8_t *)rows->data + count * rows->stride_token * smla_float_bytes(type);
    }
}

/* Moves to the queries behind the first `count` tokens, as the next two functions do. */
static inline void
smla_skip_queries(smla_queries *queries, int64_t count)
{
    smla_skip_rows(&queries->parts[SMLA_NOPE], queries->type, count);
    smla_skip_rows(&queries->parts[SMLA_PE], queries->type, count);
}
