/* kernels.h: the facts about attention kernels, and the partial rows for the combine kernel. Each
 * kernel is an entry of the table in kernels.c. Its launcher is at the end of its .cu file.
 * Compiles as C and as CUDA.
 */
#pragma once

#include "core/attention/params_attention.h"
#include "cuda/host/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Sets of formats. A kernel serves calls in which the formats of all lists are in its set. */
enum {
    SMLA_ROWS_FP8 = SMLA_KV_SET(SMLA_ROW_FP8_DS_MLA),
    SMLA_ROWS_V4 = SMLA_KV_SET(SMLA_ROW_FP8_V4),
    SMLA_ROWS_BF16 = SMLA_KV_SET(SMLA_ROW_BFLOAT16),
    SMLA_ROWS_BF16_512 = SMLA_KV_SET(SMLA_ROW_BFLOAT16_512),
    SMLA_ROWS_MIXED = SMLA_ROWS_FP8 | SMLA_ROWS_BF16, /* one list of each format */
    SMLA_ROWS_E4M3_576 = SMLA_KV_SET(SMLA_ROW_FP8_E4M3_576),
    SMLA_ROWS_ANY_576 = SMLA_ROWS_MIXED | SMLA_ROWS_E4M3_576, /* keys of 576 values in any format */
    /* keys of 512 values that are exact as bf16: no scale is an fp32 */
    SMLA_ROWS_EXACT_512 = SMLA_ROWS_BF16_512 | SMLA_ROWS_V4 | SMLA_KV_SET(SMLA_ROW_FP8_V41) |
        SMLA_KV_SET(SMLA_ROW_FP8_V41_SPLIT) | SMLA_KV_SET(SMLA_ROW_FP4_V41) |
        SMLA_KV_SET(SMLA_ROW_FP4_V41_SPLIT),
    /* keys of 512 values in any format */
    SMLA_ROWS_512 = SMLA_ROWS_EXACT_512 | SMLA_KV_SET(SMLA_ROW_FP8_E4M3) |
        SMLA_KV_SET(SMLA_ROW_FP8_NOPE),
};

/* What a launcher is told besides the call's params. */
typedef struct smla_attention_start {
    int64_t cut_bytes; /* as in smla_attention_run; most kernels cut no work items */
    smla_cuda_deferred
        *deferred;        /* keeps the launch for the combine kernel's; NULL: start at once */
    bool interleaves;     /* as in smla_attention_run; kernels for few columns never do */
    int64_t whole_tokens; /* the first tokens, which are not split where others are */
    struct smla_wide_header *wide; /* where rows are widened (wide_rows.h); NULL: they are not */
    int64_t tile_tokens;           /* as in smla_attention_run; only launchers of tiles read it */
} smla_attention_start;

typedef cudaError_t smla_attention_launcher(const smla_attention_params *params,
                                            const smla_attention_start *start);

enum { SMLA_PORTABLE_ARCH = 80 }; /* kernels of this row run on newer devices, too */

#define SMLA_UNSPLIT INT64_MAX /* columns per split of a call that is not split */

/* What the choice of a kernel depends on, beside the device. */
typedef struct smla_kernel_call {
    smla_kv_set formats; /* those of all lists; 0 with ragged keys */
    smla_key_source source;
    unsigned needs; /* SMLA_NEEDS_ bits */
    int64_t num_heads;
    int64_t columns; /* per split, in both lists */
    bool is_few;     /* a table's tiles, with their splits, fit the device at once */
} smla_kernel_call;

#define SMLA_SOURCE(source) (1u << SMLA_KEYS_##source)

