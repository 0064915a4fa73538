/* kv_format.h: how one token lies in the cache, in box diagrams and in one table.
 *
 * A cached token is a key of 576 values: 512 NoPE values (the compressed latent, which is also the
 * value) and 64 RoPE values. In formats of 512 values all of them are the value, and the last 64
 * may be RoPE values. A page holds block_size tokens. The stride between pages is arbitrary.
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
 * fp8_token, 656 bytes: the same, and its four scales are one, that of all 512 values
 *
 * fp8_v4, 584 bytes, of which 576 and 8 lie apart (split pages, see below)
 *   data   0                                    448             576
 *          +-------------------------------------+---------------+
 *          | 448 x e4m3  NoPE                    | 64 x bf16 RoPE|
 *          +-------------------------------------+---------------+
 *   scales 0                              7   8
 *          +------------------------------+---+
 *          | 7 x UE8M0, one per 64 values | 0 |
 *          +------------------------------+---+
 *
 * fp8_e4m3, 512 bytes: 512 x e4m3, and one fp32 kv_scale for the whole cache, which is the caller's
 *
 * fp8_e4m3, 576 bytes: 512 x e4m3 NoPE, then 64 x e4m3 RoPE, and one kv_scale for both. Codes are
 *        x / kv_scale, as vLLM writes them; in rows of 512 bytes they are x * (1 / kv_scale)
 *
 * fp8_v41, 528 bytes, and fp8_v41_split, the same bytes in split pages
 *   byte 0                                             512                 528
 *        +----------------------------------------------+-------------------+
 *        | 512 x e4m3                                   | 16 x UE8M0, per 32|
 *        +----------------------------------------------+-------------------+
 *
 * fp4_v41, 288 bytes, and fp4_v41_split, the same bytes in split pages
 *   byte 0                      256                288
 *        +------------------------+------------------+
 *        | 512 x e2m1             | 32 x e4m3, per 16|    two values per byte, the first in the
 *        +------------------------+------------------+    lower half
 *
 * fp8_nope, 528 bytes: fp8_ds_mla without its RoPE part
 *
 * The indexer's keys have 128 values, and lie in split pages:
 *   fp8_index, 132 bytes     data: 128 x e4m3      scales: 1 x fp32
 *   mxfp4_index, 68 bytes    data: 128 x e2m1      scales: 4 x UE8M0, one per 32 values
 *
 * UE8M0 is the exponent field of a power of two: byte e means 2^(e - 127), and 255 is NaN.
 *
 * A split page holds the data of all its tokens, then their scales, then padding:
 *   byte 0                         n * data                    n * (data + scale)       page stride
 *        +------+------+----------+----------+----------+-----+--------------------+
 *        | data | data | ...      | scales   | scales   | ... | padding            |
 *        +------+------+----------+----------+----------+-----+--------------------+
 *          token 0      1            token 0    token 1            n = block_size
 *
 * A format is one entry of the table smla_kv_formats, which has everything that differs between
 * formats. The check reads it, and finds the format of an array in it. The CPU's loaders and Python
 * read it, too, and CUDA's kernels read it at compile time (smla_row). A kernel has the set of
 * table entries that it serves. This header compiles as C and as CUDA.
 */
#pragma once

#include "core/dltensor.h"
#include "sparse_mla/cache.h"

enum {
    SMLA_KV_LORA_RANK = 512,    /* latent values of a key, which are also its value */
    SMLA_QK_ROPE_HEAD_DIM = 64, /* RoPE values of a key */
    SMLA_HEAD_DIM = 576,        /* all values of a key */
    SMLA_INDEX_HEAD_DIM = 128,  /* values of a key of the indexer */
    SMLA_SCALE_TILE = 128,      /* NoPE values per scale of fp8_ds_mla */
    SMLA_NUM_SCALE_TILES = 4,   /* 512 / 128 */
    SMLA_MAX_ROW_SCALES = 32,   /* scales per token of any format */
    SMLA_MAX_HEADS = 128,
    SMLA_MAX_SPLITS = 64,
    SMLA_SPLIT_ALIGN = 64, /* columns; the range of a split is a multiple of it */
};

typedef enum smla_nope_type {
    SMLA_NOPE_BF16 = 1,
    SMLA_NOPE_E4M3 = 2,
    SMLA_NOPE_E2M1 = 3, /* two values per byte */
} smla_nope_type;

