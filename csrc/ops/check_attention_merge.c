/* check_attention_merge.c: the checks of merges of partial attention results. */
#include <stdio.h>

#include "core/overlap.h"
#include "core/params_merge.h"
#include "core/rule_parts.h"
#include "ops/check_attention.h"

/* ---- What merges share --------------------------------------------------------------------- */

/* The sizes of a merge's rows. */
typedef struct merge_sizes {
    int64_t num_tokens;
    int64_t num_heads;
    int64_t value_dim;
} merge_sizes;

static merge_sizes
sizes_of(const DLTensor *out)
{
    return (merge_sizes){smla_size(out, 0), smla_size(out, 1), smla_size(out, 2)};
}

static smla_rule
rule_of_out(const char *name, const DLTensor *tensor, unsigned dtypes, const merge_sizes *sizes)
{
    return (smla_rule){.name = name,
                       .tensor = tensor,
                       .dtypes = dtypes,
                       .ndim = 3,
                       .shape = {sizes->num_tokens, sizes->num_heads, sizes->value_dim}};
}

static smla_merge_rows
rows_of(const merge_sizes *sizes, smla_float_type type, const smla_sinks *sinks,
        const DLTensor *out, const DLTensor *lse)
{
    return (smla_merge_rows){
        .num_tokens = sizes->num_tokens,
        .num_heads = sizes->num_heads,
        .value_dim = sizes->value_dim,
        .type = type,
        .out_type = smla_float_type_of(out),
        .sinks = *sinks,
        SMLA_SET_HEADS(out, out),
        SMLA_SET_HEADS(lse, lse),
    };
}

static smla_merge_part
part_of(const DLTensor *out, const DLTensor *lse)
{
    return (smla_merge_part){
        SMLA_SET_HEADS(out, out),
        SMLA_SET_HEADS(lse, lse),
    };
}

/* ---- Two parts ----------------------------------------------------------------------------- */

static smla_status
require_tokens_with_context(const smla_checker *c, int64_t num_tokens, int64_t alone)
{
    if (alone >= 0 && alone <= num_tokens) {
        return SMLA_OK;
    }
    const uint64_t got = (uint64_t)num_tokens - (uint64_t)alone; /* int64 has no 2^63 */
    const bool is_negative = alone > num_tokens;
    return smla_refuse(
        c, "`prefill_tokens_with_context` must be 0 to the %lld tokens of `out_a`, got %s%llu",
        (long long)num_tokens, is_negative ? "-" : "",
        (unsigned long long)(is_negative ? 0 - got : got));
}

smla_status
smla_check_merge_attn_states(const smla_merge_attn_states_args *args, smla_merge_params *params,
                             const smla_backend **backend, smla_error *error)
{
    const merge_sizes any = {SMLA_ANY, SMLA_ANY, SMLA_ANY};
    smla_checker c;
    smla_open_checker(&c, "merge_attn_states", error);
    smla_rule out = rule_of_out("out_a", args->out_a, SMLA_DTYPE_FLOATS, &any);
    SMLA_TRY(smla_require(&c, &out));
    const merge_sizes sizes = sizes_of(args->out_a);
    SMLA_TRY(smla_require_state(&c, "lse_a", args->lse_a, sizes.num_tokens, sizes.num_heads, 0));
    out = rule_of_out("out_b", args->out_b, smla_dtype(args->out_a), &sizes);
    SMLA_TRY(smla_require(&c, &out));
    SMLA_TRY(smla_require_state(&c, "lse_b", args->lse_b, sizes.num_tokens, sizes.num_heads, 0));
    const smla_named_array given = SMLA_SINKS_OF(args);
    smla_sinks sinks;
    SMLA_TRY(smla_require_sinks(&c, &given, "at least a sink per head of `out_a`", sizes.num_heads,
                                &sinks));
    out = rule_of_out("out", args->out, smla_dtype(args->out_a), &sizes);
    out.flags = SMLA_RULE_OUTPUT;
    out.may_be[0] = args->out_a;
    out.may_be[1] = args->out_b;
    SMLA_TRY(smla_require(&c, &out));
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "lse",
                                           .tensor = args->lse,
                                           .dtypes = SMLA_DTYPE_FP32,
                                           .flags = SMLA_RULE_OUTPUT | SMLA_RULE_ANY_LAST_STRIDE,
                                           .ndim = 2,
                                           .shape = {sizes.num_tokens, sizes.num_heads},
                                           .may_be = {args->lse_a, args->lse_b}}));
    const int64_t alone = args->tokens_without_context;
    SMLA_TRY(require_tokens_with_context(&c, sizes.num_tokens, alone));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_merge_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .rows = rows_of(&sizes, smla_float_type_of(args->out_a), &sinks, args->out, args->lse),
        .merged_tokens = sizes.num_tokens - alone,
        .parts = {part_of(args->out_a, args->lse_a), part_of(args->out_b, args->lse_b)},
    };
    return SMLA_OK;
}