typedef struct smla_attention_kernel {
    int32_t arch;          /* the compute capability, major * 10 + minor */
    unsigned sources;      /* SMLA_SOURCE bits of the keys that the kernel reads */
    smla_kv_set formats;   /* formats that the kernel serves */
    unsigned serves;       /* SMLA_NEEDS_ bits */
    int32_t min_heads;     /* fewest heads of a call */
    int32_t heads_per_cta; /* a call with more heads takes more CTAs, which gather the same rows */
    int32_t max_columns;   /* most columns per split, in both lists; 0: any, also unsplit calls */
    int32_t block_columns; /* keys that a CTA takes at once */
    int32_t block_cost;    /* time per block; 16 with the most heads */
    int32_t cta_cost;      /* time to start and end a CTA, in the same unit */
    int32_t start_cost;    /* how much longer a launch takes than one of the quickest kernels */
    bool leaves_halves;    /* its partial rows are f16 */
    bool leaves_room;      /* an SM has room for CTAs of the combine kernel beside its CTA */
    bool plans_itself;     /* on the device: cuts of tiles of rows, from the lengths of requests */
    bool is_few;           /* it serves calls that are, and no others */
    bool saves_waves;      /* schedule.c takes it only where a smaller kernel needs several waves */
    int32_t ctas_per_sm;   /* the most CTAs per SM; the split schedule uses it */
    int32_t shared_bytes;  /* bytes per CTA */
    const char *name;      /* source file and variant */
    const char *arch_text; /* what kernels() says of the row, as the next two */
    const char *rows_text;
    const char *heads_text;
    smla_attention_launcher *launch;
    /* For calls whose items are tiles of several query tokens; NULL: the kernel has none. Then
     * heads_per_cta counts the rows of a tile. */
    smla_attention_launcher *launch_tiles;
    const char *tiles_name;
} smla_attention_kernel;

/* The table ends with an entry without a launcher. */
extern const smla_attention_kernel smla_attention_kernels[];

/* The first source of keys that the kernel reads. */
static inline smla_key_source
smla_source_of(const smla_attention_kernel *kernel)
{
    return (smla_key_source)__builtin_ctz(kernel->sources);
}

/* Whether the kernel serves a call. */
bool smla_fits_kernel(const smla_attention_kernel *kernel, const smla_cuda_device *device,
                      const smla_kernel_call *call);

/* The first table entry that fits, or NULL. */
const smla_attention_kernel *smla_find_kernel(const smla_cuda_device *device,
                                              const smla_kernel_call *call);

/* What the device's best kernel for keys of this source lacks for the call, in words; NULL: that
 * kernel serves it. The best one is the first of the table that runs on the device and reads the
 * source, of those that read the call's formats if there are any. */
const char *smla_find_lack(const smla_cuda_device *device, const smla_kernel_call *call);

/* The formats of the main list and the extra list, which may be absent (NULL). */
static inline smla_kv_set
smla_join_formats(const smla_kv_format_info *main, const smla_kv_format_info *extra)
{
    return SMLA_KV_SET(main->number) | (extra == NULL ? 0 : SMLA_KV_SET(extra->number));
}

enum { SMLA_FORMATS_TEXT = 64 };

/* Writes the names of the formats, such as "fp8_ds_mla with bfloat16". */
void smla_describe_formats(smla_kv_set formats, char text[SMLA_FORMATS_TEXT]);

enum { SMLA_KERNELS_TEXT = 320 }; /* it leaves room for the rest of the error's text */

/* Describes the table, for the error when no kernel fits: "sm_80+ fp8_ds_mla; ...". Text beyond
 * SMLA_KERNELS_TEXT is cut off. */
void smla_describe_kernels(char text[SMLA_KERNELS_TEXT]);

enum { SMLA_RESERVED_SHARED_BYTES = 1024 }; /* reserved by the driver in every CTA */

enum {
    SMLA_SM_REGISTERS = 65536,
    SMLA_ROOM_REGISTERS = 16384, /* per SM; attention leaves them to the combine kernel */
    SMLA_COMBINE_REGISTERS = 64, /* per thread of the combine kernel: f16 rows of 32 splits */
};

/* Threads per CTA of the combine kernel, which folds one row of halves. */
#define SMLA_COMBINE_THREADS(splits) ((splits) <= 8 ? 64 : (splits) <= 16 ? 128 : 256)

