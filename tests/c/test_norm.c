/* test_norm.c: fused_q_kv_rmsnorm, fused_inv_rope_fp8_quant and fused_qnorm_rope_kv_insert on every
 * instruction set, compared with doubles, and byte for byte where bytes are promised.
 */
#include "instruction_sets.h"

#include "core/numeric.h"

/* ---- Scales -------------------------------------------------------------------------------- */

/* The smallest power of two s with top s >= max(amax, floor), for every exponent of amax and
 * mantissas around those of the tops. */
static void
test_scales(void)
{
    static const float tops[] = {448.0f, 6.0f};
    static const float floors[] = {1e-4f, 1e-10f, 0x1.8p-124f};
    static const uint32_t mantissas[] = {0,        1,        0x3FFFFF, 0x400000, 0x400001,
                                         0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF};
    for (int i = 0; i < 6; i++) {
        if (i == 4) {
            continue; /* 448 does not go with the least floor */
        }
        const double top = (double)tops[i % 2];
        const double floor = (double)floors[i / 2];
        for (uint32_t bits = 0; bits < 255u * 9u; bits++) {
            const float amax = smla_bits_float((bits / 9 << 23) + mantissas[bits % 9]);
            const double wanted = fmax((double)amax, floor);
            const double scale = (double)smla_power_of_two_scale(amax, tops[i % 2], floors[i / 2]);
            int exponent = 0;
            EXPECT(frexp(scale, &exponent) == 0.5);
            EXPECT(top * scale >= wanted && top * scale / 2.0 < wanted);
        }
        const float largest = smla_power_of_two_scale(3.40282347e38f, tops[i % 2], 1e-4f);
        EXPECT_NEAR(smla_power_of_two_scale(INFINITY, tops[i % 2], 1e-4f), largest, 0.0);
        EXPECT_NEAR(smla_power_of_two_scale(NAN, tops[i % 2], floors[i / 2]),
                    smla_power_of_two_scale(0.0f, tops[i % 2], floors[i / 2]), 0.0);
    }
    EXPECT_NEAR(smla_power_of_two_scale(0.0f, 448.0f, 1e-4f), 0x1p-22, 0.0);
    EXPECT_NEAR(smla_power_of_two_scale(1.0f, 448.0f, 1e-10f), 0x1p-8, 0.0);
    EXPECT_NEAR(smla_power_of_two_scale(448.0f, 448.0f, 1e-4f), 1.0, 0.0);
    EXPECT_NEAR(smla_power_of_two_scale(450.0f, 448.0f, 1e-4f), 2.0, 0.0);
    EXPECT_NEAR(smla_power_of_two_scale(0.0f, 6.0f, 0x1.8p-124f), 0x1p-126, 0.0);
}

/* ---- fused_q_kv_rmsnorm -------------------------------------------------------------------- */

static smla_status
normalize(const array *q, const array *kv, const array *q_weight, const array *kv_weight,
          const array *q_out, const array *kv_out, double eps)
{
    const smla_fused_q_kv_rmsnorm_args args = {.struct_size = sizeof args,
                                               .q = &q->tensor,
                                               .kv = &kv->tensor,
                                               .q_weight = &q_weight->tensor,
                                               .kv_weight = &kv_weight->tensor,
                                               .q_out = &q_out->tensor,
                                               .kv_out = &kv_out->tensor,
                                               .eps = eps};
    return smla_fused_q_kv_rmsnorm(&args, &error);
}

/* The bound: the rounding to bf16, and 2 % of it for the steps in fp32. */
static void
expect_normalized(const array *x, const array *weight, const array *out, double eps)
{
    for (int64_t t = 0; t < x->shape[0]; t++) {
        double sum = 0.0;
        for (int64_t i = 0; i < x->shape[1]; i++) {
            sum += GET(x, t, i) * GET(x, t, i);
        }
        const double factor = 1.0 / sqrt(sum / (double)x->shape[1] + eps);
        for (int64_t i = 0; i < x->shape[1]; i++) {
            const double want = GET(x, t, i) * factor * GET(weight, i);
            EXPECT_NEAR(GET(out, t, i), want, 1.02 * 0x1p-8 * fabs(want) + 0x1p-134);
        }
    }
}

