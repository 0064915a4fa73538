/* kernels.c: the table of attention kernels.
 *
 * An entry fits a call by the device, the formats of the caches, the number of heads and the
 * columns per split. If the caller gave the number of splits, the first entry that fits is taken.
 * Otherwise it is the fitting entry with the shortest time that schedule.c estimates. Kernels of
 * one architecture are above the portable ones. Of each architecture, kernels for few columns are
 * above the others. Below that, kernels with more heads per CTA are above those with fewer. The
 * kernel for few columns with 64 heads is an exception, because it pays only where the batch is
 * known.
 */
#include <stdio.h>

#include "cuda/attention/table/kernels.h"

/* A kernel for calls with at least `least` heads. A CTA takes `heads` of them. */
#define ROW(file, stem, rows, least, heads, ...) \
    {.formats = rows,                            \
     .min_heads = least,                         \
     .heads_per_cta = heads,                     \
     .name = file ", " #heads " heads per CTA",  \
     .launch = smla_attend_##stem##_##heads,     \
     __VA_ARGS__}

#define SM90(file, stem, rows, least, heads, ...)                     \
    ROW(file, stem, rows, least, heads, .arch = 90, .ctas_per_sm = 1, \
        .shared_bytes = SMLA_SM90_SHARED_BYTES, __VA_ARGS__)

#define SM90_FP8_OF(file, rows, stem, least, heads, cost, start)                              \
    SM90(file, stem, rows, least, heads, .block_columns = SMLA_SM90_KEYS, .block_cost = cost, \
         .cta_cost = start, .start_cost = 12, .leaves_halves = true)

#define SM90_FP8(rows, stem, least, heads, cost, start) \
    SM90_FP8_OF("attention_fp8_sm90.cu", rows, stem, least, heads, cost, start)

#define SM90_FP8_DENSE(least, heads, cost, start)                                               \
    SM90_FP8_OF("attention_fp8_dense_sm90.cu", SMLA_ROWS_FP8 | SMLA_ROWS_TILED, sm90_fp8_dense, \
                least, heads, cost, start)

/* A kernel for splits of few columns. A key takes a little longer than in SM90_FP8, the start takes
 * much less time, and columns need not fill blocks. */
#define SM90_SMALL(rows, stem, least, heads, cost, start)                                          \
    SM90("attention_small_sm90.cu", stem, rows, least, heads, .max_columns = SMLA_SM90_SMALL_KEYS, \
         .block_columns = SMLA_SPLIT_ALIGN, .block_cost = cost, .cta_cost = start,                 \
         .leaves_halves = true, .leaves_room = true)

/* SM90_SMALL with 64 heads. A CTA takes longer, but a token has half as many CTAs. They may fit the
 * device at once where CTAs of 32 heads do not. */
#define SM90_SMALL_64(rows, stem)                                                            \
    SM90("attention_small_sm90.cu", stem, rows, 33, 64, .max_columns = SMLA_SM90_SMALL_KEYS, \
         .block_columns = SMLA_SPLIT_ALIGN, .block_cost = 11, .cta_cost = 32,                \
         .leaves_halves = true, .saves_waves = true)

#define SM90_BF16(rows, stem)                                                          \
    SM90("attention_bf16_sm90.cu", stem, rows, 1, 64, .block_columns = SMLA_SM90_KEYS, \
         .block_cost = 16, .cta_cost = 48)

#define SM90_DENSE(rows, stem) \
    SM90("attention_dense_sm90.cu", stem, (rows) | SMLA_ROWS_TILED, 1, 64, .plans_itself = true)

#define SM80(rows, stem, least, heads)                                                           \
    ROW("attention_sm80.cu", stem,                                                               \
        (rows) | SMLA_ROWS_RANGED | ((rows) == SMLA_ROWS_512 ? SMLA_ROWS_E4M3_QUERY : 0), least, \
        heads, .arch = SMLA_PORTABLE_ARCH, .block_columns = SMLA_SM80_KEYS, .block_cost = 16,    \
        .cta_cost = 32, .ctas_per_sm = SMLA_SM80_CTAS_PER_SM(heads),                             \
        .shared_bytes = SMLA_SM80_SHARED_BYTES(heads, rows))

