/* kv_format.h: how one token lies in the cache. Box diagrams first, then one table.
 *
 * A cached token is a key of 576 values: 512 NoPE (the compressed latent, which is also the value)
 * and 64 RoPE. A page holds block_size rows, one after another; pages may be any stride apart.
 *
 * bfloat16, 1152 bytes
 *   byte 0                                                    1024             1152
 *        +-----------------------------------------------------+-----------------+
 *        | 512 x bf16  NoPE                                    | 64 x bf16  RoPE |
 *        +-----------------------------------------------------+-----------------+
 *
 * fp8_ds_mla, 656 bytes
 *   byte 0                                   512               528              656
 *        +------------------------------------+-----------------+-----------------+
 *        | 512 x e4m3  NoPE                   | 4 x fp32 scale  | 64 x bf16  RoPE |
 *        +------------------------------------+-----------------+-----------------+
 *        value i of the NoPE part = e4m3[i] * scale[i / 128]; the RoPE part is stored as it is
 *
 * A format is one row of smla_kv_formats and one loader per backend. Formats to come (V4: a scale
 * per 64 values, one exponent byte each, kept behind the rows of a page) change the table, not its
 * users: they read sizes and offsets from here. This header compiles as C and as CUDA.
 */
#ifndef SMLA_KV_FORMAT_H
#define SMLA_KV_FORMAT_H

#include "sparse_mla.h"

enum {
    SMLA_KV_LORA_RANK = 512,    /* NoPE values of a token, and the value size */
    SMLA_QK_ROPE_HEAD_DIM = 64, /* RoPE values */
    SMLA_HEAD_DIM = 576,        /* both: what a query is multiplied with */
    SMLA_SCALE_TILE = 128,      /* NoPE values per scale */
    SMLA_NUM_SCALE_TILES = 4,   /* 512 / 128 */
    SMLA_MAX_HEADS = 128,
    SMLA_MAX_SPLITS = 64,
    SMLA_SPLIT_ALIGN = 64, /* a split range is a multiple of this many columns */
};

typedef enum smla_nope_type {
    SMLA_NOPE_BF16 = 1,
    SMLA_NOPE_E4M3 = 2,
} smla_nope_type;

typedef struct smla_kv_format_info {
    smla_kv_format format;
    const char *name; /* what users write as kv_cache_dtype */
    smla_nope_type nope_type;
    int32_t row_bytes;    /* one token */
    int32_t row_elements; /* last dimension of the cache array */
    int32_t alignment;    /* of base and strides, in bytes */
    int32_t num_scales;   /* fp32 scales per token, 0 = none */
    int32_t scale_offset; /* bytes */
    int32_t rope_offset;  /* bytes */
} smla_kv_format_info;

static const smla_kv_format_info smla_kv_formats[] = {
    {.format = SMLA_KV_BFLOAT16,
     .name = "bfloat16",
     .nope_type = SMLA_NOPE_BF16,
     .row_bytes = 1152,
     .row_elements = 576,
     .alignment = 2,
     .num_scales = 0,
     .scale_offset = 0,
     .rope_offset = 1024},
    {.format = SMLA_KV_FP8_DS_MLA,
     .name = "fp8_ds_mla",
     .nope_type = SMLA_NOPE_E4M3,
     .row_bytes = 656,
     .row_elements = 656,
     .alignment = 16,
     .num_scales = 4,
     .scale_offset = 512,
     .rope_offset = 528},
};

enum { SMLA_NUM_KV_FORMATS = sizeof smla_kv_formats / sizeof smla_kv_formats[0] };

static inline const smla_kv_format_info *
smla_find_kv_format(int32_t format)
{
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        if ((int32_t)smla_kv_formats[i].format == format) {
            return &smla_kv_formats[i];
        }
    }
    return NULL;
}

#endif /* SMLA_KV_FORMAT_H */