static void
test_norms(void)
{
    static const int64_t sizes[] = {1, 63, 64, 256, 300, 1024, 1544};
    const array *kv_weight = fill_normal(ARRAY(bf16, 512), 1.0);
    for (int i = 0; i < COUNT(1, 63, 64, 256, 300, 1024, 1544); i++) {
        const int64_t num_tokens = i == 3 ? 100 : 3;
        const array *buffer = fill_normal(ARRAY(bf16, num_tokens, sizes[i] + 512 + 3), 2.0);
        const array *q = slice(buffer, 1, 0, sizes[i], 1);
        const array *kv = slice(buffer, 1, sizes[i] + 1, sizes[i] + 513, 1);
        const array *weight = fill_normal(ARRAY(fp32, sizes[i]), 1.0);
        const array *results = ARRAY(bf16, num_tokens, sizes[i] + 512 + 5);
        const array *q_out = slice(results, 1, 2, sizes[i] + 2, 1);
        const array *kv_out = slice(results, 1, sizes[i] + 3, sizes[i] + 515, 1);
        EXPECT_OK(normalize(q, kv, weight, kv_weight, q_out, kv_out, 1e-6));
        expect_normalized(q, weight, q_out, 1e-6);
        expect_normalized(kv, kv_weight, kv_out, 1e-6);
        EXPECT(is_poison(slice(results, 1, 0, 2, 1)));
        EXPECT(is_poison(slice(results, 1, sizes[i] + 2, sizes[i] + 3, 1)));
        EXPECT(is_poison(slice(results, 1, sizes[i] + 515, sizes[i] + 517, 1)));
        /* The same bits in place; the column between the two inputs stays. */
        const double between = GET(buffer, 1, sizes[i]);
        EXPECT_OK(normalize(q, kv, weight, kv_weight, q, kv, 1e-6));
        for (int64_t t = 0; t < num_tokens; t++) {
            for (int64_t k = 0; k < 512; k++) {
                EXPECT_NEAR(GET(kv, t, k), GET(kv_out, t, k), 0.0);
            }
            for (int64_t k = 0; k < sizes[i]; k++) {
                EXPECT_NEAR(GET(q, t, k), GET(q_out, t, k), 0.0);
            }
        }
        EXPECT_NEAR(GET(buffer, 1, sizes[i]), between, 0.0);
    }
}

/* The order of the sum: 2^24 + 1 is 2^24 in fp32, so ones count only if they meet first. */
static void
test_order_of_the_sum(void)
{
    const array *weight = fill(ARRAY(fp32, 512), 1.0);
    const array *x = fill(ARRAY(bf16, 2, 512), 0.0);
    const array *out = ARRAY(bf16, 2, 512);
    const array *other = ARRAY(bf16, 2, 512);
    /* Row 0: the large square and the ones of partial sum 0 follow each other: 4096^2 + 1 + ... */
    SET(x, 4096.0, 0, 0);
    SET(x, 1.0, 0, 256);
    /* Row 1: eight neighbours first become 8 ones, which do not vanish beside 2^24. */
    SET(x, 4096.0, 1, 0);
    for (int64_t i = 8; i < 16; i++) {
        SET(x, 1.0, 1, i);
    }
    EXPECT_OK(normalize(x, x, weight, weight, out, other, 0.0));
    const float factors[] = {1.0f / sqrtf(0x1p24f / 512.0f),
                             1.0f / sqrtf((0x1p24f + 8.0f) / 512.0f)};
    for (int64_t t = 0; t < 2; t++) {
        EXPECT_NEAR(GET(out, t, 0), smla_bf16_to_float(smla_float_to_bf16(4096.0f * factors[t])),
                    0.0);
    }
}

