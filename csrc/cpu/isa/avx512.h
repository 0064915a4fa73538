/* avx512.h: what kernels are compiled with on AVX-512 without BF16 products. */
#pragma once

#define SMLA_OF_ISA(name)      name##_avx512
#define SMLA_OF_FP32_ISA(name) name##_avx512
#define SMLA_LANES             16

/* Rows are converted in vectors of AVX2, too, because bytes_avx2.h has no conversions of 16 lanes;
 * they are 1.2 to 1.8 times as fast on a Sapphire Rapids (RESULTS.md). e2m1 is rounded by
 * instructions of AVX-512. */
#define SMLA_BYTE_LANES 8

/* Rows times vectors is the number of accumulators; there are 32 registers. */
enum { KEY_ROWS_1 = 8, KEY_ROWS_2 = 4, VALUE_ROWS_1 = 16, VALUE_ROWS_2 = 8 };
enum { OUTPUT_VECTORS = 4 };

static const char isa_avx512[] __attribute__((used)) = "";
