/* isa.h: the instruction sets that kernels are compiled for, and which one a call runs on.
 *
 * A kernel text is compiled once per instruction set (attention_avx2.c, projection_avx2.c, ...).
 * One table holds them all, so attention, projections and cache are always on the same row of it.
 */
#ifndef SMLA_CPU_ISA_H
#define SMLA_CPU_ISA_H

#include "core/backend.h"

struct smla_attention_isa;
struct smla_cache_isa;
struct smla_projection_isa;

typedef struct smla_cpu_isa {
    const char *name;
    bool (*is_supported)(void);
    bool (*is_slow)(void); /* where the next supported row is faster; NULL: nowhere */
    const struct smla_attention_isa *attention;
    const char *attention_source;
    const struct smla_projection_isa *projection;
    const struct smla_cache_isa *cache;
} smla_cpu_isa;

/* The fastest first. */
extern const smla_cpu_isa smla_cpu_isas[];
extern const int smla_cpu_num_isas;

/* The first supported row that is not slow, or the one that the environment variable
 * SPARSE_MLA_CPU_ISA names (for tests). `op` is who asks. */
smla_status smla_cpu_choose_isa(const char *op, const smla_cpu_isa **chosen, smla_error *error);

#endif /* SMLA_CPU_ISA_H */