typedef enum smla_scale_type {
    SMLA_SCALE_NONE = 0,
    SMLA_SCALE_FP32 = 1,
    SMLA_SCALE_UE8M0 = 2,
    SMLA_SCALE_E4M3 = 3,
    SMLA_SCALE_CACHE = 4, /* one fp32 for the whole cache, which is not in its rows */
} smla_scale_type;

typedef enum smla_page_layout {
    SMLA_PAGE_ROWS = 0,  /* the scales of a token lie in its row */
    SMLA_PAGE_SPLIT = 1, /* the scales of all tokens of a page lie behind their data */
} smla_page_layout;

/* The entries of the table, in order, each as X(number). Code that is compiled once for every
 * format names them through this list. */
#define SMLA_EACH_KV_ROW(X)   \
    X(SMLA_ROW_BFLOAT16)      \
    X(SMLA_ROW_BFLOAT16_512)  \
    X(SMLA_ROW_FP8_DS_MLA)    \
    X(SMLA_ROW_FP8_V4)        \
    X(SMLA_ROW_FP8_E4M3)      \
    X(SMLA_ROW_FP8_E4M3_576)  \
    X(SMLA_ROW_FP8_INDEX)     \
    X(SMLA_ROW_MXFP4_INDEX)   \
    X(SMLA_ROW_FP8_V41)       \
    X(SMLA_ROW_FP8_V41_SPLIT) \
    X(SMLA_ROW_FP4_V41)       \
    X(SMLA_ROW_FP4_V41_SPLIT) \
    X(SMLA_ROW_FP8_NOPE)      \
    X(SMLA_ROW_FP8_TOKEN)

#define SMLA_NAME_KV_ROW(number) number,
typedef enum smla_kv_row_number {
    SMLA_EACH_KV_ROW(SMLA_NAME_KV_ROW) SMLA_NUM_KV_FORMATS
} smla_kv_row_number;
#undef SMLA_NAME_KV_ROW

/* A set of table entries: one bit per entry. */
typedef uint32_t smla_kv_set;

#define SMLA_KV_SET(number) ((smla_kv_set)1 << (number))

/* All entries. */
#define SMLA_KV_ALL (SMLA_KV_SET(SMLA_NUM_KV_FORMATS) - 1)

/* Entries that concat_and_cache_mla writes: their RoPE values, if any, come from an array of their
 * own. */
#define SMLA_KV_CONCAT                                                     \
    (SMLA_KV_SET(SMLA_ROW_BFLOAT16) | SMLA_KV_SET(SMLA_ROW_BFLOAT16_512) | \
     SMLA_KV_SET(SMLA_ROW_FP8_DS_MLA) | SMLA_KV_SET(SMLA_ROW_FP8_E4M3) |   \
     SMLA_KV_SET(SMLA_ROW_FP8_E4M3_576) | SMLA_KV_SET(SMLA_ROW_FP8_NOPE) | \
     SMLA_KV_SET(SMLA_ROW_FP8_TOKEN))

/* Entries that attention serves in the main list. A new format is in no set of its own accord: its
 * author adds it where the kernels can read it. */
#define SMLA_KV_ATTENTION                                                  \
    (SMLA_KV_SET(SMLA_ROW_BFLOAT16) | SMLA_KV_SET(SMLA_ROW_BFLOAT16_512) | \
     SMLA_KV_SET(SMLA_ROW_FP8_DS_MLA) | SMLA_KV_SET(SMLA_ROW_FP8_V4) |     \
     SMLA_KV_SET(SMLA_ROW_FP8_E4M3) | SMLA_KV_SET(SMLA_ROW_FP8_E4M3_576) | \
     SMLA_KV_SET(SMLA_ROW_FP8_V41) | SMLA_KV_SET(SMLA_ROW_FP8_V41_SPLIT) | \
     SMLA_KV_SET(SMLA_ROW_FP8_NOPE))

/* Entries that dense attention serves. */
#define SMLA_KV_DENSE (SMLA_KV_ATTENTION | SMLA_KV_SET(SMLA_ROW_FP8_TOKEN))

/* Entries that attention serves in the extra list: all but keys of the indexer. */
#define SMLA_KV_EXTRA \
    (SMLA_KV_ATTENTION | SMLA_KV_SET(SMLA_ROW_FP4_V41) | SMLA_KV_SET(SMLA_ROW_FP4_V41_SPLIT))

