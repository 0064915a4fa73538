/* attention.c: runs the tasks of attention on the CPU's threads, whichever kernel they are for. */
#include "cpu/attention/attention.h"
#include "core/fp_mode.h"
#include "cpu/machine/threads.h"

static void
run_loop(const smla_attention_work *work, const smla_attention_loop *loop,
         smla_interrupt *interrupt)
{
#pragma omp parallel for schedule(dynamic, 1) num_threads(loop->num_threads)
    for (int64_t task = 0; task < loop->num_tasks; task++) {
        if (!smla_is_ended(interrupt)) {
            loop->run(work, task);
        }
    }
}

smla_status
smla_run_attention(const smla_attention_work *work, const smla_attention_loop *loops, int num_loops,
                   smla_error *error)
{
    smla_interrupt *const interrupt = smla_find_interrupt();
    const smla_fp_mode before = smla_fp_change(SMLA_FP_FLUSH);
    for (int i = 0; i < num_loops; i++) {
        run_loop(work, &loops[i], interrupt);
    }
    smla_fp_change(before);
    return smla_check_ended(work->params->call.op, interrupt, error);
}
