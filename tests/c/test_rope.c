/* test_rope.c: apply_rope, byte for byte with single operations in fp32, and rope_and_cache_mla,
 * byte for byte with apply_rope and concat_and_cache_mla. test_norm.c has V4's inverse.
 */
#include "testing.h"

#include "core/numeric.h"

typedef struct turn {
    array *positions, *q, *k, *table, *q_out, *k_out;
    bool is_neox;
    bool inverse;
} turn;

enum { TOKENS = 3, MAX_POS = 9 };

static smla_status
apply(const turn *c)
{
    const smla_apply_rope_args args = {.struct_size = sizeof args,
                                       .positions = &c->positions->tensor,
                                       .q_pe = &c->q->tensor,
                                       .k_pe = &c->k->tensor,
                                       .rope_table = &c->table->tensor,
                                       .q_out = &c->q_out->tensor,
                                       .k_out = &c->k_out->tensor,
                                       .is_neox = c->is_neox,
                                       .inverse = c->inverse};
    return smla_apply_rope(&args, &error);
}

static turn
make_turn(DLDataType dtype, DLDataType table_dtype, int64_t heads, int64_t size)
{
    const turn c = {.positions = ARRAY(int64, TOKENS),
                    .q = fill_normal(ARRAY(dtype, TOKENS, heads, size), 1.0),
                    .k = fill_normal(ARRAY(dtype, TOKENS, size), 1.0),
                    .table = fill_normal(ARRAY(table_dtype, MAX_POS, size), 1.0),
                    .q_out = ARRAY(dtype, TOKENS, heads, size),
                    .k_out = ARRAY(dtype, TOKENS, size)};
    for (int64_t t = 0; t < TOKENS; t++) {
        ((int64_t *)c.positions->tensor.data)[t] = (t * 5 + 2) % MAX_POS;
    }
    return c;
}

/* Value i of a query's head, or of the key for h < 0. A volatile variable rounds to fp32. */
static double
turned_value(const turn *c, int64_t t, int64_t h, int64_t i)
{
    const int64_t half = c->table->shape[1] / 2;
    const int64_t pair = c->is_neox ? i % half : i / 2;
    const int64_t first = c->is_neox ? pair : 2 * pair;
    const int64_t second = c->is_neox ? half + pair : 2 * pair + 1;
    const int64_t position = ((const int64_t *)c->positions->tensor.data)[t];
    const volatile float a = (float)(h < 0 ? GET(c->k, t, first) : GET(c->q, t, h, first));
    const volatile float b = (float)(h < 0 ? GET(c->k, t, second) : GET(c->q, t, h, second));
    const volatile float cos = (float)GET(c->table, position, pair);
    const volatile float angle_sin = (float)GET(c->table, position, half + pair);
    const volatile float sin = c->inverse ? -angle_sin : angle_sin;
    const volatile float by_cos = i == first ? a * cos : b * cos;
    const volatile float by_sin = i == first ? -(b * sin) : a * sin;
    const volatile float sum = by_cos + by_sin;
    const bool is_bf16 = c->q->tensor.dtype.code == kDLBfloat;
    return (double)(is_bf16 ? smla_bf16_to_float(smla_float_to_bf16(sum)) : sum);
}

static void
test_every_size(void)
{
    static const int64_t sizes[] = {2, 4, 6, 8, 10, 16, 24, 62, 64, 258, 300};
    for (size_t i = 0; i < 8 * sizeof sizes / sizeof *sizes; i++) {
        const int64_t size = sizes[i / 8];
        const int64_t heads = 1 + (int64_t)i % 11;
        turn c = make_turn(i & 1 ? fp32 : bf16, i & 2 ? bf16 : fp32, heads, size);
        c.is_neox = (i & 4) != 0;
        c.inverse = i % 3 == 0;
        EXPECT_OK(apply(&c));
        for (int64_t t = 0; t < TOKENS; t++) {
            for (int64_t v = 0; v < size; v++) {
                for (int64_t h = 0; h < heads; h++) {
                    EXPECT_NEAR(GET(c.q_out, t, h, v), turned_value(&c, t, h, v), 0.0);
                }
                EXPECT_NEAR(GET(c.k_out, t, v), turned_value(&c, t, -1, v), 0.0);
            }
        }
        free_arrays("apply_rope");
    }
}