typedef struct smla_kv_format_info {
    smla_kv_row_number number; /* index of the table entry */
    smla_kv_format format;
    const char *name; /* what users write as kv_cache_dtype */
    unsigned dtypes;  /* SMLA_DTYPE_: allowed element types of the array */
    smla_nope_type nope_type;
    smla_scale_type scale_type;
    smla_page_layout layout;
    int32_t head_dim;     /* values of a key and of a query */
    int32_t nope_dim;     /* values of the NoPE part, which comes first */
    int32_t rope_dim;     /* values of the RoPE part: bf16, unless smla_has_rope_codes */
    int32_t value_dim;    /* values per head of out; 0 for keys of the indexer */
    int32_t row_bytes;    /* bytes per token: data_bytes + scale_bytes */
    int32_t data_bytes;   /* bytes of the values */
    int32_t scale_bytes;  /* bytes of the scales, with padding */
    int32_t row_elements; /* last dimension of the cache array */
    int32_t alignment;    /* bytes; base and strides are multiples of it */
    int32_t num_scales;   /* scales per token, 0 = none */
    int32_t scale_tile;   /* values per scale */
    int32_t scale_offset; /* bytes; 0 in split pages */
    int32_t rope_offset;  /* bytes */
    /* Scales that are powers of two are those of an amax of at least this. 0: other scales. */
    float least_amax;
    /* All scales of a row are equal. Such rows are rows of fp8_ds_mla as well: they are read as
     * those (smla_row_as_read), and only their name tells which are written. */
    bool has_one_scale;
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
         .scale_type = SMLA_SCALE_NONE,
         .layout = SMLA_PAGE_ROWS,
         .head_dim = 576,
         .nope_dim = 512,
         .rope_dim = 64,
         .value_dim = 512,
         .row_bytes = 1152,
         .data_bytes = 1152,
         .scale_bytes = 0,
         .row_elements = 576,
         .alignment = 2,
         .num_scales = 0,
         .scale_tile = 0,
         .scale_offset = 0,
         .rope_offset = 1024,
         .least_amax = 0,
         .has_one_scale = false},
        {.number = SMLA_ROW_BFLOAT16_512,
         .format = SMLA_KV_BFLOAT16,
         .name = "bfloat16",
         .dtypes = SMLA_DTYPE_BF16,
         .nope_type = SMLA_NOPE_BF16,
         .scale_type = SMLA_SCALE_NONE,
         .layout = SMLA_PAGE_ROWS,
         .head_dim = 512,
         .nope_dim = 512,
         .rope_dim = 0,
         .value_dim = 512,
         .row_bytes = 1024,
         .data_bytes = 1024,
         .scale_bytes = 0,
         .row_elements = 512,
         .alignment = 2,
         .num_scales = 0,
         .scale_tile = 0,
         .scale_offset = 0,
         .rope_offset = 1024,
         .least_amax = 0,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP8_DS_MLA,
         .format = SMLA_KV_FP8_DS_MLA,
         .name = "fp8_ds_mla",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .scale_type = SMLA_SCALE_FP32,
         .layout = SMLA_PAGE_ROWS,
         .head_dim = 576,
         .nope_dim = 512,
         .rope_dim = 64,
         .value_dim = 512,
         .row_bytes = 656,
         .data_bytes = 640,
         .scale_bytes = 16,
         .row_elements = 656,
         .alignment = 16,
         .num_scales = 4,
         .scale_tile = 128,
         .scale_offset = 512,
         .rope_offset = 528,
         .least_amax = 0,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP8_V4,
         .format = SMLA_KV_FP8_V4,
         .name = "fp8_v4",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .scale_type = SMLA_SCALE_UE8M0,
         .layout = SMLA_PAGE_SPLIT,
         .head_dim = 512,
         .nope_dim = 448,
         .rope_dim = 64,
         .value_dim = 512,
         .row_bytes = 584,
         .data_bytes = 576,
         .scale_bytes = 8,
         .row_elements = 584,
         .alignment = 8,
         .num_scales = 7,
         .scale_tile = 64,
         .scale_offset = 0,
         .rope_offset = 448,
         .least_amax = 1e-4f,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP8_E4M3,
         .format = SMLA_KV_FP8_E4M3,
         .name = "fp8_e4m3",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .scale_type = SMLA_SCALE_CACHE,
         .layout = SMLA_PAGE_ROWS,
         .head_dim = 512,
         .nope_dim = 512,
         .rope_dim = 0,
         .value_dim = 512,
         .row_bytes = 512,
         .data_bytes = 512,
         .scale_bytes = 0,
         .row_elements = 512,
         .alignment = 16,
         .num_scales = 0,
         .scale_tile = 0,
         .scale_offset = 0,
         .rope_offset = 512,
         .least_amax = 0,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP8_E4M3_576,
         .format = SMLA_KV_FP8_E4M3,
         .name = "fp8_e4m3",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .scale_type = SMLA_SCALE_CACHE,
         .layout = SMLA_PAGE_ROWS,
         .head_dim = 576,
         .nope_dim = 512,
         .rope_dim = 64,
         .value_dim = 512,
         .row_bytes = 576,
         .data_bytes = 576,
         .scale_bytes = 0,
         .row_elements = 576,
         .alignment = 16,
         .num_scales = 0,
         .scale_tile = 0,
         .scale_offset = 0,
         .rope_offset = 512,
         .least_amax = 0,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP8_INDEX,
         .format = SMLA_KV_FP8_INDEX,
         .name = "fp8_index",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .scale_type = SMLA_SCALE_FP32,
         .layout = SMLA_PAGE_SPLIT,
         .head_dim = 128,
         .nope_dim = 128,
         .rope_dim = 0,
         .value_dim = 0,
         .row_bytes = 132,
         .data_bytes = 128,
         .scale_bytes = 4,
         .row_elements = 132,
         .alignment = 4,
         .num_scales = 1,
         .scale_tile = 128,
         .scale_offset = 0,
         .rope_offset = 128,
         .least_amax = 1e-4f,
         .has_one_scale = false},
        {.number = SMLA_ROW_MXFP4_INDEX,
         .format = SMLA_KV_MXFP4_INDEX,
         .name = "mxfp4_index",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E2M1,
         .scale_type = SMLA_SCALE_UE8M0,
         .layout = SMLA_PAGE_SPLIT,
         .head_dim = 128,
         .nope_dim = 128,
         .rope_dim = 0,
         .value_dim = 0,
         .row_bytes = 68,
         .data_bytes = 64,
         .scale_bytes = 4,
         .row_elements = 68,
         .alignment = 4,
         .num_scales = 4,
         .scale_tile = 32,
         .scale_offset = 0,
         .rope_offset = 64,
         .least_amax = 6 * 0x1p-126f,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP8_V41,
         .format = SMLA_KV_FP8_V41,
         .name = "fp8_v41",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .scale_type = SMLA_SCALE_UE8M0,
         .layout = SMLA_PAGE_ROWS,
         .head_dim = 512,
         .nope_dim = 512,
         .rope_dim = 0,
         .value_dim = 512,
         .row_bytes = 528,
         .data_bytes = 512,
         .scale_bytes = 16,
         .row_elements = 528,
         .alignment = 16,
         .num_scales = 16,
         .scale_tile = 32,
         .scale_offset = 512,
         .rope_offset = 528,
         .least_amax = 1e-4f,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP8_V41_SPLIT,
         .format = SMLA_KV_FP8_V41_SPLIT,
         .name = "fp8_v41_split",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .scale_type = SMLA_SCALE_UE8M0,
         .layout = SMLA_PAGE_SPLIT,
         .head_dim = 512,
         .nope_dim = 512,
         .rope_dim = 0,
         .value_dim = 512,
         .row_bytes = 528,
         .data_bytes = 512,
         .scale_bytes = 16,
         .row_elements = 528,
         .alignment = 16,
         .num_scales = 16,
         .scale_tile = 32,
         .scale_offset = 0,
         .rope_offset = 512,
         .least_amax = 1e-4f,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP4_V41,
         .format = SMLA_KV_FP4_V41,
         .name = "fp4_v41",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E2M1,
         .scale_type = SMLA_SCALE_E4M3,
         .layout = SMLA_PAGE_ROWS,
         .head_dim = 512,
         .nope_dim = 512,
         .rope_dim = 0,
         .value_dim = 512,
         .row_bytes = 288,
         .data_bytes = 256,
         .scale_bytes = 32,
         .row_elements = 288,
         .alignment = 16,
         .num_scales = 32,
         .scale_tile = 16,
         .scale_offset = 256,
         .rope_offset = 288,
         .least_amax = 0,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP4_V41_SPLIT,
         .format = SMLA_KV_FP4_V41_SPLIT,
         .name = "fp4_v41_split",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E2M1,
         .scale_type = SMLA_SCALE_E4M3,
         .layout = SMLA_PAGE_SPLIT,
         .head_dim = 512,
         .nope_dim = 512,
         .rope_dim = 0,
         .value_dim = 512,
         .row_bytes = 288,
         .data_bytes = 256,
         .scale_bytes = 32,
         .row_elements = 288,
         .alignment = 16,
         .num_scales = 32,
         .scale_tile = 16,
         .scale_offset = 0,
         .rope_offset = 256,
         .least_amax = 0,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP8_NOPE,
         .format = SMLA_KV_FP8_NOPE,
         .name = "fp8_nope",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .scale_type = SMLA_SCALE_FP32,
         .layout = SMLA_PAGE_ROWS,
         .head_dim = 512,
         .nope_dim = 512,
         .rope_dim = 0,
         .value_dim = 512,
         .row_bytes = 528,
         .data_bytes = 512,
         .scale_bytes = 16,
         .row_elements = 528,
         .alignment = 16,
         .num_scales = 4,
         .scale_tile = 128,
         .scale_offset = 512,
         .rope_offset = 528,
         .least_amax = 0,
         .has_one_scale = false},
        {.number = SMLA_ROW_FP8_TOKEN,
         .format = SMLA_KV_FP8_TOKEN,
         .name = "fp8_token",
         .dtypes = SMLA_DTYPE_BYTES,
         .nope_type = SMLA_NOPE_E4M3,
         .scale_type = SMLA_SCALE_FP32,
         .layout = SMLA_PAGE_ROWS,
         .head_dim = 576,
         .nope_dim = 512,
         .rope_dim = 64,
         .value_dim = 512,
         .row_bytes = 656,
         .data_bytes = 640,
         .scale_bytes = 16,
         .row_elements = 656,
         .alignment = 16,
         .num_scales = 4,
         .scale_tile = 128,
         .scale_offset = 512,
         .rope_offset = 528,
         .least_amax = 0,
         .has_one_scale = true},
};

