/* rotate_kernel.c: RoPE of a head, for one instruction set.
 *
 * Computes     rotate_back_to_e4m3  x = RoPE of the last 64 values by the negative angles; per tile
 *                                   of 128 values the scale is the smallest power of two with
 *                                   448 scale >= max(amax, 1e-10), and a byte is e4m3(x / scale)
 *              rotate_to_bf16       bf16 of RoPE by the angles, or by their negatives
 *              rotate_index_head    the same by the angles, for a head of 128 values
 * Shapes       heads [512], or [128] of the indexer, of bf16, contiguous
 * Roofline     Memory binds where heads come from memory, else conversion does. ns per head in L1
 *              on one core of a Zen 3 with AVX2 (2026-11-24), before and after values were taken as
 *              duos: rotate_to_bf16 48 -> 30, rotate_back_to_e4m3 225 -> 110 (by bytes_avx2.h; a
 *              call takes 129 -> 109 per head since 2026-11-25, 136 where values are not normal).
 * Numerics     fp32, each operation rounded: there is no FMA. A product with a power of two stands
 *              for the division, because both are exact. A rotated value that is NaN is the
 *              positive quiet NaN; values that RoPE does not rotate keep their bits, or their sign
 *              as e4m3.
 * Source       fused_inv_rope_fp8_quant of vLLM, for the formulas.
 */
#define SMLA_SIMD_WIDTH SMLA_BYTE_LANES

#include <string.h>

#include "cpu/machine/bytes_avx2.h"
#include "cpu/machine/quads.h"
#include "cpu/rope/rope.h"
#include "cpu/rope/rotate.h"

enum {
    HEAD_DUOS = SMLA_V4_HEAD_DIM / DUO,
    ROPE_DUOS = SMLA_QK_ROPE_HEAD_DIM / DUO,
    TILE_DUOS = SMLA_OUTPUT_TILE / DUO,
};

_Static_assert(SMLA_OUTPUT_SCALES == 4, "a quad's vectors keep the maxima of the tiles");

/* max(best, |x|) per lane over a duo; NaN is ignored. */
SMLA_INLINE vfloat
max_of_duo(vfloat best, duo x)
{
    const vfloat even = (vfloat)((vuint)x.even & 0x7FFFFFFFu);
    const vfloat odd = (vfloat)((vuint)x.odd & 0x7FFFFFFFu);
    return max_lanes(max_lanes(best, even), odd);
}

#if defined(SMLA_HAVE_BYTES)
/* How many values of tile `t` RoPE leaves alone. */
SMLA_INLINE int
count_nope(int t)
{
    const int left = NOPE_DIM - t * SMLA_OUTPUT_TILE;
    return left < SMLA_OUTPUT_TILE ? left : SMLA_OUTPUT_TILE;
}

/* rotate_back_to_e4m3 of a head whose values are all ordinary. Returns false for others. */
SMLA_INLINE bool
rotate_back_ordinary(const uint16_t *x, const float *cos_sin, uint8_t *out,
                     float scales[SMLA_OUTPUT_SCALES])
{
    duo rotated[ROPE_DUOS];
    float inverse[SMLA_OUTPUT_SCALES];
    quad best;
    vfloat largest = {0};
#pragma GCC unroll 4
    for (int t = 0; t < SMLA_OUTPUT_SCALES; t++) {
        best.v[t] = (vfloat)find_largest_magnitudes(x + t * SMLA_OUTPUT_TILE, count_nope(t));
    }
    for (int i = 0; i < ROPE_DUOS; i++) {
        const int at = NOPE_DIM + i * DUO;
        rotated[i] = rotate_part(load_bf16_duo(x + at), cos_sin, true, at);
        const vuint even = (vuint)rotated[i].even & 0x7FFFFFFFu;
        const vuint odd = (vuint)rotated[i].odd & 0x7FFFFFFFu;
        best.v[3] = (vfloat)max_words((vuint)best.v[3], max_words(even, odd));
    }
#pragma GCC unroll 4
    for (int t = 0; t < SMLA_OUTPUT_SCALES; t++) {
        largest = (vfloat)max_words((vuint)largest, (vuint)best.v[t]);
    }
    if (has_lane(~(largest < SMLA_ORDINARY_MAX))) { /* or NaN */
        return false;
    }
    _mm_storeu_ps(scales, fold_four(best.v));
    for (int t = 0; t < SMLA_OUTPUT_SCALES; t++) {
        scales[t] = smla_power_of_two_scale(scales[t], SMLA_E4M3_MAX, SMLA_OUTPUT_FLOOR);
        inverse[t] = 1.0f / scales[t];
    }
#pragma GCC unroll 4
    for (int t = 0; t < SMLA_OUTPUT_SCALES; t++) {
        const int at = t * SMLA_OUTPUT_TILE;
        store_products_e4m3(x + at, count_nope(t), inverse[t], out + at);
    }
    const float factor = inverse[3] * 0x1p-8f;
    for (int i = 0; i < ROPE_DUOS; i += 2) {
        const duo first = {rotated[i].even * factor, rotated[i].odd * factor};
        const duo second = {rotated[i + 1].even * factor, rotated[i + 1].odd * factor};
        store_scaled_e4m3(first, second, out + NOPE_DIM + i * DUO);
    }
    return true;
}
#endif

