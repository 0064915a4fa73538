/* mha_exact.c: rows of multi-head attention in double, one after another, and the last step of
 * every row. Kernels leave rows to it whose results could depend on what they cannot do: sums that
 * overflow, products of huge and subnormal numbers, NaN and infinity in keys that only some rows of
 * a tile see.
 */
#include <math.h>

#include "core/fp_mode.h"
#include "cpu/attention/mha.h"
#include "cpu/cpu.h"

enum { MAX_VALUE_DIM = SMLA_KV_LORA_RANK };

double
smla_finish_mha_row(const smla_attention_params *params, const smla_mha_tile *tile,
                    const smla_mha_row *row, double sum, double lse)
{
    params->results.lse[row->token * params->results.lse_stride_token +
                        row->head * params->results.lse_stride_head] = (float)lse;
    if (sum == 0.0) {
        return 0.0;
    }
    double factor =
        (double)smla_read_mha_scale(&params->logits.v_descale, tile->req, tile->kv_head) / sum;
    if (params->logits.sinks.values != NULL) {
        factor /=
            1.0 + exp(params->logits.sinks.values[row->head * params->logits.sinks.stride] - lse);
    }
    return factor;
}

static double
multiply_part(const smla_head_rows *q, smla_float_type q_type, int64_t q_at,
              const smla_head_rows *k, smla_float_type kv_type, int64_t k_at, int dim)
{
    double sum = 0;
    for (int64_t d = 0; d < dim; d++) {
        sum += (double)smla_cpu_load_float(q->data, q_type, q_at + d) *
               (double)smla_cpu_load_float(k->data, kv_type, k_at + d);
    }
    return sum;
}

/* q . k of a row and key `key` of its request. */
static double
multiply(const smla_attention_params *params, const smla_mha_tile *tile, const smla_mha_row *row,
         int64_t key)
{
    double sum = 0;
    for (int i = 0; i < 2; i++) {
        const smla_head_rows *const q = &params->queries.parts[i];
        const smla_head_rows *const k = &params->ragged.parts[i];
        sum +=
            multiply_part(q, params->queries.type,
                          row->token * q->stride_token + row->head * q->stride_head, k,
                          params->ragged.type,
                          (row->first_key + key) * k->stride_token + tile->kv_head * k->stride_head,
                          params->queries.dims[i]);
    }
    return sum;
}

double
smla_find_mha_logit(const smla_attention_params *params, const smla_mha_tile *tile, double product)
{
    const double logit = smla_mha_logit_scale(params, tile) * product;
    const double cap = params->logits.softcap;
    return cap > 0 ? cap * tanh(logit / cap) : logit;
}

static void
store_float(void *array, smla_float_type type, int64_t at, float x)
{
    switch (type) {
    case SMLA_FLOAT_BF16: ((uint16_t *)array)[at] = smla_float_to_bf16(x); break;
    case SMLA_FLOAT_FP16: ((uint16_t *)array)[at] = smla_float_to_half(x); break;
    default: ((float *)array)[at] = x;
    }
}

/* The state of a softmax after some keys. */
typedef struct exact_state {
    double max;
    double sum;
    double out[MAX_VALUE_DIM];
} exact_state;

/* Adds a key. A logit of -inf is no key; one of NaN or +inf makes the state NaN. */
static void
add_key(const smla_attention_params *params, int64_t v_at, double logit, exact_state *state)
{
    if (logit == -INFINITY) {
        return;
    }
    const double max = logit > state->max ? logit : state->max;
    const double alpha = state->max == max ? 1.0 : exp(state->max - max);
    const double weight = exp(logit - max);
    state->max = max;
    state->sum = state->sum * alpha + weight;
    for (int64_t d = 0; d < params->ragged.value_dim; d++) {
        state->out[d] = state->out[d] * alpha +
                        weight * (double)smla_cpu_load_float(params->ragged.values.data,
                                                             params->ragged.type, v_at + d);
    }
}

static void
attend(const smla_attention_params *params, const smla_mha_tile *tile, const smla_mha_row *row)
{
    exact_state state = {.max = -INFINITY};
    /* A sum that is NaN stays NaN, and so do all values, whatever keys follow. */
    for (int64_t key = row->keys.begin; key < row->keys.end && !isnan(state.sum); key++) {
        const int64_t v_at = (row->first_key + key) * params->ragged.values.stride_token +
                             tile->kv_head * params->ragged.values.stride_head;
        const double product = multiply(params, tile, row, key);
        add_key(params, v_at, smla_find_mha_logit(params, tile, product), &state);
    }
    const double lse = state.sum == 0.0 ? -INFINITY : state.max + log(state.sum);
    const double factor = smla_finish_mha_row(params, tile, row, state.sum, lse);
    const int64_t at =
        row->token * params->results.out_stride_token + row->head * params->results.out_stride_head;
    for (int64_t d = 0; d < params->ragged.value_dim; d++) {
        const double x = state.sum == 0.0 ? 0.0 : state.out[d] * factor;
        store_float(params->results.out, params->results.out_type, at + d, (float)x);
    }
}

void
smla_attend_mha_exactly(const smla_attention_params *params, const smla_mha_tile *tile,
                        const smla_mha_row *row)
{
    const smla_fp_mode before = smla_fp_change(SMLA_FP_EXACT);
    attend(params, tile, row);
    smla_fp_change(before);
}
