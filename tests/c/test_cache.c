/* test_cache.c: concat_and_cache_mla, gather_kv_cache and dequantize_kv_cache, byte for byte. */
#include "instruction_sets.h"

#include <float.h>

#include "core/fp_mode.h"
#include "core/kv_format.h"
#include "reference.h"

/* ---- Write --------------------------------------------------------------------------------- */

static smla_status
write_cache(const array *kv_c, const array *k_pe, const array *kv_cache, const array *slot_mapping)
{
    const smla_concat_and_cache_mla_args args = {.struct_size = sizeof args,
                                                 .kv_c = &kv_c->tensor,
                                                 .k_pe = &k_pe->tensor,
                                                 .kv_cache = &kv_cache->tensor,
                                                 .slot_mapping = &slot_mapping->tensor};
    return smla_concat_and_cache_mla(&args, &error);
}

/* The cache row of a token, computed from the contract in doubles. */
static void
encode_token(const array *kv_c, const array *k_pe, int64_t token, bool fp8, uint8_t *row)
{
    uint16_t values[ROW];
    for (int i = 0; i < ROW; i++) {
        const void *from = i < NOPE ? AT(kv_c, token, i) : AT(k_pe, token, i - NOPE);
        if (kv_c->tensor.dtype.code == kDLBfloat) {
            memcpy(&values[i], from, sizeof values[i]);
        } else {
            values[i] = smla_float_to_bf16((float)read_value(kv_c->tensor.dtype, from));
        }
    }
    if (!fp8) {
        memcpy(row, values, sizeof values);
        return;
    }
    for (int tile = 0; tile < NOPE / TILE; tile++) {
        double amax = 0.0;
        for (int i = tile * TILE; i < (tile + 1) * TILE; i++) {
            const double x = fabs(read_value(bf16, &values[i]));
            amax = isnan(x) ? amax : fmax(amax, fmin(x, FLT_MAX));
        }
        const float scale = fmaxf((float)(amax / 448.0), FLT_MIN);
        memcpy(row + SCALES_AT + tile * (int)sizeof scale, &scale, sizeof scale);
        for (int i = tile * TILE; i < (tile + 1) * TILE; i++) {
            row[i] = nearest_e4m3((float)(read_value(bf16, &values[i]) / (double)scale));
        }
    }
    memcpy(row + ROPE_AT, values + NOPE, ROPE * sizeof values[0]);
}

static void
expect_token(const array *kv_c, const array *k_pe, int64_t token, const array *cache, int64_t slot)
{
    uint8_t wanted[ROW * 2];
    encode_token(kv_c, k_pe, token, is_fp8(cache), wanted);
    const uint8_t *row = row_of(cache, slot);
    for (int i = 0; i < (is_fp8(cache) ? FP8_ROW : ROW * 2); i++) {
        EXPECT_EQ(row[i], wanted[i]);
    }
}

static void
expect_untouched(const array *cache, int64_t slot)
{
    const uint8_t *row = row_of(cache, slot);
    for (int i = 0; i < (is_fp8(cache) ? FP8_ROW : ROW * 2); i++) {
        EXPECT_EQ(row[i], POISON);
    }
}

/* A cache. `format` 0 is bf16, 1 uint8, 2 e4m3; `shape` 0 to 2 are the ranks, 3 has gaps. */
static array *
make_cache(int format, int shape, int64_t pages, int64_t block)
{
    const DLDataType dtype = format == 0 ? bf16 : (format == 1 ? uint8 : e4m3);
    const int64_t row = format == 0 ? ROW : FP8_ROW;
    if (shape == 0) {
        return ARRAY(dtype, pages, block, row);
    }
    if (shape == 1) {
        return ARRAY(dtype, pages, block, 1, row);
    }
    if (shape == 2) {
        return ARRAY(dtype, pages * block, row);
    }
    /* Every other page of a buffer with gaps behind every token and page. */
    array *buffer = ARRAY(dtype, 2 * pages, block + 1, row + 16);
    return slice(slice(slice(buffer, 2, 0, row, 1), 1, 0, block, 1), 0, 0, 2 * pages, 2);
}