static void
test_bad_norms(void)
{
    const array *q = fill(ARRAY(bf16, 2, 8), 1.0);
    const array *kv = fill(ARRAY(bf16, 2, 512), 1.0);
    const array *q_weight = fill(ARRAY(fp32, 8), 1.0);
    const array *kv_weight = fill(ARRAY(fp32, 512), 1.0);
    const array *q_out = ARRAY(bf16, 2, 8);
    const array *kv_out = ARRAY(bf16, 2, 512);
    static const double bad[] = {-1e-9, NAN, INFINITY, 3.5e38};
    for (int i = 0; i < 4; i++) {
        EXPECT_FAIL(normalize(q, kv, q_weight, kv_weight, q_out, kv_out, bad[i]), SMLA_ERROR_VALUE,
                    "fused_q_kv_rmsnorm: `eps` must be finite and at least 0, got ");
    }
    EXPECT_OK(normalize(q, kv, q_weight, kv_weight, q_out, kv_out, 0.0));
    EXPECT_OK(normalize(q, kv, q_weight, kv_weight, q_out, kv_out, 3.4e38));
    EXPECT_FAIL(normalize(q, kv, q_weight, kv_weight, slice(kv, 1, 0, 8, 1), kv_out, 0.0),
                SMLA_ERROR_VALUE, "`q_out` must not overlap `kv`");
    EXPECT_FAIL(normalize(q, kv, q_weight, kv_weight, q_out, slice(kv, 0, 0, 2, -1), 0.0),
                SMLA_ERROR_VALUE, "`kv_out` must have positive strides");
    EXPECT_FAIL(normalize(q, slice(kv, 0, 0, 2, -1), q_weight, kv_weight, q_out, kv, 0.0),
                SMLA_ERROR_VALUE, "`kv_out` must be the whole of or not overlap `kv`");
    const array *none = ARRAY(bf16, 0, 8);
    const array *no_kv = ARRAY(bf16, 0, 512);
    EXPECT_OK(
        normalize(none, no_kv, q_weight, kv_weight, ARRAY(bf16, 0, 8), ARRAY(bf16, 0, 512), 1.0));
}

/* ---- fused_inv_rope_fp8_quant -------------------------------------------------------------- */

typedef struct inverse {
    array *o, *positions, *rope_table, *out, *scale;
    int64_t groups;
    int32_t layout;
} inverse;

static smla_status
turn_back(const inverse *c)
{
    const smla_fused_inv_rope_fp8_quant_args args = {
        .struct_size = sizeof args,
        .o = &c->o->tensor,
        .positions = &c->positions->tensor,
        .rope_table = &c->rope_table->tensor,
        .out = &c->out->tensor,
        .out_scale = c->scale == NULL ? NULL : &c->scale->tensor,
        .groups = c->groups,
        .scale_layout = c->layout,
    };
    return smla_fused_inv_rope_fp8_quant(&args, &error);
}

static array *
make_angles(int64_t max_pos)
{
    array *a = ARRAY(fp32, max_pos, 64);
    for (int64_t t = 0; t < max_pos; t++) {
        for (int64_t i = 0; i < 32; i++) {
            SET(a, cos(0.3 * (double)(t * (i + 1))), t, i);
            SET(a, sin(0.3 * (double)(t * (i + 1))), t, 32 + i);
        }
    }
    return a;
}

static inverse
make_inverse(int64_t tokens, int64_t heads, int64_t groups)
{
    const int64_t values = heads / groups * 512;
    inverse c = {.o = fill_normal(ARRAY(bf16, tokens, heads, 512), 3.0),
                 .positions = ARRAY(int64, tokens),
                 .rope_table = make_angles(20),
                 .out = ARRAY(uint8, tokens, groups, values),
                 .scale = ARRAY(fp32, tokens, groups, heads / groups * 4),
                 .groups = groups};
    for (int64_t t = 0; t < tokens; t++) {
        ((int64_t *)c.positions->tensor.data)[t] = t * 7 % 20;
        SET(c.o, 0.0, t, 0, 130); /* and a tile of zeros, and a small one */
        for (int64_t i = 0; i < 128; i++) {
            SET(c.o, 0.0, t, heads - 1, i);
            SET(c.o, 1e-20 * (double)(i - 60), t, 0, 256 + i);
        }
    }
    return c;
}

