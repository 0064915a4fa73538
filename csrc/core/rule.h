/* rule.h: rules for arrays. Files check_<family>.c state the rules of operators; rule.c enforces
 * them.
 *
 * A checker lives on the stack of one call. Arrays pass through smla_require in the order of the
 * args struct, so the first wrong array is reported. smla_require_disjoint comes last, when all
 * arrays are known. Nothing here knows what an operator computes.
 */
#pragma once

#include "core/backend.h"
#include "core/dltensor.h"

enum {
    SMLA_RULE_OPTIONAL = 1 << 0,
    SMLA_RULE_OUTPUT = 1 << 1,    /* positive strides, no overlap in itself or with other arrays */
    SMLA_RULE_MORE_ROWS = 1 << 2, /* the rule's shape[0] is a minimum */
    SMLA_RULE_ANY_LAST_STRIDE = 1 << 3, /* the last dimension need not be contiguous */
    SMLA_RULE_MORE_HEADS = 1 << 4,      /* the rule's shape[1] is a minimum */
};

/* The element types of e4m3 values. A framework without this type passes their bytes. */
enum { SMLA_DTYPE_E4M3_OR_BYTES = SMLA_DTYPE_E4M3 | SMLA_DTYPE_UINT8 };

typedef struct smla_rule {
    const char *name;
    const DLTensor *tensor;
    unsigned dtypes;
    unsigned flags;
    int ndim; /* SMLA_ANY: any rank up to SMLA_MAX_RANK, and `shape` is not read */
    int64_t shape[4];
    const char *hint;          /* explains a wrong shape in the error text; NULL = no explanation */
    const DLTensor *may_be[2]; /* inputs that this output may be; NULL = none */
} smla_rule;

enum { SMLA_MAX_ARRAYS = 16 };

typedef struct smla_checker {
    const char *op;
    smla_error *error;
    DLDevice device; /* device of the first array */
    int num_arrays;
    struct {
        const char *name;
        const DLTensor *tensor;
        smla_byte_range range;
        bool is_output;
        const DLTensor *may_be[2];
    } arrays[SMLA_MAX_ARRAYS];
} smla_checker;

/* Starts a checker without arrays. An initializer would clear all of `arrays`, which costs more
 * than a check. */
static inline void
smla_open_checker(smla_checker *checker, const char *op, smla_error *error)
{
    checker->op = op;
    checker->error = error;
    checker->device = (DLDevice){.device_type = kDLCPU};
    checker->num_arrays = 0;
}

/* Refuses a value of the checker's call, as smla_fail_value (error.h) does. */
__attribute__((cold, format(printf, 2, 3))) smla_status smla_refuse(const smla_checker *checker,
                                                                    const char *format, ...);

/* Checks one array and remembers it. */
smla_status smla_require(smla_checker *checker, const smla_rule *rule);

/* The same for an array of any shape, or of one, two or three dimensions. `hint` may be NULL. */
static inline smla_status
smla_require_any(smla_checker *c, const char *name, const DLTensor *tensor, unsigned dtypes,
                 unsigned flags)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = dtypes,
                                        .flags = flags,
                                        .ndim = SMLA_ANY});
}

static inline smla_status
smla_require_1d(smla_checker *c, const char *name, const DLTensor *tensor, unsigned dtypes,
                int64_t size, unsigned flags, const char *hint)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = dtypes,
                                        .flags = flags,
                                        .ndim = 1,
                                        .shape = {size},
                                        .hint = hint});
}

static inline smla_status
smla_require_2d(smla_checker *c, const char *name, const DLTensor *tensor, unsigned dtypes,
                int64_t rows, int64_t columns, unsigned flags, const char *hint)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = dtypes,
                                        .flags = flags,
                                        .ndim = 2,
                                        .shape = {rows, columns},
                                        .hint = hint});
}

