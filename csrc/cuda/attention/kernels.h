/* kernels.h: what is known about the attention kernels, and what they leave to the combine kernel.
 * A kernel is one row of the table in kernels.c; its launcher stands at the foot of its .cu file.
 * Compiles as C and as CUDA.
 */
#pragma once

#include "cuda/host/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Rows ---------------------------------------------------------------------------------- */

/* What a kernel reads: the formats of all lists of its calls. */
enum {
    SMLA_ROWS_FP8 = SMLA_KV_SET(SMLA_ROW_FP8_DS_MLA),
    SMLA_ROWS_BF16 = SMLA_KV_SET(SMLA_ROW_BFLOAT16),
    SMLA_ROWS_BF16_512 = SMLA_KV_SET(SMLA_ROW_BFLOAT16_512),
    SMLA_ROWS_MIXED = SMLA_ROWS_FP8 | SMLA_ROWS_BF16, /* one list of each */
    /* Not a format: lists with dense columns or a `begin` (smla_has_ranges). */
    SMLA_ROWS_RANGED = SMLA_KV_SET(SMLA_NUM_KV_FORMATS),
};

/* `cut_bytes` as in smla_attention_run; most kernels cut no rows. */
typedef cudaError_t smla_attention_launcher(const smla_attention_params *params, int64_t cut_bytes);

enum { SMLA_PORTABLE_ARCH = 80 }; /* its kernels run on newer devices, too */

typedef struct smla_attention_kernel {
    int32_t arch;          /* the compute capability, major * 10 + minor */
    smla_kv_set formats;   /* that it serves */
    int32_t min_heads;     /* of the call */
    int32_t heads_per_cta; /* more heads are more CTAs, which gather the same rows */
    int32_t max_columns;   /* of a split, of both lists; 0: any, and calls without splits */
    int32_t block_columns; /* keys that a CTA takes at once */
    int32_t block_cost;    /* time of such a block, 16 with the most heads */
    int32_t cta_cost;      /* of starting and ending a CTA, likewise */
    bool leaves_halves;    /* partial rows of f16 */
    bool leaves_room;      /* beside its CTA, for some of the combine kernel's */
    int32_t ctas_per_sm;   /* at most; for the split schedule */
    int32_t shared_bytes;  /* of one CTA */
    const char *name;      /* source file and variant */
    smla_attention_launcher *launch;
} smla_attention_kernel;

/* A row without a launcher stands behind the last. */
extern const smla_attention_kernel smla_attention_kernels[];

/* `columns`: of a split, of both lists. */
bool smla_fits_kernel(const smla_attention_kernel *kernel, const smla_cuda_device *device,
                      smla_kv_set formats, int64_t num_heads, int num_splits, int64_t columns);

/* The first row that fits, NULL for none. */
const smla_attention_kernel *smla_find_kernel(const smla_cuda_device *device, smla_kv_set formats,
                                              int64_t num_heads, int num_splits, int64_t columns);

/* The row of a call that is not split. */
const smla_attention_kernel *smla_find_whole_kernel(const smla_cuda_device *device,
                                                    smla_kv_set formats, int64_t num_heads);

/* Of a main list and an extra one, which may be absent (NULL). */
static inline smla_kv_set
smla_join_formats(const smla_kv_format_info *main, const smla_kv_format_info *extra)
{
    return SMLA_KV_SET(main->number) | (extra == NULL ? 0 : SMLA_KV_SET(extra->number));
}

enum { SMLA_FORMATS_TEXT = 64 };

/* Their names: "fp8_ds_mla with bfloat16". */
void smla_describe_formats(smla_kv_set formats, char text[SMLA_FORMATS_TEXT]);

/* The rows in words, for the error of a miss; cut where they do not fit. */
void smla_describe_kernels(char *text, size_t size);

enum { SMLA_RESERVED_SHARED_BYTES = 1024 }; /* of every CTA, by the driver */

enum {
    SMLA_SM_REGISTERS = 65536,
    SMLA_ROOM_REGISTERS = 16384, /* of an SM, that attention leaves to the combine kernel */
    SMLA_COMBINE_REGISTERS = 64, /* of a thread of the combine kernel, for halves in 32 splits */
};

/* Threads of a CTA of the combine kernel that folds a row of halves. */
#define SMLA_COMBINE_THREADS(splits) ((splits) <= 8 ? 64 : (splits) <= 16 ? 128 : 256)

/* Such CTAs that an SM has registers for. */
#define SMLA_COMBINE_CTAS(registers, splits) \
    ((registers) / SMLA_COMBINE_REGISTERS / SMLA_COMBINE_THREADS(splits))

/* Whether a kernel that leaves room leaves enough for the combine kernel's CTAs, one per row of
 * out: they come early, and wait beside those of attention. */
static inline bool
smla_fits_beside(int64_t num_ctas, int64_t num_rows, int num_splits, int num_sms)
{
    return num_splits <= 32 && num_ctas <= num_sms &&
           num_rows <= num_sms * SMLA_COMBINE_CTAS(SMLA_ROOM_REGISTERS, num_splits);
}

enum {
    SMLA_SM80_KEYS = 32,  /* keys of a block */
    SMLA_SM80_GROUPS = 4, /* of warps, that cut the 576 dimensions of a score among them */
};

/* Versions of the weights in shared memory: one per scale tile, or one. */
#define SMLA_SM80_VERSIONS(formats) ((formats) & SMLA_ROWS_FP8 ? SMLA_NUM_SCALE_TILES : 1)