/* Value i of a head, turned back in fp32 with a rounding after each step. */
static float
turned_value(const inverse *c, int64_t t, int64_t h, int64_t i)
{
    if (i < 448) {
        return (float)GET(c->o, t, h, i);
    }
    const int64_t position = ((const int64_t *)c->positions->tensor.data)[t];
    const int64_t pair = (i - 448) / 2;
    const volatile float a = (float)GET(c->o, t, h, 448 + 2 * pair);
    const volatile float b = (float)GET(c->o, t, h, 449 + 2 * pair);
    const volatile float cos = (float)GET(c->rope_table, position, pair);
    const volatile float sin = (float)GET(c->rope_table, position, 32 + pair);
    const volatile float first = i % 2 == 0 ? a * cos : b * cos;
    const volatile float second = i % 2 == 0 ? b * sin : a * sin;
    return i % 2 == 0 ? first + second : first - second;
}

/* The smallest power of two s with 448 s >= max(amax, 1e-10), by trial. */
static float
scale_of(const inverse *c, int64_t t, int64_t h, int64_t tile)
{
    double amax = (double)1e-10f;
    for (int64_t i = tile * 128; i < (tile + 1) * 128; i++) {
        amax = fmax(amax, fabs((double)turned_value(c, t, h, i)));
    }
    double scale = 1.0;
    while (448.0 * scale >= amax) {
        scale /= 2.0;
    }
    while (448.0 * scale < amax) {
        scale *= 2.0;
    }
    return (float)scale;
}

static void
expect_turned(const inverse *c)
{
    const int64_t heads = c->o->shape[1];
    const int64_t group_heads = heads / c->groups;
    for (int64_t t = 0; t < c->o->shape[0]; t++) {
        for (int64_t h = 0; h < heads; h++) {
            const int64_t group = h / group_heads;
            uint32_t word = 0;
            for (int64_t tile = 0; tile < 4; tile++) {
                const float scale = scale_of(c, t, h, tile);
                word |= (smla_float_bits(scale) >> 23) << 8 * tile;
                if (c->scale != NULL && c->layout == SMLA_SCALES_FP32) {
                    EXPECT_NEAR(GET(c->scale, t, group, h % group_heads * 4 + tile), scale, 0.0);
                }
                for (int64_t i = tile * 128; i < (tile + 1) * 128; i++) {
                    const float x = turned_value(c, t, h, i);
                    const int64_t at = h % group_heads * 512 + i;
                    const double want =
                        c->scale == NULL
                            ? (double)smla_bf16_to_float(smla_float_to_bf16(x))
                            : (double)smla_e4m3_to_float(smla_float_to_e4m3(x / scale));
                    const double got =
                        c->scale == NULL
                            ? GET(c->out, t, group, at)
                            : (double)smla_e4m3_to_float((uint8_t)GET(c->out, t, group, at));
                    EXPECT_NEAR(got, want, 0.0);
                }
            }
            if (c->scale != NULL && c->layout == SMLA_SCALES_UE8M0X4) {
                EXPECT_EQ((int32_t)GET(c->scale, t, group, h % group_heads), (int32_t)word);
            }
        }
    }
}

static void
test_inverses(void)
{
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 6, 2}, {5, 4, 4}, {20, 8, 1}};
    for (int i = 0; i < 4; i++) {
        inverse c = make_inverse(shapes[i][0], shapes[i][1], shapes[i][2]);
        c.layout = SMLA_SCALES_FP32;
        EXPECT_OK(turn_back(&c));
        expect_turned(&c);
        c.layout = SMLA_SCALES_UE8M0X4;
        c.scale = ARRAY(int32, shapes[i][0], c.groups, shapes[i][1] / c.groups);
        EXPECT_OK(turn_back(&c));
        expect_turned(&c);
        c.scale = NULL;
        c.out = ARRAY(bf16, shapes[i][0], c.groups, shapes[i][1] / c.groups * 512);
        EXPECT_OK(turn_back(&c));
        expect_turned(&c);
    }
}

