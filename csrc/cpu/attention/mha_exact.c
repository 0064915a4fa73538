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
    params->results.lse[row->lse_at] = (float)lse;
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
load_value(const smla_row_part *part, smla_float_type type, int64_t dim)
{
    return (double)smla_cpu_load_float(part->data, type, part->at + dim);
}

/* q . k */
static double
multiply(const smla_attention_params *params, const smla_mha_tile *tile, const smla_row_part *q,
         const smla_row_part *k)
{
    double sum = 0;
    for (int i = 0; i < 2; i++) {
        double part_sum = 0;
        for (int64_t d = 0; d < q[i].dim; d++) {
            part_sum +=
                load_value(&q[i], params->queries.type, d) * load_value(&k[i], params->kv.type, d);
        }
        sum += part_sum * (double)smla_mha_part_factor(params, tile, i);
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
add_key(const smla_attention_params *params, const smla_row_part *value, double logit,
        exact_state *state)
{
    if (logit == -INFINITY) {
        return;
    }
    const double max = logit > state->max ? logit : state->max;
    const double alpha = state->max == max ? 1.0 : exp(state->max - max);
    const double weight = exp(logit - max);
    state->max = max;
    state->sum = state->sum * alpha + weight;
    for (int64_t d = 0; d < params->kv.value_dim; d++) {
        state->out[d] = state->out[d] * alpha + weight * load_value(value, params->kv.type, d);
    }
}

static void
attend(const smla_attention_params *params, const smla_mha_tile *tile, const smla_mha_row *row)
{
    exact_state state = {.max = -INFINITY};
    smla_row_part q[2];
    smla_row_part kv[SMLA_KV_ARRAYS];
    smla_find_query(params, row->token, row->head, q);
    /* A sum that is NaN stays NaN, and so do all values, whatever keys follow. */
    for (int64_t key = row->keys.begin; key < row->keys.end && !isnan(state.sum); key++) {
        const smla_kv_place place = smla_find_kv_place(params, row->req, row->first_key + key);
        if (place.page >= 0) {
            smla_find_key(params, place, tile->kv_head, kv);
            const double logit = smla_find_mha_logit(params, tile, multiply(params, tile, q, kv));
            add_key(params, &kv[SMLA_VALUES], logit, &state);
        }
    }
    const double lse = state.sum == 0.0 ? -INFINITY : state.max + log(state.sum);
    const double factor = smla_finish_mha_row(params, tile, row, state.sum, lse);
    for (int64_t d = 0; d < params->kv.value_dim; d++) {
        const double x = state.sum == 0.0 ? 0.0 : state.out[d] * factor;
        store_float(params->results.out, params->results.out_type, row->out_at + d, (float)x);
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
