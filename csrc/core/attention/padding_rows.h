/* padding_rows.h: the rows of results that belong to no request. They lie behind the last request's
 * query tokens, so only the device knows where they begin. In a result that the caller gave, they
 * stay as they are. One that the call made for its caller would show the memory of others there, so
 * the call fills them. Compiles as C and as CUDA.
 */
#pragma once

#include "core/numeric.h"

/* The results to fill, each [T, H, ...]. */
typedef struct smla_padding_rows {
    uint8_t *out; /* becomes 0; NULL: it stays */
    int64_t out_stride_token_bytes;
    int64_t out_stride_head_bytes;
    int64_t row_bytes; /* bytes of a head, whose values have 16 or 32 bits */
    float *lse;        /* becomes empty_lse; NULL: it stays */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
    float empty_lse;
    int32_t num_heads;
} smla_padding_rows;

SMLA_HOST_DEVICE static inline bool
smla_has_padding(const smla_padding_rows *rows)
{
    return rows->out != NULL || rows->lse != NULL;
}

/* Fills the rows of tokens first, first + step, ... before `past`. `lanes` threads share a row. */
SMLA_HOST_DEVICE static inline void
smla_fill_padding(const smla_padding_rows *rows, int64_t first, int64_t step, int64_t past,
                  int lane, int lanes)
{
    for (int64_t token = first; token < past; token += step) {
        for (int head = 0; rows->out != NULL && head < rows->num_heads; head++) {
            uint16_t *const row =
                (uint16_t *)(void *)(rows->out + token * rows->out_stride_token_bytes +
                                     head * rows->out_stride_head_bytes);
            for (int i = lane; i < rows->row_bytes / 2; i += lanes) {
                row[i] = 0;
            }
        }
        for (int head = lane; rows->lse != NULL && head < rows->num_heads; head += lanes) {
            rows->lse[token * rows->lse_stride_token + head * rows->lse_stride_head] =
                rows->empty_lse;
        }
    }
}
