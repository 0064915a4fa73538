/* neon.h: what kernels are compiled with on NEON without BF16 products. */
#pragma once

#define SMLA_OF_ISA(name)      name##_neon
#define SMLA_OF_FP32_ISA(name) name##_neon
#define SMLA_LANES             4

/* Rows times vectors is the number of accumulators; there are 32 registers. */
enum { KEY_ROWS_1 = 16, KEY_ROWS_2 = 8, VALUE_ROWS_1 = 16, VALUE_ROWS_2 = 8 };
enum { OUTPUT_VECTORS = 4 };

static const char isa_neon[] __attribute__((used)) = "";
