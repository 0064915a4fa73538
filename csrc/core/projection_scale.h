/* projection_scale.h: reads the scales of a projection's e4m3 operands, and of weights, for every
 * backend. Compiles as C and as CUDA.
 */
#pragma once

#include <string.h>

#include "core/numeric.h"
#include "core/params.h"
#include "core/params_projection.h"

/* Where the scale of a tile, values 128 tile to 128 tile + 127, of a token's row lies: fp32, or an
 * int32 with the exponents of four tiles. */
SMLA_HOST_DEVICE static inline const uint32_t *
smla_token_scale_word(const smla_projection_scales *scales, int64_t token, int64_t head,
                      int64_t tile)
{
    const int64_t column = scales->x_is_packed ? tile / 4 : tile;
    return (const uint32_t *)scales->x + token * scales->x_stride_token +
           head * scales->x_stride_head + column * scales->x_stride_column;
}

/* The scale of a tile, from its word. */
SMLA_HOST_DEVICE static inline float
smla_scale_of_word(const smla_projection_scales *scales, uint32_t word, int64_t tile)
{
    return scales->x_is_packed ? smla_ue8m0_to_float((uint8_t)(word >> tile % 4 * 8))
                               : smla_bits_float(word);
}

/* Where the scale of the same tile of the weight rows around `outer` lies. */
SMLA_HOST_DEVICE static inline const float *
smla_weight_scale(const smla_projection_scales *scales, int64_t head, int64_t outer, int64_t tile)
{
    return scales->w + head * scales->w_stride_head +
           outer / SMLA_SCALE_TILE * scales->w_stride_outer + tile * scales->w_stride_inner;
}

/* Where the scale of an output lies, if there is one per output. */
SMLA_HOST_DEVICE static inline const float *
smla_output_scale(const smla_projection_scales *scales, int64_t head, int64_t outer)
{
    return scales->w + head * scales->w_stride_head + outer * scales->w_stride_outer;
}

/* The scale of a tile of a token's row. */
SMLA_HOST_DEVICE static inline float
smla_token_scale(const smla_projection_scales *scales, int64_t token, int64_t head, int64_t tile)
{
    uint32_t word;
    memcpy(&word, smla_token_scale_word(scales, token, head, tile), sizeof word);
    return smla_scale_of_word(scales, word, tile);
}

/* The scale of a weight's element, if it has scales. */
SMLA_HOST_DEVICE static inline float
smla_scale_of_element(const smla_weight *weight, int64_t row, int64_t column)
{
    return weight->scale[(row >> weight->scale_row_bits) * weight->scale_stride_row +
                         (column >> weight->scale_column_bits) * weight->scale_stride_column];
}
