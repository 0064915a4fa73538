/* select_kernel.c: counting and taking keys, for one instruction set.
 *
 * The compiler makes vectors of the loops over a block: the keys, and whether any of them matters.
 * Only blocks with a key that matters are looked at key by key.
 */
#include <string.h>

#include "cpu/topk/select.h"

enum { BLOCK = 32 };

/* ---- Keys ---------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) uint32_t
key_of(uint32_t bits)
{
    const uint32_t size = bits & 0x7FFFFFFFu;
    const uint32_t key = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
    const uint32_t ordered = size == 0 ? 0x80000000u : key;
    return size > 0x7F800000u ? 0x10000u : ordered;
}

/* The keys of columns i...i + BLOCK - 1; 0, which no logit has, past the last column. */
static inline __attribute__((always_inline)) void
load_keys(const smla_logit_rows *logits, int64_t i, uint32_t keys[BLOCK])
{
    const int64_t left = logits->count - i;
    const int64_t count = left < BLOCK ? left : BLOCK;
    uint32_t bits[BLOCK] = {0};
    if (logits->is_bf16) {
        uint16_t halves[BLOCK] = {0};
        if (count == BLOCK) {
            memcpy(halves, (const uint16_t *)logits->data + i, sizeof halves);
        } else {
            memcpy(halves, (const uint16_t *)logits->data + i, (size_t)count * sizeof halves[0]);
        }
        for (int j = 0; j < BLOCK; j++) {
            bits[j] = (uint32_t)halves[j] << 16;
        }
    } else if (count == BLOCK) {
        memcpy(bits, (const uint32_t *)logits->data + i, sizeof bits);
    } else {
        memcpy(bits, (const uint32_t *)logits->data + i, (size_t)count * sizeof bits[0]);
    }
    const uint32_t mask = logits->is_bf16 ? 0xFFFF0000u : 0xFFFFFFFFu;
    for (int j = 0; j < BLOCK; j++) {
        keys[j] = key_of(bits[j]) & mask;
    }
    for (int64_t j = count; j < BLOCK; j++) {
        keys[j] = 0;
    }
}

/* ---- Counting ------------------------------------------------------------------------------ */

static void
count_first_digits(const smla_logit_rows *logits,
                   uint32_t partial[SMLA_DIGIT_COUNTERS][SMLA_DIGIT_VALUES])
{
    int64_t i = 0;
    for (; i + BLOCK <= logits->count; i += BLOCK) {
        uint32_t keys[BLOCK];
        load_keys(logits, i, keys);
        for (int j = 0; j < BLOCK; j++) {
            partial[j % SMLA_DIGIT_COUNTERS][keys[j] >> 21]++;
        }
    }
    if (i < logits->count) {
        uint32_t keys[BLOCK];
        load_keys(logits, i, keys);
        for (int j = 0; j < logits->count - i; j++) {
            partial[0][keys[j] >> 21]++;
        }
    }
}

/* What the keys that begin with a prefix have in common. */
typedef struct common {
    uint32_t count;
    uint32_t any; /* bits that a key has */
    uint32_t all; /* bits that all keys have */
} common;

static inline __attribute__((always_inline)) common
find_common(const uint32_t *keys, int64_t count, int prefix_shift, uint32_t prefix)
{
    common found = {.all = UINT32_MAX};
    for (int64_t i = 0; i < count; i++) {
        const bool has_prefix = keys[i] >> prefix_shift == prefix;
        found.count += has_prefix;
        found.any |= has_prefix ? keys[i] : 0;
        found.all &= has_prefix ? keys[i] : UINT32_MAX;
    }
    return found;
}

static inline __attribute__((always_inline)) bool
has_one_digit(common found, int shift)
{
    return found.any >> shift == found.all >> shift;
}

static inline __attribute__((always_inline)) uint32_t
only_key(common found)
{
    return found.any == found.all ? found.any : 0;
}

/* A key of a column that does not exist may be counted with prefix 0. This does no harm, because
 * digits are counted from the largest down, and such keys are the smallest. Keys with another
 * prefix add 0, because the processor would not foresee a branch. Keys with one digit are counted
 * together, because additions to one counter wait for each other. */
static uint32_t
count_next_digits(const smla_logit_rows *logits, int digit, uint32_t prefix,
                  uint32_t partial[SMLA_DIGIT_COUNTERS][SMLA_DIGIT_VALUES])
{
    const int prefix_shift = smla_digit_shift(digit - 1);
    const int shift = smla_digit_shift(digit);
    const uint32_t mask = smla_digit_mask(digit);
    common row = {.all = UINT32_MAX};
    for (int64_t i = 0; i < logits->count; i += BLOCK) {
        uint32_t keys[BLOCK];
        load_keys(logits, i, keys);
        const common found = find_common(keys, BLOCK, prefix_shift, prefix);
        if (found.count == 0) {
            continue;
        }
        row.any |= found.any;
        row.all &= found.all;
        if (has_one_digit(found, shift)) {
            partial[0][found.any >> shift & mask] += found.count;
            continue;
        }
        for (int j = 0; j < BLOCK; j++) {
            partial[j % SMLA_DIGIT_COUNTERS][keys[j] >> shift & mask] +=
                keys[j] >> prefix_shift == prefix;
        }
    }
    return only_key(row);
}

