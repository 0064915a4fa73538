/* operators.h: every operator, with a good call, so that tests can break one thing at a time in
 * each of them.
 */
#pragma once

#include <stddef.h>

#include "good_calls.h"
#include "operator_numbers.h"

typedef struct operator_case {
    const char *name; /* in errors, but for absorb's two operators */
    size_t args_bytes;
    smla_status (*call)(const any_args *, smla_error *);
    any_args (*make)(void);
} operator_case;

static inline const DLTensor **
array_at(any_args *args, size_t offset)
{
    return (const DLTensor **)(void *)((uint8_t *)args + offset);
}

enum { MAX_SLOTS = 15 };

/* Finds where the args point to arrays of this program, in the order of the fields. */
static inline int
find_arrays(const any_args *args, size_t args_bytes, size_t offsets[MAX_SLOTS])
{
    int count = 0;
    for (size_t at = sizeof(size_t); at < args_bytes && count < MAX_SLOTS; at += sizeof(void *)) {
        const void *pointer;
        memcpy(&pointer, (const uint8_t *)args + at, sizeof pointer);
        for (int i = 0; i < num_arrays; i++) {
            if (pointer == &arrays[i]->tensor) {
                offsets[count++] = at;
                break;
            }
        }
    }
    return count;
}

#define CALL(op, args_type, ...)                                          \
    static inline smla_status call_##op(const any_args *a, smla_error *e) \
    {                                                                     \
        return smla_##op((const args_type *)(const void *)a, e);          \
    }
#define CASE(op, args_type, ...) [OP_##op] = {#op, sizeof(args_type), call_##op, make_##op},

SMLA_OPERATORS(CALL)
SMLA_PROJECTIONS(CALL)
SMLA_ATTENTIONS(CALL)

static const operator_case operators[NUM_OPERATORS] = {SMLA_OPERATORS(CASE) SMLA_PROJECTIONS(CASE)
                                                           SMLA_ATTENTIONS(CASE)};

#undef CALL
#undef CASE
#define AT_FIELD(member, field) offsetof(any_args, member.field)

/* The beginning of an operator's errors. */
static inline const char *
title_of(const operator_case *op)
{
    return strncmp(op->name, "absorb_", strlen("absorb_")) == 0 ? "absorb" : op->name;
}

/* Finds the name that errors give an array, in the error of a call where it has no known type. */
static inline void
find_name(const operator_case *op, const any_args *good, size_t offset, char name[32])
{
    char pattern[100];
    any_args args = *good;
    DLTensor tensor = **array_at(&args, offset);
    tensor.dtype = (DLDataType){200, 7, 1};
    *array_at(&args, offset) = &tensor;
    name[0] = '\0';
    snprintf(pattern, sizeof pattern, "%s: `%%31[^`]` must be ", title_of(op));
    EXPECT_FAIL(op->call(&args, &error), SMLA_ERROR_TYPE, ", got DLPack type code 200 of 7 bits");
    EXPECT_EQ(sscanf(error.text, pattern, name), 1);
}

/* Whether an operator writes the array of this name. */
static inline bool
is_written(const operator_case *op, const char *name)
{
    static const char results[] =
        " out dst lse max_logits counts lens slots values w_uk w_uv scale q_out k_out kv_out "
        "out_weights out_scale workspace workspace_buffer ";
    static const char of_some[] = " kv_cache k_cache v_cache state descale ";
    static const char writers[] =
        " concat_and_cache_mla quantize_and_insert_k_cache indexer_k_quant_and_cache "
        "reshape_and_cache rope_and_cache_mla fused_qnorm_rope_kv_insert save_partial_states "
        "compress_norm_rope_store scaled_quantize ";
    char word[64];
    char op_word[64];
    snprintf(word, sizeof word, " %s ", name);
    snprintf(op_word, sizeof op_word, " %s ", op->name);
    if (strcmp(op->name, "top_k_merge") == 0 && strcmp(name, "values") == 0) {
        return false; /* top_k_per_row writes its values */
    }
    return strstr(results, word) != NULL ||
           (strstr(of_some, word) != NULL && strstr(writers, op_word) != NULL);
}
