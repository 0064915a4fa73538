/* rope.c: the check of positions, and fused_inv_rope_fp8_quant. rotate_kernel.c has the arithmetic.
 */
#include "cpu/rope/rotate.h"

#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"

enum {
    PARALLEL_ROWS = 64, /* fewer rows run on one thread */
    CACHE_LINE = 64,
    FETCHED_ROWS = 3, /* how far ahead heads are fetched */
};

/* ---- Positions ----------------------------------------------------------------------------- */

smla_status
smla_cpu_check_positions(const char *op, const smla_rope *rope, int64_t num_tokens,
                         smla_error *error)
{
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t position = read_position(rope, token);
        if (position < 0 || position >= rope->max_pos) {
            return smla_fail_value(
                error, op,
                "`positions` must be rows of `rope_table`, which has %lld, got %lld for token %lld",
                (long long)rope->max_pos, (long long)position, (long long)token);
        }
    }
    return SMLA_OK;
}

/* ---- Inverse RoPE -------------------------------------------------------------------------- */

/* The place of column `column` of a group's scales, in elements of 4 bytes. */
static int64_t
offset_of_scale(const smla_inverse_rope_params *p, int64_t token, int64_t group, int64_t column)
{
    return token * p->scale_stride_token + group * p->scale_stride_group +
           column * p->scale_stride_column;
}

/* Stores the scales of head `head` of a group. */
static void
store_scales(const smla_inverse_rope_params *p, int64_t token, int64_t group, int64_t head,
             const float *scales)
{
    uint32_t word = 0;
    for (int i = 0; i < SMLA_OUTPUT_SCALES; i++) {
        word |= smla_float_bits(scales[i]) >> 23 << 8 * i;
        if (!p->scales_are_packed) {
            const int64_t column = head * SMLA_OUTPUT_SCALES + i;
            ((float *)p->out_scale)[offset_of_scale(p, token, group, column)] = scales[i];
        }
    }
    if (p->scales_are_packed) {
        ((uint32_t *)p->out_scale)[offset_of_scale(p, token, group, head)] = word;
    }
}

/* Starts to fetch the cache lines that a head's bytes and scales will be written to, and those of a
 * later head's values. Without it, a head took a quarter longer (Zen 3). GCC 12 would remove a call
 * of such a function as one without effects. */
static inline __attribute__((always_inline)) void
fetch_lines(const smla_inverse_rope_params *p, const uint16_t *x, const uint8_t *out,
            int64_t first_scale)
{
    const uint8_t *const later = (const uint8_t *)(x + FETCHED_ROWS * p->o_stride_head);
    for (int64_t at = 0; at < SMLA_V4_HEAD_DIM * (int64_t)sizeof *x; at += CACHE_LINE) {
        __builtin_prefetch(later + at);
    }
    for (int64_t at = 0; at < SMLA_V4_HEAD_DIM; at += CACHE_LINE) {
        __builtin_prefetch(out + at, 1);
    }
    for (int64_t i = 0; i < (p->scales_are_packed ? 1 : SMLA_OUTPUT_SCALES); i++) {
        const int64_t at = first_scale + i * p->scale_stride_column;
        __builtin_prefetch((const uint32_t *)p->out_scale + at, 1);
    }
}

static void
rotate_back(const smla_rotate_isa *rotate, const smla_inverse_rope_params *p, int64_t token,
            int64_t group, int64_t head)
{
    const uint16_t *const x =
        p->o + token * p->o_stride_token + (group * p->group_heads + head) * p->o_stride_head;
    const float *const cos_sin = find_angles(&p->rope, token);
    const int64_t out =
        token * p->out_stride_token + group * p->out_stride_group + head * SMLA_V4_HEAD_DIM;
    if (p->out_scale == NULL) {
        rotate->rotate_to_bf16(x, cos_sin, true, (uint16_t *)p->out + out);
        return;
    }
    float scales[SMLA_OUTPUT_SCALES];
    const int64_t column = head * (p->scales_are_packed ? 1 : SMLA_OUTPUT_SCALES);
    fetch_lines(p, x, (uint8_t *)p->out + out, offset_of_scale(p, token, group, column));
    rotate->rotate_back_to_e4m3(x, cos_sin, (uint8_t *)p->out + out, scales);
    store_scales(p, token, group, head, scales);
}

/* Rows of scales behind the last token, up to the next multiple of 4, where out_scale has them. */
static void
clear_scales(const smla_inverse_rope_params *p)
{
    const int64_t num_groups = p->num_heads / p->group_heads;
    const int64_t num_columns = p->group_heads * (p->scales_are_packed ? 1 : SMLA_OUTPUT_SCALES);
    for (int64_t row = p->num_tokens; row < p->scale_rows && row % SMLA_SCALE_ROW_ALIGN != 0;
         row++) {
        for (int64_t group = 0; group < num_groups; group++) {
            for (int64_t column = 0; column < num_columns; column++) {
                ((uint32_t *)p->out_scale)[offset_of_scale(p, row, group, column)] = 0;
            }
        }
    }
}

smla_status
smla_cpu_fused_inv_rope_fp8_quant(const smla_inverse_rope_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa("fused_inv_rope_fp8_quant", &isa, error));
    SMLA_TRY(smla_cpu_check_positions("fused_inv_rope_fp8_quant", &p->rope, p->num_tokens, error));
    const int64_t num_rows = p->num_tokens * p->num_heads;
#pragma omp parallel for schedule(static) if (num_rows >= PARALLEL_ROWS)
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t head = row % p->num_heads;
        rotate_back(isa->rotate, p, row / p->num_heads, head / p->group_heads,
                    head % p->group_heads);
    }
    clear_scales(p);
    return SMLA_OK;
}
