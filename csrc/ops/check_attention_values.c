/* check_attention_values.c: the values that every attention is made of (core/attention/), from the
 * arguments that have the same name in all of them. Arrays are checked before they are viewed.
 */
#include "ops/check_attention.h"

/* ---- Queries ------------------------------------------------------------------------------- */

smla_head_rows
smla_view_part(const DLTensor *tensor, int64_t first)
{
    return (smla_head_rows){
        .data = smla_data_at(tensor, first * smla_element_bytes(tensor)),
        .stride_token = smla_stride(tensor, 0),
        .stride_head = tensor->ndim == 3 ? smla_stride(tensor, 1) : 0,
    };
}

void
smla_view_parts(const DLTensor *first, const DLTensor *second, const int16_t dims[2],
                smla_head_rows parts[2])
{
    const smla_head_rows none = {.data = NULL};
    parts[0] = smla_view_part(first, 0);
    parts[1] = dims[1] == 0     ? none
               : second != NULL ? smla_view_part(second, 0)
                                : smla_view_part(first, dims[0]);
}

void
smla_fill_queries(const smla_attention_inputs *in, int64_t first_dim, int64_t second_dim,
                  smla_queries *queries)
{
    *queries = (smla_queries){
        .num_tokens = smla_size(in->q.tensor, 0),
        .num_heads = smla_size(in->q.tensor, 1),
        .type = smla_float_type_of(in->q.tensor),
        .dims = {(int16_t)first_dim, (int16_t)second_dim},
    };
    smla_view_parts(in->q.tensor, in->q_pe, queries->dims, queries->parts);
}

unsigned
smla_same_dtypes(const DLTensor *first)
{
    const unsigned dtype = smla_dtype(first);
    return dtype & SMLA_DTYPE_E4M3_OR_BYTES ? SMLA_DTYPE_E4M3_OR_BYTES : dtype;
}

smla_status
smla_require_head_dim(const smla_checker *c, const char *name, int64_t dim, int64_t most)
{
    enum { DIM_MULTIPLE = 8 };
    return dim >= DIM_MULTIPLE && dim <= most && dim % DIM_MULTIPLE == 0
               ? SMLA_OK
               : smla_refuse(
                     c, "`%s` must have a multiple of %d values per head, at most %lld, got %lld",
                     name, DIM_MULTIPLE, (long long)most, (long long)dim);
}

smla_status
smla_require_query_rows(smla_checker *c, smla_rule *rule, const DLTensor *q_pe, int64_t pe_dim,
                        const char *pe_hint)
{
    const DLTensor *const q = rule->tensor;
    const bool has_any_dim = rule->shape[2] == SMLA_ANY;
    rule->name = q_pe == NULL ? rule->name : "q[0]";
    rule->ndim = 3;
    SMLA_TRY(smla_require(c, rule));
    SMLA_TRY(smla_require_num_heads(c, rule->name, smla_size(q, 1)));
    if (has_any_dim) {
        SMLA_TRY(smla_require_head_dim(c, rule->name, smla_size(q, 2), SMLA_HEAD_DIM));
    }
    if (q_pe == NULL) {
        return SMLA_OK;
    }
    rule->name = "q[1]";
    rule->tensor = q_pe;
    rule->dtypes = smla_same_dtypes(q);
    rule->shape[0] = rule->shape[0] != SMLA_ANY ? rule->shape[0] : smla_size(q, 0);
    rule->shape[1] = smla_size(q, 1);
    rule->shape[2] = pe_dim;
    rule->hint = pe_hint;
    SMLA_TRY(smla_require(c, rule));
    return has_any_dim ? smla_require_head_dim(c, rule->name, smla_size(q_pe, 2),
                                               SMLA_HEAD_DIM - smla_size(q, 2))
                       : SMLA_OK;
}

