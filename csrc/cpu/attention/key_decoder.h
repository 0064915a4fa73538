/* key_decoder.h: rows of 512 values whose scales are powers of two or e4m3, for the attention
 * kernels of one instruction set.
 *
 * Such a row is decoded to 512 values. They are exact in bf16 unless they are subnormal, because a
 * code has up to four bits, and a scale up to four.
 */
#pragma once

#include "cpu/cache/row_decoder.h"

/* Whether rows of the format are decoded by this file. */
SMLA_INLINE bool
is_decoded(const smla_kv_format_info *format)
{
    return format->scale_type == SMLA_SCALE_UE8M0 || format->scale_type == SMLA_SCALE_E4M3;
}

/* Whether values of such a row may be above 2^64: e4m3 codes are at most 448, and UE8M0 byte 127 +
 * 55 is 2^55. */
SMLA_INLINE bool
has_huge_scale(const smla_kv_format_info *format, const uint8_t *scales)
{
    bool is_huge = false;
    for (int t = 0; t < format->num_scales && format->scale_type == SMLA_SCALE_UE8M0; t++) {
        is_huge |= scales[t] > 127 + 55;
    }
    return is_huge;
}

/* Decodes a row for which is_decoded is true. */
SMLA_INLINE void
decode_key(const smla_kv_format_info *format, smla_kv_token token, smla_float_type type, void *key)
{
#define DECODE(number)                                                                \
    case number:                                                                      \
        if (is_decoded(&smla_kv_formats[number])) {                                   \
            decode_constant_format(&smla_kv_formats[number], token, 1.0f, type, key); \
        }                                                                             \
        break;
    switch (format->number) {
        SMLA_EACH_KV_ROW(DECODE)
    case SMLA_NUM_KV_FORMATS: break;
    }
#undef DECODE
}
