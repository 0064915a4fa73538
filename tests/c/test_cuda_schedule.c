/* test_cuda_schedule.c: the plans of schedule.c and the table of kernels.c, for devices that the
 * machine need not have. A plan is compared with the best of all plans, which a model of the
 * estimated times finds without short cuts.
 */
#include "cuda/attention/table/kernels.c"  // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/schedule.c" // NOLINT(bugprone-suspicious-include)

#include "fake_cuda/launchers.h"

static const smla_kv_set all_formats[] = {SMLA_ROWS_FP8, SMLA_ROWS_BF16, SMLA_ROWS_MIXED,
                                          SMLA_ROWS_BF16_512, SMLA_KV_SET(SMLA_ROW_FP8_V4)};

enum { NUM_SETS = sizeof all_formats / sizeof all_formats[0] };

static const smla_kv_format_info *
find_format(bool is_fp8)
{
    return &smla_kv_formats[is_fp8 ? SMLA_ROW_FP8_DS_MLA : SMLA_ROW_BFLOAT16];
}

/* ---- The table ----------------------------------------------------------------------------- */

/* The rows in the order in which they are tried. attention_sm80.cu has in shared memory: query and
 * keys, weights, scores of four groups of warps, and small arrays. */
static void
test_table(void)
{
    static const struct {
        const char *launcher, *name, *arch, *heads;
        smla_kv_set formats;
        int min_heads, heads_per_cta, max_columns, block_columns, ctas_per_sm, shared_bytes;
    } rows[] = {
        {"sm90_small_32", "attention_small_sm90.cu, 32 heads per CTA", "sm_90", "17...128",
         SMLA_ROWS_FP8, 17, 32, 256, 64, 1, 232448},
        {"sm90_small_16", "attention_small_sm90.cu, 16 heads per CTA", "sm_90", "1...128",
         SMLA_ROWS_FP8, 1, 16, 256, 64, 1, 232448},
        {"sm90_small_64", "attention_small_sm90.cu, 64 heads per CTA", "sm_90", "33...128",
         SMLA_ROWS_FP8, 33, 64, 256, 64, 1, 232448},
        {"sm90_small_v4_32", "attention_small_sm90.cu, 32 heads per CTA", "sm_90", "17...128",
         SMLA_ROWS_V4, 17, 32, 256, 64, 1, 232448},
        {"sm90_small_v4_16", "attention_small_sm90.cu, 16 heads per CTA", "sm_90", "1...128",
         SMLA_ROWS_V4, 1, 16, 256, 64, 1, 232448},
        {"sm90_small_v4_64", "attention_small_sm90.cu, 64 heads per CTA", "sm_90", "33...128",
         SMLA_ROWS_V4, 33, 64, 256, 64, 1, 232448},
        {"sm90_fp8_64", "attention_fp8_sm90.cu, 64 heads per CTA", "sm_90", "33...128",
         SMLA_ROWS_FP8, 33, 64, 0, 128, 1, 232448},
        {"sm90_fp8_32", "attention_fp8_sm90.cu, 32 heads per CTA", "sm_90", "17...128",
         SMLA_ROWS_FP8, 17, 32, 0, 128, 1, 232448},
        {"sm90_fp8_16", "attention_fp8_sm90.cu, 16 heads per CTA", "sm_90", "1...128",
         SMLA_ROWS_FP8, 1, 16, 0, 128, 1, 232448},
        {"sm90_v4_64", "attention_fp8_sm90.cu, 64 heads per CTA", "sm_90", "33...128", SMLA_ROWS_V4,
         33, 64, 0, 128, 1, 232448},
        {"sm90_v4_32", "attention_fp8_sm90.cu, 32 heads per CTA", "sm_90", "17...128", SMLA_ROWS_V4,
         17, 32, 0, 128, 1, 232448},
        {"sm90_v4_16", "attention_fp8_sm90.cu, 16 heads per CTA", "sm_90", "1...128", SMLA_ROWS_V4,
         1, 16, 0, 128, 1, 232448},
        {"sm90_bf16_64", "attention_bf16_sm90.cu, 64 heads per CTA", "sm_90", "1...128",
         SMLA_ROWS_BF16, 1, 64, 0, 128, 1, 232448},
        {"sm90_bf16_512_64", "attention_bf16_sm90.cu, 64 heads per CTA", "sm_90", "1...128",
         SMLA_ROWS_BF16_512, 1, 64, 0, 128, 1, 232448},
        {"sm90_512_64", "attention_bf16_sm90.cu, 64 heads per CTA", "sm_90", "1...128",
         SMLA_ROWS_EXACT_512, 1, 64, 0, 128, 1, 232448},
        {"sm90_dense_64", "attention_dense_sm90.cu, 64 heads per CTA", "sm_90", "1...128",
         SMLA_ROWS_BF16 | SMLA_ROWS_TILED, 1, 64, 0, 0, 1, 232448},
        {"sm90_dense_512_64", "attention_dense_sm90.cu, 64 heads per CTA", "sm_90", "1...128",
         SMLA_ROWS_BF16_512 | SMLA_ROWS_TILED, 1, 64, 0, 0, 1, 232448},
        {"sm90_fp8_dense_64", "attention_fp8_dense_sm90.cu, 64 heads per CTA", "sm_90", "33...128",
         SMLA_ROWS_FP8 | SMLA_ROWS_TILED, 33, 64, 0, 128, 1, 232448},
        {"sm90_fp8_dense_32", "attention_fp8_dense_sm90.cu, 32 heads per CTA", "sm_90", "17...128",
         SMLA_ROWS_FP8 | SMLA_ROWS_TILED, 17, 32, 0, 128, 1, 232448},
        {"sm90_fp8_dense_16", "attention_fp8_dense_sm90.cu, 16 heads per CTA", "sm_90", "1...128",
         SMLA_ROWS_FP8 | SMLA_ROWS_TILED, 1, 16, 0, 128, 1, 232448},
        {"sm80_fp8_64", "attention_sm80.cu, 64 heads per CTA", "sm_80+", "33...128", SMLA_ROWS_FP8,
         33, 64, 0, 32, 1, 161664},
        {"sm80_fp8_32", "attention_sm80.cu, 32 heads per CTA", "sm_80+", "17...128", SMLA_ROWS_FP8,
         17, 32, 0, 32, 1, 99584},
        {"sm80_fp8_16", "attention_sm80.cu, 16 heads per CTA", "sm_80+", "1...128", SMLA_ROWS_FP8,
         1, 16, 0, 32, 2, 68608},
        {"sm80_bf16_64", "attention_sm80.cu, 64 heads per CTA", "sm_80+", "33...128",
         SMLA_ROWS_BF16, 33, 64, 0, 32, 1, 149376},
        {"sm80_bf16_32", "attention_sm80.cu, 32 heads per CTA", "sm_80+", "17...128",
         SMLA_ROWS_BF16, 17, 32, 0, 32, 1, 93440},
        {"sm80_bf16_16", "attention_sm80.cu, 16 heads per CTA", "sm_80+", "1...128", SMLA_ROWS_BF16,
         1, 16, 0, 32, 2, 65536},
        {"sm80_bf16_512_64", "attention_sm80.cu, 64 heads per CTA", "sm_80+", "33...128",
         SMLA_ROWS_BF16_512, 33, 64, 0, 32, 1, 149376},
        {"sm80_bf16_512_32", "attention_sm80.cu, 32 heads per CTA", "sm_80+", "17...128",
         SMLA_ROWS_BF16_512, 17, 32, 0, 32, 1, 93440},
        {"sm80_bf16_512_16", "attention_sm80.cu, 16 heads per CTA", "sm_80+", "1...128",
         SMLA_ROWS_BF16_512, 1, 16, 0, 32, 2, 65536},
        {"sm80_mixed_16", "attention_sm80.cu, 16 heads per CTA", "sm_80+", "1...128",
         SMLA_ROWS_MIXED, 1, 16, 0, 32, 2, 68608},
        {"sm80_512_64", "attention_sm80.cu, 64 heads per CTA", "sm_80+", "33...128",
         SMLA_ROWS_512 | SMLA_ROWS_E4M3_QUERY, 33, 64, 0, 32, 1, 161664},
        {"sm80_512_32", "attention_sm80.cu, 32 heads per CTA", "sm_80+", "17...128",
         SMLA_ROWS_512 | SMLA_ROWS_E4M3_QUERY, 17, 32, 0, 32, 1, 99584},
        {"sm80_512_16", "attention_sm80.cu, 16 heads per CTA", "sm_80+", "1...128",
         SMLA_ROWS_512 | SMLA_ROWS_E4M3_QUERY, 1, 16, 0, 32, 2, 68608},
    };
    enum { NUM_ROWS = sizeof rows / sizeof rows[0] };
    EXPECT_EQ((int)NUM_KERNELS, (int)NUM_ROWS);
    EXPECT(smla_attention_kernels[NUM_ROWS].launch == NULL);
    for (int i = 0; i < NUM_ROWS; i++) {
        const smla_attention_kernel *const kernel = &smla_attention_kernels[i];
        const bool is_hopper = strcmp(rows[i].arch, "sm_90") == 0;
        EXPECT(strcmp(launcher_of(kernel), rows[i].launcher) == 0);
        EXPECT(strcmp(kernel->name, rows[i].name) == 0);
        EXPECT(strcmp(text_of(kernel).arch, rows[i].arch) == 0);
        EXPECT(strcmp(text_of(kernel).heads, rows[i].heads) == 0);
        EXPECT_EQ(kernel->arch, is_hopper ? 90 : 80);
        EXPECT_EQ(kernel->formats, rows[i].formats | (is_hopper ? 0 : SMLA_ROWS_RANGED));
        EXPECT_EQ(kernel->min_heads, rows[i].min_heads);
        EXPECT_EQ(kernel->heads_per_cta, rows[i].heads_per_cta);
        EXPECT_EQ(kernel->max_columns, rows[i].max_columns);
        EXPECT_EQ(kernel->block_columns, rows[i].block_columns);
        EXPECT_EQ(kernel->ctas_per_sm, rows[i].ctas_per_sm);
        EXPECT_EQ(kernel->shared_bytes, rows[i].shared_bytes);
        EXPECT_EQ(kernel->leaves_halves,
                  is_hopper &&
                      (rows[i].formats & ~(SMLA_ROWS_FP8 | SMLA_ROWS_V4 | SMLA_ROWS_TILED)) == 0);
        EXPECT_EQ(kernel->leaves_room, rows[i].max_columns != 0 && rows[i].heads_per_cta < 64);
        EXPECT_EQ(kernel->saves_waves, rows[i].max_columns != 0 && rows[i].heads_per_cta == 64);
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
                        smla_find_whole_kernel(&device, all_formats[f], heads);
                    EXPECT(found != NULL &&
                           strcmp(launcher_of(found),
                                  expect_whole(&device, all_formats[f], heads)) == 0);
                }
                EXPECT(smla_find_whole_kernel(&device, all_formats[f], 0) == NULL);
                EXPECT(smla_find_whole_kernel(&device, all_formats[f], 129) == NULL);
            }
        }
    }
    /* A Hopper device that lacks one byte of shared memory takes the portable rows. */
    const smla_cuda_device less = {90, 132, 232447};
    EXPECT(strcmp(launcher_of(smla_find_whole_kernel(&less, SMLA_ROWS_FP8, 64)), "sm80_fp8_64") ==
           0);
    const smla_cuda_device old = {75, 40, 65536};
    const smla_cuda_device old_and_large = {79, 40, 232448};
    const smla_cuda_device small = {80, 40, 65535};
    for (int f = 0; f < NUM_SETS; f++) {
        EXPECT(smla_find_whole_kernel(&old, all_formats[f], 16) == NULL);
        EXPECT(smla_find_whole_kernel(&old_and_large, all_formats[f], 16) == NULL);
        EXPECT(smla_find_whole_kernel(&small, all_formats[f], 16) == NULL);
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
        const smla_attention_kernel *const kernel =
            smla_find_kernel(&h200, SMLA_ROWS_FP8, cases[i].heads, cases[i].splits,
                             cases[i].columns);
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
        const smla_kv_set formats = kernel->formats & SMLA_KV_ALL;
        const char *const named = text_of(kernel).formats;
        const size_t length = strlen(text);
        if (kernel->formats & SMLA_ROWS_TILED) {
            EXPECT(strncmp(named, text, length) == 0 && strcmp(named + length, ", dense") == 0);
            continue;
        }
        EXPECT(strcmp(named, formats == SMLA_ROWS_512         ? "any of 512 values"
                             : formats == SMLA_ROWS_EXACT_512 ? "of 512 values, exact as bfloat16"
                                                              : text) == 0);
    }

    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        const bool is_512 = row->head_dim == SMLA_KV_LORA_RANK && row->value_dim == row->head_dim;
        EXPECT_EQ(SMLA_ROWS_512 >> i & 1, is_512);
        EXPECT_EQ(SMLA_ROWS_EXACT_512 >> i & 1, is_512 && row->scale_type != SMLA_SCALE_FP32 &&
                                                    row->scale_type != SMLA_SCALE_CACHE);
    }

    char kernels[SMLA_KERNELS_TEXT];
    smla_describe_kernels(kernels);
    EXPECT(strcmp(kernels,
                  "sm_80+ fp8_ds_mla; sm_80+ bfloat16; sm_80+ bfloat16 of 512 values; "
                  "sm_80+ fp8_ds_mla with bfloat16; sm_80+ any of 512 values; sm_90 fp8_ds_mla; "
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
        EXPECT(rows[i].arch == text_of(&smla_attention_kernels[i]).arch);
        EXPECT(rows[i].heads == text_of(&smla_attention_kernels[i]).heads);
        EXPECT(rows[i].kv_format == text_of(&smla_attention_kernels[i]).formats);
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
     * bf16, 576 and 512, and of fp8_ds_mla.
     * sm80: fp8; bf16, 576 and 512; mixed; 512 */
    expect_listed(&h200,
                  "111111"
                  "111111"
                  "111"
                  "11"
                  "111"
                  "111"
                  "111111"
                  "1"
                  "111",
                  "111111"
                  "111111"
                  "111"
                  "11"
                  "111"
                  "000"
                  "000000"
                  "1"
                  "111");
    expect_listed(&a100,
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "000"
                  "111"
                  "111111"
                  "1"
                  "111",
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "000"
                  "111"
                  "111111"
                  "1"
                  "111");
    expect_listed(&rtx4090,
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "000"
                  "011"
                  "011011"
                  "1"
                  "011",
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "000"
                  "011"
                  "011011"
                  "1"
                  "011");
    expect_listed(NULL,
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "000"
                  "000"
                  "000000"
                  "0"
                  "000",
                  "000000"
                  "000000"
                  "000"
                  "00"
                  "000"
                  "000"
                  "000000"
                  "0"
                  "000");
}

/* ---- The model ----------------------------------------------------------------------------- */

static int64_t
ceil_of(int64_t n, int64_t by)
{
    return n / by + (n % by > 0);
}

/* Columns per split; those of each list are rounded up to a multiple of 64. */
static int64_t
model_columns(const split_problem *p, int splits)
{
    return 64 *
           (ceil_of(ceil_of(p->topk, splits), 64) + ceil_of(ceil_of(p->extra_topk, splits), 64));
}

static int64_t
model_places(const split_problem *p, const smla_attention_kernel *row)
{
    int64_t per_sm = 1;
    while (per_sm < row->ctas_per_sm &&
           (per_sm + 1) * (row->shared_bytes + 1024) <= p->device->max_shared_bytes + 1024) {
        per_sm++;
    }
    return p->device->num_sms * per_sm;
}

static int64_t
model_tiles(const split_problem *p, const smla_attention_kernel *row)
{
    return ceil_of(p->num_heads, row->heads_per_cta);
}

/* Whether CTAs of the combine kernel, of 64 to 256 threads with 64 registers each, fit beside. */
static bool
model_is_beside(const split_problem *p, int64_t tokens, int splits, int64_t ctas)
{
    const int threads = splits <= 8 ? 64 : splits <= 16 ? 128 : 256;
    return splits <= 32 && ctas <= p->device->num_sms &&
           tokens * p->num_heads <= p->device->num_sms * (16384 / 64 / threads);
}

static int64_t
model_cost(const split_problem *p, const smla_attention_kernel *row, int64_t tokens, int splits)
{
    const int64_t places = model_places(p, row);
    const int64_t ctas = tokens * model_tiles(p, row) * splits;
    const int64_t blocks = ceil_of(model_columns(p, splits), row->block_columns);
    const bool is_crowded = row->leaves_halves && row->max_columns == 0 && model_tiles(p, row) >= 3;
    const int64_t crowd_cost = is_crowded ? blocks / 16 : 0;
    int64_t cost = ceil_of(ctas, places) * (blocks * row->block_cost + row->cta_cost + crowd_cost);
    cost += row->start_cost;
    if (splits > 1 && row->leaves_halves) {
        cost += 12 + 6 * ceil_of(splits, 16) + tokens * splits * p->num_heads / 512;
    } else if (splits > 1 && row->arch == 90) {
        cost += 12 + splits / 2 + tokens * splits * p->num_heads / 192;
    } else if (splits > 1) {
        cost += 16 + splits;
    }
    const bool is_beside = row->leaves_room && model_is_beside(p, tokens, splits, ctas);
    return cost + (row->leaves_halves && 2 * ctas > places && !is_beside ? 6 : 0);
}

static bool
model_fits(const split_problem *p, const smla_attention_kernel *row, int splits)
{
    const bool is_small = splits > 1 && model_columns(p, splits) <= row->max_columns;
    return row->formats == p->whole->formats && row->arch == p->whole->arch &&
           row->min_heads <= p->num_heads && p->num_heads <= 128 &&
           row->shared_bytes <= p->device->max_shared_bytes && (row->max_columns == 0 || is_small);
}

/* Whether one CTA per SM, of at most 32 heads and 256 columns, is enough for the batch. */
static bool
model_is_small(const split_problem *p, int64_t tokens)
{
    const int64_t tiles = ceil_of(p->num_heads, p->num_heads <= 16 ? 16 : 32);
    for (int splits = 2; splits <= 64; splits++) {
        if (model_columns(p, splits) <= 256) {
            return tokens * tiles * splits <= p->device->num_sms;
        }
    }
    return false;
}

/* The row with the lowest cost for a number of splits; the first where several have it. */
static run_plan
model_run(const split_problem *p, int64_t tokens, int splits)
{
    run_plan best = {.num_splits = splits};
    for (int i = 0; i < NUM_KERNELS; i++) {
        const smla_attention_kernel *const row = &smla_attention_kernels[i];
        const bool is_left_out = row->saves_waves && model_is_small(p, tokens);
        const int64_t cost =
            model_fits(p, row, splits) && !is_left_out ? model_cost(p, row, tokens, splits) : 0;
        if (cost != 0 && (best.kernel == NULL || cost < best.cost)) {
            best.kernel = row;
            best.cost = cost;
        }
    }
    return best;
}

static int64_t
model_useful(const split_problem *p)
{
    const int64_t longest = p->topk > p->extra_topk ? p->topk : p->extra_topk;
    return longest <= 64 ? 1 : longest > 64 * 63 ? 64 : ceil_of(longest, 64);
}

/* Pairs of token and split whose CTAs fill three waves. */
static int64_t
model_parts(const split_problem *p)
{
    return 3 * model_places(p, p->whole) / model_tiles(p, p->whole);
}

/* The plan with the lowest cost: the batch in one piece, full waves and a rest, or any number of
 * splits that three waves allow; the first in this order where several have it. */
static batch_plan
model_plan(const split_problem *p, int64_t tokens)
{
    batch_plan best = {.run = model_run(p, tokens, 1), .rest = tokens};
    const int64_t tiles = model_tiles(p, p->whole);
    const int64_t places = model_places(p, p->whole);
    const int64_t waves = tokens * tiles / places;
    const int64_t full = waves * places / tiles;
    if (full > 0 && full < tokens) {
        const int64_t cost =
            model_cost(p, p->whole, full, 1) + model_plan(p, tokens - full).run.cost + 30;
        if (cost < best.run.cost) {
            best.run.cost = cost;
            best.rest = tokens - full;
        }
    }
    for (int splits = 2; splits <= model_useful(p) && splits * tokens <= model_parts(p); splits++) {
        const run_plan run = model_run(p, tokens, splits);
        if (run.cost < best.run.cost) {
            best = (batch_plan){.run = run, .rest = tokens};
        }
    }
    return best;
}

/* ---- Plans --------------------------------------------------------------------------------- */

static smla_attention_shape
make_shape(smla_kv_set formats, int64_t tokens, int64_t heads, int64_t topk, int64_t extra)
{
    return (smla_attention_shape){
        .num_tokens = tokens,
        .num_heads = heads,
        .topk = topk,
        .extra_topk = extra,
        .formats = {&smla_kv_formats[31 - __builtin_clz(formats)],
                    formats == SMLA_ROWS_MIXED || extra > 0
                        ? &smla_kv_formats[__builtin_ctz(formats)]
                        : NULL},
    };
}

static split_problem
make_problem(smla_kv_set formats, const smla_attention_shape *shape)
{
    split_problem problem;
    memset(&problem, POISON, sizeof problem);
    if (!find_problem(&devices[0], shape, formats, &problem)) {
        printf("no kernel for sm_%d\n", devices[0].compute_capability);
        exit(2);
    }
    EXPECT(problem.device == &devices[0]);
    EXPECT_EQ(problem.num_heads, shape->num_heads);
    EXPECT_EQ(problem.topk, shape->topk);
    EXPECT_EQ(problem.extra_topk, shape->extra_topk);
    return problem;
}

/* The number of splits of a call of this shape; its workspace has the size that callers ask for. */
static int
planned_splits(const smla_attention_shape *shape)
{
    smla_attention_plan plan;
    smla_cuda_plan_attention(shape, &plan);
    if (shape->formats[0] != NULL) {
        EXPECT_EQ(plan.workspace_bytes, smla_cuda_attention_workspace_size(shape));
    }
    return plan.runs[0].num_splits;
}

static void
expect_same_plan(const batch_plan *actual, const batch_plan *expected)
{
    EXPECT(actual->run.kernel == expected->run.kernel);
    EXPECT_EQ(actual->run.num_splits, expected->run.num_splits);
    EXPECT_EQ(actual->run.cost, expected->run.cost);
    EXPECT_EQ(actual->rest, expected->rest);
}

/* Checks what holds for every plan, and that no other plan is better. */
static void
check_plan(smla_kv_set formats, const smla_attention_shape *shape)
{
    const split_problem problem = make_problem(formats, shape);
    const int64_t tokens = shape->num_tokens;
    const int former = failures;
    const batch_plan plan = find_plan(&problem, tokens);
    const batch_plan model = model_plan(&problem, tokens);
    expect_same_plan(&plan, &model);
    EXPECT(plan.run.kernel != NULL &&
           (plan.run.kernel->formats & SMLA_KV_ALL) ==
               (formats != SMLA_ROWS_V4 || problem.device->compute_capability == 90
                    ? formats
                    : (smla_kv_set)SMLA_ROWS_512));
    EXPECT(plan.run.num_splits >= 1 && plan.run.num_splits <= SMLA_MAX_SPLITS);
    EXPECT(plan.rest >= 1 && plan.rest <= tokens);
    EXPECT(plan.rest == tokens || plan.run.num_splits == 1);
    EXPECT(plan.run.cost > 0);
    EXPECT_EQ(planned_splits(shape), plan.run.num_splits);
    /* The plans of the whole batch and of its rest share one workspace. */
    const int64_t room = smla_cuda_attention_workspace_size(shape);
    for (int64_t part = tokens;; part = find_plan(&problem, part).rest) {
        const batch_plan end = find_plan(&problem, part);
        const int64_t rows = part * end.run.num_splits * shape->num_heads;
        EXPECT(end.run.num_splits == 1 ||
               SMLA_PARTIAL_ALIGN - 1 + smla_partial_bytes(rows) <= room);
        if (end.rest == part) {
            break;
        }
    }
    /* The plan is the same when it is known already, and when it is made anew. */
    const batch_plan known = find_plan(&problem, tokens);
    memset(known_plans, 0, sizeof known_plans);
    const batch_plan fresh = find_plan(&problem, tokens);
    expect_same_plan(&known, &plan);
    expect_same_plan(&fresh, &plan);
    if (failures > former && former < MAX_PRINTED) {
        printf("    sm_%d, %d SMs: %s, %d tokens, %d heads, topk %d + %d\n",
               devices[0].compute_capability, devices[0].num_sms, text_of(plan.run.kernel).formats,
               (int)tokens, (int)shape->num_heads, (int)shape->topk, (int)shape->extra_topk);
    }
}

/* Bytes that any plan of up to this many tokens needs, with those for alignment. */
static int64_t
model_workspace(smla_kv_set formats, const smla_attention_shape *shape)
{
    const split_problem problem = make_problem(formats, shape);
    const int64_t all = shape->num_tokens * model_useful(&problem);
    const int64_t most = model_parts(&problem);
    const int64_t rows = (all < most ? all : most) * shape->num_heads;
    return model_useful(&problem) == 1 || rows == 0 ? 0
                                                    : 16 + ceil_of(rows * 8, 16) * 16 + rows * 2048;
}

static const int64_t some_topks[][2] = {{0, 0},      {1, 0},       {64, 0},     {65, 0},
                                        {128, 64},   {512, 0},     {2048, 0},   {2048, 512},
                                        {129, 2048}, {2111, 0},    {4033, 130}, {65536, 0},
                                        {0, 256},    {1024, 1024}, {4096, 0},   {4097, 0},
                                        {16384, 0},  {16385, 0},   {16640, 0},  {16641, 0}};
enum { NUM_TOPKS = sizeof some_topks / sizeof some_topks[0] };

static const int64_t some_heads[] = {1, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 127, 128};
enum { NUM_HEADS = sizeof some_heads / sizeof some_heads[0] };

/* Every number of SMs, on devices of several kinds; everything else is random. */
static void
test_every_size_of_device(void)
{
    /* The last four kinds just lack or have room for two CTAs per SM, of bf16 and of FP8 rows. */
    static const int facts[][2] = {{80, 166912}, {89, 101376}, {90, 232448}, {100, 232448},
                                   {80, 132095}, {80, 132096}, {80, 138239}, {80, 138240}};
    for (int sms = 16; sms <= 160; sms++) {
        for (int draw = 0; draw < 1000; draw++) {
            const int kind = draw % 2 == 0 ? 2 : (int)random_int(8);
            const smla_kv_set formats = all_formats[draw / 2 % NUM_SETS];
            const int64_t *const topk = some_topks[random_int(NUM_TOPKS)];
            const int64_t extra = topk[1] == 0 && formats == SMLA_ROWS_MIXED ? 64 : topk[1];
            const int64_t few = 1 + random_int(2 * sms);
            const smla_attention_shape shape =
                make_shape(formats, draw % 4 < 2 ? few : 1 + random_int(4096),
                           some_heads[random_int(NUM_HEADS)], topk[0], extra);
            devices[0] = (smla_cuda_device){facts[kind][0], sms, facts[kind][1]};
            memset(known_plans, 0, sizeof known_plans); /* they are of the device before */
            check_plan(formats, &shape);
            EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), model_workspace(formats, &shape));
        }
    }
}

