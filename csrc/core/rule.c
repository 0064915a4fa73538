/* rule.c: enforces the rules of rule.h, and words the errors. kv_rule.c has the rules of caches.
 *
 * Texts read "op: `argument` must RULE, got ACTUAL". Nothing here depends on Python or on a device.
 */
#include "core/rule_parts.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/log.h"
#include "core/overlap.h"

void
smla_append(smla_text *to, const char *format, ...)
{
    const size_t used = strlen(to->text);
    va_list values;
    va_start(values, format);
    vsnprintf(to->text + used, SMLA_TEXT_BYTES - used, format, values);
    va_end(values);
}

/* ---- Wording ------------------------------------------------------------------------------- */

smla_text
smla_describe_dtype(const DLTensor *tensor)
{
    static const char *const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex"};
    /* DLPack's narrow types, from code kDLFloat8_e3m4 on. Each code has its own number of bits. */
    static const struct {
        const char *name;
        uint8_t bits;
    } narrow[] = {{"float8_e3m4", 8},     {"float8_e4m3", 8},     {"float8_e4m3b11fnuz", 8},
                  {"float8_e4m3fn", 8},   {"float8_e4m3fnuz", 8}, {"float8_e5m2", 8},
                  {"float8_e5m2fnuz", 8}, {"float8_e8m0fnu", 8},  {"float6_e2m3fn", 6},
                  {"float6_e3m2fn", 6},   {"float4_e2m1fn", 4}};
    const size_t narrow_idx = (size_t)tensor->dtype.code - kDLFloat8_e3m4;
    const unsigned dtype = smla_dtype(tensor);
    smla_text got = {""};
    for (int i = 0; i < SMLA_NUM_DTYPES; i++) {
        if (smla_dtypes[i].dtype == dtype) {
            smla_append(&got, "%s", smla_dtypes[i].name);
            return got;
        }
    }
    if (tensor->dtype.code == kDLBool) {
        smla_append(&got, "bool");
    } else if (tensor->dtype.code < sizeof kinds / sizeof kinds[0]) {
        smla_append(&got, "%s%d", kinds[tensor->dtype.code], tensor->dtype.bits);
    } else if (narrow_idx < sizeof narrow / sizeof narrow[0] &&
               narrow[narrow_idx].bits == tensor->dtype.bits) {
        smla_append(&got, "%s", narrow[narrow_idx].name);
    } else {
        smla_append(&got, "DLPack type code %d of %d bits", tensor->dtype.code, tensor->dtype.bits);
    }
    if (tensor->dtype.lanes != 1) {
        smla_append(&got, "x%d", tensor->dtype.lanes);
    }
    return got;
}

smla_text
smla_describe_dtypes(unsigned dtypes)
{
    smla_text wanted = {""};
    for (int i = 0; i < SMLA_NUM_DTYPES; i++) {
        if (dtypes & smla_dtypes[i].dtype) {
            dtypes &= ~smla_dtypes[i].dtype;
            smla_append(&wanted, "%s%s",
                        wanted.text[0] == '\0' ? "" : (dtypes == 0 ? " or " : ", "),
                        smla_dtypes[i].name);
        }
    }
    return wanted;
}

smla_text
smla_describe_shape(const DLTensor *tensor)
{
    smla_text got = {"["};
    for (int i = 0; i < tensor->ndim; i++) {
        smla_append(&got, "%s%lld", i == 0 ? "" : ", ", (long long)tensor->shape[i]);
    }
    smla_append(&got, "]");
    return got;
}

/* Whether the rule's size of dimension i is the least that is allowed. */
static bool
is_minimum(const smla_rule *rule, int i)
{
    return (i == 0 && (rule->flags & SMLA_RULE_MORE_ROWS)) ||
           (i == 1 && (rule->flags & SMLA_RULE_MORE_HEADS));
}

static smla_text
describe_rule_shape(const smla_rule *rule)
{
    smla_text wanted = {"["};
    for (int i = 0; i < rule->ndim; i++) {
        smla_append(&wanted, "%s", i == 0 ? "" : ", ");
        if (rule->shape[i] == SMLA_ANY) {
            smla_append(&wanted, "any");
        } else {
            const bool minimum = is_minimum(rule, i);
            smla_append(&wanted, "%s%lld", minimum ? ">= " : "", (long long)rule->shape[i]);
        }
    }
    smla_append(&wanted, "]");
    return wanted;
}

static smla_text
describe_device(DLDevice device)
{
    smla_text name = {""};
    switch (device.device_type) {
    case kDLCPU: smla_append(&name, "cpu"); break;
    case kDLCUDA: smla_append(&name, "cuda:%d", device.device_id); break;
    default:
        smla_append(&name, "DLPack device type %d:%d", (int)device.device_type, device.device_id);
    }
    return name;
}

