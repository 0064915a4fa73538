/* test_numeric.c: conversions compared with plain double arithmetic, for every code and the ties
 * between codes. */
#include "reference.h"

static void
test_bf16_values(void)
{
    for (unsigned code = 0; code < 0x10000u; code++) {
        const unsigned magnitude = code & 0x7FFFu;
        const float x = smla_bf16_to_float((uint16_t)code);
        EXPECT_EQ(signbit(x) != 0, code >> 15);
        if (magnitude > 0x7F80u) {
            EXPECT(isnan(x));
            EXPECT_EQ(smla_float_to_bf16(x), (code & 0x8000u) | 0x7FC0u);
            continue;
        }
        const double value = magnitude == 0x7F80u ? (double)INFINITY : decode(magnitude, 7, 127);
        EXPECT_NEAR(fabs((double)x), value, 0.0);
        EXPECT_EQ(smla_float_to_bf16(x), code);
    }
}

/* A tie goes to the even code. One ulp of fp32 above or below it goes to the nearer code. */
static void
test_bf16_ties(void)
{
    for (unsigned code = 0; code < 0x7F80u; code++) {
        const uint32_t tie = code << 16 | 0x8000u;
        const unsigned even = code + (code & 1u);
        for (uint32_t sign = 0; sign < 2; sign++) {
            const uint32_t top = sign << 31;
            EXPECT_EQ(smla_float_to_bf16(smla_bits_float(top | tie)), sign << 15 | even);
            EXPECT_EQ(smla_float_to_bf16(smla_bits_float(top | (tie - 1))), sign << 15 | code);
            EXPECT_EQ(smla_float_to_bf16(smla_bits_float(top | (tie + 1))),
                      sign << 15 | (code + 1));
        }
    }
    EXPECT_EQ(smla_float_to_bf16(smla_bits_float(0x7F7FFFFFu)), 0x7F80u); /* FLT_MAX -> inf */
    EXPECT_EQ(smla_float_to_bf16(smla_bits_float(0x7F800001u)), 0x7FC0u); /* a NaN stays one */
    EXPECT_EQ(smla_float_to_bf16(smla_bits_float(0xFFFFFFFFu)), 0xFFC0u);
}

static void
test_half_values(void)
{
    for (unsigned code = 0; code < 0x10000u; code++) {
        const unsigned magnitude = code & 0x7FFFu;
        const float x = smla_half_to_float((uint16_t)code);
        EXPECT_EQ(signbit(x) != 0, code >> 15);
        if (magnitude > 0x7C00u) {
            EXPECT(isnan(x));
        } else {
            const double value =
                magnitude == 0x7C00u ? (double)INFINITY : decode(magnitude, 10, 15);
            EXPECT_NEAR(fabs((double)x), value, 0.0);
        }
    }
}

static void
test_e4m3_values(void)
{
    for (unsigned code = 0; code < 0x100u; code++) {
        const unsigned magnitude = code & 0x7Fu;
        const float x = smla_e4m3_to_float((uint8_t)code);
        EXPECT_EQ(signbit(x) != 0, code >> 7);
        if (magnitude == 0x7Fu) {
            EXPECT(isnan(x));
        } else {
            EXPECT_NEAR(fabs((double)x), decode(magnitude, 3, 7), 0.0);
        }
        EXPECT_EQ(smla_float_to_e4m3(x), code);
    }
    EXPECT_NEAR(smla_e4m3_to_float(0x7E), SMLA_E4M3_MAX, 0.0);
}

static void
test_e4m3_ties(void)
{
    for (unsigned code = 0; code < 0x7Eu; code++) {
        const double low = decode(code, 3, 7);
        const float tie = (float)((low + decode(code + 1, 3, 7)) / 2.0); /* exact */
        const unsigned even = code + (code & 1u);
        for (unsigned sign = 0; sign < 2; sign++) {
            const float factor = sign != 0 ? -1.0f : 1.0f;
            EXPECT_EQ(smla_float_to_e4m3(factor * tie), sign << 7 | even);
            EXPECT_EQ(smla_float_to_e4m3(factor * nextafterf(tie, 0.0f)), sign << 7 | code);
            EXPECT_EQ(smla_float_to_e4m3(factor * nextafterf(tie, 1e9f)), sign << 7 | (code + 1));
        }
    }
}

static void
test_e4m3_saturates(void)
{
    const float large[] = {448.0f, 448.5f, 464.0f, 480.0f, 1e30f, 3.4e38f, INFINITY};
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        EXPECT_EQ(smla_float_to_e4m3(large[i]), 0x7E);
        EXPECT_EQ(smla_float_to_e4m3(-large[i]), 0xFE);
    }
    EXPECT_EQ(smla_float_to_e4m3(smla_bits_float(0x7F800001u)), 0x7F);
    EXPECT_EQ(smla_float_to_e4m3(smla_bits_float(0xFFC00000u)), 0xFF);
    EXPECT_EQ(smla_float_to_e4m3(1e-45f), 0x00); /* the smallest float */
    EXPECT_EQ(smla_float_to_e4m3(-1e-45f), 0x80);
}

