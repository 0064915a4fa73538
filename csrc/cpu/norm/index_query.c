/* index_query.c: fused_indexer_q_rope_quant. norm_kernel.h turns a head, and cache_kernel.h writes
 * it as a row of the indexer's cache.
 */
#include <string.h>

#include "cpu/cache/cache.h"
#include "cpu/machine/cpu.h"
#include "cpu/machine/isa.h"
#include "cpu/machine/threads.h"
#include "cpu/norm/norm.h"

enum { PARALLEL_HEADS = 256 }; /* fewer heads run on one thread */

static void
turn_head(const smla_cpu_isa *isa, const smla_index_query_params *p, int64_t token, int64_t head,
          uint16_t *turned)
{
    isa->turn->turn_index_head(p->q + token * p->q_stride_token + head * p->q_stride_head,
                               find_angles(&p->rope, token), turned);
}

static void
quantize_head(const smla_cpu_isa *isa, const smla_index_query_params *p, int64_t token,
              int64_t head, const uint16_t *turned)
{
    const bool is_fp4 = p->out_scale != NULL;
    const smla_kv_format_info *const format =
        &smla_kv_formats[is_fp4 ? SMLA_ROW_MXFP4_INDEX : SMLA_ROW_FP8_INDEX];
    uint8_t scale_bytes[sizeof(float)];
    uint8_t *const scales =
        is_fp4 ? p->out_scale + token * p->out_scale_stride_token + head * p->out_scale_stride_head
               : scale_bytes;
    isa->cache->write_row(
        format, SMLA_FLOAT_BF16, turned, 0, turned, format->nope_dim, 1.0f,
        (smla_kv_token){p->out + token * p->out_stride_token + head * p->out_stride_head, scales});
    float weight =
        smla_cpu_load_float(p->weights, p->weights_type, token * p->weights_stride_token + head) *
        p->weight_scale;
    if (!is_fp4) {
        float scale;
        memcpy(&scale, scale_bytes, sizeof scale);
        weight *= scale;
    }
    /* The sign of a NaN would depend on the machine. */
    p->out_weights[token * p->out_weights_stride_token + head] =
        weight == weight ? weight : smla_bits_float(0x7FC00000u);
}

/* Turns each head before the one in front of it is quantised. The two do not wait for each other,
 * so that the processor overlaps them: 41 ns per head, 57 one head after the other (Zen 3). */
static void
quantize_token(const smla_cpu_isa *isa, const smla_index_query_params *p, int64_t token)
{
    uint16_t turned[2][SMLA_INDEX_HEAD_DIM];
    for (int64_t head = 0; head <= p->num_heads; head++) {
        if (head < p->num_heads) {
            turn_head(isa, p, token, head, turned[head % 2]);
        }
        if (head > 0) {
            quantize_head(isa, p, token, head - 1, turned[(head - 1) % 2]);
        }
    }
}

smla_status
smla_cpu_fused_indexer_q_rope_quant(const smla_index_query_params *p, smla_error *error)
{
    static const char op[] = "fused_indexer_q_rope_quant";
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(op, &isa, error));
    SMLA_TRY(smla_cpu_check_positions(op, &p->rope, p->num_tokens, error));
#pragma omp parallel for schedule(static) if (p->num_tokens * p->num_heads >= PARALLEL_HEADS)
    for (int64_t token = 0; token < p->num_tokens; token++) {
        quantize_token(isa, p, token);
    }
    return SMLA_OK;
}