/* Every batch up to 4096, and every number of heads. */
static void
test_every_batch(void)
{
    devices[0] = h200;
    int64_t former[3] = {0};
    for (int64_t tokens = 1; tokens <= 4096; tokens++) {
        for (int f = 0; f < 3; f++) {
            const smla_attention_shape shape =
                make_shape(all_formats[f], tokens, 128, 2048, f == 2 ? 512 : 0);
            check_plan(all_formats[f], &shape);
            const int64_t bytes = smla_cuda_attention_workspace_size(&shape);
            EXPECT(bytes >= former[f]);
            former[f] = bytes;
        }
        const smla_attention_shape shape =
            make_shape(SMLA_ROWS_FP8, tokens, 1 + tokens % 128, 1024, 0);
        check_plan(SMLA_ROWS_FP8, &shape);
    }
}

/* Plans of an H200 as they are now. Whoever tunes the table or the estimates sees what changes. */
static void
test_tuned_plans(void)
{
    static const struct {
        smla_kv_set formats;
        int tokens, heads, topk, extra;
        const char *launcher;
        int splits, rest, cost;
    } plans[] = {
        {SMLA_ROWS_FP8, 1, 128, 2048, 0, "sm90_small_16", 16, 1, 62},
        {SMLA_ROWS_FP8, 2, 128, 2048, 0, "sm90_small_32", 16, 2, 74},
        {SMLA_ROWS_FP8, 4, 128, 2048, 0, "sm90_small_32", 8, 4, 90},
        {SMLA_ROWS_FP8, 8, 128, 2048, 0, "sm90_small_64", 8, 8, 116},
        {SMLA_ROWS_FP8, 16, 128, 2048, 0, "sm90_fp8_64", 4, 16, 164},
        {SMLA_ROWS_FP8, 32, 128, 2048, 0, "sm90_fp8_64", 2, 32, 228},
        {SMLA_ROWS_FP8, 33, 128, 2048, 0, "sm90_fp8_64", 2, 33, 228},
        {SMLA_ROWS_FP8, 64, 64, 2048, 0, "sm90_fp8_32", 1, 64, 228},
        {SMLA_ROWS_FP8, 64, 128, 2048, 0, "sm90_fp8_64", 1, 64, 322},
        {SMLA_ROWS_FP8, 66, 128, 2048, 0, "sm90_fp8_64", 1, 66, 322},
        {SMLA_ROWS_FP8, 67, 128, 2048, 0, "sm90_fp8_64", 1, 1, 414},
        {SMLA_ROWS_FP8, 100, 128, 2048, 0, "sm90_fp8_64", 1, 100, 626},
        {SMLA_ROWS_FP8, 128, 128, 2048, 0, "sm90_fp8_64", 1, 128, 626},
        {SMLA_ROWS_FP8, 192, 128, 2048, 0, "sm90_fp8_64", 1, 192, 930},
        {SMLA_ROWS_FP8, 1, 64, 2048, 0, "sm90_small_16", 32, 1, 59},
        {SMLA_ROWS_FP8, 8, 64, 2048, 0, "sm90_small_32", 8, 8, 90},
        {SMLA_ROWS_FP8, 12, 64, 2048, 0, "sm90_small_64", 11, 12, 105},
        {SMLA_ROWS_FP8, 16, 64, 2048, 0, "sm90_small_64", 8, 16, 116},
        {SMLA_ROWS_FP8, 20, 64, 2048, 0, "sm90_fp8_64", 6, 20, 147},
        {SMLA_ROWS_FP8, 9, 64, 2048, 0, "sm90_small_64", 11, 9, 101},
        {SMLA_ROWS_FP8, 9, 40, 2048, 0, "sm90_small_64", 11, 9, 96},
        {SMLA_ROWS_FP8, 20, 64, 1024, 0, "sm90_small_64", 6, 20, 104},
        {SMLA_ROWS_FP8, 10, 100, 1024, 0, "sm90_small_64", 6, 10, 100},
        {SMLA_ROWS_FP8, 20, 64, 256, 768, "sm90_small_64", 6, 20, 104},
        {SMLA_ROWS_FP8, 10, 128, 256, 768, "sm90_small_64", 6, 10, 104},
        {SMLA_ROWS_FP8, 12, 64, 256, 0, "sm90_small_16", 2, 12, 67},
        {SMLA_ROWS_FP8, 20, 64, 512, 0, "sm90_small_32", 3, 20, 87},
        {SMLA_ROWS_FP8, 32, 64, 512, 0, "sm90_small_32", 2, 32, 96},
        {SMLA_ROWS_FP8, 48, 16, 512, 0, "sm90_small_16", 2, 48, 85},
        {SMLA_ROWS_FP8, 12, 128, 512, 0, "sm90_small_32", 2, 12, 94},
        {SMLA_ROWS_FP8, 80, 128, 512, 0, "sm90_fp8_64", 1, 80, 242},
        {SMLA_ROWS_FP8, 96, 128, 1024, 0, "sm90_fp8_64", 1, 96, 370},
        {SMLA_ROWS_FP8, 96, 128, 2048, 0, "sm90_fp8_64", 1, 30, 579},
        {SMLA_ROWS_FP8, 160, 64, 2048, 0, "sm90_fp8_64", 1, 28, 514},
        {SMLA_ROWS_V4, 24, 50, 128, 512, "sm90_small_v4_64", 4, 24, 98},
        {SMLA_ROWS_V4, 12, 128, 128, 512, "sm90_small_v4_64", 4, 12, 101},
        {SMLA_ROWS_V4, 9, 100, 128, 1024, "sm90_small_v4_64", 6, 9, 110},
        {SMLA_ROWS_FP8, 32, 64, 2048, 0, "sm90_fp8_64", 4, 32, 164},
        {SMLA_ROWS_FP8, 1, 16, 2048, 0, "sm90_small_16", 32, 1, 56},
        {SMLA_ROWS_FP8, 64, 16, 2048, 0, "sm90_fp8_16", 2, 64, 168},
        {SMLA_ROWS_FP8, 133, 16, 2048, 0, "sm90_fp8_16", 1, 1, 312},
        {SMLA_ROWS_FP8, 8, 32, 512, 0, "sm90_small_16", 8, 8, 53},
        {SMLA_ROWS_FP8, 140, 32, 2048, 0, "sm90_fp8_32", 1, 8, 332},
        {SMLA_ROWS_FP8, 1, 128, 64, 0, "sm90_fp8_16", 1, 1, 70},
        {SMLA_ROWS_FP8, 4, 128, 128, 0, "sm90_small_16", 2, 4, 51},
        {SMLA_ROWS_FP8, 8, 128, 2048, 512, "sm90_fp8_32", 4, 8, 144},
        {SMLA_ROWS_FP8, 5, 17, 256, 0, "sm90_small_16", 4, 5, 49},
        {SMLA_ROWS_FP8, 20, 24, 1024, 0, "sm90_small_32", 6, 20, 79},
        {SMLA_ROWS_V4, 16, 64, 128, 512, "sm90_small_v4_32", 4, 16, 88},
        {SMLA_ROWS_V4, 24, 64, 128, 512, "sm90_small_v4_64", 4, 24, 101},
        {SMLA_ROWS_V4, 4, 128, 128, 1024, "sm90_small_v4_32", 8, 4, 82},
        {SMLA_ROWS_V4, 8, 128, 128, 1024, "sm90_small_v4_64", 8, 8, 105},
        {SMLA_ROWS_V4, 11, 128, 128, 1024, "sm90_small_v4_64", 6, 11, 116},
        {SMLA_ROWS_BF16, 1, 128, 2048, 0, "sm90_bf16_64", 16, 1, 94},
        {SMLA_ROWS_BF16, 4, 64, 2048, 0, "sm90_bf16_64", 16, 4, 105},
        {SMLA_ROWS_BF16, 64, 64, 2048, 0, "sm90_bf16_64", 2, 64, 231},
        {SMLA_ROWS_BF16, 8, 64, 2048, 0, "sm90_bf16_64", 8, 8, 117},
        {SMLA_ROWS_BF16, 16, 64, 1024, 0, "sm90_bf16_64", 4, 16, 115},
        {SMLA_ROWS_BF16, 64, 64, 512, 0, "sm90_bf16_64", 1, 64, 112},
        {SMLA_ROWS_BF16, 16, 128, 2048, 0, "sm90_bf16_64", 4, 16, 168},
        {SMLA_ROWS_BF16, 66, 128, 2048, 0, "sm90_bf16_64", 1, 66, 304},
        {SMLA_ROWS_BF16, 140, 64, 2048, 0, "sm90_bf16_64", 1, 8, 451},
        {SMLA_ROWS_BF16_512, 16, 128, 2048, 0, "sm90_bf16_512_64", 4, 16, 168},
        {SMLA_ROWS_MIXED, 1, 128, 2048, 512, "sm80_mixed_16", 32, 1, 144},
        {SMLA_ROWS_MIXED, 16, 128, 2048, 512, "sm80_mixed_16", 2, 16, 690},
        {SMLA_ROWS_MIXED, 140, 16, 2048, 128, "sm80_mixed_16", 3, 140, 851},
    };
    devices[0] = h200;
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        const smla_attention_shape shape =
            make_shape(plans[i].formats, plans[i].tokens, plans[i].heads, plans[i].topk,
                       plans[i].extra);
        const split_problem problem = make_problem(plans[i].formats, &shape);
        const batch_plan plan = find_plan(&problem, shape.num_tokens);
        const bool is_same = strcmp(launcher_of(plan.run.kernel), plans[i].launcher) == 0 &&
                             plan.run.num_splits == plans[i].splits && plan.rest == plans[i].rest &&
                             plan.run.cost == plans[i].cost;
        EXPECT(is_same);
        if (!is_same) {
            printf("    plan %d is {\"%s\", %d, %d, %d}\n", (int)i, launcher_of(plan.run.kernel),
                   plan.run.num_splits, (int)plan.rest, (int)plan.run.cost);
        }
    }
}

