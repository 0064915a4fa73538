/* lightning_chunk.c: the chunks of lightning_indexer. */
#include "core/params_indexer.h"

#include <assert.h>

/* A vector without its first elements; NULL remains NULL. */
static const int32_t *
skip(const int32_t *vector, int64_t stride, int64_t count)
{
    return vector == NULL ? NULL : vector + count * stride;
}

/* Rows of bytes without the first rows. */
static uint8_t *
skip_rows(const void *rows, int64_t row_bytes, int64_t count)
{
    return rows == NULL ? NULL : (uint8_t *)rows + count * row_bytes;
}

int64_t
smla_lightning_chunk_tokens(int64_t num_tokens, int64_t most, int64_t unit)
{
    assert(most >= 1 && unit >= 1);
    const int64_t step = most < unit ? 1 : unit;
    const int64_t largest = most / step * step;
    const int64_t num_chunks = (num_tokens + largest - 1) / largest;
    const int64_t even = (num_tokens + num_chunks - 1) / num_chunks;
    return (even + step - 1) / step * step;
}

smla_lightning_params
smla_lightning_chunk(const smla_lightning_params *p, int64_t token)
{
    smla_lightning_params chunk = *p;
    smla_logits_params *const logits = &chunk.logits;
    smla_top_k_params *const top_k = &chunk.top_k;
    smla_topk_slots_params *const slots = &top_k->slots;
    const int64_t left = p->logits.num_tokens - token;
    const int64_t num_tokens = left < p->chunk_tokens ? left : p->chunk_tokens;
    const int64_t value_bytes = top_k->is_bf16 ? 2 : 4;

    logits->num_tokens = num_tokens;
    logits->q = skip_rows(logits->q, logits->q_stride_token, token);
    logits->q_scale = skip_rows(logits->q_scale, logits->q_scale_stride_token, token);
    logits->weights = logits->weights + token * logits->weights_stride_token;
    logits->req_id_per_token = skip(logits->req_id_per_token, logits->req_id_stride, token);
    logits->context_lens = skip(logits->context_lens, logits->context_lens_stride, token);
    logits->starts = skip(logits->starts, logits->starts_stride, token);

    top_k->num_tokens = num_tokens;
    top_k->ends = skip(top_k->ends, top_k->ends_stride, token);
    top_k->out = top_k->out + token * top_k->out_stride_token;
    top_k->values = skip_rows(top_k->values, top_k->values_stride_token * value_bytes, token);

    slots->num_tokens = num_tokens;
    slots->topk_indices = top_k->out;
    slots->req_id_per_token = skip(slots->req_id_per_token, slots->req_id_stride, token);
    slots->is_valid = skip_rows(slots->is_valid, slots->is_valid_stride, token);
    slots->out = (int32_t *)skip(slots->out, slots->out_stride_token, token);
    slots->lens = (int32_t *)skip(slots->lens, slots->lens_stride, token);
    return chunk;
}
