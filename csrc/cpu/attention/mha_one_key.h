/* mha_one_key.h: rows of multi-head attention that see one key, for one instruction set.
 * mha_kernel.c includes it.
 *
 * Computes     out = v * v_descale * sink factor,  lse = scale * (q . k), capped
 * Numerics     out is the value to the bit, because the factor is 1 or a double, and subnormal
 *              numbers are kept. q . k is summed in double, in the same order on any instruction
 *              set. Rows with a value above 2^50 or NaN, and those whose key is hidden, are left to
 *              mha_exact.c.
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
    smla_kv_place place; /* page -1: none */
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
load_floats(const smla_row_part *parts, int num_parts, smla_float_type type, int padded_dims,
            float *row)
{
    int64_t dim = 0;
    for (int i = 0; i < num_parts; i++) {
        widen_floats(parts[i].data, type, parts[i].at, parts[i].dim, row + dim);
        dim += parts[i].dim;
    }
    memset(row + dim, 0, (size_t)(padded_dims - dim) * sizeof *row);
    return !has_huge_float(row, padded_dims);
}

static void
load_only_key(const tile_work *work, smla_kv_place place, only_key *key)
{
    const smla_attention_params *const params = work->params;
    smla_row_part kv[SMLA_KV_ARRAYS];
    smla_find_key(params, place, work->tile->kv_head, kv);
    key->place = place;
    key->factor = NAN;
    key->is_usual = load_floats(kv, 2, params->kv.type, work->query_dims, key->k) &&
                    load_floats(&kv[SMLA_VALUES], 1, params->kv.type, work->value_dims, key->v);
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

/* Returns whether the key is not hidden and the row's values are usual. If not, nothing is
 * written. */
static bool
attend_only_key(const tile_work *work, const smla_mha_row *row, only_key *key)
{
    const smla_attention_params *const params = work->params;
    const smla_kv_place place =
        smla_find_kv_place(params, row->req, row->first_key + row->keys.begin);
    smla_row_part query[2];
    if (place.page < 0) {
        return false;
    }
    if (place.page != key->place.page || place.token != key->place.token) {
        load_only_key(work, place, key);
    }
    smla_find_query(params, row->token, row->head, query);
    if (!load_floats(query, 2, params->queries.type, work->query_dims, key->q) || !key->is_usual) {
        return false;
    }
    smla_apply_part_factors(params, work->tile, key->q);
    const double product = multiply_only_key(key, work->query_dims);
    const double lse = smla_find_mha_logit(params, work->tile, product) + 0.0; /* +0 for -0 */
    const double factor = smla_finish_mha_row(params, work->tile, row, 1.0, lse);
    if (factor != key->factor) {
        round_value(work, factor, key);
    }
    const int64_t bytes = params->results.out_type == SMLA_FLOAT_FP32 ? 4 : 2;
    memcpy((uint8_t *)params->results.out + row->out_at * bytes, key->out,
           (size_t)(params->kv.value_dim * bytes));
    return true;
}

/* The rows of a tile that see one key. Rows that are left over are marked. Not inlined, because the
 * caller changes the floating-point mode. */
__attribute__((noinline)) static void
attend_only_keys(const tile_work *work)
{
    only_key *const key = (only_key *)(void *)work->keys; /* no longer needed */
    key->place.page = -1;
    for (int i = 0; i < work->tile->num_rows; i++) {
        if (smla_is_one_key(work->rows[i].keys) && !work->is_exact[i]) {
            work->is_exact[i] = !attend_only_key(work, &work->rows[i], key);
        }
    }
}