/* Plans that share a place in the table of known plans are asked for in turns. */
static void
test_known_plans(void)
{
    devices[0] = h200;
    devices[1] = (smla_cuda_device){90, 60, 232448};
    const smla_attention_shape shapes[] = {
        make_shape(SMLA_ROWS_FP8, 8, 128, 2048, 0),
        make_shape(SMLA_ROWS_FP8, 8 + KNOWN_PLANS, 128, 2048, 0),
        make_shape(SMLA_ROWS_FP8, 8, 64, 2048, 0),
        make_shape(SMLA_ROWS_FP8, 8, 128, 512, 0),
        make_shape(SMLA_ROWS_FP8, 8, 128, 2048, 512),
        make_shape(SMLA_ROWS_BF16, 8, 128, 2048, 0),
    };
    enum { NUM_SHAPES = sizeof shapes / sizeof shapes[0] };
    for (int i = 0; i < 2 * NUM_SHAPES * NUM_SHAPES; i++) {
        const smla_attention_shape *const shape =
            &shapes[i / 2 % NUM_SHAPES * (i / 24 + 1) % NUM_SHAPES];
        split_problem problem =
            make_problem(smla_join_formats(shape->formats[0], shape->formats[1]), shape);
        problem.device = &devices[i % 2];
        const batch_plan plan = find_plan(&problem, shape->num_tokens);
        const batch_plan model = model_plan(&problem, shape->num_tokens);
        expect_same_plan(&plan, &model);
    }
    /* At first no plan is known, not even that of 0 tokens. */
    memset(known_plans, 0, sizeof known_plans);
    const split_problem problem = make_problem(SMLA_ROWS_FP8, &shapes[0]);
    EXPECT(find_plan(&problem, 0).run.kernel != NULL);
    /* A plan that is known is not made again. */
    known_plans[3].plan.run.cost = 0;
    (void)find_plan(&problem, 3);
    known_plans[3].plan.run.cost = 12345;
    EXPECT_EQ(find_plan(&problem, 3).run.cost, 12345);
    /* A thread that finds another one at the table plans by itself, and leaves the table alone. */
    (void)atomic_flag_test_and_set(&known_plans_lock);
    const batch_plan own = find_plan(&problem, 3);
    const batch_plan model = model_plan(&problem, 3);
    expect_same_plan(&own, &model);
    EXPECT_EQ(known_plans[3].plan.run.cost, 12345);
    atomic_flag_clear(&known_plans_lock);
    EXPECT_EQ(find_plan(&problem, 3).run.cost, 12345);
    memset(known_plans, 0, sizeof known_plans);
    devices[1] = (smla_cuda_device){0};
}