/* How many CTAs of the combine kernel fit in that many registers. */
#define SMLA_COMBINE_CTAS(registers, splits) \
    ((registers) / SMLA_COMBINE_REGISTERS / SMLA_COMBINE_THREADS(splits))

/* Whether the CTAs of the combine kernel, one per row of out, fit beside a kernel that leaves room.
 * They start early, and wait beside the CTAs of attention. */
static inline bool
smla_fits_beside(int64_t num_ctas, int64_t num_rows, int num_splits, int num_sms)
{
    return num_splits <= 32 && num_ctas <= num_sms &&
           num_rows <= num_sms * SMLA_COMBINE_CTAS(SMLA_ROOM_REGISTERS, num_splits);
}

enum {
    SMLA_SM80_KEYS = 32,  /* keys per block */
    SMLA_SM80_GROUPS = 4, /* groups of warps, which share the 576 dimensions of a score */
};

/* Versions of the weights in shared memory: one per scale tile for FP8 rows, else one. */
#define SMLA_SM80_VERSIONS(formats) \
    (((formats) & SMLA_ROWS_FP8) != 0 || (formats) == SMLA_ROWS_512 ? SMLA_NUM_SCALE_TILES : 1)

/* CTAs per SM. Registers limit them: with more heads each thread holds more sums. */
#define SMLA_SM80_CTAS_PER_SM(heads) ((heads) == 16 ? 2 : 1)

/* Bytes of shared memory of attention_sm80.cu: query and keys, weights, scores, scales, masks,
 * factors and rows. */
#define SMLA_SM80_SHARED_BYTES(heads, formats)                                                     \
    (((heads) + SMLA_SM80_KEYS) * SMLA_HEAD_DIM * 2 +                                              \
     SMLA_SM80_VERSIONS(formats) * (heads) * SMLA_SM80_KEYS * 2 +                                  \
     SMLA_SM80_GROUPS * (heads) * SMLA_SM80_KEYS * 4 + SMLA_NUM_SCALE_TILES * SMLA_SM80_KEYS * 4 + \
     SMLA_SM80_KEYS * 4 + ((heads) < 32 ? 32 : (heads)) * 4 + (heads) * 16)

static inline bool
smla_is_split(const smla_attention_params *params)
{
    return params->results.num_splits > 1;
}

/* Columns per split, in both lists, if there are so many splits. */
static inline int64_t
smla_columns_of_split(const smla_attention_params *params, int num_splits)
{
    const int64_t columns = smla_split_columns(params->keys.lists[0].topk, num_splits);
    return params->keys.num_lists == 1
               ? columns
               : columns + smla_split_columns(params->keys.lists[1].topk, num_splits);
}

/* The kernels for Hopper take all shared memory that a CTA can have. */
enum {
    SMLA_SM90_SHARED_BYTES = 232448,
    SMLA_SM90_KEYS = 128, /* keys per step of attention_fp8_sm90.cu */
};

/* attention_small_sm90.cu: the most keys per CTA, which are all in shared memory at once. */
enum { SMLA_SM90_SMALL_KEYS = 256 };

/* attention_small_sm90.cu, for split calls only */
smla_attention_launcher smla_attend_sm90_small_64;
smla_attention_launcher smla_attend_sm90_small_32;
smla_attention_launcher smla_attend_sm90_small_16;
smla_attention_launcher smla_attend_sm90_small_v4_64;
smla_attention_launcher smla_attend_sm90_small_v4_32;
smla_attention_launcher smla_attend_sm90_small_v4_16;

/* attention_fp8_sm90.cu */
smla_attention_launcher smla_attend_sm90_fp8_64;
smla_attention_launcher smla_attend_sm90_fp8_32;
smla_attention_launcher smla_attend_sm90_fp8_16;
smla_attention_launcher smla_attend_sm90_v4_64;
smla_attention_launcher smla_attend_sm90_v4_32;
smla_attention_launcher smla_attend_sm90_v4_16;

/* attention_fp8_asked_sm90.cu: sm90_fp8_64 and sm90_v4_64 by way of widened rows. The other two are
 * its parts: attention_wide_sm90.cu, widen_rows_sm90.cu. */
