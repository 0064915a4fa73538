/* threads.h: thread numbers from OpenMP's run-time library; one thread in a build without it. */
#pragma once

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
