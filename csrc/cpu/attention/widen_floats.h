/* widen_floats.h: values of multi-head attention as floats, for one instruction set. */
#pragma once

#include "cpu/cpu.h"
#include "cpu/machine/narrow.h"

/* Widens `count` values, from element `at` of an array on. */
static void
widen_floats(const void *array, smla_float_type type, int64_t at, int64_t count, float *to)
{
    const uint16_t *const halves = (const uint16_t *)array + at;
    int64_t i = 0;
    switch (type) {
    case SMLA_FLOAT_BF16:
        for (; i + WIDTH <= count; i += WIDTH) {
            const vhalf half = *(const vhalf *)(halves + i);
            *(vuint_unaligned *)(to + i) = __builtin_convertvector(half, vuint) << 16;
        }
        break;
    case SMLA_FLOAT_FP16:
        for (; i + WIDTH <= count; i += WIDTH) {
            const vhalf half = *(const vhalf *)(halves + i);
            *(vuint_unaligned *)(to + i) =
                (vuint)half_to_float(__builtin_convertvector(half, vuint) << 16);
        }
        break;
    default:
        for (; i + QUAD <= count; i += QUAD) {
            store_float(load_e4m3((const uint8_t *)array + at + i, 1.0f), to + i);
        }
    }
    for (; i < count; i++) {
        to[i] = smla_cpu_load_float(array, type, at + i);
    }
}

/* Whether one of `count` elements is above 2^50, infinite or NaN. */
static bool
has_huge_float(const float *row, int count)
{
    vint noted = {0};
    for (int i = 0; i < count; i += WIDTH) {
        noted |= (vint)(*(const vuint *)(row + i) & 0x7FFFFFFFu) > 0x58800000;
    }
    return has_lane(noted);
}
