/* test_row_formats.c: rows of keys of 512 values and of the indexer's keys, in every format, and
 * fp8_e4m3 of 576: the bytes of writers and the values of readers, against the scalar functions of
 * numeric.h.
 */
#include "instruction_sets.h"

#include <assert.h>
#include <float.h>

#include "core/kv_format.h"
#include "core/numeric.h"

enum { PAGES = 3, BLOCK = 4, TOKENS = PAGES * BLOCK, MOST = 576, MOST_BYTES = 1024 };

static const float KV_SCALE = 0.37f;

typedef struct row_bytes {
    uint8_t data[MOST_BYTES];
    uint8_t scales[SMLA_MAX_ROW_SCALES];
} row_bytes;

/* The scale of a tile, and its bytes. */
static float
choose_scale(const smla_kv_format_info *format, float amax, uint8_t *bytes)
{
    const float top = format->nope_type == SMLA_NOPE_E4M3 ? SMLA_E4M3_MAX : SMLA_E2M1_MAX;
    float scale = fmaxf(amax / top, FLT_MIN);
    if (format->least_amax != 0) {
        int exponent = 0;
        (void)frexp(fmax(amax, format->least_amax) / top, &exponent); /* in [2^(e-1), 2^e) */
        scale = ldexpf(1.0f, exponent - 1);
        scale = (double)top * scale < fmax(amax, format->least_amax) ? 2.0f * scale : scale;
    }
    if (format->scale_type == SMLA_SCALE_E4M3) {
        bytes[0] = smla_float_to_e4m3(fminf(fmaxf(amax / top, 0x1p-9f), 448.0f));
        scale = smla_e4m3_to_float(bytes[0]);
    } else if (format->scale_type == SMLA_SCALE_UE8M0) {
        bytes[0] = (uint8_t)(smla_float_bits(scale) >> 23);
    } else {
        memcpy(bytes, &scale, sizeof scale);
    }
    return scale;
}

static void
put_code(const smla_kv_format_info *format, float x, int i, uint8_t *data)
{
    if (format->nope_type == SMLA_NOPE_E4M3) {
        data[i] = smla_float_to_e4m3(x);
    } else {
        data[i / 2] |= (uint8_t)(smla_float_to_e2m1(x) << (i % 2 * 4));
    }
}

/* How many values of a key are codes. */
static int
count_codes(const smla_kv_format_info *format)
{
    return format->number == SMLA_ROW_FP8_E4M3_576 ? format->head_dim : format->nope_dim;
}

/* A value by the scale of its cache: divided in rows with RoPE, else times the inverse. */
static float
scale_for_cache(const smla_kv_format_info *format, float x)
{
    return format->number == SMLA_ROW_FP8_E4M3_576 ? x / KV_SCALE : x * (1.0f / KV_SCALE);
}

static void
encode(const smla_kv_format_info *format, const uint16_t *key, row_bytes *row)
{
    memset(row, 0, sizeof *row);
    if (format->nope_type == SMLA_NOPE_BF16) {
        memcpy(row->data, key, (size_t)format->head_dim * 2);
        return;
    }
    const int codes = count_codes(format), rope = format->head_dim - codes;
    const int tile = format->num_scales == 0 ? codes : format->scale_tile;
    const int bytes_per_scale = format->scale_type == SMLA_SCALE_FP32 ? 4 : 1;
    assert(tile > 0 && tile <= MOST && codes <= MOST);
    for (int t = 0; t < codes / tile; t++) {
        float amax = 0.0f;
        for (int i = t * tile; i < (t + 1) * tile; i++) {
            amax = fmaxf(amax, smla_finite_abs(smla_bf16_to_float(key[i])));
        }
        const float scale = format->num_scales == 0
                                ? 1.0f
                                : choose_scale(format, amax, row->scales + t * bytes_per_scale);
        for (int i = t * tile; i < (t + 1) * tile; i++) {
            const float x = smla_bf16_to_float(key[i]);
            put_code(format, format->num_scales == 0 ? scale_for_cache(format, x) : x / scale, i,
                     row->data);
        }
    }
    memcpy(row->data + format->data_bytes - 2 * rope, key + codes, (size_t)rope * 2);
}