smla_attention_launcher smla_attend_sm90_widened_64;
smla_attention_launcher smla_attend_sm90_wide_64;
cudaError_t smla_widen_rows_sm90(const smla_attention_params *params,
                                 struct smla_wide_header *header);

/* attention_fp8_dense_sm90.cu */
smla_attention_launcher smla_attend_sm90_fp8_dense_64;
smla_attention_launcher smla_attend_sm90_fp8_dense_32;
smla_attention_launcher smla_attend_sm90_fp8_dense_16;

/* attention_fp8_e4m3_sm90.cu */
smla_attention_launcher smla_attend_sm90_e4m3_dense_64;
smla_attention_launcher smla_attend_sm90_e4m3_dense_32;
smla_attention_launcher smla_attend_sm90_e4m3_dense_16;

/* attention_fp8_tiles_sm90.cu */
smla_attention_launcher smla_attend_sm90_fp8_tiles_64;
smla_attention_launcher smla_attend_sm90_fp8_tiles_32;
smla_attention_launcher smla_attend_sm90_fp8_tiles_16;

/* attention_e4m3_tiles_sm90.cu */
smla_attention_launcher smla_attend_sm90_e4m3_tiles_64;
smla_attention_launcher smla_attend_sm90_e4m3_tiles_32;
smla_attention_launcher smla_attend_sm90_e4m3_tiles_16;

/* attention_bf16_sm90.cu */
smla_attention_launcher smla_attend_sm90_bf16_64;
smla_attention_launcher smla_attend_sm90_bf16_512_64;
smla_attention_launcher smla_attend_sm90_512_64;

/* attention_dense_sm90.cu */
smla_attention_launcher smla_attend_sm90_dense_64;
smla_attention_launcher smla_attend_sm90_dense_512_64;

/* attention_few_sm90.cu, for tables of requests that have equally many query tokens */
smla_attention_launcher smla_attend_sm90_few_64;
smla_attention_launcher smla_attend_sm90_few_512_64;

/* mha_attention_sm90.cu, varlen_attention.cu: ragged keys. The former returns SMLA_NO_KERNEL where
 * no tensor map describes the rows. */
smla_attention_launcher smla_attend_sm90_mha;
smla_attention_launcher smla_attend_sm80_mha;

/* paged_attention_sm90.cu, paged_attention.cu: keys in pages. The former returns SMLA_NO_KERNEL
 * where rows are not aligned. */
smla_attention_launcher smla_attend_sm90_paged;
smla_attention_launcher smla_attend_sm80_paged;

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
smla_attention_launcher smla_attend_sm80_e4m3_576_64;
smla_attention_launcher smla_attend_sm80_e4m3_576_32;
smla_attention_launcher smla_attend_sm80_e4m3_576_16;
smla_attention_launcher smla_attend_sm80_any_576_16;
smla_attention_launcher smla_attend_sm80_512_64;
smla_attention_launcher smla_attend_sm80_512_32;
smla_attention_launcher smla_attend_sm80_512_16;

/* combine.cu: folds the partial rows that the kernel left in the call's workspace. If the kernel's
 * launch was deferred, this launch starts both. */
cudaError_t smla_cuda_launch_combine(const smla_attention_params *params,
                                     const smla_attention_kernel *kernel,
                                     smla_cuda_deferred *deferred);

/* ---- Partial rows -------------------------------------------------------------------------- */

/* The partial rows that splits leave in the workspace: element (token * num_splits + split) *
 * num_heads + head of each array, where whole tokens do not count. The out of a partial row with
 * sum 0 is not written.
 *
 * Hopper's kernels for FP8 rows leave halves, because the bytes of partial rows bind small batches.
 * Such a row is 512 f16, and then, as float number SMLA_HALF_UNIT, the unit that the f16 are
 * multiples of. Its sum is stored negative. Rows from the fallback of these kernels are fp32, and
 * their sums are positive. */
