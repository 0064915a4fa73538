/* needs.h: what a call of attention may need of a kernel, beside its formats and sizes. A kernel
 * says which needs it serves. Where a device's best kernel does not serve a call, the log names the
 * first need that it lacks, in this order.
 */
#pragma once

#include "core/attention/params_attention.h"

/* name, words */
#define SMLA_NEEDS(X)                                     \
    X(RANGES, "a first column per token")                 \
    X(QUERY_SCALE, "an e4m3 query or a scale of logits")  \
    X(TYPES, "types")                                     \
    X(SIZES, "sizes of rows")                             \
    X(MASK, "mask")                                       \
    X(SOFTCAP, "softcap or scale")                        \
    X(UNALIGNED, "rows that are not aligned to 16 bytes") \
    X(NO_KEYS, "no keys")                                 \
    X(SPLITS, "num_splits")

#define SMLA_NEED_NUMBER(name, words) SMLA_NEED_##name,
#define SMLA_NEED_BIT(name, words)    SMLA_NEEDS_##name = 1 << SMLA_NEED_##name,

enum { SMLA_NEEDS(SMLA_NEED_NUMBER) SMLA_NUM_NEEDS };
enum { SMLA_NEEDS(SMLA_NEED_BIT) SMLA_NEEDS_ALL = (1 << SMLA_NUM_NEEDS) - 1 };

/* The sizes of multi-head attention that need nothing of a kernel. Of ragged keys, they are rows of
 * 192 or 128 values, in parts of whole segments, and 128 values. Of keys in pages, they are rows of
 * 64, 128 or 256 values, without a second part, and as many values. */
enum { SMLA_USUAL_VALUE_DIM = 128, SMLA_USUAL_SEGMENT = 64 };

static inline bool
smla_has_usual_sizes(const smla_attention_params *p)
{
    const int16_t *const dims = p->queries.dims;
    const int dim = dims[SMLA_NOPE] + dims[SMLA_PE];
    if (p->source == SMLA_KEYS_PAGED) {
        return (dim == 64 || dim == 128 || dim == 256) && p->kv.value_dim == dim &&
               dims[SMLA_PE] == 0;
    }
    return (dim == 192 || dim == 128) && p->kv.value_dim == SMLA_USUAL_VALUE_DIM &&
           dims[SMLA_NOPE] % SMLA_USUAL_SEGMENT == 0;
}

/* Whether rows begin at multiples of 16 bytes. Both strides are in elements of so many bytes. */
static inline bool
smla_is_aligned(const void *data, int64_t stride, int64_t other_stride, int64_t bytes)
{
    return ((uintptr_t)data | (uintptr_t)(stride * bytes) | (uintptr_t)(other_stride * bytes)) %
               16 ==
           0;
}

static inline bool
smla_are_queries_aligned(const smla_queries *queries)
{
    bool is_aligned = true;
    for (int i = 0; i < 2; i++) {
        const smla_head_rows *const rows = &queries->parts[i];
        is_aligned =
            is_aligned && smla_is_aligned(rows->data, rows->stride_token, rows->stride_head,
                                          smla_float_bytes(queries->type));
    }
    return is_aligned;
}

/* What a call needs, but for the splits that a caller gives. Kernels for lists take rows at any
 * address, and whether a tensor map describes ragged rows is for a launcher to say. A need depends
 * on types, sizes of a row, masks and strides, but not on a batch that fits a device, because
 * kernels differ in the bits of a row. */
static inline unsigned
smla_find_needs(const smla_attention_params *p)
{
    const smla_results *const results = &p->results;
    const smla_range_rule *const rule = &p->visible.rule;
    const bool has_softcap = p->logits.softcap != 0.0f;
    const bool is_aligned =
        smla_is_aligned(results->out, results->out_stride_token, results->out_stride_head,
                        smla_float_bytes((smla_float_type)results->out_type));
    if (!smla_has_lists(p)) {
        const bool is_pure = p->queries.type == p->kv.type && p->kv.type != SMLA_FLOAT_E4M3;
        const bool is_causal_or_open = rule->left < 0 && rule->right <= 0 && rule->chunk == 0;
        const bool is_usual = !has_softcap && p->logits.softmax_scale > 0.0;
        return (is_pure ? 0 : SMLA_NEEDS_TYPES) | (smla_has_usual_sizes(p) ? 0 : SMLA_NEEDS_SIZES) |
               (is_causal_or_open ? 0 : SMLA_NEEDS_MASK) | (is_usual ? 0 : SMLA_NEEDS_SOFTCAP) |
               (is_aligned ? 0 : SMLA_NEEDS_UNALIGNED) |
               (p->kv.num_keys == 0 || p->visible.reqs.num_reqs == 0 ? SMLA_NEEDS_NO_KEYS : 0);
    }
    const smla_key_list *const list = &p->keys.lists[0];
    const bool is_table = p->source == SMLA_KEYS_TABLE;
    const bool are_rows_aligned =
        is_aligned && smla_are_queries_aligned(&p->queries) &&
        smla_is_aligned(list->kv.base, list->kv.page_stride_bytes, list->kv.token_stride_bytes, 1);
    const bool has_scale = p->queries.type == SMLA_FLOAT_E4M3 || p->logits.q_scale.pointer != NULL;
    return (has_scale ? SMLA_NEEDS_QUERY_SCALE : 0) |
           (!is_table && smla_has_ranges(list) ? SMLA_NEEDS_RANGES : 0) |
           (has_softcap ? SMLA_NEEDS_SOFTCAP : 0) |
           (is_table && !are_rows_aligned ? SMLA_NEEDS_UNALIGNED : 0);
}
