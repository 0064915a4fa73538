/* threads.h: the threads of parallel loops, and when they stop. A file with `#pragma omp parallel
 * for` includes it.
 *
 * GCC turns such a loop into calls of its OpenMP library. The names below make them calls of pool.c
 * instead, so a process that has PyTorch's OpenMP library gets no second one. Another compiler's
 * OpenMP stays as it is, and a build without OpenMP has one thread.
 */
#pragma once

#include "core/interrupt.h"

#if defined(_OPENMP) && defined(__GNUC__) && !defined(__clang__)
#define SMLA_HAVE_POOL 1

__asm__(".set GOMP_parallel, smla_pool_run\n\t"
        ".set GOMP_loop_nonmonotonic_dynamic_start, smla_pool_start_loop\n\t"
        ".set GOMP_loop_nonmonotonic_dynamic_next, smla_pool_next_chunk\n\t"
        ".set GOMP_loop_end_nowait, smla_pool_end_loop\n\t"
        ".set omp_get_num_threads, smla_pool_num_threads\n\t"
        ".set omp_get_thread_num, smla_thread_idx");

/* The largest number of threads that the next parallel loop may have: OMP_NUM_THREADS, else the
 * processors that the process may use. */
int smla_max_threads(void);

/* The number of the share of a parallel loop that the calling thread is doing. */
int smla_thread_idx(void);

/* Whether the calling thread is the one that made the call, not a worker. */
bool smla_is_caller(void);

/* Sets what smla_max_threads returns, for the calls of every thread; for tests. */
void smla_set_max_threads(int count);

#elif defined(_OPENMP)
#include <omp.h>

static inline int
smla_max_threads(void)
{
    return omp_get_max_threads();
}

static inline int
smla_thread_idx(void)
{
    return omp_get_thread_num();
}

static inline bool
smla_is_caller(void)
{
    return omp_get_thread_num() == 0;
}

static inline void
smla_set_max_threads(int count)
{
    omp_set_num_threads(count);
}

#else

static inline int
smla_max_threads(void)
{
    return 1;
}

static inline int
smla_thread_idx(void)
{
    return 0;
}

static inline bool
smla_is_caller(void)
{
    return true;
}

static inline void
smla_set_max_threads(int count)
{
    (void)count;
}
#endif

/* Whether the work items that are left must be skipped. Every thread of a parallel region asks
 * before each of its items. The one that made the call asks the binding, too.
 * `interrupt` is what smla_find_interrupt returned outside the region. */
static inline bool
smla_is_ended(smla_interrupt *interrupt)
{
    if (interrupt == NULL) {
        return false;
    }
    if (smla_is_caller()) {
        smla_ask(interrupt);
    }
    return atomic_load_explicit(&interrupt->is_ended, memory_order_relaxed);
}