static uint32_t
count_digits(const smla_logit_rows *logits, int digit, uint32_t prefix,
             uint32_t partial[SMLA_DIGIT_COUNTERS][SMLA_DIGIT_VALUES],
             uint32_t counts[SMLA_DIGIT_VALUES])
{
    uint32_t only = 0;
    memset(partial, 0, SMLA_DIGIT_COUNTERS * sizeof partial[0]);
    if (digit == 0) {
        count_first_digits(logits, partial);
    } else {
        only = count_next_digits(logits, digit, prefix, partial);
    }
    for (int j = 0; j < SMLA_DIGIT_COUNTERS; j++) {
        for (int d = 0; d < SMLA_DIGIT_VALUES; d++) {
            counts[d] += partial[j][d];
        }
    }
    return only;
}

static void
list_candidates(const smla_logit_rows *logits, uint32_t least, smla_candidates *found)
{
    int64_t count = 0;
    for (int64_t i = 0; i < logits->count; i += BLOCK) {
        uint32_t keys[BLOCK];
        uint32_t num_found = 0;
        load_keys(logits, i, keys);
        for (int j = 0; j < BLOCK; j++) {
            num_found += keys[j] >= least;
        }
        if (num_found > 0 && count > SMLA_MAX_CANDIDATES - BLOCK) {
            found->count = -1;
            return;
        }
        for (int j = 0; num_found > 0 && j < BLOCK; j++) {
            found->columns[count] = (int32_t)(i + j);
            found->keys[count] = keys[j];
            count += keys[j] >= least;
        }
    }
    found->count = count;
}

static uint32_t
count_listed_digits(const smla_candidates *list, int digit, uint32_t prefix,
                    uint32_t counts[SMLA_DIGIT_VALUES])
{
    const int prefix_shift = smla_digit_shift(digit - 1);
    const int shift = smla_digit_shift(digit);
    const uint32_t mask = smla_digit_mask(digit);
    const int64_t few = list->count < BLOCK ? list->count : BLOCK;
    if (has_one_digit(find_common(list->keys, few, prefix_shift, prefix), shift)) {
        const common found = find_common(list->keys, list->count, prefix_shift, prefix);
        if (has_one_digit(found, shift)) {
            counts[found.any >> shift & mask] += found.count;
            return only_key(found);
        }
    }
    for (int64_t i = 0; i < list->count; i++) {
        const uint32_t key = list->keys[i];
        counts[key >> shift & mask] += key >> prefix_shift == prefix;
    }
    return 0;
}

static void
count_keys(const smla_logit_rows *logits, uint32_t key, int64_t *num_above, int64_t *num_equal)
{
    *num_above = 0;
    *num_equal = 0;
    for (int64_t i = 0; i < logits->count; i += BLOCK) {
        uint32_t keys[BLOCK];
        uint32_t above = 0;
        uint32_t equal = 0;
        load_keys(logits, i, keys);
        for (int j = 0; j < BLOCK; j++) {
            above += keys[j] > key;
            equal += keys[j] == key;
        }
        *num_above += above;
        *num_equal += equal;
    }
}

/* ---- Taking -------------------------------------------------------------------------------- */

static int64_t
take_columns(const smla_logit_rows *logits, smla_threshold threshold, int32_t first, int32_t *out)
{
    int64_t num_taken = 0;
    int64_t num_equal = 0;
    for (int64_t i = 0; i < logits->count; i += BLOCK) {
        uint32_t keys[BLOCK];
        int32_t columns[BLOCK];
        const uint32_t least = num_equal < threshold.num_equal ? threshold.key : threshold.key + 1;
        uint32_t num_found = 0;
        int count = 0;
        load_keys(logits, i, keys);
        for (int j = 0; j < BLOCK; j++) {
            num_found += keys[j] >= least;
        }
        for (int j = 0; num_found > 0 && j < BLOCK; j++) {
            const bool is_equal = keys[j] == threshold.key && num_equal < threshold.num_equal;
            columns[count] = (int32_t)(first + i + j);
            count += keys[j] > threshold.key || is_equal;
            num_equal += is_equal;
        }
        memcpy(out + num_taken, columns, (size_t)count * sizeof columns[0]);
        num_taken += count;
    }
    return num_taken;
}

const smla_select_isa SMLA_OF_ISA(smla_select) = {
    .count_digits = count_digits,
    .list_candidates = list_candidates,
    .count_listed_digits = count_listed_digits,
    .count_keys = count_keys,
    .take_columns = take_columns,
};