const smla_attention_kernel smla_attention_kernels[] = {
    SM90_SMALL(SMLA_ROWS_FP8, sm90_small, 17, 32, 8, 32),
    SM90_SMALL(SMLA_ROWS_FP8, sm90_small, 1, 16, 9, 22),
    SM90_SMALL_64(SMLA_ROWS_FP8, sm90_small),
    SM90_SMALL(SMLA_ROWS_V4, sm90_small_v4, 17, 32, 8, 32),
    SM90_SMALL(SMLA_ROWS_V4, sm90_small_v4, 1, 16, 9, 22),
    SM90_SMALL_64(SMLA_ROWS_V4, sm90_small_v4),
    SM90_FP8(SMLA_ROWS_FP8, sm90_fp8, 33, 64, 16, 48),
    SM90_FP8(SMLA_ROWS_FP8, sm90_fp8, 17, 32, 10, 50),
    SM90_FP8(SMLA_ROWS_FP8, sm90_fp8, 1, 16, 10, 48),
    SM90_FP8(SMLA_ROWS_V4, sm90_v4, 33, 64, 16, 48),
    SM90_FP8(SMLA_ROWS_V4, sm90_v4, 17, 32, 10, 50),
    SM90_FP8(SMLA_ROWS_V4, sm90_v4, 1, 16, 10, 48),
    SM90_BF16(SMLA_ROWS_BF16, sm90_bf16),
    SM90_BF16(SMLA_ROWS_BF16_512, sm90_bf16_512),
    SM90_BF16(SMLA_ROWS_EXACT_512, sm90_512),
    SM90_DENSE(SMLA_ROWS_BF16, sm90_dense),
    SM90_DENSE(SMLA_ROWS_BF16_512, sm90_dense_512),
    SM90_FP8_DENSE(33, 64, 16, 48),
    SM90_FP8_DENSE(17, 32, 10, 50),
    SM90_FP8_DENSE(1, 16, 10, 48),
    SM80(SMLA_ROWS_FP8, sm80_fp8, 33, 64),
    SM80(SMLA_ROWS_FP8, sm80_fp8, 17, 32),
    SM80(SMLA_ROWS_FP8, sm80_fp8, 1, 16),
    SM80(SMLA_ROWS_BF16, sm80_bf16, 33, 64),
    SM80(SMLA_ROWS_BF16, sm80_bf16, 17, 32),
    SM80(SMLA_ROWS_BF16, sm80_bf16, 1, 16),
    SM80(SMLA_ROWS_BF16_512, sm80_bf16_512, 33, 64),
    SM80(SMLA_ROWS_BF16_512, sm80_bf16_512, 17, 32),
    SM80(SMLA_ROWS_BF16_512, sm80_bf16_512, 1, 16),
    SM80(SMLA_ROWS_MIXED, sm80_mixed, 1, 16),
    SM80(SMLA_ROWS_512, sm80_512, 33, 64),
    SM80(SMLA_ROWS_512, sm80_512, 17, 32),
    SM80(SMLA_ROWS_512, sm80_512, 1, 16),
    {.launch = NULL},
};

enum { NUM_KERNELS = sizeof smla_attention_kernels / sizeof smla_attention_kernels[0] - 1 };

_Static_assert((int)SMLA_NUM_KV_FORMATS + 3 < 32,
               "a set has a bit for every format, and three for what else a kernel serves");

/* What kernels() reports of a table entry. The texts live as long as the library. */
typedef struct row_text {
    const char *arch;
    const char *formats;
    const char *heads;
} row_text;

static row_text
text_of(const smla_attention_kernel *kernel)
{
    return (row_text){
        .arch = kernel->arch == 90 ? "sm_90" : "sm_80+",
        .formats = kernel->formats & SMLA_ROWS_TILED
                       ? kernel->formats & SMLA_ROWS_FP8    ? "fp8_ds_mla, dense"
                         : kernel->formats & SMLA_ROWS_BF16 ? "bfloat16, dense"
                                                            : "bfloat16 of 512 values, dense"
                   : (kernel->formats & SMLA_ROWS_512) == SMLA_ROWS_512 ? "any of 512 values"
                   : (kernel->formats & SMLA_ROWS_512) == SMLA_ROWS_EXACT_512
                       ? "of 512 values, exact as bfloat16"
                   : (kernel->formats & SMLA_ROWS_MIXED) == SMLA_ROWS_MIXED
                       ? "fp8_ds_mla with bfloat16"
                   : kernel->formats & SMLA_ROWS_FP8  ? "fp8_ds_mla"
                   : kernel->formats & SMLA_ROWS_V4   ? "fp8_v4"
                   : kernel->formats & SMLA_ROWS_BF16 ? "bfloat16"
                                                      : "bfloat16 of 512 values",
        .heads = kernel->min_heads == 33   ? "33...128"
                 : kernel->min_heads == 17 ? "17...128"
                                           : "1...128",
    };
}

void
smla_describe_formats(smla_kv_set formats, char text[SMLA_FORMATS_TEXT])
{
    size_t length = 0;
    text[0] = '\0';
    for (int i = SMLA_NUM_KV_FORMATS - 1; i >= 0 && length < SMLA_FORMATS_TEXT; i--) {
        if (formats & SMLA_KV_SET(i)) {
            const smla_kv_format_info *const row = &smla_kv_formats[i];
            char size[32] = "";
            if (i != (int)smla_find_kv_format(row->format)->number) { /* not first of that name */
                (void)snprintf(size, sizeof size, " of %d values", row->head_dim);
            }
            const int written = snprintf(text + length, SMLA_FORMATS_TEXT - length, "%s%s%s",
                                         length == 0 ? "" : " with ", row->name, size);
            length += written < 0 ? 0 : (size_t)written;
        }
    }
}