/* Value i of a row. */
static float
decode(const smla_kv_format_info *format, const row_bytes *row, int i)
{
    if (format->nope_type == SMLA_NOPE_BF16 || i >= count_codes(format)) {
        const int at = format->nope_type == SMLA_NOPE_BF16
                           ? 2 * i
                           : format->data_bytes - 2 * (format->head_dim - i);
        uint16_t bits;
        memcpy(&bits, row->data + at, sizeof bits);
        return smla_bf16_to_float(bits);
    }
    const float value = format->nope_type == SMLA_NOPE_E4M3
                            ? smla_e4m3_to_float(row->data[i])
                            : smla_e2m1_to_float(row->data[i / 2] >> (i % 2 * 4) & 15);
    float scale = KV_SCALE;
    if (format->scale_type == SMLA_SCALE_FP32) {
        memcpy(&scale, row->scales + i / format->scale_tile * 4, sizeof scale);
    } else if (format->num_scales != 0) {
        const uint8_t byte = row->scales[i / format->scale_tile];
        scale = format->scale_type == SMLA_SCALE_UE8M0 ? smla_ue8m0_to_float(byte)
                                                       : smla_e4m3_to_float(byte);
    }
    return value * scale;
}

/* Where the parts of a token are in the cache's memory. */
static uint8_t *
data_of(const smla_kv_format_info *format, const array *cache, int slot)
{
    uint8_t *const page = (uint8_t *)cache->tensor.data + slot / BLOCK * BLOCK * format->row_bytes;
    const bool is_split = format->layout == SMLA_PAGE_SPLIT;
    return page + slot % BLOCK * (is_split ? format->data_bytes : format->row_bytes);
}

static uint8_t *
scales_of(const smla_kv_format_info *format, const array *cache, int slot)
{
    uint8_t *const page = (uint8_t *)cache->tensor.data + slot / BLOCK * BLOCK * format->row_bytes;
    return format->layout == SMLA_PAGE_SPLIT
               ? page + BLOCK * format->data_bytes + slot % BLOCK * format->scale_bytes
               : page + slot % BLOCK * format->row_bytes + format->data_bytes;
}

static void
fill_keys(array *k)
{
    uint16_t *const values = k->tensor.data;
    for (size_t i = 0; i < k->bytes / 2; i++) {
        const float size = ldexpf(1.0f, (int)(i / 16 * 7 % 60) - 40);
        values[i] = random_int(40) == 0 ? (uint16_t)random_bits()
                                        : smla_float_to_bf16((float)random_normal() * size);
    }
}

static smla_scale_arg
scale_for(const smla_kv_format_info *format)
{
    return (smla_scale_arg){.value = format->scale_type == SMLA_SCALE_CACHE ? KV_SCALE : 0.0};
}

/* The values of keys as two arrays, for the operator that writes rows with RoPE. */
static smla_status
concat(const smla_kv_format_info *format, const array *k, const array *cache, const array *slots)
{
    int64_t shapes[2][2] = {{TOKENS, format->nope_dim}, {TOKENS, format->rope_dim}};
    int64_t strides[2] = {format->head_dim, 1};
    DLTensor parts[2] = {k->tensor, k->tensor};
    parts[1].byte_offset += (uint64_t)format->nope_dim * 2;
    for (int i = 0; i < 2; i++) {
        parts[i].shape = shapes[i];
        parts[i].strides = strides;
    }
    const smla_concat_and_cache_mla_args args = {.struct_size = sizeof args,
                                                 .kv_c = &parts[0],
                                                 .k_pe = &parts[1],
                                                 .kv_cache = &cache->tensor,
                                                 .slot_mapping = &slots->tensor,
                                                 .kv_scale = scale_for(format)};
    return smla_concat_and_cache_mla(&args, &error);
}

static smla_status
insert(const smla_kv_format_info *format, const array *k, const array *cache, const array *slots)
{
    if (format->head_dim == SMLA_INDEX_HEAD_DIM) {
        const smla_indexer_k_cache_args args = {.struct_size = sizeof args,
                                                .k = &k->tensor,
                                                .k_cache = &cache->tensor,
                                                .slot_mapping = &slots->tensor,
                                                .kv_format = (int32_t)format->format};
        return smla_indexer_k_quant_and_cache(&args, &error);
    }
    if (format->head_dim == SMLA_HEAD_DIM) {
        return concat(format, k, cache, slots);
    }
    const smla_insert_k_cache_args args = {.struct_size = sizeof args,
                                           .k = &k->tensor,
                                           .k_cache = &cache->tensor,
                                           .slot_mapping = &slots->tensor,
                                           .kv_scale = scale_for(format),
                                           .kv_format = (int32_t)format->format};
    return smla_quantize_and_insert_k_cache(&args, &error);
}

static void
expect_rows(const smla_kv_format_info *format, const array *k, const array *cache,
            const array *slots)
{
    for (int t = 0; t < TOKENS; t++) {
        const int slot = (int)((const int64_t *)slots->tensor.data)[t];
        row_bytes want;
        encode(format, (const uint16_t *)k->tensor.data + (ptrdiff_t)t * format->head_dim, &want);
        EXPECT_EQ(memcmp(data_of(format, cache, slot), want.data, (size_t)format->data_bytes), 0);
        EXPECT_EQ(memcmp(scales_of(format, cache, slot), want.scales, (size_t)format->scale_bytes),
                  0);
    }
}