/* Groups first, columns of scales before tokens, rows of scales behind the last token. */
static void
test_layouts_of_inverses(void)
{
    inverse c = make_inverse(6, 6, 2);
    array *const out = ARRAY(uint8, 2, 6, 3 * 512 + 8);
    array *const scale = ARRAY(fp32, 2, 12, 11);
    c.out = slice(transpose(out, 0, 1), 2, 8, 3 * 512 + 8, 1);
    c.scale = transpose(transpose(scale, 0, 2), 1, 2); /* [11, 2, 12] */
    EXPECT_EQ(c.scale->shape[0], 11);
    c.layout = SMLA_SCALES_FP32;
    EXPECT_OK(turn_back(&c));
    expect_turned(&c);
    EXPECT(is_poison(slice(out, 2, 0, 8, 1)));
    EXPECT(is_poison(slice(scale, 2, 8, 11, 1)));
    for (int64_t group = 0; group < 2; group++) {
        for (int64_t column = 0; column < 12; column++) {
            EXPECT_NEAR(GET(scale, group, column, 6), 0.0, 0.0);
            EXPECT_NEAR(GET(scale, group, column, 7), 0.0, 0.0);
        }
    }
    inverse inferred = c;
    inferred.layout = SMLA_SCALES_INFER;
    EXPECT_OK(turn_back(&inferred));
    inferred.layout = 3;
    EXPECT_FAIL(turn_back(&inferred), SMLA_ERROR_VALUE, "`scale_layout` must be");
    inferred.layout = -1;
    EXPECT_FAIL(turn_back(&inferred), SMLA_ERROR_VALUE, "`scale_layout` must be");
    inferred.layout = SMLA_SCALES_INFER;
    inferred.scale = ARRAY(bf16, 6, 2, 12);
    EXPECT_FAIL(turn_back(&inferred), SMLA_ERROR_TYPE,
                "`out_scale` must be float32 or int32, got bfloat16");
}

static void
test_bad_inverses(void)
{
    inverse c = make_inverse(3, 4, 2);
    int64_t *const positions = c.positions->tensor.data;
    static const int64_t bad[] = {-1, 20, INT64_MAX, INT64_MIN};
    for (int i = 0; i < 4; i++) {
        positions[2] = bad[i];
        EXPECT_FAIL(
            turn_back(&c), SMLA_ERROR_VALUE,
            "fused_inv_rope_fp8_quant: `positions` must be rows of `rope_table`, which has 20");
        EXPECT(is_poison(c.out) && is_poison(c.scale));
    }
    positions[2] = 19;
    EXPECT_OK(turn_back(&c));
    for (int64_t groups = -1; groups < 6; groups++) {
        c.groups = groups;
        if (groups != 1 && groups != 2 && groups != 4) {
            EXPECT_FAIL(turn_back(&c), SMLA_ERROR_VALUE,
                        groups < 1 ? "`groups` must be 1 to 128, got "
                                   : "`o` must have a multiple of ");
        }
    }
    inverse none = make_inverse(1, 4, 2);
    none.o = ARRAY(bf16, 0, 4, 512);
    none.out = ARRAY(uint8, 0, 2, 1024);
    EXPECT_OK(turn_back(&none));
    EXPECT(is_poison(none.scale));
}

/* ---- fused_qnorm_rope_kv_insert ------------------------------------------------------------ */

typedef struct queries {
    array *q, *kv, *positions, *rope_table, *cache, *slots;
    const array *q_out; /* NULL: in place */
    double q_scale_inv;
} queries;

