/* threads.h: thread numbers from OpenMP's run-time library, one thread in a build without it; and
 * when threads stop. */
#pragma once

#include "core/interrupt.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

/* The largest number of threads that the next parallel region may have. */
static inline int
smla_max_threads(void)
{
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return 1;
#endif
}

/* The number of the calling thread inside a parallel region. */
static inline int
smla_thread_idx(void)
{
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Whether the work items that are left must be skipped. Every thread of a parallel region asks
 * before each of its items. Thread 0 is the one that made the call, and asks the binding, too.
 * `interrupt` is what smla_find_interrupt returned outside the region. */
static inline bool
smla_is_ended(smla_interrupt *interrupt)
{
    if (interrupt == NULL) {
        return false;
    }
    if (smla_thread_idx() == 0) {
        smla_ask(interrupt);
    }
    return atomic_load_explicit(&interrupt->is_ended, memory_order_relaxed);
}
