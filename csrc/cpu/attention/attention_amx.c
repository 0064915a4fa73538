/* attention_amx.c: the attention kernel on AMX-BF16, and on AVX-512 BF16 for all but products. */
#define SMLA_ATTENTION      smla_attention_amx
#define SMLA_ATTENTION_FP32 smla_attention_avx512
#define SMLA_SIMD_WIDTH     16

/* A tile has 16 rows, and a tile of heads is multiplied with two tiles of rows. */
enum { KEY_ROWS_1 = 32, KEY_ROWS_2 = 32, VALUE_ROWS_1 = 32, VALUE_ROWS_2 = 32 };

#include "cpu/attention/unit_bf16.h"

#include "cpu/attention/attention_tiles.h"

#include "cpu/attention/attention_finish.h"