static array *
make_input(int type, int64_t rows, int64_t columns)
{
    if (type == 0) {
        return fill_normal(ARRAY(bf16, rows, columns), 1.0);
    }
    if (type == 1) {
        return fill_normal(ARRAY(fp32, rows, columns), 30.0);
    }
    array *a = ARRAY(fp16, rows, columns);
    for (int64_t i = 0; i < rows * columns; i++) {
        const uint16_t finite = (uint16_t)(random_bits() >> 20 & 0xBBFFu);
        memcpy((uint16_t *)a->tensor.data + i, &finite, sizeof finite);
    }
    return a;
}

static void
test_write(void)
{
    for (int format = 0; format < 3; format++) {
        for (int shape = 0; shape < 4; shape++) {
            for (int type = 0; type < 3; type++) {
                const array *cache = make_cache(format, shape, 3, 5);
                /* More rows than slots, and gaps behind the rows of kv_c. */
                const array *kv_c = slice(make_input(type, 9, NOPE + 8), 1, 0, NOPE, 1);
                const array *k_pe = make_input(type, 10, ROPE);
                const array *slots = VECTOR(int64, 3, -1, 14, 0, 7, -5, 2);
                EXPECT_OK(write_cache(kv_c, k_pe, cache, slots));
                for (int64_t slot = 0; slot < 15; slot++) {
                    int64_t token = 6;
                    while (token >= 0 && (int64_t)GET(slots, token) != slot) {
                        token--;
                    }
                    if (token < 0) {
                        expect_untouched(cache, slot);
                    } else {
                        expect_token(kv_c, k_pe, token, cache, slot);
                    }
                }
                free_arrays("test_write");
            }
        }
    }
}

static void
test_write_keeps_padding(void)
{
    array *buffer = ARRAY(uint8, 4, 3, FP8_ROW + 16);
    const array *cache = slice(slice(buffer, 2, 0, FP8_ROW, 1), 0, 0, 4, 2);
    EXPECT_OK(write_cache(make_input(0, 6, NOPE), make_input(0, 6, ROPE), cache,
                          VECTOR(int32, 0, 1, 2, 3, 4, 5)));
    EXPECT(is_poison(slice(buffer, 2, FP8_ROW, FP8_ROW + 16, 1)));
    EXPECT(is_poison(slice(buffer, 0, 1, 4, 2)));
}

enum { MOST_SLOTS = 4999 };

/* The last token of a slot wins, on any number of threads. Negative slots are not written. */
static void
expect_last_tokens(const array *slots, int64_t num_slots)
{
    const int64_t num_tokens = slots->shape[0];
    const array *cache = ARRAY(uint8, num_slots, 1, FP8_ROW);
    const array *kv_c = make_input(0, num_tokens, NOPE);
    const array *k_pe = make_input(0, num_tokens, ROPE);
    int64_t last[MOST_SLOTS];
    for (int64_t slot = 0; slot < num_slots; slot++) {
        last[slot] = -1;
    }
    for (int64_t token = 0; token < num_tokens; token++) {
        if (GET(slots, token) >= 0) {
            last[(int64_t)GET(slots, token)] = token;
        }
    }
    EXPECT_OK(write_cache(kv_c, k_pe, cache, slots));
    for (int64_t slot = 0; slot < num_slots; slot++) {
        if (last[slot] >= 0) {
            expect_token(kv_c, k_pe, last[slot], cache, slot);
        } else {
            expect_untouched(cache, slot);
        }
    }
    free_arrays("expect_last_tokens");
}

static const array *
draw_slots(int64_t num_tokens, int64_t num_slots)
{
    array *slots = ARRAY(int32, num_tokens);
    for (int64_t token = 0; token < num_tokens; token++) {
        SET(slots, (double)random_int(num_slots), token);
    }
    return slots;
}

/* A slot of its own for each token but every fifth, which has none. */
static array *
make_own_slots(int64_t num_tokens)
{
    array *slots = ARRAY(int32, num_tokens);
    for (int64_t token = 0; token < num_tokens; token++) {
        SET(slots, token % 5 == 4 ? -1.0 : (double)(token * 7 % MOST_SLOTS), token);
    }
    return slots;
}

