/* needs.h: what a call of attention may need of a kernel, beside its formats and sizes. A kernel
 * says which needs it serves. Where a device's best kernel does not serve a call, the log names the
 * first need that it lacks, in this order.
 */
#pragma once

/* name, words */
#define SMLA_NEEDS(X)                                     \
    X(RANGES, "a first column per token")                 \
    X(QUERY_SCALE, "an e4m3 query or a scale of logits")  \
    X(TYPES, "types")                                     \
    X(SIZES, "sizes of rows")                             \
    X(MASK, "mask")                                       \
    X(SOFTCAP, "softcap or scale")                        \
    X(UNALIGNED, "rows that are not aligned to 16 bytes") \
    X(NO_KEYS, "no keys")                                 \
    X(SPLITS, "num_splits")

#define SMLA_NEED_NUMBER(name, words) SMLA_NEED_##name,
#define SMLA_NEED_BIT(name, words)    SMLA_NEEDS_##name = 1 << SMLA_NEED_##name,

enum { SMLA_NEEDS(SMLA_NEED_NUMBER) SMLA_NUM_NEEDS };
enum { SMLA_NEEDS(SMLA_NEED_BIT) SMLA_NEEDS_ALL = (1 << SMLA_NUM_NEEDS) - 1 };
