/* isa.h: the instruction sets that kernels are compiled for, and which one a call runs on.
 *
 * isa/instances.h lists what is compiled. One table holds all of it, so attention, projections and
 * cache always use the same table entry. The table is isa.c's own: others get the chosen entry,
 * because functions of the other entries may consist of instructions that the machine lacks.
 * buildtools/instruction_sets.py checks that.
 */
#pragma once

#include "core/attention/params_attention.h"
#include "core/backend.h"
#include "cpu/isa/instances.h"

typedef struct smla_cpu_isa {
    const char *name;
    bool (*is_supported)(void);
    bool (*is_slow)(void); /* true where the next supported entry is faster; NULL = never */
    const char *attention_name;
/* The functions of each kernel: `const struct smla_cache_isa *cache`, and so on. */
#define SMLA_KERNEL_FIELD(kernel, set) const struct smla_##kernel##_isa *kernel;
    SMLA_BASE_KERNELS(SMLA_KERNEL_FIELD)
#undef SMLA_KERNEL_FIELD
} smla_cpu_isa;

/* Chooses the first supported entry that is not slow, or the entry that the environment variable
 * SPARSE_MLA_CPU_ISA names (for tests). Errors name the operator `op`. */
smla_status smla_cpu_choose_isa(const char *op, const smla_cpu_isa **chosen, smla_error *error);

/* Scratch of one thread for a kernel of attention, given what its bytes_per are multiplied with. It
 * is enough for every instruction set, because tests may force any of them, and kernels of bf16
 * hand work to others. */
int64_t smla_cpu_attention_scratch_bytes(bool is_mha, const int64_t counts[2]);

/* Describes the table. */
int64_t smla_cpu_kernels(smla_kernel_info *rows, int64_t capacity);