/* Whether the RoPE values of a row are codes, too: one scale of the cache counts for all values. */
#ifdef __cplusplus
constexpr
#else
static inline
#endif
    bool
    smla_has_rope_codes(const smla_kv_format_info *format)
{
    return format->rope_dim != 0 && format->scale_type == SMLA_SCALE_CACHE;
}

#ifdef __cplusplus
/* How many table entries of a set have keys that are longer than their values. */
constexpr int
smla_count_rope_rows(smla_kv_set rows)
{
    int count = 0;
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        count += (rows & SMLA_KV_SET(i)) != 0 &&
                 smla_kv_formats[i].head_dim > smla_kv_formats[i].value_dim;
    }
    return count;
}

/* How many table entries of a set have scales that are one fp32 for 128 values or more. */
constexpr int
smla_count_scaled_rows(smla_kv_set rows)
{
    int count = 0;
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        count +=
            (rows & SMLA_KV_SET(i)) != 0 && (smla_kv_formats[i].scale_type == SMLA_SCALE_FP32 ||
                                             smla_kv_formats[i].scale_type == SMLA_SCALE_CACHE);
    }
    return count;
}

/* Compile-time facts of a kernel that serves several table entries. The formats of one call either
 * all have a RoPE part, or none has. */
template <smla_kv_set ROWS> struct smla_rows {
    static constexpr bool HAVE_ROPE = smla_count_rope_rows(ROWS) != 0;
    static constexpr bool HAVE_SCALES = smla_count_scaled_rows(ROWS) != 0;
};

