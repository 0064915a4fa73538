/* cache.h: the conversions that cache.c, quant.c and scaled_quantize.c use. One kernel
 * (cache_kernel.c) is compiled once per instruction set into a smla_cache_isa.
 */
#pragma once

#include "core/backend.h"

enum {
    INDEX_KEYS = 8, /* keys of the indexer that are best written together */
    /* Columns of a group that finish_groups takes, at most. It reads and writes as many floats
     * behind its columns, whatever they are. */
    SMLA_NARROW_COLUMNS = 64,
};

/* The kernel of one instruction set. An array comes with its type and its first element. */
typedef struct smla_cache_isa {
    /* NoPE and RoPE values of bf16, fp16 or fp32 -> a cache row. `kv_scale` is read where the
     * format has one for the whole cache. */
    void (*write_row)(const smla_kv_format_info *format, smla_float_type type, const void *nope,
                      int64_t nope_start, const void *rope, int64_t rope_start, float kv_scale,
                      smla_kv_token to);
    /* The same for `count` keys of the indexer. */
    void (*write_index_keys)(const smla_kv_format_info *format, smla_float_type type,
                             const uint8_t *const *keys, const smla_kv_token *to, int count);
    /* A cache row -> its values as bf16 or fp32. */
    void (*read_row)(const smla_kv_format_info *format, smla_kv_token from, float kv_scale,
                     smla_float_type type, void *out, int64_t out_start);
    /* The largest smla_finite_abs of the values; 0 if there are none. */
    float (*find_amax)(const void *x, smla_float_type type, int64_t start, int64_t count);
    /* out[i] = e4m3(x[start + i] / scale) */
    void (*quantize)(const void *x, smla_float_type type, int64_t start, int64_t count, float scale,
                     uint8_t *out);
    /* out[i] = e4m3(x[start + i] * factor) */
    void (*multiply)(const void *x, smla_float_type type, int64_t start, int64_t count,
                     float factor, uint8_t *out);
    /* amax[i] = the larger of amax[i] and smla_finite_abs(x[start + i]) */
    void (*raise_columns)(const void *x, smla_float_type type, int64_t start, int64_t count,
                          float *amax);
    /* The maxima of columns -> the factor of each column, and a descale per group of `width`
     * columns in a row. `amax` becomes anything. */
    void (*finish_groups)(float *amax, int64_t num_groups, int64_t width, float *factors,
                          float *descales);
    /* out[i] = e4m3(x[start + i] * factors[i]) */
    void (*multiply_columns)(const void *x, smla_float_type type, int64_t start, int64_t count,
                             const float *factors, uint8_t *out);
} smla_cache_isa;