/* Calls that differ in one field of a known plan's key, or in two whose sum, difference or product
 * is the same. Those of a pair share a place in the table. */
typedef struct plan_key {
    int device_id;
    smla_kv_set formats;
    int64_t tokens, heads, topk, extra;
} plan_key;

static split_problem
problem_of(const plan_key *key)
{
    const smla_attention_shape shape =
        make_shape(key->formats, key->tokens, key->heads, key->topk, key->extra);
    split_problem problem = make_problem(key->formats, &shape);
    problem.device = &devices[key->device_id];
    return problem;
}

static const plan_key key_pairs[][2] = {
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {1, SMLA_ROWS_FP8, 8, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_BF16, 8, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_V4, 8, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 0, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 16, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 64, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 128, 512, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 128, 2048, 512}},
    /* equal sums */
    {{0, SMLA_ROWS_FP8, 4, 128, 128, 0}, {0, SMLA_ROWS_FP8, 4, 128, 64, 64}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 112, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 64, 2112, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 64}, {0, SMLA_ROWS_FP8, 8, 64, 2048, 128}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 128, 2032, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 16}, {0, SMLA_ROWS_FP8, 24, 128, 2048, 0}},
    /* equal differences */
    {{0, SMLA_ROWS_FP8, 1, 128, 1024, 0}, {0, SMLA_ROWS_FP8, 1, 128, 2048, 1024}},
    {{0, SMLA_ROWS_FP8, 8, 100, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 116, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 64, 1984, 0}, {0, SMLA_ROWS_FP8, 8, 128, 2048, 0}},
    /* equal products, and fields that are swapped */
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 512}, {0, SMLA_ROWS_FP8, 8, 128, 1024, 1024}},
    {{0, SMLA_ROWS_FP8, 8, 96, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 32, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 64, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 128, 1024, 0}},
    {{0, SMLA_ROWS_FP8, 16, 128, 512, 0}, {0, SMLA_ROWS_FP8, 128, 16, 512, 0}},
    {{0, SMLA_ROWS_FP8, 8, 64, 128, 0}, {0, SMLA_ROWS_FP8, 8, 128, 64, 0}},
};