static bool
runs_on(const smla_attention_kernel *kernel, const smla_cuda_device *device)
{
    const int32_t arch = device->compute_capability;
    return (kernel->arch == SMLA_PORTABLE_ARCH ? arch >= kernel->arch : arch == kernel->arch) &&
           device->max_shared_bytes >= kernel->shared_bytes;
}

bool
smla_fits_kernel(const smla_attention_kernel *kernel, const smla_cuda_device *device,
                 smla_kv_set formats, int64_t num_heads, int num_splits, int64_t columns)
{
    return (formats & ~kernel->formats) == 0 && num_heads >= kernel->min_heads &&
           num_heads <= SMLA_MAX_HEADS && runs_on(kernel, device) &&
           (kernel->max_columns == 0 || (num_splits > 1 && columns <= kernel->max_columns));
}

const smla_attention_kernel *
smla_find_kernel(const smla_cuda_device *device, smla_kv_set formats, int64_t num_heads,
                 int num_splits, int64_t columns)
{
    for (int i = 0; i < NUM_KERNELS; i++) {
        if (smla_fits_kernel(&smla_attention_kernels[i], device, formats, num_heads, num_splits,
                             columns)) {
            return &smla_attention_kernels[i];
        }
    }
    return NULL;
}

const smla_attention_kernel *
smla_find_whole_kernel(const smla_cuda_device *device, smla_kv_set formats, int64_t num_heads)
{
    return smla_find_kernel(device, formats, num_heads, 1, 0);
}

/* Whether calls with index lists take this table entry, for any number of heads. It is enough to
 * ask for the entry's least number, because with more heads only more entries fit. Of the entries
 * for few columns, schedule.c takes each one for some batch. */
static bool
is_chosen(const smla_attention_kernel *kernel, const smla_cuda_device *device)
{
    if (kernel->max_columns != 0) {
        return runs_on(kernel, device);
    }
    const smla_kv_set formats = kernel->formats & ~(smla_kv_set)SMLA_ROWS_RANGED;
    return smla_find_whole_kernel(device, formats, kernel->min_heads) == kernel;
}

const char *
smla_cuda_kernel_name(const smla_attention_run *run)
{
    return run->kernel == NULL ? NULL : run->kernel->name;
}

int64_t
smla_cuda_kernels(smla_kernel_info *rows, int64_t capacity)
{
    const smla_cuda_device *const device = smla_cuda_find_device(0);
    for (int i = 0; i < NUM_KERNELS && i < capacity; i++) {
        const smla_attention_kernel *const kernel = &smla_attention_kernels[i];
        const row_text text = text_of(kernel);
        rows[i] = (smla_kernel_info){
            .device = "cuda",
            .arch = text.arch,
            .kv_format = text.formats,
            .heads = text.heads,
            .name = kernel->name,
            .available = device != NULL && runs_on(kernel, device),
            .selected = device != NULL && is_chosen(kernel, device),
        };
    }
    return NUM_KERNELS;
}

/* Whether an entry before this one has its architecture and formats, for other heads or splits. */
static bool
is_repeated(int number)
{
    const smla_attention_kernel *const kernel = &smla_attention_kernels[number];
    for (int i = 0; i < number; i++) {
        if (smla_attention_kernels[i].arch == kernel->arch &&
            smla_attention_kernels[i].formats == kernel->formats) {
            return true;
        }
    }
    return false;
}

/* Portable kernels come first: they are what a device without kernels of its own needs. Kernels of
 * dense calls alone are left out, because others serve their formats, too. */
void
smla_describe_kernels(char text[SMLA_KERNELS_TEXT])
{
    size_t length = 0;
    text[0] = '\0';
    for (int is_special = 0; is_special < 2; is_special++) {
        for (int i = 0; i < NUM_KERNELS && length < SMLA_KERNELS_TEXT; i++) {
            if ((smla_attention_kernels[i].arch != SMLA_PORTABLE_ARCH) != is_special ||
                is_repeated(i) || (smla_attention_kernels[i].formats & SMLA_ROWS_TILED)) {
                continue;
            }
            const row_text row = text_of(&smla_attention_kernels[i]);
            const int written = snprintf(text + length, SMLA_KERNELS_TEXT - length, "%s%s %s",
                                         length == 0 ? "" : "; ", row.arch, row.formats);
            length += written < 0 ? 0 : (size_t)written;
        }
    }
}