static void
rotate_back_to_e4m3(const uint16_t *x, const float *cos_sin, uint8_t *out,
                    float scales[SMLA_OUTPUT_SCALES])
{
#if defined(SMLA_HAVE_BYTES)
    if (rotate_back_ordinary(x, cos_sin, out, scales)) {
        return;
    }
#endif
    duo values[HEAD_DUOS];
    quad best = {{{0}}};
    for (int t = 0; t < SMLA_OUTPUT_SCALES; t++) {
        for (int i = t * TILE_DUOS; i < (t + 1) * TILE_DUOS; i++) {
            const duo loaded = load_bf16_duo(x + (ptrdiff_t)i * DUO);
            values[i] = i * DUO < NOPE_DIM ? loaded : rotate_part(loaded, cos_sin, true, i * DUO);
            best.v[t] = max_of_duo(best.v[t], values[i]);
        }
    }
    finish_max(best, scales);
    for (int t = 0; t < SMLA_OUTPUT_SCALES; t++) {
        scales[t] = smla_power_of_two_scale(scales[t], SMLA_E4M3_MAX, SMLA_OUTPUT_FLOOR);
        const float inverse = 1.0f / scales[t];
        for (int i = t * TILE_DUOS; i < (t + 1) * TILE_DUOS; i += 2) {
            const duo first = {values[i].even * inverse, values[i].odd * inverse};
            const duo second = {values[i + 1].even * inverse, values[i + 1].odd * inverse};
            store_e4m3(join_duos(first, second), out + (ptrdiff_t)i * DUO);
        }
    }
}

static void
rotate_to_bf16(const uint16_t *x, const float *cos_sin, bool is_inverse, uint16_t *out)
{
    memcpy(out, x, NOPE_DIM * sizeof *out);
    for (int i = NOPE_DIM; i < SMLA_V4_HEAD_DIM; i += DUO) {
        store_unified(rotate_part(load_bf16_duo(x + i), cos_sin, is_inverse, i), out + i);
    }
}

static void
rotate_index_head(const uint16_t *x, const float *cos_sin, uint16_t *out)
{
    const int nope_dim = SMLA_INDEX_HEAD_DIM - SMLA_QK_ROPE_HEAD_DIM;
    memcpy(out, x, (size_t)nope_dim * sizeof *out);
    for (int i = nope_dim; i < SMLA_INDEX_HEAD_DIM; i += DUO) {
        const int pair = (i - nope_dim) / 2;
        store_unified(rotate_duo(load_bf16_duo(x + i), cos_sin, pair, false), out + i);
    }
}

const smla_rotate_isa SMLA_OF_ISA(smla_rotate) = {
    .rotate_back_to_e4m3 = rotate_back_to_e4m3,
    .rotate_to_bf16 = rotate_to_bf16,
    .rotate_index_head = rotate_index_head,
};
