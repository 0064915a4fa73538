/* test_cuda_kernel_table.c: the table of kernels.c: which row serves a call on a device, and how
 * rows are listed.
 */
#include "cuda/attention/table/kernels.c" // NOLINT(bugprone-suspicious-include)

#include "fake_cuda/launchers.h"

static const smla_kv_set all_formats[] = {SMLA_ROWS_FP8, SMLA_ROWS_BF16, SMLA_ROWS_MIXED,
                                          SMLA_ROWS_BF16_512, SMLA_KV_SET(SMLA_ROW_FP8_V4)};

enum { NUM_SETS = sizeof all_formats / sizeof all_formats[0] };

static const smla_kv_format_info *
find_format(bool is_fp8)
{
    return &smla_kv_formats[is_fp8 ? SMLA_ROW_FP8_DS_MLA : SMLA_ROW_BFLOAT16];
}

/* Kernels of dense calls over FP8 rows, and no others, have one for tiles of query tokens. */
static void
expect_tiles(const smla_attention_kernel *kernel, const char *stem)
{
    const char *const rows = strcmp(stem, "sm90_fp8_dense") == 0    ? "fp8"
                             : strcmp(stem, "sm90_e4m3_dense") == 0 ? "e4m3"
                                                                    : NULL;
    EXPECT_EQ(kernel->launch_tiles != NULL, rows != NULL);
    EXPECT_EQ(kernel->tiles_name != NULL, rows != NULL);
    if (rows != NULL) {
        char tiles[32], name[64];
        (void)snprintf(tiles, sizeof tiles, "sm90_%s_tiles_%d", rows, kernel->heads_per_cta);
        (void)snprintf(name, sizeof name, "attention_%s_tiles_sm90.cu, %d rows per CTA", rows,
                       kernel->heads_per_cta);
        EXPECT(strcmp(name_of_launcher(kernel->launch_tiles), tiles) == 0);
        EXPECT(strcmp(kernel->tiles_name, name) == 0);
    }
}

/* The rows in the order in which they are tried. attention_sm80.cu has in shared memory: query and
 * keys, weights, scores of four groups of warps, and small arrays. */