/* 200 tokens are enough for several threads, and 4096 for two that each write many. */
static void
test_write_duplicates(void)
{
    enum { TOKENS = 4096 };
    expect_last_tokens(draw_slots(200, 16), 16);
    expect_last_tokens(draw_slots(TOKENS, 200), 200);
    expect_last_tokens(make_own_slots(TOKENS), MOST_SLOTS);
    static const int64_t pairs[][2] = {{0, TOKENS - 1}, {TOKENS / 2 - 1, TOKENS / 2}, {7, 8}};
    for (int i = 0; i < 3; i++) { /* tokens of two threads, far apart and not, then of one */
        array *slots = make_own_slots(TOKENS);
        SET(slots, GET(slots, pairs[i][0]), pairs[i][1]);
        expect_last_tokens(slots, MOST_SLOTS);
    }
}

static void
test_write_special_values(void)
{
    array *kv_c = fill(ARRAY(fp32, 5, NOPE), 0.0);
    const array *k_pe = fill(ARRAY(fp32, 5, ROPE), -0.0);
    const array *cache = ARRAY(uint8, 1, 5, FP8_ROW);
    SET(kv_c, -0.0, 0, 3);     /* a zero tile: the smallest scale, sign bits kept */
    SET(kv_c, INFINITY, 1, 0); /* counts as FLT_MAX */
    SET(kv_c, -INFINITY, 1, 1);
    SET(kv_c, NAN, 2, 0); /* does not count for amax */
    SET(kv_c, -NAN, 2, 1);
    SET(kv_c, 3.0, 2, 2);
    SET(kv_c, 1e-38, 3, 0);     /* amax / 448 below FLT_MIN */
    SET(kv_c, FLT_MAX, 4, 500); /* rounds to an infinite bf16 */
    EXPECT_OK(write_cache(kv_c, k_pe, cache, VECTOR(int64, 0, 1, 2, 3, 4)));
    for (int64_t token = 0; token < 5; token++) {
        expect_token(kv_c, k_pe, token, cache, token);
    }
    EXPECT_EQ(row_of(cache, 0)[3], 0x80);
    EXPECT_EQ(row_of(cache, 1)[0], 0x7E);
    EXPECT_EQ(row_of(cache, 2)[0], 0x7F);
    EXPECT_EQ(row_of(cache, 2)[1], 0xFF);
    EXPECT_EQ(row_of(cache, 2)[2], 0x7E);
}

/* A caller's mode changes no byte, for any number of threads, and is the same after a call that
 * succeeds and one that fails. */
static void
test_write_in_other_modes(void)
{
#if defined(__x86_64__)
    static const smla_fp_mode modes[] = {0x9FC0, 0x3F80, 0x5F80,
                                         0x7F80}; /* flush; down, up, to 0 */
#elif defined(__aarch64__)
    static const smla_fp_mode modes[] = {1 << 24, 2 << 22, 1 << 22, 3 << 22};
#else
    static const smla_fp_mode modes[] = {FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
#endif
    enum { TOKENS = 256 };
    array *slots = ARRAY(int32, TOKENS);
    for (int64_t token = 0; token < TOKENS; token++) {
        SET(slots, (double)token, token);
    }
    const array *k_pe = fill_normal(ARRAY(fp32, TOKENS, ROPE), 1e-38);
    const array *kv_c = fill_normal(ARRAY(fp32, TOKENS, NOPE), 1e-38);
    const array *cache = ARRAY(uint8, 1, TOKENS, FP8_ROW);
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        for (int is_good = 0; is_good < 2; is_good++) {
            SET(slots, is_good ? 0 : TOKENS, 0);
            const smla_fp_mode before = smla_fp_change(modes[i]);
            const smla_status status = write_cache(kv_c, k_pe, cache, slots);
            const smla_fp_mode after = smla_fp_change(before);
            EXPECT(after == modes[i]);
            EXPECT((status == SMLA_OK) == is_good);
        }
        for (int64_t token = 0; token < TOKENS; token++) {
            expect_token(kv_c, k_pe, token, cache, token);
        }
        memset(cache->tensor.data, POISON, TOKENS * FP8_ROW);
    }
}

