/* results.h: what attention writes, and the memory that it needs for it. Compiles as C and as
 * CUDA. */
#pragma once

#include "core/attention/padding_rows.h"
#include "core/params.h"

/* Bytes of workspace with which a GPU's CTAs can divide ragged work among themselves as it goes. */
enum { SMLA_RAGGED_WORKSPACE_BYTES = 16 };

typedef struct smla_results {
    int32_t num_splits;         /* 1...64: parts of a row, which are folded; 0: the backend chooses
                                 * (paged keys) */
    uint8_t out_type;           /* smla_float_type: bf16, fp16 or fp32 */
    bool empty_lse_is_plus_inf; /* lse of a row without keys: +inf, not -inf */
    bool fills_padding;         /* tokens of no request get the results of no keys */
    void *out;                  /* [T, H, Dv] */
    int64_t out_stride_token;
    int64_t out_stride_head;
    float *lse; /* [T, H] or NULL */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
    float *max_logits; /* [T, H] or NULL */
    int64_t max_logits_stride_token;
    int64_t max_logits_stride_head;
} smla_results;

/* Columns per split range: ceil(ceil(K / n) / 64) * 64, as the batch-invariance contract says. */
SMLA_HOST_DEVICE static inline int64_t
smla_split_columns(int64_t topk, int num_splits)
{
    const int64_t columns = (topk + num_splits - 1) / num_splits;
    return (columns + SMLA_SPLIT_ALIGN - 1) / SMLA_SPLIT_ALIGN * SMLA_SPLIT_ALIGN;
}

/* A row of 16-bit results. */
SMLA_HOST_DEVICE static inline uint16_t *
smla_out16(const smla_results *results, int64_t token, int64_t head)
{
    return (uint16_t *)results->out + token * results->out_stride_token +
           head * results->out_stride_head;
}

static inline void
smla_skip_results(smla_results *results, int64_t count)
{
    results->out =
        (uint8_t *)results->out +
        count * results->out_stride_token * smla_float_bytes((smla_float_type)results->out_type);
    results->lse += results->lse == NULL ? 0 : count * results->lse_stride_token;
    results->max_logits +=
        results->max_logits == NULL ? 0 : count * results->max_logits_stride_token;
}

/* Memory of the caller that the call uses as it likes. */
typedef struct smla_workspace {
    void *memory;
    int64_t bytes;
    const char *name; /* the argument's name, for errors */
} smla_workspace;
