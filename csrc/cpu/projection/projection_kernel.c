/* projection_kernel.c: one block of a projection, for one instruction set.
 *
 * Computes     out[t,h,n] = bf16(sum_k x[t,h,k] w(k,h,n)) for a block of tokens and outputs of a
 *              head. For e4m3: bf16(sum_b x_scale[t,h,b] w_scale[h,n/128,b] sum_k x w), where b is
 *              a block of 128 values of k, or with one w_scale[h,n] per output, which multiplies
 *              the whole sum
 * Shapes       x [T][H][k], w(k, h, n), out [T][H][n], all bf16; or x and w e4m3 with k contiguous,
 *              a multiple of 128. The weight is read fast where k or n is contiguous.
 * Scratch      panel [INNER_BLOCK / step][128 outputs] 32 KiB: a piece of the weight, unpacked once
 *                                                     for all tokens of the block
 *              sums  [64 tokens][128 outputs] fp32    32 KiB, in the scratch of the thread
 *              x     [4 tokens][INNER_BLOCK / step]   1 KiB, on the stack
 *              Lanes are outputs. A step of 4 tokens and OUTPUT_VECTORS vectors of outputs has
 *              4 OUTPUT_VECTORS accumulators.
 * Roofline     2 * T * H * 512 * 128 FLOP, T of them per byte of weight: memory binds at small T,
 *              the multiply unit from about T = 32. GFLOP/s of k_up, v_up on one Zen 5 core (CPU
 *              time, one thread, H 128 for T 1 and 32, H 16 for T 512, 2026-11-20): T 1: 33, 32 (33
 *              GB/s); T 32: 277, 260; T 512: 376, 408 of a peak of 521. fp32 at T 512: AVX-512 209,
 *              228 of 270, AVX2 103, 109 of 135, SSE2 41, 43. Tried: steps of 6 x 4 lose 2 to 20 %;
 *              steps of 8 x 2 lose up to 20 % at T <= 3; prefetching the weight loses 5 to 15 %;
 *              128 tokens per unpacking gain 5 % at T 512, but need twice the sums.
 * Numerics     Products below 2^-126 are zero (SMLA_FP_FLUSH), others exact. A row of x that is
 *              small altogether is multiplied 2^64 times as large, so that its products are not. A
 *              row with a value above 2^64 is computed with subnormal numbers kept. A row of e4m3
 *              whose scales have products outside of 2^-80 to 2^80 is added in fp64. Products are
 *              summed in fp32 in chains of INNER_BLOCK values, and the chains one after another: at
 *              most 128 + k / 64 roundings deep, where one chain would have 512. The result is
 *              rounded to bf16 once. The order of the sums depends on k alone, never on other rows
 *              of the result or the number of threads. e4m3 becomes bf16 exactly, and every chain
 *              is multiplied by its scale, in fp32.
 * Source       register blocking (GotoBLAS).
 */
#define SMLA_SIMD_WIDTH SMLA_LANES

#include "cpu/projection/projection.h"

extern const smla_projection_isa SMLA_OF_FP32_ISA(smla_projection);

#if defined(SMLA_HAVE_BF16_PRODUCTS)
#include "cpu/projection/projection_bf16.h"
#else
#include "cpu/projection/projection_fp32.h"
#endif

#include <math.h>
#include <string.h>

#include "core/fp_mode.h"
#include "core/projection_scale.h"
#include "cpu/machine/narrow.h"

enum {
    OUTER_BLOCK = SMLA_PROJECTION_OUTER,
    TOKEN_BLOCK = SMLA_PROJECTION_TOKENS,
    ROWS = 4, /* tokens per step */
    STEP_OUTER = OUTPUT_VECTORS * WIDTH,
    X_STRIDE = INNER_BLOCK / UNIT_STEP,
};

/* Products of two scales whose chains fp32 adds up: a chain is at most 2^25, and at least 2^-18. */
#define MOST_FACTOR  0x1p80f
#define LEAST_FACTOR 0x1p-80f

_Static_assert(OUTER_BLOCK % STEP_OUTER == 0, "a block must hold whole steps of outputs");
_Static_assert(INNER_BLOCK % (2 * WIDTH) == 0, "a chain must hold whole vectors of pairs");
_Static_assert(SMLA_SCALE_TILE % INNER_BLOCK == 0, "a chain must have one scale");
_Static_assert(SMLA_SCALE_TILE % OUTER_BLOCK == 0, "a block must not cross scales");
_Static_assert(TOKEN_BLOCK == 64, "rows are bits of a uint64_t");
_Static_assert(INNER_BLOCK / UNIT_STEP * OUTER_BLOCK * sizeof(unit_scalar) ==
                   SMLA_PROJECTION_PANEL_BYTES,
               "the sums lie behind the panel");