static inline smla_status
smla_require_3d(smla_checker *c, const char *name, const DLTensor *tensor, unsigned dtypes,
                int64_t tokens, int64_t heads, int64_t values, unsigned flags, const char *hint)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = dtypes,
                                        .flags = flags,
                                        .ndim = 3,
                                        .shape = {tokens, heads, values},
                                        .hint = hint});
}

/* ---- Caches: kv_rule.c --------------------------------------------------------------------- */

typedef struct smla_cache_rule {
    const char *name;
    const DLTensor *tensor;
    int32_t kv_format;   /* SMLA_KV_INFER: dtype and last dimension decide */
    int64_t block_size;  /* tokens per page; 0 = not given */
    smla_kv_set formats; /* table entries that the operator serves */
    unsigned flags;      /* SMLA_RULE_OUTPUT or 0 */
    bool is_extra;       /* errors name extra_kv_format and extra_block_size */
} smla_cache_rule;

/* A cache's format, for what is sized before the cache is checked. If no format fits, it is the
 * table's first entry, and the check of the cache will report the error. */
const smla_kv_format_info *smla_format_of_cache(const DLTensor *tensor, int32_t kv_format);

/* The same for rules of arrays that are checked before the cache. A format that the operator does
 * not serve is an error at once. */
smla_status smla_find_format(const smla_checker *checker, const smla_cache_rule *rule,
                             const smla_kv_format_info **format);

/* Whether any format fits a cache. */
bool smla_has_kv_format(const DLTensor *tensor, int32_t kv_format);

/* Checks a cache, finds its format, and fills `view`. */
smla_status smla_require_kv(smla_checker *checker, const smla_cache_rule *rule, smla_kv_view *view);

/* Checks a scale: a positive number, or an array of one fp32, which the CPU reads. */
smla_status smla_require_scale(smla_checker *checker, const char *name, const smla_scale_arg *given,
                               smla_given_scale *scale);

/* Checks the scale of a cache, whose format may have none. */
smla_status smla_require_kv_scale(smla_checker *checker, const char *name,
                                  const smla_scale_arg *given, const smla_kv_format_info *format,
                                  smla_given_scale *scale);

/* ---- Devices and overlaps ------------------------------------------------------------------ */

/* The device that works on memory of `device`. Pinned and managed memory counts as memory of the
 * CPU, number 0. */
DLDevice smla_normal_device(DLDevice device);

/* An array as `home` sees it, if `home` is a GPU and the array is in memory of a device of type
 * `other`: as an array of `home`, in `seen`. The backend then asks the driver whether `home`
 * reaches it. Any other array, or none, is returned as it is. */
const DLTensor *smla_see_from(DLDevice home, DLDeviceType other, const DLTensor *tensor,
                              DLTensor *seen);

/* Checks that no output shares memory with another array, except with the input that it may be. */
smla_status smla_require_disjoint(const smla_checker *checker);

/* ---- What is no array ---------------------------------------------------------------------- */

smla_status smla_require_pointer(const char *op, const char *name, const void *pointer,
                                 smla_error *error);

/* The largest factor of logits. Kernels compute weights as powers of 2, so they multiply logits
 * with log2(e), and a factor times log2(e) must be finite as a float. */
#define SMLA_LOGIT_FACTOR_MAX 0x1.62E42Ep+127f

/* Checks that a factor of logits is finite as a float, and no larger than that. */
smla_status smla_require_logit_factor(const char *op, const char *name, double value,
                                      smla_error *error);

/* Checks that a scale is a positive normal float. */
smla_status smla_require_positive(const char *op, const char *name, double value,
                                  smla_error *error);

/* Checks that a number is at least `least`. */
smla_status smla_require_least(const char *op, const char *name, int64_t value, int64_t least,
                               smla_error *error);

/* Checks that a number is in least...most. */
smla_status smla_require_count(const char *op, const char *name, int64_t value, int64_t least,
                               int64_t most, smla_error *error);