smla_status
smla_require_query(smla_checker *c, const char *name, const smla_kv_format_info *format,
                   const DLTensor *q, const DLTensor *q_pe, int64_t num_tokens, int64_t num_heads,
                   unsigned flags)
{
    const bool is_pair = q_pe != NULL;
    const int32_t rope_dim = format->head_dim - SMLA_KV_LORA_RANK;
    if (is_pair && rope_dim == 0) {
        return smla_refuse(
            c, "`q` must be one array [tokens, heads, %d] for keys of %d values, got a pair",
            format->head_dim, format->head_dim);
    }
    static const char pair_hint[] = "a pair has 512 latent values, then 64 of RoPE";
    smla_rule rule = {
        .name = name,
        .tensor = q,
        .dtypes = SMLA_DTYPE_BF16 |
                  (rope_dim == 0 || smla_has_rope_codes(format) ? SMLA_DTYPE_E4M3_OR_BYTES : 0),
        .flags = flags,
        .shape = {num_tokens, num_heads, is_pair ? SMLA_KV_LORA_RANK : format->head_dim},
        .hint = is_pair         ? pair_hint
                : rope_dim != 0 ? "tokens, heads, 512 latent and 64 RoPE values"
                                : "tokens, heads, and as many values as a cache row",
    };
    return smla_require_query_rows(c, &rule, q_pe, rope_dim, pair_hint);
}

/* ---- Logits -------------------------------------------------------------------------------- */

smla_status
smla_require_sinks(smla_checker *c, const smla_named_array *given, const char *hint,
                   int64_t num_heads, smla_sinks *sinks)
{
    SMLA_TRY(smla_require_1d(c, given->name, given->tensor, SMLA_DTYPE_FP32, num_heads,
                             SMLA_RULE_OPTIONAL | SMLA_RULE_ANY_LAST_STRIDE |
                                 (hint == NULL ? 0 : SMLA_RULE_MORE_ROWS),
                             hint));
    *sinks = smla_sinks_of(given->tensor);
    return SMLA_OK;
}

/* ---- Results ------------------------------------------------------------------------------- */

smla_rule
smla_latent_out(const smla_attention_params *params)
{
    return (smla_rule){.dtypes = SMLA_DTYPE_BF16,
                       .flags = SMLA_RULE_MORE_HEADS,
                       .shape[2] = params->keys.lists[0].kv.format->value_dim};
}

smla_workspace
smla_workspace_of(const smla_named_array *given)
{
    return (smla_workspace){.memory = smla_data(given->tensor),
                            .bytes = given->tensor == NULL ? 0 : smla_size(given->tensor, 0),
                            .name = given->name};
}

static smla_status
require_bytes(smla_checker *c, const smla_named_array *workspace, int64_t bytes_needed)
{
    return workspace->tensor == NULL && bytes_needed != 0
               ? smla_refuse(c, "`%s` must have at least %lld bytes, got none", workspace->name,
                             (long long)bytes_needed)
               : SMLA_OK;
}

smla_status
smla_finish_attention(smla_checker *c, const smla_attention_inputs *in, smla_rule *out,
                      smla_attention_params *params, const smla_backend **backend)
{
    const int64_t num_tokens = params->queries.num_tokens, num_heads = params->queries.num_heads;
    const bool has_cache = smla_has_lists(params);
    SMLA_TRY(smla_require_logit_factor(c->op, in->softmax_scale.name, in->softmax_scale.value,
                                       c->error));
    params->logits.softmax_scale = in->softmax_scale.value;
    SMLA_TRY(smla_require_num_splits(c->op, in->num_splits, c->error));
    out->name = "out";
    out->tensor = in->out;
    out->flags |= SMLA_RULE_OUTPUT;
    out->ndim = 3;
    out->shape[0] = num_tokens;
    out->shape[1] = num_heads;
    SMLA_TRY(smla_require(c, out));
    SMLA_TRY(smla_require_state(c, "lse", in->lse, num_tokens, num_heads,
                                SMLA_RULE_OUTPUT | (in->has_no_lse ? SMLA_RULE_OPTIONAL : 0)));
    if (in->max_logits != NULL) {
        SMLA_TRY(smla_require_state(c, "max_logits", in->max_logits, num_tokens, num_heads,
                                    SMLA_RULE_OUTPUT));
    }
    SMLA_TRY(smla_find_backend(c->op, c->device, backend, c->error));
    SMLA_TRY(
        smla_require_workspace(c, in->workspace.name, in->workspace.tensor, SMLA_RULE_OPTIONAL));
    params->workspace = smla_workspace_of(&in->workspace); /* the plan depends on its bytes */
    smla_plan_attention(in,
                        smla_call_of(c, in->stream,
                                     has_cache ? params->keys.lists[0].kv.format : NULL),
                        *backend, params);
    SMLA_TRY(require_bytes(c, &in->workspace, params->plan.workspace_bytes));
    return smla_require_disjoint(c);
}