typedef struct smla_partial_rows {
    float *state; /* [T * splits * H][2]: max_log2, sum (softmax.cuh) */
    float *out;   /* [T * splits * H][512] */
} smla_partial_rows;

enum {
    SMLA_PARTIAL_ALIGN = 16, /* bytes, for vector accesses */
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

/* Bytes at the start of the workspace that alignment wastes. */
static inline int64_t
smla_partial_padding(const void *workspace)
{
    return (int64_t)(-(uintptr_t)workspace % SMLA_PARTIAL_ALIGN);
}

static inline int64_t
smla_partial_num_rows(const smla_attention_params *params, int64_t whole_tokens)
{
    return (params->queries.num_tokens - whole_tokens) * params->results.num_splits *
           params->queries.num_heads;
}

static inline smla_partial_rows
smla_partials_of(const smla_attention_params *params, int64_t whole_tokens)
{
    uint8_t *const memory =
        (uint8_t *)params->workspace.memory + smla_partial_padding(params->workspace.memory);
    smla_partial_rows partials;
    partials.state = (float *)memory;
    partials.out =
        (float *)(memory + smla_partial_state_bytes(smla_partial_num_rows(params, whole_tokens)));
    return partials;
}

/* ---- Cut tiles ----------------------------------------------------------------------------- */

enum { SMLA_MHA_TILE_ROWS = 128 }; /* rows of a tile of mha_attention_sm90.cu */

enum { SMLA_TILE_ROWS = 64 }; /* rows of a tile of attention_dense_sm90.cu */

enum { SMLA_TILE_TOKENS = 8 }; /* most query tokens of a tile of attention_fp8_tiles_sm90.cu */

/* A tile of a dense call whose parts have left partial rows, for combine_tiles.cu. */
typedef struct smla_cut_tile {
    int32_t num_parts; /* 0: there is no such tile */
    int32_t token;     /* the first query token of its request */
    int32_t first_row; /* the tile's first row: token number * H + head, in its request */
    int32_t num_rows;
} smla_cut_tile;

/* How cut tiles lie in the workspace: a tile for each CTA, and two slots of partial rows. */
typedef struct smla_cut_tiles {
    int64_t num_ctas;
    int64_t slot_rows;
    smla_cut_tile *tiles;
    smla_partial_rows partials;
} smla_cut_tiles;

/* Partial rows per slot, in a call of so many rows of out. */
static inline int64_t
smla_cut_slot_rows(int64_t num_rows)
{
    return num_rows < (int64_t)SMLA_TILE_ROWS ? num_rows : (int64_t)SMLA_TILE_ROWS;
}

static inline int64_t
smla_cut_tiles_bytes(int64_t num_rows, int64_t num_ctas)
{
    return num_rows == 0 ? 0
                         : SMLA_PARTIAL_ALIGN + num_ctas * (int64_t)sizeof(smla_cut_tile) +
                               smla_partial_bytes(2 * num_ctas * smla_cut_slot_rows(num_rows));
}

static inline smla_cut_tiles
smla_cut_tiles_at(void *workspace, int64_t num_rows, int64_t num_ctas)
{
    smla_cut_tiles cut;
    uint8_t *const memory = (uint8_t *)workspace + smla_partial_padding(workspace);
    uint8_t *const states = memory + num_ctas * (int64_t)sizeof(smla_cut_tile);
    cut.num_ctas = num_ctas;
    cut.slot_rows = smla_cut_slot_rows(num_rows);
    cut.tiles = (smla_cut_tile *)memory;
    cut.partials.state = (float *)states;
    cut.partials.out = (float *)(states + smla_partial_state_bytes(2 * num_ctas * cut.slot_rows));
    return cut;
}

/* combine_tiles.cu: folds the partial rows of cut tiles. */
cudaError_t smla_cuda_launch_combine_tiles(const smla_attention_params *params,
                                           const smla_cut_tiles *cut, int32_t team,
                                           smla_cuda_deferred *deferred);

#ifdef __cplusplus
}
#endif