enum { NUM_KEY_PAIRS = sizeof key_pairs / sizeof key_pairs[0] };

static bool
is_same_plan(const batch_plan *a, const batch_plan *b)
{
    return a->run.kernel == b->run.kernel && a->run.num_splits == b->run.num_splits &&
           a->run.cost == b->run.cost && a->rest == b->rest;
}

/* Whoever asks for one of a pair must not get the plan of the other, which is in its place. */
static void
test_keys_of_known_plans(void)
{
    devices[0] = h200;
    devices[1] = (smla_cuda_device){90, 60, 232448};
    for (int i = 0; i < 2 * NUM_KEY_PAIRS; i++) {
        const plan_key *const pair = key_pairs[i / 2];
        const plan_key *const former = &pair[i % 2];
        const plan_key *const key = &pair[1 - i % 2];
        const split_problem known = problem_of(former);
        const split_problem asked = problem_of(key);
        const batch_plan model = model_plan(&asked, key->tokens);
        const batch_plan other = model_plan(&known, former->tokens);
        EXPECT(!is_same_plan(&model, &other)); /* or the pair would show nothing */
        EXPECT_EQ(former->tokens % KNOWN_PLANS, key->tokens % KNOWN_PLANS);
        memset(known_plans, 0, sizeof known_plans);
        (void)find_plan(&known, former->tokens);
        const batch_plan plan = find_plan(&asked, key->tokens);
        expect_same_plan(&plan, &model);
        const batch_plan again = find_plan(&asked, key->tokens);
        expect_same_plan(&again, &model);
        const batch_plan back = find_plan(&known, former->tokens);
        expect_same_plan(&back, &other);
    }
    memset(known_plans, 0, sizeof known_plans);
    devices[1] = (smla_cuda_device){0};
}

