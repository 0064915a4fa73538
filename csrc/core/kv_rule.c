/* kv_rule.c: enforces the rules of caches (rule.h): finds a cache's format, and reads its pages. */
#include <stdarg.h>
#include <stdio.h>

#include "core/rule_parts.h"

/* ---- Wording ------------------------------------------------------------------------------- */

/* Describes table entries that need no name, grouped by dtype: "bfloat16 (576 or 512 values a
 * token), or uint8, int8 or float8_e4m3fn (fp8_ds_mla, 656 bytes a token)". */
static smla_text
describe_rows(smla_kv_set rows)
{
    smla_text wanted = {""};
    const smla_kv_format_info *last = NULL;
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        if ((rows & SMLA_KV_SET(i)) == 0 || row->has_one_scale) {
            continue;
        }
        const bool is_named =
            row->dtypes == SMLA_DTYPE_BYTES && (last == NULL || last->format != row->format);
        if (last == NULL || last->dtypes != row->dtypes) {
            smla_append(&wanted, "%s%s (", last == NULL ? "" : " values a token), or ",
                        smla_describe_dtypes(row->dtypes).text);
        } else {
            smla_append(&wanted, " or ");
        }
        smla_append(&wanted, "%s%s%d", is_named ? row->name : "", is_named ? ", " : "",
                    row->row_elements);
        last = row;
    }
    smla_append(&wanted, last != NULL && last->dtypes == SMLA_DTYPE_BYTES ? " bytes a token)"
                                                                          : " values a token)");
    return wanted;
}

/* The names of formats, such as "bfloat16 or fp8_ds_mla". */
static smla_text
describe_names(smla_kv_set rows, const char *quote)
{
    smla_text names = {""};
    const smla_kv_format_info *last = NULL;
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        if ((rows & SMLA_KV_SET(i)) == 0) {
            continue;
        }
        if (last == NULL || last->format != row->format) { /* a name may have two rows */
            smla_append(&names, "%s%s%s%s", last == NULL ? "" : " or ", quote, row->name, quote);
        }
        last = row;
    }
    return names;
}

/* ---- Formats ------------------------------------------------------------------------------- */

/* Whether an entry is the wanted one. Where none is named, rows that are read as those of another
 * entry are taken for those. */
static bool
is_wanted(const smla_kv_format_info *row, int32_t kv_format)
{
    return kv_format == SMLA_KV_INFER ? !row->has_one_scale : (int32_t)row->format == kv_format;
}

/* The table entries that fit a dtype and a last dimension; 0 stands for any last dimension. */
static smla_kv_set
find_rows(int32_t kv_format, unsigned dtype, int64_t row_elements)
{
    smla_kv_set rows = 0;
#pragma GCC unroll 32 /* so that the table's numbers are in the code */
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        if ((row_elements == row->row_elements || row_elements == 0) &&
            (row->dtypes & dtype) != 0 && is_wanted(row, kv_format)) {
            rows |= SMLA_KV_SET(i);
        }
    }
    return rows;
}

/* Whether the array is [pages, page bytes]. */
static bool
has_whole_pages(const DLTensor *tensor, int32_t kv_format)
{
    const smla_kv_format_info *const row = smla_find_kv_format(kv_format);
    return tensor->ndim == 2 && row != NULL && row->layout == SMLA_PAGE_SPLIT;
}

/* The table entries that fit an array; none where the array is absent or has no sizes. */
static smla_kv_set
find_rows_of(const DLTensor *tensor, int32_t kv_format)
{
    if (tensor == NULL || tensor->shape == NULL || tensor->ndim < 1 ||
        tensor->ndim > SMLA_MAX_RANK) {
        return 0;
    }
    const bool is_whole = has_whole_pages(tensor, kv_format);
    const int64_t size = smla_size(tensor, tensor->ndim - 1);
    const unsigned dtype = smla_dtype(tensor);
    /* vLLM calls the rows of 584 bytes by the name of those of 656 bytes. */
    const bool is_v4 =
        kv_format == SMLA_KV_FP8_DS_MLA && size == smla_kv_formats[SMLA_ROW_FP8_V4].row_elements;
    if (is_whole) {
        return find_rows(kv_format, dtype, 0);
    }
    return size == 0 ? 0 : find_rows(is_v4 ? SMLA_KV_FP8_V4 : kv_format, dtype, size);
}

static const smla_kv_format_info *
first_row(smla_kv_set rows)
{
    return &smla_kv_formats[rows == 0 ? 0 : __builtin_ctz(rows)];
}

