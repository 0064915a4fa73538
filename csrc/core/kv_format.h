/* kv_format.h: how one token lies in the cache, in box diagrams and in one table.
 *
 * A cached token is a key of 576 values: 512 NoPE values (the compressed latent, which is also the
 * value) and 64 RoPE values. In one format it is the 512 values alone. A page holds block_size
 * rows, one after another. The stride between pages is arbitrary.
 *
 * bfloat16, 1152 bytes
 *   byte 0                                                    1024             1152
 *        +-----------------------------------------------------+-----------------+
 *        | 512 x bf16  NoPE                                    | 64 x bf16  RoPE |
 *        +-----------------------------------------------------+-----------------+
 *
 * bfloat16, 1024 bytes: for models without RoPE, or whose value is the whole key
 *   byte 0                                                    1024
 *        +-----------------------------------------------------+
 *        | 512 x bf16                                          |
 *        +-----------------------------------------------------+
 *
 * fp8_ds_mla, 656 bytes
 *   byte 0                                   512               528              656
 *        +------------------------------------+-----------------+-----------------+
 *        | 512 x e4m3  NoPE                   | 4 x fp32 scale  | 64 x bf16  RoPE |
 *        +------------------------------------+-----------------+-----------------+
 *        value i of the NoPE part = e4m3[i] * scale[i / 128]; the RoPE part is stored as it is
 *
 * A format is one entry of the table smla_kv_formats, which has everything that differs between
 * formats. The check reads it, and finds the format of an array in it. The CPU's loaders and Python
 * read it, too, and CUDA's kernels read it at compile time (smla_row). A kernel has the set of
 * table entries that it serves. This header compiles as C and as CUDA.
 */
#pragma once

#include "core/dltensor.h"
#include "sparse_mla.h"

enum {
    SMLA_KV_LORA_RANK = 512,    /* latent values of a key, which are also its value */
    SMLA_QK_ROPE_HEAD_DIM = 64, /* RoPE values of a key */
    SMLA_HEAD_DIM = 576,        /* all values of a key */
    SMLA_SCALE_TILE = 128,      /* NoPE values per scale */
    SMLA_NUM_SCALE_TILES = 4,   /* 512 / 128 */
    SMLA_MAX_HEADS = 128,
    SMLA_MAX_SPLITS = 64,
    SMLA_SPLIT_ALIGN = 64, /* columns; the range of a split is a multiple of it */
};

typedef enum smla_nope_type {
    SMLA_NOPE_BF16 = 1,
    SMLA_NOPE_E4M3 = 2,
} smla_nope_type;

/* The entries of the table, in order. */
typedef enum smla_kv_row_number {
    SMLA_ROW_BFLOAT16,
    SMLA_ROW_BFLOAT16_512,
    SMLA_ROW_FP8_DS_MLA,
    SMLA_NUM_KV_FORMATS,
} smla_kv_row_number;

/* A set of table entries: one bit per entry. */
typedef uint32_t smla_kv_set;

#define SMLA_KV_SET(number) ((smla_kv_set)1 << (number))

typedef struct smla_kv_format_info {
    smla_kv_row_number number; /* index of the table entry */
    smla_kv_format format;
    const char *name; /* what users write as kv_cache_dtype */
    unsigned dtypes;  /* SMLA_DTYPE_: allowed element types of the array */
    smla_nope_type nope_type;
    int32_t head_dim;     /* values of a key and of a query */
    int32_t nope_dim;     /* values of the NoPE part, which comes first */
    int32_t rope_dim;     /* bf16 values of the RoPE part */
    int32_t value_dim;    /* values per head of out */
    int32_t row_bytes;    /* bytes per token */
    int32_t row_elements; /* last dimension of the cache array */
    int32_t alignment;    /* bytes; base and strides are multiples of it */
    int32_t num_scales;   /* fp32 scales per token, 0 = none */
    int32_t scale_tile;   /* values per scale */
    int32_t scale_offset; /* bytes */
    int32_t rope_offset;  /* bytes */
} smla_kv_format_info;

#ifdef __cplusplus
constexpr
#else
static const
#endif
    smla_kv_format_info smla_kv_formats[SMLA_NUM_KV_FORMATS] = {
        {.number = SMLA_ROW_BFLOAT16,
         .format = SMLA_KV_BFLOAT16,
         .name = "bfloat16",
         .dtypes = SMLA_DTYPE_BF16,
         .nope_type = SMLA_NOPE_BF16,
         .head_dim = 576,
         .nope_dim = 512,
         .rope_dim = 64,
         .value_dim = 512,
         .row_bytes = 1152,
         .row_elements = 576,
         .alignment = 2,
         .num_scales = 0,
         .scale_tile = 0,
         .scale_offset = 0,
         .rope_offset = 1024},
        {.number = SMLA_ROW_BFLOAT16_512,
         .format = SMLA_KV_BFLOAT16,
         .name = "bfloat16",
         .dtypes = SMLA_DTYPE_BF16,
         .nope_type = SMLA_NOPE_BF16,
         .head_dim = 512,
         .nope_dim = 512,
         .rope_dim = 0,
         .value_dim = 512,
         .row_bytes = 1024,
         .row_elements = 512,
         .alignment = 2,
         .num_scales = 0,
         .scale_tile = 0,
         .scale_offset = 0,
         .rope_offset = 1024},
        {.number = SMLA_ROW_FP8_DS_MLA,
         .format = SMLA_KV_FP8_DS_MLA,
         .name = "fp8_ds_mla",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .head_dim = 576,
         .nope_dim = 512,
         .rope_dim = 64,
         .value_dim = 512,
         .row_bytes = 656,
         .row_elements = 656,
         .alignment = 16,
         .num_scales = 4,
         .scale_tile = 128,
         .scale_offset = 512,
         .rope_offset = 528},
};

#ifdef __cplusplus
/* How many table entries of a set have a RoPE part, or scales: those whose `fact` is not 0. */
constexpr int
smla_count_rows(smla_kv_set rows, int32_t smla_kv_format_info::*fact)
{
    int count = 0;
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        count += (rows & SMLA_KV_SET(i)) != 0 && smla_kv_formats[i].*fact != 0;
    }
    return count;
}

/* Compile-time facts of a kernel that serves several table entries. The formats of one call either
 * all have a RoPE part, or none has. */
template <smla_kv_set ROWS> struct smla_rows {
    static constexpr bool HAVE_ROPE = smla_count_rows(ROWS, &smla_kv_format_info::rope_dim) != 0;
    static constexpr bool HAVE_SCALES =
        smla_count_rows(ROWS, &smla_kv_format_info::num_scales) != 0;
};

/* Compile-time facts of one table entry. */
template <int NUMBER> struct smla_row {
    static constexpr smla_kv_format_info INFO = smla_kv_formats[NUMBER];
    static constexpr bool IS_E4M3 = INFO.nope_type == SMLA_NOPE_E4M3;
    static constexpr bool HAS_ROPE = INFO.rope_dim != 0;
    static constexpr int ROW_BYTES = INFO.row_bytes;
    static constexpr int SCALE_OFFSET = INFO.scale_offset;
    static constexpr int ROPE_OFFSET = INFO.rope_offset;
};
#endif

/* The first table entry of a format; NULL if `format` is not one. */
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
