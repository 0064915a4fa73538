/* wide_rows.h: rows that a call widens, in the caller's workspace: how they lie there, and what a
 * kernel knows of them. Compiles as C and as CUDA.
 *
 *   1152 bytes                       slot 0 of the main list     slot 1
 *   +---------------+-------------+  +------------+-----------+  +---
 *   | unit, refusal | maxima      |  | 512 x f16  | 64 x bf16 |  | ...
 *   +---------------+-------------+  +------------+-----------+  +---
 *
 * The rows of an extra list follow. Rows of fp8_v4 have no bf16: their RoPE values are among the
 * 512. The f16 values are multiples of the unit E, a power of two that all rows share. RoPE values
 * of fp8_ds_mla are those of the cache.
 */
#pragma once

#include "core/attention/params_attention.h"

enum {
    SMLA_WIDE_ROW_BYTES = 2 * SMLA_HEAD_DIM, /* most bytes of a row, and those of the header */
    SMLA_WIDE_MAXIMA = 264,                  /* two per SM of an H200; any number is right */
    SMLA_WIDE_ALIGN = 128,
};

typedef struct smla_wide_header {
    float unit;       /* E */
    int32_t exponent; /* E is 2 to its power */
    /* Some scale is outside f16's window, so the rows are not written, and attention reads the
     * cache. */
    uint32_t is_refused;
    uint32_t maxima[SMLA_WIDE_MAXIMA]; /* what each block has found (widen_rows_sm90.cu) */
    uint32_t unused[SMLA_WIDE_ROW_BYTES / 4 - SMLA_WIDE_MAXIMA - 3];
} smla_wide_header;

/* Bytes of workspace for so many rows, wherever they begin. */
static inline int64_t
smla_wide_bytes(int64_t num_rows)
{
    return num_rows == 0 ? 0 : SMLA_WIDE_ALIGN + (num_rows + 1) * SMLA_WIDE_ROW_BYTES;
}

/* Where a run's header lies. */
static inline smla_wide_header *
smla_wide_header_of(const smla_attention_params *params, const smla_attention_run *run)
{
    uint8_t *const memory = (uint8_t *)params->workspace.memory + run->wide_offset;
    return (smla_wide_header *)(memory + (-(uintptr_t)memory % SMLA_WIDE_ALIGN));
}

/* Lets lists read the rows behind a header in place of their caches, with the same slots. To what
 * finds them they look like rows of bf16, which are as wide. */
static inline void
smla_take_wide_rows(const smla_wide_header *header, smla_key_lists *keys)
{
    uint8_t *at = (uint8_t *)header + SMLA_WIDE_ROW_BYTES;
    for (int i = 0; i < keys->num_lists; i++) {
        smla_kv_view *const kv = &keys->lists[i].kv;
        const bool has_rope = kv->format->head_dim != kv->format->value_dim;
        kv->format = &smla_kv_formats[has_rope ? SMLA_ROW_BFLOAT16 : SMLA_ROW_BFLOAT16_512];
        kv->base = at;
        kv->scales = at;
        kv->scale_token_stride_bytes = 0;
        kv->token_stride_bytes = kv->format->row_bytes;
        kv->page_stride_bytes = kv->block_size * kv->token_stride_bytes;
        at += smla_kv_num_slots(kv) * kv->token_stride_bytes;
    }
}
