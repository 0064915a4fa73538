/* rule.c: enforces the rules of rule.h, and words the errors.
 *
 * Texts read "op: `argument` must RULE, got ACTUAL". Nothing here depends on Python or on a device.
 */
#include "core/rule.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { TEXT_BYTES = 160 };

/* A part of an error's text, by value: functions that describe something return one. */
typedef struct part {
    char text[TEXT_BYTES];
} part;

/* Cuts off text that does not fit. */
__attribute__((format(printf, 2, 3))) static void
append(part *to, const char *format, ...)
{
    const size_t used = strlen(to->text);
    va_list values;
    va_start(values, format);
    vsnprintf(to->text + used, TEXT_BYTES - used, format, values);
    va_end(values);
}

/* ---- Wording ------------------------------------------------------------------------------- */

static part
describe_dtype(const DLTensor *tensor)
{
    static const char *const kinds[] = {"int",    "uint",    "float", "opaque",
                                        "bfloat", "complex", "bool"};
    const unsigned dtype = smla_dtype(tensor);
    part got = {""};
    for (int i = 0; i < SMLA_NUM_DTYPES; i++) {
        if (smla_dtypes[i].dtype == dtype) {
            append(&got, "%s", smla_dtypes[i].name);
            return got;
        }
    }
    if (tensor->dtype.code == kDLBool) {
        append(&got, "bool");
    } else if (tensor->dtype.code < sizeof kinds / sizeof kinds[0]) {
        append(&got, "%s%d", kinds[tensor->dtype.code], tensor->dtype.bits);
    } else {
        append(&got, "DLPack type code %d of %d bits", tensor->dtype.code, tensor->dtype.bits);
    }
    if (tensor->dtype.lanes != 1) {
        append(&got, "x%d", tensor->dtype.lanes);
    }
    return got;
}

static part
describe_dtypes(unsigned dtypes)
{
    part wanted = {""};
    for (int i = 0; i < SMLA_NUM_DTYPES; i++) {
        if (dtypes & smla_dtypes[i].dtype) {
            dtypes &= ~smla_dtypes[i].dtype;
            append(&wanted, "%s%s", wanted.text[0] == '\0' ? "" : (dtypes == 0 ? " or " : ", "),
                   smla_dtypes[i].name);
        }
    }
    return wanted;
}

static part
describe_shape(const DLTensor *tensor)
{
    part got = {"["};
    for (int i = 0; i < tensor->ndim; i++) {
        append(&got, "%s%lld", i == 0 ? "" : ", ", (long long)tensor->shape[i]);
    }
    append(&got, "]");
    return got;
}

static part
describe_rule_shape(const smla_rule *rule)
{
    part wanted = {"["};
    for (int i = 0; i < rule->ndim; i++) {
        append(&wanted, "%s", i == 0 ? "" : ", ");
        if (rule->shape[i] == SMLA_ANY) {
            append(&wanted, "any");
        } else {
            const bool minimum = i == 0 && (rule->flags & SMLA_RULE_MORE_ROWS);
            append(&wanted, "%s%lld", minimum ? ">= " : "", (long long)rule->shape[i]);
        }
    }
    append(&wanted, "]");
    return wanted;
}

