/* rule_parts.h: the parts that rule.c and kv_rule.c make rules and errors of. */
#pragma once

#include "core/rule.h"

enum { SMLA_TEXT_BYTES = 352 };

/* A part of an error's text, by value: functions that describe something return one. */
typedef struct smla_text {
    char text[SMLA_TEXT_BYTES];
} smla_text;

/* Cuts off text that does not fit. */
__attribute__((format(printf, 2, 3))) void smla_append(smla_text *to, const char *format, ...);

smla_text smla_describe_dtype(const DLTensor *tensor);
smla_text smla_describe_dtypes(unsigned dtypes);
smla_text smla_describe_shape(const DLTensor *tensor);

/* The start of every array's check, and what all later steps rely on: an array, a rank of at most
 * SMLA_MAX_RANK, no negative sizes, and addresses that exist. */
smla_status smla_require_sane(const smla_checker *c, const char *name, const DLTensor *tensor,
                              smla_byte_range *range);

/* Checks the last stride, and that the address is a multiple of `alignment`, a power of two. */
smla_status smla_require_layout(const smla_checker *c, const char *name, const DLTensor *tensor,
                                const smla_byte_range *range, int64_t alignment, unsigned flags);

/* The end of every array's check: the device, and the rules of outputs. */
smla_status smla_remember(smla_checker *c, const char *name, const DLTensor *tensor,
                          smla_byte_range range, unsigned flags);

/* The first half of checking a scale: a positive number goes to `value`, which is 1 otherwise; an
 * array is fp32 of any shape. */
smla_status smla_read_scale_number(smla_checker *checker, const char *name,
                                   const smla_scale_arg *given, float *value);