DLDevice
smla_normal_device(DLDevice device)
{
    if (device.device_type == kDLCUDAHost || device.device_type == kDLCUDAManaged ||
        device.device_type == kDLCPU) {
        return (DLDevice){.device_type = kDLCPU, .device_id = 0};
    }
    return device;
}

const DLTensor *
smla_see_from(DLDevice home, DLDeviceType other, const DLTensor *tensor, DLTensor *seen)
{
    if (tensor == NULL || home.device_type != kDLCUDA ||
        smla_normal_device(tensor->device).device_type != other) {
        return tensor;
    }
    *seen = *tensor;
    seen->device = home;
    return seen;
}

smla_status
smla_refuse(const smla_checker *c, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    const smla_status status = smla_fail_with(c->error, c->op, format, values);
    va_end(values);
    return status;
}

/* ---- What is no array ---------------------------------------------------------------------- */

smla_status
smla_require_pointer(const char *op, const char *name, const void *pointer, smla_error *error)
{
    if (pointer == NULL) {
        return smla_fail_value(error, op, "`%s` must be given, got none", name);
    }
    return SMLA_OK;
}

smla_status
smla_require_logit_factor(const char *op, const char *name, double value, smla_error *error)
{
    if (!isfinite((float)value)) {
        return smla_fail_value(error, op, "`%s` must be finite, got %g", name, value);
    }
    if (fabsf((float)value) > SMLA_LOGIT_FACTOR_MAX) {
        return smla_fail_value(error, op, "`%s` must be at most %g in size, got %g", name,
                               (double)SMLA_LOGIT_FACTOR_MAX, value);
    }
    return SMLA_OK;
}

smla_status
smla_require_positive(const char *op, const char *name, double value, smla_error *error)
{
    const float number = (float)value;
    if (number >= FLT_MIN && number <= FLT_MAX) {
        return SMLA_OK;
    }
    return smla_fail_value(error, op, "`%s` must be a positive normal float32, got %g", name,
                           value);
}

smla_status
smla_require_least(const char *op, const char *name, int64_t value, int64_t least,
                   smla_error *error)
{
    return value >= least ? SMLA_OK
                          : smla_fail_value(error, op, "`%s` must be at least %lld, got %lld", name,
                                            (long long)least, (long long)value);
}

smla_status
smla_require_count(const char *op, const char *name, int64_t value, int64_t least, int64_t most,
                   smla_error *error)
{
    if (value < least || value > most) {
        return smla_fail_value(error, op, "`%s` must be %lld to %lld, got %lld", name,
                               (long long)least, (long long)most, (long long)value);
    }
    return SMLA_OK;
}

/* ---- Rules --------------------------------------------------------------------------------- */

/* A hint at the usual cause of a wrong dtype. */
static const char *
dtype_hint(const smla_rule *rule)
{
    const DLDataType got = rule->tensor->dtype;
    const bool is_integer = got.code == kDLInt || got.code == kDLUInt;
    if (rule->dtypes == SMLA_DTYPE_BF16) {
        return is_integer && got.bits == 16 ? ": view the bits as bfloat16"
                                            : ": nothing is cast here";
    }
    return rule->dtypes == SMLA_DTYPE_INT32 ? ": nothing is cast here, make it int32" : "";
}

static smla_status
fail_dtype(const smla_checker *c, const smla_rule *rule)
{
    return smla_fail(c->error, SMLA_ERROR_TYPE, "%s: `%s` must be %s, got %s%s", c->op, rule->name,
                     smla_describe_dtypes(rule->dtypes).text,
                     smla_describe_dtype(rule->tensor).text, dtype_hint(rule));
}

/* smla_require_sane for all arrays but the usual ones. */
static smla_status
require_sane(const smla_checker *c, const char *name, const DLTensor *tensor,
             smla_byte_range *range)
{
    *range = (smla_byte_range){.is_compact = false};
    if (tensor == NULL) {
        return smla_require_pointer(c->op, name, tensor, c->error);
    }
    if (tensor->ndim < 0 || tensor->ndim > SMLA_MAX_RANK) {
        return smla_refuse(c, "`%s` must have at most %d dimensions, got %d", name, SMLA_MAX_RANK,
                           (int)tensor->ndim);
    }
    if (tensor->ndim > 0 && tensor->shape == NULL) {
        return smla_refuse(c, "`%s` must have a shape, got a null pointer", name);
    }
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0) {
            return smla_refuse(c, "`%s` must have sizes >= 0, got shape %s", name,
                               smla_describe_shape(tensor).text);
        }
    }
    if (tensor->data == NULL && !smla_is_empty(tensor)) {
        return smla_refuse(c, "`%s` must have memory, got a null pointer", name);
    }
    if (!smla_find_byte_range(tensor, range)) {
        return smla_refuse(c, "`%s` must fit in the address space with its strides, got shape %s",
                           name, smla_describe_shape(tensor).text);
    }
    return SMLA_OK;
}