static part
describe_device(DLDevice device)
{
    part name = {""};
    switch (device.device_type) {
    case kDLCPU: append(&name, "cpu"); break;
    case kDLCUDA: append(&name, "cuda:%d", device.device_id); break;
    default: append(&name, "DLPack device type %d:%d", (int)device.device_type, device.device_id);
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

/* ---- What is no array ---------------------------------------------------------------------- */

smla_status
smla_require_pointer(const char *op, const char *name, const void *pointer, smla_error *error)
{
    if (pointer == NULL) {
        return smla_fail(error, SMLA_ERROR_VALUE, "%s: `%s` must be given, got none", op, name);
    }
    return SMLA_OK;
}

smla_status
smla_require_count(const char *op, const char *name, int64_t value, int64_t least, int64_t most,
                   smla_error *error)
{
    if (value < least || value > most) {
        return smla_fail(error, SMLA_ERROR_VALUE, "%s: `%s` must be %lld to %lld, got %lld", op,
                         name, (long long)least, (long long)most, (long long)value);
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
        return is_integer && got.bits == 16
                   ? ": view the bits as bfloat16 (ml_dtypes.bfloat16 in NumPy)"
                   : ": nothing is cast here (bfloat16 in NumPy is ml_dtypes.bfloat16)";
    }
    return rule->dtypes == SMLA_DTYPE_INT32 ? ": nothing is cast here, make it int32" : "";
}

static smla_status
check_dtype(const smla_checker *c, const smla_rule *rule)
{
    if (smla_dtype(rule->tensor) & rule->dtypes) {
        return SMLA_OK;
    }
    return smla_fail(c->error, SMLA_ERROR_TYPE, "%s: `%s` must be %s, got %s%s", c->op, rule->name,
                     describe_dtypes(rule->dtypes).text, describe_dtype(rule->tensor).text,
                     dtype_hint(rule));
}

/* Checks what every later step relies on: a rank of at most SMLA_MAX_RANK, no negative sizes, and
 * addresses that exist. */
static smla_status
check_sane(const smla_checker *c, const char *name, const DLTensor *tensor, smla_byte_range *range)
{
    *range = (smla_byte_range){.is_compact = false};
    if (tensor->ndim < 0 || tensor->ndim > SMLA_MAX_RANK) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have at most %d dimensions, got %d", c->op, name,
                         SMLA_MAX_RANK, (int)tensor->ndim);
    }
    if (tensor->ndim > 0 && tensor->shape == NULL) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have a shape, got a null pointer", c->op, name);
    }
    const bool fits = smla_find_byte_range(tensor, range);
    if (fits && range->is_compact && tensor->data != NULL) {
        return SMLA_OK; /* most arrays return here */
    }
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0) {
            return smla_fail(c->error, SMLA_ERROR_VALUE,
                             "%s: `%s` must have sizes >= 0, got shape %s", c->op, name,
                             describe_shape(tensor).text);
        }
    }
    if (tensor->data == NULL && !smla_is_empty(tensor)) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have memory, got a null pointer", c->op, name);
    }
    if (!fits) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must fit in the address space with its strides, got shape %s",
                         c->op, name, describe_shape(tensor).text);
    }
    return SMLA_OK;
}

static smla_status
check_shape(const smla_checker *c, const smla_rule *rule)
{
    const DLTensor *tensor = rule->tensor;
    if (rule->ndim == SMLA_ANY) {
        return SMLA_OK;
    }
    bool good = tensor->ndim == rule->ndim;
    for (int i = 0; good && i < rule->ndim; i++) {
        if (rule->shape[i] == SMLA_ANY) {
            continue;
        }
        const bool minimum = i == 0 && (rule->flags & SMLA_RULE_MORE_ROWS);
        good = minimum ? tensor->shape[i] >= rule->shape[i] : tensor->shape[i] == rule->shape[i];
    }
    if (good) {
        return SMLA_OK;
    }
    const bool has_hint = rule->hint != NULL;
    return smla_fail(c->error, SMLA_ERROR_VALUE, "%s: `%s` must have shape %s, got %s%s%s", c->op,
                     rule->name, describe_rule_shape(rule).text, describe_shape(tensor).text,
                     has_hint ? ": " : "", has_hint ? rule->hint : "");
}

static smla_status
check_last_stride(const smla_checker *c, const char *name, const DLTensor *tensor)
{
    const int last = tensor->ndim - 1;
    const int64_t stride = last >= 0 ? smla_stride(tensor, last) : 1;
    if (stride != 1 && tensor->shape[last] > 1 && !smla_is_empty(tensor)) {
        return smla_fail(
            c->error, SMLA_ERROR_VALUE,
            "%s: `%s` must have a contiguous last dimension (stride 1), got stride %lld", c->op,
            name, (long long)stride);
    }
    return SMLA_OK;
}

/* `alignment` is a power of two. */
static smla_status
check_alignment(const smla_checker *c, const char *name, const DLTensor *tensor, int64_t alignment)
{
    const uintptr_t offset = (uintptr_t)smla_data(tensor) & ((uintptr_t)alignment - 1);
    if (offset != 0 && !smla_is_empty(tensor)) {
        return smla_fail(
            c->error, SMLA_ERROR_VALUE,
            "%s: `%s` must be aligned to %lld bytes, got an address that is %lld bytes off", c->op,
            name, (long long)alignment, (long long)offset);
    }
    return SMLA_OK;
}