static smla_status
insert_queries(const queries *c)
{
    const smla_qnorm_insert_args args = {
        .struct_size = sizeof args,
        .q = &c->q->tensor,
        .q_out = c->q_out == NULL ? NULL : &c->q_out->tensor,
        .kv = &c->kv->tensor,
        .positions = &c->positions->tensor,
        .rope_table = &c->rope_table->tensor,
        .kv_cache = &c->cache->tensor,
        .slot_mapping = &c->slots->tensor,
        .eps = 1e-6,
        .q_scale_inv = {.value = c->q_scale_inv},
    };
    return smla_fused_qnorm_rope_kv_insert(&args, &error);
}

/* Tokens whose slots go backwards, but for token 1, which has none. */
static queries
make_queries(int64_t tokens, int64_t heads)
{
    queries c = {.q = fill_normal(ARRAY(bf16, tokens, heads, 512), 3.0),
                 .kv = fill_normal(ARRAY(bf16, tokens, 512), 3.0),
                 .positions = ARRAY(int64, tokens),
                 .rope_table = make_angles(20),
                 .cache = ARRAY(bf16, tokens + 1, 512),
                 .slots = ARRAY(int64, tokens)};
    for (int64_t t = 0; t < tokens; t++) {
        ((int64_t *)c.positions->tensor.data)[t] = t * 7 % 20;
        ((int64_t *)c.slots->tensor.data)[t] = t == 1 ? -1 : tokens - t;
    }
    return c;
}

/* Value i of 512 values that are turned to position t * 7 % 20. */
static double
turn_value(const array *rope_table, int64_t t, int64_t i, double first, double second)
{
    const double cos = GET(rope_table, t * 7 % 20, (i - 448) / 2);
    const double sin = GET(rope_table, t * 7 % 20, 32 + (i - 448) / 2);
    return i % 2 == 0 ? first * cos - second * sin : second * cos + first * sin;
}

/* The bound: one rounding to bf16 or e4m3, and 2 % of that to bf16 for the steps in fp32. */
static void
expect_queries(const queries *c, const array *x, double unit)
{
    for (int64_t row = 0; row < x->shape[0] * x->shape[1]; row++) {
        const int64_t t = row / x->shape[1];
        const int64_t h = row % x->shape[1];
        double sum = 0.0;
        for (int64_t i = 0; i < 512; i++) {
            sum += GET(x, t, h, i) * GET(x, t, h, i);
        }
        const double factor = 1.0 / sqrt(sum / 512.0 + 1e-6);
        for (int64_t i = 0; i < 512; i++) {
            const double a = GET(x, t, h, i - i % 2) * factor;
            const double b = GET(x, t, h, i - i % 2 + 1) * factor;
            const double y =
                i < 448 ? GET(x, t, h, i) * factor : turn_value(c->rope_table, t, i, a, b);
            const double scale = c->q_scale_inv == 0.0 ? 1.0 : c->q_scale_inv;
            const double raw = GET(c->q_out, t, h, i);
            const double got =
                (c->q_scale_inv == 0.0 ? raw : (double)smla_e4m3_to_float((uint8_t)raw)) / scale;
            EXPECT_NEAR(got, y,
                        (unit + 0.02 * 0x1p-8) * fabs(y) + 0x1p-20 * fmax(fabs(a), fabs(b)) +
                            (c->q_scale_inv == 0.0 ? 0.0 : 0x1p-10 / scale));
        }
    }
}

/* The rows are exact: fp32 products, each rounded, then their sum. */
static void
expect_keys(const queries *c)
{
    for (int64_t t = 0; t < c->kv->shape[0]; t++) {
        if (t == 1) {
            continue;
        }
        for (int64_t i = 0; i < 512; i++) {
            float want = (float)GET(c->kv, t, i);
            if (i >= 448) {
                const int64_t pair = (i - 448) / 2;
                const volatile float cos = (float)GET(c->rope_table, t * 7 % 20, pair);
                const volatile float sin = (float)GET(c->rope_table, t * 7 % 20, 32 + pair);
                const volatile float own = want * cos;
                const volatile float other = (float)GET(c->kv, t, i % 2 == 0 ? i + 1 : i - 1) * sin;
                want = i % 2 == 0 ? own - other : own + other;
            }
            EXPECT_NEAR(GET(c->cache, c->kv->shape[0] - t, i),
                        smla_bf16_to_float(smla_float_to_bf16(want)), 0.0);
        }
    }
    EXPECT(is_poison(slice(c->cache, 0, 0, 1, 1)));
}

