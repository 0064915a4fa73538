/* unlocked.h: work without the GIL that Ctrl-C can end.
 *
 * CPython's own handler of a signal only leaves a note. Python code runs when a thread that holds
 * the GIL looks at the notes: so the main thread takes the GIL for a moment, between work items of
 * a long call of the CPU, and lets the signals' handlers run.
 */
#pragma once

#include "core/fp_mode.h"
#include "core/interrupt.h"
#include "python/glue.h"

typedef struct smla_py_unlocked {
    PyThreadState *thread;
    smla_fp_mode callers_mode; /* signal handlers run in it */
    smla_interrupt interrupt;
    smla_interrupt *outer; /* what was set before; smla_py_lock sets it again */
} smla_py_unlocked;

/* Releases the GIL. The struct must stay where it is until smla_py_lock. */
void smla_py_unlock(smla_py_unlocked *unlocked);

/* Takes the GIL. 0, or -1 with the handler's exception set if a signal has ended the work. */
int smla_py_lock(smla_py_unlocked *unlocked);
