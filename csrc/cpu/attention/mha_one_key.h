/* mha_one_key.h: rows of multi-head attention that see one key, for one instruction set.
 * mha_kernel.c includes it.
 *
 * Computes     out = v * v_descale * sink factor,  lse = scale * (q . k), capped
 * Numerics     out is the value to the bit, because the factor is 1 or a double, and subnormal
 *              numbers are kept. q . k is summed in double, in the same order on any instruction
 *              set. Rows with a value above 2^50 or NaN are left to mha_exact.c.
 */
#pragma once

#include "cpu/attention/widen_floats.h"

/* Lanes are dimensions: half a vector of floats, and the same as doubles. */
typedef float some_floats __attribute__((vector_size(2 * SMLA_SIMD_WIDTH), may_alias));
typedef double some_doubles __attribute__((vector_size(4 * SMLA_SIMD_WIDTH)));

enum {
    LANES = SMLA_SIMD_WIDTH / 2,
    SUM_LANES = 16, /* sums that grow side by side, on any instruction set */
    SUMS = SUM_LANES / LANES,
};

_Static_assert(SMLA_MHA_PAD % SUM_LANES == 0, "whole steps of products");

/* The key of the last row. Rows of a request often have the same one. */
typedef struct only_key {
    int64_t token; /* -1: none */
    bool is_usual;
    double factor; /* what the value in `out` was multiplied with */
    float k[MAX_ROW_ELEMENTS] __attribute__((aligned(64)));
    float v[MAX_ROW_ELEMENTS] __attribute__((aligned(64)));
    float q[MAX_ROW_ELEMENTS] __attribute__((aligned(64))); /* the row's query */
    float scaled[MAX_ROW_ELEMENTS] __attribute__((aligned(64)));
    float out[MAX_ROW_ELEMENTS] __attribute__((aligned(64))); /* as many elements of out's type */
} only_key;

_Static_assert(sizeof(only_key) <= BLOCK_KEYS * KEY_STRIDE * sizeof(unit_scalar),
               "room among the keys");

/* Widens the two parts of a row, as load_row does, with zeros behind them. Returns whether all
 * values are usual. */
static bool
load_floats(const smla_head_rows *parts, const int16_t *dims, int num_parts, smla_float_type type,
            int64_t token, int64_t head, int padded_dims, float *row)
{
    int64_t dim = 0;
    for (int i = 0; i < num_parts; i++) {
        const smla_head_rows *const part = &parts[i];
        widen_floats(part->data, type, token * part->stride_token + head * part->stride_head,
                     dims[i], row + dim);
        dim += dims[i];
    }
    memset(row + dim, 0, (size_t)(padded_dims - dim) * sizeof *row);
    return !has_huge_float(row, padded_dims);
}

static void
load_only_key(const tile_work *work, int64_t token, only_key *key)
{
    const smla_attention_params *const params = work->params;
    const int64_t kv_head = work->tile->kv_head;
    key->token = token;
    key->factor = NAN;
    key->is_usual = load_floats(params->ragged.parts, params->queries.dims, 2, params->ragged.type,
                                token, kv_head, work->query_dims, key->k) &&
                    load_floats(&params->ragged.values, &params->ragged.value_dim, 1,
                                params->ragged.type, token, kv_head, work->value_dims, key->v);
}

static double
multiply_only_key(const only_key *key, int dims)
{
    const some_floats *const q = (const some_floats *)key->q;
    const some_floats *const keys = (const some_floats *)key->k;
    some_doubles sum[SUMS] = {{0}};
    double sums[SUM_LANES];
    for (int i = 0; i < dims / LANES; i += SUMS) {
#pragma GCC unroll 8
        for (int k = 0; k < SUMS; k++) {
            sum[k] += __builtin_convertvector(q[i + k], some_doubles) *
                      __builtin_convertvector(keys[i + k], some_doubles);
        }
    }
    memcpy(sums, sum, sizeof sums);
    for (int count = SUM_LANES / 2; count > 0; count /= 2) {
        for (int i = 0; i < count; i++) {
            sums[i] += sums[i + count];
        }
    }
    return sums[0];
}

/* key->out = value * factor, rounded to fp32 and then to the type of out. */
static void
round_value(const tile_work *work, double factor, only_key *key)
{
    for (int i = 0; i < work->value_dims / LANES; i++) {
        const some_doubles v =
            __builtin_convertvector(((const some_floats *)key->v)[i], some_doubles);
        ((some_floats *)key->scaled)[i] =
            __builtin_convertvector((v + 0.0) * factor, some_floats); /* +0 for -0 */
    }
    for (int d = 0; d < work->value_dims; d += WIDTH) {
        store_values(*as_vectors(key->scaled + d), work->params->results.out_type, d, WIDTH,
                     key->out);
    }
    key->factor = factor;
}

/* Returns whether the row's values are usual. If they are not, nothing is written. */
static bool
attend_only_key(const tile_work *work, const smla_mha_row *row, only_key *key)
{
    const smla_attention_params *const params = work->params;
    const int64_t token = row->first_key + row->keys.begin;
    if (token != key->token) {
        load_only_key(work, token, key);
    }
    if (!load_floats(params->queries.parts, params->queries.dims, 2, params->queries.type,
                     row->token, row->head, work->query_dims, key->q) ||
        !key->is_usual) {
        return false;
    }
    const double product = multiply_only_key(key, work->query_dims);
    const double lse = smla_find_mha_logit(params, work->tile, product) + 0.0; /* +0 for -0 */
    const double factor = smla_finish_mha_row(params, work->tile, row, 1.0, lse);
    if (factor != key->factor) {
        round_value(work, factor, key);
    }
    const int64_t bytes = params->results.out_type == SMLA_FLOAT_FP32 ? 4 : 2;
    const int64_t at =
        row->token * params->results.out_stride_token + row->head * params->results.out_stride_head;
    memcpy((uint8_t *)params->results.out + at * bytes, key->out,
           (size_t)(params->ragged.value_dim * bytes));
    return true;
}

/* The rows of a tile that see one key. Rows that are left over are marked. Not inlined, because the
 * caller changes the floating-point mode. */
__attribute__((noinline)) static void
attend_only_keys(const tile_work *work)
{
    only_key *const key = (only_key *)(void *)work->keys; /* no longer needed */
    key->token = -1;
    for (int i = 0; i < work->tile->num_rows; i++) {
        if (smla_is_one_key(work->rows[i].keys) && !work->is_exact[i]) {
            work->is_exact[i] = !attend_only_key(work, &work->rows[i], key);
        }
    }
}