static void
test_queries(void)
{
    static const int64_t shapes[][2] = {{1, 1}, {5, 3}, {70, 2}};
    for (int i = 0; i < 3; i++) {
        const int64_t tokens = shapes[i][0];
        const int64_t heads = shapes[i][1];
        queries c = make_queries(tokens, heads);
        const array *const wide = ARRAY(bf16, tokens, heads + 2, 512 + 7);
        const array *const padded = slice(wide, 2, 3, 512 + 3, 1);
        c.q_out = padded;
        EXPECT_OK(insert_queries(&c));
        expect_queries(&c, c.q, 0x1p-8);
        expect_keys(&c);
        EXPECT(is_poison(slice(wide, 2, 0, 3, 1)) && is_poison(slice(wide, 2, 515, 519, 1)));
        for (int64_t k = 0; k < 512; k++) {
            EXPECT_NEAR(GET(padded, 0, heads, k), 0.0, 0.0);
            EXPECT_NEAR(GET(padded, tokens - 1, heads + 1, k), 0.0, 0.0);
        }
        c.q_out = ARRAY(uint8, tokens, heads, 512);
        c.q_scale_inv = 2.5;
        EXPECT_OK(insert_queries(&c));
        expect_queries(&c, c.q, 0x1p-4);
        /* in place: the bits of q_out */
        c.q_out = NULL;
        c.q_scale_inv = 0.0;
        EXPECT_OK(insert_queries(&c));
        expect_keys(&c);
        for (int64_t row = 0; row < tokens * heads; row++) {
            for (int64_t k = 0; k < 512; k++) {
                EXPECT_NEAR(GET(c.q, row / heads, row % heads, k),
                            GET(padded, row / heads, row % heads, k), 0.0);
            }
        }
        free_arrays("test_queries");
    }
}

static void
test_bad_queries(void)
{
    queries c = make_queries(3, 2);
    c.q_out = ARRAY(bf16, 3, 2, 512);
    ((int64_t *)c.positions->tensor.data)[2] = 20;
    EXPECT_FAIL(
        insert_queries(&c), SMLA_ERROR_VALUE,
        "fused_qnorm_rope_kv_insert: `positions` must be rows of `rope_table`, which has 20");
    ((int64_t *)c.positions->tensor.data)[2] = 19;
    ((int64_t *)c.slots->tensor.data)[2] = 4;
    EXPECT_FAIL(insert_queries(&c), SMLA_ERROR_VALUE,
                "`slot_mapping` must be below the 4 slots of `kv_cache`, got 4 at token 2");
    EXPECT(is_poison(c.q_out) && is_poison(c.cache));
    c.q_scale_inv = 1.0;
    EXPECT_FAIL(insert_queries(&c), SMLA_ERROR_TYPE, "`q_out` must be uint8 or float8_e4m3fn");
    c.q_out = NULL;
    EXPECT_FAIL(insert_queries(&c), SMLA_ERROR_VALUE, "`q_out` must be given, got none");
    c.q_scale_inv = -1.0;
    c.q_out = ARRAY(uint8, 3, 2, 512);
    EXPECT_FAIL(insert_queries(&c), SMLA_ERROR_VALUE, "`q_scale_inv` must be a positive normal");
}

static void
tests(void)
{
    RUN(test_queries);
    RUN(test_bad_queries);
    RUN(test_norms);
    RUN(test_order_of_the_sum);
    RUN(test_bad_norms);
    RUN(test_inverses);
    RUN(test_layouts_of_inverses);
    RUN(test_bad_inverses);
}

int
main(void)
{
    RUN(test_scales);
    run_on_every_instruction_set(tests);
    return report("test_norm");
}