/* A shape of few different values, so that many shapes differ in a single field. */
static smla_attention_shape
draw_shape(void)
{
    static const int64_t tokens[] = {8, 24, 67, 140};
    static const int64_t heads[] = {16, 64, 128};
    static const int64_t topks[] = {512, 1024, 2048};
    static const int64_t extras[] = {0, 512, 1024};
    const smla_kv_set formats = all_formats[random_int(2)];
    smla_attention_shape shape = make_shape(formats, tokens[random_int(4)], heads[random_int(3)],
                                            topks[random_int(3)], extras[random_int(3)]);
    shape.device_id = (int32_t)random_int(2);
    shape.has_ranges = random_int(4) == 0;
    shape.num_splits = random_int(4) == 0 ? (int32_t)(1 + random_int(3)) : 0;
    return shape;
}

/* A call's plan depends on the call alone, whatever was planned before it. */
static void
test_plans_in_any_order(void)
{
    devices[0] = h200;
    devices[1] = (smla_cuda_device){90, 60, 232448};
    known_plan warm[KNOWN_PLANS] = {{.num_tokens = 0}};
    for (int i = 0; i < 20000; i++) {
        const smla_attention_shape shape = draw_shape();
        smla_attention_plan plan;
        smla_attention_plan cold;
        memset(&plan, POISON, sizeof plan);
        memcpy(known_plans, warm, sizeof warm);
        smla_cuda_plan_attention(&shape, &plan);
        memcpy(warm, known_plans, sizeof warm);
        memset(known_plans, 0, sizeof known_plans);
        smla_cuda_plan_attention(&shape, &cold);
        EXPECT_EQ(plan.workspace_bytes, cold.workspace_bytes);
        EXPECT_EQ(plan.num_runs, cold.num_runs);
        for (int r = 0; r < cold.num_runs; r++) {
            EXPECT(plan.runs[r].kernel == cold.runs[r].kernel);
            EXPECT_EQ(plan.runs[r].num_tokens, cold.runs[r].num_tokens);
            EXPECT_EQ(plan.runs[r].num_splits, cold.runs[r].num_splits);
            EXPECT_EQ(plan.runs[r].cut_bytes, cold.runs[r].cut_bytes);
            EXPECT_EQ(plan.runs[r].interleaves, cold.runs[r].interleaves);
        }
    }
    memset(known_plans, 0, sizeof known_plans);
    devices[1] = (smla_cuda_device){0};
}

