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

#include "core/attention/needs.h"
#include "cuda/attention/table/kernels.h"

/* What kernels() says of a set of formats. */
#define TEXT_FP8       "fp8_ds_mla"
#define TEXT_V4        "fp8_v4"
#define TEXT_BF16      "bfloat16"
#define TEXT_BF16_512  "bfloat16 of 512 values"
#define TEXT_MIXED     "fp8_ds_mla with bfloat16"
#define TEXT_E4M3_576  "fp8_e4m3 with RoPE"
#define TEXT_ANY_576   "any with RoPE"
#define TEXT_EXACT_512 "of 512 values, exact as bfloat16"
#define TEXT_512       "any of 512 values"

enum {
    LISTS = SMLA_SOURCE(LISTS),
    TABLE = SMLA_SOURCE(TABLE),
    RAGGED = SMLA_SOURCE(RAGGED),
    PAGED = SMLA_SOURCE(PAGED),
    /* Kernels for lists take rows at any address, and any splits. */
    SERVED_LISTS = SMLA_NEEDS_UNALIGNED | SMLA_NEEDS_SPLITS,
    SERVED_CODED = SMLA_NEEDS_ALL,
    SERVED = SMLA_NEEDS_ALL & ~SMLA_NEEDS_QUERY_SCALE,
};

/* A kernel for calls with at least `least` heads. A CTA takes `heads` of them. */
#define ROW(file, stem, rows, least, heads, ...) \
    {.formats = SMLA_ROWS_##rows,                \
     .min_heads = least,                         \
     .heads_per_cta = heads,                     \
     .name = file ", " #heads " heads per CTA",  \
     .heads_text = #least "...128",              \
     .launch = smla_attend_##stem##_##heads,     \
     __VA_ARGS__}

#define SM90(file, stem, rows, least, heads, ...)                                           \
    ROW(file, stem, rows, least, heads, .arch = 90, .arch_text = "sm_90", .ctas_per_sm = 1, \
        .shared_bytes = SMLA_SM90_SHARED_BYTES, __VA_ARGS__)