static void
expect_values(const smla_kv_format_info *format, const array *cache)
{
    const array *const out = ARRAY(fp32, PAGES, BLOCK, format->head_dim);
    const smla_dequantize_kv_cache_args args = {.struct_size = sizeof args,
                                                .kv_cache = &cache->tensor,
                                                .out = &out->tensor,
                                                .kv_format = (int32_t)format->format,
                                                .kv_scale = scale_for(format)};
    EXPECT_OK(smla_dequantize_kv_cache(&args, &error));
    for (int slot = 0; slot < TOKENS; slot++) {
        row_bytes row = {{0}, {0}};
        memcpy(row.data, data_of(format, cache, slot), (size_t)format->data_bytes);
        memcpy(row.scales, scales_of(format, cache, slot), (size_t)format->scale_bytes);
        for (int i = 0; i < format->head_dim; i++) {
            const float want = decode(format, &row, i);
            const float got = ((const float *)out->tensor.data)[slot * format->head_dim + i];
            EXPECT(isnan(want) ? isnan(got) : smla_float_bits(got) == smla_float_bits(want));
        }
    }
}

/* All tokens of a cache, in an order that is not that of the slots. Then a cache of any bytes. */
static void
test_rows(void)
{
    for (int n = 0; n < SMLA_NUM_KV_FORMATS; n++) {
        const smla_kv_format_info *const format = &smla_kv_formats[n];
        if (format->head_dim == SMLA_HEAD_DIM && n != SMLA_ROW_FP8_E4M3_576) {
            continue; /* test_cache.c */
        }
        const bool is_bf16 = format->dtypes == SMLA_DTYPE_BF16;
        array *const cache = ARRAY(is_bf16 ? bf16 : uint8, PAGES, BLOCK, format->row_elements);
        array *const k = ARRAY(bf16, TOKENS, format->head_dim);
        array *const slots = ARRAY(int64, TOKENS);
        for (int t = 0; t < TOKENS; t++) {
            ((int64_t *)slots->tensor.data)[t] = (t * 5 + 3) % TOKENS;
        }
        fill_keys(k);
        EXPECT_OK(insert(format, k, cache, slots));
        expect_rows(format, k, cache, slots);
        expect_values(format, cache);
        for (size_t i = 0; i < cache->bytes; i++) {
            ((uint8_t *)cache->tensor.data)[i] = (uint8_t)random_bits();
        }
        expect_values(format, cache);
        free_arrays("test_rows");
    }
}

/* Empty arrays may lie anywhere: no address is computed from their own, which could overflow. */
static void
test_empty(void)
{
    void *const last = (void *)(UINTPTR_MAX & ~(uintptr_t)15);
    for (int n = 0; n < SMLA_NUM_KV_FORMATS; n++) {
        const smla_kv_format_info *const format = &smla_kv_formats[n];
        const bool is_bf16 = format->dtypes == SMLA_DTYPE_BF16;
        array *const cache = ARRAY(is_bf16 ? bf16 : uint8, 0, BLOCK, format->row_elements);
        array *const k = ARRAY(bf16, 0, format->head_dim);
        array *const slots = ARRAY(int64, 0);
        array *const out = ARRAY(fp32, 0, BLOCK, format->head_dim);
        DLTensor cache_at_last = cache->tensor;
        DLTensor k_at_last = k->tensor;
        cache_at_last.data = last;
        k_at_last.data = last;
        const smla_dequantize_kv_cache_args read = {.struct_size = sizeof read,
                                                    .kv_cache = &cache_at_last,
                                                    .out = &out->tensor,
                                                    .kv_format = (int32_t)format->format,
                                                    .kv_scale = scale_for(format)};
        EXPECT_OK(smla_dequantize_kv_cache(&read, &error));
        const smla_insert_k_cache_args write = {.struct_size = sizeof write,
                                                .k = &k_at_last,
                                                .k_cache = &cache_at_last,
                                                .slot_mapping = &slots->tensor,
                                                .kv_scale = scale_for(format),
                                                .kv_format = (int32_t)format->format};
        if (format->head_dim != SMLA_HEAD_DIM && format->head_dim != SMLA_INDEX_HEAD_DIM) {
            EXPECT_OK(smla_quantize_and_insert_k_cache(&write, &error));
        }
        free_arrays("test_empty");
    }
}

static void
run_tests(void)
{
    RUN(test_rows);
    RUN(test_empty);
}

int
main(void)
{
    run_on_every_instruction_set(run_tests);
    return report("test_row_formats");
}
