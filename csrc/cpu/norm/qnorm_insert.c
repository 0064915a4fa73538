/* qnorm_insert.c: fused_qnorm_rope_kv_insert. norm_kernel.c normalises and rotates, cache_kernel.c
 * writes the rows.
 */
#include <string.h>

#include "cpu/cache/cache.h"
#include "cpu/cache/slot_shares.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"
#include "cpu/norm/norm.h"
#include "cpu/rope/rotate.h"

enum { PARALLEL_HEADS = 64 }; /* fewer heads run on one thread */

/* Writes one head of q_out. */
static void
write_head(const smla_norm_isa *norm, const smla_qnorm_insert_params *p, int64_t token,
           int64_t head, float q_scale_inv)
{
    const int64_t at = token * p->q_out_stride_token + head * p->q_out_stride_head;
    const bool is_bf16 = p->q_out_type == SMLA_FLOAT_BF16;
    uint8_t *const out = (uint8_t *)p->q_out + at * (is_bf16 ? 2 : 1);
    if (head >= p->num_heads) {
        memset(out, 0, SMLA_V4_HEAD_DIM * (is_bf16 ? 2 : 1));
        return;
    }
    const uint16_t *const x = p->q + token * p->q_stride_token + head * p->q_stride_head;
    const float *const cos_sin = find_angles(&p->rope, token);
    if (is_bf16) {
        norm->normalize_head(x, cos_sin, p->eps, (uint16_t *)(void *)out);
    } else {
        norm->normalize_head_to_e4m3(x, cos_sin, p->eps, q_scale_inv, out);
    }
}

/* Rotates the keys of one share, and writes them in order. */
static void
insert_share(const smla_cpu_isa *isa, const smla_qnorm_insert_params *p, int share,
             slot_shares shares)
{
    const smla_cache_write_params *const insert = &p->insert;
    const uint16_t *const kv = insert->kv_c;
    const float kv_scale = smla_read_scale(&insert->kv_scale);
    const token_range range = range_of_share(insert, share, shares);
    for (int64_t token = range.first; token < range.end; token++) {
        const int64_t slot = read_slot(insert, token);
        if (is_in_share(slot, share, shares)) {
            uint16_t key[SMLA_V4_HEAD_DIM];
            isa->rotate->rotate_to_bf16(kv + token * insert->kv_c_stride_token,
                                        find_angles(&p->rope, token), false, key);
            isa->cache->write_row(insert->kv.format, SMLA_FLOAT_BF16, key, 0, key,
                                  insert->kv.format->nope_dim, kv_scale,
                                  smla_kv_slot(&insert->kv, slot));
        }
    }
}

smla_status
smla_cpu_fused_qnorm_rope_kv_insert(const smla_qnorm_insert_params *p, smla_error *error)
{
    const char *const op = p->call.op;
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(op, &isa, error));
    SMLA_TRY(smla_cpu_check_positions(op, &p->rope, p->num_tokens, error));
    SMLA_TRY(smla_cpu_check_cache_write(&p->insert, error));
    const int64_t num_heads = p->num_tokens * p->out_heads;
    const float q_scale_inv = smla_read_scale(&p->q_scale_inv);
#pragma omp parallel for schedule(static) if (num_heads >= PARALLEL_HEADS)
    for (int64_t i = 0; i < num_heads; i++) {
        write_head(isa->norm, p, i / p->out_heads, i % p->out_heads, q_scale_inv);
    }
    const slot_shares shares = smla_cpu_divide_tokens(&p->insert);
#pragma omp parallel for schedule(static) if (shares.count > 1)
    for (int share = 0; share < shares.count; share++) {
        insert_share(isa, p, share, shares);
    }
    return SMLA_OK;
}