/* Compile-time facts of one table entry. */
template <int NUMBER> struct smla_row {
    static constexpr smla_kv_format_info INFO = smla_kv_formats[NUMBER];
    static constexpr bool IS_BF16 = INFO.nope_type == SMLA_NOPE_BF16;
    static constexpr bool IS_E4M3 = INFO.nope_type == SMLA_NOPE_E4M3;
    static constexpr bool HAS_ROPE = INFO.rope_dim != 0;
    static constexpr bool HAS_ROPE_CODES = smla_has_rope_codes(&INFO);
    static constexpr int ROW_BYTES = INFO.row_bytes;
    static constexpr int SCALE_OFFSET = INFO.scale_offset;
    static constexpr int ROPE_OFFSET = INFO.rope_offset;
};
#endif

/* The table entry by which a row is read. */
static inline const smla_kv_format_info *
smla_row_as_read(const smla_kv_format_info *row)
{
    return row->has_one_scale ? &smla_kv_formats[SMLA_ROW_FP8_DS_MLA] : row;
}

/* The table entry of a format for keys of `head_dim` values, among `rows`; NULL if none is. */
static inline const smla_kv_format_info *
smla_find_kv_row(int32_t format, int64_t head_dim, smla_kv_set rows)
{
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        if ((int32_t)row->format == format && row->head_dim == head_dim &&
            (rows & SMLA_KV_SET(i)) != 0) {
            return row;
        }
    }
    return NULL;
}

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