static int
round_up(int count, int multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

/* Words k / 2 ... of a row of `count` values, with zeros behind them. */
SMLA_INLINE vuint
load_values(const uint16_t *row, int k, int count)
{
    return k + 2 * WIDTH <= count ? load_words(row + k, 0)
                                  : load_part_of_words(row + k, 2 * (int64_t)(count - k));
}

/* WIDTH values of a row of `count` from value n on, widened, with zeros behind them. */
SMLA_INLINE vuint
load_halves(const uint16_t *row, int n, int count)
{
    if (n + WIDTH <= count) {
        return __builtin_convertvector(*(const vhalf *)(row + n), vuint);
    }
    if (n >= count) {
        return (vuint){0};
    }
    const vuint part = load_part_of_words(row + n, 2 * (int64_t)(count - n));
    return interleave_first(part & 0xFFFFu, part >> 16);
}

/* A copy of `count` values that are `stride` apart. */
static const uint16_t *
collect_row(const uint16_t *row, int64_t stride, int count, uint16_t *copy)
{
    for (int k = 0; k < count; k++) {
        copy[k] = row[k * stride];
    }
    return copy;
}

/* `count` values from `at` on as bf16: the values themselves, or a copy. An e4m3 row has a multiple
 * of 4 * WIDTH. */
SMLA_INLINE const uint16_t *
read_row(const void *values, int64_t at, bool is_e4m3, int count, uint16_t *copy)
{
    if (!is_e4m3) {
        return (const uint16_t *)values + at;
    }
    const uint8_t *const row = (const uint8_t *)values + at;
    for (int k = 0; k < count; k += 4 * WIDTH) {
        widen_e4m3(row + k, (uint32_t *)(void *)(copy + k));
    }
    return copy;
}

/* ---- Unpacking ----------------------------------------------------------------------------- */

/* Unpacks a weight whose rows are outputs; k runs inside a row, in steps of any size for bf16. */
static void
unpack_inner_rows(const smla_projection_params *params, int64_t at, int num_inner, int num_outer,
                  unit_scalar *restrict panel)
{
    static const uint16_t zeros[INNER_BLOCK] = {0}; /* read for outputs that do not exist */
    uint16_t copies[WIDTH][INNER_BLOCK] __attribute__((aligned(64)));
    for (int n = 0; n < round_up(num_outer, STEP_OUTER); n += WIDTH) {
        const uint16_t *rows[WIDTH];
        for (int i = 0; i < WIDTH; i++) {
            const int64_t row = at + (n + i) * params->w_stride_outer;
            if (n + i >= num_outer) {
                rows[i] = zeros;
            } else if (params->w_stride_inner == 1) {
                rows[i] = read_row(params->w, row, params->is_e4m3, num_inner, copies[i]);
            } else {
                rows[i] = collect_row((const uint16_t *)params->w + row, params->w_stride_inner,
                                      num_inner, copies[i]);
            }
        }
        for (int k = 0; k < num_inner; k += 2 * WIDTH) {
            vuint square[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) {
                square[i] = load_values(rows[i], k, num_inner);
            }
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) {
                store_pairs(square[i], panel + (k + 2 * i) / UNIT_STEP * OUTER_BLOCK + n,
                            OUTER_BLOCK);
            }
        }
    }
}

/* Unpacks a weight whose rows are values of k; outputs run inside a row. */
static void
unpack_outer_rows(const uint16_t *w, int64_t stride_inner, int num_inner, int num_outer,
                  unit_scalar *restrict panel)
{
    for (int k = 0; k < num_inner; k += 2) {
        const uint16_t *const even = w + k * stride_inner;
        const bool is_pair = k + 1 < num_inner;
        const uint16_t *const odd = is_pair ? even + stride_inner : even;
        const int num_odd = is_pair ? num_outer : 0;
        for (int n = 0; n < round_up(num_outer, STEP_OUTER); n += WIDTH) {
            const vuint words = load_halves(even, n, num_outer) | load_halves(odd, n, num_odd)
                                                                      << 16;
            store_pairs(words, panel + k / UNIT_STEP * OUTER_BLOCK + n, OUTER_BLOCK);
        }
    }
}

