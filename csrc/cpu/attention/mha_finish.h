/* mha_finish.h: the last step of a tile of multi-head attention, for one instruction set.
 * mha_kernel.c includes it.
 */
#pragma once

/* Writes a vector of a row, or the `count` values that are left. */
SMLA_INLINE void
store_values(vfloat x, smla_float_type type, int64_t at, int64_t count, void *out)
{
    if (type == SMLA_FLOAT_FP32) {
        float *const to = (float *)out + at;
        if (count >= WIDTH) {
            *(vuint_unaligned *)to = (vuint)x;
        } else {
            memcpy(to, &x, (size_t)count * sizeof *to);
        }
        return;
    }
    uint16_t *const to = (uint16_t *)out + at;
    const vuint words = type == SMLA_FLOAT_BF16 ? round_upper_half(x) >> 16 : round_to_half(x);
    const vhalf halves = __builtin_convertvector(words, vhalf);
    if (count >= WIDTH) {
        *(vhalf_unaligned *)to = halves;
    } else {
        memcpy(to, &halves, (size_t)count * sizeof *to);
    }
}

/* Transposes one vector of lanes into rows [WIDTH][value_dims], times the lanes' factors. */
static void
finish_rows(const tile_work *work, int lane, vfloat factor, float *rows)
{
    const int first = lane / GROUP_LANES * GROUP_LANES; /* the group's first lane */
    const int lanes = lanes_at(work, first);
    const float *const out = work->state.out + first * work->value_dims + (lane - first);
    for (int d = 0; d < work->value_dims; d += WIDTH) {
        vuint square[WIDTH];
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) {
            /* Adding 0 makes +0 of -0, which depends on how often a sum was rescaled. */
            square[i] = (vuint)(*as_vectors(out + (d + i) * lanes) * factor + 0.0f);
        }
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) {
            *(vuint *)(rows + i * work->value_dims + d) = square[i];
        }
    }
}

/* Writes the results of one vector of lanes, row by row: rows may lie a page apart, where the cache
 * has no room for several of them. */
static void
finish_vector(const tile_work *work, int lane)
{
    const smla_attention_params *const params = work->params;
    const double ln_2 = 0.69314718055994530942;
    const int num_rows = work->num_rows - lane < WIDTH ? work->num_rows - lane : WIDTH;
    const vfloat reference = finite_reference_of(*as_vectors(work->state.max_log2 + lane));
    float *const rows = (float *)work->row;
    vfloat factor = {0};
    for (int i = 0; i < num_rows; i++) {
        const double sum = work->state.sum[lane + i];
        const double lse = sum == 0.0 ? -INFINITY : (double)reference[i] * ln_2 + log(sum);
        factor[i] = (float)smla_finish_mha_row(params, work->tile, &work->rows[lane + i], sum, lse);
    }
    finish_rows(work, lane, factor, rows);
    for (int i = 0; i < num_rows; i++) {
        const smla_mha_row *const row = &work->rows[lane + i];
        for (int d = 0; d < params->kv.value_dim; d += WIDTH) {
            store_values(*as_vectors(rows + i * work->value_dims + d), params->results.out_type,
                         row->out_at + d, params->kv.value_dim - d, params->results.out);
        }
    }
}
