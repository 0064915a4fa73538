/* rule.h: what an array must be, said once. check.c states rules; rule.c enforces them.
 *
 * A checker lives on the stack of one call. Arrays pass through smla_require in the order of the
 * args struct, so the first wrong one is the one reported; smla_require_disjoint comes last, when
 * all of them are known. Nothing here knows what an operator computes.
 */
#ifndef SMLA_RULE_H
#define SMLA_RULE_H

#include "core/backend.h"
#include "core/dltensor.h"

enum {
    SMLA_RULE_OPTIONAL = 1 << 0,
    SMLA_RULE_OUTPUT = 1 << 1,    /* positive strides, no element twice, disjoint from the rest */
    SMLA_RULE_MORE_ROWS = 1 << 2, /* shape[0] is a minimum */
    SMLA_RULE_ANY_LAST_STRIDE = 1 << 3, /* the last dimension need not be contiguous */
};

typedef struct smla_rule {
    const char *name;
    const DLTensor *tensor;
    unsigned dtypes;
    unsigned flags;
    int ndim; /* SMLA_ANY: any rank up to SMLA_MAX_RANK, `shape` is not looked at */
    int64_t shape[3];
    const char *hint; /* what the shape stands for, for who got it wrong; NULL = nothing to add */
} smla_rule;

enum { SMLA_MAX_ARRAYS = 16 };

typedef struct smla_checker {
    const char *op;
    smla_error *error;
    DLDevice device; /* of the first array */
    int num_arrays;
    struct {
        const char *name;
        const DLTensor *tensor;
        smla_byte_range range;
        bool is_output;
    } arrays[SMLA_MAX_ARRAYS];
} smla_checker;

/* Starts a checker that knows no array. An initializer would clear them all, which costs more than
 * a check. */
static inline void
smla_open_checker(smla_checker *checker, const char *op, smla_error *error)
{
    checker->op = op;
    checker->error = error;
    checker->device = (DLDevice){.device_type = kDLCPU};
    checker->num_arrays = 0;
}

/* Checks one array and remembers it. */
smla_status smla_require(smla_checker *checker, const smla_rule *rule);

/* The format of a cache, for what is checked before it and has its sizes: where its own check will
 * find none, the first one of the table. */
const smla_kv_format_info *smla_format_of_cache(const DLTensor *tensor, int32_t kv_format);

/* Checks a cache, whose shape says its format, and fills `view`. */
smla_status smla_require_kv(smla_checker *checker, const char *name, const DLTensor *tensor,
                            int32_t kv_format, unsigned flags, smla_kv_view *view);

/* The device that works on memory of this kind: the CPU, number 0, for pinned and managed memory
 * too. */
DLDevice smla_normal_device(DLDevice device);

/* No output may share memory with any other array. */
smla_status smla_require_disjoint(const smla_checker *checker);

#endif /* SMLA_RULE_H */