static bool
is_same_device(DLDevice a, DLDevice b)
{
    return a.device_type == b.device_type && a.device_id == b.device_id;
}

static smla_status
check_device(smla_checker *c, const char *name, const DLTensor *tensor)
{
    if (c->num_arrays != 0 && is_same_device(tensor->device, c->device)) {
        return SMLA_OK;
    }
    const DLDevice device = smla_normal_device(tensor->device);
    if (c->num_arrays == 0) {
        c->device = device;
        return SMLA_OK;
    }
    if (is_same_device(device, c->device)) {
        return SMLA_OK;
    }
    return smla_fail(c->error, SMLA_ERROR_VALUE, "%s: `%s` must be on %s like `%s`, got %s", c->op,
                     name, describe_device(c->device).text, c->arrays[0].name,
                     describe_device(device).text);
}

static smla_status
check_output(const smla_checker *c, const char *name, const DLTensor *tensor)
{
    if (smla_is_empty(tensor)) {
        return SMLA_OK;
    }
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] > 1 && smla_stride(tensor, i) <= 0) {
            return smla_fail(c->error, SMLA_ERROR_VALUE,
                             "%s: `%s` must have positive strides (it is written), got %lld in "
                             "dimension %d",
                             c->op, name, (long long)smla_stride(tensor, i), i);
        }
    }
    if (smla_overlaps_itself(tensor)) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have elements that do not overlap (it is written), got "
                         "strides that reach back",
                         c->op, name);
    }
    return SMLA_OK;
}

/* The end of every array's check. */
static smla_status
remember(smla_checker *c, const char *name, const DLTensor *tensor, smla_byte_range range,
         unsigned flags)
{
    SMLA_TRY(check_device(c, name, tensor));
    if (!range.is_compact && (flags & SMLA_RULE_OUTPUT)) {
        SMLA_TRY(check_output(c, name, tensor));
    }
    if (c->num_arrays == SMLA_MAX_ARRAYS) { /* only if an operator's check is wrong */
        return smla_fail(c->error, SMLA_ERROR_RUNTIME, "%s: a call has at most %d arrays, got `%s`",
                         c->op, SMLA_MAX_ARRAYS, name);
    }
    c->arrays[c->num_arrays].name = name;
    c->arrays[c->num_arrays].tensor = tensor;
    c->arrays[c->num_arrays].range = range;
    c->arrays[c->num_arrays].is_output = (flags & SMLA_RULE_OUTPUT) != 0;
    c->arrays[c->num_arrays].may_be = NULL;
    c->num_arrays++;
    return SMLA_OK;
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
    SMLA_TRY(check_sane(c, rule->name, rule->tensor, &range));
    SMLA_TRY(check_dtype(c, rule));
    SMLA_TRY(check_shape(c, rule));
    if (!range.is_compact && !(rule->flags & SMLA_RULE_ANY_LAST_STRIDE)) {
        SMLA_TRY(check_last_stride(c, rule->name, rule->tensor));
    }
    SMLA_TRY(check_alignment(c, rule->name, rule->tensor, smla_element_bytes(rule->tensor)));
    SMLA_TRY(remember(c, rule->name, rule->tensor, range, rule->flags));
    c->arrays[c->num_arrays - 1].may_be = rule->may_be;
    return SMLA_OK;
}

/* ---- Caches -------------------------------------------------------------------------------- */

/* Describes the entries of smla_kv_formats, grouped by dtype: "bfloat16 (576 values a token), or
 * uint8, int8 or float8_e4m3fn (fp8_ds_mla, 656 bytes a token)". */
static part
describe_rows(void)
{
    part wanted = {""};
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        const bool is_first = i == 0 || row[-1].dtypes != row->dtypes;
        const bool is_last = i + 1 == SMLA_NUM_KV_FORMATS || row[1].dtypes != row->dtypes;
        const bool is_bytes = row->dtypes == SMLA_DTYPE_BYTES;
        if (is_first) {
            append(&wanted, "%s%s (", i == 0 ? "" : ", or ", describe_dtypes(row->dtypes).text);
        }
        append(&wanted, "%s%s%s%d", is_first ? "" : " or ", is_bytes ? row->name : "",
               is_bytes ? ", " : "", row->row_elements);
        if (is_last) {
            append(&wanted, " %s a token)", is_bytes ? "bytes" : "values");
        }
    }
    return wanted;
}