const smla_kv_format_info *
smla_format_of_cache(const DLTensor *tensor, int32_t kv_format)
{
    return first_row(find_rows_of(tensor, kv_format));
}

bool
smla_has_kv_format(const DLTensor *tensor, int32_t kv_format)
{
    return find_rows_of(tensor, kv_format) != 0;
}

/* Refuses a cache by a text that ends with the array's shape. */
__attribute__((cold, format(printf, 3, 4))) static smla_status
refuse_shape(const smla_checker *c, const smla_cache_rule *rule, const char *format, ...)
{
    smla_text text = {""};
    va_list values;
    va_start(values, format);
    vsnprintf(text.text, sizeof text.text, format, values);
    va_end(values);
    return smla_refuse(c, "`%s` %s %s", rule->name, text.text,
                       smla_describe_shape(rule->tensor).text);
}

/* Names of the options that belong to a cache. A call may have two caches. */
static const char *
format_option(const smla_cache_rule *rule)
{
    return rule->is_extra ? "extra_kv_format" : "kv_format";
}

static const char *
size_option(const smla_cache_rule *rule)
{
    return rule->is_extra ? "extra_block_size" : "block_size";
}

static smla_status
fail_dtype(const smla_checker *c, const smla_cache_rule *rule)
{
    const smla_kv_format_info *const row = smla_find_kv_format(rule->kv_format);
    const smla_text wanted =
        row == NULL ? describe_rows(rule->formats) : smla_describe_dtypes(row->dtypes);
    return smla_fail(c->error, SMLA_ERROR_TYPE, "%s: `%s` must be %s%s%s, got %s", c->op,
                     rule->name, wanted.text, row == NULL ? "" : " for format ",
                     row == NULL ? "" : row->name, smla_describe_dtype(rule->tensor).text);
}

/* Reports a last dimension that fits none of the table entries `rows`, which fit the dtype. */
static smla_status
fail_size(const smla_checker *c, const smla_cache_rule *rule, smla_kv_set rows)
{
    smla_text wanted = {""};
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        if (rows & SMLA_KV_SET(i)) {
            const bool is_last = !(rows >> 1 & SMLA_KV_SET(i)) || row[1].format != row->format;
            smla_append(&wanted, "%s%d%s%s", wanted.text[0] == '\0' ? "" : " or ",
                        row->row_elements, is_last ? " for format " : "", is_last ? row->name : "");
        }
    }
    return refuse_shape(c, rule, "must have a last dimension of %s, got shape", wanted.text);
}

/* Reports a dtype and a last dimension that fit several table entries. */
static smla_status
fail_ambiguous(const smla_checker *c, const smla_cache_rule *rule, smla_kv_set rows)
{
    return refuse_shape(c, rule, "must come with %s=%s, got none for shape", format_option(rule),
                        describe_names(rows, "\"").text);
}

/* Reports a dtype and a last dimension that fit no table entry. */
static smla_status
fail_format(const smla_checker *c, const smla_cache_rule *rule)
{
    const unsigned dtype = smla_dtype(rule->tensor);
    if (rule->kv_format != SMLA_KV_INFER && smla_find_kv_format(rule->kv_format) == NULL) {
        return smla_refuse(c, "`%s` must be a known cache format, got number %d",
                           format_option(rule), (int)rule->kv_format);
    }
    const smla_kv_set rows = find_rows(rule->kv_format, dtype, 0);
    if (rows == 0) {
        return fail_dtype(c, rule);
    }
    const bool may_be_pages =
        rule->tensor->ndim == 2 && rule->block_size != 0 && (dtype & SMLA_DTYPE_BYTES) != 0;
    if (rule->kv_format == SMLA_KV_INFER && may_be_pages) {
        return refuse_shape(c, rule, "must come with %s= as [pages, bytes], got none for shape",
                            format_option(rule));
    }
    return fail_size(c, rule, rows & rule->formats ? rows & rule->formats : rows);
}

/* Reports a format that the operator does not serve. */
static smla_status
fail_unserved(const smla_checker *c, const smla_cache_rule *rule, smla_kv_set rows)
{
    return smla_refuse(c, "`%s` must be of a format that this operator takes (%s), got %s",
                       rule->name, describe_names(rule->formats, "").text,
                       describe_names(rows, "").text);
}