/* Whether an array is compact and in memory, as most are; then `range` is filled. */
static inline bool
is_usual(const DLTensor *tensor, smla_byte_range *range)
{
    if (tensor == NULL || tensor->ndim < 1 || tensor->ndim > SMLA_MAX_RANK ||
        tensor->shape == NULL || tensor->data == NULL) {
        return false;
    }
    const int64_t bytes = smla_compact_bytes(tensor);
    return bytes != 0 && smla_place_bytes(tensor, 0, bytes, true, range);
}

smla_status
smla_require_sane(const smla_checker *c, const char *name, const DLTensor *tensor,
                  smla_byte_range *range)
{
    return is_usual(tensor, range) ? SMLA_OK : require_sane(c, name, tensor, range);
}

static inline bool
has_shape(const smla_rule *rule)
{
    const DLTensor *tensor = rule->tensor;
    if (rule->ndim == SMLA_ANY) {
        return true;
    }
    assert(rule->ndim <= (int)(sizeof rule->shape / sizeof rule->shape[0]));
    bool good = tensor->ndim == rule->ndim;
    for (int i = 0; good && i < rule->ndim; i++) {
        const int64_t wanted = rule->shape[i];
        good = wanted == SMLA_ANY || tensor->shape[i] == wanted ||
               (tensor->shape[i] > wanted && is_minimum(rule, i));
    }
    return good;
}

static smla_status
fail_shape(const smla_checker *c, const smla_rule *rule)
{
    const DLTensor *tensor = rule->tensor;
    const bool has_hint = rule->hint != NULL;
    return smla_refuse(c, "`%s` must have shape %s, got %s%s%s", rule->name,
                       describe_rule_shape(rule).text, smla_describe_shape(tensor).text,
                       has_hint ? ": " : "", has_hint ? rule->hint : "");
}

smla_status
smla_require_layout(const smla_checker *c, const char *name, const DLTensor *tensor,
                    const smla_byte_range *range, int64_t alignment, unsigned flags)
{
    const int last = tensor->ndim - 1;
    if (range->low == NULL) { /* an empty array has any stride and any address */
        return SMLA_OK;
    }
    if (!range->is_compact && !(flags & SMLA_RULE_ANY_LAST_STRIDE) && last >= 0 &&
        tensor->shape[last] > 1 && smla_stride(tensor, last) != 1) {
        return smla_refuse(c,
                           "`%s` must have a contiguous last dimension (stride 1), got stride %lld",
                           name, (long long)smla_stride(tensor, last));
    }
    const uintptr_t offset = (uintptr_t)smla_data(tensor) & ((uintptr_t)alignment - 1);
    if (offset != 0) {
        return smla_refuse(
            c, "`%s` must be aligned to %lld bytes, got an address that is %lld byte%s off", name,
            (long long)alignment, (long long)offset, offset == 1 ? "" : "s");
    }
    return SMLA_OK;
}

static bool
is_same_device(DLDevice a, DLDevice b)
{
    return a.device_type == b.device_type && a.device_id == b.device_id;
}

/* For the first array, and for one whose device is not literally the first array's. */
static smla_status
resolve_device(smla_checker *c, const char *name, const DLTensor *tensor)
{
    const DLDevice device = smla_normal_device(tensor->device);
    if (c->num_arrays == 0) {
        c->device = device;
        return SMLA_OK;
    }
    if (is_same_device(device, c->device)) {
        return SMLA_OK;
    }
    return smla_refuse(c, "`%s` must be on %s like `%s`, got %s", name,
                       describe_device(c->device).text, c->arrays[0].name,
                       describe_device(device).text);
}

static smla_status
check_output(const smla_checker *c, const char *name, const DLTensor *tensor)
{
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] > 1 && smla_stride(tensor, i) <= 0) {
            return smla_refuse(
                c, "`%s` must have positive strides (it is written), got %lld in dimension %d",
                name, (long long)smla_stride(tensor, i), i);
        }
    }
    const smla_overlap found = smla_find_own_overlap(tensor);
    if (found != SMLA_OVERLAP_NONE) {
        return smla_refuse(c, "`%s` must have elements that do not overlap (it is written), got %s",
                           name, smla_describe_overlap(found, "strides that reach back"));
    }
    return SMLA_OK;
}