/* Unpacks a piece of the weight to panel [num_inner / UNIT_STEP][OUTER_BLOCK], zero-padded. */
static void
unpack_weights(const smla_projection_params *params, const smla_projection_block *block,
               int64_t inner, int num_inner, unit_scalar *restrict panel)
{
    const int64_t at = block->head * params->w_stride_head + inner * params->w_stride_inner +
                       block->outer * params->w_stride_outer;
    if (!params->is_e4m3 && smla_outer_is_contiguous(params)) {
        unpack_outer_rows((const uint16_t *)params->w + at, params->w_stride_inner, num_inner,
                          block->num_outer, panel);
    } else {
        unpack_inner_rows(params, at, num_inner, block->num_outer, panel);
    }
}

/* Words of two bf16 values, 2^64 times as large. */
SMLA_INLINE vuint
lift_halves(vuint words)
{
    const vfloat even = lift_lanes((vfloat)(words << 16));
    const vfloat odd = lift_lanes((vfloat)(words & 0xFFFF0000u));
    return join_upper_halves((vuint)even, (vuint)odd);
}

/* Unpacks one row of x, with zeros up to whole vectors. Bf16 values may be lifted. Returns whether
 * none is huge. */
SMLA_INLINE bool
load_token(const smla_projection_params *params, int64_t at, int num_inner, bool is_lifted,
           unit_scalar *x)
{
    uint16_t copy[INNER_BLOCK] __attribute__((aligned(64)));
    const uint16_t *const row = read_row(params->x, at, params->is_e4m3, num_inner, copy);
    vuint noted = {0};
    for (int k = 0; k < num_inner; k += 2 * WIDTH) {
        const vuint words = load_values(row, k, num_inner);
        noted = note_huge(noted, words);
        store_tokens(is_lifted ? lift_halves(words) : words, x + k / UNIT_STEP);
    }
    return !has_noted(noted);
}

/* Where a token's values of x lie. */
static int64_t
row_of(const smla_projection_params *params, const smla_projection_block *block, int t)
{
    return (block->token + t) * params->x_stride_token + block->head * params->x_stride_head;
}

/* Whether all values of token t are below SMLA_TINY, or all its scales. Most rows show in their
 * first block that they are not. */
static bool
is_tiny_row(const smla_projection_params *params, const smla_projection_block *block, int t)
{
    if (params->is_e4m3) {
        for (int64_t tile = 0; tile < params->inner_dim / SMLA_SCALE_TILE; tile++) {
            if (!(fabsf(smla_token_scale(&params->scales, block->token + t, block->head, tile)) <
                  SMLA_TINY)) {
                return false;
            }
        }
        return true;
    }
    const uint16_t *const row = (const uint16_t *)params->x + row_of(params, block, t);
    const int limit = smla_float_to_bf16(SMLA_TINY);
    for (int64_t begin = 0; begin < params->inner_dim; begin += INNER_BLOCK) {
        const int64_t left = params->inner_dim - begin;
        int largest = 0;
        for (int k = 0; k < (left < INNER_BLOCK ? left : INNER_BLOCK); k++) {
            const int magnitude = row[begin + k] & 0x7FFF;
            largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= limit) {
            return false;
        }
    }
    return true;
}

/* ---- Scales -------------------------------------------------------------------------------- */

/* The scales of a chain of token t: its tile's, and that of the weight, if that is no output's. */
typedef struct tile_scales {
    float x;
    float w;
} tile_scales;

static tile_scales
find_scales(const smla_projection_params *params, const smla_projection_block *block, int t,
            int64_t inner, bool is_lifted)
{
    const smla_projection_scales *const scales = &params->scales;
    const int64_t tile = inner / SMLA_SCALE_TILE;
    if (!params->is_e4m3) {
        return (tile_scales){1.0f, 1.0f};
    }
    const float x = smla_token_scale(scales, block->token + t, block->head, tile);
    return (tile_scales){
        .x = is_lifted ? lift_lanes(splat(x))[0] : x,
        .w = scales->w_is_per_output ? 1.0f
                                     : *smla_weight_scale(scales, block->head, block->outer, tile),
    };
}

/* Whether a number is not zero. The mode of the caller makes a comparison take subnormal ones for
 * it. */
static bool
is_nonzero(float x)
{
    return smla_float_bits(x) << 1 != 0;
}

/* Whether fp32 adds up the chains that a product of scales multiplies: above MOST_FACTOR they may
 * overflow, and below LEAST_FACTOR they may be subnormal. */
SMLA_INLINE bool
has_room(tile_scales scales)
{
    const float factor = scales.x * scales.w;
    return (fabsf(factor) >= LEAST_FACTOR && fabsf(factor) <= MOST_FACTOR) || isnan(factor) ||
           !is_nonzero(scales.x) || !is_nonzero(scales.w);
}

