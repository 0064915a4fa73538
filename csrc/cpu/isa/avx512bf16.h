/* avx512bf16.h: what kernels are compiled with on AVX-512 BF16 and VBMI. */
#pragma once

#define SMLA_OF_ISA(name)       name##_avx512bf16
#define SMLA_OF_FP32_ISA(name)  name##_avx512
#define SMLA_LANES              16
#define SMLA_HAVE_BF16_PRODUCTS 1

/* Rows times vectors is the number of accumulators; there are 32 registers. */
enum { KEY_ROWS_1 = 8, KEY_ROWS_2 = 8, VALUE_ROWS_1 = 16, VALUE_ROWS_2 = 8 };
enum { OUTPUT_VECTORS = 4 };

static const char isa_avx512bf16[] __attribute__((used)) = "";