static void
test_write_bad_slot(void)
{
    const array *cache = ARRAY(uint8, 2, 4, FP8_ROW);
    const array *kv_c = make_input(0, 4, NOPE);
    const array *k_pe = make_input(0, 4, ROPE);
    EXPECT_FAIL(
        write_cache(kv_c, k_pe, cache, VECTOR(int32, 0, 1, 8, 2)), SMLA_ERROR_VALUE,
        "concat_and_cache_mla: `slot_mapping` must be below the 8 slots of `kv_cache`, got 8 "
        "at token 2");
    EXPECT_FAIL(write_cache(kv_c, k_pe, cache, VECTOR(int64, INT64_MAX)), SMLA_ERROR_VALUE,
                "got 9223372036854775807 at token 0");
    EXPECT_FAIL(write_cache(kv_c, k_pe, cache, VECTOR(int32, 0, 1, 2, 3, 4)), SMLA_ERROR_VALUE,
                "`kv_c` must have at least one row per entry of `slot_mapping` (5), got 4");
    EXPECT_OK(write_cache(kv_c, k_pe, cache, VECTOR(int64, INT64_MIN, -1)));
    EXPECT(is_poison(cache));
    EXPECT_OK(write_cache(ARRAY(bf16, 0, NOPE), ARRAY(bf16, 0, ROPE), cache, ARRAY(int32, 0)));
    EXPECT(is_poison(cache));
}

/* ---- Gather -------------------------------------------------------------------------------- */

typedef struct gather {
    const array *cache, *block_table, *seq_lens, *starts, *seq_starts, *out;
} gather;

static smla_status
run_gather(const gather *g)
{
    const smla_gather_kv_cache_args args = {.struct_size = sizeof args,
                                            .kv_cache = &g->cache->tensor,
                                            .block_table = &g->block_table->tensor,
                                            .seq_lens = &g->seq_lens->tensor,
                                            .workspace_starts = &g->starts->tensor,
                                            .seq_starts = g->seq_starts == NULL
                                                              ? NULL
                                                              : &g->seq_starts->tensor,
                                            .out = &g->out->tensor};
    return smla_gather_kv_cache(&args, &error);
}

/* A cache row as bf16: products are fp32, then rounded once; bf16 bits are copied. */
static void
expect_row(const array *cache, int64_t slot, const uint8_t *actual)
{
    const uint8_t *row = row_of(cache, slot);
    for (int i = 0; i < ROW; i++) {
        uint16_t wanted;
        uint16_t got;
        memcpy(&got, actual + 2 * i, sizeof got);
        if (!is_fp8(cache)) {
            memcpy(&wanted, row + 2 * i, sizeof wanted);
        } else if (i >= NOPE) {
            memcpy(&wanted, row + ROPE_AT + 2 * (i - NOPE), sizeof wanted);
        } else {
            wanted = smla_float_to_bf16((float)row_value(cache, row, i));
        }
        EXPECT_EQ(got, wanted);
    }
}

static void
test_gather(void)
{
    for (int format = 0; format < 3; format++) {
        for (int shape = 0; shape < 4; shape += 3) {
            array *buffer = ARRAY(bf16, 110, ROW + 4);
            const gather g = {.cache = fill_cache(make_cache(format, shape, 6, 16)),
                              .block_table = transpose(ARRAY(int32, 5, 4), 0, 1),
                              .seq_lens = VECTOR(int32, 70, 0, 9, 16),
                              .starts = VECTOR(int32, 25, 99, 0, 9),
                              .seq_starts = VECTOR(int32, 10, 0, 0, 16),
                              .out = slice(buffer, 1, 0, ROW, 1)};
            for (int64_t at = 0; at < 20; at++) {
                SET(g.block_table, (double)random_int(6), at / 5, at % 5);
            }
            EXPECT_OK(run_gather(&g));
            for (int64_t req = 0; req < 4; req++) {
                const int64_t first = (int64_t)GET(g.starts, req);
                for (int64_t p = 0; p < (int64_t)GET(g.seq_lens, req); p++) {
                    const int64_t position = p + (int64_t)GET(g.seq_starts, req);
                    const int64_t page = (int64_t)GET(g.block_table, req, position / 16);
                    expect_row(g.cache, page * 16 + position % 16, AT(g.out, first + p, 0));
                }
            }
            EXPECT(is_poison(slice(g.out, 0, 95, 110, 1)));
            EXPECT(is_poison(slice(buffer, 1, ROW, ROW + 4, 1)));
            free_arrays("test_gather");
        }
    }
}

