/* varlen_amx.c: the kernel of varlen_attention on AMX-BF16, and on AVX-512 BF16 for all but
 * products. */
#define SMLA_VARLEN      smla_varlen_amx
#define SMLA_VARLEN_FP32 smla_varlen_avx512
#define SMLA_SIMD_WIDTH  16

/* A tile has 16 rows, and a tile of lanes is multiplied with two tiles of rows. */
enum { KEY_ROWS_1 = 32, KEY_ROWS_2 = 32, VALUE_ROWS_1 = 32, VALUE_ROWS_2 = 32 };

#include "cpu/varlen/rows_bf16.h"

#include "cpu/attention/attention_tiles.h"

#include "cpu/varlen/varlen_kernel.h"
