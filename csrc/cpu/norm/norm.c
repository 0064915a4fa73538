/* norm.c: fused_q_kv_rmsnorm. norm_kernel.c has the arithmetic. */
#include "cpu/norm/norm.h"

#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"

enum { PARALLEL_ROWS = 64 }; /* fewer rows run on one thread */

smla_status
smla_cpu_fused_q_kv_rmsnorm(const smla_q_kv_norm_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa("fused_q_kv_rmsnorm", &isa, error));
#pragma omp parallel for schedule(static) if (p->num_tokens >= PARALLEL_ROWS)
    for (int64_t token = 0; token < p->num_tokens; token++) {
        for (int i = 0; i < 2; i++) {
            const smla_norm_rows *const rows = &p->rows[i];
            isa->norm->normalize(rows->x + token * rows->x_stride_token, rows->weight,
                                 rows->weight_type, rows->size, p->eps,
                                 rows->out + token * rows->out_stride_token);
        }
    }
    return SMLA_OK;
}