static void
test_gather_bad_values(void)
{
    gather g = {.cache = fill_cache(ARRAY(uint8, 4, 4, FP8_ROW)),
                .block_table = VECTOR(int32, 0, 1, 2, 3),
                .seq_lens = VECTOR(int32, 3, 8),
                .starts = VECTOR(int32, 0, 3),
                .out = ARRAY(bf16, 11, ROW)};
    array table = *g.block_table; /* [4] as [2, 2] */
    table.tensor.ndim = 2;
    table.tensor.shape = (int64_t[]){2, 2};
    table.tensor.strides = NULL;
    g.block_table = &table;
    EXPECT_OK(run_gather(&g));
    g.out = ARRAY(bf16, 10, ROW);
    EXPECT_FAIL(
        run_gather(&g), SMLA_ERROR_VALUE,
        "gather_kv_cache: `workspace_starts` must keep every row inside the 10 rows of `out`, "
        "got rows 3 to 11 for request 1");
    g.out = ARRAY(bf16, 20, ROW);
    g.starts = VECTOR(int32, -1, 3);
    EXPECT_FAIL(run_gather(&g), SMLA_ERROR_VALUE, "got rows -1 to 2 for request 0");
    g.starts = VECTOR(int32, INT32_MAX, 3);
    EXPECT_FAIL(run_gather(&g), SMLA_ERROR_VALUE, "`workspace_starts`");
    g.starts = VECTOR(int32, 0, 3);
    g.seq_lens = VECTOR(int32, 3, -1);
    EXPECT_FAIL(run_gather(&g), SMLA_ERROR_VALUE, "`seq_lens` must be >= 0, got -1 at request 1");
    g.seq_lens = VECTOR(int32, 3, 9);
    EXPECT_FAIL(run_gather(&g), SMLA_ERROR_VALUE,
                "`block_table` must have at least 3 columns for request 1, got 2");
    g.seq_lens = VECTOR(int32, 3, 8);
    g.seq_starts = VECTOR(int32, 0, -4);
    EXPECT_FAIL(run_gather(&g), SMLA_ERROR_VALUE, "`seq_starts` must be >= 0, got -4 at request 1");
    g.seq_starts = VECTOR(int32, INT32_MAX, 0);
    EXPECT_FAIL(run_gather(&g), SMLA_ERROR_VALUE, "`block_table` must have at least");
    g.seq_starts = NULL;
    table.tensor.data = VECTOR(int32, 0, 1, 2, 4)->tensor.data;
    EXPECT_FAIL(
        run_gather(&g), SMLA_ERROR_VALUE,
        "`block_table` must name pages of the cache (0 to 3), got 4 for request 1, block 1");
    table.tensor.data = VECTOR(int32, -1, 1, 2, 3)->tensor.data;
    EXPECT_FAIL(run_gather(&g), SMLA_ERROR_VALUE, "got -1 for request 0, block 0");
}

/* ---- Dequantize ---------------------------------------------------------------------------- */

static void
test_dequantize(void)
{
    for (int format = 0; format < 3; format++) {
        for (int shape = 0; shape < 4; shape++) {
            const array *cache = fill_cache(make_cache(format, shape, 5, 15));
            const array *exact = shape == 2 ? ARRAY(fp32, 75, ROW) : ARRAY(fp32, 5, 15, ROW);
            const array *rounded = shape == 2 ? ARRAY(bf16, 75, ROW) : ARRAY(bf16, 5, 15, ROW);
            smla_dequantize_kv_cache_args args = {.struct_size = sizeof args,
                                                  .kv_cache = &cache->tensor,
                                                  .out = &exact->tensor};
            EXPECT_OK(smla_dequantize_kv_cache(&args, &error));
            args.out = &rounded->tensor;
            EXPECT_OK(smla_dequantize_kv_cache(&args, &error));
            for (int64_t slot = 0; slot < 75; slot++) {
                const float *row = (const float *)exact->tensor.data + slot * ROW;
                for (int i = 0; i < ROW; i++) {
                    EXPECT_NEAR(row[i], (float)row_value(cache, row_of(cache, slot), i), 0.0);
                }
                expect_row(cache, slot, (const uint8_t *)rounded->tensor.data + slot * ROW * 2);
            }
            free_arrays("test_dequantize");
        }
    }
}

