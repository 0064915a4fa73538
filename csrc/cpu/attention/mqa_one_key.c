/* mqa_one_key.c: tokens that have exactly one key, or none, on every instruction set.
 *
 * The out of such a token is the value of its key, rounded once. If the row is bf16, out has its
 * bits. The kernels round weights to bf16, and would be off by a step of bf16, so these tokens do
 * not reach them. What is left to compute is one dot product per head.
 *
 * Numerics     The dot product is summed in double; the logit is rounded to fp32. A value is the
 *              fp32 product of e4m3 and its scale, as in a gather, times the sink's factor if there
 *              is one. A logit of NaN or +inf makes the row of out NaN. A key with logit -inf is
 *              no key. The kernels do the same.
 */
#define SMLA_SIMD_WIDTH 4

#include <math.h>

#include "core/numeric.h"
#include "cpu/attention/mqa.h"
#include "cpu/attention/mqa_block.h"
#include "cpu/machine/narrow.h"

/* Lanes are dimensions. */
typedef uint16_t halves __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(32)));
typedef float floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef double doubles __attribute__((vector_size(64)));

enum { LANES = 8 };

/* A key, converted for products: value d is values[d] * scales[d / 128]. Of its first 512 values
 * that is scaled[d] * units[d / 128] if computed in fp32. */
typedef struct wide_key {
    int rope_dim;
    double logit_scale; /* multiplies q . k */
    doubles values[SMLA_HEAD_DIM / LANES];
    float scales[NUM_TILES];
    float units[SMLA_NUM_SCALE_TILES]; /* not 1 where a value beyond fp32 may have a small factor */
    duo scaled[SMLA_KV_LORA_RANK / DUO];
    bool has_nan; /* among them */
} wide_key;

int
smla_find_keys(const smla_attention_params *params, int64_t token, int split, smla_only_key *first)
{
    int count = 0;
    key_cursor cursor = start_cursor(params, token, split);
    key_block block;
    for (next_block(&cursor, 2, &block); block.count > 0; next_block(&cursor, 2, &block)) {
        if (count == 0) {
            *first = (smla_only_key){block.keys[0], block.format, block.kv_scale};
        }
        count += block.count;
        if (count > 1) {
            return 2;
        }
    }
    return count;
}

bool
smla_has_columns(const smla_attention_params *params, int64_t token, int split)
{
    bool has_columns = false;
    key_cursor cursor = start_cursor(params, token, split);
    for (int list = 0; list < params->keys.num_lists; list++) {
        enter_list(&cursor, list);
        has_columns |= cursor.column < cursor.end;
    }
    return has_columns;
}

static float
read_bf16(const uint8_t *bytes)
{
    uint16_t x;
    memcpy(&x, bytes, sizeof x);
    return smla_bf16_to_float(x);
}

static float
load_code(const smla_kv_format_info *format, const uint8_t *row, int d)
{
    if (d >= format->nope_dim && !smla_has_rope_codes(format)) {
        return read_bf16(row + format->rope_offset + 2 * (ptrdiff_t)(d - format->nope_dim));
    }
    switch (format->nope_type) {
    case SMLA_NOPE_E4M3: return smla_e4m3_to_float(row[d]);
    case SMLA_NOPE_E2M1: return smla_e2m1_to_float((uint8_t)(row[d / 2] >> d % 2 * 4 & 15));
    default: return read_bf16(row + 2 * (ptrdiff_t)d);
    }
}

/* The scale that value d is multiplied with when it is loaded. */
static float
load_inner_scale(const smla_kv_format_info *format, const uint8_t *scales, int d)
{
    if (d >= format->nope_dim) {
        return 1.0f;
    }
    switch (format->scale_type) {
    case SMLA_SCALE_UE8M0: return smla_ue8m0_to_float(scales[d / format->scale_tile]);
    case SMLA_SCALE_E4M3: return smla_e4m3_to_float(scales[d / format->scale_tile]);
    default: return 1.0f;
    }
}

static void
widen_key(const smla_attention_params *params, const smla_only_key *only, wide_key *key)
{
    const smla_kv_format_info *const format = only->format;
    store_scales(load_scales(format, only->kv_scale, only->token.scales), only->kv_scale, 0, 1,
                 key->scales);
    key->rope_dim = format->head_dim - SMLA_KV_LORA_RANK;
    key->logit_scale = (double)params->logits.softmax_scale / (double)choose_key_unit(params);
    for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
        key->units[tile] = key->scales[tile] > 0x1p100f ? 0x1p16f : 1.0f;
    }
    float values[SMLA_HEAD_DIM];
    for (int d = 0; d < format->head_dim; d++) {
        values[d] =
            load_code(format, only->token.row, d) * load_inner_scale(format, only->token.scales, d);
    }
    for (int i = 0; i < format->head_dim / LANES; i++) {
        key->values[i] = __builtin_convertvector(((const floats *)values)[i], doubles);
    }
    vint are_nan = {0};
    for (int i = 0; i < SMLA_KV_LORA_RANK / DUO; i++) {
        const int tile = i * DUO / SMLA_SCALE_TILE;
        const float scale = key->scales[tile] / key->units[tile];
        const vuint first = load_words(values, 2 * i);
        const vuint second = load_words(values, 2 * i + 1);
        const vfloat even = (vfloat)even_lanes(first, second) * scale;
        const vfloat odd = (vfloat)odd_lanes(first, second) * scale;
        are_nan |= (even != even) | (odd != odd);
        key->scaled[i] = (duo){even, odd};
    }
    key->has_nan = has_lane(are_nan);
}