static void
test_table(void)
{
    static const struct {
        const char *stem, *file;
        smla_kv_set formats;
        int min_heads, heads_per_cta, max_columns, block_columns, ctas_per_sm, shared_bytes;
    } rows[] = {
        {"sm90_small", "attention_small_sm90", SMLA_ROWS_FP8, 17, 32, 256, 64, 1, 232448},
        {"sm90_small", "attention_small_sm90", SMLA_ROWS_FP8, 1, 16, 256, 64, 1, 232448},
        {"sm90_small", "attention_small_sm90", SMLA_ROWS_FP8, 33, 64, 256, 64, 1, 232448},
        {"sm90_small_v4", "attention_small_sm90", SMLA_ROWS_V4, 17, 32, 256, 64, 1, 232448},
        {"sm90_small_v4", "attention_small_sm90", SMLA_ROWS_V4, 1, 16, 256, 64, 1, 232448},
        {"sm90_small_v4", "attention_small_sm90", SMLA_ROWS_V4, 33, 64, 256, 64, 1, 232448},
        {"sm90_fp8", "attention_fp8_sm90", SMLA_ROWS_FP8, 33, 64, 0, 128, 1, 232448},
        {"sm90_fp8", "attention_fp8_sm90", SMLA_ROWS_FP8, 17, 32, 0, 128, 1, 232448},
        {"sm90_fp8", "attention_fp8_sm90", SMLA_ROWS_FP8, 1, 16, 0, 128, 1, 232448},
        {"sm90_v4", "attention_fp8_sm90", SMLA_ROWS_V4, 33, 64, 0, 128, 1, 232448},
        {"sm90_v4", "attention_fp8_sm90", SMLA_ROWS_V4, 17, 32, 0, 128, 1, 232448},
        {"sm90_v4", "attention_fp8_sm90", SMLA_ROWS_V4, 1, 16, 0, 128, 1, 232448},
        {"sm90_bf16", "attention_bf16_sm90", SMLA_ROWS_BF16, 1, 64, 0, 128, 1, 232448},
        {"sm90_bf16_512", "attention_bf16_sm90", SMLA_ROWS_BF16_512, 1, 64, 0, 128, 1, 232448},
        {"sm90_512", "attention_bf16_sm90", SMLA_ROWS_EXACT_512, 1, 64, 0, 128, 1, 232448},
        {"sm90_dense", "attention_dense_sm90", SMLA_ROWS_BF16, 1, 64, 0, 0, 1, 232448},
        {"sm90_dense_512", "attention_dense_sm90", SMLA_ROWS_BF16_512, 1, 64, 0, 0, 1, 232448},
        {"sm90_few", "attention_few_sm90", SMLA_ROWS_BF16, 1, 64, 0, 0, 1, 232448},
        {"sm90_few_512", "attention_few_sm90", SMLA_ROWS_BF16_512, 1, 64, 0, 0, 1, 232448},
        {"sm90_fp8_dense", "attention_fp8_dense_sm90", SMLA_ROWS_FP8, 33, 64, 0, 128, 1, 232448},
        {"sm90_fp8_dense", "attention_fp8_dense_sm90", SMLA_ROWS_FP8, 17, 32, 0, 128, 1, 232448},
        {"sm90_fp8_dense", "attention_fp8_dense_sm90", SMLA_ROWS_FP8, 1, 16, 0, 128, 1, 232448},
        {"sm90_e4m3_dense", "attention_fp8_e4m3_sm90", SMLA_ROWS_E4M3_576, 33, 64, 0, 128, 1,
         232448},
        {"sm90_e4m3_dense", "attention_fp8_e4m3_sm90", SMLA_ROWS_E4M3_576, 17, 32, 0, 128, 1,
         232448},
        {"sm90_e4m3_dense", "attention_fp8_e4m3_sm90", SMLA_ROWS_E4M3_576, 1, 16, 0, 128, 1,
         232448},
        {"sm80_fp8", "attention_sm80", SMLA_ROWS_FP8, 33, 64, 0, 32, 1, 161664},
        {"sm80_fp8", "attention_sm80", SMLA_ROWS_FP8, 17, 32, 0, 32, 1, 99584},
        {"sm80_fp8", "attention_sm80", SMLA_ROWS_FP8, 1, 16, 0, 32, 2, 68608},
        {"sm80_bf16", "attention_sm80", SMLA_ROWS_BF16, 33, 64, 0, 32, 1, 149376},
        {"sm80_bf16", "attention_sm80", SMLA_ROWS_BF16, 17, 32, 0, 32, 1, 93440},
        {"sm80_bf16", "attention_sm80", SMLA_ROWS_BF16, 1, 16, 0, 32, 2, 65536},
        {"sm80_bf16_512", "attention_sm80", SMLA_ROWS_BF16_512, 33, 64, 0, 32, 1, 149376},
        {"sm80_bf16_512", "attention_sm80", SMLA_ROWS_BF16_512, 17, 32, 0, 32, 1, 93440},
        {"sm80_bf16_512", "attention_sm80", SMLA_ROWS_BF16_512, 1, 16, 0, 32, 2, 65536},
        {"sm80_mixed", "attention_sm80", SMLA_ROWS_MIXED, 1, 16, 0, 32, 2, 68608},
        {"sm80_e4m3_576", "attention_sm80", SMLA_ROWS_E4M3_576, 33, 64, 0, 32, 1, 149376},
        {"sm80_e4m3_576", "attention_sm80", SMLA_ROWS_E4M3_576, 17, 32, 0, 32, 1, 93440},
        {"sm80_e4m3_576", "attention_sm80", SMLA_ROWS_E4M3_576, 1, 16, 0, 32, 2, 65536},
        {"sm80_any_576", "attention_sm80", SMLA_ROWS_ANY_576, 1, 16, 0, 32, 2, 68608},
        {"sm80_512", "attention_sm80", SMLA_ROWS_512, 33, 64, 0, 32, 1, 161664},
        {"sm80_512", "attention_sm80", SMLA_ROWS_512, 17, 32, 0, 32, 1, 99584},
        {"sm80_512", "attention_sm80", SMLA_ROWS_512, 1, 16, 0, 32, 2, 68608},
        {"sm90_mha", "mha_attention_sm90", 0, 1, 0, 0, 0, 0, 232448},
        {"sm80_mha", "varlen_attention", 0, 1, 0, 0, 0, 0, 0},
        {"sm90_paged", "paged_attention_sm90", 0, 1, 0, 0, 0, 0, 232448},
        {"sm80_paged", "paged_attention", 0, 1, 0, 0, 0, 0, 0},
    };
    enum { NUM_ROWS = sizeof rows / sizeof rows[0] };
    EXPECT_EQ((int)NUM_KERNELS, (int)NUM_ROWS);
    EXPECT(smla_attention_kernels[NUM_ROWS].launch == NULL);
    for (int i = 0; i < NUM_ROWS; i++) {
        const smla_attention_kernel *const kernel = &smla_attention_kernels[i];
        const char *const stem = rows[i].stem;
        const bool is_hopper = strncmp(stem, "sm90", 4) == 0;
        const int per_cta = rows[i].heads_per_cta;
        char number[16] = "", per[32] = "", launcher[32], name[64], heads[16];
        if (per_cta != 0) {
            (void)snprintf(number, sizeof number, "_%d", per_cta);
            (void)snprintf(per, sizeof per, ", %d heads per CTA", per_cta);
        }
        (void)snprintf(launcher, sizeof launcher, "%s%s", stem, number);
        (void)snprintf(name, sizeof name, "%s.cu%s", rows[i].file, per);
        (void)snprintf(heads, sizeof heads, "%d...128", rows[i].min_heads);
        EXPECT(strcmp(launcher_of(kernel), launcher) == 0);
        EXPECT(strcmp(kernel->name, name) == 0);
        EXPECT(strcmp(kernel->arch_text, is_hopper ? "sm_90" : "sm_80+") == 0);
        EXPECT(strcmp(kernel->heads_text, heads) == 0);
        EXPECT_EQ(kernel->arch, is_hopper ? 90 : 80);
        EXPECT_EQ(kernel->formats, rows[i].formats);
        const bool is_paged = strstr(stem, "paged") != NULL;
        const bool is_mha = strstr(stem, "mha") != NULL || is_paged;
        const bool is_few = strstr(stem, "few") != NULL;
        const bool is_table = is_few || strstr(stem, "dense") != NULL;
        const unsigned lists = SMLA_SOURCE(LISTS), table = SMLA_SOURCE(TABLE);
        EXPECT_EQ(kernel->sources, is_paged     ? SMLA_SOURCE(PAGED)
                                   : is_mha     ? SMLA_SOURCE(RAGGED)
                                   : !is_hopper ? lists | table
                                   : is_table   ? table
                                                : lists);
        const unsigned serves_all = (unsigned)SMLA_NEEDS_ALL;
        const bool is_coded =
            rows[i].formats == SMLA_ROWS_512 || (rows[i].formats & SMLA_ROWS_E4M3_576) != 0;
        EXPECT_EQ(kernel->serves,
                  !is_hopper ? (is_mha || is_coded ? serves_all
                                                   : serves_all & ~(unsigned)SMLA_NEEDS_QUERY_SCALE)
                  : is_paged ? (unsigned)(SMLA_NEEDS_MASK | SMLA_NEEDS_SOFTCAP)
                  : is_mha || is_few || kernel->plans_itself ? 0
                  : is_table ? SMLA_NEEDS_SPLITS | (is_coded ? (unsigned)SMLA_NEEDS_QUERY_SCALE : 0)
                             : (unsigned)(SMLA_NEEDS_UNALIGNED | SMLA_NEEDS_SPLITS));
        EXPECT_EQ(kernel->is_few, is_few);
        expect_tiles(kernel, stem);
        EXPECT_EQ(kernel->min_heads, rows[i].min_heads);
        EXPECT_EQ(kernel->heads_per_cta, per_cta);
        EXPECT_EQ(kernel->max_columns, rows[i].max_columns);
        EXPECT_EQ(kernel->block_columns, rows[i].block_columns);
        EXPECT_EQ(kernel->ctas_per_sm, rows[i].ctas_per_sm);
        EXPECT_EQ(kernel->shared_bytes, rows[i].shared_bytes);
        const unsigned fp8 = SMLA_ROWS_FP8 | SMLA_ROWS_V4 | SMLA_ROWS_E4M3_576;
        EXPECT_EQ(kernel->leaves_halves, is_hopper && !is_mha && (rows[i].formats & ~fp8) == 0);
        EXPECT_EQ(kernel->leaves_room, rows[i].max_columns != 0 && per_cta < 64);
        EXPECT_EQ(kernel->saves_waves, rows[i].max_columns != 0 && per_cta == 64);
    }
}