/* ---- Sums ---------------------------------------------------------------------------------- */

/* sums[r][n] += scales[r] * sum_k x[r][k] * panel[k][n], for `rows` tokens. The scale and the sum
 * are one FMA for any number of rows. If there were a choice between sum and 0, the compiler would
 * fuse them for some numbers only, and a token's bits would depend on its neighbours. */
SMLA_INLINE void
multiply_rows(const unit_scalar *x, const unit_scalar *panel, int steps, int num_outer,
              const float *scales, float *sums, const int rows)
{
    for (int n = 0; n < num_outer; n += STEP_OUTER) {
        vfloat sum[ROWS * OUTPUT_VECTORS];
#pragma GCC unroll 16
        for (int i = 0; i < rows * OUTPUT_VECTORS; i++) {
            sum[i] = (vfloat){0};
        }
        const unit_scalar *w = panel + n;
        for (int k = 0; k < steps; k++) {
            unit_vector b[OUTPUT_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < OUTPUT_VECTORS; v++) {
                b[v] = *(const unit_vector *)(w + v * WIDTH);
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
                for (int v = 0; v < OUTPUT_VECTORS; v++) {
                    sum[r * OUTPUT_VECTORS + v] =
                        multiply_add(sum[r * OUTPUT_VECTORS + v], x[r * X_STRIDE + k], b[v]);
                }
            }
            w += OUTER_BLOCK;
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
            for (int v = 0; v < OUTPUT_VECTORS; v++) {
                vfloat *const to = (vfloat *)(sums + r * OUTER_BLOCK + n + v * WIDTH);
                *to += sum[r * OUTPUT_VECTORS + v] * scales[r];
            }
        }
    }
}

static void
lower_row(float *sums, int num_outer)
{
    for (int n = 0; n < num_outer; n += WIDTH) {
        *(vfloat *)(sums + n) = lower_lanes(*as_vectors(sums + n));
    }
}

/* Multiplies a token's sums by the scales of their outputs. */
static void
scale_outputs(const smla_projection_params *params, const smla_projection_block *block, float *sums)
{
    for (int n = 0; n < block->num_outer; n++) {
        sums[n] *= *smla_output_scale(&params->scales, block->head, block->outer + n);
    }
}

static void
store_row(const float *sums, int num_outer, uint16_t *out)
{
    int n = 0;
    for (; n + WIDTH <= num_outer; n += WIDTH) {
        *(vhalf *)(out + n) = round_to_bf16(*as_vectors(sums + n));
    }
    if (n < num_outer) {
        const vhalf last = round_to_bf16(*as_vectors(sums + n));
        memcpy(out + n, &last, (size_t)(num_outer - n) * sizeof *out);
    }
}

/* ---- A block ------------------------------------------------------------------------------- */

/* Bit t of the result: token t has a huge value, or extreme scales, so its results are not right.
 * Not inlined, because the caller changes the floating-point mode. */
__attribute__((noinline)) static uint64_t
project_block(const smla_projection_params *params, smla_projection_block block, void *scratch)
{
    unit_scalar *const restrict panel = __builtin_assume_aligned(scratch, 64);
    float *const restrict sums =
        __builtin_assume_aligned((uint8_t *)scratch + SMLA_PROJECTION_PANEL_BYTES, 64);
    unit_scalar x[ROWS * X_STRIDE] __attribute__((aligned(64))) = {0};
    float scales[ROWS];
    uint64_t lifted = 0, huge = 0; /* a bit per token */
    for (int t = 0; t < block.num_tokens; t++) {
        lifted |= (uint64_t)is_tiny_row(params, &block, t) << t;
    }
    memset(sums, 0, (size_t)block.num_tokens * SMLA_PROJECTION_SUM_BYTES);
    for (int64_t inner = 0; inner < params->inner_dim; inner += INNER_BLOCK) {
        const int64_t left = params->inner_dim - inner;
        const int num_inner = left < INNER_BLOCK ? (int)left : INNER_BLOCK;
        const int steps = (num_inner + UNIT_STEP - 1) / UNIT_STEP;
        unpack_weights(params, &block, inner, num_inner, panel);
        for (int t = 0; t < block.num_tokens; t += ROWS) {
            const int rows = block.num_tokens - t < ROWS ? block.num_tokens - t : ROWS;
            for (int r = 0; r < rows; r++) {
                const bool is_lifted = lifted >> (t + r) & 1;
                const bool is_ordinary =
                    load_token(params, row_of(params, &block, t + r) + inner, num_inner,
                               is_lifted && !params->is_e4m3, x + r * X_STRIDE);
                const tile_scales factors = find_scales(params, &block, t + r, inner, is_lifted);
                huge |= (uint64_t)!(is_ordinary && has_room(factors)) << (t + r);
                scales[r] = factors.x * factors.w;
            }
            float *const to = sums + t * OUTER_BLOCK;
            switch (rows) {
            case 1: multiply_rows(x, panel, steps, block.num_outer, scales, to, 1); break;
            case 2: multiply_rows(x, panel, steps, block.num_outer, scales, to, 2); break;
            case 3: multiply_rows(x, panel, steps, block.num_outer, scales, to, 3); break;
            default: multiply_rows(x, panel, steps, block.num_outer, scales, to, ROWS);
            }
        }
    }
    for (int t = 0; t < block.num_tokens; t++) {
        float *const row = sums + t * OUTER_BLOCK;
        if (params->is_e4m3 && params->scales.w_is_per_output) {
            scale_outputs(params, &block, row);
        }
        if (lifted >> t & 1) { /* after the scales, which subnormal sums would have no bits for */
            lower_row(row, block.num_outer);
        }
        store_row(row, block.num_outer,
                  params->out + (block.token + t) * params->out_stride_token +
                      block.head * params->out_stride_head + block.outer);
    }
    return huge;
}

