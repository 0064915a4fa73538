/* avx2.h: what kernels are compiled with on AVX2 and FMA. */
#pragma once

#define SMLA_OF_ISA(name)      name##_avx2
#define SMLA_OF_FP32_ISA(name) name##_avx2
#define SMLA_LANES             8
#define SMLA_BYTE_LANES        8

/* Rows times vectors is the number of accumulators; there are 16 registers. */
enum { KEY_ROWS_1 = 8, KEY_ROWS_2 = 4, VALUE_ROWS_1 = 8, VALUE_ROWS_2 = 4 };
enum { OUTPUT_VECTORS = 2 };

static const char isa_avx2[] __attribute__((used)) = "";