/* The inverse in place gives the values back, but for roundings. */
static void
test_there_and_back(void)
{
    turn c = make_turn(fp32, fp32, 2, 64);
    for (int64_t t = 0; t < MAX_POS; t++) {
        for (int64_t i = 0; i < 32; i++) {
            SET(c.table, cos(0.3 * (double)(t * (i + 1))), t, i);
            SET(c.table, sin(0.3 * (double)(t * (i + 1))), t, 32 + i);
        }
    }
    for (int neox = 0; neox < 2; neox++) {
        c.is_neox = neox != 0;
        c.inverse = false;
        EXPECT_OK(apply(&c));
        turn back = c;
        back.q = back.q_out;
        back.k = back.k_out;
        back.inverse = true;
        EXPECT_OK(apply(&back));
        for (int64_t i = 0; i < 64; i++) {
            EXPECT_NEAR(GET(c.q_out, 2, 1, i), GET(c.q, 2, 1, i), 1e-6);
            EXPECT_NEAR(GET(c.k_out, 1, i), GET(c.k, 1, i), 1e-6);
        }
    }
}

static void
test_refusals(void)
{
    turn c = make_turn(bf16, fp32, 2, 8);
    ((int64_t *)c.positions->tensor.data)[1] = MAX_POS;
    EXPECT_FAIL(
        apply(&c), SMLA_ERROR_VALUE,
        "apply_rope: `positions` must be rows of `rope_table`, which has 9, got 9 for token 1");
    c = make_turn(bf16, fp32, 2, 7);
    EXPECT_FAIL(apply(&c), SMLA_ERROR_VALUE,
                "`q_pe` must have an even number of values per head, at least 2, got 7");
}

/* ---- rope_and_cache_mla -------------------------------------------------------------------- */

static bool
are_equal(const array *a, const array *b, size_t num_bytes)
{
    return memcmp(a->tensor.data, b->tensor.data, num_bytes) == 0;
}

/* Two of three tokens have slots. */
static void
test_keys_to_the_cache(void)
{
    for (int i = 0; i < 8; i++) {
        const DLDataType dtype = i & 1 ? fp32 : bf16;
        const bool is_fp8 = (i & 2) != 0;
        turn c = make_turn(dtype, i & 4 ? bf16 : fp32, 3, 64);
        c.is_neox = (i & 4) != 0;
        const array *const kv_c = fill_normal(ARRAY(dtype, TOKENS, 512), 1.0);
        const array *const slots = ARRAY(int64, 2);
        array *caches[2];
        for (int k = 0; k < 2; k++) {
            caches[k] = is_fp8 ? ARRAY(uint8, 2, 4, 656) : ARRAY(bf16, 2, 4, 576);
            ((int64_t *)slots->tensor.data)[k] = k == 0 ? 6 : 1;
        }
        EXPECT_OK(apply(&c));
        const smla_concat_and_cache_mla_args write = {.struct_size = sizeof write,
                                                      .kv_c = &kv_c->tensor,
                                                      .k_pe = &c.k_out->tensor,
                                                      .kv_cache = &caches[0]->tensor,
                                                      .slot_mapping = &slots->tensor};
        EXPECT_OK(smla_concat_and_cache_mla(&write, &error));
        const array *const q_out = ARRAY(dtype, TOKENS, 3, 64);
        const smla_rope_and_cache_mla_args args = {.struct_size = sizeof args,
                                                   .positions = &c.positions->tensor,
                                                   .q_pe = &c.q->tensor,
                                                   .k_pe = &c.k->tensor,
                                                   .rope_table = &c.table->tensor,
                                                   .kv_c = &kv_c->tensor,
                                                   .kv_cache = &caches[1]->tensor,
                                                   .slot_mapping = &slots->tensor,
                                                   .q_out = &q_out->tensor,
                                                   .is_neox = c.is_neox};
        EXPECT_OK(smla_rope_and_cache_mla(&args, &error));
        EXPECT(are_equal(q_out, c.q_out, (size_t)(dtype.bits / 8 * TOKENS * 3 * 64)));
        EXPECT(are_equal(caches[1], caches[0], 8 * (is_fp8 ? 656 : 1152)));
        free_arrays("rope_and_cache_mla");
    }
}

int
main(void)
{
    RUN(test_every_size);
    RUN(test_there_and_back);
    RUN(test_refusals);
    RUN(test_keys_to_the_cache);
    return report("test_rope");
}