smla_status
smla_find_format(const smla_checker *c, const smla_cache_rule *rule,
                 const smla_kv_format_info **format)
{
    const smla_kv_set rows = find_rows_of(rule->tensor, rule->kv_format);
    *format = first_row(rows);
    if (rows != 0 && (rows & rule->formats) == 0) {
        return fail_unserved(c, rule, rows);
    }
    return SMLA_OK;
}

/* Finds the one table entry that fits the array. */
static smla_status
find_kv_format(const smla_checker *c, const smla_cache_rule *rule,
               const smla_kv_format_info **format)
{
    const smla_kv_set rows = find_rows_of(rule->tensor, rule->kv_format);
    if (rows == 0) {
        return fail_format(c, rule);
    }
    if ((rows & rule->formats) == 0) {
        return fail_unserved(c, rule, rows);
    }
    if ((rows & (rows - 1)) != 0) {
        return fail_ambiguous(c, rule, rows);
    }
    *format = first_row(rows);
    return SMLA_OK;
}

/* ---- Pages --------------------------------------------------------------------------------- */

/* [pages, page bytes] -> sizes and strides. */
static smla_status
read_whole_pages(const smla_checker *c, const smla_cache_rule *rule, smla_kv_view *view)
{
    const DLTensor *const tensor = rule->tensor;
    if (rule->block_size == 0) {
        return refuse_shape(
            c, rule, "must come with %s= for pages of %s as [pages, bytes], got none for shape",
            size_option(rule), view->format->name);
    }
    if (tensor->shape[1] < rule->block_size * view->format->row_bytes) {
        return refuse_shape(
            c, rule, "must have at least %lld bytes per page of %lld tokens of %s, got shape",
            (long long)(rule->block_size * view->format->row_bytes), (long long)rule->block_size,
            view->format->name);
    }
    view->num_pages = tensor->shape[0];
    view->block_size = rule->block_size;
    view->page_stride_bytes = smla_stride(tensor, 0);
    view->token_stride_bytes = view->format->row_bytes;
    return SMLA_OK;
}

/* [pages, block_size, row], [pages, block_size, 1, row] or flat [S, row] -> sizes and strides. */
static smla_status
read_pages(const smla_checker *c, const smla_cache_rule *rule, smla_kv_view *view)
{
    const DLTensor *const tensor = rule->tensor;
    const int64_t element_bytes = smla_element_bytes(tensor);
    const bool has_head_axis = tensor->ndim == 4 && tensor->shape[2] == 1;
    const bool is_split = view->format->layout == SMLA_PAGE_SPLIT;
    if (tensor->ndim == 2 && !is_split) {
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
        const int32_t row = view->format->row_elements;
        smla_text flat = {""};
        if (is_split) {
            smla_append(&flat, "[pages, bytes] with %s= and %s= (tokens of %d bytes)",
                        size_option(rule), format_option(rule), row);
        } else {
            smla_append(&flat, "[tokens, %d]", row);
        }
        return refuse_shape(
            c, rule,
            "must have shape [pages, block_size, %d], [pages, block_size, 1, %d] or %s, got", row,
            row, flat.text);
    }
    if (view->block_size < 1) {
        return refuse_shape(c, rule, "must have at least one token per page, got shape");
    }
    const bool is_no_page = tensor->ndim == 2 && view->num_pages == 0;
    if (rule->block_size != 0 && rule->block_size != view->block_size && !is_no_page) {
        return smla_refuse(c, "`%s` must have pages of %s = %lld tokens, got %lld", rule->name,
                           size_option(rule), (long long)rule->block_size,
                           (long long)view->block_size);
    }
    return SMLA_OK;
}

/* A split page is contiguous, and the next one begins behind it. */
static smla_status
require_split_pages(const smla_checker *c, const smla_cache_rule *rule, const smla_kv_view *view)
{
    const int64_t row_bytes = view->format->row_bytes;
    if (view->block_size > 1 && view->token_stride_bytes != row_bytes) {
        return smla_refuse(
            c,
            "`%s` must have contiguous pages (a token stride of %lld bytes), got a stride of %lld",
            rule->name, (long long)row_bytes, (long long)view->token_stride_bytes);
    }
    if (view->num_pages > 1 && view->page_stride_bytes < view->block_size * row_bytes) {
        return smla_refuse(c, "`%s` must have a page stride of at least %lld bytes, got %lld",
                           rule->name, (long long)(view->block_size * row_bytes),
                           (long long)view->page_stride_bytes);
    }
    return SMLA_OK;
}

