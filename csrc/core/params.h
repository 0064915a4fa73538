/* params.h: what the params of several families are made of. params_<family>.h has those of a
 * family's operators, which its kernels read. All compile as C and as CUDA.
 *
 * A check turns the caller's args into params; the layers below it validate nothing again. Sizes
 * are counts. Strides are in elements of the pointed-to type unless the name ends in _bytes. Sizes
 * and strides are int64. Shapes use the letters of sparse_mla.h.
 */
#pragma once

#include <stdbool.h>

#include "core/dltensor.h"
#include "core/kv_format.h"
#include "core/numeric.h"

/* Where an operator runs: the device of its arrays, and the caller's stream on it. */
typedef struct smla_stream {
    int32_t device_id;
    void *handle; /* cudaStream_t; unused on the CPU */
} smla_stream;

/* A call of an operator: what its errors, its log and its launches need, whatever it computes.
 * Every params struct but attention's begins with it, and kernels do not read it. */
typedef struct smla_call {
    const char *op; /* the operator's name */
    smla_stream stream;
    const smla_kv_format_info *kv_format; /* the format of its cache; NULL: it has none */
} smla_call;

/* A paged cache. The token at `offset` of `page` has its row at base + page * page_stride_bytes +
 * offset * token_stride_bytes, and its scales at scales + page * page_stride_bytes + offset *
 * scale_token_stride_bytes. The format decides whether scales lie inside the row or after all rows
 * of the page. A flat array is one page. */
typedef struct smla_kv_view {
    uint8_t *base;
    int64_t num_pages;
    int64_t block_size;
    int64_t page_stride_bytes;
    int64_t token_stride_bytes;
    const smla_kv_format_info *format;
    uint8_t *scales; /* not used in formats without scales */
    int64_t scale_token_stride_bytes;
} smla_kv_view;

/* The cache row of a token, and its scales. */
typedef struct smla_kv_token {
    uint8_t *row;
    uint8_t *scales;
} smla_kv_token;

SMLA_HOST_DEVICE static inline smla_kv_token
smla_kv_token_at(const smla_kv_view *kv, int64_t page, int64_t offset)
{
    const int64_t start = page * kv->page_stride_bytes;
    return (smla_kv_token){kv->base + start + offset * kv->token_stride_bytes,
                           kv->scales + start + offset * kv->scale_token_stride_bytes};
}

static inline smla_kv_token
smla_kv_slot(const smla_kv_view *kv, int64_t slot)
{
    return smla_kv_token_at(kv, slot / kv->block_size, slot % kv->block_size);
}

static inline int64_t
smla_kv_num_slots(const smla_kv_view *kv)
{
    return kv->num_pages * kv->block_size;
}

typedef enum smla_float_type {
    SMLA_FLOAT_BF16 = 1,
    SMLA_FLOAT_FP16 = 2,
    SMLA_FLOAT_FP32 = 3,
    SMLA_FLOAT_E4M3 = 4,
} smla_float_type;

SMLA_HOST_DEVICE static inline int64_t
smla_float_bytes(smla_float_type type)
{
    return type == SMLA_FLOAT_FP32 ? 4 : type == SMLA_FLOAT_E4M3 ? 1 : 2;
}

/* A scale that a caller gives as a number, or as one fp32 in memory of the device. */
typedef struct smla_given_scale {
    const float *pointer; /* NULL: the scale is `value` */
    float value;
} smla_given_scale;

/* The scale, where its memory can be read. */
static inline float
smla_read_scale(const smla_given_scale *scale)
{
    return scale->pointer == NULL ? scale->value : *scale->pointer;
}

/* A block table, and the page size of the cache that it belongs to. */
typedef struct smla_page_table {
    const int32_t *block_table; /* [R, W] */
    int64_t stride_req;
    int64_t stride_block;
    int64_t num_blocks; /* W */
    int64_t block_size;
} smla_page_table;

enum { SMLA_V4_HEAD_DIM = 512 }; /* values of a head of DeepSeek V4; RoPE rotates the last 64 */