/* out is every second page and token of a buffer with gaps behind rows. It gets the bits of a
 * contiguous result, and the rest of the buffer stays poison. */
static void
expect_strided_out(const array *cache, bool is_flat, DLDataType dtype)
{
    const array *plain = is_flat ? ARRAY(dtype, 12, ROW) : ARRAY(dtype, 3, 4, ROW);
    array *buffer = is_flat ? ARRAY(dtype, 24, ROW + 3) : ARRAY(dtype, 6, 9, ROW + 3);
    const int token_dim = is_flat ? 0 : 1;
    array *out = slice(buffer, token_dim + 1, 0, ROW, 1);
    out = slice(out, token_dim, 0, is_flat ? 24 : 8, 2);
    out = is_flat ? out : slice(out, 0, 0, 6, 2);
    smla_dequantize_kv_cache_args args = {.struct_size = sizeof args,
                                          .kv_cache = &cache->tensor,
                                          .out = &plain->tensor};
    EXPECT_OK(smla_dequantize_kv_cache(&args, &error));
    args.out = &out->tensor;
    EXPECT_OK(smla_dequantize_kv_cache(&args, &error));
    for (int64_t slot = 0; slot < 12; slot++) {
        const void *row = is_flat ? AT(out, slot, 0) : AT(out, slot / 4, slot % 4, 0);
        const size_t bytes = ROW * dtype.bits / 8u;
        EXPECT(memcmp(row, (const uint8_t *)plain->tensor.data + (size_t)slot * bytes, bytes) == 0);
    }
    EXPECT(is_poison(slice(buffer, token_dim + 1, ROW, ROW + 3, 1)));
    EXPECT(is_poison(slice(buffer, token_dim, 1, is_flat ? 24 : 9, 2)));
    EXPECT(is_flat || is_poison(slice(buffer, 1, 8, 9, 1)));
    EXPECT(is_flat || is_poison(slice(buffer, 0, 1, 6, 2)));
    /* Rows that overlap, rows that go backwards, and values with gaps are refused. */
    out->strides[token_dim] = ROW - 1;
    EXPECT_FAIL(smla_dequantize_kv_cache(&args, &error), SMLA_ERROR_VALUE,
                "dequantize_kv_cache: `out` must have elements that do not overlap");
    out->strides[token_dim] = -ROW;
    EXPECT_FAIL(smla_dequantize_kv_cache(&args, &error), SMLA_ERROR_VALUE,
                "`out` must have positive strides (it is written), got -576");
    out->strides[token_dim + 1] = 2;
    EXPECT_FAIL(smla_dequantize_kv_cache(&args, &error), SMLA_ERROR_VALUE,
                "`out` must have a contiguous last dimension (stride 1), got stride 2");
}

/* `out` has the cache's pages and tokens, no fewer and no more. */
static void
test_dequantize_sizes(void)
{
    const array *cache = fill_cache(make_cache(0, 0, 3, 4));
    const int64_t sizes[][2] = {{2, 4}, {4, 4}, {3, 3}, {3, 5}};
    for (int i = 0; i < 4; i++) {
        const array *out = ARRAY(fp32, sizes[i][0], sizes[i][1], ROW);
        const smla_dequantize_kv_cache_args args = {.struct_size = sizeof args,
                                                    .kv_cache = &cache->tensor,
                                                    .out = &out->tensor};
        EXPECT_FAIL(smla_dequantize_kv_cache(&args, &error), SMLA_ERROR_VALUE,
                    "dequantize_kv_cache: `out` must have shape [3, 4, 576], got");
        EXPECT(is_poison(out));
    }
    free_arrays("test_dequantize_sizes");
}

static void
test_dequantize_strided(void)
{
    for (int format = 0; format < 2; format++) {
        for (int is_flat = 0; is_flat < 2; is_flat++) {
            const array *cache = fill_cache(make_cache(format, is_flat ? 2 : 0, 3, 4));
            expect_strided_out(cache, is_flat, fp32);
            expect_strided_out(cache, is_flat, bf16);
            free_arrays("test_dequantize_strided");
        }
    }
}

