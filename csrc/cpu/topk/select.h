/* select.h: the kernels of top_k.c. One text, select_kernel.c, is compiled once per instruction set
 * into a smla_select_isa.
 *
 * A logit has a key, an integer that grows with it: NaN has key 1 << 16, which is below that of
 * -inf, and -0 has the key of 0. The low 16 bits of the keys of bf16 logits are 0.
 */
#pragma once

#include "core/backend.h"

/* A key has three digits, the first in its upper 11 bits. */
enum {
    SMLA_KEY_DIGITS = 3,
    SMLA_DIGIT_VALUES = 2048,
    SMLA_DIGIT_COUNTERS = 4, /* per value of digit 0: equal neighbours do not wait for each other */
    SMLA_MAX_CANDIDATES = 6144, /* 48 KiB, which stay in a cache */
};

/* Neighbouring columns of a row. */
typedef struct smla_logit_rows {
    const void *data;
    bool is_bf16;
    int64_t count;
} smla_logit_rows;

/* The keys that a row gives away: all above `key`, and the first `num_equal` that equal it. */
typedef struct smla_threshold {
    uint32_t key;
    int64_t num_equal;
} smla_threshold;

/* The columns of a row whose keys may be among its largest, in order, and their keys. */
typedef struct smla_candidates {
    int64_t count; /* -1: there are too many to list */
    int32_t columns[SMLA_MAX_CANDIDATES];
    uint32_t keys[SMLA_MAX_CANDIDATES];
} smla_candidates;

/* Memory of a thread, or of a chunk of a row. No list is made while digits are counted. */
typedef union smla_select_scratch {
    smla_candidates list;
    struct {
        uint32_t partial[SMLA_DIGIT_COUNTERS][SMLA_DIGIT_VALUES];
        uint32_t counts[SMLA_DIGIT_VALUES];
    } digits;
} smla_select_scratch;

typedef struct smla_select_isa {
    /* Adds to counts[d] the number of keys whose digit number `digit` is d, among those whose
     * digits in front of it are `prefix`. Uses `partial` as scratch. Returns the only key that was
     * counted, or 0 if there are several or that is not known. */
    uint32_t (*count_digits)(const smla_logit_rows *logits, int digit, uint32_t prefix,
                             uint32_t partial[SMLA_DIGIT_COUNTERS][SMLA_DIGIT_VALUES],
                             uint32_t counts[SMLA_DIGIT_VALUES]);
    /* Lists the columns whose keys are at least `least`, which no missing column's key is. */
    void (*list_candidates)(const smla_logit_rows *logits, uint32_t least, smla_candidates *found);
    /* The same as count_digits of the keys in a list, for digit 1 or 2. */
    uint32_t (*count_listed_digits)(const smla_candidates *found, int digit, uint32_t prefix,
                                    uint32_t counts[SMLA_DIGIT_VALUES]);
    /* Counts the keys above `key`, and those that equal it. */
    void (*count_keys)(const smla_logit_rows *logits, uint32_t key, int64_t *num_above,
                       int64_t *num_equal);
    /* Writes the columns of the keys that the threshold lets through, in ascending order. The
     * first column is number `first`. Returns how many it wrote. */
    int64_t (*take_columns)(const smla_logit_rows *logits, smla_threshold threshold, int32_t first,
                            int32_t *out);
} smla_select_isa;

/* Where a digit begins in a key, and the bits that it has. */
static inline int
smla_digit_shift(int digit)
{
    return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}

static inline uint32_t
smla_digit_mask(int digit)
{
    return digit == 2 ? 1023 : 2047;
}

/* Writes the k columns of a row that have the largest keys, in ascending order, then -1. One thread
 * does all of it; top_k.c. */
void smla_cpu_choose_columns(const smla_select_isa *isa, const smla_logit_rows *logits, int64_t k,
                             smla_select_scratch *scratch, int32_t *out);