/* The launcher of a call that is not split. Devices with little shared memory, Hopper excepted, do
 * without the rows of 64 or 32 heads. */
static const char *
expect_whole(const smla_cuda_device *device, smla_kv_set formats, int64_t heads)
{
    static char name[32];
    const bool is_hopper = device->compute_capability == 90;
    const int shared = device->max_shared_bytes;
    const bool is_512 = formats == SMLA_ROWS_BF16_512;
    const bool is_bf16 = formats == SMLA_ROWS_BF16 || is_512;
    const bool is_v4 = formats == SMLA_KV_SET(SMLA_ROW_FP8_V4);
    int per_cta = 16;
    if (formats == SMLA_ROWS_MIXED) {
        return "sm80_mixed_16";
    }
    if (is_hopper && is_bf16) {
        return is_512 ? "sm90_bf16_512_64" : "sm90_bf16_64";
    }
    if (heads > 32 && (is_hopper || shared >= (is_bf16 ? 149376 : 161664))) {
        per_cta = 64;
    } else if (heads > 16 && (is_hopper || shared >= (is_bf16 ? 93440 : 99584))) {
        per_cta = 32;
    }
    snprintf(name, sizeof name, "sm%d_%s_%d", is_hopper ? 90 : 80,
             is_512    ? "bf16_512"
             : is_v4   ? (is_hopper ? "v4" : "512")
             : is_bf16 ? "bf16"
                       : "fp8",
             per_cta);
    return name;
}