static void
run_tests(void)
{
    RUN(test_write);
    RUN(test_write_keeps_padding);
    RUN(test_write_duplicates);
    RUN(test_write_special_values);
    RUN(test_write_in_other_modes);
    RUN(test_write_bad_slot);
    RUN(test_gather);
    RUN(test_gather_bad_values);
    RUN(test_dequantize);
    RUN(test_dequantize_sizes);
    RUN(test_dequantize_strided);
}

/* The facts of each table entry agree: the parts of a row fill it in order, without a gap. */
static void
test_format_table(void)
{
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        const int bits[] = {[SMLA_NOPE_BF16] = 16, [SMLA_NOPE_E4M3] = 8, [SMLA_NOPE_E2M1] = 4};
        const int scale_bytes = row->scale_type == SMLA_SCALE_FP32 ? 4 : 1;
        const bool is_split = row->layout == SMLA_PAGE_SPLIT;
        const int nope_bytes = row->nope_dim * bits[row->nope_type] / 8;
        const int element_bytes = row->dtypes == SMLA_DTYPE_BYTES ? 1 : 2;
        EXPECT_EQ((int)row->number, i);
        const bool is_next = i > 0 && row[-1].format == row->format; /* neighbours of one format */
        const int first = (int)smla_find_kv_format((int32_t)row->format)->number;
        EXPECT(is_next ? first < i : first == i);
        EXPECT(!is_next || strcmp(row->name, row[-1].name) == 0);
        EXPECT_EQ(row->head_dim, row->nope_dim + row->rope_dim);
        EXPECT(row->value_dim <= row->head_dim);
        EXPECT_EQ(row->num_scales * row->scale_tile, row->num_scales == 0 ? 0 : row->nope_dim);
        EXPECT(row->num_scales <= SMLA_MAX_ROW_SCALES);
        EXPECT_EQ(row->scale_offset, row->num_scales == 0 || is_split ? 0 : nope_bytes);
        EXPECT_EQ(row->rope_offset, nope_bytes + (is_split ? 0 : row->scale_bytes));
        EXPECT_EQ(smla_has_rope_codes(row), i == SMLA_ROW_FP8_E4M3_576);
        EXPECT_EQ(row->data_bytes,
                  nope_bytes + row->rope_dim * (i == SMLA_ROW_FP8_E4M3_576 ? 1 : 2));
        EXPECT_EQ(row->row_bytes, row->data_bytes + row->scale_bytes);
        /* fp8_v4 has a byte of padding */
        EXPECT(row->scale_bytes - scale_bytes * row->num_scales == (i == SMLA_ROW_FP8_V4));
        EXPECT((row->num_scales == 0) ==
               (row->scale_type == SMLA_SCALE_NONE || row->scale_type == SMLA_SCALE_CACHE));
        EXPECT(row->least_amax == 0 || row->scale_type != SMLA_SCALE_E4M3);
        EXPECT_EQ(row->row_bytes, row->row_elements * element_bytes);
        EXPECT_EQ(row->row_bytes % row->alignment, 0);
        /* the sets: attention reads all rows that are values, in the main list none of e2m1; rows
         * with one scale only where it is dense */
        const bool is_value = row->value_dim != 0;
        const bool is_main = is_value && row->nope_type != SMLA_NOPE_E2M1;
        EXPECT_EQ(row->has_one_scale, i == SMLA_ROW_FP8_TOKEN);
        EXPECT_EQ(SMLA_KV_EXTRA >> i & 1, is_value && !row->has_one_scale);
        EXPECT_EQ(SMLA_KV_ATTENTION >> i & 1, is_main && !row->has_one_scale);
        EXPECT_EQ(SMLA_KV_DENSE >> i & 1, is_main);
    }
    EXPECT(smla_find_kv_format(SMLA_KV_INFER) == NULL && smla_find_kv_format(99) == NULL);
}

int
main(void)
{
    RUN(test_format_table);
    run_on_every_instruction_set(run_tests);
    return report("test_cache");
}
