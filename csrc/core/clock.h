/* clock.h: the time that log lines and interrupts are measured by. */
#pragma once

#include <stdint.h>

/* Nanoseconds since some fixed moment. */
int64_t smla_clock_ns(void);
