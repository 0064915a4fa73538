/* rule.h: what an array must be, said once. check.c states rules; rule.c enforces them.
 *
 * A checker lives on the stack of one call. Arrays pass through smla_require in the order of the args
 * struct, so the first wrong one is the one reported; smla_require_disjoint comes last, when all of
 * them are known. Nothing here knows what an operator computes.
 */
#ifndef SMLA_RULE_H
#define SMLA_RULE_H

#include "backend.h"

enum {
    SMLA_DTYPE_BF16 = 1 << 0,
    SMLA_DTYPE_FP16 = 1 << 1,
    SMLA_DTYPE_FP32 = 1 << 2,
    SMLA_DTYPE_INT32 = 1 << 3,
    SMLA_DTYPE_INT64 = 1 << 4,
    SMLA_DTYPE_UINT8 = 1 << 5,
    SMLA_DTYPE_INT8 = 1 << 6,
    SMLA_DTYPE_E4M3 = 1 << 7,

    SMLA_DTYPE_FLOATS = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP16 | SMLA_DTYPE_FP32,
    SMLA_DTYPE_BYTES = SMLA_DTYPE_UINT8 | SMLA_DTYPE_INT8 | SMLA_DTYPE_E4M3,
};

enum {
    SMLA_RULE_OPTIONAL = 1 << 0,
    SMLA_RULE_OUTPUT = 1 << 1,    /* positive strides, no element twice, disjoint from the rest */
    SMLA_RULE_MORE_ROWS = 1 << 2, /* shape[0] is a minimum */
    SMLA_RULE_ANY_LAST_STRIDE = 1 << 3, /* the last dimension need not be contiguous */
};

enum { SMLA_ANY = -1 }; /* a dimension of any size */

typedef struct smla_rule {
    const char *name;
    const DLTensor *tensor;
    unsigned dtypes;
    unsigned flags;
    int ndim; /* SMLA_ANY: any rank up to SMLA_MAX_RANK, `shape` is not looked at */
    int64_t shape[3];
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
        bool is_output;
    } arrays[SMLA_MAX_ARRAYS];
} smla_checker;

/* Checks one array and remembers it. */
smla_status smla_require(smla_checker *checker, const smla_rule *rule);

/* Checks a cache, whose shape says its format, and fills `view`. */
smla_status smla_require_kv(smla_checker *checker, const char *name, const DLTensor *tensor,
                            int32_t kv_format, unsigned flags, smla_kv_view *view);

/* No output may share memory with any other array. */
smla_status smla_require_disjoint(const smla_checker *checker);

/* ---- Reading a DLTensor ------------------------------------------------------------------------ */

/* The data pointer with byte_offset applied; NULL for an absent array. */
void *smla_data(const DLTensor *tensor);

/* Size of dimension `dim`, or SMLA_ANY where the array is absent or has no such dimension. */
int64_t smla_size(const DLTensor *tensor, int dim);

/* Stride in elements: computed where strides are NULL, 0 for a dimension of size 1 and absent arrays
 * (their stride is never used, and producers leave nonsense there). */
int64_t smla_stride(const DLTensor *tensor, int dim);

int64_t smla_element_bytes(const DLTensor *tensor);

/* The SMLA_DTYPE_ bit of an array, 0 for any other type. */
unsigned smla_dtype(const DLTensor *tensor);

#endif /* SMLA_RULE_H */