/* CTAs that an SM has registers for: the more heads, the more sums each thread holds. */
#define SMLA_SM80_CTAS_PER_SM(heads) ((heads) == 16 ? 2 : 1)

/* Shared memory of attention_sm80.cu: query and keys, weights, scores, scales, masks, factors and
 * rows. */
#define SMLA_SM80_SHARED_BYTES(heads, formats)                                                     \
    (((heads) + SMLA_SM80_KEYS) * SMLA_HEAD_DIM * 2 +                                              \
     SMLA_SM80_VERSIONS(formats) * (heads) * SMLA_SM80_KEYS * 2 +                                  \
     SMLA_SM80_GROUPS * (heads) * SMLA_SM80_KEYS * 4 + SMLA_NUM_SCALE_TILES * SMLA_SM80_KEYS * 4 + \
     SMLA_SM80_KEYS * 4 + ((heads) < 32 ? 32 : (heads)) * 4 + (heads) * 16)

/* Columns that a split has, of both lists. */
static inline int64_t
smla_columns_of_split(const smla_attention_params *params)
{
    const int64_t columns = smla_split_columns(params->lists[0].topk, params->num_splits);
    return params->num_lists == 1
               ? columns
               : columns + smla_split_columns(params->lists[1].topk, params->num_splits);
}

/* attention_sm90.cu: all that an SM has. */
enum {
    SMLA_SM90_SHARED_BYTES = 232448,
    SMLA_SM90_KEYS = 128, /* keys of a step */
};

/* attention_small_sm90.cu: keys of a CTA, which are in shared memory all at once. */
enum { SMLA_SM90_SMALL_KEYS = 256 };

/* attention_small_sm90.cu, calls with splits alone */
smla_attention_launcher smla_attend_sm90_small_32;
smla_attention_launcher smla_attend_sm90_small_16;

/* attention_sm90.cu */
smla_attention_launcher smla_attend_sm90_fp8_64;
smla_attention_launcher smla_attend_sm90_fp8_32;
smla_attention_launcher smla_attend_sm90_fp8_16;

/* attention_bf16_sm90.cu */
smla_attention_launcher smla_attend_sm90_bf16_64;
smla_attention_launcher smla_attend_sm90_bf16_512_64;

/* attention_sm80.cu */
smla_attention_launcher smla_attend_sm80_fp8_64;
smla_attention_launcher smla_attend_sm80_fp8_32;
smla_attention_launcher smla_attend_sm80_fp8_16;
smla_attention_launcher smla_attend_sm80_bf16_64;
smla_attention_launcher smla_attend_sm80_bf16_32;
smla_attention_launcher smla_attend_sm80_bf16_16;
smla_attention_launcher smla_attend_sm80_bf16_512_64;
smla_attention_launcher smla_attend_sm80_bf16_512_32;
smla_attention_launcher smla_attend_sm80_bf16_512_16;
smla_attention_launcher smla_attend_sm80_mixed_16;

/* combine.cu: folds the partial rows that the kernel left in the call's workspace. */
cudaError_t smla_cuda_launch_combine(const smla_attention_params *params,
                                     const smla_attention_kernel *kernel);

/* ---- Partial rows -------------------------------------------------------------------------- */

/* What the splits leave in the workspace, element (token * num_splits + split) * num_heads + head
 * of each array. The out of a row with sum 0 is not written.
 *
 * Hopper's kernels for FP8 rows leave halves, for what they write and the combine kernel reads is
 * what binds small batches: the row is 512 f16, then as float number SMLA_HALF_UNIT what they are
 * multiples of, and its sum is stored negative. Rows that they do again are of fp32, and so say
 * their sums. */
typedef struct smla_partial_rows {
    float *state; /* [T * splits * H][2]: max_log2, sum (softmax.cuh) */
    float *out;   /* [T * splits * H][512] */
} smla_partial_rows;

enum {
    SMLA_PARTIAL_ALIGN = 16, /* what vector accesses need */
    SMLA_HALF_UNIT = SMLA_KV_LORA_RANK / 2,
};

static inline int64_t
smla_partial_state_bytes(int64_t num_rows)
{
    const int64_t bytes = num_rows * 2 * (int64_t)sizeof(float);
    return (bytes + SMLA_PARTIAL_ALIGN - 1) / SMLA_PARTIAL_ALIGN * SMLA_PARTIAL_ALIGN;
}

static inline int64_t
smla_partial_bytes(int64_t num_rows)
{
    return smla_partial_state_bytes(num_rows) +
           num_rows * SMLA_KV_LORA_RANK * (int64_t)sizeof(float);
}

/* Bytes at the head of the workspace that its alignment wastes. */
static inline int64_t
smla_partial_padding(const void *workspace)
{
    return (int64_t)(-(uintptr_t)workspace % SMLA_PARTIAL_ALIGN);
}

static inline int64_t
smla_partial_num_rows(const smla_attention_params *params)
{
    return params->num_tokens * params->num_splits * params->num_heads;
}

static inline smla_partial_rows
smla_partials_of(const smla_attention_params *params)
{
    uint8_t *const memory = (uint8_t *)params->workspace + smla_partial_padding(params->workspace);
    smla_partial_rows partials;
    partials.state = (float *)memory;
    partials.out = (float *)(memory + smla_partial_state_bytes(smla_partial_num_rows(params)));
    return partials;
}

#ifdef __cplusplus
}
#endif
