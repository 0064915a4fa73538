/* base.h: what kernels are compiled with on any machine: 128-bit vectors (SSE2, NEON).
 *
 * The build includes a file of this folder before the kernel (-include). Each defines
 *   SMLA_OF_ISA(name)        the name of the set's own instance: smla_cache -> smla_cache_base
 *   SMLA_OF_FP32_ISA(name)   that of the set with the same lanes whose multiply unit is fp32
 *   isa_SET                  a symbol that tells smaller_cpu.py which set an object is for
 *   SMLA_LANES               floats of a vector
 *   SMLA_BYTE_LANES          the same in kernels that convert rows of bytes, if the set has them
 *   SMLA_HAVE_BF16_PRODUCTS  where the multiply unit takes pairs of bf16, else it takes fp32
 *   SMLA_HAVE_TILES          where tiles of AMX are multiplied, else vectors
 *   KEY_ROWS_1, VALUE_ROWS_1 keys, or dimensions of values, per step of attention if a group of
 *                            lanes is one vector; KEY_ROWS_2, VALUE_ROWS_2 if it is two
 *   OUTPUT_VECTORS           vectors of outputs per step of a projection, which has four times as
 *                            many accumulators
 */
#pragma once

#define SMLA_OF_ISA(name)      name##_base
#define SMLA_OF_FP32_ISA(name) name##_base
#define SMLA_LANES             4
#define SMLA_BYTE_LANES        4

/* Rows times vectors is the number of accumulators; SSE2 has 16 registers. */
enum { KEY_ROWS_1 = 8, KEY_ROWS_2 = 4, VALUE_ROWS_1 = 8, VALUE_ROWS_2 = 4 };
enum { OUTPUT_VECTORS = 2 };

static const char isa_base[] __attribute__((used)) = "";