static const smla_attention_kernel *
find_whole(const smla_cuda_device *device, smla_kv_set formats, int64_t heads)
{
    const smla_kernel_call call = {.formats = formats, .num_heads = heads, .columns = SMLA_UNSPLIT};
    return smla_find_kernel(device, &call);
}

static void
test_found(void)
{
    static const int archs[] = {80, 86, 87, 89, 90, 100, 103, 120, 121};
    static const int shared[] = {68608,  93439,  93440,  99583,  99584,  101376,
                                 149375, 149376, 161663, 161664, 166912, 232448};
    for (size_t a = 0; a < sizeof archs / sizeof archs[0]; a++) {
        for (size_t s = 0; s < sizeof shared / sizeof shared[0]; s++) {
            const smla_cuda_device device = {archs[a], 100, archs[a] == 90 ? 232448 : shared[s]};
            for (int f = 0; f < NUM_SETS; f++) {
                for (int64_t heads = 1; heads <= 128; heads++) {
                    const smla_attention_kernel *const found =
                        find_whole(&device, all_formats[f], heads);
                    EXPECT(found != NULL &&
                           strcmp(launcher_of(found),
                                  expect_whole(&device, all_formats[f], heads)) == 0);
                }
                EXPECT(find_whole(&device, all_formats[f], 0) == NULL);
                EXPECT(find_whole(&device, all_formats[f], 129) == NULL);
            }
        }
    }
    /* A Hopper device that lacks one byte of shared memory takes the portable rows. */
    const smla_cuda_device less = {90, 132, 232447};
    EXPECT(strcmp(launcher_of(find_whole(&less, SMLA_ROWS_FP8, 64)), "sm80_fp8_64") == 0);
    const smla_cuda_device old = {75, 40, 65536};
    const smla_cuda_device old_and_large = {79, 40, 232448};
    const smla_cuda_device small = {80, 40, 65535};
    for (int f = 0; f < NUM_SETS; f++) {
        EXPECT(find_whole(&old, all_formats[f], 16) == NULL);
        EXPECT(find_whole(&old_and_large, all_formats[f], 16) == NULL);
        EXPECT(find_whole(&small, all_formats[f], 16) == NULL);
    }
}

