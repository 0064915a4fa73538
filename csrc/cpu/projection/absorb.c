/* absorb.c: cuts the product of two weights into tasks, which absorb_kernel.h computes. A task is a
 * block of outputs of one head: rows of x for tokens, latents for outputs of a projection.
 */
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/thread_scratch.h"
#include "cpu/projection/projection.h"

enum { ABSORB_ROWS = 256 }; /* rows that share one unpacking of w */

static smla_status
absorb(const smla_absorb_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    const smla_projection_cut cut = {p->num_rows, p->num_latents, ABSORB_ROWS};
    const int64_t num_tasks = smla_count_projection_tasks(&cut, p->num_heads);
    const smla_scratch_size size = {smla_count_threads(num_tasks),
                                    SMLA_PROJECTION_PANEL_BYTES +
                                        ABSORB_ROWS * SMLA_PROJECTION_SUM_BYTES};
    smla_thread_scratch scratch;
    SMLA_TRY(smla_open_scratch(&scratch, p->call.op, size, error));
    smla_interrupt *const interrupt = smla_find_interrupt();
#pragma omp parallel for schedule(dynamic) num_threads(size.num_parts)
    for (int64_t task = 0; task < num_tasks; task++) {
        if (!smla_is_ended(interrupt)) {
            isa->projection->absorb_block(p, smla_find_projection_block(&cut, task),
                                          smla_own_scratch(&scratch));
        }
    }
    smla_close_scratch(&scratch);
    return smla_check_ended(p->call.op, interrupt, error);
}

smla_status
smla_cpu_absorb_q_proj(const smla_absorb_params *p, smla_error *error)
{
    return absorb(p, error);
}

smla_status
smla_cpu_absorb_o_proj(const smla_absorb_params *p, smla_error *error)
{
    return absorb(p, error);
}