/* The table entries that fit a dtype and a last dimension; 0 stands for any last dimension. */
static smla_kv_set
find_rows(int32_t kv_format, unsigned dtype, int64_t row_elements)
{
    smla_kv_set rows = 0;
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        const bool is_one = (kv_format == SMLA_KV_INFER || (int32_t)row->format == kv_format) &
                            ((row->dtypes & dtype) != 0) &
                            (row_elements == 0 || row->row_elements == row_elements);
        rows |= (smla_kv_set)is_one << i;
    }
    return rows;
}

static smla_status
fail_dtype(const smla_checker *c, const char *name, const DLTensor *tensor, int32_t kv_format)
{
    const smla_kv_format_info *const row = smla_find_kv_format(kv_format);
    const part got = describe_dtype(tensor);
    if (kv_format == SMLA_KV_INFER) {
        return smla_fail(c->error, SMLA_ERROR_TYPE, "%s: `%s` must be %s, got %s", c->op, name,
                         describe_rows().text, got.text);
    }
    return smla_fail(c->error, SMLA_ERROR_TYPE, "%s: `%s` must be %s for format %s, got %s", c->op,
                     name, describe_dtypes(row->dtypes).text, row->name, got.text);
}

/* Reports a last dimension that fits none of the table entries `rows`, which fit the dtype. */
static smla_status
fail_size(const smla_checker *c, const char *name, const DLTensor *tensor, smla_kv_set rows)
{
    part wanted = {""};
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        if (rows & SMLA_KV_SET(i)) {
            const bool is_last = !(rows >> 1 & SMLA_KV_SET(i)) || row[1].format != row->format;
            append(&wanted, "%s%d%s%s", wanted.text[0] == '\0' ? "" : " or ", row->row_elements,
                   is_last ? " for format " : "", is_last ? row->name : "");
        }
    }
    return smla_fail(c->error, SMLA_ERROR_VALUE,
                     "%s: `%s` must have a last dimension of %s, got shape %s", c->op, name,
                     wanted.text, describe_shape(tensor).text);
}

/* Reports a dtype and a last dimension that fit several table entries. */
static smla_status
fail_ambiguous(const smla_checker *c, const char *name, const DLTensor *tensor, smla_kv_set rows)
{
    part wanted = {""};
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        if (rows & SMLA_KV_SET(i)) {
            append(&wanted, "%s\"%s\"", wanted.text[0] == '\0' ? "" : " or ",
                   smla_kv_formats[i].name);
        }
    }
    return smla_fail(c->error, SMLA_ERROR_VALUE,
                     "%s: `%s` must come with kv_format=%s, got none for shape %s", c->op, name,
                     wanted.text, describe_shape(tensor).text);
}

static const smla_kv_format_info *
first_row(smla_kv_set rows)
{
    return &smla_kv_formats[rows == 0 ? 0 : __builtin_ctz(rows)];
}

const smla_kv_format_info *
smla_format_of_cache(const DLTensor *tensor, int32_t kv_format)
{
    const bool has_size = tensor != NULL && tensor->shape != NULL && tensor->ndim >= 1 &&
                          tensor->ndim <= SMLA_MAX_RANK;
    return first_row(
        has_size ? find_rows(kv_format, smla_dtype(tensor), smla_size(tensor, tensor->ndim - 1))
                 : 0);
}

/* Reports a dtype and a last dimension that fit no table entry. */
static smla_status
fail_format(const smla_checker *c, const char *name, const DLTensor *tensor, int32_t kv_format)
{
    if (kv_format != SMLA_KV_INFER && smla_find_kv_format(kv_format) == NULL) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `kv_format` must be a known cache format, got number %d", c->op,
                         (int)kv_format);
    }
    const smla_kv_set rows = find_rows(kv_format, smla_dtype(tensor), 0);
    return rows == 0 ? fail_dtype(c, name, tensor, kv_format) : fail_size(c, name, tensor, rows);
}

/* Finds the one table entry that fits the array's dtype and last dimension. */
static smla_status
find_kv_format(const smla_checker *c, const char *name, const DLTensor *tensor, int32_t kv_format,
               const smla_kv_format_info **format)
{
    const int64_t size = smla_size(tensor, tensor->ndim - 1);
    const smla_kv_set rows = size == 0 ? 0 : find_rows(kv_format, smla_dtype(tensor), size);
    if (rows == 0) {
        return fail_format(c, name, tensor, kv_format);
    }
    if ((rows & (rows - 1)) != 0) {
        return fail_ambiguous(c, name, tensor, rows);
    }
    *format = first_row(rows);
    return SMLA_OK;
}

