/* amx.h: what kernels are compiled with on AMX-BF16; AVX-512 BF16 does all but products. */
#pragma once

#define SMLA_OF_ISA(name)       name##_amx
#define SMLA_OF_FP32_ISA(name)  name##_avx512
#define SMLA_LANES              16
#define SMLA_HAVE_BF16_PRODUCTS 1
#define SMLA_HAVE_TILES         1

/* A tile has 16 rows, and a tile of lanes is multiplied with two tiles of rows. */
enum { KEY_ROWS_1 = 32, KEY_ROWS_2 = 32, VALUE_ROWS_1 = 32, VALUE_ROWS_2 = 32 };

static const char isa_amx[] __attribute__((used)) = "";