/* Where the caller gives the number of splits, the first row that fits is taken. */
static void
test_first_row(void)
{
    static const struct {
        int heads, splits, columns;
        const char *launcher;
    } cases[] = {
        {64, 2, 256, "sm90_small_32"}, {64, 2, 257, "sm90_fp8_64"},   {17, 8, 64, "sm90_small_32"},
        {16, 8, 64, "sm90_small_16"},  {16, 8, 320, "sm90_fp8_16"},   {64, 1, 64, "sm90_fp8_64"},
        {33, 1, 0, "sm90_fp8_64"},     {32, 64, 1024, "sm90_fp8_32"}, {128, 64, 0, "sm90_small_32"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const smla_kernel_call call = {
            .formats = SMLA_ROWS_FP8,
            .num_heads = cases[i].heads,
            .columns = cases[i].splits == 1 ? SMLA_UNSPLIT : cases[i].columns,
        };
        const smla_attention_kernel *const kernel = smla_find_kernel(&h200, &call);
        EXPECT(strcmp(launcher_of(kernel), cases[i].launcher) == 0);
    }
}

static void
test_words(void)
{
    const smla_kv_format_info *const fp8 = find_format(true);
    const smla_kv_format_info *const rows_bf16 = find_format(false);
    EXPECT_EQ(smla_join_formats(fp8, NULL), SMLA_ROWS_FP8);
    EXPECT_EQ(smla_join_formats(fp8, fp8), SMLA_ROWS_FP8);
    EXPECT_EQ(smla_join_formats(fp8, rows_bf16), SMLA_ROWS_MIXED);
    EXPECT_EQ(smla_join_formats(rows_bf16, fp8), SMLA_ROWS_MIXED);
    EXPECT_EQ(smla_join_formats(rows_bf16, rows_bf16), SMLA_ROWS_BF16);
    EXPECT_EQ(smla_join_formats(rows_bf16, NULL), SMLA_ROWS_BF16);
    char text[SMLA_FORMATS_TEXT];
    smla_describe_formats(SMLA_ROWS_FP8, text);
    EXPECT(strcmp(text, "fp8_ds_mla") == 0);
    smla_describe_formats(SMLA_ROWS_BF16, text);
    EXPECT(strcmp(text, "bfloat16") == 0);
    smla_describe_formats(SMLA_ROWS_MIXED, text);
    EXPECT(strcmp(text, "fp8_ds_mla with bfloat16") == 0);
    smla_describe_formats(SMLA_ROWS_BF16_512, text);
    EXPECT(strcmp(text, "bfloat16 of 512 values") == 0);
    for (const smla_attention_kernel *kernel = smla_attention_kernels; kernel->launch != NULL;
         kernel++) {
        smla_describe_formats(kernel->formats, text);
        const smla_kv_set formats = kernel->formats;
        const char *const named = kernel->rows_text;
        const size_t length = strlen(text);
        if (formats == 0) { /* ragged keys */
            continue;
        }
        if (kernel->sources == SMLA_SOURCE(TABLE)) {
            EXPECT(formats == SMLA_ROWS_E4M3_576 ? strcmp(named, "fp8_e4m3 with RoPE, dense") == 0
                                                 : strncmp(named, text, length) == 0 &&
                                                       strcmp(named + length, ", dense") == 0);
            continue;
        }
        EXPECT(strcmp(named, formats == SMLA_ROWS_512         ? "any of 512 values"
                             : formats == SMLA_ROWS_EXACT_512 ? "of 512 values, exact as bfloat16"
                             : formats == SMLA_ROWS_E4M3_576  ? "fp8_e4m3 with RoPE"
                             : formats == SMLA_ROWS_ANY_576   ? "any with RoPE"
                                                              : text) == 0);
    }

    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        const bool is_512 = row->head_dim == SMLA_KV_LORA_RANK && row->value_dim == row->head_dim;
        EXPECT_EQ(SMLA_ROWS_512 >> i & 1, is_512);
        EXPECT_EQ(SMLA_ROWS_ANY_576 >> i & 1,
                  row->head_dim == SMLA_HEAD_DIM && row == smla_row_as_read(row));
        EXPECT_EQ(SMLA_ROWS_EXACT_512 >> i & 1, is_512 && row->scale_type != SMLA_SCALE_FP32 &&
                                                    row->scale_type != SMLA_SCALE_CACHE);
    }

    char kernels[SMLA_KERNELS_TEXT];
    smla_describe_kernels(kernels);
    EXPECT(strcmp(kernels, "sm_80+ fp8_ds_mla; sm_80+ bfloat16; sm_80+ bfloat16 of 512 values; "
                           "sm_80+ fp8_ds_mla with bfloat16; sm_80+ fp8_e4m3 with RoPE; "
                           "sm_80+ any with RoPE; sm_80+ any of 512 values; sm_90 fp8_ds_mla; "
                           "sm_90 fp8_v4; sm_90 bfloat16; sm_90 bfloat16 of 512 values; "
                           "sm_90 of 512 values, exact as bfloat16") == 0);
    for (const smla_attention_kernel *kernel = smla_attention_kernels; kernel->launch != NULL;
         kernel++) { /* the error says that all of them serve 1 to 128 heads */
        bool serves_one = false;
        for (int i = 0; i < NUM_KERNELS; i++) {
            serves_one |= smla_attention_kernels[i].arch == kernel->arch &&
                          smla_attention_kernels[i].formats == kernel->formats &&
                          smla_attention_kernels[i].min_heads == 1;
        }
        EXPECT(serves_one);
    }
}