/* Sets where rows and scales are. */
static void
place_rows(smla_kv_view *view, const DLTensor *tensor)
{
    const smla_kv_format_info *const format = view->format;
    int64_t scale_offset = format->scale_offset;
    view->scale_token_stride_bytes = view->token_stride_bytes;
    if (format->layout == SMLA_PAGE_SPLIT) {
        scale_offset = view->block_size * format->data_bytes;
        view->token_stride_bytes = format->data_bytes;
        view->scale_token_stride_bytes = format->scale_bytes;
    }
    view->base = smla_data(tensor);
    view->scales = smla_data_at(tensor, scale_offset);
}

smla_status
smla_require_kv(smla_checker *c, const smla_cache_rule *rule, smla_kv_view *view)
{
    const char *const name = rule->name;
    smla_byte_range range;
    SMLA_TRY(smla_require_sane(c, name, rule->tensor, &range));
    SMLA_TRY(find_kv_format(c, rule, &view->format));
    const int64_t alignment = view->format->alignment;
    const bool is_split = view->format->layout == SMLA_PAGE_SPLIT;
    if (rule->block_size != 0) {
        SMLA_TRY(
            smla_require_count(c->op, size_option(rule), rule->block_size, 1, INT32_MAX, c->error));
    }
    SMLA_TRY(has_whole_pages(rule->tensor, rule->kv_format) ? read_whole_pages(c, rule, view)
                                                            : read_pages(c, rule, view));
    SMLA_TRY(smla_require_layout(c, name, rule->tensor, &range, alignment, rule->flags));
    if (is_split && range.low != NULL) { /* not for an empty one, which has no strides */
        SMLA_TRY(require_split_pages(c, rule, view));
    }
    if (view->page_stride_bytes % alignment != 0 || view->token_stride_bytes % alignment != 0) {
        return smla_refuse(
            c,
            "`%s` must have page and token strides in multiples of %lld bytes, got %lld and %lld",
            name, (long long)alignment, (long long)view->page_stride_bytes,
            (long long)view->token_stride_bytes);
    }
    if ((rule->flags & SMLA_RULE_OUTPUT) == 0) {
        view->format = smla_row_as_read(view->format);
    }
    place_rows(view, rule->tensor);
    return smla_remember(c, name, rule->tensor, range, rule->flags);
}

/* ---- Scales -------------------------------------------------------------------------------- */

smla_status
smla_read_scale_number(smla_checker *c, const char *name, const smla_scale_arg *given, float *value)
{
    *value = 1.0f;
    if (given->tensor != NULL) {
        return smla_require_any(c, name, given->tensor, SMLA_DTYPE_FP32, SMLA_RULE_ANY_LAST_STRIDE);
    }
    if (given->value != 0) {
        SMLA_TRY(smla_require_positive(c->op, name, given->value, c->error));
        *value = (float)given->value;
    }
    return SMLA_OK;
}

smla_status
smla_require_scale(smla_checker *c, const char *name, const smla_scale_arg *given,
                   smla_given_scale *scale)
{
    const DLTensor *const tensor = given->tensor;
    *scale = (smla_given_scale){.pointer = NULL};
    SMLA_TRY(smla_read_scale_number(c, name, given, &scale->value));
    if (tensor == NULL) {
        return SMLA_OK;
    }
    if (!smla_has_one_value(tensor)) {
        return smla_refuse(c, "`%s` must have one value, or be a float, got shape %s", name,
                           smla_describe_shape(tensor).text);
    }
    scale->pointer = smla_data(tensor);
    return c->device.device_type == kDLCPU
               ? smla_require_positive(c->op, name, *scale->pointer, c->error)
               : SMLA_OK;
}

smla_status
smla_require_kv_scale(smla_checker *c, const char *name, const smla_scale_arg *given,
                      const smla_kv_format_info *format, smla_given_scale *scale)
{
    *scale = (smla_given_scale){.pointer = NULL, .value = 1.0f};
    if (format->scale_type == SMLA_SCALE_CACHE) {
        return smla_require_scale(c, name, given, scale);
    }
    if (given->tensor != NULL) {
        return smla_refuse(c,
                           "`%s` must be left out for format %s, which has no scale of the whole "
                           "cache, got an array",
                           name, format->name);
    }
    if (given->value != 0 && given->value != 1) {
        return smla_refuse(
            c, "`%s` must be 1 for format %s, which has no scale of the whole cache, got %g", name,
            format->name, given->value);
    }
    return SMLA_OK;
}