/* ---- Runs of a plan ------------------------------------------------------------------------- */

static void
expect_run(const smla_attention_run *run, const split_problem *problem, smla_kv_set formats,
           const run_plan *model, int64_t tokens)
{
    const smla_attention_shape part =
        make_shape(formats, tokens, problem->num_heads, problem->topk, problem->extra_topk);
    const bool is_split = model->num_splits > 1;
    const bool is_long = model_columns(problem, model->num_splits) >= 256;
    EXPECT(run->kernel == model->kernel);
    EXPECT_EQ(run->num_tokens, tokens);
    EXPECT_EQ(run->num_splits, model->num_splits);
    EXPECT_EQ(run->cut_bytes, is_split ? 0 : model_workspace(formats, &part));
    EXPECT_EQ(run->interleaves,
              is_split && is_long && model->kernel->arch == 90 && model->kernel->max_columns == 0);
}

/* Tokens in front of a rest run unsplit on the kernel for whole calls, and the rest as a batch of
 * its own. Where the caller gives the number of splits, there is one run, of the first kernel that
 * fits so many columns. */
static void
test_runs_of_plans(void)
{
    static const int64_t topks[][2] = {{2048, 0},  {512, 0},    {128, 512}, {256, 256},
                                       {256, 768}, {1024, 512}, {65, 0},    {300, 300}};
    int num_rests = 0;
    int num_split_rests = 0;
    int num_interleaved = 0;
    int num_at_limit = 0;
    devices[0] = h200;
    memset(known_plans, 0, sizeof known_plans);
    for (int i = 0; i < 20000; i++) {
        const smla_kv_set formats = all_formats[random_int(2)];
        const int64_t *const topk = topks[random_int(8)];
        smla_attention_shape shape =
            make_shape(formats, 1 + random_int(400), some_heads[random_int(NUM_HEADS)], topk[0],
                       topk[1]);
        const split_problem problem = make_problem(formats, &shape);
        const batch_plan model = model_plan(&problem, shape.num_tokens);
        smla_attention_plan plan;
        smla_cuda_plan_attention(&shape, &plan);
        const int64_t start = shape.num_tokens - model.rest;
        EXPECT_EQ(plan.num_runs, start > 0 ? 2 : 1);
        run_plan last = model.run;
        if (start > 0) {
            const run_plan whole = {.kernel = problem.whole, .num_splits = 1};
            expect_run(&plan.runs[0], &problem, formats, &whole, start);
            last = model_plan(&problem, model.rest).run;
            num_rests++;
            num_split_rests += last.num_splits > 1 && last.kernel != problem.whole;
        }
        expect_run(&plan.runs[plan.num_runs - 1], &problem, formats, &last, model.rest);
        num_interleaved += plan.runs[plan.num_runs - 1].interleaves;
        num_at_limit += last.num_splits > 1 && last.kernel->max_columns == 0 &&
                        model_columns(&problem, last.num_splits) == 256;

        shape.num_splits = 1 + (int)random_int(SMLA_MAX_SPLITS);
        smla_cuda_plan_attention(&shape, &plan);
        EXPECT_EQ(plan.num_runs, 1);
        EXPECT(plan.runs[0].kernel == smla_find_kernel(&devices[0], formats, shape.num_heads,
                                                       shape.num_splits,
                                                       model_columns(&problem, shape.num_splits)));
        EXPECT_EQ(plan.runs[0].num_tokens, shape.num_tokens);
        EXPECT_EQ(plan.runs[0].num_splits, shape.num_splits);
        EXPECT_EQ(plan.runs[0].cut_bytes, 0);
        EXPECT(!plan.runs[0].interleaves);
    }
    /* The shapes have all kinds of runs. */
    EXPECT(num_rests > 100 && num_split_rests > 10 && num_interleaved > 100 && num_at_limit > 0);
}

