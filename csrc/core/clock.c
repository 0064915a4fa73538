/* clock.c: reads the system's steady clock. */
#define _POSIX_C_SOURCE 199309L /* clock_gettime */ // NOLINT(cert-dcl37-c,cert-dcl51-cpp)

#include "core/clock.h"

#include <time.h>

int64_t
smla_clock_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
