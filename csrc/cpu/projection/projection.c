/* projection.c: cuts the projections of absorption into tasks, which projection_kernel.c computes.
 *
 * All projections are out[t,h,n] = sum_k x[t,h,k] w(k,h,n), bf16 out, fp32 in between. The up
 * projections differ in which dimension of the weight is summed. The grouped output projection, by
 * groups instead of heads, may have e4m3 values with scales.
 */
#include "cpu/projection/projection.h"
#include "core/fp_mode.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/thread_scratch.h"

smla_status
smla_cpu_projection(const smla_projection_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    const smla_projection_cut cut = {p->num_tokens, p->outer_dim, SMLA_PROJECTION_TOKENS};
    const int64_t num_tasks = smla_count_projection_tasks(&cut, p->num_heads);
    const smla_scratch_size size = {smla_count_threads(num_tasks),
                                    smla_projection_scratch_bytes(p->num_tokens)};
    smla_thread_scratch scratch;
    SMLA_TRY(smla_open_scratch(&scratch, p->call.op, size, error));
    smla_interrupt *const interrupt = smla_find_interrupt();
    const smla_fp_mode before = smla_fp_change(SMLA_FP_FLUSH);
#pragma omp parallel for schedule(static) num_threads(size.num_parts)
    for (int64_t task = 0; task < num_tasks; task++) {
        if (!smla_is_ended(interrupt)) {
            isa->projection->run_block(p, smla_find_projection_block(&cut, task),
                                       smla_own_scratch(&scratch));
        }
    }
    smla_fp_change(before);
    smla_close_scratch(&scratch);
    return smla_check_ended(p->call.op, interrupt, error);
}