/* [pages, block_size, row], [pages, block_size, 1, row] or flat [S, row] -> sizes and strides. */
static smla_status
read_pages(const smla_checker *c, const char *name, const DLTensor *tensor, smla_kv_view *view)
{
    const int64_t element_bytes = smla_element_bytes(tensor);
    const bool has_head_axis = tensor->ndim == 4 && tensor->shape[2] == 1;
    if (tensor->ndim == 2) {
        const bool empty = tensor->shape[0] == 0;
        view->num_pages = empty ? 0 : 1;
        view->block_size = empty ? 1 : tensor->shape[0];
        view->page_stride_bytes = 0;
        view->token_stride_bytes = smla_stride(tensor, 0) * element_bytes;
    } else if (tensor->ndim == 3 || has_head_axis) {
        view->num_pages = tensor->shape[0];
        view->block_size = tensor->shape[1];
        view->page_stride_bytes = smla_stride(tensor, 0) * element_bytes;
        view->token_stride_bytes = smla_stride(tensor, 1) * element_bytes;
    } else {
        return smla_fail(
            c->error, SMLA_ERROR_VALUE,
            "%s: `%s` must have shape [pages, block_size, %d], [pages, block_size, 1, %d] "
            "or [tokens, %d], got %s",
            c->op, name, view->format->row_elements, view->format->row_elements,
            view->format->row_elements, describe_shape(tensor).text);
    }
    if (view->block_size < 1) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have at least one token per page, got shape %s", c->op,
                         name, describe_shape(tensor).text);
    }
    return SMLA_OK;
}

smla_status
smla_require_kv(smla_checker *c, const char *name, const DLTensor *tensor, int32_t kv_format,
                unsigned flags, smla_kv_view *view)
{
    SMLA_TRY(smla_require_pointer(c->op, name, tensor, c->error));
    smla_byte_range range;
    SMLA_TRY(check_sane(c, name, tensor, &range));
    SMLA_TRY(find_kv_format(c, name, tensor, kv_format, &view->format));
    SMLA_TRY(read_pages(c, name, tensor, view));
    if (!range.is_compact) {
        SMLA_TRY(check_last_stride(c, name, tensor));
    }
    const int64_t alignment = view->format->alignment;
    SMLA_TRY(check_alignment(c, name, tensor, alignment));
    if (view->page_stride_bytes % alignment != 0 || view->token_stride_bytes % alignment != 0) {
        return smla_fail(
            c->error, SMLA_ERROR_VALUE,
            "%s: `%s` must have page and token strides in multiples of %lld bytes, got "
            "%lld and %lld",
            c->op, name, (long long)alignment, (long long)view->page_stride_bytes,
            (long long)view->token_stride_bytes);
    }
    view->base = smla_data(tensor);
    view->scales = view->base == NULL ? NULL : view->base + view->format->scale_offset;
    view->scale_token_stride_bytes = view->token_stride_bytes;
    return remember(c, name, tensor, range, flags);
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

smla_status
smla_require_disjoint(const smla_checker *c)
{
    for (int i = 0; i < c->num_arrays; i++) {
        if (!c->arrays[i].is_output) {
            continue;
        }
        for (int j = 0; j < c->num_arrays; j++) {
            const bool checked_before = c->arrays[j].is_output && j <= i;
            if (checked_before || smla_is_apart(c->arrays[i].range, c->arrays[j].range) ||
                smla_is_disjoint(c->arrays[i].tensor, c->arrays[j].tensor)) {
                continue;
            }
            const bool may_be = c->arrays[i].may_be == c->arrays[j].tensor;
            if (may_be && is_same_array(c->arrays[i].tensor, c->arrays[j].tensor)) {
                continue;
            }
            return smla_fail(c->error, SMLA_ERROR_VALUE,
                             "%s: `%s` must %snot overlap `%s`, got arrays that share memory",
                             c->op, c->arrays[i].name, may_be ? "be the whole of or " : "",
                             c->arrays[j].name);
        }
    }
    return SMLA_OK;
}
