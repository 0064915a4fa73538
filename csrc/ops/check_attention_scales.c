/* check_attention_scales.c: the rule of scales that are in range one by one, but not in their
 * product.
 */
#include <float.h>
#include <math.h>

#include "ops/check_attention.h"

smla_status
smla_require_logit_scale(const smla_checker *c, const smla_attention_inputs *in,
                         const smla_list_args *lists, const smla_attention_params *params)
{
    const bool is_on_cpu = c->device.device_type == kDLCPU;
    const bool has_scale = is_on_cpu || params->logits.q_scale.pointer == NULL;
    const float q_scale = has_scale ? smla_read_scale(&params->logits.q_scale) : 1.0f;
    const float softmax_scale = (float)params->logits.softmax_scale;
    const float scale = softmax_scale * q_scale;
    const bool has_factors = q_scale != 1.0f && softmax_scale != 0;
    if (has_factors && !(fabsf(scale) >= FLT_MIN && fabsf(scale) <= SMLA_LOGIT_FACTOR_MAX)) {
        return smla_refuse(c,
                           "`%s` must make 0 or %g to %g of softmax_scale * q_scale, got %g * %g",
                           in->q_scale.name, (double)FLT_MIN, (double)SMLA_LOGIT_FACTOR_MAX,
                           (double)softmax_scale, (double)q_scale);
    }
    for (int i = 0; i < params->keys.num_lists; i++) {
        const smla_given_scale *const given = &params->logits.kv_scale[i];
        const bool is_known = is_on_cpu || given->pointer == NULL;
        if (is_known && !(fabsf(scale * smla_read_scale(given)) <= SMLA_LOGIT_FACTOR_MAX)) {
            return smla_refuse(c, "`%s` must make at most %g of all scales of logits, got %g * %g",
                               lists[i].kv_scale.name, (double)SMLA_LOGIT_FACTOR_MAX, (double)scale,
                               (double)smla_read_scale(given));
        }
    }
    return SMLA_OK;
}