#define SM90_LISTS(file, stem, rows, least, heads, ...)                            \
    SM90(file, stem, rows, least, heads, .sources = LISTS, .serves = SERVED_LISTS, \
         .rows_text = TEXT_##rows, __VA_ARGS__)

#define SM90_TABLE(file, stem, rows, least, heads, ...)                                        \
    SM90(file, stem, rows, least, heads, .sources = TABLE, .rows_text = TEXT_##rows ", dense", \
         __VA_ARGS__)

#define SM90_FP8_COSTS(cost, start)                                                           \
    .block_columns = SMLA_SM90_KEYS, .block_cost = cost, .cta_cost = start, .start_cost = 12, \
    .leaves_halves = true

#define SM90_FP8(rows, stem, least, heads, cost, start) \
    SM90_LISTS("attention_fp8_sm90.cu", stem, rows, least, heads, SM90_FP8_COSTS(cost, start))

#define SM90_TILES(file, stem, heads)                   \
    .launch_tiles = smla_attend_##stem##_tiles_##heads, \
    .tiles_name = file ", " #heads " rows per CTA"

#define SM90_FP8_DENSE(least, heads, cost, start)                                \
    SM90_TABLE("attention_fp8_dense_sm90.cu", sm90_fp8_dense, FP8, least, heads, \
               .serves = SMLA_NEEDS_SPLITS, SM90_FP8_COSTS(cost, start),         \
               SM90_TILES("attention_fp8_tiles_sm90.cu", sm90_fp8, heads))

#define SM90_E4M3_DENSE(least, heads, cost, start)                                                \
    SM90_TABLE("attention_fp8_e4m3_sm90.cu", sm90_e4m3_dense, E4M3_576, least, heads,             \
               .serves = SMLA_NEEDS_SPLITS | SMLA_NEEDS_QUERY_SCALE, SM90_FP8_COSTS(cost, start), \
               SM90_TILES("attention_e4m3_tiles_sm90.cu", sm90_e4m3, heads))

/* A kernel for splits of few columns. A key takes a little longer than in SM90_FP8, the start takes
 * much less time, and columns need not fill blocks. */
#define SM90_SMALL(rows, stem, least, heads, cost, start)                              \
    SM90_LISTS("attention_small_sm90.cu", stem, rows, least, heads,                    \
               .max_columns = SMLA_SM90_SMALL_KEYS, .block_columns = SMLA_SPLIT_ALIGN, \
               .block_cost = cost, .cta_cost = start, .leaves_halves = true, .leaves_room = true)

/* SM90_SMALL with 64 heads. A CTA takes longer, but a token has half as many CTAs. They may fit the
 * device at once where CTAs of 32 heads do not. */
#define SM90_SMALL_64(rows, stem)                                                                  \
    SM90_LISTS("attention_small_sm90.cu", stem, rows, 33, 64, .max_columns = SMLA_SM90_SMALL_KEYS, \
               .block_columns = SMLA_SPLIT_ALIGN, .block_cost = 11, .cta_cost = 32,                \
               .leaves_halves = true, .saves_waves = true)

#define SM90_BF16(rows, stem)                                                                \
    SM90_LISTS("attention_bf16_sm90.cu", stem, rows, 1, 64, .block_columns = SMLA_SM90_KEYS, \
               .block_cost = 16, .cta_cost = 48)

#define SM90_DENSE(rows, stem) \
    SM90_TABLE("attention_dense_sm90.cu", stem, rows, 1, 64, .plans_itself = true)

/* A kernel for few tiles, where schedule.c takes it instead of SM90_DENSE. */
#define SM90_FEW(rows, stem) SM90_TABLE("attention_few_sm90.cu", stem, rows, 1, 64, .is_few = true)

#define SM80(rows, stem, least, heads, served)                                                     \
    ROW("attention_sm80.cu", stem, rows, least, heads, .sources = LISTS | TABLE, .serves = served, \
        .rows_text = TEXT_##rows, .arch = SMLA_PORTABLE_ARCH, .arch_text = "sm_80+",               \
        .block_columns = SMLA_SM80_KEYS, .block_cost = 16, .cta_cost = 32,                         \
        .ctas_per_sm = SMLA_SM80_CTAS_PER_SM(heads),                                               \
        .shared_bytes = SMLA_SM80_SHARED_BYTES(heads, SMLA_ROWS_##rows))

/* A kernel for keys and values of any head. */
#define MHA(file, stem, source, text, ...) \
    {.sources = source,                    \
     .min_heads = 1,                       \
     .name = file,                         \
     .heads_text = "1...128",              \
     .rows_text = text,                    \
     .launch = smla_attend_##stem,         \
     __VA_ARGS__}

const smla_attention_kernel smla_attention_kernels[] = {
    SM90_SMALL(FP8, sm90_small, 17, 32, 8, 32),
    SM90_SMALL(FP8, sm90_small, 1, 16, 9, 22),
    SM90_SMALL_64(FP8, sm90_small),
    SM90_SMALL(V4, sm90_small_v4, 17, 32, 8, 32),
    SM90_SMALL(V4, sm90_small_v4, 1, 16, 9, 22),
    SM90_SMALL_64(V4, sm90_small_v4),
    SM90_FP8(FP8, sm90_fp8, 33, 64, 16, 48),
    SM90_FP8(FP8, sm90_fp8, 17, 32, 10, 50),
    SM90_FP8(FP8, sm90_fp8, 1, 16, 10, 48),
    SM90_FP8(V4, sm90_v4, 33, 64, 16, 48),
    SM90_FP8(V4, sm90_v4, 17, 32, 10, 50),
    SM90_FP8(V4, sm90_v4, 1, 16, 10, 48),
    SM90_BF16(BF16, sm90_bf16),
    SM90_BF16(BF16_512, sm90_bf16_512),
    SM90_BF16(EXACT_512, sm90_512),
    SM90_DENSE(BF16, sm90_dense),
    SM90_DENSE(BF16_512, sm90_dense_512),
    SM90_FEW(BF16, sm90_few),
    SM90_FEW(BF16_512, sm90_few_512),
    SM90_FP8_DENSE(33, 64, 16, 48),
    SM90_FP8_DENSE(17, 32, 10, 50),
    SM90_FP8_DENSE(1, 16, 10, 48),
    SM90_E4M3_DENSE(33, 64, 16, 48),
    SM90_E4M3_DENSE(17, 32, 10, 50),
    SM90_E4M3_DENSE(1, 16, 10, 48),
    SM80(FP8, sm80_fp8, 33, 64, SERVED),
    SM80(FP8, sm80_fp8, 17, 32, SERVED),
    SM80(FP8, sm80_fp8, 1, 16, SERVED),
    SM80(BF16, sm80_bf16, 33, 64, SERVED),
    SM80(BF16, sm80_bf16, 17, 32, SERVED),
    SM80(BF16, sm80_bf16, 1, 16, SERVED),
    SM80(BF16_512, sm80_bf16_512, 33, 64, SERVED),
    SM80(BF16_512, sm80_bf16_512, 17, 32, SERVED),
    SM80(BF16_512, sm80_bf16_512, 1, 16, SERVED),
    SM80(MIXED, sm80_mixed, 1, 16, SERVED),
    SM80(E4M3_576, sm80_e4m3_576, 33, 64, SERVED_CODED),
    SM80(E4M3_576, sm80_e4m3_576, 17, 32, SERVED_CODED),
    SM80(E4M3_576, sm80_e4m3_576, 1, 16, SERVED_CODED),
    SM80(ANY_576, sm80_any_576, 1, 16, SERVED_CODED),
    SM80(512, sm80_512, 33, 64, SERVED_CODED),
    SM80(512, sm80_512, 17, 32, SERVED_CODED),
    SM80(512, sm80_512, 1, 16, SERVED_CODED),
    MHA("mha_attention_sm90.cu", sm90_mha, RAGGED, "192 or 128 bfloat16 or float16, 128 values",
        .arch = 90, .arch_text = "sm_90", .shared_bytes = SMLA_SM90_SHARED_BYTES),
    MHA("varlen_attention.cu", sm80_mha, RAGGED, "up to 576 of any type, 512 values",
        .serves = SMLA_NEEDS_ALL, .arch = SMLA_PORTABLE_ARCH, .arch_text = "sm_80+"),
    MHA("paged_attention_sm90.cu", sm90_paged, PAGED,
        "64, 128 or 256 bfloat16 or float16, in pages",
        .serves = SMLA_NEEDS_MASK | SMLA_NEEDS_SOFTCAP, .arch = 90, .arch_text = "sm_90",
        .shared_bytes = SMLA_SM90_SHARED_BYTES),
    MHA("paged_attention.cu", sm80_paged, PAGED, "up to 576 of any type, 512 values, in pages",
        .serves = SMLA_NEEDS_ALL, .arch = SMLA_PORTABLE_ARCH, .arch_text = "sm_80+"),
    {.launch = NULL},
};

enum { NUM_KERNELS = sizeof smla_attention_kernels / sizeof smla_attention_kernels[0] - 1 };

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

static bool
reads(const smla_attention_kernel *kernel, const smla_kernel_call *call)
{
    return (kernel->sources & (1u << call->source)) != 0;
}

bool
smla_fits_kernel(const smla_attention_kernel *kernel, const smla_cuda_device *device,
                 const smla_kernel_call *call)
{
    return (call->formats & ~kernel->formats) == 0 && reads(kernel, call) &&
           (call->needs & ~kernel->serves) == 0 && call->num_heads >= kernel->min_heads &&
           call->num_heads <= SMLA_MAX_HEADS && runs_on(kernel, device) &&
           kernel->is_few == call->is_few &&
           (kernel->max_columns == 0 || call->columns <= kernel->max_columns);
}

const smla_attention_kernel *
smla_find_kernel(const smla_cuda_device *device, const smla_kernel_call *call)
{
    for (int i = 0; i < NUM_KERNELS; i++) {
        if (smla_fits_kernel(&smla_attention_kernels[i], device, call)) {
            return &smla_attention_kernels[i];
        }
    }
    return NULL;
}

const char *
smla_find_lack(const smla_cuda_device *device, const smla_kernel_call *call)
{
    static const char *const words[] = {
#define WORDS(name, words) words,
        SMLA_NEEDS(WORDS)
#undef WORDS
    };
    const smla_attention_kernel *best = NULL;
    for (int i = 0; i < NUM_KERNELS; i++) {
        const smla_attention_kernel *const kernel = &smla_attention_kernels[i];
        const bool is_candidate = reads(kernel, call) && runs_on(kernel, device) &&
                                  (best == NULL || kernel->arch == best->arch);
        const bool has_formats = (call->formats & ~kernel->formats) == 0;
        if (is_candidate && (best == NULL || has_formats)) {
            best = kernel;
        }
        if (is_candidate && has_formats) {
            break;
        }
    }
    if (best == NULL || (call->formats & ~best->formats) != 0) {
        return "formats";
    }
    const unsigned lacks = call->needs & ~best->serves;
    return lacks == 0 ? NULL : words[__builtin_ctz(lacks)];
}

/* Whether calls take this table entry, for any number of heads. It is enough to ask for the entry's
 * least number, because with more heads only more entries fit. Of the entries for few columns or
 * few tiles, schedule.c takes each one for some batch. */
static bool
is_chosen(const smla_attention_kernel *kernel, const smla_cuda_device *device)
{
    if (kernel->max_columns != 0 || kernel->is_few) {
        return runs_on(kernel, device);
    }
    const smla_kernel_call call = {
        .formats = kernel->formats,
        .source = smla_source_of(kernel),
        .needs = kernel->serves & SMLA_NEEDS_QUERY_SCALE,
        .num_heads = kernel->min_heads,
        .columns = SMLA_UNSPLIT,
    };
    return smla_find_kernel(device, &call) == kernel;
}

const char *
smla_cuda_kernel_name(const smla_attention_run *run)
{
    return run->kernel == NULL     ? NULL
           : run->wide_offset != 0 ? "attention_wide_sm90.cu, 64 heads per CTA"
           : run->tile_tokens > 1  ? run->kernel->tiles_name
                                   : run->kernel->name;
}

int64_t
smla_cuda_kernels(smla_kernel_info *rows, int64_t capacity)
{
    const smla_cuda_device *const device = smla_cuda_find_device(0);
    for (int i = 0; i < NUM_KERNELS && i < capacity; i++) {
        const smla_attention_kernel *const kernel = &smla_attention_kernels[i];
        rows[i] = (smla_kernel_info){
            .device = "cuda",
            .arch = kernel->arch_text,
            .kv_format = kernel->rows_text,
            .heads = kernel->heads_text,
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
            smla_attention_kernels[i].sources == kernel->sources &&
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
            const smla_attention_kernel *const kernel = &smla_attention_kernels[i];
            if ((kernel->arch != SMLA_PORTABLE_ARCH) != is_special || is_repeated(i) ||
                (kernel->sources & LISTS) == 0) {
                continue;
            }
            const int written =
                snprintf(text + length, SMLA_KERNELS_TEXT - length, "%s%s %s",
                         length == 0 ? "" : "; ", kernel->arch_text, kernel->rows_text);
            length += written < 0 ? 0 : (size_t)written;
        }
    }
}