static void
expect_listed(const smla_cuda_device *device, const char *available, const char *selected)
{
    smla_kernel_info rows[NUM_KERNELS + 3];
    devices[0] = device == NULL ? (smla_cuda_device){0} : *device;
    memset(rows, POISON, sizeof rows);
    EXPECT_EQ(smla_cuda_kernels(rows, NUM_KERNELS + 3), NUM_KERNELS);
    for (int i = 0; i < NUM_KERNELS; i++) {
        EXPECT_EQ(rows[i].available, available[i] == '1');
        EXPECT_EQ(rows[i].selected, selected[i] == '1');
        EXPECT(strcmp(rows[i].device, "cuda") == 0);
        EXPECT(rows[i].name == smla_attention_kernels[i].name);
        const smla_attention_run run = {.kernel = &smla_attention_kernels[i]};
        EXPECT(rows[i].name == smla_cuda_kernel_name(&run));
        EXPECT(rows[i].arch == smla_attention_kernels[i].arch_text);
        EXPECT(rows[i].heads == smla_attention_kernels[i].heads_text);
        EXPECT(rows[i].kv_format == smla_attention_kernels[i].rows_text);
    }
    EXPECT(((const uint8_t *)&rows[NUM_KERNELS])[0] == POISON);
    memset(rows, POISON, sizeof rows);
    EXPECT_EQ(smla_cuda_kernels(rows, 3), NUM_KERNELS);
    EXPECT(((const uint8_t *)&rows[3])[0] == POISON);
    EXPECT_EQ(smla_cuda_kernels(NULL, 0), NUM_KERNELS);
    const smla_attention_run none = {.kernel = NULL};
    EXPECT(smla_cuda_kernel_name(&none) == NULL);
}

static void
test_listed(void)
{
    /* sm90: small of fp8_ds_mla and fp8_v4, large of both; bf16 of 576, of 512, exact 512; dense of
     * bf16, 576 and 512, few tiles of both, and dense of fp8_ds_mla and e4m3 of 576.
     * sm80: fp8; bf16, 576 and 512; mixed; e4m3 of 576; any of 576; any of 512. Ragged keys: sm90,
     * sm80. Paged keys: sm90, sm80 */
    expect_listed(&h200,
                  "111111"
                  "111111"
                  "111"
                  "11"
                  "11"
                  "111"
                  "111"
                  "111"
                  "111111"
                  "1"
                  "111"
                  "1"
                  "111"
                  "1111",
                  "111111"
                  "111111"
                  "111"
                  "11"
                  "11"
                  "111"
                  "111"
                  "000"
                  "000000"
                  "1"
                  "111"
                  "1"
                  "111"
                  "1111");
    expect_listed(&a100,
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "00"
                  "000"
                  "000"
                  "111"
                  "111111"
                  "1"
                  "111"
                  "1"
                  "111"
                  "0101",
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "00"
                  "000"
                  "000"
                  "111"
                  "111111"
                  "1"
                  "111"
                  "1"
                  "111"
                  "0101");
    expect_listed(&rtx4090,
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "00"
                  "000"
                  "000"
                  "011"
                  "011011"
                  "1"
                  "011"
                  "1"
                  "011"
                  "0101",
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "00"
                  "000"
                  "000"
                  "011"
                  "011011"
                  "1"
                  "011"
                  "1"
                  "011"
                  "0101");
    expect_listed(NULL,
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "00"
                  "000"
                  "000"
                  "000"
                  "000000"
                  "0"
                  "000"
                  "0"
                  "000"
                  "0000",
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "00"
                  "000"
                  "000"
                  "000"
                  "000000"
                  "0"
                  "000"
                  "0"
                  "000"
                  "0000");
}

int
main(void)
{
    RUN(test_table);
    RUN(test_found);
    RUN(test_first_row);
    RUN(test_words);
    RUN(test_listed);
    return report("test_cuda_kernel_table");
}