static void
test_e4m3_random(void)
{
    for (int i = 0; i < 20000; i++) {
        /* Exponents from far below the smallest code to above the largest. */
        const float x = smla_bits_float((uint32_t)(random_bits() >> 41) |
                                        (uint32_t)(127 - 14 + random_int(24)) << 23);
        EXPECT_EQ(smla_float_to_e4m3(x), nearest_e4m3(x));
    }
}

static void
test_finite_abs(void)
{
    EXPECT_NEAR(smla_finite_abs(-3.5f), 3.5, 0.0);
    EXPECT_NEAR(smla_finite_abs(-0.0f), 0.0, 0.0);
    EXPECT_EQ(smla_float_bits(smla_finite_abs(-INFINITY)), 0x7F7FFFFFu);
    EXPECT_EQ(smla_float_bits(smla_finite_abs(NAN)), 0u);
    EXPECT_EQ(smla_float_bits(smla_finite_abs(smla_bits_float(0xFF800001u))), 0u);
}

static void
test_e2m1(void)
{
    static const float values[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (unsigned code = 0; code < 16; code++) {
        const float x = smla_e2m1_to_float((uint8_t)code);
        EXPECT_EQ(signbit(x) != 0, code >> 3);
        EXPECT_NEAR(fabsf(x), values[code & 7u], 0.0);
        EXPECT_EQ(smla_float_to_e2m1(x), code);
    }
    for (unsigned code = 0; code < 7; code++) {
        const float tie = (values[code] + values[code + 1]) / 2.0f; /* exact */
        const unsigned even = code + (code & 1u);
        for (unsigned sign = 0; sign < 2; sign++) {
            const float factor = sign != 0 ? -1.0f : 1.0f;
            EXPECT_EQ(smla_float_to_e2m1(factor * tie), sign << 3 | even);
            EXPECT_EQ(smla_float_to_e2m1(factor * nextafterf(tie, 0.0f)), sign << 3 | code);
            EXPECT_EQ(smla_float_to_e2m1(factor * nextafterf(tie, 1e9f)), sign << 3 | (code + 1));
        }
    }
    const float large[] = {6.0f, 6.5f, 100.0f, 3.4e38f, INFINITY};
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        EXPECT_EQ(smla_float_to_e2m1(large[i]), 7);
        EXPECT_EQ(smla_float_to_e2m1(-large[i]), 15);
    }
    EXPECT_EQ(smla_float_to_e2m1(smla_bits_float(0x7F800001u)), 7);
    EXPECT_EQ(smla_float_to_e2m1(smla_bits_float(0xFFC00000u)), 7);
    EXPECT_EQ(smla_float_to_e2m1(-1e-45f), 8);
}

static void
test_ue8m0(void)
{
    for (int e = 0; e < 255; e++) {
        EXPECT_NEAR(smla_ue8m0_to_float((uint8_t)e), ldexp(1.0, e - 127), 0.0);
    }
    EXPECT(isnan(smla_ue8m0_to_float(255)));
}

/* For every exponent, mantissas around that of `top`: the scale is large enough, and its half is
 * not. */
static void
test_power_scale(void)
{
    static const float tops[] = {SMLA_E4M3_MAX, SMLA_E2M1_MAX};
    for (int k = 0; k < 2; k++) {
        const double top = tops[k];
        const uint32_t mantissa = smla_float_bits(tops[k]) & 0x7FFFFFu;
        const uint32_t mantissas[] = {0, 1, mantissa - 1, mantissa, mantissa + 1, 0x7FFFFFu};
        const uint32_t shift = (smla_float_bits(tops[k]) >> 23) - 127u;
        for (uint32_t exponent = 1 + shift; exponent < 255; exponent++) {
            for (int i = 0; i < 6; i++) {
                const float amax = smla_bits_float(exponent << 23 | mantissas[i]);
                const uint32_t e = smla_power_scale(amax, tops[k]);
                const double scale = ldexp(1.0, (int)e - 127);
                EXPECT(e >= 1 && e <= 253);
                EXPECT(top * scale >= (double)amax && top * scale / 2.0 < (double)amax);
                EXPECT_NEAR((double)smla_invert_power(e) * scale, 1.0, 0.0);
            }
        }
    }
}

int
main(void)
{
    RUN(test_bf16_values);
    RUN(test_bf16_ties);
    RUN(test_half_values);
    RUN(test_e4m3_values);
    RUN(test_e4m3_ties);
    RUN(test_e4m3_saturates);
    RUN(test_e4m3_random);
    RUN(test_finite_abs);
    RUN(test_e2m1);
    RUN(test_ue8m0);
    RUN(test_power_scale);
    return report("test_numeric");
}
