/* unlocked.c: lets signals end what runs without the GIL; see unlocked.h. */
#define _DEFAULT_SOURCE /* syscall */ // NOLINT(cert-dcl37-c,cert-dcl51-cpp)

#include "python/call/unlocked.h"

#include <sys/syscall.h>
#include <unistd.h>

/* Python runs signal handlers in its main thread alone. Other threads need not wait for the GIL. */
static bool
is_main_thread(void)
{
    return syscall(SYS_gettid) == getpid();
}

static bool
run_signal_handlers(void *context)
{
    smla_py_unlocked *const unlocked = context;
    if (!is_main_thread()) {
        return false;
    }
    /* A handler may call the library, too. */
    smla_interrupt *const own = smla_set_interrupt(NULL);
    const smla_fp_mode mode = smla_fp_change(unlocked->callers_mode);
    PyEval_RestoreThread(unlocked->thread);
    const bool raised = PyErr_CheckSignals() < 0;
    unlocked->thread = PyEval_SaveThread();
    (void)smla_fp_change(mode);
    (void)smla_set_interrupt(own);
    return raised;
}

void
smla_py_unlock(smla_py_unlocked *unlocked)
{
    unlocked->callers_mode = smla_fp_read();
    unlocked->interrupt.wants_end = run_signal_handlers;
    unlocked->interrupt.context = unlocked;
    unlocked->interrupt.ask_at_ns = 0;
    atomic_init(&unlocked->interrupt.is_ended, false);
    unlocked->outer = smla_set_interrupt(&unlocked->interrupt);
    unlocked->thread = PyEval_SaveThread();
}

int
smla_py_lock(smla_py_unlocked *unlocked)
{
    PyEval_RestoreThread(unlocked->thread);
    (void)smla_set_interrupt(unlocked->outer);
    return atomic_load(&unlocked->interrupt.is_ended) ? -1 : 0;
}