/* One token of e4m3, whatever its scales: chains are added in fp64. Subnormal results are kept. */
__attribute__((noinline)) static void
project_token_in_double(const smla_projection_params *params, const smla_projection_block *block,
                        void *scratch)
{
    static const float ones[ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
    unit_scalar *const restrict panel = __builtin_assume_aligned(scratch, 64);
    float *const restrict chain =
        __builtin_assume_aligned((uint8_t *)scratch + SMLA_PROJECTION_PANEL_BYTES, 64);
    unit_scalar x[ROWS * X_STRIDE] __attribute__((aligned(64))) = {0};
    double sums[OUTER_BLOCK] = {0};
    for (int64_t inner = 0; inner < params->inner_dim; inner += INNER_BLOCK) {
        const tile_scales scales = find_scales(params, block, 0, inner, false);
        unpack_weights(params, block, inner, INNER_BLOCK, panel);
        (void)load_token(params, row_of(params, block, 0) + inner, INNER_BLOCK, false, x);
        memset(chain, 0, SMLA_PROJECTION_SUM_BYTES);
        multiply_rows(x, panel, INNER_BLOCK / UNIT_STEP, block->num_outer, ones, chain, 1);
        for (int n = 0; n < block->num_outer; n++) {
            sums[n] += (double)scales.x * (double)scales.w * (double)chain[n];
        }
    }
    uint16_t *const out = params->out + block->token * params->out_stride_token +
                          block->head * params->out_stride_head + block->outer;
    for (int n = 0; n < block->num_outer; n++) {
        const double scale =
            params->scales.w_is_per_output
                ? (double)*smla_output_scale(&params->scales, block->head, block->outer + n)
                : 1.0;
        out[n] = smla_float_to_bf16((float)(sums[n] * scale));
    }
}

/* If this is an fp32 unit. */
static void
run_block_exactly(const smla_projection_params *params, smla_projection_block block, void *scratch)
{
    const smla_fp_mode before = smla_fp_change(SMLA_FP_EXACT);
    if (params->is_e4m3) {
        project_token_in_double(params, &block, scratch);
    } else {
        (void)project_block(params, block, scratch);
    }
    smla_fp_change(before);
}

/* Computes tokens with huge values or extreme scales again on the fp32 unit. Whether a token has
 * some depends on its own row, never on other tokens. */
static void
run_block(const smla_projection_params *params, smla_projection_block block, void *scratch)
{
    uint64_t huge = project_block(params, block, scratch);
    const int64_t first = block.token;
    block.num_tokens = 1;
    for (; huge != 0; huge &= huge - 1) {
        block.token = first + __builtin_ctzll(huge);
        SMLA_OF_FP32_ISA(smla_projection).run_block_exactly(params, block, scratch);
    }
}

const smla_projection_isa SMLA_OF_ISA(smla_projection) = {
    .run_block = run_block,
    .run_block_exactly = run_block_exactly,
    .absorb_block = absorb_block,
};

#if !defined(SMLA_HAVE_BF16_PRODUCTS)
#include "cpu/projection/absorb_kernel.h"
#endif