static inline smla_status
remember(smla_checker *c, const char *name, const DLTensor *tensor, const smla_byte_range *range,
         unsigned flags, const DLTensor *const may_be[2])
{
    if (c->num_arrays == 0 || !is_same_device(tensor->device, c->device)) {
        SMLA_TRY(resolve_device(c, name, tensor));
    }
    if (!range->is_compact && range->low != NULL && (flags & SMLA_RULE_OUTPUT)) {
        SMLA_TRY(check_output(c, name, tensor));
    }
    if (c->num_arrays == SMLA_MAX_ARRAYS) { /* only if an operator's check is wrong */
        return smla_fail(c->error, SMLA_ERROR_RUNTIME, "%s: a call has at most %d arrays, got `%s`",
                         c->op, SMLA_MAX_ARRAYS, name);
    }
    c->arrays[c->num_arrays].name = name;
    c->arrays[c->num_arrays].tensor = tensor;
    c->arrays[c->num_arrays].range = *range;
    c->arrays[c->num_arrays].is_output = (flags & SMLA_RULE_OUTPUT) != 0;
    c->arrays[c->num_arrays].may_be[0] = may_be[0];
    c->arrays[c->num_arrays].may_be[1] = may_be[1];
    c->num_arrays++;
    return SMLA_OK;
}

smla_status
smla_remember(smla_checker *c, const char *name, const DLTensor *tensor, smla_byte_range range,
              unsigned flags)
{
    const DLTensor *const none[2] = {NULL, NULL};
    return remember(c, name, tensor, &range, flags, none);
}

smla_status
smla_require(smla_checker *c, const smla_rule *rule)
{
    if (rule->tensor == NULL) {
        return rule->flags & SMLA_RULE_OPTIONAL
                   ? SMLA_OK
                   : smla_require_pointer(c->op, rule->name, NULL, c->error);
    }
    smla_byte_range range;
    SMLA_TRY(smla_require_sane(c, rule->name, rule->tensor, &range));
    if ((smla_dtype(rule->tensor) & rule->dtypes) == 0) {
        return fail_dtype(c, rule);
    }
    if (!has_shape(rule)) {
        return fail_shape(c, rule);
    }
    SMLA_TRY(smla_require_layout(c, rule->name, rule->tensor, &range,
                                 smla_element_bytes(rule->tensor), rule->flags));
    return remember(c, rule->name, rule->tensor, &range, rule->flags, rule->may_be);
}

/* ---- Disjoint ------------------------------------------------------------------------------ */

/* Whether every element of one array is the same element of the other. */
static bool
is_same_array(const DLTensor *a, const DLTensor *b)
{
    bool same = smla_data(a) == smla_data(b) && a->ndim == b->ndim &&
                smla_element_bytes(a) == smla_element_bytes(b);
    for (int i = 0; same && i < a->ndim; i++) {
        same = a->shape[i] == b->shape[i] && smla_stride(a, i) == smla_stride(b, i);
    }
    return same;
}

/* Whether array j is an input that output i may be. A caller may give one DLTensor for two inputs:
 * the second one is another argument, which the call reads after it has written over the first. */
static bool
is_partner(const smla_checker *c, int i, int j)
{
    bool is_it = c->arrays[i].may_be[0] == c->arrays[j].tensor ||
                 c->arrays[i].may_be[1] == c->arrays[j].tensor;
    for (int k = 0; is_it && k < j; k++) {
        is_it = c->arrays[k].tensor != c->arrays[j].tensor;
    }
    return is_it;
}

/* Adds to the call's line its device, and " q bfloat16[3, 16, 576]," for each array. A forward also
 * checks the arrays of calls that it is going to make; these are in the lines of those calls. */
static void
log_arrays(const smla_checker *c)
{
    smla_log_device(c->device);
    for (int i = 0; i < c->num_arrays; i++) {
        const DLTensor *const tensor = c->arrays[i].tensor;
        smla_log_text(" %s %s%s,", c->arrays[i].name, smla_describe_dtype(tensor).text,
                      smla_describe_shape(tensor).text);
    }
}

smla_status
smla_require_disjoint(const smla_checker *c)
{
    if (smla_is_logging && smla_is_logged(c->op)) {
        log_arrays(c);
    }
    for (int i = 0; i < c->num_arrays; i++) {
        if (!c->arrays[i].is_output) {
            continue;
        }
        for (int j = 0; j < c->num_arrays; j++) {
            const bool checked_before = c->arrays[j].is_output && j <= i;
            if (checked_before || smla_is_apart(c->arrays[i].range, c->arrays[j].range)) {
                continue;
            }
            const bool may_be = is_partner(c, i, j);
            if (may_be && is_same_array(c->arrays[i].tensor, c->arrays[j].tensor)) {
                continue;
            }
            const smla_overlap found = smla_find_overlap(c->arrays[i].tensor, c->arrays[j].tensor);
            if (found != SMLA_OVERLAP_NONE) {
                return smla_refuse(c, "`%s` must %snot overlap `%s`, got %s", c->arrays[i].name,
                                   may_be ? "be the whole of or " : "", c->arrays[j].name,
                                   smla_describe_overlap(found, "arrays that share memory"));
            }
        }
    }
    return SMLA_OK;
}