/* ---- Many parts ---------------------------------------------------------------------------- */

/* Part i: an array of the list, or a slice of the stacked array. */
static DLTensor
take_part(const smla_parts_arg *given, int64_t i)
{
    if (given->stacked == NULL) {
        return *given->list[i];
    }
    DLTensor part = *given->stacked;
    const int64_t stride = smla_stride(given->stacked, 0);
    part.data = smla_data_at(given->stacked, i * stride * smla_element_bytes(given->stacked));
    part.byte_offset = 0;
    part.ndim--;
    part.shape++;
    part.strides = part.strides == NULL ? NULL : part.strides + 1;
    return part;
}

/* Checks parts that are one array. */
static smla_status
require_stacked(smla_checker *c, const DLTensor *outs)
{
    SMLA_TRY(smla_require_any(c, "outs", outs, SMLA_DTYPE_FLOATS, 0));
    return outs->ndim == 4
               ? SMLA_OK
               : smla_refuse(
                     c,
                     "`outs` must have shape [any, any, any, any] or be a list of arrays, got %s",
                     smla_describe_shape(outs).text);
}

static smla_status
require_num_parts(const smla_checker *c, const smla_parts_arg *outs, int64_t *num_parts)
{
    *num_parts = outs->stacked != NULL ? smla_size(outs->stacked, 0) : outs->count;
    if (*num_parts < 1 || *num_parts > SMLA_MAX_PARTS) {
        return smla_refuse(c, "`outs` must have 1 to %d parts, got %lld", SMLA_MAX_PARTS,
                           (long long)*num_parts);
    }
    return SMLA_OK;
}

/* The parts of a list that are on another GPU than the call, a bit for each. */
static uint64_t
find_remote(const smla_checker *c, const smla_parts_arg *given)
{
    uint64_t remote = 0;
    for (int64_t i = 0; given->stacked == NULL && i < given->count; i++) {
        const DLTensor *const part = given->list[i];
        const bool is_remote = part->device.device_type == kDLCUDA &&
                               part->device.device_id != c->device.device_id &&
                               !smla_is_empty(part);
        remote |= (uint64_t)is_remote << i;
    }
    return remote;
}

/* Checks arrays number `start` and on of a list by `rule`. A checker has no room for all of them,
 * so it forgets them. */
static smla_status
require_list(smla_checker *c, const smla_parts_arg *given, int64_t start, smla_rule rule)
{
    const char *const argument = rule.name;
    for (int64_t i = start; i < given->count; i++) {
        char name[32];
        DLTensor seen;
        snprintf(name, sizeof name, "%s[%lld]", argument, (long long)i);
        rule.name = name;
        rule.tensor = smla_see_from(c->device, kDLCUDA, given->list[i], &seen);
        SMLA_TRY(smla_require(c, &rule));
        c->num_arrays--;
    }
    return SMLA_OK;
}

/* Checks parts that are a list. The first one, which the checker remembers as `seen`, tells the
 * dtype and the shape. The call runs on the GPU of `out`, because each part may be on another. */
static smla_status
require_listed(smla_checker *c, const smla_parts_arg *outs, const DLTensor *out, DLTensor *seen)
{
    const bool has_device = out != NULL && out->device.device_type == kDLCUDA;
    const DLDevice home = has_device ? out->device : (DLDevice){.device_type = kDLCPU};
    const DLTensor *const first = smla_see_from(home, kDLCUDA, outs->list[0], seen);
    const merge_sizes any = {SMLA_ANY, SMLA_ANY, SMLA_ANY};
    smla_rule rule = rule_of_out("outs[0]", first, SMLA_DTYPE_FLOATS, &any);
    SMLA_TRY(smla_require(c, &rule));
    const merge_sizes sizes = sizes_of(first);
    rule = rule_of_out("outs", NULL, smla_dtype(first), &sizes);
    return require_list(c, outs, 1, rule);
}