static void
test_columns(void)
{
    static const int64_t topks[] = {0,
                                    1,
                                    63,
                                    64,
                                    65,
                                    2048,
                                    4097,
                                    INT32_MAX,
                                    INT64_C(1) << 31,
                                    UINT32_MAX,
                                    INT64_C(1) << 32,
                                    INT64_C(1) << 40};
    for (int splits = 1; splits <= SMLA_MAX_SPLITS; splits++) {
        for (int i = 0; i < 12; i++) {
            const split_problem problem = {.topk = topks[i], .extra_topk = topks[11 - i]};
            EXPECT_EQ(count_columns(&problem, splits), model_columns(&problem, splits));
            EXPECT_EQ(count_columns(&problem, splits),
                      smla_split_columns(topks[i], splits) +
                          smla_split_columns(topks[11 - i], splits));
        }
    }
}

/* The number of splits where there is no plan, and where the caller gives it. */
static void
test_planned_splits(void)
{
    devices[0] = h200;
    smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 1, 128, 2048, 0);
    const int planned = planned_splits(&shape);
    EXPECT(planned > 1);
    shape.formats[0] = NULL; /* not known yet: planned as FP8 */
    EXPECT_EQ(planned_splits(&shape), planned);
    shape.num_splits = 7;
    EXPECT_EQ(planned_splits(&shape), 7);
    shape.num_splits = 0;
    shape.device_id = 1;
    EXPECT_EQ(planned_splits(&shape), 1);
    shape.device_id = 0;
    shape.num_tokens = 0;
    EXPECT_EQ(planned_splits(&shape), 1);
    shape.num_tokens = 1;
    devices[0].compute_capability = 75;
    EXPECT_EQ(planned_splits(&shape), 1);
}

/* Lists with dense columns or a `begin` are for kernels that serve them, on Hopper too. */
static void
test_ranged_lists(void)
{
    devices[0] = h200;
    for (int num_splits = 0; num_splits <= 2; num_splits++) {
        for (int f = 0; f < NUM_SETS; f++) {
            smla_attention_shape shape =
                make_shape(all_formats[f], 8, 64, 2048, all_formats[f] == SMLA_ROWS_MIXED ? 64 : 0);
            smla_attention_plan plan;
            shape.num_splits = num_splits;
            shape.has_ranges = true;
            smla_cuda_plan_attention(&shape, &plan);
            for (int i = 0; i < plan.num_runs; i++) {
                EXPECT(plan.runs[i].kernel != NULL && plan.runs[i].kernel->arch == 80);
            }
            EXPECT(plan.workspace_bytes == smla_cuda_attention_workspace_size(&shape));
            EXPECT(num_splits == 1 || plan.workspace_bytes > 0);
        }
    }
}

/* ---- Workspace ----------------------------------------------------------------------------- */

static void
test_workspace(void)
{
    devices[0] = h200;
    for (int i = 0; i < NUM_TOPKS; i++) {
        for (int h = 0; h < NUM_HEADS; h++) {
            int64_t former = 0;
            for (int64_t tokens = 0; tokens <= 600; tokens += 1 + tokens / 8) {
                smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, tokens, some_heads[h],
                                                        some_topks[i][0], some_topks[i][1]);
                shape.formats[0] = shape.formats[1] = NULL; /* every format */
                int64_t largest = 0;
                for (int f = 0; f < 3; f++) {
                    const int64_t bytes = model_workspace(all_formats[f], &shape);
                    largest = bytes > largest ? bytes : largest;
                }
                const int64_t bytes = smla_cuda_attention_workspace_size(&shape);
                EXPECT_EQ(bytes, largest);
                EXPECT(bytes >= former);
                former = bytes;
            }
        }
    }
    smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 3, 5, 2048, 0);
    shape.num_splits = 1;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 0);
    shape.num_splits = 2;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 16 + 30 * 8 + 30 * 2048);
    shape.num_splits = 3; /* 45 rows of 8 bytes, rounded up to 16 */
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 16 + 368 + 45 * 2048);
    shape.num_splits = 2;
    shape.num_tokens = 0;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 0);
    shape = make_shape(SMLA_ROWS_FP8, 3, 5, 2048, 0);
    shape.device_id = 1;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 0);
    shape.formats[0] = NULL;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 0);
}

/* ---- Direct prefills ----------------------------------------------------------------------- */

/* 38 ps per key and tile of 64 heads against 650 ps per gathered row and 8,000,000 per call. */
static void
test_prefers_direct(void)
{
    static const struct {
        int heads, tiles;
    } cases[] = {{33, 1}, {64, 1}, {65, 1}, {96, 1}, {97, 2}, {128, 2}};
    devices[0] = h200;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 650, cases[i].heads, 1000, 0);
        const int64_t equal = 1000 * 38 * cases[i].tiles;
        EXPECT(!smla_cuda_prefers_direct(&shape, equal, 0));
        EXPECT(smla_cuda_prefers_direct(&shape, equal + 1, 0));
        EXPECT(smla_cuda_prefers_direct(&shape, equal, 1));
        shape.num_tokens = 4000; /* 38 * 4,000,000 = 19 * 8,000,000 */
        EXPECT(!smla_cuda_prefers_direct(&shape, 0, 19 * cases[i].tiles));
        EXPECT(smla_cuda_prefers_direct(&shape, 1, 19 * cases[i].tiles));
        EXPECT(smla_cuda_prefers_direct(&shape, 0, 19 * cases[i].tiles + 1));
    }
    for (int heads = 1; heads <= 32; heads++) { /* FP8 rows lose nothing, so any gather is a loss */
        const smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 4096, heads, 2048, 0);
        EXPECT(smla_cuda_prefers_direct(&shape, 1, 0));
        EXPECT(smla_cuda_prefers_direct(&shape, 0, 1));
        EXPECT(!smla_cuda_prefers_direct(&shape, 0, 0));
    }
    smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 1, 64, 1, 0);
    EXPECT(smla_cuda_prefers_direct(&shape, 1000, 1));
    shape.device_id = 1; /* no such device */
    EXPECT(!smla_cuda_prefers_direct(&shape, 1000, 1));
    shape.device_id = 0;
    devices[0] = a100;
    EXPECT(!smla_cuda_prefers_direct(&shape, 1000, 1));
    devices[0] = (smla_cuda_device){100, 148, 232448}; /* has the portable kernels alone */
    EXPECT(!smla_cuda_prefers_direct(&shape, 1000, 1));
    devices[0] = (smla_cuda_device){75, 40, 65536};
    EXPECT(!smla_cuda_prefers_direct(&shape, 1000, 1));
}

int
main(void)
{
    RUN(test_table);
    RUN(test_found);
    RUN(test_first_row);
    RUN(test_words);
    RUN(test_listed);
    RUN(test_every_size_of_device);
    RUN(test_every_batch);
    RUN(test_tuned_plans);
    RUN(test_known_plans);
    RUN(test_keys_of_known_plans);
    RUN(test_plans_in_any_order);
    RUN(test_runs_of_plans);
    RUN(test_columns);
    RUN(test_planned_splits);
    RUN(test_ranged_lists);
    RUN(test_workspace);
    RUN(test_prefers_direct);
    return report("test_cuda_schedule");
}
