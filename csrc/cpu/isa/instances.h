/* instances.h: which kernels are compiled for which instruction sets. isa.c makes its table of
 * these lists, and buildtools/graph.py the commands that compile them.
 *
 * X(kernel, set) compiles KERNEL_kernel.c with isa/SET.h and the set's flags. This instance exports
 * smla_KERNEL_SET, a table of functions of type smla_KERNEL_isa. Not every kernel gains from every
 * set: where a set has no instance, it takes that of the set before it.
 */
#pragma once

#define SMLA_BASE_KERNELS(X) \
    X(mqa, base)             \
    X(mha, base)             \
    X(projection, base)      \
    X(cache, base)           \
    X(norm, base)            \
    X(rotate, base)          \
    X(logits, base)          \
    X(select, base)          \
    X(slot, base)

#define SMLA_AVX2_KERNELS(X) \
    SMLA_BASE_KERNELS(X)     \
    X(mqa, avx2)             \
    X(mha, avx2)             \
    X(projection, avx2)      \
    X(cache, avx2)           \
    X(norm, avx2)            \
    X(rotate, avx2)          \
    X(logits, avx2)          \
    X(select, avx2)          \
    X(slot, avx2)

#define SMLA_AVX512_KERNELS(X) \
    SMLA_AVX2_KERNELS(X)       \
    X(mqa, avx512)             \
    X(mha, avx512)             \
    X(projection, avx512)      \
    X(cache, avx512)           \
    X(norm, avx512)            \
    X(logits, avx512)          \
    X(select, avx512)          \
    X(slot, avx512)

#define SMLA_AVX512BF16_KERNELS(X) \
    SMLA_AVX512_KERNELS(X)         \
    X(mqa, avx512bf16)             \
    X(mha, avx512bf16)             \
    X(projection, avx512bf16)

#define SMLA_AMX_KERNELS(X)    \
    SMLA_AVX512BF16_KERNELS(X) \
    X(mqa, amx)                \
    X(mha, amx)

#define SMLA_NEON_KERNELS(X) \
    SMLA_BASE_KERNELS(X)     \
    X(mqa, neon)             \
    X(mha, neon)             \
    X(projection, neon)

#define SMLA_NEONBF16_KERNELS(X) \
    SMLA_NEON_KERNELS(X)         \
    X(mqa, neonbf16)             \
    X(mha, neonbf16)             \
    X(projection, neonbf16)