static smla_status
require_outs(smla_checker *c, const smla_parts_arg *outs, const DLTensor *out, int64_t *num_parts,
             DLTensor *seen)
{
    if (outs->stacked == NULL && outs->list == NULL) {
        return smla_require_pointer(c->op, "outs", NULL, c->error);
    }
    if (outs->stacked != NULL) {
        SMLA_TRY(require_stacked(c, outs->stacked));
    }
    SMLA_TRY(require_num_parts(c, outs, num_parts));
    return outs->stacked != NULL ? SMLA_OK : require_listed(c, outs, out, seen);
}

static smla_status
require_lses(smla_checker *c, const smla_parts_arg *lses, int64_t num_parts,
             const merge_sizes *sizes)
{
    smla_rule rule = {.name = "lses",
                      .tensor = lses->stacked,
                      .dtypes = SMLA_DTYPE_FP32,
                      .flags = SMLA_RULE_ANY_LAST_STRIDE,
                      .ndim = 3,
                      .shape = {num_parts, sizes->num_tokens, sizes->num_heads}};
    if (lses->stacked != NULL || lses->list == NULL) {
        return smla_require(c, &rule);
    }
    if (lses->count != num_parts) {
        return smla_refuse(c, "`lses` must have the %lld parts of `outs`, got %lld",
                           (long long)num_parts, (long long)lses->count);
    }
    rule.ndim = 2;
    rule.shape[0] = sizes->num_tokens;
    rule.shape[1] = sizes->num_heads;
    return require_list(c, lses, 0, rule);
}

/* Checks that an output shares no memory with an array of a list, which the checker forgot. */
static smla_status
require_apart(const smla_checker *c, const char *name, const DLTensor *output, const char *argument,
              const smla_parts_arg *given)
{
    for (int64_t i = 0; given->stacked == NULL && i < given->count; i++) {
        const smla_overlap found = smla_find_overlap(output, given->list[i]);
        if (found != SMLA_OVERLAP_NONE) {
            return smla_refuse(c, "`%s` must not overlap `%s[%lld]`, got %s", name, argument,
                               (long long)i,
                               smla_describe_overlap(found, "arrays that share memory"));
        }
    }
    return SMLA_OK;
}

static smla_status
require_merged(smla_checker *c, const smla_merge_attn_partials_args *args, unsigned dtypes,
               const merge_sizes *sizes)
{
    smla_rule out = rule_of_out("out", args->out, dtypes, sizes);
    out.flags = SMLA_RULE_OUTPUT;
    SMLA_TRY(smla_require(c, &out));
    SMLA_TRY(smla_require_state(c, "lse", args->lse, sizes->num_tokens, sizes->num_heads,
                                SMLA_RULE_OUTPUT));
    SMLA_TRY(require_apart(c, "out", args->out, "outs", &args->outs));
    SMLA_TRY(require_apart(c, "out", args->out, "lses", &args->lses));
    SMLA_TRY(require_apart(c, "lse", args->lse, "outs", &args->outs));
    return require_apart(c, "lse", args->lse, "lses", &args->lses);
}

smla_status
smla_check_merge_attn_partials(const smla_merge_attn_partials_args *args,
                               smla_merge_partials_params *params, const smla_backend **backend,
                               smla_error *error)
{
    int64_t num_parts = 0;
    smla_checker c;
    DLTensor seen;
    smla_open_checker(&c, "merge_attn_partials", error);
    SMLA_TRY(require_outs(&c, &args->outs, args->out, &num_parts, &seen));
    const DLTensor first = take_part(&args->outs, 0);
    const merge_sizes sizes = sizes_of(&first);
    const unsigned dtype = smla_dtype(&first);
    SMLA_TRY(require_lses(&c, &args->lses, num_parts, &sizes));
    const smla_named_array given = SMLA_SINKS_OF(args);
    smla_sinks sinks;
    SMLA_TRY(smla_require_sinks(&c, &given, "at least a sink per head of `outs`", sizes.num_heads,
                                &sinks));
    SMLA_TRY(
        require_merged(&c, args, dtype == SMLA_DTYPE_FP32 ? SMLA_DTYPE_FLOATS : dtype, &sizes));
    SMLA_TRY(smla_finish_check(&c, backend));
    params->call = smla_call_of(&c, args->stream, NULL);
    params->rows = rows_of(&sizes, smla_float_type_of(&first), &sinks, args->out, args->lse);
    params->num_parts = num_parts;
    params->remote_outs = find_remote(&c, &args->outs);
    params->remote_lses = find_remote(&c, &args->lses);
    for (int64_t i = 0; i < num_parts; i++) {
        const DLTensor out = take_part(&args->outs, i);
        const DLTensor lse = take_part(&args->lses, i);
        params->parts[i] = part_of(&out, &lse);
    }
    return SMLA_OK;
}