static double
dot(const uint16_t *q, const doubles *values, int count)
{
    doubles sum = {0};
    for (int d = 0; d < count; d += LANES) {
        const words bits = __builtin_convertvector(*(const halves *)(q + d), words) << 16;
        sum += __builtin_convertvector((floats)bits, doubles) * values[d / LANES];
    }
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* A part of a head's query in bf16. One of e4m3 is converted into `buffer`. */
static const uint16_t *
load_part(const smla_queries *queries, int part, int dim, int64_t token, int64_t head,
          uint16_t *buffer)
{
    if (queries->type != SMLA_FLOAT_E4M3) {
        return smla_row16(&queries->parts[part], token, head);
    }
    const uint8_t *const codes = smla_row8(&queries->parts[part], token, head);
    for (int d = 0; d < dim; d++) {
        buffer[d] = smla_float_to_bf16(smla_e4m3_to_float(codes[d]));
    }
    return buffer;
}

static float
find_logit(const smla_attention_params *params, int64_t token, int64_t head, const wide_key *key)
{
    const smla_queries *const queries = &params->queries;
    uint16_t converted[SMLA_HEAD_DIM];
    const uint16_t *const nope =
        load_part(queries, SMLA_NOPE, SMLA_KV_LORA_RANK, token, head, converted);
    double sum = 0.0;
    if (key->rope_dim != 0) {
        const uint16_t *const rope =
            load_part(queries, SMLA_PE, key->rope_dim, token, head, converted + SMLA_KV_LORA_RANK);
        sum = dot(rope, key->values + SMLA_KV_LORA_RANK / LANES, key->rope_dim) *
              (double)key->scales[SMLA_NUM_SCALE_TILES];
    }
    for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
        const int begin = tile * SMLA_SCALE_TILE;
        sum += dot(nope + begin, key->values + begin / LANES, SMLA_SCALE_TILE) *
               (double)key->scales[tile];
    }
    const double logit = key->logit_scale * sum;
    const double cap = params->logits.softcap;
    return (float)(cap == 0.0 ? logit : cap * tanh(logit / cap));
}

/* Writes lse and max_logits of one head. Returns the factor of the value in out. */
static float
finish_head(const smla_attention_params *params, int64_t token, int64_t head, float logit)
{
    const bool is_key = logit != -INFINITY;
    const float max_logit = logit == INFINITY ? NAN : logit;
    const float lse_empty = params->results.empty_lse_is_plus_inf ? INFINITY : -INFINITY;
    if (params->results.lse != NULL) {
        params->results.lse[token * params->results.lse_stride_token +
                            head * params->results.lse_stride_head] =
            is_key ? max_logit : lse_empty;
    }
    if (params->results.max_logits != NULL) {
        params->results.max_logits[token * params->results.max_logits_stride_token +
                                   head * params->results.max_logits_stride_head] = max_logit;
    }
    if (!is_key) {
        return 0.0f;
    }
    const double factor = isnan(max_logit) ? NAN : 1.0;
    if (params->logits.sinks.values == NULL) {
        return (float)factor;
    }
    const double sink = params->logits.sinks.values[head * params->logits.sinks.stride];
    return (float)(factor / (1.0 + exp(sink - max_logit)));
}

/* out = value * factor, rounded to bf16. A factor of 0 gives zeros without a sign. */
static void
round_value(const wide_key *key, float factor, uint16_t *out)
{
    const bool may_be_nan = key->has_nan || isnan(factor);
    if (factor == 0.0f) {
        memset(out, 0, SMLA_KV_LORA_RANK * sizeof *out);
        return;
    }
    for (int i = 0; i < SMLA_KV_LORA_RANK / DUO; i++) {
        const float scale = factor * key->units[i * DUO / SMLA_SCALE_TILE];
        const duo x = {key->scaled[i].even * scale, key->scaled[i].odd * scale};
        const vuint both =
            may_be_nan ? join_upper_halves(round_to_upper_half(x.even), round_to_upper_half(x.odd))
                       : join_upper_halves(round_finite(x.even), round_finite(x.odd));
        store_words(both, out, i);
    }
}

void
smla_attend_one_key(const smla_attention_params *params, int64_t token, smla_head_range heads,
                    const smla_only_key *only)
{
    wide_key key;
    uint16_t rounded[SMLA_KV_LORA_RANK];
    float rounded_factor = 1.0f; /* the factor in `rounded`; most heads have the same */
    widen_key(params, only, &key);
    round_value(&key, rounded_factor, rounded);
    for (int64_t head = heads.begin; head < heads.end; head++) {
        const float factor =
            finish_head(params, token, head, find_logit(params, token, head, &key));
        if (factor != rounded_factor) {
            round_value(&key, factor, rounded);
            rounded_factor = factor;
        }
        memcpy(smla_out16(&params->results, token, head), rounded, sizeof rounded);
    }
}

void
smla_attend_no_key(const smla_attention_params *params, int64_t token, smla_head_range heads)
{
    for (int64_t head = heads.begin; head < heads.end; head++) {
        (void)finish_head(params, token, head, -INFINITY);
        memset(smla_out16(&params->results, token, head), 0, SMLA_KV_LORA_RANK * sizeof(uint16_t));
    }
}
