/* check_norm.c: the argument rules of norms. check_parts.c has the shared ones, and
 * check_rope.c that of positions.
 */
#include <float.h>
#include <math.h>

#include "core/params_norm.h"
#include "ops/check.h"

/* ---- Parts --------------------------------------------------------------------------------- */

smla_status
smla_require_eps(const smla_checker *c, double eps)
{
    if (!(eps >= 0.0) || !isfinite((float)eps)) {
        return smla_refuse(c, "`eps` must be finite and at least 0, got %g", eps);
    }
    if (eps > 0 && (float)eps < FLT_MIN) { /* it would be 0, or count as 0 */
        return smla_refuse(c, "`eps` must be 0 or a normal float32 (at least %g), got %g",
                           (double)FLT_MIN, eps);
    }
    return SMLA_OK;
}

/* ---- fused_q_kv_rmsnorm -------------------------------------------------------------------- */

static smla_status
require_weight(smla_checker *c, const char *name, const DLTensor *weight, int64_t size)
{
    return smla_require_1d(c, name, weight, SMLA_DTYPE_BF16 | SMLA_DTYPE_FP32, size, 0,
                           "a weight per value of a row");
}

static smla_norm_rows
make_rows(const DLTensor *x, const DLTensor *weight, const DLTensor *out)
{
    return (smla_norm_rows){
        .size = smla_size(x, 1),
        SMLA_SET_ROWS(x, x),
        .weight = smla_data(weight),
        .weight_type = smla_float_type_of(weight),
        SMLA_SET_ROWS(out, out),
    };
}

smla_status
smla_check_fused_q_kv_rmsnorm(const smla_fused_q_kv_rmsnorm_args *args,
                              smla_q_kv_norm_params *params, const smla_backend **backend,
                              smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "fused_q_kv_rmsnorm", error);
    smla_rule rows = {.name = "q",
                      .tensor = args->q,
                      .dtypes = SMLA_DTYPE_BF16,
                      .ndim = 2,
                      .shape = {SMLA_ANY, SMLA_ANY}};
    SMLA_TRY(smla_require(&c, &rows));
    const int64_t num_tokens = smla_size(args->q, 0);
    const int64_t q_size = smla_size(args->q, 1);
    rows.name = "kv";
    rows.tensor = args->kv;
    rows.shape[0] = num_tokens;
    rows.shape[1] = SMLA_V4_HEAD_DIM;
    rows.hint = "a row per token of `q`";
    SMLA_TRY(smla_require(&c, &rows));
    SMLA_TRY(require_weight(&c, "q_weight", args->q_weight, q_size));
    SMLA_TRY(require_weight(&c, "kv_weight", args->kv_weight, SMLA_V4_HEAD_DIM));
    rows.name = "q_out";
    rows.tensor = args->q_out;
    rows.shape[1] = q_size;
    rows.flags = SMLA_RULE_OUTPUT;
    rows.may_be[0] = args->q;
    SMLA_TRY(smla_require(&c, &rows));
    rows.name = "kv_out";
    rows.tensor = args->kv_out;
    rows.shape[1] = SMLA_V4_HEAD_DIM;
    rows.may_be[0] = args->kv;
    SMLA_TRY(smla_require(&c, &rows));
    SMLA_TRY(smla_require_eps(&c, args->eps));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_q_kv_norm_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = num_tokens,
        .rows = {make_rows(args->q, args->q_weight, args->q_out),
                 make_rows(args->kv, args->kv_weight, args->kv_out)},
        .eps = (float)args->eps,
    };
    return SMLA_OK;
}
